"""The pipeline for code without an event loop: it is entered, run and left in a loop of its own, in a thread."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from inspect import iscoroutine
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from anyio.from_thread import BlockingPortal, start_blocking_portal

from eventbus.group import Batch, EvalReport, TrainResult
from eventbus.imports import optional_dependency
from eventbus.prompts import PromptSource

if TYPE_CHECKING:
    from eventbus.pipeline import Pipeline, RolloutIterator

__all__ = ["SyncPipeline"]

T = TypeVar("T")


class SyncPipeline:
    """`with pipeline.sync() as stream: for batch in stream.rollouts(stop=100): stream.call(trainer.train, batch)`."""

    def __init__(self, pipeline: Pipeline, backend: str) -> None:
        if backend not in ("asyncio", "trio"):
            raise ValueError(f"backend={backend!r}: choose 'asyncio' or 'trio'")
        self._pipeline = pipeline
        self._backend = backend
        self._portal: BlockingPortal | None = None

    def __enter__(self) -> Self:
        """:raises RuntimeError: an event loop runs in this thread.
        :raises LoadError: trio is asked for and not installed.
        """
        if (running := _running_loop()) is not None:
            raise RuntimeError(
                f"pipeline.sync() is for code without an event loop, and {running} runs in this thread: "
                "use `async with pipeline: async for batch in pipeline.rollouts(...)`"
            )
        if self._backend == "trio":
            with optional_dependency():
                import trio  # noqa: F401
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal(self._backend))
            stack.enter_context(portal.wrap_async_context_manager(self._pipeline))
            self._portal, self._stack = portal, stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._portal = None
        return self._stack.__exit__(kind, error, trace)

    def rollouts(self, start: int = 0, stop: int | None = None, ahead: int = 0) -> Iterator[Batch]:
        """As `Pipeline.rollouts`."""
        return self._batches(self._pipeline.rollouts(start, stop, ahead))

    def _batches(self, batches: RolloutIterator) -> Iterator[Batch]:
        while True:
            try:
                batch = self.call(batches.__anext__)
            except StopAsyncIteration:
                return
            acknowledge = batch.__dict__["_acknowledge"]
            batch._acknowledge = partial(self._acknowledge, acknowledge)  # type: ignore[attr-defined]
            yield batch

    def _acknowledge(self, acknowledge: Callable[[TrainResult | None], None], result: TrainResult | None) -> None:
        """`batch.trained`, from any thread: observers are called in the pipeline's."""
        if self._portal is None or _running_loop() is not None:
            acknowledge(result)
        else:
            self.call(acknowledge, result)

    def evaluate(
        self, prompts: PromptSource, *, rollout_id: int, sampling: Mapping[str, Any] = MappingProxyType({})
    ) -> EvalReport:
        """As `Pipeline.evaluate`."""
        return self.call(partial(self._pipeline.evaluate, prompts, rollout_id=rollout_id, sampling=sampling))

    @overload
    def call(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T: ...
    @overload
    def call(self, function: Callable[..., T], *args: Any) -> T: ...
    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function, sync or async, in the pipeline's loop, and return what it returns.

        :raises RuntimeError: outside of `with`.
        :raises TypeError: it is a coroutine, which was called already.
        """
        if iscoroutine(function):
            function.close()
            raise TypeError(
                "stream.call takes a function and its arguments: stream.call(train, batch), not train(batch)"
            )
        if self._portal is None:
            raise RuntimeError("the pipeline is not entered: `with pipeline.sync() as stream: ...`")
        return self._portal.call(function, *args)


def _running_loop() -> str | None:
    try:
        asyncio.get_running_loop()
        return "asyncio"
    except RuntimeError:
        pass
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        return "trio"
    return None
