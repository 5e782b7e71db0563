"""What a worker answers, from JSON into packed columns, and checked: a reply that contradicts itself is an error.

What a caller can rely on: `tokens`, `log_probs` and the kept ids are as long as the reply announced, the weight spans
cover the tokens without a gap, and the routed experts have a row for every token but the last.

The token ids are those of `output_token_logprobs`; `output_ids` says the same once more and is not decoded.
"""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from itertools import accumulate, chain
from operator import gt
from typing import Annotated, Any, Final

import msgspec

from eventbus.columns import LogProbs, Tokens
from eventbus.imports import optional_dependency
from eventbus.sample import SampleStatus, WeightSpan

__all__ = ["UNREADABLE", "Kept", "Reply", "ReplyError", "decode", "progress"]

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What reading JSON raises that is none, or too deep."""

UNKNOWN: Final = "unknown"
"""Weight version of a token for which the worker names none."""


class ReplyError(ValueError):
    """A reply that is no reply, or contradicts itself. Says what and where."""


class Kept(msgspec.Struct):
    """What sampling kept of the vocabulary (top-k, top-p) at each token: the ids of token i are
    `ids[offsets[i]:offsets[i + 1]]`."""

    ids: Tokens
    offsets: Tokens
    log_probs: LogProbs | None
    """Of the distribution that was drawn from: one per token, or with `sampling_logprobs_mode="support"` one per id."""


class Reply(msgspec.Struct):
    """One answer: the response alone."""

    text: str
    tokens: Tokens
    log_probs: LogProbs
    spans: list[WeightSpan]
    finish: str | None
    """Why it ended: stop, length or abort. None: there is more to come, in a stream."""
    meta: dict[str, Any]
    """What the worker said beside that, by its own names."""
    kept: Kept | None = None
    experts: Any = None
    """int32 array [prompt + response - 1, layers, experts per token]."""

    @property
    def status(self) -> SampleStatus:
        """:raises ReplyError: the finish reason is none that is known."""
        if self.finish is None:
            return SampleStatus.ABORTED
        try:
            return _STATUS[self.finish]
        except KeyError:
            raise ReplyError(f"finish_reason {self.finish!r} is not one of {', '.join(_STATUS)}") from None


_STATUS = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}


def decode(data: bytes | memoryview, prompt_length: int, experts: tuple[int, int] | None = None) -> Reply:
    """A reply of `/generate`, or one (cumulative) event of its stream.

    :param prompt_length: tokens that the request sent.
    :param experts: layers and experts per token of the routed experts that the request asked for.
    :raises ReplyError: it is not what the worker announces, or not what was asked for.
    """
    try:
        raw = _decoder.decode(data)
    except UNREADABLE as error:
        raise ReplyError(f"{error}; it begins with {bytes(data[:200])!r}") from error
    meta = raw.meta_info
    if meta.output_token_logprobs is None:
        raise ReplyError("it has no output_token_logprobs, though return_logprob was sent")
    # Two comprehensions over structs that hold no container are what costs least here.
    tokens = _column(Tokens, [entry.token for entry in meta.output_token_logprobs])
    log_probs = LogProbs([entry.log_prob for entry in meta.output_token_logprobs])
    length = len(tokens)
    for name, announced in (
        ("completion_tokens", meta.completion_tokens),
        ("output_token_logprobs_length", meta.output_token_logprobs_length),
    ):
        if announced is not None and announced != length:
            raise ReplyError(f"{length} tokens came, {name} announces {announced}")
    reply = Reply(
        text=raw.text,
        tokens=tokens,
        log_probs=log_probs,
        spans=_spans(meta, length),
        finish=None if meta.finish_reason is None else str(meta.finish_reason.get("type")),
        meta={name: value for name in _LIGHT if (value := getattr(meta, name)) is not None},
    )
    if meta.output_token_sampling_mask is not None:
        reply.kept = _kept(meta.output_token_sampling_mask, meta.output_token_sampling_logprobs, length)
    elif meta.top_p_token_ids is not None:
        reply.kept = _kept_flat(meta.top_p_token_ids, meta.top_p_token_offsets, length)
    if experts is not None and reply.finish is not None:
        reply.experts = _experts(meta.routed_experts, prompt_length + length - 1, experts)
    return reply


def progress(data: bytes | memoryview) -> tuple[int, str]:
    """How many tokens one event of a stream has, and the weight version of the newest, without decoding the tokens.

    :raises ReplyError: it is no such event; the message is the worker's where it reports an error.
    """
    try:
        event = _progress.decode(data)
    except UNREADABLE as error:
        raise ReplyError(f"{error}; it begins with {bytes(data[:200])!r}") from error
    return event.meta_info.completion_tokens, _version(event.meta_info.weight_version)


class _Entry(msgspec.Struct, array_like=True, gc=False):
    """[log-prob, token id, text or null]; what is not named here is skipped."""

    log_prob: float
    token: Annotated[int, msgspec.Meta(ge=0)]  # a negative one ends a worker that is to go on from it


class _Span(msgspec.Struct):
    version: str | int
    start: int
    end: int


class _Meta(msgspec.Struct):
    finish_reason: dict[str, Any] | None
    completion_tokens: int | None = None
    output_token_logprobs: list[_Entry] | None = None
    output_token_logprobs_length: int | None = None
    weight_versions: list[_Span] | None = None
    weight_version: str | int | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    output_token_sampling_logprobs: list[Any] | None = None
    top_p_token_ids: str | list[int] | None = None  # the kept ids again, as slime's build of SGLang says them
    top_p_token_offsets: str | list[int] | None = None
    routed_experts: str | None = None
    # Light: they are kept under their names
    id: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    cached_tokens_details: Any = None
    reasoning_tokens: int | None = None
    num_retractions: int | None = None
    dp_rank: int | None = None
    e2e_latency: float | None = None
    image_tokens: int | None = None
    audio_tokens: int | None = None
    video_tokens: int | None = None
    spec_accept_rate: float | None = None
    spec_accept_length: float | None = None
    spec_num_correct_drafts: int | None = None
    spec_num_proposed_drafts: int | None = None
    spec_verify_ct: int | None = None
    spec_cap_length: float | None = None
    spec_block_accept_length: float | None = None
    spec_correct_drafts_histogram: Any = None
    spec_cap_lens_histogram: Any = None
    # Only where a request asked for them
    output_top_logprobs: Any = None
    output_token_ids_logprobs: Any = None
    input_top_logprobs: Any = None
    input_token_ids_logprobs: Any = None
    hidden_states: Any = None
    indexer_topk: Any = None


_LIGHT = ("finish_reason", *_Meta.__struct_fields__[_Meta.__struct_fields__.index("id") :])


class _Body(msgspec.Struct):
    text: str
    meta_info: _Meta


class _ProgressMeta(msgspec.Struct):
    completion_tokens: int
    weight_version: str | int | None = None


class _Progress(msgspec.Struct):
    meta_info: _ProgressMeta


_decoder = msgspec.json.Decoder(_Body)
_progress = msgspec.json.Decoder(_Progress)


def _column(kind: type[Tokens], values: list[int]) -> Tokens:
    try:
        return kind(values)
    except OverflowError as error:
        raise ReplyError(f"a token id does not fit into 32 bits: {error}") from error


def _version(version: str | int | None) -> str:
    return UNKNOWN if version is None else str(version)


def _spans(meta: _Meta, length: int) -> list[WeightSpan]:
    """Spans that cover all tokens: those of the worker, else its scalar, else unknown."""
    if not length:
        return []
    if meta.weight_versions is None:
        return [WeightSpan(_version(meta.weight_version), 0, length)]
    spans: list[WeightSpan] = []
    at = 0
    for span in meta.weight_versions:
        if not at <= span.start <= span.end <= length:
            raise ReplyError(f"weight_versions {meta.weight_versions} do not fit {length} tokens")
        if at < span.start:
            spans.append(WeightSpan(UNKNOWN, at, span.start))
        if span.start < span.end:
            spans.append(WeightSpan(str(span.version), span.start, span.end))
        at = span.end
    if at < length:
        spans.append(WeightSpan(UNKNOWN, at, length))
    return spans


def _kept(mask: list[list[int]], log_probs: list[Any] | None, length: int) -> Kept:
    if len(mask) != length:
        raise ReplyError(f"output_token_sampling_mask has {len(mask)} entries for {length} tokens")
    ids = _column(Tokens, list(chain.from_iterable(mask)))
    offsets = Tokens(list(accumulate(map(len, mask), initial=0)))
    if log_probs is None:
        return Kept(ids, offsets, None)
    if len(log_probs) != length:
        raise ReplyError(f"output_token_sampling_logprobs has {len(log_probs)} entries for {length} tokens")
    try:
        if log_probs and isinstance(log_probs[0], list):
            if [len(entry) for entry in log_probs] != [len(entry) for entry in mask]:
                raise ReplyError("output_token_sampling_logprobs and output_token_sampling_mask have other lengths")
            log_probs = list(chain.from_iterable(log_probs))
        return Kept(ids, offsets, LogProbs(log_probs))
    except (TypeError, OverflowError) as error:
        raise ReplyError(f"output_token_sampling_logprobs: {error}") from error


def _kept_flat(ids: str | list[int], offsets: str | list[int] | None, length: int) -> Kept:
    """Both int32, as lists or in base64."""
    try:
        columns = [
            Tokens.from_bytes(binascii.a2b_base64(data, strict_mode=True))
            if isinstance(data, str)
            else _column(Tokens, data)
            for data in (ids, offsets or [])
        ]
    except ValueError as error:
        raise ReplyError(f"top_p_token_ids or top_p_token_offsets: {error}") from error
    kept = Kept(columns[0], columns[1], None)
    ends = kept.offsets
    if len(ends) != length + 1 or ends[0] != 0 or ends[-1] != len(kept.ids) or any(map(gt, ends, ends[1:])):
        raise ReplyError(
            f"top_p_token_offsets has {len(ends)} numbers, not {length} + 1 that go up from 0 to {len(kept.ids)}, "
            "the number of top_p_token_ids"
        )
    return kept


def _experts(data: str | None, rows: int, shape: Sequence[int]) -> Any:
    if data is None:
        raise ReplyError(
            "it has no routed_experts: start the worker with --enable-return-routed-experts, and see that the request "
            "went to it directly"
        )
    with optional_dependency():
        import numpy as np
    layers, top_k = shape
    try:
        flat = np.frombuffer(binascii.a2b_base64(data, strict_mode=True), "<i4")
    except ValueError as error:  # binascii.Error is one
        raise ReplyError(f"routed_experts: {error}") from error
    if flat.size != rows * layers * top_k:
        raise ReplyError(
            f"routed_experts has {flat.size} numbers, not {rows} tokens x {layers} layers x {top_k} experts"
        )
    return flat.reshape(rows, layers, top_k)
