from __future__ import annotations

import math
import subprocess
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.megatron.plan import (
    NotDivisible,
    ParallelLayout,
    PlanError,
    PlannedStep,
    SampleTooLong,
    TooFewSamples,
    plan_microbatches,
    transformer_flops,
)

ROOT = Path(__file__).parent.parent
FLOPS = transformer_flops(parameters=1000, layers=2, hidden_size=64)


class Whole:
    """An element of an array: an int, as `operator.index` has it."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Tensorlike(list[Whole]):
    """Neither true nor false, as arrays and tensors are."""

    def __init__(self, *values: int) -> None:
        super().__init__(map(Whole, values))

    def __bool__(self) -> bool:
        raise ValueError("the truth value of an array is ambiguous")


def flat(steps: Sequence[PlannedStep]) -> list[int]:
    return [sample for step in steps for parts in step.micro_batches for part in parts for sample in part]


def shares(step: PlannedStep) -> list[list[int]]:
    """The samples of each rank."""
    return [[sample for part in parts for sample in part] for parts in step.micro_batches]


def padded(length: int, multiple: int) -> int:
    return math.ceil(length / multiple) * multiple


def tokens(part: Sequence[int], lengths: Sequence[int], layout: ParallelLayout) -> int:
    """What a micro-batch takes on all of its context-parallel ranks, with all padding."""
    return padded(sum(padded(lengths[i], layout.sequence_multiple) for i in part), layout.total_multiple)


layouts = st.builds(
    ParallelLayout,
    dp=st.integers(1, 6),
    cp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2]),
    vpp_group=st.integers(1, 3),
    token_multiple=st.sampled_from([1, 16]),
)
sample_lengths = st.lists(st.integers(1, 300) | st.integers(1, 20), min_size=1, max_size=120)
costs = st.sampled_from([None, FLOPS])
spare = st.just(0) | st.integers(0, 1000)


def cap(lengths: Sequence[int], layout: ParallelLayout, more: int) -> int:
    """The least that the longest sample needs, and some more. Without it the micro-batches are hard to fill."""
    longest = padded(max(lengths), layout.sequence_multiple)
    return padded(longest, layout.total_multiple) // layout.cp + more


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Lengths, and executions of which some have several samples, in any order."""
    lengths = draw(sample_lengths)
    return lengths, draw(st.lists(st.integers(0, 40), min_size=len(lengths), max_size=len(lengths)))


def planned(lengths: Sequence[int], layout: ParallelLayout, **numbers: Any) -> list[PlannedStep]:
    """The plan, or no steps where the batch is too small for the layout."""
    try:
        return plan_microbatches(lengths, layout, **numbers)
    except TooFewSamples:
        return []


# What holds for every plan


@given(batches(), layouts, spare, st.integers(1, 50), costs)
def test_every_sample_is_in_exactly_one_micro_batch(
    batch: tuple[list[int], list[int]], layout: ParallelLayout, more: int, size: int, cost: Any
) -> None:
    lengths, executions = batch
    numbers = {
        "executions": executions,
        "global_batch_size": size,
        "max_tokens_per_gpu": cap(lengths, layout, more),
        "cost": cost,
    }
    if steps := planned(lengths, layout, **numbers):
        assert sorted(flat(steps)) == list(range(len(lengths)))


@given(batches(), layouts, st.integers(1, 50))
def test_an_execution_lies_in_one_step(batch: tuple[list[int], list[int]], layout: ParallelLayout, size: int) -> None:
    lengths, executions = batch
    steps = planned(lengths, layout, executions=executions, global_batch_size=size, max_tokens_per_gpu=1000)
    found = [{executions[sample] for sample in flat([step])} for step in steps]
    assert sum(map(len, found)) == len(set().union(*found))
    assert [step.executions for step in steps] == [len(each) for each in found]


@given(sample_lengths, layouts, spare, costs)
def test_micro_batches_keep_the_cap_with_their_padding(
    lengths: list[int], layout: ParallelLayout, more: int, cost: Any
) -> None:
    for step in planned(lengths, layout, max_tokens_per_gpu=cap(lengths, layout, more), cost=cost):
        for part in (part for parts in step.micro_batches for part in parts):
            assert 0 < tokens(part, lengths, layout) <= cap(lengths, layout, more) * layout.cp


@given(sample_lengths, layouts, spare, st.integers(1, 50), costs)
def test_all_ranks_have_as_many_micro_batches(
    lengths: list[int], layout: ParallelLayout, more: int, size: int, cost: Any
) -> None:
    for step in planned(
        lengths, layout, global_batch_size=size, max_tokens_per_gpu=cap(lengths, layout, more), cost=cost
    ):
        assert len(step.micro_batches) == layout.dp
        (number,) = {len(parts) for parts in step.micro_batches}
        assert number > 0
        assert number % layout.vpp_group == 0
        assert all(parts and all(parts) for parts in step.micro_batches)


