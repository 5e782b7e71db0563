"""The pipeline from outside: order and acknowledgement, overlap, evaluation, contexts, errors, leaving it."""

from __future__ import annotations

import contextvars
import gc
import weakref
from typing import Any, ClassVar

import anyio
import anyio.to_thread
import pytest

from backends.simulated import SimulatedEngine
from eventbus.batching import BatchSpec
from eventbus.context import current_rollout
from eventbus.group import Group, TrainResult
from eventbus.pipeline import Pipeline
from eventbus.sample import Completion, Sample
from eventbus.stage import CallNext, ContractError, DeclaredStage, Drop, Dropped
from eventbus.workers import WorkerDied
from middleware.generate import Generate
from middleware.stages import group_stage, sample_stage
from tests.streams import Log, batches, endless, engine, kind_of, some

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]


def plain(*stages: Any, groups: int = 2, size: int = 2, **options: Any) -> Pipeline:
    return Pipeline(endless(size), [Generate(engine()), *stages], BatchSpec(groups), **options)


# Order and acknowledgement


async def test_nothing_of_the_next_rollout_is_submitted_before_it_is_asked_for() -> None:
    simulated = engine()
    async with Pipeline(endless(), [Generate(simulated)], BatchSpec(2)) as pipeline:
        rollouts = pipeline.rollouts()
        await anext(rollouts)
        await anyio.wait_all_tasks_blocked()
        assert simulated.calls == 4
        await anext(rollouts)
        assert simulated.calls == 8


async def test_ahead_lets_later_rollouts_run() -> None:
    simulated = engine(delay=1.0)
    async with Pipeline(endless(), [Generate(simulated)], BatchSpec(2)) as pipeline:
        rollouts = pipeline.rollouts(ahead=2)
        assert (await anext(rollouts)).rollout_id == 0
        assert simulated.calls == 12
        await anyio.sleep(100)
        assert simulated.calls == 12
        assert (await anext(rollouts)).rollout_id == 1
        await anyio.sleep(0.5)
        assert simulated.calls == 16


async def test_trained_acknowledges_with_metrics_once() -> None:
    log = Log("batch_trained", "weights_updated")
    async with plain(observers=[log]) as pipeline:
        rollouts = pipeline.rollouts()
        batch = await anext(rollouts)
        batch.trained(TrainResult({"loss": 0.5}, "1"))
        with pytest.raises(RuntimeError, match="batch 0 was acknowledged before"):
            batch.trained()
        await anext(rollouts)
        await anext(rollouts)
    trained = log.of("batch_trained")
    assert [(event.rollout_id, event.metrics) for event in trained] == [(0, {"loss": 0.5}), (1, {})]
    assert [event.version for event in log.of("weights_updated")] == ["1"]


async def test_leaving_by_an_exception_does_not_acknowledge() -> None:
    log = Log("batch_trained")
    with pytest.raises(ZeroDivisionError):
        async with plain(observers=[log]) as pipeline:
            async for _ in pipeline.rollouts():
                raise ZeroDivisionError
    assert log.events == []


async def test_an_error_of_the_body_leaves_as_itself() -> None:
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        async with Pipeline(endless(), [Generate(engine(delay=5.0))], BatchSpec(2)) as pipeline:
            async for _ in pipeline.rollouts(ahead=3):
                raise error
    assert caught.value is error


async def test_break_needs_no_cleanup_and_what_ran_ahead_is_asked_again() -> None:
    async with Pipeline(endless(), [Generate(engine(delay=1.0))], BatchSpec(2)) as pipeline:
        async for batch in pipeline.rollouts(ahead=1):
            assert [group.index for group in batch.groups] == [0, 1]
            break
        again = await anext(pipeline.rollouts(start=1))
        assert [group.index for group in again.groups] == [2, 3]


