"""Errors that name what is wrong and what to do. Serving raises them; search records them."""

from __future__ import annotations

from collections.abc import Sequence


class PolyjaxError(Exception):
    """Base of every error polyjax raises on purpose."""


class ConfigError(PolyjaxError):
    """A flag, config value or combination of them cannot work; the message says which to change."""


class ModelError(PolyjaxError):
    """A model cannot be served. `problems` lists every defect found, not only the first."""

    def __init__(self, where: str, problems: Sequence[str]):
        self.problems = tuple(problems)
        super().__init__(f"{where}:\n  " + "\n  ".join(self.problems))


class ScheduleError(PolyjaxError):
    """A schedule is illegal for its workload or chip; the message is the reason."""


class StateABIError(PolyjaxError):
    """A program expects other live state than the engine holds. `differences` spells them out."""

    def __init__(self, differences: Sequence[str]):
        self.differences = tuple(differences)
        super().__init__("state-ABI differs:\n  " + "\n  ".join(self.differences))


class RequestError(PolyjaxError):
    """A client's request is wrong. `param` names the field; `status` is the HTTP status."""

    def __init__(self, message: str, param: str | None = None, status: int = 400):
        self.param = param
        self.status = status
        super().__init__(message)


class EngineDead(PolyjaxError):
    """The engine process ended or stopped answering; no request can be served any more."""
