"""Assignments of a client with one agent."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
from datetime import datetime, timedelta

import pytest
from agents import Agent
from client_kit import TIMEOUT_SECS, list_leases, post, wait_until, wait_until_free

from gpu_worker_pool import (
    GPUAssignment,
    GPUContextManager,
    GPUWorkerPoolClient,
    RequestRefusedError,
    StaleAssignmentError,
    WorkerTimeoutError,
    gpu_worker_pool_client,
)


def run(scenario, agent: Agent, **settings):
    """Run a scenario with a started client."""

    async def run_with_client():
        async with GPUWorkerPoolClient(agent.url, **settings) as client:
            return await asyncio.wait_for(scenario(client), TIMEOUT_SECS)

    return asyncio.run(run_with_client())


def test_two_live_assignments_never_share_a_device(agent: Agent) -> None:
    async def scenario(client: GPUWorkerPoolClient) -> None:
        held = [await client.request_gpu() for _ in range(4)]
        assert sorted(assignment.gpu_id for assignment in held) == [0, 1, 2, 3]
        assert len({assignment.worker_id for assignment in held}) == 4

    run(scenario, agent)
    assert list_leases(agent) == []


def test_two_halves_share_a_device(agent: Agent) -> None:
    async def scenario(client: GPUWorkerPoolClient) -> None:
        first = await client.request_gpu(fraction=0.5)
        second = await client.request_gpu(fraction=0.5)
        assert first.gpu_id == second.gpu_id
        assert {worker.worker_id for worker in client.get_pool_status().gpu_assignments[first.gpu_id]} == {
            first.worker_id,
            second.worker_id,
        }

    run(scenario, agent)


def test_several_gpus_are_granted_together(agent: Agent) -> None:
    async def scenario(client: GPUWorkerPoolClient) -> None:
        await client.request_gpu(gpus=3, priority=5, memory_mib=1000)
        assert client.get_pool_status().active_workers == 1
        [lease] = list_leases(agent)
        assert len(lease["devices"]) == 3

    run(scenario, agent)


def test_requests_are_served_in_the_order_of_arrival(start_agent) -> None:
    agent = start_agent("1xH100")

    async def scenario(client: GPUWorkerPoolClient) -> list[int]:
        held = await client.request_gpu()
        order: list[int] = []

        async def wait(number: int) -> None:
            async with GPUContextManager(client):
                order.append(number)

        waiting = []
        for number in range(6):
            waiting.append(asyncio.ensure_future(wait(number)))
            count = number + 1
            arrived = lambda count=count: len(list_leases(agent, "queued")) == count  # noqa: E731
            await asyncio.get_running_loop().run_in_executor(None, wait_until, agent, arrived, f"{count} requests wait")
        await client.release_gpu(held)
        await asyncio.gather(*waiting)
        return order

    assert run(scenario, agent) == list(range(6))


def test_concurrent_requests_are_served_in_the_order_of_the_calls(start_agent) -> None:
    agent = start_agent("1xH100")

    async def scenario(client: GPUWorkerPoolClient) -> list[int]:
        held = await client.request_gpu()
        order: list[int] = []

        async def wait(number: int) -> None:
            async with GPUContextManager(client):
                order.append(number)

        waiting = [asyncio.ensure_future(wait(number)) for number in range(12)]
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, wait_until, agent, lambda: len(list_leases(agent, "queued")) == 12, "all requests wait")
        await client.release_gpu(held)
        await asyncio.gather(*waiting)
        return order

    assert run(scenario, agent) == list(range(12))


def test_a_timed_out_request_raises_and_leaves_nothing_behind(agent: Agent) -> None:
    async def scenario(client: GPUWorkerPoolClient) -> None:
        await client.request_gpu(gpus=4)
        with pytest.raises(WorkerTimeoutError) as raised:
            await client.request_gpu(timeout=1.5)
        assert str(raised.value) == f"Worker {raised.value.worker_id} request timed out after 1.5 seconds"
        assert isinstance(raised.value, TimeoutError)
        wait_until(agent, lambda: not list_leases(agent, "queued", "offered"), "no request waits")
        assert client.get_pool_status().blocked_workers == 0

    run(scenario, agent)


def test_worker_timeout_applies_to_requests_without_a_timeout(agent: Agent) -> None:
    async def scenario(client: GPUWorkerPoolClient) -> None:
        await client.request_gpu(gpus=4)
        with pytest.raises(WorkerTimeoutError, match=r"request timed out after 0\.25 seconds"):
            await client.request_gpu()

    run(scenario, agent, worker_timeout=0.25)


@pytest.mark.parametrize("how", ["cancel", "wait_for"])
def test_a_cancelled_request_leaves_nothing_behind(agent: Agent, how: str) -> None:
    async def scenario(client: GPUWorkerPoolClient) -> None:
        held = await client.request_gpu(gpus=4)
        waiting = asyncio.ensure_future(client.request_gpu())
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, wait_until, agent, lambda: bool(list_leases(agent, "queued")), "the request waits")
        if how == "cancel":
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        else:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(waiting, 0.01)
        await loop.run_in_executor(None, wait_until, agent, lambda: not list_leases(agent, "queued", "offered"), "it is cancelled")
        await client.release_gpu(held)
        # The cancelled request does not block the GPUs for the next request.
        await client.release_gpu(await client.request_gpu(gpus=4))

    run(scenario, agent)
    assert list_leases(agent) == []


def test_requests_cancelled_at_any_time_leave_nothing_behind(agent: Agent) -> None:
    async def scenario(client: GPUWorkerPoolClient) -> None:
        for step in range(60):
            request = asyncio.ensure_future(client.request_gpu())
            # From before the request is sent until after its grant.
            await asyncio.wait([request], timeout=step / 20_000)
            if request.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await request
            else:
                await client.release_gpu(request.result())
        await asyncio.get_running_loop().run_in_executor(None, wait_until_free, agent)
        assert client.get_pool_status().active_workers == 0

    run(scenario, agent)


def test_release_is_idempotent_and_rejects_unknown_assignments(agent: Agent) -> None:
    async def scenario(client: GPUWorkerPoolClient) -> None:
        held = await client.request_gpu()
        twin = copy.copy(held)
        await asyncio.gather(client.release_gpu(held), client.release_gpu(twin))
        await client.release_gpu(held)
        made_up = GPUAssignment(gpu_id=0, worker_id="unknown", assigned_at=datetime.now())
        for wrong in (made_up, None, 3, "gpu0"):
            with pytest.raises(ValueError, match=r"never granted|request_gpu\(\)"):
                await client.release_gpu(wrong)  # type: ignore[arg-type]
        async with GPUWorkerPoolClient(agent.url) as another:
            theirs = await another.request_gpu()
            with pytest.raises(ValueError, match="never granted"):
                await client.release_gpu(theirs)
            assert len(list_leases(agent)) == 1

    run(scenario, agent)


def test_a_released_assignment_does_not_release_a_newer_one(agent: Agent) -> None:
    async def scenario(client: GPUWorkerPoolClient) -> None:
        first = await client.request_gpu(worker_id="w", select={"gpu_ids": [0]})
        await client.release_gpu(first)
        second = await client.request_gpu(worker_id="w", select={"gpu_ids": [0]})
        await client.release_gpu(first)
        assert [lease["id"] for lease in list_leases(agent)] == [client._leases["w"].id]
        with pytest.raises(StaleAssignmentError, match="was released"):
            client.check_assignment(first)
        client.check_assignment(second)
        # An assignment of another client with the same worker id is unknown, too.
        async with GPUWorkerPoolClient(agent.url) as another:
            theirs = await another.request_gpu(worker_id="w", select={"gpu_ids": [1]})
            with pytest.raises(ValueError, match="never granted"):
                await client.release_gpu(theirs)
            mine = await client.request_gpu()
            assert mine.worker_id != (await another.request_gpu()).worker_id
            assert len(list_leases(agent)) == 4

    run(scenario, agent)


def test_releasing_a_lost_assignment_raises(agent: Agent) -> None:
    async def scenario(client: GPUWorkerPoolClient) -> None:
        held = await client.request_gpu()
        post(agent, f"/v1/leases/{list_leases(agent)[0]['id']}/revoke", {})
        with pytest.raises(StaleAssignmentError, match="revoked"):
            await client.release_gpu(held)
        assert client.get_pool_status().active_workers == 0
        timed = await client.request_gpu(max_duration=0.3, ttl=3600)
        with pytest.raises(StaleAssignmentError, match="reached its maximum duration"):
            while True:
                client.check_assignment(timed)
                await asyncio.sleep(0.005)

    run(scenario, agent)


def test_an_assignment_rebuilt_from_its_fields_can_be_released(agent: Agent) -> None:
    async def scenario(client: GPUWorkerPoolClient) -> None:
        held = await client.request_gpu()
        again = GPUAssignment(**dataclasses.asdict(held))
        assert again == held
        await client.release_gpu(again)
        assert list_leases(agent) == []
        assert timedelta(0) <= datetime.now() - held.assigned_at < timedelta(minutes=5)

    run(scenario, agent)


def test_a_client_can_be_stopped_and_started_again(agent: Agent) -> None:
    async def scenario() -> None:
        client = GPUWorkerPoolClient(agent.url)
        with pytest.raises(RuntimeError, match="^Client must be started before requesting GPU$"):
            await client.request_gpu()
        for _ in range(2):
            await client.start()
            with pytest.raises(RuntimeError, match="^Client is already started$"):
                await client.start()
            held = await client.request_gpu()
            await client.stop()
            assert list_leases(agent) == []
            await client.stop()
            with pytest.raises(RuntimeError, match="^Client must be started before releasing GPU$"):
                await client.release_gpu(held)
        with pytest.raises(RuntimeError, match="^Client must be started before getting pool status$"):
            client.get_pool_status()
        with pytest.raises(RuntimeError, match="^Client must be started before getting metrics$"):
            client.get_detailed_metrics()
        with pytest.raises(RuntimeError):
            client.print_error_recovery_summary()
        await client.start()
        await client.release_gpu(held)
        await client.stop()

    asyncio.run(scenario())


def test_stop_fails_waiting_requests(agent: Agent) -> None:
    async def scenario() -> None:
        client = GPUWorkerPoolClient(agent.url)
        await client.start()
        await client.request_gpu(gpus=4)
        waiting = asyncio.ensure_future(client.request_gpu())
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, wait_until, agent, lambda: bool(list_leases(agent, "queued")), "the request waits")
        await client.stop()
        with pytest.raises(RuntimeError, match="Client must be started before requesting GPU"):
            await waiting
        # `stop` also waits until the request has left the queue.
        assert list_leases(agent) == []

    asyncio.run(scenario())


def test_a_garbage_collected_client_releases_everything(agent: Agent) -> None:
    async def scenario() -> None:
        client = GPUWorkerPoolClient(agent.url)
        await client.start()
        await client.request_gpu()
        del client
        gc.collect()
        await asyncio.get_running_loop().run_in_executor(None, wait_until_free, agent)

    asyncio.run(scenario())


def test_an_assignment_released_by_an_administrator_is_stale_at_its_next_use(agent: Agent) -> None:
    async def scenario(client: GPUWorkerPoolClient) -> None:
        lost = asyncio.get_running_loop().create_future()
        client.subscribe(lambda update: update["kind"] == "lost" and not lost.done() and lost.set_result(update))
        held = await client.request_gpu(ttl=1)
        client.check_assignment(held)
        [lease] = list_leases(agent)
        agent.run_command("lease", "release", str(lease["id"]))
        update = await lost
        assert update["worker_id"] == held.worker_id
        with pytest.raises(StaleAssignmentError, match=held.worker_id):
            client.check_assignment(held)
        with pytest.raises(StaleAssignmentError, match=held.worker_id):
            await client.release_gpu(held)
        await client.release_gpu(held)
        assert client.get_pool_status().active_workers == 0

    run(scenario, agent)


def test_assignments_older_than_the_stale_age_are_reclaimed(agent: Agent) -> None:
    async def scenario(client: GPUWorkerPoolClient) -> None:
        lost = asyncio.get_running_loop().create_future()
        client.subscribe(lambda update: update["kind"] == "lost" and not lost.done() and lost.set_result(update))
        held = await client.request_gpu(ttl=1)
        await lost
        with pytest.raises(StaleAssignmentError):
            await client.release_gpu(held)

    run(scenario, agent, stale_age=1.0)


def test_the_context_manager_assigns_one_gpu_to_its_block(agent: Agent) -> None:
    async def scenario(client: GPUWorkerPoolClient) -> None:
        async with GPUContextManager(client, timeout=30) as gpu_id:
            assert isinstance(gpu_id, int)
            assert list(client.get_pool_status().gpu_assignments) == [gpu_id]
        assert client.get_pool_status().gpu_assignments == {}
        with pytest.raises(ZeroDivisionError):
            async with GPUContextManager(client):
                raise ZeroDivisionError
        assert list_leases(agent) == []

    run(scenario, agent)

    async def made_by_a_function() -> None:
        async with gpu_worker_pool_client(agent.url, memory_threshold=75) as client:
            assert client.get_detailed_metrics()["thresholds"]["memory_threshold_percent"] == 75.0

    asyncio.run(made_by_a_function())


def test_unsatisfiable_requests_are_rejected_at_once(agent: Agent) -> None:
    async def scenario(client: GPUWorkerPoolClient) -> None:
        with pytest.raises(RequestRefusedError, match="gpus"):
            await client.request_gpu(gpus=0)
        with pytest.raises(RequestRefusedError, match="fraction"):
            await client.request_gpu(fraction=1.5)
        with pytest.raises(RequestRefusedError):
            await client.request_gpu(gpus=16)
        with pytest.raises(TypeError, match="memory_mib"):
            await client.request_gpu(memory_mib="much")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="timeout"):
            await client.request_gpu(timeout="5")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="timeout"):
            await client.request_gpu(timeout=-1)
        assert list_leases(agent) == []

    run(scenario, agent)


def test_a_subscriber_gets_statistics(agent: Agent) -> None:
    async def scenario(client: GPUWorkerPoolClient) -> None:
        updates: asyncio.Queue = asyncio.Queue()
        unsubscribe = client.subscribe(updates.put_nowait)
        kinds = set()
        held = await client.request_gpu()
        await client.release_gpu(held)
        while not {"statistics", "assigned", "released"} <= kinds:
            update = await updates.get()
            kinds.add(update["kind"])
            if update["kind"] == "statistics":
                assert len(update["gpus"]) == 4
        unsubscribe()
        with pytest.raises(ValueError, match="callback"):
            client.subscribe("not a function")  # type: ignore[arg-type]

    run(scenario, agent, polling_interval=0.05)


def test_the_status_is_plain_data_with_its_age(agent: Agent) -> None:
    async def scenario(client: GPUWorkerPoolClient) -> None:
        held = await client.request_gpu()
        status = client.get_pool_status()
        assert (status.total_gpus, status.available_gpus, status.active_workers) == (4, 3, 1)
        assert status.authority == "agent" and status.age_secs >= 0
        [worker] = status.gpu_assignments[held.gpu_id]
        assert (worker.worker_id, worker.assigned_at) == (held.worker_id, held.assigned_at)
        metrics = client.get_detailed_metrics()
        assert metrics["pool_summary"]["efficiency_percent"] >= 0
        assert metrics["load_balancer"]["success_rate"] == 100.0
        assert client.get_endpoints_info() is None
        assert not client.is_multi_endpoint_mode()
        for call in (client.trigger_endpoint_recovery("x"), client.queue_request_for_retry(lambda: None)):
            with pytest.raises(RuntimeError, match="several endpoints"):
                await call

    run(scenario, agent)
