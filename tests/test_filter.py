from __future__ import annotations

import math
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus.group import Group, Verdict
from eventbus.sample import Sample, SampleStatus
from eventbus.stage import ContractError, Drop, Hold, bind
from middleware import (
    DynamicFilter,
    FilterDecision,
    accuracy_band,
    repetition,
    response_length,
    reward_nonzero_std,
    reward_nonzero_std_with_fallback,
    should_drop,
    truncation,
)
from middleware.filter import REASON_LENGTH
from middleware.spread import standard_deviation

REJECT = FilterDecision(keep=False, reason="dull", score=-0.5)
SPARE = FilterDecision(keep=False, keep_when_insufficient=True)


def group_of(*rewards: Any, index: int = 3, **fields: Any) -> Group:
    return Group(index, "p", [[Sample(index=i, reward=reward, **fields)] for i, reward in enumerate(rewards)])


def judged(filter_: DynamicFilter, group: Group, remaining: int = 4, target: int = 4) -> Group | Drop | Hold:
    result = filter_(group, remaining=remaining, target=target)
    assert not isinstance(result, Awaitable)
    return result


def never(group: Group) -> FilterDecision:
    return REJECT


# The rule of slime


@pytest.mark.parametrize(
    ("decision", "remaining", "target", "dropped"),
    [
        (True, 9, 2, False),
        (False, 1, 2, True),
        (FilterDecision(keep=True), 9, 2, False),
        (FilterDecision(keep=False), 2, 2, True),
        (SPARE, 3, 2, True),
        (SPARE, 2, 2, False),
        (SPARE, 1, 2, False),
    ],
)
def test_should_drop(decision: FilterDecision | bool, remaining: int, target: int, dropped: bool) -> None:
    assert should_drop(decision, remaining=remaining, target=target) is dropped


@pytest.mark.parametrize(
    ("filter_", "kept"),
    [
        (DynamicFilter(reward_nonzero_std), [0, 2, 4]),
        (DynamicFilter(reward_nonzero_std, fallback="last"), [0, 2, 4, 5]),
        (DynamicFilter(reward_nonzero_std_with_fallback), [0, 2, 4, 5]),
    ],
)
def test_worked_example(filter_: DynamicFilter, kept: list[int]) -> None:
    remaining, seen = 6, []
    for index in range(6):
        result = judged(filter_, group_of(1, index % 2, index=index), remaining, 4)
        if isinstance(result, Drop):
            remaining -= 1
        else:
            seen.append(index)
    assert seen == kept


# DynamicFilter


def test_it_binds_as_a_stage_that_counts() -> None:
    stage = bind(DynamicFilter(never))
    assert (stage.name, stage.level, stage.counts) == ("DynamicFilter", "group", True)


def test_a_kept_group_carries_score_and_count() -> None:
    group = group_of(0, 1)
    assert judged(DynamicFilter(lambda group: FilterDecision(True, score=2)), group, 5, 4) is group
    assert group.verdict == Verdict(True, None, False, 2.0, 5, 4)


def test_without_fallback_a_rejected_group_is_dropped() -> None:
    group = group_of(None)
    assert judged(DynamicFilter(never), group, 1, 4) == Drop("dull")
    assert group.verdict == Verdict(False, "dull", False, -0.5, 1, 4)


def test_a_rejection_without_a_reason_is_called_rejected() -> None:
    assert judged(DynamicFilter(lambda group: False), group_of(0)) == Drop("rejected")


@pytest.mark.parametrize(("remaining", "kept"), [(5, False), (4, True), (3, True)])
def test_last_keeps_a_rejected_group_when_the_batch_would_not_fill_up(remaining: int, kept: bool) -> None:
    group = group_of(1, 1)
    result = judged(DynamicFilter(never, fallback="last"), group, remaining, 4)
    assert result is group if kept else result == Drop("dull")
    assert group.verdict == Verdict(kept, "dull", kept, -0.5, remaining, 4)


def test_best_holds_a_rejected_group() -> None:
    group = group_of(1, 1)
    assert judged(DynamicFilter(never, fallback="best"), group, 1, 4) == Hold("dull", -0.5)
    assert group.verdict == Verdict(False, "dull", False, -0.5, 1, 4)


def test_best_goes_before_keep_when_insufficient() -> None:
    filter_ = DynamicFilter(reward_nonzero_std_with_fallback, fallback="best")
    assert judged(filter_, group_of(1, 1), 1, 4) == Hold("zero_std_1.0", 0.0)


