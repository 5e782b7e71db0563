"""Work in threads that is waited for to its end: collectives, of which the other ranks do their part whatever happens
here.

anyio waits for a thread when a cancel scope is cancelled, but not when a task of asyncio is: by `task.cancel()`,
`asyncio.timeout` or the first Ctrl-C. Then the thread would go on behind the back of whoever cancelled it, beside the
next collective.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import ParamSpec, TypeVar

import anyio
import anyio.lowlevel
from anyio.to_thread import run_sync

__all__ = ["to_the_end", "waited"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


async def to_the_end(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Run it in a thread of its own. Cancelled before it begins it does not begin; cancelled later, see `waited`."""
    await anyio.lowlevel.checkpoint_if_cancelled()
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name=f"megatron {getattr(function, '__name__', '')}", daemon=True).start()
    return await waited(future)


async def waited(future: Future[_T]) -> _T:
    """Its result. Who is cancelled meanwhile is so when it is done."""
    cancelled: BaseException | None = None
    with anyio.CancelScope(shield=True):
        while not future.done():
            try:
                # A limiter of its own, so that no stage that runs in threads keeps it waiting.
                await run_sync(wait, [future], limiter=anyio.CapacityLimiter(1))
            except anyio.get_cancelled_exc_class() as error:  # by asyncio itself, which knows no shield
                cancelled = error
    if cancelled is not None:
        raise cancelled
    return future.result()
