"""Tests of the checks themselves: run `python self_test.py` in the interop environment.

The independent implementations must agree with each other, and the checks must find planted faults. llama.cpp is
included if target/interop-llama-cpp exists.
"""

import contextlib
import importlib
import io
import json
import random
import shutil
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import numpy
import torch
from safetensors.torch import load_file, save_file

LAYER = "model.layers.1.mlp.up_proj"


def run(script, *arguments):
    """Runs a script of this directory in this process; returns its exit code and standard output."""
    output = io.StringIO()
    argv = [script, *map(str, arguments)]
    with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(output):
        try:
            importlib.import_module(script).main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    return code, output.getvalue()


class Comparison(unittest.TestCase):
    def test_values_that_are_not_finite_are_noticed(self):
        check_families = importlib.import_module("check_families")
        exact, nan = numpy.array([1.0, 2.0]), numpy.array([1.0, float("nan")])
        fine, broken = check_families.Errors(), check_families.Errors()
        fine.add(exact, exact)
        broken.add(nan, exact)
        broken.add(exact, exact)
        self.assertTrue(fine.within(fine, 1e-6))
        self.assertFalse(broken.within(fine, 1e-6))
        self.assertFalse(fine.within(broken, 1e-6))


class Interop(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.directory.cleanup)
        cls.root = Path(cls.directory.name)
        numbers = random.Random(0)
        windows = [[numbers.randrange(272) for _ in range(256)] for _ in range(2)]
        (cls.root / "tokens.json").write_text(json.dumps(windows))

    def model(self, variant):
        path = self.root / variant
        if not path.exists():
            self.assertEqual(run("make_tiny", path, "--variant", variant)[0], 0)
        return path

    def packed(self, variant, scheme, *options):
        path = Path(tempfile.mkdtemp(dir=self.root)) / "packed"
        self.assertEqual(run("make_packed", self.model(variant), path, scheme, *options)[0], 0)
        return path

    def logits(self, model, *options):
        """Path of the logits, or None if the reference refuses the checkpoint."""
        out = Path(tempfile.mkdtemp(dir=self.root)) / "logits.safetensors"
        code, _ = run("reference_logits", model, self.root / "tokens.json", out, *options)
        self.assertEqual(out.exists(), code == 0)
        return out if code == 0 else None

    def independent_logits(self, packed):
        float_dir = packed.with_name("float")
        self.assertEqual(run("independent_pack", packed, "--checkpoint", float_dir)[0], 0)
        return self.logits(float_dir)

    def assert_same(self, a, b, same=True, tolerance=2e-3):
        code, output = run("compare_logits", a, b, "--tolerance", tolerance)
        self.assertEqual(code == 0, same, output)
        self.assertEqual(json.loads(output)["ok"], same)

    def assert_read_alike(self, packed, *options):
        self.assert_same(self.independent_logits(packed), self.logits(packed, *options))

    def test_symmetric(self):
        for scheme in ["3,32", "3,128", "3,0", "4,32", "4,64", "4,128", "4,0", "8,128", "8,0"]:
            with self.subTest(scheme):
                self.assert_read_alike(self.packed("gqa", f"{scheme},sym"))

    def test_asymmetric(self):
        for scheme in ["3,64", "4,32", "4,128", "4,0", "8,128", "8,0"]:
            with self.subTest(scheme):
                self.assert_read_alike(self.packed("gqa", f"{scheme},asym"), "--dequantize")

    def test_variants(self):
        for variant in ["mha", "tied", "llama3-rope", "head-dim", "sharded-bf16", "linear-rope"]:
            with self.subTest(variant):
                self.assert_read_alike(self.packed(variant, "4,128,sym"))
        self.assert_read_alike(self.packed("sharded-bf16", "4,64,asym"), "--dequantize")

    def test_mixed_groups(self):
        mixed = self.packed("gqa", "4,128,sym", "--override", r".*down_proj=8,0,sym")
        self.assert_read_alike(mixed)
        self.assertIsNone(self.logits(mixed, "--dequantize"))

    def test_rounding_error_is_plausible(self):
        for bits, low, high in [(3, 0.1, 0.3), (4, 0.05, 0.15), (8, 0.002, 0.01)]:
            packed = self.packed("gqa", f"{bits},128,sym")
            code, output = run("independent_pack", packed, "--original", self.model("gqa"))
            errors = [json.loads(line)["relative_rms_error"] for line in output.splitlines()]
            self.assertEqual((code, len(errors)), (0, 14))
            self.assertTrue(all(low < error < high for error in errors), errors)

    def test_perplexity(self):
        text = self.root / "text.txt"
        text.write_text("Every byte of this text is one token. " * 30)
        options = ["--text", text, "--window", 128, "--windows", 4]
        packed = self.packed("gqa", "4,128,sym")
        self.independent_logits(packed)
        scores = [json.loads(run("reference_perplexity", model, *options)[1])
                  for model in [packed, packed.with_name("float")]]
        self.assertEqual((scores[0]["windows"], scores[0]["tokens_scored"]), (4, 4 * 127))
        self.assertAlmostEqual(scores[0]["perplexity"] / scores[1]["perplexity"], 1, delta=1e-4)

    def test_decoder_settings_matter(self):
        original = self.model("llama3-rope")
        reference = self.logits(original)
        for key, value in [("rope_scaling", None), ("rope_theta", 5e5), ("rms_norm_eps", 0.05)]:
            with self.subTest(key):
                changed = self.root / f"other-{key}"
                shutil.copytree(original, changed)
                edit_config(changed, lambda config: config.update({key: value}))
                self.assert_same(reference, self.logits(changed), same=False)

    def test_damage_is_noticed(self):
        refused = {
            "a scale is missing": lambda t, c: t.pop(f"{LAYER}.weight_scale"),
            "a packed weight is missing": lambda t, c: t.pop(f"{LAYER}.weight_packed"),
            "a norm is missing": lambda t, c: t.pop("model.norm.weight"),
            "a tensor too many": lambda t, c: t.update(extra=t["model.norm.weight"].clone()),
            "a shape is wrong": lambda t, c: t.update(
                {f"{LAYER}.weight_scale": t[f"{LAYER}.weight_scale"][:, :1].repeat(1, 2)}),
            "not a number": lambda t, c: t["model.norm.weight"].fill_(float("nan")),
            "status missing": lambda t, c: c["quantization_config"].pop("quantization_status"),
            "lm_head not ignored": lambda t, c: c["quantization_config"].update(ignore=[]),
            "no quantization_config": lambda t, c: c.pop("quantization_config"),
        }
        for damage, edit in refused.items():
            with self.subTest(damage):
                packed = self.packed("gqa", "4,128,sym")
                damage_checkpoint(packed, edit)
                self.assertIsNone(self.logits(packed))
        self.assertIsNone(self.logits(self.packed("gqa", "4,128,asym")))

    def test_perturbed_scale_is_noticed(self):
        packed = self.packed("gqa", "4,128,sym")
        expected = self.independent_logits(packed)
        damage_checkpoint(packed, lambda t, c: t[f"{LAYER}.weight_scale"].mul_(1.05))
        self.assert_same(expected, self.logits(packed), same=False)


