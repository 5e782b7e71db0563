"""`Objective`: a policy loss by its options, put together from the functions in `backends.megatron.losses`.

A trainer takes any function from `Terms` to the loss of each token; this is the one that a file of options can name.

    def my_loss(terms: Terms) -> PolicyLoss:
        policy = losses.ppo(terms.log_probs, terms.old_log_probs, terms.batch.advantages, clip_high=0.28)
        return policy._replace(loss=policy.loss - 0.001 * terms.entropy)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from inspect import signature
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from backends.megatron import losses
from backends.megatron.losses import PolicyLoss, Reduce
from backends.megatron.packing import MicroBatch

__all__ = ["Objective", "Terms"]


class Terms(NamedTuple):
    """What a loss is made of: one value for each of the R response tokens that a rank predicts in a micro-batch."""

    log_probs: Tensor
    """[R], with a gradient"""
    entropy: Tensor
    """[R], with a gradient"""
    old_log_probs: Tensor
    """[R]: where the trainer has no others, the `log_probs` without their gradient."""
    reference_log_probs: Tensor | None
    """[R]; None without a reference model."""
    batch: MicroBatch
    """Advantages and the other columns of the samples, and which tokens count."""
    reduce: Reduce | None
    """Adds over the context-parallel ranks, for what is about whole sequences."""


class Objective(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PPO/GRPO, GSPO, CISPO or REINFORCE, with what is added to it.

    :raises ValueError: an option is out of range, or the policy loss does not have it.
    """

    policy: Literal["ppo", "gspo", "cispo", "reinforce"] = "ppo"
    """The function of `backends.megatron.losses`; GRPO is "ppo" with advantages that compare the samples of a group."""
    clip: float | None = None
    """This and the next three: as the function says; None: its default."""
    clip_high: float | None = None
    clip_low: float | None = None
    dual_clip: float | None = None
    importance_cap: float | None = None
    """Multiply by `losses.importance_weights` with this cap. The trainer must recompute the old log-probs."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Which estimate of the KL to the reference."""
    kl_coefficient: float = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    """In the reward it is that of the policy before the batch."""
    entropy_coefficient: float = 0.0
    """Times the entropy, subtracted from the loss."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"Objective: {name} is {value!r}, it must be one of {', '.join(map(repr, choices))}")
        numbers = {**self._bounds, **{name: getattr(self, name) for name in ("importance_cap", *_COEFFICIENTS)}}
        for name, value in numbers.items():
            if value is not None and not isinstance(value, int | float):
                raise ValueError(f"Objective: {name} is a {type(value).__name__}, it must be a number")
        known = signature(_POLICIES[self.policy]).parameters
        for name in self._bounds:
            if name not in known:
                raise ValueError(f"Objective: policy {self.policy!r} has no {name}")
        for name in _COEFFICIENTS:
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"Objective: {name} is {value}, it must be a number of at least 0")
        none = torch.zeros(0)
        try:
            if self.policy in ("ppo", "gspo"):
                losses.ppo(none, none, none, **self._bounds)
            elif self.policy == "cispo":
                losses.cispo(none, none, none, **self._bounds)
        except TypeError as error:
            raise ValueError("Objective: policy 'cispo' needs clip_high") from error
        if self.importance_cap is not None:
            losses.importance_weights(none, none, cap=self.importance_cap)

    @property
    def needs(self) -> frozenset[str]:
        """Of "advantage", "rollout_log_probs", "old_log_probs" and "reference_log_probs": what it cannot do without."""
        needs = {"advantage"}
        if self.policy != "reinforce" or self.importance_cap is not None or self._penalty:
            needs.add("old_log_probs")
        if self.importance_cap is not None:
            needs.add("rollout_log_probs")
        if self.kl_coefficient:
            needs.add("reference_log_probs")
        return frozenset(needs)

    def __call__(self, terms: Terms) -> PolicyLoss:
        batch, new, old, reference = terms.batch, terms.log_probs, terms.old_log_probs, terms.reference_log_probs
        advantages = batch.advantages
        if advantages is None or (self.kl_coefficient and reference is None):
            raise TypeError(f"Objective: it needs {', '.join(sorted(self.needs))}")
        if self._penalty and reference is not None:
            penalty = losses.kl(old, reference, self.kl)
            advantages = losses.kl_in_reward(advantages, penalty, self.kl_coefficient, batch, reduce=terms.reduce)
        if self.policy == "ppo":
            found = losses.ppo(new, old, advantages, **self._bounds)
        elif self.policy == "gspo":
            found = losses.gspo(new, old, advantages, batch, reduce=terms.reduce, **self._bounds)
        elif self.policy == "cispo":
            found = losses.cispo(new, old, advantages, **self._bounds)
        else:
            ratio = torch.ones_like(advantages)
            found = PolicyLoss(losses.reinforce(new, advantages), ratio, torch.zeros_like(ratio, dtype=torch.bool))
        loss = found.loss
        if self.importance_cap is not None and batch.rollout_log_probs is not None:
            loss = loss * losses.importance_weights(old, batch.rollout_log_probs, cap=self.importance_cap)
        if self.kl_coefficient and not self._penalty and reference is not None:
            loss = loss + self.kl_coefficient * losses.kl(new, reference, self.kl)
        if self.entropy_coefficient:
            loss = loss - self.entropy_coefficient * terms.entropy
        return found._replace(loss=loss)

    @property
    def _penalty(self) -> bool:
        return bool(self.kl_coefficient) and self.kl_in == "reward"

    @property
    def _bounds(self) -> dict[str, Any]:
        names = ("clip", "clip_high", "clip_low", "dual_clip")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


_POLICIES: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {"ppo": losses.ppo, "gspo": losses.gspo, "cispo": losses.cispo, "reinforce": losses.reinforce}
)
_CHOICES: Final = {"policy": tuple(_POLICIES), "kl": ("k1", "k2", "k3"), "kl_in": ("loss", "reward")}
_COEFFICIENTS: Final = ("kl_coefficient", "entropy_coefficient")
