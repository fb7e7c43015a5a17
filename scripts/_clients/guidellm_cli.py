"""guidellm's benchmark with synthetic prompts, over chat and text completions; see report.py."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

from report import Arguments, Checks, arguments, run_command

REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 32, 16


def benchmark(given: Arguments, request_format: str) -> dict[str, Any]:
    """Runs guidellm; returns the metrics of its one benchmark."""
    output = given.work / f"{Path(request_format).name}.json"
    shape = f"prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    run_command(
        [
            *("guidellm", "run", "--disable-console-interactive"),
            *("--backend", f"kind=openai_http,target={given.url},request_format={request_format}"),
            *("--profile", "kind=concurrent,streams=2"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--tokenizer", f"kind=hf_auto,model={given.tokenizer}"),
            *("--data", f"kind=synthetic_text,{shape}"),
            *("--output", f"kind=json,path={output}"),
        ],
        {**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    [one] = json.loads(output.read_text())["benchmarks"]
    metrics: dict[str, Any] = one["metrics"]
    return metrics


def check(metrics: dict[str, Any]) -> None:
    totals = metrics["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0), totals
    output = metrics["output_token_count"]["successful"]
    assert output["min"] == output["max"] == OUTPUT_TOKENS, output
    assert metrics["time_to_first_token_ms"]["successful"]["min"] > 0
    assert metrics["inter_token_latency_ms"]["successful"]["min"] > 0


def main() -> None:
    given = arguments()
    checks = Checks("guidellm", importlib.metadata.version("guidellm"))

    @checks.run("concurrent streams of chat completions: all succeed, every token timed")
    def _chat() -> None:
        check(benchmark(given, "/v1/chat/completions"))

    @checks.run("concurrent streams of text completions: all succeed, every token timed")
    def _text() -> None:
        check(benchmark(given, "/v1/completions"))

    checks.finish()


if __name__ == "__main__":
    main()
