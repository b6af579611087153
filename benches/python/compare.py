"""No-op tasks and large arrays through gpu_dispatch and its peers, leases through gpu_worker_pool, imports and starts.

Each measurement is the median of several, taken by turns with those it is compared with.
"""

import asyncio
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor

import work

WORKERS = 4
ROUNDS = 5
CONTEXT = multiprocessing.get_context("spawn")


def rate(count, do):
    began = time.perf_counter()
    do()
    return count / (time.perf_counter() - began)


def by_turns(measures):
    """The median of each of several measures: name -> function."""
    taken = {name: [] for name in measures}
    for _ in range(ROUNDS):
        for name, measure in measures.items():
            taken[name].append(measure())
    return {name: statistics.median(values) for name, values in taken.items()}


def row(what, measured, mark="", verdict=""):
    print(f"| {what} | {measured} | {mark} | {verdict} |", flush=True)


def compared(what, ours, theirs, mark=None):
    ratio = ours / theirs
    verdict = "" if mark is None else ("met" if ratio >= mark else "**missed**")
    row(what, f"{ratio:.1f}", "" if mark is None else f"≥ {mark}", verdict)


class Warm:
    """A run of the dispatcher whose workers are set up already: feeds what it is given, and waits for the results."""

    def __init__(self):
        import queue
        import threading

        from gpu_dispatch import Dispatcher

        self.sources, self.left, self.done = queue.Queue(), 0, threading.Event()
        dispatcher = Dispatcher(work.Same, list(range(WORKERS)))
        self.thread = threading.Thread(target=dispatcher.run, args=(self.items(), self.on_success))
        self.thread.start()
        self.do(range(1000), 1000)

    def items(self):
        while True:
            source = self.sources.get()
            if source is None:
                return
            yield from source

    def on_success(self, task_id, data, worker_id):
        self.left -= 1
        if self.left == 0:
            self.done.set()

    def do(self, source, count):
        self.left, _ = count, self.done.clear()
        self.sources.put(source)
        self.done.wait()

    def end(self):
        self.sources.put(None)
        self.thread.join()


def tasks_and_arrays():
    import numpy

    array = numpy.random.default_rng(1).random(1 << 20)
    warm, pool, executor = Warm(), CONTEXT.Pool(WORKERS), ProcessPoolExecutor(WORKERS, mp_context=CONTEXT)
    pool.map(work.same, range(100))
    list(executor.map(work.same, range(100)))

    def ours(count):
        return rate(count, lambda: warm.do(iter(range(count)), count))

    def apply_async(count):
        def do():
            for result in [pool.apply_async(work.same, (number,)) for number in range(count)]:
                result.get()

        return rate(count, do)

    def imap(count):
        return rate(count, lambda: [None for _ in pool.imap(work.same, range(count), chunksize=1)])

    def submit(count):
        def do():
            for future in [executor.submit(work.same, number) for number in range(count)]:
                future.result()

        return rate(count, do)

    tasks = by_turns(
        {
            "gpu_dispatch": lambda: ours(200_000),
            "apply_async": lambda: apply_async(20_000),
            "imap": lambda: imap(20_000),
            "submit": lambda: submit(5_000),
        }
    )
    row("no-op tasks a second, 4 workers: `gpu_dispatch`", f"{tasks['gpu_dispatch']:,.0f}")
    row("`multiprocessing.Pool.apply_async`", f"{tasks['apply_async']:,.0f}")
    row("`multiprocessing.Pool.imap(chunksize=1)`", f"{tasks['imap']:,.0f}")
    row("`ProcessPoolExecutor.submit`", f"{tasks['submit']:,.0f}")
    compared("÷ `apply_async`", tasks["gpu_dispatch"], tasks["apply_async"], 4)
    compared("÷ `imap(chunksize=1)`", tasks["gpu_dispatch"], tasks["imap"], 4)
    compared("÷ `ProcessPoolExecutor.submit`", tasks["gpu_dispatch"], tasks["submit"], 15)

    arrays = by_turns(
        {
            "gpu_dispatch": lambda: rate(200, lambda: warm.do((array for _ in range(200)), 200)),
            "imap": lambda: rate(40, lambda: [None for _ in pool.imap(work.same, (array for _ in range(40)), chunksize=1)]),
        }
    )
    row("8 MiB arrays there and back a second: `gpu_dispatch`", f"{arrays['gpu_dispatch']:,.0f}")
    row("`multiprocessing.Pool.imap`", f"{arrays['imap']:,.0f}")
    compared("÷ `multiprocessing.Pool`", arrays["gpu_dispatch"], arrays["imap"], 3)
    warm.end()
    pool.terminate()
    executor.shutdown()
    return tasks["gpu_dispatch"]


