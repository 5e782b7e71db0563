from __future__ import annotations

import sys
import threading
from io import BytesIO, StringIO, TextIOWrapper
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


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_output_that_is_closed_ends_the_display_and_nothing_else(is_terminal: bool) -> None:
    output, stream = StringIO(), Stream()
    with Progress(Console(file=output, force_terminal=is_terminal)) as progress:
        observe(progress, stream.started())
        output.close()
        observe(progress, stream.submitted(), stream.finished(), stream.finished())


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_broken_pipe_does_not_end_the_program(is_terminal: bool) -> None:
    class BrokenPipe(StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    class Exiting(Console):
        def on_broken_pipe(self) -> None:  # as in rich, which also redirects the standard output
            self.quiet = True
            raise SystemExit(1)

    stream = Stream()
    with Progress(Exiting(file=BrokenPipe(), force_terminal=is_terminal)) as progress:
        observe(progress, stream.started(), stream.submitted(), stream.finished())


def test_the_error_of_the_body_comes_out_when_the_output_is_closed() -> None:
    output, out = StringIO(), sys.stdout
    with pytest.raises(KeyError), Progress(terminal(output)) as progress:
        observe(progress, Stream().started())
        output.close()
        raise KeyError
    assert sys.stdout is out


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "\xe9"), ("ascii", "\\xe9")])
def test_what_cannot_be_printed_is_escaped_and_stays_on_its_line(encoding: str, shown: str) -> None:
    output = TextIOWrapper(BytesIO(), encoding=encoding)
    with Progress(Console(file=output)) as progress:
        observe(progress, Stream().finished(None, error="ValueError: \x1b[31m\r\n\ud800 caf\xe9"))
        output.flush()
        assert isinstance(output.buffer, BytesIO)
        line = output.buffer.getvalue().decode(encoding)
    assert line == rf"rollout 7; ended by ValueError: \x1b[31m\r\n\ud800 caf{shown}" + "\n"


def test_it_belongs_to_one_pipeline_at_a_time() -> None:
    out, progress = sys.stdout, Progress(terminal(StringIO()))
    for _ in range(2):
        with progress, pytest.raises(RuntimeError, match="entered already: give each pipeline one of its own"):
            progress.__enter__()
        assert sys.stdout is out


def test_two_evaluations_of_the_same_number_leave_no_line() -> None:
    stream = Stream(evaluation=True)
    with Progress(terminal(StringIO())) as progress:
        observe(progress, stream.started(), stream.started(), stream.finished(), stream.finished())
        assert progress._bars is not None
        assert progress._bars.task_ids == []


def test_it_has_to_be_entered() -> None:
    with pytest.raises(RuntimeError, match="Progress was not entered: use `with progress:`"):
        Progress().observe(Stream().started())
