"""Judges for `DynamicFilter`: each gets a group and returns a `FilterDecision` with a reason and a score.

Those with options are made once and then called: `DynamicFilter(accuracy_band(0.1, 0.9), fallback="best")`. Reasons
name the limit, not the value, so that a summary counts few of them. Where rewards are judged, a group with a missing or
non-finite one is rejected as `bad_reward`. An empty group is a ValueError: an earlier stage should have dropped it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from eventbus.group import Group
from eventbus.sample import Sample, SampleStatus
from middleware.filter import FilterDecision
from middleware.spread import check_executions, mean, standard_deviation
from middleware.wrappers import at_least_one

__all__ = [
    "accuracy_band",
    "repetition",
    "response_length",
    "reward_nonzero_std",
    "reward_nonzero_std_with_fallback",
    "truncation",
]

MIN_STD: Final = 1e-6

_BAD_REWARD: Final = FilterDecision(False, "bad_reward")


def reward_nonzero_std(group: Group, *, key: str | None = None) -> FilterDecision:
    """Keep a group whose rewards differ: a sample standard deviation (n - 1, float64) above 1e-6.

    Rejected as `zero_std_<reward, one digit>`, or `group_size_1`, since one reward has no deviation. The score is the
    standard deviation, so rejected groups come out equal and `fallback="best"` takes them by their index.

    :param key: which number of a dict reward counts: `functools.partial(reward_nonzero_std, key="accuracy")`.
    """
    check_executions(group)
    rewards = group.rewards(key)
    if not all(map(math.isfinite, rewards)):
        return _BAD_REWARD
    if len(rewards) == 1:
        return FilterDecision(False, "group_size_1", score=0.0)
    std = standard_deviation(rewards)
    if std > MIN_STD:
        return FilterDecision(True, score=std)
    return FilterDecision(False, f"zero_std_{round(rewards[0], 1) + 0.0}", score=std)


def reward_nonzero_std_with_fallback(group: Group, *, key: str | None = None) -> FilterDecision:
    """`reward_nonzero_std` whose rejected groups fill the batch when it would not fill up otherwise.

    The same as `DynamicFilter(reward_nonzero_std, fallback="last")`.
    """
    return msgspec.structs.replace(reward_nonzero_std(group, key=key), keep_when_insufficient=True)


class accuracy_band:
    """Keep a group whose mean reward lies between `low` and `high`, both included.

    The score is minus the distance from the middle of the band.

    :param key: which number of a dict reward counts.
    :raises ValueError: not `low <= high`, or one of them is not finite.
    """

    def __init__(self, low: float, high: float, key: str | None = None) -> None:
        _ordered("accuracy_band", "low", low, "high", high)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(
                f"accuracy_band: low={low}, high={high}: a band without an end has no middle to score by; give the "
                "least or the largest reward there is"
            )
        self.low, self.high, self.key = low, high, key

    def __call__(self, group: Group) -> FilterDecision:
        check_executions(group)
        rewards = group.rewards(self.key)
        if not all(map(math.isfinite, rewards)):
            return _BAD_REWARD
        accuracy = mean(rewards)
        score = -abs(accuracy - (self.low + self.high) / 2)
        if accuracy < self.low:
            return FilterDecision(False, f"accuracy_below_{self.low:g}", score=score)
        if accuracy > self.high:
            return FilterDecision(False, f"accuracy_above_{self.high:g}", score=score)
        return FilterDecision(True, score=score)


class response_length:
    """Keep a group whose mean response has `min` to `max` tokens, both included; fanned-out siblings count together.

    The score is minus the tokens that are missing or too many.

    :raises ValueError: not `0 <= min <= max`.
    """

    def __init__(self, min: int, max: int) -> None:
        _ordered("response_length", "0", 0, "min", min)
        _ordered("response_length", "min", min, "max", max)
        self.min, self.max = min, max

    def __call__(self, group: Group) -> FilterDecision:
        check_executions(group)
        length = sum(sample.response_length for sample in group.samples) / len(group)
        if length < self.min:
            return FilterDecision(False, f"response_shorter_than_{self.min}", score=length - self.min)
        if length > self.max:
            return FilterDecision(False, f"response_longer_than_{self.max}", score=self.max - length)
        return FilterDecision(True, score=0.0)


class repetition:
    """Keep a group of whose n-grams at most the share `threshold` is repeated, on average over the responses.

    An n-gram is repeated when it has occurred before in the same response. Taken over tokens, or over words where a
    response has no tokens. The score is minus the share. Takes some 0.3 ms of the event loop per 1,000 tokens; for
    long responses use `in_thread(DynamicFilter(repetition(0.5)))`.

    :param n: tokens (or words) in an n-gram.
    :raises ValueError: `threshold` is not in 0 to 1, or `n` is less than 1.
    :raises TypeError: `n` is no whole number.
    """

    def __init__(self, threshold: float, n: int = 4) -> None:
        _share("repetition", "threshold", threshold)
        self.threshold, self.n = threshold, at_least_one("repetition: n", n)

    def __call__(self, group: Group) -> FilterDecision:
        check_executions(group)
        share = mean([_repeated(_units(sample), self.n) for sample in group.samples])
        reason = None if share <= self.threshold else f"repetition_above_{self.threshold:g}"
        return FilterDecision(reason is None, reason, score=-share)


class truncation:
    """Keep a group of whose executions at most the share `max_share` was cut off at the token budget.

    The score is minus the share.

    :raises ValueError: `max_share` is not in 0 to 1.
    """

    def __init__(self, max_share: float) -> None:
        _share("truncation", "max_share", max_share)
        self.max_share = max_share

    def __call__(self, group: Group) -> FilterDecision:
        check_executions(group)
        cut = sum(execution[-1].status is SampleStatus.TRUNCATED for execution in group.executions)
        share = cut / len(group)
        reason = None if share <= self.max_share else f"truncated_above_{self.max_share:g}"
        return FilterDecision(reason is None, reason, score=-share)


def _units(sample: Sample) -> Sequence[Any]:
    return sample.tokens[-sample.response_length :] if sample.response_length else sample.response.split()


def _repeated(units: Sequence[Any], n: int) -> float:
    total = len(units) - n + 1
    if total < 1:
        return 0.0
    return (total - len(set(zip(*(units[start:] for start in range(n)), strict=False)))) / total


def _ordered(judge: str, low_name: str, low: float, high_name: str, high: float) -> None:
    if not low <= high:
        raise ValueError(f"{judge}: {high_name} is {high}, less than {low_name}{'' if low_name == '0' else f'={low}'}")


def _share(judge: str, name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{judge}: {name} is {value}, it must be from 0 to 1")
