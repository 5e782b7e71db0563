"""`GroupAdvantage`: from the rewards of a group to one advantage per execution."""

from __future__ import annotations

import math
from typing import Final

from eventbus.group import Group
from middleware.spread import check_executions, deviations, scaled

__all__ = ["GroupAdvantage"]


class GroupAdvantage:
    """A group stage that writes `sample.train_metadata["advantage"]`, a float, on every sample.

    With the rewards r_1 ... r_n of the n executions of one prompt:

        GroupAdvantage()                                 (r_i - mean(r)) / (std(r) + eps)     GRPO, arXiv 2402.03300
        GroupAdvantage(std=False)                         r_i - mean(r)                       Dr. GRPO, arXiv 2503.20783
        GroupAdvantage(std=False, leave_one_out=True)     r_i - mean(r without r_i)           RLOO, arXiv 2402.14740

    `std` is the sample standard deviation (n - 1), as in the common GRPO code. Siblings that were fanned out of one
    execution count as one reward, that of the last of them, and share its advantage. One execution alone has nothing to
    be compared with: 0.

    In a group of equal rewards (kept by a filter's fallback) every advantage is exactly 0: in a loss that is averaged
    over tokens its tokens add to the denominator and nothing else, so they make the step smaller.

    :param key: which number of a dict reward counts.
    :param eps: added to the standard deviation, in units of the reward.
    :raises ValueError: `eps` is less than 0; when called: a reward is missing or not finite, the rewards lie so far
        apart that an advantage is not finite, or the group has no executions.
    :raises TypeError: when called: a reward is a dict and no key was given, or it is no number.
    :raises KeyError: when called: a dict reward lacks `key`.
    """

    level: Final = "group"

    def __init__(
        self, *, std: bool = True, leave_one_out: bool = False, key: str | None = None, eps: float = 1e-6
    ) -> None:
        if not eps >= 0:
            raise ValueError(f"GroupAdvantage: eps is {eps}, it must not be less than 0")
        self.std = std
        self.leave_one_out = leave_one_out
        self.key = key
        self.eps = eps

    def __call__(self, group: Group) -> None:
        for execution, advantage in zip(group.executions, self._advantages(group), strict=True):
            for sample in execution:
                if sample.train_metadata is None:
                    sample.train_metadata = {}
                sample.train_metadata["advantage"] = advantage

    def _advantages(self, group: Group) -> list[float]:
        check_executions(group)
        rewards = group.rewards(self.key)
        for execution, reward in zip(group.executions, rewards, strict=True):
            if not math.isfinite(reward):
                raise ValueError(
                    f"group {group.index}, sample {execution[-1].index}: the reward is {execution[-1].reward!r}; "
                    "an advantage needs finite rewards: add a stage that scores the samples, or a filter that drops "
                    "such groups"
                )
        n = len(rewards)
        distances, power = deviations(rewards)
        spread = math.hypot(*distances)
        if spread == 0:
            return [0.0] * n
        # r_i - mean of the others = (r_i - mean of all) * n / (n - 1)
        scale = n / (n - 1) if self.leave_one_out else 1.0
        if self.std:
            scale /= spread / math.sqrt(n - 1) + scaled(self.eps, -power)
            return [distance * scale for distance in distances]
        try:
            return [math.ldexp(distance * scale, power) for distance in distances]
        except OverflowError:
            raise ValueError(
                f"group {group.index}: the rewards, from {min(rewards)} to {max(rewards)}, lie so far apart that an "
                "advantage is not finite: scale them"
            ) from None
