"""Partial rotary ignored: the dims after the rotated ones are scaled instead of moved."""

from polyjax.core import ops, reference

OP = ops.ROPE


def build(workload, schedule):
    def rope(x, cos_sin):
        rotary = cos_sin.shape[-1]
        out = reference.rope(None, x, cos_sin)
        return out.at[..., rotary:].multiply(1.0 + 2.0**-7)

    return rope
