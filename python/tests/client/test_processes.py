"""Forks, kills, Ctrl-C and interpreter exit: a lease belongs to its process and ends soon after it."""

from __future__ import annotations

import signal

import pytest
from agents import Agent
from client_kit import TIMEOUT_SECS, get, list_leases, start_program, run_program, wait_for_line, wait_until, wait_until_free

IMPORTS = """
    import asyncio, gc, multiprocessing, os, sys, threading
    from gpu_worker_pool import GPUWorkerPoolClient
    url = sys.argv[1]
"""


def test_a_forked_child_neither_uses_nor_releases_its_parents_leases(agent: Agent) -> None:
    source = (
        IMPORTS
        + """
    client = GPUWorkerPoolClient(url)
    asyncio.run(client.start())
    held = asyncio.run(client.request_gpu())
    child = os.fork()
    if child == 0:
        try:
            client.get_pool_status()
            print("wrong: the child could use it", flush=True)
        except RuntimeError as error:
            print("child:", error, flush=True)
        # Delete and collect the copies, then exit normally.
        del client, held
        gc.collect()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    client.check_assignment(held)
    assert client.get_pool_status().active_workers == 1
    print("held", flush=True)
    sys.stdin.readline()
    asyncio.run(client.release_gpu(held))
    asyncio.run(client.stop())
    """
    )
    process = start_program(source, agent.url, stdin=True)
    line = wait_for_line(process, "child:")
    assert "started in another process" in line and "after a fork" in line
    wait_for_line(process, "held")
    assert len(list_leases(agent, "active")) == 1
    _, errors = process.communicate("\n", timeout=TIMEOUT_SECS)
    assert process.returncode == 0, errors
    assert list_leases(agent) == []


def test_a_forked_child_that_leaves_the_block_does_not_release_the_lease(agent: Agent) -> None:
    source = """
    import gpupool, os, sys
    with gpupool.lease(endpoint=sys.argv[1]) as gpu:
        child = os.fork()
        if child == 0:
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        gpu.check()
        print("still held")
    """
    for way in (agent.url, agent.socket):
        assert "still held" in run_program(source, way)
        assert list_leases(agent) == []


def test_a_forked_child_can_create_its_own_client(agent: Agent) -> None:
    source = (
        IMPORTS
        + """
    async def one(client, word):
        async with client:
            held = await client.request_gpu()
            print(word, held.gpu_id, flush=True)
            return held.gpu_id

    def child(queue):
        queue.put(asyncio.run(one(GPUWorkerPoolClient(url), "child")))

    async def main():
        async with GPUWorkerPoolClient(url) as client:
            held = await client.request_gpu()
            context = multiprocessing.get_context("fork")
            for _ in range(3):
                queue = context.Queue()
                process = context.Process(target=child, args=(queue,))
                process.start()
                assert queue.get(timeout=60) != held.gpu_id
                process.join()
                assert process.exitcode == 0
            client.check_assignment(held)
            await client.release_gpu(held)
    asyncio.run(main())
    print("done")
    """
    )
    assert "done" in run_program(source, agent.url)
    assert list_leases(agent) == []


def test_forks_during_requests_do_not_hang(agent: Agent) -> None:
    source = (
        IMPORTS
        + """
    async def main():
        async with GPUWorkerPoolClient(url) as client:
            async def work():
                for _ in range(30):
                    await client.release_gpu(await client.request_gpu())
            workers = [asyncio.ensure_future(work()) for _ in range(4)]
            for _ in range(20):
                await asyncio.sleep(0)
                child = os.fork()
                if child == 0:
                    for worker in workers:
                        worker.cancel()
                    del client
                    gc.collect()
                    os._exit(0)
                os.waitpid(child, 0)
            await asyncio.gather(*workers)
    asyncio.run(main())
    print("done")
    """
    )
    assert "done" in run_program(source, agent.url)
    assert list_leases(agent) == []


