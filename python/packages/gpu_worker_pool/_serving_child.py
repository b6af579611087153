"""A `gpupool serve` of our own, on a Unix socket nobody else can reach; it ends with this process, whatever ends it."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from typing import List, Optional

from gpupool import _command

#: Serves until this process closes the pipe, by dying if need be; then clears up. What the child says ends with the child.
_GUARD = """
"$@" </dev/null & child=$!
exec >/dev/null 2>&1
read -r _
kill "$child"
wait "$child"
rm -rf "$GPUPOOL_CHILD_DIR"
"""
_LINES = 50


class ServingChild:
    """Started when it is first needed, and again where it has died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._socket = ""
        self._made_by = 0

    def socket(self) -> str:
        """Where it listens. Blocks while it starts."""
        with self._lock:
            if self._process is None or self._made_by != os.getpid():
                self._start()
            return self._socket

    def forget(self, socket: str) -> None:
        """It does not listen there any more: the next one who asks gets another."""
        with self._lock:
            if socket == self._socket and self._made_by == os.getpid():
                self._end()

    def stop(self) -> None:
        """Ends it, and waits until it has gone."""
        with self._lock:
            if self._made_by == os.getpid():
                self._end()

    def _start(self) -> None:
        directory = tempfile.mkdtemp(prefix="gpupool-statistics-")
        command = [_command.find(), "serve", "--host", "127.0.0.1", "--port", "0", "--state-dir", directory]
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "gpupool-statistics", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "GPUPOOL_CHILD_DIR": directory},
            # Ctrl-C is this process' business; it tells the child by ending.
            start_new_session=True,
        )
        self._made_by = os.getpid()
        self._socket = self._said_socket(self._process)

    def _said_socket(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stdout is not None
        said: List[str] = []
        for line in process.stdout:
            said.append(line.decode(errors="replace").strip())
            _, found, socket = said[-1].partition("listening on unix://")
            if found:
                threading.Thread(target=_read_on, args=(process.stdout,), daemon=True).start()
                return socket
            if len(said) > _LINES:
                break
        self._end()
        raise RuntimeError(f"gpupool serve did not start: {' '.join(said) or 'see what it wrote to stderr'}")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def _read_on(pipe: object) -> None:
    """Nobody wants what else it says, but a full pipe would stop it."""
    for _ in pipe:  # type: ignore[attr-defined]
        pass
