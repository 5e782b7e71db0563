"""`plan_microbatches`: which rank trains which samples, and in which micro-batches.

What a plan keeps true, for every step of the optimizer in it:

- each sample of the batch lies in exactly one micro-batch of one rank of one step;
- the samples of one execution lie in one step, so that the step can be averaged over executions;
- every rank has the same number of micro-batches, a multiple of what virtual pipeline stages ask for: ranks that
  disagree wait for each other for ever;
- no micro-batch holds more tokens, padding included, than the GPUs of its rank may;
- the same arguments give the same plan, in any process: nothing here is random, and ties go to the lower position.

Samples are spread the dearest first, each to the part that is cheapest so far; where ranks then differ by more than a
thousandth, by the differencing method of Karmarkar and Karp (1982): of partial solutions the two least even ones are
merged, largest part to smallest part, so the merged one is never less even than the worse of the two. Either way a plan
is bounded. Where the limit on tokens leaves the choice, samples are spread over ranks and, within a rank, over
micro-batches: costs of ranks lie no further apart than 0 and the dearest sample. Where it does not, micro-batches are
filled first and spread over ranks: then costs of ranks lie no further apart than those of micro-batches.

Needs neither torch nor megatron-core.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain, count, pairwise
from operator import index, itemgetter
from typing import SupportsIndex, TypeAlias

import msgspec

__all__ = [
    "NotDivisible",
    "ParallelLayout",
    "PlanError",
    "PlannedStep",
    "SampleTooLong",
    "TooFewSamples",
    "check_sizes",
    "plan_microbatches",
    "transformer_flops",
]


class PlanError(ValueError):
    """There is no plan for this batch with these numbers; the message says which to change."""


class SampleTooLong(PlanError):
    """A sample alone exceeds `max_tokens_per_gpu`."""


class TooFewSamples(PlanError):
    """A step has fewer samples than micro-batches that the layout asks for."""


class NotDivisible(PlanError):
    """With a fixed `micro_batch_size`: the samples of a step cannot be dealt out evenly."""


class ParallelLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many processes share the work, as megatron-core counts them, and what each wants its tokens padded to.

    :raises ValueError: a number is no int, or less than 1.
    """

    dp: int = 1
    """Data-parallel ranks, context parallelism not counted in."""
    cp: int = 1
    """Ranks that share one sequence: each holds two of the 2 * cp pieces that it is cut into."""
    tp: int = 1
    """Ranks that share one layer; with sequence parallelism they also share its tokens."""
    vpp_group: int = 1
    """Counts of micro-batches are multiples of this: 1, or with virtual pipeline stages megatron-core's
    `microbatch_group_size_per_vp_stage`, which is the pipeline's size unless set."""
    token_multiple: int = 1
    """Tokens of one GPU come in multiples of this: 16 for FP8, 32 for MXFP8, 1 where it does not matter."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            _check_size("ParallelLayout", name, getattr(self, name))

    @property
    def sequence_multiple(self) -> int:
        """Each sequence is padded to a multiple of this, so that context parallelism can cut it."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def total_multiple(self) -> int:
        """The tokens of a micro-batch, over all its context-parallel ranks, are padded to a multiple of this."""
        return math.lcm(self.sequence_multiple, self.cp * self.tp * self.token_multiple)


class PlannedStep(msgspec.Struct, frozen=True):
    """One step of the optimizer."""

    micro_batches: list[list[list[int]]]
    """Per rank, per micro-batch: positions of samples in the batch, ascending. A rank's micro-batches come in order of
    cost, the dearest first, so that those that run side by side cost about the same."""
    costs: list[float]
    """Per rank, in the unit of the cost that was balanced."""
    executions: int
    """In the whole step, over all ranks."""

    @property
    def imbalance(self) -> float:
        """Cost of the busiest rank over that of the mean rank: 1 when all have the same to do."""
        return max(self.costs) * len(self.costs) / sum(self.costs)


