"""What compile processes run: step programs into the program cache, op chains into files.

Both answer with a digest of what they compiled, by which duplicates are known before any is timed.
"""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from polyjax.compiler.cache import ProgramCache
from polyjax.compiler.program import ProgramRequest, bypass_jax_cache, compile_program
from polyjax.compiler.xla_forms import FORMS
from polyjax.core.op import Op, Ops, Workload
from polyjax.core.ops import OPS
from polyjax.core.whole_file import write_whole
from search.chains import ChainSpec, chained
from search.digests import executable_digest
from search.kernels import kernel_named


def compile_step(request: ProgramRequest, cache_directory: str) -> dict[str, Any]:
    """Compiles one step program into the cache unless it is there; returns digest and seconds.

    The digest is kept beside the entry, since a loaded program does not give back its code.
    """
    mesh = request.plan.mesh.mesh()
    cache = ProgramCache(cache_directory)
    entry = cache.path(request, mesh)
    note = entry.with_suffix(".digest")
    if entry.exists() and note.exists():
        return {"digest": note.read_text(), "lower_s": 0.0, "compile_s": 0.0}
    program = compile_program(request, mesh)
    digest = executable_digest(program.executable, dict(request.plan.compiler_options))
    cache.store(request, mesh, program)
    write_whole(note, digest.encode(), mode=0o600)
    return {"digest": digest, "lower_s": program.trace_s, "compile_s": program.compile_s}


@dataclasses.dataclass(frozen=True)
class OpCandidate:
    """One way to compute a workload: a kernel with a schedule, or a form that XLA compiles.

    `kernel` names one of the catalogue, or "module:NAME"; "" leaves the op to `form`: "reference"
    or "platform" (what a step on this platform runs without a kernel). `options` are XLA's.
    """

    workload: Workload
    kernel: str = ""
    schedule: tuple[tuple[str, Any], ...] = ()
    form: str = ""
    options: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """What a trial keeps of it; the workload is the trial's target."""
        if self.kernel:
            return {"kernel": self.kernel, "schedule": dict(self.schedule)}
        return {"form": self.form, "options": dict(self.options)}


def op_function(candidate: OpCandidate, platform: str) -> Callable[..., Any]:
    """Returns the traceable function of a candidate, with the op's arguments and results."""
    workload = candidate.workload
    if candidate.kernel:
        kernel = kernel_named(candidate.kernel)
        schedule = kernel.schedule_type.from_json(dict(candidate.schedule))
        return kernel.build(workload, schedule)
    op: Op = OPS[workload.op]
    form = op.reference
    if candidate.form == "platform":
        form = FORMS.get(platform, {}).get(op.name, form)
    static = dict(workload.static)
    return lambda *args: form(Ops({}, {}), *args, **static)


def compile_op(candidate: OpCandidate, spec: ChainSpec, avals: Any, path: str) -> dict[str, Any]:
    """Compiles a candidate's chain into the file `path`; returns digest and seconds."""
    bypass_jax_cache()
    begun = time.perf_counter()
    function = op_function(candidate, jax.default_backend())
    lowered = jax.jit(chained(function, spec)).trace(*avals).lower()
    lowered_s = time.perf_counter() - begun
    options: Mapping[str, str] = dict(candidate.options)
    compiled = lowered.compile(compiler_options=dict(options) or None)
    compile_s = time.perf_counter() - begun - lowered_s
    write_whole(Path(path), pickle.dumps(serialize_executable.serialize(compiled)), mode=0o600)
    digest = executable_digest(compiled, options)
    return {"digest": digest, "lower_s": lowered_s, "compile_s": compile_s}


def load_op(path: str) -> Callable[..., Any]:
    """Returns the chain that `compile_op` wrote to `path`, for the first device."""
    payload, in_tree, out_tree = pickle.loads(Path(path).read_bytes())
    return serialize_executable.deserialize_and_load(
        payload, in_tree, out_tree, execution_devices=jax.devices()[:1]
    )
