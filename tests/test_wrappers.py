from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus.context import RolloutContext, _current, current_rollout
from eventbus.group import Batch, Group, Summary
from eventbus.sample import Sample
from eventbus.stage import CallNext, ContractError, DeclaredStage, Drop, Dropped, bind
from middleware import DynamicFilter, batch_stage, group_stage, in_thread, limit, retry, sample_stage, timeout

pytestmark = pytest.mark.anyio

WRAPPERS: dict[str, Callable[[Any], DeclaredStage]] = {
    "limit": partial(limit, n=2),
    "timeout": partial(timeout, seconds=5),
    "retry": partial(retry, wait=0),
    "in_thread": in_thread,
}
each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
each_copying_wrapper = pytest.mark.parametrize(
    "wrap", [WRAPPERS[name] for name in ("timeout", "retry", "in_thread")], ids=["timeout", "retry", "in_thread"]
)


def tag(sample: Sample, *, rollout_id: int) -> None:
    sample.metadata["rollout"] = rollout_id


async def passed_on(sample: Sample, call_next: CallNext) -> Sample:
    return await call_next(sample)


def group_of(size: int) -> Group:
    return Group(5, "p", [[Sample(index=i, tokens=[1, 2])] for i in range(size)])  # type: ignore[arg-type]


@contextmanager
def running(rollout_id: int) -> Iterator[RolloutContext]:
    context = RolloutContext(rollout_id)
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


# Declarations


def test_decorator_with_and_without_options() -> None:
    @sample_stage
    def plain(x: Any) -> None: ...

    @group_stage(name="mix", on_error="raise")
    def shuffle(x: Any) -> None: ...

    @batch_stage(external=True)
    def log(x: Any) -> None: ...

    @sample_stage(fans_out=True)
    def split(x: Any) -> Any: ...

    assert [(stage.name, stage.level) for stage in map(bind, (plain, shuffle, log, split))] == [
        ("plain", "sample"),
        ("mix", "group"),
        ("log", "batch"),
        ("split", "sample"),
    ]
    assert bind(shuffle).on_error == "raise"
    assert bind(log).external
    assert bind(split).fans_out


def test_declared_stage_is_called_like_its_function() -> None:
    sample = Sample()
    sample_stage(tag, name="other")(sample, rollout_id=3)
    assert sample.metadata == {"rollout": 3}


def test_outer_declaration_keeps_what_it_does_not_say() -> None:
    inner = sample_stage(tag, name="inner", external=True, on_error="resubmit")
    stage = bind(sample_stage(inner, on_error="raise"))
    assert (stage.name, stage.external, stage.on_error) == ("inner", True, "raise")


def test_declaring_a_class_asks_for_an_instance() -> None:
    class Judge:
        def __call__(self, sample: Sample) -> None: ...

    with pytest.raises(TypeError, match=r"made of an instance, not of the class: Judge\(\.\.\.\)"):
        sample_stage(Judge)


def test_declaring_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="a stage is a callable, got 3"):
        sample_stage(3)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="on_error='retry': choose 'fail', 'resubmit' or 'raise'"):
        sample_stage(on_error="retry")(tag)  # type: ignore[call-overload]


# What all wrappers keep


@each_wrapper
def test_a_wrapped_stage_binds_like_the_stage(wrap: Callable[[Any], DeclaredStage]) -> None:
    @sample_stage(name="judge", external=True, on_error="resubmit", fans_out=True)
    def stage(args: Any, s: Sample, *, rollout_id: int, evaluation: bool = False) -> Any: ...

    inner, outer = bind(stage), bind(wrap(stage))
    for field in ("name", "level", "external", "on_error", "fans_out", "wraps", "takes_args", "wants"):
        assert getattr(outer, field) == getattr(inner, field), field
    assert inspect.signature(wrap(stage)) == inspect.signature(stage)


