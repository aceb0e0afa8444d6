"""The units of a job on a Ray cluster, with a node that is lost. Runs only where Ray is installed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import digests

ray = pytest.importorskip("ray")

import fewbits
import fewbits.ray


def quant(*arguments: object) -> None:
    command = [sys.executable, "-m", "fewbits", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True)


def test_a_lost_node_changes_nothing(model: Path, tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    fewbits.quantize(model, tmp_path / "whole", samples=8, seq_len=512)
    store = tmp_path / "store"
    quant("job", "init", model, "--job", store, "--samples", 8, "--seq-len", 512, "--forward-shards", 2)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1, memory=4 << 30) for _ in range(3)]
    ray.init(address=cluster.address)
    try:
        def lose() -> None:
            while not list((store / "units").iterdir()):
                time.sleep(0.05)
            cluster.remove_node(nodes[0], allow_graceful=False)

        killer = threading.Thread(target=lose)
        killer.start()
        seen: list[tuple[int, int]] = []
        summary = fewbits.ray.run(store, retry_seconds=1, progress=lambda done, all: seen.append((done, all)))
        killer.join()
        assert seen[-1][0] == seen[-1][1] == len(summary.seconds) + summary.existed
        again = fewbits.ray.run(store)
        assert again.existed == seen[-1][1] and not again.seconds
        quant("merge", store, "-o", tmp_path / "out")
        assert digests(tmp_path / "out") == digests(tmp_path / "whole")
        # A unit that fails for good ends the run with its exit code.
        damaged = next((store / "units").glob("blocks-0.*.safetensors"))
        damaged.unlink()
        damaged.mkdir()
        with pytest.raises(fewbits.ray.JobFailed) as caught:
            fewbits.ray.run(store)
        assert caught.value.code == 4
    finally:
        ray.shutdown()
        cluster.shutdown()
