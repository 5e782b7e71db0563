"""Mean and spread of a group's rewards, exact where it matters: equal rewards deviate by exactly 0."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["mean_and_deviations", "standard_deviation"]


def mean_and_deviations(values: Sequence[float]) -> tuple[float, list[float]]:
    """The mean, and how far each value lies from it."""
    first = values[0]
    steps = [value - first for value in values]  # all 0 when the values are equal, however large they are
    try:
        step = math.fsum(steps) / len(steps)
    except OverflowError:  # the sum is beyond any float, the mean is not
        step = math.fsum(value / len(steps) for value in steps)
    return first + step, [value - step for value in steps]


def standard_deviation(values: Sequence[float]) -> float:
    """The sample standard deviation (n - 1) in float64; of at least two values."""
    _, deviations = mean_and_deviations(values)
    return math.hypot(*deviations) / math.sqrt(len(values) - 1)
