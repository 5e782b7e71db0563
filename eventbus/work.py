"""A group on its way through one rollout: its executions, the jobs that carry them, and its one end.

    GroupWork       the group: which executions are still open, what was lost, where it ended
      Execution     one generation of the prompt, with the samples that stages fanned it out into
      SampleJob     one sample in the sample chain, run by a worker
      GroupJob      the whole group in its group stages, run by a worker

A job that was cancelled reports nothing any more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine
from types import GeneratorType
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from eventbus.context import RolloutContext
from eventbus.events import LightSample, changes, light
from eventbus.group import Group
from eventbus.ledger import Outcome
from eventbus.sample import Sample, SampleStatus
from eventbus.stage import ContractError, Drop, Stage
from eventbus.workers import Worker, WorkerDied

if TYPE_CHECKING:
    from eventbus.rollout import Rollout

__all__ = ["Execution", "GroupJob", "GroupWork", "Resumption", "SampleJob"]


class Resumption:
    """A prompt to be asked in a later rollout, with what is already there of its group."""

    __slots__ = ("at", "executions", "group", "origin", "prototype")

    def __init__(self, origin: str, prototype: Sample, group: Group | None = None, at: int = 0) -> None:
        self.origin = origin
        self.prototype = prototype
        self.executions: list[Execution] = []
        """Recycled: their results and partial samples."""
        self.group = group
        self.at = at
        """Carried: the group, and the group stage to go on at."""


class Execution(msgspec.Struct, eq=False):
    """One generation of one prompt: the root of its (perhaps fanned-out) samples."""

    # This, `SampleJob` and the context are structs, since one of each is made for every sample: they are built in C.
    id: int
    position: int
    """0 to group size - 1."""
    result: list[Any]
    """Its samples, nested as the stages fanned them out; `[None]` to begin with."""
    pending: int = 1
    """Samples that are still in the chain."""
    children: int = 0
    resubmits: int = 0
    done: bool = False
    """It went through all stages."""
    lost: bool = False
    """It is gone."""
    checkpoint: tuple[Sample, int] | None = None
    """A sample as its engine gave it, and the stage at which to take it up again."""

    def begin(self) -> None:
        """Forget what was there, but for how often it was resubmitted."""
        self.result = [None]
        self.pending, self.children = 1, 0
        self.done = self.lost = False
        self.checkpoint = None

    @property
    def samples(self) -> list[Sample]:
        if not self.children:
            return self.result
        flat: list[Sample] = []
        todo = [self.result]
        while todo:
            item = todo.pop()
            if isinstance(item, list):
                todo.extend(reversed(item))
            else:
                flat.append(item)
        return flat


class GroupWork:
    """A group under way in one rollout."""

    __slots__ = (
        "aborted", "at", "ended", "executions", "group", "index", "jobs", "loss", "lost", "open", "prototype",
        "resubmits", "rollout",
    )  # fmt: skip

    def __init__(self, rollout: Rollout, prototype: Sample) -> None:
        self.rollout = rollout
        self.prototype = prototype
        self.index: int = prototype.group_index or 0
        self.executions: list[Execution] = []
        self.open = 0
        """Executions that have neither finished, nor left at their engine, nor been lost."""
        self.lost = 0
        self.loss: tuple[Outcome, str] | None = None
        """What became of the first execution that was lost."""
        self.aborted = False
        """At least one execution left at its engine."""
        self.jobs: dict[SampleJob | GroupJob, None] = {}
        """In the order in which they began: it is the order in which they are ended."""
        self.group: Group | None = None
        """Set when all executions are through."""
        self.at = 0
        """Position in the group stages."""
        self.resubmits = 0
        self.ended = False

    def start(self, execution: Execution) -> None:
        """Put the execution into the queue: from its prompt, or from where it left."""
        index = self.index * self.rollout.group_size + execution.position
        at = 0 if execution.checkpoint is None else execution.checkpoint[1]
        self._put(SampleJob(self, execution, None, self._place(index, execution), execution.result, 0, 0, at))

    def first(self, job: SampleJob) -> Sample:
        """The sample with which an execution begins; made when its turn has come, so that what waits is small."""
        execution = job.execution
        if execution.checkpoint is not None:
            return execution.checkpoint[0].copy()  # it stays, should the sample be stopped again before it gets further
        sample = self.prototype.copy()
        sample.group_index = self.index
        sample.index = job.context.index
        sample.rollout_id = execution.id
        if sample.status is SampleStatus.ABORTED:
            sample.status = SampleStatus.PENDING
        return sample

    def fan_out(self, job: SampleJob, children: list[Sample]) -> None:
        """The children go on side by side, each in the place that the stage gave it."""
        execution = job.execution
        results: list[Any] = [None] * len(children)
        job.results[job.position] = results
        execution.pending += len(children) - 1
        self.rollout.ledger.executions.children += len(children)
        first = self.index * self.rollout.group_size + execution.position
        for position, child in enumerate(children):
            execution.children += 1
            child.group_index = self.index
            child.index = first + execution.children * self.rollout.group_size
            child.rollout_id = execution.id
            place = self._place(child.index, execution)
            self._put(SampleJob(self, execution, child, place, results, position, job.segment + 1, 0))

    def _place(self, index: int, execution: Execution) -> RolloutContext:
        return RolloutContext(self.rollout.id, self.rollout.evaluation, self.index, index, execution.id)

    def _put(self, job: SampleJob) -> None:
        self.jobs[job] = None
        self.rollout.runtime.pool.put(job)

    def finished(self, execution: Execution) -> GroupJob | None:
        """A sample is through all its stages. The next job, if this made the group complete."""
        execution.pending -= 1
        if execution.pending:
            return None
        execution.done = True
        self.rollout.ledger.executions.completed += 1
        return self._close_one()

    def left(self, execution: Execution, sample: Sample | None, resume_at: int | None) -> None:
        """A sample left at its engine: aborted, or its rollout is closing. It may be taken up again there."""
        self._cancel(execution)
        if sample is not None and resume_at is not None:
            execution.checkpoint = (sample, resume_at)
        self.aborted = True
        self._close_one()
        self.rollout.news()

    def lose(self, execution: Execution, outcome: Outcome, reason: str) -> GroupJob | None:
        """An execution is gone, and its group with it unless it may shrink."""
        self._cancel(execution)
        execution.lost = True
        counts = self.rollout.ledger.executions
        setattr(counts, outcome, getattr(counts, outcome) + 1)
        self.lost += 1
        self.loss = self.loss or (outcome, reason)
        size = len(self.executions)
        if size - self.lost < min(self.rollout.spec.min_group_size or size, size):
            self.end(*self.loss)
            return None
        return self._close_one()

    def restart(self, execution: Execution) -> None:
        """Once more from the prompt."""
        self._cancel(execution)
        execution.resubmits += 1
        self.rollout.ledger.executions.children -= execution.children
        execution.begin()
        self.start(execution)

    def end(self, outcome: Outcome, reason: str | None = None) -> None:
        """The group's one end. Whatever still runs for it is cancelled."""
        self.ended = True
        rollout = self.rollout
        rollout.works.pop(id(self), None)
        by_fallback = False
        if outcome == "kept":
            verdict = self.group.verdict if self.group is not None else None
            by_fallback = verdict is not None and verdict.by_fallback
        else:
            self.cancel_jobs()
            rollout.ledger.executions.cancelled += sum(not (e.done or e.lost) for e in self.executions)
        rollout.ledger.end(outcome, reason, by_fallback=by_fallback)
        if rollout.runtime.hub.wants("group_ended"):
            rollout.emit("group_ended", group_index=self.index, outcome=outcome, reason=reason, by_fallback=by_fallback)
        rollout.news()

    def cancel_jobs(self) -> None:
        jobs, self.jobs = self.jobs, {}
        for job in jobs:
            job.cancel()

    def _cancel(self, execution: Execution) -> None:
        """The execution's other samples are no longer wanted."""
        for job in [job for job in self.jobs if isinstance(job, SampleJob) and job.execution is execution]:
            self.jobs.pop(job, None)
            job.cancel()

    def _close_one(self) -> GroupJob | None:
        self.open -= 1
        if self.open:
            return None
        if self.aborted:
            self.rollout.left(self)
            return None
        return self.complete()

    def complete(self) -> GroupJob | None:
        """All executions are through: the group stages are next."""
        rollout = self.rollout
        self.group = Group(self.index, self.prototype.prompt, [e.samples for e in self.executions if e.done])
        if rollout.runtime.hub.wants("group_completed"):
            rollout.emit("group_completed", group_index=self.index, shown=self.group.executions)
        return rollout.completed(self)


