"""docs/structures.md lists every module as it is."""

import importlib.machinery
import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def script(name):
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_the_list_of_modules_is_current():
    page = (ROOT / "docs" / "structures.md").read_text()
    assert script("structures").rewritten(page) == page, "run scripts/structures and commit"


def test_every_file_the_prose_names_exists():
    page = (ROOT / "docs" / "structures.md").read_text()
    prose = page.partition("<!-- modules")[0]
    for name in re.findall(r"`([\w/]+\.py)`", prose):
        candidates = [ROOT / name, ROOT / "polyjax" / name]
        assert any(path.exists() for path in candidates), name
