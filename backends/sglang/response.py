"""`Response`: one call of `generate`, from what is sent to what has come of it.

What this module keeps true:

- an attempt asks for what is missing: it goes on from the tokens that are there, with the budget that is left;
- what a worker generated is added whole and checked, or not at all;
- the sample is changed when its response is done, by `completion`, never before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import anyio
import msgspec

from backends.sglang.reply import Kept, Reply, ReplyError, decode, progress
from backends.sglang.request import check_ids, multimodal
from backends.sglang.workers import Worker, Workers
from eventbus.columns import LogProbs, Tokens
from eventbus.sample import Completion, Sample, SampleStatus, WeightSpan

__all__ = ["Response"]

ROUTING_KEY: Final = "X-SMG-Routing-Key"
"""Header by which a router keeps a session at one worker."""
SERVER_BUDGET: Final = 128
"""`max_new_tokens` of a request that names none."""


class Response:
    """What a call of `generate` is to bring.

    :param sampling: checked; `max_new_tokens` counts from here, whatever the sample has already.
    :param body: fields of the request beside those.
    :param experts: as in `reply.decode`.
    :param id: of the call; its attempts are numbered.
    :raises ValueError: `multimodal_inputs` has a key that is no field of SGLang.
    """

    __slots__ = (
        "_gone", "_seen", "_seen_versions", "_vocabulary", "_woken", "attempt", "avoid", "body", "counts", "ended",
        "experts", "experts_shape", "failed", "id", "index", "kept", "limit", "log_probs", "meta", "prompt", "rid",
        "sampling", "session", "spans", "status", "stopped", "text", "tokens", "unheard", "worker",
    )  # fmt: skip

    def __init__(
        self,
        sample: Sample,
        sampling: Mapping[str, Any],
        body: Mapping[str, Any],
        experts: tuple[int, int] | None,
        id: str,
    ) -> None:
        # Thousands of these wait at a time, and the garbage collector goes through each container that they hold: so
        # they hold few, and what only some need is made when it is needed.
        self.id = id
        self.index = sample.index
        self.session = sample.session_id
        self.sampling = sampling
        media = multimodal(sample)
        self.body = {**body, **media} if media else body
        self.prompt = sample.tokens
        self.experts_shape = experts
        self.stopped = False
        """Somebody wants what there is."""
        self.ended = False
        """Its `generate` is over."""
        self._vocabulary: int | None = None
        self._woken: asyncio.Event | None = None
        self._gone: asyncio.Event | None = None
        # Attempts
        self.attempt = 0
        self.failed: tuple[str, ...] = ()
        """What the failed ones ended of."""
        self.avoid: Worker | None = None
        """The last that failed."""
        self.rid = ""
        self.worker: Worker | None = None
        """That is working on it."""
        self.limit: asyncio.Timeout | None = None
        """Of the attempt that is open."""
        self.unheard = 0
        """Aborts that nobody acknowledged, in a row."""
        self._seen: bytes | None = None
        self._seen_versions: tuple[WeightSpan, ...] = ()
        # What has come
        self.text = ""
        self.tokens: Tokens = _NO_TOKENS
        self.log_probs: LogProbs = _NO_LOG_PROBS
        self.spans: tuple[WeightSpan, ...] = ()
        self.kept: Kept | None = None
        self.experts: Any = None
        self.status: SampleStatus | None = None
        """None: not done."""
        self.meta: Mapping[str, Any] = _NOTHING
        self.counts: Mapping[str, int] = _NOTHING

    @property
    def done(self) -> bool:
        return self.status is not None

    # How it ends

    def stop(self) -> None:
        """What there is will do. An attempt that is open ends when its worker has given it up."""
        self.stopped = True
        if self.worker is None and self.status is None:  # nobody works on it: it is between two attempts
            self.status = SampleStatus.ABORTED
        if self._woken is not None:
            self._woken.set()

    def give_up(self) -> None:
        """An attempt that is open ends now, as if it had taken too long."""
        if self.limit is not None:
            self.limit.reschedule(0.0)

    async def rest(self, seconds: float, workers: Workers | None = None) -> None:
        """Until then, or until `stop`, or until there is news of `workers`."""
        woken = self._woken = asyncio.Event()
        waiting = set() if workers is None else workers.waiting
        waiting.add(woken)
        try:
            with anyio.move_on_after(seconds):
                await woken.wait()
        finally:
            waiting.discard(woken)

    def end(self) -> None:
        """`generate` ends."""
        self.ended = True
        if self._gone is not None:
            self._gone.set()

    async def gone(self) -> None:
        """Until `end`."""
        if not self.ended:
            self._gone = self._gone or asyncio.Event()
            await self._gone.wait()

    # What is asked

    def limit_ids(self, vocabulary: int | None) -> None:
        """The model has so many token ids, so no other may be sent. Before the first attempt.

        :raises ValueError: the sample, or a stop token, has another.
        """
        self._vocabulary = vocabulary
        check_ids(self.prompt, vocabulary)
        if stop := self.sampling.get("stop_token_ids"):  # with min_new_tokens a worker dies of these, too
            check_ids(Tokens(stop), vocabulary, "stop_token_ids")

    @property
    def headers(self) -> dict[str, str] | None:
        return None if self.session is None else {ROUTING_KEY: self.session}

    def begin(self, worker: Worker) -> bytes:
        """The body of a new attempt.

        :raises TypeError: it has no JSON form.
        """
        self.attempt += 1
        self.rid = f"{self.id}-{self.attempt}"
        self.worker = worker
        self._seen, self._seen_versions = None, ()
        sampling, got = self.sampling, len(self.tokens)
        if got:
            left = {"max_new_tokens": self._budget - got}
            if minimum := sampling.get("min_new_tokens"):
                left["min_new_tokens"] = max(0, minimum - got)
            sampling = {**sampling, **left}
        body = {
            "rid": self.rid,
            "input_ids": (self.prompt + self.tokens if got else self.prompt).tolist(),
            "sampling_params": sampling,
            **self.body,
        }
        try:
            return msgspec.json.encode(body)
        except (TypeError, UnicodeEncodeError, OverflowError) as error:
            raise TypeError(f"sample {self.index}: the request has no JSON form: {error}") from error

    @property
    def _budget(self) -> int:
        budget = self.sampling.get("max_new_tokens")
        return SERVER_BUDGET if budget is None else int(budget)

    # What comes

    def see(self, event: bytes) -> None:
        """An event of the stream: it holds all that came before it, so only the last is decoded."""
        count, version = progress(event)
        before = self._seen_versions[-1].end if self._seen_versions else 0
        if count < before:
            raise ReplyError(f"{count} tokens came in an event of the stream, after one with {before}")
        if count > before:
            self._seen_versions += (WeightSpan(version, before, count),)
        self._seen = event

    def take_seen(self) -> None:
        """The stream has ended: add its last event to the response.

        :raises ReplyError: as `take`; what it brought is gone.
        """
        if self._seen is not None:
            data, self._seen = self._seen, None
            self.take(data, self._seen_versions)

    def take(self, data: bytes, seen: Sequence[WeightSpan] = ()) -> None:
        """Add what a worker generated to the response.

        :param seen: spans of the versions as a stream said them on the way, for one that did not come to its end.
        :raises ReplyError: the reply contradicts itself, or has a token id that cannot be sent back to go on from.
        """
        before = len(self.tokens)
        reply = decode(data, len(self.prompt) + before, self.experts_shape)
        try:
            check_ids(reply.tokens, self._vocabulary, "output_token_logprobs")
        except ValueError as error:
            raise ReplyError(str(error)) from None
        status = reply.status
        length = len(reply.tokens)
        if self.sampling.get("max_new_tokens") is not None and length > self._budget - before:
            raise ReplyError(f"{length} tokens came, max_new_tokens was {self._budget - before}")
        if reply.kept is None and length and self.body.get("return_sampling_mask"):
            raise ReplyError(
                "it has no output_token_sampling_mask: start the worker with --sampling-mask-max-tokens, and give a "
                "top_k that is not above it"
            )
        if reply.kept is None and length and (self.sampling.get("custom_params") or {}).get("return_top_p_token_ids"):
            raise ReplyError("it has no top_p_token_ids, which return_top_p_token_ids asks of slime's build of SGLang")
        if before:
            self.text += reply.text
            self.tokens += reply.tokens
            self.log_probs += reply.log_probs
        else:
            self.text, self.tokens, self.log_probs = reply.text, reply.tokens, reply.log_probs
        for span in seen if reply.finish is None else reply.spans:
            self._add_span(span.version, span.start + before, span.end + before)
        self._keep_ids(reply)
        self.experts = reply.experts  # of all tokens, those of earlier attempts included; of a broken stream none
        self.meta = reply.meta
        self.counts = {name: self.counts.get(name, 0) + (reply.meta.get(name) or 0) for name in _COUNTS}
        if status is not SampleStatus.ABORTED or self.stopped:
            self.status = status
        elif len(self.tokens) >= self._budget:
            self.status = SampleStatus.TRUNCATED

    def _add_span(self, version: str, start: int, end: int) -> None:
        if self.spans and self.spans[-1].version == version:
            start, self.spans = self.spans[-1].start, self.spans[:-1]
        self.spans += (WeightSpan(version, start, end),)

    def _keep_ids(self, reply: Reply) -> None:
        if self.kept is None or reply.kept is None:
            self.kept = self.kept or reply.kept
            return
        shift = self.kept.offsets[-1]
        self.kept.offsets += [shift + offset for offset in reply.kept.offsets[1:]]
        self.kept.ids += reply.kept.ids
        if self.kept.log_probs is not None and reply.kept.log_probs is not None:
            self.kept.log_probs += reply.kept.log_probs

    # What is made of it

    def completion(self, sample: Sample) -> Completion:
        """The response; what a completion has no place for is put on the sample."""
        assert self.status is not None
        meta = dict(self.meta)
        if self.failed:
            meta["failed_attempts"] = list(self.failed)
        if self.experts_shape is not None and self.tokens:
            sample.rollout_routed_experts = self.experts
        if self.kept is not None:
            _append_kept(sample, self.kept)
        counts = self.counts
        if counts.get("prompt_tokens"):
            cached, prompt = counts["cached_tokens"], counts["prompt_tokens"]
            _add(sample, "prefix_cache_info", {"cached_tokens": cached, "total_prompt_tokens": prompt})
        if counts.get("spec_verify_ct"):
            spec = {name: counts[name] for name in _SPEC}
            _add(sample, "spec_info", {**spec, "completion_tokens": len(self.tokens)})
        return Completion(
            self.text, self.tokens or Tokens(), self.log_probs or LogProbs(), self.status, list(self.spans), meta
        )


_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
_NO_TOKENS: Final = Tokens()
_NO_LOG_PROBS: Final = LogProbs()
"""Shared, so never added to in place."""
_SPEC: Final = ("spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts")
_COUNTS: Final = ("prompt_tokens", "cached_tokens", *_SPEC)


def _add(sample: Sample, field: str, counts: Mapping[str, int]) -> None:
    """Counts of an execution add up over its requests."""
    before = getattr(sample, field) or {}
    setattr(sample, field, {name: before.get(name, 0) + number for name, number in counts.items()})


def _append_kept(sample: Sample, kept: Kept) -> None:
    if sample.response_length and sample.rollout_top_p_token_ids is None:
        raise ValueError(
            f"sample {sample.index}: its first {sample.response_length} response tokens have no kept sampling ids"
        )
    if not sample.response_length:
        sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets = kept.ids, kept.offsets
        if kept.log_probs is not None:
            sample.metadata["sampling_log_probs"] = kept.log_probs
        return
    shift = sample.rollout_top_p_token_offsets[-1]
    sample.rollout_top_p_token_ids += kept.ids
    sample.rollout_top_p_token_offsets += [shift + offset for offset in kept.offsets[1:]]
    if kept.log_probs is not None:
        sample.metadata["sampling_log_probs"] += kept.log_probs
