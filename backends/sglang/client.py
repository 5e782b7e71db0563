"""HTTP to the workers: one client for thousands of open requests, and the one place that says what is asked again.

    RequestRefused      4xx: the request is wrong, asking again does not help
    AttemptFailed       everything else: no connection, a broken one, 5xx, 408, 429, no answer in time, no usable answer

A worker that failed rests: `backoff` seconds after the first failure, twice as long after each further one in a row,
and up to twice that by chance, so that those who wait do not all come back at once. Meanwhile others are asked; where
all rest, the one that is due first is waited for. Behind a router it is the request that rests, unless the router
itself is not reached: what it answers is about one of its workers.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from backends.sglang.reply import ReplyError
from eventbus.imports import optional_dependency

if TYPE_CHECKING:
    import aiohttp

__all__ = ["AttemptFailed", "Client", "RequestRefused", "Worker", "Workers", "WorkersUnavailable", "rest_of"]

CONNECT_SECONDS: Final = 10.0
KEEP_ALIVE_SECONDS: Final = 4.0
"""Below the 5 s after which a worker closes an idle connection: a request on a closed one would be lost."""
LONGEST_REST: Final = 30.0


class RequestRefused(ValueError):
    """A worker refused a request (4xx); the message has its words. Asking again does not help."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class AttemptFailed(ConnectionError):
    """One attempt got no usable answer; another may.

    `answered`: the worker is through with the request, or never got it. `status`: of its answer, where it gave one.
    """

    def __init__(self, message: str, *, answered: bool = False, status: int | None = None) -> None:
        super().__init__(message)
        self.answered = answered
        self.status = status


class WorkersUnavailable(ConnectionError):
    """No worker gave a usable answer, however often they were asked."""


class Client:
    """One pool of connections. `async with` opens it."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        with optional_dependency():
            import aiohttp
        # No limit: the pipeline says how many requests are open, and one that waits here would look like a slow worker.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            headers={"content-type": "application/json"},
            read_bufsize=1 << 20,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def post(self, url: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
        """:raises RequestRefused: 4xx.
        :raises AttemptFailed: no answer, or one that says to come back.
        """
        return await self._ask("POST", url, body, headers)

    async def get(self, url: str) -> bytes:
        """As `post`."""
        return await self._ask("GET", url)

    async def _ask(
        self, method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        try:
            async with self._request(method, url, body, headers) as response:
                data: bytes = await response.read()
        except Exception as error:
            raise _broken(url, error) from error
        if response.status >= 300:
            raise _error(url, response.status, data)
        return data

    async def events(
        self, url: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The server-sent events of a reply, until it says that it is done; else as `post`.

        :raises AttemptFailed: also where the stream ends before that.
        """
        try:
            async with self._request("POST", url, body, headers) as response:
                if response.status >= 300:
                    raise _error(url, response.status, await response.read())
                pending = b""
                async for chunk in response.content.iter_any():
                    *events, pending = (pending + chunk).split(b"\n\n")
                    for event in events:
                        data = event.removeprefix(b"data:").strip()
                        if data == b"[DONE]":
                            return
                        if data.startswith(b'{"error"'):
                            raise _error_event(url, data)
                        yield data
        except Exception as error:
            raise _broken(url, error) from error
        raise AttemptFailed(f"{url}: the stream ended in the middle")

    def _request(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str] | None) -> Any:
        assert self._session is not None, "the client is not open"
        return self._session.request(method, url, data=body, headers=headers, allow_redirects=False)


def _broken(url: str, error: Exception) -> Exception:
    """What an error of the connection means; others as they are."""
    import aiohttp

    if isinstance(error, AttemptFailed) or not isinstance(error, aiohttp.ClientError | OSError):
        return error
    if isinstance(error, aiohttp.ClientConnectorError):  # nothing was sent
        return AttemptFailed(f"{url}: {error}", answered=True)
    return AttemptFailed(f"{url}: {type(error).__name__}: {error}")


def words(data: bytes) -> str:
    """What an error body says, of the forms that SGLang and its router use."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return data.decode(errors="replace")[:500].strip()
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:500]


def _error(url: str, status: int, data: bytes) -> Exception:
    message = f"{url} answered {status}: {words(data)}"
    if status >= 500 or status in (408, 429):
        return AttemptFailed(message, answered=True, status=status)
    return RequestRefused(message, status)


def _error_event(url: str, data: bytes) -> Exception:
    try:
        status = int(msgspec.json.decode(data)["error"].get("code") or 500)
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, ValueError, AttributeError):
        return ReplyError(f"{url}: {data[:500]!r}")
    return _error(url, status, data)


def rest_of(failures: int, backoff: float) -> float:
    """Seconds, after so many failures in a row."""
    return min(backoff * 2.0 ** (failures - 1), LONGEST_REST) * (1 + random.random())


class Worker:
    """A worker as this side sees it."""

    __slots__ = ("failures", "in_flight", "rests_until", "url")

    def __init__(self, url: str) -> None:
        self.url = url
        self.in_flight = 0
        self.failures = 0
        """In a row."""
        self.rests_until = 0.0

    def failed(self, now: float, backoff: float) -> None:
        """It rests. Requests that fail while it does tell nothing new: they were lost together."""
        if now >= self.rests_until:
            self.failures += 1
            self.rests_until = now + rest_of(self.failures, backoff)

    def succeeded(self) -> None:
        self.failures = 0


class Workers:
    """The workers that requests go to.

    :param clock: seconds.
    """

    def __init__(self, urls: Iterable[str], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turn = count()
        self._workers: list[Worker] = []
        self.set(urls)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    def set(self, urls: Iterable[str]) -> None:
        """These are the workers now; those that stay keep what is known of them."""
        known = {worker.url: worker for worker in self._workers}
        self._workers = [known.get(url) or Worker(url) for url in dict.fromkeys(urls)]

    def pick(self, session: str | None = None, avoid: Worker | None = None) -> tuple[Worker, float]:
        """The worker with least in flight, and the seconds until it may be asked.

        :param session: requests of one session go to the same worker for as long as that is up.
        :param avoid: not this one, where there is another.
        """
        now = self._clock()
        candidates: Sequence[Worker] = [worker for worker in self._workers if worker.rests_until <= now]
        if len(candidates) > 1 and avoid is not None:
            candidates = [worker for worker in candidates if worker is not avoid]
        if not candidates:
            worker = min(self._workers, key=lambda worker: worker.rests_until)
            return worker, worker.rests_until - now
        if len(candidates) == 1:
            return candidates[0], 0.0
        if session is not None:
            return max(candidates, key=lambda worker: _weight(session, worker.url)), 0.0
        first = next(self._turn) % len(candidates)  # among equals each has its turn
        return min((*candidates[first:], *candidates[:first]), key=lambda worker: worker.in_flight), 0.0


def _weight(session: str, url: str) -> bytes:
    return blake2b(f"{session} {url}".encode(), digest_size=8).digest()
