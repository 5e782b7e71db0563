"""How samples become a batch: one `Rollout` asks for prompts, follows every group to its end and fills its batch.

    prompts -> GroupWork -> SampleJob (one per sample, run by the worker pool through the sample chain)
            -> GroupJob (group stages, side by side, up to the first that asks for the running count)
            -> `Rollout._take` (from there on one group at a time, in the order of completion) -> batch

What it keeps true:

- The ledger is balanced at every moment, and each group ends exactly once.
- A batch has exactly `groups` groups, sorted by index, or the declared policy says otherwise. Rounds are bounded.
- When the rollout is over none of its jobs is left, whichever way it ended.
- What is handed over refers to nothing of the rollout, so that its memory is freed without the garbage collector.
"""

from __future__ import annotations

import heapq
import logging
import math
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from inspect import isawaitable
from time import perf_counter
from types import MappingProxyType
from typing import Any, Final

import anyio
import anyio.to_thread
import msgspec

from eventbus.batching import BatchSpec, RolloutExhausted
from eventbus.chain import SampleChain, settle_all
from eventbus.context import RolloutContext, _current, _hub
from eventbus.events import digest
from eventbus.group import Batch, Group, Summary, Verdict, reward_number
from eventbus.ledger import Ledger
from eventbus.observers import EventHub
from eventbus.prompts import PromptSource
from eventbus.sample import Sample, SampleStatus
from eventbus.stage import ContractError, Drop, Dropped, Hold, Stage
from eventbus.work import Execution, GroupJob, GroupWork, Resumption, SampleJob
from eventbus.workers import Exiting, Worker, WorkerDied, WorkerPool, is_native_cancellation

__all__ = ["Rollout", "Runtime", "Waiting"]

logger = logging.getLogger("rolloutbus")

_COUNT: Final = ("remaining", "target")

RESUBMITS: Final = 2
"""Times that `on_error="resubmit"` asks again from the prompt."""


class Waiting:
    """Groups that come before new prompts: carried, recycled and restarted ones, by group index."""

    def __init__(self) -> None:
        self._groups: list[tuple[int, int, Resumption]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: Resumption) -> None:
        self._added += 1
        heapq.heappush(self._groups, (group.prototype.group_index or 0, self._added, group))

    def take(self) -> Resumption:
        return heapq.heappop(self._groups)[2]


class Runtime:
    """What the rollouts of an entered pipeline share."""

    def __init__(
        self,
        *,
        pool: WorkerPool,
        hub: EventHub,
        context: Context,
        stages: Sequence[Stage],
        waiting: Waiting,
        args: Any,
        next_execution: Callable[[], int],
    ) -> None:
        self.pool = pool
        self.hub = hub
        self.context = context
        """What every job's own context is a copy of."""
        self.sample_stages = [stage for stage in stages if stage.level == "sample"]
        self.group_stages = [stage for stage in stages if stage.level == "group"]
        self.batch_stages = [stage for stage in stages if stage.level == "batch"]
        self.waiting = waiting
        self.prompts_lock = anyio.Lock()
        """Rollouts that overlap ask one after the other, so that each gets consecutive prompts."""
        self.args = args
        self.next_execution = next_execution
        self.activity = 0
        """Goes up with everything that happens; the watchdog looks at it."""


