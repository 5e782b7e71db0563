"""Cases that have hurt users of systems like this one, each with its neighbours, against the public face only."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Literal

import anyio
import anyio.from_thread
import anyio.to_thread
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.simulated import SimulatedEngine
from eventbus import (
    Batch,
    BatchSpec,
    CallNext,
    Completion,
    ContractError,
    Drop,
    Group,
    JsonlPrompts,
    Pipeline,
    Prompts,
    RolloutExhausted,
    Sample,
    TrainResult,
    Verdict,
    current_rollout,
    decode,
    encode,
)
from eventbus.testing import virtual_time
from middleware import (
    DynamicFilter,
    FilterDecision,
    Generate,
    GroupAdvantage,
    apply_sample_hooks,
    in_thread,
    limit,
    retry,
    reward_nonzero_std,
    reward_nonzero_std_with_fallback,
    sample_stage,
    should_drop,
    timeout,
)
from tests.streams import Log, batches, endless, engine, kind_of, rewarded, some

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])
ASYNCIO = pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
FALLBACKS = pytest.mark.parametrize("fallback", ["none", "last", "best"])
Fallback = Literal["none", "last", "best"]


def plain(*stages: Any, groups: int = 2, size: int = 2, **options: Any) -> Pipeline:
    return Pipeline(endless(size), [Generate(engine()), *stages], BatchSpec(groups), **options)


def by_index(sample: Sample) -> float:
    return float(sample.index or 0)


def split(count: int) -> Any:
    """A stage that fans out."""

    def fan(sample: Sample) -> list[Sample]:
        children = [sample.copy() for _ in range(count)]
        for turn, child in enumerate(children):
            child.metadata["turns"] = [*child.metadata.get("turns", []), turn]
        return children

    return fan


def indices(batch: Batch) -> list[int]:
    return [group.index for group in batch.groups]


async def anyway() -> None:
    """Let everything else run as far as it gets."""
    await anyio.wait_all_tasks_blocked()


# 1. Sync, async and None-returning hooks on nested lists: shape kept, keyword arguments filtered


def nested() -> list[Any]:
    numbers = itertools.count()

    def leaf() -> Sample:
        return Sample(index=next(numbers))

    return [leaf(), [], [leaf(), [leaf(), [leaf()]]], [[leaf()], leaf()]]


def shape(value: Any) -> Any:
    return [shape(item) for item in value] if isinstance(value, list) else value.index


def sync_hook(args: Any, sample: Sample, *, rollout_id: int | None = None) -> Sample:
    sample.metadata["sync"] = (args.tag, rollout_id)
    return sample


async def async_hook(args: Any, sample: Sample, *, evaluation: bool = False) -> Sample:
    await anyio.sleep(10.0 - by_index(sample))  # the last is done first
    sample.metadata["async"] = (args.tag, evaluation)
    return sample


def none_hook(sample: Sample, **context: Any) -> None:
    sample.metadata["none"] = sorted(context)


async def replacing_hook(sample: Sample) -> Sample:
    twin = sample.copy()
    twin.metadata["twin"] = True
    return twin


HOOKS: list[Any] = [sync_hook, async_hook, none_hook, replacing_hook]


@pytest.mark.parametrize("hooks", [HOOKS, HOOKS[::-1], *([hook] for hook in HOOKS)])
async def test_case_01_hooks_keep_the_shape_of_nested_lists(hooks: list[Any]) -> None:
    value = nested()
    result = await apply_sample_hooks(hooks, value, args=SimpleNamespace(tag="a"))
    assert shape(result) == shape(nested())
    assert result is not value


async def test_case_01_hooks_get_the_keywords_that_they_name() -> None:
    args = SimpleNamespace(tag="a")
    ((sample,),) = await apply_sample_hooks(HOOKS, [[Sample(index=0)]], args=args, rollout_id=3, evaluation=True)
    assert sample.metadata == {
        "sync": ("a", 3),
        "async": ("a", True),
        "none": ["args", "evaluation", "rollout_id"],
        "twin": True,
    }


async def test_case_01_hooks_on_one_sample_and_on_nothing() -> None:
    assert (await apply_sample_hooks([none_hook], Sample(index=5))).index == 5
    assert await apply_sample_hooks([none_hook], []) == []
    assert await apply_sample_hooks([none_hook, replacing_hook], [[], [[]]]) == [[], [[]]]


@pytest.mark.parametrize("hooks", [None, [], ()])
async def test_case_01_without_hooks_the_value_itself_comes_back(hooks: Any) -> None:
    value = nested()
    assert await apply_sample_hooks(hooks, value) is value


@pytest.mark.parametrize("leaf", [None, {}, (), (Sample(),), "text", 0, Group(0, "p", [[Sample()]])])
async def test_case_01_a_leaf_that_is_no_sample_is_refused(leaf: Any) -> None:
    with pytest.raises(TypeError, match=f"nested lists of them, got {type(leaf).__name__}"):
        await apply_sample_hooks([none_hook], [Sample(), [leaf]])


async def test_case_01_hooks_of_slime_are_stages_as_they_are() -> None:
    (batch,) = await batches(plain(sync_hook, async_hook, none_hook, args=SimpleNamespace(tag="b")))
    for sample in batch.samples:
        assert sample.metadata["sync"] == ("b", 0)
        assert sample.metadata["async"] == ("b", False)
        assert sample.metadata["none"] == ["args", "evaluation", "rollout_id", "sampling", "stage"]


async def test_case_01_fan_outs_nest_in_their_order() -> None:
    again = sample_stage(split(3), name="again")
    (batch,) = await batches(plain(split(2), again, async_hook, args=SimpleNamespace(tag="c"), groups=1, size=1))
    expected = [[first, second] for first in range(2) for second in range(3)]
    assert [sample.metadata["turns"] for sample in batch.samples] == expected


# 2. A hook returns a dict: TypeError naming stage and sample


FOREIGN = pytest.mark.parametrize("foreign", [{"reward": 1.0}, {}, 0, False, "", (), 1.5, "text", Group(0, "p", [])])


@FOREIGN
async def test_case_02_a_foreign_return_names_stage_and_sample(foreign: Any) -> None:
    def hook(sample: Sample) -> Any:
        return foreign

    with pytest.raises(TypeError, match=f"stage 'hook' returned {type(foreign).__name__} for sample 0, expected"):
        await batches(plain(hook, groups=1, size=1))


def returns_dict(sample: Sample) -> Any:
    return {"reward": 1.0}


async def returns_dict_later(sample: Sample) -> Any:
    await anyio.sleep(1.0)
    return {"reward": 1.0}


def slime_hook(args: Any, sample: Sample) -> Any:
    return {"reward": 1.0}


async def around(sample: Sample, call_next: CallNext) -> Any:
    await call_next(sample)
    return {"reward": 1.0}


class Judge:
    async def __call__(self, sample: Sample) -> Any:
        return {"reward": 1.0}


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        (returns_dict, "returns_dict"),
        (returns_dict_later, "returns_dict_later"),
        (slime_hook, "slime_hook"),
        (around, "around"),
        (Judge(), "Judge"),
        (limit(returns_dict, 2), "returns_dict"),
        (timeout(returns_dict_later, 5.0), "returns_dict_later"),
        (retry(returns_dict), "returns_dict"),
        (in_thread(returns_dict), "returns_dict"),
        (sample_stage(returns_dict, name="mine", on_error="resubmit"), "mine"),
        (partial(returns_dict), "returns_dict"),
    ],
)
async def test_case_02_however_the_stage_is_written(stage: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"stage '{name}' returned dict for sample 0, expected Sample"):
        await batches(plain(stage, groups=1, size=1))


async def test_case_02_an_undeclared_fan_out_says_how_to_declare_it() -> None:
    def hook(sample: Sample) -> Any:
        return [sample]

    with pytest.raises(TypeError, match=r"stage 'hook' returned list for sample 0.*-> list\[Sample\]"):
        await batches(plain(hook, groups=1, size=1))


async def test_case_02_a_foreign_child_of_a_fan_out() -> None:
    def hook(sample: Sample) -> list[Any]:
        return [sample, {"reward": 1.0}]

    with pytest.raises(TypeError, match="stage 'hook' returned as a child dict for sample 0"):
        await batches(plain(hook, groups=1, size=1))


@pytest.mark.parametrize("late", [False, True])
async def test_case_02_hooks_run_by_hand_name_hook_and_sample(late: bool) -> None:
    hook = returns_dict_later if late else returns_dict
    with pytest.raises(TypeError, match=rf"{hook.__name__} returned dict for sample 4, expected Sample or None"):
        await apply_sample_hooks([hook], [[Sample(index=4)]])


async def test_case_02_a_group_stage_names_the_group() -> None:
    def judge(group: Group) -> Any:
        return True

    with pytest.raises(TypeError, match="stage 'judge' returned bool for group 0, expected Group, None or Drop"):
        await batches(plain(judge, groups=1))


async def test_case_02_a_judge_names_the_group() -> None:
    def judge(group: Group) -> Any:
        return {"keep": True}

    with pytest.raises(TypeError, match=r"group 0: the judge judge returned dict, expected FilterDecision or bool"):
        await batches(plain(DynamicFilter(judge), groups=1))


async def test_case_02_a_batch_stage_names_the_rollout() -> None:
    def pack(batch: Batch) -> Any:
        return {}

    with pytest.raises(TypeError, match="stage 'pack' returned dict for the batch of rollout 0, expected Batch or"):
        await batches(plain(pack))


async def test_case_02_an_empty_batch_is_not_taken_for_none() -> None:
    def empty(batch: Batch) -> Batch:
        return Batch(batch.rollout_id, [], batch.summary)

    (batch,) = await batches(plain(empty))
    assert batch.groups == []


# 3. A hook sees the rollout in which its sample was submitted; evaluation beside training sees its own flag


class Seen:
    """What stages see: the context and the keywords, by sample."""

    def __init__(self) -> None:
        self.rollouts: dict[int, set[Any]] = {}

    def note(self, sample: Sample, rollout_id: int, evaluation: bool) -> None:
        context = current_rollout()
        assert (context.rollout_id, context.evaluation) == (rollout_id, evaluation)
        assert (context.index, context.execution) == (sample.index, sample.rollout_id)
        self.rollouts.setdefault(rollout_id, set()).add(sample.group_index)


async def test_case_03_a_hook_that_runs_while_rollout_8_is_under_way_sees_7() -> None:
    seen, eight = Seen(), anyio.Event()

    async def hook(sample: Sample, *, rollout_id: int, evaluation: bool) -> None:
        if rollout_id == 7:
            await eight.wait()
        seen.note(sample, rollout_id, evaluation)
        if rollout_id == 8:
            eight.set()

    async with plain(hook, size=1) as pipeline:
        given = [batch async for batch in pipeline.rollouts(start=7, stop=9, ahead=1)]
    assert [batch.rollout_id for batch in given] == [7, 8]
    assert seen.rollouts == {7: {0, 1}, 8: {2, 3}}


def note_in_thread(seen: Seen) -> Any:
    def hook(sample: Sample, *, rollout_id: int, evaluation: bool) -> None:
        seen.note(sample, rollout_id, evaluation)

    return in_thread(hook)


def note_in_task(seen: Seen) -> Any:
    async def hook(sample: Sample, *, rollout_id: int, evaluation: bool) -> None:
        async def inner() -> None:
            await anyio.sleep(1.0)
            seen.note(sample, rollout_id, evaluation)

        async with anyio.create_task_group() as task_group:
            task_group.start_soon(inner)

    return hook


def note_from_thread(seen: Seen) -> Any:
    """From the loop into a thread and back."""

    async def hook(sample: Sample, *, rollout_id: int, evaluation: bool) -> None:
        note = partial(seen.note, sample, rollout_id, evaluation)
        await anyio.to_thread.run_sync(anyio.from_thread.run_sync, note)

    return hook


def note_behind_a_limit(seen: Seen) -> Any:
    """The slot is handed on by a sample of another rollout."""

    async def hook(sample: Sample, *, rollout_id: int, evaluation: bool) -> None:
        await anyio.sleep(1.0)
        seen.note(sample, rollout_id, evaluation)

    return limit(hook, 1)


def note_at_second_attempt(seen: Seen) -> Any:
    tried: set[int | None] = set()

    async def hook(sample: Sample, *, rollout_id: int, evaluation: bool) -> None:
        await anyio.sleep(1.0)
        if sample.index not in tried:
            tried.add(sample.index)
            raise OSError("not yet")
        seen.note(sample, rollout_id, evaluation)

    return retry(timeout(hook, 5.0))


def note_around(seen: Seen) -> Any:
    async def hook(sample: Sample, call_next: CallNext, *, rollout_id: int, evaluation: bool) -> None:
        seen.note(sample, rollout_id, evaluation)
        await call_next(sample)
        seen.note(sample, rollout_id, evaluation)

    return hook


def note_by_hooks(seen: Seen) -> Any:
    async def inner(args: Any, sample: Sample, *, rollout_id: int, evaluation: bool) -> None:
        await anyio.sleep(1.0)
        seen.note(sample, rollout_id, evaluation)

    async def hook(sample: Sample) -> None:
        await apply_sample_hooks([inner], [sample])

    return hook


NOTES = [
    note_in_thread,
    note_in_task,
    note_from_thread,
    note_behind_a_limit,
    note_at_second_attempt,
    note_around,
    note_by_hooks,
]


async def slow(sample: Sample, *, rollout_id: int) -> None:
    """Earlier rollouts are later."""
    await anyio.sleep(100.0 / (1 + rollout_id))


@pytest.mark.parametrize("noting", NOTES)
async def test_case_03_wherever_the_hook_runs(noting: Any) -> None:
    seen = Seen()
    async with plain(slow, noting(seen), size=1) as pipeline:
        async for _ in pipeline.rollouts(stop=4, ahead=3):
            pass
    assert seen.rollouts == {rollout: {2 * rollout, 2 * rollout + 1} for rollout in range(4)}


@pytest.mark.parametrize("noting", NOTES)
async def test_case_03_evaluation_beside_training_sees_its_own_flag(noting: Any) -> None:
    flags: dict[int, set[bool]] = {}

    class Flags(Seen):
        def note(self, sample: Sample, rollout_id: int, evaluation: bool) -> None:
            super().note(sample, rollout_id, evaluation)
            flags.setdefault(rollout_id, set()).add(evaluation)

    async with plain(slow, noting(Flags()), size=1) as pipeline, anyio.create_task_group() as task_group:
        for number in (100, 101):
            task_group.start_soon(partial(pipeline.evaluate, some(3, 1), rollout_id=number))
        async for _ in pipeline.rollouts(stop=2, ahead=1):
            pass
    assert flags == {0: {False}, 1: {False}, 100: {True}, 101: {True}}


async def test_case_03_fanned_out_children_see_their_rollout() -> None:
    seen = Seen()
    async with plain(slow, split(3), note_in_task(seen), size=1) as pipeline:
        async for _ in pipeline.rollouts(stop=2, ahead=1):
            pass
    assert seen.rollouts == {0: {0, 1}, 1: {2, 3}}


async def test_case_03_group_and_batch_stages_see_their_rollout() -> None:
    seen: list[tuple[str, int]] = []

    async def group_stage(group: Group, *, rollout_id: int) -> None:
        await anyio.sleep(100.0 / (1 + rollout_id))
        assert (current_rollout().rollout_id, current_rollout().group_index) == (rollout_id, group.index)
        seen.append(("group", rollout_id))

    async def judge(group: Group) -> bool:
        await anyio.sleep(1.0)
        seen.append(("judge", current_rollout().rollout_id))
        return True

    async def batch_stage(batch: Batch, *, rollout_id: int) -> None:
        await anyio.sleep(1.0)
        assert current_rollout().rollout_id == rollout_id == batch.rollout_id
        seen.append(("batch", rollout_id))

    async with plain(group_stage, DynamicFilter(judge), batch_stage) as pipeline:
        async for _ in pipeline.rollouts(stop=2, ahead=1):
            pass
    assert Counter(seen) == {
        (name, rollout): 1 if name == "batch" else 2 for name in ("group", "judge", "batch") for rollout in (0, 1)
    }


async def test_case_03_a_task_that_outlives_its_stage_still_sees_its_own_sample() -> None:
    seen: set[tuple[int | None, int, int | None]] = set()

    async def later(sample_index: int | None) -> None:
        await anyio.sleep(1000.0)
        seen.add((sample_index, current_rollout().rollout_id, current_rollout().index))

    async with anyio.create_task_group() as task_group:

        def hook(sample: Sample) -> None:
            task_group.start_soon(later, sample.index)

        await batches(plain(hook, size=1), 2)
    assert seen == {(index, index // 2, index) for index in range(4)}


async def test_case_03_what_is_asked_again_sees_the_rollout_that_asks() -> None:
    seen: list[tuple[int | None, int]] = []

    def before(sample: Sample, *, rollout_id: int) -> None:
        assert current_rollout().rollout_id == rollout_id
        seen.append((sample.index, rollout_id))

    slow_one = engine(delay=lambda sample: 50.0 if sample.index == 2 else 1.0)
    spec = BatchSpec(2, over_sampling=3)
    first, second = await batches(Pipeline(endless(1), [before, Generate(slow_one)], spec), 2)
    assert (first.rollout_id, second.rollout_id) == (0, 1)
    assert sorted(seen) == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 1), (4, 1)]


async def test_case_03_outside_of_a_stage_there_is_no_rollout() -> None:
    await batches(plain())
    with pytest.raises(LookupError):
        current_rollout()


# 4. 8 fanned-out siblings x a 50 ms async hook overlap, order kept


async def nap(sample: Sample) -> None:
    await anyio.sleep(0.05)


async def took(*stages: Any, size: int = 1) -> tuple[Batch, float]:
    """The first batch of one group, and the seconds that it took."""
    async with plain(*stages, groups=1, size=size) as pipeline:
        batch = await anext(pipeline.rollouts())
        return batch, anyio.current_time()


async def test_case_04_fanned_out_siblings_overlap_in_order() -> None:
    batch, seconds = await took(split(8), nap)
    assert seconds < 0.1
    assert [sample.metadata["turns"] for sample in batch.samples] == [[turn] for turn in range(8)]


async def test_case_04_order_is_kept_when_the_last_is_first() -> None:
    async def reverse(sample: Sample) -> None:
        await anyio.sleep(0.05 - 0.005 * sample.metadata["turns"][0])

    batch, seconds = await took(split(8), reverse)
    assert seconds == pytest.approx(0.05)
    assert [sample.metadata["turns"] for sample in batch.samples] == [[turn] for turn in range(8)]


async def test_case_04_children_of_children_overlap() -> None:
    batch, seconds = await took(split(2), nap, sample_stage(split(4), name="again"), sample_stage(nap, name="nap 2"))
    assert seconds == pytest.approx(0.1)
    assert [sample.metadata["turns"] for sample in batch.samples] == [[a, b] for a in range(2) for b in range(4)]


async def test_case_04_executions_and_their_children_overlap() -> None:
    batch, seconds = await took(split(8), nap, size=8)
    assert seconds == pytest.approx(0.05)
    assert len(batch.samples) == 64


async def test_case_04_siblings_overlap_as_far_as_a_limit_allows() -> None:
    _, seconds = await took(split(8), limit(nap, 4))
    assert seconds == pytest.approx(0.1)


async def test_case_04_siblings_do_not_wait_for_each_other_between_stages() -> None:
    async def first(sample: Sample) -> None:
        await anyio.sleep(0.05 * sample.metadata["turns"][0])

    async def second(sample: Sample) -> None:
        await anyio.sleep(0.05 * (7 - sample.metadata["turns"][0]))

    _, seconds = await took(split(8), first, second)
    assert seconds == pytest.approx(0.35)


async def test_case_04_hooks_run_by_hand_overlap() -> None:
    began = anyio.current_time()
    result = await apply_sample_hooks([nap], [[Sample(index=i) for i in range(4)], [Sample(index=i) for i in range(4)]])
    assert anyio.current_time() - began < 0.1
    assert shape(result) == [[0, 1, 2, 3]] * 2


async def test_case_04_a_sibling_that_fails_stops_the_others() -> None:
    finished: list[int] = []

    async def hook(sample: Sample) -> None:
        turn = sample.metadata["turns"][0]
        await anyio.sleep(0.01 if turn == 3 else 1000.0)
        if turn == 3 and sample.group_index == 0:
            raise OSError("sibling")
        finished.append(turn)

    async with plain(split(8), hook, groups=1, size=1) as pipeline:
        batch = await anext(pipeline.rollouts())
    assert (batch.summary.failed, indices(batch)) == (1, [1])
    assert sorted(finished) == list(range(8))


# 5. Target 32, 64 submitted, all rewards equal


def equal(
    fallback: Fallback, groups: int = 32, over_sampling: int = 64, delay: Any = by_index, **spec: Any
) -> Pipeline:
    stages = [Generate(engine(delay)), rewarded(lambda sample: 1.0), DynamicFilter(reward_nonzero_std, fallback)]
    return Pipeline(endless(), stages, BatchSpec(groups, over_sampling=over_sampling, **spec))


@pytest.mark.parametrize("rounds", [1, 3])
async def test_case_05_strict_is_bounded_and_says_what_was_rejected(rounds: int) -> None:
    dropped = 64 * rounds
    with pytest.raises(
        RolloutExhausted, match=rf"{rounds} rounds .*dropped {dropped} \(zero_std_1.0 x{dropped}\)"
    ) as e:
        await batches(equal("none", max_rounds=rounds))
    assert e.value.summary.dropped == {"zero_std_1.0": dropped}
    assert (e.value.summary.submitted, e.value.summary.kept) == (dropped, 0)


async def test_case_05_last_keeps_exactly_the_target_in_one_round() -> None:
    (batch,) = await batches(equal("last"))
    assert (len(batch), batch.summary.rounds, batch.summary.kept_by_fallback) == (32, 1, 32)
    assert batch.summary.dropped == {"zero_std_1.0": 32}
    assert batch.summary.fallback_share == 1.0
    assert all(group.verdict.by_fallback and group.verdict.reason == "zero_std_1.0" for group in batch.groups)
    assert indices(batch) == list(range(32, 64))  # the latest finishers


async def test_case_05_a_judge_may_ask_for_the_fallback_itself() -> None:
    stages = [Generate(engine(by_index)), rewarded([1.0]), DynamicFilter(reward_nonzero_std_with_fallback)]
    (batch,) = await batches(Pipeline(endless(), stages, BatchSpec(32, over_sampling=64)))
    assert (len(batch), batch.summary.rounds, batch.summary.kept_by_fallback) == (32, 1, 32)


@pytest.mark.parametrize("delay", [0.0, by_index, lambda sample: 1000.0 - by_index(sample)])
async def test_case_05_best_spends_its_rounds_and_does_not_depend_on_arrival(delay: Any) -> None:
    (batch,) = await batches(equal("best", delay=delay, max_rounds=2))
    assert (len(batch), batch.summary.rounds, batch.summary.kept_by_fallback) == (32, 2, 32)
    assert batch.summary.dropped == {"zero_std_1.0": 96}
    assert indices(batch) == list(range(32))


@FALLBACKS
async def test_case_05_what_is_good_is_kept_before_any_fallback(fallback: Fallback) -> None:
    def reward(sample: Sample) -> float:
        return float(sample.index or 0) % 2 if (sample.group_index or 0) % 2 else 1.0

    stages = [Generate(engine()), rewarded(reward), DynamicFilter(reward_nonzero_std, fallback)]
    (batch,) = await batches(Pipeline(endless(), stages, BatchSpec(8, over_sampling=32)))
    assert (batch.summary.rounds, batch.summary.kept_by_fallback) == (1, 0)
    assert all(index % 2 for index in indices(batch))


async def test_case_05_exhausted_rounds_with_nothing_kept_are_an_error_even_when_partial_is_allowed() -> None:
    with pytest.raises(RolloutExhausted, match="kept 0/32"):
        await batches(equal("none", max_rounds=1, on_exhausted="partial"))


async def test_case_05_going_round_the_prompts_does_not_unbind_the_rounds() -> None:
    stages = [Generate(engine()), rewarded([1.0]), DynamicFilter(reward_nonzero_std)]
    spec = BatchSpec(2, over_sampling=4, max_rounds=3, on_exhausted="wrap")
    with pytest.raises(RolloutExhausted, match=r"3 rounds of 4 groups .*\(zero_std_1.0 x12\)"):
        await batches(Pipeline(some(4), stages, spec))


@pytest.mark.parametrize("bad", ["drop", "fail"])
async def test_case_05_samples_that_all_end_early_are_bounded_too(bad: str) -> None:
    def hook(sample: Sample) -> Drop:
        if bad == "fail":
            raise ValueError("no")
        return Drop("no")

    pipeline = Pipeline(endless(1), [Generate(engine()), hook], BatchSpec(4, max_rounds=3))
    with pytest.raises(RolloutExhausted, match=r"3 rounds of 4 groups .*kept 0/4 of 12 submitted"):
        await batches(pipeline)


async def test_case_05_the_next_rollout_begins_afresh() -> None:
    first, second = await batches(equal("last", groups=2, over_sampling=4), 2)
    for batch in (first, second):
        assert (batch.summary.rounds, batch.summary.submitted, batch.summary.kept_by_fallback) == (1, 4, 2)


# 6. remaining 3, target 2: drop; remaining 2, target 2: keep; submitted == target: nothing dropped


@pytest.mark.parametrize(("remaining", "target", "drop"), [(3, 2, True), (2, 2, False), (1, 2, False), (2, 1, True)])
def test_case_06_the_rule(remaining: int, target: int, drop: bool) -> None:
    spare = FilterDecision(keep=False, keep_when_insufficient=True)
    assert should_drop(spare, remaining=remaining, target=target) is drop
    assert should_drop(FilterDecision(keep=False), remaining=remaining, target=target)
    assert should_drop(False, remaining=remaining, target=target)
    assert not should_drop(True, remaining=remaining, target=target)


def counts(log: Log) -> list[tuple[int | None, bool]]:
    return [(event.verdict.remaining, event.verdict.kept) for event in log.of("group_judged")]


async def judged_last(target: int, submitted: int, *stages: Any, **spec: Any) -> tuple[Batch, Log]:
    log = Log()
    stages = (Generate(engine(by_index)), rewarded([1.0]), *stages, DynamicFilter(reward_nonzero_std, "last"))
    spec = {"over_sampling": submitted, "max_rounds": 1, **spec}
    (batch,) = await batches(Pipeline(endless(), stages, BatchSpec(target, **spec), observers=[log]))
    return batch, log


async def test_case_06_three_for_two_drops_one() -> None:
    batch, log = await judged_last(2, 3)
    assert counts(log) == [(3, False), (2, True), (2, True)]
    assert indices(batch) == [1, 2]


async def test_case_06_as_many_as_needed_drops_nothing() -> None:
    batch, log = await judged_last(4, 4)
    assert counts(log) == [(4, True)] * 4
    assert batch.summary.dropped == {}


async def test_case_06_what_was_lost_before_the_filter_is_subtracted() -> None:
    def hook(sample: Sample) -> Drop | None:
        if sample.group_index == 0:
            raise ValueError("lost")
        return Drop("lost") if sample.group_index == 1 else None

    batch, log = await judged_last(2, 4, hook)
    assert counts(log) == [(2, True), (2, True)]
    assert (batch.summary.failed, batch.summary.dropped) == (1, {"lost": 1})


async def test_case_06_a_round_more_raises_what_remains() -> None:
    def hook(sample: Sample) -> Drop | None:
        return Drop("lost") if sample.group_index in (0, 1) else None

    batch, log = await judged_last(2, 3, hook, max_rounds=2)
    assert counts(log) == [(4, False), (3, False), (2, True), (2, True)]
    assert (batch.summary.rounds, indices(batch)) == (2, [4, 5])


async def test_case_06_surplus_stays_in_what_remains() -> None:
    """Groups that are complete when the batch is full are judged with the surplus still counted."""
    stages = [Generate(engine()), rewarded(lambda s: by_index(s) % 2 if s.group_index != 3 else 1.0)]
    log = Log("group_judged")
    pipeline = Pipeline(
        endless(),
        [*stages, DynamicFilter(reward_nonzero_std, "last")],
        BatchSpec(2, over_sampling=4),
        observers=[log],
    )
    (batch,) = await batches(pipeline)
    assert counts(log) == [(4, True), (4, True), (4, True), (4, False)]
    assert (batch.summary.surplus, batch.summary.dropped) == (1, {"zero_std_1.0": 1})


def slime(good: list[bool], target: int) -> tuple[list[int], int]:
    """The seed's loop on one round, with groups judged in order: what is kept, how many by fallback."""
    kept: list[int] = []
    remaining, fillers = len(good), 0
    for index, keep in enumerate(good):
        if len(kept) == target:
            break
        if not keep and remaining > target:
            remaining -= 1
            continue
        kept.append(index)
        fillers += not keep
    return kept, fillers


