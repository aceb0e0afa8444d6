"""Prints the expected results of a profile of `quant eval`, computed with transformers, as JSON.

Profiles, with L and S in tokens; a window is scored in one forward pass without a cache:

  gptq-L          whole text at once, adjacent windows of L, a remainder dropped, every token except
                  the first of each window scored
  hf-stride-L-S   the rule of the transformers guide on perplexity: windows begin at 0, S, 2S, ...
                  and end after L tokens or at the end of the text, which ends the last one;
                  tokens that no earlier window scored are scored, but never one without context
  lmeval-rolling-L   each document separately after its prefix token (BOS, or else EOS, of
                  tokenizer_config.json), in windows of L predictions; see `rolling`
  llamacpp-L      adjacent chunks of L; if the tokenizer adds BOS, it overwrites the first token of
                  each chunk; tokens L/2+1 .. L-1 (L/2 rounded down) scored

`wt2-gptq-2048` and `wt2-llamacpp-512` are the same rules; the first splits wiki.test.raw into rows like the `datasets`
library, and joins them by an empty line. Perplexity is exp(mean negative log-likelihood of all scored tokens);
log-softmax in f32, sums in f64.

The loop in the transformers guide weights each window except the first by one token less than it scores;
`docs_perplexity` is the result of that loop.
"""

import argparse
import json
import math
import re
from pathlib import Path

import reference_model
import torch
from tokenizers import Tokenizer


class Text:
    """The documents of a file, and the tokenizer of a model."""

    def __init__(self, model_dir, file):
        self.tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        config = model_dir / "tokenizer_config.json"
        self.config = json.loads(config.read_text()) if config.exists() else {}
        content = file.read_bytes().decode("utf-8")
        lines = [line for line in content.split("\n") if line.strip()]
        self.documents = ([json.loads(line)["text"] for line in lines]
                          if file.suffix == ".jsonl" else [content])

    def tokens(self, document):
        return self.tokenizer.encode(document).ids

    def bos(self):
        """The token that the tokenizer puts before every text, or None."""
        empty = self.tokenizer.encode("").ids
        return empty[0] if empty else None

    def prefix(self):
        """The token that the first token of a document is conditioned on: BOS, or else EOS."""
        for name in ("bos_token", "eos_token"):
            token = self.config.get(name)
            if token is not None:
                token = token if isinstance(token, str) else token["content"]
                return self.tokenizer.token_to_id(token)
        raise SystemExit("error: tokenizer_config.json names neither bos_token nor eos_token")


# Each rule returns windows as (tokens, index of the first scored token).

def gptq(tokens, length):
    return [(tokens[i:i + length], 1) for i in range(0, len(tokens) - length + 1, length)]


def hf_stride(tokens, length, stride):
    windows, scored, begin = [], 0, 0
    while scored < len(tokens):
        end = min(begin + length, len(tokens))
        windows.append((tokens[begin:end], max(scored - begin, 1)))
        scored, begin = end, begin + stride
    return windows


def rolling(tokens, prefix, length):
    """L predictions per window, from one token of context; the last window of a document predicts the remainder, and
    its context extends back as far as L tokens of input allow."""
    stream = [prefix, *tokens]
    windows = []
    for begin in range(0, len(tokens), length):
        end = min(begin + length, len(tokens))
        first = max(end - length, 0)
        windows.append((stream[first:end + 1], begin + 1 - first))
    return windows


def llama_cpp(tokens, bos, length):
    chunks = [chunk for chunk, _ in gptq(tokens, length)]
    return [([bos, *chunk[1:]] if bos is not None else chunk, length // 2 + 1) for chunk in chunks]


def rows(raw):
    """Returns WikiText's lines as rows, with blank lines as empty rows, as in published evaluations."""
    lines = re.findall(r"[^\n]*\n|[^\n]+$", raw)
    return "\n\n".join(line if line.strip() else "" for line in lines)


def plan(profile, text):
    """The windows of a profile, document by document."""
    name, *numbers = re.fullmatch(r"(?:wt2-)?([a-z]+(?:-[a-z]+)?)-(\d+)(?:-(\d+))?", profile).groups()
    length, stride = (int(number) if number else None for number in numbers)
    if name == "lmeval-rolling":
        return [window for document in text.documents
                for window in rolling(text.tokens(document), text.prefix(), length)]
    [document] = text.documents
    tokens = text.tokens(rows(document) if profile.startswith("wt2-gptq") else document)
    if name == "gptq":
        return gptq(tokens, length)
    if name == "hf-stride":
        return hf_stride(tokens, length, stride)
    if name == "llamacpp":
        return llama_cpp(tokens, text.bos(), length)
    raise SystemExit(f"error: no profile {profile}")


def score(model, tokens, first):
    """Negative log-likelihoods of the tokens of a window from number `first` on, in f64."""
    log_probabilities = torch.log_softmax(reference_model.logits(model, tokens)[first - 1:-1], dim=-1)
    targets = torch.tensor(tokens[first:]).unsqueeze(1)
    return -log_probabilities.gather(1, targets).squeeze(1).double()


def measure(model, text, profile, at_most=None):
    windows = [window for window in plan(profile, text)[:at_most] if window[1] < len(window[0])]
    if not windows:
        raise SystemExit("error: the text is too short for one window")
    scores = [score(model, *window) for window in windows]
    every = torch.cat(scores)
    count, total = len(every), every.sum().item()
    result = {"perplexity": math.exp(total / count), "nll": total / count, "tokens_scored": count,
              "windows": len(windows), "window_nll": [s.mean().item() for s in scores],
              "window_tokens": [len(s) for s in scores]}
    if profile.startswith("hf-stride"):
        weights = [len(s) - (i > 0) for i, s in enumerate(scores)]
        means = sum(w * s.mean().item() for w, s in zip(weights, scores))
        result["docs_perplexity"] = math.exp(means / sum(weights))
    if profile.startswith("lmeval"):
        words = sum(len(re.split(r"\s+", document)) for document in text.documents)
        size = sum(len(document.encode()) for document in text.documents)
        result |= {"word_perplexity": math.exp(total / words), "byte_perplexity": math.exp(total / size),
                   "bits_per_byte": total / size / math.log(2)}
    if "llamacpp" in profile:
        deviation = every.std(correction=0).item() / math.sqrt(count - 1)
        result["token_standard_error"] = deviation * result["perplexity"]
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL_DIR", type=Path)
    parser.add_argument("--text", type=Path, required=True, metavar="FILE",
                        help="UTF-8 text; of a .jsonl file the `text` of every line is a document")
    parser.add_argument("--profile", required=True, metavar="NAME")
    parser.add_argument("--windows", type=int, metavar="N", help="at most N windows (default: all)")
    arguments = parser.parse_args()
    with reference_model.stop_on_error():
        text = Text(arguments.model, arguments.text)
        model = reference_model.load(arguments.model)
        print(json.dumps(measure(model, text, arguments.profile, arguments.windows)))


if __name__ == "__main__":
    main()
