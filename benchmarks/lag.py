"""How long the event loop is kept from others while sync stages of 1 ms each work: the lag of a 1 ms ticker.

In real time, so it is the figure here that other programs on the machine disturb most; the median of the runs' 99th
percentiles counts. The lag of a loop that runs nothing but the ticker stands beside it: so much is the machine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import anyio

from benchmarks.measure import BACKENDS, Row, interleaved
from benchmarks.streams import GROUP_SIZE, pipeline
from eventbus.pipeline import Pipeline
from eventbus.sample import Completion, Sample
from middleware.generate import Generate

__all__ = ["rows"]

TICK = 0.001
BUSY = 0.001
"""Seconds that each stage works."""
LIMIT = 0.010


def rows() -> list[Row]:
    cases = {f"idle {backend}": partial(anyio.run, _idle, backend=backend) for backend in BACKENDS}
    for backend in BACKENDS:
        cases[f"256 samples at once, {backend}"] = partial(anyio.run, _lag, _at_once, backend=backend)
        cases[f"64 answered at one moment, {backend}"] = partial(anyio.run, _lag, _one_moment, backend=backend)
    measured = interleaved(cases)
    return [
        Row(
            f"loop lag, 1 ms stages, {name} (absolute)",
            f"{median(lags) * 1e3:.1f} ms",
            f"p99 under {LIMIT * 1e3:.0f} ms",
            median(lags) < LIMIT,
            f"worst run {max(lags) * 1e3:.1f} ms; idle loop {median(measured[f'idle {backend}']) * 1e3:.1f} ms",
        )
        for backend in BACKENDS
        for name, lags in measured.items()
        if name.endswith(f", {backend}")
    ]


async def _idle() -> float:
    lags: list[float] = []
    with anyio.move_on_after(0.5):
        await _tick(lags)
    return _p99(lags)


async def _lag(build: Any) -> float:
    """The 99th percentile of the ticker's lag, in seconds."""
    stream: Pipeline = build()
    lags: list[float] = []
    async with stream, anyio.create_task_group() as tasks:
        tasks.start_soon(_tick, lags)
        rollouts = stream.rollouts(stop=1)
        await anext(rollouts)
        tasks.cancel_scope.cancel()
    return _p99(lags)


def _p99(lags: list[float]) -> float:
    return quantiles(lags, n=100)[98]


async def _tick(lags: list[float]) -> None:
    while True:
        due = perf_counter() + TICK
        await anyio.sleep(TICK)
        lags.append(perf_counter() - due)


def _at_once() -> Pipeline:
    return pipeline([first, second, third], 256 // GROUP_SIZE)


def _one_moment() -> Pipeline:
    return pipeline([Generate(_OneMoment(64)), first, second, third], 64 // GROUP_SIZE)


class _OneMoment:
    """Answers all requests when the last of them is there."""

    def __init__(self, requests: int) -> None:
        self._missing = requests
        self._all_there = anyio.Event()

    async def generate(self, sample: Sample, sampling: Mapping[str, Any]) -> Completion:
        self._missing -= 1
        if not self._missing:
            self._all_there.set()
        await self._all_there.wait()
        return Completion(text="4", tokens=[52], log_probs=[-0.1])


def _work() -> None:
    end = perf_counter() + BUSY
    while perf_counter() < end:
        pass


def first(sample: Sample) -> None:
    _work()


def second(sample: Sample) -> None:
    _work()


def third(sample: Sample) -> None:
    _work()
