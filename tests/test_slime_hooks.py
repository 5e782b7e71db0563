"""slime's contract for per-sample hooks, by the facts; the hooks are those of `slime_standin/user_plugins.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from backends.slime import SlimeSample, apply_rollout_sample_hooks, rollout_context, set_current_rollout_id
from backends.slime.samples import sample_type
from eventbus.context import RolloutContext, _current
from eventbus.sample import Sample
from eventbus.stage import ContractError
from tests.slime_runs import slime_importable, slime_missing


@pytest.fixture(autouse=True)
def user() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, slime_importable(patch) as plugins:
        yield plugins
    set_current_rollout_id(None)


def args_with(*hooks: str, **options: Any) -> SimpleNamespace:
    paths = [hook if "." in hook else f"user_plugins.{hook}" for hook in hooks]
    return SimpleNamespace(rollout_sample_hook_path=paths, marker="seen", **options)


def run(args: Any, value: Any, **kwargs: Any) -> Any:
    return asyncio.run(apply_rollout_sample_hooks(args, value, **kwargs))


def new(index: int = 0) -> Any:
    return sample_type()(index=index)


# The contract


def test_nested_lists_keep_their_shape_and_hooks_get_what_they_name() -> None:
    value = [[new(0)], [new(1), [new(2)]], []]
    set_current_rollout_id(7)
    result = run(args_with("tag", "judge"), value, evaluation=True, ignored="value")
    assert result is not value
    assert result[1] is not value[1]
    assert [result[0][0].index, result[1][0].index, result[1][1][0].index, result[2]] == [0, 1, 2, []]
    for sample in (result[0][0], result[1][0], result[1][1][0]):
        assert sample.metadata == {"tag": ("seen", 7)}
        assert sample.seen_in_evaluation is True


def test_a_hook_that_returns_none_keeps_the_sample() -> None:
    sample = new()
    assert run(args_with("tag"), sample) is sample


def test_a_hook_may_return_another_sample_which_goes_on() -> None:
    sample = new()
    result = run(args_with("replace", "tag"), sample, more=1)
    assert result is not sample
    assert result.train_metadata == {"keywords": ["more", "rollout_id"]}
    assert result.metadata == {"tag": ("seen", None)}


def test_hooks_with_any_keywords_get_all_of_them(user: Any) -> None:
    user.SEEN.clear()
    run(args_with("replace"), new(), evaluation=False, rollout_id=3, ignored="value")
    assert user.SEEN == [{"evaluation": False, "rollout_id": 3, "ignored": "value"}]


@pytest.mark.parametrize("args", [args_with(), SimpleNamespace(rollout_sample_hook_path=None), SimpleNamespace()])
def test_without_hooks_the_value_itself_comes_back(args: Any) -> None:
    for value in (new(), [new()], "anything"):
        assert run(args, value) is value


def test_a_hook_that_returns_something_else_is_named() -> None:
    with pytest.raises(TypeError, match=r"user_plugins.wrong.*returned dict, expected Sample or None"):
        run(args_with("wrong"), new())
    with pytest.raises(ContractError, match="expected Sample or None"):  # by itself, though it is one of several
        run(args_with("wrong"), [[new()], [new()]][:1])


@pytest.mark.parametrize("leaf", [None, {"index": 1}, (1,), "text"])
def test_a_foreign_leaf_is_refused(leaf: Any) -> None:
    with pytest.raises(TypeError, match=f"expected Sample or list, got {type(leaf).__name__}"):
        run(args_with("tag"), [new(), leaf])


def test_the_rollout_is_the_one_that_was_set_last_unless_given() -> None:
    set_current_rollout_id(7)
    assert run(args_with("tag"), new(), rollout_id=3).metadata == {"tag": ("seen", 3)}
    assert run(args_with("tag"), new(), rollout_id=None).metadata == {"tag": ("seen", None)}
    set_current_rollout_id(8)
    assert run(args_with("tag"), new()).metadata == {"tag": ("seen", 8)}


def test_what_is_set_in_one_thread_is_seen_in_another() -> None:
    async def set_elsewhere() -> Any:
        await anyio.to_thread.run_sync(set_current_rollout_id, 7)
        return await apply_rollout_sample_hooks(args_with("tag"), new())

    assert asyncio.run(set_elsewhere()).metadata == {"tag": ("seen", 7)}


def test_a_hook_is_loaded_once_per_path(user: Any) -> None:
    user.counting.calls = 0
    run(args_with("counting"), [new(), new()])
    run(args_with("counting"), new())
    assert user.counting.calls == 3


def test_hooks_whose_parameters_go_by_position() -> None:
    sample = run(args_with("by_position", "optional_by_position", "named_otherwise"), new(), rollout_id=5)
    assert sample.metadata == {"by_position": True, "optional": None, "named": (5, None)}


def test_what_a_hook_raises_comes_out_as_itself() -> None:
    with pytest.raises(OSError, match="the judge is gone"):
        run(args_with("failing", fails_at=1), [new(0), [new(1)]])


def test_a_path_that_leads_nowhere_is_an_error() -> None:
    with pytest.raises(ImportError, match="did you mean 'judge'"):
        run(args_with("user_plugins.juge"), new())


# Better


def test_samples_whose_hooks_wait_go_on_side_by_side() -> None:
    waiting: list[int] = []

    async def all_wait() -> Any:
        return await apply_rollout_sample_hooks(args_with("tests.test_slime_hooks.together"), value, waiting=waiting)

    value = [[new(0), new(1)], [new(2)]]
    result = asyncio.run(all_wait())
    assert [[sample.index for sample in group] for group in result] == [[0, 1], [2]]
    assert sorted(waiting) == [0, 1, 2]


async def together(args: Any, sample: Any, *, waiting: list[int]) -> None:
    """Returns when three are here."""
    waiting.append(sample.index)
    while len(waiting) < 3:
        await asyncio.sleep(0)


def test_a_sample_of_a_pipeline_sees_the_rollout_for_which_it_was_submitted() -> None:
    set_current_rollout_id(8)
    token = _current.set(RolloutContext(7))
    try:
        assert run(args_with("tag"), new()).metadata == {"tag": ("seen", 7)}
    finally:
        _current.reset(token)


def test_tasks_begun_in_a_rollout_context_keep_it() -> None:
    set_current_rollout_id(8)

    async def rollout(number: int) -> Any:
        with rollout_context(number):
            await asyncio.sleep(0)
            return (await apply_rollout_sample_hooks(args_with("tag"), new())).metadata["tag"][1]

    async def both() -> Any:
        return await asyncio.gather(rollout(10), rollout(11))

    assert asyncio.run(both()) == [10, 11]
    assert run(args_with("tag"), new()).metadata == {"tag": ("seen", 8)}


def test_our_samples_and_the_stand_ins_are_samples_too() -> None:
    with pytest.MonkeyPatch.context() as patch, slime_missing(patch):
        for sample in (Sample(index=1), SlimeSample(index=1)):
            assert run(args_with("tag"), [sample])[0].metadata == {"tag": ("seen", None)}
