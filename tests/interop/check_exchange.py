"""GGUF files, splits and importance matrices that quant and llama.cpp's programs pass to each other.

  imatrix   a matrix by llama-imatrix (with --whole, in both formats), and one by quant in the older format: quant and
            llama-quantize write the same tensors with it
  gathered  quant's matrix and llama-imatrix's, gathered on the same window
  splits    parts written by quant, scored by llama.cpp; parts written by llama-gguf-split, read by quant
  theirs    a file written by llama-quantize, evaluated by quant and, dequantized, by llama.cpp
  kl        perplexity and KL divergence of a quantized file from the float model, as `llamacpp-512` and as
            `llama-perplexity --kl-divergence` print them

check.py runs these as its `exchange` checks. Programs of llama.cpp that compute get floats, so that they do not round
activations.
"""

import importlib
import json
import re
import subprocess

import numpy
from tokenizers import Tokenizer

from check_gguf import DIGITS, TOLERANCE, differences, llama_quantize, perplexities, quantize, reader, tensors

# Perplexity, relative: products of floats in a different order. llama.cpp prints six digits after the decimal point.
PERPLEXITY = 1e-6
SIX_DIGITS = 5e-7
# Mean squares, relative: products of floats in a different order.
MEANS = 1e-3
# llama.cpp stores the float model's log-probabilities in 16 bits, in steps of 16 / 65535 or less. The errors average
# out.
DIVERGENCE = 5e-3


