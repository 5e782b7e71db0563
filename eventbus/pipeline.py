"""The face of the library: a `Pipeline` turns prompts into batches through stages.

    async with pipeline:
        async for batch in pipeline.rollouts(start=0, stop=100):
            result = await trainer.train(batch)
            batch.trained(result)

Building a pipeline opens nothing; everything it starts lives inside `async with`, in one task group, and is gone when
that ends. `eventbus.rollout` is where a batch comes about.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from contextvars import copy_context
from functools import partial
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio
from anyio.abc import TaskGroup

from eventbus.batching import BatchSpec
from eventbus.context import _hub
from eventbus.group import Batch, EvalReport, TrainResult
from eventbus.observers import EventHub, EventStream, Observer
from eventbus.prompts import PromptSource
from eventbus.rollout import Rollout, Runtime, Waiting
from eventbus.stage import bind_all
from eventbus.watchdog import Watchdog
from eventbus.workers import Exiting, WorkerDied, WorkerPool

if TYPE_CHECKING:
    from eventbus.sync import SyncPipeline

__all__ = ["Pipeline", "RolloutIterator"]

logger = logging.getLogger("rolloutbus")


class Pipeline:
    """Prompts, stages and a batch, joined.

    :param prompts: where prompts come from, and how many executions each gets.
    :param stages: in the order in which data flows: sample stages, then group stages, then batch stages.
    :param batch: how a batch is filled.
    :param observers: who gets the events.
    :param args: handed to stages that ask for `args`, and to hooks `(args, sample)`.
    :param stall_after: seconds without any progress after which the watchdog says what is waited for; None for no
        watchdog.
    :raises ContractError: a stage does not bind; says which and why.
    :raises ValueError: numbers that cannot work together.
    """

    def __init__(
        self,
        prompts: PromptSource,
        stages: Sequence[Any],
        batch: BatchSpec,
        *,
        observers: Sequence[Observer] = (),
        args: Any = None,
        stall_after: float | None = 60.0,
    ) -> None:
        _check_source(prompts)
        if not isinstance(batch, BatchSpec):
            raise TypeError(f"batch is a {type(batch).__name__}: pass BatchSpec(groups=32)")
        if batch.min_group_size is not None and batch.min_group_size > prompts.group_size:
            raise ValueError(
                f"BatchSpec(min_group_size={batch.min_group_size}) is more than the group_size={prompts.group_size}"
            )
        if stall_after is not None and not stall_after > 0:
            raise ValueError(f"stall_after={stall_after}: seconds, more than 0, or None for no watchdog")
        self.prompts = prompts
        self.batch = batch
        self.stages = bind_all(stages)
        self._observers = list(observers)
        self._hub = EventHub(self._observers)
        self._args = args
        self._stall_after = stall_after
        self._waiting = Waiting()
        self._executions = itertools.count()
        self._streams: list[EventStream] = []
        self._rollouts: list[Rollout] = []
        self._iterator: RolloutIterator | None = None
        self._weight_version: str | None = None
        self._engine_tells = False
        """An engine has said that it has new weights: from then on only that counts."""
        self._at = 0
        """The rollout that events outside of any rollout belong to."""
        self._runtime: Runtime | None = None
        self._task_group: TaskGroup | None = None

    # Its life

    async def __aenter__(self) -> Self:
        """:raises RuntimeError: it is entered already."""
        if self._task_group is not None:
            raise RuntimeError("this pipeline is entered already; build a second one to run side by side")
        async with AsyncExitStack() as stack:
            self._hub.open()
            for observer in self._observers:
                if (attach := getattr(observer, "attach", None)) is not None:
                    attach(self)
            for part in self._parts():
                if hasattr(part, "__aenter__"):
                    await stack.enter_async_context(part)
                else:
                    stack.enter_context(part)
                if (listeners := getattr(part, "on_weights_updated", None)) is not None:
                    listeners.append(self._weights_updated)
                    stack.callback(listeners.remove, self._weights_updated)
            task_group = await stack.enter_async_context(_Workers())
            context = copy_context()
            context.run(_hub.set, self._hub)
            runtime = self._runtime = Runtime(
                pool=WorkerPool(task_group),
                hub=self._hub,
                context=context,
                stages=self.stages,
                waiting=self._waiting,
                args=self._args,
                next_execution=self._executions.__next__,
            )
            self._hub.hold, self._hub.stop = runtime.pool.slice.hold, self._stop
            if self._stall_after is not None:
                stack.enter_context(Watchdog(runtime, self._rollouts, self._stall_after))
            self._task_group = task_group
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._task_group is not None
        for rollout in self._rollouts:  # what they have under way is asked again when the pipeline is entered again
            rollout.give_up()
        try:
            return await self._stack.__aexit__(kind, error, trace)
        finally:
            for stream in self._streams:
                stream.close()
            self._streams.clear()
            self._rollouts.clear()
            self._task_group = self._runtime = self._iterator = self._hub.hold = self._hub.stop = None

    def _parts(self) -> list[Any]:
        """Observers, stages and engines that want to be opened and closed, each once."""
        parts: dict[int, Any] = {}
        candidates: list[Any] = list(self._observers)
        for stage in self.stages:
            function: Any = stage.function
            while function is not None:
                candidates += [getattr(function, name, None) for name in ("engine", "judge", "__self__")]
                candidates.append(function)
                function = getattr(function, "__wrapped__", None) or getattr(function, "func", None)
        for part in candidates:
            if hasattr(type(part), "__aenter__") or hasattr(type(part), "__enter__"):
                parts.setdefault(id(part), part)
        return list(parts.values())

    # What it gives

    def rollouts(self, start: int = 0, stop: int | None = None, ahead: int = 0) -> RolloutIterator:
        """The batches of rollouts `start` to `stop` (exclusive; None for as long as there are prompts), in order.

        Asking for the next batch acknowledges the one before. Nothing of the next rollout is submitted before that,
        unless `ahead` is more than 0: then so many rollouts may be under way beyond the one that was not acknowledged,
        generated with weights that are up to `ahead` updates older.

        A new iterator takes the place of the one before: what that had under way is asked again.

        :raises ValueError: `ahead` is below 0, or `stop` below `start`.
        """
        if ahead < 0:
            raise ValueError(f"ahead={ahead}: must be at least 0")
        if stop is not None and stop < start:
            raise ValueError(f"rollouts(start={start}, stop={stop}): stop is below start")
        return RolloutIterator(self, start, stop, ahead)

    async def evaluate(
        self, prompts: PromptSource, *, rollout_id: int, sampling: Mapping[str, Any] = MappingProxyType({})
    ) -> EvalReport:
        """One pass of a finite source through the sample stages, beside whatever else runs.

        No over-sampling, no group or batch stages; hooks see `evaluation=True`. A group with a dropped or failed
        sample is missing from the report and counted in its summary.

        :param sampling: changes to the sampling parameters of `Generate`.
        :raises RuntimeError: the pipeline is not entered.
        """
        _check_source(prompts)
        rollout = Rollout(self._running, rollout_id, prompts, self.batch, evaluation=True, sampling=sampling)
        self._begin(rollout)
        try:
            await rollout.done.wait()
            batch = rollout.result()
        finally:
            rollout.give_up()
            if rollout in self._rollouts:
                self._rollouts.remove(rollout)
        assert batch is not None
        return EvalReport(rollout_id, batch.groups, batch.summary)

    def events(self, kinds: Collection[str] | None = None, *, capacity: int = 10_000) -> EventStream:
        """An async iterator over events from now on; all kinds, or those named.

        :param capacity: unread events that it holds; later ones are skipped and counted in its `missed`.
        :raises ValueError: there is no such kind.
        """
        stream = EventStream(self._hub, kinds, capacity)
        self._streams.append(stream)
        return stream

    def sync(self, backend: str = "asyncio") -> SyncPipeline:
        """For code without a loop: `with pipeline.sync() as stream: for batch in stream.rollouts(stop=100): ...`."""
        from eventbus.sync import SyncPipeline

        return SyncPipeline(self, backend)

    # For the iterator

    @property
    def _running(self) -> Runtime:
        if self._runtime is None:
            raise RuntimeError("the pipeline is not entered: `async with pipeline: ...` (or `with pipeline.sync()`)")
        return self._runtime

    def _begin(self, rollout: Rollout) -> None:
        assert self._task_group is not None
        self._rollouts.append(rollout)
        self._task_group.start_soon(rollout.run, name=f"rolloutbus rollout {rollout.id}")

    def _trained(self, batch_id: int, result: TrainResult | None) -> None:
        result = result or TrainResult()
        version = result.weight_version
        self._hub.emit("batch_trained", batch_id, False, metrics=result.metrics, weight_version=version)
        if version is not None and version != self._weight_version and not self._engine_tells:
            self._weight_version = version
            self._hub.emit("weights_updated", batch_id, False, version=version)

    def _weights_updated(self, *, version: str, **how: Any) -> None:
        """An engine has new weights: one of those that were opened here."""
        said = not self._engine_tells and version == self._weight_version  # by `batch.trained`
        self._engine_tells, self._weight_version = True, version
        if not said:
            self._hub.emit("weights_updated", self._at, False, version=version, **how)

    def _stop(self, rollout_id: int, evaluation: bool, error: Exception) -> None:
        """An observer has failed at an event of this rollout. Where that is over, those under way end in its place."""
        rollouts = [each for each in self._rollouts if (each.id, each.evaluation) == (rollout_id, evaluation)]
        for rollout in rollouts or self._rollouts:
            rollout.stop(error)
        if not self._rollouts:
            logger.error("an observer failed when no rollout was under way: %r", error, exc_info=error)


class RolloutIterator:
    """`pipeline.rollouts(...)`. Leaving the loop needs no cleanup."""

    def __init__(self, pipeline: Pipeline, start: int, stop: int | None, ahead: int) -> None:
        self._pipeline = pipeline
        self._next = start
        self._stop = stop
        self._ahead = ahead
        self._open: deque[Rollout] = deque()
        self._delivered: Batch | None = None
        self._busy = False
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        """:raises RolloutExhausted: rounds or prompts ran out.
        :raises ExceptionGroup: more samples failed than `max_failures` allows.
        :raises ContractError: a stage broke its contract.
        """
        if self._busy:
            raise RuntimeError("another task is already waiting for the next batch of this iterator")
        self._busy = True
        try:
            return await self._batch()
        finally:
            self._busy = False

    async def _batch(self) -> Batch:
        pipeline = self._pipeline
        runtime = pipeline._running
        if self._delivered is not None:
            self._acknowledge(self._delivered)
        if pipeline._iterator is not self:
            other, pipeline._iterator = pipeline._iterator, self
            pipeline._at = self._next
            if other is not None:
                await other._give_up()
        while not self._ended and len(self._open) <= self._ahead and (self._stop is None or self._next < self._stop):
            before = self._open[-1] if self._open else None
            rollout = Rollout(runtime, self._next, pipeline.prompts, pipeline.batch, after=before)
            self._next += 1
            self._open.append(rollout)
            pipeline._begin(rollout)
        if not self._open:
            raise StopAsyncIteration
        rollout = self._open[0]
        await rollout.done.wait()
        if pipeline._iterator is not self:
            raise RuntimeError("another iterator of this pipeline has taken the place of this one")
        self._open.popleft()
        pipeline._rollouts.remove(rollout)
        batch = rollout.result()
        if batch is None:  # the prompts have ended
            self._ended = True
            await self._give_up()
            raise StopAsyncIteration
        batch._acknowledge = partial(pipeline._trained, batch.rollout_id)  # type: ignore[attr-defined]
        self._delivered = batch
        pipeline._at = batch.rollout_id
        return batch

    def _acknowledge(self, batch: Batch) -> None:
        self._delivered = None
        if "_acknowledge" in batch.__dict__:
            batch.trained()

    async def _give_up(self) -> None:
        """End what is under way; its groups wait for whoever asks next."""
        rollouts, self._open = self._open, deque()
        for rollout in rollouts:
            rollout.give_up()
        for rollout in rollouts:
            await rollout.done.wait()
            self._pipeline._rollouts.remove(rollout)


class _Workers:
    """A task group that ends with its owner and does not wrap errors: one error leaves as itself."""

    async def __aenter__(self) -> TaskGroup:
        self._task_group = anyio.create_task_group()
        return await self._task_group.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        scope = self._task_group.cancel_scope
        ended_by_a_task = scope.cancel_called
        scope.cancel()
        try:
            swallowed = await self._task_group.__aexit__(kind, error, trace)
            if ended_by_a_task:  # and none of them raised
                raise WorkerDied("a task of the pipeline was cancelled from outside before it began")
            return swallowed
        except BaseExceptionGroup as group:
            for each in group.exceptions:
                if isinstance(each, Exiting) and each.__cause__ is not None:
                    raise each.__cause__ from error
            others = [each for each in group.exceptions if each is not error]
            if not others:
                return False  # the body's own error: it goes on as itself
            if len(others) == 1:
                raise others[0] from error
            raise


def _check_source(prompts: Any) -> None:
    if not (hasattr(prompts, "take") and hasattr(prompts, "group_size")):
        raise TypeError(f"prompts is a {type(prompts).__name__}: wrap it, Prompts(..., group_size=8)")
    if prompts.group_size < 1:
        raise ValueError(f"group_size={prompts.group_size}: must be at least 1")
