"""Several kinds of event loops, and several loops at the same time."""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

import pytest
from agents import Agent
from client_kit import TIMEOUT_SECS, delete, list_leases, post, start_program, run_program, wait_until, wait_until_free

from gpu_worker_pool import GPUContextManager, GPUWorkerPoolClient


def test_uvloop_works(agent: Agent) -> None:
    pytest.importorskip("uvloop")
    source = """
    import asyncio, sys, uvloop
    from gpu_worker_pool import GPUContextManager, GPUWorkerPoolClient

    async def main():
        assert "uvloop" in type(asyncio.get_running_loop()).__module__
        async with GPUWorkerPoolClient(sys.argv[1]) as client:
            async def one():
                async with GPUContextManager(client) as gpu_id:
                    return gpu_id
            assert len(await asyncio.gather(*(one() for _ in range(20)))) == 20
            waiting = [asyncio.ensure_future(client.request_gpu(gpus=4)) for _ in range(2)]
            done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for one in pending:
                one.cancel()
            print("done")
    loop = uvloop.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    """
    assert "done" in run_program(source, agent.url)
    assert list_leases(agent) == []


def test_several_loops_in_several_threads_share_one_client(agent: Agent) -> None:
    client = GPUWorkerPoolClient(agent.url)
    asyncio.run(client.start())
    most, now, lock = [0], [0], threading.Lock()

    async def work() -> None:
        for _ in range(10):
            async with GPUContextManager(client):
                with lock:
                    now[0] += 1
                    most[0] = max(most[0], now[0])
                await asyncio.sleep(0)
                with lock:
                    now[0] -= 1

    with ThreadPoolExecutor(6) as threads:
        for done in [threads.submit(asyncio.run, work()) for _ in range(6)]:
            done.result(TIMEOUT_SECS)
    assert 1 <= most[0] <= 4
    asyncio.run(client.stop())
    assert list_leases(agent) == []


def test_many_requests_share_a_few_threads(agent: Agent) -> None:
    async def scenario() -> None:
        async with GPUWorkerPoolClient(agent.url) as client:
            held = await client.request_gpu(gpus=4)
            before = threads()
            waiting = [asyncio.ensure_future(client.request_gpu()) for _ in range(100)]
            await asyncio.get_running_loop().run_in_executor(
                None, wait_until, agent, lambda: len(list_leases(agent, "queued")) == 100, "100 requests wait"
            )
            # One additional thread belongs to this test.
            assert threads() <= before + 2
            await client.release_gpu(held)
            for done in asyncio.as_completed(waiting):
                await client.release_gpu(await done)

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_SECS))


def threads() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))


def test_a_loop_that_ends_with_a_pending_request_cancels_it(agent: Agent) -> None:
    client = GPUWorkerPoolClient(agent.url)

    async def begin() -> None:
        await client.start()
        await client.request_gpu(gpus=4)
        asyncio.ensure_future(client.request_gpu())
        await asyncio.get_running_loop().run_in_executor(
            None, wait_until, agent, lambda: bool(list_leases(agent, "queued")), "the request waits"
        )

    asyncio.run(begin())
    wait_until(agent, lambda: not list_leases(agent, "queued", "offered"), "no request waits")
    asyncio.run(client.stop())
    assert list_leases(agent) == []


def test_a_grant_for_a_closed_loop_is_released(agent: Agent) -> None:
    client = GPUWorkerPoolClient(agent.url)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(client.start())
    held = loop.run_until_complete(client.request_gpu(gpus=4))
    late = loop.create_task(client.request_gpu())
    loop.run_until_complete(asyncio.sleep(0))
    wait_until(agent, lambda: bool(list_leases(agent, "queued")), "the request waits")
    # The future ends after its loop, so no task gets the result.
    loop.close()
    asyncio.run(client.release_gpu(held))
    late._log_destroy_pending = False  # type: ignore[attr-defined]
    wait_until_free(agent)
    asyncio.run(client.stop())


def test_a_request_continues_while_its_loop_is_stuck(agent: Agent) -> None:
    gets_stuck = """
    import asyncio, sys
    from gpu_worker_pool import GPUWorkerPoolClient

    async def main():
        async with GPUWorkerPoolClient(sys.argv[1]) as client:
            coming = asyncio.ensure_future(client.request_gpu(gpus=4))
            await asyncio.sleep(0)
            print("asked", flush=True)
            sys.stdin.readline()
            await client.release_gpu(await coming)
            print("released", flush=True)
    asyncio.run(main())
    """
    ours = post(agent, "/v1/leases", {"fraction": 0.1, "ttl_secs": 60})["id"]
    with start_program(gets_stuck, agent.url, stdin=True) as running:
        assert running.stdout is not None and running.stdin is not None
        assert running.stdout.readline() == "asked\n"
        wait_until(agent, lambda: bool(list_leases(agent, "queued")), "the request waits, although its loop is stuck")
        delete(agent, f"/v1/leases/{ours}")
        wait_until(agent, lambda: bool(list_leases(agent, "active")), "the request is granted")
        output, errors = running.communicate("\n", timeout=TIMEOUT_SECS)
        assert output == "released\n", errors
    assert list_leases(agent) == []


def test_a_loop_without_add_reader_works(agent: Agent) -> None:
    class Blind(asyncio.SelectorEventLoop):
        def add_reader(self, fd: Any, callback: Callable[..., Any], *arguments: Any) -> Any:
            raise NotImplementedError

    async def scenario() -> None:
        async with GPUWorkerPoolClient(agent.url) as client:
            await asyncio.gather(*(held(client) for _ in range(20)))

    async def held(client: GPUWorkerPoolClient) -> None:
        async with GPUContextManager(client):
            pass

    loop = Blind()
    try:
        loop.run_until_complete(asyncio.wait_for(scenario(), TIMEOUT_SECS))
    finally:
        loop.close()
    assert list_leases(agent) == []


def test_a_lease_is_renewed_while_the_gil_is_held_and_responses_arrive(agent: Agent) -> None:
    holds_the_interpreter = """
    import asyncio, ctypes, sys
    from gpu_worker_pool import GPUWorkerPoolClient

    async def main():
        async with GPUWorkerPoolClient(sys.argv[1]) as client:
            held = await client.request_gpu(ttl=1)
            coming = [asyncio.ensure_future(client.request_gpu(fraction=0.1)) for _ in range(20)]
            await asyncio.sleep(0)
            print("held", flush=True)
            ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)
            await asyncio.gather(*coming)
            client.check_assignment(held)
            print("renewed", flush=True)
    asyncio.run(main())
    """
    with start_program(holds_the_interpreter, agent.url, stdin=True) as running:
        assert running.stdout is not None and running.stdin is not None
        assert running.stdout.readline() == "held\n"
        # This lease is newer and is not renewed: without renewals, the program's lease would have expired before it.
        ours = post(agent, "/v1/leases", {"ttl_secs": 1, "fraction": 0.1})["id"]
        wait_until(agent, lambda: ours not in [lease["id"] for lease in list_leases(agent, "active")], "the lease expired")
        running.stdin.write("\n")
        output, errors = running.communicate(timeout=TIMEOUT_SECS)
        assert output == "renewed\n", errors


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.timeout came with 3.11")
def test_asyncio_timeout_cancels_a_request(agent: Agent) -> None:
    async def scenario() -> None:
        async with GPUWorkerPoolClient(agent.url) as client:
            held = await client.request_gpu(gpus=4)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await client.request_gpu()
            await client.release_gpu(held)
            await asyncio.get_running_loop().run_in_executor(None, wait_until_free, agent)

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_SECS))
