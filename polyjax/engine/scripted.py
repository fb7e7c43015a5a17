"""An engine without a model: it repeats the prompt. For tests and for measuring the HTTP side.

It keeps the promises of `EngineLike` (limits, stops, logprobs, aborts, plans) at a set pace, so
whatever is slow or wrong above it is not the model's doing. It ignores grammars: what the prompt
holds is what comes, also where a test wants the answer that a grammar would have made. No jax.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import msgspec

from polyjax.core.errors import ConfigError, RequestError
from polyjax.engine.events import EventLog
from polyjax.engine.types import (
    EngineConfig,
    EngineInfo,
    EngineStats,
    FinishReason,
    Request,
    RequestOutput,
    TokenLogprobs,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """How the scripted engine behaves.

    A step takes `step_s` and yields a token for every running request. A prompt that contains
    `fail_token` fails alone, after two tokens; `crash_token` makes a step raise; `hang_token` makes
    a step never end. -1 stands for no such token.
    """

    load_s: float = 0.0
    step_s: float = 0.005
    vocab_size: int = 512
    eos_token_ids: tuple[int, ...] = ()
    max_model_len: int = 4096
    max_num_seqs: int = 256
    block_size: int = 16
    num_kv_pages: int = 4096
    fail_token: int = -1
    crash_token: int = -1
    hang_token: int = -1


def read_script(settings: str | None) -> Script | None:
    """Returns the script that a JSON object describes. Raises ConfigError naming what is wrong."""
    if settings is None:
        return None
    try:
        return msgspec.json.decode(settings, type=Script)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--scripted_engine: {error}") from error


@dataclasses.dataclass(slots=True)
class _Running:
    request: Request
    generated: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + self.generated

    def next_token(self) -> int:
        """Greedy starts at the prompt's first token, sampling at the one that the seed picks."""
        prompt, params = self.request.prompt_token_ids, self.request.params
        start = 0 if params.greedy else (params.seed or 0)
        return prompt[(start + self.generated) % len(prompt)]


