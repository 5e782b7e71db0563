"""What the README shows works: its programs run as they stand, and so do its commands."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from backends.simulated import SimulatedEngine
from eventbus import Batch, BatchSpec, Completion, Pipeline, Sample, TrainResult
from eventbus.cli import app
from eventbus.testing import virtual_time
from middleware import DynamicFilter, FilterDecision, Generate, Recorder, reward_nonzero_std
from tests.streams import endless, rewarded

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, containing: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
    found = [block for of, block in fenced if of == language and containing in block]
    assert found, containing
    return found


def test_its_targets_of_make_are_there_and_ci_runs_them() -> None:
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.M))
    assert {"demo", "test", "check"} <= named
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert named <= set(re.findall(r"^([a-z-]+):", makefile, re.M))
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert named - set(re.findall(r"^make ([a-z-]+)$", ci, re.M)) == {"bench"}  # its bounds are for a quiet machine


class Trainer:
    def __init__(self) -> None:
        self.batches: list[Batch] = []

    async def train(self, batch: Batch) -> TrainResult:
        self.batches.append(batch)
        return TrainResult(weight_version=str(len(self.batches)))


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What its programs take as given."""
    monkeypatch.chdir(tmp_path)
    lines = [f'{{"question": "{number}+2=", "answer": "{number + 2}"}}\n' for number in range(100)]
    Path("train.jsonl").write_text("".join(lines), encoding="utf-8")
    answer = Completion(text="4", tokens=[52], log_probs=[-0.1])

    async def score(prompt: str, response: str) -> float:
        return float(len(prompt) % 2)

    return {
        "anyio": anyio,
        "engine": SimulatedEngine(lambda sample: answer),
        "judge_client": SimpleNamespace(score=score),
        "trainer": Trainer(),
    }


def test_its_programs_run(names: dict[str, Any]) -> None:
    for program in (
        *blocks("python", "ask_judge"),
        *blocks("python", "pipeline.sync()"),
        *blocks("python", "virtual_time"),
    ):
        before = len(names["trainer"].batches)
        exec(compile(program, "README.md", "exec"), names)
        assert len(names["trainer"].batches) == before + 100


def test_its_program_for_sglang_is_built(names: dict[str, Any]) -> None:
    pytest.importorskip("aiohttp", reason="needs rolloutbus[sglang]")
    (program,) = blocks("python", "SGLangEngine(router=")
    tree = ast.parse(program)
    opened = tree.body.pop()
    assert isinstance(opened, ast.AsyncWith)
    imports = "from backends.sglang import *\nfrom eventbus import *\nfrom middleware import *\n"
    names["prompts"], names["score"] = endless(), rewarded([1.0])
    exec(imports, names)
    exec(compile(tree, "README.md", "exec"), names)
    assert [stage.name for stage in names["pipeline"].stages] == ["Tokenize", "Generate", "reward"]


FILTERS = """
from middleware import FilterDecision

def stricter(group):
    return FilterDecision(keep=sum(group.rewards()) > 2, reason="too_hard")
"""


def test_its_commands_run_on_a_recorded_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("my_filters.py").write_text(FILTERS, encoding="utf-8")

    def reward(sample: Sample) -> None:
        assert sample.index is not None
        sample.reward = float(sample.index % 7 == 0)

    answer = Completion(text="4", tokens=[52], log_probs=[-0.1])
    pipeline = Pipeline(
        endless(8),
        [Generate(SimulatedEngine(lambda sample: answer)), reward, DynamicFilter(reward_nonzero_std, fallback="last")],
        BatchSpec(groups=2, over_sampling=4),
        observers=[Recorder("run.mcap")],
    )

    async def main() -> None:
        async with pipeline:
            async for batch in pipeline.rollouts(stop=138):
                await Trainer().train(batch)

    anyio.run(main, **virtual_time("asyncio"))
    (commands,) = blocks("", "rolloutbus log info")
    for command in commands.splitlines():
        program, *arguments = shlex.split(command, comments=True)
        assert program == "rolloutbus"
        with pytest.raises(SystemExit) as ended:
            app(arguments)
        differs = "--set" in arguments  # which is what it is asked for
        assert ended.value.code in ((1,) if differs else (None, 0)), f"{command}: {capsys.readouterr()}"

    (program,) = blocks("python", "LogReader(")
    names = {
        "DynamicFilter": DynamicFilter,
        "stricter": lambda group: FilterDecision(keep=sum(group.rewards()) > 2, reason="too_hard"),
    }
    exec(compile(program, "README.md", "exec"), names)
    assert "too_hard" in capsys.readouterr().out
