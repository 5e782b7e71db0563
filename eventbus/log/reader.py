"""`LogReader`: a log by rollout, group, sample, kind and time, reading only what is needed.

What it keeps true: nothing that is missing or damaged is passed over in silence. Every chunk's CRC is checked when it
is read, and `seq` goes up by one; what does not fit is in `damage`, with its position and the events that are missing.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from eventbus.codecs import decoder
from eventbus.events import EVENT_KINDS, ColumnMark, Event, EventHead, RolloutFinished
from eventbus.group import Summary, Verdict
from eventbus.ledger import Outcome
from eventbus.log.file import Damage, LogFile, StoredChunk, Unreadable, messages
from eventbus.log.format import COLUMNS, HEAVY_FIELDS, LogError, LogHeader, Place, Round, RoundList, Rounds, metadata_of
from eventbus.log.recorded import RecordedGroup, RecordedLight, RecordedSample, recorded
from eventbus.sample import Sample
from eventbus.wire import SCHEMA_VERSION, WireError, decode

__all__ = ["Damage", "LogReader", "RecordedGroup", "RecordedRollout", "RecordedSample"]

_POLL: Final = 0.05
"""Seconds between two looks at a file that is still being written."""


class LogReader:
    """Reads a log: finished, still being written, cut off or damaged.

    :raises LogError: it cannot be opened, or is no log.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._file = LogFile(path)
        self._light: list[StoredChunk] = []
        self._heavy: list[StoredChunk] = []
        self._sorted = 0
        self._contents: OrderedDict[int, tuple[memoryview, dict[tuple[int, int], tuple[int, int]]]] = OrderedDict()
        """Column chunks that were read last, by position: their content, and where each message is in it."""
        self._held = 0
        self._allowed: int | None = None
        """Bytes of columns that may still be read."""
        self._undecoded: Damage | None = None
        """The last events in a row that could not be decoded."""
        self._rounds: list[Round] | None = None
        self._sort()
        self.header = self._header()

    @property
    def finished(self) -> bool:
        """The file was closed by its writer."""
        return self._file.finished

    @property
    def damage(self) -> list[Damage]:
        """What could not be read, in order of position. It grows while more is read."""
        found = list(self._file.damage.values())
        if (tail := self._file.tail) is not None:
            found.append(tail)
        return sorted(found, key=lambda damage: damage.position)

    @property
    def size(self) -> int:
        """Of the file, in bytes."""
        return self._file.size

    @property
    def rounds(self) -> list[Round]:
        """The rounds in the order of their first event. Two may have the same number: see `rollout`."""
        if self._rounds is None:
            self._rounds = sorted(self._find_rounds(), key=lambda part: part.first_seq)
        return self._rounds

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Events

    def events(
        self,
        kinds: Collection[str] | str | None = None,
        *,
        rollout: int | Round | None = None,
        evaluation: bool | None = None,
        group: int | None = None,
        execution: int | None = None,
        index: int | None = None,
        since_ns: int | None = None,
        until_ns: int | None = None,
    ) -> Iterator[Event]:
        """The events that fit all of these, in order of `seq`.

        :param kinds: one name or several.
        :param rollout: number of the round, with `evaluation=None` of both kinds; or one of `rounds`.
        :param execution: events of one execution, and those that submitted it; `index` likewise of one sample.
        :param since_ns: the earliest `time_ns`; `until_ns` is the latest.
        :raises ValueError: there is no such kind.
        """
        numbers = self._numbers(kinds)
        part: Round | None = None
        if isinstance(rollout, Round):
            part, evaluation = rollout, rollout.evaluation
            rollout = part.rollout_id
        elif rollout is not None:
            parts = [one for one in self.rounds if one.rollout_id == rollout and evaluation in (None, one.evaluation)]
            if not parts:
                return iter(())
            part = _hull(parts)
        wanted = _Wanted(rollout, evaluation, group, execution, index, part)
        return self._decoded(self._messages(numbers, since_ns, until_ns, part), wanted)

    def _decoded(self, found: Iterator[tuple[int, bytes, int]], wanted: _Wanted) -> Iterator[Event]:
        for _, data, position in found:
            if wanted.narrow and not wanted.has(data):
                continue
            try:
                event = decode(data)
            except WireError as error:
                self._undecodable(data, position, error)
            else:
                yield event

    def follow(self, kinds: Collection[str] | str | None = None) -> Iterator[Event]:
        """The events from the first one on, and those that are still being written, until the file is finished.

        Blocks while there are none.

        :raises LogError: the file was cut off or removed: there will be none.
        """
        numbers = self._numbers(kinds)
        done, gaps = 0, _Gaps(self._file, self._whole())
        while True:
            there = len(self._light)
            yield from self._decoded(self._messages(numbers, begin=done, gaps=gaps), _Wanted())
            done = there
            if self._file.finished:
                return
            while not self._file.grow():
                self._file.check_there()
                time.sleep(_POLL)
            self._rounds = None
            self._sort()

    def rollout(self, rollout_id: int | Round, *, evaluation: bool = False) -> RecordedRollout:
        """One round. Of several with this number it is the last; give one of `rounds` for another.

        :raises LogError: the log does not have it; names the nearest.
        """
        if isinstance(rollout_id, Round):
            return RecordedRollout(self, rollout_id)
        for part in reversed(self.rounds):
            if (part.rollout_id, part.evaluation) == (rollout_id, evaluation):
                return RecordedRollout(self, part)
        kind = "evaluation" if evaluation else "rollout"
        there = sorted(
            (part.rollout_id for part in self.rounds if part.evaluation == evaluation),
            key=lambda other: abs(other - rollout_id),
        )
        nearest = f"the nearest is {there[0]}, there are {min(there)} to {max(there)}" if there else "it has none"
        raise LogError(f"{self.path}: no {kind} {rollout_id} in this log; {nearest}")

    def samples(self, event: Any) -> list[list[Sample]]:
        """The samples that an event shows, in its nesting. Their columns are read when first touched."""
        shown = getattr(event, "samples", ())
        if not isinstance(shown, list):  # `BatchAssembled` counts its samples
            return []
        source = self._source(event.seq, event.time_ns)
        return [
            [self._bind(_recorded_sample(one.sample), one.columns, source, i, j) for j, one in enumerate(execution)]
            for i, execution in enumerate(shown)
        ]

    def allow(self, size: int | None) -> None:
        """Have columns of at most so many bytes read from now on, for whoever keeps what is read: a log may show one
        column in any number of samples. The one beyond is a `LogError`. None: of any size.
        """
        self._allowed = size

    # Reading chunks

    def _sort(self) -> None:
        """Which chunks hold events, and which columns."""
        chunks = self._file.chunks[self._sorted :]
        self._sorted = len(self._file.chunks)
        self._columns_channel = next((n for n, topic in self._file.channels.items() if topic == COLUMNS), -1)
        for chunk in chunks:
            if chunk.channels - {self._columns_channel}:
                self._light.append(chunk)
            if self._columns_channel in chunk.channels:
                self._heavy.append(chunk)
        self._heavy.sort(key=lambda chunk: chunk.start)
        self._starts = [chunk.start for chunk in self._heavy]
        self._ends = list(accumulate((chunk.end for chunk in self._heavy), max))

    def _numbers(self, kinds: Collection[str] | str | None) -> frozenset[int] | None:
        """The channels of these kinds; None for all."""
        if kinds is None:
            return None
        names = {kinds} if isinstance(kinds, str) else set(kinds)
        there = {topic[1:] for topic in self._file.channels.values() if topic != COLUMNS}
        if unknown := sorted(names - there - set(EVENT_KINDS)):
            raise ValueError(f"no event kind {unknown[0]!r}; there are {', '.join(sorted(there))}")
        return frozenset(number for number, topic in self._file.channels.items() if topic[1:] in names)

    def _messages(
        self,
        numbers: frozenset[int] | None = None,
        since: int | None = None,
        until: int | None = None,
        part: Round | None = None,
        begin: int = 0,
        gaps: _Gaps | None = None,
    ) -> Iterator[tuple[int, bytes, int]]:
        """Channel, data and position of the messages of events, in order. Notes what is missing among them.

        :param begin: the first chunk that is read, where `gaps` has watched those before it.
        """
        first = 0 if since is None else since
        last = _NEVER if until is None else until
        if part is not None:
            first, last = max(first, part.first_ns), min(last, part.last_ns)
        columns = self._columns_channel
        if gaps is None:
            of = self._whole() if part is None else part
            gaps = _Gaps(self._file, None if of is None or first > of.first_ns else of, ordered=part is None)
        for chunk in self._light[begin:]:
            if chunk.end < first or chunk.start > last:
                gaps.skip()
                continue
            try:
                content = self._file.content(chunk)
            except Unreadable as error:
                gaps.damaged(self._file.note(chunk.position, chunk.length, str(error)))
                continue
            at = end = 0
            broken: Damage | None = None
            try:
                for channel, sequence, time_ns, start, stop in messages(content):
                    if channel == columns:
                        continue
                    at, end = start, stop
                    if sequence != gaps.expected:
                        gaps.jumped(sequence, content[at:end], chunk.position)
                    gaps.expected = (sequence + 1) & _LOW
                    if (numbers is None or channel in numbers) and first <= time_ns <= last:
                        yield channel, content[at:end], chunk.position
            except Unreadable as error:
                broken = self._file.note(chunk.position, chunk.length, str(error))
            if end:
                gaps.read(content[at:end], chunk)
            if broken is not None:
                gaps.damaged(broken)
        of = self._whole() if part is None else part
        gaps.end(None if of is None or last < of.last_ns else of.last_seq)

    def _whole(self) -> Round | None:
        """From the first event to the last, also where these could not be written. None where that is not known."""
        return _hull(self.rounds) if self._file.finished and self.rounds else None

    def _undecodable(self, data: bytes, position: int, error: WireError) -> None:
        reason = f"an event cannot be decoded: {error}"
        try:
            seq = decode(data, EventHead).seq
        except WireError:
            self._file.note(position, 0, reason)
            return
        run = self._undecoded
        if run is not None and (run.position, run.reason) == (position, reason):
            first, last = run.first_seq or 0, run.last_seq or 0
            if first <= seq <= last + 1:
                run.last_seq = max(last, seq)
                return
        self._undecoded = self._file.note(position, 0, reason, seq, seq)

    # Rounds

    def _header(self) -> LogHeader:
        for position, name, content in self._file.metadata:
            if name == "rolloutbus":
                try:
                    header: LogHeader = metadata_of(name, content, LogHeader)
                except (ValueError, msgspec.MsgspecError) as error:
                    self._file.note(position, 0, f"the metadata of the log is damaged: {error}")
                    break
                return header
        else:
            self._file.note(0, 0, "the metadata of the log is missing")
        return LogHeader("", SCHEMA_VERSION)

    def _find_rounds(self) -> list[Round]:
        rounds = RoundList()
        noted = 0
        whole = not self._file.damage  # a note may be among what could not be read
        for position, name, fields in self._file.metadata:
            if name == "rounds":
                try:
                    listed: Rounds = metadata_of(name, fields, Rounds)
                    return listed.rounds
                except (ValueError, msgspec.MsgspecError) as error:
                    self._file.note(position, 0, f"the list of rounds is damaged: {error}")
                    whole = False
            if name == "rollout":
                try:
                    part = metadata_of(name, fields, Round)
                except (ValueError, msgspec.MsgspecError) as error:
                    self._file.note(position, 0, f"the note of a round is damaged: {error}")
                    whole = False
                    continue
                rounds.add(part)
                noted = position
        # Behind the last note and in the chunk before it, of which further notes may be cut off; and wherever a round
        # goes on of which none says that it has finished.
        since = min((part.first_ns for part in rounds.all if not part.finished), default=_NEVER)
        begin = max((chunk.position for chunk in self._light if chunk.position < noted), default=0)
        if not whole:
            rounds = RoundList()
            since = begin = 0
        for chunk in self._light:
            if chunk.position < begin and chunk.end < since:
                continue
            try:
                content = self._file.content(chunk)
                for channel, _, _, at, end in messages(content):
                    if channel != self._columns_channel:
                        try:
                            head = decode(content[at:end], EventHead)
                        except WireError:
                            continue
                        rounds.count(head, self._file.channels.get(channel, "/")[1:])
            except Unreadable as error:
                self._file.note(chunk.position, chunk.length, str(error))
        return rounds.all

    # Columns

    def _source(self, seq: int, time_ns: int) -> Any:
        return partial(self._heavy_fields, seq, time_ns)

    def _bind(
        self, sample: RecordedSample, marks: dict[str, ColumnMark], source: Any, i: int, j: int
    ) -> RecordedSample:
        recorded(sample, marks, source, i, j, all=self.header.payload != "none")
        return sample

    def _heavy_fields(self, seq: int, time_ns: int, i: int, j: int) -> dict[str, Any]:
        stored = self._stored((seq, time_ns, i, j))
        raws = dict(stored.values)
        for name, place in stored.same.items():
            if (raw := self._stored(place).values.get(name)) is None:
                raise LogError(f"{self.path}: the columns of event {seq} are damaged: {name} is not where it should be")
            raws[name] = raw
        if self._allowed is not None:
            self._allowed -= sum(map(len, raws.values()))
            if self._allowed < 0:
                raise LogError(f"{self.path}: its samples hold far more than the file does, one column many times over")
        fields = {}
        for name, raw in raws.items():
            if (read := _heavy.get(name)) is None:  # of a newer writer
                continue
            try:
                fields[name] = read(raw)
            except Exception as error:
                raise LogError(f"{self.path}: the columns of event {seq} are damaged: {name}: {error}") from error
        return fields

    def _stored(self, place: Place) -> _RawColumns:
        seq, time_ns, i, j = place
        message = (seq & _LOW, time_ns)
        number = bisect_right(self._starts, time_ns) - 1
        damaged: list[Damage] = []
        while number >= 0 and self._ends[number] >= time_ns:
            chunk = self._heavy[number]
            number -= 1
            if chunk.end < time_ns:
                continue
            try:
                content, places = self._content(chunk)
            except Unreadable as error:
                damaged.append(self._file.note(chunk.position, chunk.length, f"columns: {error}"))
                continue
            if message in places:
                at, end = places[message]
                try:
                    return _stored_columns.decode(content[at:end])[1][i][j]
                except (msgspec.MsgspecError, IndexError, RecursionError) as error:
                    damaged.append(self._file.note(chunk.position, 0, f"columns: event {seq}: {error}"))
        if damaged:
            raise LogError(f"{self.path}: the columns of event {seq} are damaged: {damaged[0]}")
        if self.header.payload == "none":
            reason = "it was recorded with payload='none'"
        elif self.header.payload == "kept":
            reason = "it was recorded with payload='kept', and the group entered no batch"
        else:
            reason = "they are missing"
            self._file.note(0, 0, f"the columns of event {seq} are missing")
        raise LogError(f"{self.path}: no columns for the samples of event {seq}: {reason}")

    def _content(self, chunk: StoredChunk) -> tuple[memoryview, dict[tuple[int, int], tuple[int, int]]]:
        held = self._contents.pop(chunk.position, None)
        if held is None:
            content = self._file.content(chunk)
            places = {
                (sequence, time_ns): (at, end)
                for channel, sequence, time_ns, at, end in messages(content)
                if channel == self._columns_channel
            }
            held = memoryview(content), places
            self._held += len(content)
            while self._contents and self._held > _HOLD:
                _, (oldest, _) = self._contents.popitem(last=False)
                self._held -= len(oldest)
        self._contents[chunk.position] = held
        return held


