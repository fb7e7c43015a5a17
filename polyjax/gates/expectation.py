"""What a correct result looks like, one kind of check each: bounded, exact, best token, routed."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from polyjax.gates.candidate import GateFailure, same_bits


class Expected(Protocol):
    """One output of an op."""

    def judge(self, found: np.ndarray) -> float:
        """Returns the largest error over its bound. Raises GateFailure where it exceeds 1."""


@dataclasses.dataclass(frozen=True)
class Bounded:
    """|found - value| <= error, NaN exactly where the reference has it; `compared` rows only."""

    what: str
    value: np.ndarray
    error: np.ndarray
    compared: np.ndarray | None = None

    def judge(self, found: np.ndarray) -> float:
        found, value, error = found.astype(np.float64), self.value, self.error
        if self.compared is not None:
            found, value, error = (a[self.compared] for a in (found, value, error))
        lost = np.isnan(found) != np.isnan(value)
        if lost.any():
            where = _first(lost)
            raise GateFailure(f"{self.what}{list(where)}: {found[where]} instead of {value[where]}")
        known = ~np.isnan(value)
        # Equal infinities differ by NaN: they agree.
        with np.errstate(invalid="ignore"):
            off = np.where(known & (found != value), np.abs(found - value), 0.0)
        ratio = np.where(off > 0, off / np.maximum(error, 1e-300), 0.0)
        ratio = np.where(np.isnan(ratio), np.inf, ratio)
        worst = float(np.max(ratio, initial=0.0))
        if worst > 1.0:
            where = tuple(int(i) for i in np.unravel_index(np.argmax(ratio), ratio.shape))
            raise GateFailure(
                f"{self.what}{list(where)} is {found[where]:.6g} instead of {value[where]:.6g}, "
                f"{worst:.3g} times the bound {error[where]:.3g}"
            )
        return worst


@dataclasses.dataclass(frozen=True)
class Exact:
    """The same bits; NaN for NaN. `compared` masks leading axes."""

    what: str
    value: np.ndarray
    compared: np.ndarray | None = None

    def judge(self, found: np.ndarray) -> float:
        value = self.value
        if self.compared is not None:
            found, value = found[self.compared], value[self.compared]
        differs = ~same_bits(found, value.astype(found.dtype))
        if differs.any():
            where = _first(differs)
            raise GateFailure(
                f"{self.what}{list(where)} is {found[where]} instead of {value[where]}; "
                f"{int(differs.sum())} of {differs.size} elements differ"
            )
        return 0.0


@dataclasses.dataclass(frozen=True)
class WrittenPool:
    """A pool [P,planes,K,Z,H] with new rows at flat `slots` [M]; every other slot keeps its bits.

    Slot 0, the sink of idle rows, may hold anything if an idle row wrote there.
    """

    before: np.ndarray
    slots: np.ndarray
    value: np.ndarray  # [M,planes,K,H]
    error: np.ndarray | None  # None: moved, not computed

    def judge(self, found: np.ndarray) -> float:
        page = found.shape[3]
        live = self.slots > 0
        at = self.slots[live] // page, self.slots[live] % page
        untouched = np.ones((found.shape[0], page), bool)
        untouched[at] = False
        if not live.all():
            untouched[0, 0] = False
        by_slot = lambda a: np.moveaxis(a, 3, 1)  # noqa: E731  [P,Z,planes,K,H]
        kept = ~same_bits(by_slot(found)[untouched], by_slot(self.before)[untouched])
        if kept.any():
            slot = np.argwhere(untouched)[np.argwhere(kept)[0][0]]
            raise GateFailure(
                f"slot {slot[1]} of page {slot[0]} changed, though no row owns it; "
                f"{int(kept.reshape(len(kept), -1).any(-1).sum())} such slots"
            )
        written = by_slot(found)[at]
        if self.error is None:
            return Exact("written slots", self.value[live]).judge(written)
        return Bounded("written slots", self.value[live], self.error[live]).judge(written)


@dataclasses.dataclass(frozen=True)
class BestToken:
    """Token ids [M] whose score is the best, or within both scores' errors of it.

    Where the best score is tied without error, only the lowest id is right.
    """

    scores: np.ndarray  # [M,V]
    error: np.ndarray
    compared: np.ndarray
    exact: np.ndarray | None = None  # [M] ids, where arithmetic cannot matter

    def judge(self, found: np.ndarray) -> float:
        vocab = self.scores.shape[1]
        if (found.shape, found.dtype) != ((len(self.scores),), np.dtype(np.int32)):
            raise GateFailure(f"tokens are {found.dtype}{list(found.shape)}")
        worst = 0.0
        for row in np.flatnonzero(self.compared & ~np.isnan(self.scores).any(-1)):
            token = int(found[row])
            if not 0 <= token < vocab:
                raise GateFailure(f"row {row}: token {token} is outside the vocabulary of {vocab}")
            if self.exact is not None and token != self.exact[row]:
                raise GateFailure(f"row {row}: token {token}, the lowest tied is {self.exact[row]}")
            scores, error = self.scores[row], self.error[row]
            best = int(np.argmax(scores))
            gap, allowed = scores[best] - scores[token], error[best] + error[token]
            if gap > allowed:
                raise GateFailure(
                    f"row {row}: token {token} scores {gap:.3g} less than token {best}, "
                    f"rounding explains {allowed:.3g}"
                )
            worst = max(worst, float(gap / allowed) if allowed else 0.0)
        return worst


@dataclasses.dataclass(frozen=True)
class Routed:
    """Ids [M,A] of the best experts, best first, by `choosing` scores [M,E] and their errors."""

    choosing: np.ndarray
    error: np.ndarray

    def judge(self, found: np.ndarray) -> float:
        count = found.shape[1]
        for row, ids in enumerate(found):
            if (
                len(set(ids.tolist())) != count
                or not ((ids >= 0) & (ids < len(self.error[row]))).all()
            ):
                raise GateFailure(f"row {row}: experts {ids.tolist()} are no {count} distinct ids")
            ranked = np.sort(self.choosing[row])[::-1][:count]
            slack = self.error[row][ids] + self.error[row].max()
            short = ranked - self.choosing[row][ids] - slack
            if (short > 0).any():
                raise GateFailure(
                    f"row {row}: expert {ids[int(np.argmax(short))]} is not among the best"
                )
        return 0.0


def _first(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(mask)[0])
