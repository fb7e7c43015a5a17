"""Static verdicts: refusals by name, defaults that are legal, the structure of a lowered plan."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import CATALOGUE, verdict
from pallas_kernels.shapes import array
from pallas_kernels.tuning import candidates
from polyjax.compiler.choose import choose
from polyjax.core import ops
from polyjax.core.chips import CHIPS, ChipSpec, chip
from polyjax.core.errors import ScheduleError
from polyjax.core.op import Choice, Kernel, Ops
from polyjax.core.tables import SHIPPED, load_tables

H200, V5E = chip("NVIDIA H200"), chip("TPU v5e")
WHOLE_STEP = ("dense_decode_stack", "dense_decode_greedy")
KERNELS = [name for name in CATALOGUE if name.split(".")[1] not in WHOLE_STEP]
TPU_KERNELS = [name for name in KERNELS if name.startswith("mosaic_tpu.")]


def chip_of(kernel: Kernel) -> ChipSpec:
    return {"gpu": H200, "tpu": V5E}[kernel.platform]


@pytest.mark.smoke
def test_importing_the_catalogue_does_not_import_pallas() -> None:
    code = "import pallas_kernels, sys; sys.exit('jax.experimental.pallas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", KERNELS)
def test_defaults_are_legal_for_every_declared_workload(name: str) -> None:
    kernel = CATALOGUE[name]
    supported = [w for w in verdict.workloads(kernel.op) if kernel.supports(w) is None]
    assert supported
    for workload in supported[:: max(1, len(supported) // 6)]:
        kernel.check(workload, kernel.default(workload, chip_of(kernel)), chip_of(kernel))


@pytest.mark.parametrize("name", TPU_KERNELS)
def test_a_tpu_kernel_is_refused_elsewhere_and_never_a_default(name: str) -> None:
    """Nothing was timed on a TPU, so no plan takes a kernel there by itself."""
    kernel = CATALOGUE[name]
    workload = next(w for w in verdict.workloads(kernel.op) if kernel.supports(w) is None)
    with pytest.raises(ScheduleError, match="needs mxu, which NVIDIA H200 lacks"):
        kernel.check(workload, kernel.default(workload, V5E), H200)
    assert choose(workload, CATALOGUE, V5E, {}) is None


def test_reasons_on_a_tpu_name_the_rule() -> None:
    kernel = CATALOGUE["mosaic_tpu.matmul.stream"]
    workload = ops.MATMUL.workload(array(40, 8192), array(8192, 8192))
    legal = kernel.default(workload, V5E)
    for change, reason in (
        ({"tile_n": 0, "tile_k": 0}, "bytes of VMEM, TPU v5e has"),
        ({"tile_n": 200}, "no multiple of 128"),
        ({"tile_k": 3072}, "no multiple of 128 that divides 8192"),
        ({"tile_m": 24}, "multiple of 16"),
        ({"cores": 2}, "cores=2: TPU v5e has 1"),
    ):
        with pytest.raises(ScheduleError, match=reason):
            kernel.check(workload, dataclasses.replace(legal, **change), V5E)


def test_a_lowered_tpu_kernel_is_one_call_that_writes_the_pool_in_place() -> None:
    kernel = CATALOGUE["mosaic_tpu.kv_write.slot"]
    workload = next(iter(verdict.workloads(kernel.op)))
    text = verdict.lower(kernel, workload, kernel.default(workload, V5E), V5E).as_text()
    calls = [line for line in text.splitlines() if "@tpu_custom_call" in line]
    assert len(calls) == 1 and "output_operand_alias<" in calls[0]


def test_a_wgmma_schedule_is_refused_on_a_b200_by_name() -> None:
    kernel = CATALOGUE["mosaic_gpu.matmul.stream"]
    workload = next(iter(verdict.workloads(kernel.op)))
    schedule = kernel.default(workload, H200)
    with pytest.raises(ScheduleError, match="wgmma, which NVIDIA B200 lacks"):
        kernel.check(workload, schedule, chip("NVIDIA B200"))


def test_reasons_name_the_limit() -> None:
    kernel = CATALOGUE["mosaic_gpu.matmul.stream"]
    workload = ops.MATMUL.workload(array(8, 4096), array(4096, 4096))
    legal = kernel.default(workload, H200)
    for change, reason in (
        ({"tile_k": 96}, "multiple of split_k x tile_k"),
        ({"blocks": 65}, "between 1 and the 64 tiles"),
        ({"resident": True, "tile_k": 256, "stages": 8, "split_k": 1}, "shared memory"),
        ({"split_k": 16, "tile_k": 64}, "exceeds 8"),
    ):
        with pytest.raises(ScheduleError, match=reason):
            kernel.check(workload, dataclasses.replace(legal, **change), H200)


def test_declared_shared_memory_is_enough(name: str = "mosaic_gpu.matmul.stream") -> None:
    """A schedule just under the limit lowers: Mosaic GPU itself refuses what does not fit."""
    kernel = CATALOGUE[name]
    workload = ops.MATMUL.workload(array(8, 4096), array(4096, 4096))
    largest = max(
        (
            s
            for s in kernel.space(workload, H200)
            if verdict.refusal(kernel, workload, s, H200) is None
        ),
        key=lambda s: kernel.shared_memory_bytes(workload, s),
    )
    verdict.lower(kernel, workload, largest, H200)


@pytest.mark.parametrize("name", KERNELS)
def test_the_default_lowers_without_a_device(name: str) -> None:
    kernel = CATALOGUE[name]
    workload = next(w for w in verdict.workloads(kernel.op) if kernel.supports(w) is None)
    verdict.lower(kernel, workload, kernel.default(workload, chip_of(kernel)), chip_of(kernel))


def test_candidates_are_legal_and_repeatable() -> None:
    kernel = CATALOGUE["mosaic_gpu.matmul.stream"]
    workload = ops.MATMUL.workload(array(16, 2048), array(3072, 2048))
    drawn = candidates(kernel, workload, H200, 6)
    assert len(drawn) == len(set(drawn)) == 6
    assert drawn[0] == kernel.default(workload, H200)
    assert drawn == candidates(kernel, workload, H200, 6)
    for schedule in drawn:
        kernel.check(workload, schedule, H200)


@pytest.mark.parametrize("spec", [c for c in CHIPS if c.platform == "gpu"], ids=lambda c: c.name)
def test_shipped_tables_name_legal_choices(spec) -> None:
    for key, choice in load_tables(SHIPPED, spec.name).items():
        kernel = CATALOGUE[choice.kernel]
        assert kernel.op.name == key.partition("[")[0]
        kernel.schedule_type.from_json(dict(choice.schedule))


def decode_layer(used: Ops, x, norm, qkv, angles, pool, slots, pages, lens, ones, o):
    """Attention half of a decode layer, as a model would call its ops."""
    q, pool = used(
        ops.NORM_QKV_ROPE_WRITE, x, norm, qkv, None, None, None, angles, pool, slots, eps=1e-5
    )
    attended = used(
        ops.PAGED_ATTENTION, q[:, None], pool, pages, lens, ones, scale=q.shape[-1] ** -0.5
    )
    return used(ops.MATMUL, attended.reshape(x.shape[0], -1), o, None, x), pool


def layer_arguments() -> list[jax.ShapeDtypeStruct]:
    rows, width, kv_heads, group, dim = 8, 512, 2, 4, 64
    integers = [array(rows, 4, dtype=jnp.int32), *[array(rows, dtype=jnp.int32)] * 2]
    return [
        array(rows, width),
        array(width),
        array(kv_heads, group + 2, dim, width),
        array(rows, dim, dtype=jnp.float32),
        array(64, 2, kv_heads, 64, dim),
        array(rows, dtype=jnp.int32),
        *integers,
        array(width, kv_heads * group * dim),
    ]


def plan_of(arguments: list) -> dict[str, Choice]:
    """A choice for every op of the layer that a kernel supports, by its default schedule."""
    seen = Ops({}, {})
    jax.eval_shape(lambda *a: decode_layer(seen, *a), *arguments)
    chosen = {}
    for workload, _ in seen.used:
        kernel = verdict.kernels_of(workload.op, "gpu")[0]
        if kernel.supports(workload) is None:
            schedule = kernel.default(workload, H200)
            chosen[workload.key] = Choice(kernel.name, tuple(schedule.to_json().items()))
    return chosen


def test_a_planned_layer_is_its_kernels_and_writes_the_pool_in_place() -> None:
    arguments = layer_arguments()
    used = Ops(plan_of(arguments), CATALOGUE)
    layer = jax.jit(lambda *a: decode_layer(used, *a), donate_argnums=4)
    mesh = AbstractMesh(
        (1,), ("x",), abstract_device=AbstractDevice(H200.name, H200.num_sms, "gpu")
    )
    with jax.sharding.use_abstract_mesh(mesh):
        text = layer.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert [kernel.split(".")[1] for _, kernel in used.used] == [
        "norm_qkv_rope_write",
        "paged_attention",
        "matmul",
    ]
    calls = [line for line in text.splitlines() if "@mosaic_gpu_v2(" in line]
    splits = dict(used._choices[used.used[1][0].key].schedule)["splits"]
    assert len(calls) == 3 + (splits > 1)
    assert sum("output_operand_alias<" in line for line in calls) == 1
    assert "tf.aliasing_output" in text or "jax.buffer_donor" in text
    pool = "tensor<64x2x2x64x64xbf16>"
    copying = ("dynamic_update_slice", "scatter", "stablehlo.copy", "concatenate", "stablehlo.pad")
    assert not [x for x in text.splitlines() if pool in x and any(c in x for c in copying)]


@pytest.mark.parametrize("chip_name", ["NVIDIA H200", "TPU v5e"])
def test_the_command_counts_and_explains(chip_name: str) -> None:
    command = [sys.executable, "-m", "pallas_kernels", f"--chip={chip_name}", "--op=rms_norm"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    (row,) = json.loads(done.stdout)["ops"]
    assert row["schedules"] > row["legal"] > 0
    assert row["lowered"] == row["lowering_sample"]
    assert row["reasons"]


def test_the_command_names_a_chip_without_kernels() -> None:
    command = [sys.executable, "-m", "pallas_kernels", "--chip=CPU"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no kernel for a cpu" in done.stderr
