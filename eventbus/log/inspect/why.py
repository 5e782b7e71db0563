"""The whole lineage of one sample or group: why it is where it is.

`why` gathers it, a `Chapter` per submission: a group that was carried, recycled or restarted has several, in as many
rollouts. Values of a sample's fields are followed from its prompt on, so that a change shows what was there before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from heapq import merge
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from eventbus.events import (
    AttemptEnded,
    AttemptOutcome,
    BatchTrained,
    Event,
    GroupCompleted,
    GroupEnded,
    GroupJudged,
    GroupSubmitted,
    LightSample,
    RolloutStarted,
    SampleGenerated,
    StageApplied,
    StageFailed,
    UnknownEvent,
)
from eventbus.group import Verdict
from eventbus.ledger import Outcome
from eventbus.log.reader import LogReader
from eventbus.sample import Sample, SampleStatus, WeightSpan

__all__ = ["Change", "Chapter", "ExecutionStory", "Lineage", "Step", "Target", "why"]


class Target(msgspec.Struct, frozen=True):
    """What is asked for."""

    kind: Literal["sample", "group"]
    number: int
    """`Sample.index` or `Group.index`."""

    @classmethod
    def parse(cls, text: str) -> Target:
        """
        >>> Target.parse("sample:1234")
        Target(kind='sample', number=1234)

        :raises ValueError: it has another form.
        """
        form = re.fullmatch(r"\s*(sample|group)\s*[:=]\s*(\d+)\s*", text)
        if form is None:
            raise ValueError(f"{text!r}: write sample:1234 (Sample.index) or group:17 (Group.index)")
        kind: Any = form[1]
        return cls(kind, int(form[2]))

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}"


class Change(msgspec.Struct, omit_defaults=True):
    """A field of the sample got a new value. Fields of dicts are named like `metadata.source`."""

    name: str
    old: Any = UNSET
    """UNSET: it was not there, or the stream does not say."""
    new: Any = UNSET
    """UNSET: it is not there any more."""


class Step(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One event of the lineage."""

    seq: int
    at: float
    """Seconds since the group was submitted."""
    kind: Literal["applied", "generated", "attempted", "failed", "judged"]
    stage: str
    index: int | None = None
    child: int = 0
    seconds: float | None = None
    waited: float = 0.0
    attempts: int = 1
    worker: int | None = None
    changes: list[Change] = []
    columns: dict[str, tuple[int, int]] = {}
    """Columns that changed, with their lengths before and after; -1: not there."""
    children: int = 0
    """Samples that it fanned out into."""
    dropped: str | None = None
    error: str | None = None
    asked: str | None = None
    """Address of the engine's worker that the attempt was made at."""
    outcome: AttemptOutcome | None = None
    tokens: int = 0
    """That the attempt brought."""
    policy: str | None = None
    status: SampleStatus | None = None
    response_length: int | None = None
    weight_versions: list[WeightSpan] = []
    verdict: Verdict | None = None
    held: bool = False


class ExecutionStory(msgspec.Struct, omit_defaults=True):
    """What happened to one execution in one chapter."""

    execution: int
    index: int
    had: int = 0
    """Response tokens that it began with: those of an earlier chapter."""
    steps: list[Step] = []
    reward: Any = None
    """That of its last sample, when the group was completed."""
    samples: int = 0
    """Its samples when the group was completed; 0: it was not among them."""
    last: LightSample | None = None


