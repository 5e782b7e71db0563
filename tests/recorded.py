"""A log in memory, for tests of what reads logs: events and samples as a file gives them back, through the wire."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import anyio

from eventbus.codecs import decoder, encoder
from eventbus.events import EVENT_KINDS
from eventbus.log import LogHeader, Round, StageNote
from eventbus.pipeline import Pipeline
from eventbus.sample import Sample
from eventbus.testing import virtual_time
from eventbus.wire import SCHEMA_VERSION, decode, encode

_samples = decoder(list[list[Sample]])


class MemoryLog:
    """An observer that keeps all, and what `LogReader` offers to a replay."""

    kinds = tuple(EVENT_KINDS)

    def __init__(self, config: str | None = None) -> None:
        self.config = config
        self.header = LogHeader("test", SCHEMA_VERSION, config=config)
        self.stored: list[bytes] = []
        self.heavy: dict[int, bytes] = {}
        self.reads = 0
        """Times that samples were asked for."""

    def attach(self, pipeline: Pipeline) -> None:
        notes = [StageNote(stage.name, stage.level, stage.external, stage.on_error) for stage in pipeline.stages]
        self.header = LogHeader("test", SCHEMA_VERSION, config=self.config, stages=notes)

    def observe(self, event: Any) -> None:
        self.stored.append(encode(event))

    def observe_samples(self, event: Any, samples: Sequence[Sequence[Sample]]) -> None:
        self.observe(event)
        self.heavy[event.seq] = encoder.encode(samples)

    @property
    def rounds(self) -> list[Round]:
        rounds: dict[tuple[int, bool], Round] = {}
        for event in self.events():
            key = event.rollout_id, event.evaluation
            part = rounds.setdefault(key, Round(*key, event.seq, event.seq, event.time_ns, event.time_ns))
            part.last_seq, part.last_ns = event.seq, event.time_ns
            part.finished = part.finished or event.kind == "rollout_finished"
        return list(rounds.values())

    def events(
        self,
        kinds: Collection[str] | str | None = None,
        *,
        rollout: int | None = None,
        evaluation: bool | None = None,
        **others: Any,
    ) -> Iterator[Any]:
        for data in self.stored:
            event: Any = decode(data)
            if (
                (kinds is None or event.kind in kinds)
                and (rollout is None or event.rollout_id == rollout)
                and (evaluation is None or event.evaluation == evaluation)
                and all(getattr(event, f"group_{k}" if k == "group" else k, None) == v for k, v in others.items())
            ):
                yield event

    def samples(self, event: Any) -> list[list[Sample]]:
        self.reads += 1
        return _samples.decode(self.heavy[event.seq]) if event.seq in self.heavy else []

    def cut(self, stop: int) -> MemoryLog:
        """The log as a kill after so many events leaves it."""
        short = MemoryLog(self.config)
        short.header = self.header
        short.stored = self.stored[:stop]
        short.heavy = self.heavy
        return short


def record(pipeline: Pipeline, stop: int = 1, start: int = 0, backend: str = "asyncio", **options: Any) -> list[Any]:
    """Run a pipeline in virtual time."""

    async def main() -> list[Any]:
        async with pipeline:
            return [batch async for batch in pipeline.rollouts(start, stop, **options)]

    return anyio.run(main, **virtual_time(backend))
