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

# The plainest code paths: they run in float64 too.
FLOAT32 = {
    "dtype": torch.float32,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
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
    model = transformers.AutoModelForCausalLM.from_config(config, **FLOAT32).eval()
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
    model.to(getattr(torch, case.dtype)).save_pretrained(
        path, max_shard_size="40KB" if case.store == "sharded" else "1GB"
    )
    model.float()
    rewrite = {"legacy": _make_legacy, "nested": _make_nested, "fp8": _make_fp8}.get(case.store)
    if rewrite:
        config = json.loads((path / "config.json").read_text())
        tensors = safetensors.torch.load_file(path / "model.safetensors")
        config, tensors = rewrite(case, config, {**tensors, **fp8_tensors})
        (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        safetensors.torch.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
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


def _make_legacy(case, config, tensors):
    """config.json with the keys of transformers 4 and of the models' authors, as on most hubs."""
    config["torch_dtype"] = config.pop("dtype")
    rope = config.pop("rope_parameters")
    if case.family == "gemma3":
        config["rope_theta"] = rope["full_attention"]["rope_theta"]
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        config["rope_scaling"] = None
        del config["layer_types"], config["_sliding_window_pattern"]
        config["sliding_window_pattern"] = 2  # every second layer is global
        return config, tensors
    config["rope_theta"] = rope.pop("rope_theta")
    partial = rope.pop("partial_rotary_factor", None)
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    config.pop("layer_types", None)  # follows from max_window_layers
    if case.family == "llama":
        del config["head_dim"]  # follows from hidden_size
    if case.family == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    if case.family == "kimi_k2":
        _make_deepseek_legacy(config)
    if case.family == "minimax_m2":
        config["rotary_dim"] = round(partial * config["head_dim"])
        config |= {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True}
        config |= {"qk_norm_type": "per_layer", "shared_intermediate_size": 0}
        config["attn_type_list"] = [1] * config["num_hidden_layers"]
    return config, tensors


def _make_deepseek_legacy(config):
    config["model_type"] = "kimi_k2"
    config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")
    config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    for derived in ("qk_head_dim", "head_dim", "rope_interleave"):
        del config[derived]


def _make_nested(case, config, tensors):
    """The directory of a model that also sees: nested config, prefixed names, other tensors."""
    text = {**config, "model_type": "kimi_k2"}
    outer = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": text.pop("dtype"),
        "text_config": text,
        "vision_config": {"hidden_size": 8, "num_hidden_layers": 1},
    }
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    tensors["vision_tower.patch_embed.proj.weight"] = torch.ones(8, 3, 2, 2)
    return outer, tensors


def _make_fp8(case, config, tensors):
    """Block-scaled weights and one layer that predicts a further token, as DeepSeek has it."""
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(FP8_BLOCK),
    }
    hidden, extra = config["hidden_size"], config["num_hidden_layers"]
    tensors[f"model.layers.{extra}.enorm.weight"] = torch.ones(hidden)
    tensors[f"model.layers.{extra}.eh_proj.weight"] = torch.ones(hidden, 2 * hidden)
    return config, tensors


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
        rounded = transformers.AutoModelForCausalLM.from_pretrained(scratch, **FLOAT32)
    return rounded.eval(), stored


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
