"""`SGLangRouter`: the process that spreads requests over SGLang servers, started here or found running.

    SGLangRouter("http://10.0.0.5:30000")                                         one that runs already
    SGLangRouter(workers=["http://10.0.0.6:30000", "http://10.0.0.7:30000"])      one of our own

What this module keeps true:

- a router of our own lives as long as the outermost `async with`: it ends with it, however that is left, and with this
  process, however that dies (Linux);
- what it writes goes to the log `rolloutbus.sglang`, and its last lines are in the error when it ends unasked;
- it passes on `/generate` and little else, and loses parts of that: `lost_by_router` says which, as observed with the
  version that `router_process` names.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from random import SystemRandom
from ssl import SSLContext
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypeAlias, TypeVar, get_args

import anyio
import msgspec

from backends.sglang.client import Access, address
from backends.sglang.router_process import GRACE_SECONDS, RouterError, RouterProcess
from eventbus.imports import optional_dependency

if TYPE_CHECKING:
    import aiohttp

__all__ = ["CircuitBreaker", "RouterError", "SGLangRouter", "free_port", "lost_by_router"]

Policy: TypeAlias = Literal["cache_aware", "round_robin", "random", "power_of_two", "manual", "consistent_hashing"]
LogLevel: TypeAlias = Literal["debug", "info", "warn", "error"]
_T = TypeVar("_T")
_Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]

_PASSED: Final = frozenset(
    "rid text input_ids input_embeds sampling_params return_logprob logprob_start_len top_logprobs_num "  # noqa: SIM905
    "token_ids_logprob return_text_in_logprobs stream return_hidden_states session_params lora_path lora_id "
    "custom_logit_processor data_parallel_rank priority extra_key return_entropy log_metrics no_logs custom_labels "
    "image_data video_data audio_data modalities model bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key "
    "background conversation_id return_bytes".split()
)
_PASSED_SAMPLING: Final = frozenset(
    "max_new_tokens stop stop_token_ids temperature top_p top_k min_p frequency_penalty presence_penalty "  # noqa: SIM905
    "repetition_penalty min_new_tokens n json_schema regex ebnf ignore_eos skip_special_tokens no_stop_trim "
    "sampling_seed".split()
)

_PATIENCE: Final = 10.0
"""Seconds that the router may take to answer a request that no worker has to answer."""

_NONE: Mapping[str, Any] = MappingProxyType({})


def lost_by_router(request: Mapping[str, Any]) -> list[str]:
    """Which fields of a `/generate` request would not arrive: the router builds it anew from those that it knows.

    Names such as "return_routed_experts" and "sampling_params.stop_regex"; empty when the request passes whole. What
    the router does not know it drops without a word, so every field that was not seen to pass counts as lost. A list of
    texts, rids or sampling parameters is not lost but refused (422). Fractions pass in single precision.
    """
    lost = [name for name in request if name not in _PASSED]
    sampling = request.get("sampling_params") or {}
    return lost + [f"sampling_params.{name}" for name in sampling if name not in _PASSED_SAMPLING]


class CircuitBreaker(msgspec.Struct, frozen=True):
    """When the router stops sending to a worker for a while."""

    failures: _Positive = 5
    """Failed requests in a row."""
    seconds: _Positive = 10
    """Until it is tried again."""


class SGLangRouter:
    """An sglang-router: give the `url` of one that runs, or the `workers` of one to be started.

    Open it with `async with`, where it waits until every worker is registered and healthy; it may be opened again
    inside. asyncio only. Needs `rolloutbus[sglang]`; to start one, also the package `sglang-router` in the environment
    of `python`.

    :param workers: addresses of SGLang servers, `http://host:port`; an empty list where they are added later.
    :param policy: how the worker of a request is chosen. "cache_aware": the one in which most of the prompt is cached,
        or the least busy where the load is uneven. "manual": requests with the same header `X-SMG-Routing-Key` go to
        the same worker, and only the keys of a worker that is removed move; requests without it at random.
        "consistent_hashing" does the same, but moves most keys when a worker is removed.
    :param port: None takes one that is free now.
    :param host: the address to listen at; "0.0.0.0" where others than this machine ask it.
    :param log_level: what of its log comes to `rolloutbus.sglang`.
    :param request_timeout: seconds for one request.
    :param retries: further attempts of the router itself, perhaps on the same worker again. Nobody sees them; those of
        `SGLangEngine` are counted.
    :param circuit_breaker: False for none. Without it, or before it opens, a dead worker gets requests, which fail
        with 500, until `health_interval` has shown that it is dead.
    :param health_interval: seconds between two looks at a worker; two bad ones in a row take it out of use, a good one
        brings it back. It is `/model_info` that is looked at: `/health` generates a token, and while the server is
        paused for new weights it cannot.
    :param start_timeout: seconds until every worker is healthy; also for `add` and `remove`.
    :param options: any other field of sglang-router's `RouterArgs`, as in `{"cache_threshold": 0.5}`. With `dp_aware`,
        version 0.3.2 cannot remove a worker.
    :param python: interpreter of the environment that has sglang-router.
    :param api_key: of the workers, and what the router itself is asked with; "env:NAME" for an environment variable.
    :param ssl: for https addresses, as in `SGLangEngine`. What a router that is started trusts its workers by are
        options of its own: `{"ca_cert_paths": [...]}`.
    :raises TypeError: neither or both of `url` and `workers` are given, or `url` with what only concerns a router that
        is started.
    :raises ValueError: an address, a number or a name is none that fits.
    :raises LoadError: aiohttp is not installed.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        workers: Sequence[str] | None = None,
        policy: Policy = "cache_aware",
        port: int | None = None,
        host: str = "127.0.0.1",
        log_level: LogLevel = "warn",
        request_timeout: int = 1800,
        retries: int = 0,
        circuit_breaker: CircuitBreaker | bool = True,
        health_interval: int = 10,
        start_timeout: float = 600.0,
        options: Mapping[str, Any] = _NONE,
        python: str = sys.executable,
        api_key: str | None = None,
        ssl: SSLContext | str | None = None,
    ) -> None:
        given = _changed(SGLangRouter.__init__, locals())
        if url is None and workers is None:
            raise TypeError("SGLangRouter: give the url of a router that runs, or the workers of one to be started")
        if url is not None and (misplaced := sorted(given - {"start_timeout", "api_key", "ssl"})):
            raise TypeError(f"SGLangRouter: the router {url} runs already: {', '.join(misplaced)} cannot be set here")
        for name, value, least in (
            ("port", 1 if port is None else port, 1),
            ("request_timeout", request_timeout, 1),
            ("retries", retries, 0),
            ("health_interval", health_interval, 1),
        ):
            if type(value) is not int or value < least:
                raise ValueError(f"SGLangRouter: {name} is {value!r}, it must be a whole number, at least {least}")
        if port is not None and port > 65535:
            raise ValueError(f"SGLangRouter: port is {port}, it must be at most 65535")
        if not start_timeout > 0:
            raise ValueError(f"SGLangRouter: start_timeout is {start_timeout}, it must be more than 0")
        for name, text, known in (
            ("policy", policy, get_args(Policy)),
            ("log_level", log_level, get_args(LogLevel)),
        ):
            if text not in known:
                raise ValueError(f"SGLangRouter: {name} is {text!r}, it must be one of {', '.join(known)}")
        try:
            ip_address(host)
        except ValueError:
            raise ValueError(f"SGLangRouter: host is {host!r}, it must be an IP address of this machine") from None
        self._workers = [] if workers is None else [address(worker) for worker in workers]
        if twice := sorted({worker for worker in self._workers if self._workers.count(worker) > 1}):
            raise ValueError(f"SGLangRouter: the worker {twice[0]} is named twice")
        self._host = host
        self._attached = url is not None
        self._port = port or (free_port(host) if url is None else 0)
        self.url = _url_of(host, self._port) if url is None else address(url)
        """Where it is asked; a router that is started answers there once it is open."""
        self._python = python
        self._start_timeout = start_timeout
        self._options = {
            "policy": policy,
            "log_level": log_level,
            "request_timeout_secs": request_timeout,
            "retry_max_retries": retries + 1,  # the router counts attempts
            "health_check_interval_secs": health_interval,
            "health_check_endpoint": "/model_info",
            "health_failure_threshold": 2,
            "health_success_threshold": 1,
            "worker_startup_timeout_secs": math.ceil(start_timeout),
            "worker_startup_check_interval": 5,  # it also asks each worker for its load as often
            "shutdown_grace_period_secs": GRACE_SECONDS - 1,
        }
        if circuit_breaker:
            breaker = circuit_breaker if isinstance(circuit_breaker, CircuitBreaker) else CircuitBreaker()
            self._options |= {
                "cb_failure_threshold": breaker.failures,
                "cb_timeout_duration_secs": breaker.seconds,
                "cb_success_threshold": 1,
            }
        else:
            self._options["disable_circuit_breaker"] = True
        own = {"policy", "log_level", "host", "port", "worker_urls", "api_key"}
        if clash := sorted(own & options.keys()):
            raise ValueError(f"SGLangRouter: options holds {clash[0]}, which has a parameter of its own")
        self._options |= options
        with optional_dependency():
            import aiohttp  # noqa: F401
        self._access = Access(api_key, ssl)
        self._users = 0
        self._opening = asyncio.Lock()
        self._child: RouterProcess | None = None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """:raises RouterError: it does not start, ends, is not reached, or its workers are not ready in time."""
        async with self._opening:
            if self._users == 0:
                try:
                    await self._open()
                except BaseException:
                    await self._close()
                    raise
            self._users += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async with self._opening:
            self._users -= 1
            if self._users == 0:
                await self._close()

    async def check(self) -> None:
        """:raises RouterError: the router that was started has ended; says how, with its last lines."""
        if self._child is not None and self._child.ended.is_set():
            raise await self._child.error()

    async def workers(self, *, healthy: bool = True) -> list[str]:
        """Addresses of the workers that get requests, sorted: those that are registered and healthy.

        :param healthy: False: all that are registered.
        :raises RouterError: the router has ended or is not reached.
        """
        return sorted({worker.address for worker in await self._list() if worker.is_healthy or not healthy})

    async def add(self, url: str) -> None:
        """Register a worker; done when it gets requests. Nothing happens when it does already.

        When this gives up, the router may still try for a while, and take the worker if it answers then.

        :raises ValueError: `url` is no address of a server.
        :raises RouterError: the worker did not become healthy in time, or the router refused it, has ended or is not
            reached.
        """
        url = address(url)
        job = None
        if all(worker.address != url for worker in await self._list()):
            job = _decode(_Accepted, await self._ask("POST", "/workers", self._worker(url), expected=202)).worker_id

        async def registered() -> bool:
            if url in await self._healthy():
                return True
            if job is None:  # it was registered before, and rests until it is healthy again
                return False
            data = await self._ask("GET", f"/workers/{job}", or_gone=True)
            if data and (failure := _decode(_Worker, data).failure("AddWorker")):
                raise RouterError(f"the router {self.url} did not take the worker {url}: {failure}")
            return False

        if not await self._until(registered):
            raise RouterError(
                f"the router {self.url} did not find the worker {url} healthy within {self._start_timeout:g} s"
            )

    async def remove(self, url: str) -> None:
        """Take a worker out; done when it gets no more requests. Those that it has it may finish.

        :raises ValueError: `url` is not registered.
        :raises RouterError: the router refused, has ended or is not reached.
        """
        url = address(url)
        workers = await self._list()
        for worker in (found := [worker for worker in workers if worker.address == url]):
            await self._ask("DELETE", f"/workers/{worker.id}", expected=202, or_gone=True)
        if not found:
            there = ", ".join(sorted({worker.address for worker in workers})) or "none"
            raise ValueError(f"the router {self.url} has no worker {url}; it has {there}")

        async def gone() -> bool:
            for worker in found:
                if data := await self._ask("GET", f"/workers/{worker.id}", or_gone=True):
                    if failure := _decode(_Worker, data).failure("RemoveWorker"):
                        raise RouterError(f"the router {self.url} did not let go of the worker {url}: {failure}")
                    return False
            return True

        if not await self._until(gone):
            raise RouterError(f"the router {self.url} did not let go of the worker {url} in {self._start_timeout:g} s")

    def _worker(self, url: str) -> dict[str, Any]:
        return {"url": url} if (key := self._access.key()) is None else {"url": url, "api_key": key}

    # Its life

    async def _open(self) -> None:
        import aiohttp

        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._access.tls()),
            timeout=aiohttp.ClientTimeout(total=_PATIENCE),
            headers=self._access.headers(),
        )
        if self._attached:
            await self._list()
            return
        _check_free(self._host, self._port)
        asked = {"host": self._host, "port": self._port, "worker_urls": self._workers}
        if (key := self._access.key()) is not None:
            asked["api_key"] = key
        self._child = await RouterProcess.start(self._python, self._options | asked, key)
        await self._until_ready()
        self._child.serving = True

    async def _until_ready(self) -> None:
        missing: set[str] | None = None

        async def ready() -> bool:
            nonlocal missing
            try:
                missing = set(self._workers) - await self._healthy()
            except _NotReached:
                await self.check()
                return False
            return not missing

        if not await self._until(ready):
            what = f"does not answer at {self.url}" if missing is None else f"has no answer from {_join(missing)}"
            raise RouterError(f"the router {what} after {self._start_timeout:g} s{self._child_lines()}")

    async def _close(self) -> None:
        session, self._session = self._session, None
        child, self._child = self._child, None
        try:
            if session is not None:
                with anyio.CancelScope(shield=True):
                    await session.close()
        finally:
            if child is not None:
                await child.stop()

    def _child_lines(self) -> str:
        return "" if self._child is None else self._child.last_lines()

    async def _until(self, condition: Callable[[], Awaitable[bool]]) -> bool:
        """Whether it became true within `start_timeout`. Asked again and again: the router tells nobody."""
        pause = 0.02
        with anyio.move_on_after(self._start_timeout):
            while not await condition():
                with anyio.move_on_after(pause):
                    await (self._child.ended.wait() if self._child is not None else anyio.sleep_forever())
                pause = min(1.5 * pause, 0.5)
            return True
        return False

    # What it is asked

    async def _list(self) -> list[_Worker]:
        return _decode(_Listing, await self._ask("GET", "/workers")).workers

    async def _healthy(self) -> set[str]:
        return {worker.address for worker in await self._list() if worker.is_healthy}

    async def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, expected: int = 200, or_gone: bool = False
    ) -> bytes:
        """The only place that knows the HTTP library.

        :param or_gone: 404 is fine, too; the answer is empty then.
        :raises RouterError: another status than `expected`, no answer, or the router has ended.
        """
        import aiohttp

        if self._session is None:
            raise RouterError("SGLangRouter: not open: use `async with`")
        await self.check()
        try:
            async with self._session.request(method, self.url + path, json=body) as response:
                status, data = response.status, await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if self._child is not None and self._child.serving:
                with anyio.move_on_after(1):  # if it was killed, that is about to be known
                    await self._child.ended.wait()
                await self.check()
            how = f"no answer within {_PATIENCE:g} s" if isinstance(error, TimeoutError) else str(error)
            raise _NotReached(f"{method} {self.url + path}: {how}{self._child_lines()}") from error
        if status == 404 and path == "/workers":
            raise RouterError(f"{self.url} answers 404 to {method} /workers: it is no sglang-router")
        if status == 404 and or_gone:
            return b""
        if status != expected:
            words = data.decode(errors="replace")[:500]
            raise RouterError(f"{method} {self.url + path}: {status} {words}")
        return data


