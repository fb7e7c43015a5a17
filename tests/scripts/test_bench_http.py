"""scripts/bench_http counts what HTTP processes stream, and ends its servers."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_small_target_fits_into_one_process(tmp_path: Path) -> None:
    output = tmp_path / "http.jsonl"
    flags = ["--counts=1", "--streams=2", "--target=100", "--tokens=16", "--prompt_tokens=4"]
    result = subprocess.run(
        [sys.executable, "scripts/bench_http", f"--output={output}", *flags],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "100 tokens/s fit into: " in result.stdout
    lines = {line["metric"]: line for line in map(json.loads, output.read_text().splitlines())}
    assert len(lines["http_tokens_per_s_1_processes"]["samples"]) == 3