class Rollout:
    """One numbered round in training, or one evaluation.

    `run` is its task. When `done` is set, `batch` or `error` is there; neither means that the prompts had ended before.
    """

    def __init__(
        self,
        runtime: Runtime,
        identity: int,
        prompts: PromptSource,
        spec: BatchSpec,
        *,
        evaluation: bool = False,
        sampling: Mapping[str, Any] = MappingProxyType({}),
        after: Rollout | None = None,
    ) -> None:
        """:param after: the rollout before: its first prompts come first, and what it gives back may be ours."""
        self.runtime = runtime
        self.id = identity
        self.spec = spec
        self.evaluation = evaluation
        self.group_size = prompts.group_size
        self.ledger = Ledger()
        self.works: dict[int, GroupWork] = {}
        """The groups that have not ended, by `id`, in the order of submission."""
        self.batch: Batch | None = None
        self.error: BaseException | None = None
        self.done = anyio.Event()
        self.waits_for: str | None = None
        """What the rollout itself waits for, where that is no group."""

        self._prompts = prompts
        self._prompts_lock = anyio.Lock() if evaluation else runtime.prompts_lock
        self._asked = anyio.Event()
        self._before_asked = after._asked if after is not None else None
        self._before_done = after.done if after is not None else None
        self._offers = {"rollout_id": identity, "evaluation": evaluation, "args": runtime.args, "sampling": sampling}
        self.chain = SampleChain(
            runtime.sample_stages,
            self._offers,
            runtime.pool,
            traced=runtime.hub.wants("stage_applied"),
            timed=runtime.hub.wants("sample_generated"),
        )
        self._group_calls = [] if evaluation else [(stage, stage.call(self._offers)) for stage in runtime.group_stages]
        self._scope = anyio.CancelScope()
        self._inbox: deque[GroupWork] = deque()  # complete; next comes a stage that counts, or the batch
        self._held: list[tuple[float, int, int, GroupWork]] = []  # the reserve, a heap with the worst first
        self._kept: list[Group] = []
        self._prototypes: dict[int, Sample] = {}
        self._news: anyio.Event | None = None
        self._rounds = 0
        self._ended_source = False
        self._full = False
        self._given_up = False
        self._failures: list[Exception] = []
        self._failed_samples = 0
        self._resubmitted = 0
        self._rewards = 0.0
        self._rewarded = 0
        self._started = anyio.current_time()

    # Its task

    async def run(self) -> None:
        """Fill the batch. Never raises but for a cancellation from outside: what went wrong is in `error`."""
        _hub.set(self.runtime.hub)
        self.emit(
            "rollout_started",
            target=self.spec.groups,
            group_size=self.group_size,
            batch=msgspec.to_builtins(self.spec),
        )
        try:
            with self._scope:
                await (self._evaluate() if self.evaluation else self._fill())
        except Exception as error:
            self.error = self.error or error
        except BaseException as error:
            if is_native_cancellation(error):
                self.error = self.error or WorkerDied(f"the task of rollout {self.id} was cancelled from outside")
                return
            self.error = self.error or RuntimeError(f"rollout {self.id} was ended: its pipeline was left")
            if isinstance(error, SystemExit):
                raise Exiting from error
            raise
        finally:
            try:
                self._abandon()
            finally:
                self._finish()

    async def _fill(self) -> None:
        target = self.spec.groups
        while len(self._kept) < target:
            if self.ledger.remaining < target and self._may_ask():
                await self._ask()
            elif self._inbox:
                await self._share_the_loop()
                await self._take(self._inbox.popleft())
            elif self.ledger.in_flight:
                await self._wait()
            elif self._before_done is not None and self._ended_source:
                await self._before_done.wait()  # it may give back groups that are asked again here
                self._before_done = None
            elif not self._release_best():
                if self._ended_source and not self.ledger.submitted:
                    return  # nothing left to begin a batch with
                if not self._kept or self.spec.on_exhausted != "partial":
                    if self._ended_source and self.spec.on_exhausted == "partial":
                        logger.warning("the prompts ended, and none of the last groups was kept: %s", self.summary())
                        return
                    raise self._exhausted()
                break
        self._full = True
        await self._close()
        self._kept.sort(key=lambda group: group.index)
        self.batch = await self._assemble()

    async def _evaluate(self) -> None:
        while True:
            if self.ledger.in_flight < self.spec.round_size and not self._ended_source:
                await self._ask(self.spec.round_size - self.ledger.in_flight)
            elif self.ledger.in_flight:
                await self._wait()
            else:
                break
        self._kept.sort(key=lambda group: group.index)
        self.batch = Batch(self.id, self._kept, self.summary())

    # Prompts

    def _may_ask(self) -> bool:
        return self._rounds < self.spec.max_rounds and (not self._ended_source or len(self.runtime.waiting) > 0)

    async def _ask(self, count: int | None = None) -> None:
        """One round of prompts; what waits from earlier rollouts comes first."""
        if self._before_asked is not None:
            await self._before_asked.wait()
            self._before_asked = None
        await self._share_the_loop()
        count = self.spec.round_size if count is None else count
        runtime = self.runtime
        waiting = runtime.waiting if not self.evaluation else ()
        async with self._prompts_lock:
            missing = max(0, count - len(waiting))
            self.waits_for = f"the prompt source {type(self._prompts).__name__}"
            fresh = await self._prompts.take(missing) if missing else []
            while len(fresh) < missing and self.spec.on_exhausted == "wrap" and not self.evaluation:
                self._prompts.rewind()
                more = await self._prompts.take(missing - len(fresh))
                if not more:
                    break
                fresh += more
            self.waits_for = None
            self._rounds += 1
            self._ended_source = len(fresh) < missing
            for _ in range(count - missing):
                self._resume(runtime.waiting.take())
            for prototype in fresh:
                self._submit(prototype)
        self._asked.set()

    def _submit(self, prototype: Sample, origin: str = "new") -> None:
        work = GroupWork(self, prototype)
        next_id = self.runtime.next_execution
        work.executions = [Execution(next_id(), position, [None]) for position in range(self.group_size)]
        self._enter(work, origin)
        for execution in work.executions:
            work.start(execution)

    def _resume(self, resumption: Resumption) -> None:
        """A group of an earlier rollout."""
        if resumption.origin == "restarted":
            self._submit(resumption.prototype, "restarted")
            return
        work = GroupWork(self, resumption.prototype)
        work.executions = resumption.executions
        self._enter(work, resumption.origin)
        if resumption.group is not None:
            work.group, work.at = resumption.group, resumption.at
            self.emit("group_completed", group_index=work.index, at=work.at, shown=work.group.executions)
            self.arrived(work)
            return
        for execution in work.executions:
            if not execution.done:
                work.start(execution)
        if not work.open and (job := work.complete()) is not None:
            self.runtime.pool.put(job)

    def _enter(self, work: GroupWork, origin: str) -> None:
        executions = work.executions
        self.works[id(work)] = work
        done = lost = 0
        if origin in ("recycled", "carried"):
            done = sum(execution.done for execution in executions)
            lost = sum(execution.lost for execution in executions)
        work.open = len(executions) - done - lost
        self.ledger.submit(len(executions) - lost)
        self.ledger.executions.completed += done
        if self.runtime.hub.wants("group_submitted"):
            first = work.index * self.group_size
            self.emit(
                "group_submitted",
                group_index=work.index,
                round=self._rounds,
                origin=origin,
                executions=[execution.id for execution in executions],
                indices=[first + execution.position for execution in executions],
                shown=[[work.prototype], *map(_what_it_has, executions if origin == "recycled" else ())],
            )

    # What jobs report

    def completed(self, work: GroupWork) -> GroupJob | None:
        """All samples of a group are through. The job for its group stages, where there is one."""
        group = work.group
        assert group is not None
        rewards, count = _rewards(group)
        self._rewards += rewards
        self._rewarded += count
        if self.evaluation:
            self._keep(work, group)
            return None
        if self._full:
            return None  # the batch is closing: the group is given back
        if self._next_is_parallel(work):
            return GroupJob(work)
        self.arrived(work)
        return None

    def arrived(self, work: GroupWork) -> None:
        """A group is through its stages so far; the rollout's own task takes it from here."""
        self._inbox.append(work)
        self.news()

    def left(self, work: GroupWork) -> None:
        """All executions of a group are through or left at their engine."""
        if self.evaluation:
            work.end("failed", "aborted")
        elif not self._full:
            self._give_back(work)
        self.news()

    def sample_failed(self, job: SampleJob, error: Exception) -> GroupJob | None:
        """A stage raised, or broke its contract: what happens says the stage's `on_error`."""
        stage = job.failed_in if job.error is error else None
        name = stage.name if stage is not None else job.context.stage or "?"
        execution, work = job.execution, job.work
        if job.context.closing:  # an abort may make the engine raise: the sample leaves all the same
            work.left(execution, None, None)
            return None
        policy = "raise" if isinstance(error, ContractError) else stage.on_error if stage is not None else "fail"
        if policy == "resubmit" and execution.resubmits >= RESUBMITS:
            policy = "fail"
        reason = f"{name}: {type(error).__name__}"
        if not self._failed(error, name, policy, work.index, job.context.index, execution.id):
            work.end("failed", reason)
            return None
        if policy == "resubmit":
            self._resubmitted += 1
            work.restart(execution)
            return None
        return work.lose(execution, "failed", reason)

    async def pass_group(self, job: GroupJob) -> None:
        """Run a group through its stages up to the next one that counts."""
        work, pool = job.work, self.runtime.pool
        while self._next_is_parallel(work):
            if perf_counter() > pool.slice.end:
                await pool.turn()
            if not await self._apply(work, job):
                return
        work.jobs.pop(job, None)
        self.arrived(work)

    def stop(self, error: BaseException) -> None:
        """End the rollout with this error; the first one counts."""
        self.error = self.error or error
        self._scope.cancel()

    def give_up(self) -> None:
        """Nobody will ask for this batch: end, and give every group back to later rollouts."""
        if self.done.is_set():
            self._hand_back()
        else:
            self._given_up = True
            self.stop(RuntimeError(f"rollout {self.id} was given up: its pipeline was left, or another iterator began"))

    def news(self) -> None:
        self.runtime.activity += 1
        if self._news is not None:
            self._news.set()

    def emit(self, kind: str, **fields: Any) -> None:
        try:
            self.runtime.hub.emit(kind, self.id, self.evaluation, **fields)
        except Exception as error:
            self.stop(error)

    def result(self) -> Batch | None:
        """The batch, once `done`; None when the prompts had ended before it began.

        :raises Exception: what ended the rollout instead.
        """
        if self.error is not None:
            raise self.error
        return self.batch

    # Group stages, and the count

    def _next_is_parallel(self, work: GroupWork) -> bool:
        return work.at < len(self._group_calls) and not self._group_calls[work.at][0].counts

    async def _take(self, work: GroupWork) -> None:
        """A complete group: past the stages that count, then into the batch or on to the stages behind them."""
        job: GroupJob | None = None
        while not work.ended and work.at < len(self._group_calls) and not self._next_is_parallel(work):
            job = job or GroupJob(work)
            if not await self._apply(work, job):
                return
        if job is not None:
            work.jobs.pop(job, None)
        if work.ended:
            return
        group = work.group
        assert group is not None
        if len(self._kept) >= self.spec.groups:
            if self.spec.surplus == "carry":
                self.runtime.waiting.add(self._carried(work))
                work.end("carried")
            else:
                work.end("surplus")
        elif self._next_is_parallel(work):
            self.runtime.pool.put(GroupJob(work))
        else:
            self._keep(work, group)

    def _keep(self, work: GroupWork, group: Group) -> None:
        self._kept.append(group)
        self._prototypes[group.index] = work.prototype
        work.end("kept")

    async def _apply(self, work: GroupWork, job: GroupJob) -> bool:
        """Run the next stage on a group. Whether the group goes on to the one after it."""
        stage, call = self._group_calls[work.at]
        group = work.group
        assert group is not None
        before = group.verdict
        observed = self.runtime.hub.wants("stage_applied")
        job.context.began = anyio.current_time() if observed else 0.0
        counted = (self.ledger.remaining, self.spec.groups)
        count: dict[str, int] = {}
        if stage.counts:
            count = {name: value for name, value in zip(_COUNT, counted, strict=True) if name in stage.wants}
        try:
            result = await self.runtime.pool.slice.isolated(
                self.runtime.context.copy(), job, self._call_group(job, stage, call, group, count)
            )
            if not (result is None or isinstance(result, Group | Drop) or (stage.counts and isinstance(result, Hold))):
                raise ContractError(
                    f"stage {stage.name!r} returned {type(result).__name__} for group {work.index}, "
                    f"expected Group, None or Drop"
                    + ("; only a stage that asks for `remaining` can hold" if isinstance(result, Hold) else "")
                )
            if isinstance(result, Group) and result.index != work.index:
                raise ContractError(f"stage {stage.name!r} returned group {result.index} for group {work.index}")
            _check_group(result if isinstance(result, Group) else group, stage)
        except Exception as error:
            work.jobs.pop(job, None)
            if not job.cancelled:
                self._group_failed(work, stage, error)
            return False
        if job.cancelled:
            return False
        self.runtime.activity += 1
        if isinstance(result, Group):
            group = work.group = result
        work.at += 1
        if observed:
            self.emit(
                "stage_applied",
                group_index=work.index,
                stage=stage.name,
                seconds=anyio.current_time() - job.context.began,
                waited=job.context.waited,
                attempts=job.context.attempts,
                worker=None if job.worker is None else job.worker.number,
                dropped=result.reason if isinstance(result, Drop) else None,
                shown=group.executions if stage.external else (),
            )
        if stage.counts:
            if group.verdict is None or group.verdict is before:
                reason = result.reason if isinstance(result, Drop | Hold) else None
                group.verdict = Verdict(reason is None, reason, remaining=counted[0], target=counted[1])
            if self.runtime.hub.wants("group_judged"):
                held = isinstance(result, Hold)
                self.emit("group_judged", group_index=work.index, stage=stage.name, verdict=group.verdict, held=held)
        if isinstance(result, Drop):
            work.jobs.pop(job, None)
            work.end("dropped", result.reason)
            return False
        if isinstance(result, Hold):
            work.jobs.pop(job, None)
            self._hold(work, result)
            return False
        return True

    async def _call_group(
        self, job: GroupJob, stage: Stage, call: Callable[..., Any], group: Group, count: Mapping[str, int]
    ) -> Any:
        _current.set(job.context)
        job.context.stage, job.context.since = stage.name, perf_counter()
        job.context.attempts, job.context.waited = 1, 0.0
        try:
            result = call(group, **count)
            known = result is None or type(result) is Group  # `isawaitable` looks long
            return await result if not known and isawaitable(result) else result
        except Dropped as dropped:
            return dropped.drop

    def _hold(self, work: GroupWork, hold: Hold) -> None:
        """Into the reserve, which has as many places as the batch; the worst group leaves it."""
        self.ledger.hold()
        heapq.heappush(self._held, (hold.score, -work.index, id(work), work))
        if len(self._held) > self.spec.groups:
            self._drop_held(heapq.heappop(self._held)[-1])
        self.news()

    def _drop_held(self, work: GroupWork) -> None:
        assert work.group is not None
        self.ledger.release()
        work.end("dropped", work.group.verdict.reason if work.group.verdict else None)

    def _release_best(self) -> bool:
        """Fill the batch from the reserve, best first. Whether there was anything to release."""
        best = heapq.nlargest(self.spec.groups - len(self._kept), self._held)
        for entry in best:
            self._held.remove(entry)
            work = entry[-1]
            group = work.group
            assert group is not None
            assert group.verdict is not None
            group.verdict = msgspec.structs.replace(group.verdict, kept=True, by_fallback=True)
            self.ledger.release()
            stage = self._group_calls[work.at - 1][0]
            self.emit("group_judged", group_index=work.index, stage=stage.name, verdict=group.verdict, held=False)
            self.arrived(work)
        heapq.heapify(self._held)
        return bool(best)

    # The end

    async def _close(self) -> None:
        """The batch is full: judge what is complete, drop the reserve, stop the rest and give it back."""
        while self._inbox:
            await self._share_the_loop()
            with anyio.CancelScope() as at_once:
                at_once.cancel()  # a judge that waits is not waited for: its group is unfinished
                await self._take(self._inbox.popleft())
        for entry in sorted(self._held, reverse=True):
            self._drop_held(entry[-1])
        self._held.clear()
        await self._stop_jobs()
        for work in list(self.works.values()):
            self._give_back(work)

    async def _stop_jobs(self) -> None:
        """Cancel what is past its engine; have the engines abort the rest and wait for it within the time allowed."""
        aborts: dict[int, tuple[Any, list[Sample]]] = {}
        asked: list[SampleJob] = []
        for work in list(self.works.values()):
            for job in list(work.jobs):
                job.context.closing = True
                engine, sample = job.context.engine, job.context.sample
                if isinstance(job, SampleJob) and sample is not None and hasattr(engine, "abort"):
                    aborts.setdefault(id(engine), (engine, []))[1].append(sample)
                    asked.append(job)
                else:
                    work.jobs.pop(job, None)
                    job.cancel()
        if not asked:
            return
        self.waits_for = f"{', '.join(type(engine).__name__ for engine, _ in aborts.values())} to abort its requests"
        with anyio.move_on_after(self.spec.abort_timeout) as scope:
            async with anyio.create_task_group() as task_group:
                for engine, samples in aborts.values():
                    task_group.start_soon(self._abort, engine, samples, asked)
            while any(job in job.work.jobs for job in asked):
                await self._wait()
        self.waits_for = None
        if scope.cancelled_caught:
            logger.warning(
                "rollout %d: %d samples were not given back within abort_timeout=%g s and were cancelled",
                self.id, sum(job in job.work.jobs for job in asked), self.spec.abort_timeout,
            )  # fmt: skip
        for job in asked:
            if job in job.work.jobs:
                job.work.jobs.pop(job, None)
                job.cancel()

    async def _abort(self, engine: Any, samples: list[Sample], jobs: list[SampleJob]) -> None:
        try:
            await engine.abort(samples)
        except Exception as error:  # nobody was told to abort: there is nothing to wait for
            logger.warning("rollout %d: %s.abort failed: %r", self.id, type(engine).__name__, error, exc_info=error)
            for job in jobs:
                if job.context.engine is engine and job in job.work.jobs:
                    job.work.jobs.pop(job, None)
                    job.cancel()
            self.news()

    def _give_back(self, work: GroupWork) -> None:
        """An unfinished group leaves this rollout, as `BatchSpec.unfinished` says."""
        policy = self.spec.unfinished
        if policy == "cancel":
            work.end("cancelled")
            return
        if policy == "restart":
            self.runtime.waiting.add(Resumption("restarted", work.prototype))
            work.end("cancelled", "restarted")
            return
        work.end("recycled")
        resumption = Resumption("recycled", work.prototype)
        for execution in work.executions:
            if not execution.done:
                checkpoint = None if execution.lost else execution.checkpoint
                execution.begin()
                execution.checkpoint = checkpoint
                if checkpoint is not None and checkpoint[0].status is SampleStatus.ABORTED:
                    checkpoint[0].status = SampleStatus.PENDING
            for sample in _what_it_has(execution):
                if sample.response_length:
                    sample.metadata.setdefault("start_rollout_id", self.id)
            resumption.executions.append(execution)
        self.runtime.waiting.add(resumption)

    def _carried(self, work: GroupWork) -> Resumption:
        resumption = Resumption("carried", work.prototype, work.group, work.at)
        resumption.executions = work.executions
        return resumption

    async def _assemble(self) -> Batch:
        batch = Batch(self.id, self._kept, self.summary())
        for stage in self.runtime.batch_stages:
            job = _BatchPlace(RolloutContext(self.id, self.evaluation), stage.name)
            task = self._call_batch(job, stage, batch)
            self.waits_for = f"the batch stage {stage.name!r}"
            result = await self.runtime.pool.slice.isolated(self.runtime.context.copy(), job, task)
            self.waits_for = None
            if result is not None and not isinstance(result, Batch):
                raise ContractError(
                    f"stage {stage.name!r} returned {type(result).__name__} for the batch of rollout {self.id}, "
                    "expected Batch or None"
                )
            batch = batch if result is None else result
            settle_all(batch.samples, stage.name, f"the batch of rollout {self.id}")
        if self.runtime.hub.wants("batch_assembled"):
            self.waits_for = "the digest of the batch"  # of hundreds of megabytes: not on the loop
            content = await anyio.to_thread.run_sync(digest, batch.groups)
            self.waits_for = None
            self.emit(
                "batch_assembled",
                groups=[group.index for group in batch.groups],
                samples=batch.summary.samples,
                loss_tokens=batch.summary.loss_tokens,
                digest=content,
            )
        return batch

    async def _call_batch(self, job: _BatchPlace, stage: Stage, batch: Batch) -> Any:
        _current.set(job.context)
        result = stage.call(self._offers)(batch)
        return await result if isawaitable(result) else result

    def _abandon(self) -> None:
        """Nothing of the rollout stays behind, whichever way it ended."""
        if self.batch is None or self._given_up:
            self._hand_back()
        for work in list(self.works.values()):
            if any(entry[-1] is work for entry in self._held):
                self.ledger.release()
            if self.spec.unfinished != "cancel" and not self.evaluation:
                self.runtime.waiting.add(Resumption("restarted", work.prototype))
            work.end("cancelled")
        self._held.clear()
        self._inbox.clear()

    def _hand_back(self) -> None:
        """The groups of a batch that nobody takes wait for the next one."""
        groups = [] if self.evaluation else self._kept
        self._kept, self.batch = [], None
        for group in groups:
            prototype = self._prototypes[group.index]
            resumption = Resumption("carried", prototype, group, len(self._group_calls))
            for position, samples in enumerate(group.executions):
                execution = Execution(samples[0].rollout_id or 0, position, [None], done=True)
                resumption.executions.append(execution)
            self.runtime.waiting.add(resumption)

    def _finish(self) -> None:
        try:
            if self.runtime.hub.wants("rollout_finished"):
                self.emit(
                    "rollout_finished",
                    summary=self.summary() if self.batch is None else self.batch.summary,
                    error=None if self.error is None else f"{type(self.error).__name__}: {self.error}",
                )
        finally:  # whatever happens, nobody waits for ever
            self._failures = []  # their tracebacks lead back here
            self.news()
            self._asked.set()
            self.done.set()

    # Waiting, failing, counting

    async def _share_the_loop(self) -> None:
        if perf_counter() > self.runtime.pool.slice.end:
            await self.runtime.pool.slice.turn()

    async def _wait(self) -> None:
        self._news = anyio.Event()
        try:
            await self._news.wait()
        finally:
            self._news = None

    def _group_failed(self, work: GroupWork, stage: Stage, error: Exception) -> None:
        policy = "raise" if isinstance(error, ContractError) else stage.on_error
        if policy == "resubmit" and (work.resubmits >= RESUBMITS or self._full):
            policy = "fail"
        reason = f"{stage.name}: {type(error).__name__}"
        if not self._failed(error, stage.name, policy, work.index, None, None):
            work.end("failed", reason)
            return
        if policy == "resubmit":
            self._resubmitted += len(work.executions)
            work.resubmits += 1
            work.group, work.at = None, 0
            work.open, work.lost, work.loss = len(work.executions), 0, None
            counts = self.ledger.executions
            for execution in work.executions:
                if execution.done:
                    counts.completed -= 1
                elif execution.lost:
                    counts.submitted += 1
                work.restart(execution)
            return
        work.end("failed", reason)

    def _failed(
        self, error: Exception, stage: str, policy: str, group_index: int, index: int | None, execution: int | None
    ) -> bool:
        """Note a failure. Whether the rollout goes on."""
        if self.runtime.hub.wants("stage_failed"):
            self.emit(
                "stage_failed",
                group_index=group_index,
                index=index,
                execution=execution,
                stage=stage,
                error=f"{type(error).__name__}: {error}",
                traceback="".join(traceback.format_exception(error)),
                policy=policy,
            )
        if policy == "raise":
            where = f"sample {index}, " if index is not None else ""
            error.add_note(f"in stage {stage!r}, {where}group {group_index}, rollout {self.id}")
            self.stop(error)
            return False
        self._failed_samples += 1 if index is not None else self.group_size
        self._failures.append(error)
        if self._failed_samples > self.spec.max_failures:
            self.stop(self._failure_group(f"more than max_failures={self.spec.max_failures}"))
            return False
        return True

    def _failure_group(self, remark: str) -> ExceptionGroup[Exception]:
        return ExceptionGroup(f"rollout {self.id}: {self._failed_samples} samples failed, {remark}", self._failures)

    def _exhausted(self) -> RolloutExhausted:
        summary = self.summary()
        if self._ended_source:
            why, advice = "the prompts ended", "choose on_exhausted='partial' or 'wrap', or give more prompts"
        else:
            why = (
                f"{self._rounds} rounds of {self.spec.round_size} groups are spent (max_rounds={self.spec.max_rounds})"
            )
            advice = (
                "allow more rounds or a larger over_sampling, or let a fallback fill the batch: "
                "DynamicFilter(judge, fallback='last') or 'best'"
            )
        error = RolloutExhausted(f"{why} before the batch was full: {summary}; {advice}", summary)
        if self._failures:
            error.__cause__ = self._failure_group("the rest was rejected")
        return error

    def now(self) -> float:
        """Seconds since the rollout began."""
        return anyio.current_time() - self._started

    def summary(self) -> Summary:
        """The counts as they stand."""
        ledger = self.ledger
        executions = samples = loss_tokens = fallback_loss_tokens = rewarded = 0
        rewards = 0.0
        for group in self._kept:
            flat = group.samples
            tokens = sum([sample.loss_tokens for sample in flat])
            total, count = _rewards(group)
            executions += len(group.executions)
            samples += len(flat)
            loss_tokens += tokens
            rewards += total
            rewarded += count
            if group.verdict is not None and group.verdict.by_fallback:
                fallback_loss_tokens += tokens
        return Summary(
            rollout_id=self.id,
            evaluation=self.evaluation,
            target=ledger.submitted if self.evaluation else self.spec.groups,
            rounds=self._rounds,
            submitted=ledger.submitted,
            kept=ledger.kept,
            kept_by_fallback=ledger.kept_by_fallback,
            dropped=dict(ledger.dropped),
            failed=ledger.failed,
            cancelled=ledger.cancelled,
            recycled=ledger.recycled,
            carried=ledger.carried,
            surplus=ledger.surplus,
            executions=executions,
            samples=samples,
            failed_samples=self._failed_samples,
            resubmitted_samples=self._resubmitted,
            loss_tokens=loss_tokens,
            fallback_loss_tokens=fallback_loss_tokens,
            reward_mean=self._rewards / self._rewarded if self._rewarded else None,
            kept_reward_mean=rewards / rewarded if rewarded else None,
            seconds=self.now(),
        )


