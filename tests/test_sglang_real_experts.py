"""The engine against a real server that reports routed experts and repeats what has the same seed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.sglang import SGLangEngine, SGLangRouter
from eventbus import Sample, SampleStatus, Tokens
from middleware import Generate
from tests import sglang_real, sglang_servers
from tests.megatron_ranks import run_on_ranks

pytestmark = sglang_real.MARKS

LAYERS, TOP_K = 3, 2
PROMPT = [5, 6, 7, 8]
SAMPLING = {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 7}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sglang_servers.make_experts(tmp_path_factory.mktemp("sglang") / "tiny")


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with sglang_servers.server(model, "--enable-return-routed-experts", "--enable-deterministic-inference") as server:
        yield server.url


def sample_of(index: int) -> Sample:
    return Sample(index=index, group_index=0, rollout_id=index, tokens=Tokens(PROMPT))


def routed(model: Path, tokens: list[int]) -> Any:
    """What transformers routes them to, [tokens, layers, TOP_K], in ascending order."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = loaded(torch.tensor([tokens]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(TOP_K).indices.sort().values for layer in logits], dim=1).numpy()


@pytest.mark.asyncio
async def test_routed_experts_are_those_of_the_model(url: str, model: Path) -> None:
    sample = sample_of(0)
    await Generate(SGLangEngine(url, routed_experts=(LAYERS, TOP_K)), SAMPLING)(sample)
    experts = sample.rollout_routed_experts
    assert experts.shape == (len(PROMPT) + 12 - 1, LAYERS, TOP_K)
    experts = experts.copy()
    experts.sort()
    assert (experts == routed(model, sample.tokens.tolist()[:-1])).all()


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs megatron-core: pip install 'rolloutbus[megatron]'"
)
def test_a_megatron_model_follows_them(url: str, model: Path, tmp_path: Path) -> None:
    """What the server records is what the trainer's routers take: by layer and by token."""
    run_on_ranks(2, "tests.megatron_follows_sglang", url, model, tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    followed, *elsewhere = found.values()
    assert abs(followed) < 1e-7  # which float32 hardly tells from 0
    assert len(elsewhere) == LAYERS - 1
    assert min(elsewhere) > 1e-4


@pytest.mark.asyncio
async def test_routed_experts_of_a_partial_sample_are_those_of_all_its_tokens(url: str, model: Path) -> None:
    engine = SGLangEngine(url, routed_experts=(LAYERS, TOP_K))
    sample = sample_of(0)
    await Generate(engine, SAMPLING | {"max_new_tokens": 5})(sample)
    sample.status = SampleStatus.ABORTED
    await Generate(engine, SAMPLING)(sample)
    experts = sample.rollout_routed_experts.copy()
    experts.sort()
    assert (experts == routed(model, sample.tokens.tolist()[:-1])).all()


@pytest.mark.asyncio
async def test_behind_the_router_they_go_around_it(url: str, caplog: pytest.LogCaptureFixture) -> None:
    assert sglang_servers.PYTHON is not None
    router = SGLangRouter(workers=[url], python=sglang_servers.PYTHON)
    samples = [sample_of(n) for n in range(4)]
    async with SGLangEngine(router=router, routed_experts=(LAYERS, TOP_K)) as engine:
        await asyncio.gather(*(Generate(engine, SAMPLING)(sample) for sample in samples))
    for sample in samples:
        assert sample.rollout_routed_experts.shape == (len(sample.tokens) - 1, LAYERS, TOP_K)
    assert [message for message in caplog.messages if "drops return_routed_experts" in message] != []


@pytest.mark.asyncio
async def test_a_seed_gives_the_same_tokens_again_and_siblings_differ(url: str) -> None:
    async with SGLangEngine(url) as engine:
        first, sibling, again = [(await engine.generate(sample_of(index), SAMPLING)).tokens for index in (0, 1, 0)]
    assert first == again
    assert first != sibling
