"""`gpupool.lease` and `gpupool.status`: the small API of our own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
from agents import Agent
from watching import leases, ran

import gpupool


def test_a_block_holds_a_part_of_a_gpu(agent: Agent) -> None:
    with gpupool.lease(fraction=0.5, memory_mib=1000, priority=3, timeout=30, endpoint=agent.url) as gpu:
        [lease] = leases(agent)
        assert (gpu.id, gpu.worker_id, gpu.token) == (lease["id"], lease["worker_id"], lease["token"])
        assert gpu.gpu_ids == [gpu.gpu_id] and gpu.endpoint_id == "127.0.0.1"
        [device] = gpu.devices
        assert device["node"] == lease["devices"][0]["node"] != ""
        assert (device["gpu_id"], device["fraction"], device["memory_mib"]) == (gpu.gpu_id, 0.5, 1000)
        assert gpu.env["CUDA_VISIBLE_DEVICES"]
        assert gpu.lost is None
        gpu.check()
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert leases(agent) == []
    with pytest.raises(gpupool.StaleAssignmentError, match="was released"):
        gpu.check()
    gpu.release()


def test_the_environment_is_set_only_where_asked_and_put_back(agent: Agent, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with gpupool.lease(endpoint=agent.socket, set_environment=True) as gpu:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == gpu.env["CUDA_VISIBLE_DEVICES"] != "7"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"


def test_it_works_for_asyncio_as_well(agent: Agent) -> None:
    async def story() -> None:
        async with gpupool.lease(gpus=2, endpoint=agent.socket) as gpu:
            assert len(gpu.gpu_ids) == 2
            assert len(leases(agent)) == 1
        assert leases(agent) == []
        waiting = gpupool.lease(gpus=3, endpoint=agent.url)
        async with gpupool.lease(gpus=2, endpoint=agent.url):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(waiting.__aenter__(), 0.2)
        async with waiting as gpu:
            assert len(gpu.gpu_ids) == 3

    asyncio.run(story())
    assert leases(agent) == []


def test_who_does_not_want_to_wait_is_told_at_once(agent: Agent) -> None:
    with gpupool.lease(gpus=4, endpoint=agent.url):
        with pytest.raises(gpupool.NoCapacityError) as raised:
            gpupool.lease(wait=False, endpoint=agent.url).__enter__()
        assert raised.value.code == "no_capacity"
        with pytest.raises(gpupool.WorkerTimeoutError):
            gpupool.lease(timeout=0.1, endpoint=agent.url).__enter__()
    with pytest.raises(gpupool.ServiceUnavailableError):
        gpupool.lease(endpoint="http://127.0.0.1:9").__enter__()


def test_a_body_that_fails_fails_as_it_did(agent: Agent) -> None:
    with pytest.raises(KeyError):
        with gpupool.lease(endpoint=agent.url, ttl=1) as gpu:
            agent.call("lease", "release", str(gpu.id))
            raise KeyError("own")


def test_several_endpoints_are_one_pool(start_agent) -> None:
    first, second = start_agent("1xH100"), start_agent("2xH100")
    with gpupool.lease(gpus=2, endpoint=[first.url, second.url]) as gpu:
        assert gpu.endpoint_id == f"127.0.0.1_{second.port}"
        said = gpupool.status(endpoint=f"{first.url},{second.url}")
        assert (said["total_gpus"], said["available_gpus"], said["healthy_endpoints"]) == (3, 1, 2)
        assert len(said["gpus"]) == 3


def test_the_agent_of_the_state_directory_is_asked_over_its_socket_unless_another_is_named(start_agent) -> None:
    agent, other = start_agent(), start_agent("1xH100")
    source = """
    import gpupool
    with gpupool.lease() as gpu:
        print(gpu.endpoint_id, gpupool.status()["total_gpus"])
    """
    here = {"GPUPOOL_STATE_DIR": str(agent.state)}
    assert ran(source, environment=here).split() == [agent.socket.removeprefix("unix://"), "4"]
    there = {**here, "GPU_SERVICE_ENDPOINT": other.url}
    assert ran(source, environment=there).split() == ["127.0.0.1", "1"]


def test_the_import_needs_nothing_heavy() -> None:
    heavy = ("asyncio", "numpy", "rich", "cloudpickle", "uuid", "json", "subprocess", "multiprocessing")
    source = f"import sys, gpu_worker_pool, gpupool; print([name for name in {heavy!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", source], capture_output=True, text=True).stdout.strip() == "[]"
    assert gpupool.__version__
