"""`LogWriter`: events, and the samples that they show, into a log.

What it keeps true:

- Events are encoded where they are written, so what the stream changes later does not change the log. A thread puts
  the bytes into chunks, and these into the file.
- An event is in the file at the latest 50 ms after it was written, or when 1 MiB has gathered, and never before its
  columns are.
- When the file cannot be written, what it has stays readable, and the next call says so.
"""

from __future__ import annotations

import atexit
import errno
import os
import platform
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, get_args

import msgspec

from eventbus.codecs import encoder, unencodable
from eventbus.events import Event, GroupEnded
from eventbus.log.container import Chunk, Container
from eventbus.log.format import (
    HEAVY_FIELDS,
    Compression,
    LogError,
    LogHeader,
    Payload,
    Place,
    RoundList,
    Rounds,
    StageNote,
    StoredColumns,
    channels,
    metadata_record,
    printable,
)
from eventbus.log.secrets import masked
from eventbus.sample import Sample
from eventbus.wire import SCHEMA_VERSION, WireError, encode

__all__ = ["LogWriter", "create"]

_CHUNK_SIZE: Final = 1 << 20
_FLUSH_AFTER: Final = 0.05
"""Seconds that a message waits for others at most."""


class LogWriter:
    """Writes a log, from any one thread.

    :param payload: whose per-token columns, multimodal and replay fields are stored: `"full"`, those of all samples;
        `"kept"`, those of groups that entered a batch; `"none"`.
    :param compression: of the chunks: `"zstd"`, or None for none.
    :param durable: also wait for the disk when a round has finished.
    :param overwrite: take the place of a file that is there.
    :param config: the TOML text of the run, to be kept in the log.
    :param stages: of the pipeline.
    :param limit: bytes that may wait for the file.
    :raises LogError: the file exists, or cannot be created.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        payload: Payload = "full",
        compression: Compression | None = None,
        durable: bool = False,
        overwrite: bool = False,
        config: str | None = None,
        stages: Sequence[StageNote] = (),
        limit: int = 16 << 20,
    ) -> None:
        if payload not in get_args(Payload):
            raise ValueError(f"payload={payload!r}: choose 'full', 'kept' or 'none'")
        if compression not in (None, "zstd"):
            raise ValueError(f"compression={compression!r}: choose 'zstd' or None")
        self.path = Path(path)
        self._payload = payload
        self._compression: Compression | None = compression
        self._durable = durable
        self._limit = limit
        self._channels = channels()
        self._columns: dict[_GroupKey, dict[Any, tuple[Any, Place]]] = {}
        """Per group under way: the mark of each column that is stored, and where."""
        self._kept_back: dict[_GroupKey, list[_Message]] = {}
        """Columns of groups of which it is not known yet whether they enter a batch."""
        self._rounds = RoundList()

        self._lock = threading.Condition()
        self._light, self._heavy = Chunk(), Chunk()
        self._notes: list[bytes] = []
        self._due: float | None = None
        self._sealed: deque[_Work] = deque()
        self._waiting = 0
        """Bytes that are not in the file yet."""
        self._flushes = 0
        self._closing = self._closed = False
        self._error: Exception | None = None
        """What ended the thread."""

        self._descriptor = create(self.path, overwrite)
        self._linked = os.fstat(self._descriptor).st_nlink > 0  # some network file systems never say so
        header = LogHeader(
            library=f"rolloutbus {_version('rolloutbus') or ''}".strip(),
            schema_version=SCHEMA_VERSION,
            payload=payload,
            config=None if config is None else printable(config),
            stages=list(stages),
            versions=_versions(),
            started_ns=time.time_ns(),
            command=masked(map(printable, sys.argv)),
        )
        self._thread = threading.Thread(target=self._run, name=f"rolloutbus log {self.path.name}", daemon=True)
        try:
            self._container = Container(self._descriptor, header.library)
            self._container.append_metadata("rolloutbus", metadata_record("rolloutbus", header))
            self._container.describe()
            self._thread.start()
        except BaseException as error:
            os.close(self._descriptor)
            if isinstance(error, OSError):
                raise self._failure(error) from error
            raise
        _open_writers.add(self)

    # What its owner calls

    def write(self, event: Event, samples: Sequence[Sequence[Sample]] | None = None) -> None:
        """Write an event, and whole the samples that it shows, in the nesting of `event.samples`.

        Blocks while more than `limit` bytes wait for the file.

        :raises LogError: the log cannot be written any more, or is closed.
        :raises WireError: something cannot be encoded. Nothing of the event is written.
        """
        if self.full:
            self.wait()
        self.write_nowait(event, samples)

    def write_nowait(self, event: Event, samples: Sequence[Sequence[Sample]] | None = None) -> None:
        """As `write`, but never blocks: whoever calls it watches `full`."""
        if self._error is not None or self._closed:
            raise self._unusable()
        kind: str = event.kind
        channel = self._channels.get(f"/{kind}")
        if channel is None:
            raise TypeError(f"an event of the unknown kind {kind!r} cannot be written again")
        sequence, time_ns = event.seq & 0xFFFFFFFF, event.time_ns
        heavy: list[_Message] = []
        try:
            data = encode(event)
            columns = self._stored(event, samples) if samples and self._payload != "none" else None
        except WireError:
            self._rounds.count(event, kind, lost=True)
            raise
        if columns is not None:
            message = (sequence, time_ns, columns)
            if self._payload == "full":
                heavy.append(message)
            else:
                self._kept_back.setdefault(_group(event), []).append(message)
        elif type(event) is GroupEnded:
            self._columns.pop(_group(event), None)
            kept_back = self._kept_back.pop(_group(event), [])
            if event.outcome == "kept":
                heavy = kept_back
        part = self._rounds.count(event, kind)
        if kind == "rollout_finished" and part.finished:
            self._forget(event.rollout_id, event.evaluation)
        note = metadata_record("rollout", part) if kind in _NOTED else None
        with self._lock:
            for message in heavy:
                self._heavy.add(1, *message)
                self._waiting += len(message[-1])
            if self._heavy.size >= _CHUNK_SIZE:
                self._seal_heavy()
            self._light.add(channel, sequence, time_ns, data)
            self._waiting += len(data)
            if note:
                self._notes.append(note)
            if self._light.size >= _CHUNK_SIZE:
                self._seal()
            elif self._due is None:
                self._due = time.monotonic() + _FLUSH_AFTER
                self._lock.notify_all()
            if self._durable and kind in ("rollout_finished", "batch_trained"):
                self._seal()
                self._sealed.append("sync")

    def flush(self) -> None:
        """Wait until all that was written is in the file.

        :raises LogError: it cannot be written.
        """
        with self._lock:
            if self._closing:
                raise self._unusable()
            self._seal()
            self._sealed.append("flushed")
            self._flushes += 1
            self._lock.notify_all()
            self._lock.wait_for(lambda: not self._flushes or self._error is not None or self._closed)
        if self._error is not None:
            raise self._unusable()

    @property
    def full(self) -> bool:
        """More than `limit` bytes wait for the file. Not when it cannot be written any more: the next call says so."""
        return self._waiting > self._limit and not self._closed

    def wait(self) -> None:
        """Block until at most half of `limit` waits for the file, or it cannot be written any more."""
        with self._lock:
            self._lock.wait_for(lambda: self._waiting <= self._limit // 2 or self._error is not None or self._closed)

    def close(self) -> None:
        """Write what is left and the file's end. Closing twice does nothing.

        :raises LogError: it could not be written. What was written before stays readable.
        """
        with self._lock:
            first, self._closing = not self._closing, True
            self._lock.notify_all()
        self._thread.join()
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            _open_writers.discard(self)
            try:
                os.close(descriptor)
            except OSError as error:  # some file systems tell only now that the disk is full
                self._error = self._error or error
        if first and self._error is not None:
            raise self._unusable()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except LogError:
            if not isinstance(error, LogError):  # else it is known
                raise

    # Columns

    def _stored(self, event: Any, samples: Sequence[Sequence[Sample]]) -> bytes:
        """The heavy fields of an event's samples, encoded. What an earlier event holds is referred to."""
        key = _group(event)
        known = self._columns.setdefault(key, {})
        stored: list[list[StoredColumns]] = []
        try:
            for i, (lights, execution) in enumerate(zip(event.samples, samples, strict=True)):
                row: list[StoredColumns] = []
                for j, (light, sample) in enumerate(zip(lights, execution, strict=True)):
                    values: dict[str, Any] = {}
                    same: dict[str, Place] = {}
                    for name, mark in light.columns.items():
                        if name == "tokens" and not mark[0]:
                            continue
                        what: Any = (sample.rollout_id, sample.index, name)
                        before = known.get(what)
                        if before is not None and before[0] == mark:
                            same[name] = before[1]
                        else:
                            values[name] = getattr(sample, name)
                            known[what] = (mark, (event.seq, event.time_ns, i, j))
                    for name in _UNMARKED:
                        value = getattr(sample, name)
                        if value is None:
                            continue
                        content = encoder.encode(value)
                        what = (name, _digest(content))
                        before = known.get(what)
                        if before is not None:
                            same[name] = before[1]
                        else:
                            values[name] = msgspec.Raw(content)
                            known[what] = (None, (event.seq, event.time_ns, i, j))
                    row.append(StoredColumns(values, same))
                stored.append(row)
            return encoder.encode((SCHEMA_VERSION, stored))
        except Exception as error:
            self._columns.pop(key)
            raise unencodable([list(execution) for execution in samples], error) from error

    def _forget(self, rollout_id: int, evaluation: bool) -> None:
        for mapping in (self._columns, self._kept_back):
            for key in [key for key in mapping if key[:2] == (rollout_id, evaluation)]:
                del mapping[key]

    # The thread

    def _seal_heavy(self) -> None:
        if self._heavy.size:
            self._sealed.append(self._heavy)
            self._heavy = Chunk()
            self._lock.notify_all()

    def _seal(self) -> None:
        """What is gathered goes into the file next, columns before their events."""
        self._due = None
        self._seal_heavy()
        if self._light.size:
            self._sealed.append(self._light)
            self._light = Chunk()
        self._sealed.extend(self._notes)
        self._notes.clear()
        self._lock.notify_all()

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except Exception as error:
            self._error = error
        finally:
            with self._lock:
                self._closed = True
                self._sealed.clear()
                self._lock.notify_all()

    def _step(self) -> bool:
        with self._lock:
            while not self._sealed and not self._closing:
                left = None if self._due is None else self._due - time.monotonic()
                if left is not None and left <= 0:
                    self._seal()
                    break
                self._lock.wait(left)
            if self._closing:
                self._seal()
            if not self._sealed:
                return self._finish()
            work = self._sealed.popleft()
        if isinstance(work, Chunk):
            self._container.append(work, self._compression)
            with self._lock:
                self._waiting -= work.payload
                if self._waiting <= self._limit // 2:
                    self._lock.notify_all()
        elif isinstance(work, bytes):
            self._check_there()
            self._container.append_metadata("rollout", work)
        elif work == "sync":
            self._container.sync()
        else:
            with self._lock:
                self._flushes -= 1
                self._lock.notify_all()
        return True

    def _check_there(self) -> None:
        if self._linked and not os.fstat(self._descriptor).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "the file was removed while it was written")

    def _finish(self) -> bool:
        self._check_there()
        self._container.append_metadata("rounds", metadata_record("rounds", Rounds(self._rounds.all)))
        self._container.finish()
        if self._durable:
            self._container.sync()
        return False

    # Errors

    def _failure(self, error: Exception) -> LogError:
        text = f"{self.path}: the log cannot be written: {_reason(error)}"
        if not isinstance(error, FileNotFoundError):
            text += "; what it has is readable, `rolloutbus log recover` makes a finished file of it"
        return LogError(text)

    def _unusable(self) -> LogError:
        """A new error each time: whoever raises it may add notes."""
        if self._error is None:
            return LogError(f"{self.path}: the log is closed")
        failure = self._failure(self._error)
        failure.__cause__ = self._error
        return failure