@given(sample_lengths, layouts, spare, costs)
def test_ranks_lie_no_further_apart_than_micro_batches_or_a_sample(
    lengths: list[int], layout: ParallelLayout, more: int, cost: Any
) -> None:
    work = cost or (lambda length: padded(length, layout.sequence_multiple))
    for step in planned(lengths, layout, max_tokens_per_gpu=cap(lengths, layout, more), cost=cost):
        parts = [sum(work(lengths[i]) for i in part) for rank in step.micro_batches for part in rank]
        apart = max(step.costs) - min(step.costs)
        longest = max(map(work, lengths))
        assert apart <= max(longest, max(parts) - min(parts)) * (1 + 1e-9)
        assert sum(step.costs) == pytest.approx(sum(parts))


@given(sample_lengths, st.integers(1, 6), costs)
def test_without_pressure_from_the_cap_ranks_differ_by_less_than_a_sample(
    lengths: list[int], dp: int, cost: Any
) -> None:
    for step in planned(lengths, ParallelLayout(dp=dp), max_tokens_per_gpu=sum(lengths), cost=cost):
        assert max(step.costs) - min(step.costs) <= max(map(cost or float, lengths))


@given(batches(), layouts, spare, costs)
def test_is_deterministic(batch: tuple[list[int], list[int]], layout: ParallelLayout, more: int, cost: Any) -> None:
    lengths, executions = batch
    numbers = {
        "executions": executions,
        "global_batch_size": 20,
        "max_tokens_per_gpu": cap(lengths, layout, more),
        "cost": cost,
    }
    renamed = {"executions": [f"execution {each}" for each in executions]}
    assert planned(lengths, layout, **numbers) == planned(list(lengths), layout, **(numbers | renamed))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.randoms(use_true_random=False))
def test_fixed_micro_batches(dp: int, size: int, group: int, multiple: int, random: Random) -> None:
    layout = ParallelLayout(dp=dp, vpp_group=group)
    lengths = [random.randrange(1, 200) for _ in range(dp * size * group * multiple)]
    (step,) = plan_microbatches(lengths, layout, micro_batch_size=size)
    assert sorted(flat([step])) == list(range(len(lengths)))
    assert {len(parts) for parts in step.micro_batches} == {group * multiple}
    assert {len(part) for parts in step.micro_batches for part in parts} == {size}
    # neighbours in length
    spans = sorted(sorted(lengths[i] for i in part) for parts in step.micro_batches for part in parts)
    assert [length for span in spans for length in span] == sorted(lengths)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=80), st.integers(1, 40))
def test_steps_are_as_near_to_the_global_batch_as_they_can_be(executions: list[int], size: int) -> None:
    steps = plan_microbatches(
        [1] * len(executions), ParallelLayout(), executions=executions, global_batch_size=size, max_tokens_per_gpu=80
    )
    total, counts = len(set(executions)), [step.executions for step in steps]
    assert sum(counts) == total
    assert max(counts) - min(counts) <= 1
    if total % size == 0:
        assert set(counts) == {size}
    number = len(steps)
    assert abs(total / size - number) <= 0.5 or number == 1


# Examples


def test_long_samples_are_paired_with_short_ones() -> None:
    (step,) = plan_microbatches([8, 7, 6, 5, 4], ParallelLayout(dp=2), max_tokens_per_gpu=16)
    # what Karmarkar and Karp's paper gives for these five: 16 and 14
    assert sorted(step.costs) == [14, 16]
    assert step.imbalance == 16 / 15


def test_executions_fill_the_steps_in_the_order_of_the_batch() -> None:
    steps = plan_microbatches(
        [5] * 6, ParallelLayout(), executions=[9, 9, 2, 7, 2, 1], global_batch_size=2, max_tokens_per_gpu=20
    )
    assert [sorted(flat([step])) for step in steps] == [[0, 1, 2, 4], [3, 5]]
    assert [step.executions for step in steps] == [2, 2]


def test_a_sample_without_an_execution_is_one_of_its_own() -> None:
    (step,) = plan_microbatches([5] * 4, ParallelLayout(), executions=[None, 3, None, 3], max_tokens_per_gpu=20)
    assert step.executions == 3


def test_fewest_micro_batches_that_fit() -> None:
    (step,) = plan_microbatches([6, 4, 5, 5], ParallelLayout(), max_tokens_per_gpu=10)
    assert step.micro_batches == [[[0, 1], [2, 3]]]


def test_a_rank_begins_with_its_dearest_micro_batch() -> None:
    (step,) = plan_microbatches([1, 9, 5], ParallelLayout(), max_tokens_per_gpu=9)
    assert step.micro_batches == [[[1], [0, 2]]]


