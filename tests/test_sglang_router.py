"""`SGLangRouter`: its life, its workers, its errors; on a fake process and on the real sglang-router."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
from aiohttp import web

import backends.sglang.router as module
from backends.sglang import router_process
from backends.sglang.router import CircuitBreaker, RouterError, SGLangRouter, lost_by_router
from backends.sglang.router_process import ROUTER_VERSION
from eventbus.config import ConfigError, build
from tests.sglang_fake import FakeWorker, Status

ROOT = Path(__file__).parent.parent
REAL_PYTHON = os.environ.get("ROLLOUTBUS_SGLANG_PYTHON")
LOG = "rolloutbus.sglang"
NOWHERE = "http://127.0.0.1:9"
"""Nobody listens there."""
WORKERS_ONLY = frozenset(
    "/abort_request /pause_generation /continue_generation /update_weights_from_disk /update_weights_from_distributed "  # noqa: SIM905
    "/update_weights_from_tensor /update_weights_from_ipc /init_weights_update_group /destroy_weights_update_group "
    "/begin_weight_update /end_weight_update /update_weight_version /get_weights_by_name /weights_checker "
    "/release_memory_occupation /resume_memory_occupation /model_info /server_info /ready /ping /v1/loads /encode "
    "/open_session /close_session /start_profile".split()
)
"""Paths of a worker that a router does not have. `/flush_cache` it passes to all."""

real = [
    pytest.mark.sglang,
    pytest.mark.skipif(
        REAL_PYTHON is None, reason="ROLLOUTBUS_SGLANG_PYTHON names no interpreter that has sglang-router"
    ),
]


def on_the_real_router(test: Callable[..., Any]) -> Any:
    for mark in (pytest.mark.asyncio, *real):
        test = mark(test)
    return test


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts the fake in the place of sglang-router, with faults."""
    package = tmp_path / "site" / "sglang_router"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_router.py").write_text("from tests.sglang_router_fake import launch_router")
    (package / "router_args.py").write_text("from tests.sglang_router_fake import RouterArgs")
    about = tmp_path / "site" / "sglang_router-0.dist-info" / "METADATA"
    about.parent.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), str(ROOT)]))

    def configure(version: str = ROUTER_VERSION, **faults: Any) -> None:
        about.write_text(f"Metadata-Version: 2.1\nName: sglang-router\nVersion: {version}\n")
        monkeypatch.setenv("FAKE_ROUTER", json.dumps(faults))

    configure()
    return configure


@pytest.fixture(params=["fake", pytest.param("real", marks=real)])
def python(request: pytest.FixtureRequest) -> str:
    """The interpreter of a router, for what holds for both."""
    if request.param == "fake":
        request.getfixturevalue("fake")
        return sys.executable
    assert REAL_PYTHON is not None
    return REAL_PYTHON


@asynccontextmanager
async def three_workers() -> AsyncIterator[list[FakeWorker]]:
    async with FakeWorker() as a, FakeWorker() as b, FakeWorker() as c:
        yield [a, b, c]


def pid_of(router: SGLangRouter) -> int:
    assert router._child is not None
    return router._child.process.pid


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def ask(method: str, url: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, json=body, headers=headers) as response,
    ):
        return response.status, await response.text()


