"""The command `rolloutbus replay`, on logs in files: what it prints, how it ends, and its exit codes."""

from __future__ import annotations

import importlib
import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

import eventbus.imports
from eventbus import BatchSpec, LogReader, Pipeline, Replay
from eventbus.config import load_plan
from eventbus.replay.commands import replay
from middleware import DynamicFilter, Generate, Recorder, reward_nonzero_std
from tests.recorded import record
from tests.streams import endless, engine

STAGES = """
from eventbus import BatchSpec, Completion, Group, Pipeline, Sample
from middleware import DynamicFilter, FilterDecision, Generate, reward_nonzero_std

class Engine:
    async def generate(self, sample, sampling):
        length = 1 + sample.index % 3
        return Completion("x" * length, [7] * length, [-0.5] * length)

def score(sample: Sample) -> None:
    sample.reward = float(sample.index % 4 == 1)

def rescored(sample: Sample) -> None:
    sample.reward = float(sample.index % 4 == 3)

class Scorer:
    def __init__(self, factor: float = 1.0, text: str = "a:b") -> None:
        self.factor = factor
        self.text = text

    def __call__(self, sample: Sample) -> None:
        sample.reward = self.factor * (sample.index % 4 == 1)

def stricter(group: Group) -> FilterDecision:
    return FilterDecision(False, "too_strict")

def stages():
    return [Generate(Engine()), score, DynamicFilter(reward_nonzero_std)]

broken = 7

def explodes():
    raise OSError("no disk")
"""

RUN = """
[prompts]
path = "train.jsonl"
group_size = 2

[engine]
use = "replay_stages:Engine"

[batch]
groups = 2
over_sampling = 4

[[stages]]
use = "middleware:Generate"

[[stages]]
use = "replay_stages:Scorer"
factor = 2.0

[[stages]]
use = "middleware:DynamicFilter"
judge = { use = "middleware:reward_nonzero_std" }
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with stages and a recorded run, in which one works."""
    before, path = dict(sys.modules), list(sys.path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "replay_stages.py").write_text(STAGES)
    importlib.invalidate_caches()
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - set(before):
        if name.startswith("replay_stages"):
            del sys.modules[name]
    eventbus.imports._load.cache_clear()


@pytest.fixture
def log(folder: Path) -> Path:
    """Recorded from Python: the log knows its functions by their import paths."""
    stages = importlib.import_module("replay_stages").stages()
    path = folder / "run.mcap"
    record(Pipeline(endless(), stages, BatchSpec(2, over_sampling=4), observers=[Recorder(path)]), 2)
    return path


@pytest.fixture
def configured(folder: Path) -> Path:
    """Recorded from a TOML file."""
    (folder / "run.toml").write_text(RUN)
    (folder / "train.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(40)))
    path = folder / "configured.mcap"
    plan = load_plan(folder / "run.toml", (), [Recorder(path, config=RUN)])
    record(plan.pipeline, 2)
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    app = App(name="rolloutbus")
    app.command("eventbus.replay.commands:replay", name="replay")

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            app(["replay", *map(str, arguments)], exit_on_error=False)
        out, err = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), out, err

    return call


def test_it_is_a_function_that_the_command_line_can_load_late() -> None:
    assert callable(replay)


def test_verify(run: Run, log: Path) -> None:
    code, out, err = run(log, "--verify", "--pipeline", "replay_stages:stages")
    assert (code, err) == (0, "")
    assert out.startswith("the same: 2 rounds")
    assert "2 batches" in out


def test_verify_with_the_stages_that_the_log_names(run: Run, log: Path) -> None:
    code, out, _ = run(log)
    assert code == 0
    assert re.findall(r"not verified: (\w+)", out) == ["Generate"]  # it asked an engine
    assert "2 batches" in out


def test_verify_finds_changed_code(run: Run, log: Path, folder: Path) -> None:
    (folder / "replay_later.py").write_text(STAGES.replace("% 4 == 1", "% 4 == 3"))
    importlib.invalidate_caches()
    code, out, _ = run(log, "--verify", "--rollout", 1, "--pipeline", "replay_later:stages")
    assert code == 1
    assert out.startswith("differs at rollout 1, stage score, seq ")
    assert "reward:" in out


def test_verify_builds_the_stages_of_the_configuration(run: Run, configured: Path) -> None:
    code, out, err = run(configured, "--verify")
    assert (code, err) == (0, "")
    assert "2 batches" in out
    assert "not verified: Generate" in out
    assert "DynamicFilter" not in out


def test_set_changes_one_option_and_keeps_the_rest(run: Run, configured: Path) -> None:
    code, out, _ = run(configured, "--rollout", 1, "--set", "DynamicFilter.judge=replay_stages:stricter")
    assert code == 1
    assert "too_strict" in out
    assert "missing" in out
    code, out, _ = run(configured, "--set", "Scorer.factor=0.5")
    assert code == 1
    assert "rewards changed" in out
    code, out, _ = run(configured, "--set", "Scorer.factor=2.0", "--set", "DynamicFilter.fallback=none")
    assert code == 0
    assert out.split()[-2:] == ["difference", "none"]


def test_set_without_a_configuration_makes_the_stage_anew(run: Run, log: Path) -> None:
    given = ("--pipeline", "replay_stages:stages")
    code, out, _ = run(log, *given, "--set", "DynamicFilter.judge=replay_stages:stricter")
    assert code == 1
    assert "too_strict" in out
    assert run(log, *given, "--set", "DynamicFilter.fallback=last")[0] == 0


