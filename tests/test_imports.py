"""Imports point one way."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("polyjax", "pallas_kernels", "models", "search")

# A part may import the layers before its own; parts of one layer do not import each other.
LAYERS = (
    ("polyjax.core",),
    ("pallas_kernels", "models", "polyjax.io", "polyjax.evaluation"),
    ("polyjax.compiler",),
    ("polyjax.gates",),
    ("polyjax.engine",),
    ("search", "polyjax.server"),
    ("polyjax",),  # entry points and public names: whatever no layer above names
)
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
# HTTP processes run without jax, so of the engine they see only this.
ENGINE_OF_SERVER = ("polyjax.engine.types", "polyjax.engine.client")


def is_within(module: str, parents: tuple[str, ...]) -> bool:
    return any(f"{module}.".startswith(f"{parent}.") for parent in parents)


def part_of(module: str) -> str | None:
    """The part a module belongs to; None if it is not of this project."""
    return next((part for part in RANK if is_within(module, (part,))), None)


def violation(importer: str, imported: str) -> str | None:
    """Why one module may not import the other; None if it may."""
    upper, lower = part_of(importer), part_of(imported)
    if upper is None or lower is None or upper == lower:
        return None
    if RANK[lower] >= RANK[upper]:
        return f"{lower} is not below {upper}"
    to_engine = (upper, lower) == ("polyjax.server", "polyjax.engine")
    if to_engine and not is_within(imported, ENGINE_OF_SERVER):
        return f"of the engine, the server may import only {' and '.join(ENGINE_OF_SERVER)}"
    return None


def imports_of(file: Path) -> Iterator[tuple[int, str]]:
    """Line and module of each import statement, those inside functions included."""
    package = file.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            origin = [*base, node.module] if node.module else [*base]
            # Whether the name imported is a module or something in one, its part is the same.
            yield from ((node.lineno, ".".join([*origin, alias.name])) for alias in node.names)


def test_imports_point_one_way() -> None:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    assert files
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {imported}: {reason}"
        for file in files
        for line, imported in imports_of(file)
        if (reason := violation(".".join(file.relative_to(ROOT).with_suffix("").parts), imported))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("polyjax.engine.engine", "polyjax.core.plan.Plan", True),
        ("polyjax.core.plan", "polyjax.engine.types", False),
        ("models.llama", "polyjax.io.gguf", False),
        ("models.llama", "models.blocks", True),
        ("polyjax.server.app", "polyjax.engine.types.Request", True),
        ("polyjax.server.app", "polyjax.engine.engine", False),
        ("polyjax.engine.engine", "search.ledger", False),
        ("polyjax.serve", "search.ledger", True),
        ("polyjax.core.op", "polyjax.LLM", False),
        ("polyjax.core.op", "jax.numpy", True),
    ],
)
def test_layering_rule(importer: str, imported: str, allowed: bool) -> None:
    assert (violation(importer, imported) is None) == allowed
