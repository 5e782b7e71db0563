"""`SGLangEngine`: generation on SGLang servers, over HTTP.

The life of a request: `generate` checks it and makes attempts, one at a time, each with a `rid` of its own at one
worker. A reply, or in a stream the part of it that arrived before it broke, is added to the response; the next attempt
goes on from there with the budget that is left. The response is done when a worker says so.

What this module keeps true:

- at most one attempt of a request is open, and what a worker answers to another is never read: one sample, one reply;
- every attempt is told to the stream (`attempt_ended`), where somebody asks for that;
- a worker that does not have the current weights gets no request (`updating_weights`);
- an attempt that ends without an answer (cancelled, broken, too slow) is aborted at its worker before anything else
  happens to the sample;
- the sample is changed when its response is done, never before.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, nullcontext, suppress
from contextvars import Context
from pathlib import Path
from ssl import SSLContext
from types import MappingProxyType, TracebackType
from typing import Any, Final, Literal, Self, TypeAlias
from uuid import uuid4

import anyio
import msgspec

from backends.sglang.client import (
    Access,
    AttemptFailed,
    Client,
    RequestRefused,
    Worker,
    Workers,
    WorkersUnavailable,
    rest_of,
)
from backends.sglang.inprocess import ADDRESS, InProcess
from backends.sglang.reply import UNKNOWN, Kept, Reply, ReplyError, decode, progress
from backends.sglang.request import check_fields, check_ids, check_sampling, multimodal, sibling_seed
from backends.sglang.router import RouterError, SGLangRouter, lost_by_router
from eventbus.columns import LogProbs, Tokens
from eventbus.context import current_rollout
from eventbus.events import AttemptOutcome
from eventbus.sample import Completion, Sample, SampleStatus, WeightSpan
from middleware.tokenize import Tokenize

__all__ = ["PauseMode", "SGLangEngine", "WeightUpdate"]

logger = logging.getLogger("rolloutbus.sglang")

PauseMode: TypeAlias = Literal["abort", "retract", "in_place"]

ABORT_SECONDS: Final = 2.0
"""For a worker to acknowledge an abort."""
WORKERS_SECONDS: Final = 10.0
"""What a router said of its workers is asked again when it is older; after a failure, and before anything that concerns
all workers, sooner."""
MODEL_SECONDS: Final = 5.0
"""For a worker to say what its model is, once."""
LOOK_SECONDS: Final = 5.0
"""For a worker that was away to say whether it is up."""
SERVER_BUDGET: Final = 128
"""`max_new_tokens` of a request that names none."""


class SGLangEngine:
    """Generates on SGLang servers (0.5.23): one, several, or those behind a router.

        SGLangEngine("http://127.0.0.1:30000")
        SGLangEngine(urls=["http://10.0.0.1:30000", "http://10.0.0.2:30000"])
        SGLangEngine(router="http://127.0.0.1:3000", attempts=4)
        SGLangEngine(in_process=sglang.Engine(model_path="Qwen/Qwen3-0.6B"))

    With several workers each request goes to the one with the least in flight. Behind a router the router chooses;
    requests that need what it drops, and everything that is no generation, go to its workers directly.

    An `sglang.Engine` of this process has no server in front of it; all else is the same. Make it in the main thread,
    under `if __name__ == "__main__"` (its workers are processes that import the program again), before the event loop
    runs, which it would hold up for as long as the model loads. It stays with the event loop of its first request, so
    use it in one `anyio.run` and ask nothing of it before. There it also takes over SIGTERM and SIGQUIT, the latter to
    end this process when a worker of its own dies. `engine.shutdown()` is up to who made it, after the pipeline is
    closed; it kills every child process of this one, as the engine does at exit.

    :param in_process: that engine.
    :param stream: read the tokens as they come. Where a connection breaks, what has arrived is kept; in this process
        none breaks, and it only costs.
    :param fields: further fields of `/generate` for every request, such as `{"lora_path": ..., "return_sampling_mask":
        True}`.
    :param routed_experts: (layers, experts per token) of the model: each sample gets the experts that its tokens were
        routed to, `sample.rollout_routed_experts`, an int32 array [tokens - 1, layers, experts per token].
    :param vocabulary: number of token ids. By default it is read from the worker's model where that is readable here.
    :param attempts: that may fail in a row, without a new token, before the sample fails.
    :param timeout: seconds for one attempt; None: as long as it takes.
    :param backoff: seconds that a worker is not asked after a failure; doubles with each further one in a row, up to
        30. Then it is asked whether it is up and has the current weights (`/model_info`), before it gets a request.
    :param api_key: of the workers and of a router given by its address; "env:NAME" for an environment variable. A
        configuration is kept in the log, so name it there in that way.
    :param ssl: for https addresses, where the system's certificates do not do: a context, or the path of the
        certificates to trust.
    :raises LoadError: aiohttp is not installed (when it is opened).
    :raises ValueError: an address or a field is wrong, or not one of `url`, `urls`, `router` and `in_process` is given.
    :raises TypeError: `in_process` is no `sglang.Engine`.

    Runs on asyncio. The pipeline opens and closes it; a call outside of that opens connections of its own.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        urls: Sequence[str] = (),
        router: str | SGLangRouter | None = None,
        in_process: Any = None,
        stream: bool = False,
        fields: Mapping[str, Any] = MappingProxyType({}),
        routed_experts: tuple[int, int] | None = None,
        vocabulary: int | None = None,
        attempts: int = 8,
        timeout: float | None = None,
        backoff: float = 0.5,
        api_key: str | None = None,
        ssl: SSLContext | str | None = None,
    ) -> None:
        if (url is not None) + bool(urls) + (router is not None) + (in_process is not None) != 1:
            raise ValueError("SGLangEngine: give one of url, urls=[...], router= and in_process=")
        if attempts < 1:
            raise ValueError(f"SGLangEngine: attempts is {attempts}, it must be at least 1")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"SGLangEngine: timeout is {timeout}, it must be more than 0 seconds, or None")
        if not backoff > 0:
            raise ValueError(f"SGLangEngine: backoff is {backoff}, it must be more than 0 seconds")
        check_fields(fields)
        self.stream = stream
        self.fields = dict(fields)
        self.routed_experts = routed_experts
        self.vocabulary = vocabulary
        self.attempts = attempts
        self.timeout = timeout
        self.backoff = backoff
        self.weight_version: str | None = None
        """The last that was set here."""
        self.on_weights_updated: list[Callable[..., None]] = []
        """Called after each update with the keywords `version`, `pause`, `workers`, `missed_by`, `seconds`, as in
        `WeightsUpdated`. A pipeline puts its own here while it is open."""
        self.wasted = 0
        """Attempts that failed; what they generated beyond what a stream had brought is lost."""
        if routed_experts is not None:
            self.fields["return_routed_experts"] = True
        self._body = {"return_logprob": True, "stream": stream, **self.fields}
        """What all requests have in common."""
        access = Access(api_key, ssl)
        self._client: Client | InProcess = Client(access) if in_process is None else InProcess(in_process)
        self._router = SGLangRouter(router, api_key=api_key, ssl=ssl) if isinstance(router, str) else router
        addresses = map(_address, [url] if url is not None else urls)
        self._direct = Workers(addresses if in_process is None else [ADDRESS], _clock, backoff, self._look)
        self._routed = None if self._router is None else Workers([], _clock, backoff)
        self._listed_at = float("-inf")
        self._around: frozenset[str] = frozenset()
        self._looks: set[asyncio.Task[None]] = set()
        self._held = False
        """Workers pause: none may come back before they go on."""
        self._checkpoint: dict[str, Any] | None = None
        """What was asked of the workers for the current weights, where they are a checkpoint."""
        self._apart: set[str] = set()
        """Workers that were taken out of the router until they have the current weights."""
        self._opened = 0
        self._opening = anyio.Lock(fast_acquire=True)
        self._requests: dict[object, _Request] = {}
        self._name, self._count = uuid4().hex, itertools.count()
        self._checked: Mapping[str, Any] | None = None
        self._asked_model = False
        self._asking = anyio.Lock(fast_acquire=True)
        self._tokenizer: Tokenize | None = None

    async def __aenter__(self) -> Self:
        """:raises RuntimeError: the loop is not asyncio's, or not the one that the engine in this process works on.
        :raises RouterError: the router does not start, or is not reached.
        """
        if self._opened:
            self._opened += 1
            return self
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError("SGLangEngine runs on asyncio: anyio.run(main), without backend='trio'") from None
        async with self._opening:
            if self._opened == 0:
                async with AsyncExitStack() as stack:
                    if self._router is not None and self._routed is not None:
                        await stack.enter_async_context(self._router)
                        self._routed.set([self._router.url])
                    await stack.enter_async_context(self._client)
                    stack.push_async_callback(self._end_looks)
                    self._stack = stack.pop_all()
            self._opened += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened -= 1
        if self._opened == 0:
            await self._stack.__aexit__(kind, error, trace)

    @property
    def in_flight(self) -> int:
        """Calls of `generate` that are open."""
        return len(self._requests)

    # Generation

    async def generate(self, sample: Sample, sampling: Mapping[str, Any]) -> Completion:
        """Continue `sample.tokens`.

        `sampling` holds SGLang's sampling parameters. A `sampling_seed` gives each sample of the run a seed of its own.
        `sample.session_id` keeps the requests of a session at one worker; `sample.multimodal_inputs` holds fields such
        as `image_data`. What the reply says beside the response is in `Completion.meta`, by SGLang's names; attempts
        that failed are in `meta["failed_attempts"]`. Kept sampling ids (`return_sampling_mask`), routed experts,
        speculative and prefix-cache counts are put on the sample, the log-probs of the kept ids as
        `metadata["sampling_log_probs"]`.

        :raises ValueError: a sampling parameter, a token id or a multimodal field is wrong; names the sample.
        :raises RequestRefused: the server refused the request; a `ValueError` too.
        :raises WorkersUnavailable: `attempts` failed in a row; a `ConnectionError`.
        """
        async with self:
            try:
                request = _Request(
                    self, sample, await self._checked_sampling(sample, sampling), f"{self._name}-{next(self._count)}"
                )
            except (ValueError, TypeError) as error:
                raise type(error)(f"sample {sample.index}: {error}") from error
            key = _key(sample)
            if key in self._requests:
                raise ValueError(f"sample {sample.index}: the execution {sample.rollout_id} is being generated already")
            self._requests[key] = request
            try:
                await self._answer(request)
            finally:
                del self._requests[key]
                request.end()
        return request.completion(sample)

    async def abort(self, samples: Sequence[Sample]) -> None:
        """Their `generate` returns what there is, with status ABORTED. When this returns, they are gone.

        :raises RequestRefused: a worker knows no abort, as a router does: give it as `router=`.
        """
        open_ = [request for sample in samples if (request := self._requests.get(_key(sample))) is not None]
        for request in open_:
            request.stop()
        async with self:
            while open_ := [request for request in open_ if not request.ended]:
                # Again and again: a worker ignores the abort of a request that has not reached it yet.
                refused: list[RequestRefused] = []
                async with anyio.create_task_group() as tasks:
                    for request in open_:
                        if request.worker is not None:
                            tasks.start_soon(self._abort_or_note, request.worker, request.rid, refused)
                if refused:
                    raise refused[0]
                with anyio.move_on_after(ABORT_SECONDS):
                    async with anyio.create_task_group() as tasks:
                        for request in open_:
                            tasks.start_soon(request.gone)

    async def _abort_or_note(self, worker: Worker, rid: str, refused: list[RequestRefused]) -> None:
        try:
            await self._abort_at(worker, rid)
        except RequestRefused as error:
            refused.append(error)

    async def _checked_sampling(self, sample: Sample, sampling: Mapping[str, Any]) -> Mapping[str, Any]:
        if sampling != self._checked:
            check_sampling(sampling)
            self._checked = dict(sampling)
        if self.vocabulary is None and not self._asked_model:
            async with self._asking:  # nobody passes unchecked meanwhile
                if not self._asked_model:
                    await self._ask_model()
        if not sample.tokens:
            raise ValueError("it has no tokens: put the stage Tokenize(name) in front of Generate")
        check_ids(sample.tokens, self.vocabulary)
        if (seed := sampling.get("sampling_seed")) is None:
            return sampling
        return {**sampling, "sampling_seed": sibling_seed(seed, sample)}

    async def _answer(self, request: _Request) -> None:
        """One attempt after the other, until the response is done."""
        failures = 0
        workers = await self._targets(request)
        while not request.done:
            worker, rest = workers.pick(request.session, request.avoid)
            if rest > 0:
                before = workers.failures
                await request.rest(rest, workers)
                failures += workers.failures - before
                if failures >= self.attempts and workers.error is not None and not request.done:
                    raise self._unavailable(request, failures, workers.error) from workers.error
                continue
            got = len(request.tokens)
            try:
                await self._attempt(worker, request)
                worker.failures = 0
                return
            except AttemptFailed as error:
                about_another = workers is self._routed and error.status is not None
                if not isinstance(error, _AbortedUnasked) and not about_another:
                    workers.failed(worker, error)
                failures = 1 if len(request.tokens) > got else failures + 1
                self._note(request, worker, error, failures)
                if request.done:
                    return
                if request.stopped:
                    request.status = SampleStatus.ABORTED
                    return
                if failures >= self.attempts:
                    raise self._unavailable(request, failures, error) from error
                if about_another:
                    await request.rest(rest_of(failures, self.backoff))
                workers = await self._targets(request, again=True)

    def _unavailable(self, request: _Request, failures: int, error: Exception) -> WorkersUnavailable:
        return WorkersUnavailable(f"sample {request.index}: {failures} attempts failed; the last: {error}")

    def _note(self, request: _Request, worker: Worker, error: AttemptFailed, failures: int) -> None:
        self.wasted += 1
        request.avoid = worker
        request.failed += (str(error),)
        with suppress(LookupError):
            current_rollout().attempts += 1
        logger.warning(
            "sample %s: attempt %s failed, %d of %d in a row: %s",
            request.index, request.rid, failures, self.attempts, error,
        )  # fmt: skip

    async def _attempt(self, worker: Worker, request: _Request) -> None:
        """Ask the worker, and tell the stream how that ended.

        :raises AttemptFailed: the request is not done. In a stream it has what arrived.
        """
        got, began, version = len(request.tokens), _clock(), self.weight_version
        outcome: AttemptOutcome = "aborted"
        words: str | None = "cancelled"
        try:
            await self._ask(worker, request)
            if not request.done:
                raise _AbortedUnasked(f"{worker.url} aborted the request, and nobody here had asked for it")
            words = None
            if request.status is not SampleStatus.ABORTED:
                outcome = "answered"
            if (
                version == self.weight_version is not None
                and len(request.tokens) > got
                and request.spans[-1].version not in (version, UNKNOWN)
            ):
                await self._suspect(worker)
        except (AttemptFailed, RequestRefused) as error:
            words = str(error)
            if not isinstance(error, _AbortedUnasked):
                outcome = "failed"
            raise
        finally:
            with suppress(LookupError):
                current_rollout().attempt_ended(
                    attempt=request.attempt,
                    worker=worker.url,
                    rid=request.rid,
                    outcome=outcome,
                    error=words,
                    tokens=len(request.tokens) - got,
                    seconds=_clock() - began,
                )

    async def _ask(self, worker: Worker, request: _Request) -> None:
        """:raises AttemptFailed: there was no whole answer. In a stream the request has what arrived."""
        body, url = request.begin(worker), f"{worker.url}/generate"
        worker.in_flight += 1
        answered = False
        try:
            async with _NO_TIMEOUT if self.timeout is None else asyncio.timeout(self.timeout):
                if self.stream:
                    async with aclosing(self._client.events(url, body, request.headers)) as events:
                        async for event in events:
                            request.see(event)
                    request.take_seen()
                else:
                    request.take(await self._client.post(url, body, request.headers))
            answered = True
        except RequestRefused as error:
            answered = True
            raise RequestRefused(f"sample {request.index}: {error}", error.status) from error
        except (TimeoutError, ReplyError, AttemptFailed) as error:
            # What a stream has brought counts, unless it is what is wrong.
            with suppress(ReplyError):
                request.take_seen()
            if isinstance(error, AttemptFailed):
                # A router that gives up leaves the request at its worker.
                answered = error.answered and not (self._routed is not None and worker in self._routed)
                raise
            slow = f"no answer within timeout={self.timeout} s"
            raise AttemptFailed(f"{url}: {slow if isinstance(error, TimeoutError) else error}") from error
        finally:
            worker.in_flight -= 1
            if not answered:
                with anyio.CancelScope(shield=True):
                    try:
                        await self._abort_at(worker, request.rid)
                    except RequestRefused as error:  # what ends the attempt is more important
                        logger.warning("sample %s: it may still be generated: %s", request.index, error)
            request.worker = None

    async def _abort_at(self, worker: Worker, rid: str) -> None:
        """Have the worker that has this request, or every worker behind the router, give it up.

        :raises RequestRefused: a worker knows no abort.
        """
        try:
            with anyio.fail_after(ABORT_SECONDS):
                urls = [worker.url] if self._router is None else await self._worker_urls()
                await self._everywhere("/abort_request", {"rid": rid}, urls)
        except (WorkersUnavailable, RouterError, TimeoutError) as error:  # it may be dead: then nothing runs there
            logger.info("abort of %s at %s: %s", rid, worker.url, error)

    # Workers

    async def _targets(self, request: _Request, again: bool = False) -> Workers:
        """Where the request goes: through the router unless that drops what it needs."""
        if self._router is None or self._routed is None:
            return self._direct
        self._direct.look()
        lost = frozenset(lost_by_router({**request.body, "sampling_params": request.sampling}))
        if not lost:
            return self._routed
        try:
            await self._worker_urls(1.0 if again else WORKERS_SECONDS)
        except RouterError as error:
            if not self._direct:
                raise
            logger.warning("%s; its %d workers are asked as they were", error, len(self._direct))
        if not lost <= self._around:
            self._around |= lost
            logger.warning(
                "the router %s drops %s: requests with it go to its %d workers directly, each to the one with the "
                "least in flight", self._router.url, ", ".join(sorted(lost)), len(self._direct)
            )  # fmt: skip
        return self._direct

    async def _worker_urls(self, age: float = WORKERS_SECONDS) -> list[str]:
        """:param age: seconds that what the router said of its workers may be old.
        :raises RouterError: the router was not reached, or has no workers.
        """
        if self._router is not None and _clock() - self._listed_at >= age:
            urls = [*await self._router.workers(), *self._apart]
            if not urls:
                raise RouterError(f"the router {self._router.url} has no workers")
            self._direct.set(urls, away=self.weight_version is not None)
            self._listed_at = _clock()
        return [worker.url for worker in self._direct]

    async def _present(self) -> list[str]:
        """Addresses of the workers in use, and of those away that answer.

        :raises RouterError: as `_worker_urls`.
        """
        there: set[str] = set()

        async def ask(worker: Worker) -> None:
            with suppress(AttemptFailed, ReplyError, TimeoutError):
                await self._version_at(worker.url)
                there.add(worker.url)

        await self._worker_urls(age=0)
        async with anyio.create_task_group() as tasks:
            for worker in self._direct:
                if worker.away:
                    tasks.start_soon(ask, worker)
        return [worker.url for worker in self._direct if not worker.away or worker.url in there]

    async def _ask_all(
        self, path: str, body: Mapping[str, Any], urls: Iterable[str]
    ) -> tuple[dict[str, bytes], dict[str, RequestRefused | AttemptFailed]]:
        """What these workers answer, and what went wrong at the others. All are through when this returns."""
        replies: dict[str, bytes] = {}
        errors: dict[str, RequestRefused | AttemptFailed] = {}

        async def ask(url: str, data: bytes) -> None:
            try:
                replies[url] = await self._client.post(f"{url}{path}", data)
            except (RequestRefused, AttemptFailed) as error:
                errors[url] = error

        data = msgspec.json.encode(body)
        async with self, anyio.create_task_group() as tasks:
            for url in urls:
                tasks.start_soon(ask, url, data)
        return replies, errors

    async def _everywhere(self, path: str, body: Mapping[str, Any], urls: Sequence[str] | None = None) -> None:
        """Ask all workers at once. One that is down is left out: nothing runs there, and it is looked at when it is
        back. All others have answered or failed when this returns or raises.

        :raises RequestRefused: a worker refused.
        :raises WorkersUnavailable: a worker failed, or all are down.
        """
        async with self:
            urls = await self._present() if urls is None else urls
            replies, errors = await self._ask_all(path, body, urls)
        down = {url: e for url, e in errors.items() if isinstance(e, AttemptFailed) and e.answered and e.status is None}
        if replies and down.keys() == errors.keys():
            for url, error in down.items():
                self._leave_out(url, error)
        elif errors or not urls:
            raise _together(errors)

    # Workers that were away

    def _look(self, worker: Worker) -> None:
        """A worker is due: find out whether it is up, and has the current weights."""
        if self._held:
            worker.due = _clock() + self.backoff
            return
        worker.due = math.inf
        # Not in the context of the sample that happens to be here: the connection may stay.
        task = asyncio.create_task(self._look_at(worker), context=Context())
        self._looks.add(task)
        task.add_done_callback(self._looks.discard)

    async def _look_at(self, worker: Worker) -> None:
        try:
            version = await self._version_at(worker.url)
            while version is not None and self.weight_version not in (None, version):
                await self._bring_up(worker, version)
                version = await self._version_at(worker.url)
            if self._router is not None and worker.url in self._apart and not self._held:
                await self._router.add(worker.url)
                self._apart.discard(worker.url)
            if self._held:  # the weights are about to change
                worker.due = _clock() + self.backoff
                return
            self._direct.back(worker)
        except (AttemptFailed, RequestRefused, ReplyError, RouterError, TimeoutError) as error:
            logger.info("worker %s is not back: %s", worker.url, error)
            self._direct.failed(worker, error)
        except Exception as error:
            logger.error("worker %s: %r", worker.url, error, exc_info=error)
            self._direct.failed(worker, error)

    async def _bring_up(self, worker: Worker, version: str) -> None:
        """It has other weights: have it load the current ones, where they are a checkpoint.

        :raises AttemptFailed: they are not; or as `Client.post`.
        """
        if self._router is not None:
            await self._take_out([worker.url])
        has = f"worker {worker.url} has the weights {version!r}, not {self.weight_version!r}"
        if self._checkpoint is None:
            if worker.told != (version, self.weight_version):
                worker.told = (version, self.weight_version)
                logger.warning("%s: it gets no samples until an update that it takes part in", has)
            raise AttemptFailed(f"{has}, and these are no checkpoint that it could load", answered=True)
        logger.warning("%s: it loads %s", has, self._checkpoint["model_path"])
        await self._client.post(f"{worker.url}/update_weights_from_disk", msgspec.json.encode(self._checkpoint))

    async def _version_at(self, url: str) -> str | None:
        """Version of a worker's weights; None where it is up and does not say.

        :raises AttemptFailed: it is not up.
        :raises TimeoutError: it takes too long.
        :raises ReplyError: it says something else.
        """
        try:
            with anyio.fail_after(LOOK_SECONDS):
                data = await self._client.get(f"{url}/model_info")
        except RequestRefused:
            return None
        try:
            version = msgspec.json.decode(data, type=_ModelInfo).weight_version
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ReplyError(f"{url}/model_info: {error}") from error
        return None if version is None else str(version)

    def _leave_out(self, url: str, error: Exception) -> None:
        """Until it was looked at."""
        for worker in self._direct:
            if worker.url == url and not worker.away:
                logger.warning("worker %s is left out: %s", url, error)
                self._direct.failed(worker, error)

    async def _suspect(self, worker: Worker) -> None:
        """Tokens came of other weights than the workers got: one was restarted, and nobody noticed, or is new."""
        suspects = [worker]
        if self._router is not None:  # it does not say which
            if _clock() - self._listed_at < 1.0:
                return
            with suppress(RouterError):
                await self._worker_urls(age=0)
            suspects = list(self._direct)
        for each in suspects:
            if not each.away:
                each.away, each.due = True, 0.0

    async def _take_out(self, urls: Iterable[str]) -> None:
        """Workers that do not have the weights get nothing from the router either, until they come back."""
        assert self._router is not None
        for url in urls:
            if url not in self._apart:
                self._apart.add(url)
                try:
                    with anyio.fail_after(WORKERS_SECONDS):
                        await self._router.remove(url)
                except (RouterError, ValueError, TimeoutError) as error:
                    logger.error("worker %s has other weights, and the router still sends to it: %s", url, error)
        self._direct.set([*(worker.url for worker in self._direct), *self._apart], away=True)

    async def _end_looks(self) -> None:
        for task in self._looks:
            task.cancel()
        await asyncio.gather(*self._looks, return_exceptions=True)
        for worker in self._direct:
            worker.due = 0.0

    # Tokens

    async def tokenize(self, prompt: str | list[dict[str, Any]]) -> Sequence[int]:
        """Token ids of a prompt, by the tokenizer of the worker's model where that is readable here.

        :raises ValueError: it is not: put the stage `Tokenize(name)` in front of `Generate`.
        """
        if self._tokenizer is None:
            async with self:
                path = (await self._model_info()).get("tokenizer_path")
            if not isinstance(path, str) or not Path(path).is_dir():
                raise ValueError(
                    f"the worker's tokenizer {path!r} is not readable here: put the stage Tokenize(name) in front of "
                    "Generate"
                )
            logger.warning("the prompts come without tokens: they are read with the worker's own tokenizer, %s", path)
            self._tokenizer = Tokenize(path)
        return await self._tokenizer.ids(prompt)

    async def _model_info(self) -> dict[str, Any]:
        urls = await self._worker_urls()
        url = next((worker.url for worker in self._direct if not worker.away), urls[0])
        info: dict[str, Any] = msgspec.json.decode(await self._client.get(f"{url}/model_info"))
        return info

    async def _ask_model(self) -> None:
        """The size of the vocabulary from the worker's model, where that lies here."""
        with suppress(OSError, ValueError, AttributeError, RouterError), anyio.move_on_after(MODEL_SECONDS):
            path = Path((await self._model_info()).get("model_path", "")) / "config.json"
            config = msgspec.json.decode(path.read_bytes())
            size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
            self.vocabulary = size if isinstance(size, int) else None
        self._asked_model = True

    # Pause, weights, memory: always at all workers

    async def pause(self, mode: PauseMode = "retract") -> None:
        """No worker generates until `resume`. Requests are taken and kept. A worker that is down is left out, here and
        in all that follows; until `resume` none that was comes back.

        :param mode: what happens to those that run. "retract": what is computed for them is forgotten and, afterwards,
            computed again by the weights of then. "in_place": it is kept, whatever the weights are then. "abort": they
            come back with what they have, and the engine sends them again to go on from there.
        :raises WorkersUnavailable: a worker failed, or all are down; the others pause.
        """
        self._held = True
        await self._everywhere("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """:raises WorkersUnavailable: a worker failed, or all are down; the others go on."""
        try:
            await self._everywhere("/continue_generation", {})
        finally:
            self._held = False

    @asynccontextmanager
    async def updating_weights(self, version: str, pause: PauseMode = "retract") -> AsyncIterator[WeightUpdate]:
        """Workers pause, get new weights by the calls on what this gives, are told the version, and go on.

            async with engine.updating_weights("7") as update:
                await update.from_disk("/checkpoints/7")

        They go on in any case; the version is set only when the block ends without an error. It ends with one where no
        worker takes what a call asks of all. A worker that does not take what others took is left out: it gets no
        samples until its version (`/model_info`) is the current one. It takes part in the next update if it answers
        then; where this one was a single `from_disk`, it is told to load that as soon as it is back. The log names it,
        and so does `weights_updated`. From a router it is removed meanwhile, whoever else uses that.

        So from the first update on all others must come through this engine (`set_weight_version` tells it of those
        that did not). Where weights come by broadcast, a worker that was left out or restarted is missing in the
        process group: make that anew.
        """
        update = WeightUpdate(self, version, pause)
        async with self:
            try:
                await update._begin_pause()
                yield update
                await update._finish()
                await self._have(update)
            finally:
                with anyio.CancelScope(shield=True):
                    try:
                        await update._end()
                    finally:
                        await update._end_pause()
        self._tell(update)

    async def update_weights_from_disk(self, path: str, version: str, pause: PauseMode = "retract") -> None:
        """All of a weight update: pause, load the checkpoint at `path` (on the workers), set the version, go on.

        :raises RequestRefused: a worker cannot load it; the message has its words.
        """
        async with self.updating_weights(version, pause) as update:
            await update.from_disk(path)

    async def set_weight_version(self, version: str) -> None:
        """Only the name: tokens generated from now on are reported as of this version. Workers that do not take it are
        left out, as in `updating_weights`.
        """
        update = WeightUpdate(self, version, None)
        async with self:
            update.workers = await self._present()
            await update._name()
            await self._have(update)
        self._tell(update)

    async def _have(self, update: WeightUpdate) -> None:
        """Those that took part have the new weights, and no others."""
        self.weight_version, self._checkpoint = update.version, update._checkpoint
        missed = [worker.url for worker in self._direct if worker.url not in update.workers]
        if self._router is not None:
            with suppress(RouterError):
                missed += await self._router.workers(healthy=False)
            missed = [url for url in dict.fromkeys(missed) if url not in update.workers]
            await self._take_out(missed)
        for worker in self._direct:
            if worker.url in missed:
                worker.away = True
            elif worker.away and worker.url not in self._apart and worker.due < math.inf:
                self._direct.back(worker)  # else the look at it has it come back
        for url in missed:
            logger.warning(
                "worker %s has missed the weights %r: it gets no samples until it has them", url, update.version
            )
        update.missed_by = missed

    def _tell(self, update: WeightUpdate) -> None:
        for listener in tuple(self.on_weights_updated):
            listener(
                version=update.version,
                pause=update.pause,
                workers=update.workers,
                missed_by=update.missed_by,
                seconds=_clock() - update._began,
            )

    async def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        world_size: int,
        *,
        rank_offset: int = 1,
        ranks_per_worker: int = 1,
        group_name: str = "weight_update_group",
        backend: str = "nccl",
    ) -> None:
        """Workers join the process group through which a trainer sends weights; worker i takes `ranks_per_worker` ranks
        from `rank_offset + i * ranks_per_worker`. Returns when all have joined, so the trainer joins meanwhile.
        """
        urls = await self.workers()
        async with anyio.create_task_group() as tasks:
            for i, url in enumerate(urls):
                body = {
                    "master_address": master_address,
                    "master_port": master_port,
                    "rank_offset": rank_offset + i * ranks_per_worker,
                    "world_size": world_size,
                    "group_name": group_name,
                    "backend": backend,
                }
                tasks.start_soon(self._everywhere, "/init_weights_update_group", body, [url])

    async def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> None:
        await self._everywhere("/destroy_weights_update_group", {"group_name": group_name})

    async def release_memory(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Workers give back what these tags name; generation must be paused or idle."""
        await self._everywhere("/release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        await self._everywhere("/resume_memory_occupation", {"tags": list(tags)})

    async def workers(self) -> list[str]:
        """Addresses of the workers that are up, in the order in which `init_weights_update_group` numbers them."""
        async with self:
            return await self._present()


class _AbortedUnasked(AttemptFailed):
    """Nothing is wrong with the worker."""


class WeightUpdate:
    """New weights for all workers, while they pause; see `SGLangEngine.updating_weights`."""

    def __init__(self, engine: SGLangEngine, version: str, pause: PauseMode | None) -> None:
        self.version = version
        self.pause = pause
        self.workers: list[str] = []
        """Addresses of those that take part: that have taken everything so far."""
        self.missed_by: list[str] = []
        """Addresses of the others, when it is done."""
        self._engine = engine
        # With requests kept in place their cache is in use.
        self._common = {"weight_version": version, "flush_cache": pause != "in_place"}
        self._checkpoint: dict[str, Any] | None = None
        self._calls = 0
        self._began = _clock()
        self._paused: list[str] = []
        self._begun: list[str] = []

    async def from_disk(self, path: str, load_format: str | None = None) -> None:
        """A checkpoint that all workers can read."""
        body = {"model_path": path, "load_format": load_format}
        await self._update("/update_weights_from_disk", body)
        self._checkpoint = {**self._common, **body, "flush_cache": True} if self._calls == 1 else None

    async def from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str = "weight_update_group",
    ) -> None:
        """Workers receive these tensors from the trainer, which broadcasts them meanwhile. May be called several times.

        :raises RequestRefused: no worker takes part, so that the broadcast would wait for ever.
        """
        await self._begin()
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": list(map(list, shapes)),
            "group_name": group_name,
        }
        await self._update("/update_weights_from_distributed", body)

    async def from_tensors(self, serialized: Sequence[str], load_format: str | None = None) -> None:
        """Tensors as SGLang's `MultiprocessingSerializer` wrote them, in base64, one string per tensor-parallel rank.
        May be called several times.
        """
        await self._begin()
        body = {"serialized_named_tensors": list(serialized), "load_format": load_format}
        await self._update("/update_weights_from_tensor", body)

    async def _update(self, path: str, body: dict[str, Any]) -> None:
        self._calls += 1
        self._checkpoint = None
        await self._ask(path, self._common | body)

    async def _ask(self, path: str, body: Mapping[str, Any], urls: Sequence[str] | None = None) -> None:
        """Who does not take it takes no further part.

        :raises RequestRefused: nobody took it, and a worker refused it; the message has its words.
        :raises WorkersUnavailable: nobody took it.
        """
        engine = self._engine
        replies, errors = await engine._ask_all(path, body, self.workers if urls is None else urls)
        if not replies:
            raise _together(errors)
        self.workers = [url for url in self.workers if url in replies]
        for url, error in errors.items():
            engine._leave_out(url, error)

    async def _begin_pause(self) -> None:
        engine = self._engine
        engine._held = True
        self.workers = await engine._present()
        self._began = _clock()
        await self._ask("/pause_generation", {"mode": self.pause})
        self._paused = self.workers

    async def _end_pause(self) -> None:
        """:raises WorkersUnavailable: none of those that paused goes on."""
        engine = self._engine
        try:
            replies, errors = await engine._ask_all("/continue_generation", {}, self._paused)
        finally:
            engine._held = False
        if errors and not replies:
            raise _together(errors)
        for url, error in errors.items():
            engine._leave_out(url, error)

    async def _begin(self) -> None:
        """Without it the server refuses what comes in pieces."""
        if not self._begun:
            await self._ask("/begin_weight_update", {})
            self._begun = self.workers

    async def _end(self) -> None:
        begun, self._begun = self._begun, []
        if begun:
            await self._ask("/end_weight_update", {}, begun)

    async def _finish(self) -> None:
        await self._end()
        if not self._calls:  # else the workers were told with the weights
            await self._name()

    async def _name(self) -> None:
        await self._ask("/update_weight_version", {"new_version": self.version, "abort_all_requests": False})


