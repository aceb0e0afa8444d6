"""A job of the real program in an S3 store, and an evaluation in shards: two workers each, one of which is killed while
it works.

    python tests/store/check.py QUANT

The store is moto's server, which refuses conditional writes to names that exist. Between the program and moto is a
proxy that counts requests, and can lose answers or stop answering. The merged checkpoint must have the bytes of the one
that `quant quantize` writes, and the merged evaluation the numbers of `quant eval` in one process.
"""

import contextlib
import http.client
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from pathlib import Path

CALIBRATION = ["--samples", "32", "--seq-len", "256"]
BUCKET = "jobs"
STORE = f"s3://{BUCKET}/team/awq"
SHARDS = f"s3://{BUCKET}/team/eval"
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on to moto."""

    daemon_threads = True

    def __init__(self, upstream: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream = upstream
        self.lock = threading.Lock()
        #: Method and path of every request, and the status of the answer.
        self.log: list[tuple[str, str, int]] = []
        #: The number of answers to conditional writes to lose.
        self.lose = 0
        #: Whether all requests are denied.
        self.deny = False
        #: Set while requests stay without answer.
        self.silent = threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        # A program that was killed or interrupted does not wait for its answer.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def count(self, method: str, part: str, status: int | None = None) -> int:
        return sum(m == method and part in p and status in (None, s) for m, p, s in self.log)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def pass_on(self) -> None:
        server: Proxy = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        while server.silent.is_set():
            time.sleep(0.1)
        if server.deny:
            body = f"<Error><Code>AccessDenied</Code><Message>No.</Message><Key>{SECRET}</Key></Error>".encode()
            self.send_response_only(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if self.command != "HEAD" else b"")
            return
        upstream = http.client.HTTPConnection("127.0.0.1", server.upstream)
        upstream.request(self.command, self.path, body=body or None, headers=dict(self.headers))
        answer = upstream.getresponse()
        content = answer.read()
        lost = False
        with server.lock:
            server.log.append((self.command, self.path, answer.status))
            if server.lose and self.headers.get("If-None-Match") == "*" and answer.status == 200:
                server.lose -= 1
                lost = True
        if lost:
            # The object is written, but the client does not learn it.
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on

    def log_message(self, *arguments: object) -> None:
        pass


class Bench:
    def __init__(self, program: Path, scratch: Path) -> None:
        self.program, self.scratch = program, scratch
        self.moto_port = free_port()
        log = (scratch / "moto.log").open("wb")
        command = [Path(sys.executable).with_name("moto_server"), "-H", "127.0.0.1", "-p", str(self.moto_port)]
        self.moto = subprocess.Popen(command, stdout=log, stderr=log)
        self.proxy = Proxy(self.moto_port)
        threading.Thread(target=self.proxy.serve_forever, daemon=True).start()
        self.copies = scratch / "copies"
        self.copies.mkdir()
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
            "AWS_ENDPOINT": f"http://127.0.0.1:{self.proxy.server_port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "TMPDIR": str(self.copies),
        }
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                self.put(f"/{BUCKET}", b"")
                break
            if time.monotonic() > end:
                raise SystemExit((scratch / "moto.log").read_text())
            time.sleep(0.2)

    def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """A request without the proxy."""
        connection = http.client.HTTPConnection("127.0.0.1", self.moto_port)
        headers = {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"}
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()

    def put(self, path: str, body: bytes) -> None:
        status, text = self.request("PUT", path, body)
        assert status == 200, text

    def get(self, path: str) -> bytes:
        status, body = self.request("GET", path)
        assert status == 200, (path, body)
        return body

    def start(self, *words: object, environment: dict[str, str] | None = None) -> subprocess.Popen:
        command = [self.program, *map(str, words)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment or self.environment)

    def run(self, *words: object, code: int = 0, environment: dict[str, str] | None = None) -> str:
        process = self.start(*words, environment=environment)
        out, err = process.communicate(timeout=600)
        assert process.returncode == code, f"{words} ended with {process.returncode}, not {code}: {out}{err}"
        assert SECRET not in out + err, "a secret was printed"
        return out + err

    def status(self) -> dict:
        process = self.start("job", "status", STORE, "--json")
        out, err = process.communicate()
        assert process.returncode == 0, err
        return json.loads(out)

    def results(self) -> list[str]:
        status = self.status()
        return [unit["file"] for unit in status["units"] if unit["file"]]


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def two_workers(bench: Bench) -> None:
    """One of two workers is killed as soon as something of it is in the store. The other does everything."""
    killed = bench.start("job", "run", STORE, "--threads", "1")
    while bench.proxy.count("PUT", "/parts/") < 3:
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.05)
    other = bench.start("job", "run", STORE, "--threads", "1")
    while bench.proxy.count("PUT", "/units/") < 4:
        assert killed.poll() is None and other.poll() is None
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    out, err = other.communicate(timeout=600)
    assert other.returncode == 0, err
    print("the worker that was not killed:", out.strip())


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(sys.argv[1]).resolve(), Path(scratch))
        try:
            check(bench, Path(scratch))
        finally:
            bench.proxy.silent.clear()
            bench.moto.terminate()
            bench.moto.wait()


def check(bench: Bench, scratch: Path) -> None:
    model, whole, out = (scratch / name for name in ("model", "whole", "out"))
    bench.run("demo", "--save-model", model)
    bench.run("quantize", model, "-o", whole, *CALIBRATION)
    init = ["job", "init", model, "--job", STORE, *CALIBRATION, "--forward-shards", "2"]

    # Answers are lost: the next attempt finds the objects that were written.
    bench.proxy.lose = 3
    assert "created" in bench.run(*init) or bench.proxy.lose == 0
    assert bench.proxy.lose == 0
    assert bench.proxy.count("PUT", "/team/awq/", 412) >= 3
    assert "exists already" in bench.run(*init)
    early = bench.run("merge", STORE, "-o", out, code=5)
    assert "not finished" in early, early

    two_workers(bench)
    status = bench.status()
    assert (status["done"], status["other_files"]) == (status["total"], []), status
    assert "0 units computed" in bench.run("job", "run", STORE)

    # A damaged part and a missing one are computed again.
    for name, change in zip(bench.results()[-2:], (lambda b: b[:-1] + bytes([b[-1] ^ 1]), None)):
        manifest = json.loads(bench.get(f"/{BUCKET}/team/awq/units/{name}"))
        part = f"/{BUCKET}/team/awq/parts/{manifest['parts'][1]['sha256']}"
        if change:
            bench.put(part, change(bench.get(part)))
        else:
            assert bench.request("DELETE", part)[0] == 204
    damaged = bench.run("merge", STORE, "-o", out, code=5)
    assert "is damaged" in damaged and "compute it again" in damaged, damaged
    assert "2 units computed" in bench.run("job", "run", STORE)
    assert len(bench.status()["other_files"]) == 2

    # A request without an answer does not delay Ctrl-C.
    bench.proxy.silent.set()
    stuck = bench.start("job", "run", STORE)
    time.sleep(3)
    assert stuck.poll() is None
    started = time.monotonic()
    stuck.send_signal(signal.SIGINT)
    _, err = stuck.communicate(timeout=60)
    assert stuck.returncode == 75 and f"job run {STORE}" in err, (stuck.returncode, err)
    print(f"stopped {time.monotonic() - started:.1f} s after Ctrl-C")
    bench.proxy.silent.clear()

    bench.run("merge", STORE, "-o", out)
    assert files(out) == files(whole), "the merged checkpoint differs"

    # The other workers have removed what the killed one left.
    left = [path.name for path in bench.copies.iterdir()]
    assert all(name.startswith("quant-job-") for name in left), left
    # A worker that was killed before it locked its directory leaves one that counts as abandoned after a week.
    for path in [*bench.copies.rglob("*"), *bench.copies.iterdir()]:
        os.utime(path, (time.time() - 8 * 24 * 3600,) * 2)
    bench.run("job", "run", STORE, "--unit", "outside")
    left = [path.name for path in bench.copies.iterdir()]
    assert not left, left

    evaluation(bench, model, out)
    errors(bench, model)
    print(f"{len(bench.proxy.log)} requests; the merged checkpoint is that of one process")


def evaluation(bench: Bench, model: Path, out: Path) -> None:
    """An evaluation in three shards. A worker is killed after its first batch, and answers to writes are lost."""
    words = ["eval", out, "--text", "builtin-heldout", "--window", "64", "--windows", "200", "--reference", model]
    shards = [*words, "--shards", SHARDS]

    def numbers(*words: object) -> dict:
        result = bench.scratch / "result.json"
        bench.run(*words, f"--json={result}")
        timing = ("seconds", "tokens_per_second", "sha256")
        return {key: value for key, value in json.loads(result.read_text()).items() if key not in timing}

    whole = numbers(*words)
    assert "has no shards" in bench.run(*shards, code=5)
    killed = bench.start(*shards, "--shard", "0/3", "--threads", "1")
    while not bench.proxy.count("PUT", "/team/eval/0-of-3.0.journal", 200):
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    bench.run(*shards, "--shard", "1/3")
    bench.proxy.lose = 2
    bench.run(*shards, "--shard", "2/3")
    assert bench.proxy.lose == 0
    early = bench.run(*shards, code=5)
    assert "1 shard not finished: 0/3" in early, early
    assert "of 64 windows have already been measured" in bench.run(*shards, "--shard", "0/3")
    assert numbers(*shards) == whole, "the merged evaluation differs"
    # A damaged file, and one of a different evaluation.
    path = f"/{BUCKET}/team/eval/2-of-3.128.journal"
    right = bench.get(path)
    for wrong, code, says in [(right[:-9] + b"\n", 2, "damaged"), (right.replace(b"64", b"65", 1), 2, "evaluation")]:
        bench.put(path, wrong)
        text = bench.run(*shards, code=code)
        assert says in text and "2-of-3.128.journal" in text, text
    bench.put(path, right)
    assert numbers(*shards) == whole
    print("the merged evaluation is that of one process")


def errors(bench: Bench, model: Path) -> None:
    """What a user sees who has something wrong."""
    environment = bench.environment

    def refused(code: int, says: str, url: str = STORE, **changed: str | None) -> None:
        variables = {k: v for k, v in {**environment, **changed}.items() if v is not None}
        started = time.monotonic()
        text = bench.run("job", "status", url, code=code, environment=variables)
        assert says in text, (says, text)
        print(f"  {time.monotonic() - started:.1f} s: {text.strip().splitlines()[0]}")

    refused(2, "is not a job", f"s3://{BUCKET}/nothing")
    refused(2, "s3://", f"s3://{BUCKET}:{SECRET}@x/y")
    refused(5, "AWS_ALLOW_HTTP", AWS_ALLOW_HTTP=None)
    refused(5, "object store", AWS_ENDPOINT=f"http://127.0.0.1:{free_port()}")
    bench.proxy.deny = True
    refused(5, "403")
    text = bench.run("job", "init", model, "--method", "rtn", "--job", f"s3://{BUCKET}/denied", code=5)
    assert "AccessDenied: No." in text and "credentials" in text, text
    bench.proxy.deny = False
    text = bench.run("job", "init", model, "--method", "rtn", "--job", "s3://no-such-bucket/x", code=5)
    assert "NoSuchBucket" in text, text
    print(" ", text.strip().splitlines()[0])


main()
