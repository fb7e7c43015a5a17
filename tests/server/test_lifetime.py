"""A child ends with its parent, whichever way it is told."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.server.serving import ROOT, wait_for

CHILD = """
import time
from polyjax.core.lifetime import kill_when_parent_ends, parent_pipe, watch_parent
{watch}
print("watching", flush=True)
time.sleep(60)
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE)
print(child.pid, flush=True)
time.sleep(60)
"""
BY_PIPE = "watch_parent(parent_pipe(), on_orphaned=lambda: open({mark!r}, 'w').close())"


def run_family(watch: str) -> tuple["subprocess.Popen[str]", psutil.Process]:
    child = CHILD.format(watch=watch)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, child], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert parent.stdout.readline() == "watching\n"
    return parent, psutil.Process(pid)


def test_by_the_pipe(tmp_path: Path) -> None:
    mark = tmp_path / "cleaned"
    parent, child = run_family(BY_PIPE.format(mark=str(mark)))
    with parent:
        parent.kill()
        child.wait(10)
        wait_for(mark.exists, "the clean-up to have run")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills by the parent's end")
def test_by_the_kernel() -> None:
    parent, child = run_family("kill_when_parent_ends()")
    with parent:
        parent.kill()
        child.wait(10)


def test_a_child_that_watches_nothing_stays() -> None:
    """What the two tests above would see, were it not for what they test."""
    parent, child = run_family("")
    with parent:
        parent.kill()
        with pytest.raises(psutil.TimeoutExpired):
            child.wait(0.5)
        child.kill()
