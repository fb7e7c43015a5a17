"""Builds and writes the tiny checkpoints. Imported by scripts/make_goldens only: needs torch."""

import json
import math
import tempfile
from pathlib import Path

import safetensors.torch
import tokenizers
import torch
import transformers

from tests.goldens.cases import BASE

SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|turn|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
FP8_BLOCK = (16, 16)  # the real one is 128 x 128; small, so that a tiny weight has several blocks


def build(case, seed):
    """Returns the case's model in float32, every parameter random: norms and biases too.

    save_pretrained's own initialization has all norms 1 and all biases 0, which would hide a model
    that leaves them out.
    """
    config = getattr(transformers, case.config_class)(**{**BASE, **case.changes})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *_float_buffers(model)]:
            value.copy_(_random(name, value, generator, case).to(torch.bfloat16))
    return model


def _float_buffers(model):
    """Buffers that a checkpoint stores (the routers' score corrections); not the rotary tables."""
    stored = model.state_dict()
    return [(name, value) for name, value in model.named_buffers() if name in stored]


def _random(name, value, generator, case):
    noise = torch.randn(value.shape, generator=generator)
    if "norm" in name:
        return 0.2 * noise + (0.0 if case.family == "gemma3" else 1.0)  # Gemma adds the 1 itself
    if value.ndim == 1:
        return 0.2 * noise
    if "embed_tokens" in name:
        return noise / (math.sqrt(value.shape[-1]) if case.family == "gemma3" else 1.0)
    # Somewhat above 1/sqrt(fan-in): attention that is far from uniform, logits that are far apart.
    return 1.5 * noise / math.sqrt(value.shape[-1])


def write(case, model, path: Path, fp8_tensors):
    """Writes a whole model directory as `case.store` says."""
    stored = model.to(getattr(torch, case.dtype))
    stored.save_pretrained(path, max_shard_size="40KB" if case.store == "sharded" else "1GB")
    model.float()
    if case.store == "legacy":
        _make_config_legacy(path / "config.json")
    if case.store == "fp8":
        _overlay_fp8(path, fp8_tensors)
    _tokenizer().save(str(path / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _tokenizer():
    """Byte-level BPE without merges: token i is byte i, then the special tokens."""
    alphabet = _byte_alphabet()
    model = tokenizers.models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    )
    return tokenizer


def _byte_alphabet():
    """The character that stands for each byte in byte-level BPE, in byte order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(moved)) for byte in range(256)]


def _make_config_legacy(path: Path):
    """Rewrites config.json with the keys that transformers 4 wrote; most checkpoints have these."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    if config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]:
        del config["head_dim"]
    path.write_text(json.dumps(config, indent=2) + "\n")


def with_fp8_weights(model):
    """Returns the model rounded to block-scaled float8, and the stored form of each such tensor."""
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        file = Path(scratch) / "model.safetensors"
        tensors = safetensors.torch.load_file(file)
        stored = {}
        for name in filter(is_quantized, list(tensors)):
            weight, scales = to_fp8(tensors[name])
            stored[name], stored[f"{name}_scale_inv"] = weight, scales
            tensors[name] = from_fp8(weight, scales)
        safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
        rounded = transformers.AutoModelForCausalLM.from_pretrained(
            scratch, dtype=torch.float32, attn_implementation="eager"
        )
    return rounded.eval(), stored


def _overlay_fp8(path: Path, stored):
    """Puts float8 weights and their scales into a saved directory."""
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    tensors.update(stored)
    safetensors.torch.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(FP8_BLOCK),
    }
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def is_quantized(name):
    """DeepSeek-V3 keeps embedding, head, norms and router in higher precision."""
    return name.endswith(("_proj.weight", ".kv_a_proj_with_mqa.weight"))


def to_fp8(weight):
    """Returns (float8 weight, float32 scales); a block's largest value becomes float8's largest."""
    rows, cols = weight.shape
    tall, wide = -(-rows // FP8_BLOCK[0]), -(-cols // FP8_BLOCK[1])
    padded = torch.zeros(tall * FP8_BLOCK[0], wide * FP8_BLOCK[1])
    padded[:rows, :cols] = weight
    blocks = padded.view(tall, FP8_BLOCK[0], wide, FP8_BLOCK[1])
    scales = blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    scaled = (blocks / scales[:, None, :, None]).view(padded.shape)[:rows, :cols]
    return scaled.to(torch.float8_e4m3fn).contiguous(), scales


def from_fp8(weight, scales):
    """Returns the float32 weight that `to_fp8`'s results stand for."""
    spread = scales.repeat_interleave(FP8_BLOCK[0], 0).repeat_interleave(FP8_BLOCK[1], 1)
    return weight.float() * spread[: weight.shape[0], : weight.shape[1]]
