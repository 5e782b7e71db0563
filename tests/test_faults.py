"""Faults that were found by trying to break the stream; each test stands for its kind."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from backends.simulated import SimulatedEngine
from eventbus import (
    Batch,
    BatchSpec,
    Completion,
    ContractError,
    Drop,
    Dropped,
    Group,
    Pipeline,
    Prompts,
    RolloutExhausted,
    Sample,
    SampleStatus,
    Summary,
    TrainResult,
    WorkerDied,
    current_rollout,
)
from eventbus.stage import CallNext, DeclaredStage
from middleware.generate import Generate, append
from middleware.wrappers import limit, retry
from tests.streams import Log, batches, endless, engine, some

pytestmark = pytest.mark.anyio
virtual = pytest.mark.virtual_time


def spin() -> None:
    """Use up a time slice."""
    end = time.perf_counter() + 0.002
    while time.perf_counter() < end:
        pass


async def test_a_worker_that_yields_in_the_middle_of_a_chain_leaves_no_job_behind() -> None:
    """All samples of a round must get into the last stage, whatever the slice does before it."""
    arrived: list[int | None] = []
    all_there = anyio.Event()

    def busy(sample: Sample) -> None:
        spin()

    async def barrier(sample: Sample) -> None:
        arrived.append(sample.index)
        if len(arrived) == 16:
            all_there.set()
        await all_there.wait()

    assert len((await batches(Pipeline(endless(1), [Generate(engine()), busy, barrier], BatchSpec(16))))[0]) == 16


@virtual
async def test_a_group_stage_that_is_cancelled_when_the_batch_is_full_kills_no_worker() -> None:
    async def slow(group: Group) -> None:
        if group.index >= 2:
            await anyio.sleep(100)

    given = await batches(Pipeline(endless(1), [Generate(engine()), slow], BatchSpec(2, over_sampling=4)), 2)
    assert [len(batch) for batch in given] == [2, 2]


@virtual
async def test_closing_waits_only_for_what_the_engine_still_has() -> None:
    class Acknowledges(SimulatedEngine):
        async def abort(self, samples: Any) -> None:
            """Returns at once, as over HTTP; the requests end a little later."""
            for sample in samples:
                request = self._requests[sample.rollout_id]
                request.aborted = True
                request.wake()

    simulated = Acknowledges(lambda s: Completion("x", [1], [-0.1]), delay=lambda s: 1000.0 if s.index == 3 else 0.0)

    async def later(sample: Sample) -> None:
        await anyio.sleep(1000.0 if sample.index == 2 else 1.0)

    spec = BatchSpec(1, over_sampling=2)
    async with Pipeline(endless(2), [Generate(simulated), later], spec, stall_after=None) as pipeline:
        await anext(pipeline.rollouts())
        assert anyio.current_time() == 1.0


@virtual
async def test_a_source_smaller_than_the_batch_wraps_as_often_as_needed() -> None:
    (batch,) = await batches(Pipeline(some(1), [Generate(engine())], BatchSpec(4, on_exhausted="wrap")))
    assert [group.prompt for group in batch.groups] == ["prompt 0"] * 4


@virtual
async def test_an_empty_source_does_not_wrap_for_ever() -> None:
    assert await batches(Pipeline(some(0), [Generate(engine())], BatchSpec(4, on_exhausted="wrap"))) == []


class Remembers(SimulatedEngine):
    """Notes for each call the group and the tokens that it came with."""

    def __init__(self, slow: int, length: int = 10) -> None:
        self.came: list[tuple[int | None, int]] = []
        super().__init__(
            lambda s: Completion("x" * length, [7] * length, [-0.5] * length),
            delay=lambda s: 5.0 if s.group_index == slow else 1.0,
        )

    async def generate(self, sample: Sample, sampling: Any) -> Completion:
        self.came.append((sample.group_index, sample.response_length))
        return await super().generate(sample, sampling)


@virtual
async def test_a_recycled_sample_passes_the_stages_inside_its_wrapper_again() -> None:
    async def around(sample: Sample, call_next: CallNext) -> Sample:
        return await call_next(sample)

    def tag(sample: Sample) -> None: ...

    simulated = Remembers(slow=1)
    spec = BatchSpec(1, over_sampling=2, unfinished="recycle")
    await batches(Pipeline(endless(1), [around, tag, Generate(simulated)], spec, stall_after=None), 2)
    assert [tokens for group, tokens in simulated.came if group == 1] == [0, 2]


@virtual
async def test_a_group_recycled_twice_loses_nothing() -> None:
    simulated = Remembers(slow=1)
    spec = BatchSpec(1, over_sampling=2, unfinished="recycle")
    await batches(Pipeline(endless(1), [Generate(simulated)], spec, stall_after=None), 5)
    tokens = [tokens for group, tokens in simulated.came if group == 1]
    assert len(tokens) > 2
    assert tokens == sorted(tokens)


@virtual
async def test_a_group_recycled_twice_past_its_engine_is_generated_once() -> None:
    async def judge(sample: Sample) -> None:
        if sample.group_index == 1:
            await anyio.sleep(50)

    simulated = Remembers(slow=-1)
    spec = BatchSpec(1, over_sampling=2, unfinished="recycle")
    await batches(Pipeline(endless(1), [Generate(simulated), judge], spec, stall_after=None), 4)
    assert [group for group, _ in simulated.came].count(1) == 1


@virtual
async def test_an_iterator_that_was_superseded_says_so() -> None:
    told: list[str] = []
    async with Pipeline(endless(), [Generate(engine(delay=5.0))], BatchSpec(2), stall_after=None) as pipeline:

        async def first() -> None:
            with pytest.raises(RuntimeError) as caught:
                await anext(pipeline.rollouts())
            told.append(str(caught.value))

        async with anyio.create_task_group() as task_group:
            task_group.start_soon(first)
            await anyio.sleep(1)
            batch = await anext(pipeline.rollouts())
    assert [group.index for group in batch.groups] == [0, 1]
    assert "another iterator" in told[0]


@virtual
async def test_an_event_stream_may_have_several_readers() -> None:
    got: list[int] = []
    async with Pipeline(endless(), [Generate(engine())], BatchSpec(2)) as pipeline:
        stream = pipeline.events(["rollout_started"])

        async def read() -> None:
            got.append((await anext(stream)).rollout_id)

        async with anyio.create_task_group() as task_group:
            task_group.start_soon(read)
            task_group.start_soon(read)
            await anyio.sleep(1)
            rollouts = pipeline.rollouts()
            await anext(rollouts)
            await anext(rollouts)
    assert sorted(got) == [0, 1]


@virtual
@pytest.mark.parametrize("ahead", [0, 1, 3])
async def test_what_an_earlier_rollout_gives_back_at_the_end_of_the_prompts_is_not_lost(ahead: int) -> None:
    simulated = engine(delay=lambda s: 1.0 + (s.group_index or 0))
    pipeline = Pipeline(some(3, 1), [Generate(simulated)], BatchSpec(1, over_sampling=3), stall_after=None)
    given = [[group.index for group in batch.groups] for batch in await batches(pipeline, 100, ahead=ahead)]
    assert given == [[0], [1], [2]]


@virtual
async def test_what_was_under_way_when_the_pipeline_was_left_is_asked_when_it_is_entered_again() -> None:
    pipeline = Pipeline(endless(1), [Generate(engine(delay=1.0))], BatchSpec(2), stall_after=None)
    async with pipeline:
        await anext(pipeline.rollouts(ahead=1))
    async with pipeline:
        batch = await anext(pipeline.rollouts(1))
    assert [group.index for group in batch.groups] == [2, 3]


@virtual
async def test_a_group_that_is_handed_back_keeps_its_label() -> None:
    labels: list[Any] = []

    def note(sample: Sample) -> None:
        labels.append(sample.label)

    prompts = Prompts([{"prompt": "p", "label": f"L{number}"} for number in range(20)], 1)
    async with Pipeline(prompts, [Generate(engine()), note], BatchSpec(2), stall_after=None) as pipeline:
        first = pipeline.rollouts(ahead=1)
        await anext(first)
        await anyio.sleep(1)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anext(pipeline.rollouts(1))
        last = pipeline.rollouts(1)
        for _ in range(3):
            await anext(last)
    assert None not in labels


@virtual
async def test_columns_that_a_group_or_batch_stage_assigns_are_packed_and_checked() -> None:
    def mask(group: Group) -> None:
        for sample in group.samples:
            sample.loss_mask = [1] * sample.response_length  # type: ignore[assignment]

    def short(batch: Batch) -> None:
        batch.samples[0].loss_mask = [1, 1, 1]  # type: ignore[assignment]

    (batch,) = await batches(Pipeline(endless(), [Generate(engine()), mask], BatchSpec(2)))
    assert batch.summary.loss_tokens == 4
    with pytest.raises(ContractError, match="stage 'short', sample 0: loss_mask has 3 values"):
        await batches(Pipeline(endless(), [Generate(engine()), short], BatchSpec(2)))


@virtual
async def test_a_cancelled_evaluation_is_forgotten() -> None:
    async with Pipeline(endless(), [Generate(engine(delay=5.0))], BatchSpec(2), stall_after=None) as pipeline:
        with anyio.move_on_after(1):
            await pipeline.evaluate(some(2), rollout_id=0)
        assert pipeline._rollouts == []


@virtual
async def test_an_observer_that_raises_at_trained_raises_there() -> None:
    class Full:
        kinds = ("batch_trained",)

        def observe(self, event: Any) -> None:
            raise OSError("disk full")

    async with Pipeline(endless(), [Generate(engine())], BatchSpec(2), observers=[Full()]) as pipeline:
        async for batch in pipeline.rollouts(ahead=1):
            with pytest.raises(OSError, match="disk full"):
                batch.trained(TrainResult())
            break


@virtual
async def test_an_engine_that_raises_when_it_aborts_costs_no_full_batch() -> None:
    class Raises:
        def __init__(self) -> None:
            self.aborted: dict[int | None, anyio.Event] = {}

        async def generate(self, sample: Sample, sampling: Any) -> Completion:
            if sample.group_index in (0, 5):
                return Completion("x", [1], [-0.1])
            event = self.aborted[sample.rollout_id] = anyio.Event()
            await event.wait()
            raise ConnectionError("aborted")

        async def abort(self, samples: Any) -> None:
            for sample in samples:
                self.aborted[sample.rollout_id].set()

    async def wait(sample: Sample) -> None:
        await anyio.sleep(1)

    spec = BatchSpec(1, over_sampling=5, max_failures=2)
    log = Log("group_submitted")
    given = await batches(Pipeline(endless(1), [Generate(Raises()), wait], spec, observers=[log], stall_after=None), 1)
    assert [group.index for group in given[0].groups] == [0]
    assert (given[0].summary.failed, given[0].summary.cancelled) == (0, 4)


@virtual
async def test_a_full_batch_does_not_wait_for_a_slow_group_judge() -> None:
    async def judge(group: Group, *, remaining: int) -> None:
        if group.index:
            await anyio.sleep(30)

    simulated = engine(delay=lambda s: 1.0 + (s.index or 0) * 1e-9)
    spec = BatchSpec(1, over_sampling=4)
    async with Pipeline(endless(1), [Generate(simulated), judge], spec, stall_after=None) as pipeline:
        await anext(pipeline.rollouts())
        assert anyio.current_time() < 2


@virtual
async def test_aborted_children_of_a_stage_that_generates_and_fans_out_leave_there() -> None:
    seen: list[SampleStatus] = []
    simulated = engine(delay=lambda s: 1.0 if s.group_index == 0 else 50.0, length=4)

    async def agent(sample: Sample) -> list[Sample]:
        with current_rollout().generating(simulated, sample):
            completion = await simulated.generate(sample, {})
        append(sample, completion)
        return [sample, sample.copy()]

    def reward(sample: Sample) -> None:
        seen.append(sample.status)

    await batches(Pipeline(endless(1), [agent, reward], BatchSpec(1, over_sampling=2), stall_after=None))
    assert SampleStatus.ABORTED not in seen


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_a_cancellation_from_inside_a_judge_is_its_failure() -> None:
    calls: list[int] = []

    async def judge(group: Group, *, remaining: int) -> None:
        calls.append(group.index)
        if len(calls) == 1:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            future.cancel()
            await future

    (batch,) = await batches(Pipeline(endless(1), [Generate(engine()), judge], BatchSpec(1)))
    assert batch.summary.failed == 1


@virtual
async def test_what_a_cancelled_stage_raises_on_its_way_out_ends_nothing() -> None:
    async def stage(sample: Sample) -> None:
        if sample.group_index == 0:
            await anyio.sleep(1)
            return

        async def child() -> None:
            try:
                await anyio.sleep(1000)
            finally:
                raise ValueError("cleanup")

        async with anyio.create_task_group() as task_group:
            task_group.start_soon(child)

    spec = BatchSpec(1, over_sampling=2, unfinished="cancel")
    async with Pipeline(endless(1), [Generate(engine()), stage], spec, stall_after=None) as pipeline:
        assert len(await anext(pipeline.rollouts())) == 1
        await anyio.sleep(5)


@virtual
async def test_stop_iteration_of_a_stage_is_its_error() -> None:
    def stage(sample: Sample) -> None:
        next(iter(()))

    with pytest.raises(RuntimeError, match="stage 'stage' raised StopIteration") as caught:
        await batches(Pipeline(endless(), [Generate(engine()), DeclaredStage(stage, on_error="raise")], BatchSpec(2)))
    assert not isinstance(caught.value, RolloutExhausted)


@virtual
async def test_an_evaluation_in_another_task_hears_that_the_pipeline_was_left() -> None:
    told: list[str] = []
    async with anyio.create_task_group() as task_group:
        async with Pipeline(endless(), [Generate(engine(delay=5.0))], BatchSpec(2), stall_after=None) as pipeline:

            async def evaluate() -> None:
                with pytest.raises(RuntimeError) as caught:
                    await pipeline.evaluate(some(2), rollout_id=0)
                told.append(str(caught.value))

            task_group.start_soon(evaluate)
            await anyio.sleep(1)
    assert "its pipeline was left" in told[0]


@virtual
@pytest.mark.parametrize("executions", [[], [[]], [["no sample"]]])
async def test_a_group_left_without_samples_names_the_stage_and_nobody_waits(executions: Any) -> None:
    def empties(group: Group) -> None:
        group.executions = executions

    with pytest.raises(ContractError, match="stage 'empties' left group 0 with"):
        await batches(Pipeline(endless(), [Generate(engine()), empties], BatchSpec(2), observers=[Log()]))


async def test_group_stages_share_the_loop() -> None:
    """Sixty groups complete at once; between any two of their stages the loop may run something else."""
    turns: list[int] = []
    judged: list[int] = []

    def judge(group: Group, *, remaining: int) -> None:
        spin()
        judged.append(group.index)

    def compare(group: Group) -> None:
        spin()
        judged.append(group.index)

    for stage in (judge, compare):
        judged.clear()
        turns.clear()
        async with Pipeline(endless(1), [Generate(engine()), stage], BatchSpec(60)) as pipeline:
            async with anyio.create_task_group() as task_group:

                async def ticker() -> None:
                    while True:
                        turns.append(len(judged))
                        await anyio.lowlevel.checkpoint()

                task_group.start_soon(ticker)
                await anext(pipeline.rollouts())
                task_group.cancel_scope.cancel()
        assert max(after - before for before, after in itertools.pairwise(turns)) <= 4


@virtual
async def test_an_abort_that_fails_is_not_waited_for() -> None:
    class Refuses(SimulatedEngine):
        async def abort(self, samples: Any) -> None:
            raise OSError("404")

    simulated = Refuses(lambda s: Completion("x", [1], [0.0]), delay=lambda s: 1.0 if s.index == 0 else 1e6)
    async with Pipeline(endless(1), [Generate(simulated)], BatchSpec(1, over_sampling=3), stall_after=None) as pipeline:
        await anext(pipeline.rollouts())
        assert anyio.current_time() == 1.0
    assert simulated.in_flight == 0


@virtual
async def test_a_wrapper_cannot_catch_a_broken_contract() -> None:
    async def forgives(sample: Sample, call_next: CallNext) -> Sample:
        try:
            return await call_next(sample)
        except Exception:
            return sample

    def wrong(sample: Sample) -> Any:
        return {"reward": 1}

    with pytest.raises(ContractError, match="stage 'wrong' returned dict"):
        await batches(Pipeline(endless(), [Generate(engine()), forgives, wrong], BatchSpec(2)))


@virtual
async def test_a_stage_that_swallows_its_cancellation_reports_nothing_any_more() -> None:
    async def stubborn(sample: Sample) -> None:
        try:
            await anyio.sleep(1.0 if sample.index == 0 else 100.0)
        except BaseException:
            sample.reward = 1.0

    log = Log()
    await batches(
        Pipeline(endless(1), [Generate(engine()), stubborn], BatchSpec(1, over_sampling=2), observers=[log]), 1
    )
    kinds = [type(event).__name__ for event in log.events]
    assert "StageApplied" not in kinds[kinds.index("RolloutFinished") :]


@virtual
async def test_an_engine_that_raised_has_generated_nothing() -> None:
    calls: list[int | None] = []

    def answer(sample: Sample) -> Completion:
        calls.append(sample.index)
        if len(calls) == 1:
            raise OSError("reset")
        return Completion("x", [1], [0.0])

    async def again(sample: Sample, call_next: CallNext) -> Sample:
        try:
            return await call_next(sample)
        except OSError:
            return await call_next(sample)

    log = Log("sample_generated")
    await batches(Pipeline(endless(1), [again, Generate(SimulatedEngine(answer))], BatchSpec(1), observers=[log]))
    assert [event.status for event in log.events] == [SampleStatus.COMPLETED]


@virtual
async def test_the_executions_row_balances_for_a_carried_group_that_shrank() -> None:
    def picky(sample: Sample) -> Drop | None:
        return Drop("short") if (sample.index or 0) % 2 else None

    spec = BatchSpec(1, over_sampling=2, min_group_size=1, surplus="carry")
    async with Pipeline(endless(2), [Generate(engine()), picky], spec) as pipeline:
        rollouts = pipeline.rollouts(ahead=2)
        for _ in range(3):
            await anext(rollouts)
        for rollout in pipeline._rollouts:
            await rollout.done.wait()
            assert rollout.ledger.executions.in_flight == 0


@virtual
async def test_what_an_exhausted_rollout_had_kept_goes_into_the_next() -> None:
    def judge(group: Group, *, remaining: int) -> Drop | None:
        return Drop("first") if group.index == 0 else None

    pipeline = Pipeline(endless(1), [Generate(engine()), judge], BatchSpec(4, max_rounds=1))
    async with pipeline:
        rollouts = pipeline.rollouts()
        with pytest.raises(RolloutExhausted):
            await anext(rollouts)
        batch = await anext(rollouts)
    assert [group.index for group in batch.groups] == [1, 2, 3, 4]


@virtual
async def test_cancelled_jobs_keep_nothing_alive() -> None:
    async with Pipeline(
        endless(1),
        [Generate(engine(delay=lambda s: 0.0 if (s.index or 0) % 8 == 0 else 1e6))],
        BatchSpec(1, 8, unfinished="cancel"),
    ) as pipeline:
        rollouts = pipeline.rollouts()
        await anext(rollouts)
        gc.collect()
        gc.disable()
        try:
            await anext(rollouts)
            before = len(gc.get_objects())
            for _ in range(10):
                await anext(rollouts)
            grown = len(gc.get_objects()) - before
        finally:
            gc.enable()
    assert grown < 100


@virtual
async def test_a_reward_beyond_any_float_is_no_crash() -> None:
    def huge(sample: Sample) -> None:
        sample.reward = 10**400

    (batch,) = await batches(Pipeline(endless(), [Generate(engine()), huge], BatchSpec(2)))
    assert batch.summary.reward_mean is None


async def test_trained_refuses_what_is_no_result_and_keeps_the_acknowledgement() -> None:
    async with Pipeline(endless(), [Generate(engine())], BatchSpec(2)) as pipeline:
        batch = await anext(pipeline.rollouts())
        with pytest.raises(TypeError, match=r"takes a TrainResult.*got dict"):
            batch.trained({"loss": 1})  # type: ignore[arg-type]
        batch.trained(TrainResult())


@pytest.mark.parametrize(("field", "value"), [("groups", 2.5), ("groups", True), ("max_rounds", None)])
def test_a_count_must_be_an_integer(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"BatchSpec\\({field}={value}\\): must be an integer"):
        BatchSpec(**{"groups": 1, field: value})


def test_a_pipeline_takes_a_batch_spec() -> None:
    with pytest.raises(TypeError, match=r"batch is a int: pass BatchSpec\(groups=32\)"):
        Pipeline(endless(), [], batch=4)  # type: ignore[arg-type]


@virtual
async def test_a_judge_is_opened_and_closed() -> None:
    from middleware import DynamicFilter

    calls: list[str] = []

    class Judge:
        async def __aenter__(self) -> None:
            calls.append("open")

        async def __aexit__(self, *error: object) -> None:
            calls.append("close")

        def __call__(self, group: Group) -> bool:
            return True

    await batches(Pipeline(endless(), [Generate(engine()), DynamicFilter(Judge())], BatchSpec(2)))
    assert calls == ["open", "close"]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_stage_that_exits_ends_the_program_after_shutting_down(tmp_path: Path, backend: str) -> None:
    """With threads in use: asyncio alone would let the exit out of the loop at once and wait for them for ever."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' * 8)
    program = f"""
import sys, anyio
from eventbus import BatchSpec, JsonlPrompts, Pipeline, Sample

class Part:
    level = "sample"
    def __enter__(self): pass
    def __exit__(self, *_): print("closed", flush=True)
    def __call__(self, sample: Sample) -> None: sys.exit(5)

async def main():
    async with Pipeline(JsonlPrompts("p.jsonl", 2), [Part()], BatchSpec(2)) as pipeline:
        await anext(pipeline.rollouts())

anyio.run(main, backend={backend!r})
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (5, "closed\n", "")


@virtual
@pytest.mark.parametrize("unit", ["stage", "prompts"])
async def test_a_full_observer_holds_up_stages_and_prompts_until_it_is_drained(unit: str) -> None:
    class Full(Log):
        full = False
        waits = 0

        def observe(self, event: Any) -> None:
            super().observe(event)
            self.full = True

        async def drained(self) -> None:
            Full.waits += 1
            await anyio.sleep(100)
            self.full = False

    began: list[float] = []

    def stage(sample: Sample) -> None:
        began.append(anyio.current_time())

    observer = Full("sample_generated" if unit == "stage" else "rollout_started")
    pipeline = Pipeline(endless(1), [Generate(engine(delay=1.0)), stage], BatchSpec(3), observers=[observer])
    async with pipeline:
        start = anyio.current_time()
        await anext(pipeline.rollouts())
    # What was at the engine goes on and is taken, full or not; what comes behind it waits.
    assert [time - start for time in began] == [101.0] * 3
    assert Full.waits == 1
    assert len(observer.events) == (3 if unit == "stage" else 1)


@virtual
async def test_a_stream_that_is_held_up_can_be_left() -> None:
    class Stuck(Log):
        full = True

        async def drained(self) -> None:
            await anyio.sleep_forever()

    start = anyio.current_time()
    with anyio.move_on_after(5) as scope:
        async with Pipeline(endless(1), [Generate(engine())], BatchSpec(2), observers=[Stuck()]) as pipeline:
            await anext(pipeline.rollouts())
    assert scope.cancelled_caught
    assert anyio.current_time() - start == 5


@pytest.mark.parametrize(
    "error", [RolloutExhausted("spent", Summary(3, kept=2)), Dropped(Drop("stale")), WorkerDied("gone")]
)
def test_errors_pass_between_processes(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


async def test_a_batch_passes_between_processes() -> None:
    """Its acknowledgement stays behind: that is the business of the process whose pipeline it came from."""
    (batch,) = await batches(Pipeline(endless(), [Generate(engine())], BatchSpec(1)))
    copy = pickle.loads(pickle.dumps(batch))
    assert copy == batch
    with pytest.raises(RuntimeError, match="did not come from a pipeline"):
        copy.trained()


@virtual
async def test_events_tell_time_by_the_loop_with_waits_and_attempts() -> None:
    asked: list[int | None] = []

    async def judge(sample: Sample) -> None:
        asked.append(sample.index)
        await anyio.sleep(2.0)
        if asked.count(0) == 1 and sample.index == 0:
            raise OSError("down")

    async def around(sample: Sample, call_next: CallNext) -> Sample:
        await anyio.sleep(0.5)
        return await call_next(sample)

    log = Log("stage_applied", "sample_generated", "group_ended")
    answering = engine(delay=lambda sample: 3.0 + 0.5 * (sample.index or 0))
    stages = [around, Generate(answering), limit(retry(judge, wait=1.0), 1)]
    await batches(Pipeline(endless(1), stages, BatchSpec(2), observers=[log]))
    assert [round(event.seconds, 3) for event in log.of("sample_generated")] == [3.0, 3.5]
    applied = {
        (event.stage, event.index): (round(event.seconds, 3), round(event.waited, 3), event.attempts)
        for event in log.of("stage_applied")
    }
    assert applied["judge", 0] == (5.0, 1.0, 2)
    assert applied["judge", 1] == (6.5, 4.5, 1)  # it waited for the other's two attempts
    assert applied["around", 0] == (8.5, 0.0, 1)
    times = [event.time_ns for event in log.events]
    assert times == sorted(times)
    assert round((times[-1] - times[0]) / 1e9, 3) == 7.0


@virtual
async def test_a_prompt_that_cannot_be_copied_fails_its_samples() -> None:
    class Unwilling(dict[str, int]):
        copies = 0

        def __copy__(self) -> Any:
            Unwilling.copies += 1
            if Unwilling.copies > 1:  # the first is the prompt source's own
                raise RuntimeError("one of a kind")
            return Unwilling(self)

    prompts = Prompts([Sample(prompt="a", metadata={"it": Unwilling()}), "b"], 2)
    async with Pipeline(prompts, [Generate(engine())], BatchSpec(1, max_rounds=2, over_sampling=1)) as pipeline:
        batch = await anext(pipeline.rollouts())
    assert [group.prompt for group in batch.groups] == ["b"]
    assert (batch.summary.failed, batch.summary.failed_samples) == (1, 1)
