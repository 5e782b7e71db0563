"""How one sample passes its stages: one call chain, without a queue, task, limiter or deadline that nobody asked for.

`SampleChain` is made once per rollout, so that every stage's keywords are filled in before the first sample comes. It
is cut where a stage fans out: what follows is run once per child. Wrappers reach up to that cut.

After every stage the sample is whole again (`settle`): columns packed, lengths equal, or the stage is named.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from inspect import isawaitable
from time import perf_counter
from types import CoroutineType
from typing import Any, Protocol

from anyio import current_time

from eventbus.columns import LogProbs, LossMask, Tokens
from eventbus.context import RolloutContext, _current
from eventbus.events import LightSample, light
from eventbus.sample import Sample, SampleStatus
from eventbus.stage import ContractError, Drop, Dropped, Stage
from eventbus.workers import TimeSlice, WorkerPool

__all__ = ["SampleChain", "StageRun", "settle", "settle_all"]

_ABORTED = SampleStatus.ABORTED


class StageRun(Protocol):
    """What a chain keeps of one run through it."""

    context: RolloutContext
    segment: int
    """The segment that runs now."""
    error: Exception | None
    failed_in: Stage | None
    """The stage whose error is on its way out."""
    broken: ContractError | None
    """A broken contract; no wrapper can catch it for good."""
    entry: int | None
    """Position of the outermost wrapper that is open."""

    def generated(self, stage: Stage, sample: Sample, resume_at: int | None) -> None:
        """An engine has answered; the sample could be taken up again at stage `resume_at` of this segment."""

    def applied(self, stage: Stage, before: LightSample, result: Sample | list[Sample] | Drop) -> LightSample:
        """A stage that began at `context.began` is done. The sample's light form."""


class Segment:
    """Stages up to the next fan-out, which is run last and outside of the wrappers."""

    __slots__ = ("calls", "fan_out")

    def __init__(self, calls: list[tuple[Stage, Callable[..., Any]]], fan_out: bool) -> None:
        self.calls = calls
        self.fan_out = fan_out


