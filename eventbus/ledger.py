"""The count of one rollout's groups: every group that was submitted is in exactly one column, at every moment.

    submitted = in_flight + held + kept + surplus + carried + dropped + failed + cancelled + recycled

`remaining` is what could still fill the batch. A judge reads it before its own group is subtracted, and prompts are
asked for while it is below the target.

>>> ledger = Ledger()
>>> ledger.submit(executions=8); ledger.submit(executions=8)
>>> ledger.remaining
2
>>> ledger.end("dropped", "zero_std_1.0"); ledger.end("kept")
>>> ledger.remaining, ledger.in_flight, ledger.dropped
(1, 0, {'zero_std_1.0': 1})
"""

from __future__ import annotations

from typing import Literal, TypeAlias

__all__ = ["ExecutionCount", "Ledger", "Outcome"]

Outcome: TypeAlias = Literal["kept", "surplus", "carried", "dropped", "failed", "cancelled", "recycled"]


class ExecutionCount:
    """The executions' own row: `submitted = in_flight + completed + dropped + failed + cancelled`.

    `children` counts the samples that fan-outs added, beside the row.
    """

    __slots__ = ("cancelled", "children", "completed", "dropped", "failed", "submitted")

    def __init__(self) -> None:
        self.submitted = self.completed = self.dropped = self.failed = self.cancelled = self.children = 0

    @property
    def in_flight(self) -> int:
        return self.submitted - self.completed - self.dropped - self.failed - self.cancelled


class Ledger:
    """Counts of one rollout, in groups."""

    __slots__ = (
        "cancelled", "carried", "dropped", "executions", "failed", "held", "in_flight", "kept", "kept_by_fallback",
        "recycled", "submitted", "surplus",
    )  # fmt: skip

    def __init__(self) -> None:
        self.submitted = self.in_flight = self.held = 0
        self.kept = self.kept_by_fallback = 0
        self.surplus = self.carried = self.failed = self.cancelled = self.recycled = 0
        self.dropped: dict[str, int] = {}
        self.executions = ExecutionCount()

    @property
    def remaining(self) -> int:
        """Groups that are in the batch or may still come into it; surplus and carried ones stay in, as in slime."""
        return self.in_flight + self.kept + self.surplus + self.carried

    def submit(self, executions: int) -> None:
        self.submitted += 1
        self.in_flight += 1
        self.executions.submitted += executions

    def hold(self) -> None:
        """A group in flight was rejected and goes into the reserve."""
        self.in_flight -= 1
        self.held += 1

    def release(self) -> None:
        """A held group is in flight again: to fill the batch, or on its way out."""
        self.held -= 1
        self.in_flight += 1

    def end(self, outcome: Outcome, reason: str | None = None, *, by_fallback: bool = False) -> None:
        """A group in flight ends, once."""
        self.in_flight -= 1
        if outcome == "dropped":
            key = reason or "dropped"
            self.dropped[key] = self.dropped.get(key, 0) + 1
            return
        setattr(self, outcome, getattr(self, outcome) + 1)
        if outcome == "kept" and by_fallback:
            self.kept_by_fallback += 1

    @property
    def balanced(self) -> bool:
        """The columns add up to what was submitted, and none is negative."""
        columns = (
            self.in_flight, self.held, self.kept, self.surplus, self.carried, sum(self.dropped.values()), self.failed,
            self.cancelled, self.recycled,
        )  # fmt: skip
        return sum(columns) == self.submitted and min(columns) >= 0 and self.executions.in_flight >= 0
