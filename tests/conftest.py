"""What every test runs under: which devices jax sees and where its compiled programs are cached.

Environment variables rather than jax.config, because jax must not be imported here (some tests
check that it is not) and because the processes that tests start inherit them.
"""

import os

import pytest

VIRTUAL_CPU_DEVICES = 8  # sharding is tested without accelerators


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in os.environ["XLA_FLAGS"]:
        os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={VIRTUAL_CPU_DEVICES}"
    if not selects_device_tests(config.option.markexpr):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # One folder per xdist worker: jax writes cache entries in place, and another worker could
    # read half of one.
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    cache = config.rootpath / ".cache" / "jax-tests" / worker
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


def selects_device_tests(marker_expression: str) -> bool:
    return "device" in marker_expression and "not device" not in marker_expression
