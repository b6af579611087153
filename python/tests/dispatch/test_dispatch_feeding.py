"""How the generator is read, and who gets the work."""

from __future__ import annotations

import time
from typing import Any, Iterator

import pytest

from dispatch_kit import PATIENCE_SECS, Tally, run, until
from gpu_dispatch import BaseWorker, Dispatcher


class Echo(BaseWorker):
    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        self.gpu_id = gpu_id

    def process(self, data: Any) -> Any:
        if isinstance(data, float):
            time.sleep(data)
        return data


class Source:
    """Counts what was read of it."""

    def __init__(self, tasks: Any, fails_after: int = -1) -> None:
        self.given = 0
        self._tasks = tasks
        self._fails_after = fails_after

    def __iter__(self) -> Iterator[Any]:
        for task in self._tasks:
            if self.given == self._fails_after:
                raise LookupError("the source is broken")
            self.given += 1
            yield task


def test_the_generator_is_never_read_further_ahead_than_the_queue_holds() -> None:
    source = Source([0.006] * 60)
    ahead = []
    over = 0

    def count(*_arguments: Any) -> None:
        nonlocal over
        ahead.append(source.given - over)
        over += 1

    Dispatcher(Echo, [0, 1], queue_size=10).run(source, count)
    assert over == 60
    # Ten wait, each worker has one, a result of each is told of, and one more was read and waits for its place.
    assert max(ahead) <= 10 + 2 + 2 + 1


def test_results_nobody_takes_hold_the_generator_back() -> None:
    source = Source(range(10_000))
    seen: list[int] = []

    def stuck(*_arguments: Any) -> None:
        if not seen:
            until(lambda: source.given >= 16, "the queue fills")
            for _ in range(50):
                time.sleep(0.002)
                seen.append(source.given)

    Dispatcher(Echo, [0], queue_size=16).run(source, stuck)
    # Those of the first batch of results, of the queue, and one more that was read.
    assert max(seen) <= 2 * 16 + 1 and source.given == 10_000


def test_a_generator_without_an_end_can_be_left() -> None:
    def endless() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    dispatcher = Dispatcher(Echo, [0], queue_size=8)
    tally = Tally()

    def enough(task_id: int, data: int, worker_id: int) -> None:
        tally.on_success(task_id, data, worker_id)
        if len(tally.done) == 100:
            dispatcher.shutdown()

    dispatcher.run(endless(), enough)
    assert len(tally.done) >= 100


@pytest.mark.parametrize("tasks", [[], iter(())])
def test_an_empty_generator_is_a_run_without_tasks(tasks: Any) -> None:
    tally = run(Echo, tasks, [0, 1])
    assert not tally.outcomes and tally.exits == 1 and not tally.not_set_up


@pytest.mark.parametrize("given", [0, 250])
def test_what_the_generator_raises_comes_out_when_what_it_gave_is_over(given: int) -> None:
    tally = Tally()
    source = Source(range(1000), fails_after=given)
    with pytest.raises(LookupError, match="the source is broken"):
        Dispatcher(Echo, [0, 1]).run(source, tally.on_success, tally.on_error)
    tally.check_each_once(given)
    assert len(tally.done) == given


def test_what_is_no_iterable_raises_the_error_python_has_for_it() -> None:
    with pytest.raises(TypeError, match="not iterable"):
        Dispatcher(Echo, [0]).run(5, print)  # type: ignore[arg-type]


def test_the_very_error_of_the_generator_comes_out() -> None:
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
    tally = run(Echo, (0.001 for _ in range(1000)), [0, 1, 2])
    tally.check_each_once(1000)
    assert set(tally.by.values()) == {0, 1, 2}


@pytest.mark.parametrize("pace", [0.0, 0.006], ids=["quick", "not so quick"])
def test_nothing_waits_behind_a_task_that_suddenly_takes_long(pace: float) -> None:
    """The long one never ends by itself."""
    others, at = (500, 100) if pace == 0.0 else (30, 10)

    class Mixed(Echo):
        def process(self, data: Any) -> Any:
            time.sleep(pace if data != "long" else PATIENCE_SECS * 2)
            return data

    done: set[int] = set()
    dispatcher = Dispatcher(Mixed, [0, 1])

    def keep(task_id: int, data: Any, worker_id: int) -> None:
        done.add(task_id)
        if len(done) == others:
            dispatcher.shutdown()

    dispatcher.run(["long" if number == at else number for number in range(others + 1)], keep)
    assert done == set(range(others + 1)) - {at}
