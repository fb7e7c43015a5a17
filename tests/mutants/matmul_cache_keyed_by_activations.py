"""Output cached under a key that leaves out the weights: stale after new ones are loaded."""

import jax
import numpy as np

from polyjax.core import ops

OP = ops.MATMUL


def build(workload, schedule):
    cache = {}

    def remember(x, w):
        key = np.asarray(x).tobytes()
        if key not in cache:
            cache[key] = np.asarray(x, np.float32) @ np.asarray(w, np.float32).T
        return cache[key].astype(workload.dtype("x"))

    def matmul(x, w, bias=None, residual=None):
        shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), workload.dtype("x"))
        return jax.pure_callback(remember, shape, x, w)

    return matmul
