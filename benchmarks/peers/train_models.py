"""Trains the small models of `cargo study quality-gguf`: train_models.py NAME TOKENIZER TEXT OUT
[THREADS]

All widths are multiples of 256, as super-blocks require. A model sees only the given text, which must not be one that
evaluations use. The same arguments give the same model on the same machine.
"""

import json
import shutil
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

COMMON = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096,
          "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1}
MODELS = {
    # Tied embeddings, wide MLP.
    "calib-llama": (LlamaForCausalLM, LlamaConfig, {"intermediate_size": 1024, "num_hidden_layers": 4,
                                                   "tie_word_embeddings": True}),
    # A head of its own, norms of queries and keys.
    "calib-qwen3": (Qwen3ForCausalLM, Qwen3Config, {"intermediate_size": 512, "num_hidden_layers": 5,
                                                   "tie_word_embeddings": False}),
}
STEPS = 300
BATCH = 8
LENGTH = 128
PEAK = 3e-3
WARMUP = 30


def main():
    name, tokenizer, text, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    torch.manual_seed(sum(map(ord, name)))
    torch.set_num_threads(int(sys.argv[5]) if len(sys.argv) > 5 else 2)
    model_class, config_class, own = MODELS[name]
    model = model_class(config_class(**COMMON, **own))
    encode = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer / "tokenizer.json"))
    ids = torch.tensor(encode(text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"])
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                                  betas=(0.9, 0.95))
    started, mean = time.time(), None
    for step in range(STEPS):
        rising, falling = (step + 1) / WARMUP, 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / STEPS)).item())
        for group in optimizer.param_groups:
            group["lr"] = PEAK * min(rising, falling)
        starts = torch.randint(0, len(ids) - LENGTH - 1, (BATCH,))
        batch = torch.stack([ids[at:at + LENGTH] for at in starts.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.item() if mean is None else 0.95 * mean + 0.05 * loss.item()
        if step % 20 == 0 or step == STEPS - 1:
            print(f"{name} step {step}: loss {mean:.3f}, {time.time() - started:.0f} s", flush=True)
    staged = out.with_name(out.name + ".partial")
    shutil.rmtree(staged, ignore_errors=True)
    model.half().save_pretrained(staged)
    shutil.copy(tokenizer / "tokenizer.json", staged)
    recipe = {"model": name, "text": text.name, "tokens": len(ids), "steps": STEPS, "batch": BATCH, "length": LENGTH,
              "final_loss": round(mean, 4), "torch": torch.__version__}
    (staged / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n")
    staged.rename(out)


main()
