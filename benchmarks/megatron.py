"""What planning and packing a large batch costs, beside a list-based equivalent of what slime does; and how even the
work of the ranks comes out.

8,192 sequences with long-tailed lengths, in one step on 64 data-parallel ranks. The equivalent: samples are lists of
numbers; they go first-fit, as they come, into micro-batches of at most so many tokens; the largest micro-batches are
cut in two until their number is a multiple of the ranks; Karmarkar and Karp's method deals as many to each. To pack
one, each list becomes a tensor, which is padded and concatenated. All 64 ranks are packed, one after the other.

CPU seconds, on one thread. Both sides get the same samples and limit, and pad to the same multiple.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from random import Random
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from backends.embedded.model import one_thread
from backends.megatron.packing import pack, step_totals
from backends.megatron.plan import ParallelLayout, PlannedStep, plan_microbatches, transformer_flops
from benchmarks.measure import Row, cpu_seconds, interleaved
from eventbus.columns import LogProbs, LossMask, Tokens
from eventbus.sample import Sample

__all__ = ["rows"]

SEQUENCES = 8192
RANKS = 64
CAP = 16_384
MULTIPLE = 128
GROUP = 8
FLOPS = transformer_flops(parameters=7e9, layers=32, hidden_size=4096)
LAYOUT = ParallelLayout(dp=RANKS, token_multiple=MULTIPLE)


def rows(rounds: int = 3) -> list[Row]:
    with one_thread():
        return _rows(rounds)


def _rows(rounds: int) -> list[Row]:
    listed = _listed_samples()
    samples = [_sample(index, lists) for index, lists in enumerate(listed)]
    step, other = _plan(samples, None), _list_plan(listed, float)
    times = interleaved(
        {
            "plan": lambda: cpu_seconds(lambda: _plan(samples, None)),
            "list plan": lambda: cpu_seconds(lambda: _list_plan(listed, float)),
            "pack": lambda: cpu_seconds(lambda: _pack(samples, step)),
            "list pack": lambda: cpu_seconds(lambda: _list_pack(listed, other)),
        },
        rounds,
    )
    both = [plan + pack for plan, pack in zip(times["plan"], times["pack"], strict=True)]
    list_both = [plan + pack for plan, pack in zip(times["list plan"], times["list pack"], strict=True)]
    return [
        _row(f"plan and pack {SEQUENCES:,} sequences for {RANKS} ranks / with lists", both, list_both, 0.2),
        _row("of which planning", times["plan"], times["list plan"], 0.2),
        _row("of which checking and packing", times["pack"], times["list pack"], 0.2),
        _imbalance("tokens", samples, listed, None, float),
        _imbalance("FLOPs", samples, listed, FLOPS, FLOPS),
        Row("micro-batches per rank", f"{len(step.micro_batches[0])}", "", None, f"with lists {len(other[0])}"),
    ]


def _row(what: str, own: Sequence[float], peer: Sequence[float], at_most: float) -> Row:
    ratio = median(mine / other for mine, other in zip(own, peer, strict=True))
    measured = f"{median(own) * 1e3:.0f} ms against {median(peer) * 1e3:.0f} ms"
    return Row(what, f"{ratio:.3g}x", f"at most {at_most:g}x", ratio <= at_most, measured)


def _imbalance(
    unit: str,
    samples: Sequence[Sample],
    listed: Sequence[Lists],
    cost: Callable[[int], float] | None,
    peer_cost: Callable[[int], float],
) -> Row:
    """The busiest rank over the mean rank, beyond 1."""
    own = _plan(samples, cost).imbalance - 1
    shares = [
        sum(peer_cost(len(listed[place].tokens)) for part in rank for place in part)
        for rank in _list_plan(listed, peer_cost)
    ]
    peer = max(shares) * len(shares) / sum(shares) - 1
    measured = f"busiest rank {own:.4%} above the mean, with lists {peer:.4%}"
    return Row(f"imbalance in {unit} / with lists", f"{own / peer:.3g}x", "at most 1x", own <= peer, measured)


# Ours


def _sample(index: int, lists: Lists) -> Sample:
    return Sample(
        index=index,
        rollout_id=index,
        tokens=Tokens(lists.tokens),
        response_length=len(lists.loss_mask),
        loss_mask=LossMask(lists.loss_mask),
        rollout_log_probs=LogProbs(lists.log_probs),
        train_metadata={"advantage": lists.advantage},
    )


def _plan(samples: Sequence[Sample], cost: Callable[[int], float] | None) -> PlannedStep:
    (step,) = plan_microbatches(
        [len(sample.tokens) for sample in samples],
        LAYOUT,
        executions=[sample.rollout_id for sample in samples],
        global_batch_size=len(samples),
        max_tokens_per_gpu=CAP,
        cost=cost,
    )
    return step


def _pack(samples: Sequence[Sample], step: PlannedStep) -> None:
    totals = step_totals(samples)
    for parts in step.micro_batches:
        for part in parts:
            pack([samples[place] for place in part], LAYOUT, totals)


# With lists


class Lists(NamedTuple):
    tokens: list[int]
    loss_mask: list[int]
    log_probs: list[float]
    advantage: float


def _listed_samples() -> list[Lists]:
    random = Random(0)
    vocabulary = list(range(32_000))
    log_probs = [-random.random() for _ in range(4096)]
    listed = []
    for index in range(SEQUENCES):
        if index % GROUP == 0:
            prompt = random.choices(vocabulary, k=random.randrange(32, 256))
        response = min(8192 - len(prompt), int(random.lognormvariate(6.5, 0.9)) + 1)
        tokens = prompt + random.choices(vocabulary, k=response)
        listed.append(Lists(tokens, [1] * response, random.choices(log_probs, k=response), random.gauss(0, 1)))
    return listed


def _list_plan(listed: Sequence[Lists], cost: Callable[[int], float]) -> list[list[list[int]]]:
    """Per rank, its micro-batches."""
    parts: list[list[int]] = []
    loads: list[int] = []
    for place, sample in enumerate(listed):
        length = len(sample.tokens)
        for number, load in enumerate(loads):
            if load + length <= CAP:
                parts[number].append(place)
                loads[number] += length
                break
        else:
            parts.append([place])
            loads.append(length)
    while len(parts) % RANKS:
        largest = max((part for part in parts if len(part) > 1), key=lambda part: _cost(part, listed, cost))
        parts.remove(largest)
        parts += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return _list_deal(parts, [_cost(part, listed, cost) for part in parts])


def _cost(part: Sequence[int], listed: Sequence[Lists], cost: Callable[[int], float]) -> float:
    return sum(cost(len(listed[place].tokens)) for place in part)


def _list_deal(parts: Sequence[list[int]], costs: Sequence[float]) -> list[list[list[int]]]:
    order = sorted(range(len(parts)), key=costs.__getitem__)
    heap = []
    for number, start in enumerate(range(0, len(order), RANKS)):
        state = sorted([(costs[place], [place]) for place in order[start : start + RANKS]], reverse=True)
        heap.append((state[-1][0] - state[0][0], number, state))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a + b, left + right) for (a, left), (b, right) in zip(first, reversed(second), strict=True)]
        merged.sort(reverse=True)
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    return [[parts[place] for place in places] for _, places in heap[0][2]]


def _list_pack(listed: Sequence[Lists], plan: Sequence[Sequence[Sequence[int]]]) -> None:
    for rank in plan:
        # what a rank is sent, and loads
        mine = [listed[place] for part in rank for place in part]
        loaded = [
            (
                torch.tensor(sample.tokens, dtype=torch.long),
                torch.tensor(sample.loss_mask, dtype=torch.int),
                torch.tensor(sample.log_probs, dtype=torch.float32),
                torch.full((len(sample.loss_mask),), sample.advantage),
            )
            for sample in mine
        ]
        for start, end in pairwise(accumulate((len(part) for part in rank), initial=0)):
            _list_batch(loaded[start:end])


def _list_batch(loaded: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> None:
    tokens = torch.cat([each for each, *_ in loaded])
    lengths = [len(each) for each, *_ in loaded]
    pad = partial(torch.nn.functional.pad, value=0)
    tail = -len(tokens) % MULTIPLE
    pad(tokens, (0, tail)).unsqueeze(0)
    torch.tensor(list(accumulate([*lengths, tail], initial=0)), dtype=torch.int)
    masks = [pad(mask, (len(each) - len(mask) - 1, 1)) for each, mask, *_ in loaded]
    pad(torch.cat(masks), (0, tail)).unsqueeze(0)
    torch.cat([log_probs for *_, log_probs, _ in loaded])
    torch.cat([advantages for *_, advantages in loaded])