class SampleJob(msgspec.Struct, eq=False):
    """One sample on its way through the sample chain."""

    work: GroupWork
    execution: Execution
    sample: Sample | None
    """A fanned-out child, until it enters the chain."""
    context: RolloutContext
    results: list[Any]
    """Where the finished sample goes: `results[position]`."""
    position: int
    segment: int
    at: int
    """The stage of the segment to begin with."""
    worker: Worker | None = None
    cancelled: bool = False
    error: Exception | None = None
    failed_in: Stage | None = None
    broken: ContractError | None = None
    entry: int | None = None
    followed_by: GroupJob | None = None
    """The job that its worker went on with."""
    resume_at: int | None = None
    """The stage at which the sample is taken up again, should it have left."""

    def run(self) -> Coroutine[Any, Any, None] | None:
        if self.cancelled:
            return None
        rollout = self.work.rollout
        runtime = rollout.runtime
        sample, self.sample = self.sample, None
        try:
            if sample is None:
                sample = self.work.first(self)
            task = rollout.chain.run(self, sample, self.at)
            outcome = runtime.pool.slice.begin(runtime.context.copy(), self, task)
        except Exception as error:
            return self._failed(error)
        if type(outcome) is GeneratorType:
            return self._wait(outcome)  # type: ignore[arg-type]
        return self._finished(outcome)

    async def _wait(self, chain: Awaitable[Any]) -> None:
        try:
            result = await chain
        except Exception as error:
            next_job = self._failed(error)
        else:
            next_job = self._finished(result)
        if next_job is not None:
            await next_job

    def _finished(self, result: Any) -> Coroutine[Any, Any, None] | None:
        if self.cancelled:
            return None
        if self.broken is not None:
            return self._failed(self.broken)
        work, execution = self.work, self.execution
        work.jobs.pop(self, None)
        work.rollout.runtime.activity += 1
        if type(result) is Sample and result.status is not SampleStatus.ABORTED and not self.context.closing:
            self.results[self.position] = result  # as nearly always
            return self._next(work.finished(execution))
        if type(result) is Drop:
            return self._next(work.lose(execution, "dropped", result.reason))
        if self.context.closing or (isinstance(result, Sample) and result.status is SampleStatus.ABORTED):
            work.left(execution, result if isinstance(result, Sample) else None, self.resume_at)
            return None
        if isinstance(result, list):
            work.fan_out(self, result)
            return None
        self.results[self.position] = result
        return self._next(work.finished(execution))

    def _failed(self, error: Exception) -> Coroutine[Any, Any, None] | None:
        if self.cancelled:
            return None
        self.work.jobs.pop(self, None)
        next_job = self.work.rollout.sample_failed(self, error)
        self.error = self.broken = None  # its traceback leads back here
        return self._next(next_job)

    def _next(self, job: GroupJob | None) -> Coroutine[Any, Any, None] | None:
        """This made the group complete: the same worker goes on with it."""
        if job is None:
            return None
        job.worker = self.worker
        self.followed_by = job
        return job.run()

    def generated(self, stage: Stage, sample: Sample, resume_at: int | None) -> None:
        if self.cancelled:
            return
        rollout = self.work.rollout
        if rollout.runtime.hub.wants("sample_generated"):
            rollout.emit(
                "sample_generated",
                group_index=self.work.index,
                index=sample.index,
                execution=self.execution.id,
                stage=stage.name,
                status=sample.status,
                response_length=sample.response_length,
                weight_versions=list(sample.weight_versions),
                seconds=anyio.current_time() - self.context.began,
                shown=[[sample]],
            )
        if self.segment == 0:
            self.resume_at = resume_at
            if resume_at is not None and rollout.spec.unfinished == "recycle" and not self.context.closing:
                self.execution.checkpoint = (sample.copy(), resume_at)

    def applied(self, stage: Stage, before: LightSample, result: Sample | list[Sample] | Drop) -> LightSample:
        after = light(result) if isinstance(result, Sample) else before
        if self.cancelled:
            return after
        fields, columns = changes(before, after)
        shown = result if isinstance(result, list) else []
        if isinstance(result, Sample) and stage.external:
            shown = [result]
        self.work.rollout.emit(
            "stage_applied",
            group_index=self.work.index,
            index=self.context.index,
            execution=self.execution.id,
            child=self.position + 1 if self.segment else 0,
            stage=stage.name,
            seconds=anyio.current_time() - self.context.began,
            waited=self.context.waited,
            attempts=self.context.attempts,
            worker=None if self.worker is None else self.worker.number,
            changed=fields,
            columns=columns,
            dropped=result.reason if isinstance(result, Drop) else None,
            shown=[shown] if shown else (),
        )
        return after

    def cancel(self) -> None:
        self.cancelled = True
        if self.worker is not None:
            self.worker.cancel()

    def died(self, error: BaseException) -> None:
        _died(self.followed_by or self, self.work, error)

    def describe(self) -> str:
        return f"sample {self.context.index} (group {self.work.index}, rollout {self.work.rollout.id})"


class GroupJob:
    """A group in those of its stages that do not ask for the count."""

    __slots__ = ("cancelled", "context", "work", "worker")

    def __init__(self, work: GroupWork) -> None:
        self.work = work
        self.context = RolloutContext(work.rollout.id, work.rollout.evaluation, work.index)
        self.worker: Worker | None = None
        self.cancelled = False
        work.jobs[self] = None

    async def run(self) -> None:
        if self.cancelled:
            return
        try:
            await self.work.rollout.pass_group(self)
        finally:
            self.worker = None
            self.work.jobs.pop(self, None)

    def cancel(self) -> None:
        self.cancelled = True
        if self.worker is not None:
            self.worker.cancel()

    def died(self, error: BaseException) -> None:
        _died(self, self.work, error)

    def describe(self) -> str:
        return f"group {self.work.index} (rollout {self.work.rollout.id})"


def _died(job: SampleJob | GroupJob, work: GroupWork, error: BaseException) -> None:
    death = WorkerDied(
        f"the worker of {job.describe()} was ended in stage {job.context.stage!r} by {type(error).__name__}"
    )
    death.__cause__ = error
    work.rollout.stop(death)
