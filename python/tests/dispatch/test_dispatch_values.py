"""What travels, and what happens to what cannot."""

from __future__ import annotations

import sys
import threading
from typing import Any

from dispatch_kit import run
from gpu_dispatch import BaseWorker


class Gives(BaseWorker):
    """Gives what the task names."""

    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        pass

    def process(self, data: Any) -> Any:
        if data == "lambda":
            return lambda: 1
        if data == "lock":
            return threading.Lock()
        if data == "generator":
            return (number for number in range(3))
        if data == "only there":
            # A class the program has never heard of.
            from types import ModuleType

            module = sys.modules["only_there"] = ModuleType("only_there")
            exec("class Thing: pass", module.__dict__)
            return module.Thing()
        if data == "bad reduce":
            return _Explodes()
        return data


class _Explodes:
    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise ArithmeticError("unpickling explodes")


class Refuses:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("it stays here")


def test_a_result_that_cannot_travel_is_an_error_of_its_task() -> None:
    odd = {
        "lambda": "lambda",
        "lock": "lock",
        "generator": "generator",
        "only there": "only_there",
        "bad reduce": "unpickling explodes",
    }
    tally = run(Gives, ["a", *odd, "b"])
    tally.check_each_once(7)
    assert tally.done == {0: "a", 6: "b"}
    for task_id, said in enumerate(odd.values(), 1):
        assert said in tally.errors[task_id]


def test_a_task_that_cannot_be_pickled_is_an_error_of_its_task() -> None:
    odd = [threading.Lock(), lambda: 1, (n for n in "x"), Refuses()]
    tally = run(Gives, ["a", *odd, "b"])
    tally.check_each_once(6)
    assert tally.done == {0: "a", 5: "b"}
    assert all("cannot be pickled" in text for text in tally.errors.values())


def test_a_task_that_explodes_where_it_arrives_is_an_error_of_its_task() -> None:
    tally = run(Gives, ["a", _Explodes(), "b"])
    assert tally.done == {0: "a", 2: "b"} and "unpickling explodes" in tally.errors[1]


def test_values_of_all_kinds_arrive_as_they_were() -> None:
    values = [
        None, True, 0, -1, 1 << 200, 1.5, float("inf"), "", "text \0 ü 🦀", b"", b"\0" * 70_000, (), [], {}, {1, 2},
        {"a": [1, {"b": (None,)}]}, range(5), 3 + 4j, bytearray(b"x" * 100_000), "long" * 100_000, slice(1, 2), Ellipsis,
        "__main__", [b"__main__"],
    ]  # fmt: skip
    tally = run(Gives, values, [0, 1])
    assert [tally.done[at] for at in range(len(values))] == values
    assert [type(tally.done[at]) for at in range(len(values))] == [type(value) for value in values]


def test_fifty_megabytes_arrive() -> None:
    value = bytes(range(256)) * (50 * 4096)
    tally = run(Gives, [value, bytearray(value)])
    assert tally.done == {0: value, 1: value}


def test_an_error_whose_text_is_odd_is_told_all_the_same() -> None:
    class Odd(Gives):
        def process(self, data: Any) -> Any:
            if data == 0:
                raise ValueError("\ud800 \0 ü" * 10)
            if data == 1:
                raise ValueError("x" * 5_000_000)

            class Unprintable(Exception):
                def __str__(self) -> str:
                    raise RuntimeError("no words")

            raise Unprintable

    tally = run(Odd, range(3))
    tally.check_each_once(3)
    assert "ValueError" in tally.errors[0] and "ValueError" in tally.errors[1] and "Unprintable" in tally.errors[2]
