"""Work beside the engine's loop: in a thread, with progress, ended between two pieces of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from polyjax.core.errors import PolyjaxError
from polyjax.io.files import Progress


class Cancelled(PolyjaxError):
    """Nobody wants the result any more."""


class BackgroundTask[T]:
    """Runs `work` in a thread of its own from now on; whoever steps the engine looks for its end.

    `work` gets a function to call between its pieces, with what it does, how many pieces are done
    and how many there are. That call raises Cancelled once `cancel` was called.
    """

    def __init__(self, name: str, work: Callable[[Progress], T]):
        self.what = ""
        self.done = 0
        self.total = 0
        self._cancelled = False
        self._results: list[T] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    @property
    def is_finished(self) -> bool:
        return not self._thread.is_alive()

    def take_result(self) -> T:
        """What `work` returned, once: nothing here refers to it after. Raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results.pop()

    def cancel(self) -> None:
        """Waits for the piece in work; its result and those before it are dropped."""
        self._cancelled = True
        self._thread.join()
        self._results.clear()

    def _run(self, work: Callable[[Progress], T]) -> None:
        try:
            self._results.append(work(self._progress))
        except Exception as error:
            self._error = error

    def _progress(self, what: str, done: int, total: int) -> None:
        self.what, self.done, self.total = what, done, total
        if self._cancelled:
            raise Cancelled(f"{what}: cancelled")