@BACKENDS
@settings(max_examples=30)
@given(good=st.lists(st.booleans(), min_size=1, max_size=10), target=st.integers(1, 10))
def test_case_06_any_round_is_judged_as_slime_judges_it(backend: str, good: list[bool], target: int) -> None:
    target = min(target, len(good))

    def judge(group: Group) -> bool:
        return good[group.index]

    async def main() -> Batch:
        stages = [Generate(engine(by_index)), rewarded([1.0]), DynamicFilter(judge, "last")]
        (batch,) = await batches(Pipeline(endless(1), stages, BatchSpec(target, over_sampling=len(good), max_rounds=1)))
        return batch  # type: ignore[no-any-return]

    batch = anyio.run(main, **virtual_time(backend))
    assert (indices(batch), batch.summary.kept_by_fallback) == slime(good, target)


# 7. Group size 1; rewards NaN, None, dict, bool, tensor, numpy scalar: a defined, serialisable decision, no loop


class Tensor:
    """As much of a 0-d tensor as a reward needs."""

    shape = ()

    def __init__(self, value: float) -> None:
        self.value = value

    def item(self) -> float:
        return self.value

    def __float__(self) -> float:
        return self.value


class Decided:
    """What became of a stream whose groups all have these rewards."""

    batch: Batch | None = None
    error: RolloutExhausted | None = None

    def __init__(self) -> None:
        self.log = Log("group_judged", "group_ended", "stage_failed")

    @property
    def outcomes(self) -> set[tuple[str, str | None]]:
        return {(event.outcome, event.reason) for event in self.log.of("group_ended")}


