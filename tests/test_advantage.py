from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus.group import Group
from eventbus.sample import Sample
from eventbus.stage import bind
from middleware import GroupAdvantage


def advantages(stage: GroupAdvantage, *rewards: Any) -> list[float]:
    group = Group(3, "p", [[Sample(index=i, reward=reward)] for i, reward in enumerate(rewards)])
    stage(group)
    return [(sample.train_metadata or {})["advantage"] for sample in group.samples]


def test_it_binds_as_a_group_stage() -> None:
    stage = bind(GroupAdvantage())
    assert (stage.name, stage.level, stage.counts) == ("GroupAdvantage", "group", False)


def test_grpo_uses_the_unbiased_deviation() -> None:
    assert advantages(GroupAdvantage(eps=0), 0, 1) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


def test_dr_grpo_only_centres() -> None:
    assert advantages(GroupAdvantage(std=False), 0, 0, 3) == [-1, -1, 2]


def test_leave_one_out_compares_with_the_others() -> None:
    assert advantages(GroupAdvantage(std=False, leave_one_out=True), 0, 0, 3) == [-1.5, -1.5, 3]


@pytest.mark.parametrize("stage", [GroupAdvantage(), GroupAdvantage(eps=0), GroupAdvantage(leave_one_out=True)])
@pytest.mark.parametrize("rewards", [[0.1] * 7, [1e12 + 0.1] * 3, [5]])
def test_equal_rewards_and_one_alone_give_exactly_zero(stage: GroupAdvantage, rewards: list[float]) -> None:
    assert advantages(stage, *rewards) == [0.0] * len(rewards)


def test_siblings_count_once_and_share_the_advantage() -> None:
    early, last, other = Sample(), Sample(reward=1.0), Sample(reward=0.0, train_metadata={"kept": 1})
    GroupAdvantage(std=False)(Group(1, "p", [[early, last], [other]]))
    assert early.train_metadata == last.train_metadata == {"advantage": 0.5}
    assert other.train_metadata == {"kept": 1, "advantage": -0.5}


def test_siblings_do_not_share_their_dict() -> None:
    a, b = Sample(), Sample(reward=1.0)
    GroupAdvantage()(Group(1, "p", [[a, b]]))
    assert a.train_metadata is not b.train_metadata


def test_a_key_picks_from_dict_rewards() -> None:
    stage = GroupAdvantage(std=False, key="acc")
    assert advantages(stage, {"acc": 0, "x": 9}, {"acc": np.float32(1), "x": 9}) == [-0.5, 0.5]
    with pytest.raises(TypeError, match=r"sample 0: the reward is a dict .* rewards\(key=\.\.\.\)"):
        advantages(GroupAdvantage(), {"acc": 0}, {"acc": 1})


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_a_missing_reward_names_group_and_sample(reward: Any) -> None:
    with pytest.raises(ValueError, match=f"group 3, sample 1: the reward is {reward!r}; an advantage needs finite"):
        advantages(GroupAdvantage(), 0.0, reward)


@pytest.mark.parametrize("rewards", [(1.7e308, -1.7e308), (5e-324, 0.0), (0.0, 1e-310), (1e-200, 3e-200)])
def test_the_size_of_the_rewards_does_not_matter(rewards: tuple[float, float]) -> None:
    sign = 1 if rewards[0] > rewards[1] else -1
    assert advantages(GroupAdvantage(eps=0), *rewards) == pytest.approx([sign * 0.5**0.5, -sign * 0.5**0.5])


def test_one_tiny_reward_among_zeros_divides_by_no_zero() -> None:
    rewards = [0.0] * 7 + [5e-324]
    assert advantages(GroupAdvantage(eps=0), *rewards) == pytest.approx(advantages(GroupAdvantage(eps=0), *[0] * 7, 1))
    assert advantages(GroupAdvantage(), *rewards) == pytest.approx([0] * 8)


def test_rewards_too_far_apart_name_the_group() -> None:
    assert advantages(GroupAdvantage(std=False), 1.7e308, -1.7e308) == [1.7e308, -1.7e308]
    with pytest.raises(ValueError, match=r"group 3: the rewards, from -1.7e\+308 to 1.7e\+308, lie so far apart"):
        advantages(GroupAdvantage(std=False, leave_one_out=True), 1.7e308, -1.7e308)


def test_an_empty_group_is_named() -> None:
    with pytest.raises(ValueError, match="group 3 has no executions"):
        GroupAdvantage()(Group(3, "p", []))
    with pytest.raises(ValueError, match="group 3 has an execution without samples"):
        GroupAdvantage()(Group(3, "p", [[Sample(reward=1)], []]))


def test_eps_is_checked() -> None:
    with pytest.raises(ValueError, match="eps is -1, it must not be less than 0"):
        GroupAdvantage(eps=-1)


@given(
    rewards=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=16),
    std=st.booleans(),
    leave_one_out=st.booleans(),
)
def test_advantages_are_plain_finite_floats_around_zero_in_the_order_of_the_rewards(
    rewards: list[float], std: bool, leave_one_out: bool
) -> None:
    values = advantages(GroupAdvantage(std=std, leave_one_out=leave_one_out), *map(np.float64, rewards))
    assert all(type(value) is float and math.isfinite(value) for value in values)
    assert sum(values) == pytest.approx(0, abs=1e-6)
    ranked = [value for _, value in sorted(zip(rewards, values, strict=True))]
    assert all(low <= high + 1e-9 for low, high in pairwise(ranked))


@given(rewards=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=16))
def test_grpo_is_the_textbook_formula(rewards: list[float]) -> None:
    array = np.array(rewards)
    expected = (array - array.mean()) / (array.std(ddof=1) + 1e-6)
    assert advantages(GroupAdvantage(), *rewards) == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-6)
