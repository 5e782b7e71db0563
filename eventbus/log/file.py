"""Reading an MCAP file as it is: its chunks and metadata, found by its index or by walking over its records.

Nothing here raises for damage. What cannot be read is noted in `damage`, and the reading goes on behind it. Lengths are
believed as far as the file goes: no more memory is taken than what is there can fill, or unfold to (`largest_content`).
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator
from typing import Final

import msgspec
from mcap.opcode import Opcode

from eventbus.log.format import (
    CHUNK_FIELDS,
    MAGIC,
    MESSAGE,
    PROFILE,
    RECORD,
    LogError,
    channels,
    intact,
    largest_content,
)

__all__ = ["Damage", "LogFile", "StoredChunk", "Unreadable", "messages"]


class Damage(msgspec.Struct):
    """Something in a log that could not be read. `str()` is one line."""

    position: int
    """Where in the file, in bytes."""
    length: int
    reason: str
    first_seq: int | None = None
    """The events that are missing: from here to `last_seq`. None where that is not known."""
    last_seq: int | None = None

    def __str__(self) -> str:
        text = f"byte {self.position}"
        if self.length:
            text += f" to {self.position + self.length}"
        if self.first_seq is not None or self.last_seq is not None:
            first, last = self.first_seq, self.last_seq
            text += f", events {'?' if first is None else first} to {'?' if last is None else last}"
        return f"{text}: {self.reason}"


class StoredChunk(msgspec.Struct, frozen=True):
    """Where a chunk is, and what it says of its content."""

    position: int
    length: int
    size: int
    """Of the data, as they are in the file: the last bytes of the record."""
    compression: str
    content_size: int
    start: int
    end: int
    channels: frozenset[int]


class Unreadable(Exception):
    """Why a piece of the file cannot be read."""


Message = tuple[int, int, int, int, int]
"""Channel, sequence, time, and in the chunk's content: start and end of the data."""


def messages(content: bytes) -> Iterator[Message]:
    """The messages of a chunk.

    :raises Unreadable: it does not consist of records, though its CRC fits.
    """
    place, size, unpack = 0, len(content), MESSAGE.unpack_from
    try:
        while place < size:
            opcode, length = RECORD.unpack_from(content, place)
            end = place + RECORD.size + length
            if end > size:
                raise Unreadable("a record of the chunk ends behind it")
            if opcode == Opcode.MESSAGE:
                _, _, channel, sequence, time_ns, _ = unpack(content, place)
                yield channel, sequence, time_ns, place + MESSAGE.size, end
            place = end
    except struct.error:
        raise Unreadable("a record of the chunk is too short") from None


