"""RMSNorm by division, by rsqrt, and with squares summed in pieces."""

import jax
import jax.numpy as jnp

from polyjax.core import ops
from polyjax.gates.small_workloads import small_workload

OP = ops.RMS_NORM

WORKLOADS = [small_workload("rms_norm"), small_workload("rms_norm", "float32")]
SCHEDULES = ["divide", "weight first", 8, 24]


def build(workload, schedule):
    eps = workload.option("eps")

    def rms_norm(x, weight):
        xf, wf = x.astype(jnp.float32), weight.astype(jnp.float32)
        if isinstance(schedule, int):
            squares = jnp.zeros((x.shape[0], 1), jnp.float32)
            for first in range(0, x.shape[1], schedule):
                piece = xf[:, first : first + schedule]
                squares = squares + jnp.sum(piece * piece, -1, keepdims=True)
            mean = squares * (1.0 / x.shape[1])
        else:
            mean = jnp.mean(xf * xf, -1, keepdims=True)
        if schedule == "divide":
            return (xf / jnp.sqrt(mean + eps) * wf).astype(x.dtype)
        scale = jax.lax.rsqrt(mean + eps)
        return (xf * wf * scale if schedule == "weight first" else xf * scale * wf).astype(x.dtype)

    return rms_norm
