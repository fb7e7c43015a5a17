"""Each part imports only what its users must have installed."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

BLOCKED_IMPORTS = """
import importlib, sys
modules, blocked = sys.argv[1].split(), set(sys.argv[2].split())
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ImportError(f"{name} must not be needed here")
sys.meta_path.insert(0, Blocker())
for module in modules:
    importlib.import_module(module)
"""


def import_without(modules: Iterable[str], blocked: Iterable[str]) -> None:
    """Imports `modules` in a fresh process in which the top-level `blocked` cannot be imported."""
    command = [sys.executable, "-c", BLOCKED_IMPORTS, " ".join(modules), " ".join(blocked)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def modules_under(*packages: str) -> list[str]:
    folders = [ROOT.joinpath(*package.split(".")) for package in packages]
    assert all(folder.is_dir() for folder in folders)
    files = [file.relative_to(ROOT) for folder in folders for file in sorted(folder.rglob("*.py"))]
    return [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files]


def canonical(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def with_dependencies(requirements: Iterable[str]) -> set[str]:
    """Canonical names of the distributions that installing `requirements` brings."""
    found: set[tuple[str, str]] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonical(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) not in found:
                found.add((name, extra))
                needs = map(Requirement, importlib.metadata.requires(name) or [])
                waiting += [n for n in needs if not n.marker or n.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


def modules_beyond_core() -> set[str]:
    """Top-level modules installed here that the core dependencies do not bring."""
    core = with_dependencies(PROJECT["dependencies"])
    return {
        module
        for module, distributions in importlib.metadata.packages_distributions().items()
        if not core & set(map(canonical, distributions)) and module not in sys.stdlib_module_names
    } - {"polyjax", "pallas_kernels", "models", "search"}


@pytest.mark.smoke
def test_every_module_imports() -> None:
    import_without(modules_under("polyjax", "pallas_kernels", "models", "search"), blocked=[])


def test_core_needs_only_the_core_dependencies() -> None:
    beyond = modules_beyond_core()
    assert {"tokenizers", "starlette", "pydantic"} <= beyond
    assert not {"jax", "numpy", "orbax"} & beyond
    packages = ["polyjax.core", "pallas_kernels", "models"]
    import_without(["polyjax", *modules_under(*packages)], beyond)


def test_http_processes_need_no_jax() -> None:
    modules = ["polyjax.engine.types", "polyjax.engine.client", *modules_under("polyjax.server")]
    import_without(modules, ["jax", "jaxlib", "flax", "optax", "orbax", "chex"])


def test_scheduling_needs_no_jax() -> None:
    modules = ["polyjax.engine.scheduler", "polyjax.engine.pages"]
    import_without(modules, ["jax", "jaxlib", "flax", "optax", "orbax", "chex"])


def test_a_blocked_import_is_noticed() -> None:
    with pytest.raises(AssertionError, match="jax must not be needed here"):
        import_without(["polyjax.core.reference"], ["jax"])
