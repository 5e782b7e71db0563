"""What a log says of one round, arranged by group and execution: what every replay walks along.

    RoundRecord         one rollout or evaluation
      GroupRecord       one life of a group, from `group_submitted` to `group_ended`
        ExecutionRecord one generation of the prompt
          Attempt       from its start to its end, or to the failure after which it was resubmitted
            Trace       the stages of one sample of it, in order

Of an execution that was resubmitted the last attempt counts; a fanned-out child has a trace of its own.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Final, Protocol

import msgspec

from eventbus.batching import BatchSpec
from eventbus.columns import Column, Tokens
from eventbus.events import (
    AttemptEnded,
    BatchAssembled,
    ColumnMark,
    EventHead,
    GroupCompleted,
    GroupEnded,
    GroupJudged,
    GroupSubmitted,
    LightSample,
    RolloutFinished,
    RolloutStarted,
    SampleGenerated,
    StageApplied,
    StageFailed,
)
from eventbus.log import LogReader
from eventbus.sample import Sample, SampleStatus

__all__ = [
    "FREE_COLUMNS",
    "Applied",
    "Attempt",
    "Change",
    "ExecutionRecord",
    "GroupRecord",
    "NotStored",
    "RecordedLog",
    "ReplayError",
    "RoundRecord",
    "Trace",
    "limited",
    "overwrite",
    "plain",
    "sound",
]


FREE_COLUMNS: Final = 1 << 30
"""Bytes of columns that the replay of a round may read of any log."""
COLUMNS_PER_BYTE: Final = 64
"""For each byte of the log, if that is more. Without fan-outs a sample is read some three times."""


class ReplayError(Exception):
    """A replay cannot be done: says what is missing or wrong, where, and what to do."""


class NotStored(ReplayError):
    """The log does not hold a column that this needs."""


class RecordedLog(Protocol):
    """What a replay needs of a log: `LogReader`."""

    @property
    def header(self) -> Any: ...

    @property
    def rounds(self) -> Sequence[Any]: ...

    def events(
        self, kinds: Any = None, *, rollout: int | None = None, evaluation: bool | None = None
    ) -> Iterator[Any]: ...

    def samples(self, event: Any) -> list[list[Sample]]: ...


@contextmanager
def limited(log: RecordedLog) -> Iterator[None]:
    """While one round is replayed: what is read, and kept, of a file is in proportion to it."""
    if not isinstance(log, LogReader):
        yield
        return
    log.allow(max(FREE_COLUMNS, COLUMNS_PER_BYTE * log.size))
    try:
        yield
    finally:
        log.allow(None)


class Applied:
    """A stage of a trace: what it did, or that it raised."""

    __slots__ = ("event", "generated")

    def __init__(self, event: StageApplied | StageFailed) -> None:
        self.event = event
        self.generated: SampleGenerated | None = None
        """The engine's answer, where the stage had asked one."""


class Trace:
    """What one sample went through, in order."""

    __slots__ = ("index", "stages")

    def __init__(self, index: int) -> None:
        self.index = index
        """`Sample.index`, as long as its stages leave that alone."""
        self.stages: list[Applied] = []

    @property
    def first(self) -> int:
        return self.stages[0].event.seq if self.stages else -1

    @property
    def last(self) -> int:
        return self.stages[-1].event.seq if self.stages else -1


class Attempt:
    """One start of an execution."""

    __slots__ = ("at", "traces")

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.traces: dict[int, Trace] = {}

    def trace(self, index: int) -> Trace:
        trace = self.traces.get(index)
        if trace is None:
            trace = self.traces[index] = Trace(index)
        return trace

    @property
    def first(self) -> int:
        return min((trace.first for trace in self.traces.values() if trace.stages), default=-1)

    @property
    def last(self) -> int:
        return max((trace.last for trace in self.traces.values()), default=-1)


class ExecutionRecord:
    """One execution of a group, in one rollout."""

    __slots__ = ("attempts", "id", "index", "lost", "position")

    def __init__(self, identity: int, position: int, index: int) -> None:
        self.id = identity
        self.position = position
        self.index = index
        self.attempts = [Attempt()]
        self.lost = False
        """A sample of it was dropped, or failed for good."""


