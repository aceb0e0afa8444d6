"""Compares the tensors `logits` of two safetensors files and prints a verdict as JSON.

The verdict is `ok` if max |A - B| <= tolerance * max |A|. Otherwise, or if the shapes differ, there are no
logits or a value is not finite, the script exits with 1.
"""

import argparse
import json
import sys

import numpy
from safetensors.numpy import load_file


def compare(a, b, tolerance):
    if a.shape != b.shape:
        return {"ok": False, "error": f"shapes differ: {list(a.shape)} and {list(b.shape)}"}
    if a.size == 0:
        return {"ok": False, "error": "no logits"}
    if not (numpy.isfinite(a).all() and numpy.isfinite(b).all()):
        return {"ok": False, "error": "a logit is not finite"}
    difference = float(numpy.abs(a.astype(numpy.float64) - b).max())
    largest = float(numpy.abs(a).max())
    return {"max_abs_difference": difference, "largest_logit": largest,
            "ratio": difference / largest if largest > 0 else difference,
            "ok": difference <= tolerance * largest}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", metavar="A.safetensors", help="the reference")
    parser.add_argument("b", metavar="B.safetensors")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="default 1e-3")
    arguments = parser.parse_args()

    verdict = compare(load_file(arguments.a)["logits"], load_file(arguments.b)["logits"],
                      arguments.tolerance)
    print(json.dumps(verdict))
    sys.exit(not verdict["ok"])


if __name__ == "__main__":
    main()
