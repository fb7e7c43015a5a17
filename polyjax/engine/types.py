"""What crosses the engine's border: requests in, tokens out, limits, statistics. No jax here.

HTTP processes and the engine process exchange these dataclasses as msgpack; the offline `LLM` hands
them over directly.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any, Protocol

from polyjax.core.errors import ConfigError, RequestError

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300


@dataclasses.dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of an answer must match; `kind` is one of polyjax.io.grammar.KINDS."""

    kind: str
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen; names and meanings follow the OpenAI and vLLM APIs.

    Raises RequestError naming the field for values out of range, NaN included. `temperature` 0 is
    greedy. `top_k` 0 and -1 mean all. `logprobs` counts alternatives besides the sampled token
    (None: none wanted). `max_tokens` None means up to the context limit. `seed` None draws one.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    numerics: str | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0.0, 2.0 * 50)
        _in_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("top_k", self.top_k, -1, 2**31 - 1)
        _in_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("n", self.n, 1, 128)
        _in_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None:
            _in_range("max_tokens", self.max_tokens, 0, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError("min_tokens is larger than max_tokens", "min_tokens")
        if self.grammar is not None and self.min_tokens:
            raise RequestError(
                "min_tokens cannot be combined with a grammar: the text ends where the grammar "
                "lets it; ask for a minimal length in the grammar",
                "min_tokens",
            )
        if self.seed is not None:
            _in_range("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _in_range(name, getattr(self, name), 0, MAX_LOGPROBS)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(f"logit_bias has more than {MAX_LOGIT_BIAS} entries", "logit_bias")
        for _, bias in self.logit_bias:
            _in_range("logit_bias", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def plain(self) -> bool:
        """Whether pure temperature sampling suffices: no filter, penalty, bias, mask, logprobs."""
        return (
            self.top_k in (0, -1)
            and self.top_p == 1.0
            and self.min_p == 0.0
            and not self.penalised
            and not self.logit_bias
            and self.logprobs is None
            and self.min_tokens == 0
            and self.grammar is None
        )

    @property
    def penalised(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


def _in_range(name: str, value: float, low: float, high: float, open_low: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if (
        not number
        or math.isnan(value)
        or value < low
        or value > high
        or (open_low and value == low)
    ):
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} must be in {bracket}{low}, {high}], not {value!r}", name)


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate (an API request with n > 1 becomes n of these).

    `arrival_s` is time.monotonic() at the border. A lower `priority` is served first. `cache_salt`
    separates prefix caches of tenants.
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_s: float = 0.0
    priority: int = 0
    cache_salt: str = ""


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token's own, its rank (0 best), the alternatives."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclasses.dataclass(slots=True)  # not frozen: that takes 5 times as long, 256 times a step
class RequestOutput:
    """What one step added to one request. Nobody changes it once it is made.

    `logprobs` parallels `token_ids` when asked for. `prompt_logprobs` (position 0 is None) comes
    once, with the first output. `stop_reason` is the stop token id that ended it, if one did.
    `epoch` numbers the plan and weights that computed the last token. `error` explains
    FinishReason.ERROR; `error_status` is its HTTP status where it is not the request's or the
    engine's fault.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    epoch: int = 0
    scheduled_s: float = 0.0
    error: str | None = None
    error_param: str | None = None
    error_status: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits and sources of one engine; every field is a flag of the same name.

    `dtype` "auto" is float32 on a CPU, else the checkpoint's. `max_model_len` 0 takes the model's,
    lowered to what the KV pool can hold. `num_kv_pages` 0 sizes the pool from
    `gpu_memory_utilization`. `max_num_seqs` and `max_num_batched_tokens` 0 take the platform's
    default.
    """

    model: str | None = None
    served_model_name: str | None = None
    tokenizer: str | None = None
    load_format: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    block_size: int = 0
    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    gpu_memory_utilization: float = 0.9
    num_kv_pages: int = 0
    enable_prefix_caching: bool = True
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    plan: str = "default"
    tables: str = "auto"
    max_programs: int = 0
    compile_cache_dir: str | None = None
    fail_on_recompile: bool = False
    resident_plans: int = 2
    max_queued_requests: int = 1024
    state_dir: str | None = None
    audit_log: str | None = None
    watch_steps: int = 200
    tune_duty: float = 0.005

    def __post_init__(self) -> None:
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError("--gpu_memory_utilization must be in (0, 1]")
        if not 0.0 <= self.tune_duty <= 1.0:
            raise ConfigError("--tune_duty must be in [0, 1]")
        if self.watch_steps < 1:
            raise ConfigError("--watch_steps must be at least 1")
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "num_kv_pages",
            "block_size",
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name} must not be negative")
        if self.block_size and (self.block_size & (self.block_size - 1) or self.block_size > 256):
            raise ConfigError("--block_size must be a power of two up to 256")


@dataclasses.dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine that is ready tells its clients. `numerics` is the class of its plan."""

    model_name: str
    model_path: str
    device: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_kv_pages: int
    kv_capacity_tokens: int
    num_programs: int
    plan_digest: str
    epoch: int
    load_s: float
    compile_s: float
    numerics: str = "bounded"


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters (monotonic) and gauges of an engine, sampled between steps.

    `sleep_level` is 0 exactly while it is awake. `phase_us` is a step's time by phase, of late;
    `phase_s` is all the time that the engine process has spent, by phase.
    """

    step: int = 0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    epoch: int = 0
    plan_digest: str = ""
    swaps: int = 0
    rollbacks: int = 0
    compiles_after_ready: int = 0
    retraces_after_ready: int = 0
    last_step_monotonic_s: float = 0.0
    iteration_tokens: int = 0
    weights_path: str = ""
    weights_digest: str = ""
    sleep_level: int = 0
    tune: dict[str, Any] = dataclasses.field(default_factory=dict)
    phase_us: dict[str, float] = dataclasses.field(default_factory=dict)
    phase_s: dict[str, float] = dataclasses.field(default_factory=dict)


class EngineLike(Protocol):
    """What the engine process drives: the real engine, or a scripted one in HTTP tests."""

    info: EngineInfo

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would do anything."""

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError where it can never be served."""

    def abort(self, request_id: str) -> None:
        """Forgets a request and frees its pages before the next step; unknown ids are ignored."""

    def step(self) -> list[RequestOutput]:
        """Launches one step, returns what the previous one made; never raises for one request."""

    def admin(self, command: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Runs an admin command ("plan", "plan/install", "plan/rollback", ...).

        Raises RequestError (status 400, 404 or 409) with the reason."""

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...