class LogFile:
    """An open log.

    :raises LogError: it cannot be opened, or is something else.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise LogError(f"{self.path}: the log cannot be opened: {error.strerror or error}") from error
        self.chunks: list[StoredChunk] = []
        self.channels: dict[int, str] = {}
        """Topic by channel."""
        self.described: dict[int, list[bytes]] = {}
        """The records that say what the channels are, by opcode."""
        self.metadata: list[tuple[int, str, dict[str, str]]] = []
        """Position, name and content of each metadata record."""
        self.damage: dict[tuple[int, str, int | None], Damage] = {}
        self.finished = False
        self.indexed = False
        """The file has its index: nothing but that was read."""
        self._tail: tuple[int, str] | None = None
        self._linked = os.fstat(self._descriptor).st_nlink > 0
        """What some network file systems never say."""
        try:
            self._open()
        except OSError as error:
            self.close()
            raise LogError(f"{self.path}: the log cannot be read: {error.strerror or error}") from error
        except LogError:
            self.close()
            raise

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read(self, position: int, length: int) -> bytes:
        """So many bytes, or those that there are."""
        if self._descriptor < 0:
            raise LogError(f"{self.path}: the log is closed")
        parts = []
        length = min(length, self.size - position)
        while length > 0 and (part := os.pread(self._descriptor, length, position)):
            parts.append(part)
            position += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def content(self, chunk: StoredChunk) -> bytes:
        """What a chunk holds, checked.

        :raises Unreadable: it is damaged.
        """
        record = self.read(chunk.position, chunk.length)
        if len(record) < chunk.length:
            raise Unreadable("the file ends before the chunk does")
        begun = _chunk_of(chunk.position, record[:_HEAD_SIZE])
        if begun is None or record[0] != Opcode.CHUNK or (begun.length, begun.size) != (chunk.length, chunk.size):
            raise Unreadable("no chunk begins where one should")
        data = memoryview(record)[chunk.length - chunk.size :]
        content = _decompressed(data, chunk) if chunk.compression else data.tobytes()
        crc = CHUNK_FIELDS.unpack_from(record, RECORD.size)[3]
        if crc and zlib.crc32(content) != crc:
            raise Unreadable("the chunk's CRC does not fit")
        if not crc and not _whole(content):  # other writers may leave it out
            raise Unreadable("the chunk has no CRC, and is damaged")
        return content

    def note(
        self, position: int, length: int, reason: str, first_seq: int | None = None, last_seq: int | None = None
    ) -> Damage:
        """Note damage, once."""
        damage = Damage(position, length, reason, first_seq, last_seq)
        return self.damage.setdefault((position, reason, first_seq), damage)

    # Opening

    def _open(self) -> None:
        start = self.read(0, 4096)
        if MAGIC.startswith(start):
            raise LogError(f"{self.path}: the file is empty: its writer ended before it wrote anything")
        if not start.startswith(MAGIC):
            if PROFILE.encode() not in start:
                raise LogError(f"{self.path}: this is no log: it does not begin as an MCAP file does")
            self.note(0, len(MAGIC), "the file does not begin as an MCAP file does")
        self._next = len(MAGIC)
        try:
            indexed = self._read_index()
        except (struct.error, ValueError):  # its CRC fits, and it is none
            self.note(self.size, 0, _INDEX_DAMAGED)
            indexed = False
        if not indexed:
            self.chunks.clear()
            self.described.clear()
            self.channels.clear()
            self.metadata.clear()
            self.grow()
            if self.finished and self._summary() is None:
                self._note_end()
        if not self.channels:
            self.channels = {number: topic for topic, number in channels().items()}
            self.described.clear()

    def _note_end(self) -> None:
        """Say what is wrong behind the records of a file whose index cannot be used."""
        place, size = self._next, self.size
        while place < size and len(head := self.read(place, RECORD.size)) == RECORD.size:
            opcode, length = RECORD.unpack(head)
            if not Opcode.FOOTER <= opcode <= Opcode.DATA_END:
                break
            place += RECORD.size + length
            if opcode != Opcode.FOOTER:
                continue
            if self.read(place, len(MAGIC)) != MAGIC:
                break
            place += len(MAGIC)
            if place < size:
                self.note(place, size - place, _GOES_ON)
            elif self.read(place - len(MAGIC) - 4, 4) == bytes(4):
                return  # the index has no CRC, as other writers may leave it: nothing is wrong
            else:
                break
            return
        self.note(self._next, size - self._next, _INDEX_DAMAGED)

    def _summary(self) -> bytes | None:
        """The summary at the file's end and the footer behind it, if they are there and whole."""
        size = self.size
        if size < 2 * len(MAGIC) + _FOOTER.size or self.read(size - len(MAGIC), len(MAGIC)) != MAGIC:
            return None
        opcode, length, start, _, crc = _FOOTER.unpack(self.read(size - len(MAGIC) - _FOOTER.size, _FOOTER.size))
        if opcode != Opcode.FOOTER or length != 20 or not len(MAGIC) <= start < size:
            return None
        summary = self.read(start, size - len(MAGIC) - 4 - start)
        return summary if zlib.crc32(summary) == crc else None

    def _read_index(self) -> bool:
        """Find everything by the summary, where there is one that is whole."""
        summary = self._summary()
        if summary is None:
            return False
        offsets = []
        told: tuple[int, ...] | None = None
        place, end = 0, len(summary) - _FOOTER.size + 4
        while place < end:
            opcode, length = RECORD.unpack_from(summary, place)
            place += RECORD.size
            body = summary[place : place + length]
            place += length
            if opcode == Opcode.CHUNK_INDEX:
                self.chunks.append(_indexed(body))
            elif opcode in (Opcode.SCHEMA, Opcode.CHANNEL):
                self._describe(opcode, body)
            elif opcode == Opcode.METADATA_INDEX:
                offsets.append((*struct.unpack_from("<QQ", body), body[20:]))
            elif opcode == Opcode.STATISTICS:
                told = _STATISTICS.unpack_from(body)
        # Other writers may leave parts of it out.
        if told is not None:
            count, *_, metadata, chunks = told
            if count and not chunks:
                raise LogError(f"{self.path}: its messages lie in no chunks: no log that rolloutbus wrote")
            if (metadata, chunks) != (len(offsets), len(self.chunks)):
                return False
        if any(chunk.end and not chunk.channels for chunk in self.chunks):
            return False
        needed = {b"rolloutbus", b"rounds"}
        if not needed <= {name for *_, name in offsets}:
            needed.add(b"rollout")
        for position, length, name in offsets:
            if name in needed:
                self._metadata(position, self.read(position, length))
        self._check_profile(self.read(len(MAGIC), 4096))
        self._next = self.size
        self.finished = self.indexed = True
        return True

    def _metadata(self, position: int, record: bytes) -> bool:
        try:
            name, fields = _metadata(record)
        except (ValueError, struct.error):
            self.note(position, len(record), "a metadata record is damaged")
            return False
        if "crc" in fields and not intact(name, fields):
            self.note(position, len(record), f"a metadata record ({name}) is damaged")
        self.metadata.append((position, name, fields))
        return True

    def _check_profile(self, start: bytes) -> None:
        profile = PROFILE.encode()
        if start[RECORD.size :].startswith(len(profile).to_bytes(4, "little") + profile) and start[0] == Opcode.HEADER:
            return
        if profile not in start:
            raise LogError(f"{self.path}: this is an MCAP file, but no log of rolloutbus")
        self.note(len(MAGIC), 0, "the file's header is damaged")

    # Walking over a file without an index

    def grow(self) -> bool:
        """Walk over the records that were added since. Whether there were any."""
        began = self._next
        size = self.size
        self._tail = None
        while self._next < size and not self.finished:
            position = self._next
            after = self._record(position, size)
            if after is None:
                after = self._resume(position, size)
                if after is None:
                    self._tail = position, "the file ends in the middle of a record"
                    break
                self.note(position, after - position, "no record can be read here")
            self._next = after
        return self._next > began

    def check_there(self) -> None:
        """:raises LogError: the file that grows was cut off, or nobody finds it any more."""
        if self.size < self._next:
            raise LogError(f"{self.path}: the file was cut off, or written anew, while it was read")
        if self._linked and not os.fstat(self._descriptor).st_nlink:
            raise LogError(f"{self.path}: the file was removed while it was read")

    @property
    def tail(self) -> Damage | None:
        """What is at the end of a file that was not closed, and no whole record."""
        if self._tail is None:
            return None
        position, reason = self._tail
        return Damage(position, self.size - position, reason)

    def _record(self, position: int, size: int) -> int | None:
        """Read the record at `position`. Where the next one is; None if this is none, or is not whole."""
        head = self.read(position, 128)
        if len(head) < RECORD.size:
            return None
        opcode, length = RECORD.unpack_from(head)
        after: int = position + RECORD.size + length
        if after > size:
            return None
        if opcode == Opcode.CHUNK:
            return self._chunk(position, head, after, size)
        body = self.read(position, RECORD.size + length) if length < _LARGE else b""
        if opcode == Opcode.METADATA:
            return after if self._metadata(position, body) else None
        if opcode == Opcode.HEADER and position == len(MAGIC):
            self._check_profile(body)
            return after
        if opcode == Opcode.DATA_END and length == 4:
            self.finished = True
            return after
        return None

    def _chunk(self, position: int, head: bytes, after: int, size: int) -> int | None:
        chunk = _chunk_of(position, head)
        if chunk is None or chunk.position + chunk.length != after:
            return None
        numbers: set[int] = set()
        start, end = 1 << 64, 0
        while True:
            entry = self.read(after, 15)
            if len(entry) < 15 or entry[0] != Opcode.MESSAGE_INDEX:
                break
            _, length, channel, listed = _INDEX.unpack(entry)
            if length != 6 + listed or listed % 16 or after + RECORD.size + length > size:
                break
            if listed // 16 * MESSAGE.size > chunk.content_size:
                break
            times = struct.unpack(f"<{listed // 8}Q", self.read(after + 15, listed))[::2]
            numbers.add(channel)
            start, end = min(start, *times, start), max(end, *times, end)
            after += RECORD.size + length
        # It describes channels, or the file ends behind it: it says itself what it holds.
        if not numbers or not numbers <= self.channels.keys():
            try:
                content = self.content(chunk)
                for opcode, body in _descriptions(content):
                    self._describe(opcode, body)
                found = list(messages(content))
            except (Unreadable, struct.error, ValueError) as error:
                self.note(position, chunk.length, str(error))
                return after
            numbers = {channel for channel, *_ in found}
            found_times = [time_ns for _, _, time_ns, *_ in found]
            start, end = min(found_times, default=0), max(found_times, default=0)
        if (start, end) != (chunk.start, chunk.end):  # one of both is damaged: it may hold any time
            chunk = msgspec.structs.replace(chunk, start=0, end=(1 << 64) - 1)
        self.chunks.append(msgspec.structs.replace(chunk, channels=frozenset(numbers)))
        return after

    def _describe(self, opcode: int, body: bytes) -> None:
        """Take note of a schema or channel."""
        self.described.setdefault(opcode, []).append(RECORD.pack(opcode, len(body)) + body)
        if opcode == Opcode.CHANNEL:
            number, _, length = _CHANNEL.unpack_from(body)
            self.channels[number] = body[_CHANNEL.size : _CHANNEL.size + length].decode()

    def _resume(self, position: int, size: int) -> int | None:
        """Where the next whole chunk begins."""
        place = position + 1
        while place < size:
            window = self.read(place, _WINDOW)
            for match in _CHUNK_HEAD.finditer(window):
                found = place + match.start()
                chunk = _chunk_of(found, window[match.start() : match.start() + _HEAD_SIZE])
                if chunk is not None and found + chunk.length <= size:
                    try:
                        self.content(chunk)
                    except Unreadable:
                        continue
                    return found
            place += max(1, len(window) - _HEAD_SIZE)
            if len(window) < _WINDOW:
                return None
        return None


