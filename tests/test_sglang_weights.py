"""Weight updates that a worker does not take in time: asked without a network, so that time is virtual."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from functools import partial
from inspect import isawaitable
from types import TracebackType
from typing import Self
from urllib.parse import parse_qsl, urlsplit

import anyio
import pytest
from aiohttp import web
from anyio import current_time

from backends.sglang import RequestRefused, SGLangEngine, WeightUpdate, WorkersUnavailable
from backends.sglang.client import answer_error
from backends.sglang.fleet import CALL_SECONDS, MEMORY_SECONDS, STEP_SECONDS
from backends.sglang.workers import Worker
from eventbus.testing import virtual_time
from tests.sglang_fake import FakeWorker, Received

HOUR = 3600.0
EVERYTHING = "*"
"""In place of a path."""


class InMemory:
    """The client of an engine. What is in `hangs` is answered when its event is set."""

    def __init__(self, *workers: FakeWorker) -> None:
        self.workers = {worker.url: worker for worker in workers}
        self.hangs: dict[tuple[str, str], anyio.Event] = {}
        """By address and path."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def get(self, url: str) -> bytes:
        return await self.post(url, b"{}")

    async def post(self, url: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
        parts = urlsplit(url)
        address, path, query = f"{parts.scheme}://{parts.netloc}", parts.path, dict(parse_qsl(parts.query))
        worker = self.workers[address]
        worker.received.append(Received(path, json.loads(body), {}))
        for name in (path, EVERYTHING):
            if (answered := self.hangs.get((address, name))) is not None:
                await answered.wait()
        await anyio.sleep(0)
        if path in worker.refused:
            status, text = worker.refused[path]
            raise answer_error(url, status, text.encode())
        answer = worker._endpoints()[path](json.loads(body) | query)
        if isawaitable(answer):
            answer = await answer
        if not isinstance(answer, web.Response):
            return json.dumps(answer).encode()
        assert isinstance(answer.body, bytes)
        if answer.status >= 300:
            raise answer_error(url, answer.status, answer.body)
        return answer.body

    def hang(self, worker: FakeWorker, path: str) -> anyio.Event:
        event = self.hangs[worker.url, path] = anyio.Event()
        return event


def in_virtual_time(
    test: Callable[[SGLangEngine, InMemory, FakeWorker, FakeWorker], Awaitable[None]],
) -> Callable[[], None]:
    """With an engine on two workers."""

    async def main() -> None:
        first, second = FakeWorker(), FakeWorker()
        first.port, second.port = 1, 2
        engine = SGLangEngine(urls=[first.url, second.url], backoff=1.0)
        client = InMemory(first, second)
        engine._fleet.client = client  # type: ignore[assignment]
        async with engine:
            await test(engine, client, first, second)

    return lambda: anyio.run(main, **virtual_time("asyncio"))


async def from_disk(update: WeightUpdate) -> None:
    await update.from_disk("/checkpoints/7")


async def from_distributed(update: WeightUpdate) -> None:
    await update.from_distributed(["a"], ["float32"], [[2, 3]])


async def from_tensors(update: WeightUpdate) -> None:
    await update.from_tensors(["aGk="])


CALLS = pytest.mark.parametrize(
    ("bring", "path"),
    [
        (from_disk, "/update_weights_from_disk"),
        (from_distributed, "/update_weights_from_distributed"),
        (from_tensors, "/update_weights_from_tensor"),
    ],
)


def state(engine: SGLangEngine, fake: FakeWorker) -> Worker:
    [worker] = [worker for worker in engine._fleet.workers if worker.url == fake.url]
    return worker


@CALLS
def test_a_worker_that_hangs_in_an_update_is_left_out(
    bring: Callable[[WeightUpdate], Awaitable[None]], path: str, caplog: pytest.LogCaptureFixture
) -> None:
    @in_virtual_time
    async def check(engine: SGLangEngine, client: InMemory, hung: FakeWorker, good: FakeWorker) -> None:
        missed: list[str] = []
        engine.on_weights_updated.append(lambda missed_by, **_: missed.extend(missed_by))
        client.hang(hung, path)
        async with engine.updating_weights("7") as update:
            await bring(update)
        assert current_time() == 1800.0
        assert engine.weight_version == good.weight_version == "7"
        assert (good.paused, good.updating, hung.paused, hung.updating) == (None, False, None, False)
        assert missed == [hung.url]
        assert state(engine, hung).away
        assert not state(engine, good).away
        assert f"worker {hung.url} is left out: {hung.url}{path}: no answer in 1800 s" in caplog.messages

    check()


@CALLS
def test_an_update_in_which_all_hang_fails_and_all_go_on(
    bring: Callable[[WeightUpdate], Awaitable[None]], path: str
) -> None:
    @in_virtual_time
    async def check(engine: SGLangEngine, client: InMemory, *workers: FakeWorker) -> None:
        for worker in workers:
            client.hang(worker, path)
        with pytest.raises(WorkersUnavailable, match=f"127.0.0.1:1{path}: no answer in 30 s; .*:2{path}: no answer"):
            async with engine.updating_weights("7", timeout=30.0) as update:
                await bring(update)
        assert current_time() == 30.0
        assert engine.weight_version is None
        assert [(worker.paused, worker.updating, worker.weight_version) for worker in workers] == [
            (None, False, "default")
        ] * 2

    check()


@pytest.mark.parametrize("timeout", [None, 20 * HOUR])
def test_a_worker_may_take_as_long_as_it_is_given(timeout: float | None) -> None:
    @in_virtual_time
    async def check(engine: SGLangEngine, client: InMemory, *workers: FakeWorker) -> None:
        loaded = client.hang(workers[0], "/update_weights_from_disk")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.update_weights_from_disk, "/checkpoints/7", "7", "retract", timeout)
            await anyio.sleep(10 * HOUR)
            assert [worker.paused for worker in workers] == ["retract", "retract"]
            loaded.set()
        assert current_time() == 10 * HOUR
        assert [(worker.paused, worker.weight_version) for worker in workers] == [(None, "7")] * 2
        assert not any(worker.away for worker in engine._fleet.workers)

    check()


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_no_time_at_all_is_refused(timeout: float) -> None:
    @in_virtual_time
    async def check(engine: SGLangEngine, client: InMemory, *workers: FakeWorker) -> None:
        with pytest.raises(ValueError, match=f"updating_weights: timeout is {timeout}, it must be more than 0 seconds"):
            await engine.update_weights_from_disk("/checkpoints/7", "7", timeout=timeout)
        assert [worker.received for worker in workers] == [[], []]

    check()


