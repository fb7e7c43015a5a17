"""docs/adding_a_kernel.md keeps its promise: its file is a kernel that passes every gate."""

import dataclasses
import re
from pathlib import Path

import pytest

from polyjax.compiler import kernel_files
from polyjax.compiler.program import Kind, trace_program
from polyjax.core.buckets import Bucket
from polyjax.core.kernel_source import KernelSource, digest_of, kernel_name
from polyjax.core.plan import Plan
from polyjax.gates.file_trial import FileTrial, judge
from tests import tiny_llama

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding_a_kernel.md"


def test_the_example_passes_the_gates_and_a_program_is_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [text] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.setattr(kernel_files, "_allowed", True)
    request = tiny_llama.request(Kind.DECODE_GREEDY, Bucket(1, 4, 4))
    source = KernelSource(str(tmp_path / f"{digest_of(text)}.py"), digest_of(text))
    name = kernel_name(source.sha256, "norm")
    said = []
    judge(
        FileTrial(name, text, source, "rms_norm", (request,), seed=1),
        lambda **fields: said.append(fields),
    )
    assert "choices" in said[-1], said[-1]
    [choice] = said[-1]["choices"].values()
    assert choice == {"kernel": name, "schedule": {"rows": 4}}
    data = Plan().to_json() | {
        "choices": said[-1]["choices"],
        "sources": {name: source.to_json()},
    }
    plan = Plan.from_json(data)
    traced, ops = trace_program(dataclasses.replace(request, plan=plan), plan.mesh.mesh())
    assert name in {used for _, used in ops.used}
    assert "rsqrt" in traced.lower().as_text()
