"""Event loops of every kind, and several of them at once."""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

import pytest
from agents import Agent
from watching import PATIENCE, delete, leases, post, program, ran, wait_until, wait_until_free

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
    assert "done" in ran(source, agent.url)
    assert leases(agent) == []


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
            done.result(PATIENCE)
    assert 1 <= most[0] <= 4
    asyncio.run(client.stop())
    assert leases(agent) == []


def test_many_calls_have_no_thread_each(agent: Agent) -> None:
    async def story() -> None:
        async with GPUWorkerPoolClient(agent.url) as client:
            held = await client.request_gpu(gpus=4)
            before = threads()
            waiting = [asyncio.ensure_future(client.request_gpu()) for _ in range(100)]
            await asyncio.get_running_loop().run_in_executor(
                None, wait_until, agent, lambda: len(leases(agent, "queued")) == 100, "a hundred wait"
            )
            # One of them is this test's own.
            assert threads() <= before + 2
            await client.release_gpu(held)
            for done in asyncio.as_completed(waiting):
                await client.release_gpu(await done)

    asyncio.run(asyncio.wait_for(story(), PATIENCE))


def threads() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))


def test_a_loop_that_ends_with_a_request_pending_leaves_nothing_behind(agent: Agent) -> None:
    client = GPUWorkerPoolClient(agent.url)

    async def begin() -> None:
        await client.start()
        await client.request_gpu(gpus=4)
        asyncio.ensure_future(client.request_gpu())
        await asyncio.get_running_loop().run_in_executor(
            None, wait_until, agent, lambda: bool(leases(agent, "queued")), "it waits"
        )

    asyncio.run(begin())
    wait_until(agent, lambda: not leases(agent, "queued", "offered"), "nobody waits")
    asyncio.run(client.stop())
    assert leases(agent) == []


def test_a_loop_closed_under_a_request_gives_back_what_comes_later(agent: Agent) -> None:
    client = GPUWorkerPoolClient(agent.url)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(client.start())
    held = loop.run_until_complete(client.request_gpu(gpus=4))
    late = loop.create_task(client.request_gpu())
    loop.run_until_complete(asyncio.sleep(0))
    wait_until(agent, lambda: bool(leases(agent, "queued")), "it waits")
    # Its future ends after the loop: nobody is there to be told.
    loop.close()
    asyncio.run(client.release_gpu(held))
    late._log_destroy_pending = False  # type: ignore[attr-defined]
    wait_until_free(agent)
    asyncio.run(client.stop())


def test_what_a_loop_asked_for_goes_on_while_the_loop_is_stuck(agent: Agent) -> None:
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
    with program(gets_stuck, agent.url, stdin=True) as running:
        assert running.stdout is not None and running.stdin is not None
        assert running.stdout.readline() == "asked\n"
        wait_until(agent, lambda: bool(leases(agent, "queued")), "it waits, though the first answer went to a stuck loop")
        delete(agent, f"/v1/leases/{ours}")
        wait_until(agent, lambda: bool(leases(agent, "active")), "it is granted")
        told, errors = running.communicate("\n", timeout=PATIENCE)
        assert told == "released\n", errors
    assert leases(agent) == []


def test_a_loop_that_watches_no_descriptors_works(agent: Agent) -> None:
    class Blind(asyncio.SelectorEventLoop):
        def add_reader(self, fd: Any, callback: Callable[..., Any], *arguments: Any) -> Any:
            raise NotImplementedError

    async def story() -> None:
        async with GPUWorkerPoolClient(agent.url) as client:
            await asyncio.gather(*(held(client) for _ in range(20)))

    async def held(client: GPUWorkerPoolClient) -> None:
        async with GPUContextManager(client):
            pass

    loop = Blind()
    try:
        loop.run_until_complete(asyncio.wait_for(story(), PATIENCE))
    finally:
        loop.close()
    assert leases(agent) == []


def test_a_lease_is_renewed_while_the_interpreter_is_held_and_answers_come(agent: Agent) -> None:
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
    with program(holds_the_interpreter, agent.url, stdin=True) as running:
        assert running.stdout is not None and running.stdin is not None
        assert running.stdout.readline() == "held\n"
        # One that nobody renews, taken after that one: when it is over, that one would be as well.
        ours = post(agent, "/v1/leases", {"ttl_secs": 1, "fraction": 0.1})["id"]
        wait_until(agent, lambda: ours not in [lease["id"] for lease in leases(agent, "active")], "it expired")
        running.stdin.write("\n")
        said, errors = running.communicate(timeout=PATIENCE)
        assert said == "renewed\n", errors


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.timeout came with 3.11")
def test_asyncio_timeout_gives_up_a_request(agent: Agent) -> None:
    async def story() -> None:
        async with GPUWorkerPoolClient(agent.url) as client:
            held = await client.request_gpu(gpus=4)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await client.request_gpu()
            await client.release_gpu(held)
            await asyncio.get_running_loop().run_in_executor(None, wait_until_free, agent)

    asyncio.run(asyncio.wait_for(story(), PATIENCE))
