"""`RouterProcess`: the router that is started here, as the process that it is.

What this module keeps true:

- it lives as long as whoever started it wants, and no longer than this process, however that dies (Linux);
- what it writes goes to the log `rolloutbus.sglang`, without the key, and its last lines are in the error when it ends
  unasked.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, Self

import anyio

__all__ = ["GRACE_SECONDS", "ROUTER_VERSION", "RouterError", "RouterProcess"]

logger = logging.getLogger("rolloutbus.sglang")

ROUTER_VERSION: Final = "0.3.2"
"""Of sglang-router: what is said of routers here was observed with it."""

GRACE_SECONDS: Final = 5
"""From TERM to KILL. Nobody waits for what is still in flight then."""

_LAST_LINES: Final = 20
_SHOWN: Final = 1000
"""Characters of a line in an error."""


class RouterError(ConnectionError):
    """A router cannot be started, is not reached, refuses something, or has ended."""


class RouterProcess:
    """The running router. Made by `start`; whoever makes one calls `stop`."""

    def __init__(self, process: Process, secret: str | None) -> None:
        self.process = process
        self._secret = secret
        """Not to be shown, whatever it writes."""
        self.ended = asyncio.Event()
        self.serving = False
        """Whether its end is news: before, whoever starts it hears of it."""
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._refusal = ""
        self._stopping = False
        self._reading = asyncio.create_task(self._read())
        self._watching = asyncio.create_task(self._watch())

    @classmethod
    async def start(cls, python: str, arguments: Mapping[str, Any], secret: str | None) -> Self:
        try:
            # A session of its own: Ctrl-C in the terminal is for the program, which then ends the router.
            process = await asyncio.create_subprocess_exec(
                python, "-c", _LAUNCH, stdin=PIPE, stdout=PIPE, stderr=STDOUT, start_new_session=True
            )
        except OSError as error:
            raise RouterError(f"the router cannot be started: python is {python!r}: {error.strerror}") from error
        assert process.stdin is not None
        # By its input: the command line of a process can be read by everybody, and there may be keys in the options.
        process.stdin.write(json.dumps({"parent": os.getpid(), "arguments": dict(arguments)}).encode())
        process.stdin.close()
        return cls(process, secret)

    async def error(self) -> RouterError:
        """What it ended of, after it has."""
        with anyio.move_on_after(1):  # until the last lines are read; another process may hold the pipe open
            await asyncio.wait([self._reading])
        if self._refusal:
            return RouterError(self._refusal)
        code = self.process.returncode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        text = self.last_lines()
        return RouterError(f"the router {how}{text}")

    def last_lines(self) -> str:
        return "; the last lines that it wrote:\n  " + "\n  ".join(self._lines) if self._lines else ""

    async def stop(self) -> None:
        """TERM, and KILL after `GRACE_SECONDS`, or at once when this is cancelled."""
        self._stopping = True
        try:
            if self.process.returncode is None:
                with suppress(ProcessLookupError):
                    self.process.terminate()
                with anyio.move_on_after(GRACE_SECONDS):
                    await self.ended.wait()
        finally:
            if self.process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            with anyio.CancelScope(shield=True):
                await self._watching
                with anyio.move_on_after(1):
                    await asyncio.wait([self._reading])
                self._reading.cancel()  # another process holds the pipe open

    async def _watch(self) -> None:
        await self.process.wait()
        self.ended.set()
        if self.serving and not self._stopping:
            logger.error("%s", await self.error())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        rest, level = b"", logging.WARNING
        while chunk := await self.process.stdout.read(_LONGEST_LINE):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                level = self._line(_ANSI.sub("", line.decode(errors="replace")).rstrip(), level)
        if rest:
            self._line(_ANSI.sub("", rest.decode(errors="replace")), level)

    def _line(self, line: str, level: int) -> int:
        """Take a line; lines without a level have that of the line before."""
        if self._secret is not None:
            line = line.replace(self._secret, "***")
        word, _, rest = line.partition(" ")
        if word == "rolloutbus:":
            self._refusal = rest
        elif word == "rolloutbus-version":
            if rest != ROUTER_VERSION:
                logger.warning(
                    "sglang-router is %s; what a router does to requests was observed with %s", rest, ROUTER_VERSION
                )
        elif line:
            if match := _LEVELED.match(line):
                level, line = _LEVELS[match[1]], _SOURCE.sub("", match[2], count=1)
            self._lines.append(line[:_SHOWN])
            logger.log(level, "router: %s", line)
        return level


_LAUNCH: Final = r"""
import sys
if sys.path[0] == "":
    del sys.path[0]  # the working folder, which may hold a module of any name
import ctypes, dataclasses, difflib, json, os, signal
ask = json.load(sys.stdin)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the thread that started this
    if os.getppid() != ask["parent"]:
        sys.exit("rolloutbus: the process that started the router has ended")
try:
    from importlib.metadata import version
    from sglang_router.launch_router import launch_router
    from sglang_router.router_args import RouterArgs
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "sglang_router":
        raise
    sys.exit(f"rolloutbus: sglang-router is not installed for {sys.executable}: {sys.executable} -m pip install "
             "sglang-router, or name another interpreter by python=")
version = version("sglang-router")
print("rolloutbus-version", version, flush=True)
arguments = ask["arguments"]
known = [field.name for field in dataclasses.fields(RouterArgs)]
for name in arguments:
    if name not in known:
        near = "".join(f"; did you mean {near!r}?" for near in difflib.get_close_matches(name, known, 1))
        sys.exit(f"rolloutbus: sglang-router {version} has no option {name!r}{near}")
try:
    launch_router(RouterArgs(**arguments))
except KeyError as error:
    if error.args == (arguments["policy"],):
        sys.exit(f"rolloutbus: sglang-router {version} has no policy {arguments['policy']!r}")
    raise
"""
"""Run by the interpreter that has sglang-router. Its command line knows fewer policies, and has no way to do without
the port for Prometheus."""

_ANSI: Final = re.compile(r"\x1b\[[0-9;]*m")
_LEVELED: Final = re.compile(r"[-\d]+ [:.\d]+\s+(TRACE|DEBUG|INFO|WARN|ERROR) +(.*)")
_SOURCE: Final = re.compile(r" \S+\.rs:\d+:")
_LEVELS: Final = {"TRACE": 10, "DEBUG": 10, "INFO": 20, "WARN": 30, "ERROR": 40}
_LONGEST_LINE: Final = 1 << 16
