"""The layout of a log, known to its writer and its reader: an MCAP file with the profile `rolloutbus`.

    Header                                    profile and library
    Metadata "rolloutbus"                     who wrote it and how: `LogHeader`
    Chunk                                     schemas and channels, without messages
    Chunk, MessageIndex ...                   messages, again and again, and between them
    Metadata "rollout"                        when a round begins, when it has finished, and when it was trained
    Metadata "rounds"                         all of them, in a file that was closed; and so are the last:
    DataEnd, summary, Footer

A channel `/KIND` per kind of event carries `eventbus.wire.encode(event)`; `/columns` carries `StoredColumns`, what such
an event leaves out of the samples that it shows. Messages of `/columns` lie in chunks of their own, and before the
chunk of their events: whatever prefix of the file there is, its events are whole. The events come in order of `seq`.

`sequence` is the low half of `Event.seq`, `log_time` and `publish_time` are `Event.time_ns`; the message of `/columns`
has those of its event. A CRC-32 guards the content of every chunk (MCAP's own) and each metadata record (its key
`crc`).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final, Literal, TypeAlias

import msgspec
from mcap.data_stream import RecordBuilder
from mcap.opcode import Opcode
from mcap.records import Channel, McapRecord, Metadata, Schema

from eventbus.events import EVENT_KINDS, Event, EventHead
from eventbus.sample import Sample

__all__ = [
    "CHUNK_FIELDS",
    "COLUMNS",
    "HEAVY_FIELDS",
    "MAGIC",
    "MESSAGE",
    "PROFILE",
    "RECORD",
    "Compression",
    "LogError",
    "LogHeader",
    "Payload",
    "Place",
    "Round",
    "RoundList",
    "Rounds",
    "StageNote",
    "StoredColumns",
    "channels",
    "described",
    "intact",
    "largest_content",
    "metadata_of",
    "metadata_record",
    "packed",
]

MAGIC: Final = b"\x89MCAP0\r\n"
PROFILE: Final = "rolloutbus"
COLUMNS: Final = "/columns"

RECORD: Final = struct.Struct("<BQ")
"""Opcode and length: what every record begins with."""
MESSAGE: Final = struct.Struct("<BQHIQQ")
"""The record's beginning, channel, sequence, log time, publish time; the data follow."""
CHUNK_FIELDS: Final = struct.Struct("<QQQII")
"""Start, end, uncompressed size, CRC, length of the compression's name; that name and the data's size follow."""

HEAVY_FIELDS: Final = (
    "tokens",
    "loss_mask",
    "rollout_log_probs",
    "teacher_log_probs",
    "multimodal_inputs",
    "multimodal_train_inputs",
    "rollout_routed_experts",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
)
"""The fields of a sample that its light form does not have."""

FREE_CONTENT: Final = 64 << 20
"""Bytes that any chunk may hold; see `largest_content`."""
LARGEST_RATIO: Final = 32

Payload: TypeAlias = Literal["full", "kept", "none"]
Compression: TypeAlias = Literal["zstd"]
Place: TypeAlias = tuple[int, int, int, int]
"""Where a value lies that is not stored twice: seq and time of the event, and the sample's place in its nesting."""


class LogError(Exception):
    """A log that cannot be written or read: which file, where, why, and what to do."""


def printable(text: str) -> str:
    """Without lone surrogates, which names of files may have and JSON may not."""
    return text.encode(errors="backslashreplace").decode()


class StageNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stage of the pipeline that was recorded."""

    name: str
    level: str
    external: bool = False
    on_error: str = "fail"
    path: str | None = None
    """`module:name` of the function or class, where it has one."""
    table: dict[str, Any] | None = None
    """What a configuration would say of it, where that makes it anew."""
    wraps: bool = False
    """It takes `call_next`."""
    fans_out: bool = False
    counts: bool = False
    """It asks for `remaining` or `target`."""


class LogHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who wrote a log, and how."""

    library: str
    schema_version: int
    payload: Payload = "full"
    config: str | None = None
    """The TOML text of the run."""
    stages: list[StageNote] = []
    versions: dict[str, str] = {}
    """Of Python, rolloutbus and what else was installed that matters."""
    started_ns: int = 0
    command: list[str] = []


class Round(msgspec.Struct, omit_defaults=True):
    """One round in a log: where its events are."""

    rollout_id: int
    evaluation: bool
    first_seq: int
    last_seq: int
    first_ns: int
    """The earliest `time_ns` of its events, and below the latest: the clock may have been set back in between."""
    last_ns: int
    finished: bool = False
    counts: dict[str, int] = {}
    """Events by kind."""

    def __str__(self) -> str:
        return f"{'evaluation' if self.evaluation else 'rollout'} {self.rollout_id}"


