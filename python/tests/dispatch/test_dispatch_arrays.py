"""Arrays of any layout arrive unchanged, and their memory is freed."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, Iterator

import pytest

from dispatch_kit import CallbackRecorder, run_dispatcher
from gpu_dispatch import BaseWorker, Dispatcher

numpy = pytest.importorskip("numpy")

MIB = 1 << 20


class Echo(BaseWorker):
    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        self.stored: list[Any] = []

    def process(self, data: Any) -> Any:
        return data


class StoringWorker(Echo):
    """Stores each array and returns the checksums of all stored arrays."""

    def process(self, data: Any) -> Any:
        self.stored.append(data)
        return [checksum(array) for array in self.stored]


class MutatingWorker(Echo):
    """Changes its task in place, fails the first time, and returns a copy of the task's original data."""

    def process(self, data: Any) -> Any:
        path, array = data
        original = array.copy()
        array[:] = -1
        if not Path(path).exists():
            Path(path).touch()
            raise ValueError("the first attempt fails")
        return original


def checksum(array: Any) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def shared_mib() -> int:
    match = re.search(r"RssShmem:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match.group(1)) // 1024 if match else 0


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


def test_arrays_of_all_layouts_arrive_unchanged() -> None:
    arrays = layouts()
    recorder = run_dispatcher(Echo, arrays.values())
    assert not recorder.errors
    for (name, sent), at in zip(arrays.items(), range(len(arrays))):
        received = recorder.results[at]
        assert received.dtype == sent.dtype and received.shape == sent.shape, name
        numpy.testing.assert_array_equal(received, sent, err_msg=name)


def test_a_received_array_is_writable_unless_it_was_read_only() -> None:
    arrays = layouts()
    recorder = run_dispatcher(Echo, [arrays["large"], arrays["small"], [arrays["large"], {"x": arrays["large"]}]])
    recorder.results[0][:] = 1
    recorder.results[1][:] = 1
    recorder.results[2][0][:] = 2
    # An array that occurs twice in a task arrives as one object, as with pickle.
    assert recorder.results[2][1]["x"][0, 0] == 2
    assert arrays["large"][0, 1] == 1.0, "the sent array is unchanged"


def test_stored_results_are_not_changed_by_later_results() -> None:
    generator = numpy.random.default_rng(7)
    sent: list[str] = []

    def arrays() -> Iterator[Any]:
        for number in range(120):
            array = generator.integers(0, 255, size=100_000 + 1000 * (number % 7), dtype=numpy.uint8)
            sent.append(checksum(array))
            yield array

    recorder = run_dispatcher(Echo, arrays(), [0, 1], queue_size=16)
    recorder.check_one_outcome_each(120)
    assert [checksum(recorder.results[at]) for at in range(120)] == sent


def test_stored_tasks_of_a_worker_are_not_changed_by_later_tasks() -> None:
    arrays = [numpy.full(200_000, number, dtype=numpy.uint8) for number in range(40)]
    sums = [checksum(array) for array in arrays]
    recorder = run_dispatcher(StoringWorker, arrays)
    assert all(recorder.results[at] == sums[: at + 1] for at in range(40))


def test_a_retried_task_has_its_original_data(tmp_path: Path) -> None:
    array = numpy.arange(200_000)
    recorder = run_dispatcher(MutatingWorker, [(str(tmp_path / "attempted"), array)], options={"retries": 1})
    assert not recorder.errors, recorder.errors
    numpy.testing.assert_array_equal(recorder.results[0], array)


def test_memory_of_many_large_arrays_is_freed() -> None:
    count, highest = 150, 0
    array = numpy.zeros(8 * MIB, dtype=numpy.uint8)
    recorder = CallbackRecorder()

    class Sums(Echo):
        def process(self, data: Any) -> Any:
            return data + 1, shared_mib()

    def check(task_id: int, data: Any, worker_id: int) -> None:
        nonlocal highest
        received, in_worker = data
        assert received[0] == received[-1] == 1 and received.size == array.size
        recorder.on_success(task_id, in_worker, worker_id)
        highest = max(highest, shared_mib(), in_worker)

    Dispatcher(Sums, [0, 1]).run((array for _ in range(count)), check, recorder.on_error)
    recorder.check_one_outcome_each(count)
    assert not recorder.errors
    # All arrays together are more than 1 GiB in each direction.
    assert highest < 640, f"{highest} MiB were shared at the same time"
    assert shared_mib() < 64, "the memory is freed after the run"


def test_memory_of_arrays_is_freed_when_their_workers_die() -> None:
    class Dies(Echo):
        def process(self, data: Any) -> Any:
            if data[0] % 20 == 3:
                import os

                os._exit(1)
            return int(data[-1])

    def arrays() -> Iterator[Any]:
        for number in range(60):
            yield numpy.full(8 * MIB, number, dtype=numpy.uint8)

    recorder = run_dispatcher(Dies, arrays(), [0, 1])
    recorder.check_one_outcome_each(60)
    assert sorted(recorder.errors) == [3, 23, 43]
    assert all(recorder.results[at] == at for at in range(60) if at not in recorder.errors)
    assert shared_mib() < 64