INIT = "/init_weights_update_group"


def test_a_process_group_that_a_worker_does_not_join_in_time() -> None:
    @in_virtual_time
    async def check(engine: SGLangEngine, client: InMemory, hung: FakeWorker, good: FakeWorker) -> None:
        client.hang(hung, INIT)
        with pytest.raises(WorkersUnavailable, match=f"127.0.0.1:1{INIT}: no answer in 300 s$"):
            await engine.init_weights_update_group("10.0.0.1", 29500, 3)
        assert current_time() == 300.0
        assert (hung.groups, good.groups) == (set(), {"weight_update_group"})

    check()


def test_a_process_group_that_a_worker_refuses() -> None:
    @in_virtual_time
    async def check(engine: SGLangEngine, client: InMemory, refuses: FakeWorker, waits: FakeWorker) -> None:
        refuses.refused[INIT] = (400, "no such network interface")
        client.hang(waits, INIT)
        with pytest.raises(RequestRefused, match=f"no such network interface; .*:2{INIT}: no answer in 20 s"):
            await engine.init_weights_update_group("10.0.0.1", 29500, 3, timeout=20.0)

    check()


def test_a_process_group_may_take_as_long_as_it_is_given() -> None:
    @in_virtual_time
    async def check(engine: SGLangEngine, client: InMemory, *workers: FakeWorker) -> None:
        joined = client.hang(workers[0], INIT)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(engine.init_weights_update_group, "10.0.0.1", 29500, 3, timeout=None))
            await anyio.sleep(10 * HOUR)
            joined.set()
        assert current_time() == 10 * HOUR
        for timeout in (0, -1.0, float("nan")):
            with pytest.raises(ValueError, match=f"init_weights_update_group: timeout is {timeout}, it must be more"):
                await engine.init_weights_update_group("10.0.0.1", 29500, 3, timeout=timeout)

    check()


