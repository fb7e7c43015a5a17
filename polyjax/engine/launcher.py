"""Runs a scheduled step's programs on the device state, and reads their results back later."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from polyjax.compiler.program import Kind, ProgramKey
from polyjax.core.batch_layout import BatchLayout
from polyjax.core.buckets import Bucket
from polyjax.engine.batch import BatchPacker
from polyjax.engine.phases import PhaseClock
from polyjax.engine.programs import PlanPrograms
from polyjax.engine.sampling import (
    grammar_mask,
    needs_slot_row,
    prompt_targets,
    read_scores,
    slot_row,
    without_bans,
)
from polyjax.engine.sequence import SamplerKind, Sequence
from polyjax.engine.state import DeviceState
from polyjax.engine.step import Launch, LaunchResult, ScheduledStep
from polyjax.engine.types import TokenLogprobs

Int32Array = npt.NDArray[np.int32]

_SAMPLERS = {
    SamplerKind.GREEDY: Kind.SAMPLE_GREEDY,
    SamplerKind.GUMBEL: Kind.SAMPLE_GUMBEL,
    SamplerKind.FULL: Kind.SAMPLE_FULL,
}


@dataclasses.dataclass(frozen=True)
class RunningLaunch:
    """Device arrays that a launch will have filled: tokens [B], scores of them, of the prompt.

    `flat` is what it was packed into, `hidden` [B,D] is of each row's last token. While it is not
    `sampled`, `tokens` are at most what the forward program chose by itself, and `all_hidden`
    [B*T,D] is of every token of a prefill.
    """

    launch: Launch
    flat: Int32Array
    hidden: jax.Array
    tokens: jax.Array | None
    all_hidden: jax.Array | None = None
    scores: jax.Array | None = None
    prompt_scores: jax.Array | None = None
    targets: Int32Array | None = None
    sampled: bool = False


@dataclasses.dataclass(frozen=True)
class RunningStep:
    """A step on the device; `epoch` numbers the plan that computes it.

    Launches that wait for the step before to be committed, because a grammar's mask depends on it,
    are not sampled until `Launcher.sample`.
    """

    step: ScheduledStep
    launches: list[RunningLaunch]
    programs: PlanPrograms
    epoch: int


class Launcher:
    """Owns what goes to the device with each step; the state it is given goes through its hands."""

    def __init__(self, state: DeviceState, packer: BatchPacker, mesh: Mesh, clock: PhaseClock):
        self._state = state
        self._packer = packer
        self._clock = clock
        self._vocab_size = state.spec.config.vocab_size
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._used_slots: set[int] = set()  # whose SamplingState row is not neutral
        self._open_masks: dict[int, jax.Array] = {}
        self._following: jax.Array | None = None  # the last launch's array, one token further
        # Executions of virtual CPU devices share one thread pool: with several in flight the
        # devices of one can wait for each other for ever.
        self._one_at_a_time = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"

    def launch(self, step: ScheduledStep, programs: PlanPrograms, epoch: int) -> RunningStep:
        """Dispatches a step's programs; returns before they have run. `sample` must follow."""
        for sequence in step.admitted:
            self._set_slot(sequence, programs)
        self._packer.update(step)
        running = []
        for launch in step.launches:
            flat, continues = self._packer.pack(launch)
            self._clock.mark("pack")
            forwarded = self._forward(launch, flat, continues, programs)
            running.append(forwarded if launch.constrained else self._sample(forwarded, programs))
            self._clock.mark("dispatch")
        return RunningStep(step, running, programs, epoch)

    def sample(self, running: RunningStep) -> None:
        """Dispatches what had to wait until the step before was committed, if anything."""
        for index, launch in enumerate(running.launches):
            if not launch.sampled:
                running.launches[index] = self._sample(launch, running.programs)
                self._clock.mark("dispatch")

    def read(self, running: RunningStep) -> list[LaunchResult]:
        """Waits for a step and brings its results to the host. Raises what the device raised."""
        results = [_read(launch) for launch in running.launches]
        self._clock.mark("readback")
        return results

    def forget_slots(self) -> None:
        """The per-slot state was rebuilt: every row is neutral."""
        self._used_slots.clear()

    # -- inside ------------------------------------------------------------------------------

    def _set_slot(self, sequence: Sequence, programs: PlanPrograms) -> None:
        """Gives a slot the sampling state its new sequence starts from."""
        used = needs_slot_row(sequence)
        if not used and sequence.slot not in self._used_slots:
            return
        row = slot_row(sequence if used else None, self._vocab_size)
        admit = programs[ProgramKey(Kind.ADMIT)]
        self._state.sampling = admit(self._state.sampling, np.int32(sequence.slot), row)
        (self._used_slots.add if used else self._used_slots.discard)(sequence.slot)

    def _sample(self, forwarded: RunningLaunch, programs: PlanPrograms) -> RunningLaunch:
        """Dispatches what follows the forward program: choosing tokens, and scores."""
        launch, tokens, hidden = forwarded.launch, forwarded.tokens, forwarded.hidden
        allowed = grammar_mask(launch, self._state.spec.mask_words)
        missing = launch.sampler is SamplerKind.FULL or tokens is None
        if launch.sampler is not SamplerKind.NONE and missing:
            tokens = self._tokens(forwarded, allowed, programs)
        scores = prompt_scores = targets = None
        if launch.num_logprobs is not None:
            score = programs[ProgramKey(Kind.SCORE, Bucket(launch.bucket.sequences, 1, 0))]
            scores = score(self._state.head, hidden, tokens, self._mask(launch, allowed))
        if launch.prompt_logprobs:
            targets = prompt_targets(launch)
            score = programs[ProgramKey(Kind.SCORE, Bucket(len(targets), 1, 0))]
            mask = self._open_mask(self._state.spec.score_mask_shape(len(targets))[0])
            prompt_scores = score(self._state.head, forwarded.all_hidden, targets, mask)
        for array in (tokens, scores, prompt_scores):
            if array is not None:
                array.copy_to_host_async()
        if self._one_at_a_time:
            jax.block_until_ready((self._state.kv, tokens, scores, prompt_scores))
        return RunningLaunch(
            *(launch, forwarded.flat, hidden, tokens),
            scores=scores,
            prompt_scores=prompt_scores,
            targets=targets,
            sampled=True,
        )

    def _forward(
        self, launch: Launch, flat: Int32Array, continues: bool, programs: PlanPrograms
    ) -> RunningLaunch:
        """With `continues` the device already has `flat`: from the launch before this one."""
        state, bucket = self._state, launch.bucket
        sent = self._following if continues and self._following is not None else flat
        self._following = None
        if not launch.decode:
            program = programs[ProgramKey(Kind.PREFILL, bucket)]
            state.kv, hidden, all_hidden = program(state.params, state.kv, state.last_tokens, flat)
            return RunningLaunch(launch, flat, hidden, None, all_hidden)
        noisy = ProgramKey(Kind.DECODE_GUMBEL, bucket)
        fused = launch.sampler is SamplerKind.GUMBEL and noisy in programs.programs
        program = programs[noisy if fused else ProgramKey(Kind.DECODE_GREEDY, bucket)]
        state.kv, state.last_tokens, tokens, hidden, self._following = program(
            state.params, state.kv, state.last_tokens, sent
        )
        sampled = fused or launch.sampler in (SamplerKind.GREEDY, SamplerKind.NONE)
        return RunningLaunch(launch, flat, hidden, tokens if sampled else None)

    def _tokens(
        self, forwarded: RunningLaunch, allowed: Int32Array | None, programs: PlanPrograms
    ) -> jax.Array:
        launch, flat, hidden = forwarded.launch, forwarded.flat, forwarded.hidden
        state, count = self._state, launch.bucket.sequences
        program = programs[ProgramKey(_SAMPLERS[launch.sampler], Bucket(1, count, 0))]
        rows = flat[: BatchLayout(launch.bucket, self._packer.num_groups).sampler_size]
        if launch.sampler is not SamplerKind.FULL:
            state.last_tokens, tokens = program(state.head, state.last_tokens, hidden, rows)
            return tokens
        mask = self._mask(launch, without_bans(launch, state.spec.mask_words, allowed))
        state.last_tokens, state.sampling, tokens = program(
            state.head, state.last_tokens, state.sampling, hidden, rows, mask
        )
        return tokens

    def _mask(self, launch: Launch, mask: Int32Array | None) -> jax.Array | Int32Array:
        """What a program gets for `mask`, None allowing everything."""
        return self._open_mask(launch.bucket.sequences) if mask is None else mask

    def _open_mask(self, count: int) -> jax.Array:
        """A mask that allows everything; stays on the device."""
        mask = self._open_masks.get(count)
        if mask is None:
            ones = np.full((count, self._state.spec.mask_words), -1, np.int32)
            mask = self._open_masks[count] = jax.device_put(ones, self._replicated)
        return mask


def _read(running: RunningLaunch) -> LaunchResult:
    launch = running.launch
    tokens = [] if running.tokens is None else np.asarray(running.tokens).tolist()
    logprobs = None
    if running.scores is not None:
        counts = [sequence.params.logprobs or 0 for sequence in launch.sequences]
        scores = np.asarray(running.scores)[: len(counts)]
        logprobs = read_scores(scores, tokens[: len(counts)], counts)
    return LaunchResult(tokens, logprobs, _read_prompt_scores(running))


def _read_prompt_scores(running: RunningLaunch) -> list[list[TokenLogprobs] | None] | None:
    if running.prompt_scores is None or running.targets is None:
        return None
    launch, width = running.launch, running.launch.bucket.tokens
    scores = np.asarray(running.prompt_scores)
    rows: list[list[TokenLogprobs] | None] = []
    for row, sequence in enumerate(launch.sequences):
        if sequence.params.prompt_logprobs is None:
            rows.append(None)
            continue
        part = slice(row * width, row * width + launch.num_tokens[row])
        counts = [sequence.params.prompt_logprobs] * launch.num_tokens[row]
        rows.append(read_scores(scores[part], running.targets[part].tolist(), counts))
    return rows
