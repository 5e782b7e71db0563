"""What the engine and the stages did that no batch has: tokens and seconds per cause, stage and prompt.

Every response token that an engine generated is in exactly one place: in a batch (`used`), lost to one cause (`lost`),
or in a group whose fate the stream does not tell (`open`): still under way, or waiting for a later rollout. What a
recycled or carried group brings along counts where it ends. Evaluations are counted apart, as nothing of them is lost.

Seconds are those of the stages, without what they waited for a limit and without the stages that a wrapper ran. Of a
stage that raised the events do not say how long it took: it is counted from the last event of its sample, which takes
in the wait for a worker. What was cancelled in the middle of a stage left no trace of that stage.

What an engine's worker generated in an attempt that brought nothing is in none of these tokens, since nobody knows how
much it was: such attempts are counted by themselves, with the seconds that they took.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from eventbus.events import (
    AttemptEnded,
    BatchTrained,
    Event,
    GroupCompleted,
    GroupEnded,
    GroupSubmitted,
    SampleGenerated,
    StageApplied,
    StageFailed,
)

__all__ = ["Cost", "PromptWaste", "WasteReport", "waste"]


class Cost(msgspec.Struct):
    """What something took."""

    tokens: int = 0
    """Response tokens."""
    seconds: float = 0.0
    groups: int = 0

    def add(self, other: Cost) -> None:
        self.tokens += other.tokens
        self.seconds += other.seconds


class PromptWaste(msgspec.Struct, omit_defaults=True):
    """What was lost on one prompt."""

    group_index: int
    prompt: Any = ""
    tokens: int = 0
    seconds: float = 0.0
    causes: dict[str, int] = {}
    """Tokens per cause."""


class WasteReport(msgspec.Struct):
    used: Cost
    """In batches."""
    fallback: Cost
    """Of `used`: in groups that a fallback kept."""
    lost: dict[str, Cost]
    """Per cause, the most tokens first."""
    open: Cost
    evaluation: Cost
    stages: dict[str, tuple[float, float]]
    """Seconds per stage: all, and of these lost. Most lost first."""
    prompts: list[PromptWaste]
    """Those with the most tokens lost."""
    attempts: dict[str, tuple[int, float]] = {}
    """Per address of an engine's worker: attempts in training that failed or were aborted, and brought nothing; their
    seconds, which are also in those of the stage. Most seconds first."""

    @property
    def tokens_lost(self) -> int:
        return sum(cost.tokens for cost in self.lost.values())

    @property
    def seconds_lost(self) -> float:
        return sum(cost.seconds for cost in self.lost.values())


def waste(events: Iterable[Event], *, top: int = 10) -> WasteReport:
    """Count what was lost.

    :param top: prompts in the report.
    """
    count = _Count()
    for event in events:
        count.feed(event)
    return count.report(top)


class _Spent:
    """What one execution took so far, and what it has to show for it."""

    __slots__ = ("has", "lost", "nested", "since", "stages", "tokens")

    def __init__(self, since: int) -> None:
        self.tokens = 0
        self.stages: dict[str, float] = {}
        self.has: dict[int | None, int] = {}
        """Response tokens per sample of it; None: those of a sample not seen before."""
        self.lost: str | None = None
        self.since = since
        """`time_ns` of its last event."""
        self.nested: list[tuple[float, float]] = []
        """(end, seconds) of stages that a wrapper may have run."""

    def add(self, stage: str, seconds: float) -> None:
        self.stages[stage] = self.stages.get(stage, 0.0) + max(0.0, seconds)

    @property
    def cost(self) -> Cost:
        return Cost(self.tokens, sum(self.stages.values()))


class _Account:
    """A group from its first submission to its last end."""

    __slots__ = ("by_fallback", "evaluation", "executions", "index", "prompt", "shared")

    def __init__(self, index: int, prompt: Any, evaluation: bool) -> None:
        self.index = index
        self.prompt = prompt
        self.evaluation = evaluation
        self.executions: dict[int, _Spent] = {}
        self.shared = _Spent(0)
        """The group stages."""
        self.by_fallback = False

    def parts(self) -> list[_Spent]:
        return [*self.executions.values(), self.shared]


class _Count:
    def __init__(self) -> None:
        self._open: dict[tuple[int, bool, int], list[_Account]] = {}
        self._waiting: dict[int, list[_Account]] = {}
        """Recycled or carried, by group."""
        self._kept: dict[int, dict[int, _Account]] = {}
        """In a batch that nobody has trained on yet, by rollout and group."""
        self._used, self._fallback, self._evaluation = Cost(), Cost(), Cost()
        self._lost: dict[str, Cost] = {}
        self._stages: dict[str, tuple[float, float]] = {}
        self._prompts: dict[int, PromptWaste] = {}
        self._attempts: dict[str, tuple[int, float]] = {}

    def feed(self, event: Event) -> None:
        match event:
            case GroupSubmitted():
                self._submitted(event)
            case BatchTrained():
                self._kept.pop(event.rollout_id, None)
            case AttemptEnded():
                if event.outcome != "answered" and not event.tokens and not event.evaluation:
                    count, seconds = self._attempts.get(event.worker, (0, 0.0))
                    self._attempts[event.worker] = (count + 1, seconds + event.seconds)
            case SampleGenerated() | StageApplied() | StageFailed() | GroupCompleted() | GroupEnded():
                account = self._account(event)
                if account is not None:
                    self._go_on(event, account)

    def report(self, top: int) -> WasteReport:
        open_ = Cost()
        under_way = [account for live in self._open.values() for account in live if not account.evaluation]
        for account in under_way + [account for waiting in self._waiting.values() for account in waiting]:
            open_.groups += 1
            for part in account.parts():
                open_.add(part.cost)
        prompts = sorted(self._prompts.values(), key=lambda prompt: (-prompt.tokens, -prompt.seconds))
        return WasteReport(
            self._used,
            self._fallback,
            dict(sorted(self._lost.items(), key=lambda item: (-item[1].tokens, -item[1].seconds, item[0]))),
            open_,
            self._evaluation,
            dict(sorted(self._stages.items(), key=lambda item: (-item[1][1], -item[1][0], item[0]))),
            prompts[:top],
            dict(sorted(self._attempts.items(), key=lambda item: (-item[1][1], item[0]))),
        )

    def _account(self, event: Any) -> _Account | None:
        live = self._open.get((event.rollout_id, event.evaluation, event.group_index), ())
        execution = getattr(event, "execution", None)
        return next((each for each in live if execution is None or execution in each.executions), None)

    def _submitted(self, event: GroupSubmitted) -> None:
        account: _Account | None = None
        if event.origin in ("recycled", "carried"):
            account = self._taken_up(event)
        if account is None:
            prompt = event.samples[0][0].sample.prompt if event.samples and event.samples[0] else ""
            account = _Account(event.group_index, prompt, event.evaluation)
        for position, execution in enumerate(event.executions):
            spent = account.executions.setdefault(execution, _Spent(event.time_ns))
            spent.since = event.time_ns
            spent.nested.clear()
            if event.origin == "recycled":
                shown = event.samples[position + 1] if position + 1 < len(event.samples) else []
                has = {light.sample.index: light.sample.response_length for light in shown}
                if (gone := spent.tokens - sum(has.values())) > 0:
                    # The engine gave no partial sample, or it was not yet one to go on from.
                    self._lose(account, "recycled without its tokens", Cost(gone))
                    spent.tokens -= gone
                spent.has, spent.lost = has, None
        key = (event.rollout_id, event.evaluation, event.group_index)
        self._open.setdefault(key, []).append(account)

    def _taken_up(self, event: GroupSubmitted) -> _Account | None:
        waiting = self._waiting.get(event.group_index)
        if waiting:
            account = waiting.pop()
            if not waiting:
                del self._waiting[event.group_index]
            return account
        for batch in self._kept.values():
            if event.group_index in batch:
                account = batch.pop(event.group_index)
                self._use(account, -1)  # nobody took its batch: it was not used after all
                return account
        return None

    def _go_on(self, event: Any, account: _Account) -> None:
        execution = getattr(event, "execution", None)
        spent = account.shared if execution is None else account.executions[execution]
        match event:
            case StageApplied():
                spent.add(event.stage, _own_seconds(event, spent))
                if event.execution is not None and event.samples and len(event.samples[0]) > 1:
                    spent.has[None] = event.samples[0][0].sample.response_length
                if event.dropped is not None:
                    spent.lost = f"sample dropped: {event.dropped}"
                elif execution is not None:
                    spent.lost = None  # a wrapper caught what a stage in it dropped
            case SampleGenerated():
                before = spent.has.get(event.index, spent.has.get(None, 0))
                spent.tokens += max(0, event.response_length - before)
                spent.has[event.index] = event.response_length
            case StageFailed():
                spent.add(event.stage, (event.time_ns - spent.since) / 1e9 if spent.since else 0.0)
                spent.lost = f"sample failed: {event.stage}: {event.error.partition(':')[0]}"
                if event.policy == "resubmit":
                    for again in [execution] if execution is not None else list(account.executions):
                        part = account.executions[again]
                        self._lose(account, "resubmitted", part.cost, part.stages)
                        account.executions[again] = _Spent(event.time_ns)
            case GroupCompleted():
                account.shared.since = event.time_ns
            case GroupEnded():
                self._ended(event, account)
                return
        spent.since = event.time_ns

    def _ended(self, event: GroupEnded, account: _Account) -> None:
        key = (event.rollout_id, event.evaluation, event.group_index)
        live = self._open[key]
        live.remove(account)
        if not live:
            del self._open[key]
        if event.evaluation:
            self._evaluation.groups += 1
            for part in account.parts():
                self._evaluation.add(part.cost)
            return
        if event.outcome in ("recycled", "carried"):
            self._waiting.setdefault(account.index, []).append(account)
            return
        if event.outcome == "kept":
            for identity, spent in list(account.executions.items()):
                if spent.lost is not None:
                    self._lose(account, spent.lost, spent.cost, spent.stages)
                    del account.executions[identity]
            account.by_fallback = event.by_fallback
            self._use(account, 1)
            self._kept.setdefault(event.rollout_id, {})[account.index] = account
            return
        cause = event.reason if event.reason == "restarted" else event.outcome
        if event.outcome in ("dropped", "failed") and event.reason:
            cause = f"{event.outcome}: {event.reason}"
        cause = cause or event.outcome
        self._lost.setdefault(cause, Cost()).groups += 1
        for part in account.parts():
            self._lose(account, cause, part.cost, part.stages)

    def _use(self, account: _Account, sign: int) -> None:
        costs = [self._used, self._fallback] if account.by_fallback else [self._used]
        for cost in costs:
            cost.groups += sign
            for part in account.parts():
                cost.add(Cost(sign * part.cost.tokens, sign * part.cost.seconds))
        for part in account.parts():
            for stage, seconds in part.stages.items():
                total, lost = self._stages.get(stage, (0.0, 0.0))
                self._stages[stage] = (total + sign * seconds, lost)

    def _lose(self, account: _Account, cause: str, cost: Cost, stages: dict[str, float] | None = None) -> None:
        if account.evaluation:
            self._evaluation.add(cost)
            return
        self._lost.setdefault(cause, Cost()).add(cost)
        for stage, seconds in (stages or {}).items():
            total, lost = self._stages.get(stage, (0.0, 0.0))
            self._stages[stage] = (total + seconds, lost + seconds)
        if cost.tokens or cost.seconds:
            prompt = self._prompts.get(account.index)
            if prompt is None:
                prompt = self._prompts[account.index] = PromptWaste(account.index, account.prompt)
            prompt.tokens += cost.tokens
            prompt.seconds += cost.seconds
            prompt.causes[cause] = prompt.causes.get(cause, 0) + cost.tokens


def _own_seconds(event: StageApplied, spent: _Spent) -> float:
    """Without waiting, and without the stages that it ran as a wrapper: those that ended after it began."""
    end = event.time_ns / 1e9
    begin = end - event.seconds
    own = event.seconds - event.waited
    while spent.nested and spent.nested[-1][0] > begin:
        own -= spent.nested.pop()[1]
    spent.nested.append((end, event.seconds))
    return own
