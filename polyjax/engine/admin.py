"""What operators tell a running engine: which plan is in force, install another, go back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polyjax.core.errors import RequestError
from polyjax.engine import commands
from polyjax.engine.memory import room_for_weights
from polyjax.engine.sleep import read_sleep_request
from polyjax.engine.weights import read_load_request

if TYPE_CHECKING:
    from polyjax.engine.engine import Engine

NEED_WEIGHTS = ("weights/load", "plan/install", "plan/propose", "ladder/set")


def run_command(engine: Engine, command: str, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Runs an admin command between two steps. All payloads and answers are JSON objects.

    "plan": the plan in force, those resident, the promotion under way or last ended.
    "plan/install": {"plan": {...}}, {"path": ...} or {"compiler_options": {...}} (the plan in force
        with other options); optional "promotion": "immediate" (the default: gates, then in force)
        or "canary" (first run in a process that can be killed, gates, shadow steps, paired canary;
        in force only if faster), "lineage": text and "agent": who asks. Answers at once, as "plan".
    "plan/rollback": back to the plan before, or forgets a promotion under way. Answers as "plan".
    "plan/propose": {"plan": {...}, "lineage": text, "agent": text}, the whole way, one after
        another -> {"proposal_id": int, "stage": "queued"}.
    "plan/proposal": {"proposal_id": int} -> {"proposal_id", "stage", "reason", "agent", "lineage",
        "digest", "canary": {...}, "watch": {...}, ...}; "stage" ends as "current" with
        "watch"."state" == "survived", or as "refused" or "rolled_back" with a "reason".
    "events": {"after": int, "limit": int} -> {"events": [...], "next": int, "oldest": int}: those
        numbered above "after"; ask again with "after" = "next".
    "limits": {} -> max_num_seqs, max_num_batched_tokens, tune_duty and what they may be raised to.
    "limits/set": any of "max_num_seqs", "max_num_batched_tokens", "tune_duty". Answers as "limits".
    "ladder": {} -> {"ladder": {...}, "launches": {...}}: the ladder in force and what ran on it.
    "ladder/set": {"derive": true, "max_programs": int} or {"ladder": {...}}; optional "promotion".
        The plan in force on another ladder, installed like a plan. Answers as "plan".
    "tune/lease": {"ms": number, "agent": text} -> {"granted": bool, "lease_id": int or null,
        "expires_monotonic_s": float or null, "reason": text, "retry_after_s": float}. Times are of
        CLOCK_MONOTONIC, the same in all processes of a machine.
    "tune/check": {"lease_id": int} -> {"valid": bool, "reason": text}; a lease is revoked within a
        step when load rises, and ends at its deadline.
    "tune/release": {"lease_id": int} -> {"released": bool, "used_ms": float}; what was not used
        goes back to the budget.

    "weights": {"current": {...}, "history": [...], "loads": [...]}: those in force, all that were,
        each with the epoch it came with, and how far loads got.
    "weights/load": {"path": text}, optional "running": "keep" or "drop", "staging": "auto",
        "device" or "host" -> {"load": number, ...}; answers at once, otherwise as "weights".
    "sleep": {"is_sleeping": bool, "state", "level", "doing", "done", "total", "error"}.
    "sleep/begin": optional "level": 1 or 2, "running": "keep" or "drop". Answers as "sleep".
    "sleep/wake": {} -> as "sleep", at once.

    Raises RequestError: 400 for a malformed payload, 404 for an unknown command, proposal or
    lease, 409 for what cannot be done now.
    """
    if command in NEED_WEIGHTS and not engine.sleeper.is_awake:
        raise RequestError("the engine is asleep: wake it first", status=409)
    if (answer := commands.COMMANDS.get(command)) is not None:
        return answer(engine, payload)
    match command:
        case "weights":
            return engine.weights.to_json()
        case "weights/load":
            room = room_for_weights(engine.state.params, engine.state.kv)
            load = engine.weights.start(*read_load_request(payload), room)
            return {"load": load.number, **engine.weights.to_json()}
        case "sleep":
            return engine.sleeper.to_json()
        case "sleep/begin":
            engine.sleeper.sleep(engine, *read_sleep_request(payload))
            return engine.sleeper.to_json()
        case "sleep/wake":
            engine.sleeper.wake()
            return engine.sleeper.to_json()
        case "plan":
            pass
        case "kernels":
            return {"kernels": [file.to_json() for file in engine.kernels.files]}
        case "kernels/add":
            return engine.kernels.add(payload).to_json()
        case "plan/install":
            commands.install(engine, payload)
        case "ladder/set":
            commands.set_ladder(engine, payload)
        case "plan/rollback":
            engine.changes.roll_back(engine.step_number, "operator")
            if not engine.has_work:  # nobody steps an idle engine: apply it now
                engine.step()
        case _:
            raise RequestError(f"no admin command {command!r}", status=404)
    return describe(engine)


def describe(engine: Engine) -> dict[str, Any]:
    """The plan in force, those resident, and the installation under way or last made."""
    programs, installation = engine.programs, engine.installer.current
    return {
        "digest": programs.current.plan.digest,
        "epoch": programs.epoch,
        "numerics": programs.current.plan.numerics,
        "programs": len(programs.current.programs),
        "state_abi": engine.source.abi_digest(programs.current.plan),
        "plan": programs.current.plan.to_json(),
        "weights": engine.weights.current.to_json(),
        "resident": [resident.plan.digest for resident in programs.resident],
        "installation": installation.to_json() if installation else None,
    }
