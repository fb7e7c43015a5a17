"""What scripts/check_tpu does inside the environment with libtpu."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from absl import app, flags

from pallas_kernels.__main__ import ops_of
from pallas_kernels.tpu_compile import TOPOLOGIES, Compiled, compile_schedule, sample
from polyjax.core.chips import ChipSpec, chip
from polyjax.core.errors import ConfigError, PolyjaxError
from polyjax.core.op import Kernel, Schedule, Workload
from polyjax.core.results import Result, append, measured

_OPS = flags.DEFINE_list("ops", None, "Only these ops.")
_CHIPS = flags.DEFINE_list("chips", list(TOPOLOGIES), "Chips to compile for.")
_SAMPLE = flags.DEFINE_integer("sample", 32, "Schedules per op and chip.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Draws the sample.")
_OUTPUT = flags.DEFINE_string("output", None, "Result lines are appended to this file.")
_PROGRAMS = flags.DEFINE_bool("programs", False, "Compile whole decode steps instead of kernels.")
_STEPS = flags.DEFINE_list("steps", [], "With --programs: only these steps.")


class Record:
    """The schedules compiled before, and a file that each further one is appended to.

    It does not know whether a kernel has changed since: a new version is a new file.
    """

    def __init__(self, output: str | None):
        self.path = Path(output).with_suffix(".schedules.jsonl") if output else None
        self.known: dict[tuple[str, str, str, str], Compiled] = {}
        if self.path is not None and self.path.exists():
            for line in self._whole_lines(self.path):
                compiled = Compiled(**line)
                self.known[compiled.key] = compiled

    @staticmethod
    def _whole_lines(path: Path) -> Iterator[dict]:
        """What a killed run wrote; its last line may be torn and is then compiled again."""
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def compiled(
        self, kernel: Kernel, workload: Workload, schedule: Schedule, target: ChipSpec
    ) -> Compiled:
        key = Compiled(
            target.name, kernel.name, workload.key, schedule.to_json(), None, 0, 0, 0
        ).key
        if key not in self.known:
            self.known[key] = compile_schedule(kernel, workload, schedule, target)
            self._write(self.known[key])
        return self.known[key]

    def _write(self, compiled: Compiled) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(compiled)) + "\n")
            file.flush()
            os.fsync(file.fileno())


def check_op(op_name: str, target: ChipSpec, record: Record) -> Result:
    """Compiles the op's sample; the result counts what the compiler took."""
    drawn = sample(op_name, target, _SAMPLE.value, _SEED.value)
    done = []
    for number, (kernel, workload, schedule) in enumerate(drawn, 1):
        done.append(record.compiled(kernel, workload, schedule, target))
        said = done[-1].reason or f"{done[-1].compile_s:.1f} s"
        where = f"{target.name} {op_name} {number}/{len(drawn)}"
        print(f"{where}: {workload.key} {schedule}: {said}", file=sys.stderr, flush=True)
    refused = [c for c in done if c.reason]
    reasons = "; ".join(dict.fromkeys(c.reason or "" for c in refused))
    code = max((c.code_bytes for c in done), default=0)
    print(f"{target.name:8} {op_name:22} {len(done) - len(refused):3}/{len(done)} compile")
    for compiled in refused:
        print(f"    {compiled.workload} {compiled.schedule}: {compiled.reason}")
    return measured(
        f"tpu_{op_name}_schedules_compiled",
        [len(done) - len(refused)],
        "schedules",
        better="higher",
        goal=len(done),
        device=f"{target.name} (compiled for, not run)",
        note=f"of {len(done)} drawn by seed {_SEED.value}; largest code {code} bytes"
        + (f"; refused: {reasons[:600]}" if refused else ""),
    )


def chosen_ops() -> list[str]:
    known = ops_of("tpu")
    unknown = [op for op in _OPS.value or [] if op not in known]
    if unknown:
        raise ConfigError(f"--ops={','.join(unknown)}: TPU kernels exist for {', '.join(known)}")
    return _OPS.value or known


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    sys.argv[0] = "scripts/check_tpu"  # the command that results name
    if _PROGRAMS.value:
        from scripts._tpu_programs import check  # heavy: models and the step compiler

        for results in check(_CHIPS.value, _STEPS.value):
            if _OUTPUT.value:
                append(_OUTPUT.value, results)
        return
    record = Record(_OUTPUT.value)
    complete = True
    for name in _CHIPS.value:
        for op_name in chosen_ops():
            result = check_op(op_name, chip(name), record)
            complete = complete and result.value == result.goal
            if _OUTPUT.value:
                append(_OUTPUT.value, [result])
    if not complete:
        sys.exit(1)


if __name__ == "__main__":
    try:
        app.run(main)
    except PolyjaxError as error:
        sys.exit(f"check_tpu: {error}")
