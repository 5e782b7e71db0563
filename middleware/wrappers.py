"""Wrap a stage: `limit`, `timeout`, `retry`, `in_thread`, in any nesting: `limit(timeout(ask_judge, 30), 64)`.

A wrapped stage is to the pipeline what the stage inside it is: same name, level, policy and parameters. It is always
async, and called like the stage inside: `await limit(ask_judge, 64)(sample, rollout_id=1)`.

`timeout`, `retry` and `in_thread` run the stage on a copy, which takes the place of the original when the stage returns
None. So a failed attempt or an abandoned thread never touches the sample that goes on; what they must not do is write
into tensors and other objects that a sample holds, which a copy shares (`Sample.copy`): they put new ones in their
place. Whatever ends the wait for a slot of `limit`, no slot stays taken.
"""

from __future__ import annotations

import copy
import inspect
import math
import operator
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from inspect import isawaitable
from threading import get_ident
from typing import Any

import anyio

from eventbus.context import RolloutContext, current_rollout
from eventbus.group import Batch, Group
from eventbus.sample import Sample, copied
from eventbus.stage import ContractError, DeclaredStage, Dropped, Stage, bind

__all__ = ["in_thread", "limit", "retry", "timeout"]


def limit(stage: Callable[..., Any], n: int) -> DeclaredStage:
    """At most `n` calls of `stage` at the same time, in all rollouts together; the others wait their turn in order.

    Around a stage with `call_next` it limits all that comes after it. It serves one thread at a time: pipelines that
    run in several need one each.

    :raises ValueError: `n` is less than 1.
    :raises TypeError: `n` is no whole number.
    :raises ContractError: `stage` does not bind, see `eventbus.stage.bind`.
    """
    n = at_least_one("limit: n", n)
    inner = bind(stage, "limit(...)")
    slots = Slots(n, "limit({0}): {0} in use")

    async def limited(*args: Any, **kwargs: Any) -> Any:
        await slots.acquire()
        try:
            result = inner.function(*args, **kwargs)
            return await result if isawaitable(result) else result
        finally:
            slots.release()

    return _like(stage, inner, limited)


def timeout(stage: Callable[..., Any], seconds: float) -> DeclaredStage:
    """Give up `stage` when it takes longer than `seconds`, counted from its start: waiting in a `limit` around it is
    not counted.

    A plain function cannot be interrupted on the event loop: it fails when it is done. `timeout(in_thread(f), seconds)`
    goes on at once and leaves the thread behind.

    :raises TimeoutError: when called: it took longer.
    :raises ValueError: `seconds` is not more than 0.
    :raises ContractError: `stage` does not bind, or has `call_next`.
    """
    if not seconds > 0:
        raise ValueError(f"timeout: seconds is {seconds}, it must be more than 0")
    inner = _plain(stage, "timeout")

    async def timed(*args: Any, **kwargs: Any) -> Any:
        args, value = _on_copy(inner, args)
        with anyio.move_on_after(seconds) as scope:
            result = inner.function(*args, **kwargs)
            if isawaitable(result):
                result = await result
            elif anyio.current_time() > scope.deadline:
                raise TimeoutError(
                    f"{_too_long(inner, value, seconds)} and blocked the event loop: it is a plain function, use "
                    f"timeout(in_thread({inner.name}), {seconds:g})"
                )
            return value if result is None else result
        raise TimeoutError(_too_long(inner, value, seconds))

    return _like(stage, inner, timed, transparent=False)  # it may raise what the stage does not


def retry(
    stage: Callable[..., Any],
    attempts: int = 3,
    on: type[Exception] | tuple[type[Exception], ...] = (Exception,),
    wait: float = 0.1,
) -> DeclaredStage:
    """Call `stage` again, up to `attempts` times in all, when it raises one of `on`; the last error goes on.

    A sample that was dropped, a broken contract and a cancellation are never retried.

    :param wait: seconds before the second attempt; doubled before each further one.
    :raises ValueError: `attempts` is less than 1, or `wait` less than 0 or without end.
    :raises TypeError: `attempts` is no whole number, or `on` holds something that is no subclass of Exception.
    :raises ContractError: `stage` does not bind, or has `call_next`.
    """
    attempts = at_least_one("retry: attempts", attempts)
    if not 0 <= wait < math.inf:
        raise ValueError(f"retry: wait is {wait}, it must not be less than 0, nor without end")
    kinds: tuple[Any, ...] = on if isinstance(on, tuple) else (on,)
    for kind in kinds:
        if not (inspect.isclass(kind) and issubclass(kind, Exception)):
            raise TypeError(f"retry: on takes subclasses of Exception, got {kind!r}; a cancellation is never retried")
    inner = _plain(stage, "retry")

    async def retried(*args: Any, **kwargs: Any) -> Any:
        failures: list[str] = []
        pause = wait
        while True:
            mine, value = _on_copy(inner, args)
            try:
                result = inner.function(*mine, **kwargs)
                if isawaitable(result):
                    result = await result
                return value if result is None else result
            except (Dropped, ContractError):
                raise
            except kinds as error:
                failures.append(f"{type(error).__name__}: {error}")
                if len(failures) == attempts:
                    if attempts > 1:
                        error.add_note(f"retry: the last of {attempts} attempts; before it: {'; '.join(failures[:-1])}")
                    raise
            with waits_for(f"retry: attempt {len(failures) + 1} of {attempts}") as place:
                await anyio.sleep(pause)
                if place is not None:
                    place.attempts += 1
                    place.waited += pause
            pause *= 2

    return _like(stage, inner, retried)