class Profiles(unittest.TestCase):
    """Tests check_profiles.py. In place of `quant eval`, reference_profiles.py runs, with its own rules or wrong ones."""

    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.directory.cleanup)

    def verdict(self, profile, wrong=None, change=None):
        """Failures and output of the cases of a profile on the demo model; `wrong` replaces a rule of
        reference_profiles.py on quant's side only, `change` edits quant's output."""
        rules = importlib.import_module("reference_profiles")

        def evaluate(_check, _name, _command, *options):
            options = [option for option in options if option not in ("--quiet", "--json")]
            with contextlib.ExitStack() as stack:
                for name, rule in (wrong or {}).items():
                    stack.enter_context(mock.patch.object(rules, name, rule))
                code, output = run("reference_profiles", *options)
            self.assertEqual(code, 0)
            result = json.loads(output)
            result["profile"] = profile
            for name in ("perplexity", "nll", *profiles.PER_TEXT):
                if name in result:
                    result[name] = {"mean": result[name]}
            if change:
                change(result)
            return json.dumps(result)

        module, profiles = importlib.import_module("check"), importlib.import_module("check_profiles")
        check = module.Check(Path("none"), Path("none"), Path(self.directory.name))
        output = io.StringIO()
        with mock.patch.object(module.Check, "program", evaluate), contextlib.redirect_stdout(output):
            profiles.run_all(check, module.ROOT / "target/interop-llama-cpp", f"{profile} demo")
        self.assertGreater(check.count, 0)
        self.assertNotIn("Error", output.getvalue())  # one that did not run proves nothing
        return check.failures, output.getvalue()

    def test_the_rules_pass(self):
        for profile in ["gptq-512", "hf-stride-256-128", "lmeval-rolling-128", "llamacpp-512",
                        "llamacpp-101"]:
            with self.subTest(profile):
                failures, output = self.verdict(profile)
                self.assertEqual(failures, 0, output)

    def test_a_wrong_rule_is_noticed(self):
        rules = importlib.import_module("reference_profiles")
        gptq, llama_cpp = rules.gptq, rules.llama_cpp

        def side_by_side(tokens, prefix, length):
            """The last window has one token of context, like the others."""
            stream = [prefix, *tokens]
            return [(stream[i:i + length + 1], 1) for i in range(0, len(tokens), length)]

        def one_more(tokens, bos, length):
            return [(chunk, first - 1) for chunk, first in llama_cpp(tokens, bos, length)]

        wrong = [
            ("gptq-512", {"gptq": lambda tokens, length: gptq(tokens[1:], length)}),
            ("hf-stride-256-128", {"hf_stride": lambda tokens, length, stride:
                                   rules.gptq(tokens, length)}),
            ("lmeval-rolling-128", {"rolling": side_by_side}),
            ("llamacpp-512", {"llama_cpp": lambda tokens, bos, length: llama_cpp(tokens, None, length)}),
            ("llamacpp-101", {"llama_cpp": one_more}),
        ]
        for profile, rule in wrong:
            with self.subTest(profile):
                failures, output = self.verdict(profile, wrong=rule)
                self.assertGreater(failures, 0, output)

    def test_a_wrong_number_is_noticed(self):
        changes = [
            ("hf-stride-256-128", lambda r: r.update(perplexity={"mean": r["docs_perplexity"]})),
            ("lmeval-rolling-128", lambda r: r.update(
                word_perplexity={"mean": r["word_perplexity"]["mean"] * 1.001})),
            ("lmeval-rolling-128", lambda r: r.update(bits_per_byte={"mean": float("nan")})),
            ("llamacpp-512", lambda r: r.update(token_standard_error=r["token_standard_error"] * 1.001)),
            ("llamacpp-512", lambda r: r["window_nll"].reverse()),
        ]
        for profile, change in changes:
            with self.subTest(profile):
                failures, output = self.verdict(profile, change=change)
                self.assertGreater(failures, 0, output)

    def test_programs_notice_a_wrong_rule_themselves(self):
        profiles = importlib.import_module("check_profiles")
        rules = importlib.import_module("reference_profiles")
        with mock.patch.object(profiles.Comparison, "rule", lambda *_: None):
            wrong = {"rolling": lambda tokens, prefix, length:
                     [([prefix, *tokens][i:i + length + 1], 1) for i in range(0, len(tokens), length)]}
            self.assertGreater(self.verdict("lmeval-rolling-128", wrong=wrong)[0], 0)
            if not (Path(__file__).parents[2] / "target/interop-llama-cpp").exists():
                self.skipTest("llama.cpp is not available")
            llama_cpp = rules.llama_cpp
            wrong = {"llama_cpp": lambda tokens, bos, length: llama_cpp(tokens, None, length)}
            self.assertGreater(self.verdict("llamacpp-512", wrong=wrong)[0], 0)

    def test_stride_rule_is_the_loss_of_transformers(self):
        """Runs the loop of the transformers guide: labels, and the model's own loss, weighted by the scored tokens."""
        rules = importlib.import_module("reference_profiles")
        reference = importlib.import_module("reference_model")
        root = Path(__file__).parents[2]
        model = reference.load(root / "calibration-data/demo-model")
        file = Path(self.directory.name) / "short.txt"
        file.write_text((root / "calibration-data/heldout/narrative.txt").read_text()[:1500])
        text = rules.Text(root / "calibration-data/demo-model", file)
        tokens = torch.tensor([text.tokens(text.documents[0])])
        for length, stride in [(128, 64), (128, 128), (100, 30), (4096, 512)]:
            total = count = before = 0
            for begin in range(0, tokens.shape[1], stride):
                end = min(begin + length, tokens.shape[1])
                inputs = tokens[:, begin:end]
                labels = inputs.clone()
                labels[:, :before - end] = -100
                with torch.no_grad():
                    loss = model(inputs, labels=labels).loss.item()
                scored = (labels[:, 1:] != -100).sum().item()
                total, count, before = total + loss * scored, count + scored, end
                if end == tokens.shape[1]:
                    break
            ours = rules.measure(model, text, f"hf-stride-{length}-{stride}")
            self.assertEqual(ours["tokens_scored"], count)
            self.assertAlmostEqual(ours["nll"], total / count, delta=1e-5)


