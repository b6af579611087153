"""Command line and settings of a Python worker process."""

from __future__ import annotations

import json
import os
import pickle
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any, Callable, Optional

from gpupool import _command_path

# The package's directory is last in `sys.path`; the worker then takes over the whole `sys.path` of this program.
_CODE = "import sys; sys.path.append(sys.argv.pop()); from gpupool._worker import main; main()"


class WorkerProgram:
    """Command line and settings of a worker, in which `start(hello, *arguments)` returns its `WorkerFunctions`.

    A class or function that another process cannot import, such as one of a notebook, is sent by value.
    """

    def __init__(self, start: Callable[..., Any], *arguments: Any, **settings: Any) -> None:
        # Workers import the main module as `__mp_main__`; results that refer to it must resolve here.
        sys.modules.setdefault("__mp_main__", sys.modules["__main__"])
        main = _main_module_source()
        self.by_value = not main
        if main:
            # This main module replaces an earlier entry, since workers import this one.
            sys.modules["__mp_main__"] = sys.modules["__main__"]
        work = (start, arguments)
        encoded = {"work": b64encode(_pickle_work(work, self.by_value)).decode()}
        if main and _has_main_definitions(arguments):
            # An import does not define names that are defined under `if __name__ == "__main__":`.
            encoded["work_by_value"] = b64encode(_pickle_work(work, True)).decode()
        self.arguments = [sys.executable, *_interpreter_flags(), "-c", _CODE, str(Path(__file__).resolve().parents[1])]
        self.helper = _command_path.find_command()
        self.settings = json.dumps(
            {"sys_path": sys.path, "argv": sys.argv, **encoded, **main, **settings}
        )


def check_not_loading_main(component: str) -> None:
    """Raise an error if a worker is importing the main module, since workers must not start workers of their own."""
    worker = sys.modules.get("gpupool._worker")
    if worker is not None and worker.is_loading_main:
        raise RuntimeError(
            f"{component} is started while a worker imports the main module: put the start under `if __name__ == '__main__':`, "
            "so that only the program itself runs it"
        )


def _main_module_source() -> dict[str, str]:
    """Return the name or path from which another process imports the main module; empty if it cannot."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return {"main_name": spec.name}
    path = getattr(main, "__file__", None)
    if path is None or not os.path.isfile(path) or hasattr(sys, "ps1"):
        return {}
    # An import would run a script again that does not check `__name__`.
    source = Path(path).read_bytes()
    return {"main_path": os.path.abspath(path)} if b"__name__" in source else {}


def _pickle_work(value: Any, by_value: bool) -> bytes:
    unimportable = _unimportable_modules(value)
    try:
        pickled: Optional[bytes] = pickle.dumps(value, protocol=5)
    except Exception:
        pickled = None
    if pickled is not None and not unimportable and not (by_value and b"__main__" in pickled):
        return pickled
    import cloudpickle

    for module in unimportable:
        cloudpickle.register_pickle_by_value(module)
    try:
        pickled_by_value: bytes = cloudpickle.dumps(value, protocol=5)
        return pickled_by_value
    finally:
        for module in unimportable:
            cloudpickle.unregister_pickle_by_value(module)


def _has_main_definitions(arguments: tuple[Any, ...]) -> bool:
    return any(getattr(argument, "__module__", None) == "__main__" for argument in arguments)


def _unimportable_modules(value: Any) -> list[Any]:
    """Return the modules of the value's classes and functions that no import finds, such as a test file's."""
    start, arguments = value
    names = {getattr(argument, "__module__", None) for argument in (start, *arguments) if callable(argument)}
    return [sys.modules[name] for name in names if name in sys.modules and not _is_importable(name)]


def _is_importable(name: str) -> bool:
    from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

    if name in ("__main__", "__mp_main__"):
        return True
    path = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        part = ".".join(parts[:count])
        if path is None and (BuiltinImporter.find_spec(part) or FrozenImporter.find_spec(part)):
            return True
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            # Another finder may know the module, such as that of an editable install.
            return any(finder.find_spec(part, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        path = spec.submodule_search_locations
    return True


def _interpreter_flags() -> list[str]:
    from subprocess import _args_from_interpreter_flags  # type: ignore[attr-defined]

    flags: list[str] = _args_from_interpreter_flags()
    return flags
