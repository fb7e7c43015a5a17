"""Step programs: what each computes, how it is traced, lowered and compiled ahead of time.

A program is a pure function of state and one packed int32 array. State that it changes is donated
and comes back first in its results:

    kind            arguments                              results
    PREFILL         params kv last_tokens flat             kv last_hidden[B,D] hidden[B*T,D]
    DECODE_*        params kv last_tokens flat             kv last_tokens tokens[B] last_hidden[B,D]
                                                           flat
    SAMPLE_*        head last_tokens hidden rows           last_tokens tokens[B]
    SAMPLE_FULL     head last_tokens sampling hidden rows mask      last_tokens sampling tokens[B]
    SCORE           head hidden[R,D] targets[R] mask       scores[R,SCORE_COLUMNS]
    ADMIT           sampling slot row                      sampling
    READ_SCRATCH    kv                                     the scratch pages of every pool
    COPY_PAGES      kv from[G,R] to[G,R]                   kv
    COMPARE_PAGES   kv ours[G,R] theirs[G,R]               differences[L,3], see `_compare_pages`

A decode program samples by itself, greedily or with Gumbel noise; where a row needs more, its
`last_hidden` goes through a sampler, whose token overwrites the first. Its last result is the
packed array of the step after, every row one token further: where nothing else changes, the next
launch takes it and the host sends nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from pallas_kernels import CATALOGUE
from polyjax.compiler.abi import StateABI, abi_of_state, executable_abi
from polyjax.compiler.choose import defaults_for
from polyjax.compiler.kernel_files import with_kernel_files
from polyjax.compiler.sampling import (
    SCORE_COLUMNS,
    row_params,
    sample_full,
    scores,
    set_slot,
    store_tokens,
    unpack_mask,
)
from polyjax.compiler.state import (
    StateAvals,
    StateSpec,
    abstract_model,
    head_indices,
    layer_groups,
    state_avals,
)
from polyjax.compiler.xla_forms import PlatformOps
from polyjax.core.batch_layout import FROM_SLOT, BatchLayout, PackedBatch
from polyjax.core.buckets import Bucket, BucketLadder
from polyjax.core.mesh import Placement
from polyjax.core.model import StepBatch
from polyjax.core.op import Ops
from polyjax.core.ops import LM_HEAD, LM_HEAD_SAMPLE
from polyjax.core.plan import Plan


class Kind(enum.StrEnum):
    PREFILL = "prefill"
    DECODE_GREEDY = "decode_greedy"
    DECODE_GUMBEL = "decode_gumbel"
    SAMPLE_GREEDY = "sample_greedy"
    SAMPLE_GUMBEL = "sample_gumbel"
    SAMPLE_FULL = "sample_full"
    SCORE = "score"
    ADMIT = "admit"
    READ_SCRATCH = "read_scratch"
    COPY_PAGES = "copy_pages"
    COMPARE_PAGES = "compare_pages"


PAGE_KINDS = (Kind.READ_SCRATCH, Kind.COPY_PAGES, Kind.COMPARE_PAGES)
DECODES = (Kind.DECODE_GREEDY, Kind.DECODE_GUMBEL)
SAMPLERS = (Kind.SAMPLE_GREEDY, Kind.SAMPLE_GUMBEL, Kind.SAMPLE_FULL)
NO_BUCKET = Bucket(0, 0, 0)


@dataclasses.dataclass(frozen=True, order=True)
class ProgramKey:
    """A call signature: the kind of program and the padded shape of its per-step inputs.

    Samplers know only `bucket.sequences`, SCORE only `bucket.tokens` (its rows).
    """

    kind: Kind
    bucket: Bucket = NO_BUCKET

    def __str__(self) -> str:
        b = self.bucket
        return f"{self.kind.value}[T={b.tokens},B={b.sequences},C={b.pages}]"


def program_keys(ladder: BucketLadder, fused_gumbel: bool) -> tuple[ProgramKey, ...]:
    """Every program that serving on `ladder` may call, the ones most likely needed first.

    `fused_gumbel` adds decode programs that draw noise; without, such a step is decode + sampler.
    """
    kinds = DECODES if fused_gumbel else (Kind.DECODE_GREEDY,)
    keys = [ProgramKey(Kind.PREFILL, bucket) for bucket in ladder.prefill]
    keys += [ProgramKey(kind, bucket) for bucket in ladder.decode for kind in kinds]
    sizes = ladder.sampler_sequences
    keys += [ProgramKey(kind, Bucket(1, size, 0)) for kind in SAMPLERS for size in sizes]
    rows = {*sizes, *(bucket.tokens * bucket.sequences for bucket in ladder.prefill)}
    keys += [ProgramKey(Kind.SCORE, Bucket(count, 1, 0)) for count in sorted(rows)]
    return (*keys, ProgramKey(Kind.ADMIT), *(ProgramKey(kind) for kind in PAGE_KINDS))


@dataclasses.dataclass(frozen=True)
class ProgramRequest:
    """Plain description of one program, all that compiling it takes; crosses processes pickled."""

    spec: StateSpec
    plan: Plan
    key: ProgramKey


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """One compiled program. `used` lists (workload key, kernel or "reference") of every op call.

    `abi` was read off the executable, not off the request, so it also tells the truth about
    programs that came out of a cache.
    """

    key: ProgramKey
    plan_digest: str
    executable: jax.stages.Compiled
    used: tuple[tuple[str, str], ...]
    abi: StateABI
    trace_s: float = 0.0
    compile_s: float = 0.0

    def __call__(self, *args: Any) -> Any:
        return self.executable(*args)


# -- what each kind computes -----------------------------------------------------------------


def _prefill(model: _Tracing, params: Any, kv: Any, last_tokens: Any, flat: Any) -> Any:
    hidden, last_hidden, kv, _ = model.forward(params, kv, last_tokens, flat)
    return kv, last_hidden, hidden.reshape(-1, hidden.shape[-1])


def _decode(
    model: _Tracing, params: Any, kv: Any, last_tokens: Any, flat: Any, *, greedy: bool
) -> Any:
    following = model.one_token_further(flat)
    if greedy and (fused := model.decode_greedy(params, kv, last_tokens, flat)) is not None:
        return *fused, following
    _, last_hidden, kv, batch = model.forward(params, kv, last_tokens, flat)
    last_tokens, tokens = model.sample(params, last_tokens, last_hidden, batch, greedy)
    return kv, last_tokens, tokens, last_hidden, following


def _sample(
    model: _Tracing, head: Any, last_tokens: Any, hidden: Any, flat: Any, *, greedy: bool
) -> Any:
    batch = model.layout.split_rows(flat)
    return model.sample(model.head_params(head), last_tokens, hidden, batch, greedy)


def _sample_full(
    model: _Tracing, head: Any, last_tokens: Any, sampling: Any, hidden: Any, flat: Any, mask: Any
) -> Any:
    rows = row_params(model.layout.split_rows(flat))
    logits = model.logits(model.head_params(head), hidden)
    tokens, sampling = sample_full(logits, sampling, rows, mask)
    return store_tokens(last_tokens, tokens, rows), sampling, tokens


def _score(model: _Tracing, head: Any, hidden: Any, targets: Any, mask: Any) -> Any:
    """Rows are taken in blocks, so that the logits of a long prompt never exist as a whole.

    `mask` as in `sample_full`, [R,words] or [1,words]: what it excludes has no probability.
    """
    params = model.head_params(head)
    rows = hidden.shape[0]
    block = next(size for size in range(min(rows, 64), 0, -1) if rows % size == 0)

    def one(part: Any) -> Any:
        hidden, targets, *own = part
        logits = model.logits(params, hidden)
        allowed = unpack_mask(own[0] if own else mask, logits.shape[1])
        return scores(jnp.where(allowed, logits, -jnp.inf), targets)

    parts = [hidden.reshape(-1, block, hidden.shape[1]), targets.reshape(-1, block)]
    if mask.shape[0] == rows:
        parts.append(mask.reshape(-1, block, mask.shape[1]))
    return jax.lax.map(one, parts).reshape(rows, SCORE_COLUMNS)


def _admit(_model: _Tracing, sampling: Any, slot: Any, row: Any) -> Any:
    return set_slot(sampling, slot, row)


def _read_scratch(model: _Tracing, kv: Any) -> Any:
    return tuple(pool[pool.shape[0] - model.spec.scratch_pages :] for pool in kv)


def _copy_pages(model: _Tracing, kv: Any, source: Any, target: Any) -> Any:
    """Row g of `source` and `target` lists pages of KV group g; page 0 onto itself is padding."""
    groups = layer_groups(model.spec.config)
    return tuple(
        pool.at[target[group]].set(pool[source[group]])
        for pool, (group, _) in zip(kv, groups, strict=True)
    )


def _compare_pages(model: _Tracing, kv: Any, ours: Any, theirs: Any) -> Any:
    """Per layer (largest difference, largest of theirs, elements finite in theirs alone).

    Only elements that are finite in theirs count; pages compared with themselves are padding.
    """
    rows = []
    for pool, (group, _) in zip(kv, layer_groups(model.spec.config), strict=True):
        padding = (ours[group] == theirs[group]).reshape(-1, *(1,) * (pool.ndim - 1))
        a, b = pool[ours[group]].astype(jnp.float32), pool[theirs[group]].astype(jnp.float32)
        counted = ~padding & jnp.isfinite(b)
        lost = counted & ~jnp.isfinite(a)
        error = jnp.max(jnp.where(counted & ~lost, jnp.abs(a - b), 0.0))
        scale = jnp.max(jnp.where(counted, jnp.abs(b), 0.0))
        rows.append(jnp.stack([error, scale, jnp.sum(lost).astype(jnp.float32)]))
    return jnp.stack(rows)


@dataclasses.dataclass(frozen=True)
class _Form:
    """How one kind is called: its function, state arguments (name, donated) and what it returns."""

    function: Callable[..., Any]
    state: tuple[tuple[str, bool], ...]
    results: tuple[str, ...]


_HEAD_SAMPLER = (("head", False), ("last_tokens", True))
_FORMS: dict[Kind, _Form] = {
    Kind.PREFILL: _Form(
        _prefill, (("params", False), ("kv", True), ("last_tokens", False)), ("kv", "", "")
    ),
    **{
        kind: _Form(
            functools.partial(_decode, greedy=kind is Kind.DECODE_GREEDY),
            (("params", False), ("kv", True), ("last_tokens", True)),
            ("kv", "last_tokens", "", "", ""),
        )
        for kind in DECODES
    },
    **{
        kind: _Form(
            functools.partial(_sample, greedy=kind is Kind.SAMPLE_GREEDY),
            _HEAD_SAMPLER,
            ("last_tokens", ""),
        )
        for kind in (Kind.SAMPLE_GREEDY, Kind.SAMPLE_GUMBEL)
    },
    Kind.SAMPLE_FULL: _Form(
        _sample_full, (*_HEAD_SAMPLER, ("sampling", True)), ("last_tokens", "sampling", "")
    ),
    Kind.SCORE: _Form(_score, (("head", False),), ("",)),
    Kind.ADMIT: _Form(_admit, (("sampling", True),), ("sampling",)),
    Kind.READ_SCRATCH: _Form(_read_scratch, (("kv", False),), ("scratch",)),
    Kind.COPY_PAGES: _Form(_copy_pages, (("kv", True),), ("kv",)),
    Kind.COMPARE_PAGES: _Form(_compare_pages, (("kv", False),), ("",)),
}


class _Tracing:
    """One trace of one program: the model's structure, the ops it calls, the layout it reads."""

    def __init__(
        self, request: ProgramRequest, mesh: Mesh, avals: StateAvals, platform: str | None = None
    ):
        self.spec = request.spec
        self.avals = avals
        self.abstract = abstract_model(request.spec, Placement(request.plan.mesh, mesh))
        catalogue = with_kernel_files(CATALOGUE, request.plan.sources)
        chip = None
        if platform is None:
            device = mesh.devices.flat[0]
            platform, chip = device.platform, defaults_for(request.plan, device.device_kind)
        self.ops: Ops = PlatformOps(dict(request.plan.choices), catalogue, platform, chip)
        self.layout = BatchLayout(request.key.bucket, len(request.spec.config.kv_groups()))

    def one_token_further(self, flat: Any) -> Any:
        """The packed array of the step after, if the same rows decode on in the same pages."""
        live = self.layout.split(flat).query_lens
        return flat.at[self.layout.context_words].add(live)

    def inputs(self, last_tokens: Any, flat: Any) -> tuple[StepBatch, PackedBatch]:
        """The step as a model takes it, and the unpacked batch."""
        batch = self.layout.split(flat)
        first = jnp.where(
            (batch.flags & FROM_SLOT) != 0, last_tokens[batch.slots], batch.tokens[:, 0]
        )
        step = StepBatch(
            tokens=batch.tokens.at[:, 0].set(first),
            query_lens=batch.query_lens,
            context_lens=batch.context_lens,
            page_tables=tuple(batch.page_tables),
            first_pages=tuple(batch.first_pages),
        )
        return step, batch

    def decode_greedy(self, params: Any, kv: Any, last_tokens: Any, flat: Any) -> Any:
        """(kv, last_tokens, tokens, last_hidden), or None for a family without such an op."""
        step, batch = self.inputs(last_tokens, flat)
        fused = self.abstract.merge(params).decode_greedy(self.ops, step, kv)
        if fused is None:
            return None
        tokens, hidden, kv = fused
        return kv, store_tokens(last_tokens, tokens, row_params(batch)), tokens, hidden

    def forward(self, params: Any, kv: Any, last_tokens: Any, flat: Any) -> Any:
        """Returns (hidden [B,T,D], last_hidden [B,D], kv, the unpacked batch)."""
        step, batch = self.inputs(last_tokens, flat)
        hidden, kv = self.abstract.merge(params)(self.ops, step, kv)
        last = jnp.maximum(step.query_lens - 1, 0)[:, None, None]
        return hidden, jnp.take_along_axis(hidden, last, axis=1)[:, 0], kv, batch

    def sample(
        self, params: Any, last_tokens: Any, hidden: Any, batch: PackedBatch, greedy: bool
    ) -> tuple[Any, Any]:
        """Samples without filters. Returns (last_tokens, tokens [B])."""
        rows = row_params(batch)
        norm, weight, static = self.abstract.merge(params).head()
        args = (hidden, norm, weight, rows.temperature, rows.seeds, rows.positions)
        tokens = self.ops(LM_HEAD_SAMPLE, *args, greedy=greedy, **static)
        return store_tokens(last_tokens, tokens, rows), tokens

    def logits(self, params: Any, hidden: Any) -> jax.Array:
        norm, weight, static = self.abstract.merge(params).head()
        return self.ops(LM_HEAD, hidden, norm, weight, **static)

    def head_params(self, head: Sequence[Any]) -> tuple[Any, ...]:
        """The flat tuple with the head's arrays in their places; the others are never read."""
        params: list[Any] = list(self.avals.params)
        for index, array in zip(head_indices(self.spec), head, strict=True):
            params[index] = array
        return tuple(params)


