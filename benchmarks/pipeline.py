"""What the whole pipeline costs per sample above its engine, and where it goes.

Engine, five trivial stages, filter, batch; groups of 8, 4,096 samples in a rollout, no observer, the engine answers at
once. Beside it stands the plainest stream that does less: five tasks joined by anyio memory object streams, which call
the same five functions, without samples being made, engine, groups, filter, batch, contexts or checks.

"Above Generate" leaves out what `Generate` and its engine take when they are called by hand; the making of the samples
and all else counts. "Above engine.generate" leaves out the engine alone, so that packing its answer into the sample
counts as well.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextvars import copy_context
from functools import partial
from itertools import repeat
from statistics import median
from time import process_time
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from benchmarks.measure import BACKENDS, Row, interleaved, micro, ratio_row
from benchmarks.streams import (
    FIVE_STAGES,
    GROUP_SIZE,
    GROUPS,
    SAMPLES,
    Engine,
    changes_nothing,
    generated,
    pipeline,
    reward,
    whole,
)
from eventbus.context import RolloutContext, _current
from eventbus.ledger import Ledger
from eventbus.pipeline import Pipeline
from eventbus.prompts import Prompts
from eventbus.sample import Sample
from eventbus.workers import Worker, WorkerPool
from middleware.filter import DynamicFilter
from middleware.generate import Generate
from middleware.judges import reward_nonzero_std

__all__ = ["rollout_seconds", "rows"]

WORKERS = (8, 64, 512, 4096)
BUFFER = 64
"""Samples that fit between two stages of the plain stream."""


def rows() -> list[Row]:
    return [row for backend in BACKENDS for row in _beside_plain(backend)] + _split()


def _beside_plain(backend: str) -> list[Row]:
    cases: dict[str, Callable[[], float]] = {
        "plain": lambda: anyio.run(_plain_stream, backend=backend),
        "engine": lambda: anyio.run(_engine, backend=backend),
        "Generate": lambda: anyio.run(_generate, backend=backend),
    }
    for workers in WORKERS:
        cases[str(workers)] = partial(_parked, workers, backend)
    times = interleaved(cases)

    def above(part: str, workers: int) -> list[float]:
        return [own - other for own, other in zip(times[str(workers)], times[part], strict=True)]

    few, plain = WORKERS[0], times["plain"]
    return [
        ratio_row(f"pipeline above Generate / plain hops, {backend}", above("Generate", few), plain, at_most=0.1),
        ratio_row(f"pipeline above engine.generate / plain hops, {backend}", above("engine", few), plain),
        *(
            ratio_row(
                f"  with {count:,} parked workers / with {few}, {backend}",
                above("Generate", count),
                above("Generate", few),
                at_most=1.5,
            )
            for count in WORKERS[1:]
        ),
    ]


def _parked(workers: int, backend: str) -> float:
    return anyio.run(rollout_seconds, whole(workers), workers, backend=backend)


async def rollout_seconds(stream: Pipeline, workers: int = 0) -> float:
    """CPU seconds per sample of a rollout, the median of three, after a first one."""
    async with stream:
        rollouts = stream.rollouts()
        await anext(rollouts)
        if (there := stream._running.pool.workers) < workers:
            raise RuntimeError(f"only {there} of {workers} workers are parked")
        seconds = []
        for _ in range(3):
            started = process_time()
            await anext(rollouts)
            seconds.append(process_time() - started)
    return median(seconds) / SAMPLES


async def _engine() -> float:
    engine, samples = Engine(), generated()
    started = process_time()
    for sample in samples:
        await engine.generate(sample, {})
    return (process_time() - started) / SAMPLES


async def _generate() -> float:
    """`Generate` called by hand where a stage is."""
    generate, samples = Generate(Engine()), [Sample(prompt="2+2=") for _ in range(SAMPLES)]
    _current.set(RolloutContext(0))
    started = process_time()
    for sample in samples:
        await generate(sample)
    return (process_time() - started) / SAMPLES


async def _plain_stream() -> float:
    """One plain anyio hop per stage."""
    samples = generated()
    done: list[Sample] = []

    async def stage(
        function: Callable[[Sample], Sample | None],
        source: MemoryObjectReceiveStream[Sample],
        sink: MemoryObjectSendStream[Sample] | None,
    ) -> None:
        async for sample in source:
            result = function(sample)
            if sink is None:
                done.append(sample if result is None else result)
            else:
                await sink.send(sample if result is None else result)
        if sink is not None:
            sink.close()
        source.close()

    started = process_time()
    async with anyio.create_task_group() as tasks:
        first, source = anyio.create_memory_object_stream[Sample](BUFFER)
        for function in FIVE_STAGES[:-1]:
            sink, behind = anyio.create_memory_object_stream[Sample](BUFFER)
            tasks.start_soon(stage, function, source, sink)
            source = behind
        tasks.start_soon(stage, FIVE_STAGES[-1], source, None)
        with first:
            for sample in samples:
                await first.send(sample)
    seconds = process_time() - started
    assert len(done) == SAMPLES
    return seconds / SAMPLES


# Where it goes


def _split() -> list[Row]:
    """The parts: what leaving one out saves, and the cost of those alone that cannot be left out.

    Each case counts by its quickest run: differences of medians would show the moods of the machine.
    """
    keep = DynamicFilter(reward_nonzero_std)
    run: Callable[..., Callable[[], float]] = lambda *stages: lambda: anyio.run(rollout_seconds, pipeline(stages))  # noqa: E731
    times = interleaved(
        {
            "all": run(Generate(Engine()), *FIVE_STAGES, keep),
            "no filter": run(Generate(Engine()), *FIVE_STAGES),
            "no stages": run(Generate(Engine()), reward, keep),
            "no Generate": run(*FIVE_STAGES, keep),
            "bare": run(changes_nothing),
            "samples": lambda: anyio.run(_samples),
            "context": lambda: anyio.run(_contexts),
            "queue": lambda: anyio.run(_queue),
            "ledger": _ledger,
        }
    )
    quickest = {name: min(seconds) for name, seconds in times.items()}
    together = quickest["all"]
    alone = ("samples", "context", "queue", "ledger")
    parts = {
        "Generate, engine included (left out)": together - quickest["no Generate"],
        "chain: 4 of the 5 stages (left out)": together - quickest["no stages"],
        "filter (left out)": together - quickest["no filter"],
        "prompts and samples: take, copy, numbers (alone)": quickest["samples"],
        "context isolation: copy, run, set (alone)": quickest["context"],
        "queue and workers (alone)": quickest["queue"],
        "ledger (alone)": quickest["ledger"],
        "jobs, join, group, batch (the rest of a pipeline with one stage)": quickest["bare"]
        - sum(quickest[name] for name in alone),
    }
    return [
        Row(f"  of it: {part}", f"{seconds / together:.0%}", measured=f"{micro([seconds])} of {micro([together])}")
        for part, seconds in parts.items()
    ]


async def _samples() -> float:
    source = Prompts(repeat("2+2="), GROUP_SIZE)
    samples = []
    started = process_time()
    for prototype in await source.take(GROUPS):
        for position in range(GROUP_SIZE):
            sample = prototype.copy()
            sample.index = (prototype.group_index or 0) * GROUP_SIZE + position
            sample.rollout_id = sample.index
            samples.append(sample)
    return (process_time() - started) / len(samples)


class _Job:
    """Does nothing."""

    worker: Worker | None = None

    def __init__(self, done: Callable[[], None], context: RolloutContext) -> None:
        self._done = done
        self.context = context

    def run(self) -> Coroutine[Any, Any, None] | None:
        self._done()
        return None

    def died(self, error: BaseException) -> None:
        raise error

    def describe(self) -> str:
        return "a job that does nothing"


async def _contexts() -> float:
    async def inside(place: RolloutContext) -> None:
        _current.set(place)

    around = copy_context()
    async with anyio.create_task_group() as tasks:
        time_slice = WorkerPool(tasks).slice
        job = _Job(lambda: None, RolloutContext(0))
        started = process_time()
        for index in range(SAMPLES):
            time_slice.begin(around.copy(), job, inside(RolloutContext(0, False, 0, index, index)))
        seconds = process_time() - started
    return seconds / SAMPLES


async def _queue() -> float:
    left, all_done = SAMPLES, anyio.Event()

    def done() -> None:
        nonlocal left
        left -= 1
        if not left:
            all_done.set()

    async with anyio.create_task_group() as tasks:
        pool, job = WorkerPool(tasks), _Job(done, RolloutContext(0))
        started = process_time()
        for _ in range(SAMPLES):
            pool.put(job)
        await all_done.wait()
        seconds = process_time() - started
        tasks.cancel_scope.cancel()
    return seconds / SAMPLES


def _ledger() -> float:
    ledger = Ledger()
    started = process_time()
    for _ in range(GROUPS):
        ledger.submit(GROUP_SIZE)
        for _ in range(GROUP_SIZE):
            ledger.executions.completed += 1
        assert ledger.remaining
        ledger.end("kept")
    return (process_time() - started) / SAMPLES
