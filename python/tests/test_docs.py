"""The Python programs in README and docs run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agents import Agent

REPOSITORY = Path(__file__).resolve().parents[2]
# The worker of this page runs in the Rust tests: a dispatcher has to start it.
ELSEWHERE = "worker-protocol.md"
GUIDES = [
    guide
    for guide in [REPOSITORY / "README.md", REPOSITORY / "python/README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    if guide.name != ELSEWHERE
]


def blocks() -> list[tuple[str, str]]:
    found = []
    for guide in GUIDES:
        for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", guide.read_text(), re.M | re.S)):
            found.append((f"{guide.relative_to(REPOSITORY)}-{number}", block))
    assert len(found) > 10, found
    return found


@pytest.mark.parametrize(("name", "block"), blocks(), ids=[name for name, _ in blocks()])
def test_the_programs_of_the_guides_run(name: str, block: str, agent: Agent, tmp_path: Path) -> None:
    script = tmp_path / "shown.py"
    # Other machines of the guides are this one.
    script.write_text(block.replace("http://gpu1:8000,http://gpu2:8000", agent.url))
    environment = {**os.environ, "GPU_SERVICE_ENDPOINT": agent.socket}
    ran = subprocess.run(
        [sys.executable, str(script)], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, f"{name}:\n{block}\n{ran.stdout}{ran.stderr}"
    assert "Traceback" not in ran.stderr, f"{name}: {ran.stderr}"
