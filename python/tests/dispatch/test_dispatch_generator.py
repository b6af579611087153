"""Reading of the generator, and distribution of its tasks."""

from __future__ import annotations

import time
from typing import Any, Iterator

import pytest

from dispatch_kit import TIMEOUT_SECS, CallbackRecorder, run_dispatcher, wait_until
from gpu_dispatch import BaseWorker, Dispatcher


class Echo(BaseWorker):
    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        self.gpu_id = gpu_id

    def process(self, data: Any) -> Any:
        if isinstance(data, float):
            time.sleep(data)
        return data


class Source:
    """Iterable that counts the tasks that were read."""

    def __init__(self, tasks: Any, fails_after: int = -1) -> None:
        self.read_count = 0
        self._tasks = tasks
        self._fails_after = fails_after

    def __iter__(self) -> Iterator[Any]:
        for task in self._tasks:
            if self.read_count == self._fails_after:
                raise LookupError("the source is broken")
            self.read_count += 1
            yield task


def test_the_generator_is_read_at_most_queue_size_ahead() -> None:
    source = Source([0.006] * 60)
    ahead = []
    finished = 0

    def count(*_arguments: Any) -> None:
        nonlocal finished
        ahead.append(source.read_count - finished)
        finished += 1

    Dispatcher(Echo, [0, 1], queue_size=10).run(source, count)
    assert finished == 60
    # 10 tasks in the queue, 2 in workers, 2 results in callbacks, and 1 task that waits for a place in the queue.
    assert max(ahead) <= 10 + 2 + 2 + 1


def test_unread_results_stop_the_generator() -> None:
    source = Source(range(10_000))
    read_counts: list[int] = []

    def stuck(*_arguments: Any) -> None:
        if not read_counts:
            wait_until(lambda: source.read_count >= 16, "the queue is full")
            for _ in range(50):
                time.sleep(0.002)
                read_counts.append(source.read_count)

    Dispatcher(Echo, [0], queue_size=16).run(source, stuck)
    # The first batch of results, the queue, and one more task that was read.
    assert max(read_counts) <= 2 * 16 + 1 and source.read_count == 10_000


def test_shutdown_ends_a_run_of_an_endless_generator() -> None:
    def endless() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    dispatcher = Dispatcher(Echo, [0], queue_size=8)
    recorder = CallbackRecorder()

    def enough(task_id: int, data: int, worker_id: int) -> None:
        recorder.on_success(task_id, data, worker_id)
        if len(recorder.results) == 100:
            dispatcher.shutdown()

    dispatcher.run(endless(), enough)
    assert len(recorder.results) >= 100


@pytest.mark.parametrize("tasks", [[], iter(())])
def test_an_empty_generator_is_a_run_without_tasks(tasks: Any) -> None:
    recorder = run_dispatcher(Echo, tasks, [0, 1])
    assert not recorder.outcomes and recorder.exits == 1 and not recorder.setup_failures


@pytest.mark.parametrize("task_count", [0, 250])
def test_a_generator_exception_is_raised_after_its_earlier_tasks(task_count: int) -> None:
    recorder = CallbackRecorder()
    source = Source(range(1000), fails_after=task_count)
    with pytest.raises(LookupError, match="the source is broken"):
        Dispatcher(Echo, [0, 1]).run(source, recorder.on_success, recorder.on_error)
    recorder.check_one_outcome_each(task_count)
    assert len(recorder.results) == task_count


def test_a_generator_that_is_not_iterable_raises_type_error() -> None:
    with pytest.raises(TypeError, match="not iterable"):
        Dispatcher(Echo, [0]).run(5, print)  # type: ignore[arg-type]


def test_run_raises_the_generators_own_exception() -> None:
    class Own(Exception):
        pass

    error = Own("mine")

    def broken() -> Iterator[int]:
        yield 1
        raise error

    with pytest.raises(Own) as raised:
        Dispatcher(Echo, [0]).run(broken(), lambda *_: None)
    assert raised.value is error


def test_each_worker_gets_some_of_many_short_tasks() -> None:
    recorder = run_dispatcher(Echo, (0.001 for _ in range(1000)), [0, 1, 2])
    recorder.check_one_outcome_each(1000)
    assert set(recorder.worker_ids.values()) == {0, 1, 2}


@pytest.mark.parametrize("pace", [0.0, 0.006], ids=["quick", "not so quick"])
def test_no_task_waits_behind_a_slow_task(pace: float) -> None:
    """The slow task never ends by itself."""
    others, at = (500, 100) if pace == 0.0 else (30, 10)

    class Mixed(Echo):
        def process(self, data: Any) -> Any:
            time.sleep(pace if data != "long" else TIMEOUT_SECS * 2)
            return data

    done: set[int] = set()
    dispatcher = Dispatcher(Mixed, [0, 1])

    def keep(task_id: int, data: Any, worker_id: int) -> None:
        done.add(task_id)
        if len(done) == others:
            dispatcher.shutdown()

    dispatcher.run(["long" if number == at else number for number in range(others + 1)], keep)
    assert done == set(range(others + 1)) - {at}
