"""Who runs the stages: a queue of jobs and a pool of workers that grows only as far as jobs wait.

What it keeps true:

- A job is run once, by one worker, in the order in which it was put.
- While there are jobs, one worker is awake and looking, never more: a put wakes one parked worker or starts one, and a
  worker that takes a job while others wait wakes the next. So the pool has as many workers as jobs are suspended at the
  same time, plus one, and a put costs the same at 8 workers and at 4,096. (Workers parked on one shared stream would
  all be woken by each item.)
- Each job runs in a copy of the context that is its own: what a stage sets there reaches no other job.
- Nobody holds the event loop longer than `SLICE` between two stages: whoever has used it up waits for its turn, and one
  worker gets its turn per pass of the loop.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context
from time import perf_counter
from types import GeneratorType, coroutine
from typing import Any, Final, Protocol

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from eventbus.context import RolloutContext

__all__ = ["SLICE", "Exiting", "Job", "TimeSlice", "Worker", "WorkerDied", "WorkerPool"]

SLICE: Final = 0.001
"""Seconds of work between two passes of the event loop."""


class Job(Protocol):
    """What a worker runs. While it runs `worker` is set: cancelling that ends the job, and the worker with it."""

    worker: Worker | None
    context: RolloutContext

    def run(self) -> Coroutine[Any, Any, None] | None:
        """Do it; what is left to await, if anything."""

    def died(self, error: BaseException) -> None:
        """The job ended by something that is no error of a stage: say so to whoever waits for it."""


class Worker:
    """One task of the pool, and the way to end it in the middle of a job."""

    __slots__ = ("cancelled", "number", "scope")

    def __init__(self, number: int) -> None:
        self.number = number
        self.scope = anyio.CancelScope()
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        self.scope.cancel()

    def is_done_with(self, job: Job, error: BaseException) -> bool:
        """A job ended by an error that is no failure of a stage. Whether the error goes no further."""
        if self.cancelled:
            return _is_ordinary(error)  # what a cancelled job raises on its way out interests nobody
        if not _pool_is_cancelled(error):
            job.died(error)
        return is_native_cancellation(error)


class WorkerDied(RuntimeError):
    """A worker was ended from outside while it worked for a sample."""


class Exiting(BaseException):
    """Carries the SystemExit that is its cause out of a task of the pipeline, whose end raises that.

    From a task itself asyncio would let it out of the loop at once, and nothing would be shut down.
    """


class TimeSlice:
    """The share of the loop that all workers have together, and what runs in it now."""

    __slots__ = ("_drained", "_length", "_queue", "_taken", "end", "running", "started", "stopped")

    def __init__(self) -> None:
        self._length = math.inf if _virtual_time() else SLICE
        self._drained: Callable[[], Awaitable[None]] | None = None
        self.end = 0.0
        """`perf_counter()` at which the slice is used up."""
        self.running: Job | None = None
        """Whose code holds the loop now; read by the watchdog's thread."""
        self.started = 0.0
        self.stopped = 0.0
        self._taken = False
        self._queue: deque[anyio.Event] = deque()

    async def turn(self) -> None:
        """Let the loop run what else is due, then begin a new slice. Callers get their turn one by one."""
        if self._taken:
            mine = anyio.Event()
            self._queue.append(mine)
            try:
                await mine.wait()
            except BaseException:
                if mine.is_set():
                    self._pass_on()
                else:
                    self._queue.remove(mine)
                raise
        self._taken = True
        try:
            await checkpoint()
            if self._drained is not None:
                await self._drained()
                self._drained = None
        finally:
            self._pass_on()
        self.end = self._next_end()

    def hold(self, drained: Callable[[], Awaitable[None]]) -> None:
        """Whoever is next between two stages awaits `drained`, and the others queue behind."""
        self._drained, self.end = drained, -math.inf

    def _next_end(self) -> float:
        return -math.inf if self._drained is not None else perf_counter() + self._length

    def _pass_on(self) -> None:
        if self._queue:
            self._queue.popleft().set()
        else:
            self._taken = False

    async def isolated(self, context: Context, job: Job, task: Coroutine[Any, Any, Any]) -> Any:
        """Run `task` inside `context`, step by step, noting for the watchdog what runs and since when."""
        outcome = self.begin(context, job, task)
        return await outcome if type(outcome) is GeneratorType else outcome  # type: ignore[misc]

    def begin(self, context: Context, job: Job, task: Coroutine[Any, Any, Any]) -> Any:
        """As `isolated`, up to where the task first waits: what it returned, or a generator to await for the rest.

        Most chains never wait when their engine is quick, and a coroutine that is not made costs nothing.
        """
        self._enter(job)
        try:
            yielded = context.run(task.send, None)
        except StopIteration as stop:
            return stop.value
        except anyio.get_cancelled_exc_class() as error:
            if (other := _told_apart(error, job)) is error:
                raise
            raise other from error
        finally:
            self.running = None
            self.stopped = perf_counter()
        return self._rest(context, job, task, yielded)

    @coroutine
    def _rest(
        self, context: Context, job: Job, task: Coroutine[Any, Any, Any], yielded: Any
    ) -> Generator[Any, Any, Any]:
        run, send, throw = context.run, task.send, task.throw
        received: list[Any] = []  # not kept in a variable: on trio it may be an error, and see below
        while True:
            error: BaseException | None = None
            try:
                received.append((yield yielded))
            except BaseException as thrown:  # a cancellation or an injected error: the task's own to handle
                error = thrown
            self._enter(job)
            try:
                yielded = run(send, received.pop()) if error is None else run(throw, error)
            except StopIteration as stop:
                return stop.value
            except anyio.get_cancelled_exc_class() as cancelled:
                if (other := _told_apart(cancelled, job)) is cancelled:
                    raise
                raise other from cancelled
            finally:
                self.running = error = None  # a kept error keeps, by its traceback, this frame and all that hangs on it
                self.stopped = perf_counter()

    def _enter(self, job: Job) -> None:
        self.started = now = perf_counter()
        if now - self.stopped > SLICE:  # others had the loop in between
            self.end = self._next_end()
        self.running = job


