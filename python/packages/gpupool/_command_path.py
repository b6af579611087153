"""Path of the `gpupool` command that is installed with this package."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

VARIABLE = "GPUPOOL_BINARY"


def find_command() -> str:
    """Return the path of the command; `GPUPOOL_BINARY` takes precedence."""
    named = os.environ.get(VARIABLE)
    if named:
        if not os.access(named, os.X_OK):
            raise FileNotFoundError(f"{VARIABLE} is {named!r}, which is not an executable file")
        return named
    for directory in _script_directories():
        command = directory / "gpupool"
        if os.access(command, os.X_OK):
            return str(command)
    found = shutil.which("gpupool")
    if found is None:
        raise FileNotFoundError(f"the gpupool command is missing: reinstall the package, or set {VARIABLE} to its path")
    return found


def _script_directories() -> list[Path]:
    schemes = [sysconfig.get_default_scheme(), f"{os.name}_user"] if sys.version_info >= (3, 10) else [None]
    paths = [sysconfig.get_path("scripts", scheme) if scheme else sysconfig.get_path("scripts") for scheme in schemes]
    # `pip install --target DIR` installs the command in DIR/bin.
    return [*map(Path, paths), Path(__file__).resolve().parents[1] / "bin", Path(sys.executable).parent]
