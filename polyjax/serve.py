"""Serves a model over an OpenAI-compatible HTTP API: `python -m polyjax.serve [model] [flags]`."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from absl import app
from absl import flags as absl_flags

from polyjax import flags
from polyjax.core.errors import PolyjaxError
from polyjax.engine.types import EngineConfig
from polyjax.packages import refuse_foreign_packages
from polyjax.runtime_folder import make_runtime_folder
from polyjax.server.config import ServerConfig
from polyjax.tuner import TunerConfig

flags.define(EngineConfig, flags.ENGINE_HELP)
flags.define(ServerConfig)
flags.define(TunerConfig)
absl_flags.adopt_module_key_flags(flags)  # so that --help lists them


def main(argv: Sequence[str]) -> NoReturn:
    try:
        refuse_foreign_packages()
        code = serve(flags.read(ServerConfig), flags.read_engine(argv[1:]), flags.read(TunerConfig))
    except PolyjaxError as error:
        print(f"polyjax: {error}", file=sys.stderr)
        code = 1
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)  # a thread may still be fetching a model that nobody waits for any more


def serve(config: ServerConfig, engine: EngineConfig, tuner: TunerConfig) -> int:
    """Serves until a signal or a failure; returns the exit code."""
    if config.dry_run:
        return dry_run(engine)
    folder = make_runtime_folder()
    try:
        if config.api_server_count > 1:
            # prometheus_client looks at this once, when it is imported: before what follows.
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
        from polyjax.engine.scripted import read_script
        from polyjax.server.process import configure_logging, run_event_loop
        from polyjax.supervisor import Supervisor

        configure_logging()
        engine = with_ledger_plan(engine, tuner.ledger, folder)
        script = read_script(config.scripted_engine)
        return run_event_loop(Supervisor(config, engine, tuner, script, folder).run())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def with_ledger_plan(engine: EngineConfig, ledger: str | None, folder: Path) -> EngineConfig:
    """The config with the plan that `--ledger` promoted last, unless `--plan` names one."""
    if ledger is None or engine.plan != "default":
        return engine
    from polyjax.console import say
    from search.best import best_plan_here

    found, reason = best_plan_here(Path(ledger), engine.model)
    if found is None:
        say(f"starting with the default plan: {reason}")
        return engine
    plan = folder / "ledger_plan.json"
    plan.write_text(json.dumps(found.plan))
    say(f"starting with the plan that trial {found.trial} of {ledger} promoted")
    return dataclasses.replace(engine, plan=str(plan))


def dry_run(engine: EngineConfig) -> int:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # jax is asked for its platform only
    from polyjax.dry_run import describe
    from polyjax.progress import ShownProgress
    from polyjax.server.process import open_served

    print(describe(engine, open_served(engine.model, engine.tokenizer, ShownProgress())))
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=flags.parse)
