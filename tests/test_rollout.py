"""How a batch is filled: rounds, the count, the fallback, surplus, unfinished groups, the end of the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from backends.simulated import SimulatedEngine
from eventbus.batching import BatchSpec, RolloutExhausted
from eventbus.group import Batch, Group
from eventbus.pipeline import Pipeline
from eventbus.sample import Completion, Sample, SampleStatus
from eventbus.stage import ContractError, Drop, Hold
from middleware.generate import Generate
from tests.streams import Log, batches, endless, engine, kind_of, rewarded, some, strict

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]


def by_index(sample: Sample) -> float:
    assert sample.index is not None
    return float(sample.index)


def reserve(scores: dict[int, float]) -> Any:
    """A filter that holds the groups in the table and keeps the others."""

    def held(group: Group, *, remaining: int, target: int) -> Hold | None:
        return Hold("weak", scores[group.index]) if group.index in scores else None

    return held


async def test_a_batch_has_its_groups_in_order() -> None:
    pipeline = Pipeline(endless(), [Generate(engine(delay=lambda s: 100.0 - by_index(s)))], BatchSpec(4))
    (batch,) = await batches(pipeline)
    assert [group.index for group in batch.groups] == [0, 1, 2, 3]
    assert [sample.index for sample in batch.samples] == list(range(8))
    assert [sample.rollout_id for sample in batch.samples] == list(range(8))
    assert batch.summary.kept == batch.summary.target == 4


async def test_the_fastest_groups_fill_the_batch() -> None:
    pipeline = Pipeline(
        endless(1), [Generate(engine(delay=lambda s: 10.0 - by_index(s)))], BatchSpec(2, over_sampling=5)
    )
    (batch,) = await batches(pipeline)
    assert [group.index for group in batch.groups] == [3, 4]
    assert batch.summary.cancelled == 3


async def test_strict_filter_asks_for_another_round() -> None:
    """The seed's worked example: target 4, rounds of 6, groups 1, 3 and 5 rejected."""
    pipeline = Pipeline(endless(), [Generate(engine(delay=by_index)), strict([1, 3, 5])], BatchSpec(4, over_sampling=6))
    (batch,) = await batches(pipeline)
    assert [group.index for group in batch.groups] == [0, 2, 4, 6]
    assert (batch.summary.rounds, batch.summary.dropped) == (2, {"bad": 3})


async def test_rounds_are_bounded_and_the_error_says_what_was_rejected() -> None:
    pipeline = Pipeline(
        endless(), [Generate(engine()), strict(range(1000))], BatchSpec(4, over_sampling=6, max_rounds=3)
    )
    with pytest.raises(RolloutExhausted, match=r"3 rounds of 6 groups .*dropped 18 \(bad x18\).*fallback") as caught:
        await batches(pipeline)
    assert caught.value.summary.dropped == {"bad": 18}


async def test_partial_batch_when_rounds_run_out() -> None:
    spec = BatchSpec(4, max_rounds=1, on_exhausted="partial")
    (batch,) = await batches(Pipeline(endless(), [Generate(engine()), strict([0, 1])], spec))
    assert [group.index for group in batch.groups] == [2, 3]


async def test_reserve_fills_the_batch_best_first() -> None:
    spec = BatchSpec(3, over_sampling=4, max_rounds=2)
    scores = {0: 0.1, 1: 0.9, 2: 0.5, 3: 0.9, 4: 0.2, 5: 0.3, 6: 0.4}
    (batch,) = await batches(Pipeline(endless(), [Generate(engine(delay=by_index)), reserve(scores)], spec))
    assert [group.index for group in batch.groups] == [1, 3, 7]
    assert batch.summary.kept_by_fallback == 2
    assert [group.verdict.by_fallback for group in batch.groups] == [True, True, False]
    assert batch.summary.dropped == {"weak": 5}


async def test_reserve_is_not_touched_when_the_batch_fills_without_it() -> None:
    (batch,) = await batches(
        Pipeline(endless(), [Generate(engine()), reserve({0: 1.0})], BatchSpec(2, over_sampling=3))
    )
    assert [group.index for group in batch.groups] == [1, 2]
    assert batch.summary.dropped == {"weak": 1}


async def test_stages_behind_the_filter_see_what_the_reserve_gives() -> None:
    seen = []

    def last(group: Group) -> None:
        seen.append(group.index)

    await batches(Pipeline(endless(), [Generate(engine()), reserve({0: 1.0}), last], BatchSpec(2, max_rounds=1)))
    assert sorted(seen) == [0, 1]