async def generate(router: SGLangRouter, rid: str = "r", **fields: Any) -> tuple[int, str]:
    body = {"rid": rid, "input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    return await ask("POST", f"{router.url}/generate", body | fields)


@contextmanager
def heard(text: str) -> Iterator[asyncio.Event]:
    """Set when the log says so."""
    event = asyncio.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if text in record.getMessage():
                event.set()

    listener = Listener()
    router_process.logger.addHandler(listener)
    try:
        yield event
    finally:
        router_process.logger.removeHandler(listener)


# What it takes


def test_needs_an_address_or_workers() -> None:
    with pytest.raises(TypeError, match="give the url of a router that runs, or the workers"):
        SGLangRouter()


def test_a_router_that_runs_has_its_own_settings() -> None:
    with pytest.raises(TypeError, match=f"{NOWHERE} runs already: policy, retries, workers cannot be set here"):
        SGLangRouter(NOWHERE, workers=[], policy="random", retries=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": ["127.0.0.1:30000"]}, "'127.0.0.1:30000' is no address of a server, such as http://127.0.0.1:"),
        ({"workers": [NOWHERE, NOWHERE + "/"]}, f"the worker {NOWHERE} is named twice"),
        ({"policy": "prefix_hash"}, "policy is 'prefix_hash', it must be one of cache_aware, round_robin"),
        ({"log_level": "loud"}, "log_level is 'loud', it must be one of debug, info, warn, error"),
        ({"port": 0}, "port is 0, it must be a whole number, at least 1"),
        ({"port": 70000}, "port is 70000, it must be at most 65535"),
        ({"host": "nowhere"}, "host is 'nowhere', it must be an IP address of this machine"),
        ({"retries": -1}, "retries is -1, it must be a whole number, at least 0"),
        ({"request_timeout": 1.5}, "request_timeout is 1.5, it must be a whole number"),
        ({"health_interval": 0}, "health_interval is 0, it must be"),
        ({"start_timeout": 0.0}, "start_timeout is 0.0, it must be more than 0"),
        ({"options": {"policy": "random"}}, "options holds policy, which has a parameter of its own"),
    ],
)
def test_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SGLangRouter(**{"workers": [], **arguments})


def test_refuses_an_address_that_is_none() -> None:
    with pytest.raises(ValueError, match="'localhost:30000' is no address"):
        SGLangRouter("localhost:30000")


class Holder:
    """A stage with a router."""

    def __init__(self, router: SGLangRouter) -> None:
        self.router = router

    def __call__(self, sample: object) -> None: ...


def configured(router: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> SGLangRouter:
    made: list[SGLangRouter] = []
    monkeypatch.setattr(Holder, "__init__", lambda self, router: made.append(router))
    stage = {"use": f"{__name__}:Holder", "router": {"use": f"{module.__name__}:SGLangRouter", **router}}
    prompts = {"path": "p.jsonl", "group_size": 1, "prompt_key": "q"}
    build({"prompts": prompts, "batch": {"groups": 1}, "stages": [stage]}, Path("/base"))
    return made[0]


def test_a_file_can_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    breaker = {"failures": 3, "seconds": 20}
    router = configured({"workers": [NOWHERE], "port": 30100, "circuit_breaker": breaker}, monkeypatch)
    assert router.url == "http://127.0.0.1:30100"
    assert router._options["cb_timeout_duration_secs"] == 20


def test_a_mistake_in_a_file_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"router\.circuit_breaker\.failures: .*>= 1"):
        configured({"workers": [], "circuit_breaker": {"failures": 0}}, monkeypatch)


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:80"), ("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80")],
)
def test_where_it_is_asked(host: str, url: str) -> None:
    assert SGLangRouter(workers=[], host=host, port=80).url == url


# What it does to requests


def test_says_what_a_router_would_lose() -> None:
    sampling = {"temperature": 1.0, "stop_regex": "x", "top_p": 0.9, "logit_bias": {}}
    request = {"input_ids": [1], "return_logprob": True, "return_routed_experts": True, "sampling_params": sampling}
    assert lost_by_router(request) == [
        "return_routed_experts", "sampling_params.stop_regex", "sampling_params.logit_bias"
    ]  # fmt: skip
    assert lost_by_router({"text": "x", "rid": "r"}) == []


# Its life


@pytest.mark.asyncio
async def test_starts_with_its_workers_and_ends(python: str) -> None:
    async with FakeWorker() as a, FakeWorker() as b:
        async with SGLangRouter(workers=[a.url, b.url + "/"], python=python) as router:
            assert await router.workers() == sorted([a.url, b.url])
            await router.check()
            pid = pid_of(router)
        assert not runs(pid)


@pytest.mark.asyncio
async def test_starts_without_workers_and_again(python: str) -> None:
    router = SGLangRouter(workers=[], python=python)
    for _ in range(2):
        async with router:
            assert await router.workers() == []


@pytest.mark.asyncio
async def test_ends_with_the_outermost_user(fake: Callable[..., None]) -> None:
    async with SGLangRouter(workers=[]) as router:
        async with router, anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(router.__aenter__)
        pid = pid_of(router)
        for _ in range(2):
            await router.__aexit__(None, None, None)
        assert await router.workers() == []
    assert not runs(pid)


