"""Small streams for tests: prompts without end, an engine that answers from a table, stages that do one thing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from backends.simulated import SimulatedEngine
from eventbus.group import Group
from eventbus.pipeline import Pipeline
from eventbus.prompts import Prompts
from eventbus.sample import Completion, Sample
from eventbus.stage import Drop


def endless(group_size: int = 2) -> Prompts:
    return Prompts((f"prompt {number}" for number in itertools.count()), group_size)


def some(count: int, group_size: int = 2) -> Prompts:
    return Prompts([f"prompt {number}" for number in range(count)], group_size)


def engine(delay: float | Callable[[Sample], float] = 0.0, length: int = 1) -> SimulatedEngine:
    """Answers `length` tokens; group g's tokens are all g."""

    def answer(sample: Sample) -> Completion:
        tokens = [sample.group_index or 0] * length
        return Completion(text="x" * length, tokens=tokens, log_probs=[-0.5] * length)

    return SimulatedEngine(answer, delay=delay)


def rewarded(table: Sequence[float] | Callable[[Sample], Any]) -> Callable[[Sample], None]:
    """A stage that sets the reward: from a function, or a table by `Sample.index` whose last value goes on."""

    def reward(sample: Sample) -> None:
        assert sample.index is not None
        sample.reward = table(sample) if callable(table) else table[min(sample.index, len(table) - 1)]

    return reward


def strict(bad: Iterable[int]) -> Callable[..., Drop | None]:
    """A filter that rejects the groups named."""
    rejected = set(bad)

    def chosen(group: Group, *, remaining: int, target: int) -> Drop | None:
        return Drop("bad") if group.index in rejected else None

    return chosen


class Log:
    """An observer that keeps every event."""

    def __init__(self, *kinds: str) -> None:
        from eventbus.events import EVENT_KINDS

        self.kinds = kinds or tuple(EVENT_KINDS)
        self.events: list[Any] = []

    def observe(self, event: Any) -> None:
        self.events.append(event)

    def of(self, kind: str) -> list[Any]:
        return [event for event in self.events if kind_of(event) == kind]


def kind_of(event: Any) -> str:
    return str(type(event).__struct_config__.tag)


async def batches(pipeline: Pipeline, stop: int = 1, start: int = 0, ahead: int = 0) -> list[Any]:
    async with pipeline:
        return [batch async for batch in pipeline.rollouts(start, stop, ahead)]


__all__ = ["Log", "batches", "endless", "engine", "kind_of", "rewarded", "some", "strict"]
