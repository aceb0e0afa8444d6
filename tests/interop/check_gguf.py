"""Compares GGUF files with llama.cpp itself: its library, llama-quantize, its converter and llama-perplexity.

  blocks    rows of every block type: bytes equal to the output of `ggml_quantize_chunk`, with and
            without an importance; random bytes decoded to the floats of gguf's own dequantizers
  refined   rows by quant's own search: less weighted error than with `ggml_quantize_chunk`
  files     mixtures of a dense model and of models with wide experts: each tensor of quant's file equal to that of
            llama-quantize, also with an importance matrix that quant wrote; all mixtures with --whole
  convert   tensors and keys of quant's F32 file equal to the converter's
  score     a quantized file and the same weights as floats, written by llama-quantize: `quant eval` on both, and
            llama-perplexity on the floats
  loads     files of other families, loaded and scored by llama.cpp; for many also the tensors equal to the converter's

check.py runs these as its `gguf` checks.
"""

import importlib
import json
import sys

import check_families
import numpy

# Mixtures that are written without an importance matrix, and mixtures that are written with one. With --whole, the
# others are added, and all are written both ways, except those that require a matrix.
MIXTURES = ["Q4_K_M", "Q3_K_M", "IQ4_XS", "Q5_0", "TQ1_0"]
WEIGHTED = ["Q4_K_M", "IQ4_XS", "Q2_K_S", "IQ2_S", "IQ3_XS"]
REQUIRING = ["Q2_K_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS"]
WHOLE = ["Q2_K", "Q8_0", "F16", "BF16", "Q4_0", "Q4_1", "Q5_1", "Q3_K_S", "Q3_K_L", "Q4_K_S", "Q5_K_S", "Q5_K_M", "Q6_K",
         "IQ3_S", "IQ3_M", "IQ4_NL", "TQ2_0", "MXFP4_MOE"]