_GroupKey = tuple[int, bool, int | None]
_Message = tuple[int, int, bytes]
_Work = Chunk | bytes | str
_UNMARKED: Final = HEAVY_FIELDS[4:]
_NOTED: Final = frozenset({"rollout_started", "rollout_finished", "batch_trained", "weights_updated"})
_open_writers: Final[set[LogWriter]] = set()


@atexit.register
def _close_all() -> None:
    """What was written is in the file, also when the interpreter exits before anybody closed the log."""
    for writer in list(_open_writers):
        if writer._thread.is_alive():  # it is not, in a process that was forked off
            with suppress(LogError):
                writer.close()


def _group(event: Any) -> _GroupKey:
    return event.rollout_id, event.evaluation, event.group_index


def _digest(content: bytes) -> bytes:
    from hashlib import blake2b

    return blake2b(content, digest_size=16).digest()


def create(path: Path, overwrite: bool) -> int:
    """A descriptor of a new file.

    :raises LogError: there is one, or it cannot be created.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | (os.O_TRUNC if overwrite else os.O_EXCL)
    try:
        return os.open(path, flags, 0o666)
    except FileExistsError as error:
        if path.is_dir():
            raise LogError(f"{path}: a folder; give the path of a file in it") from error
        raise LogError(f"{path}: the file exists; choose another path, or say overwrite to replace it") from error
    except OSError as error:
        raise LogError(f"{path}: the log cannot be created: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


@cache
def _versions() -> dict[str, str]:
    names = ("rolloutbus", "msgspec", "anyio", "mcap", "torch", "sglang", "megatron-core")
    found = {name: number for name in names if (number := _version(name))}
    return {"python": platform.python_version(), **found}
