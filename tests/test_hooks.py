from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import Mock

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus.context import RolloutContext, _current
from eventbus.sample import Sample
from eventbus.stage import ContractError
from middleware import apply_sample_hooks, hooks
from middleware.hooks import Hook

pytestmark = pytest.mark.anyio

SEEN: list[int | None] = []


def by_path(args: Any, sample: Sample, *, rollout_id: int | None = None) -> None:
    SEEN.append(rollout_id)


@contextmanager
def running(rollout_id: int, evaluation: bool = False) -> Iterator[None]:
    token = _current.set(RolloutContext(rollout_id, evaluation))
    try:
        yield
    finally:
        _current.reset(token)


def marked(sample: Sample) -> list[Any]:
    marks: list[Any] = sample.metadata.setdefault("marks", [])
    return marks


# The value


@pytest.mark.parametrize("hooks", [None, []])
async def test_no_hooks_give_the_value_itself(hooks: list[Hook] | None) -> None:
    value = [Sample(), [Sample()]]
    assert await apply_sample_hooks(hooks, value) is value
    assert await apply_sample_hooks(hooks, marker := "anything") is marker


async def test_nested_shape_is_kept_in_a_new_list() -> None:
    a, b, c = Sample(index=0), Sample(index=1), Sample(index=2)
    value = [a, [b, [c]], []]
    result = await apply_sample_hooks([lambda sample: None], value)
    assert result == [a, [b, [c]], []]
    assert result is not value
    assert result[1] is not value[1]
    assert result[1][1][0] is c


async def test_single_sample_gives_a_sample() -> None:
    other = Sample(index=9)
    assert await apply_sample_hooks([lambda sample: other], Sample()) is other


@pytest.mark.parametrize("leaf", [None, {"index": 1}, (Sample(),), "text"])
async def test_foreign_leaf_is_refused_before_any_hook_runs(leaf: Any) -> None:
    called: list[Sample] = []
    with pytest.raises(TypeError, match=f"nested lists of them, got {type(leaf).__name__}"):
        await apply_sample_hooks([called.append], [Sample(), leaf])
    assert called == []


def shapes() -> st.SearchStrategy[Any]:
    return st.recursive(st.builds(Sample), lambda children: st.lists(children, max_size=4), max_leaves=12)


def outline(value: Any) -> Any:
    return [outline(item) for item in value] if isinstance(value, list) else "sample"


def leaves(value: Any) -> list[Sample]:
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list) else [value]


@given(value=shapes(), is_async=st.lists(st.booleans(), min_size=1, max_size=3), returns=st.booleans())
async def test_any_shape_is_kept_and_every_hook_runs_once_in_order(
    value: Any, is_async: list[bool], returns: bool
) -> None:
    def hook(number: int, sample: Sample) -> Sample | None:
        marked(sample).append(number)
        return sample if returns else None

    async def async_hook(number: int, sample: Sample) -> Sample | None:
        await anyio.lowlevel.checkpoint()
        return hook(number, sample)

    chosen = [partial(async_hook if later else hook, number) for number, later in enumerate(is_async)]
    result = await apply_sample_hooks(chosen, value)
    assert outline(result) == outline(value)
    assert [id(leaf) for leaf in leaves(result)] == [id(leaf) for leaf in leaves(value)]
    assert all(marked(leaf) == list(range(len(is_async))) for leaf in leaves(result))


# What a hook gets


def keyword_only(args: Any, sample: Sample, *, rollout_id: Any, evaluation: Any) -> None:
    marked(sample).append((args, rollout_id, evaluation))


def positional(args: Any, sample: Sample, rollout_id: Any = 0, evaluation: Any = 0) -> None:
    marked(sample).append((args, rollout_id, evaluation))


def catch_all(args: Any, sample: Sample, **keywords: Any) -> None:
    marked(sample).append((args, keywords["rollout_id"], keywords["evaluation"]))


def sample_alone(sample: Sample, *, rollout_id: Any, evaluation: Any, args: Any) -> None:
    marked(sample).append((args, rollout_id, evaluation))


def anything(*positional: Any, **keywords: Any) -> None:
    args, sample = positional
    catch_all(args, sample, **keywords)


class Method:
    def method(self, args: Any, sample: Sample, *, rollout_id: Any, evaluation: Any) -> None:
        keyword_only(args, sample, rollout_id=rollout_id, evaluation=evaluation)

    __call__ = method


def sample_by_default(args: Any = None, sample: Any = None, *, rollout_id: Any, evaluation: Any) -> None:
    marked(sample).append((args, rollout_id, evaluation))


def anything_after_args(args: Any, *positional: Any, **keywords: Any) -> None:
    catch_all(args, *positional, **keywords)


def sample_by_another_name(state: Sample, args: Any, rollout_id: Any, evaluation: Any) -> None:
    marked(state).append((args, rollout_id, evaluation))


