"""What was recorded with an engine is replayed where nothing but the core dependencies is installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

COMMAND = "from eventbus.cli import main; main()"

WITHOUT = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "sglang", "httpx", "trio", "matplotlib", "plotext"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of examples/demo with a log of three rollouts, run.mcap."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch, for the embedded engine")
    folder = shutil.copytree(ROOT / "examples" / "demo", tmp_path_factory.mktemp("recorded") / "demo")
    (folder / "others.py").write_text(
        "def score(sample):\n    sample.reward = float(sample.response == sample.label)\n"
    )
    done = command(folder, COMMAND, "run", "run.toml", "--quiet", "--rollouts=3", "--set", "log.path=run.mcap")
    assert done.returncode == 0, done.stderr
    return folder


def command(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=folder, capture_output=True, text=True, env=environment
    )


def core(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return command(folder, WITHOUT + COMMAND, *arguments)


def test_nothing_else_can_be_imported(tmp_path: Path) -> None:
    assert command(tmp_path, WITHOUT + "import torch").returncode == 1


def test_verify(demo: Path) -> None:
    done = core(demo, "replay", "run.mcap", "--verify")
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 rounds" in done.stdout
    assert "3 batches" in done.stdout
    assert done.stdout.count("not verified") == 1


@pytest.mark.parametrize("change", [("--set", "DynamicFilter.fallback=last"), ("--with", "score=stages:score")])
def test_what_changes_nothing(demo: Path, change: tuple[str, str]) -> None:
    """Also where stages behind the filter pass the groups on in another order."""
    done = core(demo, "replay", "run.mcap", *change)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[-1] == "none"


def test_what_if(demo: Path) -> None:
    done = core(demo, "replay", "run.mcap", "--rollout", "2", "--with", "score=others:score")
    assert (done.returncode, done.stderr) == (1, "")
    assert "rewards changed" in done.stdout
