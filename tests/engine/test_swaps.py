"""Two hundred swaps between two compiled plans while 64 streams run: they leave no trace."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from polyjax.compiler.worker import CompilerProcess
from polyjax.core.buckets import Bucket, BucketLadder
from polyjax.engine.engine import Engine
from polyjax.engine.programs import PlanPrograms
from polyjax.engine.types import Request, SamplingParams
from tests.engine.audit import audit
from tests.engine.serving import Stream, make_engine, prompt, step_without_compiling

STREAMS, TOKENS, SWAPS = 64, 100, 200
ARRIVALS = 4  # requests a step; as many end in a step once all streams run
REQUESTS = 3 * STREAMS
LADDER = BucketLadder((Bucket(1, STREAMS, 16),), (Bucket(16, 1, 16),), (1, STREAMS))
# Keeps the program's text beside its code: other bytes, the same instructions.
NO_NUMERIC_EFFECT = (("xla_embed_ir_in_executable", "True"),)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    made = make_engine(
        tmp_path_factory.mktemp("swaps"),
        max_num_seqs=STREAMS,
        max_num_batched_tokens=2 * STREAMS,
        num_kv_pages=16 * STREAMS,
        enable_prefix_caching=False,  # a second run would find the first one's pages
        plan="reference",
        max_programs=2,
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def other(engine: Engine) -> PlanPrograms:
    """The plan in force once more, compiled with other options in this process: before serving."""
    current = engine.programs.current
    plan = dataclasses.replace(current.plan, compiler_options=NO_NUMERIC_EFFECT)
    compiler = CompilerProcess(engine.source.cache)
    made = engine.source.build(plan, current.ladder, lambda *progress: None, compiler)
    engine.watch = type(engine.watch)()
    return made


def requests(name: str) -> list[Request]:
    """Half of them greedy, half with seeds of their own; four arrive a step."""
    params = [
        SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        if number % 2
        else SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=number, ignore_eos=True)
        for number in range(REQUESTS)
    ]
    return [
        Request(f"{name}-{number}", prompt(5 + number % 9, number), params[number])
        for number in range(REQUESTS)
    ]


def scripted_run(
    engine: Engine, name: str, swaps: list[PlanPrograms]
) -> tuple[list[Stream], list[bytes], int]:
    """Runs the same schedule; before each step the next of `swaps` comes into force.

    Returns the streams, the bits of the hidden states of each step, and the most that ran at once.
    """
    waiting, streams, bits, most = requests(name), {}, [], 0
    read = engine.launcher.read

    def reading(running: Any) -> Any:
        rows = [np.asarray(r.hidden)[: len(r.launch.sequences)] for r in running.launches]
        bits.append(b"".join(row.tobytes() for row in rows))
        return read(running)

    engine.launcher.read = reading  # type: ignore[method-assign]
    swaps = list(swaps)
    try:
        while waiting or engine.has_work:
            for request in waiting[:ARRIVALS]:
                engine.add(request)
                streams[request.id] = Stream()
            del waiting[:ARRIVALS]
            if swaps and engine.scheduler.num_running >= STREAMS - ARRIVALS:
                engine.programs.install(swaps.pop(), engine.step_number)
            for output in step_without_compiling(engine):
                streams[output.request_id].take(output)
            most = max(most, engine.scheduler.num_running)
    finally:
        engine.launcher.read = read  # type: ignore[method-assign]
    assert not swaps
    return list(streams.values()), bits, most


def test_two_hundred_swaps_leave_no_trace(engine: Engine, other: PlanPrograms) -> None:
    first = engine.programs.current
    assert all(
        other.programs[key].executable is not first.programs[key].executable
        for key in first.programs
    )
    plain, plain_bits, most = scripted_run(engine, "plain", [])
    assert most == STREAMS
    before = engine.stats()
    swapped, swapped_bits, most = scripted_run(engine, "swapped", [first, other] * (SWAPS // 2))
    after = engine.stats()
    assert most == STREAMS
    assert after.swaps - before.swaps == SWAPS
    assert after.epoch - before.epoch == SWAPS
    assert {len(stream.tokens) for stream in swapped} == {TOKENS}  # none dropped, none repeated
    assert [stream.tokens for stream in swapped] == [stream.tokens for stream in plain]
    assert swapped_bits == plain_bits
    epochs = {output.epoch for stream in swapped for output in stream.outputs}
    assert len(epochs) >= SWAPS  # each of them computed something
    for stream in swapped:
        seen = [output.epoch for output in stream.outputs]
        assert seen == sorted(seen)
    audit(engine.scheduler.allocator, [])
    assert len(engine.programs.resident) == 2
