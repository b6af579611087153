"""Agents with simulated GPUs for tests."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from gpupool import _command_path

STOP_TIMEOUT_SECS = 60


class Agent:
    """`gpupool serve` on a free port, with its own state directory."""

    def __init__(self, gpus: str = "4xH100", *arguments: str, environment: dict[str, str] | None = None, port: int = 0) -> None:
        self.state = Path(tempfile.mkdtemp(prefix="gpupool-test-"))
        self.log = (self.state / "log").open("wb")
        self._command = [_command_path.find_command(), "serve", "--simulate", gpus, "--state-dir", str(self.state), *arguments]
        self._environment, self.port = environment, port
        self._start()

    def _start(self) -> None:
        command = [*self._command, "--port", str(self.port)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self.log, text=True, env=self._environment
        )
        self.url, self.socket = self._read_addresses()
        self.port = int(self.url.rsplit(":", 1)[1])

    def _read_addresses(self) -> tuple[str, str]:
        output = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            output += line
            web, unix = (re.search(rf"listening on ({scheme}://\S+)", output) for scheme in ("https?", "unix"))
            if web and unix:
                return web.group(1), unix.group(1)
        raise AssertionError(f"the agent did not start: {output}{(self.state / 'log').read_text()}")

    def run_command(self, *arguments: str) -> str:
        """Run a `gpupool` command against this agent and return its output."""
        process = subprocess.run(
            [_command_path.find_command(), *arguments, "--endpoint", self.socket], capture_output=True, text=True, timeout=60
        )
        assert process.returncode == 0, f"gpupool {' '.join(arguments)}: {process.stderr}"
        return process.stdout

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def restart(self) -> None:
        """Start the agent again after `kill`, with the same port and state."""
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._start()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_SECS)
            except subprocess.TimeoutExpired:
                self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.log.close()
        shutil.rmtree(self.state, ignore_errors=True)
