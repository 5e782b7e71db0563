"""`Progress`: a live line per rollout under way, and one printed line per finished rollout."""

from __future__ import annotations

import time
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
    batch is; elsewhere it only prints the summaries, without control codes.

    :param console: a `rich.console.Console` to write to instead of standard output.
    """

    kinds = frozenset({"rollout_started", "group_submitted", "group_ended", "rollout_finished"})

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._bars: Bars | None = None
        self._next_drawing = 0.0
        self._lines: dict[tuple[int, bool], _Line] = {}

    def __enter__(self) -> Self:
        if self._console is None:
            from rich.console import Console

            self._console = Console()
        if self._console.is_terminal:
            self._bars = _new_bars(self._console)
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        bars, self._bars = self._bars, None
        self._lines.clear()
        if bars is not None:
            for task in bars.task_ids:
                bars.remove_task(task)
            bars.stop()

    def observe(self, event: Event) -> None:
        """:raises RuntimeError: it was not entered."""
        if self._console is None:
            raise RuntimeError("Progress was not entered: use `with progress:`, or give it to a Pipeline")
        key = (event.rollout_id, event.evaluation)
        match event:
            case RolloutStarted():
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
                self._console.print(text, markup=False, highlight=False, soft_wrap=True)
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
