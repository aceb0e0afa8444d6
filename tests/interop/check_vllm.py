"""The check against vLLM on a CPU: checkpoints that `quant quantize` wrote, loaded by the engine itself.

The perplexity of a text by vLLM in bfloat16 must be within 0.5 % of `quant eval`. The verdicts of `quant plan` on
this engine must be right: a checkpoint with the verdict "no" must fail to load, and one with "yes" must load; only one
with the verdict "unsure" may give another perplexity. Exits with 1 if a check fails.

Not part of check.py, because it is slow. Run by `cargo xtask nightly`, or by tests/interop/run_vllm.sh.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
TOLERANCE = 5e-3
ENGINE = "vLLM, CPU"
TEXT, WINDOWS = ROOT / "calibration-data/heldout/narrative.txt", (256, 10)
QUICK = ["--samples", "16", "--seq-len", "256"]
GROUP_32 = ["--method", "rtn", "--group-size", "32"]
# vLLM's CPU build has no kernel for packed experts, but runs float ones.
FLOAT_EXPERTS = [*GROUP_32, "--ignore", "*.experts.*"]
CASES = [
    ("books-7m", "w4a16-g128", ["--method", "rtn"]),
    ("books-7m", "w4a16-g128-asym", ["--method", "rtn", "--scheme", "w4a16-g128-asym"]),
    ("books-7m", "awq", ["--format", "awq", *QUICK]),
    ("books-7m", "gptq", ["--method", "gptq", "--format", "gptq", *QUICK]),
    ("books-7m", "w8a8", ["--method", "rtn", "--scheme", "w8a8"]),
    ("books-7m", "w4a8-g128", ["--method", "rtn", "--scheme", "w4a8-g128"]),
    ("books-7m", "w8a16-g128", ["--method", "rtn", "--scheme", "w8a16-g128"]),
    ("books-7m", "float fp8", ["--method", "rtn", "--scheme", "fp8"]),
    ("books-7m", "float fp8-static", ["--method", "rtn", "--scheme", "fp8-static", *QUICK]),
    ("books-7m", "float fp8-block", ["--method", "rtn", "--scheme", "fp8-block"]),
    ("books-7m", "float wf8a16-channel", ["--method", "rtn", "--scheme", "wf8a16-channel"]),
    ("books-7m", "float nvfp4a16", ["--method", "rtn", "--scheme", "nvfp4a16"]),
    ("books-7m", "float mxfp4a16", ["--method", "rtn", "--scheme", "mxfp4a16"]),
    ("books-7m", "float mxfp8", ["--method", "rtn", "--scheme", "mxfp8"]),
    ("books-7m", "fused-parts", ["--method", "rtn", "--ignore", "*.layers.1.*"]),
    ("qwen2-vl", "w4a16-g32", GROUP_32),
    ("qwen2.5-vl-flat", "w4a16-g32", GROUP_32),
    ("qwen3-vl", "w4a16-g32", GROUP_32),
    ("qwen3.5-128", "w4a16-g32", GROUP_32),
    ("gemma3-vl-64", "w4a16-g32", GROUP_32),
    ("gemma4-vl-64", "w4a16-g32", GROUP_32),
    ("mistral3", "w4a16-g32", GROUP_32),
    ("mistral3-ministral3-512", "w4a16-g32", GROUP_32),
    ("llava-llama", "w4a16-g32", GROUP_32),
    ("llava-modules", "awq", ["--format", "awq", *GROUP_32]),
]
# Random models of every family that vLLM supports, the most used first, by their names in make_tiny.py. InternLM2
# and 3 are left out, because this version's transformers lacks their configurations.
FAMILIES = [
    "gqa", "qwen2", "qwen3-unbiased", "gemma3-sixth", "gemma2-alternating", "phi3-128", "qwen3-yarn-128",
    "phi3-longrope-128", "mistral", "granite-128", "olmo2-plain",
    "smollm3-fourth", "gemma4-128", "glm4-128", "cohere-plain", "cohere2-128",
    "cohere-128-norms", "starcoder2-plain", "gpt_neox-128", "phi-128", "exaone4-128", "olmo3-128", "seed_oss-plain",
    "ernie4_5-128", "hunyuan-128", "ministral3-128", "glm-128", "gpt2-128", "bloom-128", "opt", "lfm2-128", "qwen3_5-128",
    "falcon_h1-128", "nemotron_h-128", "granitemoehybrid-128", "mixtral", "qwen3-moe", "qwen2_moe-all", "hy_v3-128",
    "deepseek_v3-128",
]
EXPERTS = ["mixtral", "qwen3-moe", "qwen2_moe-all", "hy_v3-128", "deepseek_v3-128", "olmoe-128", "glm4_moe-128",
           "minimax_m2-128", "ernie4_5_moe-128", "lfm2_moe-128", "qwen3_next-128", "cohere2_moe-128", "llama4-128",
           "granitemoe-128"]


class Vllm:
    def __init__(self, arguments, scratch):
        self.arguments, self.scratch = arguments, scratch
        self.count = self.failures = 0

    def run(self, program, *options):
        command = [str(program), *map(str, options)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} exits with {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout

    def quant(self, *options):
        return self.run(self.arguments.programs / "quant", *options)

    def model(self, name):
        published = self.arguments.data / "models" / name
        if published.exists():
            return published
        if name == "books-7m":
            return None
        made = self.scratch / name
        if not made.exists():
            maker = "make_tiny.py" if name in FAMILIES + EXPERTS else "make_vision_language.py"
            self.run(sys.executable, HERE / maker, made, "--variant", name, "--seed", 7)
        return made

    def engine(self, models):
        """Returns vLLM's perplexity of each model with the number of tokens, or None with the reason why it does not
        load."""
        out = self.scratch / "scored"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        python = self.arguments.vllm / "bin" / "python"
        environment = os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}"}
        found, left = {}, list(models)
        while left:
            done = subprocess.run([python, HERE / "reference_vllm.py", self.tokens(left[0]), out, *left],
                                  capture_output=True, text=True, env=environment, check=False)
            before = len(left)
            for model in left:
                scored, error = out / f"{model.name}.json", out / f"{model.name}.error"
                if scored.exists():
                    values = [value for window in json.loads(scored.read_text()) for value in window]
                    found[model] = math.exp(-sum(values) / len(values)), len(values)
                elif error.exists():
                    found[model] = None, error.read_text()
            left = [model for model in left if model not in found]
            if left and (done.returncode or len(left) == before):
                # Compiled code crashed.
                lines = done.stderr.splitlines() or ["no message"]
                found[left[0]] = None, f"the engine ends with {done.returncode}: {lines[-1].strip()[:200]}"
                left = left[1:]
        return found

    def tokens(self, model):
        out = self.scratch / "tokens.json"
        self.run(self.arguments.programs / "interop-dump", "tokens", model, TEXT, *WINDOWS, out)
        return out

    def quantized(self, name, case, options):
        """The quantized model, and the verdict of `quant plan` on the engine; None if the model is not available."""
        model, out = self.model(name), self.scratch / f"{name}-{case.replace(' ', '-')}"
        if model is None:
            print(f"SKIPPED: {name} is not in {self.arguments.data}", flush=True)
            return None
        plan = json.loads(self.quant("plan", model, *options, "--json"))
        [engine] = [e for e in plan["formats"][0]["engines"] if e["engine"] == ENGINE]
        self.quant("quantize", model, "-o", out, "--quiet", *options)
        return out, engine["ranks"][0]["loads"]

    def cases(self, cases):
        """Runs cases whose models share a tokenizer."""
        started, made = time.monotonic(), {}
        for name, case, options in cases:
            try:
                if (of := self.quantized(name, case, options)) is not None:
                    made[name, case] = of
            except Exception as error:  # a check that cannot run has failed
                self.record(name, case, f"{type(error).__name__}: {error}", False)
        engine = self.engine([out for out, _ in made.values()])
        for (name, case), (out, says) in made.items():
            self.record(name, case, *self.compare(out, says, *engine[out]))
        if made:
            print(f"{len(made)} cases in {time.monotonic() - started:.0f} s", flush=True)

    def record(self, name, case, measured, ok):
        self.count += 1
        self.failures += not ok
        print(f"{'ok    ' if ok else 'FAILED'} vllm {name} {case}: {measured}", flush=True)

    def compare(self, out, says, theirs, detail):
        if theirs is None:
            # For block-scaled weights, `plan` says that they need AMX.
            lacks_amx = says == "yes, but" and "requires AMX" in detail and "amx_tile" not in Path("/proc/cpuinfo").read_text()
            return f"does not load, plan says {says}: {detail}", says == "no" or lacks_amx
        result = self.quant("eval", out, "--text", TEXT, "--window", WINDOWS[0], "--windows", WINDOWS[1], "--quiet", "--json")
        ours = json.loads(result)["perplexity"]["mean"]
        apart = abs(theirs / ours - 1)
        # Where the engine computes a different function than transformers, which agrees with quant, `plan` says "unsure".
        return (f"perplexity {theirs:.3f} by vLLM, {ours:.3f} by quant eval, {apart:.1e} apart, {detail} tokens; "
                f"plan says {says}"), says == "unsure" if apart > TOLERANCE else says != "no"


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, required=True, metavar="DIR",
                        help="the directory of `quant` and `interop-dump`")
    parser.add_argument("--vllm", type=Path, required=True, metavar="DIR", help="the environment that setup_vllm.sh made")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="real models; cases that need them are skipped if it does not exist")
    parser.add_argument("--only", metavar="TEXT", default="", help="run only cases whose titles contain TEXT")
    arguments = parser.parse_args()
    arguments.programs, arguments.vllm = arguments.programs.resolve(), arguments.vllm.absolute()

    with tempfile.TemporaryDirectory() as directory:
        check = Vllm(arguments, Path(directory))
        wanted = [[case for case in cases if arguments.only in f"vllm {case[0]} {case[1]}"] for cases in (
            [case for case in CASES if case[0] == "books-7m"], [case for case in CASES if case[0] != "books-7m"],
            [(name, "family w4a16-g32", GROUP_32) for name in FAMILIES],
            [(name, "family float experts", FLOAT_EXPERTS) for name in EXPERTS])]
        for cases in wanted:
            check.cases(cases)
    print(f"{check.count - check.failures} passed, {check.failures} failed")
    sys.exit(check.failures > 0 or check.count == 0)


if __name__ == "__main__":
    main()