async def test_an_undelivered_batch_is_given_to_the_next_iterator() -> None:
    async with plain() as pipeline:
        first = pipeline.rollouts(ahead=1)
        await anext(first)
        await anyio.wait_all_tasks_blocked()
        again = await anext(pipeline.rollouts(start=1))
        assert [group.index for group in again.groups] == [2, 3]


async def test_pipeline_goes_on_when_entered_again() -> None:
    pipeline = plain()
    (first,) = await batches(pipeline)
    (second,) = await batches(pipeline, start=1, stop=2)
    assert [group.index for group in first.groups + second.groups] == [0, 1, 2, 3]


async def test_asking_outside_of_the_pipeline_says_how_to_enter_it() -> None:
    with pytest.raises(RuntimeError, match=r"not entered: `async with pipeline"):
        await anext(plain().rollouts())
    with pytest.raises(RuntimeError, match="not entered"):
        await plain().evaluate(some(1), rollout_id=0)


async def test_entering_twice_is_refused() -> None:
    async with plain() as pipeline:
        with pytest.raises(RuntimeError, match="entered already"):
            await pipeline.__aenter__()


async def test_two_tasks_cannot_wait_on_one_iterator() -> None:
    async with Pipeline(endless(), [Generate(engine(delay=1.0))], BatchSpec(2)) as pipeline:
        rollouts = pipeline.rollouts()
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(anext, rollouts)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(RuntimeError, match="another task is already waiting"):
                await anext(rollouts)


async def test_numbers_of_rollouts_are_checked() -> None:
    with pytest.raises(ValueError, match="ahead=-1"):
        plain().rollouts(ahead=-1)
    with pytest.raises(ValueError, match=r"rollouts\(start=3, stop=2\)"):
        plain().rollouts(3, 2)


# Contexts


