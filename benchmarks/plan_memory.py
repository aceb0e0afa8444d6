"""Peak memory that `quant plan` predicts for the shapes of published models.

    python benchmarks/plan_memory.py QUANT OUT

QUANT is the program. A checkpoint of each shape is created in OUT/models: a config, and sparse safetensors files that
contain only headers, so that even the largest one, of 141 GB, takes less than a megabyte on disk. `plan` reads only
headers. Writes the record to benchmarks/record/plan-memory.
"""

import json
import struct
import subprocess
from pathlib import Path

import records

SHAPES = {
    "Llama-3.2-1B": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32),
    "Llama-3-8B": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
    "Llama-3-70B": dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64),
}
VOCAB, KV_HEADS = 128256, 8
METHODS = {
    "rtn": [["--method", "rtn"]],
    "awq": [["--samples", "64", "--seq-len", "512"], ["--samples", "128", "--seq-len", "512"], ["--samples", "128", "--seq-len", "2048"]],
    "gptq": [["--method", "gptq", *more] for more in (["--samples", "64", "--seq-len", "512"], ["--samples", "128", "--seq-len", "512"])],
    "smoothquant": [["--preset", "smoothquant-w8a8", "--samples", "128", "--seq-len", "512"]],
}
FILE_BYTES = 4 << 30


def make(directory: Path, shape: dict) -> None:
    head = shape["hidden_size"] // shape["num_attention_heads"]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": VOCAB,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 128000, "eos_token_id": 128001, **shape,
    }
    hidden, inner, kv = shape["hidden_size"], shape["intermediate_size"], KV_HEADS * head
    tensors = {"model.embed_tokens.weight": [VOCAB, hidden], "lm_head.weight": [VOCAB, hidden], "model.norm.weight": [hidden]}
    for layer in range(shape["num_hidden_layers"]):
        for name, size in {
            "self_attn.q_proj": [hidden, hidden], "self_attn.k_proj": [kv, hidden], "self_attn.v_proj": [kv, hidden],
            "self_attn.o_proj": [hidden, hidden], "mlp.gate_proj": [inner, hidden], "mlp.up_proj": [inner, hidden],
            "mlp.down_proj": [hidden, inner], "input_layernorm": [hidden], "post_attention_layernorm": [hidden],
        }.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = size
    write_sparse(directory, config, tensors)


def write_sparse(directory: Path, config: dict, tensors: dict[str, list[int]]) -> None:
    """Writes a checkpoint whose files contain only headers; ``tensors`` has the shapes by name."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    files, size = [{}], 0
    for name, of in tensors.items():
        count = 2
        for n in of:
            count *= n
        if size and size + count > FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name] = {"dtype": "BF16", "shape": of, "data_offsets": [size, size + count]}
        size += count
    index = {}
    for number, header in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(directory / file, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + max(t["data_offsets"][1] for t in header.values()))
        index |= {name: file for name in header}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def main() -> None:
    quant, out = records.paths(__doc__, "QUANT", "OUT")
    rows = []
    for name, shape in SHAPES.items():
        model = out / "models" / name
        make(model, shape)
        for method, variants in METHODS.items():
            for options in variants:
                done = subprocess.run([quant, "plan", str(model), *options, "--json"], capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(f"{name} {options}: {done.stderr}")
                plan = json.loads(done.stdout)
                rows.append([name, method, " ".join(options), plan["peak_memory_bytes"], plan["smallest_budget_bytes"], *sizes(plan)])
                print(rows[-1], flush=True)
    write(rows)


def sizes(plan: dict) -> list[int]:
    [written] = plan["formats"]
    return [plan["input_bytes"], written["output_bytes"]]


def write(rows: list[list]) -> None:
    gb = lambda count: f"{count / 1e9:.1f} GB"  # noqa: E731
    lines = [
        *records.header("Peak memory that plans predict", "python benchmarks/plan_memory.py QUANT OUT"),
        "",
        "Llama shapes in bf16, 4 bits in groups of 128 (8 bits with SmoothQuant), 2 threads. Predicted, not measured: the files",
        "contain headers and no data. These records compare predictions with measurements: [AWQ](../awq-memory), [QoQ](../qoq),",
        "[experts](../experts-memory).",
        "",
        "| shape | method | calibration | peak | smallest budget | before | after |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, method, options, peak, smallest, before, after in rows:
        words = options.split()
        text = f"{words[words.index('--samples') + 1]} × {words[words.index('--seq-len') + 1]}" if "--samples" in words else "none"
        lines.append(f"| {name} | {method} | {text} | {gb(peak)} | {gb(smallest)} | {gb(before)} | {gb(after)} |")
    columns = ["shape", "method", "options", "peak_bytes", "smallest_budget_bytes", "bytes_before", "bytes_after"]
    records.write("plan-memory", lines, columns, rows)


if __name__ == "__main__":
    main()