class _Request:
    """One call of `generate`: what is to be sent, and what there is of the response."""

    __slots__ = (
        "_gone", "_seen", "_seen_versions", "_woken", "attempt", "avoid", "body", "counts", "ended", "experts",
        "experts_shape", "failed", "id", "index", "kept", "log_probs", "meta", "prompt", "rid", "sampling",
        "session", "spans", "status", "stopped", "text", "tokens", "worker",
    )  # fmt: skip

    def __init__(self, engine: SGLangEngine, sample: Sample, sampling: Mapping[str, Any], id: str) -> None:
        # Thousands of these wait at a time, and the garbage collector goes through each container that they hold: so
        # they hold few, and what only some need is made when it is needed.
        self.id = id
        self.index = sample.index
        self.session = sample.session_id
        self.sampling = sampling
        media = multimodal(sample)
        self.body = engine._body | media if media else engine._body
        self.experts_shape = engine.routed_experts
        self.prompt = sample.tokens
        self.attempt = 0
        self.failed: tuple[str, ...] = ()
        self.avoid: Worker | None = None
        self.stopped = False
        """`abort` was asked."""
        self._woken: asyncio.Event | None = None
        self.ended = False
        self._gone: asyncio.Event | None = None
        # The open attempt
        self.rid = ""
        self.worker: Worker | None = None
        self._seen: bytes | None = None
        self._seen_versions: tuple[WeightSpan, ...] = ()
        # The response so far
        self.text = ""
        self.tokens: Tokens = _NO_TOKENS
        self.log_probs: LogProbs = _NO_LOG_PROBS
        self.spans: tuple[WeightSpan, ...] = ()
        self.kept: Kept | None = None
        self.experts: Any = None
        self.status: SampleStatus | None = None
        self.meta: Mapping[str, Any] = _NOTHING
        self.counts: Mapping[str, int] = _NOTHING

    @property
    def headers(self) -> dict[str, str] | None:
        return None if self.session is None else {ROUTING_KEY: self.session}

    @property
    def done(self) -> bool:
        return self.status is not None

    def stop(self) -> None:
        self.stopped = True
        if self.worker is None and self.status is None:  # nobody works on it: it is between two attempts
            self.status = SampleStatus.ABORTED
        if self._woken is not None:
            self._woken.set()

    async def rest(self, seconds: float, workers: Workers | None = None) -> None:
        """Until then, or until `stop`, or until there is news of `workers`."""
        woken = self._woken = asyncio.Event()
        waiting = set() if workers is None else workers.waiting
        waiting.add(woken)
        try:
            with anyio.move_on_after(seconds):
                await woken.wait()
        finally:
            waiting.discard(woken)

    def end(self) -> None:
        """`generate` ends."""
        self.ended = True
        if self._gone is not None:
            self._gone.set()

    async def gone(self) -> None:
        """Until `end`."""
        if not self.ended:
            self._gone = self._gone or asyncio.Event()
            await self._gone.wait()

    def begin(self, worker: Worker) -> bytes:
        """The body of a new attempt."""
        self.attempt += 1
        self.rid = f"{self.id}-{self.attempt}"
        self.worker = worker
        self._seen, self._seen_versions = None, ()
        sampling, got = self.sampling, len(self.tokens)
        if got:
            left = {"max_new_tokens": self._budget - got}
            if minimum := sampling.get("min_new_tokens"):
                left["min_new_tokens"] = max(0, minimum - got)
            sampling = {**sampling, **left}
        body = {
            "rid": self.rid,
            "input_ids": (self.prompt + self.tokens if got else self.prompt).tolist(),
            "sampling_params": sampling,
            **self.body,
        }
        try:
            return msgspec.json.encode(body)
        except (TypeError, UnicodeEncodeError) as error:
            raise TypeError(f"sample {self.index}: the request has no JSON form: {error}") from error

    @property
    def _budget(self) -> int:
        budget = self.sampling.get("max_new_tokens")
        return SERVER_BUDGET if budget is None else int(budget)

    def see(self, event: bytes) -> None:
        """An event of the stream: it holds all that came before it, so only the last is decoded."""
        count, version = progress(event)
        before = self._seen_versions[-1].end if self._seen_versions else 0
        if count > before:
            self._seen_versions += (WeightSpan(version, before, count),)
        self._seen = event

    def take_seen(self) -> None:
        """The stream has ended: add its last event to the response.

        :raises ReplyError: as `take`; what it brought is gone.
        """
        if self._seen is not None:
            data, self._seen = self._seen, None
            self.take(data, self._seen_versions)

    def take(self, data: bytes, seen: Sequence[WeightSpan] = ()) -> None:
        """Add what a worker generated to the response.

        :param seen: spans of the versions as a stream said them on the way, for one that did not come to its end.
        :raises ReplyError: the reply contradicts itself.
        """
        before = len(self.tokens)
        reply = decode(data, len(self.prompt) + before, self.experts_shape)
        status = reply.status
        length = len(reply.tokens)
        if self.sampling.get("max_new_tokens") is not None and length > self._budget - before:
            raise ReplyError(f"{length} tokens came, max_new_tokens was {self._budget - before}")
        if reply.kept is None and length and self.body.get("return_sampling_mask"):
            raise ReplyError(
                "it has no output_token_sampling_mask: start the worker with --sampling-mask-max-tokens, and give a "
                "top_k that is not above it"
            )
        if before:
            self.text += reply.text
            self.tokens += reply.tokens
            self.log_probs += reply.log_probs
        else:
            self.text, self.tokens, self.log_probs = reply.text, reply.tokens, reply.log_probs
        for span in seen if reply.finish is None else reply.spans:
            self._add_span(span.version, span.start + before, span.end + before)
        self._keep_ids(reply)
        self.experts = reply.experts  # of all tokens, those of earlier attempts included; of a broken stream none
        self.meta = reply.meta
        self.counts = {name: self.counts.get(name, 0) + (reply.meta.get(name) or 0) for name in _COUNTS}
        if status is not SampleStatus.ABORTED or self.stopped:
            self.status = status
        elif len(self.tokens) >= self._budget:
            self.status = SampleStatus.TRUNCATED

    def _add_span(self, version: str, start: int, end: int) -> None:
        if self.spans and self.spans[-1].version == version:
            start, self.spans = self.spans[-1].start, self.spans[:-1]
        self.spans += (WeightSpan(version, start, end),)

    def _keep_ids(self, reply: Reply) -> None:
        if self.kept is None or reply.kept is None:
            self.kept = self.kept or reply.kept
            return
        shift = self.kept.offsets[-1]
        self.kept.offsets += [shift + offset for offset in reply.kept.offsets[1:]]
        self.kept.ids += reply.kept.ids
        if self.kept.log_probs is not None and reply.kept.log_probs is not None:
            self.kept.log_probs += reply.kept.log_probs

    def completion(self, sample: Sample) -> Completion:
        """The response; what a completion has no place for is put on the sample."""
        assert self.status is not None
        meta = dict(self.meta)
        if self.failed:
            meta["failed_attempts"] = list(self.failed)
        if self.experts_shape is not None and self.tokens:
            sample.rollout_routed_experts = self.experts
        if self.kept is not None:
            _append_kept(sample, self.kept)
        if self.counts.get("prompt_tokens"):
            _add(sample, "prefix_cache_info", {
                "cached_tokens": self.counts["cached_tokens"], "total_prompt_tokens": self.counts["prompt_tokens"]
            })  # fmt: skip
        if self.counts.get("spec_verify_ct"):
            _add(
                sample,
                "spec_info",
                {name: self.counts[name] for name in _SPEC} | {"completion_tokens": len(self.tokens)},
            )
        return Completion(
            self.text, self.tokens or Tokens(), self.log_probs or LogProbs(), self.status, list(self.spans), meta
        )


