"""What a batch is made of, and what happens to the rest: `BatchSpec`, and the error when it cannot be filled."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from eventbus.group import Summary

__all__ = ["BatchSpec", "RolloutExhausted"]


class BatchSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a rollout fills its batch.

    :raises ValueError: a number is out of its range; names it.
    """

    groups: int
    """Groups in every batch: the target."""
    over_sampling: int | None = None
    """Groups asked for per round while fewer than `groups` remain; default `groups`."""
    max_rounds: int = 10
    min_group_size: int | None = None
    """Executions that a group may shrink to by drops and failures; default: none may be missing."""
    surplus: Literal["discard", "carry"] = "discard"
    """Groups judged good beyond the target: thrown away, or first in the next batch."""
    unfinished: Literal["restart", "recycle", "cancel"] = "restart"
    """Groups still under way when the batch is full. `restart`: the prompt is asked again from the start. `recycle`:
    with the tokens it has and the budget that is left; finished siblings keep their results. Samples that come with
    tokens have the round of the first of them in `metadata["start_rollout_id"]`; the stage `middleware.mask_offpolicy`
    keeps tokens of older weights out of the loss. `cancel`: forgotten."""
    on_exhausted: Literal["error", "partial", "wrap"] = "error"
    """When rounds or prompts run out before the batch is full: `RolloutExhausted`, or a smaller batch, or (prompts
    only) the source from its start again."""
    max_failures: int = 64
    """Failed samples that a rollout tolerates; one more ends it with an ExceptionGroup of what they raised."""
    abort_timeout: float = 10.0
    """Seconds that an engine has to give back what it was asked to abort."""

    def __post_init__(self) -> None:
        for name, least in (("groups", 1), ("over_sampling", 1), ("max_rounds", 1), ("min_group_size", 1),
                            ("max_failures", 0), ("abort_timeout", 0)):  # fmt: skip
            value = getattr(self, name)
            if value is None and name in ("over_sampling", "min_group_size"):
                continue
            number = isinstance(value, int | float) if name == "abort_timeout" else isinstance(value, int)
            if not number or isinstance(value, bool):
                kind = "a number" if name == "abort_timeout" else "an integer"
                raise ValueError(f"BatchSpec({name}={value!r}): must be {kind}")
            if not value >= least:
                raise ValueError(f"BatchSpec({name}={value}): must be at least {least}")
        for name, allowed in (("surplus", ("discard", "carry")), ("unfinished", ("restart", "recycle", "cancel")),
                              ("on_exhausted", ("error", "partial", "wrap"))):  # fmt: skip
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"BatchSpec({name}={value!r}): choose one of {', '.join(allowed)}")

    @property
    def round_size(self) -> int:
        """Groups asked for per round."""
        return self.over_sampling or self.groups


class RolloutExhausted(RuntimeError):
    """Rounds or prompts ran out before the batch was full. `summary` says what was rejected and why."""

    def __init__(self, message: str, summary: Summary) -> None:
        super().__init__(message)
        self.summary = summary

    def __reduce__(self) -> tuple[Any, ...]:  # an error that passes from one process to another keeps what it says
        return type(self), (self.args[0], self.summary)
