"""Whether a stream of events keeps the rules that every pipeline keeps.

    seq        goes up by exactly one
    ledger     a group that was submitted ends exactly once, every count adds up, ids are used once
    order      what happens to a sample or a group happens between its beginning and its end, and in its order
    batch      the batch has the groups that were kept, and its digest is that of the recorded samples
    summary    says what the events say

A rule speaks of what has happened, never of what is still to come: a stream that breaks none has no prefix that does.
What a user's stage may do (catch an error, run the stages behind it twice, drop without saying why) breaks none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal

import msgspec

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
    UnknownEvent,
    WeightsUpdated,
    digest,
)
from eventbus.group import Group, Summary
from eventbus.ledger import Ledger
from eventbus.log.format import LogError
from eventbus.sample import Sample
from eventbus.wire import WireError

__all__ = ["CheckReport", "Checker", "Rule", "Violation", "check"]

Rule = Literal["seq", "ledger", "order", "batch", "summary"]
Samples = Callable[[Any], list[list[Sample]]]
RoundKey = tuple[int, bool]


class Violation(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A rule that the stream broke, and the event at which that shows."""

    seq: int
    rule: Rule
    rollout_id: int
    evaluation: bool = False
    group_index: int | None = None
    execution: int | None = None
    text: str
    after_gap: bool = False
    """Events before it are missing: it may be no more than a consequence of that."""

    def __str__(self) -> str:
        place = f"{'evaluation' if self.evaluation else 'rollout'} {self.rollout_id}"
        if self.group_index is not None:
            place += f", group {self.group_index}"
        if self.execution is not None:
            place += f", execution {self.execution}"
        return f"seq {self.seq}: {self.rule}: {place}: {self.text}"


class CheckReport(msgspec.Struct, omit_defaults=True):
    """What `check` found."""

    violations: list[Violation] = []
    events: int = 0
    rollouts: int = 0
    """Rollouts and evaluations that were finished."""
    groups: int = 0
    unfinished: list[str] = []
    """Rollouts that the stream does not see the end of, a line each. No violation."""
    unknown: dict[str, int] = {}
    """Events of kinds that only a newer version knows."""
    digests: int = 0
    """Batches whose digest was computed again from the recorded samples."""
    unverified: int = 0
    """Batches whose digest could not be: their samples are not in the stream as they entered the batch."""

    @property
    def ok(self) -> bool:
        return not self.violations


def check(events: Iterable[Event], *, samples: Samples | None = None, batch_stages: bool = False) -> CheckReport:
    """Go through the events and list every violation.

    :param samples: gives the whole samples of an event that shows some (`LogReader.samples`); without it the digests of
        batches are not computed again.
    :param batch_stages: the pipeline has stages that may change a batch: it need not consist of what was kept.
    """
    checker = Checker(samples=samples, batch_stages=batch_stages)
    for event in events:
        checker.feed(event)
    return checker.report()


class _Group:
    """A group under way."""

    __slots__ = (
        "completed", "dropping", "executions", "failed", "held", "index", "judged_by", "known", "last", "lost",
        "must_end", "resubmitted", "shown", "stage", "touched", "verdict",
    )  # fmt: skip

    def __init__(self, index: int, executions: Collection[int], known: bool = True) -> None:
        self.index = index
        self.executions = frozenset(executions)
        self.known = known
        """Its submission is in the stream."""
        self.shown: Any = None
        """The last event that shows all its samples."""
        self.held = self.failed = False
        self.resubmitted = 0
        """Samples of it that the event before said would be generated anew."""
        self.begin()

    def begin(self) -> None:
        """From its prompts, also when a group stage has it generated anew."""
        self.completed = self.must_end = self.dropping = False
        self.lost: set[int] = set()
        self.last: dict[int, str] = {}
        """Per execution the stage of its last event."""
        self.stage: str | None = None
        """The group stage that it was in last."""
        self.judged_by: str | None = None
        self.verdict: Any = None
        self.touched: set[str] = set()
        """Group stages that may have changed its samples since they were shown."""


