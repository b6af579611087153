"""Arrays arrive as they were, whatever their layout, and their memory comes back."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, Iterator

import pytest

from dispatch_kit import Tally, run
from gpu_dispatch import BaseWorker, Dispatcher

numpy = pytest.importorskip("numpy")

MIB = 1 << 20


class Echo(BaseWorker):
    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        self.kept: list[Any] = []

    def process(self, data: Any) -> Any:
        return data


class Keeps(Echo):
    """Keeps each array, and tells the checksums of all of them."""

    def process(self, data: Any) -> Any:
        self.kept.append(data)
        return [checksum(array) for array in self.kept]


class Changes(Echo):
    """Changes its task in place, fails the first time, and tells what it was given."""

    def process(self, data: Any) -> Any:
        path, array = data
        seen = array.copy()
        array[:] = -1
        if not Path(path).exists():
            Path(path).touch()
            raise ValueError("the first time it fails")
        return seen


def checksum(array: Any) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def shared_mib() -> int:
    found = re.search(r"RssShmem:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found.group(1)) // 1024 if found else 0


def layouts() -> dict[str, Any]:
    large = numpy.arange(300_000, dtype=numpy.float64).reshape(500, 600)
    read_only = large.copy()
    read_only.flags.writeable = False
    structured = numpy.zeros(20_000, dtype=[("id", "i4"), ("place", "f8", 3), ("name", "S5")])
    structured["id"] = numpy.arange(20_000)
    return {
        "small": numpy.arange(10),
        "large": large,
        "read-only": read_only,
        "Fortran order": numpy.asfortranarray(large),
        "non-contiguous": large[::2, ::3],
        "reversed": large[::-1],
        "transposed": large.T,
        "structured": structured,
        "zero-size": numpy.empty((0, 7)),
        "scalar": numpy.array(3.5),
        "objects": numpy.array([{"a": 1}, None, "x"], dtype=object),
        "text": numpy.array(["ab", "cde"] * 20_000),
        "dates": numpy.arange(20_000).astype("M8[s]"),
        "other byte order": large.astype(">f4"),
        "broadcast": numpy.broadcast_to(numpy.arange(1000.0), (100, 1000)),
        "masked": numpy.ma.masked_greater(large, 1000),
        "half": (large / 300).astype(numpy.float16),
        "booleans": large > 7,
    }


def test_arrays_of_all_layouts_arrive_as_they_were() -> None:
    arrays = layouts()
    tally = run(Echo, arrays.values())
    assert not tally.errors
    for (name, sent), at in zip(arrays.items(), range(len(arrays))):
        got = tally.done[at]
        assert got.dtype == sent.dtype and got.shape == sent.shape, name
        numpy.testing.assert_array_equal(got, sent, err_msg=name)


def test_an_array_that_arrives_can_be_written_unless_it_was_read_only() -> None:
    arrays = layouts()
    tally = run(Echo, [arrays["large"], arrays["small"], [arrays["large"], {"x": arrays["large"]}]])
    tally.done[0][:] = 1
    tally.done[1][:] = 1
    tally.done[2][0][:] = 2
    # The same array twice is one array, as pickle has it.
    assert tally.done[2][1]["x"][0, 0] == 2
    assert arrays["large"][0, 1] == 1.0, "what was sent is not changed"


def test_results_that_are_kept_are_not_changed_by_those_that_come_after() -> None:
    generator = numpy.random.default_rng(7)
    sent: list[str] = []

    def arrays() -> Iterator[Any]:
        for number in range(120):
            array = generator.integers(0, 255, size=100_000 + 1000 * (number % 7), dtype=numpy.uint8)
            sent.append(checksum(array))
            yield array

    tally = run(Echo, arrays(), [0, 1], queue_size=16)
    tally.check_each_once(120)
    assert [checksum(tally.done[at]) for at in range(120)] == sent


def test_tasks_a_worker_keeps_are_not_changed_by_those_that_come_after() -> None:
    arrays = [numpy.full(200_000, number, dtype=numpy.uint8) for number in range(40)]
    sums = [checksum(array) for array in arrays]
    tally = run(Keeps, arrays)
    assert all(tally.done[at] == sums[: at + 1] for at in range(40))


def test_a_task_that_is_tried_again_is_as_it_was_sent(tmp_path: Path) -> None:
    array = numpy.arange(200_000)
    tally = run(Changes, [(str(tmp_path / "tried"), array)], options={"retries": 1})
    assert not tally.errors, tally.errors
    numpy.testing.assert_array_equal(tally.done[0], array)


def test_memory_of_many_large_arrays_comes_back() -> None:
    count, highest = 150, 0
    array = numpy.zeros(8 * MIB, dtype=numpy.uint8)
    tally = Tally()

    class Sums(Echo):
        def process(self, data: Any) -> Any:
            return data + 1, shared_mib()

    def check(task_id: int, data: Any, worker_id: int) -> None:
        nonlocal highest
        got, in_worker = data
        assert got[0] == got[-1] == 1 and got.size == array.size
        tally.on_success(task_id, in_worker, worker_id)
        highest = max(highest, shared_mib(), in_worker)

    Dispatcher(Sums, [0, 1]).run((array for _ in range(count)), check, tally.on_error)
    tally.check_each_once(count)
    assert not tally.errors
    # All of them would be more than a GiB each way.
    assert highest < 640, f"{highest} MiB were shared at once"
    assert shared_mib() < 64, "when the run is over it is given back"


def test_memory_of_arrays_comes_back_when_their_workers_die() -> None:
    class Dies(Echo):
        def process(self, data: Any) -> Any:
            if data[0] % 20 == 3:
                import os

                os._exit(1)
            return int(data[-1])

    def arrays() -> Iterator[Any]:
        for number in range(60):
            yield numpy.full(8 * MIB, number, dtype=numpy.uint8)

    tally = run(Dies, arrays(), [0, 1])
    tally.check_each_once(60)
    assert sorted(tally.errors) == [3, 23, 43]
    assert all(tally.done[at] == at for at in range(60) if at not in tally.errors)
    assert shared_mib() < 64
