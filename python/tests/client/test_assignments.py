"""What one client of one agent promises."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
from datetime import datetime, timedelta

import pytest
from agents import Agent
from watching import PATIENCE, leases, post, wait_until, wait_until_free

from gpu_worker_pool import (
    GPUAssignment,
    GPUContextManager,
    GPUWorkerPoolClient,
    RequestRefusedError,
    StaleAssignmentError,
    WorkerTimeoutError,
    gpu_worker_pool_client,
)


def run(story, agent: Agent, **settings):
    """Runs a story with a client that is started."""

    async def told():
        async with GPUWorkerPoolClient(agent.url, **settings) as client:
            return await asyncio.wait_for(story(client), PATIENCE)

    return asyncio.run(told())


def test_two_live_assignments_never_share_a_device(agent: Agent) -> None:
    async def story(client: GPUWorkerPoolClient) -> None:
        held = [await client.request_gpu() for _ in range(4)]
        assert sorted(one.gpu_id for one in held) == [0, 1, 2, 3]
        assert len({one.worker_id for one in held}) == 4

    run(story, agent)
    assert leases(agent) == []


def test_two_halves_share_a_device(agent: Agent) -> None:
    async def story(client: GPUWorkerPoolClient) -> None:
        first = await client.request_gpu(fraction=0.5)
        second = await client.request_gpu(fraction=0.5)
        assert first.gpu_id == second.gpu_id
        assert {worker.worker_id for worker in client.get_pool_status().gpu_assignments[first.gpu_id]} == {
            first.worker_id,
            second.worker_id,
        }

    run(story, agent)


def test_several_gpus_come_together(agent: Agent) -> None:
    async def story(client: GPUWorkerPoolClient) -> None:
        await client.request_gpu(gpus=3, priority=5, memory_mib=1000)
        assert client.get_pool_status().active_workers == 1
        [lease] = leases(agent)
        assert len(lease["devices"]) == 3

    run(story, agent)


def test_who_asked_first_is_served_first(start_agent) -> None:
    agent = start_agent("1xH100")

    async def story(client: GPUWorkerPoolClient) -> list[int]:
        held = await client.request_gpu()
        order: list[int] = []

        async def wait(number: int) -> None:
            async with GPUContextManager(client):
                order.append(number)

        waiting = []
        for number in range(6):
            waiting.append(asyncio.ensure_future(wait(number)))
            wanted = number + 1
            arrived = lambda wanted=wanted: len(leases(agent, "queued")) == wanted  # noqa: E731
            await asyncio.get_running_loop().run_in_executor(None, wait_until, agent, arrived, f"{wanted} wait")
        await client.release_gpu(held)
        await asyncio.gather(*waiting)
        return order

    assert run(story, agent) == list(range(6))


def test_requests_made_at_once_are_served_in_the_order_of_the_calls(start_agent) -> None:
    agent = start_agent("1xH100")

    async def story(client: GPUWorkerPoolClient) -> list[int]:
        held = await client.request_gpu()
        order: list[int] = []

        async def wait(number: int) -> None:
            async with GPUContextManager(client):
                order.append(number)

        waiting = [asyncio.ensure_future(wait(number)) for number in range(12)]
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, wait_until, agent, lambda: len(leases(agent, "queued")) == 12, "all wait")
        await client.release_gpu(held)
        await asyncio.gather(*waiting)
        return order

    assert run(story, agent) == list(range(12))


def test_a_request_that_waits_too_long_says_so_and_leaves_nothing_behind(agent: Agent) -> None:
    async def story(client: GPUWorkerPoolClient) -> None:
        await client.request_gpu(gpus=4)
        with pytest.raises(WorkerTimeoutError) as raised:
            await client.request_gpu(timeout=1.5)
        assert str(raised.value) == f"Worker {raised.value.worker_id} request timed out after 1.5 seconds"
        assert isinstance(raised.value, TimeoutError)
        wait_until(agent, lambda: not leases(agent, "queued", "offered"), "nobody waits")
        assert client.get_pool_status().blocked_workers == 0

    run(story, agent)


def test_the_clients_own_limit_counts_where_a_request_has_none(agent: Agent) -> None:
    async def story(client: GPUWorkerPoolClient) -> None:
        await client.request_gpu(gpus=4)
        with pytest.raises(WorkerTimeoutError, match=r"request timed out after 0\.25 seconds"):
            await client.request_gpu()

    run(story, agent, worker_timeout=0.25)


@pytest.mark.parametrize("how", ["cancel", "wait_for"])
def test_a_request_that_is_given_up_leaves_nothing_behind(agent: Agent, how: str) -> None:
    async def story(client: GPUWorkerPoolClient) -> None:
        held = await client.request_gpu(gpus=4)
        waiting = asyncio.ensure_future(client.request_gpu())
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, wait_until, agent, lambda: bool(leases(agent, "queued")), "it waits")
        if how == "cancel":
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        else:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(waiting, 0.01)
        await loop.run_in_executor(None, wait_until, agent, lambda: not leases(agent, "queued", "offered"), "it left")
        await client.release_gpu(held)
        # What the one that left would have got is there for the next one.
        await client.release_gpu(await client.request_gpu(gpus=4))

    run(story, agent)
    assert leases(agent) == []


def test_requests_given_up_at_any_instant_leave_nothing_behind(agent: Agent) -> None:
    async def story(client: GPUWorkerPoolClient) -> None:
        for step in range(60):
            asked = asyncio.ensure_future(client.request_gpu())
            # From before it is sent to after it was granted.
            await asyncio.wait([asked], timeout=step / 20_000)
            if asked.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await asked
            else:
                await client.release_gpu(asked.result())
        await asyncio.get_running_loop().run_in_executor(None, wait_until_free, agent)
        assert client.get_pool_status().active_workers == 0

    run(story, agent)


def test_release_is_idempotent_and_refuses_what_was_never_granted(agent: Agent) -> None:
    async def story(client: GPUWorkerPoolClient) -> None:
        held = await client.request_gpu()
        twin = copy.copy(held)
        await asyncio.gather(client.release_gpu(held), client.release_gpu(twin))
        await client.release_gpu(held)
        made_up = GPUAssignment(gpu_id=0, worker_id="somebody", assigned_at=datetime.now())
        for wrong in (made_up, None, 3, "gpu0"):
            with pytest.raises(ValueError, match=r"never granted|request_gpu\(\)"):
                await client.release_gpu(wrong)  # type: ignore[arg-type]
        async with GPUWorkerPoolClient(agent.url) as another:
            theirs = await another.request_gpu()
            with pytest.raises(ValueError, match="never granted"):
                await client.release_gpu(theirs)
            assert len(leases(agent)) == 1

    run(story, agent)


def test_an_assignment_that_is_over_gives_nothing_else_back(agent: Agent) -> None:
    async def story(client: GPUWorkerPoolClient) -> None:
        first = await client.request_gpu(worker_id="w", select={"gpu_ids": [0]})
        await client.release_gpu(first)
        second = await client.request_gpu(worker_id="w", select={"gpu_ids": [0]})
        await client.release_gpu(first)
        assert [lease["id"] for lease in leases(agent)] == [client._leases["w"].id]
        with pytest.raises(StaleAssignmentError, match="was released"):
            client.check_assignment(first)
        client.check_assignment(second)
        # Those of another client are not its own either, whatever they are called.
        async with GPUWorkerPoolClient(agent.url) as another:
            theirs = await another.request_gpu(worker_id="w", select={"gpu_ids": [1]})
            with pytest.raises(ValueError, match="never granted"):
                await client.release_gpu(theirs)
            mine = await client.request_gpu()
            assert mine.worker_id != (await another.request_gpu()).worker_id
            assert len(leases(agent)) == 4

    run(story, agent)


def test_giving_back_what_was_lost_says_so(agent: Agent) -> None:
    async def story(client: GPUWorkerPoolClient) -> None:
        held = await client.request_gpu()
        post(agent, f"/v1/leases/{leases(agent)[0]['id']}/revoke", {})
        with pytest.raises(StaleAssignmentError, match="taken back|revoked"):
            await client.release_gpu(held)
        assert client.get_pool_status().active_workers == 0
        timed = await client.request_gpu(max_duration=0.3, ttl=3600)
        with pytest.raises(StaleAssignmentError, match="as long as it may be"):
            while True:
                client.check_assignment(timed)
                await asyncio.sleep(0.005)

    run(story, agent)


def test_an_assignment_made_again_from_its_fields_is_the_same_assignment(agent: Agent) -> None:
    async def story(client: GPUWorkerPoolClient) -> None:
        held = await client.request_gpu()
        again = GPUAssignment(**dataclasses.asdict(held))
        assert again == held
        await client.release_gpu(again)
        assert leases(agent) == []
        assert timedelta(0) <= datetime.now() - held.assigned_at < timedelta(minutes=5)

    run(story, agent)


def test_a_client_can_be_stopped_and_started_again(agent: Agent) -> None:
    async def story() -> None:
        client = GPUWorkerPoolClient(agent.url)
        with pytest.raises(RuntimeError, match="^Client must be started before requesting GPU$"):
            await client.request_gpu()
        for _ in range(2):
            await client.start()
            with pytest.raises(RuntimeError, match="^Client is already started$"):
                await client.start()
            held = await client.request_gpu()
            await client.stop()
            assert leases(agent) == []
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

    asyncio.run(story())


def test_a_stopped_client_tells_those_who_wait(agent: Agent) -> None:
    async def story() -> None:
        client = GPUWorkerPoolClient(agent.url)
        await client.start()
        await client.request_gpu(gpus=4)
        waiting = asyncio.ensure_future(client.request_gpu())
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, wait_until, agent, lambda: bool(leases(agent, "queued")), "it waits")
        await client.stop()
        with pytest.raises(RuntimeError, match="Client must be started before requesting GPU"):
            await waiting
        # Stopping waits until the place in the queue is given up, too.
        assert leases(agent) == []

    asyncio.run(story())


def test_a_client_nobody_refers_to_gives_everything_back(agent: Agent) -> None:
    async def story() -> None:
        client = GPUWorkerPoolClient(agent.url)
        await client.start()
        await client.request_gpu()
        del client
        gc.collect()
        await asyncio.get_running_loop().run_in_executor(None, wait_until_free, agent)

    asyncio.run(story())


def test_what_an_administrator_takes_back_is_stale_at_its_next_use(agent: Agent) -> None:
    async def story(client: GPUWorkerPoolClient) -> None:
        lost = asyncio.get_running_loop().create_future()
        client.subscribe(lambda update: update["kind"] == "lost" and not lost.done() and lost.set_result(update))
        held = await client.request_gpu(ttl=1)
        client.check_assignment(held)
        [lease] = leases(agent)
        agent.call("lease", "release", str(lease["id"]))
        told = await lost
        assert told["worker_id"] == held.worker_id
        with pytest.raises(StaleAssignmentError, match=held.worker_id):
            client.check_assignment(held)
        with pytest.raises(StaleAssignmentError, match=held.worker_id):
            await client.release_gpu(held)
        await client.release_gpu(held)
        assert client.get_pool_status().active_workers == 0

    run(story, agent)


def test_what_is_older_than_the_stale_age_is_taken_back(agent: Agent) -> None:
    async def story(client: GPUWorkerPoolClient) -> None:
        lost = asyncio.get_running_loop().create_future()
        client.subscribe(lambda update: update["kind"] == "lost" and not lost.done() and lost.set_result(update))
        held = await client.request_gpu(ttl=1)
        await lost
        with pytest.raises(StaleAssignmentError):
            await client.release_gpu(held)

    run(story, agent, stale_age=1.0)


def test_the_block_of_a_context_manager_holds_one_gpu(agent: Agent) -> None:
    async def story(client: GPUWorkerPoolClient) -> None:
        async with GPUContextManager(client, timeout=30) as gpu_id:
            assert isinstance(gpu_id, int)
            assert list(client.get_pool_status().gpu_assignments) == [gpu_id]
        assert client.get_pool_status().gpu_assignments == {}
        with pytest.raises(ZeroDivisionError):
            async with GPUContextManager(client):
                raise ZeroDivisionError
        assert leases(agent) == []

    run(story, agent)

    async def made_by_a_function() -> None:
        async with gpu_worker_pool_client(agent.url, memory_threshold=75) as client:
            assert client.get_detailed_metrics()["thresholds"]["memory_threshold_percent"] == 75.0

    asyncio.run(made_by_a_function())


def test_what_no_server_can_grant_is_refused_at_once(agent: Agent) -> None:
    async def story(client: GPUWorkerPoolClient) -> None:
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
        assert leases(agent) == []

    run(story, agent)


def test_statistics_can_be_subscribed_to(agent: Agent) -> None:
    async def story(client: GPUWorkerPoolClient) -> None:
        seen: asyncio.Queue = asyncio.Queue()
        unsubscribe = client.subscribe(seen.put_nowait)
        kinds = set()
        held = await client.request_gpu()
        await client.release_gpu(held)
        while not {"statistics", "assigned", "released"} <= kinds:
            update = await seen.get()
            kinds.add(update["kind"])
            if update["kind"] == "statistics":
                assert len(update["gpus"]) == 4
        unsubscribe()
        with pytest.raises(ValueError, match="callback"):
            client.subscribe("nothing to call")  # type: ignore[arg-type]

    run(story, agent, polling_interval=0.05)


def test_a_status_is_plain_data_with_its_age(agent: Agent) -> None:
    async def story(client: GPUWorkerPoolClient) -> None:
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

    run(story, agent)