# -- tracing and compiling -------------------------------------------------------------------


def expected_abi(request: ProgramRequest, mesh: Mesh) -> StateABI:
    """The ABI of an engine's state as a program of this kind has to see it."""
    arguments = _FORMS[request.key.kind].state
    return abi_of_state(request.spec, request.plan.mesh, mesh, arguments)


def compile_program(request: ProgramRequest, mesh: Mesh) -> StepProgram:
    """Traces, lowers and compiles a program ahead of time. Raises what jax or a kernel raises."""
    bypass_jax_cache()
    started = time.perf_counter()
    trace, ops = trace_program(request, mesh)
    lowered = trace.lower()
    traced = time.perf_counter()
    compiled = lowered.compile(compiler_options=dict(request.plan.compiler_options) or None)
    used = tuple((workload.key, name) for workload, name in ops.used)
    return loaded_program(
        request, mesh, compiled, used, traced - started, time.perf_counter() - traced
    )


def bypass_jax_cache() -> None:
    """Turns off jax's own compilation cache in this process; polyjax's takes its place.

    An executable that jax loads from there and that is serialized again lacks its functions (seen
    with jax 0.11.2 on CPU: NOT_FOUND when it runs), and would poison our entries.
    """
    if jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # it had looked at the setting once and for all


def loaded_program(
    request: ProgramRequest,
    mesh: Mesh,
    executable: jax.stages.Compiled,
    used: tuple[tuple[str, str], ...],
    trace_s: float = 0.0,
    compile_s: float = 0.0,
) -> StepProgram:
    """The program around an executable that was compiled here or elsewhere."""
    names = [name for name, _ in expected_abi(request, mesh).lines]
    abi = executable_abi(executable, names)
    return StepProgram(request.key, request.plan.digest, executable, used, abi, trace_s, compile_s)