def in_thread(stage: Callable[..., Any]) -> DeclaredStage:
    """Run a plain function in a worker thread (anyio's default limit: 40 at once), so that the event loop goes on.

    `current_rollout()` and other context variables are seen there. On a cancellation or time-out the thread is left
    behind: it runs to its end, and what it gives is dropped. Until then it is one thread more on asyncio, which Python
    waits for before it exits, and one of the 40 on trio: a function that may never end belongs in a process.

    :raises ContractError: `stage` does not bind, has `call_next`, or is async.
    """
    inner = _plain(stage, "in_thread")
    if _is_async(stage):
        raise ContractError(f"in_thread: {inner.name} is async; a thread is for plain functions")

    def call(*args: Any, **kwargs: Any) -> Any:
        result = inner.function(*args, **kwargs)
        if isawaitable(result):
            if (close := getattr(result, "close", None)) is not None:
                close()
            raise ContractError(f"in_thread: {inner.name} returned an awaitable; a thread is for plain functions")
        return result

    async def threaded(*args: Any, **kwargs: Any) -> Any:
        args, value = _on_copy(inner, args)
        with waits_for("a thread"):
            result = await anyio.to_thread.run_sync(partial(call, *args, **kwargs), abandon_on_cancel=True)
        return value if result is None else result

    return _like(stage, inner, threaded)


class Slots:
    """A semaphore that can be made outside of an event loop. A slot is handed on in the order of asking.

    :param holder: what the watchdog is told while a stage waits; `{}` stands for the count.
    """

    def __init__(self, count: int, holder: str) -> None:
        self._count = self._free = count
        self._holder = holder.format(count)
        self._thread = 0
        self._waiting: deque[anyio.Event] = deque()

    async def acquire(self) -> None:
        """:raises ContractError: the event loop of another thread holds a slot: one cannot wake the other."""
        if (thread := get_ident()) != self._thread:
            if self._free < self._count:
                raise ContractError(
                    f"{self._holder} by a pipeline in another thread: pipelines that run in several threads at once "
                    "need a stage each"
                )
            self._thread = thread
        if self._free:
            self._free -= 1
            return
        turn = anyio.Event()
        self._waiting.append(turn)
        try:
            with waits_for(self._holder) as place:
                began = anyio.current_time()
                await turn.wait()
                if place is not None:
                    place.waited += anyio.current_time() - began
        except BaseException:
            if turn.is_set():  # the slot came together with the cancellation
                self.release()
            else:
                self._waiting.remove(turn)
            raise

    def release(self) -> None:
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self._free += 1


@contextmanager
def waits_for(holder: str) -> Iterator[RolloutContext | None]:
    """Tell the watchdog what the running stage waits for. Yields its context, None when it was called by hand."""
    try:
        context = current_rollout()
    except LookupError:
        yield None
        return
    context.holder = holder
    try:
        yield context
    finally:
        context.holder = None


def at_least_one(name: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, it must be a whole number") from None
    if number < 1:
        raise ValueError(f"{name} is {value}, it must be at least 1")
    return number


def _like(
    stage: Callable[..., Any], inner: Stage, function: Callable[..., Awaitable[Any]], transparent: bool = True
) -> DeclaredStage:
    """`function` with all that the pipeline reads off `stage`.

    :param transparent: what comes out is what `stage` makes of it.
    """
    wrapped = wraps(stage, updated=())(function)
    if transparent:
        wrapped.inside = wrapped, stage  # type: ignore[attr-defined]  # what a log keeps in its place
    return DeclaredStage(
        wrapped,
        inner.level,
        name=inner.name,
        external=inner.external,
        on_error=inner.on_error,
        fans_out=inner.fans_out,
    )


def _plain(stage: Callable[..., Any], wrapper: str) -> Stage:
    inner = bind(stage, f"{wrapper}(...)")
    if inner.wraps:
        raise ContractError(
            f"{wrapper}: {inner.name} has call_next, so all that comes after it would be run on a copy; "
            f"wrap the stages inside it instead"
        )
    return inner


def _on_copy(inner: Stage, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    """The arguments with the sample, group or batch replaced by a copy, and that copy."""
    position = int(inner.takes_args)
    if len(args) <= position:
        raise TypeError(f"{inner.name}: pass the {inner.level} as a positional argument")
    value = _copied(args[position])
    return (*args[:position], value, *args[position + 1 :]), value


def _copied(value: Any) -> Any:
    if isinstance(value, Sample):
        return value.copy()
    twin = copy.copy(value)
    if isinstance(value, Group):
        twin.prompt = copied(value.prompt)
        twin.executions = [[sample.copy() for sample in execution] for execution in value.executions]
    elif isinstance(value, Batch):
        twin.groups = [_copied(group) for group in value.groups]
        twin.summary = copy.copy(value.summary)
        twin.summary.dropped = dict(value.summary.dropped)
    return twin


def _too_long(inner: Stage, value: Any, seconds: float) -> str:
    number = value.rollout_id if isinstance(value, Batch) else value.index
    return f"{inner.name} took longer than {seconds:g} s on {inner.level} {number}"


def _is_async(stage: Any) -> bool:
    """Whether a call gives a coroutine, as far as its layers say so."""
    while stage is not None:
        if inspect.iscoroutinefunction(stage) or inspect.iscoroutinefunction(getattr(stage, "__call__", None)):  # noqa: B004
            return True
        stage = getattr(stage, "__wrapped__", None) or getattr(stage, "func", None)
    return False
