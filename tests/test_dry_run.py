"""--dry_run says what weights and cache take, from the config alone."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

from polyjax.dry_run import describe
from polyjax.engine.types import EngineConfig
from polyjax.io.files import open_model

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "tests" / "goldens"


def described(case, **config):
    return describe(EngineConfig(**config), open_model(str(GOLDENS / case)))


def number(text, before):
    return float(text.split(before)[1].split()[0].replace(",", ""))


def test_weights_are_counted_to_the_byte():
    path = GOLDENS / "llama" / "gqa_tied"
    header = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(header[:8], "little")
    tensors = json.loads(header[8 : 8 + length])
    count = sum(math.prod(t["shape"]) for n, t in tensors.items() if n != "__metadata__")
    assert number(described("llama/gqa_tied", dtype="float32"), "weights ") == 4 * count
    assert number(described("llama/gqa_tied", dtype="bfloat16"), "weights ") == 2 * count


def test_two_devices_take_half_the_cache_and_a_latent_takes_its_whole():
    token = "KV cache "
    one, two = (described("llama/mha", tensor_parallel_size=n) for n in (1, 2))
    assert number(one, token) == 2 * number(two, token)
    one, two = (described("deepseek_v3/grouped", tensor_parallel_size=n) for n in (1, 2))
    assert number(one, token) == number(two, token)


def test_windows_bound_what_a_sequence_takes():
    text = described("gemma3/local_global", dtype="float32", max_model_len=256)
    assert "window of 16 tokens" in text and "whole context" in text
    token, sequence = (int(n.replace(",", "")) for n in re.findall(r"KV cache ([\d,]+)", text))
    # One layer keeps 256 tokens, two keep 16; all three are alike.
    assert sequence == token // 3 * (256 + 2 * 16)


def test_the_flag_prints_and_exits():
    command = [sys.executable, "-m", "polyjax.serve", "--dry_run"]
    command.append(f"--model={GOLDENS / 'qwen3_moe' / 'normalized'}")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "weights" in done.stdout
    command[-1] = f"--model={ROOT / 'docs'}"
    assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120).returncode == 1