class RecordedRollout:
    """One round of a log."""

    def __init__(self, reader: LogReader, part: Round) -> None:
        self._reader = reader
        self._part = part
        self.rollout_id = part.rollout_id
        self.evaluation = part.evaluation
        self.finished = part.finished
        """Its end was recorded, whatever that was."""

    @property
    def summary(self) -> Summary | None:
        """None where it did not finish."""
        ends = [event for event in self.events("rollout_finished") if isinstance(event, RolloutFinished)]
        return ends[-1].summary if ends else None

    def events(self, kinds: Collection[str] | str | None = None) -> Iterator[Event]:
        """Its events, in order of `seq`."""
        return self._reader.events(kinds, rollout=self._part)

    def groups(self) -> Iterator[RecordedGroup]:
        """Every completed group, whatever became of it, in order of completion. One that was completed more than once,
        because a stage asked for it again, appears as it was last.
        """
        reader = self._reader
        wanted = _Wanted(self.rollout_id, self.evaluation, part=self._part)
        channels = {kind: reader._numbers(kind) for kind in _GROUP_KINDS}
        numbers = frozenset().union(*(number for number in channels.values() if number))
        kinds = {number: kind for kind, found in channels.items() for number in found or ()}
        prompts: dict[int, Any] = {}
        completed: dict[int, tuple[bytes, int]] = {}
        verdicts: dict[int, Verdict] = {}
        ends: dict[int, _Ended] = {}
        for number, data, position in reader._messages(numbers, part=self._part):
            if not wanted.has(data):
                continue
            kind = kinds[number]
            try:
                body = _group_bodies[kind].decode(data)[1]
            except (msgspec.MsgspecError, WireError, RecursionError) as error:
                reader._undecodable(data, position, WireError(str(error)))
                continue
            index = body.group_index
            if kind == "group_submitted":
                prompts[index] = body.samples[0][0].sample.prompt if body.samples else None
            elif kind == "group_completed":
                completed.pop(index, None)
                verdicts.pop(index, None)
                ends.pop(index, None)
                completed[index] = data, position
            elif kind == "group_judged":
                verdicts[index] = body.verdict
            else:
                ends[index] = body
        for index, (data, position) in completed.items():
            try:
                body = _completed.decode(data)[1]
            except Exception as error:
                reader._undecodable(data, position, WireError(str(error)))
                continue
            end = ends.get(index, _Ended(index))
            source = reader._source(body.seq, body.time_ns)
            executions: list[list[Sample]] = [
                [reader._bind(one.sample, one.columns, source, i, j) for j, one in enumerate(execution)]
                for i, execution in enumerate(body.samples)
            ]
            prompt = prompts.get(index)
            if prompt is None:
                prompt = next((sample.prompt for execution in executions for sample in execution), "")
            verdict = verdicts.get(index) or Verdict(end.outcome == "kept", end.reason)
            yield RecordedGroup(index, prompt, executions, verdict, end.outcome, end.reason, body.seq)


