"""Compare no-op tasks and large arrays in gpu_dispatch and its peers; measure leases, imports and starts.

Each result is the median of several measurements, which alternate with those of its peers.
"""

import asyncio
import multiprocessing
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


def median_alternating(measures):
    """Return the median of each measurement (name -> function), measured in alternation."""
    values = {name: [] for name in measures}
    for _ in range(ROUNDS):
        for name, measure in measures.items():
            values[name].append(measure())
    return {name: statistics.median(measured) for name, measured in values.items()}


def print_row(label, measured, mark="", verdict=""):
    print(f"| {label} | {measured} | {mark} | {verdict} |", flush=True)


def print_ratio(label, ours, theirs, mark=None):
    ratio = ours / theirs
    verdict = "" if mark is None else ("met" if ratio >= mark else "**missed**")
    print_row(label, f"{ratio:.1f}", "" if mark is None else f"≥ {mark}", verdict)


class WarmDispatcher:
    """Run of the dispatcher whose workers are already set up; `process` feeds it tasks and waits for their results."""

    def __init__(self):
        import queue
        import threading

        from gpu_dispatch import Dispatcher

        self.sources, self.remaining, self.done = queue.Queue(), 0, threading.Event()
        dispatcher = Dispatcher(work.EchoWorker, list(range(WORKERS)))
        self.thread = threading.Thread(target=dispatcher.run, args=(self.items(), self.on_success))
        self.thread.start()
        self.process(range(1000), 1000)

    def items(self):
        while True:
            source = self.sources.get()
            if source is None:
                return
            yield from source

    def on_success(self, task_id, data, worker_id):
        self.remaining -= 1
        if self.remaining == 0:
            self.done.set()

    def process(self, source, count):
        self.remaining, _ = count, self.done.clear()
        self.sources.put(source)
        self.done.wait()

    def end(self):
        self.sources.put(None)
        self.thread.join()


def compare_tasks_and_arrays():
    import numpy

    array = numpy.random.default_rng(1).random(1 << 20)
    warm, pool, executor = WarmDispatcher(), CONTEXT.Pool(WORKERS), ProcessPoolExecutor(WORKERS, mp_context=CONTEXT)
    pool.map(work.echo, range(100))
    list(executor.map(work.echo, range(100)))

    def ours(count):
        return rate(count, lambda: warm.process(iter(range(count)), count))

    def apply_async(count):
        def do():
            for result in [pool.apply_async(work.echo, (number,)) for number in range(count)]:
                result.get()

        return rate(count, do)

    def imap(count):
        return rate(count, lambda: [None for _ in pool.imap(work.echo, range(count), chunksize=1)])

    def submit(count):
        def do():
            for future in [executor.submit(work.echo, number) for number in range(count)]:
                future.result()

        return rate(count, do)

    tasks = median_alternating(
        {
            "gpu_dispatch": lambda: ours(200_000),
            "apply_async": lambda: apply_async(20_000),
            "imap": lambda: imap(20_000),
            "submit": lambda: submit(5_000),
        }
    )
    print_row("no-op tasks a second, 4 workers: `gpu_dispatch`", f"{tasks['gpu_dispatch']:,.0f}")
    print_row("`multiprocessing.Pool.apply_async`", f"{tasks['apply_async']:,.0f}")
    print_row("`multiprocessing.Pool.imap(chunksize=1)`", f"{tasks['imap']:,.0f}")
    print_row("`ProcessPoolExecutor.submit`", f"{tasks['submit']:,.0f}")
    print_ratio("÷ `apply_async`", tasks["gpu_dispatch"], tasks["apply_async"], 4)
    print_ratio("÷ `imap(chunksize=1)`", tasks["gpu_dispatch"], tasks["imap"], 4)
    print_ratio("÷ `ProcessPoolExecutor.submit`", tasks["gpu_dispatch"], tasks["submit"], 15)

    arrays = median_alternating(
        {
            "gpu_dispatch": lambda: rate(200, lambda: warm.process((array for _ in range(200)), 200)),
            "imap": lambda: rate(40, lambda: [None for _ in pool.imap(work.echo, (array for _ in range(40)), chunksize=1)]),
        }
    )
    print_row("8 MiB arrays there and back a second: `gpu_dispatch`", f"{arrays['gpu_dispatch']:,.0f}")
    print_row("`multiprocessing.Pool.imap`", f"{arrays['imap']:,.0f}")
    print_ratio("÷ `multiprocessing.Pool`", arrays["gpu_dispatch"], arrays["imap"], 3)
    warm.end()
    pool.terminate()
    executor.shutdown()
    return tasks["gpu_dispatch"]


