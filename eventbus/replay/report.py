"""What a replay found: `VerifyReport` and `WhatIfReport`. `str()` gives plain text, rich prints a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from eventbus.replay.record import Change
from eventbus.replay.run import Divergence

__all__ = ["RoundDifference", "VerifyReport", "WhatIfReport", "for_terminal"]


class VerifyReport(msgspec.Struct):
    """Whether the same stages came to the same events again."""

    divergence: Divergence | None = None
    """The first event that differs; nothing behind it was looked at."""
    rounds: int = 0
    """Rollouts and evaluations that were verified to their end."""
    events: int = 0
    executions: int = 0
    groups: int = 0
    """Groups that went through their group stages again."""
    batches: int = 0
    """Batches whose digest was compared."""
    not_verified: dict[str, str] = {}
    """Stages that answered from the record, and why."""
    notes: list[str] = []
    """What else was left out, and why."""

    @property
    def same(self) -> bool:
        return self.divergence is None

    def __str__(self) -> str:
        counts = (
            f"{self.rounds} rounds, {self.executions} executions, {self.groups} groups, {self.batches} batches; "
            f"{self.events} events"
        )
        if self.divergence is not None:
            lines = [f"differs at {self.divergence}"]
        else:
            lines = [f"the same: {counts}" if self.rounds else "nothing was verified: there is no rollout to read"]
        lines += [f"not verified: {name}: {why}" for name, why in self.not_verified.items()]
        lines += [f"note: {note}" for note in _folded(self.notes)]
        return "\n".join(lines)


class RoundDifference(msgspec.Struct):
    """What changed stages would have made of one rollout."""

    rollout_id: int
    added: list[int] = []
    """Groups in the batch that were not in it."""
    removed: list[int] = []
    """Groups that were in the batch and would not be."""
    reasons: dict[str, Change] = {}
    """Groups dropped or failed per reason, before and now; those that changed and those that did not."""
    outcomes: dict[str, Change] = {}
    """Groups per outcome."""
    rewards: dict[str, Change] = {}
    """Mean reward of what was `generated` (complete groups that both know) and of the `kept` groups; None without."""
    changed_rewards: int = 0
    """Executions whose reward is another one."""
    missing: int = 0
    """Groups that the batch would still need and that were never generated: nobody knows what they would have been."""
    unfinished: dict[str, int] = {}
    """Groups that cannot be carried to their end, per cause."""

    @property
    def same(self) -> bool:
        return not (self.added or self.removed or self.missing or self.changed_rewards) and all(
            change.old == change.new for change in (*self.reasons.values(), *self.outcomes.values())
        )


class WhatIfReport(msgspec.Struct):
    """What changed stages would have made of recorded rollouts, each rollout taken by itself."""

    changed: list[str] = []
    """The stages that were changed."""
    rollouts: list[RoundDifference] = []
    notes: list[str] = []

    @property
    def added(self) -> dict[int, list[int]]:
        """Group indexes per rollout; only rollouts with any."""
        return {each.rollout_id: each.added for each in self.rollouts if each.added}

    @property
    def removed(self) -> dict[int, list[int]]:
        """Group indexes per rollout; only rollouts with any."""
        return {each.rollout_id: each.removed for each in self.rollouts if each.removed}

    @property
    def reasons(self) -> dict[str, Change]:
        """Groups dropped or failed per reason, before and now, over all rollouts."""
        return _sums([each.reasons for each in self.rollouts])

    @property
    def outcomes(self) -> dict[str, Change]:
        """Groups per outcome, before and now, over all rollouts."""
        return _sums([each.outcomes for each in self.rollouts])

    @property
    def rewards(self) -> dict[int, dict[str, Change]]:
        """Per rollout: the mean reward of what was `generated` and of what was `kept`, before and now."""
        return {each.rollout_id: each.rewards for each in self.rollouts}

    @property
    def missing(self) -> dict[int, int]:
        """Per rollout: groups that the batch would still need and that were never generated."""
        return {each.rollout_id: each.missing for each in self.rollouts if each.missing}

    @property
    def same(self) -> bool:
        """Nothing would have been different."""
        return all(each.same for each in self.rollouts)

    def __str__(self) -> str:
        return "\n".join(": ".join(filter(None, row)) for row in self._rows())

    def __rich__(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for what, text in self._rows():
            table.add_row(Text(for_terminal(what)), Text(for_terminal(text)))
        return table

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "changed", f"{', '.join(self.changed) or 'nothing'}; {_counted(len(self.rollouts), 'rollout')}"
        if self.same:
            yield "difference", "none" if self.rollouts else "not known: there was no rollout to look at"
        for each in self.rollouts:
            if each.same:
                continue
            yield f"rollout {each.rollout_id}", ""
            for name, groups in (("added", each.added), ("removed", each.removed)):
                if groups:
                    yield f"  {name}", f"{_counted(len(groups), 'group')}: {_numbers(groups)}"
            if each.changed_rewards:
                yield "  rewards changed", _counted(each.changed_rewards, "execution")
            for name, change in each.rewards.items():
                if (old := _mean(change.old)) != (new := _mean(change.new)):
                    yield f"  reward, {name}", f"{old} -> {new}"
            if each.missing:
                causes = [f"{number} {cause}" for cause, number in each.unfinished.items()]
                yield (
                    "  missing",
                    f"{_counted(each.missing, 'group')} never generated; what the batch would have been is not known"
                    + (f" ({'; '.join(causes)})" if causes else ""),
                )
        for name, change in sorted(self.outcomes.items()):
            if change.old != change.new:
                yield name, f"{change.old} -> {change.new}"
        for reason, change in [] if self.same else sorted(self.reasons.items()):
            yield f"reason {reason}", f"{change.old} -> {change.new}"
        for note in _folded(self.notes):
            yield "note", note


def for_terminal(text: str) -> str:
    """Without what a terminal would obey: a reason or a name in a log may hold anything."""
    return "".join(each if each.isprintable() or each == "\n" else "?" for each in text)


def _sums(counts: list[dict[str, Change]]) -> dict[str, Change]:
    names = dict.fromkeys(name for each in counts for name in each)
    return {
        name: Change(
            sum(each[name].old for each in counts if name in each),
            sum(each[name].new for each in counts if name in each),
        )
        for name in names
    }


def _folded(notes: list[str]) -> Iterator[str]:
    """Those that say the same of several rounds, as one."""
    alike: dict[tuple[str, str], dict[str, None]] = {}
    for note in notes:
        where, colon, what = note.partition(": ")
        round, _, number = where.partition(" ")
        if colon and number.isdecimal():
            alike.setdefault((round, what), {})[number] = None
        else:
            alike[note, ""] = {}
    for (round, what), numbers in alike.items():
        if not numbers:
            yield round
        else:
            yield f"{round}{'s' if len(numbers) > 1 else ''} {_numbers(list(numbers))}: {what}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _numbers(numbers: Sequence[int | str], most: int = 12) -> str:
    text = ", ".join(map(str, numbers[:most]))
    return text if len(numbers) <= most else f"{text}, ... (and {len(numbers) - most} more)"


def _mean(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
