"""Prints the perplexity that transformers gives on a text, as one line of JSON.

The text is tokenized once as a whole, with the special tokens that tokenizer.json adds, and cut
into windows of L tokens that do not overlap; a remainder is dropped. In every window the L-1 tokens
after the first are scored. Perplexity = exp(mean negative log-likelihood of all scored tokens);
log-softmax in f32, sum in f64.
"""

import argparse
import json
import math
from pathlib import Path

import reference_model
import torch
from tokenizers import Tokenizer


def tokenize(model_dir, text_file):
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer.encode(text_file.read_bytes().decode("utf-8")).ids


def negative_log_likelihood(logits, tokens):
    """Sum over tokens 1.. of -log p(token | tokens before it)."""
    log_probabilities = torch.log_softmax(logits[:-1], dim=-1)
    scored = log_probabilities.gather(1, torch.tensor(tokens[1:]).unsqueeze(1))
    return -scored.double().sum().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL_DIR", type=Path)
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text")
    parser.add_argument("--window", type=int, required=True, metavar="L", help="tokens in a window")
    parser.add_argument("--windows", type=int, metavar="N", help="at most N windows (default: all)")
    parser.add_argument("--dequantize", action="store_true",
                        help="dequantize while loading (needed for asymmetric weights)")
    arguments = parser.parse_args()
    if arguments.window < 2:
        parser.error("--window must be at least 2")

    length = arguments.window
    tokens = tokenize(arguments.model, arguments.text)
    starts = range(0, len(tokens) - length + 1, length)[:arguments.windows]
    if not starts:
        parser.error(f"no window of {length}: the text has {len(tokens)} tokens")

    total = 0.0
    with reference_model.stop_on_error():
        model = reference_model.load(arguments.model, arguments.dequantize)
        for start in starts:
            window = tokens[start:start + length]
            total += negative_log_likelihood(reference_model.logits(model, window), window)
    scored = len(starts) * (length - 1)
    print(json.dumps({"perplexity": math.exp(total / scored), "tokens_scored": scored,
                      "windows": len(starts)}))


if __name__ == "__main__":
    main()
