"""What docs/slime.md shows is there and runs."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "slime.md").read_text()


def test_every_name_that_it_mentions_exists() -> None:
    paths = set(re.findall(r"\bbackends\.slime\.(\w+)", TEXT))
    for line in re.findall(r"^from backends\.slime import (.+)$", TEXT, re.MULTILINE):
        paths |= set(re.split(r",\s*", line))
    assert len(paths) >= 9
    for name in paths:
        assert hasattr(import_module("backends.slime"), name), name


def test_its_program_runs(tmp_path: Path) -> None:
    program = next(block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "get_samples" in block)
    (tmp_path / "laptop.py").write_text(program)
    command = [sys.executable, "-c", "import laptop"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout == "4 1.0 1\n"
