"""Rewards: sample stages that set `sample.reward`.

    exact_match             the response is the label
    MathAnswer()            the response's answer equals the label as mathematics
    RemoteReward(url)       a server says what the response is worth

A reward that cannot be told is an error that names the sample, never a silent 0.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from subprocess import PIPE, Popen
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import anyio
import msgspec

from eventbus.imports import optional_dependency
from eventbus.sample import Sample
from middleware.wrappers import Slots, at_least_one, waits_for

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

    Labels are LaTeX, with or without `$`, or plain numbers. Grading runs in processes of its own, one per processor,
    since it is slow (some milliseconds) and a response can be written so that it never ends. One that costs more than
    `seconds` of processor time has its process killed and is a wrong answer, `sample.metadata["math_answer"] ==
    "timeout"`; a busy machine does not make it one. The pipeline opens and closes the reward; a call outside of one
    starts a process for itself, which takes a second. Needs `rolloutbus[math]` and a POSIX system.

    :param seconds: processor time for one grading.
    :raises LoadError: math-verify is not installed.
    :raises ValueError: `seconds` is not more than 0; when called: the sample has no label, or it is no mathematics.
    :raises RuntimeError: when called: the grading failed, or its process ended by something else.
    """

    def __init__(self, seconds: float = 5.0) -> None:
        if not seconds > 0:
            raise ValueError(f"MathAnswer: seconds is {seconds}, it must be more than 0")
        if find_spec("math_verify") is None:
            with optional_dependency():
                raise ModuleNotFoundError("math_verify is not installed", name="math_verify")
        self.seconds = seconds
        self._slots = Slots(os.cpu_count() or 1, "MathAnswer: {} processes in use")
        self._idle: list[_Grader] = []
        self._users = 0

    async def __aenter__(self) -> Self:
        self._users += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._users -= 1
        while self._idle and not self._users:
            self._idle.pop().end()

    async def __call__(self, sample: Sample) -> None:
        label = _label(sample)
        await self._slots.acquire()
        try:
            reply = await self._ask([label, sample.response, self.seconds])
        except _GraderDied as error:
            if error.code != -signal.SIGPROF:
                raise RuntimeError(f"sample {sample.index}: the process that graded the answer {error}") from error
            sample.metadata["math_answer"] = "timeout"
            reply = {"equal": False}
        finally:
            self._slots.release()
        if "error" in reply:
            raise RuntimeError(f"sample {sample.index}: grading the answer failed: {reply['error']}")
        if reply["equal"] is None:
            raise ValueError(f"sample {sample.index}: the label {label!r} is not read as mathematics")
        sample.reward = float(reply["equal"])

    async def _ask(self, question: list[Any]) -> dict[str, Any]:
        if self._idle:
            try:
                return await self._ask_one(self._idle.pop(), question)
            except _GraderDied as error:
                if error.code == -signal.SIGPROF:
                    raise
                # It may have been killed while nobody used it: a new one tells.
        return await self._ask_one(_Grader(), question)

    async def _ask_one(self, grader: _Grader, question: list[Any]) -> dict[str, Any]:
        reusable = False
        try:
            with waits_for("a grading process"):
                reply = await anyio.to_thread.run_sync(
                    grader.ask, question, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1)
                )
            reusable = self._users > 0
            return reply
        finally:
            if reusable:
                self._idle.append(grader)
            else:
                grader.end()


class _GraderDied(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}")
        self.code = code


class _Grader:
    """A process that answers one question at a time, a line of JSON each.

    It is not one of `anyio.to_process`: those run the user's main module again, all of it where it is not guarded by
    `if __name__ == "__main__"`, and do not tell what a process died of.
    """

    def __init__(self) -> None:
        self._process: Popen[bytes] | None = None
        self._ended = False
        self._changing = threading.Lock()

    def ask(self, question: list[Any]) -> dict[str, Any]:
        """Blocks, the first time also until the process has started: call it in a thread.

        :raises _GraderDied: the process ended, in a time-out by SIGPROF.
        """
        with self._changing:
            if self._ended:
                raise _GraderDied(-signal.SIGKILL)
            if self._process is None:
                code = f"import sys; sys.path[:] = {sys.path!r}; from middleware.rewards import _serve; _serve()"
                self._process = Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        with suppress(OSError, ValueError):  # a broken pipe, or `end` has closed it
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if not line.endswith(b"\n"):
            raise _GraderDied(process.wait())
        reply: dict[str, Any] = json.loads(line)
        return reply

    def end(self) -> None:
        """End the process at once, also while a thread waits for its answer."""
        with self._changing:
            self._ended = True
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what was not sent yet cannot be
                pipe.close()


