"""docs/debugging.md: its commands do what the page says that they do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pytest

from eventbus import Replay

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "debugging.md"


def test_every_command_of_the_page_prints_what_the_page_shows(tmp_path: Path) -> None:
    folder = tmp_path / "debugging"
    shutil.copytree(ROOT / "examples" / "debugging", folder, ignore=shutil.ignore_patterns("*.mcap", "*.png"))
    for command, typed, shown in commands(PAGE.read_text()):
        program, *arguments = command.split()
        if program == "cp":
            shutil.copy(*(folder / name for name in arguments))
            continue
        assert program == "rolloutbus"
        printed = rolloutbus(folder, arguments, typed)
        for line, expected in zip_longest(printed, shown):
            if expected == "...":
                break
            assert plain(line) == plain(expected), f"$ {command}"


def test_the_page_shows_all_steps() -> None:
    found = [command for command, _, _ in commands(PAGE.read_text())]
    for part in ("log why", "--with score=fixed_stages:score", "--verify", "--break"):
        assert any(part in command for command in found)


def commands(page: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Each command of the page, with what is typed while it runs and the lines that it prints."""
    for block in re.findall(r"^```console\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = part.splitlines()
            typed = [line[4:] for line in lines if line.startswith(">>> ")]
            yield command, typed, [line for line in lines if not line.startswith(">>> ")]


def rolloutbus(folder: Path, arguments: list[str], typed: list[str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", "from eventbus.cli import main; main()", *arguments],
        cwd=folder,
        input="".join(f"{line}\n" for line in typed),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "random", "COLUMNS": "100"},
    )
    assert done.returncode in (0, 1), done.stderr
    printed = done.stdout
    if typed:  # the prompts are printed, and what is typed is not
        printed = printed.replace(">>> ", "").rstrip("\n")
    return printed.rstrip().splitlines()


def plain(line: str | None) -> str:
    """A line without what no two runs share: times, and the order of events that happen at once."""
    text = (line or "<nothing>").rstrip()
    if text.startswith("the same:"):
        text = re.sub(r"\d+", "N", text)
    text = re.sub(r"\bseq \d+", "seq N", text)
    text = re.sub(r"\bworker \d+", "worker N", text)
    text = re.sub(r"\bslowest \w+", "slowest STAGE", text)
    text = re.sub(r"^ *\d+ +\d+\.\d+    r", "SEQ TIME r", text)
    return re.sub(r" *\b[\d.]+(e-\d+)? (s|ms)\b", " TIME", text)


CHANCE = """
import random, time
from eventbus import Sample

def unseeded(sample: Sample) -> None:
    sample.reward = random.random()

def clock(sample: Sample) -> None:
    sample.metadata["at"] = time.time_ns()

def unordered(sample: Sample) -> None:
    words = {f"word {number}" for number in range(20)}
    sample.metadata["words"] = " ".join(words)

def ordered(sample: Sample) -> None:
    sample.metadata["words"] = {f"word {number}" for number in range(20)}

def any_group(group):
    return True
"""


@pytest.mark.parametrize(
    ("stage", "field"),
    [("unseeded", "reward"), ("clock", "metadata"), ("unordered", "metadata"), ("ordered", None)],
)
def test_what_is_not_deterministic_is_named_with_its_fields(
    tmp_path: Path, stage: str, field: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is a process of its own, in which strings are hashed otherwise."""
    folder = tmp_path / "debugging"
    shutil.copytree(ROOT / "examples" / "debugging", folder, ignore=shutil.ignore_patterns("*.mcap", "*.png"))
    module = f"chance_{stage}"
    (folder / f"{module}.py").write_text(CHANCE)
    config = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(config.replace('use = "stages:score"', f'use = "{module}:{stage}"'))
    judge = f"stages.DynamicFilter.judge={{use='{module}:any_group'}}"
    rolloutbus(folder, ["run", "run.toml", "--quiet", "--rollouts", "1", "--set", judge], [])
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    for _ in range(2):
        found = Replay(folder / "run.mcap").verify().divergence
        if field is None:
            assert found is None
        else:
            assert found is not None
            assert (found.stage, list(found.fields)) == (stage, [field])
