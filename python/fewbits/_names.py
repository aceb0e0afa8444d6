"""Other names of arguments in messages, for functions that call :func:`fewbits.quantize` with arguments of their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fewbits._errors import QuantError, reword

#: Returns how the caller spells an argument, given its name and its value in the message, which may be empty.
Spelling = Callable[[str, str], str]

_SPELLING: ContextVar[Spelling | None] = ContextVar("spelling", default=None)
#: A key of a step, such as `` `gptq.damping` ``; other code, which is left as it is; an argument with its value; or a
#: text that was passed as an argument, as in ``calibration:2: …`` and ``calibration has 3 tokens``.
_ARGUMENT = re.compile(
    r"""`(?:gptq|smoothquant)\.([a-z_]+)`|`[^`]*`|(?<![\w./"-])([a-z_]+)(?:=("[^"]*"|\[[^\]]*\]|[\w.]*)|(?=:\d+: | has \d))"""
)


def spelled(text: str) -> str:
    """Returns a message with the caller's names of arguments."""
    spelling = _SPELLING.get()
    if spelling is None:
        return text

    def replaced(found: re.Match[str]) -> str:
        key, name, value = found.groups()
        if key is not None:
            return spelling(key, "")
        if name is None:
            return found[0]
        return spelling(name, value) if value is not None else spelling(name, "").removesuffix("=")

    return _ARGUMENT.sub(replaced, text)


@contextmanager
def naming(spelling: Spelling) -> Iterator[None]:
    """Errors and warnings that are raised inside spell arguments in this way."""
    token = _SPELLING.set(spelling)
    try:
        yield
    except QuantError as error:
        reword(error, spelled(error.message), spelled(error.remedy))
        raise
    except TypeError as error:
        error.args = tuple(spelled(one) if isinstance(one, str) else one for one in error.args)
        raise
    finally:
        _SPELLING.reset(token)
