"""Loads golden checkpoints and what `transformers` computes on them; README.md has the format."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Golden:
    """One checkpoint directory (`path`) and its expectations, all computed in float32.

    Rows are independent prompts. `tokens` [rows, S] int32: each row's prompt, then its greedy
    continuation, then padding with 0. `prompt_lens` and `lens` [rows] int32: tokens of the prompt,
    and with the continuation. `logit_positions` [P]: positions of row 0 whose logits are
    `logits` [P,V]. `prompt_logits` [rows,V]: at each prompt's last position. `margins` [rows, G]:
    how far each greedy token's logit leads the second best. `oracle_error`: largest difference of
    any logit between float32 and float64, the rounding error of the oracle itself.
    """

    path: Path
    tokens: np.ndarray
    prompt_lens: np.ndarray
    lens: np.ndarray
    logit_positions: np.ndarray
    logits: np.ndarray
    prompt_logits: np.ndarray
    margins: np.ndarray
    oracle_error: float

    @property
    def num_rows(self) -> int:
        return len(self.lens)

    def prompt(self, row: int = 0) -> list[int]:
        return self.tokens[row, : self.prompt_lens[row]].tolist()

    def continuation(self, row: int = 0) -> list[int]:
        return self.tokens[row, self.prompt_lens[row] : self.lens[row]].tolist()

    def sequence(self, row: int = 0) -> list[int]:
        """Prompt and continuation."""
        return self.tokens[row, : self.lens[row]].tolist()


@dataclasses.dataclass(frozen=True)
class RealGolden:
    """Expectations of a real model, whose weights are not here; rows are independent prompts.

    `tokens`, `prompt_lens`, `lens` and `margins` as in `Golden`. Of each prompt's last position:
    `top_ids` and `top_logits` [rows, 64], largest first, `logit_means` and `logit_stds` [rows] over
    the whole vocabulary.
    """

    tokens: np.ndarray
    prompt_lens: np.ndarray
    lens: np.ndarray
    margins: np.ndarray
    top_ids: np.ndarray
    top_logits: np.ndarray
    logit_means: np.ndarray
    logit_stds: np.ndarray

    def prompt(self, row: int) -> list[int]:
        return self.tokens[row, : self.prompt_lens[row]].tolist()

    def continuation(self, row: int) -> list[int]:
        return self.tokens[row, self.prompt_lens[row] : self.lens[row]].tolist()


def real_golden(model: str) -> RealGolden:
    """Returns the golden of "smollm2" (the default model) or "gemma3" ("gemma-3-270m")."""
    with np.load(ROOT / "real" / f"{model}.npz") as data:
        return RealGolden(**{key: data[key] for key in data.files})


def golden(family: str, case: str) -> Golden:
    """Returns one golden. Raises FileNotFoundError if there is none of that name."""
    path = ROOT / family / case
    with np.load(path / "expected.npz") as data:
        arrays = {key: data[key] for key in data.files}
    return Golden(path=path, **{**arrays, "oracle_error": float(arrays["oracle_error"])})


def golden_cases(*families: str) -> list[tuple[str, str]]:
    """Returns (family, case) of every golden there is, of some families or of all; sorted."""
    found = sorted(ROOT.glob("*/*/expected.npz"))
    names = [(path.parent.parent.name, path.parent.name) for path in found]
    return [name for name in names if not families or name[0] in families]
