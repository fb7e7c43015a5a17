"""GGUF files: Hugging Face names, shapes and values out of them, and every kind of damage."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from polyjax.core.errors import ModelError
from polyjax.io.files import open_model
from polyjax.io.gguf import read_gguf
from polyjax.io.gguf_model import llama3_rope_factors
from tests.io.tiny_gguf import llama_tensors, permute, write_gguf


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


def test_llama_config_and_tensors(path: Path) -> None:
    files = open_model(write_gguf(path, "llama", llama_tensors()))
    config = files.config
    assert files.name == "tiny"
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    assert (config["head_dim"], config["vocab_size"], config["rope_theta"]) == (8, 7, 5000.0)
    assert config["rms_norm_eps"] == 1e-5 and config["tie_word_embeddings"] is False
    names = files.tensors.names()
    assert "model.layers.0.self_attn.q_proj.weight" in names and "lm_head.weight" in names
    assert len(names) == len(llama_tensors())
    for name in names:
        assert files.tensors.read(name).shape == files.tensors.shape(name)
        assert files.tensors.dtype(name) == files.tensors.read(name).dtype == np.float32


def test_query_and_key_rows_come_back_in_half_rotation_order(path: Path) -> None:
    rows = np.arange(32 * 32, dtype=np.float32).reshape(32, 32)
    tensors = {**llama_tensors(), "blk.0.attn_q.weight": permute(rows, 4)}
    read = open_model(write_gguf(path, "llama", tensors)).tensors.read
    np.testing.assert_array_equal(read("model.layers.0.self_attn.q_proj.weight"), rows)
    np.testing.assert_array_equal(
        permute(read("model.layers.0.self_attn.k_proj.weight"), 2),
        tensors["blk.0.attn_k.weight"],
    )


def test_tied_when_no_output_is_stored(path: Path) -> None:
    tensors = llama_tensors()
    del tensors["output.weight"]
    files = open_model(write_gguf(path, "llama", tensors))
    assert files.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in files.tensors.names()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_quantized_tensors_read_as_the_gguf_package_dequantizes(path: Path, kind: str) -> None:
    code = gguf.GGMLQuantizationType[kind]
    tensors = llama_tensors()
    name = "blk.0.ffn_gate.weight"
    read = open_model(write_gguf(path, "llama", tensors, quantize={name: code})).tensors.read
    expected = gguf.dequantize(gguf.quantize(tensors[name], code), code)
    np.testing.assert_array_equal(read("model.layers.0.mlp.gate_proj.weight"), expected)


def test_llama3_rope_factors_become_rope_scaling(path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors = llama3_rope_factors(scaling, 4, 500000.0).astype(np.float32)
    tensors = {**llama_tensors(), "rope_freqs.weight": factors}
    theta = {"rope.freq_base": 500000.0}
    files = open_model(write_gguf(path, "llama", tensors, metadata=theta))
    assert files.config["rope_scaling"] == scaling
    assert "rope_freqs.weight" not in files.tensors.names()
    path.unlink()
    tensors["rope_freqs.weight"] = factors[::-1].copy()
    with pytest.raises(ModelError, match="not Llama 3's scaling"):
        open_model(write_gguf(path, "llama", tensors, metadata=theta))


def test_gemma_norms_lose_the_one_that_gguf_adds(path: Path) -> None:
    tensors = llama_tensors()
    del tensors["output.weight"]
    for part in ("post_attention_norm", "post_ffw_norm"):
        tensors[f"blk.0.{part}.weight"] = tensors["blk.0.attn_norm.weight"]
    metadata = {"attention.sliding_window": 16, "attention.key_length": 8}
    files = open_model(write_gguf(path, "gemma3", tensors, metadata=metadata))
    read = files.tensors.read
    for name, stored in [
        ("model.norm.weight", "output_norm.weight"),
        ("model.layers.0.pre_feedforward_layernorm.weight", "blk.0.ffn_norm.weight"),
        ("model.layers.0.post_attention_layernorm.weight", "blk.0.post_attention_norm.weight"),
    ]:
        np.testing.assert_array_equal(read(name), tensors[stored] - 1)
    np.testing.assert_array_equal(  # not permuted either
        read("model.layers.0.self_attn.q_proj.weight"), tensors["blk.0.attn_q.weight"]
    )
    assert files.config["sliding_window"] == 16
    assert files.config["layer_types"] == ["sliding_attention"]


def test_every_missing_key_is_listed(path: Path) -> None:
    write_gguf(path, "llama", llama_tensors(), without=("block_count", "attention.head_count"))
    with pytest.raises(ModelError) as caught:
        open_model(path)
    assert len(caught.value.problems) == 2


def test_unknown_architecture_names_the_known(path: Path) -> None:
    with pytest.raises(ModelError, match=r"'mamba' cannot be read .*llama.*safetensors"):
        open_model(write_gguf(path, "mamba", llama_tensors()))


def test_every_unknown_tensor_is_listed(path: Path) -> None:
    odd = {f"blk.0.odd_{i}.weight": np.zeros(4, np.float32) for i in range(3)}
    files = open_model(write_gguf(path, "llama", {**llama_tensors(), **odd}))
    with pytest.raises(ModelError) as caught:
        _ = files.tensors
    assert len(caught.value.problems) == 3


def test_unknown_tensor_name_is_a_key_error(path: Path) -> None:
    tensors = open_model(write_gguf(path, "llama", llama_tensors())).tensors
    for method in (tensors.shape, tensors.dtype, tensors.read):
        with pytest.raises(KeyError):
            method("model.nothing.weight")


def test_file_cut_off_anywhere_is_refused(path: Path) -> None:
    """Every length shorter than the whole, in steps that are no multiple of any alignment."""
    whole = write_gguf(path, "llama", llama_tensors()).read_bytes()
    for length in range(0, len(whole) - 1, 397):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"tiny\.gguf"):
            read_gguf(path)


@pytest.mark.parametrize(
    "content, complaint",
    [
        (b"PK\x03\x04" + b"\0" * 60, "does not start with GGUF"),
        (b"GGUF" + struct.pack("<I", 1) + b"\0" * 60, "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + b"\0" * 60, "little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60) + b"\0" * 60, "cut off|unpack|requires"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60) + b"\0" * 60, "cut off"),
        (b"GGUF" + struct.pack("<IQQQ2sI", 3, 0, 1, 2, b"\xff\xfe", 4) + b"\0" * 60, "utf-8"),
    ],
)
def test_malformed_header(path: Path, content: bytes, complaint: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ModelError, match=complaint):
        read_gguf(path)