class ScriptedEngine:
    """Satisfies `EngineLike`: each request's output is its own prompt, over and over."""

    def __init__(self, config: EngineConfig, script: Script):
        time.sleep(script.load_s)
        self.script = script
        self.max_model_len = config.max_model_len or script.max_model_len
        self.max_num_seqs = config.max_num_seqs or script.max_num_seqs
        self._waiting: list[_Running] = []
        self._running: list[_Running] = []
        self._plans = ["default"]
        self._events = EventLog(lambda: (self._stats.step, self._stats.epoch))
        self._stats = EngineStats(plan_digest="default", last_step_monotonic_s=time.monotonic())
        self._next_step_s = 0.0
        name = config.served_model_name or config.model or "scripted"
        self.info = EngineInfo(
            model_name=name,
            model_path=config.model or "",
            device="scripted",
            dtype="none",
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            vocab_size=script.vocab_size,
            eos_token_ids=script.eos_token_ids,
            block_size=script.block_size,
            num_kv_pages=script.num_kv_pages,
            kv_capacity_tokens=script.num_kv_pages * script.block_size,
            num_programs=0,
            plan_digest="default",
            epoch=0,
            load_s=script.load_s,
            compile_s=0.0,
        )

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        if len(request.prompt_token_ids) >= self.max_model_len:
            raise RequestError("the prompt does not fit the context", "prompt")
        self._waiting.append(_Running(request))

    def abort(self, request_id: str) -> None:
        self._waiting = [r for r in self._waiting if r.request.id != request_id]
        self._running = [r for r in self._running if r.request.id != request_id]

    def step(self) -> list[RequestOutput]:
        self._keep_pace()
        started = self._admit()
        outputs = [self._advance(running, running in started) for running in self._running]
        finished = {output.request_id for output in outputs if output.finish_reason}
        self._running = [r for r in self._running if r.request.id not in finished]
        prompt_tokens = sum(len(r.request.prompt_token_ids) for r in started)
        self._stats = dataclasses.replace(
            self._stats,
            step=self._stats.step + 1,
            prompt_tokens=self._stats.prompt_tokens + prompt_tokens,
            generation_tokens=self._stats.generation_tokens + len(outputs),
            iteration_tokens=prompt_tokens + len(outputs),
            last_step_monotonic_s=time.monotonic(),
        )
        return outputs

    def admin(self, command: str, payload: dict[str, Any]) -> dict[str, Any]:
        match command:
            case "plan":
                pass
            case "events":
                return self._events.answer(payload.get("after", 0))
            case "plan/install":
                if not isinstance(digest := payload.get("digest"), str):
                    raise RequestError("digest must be a string", "digest")
                self._plans.append(digest)
                self._count_plan_change(swaps=1)
            case "plan/rollback":
                if len(self._plans) == 1:
                    raise RequestError("there is no earlier plan to roll back to", status=409)
                self._plans.pop()
                self._count_plan_change(rollbacks=1)
            case _:
                raise RequestError(f"no admin command {command!r}", status=404)
        return {"digest": self._plans[-1], "epoch": self._stats.epoch, "resident": self._plans}

    def stats(self) -> EngineStats:
        pages = sum(-(-r.num_tokens // self.script.block_size) for r in self._running)
        return dataclasses.replace(
            self._stats,
            running=len(self._running),
            waiting=len(self._waiting),
            kv_usage=pages / self.script.num_kv_pages,
        )

    def close(self) -> None:
        self._waiting, self._running = [], []

    def _keep_pace(self) -> None:
        now = time.monotonic()
        if self._next_step_s > now:
            time.sleep(self._next_step_s - now)
        # From where this step should have been, so that one late step does not slow the rest.
        self._next_step_s = max(self._next_step_s, now - self.script.step_s) + self.script.step_s

    def _admit(self) -> list[_Running]:
        free = self.max_num_seqs - len(self._running)
        started, self._waiting = self._waiting[:free], self._waiting[free:]
        self._running += started
        return started

    def _advance(self, running: _Running, is_first: bool) -> RequestOutput:
        request, params = running.request, running.request.params
        if self.script.crash_token in request.prompt_token_ids:
            raise RuntimeError("scripted crash")
        if self.script.hang_token in request.prompt_token_ids:
            time.sleep(3600)
        if self.script.fail_token in request.prompt_token_ids and running.generated == 2:
            return RequestOutput(request.id, [], FinishReason.ERROR, error="scripted failure")
        token = running.next_token()
        running.generated += 1
        finish_reason, stop_reason = self._finish(running, token)
        prompt = request.prompt_token_ids
        return RequestOutput(
            request_id=request.id,
            token_ids=[token],
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            logprobs=None if params.logprobs is None else [self._score(token, params.logprobs)],
            prompt_logprobs=[None, *(self._score(t, params.prompt_logprobs) for t in prompt[1:])]
            if is_first and params.prompt_logprobs is not None
            else None,
            epoch=self._stats.epoch,
            scheduled_s=time.monotonic() if is_first else 0.0,
        )

    def _finish(self, running: _Running, token: int) -> tuple[FinishReason | None, int | None]:
        params = running.request.params
        if running.generated > params.min_tokens:
            if token in params.stop_token_ids:
                return FinishReason.STOP, token
            if not params.ignore_eos and token in self.script.eos_token_ids:
                return FinishReason.STOP, None
        limit = self.max_model_len - len(running.request.prompt_token_ids)
        if running.generated >= min(limit, params.max_tokens or limit):
            return FinishReason.LENGTH, None
        return None, None

    def _score(self, token: int, num_top: int) -> TokenLogprobs:
        """The token itself is always the best one; its successors follow at equal distances."""
        top = [((token + i) % self.script.vocab_size, -0.25 * (i + 1)) for i in range(num_top)]
        return TokenLogprobs(token, -0.25, 0, top)

    def _count_plan_change(self, swaps: int = 0, rollbacks: int = 0) -> None:
        self._stats = dataclasses.replace(
            self._stats,
            epoch=self._stats.epoch + 1,
            plan_digest=self._plans[-1],
            swaps=self._stats.swaps + swaps,
            rollbacks=self._stats.rollbacks + rollbacks,
        )
        self._events.add("swap" if swaps else "rollback", plan=self._plans[-1])
