"""A worker's reply: into columns, or an error that says what is wrong with it."""

from __future__ import annotations

import base64
import json
from array import array
from typing import Any

import pytest

from backends.sglang.reply import ReplyError, decode, progress
from eventbus import LogProbs, SampleStatus, Tokens, WeightSpan

REAL = (
    b'{"text":"es8","output_ids":[408,407,297,411,27],"meta_info":{"id":"a51e","finish_reason":{"type":"length",'
    b'"length":5},"prompt_tokens":3,"weight_version":"default","num_retractions":0,"input_token_logprobs":[],'
    b'"output_token_logprobs":[[-5.7589921951293945,408,null],[-1.5,407,null],[-2.0,297,null],[-0.25,411,null],'
    b'[-3.0,27,null]],"output_token_logprobs_length":5,"reasoning_tokens":0,"completion_tokens":5,"cached_tokens":0,'
    b'"weight_versions":[{"version":"default","start":0,"end":5}],"cached_tokens_details":null,"dp_rank":null,'
    b'"e2e_latency":0.0704,"response_sent_to_client_ts":1795959344.51}}'
)


def reply(**meta: Any) -> bytes:
    """The real reply with other meta_info; None takes a field away."""
    body = json.loads(REAL)
    body["meta_info"] = {name: value for name, value in (body["meta_info"] | meta).items() if value is not None}
    return json.dumps(body).encode()


def test_a_real_reply() -> None:
    got = decode(REAL, prompt_length=3)
    assert type(got.tokens) is Tokens
    assert got.tokens == [408, 407, 297, 411, 27]
    assert type(got.log_probs) is LogProbs
    assert got.log_probs == [-5.7589921951293945, -1.5, -2.0, -0.25, -3.0]
    assert got.text == "es8"
    assert got.status is SampleStatus.TRUNCATED
    assert got.spans == [WeightSpan("default", 0, 5)]
    assert got.meta == {
        "finish_reason": {"type": "length", "length": 5},
        "id": "a51e",
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "reasoning_tokens": 0,
        "num_retractions": 0,
        "e2e_latency": 0.0704,
    }


@pytest.mark.parametrize(
    ("finish", "status"),
    [
        ({"type": "stop", "matched": 2}, SampleStatus.COMPLETED),
        ({"type": "stop", "matched": "\n\n"}, SampleStatus.COMPLETED),
        ({"type": "length", "length": 5}, SampleStatus.TRUNCATED),
        ({"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}, SampleStatus.ABORTED),
    ],
)
def test_the_status_is_the_finish_reason(finish: dict[str, Any], status: SampleStatus) -> None:
    assert decode(reply(finish_reason=finish), 3).status is status


def test_an_unknown_finish_reason_is_an_error() -> None:
    for reason, name in (({"type": "bored"}, "bored"), ({"no": "type"}, "None")):
        with pytest.raises(ReplyError, match=f"finish_reason '{name}' is not one of stop, length, abort"):
            _ = decode(reply(finish_reason=reason), 3).status


@pytest.mark.parametrize(
    ("meta", "spans"),
    [
        (
            {"weight_versions": [{"version": "6", "start": 0, "end": 2}, {"version": 7, "start": 2, "end": 5}]},
            [WeightSpan("6", 0, 2), WeightSpan("7", 2, 5)],
        ),
        (
            {"weight_versions": [{"version": "6", "start": 1, "end": 2}]},
            [WeightSpan("unknown", 0, 1), WeightSpan("6", 1, 2), WeightSpan("unknown", 2, 5)],
        ),
        ({"weight_versions": None}, [WeightSpan("default", 0, 5)]),
        ({"weight_versions": None, "weight_version": 7}, [WeightSpan("7", 0, 5)]),
        ({"weight_versions": None, "weight_version": None}, [WeightSpan("unknown", 0, 5)]),
    ],
)
def test_spans_cover_all_tokens(meta: dict[str, Any], spans: list[WeightSpan]) -> None:
    assert decode(reply(**meta), 3).spans == spans


@pytest.mark.parametrize(
    "spans",
    [[(0, 6)], [(0, 3), (2, 5)], [(3, 2)], [(-1, 5)]],
)
def test_spans_that_do_not_fit_are_an_error(spans: list[tuple[int, int]]) -> None:
    versions = [{"version": "1", "start": start, "end": end} for start, end in spans]
    with pytest.raises(ReplyError, match="do not fit 5 tokens"):
        decode(reply(weight_versions=versions), 3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "Input data was truncated"),
        (REAL[:-1], "truncated"),
        (b"<html>", "it begins with b'<html>'"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"text": "\xff"}', "utf-8|UTF-8"),
        (reply(output_token_logprobs=[["x", 1, None]]), r"Expected `float`, got `str` - at `\$.meta_info.output_token"),
        (reply(output_token_logprobs=[[-1.0, 2.5, None]]), "Expected `int`"),
        (reply(output_token_logprobs=[[-1.0, 1 << 40, None]] * 5), "does not fit into 32 bits"),
        (reply(output_token_logprobs=None), "no output_token_logprobs"),
        (reply(completion_tokens=6), "5 tokens came, completion_tokens announces 6"),
        (reply(output_token_logprobs_length=4), "5 tokens came, output_token_logprobs_length announces 4"),
    ],
)
def test_what_is_no_reply_says_why(data: bytes, message: str) -> None:
    with pytest.raises(ReplyError, match=message):
        decode(data, 3)


