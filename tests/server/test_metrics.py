"""/metrics is what scrapers expect, and its figures are true."""

from prometheus_client.parser import text_string_to_metric_families

from tests.server.serving import MAX_MODEL_LEN, Server, wait_for

STANDARD = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "cache_config_info": "gauge",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "num_preemptions": "counter",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "request_success": "counter",
    "iteration_tokens_total": "histogram",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "request_max_num_generation_tokens": "histogram",
    "request_params_n": "histogram",
    "request_params_max_tokens": "histogram",
}
OWN = {
    "polyjax_swaps": "counter",
    "polyjax_rollbacks": "counter",
    "polyjax_compiles_after_ready": "counter",
    "polyjax_retraces_after_ready": "counter",
    "polyjax_plan_epoch": "gauge",
    "polyjax_phase_us": "gauge",
    "polyjax_phase_seconds": "counter",
    "polyjax_http_cpu_seconds": "counter",
    "polyjax_http_phase_seconds": "counter",
}


def test_names_types_and_labels(server: Server) -> None:
    server.complete("abc", max_tokens=4)
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    families = {f.name: f for f in text_string_to_metric_families(response.text)}
    for name, kind in {f"vllm:{name}": kind for name, kind in STANDARD.items()}.items():
        assert families[name].type == kind, name
        for sample in families[name].samples:
            assert {"model_name", "engine"} <= set(sample.labels)
    assert {name: families[name].type for name in OWN} == OWN


def test_figures(server: Server) -> None:
    def value(name: str, **labels: str) -> float:
        return server.metric(f"vllm:{name}", **labels)

    server.complete("warm", max_tokens=1)
    names = (
        "request_prompt_tokens_sum",
        "request_generation_tokens_sum",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_count",
        "request_params_n_sum",
    )
    before = {name: value(name) for name in names}
    prompt_before, generated_before = value("prompt_tokens_total"), value("generation_tokens_total")
    server.complete("abcd", max_tokens=5, n=2)
    after = {name: value(name) for name in names}
    assert [after[name] - before[name] for name in names] == [8, 10, 2, 8, 2, 2]
    assert value("request_success_total", finished_reason="length") >= 2

    def counted() -> bool:
        prompt = value("prompt_tokens_total") - prompt_before
        return (prompt, value("generation_tokens_total") - generated_before) >= (8, 10)

    wait_for(counted, "the heartbeat to bring the engine's counts")


def test_time_spent_is_counted_by_phase(server: Server) -> None:
    def spent() -> list[float]:
        phases = ("tokenise", "detokenise")
        return [
            *(server.metric("polyjax_http_phase_seconds_total", phase=phase) for phase in phases),
            server.metric("polyjax_http_cpu_seconds_total"),
            server.metric("polyjax_phase_seconds_total", phase="send"),
        ]

    server.complete("warm", max_tokens=1)
    before = spent()
    server.complete("abc" * 200, max_tokens=200)
    wait_for(
        lambda: all(b > a for a, b in zip(before, spent(), strict=True)), "every phase to grow"
    )


def test_borders_of_histograms(server: Server) -> None:
    text = server.http.get("/metrics").text
    first_token = [
        line for line in text.splitlines() if "time_to_first_token_seconds_bucket" in line
    ]
    assert 'le="0.001"' in first_token[0] and 'le="2560.0"' in first_token[-2]
    tokens = [line for line in text.splitlines() if "request_prompt_tokens_bucket" in line]
    assert [line.partition('le="')[2].partition('"')[0] for line in tokens][-3:] == [
        "1000.0",
        "2000.0",  # the last of 1, 2, 5, ... within the context
        "+Inf",
    ]
    assert MAX_MODEL_LEN < 5000
