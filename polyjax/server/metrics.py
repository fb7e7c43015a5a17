"""/metrics: the names that vLLM's dashboards and routers know, and polyjax's own.

Latencies are intervals of one HTTP process's monotonic clock. What the engine counts comes from
its heartbeat. With several HTTP processes, prometheus_client merges their histograms through files
in PROMETHEUS_MULTIPROC_DIR, which must be set before this module is imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from polyjax.engine.client import EngineClient
from polyjax.engine.types import EngineInfo
from polyjax.server.choice import Choice

disable_created_metrics()  # they double the exposition

# Bucket borders are vLLM's, so that its dashboards' quantiles mean the same here.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
WHOLE_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)


def one_two_five(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to `limit`."""
    series = (mantissa * 10**exponent for exponent in range(12) for mantissa in (1, 2, 5))
    return [float(border) for border in series if border <= limit]


class Metrics:
    """Everything one HTTP process observes about requests to one model."""

    def __init__(self, prefix: str, info: EngineInfo, client: EngineClient):
        self._registry = CollectorRegistry()
        self._prefix = prefix
        self._labels = {"model_name": info.model_name, "engine": "0"}
        token_borders = one_two_five(info.max_model_len)
        self._first_token = self._histogram("time_to_first_token_seconds", FIRST_TOKEN_S)
        self._between_tokens = self._histogram("inter_token_latency_seconds", BETWEEN_TOKENS_S)
        self._per_output_token = self._histogram(
            "request_time_per_output_token_seconds", BETWEEN_TOKENS_S
        )
        self._end_to_end = self._histogram("e2e_request_latency_seconds", WHOLE_REQUEST_S)
        self._queue = self._histogram("request_queue_time_seconds", WHOLE_REQUEST_S)
        self._prefill = self._histogram("request_prefill_time_seconds", WHOLE_REQUEST_S)
        self._decode = self._histogram("request_decode_time_seconds", WHOLE_REQUEST_S)
        self._inference = self._histogram("request_inference_time_seconds", WHOLE_REQUEST_S)
        self._prompt_tokens = self._histogram("request_prompt_tokens", token_borders)
        self._generated_tokens = self._histogram("request_generation_tokens", token_borders)
        self._max_generated = self._histogram("request_max_num_generation_tokens", token_borders)
        self._max_tokens = self._histogram("request_params_max_tokens", token_borders)
        self._n = self._histogram("request_params_n", CHOICES)
        self._iteration = self._histogram("iteration_tokens_total", ITERATION_TOKENS)
        self._success = Counter(
            f"{prefix}request_success",
            "Choices that ended by themselves, by how.",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        self._http_cpu = Counter(
            "polyjax_http_cpu_seconds",
            "Processor time of the HTTP processes.",
            list(self._labels),
            registry=self._registry,
        ).labels(**self._labels)
        http_phase = Counter(
            "polyjax_http_phase_seconds",
            "Part of it that requests took to be checked and tokenised, and answers to be made "
            "text, by phase; counted when they are.",
            [*self._labels, "phase"],
            registry=self._registry,
        )
        self._tokenise = http_phase.labels(**self._labels, phase="tokenise")
        self._detokenise = http_phase.labels(**self._labels, phase="detokenise")
        self._counted_cpu_s = time.process_time()
        self._engine_registry = CollectorRegistry()
        self._engine_registry.register(EngineCollector(prefix, self._labels, info, client))

    def _histogram(self, name: str, borders: tuple[float, ...] | list[float]) -> Histogram:
        return Histogram(
            f"{self._prefix}{name}",
            name.replace("_", " ").capitalize() + ".",
            list(self._labels),
            buckets=borders,
            registry=self._registry,
        ).labels(**self._labels)

    def on_request(self, n: int, max_tokens: int | None, tokenise_s: float) -> None:
        """`tokenise_s` is how long it took to check and tokenise the request."""
        self._tokenise.inc(tokenise_s)
        self._n.observe(n)
        if max_tokens is not None:
            self._max_tokens.observe(max_tokens)

    def on_token(self, choice: Choice, previous_token_s: float) -> None:
        """`previous_token_s` is 0.0 for the first token of a choice."""
        times = choice.times
        if previous_token_s:
            self._between_tokens.observe(times.last_token_s - previous_token_s)
        else:
            self._first_token.observe(times.first_token_s - times.arrival_s)

    def on_finished(self, choice: Choice) -> None:
        times, tokens = choice.times, choice.num_tokens
        self._detokenise.inc(times.detokenise_s)
        decode_s = times.last_token_s - times.first_token_s
        self._success.labels(**self._labels, finished_reason=choice.finish_reason).inc()
        self._end_to_end.observe(times.last_token_s - times.arrival_s)
        self._decode.observe(decode_s)
        if times.scheduled_s:
            self._queue.observe(times.scheduled_s - times.arrival_s)
            self._prefill.observe(times.first_token_s - times.scheduled_s)
            self._inference.observe(times.last_token_s - times.scheduled_s)
        if tokens > 1:
            self._per_output_token.observe(decode_s / (tokens - 1))
        self._prompt_tokens.observe(len(choice.prompt_token_ids))
        self._generated_tokens.observe(tokens)
        self._max_generated.observe(choice.params.max_tokens or tokens)

    def on_iteration(self, tokens: int) -> None:
        """Tokens of a step, sampled at each heartbeat."""
        self._iteration.observe(tokens)

    def count_cpu(self) -> None:
        """Adds what processor time this process has taken since the last call."""
        now_s = time.process_time()
        self._http_cpu.inc(now_s - self._counted_cpu_s)
        self._counted_cpu_s = now_s

    def render(self) -> bytes:
        """The exposition text of all HTTP processes together."""
        registry = self._registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        return generate_latest(self._engine_registry) + generate_latest(registry)


class EngineCollector(Collector):
    """The engine's statistics; the same whichever HTTP process is asked."""

    def __init__(self, prefix: str, labels: dict[str, str], info: EngineInfo, client: EngineClient):
        self._prefix = prefix
        self._labels = labels
        self._info = info
        self._client = client

    def collect(self) -> Iterator[Metric]:
        stats, info, prefix = self._client.stats, self._info, self._prefix
        gauges = {
            f"{prefix}num_requests_running": (stats.running, "Sequences in the running batch."),
            f"{prefix}num_requests_waiting": (stats.waiting, "Sequences waiting for a place."),
            f"{prefix}kv_cache_usage_perc": (stats.kv_usage, "Share of KV pages in use, 0 to 1."),
            f"{prefix}gpu_cache_usage_perc": (stats.kv_usage, "Older name of kv_cache_usage_perc."),
            "polyjax_plan_epoch": (stats.epoch, "Number of the plan and weights in force."),
            "polyjax_sleep_level": (stats.sleep_level, "0 while awake."),
            "polyjax_heartbeat_age_seconds": (
                self._client.heartbeat_age_s,
                "Seconds since the engine was last between two steps.",
            ),
            "polyjax_step_programs": (info.num_programs, "Step programs ready at start-up."),
            "polyjax_load_seconds": (info.load_s, "Time that loading the weights took."),
            "polyjax_compile_seconds": (info.compile_s, "Time that the step programs took."),
        }
        counters = {
            f"{prefix}prompt_tokens": (stats.prompt_tokens, "Prompt tokens computed."),
            f"{prefix}generation_tokens": (stats.generation_tokens, "Tokens generated."),
            f"{prefix}num_preemptions": (stats.preemptions, "Sequences preempted."),
            f"{prefix}prefix_cache_queries": (
                stats.prefix_queries_tokens,
                "Prompt tokens looked up in the prefix cache.",
            ),
            f"{prefix}prefix_cache_hits": (
                stats.prefix_hits_tokens,
                "Prompt tokens found in the prefix cache.",
            ),
            "polyjax_steps": (stats.step, "Engine steps."),
            "polyjax_swaps": (stats.swaps, "Plans installed while serving."),
            "polyjax_rollbacks": (stats.rollbacks, "Plans rolled back."),
            "polyjax_compiles_after_ready": (
                stats.compiles_after_ready,
                "Compilations on the request path; should stay 0.",
            ),
            "polyjax_retraces_after_ready": (
                stats.retraces_after_ready,
                "Retraces on the request path; should stay 0.",
            ),
        }
        for name, (value, help_text) in gauges.items():
            yield self._gauge(name, help_text, value)
        for name, (value, help_text) in counters.items():
            family = CounterMetricFamily(name, help_text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family
        phases = GaugeMetricFamily(
            "polyjax_phase_us", "Time of a step's phases.", labels=[*self._labels, "phase"]
        )
        for phase, duration_us in sorted(stats.phase_us.items()):
            phases.add_metric([*self._labels.values(), phase], duration_us)
        yield phases
        spent = CounterMetricFamily(
            "polyjax_phase_seconds",
            "Time of the engine's loop by phase; readback is waiting for the device.",
            labels=[*self._labels, "phase"],
        )
        for phase, total_s in sorted(stats.phase_s.items()):
            spent.add_metric([*self._labels.values(), phase], total_s)
        yield spent
        yield self._gauge("polyjax_plan_info", "Digest in force.", 1, digest=stats.plan_digest)
        weights = {"path": stats.weights_path, "digest": stats.weights_digest}
        yield self._gauge("polyjax_weights_info", "Weights in force.", 1, **weights)
        pages = {"block_size": str(info.block_size), "num_gpu_blocks": str(info.num_kv_pages)}
        yield self._gauge(f"{prefix}cache_config_info", "Size of the KV cache.", 1, **pages)

    def _gauge(self, name: str, help_text: str, value: float, **more: str) -> Metric:
        labels = {**self._labels, **more}
        family = GaugeMetricFamily(name, help_text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family
