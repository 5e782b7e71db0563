"""What would have become of a recorded rollout with other stages: the loop of `eventbus.rollout`, run over the record.

Groups are taken in the order in which the rollout took them: for the filter, and once more where stages follow it that
do not count, when they had passed those. A round of prompts is the one that was asked for in the record. The count is
kept as the run keeps it. A round that was never asked for counts as under way and never arrives. Where the run would
have waited for such groups, or for some that were stopped when the batch was full, the simulation stops and says how
many the batch lacked: nothing is invented.

Each rollout is taken by itself: it is given the prompts that it was given, whatever changed in the one before.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import msgspec

from eventbus.events import GroupJudged
from eventbus.group import Group
from eventbus.ledger import Ledger, Outcome
from eventbus.replay.record import Change, GroupRecord, RoundRecord
from eventbus.replay.report import RoundDifference
from eventbus.stage import Drop, Hold, Stage

__all__ = ["Arrival", "Rewards", "Simulation", "changed_rewards", "mean_reward", "rewards_of"]


class Arrival(NamedTuple):
    """A group for the rollout's own task to take: behind its sample stages, or group stages that do not count."""

    record: GroupRecord
    group: Group | None
    """None where it was lost on the way."""
    outcome: Outcome | None = None
    reason: str | None = None
    at: int = 0
    """The group stage to go on with."""


Rewards: TypeAlias = list[tuple[int | None, Any]]
"""Per execution its id, and the reward of its last sample."""

_Waiting: TypeAlias = tuple[float, int, float, Arrival]
"""When it is taken, as a seq of the record; the number of the entry; when it was there to be taken."""

_Held: TypeAlias = tuple[float, int, int, GroupRecord, Group, int]
"""Score, minus the index, id, record, group, group stage to go on at: the worst first."""


