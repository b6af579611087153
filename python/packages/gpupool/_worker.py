"""Main program of a Python worker process.

`_worker_program.WorkerProgram` starts it. It imports few modules, so that a worker starts quickly.
"""

from __future__ import annotations

import signal
import sys
from typing import Any, Callable, NamedTuple, Optional

from gpupool import _native

# True while the program's main module is imported: this import must not start dispatchers or pools.
is_loading_main = False


class WorkerFunctions(NamedTuple):
    """Functions of a worker; the native module calls them."""

    process: Callable[[Any], Any]
    clean_up: Callable[[], Any]
    load_main: Optional[Callable[[], None]] = None


def main() -> None:
    """Process tasks until the dispatcher ends the worker."""
    _native.serve_as_worker()


def set_up(hello: dict[str, Any]) -> WorkerFunctions:
    """Set up the worker and return its functions. The native module calls this with the dispatcher's first message."""
    from base64 import b64decode
    from pickle import loads

    settings = hello["settings"]
    sys.path[:] = settings["sys_path"]
    sys.argv = settings["argv"]
    task_timeout = settings.get("task_timeout")
    signal.signal(signal.SIGINT, lambda _number, _frame: _handle_interrupt(task_timeout))
    main_module = _MainModule(settings)
    work = b64decode(settings["work"])
    try:
        if b"__main__" in work:
            main_module.load()
        start, arguments = loads(work)
        if "main_path" not in settings and "main_name" not in settings:
            _register_classes(arguments)
    except Exception:
        if "work_by_value" not in settings:
            raise
        start, arguments = loads(b64decode(settings["work_by_value"]))
        _register_classes(arguments)
    functions = start(hello, *arguments)
    return WorkerFunctions(functions.process, functions.clean_up, main_module.load)


def _register_classes(values: Any) -> None:
    """Add classes that were sent by value to `__main__`, where pickle looks for them when it pickles their objects."""
    main = sys.modules["__main__"]
    for value in values:
        for function in vars(value).values() if isinstance(value, type) else [value]:
            for name, known in getattr(function, "__globals__", {}).items():
                if isinstance(known, type) and known.__module__ == "__main__" and not hasattr(main, name):
                    setattr(main, name, known)


def _handle_interrupt(task_timeout: Optional[float]) -> None:
    reason = _native.interrupted()
    if reason == "too_long":
        raise TimeoutError(
            f"the task took longer than {task_timeout:g} seconds" if task_timeout else "the task took too long"
        )
    if reason == "unwanted":
        raise KeyboardInterrupt


class _MainModule:
    """Main module of the program that started this worker, imported as `__mp_main__` when a task refers to it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.path, self.name = settings.get("main_path"), settings.get("main_name")

    def load(self) -> None:
        global is_loading_main
        path, name = self.path, self.name
        self.path = self.name = None
        if path is None and name is None:
            return
        import runpy
        from types import ModuleType

        module = ModuleType("__mp_main__")
        is_loading_main = True
        try:
            if path is not None:
                namespace = runpy.run_path(path, run_name="__mp_main__")
            else:
                namespace = runpy.run_module(str(name), run_name="__mp_main__", alter_sys=True)
        finally:
            is_loading_main = False
        module.__dict__.update(namespace)
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
