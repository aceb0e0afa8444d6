"""The Python package compared with transformers and lm-evaluation-harness: both run the same models.

`lm-eval` checks that the package's model gives the log-likelihoods, perplexities and texts of the harness's `hf` model
in float32; `transformers` checks that `fewbits.transformers` gives the same results as transformers on the same packed
checkpoints.

The package is unpacked in the directory that FEWBITS_PACKAGE names, which `cargo xtask python` creates.
"""

import argparse
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, os.environ.get("FEWBITS_PACKAGE", "target/python/package"))

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "calibration-data/heldout/narrative.txt").read_text()
# Sums in float32 are added in a different order.
CLOSE = 2e-4


def say(what, start):
    print(f"ok: {what} ({time.monotonic() - start:.1f} s)", flush=True)


def demo(scratch):
    import fewbits

    model = scratch / "demo"
    subprocess.run([sys.executable, "-m", "fewbits", "demo", "--save-model", model], check=True, capture_output=True,
                   env=os.environ | {"PYTHONPATH": sys.path[0]})
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (model / "tokenizer_config.json").write_text(json.dumps(names))
    return fewbits, model


def lm_eval_agrees(model):
    """Compares both models of the harness on the float checkpoint."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from fewbits.lm_eval import FewbitsLM

    start = time.monotonic()
    theirs = HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=4)
    ours = FewbitsLM(str(model))

    def ask(kind, *arguments):
        requests = [Instance(request_type=kind, doc={}, arguments=one, idx=n) for n, one in enumerate(arguments)]
        return [getattr(lm, kind)(requests, disable_tqdm=True) for lm in (theirs, ours)]

    assert (theirs.max_length, theirs.prefix_token_id, theirs.eot_token_id) == \
           (ours.max_length, ours.prefix_token_id, ours.eot_token_id)
    words = TEXT.split()
    pairs = [(" ".join(words[n:n + 9]), " " + " ".join(words[n + 9:n + 9 + n % 7 + 1])) for n in range(0, 400, 8)]
    pairs += [("", words[3]), ("ends with a space ", "word"), (" ".join(words[:1200]), " " + " ".join(words[1200:1210]))]
    for (a, a_greedy), (b, b_greedy) in zip(*ask("loglikelihood", *pairs), strict=True):
        assert abs(a - b) <= CLOSE * max(1, abs(a)), (a, b)
        assert a_greedy == b_greedy
    for a, b in zip(*ask("loglikelihood_rolling", *((" ".join(words[n:n + 700]),) for n in (0, 2000))), strict=True):
        assert abs(a - b) <= CLOSE * abs(a), (a, b)
    settings = {"until": ["."], "max_gen_toks": 24, "do_sample": False}
    for a, b in zip(*ask("generate_until", *((" ".join(words[n:n + 12]), settings) for n in range(0, 60, 12))), strict=True):
        assert a == b, (a, b)
    say("lm-eval: log-likelihoods, also rolling, and texts equal those of `hf` in float32", start)


def resident(path):
    """The bytes of a mapped file that are in the memory of this process."""
    smaps = Path("/proc/self/smaps").read_text()
    maps = re.findall(rf"^[0-9a-f]+-[0-9a-f]+ .*{re.escape(str(path))}\n(?:.*\n)*?Rss: +(\d+) kB", smaps, re.MULTILINE)
    return 1024 * sum(map(int, maps))


@torch.no_grad()
def transformers_agrees(fewbits, model, scratch):
    """Compares logits and texts of packed checkpoints: transformers, which unpacks the weights, against quant's
    kernels, which multiply with packed weights."""
    import fewbits.transformers

    tokens = torch.tensor([[1, 17, 99, 250, 31, 8, 77, 402, 5, 5, 300, 12]])
    made = {
        "w4a16-g64": dict(method="rtn", scheme="w4a16-g64-sym"),
        "w8a16": dict(method="rtn", scheme="w8a16-channel-sym"),
        "w8a8": dict(method="rtn", scheme="w8a8"),
        "w8a8-static": dict(method="smoothquant", scheme="w8a8-static", samples=8, seq_len=128),
        "w4a8": dict(method="rtn", scheme="w4a8-g64-sym"),
    }
    for name, settings in made.items():
        start = time.monotonic()
        out = scratch / name
        fewbits.quantize(model, out, **settings)
        fewbits.transformers.disable()
        plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        expected = plain(tokens).logits
        fewbits.transformers.enable()
        weights = out / "model.safetensors"
        before = resident(weights)
        packed = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        # Packed weights are copies, so the codes in the file do not stay in memory.
        codes = sum(m.packed.numel() for m in packed.modules() if type(m).__name__ == "PackedLinear")
        grown = resident(weights) - before
        assert grown <= weights.stat().st_size - codes / 2, (name, grown, codes)
        linears = [m for m in packed.modules() if type(m).__name__ == "PackedLinear"]
        assert len(linears) == 7 * 6, len(linears)
        assert not any("weight_packed" in key or "weight_scale" in key for key in packed.state_dict())
        found = packed(tokens).logits
        # A difference in the last bit of an activation can change its 8-bit code by one.
        bound = 5e-2 if "a8" in name else 2e-4
        error = ((found - expected).norm() / expected.norm()).item()
        assert error <= bound, (name, error)
        texts = [m.generate(tokens, max_new_tokens=12, do_sample=False, pad_token_id=0) for m in (plain, packed)]
        assert name not in ("w4a16-g64", "w8a16") or torch.equal(*texts), texts
        half = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)(tokens).logits.float()
        assert ((half - expected).norm() / expected.norm()).item() <= 5e-2
        say(f"transformers: {name}, off by {error:.1e}", start)
    others(fewbits, model, scratch, tokens)
    operator(linears[0])
    training(packed, tokens)
    guide(fewbits, scratch)


def others(fewbits, model, scratch, tokens):
    """What does not stay packed is logged with the reason, and listed."""
    from transformers.quantizers.auto import AutoHfQuantizer

    start = time.monotonic()
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("fewbits").addHandler(handler)
    kinds = {"w3a16-g64-sym": "3-bit integer weights", "fp8": "8-bit float weights"}
    for scheme, reason in kinds.items():
        out = scratch / scheme
        fewbits.quantize(model, out, method="rtn", scheme=scheme, override={"down_proj": "w8a16-channel-sym"})
        loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        found = fewbits.transformers.linears(loaded)
        assert len(found.packed) == 6 and all(name.endswith("down_proj") for name in found.packed), found
        assert len(found.unpacked) == 6 * 6 and set(found.unpacked.values()) == {reason}, found
        assert f"do not support 36 of 42 quantized linears, so transformers unpacks them: {reason} (36)" in logged[-1]
        assert loaded(tokens).logits.isfinite().all()
    packed = AutoModelForCausalLM.from_pretrained(scratch / "w8a16", dtype=torch.float32)
    found = fewbits.transformers.linears(packed)
    assert len(found.packed) == 42 and not found.unpacked and len(logged) == len(kinds), logged
    # Each other kind of checkpoint is named once.
    for _ in range(2):
        AutoHfQuantizer.from_config({"quant_method": "fp8"}, pre_quantized=True)
    assert len(logged) == len(kinds) + 1 and "keeps only compressed-tensors checkpoints packed" in logged[-1], logged
    fewbits.transformers.disable()
    assert "from_config" in vars(AutoHfQuantizer) and not fewbits.transformers.is_enabled()
    fewbits.transformers._WARNED.clear()
    AutoHfQuantizer.from_config({"quant_method": "fp8"}, pre_quantized=True)
    assert len(logged) == len(kinds) + 1, logged
    fewbits.transformers.enable()
    logging.getLogger("fewbits").removeHandler(handler)
    say("what does not stay packed is named", start)


def guide(fewbits, scratch):
    start = time.monotonic()
    (scratch / "OUT").symlink_to(scratch / "w4a16-g64")
    before = Path.cwd()
    os.chdir(scratch)
    try:
        for page in ("docs/guide/engines.md", "docs/guide/transformers.md"):
            text = (ROOT / page).read_text()
            blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
            fewbits.transformers.disable()
            names = {}
            for block in blocks:
                exec(compile(block, page, "exec"), names)
            assert blocks
    finally:
        os.chdir(before)
    say("the code of the guide", start)


@torch.enable_grad()
def training(model, tokens):
    """Gradients are refused, and not needed for inference, although the float parameters require them."""
    start = time.monotonic()
    model.train()
    loss = model(tokens, labels=tokens).loss
    try:
        loss.backward()
    except NotImplementedError as error:
        assert "packed weights have no gradients" in str(error), error
    else:
        raise AssertionError("gradients were computed")
    model.eval()
    logits = model(tokens).logits
    assert logits.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(model(tokens).logits, logits)
    [linear, *_] = [m for m in model.modules() if type(m).__name__ == "PackedLinear"]
    assert not linear(torch.zeros(1, linear.in_features)).requires_grad
    say("training: gradients are refused", start)


def operator(linear):
    from fewbits import _kernels

    start = time.monotonic()
    x = torch.randn(3, linear.in_features)
    arguments = (x, linear.packed, linear.layout, linear.bias, linear.activations, linear.scale, linear.zero)
    torch.library.opcheck(torch.ops.fewbits.linear.default, arguments)
    compiled = torch.compile(lambda x: linear(x) * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), linear(x) * 2)
    for wrong in (x[:, :-1], x.to(torch.float64)):
        try:
            linear(wrong)
        except (ValueError, TypeError):
            continue
        raise AssertionError("an invalid input was accepted")
    # A row's result does not depend on other rows or on the number of threads, and a forked child has its own threads.
    torch.set_num_threads(2)
    whole = linear(x)
    on_openmp = "ATen parallel backend: OpenMP" in torch.__config__.parallel_info()
    assert bool(_kernels._OPENMP) == on_openmp, torch.__config__.parallel_info()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if torch.equal(whole, linear(x)) else 1)
    assert os.waitpid(child, 0)[1] == 0
    torch.set_num_threads(1)
    assert torch.equal(whole[1:2], linear(x[1:2]))
    assert linear(x[:0]).shape == (0, linear.out_features)
    say("the operator: opcheck, compiled, refusals, threads, a forked child", start)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["lm-eval", "transformers"])
    only = parser.parse_args().only
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        fewbits, model = demo(scratch)
        if only != "transformers":
            lm_eval_agrees(model)
        if only != "lm-eval":
            transformers_agrees(fewbits, model, scratch)


if __name__ == "__main__":
    main()
