"""Grammars of living requests: compiled beside the loop, then led by committed tokens. No jax.

A constrained sequence keeps its place in every step. Its mask depends on the token before, which
the step before still computes; so a step's samplers that need such a mask are launched only once
the step before is committed, while the forward program of this one runs.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from polyjax.core.errors import PolyjaxError, RequestError
from polyjax.engine.sequence import Sequence, SequenceStatus
from polyjax.engine.types import Grammar
from polyjax.io.grammar import GrammarCompiler, Matcher

COMPILE_THREADS = 2  # so that one huge grammar does not hold up the others

Int32Array = npt.NDArray[np.int32]


class Constraint:
    """What may follow the known tokens of one sequence: `mask` [words] int32, bit 1 means allowed.

    End-of-sequence is allowed where the document is complete, with `ignore_eos` only where nothing
    else may follow. Raises RequestError if the grammar is too complex or leads nowhere.
    """

    __slots__ = ("_ignore_eos", "_matcher", "_others", "mask")

    def __init__(self, matcher: Matcher, ends: Int32Array, ignore_eos: bool):
        """`ends` [words] int32 has the bits of the end-of-sequence tokens."""
        self.mask: Int32Array = np.zeros_like(ends)
        self._matcher = matcher
        self._others = ~ends
        self._ignore_eos = ignore_eos
        self._fill()

    def take(self, token: int) -> bool:
        """Advances over a token just committed; returns whether the document ends with it."""
        self._matcher.consume([token])
        return self._matcher.stopped or self._fill()

    def _fill(self) -> bool:
        """Makes the mask for the next token; returns whether only end-of-sequence is in it."""
        self._matcher.fill(self.mask)
        others = self.mask & self._others
        if not others.any():
            return True
        if self._ignore_eos:
            self.mask[:] = others
        return False


class Constraints:
    """Gives constrained sequences their `constraint`, compiled in threads of its own.

    `make_compiler` is called in one of them at once; it holds the interpreter for some tenths of a
    second, so `wait_until_made` before serving. Where it raises, requests with a grammar are
    refused for its reason. Apart from compiling, everything happens on the engine's loop.
    """

    def __init__(self, make_compiler: Callable[[], GrammarCompiler]):
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar")
        self._compiler = self._threads.submit(make_compiler)
        self._compiling: dict[Future[Constraint], Sequence] = {}

    def wait_until_made(self) -> None:
        concurrent.futures.wait([self._compiler])

    def check_available(self) -> None:
        """Raises RequestError (400) with the reason if this engine serves no grammars."""
        error = self._compiler.exception()
        if error is not None:
            reason = str(error) if isinstance(error, PolyjaxError) else repr(error)
            raise RequestError(f"this engine serves no grammars: {reason}", "grammar") from error

    def begin(self, sequence: Sequence) -> None:
        """Starts compiling the grammar of a sequence that waits; it is not `ready` until then."""
        grammar = sequence.params.grammar
        assert grammar is not None
        future = self._threads.submit(self._compile, grammar, sequence.params.ignore_eos)
        self._compiling[future] = sequence

    def collect(self) -> list[tuple[Sequence, RequestError]]:
        """Makes ready what has been compiled; returns the sequences whose grammar is unusable."""
        failed: list[tuple[Sequence, RequestError]] = []
        for future, sequence in list(self._compiling.items()):
            if sequence.status is SequenceStatus.FINISHED:
                future.cancel()
            elif not future.done():
                continue
            else:
                try:
                    sequence.constraint = future.result()
                except RequestError as error:
                    failed.append((sequence, error))
                except Exception as error:
                    failed.append((sequence, RequestError(f"grammar: {error!r}", "grammar")))
            del self._compiling[future]
        return failed

    def wait(self, timeout_s: float) -> None:
        """Waits until something is compiled; returns at once where nothing is being compiled."""
        concurrent.futures.wait(
            self._compiling, timeout_s, return_when=concurrent.futures.FIRST_COMPLETED
        )

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar, ignore_eos: bool) -> Constraint:
        compiler = self._compiler.result()
        ends = np.zeros(compiler.num_mask_words, np.uint32)
        for token in compiler.eos_token_ids:
            ends[token // 32] |= np.uint32(1 << (token % 32))
        matcher = compiler.matcher(grammar.kind, grammar.text)
        return Constraint(matcher, ends.view(np.int32), ignore_eos)
