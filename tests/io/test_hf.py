"""Model directories: what is read from which file, and one error for all defects of a directory."""

import json
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from polyjax.core.errors import ConfigError, ModelError
from polyjax.io.files import ModelFiles, open_model
from tests.goldens import ROOT, golden_cases


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A writable copy of a sharded tiny model."""
    return Path(shutil.copytree(ROOT / "llama" / "sharded", tmp_path / "model"))


def write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("family, case", golden_cases())
def test_every_golden_directory_opens(family: str, case: str) -> None:
    files = open_model(ROOT / family / case)
    assert files.name == case
    assert files.config["vocab_size"] == 264
    assert files.eos_token_ids == (257,)
    assert files.chat_template is not None and "<|turn|>" in files.chat_template
    embedding = files.tensors.read("model.embed_tokens.weight")
    assert embedding.shape == (264, files.config["hidden_size"])
    tokenizer = files.load_tokenizer()
    assert tokenizer.encode("Aé") == [65, 0xC3, 0xA9]
    assert tokenizer.bos_token_id == 256 and tokenizer.vocab_size == 260
    assert not any("vision" in name or ".layers.9." in name for name in files.tensors.names())


def test_shards_read_like_one_file(model_dir: Path) -> None:
    tensors = open_model(model_dir).tensors
    whole: dict[str, np.ndarray] = {}
    for shard in model_dir.glob("*.safetensors"):
        whole |= safetensors.numpy.load_file(shard)
    assert sorted(tensors.names()) == sorted(whole)
    for name, array in whole.items():
        np.testing.assert_array_equal(tensors.read(name).view(np.uint16), array.view(np.uint16))


def test_nested_text_config_comes_to_the_top() -> None:
    config = open_model(ROOT / "kimi_k2" / "k25_text").config
    assert config["architectures"] == ["KimiK25ForConditionalGeneration"]
    assert config["kv_lora_rank"] == 20 and config["model_type"] == "kimi_k2"


def test_null_of_a_nested_config_hides_nothing_outside(model_dir: Path) -> None:
    text = {"hidden_size": 32, "eos_token_id": None, "sliding_window": None}
    outer = {"architectures": ["A"], "eos_token_id": 5, "hidden_size": 99, "text_config": text}
    write_json(model_dir / "config.json", outer)
    config = open_model(model_dir).config
    assert (config["eos_token_id"], config["hidden_size"]) == (5, 32)
    assert config["sliding_window"] is None


def test_missing_shard_and_missing_tensor_are_listed_together(model_dir: Path) -> None:
    index_path = model_dir / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"]["model.ghost.weight"] = "model-00001-of-00002.safetensors"
    index["weight_map"]["model.other.weight"] = "../elsewhere.safetensors"
    write_json(index_path, index)
    (model_dir / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError) as caught:
        _ = open_model(model_dir).tensors
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 3
    assert "model-00002-of-00002.safetensors is missing" in text
    assert "model.ghost.weight is missing" in text
    assert "not a plain file name" in text


def test_truncated_shard_is_named(model_dir: Path) -> None:
    shard = model_dir / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ModelError, match="model-00002-of-00002"):
        _ = open_model(model_dir).tensors


@pytest.mark.parametrize("content", ["{", "[]", b"\xff\xfe{}", '"text"'])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_bad_json_names_its_file(model_dir: Path, name: str, content: str | bytes) -> None:
    (model_dir / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ModelError, match=name):
        open_model(model_dir)


def test_bad_index_names_itself(model_dir: Path) -> None:
    write_json(model_dir / "model.safetensors.index.json", {"metadata": {}})
    with pytest.raises(ModelError, match="no weight_map"):
        _ = open_model(model_dir).tensors


def test_no_config(model_dir: Path) -> None:
    (model_dir / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        open_model(model_dir)


def test_no_weights_says_what_is_there_instead(model_dir: Path) -> None:
    for path in model_dir.glob("model*"):
        path.unlink()
    (model_dir / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*safetensors"):
        _ = open_model(model_dir).tensors


def test_no_tokenizer_still_opens_but_says_so_when_asked(model_dir: Path) -> None:
    (model_dir / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        open_model(model_dir).load_tokenizer()


@pytest.mark.parametrize("content", [b"{}", b"\xff", b'{"model": {"type": "Nonsense"}}'])
def test_bad_tokenizer(model_dir: Path, content: bytes) -> None:
    (model_dir / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        open_model(model_dir).load_tokenizer()


def templates(model_dir: Path, inline: object, jinja: str | None = None) -> ModelFiles:
    (model_dir / "chat_template.jinja").unlink()
    if jinja is not None:
        (model_dir / "chat_template.jinja").write_text(jinja)
    write_json(model_dir / "tokenizer_config.json", {"chat_template": inline})
    return open_model(model_dir)


def test_chat_template_sources(model_dir: Path) -> None:
    assert templates(model_dir, "inline").chat_template == "inline"
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    (model_dir / "chat_template.jinja").touch()
    assert templates(model_dir, named).chat_templates == {"default": "d", "tool_use": "t"}
    (model_dir / "chat_template.jinja").touch()
    assert templates(model_dir, "inline", jinja="file wins").chat_template == "file wins"
    assert templates(model_dir, None).chat_template is None


@pytest.mark.parametrize("inline", [3, [{"name": "default"}], ["text"]])
def test_bad_inline_chat_template(model_dir: Path, inline: object) -> None:
    with pytest.raises(ModelError, match="chat_template is neither"):
        templates(model_dir, inline)


def test_chat_template_that_is_not_utf8(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="UTF-8"):
        open_model(model_dir)


def test_special_tokens_from_either_file(model_dir: Path) -> None:
    spelled_out = {"content": "<|turn|>", "lstrip": False}
    write_json(model_dir / "special_tokens_map.json", {"eos_token": spelled_out})
    write_json(model_dir / "tokenizer_config.json", {"bos_token": "<|begin|>"})
    tokenizer = open_model(model_dir).load_tokenizer()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 258)


def test_generation_config_decides_what_ends_a_text(model_dir: Path) -> None:
    write_json(model_dir / "generation_config.json", {"eos_token_id": [257, 258]})
    assert open_model(model_dir).eos_token_ids == (257, 258)
    write_json(model_dir / "generation_config.json", {"eos_token_id": "</s>"})
    with pytest.raises(ModelError, match="eos_token_id is '</s>'"):
        _ = open_model(model_dir).eos_token_ids
    (model_dir / "generation_config.json").unlink()
    assert open_model(model_dir).eos_token_ids == (257,)


@pytest.mark.parametrize("quantization", [{"quant_method": "gptq"}, {"quant_method": "fp8"}])
def test_quantization_that_cannot_be_read_is_named(
    model_dir: Path, quantization: dict[str, str]
) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    write_json(model_dir / "config.json", {**config, "quantization_config": quantization})
    with pytest.raises(ModelError, match=rf"{quantization['quant_method']}.* cannot be read"):
        _ = open_model(model_dir).tensors


# The hub


def hub(monkeypatch: pytest.MonkeyPatch, download: object) -> None:
    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_hub_id_opens_the_snapshot(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(model_dir)

    hub(monkeypatch, download)
    files = open_model("owner/a-model")
    assert files.name == "owner/a-model" and files.path == model_dir
    assert asked[0][0] == "owner/a-model" and "*.safetensors" in asked[0][1]


def test_hub_failure_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, allow_patterns: list[str]) -> str:
        raise RuntimeError("401 Client Error\nmore lines")

    hub(monkeypatch, download)
    with pytest.raises(ConfigError, match=r"401 Client Error.*HF_TOKEN"):
        open_model("owner/a-model")


def test_hub_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="pip install huggingface_hub"):
        open_model("owner/a-model")


def test_real_hub_library_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own cache layout, offline: a snapshot is found, anything else is not."""
    import huggingface_hub.constants

    snapshot = tmp_path / "models--owner--tiny" / "snapshots" / "abc"
    shutil.copytree(ROOT / "llama" / "gqa", snapshot)
    refs = tmp_path / "models--owner--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert open_model("owner/tiny").config["hidden_size"] == 32
    with pytest.raises(ConfigError, match="owner/other"):
        open_model("owner/other")


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "a/b/c", "/no/such", "https://x.y/z"])
def test_name_of_nothing(name: str) -> None:
    with pytest.raises(ConfigError, match="smollm2-135m-instruct"):
        open_model(name)
