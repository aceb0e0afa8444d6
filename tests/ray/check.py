"""A job of the real program on a Ray cluster: three nodes, one of which is killed while it works.

    python tests/ray/check.py QUANT

The merged checkpoint must have the bytes of the one that `quant quantize` writes.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

ROOT = Path(__file__).resolve().parents[2]
CALIBRATION = ["--samples", "16", "--seq-len", "256"]
NODES = 3


def driver():
    """The module `fewbits.ray` without the rest of the package, which has to be compiled."""
    spec = importlib.util.spec_from_file_location("fewbits_ray", ROOT / "python/fewbits/ray.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    # The nodes cannot import it.
    ray.cloudpickle.register_pickle_by_value(module)
    return module


def quant(program: Path, *words: object) -> None:
    done = subprocess.run([program, *map(str, words), "--quiet"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{words} ended with {done.returncode}: {done.stderr}")


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def main() -> None:
    program = Path(sys.argv[1]).resolve()
    module = driver()
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        model, store, whole, out = (scratch / name for name in ("model", "store", "whole", "out"))
        quant(program, "demo", "--save-model", model)
        quant(program, "quantize", model, "-o", whole, *CALIBRATION)
        quant(program, "job", "init", model, "--job", store, *CALIBRATION, "--forward-shards", "3")

        # The head only drives. Ray notices a lost node after the threshold.
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        nodes = [cluster.add_node(num_cpus=1, memory=4 << 30) for _ in range(NODES)]
        ray.init(address=cluster.address, log_to_driver=False)
        killed = []

        def kill() -> None:
            while not list((store / "units").glob("blocks-*.safetensors")):
                time.sleep(0.05)
            cluster.remove_node(nodes[0], allow_graceful=False)
            killed.append(len(list((store / "units").iterdir())))

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        began = time.monotonic()
        summary = module.run(store, command=[str(program)], retry_seconds=1.0)
        seconds = time.monotonic() - began
        killer.join(timeout=30)
        again = module.run(store, command=[str(program)])
        ray.shutdown()
        cluster.shutdown()

        total = len(summary.seconds)
        assert killed and killed[0] < total, f"the node was killed after {killed} of {total} units"
        assert (again.seconds, again.existed) == ({}, total), again
        quant(program, "merge", store, "-o", out)
        assert files(out) == files(whole), "the checkpoints differ"
        print(
            f"ray {ray.__version__}: {total} units on {NODES} nodes in {seconds:.1f} s; one node was killed after "
            f"{killed[0]} units; {summary.retries} retries, {summary.duplicates} duplicates; equal bytes"
        )


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    main()
