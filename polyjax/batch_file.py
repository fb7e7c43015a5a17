"""The OpenAI batch file format: request lines in, result lines out, appended as requests finish.

A result's `id` names the line it answers (`batch_req_<line number>`), so that a run that was killed
can be resumed: lines with a result are not asked again, and a torn last line is cut off first.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from polyjax.core.errors import ConfigError, RequestError

_ID_PREFIX = "batch_req_"
SYNC_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class RequestLine:
    """One line of the input. `error` is set where the line itself is wrong; it then has no body."""

    number: int
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    error: RequestError | None = None

    @property
    def id(self) -> str:
        return f"{_ID_PREFIX}{self.number}"


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """Which lines are this process's: those whose number is `index` modulo `count`."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Returns the shard that "i/n" means. Raises ConfigError unless 0 <= i < n."""
        index, slash, count = text.partition("/")
        if slash and index.isdigit() and count.isdigit() and int(index) < int(count):
            return cls(int(index), int(count))
        raise ConfigError(f"--shard={text} must be i/n with 0 <= i < n")

    def __contains__(self, number: int) -> bool:
        return number % self.count == self.index


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


def read_requests(path: str | Path, shard: Shard) -> Iterator[RequestLine]:
    """Yields the lines of a shard without blank ones. Raises ConfigError if unreadable."""
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file):
                if number in shard and raw.strip():
                    yield _parse(number, raw)
    except OSError as error:
        raise ConfigError(f"--input={path}: {error.strerror}") from error


def _parse(number: int, raw: bytes) -> RequestLine:
    try:
        line = msgspec.json.decode(raw, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        wrong = RequestError(f"line {number + 1} is no batch request: {error}")
        return RequestLine(number, _custom_id(raw), error=wrong)
    if line.method != "POST":
        wrong = RequestError(f"method must be POST, not {line.method[:20]!r}", "method")
        return RequestLine(number, line.custom_id, error=wrong)
    return RequestLine(number, line.custom_id, line.url, bytes(line.body))


def _custom_id(raw: bytes) -> str | None:
    """The custom id of a line that is wrong otherwise, where it can be read."""
    try:
        given = json.loads(raw)
        return given["custom_id"] if isinstance(given["custom_id"], str) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def result_line(line: RequestLine, status: int, body: Any) -> dict[str, Any]:
    """Returns a result. A status other than 200 has the OpenAI error body, also as `error`."""
    response = {"status_code": status, "request_id": line.id, "body": body}
    return {
        "id": line.id,
        "custom_id": line.custom_id,
        "response": response,
        "error": None if status == 200 else body["error"],
    }


class ResultFile:
    """The output, open for appending. `done` holds the numbers of lines with a result."""

    def __init__(self, path: str | Path):
        """Opens or resumes. Raises ConfigError if the file holds something else than results."""
        self._path = Path(path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = self._path.open("a+b")
        except OSError as error:
            raise ConfigError(f"--output={path}: {error.strerror}") from error
        try:
            self.done = self._resume()
        except ConfigError:
            self._file.close()
            raise
        self._synced_s = time.monotonic()

    def _resume(self) -> set[int]:
        """Cuts off a torn last line; returns the numbers of the others."""
        self._file.seek(0)
        done: set[int] = set()
        whole = 0
        for raw in self._file:
            if not raw.endswith(b"\n"):
                break
            done.add(_number(raw, self._path))
            whole += len(raw)
        self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)
        return done

    def append(self, line: RequestLine, result: dict[str, Any]) -> None:
        """Writes one result in one go; synced to the disk at least every second."""
        self._file.write(msgspec.json.encode(result) + b"\n")
        self._file.flush()
        self.done.add(line.number)
        if time.monotonic() - self._synced_s > SYNC_S:
            self._sync()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced_s = time.monotonic()

    def close(self) -> None:
        if not self._file.closed:
            self._file.flush()
            self._sync()
            self._file.close()


def _number(raw: bytes, path: Path) -> int:
    try:
        return int(json.loads(raw)["id"].removeprefix(_ID_PREFIX))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} holds a line that is no batch result ({raw[:60]!r}); choose another --output"
        ) from error


def merge(shards: Sequence[str | Path], output: str | Path) -> int:
    """Writes the results of all shards in the order of the input; returns how many.

    Raises ConfigError on a torn, foreign or repeated line. The output appears whole or not at all.
    """
    offsets: dict[int, tuple[int, int, int]] = {}
    files = [open(path, "rb") for path in shards]  # noqa: SIM115  closed below, all at once
    try:
        for index, (file, path) in enumerate(zip(files, shards, strict=True)):
            position = 0
            for raw in file:
                number = _number(raw, Path(path))
                if not raw.endswith(b"\n") or number in offsets:
                    raise ConfigError(
                        f"{path}: the result of line {number + 1} is torn or repeated"
                    )
                offsets[number] = (index, position, len(raw))
                position += len(raw)
        partial = Path(f"{output}.partial")
        with partial.open("wb") as merged:
            for _, (index, position, length) in sorted(offsets.items()):
                files[index].seek(position)
                merged.write(files[index].read(length))
            merged.flush()
            os.fsync(merged.fileno())
        partial.rename(output)
    finally:
        for file in files:
            file.close()
    return len(offsets)
