"""AWQ by llm-compressor on the calibration tokens of `quant`, timed.

    llm_compressor_awq.py MODEL OUT --calibration FILE --samples N --seq-len L
        --group-size G|channel [--channel NAME]... [--dtype float32|bfloat16|float16]
        [--tokens-sha256 HEX] [--threads N] --result FILE

Its own defaults throughout: duo scaling, 20 ratios, its mappings for the architecture, the
min-max observer, one window a batch, the sequential pipeline. Weights have 4 bits, symmetric;
linears whose name ends in NAME are quantized per channel whatever G is; the head stays float.

FILE gets the seconds of loading, of the call to `oneshot` and of saving, the process's peak
memory before the work and after it, and the versions. With --tokens-sha256 the windows must have
that digest.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("model", type=Path)
parser.add_argument("out", type=Path)
parser.add_argument("--calibration", required=True)
parser.add_argument("--samples", type=int, required=True)
parser.add_argument("--seq-len", type=int, required=True)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--group-size", required=True)
parser.add_argument("--channel", action="append", default=[], metavar="NAME")
parser.add_argument("--dtype", default="float32")
parser.add_argument("--tokens-sha256")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--result", type=Path, required=True)
args = parser.parse_args()

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
for name in ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"]:
    os.environ[name] = str(args.threads)

import torch  # noqa: E402
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # noqa: E402
from llmcompressor import oneshot  # noqa: E402
from llmcompressor.modifiers.quantization import QuantizationModifier  # noqa: E402
from llmcompressor.modifiers.transform.awq import AWQModifier  # noqa: E402
from llmcompressor.pipelines.cache import IntermediatesCache  # noqa: E402
from safetensors import safe_open  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: E402

import calibration_windows  # noqa: E402

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load():
    """The model, whose every tensor is that of the checkpoint: a load that went well proves nothing,
    what is missing is filled with random numbers."""
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    stored = {}
    for file in sorted(args.model.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            stored |= {name: tensors.get_tensor(name) for name in tensors.keys()}
    if model.config.tie_word_embeddings and EMBEDDING not in stored:
        # Tied checkpoints may hold the shared matrix under the head's name only.
        with torch.no_grad():
            model.get_input_embeddings().weight.copy_(stored[HEAD])
        model.tie_weights()
        stored[EMBEDDING] = stored[HEAD]
    loaded = model.state_dict()
    if model.config.tie_word_embeddings:
        stored[HEAD] = stored[EMBEDDING]
    assert stored.keys() == loaded.keys(), stored.keys() ^ loaded.keys()
    for name, tensor in stored.items():
        assert torch.equal(loaded[name], tensor.to(loaded[name].dtype)), name
    return model


def grid(group_size):
    """The number format of the weights."""
    if group_size == "channel":
        return QuantizationArgs(num_bits=4, symmetric=True, strategy="channel")
    return QuantizationArgs(num_bits=4, symmetric=True, strategy="group", group_size=int(group_size))


def recipe():
    """Its recipe for AWQ: search the scales, then quantize."""
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=grid(args.group_size))}
    if args.channel:
        targets = [f"re:.*{name}$" for name in args.channel]
        groups["group_1"] = QuantizationScheme(targets=targets, weights=grid("channel"))
    return [AWQModifier(), QuantizationModifier(config_groups=groups, ignore=["lm_head"])]


def peak_bytes():
    """The high-water mark of resident memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


# It pins cached inputs for a GPU whether there is one or not, and fails without a driver.
IntermediatesCache.pin_memory = lambda *_: None
torch.set_num_threads(args.threads)

tokenizer_file = args.model / "tokenizer.json"
windows = calibration_windows.sample(
    tokenizer_file, args.calibration, args.samples, args.seq_len, args.seed)
digest = calibration_windows.sha256(windows)
assert args.tokens_sha256 in (None, digest), f"tokens {digest}, {args.tokens_sha256} expected"
batches = DataLoader([{"input_ids": torch.tensor([w])} for w in windows], batch_size=None)
imported_bytes = peak_bytes()

start = time.perf_counter()
model = load()
loaded = time.perf_counter()
oneshot(
    model=model, processor=PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file)),
    dataset=batches, recipe=recipe(), num_calibration_samples=args.samples,
    max_seq_length=args.seq_len)
called = time.perf_counter()
model.save_pretrained(args.out, save_compressed=True)
saved = time.perf_counter()
# Byte for byte the model's, so that evaluators see the same tokenizer.
shutil.copy(tokenizer_file, args.out)

packages = ["llmcompressor", "compressed-tensors", "transformers", "torch"]
args.result.write_text(json.dumps({
    "tokens_sha256": digest,
    "load_seconds": loaded - start,
    "oneshot_seconds": called - loaded,
    "save_seconds": saved - called,
    "imported_bytes": imported_bytes,
    "peak_bytes": peak_bytes(),
    "threads": torch.get_num_threads(),
    "versions": {name: importlib.metadata.version(name) for name in packages},
}, indent=2))
