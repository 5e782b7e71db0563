from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import anyio
import anyio.from_thread
import anyio.to_process
import anyio.to_thread
import pytest

from eventbus.imports import LoadError
from eventbus.testing import virtual_time

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

REAL_LIMIT = 60.0
"""Real seconds that a thread waits at most before its test fails: far beyond any, and not waited for when it passes."""


async def test_an_hour_passes_at_once() -> None:
    start, real_start = anyio.current_time(), time.monotonic()
    await anyio.sleep(3600)
    assert anyio.current_time() - start == 3600
    assert time.monotonic() - real_start < 600


async def test_starts_at_zero() -> None:
    assert anyio.current_time() == 0


async def test_a_thousand_sleepers_wake_in_order() -> None:
    woken: list[float] = []

    async def sleep(seconds: float) -> None:
        await anyio.sleep(seconds)
        assert anyio.current_time() == pytest.approx(seconds)
        woken.append(seconds)

    delays = [(i * 7919 % 1000 + 1) * 0.1 for i in range(1000)]
    async with anyio.create_task_group() as tasks:
        for delay in delays:
            tasks.start_soon(sleep, delay)
    assert woken == sorted(delays)


async def test_a_timeout_fires_at_its_deadline() -> None:
    with pytest.raises(TimeoutError):
        with anyio.fail_after(30):
            await anyio.sleep_forever()
    assert anyio.current_time() == 30


async def test_work_that_is_ready_goes_before_the_clock() -> None:
    with anyio.fail_after(0.001):
        for _ in range(1000):
            await anyio.lowlevel.checkpoint()
    assert anyio.current_time() == 0


async def test_a_task_can_be_cancelled() -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.sleep, 3600)
        await anyio.sleep(5)
        tasks.cancel_scope.cancel()
    assert anyio.current_time() == 5


async def test_waiting_until_all_tasks_are_blocked_goes_before_the_clock() -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.sleep, 3600)
        await anyio.wait_all_tasks_blocked()
        assert anyio.current_time() == 0
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("own_limiter", [False, True])
async def test_stands_still_while_a_thread_works(own_limiter: bool) -> None:
    release = threading.Event()
    timer = threading.Timer(0.2, release.set)
    timer.start()
    limiter = anyio.CapacityLimiter(1) if own_limiter else None
    with anyio.fail_after(30):
        assert await anyio.to_thread.run_sync(release.wait, REAL_LIMIT, limiter=limiter)
    assert anyio.current_time() == 0
    timer.join()


async def test_moves_on_when_the_thread_is_done() -> None:
    for _ in range(100):
        before = anyio.current_time()
        await anyio.to_thread.run_sync(int)
        assert anyio.current_time() == before
        await anyio.sleep(1)
    assert anyio.current_time() == 100


async def test_a_sleeper_beside_a_thread_waits_for_it() -> None:
    release = threading.Event()
    order: list[str] = []

    async def work() -> None:
        await anyio.to_thread.run_sync(release.wait, REAL_LIMIT)
        order.append("thread")

    async def sleep() -> None:
        await anyio.sleep(1)
        order.append("sleeper")

    timer = threading.Timer(0.1, release.set)
    timer.start()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        tasks.start_soon(sleep)
    assert order == ["thread", "sleeper"]
    timer.join()


async def test_a_thread_can_be_abandoned() -> None:
    started, release = anyio.Event(), threading.Event()

    def work() -> None:
        anyio.from_thread.run_sync(started.set)
        release.wait(REAL_LIMIT)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(anyio.to_thread.run_sync, work, abandon_on_cancel=True))
        await started.wait()
        tasks.cancel_scope.cancel()
    release.set()
    await anyio.sleep(10)
    assert anyio.current_time() == 10


@pytest.mark.parametrize("output", [subprocess.PIPE, subprocess.DEVNULL])
async def test_stands_still_while_a_process_runs(output: int) -> None:
    with anyio.fail_after(30):
        await anyio.run_process([sys.executable, "-c", "import time; time.sleep(0.2)"], stdout=output, stderr=output)
    assert anyio.current_time() == 0


async def test_stands_still_while_a_shell_command_runs() -> None:
    with anyio.fail_after(30):
        assert (await anyio.run_process("sleep 0.1; echo done")).stdout == b"done\n"
    assert anyio.current_time() == 0


async def test_stands_still_while_a_socket_is_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        async with await anyio.connect_tcp(*server.getsockname()) as stream:
            peer, _ = server.accept()
            timer = threading.Timer(0.2, peer.send, [b"x"])
            timer.start()
            with anyio.fail_after(30):
                assert await stream.receive() == b"x"
            assert anyio.current_time() == 0
            await anyio.sleep(10)  # an open socket that nobody reads holds nothing
            assert anyio.current_time() == 10
            timer.join()
            peer.close()


def test_stands_still_while_an_executor_works() -> None:
    async def main() -> float:
        release = threading.Event()
        timer = threading.Timer(0.2, release.set)
        timer.start()
        async with asyncio.timeout(30):
            assert await asyncio.to_thread(release.wait, REAL_LIMIT)
        timer.join()
        return asyncio.get_running_loop().time()

    assert anyio.run(main, **virtual_time("asyncio")) == 0


def test_an_executor_that_is_slow_to_stop_is_waited_for() -> None:
    done = threading.Event()

    def work() -> None:
        time.sleep(0.1)
        done.set()

    async def main() -> None:
        asyncio.get_running_loop().run_in_executor(None, work)

    anyio.run(main, **virtual_time("asyncio"))
    assert done.is_set()


def test_refuses_worker_processes_that_would_stop_the_clock() -> None:
    with pytest.raises(RuntimeError, match=r"anyio\.to_process keeps the pipes .* use run_in_executor"):
        anyio.run(anyio.to_process.run_sync, os.getpid, **virtual_time("asyncio"))


def test_worker_processes_of_an_executor_are_waited_for() -> None:
    async def main() -> float:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool, anyio.fail_after(30):
            assert await asyncio.get_running_loop().run_in_executor(pool, os.getpid) != os.getpid()
            await anyio.sleep(10)
        return anyio.current_time()

    assert anyio.run(main, **virtual_time("asyncio")) == 10


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_gives_the_arguments_of_run(backend: str) -> None:
    async def main() -> float:
        await anyio.sleep(1e6)
        return anyio.current_time()

    assert anyio.run(main, **virtual_time(backend)) == 1e6


def test_refuses_another_backend() -> None:
    with pytest.raises(ValueError, match="no virtual time on 'curio': choose 'asyncio' or 'trio'"):
        virtual_time("curio")


def test_names_the_extra_when_trio_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trio.testing", None)
    with pytest.raises(LoadError, match=r"trio is not installed: pip install 'rolloutbus\[trio\]'"):
        virtual_time("trio")
