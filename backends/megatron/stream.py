"""`ShardedStream`: one rank owns the stream, and every rank trains its part of each batch.

All ranks run one script, and in it one loop. Started by torchrun, this is all of it:

    async def main() -> None:
        dist.init_process_group()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        model, optimizer, scheduler = build()                          # as for megatron-core's own training loop
        trainer = MegatronTrainer(model, optimizer, scheduler, max_tokens_per_gpu=16384)
        engine = SGLangEngine("http://127.0.0.1:30000")
        pipeline = Pipeline(prompts, stages, BatchSpec(groups=32))     # building it opens nothing
        names, broadcast = llama_names(trainer.config, vocab_size=32000), Broadcast()

        async with ShardedStream(pipeline, trainer) as stream:         # opens the pipeline, on rank 0 alone
            async for shard in stream.rollouts(stop=100):              # on every rank: its part of the batch
                result = await trainer.train(shard)
                await send_weights(model, engine, version=result.weight_version, mapping=names, by=broadcast)
                shard.trained(result)                                  # the owner's pipeline hears of it
                if dist.get_rank() == 0:
                    print(shard.rollout_id, result.metrics["loss"], shard.summary)
                if shard.rollout_id % 10 == 9:                         # `stream.load_state_dict` goes on there
                    save(model, optimizer, scheduler, stream=stream.state_dict())
        trainer.close()

    asyncio.run(main())

What it keeps true:

- the ranks go through the loop side by side: each batch reaches all of them, or none;
- a batch is checked and planned on the owner before any rank gets its part. What is wrong with it, and what ends the
  pipeline there, is raised with the same type on every rank, before the model runs;
- a rank that leaves releases the others: at the end of the rollouts, by `break`, by an error or by cancellation. Where
  they are inside of a collective of the model they cannot hear of it, and end when that does: over gloo when the failed
  process ends, over NCCL when its watchdog, or torchrun, ends them;
- a sample is sent once to each data-parallel rank, and on from there to the ranks that share it.

What ranks say to each other goes through the store of the default process group, where nobody blocks; samples go over
gloo groups of its own, in eventbus' wire format.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar

import anyio
import msgspec
import torch
import torch.distributed as dist
from anyio.to_thread import run_sync

from backends.megatron.shard import Shard
from backends.megatron.threads import to_the_end
from eventbus.events import GroupEnded
from eventbus.group import Batch, TrainResult
from eventbus.pipeline import Pipeline, RolloutIterator
from eventbus.prompts import PromptSource
from eventbus.sample import Sample
from eventbus.wire import decode, encode

__all__ = ["RankFailed", "ShardIterator", "ShardedStream", "Shards"]

T = TypeVar("T")

logger = logging.getLogger("rolloutbus.megatron")

HEAR_SECONDS: Final = 1.0
"""After which who waits looks whether a rank has failed."""
LEAVE_SECONDS: Final = 10.0
"""That a rank which leaves waits for the others to leave too, since with it the store may go."""

_GONE: Final = "the store of the process group is gone, and rank 0 with it"

_streams = itertools.count()  # every rank opens its streams in the same order


class RankFailed(RuntimeError):
    """Another rank has failed or left; the message says which and why."""


class Shards(Protocol):
    """What cuts batches, such as a `MegatronTrainer`."""

    def shards(self, batch: Batch, /) -> list[Shard]:
        """One for each data-parallel rank. Called on the owner alone, in a thread."""


class ShardedStream:
    """The batches of a pipeline, cut for the ranks of a trainer. Every rank opens one; see the top of this module.

    :param pipeline: used on the owner only; the other ranks may pass None.
    :param trainer: has `shards`.
    :param owner: the rank that runs the pipeline.
    :param timeout: seconds for the samples of one batch to reach all ranks, and before that, from when the owner asks
        for the batch or has it, for all ranks to ask for it too. The owner may take any time for a batch.
    :raises ValueError: there is no such owner, or it has no pipeline.
    """

    def __init__(self, pipeline: Pipeline | None, trainer: Shards, *, owner: int = 0, timeout: float = 600.0) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        if not 0 <= owner < size:
            raise ValueError(f"ShardedStream: owner is {owner}, but there are {size} ranks")
        if rank == owner and pipeline is None:
            raise ValueError(f"ShardedStream: rank {rank} owns the stream, so it needs the pipeline")
        self.owner = owner
        self.rank = rank
        self.timeout = timeout
        self.weight_version: str | None = None
        """The last that a shard was acknowledged with."""
        self._trainer = trainer
        self._pipeline = pipeline if rank == owner else None
        self._next = 0
        self._ledger: _Ledger | None = None
        if self._pipeline is not None:
            self._ledger = _Ledger(self._pipeline.prompts, self._pipeline.batch.unfinished == "cancel")
            self._pipeline.prompts = self._ledger
        self._begun = False
        self._opened = False
        self._talk: _Talk | None = None
        self._announced: BaseException | None = None

    async def __aenter__(self) -> Self:
        """:raises RuntimeError: it is entered already."""
        if self._talk is not None:
            raise RuntimeError("this stream is entered already")
        self._talk = talk = _Talk(self.owner, timedelta(seconds=self.timeout))
        await run_sync(talk.open)
        if self._pipeline is not None:
            try:
                await self._pipeline.__aenter__()
            except BaseException as error:
                await self._leave(error)
                raise
            self._opened = True
            self._events = self._pipeline.events(("group_ended",), capacity=1_000_000)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = await self._leave(error)
        if failed is not None and (error is None or _is_of_torch(error)):
            raise RankFailed(failed) from error

    def rollouts(self, start: int | None = None, stop: int | None = None, ahead: int = 0) -> ShardIterator:
        """As `Pipeline.rollouts`, on every rank with the same arguments.

        :param start: None: where the last iterator, or the loaded state, has come to.
        """
        start = self._next if start is None else start
        batches = None if self._pipeline is None else self._pipeline.rollouts(start, stop, ahead)
        return ShardIterator(self, batches)

    # A checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, for JSON and for a checkpoint of the model: prompts, rollout and weights.

        Call it on the owner after a step, when the weights that are saved with it have been trained on the last shard:
        that is where a stream which loads it goes on. Prompts that were asked for, and have neither come into one of
        the shards nor been dropped, are asked again. On other ranks it is empty.
        """
        if self._ledger is None:
            return {}
        return {"rollout_id": self._next, "weight_version": self.weight_version, **self._ledger.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave, before the first shard is asked for. On every rank, with the owner's
        state; all but `rollout_id` and `weight_version` is used on the owner only.

        :raises ValueError: it is no such state, or was saved with other prompts.
        :raises RuntimeError: a shard was asked for already; or the prompts cannot be restored.
        """
        if self._begun:
            raise RuntimeError("load_state_dict comes too late: a shard was asked for already")
        try:
            found = msgspec.convert(state, _State)
        except msgspec.ValidationError as error:
            raise ValueError(f"this is no state of a ShardedStream: {error}") from None
        if self._ledger is not None:
            self._ledger.load(found)
        self._next, self.weight_version = found.rollout_id, found.weight_version

    # For the iterator

    async def _batch(self, batches: RolloutIterator) -> Shard:
        """On the owner: the next batch, announced and sent to all."""
        talk = self._entered
        try:
            batch = await self._unless_failed(batches.__anext__)
            shards = await run_sync(self._trainer.shards, batch)
            if len(shards) != talk.parts:
                raise ValueError(f"the trainer cut the batch into {len(shards)} shards for {talk.parts} ranks")
            for shard in shards:
                shard.summary = batch.summary
            parts = await run_sync(_encoded, shards, talk.needed)
        except StopAsyncIteration:
            await run_sync(talk.announce, _Message(end=True))
            raise
        except RankFailed:
            raise
        except Exception as error:
            self._announced = error
            await run_sync(talk.announce, _Message(error=_Error.of(error, self.rank)))
            raise
        try:
            with anyio.fail_after(self.timeout):
                await self._until(talk.all_ready)
        except TimeoutError:
            raise RankFailed(
                f"ranks {await run_sync(talk.not_ready)} did not ask for the next batch within {self.timeout:g} s: "
                "they have died, hang, or need a longer timeout"
            ) from None
        await self._transferred(partial(talk.send, parts))
        await self._consume(batch)
        shard = shards[talk.part]
        shard._acknowledge = batch.trained  # type: ignore[attr-defined]
        return shard

    async def _consume(self, batch: Batch) -> None:
        if self._ledger is not None:
            with anyio.move_on_after(0):  # what there is
                async for event in self._events:
                    if isinstance(event, GroupEnded) and not event.evaluation:
                        self._ledger.ended(event)
            self._ledger.delivered(batch.rollout_id)

    async def _shard(self) -> Shard:
        """On the others: what the owner announces."""
        talk = self._entered
        await run_sync(talk.ready)
        message = await self._until(talk.hear)
        if message.error is not None:
            self._announced = message.error.rebuilt()
            raise self._announced
        if message.end:
            raise StopAsyncIteration
        return await self._transferred(partial(talk.receive, message.sizes))

    async def _until(self, ask: Callable[[], T | None]) -> T:
        """Ask again and again; give up when another rank fails."""
        while (answer := await run_sync(ask, abandon_on_cancel=True)) is None:
            if (failed := await run_sync(self._entered.failed)) is not None:
                raise RankFailed(failed)
        return answer

    async def _transferred(self, work: Callable[[], T]) -> T:
        talk = self._entered
        try:
            return await to_the_end(work)
        except RuntimeError as error:  # of gloo
            raise RankFailed(await run_sync(talk.failed) or f"samples did not reach all ranks: {error}") from error

    async def _unless_failed(self, work: Callable[[], Any]) -> Any:
        """Await it; give up when another rank fails."""
        talk = self._entered
        failed: str | None = None
        results: list[Any] = []
        errors: list[BaseException] = []
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                nonlocal failed
                while (failed := await run_sync(talk.failed)) is None:
                    await anyio.sleep(HEAR_SECONDS)
                tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            try:
                results.append(await work())
            except Exception as error:  # a task group would put it into another
                errors.append(error)
            tasks.cancel_scope.cancel()
        if errors:
            raise errors[0]
        if results:
            return results[0]
        raise RankFailed(failed or "another rank failed")

    @property
    def _entered(self) -> _Talk:
        if self._talk is None:
            raise RuntimeError("the stream is not entered: `async with ShardedStream(...) as stream: ...`")
        return self._talk

    async def _leave(self, error: BaseException | None) -> str | None:
        """Release the others, close the pipeline. What another rank failed with."""
        talk, self._talk = self._entered, None
        try:
            with anyio.CancelScope(shield=True):
                failed = await run_sync(talk.leave, None if error is self._announced else error)
                failed = None if error is self._announced is not None else failed
            if self._pipeline is not None and self._opened:
                self._opened = False
                kind, trace = (None, None) if error is None else (type(error), error.__traceback__)
                await self._pipeline.__aexit__(kind, error, trace)
        finally:
            with anyio.CancelScope(shield=True):
                await run_sync(talk.close)
        return failed


class ShardIterator:
    """`ShardedStream.rollouts(...)`."""

    def __init__(self, stream: ShardedStream, batches: RolloutIterator | None) -> None:
        self._stream = stream
        self._batches = batches
        self._last: Shard | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Shard:
        """:raises RankFailed: another rank has failed or left.
        :raises BatchError: the owner's batch cannot be trained on; as all errors of the owner's pipeline and of the
            trainer's `shards` it is raised on all ranks, with its own type where that takes a message alone, else as
            `RankFailed`.
        """
        stream = self._stream
        stream._begun = True
        if self._last is not None:
            self._last.__dict__.pop("_acknowledge", None)
        shard = await (stream._shard() if self._batches is None else stream._batch(self._batches))
        stream._next = shard.rollout_id + 1
        acknowledge = getattr(shard, "_acknowledge", None)

        def trained(result: TrainResult | None) -> None:
            if acknowledge is not None:
                acknowledge(result)
            if result is not None and result.weight_version is not None:
                stream.weight_version = result.weight_version

        shard._acknowledge = trained  # type: ignore[attr-defined]
        self._last = shard
        return shard


# What the ranks say


class _Error(msgspec.Struct, array_like=True):
    kind: str
    """Module and name of its class."""
    message: str
    rank: int

    @classmethod
    def of(cls, error: BaseException, rank: int) -> _Error:
        words = str(error)
        if isinstance(error, BaseExceptionGroup):
            words += ": " + "; ".join(f"{type(each).__name__}: {each}" for each in error.exceptions)
        return cls(f"{type(error).__module__}:{type(error).__qualname__}", words, rank)

    def rebuilt(self) -> Exception:
        """The same error; or a `RankFailed` where its class is not known here or takes more than a message."""
        module, _, name = self.kind.partition(":")
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            with suppress(Exception):
                error = kind(self.message)
                if str(error) == self.message:
                    return error
        return RankFailed(f"rank {self.rank} failed: {name}: {self.message}")


class _Message(msgspec.Struct, omit_defaults=True):
    """From the owner to all: the next batch, or that there is none."""

    sizes: list[int] = []
    """Bytes of each data-parallel rank's shard."""
    end: bool = False
    error: _Error | None = None


class _Talk:
    """How ranks reach each other. Its methods block, so they run in threads, one at a time."""

    def __init__(self, owner: int, timeout: timedelta) -> None:
        self.owner = owner
        self.rank = dist.get_rank()
        self._timeout = timeout
        self._said = 0
        self._heard = 0
        """On the owner: what was said before this all others have heard."""
        self._cleared = 0
        self._ended = False
        self._groups: list[Any] = []

    def open(self) -> None:
        """Every rank, at the same time."""
        mpu = import_module("megatron.core.parallel_state")
        number = next(_streams)
        # A connection of its own: who waits in a store holds it for itself.
        c10d: Any = import_module("torch.distributed.distributed_c10d")
        store = c10d._get_default_store().clone()
        self._store = c10d.PrefixStore(f"rolloutbus/{number}", store)
        ranks = range(dist.get_world_size())
        self._store.set(f"part/{self.rank}", str(mpu.get_data_parallel_rank()))
        parts = [int(self._store.get(f"part/{rank}")) for rank in ranks]
        self.part = parts[self.rank]
        self.parts = max(parts) + 1
        members = [[rank for rank in ranks if parts[rank] == part] for part in range(self.parts)]
        self._leaders = [self.owner if self.owner in group else group[0] for group in members]
        self.needed = [part for part in range(self.parts) if part != self.part or len(members[part]) > 1]
        self._all = self._group(list(ranks))
        own = [self._group(group) for group in members]
        self._peers = own[self.part] if len(members[self.part]) > 1 else None

    def _group(self, ranks: Sequence[int]) -> Any:
        group = dist.new_group(list(ranks), backend="gloo", timeout=self._timeout)
        if self.rank in ranks:
            self._groups.append(group)
        return group

    def announce(self, message: _Message) -> None:
        """On the owner, to all others."""
        number = self._said
        self._store.set(f"next/{number}", msgspec.msgpack.encode(message))
        for old in range(self._cleared, self._heard):
            for key in (f"next/{old}", f"ready/{old}", f"all/{old}"):
                self._store.delete_key(key)
        self._cleared = self._heard
        self._count(message)

    def ready(self) -> None:
        """On the others, to the owner: nothing keeps this rank from taking what comes next."""
        self._store.set(f"at/{self.rank}", str(self._said))
        if self._store.add(f"ready/{self._said}", 1) == dist.get_world_size() - 1:
            self._store.set(f"all/{self._said}", "")

    def all_ready(self) -> bool | None:
        """None: not yet. Before that nothing is sent: a transfer to a rank that is gone would wait in vain."""
        if dist.get_world_size() > 1 and not self._has(f"all/{self._said}"):
            return None
        self._heard = self._said  # who asks for this one has heard those before; of an end nobody tells the owner
        return True

    def not_ready(self) -> list[int]:
        """Which ranks have not asked for the batch."""
        asked = str(self._said).encode()
        others = [f"at/{rank}" for rank in range(dist.get_world_size())]
        return [
            rank
            for rank, key in enumerate(others)
            if rank != self.rank and not (self._store.check([key]) and self._store.get(key) == asked)
        ]

    def hear(self) -> _Message | None:
        """What the owner says next; None: nothing yet."""
        key = f"next/{self._said}"
        if not self._has(key):
            return None
        message = msgspec.msgpack.decode(self._store.get(key), type=_Message)
        self._count(message)
        return message

    def _count(self, message: _Message) -> None:
        self._said += 1
        self._ended = message.end or message.error is not None

    def _has(self, key: str) -> bool:
        """Within a second."""
        try:
            self._store.wait([key], timedelta(seconds=HEAR_SECONDS))
        except dist.DistStoreError:
            return False
        except dist.DistNetworkError as error:
            raise RankFailed(f"{_GONE}: {error}") from error
        return True

    def failed(self, *keys: str) -> str | None:
        """Which other rank has failed, or left early, and why."""
        try:
            for key in keys or ("failed", "early"):
                if self._store.check([key]):
                    words = self._store.get(key).decode()
                    return None if words.startswith(f"rank {self.rank} ") else str(words)
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            return f"{_GONE}: {error}"
        return None

    def send(self, parts: Sequence[bytes]) -> None:
        """On the owner: announced to all, to the first rank of each data-parallel rank and to those that share the
        owner's shard."""
        self.announce(_Message(sizes=list(map(len, parts))))
        tensors = {part: _tensor(data) for part, data in enumerate(parts) if data}
        work: list[Any] = [
            dist.isend(tensors[part], leader, group=self._all)
            for part, leader in enumerate(self._leaders)
            if leader != self.owner
        ]
        if self._peers is not None:
            dist.broadcast(tensors[self.part], self.owner, group=self._peers)
        for each in work:
            each.wait()

    def receive(self, sizes: Sequence[int]) -> Shard:
        data = torch.empty(sizes[self.part], dtype=torch.uint8)
        leader = self._leaders[self.part]
        if self.rank == leader:
            dist.recv(data, self.owner, group=self._all)
        if self._peers is not None:
            dist.broadcast(data, leader, group=self._peers)
        return decode(data.numpy().data, Shard)

    def leave(self, error: BaseException | None) -> str | None:
        """Say that this rank goes, and why; give the others the time to do so too.

        :returns: what another rank failed with; for a rank that goes by an error, also that one left early.
        """
        with suppress(dist.DistStoreError, dist.DistNetworkError):
            if error is not None:
                words = f"rank {self.rank} failed: {type(error).__name__}: {error}"
                self._store.compare_set("failed", "", words)  # the first one counts
            elif not self._ended and self.rank == self.owner:
                self.announce(_Message(end=True))
            elif not self._ended:
                self._store.compare_set("early", "", f"rank {self.rank} left the stream before its end")
            self._store.set(f"left/{self.rank}", "")
            everyone = [f"left/{rank}" for rank in range(dist.get_world_size())]
            try:
                self._store.wait(everyone, timedelta(seconds=LEAVE_SECONDS))
            except dist.DistStoreError:
                others = [rank for rank, key in enumerate(everyone) if not self._store.check([key])]
                words = f"ranks {others} did not leave the stream: they have died, hang, or wait in a collective"
                logger.warning("rank %d leaves the stream; %s", self.rank, words)
                if error is not None:
                    error.add_note(words)
            return self.failed("failed") if error is None else self.failed()
        return None if error is None else _GONE

    def close(self) -> None:
        for group in self._groups:
            dist.destroy_process_group(group)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _encoded(shards: Sequence[Shard], needed: Sequence[int]) -> list[bytes]:
    return [encode(shard) if part in needed else b"" for part, shard in enumerate(shards)]


def _is_of_torch(error: BaseException | None) -> bool:
    """What a collective raises when another rank is gone."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


# What has been consumed


class _State(msgspec.Struct):
    rollout_id: int
    weight_version: str | None
    prompts: dict[str, Any]
    """The position of the source."""
    open: list[str]
    """Prototypes that it has given and that nobody has consumed: `encode`d, as hexadecimal digits."""


class _Ledger:
    """Stands before a source of prompts, and knows which of them were given and not yet consumed.

    Consumed is a prompt whose group was delivered in a batch, or that has ended without coming back.
    """

    def __init__(self, source: PromptSource, cancelled_is_gone: bool) -> None:
        self._source = source
        self._gone = {"dropped", "failed", "surplus"} | ({"cancelled"} if cancelled_is_gone else set())
        self._again: deque[Sample] = deque()
        self._open: dict[int | None, Sample] = {}
        self._kept: dict[int, list[int]] = {}
        """In batches that were not delivered yet."""

    @property
    def group_size(self) -> int:
        return self._source.group_size

    @property
    def position(self) -> dict[str, Any]:
        return self._source.position

    async def take(self, count: int, /) -> list[Sample]:
        taken = [self._again.popleft() for _ in range(min(count, len(self._again)))]
        if len(taken) < count:
            taken += await self._source.take(count - len(taken))
        self._open |= {sample.group_index: sample.copy() for sample in taken}
        return taken

    def rewind(self) -> None:
        self._source.rewind()

    def restore(self, position: dict[str, Any], /) -> None:
        self._source.restore(position)

    def ended(self, event: GroupEnded) -> None:
        if event.outcome in self._gone:
            self._open.pop(event.group_index, None)
        elif event.outcome == "kept":
            self._kept.setdefault(event.rollout_id, []).append(event.group_index)

    def delivered(self, rollout_id: int) -> None:
        for index in self._kept.pop(rollout_id, ()):
            self._open.pop(index, None)

    def state(self) -> dict[str, Any]:
        open_ = [encode(sample).hex() for sample in (*self._open.values(), *self._again)]
        return {"prompts": self._source.position, "open": open_}

    def load(self, state: _State) -> None:
        again = [decode(bytes.fromhex(data), Sample) for data in state.open]
        self._source.restore(state.prompts)
        self._again, self._open = deque(again), {}
