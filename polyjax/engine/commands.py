"""The admin commands about plans, limits, ladders, leases and events: payloads in, answers out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyjax.compiler.buckets import LadderLimits, LaunchCounts, ladder_for
from polyjax.core.buckets import BucketLadder
from polyjax.core.errors import ConfigError, RequestError
from polyjax.core.plan import Plan
from polyjax.engine import build
from polyjax.engine.events import CAPACITY
from polyjax.engine.lease import MAX_LEASE_MS, Lease
from polyjax.engine.promotion import Origin, Way

if TYPE_CHECKING:
    from polyjax.engine.engine import Engine

Payload = Mapping[str, Any]
Answer = dict[str, Any]

_ORIGIN = ("promotion", "lineage", "agent")
_MIN_LAUNCHES = 100  # a ladder derived from less would fit one conversation
_MAX_TEXT = 200


# -- plans -----------------------------------------------------------------------------------


def install(engine: Engine, payload: Payload) -> None:
    """Begins to install the plan that a payload describes."""
    described = {name: value for name, value in payload.items() if name not in _ORIGIN}
    plan = read_plan(described, engine.programs.current.plan)
    engine.changes.start(plan, read_origin(payload))


def read_origin(payload: Payload) -> Origin:
    """How a plan is to be promoted and who asks. Raises RequestError naming the field."""
    way = payload.get("promotion", Way.IMMEDIATE.value)
    if way not in tuple(Way):
        raise RequestError(f"promotion must be one of {', '.join(Way)}", "promotion")
    return Origin(Way(way), _text(payload, "agent", "operator"), _text(payload, "lineage", ""))


def read_plan(payload: Payload, current: Plan) -> Plan:
    """The plan a payload describes. Raises RequestError naming what is wrong with it."""
    given = [name for name in ("plan", "path", "compiler_options") if name in payload]
    if len(given) != 1 or set(payload) - set(given):
        raise RequestError(
            'give exactly one of "plan" (an object), "path" (a JSON file of the server) and '
            '"compiler_options" (an object of XLA options)'
        )
    name, value = given[0], payload[given[0]]
    try:
        if name == "path" and isinstance(value, str):
            name, value = "plan", json.loads(Path(value).read_text())
        if not isinstance(value, dict):
            raise ConfigError(f"{name} must be {'a string' if name == 'path' else 'an object'}")
        if name == "compiler_options":
            options = tuple(sorted((str(key), str(option)) for key, option in value.items()))
            return dataclasses.replace(current, compiler_options=options)
        return Plan.from_json({"mesh": current.mesh.to_json(), **value})
    except (ConfigError, OSError, ValueError) as error:
        raise RequestError(str(error), given[0]) from error


def propose(engine: Engine, payload: Payload) -> Answer:
    _only(payload, "plan", "lineage", "agent")
    plan = read_plan({"plan": payload.get("plan")}, engine.programs.current.plan)
    lineage, agent = _text(payload, "lineage", ""), _text(payload, "agent", "tuner")
    proposal = engine.changes.proposals.add(plan, lineage, agent)
    engine.events.add("proposed", plan=plan.digest, **proposal.origin.to_json())
    return proposal.to_json()


def proposal(engine: Engine, payload: Payload) -> Answer:
    _only(payload, "proposal_id")
    return engine.changes.proposals.find(payload.get("proposal_id")).to_json()


def events(engine: Engine, payload: Payload) -> Answer:
    _only(payload, "after", "limit")
    after, limit = _integer(payload, "after", 0, 2**53, 0), payload.get("limit", CAPACITY)
    return engine.events.answer(after, _integer({"limit": limit}, "limit", 1, CAPACITY))


# -- limits and ladder -----------------------------------------------------------------------


def limits(engine: Engine, payload: Payload) -> Answer:
    """The limits in force; `slots` is what max_num_seqs may be raised to without a restart."""
    _only(payload)
    current = engine.scheduler.limits
    return {
        "max_num_seqs": current.max_num_seqs,
        "max_num_batched_tokens": current.max_num_batched_tokens,
        "max_model_len": current.max_model_len,
        "tune_duty": engine.leases.duty,
        "slots": engine.scheduler.num_slots,
    }


def set_limits(engine: Engine, payload: Payload) -> Answer:
    """All of them or none. Sequences that run already go on; fewer are admitted from now on."""
    _only(payload, "max_num_seqs", "max_num_batched_tokens", "tune_duty")
    if not payload:
        raise RequestError("give at least one of max_num_seqs, max_num_batched_tokens, tune_duty")
    counts = {
        name: _integer(payload, name, 1, 2**31 - 1)
        for name in ("max_num_seqs", "max_num_batched_tokens")
        if name in payload
    }
    duty = _number(payload, "tune_duty", 0.0, 1.0, engine.leases.duty)
    before = limits(engine, {})
    try:
        engine.scheduler.set_limits(dataclasses.replace(engine.scheduler.limits, **counts))
    except ConfigError as error:
        raise RequestError(str(error), next(iter(counts), None), 409) from error
    engine.leases.set_duty(duty)
    after = limits(engine, {})
    changed = {name: [before[name], after[name]] for name in after if after[name] != before[name]}
    engine.events.add("limits", changed=changed)
    return after


def ladder(engine: Engine, payload: Payload) -> Answer:
    _only(payload)
    current = engine.programs.current.ladder
    return {"ladder": dataclasses.asdict(current), "launches": engine.shapes.to_json()}


def set_ladder(engine: Engine, payload: Payload) -> None:
    """Installs the plan in force on another ladder: given, or derived from what was launched."""
    _only(payload, "ladder", "derive", "max_programs", *_ORIGIN)
    current = engine.programs.current.plan
    if ("ladder" in payload) == bool(payload.get("derive")):
        raise RequestError('give either "ladder" (an object) or "derive": true')
    if "ladder" in payload:
        data = {**current.to_json(), "ladder": payload["ladder"]}
        plan = read_plan({"plan": data}, current)
    else:
        most = _integer(payload, "max_programs", 0, 10_000, engine.config.max_programs)
        plan = dataclasses.replace(current, ladder=_observed_ladder(engine, most))
    if plan.ladder is None:
        raise RequestError("ladder must be an object", "ladder")
    engine.changes.start(plan, read_origin(payload))


def _observed_ladder(engine: Engine, most: int) -> BucketLadder:
    """The ladder that would have padded the launches so far least. Raises RequestError (409)."""
    shapes, page_size = engine.shapes, engine.spec.page_size
    if shapes.total < _MIN_LAUNCHES:
        reason = f"{shapes.total} launches are too few to derive a ladder from: {_MIN_LAUNCHES}"
        raise RequestError(reason, "derive", 409)
    contexts = {pages * page_size: count for pages, count in shapes.decode_pages.items()}
    counts = LaunchCounts(shapes.decode_sequences, contexts, shapes.prefill_tokens)
    current = engine.scheduler.limits
    allowed = LadderLimits(
        current.max_num_seqs, current.max_num_batched_tokens, current.max_model_len, page_size
    )
    policy = build.ladder_policy(engine.source.platform)
    if len({bucket.pages for bucket in engine.programs.current.ladder.decode}) == 1:
        policy = dataclasses.replace(policy, context_factor=0)
    try:
        return ladder_for(counts, allowed, policy, most)
    except ConfigError as error:
        raise RequestError(str(error), "max_programs", 409) from error


# -- leases ----------------------------------------------------------------------------------


def lease(engine: Engine, payload: Payload) -> Answer:
    _only(payload, "ms", "agent")
    ms = _number(payload, "ms", 0.0, MAX_LEASE_MS)
    if not ms:
        raise RequestError("ms must be more than 0", "ms")
    agent, scheduler = _text(payload, "agent", "tuner"), engine.scheduler
    if not engine.sleeper.is_awake or engine.installer.is_disturbing:
        return {**_REFUSED, "reason": "the engine is asleep or tries a plan", "retry_after_s": 1.0}
    answer = engine.leases.request(ms, agent, scheduler.num_running, scheduler.num_waiting)
    if answer.lease is not None:
        engine.events.add("lease", lease_id=answer.lease.id, agent=agent, ms=ms)
    return answer.to_json()


def check_lease(engine: Engine, payload: Payload) -> Answer:
    found = _lease(engine, payload)
    return {"valid": found.end_s is None, "reason": found.reason}


def release_lease(engine: Engine, payload: Payload) -> Answer:
    found = _lease(engine, payload)
    was_valid = found.end_s is None
    used_s = engine.leases.release(found)
    return {"released": was_valid, "used_ms": round(used_s * 1000, 3)}


_REFUSED: Answer = {"granted": False, "lease_id": None, "expires_monotonic_s": None}


def _lease(engine: Engine, payload: Payload) -> Lease:
    _only(payload, "lease_id")
    found = engine.leases.find(_integer(payload, "lease_id", 1, 2**53))
    if found is None:
        raise RequestError(f"no lease {payload['lease_id']}", "lease_id", 404)
    return found


COMMANDS: dict[str, Callable[[Engine, Payload], Answer]] = {
    "plan/propose": propose,
    "plan/proposal": proposal,
    "events": events,
    "limits": limits,
    "limits/set": set_limits,
    "ladder": ladder,
    "tune/lease": lease,
    "tune/check": check_lease,
    "tune/release": release_lease,
}


# -- reading payloads ------------------------------------------------------------------------


def _only(payload: Payload, *known: str) -> None:
    if unknown := sorted(set(payload) - set(known)):
        allowed = f"known: {', '.join(known)}" if known else "none are known"
        raise RequestError(f"unknown fields {', '.join(unknown)}; {allowed}", unknown[0])


def _text(payload: Payload, name: str, default: str) -> str:
    value = payload.get(name, default)
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise RequestError(f"{name} must be a text of at most {_MAX_TEXT} characters", name)
    return value


def _integer(payload: Payload, name: str, low: int, high: int, default: int | None = None) -> int:
    value = payload.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(f"{name} must be an integer in [{low}, {high}]", name)
    return value


def _number(
    payload: Payload, name: str, low: float, high: float, default: float | None = None
) -> float:
    value = payload.get(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or not is_number or not low <= value <= high:
        raise RequestError(f"{name} must be a number in [{low:g}, {high:g}]", name)
    return float(value)
