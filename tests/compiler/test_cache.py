"""The program cache: hits without tracing, damaged and foreign entries are misses."""

import dataclasses
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from polyjax.compiler.cache import ProgramCache, cache_key
from polyjax.compiler.program import Kind, StepProgram, compile_program
from polyjax.core.buckets import Bucket
from polyjax.core.mesh import MeshPlan
from polyjax.engine.compile_watch import CompileWatch
from tests import tiny_llama

SCORE = tiny_llama.request(Kind.SCORE, Bucket(4, 1, 0))
MESH = SCORE.plan.mesh.mesh()


@pytest.fixture(scope="module")
def program() -> StepProgram:
    return compile_program(SCORE, MESH)


@pytest.fixture
def cache(tmp_path: Path, program: StepProgram) -> ProgramCache:
    filled = ProgramCache(tmp_path / "programs")
    filled.store(SCORE, MESH, program)
    return filled


def call(program: StepProgram) -> np.ndarray:
    head = tiny_llama.small_weights()
    by_shape = {p.shape: p for p in head}
    args = [by_shape[a.shape] for a in jax.tree.leaves(program.executable.args_info)[:2]]
    hidden = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    mask = np.full(tiny_llama.spec().score_mask_shape(4), -1, np.int32)
    return np.asarray(program(tuple(args), hidden, np.arange(4, dtype=np.int32), mask))


def test_a_hit_computes_the_same_without_tracing(cache: ProgramCache, program: StepProgram) -> None:
    watch = CompileWatch()
    loaded = cache.load(SCORE, MESH)
    assert loaded is not None
    assert (watch.traces, watch.compiles) == (0, 0)
    assert (loaded.abi, loaded.used) == (program.abi, program.used)
    assert (call(loaded) == call(program)).all()
    assert (cache.hits, cache.misses) == (1, {})


def test_what_jax_has_in_its_own_cache_is_compiled_anew(
    tmp_path: Path, program: StepProgram
) -> None:
    """Serialized again, jax's cached executables load and then fail when they run."""
    again = compile_program(SCORE, MESH)  # jax would have it by now
    cache = ProgramCache(tmp_path)
    cache.store(SCORE, MESH, again)
    loaded = cache.load(SCORE, MESH)
    assert loaded is not None
    assert (call(loaded) == call(program)).all()


def test_compile_watch_counts_what_a_hit_avoids() -> None:
    watch = CompileWatch()
    compile_program(tiny_llama.request(Kind.READ_SCRATCH), MESH)
    assert watch.traces > 0
    assert watch.compiles == 1


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text"])
def test_a_damaged_entry_is_a_miss(cache: ProgramCache, damage: str) -> None:
    path = cache.path(SCORE, MESH)
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    pieces = {"cut": bytes(content[:-100]), "empty": b"", "text": b"hello"}
    path.write_bytes(pieces.get(damage, bytes(content)))
    assert cache.load(SCORE, MESH) is None
    assert cache.misses == {"torn": 1}


def test_another_request_for_the_same_program_finds_it(
    cache: ProgramCache, program: StepProgram
) -> None:
    ladder = dataclasses.replace(SCORE.plan, ladder=tiny_llama.LADDER)
    equal = dataclasses.replace(SCORE, plan=ladder)
    assert cache.load(equal, MESH) is None
    cache.link(SCORE, equal, MESH)
    loaded = cache.load(equal, MESH)
    assert loaded is not None and loaded.plan_digest == ladder.digest
    assert (call(loaded) == call(program)).all()
    cache.link(tiny_llama.request(Kind.READ_SCRATCH), equal, MESH)  # nothing to link: no harm


def test_an_entry_others_can_write_is_not_unpickled(cache: ProgramCache) -> None:
    path = cache.path(SCORE, MESH)
    path.chmod(0o666)
    assert cache.load(SCORE, MESH) is None
    assert cache.misses == {"foreign": 1}


def test_an_entry_whose_payload_does_not_load_is_a_miss(
    cache: ProgramCache, program: StepProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("pickle.dumps", lambda *_: b"no pickle")
        cache.store(SCORE, MESH, program)
    assert cache.load(SCORE, MESH) is None
    assert cache.misses == {"unloadable": 1}


def test_absent_is_a_miss(tmp_path: Path) -> None:
    empty = ProgramCache(tmp_path)
    assert empty.load(SCORE, MESH) is None
    assert empty.misses == {"absent": 1}


def test_a_failed_write_leaves_nothing(
    tmp_path: Path, program: StepProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        ProgramCache(tmp_path).store(SCORE, MESH, program)
    assert list(tmp_path.iterdir()) == []


def test_the_least_recently_used_goes_first(tmp_path: Path, program: StepProgram) -> None:
    cache = ProgramCache(tmp_path)
    requests = [tiny_llama.request(Kind.SCORE, Bucket(rows, 1, 0)) for rows in (4, 8, 16)]
    paths = [cache.store(request, MESH, program) for request in requests]
    for age_s, path in zip((30, 10, 20), paths, strict=True):
        at = path.stat().st_mtime - age_s
        os.utime(path, (at, at))
    cache.capacity_bytes = 2 * paths[0].stat().st_size + 1
    cache.store(requests[1], MESH, program)
    assert [path.exists() for path in paths] == [False, True, True]


def test_the_key_names_everything_a_program_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket(4, 1, 0)
    options = {"compiler_options": {"xla_cpu_prefer_vector_width": "128"}}
    requests = [
        SCORE,
        tiny_llama.request(Kind.SCORE, Bucket(8, 1, 0)),
        tiny_llama.request(Kind.SCORE, bucket, spec=tiny_llama.spec(num_pages=24)),
        tiny_llama.request(Kind.SCORE, bucket, **options),
        dataclasses.replace(SCORE, spec=dataclasses.replace(SCORE.spec, dtype="bfloat16")),
    ]
    keys = [cache_key(request, MESH) for request in requests]
    two = tiny_llama.request(Kind.SCORE, bucket, mesh=MeshPlan(model=2))
    keys.append(cache_key(two, two.plan.mesh.mesh()))
    monkeypatch.setattr("polyjax.compiler.cache._environment", lambda mesh: ["another machine"])
    keys.append(cache_key(SCORE, MESH))
    assert len(set(keys)) == len(keys)