class Workflows(unittest.TestCase):
    """Tests check_workflows.py on the examples under docs/ci, each broken in a way that is still valid YAML."""

    def failures(self, change=None):
        """Failures and output; `change` edits the text of a workflow."""
        module, workflows = importlib.import_module("check"), importlib.import_module("check_workflows")
        with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()) as output:
            for name, _ in workflows.WORKFLOWS:
                text = (workflows.FOLDER / name).read_text()
                (Path(directory) / name).write_text(change(text) if change else text)
            check = module.Check(Path("none"), Path("none"), Path(directory))
            with mock.patch.object(workflows, "FOLDER", Path(directory)):
                for name, schema in workflows.WORKFLOWS:
                    workflows.workflow(check, name, schema)
        return check.failures, output.getvalue()

    def test_the_examples_pass(self):
        failures, output = self.failures()
        self.assertEqual(failures, 0, output)

    def test_a_broken_workflow_is_noticed(self):
        broken = [
            ("runs-on: ubuntu-latest", "runs_on: ubuntu-latest", "runs_on"),
            ("        run: |", "        rum: |", "rum"),
            ("needs: [measure]", "needs: 5", "needs"),
            ("    when: always", "    when: sometimes", "sometimes"),
            ("      junit: gate.xml", "      junit: { file: gate.xml }", "junit"),
        ]
        for right, wrong, said in broken:
            with self.subTest(wrong):
                changed = []
                def change(text):
                    changed.append(right in text)
                    return text.replace(right, wrong)
                failures, output = self.failures(change)
                self.assertEqual(sum(changed), 1)
                self.assertEqual(failures, 1, output)
                self.assertIn(said, output)


