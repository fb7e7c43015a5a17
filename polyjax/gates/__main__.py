"""`python -m polyjax.gates score`: what the gates catch, and what they wrongly reject.

Exits 0 only if every mutant is caught on every seed and no legal implementation is rejected.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from polyjax.core.errors import ConfigError
from polyjax.core.results import Result, append, measured
from polyjax.gates.score import Score, score

TESTS = Path(__file__).resolve().parents[2] / "tests"
SUBSET_SEEDS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit status."""
    options = _parser().parse_args(arguments)
    subset = options.subset == "cpu"
    count = options.seeds or (SUBSET_SEEDS if subset else 20)
    seeds = range(options.first_seed, options.first_seed + count)
    legal = None if options.legal == "none" else Path(options.legal)
    show = None if options.json else lambda line: print(line, flush=True)
    try:
        found = score(
            Path(options.mutants),
            legal,
            seeds,
            seeds[: 1 if subset else options.legal_seeds],
            subset=subset,
            jobs=options.jobs,
            progress=show or (lambda line: print(line, file=sys.stderr, flush=True)),
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        print(summary(found))
    if options.results:
        append(options.results, results(found))
    return 0 if found.perfect else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m polyjax.gates", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("score", help="mutants caught, legal implementations rejected")
    command.add_argument("--subset", choices=("cpu",), help="fewer seeds and files, for CI")
    command.add_argument("--mutants", default=str(TESTS / "mutants"), help="directory of mutants")
    command.add_argument("--legal", default=str(TESTS / "legal"), help='directory, or "none"')
    command.add_argument("--seeds", type=int, help="fresh seeds a mutant; 20, or 3 for a subset")
    command.add_argument("--legal_seeds", type=int, default=2, help="seeds a legal implementation")
    command.add_argument("--first_seed", type=int, default=0, help="first of the seeds")
    command.add_argument("--jobs", type=int, default=1, help="processes that share the work")
    command.add_argument("--json", action="store_true", help="report as JSON on standard output")
    command.add_argument("--results", help="JSONL file to append the two metrics to")
    return parser


def summary(found: Score) -> str:
    """A few lines: totals, then every miss and every rejection with its reason."""
    caught = len(found.mutants) - len(found.missed)
    lines = [
        f"caught {caught}/{len(found.mutants)} mutants; rejected {len(found.rejected)} of "
        f"{len(found.legal)} legal implementations; {found.cost_s:.0f} s"
    ]
    for miss in found.missed:
        lines.append(
            f"  MISSED {miss.name} on {miss.seeds - len(miss.failures)} seeds: {miss.kind}"
        )
    for outcome in found.mutants:
        if outcome.only_raised:
            lines.append(f"  RAISED {outcome.name}: {next(iter(outcome.failures.values()))[1]}")
    for rejected in found.rejected:
        gate, reason = next(iter(rejected.failures.values()))
        lines.append(f"  REJECTED {rejected.name} by {gate}: {reason}")
    return "\n".join(lines)


def results(found: Score) -> list[Result]:
    """The two metrics, one sample each: they are counts."""
    caught = (len(found.mutants) - len(found.missed)) / max(len(found.mutants), 1)
    seeds = max((o.seeds for o in found.mutants), default=0)
    trials = sum(o.seeds for o in found.legal)
    return [
        measured(
            "gates_mutants_caught_fraction", [caught], "fraction", better="higher", device="cpu",
            goal=1.0, note=f"{len(found.mutants)} mutants, {seeds} fresh seeds each",
        ),
        measured(
            "gates_false_rejections", [float(len(found.rejected))], "implementations",
            better="lower", device="cpu", goal=0.0,
            note=f"{len(found.legal)} legal implementations, {trials} trials",
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
