"""Flags mirror the config dataclasses and take the spellings people are used to."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from polyjax import flags, packages
from polyjax.core.errors import ConfigError
from polyjax.engine.types import EngineConfig
from polyjax.server.config import ServerConfig
from tests.server.serving import ROOT

READ = """
import dataclasses, json, sys
from absl import app
from polyjax import flags, serve
def main(rest):
    engine = flags.read_engine(rest[1:])
    both = {**dataclasses.asdict(engine), **dataclasses.asdict(flags.read(serve.ServerConfig))}
    print(json.dumps(both))
app.run(main, flags_parser=flags.parse)
"""


def parsed(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", READ, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def config_of(*arguments: str) -> dict[str, object]:
    result = parsed(*arguments)
    assert result.returncode == 0, result.stderr
    both: dict[str, object] = json.loads(result.stdout)
    return both


def test_defaults_are_those_of_the_dataclasses() -> None:
    found = config_of()
    for config in (EngineConfig(), ServerConfig()):
        for name, value in dataclasses.asdict(config).items():
            assert found[name] == (list(value) if isinstance(value, tuple) else value), name


def test_spellings() -> None:
    found = config_of(
        *("org/model", "--max-model-len", "512", "--no-enable-prefix-caching", "-tp", "2"),
        *("--served-model-name=m-1", "--api-key=a,b", "--gpu-memory-utilization=0.5"),
    )
    assert found["model"] == "org/model"
    assert found["max_model_len"] == 512
    assert found["enable_prefix_caching"] is False
    assert found["tensor_parallel_size"] == 2
    assert found["served_model_name"] == "m-1"  # dashes of a value stay
    assert found["api_key"] == ["a", "b"]
    assert found["gpu_memory_utilization"] == 0.5
    assert config_of("--gpu_memory_utilization=87.5%")["gpu_memory_utilization"] == 0.875


@pytest.mark.parametrize(
    "arguments",
    [
        ["--noenable_prefix_caching"],
        ["--enable_prefix_caching=false"],
        ["--no_enable_prefix_caching"],
    ],
)
def test_switching_off(arguments: list[str]) -> None:
    assert config_of(*arguments)["enable_prefix_caching"] is False


def test_an_unknown_flag_is_answered_with_the_nearest() -> None:
    result = parsed("--max-num-sequences=4")
    assert result.returncode == 1
    assert "max_num_seqs" in result.stdout + result.stderr


def test_every_engine_flag_has_help() -> None:
    assert set(flags.ENGINE_HELP) == {field.name for field in dataclasses.fields(EngineConfig)}


def test_our_own_packages_are_accepted() -> None:
    packages.refuse_foreign_packages()


def test_somebody_elses_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models.py").write_text("")
    spec = importlib.util.spec_from_file_location("models", tmp_path / "models.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ConfigError, match=str(tmp_path / "models.py")):
        packages.refuse_foreign_packages()
