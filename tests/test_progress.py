from __future__ import annotations

import threading
from io import StringIO
from itertools import count
from typing import Any

import pytest
from rich.console import Console

from eventbus.events import Event, GroupEnded, GroupSubmitted, RolloutFinished, RolloutStarted
from eventbus.group import Summary
from middleware import Progress

SUMMARY = Summary(7, target=2, submitted=4, kept=2, dropped={"[bold]zero_std_1.0": 1})


class Stream:
    """The events of rollout 7, numbered."""

    def __init__(self, rollout_id: int = 7, evaluation: bool = False) -> None:
        self._seq = count()
        self._head = {"rollout_id": rollout_id, "evaluation": evaluation, "time_ns": 0}

    def event(self, kind: type[Any], **fields: Any) -> Event:
        event: Event = kind(seq=next(self._seq), **self._head, **fields)
        return event

    def started(self, target: int = 2) -> Event:
        return self.event(RolloutStarted, target=target, group_size=1)

    def submitted(self) -> Event:
        return self.event(GroupSubmitted, group_index=0, round=1, origin="new", executions=[0], indices=[0])

    def ended(self, outcome: str) -> Event:
        return self.event(GroupEnded, group_index=0, outcome=outcome)

    def finished(self, summary: Summary | None = SUMMARY, error: str | None = None) -> Event:
        return self.event(RolloutFinished, summary=summary, error=error)


def terminal(output: StringIO) -> Console:
    return Console(file=output, force_terminal=True, color_system=None, width=100)


def observe(progress: Progress, *events: Event) -> None:
    for event in events:
        progress.observe(event)


def test_it_asks_only_for_what_it_shows() -> None:
    kinds = {kind.__struct_config__.tag for kind in (RolloutStarted, GroupSubmitted, GroupEnded, RolloutFinished)}
    assert Progress.kinds == kinds


def test_without_a_terminal_it_prints_summaries_and_nothing_else() -> None:
    output, stream = StringIO(), Stream()
    with Progress(Console(file=output, width=40)) as progress:
        observe(progress, stream.started(), stream.submitted(), stream.ended("kept"), stream.finished())
    assert output.getvalue() == f"{SUMMARY}\n"


def test_a_failed_rollout_says_why() -> None:
    output, stream = StringIO(), Stream()
    with Progress(Console(file=output)) as progress:
        observe(progress, stream.started(), stream.finished(summary=None, error="RuntimeError: no rounds are left"))
    assert output.getvalue() == "rollout 7; ended by RuntimeError: no rounds are left\n"


def test_a_terminal_shows_counts_while_the_rollout_is_under_way() -> None:
    output, stream = StringIO(), Stream()
    with Progress(terminal(output)) as progress:
        observe(progress, stream.started(), *(stream.submitted() for _ in range(4)))
        observe(progress, stream.ended("kept"), stream.ended("dropped"), stream.ended("failed"))
        assert progress._bars is not None
        progress._bars.refresh()
        assert "rollout 7" in output.getvalue()
        assert "1/2 dropped 1, in flight 1" in output.getvalue()
        observe(progress, stream.finished())
        assert progress._bars.task_ids == []
    assert str(SUMMARY) in output.getvalue()


def test_rollouts_and_an_evaluation_have_a_line_each() -> None:
    output, streams = StringIO(), [Stream(7), Stream(8), Stream(7, evaluation=True)]
    with Progress(terminal(output)) as progress:
        observe(progress, *(stream.started(target=0 if stream is streams[2] else 2) for stream in streams))
        observe(progress, *(stream.submitted() for stream in streams), streams[1].ended("kept"))
        assert progress._bars is not None
        progress._bars.refresh()
    lines = [line for line in output.getvalue().splitlines() if "in flight" in line]
    assert any("rollout 8" in line and "1/2 dropped 0, in flight 0" in line for line in lines)
    assert any("evaluation 7" in line and "0/? dropped 0, in flight 1" in line for line in lines)


def test_leaving_in_the_middle_leaves_no_thread_and_no_line() -> None:
    before, stream = threading.active_count(), Stream()
    progress = Progress(terminal(StringIO()))
    with progress:
        observe(progress, stream.started(), stream.submitted())
    assert threading.active_count() == before
    observe(progress, stream.submitted())


def test_events_of_a_rollout_that_began_before_are_passed_over() -> None:
    output, stream = StringIO(), Stream()
    with Progress(Console(file=output)) as progress:
        observe(progress, stream.submitted(), stream.ended("kept"), stream.finished())
    assert output.getvalue() == f"{SUMMARY}\n"


def test_it_has_to_be_entered() -> None:
    with pytest.raises(RuntimeError, match="Progress was not entered: use `with progress:`"):
        Progress().observe(Stream().started())