class RoundList:
    """The rounds of a stream, counted event by event. A number that comes again, after its round has finished, is
    another round; evaluations of the same number that overlap cannot be told apart, and are one."""

    def __init__(self, rounds: Iterable[Round] = ()) -> None:
        self.all: list[Round] = []
        """In the order in which they began."""
        self._places: dict[tuple[int, bool], int] = {}
        """Where the last of each number is in `all`."""
        for part in rounds:
            self.add(part)

    def add(self, part: Round) -> None:
        """A round as far as it was counted before: it takes the place of what was known of it."""
        key = (part.rollout_id, part.evaluation)
        place = self._places.get(key)
        if place is not None and self.all[place].first_seq == part.first_seq:
            self.all[place] = part
        else:
            self._add(key, part)

    def _add(self, key: tuple[int, bool], part: Round) -> Round:
        self._places[key] = len(self.all)
        self.all.append(part)
        return part

    def count(self, event: Event | EventHead, kind: str, *, lost: bool = False) -> Round:
        """Count an event to its round, once.

        :param lost: it is not in the log. The round reaches to it, so that a reader sees that it is missing.
        """
        key, seq, time_ns = (event.rollout_id, event.evaluation), event.seq, event.time_ns
        place = self._places.get(key)
        part = None if place is None else self.all[place]
        if part is None or (kind == "rollout_started" and part.finished and seq > part.last_seq):
            part = self._add(key, Round(*key, seq, seq, time_ns, time_ns))
        elif seq <= part.last_seq:
            return part
        elif time_ns >= part.last_ns:
            part.last_ns = time_ns
        elif time_ns < part.first_ns:
            part.first_ns = time_ns
        part.last_seq = seq
        if lost:
            return part
        counts = part.counts
        counts[kind] = counts.get(kind, 0) + 1
        if kind in ("rollout_started", "rollout_finished"):
            part.finished = counts.get("rollout_finished", 0) >= max(1, counts.get("rollout_started", 0))
        return part


class StoredColumns(msgspec.Struct, frozen=True, omit_defaults=True):
    """The heavy fields of one sample, but for those that are what they are by default."""

    values: dict[str, Any] = {}
    same: dict[str, Place] = {}
    """Fields that an earlier event of the same round holds already."""


class Rounds(msgspec.Struct, frozen=True):
    """All rounds of a finished log."""

    rounds: list[Round]


# Channels


def channels() -> dict[str, int]:
    """Number of each channel by topic."""
    return {COLUMNS: 1, **{f"/{kind}": number for number, kind in enumerate(EVENT_KINDS, start=2)}}


@cache
def described() -> dict[int, list[bytes]]:
    """What a file says about its channels, so that other tools can read it: schema and channel records, by opcode."""
    types: dict[str, Any] = {COLUMNS: list[list[StoredColumns]]}
    types.update((f"/{kind}", cls) for kind, cls in EVENT_KINDS.items())
    records: dict[int, list[bytes]] = {Opcode.SCHEMA: [], Opcode.CHANNEL: []}
    for topic, number in channels().items():
        message = tuple.__class_getitem__((int, types[topic]))
        data = msgspec.json.encode(msgspec.json.schema(message, schema_hook=lambda cls: {"title": cls.__name__}))
        schema = Schema(id=number, name=topic[1:], encoding="jsonschema", data=data)
        channel = Channel(id=number, schema_id=number, topic=topic, message_encoding="msgpack", metadata={})
        records[Opcode.SCHEMA].append(packed(schema))
        records[Opcode.CHANNEL].append(packed(channel))
    return records


# Records


def packed(record: McapRecord) -> bytes:
    """A record as the file has it."""
    builder = RecordBuilder()
    record.write(builder)
    return bytes(builder.end())  # type: ignore[no-untyped-call]


def metadata_record(name: str, value: msgspec.Struct) -> bytes:
    """A struct as a metadata record: a key per field, JSON behind each."""
    content = {key: msgspec.json.encode(item).decode() for key, item in msgspec.structs.asdict(value).items()}
    return packed(Metadata(name=name, metadata=content | {"crc": _crc(name, content)}))


def metadata_of(name: str, content: Mapping[str, str], of: type[Any]) -> Any:
    """The struct that `metadata_record` wrote.

    :raises ValueError: it is damaged, or something else.
    """
    if not intact(name, content):
        raise ValueError("its CRC does not fit")
    try:
        return msgspec.convert({key: msgspec.json.decode(item) for key, item in content.items() if key != "crc"}, of)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def largest_content(size: int) -> int:
    """How many bytes so many compressed ones may hold. The writer stores a chunk that would hold more as it is: so what
    a reader needs stays in proportion to the file, whoever made it.
    """
    return max(FREE_CONTENT, LARGEST_RATIO * size)


def intact(name: str, content: Mapping[str, str]) -> bool:
    """Whether the CRC of a metadata record of ours fits."""
    return content.get("crc") == _crc(name, {key: item for key, item in content.items() if key != "crc"})


def _crc(name: str, content: Mapping[str, str]) -> str:
    return str(zlib.crc32("\0".join((name, *(part for item in content.items() for part in item))).encode()))


assert set(HEAVY_FIELDS) < set(Sample.__struct_fields__)