@pytest.mark.parametrize(
    ("call", "path", "seconds"),
    [
        (SGLangEngine.destroy_weights_update_group, "/destroy_weights_update_group", STEP_SECONDS),
        (SGLangEngine.release_memory, "/release_memory_occupation", MEMORY_SECONDS),
        (SGLangEngine.resume_memory, "/resume_memory_occupation", MEMORY_SECONDS),
    ],
)
def test_a_worker_that_hangs_holds_up_no_call_for_ever(
    call: Callable[[SGLangEngine], Awaitable[None]], path: str, seconds: float
) -> None:
    @in_virtual_time
    async def check(engine: SGLangEngine, client: InMemory, hung: FakeWorker, good: FakeWorker) -> None:
        good.groups.add("weight_update_group")
        client.hang(hung, path)
        with pytest.raises(WorkersUnavailable, match=f"127.0.0.1:1{path}: no answer in {seconds:g} s$"):
            await call(engine)
        assert current_time() == seconds
        assert good.received[-1].path == path

    check()


@pytest.mark.parametrize("fails", [False, True])
def test_a_worker_that_answers_nothing_does_not_hold_up_an_update(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    @in_virtual_time
    async def check(engine: SGLangEngine, client: InMemory, hung: FakeWorker, good: FakeWorker) -> None:
        client.hang(hung, EVERYTHING)
        with pytest.raises(ZeroDivisionError) if fails else nullcontext():
            async with engine.updating_weights("7") as update:
                await from_tensors(update)
                if fails:
                    raise ZeroDivisionError
        assert current_time() == STEP_SECONDS + CALL_SECONDS
        assert (good.paused, good.updating) == (None, False)
        assert not engine._fleet.held
        assert state(engine, hung).away
        assert not state(engine, good).away
        assert f"worker {hung.url} is left out: {hung.url}/pause_generation: no answer in 60 s" in caplog.messages
        told = f"after a weight update that failed: {hung.url}/continue_generation: no answer in 10 s"
        assert (told in caplog.messages) is fails

    check()


def test_a_worker_that_took_a_part_of_the_weights_is_not_taken_for_one_that_has_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @in_virtual_time
    async def check(engine: SGLangEngine, client: InMemory, hung: FakeWorker, good: FakeWorker) -> None:
        async with engine.updating_weights("7") as update:
            await from_tensors(update)
            client.hang(hung, "/update_weights_from_tensor")
            await from_tensors(update)
        for _ in range(5):
            await anyio.sleep(60.0)
            engine._fleet.workers.look()
        assert state(engine, hung).away
        assert f"worker {hung.url} has the weights '7 (in part)', not '7'" in caplog.text
        client.hangs.clear()
        async with engine.updating_weights("8") as update:
            await from_tensors(update)
        assert hung.weight_version == good.weight_version == "8"
        assert not state(engine, hung).away

    check()


def test_an_update_that_fails_in_the_middle_leaves_workers_that_say_so() -> None:
    @in_virtual_time
    async def check(engine: SGLangEngine, client: InMemory, *workers: FakeWorker) -> None:
        with pytest.raises(ZeroDivisionError):
            async with engine.updating_weights("7") as update:
                await from_tensors(update)
                raise ZeroDivisionError
        assert [worker.weight_version for worker in workers] == ["7 (in part)"] * 2
        assert engine.weight_version is None

    check()


def test_a_worker_that_comes_back_and_hangs_as_it_loads_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    @in_virtual_time
    async def check(engine: SGLangEngine, client: InMemory, hung: FakeWorker, good: FakeWorker) -> None:
        client.hang(hung, "/update_weights_from_disk")
        await engine.update_weights_from_disk("/checkpoints/7", "7", timeout=100.0)
        await anyio.sleep(3.0)
        engine._fleet.workers.look()
        await anyio.sleep(101.0)
        assert f"worker {hung.url} is not back: {hung.url}/update_weights_from_disk: no answer in 100 s" in caplog.text
        client.hangs.clear()
        await anyio.sleep(60.0)
        engine._fleet.workers.look()
        await anyio.sleep(1.0)
        assert (hung.weights, hung.weight_version) == ("/checkpoints/7", "7")
        assert not state(engine, hung).away

    check()
