"""What would have become of a recorded rollout with other stages: the loop of `eventbus.rollout`, run over the record.

Groups arrive in the order in which they were judged; a round of prompts is the one that was asked for in the record.
The count is kept as the run keeps it. A round that was never asked for counts as under way and never arrives. Where the
run would have waited for such groups, or for some that were stopped when the batch was full, the simulation stops and
says how many the batch lacked: nothing is invented.

Each rollout is taken by itself: it is given the prompts that it was given, whatever changed in the one before.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import msgspec

from eventbus.group import Group
from eventbus.ledger import Ledger, Outcome
from eventbus.replay.record import Change, GroupRecord, RoundRecord
from eventbus.replay.report import RoundDifference
from eventbus.stage import Drop, Hold, Stage

__all__ = ["Arrival", "Rewards", "Simulation", "changed_rewards", "mean_reward", "rewards_of"]


class Arrival(NamedTuple):
    """A group that came to the end of its sample stages."""

    key: int
    """Its place among the others."""
    ready: int
    """When it was complete, as a seq."""
    record: GroupRecord
    group: Group | None
    """None where it was lost on the way."""
    outcome: Outcome | None = None
    reason: str | None = None


Rewards: TypeAlias = list[tuple[int | None, Any]]
"""Per execution its id, and the reward of its last sample."""

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
        self._arrivals = sorted(arrivals, key=lambda arrival: arrival.key)
        self._next = 0
        self._later: list[Arrival] = []
        self._waves: dict[int, list[GroupRecord]] = {}
        for record in round.groups:
            self._waves.setdefault(record.submitted.round, []).append(record)
        self._in: set[int] = set()
        self._held: list[_Held] = []
        self._rounds = 0

    async def run(self) -> None:
        target = self.round.target
        max_rounds = int(self.round.spec.get("max_rounds", 10))
        source_ended = False
        filled = -1
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
            elif (arrival := self._arrival()) is not None:
                await self._take(arrival)
                filled = arrival.key
                if (ended := arrival.record.ended) is not None and ended.outcome == "kept":
                    filled = max(filled, ended.seq)
            elif self.ledger.in_flight:
                break  # only what never came, or was stopped when the batch was full
            elif not await self._release_best():
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
        self._in.add(id(record))

    def _arrival(self) -> Arrival | None:
        for position, arrival in enumerate(self._later):
            if id(arrival.record) in self._in:
                return self._later.pop(position)
        while self._next < len(self._arrivals):
            arrival = self._arrivals[self._next]
            self._next += 1
            if id(arrival.record) in self._in:
                return arrival
            self._later.append(arrival)
        return None

    async def _take(self, arrival: Arrival, at: int | None = None) -> None:
        record, group = arrival.record, arrival.group
        if group is None:
            assert arrival.outcome is not None
            self._end(record, arrival.outcome, arrival.reason)
            return
        first = (record.completed.at if record.completed is not None else 0) if at is None else at
        for number in range(first, len(self._stages)):
            stage = self._stages[number]
            answer = await self._apply(stage, record, group, self.ledger.remaining)
            if isinstance(answer, str):
                self._end(record, "failed", answer)
                return
            if answer is None:  # it would be generated again: it stays in flight
                self._count_unfinished(f"would be generated again after an error in {stage.name}")
                return
            group, said = answer
            if isinstance(said, Drop):
                self._end(record, "dropped", said.reason)
                return
            if isinstance(said, Hold):
                self._hold(record, group, said, number + 1)
                return
        if len(self.kept) >= self.round.target:
            self._end(record, "carried" if self.round.spec.get("surplus") == "carry" else "surplus", None)
            return
        self.kept[record.index] = group
        self._end(record, "kept", None, group)

    def _count_unfinished(self, why: str) -> None:
        self.unfinished[why] = self.unfinished.get(why, 0) + 1

    def _end(self, record: GroupRecord, outcome: Outcome, reason: str | None, group: Group | None = None) -> None:
        self._in.discard(id(record))
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

    async def _release_best(self) -> bool:
        best = heapq.nlargest(self.round.target - len(self.kept), self._held)
        for entry in best:
            self._held.remove(entry)
            self.ledger.release()
        for _, _, _, record, group, at in best:
            assert group.verdict is not None
            group.verdict = msgspec.structs.replace(group.verdict, kept=True, by_fallback=True)
            await self._take(Arrival(0, 0, record, group), at)
        heapq.heapify(self._held)
        return bool(best)

    async def _close(self, filled: int) -> None:
        """The batch is full: judge what was complete by then, drop the reserve, give back the rest."""
        while (arrival := self._arrival()) is not None:
            if arrival.ready <= filled:
                await self._take(arrival)
        for entry in self._held:
            self._drop_held(entry)
        self._held.clear()
        unfinished = {"cancel": "cancelled", "restart": "cancelled", "recycle": "recycled"}
        outcome: Any = unfinished[self.round.spec.get("unfinished", "restart")]
        for record in self.round.groups:
            if id(record) in self._in:
                restarted = self.round.spec.get("unfinished", "restart") == "restart"
                self._end(record, outcome, "restarted" if restarted else None)


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
