"""Fixtures: the demo model, cut to a few blocks, and its quantized form."""

from __future__ import annotations

import hashlib
import json
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

# Background jobs of a shell start with SIGINT ignored, and so do their child processes.
signal.signal(signal.SIGINT, signal.default_int_handler)

BLOCKS = 3
#: Small calibration settings: just enough data for a search.
QUICK = {"samples": 4, "seq_len": 64}


def digests(directory: str | Path) -> dict[str, str]:
    """Returns the SHA-256 of every file in a directory by its relative path."""
    files = [path for path in Path(directory).rglob("*") if path.is_file()]
    assert files
    return {str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def read_safetensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Returns the tensors of a file by name: type, shape and bytes."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = data[8 + length :]
    return {
        name: (info["dtype"], info["shape"], body[info["data_offsets"][0] : info["data_offsets"][1]])
        for name, info in header.items()
    }


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    header, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, cut to its first blocks."""
    directory = tmp_path_factory.mktemp("model") / "demo-model"
    command = [sys.executable, "-m", "fewbits", "demo", "--save-model", str(directory)]
    subprocess.run(command, check=True, capture_output=True)
    config = json.loads((directory / "config.json").read_text())
    assert config["num_hidden_layers"] > BLOCKS
    config["num_hidden_layers"] = BLOCKS
    (directory / "config.json").write_text(json.dumps(config))
    weights = directory / "model.safetensors"
    kept = {
        name: tensor
        for name, tensor in read_safetensors(weights).items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < BLOCKS
    }
    write_safetensors(weights, kept)
    return directory


@pytest.fixture(scope="session")
def rtn(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import fewbits

    out = tmp_path_factory.mktemp("rtn") / "out"
    fewbits.quantize(model, out, method="rtn")
    return out
