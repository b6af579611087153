"""Where the `gpupool` command is that came with this package."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

VARIABLE = "GPUPOOL_BINARY"


def find() -> str:
    """The path of the command; what `GPUPOOL_BINARY` names wins."""
    named = os.environ.get(VARIABLE)
    if named:
        if not os.access(named, os.X_OK):
            raise FileNotFoundError(f"{VARIABLE} is {named!r}, which is no program that can be run")
        return named
    for place in _places():
        command = place / "gpupool"
        if os.access(command, os.X_OK):
            return str(command)
    found = shutil.which("gpupool")
    if found is None:
        raise FileNotFoundError(f"the gpupool command is missing: install the package again, or name it in {VARIABLE}")
    return found


def _places() -> list[Path]:
    schemes = [sysconfig.get_default_scheme(), f"{os.name}_user"] if sys.version_info >= (3, 10) else [None]
    places = [Path(sysconfig.get_path("scripts", scheme) if scheme else sysconfig.get_path("scripts")) for scheme in schemes]
    # `pip install --target DIR` puts it into DIR/bin.
    return [*places, Path(__file__).resolve().parents[1] / "bin", Path(sys.executable).parent]
