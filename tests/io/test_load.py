"""Weights onto devices: one error for all wrong tensors, exact values, each shard on its device."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from polyjax.core.errors import ModelError
from polyjax.core.mesh import MeshPlan
from polyjax.core.model import ParamSpec, Source
from polyjax.io.files import open_model
from polyjax.io.load import check_tensors, load_params, random_params
from tests.goldens import ROOT

ONE = MeshPlan()


class Arrays:
    """A TensorReader over arrays in memory that counts what is read."""

    def __init__(self, **arrays: np.ndarray):
        self.arrays = arrays
        self.read_names: list[str] = []

    def names(self) -> Sequence[str]:
        return tuple(self.arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.arrays[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self.arrays[name].dtype

    def read(self, name: str) -> np.ndarray:
        self.read_names.append(name)
        return self.arrays[name]


def spec(
    *sources: tuple[str, tuple[int, ...]], shape: tuple[int, ...], **more: object
) -> ParamSpec:
    return ParamSpec(
        shape=shape,
        axes=more.pop("axes", (None,) * len(shape)),
        sources=tuple(Source(*source) for source in sources),
        pack=lambda arrays: np.concatenate(arrays),
        **more,
    )


FUSED = spec(("q", (4, 8)), ("k", (2, 8)), shape=(6, 8))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def load(
    specs: dict[str, ParamSpec], tensors: Arrays, plan: MeshPlan = ONE, dtype: str = "float32"
) -> dict[str, jax.Array]:
    return load_params(specs, tensors, dtype=dtype, mesh=plan.mesh(), plan=plan)


def test_every_wrong_tensor_in_one_error_and_nothing_read() -> None:
    tensors = Arrays(q=normal(4, 9), extra=normal(1), another=normal(1))
    with pytest.raises(ModelError) as caught:
        load({"qkv": FUSED, "norm": spec(("norm", (8,)), shape=(8,))}, tensors)
    assert sorted(caught.value.problems) == [
        "another has no place in this model",
        "extra has no place in this model",
        "k is missing, wanted shape [2, 8]",
        "norm is missing, wanted shape [8]",
        "q has shape [4, 9], the config says [4, 8]",
    ]
    assert tensors.read_names == []


def test_harmless_extras_are_not_reported() -> None:
    tensors = Arrays(**{"q": normal(4, 8), "k": normal(2, 8), "lm_head.weight": normal(1)})
    assert check_tensors({"qkv": FUSED}, tensors) == []
    assert check_tensors({"qkv": FUSED}, tensors, ignored=()) == [
        "lm_head.weight has no place in this model"
    ]


def test_packs_casts_and_keeps_the_order() -> None:
    q, k, norm = normal(4, 8), normal(2, 8), normal(8)
    specs = {"norm": spec(("norm", (8,)), shape=(8,), dtype="float32"), "qkv": FUSED}
    params = load(specs, Arrays(q=q, k=k, norm=norm), dtype="bfloat16")
    assert list(params) == ["norm", "qkv"]
    assert params["norm"].dtype == jnp.float32 and params["qkv"].dtype == jnp.bfloat16
    expected = np.concatenate([q, k]).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(params["qkv"]), expected)


def test_one_source_may_feed_two_parameters() -> None:
    """A tied head that is packed otherwise than the embedding reads the tensor again."""
    tensors = Arrays(e=normal(4, 8))
    params = load(
        {"a": spec(("e", (4, 8)), shape=(4, 8)), "b": spec(("e", (4, 8)), shape=(4, 8))}, tensors
    )
    np.testing.assert_array_equal(np.asarray(params["a"]), np.asarray(params["b"]))


def test_each_device_gets_its_shard_only() -> None:
    plan = MeshPlan(model=4)
    whole = normal(8, 12)
    specs = {
        "w": spec(("w", (8, 12)), shape=(8, 12), axes=("heads", "embed")),
        "whole": spec(("w", (8, 12)), shape=(8, 12), axes=(None, None)),
    }
    params = load(specs, Arrays(w=whole), plan)
    np.testing.assert_array_equal(np.asarray(params["w"]), whole)
    shards = params["w"].addressable_shards
    assert len(shards) == 4 and {shard.data.shape for shard in shards} == {(2, 12)}
    for shard in shards:
        np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])
    assert {shard.data.shape for shard in params["whole"].addressable_shards} == {(8, 12)}


def test_axis_the_mesh_does_not_divide_is_named_before_reading() -> None:
    tensors = Arrays(w=normal(9, 4))
    specs = {"w": spec(("w", (9, 4)), shape=(9, 4), axes=("heads", None))}
    with pytest.raises(ModelError, match="w: heads=9 is not divisible by model=2"):
        load(specs, tensors, MeshPlan(model=2))
    assert tensors.read_names == []


def test_packing_into_another_shape_is_the_familys_fault() -> None:
    with pytest.raises(AssertionError, match="qkv: packed into"):
        load({"qkv": spec(("q", (4, 8)), shape=(6, 8))}, Arrays(q=normal(4, 8)))


def test_failing_read_ends_the_load() -> None:
    class Broken(Arrays):
        def read(self, name: str) -> np.ndarray:
            raise ModelError("disk", [f"{name}: the file ended early"])

    with pytest.raises(ModelError, match="ended early"):
        load({"qkv": FUSED}, Broken(q=normal(4, 8), k=normal(2, 8)))


def test_progress_counts_parameters() -> None:
    shown: list[tuple[int, int]] = []
    specs = {name: spec((name, (2,)), shape=(2,)) for name in "abc"}
    load_params(
        specs,
        Arrays(a=normal(2), b=normal(2), c=normal(2)),
        dtype="float32",
        mesh=ONE.mesh(),
        plan=ONE,
        progress=lambda _what, done, total: shown.append((done, total)),
    )
    assert shown == [(1, 3), (2, 3), (3, 3)]


def test_read_ahead_is_bounded() -> None:
    """While a parameter waits for its device, no more than two others have been read."""
    names = [f"t{i}" for i in range(12)]
    tensors = Arrays(**{name: normal(2) for name in names})
    specs = {name: spec((name, (2,)), shape=(2,)) for name in names}
    most_ahead = 0

    def watch(_what: str, done: int, _total: int) -> None:
        nonlocal most_ahead
        most_ahead = max(most_ahead, len(tensors.read_names) - done)

    load_params(specs, tensors, dtype="float32", mesh=ONE.mesh(), plan=ONE, progress=watch)
    assert most_ahead <= 2


# Block-scaled float8


def test_float8_blocks_read_as_float32() -> None:
    case = ROOT / "deepseek_v3" / "fp8"
    tensors = open_model(case).tensors
    name = "model.layers.0.mlp.down_proj.weight"  # [32, 48] in blocks of 16 x 16
    assert not any(stored.endswith("scale_inv") for stored in tensors.names())
    from polyjax.io.safetensors import SafetensorsReader, read_header

    raw = SafetensorsReader(read_header(case / "model.safetensors")[0])
    weight, scales = raw.read(name), raw.read(f"{name}_scale_inv")
    assert weight.dtype == ml_dtypes.float8_e4m3fn and scales.shape == (2, 3)
    values = tensors.read(name)
    assert values.dtype == tensors.dtype(name) == np.float32
    for row in range(32):
        for col in range(48):
            assert values[row, col] == np.float32(weight[row, col]) * scales[row // 16, col // 16]


def test_float8_scales_of_the_wrong_shape_are_named(tmp_path: Path) -> None:
    from polyjax.io.fp8 import BlockScaledReader

    tensors = Arrays(w=normal(20, 20).astype(ml_dtypes.float8_e4m3fn), w_scale_inv=normal(1, 2))
    with pytest.raises(ModelError, match=r"w_scale_inv has shape \[1, 2\], wanted \[2, 2\]"):
        BlockScaledReader(tensors, (16, 16))


# Random weights


def test_random_weights_depend_on_the_seed_and_not_on_the_mesh() -> None:
    specs = {
        "w": spec(shape=(64, 32), axes=("heads", None)),
        "v": spec(shape=(64, 32), axes=("heads", None)),
        "norm": spec(shape=(32,), init="ones"),
        "bias": spec(shape=(32,), init="zeros", dtype="float32"),
    }

    def make(seed: int, plan: MeshPlan) -> dict[str, np.ndarray]:
        params = random_params(specs, seed=seed, dtype="bfloat16", mesh=plan.mesh(), plan=plan)
        assert params["w"].sharding == plan.sharding(plan.mesh(), ("heads", None))
        return {name: np.asarray(value) for name, value in params.items()}

    first, sharded, other = make(0, ONE), make(0, MeshPlan(model=4)), make(1, ONE)
    for name in specs:
        np.testing.assert_array_equal(first[name], sharded[name])
    assert (first["w"] != other["w"]).any() and (first["w"] != first["v"]).any()
    assert first["w"].dtype == jnp.bfloat16 and first["bias"].dtype == np.float32
    assert (first["norm"] == 1).all() and (first["bias"] == 0).all()
    # Standard error of a standard deviation over n samples: std / sqrt(2 n); five of them.
    assert abs(first["w"].astype(np.float64).std() - 0.02) < 5 * 0.02 / np.sqrt(2 * 64 * 32)
