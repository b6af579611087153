"""Serialization of tasks and results, and objects that cannot be pickled."""

from __future__ import annotations

import sys
import threading
from typing import Any

from dispatch_kit import run_dispatcher
from gpu_dispatch import BaseWorker


class ResultWorker(BaseWorker):
    """Returns the object that the task names."""

    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        pass

    def process(self, data: Any) -> Any:
        if data == "lambda":
            return lambda: 1
        if data == "lock":
            return threading.Lock()
        if data == "generator":
            return (number for number in range(3))
        if data == "unknown class":
            # The program does not have this class.
            from types import ModuleType

            module = sys.modules["unknown_class"] = ModuleType("unknown_class")
            exec("class Thing: pass", module.__dict__)
            return module.Thing()
        if data == "bad reduce":
            return _FailsToUnpickle()
        return data


class _FailsToUnpickle:
    def __reduce__(self) -> Any:
        return _raise_arithmetic_error, ()


def _raise_arithmetic_error() -> None:
    raise ArithmeticError("unpickling fails")


class Unpicklable:
    """Object that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not picklable")


def test_an_unpicklable_result_fails_its_task() -> None:
    invalid = {
        "lambda": "lambda",
        "lock": "lock",
        "generator": "generator",
        "unknown class": "unknown_class",
        "bad reduce": "unpickling fails",
    }
    recorder = run_dispatcher(ResultWorker, ["a", *invalid, "b"])
    recorder.check_one_outcome_each(7)
    assert recorder.results == {0: "a", 6: "b"}
    for task_id, expected in enumerate(invalid.values(), 1):
        assert expected in recorder.errors[task_id]


def test_an_unpicklable_task_fails() -> None:
    invalid = [threading.Lock(), lambda: 1, (n for n in "x"), Unpicklable()]
    recorder = run_dispatcher(ResultWorker, ["a", *invalid, "b"])
    recorder.check_one_outcome_each(6)
    assert recorder.results == {0: "a", 5: "b"}
    assert all("cannot be pickled" in text for text in recorder.errors.values())


def test_a_task_that_cannot_be_unpickled_fails() -> None:
    recorder = run_dispatcher(ResultWorker, ["a", _FailsToUnpickle(), "b"])
    assert recorder.results == {0: "a", 2: "b"} and "unpickling fails" in recorder.errors[1]


def test_values_of_all_types_arrive_unchanged() -> None:
    values = [
        None, True, 0, -1, 1 << 200, 1.5, float("inf"), "", "text \0 ü 🦀", b"", b"\0" * 70_000, (), [], {}, {1, 2},
        {"a": [1, {"b": (None,)}]}, range(5), 3 + 4j, bytearray(b"x" * 100_000), "long" * 100_000, slice(1, 2), Ellipsis,
        "__main__", [b"__main__"],
    ]  # fmt: skip
    recorder = run_dispatcher(ResultWorker, values, [0, 1])
    assert [recorder.results[at] for at in range(len(values))] == values
    assert [type(recorder.results[at]) for at in range(len(values))] == [type(value) for value in values]


def test_fifty_megabytes_arrive() -> None:
    value = bytes(range(256)) * (50 * 4096)
    recorder = run_dispatcher(ResultWorker, [value, bytearray(value)])
    assert recorder.results == {0: value, 1: value}


def test_an_exception_with_an_unusual_text_is_reported() -> None:
    class Odd(ResultWorker):
        def process(self, data: Any) -> Any:
            if data == 0:
                raise ValueError("\ud800 \0 ü" * 10)
            if data == 1:
                raise ValueError("x" * 5_000_000)

            class Unprintable(Exception):
                def __str__(self) -> str:
                    raise RuntimeError("no text")

            raise Unprintable

    recorder = run_dispatcher(Odd, range(3))
    recorder.check_one_outcome_each(3)
    assert "ValueError" in recorder.errors[0] and "ValueError" in recorder.errors[1] and "Unprintable" in recorder.errors[2]
