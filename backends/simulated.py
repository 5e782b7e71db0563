"""An engine without a model: it answers what a function says, after the time that a function says.

    engine = SimulatedEngine(lambda sample: Completion(text="4", tokens=[52], log_probs=[-0.1]),
                             delay=lambda sample: 2.0 * sample.index)

With `eventbus.testing.virtual_time` the delays cost nothing and the order of completion is exact.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from inspect import isawaitable
from typing import Any

import anyio

from eventbus.sample import Completion, Sample, SampleStatus, WeightSpan

__all__ = ["SimulatedEngine"]


class SimulatedEngine:
    """Answers `outcome(sample)` after `delay` seconds.

    :param outcome: gives the whole answer, or raises; may be async.
    :param delay: seconds, or a function of the sample; 0 answers at once.

    Tokens arrive evenly over the delay: an abort gives those that have arrived by then, and a sample that comes back
    with a part of its response gets the rest. `pause` and `update_weights` behave like a server's: a paused engine
    lets no time pass for its requests, and the completion says which tokens came from which weights.
    """

    def __init__(
        self,
        outcome: Callable[[Sample], Completion | Awaitable[Completion]],
        *,
        delay: float | Callable[[Sample], float] = 0.0,
    ) -> None:
        if not callable(outcome):
            raise TypeError(f"SimulatedEngine(outcome={outcome!r}): a function of the sample that gives a Completion")
        self._outcome = outcome
        self._delay = delay
        self._requests: dict[object, _Request] = {}
        self._resumed: anyio.Event | None = None
        self.weight_version: str | None = None
        self.calls = 0
        """Requests so far."""
        self.most_in_flight = 0

    @property
    def in_flight(self) -> int:
        """Requests that it works on now."""
        return len(self._requests)

    async def generate(self, sample: Sample, sampling: Mapping[str, Any]) -> Completion:
        """:raises ValueError: the delay is negative or nan.
        :raises Exception: whatever `outcome` raises.
        """
        delay = self._delay(sample) if callable(self._delay) else self._delay
        if not delay >= 0:
            raise ValueError(f"sample {sample.index}: the delay is {delay} seconds")
        self.calls += 1
        if delay == 0 and self._resumed is None:
            return self._rest(sample, await self._whole(sample), None, sampling)
        request = _Request(delay, self.weight_version)
        key = _key(sample)
        self._requests[key] = request
        self.most_in_flight = max(self.most_in_flight, len(self._requests))
        try:
            await self._pass_time(request)
            return self._rest(sample, await self._whole(sample), request, sampling)
        finally:
            self._requests.pop(key, None)
            request.gone.set()

    async def abort(self, samples: Sequence[Sample]) -> None:
        """Have these requests answer now, with the tokens that have arrived and status ABORTED."""
        requests = [request for sample in samples if (request := self._requests.get(_key(sample))) is not None]
        for request in requests:
            request.aborted = True
            request.wake()
        for request in requests:
            await request.gone.wait()

    async def pause(self) -> None:
        """Let no more time pass for any request until `resume`."""
        if self._resumed is None:
            self._resumed = anyio.Event()
            for request in self._requests.values():
                request.wake()

    async def resume(self) -> None:
        if self._resumed is not None:
            self._resumed.set()
            self._resumed = None

    async def update_weights(self, version: str) -> None:
        """From now on tokens come from `version`."""
        self.weight_version = version
        for request in self._requests.values():
            request.versions.append((version, None))
            request.wake()

    async def _whole(self, sample: Sample) -> Completion:
        outcome = self._outcome(sample)
        return await outcome if isawaitable(outcome) else outcome

    async def _pass_time(self, request: _Request) -> None:
        while not request.aborted and request.passed < request.delay:
            if self._resumed is not None:
                with anyio.CancelScope() as request.scope:
                    await self._resumed.wait()
            else:
                began = anyio.current_time()
                with anyio.CancelScope() as request.scope:
                    await anyio.sleep(request.delay - request.passed)
                # A sleep that was not cut short counts as the whole, however the clock rounds.
                woken = request.scope.cancelled_caught
                request.passed = request.passed + anyio.current_time() - began if woken else request.delay
            request.versions = [(v, request.passed if at is None else at) for v, at in request.versions]

    def _rest(
        self, sample: Sample, whole: Completion, request: _Request | None, sampling: Mapping[str, Any]
    ) -> Completion:
        """What the sample does not have yet of the whole answer, as far as time and budget allow."""
        before, total = sample.response_length, len(whole.tokens)
        status, stop = whole.status, total
        if request is not None and request.aborted:
            share = request.passed / request.delay if request.delay and math.isfinite(request.delay) else 0.0
            stop, status = before + int(share * max(0, total - before)), SampleStatus.ABORTED
        budget = sampling.get("max_new_tokens")
        if budget is not None and stop - before > budget:
            stop, status = before + budget, SampleStatus.TRUNCATED
        if before == 0 and stop == total and status is whole.status and self.weight_version is None:
            return whole
        tokens = whole.tokens[before:stop]
        text = whole.text if total == 0 else _part(whole.text, before / total, stop / total)
        versions = whole.weight_versions or self._spans(request, len(tokens))
        log_probs = None if whole.log_probs is None else whole.log_probs[before:stop]
        return Completion(text, tokens, log_probs, status, versions, whole.meta)

    def _spans(self, request: _Request | None, length: int) -> list[WeightSpan]:
        if request is None or not request.passed:
            return [WeightSpan(self.weight_version, 0, length)] if self.weight_version is not None and length else []
        starts = [(version, round(length * (at or 0.0) / request.passed)) for version, at in request.versions]
        ends = [start for _, start in starts[1:]] + [length]
        return [
            WeightSpan(version, start, end)
            for (version, start), end in zip(starts, ends, strict=True)
            if version is not None and end > start
        ]


class _Request:
    __slots__ = ("aborted", "delay", "gone", "passed", "scope", "versions")

    def __init__(self, delay: float, version: str | None) -> None:
        self.delay = delay
        self.passed = 0.0
        self.aborted = False
        self.gone = anyio.Event()
        self.scope: anyio.CancelScope | None = None
        self.versions: list[tuple[str | None, float | None]] = [(version, 0.0)]
        """(version, seconds of this request that had passed when it came)."""

    def wake(self) -> None:
        if self.scope is not None:
            self.scope.cancel()


def _part(text: str, start: float, stop: float) -> str:
    return text[round(len(text) * start) : round(len(text) * stop)]


def _key(sample: Sample) -> object:
    return id(sample) if sample.rollout_id is None else sample.rollout_id
