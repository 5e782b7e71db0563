"""Wrap a stage: `limit`, `timeout`, `retry`, `in_thread`, in any nesting: `limit(timeout(ask_judge, 30), 64)`.

A wrapped stage is to the pipeline what the stage inside it is: same name, level, policy and parameters. It is always
async, and called like the stage inside: `await limit(ask_judge, 64)(sample, rollout_id=1)`.

`timeout`, `retry` and `in_thread` run the stage on a copy, which takes the place of the original when the stage returns
None. So a failed attempt or an abandoned thread never touches the sample that goes on. Whatever ends the wait for a
slot of `limit`, no slot stays taken.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from inspect import isawaitable
from typing import Any

import anyio

from eventbus.context import current_rollout
from eventbus.group import Batch, Group
from eventbus.sample import Sample
from eventbus.stage import ContractError, DeclaredStage, Dropped, Stage, bind

__all__ = ["in_thread", "limit", "retry", "timeout"]


def limit(stage: Callable[..., Any], n: int) -> DeclaredStage:
    """At most `n` calls of `stage` at the same time, in all rollouts together; the others wait their turn in order.

    Around a stage with `call_next` it limits all that comes after it.

    :raises ValueError: `n` is less than 1.
    :raises ContractError: `stage` does not bind, see `eventbus.stage.bind`.
    """
    if n < 1:
        raise ValueError(f"limit: n is {n}, it must be at least 1")
    inner = bind(stage, "limit(...)")
    slots = _Slots(n)

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

    return _like(stage, inner, timed)


def retry(
    stage: Callable[..., Any],
    attempts: int = 3,
    on: type[Exception] | tuple[type[Exception], ...] = (Exception,),
    wait: float = 0.1,
) -> DeclaredStage:
    """Call `stage` again, up to `attempts` times in all, when it raises one of `on`; the last error goes on.

    A sample that was dropped, a broken contract and a cancellation are never retried.

    :param wait: seconds before the second attempt; doubled before each further one.
    :raises ValueError: `attempts` is less than 1, or `wait` less than 0.
    :raises TypeError: `on` holds something that is no subclass of Exception.
    :raises ContractError: `stage` does not bind, or has `call_next`.
    """
    if attempts < 1:
        raise ValueError(f"retry: attempts is {attempts}, it must be at least 1")
    if not wait >= 0:
        raise ValueError(f"retry: wait is {wait}, it must not be less than 0")
    kinds: tuple[Any, ...] = on if isinstance(on, tuple) else (on,)
    for kind in kinds:
        if not (inspect.isclass(kind) and issubclass(kind, Exception)):
            raise TypeError(f"retry: on takes subclasses of Exception, got {kind!r}; a cancellation is never retried")
    inner = _plain(stage, "retry")

    async def retried(*args: Any, **kwargs: Any) -> Any:
        failures: list[str] = []
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
            with _waits_for(f"retry: attempt {len(failures) + 1} of {attempts}"):
                await anyio.sleep(wait * 2 ** (len(failures) - 1))

    return _like(stage, inner, retried)


def in_thread(stage: Callable[..., Any]) -> DeclaredStage:
    """Run a plain function in a worker thread (anyio's default limit: 40 at once), so that the event loop goes on.

    `current_rollout()` and other context variables are seen there. On a cancellation or time-out the thread is left
    behind: it runs to its end, and what it gives is dropped.

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
        with _waits_for("a thread"):
            result = await anyio.to_thread.run_sync(partial(call, *args, **kwargs), abandon_on_cancel=True)
        return value if result is None else result

    return _like(stage, inner, threaded)


class _Slots:
    """A semaphore that can be made outside of an event loop. A slot is handed on in the order of asking."""

    def __init__(self, count: int) -> None:
        self._count = self._free = count
        self._waiting: deque[anyio.Event] = deque()

    async def acquire(self) -> None:
        if self._free:
            self._free -= 1
            return
        turn = anyio.Event()
        self._waiting.append(turn)
        try:
            with _waits_for(f"limit({self._count}): {self._count} in use"):
                await turn.wait()
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
def _waits_for(holder: str) -> Iterator[None]:
    """Tell the watchdog what the running stage waits for."""
    try:
        context = current_rollout()
    except LookupError:  # called by hand
        yield
        return
    context.holder = holder
    try:
        yield
    finally:
        context.holder = None


def _like(stage: Callable[..., Any], inner: Stage, function: Callable[..., Awaitable[Any]]) -> DeclaredStage:
    """`function` with all that the pipeline reads off `stage`."""
    return DeclaredStage(
        wraps(stage, updated=())(function),
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
        twin.executions = [[sample.copy() for sample in execution] for execution in value.executions]
    elif isinstance(value, Batch):
        twin.groups = [_copied(group) for group in value.groups]
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
