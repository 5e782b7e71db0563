"""slime's build of SGLang says in words of its own which tokens could be drawn."""

from __future__ import annotations

import base64
from array import array
from typing import Any

import pytest

from backends.sglang import SGLangEngine, WorkersUnavailable
from backends.slime import from_slime, to_slime
from eventbus.columns import Tokens
from eventbus.sample import Sample, SampleStatus
from middleware import Generate
from tests.sglang_fake import Edit, FakeWorker, expected

pytestmark = pytest.mark.asyncio

PROMPT = [1, 2, 3]
ASKED: dict[str, Any] = {"ignore_eos": True, "custom_params": {"return_top_p_token_ids": True}}


def with_kept_ids(reply: dict[str, Any]) -> dict[str, Any]:
    """Each token, and behind it one more that could be drawn."""
    tokens = [token for _, token, _ in reply["meta_info"]["output_token_logprobs"]]
    columns = {
        "top_p_token_ids": [each for token in tokens for each in (token, token + 1)],
        "top_p_token_offsets": list(range(0, 2 * len(tokens) + 1, 2)),
    }
    packed = {name: base64.b64encode(array("i", values).tobytes()).decode() for name, values in columns.items()}
    return {**reply, "meta_info": reply["meta_info"] | packed}


async def test_the_ids_that_sampling_kept_reach_slimes_sample_also_of_a_response_in_two_parts() -> None:
    sample = Sample(prompt="", tokens=Tokens(PROMPT))
    async with FakeWorker() as worker:
        worker.faults += [Edit(with_kept_ids), Edit(with_kept_ids)]
        async with SGLangEngine(worker.url) as engine:
            await Generate(engine, ASKED | {"max_new_tokens": 2})(sample)
            sample = from_slime(to_slime(sample), like=sample)
            sample.status = SampleStatus.ABORTED
            await Generate(engine, ASKED | {"max_new_tokens": 5})(sample)
        assert [body["sampling_params"]["custom_params"] for body in worker.bodies()] == [ASKED["custom_params"]] * 2
    theirs = to_slime(sample)
    answer = expected(PROMPT, 5)
    assert list(theirs.rollout_top_p_token_ids) == [each for token in answer for each in (token, token + 1)]
    assert list(theirs.rollout_top_p_token_offsets) == [0, 2, 4, 6, 8, 10]


async def test_a_worker_that_does_not_say_them_is_an_error() -> None:
    async with FakeWorker() as worker, SGLangEngine(worker.url, attempts=1) as engine:
        with pytest.raises(WorkersUnavailable, match=r"no top_p_token_ids, .* slime's build of SGLang"):
            await engine.generate(Sample(tokens=Tokens(PROMPT)), ASKED | {"max_new_tokens": 2})
