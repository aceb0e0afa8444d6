"""Writes the logits that transformers gives for some token windows.

The output contains one tensor, `logits`, f32 [windows, length, vocab]; with --decode, only the logits from the last
token of the first half on. Exits with 1 if the checkpoint does not load perfectly (see reference_model.py) or a logit
is not finite.
"""

import argparse
import json
from pathlib import Path

import reference_model
import torch
from safetensors.torch import save_file


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL_DIR")
    parser.add_argument("tokens", metavar="TOKENS.json", type=Path,
                        help="a list of lists of token ids, all of the same length")
    parser.add_argument("out", metavar="OUT.safetensors")
    parser.add_argument("--dequantize", action="store_true",
                        help="dequantize while loading (needed for asymmetric weights)")
    parser.add_argument("--decode", action="store_true",
                        help="from a cache: the first half of each window at once, then token by token")
    arguments = parser.parse_args()
    compute = reference_model.decoded_logits if arguments.decode else reference_model.logits

    windows = json.loads(arguments.tokens.read_text())
    if len({len(window) for window in windows}) != 1:
        parser.error("there must be at least one token window, and all must have the same length")
    with reference_model.stop_on_error():
        model = reference_model.load(arguments.model, arguments.dequantize)
        logits = torch.stack([compute(model, window) for window in windows])
    save_file({"logits": logits}, arguments.out)


if __name__ == "__main__":
    main()
