"""A ledger with the trials that a few invented searches would leave, of every status."""

from __future__ import annotations

import numpy as np

from search.decisions import RULE, decide
from search.ledger import Ledger, Promotion, Trial

ENVIRONMENT = {"device_kind": "NVIDIA H200", "jaxlib": "0.11.2"}
TARGETS = (
    "matmul[M=8,K=2048,N=3072|x:bfloat16,w:bfloat16]",
    "paged_attention[B=64,T=1,N=32,H=128,K=8,Z=64,C=64|q:bfloat16,kv:bfloat16,page_table:int32,"
    "context_lens:int32,query_lens:int32|scale=0.08838834764831845]",
    "plan",
)
FAILURES = (
    ("compile_error", "does not lower: 232448 bytes of shared memory"),
    ("rejected", "op_equivalence: random is 3.2 times the bound"),
    ("timeout", "no answer after 20.0 s"),
    ("crashed", "measurer ended with SIGABRT"),
    ("slow", ""),
    ("duplicate", "the same compiled program as trial 1"),
)
AGENTS = ("model_led", "local", "evolution", "random")


def noise(rng, us):
    spread = 1 + 0.002 * rng.standard_normal((2, 30))
    return {"first_us": list(us * spread[0]), "second_us": list(us * spread[1])}


def fill(path, trials, seed=0):
    """Writes a ledger of so many trials and returns it."""
    rng = np.random.default_rng(seed)
    ledger = Ledger(path, ENVIRONMENT)
    ledger._db.execute("PRAGMA synchronous=OFF")  # thousands of commits, and nothing to lose
    best = {}
    for number in range(trials):
        target = TARGETS[number % len(TARGETS)]
        key = f"{target}{number}"
        schedule = {"tile": int(rng.choice([64, 128, 256])), "stages": int(rng.integers(2, 6)),
                    "swizzle": bool(rng.integers(2))}  # fmt: skip
        cost = 20.0 * (1 + 64 / schedule["tile"] + 0.3 * abs(schedule["stages"] - 4))
        candidate = {"kernel": "mosaic_gpu.x", "schedule": schedule}
        spent = {"compile": 8 * rng.random(), "gate": 2 * rng.random(), "time": rng.random()}
        common = {
            "key": key,
            "target": target,
            "candidate": candidate,
            "spent": spent,
            "ended_s": 1.8e9 + number,
            "predicted_us": cost * 1.3 ** rng.standard_normal(),
        }
        if target not in best:
            cost = 60.0
            verdicts = {"relative": {"ratio": 1.0, "cost_us": cost}}
            trial = Trial(agent="baseline", status="passed", verdicts=verdicts, **common)
            best[target] = (cost, ledger.record(trial))
            continue
        agent = AGENTS[int(rng.integers(len(AGENTS)))]
        if rng.random() < 0.45:
            status, reason = FAILURES[int(rng.integers(len(FAILURES)))]
            ledger.record(Trial(agent=agent, status=status, reason=reason, **common))
            continue
        theirs, incumbent = best[target]
        spread = 1 + 0.002 * rng.standard_normal((2, 20))
        samples = {"candidate_us": cost * spread[0], "incumbent_us": theirs * spread[1]}
        arms = {"op": {arm: list(values) for arm, values in samples.items()}}
        evidence = {"arms": arms, "noise": {"op": noise(rng, theirs)}, "max_pairs": 60}
        if number % 50 == 7:
            evidence["refused"] = "freshness: results do not follow w"
        promoted, evidence["reason"] = decide(evidence)
        verdicts = {"relative": {"ratio": cost / theirs, "cost_us": cost}}
        trial = Trial(agent=agent, status="passed", samples_us=tuple(arms["op"]["candidate_us"]),
                      verdicts=verdicts, parent=incumbent, **common)  # fmt: skip
        trial_id = ledger.record(trial, Promotion(0, incumbent, RULE, promoted, evidence))
        if promoted:
            best[target] = (cost, trial_id)
    return ledger
