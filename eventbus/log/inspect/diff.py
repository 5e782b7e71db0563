"""Where two streams part: the first event that differs, then what each rollout kept, why, and for what rewards.

Numbers of events and all times are left out of the comparison, as are workers (those that ran a stage, and those of an
engine) and the attempts of an engine to get an answer. Two runs of the same work may interleave in another way: so
there are two answers, the first place at which the streams differ, and the first event that the other stream has not,
or has with other content, wherever it stands.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any

import msgspec

from eventbus.codecs import encoder
from eventbus.events import (
    AttemptEnded,
    Event,
    GroupCompleted,
    GroupEnded,
    LightSample,
    RolloutStarted,
    UnknownEvent,
    WeightsUpdated,
)
from eventbus.sample import Sample

__all__ = ["DiffReport", "Divergence", "RolloutDiff", "diff"]

Key = tuple[Any, ...]
RoundKey = tuple[int, bool]


class Divergence(msgspec.Struct, omit_defaults=True):
    """Two events that should be the same. None: this stream has none there."""

    a: Any = None
    b: Any = None
    fields: dict[str, tuple[Any, Any]] = {}
    """What differs between the two, where they are of the same kind and about the same."""


class RolloutDiff(msgspec.Struct, omit_defaults=True):
    """How one rollout differs."""

    rollout_id: int
    evaluation: bool = False
    only_in: str | None = None
    """"a" or "b", where the other has no such rollout."""
    kept: tuple[int, int] = (0, 0)
    only_a: list[int] = []
    """Groups kept in a alone."""
    only_b: list[int] = []
    ends: dict[int, tuple[str | None, str | None]] = {}
    """Groups that ended in another way or for another reason: in a and in b. None: it was not there."""
    rewards: dict[int, tuple[list[Any], list[Any]]] = {}
    """Groups that were completed with other rewards: one per execution, in a and in b."""

    @property
    def same(self) -> bool:
        return not (self.only_in or self.only_a or self.only_b or self.ends or self.rewards)


class DiffReport(msgspec.Struct, omit_defaults=True):
    events: tuple[int, int] = (0, 0)
    first: Divergence | None = None
    """The first place at which the streams differ."""
    content: Divergence | None = None
    """The first event of a that b has not, or has with other content; then of b that a has not. None: only the order
    differs."""
    rollouts: list[RolloutDiff] = []
    """Those that differ."""

    @property
    def same(self) -> bool:
        return self.first is None


def diff(a: Iterable[Event], b: Iterable[Event]) -> DiffReport:
    """Compare two streams.

    :param a: gone through at most three times: a list, or what gives a new iterator each time. So is `b`.
    """
    a = list(a) if iter(a) is a else a
    b = list(b) if iter(b) is b else b
    tables = _Table(), _Table()
    places: tuple[dict[Key, bytes], dict[Key, bytes]] = {}, {}
    counts = [0, 0]
    first: Divergence | None = None
    for pair in zip_longest(_compared(a), _compared(b)):
        content: list[bytes | None] = [None, None]
        for side, event in enumerate(pair):
            if event is not None:
                counts[side] += 1
                content[side] = _content(event)
                places[side][tables[side].feed(event)] = content[side] or b""
        if first is None and content[0] != content[1]:
            first = Divergence(*pair, _differences(*pair) if _identity(pair[0]) == _identity(pair[1]) else {})
    rollouts = [tables[0].compare(tables[1], key) for key in tables[0].rounds | tables[1].rounds]
    return DiffReport(
        (counts[0], counts[1]),
        first,
        None if first is None else _first_content(a, b, *places),
        [rollout for rollout in rollouts if not rollout.same],
    )


class _Table:
    """What a stream says per rollout, and how often each thing happened so far."""

    def __init__(self) -> None:
        self.rounds: dict[RoundKey, None] = {}
        self.ends: dict[RoundKey, dict[int, str]] = {}
        self.kept: dict[RoundKey, set[int]] = {}
        self.rewards: dict[RoundKey, dict[int, list[Any]]] = {}
        self._seen: Counter[Key] = Counter()

    def feed(self, event: Event) -> Key:
        """The event's identity, the same in every run of the same work."""
        key = (event.rollout_id, event.evaluation)
        match event:
            case RolloutStarted():
                self.rounds[key] = None
            case GroupCompleted():
                rewards = [execution[-1].sample.reward for execution in event.samples if execution]
                self.rewards.setdefault(key, {})[event.group_index] = rewards
            case GroupEnded():
                reason = f": {event.reason}" if event.reason else " by fallback" if event.by_fallback else ""
                self.ends.setdefault(key, {})[event.group_index] = event.outcome + reason
                kept = self.kept.setdefault(key, set())
                kept.discard(event.group_index)
                if event.outcome == "kept":
                    kept.add(event.group_index)
        identity = _identity(event)
        self._seen[identity] += 1
        return (*identity, self._seen[identity])

    def compare(self, other: _Table, key: RoundKey) -> RolloutDiff:
        kept, others = self.kept.get(key, set()), other.kept.get(key, set())
        ends, their_ends = self.ends.get(key, {}), other.ends.get(key, {})
        rewards, their_rewards = self.rewards.get(key, {}), other.rewards.get(key, {})
        only_in = "b" if key not in self.rounds else "a" if key not in other.rounds else None
        return RolloutDiff(
            *key,
            only_in,
            (len(kept), len(others)),
            sorted(kept - others),
            sorted(others - kept),
            {
                group: (ends.get(group), their_ends.get(group))
                for group in sorted({*ends, *their_ends})
                if ends.get(group) != their_ends.get(group)
            },
            {
                group: (rewards[group], their_rewards[group])
                for group in sorted(rewards.keys() & their_rewards.keys())
                if not _same(rewards[group], their_rewards[group])
            },
        )


