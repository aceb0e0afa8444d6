"""Reports opened in Chromium: their displayed contents.

Every page is made from results whose numbers are known, and opened as a file without scripts: light and dark, in a wide
window and on a phone. The check examines what the browser rendered: the contents, that names that look like markup are
escaped, that names break only after separators, that nothing overflows or overlaps, and that all text has enough
contrast. check.py runs these as its `page` checks.
"""

import json
import re
import shutil

from playwright.sync_api import sync_playwright

# The second width is just above that below which rows become cards.
VIEWS = [(scheme, width) for scheme in ("light", "dark") for width in (1280, 780, 700, 390)]
# WCAG 2.2, 1.4.3: contrast of text to its background.
CONTRAST = 4.5
# A name that would be markup if it were not escaped.
ODD = "<b>rain & <script>sun.txt"

# One check that passes and one that cannot.
POLICY = """schema = "quant-gate-policy/1"
[[non_inferiority]]
metric = "kl"
against = "baseline"
margin = 0.01
[[cap]]
metric = "top1_agreement"
at_least = 0.9999
"""

# Runs in the page and reports on it; the page's own scripts are disabled.
LOOK = """() => {
  const all = (selector, of = document) => [...of.querySelectorAll(selector)];
  const box = (e) => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
  const seen = (e) => { const r = e.getBoundingClientRect(); return r.width > 0 && r.height > 0; };
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const luminance = (color) => {
    const [r, g, b] = channels(color).slice(0, 3)
      .map((c) => c / 255).map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = (e) => {
    for (; e; e = e.parentElement) {
      const color = getComputedStyle(e).backgroundColor;
      if (channels(color)[3] !== 0) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  const contrast = (e) => {
    const style = getComputedStyle(e);
    const [a, b] = [luminance(e.closest('svg') ? style.fill : style.color), luminance(background(e))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  const texts = all('body *').filter((e) => e.tagName !== 'title'
    && [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()));
  const faint = texts.map((e) => [e.textContent.trim().slice(0, 40), contrast(e)]);
  const crossed = (labels) => labels.flatMap((a, i) => labels.slice(i + 1)
    .filter((b) => Math.min(a.at[2], b.at[2]) - Math.max(a.at[0], b.at[0]) > 1
      && Math.min(a.at[3], b.at[3]) - Math.max(a.at[1], b.at[1]) > 1)
    .map((b) => `${a.text} / ${b.text}`));
  return {
    title: document.title,
    scripts: all('script').length,
    bold: all('td b, p b, h1 b').length,
    headings: all('h1, h2').filter(seen).map((e) => e.innerText),
    tiles: Object.fromEntries(all('.tile').filter(seen).map((e) => [e.children[0].innerText, e.children[1].innerText])),
    cells: all('.cell').filter(seen).map((e) => [e.title, getComputedStyle(e).backgroundColor]),
    tables: all('table').map((t) => all('tr', t).map((r) => all('th, td', r).map((c) => c.innerText))),
    charts: all('svg').map((s) => {
      const [left, top, right, bottom] = box(s);
      const labels = all('text', s).map((e) => ({ text: e.textContent, at: box(e) }));
      const marks = all('rect, circle', s).map(box);
      return {
        name: s.getAttribute('aria-label'), seen: seen(s), labels: labels.length,
        bars: all('rect', s).length, points: all('circle', s).length,
        paints: [...new Set(all('rect, circle', s).map((e) => getComputedStyle(e).fill))],
        outside: labels.map((l) => l.at).concat(marks)
          .filter((m) => m[0] < left - 1 || m[1] < top - 1 || m[2] > right + 1 || m[3] > bottom + 1).length,
        crossed: crossed(labels),
      };
    }),
    split: all('td.names').flatMap((e) => [...e.childNodes]).filter((n) => {
      const range = document.createRange();
      range.selectNodeContents(n);
      return n.nodeType === 3 && !n.textContent.includes(' ') && range.getClientRects().length > 1;
    }).map((n) => n.textContent),
    clipped: all('.wide').filter((e) => e.querySelector('svg, .cards') && e.scrollWidth > e.clientWidth + 1)
      .map((e) => (e.querySelector('svg title') || e.querySelector('th')).textContent),
    sideways: document.documentElement.scrollWidth - window.innerWidth,
    paper: luminance(background(document.body)),
    faint: faint.filter(([, c]) => c < LEAST).map(([text, c]) => `${text}: ${c.toFixed(1)}`),
  };
}""".replace("LEAST", str(CONTRAST))


