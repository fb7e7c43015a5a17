"""What scripts/check_clients makes of what client programs say."""

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = """# Clients

<!-- written by scripts/check_clients -->
| client | version | passed | date |
|---|---|---|---|
| lm-eval | 0.1 | everything | 2020-01-01 |
<!-- end -->

The rest.
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = str(ROOT / "scripts" / "check_clients")
    loader = importlib.machinery.SourceFileLoader("check_clients_under_test", path)
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module


def test_outcomes(script: ModuleType) -> None:
    said = "version openai 3.57.0\nnoise\npass models\nFAIL chat: AssertionError: no Paris\n"
    outcome = script.read_outcome("openai", said, 1)
    assert outcome.version == "3.57.0"
    assert (outcome.passed, outcome.failed) == (("models",), ("chat: AssertionError: no Paris",))
    for said, code in (("", 0), ("version x 1\npass models\n", -9)):  # silent, or killed half-way
        assert script.read_outcome("x", said, code).failed == (f"ended with {code}",)


def test_rows_of_other_clients_stay(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "clients.md"
    page.write_text(PAGE)
    monkeypatch.setattr(script, "PAGE", page)
    for version in ("1", "2"):
        script.write_page([script.Outcome("openai", version, ("models",), ("chat: a | b",))])
    lines = page.read_text().splitlines()
    assert lines[5].startswith("| openai | 2 | models; **failed:** chat: a / b | ")
    assert lines[6] == "| lm-eval | 0.1 | everything | 2020-01-01 |"
    assert lines[7:] == PAGE.splitlines()[6:]


def test_every_client_has_its_program(script: ModuleType) -> None:
    for client in script.CLIENTS.values():
        assert (script.PROGRAMS / client.program).is_file()


def test_a_failed_check_fails_the_program(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts' / '_clients')!r})\n"
        "from report import Checks\n"
        "checks = Checks('x', '1')\n"
        "checks.run('bad')(lambda: 1 / 0)\n"
        "checks.run('good')(lambda: None)\n"
        "checks.finish()\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == (
        "version x 1\nFAIL bad: ZeroDivisionError: division by zero\npass good\n"
    )