class SampleChain:
    """The sample stages of a pipeline, bound for one rollout.

    :param offers: values for the keywords that stages ask for.
    :param traced: report what each stage changed to `run.applied`.
    :param timed: note in the context when each stage began, by the loop's clock.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        offers: Mapping[str, Any],
        pool: WorkerPool,
        *,
        traced: bool = False,
        timed: bool = False,
    ) -> None:
        self._pool = pool
        self._slice: TimeSlice = pool.slice
        self._traced = traced
        self._timed = timed or traced
        self.segments: list[Segment] = []
        calls: list[tuple[Stage, Callable[..., Any]]] = []
        for stage in stages:
            calls.append((stage, stage.call(offers)))
            if stage.fans_out:
                self.segments.append(Segment(calls, True))
                calls = []
        self.segments.append(Segment(calls, False))

    def run(self, run: StageRun, sample: Sample, at: int = 0) -> Coroutine[Any, Any, Sample | list[Sample] | Drop]:
        """The stages from position `at` of `run.segment` on, up to the end or the first fan-out into a list.

        A sample whose generation was aborted, or that comes out of the engine while the rollout is closing, leaves
        there: no later stage sees it.

        :raises ContractError: a stage returned a foreign type or left lengths that disagree.
        :raises Exception: what a stage raised; `run.failed_in` says which.
        """
        if len(self.segments) == 1:  # no fan-out: one coroutine less
            calls = self.segments[0].calls
            return self._through(run, sample, calls, at, len(calls))
        return self._segments(run, sample, at)

    async def _segments(self, run: StageRun, sample: Sample, at: int) -> Sample | list[Sample] | Drop:
        while True:
            part = self.segments[run.segment]
            result: Sample | list[Sample] | Drop
            result = await self._through(run, sample, part.calls, at, len(part.calls) - part.fan_out)
            if not part.fan_out or not isinstance(result, Sample) or result.status is _ABORTED or run.context.closing:
                return result
            result = await self._fan_out(run, result, *part.calls[-1])
            if not isinstance(result, Sample) or result.status is _ABORTED or run.context.closing:
                return result
            sample, at = result, 0
            run.segment += 1
            run.entry = None

    async def _through(
        self, run: StageRun, sample: Sample, calls: list[tuple[Stage, Callable[..., Any]]], at: int, stop: int
    ) -> Sample | Drop:
        place, time_slice, timed = run.context, self._slice, self._timed
        _current.set(place)
        stage: Stage | None = None
        before = light(sample) if self._traced else None
        try:
            for stage, call in calls[at:stop]:
                now = perf_counter()
                if now > time_slice.end:
                    await self._pool.turn()
                    now = perf_counter()
                place.stage, place.since = stage.name, now
                if timed:
                    place.began, place.attempts, place.waited = current_time(), 1, 0.0
                if stage.wraps:
                    at = calls.index((stage, call))
                    if run.entry is None:
                        run.entry = at
                    return await self._wrapped(run, sample, stage, call, calls, at + 1, stop)
                result = call(sample)
                if result is not None:
                    if type(result) is Sample:
                        sample = result
                    else:
                        if type(result) is CoroutineType or isawaitable(result):  # which looks long
                            result = await result
                        if isinstance(result, Sample):
                            sample = result
                        elif type(result) is Drop:
                            if before is not None:
                                run.applied(stage, before, result)
                            return result
                        elif result is not None:
                            raise _foreign(stage, sample, result)
                # Unrolled: this is run for every stage of every sample.
                tokens, length, mask = sample.tokens, sample.response_length, sample.loss_mask
                log_probs = sample.rollout_log_probs
                if (
                    type(tokens) is not Tokens
                    or len(tokens) < length
                    or (mask is not None and (type(mask) is not LossMask or len(mask) != length))
                    or (log_probs is not None and (type(log_probs) is not LogProbs or len(log_probs) != length))
                    or sample.teacher_log_probs is not None
                ):
                    settle(sample, stage.name)
                if before is not None:
                    before = run.applied(stage, before, sample)
                if place.generated:
                    place.generated = False
                    run.generated(stage, sample, calls.index((stage, call)) if run.entry is None else run.entry)
                    if place.closing:
                        return sample
                if sample.status is _ABORTED:
                    return sample
        except Dropped as dropped:
            if before is not None and stage is not None and not stage.wraps:  # which the stage itself raised
                run.applied(stage, before, dropped.drop)
            return dropped.drop
        except StopIteration as error:  # which a coroutine cannot raise
            run.error, run.failed_in = RuntimeError(f"stage {place.stage!r} raised StopIteration"), stage
            raise run.error from error
        except Exception as error:
            if run.error is not error:
                run.error, run.failed_in = error, stage
            if isinstance(error, ContractError):
                run.broken = error
            raise
        return sample

    async def _wrapped(
        self,
        run: StageRun,
        sample: Sample,
        stage: Stage,
        call: Callable[..., Awaitable[Any]],
        calls: list[tuple[Stage, Callable[..., Any]]],
        at: int,
        stop: int,
    ) -> Sample | Drop:
        """A stage with `call_next`: everything from `at` on is run by it."""
        inner, place = sample, run.context

        async def call_next(value: Sample) -> Sample:
            nonlocal inner
            if not isinstance(value, Sample):
                raise ContractError(f"stage {stage.name!r}: call_next takes a Sample, got {type(value).__name__}")
            settle(value, stage.name)
            own = place.began, place.attempts, place.waited
            result = await self._through(run, value, calls, at, stop)
            place.stage, (place.began, place.attempts, place.waited) = stage.name, own
            if type(result) is Drop:
                raise Dropped(result)
            inner = result  # type: ignore[assignment]
            return inner

        result = await call(sample, call_next)
        if result is None:
            result = inner
        before = light(inner) if self._traced else None
        if type(result) is Drop:
            if before is not None:
                run.applied(stage, before, result)
            return result
        if not isinstance(result, Sample):
            raise _foreign(stage, sample, result)
        settle(result, stage.name)
        if before is not None:
            run.applied(stage, before, result)
        return result

    async def _fan_out(
        self, run: StageRun, sample: Sample, stage: Stage, call: Callable[..., Any]
    ) -> Sample | list[Sample] | Drop:
        place = run.context
        place.stage, place.since = stage.name, perf_counter()
        if self._timed:
            place.began, place.attempts, place.waited = current_time(), 1, 0.0
        before = light(sample) if self._traced else None
        try:
            result = call(sample)
            if isawaitable(result):
                result = await result
            if result is None:
                result = sample
            if type(result) is Drop:
                if before is not None:
                    run.applied(stage, before, result)
                return result
            if isinstance(result, list):
                if not result:
                    raise ContractError(
                        f"stage {stage.name!r} fanned sample {sample.index} out into nothing: return Drop(reason)"
                    )
                for child in result:
                    if not isinstance(child, Sample):
                        raise _foreign(stage, sample, child, "as a child ")
                    settle(child, stage.name)
                if len(set(map(id, result))) != len(result):
                    raise ContractError(f"stage {stage.name!r} returned the same sample twice: copy it, sample.copy()")
                aborted = [child for child in result if child.status is _ABORTED]
                if before is not None:
                    run.applied(stage, before, result)
                if place.generated:
                    place.generated = False
                    for child in result:
                        run.generated(stage, child, None)
                return aborted[0] if aborted else result
            if not isinstance(result, Sample):
                raise _foreign(stage, sample, result)
            settle(result, stage.name)
            if before is not None:
                run.applied(stage, before, result)
            if place.generated:
                place.generated = False
                run.generated(stage, result, None)
            return result
        except Dropped as dropped:
            return dropped.drop
        except StopIteration as error:
            run.error, run.failed_in = RuntimeError(f"stage {place.stage!r} raised StopIteration"), stage
            raise run.error from error
        except Exception as error:
            run.error, run.failed_in = error, stage
            raise


def settle_all(samples: Iterable[Sample], stage: str, owner: str) -> None:
    """`settle` for the samples of `owner`, a group or batch.

    :raises ContractError: one is no `Sample`, or as `settle`.
    """
    for sample in samples:
        if not isinstance(sample, Sample):
            raise ContractError(f"stage {stage!r} left {owner} with a {type(sample).__name__} among its samples")
        length, mask, log_probs = sample.response_length, sample.loss_mask, sample.rollout_log_probs
        if (
            type(sample.tokens) is not Tokens
            or len(sample.tokens) < length
            or (mask is not None and (type(mask) is not LossMask or len(mask) != length))
            or (log_probs is not None and (type(log_probs) is not LogProbs or len(log_probs) != length))
            or sample.teacher_log_probs is not None
        ):
            settle(sample, stage)


def settle(sample: Sample, stage: str) -> None:
    """Pack the columns that a stage assigned as plain sequences and check that the lengths agree.

    :raises ContractError: they do not, or a column holds no numbers; names stage, sample and field.
    """
    for name, kind in (("tokens", Tokens), ("loss_mask", LossMask), ("rollout_log_probs", LogProbs),
                       ("teacher_log_probs", LogProbs)):  # fmt: skip
        column = getattr(sample, name)
        if type(column) is kind:
            continue
        if column is None and name != "tokens":
            continue
        try:
            setattr(sample, name, kind(() if column is None else column))
        except (TypeError, OverflowError, ValueError) as error:
            raise ContractError(f"stage {stage!r}, sample {sample.index}: {name} does not pack: {error}") from error
    length = sample.response_length
    if type(length) is not int or not 0 <= length <= len(sample.tokens):
        raise ContractError(
            f"stage {stage!r}, sample {sample.index}: response_length is {length}, but tokens "
            f"(prompt + response) has {len(sample.tokens)}"
        )
    for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
        column = getattr(sample, name)
        if column is not None and len(column) != length:
            raise ContractError(
                f"stage {stage!r}, sample {sample.index}: {name} has {len(column)} values, but response_length is "
                f"{length}; a stage that changes the response changes tokens, response_length and both columns together"
            )


def _foreign(stage: Stage, sample: Sample, value: Any, role: str = "") -> ContractError:
    advice = ""
    if isinstance(value, list):
        advice = "; a stage that fans out says so: `-> list[Sample]` or sample_stage(..., fans_out=True)"
    return ContractError(
        f"stage {stage.name!r} returned {role}{type(value).__name__} for sample {sample.index}, "
        f"expected Sample, None, Drop{' or list[Sample]' if stage.fans_out else ''}{advice}"
    )
