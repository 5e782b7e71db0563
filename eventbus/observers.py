"""Who watches the stream: events are built only when somebody asked for their kind.

An observer is an object with `kinds` (a collection of event kinds) and `observe(event)`, called on the event loop in
the order of `seq`; it must not block. If it is a context manager, sync or async, the pipeline enters and exits it.
An error that it raises ends the rollout that the event belongs to: a recorder that cannot write is no detail.

Three things are optional:

- `observe_samples(event, samples)` is called instead of `observe` for an event that shows samples, with those samples
  in the order of `event.samples`; they go on changing, so it copies what it keeps.
- `attach(pipeline)` is called each time before the pipeline enters, and before the observer itself is entered.
- `full: bool` and `async def drained()`: while an observer is full, no stage begins and no prompt is asked for until
  `drained` has returned. What is under way goes on, so it must take a few events more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any, Protocol, Self

import anyio

from eventbus.events import EVENT_KINDS, Event, light
from eventbus.sample import Sample

__all__ = ["EventHub", "EventStream", "Observer"]


class Observer(Protocol):
    """Watches a pipeline: `Pipeline(observers=[...])`."""

    @property
    def kinds(self) -> Collection[str]: ...

    def observe(self, event: Any, /) -> None: ...


class EventHub:
    """Numbers the events of a pipeline and hands each to those who asked for its kind."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers: list[Observer] = []
        self._by_kind: dict[str, list[Observer]] = {}
        self._pushing: list[Any] = []  # observers that can be full
        self.hold: Callable[[Callable[[], Awaitable[None]]], None] | None = None
        """Holds the stream up until what it is given has been awaited."""
        self.stop: Callable[[int, bool, Exception], None] | None = None
        """Ends a rollout with an error."""
        self._seq = 0
        self._epoch_ns = 0  # of the loop's clock
        for observer in observers:
            self.add(observer)

    def add(self, observer: Observer) -> None:
        """:raises ValueError: it asks for a kind that does not exist."""
        kinds = set(observer.kinds)
        if unknown := sorted(kinds - set(EVENT_KINDS)):
            raise ValueError(
                f"{type(observer).__name__}: no event kind {unknown[0]!r}; there are {', '.join(EVENT_KINDS)}"
            )
        self._observers.append(observer)
        if hasattr(observer, "drained"):
            self._pushing.append(observer)
        for kind in kinds:
            self._by_kind.setdefault(kind, []).append(observer)

    def remove(self, observer: Observer) -> None:
        self._observers.remove(observer)
        self._pushing = [each for each in self._pushing if each is not observer]
        for kind in set(observer.kinds):
            self._by_kind[kind].remove(observer)
            if not self._by_kind[kind]:
                del self._by_kind[kind]

    def wants(self, kind: str) -> bool:
        """Whether building this kind of event is worth it."""
        return kind in self._by_kind

    def emit(
        self, kind: str, rollout_id: int, evaluation: bool, shown: Sequence[Sequence[Sample]] = (), **fields: Any
    ) -> None:
        """Build the event and hand it out, if somebody asked for it.

        :param shown: the samples that the event shows in their light form.
        :raises Exception: what an observer raises, after all have seen the event.
        """
        observers = self._by_kind.get(kind)
        if observers is None:
            return
        if shown:
            fields["samples"] = [[light(sample) for sample in execution] for execution in shown]
        event = EVENT_KINDS[kind](
            seq=self._seq, time_ns=self._now(), rollout_id=rollout_id, evaluation=evaluation, **fields
        )
        self._seq += 1
        first: Exception | None = None
        for observer in tuple(observers):
            try:
                if shown and (whole := getattr(observer, "observe_samples", None)) is not None:
                    whole(event, shown)
                else:
                    observer.observe(event)
            except Exception as error:
                error.add_note(f"raised by the observer {type(observer).__name__} at event {event.seq} ({kind})")
                first = first or error
        if self.hold is not None and any(pushing.full for pushing in self._pushing):
            self.hold(self._drained)
        if first is not None:
            raise first

    def report(self, kind: str, rollout_id: int, evaluation: bool, **fields: Any) -> None:
        """As `emit`, for code that has no business with an observer's error: it ends the rollout, and is not raised."""
        try:
            self.emit(kind, rollout_id, evaluation, **fields)
        except Exception as error:
            if self.stop is None:
                raise
            self.stop(rollout_id, evaluation, error)

    def open(self) -> None:
        """From now on times are counted by the clock of the running loop: no clock that is set back disturbs their
        order, and under virtual time they are virtual."""
        self._epoch_ns = time.time_ns() - int(anyio.current_time() * 1e9)

    def _now(self) -> int:
        try:
            return self._epoch_ns + int(anyio.current_time() * 1e9)
        except RuntimeError:  # a batch was acknowledged by synchronous code
            return time.time_ns()

    async def _drained(self) -> None:
        for observer in self._pushing:
            while observer.full:
                await observer.drained()


class EventStream:
    """`pipeline.events(kinds)`: an async iterator over events from now on, until the pipeline ends.

    It never holds the stream up: past `capacity` unread events new ones are skipped and counted in `missed`.
    """

    def __init__(self, hub: EventHub, kinds: Collection[str] | None, capacity: int) -> None:
        self.kinds = frozenset(EVENT_KINDS if kinds is None else kinds)
        self.missed = 0
        self._hub = hub
        self._capacity = capacity
        self._events: deque[Event] = deque()
        self._news: anyio.Event | None = None
        self._open = True
        hub.add(self)

    def observe(self, event: Event) -> None:
        if len(self._events) >= self._capacity:
            self.missed += 1
            return
        self._events.append(event)
        self._wake()

    def close(self) -> None:
        """End the iteration after what was read in. Called by the pipeline; calling it twice does nothing."""
        if self._open:
            self._open = False
            self._hub.remove(self)
            self._wake()

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if not self._open:
                raise StopAsyncIteration
            if self._news is None:
                self._news = anyio.Event()
            await self._news.wait()
        return self._events.popleft()