async def test_fallback_share_of_the_loss_tokens_is_counted() -> None:
    pipeline = Pipeline(endless(), [Generate(engine(length=3)), reserve({0: 1.0})], BatchSpec(4, max_rounds=1))
    (batch,) = await batches(pipeline)
    assert (batch.summary.loss_tokens, batch.summary.fallback_loss_tokens) == (24, 6)
    assert batch.summary.fallback_share == 0.25


async def test_surplus_is_counted_and_thrown_away() -> None:
    (batch, following) = await batches(Pipeline(endless(), [Generate(engine())], BatchSpec(2, over_sampling=3)), 2)
    assert batch.summary.surplus == 1
    assert [group.index for group in following.groups] == [3, 4]


async def test_surplus_is_carried_into_the_next_batch() -> None:
    log = Log("group_submitted", "group_completed")
    spec = BatchSpec(2, over_sampling=3, surplus="carry")
    first, second = await batches(Pipeline(endless(), [Generate(engine())], spec, observers=[log]), 2)
    assert (first.summary.surplus, first.summary.carried) == (0, 1)
    carried = next(event for event in log.of("group_submitted") if event.origin == "carried")
    assert carried.rollout_id == 1
    assert carried.group_index in [group.index for group in second.groups]
    again = log.events[log.events.index(carried) + 1]  # each rollout's events stand for themselves
    assert (kind_of(again), again.rollout_id, again.group_index) == ("group_completed", 1, carried.group_index)


class Slow:
    """Answers each group after its own time; counts how often each execution was asked."""

    def __init__(self, length: int = 10) -> None:
        self.asked: list[tuple[int | None, int]] = []
        self.inner = engine(
            delay=lambda sample: 1.0 if sample.group_index in (0, 1) else 8.0 + by_index(sample), length=length
        )
        self.abort = self.inner.abort

    async def generate(self, sample: Sample, sampling: Any) -> Completion:
        self.asked.append((sample.index, sample.response_length))
        return await self.inner.generate(sample, sampling)


async def test_unfinished_groups_are_asked_again_from_the_start() -> None:
    slow, log = Slow(), Log("group_submitted", "group_ended")
    pipeline = Pipeline(endless(1), [Generate(slow)], BatchSpec(2, over_sampling=3), observers=[log])
    first, second = await batches(pipeline, 2)
    assert first.summary.cancelled == 1
    assert slow.asked.count((2, 0)) == 2
    assert next(e for e in log.of("group_submitted") if e.rollout_id == 1).origin == "restarted"
    assert 2 in [group.index for group in second.groups]
    assert all(sample.response_length == 10 for sample in second.samples)


async def test_unfinished_groups_are_recycled_with_their_tokens() -> None:
    slow = Slow()
    pipeline = Pipeline(
        endless(1), [Generate(slow, {"max_new_tokens": 10})], BatchSpec(2, over_sampling=3, unfinished="recycle")
    )
    first, second = await batches(pipeline, 2)
    assert first.summary.recycled == 1
    assert slow.asked.count((2, 0)) == 1
    assert (2, 1) in slow.asked
    (sample,) = [sample for sample in second.samples if sample.index == 2]
    assert sample.response_length == len(sample.tokens) == len(sample.rollout_log_probs or ()) == 10
    assert sample.status is SampleStatus.COMPLETED
    assert sample.metadata["start_rollout_id"] == 0


async def test_recycled_group_keeps_the_results_of_finished_siblings() -> None:
    asked: list[int | None] = []

    def delay(sample: Sample) -> float:
        asked.append(sample.index)
        return (10.0 if asked.count(5) == 1 else 0.5) if sample.index == 5 else 1.0

    marked: list[int | None] = []

    def mark(sample: Sample) -> None:
        marked.append(sample.index)

    spec, log = BatchSpec(2, over_sampling=3, unfinished="recycle"), Log("group_submitted")
    stages = [Generate(engine(delay, 10)), mark]
    first, second = await batches(Pipeline(endless(2), stages, spec, observers=[log]), 2)
    assert [group.index for group in first.groups] == [0, 1]
    assert 2 in [group.index for group in second.groups]
    assert (asked.count(4), asked.count(5)) == (1, 2)
    assert (marked.count(4), marked.count(5)) == (1, 1)
    recycled = next(event for event in log.events if event.origin == "recycled")
    assert [[one.columns["tokens"][0] for one in samples] for samples in recycled.samples] == [[0], [10], [1]]


