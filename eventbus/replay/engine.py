"""`ReplayEngine`: an engine that answers what a log recorded, so that a live pipeline runs without model and GPU."""

from __future__ import annotations

import heapq
import math
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import anyio
from anyio.lowlevel import checkpoint

from eventbus.columns import LogProbs
from eventbus.context import current_rollout
from eventbus.events import GroupEnded, GroupSubmitted, SampleGenerated
from eventbus.log import LogReader
from eventbus.replay.record import RecordedLog, ReplayError, plain, sound
from eventbus.sample import Completion, Sample, SampleStatus, WeightSpan

__all__ = ["ReplayEngine"]

_PATIENCE: Final = 30.0
"""Seconds after the last answer of a round that a request which the run stopped waits for being stopped again."""

_PASSES: Final = 50
"""Passes of the event loop in which an answer waits for those before it to be asked for."""

_NOTHING: Final = Completion("", (), None, SampleStatus.ABORTED)

_KINDS: Final = ("rollout_started", "group_submitted", "sample_generated", "group_ended")


class ReplayEngine:
    """Answers as the engine of a recorded run did: text, tokens, log-probs, status and weight versions.

        engine = ReplayEngine("run.mcap")
        Pipeline(Prompts(engine.prompts(), engine.group_size), [Generate(engine), *stages], BatchSpec(...))

    An answer belongs to a rollout (or evaluation), a group and a sample; the second time that the same is asked in the
    same rollout it is the second recorded answer. What the rollout did not ask gets the answer that another rollout got
    for the same prompt and sample, and counts in `elsewhere`: a batch may be full a moment before it was, and then a
    group moves on to the next. A sample that holds a part of its response gets the rest.

    With the default speed answers come at once, those that are asked for at the same time in the recorded order, so
    that groups complete and a filter decides as they did (on trio, tasks that can go on at the same time do so in any
    order); with a finite one after the recorded seconds, which cost nothing in virtual time.

    What the run had asked for and stopped, when its batch was full, waits here for being stopped again; half a minute
    after the last recorded answer of its rollout it is an error. Anything else that the log does not have is one at
    once. A stage that asks several times for one sample cannot be served: the log has its result, not each answer.

    :param log: a `LogReader` or the path of a log.
    :param speed: 2 for twice as fast as recorded.
    :raises ValueError: `speed` is not more than 0.
    :raises LogError: the log cannot be read.
    """

    def __init__(self, log: RecordedLog | str | os.PathLike[str], speed: float = math.inf) -> None:
        if not speed > 0:
            raise ValueError(f"ReplayEngine(speed={speed}): how many times as fast as recorded, more than 0")
        self.speed = speed
        self._log: RecordedLog = LogReader(log) if isinstance(log, str | os.PathLike) else log
        self.elsewhere = 0
        """Answers that were given in another rollout than the one of which they are."""
        self._all: dict[tuple[bool, int, int], list[SampleGenerated]] | None = None
        self._answers: dict[tuple[int, bool], _Answers] = {}
        self._requests: dict[object, _Request] = {}

    @property
    def group_size(self) -> int:
        """Executions per prompt.

        :raises ReplayError: the log has no rollout with a group, or its groups differ in this.
        """
        first: GroupSubmitted | None = None
        for event in sound(self._log.events(("group_submitted",), evaluation=False)):
            first = first or event
            if len(event.executions) != len(first.executions):
                told = " and ".join(f"group {each.group_index} has {len(each.executions)}" for each in (first, event))
                raise ReplayError(f"the groups of the log have not one number of executions: {told}")
        if first is None:
            raise ReplayError("the log has no rollout with a group")
        return len(first.executions)

    def prompts(self, rollout: int | None = None, *, evaluation: bool = False) -> list[Sample]:
        """The recorded prompts in the order in which they were asked for, each once: for `Prompts`.

        :param rollout: only those of one round; with `evaluation` of an evaluation.
        """
        prompts: dict[int, Sample] = {}
        for event in sound(self._log.events(("group_submitted",), rollout=rollout, evaluation=evaluation)):
            if isinstance(event, GroupSubmitted) and event.group_index not in prompts:
                prompts[event.group_index] = plain(self._log.samples(event)[0][0])
                prompts[event.group_index].group_index = event.group_index
        return list(prompts.values())

    async def generate(self, sample: Sample, sampling: Mapping[str, Any]) -> Completion:
        """The recorded answer; `sampling` plays no part.

        :raises ReplayError: this was never generated, or the sample is not what the engine was asked with.
        :raises LookupError: it is called outside of a pipeline.
        """
        answers, key = self._find(sample)
        event = answers.next(key)
        if event is None and key not in answers.stopped:
            if key in answers.given or (other := self._elsewhere(answers, key)) is None:
                raise ReplayError(self._never(answers, key))
            self.elsewhere += 1
            return self._completion(sample, other)
        request = self._requests[_id(sample)] = _Request(-1 if event is None else event.seq)
        try:
            if event is None or event.status is SampleStatus.ABORTED:
                await self._until_stopped(request, answers, key)
                if event is None:
                    return _NOTHING
            elif self.speed < math.inf:
                with anyio.move_on_after(event.seconds / self.speed):
                    await request.event.wait()
                    return _NOTHING
            else:
                await answers.turns.wait(request)
                if request.aborted:
                    return _NOTHING
            answers.last = anyio.current_time()
            return self._completion(sample, event)
        finally:
            self._requests.pop(_id(sample), None)

    def tokenize(self, prompt: Any) -> Sequence[int]:
        """The recorded tokens of the running stage's prompt."""
        context = current_rollout()
        answers = self._round(context.rollout_id, context.evaluation)
        event = answers.any.get((context.group_index, context.index))
        if event is None:
            return []
        recorded = self._log.samples(event)[0][0]
        return recorded.tokens[: len(recorded.tokens) - recorded.response_length]

    async def abort(self, samples: Sequence[Sample]) -> None:
        """Have these requests answer now, with what the run had when it stopped them."""
        for sample in samples:
            if (request := self._requests.get(_id(sample))) is not None:
                request.aborted = request.done = True
                request.event.set()
        while any(_id(sample) in self._requests for sample in samples):
            await anyio.sleep(0)

    def _find(self, sample: Sample) -> tuple[_Answers, tuple[int | None, int | None]]:
        context = current_rollout()
        answers = self._round(context.rollout_id, context.evaluation)
        return answers, (context.group_index, sample.index)

    def _round(self, rollout: int, evaluation: bool) -> _Answers:
        answers = self._answers.get((rollout, evaluation))
        if answers is None:
            events = sound(self._log.events(_KINDS, rollout=rollout, evaluation=evaluation))
            answers = self._answers[rollout, evaluation] = _Answers(rollout, evaluation, events)
        return answers

    async def _until_stopped(self, request: _Request, answers: _Answers, key: Any) -> None:
        while not request.aborted:
            since = answers.last
            patience = _PATIENCE if answers.open else answers.last + _PATIENCE - anyio.current_time()
            with anyio.move_on_after(patience):
                await request.event.wait()
            if answers.last == since and not request.event.is_set():
                raise ReplayError(self._never(answers, key))

    def _never(self, answers: _Answers, key: tuple[int | None, int | None]) -> str:
        group, index = key
        where = f"{answers}, group {group}, sample {index}"
        given = answers.given.get(key, 0)
        if key in answers.stopped and not answers.waiting.get(key) and given <= answers.aborted.get(key, 0):
            return f"{where}: the run had stopped this before the engine answered: it was never generated"
        if given:
            return f"{where}: asked {given + 1} times, and the run was answered {given} times: no more was generated"
        return f"{where}: this was never generated, in no rollout of the log"

    def _elsewhere(self, answers: _Answers, key: tuple[int | None, int | None]) -> SampleGenerated | None:
        """What was generated for the same in the nearest other rollout."""
        if self._all is None:
            self._all = {}
            for event in sound(self._log.events(("sample_generated",))):
                if isinstance(event, SampleGenerated) and event.status is not SampleStatus.ABORTED:
                    self._all.setdefault((event.evaluation, event.group_index, event.index), []).append(event)
        group, index = key
        there = self._all.get((answers.evaluation, group or 0, index or 0), [])
        return min(there, key=lambda event: abs(event.rollout_id - answers.rollout_id), default=None)

    def _completion(self, sample: Sample, event: SampleGenerated) -> Completion:
        """What the sample does not have yet of the recorded response."""
        recorded = self._log.samples(event)[0][0]
        before, length = sample.response_length, recorded.response_length
        tokens = recorded.tokens
        prompt = len(tokens) - length
        if sample.tokens and sample.tokens != tokens[: len(sample.tokens)]:
            raise ReplayError(
                f"group {event.group_index}, sample {event.index}: it has other tokens than those that the engine was "
                "asked with in the run: what it would have answered is not in the log"
            )
        if before > length:
            raise ReplayError(
                f"group {event.group_index}, sample {event.index}: it has {before} response tokens already, the "
                f"recorded response has {length}"
            )
        log_probs = recorded.rollout_log_probs
        text = recorded.response
        meta = recorded.metadata.get("generation")
        return Completion(
            text[len(sample.response) :] if text.startswith(sample.response) else text,
            tokens[prompt + before :],
            None if log_probs is None else LogProbs(log_probs[before:]),
            event.status,
            [
                WeightSpan(span.version, max(span.start, before) - before, span.end - before)
                for span in recorded.weight_versions
                if span.end > before
            ],
            dict(meta) if isinstance(meta, dict) else {},
        )