# Models whose experts, and matrices of latent attention, are as wide as a super-block, so that no type is replaced.
WIDE = ["mixtral-wide", "qwen3-moe-wide", "deepseek_v3-wide"]
TYPES = {"F16": 1, "BF16": 30, "Q8_0": 8, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
         "Q5_K": 13, "Q6_K": 14, "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ3_S": 21, "IQ2_S": 22,
         "IQ4_NL": 20, "IQ4_XS": 23, "TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39, "NVFP4": 40}
# ggml's library ends the process if these are encoded without an importance.
WITH_IMPORTANCE = ["IQ2_XXS", "IQ2_XS"]
COLUMNS = 512
# Tiny models of make_tiny.py.
FAMILIES = ["gqa", "tied", "llama3-rope", "linear-rope", "qwen2", "qwen3-unbiased", "mixtral", "qwen3-moe",
            "gemma2-alternating", "gemma3-sixth", "hunyuan-moe", "internlm3-published"]
# Models whose tensors are also compared with the converter's.
CONVERTED = ["fused", "fused-longrope", "smollm3-fourth", "granite", "glm4", "olmo2-plain", "seed_oss-plain", "cohere-plain",
             "starcoder2-plain", "qwen2_moe-all", "gpt_oss-plain", "gpt_oss-codes", "qwen3_5-equal", "qwen3_5_moe-equal",
             "qwen3_next-equal", "glm4_moe-first", "deepseek_v3-mla", "deepseek_v2-mla", "olmoe-plain", "granitemoe-plain",
             "cohere2-fourth", "ernie4_5-plain", "gemma4-shared-keys", "gemma4-own-inputs", "gemma4-with-experts",
             "olmo3-fourth", "minimax_m2-plain", "ernie4_5_moe-plain", "hunyuan-dense-plain"]
# As FAMILIES and CONVERTED, but without --whole, they take turns by the day. Some are models of make_vision_language.py.
# The converter cannot read the first ones as they are saved here, takes long, or gives different results.
LATER_FAMILIES = ["llava-llama", "llava-qwen2", "gemma3-vl-sixth", "granite_4-rotated", "nemotron_h-dense",
                  "falcon_h1-tied", "exaone4-windows", "internlm2-unbiased", "gpt_neox-parallel", "gpt_neox-serial",
                  "gpt2-tied"]
LATER_CONVERTED = ["qwen2-vl-no-eps", "qwen2.5-vl-no-eps", "qwen3-vl", "qwen3-vl-moe-all", "mistral3", "mistral3-ministral3",
                   "mistral3-mistral4", "lfm2-tied", "lfm2_moe-corrected", "granite_4-hybrid", "granite_4-experts",
                   "granite_4-attention", "nemotron_h-grouped", "nemotron_h-narrow", "falcon_h1-normed", "exaone4-plain",
                   "hy_v3-first", "deepseek_v32-indexed", "glm_moe_dsa-shared", "glm-partial", "bloom-tied", "phi-partial",
                   "llama4-second"]
PER_DAY = 6
# Models with an indexer, which quant runs only on windows of up to 128 tokens. On longer ones, in which keys are selected,
# llama.cpp is compared with transformers.
INDEXED = ["deepseek_v32-indexed", "glm_moe_dsa-shared"]
# Mixtures in which these models, except gpt_oss-codes, are also written.
TYPED = ["Q4_K_M", "Q3_K_M", "MXFP4_MOE"]
# llama-perplexity prints four digits after the decimal point.
DIGITS = 5e-5
# Relative difference between f32 products whose terms are added in a different order.
TOLERANCE = 1e-5


def rows(random):
    """Rows of every kind: heavy tails, one sign, zeros, subnormal, huge, ties, sparse, uneven scales, zeros in some of
    the parts of 32 elements, in all but one super-block, and in all but one part."""
    k = COLUMNS
    normal = random.standard_normal
    kinds = [
        random.standard_t(5, (60, k)), normal((30, k)) * 1e-3, random.uniform(0, 1, (20, k)), -random.uniform(0, 1, (20, k)),
        numpy.zeros((4, k)), normal((20, k)) * 1e-39, normal((20, k)) * 1e-14, normal((20, k)) * 1e-16,
        normal((20, k)) * 1e4, numpy.ones((3, k)), numpy.full((3, k), -2.5), random.integers(0, 2, (20, k)) * normal((20, k)),
        numpy.round(normal((20, k)) * 4) / 4, normal((20, k)) * numpy.exp(normal((20, k)) * 4),
        numpy.kron(random.integers(0, 2, (20, k // 32)), numpy.ones((1, 32))) * normal((20, k)),
        numpy.kron(numpy.tile(numpy.eye(k // 256), (4, 1)), numpy.ones((1, 256))) * normal((4 * k // 256, k)),
        numpy.kron(numpy.tile(numpy.eye(k // 32), (2, 1)), numpy.ones((1, 32))) * normal((2 * k // 32, k)),
    ]
    return numpy.concatenate(kinds).astype("<f4")


def reader(llama_cpp):
    """gguf-py, from llama.cpp's sources."""
    path = str(llama_cpp / "source/gguf-py")
    if path not in sys.path:
        sys.path.insert(0, path)
    return importlib.import_module("gguf")


def tensors(gguf, path):
    """Type, shape and bytes of every tensor; llama-quantize drops trailing dimensions of one."""
    def shape(dimensions):
        found = list(map(int, dimensions))
        while len(found) > 1 and found[-1] == 1:
            found.pop()
        return tuple(found)

    return {t.name: (t.tensor_type.name, shape(t.shape), t.data.tobytes()) for t in gguf.GGUFReader(path).tensors}


def differences(ours, theirs):
    """Names that only one file has, or whose types, shapes or bytes differ."""
    return sorted(name for name in ours.keys() | theirs.keys() if not same(name, ours.get(name), theirs.get(name)))


def same(name, ours, theirs):
    if ours == theirs or None in (ours, theirs):
        return ours == theirs
    if name == "token_embd.weight" and ours[1][1] > theirs[1][1]:
        # For Gemma, the converter drops rows beyond the tokenizer's vocabulary.
        return ours[:1] == theirs[:1] and ours[2].startswith(theirs[2])
    if ours[0] != "F32" or not name.endswith((".ssm_a", ".ssm_in.weight", ".attn_k.weight")):
        return False
    # The first is computed with an exponential, the others with two factors in Falcon-H1.
    ours, theirs = (numpy.frombuffer(tensor[2], "<f4") for tensor in (ours, theirs))
    return ours.shape == theirs.shape and numpy.abs(ours / theirs - 1).max() < 3e-7


def blocks(check, llama_cpp):
    library = importlib.import_module("ggml").Ggml(llama_cpp)
    random = numpy.random.default_rng(20)
    values = rows(random)
    importance = numpy.exp(random.standard_normal(COLUMNS) * 2).astype("<f4")
    gappy = importance.copy()
    gappy[random.integers(0, COLUMNS, 60)] = 0
    source, weights, out = (check.scratch / name for name in ("rows", "importance", "blocks"))
    values.tofile(source)
    gguf = reader(llama_cpp)
    compared = 0
    for name, kind in TYPES.items():
        for weight in (None, importance, gappy):
            options = []
            if weight is None and name in WITH_IMPORTANCE:
                continue
            if weight is not None:
                weight.tofile(weights)
                options = [weights]
            check.program("interop-dump", "encode", name, COLUMNS, source, out, *options)
            ours = numpy.fromfile(out, numpy.uint8).reshape(len(values), -1)
            theirs = library.quantize(kind, values, weight).reshape(len(values), -1)
            if name == "IQ3_S":
                theirs = with_room_for_zeros(theirs, values)
            wrong = numpy.nonzero((ours != theirs).any(axis=1))[0]
            if len(wrong):
                return f"{name}: {len(wrong)} rows differ, the first {wrong[0]}", False
            compared += len(values)
        # Arbitrary bytes. Where gguf-py's value is not finite, quant's must not be finite either.
        noise = random.integers(0, 256, ours.shape).astype(numpy.uint8)
        kind = gguf.GGMLQuantizationType(kind)
        with numpy.errstate(all="ignore"):
            theirs = gguf.quants.dequantize(noise, kind).astype("<f4")
        noise.tofile(source.with_name("noise"))
        check.program("interop-dump", "decode", name, COLUMNS, source.with_name("noise"), out)
        ours = numpy.fromfile(out, "<f4").reshape(theirs.shape)
        finite = numpy.isfinite(theirs)
        if not numpy.array_equal(ours[finite], theirs[finite]) or numpy.isfinite(ours[~finite]).any():
            return f"{name}: decoded values differ", False
        compared += len(noise)
    return f"{len(TYPES)} types, {compared} rows", True


def with_room_for_zeros(blocks, values):
    """IQ3_S rows of ggml with all indices and signs in their places. When ggml skips a part of zeros, it writes those of
    the next parts in its place, although readers expect room for it."""
    blocks = blocks.reshape(-1, 110).copy()
    for block, is_zero in zip(blocks, ~values.reshape(-1, 8, 32).any(axis=2), strict=True):
        order = numpy.nonzero(~is_zero)[0]
        for part in (block[2:66].reshape(8, 8), block[74:106].reshape(8, 4)):
            written = part[:len(order)].copy()
            part[:] = 0
            part[order] = written
    return blocks.reshape(len(values), -1)


def refined(check, llama_cpp):
    """quant's own search: gguf-py reads rows of every type, and their weighted error is less than ggml's."""
    library, gguf = importlib.import_module("ggml").Ggml(llama_cpp), reader(llama_cpp)
    random = numpy.random.default_rng(21)
    values = (random.standard_t(5, (100, COLUMNS)) * 0.02).astype("<f4")
    importance = numpy.exp(random.standard_normal(COLUMNS) * 1.5).astype("<f4")
    source, weights, out = (check.scratch / name for name in ("rows", "importance", "blocks"))
    values.tofile(source)
    importance.tofile(weights)
    worst = 0
    for name, number in TYPES.items():
        if name in ("F16", "BF16"):
            continue
        kind = gguf.GGMLQuantizationType(number)
        for weight in (importance,) if name in WITH_IMPORTANCE else (None, importance):
            check.program("interop-dump", "refine", name, COLUMNS, source, out, *([] if weight is None else [weights]))
            ours = numpy.fromfile(out, numpy.uint8).reshape(len(values), -1)
            theirs = library.quantize(number, values, weight).reshape(len(values), -1)
            errors = [((gguf.quants.dequantize(rows, kind) - values) ** 2 * (1 if weight is None else weight)).sum()
                      for rows in (ours, theirs)]
            worst = max(worst, errors[0] / errors[1])
            if not errors[0] < errors[1]:
                return f"{name}: {errors[0]:.4e}, {errors[1]:.4e} by ggml", False
    return f"at most {worst:.3f} of ggml's error", True


def quantize(check, model, out, *options):
    check.program("quant", "quantize", model, "-o", out, "--format", "gguf", "--force", "--quiet", "--reference-search",
                  *options)
    return out


def llama_quantize(llama_cpp, source, out, mixture, *options):
    import subprocess
    command = [llama_cpp / "bin/llama-quantize", *options, source, out, mixture]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"llama-quantize: {done.stdout[-600:]} {done.stderr[-600:]}")
    return out


def files(check, llama_cpp, name, mixtures, weighted):
    gguf, model, at = reader(llama_cpp), check.model(name), check.scratch
    plain = quantize(check, model, at / "f32.gguf", "--scheme", "f32")
    imatrix = at / "imatrix.gguf"
    calibration = ["--calibration", "builtin", "--samples", 8, "--seq-len", 128, "--save-imatrix", imatrix]
    total, types = 0, set()
    for mixture, is_weighted in [(m, False) for m in mixtures] + [(m, True) for m in weighted]:
        ours = quantize(check, model, at / "ours.gguf", "--scheme", mixture, *(calibration if is_weighted else []))
        options = ["--imatrix", imatrix] if is_weighted else []
        theirs = llama_quantize(llama_cpp, plain, at / "theirs.gguf", mixture, *options)
        found = tensors(gguf, ours)
        wrong = differences(found, tensors(gguf, theirs))
        if wrong:
            return f"{mixture}{' weighted' if is_weighted else ''}: {wrong[:4]} differ", False
        total += len(found)
        types |= {kind for name, (kind, *_) in found.items() if "_exps" in name}
    experts = f", experts as {' '.join(sorted(types))}" if types else ""
    return f"{len(mixtures)} mixtures, {len(weighted)} weighted, {total} tensors{experts}", True


def keys(gguf, path):
    # Keys that describe the file rather than the model, and keys that the converter leaves at their defaults.
    aside = ("GGUF.", "general.", "quant.", "tokenizer.ggml.add_")
    fields = gguf.GGUFReader(path).fields.items()
    return {key: (field.types, field.contents()) for key, field in fields if not key.startswith(aside)}


def convert(check, llama_cpp):
    gguf, model, at = reader(llama_cpp), check.model("demo"), check.scratch
    ours = quantize(check, model, at / "f32.gguf", "--scheme", "f32")
    theirs = at / "converted.gguf"
    importlib.import_module("reference_llama_cpp").convert(llama_cpp, model, "smollm", theirs)
    wrong = differences(tensors(gguf, ours), tensors(gguf, theirs))
    mine, other = keys(gguf, ours), keys(gguf, theirs)
    wrong += sorted(key for key in mine.keys() | other.keys() if mine.get(key) != other.get(key))
    return wrong or f"{len(mine)} keys", not wrong


def perplexities(check, llama_cpp, path, text, length, windows):
    """llama.cpp's perplexity and quant's for one file with float weights."""
    with_llama_cpp = importlib.import_module("reference_llama_cpp").measure
    theirs = with_llama_cpp(llama_cpp, path, text, length, windows, check.scratch)["perplexity"]
    ours = json.loads(check.program("quant", "eval", path, "--text", text, "--profile", f"llamacpp-{length}",
                                    "--windows", windows, "--quiet", "--json"))
    return theirs, ours["perplexity"]["mean"]


def score(check, llama_cpp):
    """Scores a quantized file after llama.cpp itself dequantized it, so that neither program rounds activations."""
    at = check.scratch
    packed = quantize(check, check.model("demo"), at / "packed.gguf", "--scheme", "q4_k_m")
    floats = llama_quantize(llama_cpp, packed, at / "dequantized.gguf", "F32", "--allow-requantize")
    text = check.text("demo")
    theirs, ours = perplexities(check, llama_cpp, floats, text, 256, 4)
    packed_ours = json.loads(check.program("quant", "eval", packed, "--text", text, "--profile", "llamacpp-256",
                                           "--windows", 4, "--quiet", "--json"))["perplexity"]["mean"]
    apart = abs(theirs - packed_ours)
    ok = apart <= DIGITS + TOLERANCE * theirs and abs(ours - packed_ours) <= TOLERANCE * ours
    return f"{packed_ours:.4f}, {theirs:.4f} by llama.cpp", ok


def same_as_converted(check, llama_cpp, model, ours):
    """Names of tensors that differ from the converter's."""
    gguf, theirs = reader(llama_cpp), check.scratch / "converted.gguf"
    importlib.import_module("reference_llama_cpp").convert(llama_cpp, model, "smollm", theirs)
    return differences(tensors(gguf, ours), apart(tensors(gguf, theirs)))


def apart(found):
    """Splits joined gates and ups of experts into two tensors."""
    for name in [name for name in found if ".ffn_gate_up_exps." in name]:
        kind, (columns, rows, experts), data = found.pop(name)
        both = numpy.frombuffer(data, "<f4").reshape(experts, 2, rows // 2, columns)
        for i, part in enumerate(("gate", "up")):
            one = numpy.ascontiguousarray(both[:, i]).tobytes()
            found[name.replace("gate_up", part)] = kind, (columns, rows // 2, experts), one
    return found


def loads(check, llama_cpp, name):
    at, gguf = check.scratch, reader(llama_cpp)
    model = check.model(name)
    requantize = name == "gpt_oss-codes"
    # Codes are kept, whatever the types.
    path = quantize(check, model, at / f"{name}.gguf", *([] if requantize else ["--scheme", "f32"]))
    is_converted = name in CONVERTED + LATER_CONVERTED
    wrong = same_as_converted(check, llama_cpp, model, path) if is_converted else []
    if wrong:
        return f"{wrong[:4]} differ from the converter's", False
    for mixture in TYPED if is_converted and not requantize else []:
        typed = quantize(check, model, at / "typed.gguf", "--scheme", mixture, "--allow-fallback")
        wrong = differences(tensors(gguf, typed), tensors(gguf, llama_quantize(llama_cpp, path, at / "theirs.gguf", mixture)))
        if wrong:
            return f"{mixture}: {wrong[:4]} differ from llama-quantize's", False
    if requantize:
        # A file with float weights, so that llama.cpp does not round activations.
        path = llama_quantize(llama_cpp, path, at / f"{name}-floats.gguf", "F32", "--allow-requantize")
    theirs, ours = perplexities(check, llama_cpp, path, check.text(name), 64, 2)
    direct = json.loads(check.program("quant", "eval", model, "--text", check.text(name), "--profile", "llamacpp-64",
                                      "--windows", 2, "--quiet", "--json"))["perplexity"]["mean"]
    ok = abs(theirs - direct) <= DIGITS + 1e-4 * direct and abs(ours - direct) <= 1e-4 * direct
    shown = f"{direct:.4f}, read back {ours:.4f}, {theirs:.4f} by llama.cpp"
    if name in INDEXED:
        long, expected = on_longer_windows(check, llama_cpp, model, path, check.text(name))
        ok &= abs(long - expected) <= DIGITS + 1e-4 * expected
        shown += f"; on longer windows {expected:.4f}, {long:.4f} by llama.cpp"
    return shown, ok


def on_longer_windows(check, llama_cpp, model, path, text):
    """llama.cpp's perplexity and transformers', of the second half of windows of 256 tokens."""
    import reference_model
    import torch
    length, bos = 256, reader(llama_cpp).GGUFReader(path).fields["tokenizer.ggml.bos_token_id"].contents()
    found = importlib.import_module("reference_llama_cpp").measure(llama_cpp, path, text, length, 2, check.scratch)
    reference, total = reference_model.load(model), 0.0
    # llama-perplexity begins every window with a BOS token.
    for window in ([bos, *tokens[1:]] for tokens in found["tokens"]):
        likelihood = torch.log_softmax(reference_model.logits(reference, window).double(), dim=-1)
        first = length // 2 + 1
        scored = torch.tensor(window[first:]).unsqueeze(1)
        total -= likelihood[first - 1:-1].gather(1, scored).mean().item()
    return found["perplexity"], float(numpy.exp(total / len(found["tokens"])))


def run_all(check, llama_cpp, only, whole):
    if llama_cpp is None or not (llama_cpp / "bin/llama-quantize").exists():
        print("SKIPPED: llama.cpp is not available: gguf", flush=True)
        return
    llama_cpp = llama_cpp.resolve()
    every = MIXTURES + WHOLE
    mixtures, weighted = (every, [*every, *REQUIRING]) if whole else (MIXTURES, WEIGHTED)
    cases = {
        "blocks": lambda: blocks(check, llama_cpp),
        "refined": lambda: refined(check, llama_cpp),
        "files": lambda: files(check, llama_cpp, "demo", mixtures, weighted),
        "convert": lambda: convert(check, llama_cpp),
        "score": lambda: score(check, llama_cpp),
    }
    cases |= {f"files {name}": (lambda name=name: files(check, llama_cpp, name, mixtures, weighted)) for name in WIDE if whole or name == WIDE[0]}
    later = LATER_FAMILIES + LATER_CONVERTED
    names = FAMILIES + CONVERTED + (later if whole or only else check_families.due(later, PER_DAY))
    cases |= {f"loads {name}": (lambda name=name: loads(check, llama_cpp, name)) for name in names}
    for title, work in cases.items():
        if only in f"gguf {title}":
            check.step(f"gguf   {title}", work)
