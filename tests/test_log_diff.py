"""`diff`: where two streams part, in their order and in what they hold, and what that did to their rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventbus.batching import BatchSpec
from eventbus.events import UnknownEvent, WeightsUpdated
from eventbus.log.inspect import DiffReport, diff
from eventbus.log.inspect.show import diff_lines
from eventbus.sample import Sample
from middleware import Generate
from tests.streams import engine, rewarded, strict
from tests.test_log_check import Events, at, changed, record, retried


def run(
    bad: Sequence[int] = (), rewards: Sequence[float] = (1.0, 0.0), delay: Any = 0.0, stop: int = 2, length: int = 1
) -> Events:
    stages = [Generate(engine(delay, length=length)), rewarded(rewards), strict(bad)]
    return record(stages, BatchSpec(2, over_sampling=3), stop=stop).events


def text(report: DiffReport) -> str:
    return "\n".join(line.plain for line in diff_lines(report))


def test_two_runs_of_the_same_work_differ_in_nothing() -> None:
    a, b = run(), run()
    assert a[0].time_ns != b[0].time_ns
    report = diff(a, b)
    assert report.same
    assert (report.events, report.content, report.rollouts) == ((len(a), len(b)), None, [])
    assert text(report).splitlines()[-1] == "no difference but in time"


def test_another_verdict_is_the_first_difference_and_shows_in_what_was_kept() -> None:
    report = diff(run(), run(bad=[1]))
    assert report.first is not None
    assert (report.first.a.kind, report.first.a.group_index) == ("stage_applied", 1)
    assert report.first.fields == {"dropped": (None, "bad")}
    first = report.rollouts[0]
    assert (first.rollout_id, first.kept, first.only_a, first.only_b) == (0, (2, 2), [1], [2])
    assert first.ends == {1: ("kept", "dropped: bad"), 2: ("surplus", "kept")}
    shown = text(report)
    assert "kept only in a: 1" in shown
    assert "group 1: kept | dropped: bad" in shown


def test_other_rewards_are_told_per_group() -> None:
    report = diff(run(), run(rewards=[1.0, 0.5]))
    assert report.first is not None
    assert report.first.fields == {"changed.reward": (0.0, 0.5)}
    assert report.rollouts[0].rewards[0] == ([1.0, 0.0], [1.0, 0.5])
    assert "group 0: rewards 1 0 | 1 0.5" in text(report)


def test_a_reward_that_is_nan_in_both_is_the_same() -> None:
    assert diff(run(rewards=[float("nan")]), run(rewards=[float("nan")])).same


def test_other_tokens_show_as_marks() -> None:
    report = diff(run(length=1), run(length=2))
    assert report.first is not None
    assert report.first.fields["changed.response"] == ("x", "xx")
    (length_a, _), (length_b, _) = report.first.fields["columns.tokens"]
    assert (length_a, length_b) == (1, 2)
    assert "1 value, crc" in text(report)


def test_the_same_events_in_another_order_are_told_from_other_events() -> None:
    events = run()
    place = at(events, "stage_applied", stage="reward", index=1)
    one, two = events[place], events[at(events, "stage_applied", stage="reward", index=2)]
    moved = [two if event is one else one if event is two else event for event in events]
    report = diff(events, moved)
    assert report.first is not None
    assert (report.first.a, report.first.b, report.first.fields) == (one, two, {})
    assert (report.content, report.rollouts) == (None, [])
    assert "the same events, in another order" in text(report)

    report = diff(events, changed(moved, "batch_trained", {}, metrics={"loss": 2.0}))
    assert report.content is not None
    assert report.content.fields == {"metrics.loss": (1.0, 2.0)}
    assert "first event that is not the same in both" in text(report)


def test_a_stream_that_ends_early() -> None:
    events = run(stop=2)
    cut = at(events, "rollout_started", rollout_id=1)
    for a, b, side in ((events, events[:cut], "a"), (events[:cut], events, "b")):
        report = diff(a, b)
        assert report.first is not None
        assert (report.first.a is None, report.first.b is None) == (side == "b", side == "a")
        assert report.content == report.first
        assert [(rollout.rollout_id, rollout.only_in) for rollout in report.rollouts] == [(1, side)]
        assert f"rollout 1 is only in {side}" in text(report)


@pytest.mark.parametrize("name", ["seq", "time_ns"])
def test_numbers_and_times_do_not_count(name: str) -> None:
    events = run()
    assert diff(events, [msgspec.structs.replace(event, **{name: 7}) for event in events]).same


def test_seconds_workers_and_waiting_do_not_count() -> None:
    events = run()
    where = {"stage": "reward"}
    assert diff(events, changed(events, "stage_applied", where, seconds=9.0, waited=1.0, worker=99)).same
    assert not diff(events, changed(events, "stage_applied", where, attempts=2)).same


def test_events_of_a_newer_kind_are_compared_by_kind() -> None:
    one, other = (UnknownEvent(seq=0, time_ns=0, rollout_id=0, kind=kind) for kind in ("a", "b"))
    assert diff([one], [one]).same
    assert not diff([one], [other]).same


def test_iterators_and_empty_streams_are_fine() -> None:
    events = run()
    assert diff(iter(events), iter(events)).same
    assert diff([], []).same
    assert not diff([], events).same


def test_many_differences_are_cut() -> None:
    def reward(value: float) -> Any:
        return lambda sample: value

    many = [record([Generate(engine()), rewarded(reward(value))], BatchSpec(30)).events for value in (0.0, 1.0)]
    shown = text(diff(*many))
    assert "... and 20 groups with other rewards more" in shown
    assert len(shown.splitlines()) < 60


def test_attempts_and_workers_of_an_engine_do_not_count() -> None:
    events = retried()
    assert diff(events, [event for event in events if event.kind != "attempt_ended"]).same
    updates = [
        WeightsUpdated(seq=0, time_ns=0, rollout_id=0, version="7", pause="retract", workers=[url], seconds=seconds)
        for url, seconds in (("http://a", 1.0), ("http://b", 2.0))
    ]
    assert diff(updates[:1], updates[1:]).same
    assert not diff(updates[:1], [msgspec.structs.replace(updates[0], pause="abort")]).same


def test_arrays_in_metadata_are_compared_by_content() -> None:
    np = pytest.importorskip("numpy")

    def mark(value: int) -> Any:
        def stage(sample: Sample) -> None:
            sample.metadata["image"] = np.full(3, value)

        return stage

    streams = [record([Generate(engine()), mark(value)], BatchSpec(1)).events for value in (1, 1, 2)]
    assert diff(streams[0], streams[1]).same
    assert not diff(streams[0], streams[2]).same


@settings(max_examples=50)
@given(st.data())
def test_one_event_that_is_gone_is_the_first_event_that_is_not_in_both(data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(STREAM) - 1))
    report = diff(STREAM, [*STREAM[:place], *STREAM[place + 1 :]])
    assert not report.same
    # Nothing that happens twice tells which of the two is missing.
    assert report.content is not None
    assert report.content.a is not None
    assert report.content.b is None
    assert report.content.a.kind == STREAM[place].kind


STREAM = run()