def look(browser, file, scheme, width):
    """The contents of a page, and its faults that do not depend on the contents."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900},
                                  java_script_enabled=False)
    fetched, said = [], []
    context.on("request", lambda request: fetched.append(request.url))
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(file.resolve().as_uri())
    found = page.evaluate(LOOK)
    context.close()
    wrong = [f"fetched {url}" for url in fetched[1:]] + said
    if found["scripts"] or found["bold"]:
        wrong.append("markup in a name became markup")
    if found["sideways"] > 0:
        wrong.append(f"overflows horizontally by {found['sideways']} pixels")
    wrong += [f"line break inside {part}" for part in found["split"][:3]]
    wrong += [f"wider than the page: {name}" for name in found["clipped"]]
    if (found["paper"] > 0.5) != (scheme == "light"):
        wrong.append(f"background with luminance {found['paper']:.2f}")
    wrong += [f"faint: {text}" for text in found["faint"][:3]]
    for chart in found["charts"]:
        if not chart["seen"] or not chart["labels"] or not chart["bars"] + chart["points"]:
            wrong.append(f"nothing on the chart {chart['name']}")
        if chart["outside"]:
            wrong.append(f"{chart['outside']} marks outside the chart {chart['name']}")
        wrong += [f"{chart['name']}: labels cross: {pair}" for pair in chart["crossed"][:2]]
    for rows in found["tables"]:
        if len({len(row) for row in rows}) != 1:
            wrong.append(f"rows of unequal length below {rows[0]}")
    return found, wrong


class Bench:
    """The results from which pages are made."""

    def __init__(self, check):
        self.check, self.folder = check, check.scratch / "pages"
        self.folder.mkdir()
        self.model, self.quantized = check.model("demo"), self.folder / "quantized"
        self.text = self.folder / ODD
        self.text.write_text("<script>alert(1)</script> " + check.text("demo").read_text()[:6000])

    def at(self, name):
        return self.folder / name

    def quant(self, *arguments):
        return self.check.program("quant", *arguments, "--quiet")

    def evaluate(self, name, *options, model=None):
        """Returns a result; also writes its page if `options` request one."""
        file = self.at(f"{name}.json")
        self.quant("eval", model or self.quantized, "--text", self.text, "--window", "64", f"--json={file}", *options)
        return json.loads(file.read_text())

    def quantize(self):
        self.quant("quantize", self.model, "-o", self.quantized, "--scheme", "w3a16-g64", "--override",
                   "down_proj=w4a16-g64", "--samples", "8", "--seq-len", "128", "--report", self.at("quantize.html"))
        return json.loads((self.quantized / "quant_report.json").read_text())


def number(value, digits):
    return f"{value['mean']:.{digits}f} ± {value['standard_error']:.{digits}f}"


def nats(value):
    """Formats a divergence; if it is below 0.001, with two significant digits, and its standard error with one."""
    if value["mean"] >= 1e-3:
        return number(value, 5)
    shown = [f"{value['mean']:.1e}", f"{value['standard_error']:.0e}"]
    return " ± ".join(re.sub(r"e-0?", "e-", text) for text in shown)


def chart(found, name):
    return next((c for c in found["charts"] if c["name"] == name), {"bars": 0, "points": 0, "paints": []})


def table(found, *heading):
    """The rows below the one that begins with `heading`."""
    return next((rows[1:] for rows in found["tables"] if rows[0][:len(heading)] == list(heading)), [])


def expect_quantized(found, report):
    tensors = [t for t in report["tensors"] if t["weight_error"]]
    listed = {row[0]: row[2] for row in table(found, "tensor")}
    groups = {t["scale_search"]["producer"] for t in tensors if t["scale_search"]}
    outliers = sum(c["points"] for c in found["charts"] if c["name"].endswith("_proj"))
    yield "headings", found["headings"][1:], ["Precision of every linear", "Error of every quantized tensor",
                                              "Outliers in the inputs of linear layers", "Provenance"]
    yield "quantized tensors", found["tiles"].get("quantized tensors"), str(len(tensors))
    yield "errors", listed, {t["tensor"]: f"{100 * t['weight_error']['relative_rms']:.2f}" for t in tensors}
    yield "bars", chart(found, "Error of every quantized tensor")["bars"], len(tensors)
    yield "outliers before and after", outliers, 2 * len(groups)
    yield from expect_map(found, report)


def expect_map(found, report):
    schemes = {t["tensor"].removesuffix(".weight"): t["scheme"] for t in report["tensors"] if t["scheme"]}
    titles = sorted(f"block {name.split('.')[2]}, {'.'.join(name.split('.')[3:])}: {scheme}"
                    for name, scheme in schemes.items())
    yield "cells", sorted(title for title, _ in found["cells"]), titles
    colors = {(title.split(": ")[1], color) for title, color in found["cells"]}
    yield "a color for each scheme", len({color for _, color in colors}), len(set(schemes.values()))


def expect_evaluated(found, result, report, other):
    comparison = result["comparison"]
    blocks = 1 + max(int(t["tensor"].split(".")[2]) for t in report["tensors"] if ".layers." in t["tensor"])
    yield "headings", found["headings"][1:], [
        "Divergence from the reference", "Error by block", "Outliers in the inputs of linear layers",
        "Precision of every linear",
        "Error of every quantized tensor", "Worst windows", "Compared runs", "Provenance"]
    yield "perplexity", found["tiles"].get("perplexity"), number(result["perplexity"], 3)
    yield "ratio", found["tiles"].get("perplexity ratio"), number(comparison["perplexity_ratio"], 4)
    yield "KL", found["tiles"].get("mean KL, nats"), nats(comparison["kl"])
    yield "top token", found["tiles"].get("same top token"), number(comparison["top1_agreement"], 4)
    yield "error by depth", chart(found, "Relative error of hidden states by block")["points"], blocks
    histogram = chart(found, "Positions by divergence")
    floor = comparison["noise_floor"]["kl_histogram"]["counts"]
    filled = sum(n > 0 for n in comparison["kl_histogram"]["counts"] + floor)
    yield "bars of divergence and noise floor", histogram["bars"], filled
    yield "their colors", len(histogram["paints"]), 2
    kl = comparison["window_kl"]
    worst = sorted(range(len(kl)), key=lambda i: -kl[i])[:8]
    rows = table(found, "window")
    yield "worst windows", [row[0] for row in rows], [str(i) for i in worst]
    first = next((row[3] for row in rows if row[0] == "0"), "<script>alert")
    yield "their text", "<script>alert" in first, True
    rows = table(found, "", "result")
    yield "compared", [row[7] for row in rows], \
        [nats(comparison["kl"]), nats(other["comparison"]["kl"])]
    yield "none better in both", [bool(row[9]) for row in rows], [True, True]
    yield "provenance", result["model"]["sha256"] in str(found["tables"]), True
    yield from expect_map(found, report)


def expect_alone(found, result):
    yield "headings", found["headings"][1:], ["Precision of every linear", "Error of every quantized tensor",
                                              "Worst windows", "Provenance"]
    yield "perplexity", found["tiles"].get("perplexity"), number(result["perplexity"], 3)
    yield "text", ODD in found["text"], True


def expect_gate(found, decision):
    yield "headings", found["headings"][1:], ["Checks", "What has changed", "Provenance"]
    stated = dict(row[:2] for row in table(found, "policy, SHA-256"))
    yield "provenance", stated.get("baseline, SHA-256"), decision["baseline_sha256"]
    yield "verdict", found["tiles"].get("verdict"), decision["verdict"]
    yield "checks", [row[1] for row in table(found, "result")], \
        [check["verdict"] for check in decision["checks"]]


def page(check, browser, name, work):
    """Makes a page and examines it in every view; `work` returns its file and a check of what is found."""

    def run():
        file, expect = work()
        wrong = []
        for scheme, width in VIEWS:
            found, general = look(browser, file, scheme, width)
            found["text"] = file.read_text().replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
            special = [f"{what}: {is_!r}, not {should!r}" for what, is_, should in expect(found) if is_ != should]
            wrong += [f"{scheme}, {width} pixels: {text}" for text in general + special]
        return "; ".join(wrong[:4]) or f"{len(VIEWS)} views", not wrong

    check.step(f"page   {name}", run)


def run_all(check, chromium, only):
    names = [name for name in ("quantize", "eval", "eval-alone", "gate") if only in f"page   {name}"]
    if not names:
        return
    program = chromium and shutil.which(chromium)
    if not program:
        print("SKIPPED: the reports in a browser, because there is none", flush=True)
        return
    bench = Bench(check)
    report = bench.quantize()
    reference = ["--reference", bench.model]

    def quantize():
        return bench.at("quantize.html"), lambda found: expect_quantized(found, report)

    def evaluated():
        larger = bench.at("larger")
        bench.quant("quantize", bench.model, "-o", larger, "--method", "rtn", "--scheme", "w8a16-g64")
        other = bench.evaluate("other", *reference, model=larger)
        result = bench.evaluate("eval", *reference, "--report", bench.at("eval.html"), "--compare",
                                bench.at("other.json"))
        return bench.at("eval.html"), lambda found: expect_evaluated(found, result, report, other)

    def alone():
        result = bench.evaluate("alone", "--report", bench.at("alone.html"))
        return bench.at("alone.html"), lambda found: expect_alone(found, result)

    def gate():
        bench.evaluate("gated", *reference)
        bench.at("gate.toml").write_text(POLICY)
        bench.quant("gate", bench.at("gated.json"), "--baseline", bench.at("baseline.json"), "--update")
        # Exit code 1: the cap cannot be met.
        check.program("quant", "gate", bench.at("gated.json"), "--policy", bench.at("gate.toml"), "--baseline",
                      bench.at("baseline.json"), "--report", bench.at("gate.html"),
                      f"--json={bench.at('gate.json')}", status=1)
        decision = json.loads(bench.at("gate.json").read_text())
        return bench.at("gate.html"), lambda found: expect_gate(found, decision)

    work = {"quantize": quantize, "eval": evaluated, "eval-alone": alone, "gate": gate}
    with sync_playwright() as playwright:
        # Chromium does not run as root with its sandbox.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name in names:
            page(check, browser, name, work[name])
        browser.close()
