"""The interop check: compares quant's results with those of transformers, and its dequantized weights with those of
an independent implementation.

Each check prints a line with its measurements. There are these kinds:

  float     logits of float models, from whole windows and, for some, from a cache: quant's against transformers', at
            most 1e-3 of the largest logit apart
  loads     a checkpoint that `quant quantize` wrote, loaded by transformers with compressed-tensors
            without a missing or unexpected key: logits against quant's own dequantization, at most
            2e-3 of the largest apart; perplexity against `quant eval`, within 0.1 % (5e-2 and 0.5 %
            if activations are rounded, because transformers' steps differ from quant's)
  bits      every linear of that checkpoint, dequantized by quant and by independent_pack.py: equal
            bit for bit
  family    a tiny model of each family, float and quantized: see check_families.py
  defaults  the meaning of absent configuration fields: see check_defaults.py
  chat      conversations through a chat template: text, tokens and the assistant's parts, equal to
            transformers' result
  gguf      GGUF files against llama.cpp: see check_gguf.py
  exchange  GGUF files that quant and llama.cpp's programs pass to each other: see check_exchange.py
  tokens    tokenizers of GGUF files, token by token: see check_tokenizers.py
  carried   vision-language models: see check_vision_language.py
  profile   the results of `quant eval` with a profile, against the rule computed with transformers and
            against the program that the profile is named after: see check_profiles.py
  workflow  the examples under docs/ci, against the schemas of GitHub and GitLab, and their policy
            as `quant gate` reads it: see check_workflows.py
  page      reports opened in Chromium: the displayed contents; see check_pages.py
  numbers, floats, shared, inputs, layouts, source, converted, cache
            floating-point formats: see check_numbers.py and check_floats.py
  generate  text and probabilities of `quant generate`: see check_generate.py

Exits with 1 if a check fails.
"""

import argparse
import contextlib
import importlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import check_defaults
import check_exchange
import check_families
import check_floats
import check_generate
import check_gguf
import check_numbers
import check_pages
import check_profiles
import check_tokenizers
import check_vision_language
import check_workflows
import make_vision_language
import numpy
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
FLOAT_TOLERANCE = 1e-3
QUANTIZED_TOLERANCE = 2e-3
PERPLEXITY_TOLERANCE = 1e-3
# For activations quantized per token, transformers maps the largest magnitude to 127.5 steps; engines and quant map it
# to 127. So rounding differs in the last of the eight bits.
ROUNDED_INPUT_TOLERANCE = 5e-2
ROUNDED_INPUT_PERPLEXITY_TOLERANCE = 5e-3

CHAT = ["turns", "headers", "brackets", "generation"]

# Sliding windows in some blocks only.
MIXED = ["mistral-layer-types", "qwen2-layer-types", "qwen2-max-window-layers"]
EXPERTS = ["mixtral", "qwen3-moe", "qwen3-moe-mixed"]
TINY = ["gqa", "mha", "tied", "llama3-rope", "linear-rope", "head-dim", "sharded-bf16",
        "mistral", "qwen2", "qwen3", "opt", "opt-plain", "opt-bare", *MIXED, *EXPERTS]
# Also run token by token from a cache: models with sliding windows, norms of heads, or experts.
DECODED = ["mistral", "qwen3", *MIXED, *EXPERTS]
# Models with experts. transformers cannot read their asymmetric checkpoints, nor those in the AWQ and GPTQ formats, so it
# runs the weights that an independent reader dequantized. `check_families` does this for gpt-oss.
THROUGH_FLOATS = ["mixtral", "qwen3-moe-mixed", "qwen2_moe", "deepseek_v3", "glm4_moe"]
REAL = ["books-7m", "tinystories-656k", "stories260k"]

