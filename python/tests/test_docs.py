"""The Python programs in the guides run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agents import Agent

REPOSITORY = Path(__file__).resolve().parents[2]
GUIDES = ["README.md", "docs/user-guide.md", "python/README.md"]


def code_blocks() -> list[tuple[str, str]]:
    blocks = []
    for guide in GUIDES:
        text = (REPOSITORY / guide).read_text()
        for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)):
            blocks.append((f"{guide}-{number}", block))
    assert blocks, "no guide contains Python code"
    return blocks


@pytest.mark.parametrize(("name", "block"), code_blocks(), ids=[name for name, _ in code_blocks()])
def test_programs_in_the_guides_run(name: str, block: str, agent: Agent, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(block)
    environment = {**os.environ, "GPU_SERVICE_ENDPOINT": agent.socket}
    process = subprocess.run(
        [sys.executable, str(script)], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, f"{name}:\n{block}\n{process.stdout}{process.stderr}"
    assert "Traceback" not in process.stderr, f"{name}: {process.stderr}"
