"""`SGLangEngine`: generation on SGLang servers, over HTTP, or on an engine in this process.

A request flows through the modules in this order: `engine` takes it and checks it (`request`, `model`), `attempts` asks
for it until its `response` is done, `fleet` and `workers` say who is asked, `client` (or `inprocess`) asks, and `reply`
reads the answer. Weight updates go through `weights`.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from ssl import SSLContext
from types import MappingProxyType, TracebackType
from typing import Any, Self
from uuid import uuid4

import anyio
import msgspec
from anyio import current_time

from backends.sglang.attempts import Attempts
from backends.sglang.client import Access, Client, address
from backends.sglang.fleet import MEMORY_SECONDS, STEP_SECONDS, Fleet, together
from backends.sglang.inprocess import ADDRESS, InProcess
from backends.sglang.model import Model
from backends.sglang.request import check_fields, check_sampling, sibling_seed
from backends.sglang.response import Response
from backends.sglang.router import SGLangRouter
from backends.sglang.weights import PauseMode, WeightUpdate, above_zero, set_version, updating
from eventbus.sample import Completion, Sample

__all__ = ["PauseMode", "SGLangEngine", "WeightUpdate"]


class SGLangEngine:
    """Generates on SGLang servers (0.5.23): one, several, or those behind a router.

        SGLangEngine("http://127.0.0.1:30000")
        SGLangEngine(urls=["http://10.0.0.1:30000", "http://10.0.0.2:30000"])
        SGLangEngine(router="http://127.0.0.1:3000", attempts=4)
        SGLangEngine(in_process=sglang.Engine(model_path="Qwen/Qwen3-0.6B"))

    With several workers each request goes to the one with the least in flight. Behind a router the router chooses;
    requests that need what it drops, and everything that is no generation, go to its workers directly.

    From the first weight update on, workers must have the weights of the last one (`updating_weights`); of weights that
    come to them some other way it is told by `set_weight_version`.

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
    :param vocabulary: number of token ids; a server dies of one beyond it, so none is sent, or taken from a reply. By
        default it is read from the worker's model where that is readable here.
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
        urls = urls if url is None else [url]
        if attempts < 1:
            raise ValueError(f"SGLangEngine: attempts is {attempts}, it must be at least 1")
        above_zero("SGLangEngine", timeout)
        if not backoff > 0:
            raise ValueError(f"SGLangEngine: backoff is {backoff}, it must be more than 0 seconds")
        if vocabulary is not None and vocabulary < 1:
            raise ValueError(f"SGLangEngine: vocabulary is {vocabulary}, it must be at least 1, or None")
        check_fields(fields)
        self.on_weights_updated: list[Callable[..., None]] = []
        """Called after each update with the keywords `version`, `pause`, `workers`, `missed_by`, `seconds`, as in
        `WeightsUpdated`. A pipeline puts its own here while it is open."""
        client: Client | InProcess
        if in_process is not None:
            client, addresses = InProcess(in_process), [ADDRESS]
        else:
            client, addresses = Client(Access(api_key, ssl)), [address(url) for url in urls]
        if isinstance(router, str):
            router = SGLangRouter(router, api_key=api_key, ssl=ssl)
        self._fleet = Fleet(client, addresses, router, backoff)
        self._model = Model(self._fleet, vocabulary)
        self._attempts = Attempts(self._fleet, stream=stream, limit=attempts, timeout=timeout, backoff=backoff)
        self._experts = routed_experts
        self._body = {"return_logprob": True, "stream": stream, **fields}
        """What all requests have in common."""
        if routed_experts is not None:
            self._body["return_routed_experts"] = True
        self._checked: Mapping[str, Any] | None = None
        """The sampling parameters that were checked last: most often they are the same."""
        self._open: dict[object, Response] = {}
        self._name, self._count = uuid4().hex, itertools.count()

    async def __aenter__(self) -> Self:
        """:raises RuntimeError: the loop is not asyncio's, or not the one that the engine in this process works on.
        :raises RouterError: the router does not start, or is not reached.
        """
        await self._fleet.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._fleet.__aexit__(kind, error, trace)

    @property
    def in_flight(self) -> int:
        """Calls of `generate` that are open."""
        return len(self._open)

    @property
    def wasted(self) -> int:
        """Attempts that failed; what they generated beyond what a stream had brought is lost."""
        return self._attempts.failed

    @property
    def weight_version(self) -> str | None:
        """The last that was set here."""
        return self._fleet.weight_version

    # Generation

    async def generate(self, sample: Sample, sampling: Mapping[str, Any]) -> Completion:
        """Continue `sample.tokens`.

        `sampling` holds SGLang's sampling parameters. A `sampling_seed` gives each sample of the run a seed of its own.
        A server ignores it unless it was started with `--enable-deterministic-inference`. With that flag a request
        without a seed gets the same one as all others, so that the siblings of a group are equal: give one.
        `sample.session_id` keeps the requests of a session at one worker; `sample.multimodal_inputs` holds fields such
        as `image_data`. What the reply says beside the response is in `Completion.meta`, by SGLang's names; attempts
        that failed are in `meta["failed_attempts"]`. Kept sampling ids (`return_sampling_mask`), routed experts,
        speculative and prefix-cache counts are put on the sample, the log-probs of the kept ids as
        `metadata["sampling_log_probs"]`.

        :raises ValueError: a sampling parameter, a token id or a multimodal field is wrong; names the sample.
        :raises RequestRefused: the server refused the request; a `ValueError` too.
        :raises WorkersUnavailable: `attempts` failed in a row; a `ConnectionError`.
        """
        try:
            checked = self._checked_sampling(sample, sampling)
            response = Response(sample, checked, self._body, self._experts, f"{self._name}-{next(self._count)}")
        except (ValueError, TypeError) as error:
            raise type(error)(f"sample {sample.index}: {error}") from error
        key = _key(sample)
        if key in self._open:
            raise ValueError(f"sample {sample.index}: the execution {sample.rollout_id} is being generated already")
        self._open[key] = response  # from here on it can be aborted
        try:
            async with self._fleet:
                vocabulary = await self._model.vocabulary()
                try:
                    response.limit_ids(vocabulary)
                except ValueError as error:
                    raise ValueError(f"sample {sample.index}: {error}") from error
                await self._attempts.complete(response)
        finally:
            del self._open[key]
            response.end()
        return response.completion(sample)

    def _checked_sampling(self, sample: Sample, sampling: Mapping[str, Any]) -> Mapping[str, Any]:
        if sampling != self._checked:
            check_sampling(sampling)
            self._checked = dict(sampling)
        if not sample.tokens:
            raise ValueError("it has no tokens: put the stage Tokenize(name) in front of Generate")
        if (seed := sampling.get("sampling_seed")) is None:
            return sampling
        return {**sampling, "sampling_seed": sibling_seed(seed, sample)}

    async def abort(self, samples: Sequence[Sample]) -> None:
        """Their `generate` returns what there is, with status ABORTED. When this returns, they are gone; a worker that
        acknowledges no abort is not waited for longer than some seconds.

        :raises RequestRefused: a worker knows no abort, as a router does: give it as `router=`.
        """
        open_ = (self._open.get(_key(sample)) for sample in samples)
        await self._attempts.stop([response for response in open_ if response is not None])

    async def tokenize(self, prompt: str | list[dict[str, Any]]) -> Sequence[int]:
        """Token ids of a prompt, by the tokenizer of the worker's model where that is readable here.

        :raises ValueError: it is not: put the stage `Tokenize(name)` in front of `Generate`.
        """
        return await self._model.tokenize(prompt)

    # Pause, weights, memory: always at all workers

    async def pause(self, mode: PauseMode = "retract") -> None:
        """No worker generates until `resume`. Requests are taken and kept. A worker that is down is left out, here and
        in all that follows; until `resume` none that was comes back.

        :param mode: what happens to those that run. "retract": what is computed for them is forgotten and, afterwards,
            computed again by the weights of then. "in_place": it is kept, whatever the weights are then. "abort": they
            come back with what they have, and the engine sends them again to go on from there.
        :raises WorkersUnavailable: a worker failed, or all are down; the others pause.
        """
        self._fleet.held = mode
        await self._fleet.everywhere("/pause_generation", {"mode": mode}, seconds=STEP_SECONDS)

    async def resume(self) -> None:
        """One that fails to go on gets no requests until it does.

        :raises WorkersUnavailable: a worker failed, or all are down; the others go on.
        """
        urls: list[str] = []
        try:
            async with self._fleet:
                urls = await self._fleet.present()
                replies, errors = await self._fleet.go_on(urls)
        except BaseException:  # cut off: nobody else would tell them
            with anyio.CancelScope(shield=True):
                await self._fleet.go_on(urls or [worker.url for worker in self._fleet.workers])
            raise
        self._fleet.leave_out(errors)
        self._fleet.settle(replies, errors)

    @asynccontextmanager
    async def updating_weights(
        self, version: str, pause: PauseMode = "retract", timeout: float | None = 1800.0
    ) -> AsyncIterator[WeightUpdate]:
        """Workers pause, get new weights by the calls on what this gives, are told the version, and go on.

            async with engine.updating_weights("7") as update:
                await update.from_disk("/checkpoints/7")

        They go on in any case; the version is set only when the block ends without an error. It ends with one where no
        worker takes what a call asks of all. A worker that does not take what others took is left out: it gets no
        samples until its version (`/model_info`) is the current one. It takes part in the next update if it answers
        then; where this one was a single `from_disk`, it is told to load that as soon as it is back. The log names it,
        and so does `weights_updated`. From a router it is removed meanwhile, whoever else uses that.

        So from the first update on, weights that somebody else gives to the workers count as wrong ones: a worker whose
        version is another is left out, and gets those of the last update back where they are a checkpoint. Let all
        updates come through this engine, or `pause` before the others, and `set_weight_version` before you `resume`.

        Where weights come by broadcast, a worker that was left out or restarted is missing in the process group: make
        that anew.

        :param timeout: seconds that a worker may take for one call that brings weights; None: as long as it takes. One
            that takes longer counts as one that does not take it. Half an hour is what a checkpoint of 600 billion
            parameters in 16 bits takes at 0.7 GB/s. A worker that hangs, and yet says that it is up, costs the next
            update as much: restart it.
        """
        async with updating(self._fleet, version, pause, timeout) as update:
            yield update
        self._tell(update)

    async def update_weights_from_disk(
        self, path: str, version: str, pause: PauseMode = "retract", timeout: float | None = 1800.0
    ) -> None:
        """All of a weight update: pause, load the checkpoint at `path` (on the workers), set the version, go on.

        :param timeout: seconds that a worker may take to load it, as in `updating_weights`.
        :raises RequestRefused: no worker loads it, and one says why; the message has its words.
        :raises WorkersUnavailable: no worker loads it.
        """
        async with self.updating_weights(version, pause, timeout) as update:
            await update.from_disk(path)

    async def set_weight_version(self, version: str) -> None:
        """Only the name: tokens generated from now on are reported as of this version, whoever brought the weights, and
        this is the version that workers must have. Those that do not take it are left out, as in `updating_weights`.
        """
        self._tell(await set_version(self._fleet, version))

    def _tell(self, update: WeightUpdate) -> None:
        for listener in tuple(self.on_weights_updated):
            listener(
                version=update.version,
                pause=update.pause,
                workers=update.workers,
                missed_by=update.missed_by,
                seconds=current_time() - update.began,
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
        timeout: float | None = 300.0,
    ) -> None:
        """Workers join the process group through which a trainer sends weights; worker i takes `ranks_per_worker` ranks
        from `rank_offset + i * ranks_per_worker`. Returns when all have joined, so the trainer joins meanwhile.

        :param timeout: seconds until all have joined; None: as long as it takes. A worker that still waits then for
            ranks that do not come does nothing else, until the time-out of its own process group: restart it.
        :raises RequestRefused: a worker refused; the others may wait for it until the time is over.
        :raises WorkersUnavailable: a worker failed, or has not joined in time; or all are down.
        """
        above_zero("init_weights_update_group", timeout)
        body = {
            "master_address": master_address,
            "master_port": master_port,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        async with self:
            bodies = {
                url: msgspec.json.encode(body | {"rank_offset": rank_offset + place * ranks_per_worker})
                for place, url in enumerate(await self._fleet.present())
            }
            replies, errors = await self._fleet.ask_each("/init_weights_update_group", bodies, timeout)
        if errors or not replies:
            raise together(errors)

    async def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> None:
        """:raises RequestRefused: a worker has no such group.
        :raises WorkersUnavailable: a worker failed or took more than a minute, or all are down.
        """
        body = {"group_name": group_name}
        await self._fleet.everywhere("/destroy_weights_update_group", body, seconds=STEP_SECONDS)

    async def release_memory(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Workers give back what these tags name, once all their data-parallel ranks are idle: pause generation first,
        or end what runs. What they have cached of prompts is forgotten, whatever the tags.

        :raises RequestRefused: a worker has requests under way for 10 s; nobody has given anything back.
        :raises WorkersUnavailable: a worker failed or took more than five minutes, or all are down.
        """
        async with self._fleet:
            urls = await self._fleet.idle()
            await self._fleet.everywhere("/release_memory_occupation", {"tags": list(tags)}, urls, MEMORY_SECONDS)

    async def resume_memory(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Workers take it again. Weights of which the server kept no copy on the host are undefined until an
        update brings them.

        :raises WorkersUnavailable: a worker failed or took more than five minutes, or all are down.
        """
        await self._fleet.everywhere("/resume_memory_occupation", {"tags": list(tags)}, seconds=MEMORY_SECONDS)

    async def workers(self) -> list[str]:
        """Addresses of the workers that are up, in the order in which `init_weights_update_group` numbers them."""
        return await self._fleet.present()


def _key(sample: Sample) -> object:
    return id(sample) if sample.rollout_id is None else sample.rollout_id
