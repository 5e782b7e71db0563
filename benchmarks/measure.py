"""How everything here is measured: cases take turns in one process, and what counts is the median over the rounds.

Times are CPU seconds of the process, which other programs on the machine disturb less than those of a clock. A ratio is
formed within a round, between two cases that ran one after the other.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import process_time
from typing import NamedTuple

__all__ = ["BACKENDS", "ROUNDS", "Row", "cpu_seconds", "interleaved", "micro", "ratio_row"]

BACKENDS = ("asyncio", "trio")
ROUNDS = 5


class Row(NamedTuple):
    """One line of the table."""

    what: str
    ratio: str
    """With a unit where it is no ratio."""
    bound: str = ""
    ok: bool | None = None
    """None: for information, it has no bound."""
    measured: str = ""


def interleaved(cases: Mapping[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """What each case returned, round by round. Nobody pays for the garbage of the case before."""
    measured: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            gc.collect()
            measured[name].append(case())
    return measured


def ratio_row(what: str, own: Sequence[float], peer: Sequence[float], at_most: float | None = None) -> Row:
    """`own` beside `peer`, both in seconds per sample, paired by round."""
    ratio = median(mine / other for mine, other in zip(own, peer, strict=True))
    bound = "" if at_most is None else f"at most {at_most:g}x"
    ok = None if at_most is None else ratio <= at_most
    return Row(what, f"{ratio:.3g}x", bound, ok, f"{micro(own)} against {micro(peer)}")


def micro(seconds: Sequence[float]) -> str:
    return f"{median(seconds) * 1e6:.2f} us"


def cpu_seconds(call: Callable[[], object]) -> float:
    started = process_time()
    call()
    return process_time() - started