def test_flops_weigh_long_samples_more() -> None:
    lengths = [100, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10]

    def alone(cost: Any) -> bool:
        (step,) = plan_microbatches(lengths, ParallelLayout(dp=2), max_tokens_per_gpu=300, cost=cost)
        return [0] in shares(step)

    assert alone(None)
    lengths.extend([10] * 5)
    assert not alone(None)
    assert alone(transformer_flops(parameters=1, layers=1, hidden_size=1000))


def test_flops_of_a_forward_pass() -> None:
    cost = transformer_flops(parameters=1000, layers=2, hidden_size=8)
    # by hand: 2 x 1000 x 10; 2 layers x (key + value) x 2 flops x 8 x 10 tokens x 5 seen tokens on average
    assert cost(10) == 20_000 + 2 * 2 * 2 * 8 * 10 * 5


def test_a_full_batch_is_filled_by_best_fit_and_split_to_the_count() -> None:
    # 3 x 7 + 3 x 3 = 30 fills 3 micro-batches of 10 exactly; 4 ranks want one more
    (step,) = plan_microbatches([7, 3, 7, 3, 7, 3], ParallelLayout(dp=3), max_tokens_per_gpu=10)
    assert step.costs == [10, 10, 10]
    (step,) = plan_microbatches([7, 3, 7, 3, 7, 3], ParallelLayout(dp=4), max_tokens_per_gpu=10)
    assert sorted(map(len, shares(step))) in ([1, 1, 1, 3], [1, 1, 2, 2])


def test_a_tight_cap_leaves_ranks_even() -> None:
    random = Random(4)
    lengths = [min(8192, int(random.lognormvariate(6.6, 0.8)) + 64) for _ in range(1024)]
    room = math.ceil(sum(lengths) / (8 * 16) * 1.001)
    (step,) = plan_microbatches(lengths, ParallelLayout(dp=8), max_tokens_per_gpu=max(room, max(lengths)))
    assert step.imbalance < 1.001


def test_one_dear_micro_batch_is_worth_several() -> None:
    # dealt by rank in turns, the first would have 100 + 1 and the second 20 + 1 or so
    lengths = [100, 100, 30, 30, 30, 30, 30, 30, 30, 30, 1, 1, 1, 1, 1, 1]
    (step,) = plan_microbatches(lengths, ParallelLayout(dp=4), micro_batch_size=1)
    assert step.imbalance < 1.1


def test_padding_for_context_parallelism_counts() -> None:
    # cp 2 cuts into 4 pieces: 5 tokens take 8
    layout = ParallelLayout(cp=2)
    (step,) = plan_microbatches([5, 5], layout, max_tokens_per_gpu=8)
    assert step.micro_batches == [[[0, 1]]]
    (step,) = plan_microbatches([5, 5], layout, max_tokens_per_gpu=7)
    assert step.micro_batches == [[[0], [1]]]


def test_alignments() -> None:
    layout = ParallelLayout(tp=2, cp=4, token_multiple=16)
    assert (layout.sequence_multiple, layout.total_multiple) == (8, 128)
    assert (ParallelLayout().sequence_multiple, ParallelLayout().total_multiple) == (1, 1)
    assert ParallelLayout(cp=3, tp=1).total_multiple == 6


# Errors say which number to change


def refused(kind: type[Exception], match: str, lengths: Sequence[int], layout: ParallelLayout, **numbers: Any) -> None:
    with pytest.raises(kind, match=match):
        plan_microbatches(lengths, layout, **numbers)


def test_a_sample_longer_than_the_cap() -> None:
    match = "sample 1 takes 12 .* max_tokens_per_gpu 5 x cp 2 .* raise max_tokens_per_gpu to at least 6, raise cp"
    refused(SampleTooLong, match, [4, 9, 10], ParallelLayout(cp=2), max_tokens_per_gpu=5)
    plan_microbatches([4, 9, 10], ParallelLayout(cp=2), max_tokens_per_gpu=6)


def test_the_cap_that_the_error_names_is_enough_with_padding() -> None:
    layout = ParallelLayout(cp=2, tp=2, token_multiple=16)
    refused(SampleTooLong, "at least 64", [65], layout, max_tokens_per_gpu=63)
    plan_microbatches([65], layout, max_tokens_per_gpu=64)


def test_fewer_samples_than_ranks() -> None:
    match = "step 0: 3 samples for at least 8 micro-batches = dp 4 x vpp_group 2: raise global_batch_size"
    refused(TooFewSamples, match, [1, 2, 3], ParallelLayout(dp=4, vpp_group=2), max_tokens_per_gpu=10)


