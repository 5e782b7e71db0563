"""What `test_megatron_stream.py` runs on two and on four ranks, over gloo:

    python -m torch.distributed.run --nproc-per-node 4 -m tests.megatron_stream_worker FOLDER

Every rank of a case runs the same function. Rank 0 writes FOLDER/found.json: for each case what went wrong, or null.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import torch.distributed as dist

from backends.megatron.packing import BatchError, step_totals
from backends.megatron.plan import ParallelLayout, SampleTooLong, plan_microbatches
from backends.megatron.shard import Shard, ShardStep
from backends.megatron.stream import RankFailed, ShardedStream
from backends.megatron.trainer import MegatronTrainer
from backends.megatron.weights import Checkpoint, send_weights
from backends.simulated import SimulatedEngine
from eventbus import Batch, BatchSpec, Completion, Drop, Pipeline, Prompts, Sample, TrainResult
from eventbus.batching import RolloutExhausted
from eventbus.wire import WireError
from middleware import Generate
from tests import megatron_model as tiny
from tests.megatron_ranks import run_cases
from tests.megatron_shims import core, leave_kernels_out, take_the_cpu_for_a_gpu

GROUP_SIZE = 2


class Trainer:
    """Cuts batches as `MegatronTrainer` does; its step is one sum over all ranks."""

    def __init__(self, dp: int) -> None:
        self.layout = ParallelLayout(dp=dp)
        self.steps = 0
        self.cut = threading.Event()
        self.cut.set()

    def shards(self, batch: Batch) -> list[Shard]:
        assert self.cut.wait(30)
        samples = batch.samples
        plan = plan_microbatches([len(sample.tokens) for sample in samples], self.layout, max_tokens_per_gpu=40)
        shards = [Shard(batch.rollout_id, []) for _ in range(self.layout.dp)]
        for step in plan:
            totals = step_totals([samples[n] for rank in step.micro_batches for part in rank for n in part])
            for shard, parts in zip(shards, step.micro_batches, strict=True):
                shard.steps.append(ShardStep([[samples[n] for n in part] for part in parts], totals))
        return shards

    async def train(self, shard: Shard) -> TrainResult:
        tokens = torch.tensor(float(sum(len(sample.tokens) for sample in shard.samples)))
        group = core("parallel_state", "get_data_parallel_group")()
        await anyio.to_thread.run_sync(lambda: dist.all_reduce(tokens, group=group))
        self.steps += 1
        return TrainResult({"tokens": float(tokens)}, str(self.steps))


def completion(sample: Sample) -> Completion:
    length = 1 + (sample.index or 0) % 5
    return Completion(text="x" * length, tokens=[7] * length, log_probs=[-0.5] * length)


def tokenized(sample: Sample) -> None:
    sample.tokens = [1, 2, 3, int(str(sample.prompt))]  # type: ignore[assignment]


def rewarded(sample: Sample) -> None:
    sample.reward = 1.0
    sample.train_metadata = {"advantage": 0.5, "picture": torch.arange(4)}


def advantaged(sample: Sample) -> None:
    number = sample.index or 0
    sample.tokens = [*sample.tokens[:4], *((number + 5 * n) % 60 for n in range(sample.response_length))]  # type: ignore[assignment]
    sample.train_metadata = {"advantage": 1.0 if number % 2 else -0.5}


def pipeline(*stages: Any, prompts: int = 40, groups: int = 4, **options: Any) -> Pipeline:
    return Pipeline(
        Prompts([str(number) for number in range(prompts)], group_size=GROUP_SIZE),
        [tokenized, Generate(SimulatedEngine(completion)), rewarded, *stages],
        BatchSpec(groups=groups, **options),
    )


class Case:
    """What the ranks of one case share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.part = core("parallel_state", "get_data_parallel_rank")()
        self.parts = core("parallel_state", "get_data_parallel_world_size")()
        self.trainer = Trainer(self.parts)

    def everyones(self, value: Any) -> list[Any]:
        """What each rank passes."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    async def until_failed(self, stream: ShardedStream) -> None:
        """Another rank has said so."""
        while await anyio.to_thread.run_sync(stream._entered.failed) is None:
            await anyio.sleep(0.01)


async def every_sample_reaches_its_ranks_once(case: Case) -> None:
    stream_of = pipeline()
    seen: list[Any] = []
    async with ShardedStream(stream_of, case.trainer) as stream:
        events = stream_of.events(("batch_trained", "weights_updated")) if case.rank == 0 else None
        async for shard in stream.rollouts(stop=3):
            assert shard.summary is not None
            assert shard.summary.kept == 4
            for sample in shard.samples:
                assert torch.equal((sample.train_metadata or {})["picture"], torch.arange(4))
            seen.append([(s.index, list(s.tokens), list(s.rollout_log_probs or ())) for s in shard.samples])
            result = await case.trainer.train(shard)
            shard.trained(result)
            [totals] = {step.totals.tokens for step in shard.steps}
            assert totals + 4 * 4 * GROUP_SIZE == result.metrics["tokens"]  # with those of the prompts
    assert stream.weight_version == "3"
    everyones = case.everyones((case.part, seen))
    of_part = dict(everyones)
    assert all(samples == of_part[part] for part, samples in everyones)  # those that share a part have the same
    for rollout in range(3):
        indices = sorted(index for samples in of_part.values() for index, _, _ in samples[rollout])
        assert indices == list(range(8 * rollout, 8 * rollout + 8))
    if events is not None:
        assert [event.kind async for event in events] == ["batch_trained", "weights_updated"] * 3


async def another_rank_may_own_it(case: Case) -> None:
    own = pipeline() if case.rank == 1 else None
    with pytest.raises(ValueError, match="owner is 9, but there are"):
        ShardedStream(own, case.trainer, owner=9)
    async with ShardedStream(own, case.trainer, owner=1) as stream:
        indices = [sample.index async for shard in stream.rollouts(stop=1) for sample in shard.samples]
    assert sorted({index for each in case.everyones(indices) for index in each}) == list(range(8))


async def loops_are_free(case: Case) -> None:
    """The owner's while it cuts the batch, another's while it waits for it."""
    waits = case.folder / "waits"
    last = case.size - 1

    async def only_when_the_other_waits(sample: Sample) -> None:
        while not waits.exists():  # another process says so
            await anyio.sleep(0.01)

    async def tick() -> None:
        if case.rank == last:
            waits.write_text("")
        if case.rank == 0:
            while not waits.exists():
                await anyio.sleep(0.01)
            case.trainer.cut.set()

    case.trainer.cut.clear()
    async with ShardedStream(pipeline(only_when_the_other_waits), case.trainer) as stream:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tick)
            assert len([shard async for shard in stream.rollouts(stop=1)]) == 1


async def a_bad_batch_is_the_same_error_everywhere(case: Case) -> None:
    def too_long(sample: Sample) -> None:
        if (sample.group_index or 0) < 4:
            sample.tokens = [9] * 60  # type: ignore[assignment]
            sample.response_length = 5
            sample.rollout_log_probs = [-0.5] * 5  # type: ignore[assignment]

    async with ShardedStream(pipeline(too_long), case.trainer) as stream:
        shards = stream.rollouts(stop=2)
        with pytest.raises(SampleTooLong, match=r"sample 0 takes 60 tokens .* raise max_tokens") as caught:
            await anext(shards)
        assert len(set(case.everyones(str(caught.value)))) == 1
        shard = await anext(shards)  # and the stream goes on
        assert shard.rollout_id == 1
        await case.trainer.train(shard)


async def a_bad_batch_ends_all_ranks_alike(case: Case) -> None:
    def not_finite(sample: Sample) -> None:
        if sample.index == 3:
            sample.rollout_log_probs = [float("nan")] * sample.response_length  # type: ignore[assignment]

    with pytest.raises(BatchError, match="sample 3: rollout_log_probs is nan for response token 0"):
        async with ShardedStream(pipeline(not_finite), case.trainer) as stream:
            async for shard in stream.rollouts(stop=1):
                await case.trainer.train(shard)


async def what_cannot_be_sent_is_named(case: Case) -> None:
    def with_a_lock(sample: Sample) -> None:
        sample.metadata["lock"] = threading.Lock()

    with pytest.raises(WireError, match=r"sample \d+: metadata.lock cannot be encoded: no codec"):
        async with ShardedStream(pipeline(with_a_lock), case.trainer) as stream:
            await anext(stream.rollouts(stop=1))


async def the_pipelines_error_ends_all_ranks(case: Case) -> None:
    def nothing(sample: Sample) -> Drop:
        return Drop("never good")

    with pytest.raises((RolloutExhausted, RankFailed), match="never good"):
        async with ShardedStream(pipeline(nothing, max_rounds=1), case.trainer) as stream:
            await anext(stream.rollouts(stop=1))


async def prompts_end_for_all(case: Case) -> None:
    async with ShardedStream(pipeline(prompts=8), case.trainer) as stream:
        assert [shard.rollout_id async for shard in stream.rollouts()] == [0, 1]
        for _ in range(3):  # nobody waits for the slowest to hear of an end
            assert [shard.rollout_id async for shard in stream.rollouts()] == []


async def a_failing_rank_releases_the_others(case: Case) -> None:
    last = case.size - 1
    with pytest.raises((ValueError, RankFailed)) as caught:
        async with ShardedStream(pipeline(), case.trainer) as stream:
            async for shard in stream.rollouts(stop=3):
                if case.rank == last and shard.rollout_id == 1:
                    raise ValueError("no memory left")
    wanted = "no memory left" if case.rank == last else f"rank {last} failed: ValueError: no memory left"
    assert str(caught.value) == wanted


async def a_failing_owner_releases_the_others(case: Case) -> None:
    with pytest.raises((KeyError, RankFailed)) as caught:
        async with ShardedStream(pipeline(), case.trainer) as stream:
            async for shard in stream.rollouts(stop=3):
                if case.rank == 0 and shard.rollout_id == 1:
                    raise KeyError("mine")
    assert str(caught.value) == ("'mine'" if case.rank == 0 else "rank 0 failed: KeyError: 'mine'")


async def an_error_of_all_ranks_stays_what_it_is(case: Case) -> None:
    with pytest.raises(FloatingPointError, match="the gradient is not finite"):
        async with ShardedStream(pipeline(), case.trainer) as stream:
            async for _ in stream.rollouts(stop=3):
                raise FloatingPointError("the gradient is not finite")


async def all_may_break_together(case: Case) -> None:
    async with ShardedStream(pipeline(), case.trainer) as stream:
        async for _ in stream.rollouts(stop=3):
            break


async def a_collective_that_breaks_names_the_rank(case: Case) -> None:
    """torch only says that a connection was closed; the stream says whose fault it was."""
    last = case.size - 1
    with pytest.raises((ValueError, RankFailed)) as caught:
        async with ShardedStream(pipeline(), case.trainer) as stream:
            async for _ in stream.rollouts(stop=3):
                if case.rank == last:
                    raise ValueError("no memory left")
                await case.until_failed(stream)
                raise RuntimeError("Connection closed by peer")
    wanted = "no memory left" if case.rank == last else f"rank {last} failed: ValueError: no memory left"
    assert str(caught.value) == wanted


async def a_rank_that_breaks_alone_ends_the_others(case: Case) -> None:
    """And hears of it, before it goes on alone."""
    last = case.size - 1
    with pytest.raises(RankFailed, match=f"rank {last} left the stream before its end"):
        async with ShardedStream(pipeline(), case.trainer) as stream:
            async for _ in stream.rollouts(stop=3):
                if case.rank == last:
                    break
                await case.until_failed(stream)


async def a_rank_that_never_asks_is_named(case: Case) -> None:
    """It may have died where nobody waits for it in a collective."""
    last = case.size - 1
    with pytest.raises(RankFailed, match=rf"ranks \[.*{last}\] did not ask for the next batch within 0.1 s"):
        async with ShardedStream(pipeline(), case.trainer) as stream:
            stream.timeout = 0.1
            if case.rank == last:
                await case.until_failed(stream)
            await anext(stream.rollouts(stop=1))


async def a_shard_is_acknowledged_once(case: Case) -> None:
    """On all ranks alike."""
    async with ShardedStream(pipeline(), case.trainer) as stream:
        shards = stream.rollouts(stop=2)
        first = await anext(shards)
        with pytest.raises(TypeError, match="takes a TrainResult"):
            first.trained({"loss": 1.0})  # type: ignore[arg-type]
        first.trained(TrainResult({}, "step-7"))
        assert stream.weight_version == "step-7"
        with pytest.raises(RuntimeError, match="shard 0 was acknowledged before"):
            first.trained()
        with pytest.raises(RuntimeError, match="comes too late"):
            stream.load_state_dict(stream.state_dict())
        second = await anext(shards)
        with pytest.raises(StopAsyncIteration):
            await anext(shards)
        with pytest.raises(RuntimeError, match="shard 1 was acknowledged before"):
            second.trained()
    with pytest.raises(RuntimeError, match="did not come from a ShardedStream"):
        Shard(0, []).trained()


async def the_owner_may_break(case: Case) -> None:
    seen = 0
    async with ShardedStream(pipeline(), case.trainer) as stream:
        async for _ in stream.rollouts(stop=3):
            seen += 1
            if case.rank == 0 and seen == 2:
                break
    assert seen == 2


async def a_cancelled_owner_releases_the_others(case: Case) -> None:
    async def never(sample: Sample) -> None:
        scope.cancel()
        await anyio.sleep_forever()

    with anyio.CancelScope() as scope:
        with pytest.raises(RankFailed, match="rank 0 failed: Cancel"):
            async with ShardedStream(pipeline(never), case.trainer) as stream:
                await anext(stream.rollouts(stop=1))
    assert scope.cancelled_caught == (case.rank == 0)


async def a_resumed_stream_asks_for_the_right_prompts(case: Case) -> None:
    """16 of 24 prompts are good, as many as four batches hold: each of them is trained on once, in whichever."""

    def every_third_goes(sample: Sample) -> Drop | None:
        return Drop("third") if (sample.group_index or 0) % 3 == 2 else None

    def again() -> ShardedStream:
        own = pipeline(every_third_goes, prompts=24, over_sampling=6, surplus="carry")
        return ShardedStream(own, case.trainer)

    trained: set[tuple[int, int]] = set()

    def train(shard: Shard) -> None:
        trained.update((shard.rollout_id, sample.group_index or 0) for sample in shard.samples)

    state: dict[str, Any] = {}
    async with again() as stream:
        async for shard in stream.rollouts(stop=4, ahead=1):  # the next one is under way
            train(shard)
            shard.trained(await case.trainer.train(shard))
            if shard.rollout_id == 1:
                state = json.loads(json.dumps(stream.state_dict()))  # on the owner; it goes into the model's checkpoint
                break
    assert (state == {}) == (case.rank != 0)
    state = case.everyones(state)[0]
    assert (state["rollout_id"], state["weight_version"]) == (2, str(case.trainer.steps))
    with pytest.raises(ValueError, match="this is no state of a ShardedStream"):
        again().load_state_dict({"rollout_id": 2})
    resumed = again()
    resumed.load_state_dict(state)
    async with resumed as stream:
        async for shard in stream.rollouts(stop=4):
            train(shard)
    assert stream.weight_version == state["weight_version"]
    everyones = set().union(*case.everyones(trained))
    assert {rollout for rollout, _ in everyones} == {0, 1, 2, 3}
    assert sorted(group for _, group in everyones) == [group for group in range(24) if group % 3 != 2]


async def a_real_trainer_trains_on_it(case: Case) -> None:
    """The whole loop, with a model of megatron-core. FOLDER/metrics.json and the checkpoints are compared with those of
    other layouts."""
    take_the_cpu_for_a_gpu()
    core("tensor_parallel.random", "model_parallel_cuda_manual_seed")(0)
    chunks = tiny.build(tiny.config(), tiny.weights())
    trainer = MegatronTrainer(chunks, tiny.optimizer(chunks, lr=0.01), max_tokens_per_gpu=40)
    checkpoints = Checkpoint(case.folder)
    seen: list[dict[str, float]] = []
    async with ShardedStream(pipeline(advantaged), trainer) as stream:
        async for shard in stream.rollouts(stop=3):
            result = await trainer.train(shard)
            version = result.weight_version or ""
            await send_weights(chunks, None, version=version, mapping=lambda *named: [named], by=checkpoints)
            shard.trained(result)
            seen.append(result.metrics)
    trainer.close()
    assert stream.weight_version == "3"
    assert len({json.dumps(each) for each in case.everyones(seen)}) == 1
    if case.rank == 0:
        (case.folder / "metrics.json").write_text(json.dumps(seen))


CASES: Sequence[Callable[[Case], Awaitable[None]]] = [
    every_sample_reaches_its_ranks_once,
    another_rank_may_own_it,
    loops_are_free,
    a_bad_batch_is_the_same_error_everywhere,
    a_bad_batch_ends_all_ranks_alike,
    what_cannot_be_sent_is_named,
    the_pipelines_error_ends_all_ranks,
    prompts_end_for_all,
    a_failing_rank_releases_the_others,
    a_failing_owner_releases_the_others,
    an_error_of_all_ranks_stays_what_it_is,
    all_may_break_together,
    a_collective_that_breaks_names_the_rank,
    a_rank_that_breaks_alone_ends_the_others,
    a_rank_that_never_asks_is_named,
    a_shard_is_acknowledged_once,
    the_owner_may_break,
    a_cancelled_owner_releases_the_others,
    a_resumed_stream_asks_for_the_right_prompts,
    a_real_trainer_trains_on_it,
]


def _run(case: Any, folder: Path) -> None:
    asyncio.run(case(Case(folder)))


def main(arguments: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    leave_kernels_out()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    core("parallel_state", "initialize_model_parallel")(tensor_model_parallel_size=dist.get_world_size() // 2)
    run_cases({case.__name__: partial(_run, case) for case in CASES}, arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
