"""Compares each profile of `quant eval` with transformers and with the program after which it is named.

  gptq       transformers, by the rule
  hf-stride  transformers, by the rule
  lmeval     transformers, by the rule; lm-evaluation-harness itself
  llamacpp   transformers, by the rule; llama.cpp's own llama-perplexity, built by
             setup_llama_cpp.sh, which reads the text and the model independently

Packed checkpoints in formats that llama.cpp's converter reads are converted as well, and llama-perplexity is compared
with `quant eval` on the same file.

Results by the rules are compared window by window, those of programs in total. check.py runs these as its `profile`
checks.
"""

import importlib
import json
import math
import shutil
from pathlib import Path

# Relative tolerance, far above the error of f32 arithmetic in a different order.
TOLERANCE = 1e-4
# Digits after the decimal point that llama-perplexity prints.
PERPLEXITY_DIGITS, ERROR_DIGITS = 4, 5
# Likelihoods per word and per byte of a text; like `perplexity`, a mean and its standard error.
PER_TEXT = ("word_perplexity", "byte_perplexity", "bits_per_byte")

# Model, its tokenizer, profile, text, and maximum number of windows.
CASES = [
    ("demo", None, "gptq-512", "text", 4),
    ("gqa", None, "gptq-128", "text", 4),
    ("stories260k", None, "gptq-256", "text", 4),
    ("demo", None, "hf-stride-256-128", "excerpt", None),
    ("gqa", None, "hf-stride-128-128", "excerpt", None),
    ("stories260k", None, "hf-stride-200-64", "excerpt", None),
    ("demo", "bos", "lmeval-rolling-128", "documents", None),
    ("demo", "eos", "lmeval-rolling-128", "excerpt", None),
    ("stories260k", None, "lmeval-rolling-100", "documents", None),
    ("demo", "bos", "llamacpp-512", "text", 4),
    ("demo", "eos", "llamacpp-101", "text", 5),
    ("tinystories-656k", None, "gptq-2048", "wikitext-2", 8),
]
# These take some minutes and run only with --whole.
WHOLE = [
    ("tinystories-656k", None, "wt2-gptq-2048", "wikitext-2", None),
    ("books-7m", None, "wt2-llamacpp-512", "wikitext-2", None),
]
# Formats, schemes and methods of checkpoints that llama.cpp's converter reads, dequantizes and writes as f32. For packed
# codes, it supports only groups, and only widths that fill whole words. It reads GPTQ zero points of 0 as a different
# number (docs/formats/gptq.md).
PACKED = [
    ("gptq", "w4a16-g64-sym", ["--method", "rtn"]),
    ("gptq", "w8a16-g32-sym", ["--method", "gptq"]),
    ("gptq", "w2a16-g32-sym", ["--method", "rtn"]),
    ("compressed-tensors", "w4a16-g64-sym", ["--method", "awq"]),
    ("compressed-tensors", "w8a16-g128-asym", ["--method", "rtn"]),
    ("compressed-tensors", "w4a16-g64-sym-progressive", ["--method", "qoq"]),
    ("compressed-tensors", "w8a8", ["--method", "rtn"]),
    ("compressed-tensors", "w4a8-g64", ["--method", "rtn"]),
]
# llama.cpp does not round activations, so quant uses a scheme with the same weights and float activations.
FLOAT_ACTIVATIONS = {"w8a8": "w8a16-channel-sym", "w4a8-g64": "w4a16-g64"}
PACKED_PROFILE, PACKED_WINDOWS = "llamacpp-256", 4


