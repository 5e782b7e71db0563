"""Test stages and pipelines without an engine and without waiting: `run_stage` and `virtual_time`.

Virtual time keeps these promises, on asyncio and trio alike. The clock moves only when every task waits, and then
straight to the next deadline, so that an hour of sleeping takes milliseconds and what is due at different times runs in
exactly that order. While something outside the loop is awaited, the clock stands still: a thread that takes 0.2 real
seconds takes no virtual time, and no timeout around it can fire.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import isawaitable
from types import MappingProxyType
from typing import Any, TypeVar

from eventbus.chain import settle
from eventbus.context import RolloutContext, _current
from eventbus.group import Batch, Group
from eventbus.imports import optional_dependency
from eventbus.sample import Sample
from eventbus.stage import CallNext, ContractError, Drop, Hold, bind

__all__ = ["run_stage", "virtual_time"]

Value = TypeVar("Value", Sample, Group, Batch)


async def run_stage(
    stage: Any,
    value: Value,
    *,
    rollout_id: int = 0,
    evaluation: bool = False,
    args: Any = None,
    sampling: Mapping[str, Any] = MappingProxyType({}),
    remaining: int = 1,
    target: int = 1,
    call_next: CallNext | None = None,
) -> Any:
    """Run one stage on a sample, group or batch as a pipeline would: bound, in its context, its return checked.

    The value is changed in place where the stage does so. What comes back is the sample (group, batch) that would go
    on, a list of children where the stage fans out, or the `Drop` or `Hold`.

    :param remaining: with `target` the running count for a filter.
    :param call_next: what a wrapper runs; default: nothing, the sample comes back as it is.
    :raises ContractError: the stage does not bind, or breaks its contract.
    :raises Exception: whatever the stage raises.
    """
    bound = bind(stage)
    if type(value).__name__.lower() != bound.level:
        raise ContractError(f"{bound.name!r} is a {bound.level} stage, it was given a {type(value).__name__}")
    offers = {"rollout_id": rollout_id, "evaluation": evaluation, "args": args, "sampling": sampling}
    context = RolloutContext(rollout_id, evaluation)
    context.stage = bound.name
    if isinstance(value, Sample):
        settle(value, bound.name)
        context.group_index, context.index, context.execution = value.group_index, value.index, value.rollout_id
    elif isinstance(value, Group):
        context.group_index = value.index
    call = bound.call({**offers, "remaining": remaining, "target": target})
    token = _current.set(context)
    try:
        if bound.wraps:
            result = await call(value, call_next or _unchanged)
        else:
            result = call(value)
            if isawaitable(result):
                result = await result
    finally:
        _current.reset(token)
    if result is None:
        result = value
    allowed: dict[str, tuple[type, ...]] = {"sample": (Sample, Drop), "group": (Group, Drop, Hold), "batch": (Batch,)}
    children = result if isinstance(result, list) and bound.fans_out else [result]
    for child in children:
        if not isinstance(child, allowed[bound.level]):
            expected = ", ".join(kind.__name__ for kind in allowed[bound.level])
            raise ContractError(f"stage {bound.name!r} returned {type(child).__name__}, expected None, {expected}")
        if isinstance(child, Sample):
            settle(child, bound.name)
    return result


async def _unchanged(sample: Sample) -> Sample:
    return sample


def virtual_time(backend: str) -> dict[str, Any]:
    """The arguments that make `anyio.run` use a virtual clock: `anyio.run(main, **virtual_time("asyncio"))`.

    The clock starts at 0 s. It stands still for worker threads (`anyio.to_thread`, `asyncio.to_thread`, executors),
    for processes that run, and for pipes and sockets that are waited on. It cannot see a bare `threading.Thread` that
    calls into the loop later. What is due at the same instant runs in the backend's order, which on trio is random.

    On asyncio a thread that was abandoned by a cancellation counts until it returns, and an open asyncio transport
    until it is closed (anyio's streams count only while they are read or written). `anyio.wait_all_tasks_blocked` may
    sleep there, which never ends while a thread is out: wait for an event instead.

    In anyio's pytest plugin the fixture `anyio_backend` returns `(backend, virtual_time(backend)["backend_options"])`.
    Call it for each run: on trio the arguments hold the clock itself.

    :param backend: "asyncio" or "trio".
    :raises ValueError: another backend.
    :raises LoadError: trio is not installed.
    """
    if backend == "asyncio":
        return {"backend": backend, "backend_options": {"loop_factory": _VirtualLoop}}
    if backend == "trio":
        with optional_dependency():
            from trio.testing import MockClock
        clock = MockClock()
        return {"backend": backend, "backend_options": {"clock": clock, "instruments": [_Jump(clock)]}}
    raise ValueError(f"no virtual time on {backend!r}: choose 'asyncio' or 'trio'")


class _VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop with a clock that jumps."""

    def __init__(self) -> None:
        # Private to anyio, and the only way to see a worker thread whose limiter is the user's own.
        from anyio._backends._asyncio import WorkerThread

        self._worker_type = WorkerThread
        self._virtual_now = 0.0
        self._held = 0
        self._processes: set[asyncio.SubprocessTransport] = set()
        selector = _JumpingSelector(self)
        super().__init__(selector)
        self._virtual_selector = selector
        self._own_files = len(selector.get_map())

    def time(self) -> float:
        return self._virtual_now

    def advance(self, seconds: float) -> None:
        self._virtual_now += seconds

    def waits_outside(self) -> bool:
        """Whether something that is not in this loop will wake it."""
        self._processes = {process for process in self._processes if process.get_returncode() is None}
        return bool(
            self._held
            or self._processes
            or len(self._virtual_selector.get_map()) > self._own_files
            or any(
                thread.loop is self and thread in thread.workers and thread not in thread.idle_workers
                for thread in threading.enumerate()
                if isinstance(thread, self._worker_type)
            )
        )

    @contextmanager
    def _hold(self) -> Iterator[None]:
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    def _release(self, future: asyncio.Future[Any]) -> None:
        self._held -= 1

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = super().run_in_executor(executor, func, *args)
        self._held += 1
        future.add_done_callback(self._release)
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        with self._hold():
            await super().shutdown_default_executor(*args)

    async def subprocess_exec(self, *args: Any, **kwargs: Any) -> Any:
        if args[-1] == "anyio.to_process":
            raise RuntimeError(
                "anyio.to_process keeps the pipes of its idle workers open, which would stop the virtual clock of "
                "asyncio for good: use run_in_executor with a ProcessPoolExecutor, or trio, or real time"
            )
        with self._hold():
            transport, protocol = await super().subprocess_exec(*args, **kwargs)
        self._processes.add(transport)
        return transport, protocol

    async def subprocess_shell(self, *args: Any, **kwargs: Any) -> Any:
        with self._hold():
            transport, protocol = await super().subprocess_shell(*args, **kwargs)
        self._processes.add(transport)
        return transport, protocol


class _JumpingSelector(selectors.DefaultSelector):
    """Where the loop would wait for a timer, it jumps; where it waits for something outside, it really waits."""

    def __init__(self, loop: _VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(0)
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None or self._loop.waits_outside():
            return super().select(None)
        self._loop.advance(timeout)
        return []


class _Jump:
    """A trio instrument that moves the clock when all tasks wait.

    Not `MockClock.autojump_threshold`: it jumps over threads and sockets, and can be turned off only for the round
    after the next.
    """

    _LONG = 3600.0  # real seconds; a MockClock never asks the loop to wait for a time between 0 and a day
    _WAITS = ("tasks_waiting_read", "tasks_waiting_write", "tasks_waiting_overlapped", "tasks_waiting")

    def __init__(self, clock: Any) -> None:
        self._clock = clock

    def before_io_wait(self, timeout: float) -> None:
        from trio.lowlevel import current_statistics, current_trio_token

        if timeout < self._LONG:
            return
        statistics = current_statistics()
        until_next = statistics.seconds_to_next_deadline
        if 0 < until_next < float("inf") and not self._waits_outside(statistics.io_statistics):
            self._clock.jump(until_next)
            # The wait was computed before the jump: end it at once.
            current_trio_token().run_sync_soon(_nothing, idempotent=True)

    def _waits_outside(self, io: Any) -> bool:
        from trio.testing import active_thread_count

        waiting = sum(getattr(io, name, 0) for name in self._WAITS)  # which of them there are depends on the platform
        return waiting > 1 or active_thread_count() > 0  # 1: trio's own wake-up socket


def _nothing() -> None:
    pass
