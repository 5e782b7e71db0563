"""Runs the stages of a recorded round again, one execution after the other, through the real sample chain.

A stage either runs, or answers from the record: then it stands in the chain under its own name and writes what the log
says that it left. So wrappers, fan-outs, drops and contexts behave as in the run. How a trace is followed is either

    strict      every stage must do what its record says; the first that does not is a `Divergence`
    free        stages were changed: what they do is noted, and what engines and external stages said is taken from
                the record as far as it was said for the same input

What ends a chain early (a divergence, or a record that ends because its sample was cancelled there) is no `Exception`,
so that no wrapper of the user's can catch it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from inspect import isawaitable
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

import anyio
import msgspec

from eventbus.chain import SampleChain
from eventbus.columns import Tokens
from eventbus.context import RolloutContext, _current
from eventbus.events import LightSample, StageApplied, StageFailed, changes, light
from eventbus.group import Group, Verdict
from eventbus.log.format import LogError
from eventbus.replay.compare import differences, samples_differ
from eventbus.replay.record import (
    Applied,
    Change,
    ExecutionRecord,
    GroupRecord,
    NotStored,
    RecordedLog,
    ReplayError,
    RoundRecord,
    Trace,
    overwrite,
    plain,
)
from eventbus.replay.stages import altered
from eventbus.rollout import _check_group
from eventbus.sample import Sample, SampleStatus, WeightSpan, copied
from eventbus.stage import ContractError, Drop, Dropped, Hold, Stage
from eventbus.workers import Worker, WorkerPool

__all__ = [
    "Divergence",
    "Finished",
    "GroupRunner",
    "Lost",
    "Mode",
    "SampleRunner",
    "Stop",
    "Unfinished",
    "judged",
    "side_by_side",
]

Mode: TypeAlias = Literal["run", "record"]
T = TypeVar("T")
R = TypeVar("R")

SIDE_BY_SIDE: Final = 256
"""Executions that may wait in their stages at a time."""

_ASKED: Final = frozenset({"prompt", "tokens", "response", "response_length", "multimodal_inputs", "session_id"})
"""What an engine makes its answer from."""


class Divergence(msgspec.Struct, frozen=True):
    """The first event that a replay did not come to in the same way. `str()` tells it in a few lines."""

    rollout_id: int
    evaluation: bool
    seq: int
    """Of the event in the log."""
    kind: str
    stage: str | None
    what: str
    group_index: int | None = None
    index: int | None = None
    """`Sample.index`."""
    execution: int | None = None
    """`Sample.rollout_id`."""
    fields: dict[str, Change] = {}
    """By field: what the record has, and what came out now."""

    @classmethod
    def at(
        cls,
        event: Any,
        what: str,
        fields: Mapping[str, tuple[Any, Any]] | None,
        group_index: int | None,
        index: int | None,
        execution: int | None,
    ) -> Divergence:
        """Found at this event of the log; `fields` are pairs of the recorded and the new value."""
        changed = {name: Change(old, new) for name, (old, new) in (fields or {}).items()}
        stage = getattr(event, "stage", None)
        return cls(
            event.rollout_id,
            event.evaluation,
            event.seq,
            event.kind,
            stage,
            what,
            group_index,
            index,
            execution,
            changed,
        )

    def __str__(self) -> str:
        where = [f"{'evaluation' if self.evaluation else 'rollout'} {self.rollout_id}"]
        where += [f"stage {self.stage}"] if self.stage is not None else []
        where += [f"seq {self.seq} ({self.kind})"]
        for name, number in (("group", self.group_index), ("sample", self.index), ("execution", self.execution)):
            where += [f"{name} {number}"] if number is not None else []
        lines = [f"{', '.join(where)}: {self.what}"]
        lines += [f"  {name}: {change}" for name, change in self.fields.items()]
        return "\n".join(lines)


class Finished(NamedTuple):
    """An execution that is through its stages."""

    samples: list[Sample]


class Lost(NamedTuple):
    """An execution of which a sample was dropped or failed."""

    outcome: Literal["dropped", "failed"]
    reason: str


class Unfinished(NamedTuple):
    """An execution that the record, or what can be known from it, does not lead to an end."""

    why: str


class _Stop(BaseException):
    """Ends a chain, past every `except Exception`."""


class _End(_Stop):
    """The record ends here: nobody knows how it would have gone on."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class _Diverged(_Stop):
    def __init__(self, divergence: Divergence) -> None:
        super().__init__(str(divergence))
        self.divergence = divergence


