"""Runs the units of a job on a Ray cluster (Ray 2.52 or later).

A job is created and merged with the command line; ``run`` only computes its units, each as a Ray task that starts one
process. Results are files in the job's directory, which all nodes must see, so nothing is lost if a task, a node or
this driver ends: run it again.

    $ quant job init MODEL --job STORE --forward-shards 8
    >>> import fewbits.ray
    >>> fewbits.ray.run("STORE", cpus_per_unit=16)
    $ quant merge STORE -o OUT
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fewbits._call import needs

with needs("fewbits.ray", "Ray", "ray"):
    import ray  # type: ignore[import-untyped,import-not-found,unused-ignore]

__all__ = ["JobFailed", "Summary", "run"]

#: Exit codes after which the same unit may succeed: environment and interruption.
_TRANSIENT = frozenset({5, 75})
#: The number of characters kept from the end of a unit's messages.
_MAX_MESSAGE = 4000


class JobFailed(RuntimeError):
    """A unit failed for a reason that a further attempt would not change, or too often; or the job's units could not be
    listed."""

    def __init__(self, unit: str, code: int, message: str) -> None:
        super().__init__(f"unit {unit} ended with exit code {code}: {message.strip()}")
        self.unit, self.code, self.message = unit, code, message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.unit, self.code, self.message)


@dataclass
class Summary:
    """What a run did."""

    #: Units that this run finished, with the seconds that each took on its node.
    seconds: dict[str, float] = field(default_factory=dict)
    #: Units that were finished before.
    existed: int = 0
    #: Attempts that failed and were repeated.
    retries: int = 0
    #: Units that were started a second time because they took unusually long.
    duplicates: int = 0


@dataclass
class _Attempt:
    unit: str
    started: float


def _compute(command: Sequence[str], arguments: Sequence[str]) -> tuple[int, str, float]:
    """Runs a process on a node of the cluster. Returns its exit code, the end of its messages, and its seconds."""
    started = time.monotonic()
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, errors="replace")
    return done.returncode, done.stderr[-_MAX_MESSAGE:], time.monotonic() - started


def _json(command: Sequence[str], *arguments: str) -> Any:
    done = subprocess.run([*command, *arguments, "--json", "--quiet"], capture_output=True, text=True)
    if done.returncode != 0:
        raise JobFailed(" ".join(arguments), done.returncode, done.stderr)
    return json.loads(done.stdout)


def run(
    store: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | None = None,
    command: Sequence[str] | None = None,
    cpus_per_unit: float = 1,
    scratch: str | os.PathLike[str] | None = None,
    max_retries: int = 5,
    retry_seconds: float = 10.0,
    duplicate_from: float = 0.9,
    progress: Callable[[int, int], None] | None = None,
) -> Summary:
    """Computes all units of a job that are not finished, on the cluster that ``ray.init`` connected to.

    Args:
        store: The job's directory, under the same path on all nodes.
        model: A copy of the model, under the same path on all nodes. By default, the model is read where it was when
            the job was created.
        command: The program that created the job, by default ``python -m fewbits``.
        cpus_per_unit: CPUs that a unit uses. Its memory is what the plan predicts.
        scratch: A directory on each node for hidden states that do not fit into memory.
        max_retries: How often a unit is repeated after exit code 5 or 75, or if its process was killed. A unit whose
            node is lost is always repeated.
        retry_seconds: The pause before a unit is repeated.
        duplicate_from: The share of finished units from which a unit that takes longer than twice the median time plus
          ``retry_seconds`` is started a second time, in case its node is slow.
        progress: Called with the numbers of finished units and of all units.

    Returns:
        What was done.

    Raises:
        JobFailed: If a unit fails for good, or the job's units cannot be listed. Finished units are kept.
    """
    command = list(command or [sys.executable, "-m", "fewbits"])
    place = [os.fspath(store)] + (["--model", os.fspath(model)] if model is not None else [])
    units = {unit["id"]: unit for unit in _json(command, "job", "units", *place)["units"]}
    states = _json(command, "job", "status", *place)["units"]
    done = {unit["unit"] for unit in states if unit["state"] == "done"}
    summary = Summary(existed=len(done))
    remote = ray.remote(_compute)
    # When each waiting unit may start, how often units failed, and which of them were killed.
    waiting = {unit: 0.0 for unit in units if unit not in done}
    failures: dict[str, int] = {}
    smaller: set[str] = set()
    running: dict[Any, _Attempt] = {}

    def start(unit: str) -> None:
        cost = units[unit]
        in_files = unit in smaller
        memory = int(cost["smallest_budget_bytes" if in_files else "memory_bytes"])
        arguments = ["job", "run", *place, "--unit", unit, "--quiet", "--threads", str(max(1, int(cpus_per_unit)))]
        # A prediction that is slightly too small should not stop the unit.
        arguments += ["--memory-budget", f"{max(memory, 1 << 20) / (1 << 20) * 1.1 + 1:.0f}MiB"]
        arguments += ["--scratch", os.fspath(scratch)] if scratch is not None else []
        task = remote.options(num_cpus=cpus_per_unit, memory=memory, max_retries=-1, name=f"quant {unit}")
        running[task.remote(command, arguments)] = _Attempt(unit, time.monotonic())

    def start_ready() -> None:
        now = time.monotonic()
        # The longest first, so that no long unit is left at the end.
        for unit in sorted(waiting, key=lambda unit: -float(units[unit]["seconds"])):
            if waiting[unit] <= now and done.issuperset(units[unit]["needs"]):
                del waiting[unit]
                start(unit)

    def start_duplicates() -> None:
        if len(done) < duplicate_from * len(units) or not summary.seconds:
            return
        long = 2 * statistics.median(summary.seconds.values())
        attempts = [attempt.unit for attempt in running.values()]
        for attempt in list(running.values()):
            if attempts.count(attempt.unit) == 1 and time.monotonic() - attempt.started > long + retry_seconds:
                summary.duplicates += 1
                start(attempt.unit)

    def finish(attempt: _Attempt, code: int, message: str, seconds: float) -> None:
        unit = attempt.unit
        if unit in done:
            return
        if code == 0:
            done.add(unit)
            waiting.pop(unit, None)
            summary.seconds[unit] = seconds
            if progress is not None:
                progress(len(done), len(units))
            return
        failures[unit] = failures.get(unit, 0) + 1
        if (code >= 0 and code not in _TRANSIENT) or failures[unit] > max_retries:
            raise JobFailed(unit, code, message)
        if code < 0:
            # Most likely killed for lack of memory.
            smaller.add(unit)
        summary.retries += 1
        waiting[unit] = time.monotonic() + retry_seconds

    try:
        while len(done) < len(units):
            start_ready()
            start_duplicates()
            if not running:
                time.sleep(0.1)
                continue
            ready, _ = ray.wait(list(running), timeout=1.0)
            for reference in ready:
                attempt = running.pop(reference)
                try:
                    code, message, seconds = ray.get(reference)
                except (ray.exceptions.OutOfMemoryError, ray.exceptions.WorkerCrashedError) as error:
                    code, message, seconds = -9, str(error), 0.0
                finish(attempt, code, message, seconds)
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
    return summary