async def decide(rewards: list[Any], fallback: Fallback, judge: Any = reward_nonzero_std, *after: Any) -> Decided:
    decided = Decided()
    size = len(rewards)
    reward = rewarded(lambda sample: rewards[(sample.index or 0) % size])
    pipeline = Pipeline(
        endless(size),
        [Generate(engine()), reward, DynamicFilter(judge, fallback), *after],
        BatchSpec(2, over_sampling=3, max_rounds=2),
        observers=[decided.log],
    )
    try:
        (decided.batch,) = await batches(pipeline)
    except RolloutExhausted as error:
        decided.error = error
    ended = decided.log.of("group_ended")
    assert len(ended) <= 6
    assert len({event.group_index for event in ended}) == len(ended)
    for event in decided.log.events:
        assert decode(encode(event)) == event
        if kind_of(event) == "group_judged":
            assert decode(encode(event.verdict), Verdict) == event.verdict
    return decided


EQUAL = {
    "floats": [1.0, 1.0],
    "ints": [1, 1],
    "bools": [True, True],
    "numpy float32": [np.float32(1.0)] * 2,
    "numpy float64": [np.float64(1.0)] * 2,
    "numpy int": [np.int64(1)] * 2,
    "numpy bool": [np.bool_(True)] * 2,
    "numpy 0-d": [np.array(1.0)] * 2,
    "tensor": [Tensor(1.0), Tensor(1.0)],
    "of each": [True, 1, 1.0, np.float32(1.0), np.array(1), Tensor(1.0)],
}