def plan_microbatches(
    lengths: Sequence[int],
    layout: ParallelLayout,
    *,
    executions: Sequence[Hashable] | None = None,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    max_tokens_per_gpu: int | None = None,
    cost: Callable[[int], float] | None = None,
) -> list[PlannedStep]:
    """Cut a batch into steps, steps into ranks, ranks into micro-batches.

        steps = plan_microbatches(
            [len(sample.tokens) for sample in batch.samples],
            ParallelLayout(dp=8, cp=2),
            executions=[sample.rollout_id for sample in batch.samples],
            max_tokens_per_gpu=16384,
        )
        mine = [[batch.samples[i] for i in part] for part in steps[0].micro_batches[my_dp_rank]]

    Give one of `micro_batch_size` and `max_tokens_per_gpu`. With the latter a step has as few micro-batches as fit.

    :param lengths: tokens of each sample.
    :param executions: the execution that each sample belongs to; None, for one sample or for all: it is one of its own.
        They go into the steps in the order in which they first appear.
    :param global_batch_size: executions per step; None: the whole batch in one step. Where it does not divide their
        number the steps differ by one execution and come as near to it as they can: nothing is left out.
    :param micro_batch_size: samples in each micro-batch. Samples of about the same length go together, which keeps the
        padding of a padded layout small.
    :param max_tokens_per_gpu: a micro-batch holds at most this times `layout.cp` tokens, with what they are padded by.
    :param cost: the work that a sample of so many tokens is, what ranks are balanced by; None: its tokens.
        `transformer_flops` makes one.
    :raises SampleTooLong: a sample exceeds `max_tokens_per_gpu` alone.
    :raises TooFewSamples: a step has no sample for some micro-batch, or the batch is empty.
    :raises NotDivisible: the samples of a step are no multiple of what `micro_batch_size` needs.
    :raises ValueError: an argument is out of range, or `executions` has another length than `lengths`.
    """
    check_sizes("plan_microbatches", global_batch_size, micro_batch_size, max_tokens_per_gpu)
    lengths = _checked(lengths, executions)
    sizes = [_aligned(length, layout.sequence_multiple) for length in lengths]
    costs: Sequence[float] = sizes if cost is None else [_cost(cost, length) for length in lengths]
    steps = _steps(range(len(lengths)) if executions is None else executions, global_batch_size)
    plan = []
    for number, (samples, executed) in enumerate(steps):
        if micro_batch_size is not None:
            ranks = _fixed(number, samples, costs, layout, micro_batch_size)
        elif max_tokens_per_gpu is not None:
            ranks = _dynamic(number, samples, sizes, costs, layout, max_tokens_per_gpu)
        plan.append(_step(ranks, costs, executed))
    return plan


def transformer_flops(*, parameters: float, layers: int, hidden_size: int) -> Callable[[int], float]:
    """A cost for `plan_microbatches`: floating-point operations of a forward pass over one sequence of n tokens,

        2 * parameters * n + 2 * layers * hidden_size * n^2

    (Kaplan et al., arXiv 2001.08361, section 2.1: 2 per parameter and token; and in each layer, for each token, a
    product with the key and one with the value of the n / 2 tokens that a causal mask leaves it on average). A backward
    pass costs twice that, so the proportions are those of training.

    :param parameters: those that a token meets: without embeddings, and of a mixture only the experts chosen for it.
    :param hidden_size: heads times the size of a head.
    :raises ValueError: one of them is not more than 0.
    """
    for name, value in {"parameters": parameters, "layers": layers, "hidden_size": hidden_size}.items():
        if not value > 0:
            raise ValueError(f"transformer_flops: {name} is {value}, it must be more than 0")
    return lambda length: 2.0 * parameters * length + 2.0 * layers * hidden_size * length * length


def check_sizes(
    where: str, global_batch_size: int | None, micro_batch_size: int | None, max_tokens_per_gpu: int | None
) -> None:
    """What `plan_microbatches` asks of them.

    :raises ValueError: one is no int of at least 1, or it is not one of the last two that is given.
    """
    if (micro_batch_size is None) == (max_tokens_per_gpu is None):
        raise ValueError(f"{where}: give either micro_batch_size or max_tokens_per_gpu, one of them")
    sizes = {
        "global_batch_size": global_batch_size,
        "micro_batch_size": micro_batch_size,
        "max_tokens_per_gpu": max_tokens_per_gpu,
    }
    for name, value in sizes.items():
        if value is not None:
            _check_size(where, name, value)


