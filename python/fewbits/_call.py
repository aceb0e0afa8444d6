"""Calls from the package into its extension module, the native part."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Union

from fewbits import _native
from fewbits._arguments import plain
from fewbits._errors import InputError, UsageError, reword
from fewbits._events import Event, Listener

#: A path, or the name of a model on a hub.
PathOrName = Union[str, PathLike[str]]
#: A text: a file, the name of a text set, or the rows of a dataset.
Texts = Union[str, PathLike[str], Iterable[Any]]


def code() -> str:
    """Returns the path of the native part. A run can only be resumed with the same version of this file."""
    found = _native.__file__
    if found is None:
        raise AssertionError("the native part has no file")
    return found


def python() -> str | None:
    """Returns the path of the interpreter, or None if it is not a file, as when Python is embedded. Tokenizers run in
    processes of this interpreter."""
    named = sys.executable
    return named if named and Path(named).is_file() else None


def run(
    kind: str,
    request: object,
    *,
    rows: list[str] | None = None,
    on_event: Callable[[Event], object] | None = None,
    progress: bool = False,
    threads: int | None = None,
    resumes: bool = False,
) -> Any:
    """Runs a job of the native part and returns its result. `resumes`: the same call resumes after Ctrl-C."""
    check_threads(threads)
    listener = Listener(on_event, progress)
    wants_estimate = on_event is not None
    try:
        answer = _native.run(
            kind, as_json(request), rows, listener, code(), python(), threads, wants_estimate
        )
    except KeyboardInterrupt as stopped:
        if not resumes:
            raise
        note = "finished work is kept; repeat the call to continue"
        if sys.version_info >= (3, 11):
            stopped.add_note(note)
        else:
            # Before Python 3.11, a traceback shows only the arguments of an exception.
            stopped.args = (*stopped.args, note)
        raise
    finally:
        listener.close()
    return json.loads(answer)


def as_json(request: object) -> str:
    """Converts a request to JSON. Numbers of other packages become plain ones."""

    def number(value: object) -> object:
        converted = plain(value)
        if converted is value:
            raise TypeError(f"{type(value).__name__} {value!r} cannot be passed as a setting")
        return converted

    return json.dumps(request, default=number)


def check_threads(threads: int | None) -> None:
    if threads is not None and not 1 <= threads <= 1024:
        raise UsageError(f"threads={threads} is not a valid number of threads", "use 1 to 1024")


@contextmanager
def needs(module: str, packages: str, extra: str) -> Iterator[None]:
    """Wraps the imports of packages that a module needs. If one is missing, the ``ImportError`` names the command that
    installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        command = f"pip install 'fewbits[{extra}]'"
        raise ImportError(f"{module} needs {packages}; install what is missing with: {command}") from error


def path(given: PathOrName) -> str:
    """Converts a path to text; names of models are returned unchanged."""
    return fspath(given)


def optional_path(given: PathOrName | None) -> str | None:
    """Like :func:`path`, but returns None for None."""
    return None if given is None else fspath(given)


def text_argument(given: Texts | None, name: str) -> tuple[str | None, list[str] | None]:
    """Converts a text to the form that the native part takes: a path or a name, or rows as JSON."""
    if given is None:
        return None, None
    if isinstance(given, (str, PathLike)):
        return fspath(given), None
    if isinstance(given, Mapping):
        raise TypeError(
            f"{name}= must be a path, the name of a text, or rows; put a single row into a list, and choose one split "
            'of several, such as dataset["train"]'
        )
    rows = list(given)
    if rows and all(isinstance(row, Mapping) and "role" in row for row in rows):
        rows = [rows]
    return None, [_row(row, number, name) for number, row in enumerate(rows, 1)]


@contextmanager
def explains_datasets(text: Texts | None) -> Iterator[None]:
    """Wraps a run on a text. If the text is the name of a dataset on a hub, which only other packages can load, the error
    says how."""
    try:
        yield
    except InputError as error:
        if isinstance(text, str) and "neither an existing file nor a known text set" in error.message:
            load = f"datasets.load_dataset({text!r}, split=...)"
            reword(error, error.message, f"{error.remedy}; for a dataset of a hub, pass its rows: {load}")
        raise


def _row(row: Any, number: int, name: str) -> str:
    """Converts a row to JSON. Only the columns that are read are converted; other columns may contain anything."""
    if isinstance(row, Mapping):
        row = {key: row[key] for key in ("messages", "tools", "text") if key in row}
    try:
        return json.dumps(row)
    except (TypeError, ValueError) as error:
        raise TypeError(f"row {number} of {name}= is neither a text nor a conversation: {error}") from error