def _what_it_has(execution: Execution) -> list[Sample]:
    """The samples with which a recycled execution begins."""
    if execution.done:
        return execution.samples
    return [execution.checkpoint[0]] if execution.checkpoint is not None else []


def _check_group(group: Group, stage: Stage) -> None:
    """What a group stage left: executions of at least one sample each, whole ones."""
    if not group.executions:
        raise ContractError(f"stage {stage.name!r} left group {group.index} without executions: return Drop(reason)")
    if not all(group.executions):
        raise ContractError(f"stage {stage.name!r} left group {group.index} with an execution that has no samples")
    settle_all(group.samples, stage.name, f"group {group.index}")


def _rewards(group: Group) -> tuple[float, int]:
    """Sum and number of the finite rewards, one per execution."""
    rewards = [execution[-1].reward for execution in group.executions]
    if set(map(type, rewards)) == {float} and math.isfinite(total := sum(rewards)):  # as nearly always
        return total, len(rewards)
    numbers = map(reward_number, rewards)
    finite = [number for number in numbers if number is not None and math.isfinite(number)]
    return sum(finite), len(finite)


class _BatchPlace:
    """Stands for a batch stage where the watchdog looks."""

    def __init__(self, context: RolloutContext, stage: str) -> None:
        self.context = context
        self.worker: Worker | None = None
        context.stage, context.since = stage, perf_counter()

    def run(self) -> None:
        """Never queued."""

    def died(self, error: BaseException) -> None:
        """Never run by a worker."""

    def describe(self) -> str:
        return f"the batch of rollout {self.context.rollout_id}"
