"""The recipe for Slurm in docs/guide/jobs.md with the real program: three nodes, one of which is killed while it works.

    python tests/slurm/check.py QUANT SLURM

SLURM is a directory with the files of Slurm's packages. The merged checkpoint must have the bytes of the one that `quant
quantize` writes.
"""

import contextlib
import ctypes
import getpass
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs/guide/jobs.md"
NODES = 3
CALIBRATION = ["--samples", "48", "--seq-len", "128"]
#: What the recipe has for a real model, and for the demo model.
SIZES = [
    ("--samples 128 --seq-len 2048 --forward-shards 8", " ".join([*CALIBRATION, "--forward-shards", "3"])),
    ("--array=0-7", "--array=0-2"),
    ("--array=0-15", "--array=0-5"),
    ("--cpus-per-task=16 --mem=16G", "--cpus-per-task=1"),
    (" --memory-budget 14GiB", " --threads 1"),
]
#: Slurm holds a job for two minutes before it runs again on another node.
LIMIT_SECONDS = 900
PR_SET_CHILD_SUBREAPER = 36


def scripts(directory: Path) -> None:
    """Writes the scripts of the guide: `submit.sh`, `forward.sh` and `blocks.sh`."""
    section = re.search(r"\n## Slurm\n(.*?)\n## ", GUIDE.read_text(), re.DOTALL).group(1)
    submit, forward = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    for real, demo in SIZES:
        assert real in submit + forward, f"the guide has no `{real}`"
        submit, forward = (text.replace(real, demo) for text in (submit, forward))
    assert "--phase forward" in forward
    blocks = forward.replace("--phase forward", "--phase blocks")
    for name, text in {"submit.sh": submit, "forward.sh": forward, "blocks.sh": blocks}.items():
        (directory / name).write_text(text)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Cluster:
    """A controller and nodes, each a daemon of this machine."""

    def __init__(self, packages: Path, directory: Path) -> None:
        self.directory, self.packages = directory, packages
        libraries = packages / "usr/lib/x86_64-linux-gnu"
        plugins = libraries / "slurm-wlm"
        paths = [libraries, packages / "lib/x86_64-linux-gnu", plugins]
        # The programs look for each other under their names after installation.
        programs = directory / "bin"
        programs.mkdir()
        for program in [*(packages / "usr/bin").iterdir(), *(packages / "usr/sbin").iterdir()]:
            (programs / program.name.removesuffix("-wlm")).symlink_to(program)
        self.environment = {
            **os.environ,
            "LD_LIBRARY_PATH": ":".join(map(str, paths)),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "SLURM_CONF": str(directory / "slurm.conf"),
        }
        ports = free_ports(NODES + 1)
        for name in ("state", "spool", "log"):
            (directory / name).mkdir()
        lines = [
            "ClusterName=quant",
            f"SlurmctldHost={socket.gethostname()}(127.0.0.1)",
            f"SlurmctldPort={ports[0]}",
            f"SlurmUser={getpass.getuser()}",
            f"SlurmdUser={getpass.getuser()}",
            "AuthType=auth/none",
            "CredType=cred/none",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "MpiDefault=none",
            "MailProg=/bin/true",
            f"PluginDir={plugins}",
            f"StateSaveLocation={directory}/state",
            f"SlurmctldPidFile={directory}/slurmctld.pid",
            f"SlurmctldLogFile={directory}/log/slurmctld",
            f"SlurmdSpoolDir={directory}/spool/%n",
            f"SlurmdPidFile={directory}/%n.pid",
            f"SlurmdLogFile={directory}/log/%n",
            # A node that does not answer for this long is down.
            "SlurmdTimeout=15",
            "ReturnToService=2",
            "SchedulerType=sched/backfill",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
        ]
        for node, port in enumerate(ports[1:]):
            (directory / f"spool/node{node}").mkdir()
            lines.append(f"NodeName=node{node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=1")
        lines.append(f"PartitionName=all Nodes=node[0-{NODES - 1}] Default=YES MaxTime=INFINITE State=UP")
        (directory / "slurm.conf").write_text("\n".join(lines) + "\n")
        self.controller: subprocess.Popen | None = None
        self.nodes: list[subprocess.Popen] = []

    def begin(self) -> None:
        """Starts the daemons and waits for them."""
        step = str(self.directory / "bin/slurmstepd")
        self.controller = self.start("slurmctld", "-D")
        for node in range(NODES):
            self.nodes.append(self.start("slurmd", "-D", "-d", step, "-N", f"node{node}"))
        self.wait(lambda: self.run("sinfo", "-h", "-o", "%t %D").split() == ["idle", str(NODES)], 60, "the nodes are not idle")

    def start(self, program: str, *arguments: str) -> subprocess.Popen:
        """Starts a daemon whose descendants stay in its tree when their own parents end."""
        log = (self.directory / f"log/{program}.out").open("ab")
        adopt = lambda: ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        command = [str(self.directory / "bin" / program), *arguments]
        return subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, preexec_fn=adopt)

    def run(self, *command: object, check: bool = True, cwd: Path | None = None) -> str:
        done = subprocess.run([*map(str, command)], env=self.environment, capture_output=True, text=True, cwd=cwd)
        if check and done.returncode:
            self.fail(f"{command} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def fail(self, reason: str) -> None:
        for log in sorted((self.directory / "log").iterdir()):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}")
        raise SystemExit(reason)

    def wait(self, is_so, seconds: float, reason: str) -> None:
        end = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > end:
                self.fail(reason)
            time.sleep(0.1)

    def running(self) -> dict[str, str]:
        """The array elements that run, by node."""
        lines = self.run("squeue", "-h", "-t", "R", "-o", "%N %j").splitlines()
        return dict(line.split(maxsplit=1) for line in lines)

    def kill(self, node: int) -> None:
        """Ends a node with all that runs on it, as a loss of power does."""
        kill_tree(self.nodes[node])

    def stop(self) -> None:
        for daemon in filter(None, [self.controller, *self.nodes]):
            kill_tree(daemon)