def test_fewer_samples_than_the_next_count_of_micro_batches() -> None:
    match = "5 samples need 5 micro-batches of 10 tokens, .* by 4 = dp 2 x vpp_group 2: raise max_tokens_per_gpu"
    refused(TooFewSamples, match, [10] * 5, ParallelLayout(dp=2, vpp_group=2), max_tokens_per_gpu=10)
    refused(TooFewSamples, match, [9] * 5, ParallelLayout(dp=2, vpp_group=2), max_tokens_per_gpu=10)


def test_an_empty_batch() -> None:
    refused(TooFewSamples, "no samples", [], ParallelLayout(), max_tokens_per_gpu=10)


def test_fixed_micro_batches_that_do_not_come_out_even() -> None:
    match = "step 0: its 6 samples are no multiple of 4 = dp 2 x vpp_group 1 x micro_batch_size 2: change global_"
    refused(NotDivisible, match, [1] * 6, ParallelLayout(dp=2), micro_batch_size=2)


@pytest.mark.parametrize("numbers", [{}, {"micro_batch_size": 1, "max_tokens_per_gpu": 1}])
def test_one_way_to_form_micro_batches(numbers: dict[str, int]) -> None:
    refused(ValueError, "either micro_batch_size or max_tokens_per_gpu", [1], ParallelLayout(), **numbers)


@pytest.mark.parametrize("name", ["global_batch_size", "micro_batch_size", "max_tokens_per_gpu"])
def test_numbers_below_one(name: str) -> None:
    numbers = {name: 0} if name != "global_batch_size" else {name: 0, "micro_batch_size": 1}
    refused(ValueError, f"{name} is 0", [1], ParallelLayout(), **numbers)


def test_a_sample_without_tokens() -> None:
    refused(ValueError, "sample 1 has 0 tokens", [1, 0], ParallelLayout(), max_tokens_per_gpu=10)


def test_executions_of_another_length() -> None:
    refused(ValueError, "1 executions for 2", [1, 1], ParallelLayout(), executions=[0], max_tokens_per_gpu=10)


@pytest.mark.parametrize("lengths", [array("i", [3, 4]), Tensorlike(3, 4), (3, 4), iter([3, 4])])
def test_lengths_of_any_kind(lengths: Any) -> None:
    [step] = plan_microbatches(lengths, ParallelLayout(), max_tokens_per_gpu=8)
    assert step.micro_batches == [[[0, 1]]]


@pytest.mark.parametrize("lengths", [[3.5, 4], ["3", 4], [math.nan], [None]])
def test_lengths_that_are_no_ints(lengths: Any) -> None:
    refused(ValueError, "lengths must be ints, one for each sample", lengths, ParallelLayout(), max_tokens_per_gpu=10)


@pytest.mark.parametrize("value", [8.5, "8", math.inf])
@pytest.mark.parametrize("name", ["max_tokens_per_gpu", "micro_batch_size", "global_batch_size"])
def test_sizes_that_are_no_ints(name: str, value: Any) -> None:
    numbers: dict[str, Any] = {"max_tokens_per_gpu": 8} if name == "global_batch_size" else {}
    refused(ValueError, f"{name} is {value!r}, it must be an int", [1], ParallelLayout(), **numbers, **{name: value})


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "a", None])
def test_a_cost_that_is_none(value: Any) -> None:
    refused(ValueError, r"cost\(3\) is", [3], ParallelLayout(), max_tokens_per_gpu=10, cost=lambda _: value)


@pytest.mark.parametrize("name", ["dp", "cp", "tp", "vpp_group", "token_multiple"])
def test_a_layout_below_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        ParallelLayout(**{name: 0})


@pytest.mark.parametrize("value", ["2", None, 2.0])
def test_a_layout_that_is_no_int(value: Any) -> None:
    with pytest.raises(ValueError, match=r"dp is .*, it must be an int"):
        ParallelLayout(dp=value)


@pytest.mark.parametrize("name", ["parameters", "layers", "hidden_size"])
def test_flops_of_nothing(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        transformer_flops(**({"parameters": 1, "layers": 1, "hidden_size": 1} | {name: 0}))


def test_all_refusals_are_plan_errors() -> None:
    assert all(issubclass(kind, PlanError) for kind in (NotDivisible, SampleTooLong, TooFewSamples))
    assert issubclass(PlanError, ValueError)


# Where it runs


def test_needs_neither_torch_nor_numpy_nor_megatron() -> None:
    code = (
        "import sys; sys.modules.update(torch=None, numpy=None, megatron=None)\n"
        "from backends.megatron.plan import *\n"
        "print(plan_microbatches([2, 1, 1], ParallelLayout(dp=2), max_tokens_per_gpu=2)[0].costs)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[2.0, 2.0]"
