"""Which bucket of the ladder a set of rows runs in, and how rows are cut and grouped to fit.

Cost is counted in padded tokens. It decides nothing about results, only about wasted work.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from polyjax.core.buckets import Bucket, BucketLadder
from polyjax.core.errors import ConfigError

# A launch reads the weights once however few tokens it has: about what this many tokens more cost.
LAUNCH_COST_TOKENS = 64
# How much larger than a chunk its padded length may be: the end of a prompt is worth finishing.
FINAL_PADDING = 2.0
PARTIAL_PADDING = 1.25


class BucketChooser:
    """Answers for one ladder. `max_pages` is the widest page table a sequence can have.

    Raises ConfigError for a ladder in which some sequence would fit no bucket.
    """

    def __init__(self, ladder: BucketLadder, max_pages: int):
        self.ladder = ladder
        for name, buckets in (("decode", ladder.decode), ("prefill", ladder.prefill)):
            widest = max((bucket.pages for bucket in buckets), default=0)
            if widest < max_pages:
                raise ConfigError(
                    f"the ladder's {name} buckets reach {widest} context pages and max_model_len "
                    f"needs {max_pages}: lower --max_model_len or extend the ladder"
                )
        if any(bucket.tokens != 1 for bucket in ladder.decode):
            raise ConfigError("a decode bucket of the ladder has more than one token")
        rows = {bucket.sequences for bucket in (*ladder.decode, *ladder.prefill)}
        if missing := sorted(rows - set(ladder.sampler_sequences)):
            raise ConfigError(
                f"the ladder has buckets of {missing} sequences and no sampler for so many: "
                "add them to sampler_sequences"
            )
        by_cost = lambda b: (b.tokens * b.sequences, b.sequences * b.pages, b)  # noqa: E731
        self._decode = sorted(ladder.decode, key=by_cost)
        self._prefill = sorted(ladder.prefill, key=by_cost)
        self._reach: dict[int, int] = {}  # context pages by tokens of a row
        for bucket in sorted(ladder.prefill):
            self._reach[bucket.tokens] = max(self._reach.get(bucket.tokens, 0), bucket.pages)
        self.smallest_chunk = min(self._reach)
        self.max_prefill_sequences = max(bucket.sequences for bucket in ladder.prefill)
        # Steady decode asks the same question every step.
        self.decode = lru_cache(maxsize=4096)(self._find_decode)
        self.prefill = lru_cache(maxsize=4096)(self._find_prefill)

    def _find_decode(self, sequences: int, pages: int) -> Bucket | None:
        """The cheapest decode bucket with room for so many sequences and context pages."""
        fitting = (b for b in self._decode if b.sequences >= sequences and b.pages >= pages)
        return next(fitting, None)

    def _find_prefill(self, tokens: int, sequences: int, pages: int) -> Bucket | None:
        """The cheapest prefill bucket with room for such rows: tokens each, rows, context pages."""
        for bucket in self._prefill:
            if bucket.tokens >= tokens and bucket.sequences >= sequences and bucket.pages >= pages:
                return bucket
        return None

    def chunk_tokens(self, remaining: int, allowed: int, pages: int) -> int:
        """How many of a prompt's `remaining` tokens to take now, at most `allowed` (both >= 1).

        `pages`: page table columns once they are taken (an upper bound). The whole rest is taken if
        it fits without much padding, otherwise a size the ladder has.
        """
        sizes = [tokens for tokens, reach in self._reach.items() if reach >= pages]  # ascending
        limit = min(remaining, allowed, sizes[-1])
        padded = next(tokens for tokens in sizes if tokens >= limit)
        padding = FINAL_PADDING if limit == remaining else PARTIAL_PADDING
        if padded <= padding * limit:
            return limit
        return max((tokens for tokens in sizes if tokens <= limit), default=limit)

    def group(self, lengths: Sequence[int], pages: Sequence[int]) -> list[tuple[Bucket, list[int]]]:
        """Rows (new tokens, context pages) grouped into buckets with the least total cost.

        Returns (bucket, row numbers). Rows are sorted by length and cut into runs, so that rows of
        a launch are alike; the best cuts are found exactly.
        """
        order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], -pages[row]))
        best: list[tuple[int, int, Bucket | None]] = [(0, 0, None)]  # cost, run begins, bucket
        for end in range(1, len(order) + 1):
            options = []
            widest = 0
            for begin in range(end - 1, max(end - self.max_prefill_sequences, 0) - 1, -1):
                widest = max(widest, pages[order[begin]])
                bucket = self.prefill(lengths[order[begin]], end - begin, widest)
                if bucket is None:
                    break
                cost = bucket.tokens * bucket.sequences + LAUNCH_COST_TOKENS
                options.append((best[begin][0] + cost, begin, bucket))
            best.append(min(options, key=lambda option: option[0]))
        groups = []
        end = len(order)
        while end:
            _, begin, bucket = best[end]
            assert bucket is not None
            groups.append((bucket, order[begin:end]))
            end = begin
        return groups[::-1]

    def split_decode(self, pages: Sequence[int]) -> list[tuple[Bucket, list[int]]]:
        """Decode rows (context pages) cut into launches where no single bucket holds them all.

        Returns (bucket, row numbers), longest contexts first, as few launches as the ladder allows
        when rows are taken in that order.
        """
        order = sorted(range(len(pages)), key=lambda row: -pages[row])
        groups = []
        while order:
            fitting = [b for b in self._decode if b.pages >= pages[order[0]]]
            room = max(bucket.sequences for bucket in fitting)
            rows, order = order[:room], order[room:]
            bucket = self.decode(len(rows), pages[rows[0]])
            assert bucket is not None
            groups.append((bucket, rows))
        return groups