class _Answers:
    """What was generated in one round."""

    def __init__(self, rollout_id: int, evaluation: bool, events: Any) -> None:
        self.rollout_id = rollout_id
        self.evaluation = evaluation
        self.waiting: dict[tuple[int | None, int | None], deque[SampleGenerated]] = {}
        self.any: dict[tuple[int | None, int | None], SampleGenerated] = {}
        self.given: dict[tuple[int | None, int | None], int] = {}
        self.aborted: dict[tuple[int | None, int | None], int] = {}
        """Answers that the run cut short."""
        self.stopped: set[tuple[int | None, int | None]] = set()
        """Samples of groups that the run stopped."""
        self.open = 0
        """Answers that nobody has asked for yet."""
        self.last = -math.inf
        order: list[int] = []
        submitted: dict[int, GroupSubmitted] = {}
        for event in events:
            if isinstance(event, GroupSubmitted):
                submitted[event.group_index] = event
            elif isinstance(event, SampleGenerated):
                key = event.group_index, event.index
                self.waiting.setdefault(key, deque()).append(event)
                self.any.setdefault(key, event)
                if event.status is SampleStatus.ABORTED:
                    self.aborted[key] = self.aborted.get(key, 0) + 1
                else:
                    self.open += 1
                    order.append(event.seq)
            elif isinstance(event, GroupEnded) and event.outcome != "kept" and event.group_index in submitted:
                self.stopped.update((event.group_index, index) for index in submitted[event.group_index].indices)
        self.turns = _Turns(order)

    def next(self, key: tuple[int | None, int | None]) -> SampleGenerated | None:
        waiting = self.waiting.get(key)
        if not waiting:
            return None
        event = waiting.popleft()
        self.given[key] = self.given.get(key, 0) + 1
        self.open -= event.status is not SampleStatus.ABORTED
        return event

    def __str__(self) -> str:
        return f"{'evaluation' if self.evaluation else 'rollout'} {self.rollout_id}"