class _Gaps:
    """Watches that `seq` goes up by one, and notes the events that are missing."""

    def __init__(self, file: LogFile, of: Round | None, *, ordered: bool = True) -> None:
        """
        :param of: where the events are that are read from their beginning. None where that is not known.
        :param ordered: no others come before them.
        """
        self._file = file
        self._ordered = ordered
        self._first = None if of is None else of.first_seq
        """The event that is expected, where no event was read yet."""
        self.expected = None if self._first is None else self._first & _LOW
        self._last: bytes | None = None
        """The last event that was read."""
        self._behind = 0
        self._damaged: list[Damage] = []

    def skip(self) -> None:
        """Chunks are left out, on purpose."""
        self.expected = self._last = self._first = None
        self._damaged.clear()

    def damaged(self, damage: Damage) -> None:
        self._damaged.append(damage)

    def read(self, last: bytes, chunk: StoredChunk) -> None:
        self._last = last
        self._behind = chunk.position
        self._damaged.clear()

    def jumped(self, sequence: int, data: bytes, position: int) -> None:
        """An event with another `seq` than expected."""
        try:
            seq = decode(data, EventHead).seq
        except WireError:
            return
        if self.expected is None:
            for damage in self._damaged:
                damage.last_seq = seq - 1
            return
        missing = (sequence - self.expected) & _LOW
        if missing > _LOW >> 1:
            if self._ordered:
                self._file.note(position, 0, f"event {seq} is out of order")
            return
        self._missing(seq - missing, seq - 1, position)

    def end(self, last: int | None) -> None:
        """All was read; `last` is the last event that should have come, where that is known."""
        after = self._first
        if self._last is not None:
            with suppress(WireError):
                after = decode(self._last, EventHead).seq + 1
        if after is not None and last is not None and after <= last:
            self._missing(after, last, self._behind, "after here")
        else:
            for damage in self._damaged:
                damage.first_seq = after

    def _missing(self, first: int, last: int, position: int, where: str = "before here") -> None:
        causes = self._damaged or [
            damage
            for damage in self._file.damage.values()
            if self._behind < damage.position < position and not damage.reason.startswith("columns")
        ]
        for damage in causes:
            damage.first_seq, damage.last_seq = first, last
        if not causes:
            self._file.note(position, 0, f"{last - first + 1} events {where} are missing", first, last)


