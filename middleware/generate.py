"""`Generate`: the stage at which an engine answers."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import isawaitable
from types import MappingProxyType
from typing import Any, Protocol

from eventbus.columns import LogProbs
from eventbus.context import current_rollout
from eventbus.sample import Completion, Sample, SampleStatus, WeightSpan
from eventbus.stage import ContractError

__all__ = ["Engine", "Generate"]

_NONE: Mapping[str, Any] = MappingProxyType({})


class Engine(Protocol):
    """Generates responses.

    Cancelling `generate` takes the request out of the engine. An engine may also offer

    - `async def abort(self, samples: Sequence[Sample]) -> None`: their `generate` returns what there is, with status
      ABORTED; done when the engine no longer works for them. A sample is known by its `rollout_id`.
    - `def tokenize(self, prompt) -> Sequence[int]`, sync or async: for samples that come without tokens.
    - `on_weights_updated`, a list of functions: it calls each with the fields of `WeightsUpdated` when it has new
      weights. A pipeline puts one there while it is open, where the engine is also a context manager; from the first
      such call on, versions in a `TrainResult` no longer count as updates.

    Each request that it makes for a sample it may tell to observers: `current_rollout().attempt_ended(...)`.
    """

    async def generate(self, sample: Sample, sampling: Mapping[str, Any]) -> Completion: ...


class Generate:
    """Has `engine` answer the sample and appends the answer to it.

    A sample that holds a part of its response goes on from there, with the budget (`max_new_tokens`) that is left; one
    that is completed or truncated already passes unchanged. `weight_versions` says which weights generated which part,
    and the stage `mask_offpolicy` keeps the older ones out of the loss.

    :param sampling: sampling parameters for the engine; `Pipeline.evaluate(sampling=...)` changes single ones.
    """

    def __init__(self, engine: Engine, sampling: Mapping[str, Any] = _NONE) -> None:
        if not callable(getattr(engine, "generate", None)):
            raise TypeError(f"Generate: {type(engine).__name__} has no generate(sample, sampling)")
        self.engine = engine
        self.sampling = dict(sampling)

    async def __call__(self, sample: Sample, *, sampling: Mapping[str, Any] = _NONE) -> None:
        """:raises ContractError: the completion is of another type, or its lengths disagree."""
        if sample.status is SampleStatus.COMPLETED or sample.status is SampleStatus.TRUNCATED:
            return
        parameters = self.sampling | dict(sampling) if sampling else self.sampling.copy()
        if sample.response_length and (budget := parameters.get("max_new_tokens")) is not None:
            parameters["max_new_tokens"] = budget - sample.response_length
            if parameters["max_new_tokens"] <= 0:
                sample.status = SampleStatus.TRUNCATED
                return
        if not sample.tokens and (tokenize := getattr(self.engine, "tokenize", None)) is not None:
            ids = tokenize(sample.prompt)
            sample.tokens += await ids if isawaitable(ids) else ids
        try:
            context = current_rollout()
        except LookupError:  # called by hand, outside of a stream
            append(sample, await self.engine.generate(sample, parameters))
            return
        if context.closing:
            sample.status = SampleStatus.ABORTED
            return
        with context.generating(self.engine, sample):
            completion = await self.engine.generate(sample, parameters)
        append(sample, completion)


def append(sample: Sample, completion: Completion) -> None:
    """Append a completion to the sample's response: text, tokens, log-probs, weight spans, loss mask and status.

    :raises ContractError: it is no `Completion`, or `log_probs` is not as long as `tokens`.
    """
    if not isinstance(completion, Completion):
        raise ContractError(f"sample {sample.index}: the engine returned {type(completion).__name__}, not a Completion")
    length, log_probs = len(completion.tokens), completion.log_probs
    if log_probs is not None and len(log_probs) != length:
        raise ContractError(
            f"sample {sample.index}: the completion has {length} tokens, but {len(log_probs)} log_probs"
        )
    before = sample.response_length
    if log_probs is None:
        if length and sample.rollout_log_probs is not None:
            raise ContractError(
                f"sample {sample.index}: the first {before} response tokens have log-probs, the completion has none"
            )
    elif sample.rollout_log_probs is not None:
        sample.rollout_log_probs += log_probs
    elif before == 0:
        sample.rollout_log_probs = LogProbs(log_probs)
    elif length:
        raise ContractError(f"sample {sample.index}: the first {before} response tokens have no log-probs")
    sample.tokens += completion.tokens
    sample.response += completion.text
    sample.response_length = before + length
    if sample.loss_mask is not None:
        sample.loss_mask += [1] * length
    for span in completion.weight_versions:
        sample.weight_versions.append(WeightSpan(span.version, span.start + before, span.end + before))
    sample.status = completion.status
    if completion.meta:
        sample.metadata["generation"] = completion.meta