QUICK = ["--samples", "8", "--seq-len", "128"]
# Model, name of the case, options of `quant quantize`, and whether transformers must dequantize; None if it cannot load
# the checkpoint either way, and only the bits are compared.
QUANTIZED = [
    ("demo", "awq-w4-g128", QUICK, False),
    ("demo", "awq-w3-g64", ["--scheme", "w3a16-g64", *QUICK], False),
    ("demo", "rtn-w8-channel", ["--method", "rtn", "--scheme", "w8a16-channel"], False),
    ("demo", "rtn-w5-g64", ["--method", "rtn", "--scheme", "w5a16-g64"], False),
    ("demo", "awq-w6-g128", ["--scheme", "w6a16-g128", *QUICK], False),
    ("qwen2", "gptq-w6-channel", ["--method", "gptq", "--scheme", "w6a16-channel", *QUICK], False),
    ("demo", "rtn-w5-g32-asym", ["--method", "rtn", "--scheme", "w5a16-g32-asym"], True),
    ("tinystories-656k", "rtn-w7-g32", ["--method", "rtn", "--scheme", "w7a16-g32"], False),
    ("demo", "rtn-wf8-channel", ["--method", "rtn", "--scheme", "wf8a16"], False),
    ("demo", "awq-wf8-channel", ["--method", "awq", "--scheme", "wf8a16", *QUICK], False),
    ("qwen2", "gptq-wf8-channel", ["--method", "gptq", "--scheme", "wf8a16", *QUICK], False),
    ("demo", "awq-w4-g32-asym", ["--scheme", "w4a16-g32-asym", *QUICK], True),
    ("demo", "rtn-w3-channel-asym", ["--method", "rtn", "--scheme", "w3a16-channel-asym"], True),
    ("demo", "rtn-w4-ignored", ["--method", "rtn", "--ignore", "*.layers.2.*"], False),
    ("tinystories-656k", "awq-w4-g32", ["--group-size", "32", *QUICK], False),
    ("stories260k", "awq-w4-g64-and-channel",
     ["--group-size", "64", "--override", "down_proj=w4a16-channel", *QUICK], False),
    ("sharded-bf16", "rtn-w4-g32", ["--method", "rtn", "--group-size", "32"], False),
    ("mistral", "awq-w4-g32", ["--group-size", "32", *QUICK], False),
    ("qwen2", "awq-w4-g64-asym", ["--scheme", "w4a16-g64-asym", *QUICK], True),
    ("mistral-layer-types", "awq-w4-g32", ["--group-size", "32", *QUICK], False),
    ("qwen2-max-window-layers", "gptq-w4-g64", ["--method", "gptq", "--group-size", "64", *QUICK], False),
    ("qwen3", "awq-w4-g128", QUICK, False),
    # transformers reads quantized experts only in symmetric compressed-tensors.
    ("mixtral", "rtn-w4-g128", ["--method", "rtn"], False),
    ("mixtral", "awq-w4-g32", ["--group-size", "32", *QUICK], False),
    ("mixtral", "gptq-w8-channel", ["--method", "gptq", "--scheme", "w8a16-channel", *QUICK], False),
    ("mixtral", "awq-w4-g64-asym", ["--scheme", "w4a16-g64-asym", *QUICK], None),
    ("qwen3-moe", "awq-w4-g64", ["--group-size", "64", *QUICK], False),
    ("qwen3-moe", "gptq-w4-g128", ["--method", "gptq", *QUICK], False),
    ("qwen3-moe-mixed", "rtn-w4-g32", ["--method", "rtn", "--group-size", "32"], False),
    ("qwen3-moe-mixed", "format-gptq-g32", ["--method", "gptq", "--format", "gptq", "--group-size", "32", *QUICK], None),
    ("qwen3-moe-mixed", "format-awq-g32", ["--format", "awq", "--group-size", "32", *QUICK], None),
    ("qwen2_moe", "gptq-w4-g32-asym", ["--method", "gptq", "--scheme", "w4a16-g32-asym", *QUICK], None),
    ("deepseek_v3", "format-gptq-g32", ["--method", "gptq", "--format", "gptq", "--group-size", "32", *QUICK], None),
    ("glm4_moe", "format-awq-g32", ["--format", "awq", "--group-size", "32", *QUICK], None),
    ("gpt_oss", "awq-w4-g32-asym", ["--scheme", "w4a16-g32-asym", *QUICK], None),
    ("opt", "awq-w4-g32", ["--group-size", "32", *QUICK], False),
    ("opt", "awq-w4-g64-asym-head",
     ["--scheme", "w4a16-g64-asym", "--override", "lm_head=w4a16-g64-asym", *QUICK], True),
    ("opt-plain", "rtn-w8-channel", ["--method", "rtn", "--scheme", "w8a16-channel"], False),
    ("opt-bare", "awq-w4-g32-ignored", ["--group-size", "32", "--ignore", "*.layers.1.*", *QUICK], False),
    ("opt", "format-awq-g32", ["--format", "awq", "--group-size", "32", *QUICK], False),
    ("demo", "format-awq-g128", ["--format", "awq", *QUICK], False),
    ("books-7m", "format-awq-g64-sym", ["--format", "awq", "--group-size", "64", "--symmetric", *QUICK], False),
    ("qwen2", "format-awq-g32", ["--format", "awq", "--group-size", "32", *QUICK], False),
    ("sharded-bf16", "format-awq-rtn", ["--format", "awq", "--method", "rtn"], False),
    ("tied", "format-awq-ignored",
     ["--format", "awq", "--method", "rtn", "--group-size", "32", "--ignore", "*.layers.1.*"], False),
    ("demo", "gptq-w4-g128", ["--method", "gptq", *QUICK], False),
    ("demo", "format-gptq-g128", ["--method", "gptq", "--format", "gptq", *QUICK], False),
    ("books-7m", "format-gptq-g32-asym",
     ["--method", "gptq", "--format", "gptq", "--scheme", "w4a16-g32-asym", *QUICK], False),
    ("qwen2", "format-gptq-w8-channel",
     ["--method", "gptq", "--format", "gptq", "--scheme", "w8a16-channel", *QUICK], False),
    ("demo", "format-gptq-w3-g64",
     ["--method", "gptq", "--format", "gptq", "--scheme", "w3a16-g64-asym", *QUICK], False),
    ("demo", "format-gptq-w2-g32", ["--method", "gptq", "--format", "gptq", "--scheme", "w2a16-g32", *QUICK], False),
    ("tied", "format-gptq-rtn", ["--format", "gptq", "--method", "rtn", "--group-size", "32"], False),
    ("demo", "format-gptq-ignored",
     ["--format", "gptq", "--method", "rtn", "--ignore", "*.layers.1.*"], None),
    # No library reads this format.
    ("demo", "format-qserve-g128",
     ["--format", "qserve", "--method", "rtn", "--scheme", "w4a8-g128-asym-progressive"], None),
    ("sharded-bf16", "format-qserve-channel-ignored",
     ["--format", "qserve", "--method", "rtn", "--scheme", "w4a8-channel-asym", "--ignore", "*.layers.1.*"], None),
    ("books-7m", "format-qserve-w8a8",
     ["--format", "qserve", "--method", "rtn", "--scheme", "w8a8"], None),
    ("demo", "smoothquant-w8a8", ["--preset", "smoothquant-w8a8", *QUICK], False),
    ("books-7m", "smoothquant-w8a8-auto-all",
     ["--preset", "smoothquant-w8a8", "--alpha", "auto", "--smooth-producers", "all", *QUICK], False),
    ("demo", "smoothquant-w8a8-static",
     ["--method", "smoothquant", "--scheme", "w8a8-static", *QUICK], False),
    ("qwen2", "smoothquant-w8a8-static-asym",
     ["--method", "smoothquant", "--scheme", "w8a8-static-asym", "--override", "lm_head=w8a8", *QUICK], False),
    ("opt", "smoothquant-w8a8", ["--preset", "smoothquant-w8a8", *QUICK], False),
    ("demo", "smoothquant-gptq-w8a8", ["--method", "smoothquant-gptq", "--scheme", "w8a8", *QUICK], False),
    ("demo", "smoothquant-awq-w4a8-g64",
     ["--method", "smoothquant-awq", "--scheme", "w4a8-g64", *QUICK], False),
    # Without a KV scheme, because transformers ignores it.
    ("demo", "qoq-w4a8-g128", ["--method", "qoq", "--scheme", "w4a8-g128-progressive", *QUICK], False),
    # The weights are random. With 8-bit inputs, the implementations' different rounding would hide errors of quant.
    ("qwen2", "qoq-w4-channel", ["--method", "qoq", "--scheme", "w4a16-channel-sym", *QUICK], False),
    ("tinystories-656k", "qoq-w4a8-g64", ["--method", "qoq", "--scheme", "w4a8-g64-progressive", *QUICK], False),
    ("qwen3", "qoq-rtn-w8a8", ["--method", "qoq-rtn", "--scheme", "w8a8", *QUICK], False),
    ("tied", "qoq-w4-g32", ["--method", "qoq", "--scheme", "w4a16-g32-progressive", *QUICK], False),
    ("demo", "format-awq-qoq-g128",
     ["--format", "awq", "--method", "qoq", "--scheme", "w4a16-g128-progressive", *QUICK], False),
    ("demo", "format-qserve-qoq-g128",
     ["--format", "qserve", "--preset", "qoq-w4a8kv4", *QUICK], None),
    ("demo", "rtn-w8a8-and-w4a16",
     ["--method", "rtn", "--scheme", "w8a8", "--override", "down_proj=w4a16-g64"], False),
    ("head-dim", "rtn-w8-g64-asym", ["--method", "rtn", "--scheme", "w8a16-g64-asym"], True),
    ("demo", "rtn-head-alike", ["--method", "rtn", "--override", "lm_head=w4a16"], False),
    ("demo", "rtn-head-w8-and-fused",
     ["--method", "rtn", "--override", "lm_head=w8a16", "--override", "re:.*(gate|up)_proj=w8a16-g64"], False),
    ("qwen2", "rtn-embedding", ["--method", "rtn", "--group-size", "64", "--override", "embed_tokens=w8a16"],
     None),
    ("tied", "rtn-head-parted",
     ["--method", "rtn", "--group-size", "32", "--override", "lm_head=w8a16"], False),
    ("tied", "rtn-head-and-embedding",
     ["--method", "rtn", "--group-size", "32", "--override", "lm_head=w8a16",
      "--override", "embed_tokens=w8a16-channel"], None),
]
# Model, name of the case, options, and the format that the result is converted to.
REPACKED = [
    ("demo", "awq-from-compressed-tensors", ["--method", "rtn"], "awq"),
    ("demo", "compressed-tensors-from-awq", ["--method", "rtn", "--format", "awq", "--symmetric"],
     "compressed-tensors"),
    ("demo", "gptq-from-compressed-tensors", ["--method", "rtn"], "gptq"),
]