@FALLBACKS
@pytest.mark.parametrize("rewards", EQUAL.values(), ids=EQUAL)
async def test_case_07_equal_numbers_of_any_type_are_rejected_or_fill_the_batch(
    rewards: list[Any], fallback: Fallback
) -> None:
    decided = await decide(rewards, fallback)
    assert ("dropped", "zero_std_1.0") in decided.outcomes
    if fallback == "none":
        assert decided.error is not None
        assert decided.error.summary.dropped == {"zero_std_1.0": 6}
    else:
        assert decided.batch is not None
        assert (len(decided.batch), decided.batch.summary.kept_by_fallback) == (2, 2)


DIFFERENT = {
    "bools": [True, False],
    "numpy float32": [np.float32(0.0), np.float32(1.0)],
    "numpy bool": [np.bool_(False), np.bool_(True)],
    "numpy 0-d": [np.array(0.0), np.array(1.0)],
    "tensor": [Tensor(0.0), Tensor(1.0)],
    "bool and float": [True, 0.5],
}


@FALLBACKS
@pytest.mark.parametrize("rewards", DIFFERENT.values(), ids=DIFFERENT)
async def test_case_07_numbers_of_any_type_that_differ_are_kept(rewards: list[Any], fallback: Fallback) -> None:
    decided = await decide(rewards, fallback, reward_nonzero_std, GroupAdvantage())
    assert decided.batch is not None
    assert (len(decided.batch), decided.batch.summary.kept_by_fallback) == (2, 0)
    for sample in decided.batch.samples:
        assert type((sample.train_metadata or {})["advantage"]) is float


BAD = {
    "nan": [float("nan")] * 2,
    "one nan": [1.0, float("nan")],
    "inf": [float("inf"), 1.0],
    "minus inf": [1.0, float("-inf")],
    "None": [None, None],
    "one None": [None, 1.0],
    "nan alone": [float("nan")],
    "None alone": [None],
    "numpy nan": [np.float32("nan"), np.float32(1.0)],
    "tensor nan": [Tensor(1.0), Tensor(float("nan"))],
}


@FALLBACKS
@pytest.mark.parametrize("rewards", BAD.values(), ids=BAD)
async def test_case_07_a_missing_or_endless_reward_is_never_kept(rewards: list[Any], fallback: Fallback) -> None:
    decided = await decide(rewards, fallback)
    assert decided.error is not None
    assert decided.error.summary.dropped == {"bad_reward": 6}


@FALLBACKS
@pytest.mark.parametrize("rewards", BAD.values(), ids=BAD)
async def test_case_07_nor_when_the_judge_does_not_look_at_it(rewards: list[Any], fallback: Fallback) -> None:
    def judge(group: Group) -> FilterDecision:
        return FilterDecision(False, "dull", keep_when_insufficient=True, score=1.0)

    decided = await decide(rewards, fallback, judge)
    assert decided.outcomes == {("dropped", "bad_reward")}


@FALLBACKS
async def test_case_07_group_size_1(fallback: Fallback) -> None:
    decided = await decide([1.0], fallback, reward_nonzero_std, GroupAdvantage())
    if fallback == "none":
        assert decided.error is not None
        assert decided.error.summary.dropped == {"group_size_1": 6}
    else:
        assert decided.batch is not None
        assert decided.batch.summary.kept_by_fallback == 2
        assert [sample.train_metadata for sample in decided.batch.samples] == [{"advantage": 0.0}] * 2


@FALLBACKS
async def test_case_07_dict_rewards_with_their_key(fallback: Fallback) -> None:
    judge = partial(reward_nonzero_std, key="accuracy")
    rewards = [{"accuracy": 1.0, "length": 3}, {"accuracy": np.float32(1.0), "length": 4}]
    decided = await decide(rewards, fallback, judge)
    assert ("dropped", "zero_std_1.0") in decided.outcomes
    assert (decided.batch is None) is (fallback == "none")


@FALLBACKS
@pytest.mark.parametrize("bad", [{"accuracy": None}, {"accuracy": float("nan")}, {"accuracy": 1.0, "length": None}])
async def test_case_07_dict_rewards_with_a_missing_number_are_never_kept_by_a_fallback(
    bad: dict[str, Any], fallback: Fallback
) -> None:
    decided = await decide([bad, {"accuracy": 1.0, "length": 1}], fallback, partial(reward_nonzero_std, key="accuracy"))
    assert decided.batch is None
    assert {outcome for outcome, _ in decided.outcomes} == {"dropped"}


UNREADABLE = {
    "dict without key": [{"accuracy": 1.0}] * 2,
    "empty dict": [{}, {}],
    "text": ["good", "bad"],
    "vector": [np.array([1.0, 2.0])] * 2,
    "object": [object(), object()],
    "list": [[1.0], [0.0]],
}


@FALLBACKS
@pytest.mark.parametrize("rewards", UNREADABLE.values(), ids=UNREADABLE)
async def test_case_07_a_reward_that_is_no_number_fails_its_group_and_is_named(
    rewards: list[Any], fallback: Fallback
) -> None:
    decided = await decide(rewards, fallback)
    assert decided.outcomes == {("failed", "DynamicFilter: TypeError")}
    assert decided.error is not None
    assert isinstance(decided.error.__cause__, ExceptionGroup)
    assert all("the reward" in str(error) for error in decided.error.__cause__.exceptions)


@FALLBACKS
@pytest.mark.parametrize(
    "decision",
    [
        FilterDecision(np.bool_(False), "odd", score=np.float32(0.5)),  # type: ignore[arg-type]
        FilterDecision(Tensor(False), "odd", score=Tensor(0.5)),  # type: ignore[arg-type]
        FilterDecision(False, 7, score=1),  # type: ignore[arg-type]
        FilterDecision(False, "long" * 1000, score=True),
        FilterDecision(False, "lone \ud800", score=0.5),
        FilterDecision(False, score=0.5),
    ],
)
async def test_case_07_whatever_the_judge_computed_with_can_be_written_down(
    decision: FilterDecision, fallback: Fallback
) -> None:
    decided = await decide([1.0, 1.0], fallback, lambda group: decision)
    assert (decided.batch is None) is (fallback == "none")
    for event in decided.log.of("group_judged"):
        assert type(event.verdict.kept) is bool
        assert type(event.verdict.score) is float
        assert type(event.verdict.reason) is str


@pytest.mark.parametrize("score", [None, float("nan"), float("inf")])
async def test_case_07_best_without_a_score_to_rank_by_says_so(score: float | None) -> None:
    def judge(group: Group) -> FilterDecision:
        return FilterDecision(False, "dull", score=score)

    with pytest.raises(ContractError, match=r"group 0: fallback='best' ranks .* judge gives"):
        await decide([1.0, 1.0], "best", judge)


@pytest.mark.parametrize("rewards", [EQUAL["numpy float32"], EQUAL["numpy bool"], EQUAL["tensor"]])
async def test_case_07_the_mean_reward_counts_numbers_of_any_type(rewards: list[Any]) -> None:
    decided = await decide(rewards, "last")
    assert decided.batch is not None
    assert (decided.batch.summary.reward_mean, decided.batch.summary.kept_reward_mean) == (1.0, 1.0)


async def test_case_07_fanned_out_groups_count_one_reward_per_execution() -> None:
    def reward(sample: Sample) -> None:
        sample.reward = float(sample.metadata["turns"] == [2])

    judge_sees: list[list[float]] = []

    def judge(group: Group) -> FilterDecision:
        judge_sees.append(group.rewards())
        return reward_nonzero_std(group)

    (batch,) = await batches(plain(split(3), reward, DynamicFilter(judge, "last"), groups=1))
    assert judge_sees == [[1.0, 1.0]]
    assert (batch.summary.kept_by_fallback, batch.summary.samples) == (1, 6)


# 8. 1 of 8 reward calls raises


def reward_call(sample: Sample) -> None:
    sample.reward = 1.0
    if sample.index == 3:
        raise ConnectionError("judge of sample 3")


async def reward_call_later(sample: Sample) -> None:
    await anyio.sleep(1.0)
    reward_call(sample)


REWARD_CALLS = {
    "sync": reward_call,
    "async": reward_call_later,
    "limit": limit(reward_call_later, 8),
    "timeout": timeout(reward_call_later, 30.0),
    "retry": retry(reward_call_later, attempts=2),
    "thread": in_thread(reward_call),
}
EACH_REWARD_CALL = pytest.mark.parametrize("stage", REWARD_CALLS.values(), ids=REWARD_CALLS)


@EACH_REWARD_CALL
async def test_case_08_fail_loses_the_group_and_keeps_the_root_traceback(stage: Any) -> None:
    log = Log("stage_failed", "group_ended")
    judge = sample_stage(stage, name="judge")
    (batch,) = await batches(Pipeline(endless(8), [Generate(engine()), judge], BatchSpec(3), observers=[log]))
    summary = batch.summary
    assert (summary.submitted, summary.kept, summary.failed, summary.failed_samples) == (6, 3, 1, 1)
    assert indices(batch)[:2] == [1, 2]
    (failure,) = log.of("stage_failed")
    assert (failure.stage, failure.group_index, failure.index, failure.policy) == ("judge", 0, 3, "fail")
    assert 'raise ConnectionError("judge of sample 3")' in failure.traceback
    assert next(event.reason for event in log.of("group_ended") if event.outcome == "failed") == (
        "judge: ConnectionError"
    )


@EACH_REWARD_CALL
async def test_case_08_a_group_that_may_shrink_goes_on_with_seven(stage: Any) -> None:
    pipeline = Pipeline(endless(8), [Generate(engine()), stage], BatchSpec(2, min_group_size=7))
    (batch,) = await batches(pipeline)
    assert [len(group) for group in batch.groups] == [7, 8]
    assert [sample.index for sample in batch.groups[0].samples] == [0, 1, 2, 4, 5, 6, 7]
    summary = batch.summary
    assert (summary.failed, summary.failed_samples, summary.executions, summary.submitted) == (0, 1, 15, 2)


@EACH_REWARD_CALL
async def test_case_08_resubmit_asks_twice_more_then_fails(stage: Any) -> None:
    log = Log("stage_failed")
    judge = sample_stage(stage, name="judge", on_error="resubmit")
    (batch,) = await batches(plain(judge, size=8, observers=[log]))
    summary = batch.summary
    assert (summary.failed, summary.failed_samples, summary.resubmitted_samples) == (1, 3, 2)
    assert [event.policy for event in log.events] == ["resubmit", "resubmit", "fail"]
    assert all("raise ConnectionError" in event.traceback for event in log.events)


@EACH_REWARD_CALL
async def test_case_08_raise_ends_the_rollout_with_the_error_itself(stage: Any) -> None:
    with pytest.raises(ConnectionError, match="judge of sample 3") as caught:
        await batches(plain(sample_stage(stage, name="judge", on_error="raise"), size=8))
    assert "reward_call" in [entry.name for entry in caught.traceback]
    assert any("in stage 'judge', sample 3, group 0, rollout 0" in note for note in caught.value.__notes__)


