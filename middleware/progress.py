"""`Progress`: a live line per rollout under way, and one printed line per finished rollout."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from eventbus.events import Event, GroupEnded, GroupSubmitted, RolloutFinished, RolloutStarted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

__all__ = ["Progress"]

_INTERVAL: Final = 0.1
"""Seconds between two drawings. Events draw, so no thread is needed."""


class Progress:
    """An observer: `Pipeline(observers=[Progress()])`. On a terminal it shows, for every rollout under way, how far its
    batch is; elsewhere it only prints the summaries, without control codes. An output that is closed or full ends the
    display, not the rollout.

    :param console: a `rich.console.Console` to write to instead of standard output.
    """

    kinds = frozenset({"rollout_started", "group_submitted", "group_ended", "rollout_finished"})

    def __init__(self, console: Console | None = None) -> None:
        self._given = console
        self._console: Console | None = None
        self._entered = self._closed = False
        self._bars: Bars | None = None
        self._next_drawing = 0.0
        self._lines: dict[tuple[int, bool], _Line] = {}

    def __enter__(self) -> Self:
        """:raises RuntimeError: it is entered already: rollouts of two pipelines would be counted as one."""
        if self._entered:
            raise RuntimeError("this Progress is entered already: give each pipeline one of its own")
        self._console = self._given
        if self._console is None:
            from rich.console import Console

            self._console = Console(file=sys.stdout)
        self._closed = False
        with self._output():
            if self._console.is_terminal:
                self._bars = _new_bars(self._console)
                self._bars.start()
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        self._lines.clear()
        with self._output():
            self._stop_bars()

    @contextmanager
    def _output(self) -> Iterator[None]:
        """What is written in it may fail: then this was the last of it."""
        try:
            yield
        except (OSError, ValueError, SystemExit):  # rich answers a broken pipe with SystemExit
            self._console, self._closed = None, True
            with suppress(OSError, ValueError, SystemExit, IndexError):  # IndexError: they had not quite started
                self._stop_bars()

    def _stop_bars(self) -> None:
        bars, self._bars = self._bars, None
        if bars is not None:
            for task in bars.task_ids:
                bars.remove_task(task)
            bars.stop()

    def observe(self, event: Event) -> None:
        """:raises RuntimeError: it was never entered."""
        if self._console is None:
            if self._closed:
                return
            raise RuntimeError("Progress was not entered: use `with progress:`, or give it to a Pipeline")
        with self._output():
            self._show(event, self._console)

    def _show(self, event: Event, console: Console) -> None:
        key = (event.rollout_id, event.evaluation)
        match event:
            case RolloutStarted():
                if key in self._lines:  # two evaluations may have the same number
                    self._lines[key].close()
                self._lines[key] = _Line(self._bars, key, event.target)
            case GroupSubmitted() if key in self._lines:
                self._lines[key].submitted()
            case GroupEnded() if key in self._lines:
                self._lines[key].ended(event.outcome)
            case RolloutFinished():
                if key in self._lines:
                    self._lines.pop(key).close()
                text = _named(*key) if event.summary is None else str(event.summary)
                if event.error is not None:
                    text += f"; ended by {event.error}"
                console.print(_printable(text, console), markup=False, highlight=False, soft_wrap=True)
        if self._bars is not None and time.monotonic() >= self._next_drawing:
            self._bars.refresh()
            self._next_drawing = time.monotonic() + _INTERVAL


class _Line:
    """The counts of one rollout, shown in one line."""

    def __init__(self, bars: Bars | None, key: tuple[int, bool], target: int) -> None:
        self._bars = bars
        self._kept = self._dropped = self._in_flight = 0
        self._task: TaskID | None = None
        if bars is not None:
            self._task = bars.add_task(_named(*key), total=target or None, dropped=0, in_flight=0)

    def submitted(self) -> None:
        self._in_flight += 1
        self._show()

    def ended(self, outcome: str) -> None:
        self._in_flight -= 1
        self._kept += outcome == "kept"
        self._dropped += outcome == "dropped"
        self._show()

    def close(self) -> None:
        if self._bars is not None and self._task is not None:
            self._bars.remove_task(self._task)

    def _show(self) -> None:
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=self._kept, dropped=self._dropped, in_flight=self._in_flight)


def _named(rollout_id: int, evaluation: bool) -> str:
    return f"{'evaluation' if evaluation else 'rollout'} {rollout_id}"


def _printable(text: str, console: Console) -> str:
    """One line that the output can take: a reason or an error may hold what a model wrote."""
    text = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    encoding = getattr(console.file, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _new_bars(console: Console) -> Bars:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    return Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("dropped {task.fields[dropped]}, in flight {task.fields[in_flight]}"),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
    )
