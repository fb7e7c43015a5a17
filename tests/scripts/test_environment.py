"""scripts/serve and scripts/test: which packages they install, when, and how they hand over."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"


def write_program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/_environment.py, working on a checkout in tmp_path."""
    spec = importlib.util.spec_from_file_location("environment", SCRIPTS / "_environment.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "REQUIREMENTS", tmp_path / "requirements")
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/serve.txt").write_text("jax==1\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    monkeypatch.setenv("POLYJAX_ACCELERATOR", "cpu")
    return module


@pytest.mark.parametrize(
    ("nvidia_smi", "accelerator"),
    [
        ("echo 590.44.01", "cuda13"),
        ("echo 580.65.06", "cuda13"),
        ("echo 579.99", "cuda12"),
        ("echo 525.60.13; echo 525.60.13", "cuda12"),  # a line for each GPU
        ("exit 9", "cpu"),  # installed, but no driver runs
        ("echo No devices were found", "cpu"),
    ],
)
def test_the_driver_decides_the_accelerator(
    nvidia_smi: str,
    accelerator: str,
    environment: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_program(tmp_path / "bin/nvidia-smi", nvidia_smi)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("POLYJAX_ACCELERATOR")
    assert environment.detect_accelerator() == accelerator


def test_without_nvidia_smi_it_is_the_cpu(
    environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("POLYJAX_ACCELERATOR")
    assert environment.detect_accelerator() == "cpu"


def test_a_driver_too_old_is_refused(
    environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(tmp_path / "bin/nvidia-smi", "echo 470.10")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("POLYJAX_ACCELERATOR")
    with pytest.raises(SystemExit, match=r"470\.10 is older than 525"):
        environment.detect_accelerator()


def test_every_accelerator_has_its_requirements(environment: ModuleType) -> None:
    for accelerator in environment.ACCELERATORS:
        for group in ("serve", "test"):
            names = [file.name for file in environment.requirement_files(group, accelerator)]
            assert all((SCRIPTS.parent / "requirements" / name).exists() for name in names)


class Commands:
    """Stands in for subprocess.run: keeps the commands, fails at one that contains `fail_at`."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.fail_at: str | None = None

    def run(self, command: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        line = " ".join(map(str, command))
        self.ran.append(line)
        if self.fail_at and self.fail_at in line:
            raise subprocess.CalledProcessError(1, command)
        if "-m venv" in line:
            shutil.rmtree(command[-1], ignore_errors=True)
            write_program(Path(command[-1]) / "bin/python", "")
        return subprocess.CompletedProcess(command, 0)

    def since_last(self) -> list[str]:
        ran, self.ran = self.ran, []
        return ran


@pytest.fixture
def commands(environment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Commands:
    stand_in = Commands()
    monkeypatch.setattr(environment.subprocess, "run", stand_in.run)
    return stand_in


def test_installs_once_and_again_when_a_pin_changes(
    environment: ModuleType, commands: Commands, tmp_path: Path
) -> None:
    venv = tmp_path / ".venv"
    environment.prepare(venv, "serve")
    assert any("--require-hashes" in line for line in commands.since_last())
    environment.prepare(venv, "serve")
    assert commands.since_last() == []
    (tmp_path / "requirements/serve.txt").write_text("jax==2\n")
    environment.prepare(venv, "serve")
    again = commands.since_last()
    assert any("--require-hashes" in line for line in again)
    assert not any("-m venv" in line for line in again)


def test_what_test_needs_includes_what_serve_needs(
    environment: ModuleType, commands: Commands, tmp_path: Path
) -> None:
    environment.prepare(tmp_path / ".venv", "test")
    commands.since_last()
    environment.prepare(tmp_path / ".venv", "serve")
    assert commands.since_last() == []


@pytest.mark.parametrize("step", ["-m venv", "--require-hashes", "--editable"])
def test_an_installation_that_failed_is_started_over(
    step: str, environment: ModuleType, commands: Commands, tmp_path: Path
) -> None:
    venv = tmp_path / ".venv"
    commands.fail_at = step
    with pytest.raises(subprocess.CalledProcessError):
        environment.prepare(venv, "serve")
    commands.since_last()
    commands.fail_at = None
    environment.prepare(venv, "serve")
    assert any("-m venv --clear" in line for line in commands.since_last())
    environment.prepare(venv, "serve")
    assert commands.since_last() == []


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the real shell scripts and a PATH folder `bin` that has no Python yet."""
    shutil.copytree(SCRIPTS, tmp_path / "checkout/scripts")
    dirname = shutil.which("dirname")
    assert dirname
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/dirname").symlink_to(dirname)
    return tmp_path / "checkout"


def start(script: Path, *flags: str) -> subprocess.Popen[str]:
    path = str(script.parent.parent.parent / "bin")
    return subprocess.Popen(
        [script, *flags],
        env={"PATH": path, "TMPDIR": os.environ.get("TMPDIR", "/tmp")},
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_only_another_python_is_an_error_that_says_so(checkout: Path) -> None:
    write_program(checkout.parent / "bin/python3", "echo /usr/bin/python3.11; exit 1")
    with start(checkout / "scripts/serve") as process:
        assert "polyjax needs Python 3.12" in process.communicate()[1]
    assert process.returncode == 1


def test_serve_hands_over_its_process_and_flags(checkout: Path) -> None:
    write_program(
        checkout.parent / "bin/python3.12",
        f'if [ "$1" = -c ]; then exec {sys.executable} "$@"; fi',
    )
    # What find_python names is the real interpreter; the installation is stood in for.
    (checkout / "scripts/_environment.py").write_text("")
    write_program(checkout / ".venv/bin/python", 'echo $$ "$@"; exec sleep 60')
    (checkout.parent / "bin/sleep").symlink_to(shutil.which("sleep") or "")
    with start(checkout / "scripts/serve", "--port=9000", "two words") as process:
        assert process.stdout
        line = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
    assert line == f"{process.pid} -P -m polyjax.serve --port=9000 two words\n"
    assert process.returncode == -signal.SIGTERM
