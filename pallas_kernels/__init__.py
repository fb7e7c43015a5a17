"""The catalogue: every kernel polyjax ships, on one screen. Adding one is one file and one line."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping

from polyjax.core.op import Kernel

# Kernel name -> module and object. Modules are imported when a kernel is first asked for.
_KERNELS = {
    "mosaic_gpu.matmul.stream": "matmul.mosaic_gpu:STREAM",
    "mosaic_gpu.matmul.gemv": "matmul.mosaic_gpu:GEMV",
    "mosaic_gpu.norm_gate_up.stream": "norm_gate_up.mosaic_gpu:STREAM",
    "mosaic_gpu.norm_gate_up.gemv": "norm_gate_up.mosaic_gpu:GEMV",
    "mosaic_gpu.norm_qkv_rope_write.stream": "norm_qkv_rope_write.mosaic_gpu:STREAM",
    "mosaic_gpu.paged_attention.decode": "paged_attention.mosaic_gpu:KERNEL",
    "mosaic_gpu.paged_attention.prefill": "paged_attention.mosaic_gpu_prefill:KERNEL",
    "mosaic_gpu.lm_head.stream": "lm_head.mosaic_gpu:STREAM",
    "mosaic_gpu.lm_head_sample.stream": "lm_head_sample.mosaic_gpu:STREAM",
    "mosaic_gpu.rms_norm.row": "rms_norm.mosaic_gpu:KERNEL",
    "mosaic_gpu.rope.head": "rope.mosaic_gpu:KERNEL",
    "mosaic_gpu.kv_write.slot": "kv_write.mosaic_gpu:KERNEL",
    "mosaic_gpu.embed.row": "embed.mosaic_gpu:KERNEL",
    "mosaic_tpu.matmul.stream": "matmul.mosaic_tpu:STREAM",
    "mosaic_tpu.norm_gate_up.stream": "norm_gate_up.mosaic_tpu:STREAM",
    "mosaic_tpu.norm_qkv_rope_write.stream": "norm_qkv_rope_write.mosaic_tpu:STREAM",
    "mosaic_tpu.paged_attention.decode": "paged_attention.mosaic_tpu:KERNEL",
    "mosaic_tpu.lm_head.stream": "lm_head.mosaic_tpu:STREAM",
    "mosaic_tpu.lm_head_sample.stream": "lm_head_sample.mosaic_tpu:STREAM",
    "mosaic_tpu.rms_norm.row": "rms_norm.mosaic_tpu:KERNEL",
    "mosaic_tpu.rope.row": "rope.mosaic_tpu:KERNEL",
    "mosaic_tpu.kv_write.slot": "kv_write.mosaic_tpu:KERNEL",
    "mosaic_tpu.embed.row": "embed.mosaic_tpu:KERNEL",
    "mosaic_gpu.dense_decode_stack.persistent": "decode_step.mosaic_gpu:STACK",
    "mosaic_gpu.dense_decode_greedy.persistent": "decode_step.mosaic_gpu:GREEDY",
}


class _Catalogue(Mapping[str, Kernel]):
    """Kernel name -> kernel, imported on first use."""

    def __getitem__(self, name: str) -> Kernel:
        module, _, attribute = _KERNELS[name].partition(":")
        kernel: Kernel = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
        assert kernel.name == name, f"{_KERNELS[name]} calls itself {kernel.name}"
        return kernel

    def __iter__(self) -> Iterator[str]:
        return iter(_KERNELS)

    def __len__(self) -> int:
        return len(_KERNELS)


CATALOGUE: Mapping[str, Kernel] = _Catalogue()