class WorkerPool:
    """Runs jobs in `task_group`, whose cancellation ends all workers."""

    def __init__(self, task_group: TaskGroup) -> None:
        self._task_group = task_group
        self._jobs: deque[Job] = deque()
        self._parked: list[_Parking] = []
        self._awake = 0  # workers that are on their way to look for a job
        self.workers = 0
        self._numbers = itertools.count()
        self.slice = TimeSlice()

    def put(self, job: Job) -> None:
        self._jobs.append(job)
        if not self._awake:
            self._call()

    def _call(self) -> None:
        self._awake += 1
        if self._parked:
            parking = self._parked.pop()
            parking.woken = True
            parking.event.set()
        else:
            self.workers += 1
            self._task_group.start_soon(self._work, name="rolloutbus worker")

    async def turn(self) -> None:
        """As `TimeSlice.turn`; meanwhile this worker counts as one that is awake."""
        self._awake += 1
        try:
            await self.slice.turn()
        finally:
            self._awake -= 1
            if self._jobs and not self._awake:  # it may go on to wait in the middle of its job
                self._call()

    async def _work(self) -> None:
        jobs, time_slice = self._jobs, self.slice
        looking = True  # counted in _awake
        worker = Worker(next(self._numbers))
        try:
            with worker.scope:
                while not worker.cancelled:
                    if not jobs:
                        if looking:
                            self._awake -= 1
                            looking = False
                        try:
                            looking = await self._park()
                        except BaseException as error:
                            if is_native_cancellation(error):
                                break  # an idle worker is missed by nobody
                            raise
                        continue
                    job = jobs.popleft()
                    if looking:
                        self._awake -= 1
                        looking = False
                    if jobs and not self._awake:
                        self._call()
                    job.worker = worker
                    try:
                        waiting = job.run()
                        if waiting is not None:
                            await waiting
                    except BaseException as error:
                        if worker.is_done_with(job, error):
                            break
                        if isinstance(error, SystemExit):
                            raise Exiting from error
                        raise
                    finally:
                        job.worker = None
                    del job, waiting  # a parked worker keeps nothing alive
                    if time_slice.stopped > time_slice.end:
                        await self.turn()
        finally:
            self.workers -= 1
            if looking:
                self._awake -= 1
            if worker.cancelled and jobs and not self._awake:
                self._call()

    async def _park(self) -> bool:
        """Wait until called. Whether this worker counts as awake afterwards."""
        parking = _Parking()
        self._parked.append(parking)
        try:
            await parking.event.wait()
        except BaseException:
            if parking.woken:
                self._awake -= 1
            else:
                self._parked.remove(parking)
            raise
        return True


class _Parking:
    __slots__ = ("event", "woken")

    def __init__(self) -> None:
        self.event = anyio.Event()
        self.woken = False


def _told_apart(error: BaseException, job: Job) -> BaseException:
    """A cancellation that nobody asked of this task, as from awaiting a future that was cancelled, is a failure."""
    if _pool_is_cancelled(error):
        return error
    try:
        task = asyncio.current_task()
    except RuntimeError:  # trio: a cancellation always comes from a scope
        return error
    if task is None or task.cancelling():
        return error
    return RuntimeError(f"stage {job.context.stage!r} was cancelled from inside: it awaited something cancelled")


def _pool_is_cancelled(error: BaseException) -> bool:
    """The error is a cancellation of a scope around this task, not of the task alone."""
    return isinstance(error, anyio.get_cancelled_exc_class()) and anyio.current_effective_deadline() == -math.inf


def is_native_cancellation(error: BaseException) -> bool:
    """This task alone was cancelled, not a scope around it. Passed on, that would end the task group in silence."""
    return isinstance(error, asyncio.CancelledError) and not _pool_is_cancelled(error)


def _is_ordinary(error: BaseException) -> bool:
    """No KeyboardInterrupt or the like, nor a bare cancellation, which belongs to its scope."""
    if isinstance(error, BaseExceptionGroup):
        return error.split((Exception, anyio.get_cancelled_exc_class()))[1] is None
    return isinstance(error, Exception)


def _virtual_time() -> bool:
    """Whether the loop's clock is a test's. Then order must not depend on how fast this machine is."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # trio
        import trio

        return type(trio.lowlevel.current_clock()).__name__ == "MockClock"
    return abs(loop.time() - time.monotonic()) > 1