def _check_size(where: str, name: str, value: object) -> None:
    if not isinstance(value, int):
        raise ValueError(f"{where}: {name} is {value!r}, it must be an int")
    if value < 1:
        raise ValueError(f"{where}: {name} is {value}, it must be at least 1")


def _checked(lengths: Iterable[SupportsIndex], executions: Sequence[Hashable] | None) -> list[int]:
    where = "plan_microbatches"
    try:
        numbers = list(map(index, lengths))
    except TypeError as error:
        raise ValueError(f"{where}: lengths must be ints, one for each sample: {error}") from error
    if not numbers:
        raise TooFewSamples(f"{where}: the batch has no samples")
    if (shortest := min(numbers)) < 1:
        raise ValueError(f"{where}: sample {numbers.index(shortest)} has {shortest} tokens, it needs at least one")
    if executions is not None and len(executions) != len(numbers):
        raise ValueError(f"{where}: {len(executions)} executions for {len(numbers)} lengths; give one per sample")
    return numbers


def _cost(cost: Callable[[int], float], length: int) -> float:
    value = cost(length)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"plan_microbatches: cost({length}) is {value!r}, it must be a number more than 0")
    return number


def _steps(executions: Iterable[Hashable], global_batch_size: int | None) -> list[tuple[list[int], int]]:
    """Samples and number of executions of each step."""
    members: dict[Hashable, list[int]] = {}
    for position, execution in enumerate(executions):
        members.setdefault((None, position) if execution is None else execution, []).append(position)
    groups = list(members.values())
    total = len(groups)
    # the number of steps that comes nearest, a half rounded up
    steps = max(1, (2 * total + global_batch_size) // (2 * global_batch_size)) if global_batch_size else 1
    bounds = [total * step // steps for step in range(steps + 1)]
    return [(sorted(chain.from_iterable(groups[start:end])), end - start) for start, end in pairwise(bounds)]


def _step(ranks: Sequence[Sequence[Sequence[int]]], costs: Sequence[float], executions: int) -> PlannedStep:
    def cost(part: Iterable[int]) -> float:
        return sum(map(costs.__getitem__, part))

    ordered = [sorted(map(sorted, parts), key=lambda part: (-cost(part), part)) for parts in ranks]
    return PlannedStep(ordered, [float(sum(map(cost, parts))) for parts in ordered], executions)


# The micro-batches of one step, per rank


def _fixed(
    number: int, samples: Sequence[int], costs: Sequence[float], layout: ParallelLayout, size: int
) -> list[list[list[int]]]:
    unit = layout.dp * layout.vpp_group * size
    if len(samples) % unit:
        raise NotDivisible(
            f"step {number}: its {len(samples)} samples are no multiple of {unit} = dp {layout.dp} x vpp_group "
            f"{layout.vpp_group} x micro_batch_size {size}: change global_batch_size or micro_batch_size, or give "
            "max_tokens_per_gpu instead"
        )
    ranked = sorted(samples, key=costs.__getitem__)
    return _dealt([ranked[start : start + size] for start in range(0, len(ranked), size)], costs, layout.dp)


def _dynamic(
    number: int,
    samples: Sequence[int],
    sizes: Sequence[int],
    costs: Sequence[float],
    layout: ParallelLayout,
    max_tokens_per_gpu: int,
) -> list[list[list[int]]]:
    # A micro-batch is padded to `total_multiple` at its end: what lies below the last multiple always has room for it.
    room = max_tokens_per_gpu * layout.cp // layout.total_multiple * layout.total_multiple
    longest = max(samples, key=sizes.__getitem__)
    if sizes[longest] > room:
        needed = _aligned(sizes[longest], layout.total_multiple) // layout.cp
        raise SampleTooLong(
            f"sample {longest} takes {sizes[longest]} tokens with its padding, but max_tokens_per_gpu "
            f"{max_tokens_per_gpu} x cp {layout.cp} leaves room for {room}: raise max_tokens_per_gpu to at least "
            f"{needed}, raise cp, or drop longer samples before they reach the trainer"
        )
    unit = layout.dp * layout.vpp_group

    def rounded(parts: int) -> int:
        wanted = _aligned(parts, unit)
        if wanted <= len(samples):
            return wanted
        if wanted == unit:
            raise TooFewSamples(
                f"step {number}: {len(samples)} samples for at least {unit} micro-batches = dp {layout.dp} x vpp_group "
                f"{layout.vpp_group}: raise global_batch_size or the number of groups in a batch, or lower dp"
            )
        raise TooFewSamples(
            f"step {number}: {len(samples)} samples need {parts} micro-batches of {room} tokens, and counts go up by "
            f"{unit} = dp {layout.dp} x vpp_group {layout.vpp_group}: raise max_tokens_per_gpu or global_batch_size, "
            "or lower dp"
        )

    fewest = rounded(-(-sum(map(sizes.__getitem__, samples)) // room))
    if balanced := _balanced(samples, sizes, costs, layout.dp, fewest // layout.dp, room):
        return balanced
    filled = _best_fit(samples, sizes, room)
    wanted = rounded(len(filled))
    if wanted > fewest and (balanced := _balanced(samples, sizes, costs, layout.dp, wanted // layout.dp, room)):
        return balanced
    return _dealt(_halved(filled, costs, wanted), costs, layout.dp)


def _balanced(
    samples: Sequence[int], sizes: Sequence[int], costs: Sequence[float], ranks: int, parts: int, room: int
) -> list[list[list[int]]] | None:
    """Samples over ranks, then over the micro-batches of each. None where one has more tokens than room, or none."""

    def fits(found: State) -> bool:
        return all(part and sum(map(sizes.__getitem__, part)) <= room for _, part in found)

    balanced = []
    for _, share in _spread(samples, costs, ranks, _is_even):
        if len(share) < parts:
            return None
        found = _spread(share, costs, parts, fits)
        if not fits(found) and costs is not sizes:
            found = _spread(share, sizes, parts, fits)
        if not fits(found):
            return None
        balanced.append([part for _, part in found])
    return balanced


def _best_fit(samples: Sequence[int], sizes: Sequence[int], room: int) -> list[list[int]]:
    """Each sample, the longest first, into the fullest part that has room for it: at most 11/9 of the fewest possible
    parts, and one (Johnson et al., 1974)."""
    parts: list[list[int]] = []
    left: list[tuple[int, int]] = []  # room and number of each part, ascending
    for sample in sorted(samples, key=sizes.__getitem__, reverse=True):
        size = sizes[sample]
        place = bisect_left(left, (size, -1))
        if place < len(left):
            free, part = left.pop(place)
        else:
            free, part = room, len(parts)
            parts.append([])
        parts[part].append(sample)
        insort(left, (free - size, part))
    return parts


def _halved(parts: Iterable[list[int]], costs: Sequence[float], wanted: int) -> list[list[int]]:
    """Split the dearest part of several samples in two until there are as many as wanted."""
    numbers = count()
    done: list[list[int]] = []
    heap: list[tuple[float, int, list[int]]] = []

    def add(part: list[int]) -> None:
        if len(part) > 1:
            heappush(heap, (-sum(map(costs.__getitem__, part)), next(numbers), part))
        else:
            done.append(part)

    for part in parts:
        add(part)
    while len(heap) + len(done) < wanted:
        for _, half in _differencing([[(costs[sample], [sample])] for sample in heappop(heap)[2]], 2):
            add(half)
    return [part for _, _, part in heap] + done


def _dealt(parts: Sequence[list[int]], costs: Sequence[float], ranks: int) -> list[list[list[int]]]:
    """Micro-batches over ranks, as many to each."""
    totals = [sum(map(costs.__getitem__, part)) for part in parts]
    ranked = sorted(range(len(parts)), key=lambda place: (-totals[place], parts[place]))
    # Each state holds one micro-batch for every rank, so whatever is merged holds as many for each.
    states = [
        [(totals[place], [place]) for place in ranked[start : start + ranks]] for start in range(0, len(ranked), ranks)
    ]
    hands = [places for _, places in _differencing(states, ranks)]
    _trade(hands, totals)
    return [[parts[place] for place in places] for places in hands]


def _trade(hands: list[list[int]], totals: Sequence[float]) -> None:
    """Exchange one part of the dearest hand for one of another as long as that brings the two closer together.

    Differencing gives every rank one of the dearest micro-batches, one of the next dearest, and so on; this undoes it
    where one dear micro-batch is worth several.
    """
    loads = [sum(map(totals.__getitem__, hand)) for hand in hands]
    # Each exchange leaves the dearest hand cheaper; the limit is for the sake of rounding errors.
    for _ in range(4 * sum(map(len, hands))):
        dearest = max(range(len(hands)), key=loads.__getitem__)
        for other in sorted(range(len(hands)), key=loads.__getitem__):
            pair = _exchange(hands[dearest], hands[other], totals, loads[dearest] - loads[other])
            if pair is not None:
                given, taken = hands[dearest][pair[0]], hands[other][pair[1]]
                hands[dearest][pair[0]], hands[other][pair[1]] = taken, given
                loads[dearest] += totals[taken] - totals[given]
                loads[other] += totals[given] - totals[taken]
                break
        else:
            return


def _exchange(dear: Sequence[int], cheap: Sequence[int], totals: Sequence[float], gap: float) -> tuple[int, int] | None:
    """Positions in both hands whose exchange moves about half the gap; None where none makes it smaller."""
    ladder = sorted((totals[place], position) for position, place in enumerate(cheap))
    best, closer = None, 1e-6 * gap
    for position, place in enumerate(dear):
        step = bisect_left(ladder, (totals[place] - gap / 2, -1))
        for total, other in ladder[max(step - 1, 0) : step + 1]:
            moved = totals[place] - total
            if min(moved, gap - moved) > closer:
                best, closer = (position, other), min(moved, gap - moved)
    return best


# Items to parts

State: TypeAlias = list[tuple[float, list[int]]]
"""Cost and items of each part, the dearest first."""


def _spread(samples: Sequence[int], costs: Sequence[float], parts: int, good: Callable[[State], bool]) -> State:
    """Many samples come out even in the simplest way; where they do not, by differencing, which takes its time."""
    found = _greedy(samples, costs, parts)
    return found if good(found) else _differencing([[(costs[sample], [sample])] for sample in samples], parts)


def _is_even(found: State) -> bool:
    return (found[0][0] - found[-1][0]) * len(found) <= 1e-3 * sum(cost for cost, _ in found)


def _greedy(samples: Sequence[int], costs: Sequence[float], parts: int) -> State:
    """Each sample, the dearest first, into the part that is cheapest so far."""
    heap: list[tuple[float, int]] = [(0, part) for part in range(parts)]
    items: list[list[int]] = [[] for _ in range(parts)]
    for sample in sorted(samples, key=costs.__getitem__, reverse=True):
        cost, part = heap[0]
        items[part].append(sample)
        heapreplace(heap, (cost + costs[sample], part))
    return [(cost, items[part]) for cost, part in sorted(heap, reverse=True)]


def _differencing(states: Sequence[State], parts: int) -> State:
    """Merge states, always the two that are least even, until one is left.

    A state lists no part that is still empty, so merging small ones costs little: about n log n list items in all for
    n items.
    """
    numbers = count()  # decides between equals, so that states are never compared

    def entry(state: State) -> tuple[float, int, State]:
        cheapest = state[-1][0] if len(state) == parts else 0
        return cheapest - state[0][0], next(numbers), state

    heap = [entry(state) for state in states]
    heapify(heap)
    while len(heap) > 1:
        first = heappop(heap)[2]
        heapreplace(heap, entry(_merged(first, heap[0][2], parts)))
    return heap[0][2]


def _merged(first: State, second: State, parts: int) -> State:
    """Dearest part to cheapest part. Empty ones count as cheapest, so only what exceeds `parts` has to be joined."""
    joined = len(first) + len(second) - parts
    if joined <= 0:
        merged = first + second
    else:
        lone, other_lone = len(first) - joined, len(second) - joined
        merged = first[:lone] + second[:other_lone]
        merged += [
            (cost + other, items + others)
            for (cost, items), (other, others) in zip(first[lone:], reversed(second[other_lone:]), strict=True)
        ]
    merged.sort(key=itemgetter(0), reverse=True)
    return merged


def _aligned(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
