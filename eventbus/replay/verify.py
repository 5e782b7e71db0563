"""`Replay.verify` for one round: what happened in it, once more, beside its record.

The sample stages run first, execution by execution; then groups go through their stages in the order of the events,
with the count that they saw. The first event that differs is the one with the lowest `seq`, whatever the order of work.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from eventbus.events import (
    BatchAssembled,
    GroupCompleted,
    GroupEnded,
    GroupJudged,
    GroupSubmitted,
    StageApplied,
    StageFailed,
    digest,
    light,
)
from eventbus.group import Batch, Group, Summary, Verdict
from eventbus.ledger import Ledger
from eventbus.log import LogError
from eventbus.replay.compare import samples_differ
from eventbus.replay.record import ExecutionRecord, GroupRecord, NotStored, RoundRecord, plain
from eventbus.replay.report import VerifyReport
from eventbus.replay.run import (
    Divergence,
    Finished,
    GroupRunner,
    Lost,
    Mode,
    SampleRunner,
    Unfinished,
    _Diverged,
    judged,
    side_by_side,
)
from eventbus.replay.stages import regrouped, stages_of
from eventbus.sample import Sample
from eventbus.stage import Drop, Hold
from eventbus.workers import WorkerPool

if TYPE_CHECKING:
    from eventbus.replay.replay import Replay

__all__ = ["Verification", "verdict_of"]

_NUMBER: Final = re.compile(r"0x[0-9a-f]+|\d+")
_OTHER: Final = "it does something else than its record says"


class Verification:
    """One round, strictly."""

    def __init__(self, replay: Replay, round: RoundRecord, report: VerifyReport) -> None:
        self.replay = replay
        self.log = replay.log
        self.round = round
        self.report = report
        self.first: Divergence | None = None
        self.results: dict[tuple[int, int], Finished | Lost | Unfinished] = {}
        self.unread: dict[str, tuple[str, int]] = {}
        """What could not be read: the first and how many, by its text without the numbers."""

    async def run(self, pool: WorkerPool) -> None:
        replay, round = self.replay, self.round
        stages = stages_of(replay.stages, round)
        modes: dict[str, Mode] = {}
        for stage, known in zip(stages, replay.stages, strict=True):
            answers = not known.runs(replay.run_external) or stage.name in round.engines
            modes[stage.name] = "record" if answers else "run"
            if stage.name in round.engines:
                self.report.not_verified[stage.name] = "it asked an engine, whose answers come from the record"
        offers = replay.offers(round)
        samples = SampleRunner(stages, modes, self.log, round, pool, offers, strict=True)
        self.groups = GroupRunner(stages, modes, self.log, round, pool, offers)
        self.modes = modes
        await self._samples(samples)
        walk = _Walk(self)
        try:
            await walk.run()
        except _Diverged as diverged:
            self._found(diverged.divergence)
        for why, count in self.unread.values():
            self.report.notes.append(f"{round}: not verified for {count} executions or groups, the first: {why}")
        self.report.events += round.count
        self.report.divergence = self.first

    async def _samples(self, runner: SampleRunner) -> None:
        todo = [
            (attempt.last, attempt.first, group, execution, number)
            for group in self.round.groups
            for execution in group.executions.values()
            for number, attempt in enumerate(execution.attempts)
            if attempt.traces
        ]
        # In the order in which they came to their end: that of the stages behind the engine, were they to keep a state.
        todo.sort(key=lambda entry: entry[0])

        async def one(entry: tuple[int, int, GroupRecord, ExecutionRecord, int]) -> None:
            _, first, group, execution, number = entry
            if self.first is not None and first > self.first.seq:
                return
            try:
                self.results[execution.id, number] = await runner.execution(group, execution, number)
                self.report.executions += 1
            except _Diverged as diverged:
                self._found(diverged.divergence)
            except (NotStored, LogError) as error:
                self.not_read(error)

        await side_by_side(one, todo)

    def _found(self, divergence: Divergence) -> None:
        if self.first is None or divergence.seq < self.first.seq:
            self.first = divergence

    def not_read(self, error: Exception) -> None:
        why = str(error) if isinstance(error, LogError) else "a column is not in the log: " + str(error)
        alike = _NUMBER.sub("", why)
        first, count = self.unread.get(alike, (why, 0))
        self.unread[alike] = first, count + 1


class _Live:
    """A group in the middle of its group stages."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.said: Drop | Hold | None = None
        self.known = True
        """What the samples hold is known: no stage of unknown doing was at them."""
        self.held = False


