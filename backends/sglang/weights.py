"""`WeightUpdate`: new weights for all workers, from the pause until they go on.

What this module keeps true:

- workers that were paused are told to go on, and those that were told that weights come, that no more do: whatever ends
  the update, and wherever it is cut off;
- a worker takes part for as long as it takes everything, in time; the others are left out;
- the version changes when all is done, or not at all; one that has taken a part says so until then.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeAlias

import anyio
from anyio import current_time

from backends.sglang.client import AttemptFailed, RequestRefused
from backends.sglang.fleet import CALL_SECONDS, STEP_SECONDS, Fleet, together

__all__ = ["PauseMode", "WeightUpdate", "above_zero", "set_version", "updating"]

logger = logging.getLogger("rolloutbus.sglang")

PauseMode: TypeAlias = Literal["abort", "retract", "in_place"]


@asynccontextmanager
async def updating(fleet: Fleet, version: str, pause: PauseMode, timeout: float | None) -> AsyncIterator[WeightUpdate]:
    """As `SGLangEngine.updating_weights`."""
    above_zero("updating_weights", timeout)
    update = WeightUpdate(fleet, version, pause, timeout)
    async with fleet:
        try:
            await update._begin_pause()
            yield update
            await update._finish()
            await update._go_on()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await update._give_up()
            raise


async def set_version(fleet: Fleet, version: str) -> WeightUpdate:
    """As `SGLangEngine.set_weight_version`."""
    update = WeightUpdate(fleet, version, None)
    async with fleet:
        update.workers = await fleet.present()
        await update._finish()
    return update


class WeightUpdate:
    """New weights for all workers, while they pause; see `SGLangEngine.updating_weights`."""

    def __init__(self, fleet: Fleet, version: str, pause: PauseMode | None, timeout: float | None = None) -> None:
        self.version = version
        self.pause = pause
        self.workers: list[str] = []
        """Addresses of those that take part: that have taken everything so far."""
        self.missed_by: list[str] = []
        """Addresses of the others, when it is done."""
        self.began = current_time()
        """When the workers were asked to pause, by the clock of the event loop."""
        self._fleet = fleet
        self._timeout = timeout
        # With requests kept in place their cache is in use.
        self._common = {"weight_version": f"{version} (in part)", "flush_cache": pause != "in_place"}
        self._calls = 0
        self._checkpoint: Mapping[str, Any] | None = None
        """What brings these weights to a worker that was left out, where one call does."""
        self._paused: list[str] = []
        self._begun: list[str] = []
        """Those that pause, or have an update begun, as far as it is known here."""

    async def from_disk(self, path: str, load_format: str | None = None) -> None:
        """A checkpoint that all workers can read."""
        body = {"model_path": path, "load_format": load_format}
        await self._update("/update_weights_from_disk", body)
        if self._calls == 1:
            self._checkpoint = {**body, "weight_version": self.version, "flush_cache": True}

    async def from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str = "weight_update_group",
    ) -> None:
        """Workers receive these tensors from the trainer, which broadcasts them meanwhile. May be called several times.
        A broadcast for which a worker is missing holds up the trainer too: the timeout of its process group ends that.

        :raises RequestRefused: no worker takes part, so that the broadcast would wait for ever.
        """
        await self._begin()
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": list(map(list, shapes)),
            "group_name": group_name,
        }
        await self._update("/update_weights_from_distributed", body)

    async def from_tensors(self, serialized: Sequence[str], load_format: str | None = None) -> None:
        """Tensors as SGLang's `MultiprocessingSerializer` wrote them, in base64, one string per tensor-parallel rank.
        May be called several times.
        """
        await self._begin()
        body = {"serialized_named_tensors": list(serialized), "load_format": load_format}
        await self._update("/update_weights_from_tensor", body)

    async def _update(self, path: str, body: dict[str, Any]) -> None:
        self._calls += 1
        self._checkpoint = None
        self._took(*await self._fleet.ask_all(path, self._common | body, self.workers, self._timeout))

    def _took(self, replies: Mapping[str, bytes], errors: Mapping[str, RequestRefused | AttemptFailed]) -> None:
        """Who does not take it takes no further part.

        :raises RequestRefused: nobody took it, and a worker refused it; the message has its words.
        :raises WorkersUnavailable: nobody took it.
        """
        if not replies:
            raise together(errors)
        self.workers = [url for url in self.workers if url in replies]
        self._fleet.leave_out(errors)

    # Its steps

    async def _begin_pause(self) -> None:
        self._fleet.held = self.pause
        self.workers = await self._fleet.present()
        self.began = current_time()
        self._paused = self.workers  # before they are asked: cut off meanwhile, they may have heard it
        body = {"mode": self.pause}
        replies, errors = await self._fleet.ask_all("/pause_generation", body, self.workers, STEP_SECONDS)
        self._paused = _may_have(self.workers, errors)
        self._took(replies, errors)

    async def _begin(self) -> None:
        """Without it the server refuses what comes in pieces."""
        if not self._begun:
            self._begun = self.workers  # before they are asked, as above
            replies, errors = await self._fleet.ask_all("/begin_weight_update", {}, self.workers, STEP_SECONDS)
            self._begun = _may_have(self.workers, errors)
            self._took(replies, errors)

    async def _finish(self) -> None:
        if self._begun:
            replies, errors = await self._fleet.ask_all("/end_weight_update", {}, self._begun, STEP_SECONDS)
            self._took(replies, errors)
            self._begun = []
        body = {"new_version": self.version, "abort_all_requests": False}
        self._took(*await self._fleet.ask_all("/update_weight_version", body, self.workers, STEP_SECONDS))
        self.missed_by = await self._fleet.have(self.version, self.workers, self._checkpoint, self._timeout)

    async def _go_on(self) -> None:
        """:raises WorkersUnavailable: none of those that paused goes on."""
        replies, errors = await self._fleet.go_on(self._paused)
        self._fleet.leave_out(errors)
        if errors and not replies:
            raise together(errors)

    async def _give_up(self) -> None:
        """It has failed, which is what the caller hears of; what fails here is for the log."""
        try:
            _, not_ended = await self._fleet.ask_all("/end_weight_update", {}, self._begun, CALL_SECONDS)
        finally:
            _, errors = await self._fleet.go_on(self._paused)
        for error in (*not_ended.values(), *errors.values()):
            logger.warning("after a weight update that failed: %s", error)
        self._fleet.leave_out(errors)


def above_zero(function: str, timeout: float | None) -> None:
    """:raises ValueError: the time-out leaves no time."""
    if timeout is not None and not timeout > 0:
        raise ValueError(f"{function}: timeout is {timeout}, it must be more than 0 seconds, or None")


def _may_have(urls: Sequence[str], errors: Mapping[str, RequestRefused | AttemptFailed]) -> list[str]:
    """Those that may have done what they were asked to: all but those that say that they have not."""
    return [url for url in urls if not isinstance(errors.get(url), RequestRefused)]
