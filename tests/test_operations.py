"""What docs/operations scrapes, alerts on and draws is what a server exports."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from polyjax.engine.types import EngineInfo, EngineStats
from polyjax.server.app import build_app
from polyjax.server.config import ServerConfig
from polyjax.server.metrics import Metrics
from polyjax.server.service import Service

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "operations"
NAME = re.compile(r"\b(?:vllm:|polyjax_)\w+")


@pytest.fixture(scope="module")
def exported() -> set[str]:
    info = EngineInfo("m", "", "cpu", "float32", 64, 1, 8, (), 16, 4, 64, 1, "d", 0, 0.0, 0.0)
    client = SimpleNamespace(stats=EngineStats(phase_us={"dispatch": 1.0}), heartbeat_age_s=0.0)
    metrics = Metrics("vllm:", info, client)
    metrics._success.labels(**metrics._labels, finished_reason="stop")
    text = metrics.render().decode()
    return {re.split(r"[ {]", line)[0] for line in text.splitlines() if not line.startswith("#")}


@pytest.mark.parametrize("name", ["alerts.yml", "grafana.json"])
def test_every_metric_named_is_exported(name, exported):
    named = set(NAME.findall((FOLDER / name).read_text()))
    assert named and named <= exported


def test_the_dashboard_has_a_query_in_every_panel():
    panels = json.loads((FOLDER / "grafana.json").read_text())["panels"]
    assert len(panels) == 12
    assert all(target["expr"] for panel in panels for target in panel["targets"])


def test_the_deployment_probes_routes_that_exist_and_drains_in_time():
    documents = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
    spec = next(d for d in documents if d["kind"] == "Deployment")["spec"]["template"]["spec"]
    container = spec["containers"][0]
    app = build_app(Service(ServerConfig(), None))
    routes = {route.path for route in app.routes}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in routes
    flags = dict(re.findall(r"--(\w+)=(\S+)", container["args"][0]))
    fields = set(ServerConfig.__dataclass_fields__)
    from polyjax.engine.types import EngineConfig

    assert set(flags) <= fields | set(EngineConfig.__dataclass_fields__)
    assert spec["terminationGracePeriodSeconds"] > float(flags["shutdown_timeout_s"])