async def test_recycled_sample_past_its_engine_is_not_generated_again() -> None:
    asked: list[int | None] = []
    judged: list[int | None] = []

    def delay(sample: Sample) -> float:
        asked.append(sample.index)
        return 1.0

    async def slow_judge(sample: Sample) -> None:
        import anyio

        sample.metadata["judged"] = sample.metadata.get("judged", 0) + 1
        judged.append(sample.index)
        await anyio.sleep((100.0 if judged.count(2) == 1 else 0.5) if sample.index == 2 else 5.0)

    spec = BatchSpec(2, over_sampling=3, unfinished="recycle")
    pipeline = Pipeline(endless(1), [Generate(engine(delay)), slow_judge], spec)
    _, second = await batches(pipeline, 2)
    assert asked.count(2) == 1
    assert judged.count(2) == 2
    (sample,) = [sample for sample in second.samples if sample.index == 2]
    assert sample.metadata["judged"] == 1


async def test_unfinished_groups_can_be_forgotten() -> None:
    slow = Slow()
    pipeline = Pipeline(endless(1), [Generate(slow)], BatchSpec(2, over_sampling=3, unfinished="cancel"))
    _, second = await batches(pipeline, 2)
    assert slow.asked.count((2, 0)) == 1
    assert [group.index for group in second.groups] == [3, 4]


async def test_a_full_batch_does_not_wait_for_a_slow_judge() -> None:
    import anyio

    async def slow_judge(sample: Sample) -> None:
        await anyio.sleep(1.0 if sample.group_index in (0, 1) else 10_000.0)

    async with Pipeline(endless(1), [Generate(engine()), slow_judge], BatchSpec(2, over_sampling=4)) as pipeline:
        async for _ in pipeline.rollouts(stop=1):
            assert anyio.current_time() < 2.0


async def test_an_engine_that_does_not_abort_in_time_is_left() -> None:
    import anyio

    class Deaf(SimulatedEngine):
        async def abort(self, samples: Any) -> None:
            await anyio.sleep_forever()

    deaf = Deaf(lambda s: Completion("x", [1], [0.0]), delay=lambda s: 1.0 if s.index == 0 else 1e6)
    async with Pipeline(endless(1), [Generate(deaf)], BatchSpec(1, over_sampling=2, abort_timeout=5.0)) as pipeline:
        async for batch in pipeline.rollouts(stop=1):
            assert anyio.current_time() == pytest.approx(6.0)
            assert batch.summary.cancelled == 1
    assert deaf.in_flight == 0


async def test_engine_without_abort_is_cancelled() -> None:
    slow = Slow()
    del slow.abort
    (batch,) = await batches(Pipeline(endless(1), [Generate(slow)], BatchSpec(2, over_sampling=3)))
    assert batch.summary.cancelled == 1
    assert slow.inner.in_flight == 0


async def test_aborted_by_the_engine_itself_is_asked_again() -> None:
    tries: list[int | None] = []

    def answer(sample: Sample) -> Completion:
        tries.append(sample.index)
        if sample.index == 1 and tries.count(1) == 1:
            return Completion("", [], [], SampleStatus.ABORTED)
        return Completion("x", [1], [0.0])

    seen: list[SampleStatus] = []

    def later(sample: Sample) -> None:
        seen.append(sample.status)

    (batch,) = await batches(Pipeline(endless(1), [Generate(SimulatedEngine(answer)), later], BatchSpec(2)))
    assert [group.index for group in batch.groups] == [0, 1]
    assert SampleStatus.ABORTED not in seen


async def test_prompts_that_end_at_a_boundary_end_the_iteration() -> None:
    assert len(await batches(Pipeline(some(4), [Generate(engine())], BatchSpec(2)), 100)) == 2


async def test_prompts_that_end_inside_a_batch_are_an_error_by_default() -> None:
    with pytest.raises(RolloutExhausted, match=r"the prompts ended .* kept 1/2"):
        await batches(Pipeline(some(3), [Generate(engine())], BatchSpec(2)), 100)


async def test_prompts_that_end_inside_a_batch_can_give_a_partial_one() -> None:
    given = await batches(Pipeline(some(3), [Generate(engine())], BatchSpec(2, on_exhausted="partial")), 100)
    assert [len(batch) for batch in given] == [2, 1]