class Check:
    def __init__(self, programs, data, scratch):
        self.programs, self.data, self.scratch = programs, data, scratch
        self.failures, self.count = 0, 0

    def program(self, name, *arguments, status=0):
        command = [str(self.programs / name), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != status:
            raise RuntimeError(f"{' '.join(command)} exits with {done.returncode}: {done.stderr}")
        # No model of the check has tensors that its family does not compute.
        if "does not compute" in done.stderr:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout

    def script(self, name, *arguments):
        """Runs a script of this directory in this process, where torch is already loaded."""
        output = io.StringIO()
        argv = [name, *map(str, arguments)]
        with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(output):
            try:
                importlib.import_module(name).main()
            except SystemExit as stop:
                if stop.code not in (None, 0):
                    raise RuntimeError(f"{name}: {stop.code} {output.getvalue()}") from None
        return output.getvalue()

    def model(self, name):
        """The directory of a model, or None if it is not available."""
        if name == "demo":
            return ROOT / "calibration-data/demo-model"
        if name in REAL:
            path = self.data / "models" / name
            if path.exists():
                return path
            print(f"SKIPPED: {name} is not in {self.data}", flush=True)
            return None
        path = self.scratch / name
        if not path.exists():
            is_larger = name in make_vision_language.VARIANTS | make_vision_language.LLAMA_CPP
            maker = "make_vision_language" if is_larger else "make_tiny"
            self.script(maker, path, "--variant", name, "--seed", 7)
        return path

    def step(self, title, work):
        """Runs one check."""
        started = time.monotonic()
        try:
            measured, ok = work()
        except Exception as error:  # a check that cannot run has failed
            measured, ok = f"{type(error).__name__}: {error}", False
        self.count += 1
        self.failures += not ok
        took = time.monotonic() - started
        print(f"{'ok    ' if ok else 'FAILED'} {title}: {measured} ({took:.1f} s)", flush=True)

    def text(self, name):
        """The held-out text, which every model can read."""
        return ROOT / "calibration-data/heldout/narrative.txt"

    def tokens(self, model, name):
        out = self.scratch / f"{name}-tokens.json"
        if not out.exists():
            self.program("interop-dump", "tokens", model, self.text(name), 256, 2, out)
        return out

    def logits(self, model, name, reference_options=(), reference=None):
        """The function that compares logits, and transformers' and quant's logits of the same windows. transformers runs
        `reference`, if it is given."""
        tokens = self.tokens(model, name)
        ours, theirs = self.scratch / "ours.safetensors", self.scratch / "theirs.safetensors"
        command = "decoded" if "--decode" in reference_options else "logits"
        self.program("interop-dump", command, model, tokens, ours)
        self.script("reference_logits", reference or model, tokens, theirs, *reference_options)
        compare = importlib.import_module("compare_logits").compare
        return compare, load_file(theirs)["logits"], load_file(ours)["logits"]

    def float_model(self, name):
        model = self.model(name)
        if model is None:
            return

        def work(*options):
            compare, theirs, ours = self.logits(model, name, options)
            verdict = compare(theirs, ours, FLOAT_TOLERANCE)
            return verdict.get("ratio", verdict), verdict["ok"]

        self.step(f"float  {name}", work)
        if name in DECODED:
            self.step(f"decode {name}", lambda: work("--decode"))

    def quantized_model(self, name, case, options, dequantize, repack=None):
        model = self.model(name)
        if model is None:
            return
        out = self.scratch / f"{name}-{case}"
        rounds_inputs = "a8" in case
        tolerances = ((ROUNDED_INPUT_TOLERANCE, ROUNDED_INPUT_PERPLEXITY_TOLERANCE) if rounds_inputs
                      else (QUANTIZED_TOLERANCE, PERPLEXITY_TOLERANCE))
        reference = ["--dequantize"] if dequantize else []

        def write():
            first = self.scratch / f"{name}-{case}-first" if repack else out
            self.program("quant", "quantize", model, "-o", first, "--quiet", *options)
            if repack:
                self.program("quant", "quantize", first, "-o", out, "--quiet", "--format", repack)

        def loads():
            write()
            compare, theirs, ours = self.logits(out, f"{name}-{case}", reference)
            verdict = compare(theirs, ours, tolerances[0])
            if not verdict["ok"]:
                return verdict, False
            window = ["--text", self.text(name), "--window", "256", "--windows", "8"]
            theirs = json.loads(self.script("reference_perplexity", out, *window, *reference))
            ours = json.loads(self.program("quant", "eval", out, *window, "--quiet", "--json"))
            ours = ours["perplexity"]["mean"]
            apart = abs(ours / theirs["perplexity"] - 1)
            return f"logits {verdict['ratio']:.1e}, perplexity {ours:.3f} {apart:.1e} apart", \
                apart <= tolerances[1]

        def bits():
            if dequantize is None:
                write()
            ours, theirs = self.scratch / "weights.safetensors", self.scratch / "packed.safetensors"
            self.program("interop-dump", "weights", out, ours)
            config = json.loads((out / "config.json").read_text())
            readers = {"awq": "independent_awq", "gptq": "independent_gptq", "qoq": "independent_qserve"}
            reader = readers.get(config["quantization_config"]["quant_method"], "independent_pack")
            self.script(reader, out, "--out", theirs)
            ours, theirs = load_file(ours), load_file(theirs)
            different = [name for name, weight in theirs.items()
                         if name not in ours or not numpy.array_equal(ours[name], weight)]
            return different or f"{len(theirs)} linears", bool(theirs) and not different

        def floats():
            """transformers runs the weights that the independent reader dequantized."""
            weights = load_file(self.scratch / "packed.safetensors")
            packed = {name.removesuffix(".weight") for name in weights}
            stored = {name: tensor for path in out.glob("*.safetensors") for name, tensor in load_file(path).items()}
            plain = {name: tensor for name, tensor in stored.items()
                     if name.endswith(".bias") or name.rpartition(".")[0] not in packed}
            directory = self.scratch / f"{name}-{case}-floats"
            directory.mkdir()
            save_file(plain | weights, directory / "model.safetensors", metadata={"format": "pt"})
            config = json.loads((out / "config.json").read_text())
            del config["quantization_config"]
            (directory / "config.json").write_text(json.dumps(config))
            compare, theirs, ours = self.logits(out, f"{name}-{case}", reference=directory)
            verdict = compare(theirs, ours, tolerances[0])
            return verdict.get("ratio", verdict), verdict["ok"]

        if dequantize is not None:
            self.step(f"loads  {name} {case}", loads)
        self.step(f"bits   {name} {case}", bits)
        if dequantize is None and name in THROUGH_FLOATS:
            self.step(f"floats {name} {case}", floats)

    def chat(self, style):
        def work():
            model = self.scratch / f"chat-{style}"
            shutil.copytree(self.model("demo"), model)
            here = ROOT / "tests/interop/chat"
            shutil.copy(here / f"{style}.jinja", model / "chat_template.jinja")
            tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
            (model / "tokenizer_config.json").write_text(json.dumps(tokens))
            ours, theirs = self.scratch / "ours.json", self.scratch / "theirs.json"
            self.program("interop-dump", "chats", model, here / "chats.jsonl", ours)
            self.script("reference_chat", model, here / "chats.jsonl", theirs)
            ours, theirs = json.loads(ours.read_text()), json.loads(theirs.read_text())
            for number, (our, their) in enumerate(zip(ours, theirs, strict=True), 1):
                for key in ("text", "tokens", "assistant"):
                    if our[key] != their[key]:
                        return f"line {number}, {key}: {our[key]!r}, not {their[key]!r}", False
            masked = sum(sum(line["assistant"]) for line in ours)
            return f"{len(ours)} conversations, {masked} tokens of the assistant", masked > 0

        self.step(f"chat   {style}", work)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, required=True, metavar="DIR",
                        help="the directory of `quant` and `interop-dump`")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR",
                        help="real models and texts; checks that need them are skipped if it does not exist")
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR",
                        help="the directory that setup_llama_cpp.sh made; without it, its checks are skipped")
    parser.add_argument("--chromium", metavar="PROGRAM", help="a browser; without it, checks of pages are skipped")
    parser.add_argument("--whole", action="store_true", help="also run the checks that take minutes")
    parser.add_argument("--families", metavar="NAME", default="some",
                        help="the families to check: one by its name in make_tiny.py, `all`, or `some` (default): a "
                             "few, which change every day")
    parser.add_argument("--only", metavar="TEXT", default="", help="run only cases whose titles contain TEXT")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as directory:
        check = Check(arguments.programs.resolve(), arguments.data, Path(directory))
        for name in [*REAL, *TINY]:
            if arguments.only in f"float {name}":
                check.float_model(name)
        for name, case, options, dequantize in QUANTIZED:
            if arguments.only in f"{name} {case}":
                check.quantized_model(name, case, options, dequantize)
        for name, case, options, repack in REPACKED:
            if arguments.only in f"{name} {case}":
                check.quantized_model(name, case, options, False, repack)
        check_families.run_all(check, arguments.families, arguments.only)
        check_defaults.run_all(check, arguments.only, arguments.whole)
        check_vision_language.run_all(check, arguments.only, arguments.whole)
        for style in CHAT:
            if arguments.only in f"chat {style}":
                check.chat(style)
        check_numbers.run_all(check, arguments.only)
        check_floats.run_all(check, arguments.only, arguments.llama_cpp)
        check_generate.run_all(check, arguments.only)
        check_gguf.run_all(check, arguments.llama_cpp, arguments.only, arguments.whole)
        check_exchange.run_all(check, arguments.llama_cpp, arguments.only, arguments.whole)
        check_tokenizers.run_all(check, arguments.llama_cpp, arguments.only, arguments.whole)
        check_profiles.run_all(check, arguments.llama_cpp, arguments.only, arguments.whole)
        check_workflows.run_all(check, arguments.only)
        check_pages.run_all(check, arguments.chromium, arguments.only)
    print(f"{check.count - check.failures} passed, {check.failures} failed")
    sys.exit(check.failures > 0 or check.count == 0)


if __name__ == "__main__":
    main()
