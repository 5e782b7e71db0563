"""The workers that requests go to: which one is asked, and which ones rest.

A worker that failed is away: `backoff` seconds after the first failure, twice as long after each further one in a row,
up to `LONGEST_REST`, and up to twice that by chance. Meanwhile others are asked. When its time is over it is looked at
before it gets a request: one that stays down costs requests nothing. Where all are away, the one that is due first is
waited for, and a look that finds it down counts as a failed attempt of those that wait. Behind a router it is the
request that rests, unless the router itself is not reached: what it answers is about one of its workers.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import count
from typing import Final

from anyio import current_time

__all__ = ["Worker", "Workers", "rest_of"]

LONGEST_REST: Final = 30.0


def rest_of(failures: int, backoff: float) -> float:
    """Seconds, after so many failures in a row."""
    return min(backoff * 2.0 ** (failures - 1), LONGEST_REST) * (1 + random.random())


class Worker:
    """A worker as this side sees it."""

    __slots__ = ("away", "due", "failures", "in_flight", "told", "url")

    def __init__(self, url: str) -> None:
        self.url = url
        self.in_flight = 0
        self.failures = 0
        """In a row."""
        self.away = False
        """It gets no requests."""
        self.due = 0.0
        """When it is looked at, if it is away; infinite while it is."""
        self.told: object = None
        """What the log has said of it."""


class Workers:
    """:param backoff: seconds that one is away after a failure.
    :param look: is called with a worker that is due, and has it come `back`, or fail once more. Without it a worker is
        back when it is due.
    """

    def __init__(self, urls: Iterable[str], backoff: float, look: Callable[[Worker], None] | None = None) -> None:
        self._backoff = backoff
        self._look = look
        self._turn = count()
        self._workers: list[Worker] = []
        self.waiting: set[asyncio.Event] = set()
        """Set when one is back, or a look has found one down."""
        self.failures = 0
        """Looks that found a worker down."""
        self.error: Exception | None = None
        """What the last of them found."""
        self.set(urls)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    def set(self, urls: Iterable[str], away: bool = False) -> None:
        """These are the workers now; those that stay keep what is known of them.

        :param away: new ones are looked at before they get requests.
        """
        known = {worker.url: worker for worker in self._workers}
        self._workers = [known.get(url) or Worker(url) for url in dict.fromkeys(urls)]
        for worker in self._workers:
            worker.away |= away and worker.url not in known

    def pick(self, session: str | None = None, avoid: Worker | None = None) -> tuple[Worker, float]:
        """The worker with least in flight, and the seconds until it may be asked.

        :param session: requests of one session go to the same worker for as long as that is up.
        :param avoid: not this one, where there is another.
        """
        self.look()
        candidates: Sequence[Worker] = [worker for worker in self._workers if not worker.away]
        if len(candidates) > 1 and avoid is not None:
            candidates = [worker for worker in candidates if worker is not avoid]
        if not candidates:
            worker = min(self._workers, key=lambda worker: worker.due)
            return worker, max(worker.due - current_time(), _MOMENT)
        if len(candidates) == 1:
            return candidates[0], 0.0
        if session is not None:
            return max(candidates, key=lambda worker: _weight(session, worker.url)), 0.0
        first = next(self._turn) % len(candidates)  # among equals each has its turn
        return min((*candidates[first:], *candidates[:first]), key=lambda worker: worker.in_flight), 0.0

    def look(self) -> None:
        """Look at those that are due."""
        now: float | None = None
        for worker in self._workers:
            if worker.away:
                now = current_time() if now is None else now
                if worker.due <= now:
                    if self._look is None:
                        self.back(worker)
                    else:
                        self._look(worker)

    def failed(self, worker: Worker, error: Exception) -> None:
        """It is away, from now on. Requests that fail while it is tell nothing new: they were lost together."""
        looked = worker.due == math.inf
        if worker.away and not looked:
            return
        worker.failures += 1
        worker.away, worker.due = True, current_time() + rest_of(worker.failures, self._backoff)
        if looked:
            self.failures, self.error = self.failures + 1, error
            self._tell()

    def back(self, worker: Worker) -> None:
        worker.away, worker.due = False, 0.0
        self._tell()

    def _tell(self) -> None:
        for event in self.waiting:
            event.set()


_MOMENT: Final = 1e-3
"""Seconds to wait for a worker that is due, and is not looked at just now."""


def _weight(session: str, url: str) -> bytes:
    return blake2b(f"{session} {url}".encode(), digest_size=8).digest()
