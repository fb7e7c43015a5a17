"""The host's side of sampling: where a slot starts, what is banned, reading scores back."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from polyjax.compiler.sampling import MAX_TOP_LOGPROBS, SamplingState
from polyjax.compiler.state import MAX_LOGIT_BIAS
from polyjax.engine.sequence import Sequence, SequenceStatus
from polyjax.engine.step import Launch
from polyjax.engine.types import TokenLogprobs

Int32Array = npt.NDArray[np.int32]


def needs_slot_row(sequence: Sequence) -> bool:
    """Whether a sequence's sampling depends on per-slot state beyond its last token."""
    return sequence.params.penalised or bool(sequence.params.logit_bias)


def slot_row(sequence: Sequence | None, vocab_size: int) -> SamplingState:
    """One slot's row of SamplingState on the host: counts of a sequence's tokens, its logit_bias.

    None gives the neutral row. Ids outside the vocabulary were refused when the request was added.
    """
    counts = np.zeros(vocab_size, np.int32)
    seen = np.zeros(vocab_size, np.bool_)
    ids = np.zeros(MAX_LOGIT_BIAS, np.int32)
    values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    if sequence is not None:
        seen[sequence.token_ids[: sequence.prompt_tokens]] = True
        np.add.at(counts, sequence.output_token_ids, 1)
        for index, (token, bias) in enumerate(sequence.params.logit_bias):
            ids[index], values[index] = token, bias
    return SamplingState(counts, seen, ids, values)


def grammar_mask(launch: Launch, words: int) -> Int32Array | None:
    """[B,words] int32, bit 1 allows a token: what grammars say of their rows, as of now.

    None where there are none. A fresh array: a device transfer may still read the last one.
    """
    if not launch.constrained:
        return None
    mask = np.full((launch.bucket.sequences, words), -1, np.int32)
    for row, sequence in enumerate(launch.sequences):
        ended = sequence.status is SequenceStatus.FINISHED
        if sequence.constraint is not None and not ended:
            mask[row] = sequence.constraint.mask
    return mask


def without_bans(launch: Launch, words: int, allowed: Int32Array | None) -> Int32Array | None:
    """`allowed` [B,words], None being everything, but for stop tokens of rows below `min_tokens`.

    A copy where there are such rows.
    """
    if not any(launch.bans_stop):
        return allowed
    mask = np.full((launch.bucket.sequences, words), -1, np.int32)
    if allowed is not None:
        mask[:] = allowed
    bits = mask.view(np.uint32)
    for row, sequence in enumerate(launch.sequences):
        if launch.bans_stop[row]:
            for token in sequence.stop_ids:
                if token // 32 < words:
                    bits[row, token // 32] &= np.uint32(~(1 << (token % 32)) & 0xFFFFFFFF)
    return mask


def prompt_targets(launch: Launch) -> Int32Array:
    """[B*T] int32: the prompt token that follows each new token, 0 where there is none."""
    tokens = launch.bucket.tokens
    targets = np.zeros((launch.bucket.sequences, tokens), np.int32)
    for row, sequence in enumerate(launch.sequences):
        start = launch.starts[row]
        following = sequence.token_ids[start + 1 : start + 1 + launch.num_tokens[row]]
        targets[row, : len(following)] = following
    return targets.reshape(-1)


def read_scores(
    scores: Int32Array, targets: SequenceOf[int], counts: SequenceOf[int]
) -> list[TokenLogprobs]:
    """TokenLogprobs of the first rows of `compiler.sampling.scores`, with `counts` alternatives.

    Fewer where a grammar leaves fewer.
    """
    floats = scores.view(np.float32)
    result = []
    for row, (target, count) in enumerate(zip(targets, counts, strict=True)):
        ids = scores[row, 2 : 2 + count].tolist()
        values = floats[row, 2 + MAX_TOP_LOGPROBS :][:count].tolist()
        top = [pair for pair in zip(ids, values, strict=True) if pair[1] != -np.inf]
        result.append(TokenLogprobs(target, float(floats[row, 0]), int(scores[row, 1]), top))
    return result
