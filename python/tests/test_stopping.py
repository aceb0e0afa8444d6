"""Events, Ctrl-C, and resuming."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
from pathlib import Path

import fewbits
import pytest
from conftest import BLOCKS, digests
from fewbits import _call

#: Calibration settings that take long enough to interrupt.
SLOW = {"samples": 24, "seq_len": 128}


def test_events_come_in_order_on_the_calling_thread(model: Path, tmp_path: Path) -> None:
    events: list[fewbits.Event] = []
    threads = set()

    def on_event(event: fewbits.Event) -> None:
        events.append(event)
        threads.add(threading.get_ident())

    fewbits.quantize(model, tmp_path / "out", samples=4, seq_len=64, on_event=on_event)
    assert threads == {threading.get_ident()}
    stages = [event for event in events if isinstance(event, fewbits.StageStarted)]
    assert stages[0].stage == "quantize" and stages[0].unit == "block" and stages[0].units == BLOCKS
    expected = [event for event in events if isinstance(event, fewbits.Expected)]
    assert len(expected) == 1 and events.index(expected[0]) < events.index(stages[0])
    first_stage = events[events.index(stages[0]) : events.index(fewbits.StageDone())]
    assert sum(isinstance(event, fewbits.UnitDone) for event in first_stage) == BLOCKS
    started = [event.step for event in first_stage if isinstance(event, fewbits.StepStarted)]
    done = [event.step for event in first_stage if isinstance(event, fewbits.StepDone)]
    assert started == done and "awq" in done
    assert all(isinstance(event.to_dict(), dict) for event in events)
    assert sum(isinstance(event, fewbits.StageDone) for event in events) == len(stages)


def test_what_a_callback_raises_stops_the_run_and_is_raised(model: Path, tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    seen = []

    def on_event(event: fewbits.Event) -> None:
        seen.append(event)
        if isinstance(event, fewbits.UnitDone):
            raise Enough

    with pytest.raises(Enough):
        fewbits.quantize(model, tmp_path / "out", on_event=on_event, **SLOW)
    assert sum(isinstance(event, fewbits.UnitDone) for event in seen) == 1
    assert not (tmp_path / "out").exists()
    fewbits.quantize(model, tmp_path / "out", resume=True, **SLOW)


def test_ctrl_c_and_resuming_give_the_bytes_of_an_undisturbed_run(model: Path, tmp_path: Path) -> None:
    fewbits.quantize(model, tmp_path / "undisturbed", method="gptq", **SLOW)
    ready = threading.Event()

    def press() -> None:
        assert ready.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    def on_event(event: fewbits.Event) -> None:
        if isinstance(event, fewbits.UnitDone):
            ready.set()

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt) as stopped:
        fewbits.quantize(model, tmp_path / "out", method="gptq", on_event=on_event, **SLOW)
    presser.join()
    assert "repeat the call to continue" in "".join(traceback.format_exception(stopped.value))
    assert not (tmp_path / "out").exists() and (tmp_path / "out.job").is_dir()

    for resume, way in [(False, "force=True"), (True, "resume=True")]:
        with pytest.raises(fewbits.UsageError, match=way):
            fewbits.quantize(model, tmp_path / "out", method="gptq", scheme="w4a16-g64", resume=resume, **SLOW)

    resumed: list[int] = []
    fewbits.quantize(
        model,
        tmp_path / "out",
        method="gptq",
        on_event=lambda event: resumed.append(event.units) if isinstance(event, fewbits.Resumed) else None,
        **SLOW,
    )
    assert resumed and 1 <= resumed[0] < BLOCKS
    assert digests(tmp_path / "out") == digests(tmp_path / "undisturbed")


def test_before_python_3_11_the_exception_s_arguments_say_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(_call._native, "run", stopped)
    monkeypatch.setattr(sys, "version_info", (3, 10, 14))
    with pytest.raises(KeyboardInterrupt) as caught:
        fewbits.quantize("MODEL", "OUT")
    assert str(caught.value) == "finished work is kept; repeat the call to continue"
    with pytest.raises(KeyboardInterrupt) as caught:
        fewbits.plan("MODEL")
    assert caught.value.args == ()


def test_ctrl_c_in_another_process_ends_it_as_python_does(model: Path, tmp_path: Path) -> None:
    """The run has no callback, as in a notebook cell, and the command line continues it."""
    script = (
        "import sys, fewbits\n"
        "print('ready', flush=True)\n"
        "fewbits.quantize(sys.argv[1], sys.argv[2], samples=64, seq_len=128)\n"
    )
    out = tmp_path / "out"
    command = [sys.executable, "-c", script, str(model), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stderr is not None
        assert running.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 60
        while not out.with_suffix(".job").is_dir():
            assert time.monotonic() < deadline and running.poll() is None
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        error = running.stderr.read()
    assert running.returncode == -signal.SIGINT and "KeyboardInterrupt" in error, error
    assert not out.exists()
    line = ["quantize", str(model), "-o", str(out), "--samples", "64", "--seq-len", "128", "--resume", "--quiet"]
    subprocess.run([sys.executable, "-m", "fewbits", *line], check=True, capture_output=True)
    assert fewbits.inspect(out).quant_method == "compressed-tensors"


def test_ctrl_c_at_the_command_line_prints_how_to_go_on(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = [sys.executable, "-m", "fewbits", "quantize", str(model), "-o", str(out)]
    line += ["--samples", "64", "--seq-len", "128"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        deadline = time.monotonic() + 60
        while not out.with_suffix(".job").is_dir():
            assert time.monotonic() < deadline and running.poll() is None
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        error = running.stderr.read()
    assert running.returncode == 75 and "continue with: quant quantize" in error, error
    assert "Traceback" not in error
    fewbits.quantize(model, out, samples=64, seq_len=128, resume=True)


def test_other_threads_run_meanwhile(model: Path, tmp_path: Path) -> None:
    """The GIL is released while a job runs."""
    counted = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal counted
        while not stop.wait(0.005):
            counted += 1

    counter = threading.Thread(target=count)
    counter.start()
    started = time.monotonic()
    fewbits.quantize(model, tmp_path / "out", **SLOW)
    seconds = time.monotonic() - started
    stop.set()
    counter.join()
    # If the job held the GIL, there would be almost no ticks.
    assert counted > 20 * seconds


def test_a_bar_of_tqdm(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars = []

    class Bar:
        def __init__(self, total: int, desc: str, unit: str) -> None:
            self.total, self.desc, self.unit, self.done, self.closed = total, desc, unit, 0, False
            bars.append(self)

        def update(self, units: int) -> None:
            self.done += units

        def set_postfix_str(self, text: str, refresh: bool = True) -> None:
            assert isinstance(text, str)

        def close(self) -> None:
            self.closed = True

    auto = types.ModuleType("tqdm.auto")
    auto.tqdm = Bar  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tqdm", types.ModuleType("tqdm"))
    monkeypatch.setitem(sys.modules, "tqdm.auto", auto)
    fewbits.quantize(model, tmp_path / "out", method="rtn", progress=True)
    assert [bar.desc for bar in bars][0] == "quantize"
    assert all(bar.closed and bar.done == bar.total for bar in bars)


def test_no_bar_without_tqdm(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.warns(fewbits.FewbitsWarning, match="tqdm is not installed"):
        fewbits.quantize(model, tmp_path / "out", method="rtn", progress=True)
