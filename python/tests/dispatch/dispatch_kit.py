"""What the tests of the dispatcher share: a tally of callbacks, programs in processes of their own, and who is left."""

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

MARK = "GPUPOOL_TEST_MARK"
PATIENCE_SECS = 60.0


class Tally:
    """Keeps what the callbacks of a run say."""

    def __init__(self) -> None:
        self.done: dict[int, Any] = {}
        self.by: dict[int, int] = {}
        self.errors: dict[int, str] = {}
        self.late: dict[int, float] = {}
        self.not_set_up: list[tuple[int, str]] = []
        self.outcomes: Counter[int] = Counter()
        self.threads: set[int] = set()
        self.exits = 0

    def on_success(self, task_id: int, data: Any, worker_id: int) -> None:
        self._count(task_id)
        self.done[task_id] = data
        self.by[task_id] = worker_id

    def on_error(self, task_id: int, traceback: str, worker_id: Optional[int]) -> None:
        self._count(task_id)
        self.errors[task_id] = traceback

    def on_timeout(self, task_id: int, timeout: float, worker_id: int) -> None:
        self._count(task_id)
        self.late[task_id] = timeout

    def on_setup_fail(self, gpu_id: int, error: str) -> None:
        self.not_set_up.append((gpu_id, error))

    def on_exit(self) -> None:
        self.exits += 1

    def _count(self, task_id: int) -> None:
        self.outcomes[task_id] += 1
        self.threads.add(threading.get_ident())

    def check_each_once(self, count: int) -> None:
        assert sorted(self.outcomes) == list(range(count)), f"of {count} tasks {len(self.outcomes)} were told of"
        twice = {task_id: times for task_id, times in self.outcomes.items() if times != 1}
        assert not twice, f"told of more than once: {twice}"


def run(
    worker_cls: type[BaseWorker],
    tasks: Iterable[Any],
    gpu_ids: Sequence[int] = (0,),
    queue_size: int = 1024,
    options: Optional[dict[str, Any]] = None,
    **arguments: Any,
) -> Tally:
    """Runs all tasks and returns what the callbacks said."""
    tally = Tally()
    dispatcher = Dispatcher(worker_cls, gpu_ids, queue_size, **(options or {}))
    callbacks = {
        name: getattr(tally, name) for name in ("on_success", "on_error", "on_timeout", "on_setup_fail", "on_exit")
    }
    dispatcher.run(tasks, **{**callbacks, **arguments})
    return tally


class Script:
    """A Python program in a process and process group of its own."""

    def __init__(self, path: Path, *arguments: str, source: str = "") -> None:
        if source:
            path.write_text(source)
        self.process = start([str(path), *arguments])

    def wait_for(self, text: str) -> str:
        """What it writes up to a line with this text."""
        return wait_for(self.process, text)


def start(arguments: Sequence[str], stdin: Any = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """Starts the interpreter of the tests."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def said_by(arguments: Sequence[str], source: str = "") -> str:
    """What a program wrote, that had to end well."""
    process = start(arguments, subprocess.PIPE if source else subprocess.DEVNULL)
    said, _ = process.communicate(source or None, PATIENCE_SECS)
    assert process.returncode == 0, f"it ended with {process.returncode}: {said}"
    return said


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    said = ""
    assert process.stdout is not None
    for line in process.stdout:
        said += line
        if text in line:
            return said
    raise AssertionError(f"it never said {text!r} but: {said}")


def until(holds: Callable[[], Any], what: str) -> None:
    """Waits for something another process or thread does."""
    deadline = time.monotonic() + PATIENCE_SECS
    while not holds():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.005)


def marked_processes() -> dict[int, str]:
    """Other processes with this test's mark in their environment, and their commands."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
        except OSError:
            continue  # It is gone, or somebody else's.
    return found


def check_nobody_is_left() -> None:
    until(lambda: not marked_processes(), "no process is left")
