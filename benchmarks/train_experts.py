"""Trains a small Qwen3-MoE model for the comparisons of `experts_kl.py`:

    python benchmarks/train_experts.py TEXT OUT --seed N [--steps N] [--threads N]

TEXT is a file with one JSON object with `text` per line, such as `tinystories_calib.jsonl`. The first nine tenths of the
lines are trained on. The last tenth is copied to OUT/calibration.jsonl, so that a model can be calibrated on text that it
was not trained on. The tokenizer is trained on the same nine tenths.

Needs torch, transformers and tokenizers. The same arguments give the same model on the same machine with the same
versions.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

VOCABULARY, LENGTH, BATCH = 2048, 256, 8
PEAK, WARMUP = 4e-3, 30
# Groups of 32 weights divide every width.
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4,
         "moe_intermediate_size": 96, "intermediate_size": 384, "decoder_sparse_step": 1, "mlp_only_layers": [],
         "norm_topk_prob": True, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
         "bos_token_id": 0, "eos_token_id": 0, "router_aux_loss_coef": 0.01}


def tokenizer_of(texts: list[str]):
    """A byte-level BPE tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    lines = args.text.read_text(encoding="utf-8").splitlines()
    at = len(lines) * 9 // 10
    trained = [json.loads(line)["text"] for line in lines[:at]]
    tokenizer = tokenizer_of(trained)
    order = torch.randperm(len(trained)).tolist()
    ids = []
    for encoded in tokenizer.encode_batch([trained[i] for i in order]):
        ids += [*encoded.ids, 0]
    ids = torch.tensor(ids)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, output_router_logits=True))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95))
    started, mean = time.time(), None
    for step in range(args.steps):
        rising = (step + 1) / WARMUP
        falling = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / args.steps)).item())
        for group in optimizer.param_groups:
            group["lr"] = PEAK * min(rising, falling)
        starts = torch.randint(0, len(ids) - LENGTH - 1, (BATCH,))
        batch = torch.stack([ids[at:at + LENGTH] for at in starts.tolist()])
        found = model(input_ids=batch, labels=batch)
        found.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = (found.loss - model.config.router_aux_loss_coef * found.aux_loss).item()
        mean = loss if mean is None else 0.95 * mean + 0.05 * loss
        if step % 20 == 0 or step == args.steps - 1:
            print(f"seed {args.seed} step {step}: loss {mean:.3f}, {time.time() - started:.0f} s", flush=True)
    staged = args.out.with_name(args.out.name + ".partial")
    shutil.rmtree(staged, ignore_errors=True)
    model.config.output_router_logits = False
    model.half().save_pretrained(staged)
    tokenizer.save(str(staged / "tokenizer.json"))
    (staged / "calibration.jsonl").write_text("\n".join(lines[at:]) + "\n", encoding="utf-8")
    recipe = {"seed": args.seed, "steps": args.steps, "batch": BATCH, "length": LENGTH, "tokens": len(ids),
              "text": args.text.name, "parameters": sum(p.numel() for p in model.parameters()), "loss": round(mean, 4),
              "torch": torch.__version__}
    (staged / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n")
    staged.rename(args.out)


if __name__ == "__main__":
    main()