class Pages(unittest.TestCase):
    """Tests that `look` finds faults in a page that do not depend on its contents."""

    PAGE = """<!doctype html><html><head><title>a</title><style>:root { color-scheme: light dark }
      body { background: Canvas; color: CanvasText; width: 90% }</style></head><body><h1>a</h1>
      <table><tr><td>a</td><td>b</td></tr></table><svg viewBox="0 0 100 100" aria-label="c">
      <rect x="10" y="10" width="9" height="9" style="fill: #808080"></rect><text x="10" y="40"
      style="fill: CanvasText; font: 9px sans-serif">one</text><title>c</title></svg></body></html>"""

    def wrong(self, page):
        pages = importlib.import_module("check_pages")
        found = []
        with tempfile.TemporaryDirectory() as directory, pages.sync_playwright() as playwright:
            file = Path(directory) / "page.html"
            file.write_text(page)
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            for scheme, width in pages.VIEWS:
                found += pages.look(browser, file, scheme, width)[1]
            browser.close()
        return found

    @unittest.skipUnless(shutil.which("chromium"), "no browser")
    def test_what_a_person_would_see_is_noticed(self):
        self.assertEqual(self.wrong(self.PAGE), [])
        for right, wrong, said in [
            ("</h1>", "</h1><img src='http://127.0.0.1:9/a.png'>", "fetched"),
            ("<h1>a", "<h1><script>1</script>a", "markup"),
            ("<h1>a", "<h1><b>a</b>", "markup"),
            ("<h1>a", "<h1 style='width: 1400px'>a", "overflows"),
            ("Canvas;", "#ffffff;", "background"),
            ('<svg viewBox="0 0 100 100"', '<div class="wide" style="overflow-x: auto"><svg style="width: 1400px" viewBox="0 0 100 100"', "wider"),
            ("<h1>a", "<h1 style='color: #888888'>a", "faint"),
            ('x="10" y="10"', 'x="95" y="10"', "outside"),
            ("<rect", "<text x='11' y='41' style='fill: CanvasText; font: 9px sans-serif'>two</text><rect", "cross"),
            ("<rect", "<line", "nothing on the chart"),
            ("<table>", "<table><tr><td>a</td></tr>", "unequal"),
        ]:
            with self.subTest(said):
                self.assertIn(right, self.PAGE)
                found = self.wrong(self.PAGE.replace(right, wrong, 1))
                self.assertTrue(any(said in text for text in found), found)


def edit_config(model, edit):
    config = json.loads((model / "config.json").read_text())
    edit(config)
    (model / "config.json").write_text(json.dumps(config))


def damage_checkpoint(model, edit):
    tensors = load_file(model / "model.safetensors")
    edit_config(model, lambda config: edit(tensors, config))
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    unittest.main()