def test_with_replaces_a_stage(run: Run, log: Path) -> None:
    given = ("--pipeline", "replay_stages:stages")
    code, out, _ = run(log, *given, "--with", "score=replay_stages:rescored")
    assert code == 1
    assert "rewards changed" in out
    assert run(log, *given, "--with", "score=replay_stages:score")[0] == 0
    assert run(log, *given, "--with", "score=replay_stages:Scorer")[0] == 0


def test_a_live_pipeline_on_the_recorded_answers(run: Run, log: Path) -> None:
    code, out, _ = run(log, "--speed", "inf", "--pipeline", "replay_stages:stages")
    assert code == 0
    assert out.count("recorded") == out.count("now ") == 2
    assert run(log, "--speed", "1000", "--rollout", "1", "--pipeline", "replay_stages:stages")[0] == 0


def test_break_drops_into_a_prompt(run: Run, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--pipeline", "replay_stages:stages", "--break")
    typed = "print('at hand', sample.index, context.rollout_id, run().reward)\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    code, out, err = run(log, "--rollout", 0, *given, "stage=score", "sample=1")
    assert code == 0
    assert "at hand 1 0 1.0" in out
    assert "sample 1, stage 'score'" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO("print(len(group), run())\n"))
    code, out, _ = run(log, "--rollout", 0, *given, "stage=DynamicFilter", "group=0")
    assert "kept=True" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "DynamicFilter"], "--set DynamicFilter: write STAGE.option=value"),
        (["--set", "DynamicFilter.fallbak=last"], "has no such option; did you mean fallback?"),
        (["--set", "DynamicFilters.judge=x"], "did you mean 'DynamicFilter'?"),
        (["--set", "DynamicFilter.judge=replay_stages:strictest"], "has no 'strictest'; did you mean 'stricter'?"),
        (["--set", "DynamicFilter.fallback=first"], "choose 'none', 'last' or 'best'"),
        (["--set", "score.use=replay_stages:rescored"], "write --with score=replay_stages:rescored"),
        (["--set", "score.name=other"], "finds the stage in the log by its name"),
        (["--set", "score.factor=2"], "the stage is a function without options"),
        (["--set", "Generate.sampling=1"], "Generate"),
        (["--with", "score"], "--with score: write NAME=package.module:stage"),
        (["--with", "score=replay_stages:nothing"], "has no 'nothing'"),
        (["--with", "score=replay_stages:broken"], "is not callable"),
        (["--with", "score=replay_stages:stricter"], "is a sample stage, the replacement"),
        (["--with", "score=nowhere:x"], "there is no module 'nowhere'"),
        (["--rollout", "9"], "no rollout 9 in this log; the nearest is 1"),
        (["--verify", "--speed", "1"], "choose one of"),
        (["--speed", "0"], "more than 0"),
        (["--break", "stages=judge"], "choose stage, group, sample"),
        (["--break", "sample=x"], "sample takes a number"),
        (["--break", "stage=scores"], "did you mean 'score'?"),
        (["--break", "stage=score", "sample=99999"], "nothing in this log came there"),
    ],
)
def test_a_mistake_is_one_line(run: Run, log: Path, arguments: list[str], message: str) -> None:
    code, out, err = run(log, *arguments, "--pipeline", "replay_stages:stages")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("replay_stages:explodes", "replay_stages:explodes: OSError: no disk"),
        ("replay_stages:broken", "give a Pipeline, a list of stages"),
        ("replay_stages", "cannot load"),
    ],
)
def test_a_wrong_pipeline_is_one_line(run: Run, log: Path, path: str, message: str) -> None:
    code, out, err = run(log, "--pipeline", path)
    assert (code, out) == (2, "")
    assert message in err


def test_a_file_that_is_no_log_is_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x.mcap").write_bytes(b"nothing")
    for name in ("x.mcap", "nowhere.mcap"):
        code, out, err = run(tmp_path / name)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert name in err


@pytest.mark.parametrize("payload", ["full", "kept", "none"])
def test_what_a_log_with_less_can_do(tmp_path: Path, payload: Any) -> None:
    def score(sample: Any) -> None:
        sample.reward = float(sample.index % 4 == 1)

    from middleware import sample_stage

    stages = [Generate(engine(length=4)), sample_stage(score, name="score"), DynamicFilter(reward_nonzero_std)]
    path = tmp_path / "run.mcap"
    record(Pipeline(endless(), stages, BatchSpec(2, over_sampling=4), observers=[Recorder(path, payload=payload)]), 2)
    run = Replay(LogReader(path), stages)
    report = run.what_if({"DynamicFilter": DynamicFilter(lambda group: False)})
    assert report.missing == {0: 2, 1: 2}
    assert report.notes == []
    found = run.verify()
    assert found.same, str(found)
    assert bool(found.notes) == (payload != "full")


def test_a_what_if_on_light_fields_touches_no_column(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*place: Any) -> Any:
        raise AssertionError("a column was read")

    reader = LogReader(log)
    monkeypatch.setattr(reader, "_heavy_fields", touched)
    stages = importlib.import_module("replay_stages").stages()
    report = Replay(reader, stages).what_if({"DynamicFilter": DynamicFilter(reward_nonzero_std, fallback="last")})
    assert report.same