def compare_ray(ours):
    try:
        import ray
    except Exception as error:
        print_row("Ray", f"left out: {type(error).__name__}")
        return
    ray.init(num_cpus=WORKERS, num_gpus=WORKERS, include_dashboard=False, log_to_driver=False, logging_level="error")

    @ray.remote(num_gpus=0.1, num_cpus=1, max_calls=0)
    def kept_process(data):
        return data

    @ray.remote(num_gpus=1)
    def new_process(data):
        return data

    ray.get([kept_process.remote(number) for number in range(200)])
    kept_rate = statistics.median(rate(3_000, lambda: ray.get([kept_process.remote(n) for n in range(3_000)])) for _ in range(3))
    new_rate = rate(12, lambda: ray.get([new_process.remote(number) for number in range(12)]))
    ray.shutdown()
    print_row("Ray tasks a second, 0.1 GPU, `max_calls=0` (processes are kept)", f"{kept_rate:,.0f}")
    print_row("Ray tasks a second as a GPU task is by default (a process each)", f"{new_rate:,.1f}")
    print_ratio("`gpu_dispatch` ÷ Ray with processes kept", ours, kept_rate, 15)


def compare_starts():
    from gpu_dispatch import Dispatcher

    def ours():
        began, ready = time.perf_counter(), []

        def on_progress(event):
            if event.kind == "ready":
                ready.append(time.perf_counter() - began)

        held = iter(lambda: len(ready) < 8 and time.sleep(0.001), False)
        Dispatcher(work.EchoWorker, list(range(8)), on_progress=on_progress).run((None for _ in held), lambda *_: None)
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

    taken = median_alternating({"gpu_dispatch": ours, "spawn": theirs})
    print_row("8 workers set up, ms: `gpu_dispatch`", f"{1000 * taken['gpu_dispatch']:.0f}")
    print_row("8 processes of `multiprocessing` spawn at work, ms", f"{1000 * taken['spawn']:.0f}")
    ratio = taken["gpu_dispatch"] / taken["spawn"]
    print_row("÷ `multiprocessing` spawn", f"{ratio:.2f}", "≤ 1", "met" if ratio <= 1 else "**missed**")


def barrier_wait(barrier):
    barrier.wait()


def compare_imports():
    def time_interpreter(code):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return 1000 * (time.perf_counter() - began)

    names = ["gpupool", "gpu_worker_pool", "gpu_dispatch"]
    for name in names:
        code = f"import {name}"
        taken = median_alternating({"bare": lambda: time_interpreter("pass"), code: lambda: time_interpreter(code)})
        more = taken[code] - taken["bare"]
        print_row(f"`import {name}`, ms beyond a bare interpreter", f"{more:.0f}", "≤ 60", "met" if more <= 60 else "**missed**")


def measure_leases():
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
            median_ms, p99_ms = asyncio.run(pairs())
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.wait()
    verdict = "met" if median_ms <= 1 else "**missed**"
    print_row("`request_gpu` + `release_gpu`, durable, p50 / p99 ms", f"{median_ms:.2f} / {p99_ms:.2f}", "p50 ≤ 1", verdict)


if __name__ == "__main__":
    print("| | measured | mark | |\n|---|---|---|---|")
    compare_imports()
    measure_leases()
    compare_starts()
    compare_ray(compare_tasks_and_arrays())