class _Request:
    """One question that waits for its answer."""

    __slots__ = ("aborted", "done", "event", "seq")

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.done = False
        """It has its answer, or needs none any more."""
        self.aborted = False
        self.event = anyio.Event()


class _Turns:
    """Gives answers in the recorded order as far as they are asked for at the same time.

    One of the requests that wait leads: it lets out the first of them when all that was answered before it has been, or
    when nobody asks for that within some passes of the loop.
    """

    def __init__(self, order: list[int]) -> None:
        self._order = order
        self._at = 0
        """What comes before this position has been let out, or is not waited for any more."""
        self._gone: set[int] = set()
        self._waiting: list[tuple[int, _Request]] = []
        self._leader: _Request | None = None
        self._arrivals = 0

    async def wait(self, request: _Request) -> None:
        heapq.heappush(self._waiting, (request.seq, request))
        self._arrivals += 1
        try:
            if self._leader is None:
                self._leader = request
            else:
                await request.event.wait()
            if not request.done:
                await self._lead(request)
        finally:
            request.done = True
            self._gone.add(request.seq)
            if self._leader is request:
                self._leader = next((other for _, other in self._waiting if not other.done), None)
                if self._leader is not None:
                    self._leader.event.set()

    async def _lead(self, leader: _Request) -> None:
        passes, seen, others = 0, self._arrivals, False
        while not leader.done:
            if self._waiting[0][1].done:
                heapq.heappop(self._waiting)
                continue
            if passes < _PASSES and not self._is_due(self._waiting[0][0]):
                await checkpoint()
                passes += 1
                if self._arrivals != seen:
                    passes, seen = 0, self._arrivals
                continue
            seq, first = heapq.heappop(self._waiting)
            self._at = max(self._at, bisect_right(self._order, seq))
            passes = 0
            first.done = True
            first.event.set()
            others = others or first is not leader
        if others:
            await checkpoint()  # they go first

    def _is_due(self, seq: int) -> bool:
        while self._at < len(self._order) and self._order[self._at] in self._gone:
            self._at += 1
        return self._at == len(self._order) or self._order[self._at] >= seq


def _id(sample: Sample) -> object:
    return id(sample) if sample.rollout_id is None else (sample.rollout_id, sample.index)
