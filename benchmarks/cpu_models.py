"""Measures the memory and time of quantized models in transformers on a CPU, and the time of evaluating one, on random
models of real shapes.

    python benchmarks/cpu_models.py transformers QUANT OUT [--shape 8B --layers 16] [--rounds 3] [--threads 2]
    python benchmarks/cpu_models.py eval QUANT OUT [--shape 1B --layers 16]
    python benchmarks/cpu_models.py make QUANT OUT [--shape 1B --layers 16]

QUANT is the program. `transformers` needs torch, transformers, compressed-tensors and gptqmodel. It alternates between
the bf16 original, the W4A16 and W8A8 checkpoints as transformers loads them, the same checkpoints with
`fewbits.transformers`, and the W4A16 weights in the GPTQ format, which transformers loads with gptqmodel, each in its
own process. The package is taken from FEWBITS_PACKAGE (default target/python/package). "8-bit head" also quantizes the
output head. `eval` times `quant eval` alone and with --reference, on the demo model too. Both write a record of their
measurements. `make` only creates the models, and needs torch and transformers.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import records

VOCAB = 128256
SHAPES = {
    "1B": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, head_dim=64, tie_word_embeddings=True),
    "8B": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, head_dim=128, tie_word_embeddings=False),
}
SCHEMES = {
    "w4a16": ["--method", "rtn", "--scheme", "w4a16-g128-sym"],
    "w4a16, 8-bit head": ["--method", "rtn", "--scheme", "w4a16-g128-sym", "--override", "lm_head=w8a16-g128-sym"],
    "w8a8": ["--method", "rtn", "--scheme", "w8a8"],
    "w4a16, gptqmodel": ["--method", "rtn", "--scheme", "w4a16-g128-sym", "--format", "gptq"],
}
PROMPT, NEW = 64, 24


def make(out: Path, shape: str, layers: int | None) -> Path:
    """Creates a random Llama in bf16, unless it exists, and returns its directory. Each block is a file of its own, so
    memory does not depend on the number of layers."""
    import torch
    from safetensors.torch import save_file

    config = SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})
    model = out / f"{shape}-{config['num_hidden_layers']}"
    if (model / "config.json").is_file():
        return model
    model.mkdir(parents=True, exist_ok=True)
    hidden, inner, kv = config["hidden_size"], config["intermediate_size"], 8 * config["head_dim"]
    generator = torch.Generator().manual_seed(7)

    def random(*size):
        return (torch.randn(*size, generator=generator, dtype=torch.float32) * 0.02).to(torch.bfloat16)

    def norm():
        return (1 + 0.1 * torch.randn(hidden, generator=generator)).to(torch.bfloat16)

    places, bytes_ = {}, 0

    def save(file, tensors):
        nonlocal bytes_
        save_file(tensors, model / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(tensors, file))
        bytes_ += sum(tensor.numel() * 2 for tensor in tensors.values())

    save("model-outside.safetensors", {"model.embed_tokens.weight": random(VOCAB, hidden), "model.norm.weight": norm()})
    if not config["tie_word_embeddings"]:
        save("model-head.safetensors", {"lm_head.weight": random(VOCAB, hidden)})
    sizes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(config["num_hidden_layers"]):
        block = {name: random(*size) for name, size in sizes.items()}
        block |= {name: norm() for name in ("input_layernorm", "post_attention_layernorm")}
        save(f"model-{layer:05}.safetensors", {f"model.layers.{layer}.{name}.weight": one for name, one in block.items()})
    index = {"metadata": {"total_size": bytes_}, "weight_map": places}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(records.ROOT / "calibration-data/demo-model/tokenizer.json", model)
    config |= {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": VOCAB,
        "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1,
    }
    # Written last: it marks the model as complete.
    (model / "config.json").write_text(json.dumps(config))
    return model


def status(key: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:")]
    return int(line.split()[1]) * 1024


def measure(model: str, packed: bool, threads: int) -> None:
    """Loads a model, processes a prompt, generates tokens, and prints the measurements as JSON."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    if packed:
        sys.path.insert(0, os.environ.get("FEWBITS_PACKAGE", str(records.ROOT / "target/python/package")))
        import fewbits.transformers

        fewbits.transformers.enable()
    begin, imports = time.perf_counter(), status("VmHWM")
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    load = time.perf_counter() - begin
    tokens = torch.arange(2, 2 + PROMPT).unsqueeze(0)
    with torch.inference_mode():
        loaded(tokens[:, :8])
        begin = time.perf_counter()
        state = loaded(tokens, use_cache=True)
        prefill = time.perf_counter() - begin
        steps = []
        for _ in range(NEW):
            begin = time.perf_counter()
            state = loaded(state.logits[:, -1:].argmax(-1), past_key_values=state.past_key_values, use_cache=True)
            steps.append(time.perf_counter() - begin)
    print(json.dumps({"load": load, "prefill": PROMPT / prefill, "decode": 1 / statistics.median(steps),
                      "imports": imports, "peak": status("VmHWM"), "decoding": status("VmRSS")}))


def quantized(quant: str, model: Path) -> dict[str, Path]:
    found = {}
    tied = json.loads((model / "config.json").read_text()).get("tie_word_embeddings")
    for name, options in SCHEMES.items():
        # A head that is the embedding stays float.
        if tied and "lm_head" in options[-1]:
            continue
        out = model.with_name(f"{model.name}-{name.replace(', ', '-').replace(' ', '-')}")
        if not out.is_dir():
            subprocess.run([quant, "quantize", model, "-o", out, *options, "--quiet"], check=True, stdout=subprocess.DEVNULL)
        found[name] = out
    return found


