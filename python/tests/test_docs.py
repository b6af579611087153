"""What the guides show runs."""

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


def blocks() -> list[tuple[str, str]]:
    found = []
    for guide in GUIDES:
        text = (REPOSITORY / guide).read_text()
        for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)):
            found.append((f"{guide}-{number}", block))
    assert found, "no guide has any Python in it"
    return found


@pytest.mark.parametrize(("name", "block"), blocks(), ids=[name for name, _ in blocks()])
def test_what_the_guides_show_runs(name: str, block: str, agent: Agent, tmp_path: Path) -> None:
    script = tmp_path / "shown.py"
    script.write_text(block)
    environment = {**os.environ, "GPU_SERVICE_ENDPOINT": agent.socket}
    ran = subprocess.run(
        [sys.executable, str(script)], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, f"{name}:\n{block}\n{ran.stdout}{ran.stderr}"
    assert "Traceback" not in ran.stderr, f"{name}: {ran.stderr}"