class _Round:
    """One rollout or evaluation."""

    def __init__(self, started: RolloutStarted | None) -> None:
        self.started = started
        self.open = 1
        """Evaluations under way that share this number: their events cannot be told apart."""
        self.shared = False
        self.ledger = Ledger()
        self.groups: dict[int, list[_Group]] = {}
        self.ended: set[int] = set()
        self.kept: list[tuple[int, Any]] = []
        self.number = 0
        self.failed_samples = self.resubmitted = 0
        self.assembled: BatchAssembled | None = None
        self.finished = self.trained = False
        self.version: str | None = None

    @property
    def spec(self) -> dict[str, Any]:
        return self.started.batch if self.started is not None else {}

    @property
    def whole(self) -> bool:
        """All its events are told apart from others, from the first on."""
        return self.started is not None and not self.shared


class Checker:
    """`check`, event by event."""

    def __init__(self, *, samples: Samples | None = None, batch_stages: bool = False) -> None:
        self.violations: list[Violation] = []
        self._samples = samples
        self._batch_stages = batch_stages
        self._rounds: dict[RoundKey, _Round] = {}
        self._next: int | None = None
        self._first = 0
        self._gap = False
        self._executions: set[int] = set()
        self._given_back: dict[tuple[int, str], list[frozenset[int]]] = {}
        self._events = self._finished = self._groups = self._digests = self._unverified = 0
        self._unknown: Counter[str] = Counter()
        self._event: Event

    def feed(self, event: Event) -> None:
        """The next event, in the order of the stream."""
        self._event = event
        self._events += 1
        self._sequence(event)
        match event:
            case UnknownEvent():
                self._unknown[event.kind] += 1
            case RolloutStarted():
                self._on_started(event)
            case AttemptEnded():
                pass  # one that nobody wants any more may end after its group, and after its rollout
            case WeightsUpdated() if event.workers:
                pass  # an engine says so, whenever it has them
            case BatchTrained() | WeightsUpdated():
                self._on_trained(event)
            case _:
                self._in_round(event, self._round(event))

    def report(self) -> CheckReport:
        """What was found so far."""
        return CheckReport(
            violations=list(self.violations),
            events=self._events,
            rollouts=self._finished,
            groups=self._groups,
            unfinished=[
                f"{_named(key)}: {sum(map(len, round_.groups.values()))} groups under way, {round_.ledger.kept} kept"
                for key, round_ in self._rounds.items()
                if not round_.finished
            ],
            unknown=dict(self._unknown),
            digests=self._digests,
            unverified=self._unverified,
        )

    def _broken(
        self, rule: Rule, text: str, *, group: int | None = None, execution: int | None = None, seq: int | None = None
    ) -> None:
        event = self._event
        self.violations.append(
            Violation(
                seq=event.seq if seq is None else seq,
                rule=rule,
                rollout_id=event.rollout_id,
                evaluation=event.evaluation,
                group_index=group,
                execution=execution,
                text=text,
                after_gap=self._gap and rule != "seq",
            )
        )

    def _sequence(self, event: Event) -> None:
        if self._next is None:
            self._next = self._first = event.seq
        if event.seq > self._next:
            missing = f"{self._next}" if event.seq == self._next + 1 else f"{self._next} to {event.seq - 1}"
            self._broken("seq", f"missing before it: {missing}")
            self._gap = True
        elif event.seq < self._next:
            self._broken("seq", f"comes again, or late: {self._next} was next")
        self._next = max(self._next, event.seq + 1)

    # Rollouts

    def _on_started(self, event: RolloutStarted) -> None:
        key = _key(event)
        before = self._rounds.get(key)
        if before is not None and not before.finished:
            if event.evaluation:
                before.open += 1
                before.shared = True
                return
            self._broken("order", "started again while it was under way")
        self._rounds[key] = _Round(event)

    def _round(self, event: Event) -> _Round:
        key = _key(event)
        round_ = self._rounds.get(key)
        if round_ is None:
            self._broken("order", f"{_kind(event)} without rollout_started before it")
            round_ = self._rounds[key] = _Round(None)
        elif round_.finished:
            self._broken("order", f"{_kind(event)} after rollout_finished")
        return round_

    def _on_trained(self, event: BatchTrained | WeightsUpdated) -> None:
        round_ = self._rounds.get(_key(event))
        if round_ is None:
            if not self._first:  # else the batch may be one of a part of the run that another log has
                self._broken("order", f"{_kind(event)} of a rollout that never started")
            return
        if isinstance(event, BatchTrained):
            if round_.started is not None and (not round_.finished or round_.assembled is None):
                self._broken("order", "batch_trained before there was a batch")
            elif round_.trained:
                self._broken("order", "batch_trained twice")
            round_.trained, round_.version = True, event.weight_version
        elif not round_.trained or round_.version != event.version:
            self._broken("order", f"weights_updated to {event.version!r}, which no batch_trained before it says")

    def _in_round(self, event: Any, round_: _Round) -> None:
        match event:
            case GroupSubmitted():
                self._on_submitted(event, round_)
            case SampleGenerated() | StageApplied() | StageFailed():
                if event.execution is not None:
                    self._on_sample(event, round_)
                elif event.group_index is not None:
                    self._on_group(event, round_)
            case GroupCompleted():
                self._on_completed(event, round_)
            case GroupJudged():
                self._on_judged(event, round_)
            case GroupEnded():
                self._on_ended(event, round_)
            case BatchAssembled():
                self._on_assembled(event, round_)
            case RolloutFinished():
                self._on_finished(event, round_)

    def _on_finished(self, event: RolloutFinished, round_: _Round) -> None:
        round_.open -= 1
        if round_.open > 0:
            return
        for group in [group for live in round_.groups.values() for group in live]:
            self._broken("ledger", "the rollout finished, and it has not ended", group=group.index)
        if event.summary is not None and round_.whole:
            self._compare(event.summary, round_)
        kept = round_.ledger.kept
        if kept and event.error is None and not event.evaluation and round_.whole and round_.assembled is None:
            self._broken("batch", f"finished with {kept} groups kept, but without batch_assembled")
        round_.finished = True
        round_.groups.clear()
        self._finished += 1

    def _compare(self, summary: Summary, round_: _Round) -> None:
        ledger = round_.ledger
        told: dict[str, Any] = {
            name: getattr(ledger, name)
            for name in ("submitted", "kept", "kept_by_fallback", "dropped", "failed", "cancelled", "recycled",
                         "carried", "surplus")
        }  # fmt: skip
        told["failed_samples"] = round_.failed_samples
        told["resubmitted_samples"] = round_.resubmitted
        # A batch that nobody took has no samples in its summary.
        if round_.assembled is not None and not self._batch_stages and (summary.samples or summary.loss_tokens):
            told["samples"], told["loss_tokens"] = round_.assembled.samples, round_.assembled.loss_tokens
        for name, count in told.items():
            if getattr(summary, name) != count:
                self._broken("summary", f"says {name}={getattr(summary, name)}, the events say {count}")
        if summary.rounds < round_.number:
            self._broken("summary", f"says rounds={summary.rounds}, the events say {round_.number}")

    # Groups

    def _on_submitted(self, event: GroupSubmitted, round_: _Round) -> None:
        index, ids = event.group_index, frozenset(event.executions)
        self._groups += 1
        if len(ids) != len(event.executions) or len(event.indices) != len(event.executions) or not ids:
            self._broken("ledger", f"executions {event.executions} with indices {event.indices}", group=index)
        if event.round < round_.number:
            self._broken("order", f"submitted in round {event.round}, after round {round_.number} began", group=index)
        rounds = round_.spec.get("max_rounds")
        if not event.evaluation and isinstance(rounds, int) and event.round > rounds:
            self._broken("ledger", f"submitted in round {event.round} of at most {rounds}", group=index)
        round_.number = max(round_.number, event.round)
        if event.origin in ("new", "restarted"):
            if used := sorted(ids & self._executions):
                self._broken("ledger", f"the executions {used} were submitted before", group=index)
            size = round_.started.group_size if round_.started is not None else len(ids)
            if len(ids) > size:
                self._broken("ledger", f"{len(ids)} executions in a group of {size}", group=index)
        if event.origin != "new":
            self._take_back(event, ids)
        self._executions |= ids
        group = _Group(index, ids)
        round_.groups.setdefault(index, []).append(group)
        round_.ledger.submit(len(ids))

    def _take_back(self, event: GroupSubmitted, ids: frozenset[int]) -> None:
        given = self._given_back.get((event.group_index, event.origin), [])
        if event.origin == "restarted":
            if given:
                given.pop()
                return
        elif (before := next((each for each in given if ids <= each), None)) is not None:
            given.remove(before)
            return
        if not self._first:
            ended = {"carried": "as carried, or in a batch that was handed back", "recycled": "as recycled"}
            self._broken(
                "ledger",
                f"submitted as {event.origin}, but it never ended {ended.get(event.origin, 'as cancelled')} before",
                group=event.group_index,
            )

    def _live(self, event: Any, round_: _Round, wanted: Callable[[_Group], bool]) -> _Group:
        """The group that the event is about; one to go on with where there is none."""
        live = round_.groups.get(event.group_index, [])
        if live:
            return next(filter(wanted, live), live[0])
        if not round_.finished:  # else it was said already
            what = "after it ended" if event.group_index in round_.ended else "before it was submitted"
            self._broken("ledger" if isinstance(event, GroupEnded) else "order", f"{_kind(event)} {what}",
                         group=event.group_index, execution=getattr(event, "execution", None))  # fmt: skip
        group = _Group(event.group_index, (), known=False)
        if event.group_index not in round_.ended and not isinstance(event, GroupEnded):
            round_.groups[event.group_index] = [group]
            round_.ledger.submit(0)
        return group

    def _over(self, event: Any, group: _Group) -> None:
        """Nothing but its end may follow what took it out of the stream."""
        group.resubmitted = 0
        if group.must_end or group.dropping:
            after = "after it failed" if group.must_end else "after it was rejected"
            self._broken("order", f"{_kind(event)} {after}", group=group.index)
            group.must_end = group.dropping = False

    def _on_sample(self, event: SampleGenerated | StageApplied | StageFailed, round_: _Round) -> None:
        execution = event.execution
        assert execution is not None
        group = self._live(event, round_, lambda group: execution in group.executions)
        where = {"group": group.index, "execution": execution}
        if not group.known:
            return
        self._over(event, group)
        if execution not in group.executions:
            self._broken("ledger", f"{_kind(event)} of an execution that the group does not have", **where)
        if group.completed:
            self._broken("order", f"{_kind(event)} after group_completed", **where)
        if execution in group.lost:
            self._broken("order", f"{_kind(event)} after the execution failed", **where)
        last = group.last.get(execution)
        if isinstance(event, SampleGenerated) and last != event.stage:
            before = "nothing" if last is None else f"stage {last!r}"
            self._broken("order", f"sample_generated by stage {event.stage!r} comes after {before}", **where)
        group.last[execution] = event.stage
        if not isinstance(event, StageFailed):
            return
        group.failed = True
        if event.policy == "resubmit":
            group.resubmitted = 1
            round_.resubmitted += 1
            round_.failed_samples += 1
            del group.last[execution]
        elif event.policy == "fail":
            round_.failed_samples += 1
            group.lost.add(execution)
            group.must_end = len(group.executions) - len(group.lost) < self._least(group, round_)
        else:
            group.must_end = True

    def _least(self, group: _Group, round_: _Round) -> int:
        """Executions that the group cannot do without."""
        size = len(group.executions)
        least = round_.spec.get("min_group_size")
        return min(least, size) if isinstance(least, int) else size if round_.started is not None else 0

    def _on_group(self, event: Any, round_: _Round) -> None:
        """A group stage was applied, or failed."""
        group = self._live(event, round_, lambda group: group.completed)
        if not group.known:
            return
        self._over(event, group)
        if not group.completed:
            self._broken("order", f"group stage {event.stage!r} before group_completed", group=group.index)
        if isinstance(event, StageFailed):
            group.failed = True
            if event.policy == "resubmit":
                group.resubmitted = len(group.executions)
                round_.resubmitted += len(group.executions)
                round_.failed_samples += self._group_size(group, round_)
                group.begin()
            else:
                round_.failed_samples += 0 if event.policy == "raise" else self._group_size(group, round_)
                group.must_end = True
        elif isinstance(event, StageApplied):
            if group.held:
                self._broken("order", f"group stage {event.stage!r} while it was held in reserve", group=group.index)
            group.stage, group.judged_by = event.stage, None
            group.dropping = event.dropped is not None
            if event.samples:
                group.shown = event
                group.touched.clear()
            else:
                group.touched.add(event.stage)

    def _group_size(self, group: _Group, round_: _Round) -> int:
        return round_.started.group_size if round_.started is not None else len(group.executions)

    def _on_completed(self, event: GroupCompleted, round_: _Round) -> None:
        shown = {ids.pop() for execution in event.samples if len(ids := _ids(execution)) == 1}
        group = self._live(event, round_, lambda group: shown <= group.executions)
        group.shown = event
        group.touched.clear()
        if not group.known:
            group.completed = True
            return
        self._over(event, group)
        if group.completed:
            self._broken("order", "group_completed twice", group=group.index)
        group.completed = True
        if foreign := sorted(shown - group.executions):
            self._broken("ledger", f"completed with the executions {foreign} of others", group=group.index)
        if back := sorted(shown & group.lost):
            self._broken("ledger", f"completed with the executions {back}, which failed", group=group.index)
        count = len(event.samples)
        # Of a carried group, a group stage in the rollout before may have left fewer.
        least = 0 if event.at else self._least(group, round_)
        if not least <= count <= len(group.executions) - len(group.lost):
            lost = f", {len(group.lost)} of them lost" if group.lost else ""
            self._broken(
                "ledger", f"completed with {count} executions of {len(group.executions)}{lost}", group=group.index
            )

    def _on_judged(self, event: GroupJudged, round_: _Round) -> None:
        group = self._live(event, round_, lambda group: group.completed)
        if not group.known:
            return
        verdict, ledger = event.verdict, round_.ledger
        if group.must_end:
            self._over(event, group)
        if not group.completed:
            self._broken("order", "judged before group_completed", group=group.index)
        if group.stage != event.stage:
            self._broken("order", f"judged by {event.stage!r}, after group stage {group.stage!r}", group=group.index)
        if group.held:
            if event.held or not verdict.kept:
                self._broken("order", "judged again while it was held in reserve", group=group.index)
            group.held = False
            ledger.release()
        else:
            if group.judged_by == event.stage:
                self._broken("order", f"judged twice by {event.stage!r}", group=group.index)
            if round_.whole and verdict.remaining is not None and verdict.remaining < ledger.remaining:
                self._broken(
                    "ledger",
                    f"judged at remaining={verdict.remaining}, when {ledger.remaining} could still fill the batch",
                    group=group.index,
                )
            if event.held:
                group.held = True
                ledger.hold()
        if round_.started is not None and verdict.target not in (None, round_.started.target):
            self._broken("ledger", f"judged for target={verdict.target}, which is {round_.started.target}",
                         group=group.index)  # fmt: skip
        group.verdict, group.judged_by = verdict, event.stage
        group.dropping = not verdict.kept and not event.held
        group.touched.discard(event.stage)

    def _on_ended(self, event: GroupEnded, round_: _Round) -> None:
        outcome = event.outcome
        finishes = outcome in ("kept", "surplus", "carried")
        group = self._live(event, round_, lambda group: group.completed is finishes)
        ids = group.executions
        if (live := round_.groups.get(group.index)) is None or group not in live:
            return  # it ended before, or never began
        live.remove(group)
        if not live:
            del round_.groups[group.index]
        round_.ended.add(group.index)
        if outcome == "failed":  # more failed than the rollout tolerates: it was not generated anew after all
            round_.resubmitted -= group.resubmitted
        if group.held:
            round_.ledger.release()
        round_.ledger.end(outcome, event.reason, by_fallback=event.by_fallback)
        if group.known and (fault := self._fault(event, group)):
            self._broken("order", f"ended {outcome}{fault}", group=group.index)
        if event.by_fallback and (outcome != "kept" or (group.verdict and not group.verdict.by_fallback)):
            self._broken("ledger", f"ended {outcome} by_fallback, but its verdict was another", group=group.index)
        if not round_.ledger.balanced:
            self._broken("ledger", "the counts do not add up any more", group=group.index)
        if outcome == "kept":
            round_.kept.append((group.index, None if group.touched else group.shown))
        origin = {"kept": "carried", "carried": "carried", "recycled": "recycled", "cancelled": "restarted"}.get(
            outcome
        )
        if origin is not None and not event.evaluation:
            self._given_back.setdefault((group.index, origin), []).append(ids)

    def _fault(self, event: GroupEnded, group: _Group) -> str | None:
        """What an outcome cannot follow."""
        rejected = group.dropping or group.held
        match event.outcome:
            case "kept" | "surplus" | "carried":
                if not group.completed:
                    return " before group_completed"
                if group.must_end:
                    return ", but it failed"
                if rejected or (group.verdict is not None and not group.verdict.kept):
                    return ", but its verdict was to reject it"
            case "dropped" if group.completed and not rejected:
                return ", but no stage dropped it"
            case "failed" if not group.failed and not event.evaluation:
                return ", but no stage of it failed"
            case "failed" | "recycled" if group.dropping:
                return ", but it was rejected"
        return None

    # Batches

    def _on_assembled(self, event: BatchAssembled, round_: _Round) -> None:
        if event.evaluation:
            self._broken("batch", "an evaluation has no batch")
        if round_.assembled is not None:
            self._broken("order", "batch_assembled twice")
        round_.assembled = event
        for group in [group for live in round_.groups.values() for group in live]:
            self._broken("ledger", "the batch was assembled, and it has not ended", group=group.index)
        if self._batch_stages or not round_.whole:
            self._unverified += 1
            return
        kept = sorted(index for index, _ in round_.kept)
        if event.groups != kept:
            odd = Counter(event.groups)
            odd.subtract(kept)
            extra, missing = sorted((+odd).elements()), sorted((-odd).elements())
            parts = [f"has {extra}, which were not kept"] if extra else []
            parts += [f"lacks {missing}, which were"] if missing else []
            self._broken("batch", "the batch " + (" and ".join(parts) or "is not in the order of its groups"))
        target = round_.started.target if round_.started is not None else len(kept)
        if len(event.groups) > target or (len(event.groups) < target and round_.spec.get("on_exhausted") != "partial"):
            self._broken("batch", f"the batch has {len(event.groups)} groups of {target}")
        self._check_digest(event, round_)

    def _check_digest(self, event: BatchAssembled, round_: _Round) -> None:
        kept = sorted(round_.kept, key=lambda each: each[0])
        if self._samples is None or any(shown is None for _, shown in kept):
            self._unverified += 1
            return
        try:
            groups = [Group(index, "", self._samples(shown)) for index, shown in kept]
            recorded = digest(groups)
        except (LogError, WireError, OSError, ValueError) as error:
            self._unverified += 1
            self._broken("batch", f"its samples cannot be read: {error}")
            return
        self._digests += 1
        if recorded != event.digest:
            self._broken(
                "batch",
                f"its digest is {event.digest}, that of the recorded samples {recorded} (they were changed by what "
                "left no event; or they hold sets or structs, which a log gives back as lists and dicts)",
            )


def _ids(execution: list[LightSample]) -> set[int]:
    return {light.sample.rollout_id for light in execution if light.sample.rollout_id is not None}


def _key(event: Event) -> RoundKey:
    return event.rollout_id, event.evaluation


def _named(key: RoundKey) -> str:
    return f"{'evaluation' if key[1] else 'rollout'} {key[0]}"


def _kind(event: Any) -> str:
    return str(event.kind)
