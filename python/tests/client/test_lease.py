"""`gpupool.lease` and `gpupool.status`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
from agents import Agent
from client_kit import list_leases, run_program

import gpupool


def test_a_block_leases_a_part_of_a_gpu(agent: Agent) -> None:
    with gpupool.lease(fraction=0.5, memory_mib=1000, priority=3, timeout=30, endpoint=agent.url) as gpu:
        [lease] = list_leases(agent)
        assert (gpu.id, gpu.worker_id, gpu.token) == (lease["id"], lease["worker_id"], lease["token"])
        assert gpu.gpu_ids == [gpu.gpu_id] and gpu.endpoint_id == "127.0.0.1"
        [device] = gpu.devices
        assert device["node"] == lease["devices"][0]["node"] != ""
        assert (device["gpu_id"], device["fraction"], device["memory_mib"]) == (gpu.gpu_id, 0.5, 1000)
        assert gpu.env["CUDA_VISIBLE_DEVICES"]
        assert gpu.lost is None
        gpu.check()
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert list_leases(agent) == []
    with pytest.raises(gpupool.StaleAssignmentError, match="was released"):
        gpu.check()
    gpu.release()


def test_the_environment_is_set_on_request_and_restored(agent: Agent, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with gpupool.lease(endpoint=agent.socket, set_environment=True) as gpu:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == gpu.env["CUDA_VISIBLE_DEVICES"] != "7"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"


def test_a_lease_works_with_asyncio(agent: Agent) -> None:
    async def scenario() -> None:
        async with gpupool.lease(gpus=2, endpoint=agent.socket) as gpu:
            assert len(gpu.gpu_ids) == 2
            assert len(list_leases(agent)) == 1
        assert list_leases(agent) == []
        waiting = gpupool.lease(gpus=3, endpoint=agent.url)
        async with gpupool.lease(gpus=2, endpoint=agent.url):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(waiting.__aenter__(), 0.2)
        async with waiting as gpu:
            assert len(gpu.gpu_ids) == 3

    asyncio.run(scenario())
    assert list_leases(agent) == []


def test_a_request_that_does_not_wait_fails_at_once(agent: Agent) -> None:
    with gpupool.lease(gpus=4, endpoint=agent.url):
        with pytest.raises(gpupool.NoCapacityError) as raised:
            gpupool.lease(wait=False, endpoint=agent.url).__enter__()
        assert raised.value.code == "no_capacity"
        with pytest.raises(gpupool.WorkerTimeoutError):
            gpupool.lease(timeout=0.1, endpoint=agent.url).__enter__()
    with pytest.raises(gpupool.ServiceUnavailableError):
        gpupool.lease(endpoint="http://127.0.0.1:9").__enter__()


def test_the_exception_of_the_body_wins_over_a_lost_lease(agent: Agent) -> None:
    with pytest.raises(KeyError):
        with gpupool.lease(endpoint=agent.url, ttl=1) as gpu:
            agent.run_command("lease", "release", str(gpu.id))
            raise KeyError("own")


def test_several_endpoints_form_one_pool(start_agent) -> None:
    first, second = start_agent("1xH100"), start_agent("2xH100")
    with gpupool.lease(gpus=2, endpoint=[first.url, second.url]) as gpu:
        assert gpu.endpoint_id == f"127.0.0.1_{second.port}"
        status = gpupool.status(endpoint=f"{first.url},{second.url}")
        assert (status["total_gpus"], status["available_gpus"], status["healthy_endpoints"]) == (3, 1, 2)
        assert len(status["gpus"]) == 3


def test_the_default_agent_is_that_of_the_state_directory(start_agent) -> None:
    agent, other = start_agent(), start_agent("1xH100")
    source = """
    import gpupool
    with gpupool.lease() as gpu:
        print(gpu.endpoint_id, gpupool.status()["total_gpus"])
    """
    environment = {"GPUPOOL_STATE_DIR": str(agent.state)}
    assert run_program(source, environment=environment).split() == [agent.socket.removeprefix("unix://"), "4"]
    assert run_program(source, environment={**environment, "GPU_SERVICE_ENDPOINT": other.url}).split() == ["127.0.0.1", "1"]


def test_the_import_loads_no_heavy_modules() -> None:
    heavy = ("asyncio", "numpy", "rich", "cloudpickle", "uuid", "json", "subprocess", "multiprocessing")
    source = f"import sys, gpu_worker_pool, gpupool; print([name for name in {heavy!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", source], capture_output=True, text=True).stdout.strip() == "[]"
    assert gpupool.__version__
