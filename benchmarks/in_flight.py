"""What 20,000 samples cost in memory while they all wait in a stage, beyond the samples themselves.

Counted by tracemalloc: all that Python allocated since before the pipeline was built, less what as many copies of the
same sample take. That is worker, job, context, chain and group; the bare anyio tasks beside it wait for the same event.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from benchmarks.measure import Row
from benchmarks.streams import GROUP_SIZE, pipeline
from eventbus.sample import Sample

__all__ = ["rows"]

IN_FLIGHT = 20_000
LIMIT = 8 * 1024
"""Bytes per sample."""


def rows() -> list[Row]:
    samples, tasks, waiting = (anyio.run(_traced, part) for part in (_samples, _tasks, _waiting))
    beyond = waiting - samples
    return [
        Row(
            f"{IN_FLIGHT:,} in flight, memory each beyond the sample (absolute)",
            f"{beyond / 1024:.1f} KB",
            f"under {LIMIT // 1024} KB",
            beyond < LIMIT,
            f"{beyond / tasks:.1f}x a bare anyio task of {tasks / 1024:.1f} KB; the sample {samples / 1024:.1f} KB",
        )
    ]


async def _traced(part: Callable[[Callable[[], None]], Awaitable[Any]]) -> float:
    """Bytes per sample at the moment at which `part` calls back."""
    measured = 0

    def now() -> None:
        nonlocal measured
        gc.collect()
        measured = tracemalloc.get_traced_memory()[0] - before

    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        await part(now)
    finally:
        tracemalloc.stop()
    return measured / IN_FLIGHT


async def _samples(now: Callable[[], None]) -> None:
    prototype = Sample(prompt="2+2=")
    samples = []
    for index in range(IN_FLIGHT):
        sample = prototype.copy()
        sample.group_index, sample.index, sample.rollout_id = index // GROUP_SIZE, index, index
        samples.append(sample)
    now()


async def _tasks(now: Callable[[], None]) -> None:
    gate = _Gate()
    async with anyio.create_task_group() as tasks:
        for _ in range(IN_FLIGHT):
            tasks.start_soon(gate.wait)
        await gate.all_here.wait()
        now()
        gate.released.set()


async def _waiting(now: Callable[[], None]) -> None:
    gate = _Gate()

    async def waits(sample: Sample) -> None:
        await gate.wait()

    async with pipeline([waits], IN_FLIGHT // GROUP_SIZE) as stream, anyio.create_task_group() as tasks:
        tasks.start_soon(stream.rollouts(stop=1).__anext__)
        await gate.all_here.wait()
        now()
        gate.released.set()


class _Gate:
    """Where all wait until it is released."""

    def __init__(self) -> None:
        self._missing = IN_FLIGHT
        self.all_here, self.released = anyio.Event(), anyio.Event()

    async def wait(self) -> None:
        self._missing -= 1
        if not self._missing:
            self.all_here.set()
        await self.released.wait()