async def test_case_08_a_passing_error_costs_one_resubmission() -> None:
    raised: list[int] = []

    def judge(sample: Sample) -> None:
        if sample.index == 3 and not raised:
            raised.append(3)
            raise ConnectionError("once")

    (batch,) = await batches(plain(sample_stage(judge, on_error="resubmit"), size=8))
    summary = batch.summary
    assert indices(batch) == [0, 1]
    assert (summary.failed, summary.failed_samples, summary.resubmitted_samples) == (0, 1, 1)
    assert [len(group) for group in batch.groups] == [8, 8]


async def test_case_08_past_max_failures_one_group_holds_the_roots() -> None:
    async def judge(sample: Sample) -> None:
        try:
            raise OSError(f"socket of {sample.index}")
        except OSError as error:
            raise ConnectionError(f"judge of {sample.index}") from error

    pipeline = Pipeline(endless(1), [Generate(engine()), judge], BatchSpec(4, max_failures=3))
    with pytest.raises(ExceptionGroup, match="4 samples failed, more than max_failures=3") as caught:
        await batches(pipeline)
    assert [str(error) for error in caught.value.exceptions] == [f"judge of {index}" for index in range(4)]
    assert [str(error.__cause__) for error in caught.value.exceptions] == [f"socket of {index}" for index in range(4)]
    assert all(error.__traceback__ is not None for error in caught.value.exceptions)


async def test_case_08_as_many_as_max_failures_are_tolerated() -> None:
    def judge(sample: Sample) -> None:
        if sample.index in range(3):
            raise ConnectionError("no")

    pipeline = Pipeline(endless(1), [Generate(engine()), judge], BatchSpec(4, max_failures=3))
    (batch,) = await batches(pipeline)
    assert (batch.summary.failed, indices(batch)) == (3, [3, 4, 5, 6])


async def test_case_08_exhausted_rounds_carry_the_roots_as_their_cause() -> None:
    def judge(sample: Sample) -> None:
        raise ConnectionError(f"judge of {sample.index}")

    with pytest.raises(RolloutExhausted, match="failed 2") as caught:
        await batches(Pipeline(endless(1), [Generate(engine()), judge], BatchSpec(2, max_rounds=1)))
    assert isinstance(caught.value.__cause__, ExceptionGroup)
    assert [str(error) for error in caught.value.__cause__.exceptions] == ["judge of 0", "judge of 1"]


async def test_case_08_an_error_of_one_of_eight_siblings_keeps_its_traceback() -> None:
    def judge(sample: Sample) -> None:
        if sample.metadata["turns"] == [3] and sample.group_index == 0:
            raise ConnectionError("judge of turn 3")

    log = Log("stage_failed")
    (batch,) = await batches(plain(split(8), judge, groups=1, size=1, observers=[log]))
    assert (batch.summary.failed, batch.summary.failed_samples, indices(batch)) == (1, 1, [1])
    assert "raise ConnectionError" in log.events[0].traceback


async def test_case_08_an_error_passes_through_the_wrappers_and_names_the_inner_stage() -> None:
    async def around(sample: Sample, call_next: CallNext) -> Sample:
        return await call_next(sample)

    log = Log("stage_failed")
    await batches(plain(around, reward_call_later, size=8, observers=[log]))
    assert [event.stage for event in log.events] == ["reward_call_later"]


async def test_case_08_a_wrapper_may_answer_for_a_reward_call_that_raised() -> None:
    async def around(sample: Sample, call_next: CallNext) -> Sample:
        try:
            return await call_next(sample)
        except ConnectionError:
            sample.reward = 0.0
            return sample

    (batch,) = await batches(plain(around, reward_call_later, size=8))
    assert (batch.summary.failed, batch.summary.failed_samples, indices(batch)) == (0, 0, [0, 1])


async def test_case_08_several_errors_of_one_stage_stay_together() -> None:
    async def judge(sample: Sample) -> None:
        async def ask(number: int) -> None:
            raise ConnectionError(f"judge {number}")

        if sample.index == 3:
            async with anyio.create_task_group() as task_group:
                for number in range(2):
                    task_group.start_soon(ask, number)

    log = Log("stage_failed")
    (batch,) = await batches(plain(judge, size=8, observers=[log]))
    assert batch.summary.failed == 1
    assert "ConnectionError: judge" in log.events[0].traceback


@pytest.mark.parametrize(("policy", "failed", "samples", "resubmitted"), [("fail", 1, 8, 0), ("resubmit", 1, 24, 16)])
async def test_case_08_a_group_stage_that_raises(policy: str, failed: int, samples: int, resubmitted: int) -> None:
    class Compare:
        level = "group"
        on_error = policy

        def __call__(self, group: Group) -> None:
            if group.index == 0:
                raise ConnectionError("no comparison")

    (batch,) = await batches(plain(Compare(), size=8))
    summary = batch.summary
    assert (summary.failed, summary.failed_samples, summary.resubmitted_samples) == (failed, samples, resubmitted)
    assert indices(batch) == [1, 2]


async def test_case_08_a_batch_stage_that_raises_ends_the_rollout() -> None:
    def pack(batch: Batch) -> None:
        raise ConnectionError("no room")

    with pytest.raises(ConnectionError, match="no room"):
        await batches(plain(pack))


async def test_case_08_evaluation_counts_the_failure_and_goes_on() -> None:
    async with plain(reward_call_later) as pipeline:
        report = await pipeline.evaluate(some(2, 8), rollout_id=0)
    assert [group.index for group in report.groups] == [1]
    assert (report.summary.failed, report.summary.failed_samples, report.summary.kept) == (1, 1, 1)


# 9. A reward never returns: timeout measured from the stage's start


async def never(sample: Sample) -> None:
    if sample.index == 0:
        await anyio.sleep_forever()


async def test_case_09_a_reward_that_never_returns_fails_after_its_time() -> None:
    log = Log("stage_failed")
    async with Pipeline(
        endless(1), [Generate(engine(delay=100.0)), timeout(never, 30.0)], BatchSpec(1), observers=[log]
    ) as pipeline:
        batch = await anext(pipeline.rollouts())
        assert anyio.current_time() == pytest.approx(100.0 + 30.0 + 100.0)
    assert (indices(batch), batch.summary.failed) == ([1], 1)
    assert log.events[0].error == "TimeoutError: never took longer than 30 s on sample 0"


async def test_case_09_waiting_for_a_slot_does_not_count() -> None:
    async def judge(sample: Sample) -> None:
        await anyio.sleep(4.0)

    async with plain(limit(timeout(judge, 5.0), 1), groups=8, size=1) as pipeline:
        batch = await anext(pipeline.rollouts())
        assert anyio.current_time() == pytest.approx(32.0)
    assert (batch.summary.failed, batch.summary.rounds) == (0, 1)


async def test_case_09_a_timeout_around_a_limit_counts_the_waiting() -> None:
    async def judge(sample: Sample) -> None:
        await anyio.sleep(4.0)

    spec = BatchSpec(1, over_sampling=2)
    stages = [Generate(engine()), timeout(limit(judge, 1), 5.0)]
    async with Pipeline(endless(1), stages, spec) as pipeline:
        await anext(pipeline.rollouts())
        assert anyio.current_time() == pytest.approx(4.0)


async def test_case_09_the_slot_of_one_that_hangs_is_given_on() -> None:
    async def hangs(sample: Sample) -> None:
        if (sample.index or 0) < 3:
            await anyio.sleep_forever()

    async with plain(limit(timeout(hangs, 5.0), 1), groups=1, size=1) as pipeline:
        batch = await anext(pipeline.rollouts())
        assert anyio.current_time() == pytest.approx(15.0)
    assert (indices(batch), batch.summary.failed) == ([3], 3)


async def test_case_09_each_attempt_has_its_own_time() -> None:
    tried: list[int] = []

    async def judge(sample: Sample) -> None:
        tried.append(1)
        if len(tried) < 3:
            await anyio.sleep_forever()

    async with plain(retry(timeout(judge, 5.0), wait=1.0), groups=1, size=1) as pipeline:
        batch = await anext(pipeline.rollouts())
        assert anyio.current_time() == pytest.approx(5.0 + 1.0 + 5.0 + 2.0)
    assert batch.summary.failed == 0


async def test_case_09_many_that_hang_at_once_all_end_at_once() -> None:
    async def hangs(sample: Sample) -> None:
        if (sample.index or 0) < 500:
            await anyio.sleep_forever()

    spec = BatchSpec(500, max_failures=500)
    async with Pipeline(endless(1), [Generate(engine()), timeout(hangs, 5.0)], spec) as pipeline:
        batch = await anext(pipeline.rollouts())
        assert anyio.current_time() == pytest.approx(5.0)
    assert batch.summary.failed == 500


async def test_case_09_what_comes_after_the_time_never_touches_the_sample() -> None:
    async def stubborn(sample: Sample) -> None:
        sample.metadata["half"] = True
        try:
            await anyio.sleep_forever()
        finally:
            sample.reward = 0.0

    async def around(sample: Sample, call_next: CallNext) -> Sample:
        try:
            return await call_next(sample)
        except TimeoutError:
            return sample

    (batch,) = await batches(plain(around, timeout(stubborn, 5.0)))
    assert all(sample.reward is None and sample.metadata == {} for sample in batch.samples)


async def test_case_09_a_timeout_of_the_judges_own_is_told_apart() -> None:
    async def judge(sample: Sample) -> None:
        if sample.index == 0:
            raise TimeoutError("the server's own")

    log = Log("stage_failed")
    await batches(plain(timeout(judge, 5.0), groups=1, size=1, observers=[log]))
    assert log.events[0].error == "TimeoutError: the server's own"


async def test_case_09_a_judge_of_groups_that_never_returns() -> None:
    async def compare(group: Group) -> None:
        if group.index == 0:
            await anyio.sleep_forever()

    async with plain(timeout(compare, 30.0)) as pipeline:
        batch = await anext(pipeline.rollouts())
        assert anyio.current_time() == pytest.approx(30.0)
    assert (indices(batch), batch.summary.failed) == ([1, 2], 1)


async def test_case_09_a_counting_stage_that_never_returns() -> None:
    async def judge(group: Group) -> bool:
        if group.index == 0:
            await anyio.sleep_forever()
        return True

    async with plain(timeout(DynamicFilter(judge), 30.0)) as pipeline:
        batch = await anext(pipeline.rollouts())
    assert (indices(batch), batch.summary.failed) == ([1, 2], 1)


def lag(seconds: float) -> None:
    """The loop is held for so long: when it goes on, all that was due by then is due at once."""
    try:
        loop: Any = asyncio.get_running_loop()
    except RuntimeError:
        import trio

        clock: Any = trio.lowlevel.current_clock()
        clock.jump(seconds)
    else:
        loop.advance(seconds)


