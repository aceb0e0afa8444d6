"""ONNX Runtime GenAI and mlx-lm load quant's checkpoints, as `quant plan` says, and compute what transformers computes
with the unpacked weights. run_engines.sh calls this script.

    check_engines.py --quant target/debug/quant

The model is the demo model. Its weights are unpacked by quant itself (`--format safetensors --scheme f32`), whose
numbers other checks compare with independent implementations.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = Path(__file__).resolve().parents[2] / "calibration-data/heldout/narrative.txt"
# Relative difference of perplexities. ONNX Runtime rounds activations to 8 bits, mlx-lm all values to 16 bits.
BOUND = 4e-3
HEAD = "nodes_to_exclude=/lm_head/MatMul"
# The engine, the format, other options, and whether it loads.
CASES = [
    ("onnx", "awq", ["--scheme", "w4a16-g32"], True),
    ("onnx", "gptq", ["--scheme", "w4a16-g128-sym"], True),
    ("onnx", "gptq", ["--scheme", "w4a16-g64-asym"], True),
    ("onnx", "gptq", ["--scheme", "w8a16-g64"], True),
    ("onnx", "gptq", ["--scheme", "w2a16-g64"], True),
    ("onnx", "gptq", ["--scheme", "w4a16-channel"], False),
    ("onnx", "gptq", ["--scheme", "w4a16-g64", "--ignore", "layers.0.mlp.down_proj"], False),
    ("onnx", "compressed-tensors", ["--scheme", "w4a16-g32"], False),
    ("mlx", "awq", ["--scheme", "w4a16-g64"], True),
    ("mlx", "compressed-tensors", ["--scheme", "w4a16-g32"], False),
    ("mlx", "gptq", ["--scheme", "w4a16-g64"], False),
]
ENGINES = {"onnx": "ONNX Runtime GenAI", "mlx": "mlx-lm"}


class Refused(Exception):
    """The engine does not load the checkpoint."""


def onnx(checkpoint: Path, tokens: list[int]) -> torch.Tensor:
    import onnxruntime

    built = checkpoint.with_name(f"{checkpoint.name}-onnx")
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", checkpoint, "-o", built, "-p", "int4",
               "-e", "cpu", "-c", checkpoint.with_name("cache"), "--extra_options", HEAD]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise Refused(done.stderr.strip().splitlines()[-1])
    try:
        session = onnxruntime.InferenceSession(str(built / "model.onnx"))
    except Exception as error:
        raise Refused(str(error)) from error
    config = json.loads((checkpoint / "config.json").read_text())
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    inputs = {
        "input_ids": numpy.array([tokens], dtype=numpy.int64),
        "attention_mask": numpy.ones((1, len(tokens)), dtype=numpy.int64),
        "position_ids": numpy.arange(len(tokens), dtype=numpy.int64)[None],
    }
    wanted = session.get_inputs()
    # No keys and values are cached yet.
    empty = numpy.zeros((1, config["num_key_value_heads"], 0, width), dtype=numpy.float32)
    feed = {one.name: inputs.get(one.name, empty) for one in wanted}
    return torch.tensor(session.run(["logits"], feed)[0][0].astype(numpy.float32))


def mlx(checkpoint: Path, tokens: list[int]) -> torch.Tensor:
    import mlx.core
    from mlx_lm import load

    try:
        model, _ = load(str(checkpoint))
        logits = model(mlx.core.array([tokens]))[0].astype(mlx.core.float32)
        return torch.tensor(numpy.array(logits))
    except ValueError as error:
        raise Refused(str(error).splitlines()[0]) from error


def perplexity(logits: torch.Tensor, tokens: list[int]) -> float:
    scores = logits.double().log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])
    return float(torch.exp(-scores.mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quant", required=True)
    quant = parser.parse_args().quant

    def run(*words: object) -> str:
        return subprocess.run([quant, *map(str, words)], check=True, capture_output=True, text=True).stdout

    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        run("demo", "--save-model", model)
        every = AutoTokenizer.from_pretrained(model)(TEXT.read_text()[:20000])["input_ids"]
        for number, (engine, form, options, loads) in enumerate(CASES):
            out = Path(scratch) / f"{number}"
            words = ["--method", "rtn", "--format", form, *options]
            plan = json.loads(run("plan", model, *words, "--json"))
            verdicts = [one["ranks"][0]["loads"] for one in plan["formats"][0]["engines"] if one["engine"] == ENGINES[engine]]
            assert verdicts, plan["formats"][0]["engines"]
            assert all(verdict.startswith("yes") == loads for verdict in verdicts), (engine, words, verdicts)
            run("quantize", model, "-o", out, "--quiet", *words)
            # mlx-lm takes seconds for every few tokens on a CPU.
            tokens = every[:256] if engine == "onnx" else every[:64]
            try:
                logits = {"onnx": onnx, "mlx": mlx}[engine](out, tokens)
            except Refused as refused:
                assert not loads, f"{engine} {words}: {refused}"
                print(f"{ENGINES[engine]}, {' '.join(words)}: does not load, as planned ({str(refused)[:120]})")
                continue
            assert loads, f"{engine} loads {words}, but quant plan says that it does not"
            unpacked = out.with_name(f"{number}-float")
            run("quantize", out, "-o", unpacked, "--format", "safetensors", "--scheme", "f32", "--quiet")
            reference = AutoModelForCausalLM.from_pretrained(unpacked, dtype=torch.float32)
            with torch.inference_mode():
                expected = reference(torch.tensor([tokens])).logits[0]
            ours, theirs = perplexity(expected, tokens), perplexity(logits, tokens)
            print(f"{ENGINES[engine]}, {' '.join(words)}: perplexity {theirs:.4f}, unpacked {ours:.4f}", flush=True)
            assert abs(theirs / ours - 1) <= BOUND, "the perplexities differ"


if __name__ == "__main__":
    main()
