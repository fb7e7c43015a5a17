"""What a measuring process runs: it opens one bench, then measures and judges candidates on it."""

from __future__ import annotations

import base64
import pickle
from typing import Any

from polyjax.core.plan import Plan
from polyjax.engine.types import EngineConfig
from search.compile_jobs import OpCandidate
from search.op_bench import OpBench, OpSetup
from search.plan_bench import PlanBench, PlanSetup, describe

_benches: dict[str, Any] = {}  # the one that is open, by what it was opened for


def open_bench(name: str, setup: PlanSetup | OpSetup) -> str:
    """Opens the bench of a setup; returns its `opened`, pickled, in base64.

    No candidate has run in this process when it is opened for the first time, and the parent takes
    only that answer.
    """
    _benches.clear()  # its arrays go before the next one's come
    _benches[name] = PlanBench(setup) if isinstance(setup, PlanSetup) else OpBench(setup)
    return _pickled(_benches[name].opened)


def describe_model(config: EngineConfig) -> str:
    """Returns a pickled DescribedModel: what there is to tune in a model, without its weights."""
    return _pickled(describe(config))


def _pickled(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def measure(name: str, *arguments: Any) -> dict[str, Any]:
    """Returns the measurement of a candidate on the open bench."""
    found: dict[str, Any] = _benches[name].measure(*arguments)
    return found


def judge(name: str, candidate: OpCandidate | Plan) -> dict[str, Any]:
    """Returns what all gates say of a candidate that is about to be promoted."""
    found: dict[str, Any] = _benches[name].judge(candidate)
    return found
