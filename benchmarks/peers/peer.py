"""The common code of the scripts that run a quantizer: options, the model, and the result.

    SCRIPT MODEL OUT --method NAME --calibration FILE --samples N --seq-len L
        [--seed N] [--bits B] [--group-size G|channel] [--channel NAME]... [--dtype float32|bfloat16|float16]
        [--set OPTION=VALUE]... [--tokens-sha256 HEX] [--threads N] --result FILE

Weights are symmetric. Linear layers whose name ends in NAME are quantized per channel regardless of G. The head is not
quantized. --set gives a method's other options; everything else is the peer's own default.

The result is the seconds of loading, of the quantizing call and of saving; the process's peak memory before and after
the work; the number of threads; and the versions. With --tokens-sha256, the windows must have that digest.

Call `arguments` before importing torch, which reads the number of threads when it is loaded.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import calibration_windows

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def arguments(description, methods):
    """Parses the options, and sets the environment accordingly."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--method", required=True, choices=methods)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", default="channel")
    parser.add_argument("--channel", action="append", default=[], metavar="NAME")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE")
    parser.add_argument("--tokens-sha256")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    args.settings = dict(pair.split("=", 1) for pair in args.set)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for name in ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"]:
        os.environ[name] = str(args.threads)
    return args


def windows(args):
    """Returns the calibration windows. If the digest of those of `quant` is given, they must match it."""
    sampled = calibration_windows.sample(
        args.model / "tokenizer.json", args.calibration, args.samples, args.seq_len, args.seed)
    digest = calibration_windows.sha256(sampled)
    assert args.tokens_sha256 in (None, digest), f"the windows have digest {digest}, expected {args.tokens_sha256}"
    return sampled


def stored_tensors(directory):
    """Returns all tensors of a checkpoint by name."""
    from safetensors import safe_open

    stored = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            stored |= {name: tensors.get_tensor(name) for name in tensors.keys()}
    return stored


class Checkpoint:
    """A checkpoint whose shared embedding, if any, is stored under the name that transformers looks for."""

    def __init__(self, model):
        self.directory, self._scratch = model, None
        self.tied = json.loads((model / "config.json").read_text()).get("tie_word_embeddings", False)
        stored = stored_tensors(model)
        if self.tied and EMBEDDING not in stored:
            from safetensors.torch import save_file

            self._scratch = tempfile.TemporaryDirectory()
            self.directory = Path(self._scratch.name)
            for file in model.iterdir():
                if not file.name.endswith((".safetensors", ".safetensors.index.json")):
                    shutil.copy(file, self.directory)
            stored[EMBEDDING] = stored.pop(HEAD)
            save_file(stored, self.directory / "model.safetensors", metadata={"format": "pt"})

    def verify(self, model):
        """Checks that every tensor of a loaded model equals the checkpoint's, because a load succeeds even if tensors are
        missing."""
        import torch

        stored, loaded = stored_tensors(self.directory), model.state_dict()
        if self.tied:
            stored[HEAD] = stored[EMBEDDING]
        assert stored.keys() == loaded.keys(), stored.keys() ^ loaded.keys()
        for name, tensor in stored.items():
            assert torch.equal(loaded[name], tensor.to(loaded[name].dtype)), name


def peak_bytes():
    """Returns the peak resident memory of the process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


class Run:
    """The measurements of a run, which begin after the imports."""

    def __init__(self, args):
        self.args, self.imported_bytes, self.times = args, peak_bytes(), [time.perf_counter()]

    def done(self):
        """Records the end of a step: loading, quantizing or saving."""
        self.times.append(time.perf_counter())

    def finish(self, packages):
        """Writes the result, and copies the model's tokenizer into the written checkpoint byte for byte, so that
        evaluators use the same one."""
        import torch

        shutil.copy(self.args.model / "tokenizer.json", self.args.out)
        load, quantize, save = (b - a for a, b in zip(self.times, self.times[1:]))
        self.args.result.write_text(json.dumps({
            "load_seconds": load,
            "quantize_seconds": quantize,
            "save_seconds": save,
            "imported_bytes": self.imported_bytes,
            "peak_bytes": peak_bytes(),
            "threads": torch.get_num_threads(),
            "versions": {name: importlib.metadata.version(name) for name in packages},
        }, indent=2))
