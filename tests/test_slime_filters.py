from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backends.slime import (
    DynamicFilterOutput,
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
    oldest_first,
)
from backends.slime.filters import decision
from backends.slime.samples import sample_type
from middleware import FilterDecision
from tests.slime_runs import slime_importable, slime_missing

NO_KEY = SimpleNamespace(reward_key=None)


@pytest.fixture(autouse=True)
def _slime() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, slime_importable(patch):
        yield


def rewarded(*rewards: Any) -> list[Any]:
    return [sample_type()(index=index, reward=reward) for index, reward in enumerate(rewards)]


def test_a_group_whose_rewards_differ_is_kept() -> None:
    output = check_reward_nonzero_std(NO_KEY, rewarded(0.0, 1.0), evaluation=False)
    assert (output.keep, output.reason, output.keep_when_insufficient) == (True, None, False)


def test_equal_rewards_are_rejected_with_the_first_as_reason() -> None:
    output = check_reward_nonzero_std(NO_KEY, rewarded(0.25, 0.25))
    assert (output.keep, output.reason) == (False, "zero_std_0.2")


def test_the_fallback_keeps_when_insufficient() -> None:
    output = check_reward_nonzero_std_with_fallback(NO_KEY, rewarded(1.0, 1.0))
    assert (output.keep, output.keep_when_insufficient) == (False, True)


def test_the_reward_key_names_a_field() -> None:
    group = rewarded({"score": 1.0, "length": 3}, {"score": 1.0, "length": 4})
    assert not check_reward_nonzero_std(SimpleNamespace(reward_key="score"), group).keep
    assert check_reward_nonzero_std(SimpleNamespace(reward_key="length"), group).keep
    with pytest.raises(TypeError, match="say which one counts"):
        check_reward_nonzero_std(NO_KEY, group)


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [((1.0,), "group_size_1"), ((1.0, math.nan), "bad_reward"), ((None, 1.0), "bad_reward")],
)
def test_where_there_is_no_deviation_the_verdict_is_plain(rewards: Any, reason: str) -> None:
    output = check_reward_nonzero_std(NO_KEY, rewarded(*rewards))
    assert output.keep is False
    assert output.reason == reason


def test_rewards_of_any_number_type() -> None:
    output = check_reward_nonzero_std(NO_KEY, rewarded(True, np.float32(1.0), 1))
    assert output.keep is False
    assert output.reason == "zero_std_1.0"


def test_a_fanned_out_execution_counts_once() -> None:
    first, second = rewarded(0.0, 1.0)
    assert check_reward_nonzero_std(NO_KEY, [[first, first], [second]]).keep
    assert check_reward_nonzero_std(NO_KEY, [[first, second]]).reason == "group_size_1"


def test_slime_gets_its_own_type() -> None:
    theirs = import_module("slime.rollout.filter_hub.base_types").DynamicFilterOutput
    assert type(check_reward_nonzero_std(NO_KEY, rewarded(0.0, 1.0))) is theirs


def test_without_slime_it_is_one_of_the_same_shape() -> None:
    with pytest.MonkeyPatch.context() as patch, slime_missing(patch):
        output = check_reward_nonzero_std_with_fallback(NO_KEY, rewarded(1.0, 1.0))
    assert output == DynamicFilterOutput(False, "zero_std_1.0", True)


def test_verdicts_of_filters_written_for_slime() -> None:
    assert decision(DynamicFilterOutput(False, "short", True)) == FilterDecision(False, "short", True)
    assert decision(SimpleNamespace(keep=True, reason=None)) == FilterDecision(True)  # an older slime's
    assert decision(True) is True


def test_the_buffer_gives_the_oldest_first() -> None:
    def group(began: int | None) -> list[Any]:
        kind = sample_type()
        return [kind(metadata={} if began is None else {"start_rollout_id": began}), [kind()]]

    fresh, late, early, late_too = group(None), group(4), group(2), group(4)
    buffer = [fresh, late, early, late_too]
    assert oldest_first(NO_KEY, None, buffer, 2) == [early, late]
    assert buffer == [late_too, fresh]
    assert oldest_first(NO_KEY, None, buffer, 9) == [late_too, fresh]
    assert buffer == []
