"""`recover`: a finished log out of one that was cut off or damaged."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from eventbus.log.container import Chunk, Container
from eventbus.log.file import Damage, Unreadable, messages
from eventbus.log.format import COLUMNS, LogError, Rounds, metadata_record
from eventbus.log.reader import LogReader
from eventbus.log.writer import create

__all__ = ["RecoverReport", "recover"]


class RecoverReport(msgspec.Struct):
    """What `recover` could save. `str()` is one line."""

    events: int = 0
    rounds: int = 0
    unfinished: int = 0
    """Of the rounds: their end is missing."""
    damage: list[Damage] = []
    """What could not be read."""

    def __str__(self) -> str:
        text = f"{self.events} events of {self.rounds} rounds saved"
        if self.unfinished:
            text += f" ({self.unfinished} of them unfinished)"
        return text + (f"; {len(self.damage)} places could not be read" if self.damage else "")


def recover(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, overwrite: bool = False
) -> RecoverReport:
    """Write a finished copy of a log with everything in it that is readable. `source` stays as it is.

    :param overwrite: take the place of a `target` that is there.
    :raises LogError: `source` is no log, or `target` exists or cannot be written.
    """
    with LogReader(source) as reader:
        if os.path.exists(target) and os.path.samefile(source, target):
            raise LogError(f"{target}: a log cannot be recovered into itself; choose another path")
        descriptor = create(Path(target), overwrite)
        try:
            try:
                return _copy(reader, descriptor)
            finally:
                os.close(descriptor)
        except BaseException as error:
            if os.path.isfile(target):  # half of a log would pass for all that could be saved
                os.unlink(target)
            if isinstance(error, OSError):
                raise LogError(f"{target}: the log cannot be written: {error.strerror or error}") from error
            raise


def _copy(reader: LogReader, descriptor: int) -> RecoverReport:
    file, report = reader._file, RecoverReport()
    rounds = reader.rounds
    container = Container(descriptor, reader.header.library, described=file.described)
    container.append_metadata("rolloutbus", metadata_record("rolloutbus", reader.header))
    container.describe()
    for stored in file.chunks:
        try:
            content = file.content(stored)
        except Unreadable as error:
            file.note(stored.position, stored.length, str(error))
            continue
        chunk = Chunk()
        try:
            for channel, sequence, time_ns, start, end in messages(content):
                chunk.add(channel, sequence, time_ns, content[start:end])
                report.events += file.channels.get(channel) != COLUMNS
        except Unreadable as error:
            file.note(stored.position, stored.length, str(error))
        if chunk.size:
            container.append(chunk, "zstd" if stored.compression == "zstd" else None)
    container.append_metadata("rounds", metadata_record("rounds", Rounds(rounds)))
    container.finish()
    for _ in reader.events():  # what is missing between what could be read
        pass
    report.rounds, report.unfinished = len(rounds), sum(not part.finished for part in rounds)
    report.damage = reader.damage
    return report
