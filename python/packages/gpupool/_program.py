"""From work to be done to a program that does it in another process."""

from __future__ import annotations

import json
import os
import pickle
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any, Callable, Optional

from gpupool import _command

# The package's folder is the last place to look: the program's own path is set as soon as it runs.
_CODE = "import sys; sys.path.append(sys.argv.pop()); from gpupool._worker import main; main()"


class Program:
    """How workers are started, and what they are told: `start(hello, *arguments)` gives their `Work`.

    What cannot be imported by another process, such as a class of a notebook, travels by value.
    """

    def __init__(self, start: Callable[..., Any], *arguments: Any, **settings: Any) -> None:
        # What workers make of classes of the main module is found here under the name it has there.
        sys.modules.setdefault("__mp_main__", sys.modules["__main__"])
        main = _main()
        self.by_value = not main
        if main:
            # Workers import it under this name, and so its classes are called in what they send.
            sys.modules["__mp_main__"] = sys.modules["__main__"]
        work = (start, arguments)
        told = {"work": b64encode(_dump(work, self.by_value)).decode()}
        if main and _is_of_main(arguments):
            # What is defined only where the program itself runs is not there after an import.
            told["work_by_value"] = b64encode(_dump(work, True)).decode()
        self.arguments = [sys.executable, *_interpreter_flags(), "-c", _CODE, str(Path(__file__).resolve().parents[1])]
        self.helper = _command.find()
        self.settings = json.dumps(
            {"sys_path": sys.path, "argv": sys.argv, **told, **main, **settings}
        )


def check_not_imported(what: str) -> None:
    """Raises where a worker's import of the main module would start workers of its own."""
    worker = sys.modules.get("gpupool._worker")
    if worker is not None and worker.is_loading_main:
        raise RuntimeError(
            f"{what} is started while a worker imports the main module: put that under `if __name__ == '__main__':`, "
            "so that only the program itself does it"
        )


def _main() -> dict[str, str]:
    """How another process imports the main module; empty where it cannot."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return {"main_name": spec.name}
    path = getattr(main, "__file__", None)
    if path is None or not os.path.isfile(path) or hasattr(sys, "ps1"):
        return {}
    # A script that never looks at its name does again whatever it does when it is imported.
    source = Path(path).read_bytes()
    return {"main_path": os.path.abspath(path)} if b"__name__" in source else {}


def _dump(value: Any, by_value: bool) -> bytes:
    unreachable = _unreachable_modules(value)
    try:
        dumped: Optional[bytes] = pickle.dumps(value, protocol=5)
    except Exception:
        dumped = None
    if dumped is not None and not unreachable and not (by_value and b"__main__" in dumped):
        return dumped
    import cloudpickle

    for module in unreachable:
        cloudpickle.register_pickle_by_value(module)
    try:
        by_value_too: bytes = cloudpickle.dumps(value, protocol=5)
        return by_value_too
    finally:
        for module in unreachable:
            cloudpickle.unregister_pickle_by_value(module)


def _is_of_main(arguments: tuple[Any, ...]) -> bool:
    return any(getattr(one, "__module__", None) == "__main__" for one in arguments)


def _unreachable_modules(value: Any) -> list[Any]:
    """Modules of the classes and functions in a value that no import finds, such as a test's without a package."""
    start, arguments = value
    names = {getattr(one, "__module__", None) for one in (start, *arguments) if callable(one)}
    return [sys.modules[name] for name in names if name in sys.modules and not _is_reachable(name)]


def _is_reachable(name: str) -> bool:
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
            # Found by an importer of its own, such as that of an editable install.
            return any(finder.find_spec(part, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        path = spec.submodule_search_locations
    return True


def _interpreter_flags() -> list[str]:
    from subprocess import _args_from_interpreter_flags  # type: ignore[attr-defined]

    flags: list[str] = _args_from_interpreter_flags()
    return flags
