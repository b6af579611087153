"""Worker classes, tasks and results defined in scripts, modules, notebooks and functions."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dispatch_kit import run_dispatcher, run_python, start_python
from gpu_dispatch import BaseWorker

CLASSES = """
import os, sys
from dataclasses import dataclass
from gpu_dispatch import BaseWorker, Dispatcher

FACTOR = 3

@dataclass
class Point:
    x: int

def times(number):
    return number * FACTOR

class Worker(BaseWorker):
    def setup(self, gpu_id, seed, **kwargs):
        self.offset = kwargs["offset"]
    def process(self, data):
        assert isinstance(data, Point), (type(data), Point)
        return Point(times(data.x) + self.offset)
"""
RUN = """
got = []
dispatcher = Dispatcher(Worker, [0, 1])
dispatcher.run([Point(1), Point(2)], lambda task_id, data, worker_id: got.append(data), offset=1,
               on_error=lambda task_id, error, worker_id: print(error))
assert all(isinstance(one, Point) for one in got), got
print("got", sorted(one.x for one in got))
"""
GUARD = 'if __name__ == "__main__":\n'


def indented(text: str) -> str:
    return "".join(f"    {line}\n" if line else "\n" for line in text.splitlines())


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("guarded", CLASSES + GUARD + indented(RUN)),
        ("without a guard", CLASSES + RUN),
        ("defined under the guard", GUARD + indented(CLASSES + RUN)),
    ],
)
def test_a_script_defines_its_workers(kind: str, source: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(source)
    assert run_python([str(tmp_path / "script.py")]) == "got [4, 7]\n", kind


def test_a_command_line_program_defines_its_workers() -> None:
    assert run_python(["-c", CLASSES + RUN]) == "got [4, 7]\n"


def test_a_program_on_standard_input_defines_its_workers() -> None:
    assert run_python(["-"], CLASSES + RUN) == "got [4, 7]\n"


def test_a_module_run_with_m_defines_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "tool.py").write_text(CLASSES + GUARD + indented(RUN))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert run_python(["-m", "package.tool"]) == "got [4, 7]\n"


def test_a_notebook_defines_its_workers(tmp_path: Path) -> None:
    """Notebook cells run in a main module without a file that is not Python's original main module."""
    cells = [CLASSES, RUN, CLASSES.replace("FACTOR = 3", "FACTOR = 5"), RUN]
    (tmp_path / "kernel.py").write_text(
        "import sys, types\n"
        "main = types.ModuleType('__main__')\n"
        "main.__dict__['__builtins__'] = __builtins__\n"
        "sys.modules['__main__'] = main\n"
        f"for number, cell in enumerate({cells!r}):\n"
        "    exec(compile(cell, f'<ipython-input-{number}>', 'exec'), main.__dict__)\n"
    )
    assert run_python([str(tmp_path / "kernel.py")]) == "got [4, 7]\ngot [6, 11]\n"


def test_an_interactive_session_defines_its_workers() -> None:
    # An interactive session needs an empty line after each block, and none in a block.
    lines: list[str] = []
    for line in (CLASSES + RUN).splitlines():
        if lines and lines[-1].startswith(" ") and line and not line.startswith(" "):
            lines.append("")
        if line:
            lines.append(line)
    process = start_python(["-i", "-q", "-"], stdin=subprocess.PIPE)
    output, _ = process.communicate("\n".join([*lines, "", ""]), 60)
    assert "got [4, 7]" in output, output


def test_a_script_that_starts_workers_on_import_gets_advice(tmp_path: Path) -> None:
    """The script checks its name only after its run: its workers must not start workers recursively."""
    source = CLASSES + RUN + '\nif __name__ == "__main__":\n    print("over")\n'
    (tmp_path / "script.py").write_text(source)
    process = start_python([str(tmp_path / "script.py")])
    output, _ = process.communicate(timeout=60)
    assert "got [4, 7]" in output or "if __name__ == '__main__':" in output, output


class OfThisModule(BaseWorker):
    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        self.scale = kwargs.get("scale", Scale(2))

    def process(self, data: Any) -> Any:
        return self.scale.of(data)


@dataclass
class Scale:
    by: int

    def of(self, number: int) -> int:
        return number * self.by


def test_a_class_of_a_test_module_works() -> None:
    assert run_dispatcher(OfThisModule, [4], scale=Scale(5)).results == {0: 20}


def test_a_local_class_works_with_its_closure() -> None:
    factor = Scale(7)

    class Local(OfThisModule):
        def process(self, data: Any) -> Any:
            return factor.of(super().process(data))

    assert run_dispatcher(Local, [1]).results == {0: 14}


def test_a_class_made_by_type_works() -> None:
    made = type("Made", (OfThisModule,), {"process": lambda self, data: data - 1})
    assert run_dispatcher(made, [1]).results == {0: 0}


def test_setup_keywords_can_be_functions_of_a_test() -> None:
    class Calls(OfThisModule):
        def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
            self.function = kwargs["function"]

        def process(self, data: Any) -> Any:
            return self.function(data)

    assert run_dispatcher(Calls, [3], function=lambda number: number + 100).results == {0: 103}
