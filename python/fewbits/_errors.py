"""The exceptions: one class for each category of error, with the exit code of the command line."""

from __future__ import annotations

from typing import Any, ClassVar


class FewbitsWarning(UserWarning):
    """A problem with a model or a result that does not stop the work."""


class QuantError(Exception):
    """A failure. ``str()`` gives the message and the remedy."""

    #: ``usage``, ``input``, ``environment``, ``numeric``, ``internal`` or ``interrupted``.
    category: ClassVar[str] = ""
    #: The exit code of the command line.
    exit_code: ClassVar[int] = 1

    #: What happened, and where.
    message: str
    #: What the user can do about it.
    remedy: str
    #: The tensor or linear concerned, if any.
    tensor: str | None
    #: The file or directory concerned, if any.
    path: str | None

    def __init__(
        self, message: str, remedy: str = "", tensor: str | None = None, path: str | None = None
    ) -> None:
        # OSError would interpret the arguments as an error number and file names.
        Exception.__init__(self, message, remedy, tensor, path)
        self.message = message
        self.remedy = remedy
        self.tensor = tensor
        self.path = path

    def __str__(self) -> str:
        return f"{self.message}\n  {self.remedy}" if self.remedy else self.message


class UsageError(QuantError, ValueError):
    """The request is invalid or cannot be carried out."""

    category = "usage"
    exit_code = 2


class InputError(QuantError, ValueError):
    """An input file or dataset is broken, malicious or unsupported."""

    category = "input"
    exit_code = 4


class EnvironmentFailure(QuantError, OSError):
    """A problem with the disk, memory, permissions or network."""

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
    """The run was stopped by something other than Ctrl-C, such as a signal that ended a tokenizer's process."""

    category = "interrupted"
    exit_code = 75


def reword(error: QuantError, message: str, remedy: str) -> None:
    """Replaces the texts of an error by those for a caller of whom more is known."""
    error.message, error.remedy = message, remedy
    error.args = (error.message, error.remedy, error.tensor, error.path)


_CLASSES: dict[str, type[QuantError]] = {
    kind.category: kind
    for kind in (UsageError, InputError, EnvironmentFailure, NumericError, InternalError, InterruptedRun)
}


def make(category: str, exit_code: int, message: str, remedy: str, **where: Any) -> QuantError:
    """Creates the exception for a failure. Called by the native part."""
    error = _CLASSES[category](message, remedy, **where)
    if error.exit_code != exit_code:
        raise AssertionError(f"{category} has exit code {exit_code}")
    return error
