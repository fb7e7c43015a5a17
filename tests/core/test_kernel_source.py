"""Kernel files as data: what is read, how plans name it, what makes two plans differ."""

import os
from pathlib import Path
from typing import Any

import pytest

from polyjax.core.errors import ConfigError
from polyjax.core.kernel_source import (
    MAX_SOURCE_BYTES,
    KernelSource,
    digest_of,
    kernel_name,
    read_source,
)
from polyjax.core.op import Choice
from polyjax.core.plan import Plan

KEY = "rms_norm[M=1,D=64|x:float32,weight:float32|eps=1e-05]"


def plan_with(text: str, path: str = "/somewhere.py", **changes: Any) -> Plan:
    source = KernelSource(path, digest_of(text))
    name = kernel_name(source.sha256, "norm")
    return Plan(choices=((KEY, Choice(name, ())),), sources=((name, source),), **changes)


def test_a_plan_with_a_kernel_file_survives_json() -> None:
    plan = plan_with("one")
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).digest == plan.digest


def test_the_text_is_part_of_a_plans_identity_and_its_place_is_not() -> None:
    assert plan_with("one").digest == plan_with("one", "/elsewhere.py").digest
    assert plan_with("one").digest != plan_with("two").digest
    assert plan_with("one").digest != Plan().digest


def test_plans_whose_sources_do_not_fit_are_refused() -> None:
    data = plan_with("one").to_json()
    with pytest.raises(ConfigError, match="which sources do not list"):
        Plan.from_json(data | {"sources": {}})
    [(name, source)] = data["sources"].items()
    other = digest_of("two")
    with pytest.raises(ConfigError, match="does not belong to sha256"):
        Plan.from_json(data | {"sources": {name: source | {"sha256": other}}})
    for wrong in ({"path": "x"}, {"path": "x", "sha256": "12"}, 3):
        with pytest.raises(ConfigError):
            Plan.from_json(data | {"sources": {name: wrong}})


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    path.write_text("one")
    source = KernelSource(str(path), digest_of("one"))
    assert source.read() == "one"
    path.write_text("two")
    with pytest.raises(ConfigError, match="has changed"):
        source.read()


def test_what_is_no_readable_text_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b" " * (MAX_SOURCE_BYTES + 1))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, reason in (
        ("pipe", "no regular file"),
        ("", "no regular file|Is a directory"),
        ("large", "larger than"),
        ("binary", "no UTF-8"),
        ("missing", "cannot be read"),
        ("nul\0", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=reason):
            read_source(tmp_path / name)


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b", "x" * 65])
def test_names_that_plans_cannot_carry(name: str) -> None:
    with pytest.raises(ConfigError, match="kernel name"):
        kernel_name(digest_of("one"), name)