class _RecordedFailure(Exception):
    """A stage that answers from the record, where it had raised."""

    def __init__(self, event: StageFailed) -> None:
        super().__init__(event.error)
        self.event = event


class Place(RolloutContext):
    """The context of a stage that is replayed."""

    job: Any = None


class Stop:
    """A sample in front of a stage."""

    def __init__(self, stage: Stage, sample: Sample, job: _Job, event: StageApplied | StageFailed | None) -> None:
        self.stage = stage
        self.sample = sample
        self.context = job.context
        self.event = event
        self.inner: Sample | None = None
        """For a wrapper: what the stages inside it gave back."""


class _Job:
    """One sample on its way through the chain, along its trace. A `StageRun`."""

    def __init__(self, runner: SampleRunner, group: GroupRecord, execution: ExecutionRecord, trace: Trace) -> None:
        round = runner.round
        place = Place(round.rollout_id, round.evaluation, group.index, trace.index, execution.id)
        place.job = self
        self.place = place
        self.context: RolloutContext = place
        self.worker: Worker | None = None
        self.segment = 0
        self.error: Exception | None = None
        self.failed_in: Stage | None = None
        self.broken: ContractError | None = None
        self.entry: int | None = None
        self.runner = runner
        self.group = group
        self.execution = execution
        self.trace = trace
        self.stages = trace.stages
        self.cursor = 0
        self.stopped: _Stop | None = None
        self.strict = runner.strict
        self.finished = _finished(group, execution)
        self.differs: set[str] = set()
        """Free: fields in which the sample is not what it was at this point of the record."""
        self.stops: list[Stop] = []
        self.dicts: dict[str, Any] = {}
        """Free: what the record has in fields that hold dicts."""

    # For the chain

    def run(self) -> None:
        """Never queued."""

    def died(self, error: BaseException) -> None:
        """Never run by a worker."""

    def generated(self, stage: Stage, sample: Sample, resume_at: int | None) -> None:
        """The record says what an engine has answered."""

    def applied(self, stage: Stage, before: LightSample, result: Sample | list[Sample] | Drop) -> LightSample:
        after = light(result) if isinstance(result, Sample) else before
        if not self.strict:
            self._note(stage, before, after, result)
            return after
        event = self.expected(stage)
        if isinstance(event, StageFailed):
            raise self.diverged(event, f"it raised {event.error}, and does not any more")
        fields: dict[str, tuple[Any, Any]] = {}
        dropped = result.reason if isinstance(result, Drop) else None
        children = event.samples[0] if event.samples else []
        was_list = bool(children) and (not stage.external or len(children) > 1)
        if dropped != event.dropped:
            fields["dropped"] = (event.dropped, dropped)
        elif isinstance(result, list):
            if len(result) != len(children):
                fields["children"] = (len(children), len(result))
            for position, (child, recorded) in enumerate(zip(result, children, strict=False)):
                found = samples_differ(light(child), recorded)
                fields.update((f"children[{position}].{name}", pair) for name, pair in found.items())
        elif isinstance(result, Sample) and was_list:
            fields["children"] = (len(children), 0)
        elif dropped is None:
            fields = differences(before, changes(before, after), (event.changed, event.columns))
        if fields:
            raise self.diverged(event, "it does something else than its record says", fields)
        self.cursor += 1
        return after

    # Along the trace

    def enter(self, stage: Stage) -> None:
        """A stage is about to run: not past the end of the record."""
        if self.strict and self.cursor >= len(self.stages):
            raise self.over(stage)

    def arrives(self, stage: Stage, sample: Sample) -> None:
        """A stage that answers from the record is about to."""
        if self.runner.watch is not None:
            self.stops.append(Stop(stage, sample.copy(), self, self.upcoming(stage)))
            self.runner.watch.append(self.stops[-1])

    def returns(self, stage: Stage, inner: Sample) -> None:
        """What a wrapper got back from the stages inside it."""
        for stop in reversed(self.stops):
            if stop.stage is stage:
                stop.inner = inner.copy()
                return

    def upcoming(self, stage: Stage) -> StageApplied | StageFailed | None:
        """Free: what the record has of a stage."""
        for applied in self.stages[self.cursor :]:
            if applied.event.stage == stage.name:
                return applied.event
        return None

    def expected(self, stage: Stage) -> StageApplied | StageFailed:
        """Strict: the next event of the record, which must be this stage's."""
        if self.cursor >= len(self.stages):
            raise self.over(stage)
        event = self.stages[self.cursor].event
        if event.stage != stage.name:
            raise self.diverged(event, f"the record goes on with this stage, the replay with {stage.name!r}")
        return event

    def over(self, stage: Stage) -> _Stop:
        if self.finished is not None:
            return self.diverged(self.finished, f"the replay runs {stage.name!r}, which the record does not have")
        return self.stop(_End(f"its record ends before {stage.name!r}"))

    def answer(self, stage: Stage, sample: Sample) -> Sample | list[Sample] | Drop:
        """What the record says that a stage left of the sample."""
        if self.strict:
            self.expected(stage)
            applied = self.stages[self.cursor]
        else:
            applied = self._find(stage)
        event = applied.event
        if isinstance(event, StageFailed):
            raise _RecordedFailure(event)
        if event.dropped is not None:
            return Drop(event.dropped)
        runner = self.runner
        if event.samples and (children := self._children(stage, event)) is not None:
            return children
        shown = applied.generated if applied.generated is not None else event if any(event.samples) else None
        if self.differs:
            if applied.generated is not None and (asked := sorted(self.differs & _ASKED)):
                raise self.stop(
                    _End(f"the engine behind {stage.name!r} would be asked something else ({', '.join(asked)})")
                )
            if stage.external:
                runner.foreign_input[stage.name] = runner.foreign_input.get(stage.name, 0) + 1
            self._merge(sample, event, shown)
        elif shown is not None:
            if self.strict or not self._shown_later(applied):
                overwrite(sample, plain(runner.log.samples(shown)[0][0]).copy())
        elif self.strict or not self._shown_later(applied):
            _write(sample, event.changed)
            self._write_columns(sample, event, None)
        if not self.strict:
            self._pass(applied)
        return sample

    def _children(self, stage: Stage, event: StageApplied) -> list[Sample] | None:
        """What a stage fanned out; None where it left the one sample."""
        shown = event.samples[0]
        if not stage.fans_out:
            return None
        if len(shown) == 1 and stage.external and (event.changed or event.columns or self.trace.last > event.seq):
            return None
        return [plain(child).copy() for child in self.runner.log.samples(event)[0]]

    def _write_columns(self, sample: Sample, event: StageApplied, shown: Sample | None) -> None:
        for name, mark in event.columns.items():
            column: Any = None
            if mark is None:
                column = Tokens() if name == "tokens" else None
            elif shown is not None:
                column = getattr(shown, name)
            else:
                column = self.group.column(self.runner.log, self.execution.id, name, (mark[0], mark[1]))
            setattr(sample, name, column)

    # Free

    def _find(self, stage: Stage) -> Applied:
        for position in range(self.cursor, len(self.stages)):
            if self.stages[position].event.stage == stage.name:
                self._skip(position)
                self.cursor = position + 1
                return self.stages[position]
        raise self.stop(_End(f"the record has no answer of {stage.name!r} for it"))

    def _skip(self, position: int) -> None:
        """Past stages of the record that did not come: what one wrote that is there no more is missing from now on."""
        for skipped in self.stages[self.cursor : position]:
            self._pass(skipped)
            event = skipped.event
            if isinstance(event, StageApplied) and event.stage not in self.runner.stages:
                self.differs.update(event.changed, event.columns)

    def _pass(self, applied: Applied) -> None:
        """Keep up with what the record has in fields that hold dicts."""
        if isinstance(applied.event, StageApplied):
            self.dicts.update((k, v) for k, v in applied.event.changed.items() if isinstance(v, dict))

    def _shown_later(self, applied: Applied) -> bool:
        """What a stage leaves does not matter: one that answers from the record next shows the whole sample, or loses
        it. A wrapper that runs may look at what is in between, unless the sample is lost anyway."""
        runner = self.runner
        for later in self.stages[self.cursor :]:
            event = later.event
            if event.stage not in runner.prefix:
                return False
            if isinstance(event, StageFailed) or event.dropped is not None:
                return True
            if later.generated is not None or event.samples:
                return not runner.wrapped and (later.generated is not None or len(event.samples[0]) == 1)
        return False

    def _merge(self, sample: Sample, event: StageApplied, shown: Any) -> None:
        """Write what the stage changed in the record onto a sample that is not what it was then."""
        for name, value in event.changed.items():
            live = getattr(sample, name)
            if isinstance(value, dict) and isinstance(live, dict):
                was = self.dicts.get(name, {})
                live.update((k, copied(v)) for k, v in value.items() if k not in was or was[k] != v)
                for key in was.keys() - value.keys():
                    live.pop(key, None)
            else:
                _write(sample, {name: value})
        whole = self.runner.log.samples(shown)[0][0] if shown is not None else None
        self._write_columns(sample, event, None if whole is None else plain(whole))

    def _note(self, stage: Stage, before: LightSample, after: LightSample, result: Any) -> None:
        """A stage ran: in which fields is the sample now something else than in the record?"""
        if self.runner.modes.get(stage.name) != "run":
            return
        fields, marks = changes(before, after)
        found = {*fields, *marks}
        for position in range(self.cursor, len(self.stages)):
            applied = self.stages[position]
            event = applied.event
            if event.stage == stage.name:
                self._skip(position)
                if isinstance(event, StageApplied):
                    found = set(differences(before, (fields, marks), (event.changed, event.columns)))
                    self._pass(applied)
                self.cursor = position + 1
                break
        self.differs |= found

    # Ends

    def stop(self, stop: _Stop) -> _Stop:
        self.stopped = self.stopped or stop
        return stop

    def diverged(self, event: Any, what: str, fields: Mapping[str, tuple[Any, Any]] | None = None) -> _Stop:
        found = Divergence.at(event, what, fields, self.group.index, self.context.index, self.execution.id)
        return self.stop(_Diverged(found))

    def ended(self, result: Any) -> None:
        """Strict: the chain came to its end; so must the record have."""
        if self.cursor < len(self.stages):
            event = self.stages[self.cursor].event
            how = f"was dropped ({result.reason})" if isinstance(result, Drop) else "was through"
            raise self.diverged(event, f"the record goes on with this stage, in the replay the sample {how} before it")

    def raised(self, error: Exception) -> None:
        """Strict: a stage raised; so must it have in the record."""
        if isinstance(error, _RecordedFailure):
            self.cursor += 1
            self.ended(None)
            return
        name = self.failed_in.name if self.failed_in is not None and self.error is error else self.context.stage
        told = f"{type(error).__name__}: {error}"
        if self.cursor >= len(self.stages):
            if self.finished is not None:
                raise self.diverged(self.finished, f"stage {name!r} raises {told}; the record went on to its end")
            return
        event = self.stages[self.cursor].event
        if isinstance(event, StageApplied) or event.stage != name:
            raise self.diverged(event, f"stage {name!r} raises {told}")
        if event.error != told:
            raise self.diverged(event, "it raises another error", {"error": (event.error, told)})
        self.cursor += 1


