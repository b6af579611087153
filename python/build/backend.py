"""Build backend: maturin, plus the `gpupool` command in the wheel.

`GPUPOOL_WHEEL_COMMAND` is the path of a built command; `MATURIN_PEP517_ARGS="--profile dev"` builds with the dev profile.
"""

import os
import shutil
import subprocess
from pathlib import Path

import maturin
from maturin import (  # noqa: F401 - hooks of maturin without a change
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

PACKAGE = Path(__file__).resolve().parents[1]
SCRIPTS = PACKAGE / "gpupool.data" / "scripts"


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    # The metadata is prepared before the command is built, but maturin needs the directory.
    SCRIPTS.mkdir(parents=True, exist_ok=True)
    return maturin.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    add_command()
    return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    add_command()
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory, config_settings=None):
    raise SystemExit("gpupool is built from a clone of its repository: pip install ./python")


def add_command():
    command = os.environ.get("GPUPOOL_WHEEL_COMMAND") or build_command()
    SCRIPTS.mkdir(parents=True, exist_ok=True)
    shutil.copy(command, SCRIPTS / "gpupool")
    if shutil.which("strip"):
        subprocess.run(["strip", "--strip-debug", SCRIPTS / "gpupool"], check=True)


def build_command():
    profile = "dev" if "--profile dev" in os.environ.get("MATURIN_PEP517_ARGS", "") else "dist"
    workspace = PACKAGE.parent
    subprocess.run(["cargo", "build", "--locked", "--profile", profile, "--bin", "gpupool"], cwd=workspace, check=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR") or workspace / "target")
    return target / ("debug" if profile == "dev" else profile) / "gpupool"