def kill_tree(process: subprocess.Popen) -> None:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(pid)
    tree = [process.pid]
    for pid in tree:
        tree.extend(children.get(pid, []))
    for pid in tree:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def main() -> None:
    program, packages = (Path(argument).resolve() for argument in sys.argv[1:])
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        model, store, whole, out = (scratch / name for name in ("model", "store", "whole", "out"))
        cluster_directory = scratch / "slurm"
        cluster_directory.mkdir()
        cluster = Cluster(packages, cluster_directory)
        try:
            cluster.begin()
            (cluster_directory / "bin/quant").symlink_to(program)
            cluster.run("quant", "demo", "--save-model", model, "--quiet")
            cluster.run("quant", "quantize", model, "-o", whole, *CALIBRATION, "--quiet")
            scripts(scratch)
            submit = (scratch / "submit.sh").read_text().replace("MODEL", str(model)).replace(" OUT", f" {out}")
            cluster.environment["STORE"] = str(store)
            began = time.monotonic()
            cluster.run("bash", "-euc", submit, cwd=scratch)

            units = lambda: list((store / "units").glob("blocks-*.safetensors"))
            cluster.wait(units, LIMIT_SECONDS, "no unit of the second phase was computed")
            cluster.wait(lambda: "blocks.sh" in cluster.running().values(), 60, "nothing runs in the second phase")
            node = next(int(node.removeprefix("node")) for node, job in cluster.running().items() if job == "blocks.sh")
            cluster.kill(node)
            killed_after = len(units())

            cluster.wait(out.exists, LIMIT_SECONDS, f"no checkpoint after {LIMIT_SECONDS} s:\n" + cluster.run("squeue"))
            seconds = time.monotonic() - began
            restarts = [int(n) for n in re.findall(r"Restarts=(\d+)", cluster.run("scontrol", "show", "job"))]
            version = cluster.run("sinfo", "--version").strip()
        finally:
            cluster.stop()
        total = len(units())
        assert killed_after < total, f"the node was killed after {killed_after} of {total} units"
        assert sum(restarts) > 0, "no job was started again"
        assert files(out) == files(whole), "the checkpoints differ"
        print(
            f"{version}: {total} units of blocks on {NODES} nodes in {seconds:.0f} s; one node was killed after "
            f"{killed_after} units; {sum(restarts)} restarts; equal bytes"
        )


if __name__ == "__main__":
    main()
