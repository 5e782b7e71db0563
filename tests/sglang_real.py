"""What the tests against real SGLang servers share; `sglang_servers` starts those."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from eventbus import Sample
from tests.sglang_servers import PYTHON, Server

MARKS = [
    pytest.mark.sglang,
    pytest.mark.skipif(
        PYTHON is None,
        reason="needs a real SGLang: `make test-sglang`, or set ROLLOUTBUS_SGLANG_PYTHON to the interpreter of an "
        "environment that has it",
    ),
]


async def asked(url: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """Status and body of the answer; without a body it is a GET."""
    method = "GET" if body is None else "POST"
    async with aiohttp.ClientSession() as session, session.request(method, f"{url}{path}", json=body) as response:
        return response.status, await response.read()


async def load(url: str) -> dict[str, Any]:
    [load] = json.loads((await asked(url, "/v1/loads"))[1])["loads"]
    assert isinstance(load, dict)
    return load


async def until_running(url: str, count: int, *answers: asyncio.Task[Any]) -> None:
    """:param answers: of what is to run. Ask for many tokens: what has ended is not running any more."""
    while (await load(url))["num_running_reqs"] != count:  # it tells nobody
        assert not any(answer.done() for answer in answers), "it has ended before it was seen to run"
        await asyncio.sleep(0.01)


async def until_decoding(server: Server, before: int, *answers: asyncio.Task[Any]) -> None:
    """Some steps beyond `before`, of `Server.decoded`; as above."""
    while server.decoded == before:
        assert not any(answer.done() for answer in answers), "it has ended before it was seen to decode"
        await asyncio.sleep(0.01)


def predicted(model: Path, samples: Sequence[Sample]) -> list[Any]:
    """For each sample the log-probs, [response, vocabulary], by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return [
            loaded(torch.tensor([sample.tokens.tolist()])).logits[0].log_softmax(-1)[sample.prompt_length - 1 : -1]
            for sample in samples
        ]


def worst_difference(model: Path, samples: Sequence[Sample]) -> float:
    """Between the log-probs of the samples' response tokens and those of transformers."""
    worst = 0.0
    for sample, log_probs in zip(samples, predicted(model, samples), strict=True):
        own, tokens = sample.rollout_log_probs, sample.tokens[sample.prompt_length :]
        assert own is not None
        for got, token, row in zip(own, tokens, log_probs, strict=True):
            worst = max(worst, abs(float(row[token]) - got))
    return worst
