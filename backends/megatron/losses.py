"""Losses of policy-gradient training, one value per response token, and how they become one number per step.

Every function takes and gives tensors of the shape [R], as `backends.megatron.packing` lays them out: one value for
each response token that this rank predicts. In the formulas, t is such a token, A its advantage,

    p(t)        its probability under the policy that is trained ("log_probs": with a gradient)
    p_old(t)    under the same policy before this batch ("old_log_probs")
    r = p(t) / p_old(t)

A step's loss is a sum over its tokens, divided by a count that is known before the step begins:

    loss = sum over ranks and micro-batches of aggregate(values, batch, by) / denominator(totals, by)

No micro-batch divides by anything of its own, so it does not matter how a batch is cut. A rank adds its own terms; who
averages gradients over N ranks and M micro-batches instead of adding them, as megatron-core does, multiplies by N * M.

A log-ratio is cut at +-20 before it is exponentiated: 0 times the infinity that a clipped branch would otherwise hold
is no gradient but nan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from backends.megatron.packing import MicroBatch, StepTotals

__all__ = [
    "Aggregation",
    "PolicyLoss",
    "Reduce",
    "aggregate",
    "cispo",
    "denominator",
    "entropy",
    "gspo",
    "importance_weights",
    "kl",
    "kl_in_reward",
    "ppo",
    "reinforce",
]

Aggregation: TypeAlias = Literal["token", "sequence", "execution"]
Reduce: TypeAlias = Callable[[Tensor], Tensor]
"""Adds a tensor over the context-parallel ranks, and in the backward pass its gradient, as
`torch.distributed.nn.functional.all_reduce` does. Every rank calls it, also one without response tokens."""

_LIMIT = 20.0


class PolicyLoss(NamedTuple):
    loss: Tensor
    """[R]"""
    ratio: Tensor
    """[R], without gradient: r, or what takes its place."""
    clipped: Tensor
    """bool [R]: the loss does not depend on the policy, or only with a clipped weight."""


# The objective


def ppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """The clipped surrogate of PPO (arXiv 1707.06347), which GRPO (arXiv 2402.03300) shares:

        loss = max(-r A, -clamp(r, 1 - clip, 1 + clip_high) A)

    :param clip_high: None: as `clip`. More than that is clip-higher (DAPO, arXiv 2503.14476): unlikely tokens may gain.
    :param dual_clip: c > 1: where A < 0 the loss is at most -c A, so that a token that has become much more likely does
        not dominate (arXiv 1912.09729).
    :raises ValueError: a bound is out of range.
    """
    return _clipped(_ratio(log_probs - old_log_probs), advantages, clip, clip_high, dual_clip)


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    batch: MicroBatch,
    *,
    clip: float = 3e-4,
    clip_high: float | None = 4e-4,
    reduce: Reduce | None = None,
) -> PolicyLoss:
    """Group sequence policy optimization (arXiv 2507.18071): the ratio of a whole sequence y,

        s = (p(y) / p_old(y))^(1 / |y|) = exp(mean over t of log r)
        loss = max(-s A, -clamp(s, 1 - clip, 1 + clip_high) A)

    over its tokens that count in the loss. All tokens of y have this loss; aggregate it per sequence, as the paper
    does. The default bounds are those of its experiments.

    :param reduce: needed where context parallelism cuts sequences.
    :raises ValueError: a bound is out of range.
    """
    total = _sequence_sums(log_probs - old_log_probs, batch, reduce)
    mean = total / batch.sequence_tokens.clamp(min=1)
    return _clipped(_ratio(mean[batch.segments]), advantages, clip, clip_high, None)


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_high: float,
    clip_low: float | None = None,
) -> PolicyLoss:
    """Clipped importance sampling weights (MiniMax-M1, arXiv 2506.13585): every token keeps its
    gradient, only its weight is bounded,

        loss = -detach(clamp(r, 1 - clip_low, 1 + clip_high)) A log p(t)

    :param clip_low: None: no lower bound, as in the paper's experiments.
    :raises ValueError: a bound is out of range.
    """
    _check_bound("clip_high", clip_high)
    if clip_low is not None:
        _check_bound("clip_low", clip_low)
    ratio = _ratio(log_probs.detach() - old_log_probs)
    weight = ratio.clamp(min=None if clip_low is None else 1 - clip_low, max=1 + clip_high)
    return PolicyLoss(-weight * advantages * log_probs, ratio, weight != ratio)


def reinforce(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """-A log p(t) (Williams, 1992)."""
    return -advantages * log_probs


def _clipped(
    ratio: Tensor, advantages: Tensor, clip: float, clip_high: float | None, dual_clip: float | None
) -> PolicyLoss:
    _check_bound("clip", clip)
    if clip_high is None:
        clip_high = clip
    _check_bound("clip_high", clip_high)
    free = -ratio * advantages
    bounded = -ratio.clamp(1 - clip, 1 + clip_high) * advantages
    loss, clipped = torch.maximum(free, bounded), bounded > free
    if dual_clip is not None:
        if not dual_clip > 1:
            raise ValueError(f"dual_clip is {dual_clip}, it must be more than 1")
        most = -dual_clip * advantages
        above = (advantages < 0) & (loss > most)
        loss, clipped = torch.where(above, most, loss), clipped | above
    return PolicyLoss(loss, ratio.detach(), clipped)


def _check_bound(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} is {value}, it must be more than 0")


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_LIMIT, _LIMIT).exp()


# What is added to it


def kl(log_probs: Tensor, reference_log_probs: Tensor, kind: Literal["k1", "k2", "k3"] = "k3") -> Tensor:
    """Estimates of KL(p || reference) from tokens that p generated (Schulman, http://joschu.net/blog/kl-approx.html).
    With d = log p(t) - log reference(t):

        k1 = d                  unbiased, noisy, may be negative
        k2 = d^2 / 2            biased, little noise
        k3 = exp(-d) - 1 + d    unbiased, little noise, never negative; GRPO's, arXiv 2402.03300

    Added to the loss, what counts is the expectation of their gradient with the tokens held fixed: for k1 that is 0,
    for k2 it is the gradient of KL(p || reference), for k3 that of KL(reference || p). In the reward (`kl_in_reward`)
    k1 does what it says.

    :raises ValueError: there is no such kind.
    """
    difference = log_probs - reference_log_probs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    if kind == "k3":
        return _ratio(-difference) - 1 + difference
    raise ValueError(f"kl: kind is {kind!r}, it must be 'k1', 'k2' or 'k3'")


def kl_in_reward(
    advantages: Tensor, kl: Tensor, coefficient: float, batch: MicroBatch, *, reduce: Reduce | None = None
) -> Tensor:
    """The advantages after the sequence's reward was lowered by `coefficient` times its KL, summed over the tokens t
    that count in the loss (Ziegler et al., arXiv 1909.08593):

        A - coefficient * sum over t of kl(t)

    It has no gradient. The rewards of a group are compared before this, so it is no part of their mean or spread.

    :param kl: of each token, such as `kl(log_probs, reference_log_probs, "k1")`.
    :param reduce: needed where context parallelism cuts sequences.
    """
    return advantages - coefficient * _sequence_sums(kl.detach(), batch, reduce)[batch.segments]


def importance_weights(log_probs: Tensor, rollout_log_probs: Tensor, *, cap: float = 2.0) -> Tensor:
    """Truncated importance sampling: min(p(t) / p_rollout(t), cap), without gradient; multiply the loss by it.

    Engine and trainer compute different probabilities from the same weights, so that what is meant to be on-policy is
    not (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025); the truncation
    bounds the variance (Ionides, 2008).

    :param log_probs: by the trainer, with the weights that generated the tokens: those that a ratio r takes as old.
    :param rollout_log_probs: by the engine.
    :raises ValueError: `cap` is not more than 0.
    """
    _check_bound("cap", cap)
    return _ratio(log_probs.detach() - rollout_log_probs).clamp(max=cap)


def entropy(logits: Tensor) -> Tensor:
    """-sum over v of p(v) log p(v), of the distribution that each row of logits [R, vocabulary] is. In nats.

    A token that is ruled out (a logit of -inf) adds nothing.
    """
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)


# From tokens to a step


def aggregate(values: Tensor, batch: MicroBatch, by: Aggregation) -> Tensor:
    """What this micro-batch on this rank adds to the step: a sum over its tokens t that count in the loss.

        "token"       sum of values                                        DAPO, arXiv 2503.14476
        "sequence"    sum of values / tokens of t's sequence               GRPO, arXiv 2402.03300
        "execution"   sum of values / tokens of t's execution              the same, siblings of one execution as one

    Tokens are those that count in the loss, wherever they are. To be divided by `denominator(totals, by)`.

    :return: a number with a gradient, also where this rank has no such token.
    :raises ValueError: there is no such aggregation.
    """
    counted = values.where(batch.loss_mask, 0)
    if by == "token":
        return counted.sum()
    if by == "sequence":
        return (counted / batch.sequence_tokens[batch.segments].clamp(min=1)).sum()
    if by == "execution":
        return (counted / batch.execution_tokens[batch.segments].clamp(min=1)).sum()
    raise _no_aggregation(by)


def denominator(totals: StepTotals, by: Aggregation) -> int:
    """Tokens that count in the loss, sequences, or executions of the whole step; the latter two also where no token
    counts, since taking a sample out of the loss is not to raise the weight of the others.

    :raises ValueError: there is no such aggregation.
    """
    if by == "token":
        return totals.tokens
    if by == "sequence":
        return totals.sequences
    if by == "execution":
        return totals.executions
    raise _no_aggregation(by)


def _no_aggregation(by: object) -> ValueError:
    return ValueError(f"by is {by!r}, it must be 'token', 'sequence' or 'execution'")


def _sequence_sums(values: Tensor, batch: MicroBatch, reduce: Reduce | None) -> Tensor:
    """[n]: over the tokens of each sequence that count in the loss."""
    sums = values.new_zeros(len(batch.sequence_tokens))
    sums = sums.index_add(0, batch.segments, values.where(batch.loss_mask, 0))
    return sums if reduce is None else reduce(sums)