@pytest.mark.parametrize(
    "hook",
    [
        keyword_only,
        positional,
        catch_all,
        sample_alone,
        anything,
        sample_by_default,
        anything_after_args,
        sample_by_another_name,
        Method(),
        Method().method,
    ],
    ids=repr,
)
async def test_hook_shapes(hook: Callable[..., Any]) -> None:
    sample = Sample()
    for _ in range(2):
        await apply_sample_hooks([hook], sample, args="args", rollout_id=3, evaluation=True)
    assert marked(sample) == [("args", 3, True)] * 2


async def test_only_named_keywords_are_passed() -> None:
    def picky(args: Any, sample: Sample, *, extra: str) -> None:
        marked(sample).append(extra)

    sample = await apply_sample_hooks([picky], Sample(), rollout_id=1, extra="x", unused="y")
    assert marked(sample) == ["x"]


async def test_parameter_with_a_default_is_left_alone() -> None:
    def tuned(sample: Sample, strength: float = 0.5) -> None:
        sample.reward = strength

    assert (await apply_sample_hooks([tuned], Sample(), args="args")).reward == 0.5


async def test_mock_is_called_as_a_hook_of_slime() -> None:
    hook = Mock(return_value=None)
    sample = Sample()
    await apply_sample_hooks([hook], sample, args="args", rollout_id=5)
    hook.assert_called_once_with("args", sample, rollout_id=5, evaluation=False)


async def test_context_defaults_to_the_running_rollout() -> None:
    sample = Sample()
    with running(7, evaluation=True):
        await apply_sample_hooks([keyword_only], sample)
        await apply_sample_hooks([keyword_only], sample, rollout_id=8)
    await apply_sample_hooks([keyword_only], sample)
    assert marked(sample) == [(None, 7, True), (None, 8, True), (None, None, False)]


async def test_hook_by_import_path() -> None:
    SEEN.clear()
    await apply_sample_hooks([f"{__name__}:by_path", f"{__name__}.by_path"], Sample(), rollout_id=4)
    assert SEEN == [4, 4]


async def test_missing_import_path_is_an_error() -> None:
    with pytest.raises(ImportError, match="no_such_hook"):
        await apply_sample_hooks([f"{__name__}:no_such_hook"], Sample())


async def test_string_instead_of_a_list_is_refused() -> None:
    with pytest.raises(TypeError, match=r"hooks is a list .* write \['a:b'\]"):
        await apply_sample_hooks("a:b", Sample())


async def test_a_hook_instead_of_a_list_is_refused() -> None:
    with pytest.raises(TypeError, match=r"hooks is a list .* write \[.*keyword_only\]"):
        await apply_sample_hooks(keyword_only, Sample())  # type: ignore[arg-type]


async def test_hooks_may_come_out_of_an_iterator() -> None:
    with pytest.raises(ContractError, match="return_later returned dict for sample 3"):
        await apply_sample_hooks(iter([return_later]), Sample(index=3))
    value = [Sample()]
    assert await apply_sample_hooks(iter([]), value) is value


async def test_a_keyword_that_nothing_provides_is_named_before_any_hook_runs() -> None:
    def needy(args: Any, sample: Sample, *, strength: float) -> None: ...

    called: list[Sample] = []
    with pytest.raises(TypeError, match=r"needy needs the keyword 'strength', there are evaluation, more, rollout_id"):
        await apply_sample_hooks([called.append, needy], Sample(), more=1)
    assert called == []


async def test_a_keyword_that_is_passed_by_position_only_is_named() -> None:
    def closed(args: Any, sample: Sample, rollout_id: Any, /) -> None: ...

    with pytest.raises(TypeError, match=r"closed: 'rollout_id' is passed by keyword, move it behind the '/'"):
        await apply_sample_hooks([closed], Sample())


async def test_context_never_takes_the_place_of_the_sample() -> None:
    sample = Sample()
    await apply_sample_hooks([catch_all], sample, rollout_id=1, evaluation=True, sample="other")
    assert marked(sample) == [(None, 1, True)]


async def test_hook_that_is_not_callable() -> None:
    with pytest.raises(TypeError, match="hook int is not callable: 3"):
        await apply_sample_hooks([3], Sample())  # type: ignore[list-item]


async def test_hook_without_a_sample_parameter() -> None:
    with pytest.raises(TypeError, match="takes no positional parameter for the sample"):
        await apply_sample_hooks([lambda *, rollout_id: None], Sample())


async def test_signature_is_read_once_and_forgotten_with_the_hook() -> None:
    gc.collect()
    before = len(hooks._signatures)

    def hook(sample: Sample) -> None: ...

    await apply_sample_hooks([hook], [Sample(), Sample()])
    await apply_sample_hooks([hook], Sample())
    assert len(hooks._signatures) == before + 1
    del hook
    gc.collect()
    assert len(hooks._signatures) == before