_FOOTER: Final = struct.Struct("<BQQQI")
_INDEX_DAMAGED: Final = "the index at the file's end is damaged; the file was searched instead"
_GOES_ON: Final = "the log ends before this; what follows, such as another file that was appended, is not read"
_CHANNEL: Final = struct.Struct("<HHI")
_COUNT: Final = struct.Struct("<I")
_STATISTICS: Final = struct.Struct("<QHIIII")
"""How many messages, schemas, channels, attachments, metadata records and chunks."""
_INDEX: Final = struct.Struct("<BQHI")
_TIMES: Final = struct.Struct("<QQQQI")
_LARGE: Final = 64 << 20
_WINDOW: Final = 1 << 20
_HEAD_SIZE: Final = 64
_CHUNK_HEAD: Final = re.compile(rb"(?=\x06.{36}(?:\0{4}|\x04\0{3}zstd|\x03\0{3}lz4).{8})", re.DOTALL)


def _metadata(record: bytes) -> tuple[str, dict[str, str]]:
    """Name and content of a metadata record.

    :raises ValueError: it is damaged.
    """
    place = RECORD.size

    def text() -> str:
        nonlocal place
        (length,) = _COUNT.unpack_from(record, place)
        place += 4 + length
        if place > len(record):
            raise ValueError
        return record[place - length : place].decode()

    opcode, length = RECORD.unpack_from(record)
    name = text()
    (size,) = _COUNT.unpack_from(record, place)
    place += 4
    if opcode != Opcode.METADATA or length != len(record) - RECORD.size or place + size != len(record):
        raise ValueError
    fields: dict[str, str] = {}
    while place < len(record):
        key = text()
        fields[key] = text()
    return name, fields


