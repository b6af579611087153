"""What tests have workers do."""

from __future__ import annotations

import os
import threading
from typing import NoReturn


def wait_for_ever() -> NoReturn:
    while True:
        threading.Event().wait()


def spin() -> NoReturn:
    while True:
        pass


def take_memory() -> NoReturn:
    taken = []
    while True:
        taken.append(b"x" * (4 << 20))


def hide_and(take: bool) -> int:
    """Starts a process that has left its parents behind, takes memory or waits, and cannot be found by descent."""
    reads, writes = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(writes, str(os.getpid()).encode())
            os.close(writes)
            take_memory() if take else wait_for_ever()
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        hidden = int(pipe.read())
    os.wait()
    return hidden


class OwnError(Exception):
    """With more than a message."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def fail(code: int) -> NoReturn:
    raise OwnError(code)


def die_with(value: object) -> NoReturn:
    os._exit(1)
