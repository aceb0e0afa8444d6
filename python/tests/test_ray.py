"""The units of a job on a Ray cluster, with failures and a node that is lost. Runs only where Ray is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import digests

ray = pytest.importorskip("ray")

import fewbits
import fewbits.ray


#: A program that takes the place of the command line: results are files, and some units fail the first time.
PROGRAM = """
import json, os, signal, sys, time
arguments = sys.argv[1:]
store = arguments[2]
names = [("forward/%d/%d" % (s, g), ["forward/%d/%d" % (s, g - 1)] if g else []) for s in range(2) for g in range(3)]
names += [("blocks/%d" % g, ["forward/%d/%d" % (s, g - 1) for s in range(2)] if g else []) for g in range(4)]
cost = {"seconds": 1.0, "memory_bytes": 50 << 20, "smallest_budget_bytes": 20 << 20}
units = [{"id": unit, "needs": needs, **cost} for unit, needs in names]
result = lambda unit: os.path.join(store, "units", unit.replace("/", "-"))
if arguments[1] == "units":
    print(json.dumps({"units": units}))
elif arguments[1] == "status":
    state = lambda unit: "done" if os.path.exists(result(unit)) else "ready"
    print(json.dumps({"units": [{"unit": unit["id"], "state": state(unit["id"])} for unit in units]}))
else:
    unit = arguments[arguments.index("--unit") + 1]
    assert all(map(os.path.exists, map(result, dict(names)[unit])))
    attempts = os.path.join(store, "attempts", unit.replace("/", "-"))
    os.makedirs(attempts, exist_ok=True)
    first = not os.listdir(attempts)
    with open(os.path.join(attempts, str(os.getpid())), "w") as file:
        json.dump(arguments, file)
    if os.path.exists(os.path.join(store, "broken")) and unit == "blocks/1":
        sys.exit(6)
    if unit == "blocks/0" and first:
        sys.exit(5)
    if unit == "blocks/2" and first:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30 if unit == "blocks/3" and first else 0.5)
    open(result(unit), "w").close()
"""


@pytest.fixture
def cluster() -> Any:
    from ray.cluster_utils import Cluster

    # Tasks import this package on their nodes.
    places = [str(Path(fewbits.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.workers = [made.add_node(num_cpus=1, memory=4 << 30) for _ in range(3)]
    ray.init(address=made.address)
    yield made
    ray.shutdown()
    made.shutdown()


def lose_a_node(cluster: Any, results: Path) -> threading.Thread:
    """Removes a node as soon as there is a result."""

    def lose() -> None:
        while not list(results.iterdir()):
            time.sleep(0.05)
        cluster.remove_node(cluster.workers[0], allow_graceful=False)

    thread = threading.Thread(target=lose)
    thread.start()
    return thread


def test_failures_are_repeated_or_end_the_run(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "units").mkdir()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program)]
    killer = lose_a_node(cluster, tmp_path / "units")
    seen: list[int] = []
    summary = fewbits.ray.run(
        tmp_path, command=command, retry_seconds=1, progress=lambda done, _: seen.append(done)
    )
    killer.join()
    assert seen == list(range(1, 11)) and len(summary.seconds) == 10 and summary.existed == 0
    # blocks/0 ended with exit code 5, blocks/2 was killed, and the slow blocks/3 was started twice.
    assert summary.retries == 2 and summary.duplicates >= 1
    attempts = [json.loads(file.read_text()) for file in (tmp_path / "attempts/blocks-2").iterdir()]
    budgets = sorted(arguments[arguments.index("--memory-budget") + 1] for arguments in attempts)
    assert budgets == ["23MiB", "56MiB"]
    again = fewbits.ray.run(tmp_path, command=command)
    assert again.existed == 10 and not again.seconds
    (tmp_path / "units/blocks-1").unlink()
    (tmp_path / "broken").touch()
    with pytest.raises(fewbits.ray.JobFailed) as caught:
        fewbits.ray.run(tmp_path, command=command)
    assert (caught.value.unit, caught.value.code) == ("blocks/1", 6)


def quant(*arguments: object) -> None:
    command = [sys.executable, "-m", "fewbits", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True)


def test_a_lost_node_changes_nothing(cluster: Any, model: Path, tmp_path: Path) -> None:
    fewbits.quantize(model, tmp_path / "whole", samples=8, seq_len=512)
    store = tmp_path / "store"
    quant("job", "init", model, "--job", store, "--samples", 8, "--seq-len", 512, "--forward-shards", 2)
    killer = lose_a_node(cluster, store / "units")
    seen: list[tuple[int, int]] = []
    summary = fewbits.ray.run(store, retry_seconds=1, progress=lambda done, total: seen.append((done, total)))
    killer.join()
    assert seen[-1][0] == seen[-1][1] == len(summary.seconds) + summary.existed
    again = fewbits.ray.run(store)
    assert again.existed == seen[-1][1] and not again.seconds
    quant("merge", store, "-o", tmp_path / "out")
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
