"""A stream in formats that others read: JSON lines, and a trace for Perfetto or chrome://tracing.

The trace has a lane per worker, with a slice for every stage that it ran; a lane per rollout, with what was asked and
decided; and arrows along each sample, from the prompt through its stages to where its group ended.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, TextIO

import msgspec

from eventbus.codecs import Opaque
from eventbus.columns import Column
from eventbus.events import (
    AttemptEnded,
    BatchAssembled,
    BatchTrained,
    Event,
    GroupCompleted,
    GroupEnded,
    GroupJudged,
    GroupSubmitted,
    LightSample,
    RolloutFinished,
    RolloutStarted,
    SampleGenerated,
    StageApplied,
    StageFailed,
    WeightsUpdated,
)
from eventbus.sample import Sample

__all__ = ["json_value", "write_jsonl", "write_trace"]


def write_jsonl(
    events: Iterable[Event], out: TextIO, *, samples: Callable[[Any], list[list[Sample]]] | None = None
) -> int:
    """One JSON object per event and line; how many.

    Fields that have their default are left out. JSON has no nan and no infinity: they are null.

    :param samples: gives the whole samples of an event (`LogReader.samples`): then the token columns are written too.
    """
    count = 0
    for event in events:
        value = json_value(event)
        if samples is not None and value.get("samples"):
            value["samples"] = json_value(samples(event))
        out.write(json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n")
        count += 1
    return count


def json_value(value: Any) -> Any:
    """What JSON can hold of a value: events, samples, and all that they may carry."""
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, LightSample):
        shown = json_value(value.sample)
        return {**shown, "columns": {name: mark[0] for name, mark in value.columns.items()}}
    if isinstance(value, msgspec.Struct):
        return dict(_struct(value))
    if isinstance(value, dict):
        return {_key(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_value(item) for item in value]
    if isinstance(value, str):  # an enum as what it stands for
        return str(value)
    if isinstance(value, Column):
        return json_value(value.tolist())
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, Opaque):
        return {"type": value.name, "bytes": len(value.payload)}
    if hasattr(value, "tolist"):  # numpy and torch
        return json_value(value.tolist())
    return str(value)


def _struct(value: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    config = value.__struct_config__
    if config.tag_field is not None:
        yield config.tag_field, config.tag
    for name, default in _fields(type(value)):
        item = getattr(value, name)
        if item is msgspec.UNSET:
            continue
        if config.omit_defaults and type(item) is type(default) and item == default:
            continue
        yield name, json_value(item)


@cache
def _fields(kind: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    """The fields of a struct and their defaults."""
    return [
        (field.name, field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory())
        for field in msgspec.structs.fields(kind)
    ]


def _key(key: Any) -> str:
    return str(key) if isinstance(key, str) else json.dumps(json_value(key))


# The trace


_WORKERS, _ROLLOUTS = 1, 2


def write_trace(events: Iterable[Event], out: TextIO) -> int:
    """A trace in Chrome's JSON format; how many entries.

    Times are microseconds from the first event on. A stage's slice ends when its event was built. Slices of one lane
    lie side by side or in each other, as the format wants it: a wrapper's slice holds those of the stages that it ran.
    """
    trace = _Trace()
    out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    count = 0
    for event in events:
        for entry in trace.feed(event):
            out.write((",\n" if count else "") + json.dumps(entry, separators=(",", ":")))
            count += 1
    for entry in trace.finish():
        out.write((",\n" if count else "") + json.dumps(entry, separators=(",", ":")))
        count += 1
    out.write("\n]}\n")
    return count


class _Trace:
    def __init__(self) -> None:
        self._zero: int | None = None
        self._lanes: set[tuple[int, int]] = set()
        self._rounds: dict[tuple[int, bool], tuple[int, float]] = {}
        """Under way: its lane and when it began."""
        self._free: list[int] = []
        self._slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
        """Per lane the last slices that a wrapper may hold, as (begin, end)."""
        self._flows: dict[tuple[int, bool, int], dict[int, int]] = {}
        """Per group under way: its executions and their arrows."""
        self._arrows = 0
        self._now = 0.0

    def feed(self, event: Event) -> Iterator[dict[str, Any]]:
        if self._zero is None:
            self._zero = event.time_ns
        self._now = now = (event.time_ns - self._zero) / 1000
        key = (event.rollout_id, event.evaluation)
        match event:
            case RolloutStarted():
                lane = self._free.pop() if self._free else len(self._rounds) + 1
                self._rounds[key] = (lane, now)
                yield from self._name(_ROLLOUTS, lane, f"rollouts, lane {lane}")
            case RolloutFinished():
                yield from self._round_slice(key, json_value(event.summary) if event.summary else {})
            case GroupSubmitted():
                yield from self._submitted(event, now)
            case StageApplied() | StageFailed():
                yield from self._stage(event, now)
            case SampleGenerated() | GroupCompleted():
                pass  # they end where a stage does
            case GroupJudged():
                verdict = "kept" if event.verdict.kept else "held" if event.held else "rejected"
                yield from self._mark(event, f"group {event.group_index} {verdict}", json_value(event.verdict))
            case GroupEnded():
                args = {"outcome": event.outcome, "reason": event.reason, "by_fallback": event.by_fallback}
                yield from self._mark(event, f"group {event.group_index} ended: {event.outcome}", args)
                for arrow in self._flows.pop((*key, event.group_index), {}).values():
                    if arrow >= 0:
                        yield self._flow("f", arrow, _ROLLOUTS, self._lane(event), now)
            case BatchAssembled():
                yield from self._mark(event, "batch assembled", {"groups": event.groups, "samples": event.samples})
            case AttemptEnded() if event.outcome == "failed":
                yield from self._mark(event, f"attempt failed at {event.worker}", json_value(event))
            case BatchTrained() | WeightsUpdated():
                yield from self._mark(event, event.kind.replace("_", " "), json_value(event))

    def finish(self) -> Iterator[dict[str, Any]]:
        for key in list(self._rounds):
            yield from self._round_slice(key, {"unfinished": True})
        for process, name in ((_WORKERS, "workers"), (_ROLLOUTS, "rollouts")):
            yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}

    def _round_slice(self, key: tuple[int, bool], args: Any) -> Iterator[dict[str, Any]]:
        if (place := self._rounds.pop(key, None)) is None:
            return
        lane, began = place
        self._free.append(lane)
        name = f"{'evaluation' if key[1] else 'rollout'} {key[0]}"
        yield self._slice(name, "rollout", _ROLLOUTS, lane, began, self._now, args)

    def _submitted(self, event: GroupSubmitted, now: float) -> Iterator[dict[str, Any]]:
        args = {"origin": event.origin, "round": event.round, "executions": event.executions}
        lane = self._lane(event)
        name = f"group {event.group_index} submitted"
        yield self._slice(name, "group", _ROLLOUTS, lane, now, now + 1, args)
        flows = self._flows[event.rollout_id, event.evaluation, event.group_index] = {}
        for execution in event.executions:
            self._arrows += 1
            flows[execution] = self._arrows
            yield self._flow("s", self._arrows, _ROLLOUTS, lane, now)

    def _stage(self, event: Any, now: float) -> Iterator[dict[str, Any]]:
        args: dict[str, Any] = {"rollout": event.rollout_id, "group": event.group_index}
        if event.execution is not None:
            args |= {"sample": event.index, "execution": event.execution}
        begin, name, process, lane = now, event.stage, _ROLLOUTS, self._lane(event)
        if isinstance(event, StageApplied):
            begin = now - event.seconds * 1e6
            args |= {"waited": event.waited, "attempts": event.attempts, "changed": list(event.changed)}
            if event.dropped is not None:
                args["dropped"] = event.dropped
            if event.worker is not None:
                process, lane = _WORKERS, event.worker
                yield from self._name(_WORKERS, lane, f"worker {lane}")
        else:
            name = f"{event.stage} failed"
            args |= {"error": event.error, "policy": event.policy}
        # What the rollout's own task ran is a mark in its lane.
        begin = self._nested(lane, begin, now) if process == _WORKERS else now
        yield self._slice(name, "sample" if event.execution is not None else "group", process, lane, begin, now, args)
        flows = self._flows.get((event.rollout_id, event.evaluation, event.group_index), {})
        arrows = flows.values() if event.execution is None else [flows.get(event.execution, -1)]
        for arrow in arrows:
            if arrow >= 0:
                yield self._flow("t", arrow, process, lane, (begin + now) / 2)

    def _nested(self, lane: int, begin: float, end: float) -> float:
        """Where the slice begins, so that it holds those before it or lies behind them."""
        slices = self._slices.setdefault((_WORKERS, lane), [])
        while slices and slices[-1][1] > begin:
            begin = min(begin, slices.pop()[0])
        slices.append((begin, end))
        del slices[:-64]
        return begin

    def _mark(self, event: Any, name: str, args: Any) -> Iterator[dict[str, Any]]:
        yield self._slice(name, "group", _ROLLOUTS, self._lane(event), self._now, self._now, args)

    def _lane(self, event: Event) -> int:
        return self._rounds.get((event.rollout_id, event.evaluation), (0, 0.0))[0]

    def _name(self, process: int, lane: int, name: str) -> Iterator[dict[str, Any]]:
        if (process, lane) not in self._lanes:
            self._lanes.add((process, lane))
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": lane, "args": {"name": name}}

    def _slice(
        self, name: str, category: str, process: int, lane: int, begin: float, end: float, args: Any
    ) -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": category, "pid": process, "tid": lane, "ts": round(begin, 3),
                "dur": round(max(0.0, end - begin), 3), "args": args}  # fmt: skip

    def _flow(self, phase: str, arrow: int, process: int, lane: int, at: float) -> dict[str, Any]:
        entry = {"ph": phase, "name": "sample", "cat": "flow", "id": arrow, "pid": process, "tid": lane,
                 "ts": round(at, 3)}  # fmt: skip
        return entry | {"bp": "e"} if phase == "f" else entry