@each_wrapper
async def test_every_shape_is_called_directly(wrap: Callable[[Any], DeclaredStage]) -> None:
    def slime(args: Any, sample: Sample, *, rollout_id: int = 0) -> Sample:
        sample.metadata["rollout"] = (args, rollout_id)
        return sample

    assert (await wrap(slime)("args", Sample(), rollout_id=1)).metadata == {"rollout": ("args", 1)}


@each_wrapper
async def test_dropping_and_fanning_out_pass_through(wrap: Callable[[Any], DeclaredStage]) -> None:
    def split(sample: Sample) -> list[Sample] | Drop:
        return [sample, sample.copy()] if sample.response else Drop("empty")

    assert await wrap(split)(Sample()) == Drop("empty")
    assert await wrap(split)(Sample(response="x")) == [Sample(response="x")] * 2


@each_wrapper
def test_a_filter_keeps_its_count(wrap: Callable[[Any], DeclaredStage]) -> None:
    stage = bind(wrap(DynamicFilter(lambda group: True)))
    assert (stage.name, stage.level, stage.counts) == ("DynamicFilter", "group", True)


@each_wrapper
def test_what_does_not_bind_is_refused_at_once(wrap: Callable[[Any], DeclaredStage]) -> None:
    with pytest.raises(ContractError, match="cannot tell whether 'x' is a sample"):
        wrap(lambda x: x)
    with pytest.raises(ContractError, match="is not callable: 3"):
        wrap(3)


@each_copying_wrapper
def test_call_next_is_refused_where_a_copy_is_made(wrap: Callable[[Any], DeclaredStage]) -> None:
    with pytest.raises(ContractError, match="passed_on has call_next"):
        wrap(passed_on)


@each_copying_wrapper
async def test_none_gives_the_changed_copy(wrap: Callable[[Any], DeclaredStage]) -> None:
    sample = Sample(index=1)
    result = await wrap(tag)(sample, rollout_id=2)
    assert result == Sample(index=1, metadata={"rollout": 2})
    assert sample.metadata == {}


@each_copying_wrapper
async def test_groups_and_batches_are_copied_with_their_samples(wrap: Callable[[Any], DeclaredStage]) -> None:
    def mark(group: Group) -> None:
        group.samples[0].reward = 1.0
        group.samples[0].tokens.append(3)

    def mark_all(batch: Batch) -> None:
        mark(batch.groups[0])

    group = group_of(2)
    assert (await wrap(mark)(group)).samples[0].tokens == [1, 2, 3]
    batch = Batch(1, [group], Summary(1))
    assert (await wrap(mark_all)(batch)).samples[0].reward == 1.0
    assert group == group_of(2)


@each_copying_wrapper
async def test_what_groups_and_batches_say_of_themselves_is_copied_too(wrap: Callable[[Any], DeclaredStage]) -> None:
    def rewrite(group: Group) -> None:
        assert isinstance(group.prompt, list)
        group.prompt[0]["content"] = "late"

    def count(batch: Batch) -> None:
        batch.summary.kept = 9
        batch.summary.dropped["late"] = 1

    group = Group(1, [{"content": "p"}], [[Sample()]])
    assert (await wrap(rewrite)(group)).prompt == [{"content": "late"}]
    assert group.prompt == [{"content": "p"}]
    batch = Batch(1, [group], Summary(1))
    assert (await wrap(count)(batch)).summary == Summary(1, kept=9, dropped={"late": 1})
    assert batch.summary == Summary(1)


@each_copying_wrapper
async def test_value_by_keyword_is_refused(wrap: Callable[[Any], DeclaredStage]) -> None:
    with pytest.raises(TypeError, match="tag: pass the sample as a positional argument"):
        await wrap(tag)(sample=Sample(), rollout_id=1)


# limit


@pytest.mark.virtual_time
async def test_limit_runs_n_at_once_in_the_order_of_asking() -> None:
    started: list[tuple[float, int]] = []

    async def judge(sample: Sample) -> None:
        assert sample.index is not None
        started.append((anyio.current_time() - zero, sample.index))
        await anyio.sleep(10 + sample.index)

    stage, zero = limit(judge, 2), anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for index in range(5):
            tasks.start_soon(stage, Sample(index=index))
            await anyio.wait_all_tasks_blocked()
    assert started == [(0, 0), (0, 1), (10, 2), (11, 3), (22, 4)]


