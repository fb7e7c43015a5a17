"""The compiler process: compiles into the cache, and nothing it does harms whoever asked."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyjax.compiler.cache import ProgramCache
from polyjax.compiler.program import Kind, ProgramRequest
from polyjax.compiler.worker import Compiled, CompilerProcess
from tests import tiny_llama

READ = tiny_llama.request(Kind.READ_SCRATCH)
MESH = READ.plan.mesh.mesh()


def answers(compiler: CompilerProcess, count: int = 1, timeout_s: float = 120.0) -> list[Compiled]:
    done: list[Compiled] = []
    deadline_s = time.monotonic() + timeout_s
    while len(done) < count and time.monotonic() < deadline_s:
        done += compiler.poll(wait_s=0.2)
    return done


def process_of(compiler: CompilerProcess) -> int:
    pid = compiler.pid
    assert pid is not None
    return pid


@pytest.fixture
def compiler(tmp_path: Path) -> Iterator[CompilerProcess]:
    process = CompilerProcess(ProgramCache(tmp_path))
    yield process
    process.close()


def test_it_compiles_reports_errors_and_survives_a_kill(
    compiler: CompilerProcess, tmp_path: Path
) -> None:
    """One test, because starting the process takes seconds."""
    wrong = tiny_llama.request(Kind.READ_SCRATCH, compiler_options={"no_such_option": "1"})
    for request in (READ, wrong):
        compiler.submit(request)
    good, bad = answers(compiler, 2)
    assert (good.entry, good.error) == (ProgramCache(tmp_path).path(READ, MESH).name, None)
    loaded = ProgramCache(tmp_path).load(READ, MESH)
    assert loaded is not None
    assert loaded.key == READ.key
    assert bad.error is not None
    assert "no_such_option" in bad.error
    pid = process_of(compiler)

    os.kill(pid, signal.SIGSTOP)  # a hang: it takes the request and never answers
    compiler._timeout_s = 0.5
    compiler.submit(READ)
    (hung,) = answers(compiler)
    assert hung.error == "the compiler did not finish within 0.5 s"
    assert compiler.pid is None
    compiler._timeout_s = 120.0

    compiler.submit(READ)
    compiler.poll()
    assert process_of(compiler) != pid
    os.kill(process_of(compiler), signal.SIGKILL)
    (killed,) = answers(compiler)
    assert killed.error == "the compiler process ended with code -9"
    assert not compiler.busy


def test_cancel_forgets_and_kills(compiler: CompilerProcess) -> None:
    compiler.submit(READ)
    compiler.submit(READ)
    compiler.poll()
    process_of(compiler)
    compiler.cancel()
    assert compiler.pid is None
    assert compiler.poll() == []


def test_what_is_no_answer_is_ignored(compiler: CompilerProcess) -> None:
    request: ProgramRequest = READ
    compiler._current, compiler._number = request, 3
    done: list[Compiled] = []
    for line in (b"Warning: something", b'{"id": 2, "entry": "x", "error": null}', b'{"id": 3}'):
        compiler._take_answer(line, done)
    assert done == []
    compiler._take_answer(b'{"id": 3, "entry": "x", "error": null}', done)
    assert [(answer.entry, answer.error) for answer in done] == [("x", None)]
