"""Pairs: taking turns, until decided, given up early where hopeless. The clock is a made-up one."""

from __future__ import annotations

import numpy as np
import pytest

from search import paired
from search.decisions import comparisons, decide, floors, is_settled
from search.paired import Effort, compare_arms, noise, sample_us


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


class FakeArm:
    groups = ("decode", "prefill")

    def __init__(self, clock, name, log, **costs_us):
        self.clock, self.name, self.log, self.costs_us = clock, name, log, costs_us
        self.rng = np.random.default_rng(len(name))

    def run(self, group):
        wobble = 1 + 0.003 * self.rng.standard_normal()
        self.clock.now_s += self.units(group) * self.costs_us[group] * wobble * 1e-6
        self.log.append((self.name, group))
        return 1

    def units(self, group):
        return 4 if group == "decode" else 1


@pytest.fixture
def arms(monkeypatch):
    clock, log = Clock(), []
    monkeypatch.setattr(paired, "_clock", clock)
    monkeypatch.setattr(paired, "_block", lambda results: results)

    def make(name, decode=100.0, prefill=900.0):
        return FakeArm(clock, name, log, decode=decode, prefill=prefill)

    return make, log, clock


EFFORT = Effort(noise_pairs=20, max_pairs=40, sample_ms=2.0)


def compared(make, **costs):
    incumbent = make("incumbent")
    aa = noise(incumbent, make("copy"), EFFORT)
    found = compare_arms(make("candidate", **costs), incumbent, aa, EFFORT)
    return found, {"arms": found.arms, "noise": aa, "max_pairs": EFFORT.max_pairs}


def test_a_sample_is_per_step_whatever_its_repeats(arms):
    make, _, _ = arms
    arm = make("a")
    assert sample_us(arm, "decode", 13) == pytest.approx(100.0, rel=0.01)
    assert sample_us(arm, "prefill", 13) == pytest.approx(900.0, rel=0.01)


def test_a_faster_candidate_is_promoted_after_few_pairs(arms):
    make, _, _ = arms
    found, evidence = compared(make, decode=90.0)
    assert not found.slow
    assert decide(evidence)[0]
    assert 10 <= len(found.arms["decode"]["candidate_us"]) < EFFORT.max_pairs
    assert comparisons(evidence)["decode"].ratio == pytest.approx(0.9, rel=0.01)


def test_an_equal_candidate_is_not(arms):
    make, _, _ = arms
    _, evidence = compared(make)
    promoted, reason = decide(evidence)
    assert not promoted and "noise" in reason
    assert is_settled(evidence)


def test_slower_on_one_part_forbids_what_is_faster_on_another(arms):
    make, _, _ = arms
    _, evidence = compared(make, decode=80.0, prefill=1000.0)
    promoted, reason = decide(evidence)
    assert not promoted and reason == "slower on prefill"


def test_three_times_the_time_is_given_up_at_once(arms):
    make, log, _ = arms
    found, _ = compared(make, prefill=2800.0)
    assert found.slow
    assert len(found.arms["prefill"]["candidate_us"]) == 2
    assert sum(name == "candidate" for name, _ in log) < 10
    found, _ = compared(make, prefill=2500.0)  # slow, but short of hopeless
    assert not found.slow


def test_arms_take_turns_and_swap_who_goes_first(arms):
    make, log, _ = arms
    incumbent, copy = make("incumbent"), make("copy")
    aa = noise(incumbent, copy, EFFORT)
    log.clear()
    compare_arms(make("candidate"), incumbent, aa, EFFORT)
    order = [name for name, group in log if group == "prefill"]
    # Runs of one name are one sample; pairs swap their order, so samples come two by two.
    runs = [name for n, name in enumerate(order) if n == 0 or order[n - 1] != name]
    assert runs.count("candidate") >= 10 and runs.count("incumbent") >= 10


def test_time_runs_out_without_a_decision(arms):
    make, _, _ = arms
    incumbent = make("incumbent")
    aa = noise(incumbent, make("copy"), EFFORT)
    effort = Effort(noise_pairs=20, max_pairs=40, sample_ms=2.0, limit_s=0.02)
    found = compare_arms(make("candidate", decode=90.0), incumbent, aa, effort)
    assert len(found.arms["decode"]["candidate_us"]) < 10
    evidence = {"arms": found.arms, "noise": aa, "max_pairs": 40}
    assert not is_settled(evidence) and not decide(evidence)[0]


def test_the_floor_comes_from_two_copies(arms):
    make, _, _ = arms
    floor = floors(noise(make("a"), make("b"), EFFORT))
    assert set(floor) == {"decode", "prefill"} and all(0 < f < 0.01 for f in floor.values())


def test_a_gate_refuses_what_the_samples_would_promote(arms):
    make, _, _ = arms
    _, evidence = compared(make, decode=90.0)
    promoted, reason = decide(evidence | {"refused": "equivalence: off by 2"})
    assert not promoted and "equivalence: off by 2" in reason
