"""The programs in the migration guides produce the documented output."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.mark.parametrize(
    ("guide", "expected"),
    [("migration-gpu-dispatch.md", "297\n"), ("migration-multiprocessing.md", "[1, 2, 5, 10, 17]\n")],
)
def test_the_program_of_a_guide_works(guide: str, expected: str, tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", (DOCS / guide).read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "program.py").write_text(program)
    process = subprocess.run([sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True, timeout=60)
    assert (process.stdout, process.returncode) == (expected, 0), process.stderr
