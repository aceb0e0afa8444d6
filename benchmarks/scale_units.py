"""Lists the units of jobs on the shapes of large models, for `cargo xtask simulate-scale`.

    python benchmarks/scale_units.py QUANT OUT

QUANT is the program. A checkpoint of each shape is created in OUT: a config, the tokenizer of the demo model, and
sparse safetensors files that contain only headers. `job init` and `job units` read only headers. Writes OUT/NAME.json.
"""

import json
import shutil
import subprocess
from pathlib import Path

import plan_memory
import records

LLAMA = {
    "llama-70b": dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64),
    "llama-405b": dict(hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128),
}
#: DeepSeek-V3 without its layer for multi-token prediction: 671 billion parameters.
EXPERTS = dict(
    hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=61, num_attention_heads=128,
    num_key_value_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, n_group=8, topk_group=4,
    first_k_dense_replace=3, moe_layer_freq=1, norm_topk_prob=True, routed_scaling_factor=2.5, scoring_func="sigmoid",
    topk_method="noaux_tc",
)
AWQ = ["--samples", "128", "--seq-len", "512", "--forward-shards"]


def deepseek() -> tuple[dict, dict]:
    """The configuration and the tensors of the mixture of experts."""
    c = EXPERTS
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": plan_memory.VOCAB,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "num_nextn_predict_layers": 0, **c,
    }
    tensors = {"model.embed_tokens.weight": [plan_memory.VOCAB, hidden], "lm_head.weight": [plan_memory.VOCAB, hidden], "model.norm.weight": [hidden]}

    def mlp(at: str, inner: int) -> None:
        for name, size in {"gate_proj": [inner, hidden], "up_proj": [inner, hidden], "down_proj": [hidden, inner]}.items():
            tensors[f"{at}.{name}.weight"] = size

    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        query, value = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["qk_nope_head_dim"] + c["v_head_dim"]
        for name, size in {
            "input_layernorm": [hidden], "post_attention_layernorm": [hidden],
            "self_attn.q_a_proj": [c["q_lora_rank"], hidden], "self_attn.q_a_layernorm": [c["q_lora_rank"]],
            "self_attn.q_b_proj": [heads * query, c["q_lora_rank"]],
            "self_attn.kv_a_proj_with_mqa": [c["kv_lora_rank"] + c["qk_rope_head_dim"], hidden],
            "self_attn.kv_a_layernorm": [c["kv_lora_rank"]], "self_attn.kv_b_proj": [heads * value, c["kv_lora_rank"]],
            "self_attn.o_proj": [hidden, heads * c["v_head_dim"]],
        }.items():
            tensors[f"{at}.{name}.weight"] = size
        if layer < c["first_k_dense_replace"]:
            mlp(f"{at}.mlp", c["intermediate_size"])
            continue
        tensors[f"{at}.mlp.gate.weight"] = [c["n_routed_experts"], hidden]
        tensors[f"{at}.mlp.gate.e_score_correction_bias"] = [c["n_routed_experts"]]
        mlp(f"{at}.mlp.shared_experts", c["moe_intermediate_size"] * c["n_shared_experts"])
        for expert in range(c["n_routed_experts"]):
            mlp(f"{at}.mlp.experts.{expert}", c["moe_intermediate_size"])
    return config, tensors


def main() -> None:
    quant, out = records.paths(__doc__, "QUANT", "OUT")
    out.mkdir(parents=True, exist_ok=True)

    def run(*words: object) -> str:
        done = subprocess.run([quant, *map(str, words)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{words}: {done.stderr}")
        return done.stdout

    demo = out / "demo"
    if not demo.exists():
        run("demo", "--save-model", demo)
    jobs = []
    for name, shape in LLAMA.items():
        plan_memory.make(out / name, shape)
        jobs += [(f"{name}-awq", name, [*AWQ, "32"]), (f"{name}-gptq-span4", name, ["--method", "gptq", "--span-blocks", "4", *AWQ, "32"])]
    plan_memory.write_sparse(out / "deepseek-671b", *deepseek())
    jobs.append(("deepseek-671b-awq", "deepseek-671b", [*AWQ, "16"]))
    for job, name, options in jobs:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            if (demo / file).exists():
                shutil.copy(demo / file, out / name)
        store = out / f"{job}.store"
        shutil.rmtree(store, ignore_errors=True)
        run("job", "init", out / name, "--job", store, *options)
        units = json.loads(run("job", "units", store, "--json"))
        (out / f"{job}.json").write_text(json.dumps(units))
        seconds = sum(unit["seconds"] for unit in units["units"])
        print(f"{job}: {len(units['units'])} units, {seconds / 3600:.1f} h on this machine", flush=True)


if __name__ == "__main__":
    main()
