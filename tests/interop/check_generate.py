"""Compares `quant generate` with transformers: greedy text, and the probabilities with which tokens are sampled.

transformers reads the prompt and quant's output at once, in f32. At each position, its own logits processors compute
the distribution from which quant should have sampled the next token; both report that token's probability.
"""

import json
import shutil

import torch
from transformers import (AutoModelForCausalLM, LogitsProcessorList, MinPLogitsWarper, NoRepeatNGramLogitsProcessor,
                          RepetitionPenaltyLogitsProcessor, SuppressTokensLogitsProcessor, TemperatureLogitsWarper,
                          TopKLogitsWarper, TopPLogitsWarper)

# quant caches keys and values in f16, transformers in f32.
TOLERANCE = 5e-3
PROMPT = "It was a dark night, and nobody"
SETTINGS = {
    "temperature": {"temperature": 0.7, "top_k": 0},
    "top k": {"top_k": 9},
    "top p": {"top_k": 0, "top_p": 0.8},
    "min p": {"top_k": 0, "min_p": 0.05},
    "penalties": {"top_k": 0, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [11, 300]},
    "all": {"temperature": 1.4, "top_k": 60, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1},
}


def processors(settings):
    """The logits processors, in the order of transformers' `generate`."""
    made = LogitsProcessorList()
    for key, make in [("repetition_penalty", RepetitionPenaltyLogitsProcessor),
                      ("no_repeat_ngram_size", NoRepeatNGramLogitsProcessor),
                      ("suppress_tokens", SuppressTokensLogitsProcessor),
                      ("temperature", TemperatureLogitsWarper),
                      ("top_k", TopKLogitsWarper),
                      ("top_p", TopPLogitsWarper),
                      ("min_p", MinPLogitsWarper)]:
        if settings.get(key):
            made.append(make(settings[key]))
    return made


def write(check, model, settings, *options):
    """Runs `quant generate` on a copy of the model whose own settings are `settings`, and returns the report."""
    path = check.scratch / "generating"
    shutil.copytree(model, path, dirs_exist_ok=True)
    (path / "generation_config.json").write_text(json.dumps(settings))
    arguments = ["--prompt", PROMPT, "--max-new-tokens", 48, "--json", "--quiet"]
    return json.loads(check.program("quant", "generate", path, *arguments, *options))


@torch.no_grad()
def logits(model, report):
    """The prompt and the tokens that quant generated, and the logits from which each of the latter is chosen."""
    tokens = report["prompt_tokens"] + [token["id"] for token in report["tokens"]]
    return torch.tensor(tokens), model(torch.tensor([tokens])).logits[0, len(report["prompt_tokens"]) - 1:-1]


def greedy(check, path, model):
    report = write(check, path, {}, "--greedy", "--ignore-eos")
    prompt = torch.tensor([report["prompt_tokens"]])
    theirs = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=48, min_new_tokens=48,
                            do_sample=False)
    theirs = theirs[0, len(report["prompt_tokens"]):].tolist()
    ours = [token["id"] for token in report["tokens"]]
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), len(ours))
    _, all_logits = logits(model, report)
    # At the first difference, transformers must also find both tokens almost equally probable.
    gap = 0.0 if same == len(ours) else abs(all_logits[same, theirs[same]] - all_logits[same, ours[same]]).item()
    logprobs = torch.log_softmax(all_logits, dim=-1)
    apart = max(abs(logprobs[i, token["id"]].item() - token["logprob"]) for i, token in enumerate(report["tokens"]))
    return f"{same} of 48 tokens equal, log-probabilities {apart:.1e} apart", gap < TOLERANCE and apart < TOLERANCE


def drawn(check, path, model, settings):
    report = write(check, path, {"do_sample": True, **settings}, "--seed", 5, "--ignore-eos")
    tokens, all_logits = logits(model, report)
    # A token whose probability is close to a threshold may be on either side of it.
    chains = [processors({key: value * factor if key in ("top_p", "min_p") else value for key, value in settings.items()})
              for factor in (1, 1 - TOLERANCE, 1 + TOLERANCE)]
    start, apart = len(report["prompt_tokens"]), 0.0
    for i, token in enumerate(report["tokens"]):
        scores = [chain(tokens[None, :start + i], all_logits[i:i + 1].clone()) for chain in chains]
        expected = [torch.log_softmax(score, dim=-1)[0, token["id"]].item() for score in scores]
        apart = max(apart, min(abs(e - token["sampling_logprob"]) for e in expected))
    different = len({token["id"] for token in report["tokens"]})
    return f"{different} different tokens, log-probabilities {apart:.1e} apart", apart < TOLERANCE and different > 8


def run_all(check, only):
    path = check.model("demo")
    model = None
    for name in ["greedy", *SETTINGS]:
        title = f"generate {name}"
        if only not in title:
            continue
        if model is None:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        if name == "greedy":
            check.step(title, lambda: greedy(check, path, model))
        else:
            check.step(title, lambda name=name: drawn(check, path, model, SETTINGS[name]))
