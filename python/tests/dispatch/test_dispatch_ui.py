"""RichDispatcher: its result, its display, and the state of the terminal afterwards."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any, Iterator

import pytest

from dispatch_kit import TIMEOUT_SECS, CallbackRecorder
from gpu_dispatch import BaseWorker
from gpu_dispatch.ui import RichDispatcher

rich_console = pytest.importorskip("rich.console")

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Mixed(BaseWorker):
    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        if gpu_id in kwargs.get("bad", ()):
            raise ValueError("no such card")

    def process(self, data: Any) -> Any:
        print("written by a worker")
        if data == "fail":
            raise ValueError("odd")
        if data == "sleep":
            time.sleep(TIMEOUT_SECS)
        return data


def terminal(width: int = 100, height: int = 20) -> Any:
    return rich_console.Console(file=io.StringIO(), force_terminal=True, width=width, height=height, legacy_windows=False)


def test_run_returns_a_summary() -> None:
    before = time.time()
    recorder = CallbackRecorder()
    dispatcher = RichDispatcher(Mixed, [0, 4], show_ui=False)
    result = dispatcher.run(
        iter([1, 2, "fail", "sleep", 3]),
        recorder.on_success,
        recorder.on_error,
        recorder.on_timeout,
        task_timeout=0.5,
        total_tasks=5,
    )
    assert list(result) == [
        "total", "completed", "failed", "timeouts", "setup_failures", "start_time", "end_time", "expected_total", "gpu_status",
    ]  # fmt: skip
    counts = {name: result[name] for name in ("total", "completed", "failed", "timeouts", "setup_failures", "expected_total")}
    assert counts == {"total": 5, "completed": 3, "failed": 1, "timeouts": 1, "setup_failures": 0, "expected_total": 5}
    assert before <= result["start_time"] < result["end_time"] <= time.time()
    gpus = result["gpu_status"]
    assert list(gpus) == [0, 4]
    for gpu in gpus.values():
        assert list(gpu) == [
            "status", "current_task", "task_start_time", "last_duration", "completed", "failed", "timeouts",
        ]  # fmt: skip
        assert (gpu["status"], gpu["current_task"], gpu["task_start_time"]) == ("idle", None, None)
    assert [sum(gpu[name] for gpu in gpus.values()) for name in ("completed", "failed", "timeouts")] == [3, 1, 1]
    assert max(gpu["last_duration"] or 0 for gpu in gpus.values()) > 0
    recorder.check_one_outcome_each(5)
    assert dispatcher.get_stats() == {"pending": 0, "running": 0, **result}


def test_a_run_needs_no_callbacks_and_no_total() -> None:
    result = RichDispatcher(Mixed, [0], show_ui=False).run(iter([1, 2]))
    assert (result["total"], result["expected_total"]) == (2, None)
    result = RichDispatcher(Mixed, [0], show_ui=False).run([1, 2])
    assert result["expected_total"] == 2, "the length of the list"


def test_failed_setups_are_counted_and_marked() -> None:
    failed_gpus: list[int] = []

    def tasks() -> Iterator[int]:
        yield 1
        deadline = time.monotonic() + TIMEOUT_SECS
        while not failed_gpus and time.monotonic() < deadline:
            time.sleep(0.005)

    result = RichDispatcher(Mixed, [0, 1], show_ui=False).run(
        tasks(), on_setup_fail=lambda gpu_id, error: failed_gpus.append(gpu_id), bad=[1]
    )
    assert failed_gpus == [1] and result["setup_failures"] == 1
    assert {gpu_id: gpu["status"] for gpu_id, gpu in result["gpu_status"].items()} == {0: "idle", 1: "failed"}


def test_when_all_setups_fail_run_raises_the_dispatchers_error() -> None:
    console = terminal()
    dispatcher = RichDispatcher(Mixed, [0], console=console)
    with pytest.raises(RuntimeError, match="^All workers failed during setup$"):
        dispatcher.run([1], bad=[0])
    assert dispatcher.get_stats()["setup_failures"] == 1
    assert console.file.getvalue().count(HIDE) == console.file.getvalue().count(SHOW) == 1


def test_statistics_include_the_current_task() -> None:
    dispatcher = RichDispatcher(Mixed, [2], show_ui=False, workers_per_gpu=2)
    snapshots: list[dict[str, Any]] = []

    def record_stats(task_id: int, worker_id: int) -> None:
        stats = dispatcher.get_stats()
        if stats["gpu_status"][2]["current_task"] is not None:
            snapshots.append(stats)
            dispatcher.shutdown()

    result = dispatcher.run(["sleep"] * 3, on_task_start=record_stats)
    gpu = snapshots[0]["gpu_status"][2]
    assert gpu["status"] == "busy" and gpu["current_task"] in (0, 1)
    assert snapshots[0]["start_time"] <= gpu["task_start_time"] <= time.time()
    assert result["total"] == 0 and result["end_time"] is not None


def test_the_display_shows_each_gpu_and_the_progress() -> None:
    console = terminal()
    RichDispatcher(Mixed, [0, 4], console=console).run([1, "fail", 2], total_tasks=3, on_error=lambda *_: None)
    screen_output = console.file.getvalue()
    last = screen_output[screen_output.rindex("3/3") :]
    assert "1 failed" in last and "took" in last
    for word in ("GPU", "State", "Task", "Since", "Done", "Failed", "Timeouts", "Rate", "idle"):
        assert word in last, word
    assert screen_output.count(HIDE) == screen_output.count(SHOW) == 1


@pytest.mark.parametrize(("width", "height"), [(1, 1), (7, 3), (20, 5), (33, 4), (45, 8), (60, 8), (200, 50)])
def test_the_display_fits_any_terminal(width: int, height: int) -> None:
    from gpu_dispatch._progress_display import ProgressDisplay

    gpu = {"current_task": 10**9, "task_start_time": 1.0, "last_duration": 3.5, "completed": 123_456, "failed": 7, "timeouts": 1}
    stats = {
        "total": 123_464, "completed": 123_456, "failed": 7, "timeouts": 1, "setup_failures": 1, "expected_total": 10**7,
        "start_time": 1.0, "end_time": None, "gpu_status": {number: {"status": "busy", **gpu} for number in range(16)},
    }  # fmt: skip
    console = terminal(width, height)
    display = ProgressDisplay(console, 2.0, lambda: stats)
    for total in (0, 123_464, 10**8):
        stats["total"] = total
        lines = console.render_lines(display._render(), pad=False)
        assert all(sum(segment.cell_length for segment in line) <= width for line in lines)
    with display:
        pass


def test_output_of_workers_and_callbacks_appears_above_the_display() -> None:
    console = terminal()
    dispatcher = RichDispatcher(Mixed, [0], console=console, suppress_worker_output=False)
    dispatcher.run([1, 2], lambda task_id, data, worker_id: print("written by a callback"))
    screen_output = console.file.getvalue()
    assert screen_output.count("written by a worker") == 2 and screen_output.count("written by a callback") == 2


def test_nothing_is_drawn_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    console = rich_console.Console(file=io.StringIO())
    result = RichDispatcher(Mixed, [0], console=console).run([1, 2])
    assert result["completed"] == 2 and console.file.getvalue() == ""
    dumb = rich_console.Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    RichDispatcher(Mixed, [0], console=dumb).run([1])
    assert dumb.file.getvalue() == ""
    RichDispatcher(Mixed, [0]).run([1])
    hidden = terminal()
    RichDispatcher(Mixed, [0], show_ui=False, console=hidden).run([1])
    assert hidden.file.getvalue() == "" and capfd.readouterr() == ("", "")


@pytest.mark.parametrize("rate", [0, -1, 61, "fast", True, None])
def test_an_invalid_refresh_rate_is_named(rate: Any) -> None:
    with pytest.raises(ValueError, match="refresh_rate .* got "):
        RichDispatcher(Mixed, [0], refresh_rate=rate)


def test_invalid_arguments_raise_the_dispatchers_errors() -> None:
    with pytest.raises(TypeError, match="^worker_cls must inherit from BaseWorker, got "):
        RichDispatcher(int, [0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^gpu_ids cannot be empty$"):
        RichDispatcher(Mixed, [])


def test_without_rich_the_error_names_the_package_unless_show_ui_is_false() -> None:
    code = (
        "import sys; sys.modules['rich'] = None\n"
        "from gpu_dispatch.ui import RichDispatcher; from gpu_dispatch import BaseWorker\n"
        "class W(BaseWorker):\n"
        "    def setup(self, gpu_id, seed): pass\n"
        "    def process(self, data): return data\n"
        "try: RichDispatcher(W, [0])\n"
        "except ImportError as error: print(error)\n"
        "print(RichDispatcher(W, [0], show_ui=False).run([1])['completed'])\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_SECS)
    error, count = process.stdout.splitlines()
    assert "pip install 'gpupool[ui]'" in error and "show_ui=False" in error and count == "1"


PROGRAM = """
import sys, time
from gpu_dispatch import BaseWorker
from gpu_dispatch.ui import RichDispatcher