def in_transformers(arguments) -> None:
    import torch
    import transformers

    model = make(arguments.out, arguments.shape, arguments.layers)
    made = quantized(arguments.quant, model)
    who = {"bf16": (model, False)}
    for name, path in made.items():
        # Only compressed-tensors checkpoints are loaded with `fewbits.transformers`.
        if "gptqmodel" in name:
            who |= {name: (path, False)}
        else:
            who |= {f"{name}, transformers": (path, False), f"{name}, fewbits": (path, True)}
    who = {name: one for name, one in who.items() if not arguments.only or name in arguments.only}
    rows = []
    for round_ in range(arguments.rounds):
        for name, (path, packed) in who.items():
            command = [sys.executable, __file__, "one", str(path), str(int(packed)), str(arguments.threads)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{name}: {done.stderr[-2000:]}")
            found = json.loads(done.stdout.splitlines()[-1])
            rows.append([round_, name, *(round(found[key], 4) for key in ("load", "prefill", "decode")), found["imports"], found["peak"], found["decoding"]])
            print(rows[-1], flush=True)
    middle = {name: [statistics.median(row[i] for row in rows if row[1] == name) for i in range(2, 8)] for name in who}
    base = middle["bf16"]
    lines = records.header("A quantized model in transformers on a CPU", "python benchmarks/cpu_models.py " + " ".join(
        ["transformers", "QUANT", "OUT", "--shape", arguments.shape, "--layers", str(arguments.layers or SHAPES[arguments.shape]["num_hidden_layers"]),
         "--rounds", str(arguments.rounds), "--threads", str(arguments.threads),
         *(f"--only '{name}'" for name in arguments.only or [])]))
    lines += [
        f"Random Llama in {arguments.shape} shape, {arguments.layers or SHAPES[arguments.shape]['num_hidden_layers']} layers, embeddings float, and the head too unless the table says otherwise; "
        f"transformers {transformers.__version__}, torch {torch.__version__}, "
        f"bf16, {arguments.threads} thread(s). A prompt of {PROMPT} tokens, then {NEW} tokens one by one. Each model runs in its own process, "
        f"all in turn; medians of {arguments.rounds} round(s). The peak is VmHWM, which includes the imports and pages of mapped checkpoint files; the last columns are the resident memory after the last token (VmRSS). {arguments.note}".rstrip(),
        "",
        "| model | load, s | prefill, tokens/s | decode, tokens/s | decode relative to bf16 | peak, GB | peak relative to bf16 | resident, GB | resident relative to bf16 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (load, prefill, decode, _, top, resident) in middle.items():
        lines.append(f"| {name} | {load:.1f} | {prefill:.1f} | {decode:.2f} | {decode / base[2]:.2f} | {top / 1e9:.2f} | {100 * top / base[4]:.0f} % | {resident / 1e9:.2f} | {100 * resident / base[5]:.0f} % |")
    records.write("transformers-cpu", lines, ["round", "model", "load_seconds", "prefill_tokens_per_second", "decode_tokens_per_second", "import_bytes", "peak_bytes", "decoding_bytes"], rows)


def evaluation(arguments) -> None:
    model = make(arguments.out, arguments.shape, arguments.layers)
    made = quantized(arguments.quant, model)["w4a16"]
    demo = arguments.out / "demo"
    if not demo.is_dir():
        subprocess.run([arguments.quant, "demo", "--save-model", demo], check=True, stdout=subprocess.DEVNULL)
    small = quantized(arguments.quant, demo)["w4a16"]
    rows = []
    for name, original, out, window, windows in [("demo, 7M", demo, small, 512, 8), (f"{arguments.shape} shape", model, made, 1024, 1)]:
        for what, options in [("alone", []), ("with --reference", ["--reference", original])]:
            command = [arguments.quant, "eval", out, "--text", "builtin-heldout", "--window", str(window), "--windows", str(windows),
                       "--threads", str(arguments.threads), "--quiet", "--json", *options]
            before = time.perf_counter()
            done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            result = json.loads(done.stdout)
            rows.append([name, what, window * windows, round(time.perf_counter() - before, 2), round(result["tokens_per_second"], 2)])
            print(rows[-1], flush=True)
    lines = records.header("Time of an evaluation", f"python benchmarks/cpu_models.py eval QUANT OUT --shape {arguments.shape}")
    lines += [f"`quant eval` of a W4A16 checkpoint, {arguments.threads} threads; `with --reference` also runs the original and measures the noise floor.",
              "", "| model | | tokens | seconds, including loading | tokens/s |", "|---|---|---|---|---|"]
    lines += [f"| {name} | {what} | {tokens} | {seconds} | {rate} |" for name, what, tokens, seconds, rate in rows]
    records.write("eval-cost", lines, ["model", "what", "tokens", "seconds", "tokens_per_second"], rows)


def main() -> None:
    if sys.argv[1:2] == ["one"]:
        measure(sys.argv[2], sys.argv[3] == "1", int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["transformers", "eval", "make"])
    parser.add_argument("quant")
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="1B")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", action="append")
    parser.add_argument("--note", default="", help="a sentence for the record, for example about the load of the machine")
    arguments = parser.parse_args()
    if arguments.what == "make":
        quantized(arguments.quant, make(arguments.out, arguments.shape, arguments.layers))
    elif arguments.what == "eval":
        evaluation(arguments)
    else:
        in_transformers(arguments)


if __name__ == "__main__":
    main()
