"""First runs: sound programs pass; what is wrong with another is an answer, not an end."""

import dataclasses
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from polyjax.compiler import program as programs
from polyjax.compiler.cache import ProgramCache
from polyjax.compiler.program import Kind, ProgramRequest, StepProgram
from polyjax.compiler.worker import CompilerProcess
from polyjax.core.buckets import Bucket
from polyjax.gates import first_run as module
from polyjax.gates.first_run import first_run, small_spec
from tests import tiny_llama

SPEC = tiny_llama.spec(num_pages=1000)
DECODE = tiny_llama.request(Kind.DECODE_GREEDY, Bucket(1, 2, 4), spec=SPEC)
HEADS = (
    tiny_llama.request(Kind.SAMPLE_GREEDY, Bucket(1, 2, 0), spec=SPEC),
    tiny_llama.request(Kind.SAMPLE_FULL, Bucket(1, 2, 0), spec=SPEC),
    tiny_llama.request(Kind.SCORE, Bucket(2, 1, 0), spec=SPEC),
)


def test_the_pool_of_a_first_run_is_small() -> None:
    assert small_spec(SPEC).num_pages == (1 + 7 + SPEC.scratch_pages,)
    assert small_spec(tiny_llama.spec(num_pages=12)).num_pages == (12,)


@pytest.mark.parametrize("request_", [DECODE, *HEADS], ids=lambda r: r.key.kind.value)
def test_sound_programs_pass(request_: ProgramRequest) -> None:
    first_run(request_)


@pytest.fixture(scope="module")
def decode() -> StepProgram:
    request = dataclasses.replace(DECODE, spec=small_spec(SPEC))
    return programs.compile_program(request, request.plan.mesh.mesh())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda kv, last, tokens, hidden, *_: (kv, last, tokens, hidden * jnp.nan), "not finite"),
        (lambda kv, last, tokens, hidden, *_: (kv, last, tokens + 10**6, hidden), "sampled token"),
        (
            lambda kv, last, *rest: ((kv[0], kv[1].at[2].add(1)), last, *rest),
            "layer 1: page 2 changed",
        ),
    ],
)
def test_broken_programs_are_named(
    decode: StepProgram,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[..., Any],
    reason: str,
) -> None:
    broken: Any = lambda *args: change(*decode.executable(*args))  # noqa: E731
    candidate = dataclasses.replace(decode, executable=broken)
    monkeypatch.setattr(module, "compile_program", lambda request, mesh: candidate)
    with pytest.raises(AssertionError, match=reason):
        first_run(DECODE)


def test_a_hang_and_a_crash_end_their_process_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands in for a program that never ends, and for one that takes its process along."""
    (tmp_path / "stubborn_first_run.py").write_text(
        textwrap.dedent("""
        import os, time
        from polyjax.compiler.worker import answer_requests

        def work(request, cache):
            if request.key.bucket.sequences == 1:
                os.abort()
            time.sleep(600 if request.key.bucket.sequences == 2 else 0)
            return ""

        answer_requests(work, "first run")
        """)
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = CompilerProcess(
        ProgramCache(tmp_path), timeout_s=30, module="stubborn_first_run", name="first-run"
    )
    answers = []
    try:
        for count in (1, 4, 2):
            process.submit(dataclasses.replace(DECODE, key=_key(count)))
        deadline_s = time.monotonic() + 120
        while len(answers) < 3 and time.monotonic() < deadline_s:
            answers += process.poll(0.2)
            if len(answers) == 2:
                process._timeout_s = 0.5  # only now: starting takes as long as it takes
    finally:
        process.close()
    crashed, sound, hung = (answer.error for answer in answers)
    assert crashed == "the first-run process ended with code -6"
    assert sound is None
    assert hung == "the first-run did not finish within 0.5 s"


def _key(sequences: int) -> programs.ProgramKey:
    return programs.ProgramKey(Kind.DECODE_GREEDY, Bucket(1, sequences, 4))
