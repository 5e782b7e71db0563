"""`Replay`: the stages of a recorded run, run again without its engine.

    Replay(log).verify()                                the same stages: the first event that differs
    Replay(log).what_if({"DynamicFilter": stricter})    other stages: what the batches would have been
    Replay(log).steps(stage="judge", sample=1234)       the samples in front of a stage, to run it on

What keeps these promises is that a replay goes along the record, one execution after the other, and never invents: what
an engine or an external stage answered comes from the log, and where the log has no answer the replay says so.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from difflib import get_close_matches
from functools import partial
from inspect import isawaitable
from typing import Any, Final

from eventbus.context import RolloutContext, _current
from eventbus.events import (
    GroupCompleted,
    GroupJudged,
    StageApplied,
    StageFailed,
)
from eventbus.group import Group, Verdict
from eventbus.log import LogError, LogReader
from eventbus.pipeline import Pipeline
from eventbus.replay.record import (
    Change,
    ExecutionRecord,
    GroupRecord,
    NotStored,
    RecordedLog,
    ReplayError,
    RoundRecord,
    limited,
    plain,
)
from eventbus.replay.report import RoundDifference, VerifyReport, WhatIfReport
from eventbus.replay.run import (
    Finished,
    GroupRunner,
    Lost,
    Mode,
    SampleRunner,
    Stop,
    Unfinished,
    _GroupJob,
    judged,
    run_alone,
    side_by_side,
)
from eventbus.replay.stages import Known, Regrouped, given, named_in, regrouped, replacement, stages_of
from eventbus.replay.verify import Verification, verdict_of
from eventbus.replay.whatif import Arrival, Rewards, Simulation, changed_rewards, mean_reward, rewards_of
from eventbus.sample import Sample
from eventbus.stage import ContractError, Drop, Hold, Stage
from eventbus.workers import WorkerPool

__all__ = ["Replay", "Step"]

_GROUP_KINDS: Final = (
    "rollout_started",
    "group_submitted",
    "group_completed",
    "group_judged",
    "group_ended",
    "batch_assembled",
    "rollout_finished",
)


class Step:
    """A sample or a group in front of a stage, as the record has it there. Change it as you like: it is a copy."""

    def __init__(
        self,
        context: RolloutContext,
        stage: Stage,
        event: StageApplied | StageFailed | None,
        why_not: str | None,
        pool_offers: Mapping[str, Any],
        *,
        sample: Sample | None = None,
        inner: Sample | None = None,
        group: Group | None = None,
        count: Mapping[str, int] | None = None,
    ) -> None:
        self.context = context
        """What `current_rollout()` shows to the stage."""
        self.sample = sample
        self.group = group
        self.event = event
        """What the stage did in the run; None where the run did not come that far."""
        self.stage = stage.name
        self.level = stage.level
        self.function = stage.function
        self._stage = stage
        self._inner = inner
        self._count = dict(count or {})
        self._offers = pool_offers
        self._why_not = why_not

    def run(self) -> Any:
        """Run the stage on a copy: the sample or group after it, or a list of samples, `Drop` or `Hold`.

        A wrapper gets from `call_next` what the stages inside it gave in the run.

        :raises ReplayError: the stage cannot be run here.
        :raises Exception: whatever the stage raises.
        """
        if self._why_not is not None:
            raise ReplayError(f"stage {self.stage!r} cannot be run here: {self._why_not}")
        return run_alone(self._run)

    async def _run(self, pool: WorkerPool) -> Any:
        value: Any = self.sample.copy() if self.sample is not None else _copied(self.group)
        offers = {**self._offers, **self._count} if self._stage.counts else self._offers
        result = await pool.slice.isolated(copy_context(), _GroupJob(self.context), self._call(value, offers))
        return value if result is None else result

    async def _call(self, value: Any, offers: Mapping[str, Any]) -> Any:
        _current.set(self.context)
        self.context.stage = self.stage
        call = self._stage.call(offers)
        result = call(value, self._next) if self._stage.wraps else call(value)
        return await result if isawaitable(result) else result

    async def _next(self, sample: Sample) -> Sample:
        return sample if self._inner is None else self._inner.copy()

    def __repr__(self) -> str:
        at = self.context
        kind = "evaluation" if at.evaluation else "rollout"
        what = f"group {at.group_index}" + (f", sample {at.index}" if at.index is not None else "")
        seq = f", seq {self.event.seq}" if self.event is not None else ", where the record ends"
        return f"<step {kind} {at.rollout_id}, {what}, stage {self.stage!r}{seq}>"


class Replay:
    """A recorded run, to be run again.

    :param log: a `LogReader` or the path of a log.
    :param stages: the stages of the run, or the pipeline that has them. Without them those that the log names are
        imported, from its configuration where it has one, as far as they are stages of rolloutbus or lie in the
        current folder or beside the program; one that cannot be had answers from the record.
    :param run_external: run stages marked `external` again, too.
    :param trust: import and run whatever the log names, with the options that it gives.
    :param args: what the run had as `Pipeline(args=...)`; taken from a pipeline that is given.
    :raises ReplayError: the log names no stages and none are given.
    :raises LogError: the log cannot be read.
    """

    def __init__(
        self,
        log: RecordedLog | str | os.PathLike[str],
        stages: Sequence[Any] | Pipeline | None = None,
        *,
        run_external: bool = False,
        args: Any = None,
        trust: bool = False,
    ) -> None:
        self.log: RecordedLog = LogReader(log) if isinstance(log, str | os.PathLike) else log
        self.run_external = run_external
        self.trust = trust
        self._args = stages._args if isinstance(stages, Pipeline) and args is None else args
        self._known = given(stages) if stages is not None else named_in(self.log, trust=trust)

    @property
    def stages(self) -> list[Known]:
        """The stages in their order, with those that cannot be had."""
        return list(self._known)

    def stage(self, name: str) -> Known:
        """:raises ReplayError: there is none of this name."""
        for known in self._known:
            if known.name == name:
                return known
        names = [known.name for known in self._known]
        near = get_close_matches(name, names, n=1)
        advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
        raise ReplayError(f"there is no stage {name!r}; {advice}")

    # Verify

    def verify(self, rollouts: Collection[int] | None = None) -> VerifyReport:
        """Run the stages again on what was recorded, up to the first event that differs.

        :param rollouts: which; default: all, and all evaluations.
        :raises LogError: there is no such rollout.
        """
        report = VerifyReport()
        for known in self._known:
            if known.missing is not None:
                report.not_verified[known.name] = known.missing
            elif known.external and not self.run_external:
                report.not_verified[known.name] = "external: it answered from the record"

        async def run(pool: WorkerPool) -> None:
            for round in self._rounds(rollouts, None, report.notes):
                await Verification(self, round, report).run(pool)
                if report.divergence is not None:
                    return
                report.rounds += 1

        run_alone(run)
        return report

    # What if

    def what_if(self, stages: Mapping[str, Any], rollouts: Collection[int] | None = None) -> WhatIfReport:
        """What the batches would have been with other stages in the place of those of these names.

        Stages that this replay was given and the run did not have count as changed, too, and so do those that it had
        and that were not given. Stages before the first changed one answer from the record. Where only group stages
        change that look at rewards, lengths or metadata, no column of the log is read.

        :param rollouts: which; default: all that have finished.
        :raises ReplayError: there is no such stage, it asked an engine, or its replacement has another level; or what
            it does would have ended the rollout.
        :raises LogError: there is no such rollout.
        """
        changed = {name: replacement(name, self.stage(name), stage) for name, stage in stages.items()}
        known = [changed.get(each.name, each) for each in self._known]
        if batch := [name for name, each in changed.items() if each.level == "batch"]:
            raise ReplayError(
                f"{batch[0]!r} is a batch stage: a what-if leads up to the batch; verify with the new one among the "
                "stages, which compares what is in the batch"
            )
        others = regrouped(known, self.log)
        report = WhatIfReport([*changed, *others.told])
        samples_change = others.samples or any(each.level == "sample" for each in changed.values())
        fast = not samples_change and all(each.runs(self.run_external) for each in known if each.level == "group")

        async def run(pool: WorkerPool) -> None:
            for round in self._rounds(rollouts, _GROUP_KINDS if fast else None, report.notes, evaluation=False):
                if rollouts is not None or _came_to_an_end(round):
                    report.rollouts.append(await _WhatIf(self, round, known, changed, others, report).run(pool))
                else:
                    report.notes.append(f"{round}: left out, since it did not come to its end; name it to look at it")

        with _uncollected() if fast else nullcontext():
            run_alone(run)
        return report

    # Step

    def steps(
        self,
        *,
        rollout: int | None = None,
        stage: str | None = None,
        group: int | None = None,
        sample: int | None = None,
        evaluation: bool = False,
    ) -> Iterator[Step]:
        """The samples and groups in front of the stages, as the record has them there, group by group.

        Where the log lacks a column that a stage wrote, the stages of that execution run again up to there.

        :param sample: `Sample.index`; leaves out group stages.
        :raises ReplayError: there is no such stage.
        :raises LogError: there is no such rollout.
        """
        if stage is not None:
            self.stage(stage)
        return self._steps(rollout, stage, group, sample, evaluation)

    def _steps(
        self, rollout: int | None, stage: str | None, group: int | None, sample: int | None, evaluation: bool
    ) -> Iterator[Step]:
        wanted = None if rollout is None else [rollout]
        for round in self._rounds(wanted, None, [], training=not evaluation, evaluation=evaluation):
            for record in round.groups:
                if group is not None and record.index != group:
                    continue
                yield from _Steps(self, round, record).walk(stage, sample)

    # Shared

    def offers(self, round: RoundRecord) -> dict[str, Any]:
        """What stages can ask for by keyword."""
        return {
            "rollout_id": round.rollout_id,
            "evaluation": round.evaluation,
            "args": self._args,
            "sampling": {},
        }

    def _rounds(
        self,
        rollouts: Collection[int] | None,
        kinds: Collection[str] | None,
        notes: list[str],
        *,
        training: bool = True,
        evaluation: bool = True,
    ) -> Iterator[RoundRecord]:
        log = self.log
        rounds = list(log.rounds)
        there = {part.rollout_id for part in rounds}
        for number in rollouts or ():
            if number not in there:
                near = min(there, key=lambda other: abs(other - number), default=None)
                raise LogError(f"no rollout {number} in this log" + (f"; the nearest is {near}" if there else ""))
        for part in rounds:
            if rollouts is not None and part.rollout_id not in rollouts:
                continue
            if (part.evaluation and not evaluation) or (not part.evaluation and not training):
                continue
            events = log.events(kinds, rollout=part.rollout_id, evaluation=part.evaluation)
            round = RoundRecord(events, part.rollout_id, part.evaluation)
            if damaged := [hurt for hurt in getattr(log, "damage", ()) if _overlaps(hurt, part)]:
                notes.append(f"{round}: left out, since events of it are missing: {damaged[0]}")
            elif round.started is not None or round.groups:  # else known by its end only
                with limited(log):
                    yield round
        for hurt in getattr(log, "damage", ()) if rollouts is None else ():
            if not any(_overlaps(hurt, part) for part in rounds):
                notes.append(f"something may be missing: {hurt}")


class _WhatIf:
    """One rollout with other stages."""

    def __init__(
        self,
        replay: Replay,
        round: RoundRecord,
        known: list[Known],
        changed: Mapping[str, Known],
        others: Regrouped,
        report: WhatIfReport,
    ) -> None:
        self.replay = replay
        self.log = replay.log
        self.round = round
        self.known = known
        self.changed = changed
        self.others = others
        self.report = report
        self.unfinished: dict[str, int] = {}
        self.unread: list[str] = []
        self.revived = 0
        """Groups that were lost in the run, and would now go on to what was never generated."""
        self.samples_change = others.samples or any(each.level == "sample" for each in changed.values())

    async def run(self, pool: WorkerPool) -> RoundDifference:
        round = self.round
        for name in (*self.changed, *self.others.gone):
            if name in round.engines:
                raise ReplayError(
                    f"{name!r} asked an engine: what another would have answered is not in the log; "
                    "replay it under a pipeline with ReplayEngine, or generate anew"
                )
        stages = stages_of(self.known, round)
        modes = self._modes(stages)
        self.modes = modes
        offers = self.replay.offers(round)
        self.runner = GroupRunner(stages, modes, self.log, round, pool, offers)
        old, arrivals = await self._arrivals(stages, offers, pool)
        now = {id(a.record): rewards_of(a.group) for a in arrivals if a.group is not None}
        simulation = Simulation(round, arrivals, self.unfinished, self.runner.stages, self._apply)
        await simulation.run()
        difference = simulation.difference()
        both = [(old[key], now[key]) for key in now if key in old]
        kept = [rewards_of(group) for group in simulation.kept.values()]
        summary = round.finished.summary if round.finished is not None else None
        old_kept = [old[id(record)] for record in round.groups if record.kept and id(record) in old]
        difference.rewards = {
            "generated": Change(mean_reward(one for one, _ in both), mean_reward(now.values())),
            "kept": Change(summary.kept_reward_mean if summary else mean_reward(old_kept), mean_reward(kept)),
        }
        difference.changed_rewards = sum(changed_rewards(one, other) for one, other in both)
        self._notes(simulation)
        return difference

    def _modes(self, stages: list[Stage], *, prefix_runs: bool = False) -> dict[str, Mode]:
        first = next((n for n, stage in enumerate(stages) if stage.name in self.changed), len(stages))
        first = min(first, self.others.first)
        modes: dict[str, Mode] = {}
        for position, (stage, known) in enumerate(zip(stages, self.known, strict=True)):
            answers = not known.runs(self.replay.run_external) or stage.name in self.round.engines
            if stage.level == "sample" and position < first and not stage.wraps and not prefix_runs:
                answers = True
            if stage.name in self.changed:
                answers = False
            modes[stage.name] = "record" if answers else "run"
        self.prefix = {stage.name for stage in stages[:first] if not stage.wraps}
        return modes

    async def _arrivals(
        self, stages: list[Stage], offers: Mapping[str, Any], pool: WorkerPool
    ) -> tuple[dict[int, Rewards], list[Arrival]]:
        """The groups at the end of their sample stages: what they earned in the record, and what they are now."""
        round = self.round
        old: dict[int, Rewards] = {}
        arrivals: list[Arrival | None] = []
        again: list[tuple[int, GroupRecord]] = []
        runner = SampleRunner(
            stages, self.modes, self.log, round, pool, offers, strict=False, prefix=self.prefix
        )  # fmt: skip
        modes = self._modes(stages, prefix_runs=True)
        self.runs_all = SampleRunner(stages, modes, self.log, round, pool, offers, strict=False)
        for record in round.groups:
            ended, completed = record.ended, record.completed
            if ended is not None and ended.outcome in ("cancelled", "recycled") and ended.seq < round.full:
                # Given back before the batch was full, since its engine aborted it.
                arrivals.append(Arrival(record, None, ended.outcome, ended.reason))
                continue
            if completed is not None:
                last = [row[-1].sample for row in completed.samples]
                old[id(record)] = [(sample.rollout_id, sample.reward) for sample in last]
            if not self.samples_change or (completed is not None and completed.at > 0):
                if completed is not None:
                    arrivals.append(Arrival(record, self._recorded(record, completed), at=completed.at))
                elif ended is not None and ended.outcome in ("dropped", "failed"):
                    arrivals.append(Arrival(record, None, ended.outcome, ended.reason))
                else:
                    self._count("stopped when the batch was full")
                continue
            again.append((len(arrivals), record))
            arrivals.append(None)
        results = await side_by_side(partial(self._again, runner), [record for _, record in again])
        for (place, _), arrival in zip(again, results, strict=True):
            arrivals[place] = arrival
        foreign = Counter(runner.foreign_input) + Counter(self.runs_all.foreign_input)
        for name, count in foreign.items():
            self.report.notes.append(
                f"{round}: {name!r} is external and answered from the record {count} times although what it would be "
                "asked is something else; run_external=True (--run-external) asks it again"
            )
        return old, [arrival for arrival in arrivals if arrival is not None]

    def _recorded(self, record: GroupRecord, completed: GroupCompleted) -> Group:
        group = Group(record.index, record.prompt, self.log.samples(completed))
        if completed.at > 0:
            group.verdict = Verdict(True, by_fallback=record.ended is not None and record.ended.by_fallback)
        return group

    async def _again(self, runner: SampleRunner, record: GroupRecord) -> Arrival | None:
        """A group through the changed sample stages."""
        done: list[list[Sample]] = []
        lost: list[tuple[int, Lost]] = []
        open_ends: list[str] = []
        for execution in record.executions.values():
            result: Finished | Lost | Unfinished
            try:
                if record.came_finished(execution):
                    rows = self.log.samples(record.submitted)
                    result = Finished([plain(sample).copy() for sample in rows[1 + execution.position]])
                else:
                    number = len(execution.attempts) - 1
                    try:
                        result = await runner.execution(record, execution, number)
                    except NotStored:  # what a stage before the changed one wrote: it can do so again
                        result = await self.runs_all.execution(record, execution, number)
            except (NotStored, LogError) as error:
                self.unread.append(str(error))
                result = Unfinished("columns are not in the log")
            if isinstance(result, Finished):
                done.append(result.samples)
            elif isinstance(result, Lost):
                lost.append((execution.attempts[-1].last, result))
            else:
                open_ends.append(result.why)
        size = len(record.executions)
        least = min(self.round.spec.get("min_group_size") or size, size)
        if size - len(lost) < least:
            _, first = min(lost)
            return Arrival(record, None, first.outcome, first.reason)
        if open_ends:
            self._count(f"stopped where {open_ends[0]}")
            self.revived += record.ended is not None and record.ended.outcome in ("dropped", "failed")
            return None
        return Arrival(record, Group(record.index, record.prompt, done))

    async def _apply(
        self, stage: Stage, record: GroupRecord, group: Group, remaining: int
    ) -> tuple[Group, Drop | Hold | None] | str | None:
        if self.modes[stage.name] == "record":
            for event in record.stages:
                if isinstance(event, StageApplied) and event.stage == stage.name:
                    verdict, held = verdict_of(record, event)
                    if event.samples:
                        group.executions = [[plain(one) for one in row] for row in self.log.samples(event)]
                    return group, judged(group, verdict, held, event.dropped)
            return None
        try:
            return await self.runner.apply(stage, group, remaining, self.round.target, settled=self.samples_change)
        except (LogError, ReplayError):
            raise
        except Exception as error:
            if stage.on_error == "resubmit":
                return None
            if stage.on_error == "raise" or isinstance(error, ContractError):
                raise ReplayError(
                    f"{self.round}, group {group.index}: stage {stage.name!r} raised {type(error).__name__}: {error}; "
                    "that would have ended the rollout"
                ) from error
            return f"{stage.name}: {type(error).__name__}"

    def _count(self, why: str) -> None:
        self.unfinished[why] = self.unfinished.get(why, 0) + 1

    def _notes(self, simulation: Simulation) -> None:
        round, notes = self.round, self.report.notes
        if simulation.exhausted and len(simulation.kept) < round.target:
            notes.append(
                f"{round}: all rounds or prompts are spent with {len(simulation.kept)} of {round.target} groups "
                f"(on_exhausted={round.spec.get('on_exhausted', 'error')!r})"
            )
        if self.revived and not simulation.missing:
            notes.append(
                f"{round}: {self.revived} groups that were lost would now go on, and their other samples were never "
                "generated; the batch is shown without them"
            )
        if self.unread:
            notes.append(f"{round}: {len(self.unread)} executions could not be run again, the first: {self.unread[0]}")
        carries = round.spec.get("surplus") == "carry" or round.spec.get("unfinished") == "recycle"
        note = "each rollout is taken by itself: what one would have handed on to the next is not followed"
        if carries and note not in notes:
            notes.append(note)


class _Steps:
    """The steps of one group."""

    def __init__(self, replay: Replay, round: RoundRecord, record: GroupRecord) -> None:
        self.replay = replay
        self.round = round
        self.record = record
        self.stages = stages_of(replay.stages, round)
        self.known = {known.name: known for known in replay.stages}
        self.offers = replay.offers(round)

    def walk(self, stage: str | None, sample: int | None) -> Iterator[Step]:
        for stop in run_alone(self._stops):
            if (stage is None or stop.stage.name == stage) and (sample is None or stop.context.index == sample):
                yield Step(
                    stop.context,
                    self._real(stop.stage.name),
                    stop.event,
                    self._why_not(stop.stage.name),
                    self.offers,
                    sample=stop.sample,
                    inner=stop.inner,
                )
        if sample is None and (stage is None or self.known[stage].level == "group"):
            yield from self._group_steps(stage)

    async def _stops(self, pool: WorkerPool) -> list[Stop]:
        record = self.record
        stops: list[Stop] = []
        for execution in record.executions.values():
            for number, attempt in enumerate(execution.attempts):
                if not attempt.traces:
                    continue
                try:
                    stops += await self._along(pool, execution, number, run=False)
                except NotStored:  # a column that the log lacks: the stages write it again
                    stops += await self._along(pool, execution, number, run=True)
        return stops

    async def _along(self, pool: WorkerPool, execution: ExecutionRecord, number: int, *, run: bool) -> list[Stop]:
        modes: dict[str, Mode] = {
            stage.name: "run" if run and self._why_not(stage.name) is None else "record" for stage in self.stages
        }
        runner = SampleRunner(self.stages, modes, self.replay.log, self.round, pool, self.offers, strict=False)
        stops: list[Stop] = []
        runner.watch = stops
        try:
            await runner.execution(self.record, execution, number)
        except NotStored:
            if not run:
                raise
        except ReplayError:
            pass  # a stage raised what ended the rollout: the steps lead up to it
        return stops

    def _group_steps(self, only: str | None) -> Iterator[Step]:
        record, completed, log = self.record, self.record.completed, self.replay.log
        if completed is None:
            return
        rows = [[plain(sample).copy() for sample in row] for row in log.samples(completed)]
        group = Group(record.index, record.prompt, rows)
        for event in record.stages:
            if isinstance(event, GroupJudged) or event.stage not in self.known:
                continue
            verdict, held = verdict_of(record, event)
            count = {
                "remaining": verdict.remaining if verdict is not None and verdict.remaining is not None else 1,
                "target": self.round.target,
            }
            context = RolloutContext(self.round.rollout_id, self.round.evaluation, record.index)
            why_not = self._why_not(event.stage)
            step = Step(
                context,
                self._real(event.stage),
                event,
                why_not,
                self.offers,
                group=_copied(group),
                count=count,
            )
            if only is None or event.stage == only:
                yield step
            if isinstance(event, StageFailed):
                return
            if event.samples:
                group.executions = [[plain(sample).copy() for sample in row] for row in log.samples(event)]
            elif why_not is None:
                step.group = _copied(group)
                try:
                    result = step.run()
                except Exception as error:
                    raise ReplayError(
                        f"{self.round}, group {record.index}: stage {event.stage!r} raises {type(error).__name__}: "
                        f"{error}, which it did not in the run"
                    ) from error
                group = result if isinstance(result, Group) else group
            judged(group, verdict, held, event.dropped)

    def _real(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)

    def _why_not(self, name: str) -> str | None:
        known = self.known[name]
        if known.missing is not None:
            return known.missing
        if name in self.round.engines:
            return "it asks an engine"
        if known.external and not self.replay.run_external:
            return "it is external; Replay(..., run_external=True) (--run-external) runs it"
        return None


# Details


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector, which would walk through all groups of a rollout again and again (a third of the
    time) and find nothing: what is read of a rollout is freed with it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _came_to_an_end(round: RoundRecord) -> bool:
    """It filled its batch, or ran out of prompts or rounds; nothing else stopped it."""
    if round.finished is None:
        return False
    error = round.finished.error
    return error is None or error.startswith("RolloutExhausted")


def _copied(group: Group | None) -> Group:
    assert group is not None
    rows = [[sample.copy() for sample in row] for row in group.executions]
    return Group(group.index, group.prompt, rows, group.verdict)


def _overlaps(damage: Any, part: Any) -> bool:
    if damage.first_seq is None or damage.last_seq is None:
        return False
    return bool(damage.first_seq <= part.last_seq and damage.last_seq >= part.first_seq)
