from collections.abc import Callable, Sequence
from os import PathLike
from typing import Final, final

__all__ = ["Model", "__version__", "cli", "run", "text_worker"]

__version__: Final[str]

def cli(arguments: Sequence[str], code: str | PathLike[str], python: str | PathLike[str] | None) -> int: ...
def text_worker() -> int: ...
def run(
    kind: str,
    request: str,
    rows: Sequence[str] | None,
    on_event: Callable[[str, str], object] | None,
    code: str | PathLike[str],
    python: str | PathLike[str] | None,
    threads: int | None = None,
    estimate: bool = False,
) -> str: ...

@final
class Model:
    about: str
    def __new__(
        cls,
        request: str,
        on_event: Callable[[str, str], object] | None,
        code: str | PathLike[str],
        python: str | PathLike[str] | None,
        threads: int | None = None,
    ) -> Model: ...
    def ask(
        self,
        kind: str,
        request: str,
        on_event: Callable[[str, str], object] | None,
        code: str | PathLike[str],
        python: str | PathLike[str] | None,
        threads: int | None = None,
    ) -> str: ...