def _whole(content: bytes) -> bool:
    """Whether it consists of records."""
    place = 0
    while place + RECORD.size <= len(content):
        opcode, length = RECORD.unpack_from(content, place)
        if opcode not in (Opcode.SCHEMA, Opcode.CHANNEL, Opcode.MESSAGE) or length < (opcode == Opcode.MESSAGE) * 22:
            return False
        place += RECORD.size + length
    return place == len(content)


def _descriptions(content: bytes) -> Iterator[tuple[int, bytes]]:
    place = 0
    while place < len(content):
        opcode, length = RECORD.unpack_from(content, place)
        place += RECORD.size
        if opcode in (Opcode.SCHEMA, Opcode.CHANNEL):
            yield opcode, content[place : place + length]
        place += length


def _indexed(body: bytes) -> StoredChunk:
    start, end, position, length, listed = _TIMES.unpack_from(body)
    place = _TIMES.size + listed
    numbers = frozenset(struct.unpack_from("<H", body, at)[0] for at in range(_TIMES.size, place, 10))
    _, named = struct.unpack_from("<QI", body, place)
    place += 12 + named
    size, content_size = struct.unpack_from("<QQ", body, place)
    return StoredChunk(position, length, size, body[place - named : place].decode(), content_size, start, end, numbers)


