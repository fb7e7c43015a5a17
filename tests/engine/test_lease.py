"""Leases of the device: budgeted over a sliding window, revoked by load, no longer than asked."""

import pytest

from polyjax.core.errors import ConfigError
from polyjax.engine.lease import WINDOW_S, Lease, TuningLeases


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_lease_has_a_deadline_and_is_the_only_one(clock: Clock) -> None:
    leases = TuningLeases(0.01, clock=clock)
    lease = leases.request(200, "tuner", running=3, waiting=0).lease
    assert lease is not None
    assert lease.expires_s == pytest.approx(clock.now_s + 0.2)
    other = leases.request(10, "other", running=3, waiting=0)
    assert (other.lease, other.reason) == (None, "another lease is in force")
    assert other.retry_after_s == pytest.approx(0.2)
    clock.now_s += 0.2
    assert leases.active is None
    found = leases.find(lease.id)
    assert found is not None
    assert found.reason == "expired"
    assert found.used_s(clock.now_s) == pytest.approx(0.2)


def test_the_budget_is_a_share_of_the_window_and_comes_back(clock: Clock) -> None:
    leases = TuningLeases(0.01, clock=clock)  # 600 ms a window
    for _ in range(3):
        assert leases.request(200, "t", 0, 0).lease
        clock.now_s += 0.2
    refused = leases.request(100, "t", 0, 0)
    assert "used up" in refused.reason
    # The first lease leaves the window, millisecond by millisecond, from 60 s after its start.
    assert refused.retry_after_s == pytest.approx(WINDOW_S - 0.6 + 0.1)
    clock.now_s += refused.retry_after_s - 0.001
    assert leases.request(100, "t", 0, 0).lease is None
    clock.now_s += 0.002
    assert leases.request(100, "t", 0, 0).lease is not None
    assert leases.used_s() <= 0.01 * WINDOW_S + 1e-9


def test_what_was_not_used_goes_back(clock: Clock) -> None:
    ended: list[tuple[Lease, float]] = []
    leases = TuningLeases(0.01, lambda lease, used_s: ended.append((lease, used_s)), clock)
    lease = leases.request(600, "t", 0, 0).lease
    assert lease is not None
    assert leases.used_s() == pytest.approx(0.6)  # charged in full while it lasts
    clock.now_s += 0.05
    assert leases.release(lease) == pytest.approx(0.05)
    assert leases.used_s() == pytest.approx(0.05)
    assert [e.id for e, _ in ended] == [lease.id]
    assert ended[0][1] == pytest.approx(0.05)
    assert leases.release(lease) == pytest.approx(0.05)  # once more changes nothing
    assert len(ended) == 1


@pytest.mark.parametrize(
    ("running", "waiting", "revoked"), [(3, 0, False), (4, 0, True), (2, 1, True)]
)
def test_rising_load_revokes(clock: Clock, running: int, waiting: int, revoked: bool) -> None:
    leases = TuningLeases(0.01, clock=clock)
    lease = leases.request(100, "t", running=3, waiting=0).lease
    assert lease is not None
    clock.now_s += 0.01
    leases.observe(running, waiting)
    assert (leases.active is None) is revoked
    assert leases.to_json()["revoked"] == revoked
    assert lease.used_s(clock.now_s + 1) == pytest.approx(0.01 if revoked else 0.1)


def test_refusals_and_settings(clock: Clock) -> None:
    leases = TuningLeases(0.005, clock=clock)
    assert leases.request(100, "t", 0, 1).reason == "requests are waiting"
    assert "allows 300 ms" in leases.request(301, "t", 0, 0).reason
    leases.set_duty(0.0)
    assert leases.request(1, "t", 0, 0).lease is None
    for duty in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="tune_duty"):
            leases.set_duty(duty)
    assert leases.duty == 0.0
