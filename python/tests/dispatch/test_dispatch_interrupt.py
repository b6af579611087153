"""Ctrl-C and death of the program at any time: no process is left."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from dispatch_kit import TIMEOUT_SECS, Script, check_no_process_is_left, marked_processes
from gpu_dispatch import BaseWorker, Dispatcher

PROGRAM = """
import hashlib, signal, sys, time
from gpu_dispatch import BaseWorker, Dispatcher

moment = sys.argv[1]

def now(where):
    if where == moment:
        print("now", flush=True)
        if where == "native":
            hashlib.pbkdf2_hmac("sha256", b"x", b"x", 2**31 - 1)
        while where != "stream":
            time.sleep(1000)

class Worker(BaseWorker):
    def setup(self, gpu_id, seed, **kwargs):
        now("setup")
    def process(self, data):
        now("process")
        now("native")
        return data
    def cleanup(self):
        now("cleanup")

def tasks():
    yield 1
    yield 2
    now("generator")
    if moment == "stream":
        for number in range(10**9):
            if number == 5000:
                now("stream")
            yield number

def on_success(task_id, data, worker_id):
    now("callback")

if __name__ == "__main__":
    Dispatcher(Worker, [0, 1]).run(tasks(), on_success)
"""

MOMENTS = ["setup", "process", "native", "callback", "generator", "cleanup", "stream"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_ends_the_program_and_its_workers(moment: str, tmp_path: Path) -> None:
    script = Script(tmp_path / "program.py", moment, source=PROGRAM)
    script.wait_for("now")
    # A terminal sends SIGINT to the whole foreground process group.
    os.killpg(script.process.pid, signal.SIGINT)
    output, _ = script.process.communicate(timeout=TIMEOUT_SECS)
    assert script.process.returncode in (-signal.SIGINT, 130), output
    assert output.rstrip().endswith("KeyboardInterrupt"), output
    check_no_process_is_left()


def test_an_interrupt_of_the_program_alone_ends_its_workers(tmp_path: Path) -> None:
    script = Script(tmp_path / "program.py", "process", source=PROGRAM)
    script.wait_for("now")
    script.process.send_signal(signal.SIGINT)
    script.process.communicate(timeout=TIMEOUT_SECS)
    check_no_process_is_left()


@pytest.mark.parametrize("moment", ["setup", "native", "stream"])
def test_a_killed_program_leaves_no_worker(moment: str, tmp_path: Path) -> None:
    script = Script(tmp_path / "program.py", moment, source=PROGRAM)
    script.wait_for("now")
    assert len(marked_processes()) >= 2
    script.process.kill()
    script.process.communicate(timeout=TIMEOUT_SECS)
    check_no_process_is_left()


def test_a_dispatcher_can_run_again_after_an_interrupt(tmp_path: Path) -> None:
    source = PROGRAM.replace(
        '    Dispatcher(Worker, [0, 1]).run(tasks(), on_success)\n',
        '''    dispatcher = Dispatcher(Worker, [0, 1])
    try:
        dispatcher.run(tasks(), on_success)
    except KeyboardInterrupt:
        moment = "none"
        done = []
        dispatcher.run([1, 2, 3], lambda task_id, data, worker_id: done.append(data), on_exit=lambda: print("exit"))
        print(sorted(done))
''',
    )
    # The callback sleeps in the program, so that the workers of the second run do not sleep.
    script = Script(tmp_path / "program.py", "callback", source=source)
    script.wait_for("now")
    script.process.send_signal(signal.SIGINT)
    output, _ = script.process.communicate(timeout=TIMEOUT_SECS)
    assert output.splitlines()[-2:] == ["exit", "[1, 2, 3]"], output


class Masked(BaseWorker):
    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        pass

    def process(self, data: Any) -> Any:
        return signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_signals_reach_workers_and_the_calling_thread() -> None:
    """Our own threads block signals; otherwise a waiting callback would not get Ctrl-C."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    during: list[Any] = []

    def record_masks(task_id: int, data: Any, worker_id: int) -> None:
        during.append((data, signal.pthread_sigmask(signal.SIG_BLOCK, [])))
        for thread in Path("/proc/self/task").iterdir():
            if (thread / "comm").read_text().startswith("gpupool-"):
                blocked = re.search(r"SigBlk:\s+(\w+)", (thread / "status").read_text())
                during.append(bool(blocked and int(blocked.group(1), 16) & (1 << (signal.SIGINT - 1))))

    Dispatcher(Masked, [0]).run([1], record_masks)
    (in_worker, in_caller), *threads = during
    assert in_worker == set() and in_caller == before
    assert threads and all(threads)