async def test_prompts_can_begin_again() -> None:
    given = await batches(Pipeline(some(3), [Generate(engine())], BatchSpec(2, on_exhausted="wrap")), 3)
    assert [[group.index for group in batch.groups] for batch in given] == [[0, 1], [2, 3], [4, 5]]
    assert given[1].groups[1].prompt == "prompt 0"


async def test_a_dropped_sample_takes_its_group_along() -> None:
    def picky(sample: Sample) -> Drop | None:
        return Drop("loops") if sample.index == 3 else None

    (batch,) = await batches(Pipeline(endless(), [Generate(engine()), picky], BatchSpec(2)))
    assert [group.index for group in batch.groups] == [0, 2]
    assert batch.summary.dropped == {"loops": 1}


async def test_a_group_may_shrink() -> None:
    def picky(sample: Sample) -> Drop | None:
        return Drop("loops") if sample.index in (1, 4, 5, 6) else None

    spec = BatchSpec(2, min_group_size=3)
    (batch,) = await batches(Pipeline(endless(4), [Generate(engine()), picky], spec))
    assert [[sample.index for sample in group.samples] for group in batch.groups] == [[0, 2, 3], [8, 9, 10, 11]]
    assert batch.summary.dropped == {"loops": 1}


async def test_a_doomed_group_stops_at_once() -> None:
    slow = engine(delay=lambda s: 1.0 if s.index == 0 else 100.0)

    def picky(sample: Sample) -> Drop | None:
        return Drop("loops") if sample.group_index == 0 else None

    import anyio

    async with Pipeline(endless(2), [Generate(slow), picky], BatchSpec(1, max_rounds=1)) as pipeline:
        with pytest.raises(RolloutExhausted):
            await anext(pipeline.rollouts())
        assert anyio.current_time() == 1.0


async def test_group_stages_without_the_count_overlap() -> None:
    import anyio

    async def slow(group: Group) -> None:
        await anyio.sleep(10.0)

    async with Pipeline(endless(), [Generate(engine()), slow], BatchSpec(8)) as pipeline:
        await anext(pipeline.rollouts())
        assert anyio.current_time() == 10.0


async def test_batch_stage_may_replace_the_batch() -> None:
    def shuffled(batch: Batch, *, rollout_id: int) -> Batch:
        return Batch(rollout_id, batch.groups[::-1], batch.summary)

    (batch,) = await batches(Pipeline(endless(), [Generate(engine()), shuffled], BatchSpec(2)))
    assert [group.index for group in batch.groups] == [1, 0]


async def test_only_a_counting_stage_may_hold() -> None:
    def early(group: Group) -> Any:
        return Hold("weak", 1.0)

    with pytest.raises(ContractError, match=r"stage 'early' returned Hold for group 0.*asks for `remaining`"):
        await batches(Pipeline(endless(), [Generate(engine()), early], BatchSpec(2)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("groups", 0),
        ("over_sampling", 0),
        ("max_rounds", 0),
        ("min_group_size", 0),
        ("max_failures", -1),
        ("surplus", "x"),
    ],
)
def test_a_number_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"BatchSpec\\({field}={value!r}\\)"):
        BatchSpec(**{"groups": 1, field: value})


def test_min_group_size_beyond_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"min_group_size=3\) is more than the group_size=2"):
        Pipeline(endless(2), [], BatchSpec(1, min_group_size=3))


def test_plain_list_of_prompts_shows_how_to_wrap_it() -> None:
    with pytest.raises(TypeError, match=r"wrap it, Prompts"):
        Pipeline(["2+2="], [], BatchSpec(1))  # type: ignore[arg-type]


async def test_rewards_are_counted_before_and_after_the_filter() -> None:
    pipeline = Pipeline(endless(1), [Generate(engine()), rewarded([0, 1]), strict([0])], BatchSpec(1))
    (batch,) = await batches(pipeline)
    assert (batch.summary.reward_mean, batch.summary.kept_reward_mean) == (0.5, 1.0)


@pytest.mark.virtual_time
async def test_samples_are_aborted_in_the_order_in_which_they_were_asked() -> None:
    class Noting:
        def __init__(self) -> None:
            self.inner = engine(lambda sample: 1.0 if sample.group_index == 0 else 50.0)
            self.generate = self.inner.generate
            self.aborted: list[int | None] = []

        async def abort(self, samples: Sequence[Sample]) -> None:
            self.aborted += [sample.index for sample in samples]
            await self.inner.abort(samples)

    noting = Noting()
    await batches(Pipeline(endless(8), [Generate(noting)], BatchSpec(1, over_sampling=6)))
    assert noting.aborted == list(range(8, 48))
