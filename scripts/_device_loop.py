"""The engine's decode loop beside a bare one: scripts/bench_engine --only=device_loop.

Both run the same launches: what the engine sends to the device in each step of a decode-only phase
is kept, and the bare loop calls the same programs with it on the same pools, the state donated from
call to call and each token fed back on the device. All its inputs lie on the device beforehand and
nothing is read back until the end, so its time is the device's alone.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, PartitionSpec

from polyjax.compiler.program import Kind, ProgramKey, StepProgram
from polyjax.core.errors import ConfigError, PolyjaxError
from polyjax.core.results import Baseline, Result, measured
from polyjax.engine.engine import Engine
from polyjax.engine.launcher import RunningStep
from polyjax.engine.programs import PlanPrograms
from polyjax.engine.sequence import SamplerKind
from polyjax.engine.step import Launch
from polyjax.engine.types import Request, SamplingParams

THROUGHPUT_GOAL = 0.97
IDLE_GOAL = 0.02
SPARE_TOKENS = 128  # what the first streams generate while the last prompts are computed
FIRST_TOKEN_ID = 100


@dataclasses.dataclass(frozen=True)
class Sample:
    """Seconds that equally many decode steps of a batch took on both sides.

    `num_late` steps were scheduled when the device had already finished the one before.
    """

    batch: int
    steps: int
    engine_s: float
    loop_s: float
    num_late: int

    @property
    def engine_tokens_per_s(self) -> float:
        return self.batch * self.steps / self.engine_s

    @property
    def loop_tokens_per_s(self) -> float:
        return self.batch * self.steps / self.loop_s


@dataclasses.dataclass(frozen=True)
class Call:
    """A launch of a step, without the arrays it made: held, they would make the next ones move."""

    programs: PlanPrograms
    launch: Launch
    flat: npt.NDArray[np.int32]


def _calls(running: RunningStep | None) -> list[Call]:
    if running is None:
        return []
    return [Call(running.programs, each.launch, each.flat) for each in running.launches]


class DecodePhase:
    """Requests of equal length; measures the engine while all of them are in decode."""

    def __init__(self, engine: Engine, batch: int, prompt_tokens: int, steps: int, seed: int):
        limit = engine.info.max_model_len - prompt_tokens
        if limit < steps + 1 or batch > engine.info.max_num_seqs:
            raise ConfigError(
                f"{batch} streams of {prompt_tokens} + {steps} tokens do not fit the engine: "
                f"it takes {engine.info.max_num_seqs} of {engine.info.max_model_len} tokens"
            )
        self._engine = engine
        self._batch = batch
        self._steps = steps
        self._ids = [f"loop-{seed}-{number}" for number in range(batch)]
        rng = random.Random(seed)
        vocabulary = range(min(FIRST_TOKEN_ID, engine.info.vocab_size // 2), engine.info.vocab_size)
        params = SamplingParams(
            max_tokens=min(limit, steps + SPARE_TOKENS), temperature=0.0, ignore_eos=True
        )
        for request_id in self._ids:
            ids = rng.choices(vocabulary, k=prompt_tokens)
            engine.add(Request(request_id, ids, params, time.monotonic()))

    def run(self) -> tuple[float, int, list[list[Call]]]:
        """Returns (seconds, late steps, each step's launches) of the phase; ends the requests.

        Between its ends as many steps were launched as committed: the one in flight stays one.
        """
        engine = self._engine
        self._until_all_decode()
        steps = []
        num_late = 0
        started_s = time.perf_counter()
        for _ in range(self._steps):
            num_late += _is_over(engine.in_flight)
            engine.step()
            steps.append(_calls(engine.in_flight))
        seconds = time.perf_counter() - started_s
        if not all(map(self._is_decode, steps)):
            raise PolyjaxError("streams ended or waited within the measured steps")
        for request_id in self._ids:
            engine.abort(request_id)
        while engine.has_work:
            engine.step()
        return seconds, num_late, steps

    def _until_all_decode(self) -> None:
        while not self._is_decode(_calls(self._engine.in_flight)):
            if not self._engine.has_work:
                raise PolyjaxError("the first streams ended before the last prompt was computed")
            self._engine.step()

    def _is_decode(self, calls: Sequence[Call]) -> bool:
        rows = sum(len(call.launch.sequences) for call in calls)
        return rows == self._batch and all(call.launch.decode for call in calls)


def _is_over(running: RunningStep | None) -> bool:
    """Whether the device has finished a step."""
    assert running is not None
    tokens: list[Any] = [launch.tokens for launch in running.launches]
    return all(array.is_ready() for array in tokens)


def bare_loop(engine: Engine, steps: Sequence[Sequence[Call]]) -> float:
    """Returns the seconds that the programs of `steps` take, called one after another."""
    state = engine.state
    replicated = NamedSharding(engine.mesh, PartitionSpec())
    calls: list[tuple[StepProgram, jax.Array]] = []
    for call in itertools.chain.from_iterable(steps):
        if call.launch.sampler is not SamplerKind.GREEDY:
            raise PolyjaxError("a measured step is not greedy")
        key = ProgramKey(Kind.DECODE_GREEDY, call.launch.bucket)
        calls.append((call.programs[key], jax.device_put(call.flat, replicated)))
    jax.block_until_ready(([flat for _, flat in calls], state.kv, state.last_tokens))
    one_at_a_time = engine.source.one_at_a_time
    started_s = time.perf_counter()
    for program, flat in calls:
        state.kv, state.last_tokens, tokens, *_ = program(
            state.params, state.kv, state.last_tokens, flat
        )
        if one_at_a_time:
            jax.block_until_ready(tokens)
    jax.block_until_ready((state.kv, state.last_tokens))
    return time.perf_counter() - started_s


def measure_device_loop(
    engine: Engine, batches: Sequence[int], prompt_tokens: int, steps: int, repeats: int
) -> list[Result]:
    """Engine and bare loop take turns at each batch. Raises ConfigError, PolyjaxError."""
    gc.collect()
    gc.freeze()  # as in the engine process
    by_batch = {}
    for batch in batches:
        samples = []
        for repeat in range(-1, repeats):  # the first is a warm-up
            seed = 1000 * batch + repeat
            phase = DecodePhase(engine, batch, prompt_tokens, steps, seed)
            engine_s, num_late, launched = phase.run()
            sample = Sample(batch, steps, engine_s, bare_loop(engine, launched), num_late)
            if repeat >= 0:
                samples.append(sample)
        by_batch[batch] = samples
    return as_results(by_batch, engine.info.device, prompt_tokens)


def as_results(by_batch: dict[int, list[Sample]], device: str, prompt_tokens: int) -> list[Result]:
    """The worst batch of each figure, with all batches in the note."""
    ratios = {
        batch: statistics.median(s.engine_tokens_per_s / s.loop_tokens_per_s for s in samples)
        for batch, samples in by_batch.items()
    }
    worst = min(ratios, key=lambda batch: ratios[batch])
    samples = by_batch[worst]
    idle = [max(0.0, 1.0 - sample.loop_s / sample.engine_s) for sample in samples]
    us = {b: 1e6 * statistics.median(s.loop_s / s.steps for s in by_batch[b]) for b in by_batch}
    every = ", ".join(f"batch {b} {ratios[b]:.4f} of {us[b]:.0f} us a step" for b in by_batch)
    late = ", ".join(
        f"batch {b} {sum(s.num_late for s in each) / sum(s.steps for s in each):.1%}"
        for b, each in by_batch.items()
    )
    about = f"prompts of {prompt_tokens}, {samples[0].steps} decode steps"
    return [
        measured(
            "engine_vs_device_loop",
            [sample.engine_tokens_per_s for sample in samples],
            "tokens/s",
            better="higher",
            goal=THROUGHPUT_GOAL,
            value=ratios[worst],
            ratio=ratios[worst],
            baseline=Baseline(
                "bare loop of the same launches",
                tuple(sample.loop_tokens_per_s for sample in samples),
            ),
            device=device,
            note=f"worst: batch {worst}; {every}; {about}",
        ),
        measured(
            "engine_device_idle_fraction",
            idle,
            "fraction",
            better="lower",
            goal=IDLE_GOAL,
            device=device,
            note=f"derived: 1 - the bare loop's time over the engine's, batch {worst}; steps "
            f"scheduled with the device already done: {late}; {about}",
        ),
    ]
