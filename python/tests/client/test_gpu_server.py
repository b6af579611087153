"""The statistics server as `python -m gpu_worker_pool.gpu_server`, as a file, and as an ASGI app."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from client_kit import TIMEOUT_SECS

import gpu_worker_pool
from gpu_worker_pool import GPUWorkerPoolClient

SIMULATED = '[monitoring]\nsimulate = "2xH100"\n'
FILE = Path(gpu_worker_pool.__file__).with_name("gpu_server.py")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which a server has two simulated GPUs."""
    config = tmp_path / "gpupool.toml"
    config.write_text(SIMULATED)
    return {**os.environ, "GPUPOOL_CONFIG": str(config), "TMPDIR": str(tmp_path), "LOG_LEVEL": "warn"}


@pytest.mark.parametrize("arguments", [["-m", "gpu_worker_pool.gpu_server"], [str(FILE)]], ids=["module", "file"])
def test_the_server_runs_as_a_program(arguments: list[str], environment: dict[str, str], tmp_path: Path) -> None:
    variables = {"PORT": "0", "GPUPOOL_STATE_DIR": str(tmp_path / "state"), "CUDA_VISIBLE_DEVICES": "1"}
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, text=True, env={**environment, **variables}
    )
    try:
        assert process.stdout is not None
        url = next(line.split()[-1] for line in process.stdout if "listening on http" in line)
        assert url.startswith("http://127.0.0.1:")
        assert [gpu["gpu_id"] for gpu in get(url, "/gpu/summary")["gpus_summary"]] == [1]

        async def scenario() -> int:
            async with GPUWorkerPoolClient(url) as client:
                return (await client.request_gpu()).gpu_id

        assert asyncio.run(scenario()) == 1
    finally:
        process.terminate()
        process.communicate(timeout=TIMEOUT_SECS)


def test_uvicorn_serves_only_statistics(environment: dict[str, str], tmp_path: Path) -> None:
    with uvicorn(environment) as (url, process):
        assert get(url, "/gpu/count")["gpu_count"] == 2
        assert {"gpu_id", "name", "memory", "utilization_percent"} <= set(get(url, "/gpu/stats")["gpus"][0])
        assert get(url, "/health")["status"] == "healthy"
        assert get(url, "/", accept="text/html")["endpoints"]
        config = get(url, "/config")
        assert config["server"]["host"] == "127.0.0.1" and url.endswith(f":{config['server']['port']}")
        for page in ("/docs", "/docs/swagger-ui.css", "/redoc", "/redoc/redoc.js", "/openapi.json"):
            assert status(url, page) == 200, page
        for route in ("/v1/pool", "/v1/leases", "/v1/leases/1/hold", "//v1/pool", "/docs/../v1/pool", "/metrics", "/x"):
            assert status(url, route) == 404, route
        for method in ("POST", "DELETE", "PUT", "PATCH", "OPTIONS"):
            assert status(url, "/gpu/stats", method) == 405, method
        assert status(url, "/v1/leases", "POST") == 405
        [state] = tmp_path.glob("gpupool-statistics-*")
        process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT_SECS)
        assert not state.exists()


def test_the_agent_of_a_killed_server_ends(environment: dict[str, str], tmp_path: Path) -> None:
    with uvicorn(environment, "--lifespan", "off") as (url, process):
        assert get(url, "/gpu/count")["gpu_count"] == 2
        [state] = tmp_path.glob("gpupool-statistics-*")
        connection = connect_to_agent(state)
        process.kill()
        process.wait(TIMEOUT_SECS)
        wait_until_closed(connection)


def test_a_dead_agent_is_replaced(environment: dict[str, str], tmp_path: Path) -> None:
    with uvicorn(environment) as (url, process):
        assert get(url, "/gpu/count")["gpu_count"] == 2
        [state] = tmp_path.glob("gpupool-statistics-*")
        child = next(
            int(pid.name)
            for pid in Path("/proc").iterdir()
            if pid.name.isdigit() and _runs(pid, "serve") and _runs(pid, str(state)) and not _runs(pid, "-c")
        )
        connection = connect_to_agent(state)
        os.kill(child, signal.SIGKILL)
        wait_until_closed(connection)
        assert get(url, "/gpu/count")["gpu_count"] == 2


def connect_to_agent(state: Path) -> socket.socket:
    """Return a connection that closes when the agent ends."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(TIMEOUT_SECS)
    connection.connect(str(state / "agent.sock"))
    return connection


def wait_until_closed(connection: socket.socket) -> None:
    try:
        assert connection.recv(1) == b""
    except ConnectionResetError:
        pass


def _runs(pid: Path, word: str) -> bool:
    try:
        return word in (pid / "cmdline").read_text().split("\0")
    except OSError:
        return False


class uvicorn:  # noqa: N801 - reads as what it starts
    """Context manager that runs uvicorn with the app on a free port."""

    def __init__(self, environment: dict[str, str], *arguments: str) -> None:
        pytest.importorskip("uvicorn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = ["-m", "uvicorn", "gpu_worker_pool.gpu_server:app", "--port", str(self.port), *arguments]
        self.process = subprocess.Popen(
            [sys.executable, *command], stderr=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self) -> tuple[str, subprocess.Popen[str]]:
        assert self.process.stderr is not None
        output = ""
        for line in self.process.stderr:
            output += line
            if "Uvicorn running on" in line:
                return f"http://127.0.0.1:{self.port}", self.process
        raise AssertionError(f"uvicorn did not start: {output}")

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=TIMEOUT_SECS)


def get(url: str, route: str, accept: str = "application/json"):
    request = urllib.request.Request(url + route, headers={"accept": accept})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECS) as response:
        return json.load(response)


def status(url: str, route: str, method: str = "GET") -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url + route, method=method), timeout=TIMEOUT_SECS) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def test_an_agent_that_cannot_start_is_reported(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "gpupool.toml").write_text('[monitoring]\nsimulate = "nonsense"\n')
    with pytest.raises(AssertionError, match="gpupool serve did not start"):
        uvicorn(environment).__enter__()