async def test_a_sample_sees_its_own_rollout_while_others_run() -> None:
    seen: set[tuple[int | None, int]] = set()

    async def late(sample: Sample) -> None:
        before = current_rollout().rollout_id
        await anyio.sleep(100.0 / (1 + before))
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(note, sample)

    async def note(sample: Sample) -> None:
        seen.add((sample.group_index, current_rollout().rollout_id))
        assert current_rollout().stage == "late"
        assert current_rollout().index == sample.index

    async with Pipeline(endless(), [Generate(engine()), late], BatchSpec(2)) as pipeline:
        async for _ in pipeline.rollouts(stop=4, ahead=3):
            pass
    assert seen == {(group, group // 2) for group in range(8)}


async def test_a_thread_sees_the_rollout() -> None:
    def stage(sample: Sample) -> None:
        context = current_rollout()
        sample.metadata["seen"] = (context.rollout_id, context.group_index, context.stage)

    async def threaded(sample: Sample) -> None:
        await anyio.to_thread.run_sync(stage, sample)

    (_, batch) = await batches(plain(threaded), 2)
    assert {sample.metadata["seen"] for sample in batch.samples} == {(1, 2, "threaded"), (1, 3, "threaded")}


mine: contextvars.ContextVar[int] = contextvars.ContextVar("mine", default=-1)


async def test_context_variables_of_a_stage_reach_no_other_sample() -> None:
    leaked: list[int] = []

    def sets(sample: Sample) -> None:
        leaked.append(mine.get())
        mine.set(sample.index or 0)

    def later(sample: Sample) -> None:
        assert mine.get() == sample.index

    await batches(plain(sets, later, groups=8))
    assert set(leaked) == {-1}


async def test_evaluation_beside_training_mixes_nothing() -> None:
    flags: dict[str, set[tuple[int, bool]]] = {}

    async def tagged(sample: Sample, *, rollout_id: int, evaluation: bool) -> None:
        await anyio.sleep(1.0)
        context = current_rollout()
        assert (context.rollout_id, context.evaluation) == (rollout_id, evaluation)
        flags.setdefault(str(sample.prompt).split()[0], set()).add((rollout_id, evaluation))

    def rejects(group: Group) -> Drop:
        return Drop("training only")

    from eventbus.prompts import Prompts

    async with plain(tagged) as pipeline, anyio.create_task_group() as task_group:

        async def train() -> None:
            async for _ in pipeline.rollouts(stop=3):
                pass

        task_group.start_soon(train)
        report = await pipeline.evaluate(Prompts(["eval a", "eval b", "eval c"], 1), rollout_id=100)
    assert flags == {"prompt": {(0, False), (1, False), (2, False)}, "eval": {(100, True)}}
    assert [group.index for group in report.groups] == [0, 1, 2]
    assert (report.summary.submitted, report.summary.kept, report.summary.evaluation) == (3, 3, True)


async def test_evaluation_runs_no_group_stages_and_changes_the_sampling() -> None:
    asked: list[Any] = []

    class Asked(SimulatedEngine):
        async def generate(self, sample: Sample, sampling: Any) -> Completion:
            asked.append(dict(sampling))
            return await super().generate(sample, sampling)

    def rejects(group: Group) -> Drop:
        return Drop("training only")

    generate = Generate(Asked(lambda s: Completion("x", [1], [0.0])), {"temperature": 1.0, "top_k": 5})
    async with Pipeline(endless(), [generate, rejects], BatchSpec(2)) as pipeline:
        report = await pipeline.evaluate(some(5, 1), rollout_id=3, sampling={"temperature": 0.0})
    assert len(report.groups) == 5
    assert asked == [{"temperature": 0.0, "top_k": 5}] * 5


async def test_evaluation_counts_what_failed() -> None:
    def fragile(sample: Sample) -> None:
        if sample.group_index == 1:
            raise ValueError("no")

    async with plain(fragile) as pipeline:
        report = await pipeline.evaluate(some(3, 1), rollout_id=0)
    assert [group.index for group in report.groups] == [0, 2]
    assert (report.summary.failed, report.summary.failed_samples) == (1, 1)


# Stages


async def test_fanned_out_children_run_side_by_side_in_order() -> None:
    def split(sample: Sample) -> list[Sample]:
        children = [sample.copy() for _ in range(8)]
        for turn, child in enumerate(children):
            child.metadata["turn"] = turn
        return children

    async def hook(sample: Sample) -> None:
        await anyio.sleep(0.05)
        sample.metadata["hooked"] = True

    async with plain(split, hook) as pipeline:
        batch = await anext(pipeline.rollouts())
        assert anyio.current_time() < 0.1
    for group in batch.groups:
        assert len(group) == 2
        for execution in group.executions:
            assert [child.metadata["turn"] for child in execution] == list(range(8))
            assert len({child.rollout_id for child in execution}) == 1
        indices = [sample.index or 0 for sample in group.samples]
        assert len(set(indices)) == 16
        assert min(indices) >= group.index * 2 + 2
    assert (batch.summary.executions, batch.summary.samples) == (4, 32)


async def test_fan_outs_nest() -> None:
    def split(sample: Sample) -> list[Sample]:
        return [sample, sample.copy()]

    def again(sample: Sample) -> Sample | list[Sample]:
        return [sample, sample.copy(), sample.copy()] if sample.group_index == 0 else sample

    batch = (await batches(plain(split, again)))[0]
    assert [[len(execution) for execution in group.executions] for group in batch.groups] == [[6, 6], [2, 2]]


async def test_a_dropped_child_takes_its_execution_along() -> None:
    def split(sample: Sample) -> list[Sample]:
        return [sample, sample.copy()]

    def picky(sample: Sample) -> Drop | None:
        return Drop("turn") if sample.group_index == 0 and sample.index == 2 else None

    (batch,) = await batches(plain(split, picky))
    assert [group.index for group in batch.groups] == [1, 2]
    assert batch.summary.dropped == {"turn": 1}


async def test_wrapper_sees_what_comes_after_it() -> None:
    async def timed(sample: Sample, call_next: CallNext) -> None:
        began = anyio.current_time()
        sample = await call_next(sample)
        sample.metadata["seconds"] = anyio.current_time() - began

    async def slow(sample: Sample) -> Sample:
        await anyio.sleep(3.0)
        return sample.copy()

    (batch,) = await batches(plain(timed, slow))
    assert {sample.metadata["seconds"] for sample in batch.samples} == {3.0}


async def test_a_drop_unwinds_through_the_wrappers() -> None:
    closed: list[str] = []

    async def around(sample: Sample, call_next: CallNext) -> Sample:
        try:
            return await call_next(sample)
        except Dropped as dropped:
            closed.append(dropped.reason)
            raise

    def picky(sample: Sample) -> Drop | None:
        return Drop("loops") if sample.group_index == 0 else None

    (batch,) = await batches(plain(around, picky))
    assert batch.summary.dropped == {"loops": 1}
    assert closed == ["loops"]


async def test_a_wrapper_may_answer_without_what_comes_after_it() -> None:
    ran: list[int | None] = []

    async def cached(sample: Sample, call_next: CallNext) -> Sample:
        return sample if sample.index == 0 else await call_next(sample)

    def inner(sample: Sample) -> None:
        ran.append(sample.index)

    await batches(plain(cached, inner))
    assert sorted(index or 0 for index in ran) == [1, 2, 3]


async def test_stages_and_observers_are_opened_and_closed_once() -> None:
    calls: list[str] = []

    class Judge:
        async def __aenter__(self) -> None:
            calls.append("open")

        async def __aexit__(self, *error: object) -> None:
            calls.append("close")

        async def __call__(self, sample: Sample) -> None:
            calls.append("call")

    judge = Judge()
    await batches(plain(judge, DeclaredStage(judge, name="second"), groups=1, size=1))
    assert calls == ["open", "call", "call", "close"]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"reward": 1}, "stage 'foreign' returned dict for sample 0, expected Sample, None, Drop"),
        ([Sample()], r"returned list .*fans out says so"),
        (True, "returned bool"),
    ],
)
async def test_a_foreign_return_names_stage_and_sample(returned: Any, message: str) -> None:
    def foreign(sample: Sample) -> Any:
        return returned

    with pytest.raises(ContractError, match=message):
        await batches(plain(foreign, size=1))