class GroupRecord:
    """One life of a group."""

    def __init__(self, submitted: GroupSubmitted) -> None:
        self.submitted = submitted
        self.index = submitted.group_index
        self._samples: list[list[Sample]] | None = None
        self.completed: GroupCompleted | None = None
        """The last time, if it was resubmitted as a whole."""
        self.stages: list[StageApplied | StageFailed | GroupJudged] = []
        """What its group stages did."""
        self.ended: GroupEnded | None = None

    @cached_property
    def executions(self) -> dict[int, ExecutionRecord]:
        """By their ids, which are `Sample.rollout_id`."""
        numbers = zip(self.submitted.executions, self.submitted.indices, strict=True)
        return {each: ExecutionRecord(each, position, index) for position, (each, index) in enumerate(numbers)}

    @property
    def prompt(self) -> Any:
        return self.submitted.samples[0][0].sample.prompt

    @property
    def kept(self) -> bool:
        return self.ended is not None and self.ended.outcome == "kept"

    def start(self, log: RecordedLog, execution: ExecutionRecord, attempt: int) -> Sample:
        """The sample with which an execution began: what it had when it was recycled, else its prompt."""
        if self._samples is None:
            self._samples = [[plain(sample) for sample in row] for row in log.samples(self.submitted)]
        if attempt == 0 and self.has_partial(execution):
            return self._samples[1 + execution.position][0].copy()
        sample = self._samples[0][0].copy()
        sample.group_index = self.index
        sample.index = execution.index
        sample.rollout_id = execution.id
        if sample.status is SampleStatus.ABORTED:
            sample.status = SampleStatus.PENDING
        return sample

    def traces(self) -> Iterator[Trace]:
        for execution in self.executions.values():
            for attempt in execution.attempts:
                yield from attempt.traces.values()

    def has_partial(self, execution: ExecutionRecord) -> bool:
        """It was recycled with a part of its response, and went on from there."""
        samples = self.submitted.samples
        return len(samples) > 1 and len(samples[1 + execution.position]) == 1 and bool(execution.attempts[0].traces)

    def came_finished(self, execution: ExecutionRecord) -> bool:
        """It was recycled, and needed no more stages."""
        samples = self.submitted.samples
        return len(samples) > 1 and bool(samples[1 + execution.position]) and not execution.attempts[0].traces

    def shown(self, execution: int) -> Iterator[tuple[Any, int, int, LightSample]]:
        """All samples that the log shows of an execution, with the event and the position in it."""
        events: list[Any] = [self.submitted]
        record = self.executions.get(execution)
        for attempt in record.attempts if record is not None else ():
            for trace in attempt.traces.values():
                for applied in trace.stages:
                    events += [event for event in (applied.event, applied.generated) if event is not None]
        if self.completed is not None:
            events.append(self.completed)
        for event in events:
            for outer, row in enumerate(getattr(event, "samples", ())):
                for inner, shown in enumerate(row):
                    yield event, outer, inner, shown

    def column(self, log: RecordedLog, execution: int, field: str, mark: ColumnMark) -> Column[Any]:
        """A column of an execution by its mark: where the log holds it, or holds one that begins with it.

        :raises NotStored: it does neither.
        """
        longer: list[tuple[Any, int, int]] = []
        for event, outer, inner, shown in self.shown(execution):
            there = shown.columns.get(field)
            if there == mark:
                column: Column[Any] = getattr(log.samples(event)[outer][inner], field)
                return column.copy()
            if there is not None and there[0] > mark[0]:
                longer.append((event, outer, inner))
        if mark == (0, 0) and field == "tokens":
            return Tokens()
        for event, outer, inner in longer:  # such as the prompt's tokens, with which the whole begins
            start: Column[Any] = getattr(log.samples(event)[outer][inner], field)[: mark[0]]
            if zlib.crc32(start.to_bytes()) == mark[1]:
                return start
        raise NotStored(
            f"group {self.index}, execution {execution}: the log has no {field} of {mark[0]} values with the CRC-32 "
            f"{mark[1]:#010x}; a stage wrote them and another replaced them before anything was stored"
        )