async def test_case_09_a_loop_that_was_held_gives_no_false_timeout() -> None:
    """The judge's answer was due long before the time was over; somebody else held the loop past both."""

    async def judge(sample: Sample) -> None:
        await anyio.sleep(1.0)

    async def holds(sample: Sample) -> None:
        if sample.index == 1:
            lag(10.0)

    (batch,) = await batches(plain(timeout(judge, 5.0), holds, groups=2, size=1))
    assert (batch.summary.failed, indices(batch)) == (0, [0, 1])


# 10. A worker dies: the consumer raises within a second


class Death(BaseException):
    """No error of a stage: nothing but the end of the task that meets it."""


DEATHS = pytest.mark.parametrize("death", [Death, SystemExit, KeyboardInterrupt, GeneratorExit])


def dying(death: type[BaseException], where: str) -> tuple[Pipeline, list[float]]:
    """A pipeline that meets `death` once, and the time at which it did."""
    met: list[float] = []

    def meet() -> None:
        if not met:
            met.append(anyio.current_time())
            raise death("out of the blue")

    async def sample_dies(sample: Sample) -> None:
        await anyio.sleep(5.0)
        meet()
        await anyio.sleep(1e6)

    def sync_dies(sample: Sample) -> None:
        meet()

    async def wrapper_dies(sample: Sample, call_next: CallNext) -> None:
        await call_next(sample)
        meet()

    async def group_dies(group: Group) -> None:
        await anyio.sleep(5.0)
        meet()

    async def judge_dies(group: Group) -> bool:
        await anyio.sleep(5.0)
        meet()
        return True

    async def batch_dies(batch: Batch) -> None:
        await anyio.sleep(5.0)
        meet()

    def answer(sample: Sample) -> Completion:
        if where == "engine":
            meet()
        return Completion("x", [1], [0.0])

    stages: dict[str, list[Any]] = {
        "engine": [],
        "sample stage": [sample_dies],
        "sync stage": [sync_dies],
        "wrapper": [wrapper_dies],
        "behind limit, timeout and retry": [limit(retry(timeout(sample_dies, 30.0)), 64)],
        "child of a fan-out": [split(3), sample_dies],
        "group stage": [group_dies],
        "filter": [DynamicFilter(judge_dies)],
        "batch stage": [batch_dies],
    }
    simulated = SimulatedEngine(answer, delay=1.0)
    return Pipeline(endless(), [Generate(simulated), *stages[where]], BatchSpec(2)), met


PLACES = pytest.mark.parametrize(
    "where",
    [
        "engine",
        "sample stage",
        "sync stage",
        "wrapper",
        "behind limit, timeout and retry",
        "child of a fan-out",
        "group stage",
        "filter",
        "batch stage",
    ],
)


def run_to_death(death: type[BaseException], backend: str, main: Callable[[], Awaitable[Any]]) -> None:
    with pytest.raises(death, match="out of the blue"):
        anyio.run(main, **virtual_time(backend))
    gc.collect()  # asyncio logs what became of its tasks when they are collected: here, not in some later test


@BACKENDS
@DEATHS
@PLACES
def test_case_10_the_death_of_a_worker_ends_the_run_at_once(
    backend: str, death: type[BaseException], where: str
) -> None:
    pipeline, met = dying(death, where)
    left: list[float] = []

    async def main() -> None:
        try:
            async with pipeline:
                await anext(pipeline.rollouts())
        finally:
            left.append(anyio.current_time())

    run_to_death(death, backend, main)
    assert len(met) == 1
    assert left[0] - met[0] <= 1.0


@BACKENDS
@DEATHS
def test_case_10_a_consumer_that_trains_meanwhile_hears_of_it(backend: str, death: type[BaseException]) -> None:
    async def dies(sample: Sample, *, rollout_id: int) -> None:
        await anyio.sleep(5.0)
        if sample.index == 4:
            assert rollout_id == 1
            raise death("out of the blue")

    trained: list[int] = []

    async def main() -> None:
        async with plain(dies) as pipeline:
            async for batch in pipeline.rollouts(ahead=1):
                await anyio.sleep(1e6)
                trained.append(batch.rollout_id)

    run_to_death(death, backend, main)
    assert trained == []


@BACKENDS
@DEATHS
def test_case_10_an_evaluation_raises_too(backend: str, death: type[BaseException]) -> None:
    async def dies(sample: Sample) -> None:
        await anyio.sleep(5.0)
        if sample.index == 0:
            raise death("out of the blue")

    async def main() -> None:
        async with plain(dies) as pipeline:
            await pipeline.evaluate(some(3), rollout_id=0)

    run_to_death(death, backend, main)


def cancels_its_task(when: Callable[[Any], bool]) -> Any:
    """A stage whose task is cancelled from outside, once, while it works."""
    done = False

    async def cancelled(sample: Sample) -> None:
        nonlocal done
        task = asyncio.current_task()
        assert task is not None
        if not done and when(sample):
            done = True
            asyncio.get_running_loop().call_later(5.0, task.cancel)
        await anyio.sleep(10.0)

    return cancelled


@ASYNCIO
@pytest.mark.parametrize(
    "stages",
    [
        [cancels_its_task(lambda sample: sample.index == 1)],
        [limit(cancels_its_task(lambda sample: sample.index == 1), 8)],
        [split(3), cancels_its_task(lambda sample: sample.group_index == 0 and sample.index == 3)],
    ],
)
async def test_case_10_a_task_that_is_cancelled_natively_is_raised_to_the_consumer(stages: list[Any]) -> None:
    with pytest.raises(RuntimeError, match=r"the worker of sample \d .* was ended in stage 'cancelled' by Cancelled"):
        async with plain(*stages) as pipeline:
            try:
                await anext(pipeline.rollouts())
            finally:
                assert anyio.current_time() <= 6.0


@ASYNCIO
async def test_case_10_a_group_whose_task_is_cancelled_natively() -> None:
    async def cancelled(group: Group) -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_later(5.0, task.cancel)
        await anyio.sleep(10.0)

    with pytest.raises(RuntimeError, match=r"the worker of group \d .* was ended in stage 'cancelled'"):
        await batches(plain(cancelled))


@ASYNCIO
@pytest.mark.parametrize("level", ["filter", "batch stage"])
async def test_case_10_a_rollout_whose_own_task_is_cancelled_natively(level: str) -> None:
    async def hangs() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_later(5.0, task.cancel)
        await anyio.sleep(10.0)

    async def judge(group: Group) -> bool:
        await hangs()
        return True

    async def pack(batch: Batch) -> None:
        await hangs()

    with pytest.raises(RuntimeError, match="rollout 0"):
        await batches(plain(DynamicFilter(judge) if level == "filter" else pack))


@ASYNCIO
async def test_case_10_an_evaluation_whose_worker_is_cancelled_natively() -> None:
    async with plain(cancels_its_task(lambda sample: sample.index == 1)) as pipeline:
        with pytest.raises(RuntimeError, match="the worker of sample 1"):
            await pipeline.evaluate(some(3), rollout_id=0)


@ASYNCIO
async def test_case_10_a_consumer_that_waits_for_an_earlier_rollout_hears_of_it() -> None:
    with pytest.raises(RuntimeError, match="the worker of sample 4"):
        async with plain(cancels_its_task(lambda sample: sample.index == 4)) as pipeline:
            async for _ in pipeline.rollouts(ahead=1):
                await anyio.sleep(1e6)


@ASYNCIO
async def test_case_10_the_pipeline_goes_on_after_a_worker_was_cancelled() -> None:
    kept = 0
    async with plain(cancels_its_task(lambda sample: sample.index == 1)) as pipeline:
        rollouts = pipeline.rollouts()
        with pytest.raises(RuntimeError, match="the worker of sample 1"):
            await anext(rollouts)
        kept = (await anext(rollouts)).summary.kept
    assert kept == 2


@ASYNCIO
async def test_case_10_idle_workers_that_are_cancelled_are_missed_by_nobody() -> None:
    kept = 0
    async with plain(nap, groups=4) as pipeline:
        rollouts = pipeline.rollouts()
        await anext(rollouts)
        await anyway()
        idle = [task for task in asyncio.all_tasks() if task.get_name() == "rolloutbus worker"]
        assert idle
        for task in idle:
            task.cancel()
        await anyway()
        kept = (await anext(rollouts)).summary.kept
    assert kept == 4


@ASYNCIO
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("name", ["rolloutbus worker", "rolloutbus rollout 0"])
async def test_case_10_a_task_that_is_cancelled_before_it_begins(name: str) -> None:
    async def cancel() -> None:
        while not (found := [task for task in asyncio.all_tasks() if task.get_name() == name]):
            await anyio.sleep(0)
        found[0].cancel()

    raised: list[RuntimeError] = []
    async with anyio.create_task_group() as task_group:
        task_group.start_soon(cancel)
        try:
            async with plain(nap) as pipeline:
                await anext(pipeline.rollouts())
        except RuntimeError as error:
            raised.append(error)
    gc.collect()
    assert raised


# 11. Capacity 4, a producer of 10,000


