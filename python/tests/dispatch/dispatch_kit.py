"""Helpers of the dispatcher's tests: a recorder of callbacks, programs in processes of their own, and leftover processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Iterable, Optional, Sequence

from gpu_dispatch import BaseWorker, Dispatcher

MARK_VARIABLE = "GPUPOOL_TEST_MARK"
TIMEOUT_SECS = 60.0


class CallbackRecorder:
    """Records the callbacks of a run."""

    def __init__(self) -> None:
        self.results: dict[int, Any] = {}
        self.worker_ids: dict[int, int] = {}
        self.errors: dict[int, str] = {}
        self.timeouts: dict[int, float] = {}
        self.setup_failures: list[tuple[int, str]] = []
        self.outcomes: Counter[int] = Counter()
        self.threads: set[int] = set()
        self.exits = 0

    def on_success(self, task_id: int, data: Any, worker_id: int) -> None:
        self._count(task_id)
        self.results[task_id] = data
        self.worker_ids[task_id] = worker_id

    def on_error(self, task_id: int, traceback: str, worker_id: Optional[int]) -> None:
        self._count(task_id)
        self.errors[task_id] = traceback

    def on_timeout(self, task_id: int, timeout: float, worker_id: int) -> None:
        self._count(task_id)
        self.timeouts[task_id] = timeout

    def on_setup_fail(self, gpu_id: int, error: str) -> None:
        self.setup_failures.append((gpu_id, error))

    def on_exit(self) -> None:
        self.exits += 1

    def _count(self, task_id: int) -> None:
        self.outcomes[task_id] += 1
        self.threads.add(threading.get_ident())

    def check_one_outcome_each(self, count: int) -> None:
        assert sorted(self.outcomes) == list(range(count)), f"{len(self.outcomes)} of {count} tasks have an outcome"
        repeated = {task_id: times for task_id, times in self.outcomes.items() if times != 1}
        assert not repeated, f"tasks with more than one outcome: {repeated}"


def run_dispatcher(
    worker_cls: type[BaseWorker],
    tasks: Iterable[Any],
    gpu_ids: Sequence[int] = (0,),
    queue_size: int = 1024,
    options: Optional[dict[str, Any]] = None,
    **arguments: Any,
) -> CallbackRecorder:
    """Run all tasks and return the recorded callbacks."""
    recorder = CallbackRecorder()
    dispatcher = Dispatcher(worker_cls, gpu_ids, queue_size, **(options or {}))
    callbacks = {
        name: getattr(recorder, name) for name in ("on_success", "on_error", "on_timeout", "on_setup_fail", "on_exit")
    }
    dispatcher.run(tasks, **{**callbacks, **arguments})
    return recorder


class Script:
    """Python program in its own process and process group."""

    def __init__(self, path: Path, *arguments: str, source: str = "") -> None:
        if source:
            path.write_text(source)
        self.process = start_python([str(path), *arguments])

    def wait_for(self, text: str) -> str:
        """Return the program's output up to the line with this text."""
        return read_until(self.process, text)


def start_python(arguments: Sequence[str], stdin: Any = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """Start the interpreter of the tests."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_python(arguments: Sequence[str], source: str = "") -> str:
    """Run a program, check that it succeeds, and return its output."""
    process = start_python(arguments, subprocess.PIPE if source else subprocess.DEVNULL)
    output, _ = process.communicate(source or None, TIMEOUT_SECS)
    assert process.returncode == 0, f"exit code {process.returncode}: {output}"
    return output


def read_until(process: subprocess.Popen[str], text: str) -> str:
    output = ""
    assert process.stdout is not None
    for line in process.stdout:
        output += line
        if text in line:
            return output
    raise AssertionError(f"the program ended without printing {text!r}: {output}")


def wait_until(is_true: Callable[[], Any], condition: str) -> None:
    """Wait until `is_true` returns true, because of another process or thread."""
    deadline = time.monotonic() + TIMEOUT_SECS
    while not is_true():
        assert time.monotonic() < deadline, f"not reached in time: {condition}"
        time.sleep(0.005)


def marked_processes() -> dict[int, str]:
    """Return the pids and commands of other processes with this test's mark in their environment."""
    mark = f"{MARK_VARIABLE}={os.environ[MARK_VARIABLE]}".encode()
    found = {}
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit() or int(directory.name) == os.getpid():
            continue
        try:
            if mark in (directory / "environ").read_bytes().split(b"\0"):
                found[int(directory.name)] = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
        except OSError:
            continue  # The process has exited, or belongs to another user.
    return found


def check_no_process_is_left() -> None:
    wait_until(lambda: not marked_processes(), "no process is left")