class _Walk:
    """The group stages of one round, event by event."""

    def __init__(self, verification: Verification) -> None:
        self.verification = verification
        self.round = verification.round
        self.log = verification.log
        self.runner = verification.groups
        self.live: dict[int, _Live] = {}
        self.ledger = Ledger()
        self.kept: list[_Live] = []
        self.release: list[int] | None = None
        self.stages = {stage.name: stage for stage in self.runner.stages}

    async def run(self) -> None:
        verification = self.verification
        for event, record in self.round.timeline:
            if verification.first is not None and event.seq > verification.first.seq:
                return
            if isinstance(event, BatchAssembled):
                await self._batch(event)
            elif record is None:
                continue
            elif isinstance(event, GroupSubmitted):
                self.ledger.submit(len(record.executions))
            elif isinstance(event, GroupCompleted):
                self._completed(event, record)
            elif isinstance(event, StageApplied | StageFailed):
                if event.index is None:
                    await self._stage(event, record)
            elif isinstance(event, GroupJudged):
                self._judged(event, record)
            elif isinstance(event, GroupEnded):
                self._ended(event, record)

    def _completed(self, event: GroupCompleted, record: GroupRecord) -> None:
        verification = self.verification
        executions: list[list[Sample]] = []
        try:
            stored = None
            for position, row in enumerate(event.samples):
                identity = row[0].sample.rollout_id
                execution = record.executions.get(-1 if identity is None else identity)
                result = None
                if execution is not None and event.at == 0:
                    numbers = [n for n, attempt in enumerate(execution.attempts) if 0 <= attempt.last < event.seq]
                    result = verification.results.get((execution.id, numbers[-1])) if numbers else None
                if isinstance(result, Finished):
                    self._compare(event, record, identity, row, result.samples)
                    executions.append(result.samples)
                else:
                    stored = self.log.samples(event) if stored is None else stored
                    executions.append([plain(sample).copy() for sample in stored[position]])
        except (LogError, NotStored) as error:
            verification.not_read(error)
            self.live.pop(id(record), None)
            return
        live = _Live(Group(record.index, record.prompt, executions))
        if event.at > 0:  # judged in an earlier rollout
            filler = record.ended is not None and record.ended.by_fallback
            live.group.verdict = Verdict(True, by_fallback=filler)
        self.live[id(record)] = live

    def _compare(
        self, event: GroupCompleted, record: GroupRecord, identity: int | None, row: Sequence[Any], now: list[Sample]
    ) -> None:
        if len(now) != len(row):
            raise self._diverged(event, record, "an execution has another number of samples",
                                 {"samples": (len(row), len(now))}, execution=identity)  # fmt: skip
        for sample, shown in zip(now, row, strict=True):
            if found := samples_differ(light(sample), shown):
                raise self._diverged(
                    event,
                    record,
                    "a sample ends as something else, though each of its stages did the same; a wrapper, or code that "
                    "goes on beside the stages, changed it",
                    found,
                    index=sample.index,
                    execution=identity,
                )

    async def _stage(self, event: StageApplied | StageFailed, record: GroupRecord) -> None:
        live = self.live.get(id(record))
        if live is None:
            return
        stage = self.stages.get(event.stage)
        if stage is None:
            raise self._diverged(event, record, "the record has this group stage, which is not among those given")
        verdict, held = verdict_of(record, event)
        if self.verification.modes[stage.name] == "record":
            self._from_record(live, event, verdict, held)
            return
        remaining, target = self.ledger.remaining, self.round.target
        if verdict is not None and verdict.remaining is not None:
            remaining = verdict.remaining
        if verdict is not None and verdict.target is not None:
            target = verdict.target
        self.verification.report.groups += 1
        try:
            live.group, live.said = await self.runner.apply(stage, live.group, remaining, target)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            if isinstance(event, StageApplied):
                raise self._diverged(event, record, f"it raises {told}") from error
            if event.error != told:
                fields = {"error": (event.error, told)}
                raise self._diverged(event, record, "it raises another error", fields) from error
            return
        if isinstance(event, StageFailed):
            raise self._diverged(event, record, f"it raised {event.error}, and does not any more")
        dropped = live.said.reason if isinstance(live.said, Drop) else None
        if dropped != event.dropped:
            raise self._diverged(event, record, _OTHER, {"dropped": (event.dropped, dropped)})

    def _from_record(self, live: _Live, event: StageApplied | StageFailed, verdict: Verdict | None, held: bool) -> None:
        if isinstance(event, StageFailed):
            return
        if event.samples:
            live.group.executions = [[plain(sample).copy() for sample in row] for row in self.log.samples(event)]
        else:
            live.known = False
        live.said = judged(live.group, verdict, held, event.dropped)

    def _judged(self, event: GroupJudged, record: GroupRecord) -> None:
        live = self.live.get(id(record))
        if event.held:
            self.ledger.hold()
            if live is not None:
                live.held = True
        if live is None:
            return
        if live.held and not event.held:  # out of the reserve, to fill the batch
            live.held = False
            self.ledger.release()
            if live.group.verdict is not None:
                live.group.verdict = msgspec.structs.replace(live.group.verdict, kept=True, by_fallback=True)
        elif isinstance(live.said, Hold) != event.held:
            fields = {"held": (event.held, isinstance(live.said, Hold))}
            raise self._diverged(event, record, _OTHER, fields)
        now = live.group.verdict
        if now is None or msgspec.structs.astuple(now) != msgspec.structs.astuple(event.verdict):
            old = msgspec.structs.asdict(event.verdict)
            new = msgspec.structs.asdict(now) if now is not None else dict.fromkeys(old)
            differ = {f"verdict.{name}": (old[name], new[name]) for name in old if not _equal(old[name], new[name])}
            if differ:
                raise self._diverged(event, record, "the verdict is another", differ)

    def _ended(self, event: GroupEnded, record: GroupRecord) -> None:
        live = self.live.get(id(record))
        if live is not None and live.held:
            live.held = False
            self.ledger.release()
        self.ledger.end(event.outcome, event.reason, by_fallback=event.by_fallback)
        if live is None:
            return
        if isinstance(live.said, Drop) and (event.outcome, event.reason) != ("dropped", live.said.reason):
            fields = {"outcome": (f"{event.outcome} {event.reason or ''}".strip(), f"dropped {live.said.reason}")}
            raise self._diverged(event, record, "the group ends in another way", fields)
        if event.outcome == "kept":
            self.kept.append(live)

    async def _batch(self, event: BatchAssembled) -> None:
        round, report = self.round, self.verification.report
        summary = round.finished.summary if round.finished is not None else None
        groups = sorted((live.group for live in self.kept), key=lambda group: group.index)
        modes = self.verification.modes
        left_out = [stage.name for stage in self.runner.batch_stages if modes[stage.name] == "record"]
        left_out += [name for name, stage in self.stages.items() if modes[name] == "record" and not stage.external]
        if len(self.kept) != sum(r.ended is not None and r.ended.outcome == "kept" for r in round.groups):
            report.notes.append(f"{round}: the digest of the batch was not compared: groups of it were not verified")
            return
        if left_out:
            report.notes.append(f"{round}: the digest of the batch was not compared: {', '.join(left_out)} did not run")
            return
        batch = Batch(round.rollout_id, groups, summary or Summary(round.rollout_id))
        # Of sample stages, and of group stages that the run had, the events have told already.
        others = regrouped(self.verification.replay.stages, self.log)
        if others.told:
            raise self._diverged(event, None, f"the run had other stages: now it is {', '.join(others.told)}")
        for stage in self.runner.batch_stages:
            batch = await self.runner.batch(stage, batch)
        now = [group.index for group in batch.groups]
        if now != list(event.groups):
            raise self._diverged(event, None, "the batch has other groups", {"groups": (list(event.groups), now)})
        if (content := digest(batch.groups)) != event.digest:
            raise await self._content_differs(event, content)
        report.batches += 1

    async def _content_differs(self, event: BatchAssembled, content: str) -> _Diverged:
        """The log has no samples behind a group stage: two runs of each are compared, to find the one that drifts."""
        fields: dict[str, tuple[Any, Any]] = {"digest": (event.digest, content)}
        for record in self.round.groups:
            if record.completed is None or record.completed.at or record.ended is None:
                continue
            if record.ended.outcome != "kept":
                continue
            twins = [self._again(record), self._again(record)]
            for done in record.stages:
                if not isinstance(done, StageApplied) or self.verification.modes.get(done.stage) != "run":
                    continue
                verdict, _ = verdict_of(record, done)
                remaining = verdict.remaining if verdict is not None and verdict.remaining is not None else 0
                for position, twin in enumerate(twins):
                    twins[position], _ = await self.runner.apply(
                        self.stages[done.stage], twin, remaining, self.round.target
                    )
                first, second = twins
                for one, other in zip(first.samples, second.samples, strict=False):
                    if found := samples_differ(light(other), light(one)):
                        return self._diverged(
                            done,
                            record,
                            "the batch has another content, and this stage gives something else each time it runs "
                            "(shown: two runs of now)",
                            {**fields, **found},
                            index=one.index,
                        )
        names = [name for name in self.stages if self.verification.modes[name] == "run"]
        names += [stage.name for stage in self.runner.batch_stages]
        return self._diverged(
            event,
            None,
            "the batch has another content: what its samples were before the group stages is the same, so one of "
            f"{', '.join(names) or 'the stages'} wrote something else",
            fields,
        )

    def _again(self, record: GroupRecord) -> Group:
        assert record.completed is not None
        rows = [[plain(sample).copy() for sample in row] for row in self.log.samples(record.completed)]
        return Group(record.index, record.prompt, rows)

    def _diverged(
        self,
        event: Any,
        record: GroupRecord | None,
        what: str,
        fields: Mapping[str, tuple[Any, Any]] | None = None,
        *,
        index: int | None = None,
        execution: int | None = None,
    ) -> _Diverged:
        group = record.index if record is not None else None
        return _Diverged(Divergence.at(event, what, fields, group, index, execution))


def verdict_of(record: GroupRecord, event: Any) -> tuple[Verdict | None, bool]:
    """What a group stage's judgement was, of the event that says that it ran."""
    position = next((n for n, other in enumerate(record.stages) if other is event), len(record.stages))
    if position + 1 < len(record.stages):
        following = record.stages[position + 1]
        if isinstance(following, GroupJudged) and following.stage == event.stage:
            return following.verdict, following.held
    return None, False


def _equal(old: Any, new: Any) -> bool:
    return bool(old == new or (old != old and new != new))