def test_kept_ids_become_flat_with_offsets() -> None:
    mask = [[1, 2], [3], [4, 5, 6], [7], [8]]
    data = reply(output_token_sampling_mask=mask, output_token_sampling_logprobs=[-1.0, -2.0, -3.0, -4.0, -5.0])
    kept = decode(data, 3).kept
    assert kept is not None
    assert kept.ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert kept.offsets == [0, 2, 3, 6, 7, 8]
    assert kept.log_probs == [-1.0, -2.0, -3.0, -4.0, -5.0]


def test_log_probs_of_all_kept_ids() -> None:
    mask = [[1, 2], [3], [4], [5], [6]]
    data = reply(output_token_sampling_mask=mask, output_token_sampling_logprobs=[[-1, -2], [-3], [-4], [-5], [-6]])
    kept = decode(data, 3).kept
    assert kept is not None
    assert kept.log_probs == [-1, -2, -3, -4, -5, -6]


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"output_token_sampling_mask": [[1]]}, "output_token_sampling_mask has 1 entries for 5 tokens"),
        ({"output_token_sampling_mask": [[1]] * 5, "output_token_sampling_logprobs": [-1.0]}, "has 1 entries for 5"),
        (
            {"output_token_sampling_mask": [[1]] * 5, "output_token_sampling_logprobs": [[-1.0, -2.0]] * 5},
            "have other lengths",
        ),
        ({"output_token_sampling_mask": [[1]] * 5, "output_token_sampling_logprobs": [None] * 5}, "logprobs: .*number"),
    ],
)
def test_kept_ids_of_another_shape_are_an_error(meta: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplyError, match=message):
        decode(reply(**meta), 3)


def packed(numbers: list[int]) -> str:
    return base64.b64encode(array("i", numbers).tobytes()).decode()


@pytest.mark.parametrize("form", [list, packed])
def test_kept_ids_as_slimes_build_says_them(form: Any) -> None:
    data = reply(top_p_token_ids=form([1, 2, 3, 4, 5, 6]), top_p_token_offsets=form([0, 2, 3, 4, 5, 6]))
    kept = decode(data, 3).kept
    assert kept is not None
    assert kept.ids == [1, 2, 3, 4, 5, 6]
    assert kept.offsets == [0, 2, 3, 4, 5, 6]
    assert kept.log_probs is None


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        ([1], None, "top_p_token_offsets has 0 numbers, not 5 \\+ 1"),
        ([1], [0, 1], "top_p_token_offsets has 2 numbers"),
        ([1] * 5, [0, 1, 2, 3, 4, 6], "go up from 0 to 5"),
        ([1] * 5, [0, 3, 2, 3, 4, 5], "go up from 0 to 5"),
        ([1] * 5, [-1, 1, 2, 3, 4, 5], "go up from 0 to 5"),
        ("AAA", "AAAA", "top_p_token_ids or top_p_token_offsets: "),
        ("====", [], "top_p_token_ids or top_p_token_offsets: "),
        ([1 << 31], [0], "does not fit into 32 bits"),
    ],
)
def test_such_kept_ids_of_another_shape_are_an_error(ids: Any, offsets: Any, message: str) -> None:
    with pytest.raises(ReplyError, match=message):
        decode(reply(top_p_token_ids=ids, top_p_token_offsets=offsets), 3)


def experts(numbers: int) -> str:
    return base64.b64encode(array("i", range(numbers)).tobytes()).decode()


def test_routed_experts_have_a_row_for_all_tokens_but_the_last() -> None:
    got = decode(reply(routed_experts=experts(7 * 3 * 2)), prompt_length=3, experts=(3, 2)).experts
    assert got.shape == (7, 3, 2)
    assert got.dtype == "int32"
    assert got[1, 0].tolist() == [6, 7]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "it has no routed_experts: start the worker with --enable-return-routed-experts"),
        (experts(8 * 3 * 2), "has 48 numbers, not 7 tokens x 3 layers x 2 experts"),
        ("!!", "routed_experts: "),
        (experts(7)[:-8], "routed_experts"),
    ],
)
def test_routed_experts_of_another_shape_are_an_error(data: str | None, message: str) -> None:
    with pytest.raises(ReplyError, match=message):
        decode(reply(routed_experts=data), 3, experts=(3, 2))


def test_an_unfinished_event_of_a_stream() -> None:
    body = json.loads(reply(weight_versions=None))
    body["meta_info"]["finish_reason"] = None
    data = json.dumps(body).encode()
    assert progress(data) == (5, "default")
    assert decode(data, 3, experts=(3, 2)).finish is None
    with pytest.raises(ReplyError, match="it begins with b'nonsense'"):
        progress(b"nonsense")
