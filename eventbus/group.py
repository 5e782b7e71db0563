"""Samples gathered: a `Group` is the executions of one prompt, a `Batch` is the groups of one rollout.

The order inside is fixed by numbers, never by arrival: groups by `Group.index`, executions by their own index,
fanned-out children in the order in which their stage returned them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from eventbus.sample import Sample

__all__ = ["Batch", "EvalReport", "Group", "Summary", "TrainResult", "Verdict", "acknowledge", "reward_number"]


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a filter said of a group, and the count that it saw."""

    kept: bool
    reason: str | None = None
    by_fallback: bool = False
    """Rejected by the judge, kept all the same so that the batch fills up."""
    score: float | None = None
    remaining: int | None = None
    """Groups that could still fill the batch at that moment, this one included."""
    target: int | None = None


class Group(msgspec.Struct, omit_defaults=True):
    """The executions of one prompt. An execution has one sample, or several where a stage fanned out."""

    index: int
    prompt: str | list[dict[str, Any]]
    executions: list[list[Sample]]
    verdict: Verdict | None = None

    @property
    def samples(self) -> list[Sample]:
        """All samples, flat, in order."""
        return [sample for execution in self.executions for sample in execution]

    def __len__(self) -> int:
        """Executions, not samples: fanned-out siblings count once."""
        return len(self.executions)

    def rewards(self, key: str | None = None) -> list[float]:
        """One reward per execution, that of its last sample; None reads as nan.

        :param key: the field of a dict reward.
        :raises TypeError: a reward is a dict and no key was given, or it is no number.
        :raises KeyError: a dict reward lacks `key`.
        """
        last = [execution[-1] for execution in self.executions]
        return [reward if type(reward := sample.reward) is float else _number(sample, key) for sample in last]


class Summary(msgspec.Struct, omit_defaults=True):
    """What became of one rollout's groups. `str()` gives one line."""

    rollout_id: int
    evaluation: bool = False
    target: int = 0
    rounds: int = 0
    """Times that prompts were asked for."""
    submitted: int = 0
    kept: int = 0
    kept_by_fallback: int = 0
    """Of `kept`: rejected by a judge, kept to fill the batch."""
    dropped: dict[str, int] = {}
    """Groups per reason."""
    failed: int = 0
    cancelled: int = 0
    recycled: int = 0
    carried: int = 0
    surplus: int = 0
    executions: int = 0
    """Executions in the kept groups."""
    samples: int = 0
    """Samples in the kept groups, fanned-out children counted one by one."""
    failed_samples: int = 0
    """Samples that failed in any group, resubmitted ones included."""
    resubmitted_samples: int = 0
    loss_tokens: int = 0
    fallback_loss_tokens: int = 0
    """Of `loss_tokens`: in groups kept by a fallback."""
    reward_mean: float | None = None
    """Over all executions that were completed, before any filter: what the policy earns."""
    kept_reward_mean: float | None = None
    """Over the executions in the kept groups; a filter moves it, so it is no measure of the policy."""
    seconds: float = 0.0

    @property
    def fallback_share(self) -> float:
        """Share of the loss tokens that lies in groups kept by a fallback, 0 to 1."""
        return self.fallback_loss_tokens / self.loss_tokens if self.loss_tokens else 0.0

    def __str__(self) -> str:
        parts = [f"kept {self.kept}/{self.target} of {self.submitted} submitted"]
        if self.kept_by_fallback:
            parts.append(f"{self.kept_by_fallback} by fallback ({self.fallback_share:.0%} of loss tokens)")
        if self.dropped:
            reasons = ", ".join(f"{reason} x{count}" for reason, count in sorted(self.dropped.items()))
            parts.append(f"dropped {sum(self.dropped.values())} ({reasons})")
        for name in ("failed", "cancelled", "recycled", "carried", "surplus"):
            if count := getattr(self, name):
                parts.append(f"{name} {count}")
        if self.reward_mean is not None:
            parts.append(f"reward {self.reward_mean:.3f}")
        kind = "evaluation" if self.evaluation else "rollout"
        return f"{kind} {self.rollout_id}: " + ", ".join(parts) + f" in {self.seconds:.1f} s"


class TrainResult(msgspec.Struct, omit_defaults=True):
    """What a trainer answers for a batch."""

    metrics: dict[str, float] = {}
    weight_version: str | None = None
    """The version that the engine has from now on; None when the weights were not handed over."""


class Batch(msgspec.Struct, dict=True):
    """The groups of one rollout, sorted by `Group.index`, and the summary of how it came about."""

    rollout_id: int
    groups: list[Group]
    summary: Summary

    @property
    def samples(self) -> list[Sample]:
        """All samples, flat, in order."""
        return [sample for group in self.groups for execution in group.executions for sample in execution]

    def __len__(self) -> int:
        return len(self.groups)

    def trained(self, result: TrainResult | None = None) -> None:
        """Acknowledge this batch with what training it gave. Asking for the next batch does the same without metrics.

        :raises RuntimeError: it was acknowledged before, or it did not come out of a pipeline.
        :raises TypeError: the result is no `TrainResult`.
        """
        acknowledge(self, result, f"batch {self.rollout_id}", "a pipeline")


def acknowledge(taken: Any, result: TrainResult | None, name: str, source: str) -> None:
    """Once, call what `source` has left in `taken._acknowledge`.

    :raises RuntimeError: it was called before, or there was none.
    :raises TypeError: the result is no `TrainResult`.
    """
    if result is not None and not isinstance(result, TrainResult):
        raise TypeError(f"trained() takes a TrainResult(metrics, weight_version), got {type(result).__name__}")
    told: Callable[[TrainResult | None], None] | None = taken.__dict__.pop("_acknowledge", None)
    if told is None:
        raise RuntimeError(f"{name} was acknowledged before, or did not come from {source}")
    told(result)


class EvalReport(msgspec.Struct):
    """What an evaluation gave: all groups of the source that came through, sorted by index."""

    rollout_id: int
    groups: list[Group]
    summary: Summary

    def mean_reward(self, key: str | None = None) -> float:
        """Mean over all executions with a finite reward; nan when there is none."""
        finite = [reward for group in self.groups for reward in group.rewards(key) if math.isfinite(reward)]
        return sum(finite) / len(finite) if finite else math.nan


def reward_number(reward: Any) -> float | None:
    """The reward as a float, of whatever kind of number it is; infinite where it does not fit one. None for what is no
    lone number."""
    if type(reward) is float:
        return reward
    if reward is None or isinstance(reward, dict | str | bytes):  # the latter two float() would read
        return None
    try:
        return float(reward)  # also of numpy numbers and 0-d tensors
    except OverflowError:  # an int
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        return None


def _number(sample: Sample, key: str | None) -> float:
    reward = sample.reward
    if isinstance(reward, dict):
        if key is None:
            raise TypeError(
                f"sample {sample.index}: the reward is a dict with the keys {sorted(map(str, reward))}; "
                "say which one counts: rewards(key=...)"
            )
        if key not in reward:
            raise KeyError(f"sample {sample.index}: the reward has no key {key!r}, only {sorted(map(str, reward))}")
        reward = reward[key]
    if reward is None:
        return math.nan
    try:
        if isinstance(reward, str | bytes):  # which float() would read
            raise TypeError
        return float(reward)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"sample {sample.index}: the reward {reward!r} is not a number that fits a float") from error