_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
_NO_TOKENS: Final = Tokens()
_NO_LOG_PROBS: Final = LogProbs()
"""Shared, so never added to in place."""
_NO_TIMEOUT: Final = nullcontext()
ROUTING_KEY: Final = "X-SMG-Routing-Key"
_SPEC: Final = ("spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts")
_COUNTS: Final = ("prompt_tokens", "cached_tokens", *_SPEC)


def _add(sample: Sample, field: str, counts: Mapping[str, int]) -> None:
    """Counts of an execution add up over its requests."""
    before = getattr(sample, field) or {}
    setattr(sample, field, {name: before.get(name, 0) + number for name, number in counts.items()})


def _append_kept(sample: Sample, kept: Kept) -> None:
    if sample.response_length and sample.rollout_top_p_token_ids is None:
        raise ValueError(
            f"sample {sample.index}: its first {sample.response_length} response tokens have no kept sampling ids"
        )
    if not sample.response_length:
        sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets = kept.ids, kept.offsets
        if kept.log_probs is not None:
            sample.metadata["sampling_log_probs"] = kept.log_probs
        return
    shift = sample.rollout_top_p_token_offsets[-1]
    sample.rollout_top_p_token_ids += kept.ids
    sample.rollout_top_p_token_offsets += [shift + offset for offset in kept.offsets[1:]]
    if kept.log_probs is not None:
        sample.metadata["sampling_log_probs"] += kept.log_probs


def _together(errors: Mapping[str, RequestRefused | AttemptFailed]) -> Exception:
    """What several workers said, as one error: a refusal where one refused."""
    message = "; ".join(map(str, errors.values())) or "no worker is up"
    together: Exception = WorkersUnavailable(message)
    for error in errors.values():
        together.__cause__ = error
        if isinstance(error, RequestRefused):
            hint = "; is this a router? give it as router=" if error.status == 404 else ""
            together = RequestRefused(message + hint, error.status)
            together.__cause__ = error
            break
    return together


class _ModelInfo(msgspec.Struct):
    weight_version: str | int | None = None


def _clock() -> float:
    return asyncio.get_running_loop().time()


def _address(url: str) -> str:
    scheme, _, host = url.partition("://")
    if scheme not in ("http", "https") or not host or " " in url:
        raise ValueError(f"SGLangEngine: {url!r} is no address like 'http://127.0.0.1:30000'")
    return url.rstrip("/")


def _key(sample: Sample) -> object:
    return id(sample) if sample.rollout_id is None else sample.rollout_id
