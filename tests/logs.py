"""Logs for tests: small pipelines that are recorded, and what is in a log, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eventbus.batching import BatchSpec
from eventbus.events import Event
from eventbus.log import LogReader, LogWriter
from eventbus.log.file import LogFile
from eventbus.pipeline import Pipeline
from eventbus.sample import Completion, Sample, SampleStatus
from middleware.filter import DynamicFilter
from middleware.generate import Generate
from middleware.judges import reward_nonzero_std
from tests.streams import batches, endless, engine, rewarded

Entry = tuple[Event, list[list[Sample]]]


class Witness:
    """An observer that keeps every event, with copies of the samples that it shows."""

    def __init__(self) -> None:
        from eventbus.events import EVENT_KINDS

        self.kinds = frozenset(EVENT_KINDS)
        self.entries: list[Entry] = []

    @property
    def events(self) -> list[Event]:
        return [event for event, _ in self.entries]

    def observe(self, event: Event) -> None:
        self.entries.append((event, []))

    def observe_samples(self, event: Event, samples: Sequence[Sequence[Sample]]) -> None:
        self.entries.append((event, [[sample.copy() for sample in execution] for execution in samples]))


def small_pipeline(*observers: Any, stages: Sequence[Any] = (), length: int = 5) -> Pipeline:
    """Two groups of two a rollout; the filter drops every third group."""

    def reward(sample: Sample) -> int:
        assert sample.index is not None
        assert sample.group_index is not None
        return sample.index % 2 if sample.group_index % 3 else 0

    return Pipeline(
        endless(2),
        [Generate(engine(length=length)), rewarded(reward), *stages, DynamicFilter(reward_nonzero_std)],
        BatchSpec(groups=2, max_rounds=50),
        observers=observers,
        stall_after=None,
    )


async def witnessed(rollouts: int = 2) -> list[Entry]:
    """What a recorder gets to see of a small run."""
    witness = Witness()
    pipeline = Pipeline(
        endless(2),
        [Generate(engine(length=5)), rewarded([0, 1] * 10), DynamicFilter(reward_nonzero_std)],
        BatchSpec(groups=2),
        observers=[witness],
        stall_after=None,
    )
    await batches(pipeline, rollouts)
    return witness.entries


def written(
    path: Path, entries: Sequence[Entry], flush: Callable[[int], bool] = lambda place: False, **options: Any
) -> list[int]:
    """Write a log. The file's size after each flush, one after each entry that `flush` chooses."""
    sizes = []
    with LogWriter(path, overwrite=True, **options) as log:
        for place, (event, samples) in enumerate(entries):
            log.write(event, samples or None)
            if flush(place):
                log.flush()
                sizes.append(path.stat().st_size)
    return sizes


def unclosed(path: Path) -> bytes:
    """The bytes of a log as they were before it was closed."""
    file = LogFile(path)
    end = next(position for position, name, _ in file.metadata if name == "rounds")
    file.close()
    return path.read_bytes()[:end]


def content(log: LogReader) -> list[Entry]:
    """Every event with its samples, their columns read."""
    return [
        (event, [[sample.copy() for sample in execution] for execution in log.samples(event)]) for event in log.events()
    ]


__all__ = [
    "Completion",
    "Entry",
    "SampleStatus",
    "Witness",
    "content",
    "small_pipeline",
    "unclosed",
    "witnessed",
    "written",
]