class Worker(BaseWorker):
    def setup(self, gpu_id, seed, **kwargs): pass
    def process(self, data):
        if data == 5 and sys.argv[1] == "interrupt":
            time.sleep(1000)
        return data

def tasks():
    yield from range(20)
    if sys.argv[1] == "error":
        raise OSError("broken source")

if __name__ == "__main__":
    RichDispatcher(Worker, [0, 1], refresh_rate=20).run(tasks(), total_tasks=20)
    print("finished")
"""


def read(terminal: int) -> str:
    """Return the output of the terminal; empty after all programs closed it."""
    try:
        return os.read(terminal, 65536).decode(errors="replace")
    except OSError:
        return ""


@pytest.mark.parametrize("end", ["fine", "interrupt", "error"])
def test_the_terminal_is_restored(end: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    controller, terminal_fd = pty.openpty()
    fcntl.ioctl(terminal_fd, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 70, 0, 0))
    before = termios.tcgetattr(terminal_fd)
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, str(script), end],
        stdin=terminal_fd,
        stdout=terminal_fd,
        stderr=terminal_fd,
        env={**environment, "TERM": "xterm-256color", "PYTHON_COLORS": "0"},
        start_new_session=True,
    )
    os.close(terminal_fd)
    screen_output = ""
    while chunk := read(controller):
        screen_output += chunk
        if end == "interrupt" and "busy" in screen_output:
            process.send_signal(signal.SIGINT)
            end = "interrupted"
    process.wait(TIMEOUT_SECS)
    assert termios.tcgetattr(controller) == before
    os.close(controller)
    assert screen_output.count(HIDE) == screen_output.count(SHOW) == 1
    after = screen_output[screen_output.rindex(SHOW) :]
    expected = {"fine": "finished", "interrupted": "KeyboardInterrupt", "error": "OSError: broken source"}[end]
    assert expected in after, after