class _NotReached(RouterError):
    pass


class _Job(msgspec.Struct):
    job_type: str
    status: str
    message: str | None = None


class _Worker(msgspec.Struct):
    id: str
    url: str
    is_healthy: bool
    job_status: _Job | None = None

    @property
    def address(self) -> str:
        return re.sub(r"@\d+$", "", self.url)  # with dp_aware, each rank is a worker

    def failure(self, of: str) -> str | None:
        """Why the job of this kind failed, if it did."""
        job = self.job_status
        return job.message or "failed" if job is not None and (job.job_type, job.status) == (of, "failed") else None


class _Listing(msgspec.Struct):
    workers: list[_Worker]


class _Accepted(msgspec.Struct):
    worker_id: str


# Arguments


def _changed(function: Callable[..., Any], arguments: Mapping[str, Any]) -> set[str]:
    """Keyword parameters whose argument is not the default."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and arguments[p.name] != p.default}


def _url_of(host: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def free_port(host: str) -> int:
    """Below those that connections get by themselves (on Linux from 32,768), since one of them may have taken it by the
    time that the router listens there."""
    for port in SystemRandom().sample(range(20_000, 32_768), 100):
        with suppress(OSError):
            return _bind(host, port)
    return _bind(host, 0)


def _bind(host: str, port: int) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        return int(listener.getsockname()[1])


def _check_free(host: str, port: int) -> None:
    """Before the start: whatever has the port could answer in the router's place."""
    try:
        _bind(host, port)
    except OSError as error:
        advice = "; choose another, or leave it out for a free one"
        raise RouterError(f"the router cannot listen at {host}, port {port}: {error.strerror}{advice}") from error


def _join(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _decode(kind: type[_T], data: bytes) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        words = data.decode(errors="replace")[:500]
        raise RouterError(f"the router's answer is not understood: {error}: {words}") from error
