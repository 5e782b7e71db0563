"""The stream that the benchmarks measure: prompts without end, an engine that answers at once, five trivial stages."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import anyio

from eventbus.batching import BatchSpec
from eventbus.columns import LogProbs, Tokens
from eventbus.pipeline import Pipeline
from eventbus.prompts import Prompts
from eventbus.sample import Completion, Sample, SampleStatus
from middleware.filter import DynamicFilter
from middleware.generate import Generate
from middleware.judges import reward_nonzero_std

__all__ = ["FIVE_STAGES", "GROUPS", "GROUP_SIZE", "SAMPLES", "Engine", "generated", "pipeline", "whole"]

GROUPS, GROUP_SIZE = 512, 8
SAMPLES = GROUPS * GROUP_SIZE
"""In each rollout."""

_COMPLETION = Completion(text="4", tokens=[52], log_probs=[-0.1])


class Engine:
    """Answers at once. The first `park` requests wait until all of them are there, so that the pool has as many workers
    from then on."""

    def __init__(self, park: int = 0) -> None:
        self._park = park
        self._calls = 0
        self._all_there = anyio.Event()

    async def generate(self, sample: Sample, sampling: Mapping[str, Any]) -> Completion:
        if self._calls < self._park:
            self._calls += 1
            if self._calls == self._park:
                self._all_there.set()
            await self._all_there.wait()
        return _COMPLETION


def reward(sample: Sample) -> None:
    sample.reward = float((sample.index or 0) % 2)


def changes_nothing(sample: Sample) -> None:
    return None


def returns_it(sample: Sample) -> Sample:
    return sample


def also_changes_nothing(sample: Sample) -> None:
    return None


def also_returns_it(sample: Sample) -> Sample:
    return sample


FIVE_STAGES = (reward, changes_nothing, returns_it, also_changes_nothing, also_returns_it)


def pipeline(stages: Sequence[Any], groups: int = GROUPS) -> Pipeline:
    return Pipeline(Prompts(itertools.repeat("2+2="), GROUP_SIZE), stages, BatchSpec(groups))


def whole(park: int = 0) -> Pipeline:
    """Engine, five stages, filter, batch."""
    return pipeline([Generate(Engine(park)), *FIVE_STAGES, DynamicFilter(reward_nonzero_std)])


def generated(count: int = SAMPLES) -> list[Sample]:
    """Samples as they come out of an engine."""
    return [
        Sample(
            prompt="2+2=",
            group_index=index // GROUP_SIZE,
            index=index,
            rollout_id=index,
            tokens=Tokens([52]),
            response="4",
            response_length=1,
            rollout_log_probs=LogProbs([-0.1]),
            status=SampleStatus.COMPLETED,
        )
        for index in range(count)
    ]
