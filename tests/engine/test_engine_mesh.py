"""Tensor parallelism on virtual CPU devices serves the reference's tokens."""

from pathlib import Path

import jax
import pytest

from polyjax.engine.types import Request
from tests.engine.golden_engine import sleep, wake
from tests.engine.serving import assert_greedy, greedy, make_engine, prompt, run


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (virtual) devices")
def test_eight_devices(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, tensor_parallel_size=8)
    assert engine.info.device == "8 x cpu"
    shards = [{shard.data.shape for shard in pool.addressable_shards} for pool in engine.state.kv]
    assert all(
        shape == {(pool.shape[0], 2, 1, 8, 8)}
        for shape, pool in zip(shards, engine.state.kv, strict=True)
    )
    requests = [Request(f"t{n}", prompt(n), greedy(12)) for n in (3, 9, 20)]
    streams = run(engine, requests)
    for request in requests:
        assert len(streams[request.id].tokens) == 12
        assert_greedy(engine, request, streams[request.id].tokens)
    sleep(engine, engine.step)
    assert not engine.state.params and not engine.state.kv
    wake(engine, engine.step)
    again = run(engine, requests)  # the same shards of the same weights
    assert {i: s.tokens for i, s in again.items()} == {i: s.tokens for i, s in streams.items()}
    engine.close()