@pytest.mark.parametrize("fallback", ["last", "best"])
@pytest.mark.parametrize(
    "reward", [None, math.nan, -math.inf, {}, {"a": None}, {"a": 1, "b": math.inf}, {"why": "bad"}, "1.0"]
)
def test_no_fallback_keeps_a_bad_reward(fallback: Any, reward: Any) -> None:
    group = group_of(1.0, reward)
    assert judged(DynamicFilter(never, fallback), group, 1, 4) == Drop("bad_reward")
    assert group.verdict == Verdict(False, "bad_reward", False, -0.5, 1, 4)


@pytest.mark.parametrize(
    "reward", [1, True, np.float32(1), np.array(1.0), {"a": 1, "why": "fine", "more": {"b": None}}]
)
def test_a_finite_reward_of_any_kind_can_be_kept_by_a_fallback(reward: Any) -> None:
    group = group_of(1.0, reward)
    assert judged(DynamicFilter(never, "last"), group, 1, 4) is group


def test_only_the_last_sample_of_an_execution_has_to_have_a_reward() -> None:
    group = Group(1, "p", [[Sample(), Sample(reward=1.0)]])
    assert judged(DynamicFilter(never, "last"), group) is group


def test_a_filler_of_an_earlier_filter_stays_marked() -> None:
    group = group_of(1, 1)
    judged(DynamicFilter(never, "last"), group)
    judged(DynamicFilter(lambda group: FilterDecision(True, score=1.0)), group, 3, 4)
    assert group.verdict == Verdict(True, "dull", True, 1.0, 3, 4)


@pytest.mark.anyio
async def test_async_judge() -> None:
    async def judge(group: Group) -> FilterDecision:
        return REJECT

    result = DynamicFilter(judge)(group_of(1), remaining=4, target=4)
    assert isinstance(result, Awaitable)
    assert await result == Drop("dull")


@pytest.mark.parametrize("answer", [np.bool_(True), np.array(True), FilterDecision(keep=np.bool_(True))])  # type: ignore[arg-type]
def test_numpy_answers_become_plain(answer: Any) -> None:
    group = group_of(1)
    judged(DynamicFilter(lambda group: answer), group)
    assert group.verdict is not None
    assert group.verdict.kept is True


@pytest.mark.parametrize("answer", [None, 1, "keep", FilterDecision(keep=None), np.array([True, False])])  # type: ignore[arg-type]
def test_any_other_answer_names_judge_and_group(answer: Any) -> None:
    def judge(group: Group) -> Any:
        return answer

    with pytest.raises(ContractError, match=r"group 3: the judge judge returned \w+, expected FilterDecision or bool"):
        judged(DynamicFilter(judge), group_of(1))


def test_a_score_that_is_no_number_names_judge_and_group() -> None:
    with pytest.raises(ContractError, match=r"group 3: the judge <lambda> gave the score 'high', expected a number"):
        judged(DynamicFilter(lambda group: FilterDecision(True, score="high")), group_of(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", [False, FilterDecision(False), FilterDecision(False, score=math.nan)])
def test_best_needs_a_finite_score(answer: Any) -> None:
    filter_ = DynamicFilter(lambda group: answer, fallback="best")
    with pytest.raises(ContractError, match=r"group 3: .*<lambda> gives (none|nan): return FilterDecision"):
        judged(filter_, group_of(1))


def test_best_with_a_judge_that_says_it_returns_bool_is_refused_at_once() -> None:
    def judge(group: Group) -> bool:
        return True

    with pytest.raises(ContractError, match=r"DynamicFilter: .*the judge judge gives none: return FilterDecision"):
        DynamicFilter(judge, fallback="best")


def test_a_judge_is_an_instance_and_a_fallback_one_of_three() -> None:
    with pytest.raises(TypeError, match=r"the judge is a class, pass an instance: truncation\(\.\.\.\)"):
        DynamicFilter(truncation)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"the judge is not callable: 0\.5"):
        DynamicFilter(0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fallback='first': choose 'none', 'last' or 'best'"):
        DynamicFilter(never, fallback="first")  # type: ignore[arg-type]


def test_reasons_are_cut_and_can_be_written_down() -> None:
    group = group_of(1)
    result = judged(DynamicFilter(lambda group: FilterDecision(False, "\ud800" + "x" * 1000)), group)
    assert isinstance(result, Drop)
    assert len(result.reason) == REASON_LENGTH
    assert result.reason.startswith("\\ud800xxx")
    assert msgspec.json.decode(msgspec.json.encode(group.verdict), type=Verdict) == group.verdict


rewards = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(),
    st.floats().map(np.float64),
    st.floats(width=32).map(np.float32),
    st.floats().map(np.array),
)


@given(
    rewards=st.lists(rewards, min_size=1, max_size=6),
    fallback=st.sampled_from(["none", "last", "best"]),
    judge=st.sampled_from([reward_nonzero_std, reward_nonzero_std_with_fallback, accuracy_band(0.2, 0.8)]),
    remaining=st.integers(0, 9),
)
def test_any_rewards_give_a_decision_that_can_be_written_down(
    rewards: list[Any], fallback: Any, judge: Any, remaining: int
) -> None:
    group = group_of(*rewards)
    result = judged(DynamicFilter(judge, fallback), group, remaining, 4)
    verdict = group.verdict
    assert verdict is not None
    assert verdict.kept == isinstance(result, Group)
    assert isinstance(result, Group) or result.reason == verdict.reason
    if not all(map(math.isfinite, group.rewards())):
        assert result == Drop("bad_reward")
    assert not (verdict.by_fallback and remaining > 4)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(verdict), type=Verdict) == verdict


