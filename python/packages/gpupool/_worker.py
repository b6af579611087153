"""What a worker process of Python runs. Started by `_program.Program`; imports little, so that it starts quickly."""

from __future__ import annotations

import signal
import sys
from typing import Any, Callable, NamedTuple, Optional

from gpupool import _native

# Set while the main module of the program is imported: nothing may be started by that.
is_loading_main = False


class Work(NamedTuple):
    """What is done with each task, and at the end."""

    process: Callable[[Any], Any]
    clean_up: Callable[[], Any]
    load_main: Optional[Callable[[], None]] = None


def main() -> None:
    """Works until it is told to stop."""
    _native.serve_as_worker()


def set_up(hello: dict[str, Any]) -> Work:
    """Called by the native side with what the dispatcher said first."""
    from base64 import b64decode
    from pickle import loads

    settings = hello["settings"]
    sys.path[:] = settings["sys_path"]
    sys.argv = settings["argv"]
    limit = settings.get("task_timeout")
    signal.signal(signal.SIGINT, lambda _number, _frame: _interrupt(limit))
    loading = _Main(settings)
    work = b64decode(settings["work"])
    try:
        if b"__main__" in work:
            loading.load()
        start, arguments = loads(work)
        if "main_path" not in settings and "main_name" not in settings:
            _make_known(arguments)
    except Exception:
        if "work_by_value" not in settings:
            raise
        start, arguments = loads(b64decode(settings["work_by_value"]))
        _make_known(arguments)
    done = start(hello, *arguments)
    return Work(done.process, done.clean_up, loading.load)


def _make_known(values: Any) -> None:
    """Puts the classes that came by value where pickle looks for them when it is given one of their objects."""
    main = sys.modules["__main__"]
    for value in values:
        for function in vars(value).values() if isinstance(value, type) else [value]:
            for name, known in getattr(function, "__globals__", {}).items():
                if isinstance(known, type) and known.__module__ == "__main__" and not hasattr(main, name):
                    setattr(main, name, known)


def _interrupt(limit: Optional[float]) -> None:
    about = _native.interrupted()
    if about == "too_long":
        raise TimeoutError(f"the task took longer than {limit:g} seconds" if limit else "the task took too long")
    if about == "unwanted":
        raise KeyboardInterrupt


class _Main:
    """The main module of the program that started this worker: imported, under another name, when something refers to it."""

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
                content = runpy.run_path(path, run_name="__mp_main__")
            else:
                content = runpy.run_module(str(name), run_name="__mp_main__", alter_sys=True)
        finally:
            is_loading_main = False
        module.__dict__.update(content)
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
