"""Functions that tests run in workers."""

from __future__ import annotations

import os
import threading
from typing import NoReturn


def wait_forever() -> NoReturn:
    while True:
        threading.Event().wait()


def spin() -> NoReturn:
    while True:
        pass


def take_memory() -> NoReturn:
    chunks = []
    while True:
        chunks.append(b"x" * (4 << 20))


def start_hidden_process(takes_memory: bool) -> int:
    """Start a daemonized process, which cannot be found by descent, and which waits or takes memory."""
    reads, writes = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(writes, str(os.getpid()).encode())
            os.close(writes)
            take_memory() if takes_memory else wait_forever()
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        hidden = int(pipe.read())
    os.wait()
    return hidden


class CustomError(Exception):
    """Exception with a custom attribute."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def fail(code: int) -> NoReturn:
    raise CustomError(code)


def exit_process(value: object) -> NoReturn:
    os._exit(1)