def trace_program(
    request: ProgramRequest, mesh: Mesh, platform: str | None = None
) -> tuple[jax.stages.Traced, Ops]:
    """Returns the traced program and the ops object of its trace.

    `platform` is what it is traced for where that is another than the mesh's own.
    """
    form = _FORMS[request.key.kind]
    avals = state_avals(request.spec, request.plan.mesh, mesh)
    model = _Tracing(request, mesh, avals, platform)
    replicated = request.plan.mesh.sharding(mesh, ())
    state = [_state_avals(model, avals, name) for name, _ in form.state]
    args = [*state, *_step_inputs(request, avals, replicated)]
    result_shardings = {
        "": replicated,
        "kv": tuple(aval.sharding for aval in avals.kv),
        "scratch": tuple(aval.sharding for aval in avals.kv),
        "last_tokens": avals.last_tokens.sharding,
        "sampling": jax.tree.map(lambda aval: aval.sharding, avals.sampling),
    }
    out = tuple(result_shardings[name] for name in form.results)
    jitted = jax.jit(
        functools.partial(form.function, model),
        in_shardings=jax.tree.map(lambda aval: aval.sharding, tuple(args)),
        out_shardings=out if len(out) > 1 else out[0],
        donate_argnums=tuple(i for i, (_, donated) in enumerate(form.state) if donated),
        keep_unused=True,  # the ABI lists every array of state, read or not
    )
    return jitted.trace(*args), model.ops


