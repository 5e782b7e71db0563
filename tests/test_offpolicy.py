from __future__ import annotations

from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.simulated import SimulatedEngine
from eventbus import BatchSpec, Pipeline, Sample, SampleStatus
from eventbus.columns import LossMask, Tokens
from eventbus.group import Group
from eventbus.sample import Completion, WeightSpan
from eventbus.stage import bind
from middleware import Generate, mask_offpolicy
from tests.streams import batches, endless


def sample_of(*spans: tuple[str, int], mask: list[int] | None = None, **fields: Any) -> Sample:
    """A response whose spans have these versions and lengths."""
    ends = [sum(length for _, length in spans[: i + 1]) for i in range(len(spans))]
    versions = [WeightSpan(version, end - length, end) for (version, length), end in zip(spans, ends, strict=True)]
    return Sample(
        tokens=Tokens([7] + [1] * sum(length for _, length in spans)),
        response_length=sum(length for _, length in spans),
        loss_mask=None if mask is None else LossMask(mask),
        weight_versions=versions,
        **fields,
    )


def masks(*executions: Any) -> list[Any]:
    group = Group(4, "p", [one if isinstance(one, list) else [one] for one in executions])
    mask_offpolicy(group)
    return [sample.loss_mask for sample in group.samples]


def test_it_binds_as_a_group_stage() -> None:
    assert (bind(mask_offpolicy).level, bind(mask_offpolicy).name) == ("group", "mask_offpolicy")


def test_older_parts_and_older_siblings_do_not_count() -> None:
    assert masks(sample_of(("6", 2), ("7", 3)), sample_of(("6", 2)), sample_of(("7", 2))) == [
        [0, 0, 1, 1, 1],
        [0, 0],
        None,
    ]


def test_one_version_changes_nothing() -> None:
    assert masks(sample_of(("6", 2)), sample_of(("6", 1), ("6", 1))) == [None, None]
    assert masks(sample_of(), Sample()) == [None, None]


def test_masks_that_were_there_stay() -> None:
    assert masks(sample_of(("6", 2), ("7", 3), mask=[1, 0, 1, 0, 1])) == [[0, 0, 1, 0, 1]]


def test_numbers_are_compared_as_numbers_and_other_names_are_older() -> None:
    assert masks(sample_of(("10", 1)), sample_of(("9", 1)), sample_of(("default", 1)))[1:] == [[0], [0]]


def test_without_numbers_the_newest_is_where_samples_ended() -> None:
    assert masks(sample_of(("a", 1), ("b", 1), ("c", 1)), sample_of(("b", 1))) == [[0, 0, 1], [0]]
    with pytest.raises(ValueError, match=r"group 4: which of the weight versions 'a' and 'b' is the newest"):
        masks(sample_of(("a", 1)), sample_of(("b", 1)))


def test_tokens_that_no_span_names_keep_their_mask() -> None:
    sample = sample_of(("6", 1), ("7", 1), ("8", 2))
    sample.weight_versions = [WeightSpan("6", 0, 1), WeightSpan("8", 2, 4)]
    assert masks(sample, Sample(tokens=Tokens([1, 2]), response_length=1)) == [[0, 1, 1, 1], None]


def test_children_are_masked_each_by_itself_also_when_they_share_a_mask() -> None:
    parent = sample_of(("6", 2), ("7", 2), mask=[1, 1, 1, 1])
    short = parent.copy()
    short.response_length, short.loss_mask = 1, parent.loss_mask[:1] if parent.loss_mask else None
    twin = parent.copy()
    twin.loss_mask = parent.loss_mask
    shared = parent.loss_mask
    assert masks([parent, short, twin]) == [[0, 0, 1, 1], [0], [0, 0, 1, 1]]
    assert shared == [1, 1, 1, 1]


SPANS = st.lists(st.tuples(st.sampled_from(["default", "3", "20", "100"]), st.integers(0, 4)), max_size=4)


