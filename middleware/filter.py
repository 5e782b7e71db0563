"""`DynamicFilter`: a judge says which groups are worth training on; a fallback fills the batch when too few are.

What it keeps true: each judged group carries a `Verdict` with the count that the judge's answer was weighed against,
and a group that lacks a finite reward is never kept by a fallback.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec

from eventbus.group import Group, Verdict
from eventbus.stage import ContractError, Drop, Hold

__all__ = ["DynamicFilter", "Fallback", "FilterDecision", "Judge", "should_drop"]

Fallback: TypeAlias = Literal["none", "last", "best"]

REASON_LENGTH: Final = 120
"""Characters of a reason; longer ones are cut."""


class FilterDecision(msgspec.Struct, frozen=True):
    """What a judge says of a group."""

    keep: bool
    reason: str | None = None
    """Under which a rejected group is counted: few different ones tell more than many."""
    keep_when_insufficient: bool = False
    """As if the filter had `fallback="last"`, for this group."""
    score: float | None = None
    """Higher is better; `fallback="best"` fills the batch by it."""


Judge: TypeAlias = Callable[[Group], "FilterDecision | bool | Awaitable[FilterDecision | bool]"]


def should_drop(decision: FilterDecision | bool, *, remaining: int, target: int) -> bool:
    """Whether a group leaves the stream: rejected, and not needed to fill the batch. A bool counts as `keep`.

    >>> spare = FilterDecision(keep=False, keep_when_insufficient=True)
    >>> should_drop(spare, remaining=3, target=2), should_drop(spare, remaining=2, target=2)
    (True, False)

    :param remaining: groups that could still fill the batch, the judged one included.
    :param target: groups of a full batch.
    """
    if not isinstance(decision, FilterDecision):
        return not decision
    return not decision.keep and not (decision.keep_when_insufficient and remaining <= target)


class DynamicFilter:
    """A group stage that asks `judge`, and does with the groups that it rejects what `fallback` says.

    - `"none"`: dropped, and new prompts take their place (DAPO).
    - `"last"`: dropped while others can still fill the batch; kept as soon as `remaining <= target`. Fast, one round
      is enough; but what it keeps is what finished last.
    - `"best"`: held in reserve while new prompts are asked for. When the rounds are spent, the batch is filled from the
      reserve by score, independent of the order of arrival. It goes before `keep_when_insufficient`.

    A group with a reward that is missing or not finite is dropped as `bad_reward` where a fallback might have kept it.
    In a dict reward each None and each number counts, since the filter does not know which key matters; other values
    are passed over.

    :param judge: `(group) -> FilterDecision | bool`, sync or async.
    :raises TypeError: `judge` is not callable, or a class.
    :raises ValueError: `fallback` is none of the three.
    :raises ContractError: `fallback="best"` with a judge that returns `bool`; when called: the judge returned something
        else than a decision, or no finite score where `"best"` needs one.
    """

    level: Final = "group"

    def __init__(self, judge: Judge, fallback: Fallback = "none") -> None:
        if inspect.isclass(judge):
            raise TypeError(f"DynamicFilter: the judge is a class, pass an instance: {judge.__name__}(...)")
        if not callable(judge):
            raise TypeError(f"DynamicFilter: the judge is not callable: {judge!r}")
        if fallback not in get_args(Fallback):
            raise ValueError(f"DynamicFilter: fallback={fallback!r}: choose 'none', 'last' or 'best'")
        if fallback == "best" and getattr(judge, "__annotations__", {}).get("return") in (bool, "bool"):
            raise ContractError(f"DynamicFilter: {_no_score(judge)}")
        self.judge = judge
        self.fallback = fallback

    def __call__(
        self, group: Group, *, remaining: int, target: int
    ) -> Group | Drop | Hold | Awaitable[Group | Drop | Hold]:
        judged = self.judge(group)
        if isawaitable(judged):
            return self._judged_later(judged, group, remaining, target)
        return self._decide(judged, group, remaining, target)

    async def _judged_later(
        self, judged: Awaitable[Any], group: Group, remaining: int, target: int
    ) -> Group | Drop | Hold:
        return self._decide(await judged, group, remaining, target)

    def _decide(self, judged: Any, group: Group, remaining: int, target: int) -> Group | Drop | Hold:
        decision = self._decision(judged, group)
        if decision.keep:
            before = group.verdict
            filler = before is not None and before.by_fallback  # for a filter before this one it still is
            reason = before.reason if before is not None and filler else decision.reason
            group.verdict = Verdict(True, reason, filler, decision.score, remaining, target)
            return group

        reason = decision.reason or "rejected"
        spare = self.fallback != "none" or decision.keep_when_insufficient
        held = self.fallback == "best"
        if spare and not all(_is_finite(execution[-1].reward) for execution in group.executions):
            reason, spare, held = "bad_reward", False, False
        kept = spare and not held and remaining <= target
        group.verdict = Verdict(kept, reason, kept, decision.score, remaining, target)
        if kept:
            return group
        if not held:
            return Drop(reason)
        if decision.score is None or not math.isfinite(decision.score):
            raise ContractError(f"group {group.index}: {_no_score(self.judge, decision.score)}")
        return Hold(reason, decision.score)

    def _decision(self, judged: Any, group: Group) -> FilterDecision:
        """The judge's answer in plain types, so that it can be written down whatever the judge computed with."""
        if not isinstance(judged, FilterDecision):
            judged = FilterDecision(judged)
        elif judged.keep is True and judged.reason is None and type(judged.score) in (float, type(None)):
            return judged  # plain as it is
        keep: Any = judged.keep
        if getattr(keep, "shape", None) == ():  # a numpy bool, a tensor
            keep = keep.item()
        if not isinstance(keep, bool):
            raise ContractError(
                f"group {group.index}: the judge {_name(self.judge)} returned {type(keep).__name__}, "
                "expected FilterDecision or bool"
            )
        score = _number(judged.score)
        if score is None and judged.score is not None:
            raise ContractError(
                f"group {group.index}: the judge {_name(self.judge)} gave the score {judged.score!r}, expected a number"
            )
        reason = None if judged.reason is None else _short(str(judged.reason))
        return FilterDecision(keep, reason, bool(judged.keep_when_insufficient), score)


def _is_finite(reward: Any) -> bool:
    if isinstance(reward, dict):
        numbers = [value for value in reward.values() if value is None or _number(value) is not None]
        return bool(numbers) and all(map(_is_finite, numbers))
    number = _number(reward)
    return number is not None and math.isfinite(number)


def _number(value: Any) -> float | None:
    if isinstance(value, str | bytes):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _short(reason: str) -> str:
    reason = reason.encode("utf-8", "backslashreplace").decode()  # a lone surrogate could not be written down
    return reason if len(reason) <= REASON_LENGTH else reason[: REASON_LENGTH - 3] + "..."


def _no_score(judge: Any, score: float | None = None) -> str:
    return (
        f"fallback='best' ranks rejected groups by their score, and the judge {_name(judge)} gives "
        f"{'none' if score is None else score}: return FilterDecision(keep, reason, score=...) with a finite score"
    )


def _name(judge: Any) -> str:
    return str(getattr(judge, "__name__", None) or type(judge).__name__)