def test_one_limit_serves_several_event_loops() -> None:
    async def judge(sample: Sample) -> None:
        await anyio.sleep(0)

    stage = limit(judge, 1)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(stage, Sample())

    for backend in ("asyncio", "trio", "asyncio"):
        anyio.run(main, backend=backend)


async def test_a_limit_in_two_threads_at_once_is_refused() -> None:
    release = anyio.Event()

    async def judge(sample: Sample) -> None:
        await release.wait()

    stage = limit(judge, 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stage, Sample())
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(ContractError, match=r"limit\(1\): 1 in use by a pipeline in another thread"):
            await anyio.to_thread.run_sync(anyio.run, stage, Sample())
        release.set()


async def test_limit_holds_all_that_comes_after_a_stage_with_call_next() -> None:
    inside = most = 0

    async def call_next(sample: Sample) -> Sample:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await anyio.lowlevel.checkpoint()
        inside -= 1
        return sample

    stage = limit(passed_on, 2)
    assert bind(stage).wraps
    async with anyio.create_task_group() as tasks:
        for _ in range(6):
            tasks.start_soon(stage, Sample(), call_next)
    assert most == 2


async def test_limit_says_what_is_waited_for() -> None:
    release = anyio.Event()

    async def judge(sample: Sample) -> None:
        await release.wait()

    stage = limit(judge, 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stage, Sample())
        await anyio.wait_all_tasks_blocked()
        with running(1) as context:
            tasks.start_soon(stage, Sample())
        await anyio.wait_all_tasks_blocked()
        assert context.holder == "limit(1): 1 in use"
        release.set()
    assert context.holder is None


async def test_an_error_gives_the_slot_back() -> None:
    def judge(sample: Sample) -> None:
        raise OSError("down")

    stage = limit(judge, 1)
    for _ in range(3):
        with pytest.raises(OSError, match="down"):
            await stage(Sample())


@given(
    n=st.integers(1, 3),
    tasks=st.integers(1, 8),
    cancelled=st.lists(st.lists(st.integers(0, 7), max_size=2), max_size=6),
)
async def test_cancellation_at_any_await_leaves_no_slot_taken(n: int, tasks: int, cancelled: list[list[int]]) -> None:
    async def judge(sample: Sample) -> None:
        for _ in range(2):
            await anyio.lowlevel.checkpoint()

    stage = limit(judge, n)
    scopes = [anyio.CancelScope() for _ in range(tasks)]

    async def call(scope: anyio.CancelScope) -> None:
        with scope:
            await stage(Sample())

    async with anyio.create_task_group() as group:
        for scope in scopes:
            group.start_soon(call, scope)
        for some in cancelled:
            await anyio.lowlevel.checkpoint()
            for which in some:
                scopes[which % tasks].cancel()
    slots = inspect.getclosurevars(stage.function).nonlocals["slots"]
    assert (slots._free, len(slots._waiting)) == (n, 0)


