"""What a measuring process runs: it opens one bench, then measures and judges candidates on it."""

from __future__ import annotations

import base64
import dataclasses
import pickle
import time
from typing import Any

import jax

from polyjax.compiler.cache import source_digest
from polyjax.core.chips import chip
from polyjax.core.op import Workload
from polyjax.core.plan import Plan
from polyjax.engine.build import open_served_model
from polyjax.engine.types import EngineConfig
from polyjax.io.files import open_model
from search import mesh
from search.compile_jobs import OpCandidate
from search.cost.mesh import MeshCost
from search.environment import facts
from search.op_bench import OpBench, OpSetup, describe_chain
from search.plan_bench import PlanBench, PlanSetup, describe
from search.traffic import TrafficSpec

_benches: dict[str, Any] = {}  # the one that is open, by what it was opened for


def open_bench(name: str, setup: PlanSetup | OpSetup) -> str:
    """Opens the bench of a setup; returns its `opened`, pickled, in base64.

    No candidate has run in this process when it is opened for the first time, and the parent takes
    only that answer.
    """
    _benches.clear()  # its arrays go before the next one's come
    _benches[name] = PlanBench(setup) if isinstance(setup, PlanSetup) else OpBench(setup)
    return _pickled(_benches[name].opened)


def describe_workload(workload: Workload) -> str:
    """Returns pickled (device kind, ChainSpec, avals): a bench of the workload opens with these."""
    return _pickled((jax.devices()[0].device_kind, *describe_chain(workload)))


def describe_model(config: EngineConfig) -> str:
    """Returns a pickled DescribedModel: what there is to tune in a model, without its weights."""
    return _pickled(describe(config))


@dataclasses.dataclass(frozen=True)
class RankedMeshes:
    """The predicted cost of every mesh plan, and what else the trials of them depend on."""

    environment: dict[str, str]
    subject: dict[str, str]
    costs: list[MeshCost]


def rank_meshes(config: EngineConfig, traffic: TrafficSpec) -> str:
    """Returns pickled RankedMeshes over all devices of this process."""
    devices = jax.devices()
    model = open_served_model(config, open_model(config.model), devices[0].platform)
    target = chip(devices[0].device_kind)
    costs = mesh.rank(model.config, model.dtype, traffic, target, len(devices))
    subject = {"model": repr(model.config), "dtype": model.dtype, "source": source_digest()}
    return _pickled(RankedMeshes(facts(devices[0]), subject, costs))


def measure_mesh(config: EngineConfig, traffic: TrafficSpec, chosen: MeshCost) -> dict[str, Any]:
    """Serves the traffic on one mesh plan; returns its samples and the engine's plan."""
    begun = time.perf_counter()
    (found,) = mesh.measure(config, [chosen], traffic, best=1)
    return {
        "status": "crashed" if found.plan is None else "passed",
        "reason": found.failed or "",
        "arms": {"mesh": {"candidate_us": list(found.samples_us)}},
        "verdicts": {} if found.plan is None else {"plan": found.plan.to_json()},
        "spent": {"serve": time.perf_counter() - begun},
    }


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