class RoundRecord:
    """What a log says of one round. Without the events of sample stages it is enough for group stages."""

    def __init__(self, events: Iterable[Any], rollout_id: int, evaluation: bool) -> None:
        self.rollout_id = rollout_id
        self.evaluation = evaluation
        self.started: RolloutStarted | None = None
        self.finished: RolloutFinished | None = None
        self.assembled: BatchAssembled | None = None
        self.groups: list[GroupRecord] = []
        """In the order of submission."""
        self.timeline: list[tuple[EventHead, GroupRecord | None]] = []
        """The events of groups and of the whole round, in order."""
        self.engines: set[str] = set()
        """Stages that asked an engine."""
        self.count = 0
        """Events."""
        self._by_index: dict[int, GroupRecord] = {}
        self._by_execution: dict[int, GroupRecord] = {}
        for event in sound(events):
            self.count += 1
            self._add(event)

    @property
    def target(self) -> int:
        return self.started.target if self.started is not None else 0

    @property
    def spec(self) -> dict[str, Any]:
        """The fields of the `BatchSpec`."""
        return self.started.batch if self.started is not None else {}

    @property
    def group_size(self) -> int:
        return self.started.group_size if self.started is not None else 1

    @cached_property
    def full(self) -> float:
        """When the batch was full, as a seq."""
        kept = [record.ended.seq for record in self.groups if record.ended is not None and record.kept]
        return sorted(kept)[self.target - 1] if 0 < self.target <= len(kept) else math.inf

    def __str__(self) -> str:
        return f"{'evaluation' if self.evaluation else 'rollout'} {self.rollout_id}"

    def _add(self, event: Any) -> None:
        if isinstance(event, AttemptEnded):
            return  # no engine is asked
        execution = getattr(event, "execution", None)
        if execution is not None:
            self._add_sample(event, execution)
            return
        group: GroupRecord | None = None
        if isinstance(event, GroupSubmitted):
            group = GroupRecord(event)
            self.groups.append(group)
            self._by_index[event.group_index] = group
            self._by_execution.update((identity, group) for identity in event.executions)
        elif (index := getattr(event, "group_index", None)) is not None:
            if isinstance(event, GroupCompleted) and event.samples:  # two groups may share an index
                first = event.samples[0][0].sample.rollout_id
                group = self._by_execution.get(-1 if first is None else first)
            group = group or self._by_index.get(index)
        if isinstance(event, RolloutStarted):
            self.started = event
        elif isinstance(event, RolloutFinished):
            self.finished = event
        elif isinstance(event, BatchAssembled):
            self.assembled = event
        elif group is not None:
            if isinstance(event, GroupCompleted):
                group.completed = event
                group.stages.clear()
            elif isinstance(event, StageApplied | GroupJudged):
                group.stages.append(event)
            elif isinstance(event, StageFailed):
                group.stages.append(event)
                if event.policy == "resubmit":  # once more, all of it
                    for record in group.executions.values():
                        record.lost = False
                        record.attempts.append(Attempt())
            elif isinstance(event, GroupEnded):
                group.ended = event
        self.timeline.append((event, group))

    def _add_sample(self, event: Any, execution: int) -> None:
        group = self._by_execution.get(execution)
        if group is None:
            return  # submitted before what could be read begins
        record = group.executions[execution]
        attempt = record.attempts[-1]
        if isinstance(event, SampleGenerated):
            self.engines.add(event.stage)
            if (asked := attempt.traces.get(event.index)) is not None and asked.stages:
                asked.stages[-1].generated = event
            return
        trace = attempt.trace(event.index)
        trace.stages.append(Applied(event))
        if isinstance(event, StageFailed):
            if event.policy == "resubmit":
                record.attempts.append(Attempt())
            else:
                record.lost = True
        elif event.dropped is not None:
            record.lost = True


def sound(events: Iterable[Any]) -> Iterator[Any]:
    """The events, as long as each is in itself what a pipeline writes, whoever wrote the log.

    :raises ReplayError: one is not.
    """
    for event in events:
        if wrong := _wrong(event):
            raise ReplayError(
                f"{'evaluation' if event.evaluation else 'rollout'} {event.rollout_id}, event {event.seq} "
                f"({event.kind}): {wrong}: no pipeline wrote that, so it cannot be replayed"
            )
        yield event


def _wrong(event: Any) -> str | None:
    if isinstance(event, RolloutStarted):
        try:
            msgspec.convert({"groups": 1} | {k: v for k, v in event.batch.items() if k in _OF_A_BATCH}, BatchSpec)
        except ValueError as error:
            return f"its settings are wrong: {error}"
    elif isinstance(event, GroupSubmitted):
        count = len(event.executions)
        if not count or len(event.indices) != count or len(set(event.executions)) != count:
            return f"it has {count} executions, not all different, or {len(event.indices)} indices for them"
        if not event.samples or len(event.samples[0]) != 1 or len(event.samples) not in (1, 1 + count):
            return f"it shows {len(event.samples)} rows of samples, not the prompt, and at most one for each execution"
    elif isinstance(event, SampleGenerated) and [len(row) for row in event.samples] != [1]:
        return "it does not show the one sample"
    elif isinstance(event, GroupCompleted) or (isinstance(event, StageApplied) and event.execution is None):
        if not all(event.samples):
            return "it shows an execution without samples"
    elif isinstance(event, StageApplied) and len(event.samples) > 1:
        return f"it shows {len(event.samples)} rows of samples, not the one of its execution"
    return None


_OF_A_BATCH: Final = frozenset(BatchSpec.__struct_fields__)


def overwrite(sample: Sample, other: Sample) -> Sample:
    """Make `sample` what `other` is. Columns that are still in the log are read."""
    for name in Sample.__struct_fields__:
        setattr(sample, name, getattr(other, name))
    return sample


def plain(recorded: Sample) -> Sample:
    """A sample of the reader's as one that stages may change."""
    return overwrite(Sample(), recorded)


class Change(msgspec.Struct, frozen=True):
    """A value in the record, and the same now."""

    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{_short(self.old)} -> {_short(self.new)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