class _Wanted:
    """Which events: of one round, group, execution or sample."""

    def __init__(
        self,
        rollout: int | None = None,
        evaluation: bool | None = None,
        group: int | None = None,
        execution: int | None = None,
        index: int | None = None,
        part: Round | None = None,
    ) -> None:
        self.rollout, self.evaluation = rollout, evaluation
        self.group, self.execution, self.index = group, execution, index
        self.first, self.last = (0, _NEVER) if part is None else (part.first_seq, part.last_seq)
        self.narrow = any(item is not None for item in (rollout, evaluation, group, execution, index))

    def has(self, data: bytes) -> bool:
        try:
            keys = _keys.decode(data)[1]
        except (msgspec.MsgspecError, RecursionError):
            return True  # whoever decodes it says what is wrong
        return (
            (self.rollout is None or keys.rollout_id == self.rollout)
            and self.first <= keys.seq <= self.last
            and (self.evaluation is None or keys.evaluation == self.evaluation)
            and (self.group is None or keys.group_index == self.group)
            and (self.execution is None or keys.execution == self.execution or self.execution in keys.executions)
            and (self.index is None or keys.index == self.index or self.index in keys.indices)
        )


class _Keys(msgspec.Struct):
    seq: int
    rollout_id: int
    evaluation: bool = False
    group_index: int | None = None
    execution: int | None = None
    index: int | None = None
    executions: Sequence[int] = ()
    indices: Sequence[int] = ()


