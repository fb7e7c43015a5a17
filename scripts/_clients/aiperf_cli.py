"""aiperf's profile over chat and text completions, with its scrape of /metrics; see report.py."""

from __future__ import annotations

import importlib.metadata
import json
import os
from typing import Any

from report import Arguments, Checks, arguments, run_command

REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 32, 16
SCRAPED = ("vllm:num_requests_running", "vllm:generation_tokens", "vllm:kv_cache_usage_perc")


def profile(given: Arguments, endpoint: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs aiperf; returns its figures and what it scraped from the server."""
    folder = given.work / endpoint
    run_command(
        [
            *("aiperf", "profile", "--model", given.model, "--url", given.url, "--streaming"),
            *("--endpoint-type", endpoint, "--concurrency", "2"),
            *("--request-count", str(REQUESTS), "--extra-inputs", "ignore_eos:true"),
            *("--synthetic-input-tokens-mean", str(PROMPT_TOKENS)),
            *("--output-tokens-mean", str(OUTPUT_TOKENS)),
            *("--tokenizer", str(given.tokenizer), "--ui", "simple"),
            *("--artifact-dir", str(folder)),
        ],
        # Offline mode would look for the directory in the hub's cache.
        {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"},
    )
    figures = json.loads((folder / "profile_export_aiperf.json").read_text())
    scraped = json.loads((folder / "server_metrics_export.json").read_text())
    return figures, scraped["metrics"]


def check(figures: dict[str, Any], scraped: dict[str, Any]) -> None:
    assert figures["request_count"]["avg"] == REQUESTS and not figures["error_summary"], figures
    # As the server reports them. The tool's own count is of the text tokenized again, which may
    # give fewer: special tokens are not in it, and others join.
    lengths = figures["usage_completion_tokens"]
    assert lengths["min"] == lengths["max"] == OUTPUT_TOKENS, lengths
    for latency in ("time_to_first_token", "inter_token_latency"):
        assert figures[latency]["min"] > 0, figures[latency]
    assert not [name for name in SCRAPED if name not in scraped], sorted(scraped)


def main() -> None:
    given = arguments()
    checks = Checks("aiperf", importlib.metadata.version("aiperf"))

    @checks.run("chat, streamed: all succeed, every token timed, /metrics scraped")
    def _chat() -> None:
        check(*profile(given, "chat"))

    @checks.run("completions, streamed: all succeed, every token timed, /metrics scraped")
    def _text() -> None:
        check(*profile(given, "completions"))

    checks.finish()


if __name__ == "__main__":
    main()
