"""`Recorder`: the whole stream into a log, for `rolloutbus log` and `rolloutbus replay`."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import anyio
import anyio.to_thread

from eventbus.codecs import WireError
from eventbus.events import EVENT_KINDS, Event
from eventbus.sample import Sample

if TYPE_CHECKING:
    from eventbus.log.writer import LogWriter
    from eventbus.pipeline import Pipeline

__all__ = ["Recorder"]

logger = logging.getLogger("rolloutbus.recorder")

_LIMIT: Final = 256 << 20
"""Bytes that wait for the file before the pipeline does."""


class Recorder:
    """An observer that writes every event, and the samples, into a log: `Pipeline(observers=[Recorder("run.mcap")])`.

    With them it keeps how the stages can be made anew, options included, but for what looks like a secret
    (`eventbus.log.stages`), so that a replay has them.

    It loses nothing: while more waits for the file than `LogWriter` may hold, the pipeline waits. Entered again, by
    another pipeline or the same one, it goes on in a file of its own: `run.2.mcap`, `run.3.mcap`.

    :param payload: whose tokens and other heavy fields are stored: `"full"`, those of all samples; `"kept"`, those of
        groups that entered a batch; `"none"`.
    :param compression: `"zstd"`, or None for none.
    :param durable: also wait for the disk when a round has finished.
    :param on_error: what happens when the log cannot be written: the rollout ends (`"stop"`), or goes on without it
        (`"continue"`, logged once). A file that is there already is an error with both.
    :param overwrite: take the place of a file that is there.
    :param config: the TOML text of the run, to be kept in the log.
    """

    kinds = frozenset(EVENT_KINDS)

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        payload: Literal["full", "kept", "none"] = "full",
        compression: Literal["zstd"] | None = None,
        durable: bool = False,
        on_error: Literal["stop", "continue"] = "stop",
        overwrite: bool = False,
        config: str | None = None,
    ) -> None:
        if on_error not in ("stop", "continue"):
            raise ValueError(f"on_error={on_error!r}: choose 'stop' or 'continue'")
        if payload not in ("full", "kept", "none"):
            raise ValueError(f"payload={payload!r}: choose 'full', 'kept' or 'none'")
        if compression not in (None, "zstd"):
            raise ValueError(f"compression={compression!r}: choose 'zstd' or None")
        self.path = Path(path)
        """The file that is written now, or was last."""
        self.lost = 0
        """Events that are not in the log, with `on_error="continue"`."""
        self._first_path = self.path
        self._options: dict[str, Any] = {
            "payload": payload,
            "compression": compression,
            "durable": durable,
            "overwrite": overwrite,
            "config": config,
            "limit": _LIMIT,
        }
        self._stops = on_error == "stop"
        self._entered = 0
        self._pipeline: Pipeline | None = None
        self._writer: LogWriter | None = None
        self._broken = False

    # Its life

    def attach(self, pipeline: Pipeline) -> None:
        """Called by the pipeline that is entered next: its stages are noted in the log."""
        self._pipeline = pipeline

    async def __aenter__(self) -> Self:
        """:raises LogError: the file exists or, unless `on_error="continue"`, cannot be created.
        :raises RuntimeError: it records a pipeline already.
        """
        if self._writer is not None:
            raise RuntimeError(f"{self.path}: this Recorder records a pipeline already; give the other one its own")
        from eventbus.log import LogError, LogWriter, stage_notes
        from eventbus.log.format import described

        if self._entered:
            self.path = self._first_path.with_suffix(f".{self._entered + 1}{self._first_path.suffix}")
        pipeline, self._pipeline = self._pipeline, None
        stages = [] if pipeline is None else stage_notes(pipeline.stages)
        self._broken = False
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(described)  # which takes a moment, once
        try:  # not in a thread: a cancellation of asyncio's own would leave the file open
            self._writer = LogWriter(self.path, stages=stages, **self._options)
        except LogError as error:
            if self._stops or isinstance(error.__cause__, FileExistsError):
                raise
            self._go_on_without(error)
        self._entered += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """:raises LogError: what was observed could not all be written, and nothing else went wrong."""
        from eventbus.log import LogError

        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(writer.close)
        except LogError as failure:
            if error is None:
                self._failed(failure)
            else:  # goes on as itself
                logger.warning("%s", failure)
        finally:
            writer.close()  # where the loop would not wait

    # What it sees

    def observe(self, event: Event) -> None:
        """:raises LogError: the log cannot be written.
        :raises WireError: something in the event cannot be encoded.
        """
        self._write(event, None)

    def observe_samples(self, event: Event, samples: Sequence[Sequence[Sample]]) -> None:
        """As `observe`, for an event that shows samples."""
        self._write(event, samples)

    @property
    def full(self) -> bool:
        """More waits for the file than may: the pipeline waits for `drained`."""
        return self._writer is not None and self._writer.full

    async def drained(self) -> None:
        """Wait until there is room again."""
        writer = self._writer
        if writer is not None and writer.full:
            await anyio.to_thread.run_sync(writer.wait, abandon_on_cancel=True)

    def _write(self, event: Event, samples: Sequence[Sequence[Sample]] | None) -> None:
        if self._writer is None or self._broken:
            if not self._broken:
                raise RuntimeError("Recorder was not entered: give it to a Pipeline, or use `async with recorder:`")
            self.lost += 1
            return
        try:
            self._writer.write_nowait(event, samples)
        except WireError as error:  # the next event may be written
            if self._stops:
                raise
            self.lost += 1
            if self.lost == 1:
                logger.warning("%s: event %d is not in the log: %s", self.path, event.seq, error)
        except Exception as error:
            from eventbus.log import LogError  # here, not for every event

            if not isinstance(error, LogError):
                raise
            self.lost += 1
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if self._stops:
            raise error
        if not self._broken:
            self._go_on_without(error)

    def _go_on_without(self, error: Exception) -> None:
        self._broken = True
        logger.warning("%s; the run goes on without the log", error)