# What a hook returns


async def return_later(sample: Sample) -> Any:
    return {"reward": 1}


@pytest.mark.parametrize("hook", [lambda sample: {"reward": 1}, return_later, f"{__name__}:return_later"])
async def test_foreign_return_names_hook_and_sample(hook: Hook) -> None:
    name = hook if isinstance(hook, str) else hook.__qualname__
    with pytest.raises(ContractError) as caught:
        await apply_sample_hooks([hook], [Sample(index=3)])
    assert name in str(caught.value)
    assert "returned dict for sample 3, expected Sample or None" in str(caught.value)


async def test_replaced_sample_reaches_the_next_hook_and_keeps_its_place() -> None:
    async def replace(sample: Sample) -> Sample:
        return Sample(index=sample.index, response="new")

    def upper(sample: Sample) -> None:
        sample.response = sample.response.upper()

    result = await apply_sample_hooks([replace, upper], [Sample(index=0), Sample(index=1)])
    assert [(sample.index, sample.response) for sample in result] == [(0, "NEW"), (1, "NEW")]


async def test_sync_callable_that_returns_an_awaitable_is_awaited() -> None:
    async def score(sample: Sample) -> None:
        sample.reward = 1.0

    assert (await apply_sample_hooks([lambda sample: score(sample)], Sample())).reward == 1.0


# Async hooks


@pytest.mark.virtual_time
async def test_siblings_overlap_and_keep_their_order() -> None:
    async def slow(sample: Sample) -> None:
        await anyio.sleep(0.05 - 0.001 * (sample.index or 0))

    siblings = [Sample(index=i) for i in range(8)]
    started = anyio.current_time()
    result = await apply_sample_hooks([slow], siblings)
    assert anyio.current_time() - started < 0.1
    assert [sample.index for sample in result] == list(range(8))


@pytest.mark.virtual_time
async def test_the_running_rollout_is_seen_in_every_task() -> None:
    async def late(args: Any, sample: Sample, *, rollout_id: int) -> None:
        await anyio.sleep(1)
        assert _current.get().rollout_id == rollout_id == 7

    with running(7):
        await apply_sample_hooks([late], [Sample(), Sample()])


@pytest.mark.virtual_time
async def test_error_of_one_sibling_comes_out_as_itself_and_ends_the_others() -> None:
    ended: list[int | None] = []

    async def judge(sample: Sample) -> None:
        if sample.index == 1:
            raise ValueError("no score") from OSError("down")
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(sample.index)

    with pytest.raises(ValueError, match="no score") as caught:
        await apply_sample_hooks([judge], [Sample(index=i) for i in range(3)])
    assert isinstance(caught.value.__cause__, OSError)
    assert sorted(filter(None, ended)) == [2]


async def test_errors_of_several_siblings_come_out_together() -> None:
    async def judge(sample: Sample) -> None:
        try:
            await anyio.sleep_forever() if sample.index else None
        finally:
            raise ValueError(f"sample {sample.index}")

    with pytest.raises(ExceptionGroup) as caught:
        await apply_sample_hooks([judge], [Sample(index=0), Sample(index=1)])
    assert sorted(map(str, caught.value.exceptions)) == ["sample 0", "sample 1"]


async def test_sync_error_leaves_no_coroutine_behind() -> None:
    async def first(sample: Sample) -> None: ...

    def mixed(sample: Sample) -> Any:
        if sample.index == 2:
            raise RuntimeError("bad sample")
        return first(sample)

    with pytest.raises(RuntimeError, match="bad sample"):
        await apply_sample_hooks([mixed], [Sample(index=i) for i in range(3)])
    gc.collect()  # a coroutine that was never awaited would warn here


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_sync_error_leaves_no_task_behind() -> None:
    tasks: list[asyncio.Task[None]] = []

    def mixed(sample: Sample) -> Any:
        if sample.index == 1:
            raise RuntimeError("bad sample")
        tasks.append(asyncio.ensure_future(asyncio.sleep(3600)))
        return tasks[-1]

    with pytest.raises(RuntimeError, match="bad sample"):
        await apply_sample_hooks([mixed], [Sample(index=0), Sample(index=1)])
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]


async def test_cancellation_reaches_the_hooks() -> None:
    ended: list[int | None] = []

    async def forever(sample: Sample) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(sample.index)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(apply_sample_hooks, [forever], [Sample(index=0), Sample(index=1)])
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert sorted(index for index in ended if index is not None) == [0, 1]


def test_without_async_hooks_no_event_loop_is_needed() -> None:
    waiting = apply_sample_hooks([lambda sample: None], [Sample()])
    with pytest.raises(StopIteration):
        waiting.send(None)
