"""Plans change under running streams: compiled elsewhere, gated, swapped, rolled back."""

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from polyjax.compiler.program import Kind, ProgramKey
from polyjax.core.errors import RequestError
from polyjax.core.plan import Plan
from polyjax.engine.engine import Engine
from polyjax.engine.installation import InstallState
from polyjax.engine.programs import PlanPrograms, ProgramTable
from polyjax.engine.types import Request
from tests import tiny_llama
from tests.engine.serving import (
    Stream,
    assert_greedy,
    greedy,
    make_engine,
    prompt,
    run,
    step_without_compiling,
)

OTHER_OPTIONS = {"compiler_options": {"xla_cpu_prefer_vector_width": "128"}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    made = make_engine(tmp_path_factory.mktemp("plans"))
    yield made
    made.close()


def serve_while_installing(engine: Engine, payload: dict[str, Any]) -> dict[str, Stream]:
    """Keeps four streams running until the installation has ended one way or the other."""
    engine.admin("plan/install", payload)
    streams: dict[str, Stream] = {}
    number = 0
    while engine.installer.active or number < 8 or engine.scheduler.has_work:
        if engine.scheduler.num_running + engine.scheduler.num_waiting < 4 and (
            engine.installer.active or number < 8
        ):
            request = Request(f"w{number}", prompt(5 + number % 7, number), greedy(40))
            engine.add(request)
            streams[request.id] = Stream()
            number += 1
        if engine.installer.active and engine.installer.current.state is InstallState.COMPILING:
            time.sleep(0.1)  # leaves a small machine to the compiler process
        for output in step_without_compiling(engine):
            streams[output.request_id].take(output)
    for index, stream in enumerate(streams.values()):
        assert len(stream.tokens) == 40  # none lost, none repeated
        assert_greedy(engine, Request("", prompt(5 + index % 7, index), greedy(40)), stream.tokens)
    return streams


def test_nothing_to_roll_back(engine: Engine) -> None:
    with pytest.raises(RequestError) as refused:
        engine.admin("plan/rollback", {})
    assert refused.value.status == 409


def test_swap_under_running_streams_and_back(engine: Engine) -> None:
    first = engine.admin("plan", {})
    streams = serve_while_installing(engine, OTHER_OPTIONS)
    told = engine.admin("plan", {})
    assert told["installation"]["state"] == "current", told["installation"]
    assert told["digest"] != first["digest"]
    assert told["plan"]["compiler_options"] == OTHER_OPTIONS["compiler_options"]
    assert (told["epoch"], told["resident"]) == (1, [first["digest"], told["digest"]])
    epochs = [output.epoch for stream in streams.values() for output in stream.outputs]
    assert set(epochs) == {0, 1}
    crossing = [s for s in streams.values() if len({o.epoch for o in s.outputs}) == 2]
    assert crossing  # some streams were running across the swap
    assert all(v.passed for v in engine.installer.current.verdicts)
    # All of them ran: the candidate's programs are what was gated.
    gated = {v.evidence["program"] for v in engine.installer.current.verdicts}
    assert gated == {str(key) for key in engine.programs.current.programs}

    engine.admin("plan/rollback", {})
    stream = run(engine, [Request("r", prompt(9), greedy(5))])["r"]
    assert {output.epoch for output in stream.outputs} == {2}
    assert engine.admin("plan", {})["digest"] == first["digest"]
    stats = engine.stats()
    assert (stats.swaps, stats.rollbacks, stats.plan_digest) == (1, 1, first["digest"])


def test_a_wrong_program_is_refused_and_traffic_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = engine.programs.current.plan.digest
    cached = engine.source.cached

    def corrupted(request: Any) -> Any:
        program = cached(request)
        if program is None or program.key.kind is not Kind.DECODE_GREEDY:
            return program

        def wrong(params: Any, *rest: Any) -> Any:
            scaled = jax.device_put(np.asarray(params[0]) * 1.01, params[0].sharding)
            return program.executable((scaled, *params[1:]), *rest)

        return dataclasses.replace(program, executable=wrong)

    monkeypatch.setattr(engine.source, "cached", corrupted)
    serve_while_installing(engine, OTHER_OPTIONS)
    job = engine.admin("plan", {})["installation"]
    assert job["state"] == "refused"
    assert job["reason"].startswith("decode_greedy[T=1,B=1,C=16]: last hidden state")
    assert job["failed_verdict"]["evidence"]["hidden_error"] > 1e-3
    assert engine.programs.current.plan.digest == digest


def test_a_program_that_fails_while_gated_costs_a_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = engine.source.cached

    def failing(request: Any) -> Any:
        program = cached(request)
        if program is None or program.key.kind is not Kind.DECODE_GREEDY:
            return program

        def fail(*args: Any) -> Any:
            program.executable(*args)  # what was donated is gone
            raise RuntimeError("injected")

        return dataclasses.replace(program, executable=fail)

    monkeypatch.setattr(engine.source, "cached", failing)
    serve_while_installing(engine, OTHER_OPTIONS)
    assert engine.admin("plan", {})["installation"]["reason"] == "RuntimeError: injected"


def test_a_plan_that_does_not_compile_is_refused(engine: Engine) -> None:
    serve_while_installing(engine, {"compiler_options": {"no_such_option": "1"}})
    job = engine.admin("plan", {})["installation"]
    assert job["state"] == "refused"
    assert "No such compile option: 'no_such_option'" in job["reason"]


def test_a_damaged_cache_entry_is_compiled_again(engine: Engine) -> None:
    plan = dataclasses.replace(
        engine.programs.current.plan,
        compiler_options=tuple(OTHER_OPTIONS["compiler_options"].items()),
    )
    request = engine.source.request(plan, ProgramKey(Kind.READ_SCRATCH))
    path = engine.source.cache.path(request, engine.mesh)
    assert path.exists()  # from the first test
    path.write_bytes(b"torn")
    serve_while_installing(engine, OTHER_OPTIONS)
    assert engine.admin("plan", {})["installation"]["state"] == "current"
    assert path.stat().st_size > 1000


def test_a_ladder_may_change(engine: Engine) -> None:
    """Fewer buckets, none of which exists already: compared with larger ones in force."""
    coarse = {
        "decode": [{"tokens": 1, "sequences": 4, "pages": 16}],
        "prefill": [{"tokens": 8, "sequences": 1, "pages": 16}],
        "sampler_sequences": [1, 4],
    }
    serve_while_installing(engine, {"plan": {"ladder": coarse}})
    told = engine.admin("plan", {})
    assert told["installation"]["state"] == "current", told["installation"]
    assert {key.bucket.tokens for key in engine.programs.current.programs} >= {8}


@pytest.mark.parametrize(
    ("payload", "status", "message"),
    [
        ({}, 400, "exactly one of"),
        ({"plan": {}, "path": "x"}, 400, "exactly one of"),
        ({"plan": 3}, 400, "plan must be an object"),
        ({"plan": {"kernels": []}}, 400, "no field"),
        ({"path": "/nowhere.json"}, 400, "No such file"),
        ({"plan": {"mesh": {"model": 2}}}, 409, "state-ABI differs:\n  mesh: the engine runs on"),
        (
            {"plan": {"ladder": {"decode": [], "prefill": [], "sampler_sequences": []}}},
            409,
            "decode buckets reach 0 context pages",
        ),
        (
            {
                "plan": {
                    "ladder": dataclasses.asdict(tiny_llama.LADDER) | {"sampler_sequences": [1, 4]}
                }
            },
            409,
            r"buckets of \[2\] sequences and no sampler",
        ),
    ],
)
def test_payloads_that_name_no_installable_plan(
    engine: Engine, payload: dict[str, Any], status: int, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        engine.admin("plan/install", payload)
    assert refused.value.status == status


def test_an_unknown_command(engine: Engine) -> None:
    with pytest.raises(RequestError) as refused:
        engine.admin("plan/eat", {})
    assert refused.value.status == 404


def test_one_installation_at_a_time(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"compiler_options": {"no_such_option": "2"}}))
    engine.admin("plan/install", {"path": str(path)})
    with pytest.raises(RequestError, match="another plan is being installed"):
        engine.admin("plan/install", OTHER_OPTIONS)
    engine.installer.cancel()
    assert engine.installer.current is not None
    assert engine.installer.current.state is InstallState.REFUSED
    assert not engine.has_work


def plan_programs(name: str) -> PlanPrograms:
    plan = Plan(compiler_options=(("name", name),))
    return PlanPrograms(plan, tiny_llama.LADDER, {})


def test_the_table_applies_changes_at_their_step_and_keeps_the_last() -> None:
    a, b, c = map(plan_programs, "abc")
    table = ProgramTable(a, resident=2)
    table.install(b, at_step=5)
    assert not table.apply_pending(4)
    assert table.current is a
    assert table.apply_pending(5)
    assert (table.current, table.epoch) == (b, 1)
    table.install(c, at_step=0)
    table.apply_pending(6)
    assert table.resident == (b, c)  # a is gone
    table.roll_back(at_step=7)
    table.apply_pending(7)
    assert (table.current, table.epoch, table.rollbacks) == (b, 3, 1)
    with pytest.raises(RequestError):
        table.roll_back(at_step=8)


def test_rolling_back_a_pending_swap_forgets_it() -> None:
    a, b = map(plan_programs, "ab")
    table = ProgramTable(a, resident=2)
    table.install(b, at_step=5)
    table.roll_back(at_step=5)
    assert not table.apply_pending(9)
    assert table.current is a
