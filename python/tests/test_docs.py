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


def code_blocks() -> list[tuple[str, str]]:
    blocks = []
    for guide in GUIDES:
        for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", guide.read_text(), re.M | re.S)):
            blocks.append((f"{guide.relative_to(REPOSITORY)}-{number}", block))
    assert len(blocks) > 10, blocks
    return blocks


@pytest.mark.parametrize(("name", "block"), code_blocks(), ids=[name for name, _ in code_blocks()])
def test_programs_in_the_guides_run(name: str, block: str, agent: Agent, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    # Other machines of the guides are this one.
    script.write_text(block.replace("http://gpu1:8000,http://gpu2:8000", agent.url))
    environment = {**os.environ, "GPU_SERVICE_ENDPOINT": agent.socket}
    process = subprocess.run(
        [sys.executable, str(script)], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, f"{name}:\n{block}\n{process.stdout}{process.stderr}"
    assert "Traceback" not in process.stderr, f"{name}: {process.stderr}"
