"""Ahead-of-time compiles for TPUs: what is drawn, and what is said where libtpu is missing."""

from __future__ import annotations

import importlib.util

import pytest

from pallas_kernels import tpu_compile, verdict
from polyjax.core.chips import chip
from polyjax.core.errors import ConfigError

V5E = chip("TPU v5e")


def test_samples_are_legal_distinct_and_repeatable() -> None:
    drawn = tpu_compile.sample("paged_attention", V5E, 6, seed=3)
    assert len({(k.name, w.key, str(s)) for k, w, s in drawn}) == 6
    assert all(verdict.refusal(k, w, s, V5E) is None for k, w, s in drawn)
    assert drawn == tpu_compile.sample("paged_attention", V5E, 6, seed=3)
    assert drawn != tpu_compile.sample("paged_attention", V5E, 6, seed=4)
    kernel, workload, schedule = drawn[0]
    assert schedule == kernel.default(workload, V5E)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_without_libtpu_the_error_says_where_it_comes_from() -> None:
    with pytest.raises(ConfigError, match="scripts/check_tpu"):
        tpu_compile.topology("TPU v5e")
