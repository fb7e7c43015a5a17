"""Perplexity on packaged public text, scored through the completions route.

The text is cut into windows of equal length; a window is one request that echoes its prompt with
log-probabilities. The first token of a window has no prediction and is not counted.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from polyjax.core.errors import ConfigError
from polyjax.evaluation.intervals import Interval, bootstrap


def public_text() -> str:
    """Returns the public-domain prose that reasoning-gym packages (J. Verne, 1889; about 52 KB)."""
    try:
        folder = importlib.resources.files("reasoning_gym.data")
    except ImportError as error:
        raise ConfigError(
            "the text comes with reasoning-gym: pip install 'polyjax[eval]'"
        ) from error
    text = (folder / "in_the_year_2889.txt").read_text(encoding="utf-8")
    start, end = text.find("*** START"), text.find("*** END")
    return text[text.index("\n", start) + 1 : end] if 0 <= start < end else text


@dataclasses.dataclass(frozen=True)
class Windows:
    """Token ids cut into `window_tokens` long pieces; a shorter rest is left out."""

    token_ids: Sequence[int]
    window_tokens: int = 256
    name: str = "perplexity"

    def requests(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for index in range(len(self.token_ids) // self.window_tokens):
            start = index * self.window_tokens
            piece = list(self.token_ids[start : start + self.window_tokens])
            body = {"prompt": piece, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
            yield f"{self.name}/{index}", body

    def scores(self, choice: dict[str, Any]) -> list[float]:
        """Returns the log-probabilities of a window's tokens from a completion choice.

        Raises ValueError if the answer does not hold one number for each."""
        values = choice["logprobs"]["token_logprobs"][1 : self.window_tokens]
        if len(values) != self.window_tokens - 1 or any(v is None for v in values):
            raise ValueError(f"{self.name}: wanted {self.window_tokens - 1} log-probabilities")
        return [float(v) for v in values]


def perplexity(windows: Sequence[Sequence[float]]) -> Interval:
    """Returns exp(-mean log-probability) of all tokens, resampling windows (tokens correlate)."""
    means = [float(np.mean(window)) for window in windows]
    return bootstrap(means, lambda x: math.exp(-float(np.mean(x))))
