"""Checks arguments against the annotations of the function that they were passed to."""

from __future__ import annotations

import operator
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, Union

#: How messages name one value and several values of a type.
_NAMES: dict[object, tuple[str, str]] = {
    bool: ("True or False", "bools"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    PathLike: ("a path", "paths"),
    Callable: ("a function", "functions"),
    Mapping: ("a dictionary", "dictionaries"),
    Sequence: ("a list", "lists"),
    Iterable: ("a list", "lists"),
    tuple: ("a tuple", "tuples"),
}
#: Evaluated annotations of functions.
_HINTS: dict[Callable[..., Any], dict[str, Any]] = {}


def check_types(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raises ``TypeError`` for the first argument that does not have the type of its annotation. A function passes
    itself and its ``locals()`` before it does anything else. Values of ``Literal`` are checked only for their type, and
    elements only if they can be iterated over more than once."""
    hints = _HINTS.get(function)
    if hints is None:
        hints = _HINTS[function] = typing.get_type_hints(function)
    for name, hint in hints.items():
        if name in given and not _fits(given[name], hint):
            value = given[name]
            shown = "None" if value is None else f"{type(value).__name__} {reprlib.repr(value)}"
            raise TypeError(f"{name}= must be {_described(hint)}, not {shown}")


def plain(value: Any) -> Any:
    """Returns the Python number that a value of a different package stands for, such as numpy's integers and floats, and
    arrays without dimensions; other values unchanged."""
    if isinstance(value, (bool, int, float, complex, str)) or getattr(value, "ndim", 0) != 0:
        return value
    dtype = str(getattr(value, "dtype", "")).rpartition(".")[2]
    if dtype.startswith("bool"):
        return bool(value)
    for method, convert in (("__index__", operator.index), ("__float__", float)):
        if hasattr(type(value), method) and not dtype.startswith("complex"):
            try:
                return convert(value)
            except (TypeError, ValueError):
                # An array of floats has `__index__` too.
                continue
    return value


def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the type without its parameters, and these."""
    origin, parameters = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is types.UnionType:
        origin = Union
    return origin, parameters


def _fits(value: object, hint: Any) -> bool:
    origin, parameters = _parts(hint)
    if origin in (Any, object):
        return True
    if origin is Union:
        return any(_fits(value, one) for one in parameters)
    if origin is Literal:
        return isinstance(value, type(parameters[0]))
    if origin is Callable:
        return callable(value)
    if origin in (int, float):
        # A bool is an int, but not a number of anything.
        value = plain(value)
        return isinstance(value, (int, origin)) and not isinstance(value, bool)
    if origin is bool:
        return isinstance(plain(value), bool)
    if origin is Mapping:
        keys, values = parameters
        return isinstance(value, Mapping) and _all_fit(value.keys(), keys) and _all_fit(value.values(), values)
    if origin is tuple:
        return (
            isinstance(value, (tuple, list))
            and len(value) == len(parameters)
            and all(map(_fits, value, parameters))
        )
    if origin in (Sequence, Iterable):
        # A text is not meant as a list of its characters.
        if not isinstance(value, Iterable) or isinstance(value, (str, bytes)):
            return False
        if origin is Sequence and isinstance(value, Mapping):
            return False
        return not hasattr(value, "__len__") or _all_fit(value, parameters[0])
    return isinstance(value, origin)


def _all_fit(values: Iterable[object], hint: Any) -> bool:
    # Fast, since there may be millions of tokens.
    if hint in (int, str) and all(issubclass(kind, hint) and kind is not bool for kind in set(map(type, values))):
        return True
    return hint is Any or all(_fits(value, hint) for value in values)


def _described(hint: Any, several: bool = False) -> str:
    origin, parameters = _parts(hint)
    if origin is Union:
        described = dict.fromkeys(_described(one, several) for one in parameters if one is not type(None))
        *first, last = described
        return f"{', '.join(first)} or {last}" if first else last
    if origin is Literal:
        return _described(type(parameters[0]), several)
    name = _NAMES.get(origin) or (f"an instance of {origin.__name__}", f"instances of {origin.__name__}")
    contents = parameters[-1:] if origin in (Mapping, Sequence, Iterable) else ()
    of = "".join(f" of {_described(one, True)}" for one in contents if one is not Any)
    if origin is tuple:
        of = " of " + " and ".join(map(_described, parameters))
    return name[several] + of