class Producer:
    """Prompts that count how many were taken."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.pulled = 0

    def __iter__(self) -> Iterator[str]:
        for number in range(self.count):
            self.pulled += 1
            yield str(number)


class AsyncProducer(Producer):
    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[str]:
        for number in range(self.count):
            self.pulled += 1
            yield str(number)


@pytest.mark.parametrize("producer", [Producer, AsyncProducer])
async def test_case_11_a_slow_consumer_bounds_what_is_pulled_and_nothing_is_dropped(producer: type[Producer]) -> None:
    source, trained = producer(10_000), []
    async with Pipeline(Prompts(source, 1), [Generate(engine())], BatchSpec(4)) as pipeline:
        async for batch in pipeline.rollouts():
            await anyio.sleep(100.0)
            trained += [int(str(sample.prompt)) for sample in batch.samples]
            assert source.pulled - len(trained) <= 4
    assert trained == list(range(10_000))


@pytest.mark.parametrize(("ahead", "over_sampling"), [(0, 4), (0, 7), (3, 4), (3, 7)])
async def test_case_11_running_ahead_is_bounded_too(ahead: int, over_sampling: int) -> None:
    source = Producer(10_000)
    spec = BatchSpec(4, over_sampling=over_sampling, max_rounds=1)
    async with Pipeline(Prompts(source, 1), [Generate(engine(delay=1.0))], spec) as pipeline:
        rollouts = pipeline.rollouts(ahead=ahead)
        for number in range(1, 20):
            await anext(rollouts)
            await anyio.sleep(1000.0)
            assert source.pulled <= (number + ahead) * over_sampling


async def test_case_11_a_consumer_that_never_comes_back_stops_the_producer() -> None:
    source, simulated = Producer(10_000), engine()
    async with Pipeline(Prompts(source, 1), [Generate(simulated)], BatchSpec(4)) as pipeline:
        await anext(pipeline.rollouts())
        await anyio.sleep(1e6)
        assert (source.pulled, simulated.calls, simulated.in_flight) == (4, 4, 0)


async def test_case_11_an_evaluation_has_one_round_in_flight() -> None:
    source, simulated = Producer(1000), engine(delay=1.0)
    async with Pipeline(endless(1), [Generate(simulated)], BatchSpec(4)) as pipeline:
        report = await pipeline.evaluate(Prompts(source, 1), rollout_id=0)
    assert simulated.most_in_flight == 4
    assert [int(str(group.prompt)) for group in report.groups] == list(range(1000))


async def test_case_11_a_filter_that_rejects_bounds_the_pull_by_its_rounds() -> None:
    source = Producer(10_000)
    stages = [Generate(engine()), rewarded([1.0]), DynamicFilter(reward_nonzero_std)]
    with pytest.raises(RolloutExhausted):
        await batches(Pipeline(Prompts(source, 1), stages, BatchSpec(4, max_rounds=10)))
    assert source.pulled == 40


async def test_case_11_a_slow_stage_bounds_what_the_engine_is_asked() -> None:
    simulated = engine()

    async def judge(sample: Sample) -> None:
        assert simulated.calls - judged[0] <= 4
        await anyio.sleep(10.0)
        judged[0] += 1

    judged = [0]
    await batches(Pipeline(endless(1), [Generate(simulated), limit(judge, 1)], BatchSpec(4)), 25)
    assert simulated.calls == judged[0] == 100


async def test_case_11_events_that_nobody_reads_are_skipped_and_counted() -> None:
    async with Pipeline(some(10_000, 1), [Generate(engine())], BatchSpec(500)) as pipeline:
        stream = pipeline.events(("group_ended",), capacity=4)
        async for _ in pipeline.rollouts():
            pass
        assert stream.missed == 10_000 - 4


SLICE = 0.001
"""Seconds that the pipeline holds the loop at most, between two stages."""

GROUPS = 48


@BACKENDS
@pytest.mark.parametrize("level", ["sample", "children", "group", "filter"])
def test_case_11_the_loop_gets_its_turn_between_stages(backend: str, level: str) -> None:
    """Counted in stages that each use up a slice, not in seconds: a busy machine changes nothing."""
    done = most = before = arrived = 0
    opened = anyio.Event()

    async def gate(sample: Sample) -> None:
        """All samples come out of it at the same time."""
        nonlocal arrived
        arrived += 1
        if arrived == GROUPS:
            opened.set()
        await opened.wait()

    def busy() -> None:
        nonlocal done
        until = perf_counter() + 2 * SLICE
        while perf_counter() < until:
            pass
        done += 1

    def sample_stage(sample: Sample) -> None:
        busy()

    def group_stage(group: Group) -> None:
        busy()

    def judge(group: Group) -> bool:
        busy()
        return True

    async def tick() -> None:
        nonlocal most, before
        while True:
            most, before = max(most, done - before), done
            await anyio.lowlevel.checkpoint()

    stages = {
        "sample": [sample_stage],
        "children": [split(4), sample_stage],
        "group": [group_stage],
        "filter": [DynamicFilter(judge)],
    }

    async def main() -> None:
        async with Pipeline(endless(1), [Generate(engine()), gate, *stages[level]], BatchSpec(GROUPS)) as pipeline:
            async with anyio.create_task_group() as task_group:
                task_group.start_soon(tick)
                await anext(pipeline.rollouts())
                task_group.cancel_scope.cancel()

    anyio.run(main, backend=backend)
    assert done == (4 * GROUPS if level == "children" else GROUPS)
    assert most <= 4


# 17. 100,000 events through 3 no-op stages: counted exactly. A million: flat memory


class Counters:
    """Three stages that do nothing but count."""

    def __init__(self) -> None:
        self.counts = [0, 0, 0]

    @property
    def stages(self) -> list[Any]:
        def counter(position: int) -> Any:
            def count(sample: Sample) -> None:
                self.counts[position] += 1

            return sample_stage(count, name=f"count {position}")

        return [counter(position) for position in range(3)]


async def test_case_17_a_hundred_thousand_samples_are_counted_exactly() -> None:
    counters, samples, groups = Counters(), 0, 0
    async with Pipeline(some(12_500, 8), [Generate(engine()), *counters.stages], BatchSpec(500)) as pipeline:
        async for batch in pipeline.rollouts():
            samples += len(batch.samples)
            groups += batch.summary.kept
    assert counters.counts == [100_000] * 3
    assert (samples, groups) == (100_000, 12_500)


async def test_case_17_a_hundred_thousand_events_are_counted_exactly() -> None:
    class Count:
        kinds = ("group_submitted", "sample_generated", "group_completed", "group_ended")

        def __init__(self) -> None:
            self.seen: Counter[str] = Counter()
            self.seq = 0

        def observe(self, event: Any) -> None:
            assert event.seq == self.seq
            self.seq += 1
            self.seen[event.kind] += 1

    count, counters = Count(), Counters()
    stages = [Generate(engine()), *counters.stages]
    await batches(Pipeline(some(25_000, 1), stages, BatchSpec(500), observers=[count]), 50)
    assert count.seen == dict.fromkeys(Count.kinds, 25_000)
    assert count.seq == 100_000


@contextmanager
def no_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


async def growth(pipeline: Pipeline, first: int, last: int, held: Callable[[], int]) -> int:
    """What is `held` more when rollout `last` is given than when `first` is, without help of the garbage collector."""
    then: dict[int, int] = {}
    with no_garbage_collector():
        async with pipeline:
            async for batch in pipeline.rollouts(stop=last + 1):
                if batch.rollout_id in (first, last):
                    then[batch.rollout_id] = held()
    return then[last] - then[first]


ROOM = 20_000
"""Bytes. One small object lost for each of 1,600 samples makes five times as much."""


def some_fail(sample: Sample) -> None:
    if sample.index is not None and sample.index % 40 == 0:
        raise ConnectionError("no")


def some_drop(sample: Sample) -> Drop | None:
    return Drop("no") if sample.index is not None and sample.index % 40 == 0 else None


@pytest.mark.parametrize(
    ("stages", "spec"),
    [
        ([], {}),
        ([split(2)], {}),
        ([nap], {}),
        ([limit(timeout(nap, 5.0), 64)], {}),
        ([rewarded([1.0]), DynamicFilter(reward_nonzero_std, "last")], {"over_sampling": 15}),
        ([rewarded([1.0]), DynamicFilter(reward_nonzero_std, "best")], {"max_rounds": 2}),
        ([some_drop], {}),
        ([], {"over_sampling": 15, "surplus": "carry"}),
        ([some_fail], {}),
    ],
    ids=["plain", "fan-out", "async", "wrapped", "last", "best", "drops", "carry", "failures"],
)
async def test_case_17_memory_stays_flat(stages: list[Any], spec: dict[str, Any]) -> None:
    pipeline = Pipeline(endless(8), [Generate(engine()), *Counters().stages, *stages], BatchSpec(10, **spec))
    with traced():
        assert await growth(pipeline, 5, 25, lambda: tracemalloc.get_traced_memory()[0]) < ROOM


@pytest.mark.slow
async def test_case_17_a_million_samples_in_flat_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "rolloutbus")  # pytest would keep what the watchdog says on a busy machine
    counters = Counters()
    pipeline = Pipeline(endless(8), [Generate(engine()), *counters.stages], BatchSpec(500))
    assert await growth(pipeline, 10, 249, sys.getallocatedblocks) < 1000  # tracemalloc would take minutes
    assert counters.counts == [1_000_000] * 3


# 18. A stall: the report names sample, stage, age and resource


class Heard(logging.Handler):
    """What the library logs, and a way to wait for it: a stall is ended by being reported."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.reported = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        self.reported.set()

    async def stall(self, seconds: float = 60.0) -> None:
        """Wait until something is reported; in real time, as the watchdog does."""
        await anyio.to_thread.run_sync(self.reported.wait, seconds)

    @property
    def line(self) -> str:
        """The first thing that is waited for."""
        return self.said[0].splitlines()[1] if self.said else ""


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler, logger = Heard(), logging.getLogger("rolloutbus")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def watched(*stages: Any, groups: int = 1, size: int = 1, prompts: Any = None, delay: Any = 0.0) -> Pipeline:
    stages = (Generate(engine(delay)), *stages)
    return Pipeline(prompts or endless(size), stages, BatchSpec(groups), stall_after=0.05)


async def test_case_18_a_stall_names_sample_stage_age_and_resource(heard: Heard) -> None:
    began = perf_counter()

    async def judge(sample: Sample) -> None:
        if sample.index == 3:
            await heard.stall()

    async with watched(limit(judge, 64), groups=2, size=2) as pipeline:
        await anext(pipeline.rollouts())
    assert heard.said[0].startswith("nothing has happened for 0.05 s; waiting for:")
    place, age = heard.line.split(" for ")
    assert place == "  sample 3 (group 1, rollout 0): in stage 'judge'"
    assert 0.0 <= float(age.removesuffix(" s")) <= perf_counter() - began + 0.05


async def test_case_18_a_stalled_engine_is_the_resource(heard: Heard) -> None:
    class Stalled:
        async def generate(self, sample: Sample, sampling: Any) -> Completion:
            await heard.stall()
            return Completion("x", [1], [0.0])

    pipeline = Pipeline(endless(1), [Generate(Stalled())], BatchSpec(1), stall_after=0.05)
    async with pipeline:
        await anext(pipeline.rollouts())
    assert heard.line.startswith("  sample 0 (group 0, rollout 0): in stage 'Generate' for ")
    assert heard.line.endswith(", held by engine Stalled")


async def test_case_18_one_that_waits_for_a_slot_says_so(heard: Heard) -> None:
    async def judge(sample: Sample) -> None:
        await heard.stall()

    async with watched(limit(judge, 1), groups=2) as pipeline:
        await anext(pipeline.rollouts())
    lines = heard.said[0].splitlines()[1:]
    assert len(lines) == 2
    assert lines[0].startswith("  sample 0 ")
    assert "held by" not in lines[0]
    assert lines[1].startswith("  sample 1 ")
    assert lines[1].endswith(", held by limit(1): 1 in use")


async def test_case_18_a_thread_is_the_resource(heard: Heard) -> None:
    def judge(sample: Sample) -> None:
        assert heard.reported.wait(60)

    async with watched(in_thread(judge)) as pipeline:
        await anext(pipeline.rollouts())
    assert "in stage 'judge' for " in heard.line
    assert heard.line.endswith(", held by a thread")


