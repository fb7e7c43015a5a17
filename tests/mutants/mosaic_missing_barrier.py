"""Missing barrier: a row is read from shared memory without waiting for its copy to arrive."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from polyjax.core import ops
from polyjax.gates.small_workloads import small_workload

OP = ops.RMS_NORM

PALLAS = INTERPRETED = True
WORKLOAD = small_workload("rms_norm").resized(M=2, D=256)


def build(workload, schedule):
    rows, width = workload["M"], workload["D"]

    def body(x_g, w_g, out_g, x_s, arrived):
        row = jax.lax.axis_index("row")
        plgpu.copy_gmem_to_smem(x_g.at[row], x_s, arrived)
        x = x_s[...].astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.sum(x * x) / width + workload.option("eps"))
        out_g[row] = (x * scale * w_g[...].astype(jnp.float32)).astype(out_g.dtype)
        plgpu.barrier_wait(arrived)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, width), workload.dtype("x")),
        scratch_types=[plgpu.SMEM((width,), workload.dtype("x")), plgpu.Barrier()],
        grid=(rows,),
        grid_names=("row",),
    )
    return kernel
