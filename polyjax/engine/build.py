"""From an EngineConfig to everything an engine consists of: model, limits, state, programs."""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import models
from pallas_kernels import CATALOGUE
from polyjax.compiler.abi import StateABI
from polyjax.compiler.buckets import (
    ACCELERATOR_POLICY,
    CPU_POLICY,
    LadderLimits,
    LadderPolicy,
    derive_ladder,
)
from polyjax.compiler.cache import ProgramCache, default_cache_dir
from polyjax.compiler.default_plan import PlanSubject, default_plan
from polyjax.compiler.program import (
    Kind,
    ProgramKey,
    ProgramRequest,
    StepProgram,
    compile_program,
    expected_abi,
    program_keys,
)
from polyjax.compiler.state import StateSpec
from polyjax.compiler.worker import CompilerProcess
from polyjax.core.buckets import BucketLadder
from polyjax.core.chips import find_chip
from polyjax.core.errors import ConfigError, ModelError
from polyjax.core.mesh import MeshPlan, Placement
from polyjax.core.model import ModelConfig
from polyjax.core.op import Choice
from polyjax.core.plan import Plan
from polyjax.core.tables import SHIPPED, load_tables
from polyjax.engine.memory import (
    PoolRequest,
    activation_bytes,
    memory_budget_bytes,
    usable_pages,
)
from polyjax.engine.programs import PlanPrograms
from polyjax.engine.step import SchedulerLimits
from polyjax.engine.types import EngineConfig
from polyjax.io.digest import ParamsDigest
from polyjax.io.files import ModelFiles, Progress, open_model
from polyjax.io.grammar import GrammarCompiler
from polyjax.io.load import load_params, random_params

log = logging.getLogger("polyjax.engine")


@dataclasses.dataclass(frozen=True)
class PlatformDefaults:
    """Limits that a flag of 0 takes."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    compile_threads: int
    warm_calls: int  # CUDA graphs are built in the second call and replayed from the third


CPU_DEFAULTS = PlatformDefaults(16, 512, 16, 2, 0)
ACCELERATOR_DEFAULTS = PlatformDefaults(256, 8192, 64, 8, 3)


def platform_defaults(platform: str) -> PlatformDefaults:
    return CPU_DEFAULTS if platform == "cpu" else ACCELERATOR_DEFAULTS


@dataclasses.dataclass(frozen=True)
class OpenedModel:
    """A model that can be served: its files, its family's config, the dtype it runs in."""

    files: ModelFiles
    config: ModelConfig
    dtype: str
    eos_token_ids: tuple[int, ...]


def open_served_model(config: EngineConfig, files: ModelFiles, platform: str) -> OpenedModel:
    """Raises ModelError for an architecture or config polyjax cannot serve."""
    architectures = files.config.get("architectures") or []
    if not architectures:
        raise ModelError(str(files.path), ["config.json names no architectures"])
    model = models.family(architectures[0]).Config.from_hf(files.config)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else getattr(model, "dtype", "bfloat16")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"--dtype={dtype}: must be auto, float32, bfloat16 or float16")
    return OpenedModel(files, model, dtype, files.eos_token_ids or model.eos_token_ids)


def load_weights(
    config: EngineConfig,
    model: OpenedModel,
    mesh: Mesh,
    mesh_plan: MeshPlan,
    progress: Progress,
    digest: ParamsDigest,
) -> tuple[jax.Array, ...]:
    """Returns the flat tuple of parameters; random ones with --load_format=dummy.

    `digest` takes in what is read.
    """
    abstract = models.abstract(model.config, model.dtype, Placement(mesh_plan, mesh))
    if config.load_format == "dummy":
        params = random_params(
            abstract.specs, seed=config.seed, dtype=model.dtype, mesh=mesh, plan=mesh_plan
        )
    else:
        params = load_params(
            abstract.specs,
            model.files.tensors,
            dtype=model.dtype,
            mesh=mesh,
            plan=mesh_plan,
            where=str(model.files.path),
            progress=progress,
            digest=digest,
        )
    return tuple(params.values())


def grammar_compiler(config: EngineConfig, model: OpenedModel) -> GrammarCompiler:
    """Compiles grammars for the tokenizer that requests are tokenized with.

    Raises ConfigError or ModelError where structured output cannot be served.
    """
    files = open_model(config.tokenizer) if config.tokenizer else model.files
    text = files.open_tokenizer().to_str()
    return GrammarCompiler(text, model.config.vocab_size, model.eos_token_ids)


@dataclasses.dataclass(frozen=True)
class Sizing:
    """The numbers everything else follows from."""

    spec: StateSpec
    limits: SchedulerLimits
    usable_pages: tuple[int, ...]