def with_tokenizer(model, kind, out):
    """A copy of a model whose tokenizer adds BOS, or that has no BOS and adds nothing."""
    if out.exists():
        return out
    shutil.copytree(model, out)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    if kind == "bos":
        config["bos_token"] = "<s>"
    else:
        tokenizer = json.loads((out / "tokenizer.json").read_text())
        tokenizer["post_processor"] = None
        (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    (out / "tokenizer_config.json").write_text(json.dumps(config))
    return out


def write_text(kind, source, scratch):
    """Returns a file with the whole text, its beginning (which ends inside a window), or several documents."""
    text = source.read_text()
    if kind == "text":
        return source
    if kind == "excerpt":
        out = scratch / "excerpt.txt"
        out.write_text(text[:2500])
        return out
    # Documents that are longer than several windows and shorter than one, and special characters.
    documents = [text[:1500], "Short.", "  Two  spaces,\n\na blank line, caf\u00e9 \u2014 \u65e5\u672c. \n",
                 text[3000:4200]]
    out = scratch / "documents.jsonl"
    out.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return out


class Comparison:
    """Collects differences of numbers, and mismatches that must not occur."""

    def __init__(self):
        self.apart, self.different = 0.0, []

    def number(self, name, our, their, digits=None):
        """Compares relatively; a printed number may also differ by half a unit of its last digit."""
        slack = 0.5 * 10 ** -digits if digits else 0.0
        apart = max(abs(our - their) - slack, 0.0) / abs(their)
        self.apart = max(self.apart, apart)
        if not apart <= TOLERANCE:  # also when it is not a number
            self.different.append(f"{name} {our!r}, not {their!r}")

    def equal(self, name, our, their):
        if our != their:
            self.different.append(f"{name} {our!r}, not {their!r}")

    def rule(self, ours, theirs):
        for name in ("tokens_scored", "windows", "window_tokens"):
            self.equal(name, ours[name], theirs[name])
        for name in ("perplexity", "nll"):
            self.number(name, ours[name]["mean"], theirs[name])
        for name in PER_TEXT:
            if name in theirs:
                self.number(name, ours[name]["mean"], theirs[name])
        if "token_standard_error" in theirs:
            self.number("token_standard_error", ours["token_standard_error"], theirs["token_standard_error"])
        self.equal("len(window_nll)", len(ours["window_nll"]), len(theirs["window_nll"]))
        for index, (our, their) in enumerate(zip(ours["window_nll"], theirs["window_nll"])):
            self.number(f"window_nll[{index}]", our, their)

    def harness(self, ours, theirs):
        for name in PER_TEXT:
            self.number(f"lm_eval's {name}", ours[name]["mean"], theirs[name])
        self.number("lm_eval's sum", ours["nll"]["mean"] * ours["tokens_scored"], theirs["nll"])

    def llama_cpp(self, ours, theirs):
        """Compares with the program's own numbers, including the perplexity after every chunk."""
        self.equal("llama.cpp's chunks", ours["windows"], theirs["windows"])
        self.number("llama.cpp's perplexity", ours["perplexity"]["mean"], theirs["perplexity"],
                    PERPLEXITY_DIGITS)
        self.number("llama.cpp's +/-", ours["token_standard_error"], theirs["token_standard_error"],
                    ERROR_DIGITS)
        total, count = 0.0, 0
        windows = zip(ours["window_nll"], ours["window_tokens"], theirs["perplexities"])
        for index, (nll, tokens, their) in enumerate(windows):
            total, count = total + nll * tokens, count + tokens
            self.number(f"llama.cpp's [{index + 1}]", math.exp(total / count), their, PERPLEXITY_DIGITS)

    def verdict(self, against):
        return ("; ".join(self.different[:3]) or f"{' and '.join(against)}, {self.apart:.1e} apart",
                not self.different)


def run(check, llama_cpp, name, tokenizer, profile, text, windows):
    model = check.model(name)
    if model is None:
        return
    at_most = ["--windows", windows] if windows else []

    def work():
        directory = with_tokenizer(model, tokenizer, check.scratch / f"{name}-{tokenizer}") \
            if tokenizer else model
        wikitext = check.data / "text/wiki.test.raw"
        file = wikitext if text == "wikitext-2" else write_text(text, check.text(name), check.scratch)
        options = ["--text", file, "--profile", profile, *at_most]
        ours = json.loads(check.program("quant", "eval", directory, *options, "--quiet", "--json"))
        comparison, against = Comparison(), ["transformers"]
        comparison.equal("profile", ours["profile"], profile)
        comparison.rule(ours, json.loads(check.script("reference_profiles", directory, *options)))
        length = int(profile.split("-")[-1])
        if profile.startswith("lmeval"):
            harness = check.script("reference_lm_eval", directory, "--text", file, "--length", length)
            comparison.harness(ours, json.loads(harness))
            against.append("lm_eval")
        if rule(profile).startswith("llamacpp") and llama_cpp:
            theirs = json.loads(check.script("reference_llama_cpp", llama_cpp, directory, "--text",
                                             file, "--length", length, *at_most))
            comparison.llama_cpp(ours, theirs)
            # Both programs must have the same tokens.
            reader = importlib.import_module("reference_profiles").Text(directory, file)
            tokens = reader.tokens(reader.documents[0])
            flat = [token for chunk in theirs["tokens"] for token in chunk]
            comparison.equal("llama.cpp's tokens", tokens[:len(flat)], flat)
            against.append("llama.cpp")
        return comparison.verdict(against)

    check.step(title(name, tokenizer, profile), work)


def run_packed(check, llama_cpp, form, scheme, method):
    """Compares `quant eval` of a checkpoint with llama.cpp, whose own converter reads the checkpoint."""

    def work():
        model = with_tokenizer(check.model("demo"), "bos", check.scratch / "demo-bos")
        out = check.scratch / f"llama-cpp-{form}-{scheme}"
        calibration = ["--samples", 4, "--seq-len", 128] if method[1] != "rtn" else []

        def quantize(scheme, out):
            check.program("quant", "quantize", model, "-o", out, "--format", form, "--scheme", scheme, *method,
                          *calibration, "--quiet")
            return out

        quantize(scheme, out)
        judged = out
        if scheme in FLOAT_ACTIVATIONS:
            judged = quantize(FLOAT_ACTIVATIONS[scheme], check.scratch / f"llama-cpp-{form}-float")
        text, length = check.text("demo"), int(PACKED_PROFILE.split("-")[-1])
        at_most = ["--windows", PACKED_WINDOWS]
        ours = json.loads(check.program("quant", "eval", judged, "--text", text, "--profile", PACKED_PROFILE,
                                        *at_most, "--quiet", "--json"))
        theirs = json.loads(check.script("reference_llama_cpp", llama_cpp, out, "--text", text,
                                         "--length", length, *at_most))
        comparison = Comparison()
        comparison.llama_cpp(ours, theirs)
        for directory in {out, judged}:
            shutil.rmtree(directory)
        return comparison.verdict(["llama.cpp"])

    check.step(packed_title(form, scheme, method), work)


def packed_title(form, scheme, method):
    return f"llama.cpp {form} {scheme} {method[-1]}"


def rule(profile):
    """The rule of a profile, regardless of the text."""
    return profile.removeprefix("wt2-")


def title(name, tokenizer, profile):
    return f"profile {profile} {name}{f' {tokenizer}' if tokenizer else ''}"


def available(llama_cpp):
    """The directory of llama.cpp, or None with a message."""
    if llama_cpp and (Path(llama_cpp) / "bin/llama-perplexity").exists():
        return Path(llama_cpp).resolve()
    print("SKIPPED: llama.cpp is not available: llamacpp profiles against the program itself", flush=True)
    return None


def run_all(check, llama_cpp, only, whole=False):
    cases = [case for case in CASES + WHOLE * whole if only in title(*case[:3])]
    packed = [case for case in PACKED if only in packed_title(*case)]
    if packed or any(rule(case[2]).startswith("llamacpp") for case in cases):
        llama_cpp = available(llama_cpp)
    for case in cases:
        run(check, llama_cpp, *case)
    for case in packed if llama_cpp else []:
        run_packed(check, llama_cpp, *case)
