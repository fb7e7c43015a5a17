"""Kernels from files: loaded only where that is allowed, checked, and then kernels like others."""

from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from polyjax.compiler import kernel_files
from polyjax.compiler.cache import cache_key
from polyjax.compiler.kernel_files import FileKernel, load_kernel, with_kernel_files
from polyjax.compiler.program import Kind
from polyjax.core.errors import ConfigError, ScheduleError
from polyjax.core.kernel_source import KernelSource, digest_of, kernel_name
from polyjax.core.op import Choice, Ops, Workload
from polyjax.core.ops import RMS_NORM
from polyjax.core.plan import Plan
from tests import tiny_llama
from tests.engine import kernel_texts

X = jnp.arange(8.0).reshape(2, 4)
WEIGHT = jnp.ones(4)


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernel_files, "_allowed", True)
    load_kernel.cache_clear()
    yield
    load_kernel.cache_clear()


def saved(folder: Path, text: str) -> tuple[str, KernelSource]:
    path = folder / f"{digest_of(text)}.py"
    path.write_text(text)
    source = KernelSource(str(path), digest_of(text))
    return kernel_name(source.sha256, "norm"), source


def loaded(folder: Path, text: str) -> FileKernel:
    return load_kernel(*saved(folder, text))


def workload(columns: int = 4) -> Workload:
    return RMS_NORM.workload(jnp.ones((2, columns)), jnp.ones(columns), eps=1e-5)


def test_a_process_that_serves_executes_no_file(tmp_path: Path) -> None:
    mark = tmp_path / "imported"
    name, source = saved(tmp_path, f"open({str(mark)!r}, 'w')\n" + kernel_texts.HEAD)
    with pytest.raises(ConfigError, match="does not load kernel files"):
        load_kernel(name, source)
    assert not mark.exists()


@pytest.mark.usefixtures("allowed")
def test_a_plan_computes_with_it(tmp_path: Path) -> None:
    name, source = saved(tmp_path, kernel_texts.HEAD + kernel_texts.RIGHT)
    choice = Choice(name, (("pieces", 2),))
    catalogue = with_kernel_files({}, ((name, source),))
    ops = Ops({workload().key: choice}, catalogue)
    found = ops(RMS_NORM, X, WEIGHT, eps=1e-5)
    wanted = RMS_NORM.reference(Ops({}, {}), X, WEIGHT, eps=1e-5)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert ops.used == [(workload(), name)]
    assert (list(catalogue), len(catalogue)) == ([name], 1)


@pytest.mark.usefixtures("allowed")
def test_schedules(tmp_path: Path) -> None:
    kernel = loaded(tmp_path, kernel_texts.HEAD + kernel_texts.RIGHT)
    assert [s.to_json()["pieces"] for s in kernel.space(workload())] == [1, 2, 4]
    assert kernel.default(workload()).to_json() == {"pieces": 1}
    kernel.check(workload(), kernel.schedule_type.from_json({"pieces": 4}))
    with pytest.raises(ScheduleError, match="is no schedule of"):
        kernel.check(workload(), kernel.schedule_type.from_json({"pieces": 3}))
    with pytest.raises(ScheduleError, match="supports"):
        kernel.check(workload(6), kernel.default(workload()))
    some = "\ndef schedules(workload):\n    yield {'pieces': 4}\n    yield {'pieces': 2}\n"
    fewer = loaded(tmp_path, kernel_texts.HEAD + kernel_texts.RIGHT + some)
    assert [s.to_json()["pieces"] for s in fewer.space(workload())] == [4, 2]


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no OP"),
        ("OP = 3", "no OP"),
        (kernel_texts.HEAD, "no function build"),
        (kernel_texts.HEAD + kernel_texts.RIGHT + "\nSPACE = [1]", "SPACE is no mapping"),
        (kernel_texts.HEAD + kernel_texts.RIGHT + "\nSPACE = {'a b': (1,)}", "no field name"),
        (kernel_texts.HEAD + kernel_texts.RIGHT + "\nSPACE = {'a': ()}", "a needs a tuple"),
        (kernel_texts.HEAD + kernel_texts.RIGHT + "\nSPACE = {'a': (jnp,)}", "must be numbers"),
        (kernel_texts.HEAD + kernel_texts.PALLAS + "\nschedules = 1", "needs SPACE"),
    ],
)
def test_files_that_are_no_kernels(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        loaded(tmp_path, text)


@pytest.mark.usefixtures("allowed")
def test_a_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    name, source = saved(tmp_path, kernel_texts.HEAD + kernel_texts.RIGHT)
    Path(source.path).write_text("other")
    with pytest.raises(ConfigError, match="has changed"):
        load_kernel(name, source)


def test_the_text_is_part_of_a_programs_cache_key(tmp_path: Path) -> None:
    request = tiny_llama.request(Kind.READ_SCRATCH)
    mesh = request.plan.mesh.mesh()
    keys = set()
    for text in ("one", "two"):
        plan = Plan(sources=(saved(tmp_path, text),))
        keys.add(cache_key(type(request)(request.spec, plan, request.key), mesh))
    assert len(keys) == 2