def run(llama_cpp, program, *arguments):
    command = [llama_cpp / "bin" / program, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{program}: {done.stdout[-400:]} {done.stderr[-400:]}")
    return done.stdout + done.stderr


def evaluated(check, path, length, windows, *options):
    return json.loads(check.program("quant", "eval", path, "--text", check.text("demo"), "--profile", f"llamacpp-{length}",
                                    "--windows", windows, "--quiet", "--json", *options))


def imatrix(check, llama_cpp, name, mixtures, forms):
    gguf, model, at = reader(llama_cpp), check.model(name), check.scratch
    floats = quantize(check, model, at / "floats.gguf", "--scheme", "f32")
    compared = 0
    for form in forms:
        matrix = at / f"theirs.{form}"
        run(llama_cpp, "llama-imatrix", "-m", floats, "-f", check.text(name), "-c", 128, "-b", 128, "-ub", 128,
            "--chunks", 16 if name != "demo" else 2, "-o", matrix, "--output-format", form, "--no-ppl")
        for mixture in mixtures:
            ours = quantize(check, model, at / "ours.gguf", "--scheme", mixture, "--imatrix", matrix)
            theirs = llama_quantize(llama_cpp, floats, at / "theirs-quantized.gguf", mixture, "--imatrix", matrix)
            wrong = differences(tensors(gguf, ours), tensors(gguf, theirs))
            if wrong:
                return f"llama-imatrix's {form}, {mixture}: {wrong[:4]} differ", False
            compared += len(tensors(gguf, ours))
    matrix = at / "ours.dat"
    ours = quantize(check, model, at / "ours.gguf", "--scheme", "q4_k_m", "--calibration", "builtin", "--samples", 4,
                    "--seq-len", 128, "--save-imatrix", matrix)
    theirs = llama_quantize(llama_cpp, floats, at / "theirs-quantized.gguf", "Q4_K_M", "--imatrix", matrix)
    plain = llama_quantize(llama_cpp, floats, at / "plain.gguf", "Q4_K_M")
    wrong = differences(tensors(gguf, ours), tensors(gguf, theirs))
    if wrong or not differences(tensors(gguf, theirs), tensors(gguf, plain)):
        return f"quant's dat: {wrong[:4]} differ", False
    return f"{compared + len(tensors(gguf, ours))} tensors", True


def means(gguf, path):
    """The mean squares of a matrix, by tensor."""
    found = {tensor.name: numpy.float64(tensor.data).ravel() for tensor in gguf.GGUFReader(path).tensors}
    return {name.removesuffix(".in_sum2"): (sums.reshape(len(counts), -1) / numpy.maximum(counts, 1)[:, None]).ravel()
            for name, sums in found.items() if name.endswith(".in_sum2")
            for counts in [found[name.replace(".in_sum2", ".counts")]]}


def gathered(check, llama_cpp, name, tokens):
    gguf, model, at = reader(llama_cpp), check.model(name), check.scratch
    floats = quantize(check, model, at / "floats.gguf", "--scheme", "f32")
    text, tokenizer = check.text(name).read_text(), Tokenizer.from_file(str(model / "tokenizer.json"))
    whole = tokenizer.encode(text)
    window = at / "window.txt"
    window.write_text(text[:whole.offsets[tokens - 1][1]])
    if tokenizer.encode(window.read_text()).ids != whole.ids[:tokens]:
        return "the text of the first window has different tokens", False
    run(llama_cpp, "llama-imatrix", "-m", floats, "-f", check.text(name), "-c", tokens, "-b", tokens, "-ub", tokens, "--chunks", 1,
        "-o", at / "theirs.gguf", "--no-ppl", "--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off")
    quantize(check, model, at / "ours-quantized.gguf", "--scheme", "q8_0", "--calibration", window, "--samples", 1,
             "--seq-len", tokens, "--save-imatrix", at / "gathered.gguf")
    ours, theirs = means(gguf, at / "gathered.gguf"), means(gguf, at / "theirs.gguf")
    if ours.keys() != theirs.keys():
        return f"entries: {sorted(ours.keys() ^ theirs.keys())[:4]}", False
    apart = max(numpy.abs(ours[name] / theirs[name] - 1).max() for name in ours)
    return f"{len(ours)} tensors, at most {apart:.1e} apart", apart < MEANS


def splits(check, llama_cpp):
    model, at = check.model("demo"), check.scratch
    whole = quantize(check, model, at / "whole.gguf", "--scheme", "f32")
    quantize(check, model, at / "parts", "--scheme", "f32", "--split-max-size", "6M")
    parts = sorted((at / "parts").glob("model-*.gguf"))
    theirs, ours = perplexities(check, llama_cpp, parts[0], check.text("demo"), 64, 2)
    run(llama_cpp, "llama-gguf-split", "--split", "--split-max-tensors", 20, whole, at / "split")
    split = sorted(at.glob("split-*.gguf"))
    again = evaluated(check, split[0], 64, 2)["perplexity"]["mean"]
    ok = abs(theirs - ours) <= DIGITS + TOLERANCE * ours and again == ours and min(len(parts), len(split)) > 2
    return f"{len(parts)} parts, {theirs:.4f} by llama.cpp, {ours:.4f}; {len(split)} of its parts, {again:.4f}", ok


def theirs(check, llama_cpp, mixtures):
    at, measured = check.scratch, []
    floats = quantize(check, check.model("demo"), at / "floats.gguf", "--scheme", "f32")
    for mixture in mixtures:
        packed = llama_quantize(llama_cpp, floats, at / "theirs.gguf", mixture)
        # llama-quantize copies the metadata by which quant recognizes its own files.
        check.program("quant", "quantize", check.model("demo"), "-o", packed, "--force", "--quiet", status=2)
        dequantized = llama_quantize(llama_cpp, packed, at / "dequantized.gguf", "F32", "--allow-requantize")
        by_llama_cpp, by_quant = perplexities(check, llama_cpp, dequantized, check.text("demo"), 64, 2)
        direct = evaluated(check, packed, 64, 2)["perplexity"]["mean"]
        measured.append(f"{mixture} {direct:.4f}")
        if abs(by_llama_cpp - direct) > DIGITS + TOLERANCE * direct or abs(by_quant - direct) > TOLERANCE * direct:
            return f"{mixture}: {direct:.4f}, {by_llama_cpp:.4f} by llama.cpp", False
    return ", ".join(measured), True


def kl(check, llama_cpp, mixture, windows):
    at, model, text = check.scratch, check.model("demo"), check.text("demo")
    floats = quantize(check, model, at / "floats.gguf", "--scheme", "f32")
    packed = quantize(check, model, at / "packed.gguf", "--scheme", mixture)
    dequantized = llama_quantize(llama_cpp, packed, at / "dequantized.gguf", "F32", "--allow-requantize")
    importlib.import_module("reference_llama_cpp").measure(llama_cpp, floats, text, 512, windows, at)
    printed = run(llama_cpp, "llama-perplexity", "--model", dequantized, "--file", text, "--no-escape", "--ctx-size", 512,
                  "--batch-size", 512, "--ubatch-size", 512, "--cache-type-k", "f32", "--cache-type-v", "f32",
                  "--flash-attn", "off", "--chunks", windows, "--kl-divergence-base", at / "logits", "--kl-divergence")
    numbers = [float(re.search(rf"{name}\s*:\s*([0-9.]+)", printed)[1]) for name in (r"Mean PPL\(Q\)", "Mean    KLD")]
    result = evaluated(check, packed, 512, windows, "--reference", model)
    perplexity, divergence = result["perplexity"]["mean"], result["comparison"]["kl"]["mean"]
    apart = abs(numbers[0] / perplexity - 1)
    ok = apart <= PERPLEXITY and abs(numbers[1] - divergence) <= SIX_DIGITS + DIVERGENCE * divergence and divergence > 1e-4
    return f"{mixture}: perplexity {perplexity:.6f}, {apart:.1e} apart; KL {divergence:.7f}, {numbers[1]:.6f} by llama.cpp", ok


def run_all(check, llama_cpp, only, whole):
    if llama_cpp is None or not (llama_cpp / "bin/llama-imatrix").exists():
        print("SKIPPED: llama.cpp's programs are missing: exchange", flush=True)
        return
    llama_cpp = llama_cpp.resolve()
    forms = ["gguf", "dat"] if whole else ["gguf"]
    cases = {
        "imatrix": lambda: imatrix(check, llama_cpp, "demo", ["Q4_K_M"], forms),
        "gathered": lambda: gathered(check, llama_cpp, "demo", 128),
        "gathered latent": lambda: gathered(check, llama_cpp, "deepseek_v3-wide", 128),
        # One importance per head for the matrices of latent attention.
        "imatrix latent": lambda: imatrix(check, llama_cpp, "deepseek_v3-wide", ["Q4_K_M", "IQ2_XXS"], forms),
        "splits": lambda: splits(check, llama_cpp),
        "theirs": lambda: theirs(check, llama_cpp, ["Q4_K_M", *(["Q3_K_M", "IQ4_XS", "Q5_0", "TQ1_0"] if whole else [])]),
        "kl q4_k_m": lambda: kl(check, llama_cpp, "q4_k_m", 8 if whole else 2),
    }
    if whole:
        cases |= {f"kl {mixture}": (lambda mixture=mixture: kl(check, llama_cpp, mixture, 8)) for mixture in ("iq4_xs", "q3_k_m", "q8_0")}
    for title, work in cases.items():
        if only in f"exchange {title}":
            check.step(f"exchange {title}", work)