def ray_tasks(ours):
    try:
        import ray
    except Exception as error:
        row("Ray", f"left out: {type(error).__name__}")
        return
    ray.init(num_cpus=WORKERS, num_gpus=WORKERS, include_dashboard=False, log_to_driver=False, logging_level="error")

    @ray.remote(num_gpus=0.1, num_cpus=1, max_calls=0)
    def fair(data):
        return data

    @ray.remote(num_gpus=1)
    def usual(data):
        return data

    ray.get([fair.remote(number) for number in range(200)])
    fair_rate = statistics.median(rate(3_000, lambda: ray.get([fair.remote(n) for n in range(3_000)])) for _ in range(3))
    usual_rate = rate(12, lambda: ray.get([usual.remote(number) for number in range(12)]))
    ray.shutdown()
    row("Ray tasks a second, 0.1 GPU, `max_calls=0` (processes are kept)", f"{fair_rate:,.0f}")
    row("Ray tasks a second as a GPU task is by default (a process each)", f"{usual_rate:,.1f}")
    compared("`gpu_dispatch` ÷ Ray with processes kept", ours, fair_rate, 15)


def starts():
    from gpu_dispatch import Dispatcher

    def ours():
        began, ready = time.perf_counter(), []

        def on_progress(event):
            if event.kind == "ready":
                ready.append(time.perf_counter() - began)

        held = iter(lambda: len(ready) < 8 and time.sleep(0.001), False)
        Dispatcher(work.Same, list(range(8)), on_progress=on_progress).run((None for _ in held), lambda *_: None)
        return max(ready)

    def theirs():
        began = time.perf_counter()
        barrier = CONTEXT.Barrier(9)
        processes = [CONTEXT.Process(target=barrier_wait, args=(barrier,)) for _ in range(8)]
        for process in processes:
            process.start()
        barrier.wait()
        taken = time.perf_counter() - began
        for process in processes:
            process.join()
        return taken

    taken = by_turns({"gpu_dispatch": ours, "spawn": theirs})
    row("8 workers set up, ms: `gpu_dispatch`", f"{1000 * taken['gpu_dispatch']:.0f}")
    row("8 processes of `multiprocessing` spawn at work, ms", f"{1000 * taken['spawn']:.0f}")
    ratio = taken["gpu_dispatch"] / taken["spawn"]
    row("÷ `multiprocessing` spawn", f"{ratio:.2f}", "≤ 1", "met" if ratio <= 1 else "**missed**")


def barrier_wait(barrier):
    barrier.wait()


def imports():
    def bare(code):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return 1000 * (time.perf_counter() - began)

    names = ["gpupool", "gpu_worker_pool", "gpu_dispatch"]
    for name in names:
        taken = by_turns({"bare": lambda: bare("pass"), "with": lambda name=name: bare(f"import {name}")})
        more = taken["with"] - taken["bare"]
        row(f"`import {name}`, ms beyond a bare interpreter", f"{more:.0f}", "≤ 60", "met" if more <= 60 else "**missed**")


def leases():
    from gpupool._command_path import find_command
    from gpu_worker_pool import GPUWorkerPoolClient

    with tempfile.TemporaryDirectory(dir=".") as state:
        agent = subprocess.Popen(
            [find_command(), "serve", "--simulate", "4xH100", "--port", "0", "--state-dir", state],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        url = re.search(r"http://\S+", agent.stdout.readline()).group()

        async def pairs():
            async with GPUWorkerPoolClient(service_endpoint=url) as client:
                taken = []
                for _ in range(600):
                    began = time.perf_counter()
                    assignment = await client.request_gpu()
                    await client.release_gpu(assignment)
                    taken.append(1000 * (time.perf_counter() - began))
                return statistics.median(taken[100:]), statistics.quantiles(taken[100:], n=100)[98]

        try:
            middle, late = asyncio.run(pairs())
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.wait()
    row("`request_gpu` + `release_gpu`, durable, p50 / p99 ms", f"{middle:.2f} / {late:.2f}", "p50 ≤ 1", "met" if middle <= 1 else "**missed**")


if __name__ == "__main__":
    print("| | measured | mark | |\n|---|---|---|---|")
    imports()
    leases()
    starts()
    ray_tasks(tasks_and_arrays())