def _chunk_of(position: int, head: bytes) -> StoredChunk | None:
    """The chunk that begins so, if its numbers fit together."""
    if len(head) < RECORD.size + CHUNK_FIELDS.size + 8:
        return None
    _, length = RECORD.unpack_from(head)
    start, end, content_size, _, named = CHUNK_FIELDS.unpack_from(head, RECORD.size)
    place = RECORD.size + CHUNK_FIELDS.size
    if named > 8 or len(head) < place + named + 8:
        return None
    compression = head[place : place + named].decode("ascii", "replace")
    (size,) = struct.unpack_from("<Q", head, place + named)
    if length != CHUNK_FIELDS.size + named + 8 + size or (not compression and size != content_size):
        return None
    if compression not in ("", "zstd", "lz4"):
        return None
    return StoredChunk(position, RECORD.size + length, size, compression, content_size, start, end, frozenset())


def _decompressed(data: memoryview, chunk: StoredChunk) -> bytes:
    if chunk.content_size > (largest := largest_content(chunk.size)):
        raise Unreadable(f"the chunk would unfold to {chunk.content_size} bytes, and may to {largest}")
    try:
        if chunk.compression == "zstd":
            import zstandard

            if zstandard.frame_content_size(data) not in (-1, chunk.content_size):
                raise Unreadable("the chunk does not decompress: it has another size")
            return zstandard.ZstdDecompressor().decompress(data, max_output_size=chunk.content_size)
        if chunk.compression == "lz4":
            import lz4.frame  # type: ignore[import-untyped, import-not-found, unused-ignore]

            return bytes(lz4.frame.LZ4FrameDecompressor().decompress(data, max_length=chunk.content_size))
    except Unreadable:
        raise
    except ImportError:
        raise Unreadable(f"the chunk is compressed with {chunk.compression}, which is not installed") from None
    except Exception as error:
        raise Unreadable(f"the chunk does not decompress: {error}") from error
    raise Unreadable(f"the chunk is compressed with {chunk.compression!r}, which this version cannot read")
