"""What can go wrong, by the kind of failure: one class for each exit code of the command line."""

from __future__ import annotations

from typing import Any, ClassVar


class FewbitsWarning(UserWarning):
    """Something about a model or a result that one should know, though the work goes on."""


class QuantError(Exception):
    """A failure. ``str()`` has the message and the remedy."""

    #: ``usage``, ``input``, ``environment``, ``numeric``, ``internal`` or ``interrupted``.
    category: ClassVar[str] = ""
    #: What the command line exits with.
    exit_code: ClassVar[int] = 1

    #: What happened and where.
    message: str
    #: What to do about it.
    remedy: str
    #: The tensor or linear that it is about, where there is one.
    tensor: str | None
    #: The file or directory that it is about, where there is one.
    path: str | None

    def __init__(
        self, message: str, remedy: str = "", tensor: str | None = None, path: str | None = None
    ) -> None:
        # Not that of the class beside it: OSError takes its arguments for numbers and names of its own.
        Exception.__init__(self, message, remedy, tensor, path)
        self.message = message
        self.remedy = remedy
        self.tensor = tensor
        self.path = path

    def __str__(self) -> str:
        return f"{self.message}\n  {self.remedy}" if self.remedy else self.message


class UsageError(QuantError, ValueError):
    """The request itself cannot be fulfilled."""

    category = "usage"
    exit_code = 2


class InputError(QuantError, ValueError):
    """A file or a dataset that was given is broken, hostile or unsupported."""

    category = "input"
    exit_code = 4


class EnvironmentFailure(QuantError, OSError):
    """Disk, memory, permission or network."""

    category = "environment"
    exit_code = 5


class NumericError(QuantError, ArithmeticError):
    """NaN or infinity, or degenerate statistics."""

    category = "numeric"
    exit_code = 6


class InternalError(QuantError, RuntimeError):
    """A bug of this package."""

    category = "internal"
    exit_code = 70


class InterruptedRun(QuantError):
    """Something else than Ctrl-C stopped the run, such as a signal that ended the process of a tokenizer."""

    category = "interrupted"
    exit_code = 75


_CLASSES: dict[str, type[QuantError]] = {
    kind.category: kind
    for kind in (UsageError, InputError, EnvironmentFailure, NumericError, InternalError, InterruptedRun)
}


def make(category: str, exit_code: int, message: str, remedy: str, **where: Any) -> QuantError:
    """The exception for a failure; called by the native half."""
    error = _CLASSES[category](message, remedy, **where)
    if error.exit_code != exit_code:
        raise AssertionError(f"{category} has exit code {exit_code}")
    return error
