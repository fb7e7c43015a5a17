"""The default plan: which ladder it brings, and that finding it happens once."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import models
from polyjax.compiler import default_plan as module
from polyjax.compiler.buckets import LadderLimits
from polyjax.compiler.default_plan import PlanSubject, default_plan
from polyjax.compiler.state import StateSpec
from polyjax.core.chips import chip
from polyjax.core.mesh import MeshPlan
from polyjax.core.op import Choice
from polyjax.core.plan import Plan
from tests import tiny_llama

LIMITS = LadderLimits(max_num_seqs=4, max_num_batched_tokens=256, max_model_len=4096, page_size=64)


def subject(head_dim: int) -> PlanSubject:
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
    }
    config = models.family("LlamaForCausalLM").Config.from_hf(tiny_llama.HF_CONFIG | sizes)
    spec = StateSpec(config, "bfloat16", 64, (140,), 4, 8)
    return PlanSubject(spec, LIMITS, 0, MeshPlan(), chip("NVIDIA H200"), {})


def test_kernels_that_read_live_pages_need_one_context_width(tmp_path: Path) -> None:
    plan = default_plan(subject(head_dim=64), tmp_path)
    assert plan.ladder is not None
    assert {bucket.pages for bucket in plan.ladder.decode} == {64}
    attention = [choice for key, choice in plan.choices if key.startswith("paged_attention[")]
    assert attention


def test_gathering_attention_keeps_narrow_buckets(tmp_path: Path) -> None:
    plan = default_plan(subject(head_dim=32), tmp_path)  # no kernel has such heads
    assert plan.ladder is None, "the engine derives one with several context widths"
    assert not any(key.startswith("paged_attention[") for key, _ in plan.choices)


def test_it_is_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = subject(head_dim=64)
    found = default_plan(wanted, tmp_path)

    def again(subject: PlanSubject) -> None:
        raise AssertionError("traced although the plan is on disk")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_found", again)
        assert default_plan(wanted, tmp_path) == found
        other = dataclasses.replace(wanted, table={"matmul[M=1]": Choice("reference", ())})
        with pytest.raises(AssertionError, match="traced"):
            default_plan(other, tmp_path)

    (path,) = tmp_path.glob("*.plan.json")
    path.write_text(json.dumps(found.to_json())[:-20])
    assert default_plan(wanted, tmp_path) == found, "a torn entry is found anew"
    assert Plan.from_json(json.loads(path.read_text())) == found


def test_the_digest_is_the_same_in_every_process() -> None:
    program = "from tests.compiler import test_default_plan as t; print(t.subject(64).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
