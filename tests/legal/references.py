"""Every op by its own reference: float32, and bfloat16 where XLA on a CPU can."""

from polyjax.core import ops
from polyjax.core.op import REFERENCE
from polyjax.core.ops import OPS
from polyjax.gates.inputs import in_dtype
from polyjax.gates.small_workloads import small_workloads

OP = ops.MATMUL

# XLA's CPU backend has no batched bfloat16 product with a float32 result.
_NO_BFLOAT16 = ("paged_attention", "latent_attention", "dense_decode_stack", "dense_decode_greedy",
                "experts", "head_matmul")  # fmt: skip
WORKLOADS = [
    *(in_dtype(w, "float32") for w in small_workloads()),
    *(w for w in small_workloads() if w.op not in _NO_BFLOAT16),
]
SUBSET = False


def supports(workload):
    return workload.op not in _NO_BFLOAT16 or "bfloat16" not in dict(workload.dtypes).values()


def build(workload, schedule):
    return lambda *args: REFERENCE(OPS[workload.op], *args, **dict(workload.static))