def size_engine(
    config: EngineConfig, model: OpenedModel, mesh_plan: MeshPlan, device: Any
) -> Sizing:
    """Resolves limits against the model and the memory that is left.

    Raises ConfigError naming the number to change where they cannot hold together.
    """
    defaults = platform_defaults(device.platform)
    page_size = config.block_size or defaults.block_size
    num_seqs = config.max_num_seqs or defaults.max_num_seqs
    batched = config.max_num_batched_tokens or max(defaults.max_num_batched_tokens, num_seqs)
    longest = model.config.max_context_tokens
    if config.max_model_len > longest:
        raise ConfigError(
            f"--max_model_len={config.max_model_len}: the model was made for {longest} tokens"
        )
    wanted = config.max_model_len or longest
    scratch = num_seqs + 32  # a row of a gate's step writes to a page of its own
    ways = tuple(mesh_plan.ways(group.axes) for group in model.config.kv_groups())
    request = PoolRequest(
        model.config, model.dtype, page_size, num_seqs, wanted, batched, scratch, ways
    )
    if config.num_kv_pages:
        pages = [config.num_kv_pages] * len(model.config.kv_groups())
    else:
        budget = memory_budget_bytes(device, config.gpu_memory_utilization)
        pages = usable_pages(request, budget - _step_bytes(request, device))
    whole = [n for n, g in zip(pages, model.config.kv_groups(), strict=True) if not g.window]
    holds = min(whole, default=-(-wanted // page_size)) * page_size
    if config.max_model_len > holds:
        raise ConfigError(
            f"--max_model_len={config.max_model_len} needs {-(-config.max_model_len // page_size)} "
            f"KV pages and there is room for {holds // page_size}: lower --max_model_len, or raise "
            "--gpu_memory_utilization or --num_kv_pages"
        )
    limits = SchedulerLimits(num_seqs, batched, min(wanted, holds), config.max_queued_requests)
    total = tuple(n + 1 + scratch for n in pages)
    spec = StateSpec(model.config, model.dtype, page_size, total, num_seqs, scratch)
    return Sizing(spec, limits, tuple(pages))


def _step_bytes(request: PoolRequest, device: Any) -> int:
    return 0 if device.platform == "cpu" else activation_bytes(request)


# -- the plan --------------------------------------------------------------------------------


def initial_plan(
    config: EngineConfig, sizing: Sizing, mesh_plan: MeshPlan, device: Any, cache: ProgramCache
) -> Plan:
    """The plan that --plan names: "default", "reference" or a JSON file.

    Default plans are kept beside the programs of `cache`. Raises ConfigError for a file that is
    no plan or whose mesh is not the flags'.
    """
    if config.plan == "reference":
        return Plan(mesh=mesh_plan)
    if config.plan != "default":
        return read_plan(Path(config.plan), mesh_plan)
    target = find_chip(device.device_kind)
    # Of a chip that is not described nothing is known to be legal: references serve it.
    if target is None or all(kernel.platform != target.platform for kernel in CATALOGUE.values()):
        return Plan(mesh=mesh_plan)
    table = tuning_table(config, device.device_kind)
    subject = PlanSubject(
        *(sizing.spec, _ladder_limits(sizing), config.max_programs, mesh_plan, target, table)
    )
    return default_plan(subject, cache.directory)


def tuning_table(config: EngineConfig, device_kind: str) -> dict[str, Choice]:
    """The measured choices that --tables names: "auto" for those shipped, "none", or a folder."""
    if config.tables == "none":
        return {}
    root = SHIPPED if config.tables == "auto" else Path(config.tables)
    return load_tables(root, device_kind)


def engine_ladder(config: EngineConfig, sizing: Sizing, plan: Plan, device: Any) -> BucketLadder:
    """The plan's ladder, or one derived from the limits."""
    if plan.ladder is not None:
        return plan.ladder
    return derive_ladder(
        _ladder_limits(sizing), ladder_policy(device.platform), config.max_programs
    )


def _ladder_limits(sizing: Sizing) -> LadderLimits:
    limits = sizing.limits
    return LadderLimits(
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        limits.max_model_len,
        sizing.spec.page_size,
    )


def ladder_policy(platform: str) -> LadderPolicy:
    return CPU_POLICY if platform == "cpu" else ACCELERATOR_POLICY


def mesh_plan_of(config: EngineConfig) -> MeshPlan:
    """The mesh that the flags say; where they say nothing, that of the file --plan names.

    Raises ConfigError for a file that is no plan or wants a mesh the engine has no use for.
    """
    flags = MeshPlan(model=config.tensor_parallel_size, expert=config.expert_parallel_size)
    if flags.num_devices > 1 or config.plan in ("default", "reference"):
        return flags
    mesh_plan = read_plan(Path(config.plan), None).mesh
    for axis in ("data", "sequence"):
        if getattr(mesh_plan, axis) > 1:
            raise ConfigError(f"--plan={config.plan}: an engine has no {axis} parallelism")
    return mesh_plan


def read_plan(path: Path, mesh_plan: MeshPlan | None) -> Plan:
    """The plan of a file, which must be for `mesh_plan` unless that is None."""
    try:
        data: Mapping[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plan={path}: {error}") from error
    if mesh_plan is None:
        return Plan.from_json(data)
    plan = Plan.from_json({"mesh": mesh_plan.to_json(), **data})
    if plan.mesh != mesh_plan:
        raise ConfigError(
            f"--plan={path} is for another mesh: {plan.mesh}, the flags say {mesh_plan}"
        )
    return plan


# -- programs --------------------------------------------------------------------------------


class ProgramSource:
    """Gives programs: from the cache, or compiled in this process while it does not serve yet."""

    def __init__(self, spec: StateSpec, mesh: Mesh, cache: ProgramCache):
        self.spec = spec
        self.mesh = mesh
        self.cache = cache
        self.platform = mesh.devices.flat[0].platform
        # Executions of virtual CPU devices share one thread pool: with several in flight the
        # devices of one can wait for each other for ever.
        self.one_at_a_time = mesh.size > 1 and self.platform == "cpu"

    def request(self, plan: Plan, key: ProgramKey) -> ProgramRequest:
        return ProgramRequest(self.spec, plan, key)

    def keys(self, ladder: BucketLadder) -> tuple[ProgramKey, ...]:
        """On a CPU compile time decides: a noisy decode step is two programs there."""
        return program_keys(ladder, fused_gumbel=self.platform != "cpu")

    def cached(self, request: ProgramRequest) -> StepProgram | None:
        """The program from the cache, or None. Raises StateABIError if it expects another state."""
        program = self.cache.load(request, self.mesh)
        if program is not None:
            expected_abi(request, self.mesh).check(program.abi)
        return program

    def abi_digest(self, plan: Plan) -> str:
        """The digest of the state that every program of a plan has to fit."""
        kinds = (Kind.DECODE_GREEDY, Kind.SAMPLE_FULL)
        requests = [self.request(plan, ProgramKey(kind)) for kind in kinds]
        lines = [line for r in requests for line in expected_abi(r, self.mesh).lines]
        return StateABI(tuple(dict.fromkeys(lines))).digest

    def also_named(self, known: ProgramRequest, equal: ProgramRequest) -> None:
        """Lets the cache find a program by the request of another plan that has it, too."""
        self.cache.link(known, equal, self.mesh)

    def is_cached(self, request: ProgramRequest) -> bool:
        """Whether there is an entry; it may still turn out to be unsound."""
        return self.cache.path(request, self.mesh).exists()

    def obtain(self, request: ProgramRequest) -> StepProgram:
        """The program, compiled here if no cache has it. Only for before serving."""
        program = self.cached(request)
        if program is not None:
            return program
        program = compile_program(request, self.mesh)
        expected_abi(request, self.mesh).check(program.abi)
        try:
            self.cache.store(request, self.mesh, program)
        except OSError as error:
            log.warning("compile cache: %s; programs will be compiled again next time", error)
        return program

    def build(
        self, plan: Plan, ladder: BucketLadder, progress: Progress, compiler: CompilerProcess
    ) -> PlanPrograms:
        """Every program of a plan. Tracing holds the interpreter, compiling does not: threads.

        What a kernel file is part of is compiled by `compiler`: no file is executed here.
        """
        keys = self.keys(ladder)
        if plan.sources:
            self._compile_elsewhere([self.request(plan, key) for key in keys], progress, compiler)
        threads = platform_defaults(self.platform).compile_threads
        programs: dict[ProgramKey, StepProgram] = {}
        progress("compiling", 0, len(keys))
        with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
            requests = [self.request(plan, key) for key in keys]
            for key, program in zip(keys, pool.map(self.obtain, requests), strict=True):
                programs[key] = program
                progress("compiling", len(programs), len(keys))
        return PlanPrograms(plan, ladder, programs)

    def _compile_elsewhere(
        self, requests: list[ProgramRequest], progress: Progress, compiler: CompilerProcess
    ) -> None:
        """Fills the cache. Raises ConfigError with what the compiler process said."""
        missing = [request for request in requests if self.cached(request) is None]
        for request in missing:
            compiler.submit(request)
        done = 0
        while done < len(missing):
            progress("compiling kernel files", done, len(missing))
            for answer in compiler.poll(wait_s=0.5):
                if answer.error is not None:
                    compiler.cancel()
                    raise ConfigError(f"the plan's {answer.request.key}: {answer.error}")
                done += 1


def open_cache(config: EngineConfig) -> ProgramCache:
    """The program cache: --compile_cache_dir, or its default.

    "none" gives one that this engine alone uses and that ends with it: programs of the compiler
    process come through it.
    """
    if config.compile_cache_dir != "none":
        return ProgramCache(config.compile_cache_dir or default_cache_dir())
    directory = tempfile.mkdtemp(prefix="polyjax-programs-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return ProgramCache(directory)