# Judges


@pytest.mark.parametrize(
    ("rewards", "keep", "reason"),
    [
        ([0, 1], True, None),
        ([0.5, 0.5 + 1e-5], True, None),
        ([0.5, 0.5 + 1e-7], False, "zero_std_0.5"),
        ([0.1] * 8, False, "zero_std_0.1"),
        ([1e12 + 0.1] * 7, False, "zero_std_1000000000000.1"),
        ([-0.0, 0.0], False, "zero_std_0.0"),
        ([True, 1], False, "zero_std_1.0"),
        ([1.7e308, -1.7e308, 0], True, None),
        ([0.3], False, "group_size_1"),
        ([None, 1.0], False, "bad_reward"),
        ([math.nan, math.nan], False, "bad_reward"),
        ([math.inf, 1.0], False, "bad_reward"),
    ],
)
def test_reward_nonzero_std(rewards: list[Any], keep: bool, reason: str | None) -> None:
    decision = reward_nonzero_std(group_of(*rewards))
    assert (decision.keep, decision.reason, decision.keep_when_insufficient) == (keep, reason, False)
    assert reward_nonzero_std_with_fallback(group_of(*rewards)) == msgspec.structs.replace(
        decision, keep_when_insufficient=True
    )


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16))
def test_the_score_is_the_unbiased_standard_deviation(values: list[float]) -> None:
    score = reward_nonzero_std(group_of(*values)).score
    assert score == pytest.approx(float(np.std(values, ddof=1)), rel=1e-9, abs=1e-9)


@given(value=st.floats(allow_nan=False, allow_infinity=False), size=st.integers(2, 16))
def test_equal_rewards_have_no_deviation_whatever_their_size(value: float, size: int) -> None:
    assert reward_nonzero_std(group_of(*[value] * size)).score == 0.0


def test_dict_rewards_need_their_key() -> None:
    group = group_of({"acc": 0, "len": 5}, {"acc": 1, "len": 5})
    assert reward_nonzero_std(group, key="acc").keep
    assert judged(DynamicFilter(partial(reward_nonzero_std, key="len")), group) == Drop("zero_std_5.0")
    with pytest.raises(TypeError, match=r"sample 0: .* rewards\(key=\.\.\.\)"):
        reward_nonzero_std(group)


@pytest.mark.parametrize(
    ("rewards", "decision"),
    [
        ([0, 0, 1, 1], FilterDecision(True, score=0.0)),
        ([1, 0, 0, 0], FilterDecision(True, score=-0.25)),
        ([0, 0], FilterDecision(False, "accuracy_below_0.25", score=-0.5)),
        ([1, 1], FilterDecision(False, "accuracy_above_0.75", score=-0.5)),
        ([1, None], FilterDecision(False, "bad_reward")),
    ],
)
def test_accuracy_band(rewards: list[Any], decision: FilterDecision) -> None:
    assert accuracy_band(0.25, 0.75)(group_of(*rewards)) == decision
    assert accuracy_band(0.25, 0.75, key="k")(group_of(*({"k": reward} for reward in rewards))) == decision


