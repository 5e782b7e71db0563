"""The pipeline from synchronous code."""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Any

import anyio
import pytest

from eventbus.batching import BatchSpec, RolloutExhausted
from eventbus.group import Batch, TrainResult
from eventbus.imports import LoadError
from eventbus.pipeline import Pipeline
from middleware import Generate
from tests.streams import Log, endless, engine, some

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


class Trainer:
    def __init__(self) -> None:
        self.seen: list[int] = []

    async def train(self, batch: Batch) -> TrainResult:
        await anyio.lowlevel.checkpoint()
        self.seen.append(batch.rollout_id)
        return TrainResult({"loss": 1.0})


def plain(**options: Any) -> Pipeline:
    return Pipeline(endless(), [Generate(engine())], BatchSpec(2), **options)


@BACKENDS
def test_batches_come_without_a_loop(backend: str) -> None:
    trainer, log = Trainer(), Log("batch_trained")
    with plain(observers=[log]).sync(backend) as stream:
        for batch in stream.rollouts(stop=3):
            batch.trained(stream.call(trainer.train, batch))
    assert trainer.seen == [0, 1, 2]
    assert [event.metrics for event in log.events] == [{"loss": 1.0}] * 3


@BACKENDS
def test_observers_are_called_in_one_thread_whoever_acknowledges(backend: str) -> None:
    threads: set[int] = set()

    class Watcher:
        kinds = ("rollout_started", "batch_trained")

        def observe(self, event: Any) -> None:
            threads.add(get_ident())

    with plain(observers=[Watcher()]).sync(backend) as stream:
        batches = stream.rollouts(stop=3)
        next(batches).trained(TrainResult({"loss": 1.0}))
        stream.call(next(batches).trained)
        next(batches)  # which asking for the next one acknowledges
        assert next(batches, None) is None
    assert len(threads) == 1
    assert get_ident() not in threads


@BACKENDS
def test_evaluation_comes_without_a_loop(backend: str) -> None:
    with plain().sync(backend) as stream:
        assert len(stream.evaluate(some(3, 1), rollout_id=7).groups) == 3


@BACKENDS
def test_an_error_of_the_body_leaves_as_itself(backend: str) -> None:
    with pytest.raises(ZeroDivisionError), plain().sync(backend) as stream:
        next(stream.rollouts())
        raise ZeroDivisionError


@BACKENDS
def test_an_error_of_the_rollout_reaches_the_loop(backend: str) -> None:
    pipeline = Pipeline(some(1), [Generate(engine())], BatchSpec(2))
    with pipeline.sync(backend) as stream, pytest.raises(RolloutExhausted):
        next(stream.rollouts())


def test_break_leaves_cleanly() -> None:
    with plain().sync() as stream:
        for _ in stream.rollouts(ahead=2):
            break


def test_inside_a_running_loop_it_says_what_to_use() -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match=r"runs in this thread: use `async with pipeline"), plain().sync():
            pass

    anyio.run(main)
    anyio.run(main, backend="trio")


def test_outside_of_with_it_says_how_to_enter() -> None:
    with pytest.raises(RuntimeError, match=r"with pipeline.sync\(\) as stream"):
        plain().sync().call(print)


def test_wrong_numbers_are_refused_at_once() -> None:
    with plain().sync() as stream, pytest.raises(ValueError, match="ahead=-1: must be at least 0"):
        stream.rollouts(ahead=-1)


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="backend='curio': choose 'asyncio' or 'trio'"):
        plain().sync("curio")


def test_missing_trio_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trio", None)
    with pytest.raises(LoadError, match=r"pip install 'rolloutbus\[trio\]'"), plain().sync("trio"):
        pass


def test_coroutine_in_place_of_a_function() -> None:
    async def train() -> None: ...

    with plain().sync() as stream, pytest.raises(TypeError, match=r"stream\.call\(train, batch\), not train\(batch\)"):
        stream.call(train())  # type: ignore[call-overload]


@BACKENDS
def test_it_can_be_entered_again(backend: str) -> None:
    stream = plain().sync(backend)
    for _ in range(2):
        with stream:
            assert next(stream.rollouts()).rollout_id == 0