def _first_content(
    a: Iterable[Event], b: Iterable[Event], in_a: dict[Key, bytes], in_b: dict[Key, bytes]
) -> Divergence | None:
    for place, content in in_a.items():
        if in_b.get(place) != content:
            ours = _find(a, place)
            theirs = _find(b, place) if place in in_b else None
            return Divergence(ours, theirs, {} if theirs is None else _differences(ours, theirs))
    for place in in_b:
        if place not in in_a:
            return Divergence(None, _find(b, place))
    return None


def _find(events: Iterable[Event], place: Key) -> Event | None:
    table = _Table()
    return next((event for event in _compared(events) if table.feed(event) == place), None)


def _compared(events: Iterable[Event]) -> Iterator[Event]:
    for event in events:
        if isinstance(event, WeightsUpdated):
            yield msgspec.structs.replace(event, workers=[], missed_by=[])
        elif not isinstance(event, AttemptEnded):
            yield event


def _identity(event: Any) -> Key:
    """What the event is about."""
    if event is None:
        return ()
    about = (getattr(event, name, None) for name in ("group_index", "index", "execution", "child", "stage"))
    return (event.kind, event.rollout_id, event.evaluation, *about)


_PASSED_OVER = frozenset({"seq", "time_ns", "seconds", "waited", "worker", "traceback", "non_generation_time"})


def _content(event: Event) -> bytes:
    parts = [event.kind] if isinstance(event, UnknownEvent) else [event.kind, *_parts(event)]
    return hashlib.blake2b(encoder.encode(parts), digest_size=12).digest()


def _parts(value: Any) -> Iterator[Any]:
    for name in value.__struct_fields__:
        if name not in _PASSED_OVER:
            yield _plain(getattr(value, name))


def _plain(value: Any) -> Any:
    """Without what is passed over, and with the keys of dicts in order."""
    if isinstance(value, msgspec.Struct) and not isinstance(value, Sample):
        return list(_parts(value))
    if isinstance(value, Sample):
        return [part for name in value.__struct_fields__ if name not in _PASSED_OVER
                if (part := _plain(getattr(value, name))) is not None]  # fmt: skip
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return sorted(
            ([_plain(key), _plain(item)] for key, item in value.items() if key not in _PASSED_OVER),
            key=lambda pair: encoder.encode(pair[0]),
        )
    return value


def _differences(a: Any, b: Any) -> dict[str, tuple[Any, Any]]:
    """The fields that differ, in depth: `samples[0][1].reward`, `summary.kept`."""
    found: dict[str, tuple[Any, Any]] = {}
    _compare(a, b, "", found)
    return found


def _compare(a: Any, b: Any, path: str, found: dict[str, tuple[Any, Any]]) -> None:
    if isinstance(a, msgspec.Struct) and type(a) is type(b):
        for name in a.__struct_fields__:
            if name not in _PASSED_OVER:
                inner = path if isinstance(a, LightSample) and name == "sample" else f"{path}.{name}".lstrip(".")
                _compare(getattr(a, name), getattr(b, name), inner, found)
    elif isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            if key not in _PASSED_OVER:
                _compare(a.get(key), b.get(key), f"{path}.{key}".lstrip("."), found)
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b) and _deep(a):
        for place, (one, other) in enumerate(zip(a, b, strict=True)):
            _compare(one, other, f"{path}[{place}]", found)
    elif not _same(a, b):
        found[path] = (a, b)


def _deep(value: Any) -> bool:
    return any(isinstance(item, msgspec.Struct | dict | list | tuple) for item in value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    try:
        return bool(a == b)
    except (ValueError, RuntimeError):  # arrays and tensors do not say
        return bool(encoder.encode(a) == encoder.encode(b))