async def test_a_slot_handed_over_together_with_a_cancellation_goes_on() -> None:
    release = anyio.Event()

    async def judge(sample: Sample) -> None:
        await release.wait()

    stage = limit(judge, 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stage, Sample())
        await anyio.wait_all_tasks_blocked()
        scope = anyio.CancelScope()

        async def cancelled() -> None:
            with scope:
                await stage(Sample())

        tasks.start_soon(cancelled)
        await anyio.wait_all_tasks_blocked()
        slots = inspect.getclosurevars(stage.function).nonlocals["slots"]
        slots.release()  # hand the slot over ...
        scope.cancel()  # ... and cancel before the waiting task can run
        await anyio.wait_all_tasks_blocked()
        slots._free -= 1  # the first task still has its own
        release.set()
    assert slots._free == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: limit(tag, 0), "limit: n is 0, it must be at least 1"),
        (lambda: timeout(tag, 0), "timeout: seconds is 0, it must be more than 0"),
        (lambda: timeout(tag, float("nan")), "timeout: seconds is nan"),
        (lambda: retry(tag, attempts=0), "retry: attempts is 0, it must be at least 1"),
        (lambda: retry(tag, wait=-1), "retry: wait is -1, it must not be less than 0"),
        (lambda: retry(tag, wait=float("inf")), "retry: wait is inf, it must not be less than 0, nor without end"),
    ],
)
def test_limits_are_checked(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("number", [2.5, float("nan"), "3"])
def test_a_number_of_calls_is_whole(number: Any) -> None:
    with pytest.raises(TypeError, match=r"limit: n is .*, it must be a whole number"):
        limit(tag, number)
    with pytest.raises(TypeError, match=r"retry: attempts is .*, it must be a whole number"):
        retry(tag, attempts=number)


# timeout


@pytest.mark.virtual_time
async def test_timeout_names_stage_and_sample() -> None:
    async def judge(sample: Sample) -> None:
        sample.reward = 1.0
        await anyio.sleep_forever()

    sample = Sample(index=12)
    with pytest.raises(TimeoutError, match="judge took longer than 30 s on sample 12"):
        await timeout(judge, 30)(sample)
    assert anyio.current_time() == pytest.approx(30)
    assert sample.reward is None


@pytest.mark.virtual_time
async def test_timeout_counts_from_the_start_of_the_stage() -> None:
    async def judge(sample: Sample) -> None:
        await anyio.sleep(20)

    stage = limit(timeout(judge, 30), 1)
    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(stage, Sample())
    assert anyio.current_time() == pytest.approx(80)


@pytest.mark.virtual_time
async def test_a_time_out_of_the_stage_itself_keeps_its_own_words() -> None:
    async def judge(sample: Sample) -> None:
        raise TimeoutError("the server gave up")

    with pytest.raises(TimeoutError, match="the server gave up"):
        await timeout(judge, 30)(Sample())


async def test_a_plain_function_that_blocks_too_long_fails_with_advice() -> None:
    def judge(sample: Sample) -> None:
        end = anyio.current_time() + 0.002
        while anyio.current_time() < end:
            pass

    with pytest.raises(TimeoutError, match=r"blocked the event loop.* use timeout\(in_thread\(judge\), 0.001\)"):
        await timeout(judge, 0.001)(Sample())


async def test_cancellation_is_no_time_out() -> None:
    async def judge(sample: Sample) -> None:
        await anyio.sleep_forever()

    with anyio.CancelScope() as scope:
        scope.cancel()
        await timeout(judge, 30)(Sample())
    assert scope.cancelled_caught


# retry


class Flaky:
    """Fails `failures` times, after it has changed the sample."""

    def __init__(self, failures: int, error: type[Exception] = OSError) -> None:
        self.failures, self.error = failures, error
        self.calls = 0

    async def __call__(self, sample: Sample) -> None:
        self.calls += 1
        sample.response += "x"
        if self.calls <= self.failures:
            raise self.error(f"failure {self.calls}")


@pytest.mark.virtual_time
async def test_retry_starts_each_attempt_from_the_sample_as_it_came() -> None:
    flaky, sample = Flaky(2), Sample()
    assert (await retry(flaky)(sample)).response == "x"
    assert (flaky.calls, sample.response) == (3, "")
    assert anyio.current_time() == pytest.approx(0.1 + 0.2)


@pytest.mark.virtual_time
async def test_the_last_error_goes_on_and_tells_of_the_earlier_ones() -> None:
    with pytest.raises(OSError, match="failure 3") as caught:
        await retry(Flaky(5))(Sample())
    assert caught.value.__notes__ == [
        "retry: the last of 3 attempts; before it: OSError: failure 1; OSError: failure 2"
    ]


async def test_any_number_of_attempts_can_be_made() -> None:
    flaky = Flaky(1100)  # 2 ** 1100 is beyond any float
    await retry(flaky, attempts=1200, wait=0.0)(Sample())
    assert flaky.calls == 1101


async def test_one_attempt_is_no_retry() -> None:
    flaky = Flaky(1)
    with pytest.raises(OSError, match="failure 1") as caught:
        await retry(flaky, attempts=1)(Sample())
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("error", [ContractError, ValueError])
async def test_other_errors_are_not_retried(error: type[Exception]) -> None:
    flaky = Flaky(1, error)
    with pytest.raises(error, match="failure 1"):
        await retry(flaky, on=OSError)(Sample())
    assert flaky.calls == 1


async def test_a_dropped_sample_is_not_retried() -> None:
    calls = 0

    async def stage(sample: Sample) -> None:
        nonlocal calls
        calls += 1
        raise Dropped(Drop("gone"))

    with pytest.raises(Dropped, match="gone"):
        await retry(stage, on=(Exception,))(Sample())
    assert calls == 1


@pytest.mark.virtual_time
async def test_cancellation_is_not_retried() -> None:
    calls = 0

    async def stage(sample: Sample) -> None:
        nonlocal calls
        calls += 1
        await anyio.sleep_forever()

    with anyio.move_on_after(1) as scope:
        await retry(stage)(Sample())
    assert scope.cancelled_caught
    assert calls == 1


@pytest.mark.virtual_time
async def test_a_time_out_is_retried() -> None:
    async def stage(sample: Sample) -> None:
        await anyio.sleep_forever()

    with pytest.raises(TimeoutError):
        await retry(timeout(stage, 1), wait=0)(Sample())
    assert anyio.current_time() == pytest.approx(3)


@pytest.mark.parametrize("on", [(BaseException,), ("OSError",), KeyboardInterrupt])
def test_only_exceptions_can_be_retried(on: Any) -> None:
    with pytest.raises(TypeError, match="on takes subclasses of Exception"):
        retry(tag, on=on)


# in_thread


async def test_a_thread_sees_the_running_rollout() -> None:
    def where(sample: Sample) -> None:
        sample.metadata = {"rollout": current_rollout().rollout_id, "thread": threading.get_ident()}

    with running(7) as context:
        result = await in_thread(where)(Sample())
    assert result.metadata["rollout"] == 7
    assert result.metadata["thread"] != threading.get_ident()
    assert context.holder is None


@pytest.mark.parametrize(
    "stage",
    [Flaky(0), partial(Flaky.__call__, Flaky(0)), limit(tag, 1), sample_stage(Flaky(0))],
    ids=["object", "partial", "wrapped", "declared"],
)
def test_in_thread_refuses_async(stage: Any) -> None:
    with pytest.raises(ContractError, match=r"in_thread: .* is async; a thread is for plain functions"):
        in_thread(stage)


async def test_in_thread_refuses_an_awaitable_result() -> None:
    def stage(sample: Sample) -> Any:
        return Flaky(0)(sample)

    with pytest.raises(ContractError, match="stage returned an awaitable"):
        await in_thread(stage)(Sample())


async def test_an_abandoned_thread_never_touches_the_sample() -> None:
    entered, leave, left = threading.Event(), threading.Event(), threading.Event()

    def stuck(sample: Sample) -> None:
        entered.set()
        leave.wait()
        sample.reward = 1.0
        sample.metadata["late"] = True
        left.set()

    sample = Sample()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(in_thread(stuck), sample)
        while not entered.is_set():
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    leave.set()
    assert left.wait(10)
    assert sample == Sample()


async def test_a_thread_is_given_up_on_a_time_out() -> None:
    leave = threading.Event()

    def stuck(sample: Sample) -> None:
        leave.wait()

    try:
        with pytest.raises(TimeoutError, match=r"stuck took longer than 0\.01 s on sample 4"):
            await timeout(in_thread(stuck), 0.01)(Sample(index=4))
    finally:
        leave.set()
