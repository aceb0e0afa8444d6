"""A notebook: cells, interrupting a cell, resuming, and the displayed report."""

from __future__ import annotations

import html
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import digests
from jupyter_client.manager import KernelManager

import fewbits

TIMEOUT = 240


class Notebook:
    """A notebook kernel that runs in a directory. `run` returns the outputs and the reply of a cell."""

    def __init__(self, directory: Path) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(directory))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=TIMEOUT)

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def run(self, code: str, interrupt_at: str | None = None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Runs a cell; the kernel is interrupted once this text has been printed."""
        sent = self.client.execute(code, allow_stdin=False)
        outputs: list[dict[str, Any]] = []
        printed = ""
        deadline = time.monotonic() + TIMEOUT
        while True:
            message = self.client.get_iopub_msg(timeout=max(1, deadline - time.monotonic()))
            if message["parent_header"].get("msg_id") != sent:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                break
            if kind == "stream":
                printed += content["text"]
                if interrupt_at is not None and interrupt_at in printed:
                    interrupt_at = None
                    self.manager.interrupt_kernel()
            outputs.append({"type": kind, **content})
        while True:
            # Replies to earlier requests may arrive late.
            message = self.client.get_shell_msg(timeout=TIMEOUT)
            if message["parent_header"].get("msg_id") == sent:
                return outputs, message["content"]


@pytest.fixture
def notebook(model: Path, tmp_path: Path) -> Any:
    (tmp_path / "MODEL").symlink_to(model)
    opened = Notebook(tmp_path)
    yield opened
    opened.close()


SETTINGS = 'method="gptq", samples=48, seq_len=128'


def test_a_cell_is_interrupted_and_the_next_one_resumes(notebook: Notebook, model: Path, tmp_path: Path) -> None:
    _, reply = notebook.run(
        "import fewbits\n"
        "def show(event):\n"
        "    if isinstance(event, fewbits.UnitDone):\n"
        "        print('done:', event.detail, flush=True)\n"
    )
    assert reply["status"] == "ok", reply
    outputs, reply = notebook.run(
        f'fewbits.quantize("MODEL", "OUT", {SETTINGS}, on_event=show)', interrupt_at="done: block 0"
    )
    assert reply["status"] == "error" and reply["ename"] == "KeyboardInterrupt", (outputs, reply)
    assert "repeat the call to continue" in "".join(reply["traceback"])
    assert not (tmp_path / "OUT").exists()
    outputs, reply = notebook.run(f'done = fewbits.quantize("MODEL", "OUT", {SETTINGS})\ndone')
    assert reply["status"] == "ok", reply
    # The cell's output is the report: a frame with a page that has no scripts.
    [shown] = [one["data"]["text/html"] for one in outputs if one["type"] == "execute_result"]
    page = re.search(r'srcdoc="([^"]*)"', shown)
    assert page and "sandbox" in shown and "<script" not in html.unescape(page.group(1))
    assert "q_proj" in html.unescape(page.group(1))
    fewbits.quantize(model, tmp_path / "undisturbed", method="gptq", samples=48, seq_len=128)
    assert digests(tmp_path / "OUT") == digests(tmp_path / "undisturbed")


def test_the_example(notebook: Notebook, tmp_path: Path) -> None:
    """Runs all cells of the example, with shorter texts."""
    notebook.run(
        "import functools, fewbits\n"
        "def quantize(*paths, full=fewbits.quantize, **settings):\n"
        "    # Rounding to nearest needs no text.\n"
        "    short = {} if settings.get('method') == 'rtn' else {'samples': 8, 'seq_len': 64}\n"
        "    return full(*paths, **settings, **short)\n"
        "fewbits.quantize = quantize\n"
        "fewbits.evaluate = functools.partial(fewbits.evaluate, window=64, windows=2)\n"
    )
    example = json.loads((Path(os.environ["FEWBITS_ROOT"]) / "python/examples/quantize.ipynb").read_text())
    cells = [cell for cell in example["cells"] if cell["cell_type"] == "code"]
    shown = []
    for cell in cells:
        # Outputs would become outdated.
        assert cell["outputs"] == [] and cell["execution_count"] is None
        outputs, reply = notebook.run("".join(cell["source"]))
        assert reply["status"] == "ok", (cell["source"], reply)
        shown += [one["data"].get("text/html", "") for one in outputs if one["type"] == "execute_result"]
    # The plan is a table; the results are framed pages.
    assert len(shown) == 3 and "<table" in shown[0] and all("<iframe" in page for page in shown[1:]), shown
    assert all((tmp_path / f"OUT-{name}/config.json").is_file() for name in ("awq", "rtn", "gptq", "awq-groups-of-64"))


def test_the_cells_of_the_guide(notebook: Notebook) -> None:
    outputs, reply = notebook.run(
        "import fewbits\n"
        'fewbits.quantize("MODEL", "OUT", method="rtn")\n'
        'result = fewbits.evaluate("OUT", text="builtin-heldout", reference="MODEL", window=128, windows=4)\n'
        "result\n"
    )
    assert reply["status"] == "ok", reply
    assert any(one["type"] == "execute_result" and "iframe" in one["data"]["text/html"] for one in outputs)
    outputs, reply = notebook.run('fewbits.quantize("MODEL", "OUT", group_size=100)')
    assert reply["ename"] == "UsageError" and "group" in reply["evalue"]
