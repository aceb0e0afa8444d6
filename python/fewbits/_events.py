"""Events of a running job, and their receivers: a callback, a progress bar, warnings."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from fewbits._errors import FewbitsWarning
from fewbits._names import spelled

logger = logging.getLogger("fewbits")


@dataclass(frozen=True)
class Event:
    """Something that happened during a job."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields."""
        return asdict(self)


@dataclass(frozen=True)
class StageStarted(Event):
    """A stage begins. It consists of ``units`` units, each of which ends with a :class:`UnitDone`."""

    #: ``quantize``, ``verify``, ``evaluate`` …
    stage: str
    #: The kind of unit: ``block``, ``tensor``, ``window`` …
    unit: str
    units: int


@dataclass(frozen=True)
class Resumed(Event):
    """An earlier run has finished this many units of the stage."""

    units: int


@dataclass(frozen=True)
class UnitDone(Event):
    """One unit of the stage is done."""

    detail: str


@dataclass(frozen=True)
class StageDone(Event):
    """The stage is over."""


@dataclass(frozen=True)
class StepStarted(Event):
    """A step of a unit begins, such as a search."""

    step: str


@dataclass(frozen=True)
class StepDone(Event):
    """A step took this many seconds. Steps are repeated for every block."""

    step: str
    seconds: float


@dataclass(frozen=True)
class Warned(Event):
    """A problem that does not stop the work."""

    message: str


@dataclass(frozen=True)
class Noted(Event):
    """A remark; ``label`` is ``note``, or ``lost`` for something that a format cannot represent."""

    label: str
    message: str


@dataclass(frozen=True)
class Expected(Event):
    """The expected time of a stage, before it begins."""

    stage: str
    seconds: float


_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        StageStarted,
        Resumed,
        UnitDone,
        StageDone,
        StepStarted,
        StepDone,
        Warned,
        Noted,
        Expected,
    )
}


class Bar:
    """A tqdm bar for each stage."""

    def __init__(self) -> None:
        try:
            from tqdm.auto import tqdm  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError:
            warnings.warn(
                "tqdm is not installed, so no progress is shown; pip install tqdm", FewbitsWarning, stacklevel=5
            )
            tqdm = None
        self._make: Any = tqdm
        self._bar: Any = None

    def __call__(self, event: Event) -> None:
        if self._make is None:
            return
        if isinstance(event, StageStarted):
            self.close()
            self._bar = self._make(total=event.units, desc=event.stage, unit=event.unit)
        elif self._bar is None:
            return
        elif isinstance(event, UnitDone):
            self._bar.set_postfix_str(event.detail, refresh=False)
            self._bar.update(1)
        elif isinstance(event, StepStarted):
            self._bar.set_postfix_str(event.step)
        elif isinstance(event, StageDone):
            self.close()

    def close(self) -> None:
        """Closes the bar of the current stage, if there is one."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class Listener:
    """Receives the events of one job, on the thread that started the job."""

    def __init__(self, on_event: Callable[[Event], object] | None, progress: bool) -> None:
        self._on_event = on_event
        self._bar = Bar() if progress else None

    def __call__(self, kind: str, fields: str) -> None:
        event = _KINDS[kind](**json.loads(fields))
        if isinstance(event, (Warned, Noted)):
            event = replace(event, message=spelled(event.message))
        if isinstance(event, Warned):
            warnings.warn(event.message, FewbitsWarning, stacklevel=4)
        elif isinstance(event, Noted):
            logger.info("%s: %s", event.label, event.message)
        if self._bar is not None:
            self._bar(event)
        if self._on_event is not None:
            self._on_event(event)

    def close(self) -> None:
        """Called after the job, however it ended."""
        if self._bar is not None:
            self._bar.close()
