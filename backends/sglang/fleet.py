"""`Fleet`: the workers of an engine, which of them are in use, and what is asked of all of them.

What this module keeps true:

- a worker that does not have the current weights gets no request: not from here, and not from the router either, which
  it is taken out of until it has them;
- a worker that was away is looked at before it is in use again: whether it is up, and which weights it has;
- while generation pauses nobody comes back.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from contextvars import Context
from types import TracebackType
from typing import Any, Final, Self

import anyio
import msgspec
from anyio import current_time

from backends.sglang.client import AttemptFailed, Client, RequestRefused, WorkersUnavailable
from backends.sglang.inprocess import InProcess
from backends.sglang.reply import UNREADABLE, ReplyError
from backends.sglang.response import Response
from backends.sglang.router import RouterError, SGLangRouter, lost_by_router
from backends.sglang.workers import Worker, Workers

__all__ = ["CALL_SECONDS", "MEMORY_SECONDS", "STEP_SECONDS", "Fleet", "NoAnswer", "together"]

logger = logging.getLogger("rolloutbus.sglang")

LISTED_SECONDS: Final = 10.0
"""What a router said of its workers is asked again when it is older; after a failure, and before anything that concerns
all workers, sooner."""
LOOK_SECONDS: Final = 5.0
"""For a worker that was away to say whether it is up."""
REMOVE_SECONDS: Final = 10.0
"""For a router to let go of a worker."""
STEP_SECONDS: Final = 60.0
"""For a worker to take a step of an update that brings no weights; a pause that aborts takes a second or more."""
CALL_SECONDS: Final = 10.0
"""For a worker to take a call that clears up after an update that failed, or lets it go on."""
MEMORY_SECONDS: Final = 300.0
"""For a worker to give memory back or take it again: with a copy on the host it pins as much there first."""
IDLE_SECONDS: Final = 10.0
"""For workers to become idle before they give memory back."""


class Fleet:
    """`async with` opens it, also inside of itself.

    :param urls: addresses of the workers; behind a router it is asked for them.
    :param backoff: seconds, as in `Workers`.
    """

    def __init__(
        self, client: Client | InProcess, urls: Iterable[str], router: SGLangRouter | None, backoff: float
    ) -> None:
        self.client = client
        self.router = router
        self.workers = Workers(urls, backoff, self._look)
        """All that are known. They are asked directly."""
        self.routed = Workers([], backoff)
        """What stands for them where the router chooses: the router."""
        self.weight_version: str | None = None
        """What all workers in use have; None: nobody has said."""
        self.held: str | None = None
        """How generation pauses, while it does: nobody may come back before it goes on."""
        self._checkpoint: Mapping[str, Any] | None = None
        """What was asked of the workers for the current weights, where they are a checkpoint."""
        self._load_seconds: float | None = None
        """For a worker to load it."""
        self._apart: set[str] = set()
        """Addresses of those that were taken out of the router until they have the current weights."""
        self._paused: set[str] = set()
        """Addresses of those that did not take it when they were told to go on."""
        self._listed_at = float("-inf")
        self._unlisted: tuple[float, RouterError] | None = None
        """When it was last asked in vain, and why."""
        self._listing = anyio.Lock(fast_acquire=True)
        self._around: frozenset[str] = frozenset()
        """What the log has said that the router drops."""
        self._backoff = backoff
        self._looks: set[asyncio.Task[None]] = set()
        self._users = 0
        self._opening = anyio.Lock(fast_acquire=True)

    # Its life

    async def __aenter__(self) -> Self:
        """:raises RuntimeError: the loop is not asyncio's, or not the one that the engine in this process works on.
        :raises RouterError: the router does not start, or is not reached.
        """
        if self._users:
            self._users += 1
            return self
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError("SGLangEngine runs on asyncio: anyio.run(main), without backend='trio'") from None
        async with self._opening:
            if self._users == 0:
                async with AsyncExitStack() as stack:
                    if self.router is not None:
                        await stack.enter_async_context(self.router)
                        self.routed.set([self.router.url])
                    await stack.enter_async_context(self.client)
                    stack.push_async_callback(self._end_looks)
                    self._stack = stack.pop_all()
            self._users += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._users -= 1
        if self._users == 0:
            async with self._opening:  # who comes meanwhile opens it anew, afterwards
                await self._stack.__aexit__(kind, error, trace)

    async def _end_looks(self) -> None:
        for task in self._looks:
            task.cancel()
        await asyncio.gather(*self._looks, return_exceptions=True)
        for worker in self.workers:
            worker.due = 0.0

    # Where a request goes

    async def targets(self, response: Response, again: bool = False) -> Workers:
        """To the router, unless that drops what the request needs; then, and without one, to the workers.

        :param again: an attempt has failed: what the router said before that may no longer be so.
        :raises RouterError: the router is not reached, and has not been before.
        """
        if self.router is None:
            return self.workers
        self.workers.look()
        lost = frozenset(lost_by_router({**response.body, "sampling_params": response.sampling}))
        if not lost:
            return self.routed
        try:
            await self.urls(1.0 if again else LISTED_SECONDS)
        except RouterError as error:
            if not self.workers:
                raise
            logger.warning("%s; its %d workers are asked as they were", error, len(self.workers))
        if not lost <= self._around:
            self._around |= lost
            logger.warning(
                "the router %s drops %s: requests with it go to its %d workers directly, each to the one with the "
                "least in flight", self.router.url, ", ".join(sorted(lost)), len(self.workers)
            )  # fmt: skip
        return self.workers

    async def urls(self, age: float = LISTED_SECONDS) -> list[str]:
        """Addresses of all that are known.

        :param age: seconds that what the router said of its workers may be old.
        :raises RouterError: the router was not reached, or has no workers.
        """
        if self.router is not None:
            asked = current_time()
            async with self._listing:  # those that wait here take what the first of them hears
                if self._listed_at <= asked - age:
                    if self._unlisted is not None and self._unlisted[0] >= asked:
                        raise RouterError(str(self._unlisted[1])) from self._unlisted[1]
                    began = current_time()
                    try:
                        urls = [*await self.router.workers(), *self._apart]
                        if not urls:
                            raise RouterError(f"the router {self.router.url} has no workers")
                    except RouterError as error:
                        self._unlisted = current_time(), error
                        raise
                    self.workers.set(urls, away=self.weight_version is not None)
                    self._listed_at = began
        return [worker.url for worker in self.workers]

    async def suspect(self, worker: Worker) -> None:
        """Tokens came of other weights than the workers got: one was restarted, and nobody noticed, or is new."""
        suspects = [worker]
        if self.router is not None:  # it does not say which
            if current_time() - self._listed_at < 1.0:
                return
            with suppress(RouterError):
                await self.urls(age=0)
            suspects = list(self.workers)
        for each in suspects:
            if not each.away:
                each.away, each.due = True, 0.0

    # What is asked of all

    async def present(self) -> list[str]:
        """Addresses of those in use, and of those away that answer.

        :raises RouterError: as `urls`.
        """
        there: set[str] = set()

        async def ask(worker: Worker) -> None:
            with suppress(AttemptFailed, ReplyError, TimeoutError):
                await self._version_at(worker.url)
                there.add(worker.url)

        async with self:
            await self.urls(age=0)
            async with anyio.create_task_group() as tasks:
                for worker in self.workers:
                    if worker.away:
                        tasks.start_soon(ask, worker)
            return [worker.url for worker in self.workers if not worker.away or worker.url in there]

    async def ask_all(
        self, path: str, body: Mapping[str, Any], urls: Iterable[str], seconds: float | None = None
    ) -> tuple[dict[str, bytes], dict[str, RequestRefused | AttemptFailed]]:
        """What these workers answer, and what went wrong at the others. All are through when this returns.

        :param seconds: for each to answer; None: as long as it takes.
        """
        return await self.ask_each(path, dict.fromkeys(urls, msgspec.json.encode(body)), seconds)

    async def ask_each(
        self, path: str, bodies: Mapping[str, bytes], seconds: float | None
    ) -> tuple[dict[str, bytes], dict[str, RequestRefused | AttemptFailed]]:
        """As `ask_all`, with a body in JSON for each worker."""
        replies: dict[str, bytes] = {}
        errors: dict[str, RequestRefused | AttemptFailed] = {}

        async def ask(url: str, data: bytes) -> None:
            try:
                replies[url] = await self._ask(url, path, data, seconds)
            except (RequestRefused, AttemptFailed) as error:
                errors[url] = error

        async with self, anyio.create_task_group() as tasks:
            for url, data in bodies.items():
                tasks.start_soon(ask, url, data)
        return replies, errors

    async def _ask(self, url: str, path: str, data: bytes, seconds: float | None) -> bytes:
        """:raises NoAnswer: it takes longer; else as `Client.post`."""
        try:
            with anyio.fail_after(seconds):
                return await self.client.post(f"{url}{path}", data)
        except TimeoutError:
            raise NoAnswer(f"{url}{path}: no answer in {seconds:g} s") from None

    async def everywhere(
        self, path: str, body: Mapping[str, Any], urls: Sequence[str] | None = None, seconds: float | None = None
    ) -> None:
        """Ask all workers at once. One that is down is left out: nothing runs there, and it is looked at when it is
        back. All others have answered or failed when this returns or raises.

        :param seconds: as in `ask_all`.
        :raises RequestRefused: a worker refused.
        :raises WorkersUnavailable: a worker failed, or all are down.
        """
        async with self:
            urls = await self.present() if urls is None else urls
            replies, errors = await self.ask_all(path, body, urls, seconds)
        self.settle(replies, errors)

    def settle(self, replies: Mapping[str, bytes], errors: Mapping[str, RequestRefused | AttemptFailed]) -> None:
        """As `everywhere`, of what `ask_all` has brought."""
        down = {url: e for url, e in errors.items() if isinstance(e, AttemptFailed) and e.answered and e.status is None}
        if replies and down.keys() == errors.keys():
            self.leave_out(down)
        elif errors or not replies:
            raise together(errors)

    async def idle(self) -> list[str]:
        """Addresses of the workers that are up, when none of them has a request under way. In its worker one is for a
        moment longer than until its reply.

        A worker flushes its cache when it is idle, so it is asked for that. Of several data-parallel ranks it passes on
        what one says, whichever is the first to answer. But it answers when all have, and given time a rank answers
        when it is idle, or when the time is over: so where the answer comes in time, all are. After a pause that takes
        requests off, all are idle, and no time is given: with it, those that wait would count.

        :raises RequestRefused: some stay under way.
        """
        async with self:
            urls = await self.present()
            until = current_time() + IDLE_SECONDS
            taken_off = self.held in ("retract", "abort")
            while True:
                left = max(until - current_time(), 0.0) + 0.1
                try:
                    await self.everywhere("/flush_cache" if taken_off else f"/flush_cache?timeout={left:.3f}", {}, urls)
                    if taken_off or current_time() < until:
                        return urls
                    busy = "one of the data-parallel ranks of a worker does not become idle"
                except RequestRefused as error:
                    if error.status != 400:
                        raise
                    busy = str(error)
                if current_time() >= until:
                    how = "end them, or pause generation first, with mode 'retract' or 'abort'"
                    raise RequestRefused(f"requests are under way: {how} ({busy})", 400)
                await anyio.sleep(0.05)  # it tells nobody

    def leave_out(self, errors: Mapping[str, Exception]) -> None:
        """These workers are away, until they were looked at.

        :param errors: why, by address.
        """
        for worker in self.workers:
            if worker.url in errors and not worker.away:
                logger.warning("worker %s is left out: %s", worker.url, errors[worker.url])
                self.workers.failed(worker, errors[worker.url])

    async def go_on(self, urls: Sequence[str]) -> tuple[dict[str, bytes], dict[str, RequestRefused | AttemptFailed]]:
        """These generate again; as `ask_all`. One that does not take it is told once more before it is in use again."""
        try:
            replies, errors = await self.ask_all("/continue_generation", {}, urls, CALL_SECONDS)
        finally:
            self.held = None
        self._paused = self._paused.difference(replies).union(errors)
        return replies, errors

    # Which weights they have

    async def have(
        self, version: str, urls: Sequence[str], checkpoint: Mapping[str, Any] | None, seconds: float | None
    ) -> list[str]:
        """These have new weights, and no others; returns the addresses of the others.

        :param checkpoint: what the others are to be asked for them, if that is possible.
        :param seconds: for one of them to load it.
        """
        self.weight_version, self._checkpoint, self._load_seconds = version, checkpoint, seconds
        missed = [worker.url for worker in self.workers if worker.url not in urls]
        if self.router is not None:
            with suppress(RouterError):
                missed += await self.router.workers(healthy=False)
            missed = [url for url in dict.fromkeys(missed) if url not in urls]
            await self._take_out(self.router, missed)
        for worker in self.workers:
            if worker.url in missed:
                worker.away = True
            elif worker.away and worker.url not in self._apart and worker.due < math.inf:
                self.workers.back(worker)  # else the look at it has it come back
        for url in missed:
            logger.warning("worker %s has missed the weights %r: it gets no samples until it has them", url, version)
        return missed

    def _look(self, worker: Worker) -> None:
        """A worker is due: find out whether it is up, and has the current weights."""
        if self.held:
            worker.due = current_time() + self._backoff
            return
        worker.due = math.inf
        # Not in the context of the sample that happens to be here: the connection may stay.
        task = asyncio.create_task(self._look_at(worker), context=Context())
        self._looks.add(task)
        task.add_done_callback(self._looks.discard)

    async def _look_at(self, worker: Worker) -> None:
        loaded: str | None = None
        try:
            while True:  # whatever is done about it takes time, in which the weights may change
                version = await self._version_at(worker.url)
                if self.held:
                    worker.due = current_time() + self._backoff
                    return
                if version is not None and self.weight_version not in (None, version):
                    if loaded == self.weight_version:
                        raise AttemptFailed(f"{worker.url} has loaded {loaded!r}, and says that it has {version!r}")
                    loaded = self.weight_version
                    await self._bring_up(worker, version)
                elif worker.url in self._paused:
                    await self._ask(worker.url, "/continue_generation", b"{}", LOOK_SECONDS)
                    self._paused.discard(worker.url)
                elif self.router is not None and worker.url in self._apart:
                    await self.router.add(worker.url)
                    self._apart.discard(worker.url)
                else:
                    break
            self.workers.back(worker)
        except (AttemptFailed, RequestRefused, ReplyError, RouterError, TimeoutError) as error:
            logger.info("worker %s is not back: %s", worker.url, error)
            self.workers.failed(worker, error)
        except Exception as error:
            logger.error("worker %s: %r", worker.url, error, exc_info=error)
            self.workers.failed(worker, error)

    async def _bring_up(self, worker: Worker, version: str) -> None:
        """It has other weights: have it load the current ones, where they are a checkpoint.

        :raises AttemptFailed: they are not; or as `_ask`.
        """
        if self.router is not None:
            await self._take_out(self.router, [worker.url])
        has = f"worker {worker.url} has the weights {version!r}, not {self.weight_version!r}"
        if self._checkpoint is None:
            if worker.told != (version, self.weight_version):
                worker.told = (version, self.weight_version)
                logger.warning("%s: it gets no samples until an update that it takes part in", has)
            raise AttemptFailed(f"{has}, and these are no checkpoint that it could load", answered=True)
        logger.warning("%s: it loads %s", has, self._checkpoint["model_path"])
        data = msgspec.json.encode(self._checkpoint)
        await self._ask(worker.url, "/update_weights_from_disk", data, self._load_seconds)

    async def _version_at(self, url: str) -> str | None:
        """Version of a worker's weights; None where it is up and does not say.

        :raises AttemptFailed: it is not up.
        :raises TimeoutError: it takes too long.
        :raises ReplyError: it says something else.
        """
        try:
            with anyio.fail_after(LOOK_SECONDS):
                data = await self.client.get(f"{url}/model_info")
        except RequestRefused:
            return None
        try:
            version = msgspec.json.decode(data, type=_ModelInfo).weight_version
        except UNREADABLE as error:
            raise ReplyError(f"{url}/model_info: {error}") from error
        return None if version is None else str(version)

    async def _take_out(self, router: SGLangRouter, urls: Iterable[str]) -> None:
        """Workers that do not have the weights get nothing from the router either, until they come back."""
        for url in urls:
            if url not in self._apart:
                self._apart.add(url)
                try:
                    with anyio.fail_after(REMOVE_SECONDS):
                        await router.remove(url)
                except (RouterError, ValueError, TimeoutError) as error:
                    logger.error("worker %s has other weights, and the router still sends to it: %s", url, error)
        self.workers.set([*(worker.url for worker in self.workers), *self._apart], away=True)


class NoAnswer(AttemptFailed):
    """In the time that there was for it."""


class _ModelInfo(msgspec.Struct):
    weight_version: str | int | None = None


def together(errors: Mapping[str, RequestRefused | AttemptFailed]) -> Exception:
    """What several workers said, as one error: a refusal where one refused."""
    message = "; ".join(map(str, errors.values())) or "no worker is up"
    refusals = [error for error in errors.values() if isinstance(error, RequestRefused)]
    if refusals:
        hint = "; is this a router? give it as router=" if refusals[0].status == 404 else ""
        together: Exception = RequestRefused(message + hint, refusals[0].status)
    else:
        together = WorkersUnavailable(message)
    together.__cause__ = next(iter(refusals or errors.values()), None)
    return together
