"""How long a batch takes, in virtual seconds, when response times have a long tail: what over-sampling buys.

64 groups of 8 are asked for, 32 make a batch. A sample takes a log-normal time, median 10 s, sigma 1; the same sample
takes the same time in each case. With the filter two groups in five pass, fewer than the batch needs, so that a strict
filter asks for a second round.
"""

from __future__ import annotations

from functools import partial
from random import Random
from statistics import median
from typing import Any

import anyio

from backends.simulated import SimulatedEngine
from benchmarks.measure import Row
from eventbus.batching import BatchSpec
from eventbus.group import Group
from eventbus.pipeline import Pipeline
from eventbus.prompts import Prompts
from eventbus.sample import Completion, Sample
from eventbus.testing import virtual_time
from middleware.filter import DynamicFilter, FilterDecision
from middleware.generate import Generate

__all__ = ["rows"]

TARGET, ASKED, GROUP_SIZE = 32, 64, 8
SEEDS = range(5)


def rows() -> list[Row]:
    fastest = partial(_seconds, [], TARGET, ASKED)
    cases = {
        "wait for all 64, then train": partial(_seconds, [], ASKED, ASKED),
        "fastest 32 of 64": fastest,
        "filter, strict": partial(_seconds, [DynamicFilter(_two_in_five)], TARGET, ASKED),
        "filter, fallback last": partial(_seconds, [DynamicFilter(_two_in_five, fallback="last")], TARGET, ASKED),
        "filter, fallback best, one round": partial(
            _seconds, [DynamicFilter(_two_in_five, fallback="best")], TARGET, ASKED, 1
        ),
    }
    measured = {name: [case(seed=seed) for seed in SEEDS] for name, case in cases.items()}
    least = measured["fastest 32 of 64"]
    return [
        Row(
            f"time to a batch, {name} / fastest 32",
            f"{median(own / best for own, best in zip(seconds, least, strict=True)):.2f}x",
            measured=f"{median(seconds):.1f} s (virtual)",
        )
        for name, seconds in measured.items()
    ]


def _seconds(stages: list[Any], groups: int, asked: int, rounds: int = 10, *, seed: int) -> float:
    def delay(sample: Sample) -> float:
        return 10 * Random(f"{seed} {sample.index}").lognormvariate(0, 1)

    engine = SimulatedEngine(lambda sample: Completion(text="4", tokens=[52], log_probs=[-0.1]), delay=delay)
    stream = Pipeline(
        Prompts(iter(lambda: "2+2=", ""), GROUP_SIZE),
        [Generate(engine), _reward, *stages],
        BatchSpec(groups, over_sampling=asked, max_rounds=rounds),
        stall_after=None,
    )
    return anyio.run(_first_batch, stream, **virtual_time("asyncio"))


async def _first_batch(stream: Pipeline) -> float:
    async with stream:
        batch = await anext(stream.rollouts())
    return batch.summary.seconds


def _reward(sample: Sample) -> None:
    sample.reward = Random(f"reward {sample.index}").random()


def _two_in_five(group: Group) -> FilterDecision:
    luck = Random(f"group {group.index}").random()
    return FilterDecision(keep=luck < 0.4, reason="unlucky", score=-luck)