class _PromptHolder(msgspec.Struct):
    prompt: Any = ""


class _PromptLight(msgspec.Struct):
    sample: _PromptHolder


class _Submitted(msgspec.Struct):
    group_index: int
    samples: list[list[_PromptLight]] = []


class _Index(msgspec.Struct):
    group_index: int


class _Completed(msgspec.Struct):
    group_index: int
    seq: int
    time_ns: int
    samples: list[list[RecordedLight]] = []


class _Judged(msgspec.Struct):
    group_index: int
    verdict: Verdict


class _Ended(msgspec.Struct):
    group_index: int
    outcome: Outcome | None = None
    reason: str | None = None


class _RawColumns(msgspec.Struct):
    values: dict[str, msgspec.Raw] = {}
    same: dict[str, Place] = {}


_LOW: Final = 0xFFFFFFFF
_NEVER: Final = 1 << 64
_HOLD: Final = 128 << 20
"""Bytes of column chunks that a reader keeps."""
_keys = msgspec.msgpack.Decoder(tuple[int, _Keys])
_completed = decoder(tuple[int, _Completed])
_group_bodies: Final[dict[str, msgspec.msgpack.Decoder[Any]]] = {
    "group_submitted": decoder(tuple[int, _Submitted]),
    "group_completed": msgspec.msgpack.Decoder(tuple[int, _Index]),
    "group_judged": msgspec.msgpack.Decoder(tuple[int, _Judged]),
    "group_ended": msgspec.msgpack.Decoder(tuple[int, _Ended]),
}
_GROUP_KINDS: Final = tuple(_group_bodies)
_stored_columns = msgspec.msgpack.Decoder(tuple[int, list[list[_RawColumns]]])
_heavy: Final[dict[str, Callable[[Any], Any]]] = {
    field.name: decoder(field.type).decode for field in msgspec.structs.fields(Sample) if field.name in HEAVY_FIELDS
}
_LIGHT_FIELDS: Final = tuple(name for name in Sample.__struct_fields__ if name not in HEAVY_FIELDS)


def _recorded_sample(sample: Sample) -> RecordedSample:
    return RecordedSample(**{name: getattr(sample, name) for name in _LIGHT_FIELDS})


def _hull(parts: Sequence[Round]) -> Round:
    """What spans all of them."""
    first, last = min(part.first_seq for part in parts), max(part.last_seq for part in parts)
    return Round(
        parts[0].rollout_id,
        parts[0].evaluation,
        first,
        last,
        min(part.first_ns for part in parts),
        max(part.last_ns for part in parts),
    )
