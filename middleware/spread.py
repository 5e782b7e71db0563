"""What judges and the advantage share: mean and spread of a group's values, exact where it matters.

Equal values deviate by exactly 0, a mean is the nearest float whatever the order of the values (so that a limit which
it meets exactly is met), and neither very large nor very small values overflow on the way.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Final

from eventbus.group import Group

__all__ = ["check_executions", "deviations", "mean", "scaled", "standard_deviation"]

_NORMAL: Final = 500
"""Values below 2 to this power, and the largest not below 2 to minus it, have squares and quotients that are floats."""


def mean(values: Sequence[float]) -> float:
    if values.count(values[0]) == len(values):
        return values[0]
    try:
        return math.fsum(values) / len(values)
    except OverflowError:  # the sum is beyond any float, the mean is not
        return math.fsum(value / len(values) for value in values)


def deviations(values: Sequence[float]) -> tuple[list[float], int]:
    """How far each value lies from the mean, in units of 2 to the returned power: 0, but for very large or very small
    values, which would overflow or vanish in what is computed from them.

    The unit is a power of two, so it rounds nothing.
    """
    power = math.frexp(max(map(abs, values)))[1]
    if abs(power) < _NORMAL:
        power = 0
    else:
        values = [math.ldexp(value, -power) for value in values]
    first = values[0]
    steps = [value - first for value in values]  # all 0 when the values are equal, however large they are
    step = math.fsum(steps) / len(steps)
    return [value - step for value in steps], power


def scaled(value: float, power: int) -> float:
    """`value` times 2 to `power`, or the largest float where it is more."""
    try:
        return math.ldexp(value, power)
    except OverflowError:
        return math.copysign(sys.float_info.max, value)


def standard_deviation(values: Sequence[float]) -> float:
    """The sample standard deviation (n - 1) in float64; of at least two values."""
    distances, power = deviations(values)
    return scaled(math.hypot(*distances) / math.sqrt(len(values) - 1), power)


def check_executions(group: Group) -> None:
    """:raises ValueError: the group is empty, or one of its executions is."""
    if not (group.executions and all(group.executions)):
        raise ValueError(
            f"group {group.index} has {'an execution without samples' if group.executions else 'no executions'}: "
            "a stage that leaves nothing over returns Drop(reason)"
        )
