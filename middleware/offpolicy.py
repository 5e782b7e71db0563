"""`mask_offpolicy`: only tokens of the newest weights count in the loss."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from eventbus.columns import LossMask
from eventbus.group import Group
from eventbus.sample import Sample, WeightSpan

__all__ = ["mask_offpolicy"]


def mask_offpolicy(group: Group) -> None:
    """A group stage that sets the loss mask to 0 for tokens that older weights than the newest of the group generated.

        stages=[Generate(engine), reward, mask_offpolicy, GroupAdvantage()]
        batch=BatchSpec(groups=32, over_sampling=48, unfinished="recycle")

    What is older says `sample.weight_versions`, never the number of the round. So in a group that was recycled
    (`unfinished="recycle"`) the tokens of the round before do not count once there are new weights: the first part of a
    response that went on, and all of a sibling that was finished by then. That is slime's
    `mask_offpolicy_in_partial_rollout`, but for weights that stayed the same, whose tokens it masks too. The reward of
    such a sibling counts in the group as before.

    The newest version is the largest number; one that is no number, such as "default" of a server that got no weights
    yet, is older than all numbers. Without numbers it is the one that no sample goes on from. Nothing else changes: a
    token that did not count stays so, and one that no span names, or of an engine that names no versions, keeps its
    mask. Put the stage behind those that fan out or set masks of their own.

    Where weights change all the time, in the middle of responses, a mask throws away most of what fast siblings
    generated: there correct by importance sampling instead, `rollout_log_probs` are those of the weights that generated
    each token.

    :raises ValueError: which version is the newest cannot be told; names both.
    """
    samples = group.samples
    if len({span.version for sample in samples for span in _spans(sample)}) < 2:
        return
    newest = _newest(group.index, samples)
    for sample in samples:
        older = [span for span in _spans(sample) if span.version != newest]
        if not older:
            continue
        mask = LossMask([1] * sample.response_length if sample.loss_mask is None else sample.loss_mask)
        for span in older:
            mask[span.start : span.end] = bytes(len(mask[span.start : span.end]))  # a stage may have cut the response
        sample.loss_mask = mask


def _spans(sample: Sample) -> Iterable[WeightSpan]:
    return (span for span in sample.weight_versions if span.start < span.end)


def _newest(index: int, samples: Iterable[Sample]) -> str:
    versions: set[str] = set()
    left: set[str] = set()
    """Versions that a sample went on from to another one."""
    for sample in samples:
        names = [span.version for span in _spans(sample)]
        versions.update(names)
        left.update(name for name, following in pairwise(names) if name != following)
    numbers = {version for version in versions if version.isdecimal()}
    if numbers:
        return max(numbers, key=int)
    last = sorted(versions - left)
    if len(last) != 1:
        raise ValueError(
            f"group {index}: which of the weight versions {' and '.join(map(repr, last or sorted(versions)))} is the "
            "newest cannot be told: name versions by numbers, such as the training step"
        )
    return last[0]
