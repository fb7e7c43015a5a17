"""Makes the virtual environment that scripts/serve and scripts/test run in.

    python3.12 scripts/_environment.py serve|test

Installs the pinned requirements for this machine's accelerator and polyjax itself, editable. Does
nothing when that was done before with the same pins. Standard library only: it runs first.

POLYJAX_ACCELERATOR (cpu, cuda12, cuda13, tpu) overrides what is detected; POLYJAX_VENV puts the
environment elsewhere than .venv.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
ACCELERATORS = ("cpu", "cuda12", "cuda13", "tpu")
# Oldest NVIDIA driver branch for each CUDA major version, from NVIDIA's compatibility tables.
OLDEST_DRIVER = {"cuda13": 580, "cuda12": 525}


def say(message: str) -> None:
    print(f"polyjax: {message}", file=sys.stderr, flush=True)


def detect_accelerator() -> str:
    """One of ACCELERATORS. Exits if the one asked for is unknown or the driver is too old."""
    if forced := os.environ.get("POLYJAX_ACCELERATOR"):
        if forced not in ACCELERATORS:
            sys.exit(f"POLYJAX_ACCELERATOR={forced}: must be one of {', '.join(ACCELERATORS)}")
        return forced
    if not shutil.which("nvidia-smi"):
        return "cpu"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    major = answer.stdout.strip().partition(".")[0]
    if answer.returncode != 0 or not major.isdigit():
        say("nvidia-smi finds no usable GPU, so jax for the CPU it is")
        return "cpu"
    for accelerator, oldest in OLDEST_DRIVER.items():
        if int(major) >= oldest:
            return accelerator
    sys.exit(
        f"The NVIDIA driver {answer.stdout.split()[0]} is older than {OLDEST_DRIVER['cuda12']}, "
        "the oldest that jax supports. Update it, or set POLYJAX_ACCELERATOR=cpu."
    )


def requirement_files(group: str, accelerator: str) -> list[Path]:
    names = ["serve" if accelerator == "cpu" else accelerator]
    if group == "test":
        names.append("test")
    return [REQUIREMENTS / f"{name}.txt" for name in names]


def fingerprint(group: str, accelerator: str) -> str:
    """Changes when anything does that the installed environment depends on."""
    digest = hashlib.sha256(f"{group} {accelerator} {sys.version} {ROOT}".encode())
    for file in [*sorted(REQUIREMENTS.glob("*.txt")), ROOT / "pyproject.toml"]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def exclusive(lock_file: Path) -> Iterator[None]:
    """One installer at a time; the lock goes with its process, however that ends."""
    with lock_file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another installation into this environment")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def usable(venv: Path) -> bool:
    check = "import pip, sys; sys.exit(sys.version_info[:2] != (3, 12))"
    python = venv / "bin/python"
    return python.exists() and subprocess.run([python, "-c", check], check=False).returncode == 0


def install(venv: Path, group: str, accelerator: str) -> None:
    """Fills `venv`, from nothing if it is broken or an earlier installation did not finish."""
    unfinished = venv.with_name(venv.name + ".unfinished")
    if unfinished.exists() or not usable(venv):
        if importlib.util.find_spec("ensurepip") is None:
            sys.exit(f"{sys.executable} cannot make environments: apt install python3.12-venv")
        unfinished.touch()
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
    unfinished.touch()
    pip = [str(venv / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check"]
    if any(venv.glob("installed-*")):
        pip.append("--quiet")  # an update: most packages are there, and pip would say so of each
    files = [f"--requirement={file}" for file in requirement_files(group, accelerator)]
    subprocess.run([*pip, "--require-hashes", *files], check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--editable", ROOT], check=True)
    unfinished.unlink()


def prepare(venv: Path, group: str) -> None:
    """Makes `venv` fit for `group`; returns at once if it is."""
    accelerator = detect_accelerator()
    stamps = {name: venv / f"installed-{name}" for name in ("serve", "test")}

    def current() -> bool:
        stamp = stamps[group]
        return stamp.exists() and stamp.read_text() == fingerprint(group, accelerator)

    if current():
        return
    venv.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(venv.with_name(venv.name + ".lock")):
        if current():  # the installer that we waited for did it
            return
        say(f"installing what {group} needs for {accelerator} into {venv} (this once)")
        started = time.monotonic()
        install(venv, group, accelerator)
        for name in ("serve", "test") if group == "test" else ("serve",):
            draft = venv / f"installed-{name}.draft"
            draft.write_text(fingerprint(name, accelerator))
            draft.replace(stamps[name])
        say(f"installed in {time.monotonic() - started:.0f} s")


def main() -> None:
    if sys.argv[1:] not in (["serve"], ["test"]):
        sys.exit(__doc__)
    venv = Path(os.environ.get("POLYJAX_VENV") or ROOT / ".venv").absolute()
    try:
        prepare(venv, sys.argv[1])
    except subprocess.CalledProcessError as error:
        sys.exit(f"polyjax: this step failed, see above: {' '.join(map(str, error.cmd))}")
    except KeyboardInterrupt:
        sys.exit("polyjax: interrupted; the next run installs from the start")


if __name__ == "__main__":
    main()