class SampleRunner:
    """The sample stages of one round.

    :param modes: by stage name.
    :param prefix: free: the stages before the first changed one.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        modes: Mapping[str, Mode],
        log: RecordedLog,
        round: RoundRecord,
        pool: WorkerPool,
        offers: Mapping[str, Any],
        *,
        strict: bool,
        prefix: Iterable[str] = (),
    ) -> None:
        self.log = log
        self.round = round
        self.modes = modes
        self.strict = strict
        self.prefix = frozenset(prefix)
        self.watch: list[Stop] | None = None
        """Where stages that answer from the record leave what they got."""
        self.wrapped = any(stage.wraps and modes[stage.name] == "run" for stage in stages)
        self.foreign_input: dict[str, int] = {}
        """External stages that answered from the record although their input was another: times."""
        self._pool = pool
        sample_stages = [substitute(stage, modes[stage.name]) for stage in stages if stage.level == "sample"]
        self.stages = {stage.name: stage for stage in sample_stages}
        self.chain = SampleChain(sample_stages, offers, pool, traced=True)

    async def execution(
        self, group: GroupRecord, execution: ExecutionRecord, number: int
    ) -> Finished | Lost | Unfinished:
        """Run one attempt of an execution.

        :raises ReplayError: free: a stage broke its contract, or its `on_error` ends the rollout.
        """
        attempt = execution.attempts[number]
        sample = group.start(self.log, execution, number)
        at = self._resumed_at(attempt.traces) if number == 0 and group.has_partial(execution) else 0
        results: list[Any] = [None]
        todo: list[tuple[Sample, int, int, int, list[Any], int]] = [(sample, execution.index, 0, at, results, 0)]
        children = 0
        lost: Lost | None = None
        unfinished: Unfinished | None = None
        while todo:
            # In the order of the record, since that is how children were numbered.
            todo.sort(key=lambda entry: self._order(attempt.traces.get(entry[1])))
            sample, index, segment, at, row, position = todo.pop(0)
            job = _Job(self, group, execution, attempt.traces.get(index) or Trace(index))
            job.segment = segment
            try:
                result = await self._run(job, sample, at)
            finally:
                job.place.job = None  # they hold each other, and with them the samples
            if isinstance(result, Unfinished):
                unfinished = unfinished or result
            elif isinstance(result, Lost):
                lost = lost or result
                if not self.strict:
                    return lost
            elif isinstance(result, list):
                row[position] = fanned = [None] * len(result)
                for place, child in enumerate(result):
                    children += 1
                    child.group_index = group.index
                    child.index = execution.index + children * self.round.group_size
                    child.rollout_id = execution.id
                    todo.append((child, child.index, job.segment + 1, 0, fanned, place))
            else:
                row[position] = result
        return lost or unfinished or Finished(_flat(results))

    async def _run(self, job: _Job, sample: Sample, at: int) -> Sample | list[Sample] | Lost | Unfinished:
        try:
            try:
                result = await self._pool.slice.isolated(copy_context(), job, self.chain.run(job, sample, at))
            except Exception as error:
                if job.stopped is not None:
                    raise job.stopped from None
                return self._failed(job, error)
            if job.stopped is not None:  # a stage swallowed it
                raise job.stopped
            if self.strict:
                job.ended(result)
        except _End as end:
            return Unfinished(end.why)
        except BaseExceptionGroup:  # a wrapper's task group packed it
            if job.stopped is None:
                raise
            if isinstance(job.stopped, _End):
                return Unfinished(job.stopped.why)
            raise job.stopped from None
        if isinstance(result, Drop):
            return Lost("dropped", result.reason)
        if isinstance(result, Sample) and result.status is SampleStatus.ABORTED:
            return Unfinished("it was aborted at its engine")
        return result  # type: ignore[no-any-return]

    def _failed(self, job: _Job, error: Exception) -> Lost | Unfinished:
        if isinstance(error, NotStored | LogError):
            raise error
        if self.strict:
            job.raised(error)
        stage = job.failed_in if job.error is error else None
        name = stage.name if stage is not None else job.context.stage or "?"
        policy = "raise" if isinstance(error, ContractError) else stage.on_error if stage is not None else "fail"
        if isinstance(error, _RecordedFailure):
            name, policy = error.event.stage, error.event.policy
            return Lost("failed", f"{name}: {error.event.error.partition(':')[0]}")
        if self.strict or policy == "fail":
            return Lost("failed", f"{name}: {type(error).__name__}")
        if policy == "resubmit":
            return Unfinished(f"stage {name!r} raised {type(error).__name__}, so it would be generated again")
        raise ReplayError(
            f"{self.round}, group {job.group.index}, sample {job.context.index}: stage {name!r} raised "
            f"{type(error).__name__}: {error}; that would have ended the rollout"
        ) from error

    def _resumed_at(self, traces: Mapping[int, Trace]) -> int:
        """Where a recycled sample was taken up: the outermost wrapper around its engine, else there."""
        first = next(iter(traces.values())).stages[0].event.stage
        names = [stage.name for stage, _ in self.chain.segments[0].calls]
        if first not in names:
            return 0
        at = names.index(first)
        return next((n for n, (stage, _) in enumerate(self.chain.segments[0].calls[:at]) if stage.wraps), at)

    def _order(self, trace: Trace | None) -> float:
        return float("inf") if trace is None or not trace.stages else trace.last


def substitute(stage: Stage, mode: Mode) -> Stage:
    """The stage as the chain gets it: watched, or answering from the record."""
    function: Callable[..., Any]
    if mode == "run":
        run, takes_args = stage.function, stage.takes_args

        def watched(*args: Any, **kwargs: Any) -> Any:
            job: _Job = _current.get().job  # type: ignore[attr-defined]
            job.enter(stage)
            if job.runner.watch is not None:
                job.arrives(stage, args[takes_args])
            return run(*args, **kwargs)

        function = watched
    elif stage.wraps:

        async def answered(sample: Sample, call_next: Callable[[Sample], Any]) -> Any:
            job: _Job = _current.get().job  # type: ignore[attr-defined]
            job.arrives(stage, sample)
            inner = await call_next(sample)
            job.returns(stage, inner)
            return job.answer(stage, inner)

        function = answered
    else:

        def answer(sample: Sample) -> Any:
            job: _Job = _current.get().job  # type: ignore[attr-defined]
            job.arrives(stage, sample)
            return job.answer(stage, sample)

        function = answer
    if mode == "run":
        return altered(stage, function=function)
    return altered(stage, function=function, takes_args=False, wants=frozenset())


# Groups


class _GroupJob:
    def __init__(self, context: RolloutContext) -> None:
        self.context = context
        self.worker: Worker | None = None

    def run(self) -> None:
        """Never queued."""

    def died(self, error: BaseException) -> None:
        """Never run by a worker."""


class GroupRunner:
    """The group and batch stages of one round."""

    def __init__(
        self,
        stages: Sequence[Stage],
        modes: Mapping[str, Mode],
        log: RecordedLog,
        round: RoundRecord,
        pool: WorkerPool,
        offers: Mapping[str, Any],
    ) -> None:
        self.log = log
        self.round = round
        self.modes = modes
        self.stages = [stage for stage in stages if stage.level == "group"]
        self.batch_stages = [stage for stage in stages if stage.level == "batch"]
        self._calls = {stage.name: stage.call(offers) for stage in (*self.stages, *self.batch_stages)}
        self._pool = pool

    async def apply(
        self, stage: Stage, group: Group, remaining: int, target: int, *, settled: bool = True
    ) -> tuple[Group, Drop | Hold | None]:
        """Run a stage on a group: the group after it, and what else it said.

        :param settled: check the columns afterwards, which reads them.
        :raises ContractError: it broke its contract.
        :raises Exception: whatever it raises.
        """
        before = group.verdict
        counts = {"remaining": remaining, "target": target} if stage.counts else {}
        wanted = {name: value for name, value in counts.items() if name in stage.wants}
        context = Place(self.round.rollout_id, self.round.evaluation, group.index)
        task = self._call(context, stage, group, wanted)
        result = await self._pool.slice.isolated(copy_context(), _GroupJob(context), task)
        if not (result is None or isinstance(result, Group | Drop) or (stage.counts and isinstance(result, Hold))):
            raise ContractError(
                f"stage {stage.name!r} returned {type(result).__name__} for group {group.index}, "
                "expected Group, None or Drop"
            )
        if isinstance(result, Group):
            if result.index != group.index:
                raise ContractError(f"stage {stage.name!r} returned group {result.index} for group {group.index}")
            group = result
        if settled or not group.executions or not all(group.executions):
            _check_group(group, stage)
        said = result if isinstance(result, Drop | Hold) else None
        if stage.counts and (group.verdict is None or group.verdict is before):
            reason = said.reason if said is not None else None
            group.verdict = Verdict(reason is None, reason, remaining=remaining, target=target)
        return group, said

    async def _call(self, context: RolloutContext, stage: Stage, value: Any, wanted: Mapping[str, int]) -> Any:
        _current.set(context)
        context.stage = stage.name
        try:
            result = self._calls[stage.name](value, **wanted)
            return await result if isawaitable(result) else result
        except Dropped as dropped:
            return dropped.drop

    async def batch(self, stage: Stage, batch: Any) -> Any:
        """Run a batch stage."""
        context = RolloutContext(self.round.rollout_id, self.round.evaluation)
        task = self._call(context, stage, batch, {})
        result = await self._pool.slice.isolated(copy_context(), _GroupJob(context), task)
        return batch if result is None else result


def judged(group: Group, verdict: Verdict | None, held: bool, dropped: str | None) -> Drop | Hold | None:
    """What a group stage said, from its record."""
    if verdict is not None:
        group.verdict = verdict
    if dropped is not None:
        return Drop(dropped)
    if held and verdict is not None:
        return Hold(verdict.reason or "rejected", verdict.score if verdict.score is not None else 0.0)
    return None


# Details


def _finished(group: GroupRecord, execution: ExecutionRecord) -> Any:
    """The event that says that the execution came to its end, if it did."""
    if group.completed is None:
        return None
    shown = (row[0].sample.rollout_id for row in group.completed.samples if row)
    return group.completed if execution.id in shown else None


def _write(sample: Sample, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        kind = _KINDS.get(name)
        setattr(sample, name, copied(value) if kind is None else msgspec.convert(value, kind))


_KINDS: Final[Mapping[str, Any]] = {"status": SampleStatus, "weight_versions": list[WeightSpan]}


def _flat(results: list[Any]) -> list[Sample]:
    flat: list[Sample] = []
    for result in results:
        flat.extend(_flat(result) if isinstance(result, list) else [result])
    return flat


async def side_by_side(function: Callable[[T], Awaitable[R]], items: Sequence[T]) -> list[R]:
    """What `await function(item)` gives for each, in their order.

    They begin in their order, and each goes as far as it first waits before the next begins: stages that wait do so
    together, and those that do not are called as if there were no others.

    :raises Exception: the first that was raised; the others are cancelled.
    """
    results: list[Any] = [None] * len(items)
    failures: list[Exception] = []
    places = anyio.Semaphore(SIDE_BY_SIDE)

    async def one(position: int, item: T) -> None:
        try:
            results[position] = await function(item)
        except Exception as error:
            failures.append(error)
            tasks.cancel_scope.cancel()
        finally:
            places.release()

    async with anyio.create_task_group() as tasks:
        for position, item in enumerate(items):
            await places.acquire()
            tasks.start_soon(one, position, item)
    if failures:
        raise failures[0]
    return results


def run_alone(function: Callable[[WorkerPool], Any]) -> Any:
    """Run `await function(pool)` to its end, also where a loop runs already (a notebook): then in a thread."""

    async def main() -> Any:
        async with anyio.create_task_group() as task_group:
            return await function(WorkerPool(task_group))

    try:
        return _call_anyio(main)
    except BaseExceptionGroup as group:
        if len(group.exceptions) == 1:
            raise group.exceptions[0] from group.exceptions[0].__cause__
        raise


def _call_anyio(main: Callable[[], Any]) -> Any:
    if not _in_a_loop():
        return anyio.run(main)
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(lambda: Context().run(lambda: anyio.run(main))).result()


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        trio = sys.modules.get("trio")
        return trio is not None and bool(trio.lowlevel.in_trio_run())
    return True
