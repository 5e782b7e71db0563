"""What a request to a server costs this side: CPU time of the client process, the server is another one.

All requests of a case are open at once: the server answers none before it has them all. Each side sends the same body
and gets the same reply; the connections stand already.

    the engine      everything that `generate` does, from the checks to the packed columns
    bare aiohttp    post, `json.loads`, two lists
    httpx           the same, with the client that slime uses; with few in flight, since its cost per request grows with
                    their number: 20 ms at 500
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from statistics import median
from time import process_time
from typing import Any

from backends.sglang import SGLangEngine
from backends.sglang.client import KEEP_ALIVE_SECONDS
from backends.sglang.reply import decode
from benchmarks.measure import Row, interleaved, ratio_row
from eventbus.columns import Tokens
from eventbus.sample import Completion, Sample
from middleware.generate import append

__all__ = ["rows"]

ROUNDS = 3
WAVES = 6
"""Per round, over the same connections: a collection of garbage more or less is a fifth of one."""
TOKENS = 64
"""Of the prompt, and of the response."""
IN_FLIGHT = (2_000, 4_000)
IN_FLIGHT_HTTPX = 250
LONG = 4_000
"""Tokens of the reply that is decoded."""
SAMPLING = {"temperature": 1.0, "max_new_tokens": TOKENS}

Call = Callable[[int], Awaitable[Any]]
Client = Callable[[str], AbstractAsyncContextManager[Call]]


def rows() -> list[Row]:
    table = []
    for in_flight in IN_FLIGHT:
        measured = asyncio.run(_requests(in_flight, {"engine": _engine, "aiohttp": _aiohttp}))
        what = f"{in_flight:,} in flight, client CPU per request / bare aiohttp"
        table.append(ratio_row(what, measured["engine"], measured["aiohttp"], at_most=1.3))
    measured = asyncio.run(_requests(IN_FLIGHT_HTTPX, {"engine": _engine, "aiohttp": _aiohttp, "httpx": _httpx}, 1))
    for name in ("engine", "aiohttp"):
        what = f"{IN_FLIGHT_HTTPX} in flight, client CPU per request, {name} / httpx as slime uses it"
        table.append(ratio_row(what, measured[name], measured["httpx"]))
    decoding = interleaved({"own": _decode, "lists": _json_and_lists})
    speedup = median(theirs / own for own, theirs in zip(decoding["own"], decoding["lists"], strict=True))
    return [
        *table,
        Row(
            f"reply of {LONG:,} tokens into a Sample, json.loads and lists / own",
            f"{speedup:.3g}x",
            "at least 3x",
            speedup >= 3,
            f"{median(decoding['lists']) * 1e6:.0f} us against {median(decoding['own']) * 1e6:.0f} us",
        ),
    ]


# Requests


async def _requests(in_flight: int, clients: dict[str, Client], waves: int = WAVES) -> dict[str, list[float]]:
    """CPU seconds per request, for each client and round."""
    _many_connections()
    measured: dict[str, list[float]] = {name: [] for name in clients}
    async with _server(in_flight) as url:
        for _ in range(ROUNDS):
            for name, client in clients.items():
                async with client(url) as call:
                    await asyncio.gather(*map(call, range(in_flight)))  # connects
                    for _ in range(waves):
                        gc.collect()
                        started = process_time()
                        await asyncio.gather(*map(call, range(in_flight)))
                        measured[name].append((process_time() - started) / in_flight)
    return measured


@asynccontextmanager
async def _engine(url: str) -> AsyncIterator[Call]:
    prompt = _prompt()
    async with SGLangEngine(url, vocabulary=200_000) as engine:

        async def call(index: int) -> Completion:
            return await engine.generate(Sample(index=index, rollout_id=index, tokens=Tokens(prompt)), SAMPLING)

        yield call


@asynccontextmanager
async def _aiohttp(url: str) -> AsyncIterator[Call]:
    import aiohttp

    body = _body()
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def call(index: int) -> Any:
            async with session.post(f"{url}/generate", json=body) as response:
                response.raise_for_status()
                return _lists(await response.json())

        yield call


@asynccontextmanager
async def _httpx(url: str) -> AsyncIterator[Call]:
    import httpx

    body = _body()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(None)) as client:

        async def call(index: int) -> Any:
            response = await client.post(f"{url}/generate", json=body)
            response.raise_for_status()
            return _lists(response.json())

        yield call


def _lists(reply: Any) -> tuple[list[int], list[float]]:
    entries = reply["meta_info"]["output_token_logprobs"]
    return [entry[1] for entry in entries], [entry[0] for entry in entries]


# The reply of a long response

_LONG_REPLY = b""


def _decode() -> float:
    data = _long_reply()
    samples = [Sample(index=0, tokens=Tokens(_prompt())) for _ in range(20)]
    started = process_time()
    for sample in samples:
        reply = decode(data, TOKENS)
        append(sample, Completion(reply.text, reply.tokens, reply.log_probs, reply.status, reply.spans, reply.meta))
    return (process_time() - started) / len(samples)


def _json_and_lists() -> float:
    data = _long_reply()
    samples: list[dict[str, Any]] = [{"tokens": _prompt(), "rollout_log_probs": [], "response": ""} for _ in range(20)]
    started = process_time()
    for sample in samples:
        reply = json.loads(data)
        tokens, log_probs = _lists(reply)
        sample["tokens"] = sample["tokens"] + tokens
        sample["rollout_log_probs"] += log_probs
        sample["response"] += reply["text"]
    return (process_time() - started) / len(samples)


def _long_reply() -> bytes:
    global _LONG_REPLY
    _LONG_REPLY = _LONG_REPLY or _reply(LONG)
    return _LONG_REPLY


def _reply(length: int) -> bytes:
    """As the server writes it."""
    source = random.Random(0)
    tokens = [source.randrange(150_000) for _ in range(length)]
    meta = {
        "id": "0" * 32,
        "finish_reason": {"type": "length", "length": length},
        "prompt_tokens": TOKENS,
        "weight_version": "default",
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[source.random() - 5, token, None] for token in tokens],
        "output_token_logprobs_length": length,
        "reasoning_tokens": 0,
        "completion_tokens": length,
        "cached_tokens": 0,
        "weight_versions": [{"version": "default", "start": 0, "end": length}],
        "cached_tokens_details": None,
        "dp_rank": None,
        "e2e_latency": 0.0704,
        "response_sent_to_client_ts": 1795959344.51,
    }
    reply = {"text": "word " * length, "output_ids": tokens, "meta_info": meta}
    return json.dumps(reply, separators=(",", ":")).encode()


def _prompt() -> list[int]:
    return list(range(100, 100 + TOKENS))


def _body() -> dict[str, Any]:
    return {
        "rid": "0" * 32,
        "input_ids": _prompt(),
        "sampling_params": SAMPLING,
        "return_logprob": True,
        "stream": False,
    }


# The server: a process that answers a wave of requests when it has all of them


@asynccontextmanager
async def _server(wave: int) -> AsyncIterator[str]:
    command = [sys.executable, "-m", "benchmarks.sglang", str(wave)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


class _Answers(asyncio.Protocol):
    waiting: list[asyncio.Transport] = []  # noqa: RUF012
    wave = 0
    reply = b""

    def __init__(self) -> None:
        self._got = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, _, body = self._got.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if length is None or len(body) < int(length[1]):
            return
        self._got = b""
        self.waiting.append(self._transport)
        if len(self.waiting) == self.wave:
            for transport in self.waiting:
                transport.write(self.reply)
            self.waiting.clear()


async def _serve(wave: int) -> None:
    _many_connections()
    body = _reply(TOKENS)
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    _Answers.wave, _Answers.reply = wave, head.encode() + body
    server = await asyncio.get_running_loop().create_server(_Answers, "127.0.0.1", 0, backlog=wave)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def _many_connections() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (20_000 if most == resource.RLIM_INFINITY else min(most, 20_000), most))


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
