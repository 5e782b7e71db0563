"""Rewards: sample stages that set `sample.reward`.

    exact_match             the response is the label
    MathAnswer()            the response's answer equals the label as mathematics
    RemoteReward(url)       a server says what the response is worth

A reward that cannot be told is an error that names the sample, never a silent 0.
"""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import anyio
import msgspec

from eventbus.imports import optional_dependency
from eventbus.sample import Sample

if TYPE_CHECKING:
    import httpx

__all__ = ["MathAnswer", "RemoteReward", "exact_match"]


def exact_match(sample: Sample) -> None:
    """Reward 1.0 when the response is the label, but for space around and between words; else 0.0.

    :raises ValueError: the sample has no label.
    """
    sample.reward = float(sample.response.split() == _label(sample).split())


class MathAnswer:
    """Reward 1.0 when the answer in the response equals the label as mathematics (math-verify), else 0.0.

    Labels are LaTeX, with or without `$`, or plain numbers. Grading runs in worker processes, since it is slow (some
    milliseconds) and a response can be written so that it never ends. One that costs more than `seconds` of processor
    time has its process killed and is a wrong answer, `sample.metadata["math_answer"] == "timeout"`; a busy machine
    does not make it one. Needs `rolloutbus[math]` and a POSIX system.

    :param seconds: processor time for one grading.
    :raises LoadError: math-verify is not installed.
    :raises ValueError: `seconds` is not more than 0; when called: the sample has no label, or it is no mathematics.
    :raises RuntimeError: when called: the grading process ended by something else.
    """

    def __init__(self, seconds: float = 5.0) -> None:
        if not seconds > 0:
            raise ValueError(f"MathAnswer: seconds is {seconds}, it must be more than 0")
        if find_spec("math_verify") is None:
            with optional_dependency():
                raise ModuleNotFoundError("math_verify is not installed", name="math_verify")
        self.seconds = seconds

    async def __call__(self, sample: Sample) -> None:
        from anyio import to_process  # 25 ms that only this reward needs

        label = _label(sample)
        started = time.perf_counter()
        try:
            equal = await to_process.run_sync(_grade, label, sample.response, self.seconds, cancellable=True)
        except anyio.BrokenWorkerProcess as error:
            # The process says nothing any more. Before the time was up it cannot have been the timer.
            if time.perf_counter() - started < self.seconds:
                raise RuntimeError(f"sample {sample.index}: the process that graded the answer died") from error
            sample.metadata["math_answer"] = "timeout"
            equal = False
        if equal is None:
            raise ValueError(f"sample {sample.index}: the label {label!r} is not read as mathematics")
        sample.reward = float(equal)


class RemoteReward:
    """Ask a server: POST `{"prompt", "response", "label", "metadata"}` as JSON, get `{"reward": number or object}`.

    One client with up to `connections` connections serves the whole run; the pipeline opens and closes it, and a call
    outside of one opens its own. Nothing limits the time: `limit(timeout(retry(RemoteReward(url)), 30), 64)`.
    Needs `rolloutbus[http]`.

    :raises LoadError: httpx is not installed.
    :raises ValueError: `connections` is less than 1; when called: the server refused the request (4xx), or its reply
        holds no reward. Asking again does not help: `retry(..., on=(OSError,))` does not.
    :raises ConnectionError: when called: the server was not reached, or failed (5xx, 408, 429).
    :raises TypeError: when called: a field of the sample has no JSON form.
    """

    external: Final = True

    def __init__(self, url: str, connections: int = 64) -> None:
        if connections < 1:
            raise ValueError(f"RemoteReward: connections is {connections}, it must be at least 1")
        with optional_dependency():
            import httpx  # noqa: F401
        self.url = url
        self.connections = connections
        self._client: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        self._client = await self._new_client().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.__aexit__(kind, error, trace)

    async def __call__(self, sample: Sample) -> None:
        body = self._body(sample)
        async with self._open_client() as client:
            sample.reward = await self._ask(client, sample, body)

    def _body(self, sample: Sample) -> bytes:
        fields = {name: getattr(sample, name) for name in ("prompt", "response", "label", "metadata")}
        try:
            return msgspec.json.encode(fields)
        except TypeError as error:
            raise TypeError(f"sample {sample.index}: prompt, label or metadata has no JSON form: {error}") from error

    async def _ask(self, client: httpx.AsyncClient, sample: Sample, body: bytes) -> Any:
        import httpx

        where = f"sample {sample.index}: {self.url}"
        try:
            reply = await client.post(self.url, content=body, headers={"content-type": "application/json"})
        except httpx.HTTPError as error:
            raise ConnectionError(f"{where}: {type(error).__name__}: {error}") from error
        if not reply.is_success:
            answer = f"{where} answered {reply.status_code} {reply.reason_phrase}: {reply.text[:500]}"
            if reply.is_server_error or reply.status_code in (408, 429):
                raise ConnectionError(answer)
            raise ValueError(answer)
        try:
            return msgspec.json.decode(reply.content, type=_Reply).reward
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{where}: the reply is not {{'reward': number or object}}: {error}; got {reply.text[:500]}"
            ) from error

    @asynccontextmanager
    async def _open_client(self) -> AsyncIterator[httpx.AsyncClient]:
        if self._client is not None:
            yield self._client
        else:
            async with self._new_client() as client:
                yield client

    def _new_client(self) -> httpx.AsyncClient:
        import httpx

        limits = httpx.Limits(max_connections=self.connections, max_keepalive_connections=self.connections)
        return httpx.AsyncClient(timeout=httpx.Timeout(None, connect=10.0), limits=limits)


class _Reply(msgspec.Struct):
    reward: float | dict[str, Any]


def _label(sample: Sample) -> str:
    if sample.label is None:
        raise ValueError(f"sample {sample.index} has no label to compare the response with")
    return str(sample.label)


def _grade(label: str, response: str, seconds: float) -> bool | None:
    """Runs in a worker process. None: the label is not mathematics."""
    from math_verify import parse, verify

    # math-verify's own time-outs are Python signal handlers, which wait for a long multiplication to end; the default
    # action of a timer signal ends the process at once.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        marked = "$" in label or "\\(" in label or "\\boxed" in label
        gold = parse(label if marked else f"${label}$", parsing_timeout=None)
        if not gold:
            return None
        return bool(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