async def test_case_18_inside_of_a_wrapper_the_inner_stage_is_named(heard: Heard) -> None:
    async def around(sample: Sample, call_next: CallNext) -> Sample:
        return await call_next(sample)

    async def judge(sample: Sample) -> None:
        await heard.stall()

    async with watched(around, judge) as pipeline:
        await anext(pipeline.rollouts())
    assert "sample 0 (group 0, rollout 0): in stage 'judge' for " in heard.line


async def test_case_18_a_child_of_a_fan_out_is_named(heard: Heard) -> None:
    async def judge(sample: Sample) -> None:
        if sample.metadata["turns"] == [1]:
            await heard.stall()

    async with watched(split(2), judge) as pipeline:
        await anext(pipeline.rollouts())
    assert "sample 2 (group 0, rollout 0): in stage 'judge' for " in heard.line


async def test_case_18_a_stalled_group_stage_names_the_group(heard: Heard) -> None:
    async def compare(group: Group) -> None:
        await heard.stall()

    async with watched(compare) as pipeline:
        await anext(pipeline.rollouts())
    assert "group 0 (rollout 0): in stage 'compare' for " in heard.line


async def test_case_18_a_stalled_judge_names_the_group(heard: Heard) -> None:
    async def judge(group: Group) -> bool:
        await heard.stall()
        return True

    async with watched(DynamicFilter(judge)) as pipeline:
        await anext(pipeline.rollouts())
    assert "group 0 (rollout 0): in stage 'DynamicFilter' for " in heard.line


async def test_case_18_a_stalled_batch_stage_is_named(heard: Heard) -> None:
    async def pack(batch: Batch) -> None:
        await heard.stall()

    async with watched(pack) as pipeline:
        await anext(pipeline.rollouts())
    assert heard.line == "  rollout 0: the batch stage 'pack'"


async def test_case_18_a_stalled_prompt_source_is_named(heard: Heard) -> None:
    class Late:
        def __aiter__(self) -> Late:
            return self

        async def __anext__(self) -> str:
            await heard.stall()
            return "late"

    async with watched(prompts=Prompts(Late(), 1)) as pipeline:
        await anext(pipeline.rollouts())
    assert heard.line == "  rollout 0: the prompt source Prompts"


async def test_case_18_a_stalled_evaluation_is_named(heard: Heard) -> None:
    async def judge(sample: Sample) -> None:
        await heard.stall()

    async with watched(judge) as pipeline:
        await pipeline.evaluate(some(1, 1), rollout_id=100)
    assert "sample 0 (group 0, rollout 100): in stage 'judge' for " in heard.line


async def test_case_18_an_engine_that_does_not_give_back_is_named(heard: Heard) -> None:
    """The batch is full, and the engine was asked to abort the rest."""

    class Deaf:
        async def generate(self, sample: Sample, sampling: Any) -> Completion:
            if sample.index == 1:
                await heard.stall()
            return Completion("x", [1], [0.0])

        async def abort(self, samples: Any) -> None:
            await heard.stall()

    spec = BatchSpec(1, over_sampling=2)
    async with Pipeline(endless(1), [Generate(Deaf())], spec, stall_after=0.05) as pipeline:
        await anext(pipeline.rollouts())
    lines = heard.said[0].splitlines()[1:]
    assert lines[0] == "  rollout 0: Deaf to abort its requests"
    assert lines[1].startswith("  sample 1 (group 1, rollout 0): in stage 'Generate' for ")
    assert lines[1].endswith(", held by engine Deaf")


async def test_case_18_many_are_counted_behind_the_oldest(heard: Heard) -> None:
    async def judge(sample: Sample) -> None:
        await heard.stall()

    async with watched(limit(judge, 2), groups=40) as pipeline:
        await anext(pipeline.rollouts())
    lines = heard.said[0].splitlines()[1:]
    assert len(lines) == 6
    assert lines[0].startswith("  sample 0 ")
    assert lines[-1] == "  rollout 0: and 35 more"


async def test_case_18_a_stage_that_holds_the_loop_is_named_while_it_does(heard: Heard) -> None:
    def blocks(sample: Sample) -> None:
        assert heard.reported.wait(60)

    async with watched(blocks) as pipeline:
        await anext(pipeline.rollouts())
    assert "stage 'blocks' holds the event loop for 0." in heard.said[0]
    assert "at sample 0 (group 0, rollout 0): wrap it, in_thread(blocks)" in heard.said[0]


async def test_case_18_a_trainer_that_takes_its_time_is_no_stall(heard: Heard) -> None:
    async with watched() as pipeline:
        await anext(pipeline.rollouts())
        await heard.stall(0.3)
    assert heard.said == []


# 19. A prompt source that ends in the middle of a batch: the declared policy, a clean exit


class Run:
    """Everything that a pipeline gives until it ends, and how it ends."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.error: RolloutExhausted | None = None


async def exhaust(prompts: Any, policy: str, *stages: Any, stop: int = 6, ahead: int = 0, **spec: Any) -> Run:
    run, simulated = Run(), engine(delay=1.0)
    spec = {"groups": 2, "on_exhausted": policy, **spec}
    async with Pipeline(prompts, [Generate(simulated), *stages], BatchSpec(**spec)) as pipeline:
        try:
            async for batch in pipeline.rollouts(stop=stop, ahead=ahead):
                run.batches.append(indices(batch))
        except RolloutExhausted as error:
            run.error = error
        await anyway()
        assert simulated.in_flight == 0
    return run


AHEAD = pytest.mark.parametrize("ahead", [0, 1, 4])


@AHEAD
async def test_case_19_error_gives_what_was_full_and_then_says_what_is_missing(ahead: int) -> None:
    run = await exhaust(some(5), "error", ahead=ahead)
    assert run.batches == [[0, 1], [2, 3]]
    assert run.error is not None
    assert "the prompts ended before the batch was full" in str(run.error)
    assert (run.error.summary.rollout_id, run.error.summary.kept, run.error.summary.target) == (2, 1, 2)


@AHEAD
async def test_case_19_partial_gives_the_rest_and_ends(ahead: int) -> None:
    run = await exhaust(some(5), "partial", ahead=ahead)
    assert (run.batches, run.error) == ([[0, 1], [2, 3], [4]], None)


@AHEAD
async def test_case_19_wrap_begins_again_with_new_numbers(ahead: int) -> None:
    run = await exhaust(some(5), "wrap", ahead=ahead)
    assert (run.batches, run.error) == ([[n, n + 1] for n in range(0, 12, 2)], None)


@AHEAD
@pytest.mark.parametrize("policy", ["error", "partial"])
async def test_case_19_an_end_at_the_boundary_is_clean(policy: str, ahead: int) -> None:
    run = await exhaust(some(4), policy, ahead=ahead)
    assert (run.batches, run.error) == ([[0, 1], [2, 3]], None)


@pytest.mark.parametrize("policy", ["error", "partial", "wrap"])
async def test_case_19_no_prompts_at_all_end_at_once(policy: str) -> None:
    run = await exhaust(some(0), policy)
    assert (run.batches, run.error) == ([], None)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
async def test_case_19_wrap_with_fewer_prompts_than_a_round(count: int) -> None:
    run = await exhaust(some(count), "wrap", groups=8, over_sampling=8, stop=2)
    assert (run.batches, run.error) == ([list(range(8)), list(range(8, 16))], None)


async def test_case_19_wrap_with_a_source_that_has_no_start_says_so() -> None:
    prompts = Prompts((f"prompt {number}" for number in range(3)), 1)
    with pytest.raises(RuntimeError, match="prompts cannot be rewound: they come from a generator"):
        await exhaust(prompts, "wrap")


async def test_case_19_an_async_source_that_ends() -> None:
    run = await exhaust(Prompts(AsyncProducer(5), 1), "partial")
    assert run.batches == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("policy", "given"), [("partial", [[0, 1], [2]]), ("wrap", [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]])]
)
async def test_case_19_a_file_that_ends(tmp_path: Path, policy: str, given: list[list[int]]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(3)))
    run = await exhaust(JsonlPrompts(path, 1, epochs=1), policy)
    assert run.batches == given


async def test_case_19_a_source_that_fails_has_not_ended() -> None:
    def prompts() -> Iterator[str]:
        yield from ("a", "b", "c")
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        await exhaust(Prompts(prompts(), 1), "partial")


async def test_case_19_what_was_left_unfinished_is_asked_again_before_the_end() -> None:
    slow_first = engine(delay=lambda sample: 50.0 if sample.index == 0 else 1.0)
    spec = BatchSpec(2, over_sampling=3, on_exhausted="partial")
    given = await batches(Pipeline(some(3, 1), [Generate(slow_first)], spec), 6)
    assert [indices(batch) for batch in given] == [[1, 2], [0]]


async def test_case_19_what_was_carried_is_given_before_the_end() -> None:
    spec = BatchSpec(2, over_sampling=5, surplus="carry", on_exhausted="partial")
    given = await batches(Pipeline(some(5, 1), [Generate(engine())], spec), 6)
    assert [indices(batch) for batch in given] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(("fallback", "kept"), [("last", [2, 3]), ("best", [0, 1])])
async def test_case_19_a_fallback_fills_the_batch_when_the_prompts_end(fallback: Fallback, kept: list[int]) -> None:
    stages = [Generate(engine(by_index)), rewarded([1.0]), DynamicFilter(reward_nonzero_std, fallback)]
    (batch,) = await batches(Pipeline(some(4, 1), stages, BatchSpec(2, over_sampling=4)))
    assert (indices(batch), batch.summary.kept_by_fallback) == (kept, 2)


async def test_case_19_a_filter_that_rejects_to_the_end_is_an_error_that_says_so() -> None:
    run = await exhaust(some(5, 1), "error", rewarded([1.0]), DynamicFilter(reward_nonzero_std))
    assert run.error is not None
    assert run.error.summary.dropped == {"group_size_1": 5}


async def test_case_19_the_rest_is_trained_with_its_own_summary() -> None:
    async with Pipeline(some(3), [Generate(engine())], BatchSpec(2, on_exhausted="partial")) as pipeline:
        rollouts = pipeline.rollouts()
        await anext(rollouts)
        rest = await anext(rollouts)
        rest.trained(TrainResult({"loss": 1.0}))
        with pytest.raises(StopAsyncIteration):
            await anext(rollouts)
        with pytest.raises(StopAsyncIteration):
            await anext(rollouts)
    assert (rest.summary.kept, rest.summary.target, rest.summary.executions) == (1, 2, 2)


async def test_case_19_an_evaluation_ends_with_its_source() -> None:
    async with plain() as pipeline:
        report = await pipeline.evaluate(some(3), rollout_id=0)
        empty = await pipeline.evaluate(some(0), rollout_id=1)
    assert [group.index for group in report.groups] == [0, 1, 2]
    assert (empty.groups, empty.summary.submitted) == ([], 0)