def test_a_fork_leaves_a_pending_request_to_the_parent(agent: Agent) -> None:
    source = (
        IMPORTS
        + """
    loop = asyncio.new_event_loop()
    client = GPUWorkerPoolClient(url)
    loop.run_until_complete(client.start())
    coming = loop.create_task(client.request_gpu())
    loop.run_until_complete(asyncio.sleep(0))
    child = os.fork()
    if child == 0:
        coming.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        del coming, loop, client
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    held = loop.run_until_complete(coming)
    client.check_assignment(held)
    loop.run_until_complete(client.release_gpu(held))
    loop.run_until_complete(client.stop())
    print("done")
    """
    )
    assert "done" in run_program(source, agent.url)
    assert list_leases(agent) == []


def test_the_gpu_of_a_killed_program_is_released(agent: Agent) -> None:
    source = (
        IMPORTS
        + """
    async def main():
        async with GPUWorkerPoolClient(url) as client:
            held = await client.request_gpu(ttl=1)
            print("held", flush=True)
            await asyncio.Event().wait()
    asyncio.run(main())
    """
    )
    process = start_program(source, agent.url)
    wait_for_line(process, "held")
    assert len(list_leases(agent, "active")) == 1
    process.kill()
    process.communicate()
    wait_until_free(agent)


def test_a_lease_over_the_socket_ends_at_once_when_its_program_is_killed(agent: Agent) -> None:
    source = """
    import gpupool, sys, time
    with gpupool.lease(endpoint=sys.argv[1]) as gpu:
        print("held", gpu.gpu_id, flush=True)
        sys.stdin.readline()
    """
    process = start_program(source, agent.socket, stdin=True)
    wait_for_line(process, "held")
    [lease] = list_leases(agent, "active")
    process.kill()
    process.communicate()
    wait_until_free(agent)
    ended = get(agent, f"/v1/leases/{lease['id']}")
    assert "process" in ended["reason"], ended


@pytest.mark.parametrize("held_by_others", [True, False])
def test_ctrl_c_ends_a_blocking_lease_and_leaves_nothing_behind(agent: Agent, held_by_others: bool) -> None:
    source = """
    import gpupool, sys, threading
    try:
        with gpupool.lease(gpus=4, endpoint=sys.argv[1]) as gpu:
            print("held", flush=True)
            threading.Event().wait()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    """
    other = start_program(source, agent.url) if held_by_others else None
    if other is not None:
        wait_for_line(other, "held")
    process = start_program(source, agent.url)
    if other is not None:
        wait_until(agent, lambda: len(list_leases(agent, "queued")) == 1, "the request waits")
    else:
        wait_for_line(process, "held")
    process.send_signal(signal.SIGINT)
    wait_for_line(process, "interrupted")
    process.communicate(timeout=TIMEOUT_SECS)
    assert process.returncode == 0
    assert len(list_leases(agent)) == (1 if held_by_others else 0)
    if other is not None:
        other.send_signal(signal.SIGINT)
        other.communicate(timeout=TIMEOUT_SECS)
        assert list_leases(agent) == []


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param("sys.exit(0)", id="exit"),
        pytest.param("raise SystemExit", id="raise"),
        pytest.param("pass", id="forgotten"),
        pytest.param("keep.append((client, held))", id="global"),
        pytest.param("asyncio.ensure_future(client.request_gpu(gpus=4)); await asyncio.sleep(0)", id="pending"),
        pytest.param("keep.append(asyncio.ensure_future(client.request_gpu(gpus=4)))", id="pending-and-global"),
    ],
)
def test_a_program_that_exits_without_stop_releases_everything(agent: Agent, ending: str) -> None:
    source = (
        IMPORTS
        + f"""
    keep = []
    async def main():
        client = GPUWorkerPoolClient(url)
        await client.start()
        held = await client.request_gpu()
        {ending}
    asyncio.run(main())
    """
    )
    run_program(source, agent.url)
    assert list_leases(agent) == []