@given(st.lists(st.tuples(SPANS, st.randoms(use_true_random=False), st.booleans()), min_size=1, max_size=4))
def test_newest_tokens_are_never_touched_and_no_zero_becomes_one(drawn: list[Any]) -> None:
    samples = []
    for spans, random, masked in drawn:
        sample = sample_of(*spans)
        if masked:
            sample.loss_mask = LossMask(random.randint(0, 1) for _ in range(sample.response_length))
        samples.append(sample)
    versions = [span.version for sample in samples for span in sample.weight_versions if span.start < span.end]
    newest = max(versions, key=["default", "3", "20", "100"].index, default=None)
    before = [list(sample.loss_mask or [1] * sample.response_length) for sample in samples]
    masks(*samples)
    for sample, old in zip(samples, before, strict=True):
        new = list(sample.loss_mask or [1] * sample.response_length)
        assert len(new) == sample.response_length
        owner = [span.version for span in sample.weight_versions for _ in range(span.start, span.end)]
        assert new == [was if version == newest else 0 for was, version in zip(old, owner, strict=True)]
    again = [sample.copy() for sample in samples]
    masks(*again)
    assert again == samples


# In a stream


def numbered(delay: Any) -> SimulatedEngine:
    engine = SimulatedEngine(
        lambda sample: Completion("x" * 8, list(range(8)), [-0.5] * 8, weight_versions=[]), delay=delay
    )
    engine.weight_version = "0"
    return engine


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_a_recycled_group_counts_only_what_the_new_weights_generated() -> None:
    """When the first batch is full, group 2 has a finished sibling, half of another, and nothing of the third."""
    seconds = {6: 0.5, 7: 2.0, 8: 1.0}
    engine = numbered(lambda sample: seconds.get(sample.index or 0, 1.0))
    generate = Generate(engine)
    gate = anyio.Event()

    async def late(sample: Sample, call_next: Any) -> Sample:
        if sample.index == 8 and not gate.is_set():
            await gate.wait()
        result: Sample = await call_next(sample)
        return result

    def own_mask(sample: Sample) -> None:
        sample.loss_mask = LossMask([1] * (sample.response_length - 1) + [0])

    pipeline = Pipeline(
        endless(3),
        [late, generate, own_mask, mask_offpolicy],
        BatchSpec(2, over_sampling=3, unfinished="recycle"),
    )
    async with pipeline:
        rollouts = pipeline.rollouts(0, 2)
        first = await anext(rollouts)
        assert all(sample.loss_mask == [1] * 7 + [0] for sample in first.samples)
        assert not any("start_rollout_id" in sample.metadata for sample in first.samples)
        gate.set()
        seconds.update({7: 0.5, 8: 0.5})
        await engine.update_weights("1")
        second = await anext(rollouts)
    [recycled] = [group for group in second.groups if group.index == 2]
    finished, resumed, fresh = recycled.samples
    assert finished.loss_mask == [0] * 8
    assert resumed.loss_mask == [0, 0, 0, 0, 1, 1, 1, 0]
    assert fresh.loss_mask == [1] * 7 + [0]
    assert finished.metadata["start_rollout_id"] == resumed.metadata["start_rollout_id"] == 0
    assert "start_rollout_id" not in fresh.metadata
    assert second.summary.loss_tokens == sum(sample.loss_tokens for sample in second.samples)


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_an_update_in_the_middle_of_a_response_masks_its_first_part_in_all_children() -> None:
    engine = numbered(4.0)

    def split(sample: Sample) -> list[Sample]:
        return [sample.copy(), sample.copy()]

    pipeline = Pipeline(endless(2), [Generate(engine), split, mask_offpolicy], BatchSpec(1))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(update_after, 1.0, engine)
        [batch] = await batches(pipeline)
    assert [sample.loss_mask for sample in batch.samples] == [[0, 0, 1, 1, 1, 1, 1, 1]] * 4
    assert all(sample.status is SampleStatus.COMPLETED for sample in batch.samples)


async def update_after(seconds: float, engine: SimulatedEngine) -> None:
    await anyio.sleep(seconds)
    await engine.update_weights("1")


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_a_sample_keeps_the_round_of_its_first_token() -> None:
    """Stopped in rounds 0, 1 and 2; in round 0 before its first token."""
    seconds = [1000.0, 8.0, 8.0, 0.5]
    asked: list[int] = []

    def delay(sample: Sample) -> float:
        if sample.group_index != 1:
            return 1.0
        asked.append(sample.response_length)
        return seconds[len(asked) - 1]

    pipeline = Pipeline(endless(1), [Generate(numbered(delay))], BatchSpec(1, over_sampling=2, unfinished="recycle"))
    *_, last = await batches(pipeline, 4)
    [sample] = last.samples
    assert asked == [0, 0, 1, 1]
    assert sample.group_index == 1
    assert sample.metadata["start_rollout_id"] == 1