@pytest.mark.asyncio
async def test_ends_when_the_body_raises(python: str) -> None:
    with pytest.raises(ZeroDivisionError):
        async with SGLangRouter(workers=[], python=python) as router:
            pid = pid_of(router)
            raise ZeroDivisionError
    assert not runs(pid)


@pytest.mark.asyncio
async def test_ends_when_the_body_is_cancelled(python: str) -> None:
    with anyio.CancelScope() as scope:
        async with SGLangRouter(workers=[], python=python) as router:
            pid = pid_of(router)
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert not runs(pid)


@pytest.mark.asyncio
async def test_ends_when_its_start_is_cancelled(fake: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    fake(mute=True)
    with heard("pid ") as started, anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(SGLangRouter(workers=[]).__aenter__)
            await started.wait()
            scope.cancel()
    assert not runs(int(caplog.messages[-1].rpartition("pid ")[2]))


@pytest.mark.asyncio
async def test_is_killed_at_once_when_its_end_is_cancelled(
    fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(deaf=True)
    monkeypatch.setattr(router_process, "GRACE_SECONDS", 1000)
    router = SGLangRouter(workers=[])
    await router.__aenter__()
    child = router._child
    assert child is not None
    with heard("TERM") as told:
        ending = asyncio.create_task(router.__aexit__(None, None, None))
        await told.wait()
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
    assert child.process.returncode == -signal.SIGKILL


@pytest.mark.asyncio
async def test_one_that_does_not_hear_is_killed(fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    fake(deaf=True)
    monkeypatch.setattr(router_process, "GRACE_SECONDS", 0.01)
    async with SGLangRouter(workers=[]) as router:
        child = router._child
    assert child is not None
    assert child.process.returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process that its parent has ended")
def test_ends_with_a_program_that_is_killed(python: str) -> None:
    code = f"""
import asyncio
from backends.sglang.router import SGLangRouter
async def main():
    async with SGLangRouter(workers=[], python={python!r}) as router:
        print(router._child.process.pid, flush=True)
        await asyncio.get_running_loop().create_future()
asyncio.run(main())
"""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    program = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
    )
    with program:
        assert program.stdout is not None
        process = os.pidfd_open(int(program.stdout.readline()))
        program.kill()
    assert select.select([process], [], [], 30)[0]
    os.close(process)


# Errors of a start


@pytest.mark.asyncio
async def test_a_port_that_is_taken(python: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RouterError, match=rf"at 127\.0\.0\.1, port {port}: Address already in use; choose another"):
            async with SGLangRouter(workers=[], port=port, python=python):
                pass


@pytest.mark.asyncio
async def test_an_interpreter_that_is_missing() -> None:
    with pytest.raises(RouterError, match="cannot be started: python is '/no/such/python': No such file"):
        async with SGLangRouter(workers=[], python="/no/such/python"):
            pass


@pytest.mark.asyncio
async def test_an_environment_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(RouterError) as caught:
        async with SGLangRouter(workers=[], python=sys.executable):
            pass
    assert str(caught.value) == (
        f"sglang-router is not installed for {sys.executable}: {sys.executable} -m pip install sglang-router, or name "
        "another interpreter by python="
    )


@pytest.mark.asyncio
async def test_an_option_that_this_version_does_not_know(python: str) -> None:
    with pytest.raises(RouterError) as caught:
        async with SGLangRouter(workers=[], options={"cache_treshold": 0.5}, python=python):
            pass
    assert str(caught.value) == (
        f"sglang-router {ROUTER_VERSION} has no option 'cache_treshold'; did you mean 'cache_threshold'?"
    )


@pytest.mark.asyncio
async def test_a_policy_that_this_version_does_not_know(fake: Callable[..., None]) -> None:
    fake(version="0.1.9", policies=["random"])
    with pytest.raises(RouterError, match=r"^sglang-router 0\.1\.9 has no policy 'manual'$"):
        async with SGLangRouter(workers=[], policy="manual"):
            pass


@pytest.mark.asyncio
async def test_one_that_ends_at_once_shows_its_last_lines(fake: Callable[..., None]) -> None:
    fake(crash="no space left", says=[f"line {n}" for n in range(100)])
    with pytest.raises(RouterError) as caught:
        async with SGLangRouter(workers=[]):
            pass
    first, *lines = str(caught.value).splitlines()
    assert first == "the router ended with exit code 1; the last lines that it wrote:"
    assert lines[-1] == "  RuntimeError: no space left"
    assert len(lines) == 20


@pytest.mark.asyncio
async def test_one_that_never_listens(fake: Callable[..., None]) -> None:
    fake(mute=True)
    router = SGLangRouter(workers=[], start_timeout=0.5)
    with pytest.raises(RouterError, match=rf"^the router does not answer at {router.url} after 0\.5 s"):
        async with router:
            pass
    assert router._child is None


@pytest.mark.asyncio
async def test_a_worker_that_does_not_answer_is_named(python: str) -> None:
    seconds = 5 if python == sys.executable else 45  # it has to be up itself by then
    async with FakeWorker() as worker:
        with pytest.raises(RouterError, match=f"^the router has no answer from {NOWHERE} after {seconds} s"):
            async with SGLangRouter(workers=[worker.url, NOWHERE], start_timeout=seconds, python=python):
                pass


# What it writes


@pytest.mark.asyncio
async def test_what_it_writes_goes_to_the_log(fake: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    line = "2026-11-29 21:01:37  {} smg::core: /home/x/core.rs:233: something"
    fake(says=[line.format("INFO"), line.format("ERROR"), "  and more of it"], shouts=200_000)
    caplog.set_level(logging.DEBUG, LOG)
    async with SGLangRouter(workers=[]):
        pass
    first, *records = [(record.levelno, record.getMessage()) for record in caplog.records if record.name == LOG]
    assert first[1].startswith("router: fake: pid ")
    assert records[:3] == [
        (logging.INFO, "router: smg::core: something"),
        (logging.ERROR, "router: smg::core: something"),
        (logging.ERROR, "router:   and more of it"),
    ]
    assert "".join(text.removeprefix("router: ") for _, text in records[3:]) == "x" * 200_000


@pytest.mark.asyncio
@pytest.mark.parametrize(("version", "warnings"), [("0.9.0", 1), (ROUTER_VERSION, 0)])
async def test_warns_of_another_version(
    fake: Callable[..., None], caplog: pytest.LogCaptureFixture, version: str, warnings: int
) -> None:
    fake(version=version)
    async with SGLangRouter(workers=[]):
        pass
    told = f"sglang-router is {version}; what a router does to requests was observed with {ROUTER_VERSION}"
    assert caplog.messages.count(told) == warnings


@pytest.mark.asyncio
async def test_its_settings_reach_it(fake: Callable[..., None]) -> None:
    async with SGLangRouter(
        workers=[], policy="manual", log_level="error", request_timeout=7, retries=2, health_interval=3,
        circuit_breaker=CircuitBreaker(failures=4, seconds=5), options={"cache_threshold": 0.5},
    ) as router:  # fmt: skip
        arguments = json.loads((await ask("GET", f"{router.url}/arguments"))[1])
    assert arguments["policy"] == "manual"
    assert arguments["log_level"] == "error"
    assert arguments["request_timeout_secs"] == 7
    assert arguments["retry_max_retries"] == 3
    assert arguments["health_check_interval_secs"] == 3
    assert (arguments["cb_failure_threshold"], arguments["cb_timeout_duration_secs"]) == (4, 5)
    assert arguments["cache_threshold"] == 0.5
    assert not arguments["disable_circuit_breaker"]


@pytest.mark.asyncio
async def test_goes_without_a_circuit_breaker(fake: Callable[..., None]) -> None:
    async with SGLangRouter(workers=[], circuit_breaker=False) as router:
        assert json.loads((await ask("GET", f"{router.url}/arguments"))[1])["disable_circuit_breaker"]


# Its end, unasked


@pytest.mark.asyncio
async def test_one_that_ends_while_it_is_used(fake: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    async with SGLangRouter(workers=[]) as router:
        with heard("the router ended") as ended:
            with pytest.raises(aiohttp.ClientError):
                await ask("POST", f"{router.url}/exit", {"code": 3})
            await ended.wait()
        for use in (router.check, router.workers, lambda: router.add(NOWHERE), lambda: router.remove(NOWHERE)):
            with pytest.raises(RouterError, match=r"^the router ended with exit code 3; the last lines") as caught:
                await use()
            assert str(caught.value).endswith("fake: the disk is on fire")
    assert sum("the router ended" in message for message in caplog.messages) == 1


@pytest.mark.asyncio
async def test_one_that_is_killed(python: str) -> None:
    async with SGLangRouter(workers=[], python=python) as router:
        os.kill(pid_of(router), signal.SIGKILL)
        with pytest.raises(RouterError, match=r"^the router was killed by SIGKILL"):
            await router.workers()


@pytest.mark.asyncio
async def test_does_nothing_before_it_is_open() -> None:
    with pytest.raises(RouterError, match="not open: use `async with`"):
        await SGLangRouter(workers=[]).workers()


# Workers


@pytest.mark.asyncio
async def test_workers_come_and_go(python: str) -> None:
    async with three_workers() as (a, b, c), SGLangRouter(workers=[a.url, b.url], python=python) as router:
        await router.remove(b.url)
        assert await router.workers() == [a.url]
        await router.add(c.url)
        await router.add(b.url + "/")
        assert await router.workers() == sorted([a.url, b.url, c.url])


@pytest.mark.asyncio
async def test_a_key_opens_the_router_and_its_workers(python: str, caplog: pytest.LogCaptureFixture) -> None:
    async with FakeWorker(api_key="sesame") as a, FakeWorker(api_key="sesame") as b:
        async with SGLangRouter(workers=[a.url], python=python, api_key="sesame", log_level="debug") as router:
            await router.add(b.url)
            assert await router.workers() == sorted([a.url, b.url])
            await router.remove(a.url)
            async with SGLangRouter(router.url, api_key="sesame") as attached:
                assert await attached.workers() == [b.url]
            with pytest.raises(RouterError, match=r"GET .*/workers: 401"):
                async with SGLangRouter(router.url, api_key="open"):
                    pass
    assert "sesame" not in caplog.text


@pytest.mark.asyncio
async def test_what_it_writes_of_its_key_is_not_shown(
    fake: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    fake(says=["the key is sesame"])
    caplog.set_level(logging.WARNING, LOG)
    with heard("the key is ***") as said:
        async with SGLangRouter(workers=[], api_key="sesame"):
            await said.wait()
    assert "sesame" not in caplog.text


@pytest.mark.asyncio
async def test_adding_one_that_is_there_changes_nothing(python: str) -> None:
    async with FakeWorker() as worker, SGLangRouter(workers=[worker.url], python=python) as router:
        before = await router._list()
        await router.add(worker.url)
        assert await router._list() == before


@pytest.mark.asyncio
async def test_adding_one_that_does_not_answer(python: str) -> None:
    async with SGLangRouter(workers=[], python=python) as router:
        router._start_timeout = 0.3
        with pytest.raises(RouterError, match=f"{NOWHERE} healthy within 0.3 s|did not take the worker {NOWHERE}"):
            await router.add(NOWHERE)
        assert await router.workers() == []


@pytest.mark.asyncio
async def test_adding_one_whose_id_is_not_known_yet(fake: Callable[..., None]) -> None:
    fake(denies=True)
    async with FakeWorker() as worker, SGLangRouter(workers=[]) as router:
        await router.add(worker.url)
        assert await router.workers() == [worker.url]


@pytest.mark.asyncio
async def test_adding_one_that_the_router_does_not_take(fake: Callable[..., None]) -> None:
    fake(fails="it speaks another language")
    async with SGLangRouter(workers=[]) as router:
        with pytest.raises(RouterError, match=f"did not take the worker {NOWHERE}: it speaks another language$"):
            await router.add(NOWHERE)


@pytest.mark.asyncio
async def test_removing_one_that_is_not_there(python: str) -> None:
    async with FakeWorker() as worker, SGLangRouter(workers=[worker.url], python=python) as router:
        with pytest.raises(ValueError, match=f"has no worker {NOWHERE}; it has {worker.url}$"):
            await router.remove(NOWHERE)
        await router.remove(worker.url)
        with pytest.raises(ValueError, match=f"has no worker {worker.url}; it has none$"):
            await router.remove(worker.url)


@pytest.mark.asyncio
async def test_one_that_the_router_does_not_let_go(fake: Callable[..., None]) -> None:
    fake(keeps=True)
    async with FakeWorker() as worker, SGLangRouter(workers=[worker.url]) as router:
        router._start_timeout = 0.3
        with pytest.raises(RouterError, match=rf"did not let go of the worker {worker.url} in 0\.3 s$"):
            await router.remove(worker.url)


@pytest.mark.asyncio
async def test_one_whose_removal_fails(fake: Callable[..., None]) -> None:
    fake(clings="it is dear to me")
    async with FakeWorker() as worker, SGLangRouter(workers=[worker.url]) as router:
        with pytest.raises(RouterError, match=f"did not let go of the worker {worker.url}: it is dear to me$"):
            await router.remove(worker.url)


# One that runs already


@pytest.mark.asyncio
async def test_attaches_and_leaves_it_running(python: str) -> None:
    async with FakeWorker() as worker, SGLangRouter(workers=[worker.url], python=python) as started:
        async with SGLangRouter(started.url + "/") as router:
            assert router.url == started.url
            await router.remove(worker.url)
            await router.add(worker.url)
        assert await started.workers() == [worker.url]


@pytest.mark.asyncio
async def test_nobody_at_the_address() -> None:
    with pytest.raises(RouterError, match=f"^GET {NOWHERE}/workers: Cannot connect"):
        async with SGLangRouter(NOWHERE):
            pass


@pytest.mark.asyncio
async def test_the_address_of_a_worker() -> None:
    async with FakeWorker() as worker:
        with pytest.raises(RouterError, match=f"^{worker.url} answers 404 to GET /workers: it is no sglang-router$"):
            async with SGLangRouter(worker.url):
                pass


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (web.Response(text="hello"), "the router's answer is not understood: .*: hello"),
        (web.Response(status=401, text="who are you"), "GET .*/workers: 401 who are you"),
    ],
)
async def test_an_address_that_answers_something_else(answer: web.Response, message: str) -> None:
    async def handle(request: web.BaseRequest) -> web.Response:
        return answer

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        with pytest.raises(RouterError, match=message):
            async with SGLangRouter(f"http://127.0.0.1:{runner.addresses[0][1]}"):
                pass
    finally:
        await runner.cleanup()


@pytest.mark.asyncio
async def test_one_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(RouterError, match=r"/workers: no answer within 0\.05 s$"):
            async with SGLangRouter(f"http://127.0.0.1:{silent.getsockname()[1]}"):
                pass


# What the real one does


@asynccontextmanager
async def running(*workers: FakeWorker, **settings: Any) -> AsyncIterator[SGLangRouter]:
    assert REAL_PYTHON is not None
    given: dict[str, Any] = {"policy": "round_robin", "log_level": "error", "health_interval": 1} | settings
    async with SGLangRouter(workers=[worker.url for worker in workers], python=REAL_PYTHON, **given) as router:
        yield router


async def until_listed(router: SGLangRouter, *workers: FakeWorker) -> None:
    expected = sorted(worker.url for worker in workers)

    async def listed() -> bool:
        return await router.workers() == expected

    assert await router._until(listed)


def rids(*workers: FakeWorker) -> list[str]:
    return sorted(body["rid"] for worker in workers for body in worker.bodies())


@on_the_real_router
async def test_what_the_real_one_passes_and_loses() -> None:
    passed: dict[str, Any] = {
        "rid": "r", "text": "hi", "input_ids": [5], "input_embeds": [[0.5]], "return_logprob": True,
        "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [3], "return_text_in_logprobs": True,
        "stream": False, "return_hidden_states": True, "session_params": {"id": "x"}, "lora_path": "l", "lora_id": "i",
        "custom_logit_processor": "c", "data_parallel_rank": 0, "priority": 3, "extra_key": "e",
        "return_entropy": True, "log_metrics": False, "no_logs": True, "custom_labels": {"a": "b"},
        "image_data": ["i"], "video_data": ["v"], "audio_data": ["a"], "modalities": ["image"], "model": "fake-model",
        "bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 1, "bootstrap_pair_key": "k",
        "background": True, "conversation_id": "c", "return_bytes": True,
    }  # fmt: skip
    sampling: dict[str, Any] = {
        "max_new_tokens": 3, "stop": ["x"], "stop_token_ids": [7], "temperature": 0.5, "top_p": 0.5, "top_k": 5,
        "min_p": 0.1, "frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1, "min_new_tokens": 1,
        "n": 1, "json_schema": "{}", "regex": "a", "ebnf": "root ::= a", "ignore_eos": True,
        "skip_special_tokens": False, "no_stop_trim": True, "sampling_seed": 1 << 62,
    }  # fmt: skip
    lost: dict[str, Any] = {
        "session_id": "s", "return_sampling_mask": True, "sampling_logprobs_mode": "support", "routing_key": "k",
        "return_routed_experts": True, "routed_experts_start_len": 1, "return_indexer_topk": True, "cache_salt": "c",
        "routed_dp_rank": 0, "return_prompt_token_ids": True, "return_flat_raw_top_logprobs": True,
        "require_reasoning": True, "use_audio_in_video": True, "no_such_field": 1,
    }  # fmt: skip
    lost_sampling: dict[str, Any] = {
        "stop_regex": "a", "beam_width": 2, "structural_tag": "{}", "spaces_between_special_tokens": False,
        "stream_interval": 2, "logit_bias": {"1": 1.0}, "custom_params": {"a": 1}, "watermark": {"a": 1},
    }  # fmt: skip
    request = passed | lost | {"sampling_params": sampling | lost_sampling}
    assert lost_by_router(request) == [*lost, *(f"sampling_params.{name}" for name in lost_sampling)]
    assert passed.keys() | {"sampling_params"} == module._PASSED
    assert sampling.keys() == module._PASSED_SAMPLING
    async with FakeWorker() as worker, running(worker) as router:
        assert (await ask("POST", f"{router.url}/generate", request))[0] == 200
        assert worker.bodies() == [passed | {"sampling_params": sampling}]


@on_the_real_router
async def test_the_real_one_rounds_fractions() -> None:
    async with FakeWorker() as worker, running(worker) as router:
        await generate(router, sampling_params={"temperature": 0.123456789})
        assert worker.bodies()[0]["sampling_params"] == {"temperature": 0.12345679}


@on_the_real_router
async def test_ranks_of_a_worker_are_one_worker() -> None:
    async with FakeWorker(model_info={"dp_size": 2, "tp_size": 2}) as worker:
        async with running(worker, options={"dp_aware": True}) as router:
            assert len(await router._list()) == 2
            assert await router.workers() == [worker.url]
            with pytest.raises(
                RouterError, match=f"did not let go of the worker {worker.url}: .*No workers found with"
            ):
                await router.remove(worker.url)  # a shortcoming of 0.3.2


@on_the_real_router
async def test_what_the_real_one_does_not_know() -> None:
    async with FakeWorker() as worker, running(worker) as router:
        for path in sorted(WORKERS_ONLY):
            for method in ("GET", "POST"):
                assert await ask(method, router.url + path, {}) == (404, ""), path
        assert (await ask("POST", f"{router.url}/flush_cache"))[0] == 200
        assert worker.paths().count("/flush_cache") == 1


@on_the_real_router
async def test_a_value_that_the_real_one_does_not_take() -> None:
    with pytest.raises(RouterError, match=r"(?s)^the router ended with exit code 1; .*'cache_threshold': must be real"):
        async with running(options={"cache_threshold": "much"}):
            pass


@on_the_real_router
async def test_the_real_one_looks_at_workers_that_are_paused() -> None:
    async with FakeWorker() as worker, running(worker):
        worker.refused["/health"] = (503, "paused")
        seen = worker.paths().count("/model_info")
        await worker.until(lambda: worker.paths().count("/model_info") >= seen + 3)


@on_the_real_router
@pytest.mark.parametrize("retries", [0, 2])
async def test_a_worker_dies_in_mid_request(retries: int) -> None:
    async with FakeWorker() as a, FakeWorker() as b, running(a, b, retries=retries) as router:
        a.allow(0)
        b.allow(0)
        async with asyncio.TaskGroup() as tasks:
            replies = [tasks.create_task(generate(router, f"r{n}")) for n in range(2)]
            await a.until(lambda: a.running)
            await b.until(lambda: b.running)
            await b.kill()
            a.allow(None)
        statuses = sorted(reply.result()[0] for reply in replies)
        if retries:
            assert statuses == [200, 200]
            assert rids(a) == ["r0", "r1"]
        else:
            assert statuses == [200, 500]
            assert "call_upstream_request_error" in "".join(reply.result()[1] for reply in replies)
        await until_listed(router, a)
        assert [(await generate(router))[0] for _ in range(3)] == [200, 200, 200]
        await b.start()
        await until_listed(router, a, b)


@on_the_real_router
async def test_adding_a_worker_that_has_come_back() -> None:
    async with FakeWorker() as a, FakeWorker() as b, running(a, b) as router:
        await b.kill()
        await until_listed(router, a)
        await b.start()
        await router.add(b.url)
        assert await router.workers() == sorted([a.url, b.url])


@on_the_real_router
async def test_workers_come_and_go_under_load() -> None:
    async with three_workers() as (a, b, c), running(a, b) as router:
        for worker in (a, b, c):
            worker.allow(0)
        async with asyncio.TaskGroup() as tasks:
            replies = [tasks.create_task(generate(router, f"first-{n}")) for n in range(8)]
            await a.until(lambda: len(a.running) == 4)
            await b.until(lambda: len(b.running) == 4)
            await router.add(c.url)
            await router.remove(b.url)
            replies += [tasks.create_task(generate(router, f"second-{n}")) for n in range(8)]
            await c.until(lambda: len(c.running) == 4)
            await a.until(lambda: len(a.running) == 8)
            for worker in (a, b, c):
                worker.allow(None)
        assert [reply.result()[0] for reply in replies] == [200] * 16
        assert len(rids(a, b, c)) == len(set(rids(a, b, c))) == 16
        assert all(rid.startswith("first") for rid in rids(b))


@on_the_real_router
async def test_the_circuit_of_a_worker_that_fails_opens_and_closes() -> None:
    async with FakeWorker() as worker, running(worker, circuit_breaker=CircuitBreaker(failures=3, seconds=3)) as router:
        worker.faults.extend([Status(500)] * 3)
        assert [(await generate(router))[0] for _ in range(3)] == [500] * 3
        status, text = await generate(router)
        assert (status, len(worker.bodies())) == (503, 3)
        assert "no_available_workers" in text

        async def answers() -> bool:
            return (await generate(router))[0] == 200

        assert await router._until(answers)


@on_the_real_router
async def test_a_routing_key_has_its_worker() -> None:
    async with three_workers() as workers, running(*workers, policy="manual") as router:

        async def places() -> dict[str, str]:
            for worker in workers:
                worker.received.clear()
            for key in map(str, range(12)):
                await ask("POST", f"{router.url}/generate", {"rid": key, "input_ids": [5]}, {"X-SMG-Routing-Key": key})
            return {body["rid"]: worker.url for worker in workers for body in worker.bodies()}

        before = await places()
        assert await places() == before
        gone = before["0"]
        await router.remove(gone)
        after = await places()
        assert {key for key in before if before[key] != after[key]} == {key for key in before if before[key] == gone}


@on_the_real_router
async def test_the_router_is_killed_under_load_and_started_again() -> None:
    assert REAL_PYTHON is not None
    async with FakeWorker() as worker:
        worker.allow(0)
        router = SGLangRouter(workers=[worker.url], log_level="error", python=REAL_PYTHON)
        async with router:
            async with asyncio.TaskGroup() as tasks:
                replies = [tasks.create_task(_outcome(generate(router, f"r{n}"))) for n in range(4)]
                await worker.until(lambda: len(worker.running) == 4)
                os.kill(pid_of(router), signal.SIGKILL)
            assert all(isinstance(reply.result(), aiohttp.ClientError) for reply in replies)
            with pytest.raises(RouterError, match=r"^the router was killed by SIGKILL"):
                await router.workers()
        worker.allow(None)
        async with router:
            assert (await generate(router))[0] == 200


async def _outcome(reply: Awaitable[object]) -> object:
    try:
        return await reply
    except Exception as error:
        return error
