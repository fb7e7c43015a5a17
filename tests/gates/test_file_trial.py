"""The trial of a kernel file: whatever the file does becomes a verdict."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from polyjax.compiler import kernel_files
from polyjax.compiler.program import Kind
from polyjax.core.buckets import Bucket
from polyjax.core.kernel_source import KernelSource, digest_of, kernel_name
from polyjax.gates.file_trial import FileTrial, FileTrialProcess, TrialEnd, judge
from tests import tiny_llama
from tests.engine import kernel_texts as texts

RIGHT, PALLAS = texts.HEAD + texts.RIGHT, texts.HEAD + texts.PALLAS
DECODE = tiny_llama.request(Kind.DECODE_GREEDY, Bucket(1, 4, 4))


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernel_files, "_allowed", True)
    kernel_files.load_kernel.cache_clear()
    yield
    kernel_files.load_kernel.cache_clear()


def trial_of(folder: Path, text: str, op: str | None = None) -> FileTrial:
    source = KernelSource(str(folder / f"{digest_of(text)}.py"), digest_of(text))
    name = kernel_name(source.sha256, "norm")
    return FileTrial(name, text, source, op, (DECODE,), seed=7)


def judged(folder: Path, text: str, op: str | None = None) -> list[dict[str, Any]]:
    """Everything a trial says, run in this process."""
    said: list[dict[str, Any]] = []
    judge(trial_of(folder, text, op), lambda **fields: said.append(fields))
    return said


@pytest.mark.usefixtures("allowed")
def test_right_kernels_get_choices_for_the_plans_workloads(tmp_path: Path) -> None:
    for text, schedule in ((RIGHT, {"pieces": 1}), (PALLAS, {})):
        said = judged(tmp_path, text, "rms_norm")
        [(key, choice)] = said[-1]["choices"].items()
        assert key == "rms_norm[M=4,D=64|x:float32,weight:float32|eps=1e-05]"
        assert choice == {"kernel": trial_of(tmp_path, text).name, "schedule": schedule}
        gates = [line["verdict"]["gate"] for line in said if "verdict" in line]
        assert gates[0] == "declaration" and gates[-1] == "environment" and len(gates) == 7


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(
    ("text", "gate", "reason"),
    [
        (texts.HEAD + texts.WRONG_VALUES, "op_equivalence", "times the bound"),
        (texts.WRONG_PAGE, "op_equivalence", "instead of"),
        (texts.HEAD + texts.OTHER_SHAPE, "declaration", r"returns .*instead of"),
        (texts.HEAD + texts.NO_BUILD, "kernel_file", "no function build"),
        (texts.HEAD + texts.RAISES_AT_IMPORT, "kernel_file", "RuntimeError: no luck"),
        (texts.NO_SYNTAX, "kernel_file", "SyntaxError"),
        ("import sys\nsys.exit(3)", "kernel_file", "SystemExit"),
        (RIGHT.replace("% 4 == 0", "< 0"), "kernel_file", "supports none of the plan's 1"),
        (RIGHT + "\nOP = ops.ROUTE", "kernel_file", "calls no route"),
        (PALLAS.replace("pl.pallas_call(body, out_shape=shape, interpret=True)(x, weight)",
                        "x * weight * jax.lax.rsqrt((x*x).mean(-1, keepdims=True) + eps)"),
         "declaration", "no Pallas kernel"),
    ],
)  # fmt: skip
def test_wrong_kernels_are_refused(tmp_path: Path, text: str, gate: str, reason: str) -> None:
    refused = judged(tmp_path, text)[-1]["refused"]
    assert refused["gate"] == gate
    assert re.search(reason, refused["reason"]), refused


@pytest.mark.usefixtures("allowed")
def test_another_op_than_announced(tmp_path: Path) -> None:
    assert (
        "computes rms_norm, not matmul"
        in judged(tmp_path, RIGHT, "matmul")[-1]["refused"]["reason"]
    )


@pytest.mark.usefixtures("allowed")
def test_a_damaged_copy_is_written_anew(tmp_path: Path) -> None:
    path = Path(trial_of(tmp_path, RIGHT).source.path)
    path.write_text("torn")
    assert "choices" in judged(tmp_path, RIGHT)[-1]
    assert path.read_text() == RIGHT


def test_a_process_that_hangs_crashes_or_leaves_is_a_verdict(tmp_path: Path) -> None:
    """Side by side, because starting a process takes seconds."""
    spawns = "import subprocess\nsubprocess.Popen(['sleep', '3600'])\n"
    hang = FileTrialProcess(
        trial_of(tmp_path, texts.HEAD + spawns + texts.HANGS_AT_IMPORT), timeout_s=1e9
    )
    crash = FileTrialProcess(trial_of(tmp_path, texts.HEAD + texts.CRASHES_AT_IMPORT))
    leave = FileTrialProcess(trial_of(tmp_path, texts.HEAD + texts.EXITS_AT_IMPORT))
    children = psutil.Process(hang.pid)
    ends: dict[FileTrialProcess, TrialEnd] = {}
    while len(ends) < 2 or not children.children():
        for process in (hang, crash, leave):
            if process not in ends and (end := process.poll()) is not None:
                ends[process] = end
        time.sleep(0.02)
    assert hang not in ends
    [sleeper] = children.children()
    hang._timeout_s = 0.0
    ends[hang] = hang.poll() or pytest.fail("still running")
    sleeper.wait(10)  # what the file started ends with it
    reasons = {process: end.refused.reason for process, end in ends.items() if end.refused}
    assert reasons[crash] == "loading the file: the process ended with code -11"
    assert reasons[leave] == "loading the file: the process ended with code 0"
    assert reasons[hang] == "loading the file: did not finish within 0 s"