async def test_lengths_that_disagree_name_stage_sample_and_field() -> None:
    def cuts(sample: Sample) -> None:
        sample.loss_mask = [1, 1, 1]  # type: ignore[assignment]

    with pytest.raises(ContractError, match="stage 'cuts', sample 0: loss_mask has 3 values, but response_length is 1"):
        await batches(plain(cuts, size=1))


async def test_lists_assigned_by_a_stage_are_packed() -> None:
    def lists(sample: Sample) -> None:
        sample.tokens = [1, 2, 3]  # type: ignore[assignment]
        sample.loss_mask = [1]  # type: ignore[assignment]

    (batch,) = await batches(plain(lists))
    assert type(batch.samples[0].tokens).__name__ == "Tokens"


# Errors


def fragile(policy: str, bad: set[int], times: int = 10) -> DeclaredStage:
    raised: dict[int, int] = {}

    def judge(sample: Sample) -> None:
        index = sample.index or 0
        if index in bad and raised.get(index, 0) < times:
            raised[index] = raised.get(index, 0) + 1
            raise ConnectionError(f"judge of {index}")

    return DeclaredStage(judge, on_error=policy)  # type: ignore[arg-type]


async def test_fail_takes_the_group_along() -> None:
    log = Log("stage_failed", "group_ended")
    (batch,) = await batches(plain(fragile("fail", {3}), size=8, observers=[log]))
    assert [group.index for group in batch.groups] == [1, 2]
    assert (batch.summary.failed, batch.summary.failed_samples) == (1, 1)
    (failure,) = log.of("stage_failed")
    assert (failure.stage, failure.index, failure.policy) == ("judge", 3, "fail")
    assert "raise ConnectionError" in failure.traceback
    assert log.of("group_ended")[0].reason == "judge: ConnectionError"