class Simulation:
    """One rollout with other stages.

    :param apply: runs group stage number `n` on a group with the count: (group, what it said).
    :param stages: the group stages.
    """

    def __init__(
        self,
        round: RoundRecord,
        arrivals: list[Arrival],
        unfinished: dict[str, int],
        stages: list[Stage],
        apply: Callable[[Stage, GroupRecord, Group, int], Awaitable[tuple[Group, Drop | Hold | None] | str | None]],
    ) -> None:
        self.round = round
        self.ledger = Ledger()
        self.kept: dict[int, Group] = {}
        self.outcomes: dict[int, tuple[str, str | None]] = {}
        """By `id` of the group's record: how it ended."""
        self.missing = 0
        self.unfinished = unfinished
        self.exhausted = False
        self._stages = stages
        self._apply = apply
        self._places = {stage.name: place for place, stage in enumerate(stages)}
        self._arrivals = {id(arrival.record): arrival for arrival in arrivals}
        self._waiting: list[_Waiting] = []
        self._added = 0
        self._now = 0.0
        """When what is taken now was taken."""
        self._last: dict[int, float] = {}
        """When the last of those was taken that went on with a stage, by its number."""
        self._waves: dict[int, list[GroupRecord]] = {}
        for record in round.groups:
            self._waves.setdefault(record.submitted.round, []).append(record)
        self._in_flight: dict[int, GroupRecord] = {}
        self._held: list[_Held] = []
        self._released: set[int] = set()
        self._rounds = 0

    async def run(self) -> None:
        target = self.round.target
        max_rounds = int(self.round.spec.get("max_rounds", 10))
        source_ended = False
        filled = -1.0
        while len(self.kept) < target:
            if self.ledger.remaining < target and self._rounds < max_rounds and not source_ended:
                wave = self._waves.get(self._rounds + 1)
                if wave is None and (source_ended := self._source_had_ended()):
                    continue
                self._rounds += 1
                if wave is None:  # never asked for: its groups are under way from here on, and never arrive
                    for _ in range(self._round_size):
                        self.ledger.submit(self.round.group_size)
                for record in wave or ():
                    self._submit(record)
            elif self._waiting:
                self._now, _, _, arrival = heapq.heappop(self._waiting)
                await self._take(arrival)
                filled = self._now
                ended = arrival.record.ended
                if ended is not None and ended.seq == self.round.full and self._as_recorded(arrival.record):
                    filled = self.round.full
            elif self.ledger.in_flight:
                break  # only what never came, or was stopped when the batch was full
            elif not self._release_best():
                self.exhausted = True
                break
        if len(self.kept) < target and not self.exhausted:
            self.missing = target - len(self.kept)
            return
        await self._close(filled)

    def difference(self) -> RoundDifference:
        """Beside the record."""
        before = {id(record): record for record in self.round.groups if record.ended is not None}
        old_kept = {record.index for record in before.values() if record.ended and record.ended.outcome == "kept"}
        new_kept = set(self.kept)
        reasons: dict[str, list[int]] = {}
        outcomes: dict[str, list[int]] = {}
        for record in before.values():
            assert record.ended is not None
            _count(reasons, outcomes, 0, record.ended.outcome, record.ended.reason, record.ended.by_fallback)
        for key, (outcome, reason) in self.outcomes.items():
            group = self.kept.get(before[key].index) if key in before else None
            filler = group is not None and group.verdict is not None and group.verdict.by_fallback
            _count(reasons, outcomes, 1, outcome, reason, filler and outcome == "kept")
        return RoundDifference(
            self.round.rollout_id,
            sorted(new_kept - old_kept),
            sorted(old_kept - new_kept),
            {name: Change(*pair) for name, pair in reasons.items()},
            {name: Change(*pair) for name, pair in outcomes.items()},
            missing=self.missing,
            unfinished=self.unfinished if self.missing else {},
        )

    # The loop

    def _source_had_ended(self) -> bool:
        """In the record, too, a round was due and there were no more prompts."""
        last = self._waves.get(self._rounds, [])
        summary = self.round.finished.summary if self.round.finished is not None else None
        return len(last) < self._round_size or (summary is not None and summary.rounds > self._rounds)

    @property
    def _round_size(self) -> int:
        return int(self.round.spec.get("over_sampling") or self.round.target)

    def _submit(self, record: GroupRecord) -> None:
        self.ledger.submit(len(record.submitted.executions))
        self._in_flight[id(record)] = record
        if (arrival := self._arrivals.get(id(record))) is not None:
            self._wait(arrival, *self._recorded(record, arrival.at))

    def _wait(self, arrival: Arrival, taken: float, there: float) -> None:
        self._added += 1
        heapq.heappush(self._waiting, (taken, self._added, there, arrival))

    def _recorded(self, record: GroupRecord, at: int) -> tuple[float, float]:
        """When a group that goes on with stage `at` was taken after that, and when it was there to be taken."""
        judged = reached = None
        for event in record.stages:
            place = self._places.get(event.stage, -1)
            if place >= at and isinstance(event, GroupJudged):
                judged = event
                break
            if place >= at and not self._stages[place].counts:
                reached = event
        taken = judged or record.ended
        there = reached or (record.completed if record.completed and record.completed.at == at else None) or taken
        if taken is None:  # the log ends before
            return (there.seq, there.seq) if there is not None else (math.inf, math.inf)
        assert there is not None
        if taken.seq <= self.round.full:
            return taken.seq, there.seq
        if judged is not None or (record.ended and record.ended.outcome in ("surplus", "carried")):
            return taken.seq, min(there.seq, self.round.full)  # it was there when the batch was full
        return taken.seq, taken.seq

    def _go_on(self, record: GroupRecord, group: Group, at: int) -> None:
        """Through stages that do not count, beside the others; then it is taken again."""
        arrival = Arrival(record, group, at=at)
        passed = any(
            isinstance(event, GroupJudged) and event.verdict.kept and self._places.get(event.stage) == at - 1
            for event in record.stages
        )
        passed = passed or (record.ended is not None and record.ended.outcome not in ("dropped", "failed"))
        if passed and self._as_recorded(record):
            taken, there = self._recorded(record, at)
        else:  # it did not come so far: behind the one that was taken before it
            taken = there = max(self._now, self._last.get(at, 0.0))
        self._last[at] = taken
        self._wait(arrival, taken, there)

    def _as_recorded(self, record: GroupRecord) -> bool:
        """It was in the reserve for a while, or was not, in both."""
        held = any(isinstance(event, GroupJudged) and event.held for event in record.stages)
        return held == (id(record) in self._released)

    async def _take(self, arrival: Arrival) -> None:
        record, group = arrival.record, arrival.group
        if group is None:
            assert arrival.outcome is not None
            self._end(record, arrival.outcome, arrival.reason)
            return
        number, counted = arrival.at, False
        while number < len(self._stages):
            stage = self._stages[number]
            if counted and not stage.counts:
                break
            counted = counted or stage.counts
            answer = await self._apply(stage, record, group, self.ledger.remaining)
            if isinstance(answer, str):
                self._end(record, "failed", answer)
                return
            if answer is None:  # it would be generated again: it stays in flight
                self._count_unfinished(f"would be generated again after an error in {stage.name}")
                return
            number += 1
            group, said = answer
            if isinstance(said, Drop):
                self._end(record, "dropped", said.reason)
                return
            if isinstance(said, Hold):
                self._hold(record, group, said, number)
                return
        if len(self.kept) >= self.round.target:
            self._end(record, "carried" if self.round.spec.get("surplus") == "carry" else "surplus", None)
        elif number < len(self._stages):
            self._go_on(record, group, number)
        else:
            self.kept[record.index] = group
            self._end(record, "kept", None, group)

    def _count_unfinished(self, why: str) -> None:
        self.unfinished[why] = self.unfinished.get(why, 0) + 1

    def _end(self, record: GroupRecord, outcome: Outcome, reason: str | None, group: Group | None = None) -> None:
        del self._in_flight[id(record)]
        filler = group is not None and group.verdict is not None and group.verdict.by_fallback
        self.ledger.end(outcome, reason, by_fallback=filler)
        self.outcomes[id(record)] = (outcome, reason)

    def _hold(self, record: GroupRecord, group: Group, hold: Hold, at: int) -> None:
        self.ledger.hold()
        heapq.heappush(self._held, (hold.score, -record.index, id(record), record, group, at))
        if len(self._held) > self.round.target:
            self._drop_held(heapq.heappop(self._held))

    def _drop_held(self, entry: _Held) -> None:
        self.ledger.release()
        _, _, _, record, group, _ = entry
        self._end(record, "dropped", group.verdict.reason if group.verdict is not None else None)

    def _release_best(self) -> bool:
        best = heapq.nlargest(self.round.target - len(self.kept), self._held)
        for entry in best:
            self._held.remove(entry)
            self.ledger.release()
        for _, _, _, record, group, at in best:
            assert group.verdict is not None
            group.verdict = msgspec.structs.replace(group.verdict, kept=True, by_fallback=True)
            self._released.add(id(record))
            self._go_on(record, group, at)
        heapq.heapify(self._held)
        return bool(best)

    async def _close(self, filled: float) -> None:
        """The batch is full: judge what was complete by then, drop the reserve, give back the rest."""
        while self._waiting:
            self._now, _, there, arrival = heapq.heappop(self._waiting)
            if there <= filled:
                await self._take(arrival)
        for entry in self._held:
            self._drop_held(entry)
        self._held.clear()
        policy = self.round.spec.get("unfinished", "restart")
        for record in list(self._in_flight.values()):
            if policy == "recycle":
                self._end(record, "recycled", None)
            else:
                self._end(record, "cancelled", "restarted" if policy == "restart" else None)


def _count(
    reasons: dict[str, list[int]],
    outcomes: dict[str, list[int]],
    side: int,
    outcome: str,
    reason: str | None,
    filler: bool,
) -> None:
    outcomes.setdefault(outcome, [0, 0])[side] += 1
    if outcome in ("dropped", "failed"):
        reasons.setdefault(reason or outcome, [0, 0])[side] += 1
    if filler:
        outcomes.setdefault("kept by fallback", [0, 0])[side] += 1


def rewards_of(group: Group) -> Rewards:
    return [(execution[-1].rollout_id, execution[-1].reward) for execution in group.executions]


def mean_reward(groups: Iterable[Rewards]) -> float | None:
    """Over all executions with a finite number as reward, as `Summary` has it."""
    numbers = [
        float(reward)
        for rewards in groups
        for _, reward in rewards
        if isinstance(reward, int | float) and math.isfinite(reward)
    ]
    return sum(numbers) / len(numbers) if numbers else None


def changed_rewards(before: Rewards, after: Rewards) -> int:
    """Executions whose reward is another."""
    if before == after:
        return 0
    return sum((Counter(map(repr, after)) - Counter(map(repr, before))).values())
