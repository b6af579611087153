"""Private `gpupool serve` on a Unix socket that only this user can reach; it always ends with this process."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from typing import List, Optional

from gpupool import _command_path

#: Runs the agent until this process closes the pipe or dies, then removes the directory. Its output ends with the agent.
_GUARD_SCRIPT = """
"$@" </dev/null & child=$!
exec >/dev/null 2>&1
read -r _
kill "$child"
wait "$child"
rm -rf "$GPUPOOL_CHILD_DIR"
"""
_MAX_START_LINES = 50


class AgentProcess:
    """Agent that starts on first use, and again after its death."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._socket_path = ""
        self._creator_pid = 0

    def socket_path(self) -> str:
        """Return the path of the agent's socket. Block while the agent starts."""
        with self._lock:
            if self._process is None or self._creator_pid != os.getpid():
                self._start()
            return self._socket_path

    def discard(self, socket_path: str) -> None:
        """End the agent of this socket, because it does not answer; the next use starts another one."""
        with self._lock:
            if socket_path == self._socket_path and self._creator_pid == os.getpid():
                self._end()

    def stop(self) -> None:
        """End the agent and wait for its exit."""
        with self._lock:
            if self._creator_pid == os.getpid():
                self._end()

    def _start(self) -> None:
        directory = tempfile.mkdtemp(prefix="gpupool-statistics-")
        command = [_command_path.find_command(), "serve", "--host", "127.0.0.1", "--port", "0", "--state-dir", directory]
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD_SCRIPT, "gpupool-statistics", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # It leases nothing, so it must not claim the GPUs of an agent that does.
            env={**os.environ, "GPUPOOL_CHILD_DIR": directory, "GPUPOOL_CLAIMS": os.path.join(directory, "claims")},
            # Ctrl-C must reach only this process; the agent ends when this process ends.
            start_new_session=True,
        )
        self._creator_pid = os.getpid()
        self._socket_path = self._read_socket_path(self._process)

    def _read_socket_path(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stdout is not None
        output: List[str] = []
        for line in process.stdout:
            output.append(line.decode(errors="replace").strip())
            _, found, socket_path = output[-1].partition("listening on unix://")
            if found:
                threading.Thread(target=_discard_output, args=(process.stdout,), daemon=True).start()
                return socket_path
            if len(output) > _MAX_START_LINES:
                break
        self._end()
        raise RuntimeError(f"gpupool serve did not start: {' '.join(output) or 'see its output on stderr'}")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def _discard_output(pipe: object) -> None:
    """Read and drop further output, since a full pipe would block the agent."""
    for _ in pipe:  # type: ignore[attr-defined]
        pass