async def test_resubmit_asks_again_from_the_prompt_at_most_twice() -> None:
    (batch,) = await batches(plain(fragile("resubmit", {3}, times=2), size=8))
    assert [group.index for group in batch.groups] == [0, 1]
    assert (batch.summary.failed, batch.summary.resubmitted_samples) == (0, 2)
    (batch,) = await batches(plain(fragile("resubmit", {3}, times=3), size=8))
    assert [group.index for group in batch.groups] == [1, 2]
    assert (batch.summary.failed, batch.summary.failed_samples) == (1, 3)


async def test_resubmitted_sample_begins_fresh() -> None:
    tags: list[int] = []

    def tag(sample: Sample) -> None:
        sample.metadata["tags"] = sample.metadata.get("tags", 0) + 1
        tags.append(sample.metadata["tags"])

    await batches(plain(tag, fragile("resubmit", {0}, times=1)))
    assert set(tags) == {1}


async def test_raise_ends_the_rollout_with_the_error_itself() -> None:
    with pytest.raises(ConnectionError, match="judge of 3") as caught:
        await batches(plain(fragile("raise", {3}), size=8))
    assert "in stage 'judge', sample 3, group 0, rollout 0" in caught.value.__notes__


async def test_too_many_failures_raise_one_group_with_the_roots() -> None:
    pipeline = Pipeline(endless(1), [Generate(engine()), fragile("fail", set(range(99)))], BatchSpec(2, max_failures=5))
    with pytest.raises(ExceptionGroup, match="6 samples failed, more than max_failures=5") as caught:
        await batches(pipeline)
    assert len(caught.value.exceptions) == 6
    assert all(isinstance(error, ConnectionError) and error.__traceback__ for error in caught.value.exceptions)


async def test_group_stage_errors_follow_the_policy() -> None:
    raised: list[int] = []

    def judge(group: Group) -> None:
        if group.index == 0 and len(raised) < 2:
            raised.append(group.index)
            raise ValueError("cannot compare")

    again = DeclaredStage(judge, on_error="resubmit")
    (batch,) = await batches(plain(again))
    assert [group.index for group in batch.groups] == [0, 1]
    raised.clear()
    (batch,) = await batches(plain(judge))
    assert batch.summary.failed == 1


async def test_the_pipeline_goes_on_after_a_failed_rollout() -> None:
    async with plain(fragile("raise", {0})) as pipeline:
        rollouts = pipeline.rollouts()
        with pytest.raises(ConnectionError):
            await anext(rollouts)
        assert (await anext(rollouts)).rollout_id == 1


async def test_an_engine_that_raises_is_a_failed_sample() -> None:
    def answer(sample: Sample) -> Completion:
        if sample.index == 0:
            raise OSError("connection reset")
        return Completion("x", [1], [0.0])

    (batch,) = await batches(Pipeline(endless(), [Generate(SimulatedEngine(answer))], BatchSpec(2)))
    assert (batch.summary.failed, len(batch)) == (1, 2)


async def test_a_worker_that_dies_is_raised_to_the_consumer() -> None:
    class Death(BaseException):
        pass

    async def dies(sample: Sample) -> None:
        await anyio.sleep(5.0)
        if sample.index == 0:
            raise Death("out of the blue")

    with pytest.raises(Death, match="out of the blue"):
        await batches(plain(dies))
    assert anyio.current_time() < 6.0


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_a_worker_cancelled_from_outside_is_raised_to_the_consumer() -> None:
    import asyncio

    async def cancelled(sample: Sample) -> None:
        task = asyncio.current_task()
        assert task is not None
        if sample.index == 0:
            asyncio.get_running_loop().call_soon(task.cancel)
        await anyio.sleep(5.0)

    with pytest.raises(WorkerDied, match=r"sample 0 .* in stage 'cancelled'"):
        await batches(plain(cancelled))


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_a_cancellation_from_inside_a_stage_is_its_failure() -> None:
    import asyncio

    async def awaits_cancelled(sample: Sample) -> None:
        if sample.group_index == 0:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            future.cancel()
            await future

    (batch,) = await batches(plain(awaits_cancelled))
    assert batch.summary.failed == 1


