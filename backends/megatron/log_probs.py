"""Log-probabilities and entropy out of logits whose vocabulary lies on several tensor-parallel ranks.

Rank r of n holds the columns r * V / n up to (r + 1) * V / n, as megatron-core's `ColumnParallelLinear` leaves them. No
rank ever holds a whole row: what goes over the group is a few numbers per row. All ranks get the same result and are to
go on with it in the same way; then the gradient of a rank's logits is that of the one loss, and needs no collective.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["kept_tokens", "log_probs_and_entropy"]


def log_probs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    kept: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(logits / temperature), and the entropy of that distribution in nats.

    Computed in float32 (float64 stays as it is). One tensor of the size of the logits is kept for the backward pass.

    :param logits: [R, V / tp], this rank's columns; a logit of -inf rules a token out.
    :param targets: int64 [R], of the whole vocabulary.
    :param temperature: that of the rollouts.
    :param kept: bool, as `logits`: the log-probabilities are those among these tokens alone. Not so the entropy.
    :param group: the tensor-parallel group; None: the logits are whole.
    :return: two tensors [R].
    """
    log_probs, entropy = _LogProbsAndEntropy.apply(logits, targets, temperature, group)  # type: ignore[no-untyped-call]
    if kept is not None:
        masked = logits.masked_fill(~kept, -torch.inf)
        log_probs, _ = _LogProbsAndEntropy.apply(masked, targets, temperature, group)  # type: ignore[no-untyped-call]
    return log_probs, entropy


def kept_tokens(
    ids: Tensor, offsets: Tensor, targets: Tensor, width: int, group: dist.ProcessGroup | None = None
) -> Tensor:
    """`kept` for what top-p left at each position, the target always among it.

    :param ids: int64, end to end; those of row i are `ids[offsets[i]:offsets[i + 1]]`.
    :param width: V / tp.
    :return: bool [R, width]
    """
    rows = torch.arange(len(targets), device=ids.device)
    rows = torch.cat([rows.repeat_interleave(offsets.diff()), rows])
    columns = torch.cat([ids, targets]) - _begin(width, group)
    own = (columns >= 0) & (columns < width)
    kept = torch.zeros(len(targets), width, dtype=torch.bool, device=ids.device)
    kept[rows[own], columns[own]] = True
    return kept


def _begin(width: int, group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group) * width


def _reduced(values: Tensor, operation: Any, group: dist.ProcessGroup | None) -> Tensor:
    # An empty tensor has nothing to say, and not every backend takes one; the ranks of a group have as many rows.
    if group is not None and values.numel():
        dist.all_reduce(values, operation, group)
    return values


class _LogProbsAndEntropy(torch.autograd.Function):
    """With z = logits / temperature, p = softmax(z), H the entropy and y the target:

    d log p(y) / d z = onehot(y) - p
    d H / d z = -p (log p + H)
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        # A copy in any case: from here on it is changed in place.
        log_p = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True).div_(temperature)
        log_p.sub_(_reduced(log_p.amax(-1), dist.ReduceOp.MAX, group)[:, None])
        log_p.sub_(_reduced(log_p.exp().sum(-1), dist.ReduceOp.SUM, group).log_()[:, None])
        column = targets - _begin(log_p.shape[-1], group)
        own = (column >= 0) & (column < log_p.shape[-1])
        column = column.where(own, 0)
        chosen = log_p.gather(-1, column[:, None])[:, 0].where(own, 0)
        entropy = -(log_p.exp() * _finite(log_p)).sum(-1)
        chosen, entropy = _reduced(torch.stack([chosen, entropy]), dist.ReduceOp.SUM, group).unbind()
        ctx.save_for_backward(log_p, column, own, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)
        return chosen.clone(), entropy.clone()

    @staticmethod
    def backward(ctx: Any, for_chosen: Tensor | None, for_entropy: Tensor | None) -> Any:
        log_p, column, own, entropy = ctx.saved_tensors
        p = log_p.exp()
        gradient = torch.zeros_like(p)
        if for_chosen is not None:
            gradient.addcmul_(p, for_chosen[:, None], value=-1)
            gradient.scatter_add_(-1, column[:, None], for_chosen.where(own, 0)[:, None])
        if for_entropy is not None:
            gradient.addcmul_(p.mul_(_finite(log_p).add_(entropy[:, None])), for_entropy[:, None], value=-1)
        return gradient.div_(ctx.temperature).to(ctx.dtype), None, None, None


def _finite(log_p: Tensor) -> Tensor:
    """A copy in which a token that is ruled out has no -inf, which times its probability of 0 would be nan."""
    return log_p.clamp(min=torch.finfo(log_p.dtype).min)