class Chapter(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One submission of the group: from there to its end in that rollout."""

    rollout_id: int
    evaluation: bool = False
    round: int
    origin: str
    seq: int
    time_ns: int
    target: int | None = None
    executions: list[ExecutionStory] = []
    completed: float | None = None
    """Seconds after the submission at which all executions were through."""
    steps: list[Step] = []
    """What group stages did and said."""
    outcome: Outcome | None = None
    """None: it is still under way where the stream ends."""
    reason: str | None = None
    by_fallback: bool = False
    ended: float | None = None
    ended_seq: int | None = None
    trained: dict[str, float] | None = None
    """Metrics of the training on its batch."""
    weight_version: str | None = None
    """That the training gave."""


class Lineage(msgspec.Struct, omit_defaults=True):
    """What a stream says of one group, and of the sample that was asked for."""

    target: Target
    group_index: int
    evaluation: bool = False
    execution: int | None = None
    """The execution that the sample asked for belongs to."""
    prompt: Any = ""
    label: Any = None
    chapters: list[Chapter] = []
    others: list[str] = []
    """Other groups that have a sample of this number."""


def why(
    events: Iterable[Event] | LogReader, target: Target | str, *, rollout: int | None = None, evaluation: bool = False
) -> Lineage:
    """Gather the lineage of a sample or group.

    :param events: a log, of which no more is read than needed; or events, gone through more than once.
    :param rollout: only what happened in this rollout.
    :param evaluation: of evaluations instead of training. They are looked at anyhow where training has no such group.
    :raises LookupError: there is no such sample or group; says which there are.
    :raises ValueError: `target` has another form than `sample:1234` or `group:17`.
    """
    target = Target.parse(target) if isinstance(target, str) else target
    found = _Find(target, rollout, evaluation)
    if isinstance(events, LogReader):
        shown = ("group_submitted",) if target.kind == "group" else ("group_submitted", "group_completed")
        if not found.look(events.events(shown, rollout=rollout)):
            found.look(events.events(rollout=rollout))  # a fanned-out sample of a group that was never completed
        place, others = found.best()
        about = events.events(group=place.group_index, rollout=rollout)
        frame = events.events(("rollout_started", "batch_trained"), rollout=rollout)
        events = merge(about, frame, key=lambda event: event.seq)
    else:
        events = list(events) if iter(events) is events else events
        found.look(events)
        place, others = found.best()
    teller = _Teller(target, place)
    for event in events:
        if rollout is None or event.rollout_id == rollout:
            teller.feed(event)
    teller.lineage.others = others
    return teller.lineage


class _Place(msgspec.Struct, frozen=True, order=True):
    """A group that fits, the better the smaller."""

    foreign: bool
    """It is of an evaluation where training was asked for, or the other way round."""
    fanned_out: bool
    evaluation: bool
    rollout_id: int
    group_index: int

    def __str__(self) -> str:
        kind = f"evaluation {self.rollout_id}, " if self.evaluation else ""
        return f"{kind}group {self.group_index}{' (fanned out)' if self.fanned_out else ''}"


class _Find:
    """Looks for the groups that have what is asked for."""

    def __init__(self, target: Target, rollout: int | None, evaluation: bool) -> None:
        self._target = target
        self._rollout = rollout
        self._evaluation = evaluation
        self._places: dict[tuple[bool, int, int], _Place] = {}
        self._nearest: int | None = None
        """Of the numbers there are, the one next to what is asked for."""
        self._least = self._most = -1

    def look(self, events: Iterable[Event]) -> bool:
        """Whether anything fits by now."""
        target = self._target
        for event in events:
            if self._rollout is not None and event.rollout_id != self._rollout:
                continue
            match event:
                case GroupSubmitted():
                    numbers = [event.group_index] if target.kind == "group" else event.indices
                    self._least = min(numbers) if self._least < 0 else min(self._least, *numbers)
                    self._most = max(self._most, *numbers)
                    known = numbers if self._nearest is None else [self._nearest, *numbers]
                    self._nearest = min(known, key=lambda number: abs(number - target.number))
                    if target.number in numbers:
                        self._found(event)
                case StageApplied() if target.kind == "sample" and event.child and event.index == target.number:
                    self._found(event, fanned_out=True)
                case GroupCompleted() if target.kind == "sample":
                    if any(light.sample.index == target.number for execution in event.samples for light in execution):
                        self._found(event, fanned_out=True)
        return bool(self._places)

    def best(self) -> tuple[_Place, list[str]]:
        """The group to tell of, and others that fit.

        :raises LookupError: there is none.
        """
        if not self._places:
            target, where = self._target, "" if self._rollout is None else f" in rollout {self._rollout}"
            there = f"there is no {target.kind} at all"
            if self._most >= 0:
                there = f"the nearest is {self._nearest}, there are {self._least} to {self._most}"
            raise LookupError(f"{target}: not in this log{where}; {there}")
        best, *others = sorted(self._places.values())
        return best, [str(other) for other in others]

    def _found(self, event: Any, fanned_out: bool = False) -> None:
        # In training a group keeps its number from rollout to rollout; every evaluation counts anew.
        key = (event.evaluation, event.rollout_id if event.evaluation else -1, event.group_index)
        foreign = event.evaluation is not self._evaluation
        place = _Place(foreign, fanned_out, event.evaluation, event.rollout_id, event.group_index)
        self._places[key] = min(place, self._places.get(key, place))


class _Teller:
    """Follows the events of one group."""

    def __init__(self, target: Target, place: _Place) -> None:
        self.lineage = Lineage(target, place.group_index, place.evaluation)
        self._place = place
        self._chapters: dict[int, Chapter] = {}
        """Under way, by rollout."""
        self._last: dict[int, Chapter] = {}
        self._targets: dict[int, int] = {}
        self._state: dict[tuple[int, int | None], dict[str, Any]] = {}
        self._prototype: dict[str, Any] = {}

    def feed(self, event: Event) -> None:
        if event.evaluation is not self._place.evaluation or isinstance(event, UnknownEvent):
            return
        if event.evaluation and event.rollout_id != self._place.rollout_id:
            return
        match event:
            case RolloutStarted():
                self._targets[event.rollout_id] = event.target
            case BatchTrained():
                chapter = self._last.get(event.rollout_id)
                if chapter is not None and chapter.outcome == "kept":
                    chapter.trained, chapter.weight_version = event.metrics, event.weight_version
            case GroupSubmitted() if event.group_index == self._place.group_index:
                self._submitted(event)
            case _ if getattr(event, "group_index", None) == self._place.group_index:
                chapter = self._chapters.get(event.rollout_id)
                if chapter is None and isinstance(event, AttemptEnded):  # given up because the group had ended
                    chapter = self._last.get(event.rollout_id)
                if chapter is not None:
                    self._go_on(event, chapter, (event.time_ns - chapter.time_ns) / 1e9)

    def _submitted(self, event: GroupSubmitted) -> None:
        lineage = self.lineage
        shown = event.samples
        if shown and shown[0]:
            prototype = shown[0][0].sample
            lineage.prompt, lineage.label = prototype.prompt, prototype.label
            self._prototype = _fields(prototype, shown[0][0].columns)
        chapter = Chapter(
            rollout_id=event.rollout_id,
            evaluation=event.evaluation,
            round=event.round,
            origin=event.origin,
            seq=event.seq,
            time_ns=event.time_ns,
            target=self._targets.get(event.rollout_id),
            executions=[
                ExecutionStory(execution, index)
                for execution, index in zip(event.executions, event.indices, strict=False)
            ],
        )
        for story, has in zip(chapter.executions, shown[1:], strict=False):
            story.had = sum(light.sample.response_length for light in has)
            for light in has:
                self._state[story.execution, story.index] = _fields(light.sample, light.columns)
        if event.origin != "recycled":
            self._state.clear()
        self._chapters[event.rollout_id] = self._last[event.rollout_id] = chapter
        lineage.chapters.append(chapter)
        if lineage.target.kind == "sample" and lineage.execution is None:
            self._asked(chapter, lineage.target.number, lambda story: story.index)

    def _asked(self, chapter: Chapter, number: int, index_of: Any) -> None:
        for story in chapter.executions:
            if index_of(story) == number:
                self.lineage.execution = story.execution

    def _go_on(self, event: Any, chapter: Chapter, at: float) -> None:
        story = next((story for story in chapter.executions if story.execution == _execution(event)), None)
        steps = chapter.steps if story is None else story.steps
        match event:
            case StageApplied():
                steps.append(self._applied(event, at))
                if self._place.fanned_out and event.index == self.lineage.target.number:
                    self.lineage.execution = event.execution
            case SampleGenerated():
                steps.append(
                    Step(
                        seq=event.seq,
                        at=at,
                        kind="generated",
                        stage=event.stage,
                        index=event.index,
                        status=event.status,
                        response_length=event.response_length,
                        weight_versions=event.weight_versions,
                    )
                )
            case AttemptEnded():
                steps.append(
                    Step(
                        seq=event.seq,
                        at=at,
                        kind="attempted",
                        stage=event.stage or "",
                        index=event.index,
                        seconds=event.seconds,
                        attempts=event.attempt,
                        error=event.error,
                        asked=event.worker,
                        outcome=event.outcome,
                        tokens=event.tokens,
                    )
                )
            case StageFailed():
                steps.append(
                    Step(
                        seq=event.seq,
                        at=at,
                        kind="failed",
                        stage=event.stage,
                        index=event.index,
                        error=event.error,
                        policy=event.policy,
                    )
                )
                if event.policy == "resubmit":
                    for key in [key for key in self._state if event.execution in (None, key[0])]:
                        del self._state[key]
            case GroupCompleted():
                chapter.completed = at
                self._completed(event, chapter)
            case GroupJudged():
                steps.append(
                    Step(
                        seq=event.seq,
                        at=at,
                        kind="judged",
                        stage=event.stage,
                        verdict=event.verdict,
                        held=event.held,
                    )
                )
            case GroupEnded():
                chapter.outcome, chapter.reason, chapter.by_fallback = event.outcome, event.reason, event.by_fallback
                chapter.ended, chapter.ended_seq = at, event.seq
                del self._chapters[event.rollout_id]

    def _applied(self, event: StageApplied, at: float) -> Step:
        state: dict[str, Any] = {}
        if event.execution is not None:
            key = (event.execution, event.index)
            state = self._state.setdefault(key, dict(self._prototype))
        columns: dict[str, tuple[int, int]] = {}
        for name, mark in event.columns.items():
            length = -1 if mark is None else mark[0]
            columns[name] = (state.get(f"[{name}]", -1), length)
            state[f"[{name}]"] = length
        changes = [change for name, new in event.changed.items() for change in _changes(name, state, new)]
        state.update(event.changed)
        children = len(event.samples[0]) if event.execution is not None and event.samples else 0
        if children and event.execution is not None and (children > 1 or event.samples[0][0].sample.index is None):
            for child, light in enumerate(event.samples[0]):
                self._state[event.execution, self._child_index(event, child)] = _fields(light.sample, light.columns)
        return Step(
            seq=event.seq,
            at=at,
            kind="applied",
            stage=event.stage,
            index=event.index,
            child=event.child,
            seconds=event.seconds,
            waited=event.waited,
            attempts=event.attempts,
            worker=event.worker,
            changes=changes,
            columns=columns,
            children=children if children > 1 else 0,
            dropped=event.dropped,
        )

    def _child_index(self, event: StageApplied, child: int) -> int | None:
        """The number that the pipeline gives to a fanned-out sample."""
        size = max(1, len(self._last[event.rollout_id].executions))
        return None if event.index is None else event.index + (child + 1) * size

    def _completed(self, event: GroupCompleted, chapter: Chapter) -> None:
        for execution in event.samples:
            ids = {light.sample.rollout_id for light in execution}
            for story in chapter.executions:
                if story.execution in ids:
                    story.samples, story.last = len(execution), execution[-1]
                    story.reward = execution[-1].sample.reward
                    if self._place.fanned_out and any(
                        light.sample.index == self.lineage.target.number for light in execution
                    ):
                        self.lineage.execution = story.execution


def _execution(event: Any) -> int | None:
    return getattr(event, "execution", None)


def _fields(sample: Sample, columns: dict[str, Any]) -> dict[str, Any]:
    state = {name: getattr(sample, name) for name in Sample.__struct_fields__}
    state.update((f"[{name}]", mark[0]) for name, mark in columns.items())
    return state


_DICTS = ("metadata", "train_metadata", "reward", "label")


def _changes(name: str, state: dict[str, Any], new: Any) -> list[Change]:
    """A changed field; of a dict only the keys that changed."""
    old = state.get(name, UNSET)
    if name not in _DICTS or not isinstance(new, dict) or not (old is None or isinstance(old, dict)):
        return [Change(name, old, new)]
    old = old or {}
    keys = [*new, *(key for key in old if key not in new)]
    pairs = [(key, old.get(key, UNSET), new.get(key, UNSET)) for key in keys]
    return [Change(f"{name}.{key}", before, after) for key, before, after in pairs if not _equal(before, after)]


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (ValueError, RuntimeError):  # arrays and tensors do not say
        return False
