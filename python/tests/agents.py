"""A real agent with simulated GPUs."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from gpupool import _command_path

START_PATIENCE_SECS = 60


class Agent:
    """`gpupool serve` on a free port, with its own state; ended with the test."""

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
        self.url, self.socket = self._addresses()
        self.port = int(self.url.rsplit(":", 1)[1])

    def _addresses(self) -> tuple[str, str]:
        said = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said += line
            web, unix = (re.search(rf"listening on ({scheme}://\S+)", said) for scheme in ("https?", "unix"))
            if web and unix:
                return web.group(1), unix.group(1)
        raise AssertionError(f"the agent did not start: {said}{(self.state / 'log').read_text()}")

    def call(self, *arguments: str) -> str:
        """What the command line says when it asks this agent."""
        ran = subprocess.run(
            [_command_path.find_command(), *arguments, "--endpoint", self.socket], capture_output=True, text=True, timeout=60
        )
        assert ran.returncode == 0, f"gpupool {' '.join(arguments)}: {ran.stderr}"
        return ran.stdout

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def start_again(self) -> None:
        """As it was, after `kill`."""
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._start()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(START_PATIENCE_SECS)
            except subprocess.TimeoutExpired:
                self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.log.close()
        shutil.rmtree(self.state, ignore_errors=True)
