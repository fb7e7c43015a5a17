"""What a model would take on each device, from its config alone (`--dry_run`).

Nothing is loaded and no memory is allocated.
"""

from __future__ import annotations

import jax

import models
from polyjax.engine.build import mesh_plan_of, open_served_model
from polyjax.engine.types import EngineConfig
from polyjax.io.files import ModelFiles


def describe(config: EngineConfig, files: ModelFiles) -> str:
    """Returns the lines to print. Raises ModelError for a config that cannot be served."""
    served = open_served_model(config, files, jax.default_backend())
    model, dtype = served.config, served.dtype
    plan = mesh_plan_of(config)
    memory = models.memory(model, dtype, plan)
    longest = config.max_model_len or model.max_context_tokens
    per_sequence = memory.kv_bytes(longest)
    lines = [
        f"{files.name} ({dtype}) on {plan.num_devices} device(s), each:",
        f"  weights {_size(memory.weight_bytes)}",
        f"  KV cache {memory.kv_bytes(1):,} bytes a token while windows are not full",
        f"  KV cache {_size(per_sequence)} a sequence of {longest:,} tokens",
    ]
    if config.max_num_seqs:
        total = config.max_num_seqs * per_sequence
        lines.append(f"  KV cache {_size(total)} for {config.max_num_seqs} such sequences")
    for group in model.kv_groups():
        kind = f"window of {group.window} tokens" if group.window else "whole context"
        shape = f"{group.planes} x {group.heads} heads x {group.head_dim}"
        lines.append(f"  KV group {group.name!r}: {len(group.layers)} layers, {kind}, {shape}")
    return "\n".join(lines)


def _size(num_bytes: int) -> str:
    unit, name = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    return f"{num_bytes:,} bytes ({num_bytes / unit:.2f} {name})"
