"""A thread that says what a silent pipeline waits for, and which stage holds the event loop.

It looks from outside the loop, so it also sees a loop that is blocked. It logs to the logger `rolloutbus` as a warning
and is joined when the pipeline is left.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from time import perf_counter
from types import TracebackType
from typing import Any, Final, Self

from eventbus.rollout import Rollout, Runtime
from eventbus.work import GroupJob, SampleJob

__all__ = ["BLOCKED_AFTER", "Watchdog", "stall_report"]

logger = logging.getLogger("rolloutbus")

BLOCKED_AFTER: Final = 0.25
"""Seconds for which a stage may hold the event loop before it is named."""

_NAMED: Final = 5
"""Samples that a report lists."""


class Watchdog:
    """Watches one entered pipeline until it is left."""

    def __init__(self, runtime: Runtime, rollouts: Sequence[Rollout], stall_after: float) -> None:
        self._runtime = runtime
        self._rollouts = rollouts
        self._stall_after = stall_after
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rolloutbus watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._loop_thread = threading.get_ident()
        self._call_soon = _loop_caller()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        """The thread: every tick it asks the loop for a sign of life, and looks at what it does until it answers."""
        tick = min(BLOCKED_AFTER, self._stall_after) / 2
        activity, since = -1, perf_counter()
        asked: float | None = None
        answered = threading.Event()
        named: Any = None
        while not self._over.wait(tick):
            now = perf_counter()
            if self._runtime.activity != activity:
                activity, since = self._runtime.activity, now
            if asked is not None and answered.is_set():
                asked = named = None
                answered.clear()
            if asked is None:
                asked = now
                try:
                    self._call_soon(answered.set)
                except RuntimeError:  # the loop is closed
                    return
            elif now - asked > BLOCKED_AFTER:
                job, started = self._runtime.pool.slice.running, self._runtime.pool.slice.started
                if job is not None and named != (id(job), started) and now - started > BLOCKED_AFTER:
                    named = (id(job), started)
                    logger.warning(
                        "stage %r holds the event loop for %.2f s at %s: wrap it, in_thread(%s)\n%s",
                        job.context.stage, now - started, job.describe(), job.context.stage, self._stack(),  # type: ignore[attr-defined]
                    )  # fmt: skip
                elif job is None and named is None and now - asked > self._stall_after:
                    named = "outside"
                    logger.warning(
                        "the event loop is held for %.1f s, by no stage of the pipeline:\n%s",
                        now - asked,
                        self._stack(),
                    )
            if now - since > self._stall_after and named is None:
                since = now
                self._call_soon(self._report)

    def _report(self) -> None:
        """On the loop: name what is waited for."""
        if report := stall_report(self._rollouts):
            logger.warning("nothing has happened for %g s; waiting for:\n%s", self._stall_after, report)

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        return "".join(traceback.format_stack(frame, limit=8)) if frame is not None else ""


def stall_report(rollouts: Sequence[Rollout]) -> str:
    """A line for each thing that a rollout under way waits for, the oldest first; empty when none is under way."""
    now = perf_counter()
    lines: list[str] = []
    for rollout in rollouts:
        if rollout.done.is_set():
            continue
        if rollout.waits_for is not None:
            lines.append(f"  rollout {rollout.id}: {rollout.waits_for}")
        jobs = [job for work in rollout.works.values() for job in work.jobs if job.context.stage is not None]
        jobs.sort(key=lambda job: job.context.since)
        lines += [_line(job, now) for job in jobs[:_NAMED]]
        if len(jobs) > _NAMED:
            lines.append(f"  rollout {rollout.id}: and {len(jobs) - _NAMED} more")
    return "\n".join(lines)


def _line(job: SampleJob | GroupJob, now: float) -> str:
    place = job.context
    holder = place.holder or (place.engine and f"engine {type(place.engine).__name__}")
    held = f", held by {holder}" if holder else ""
    return f"  {job.describe()}: in stage {place.stage!r} for {now - place.since:.1f} s{held}"


def _loop_caller() -> Callable[[Callable[[], Any]], Any]:
    try:
        return asyncio.get_running_loop().call_soon_threadsafe
    except RuntimeError:
        import trio

        return trio.lowlevel.current_trio_token().run_sync_soon