@pytest.mark.parametrize(
    ("length", "decision"),
    [
        (4, FilterDecision(True, score=0.0)),
        (8, FilterDecision(True, score=0.0)),
        (3, FilterDecision(False, "response_shorter_than_4", score=-1.0)),
        (10, FilterDecision(False, "response_longer_than_8", score=-2.0)),
    ],
)
def test_response_length(length: int, decision: FilterDecision) -> None:
    assert response_length(4, 8)(group_of(0, 1, response_length=length)) == decision
    siblings = Group(1, "p", [[Sample(response_length=length - 1), Sample(response_length=1)]])
    assert response_length(4, 8)(siblings) == decision


@pytest.mark.parametrize(
    ("fields", "share"),
    [
        ({"tokens": [9] * 3 + [1, 2, 1, 2, 1, 2], "response_length": 6}, 0.6),
        ({"tokens": [5, 5, 1, 2, 3], "response_length": 3}, 0.0),
        ({"response": "a b a b a b"}, 0.6),
        ({"response": "a"}, 0.0),
        ({}, 0.0),
    ],
)
def test_repetition(fields: dict[str, Any], share: float) -> None:
    decision = repetition(0.5, n=2)(group_of(0, 1, **fields))
    assert decision.score == pytest.approx(-share)
    assert (decision.keep, decision.reason) == (share <= 0.5, None if share <= 0.5 else "repetition_above_0.5")


def test_truncation() -> None:
    group = group_of(0, 1, status=SampleStatus.TRUNCATED)
    assert truncation(0.5)(group) == FilterDecision(False, "truncated_above_0.5", score=-1.0)
    group.samples[0].status = SampleStatus.COMPLETED
    assert truncation(0.5)(group) == FilterDecision(True, score=-0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: accuracy_band(0.8, 0.2), "accuracy_band: high is 0.2, less than low=0.8"),
        (lambda: accuracy_band(0.2, math.inf), "accuracy_band: low=0.2, high=inf: a band without an end has no middle"),
        (lambda: response_length(9, 3), "response_length: max is 3, less than min=9"),
        (lambda: response_length(-1, 3), "response_length: min is -1, less than 0"),
        (lambda: repetition(1.5), "repetition: threshold is 1.5, it must be from 0 to 1"),
        (lambda: repetition(0.5, n=0), "repetition: n is 0, it must be at least 1"),
        (lambda: truncation(-0.1), "truncation: max_share is -0.1, it must be from 0 to 1"),
    ],
)
def test_options_are_checked(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_rewards_whose_sum_is_beyond_any_float_have_a_deviation() -> None:
    assert standard_deviation([8.98846567431158e307, 8.98846567431158e307, 0.0]) > 1e307
    assert standard_deviation([8.98846567431158e307, 0.0, 0.0]) > 1e307


@pytest.mark.parametrize("size", [3, 7, 10, 30])
def test_a_limit_that_is_met_exactly_is_met_in_any_order(size: int) -> None:
    for right in range(size + 1):
        band = accuracy_band(right / size, right / size)
        rewards = [1] * right + [0] * (size - right)
        assert band(group_of(*rewards)).keep
        assert band(group_of(*reversed(rewards))).keep


def test_a_share_that_is_met_exactly_is_met() -> None:
    response = "a a a a b c d e f g"  # 3 of 10 words occurred before
    assert repetition(0.3, n=1)(group_of(*range(7), response=response)) == FilterDecision(True, score=-0.3)


def test_rewards_whose_difference_is_beyond_any_float_have_a_mean() -> None:
    assert accuracy_band(0, 1)(group_of(1.7e308, -1.7e308)) == FilterDecision(True, score=-0.5)
    assert reward_nonzero_std(group_of(1.7e308, -1.7e308)).score == sys.float_info.max


@pytest.mark.parametrize(
    "judge",
    [
        reward_nonzero_std,
        reward_nonzero_std_with_fallback,
        accuracy_band(0, 1),
        response_length(0, 9),
        repetition(1),
        truncation(1),
    ],
)
def test_an_empty_group_is_named(judge: Callable[[Group], FilterDecision]) -> None:
    with pytest.raises(ValueError, match=r"group 5 has no executions: .* returns Drop\(reason\)"):
        judge(Group(5, "p", []))
    with pytest.raises(ValueError, match="group 5 has an execution without samples"):
        judge(Group(5, "p", [[]]))


def test_the_words_of_an_n_gram_are_a_whole_number() -> None:
    with pytest.raises(TypeError, match=r"repetition: n is 2\.5, it must be a whole number"):
        repetition(0.5, n=2.5)  # type: ignore[arg-type]
