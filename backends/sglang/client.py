"""HTTP to the workers: one client for thousands of open requests, and the one place that says what is asked again.

RequestRefused      4xx: the request is wrong, asking again does not help
AttemptFailed       everything else: no connection, a broken one, 5xx, 408, 429, no answer in time, no usable answer
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator, Mapping
from ssl import SSLContext, create_default_context
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

import msgspec

from backends.sglang.reply import UNREADABLE, ReplyError
from eventbus.imports import optional_dependency

if TYPE_CHECKING:
    import aiohttp

__all__ = [
    "Access",
    "AttemptFailed",
    "Client",
    "RequestRefused",
    "WorkersUnavailable",
    "address",
    "answer_error",
]

CONNECT_SECONDS: Final = 10.0
KEEP_ALIVE_SECONDS: Final = 4.0
"""Below the 5 s after which a worker closes an idle connection: a request on a closed one would be lost."""


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


class Access:
    """What servers want to see, and what they have to show. The key is in no `repr`, log or error.

    :param api_key: sent as `Authorization: Bearer`; "env:NAME" is the environment variable of that name, so that the
        key is not in a configuration, which logs keep.
    :param ssl: for https addresses: a context, or the path of a file (or folder) with the certificates to trust in
        place of the system's.
    :raises ValueError: the key cannot be sent.
    """

    def __init__(self, api_key: str | None = None, ssl: SSLContext | str | None = None) -> None:
        if api_key is not None:
            _check_key(api_key, "api_key")
        self._api_key = api_key
        self._ssl = ssl

    def key(self) -> str | None:
        """:raises ValueError: the environment does not have it, or has one that cannot be sent."""
        if self._api_key is None or not self._api_key.startswith("env:"):
            return self._api_key
        name = self._api_key.removeprefix("env:")
        if not (key := os.environ.get(name)):
            raise ValueError(f"api_key: the environment variable {name} is not set")
        _check_key(key, f"api_key: the environment variable {name}")
        return key

    def headers(self) -> dict[str, str]:
        return {} if (key := self.key()) is None else {"authorization": f"Bearer {key}"}

    def tls(self) -> SSLContext | bool:
        """:raises ValueError: there are no certificates at the path."""
        if not isinstance(self._ssl, str):
            return True if self._ssl is None else self._ssl
        try:
            if os.path.isdir(self._ssl):
                return create_default_context(capath=self._ssl)
            return create_default_context(cafile=self._ssl)
        except OSError as error:  # SSLError is one
            raise ValueError(f"ssl: {self._ssl!r} has no certificates that can be read: {error}") from error


class Client:
    """One pool of connections. `async with` opens it.

    :param access: how to get in; raises as that.
    """

    def __init__(self, access: Access | None = None) -> None:
        self._access = access or Access()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        with optional_dependency():
            import aiohttp
        # No limit: the pipeline says how many requests are open, and one that waits here would look like a slow worker.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS, ssl=self._access.tls()),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            headers={"content-type": "application/json", **self._access.headers()},
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
            raise answer_error(url, response.status, data)
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
                    raise answer_error(url, response.status, await response.read())
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
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):  # nothing was sent
        return AttemptFailed(f"{url}: {error}", answered=True)
    return AttemptFailed(f"{url}: {type(error).__name__}: {error}")


def _check_key(key: str, what: str) -> None:
    if not (key.isascii() and key.isprintable() and key.strip()):
        raise ValueError(f"{what} is empty, or has characters that no header can have")


def words(data: bytes) -> str:
    """What an error body says, of the forms that SGLang and its router use."""
    try:
        body = msgspec.json.decode(data)
    except UNREADABLE:
        return data.decode(errors="replace")[:500].strip()
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:500]


def address(url: str) -> str:
    """The address of a server, without a slash at its end: to a router, with and without one are two workers.

    :raises ValueError: it is not `http://host:port` or `https://...`; a password in it is not shown.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and " " not in url
    except ValueError:  # of a port that is none
        good = False
    if not good or parts.query or parts.fragment or parts.username is not None:
        shown = re.sub(r"//.*@", "//...@", url)
        raise ValueError(f"{shown!r} is no address of a server, such as http://127.0.0.1:30000")
    return url.rstrip("/")


def answer_error(url: str, status: int, data: bytes) -> Exception:
    """What an answer with this status means."""
    message = f"{url} answered {status}: {words(data)}"
    if status >= 500 or status in (408, 429):
        return AttemptFailed(message, answered=True, status=status)
    return RequestRefused(message, status)


def _error_event(url: str, data: bytes) -> Exception:
    try:
        status = int(msgspec.json.decode(data)["error"].get("code") or 500)
    except (*UNREADABLE, TypeError, ValueError, AttributeError):
        return ReplyError(f"{url}: {data[:500]!r}")
    return answer_error(url, status, data)