async def test_an_observer_that_raises_ends_the_rollout() -> None:
    class Full:
        kinds = ("group_ended",)

        def observe(self, event: Any) -> None:
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left") as caught:
        await batches(plain(observers=[Full()]))
    assert any("observer Full" in note for note in caught.value.__notes__)


def test_an_observer_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="no event kind 'nonsense'"):
        plain(observers=[Log("nonsense")])


def test_stall_after_must_be_positive() -> None:
    with pytest.raises(ValueError, match="stall_after=0"):
        plain(stall_after=0)


async def test_nothing_runs_after_the_pipeline_is_left() -> None:
    simulated = engine(delay=1000.0)
    async with Pipeline(endless(), [Generate(simulated)], BatchSpec(4)) as pipeline:
        with anyio.move_on_after(10.0):
            await anext(pipeline.rollouts(ahead=2))
        assert simulated.in_flight == 24
    assert simulated.in_flight == 0


async def test_cancelled_evaluation_leaves_nothing() -> None:
    simulated = engine(delay=1000.0)
    async with Pipeline(endless(), [Generate(simulated)], BatchSpec(4)) as pipeline:
        with anyio.move_on_after(10.0):
            await pipeline.evaluate(some(3, 1), rollout_id=0)
        await anyio.wait_all_tasks_blocked()
        assert simulated.in_flight == 0


# Events


async def test_every_group_is_submitted_and_ends_once_and_seq_has_no_gap() -> None:
    log = Log()
    await batches(plain(fragile("fail", {3}), observers=[log]), 3)
    assert [event.seq for event in log.events] == list(range(len(log.events)))
    assert len(log.of("group_submitted")) == len(log.of("group_ended")) == 8


async def test_stage_applied_names_what_changed() -> None:
    def changes(sample: Sample) -> None:
        sample.reward = 1.0
        sample.metadata["in place"] = True

    log = Log("stage_applied")
    await batches(plain(changes, size=1, groups=1, observers=[log]))
    generated, changed = log.events
    assert generated.stage == "Generate"
    assert set(generated.columns) == {"tokens", "rollout_log_probs"}
    assert changed.changed == {"reward": 1.0, "metadata": {"in place": True}}
    assert changed.columns == {}


async def test_stage_applied_says_what_a_drop_a_fan_out_and_an_external_stage_left() -> None:
    def split(sample: Sample) -> list[Sample]:
        return [sample, sample.copy()]

    def some_go(sample: Sample) -> None:
        if sample.index == 2:
            raise Dropped(Drop("second"))

    def asked(sample: Sample) -> None:
        sample.reward = 0.5

    def of_a_group(group: Group) -> None: ...

    log = Log("stage_applied")
    stages = [split, sample_stage(asked, external=True), some_go, group_stage(of_a_group, external=True)]
    pipeline = Pipeline(endless(2), stages, BatchSpec(1, min_group_size=1), observers=[log])
    await batches(pipeline)
    first, *_ = (event for event in log.events if event.stage == "split")
    assert [len(children) for children in first.samples] == [2]
    external = [event for event in log.events if event.stage == "asked"]
    assert {(event.index, event.child, event.samples[0][0].sample.reward) for event in external} == {  # 4 ends with 2
        (2, 1, 0.5), (3, 1, 0.5), (5, 2, 0.5),
    }  # fmt: skip
    assert [(event.index, event.dropped) for event in log.events if event.dropped] == [(2, "second")]
    group = log.events[-1]
    assert (group.stage, group.index, group.group_index) == ("of_a_group", None, 0)
    assert [[one.sample.index for one in samples] for samples in group.samples] == [[3, 5]]
    assert all(event.worker is not None for event in log.events)


