"""Converts a Llama or Qwen3-MoE checkpoint in one bf16 safetensors file to GGUF: models_gguf.py MODEL OUT

Only for speed benchmarks: the file has the same weights in the same shapes, no vocabulary, and a head separate from the
embedding even if they are tied. Rows of Llama's queries and keys stay in the order of the checkpoint, and rotary scaling
is left out. Both change the results, but not the amount of computation. The same matrices of all experts of a block must
be adjacent in the file.
"""

import json
import re
import sys
from pathlib import Path

import gguf
import numpy as np

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def renamed(name):
    module = name.removesuffix(".weight")
    if module in OUTER:
        return f"{OUTER[module]}.weight"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def joined(header):
    """Replaces the matrices of a block's experts by one tensor `[experts, n, k]`."""
    tensors = {}
    for name, entry in header.items():
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
        if not found:
            tensors[name] = entry
            continue
        name = f"{found[1]}.{found[3]}"
        begin, end = entry["data_offsets"]
        if int(found[2]) == 0:
            tensors[name] = entry | {"shape": [0, *entry["shape"]], "data_offsets": [begin, begin]}
        whole = tensors[name]
        if whole["data_offsets"][1] != begin or whole["shape"][0] != int(found[2]):
            raise SystemExit(f"error: {name}: expert {found[2]} does not follow the one before it")
        whole["data_offsets"][1] = end
        whole["shape"][0] += 1
    return tensors


def main():
    model, out = Path(sys.argv[1]), sys.argv[2]
    config = json.loads((model / "config.json").read_text())
    data = np.memmap(model / "model.safetensors", dtype=np.uint8, mode="r")
    length = int(data[:8].view("<u8")[0])
    header = json.loads(bytes(data[8 : 8 + length]))
    header.pop("__metadata__", None)
    # Files list tensors in any order.
    header = joined(dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"])))

    has_experts = config["model_type"] == "qwen3_moe"
    writer = gguf.GGUFWriter(out, "qwen3moe" if has_experts else "llama")
    if has_experts:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")

    def add(name, entry):
        begin, end = entry["data_offsets"]
        bits = data[8 + length + begin : 8 + length + end].view("<u2").reshape(entry["shape"])
        # llama.cpp stores norms and routers in F32.
        if len(entry["shape"]) == 1 or ".ffn_gate_inp." in name:
            writer.add_tensor(name, (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(name, bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)

    for name, entry in header.items():
        if entry["dtype"] != "BF16":
            raise SystemExit(f"error: {name} is {entry['dtype']}, not BF16")
        add(renamed(name), entry)
    if "lm_head.weight" not in header:
        add("output.weight", header["model.embed_tokens.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