def abstract_call(request: ProgramRequest, mesh: Mesh) -> Callable[[Ops], Any]:
    """Returns a function that runs the program's ops on arrays made inside a trace.

    For finding out which workloads a program consists of; evaluate it for shapes only.
    """

    def call(ops: Ops) -> Any:
        form, avals = _FORMS[request.key.kind], state_avals(request.spec, request.plan.mesh, mesh)
        model = _Tracing(request, mesh, avals)
        model.ops = ops
        state = [_state_avals(model, avals, name) for name, _ in form.state]
        inputs = _step_inputs(request, avals, request.plan.mesh.sharding(mesh, ()))
        args = jax.tree.map(lambda aval: jnp.zeros(aval.shape, aval.dtype), [*state, *inputs])
        return form.function(model, *args)

    return call


def _state_avals(model: _Tracing, avals: StateAvals, name: str) -> Any:
    """The avals of one state argument."""
    if name == "head":
        return tuple(avals.params[i] for i in head_indices(model.spec))
    return getattr(avals, name)


def _step_inputs(request: ProgramRequest, avals: StateAvals, replicated: Any) -> list[Any]:
    """Avals of the arguments that come anew each step, after the state."""
    key, spec = request.key, request.spec
    layout = BatchLayout(key.bucket, len(spec.config.kv_groups()))
    hidden = functools.partial(_hidden_aval, spec, replicated)

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=replicated)

    match key.kind:
        case Kind.PREFILL | Kind.DECODE_GREEDY | Kind.DECODE_GUMBEL:
            return [ints(layout.size)]
        case Kind.SAMPLE_GREEDY | Kind.SAMPLE_GUMBEL:
            return [hidden(key.bucket.sequences), ints(layout.sampler_size)]
        case Kind.SAMPLE_FULL:
            rows = key.bucket.sequences
            return [hidden(rows), ints(layout.sampler_size), ints(rows, spec.mask_words)]
        case Kind.SCORE:
            rows = key.bucket.tokens
            return [hidden(rows), ints(rows), ints(*spec.score_mask_shape(rows))]
        case Kind.ADMIT:
            row = [
                jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype, sharding=replicated)
                for aval in jax.tree.leaves(avals.sampling)
            ]
            return [ints(), jax.tree.unflatten(jax.tree.structure(avals.sampling), row)]
        case Kind.READ_SCRATCH:
            return []
        case Kind.COPY_PAGES | Kind.COMPARE_PAGES:
            pages = ints(len(spec.config.kv_groups()), spec.scratch_pages)
            return [pages, pages]


def _hidden_aval(spec: StateSpec, replicated: Any, rows: int) -> jax.ShapeDtypeStruct:
    shape = (rows, spec.config.embed_dim)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(spec.dtype), sharding=replicated)
