"""Writing an MCAP file chunk by chunk: the part of the log that knows records and positions, and nothing of events.

MCAP's own writer fills one chunk at a time; a log fills two, and a chunk is handed over whole. After `append` has
returned, what it wrote is in the file to its last byte; if it raises, the file ends where it ended before.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final

from mcap.opcode import Opcode
from mcap.records import ChunkIndex, DataEnd, Footer, Header, MetadataIndex, Statistics, SummaryOffset

from eventbus.log.format import CHUNK_FIELDS, MAGIC, MESSAGE, PROFILE, RECORD, Compression, largest_content, packed
from eventbus.log.format import described as own

__all__ = ["Chunk", "Container"]

_LENGTH: Final = struct.Struct("<Q")


class Chunk:
    """Messages on their way into the file.

    They are copied into memory that is used again for later chunks: fresh memory costs more than the copy.
    """

    __slots__ = ("_memory", "_room", "end", "index", "payload", "size", "start")
    _spare: ClassVar[list[memoryview]] = []

    def __init__(self) -> None:
        try:
            self._memory = self._spare.pop()
        except IndexError:
            self._memory = memoryview(bytearray(_ROOM))
        self._room = len(self._memory)
        self.size = self.payload = 0
        self.start = self.end = 0
        self.index: dict[int, list[int]] = {}
        """Per channel: time and position of each message, flat."""

    def add(self, channel: int, sequence: int, time_ns: int, data: bytes) -> None:
        place, length = self.size, len(data)
        begin = place + MESSAGE.size
        self.size = size = begin + length
        if size > self._room:
            self._grow(place)
        MESSAGE.pack_into(self._memory, place, Opcode.MESSAGE, 22 + length, channel, sequence, time_ns, time_ns)
        self._memory[begin:size] = data
        self.payload += length
        if not place:
            self.start = self.end = time_ns
        elif time_ns > self.end:
            self.end = time_ns
        elif time_ns < self.start:
            self.start = time_ns
        places = self.index.get(channel)
        if places is None:
            self.index[channel] = [time_ns, place]
        else:
            places += (time_ns, place)

    def add_records(self, records: bytes) -> None:
        """Records that are no messages."""
        place, self.size = self.size, self.size + len(records)
        if self.size > self._room:
            self._grow(place)
        self._memory[place : self.size] = records

    @property
    def content(self) -> memoryview:
        return self._memory[: self.size]

    def free(self) -> None:
        """Give the memory back."""
        if self._room == _ROOM and len(self._spare) < _SPARE:
            self._spare.append(self._memory)
        del self._memory

    def _grow(self, used: int) -> None:
        memory = memoryview(bytearray(max(self.size, 2 * self._room)))
        memory[:used] = self._memory[:used]
        self._memory, self._room = memory, len(memory)


class Container:
    """An MCAP file being written.

    :param descriptor: of a new, empty file. It stays the caller's.
    :param described: schemas and channels of another file, to be taken over: the records of each, by opcode.
    """

    def __init__(self, descriptor: int, library: str, described: Mapping[int, Sequence[bytes]] | None = None) -> None:
        self._descriptor = descriptor
        self._compressor: Any = None
        self._position = 0
        # What the index will say, packed: a run of days has millions of chunks.
        self._chunks, self._metadata = bytearray(), bytearray()
        self._chunk_count = self._metadata_count = 0
        self._start, self._end = 1 << 64, 0
        self._messages: Counter[int] = Counter()
        self._described = {Opcode.SCHEMA: [], Opcode.CHANNEL: [], **described} if described else own()
        self._write([MAGIC, packed(Header(profile=PROFILE, library=library))])

    def describe(self) -> None:
        """Write what the channels are: to come before the first message."""
        chunk = Chunk()
        chunk.add_records(b"".join((*self._described[Opcode.SCHEMA], *self._described[Opcode.CHANNEL])))
        self.append(chunk)

    def append(self, chunk: Chunk, compression: Compression | None = None) -> None:
        """Write a chunk, which is used up by it."""
        start, end, index, size = chunk.start, chunk.end, chunk.index, chunk.size
        data: bytes | memoryview = chunk.content
        crc = zlib.crc32(data)
        if compression is not None:
            if self._compressor is None:
                self._compressor = _compressor()
            compressed = self._compressor.compress(data)
            if size <= largest_content(len(compressed)):
                data = compressed
            else:
                compression = None
        length = len(data)
        name = compression or ""
        head = b"".join(
            (
                RECORD.pack(Opcode.CHUNK, CHUNK_FIELDS.size + len(name) + 8 + length),
                CHUNK_FIELDS.pack(start, end, size, crc, len(name)),
                name.encode(),
                _LENGTH.pack(length),
            )
        )
        position, whole = self._position, len(head) + length
        tail: list[bytes] = []
        offsets: dict[int, int] = {}
        place = position + whole
        for channel, places in index.items():
            offsets[channel] = place
            record = struct.pack(
                f"<BQHI{len(places)}Q", Opcode.MESSAGE_INDEX, 6 + 8 * len(places), channel, 8 * len(places), *places
            )
            tail.append(record)
            place += len(record)
        self._write([head, data, *tail])
        chunk.free()
        for channel, places in index.items():
            self._messages[channel] += len(places) // 2
        if index:
            self._start, self._end = min(self._start, start), max(self._end, end)
        self._chunk_count += 1
        self._chunks += packed(
            ChunkIndex(
                chunk_length=whole,
                chunk_start_offset=position,
                compression=name,
                compressed_size=length,
                message_end_time=end,
                message_index_length=place - position - whole,
                message_index_offsets=offsets,
                message_start_time=start,
                uncompressed_size=size,
            )
        )

    def append_metadata(self, name: str, record: bytes) -> None:
        position = self._position
        self._write([record])
        self._metadata_count += 1
        self._metadata += packed(MetadataIndex(offset=position, length=len(record), name=name))

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        os.fsync(self._descriptor)

    def finish(self) -> None:
        """Write the end: the summary that readers find their way by."""
        statistics = Statistics(
            attachment_count=0,
            channel_count=len(self._described[Opcode.CHANNEL]),
            channel_message_counts=dict(self._messages),
            chunk_count=self._chunk_count,
            message_count=self._messages.total(),
            message_end_time=self._end,
            message_start_time=min(self._start, self._end),
            metadata_count=self._metadata_count,
            schema_count=len(self._described[Opcode.SCHEMA]),
        )
        groups: list[tuple[int, bytes | bytearray]] = [
            (Opcode.SCHEMA, b"".join(self._described[Opcode.SCHEMA])),
            (Opcode.CHANNEL, b"".join(self._described[Opcode.CHANNEL])),
            (Opcode.STATISTICS, packed(statistics)),
            (Opcode.CHUNK_INDEX, self._chunks),
            (Opcode.METADATA_INDEX, self._metadata),
        ]
        end = packed(DataEnd(0))
        start = place = self._position + len(end)
        summary: list[bytes | bytearray] = []
        offsets: list[bytes] = []
        for opcode, content in groups:
            summary.append(content)
            if content:
                offsets.append(packed(SummaryOffset(group_opcode=opcode, group_start=place, group_length=len(content))))
            place += len(content)
        summary += offsets
        summary.append(packed(Footer(summary_start=start, summary_offset_start=place, summary_crc=0))[:-4])
        crc = 0
        for content in summary:
            crc = zlib.crc32(content, crc)
        self._write([end, *summary, crc.to_bytes(4, "little"), MAGIC])

    def _write(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """All of it or, as far as that is possible, nothing.

        :raises OSError: it could not be written.
        """
        left = [memoryview(part) for part in parts if part]
        try:
            while left:
                written = os.writev(self._descriptor, left[:_IOV_MAX])
                self._position += written
                while left and written >= len(left[0]):
                    written -= len(left.pop(0))
                if written:
                    left[0] = left[0][written:]
        except OSError:
            self._position -= sum(map(len, parts)) - sum(map(len, left))
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._position)
                os.lseek(self._descriptor, self._position, os.SEEK_SET)
            raise


_IOV_MAX: Final = 512
_ROOM: Final = (1 << 20) + (1 << 18)
"""Bytes that a chunk has at first."""
_SPARE: Final = 16


def _compressor() -> Any:
    import zstandard

    return zstandard.ZstdCompressor(level=1)
