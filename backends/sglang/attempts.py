"""`Attempts`: how a response comes to be. One attempt after the other, each with a `rid` of its own at one worker.

A reply, or in a stream the part of it that arrived before it broke, is added to the response; the next attempt goes on
from there. The response is done when a worker says so.

What this module keeps true:

- at most one attempt of a response is open, and what a worker answers to another is never read: one sample, one reply;
- every attempt is told to the stream (`attempt_ended`), where somebody asks for that;
- an attempt that ends without an answer (cancelled, broken, too slow) is aborted at its worker before anything else
  happens to the sample.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Final

import anyio
from anyio import current_time

from backends.sglang.client import AttemptFailed, RequestRefused, WorkersUnavailable
from backends.sglang.fleet import Fleet, NoAnswer, together
from backends.sglang.reply import UNKNOWN, ReplyError
from backends.sglang.response import Response
from backends.sglang.router import RouterError
from backends.sglang.workers import Worker, rest_of
from eventbus.context import current_rollout
from eventbus.events import AttemptOutcome
from eventbus.sample import SampleStatus

__all__ = ["Attempts"]

logger = logging.getLogger("rolloutbus.sglang")

ABORT_SECONDS: Final = 2.0
"""For a worker to acknowledge an abort."""
UNHEARD: Final = 3
"""Aborts that it does not acknowledge in a row, until its answer is not waited for any more."""
ABORTS: Final = 32
"""At a time: thousands at once, as when a pipeline is cancelled, would not be through in that time."""


class Attempts:
    """:param stream: read the tokens as they come.
    :param limit: attempts that may fail in a row, without a new token.
    :param timeout: seconds for one; None: as long as it takes.
    :param backoff: seconds, as in `SGLangEngine`.
    """

    def __init__(self, fleet: Fleet, *, stream: bool, limit: int, timeout: float | None, backoff: float) -> None:
        self.stream = stream
        self.limit = limit
        self.timeout = timeout
        self.backoff = backoff
        self.failed = 0
        """So many, of all responses."""
        self._fleet = fleet
        self._aborting = anyio.Semaphore(ABORTS, fast_acquire=True)
        self._silent: dict[str, float] = {}
        """When an abort was last not answered, by the address of the worker."""

    async def complete(self, response: Response) -> None:
        """Until it is done.

        :raises RequestRefused: a worker refused it.
        :raises WorkersUnavailable: too many failed in a row.
        """
        failures = 0  # in a row
        workers = await self._fleet.targets(response)
        while not response.done:
            worker, rest = workers.pick(response.session, response.avoid)
            if rest > 0:
                before = workers.failures
                await response.rest(rest, workers)
                failures += workers.failures > before  # however many were looked at meanwhile
                if failures >= self.limit and workers.error is not None and not response.done:
                    raise self._unavailable(response, failures, workers.error) from workers.error
                continue
            got = len(response.tokens)
            try:
                await self._attempt(worker, response)
                worker.failures = 0
                return
            except AttemptFailed as error:
                # A router that answers speaks of one of its workers.
                about_another = workers is self._fleet.routed and error.status is not None
                if not isinstance(error, _AbortedUnasked) and not about_another:
                    workers.failed(worker, error)
                failures = 1 if len(response.tokens) > got else failures + 1
                self._note(response, worker, error, failures)
                if response.done:
                    return
                if response.stopped:
                    response.status = SampleStatus.ABORTED
                    return
                if failures >= self.limit:
                    raise self._unavailable(response, failures, error) from error
                if about_another:
                    await response.rest(rest_of(failures, self.backoff))
                workers = await self._fleet.targets(response, again=True)

    async def stop(self, responses: Sequence[Response]) -> None:
        """They get no further tokens; done when their `generate` is over.

        :raises RequestRefused: a worker knows no abort.
        """
        for response in responses:
            response.stop()
        async with self._fleet:
            while open_ := [response for response in responses if not response.ended]:
                # Again and again: a worker ignores the abort of a request that has not reached it yet.
                refused: list[RequestRefused] = []
                async with anyio.create_task_group() as tasks:
                    for response in open_:
                        if response.worker is not None:
                            tasks.start_soon(self._abort_or_note, response.worker, response, refused)
                if refused:
                    raise refused[0]
                with anyio.move_on_after(ABORT_SECONDS):
                    async with anyio.create_task_group() as tasks:
                        for response in open_:
                            tasks.start_soon(response.gone)

    def _unavailable(self, response: Response, failures: int, error: Exception) -> WorkersUnavailable:
        return WorkersUnavailable(f"sample {response.index}: {failures} attempts failed; the last: {error}")

    def _note(self, response: Response, worker: Worker, error: AttemptFailed, failures: int) -> None:
        self.failed += 1
        response.avoid = worker
        response.failed += (str(error),)
        with suppress(LookupError):
            current_rollout().attempts += 1
        logger.warning(
            "sample %s: attempt %s failed, %d of %d in a row: %s",
            response.index, response.rid, failures, self.limit, error,
        )  # fmt: skip

    async def _attempt(self, worker: Worker, response: Response) -> None:
        """Ask the worker, and tell the stream how that ended.

        :raises AttemptFailed: the response is not done. In a stream it has what arrived.
        """
        got, began, version = len(response.tokens), current_time(), self._fleet.weight_version
        outcome: AttemptOutcome = "aborted"
        words: str | None = "cancelled"
        try:
            await self._ask(worker, response)
            if not response.done:
                raise _AbortedUnasked(f"{worker.url} aborted the request, and nobody here had asked for it")
            words = None
            if response.status is not SampleStatus.ABORTED:
                outcome = "answered"
            no_update = version is not None and version == self._fleet.weight_version
            if no_update and len(response.tokens) > got and response.spans[-1].version not in (version, UNKNOWN):
                await self._fleet.suspect(worker)
        except Exception as error:
            words = str(error)
            if not isinstance(error, _AbortedUnasked):
                outcome = "failed"
            raise
        finally:
            with suppress(LookupError):
                current_rollout().attempt_ended(
                    attempt=response.attempt,
                    worker=worker.url,
                    rid=response.rid,
                    outcome=outcome,
                    error=words,
                    tokens=len(response.tokens) - got,
                    seconds=current_time() - began,
                )

    async def _ask(self, worker: Worker, response: Response) -> None:
        """:raises AttemptFailed: there was no whole answer. In a stream the response has what arrived."""
        client = self._fleet.client
        body, url = response.begin(worker), f"{worker.url}/generate"
        worker.in_flight += 1
        answered = False
        try:
            async with asyncio.timeout(self.timeout) as response.limit:
                if self.stream:
                    async with aclosing(client.events(url, body, response.headers)) as events:
                        async for event in events:
                            response.see(event)
                    response.take_seen()
                else:
                    response.take(await client.post(url, body, response.headers))
            answered = True
        except RequestRefused as error:
            answered = True
            raise RequestRefused(f"sample {response.index}: {error}", error.status) from error
        except (TimeoutError, ReplyError, AttemptFailed) as error:
            # What a stream has brought counts, unless it is what is wrong.
            with suppress(ReplyError):
                response.take_seen()
            if isinstance(error, AttemptFailed):
                # A router that gives up leaves the request at its worker.
                answered = error.answered and worker not in self._fleet.routed
                raise
            slow = f"no answer within timeout={self.timeout} s"
            if response.unheard >= UNHEARD:
                slow = "no answer, and none to its aborts"
            raise AttemptFailed(f"{url}: {slow if isinstance(error, TimeoutError) else error}") from error
        finally:
            worker.in_flight -= 1
            response.limit = None
            if not answered:
                with anyio.CancelScope(shield=True):
                    try:
                        await self._abort_at(worker, response.rid)
                    except RequestRefused as error:  # what ends the attempt is more important
                        logger.warning("sample %s: it may still be generated: %s", response.index, error)
            response.worker = None

    async def _abort_or_note(self, worker: Worker, response: Response, refused: list[RequestRefused]) -> None:
        try:
            response.unheard = 0 if await self._abort_at(worker, response.rid) else response.unheard + 1
            if response.unheard >= UNHEARD:
                response.give_up()
        except RequestRefused as error:
            refused.append(error)

    async def _abort_at(self, worker: Worker, rid: str) -> bool:
        """Have the worker that has this request, or every worker behind the router, give it up; whether one heard it.

        :raises RequestRefused: a worker knows no abort.
        """
        urls = [worker.url]
        if self._fleet.router is not None:
            try:
                with anyio.fail_after(ABORT_SECONDS):
                    urls = await self._fleet.urls()
            except (RouterError, TimeoutError) as failure:
                urls = [known.url for known in self._fleet.workers]
                logger.info("abort of %s, at the %d workers that are known: %r", rid, len(urls), failure)
        async with self._aborting:
            # One that does not answer would hold up everybody who waits for a turn here.
            urls = [url for url in urls if current_time() - self._silent.get(url, -math.inf) >= ABORT_SECONDS]
            replies, errors = await self._fleet.ask_all("/abort_request", {"rid": rid}, urls, ABORT_SECONDS)
        for url, error in errors.items():
            if isinstance(error, NoAnswer):
                self._silent[url] = current_time()
            if not isinstance(error, RequestRefused):  # it may be dead: then nothing runs there
                logger.info("abort of %s: %s", rid, error)
        if any(isinstance(error, RequestRefused) for error in errors.values()):
            raise together(errors)
        return bool(replies)


class _AbortedUnasked(AttemptFailed):
    """Nothing is wrong with the worker."""
