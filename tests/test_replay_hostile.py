"""A log whose events contradict themselves or each other: a replay gives one clear error, or says what it left out."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from eventbus import BatchSpec, Pipeline, Replay, ReplayEngine, Sample
from eventbus.config import ConfigError
from eventbus.events import GroupCompleted, light
from eventbus.imports import LoadError
from eventbus.log import LogError, LogReader, LogWriter
from eventbus.replay import ReplayError
from eventbus.replay import record as records
from eventbus.replay.commands import _live, replay
from eventbus.stage import ContractError
from middleware import DynamicFilter, Generate, GroupAdvantage, reward_nonzero_std, sample_stage
from tests.recorded import MemoryLog, record
from tests.streams import endless, engine

TOLD = (ReplayError, LogError, LoadError, ConfigError, ContractError)


def score(sample: Sample) -> None:
    sample.reward = float((sample.index or 0) % 4 == 1)


def stages() -> list[Any]:
    return [Generate(engine(length=3)), score, DynamicFilter(reward_nonzero_std), GroupAdvantage()]


def recorded() -> MemoryLog:
    log = MemoryLog()
    spec = BatchSpec(2, over_sampling=3, unfinished="recycle", surplus="carry")
    record(Pipeline(endless(), stages(), spec, observers=[log]), 2)
    return log


RECORDED = recorded()


def changed(kind: str, change: Callable[[dict[str, Any]], object]) -> MemoryLog:
    """The log with its first event of a kind changed."""
    log = RECORDED.cut(len(RECORDED.stored))
    for number, data in enumerate(log.stored):
        version, event = msgspec.msgpack.decode(data)
        if event["kind"] == kind:
            change(event)
            log.stored[number] = msgspec.msgpack.encode([version, event])
            return log
    raise AssertionError(kind)


def twice(event: dict[str, Any]) -> None:
    event["samples"].append(event["samples"][0])


CONTRADICTIONS: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "an index too few": ("group_submitted", lambda event: event["indices"].pop(), "or 1 indices for them"),
    "no executions": ("group_submitted", lambda event: event.update(executions=[], indices=[]), "it has 0 executions"),
    "one execution twice": ("group_submitted", lambda event: event.update(executions=[0, 0]), "not all different"),
    "no prompt": ("group_submitted", lambda event: event.pop("samples"), "it shows 0 rows of samples, not the prompt"),
    "an empty prompt": ("group_submitted", lambda event: event.update(samples=[[]]), "it shows 1 rows of samples"),
    "another number of starts": ("group_submitted", twice, "it shows 2 rows of samples"),
    "no answer": ("sample_generated", lambda event: event.update(samples=[]), "it does not show the one sample"),
    "two answers": ("sample_generated", twice, "it does not show the one sample"),
    "an empty execution": (
        "group_completed",
        lambda event: event["samples"].append([]),
        "an execution without samples",
    ),
    "two executions": ("stage_applied", lambda event: event.update(samples=[[], []]), "it shows 2 rows of samples"),
    "wrong settings": ("rollout_started", lambda event: event["batch"].update(min_group_size="x"), "min_group_size"),
    "other wrong settings": ("rollout_started", lambda event: event["batch"].update(max_rounds=0), "max_rounds"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_an_event_that_contradicts_itself_is_one_error(case: str) -> None:
    kind, change, what = CONTRADICTIONS[case]
    log = changed(kind, change)
    with pytest.raises(ReplayError, match=rf"rollout 0, event \d+ \({kind}\): .*no pipeline wrote that") as error:
        Replay(log, stages()).verify()
    assert what in str(error.value)


def test_the_size_of_a_live_group_is_that_of_the_recorded_groups() -> None:
    """Not what the log says elsewhere: it may say billions."""
    log = changed("rollout_started", lambda event: event.update(group_size=1 << 40))
    assert ReplayEngine(log).group_size == 2
    out = io.StringIO()
    _live(Replay(log, stages()), float("inf"), [0], Console(file=out, width=200))
    assert "now       rollout 0: kept 2/2 of 3" in out.getvalue()

    def larger(event: dict[str, Any]) -> None:
        event.update(executions=[*range(50, 53)], indices=[*range(50, 53)])

    log = changed("group_submitted", larger)
    with pytest.raises(ReplayError, match="the groups of the log have not one number of executions: group 0 has 3"):
        _ = ReplayEngine(log).group_size
    with pytest.raises(ReplayError, match="no rollout with a group"):
        _ = ReplayEngine(MemoryLog()).group_size


def test_a_live_pipeline_ends_where_the_prompts_do() -> None:
    """Although the run went on with them from the start."""
    log = changed("rollout_started", lambda event: event["batch"].update(on_exhausted="wrap", groups=50, max_rounds=99))
    out = io.StringIO()
    assert _live(Replay(log, stages()), float("inf"), [0], Console(file=out, width=200)) == 1
    assert "now       the prompts" in out.getvalue()


def test_a_step_without_a_verdict_has_a_count_all_the_same() -> None:
    """As in a log that ends between the two events."""
    log = RECORDED.cut(len(RECORDED.stored))
    log.stored = [data for data in log.stored if msgspec.msgpack.decode(data)[1]["kind"] != "group_judged"]
    (step, *_) = Replay(log, stages()).steps(stage="DynamicFilter")
    assert step.run().verdict.target == 2


def test_a_stage_that_raises_on_the_way_to_a_step_is_told() -> None:
    def broken(group: Any) -> None:
        raise OSError("no disk")

    broken.__name__ = "GroupAdvantage"
    given = [*stages()[:-1], broken]
    with pytest.raises(ReplayError, match="stage 'GroupAdvantage' raises OSError: no disk, which it did not in"):
        list(Replay(RECORDED, given).steps())


# One column many times


def shared(path: Path, samples: int, length: int) -> Path:
    """A group of so many samples, all of which have the tokens of the first."""
    one = Sample(index=0, group_index=0, rollout_id=0, tokens=[7] * length, response_length=1)  # type: ignore[arg-type]
    started, submitted, *_ = RECORDED.events()
    shown = GroupCompleted(seq=2, time_ns=2, rollout_id=0, group_index=0, samples=[[light(one)] * samples])
    with LogWriter(path, compression="zstd") as writer:
        writer.write_nowait(started, None)
        writer.write_nowait(submitted, RECORDED.samples(submitted))
        writer.write_nowait(shown, [[one] * samples])
    return path


def test_a_column_that_is_shown_many_times_is_read_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shared(tmp_path / "run.mcap", samples=500, length=1 << 16)
    assert path.stat().st_size < 1 << 20
    with LogReader(path) as log:
        assert Replay(log, stages()).verify().notes == []
        monkeypatch.setattr(records, "FREE_COLUMNS", 0)
        (note,) = Replay(log, stages()).verify().notes
        assert "its samples hold far more than the file does, one column many times over" in note
        (event,) = log.events("group_completed")
        for sample in log.samples(event)[0]:  # who reads it otherwise is not limited
            assert len(sample.tokens) == 1 << 16


# What a terminal would obey


def test_no_control_character_of_a_log_reaches_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from middleware import Recorder

    def judge(group: Any) -> bool:
        return True

    bell = "\x1b]0;owned\x07"
    monkeypatch.chdir(tmp_path)
    named = sample_stage(lambda sample: None, name=f"a{bell}")
    log = tmp_path / "run.mcap"
    listed = [Generate(engine(length=1)), named, DynamicFilter(judge)]
    record(Pipeline(endless(), listed, BatchSpec(2), observers=[Recorder(log)]), 1)
    for arguments in ({"verify": True}, {"stop_at": ["stage=b"]}, {"overrides": ["DynamicFilter.judge=x:y"]}):
        with pytest.raises(SystemExit):
            replay(log, **arguments)
        out, err = capsys.readouterr()
        assert out + err
        assert "\x1b" not in out + err
        assert "\x07" not in out + err


# What chance makes up

ODD: st.SearchStrategy[Any] = (
    st.sampled_from([None, True, [], [[]], [[[]]], {}, {"a": 1}, [None], [0, 0]])
    | st.sampled_from([-1, 0, 1, 7, 1 << 31, 1 << 62, -(1 << 62), 0.5, float("nan"), float("inf")])
    | st.sampled_from(["", "kept", "score", "Generate", "DynamicFilter"])
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All that holds something, with the key of it."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield value, key
        yield from places(item)


class Read(MemoryLog):
    """As a `LogReader`: what cannot be decoded is left out, and samples are those that their event shows."""

    def events(self, *kinds: Any, **wanted: Any) -> Iterator[Any]:
        whole = self.stored
        for self.stored in [[data] for data in whole]:
            try:
                found = list(super().events(*kinds, **wanted))
            except ValueError:
                found = []
            finally:
                self.stored = whole
            yield from found

    def samples(self, event: Any) -> list[list[Sample]]:
        found = super().samples(event)
        if [len(row) for row in found] != [len(row) for row in event.samples]:
            raise LogError("its columns are missing")
        return found


@settings(max_examples=40)
@given(data=st.data())
def test_any_change_of_a_log_gives_a_report_or_an_error(data: st.DataObject) -> None:
    log = Read()
    log.header, log.heavy, log.stored = RECORDED.header, RECORDED.heavy, list(RECORDED.stored)
    for _ in range(data.draw(st.integers(1, 3))):
        number = data.draw(st.integers(0, len(log.stored) - 1))
        if data.draw(st.booleans()):
            other = data.draw(st.integers(0, len(log.stored) - 1))
            log.stored[number], log.stored[other] = log.stored[other], log.stored[number]
            continue
        version, event = msgspec.msgpack.decode(log.stored[number])
        holder, key = data.draw(st.sampled_from([place for place in places(event) if place[1] != "kind"]))
        holder[key] = data.draw(ODD)
        log.stored[number] = msgspec.msgpack.encode([version, event])
    for given_stages in (stages(), None):
        run = Replay(log, given_stages)
        with suppress(*TOLD):
            assert run.verify().rounds >= 0
        for changed_stage in (DynamicFilter(lambda group: False), sample_stage(lambda sample: None, name="score")):
            with suppress(*TOLD):
                name = getattr(changed_stage, "stage_name", "DynamicFilter")
                assert name in str(run.what_if({name: changed_stage}))
        with suppress(*TOLD):
            assert all(step.stage in repr(step) for step in run.steps())