class RemoteReward:
    """Ask a server: POST `{"prompt", "response", "label", "metadata"}` as JSON, get `{"reward": number or object}`.

    One client with up to `connections` connections serves the whole run; the pipeline opens and closes it, and a call
    outside of one opens its own. Connecting may take 10 s, nothing else limits the time:
    `limit(timeout(retry(RemoteReward(url)), 30), 64)`. A number that is not finite is sent as null, which is all that
    JSON has for it. Needs `rolloutbus[http]`.

    :raises LoadError: httpx is not installed.
    :raises ValueError: `url` is no HTTP address, or `connections` is less than 1; when called: the server refused the
        request (4xx), redirects it, or its reply holds no reward. Asking again does not help, and
        `retry(..., on=(OSError,))` does not.
    :raises ConnectionError: when called: the server was not reached, hung up, or failed (5xx, 408, 429).
    :raises TypeError: when called: a field of the sample has no JSON form.
    """

    external: Final = True

    def __init__(self, url: str, connections: int = 64) -> None:
        connections = at_least_one("RemoteReward: connections", connections)
        with optional_dependency():
            import httpx
        try:
            parts = httpx.URL(url)
            valid = parts.scheme in ("http", "https") and parts.host and 0 < (parts.port or 80) < 65536
        except (httpx.InvalidURL, TypeError):
            valid = False
        if not valid:
            raise ValueError(f"RemoteReward: url is {url!r}, it must be like 'http://127.0.0.1:8000/score'")
        self.url = url
        self.connections = connections
        self._client: httpx.AsyncClient | None = None
        self._users = 0
        # The client's own queue loses connections for good when many that wait in it are cancelled at once.
        self._slots = Slots(connections, "RemoteReward: {} connections in use")

    async def __aenter__(self) -> Self:
        if self._client is None:
            self._client = await self._new_client().__aenter__()
        self._users += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._users -= 1
        if self._users:  # another pipeline has it too
            return
        client, self._client = self._client, None
        if client is not None:
            await client.__aexit__(kind, error, trace)

    async def __call__(self, sample: Sample) -> None:
        body = self._body(sample)
        await self._slots.acquire()
        try:
            async with self._open_client() as client:
                sample.reward = await self._ask(client, sample, body)
        finally:
            self._slots.release()

    def _body(self, sample: Sample) -> bytes:
        fields = {name: getattr(sample, name) for name in ("prompt", "response", "label", "metadata")}
        try:
            return msgspec.json.encode(fields)
        except (TypeError, UnicodeEncodeError, RecursionError) as error:  # a set of objects, half a character, a loop
            raise TypeError(
                f"sample {sample.index}: prompt, response, label or metadata has no JSON form: {error}"
            ) from error

    async def _ask(self, client: httpx.AsyncClient, sample: Sample, body: bytes) -> Any:
        import httpx

        where = f"sample {sample.index}: {self.url}"
        try:
            reply = await client.post(self.url, content=body, headers={"content-type": "application/json"})
        except httpx.HTTPError as error:
            raise ConnectionError(f"{where}: {type(error).__name__}: {error}") from error
        if reply.is_redirect:
            location = reply.headers.get("location")
            raise ValueError(f"{where} redirects to {location!r} ({reply.status_code}): give the url that answers")
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


# In the process that grades

_MARKED: Final = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed")
"""What marks LaTeX; `\\$` is a dollar."""


def _serve() -> None:
    # Ctrl-C reaches all processes of a terminal; what is to end here says the one that asks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import math_verify  # noqa: F401

    replies = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # whatever is printed while grading is no reply
    os.dup2(nowhere, 2)
    for line in sys.stdin.buffer:
        try:
            reply: dict[str, Any] = {"equal": _grade(*json.loads(line))}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        os.write(replies, json.dumps(reply).encode() + b"\n")


def _grade(label: str, response: str, seconds: float) -> bool | None:
    """None: the label is not mathematics."""
    from math_verify import parse, verify

    # math-verify's own time-outs are Python signal handlers, which wait for a long multiplication to end; the default
    # action of a timer signal ends the process at once.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        gold = parse(label if _MARKED.search(label) else f"${label}$", parsing_timeout=None)
        if not gold:
            return None
        return bool(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
