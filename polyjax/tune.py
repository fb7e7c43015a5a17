"""Tunes a model's kernels or plan: `python -m polyjax.tune [model] --target=plan --ledger=FILE`.

python -m polyjax.tune --budget=30m --ledger=tune.sqlite --resume    # the demo model's plan
python -m polyjax.tune replay --ledger=tune.sqlite                   # decide again from samples
python -m polyjax.tune export --ledger=tune.sqlite                   # winners become defaults
python -m polyjax.tune report --ledger=tune.sqlite --output=report.html
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import app
from absl import flags as absl_flags

from polyjax import flags
from polyjax.core.errors import ConfigError, PolyjaxError
from polyjax.engine.types import EngineConfig
from polyjax.packages import refuse_foreign_packages
from polyjax.tune_progress import Shown, seconds

if TYPE_CHECKING:  # these import jax, which takes a second: not before flags are parsed
    from polyjax.core.plan import Plan
    from search.run import Found, RunConfig
    from search.traffic import TrafficSpec

TARGETS = ("plan", "kernels", "mesh")
EXIT_INTERRUPTED = 130


def _flag(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class TuneConfig:
    """What a tuning run is told besides the engine it tunes for."""

    target: str = _flag("plan", "What to search: plan, kernels or mesh.")
    budget: str = _flag("30m", "How long this run may take: 90s, 30m, 2h.")
    max_trials: int = _flag(0, "Most new trials of this run; 0: as many as the budget allows.")
    ledger: str | None = _flag(None, "The file that remembers trials and decisions.")
    resume: bool = _flag(False, "Go on from what the ledger knows; a missing one is started.")
    agent: str = _flag("bandit", "Who proposes: bandit, model_led, local, evolution or random.")
    op: str = _flag("", "With --target=kernels: only this op.")
    edits: str | None = _flag(None, "JSON file of edits to the plan that the search starts from.")
    output_plan: str | None = _flag(None, "Where the best plan is written; default: beside the "
                                          "ledger, FILE.plan.json.")  # fmt: skip
    output: str = _flag("report.html", "Where `report` writes its page.")
    tables_root: str | None = _flag(None, "Where `export` writes; default: polyjax's own tables.")
    traffic: str | None = _flag(None, "JSON file of prompt_tokens, output_tokens, concurrency.")
    isl: int = _flag(256, "Tokens of a prompt, where there is no --traffic.")
    osl: int = _flag(128, "Tokens of an answer, where there is no --traffic.")
    concurrency: tuple[str, ...] = _flag(("1", "4"), "Rows that decode at once, ditto.")
    compile_workers: int = _flag(0, "Processes that compile; 0: one a core.")
    trial_timeout_s: float = _flag(300.0, "A trial that takes longer hangs and is cut off.")
    max_pairs: int = _flag(60, "Most paired samples of a comparison.")
    noise_pairs: int = _flag(30, "Pairs of the A/A run that finds the noise floor.")
    sample_ms: float = _flag(4.0, "Work in one sample.")


def main(argv: Sequence[str]) -> int:
    try:
        refuse_foreign_packages()
        tune = flags.read(TuneConfig)
        if len(argv) == 2 and argv[1] in COMMANDS:
            return COMMANDS[argv[1]](tune)
        return search(tune, flags.read_engine(argv[1:]))
    except PolyjaxError as error:
        print(f"polyjax: {error}", file=sys.stderr)
        return 1


# -- searching -------------------------------------------------------------------------------


def search(tune: TuneConfig, engine: EngineConfig) -> int:
    """Searches until the budget is used up or a signal comes; returns the exit code."""
    run = run_config(tune, engine)
    output = Path(tune.output_plan or f"{run.ledger}.plan.json")
    shown = Shown(run.budget_s, run.max_trials)
    for number in (signal.SIGINT, signal.SIGTERM):  # both end a run in order
        signal.signal(number, signal.default_int_handler)
    try:
        found = _searched(tune, engine, run, output, shown)
    except KeyboardInterrupt:
        shown.end()
        kept = f"the best plan so far is in {output}" if output.exists() else "nothing was found"
        print(f"polyjax: interrupted; {kept}, and {run.ledger} remembers", file=sys.stderr)
        return EXIT_INTERRUPTED
    shown.end()
    print(
        f"polyjax: {found.trials} new trials, {found.gain:.3f} times as fast as the plan to start "
        f"from; {output} serves it: scripts/serve --plan={output}",
        file=sys.stderr,
    )
    return 0


def _searched(
    tune: TuneConfig, engine: EngineConfig, run: RunConfig, output: Path, shown: Shown
) -> Found:
    from search.run import tune_kernels, tune_mesh, tune_plan

    def keep(plan: Plan) -> None:
        write_plan(output, plan)

    if tune.target == "kernels":
        return tune_kernels(engine, run, tune.op, shown.trial, keep)
    if tune.target == "mesh":
        said = lambda line: print(f"polyjax: {line}", file=sys.stderr)  # noqa: E731
        return tune_mesh(engine, read_traffic(tune), run, keep, said)
    edits = read_edits(tune.edits)
    return tune_plan(engine, read_traffic(tune), run, edits, shown.trial, keep)


def run_config(tune: TuneConfig, engine: EngineConfig) -> RunConfig:
    """Raises ConfigError naming the flag that is wrong, before any process starts."""
    from search.paired import Effort
    from search.run import RunConfig

    if tune.target not in TARGETS:
        raise ConfigError(f"--target={tune.target}: must be one of {', '.join(TARGETS)}")
    if tune.ledger is None:
        raise ConfigError("--ledger=FILE is needed: the file that remembers what was tried")
    if tune.max_pairs < 10 or tune.noise_pairs < 10:
        raise ConfigError("--max_pairs and --noise_pairs must be at least 10")
    if tune.sample_ms <= 0 or tune.trial_timeout_s <= 0:
        raise ConfigError("--sample_ms and --trial_timeout_s must be positive")
    return RunConfig(
        ledger=Path(tune.ledger),
        resume=tune.resume,
        budget_s=seconds(tune.budget),
        max_trials=tune.max_trials,
        agent=tune.agent,
        seed=engine.seed,
        workers=tune.compile_workers,
        trial_timeout_s=tune.trial_timeout_s,
        effort=Effort(tune.noise_pairs, tune.max_pairs, tune.sample_ms),
    )


def read_traffic(tune: TuneConfig) -> TrafficSpec:
    """Raises ConfigError for a file that describes no traffic."""
    from search.best import read_json
    from search.traffic import TrafficSpec

    if tune.traffic is not None:
        return TrafficSpec.from_json(read_json(Path(tune.traffic), "description of traffic"))
    try:
        concurrency = tuple(int(count) for count in tune.concurrency)
    except ValueError as error:
        raise ConfigError(f"--concurrency={','.join(tune.concurrency)}: {error}") from error
    return TrafficSpec((tune.isl, max(1, tune.isl // 4)), (tune.osl,), concurrency)


def read_edits(path: str | None) -> list[Any]:
    """Raises ConfigError for a file that holds no edits."""
    from search.best import read_json
    from search.edits import Edit

    if path is None:
        return []
    rows = read_json(Path(path), "list of edits")
    if not isinstance(rows, list):
        raise ConfigError(f"{path}: edits are a JSON list")
    return [Edit.from_json(row) for row in rows]


def write_plan(path: Path, plan: Plan) -> None:
    from polyjax.core.whole_file import write_whole

    write_whole(path, (json.dumps(plan.to_json(), indent=1) + "\n").encode(), mode=0o600)


# -- what a ledger says ----------------------------------------------------------------------


def _open(tune: TuneConfig) -> Any:
    from search.ledger import Ledger

    if tune.ledger is None:
        raise ConfigError("--ledger=FILE is needed")
    return Ledger(tune.ledger, None)


def replay(tune: TuneConfig) -> int:
    """Decides every recorded decision again; 1 if one comes out otherwise."""
    from search.decisions import replay as replayed

    ledger = _open(tune)
    differing = 0
    for made, again, reason in replayed(ledger):
        same = made.promoted == again
        differing += not same
        verdict = "promoted" if again else "not promoted"
        print(f"trial {made.trial}: {verdict}: {reason}{'' if same else '  DIFFERS'}")
    print(f"polyjax: {differing} decisions come out otherwise", file=sys.stderr)
    return 1 if differing else 0


def export(tune: TuneConfig) -> int:
    """Merges the winners into the tuning tables that engines choose from."""
    from polyjax.core.op import Choice
    from polyjax.core.tables import SHIPPED, merge_tables
    from search.best import best_choices

    root = Path(tune.tables_root) if tune.tables_root else SHIPPED
    found = best_choices(_open(tune))
    for device_kind, choices in found.items():
        merged = {
            key: Choice(choice["kernel"], tuple(sorted(choice["schedule"].items())))
            for key, choice in choices.items()
        }
        for path in merge_tables(root, device_kind, merged):
            print(path)
    total = sum(len(choices) for choices in found.values())
    print(f"polyjax: {total} choices for {len(found)} kinds of device", file=sys.stderr)
    return 0


def report(tune: TuneConfig) -> int:
    """Writes the page that shows what a ledger holds."""
    from polyjax.core.whole_file import write_whole
    from search.report import render

    output = Path(tune.output)
    write_whole(output, render(_open(tune)).encode(), mode=0o600)
    print(f"polyjax: {output}", file=sys.stderr)
    return 0


COMMANDS: Mapping[str, Any] = {"replay": replay, "export": export, "report": report}

if __name__ == "__main__":
    flags.define(EngineConfig, flags.ENGINE_HELP)
    flags.define(TuneConfig)
    absl_flags.adopt_module_key_flags(flags)  # so that --help lists them
    app.run(main, flags_parser=flags.parse)