async def test_a_stage_that_left_nothing_external_is_not_repeated_in_its_event() -> None:
    log = Log("stage_applied")
    await batches(plain(observers=[log]))
    assert all(event.samples == [] for event in log.events)


async def test_submitted_groups_show_their_prompt_and_generated_samples_are_shown() -> None:
    log = Log("group_submitted", "sample_generated")
    await batches(plain(size=1, groups=1, observers=[log]))
    submitted, generated = log.events
    assert submitted.samples[0][0].sample.prompt == "prompt 0"
    assert generated.stage == "Generate"
    assert set(generated.samples[0][0].columns) == {"tokens", "rollout_log_probs"}


async def test_a_fan_out_that_asks_the_engine_and_gives_one_sample_is_in_the_events_itself() -> None:
    asked = engine()

    async def turns(sample: Sample) -> Sample | list[Sample]:
        with current_rollout().generating(asked, sample):
            await asked.generate(sample, {})
        return sample

    def later(sample: Sample) -> None: ...

    log = Log("sample_generated")
    await batches(Pipeline(endless(1), [turns, later], BatchSpec(1), observers=[log]))
    assert [event.stage for event in log.events] == ["turns"]


async def test_an_observer_that_wants_whole_samples_gets_them() -> None:
    class Whole(Log):
        pipelines: ClassVar[list[Pipeline]] = []
        tokens: ClassVar[list[list[int]]] = []

        def attach(self, pipeline: Pipeline) -> None:
            assert not self.events
            self.pipelines.append(pipeline)

        def observe_samples(self, event: Any, samples: list[list[Sample]]) -> None:
            self.events.append(event)
            assert [[one.sample.index for one in each] for each in event.samples] == [
                [sample.index for sample in each] for each in samples
            ]
            if kind_of(event) == "group_completed":
                self.tokens.extend(sample.tokens.tolist() for each in samples for sample in each)

    whole = Whole()
    pipeline = plain(size=2, groups=1, observers=[whole])
    await batches(pipeline)
    assert whole.pipelines == [pipeline]
    assert whole.tokens == [[0], [0]]
    assert [event.seq for event in whole.events] == list(range(len(whole.events)))


async def test_event_stream_skips_and_counts_what_is_not_read() -> None:
    async with plain() as pipeline:
        stream = pipeline.events(("group_ended",), capacity=1)
        await anext(pipeline.rollouts())
        assert stream.missed == 1
    assert len([event async for event in stream]) == 1


async def test_events_end_with_the_pipeline() -> None:
    seen: list[Any] = []
    async with anyio.create_task_group() as task_group, plain() as pipeline:

        async def read() -> None:
            seen.extend([event async for event in pipeline.events(("rollout_finished",))])

        task_group.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        await anext(pipeline.rollouts())
    assert len(seen) == 1
    assert seen[0].summary.kept == 2


# Memory


class Weight:
    """Something to watch die."""


async def test_what_was_handed_over_is_freed_without_the_garbage_collector() -> None:
    alive: list[weakref.ref[Weight]] = []

    def loaded(sample: Sample) -> None:
        sample.metadata["weight"] = weight = Weight()
        alive.append(weakref.ref(weight))

    def split(sample: Sample) -> list[Sample]:
        return [sample, sample.copy()]

    def picky(sample: Sample) -> Drop | None:
        return Drop("third") if sample.group_index == 1 else None

    spec = BatchSpec(2, over_sampling=4)
    async with Pipeline(endless(), [Generate(engine()), loaded, split, picky], spec) as pipeline:
        rollouts = pipeline.rollouts(ahead=1)
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                batch = await anext(rollouts)
                del batch
            kept = sum(ref() is not None for ref in alive)
        finally:
            gc.enable()
    # Four groups of two executions: no more than what is under way, of 20 groups that went through.
    assert len(alive) >= 5 * 2 * 2
    assert kept <= 2 * 4 * 2
