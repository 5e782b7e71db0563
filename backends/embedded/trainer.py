"""`EmbeddedTrainer`: one clipped policy-gradient step per batch, then new weights for the engine.

With the response tokens t of all samples that count in the loss, N of them in the batch, the advantage A of t's sample
and the ratio r_t = p_now(t) / p_rollout(t):

    loss = - 1/N sum_t min(r_t A, clip(r_t, 1 - clip, 1 + clip) A)

(PPO's objective, arXiv 1707.06347, averaged over tokens as in DAPO, arXiv 2503.14476). A group without advantage, which
a filter kept to fill the batch, adds to N and to nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from typing import NamedTuple

import anyio.lowlevel
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from backends.embedded.engine import EmbeddedEngine
from backends.embedded.model import Transformer, one_thread
from eventbus.group import Batch, TrainResult
from eventbus.sample import Sample

__all__ = ["EmbeddedTrainer"]


class EmbeddedTrainer:
    """Trains a copy of the engine's model with Adam and hands every new version to the engine.

    It reads `sample.train_metadata["advantage"]` (`GroupAdvantage` writes it), `rollout_log_probs`, `loss_mask` and
    `remove_sample`.

    :param lr: learning rate of Adam.
    :param clip: how far the ratio may move the loss away from 1, to either side.
    :param epochs: passes over a batch, each with one step of the optimizer.
    :param micro_batch: samples in one forward and backward pass, some 10 ms each with the default sizes; the event loop
        runs in between.
    :param max_grad_norm: longer gradients are scaled down to this.
    :param temperature: that of the rollouts.
    :raises ValueError: one of them is out of range.
    """

    def __init__(
        self,
        engine: EmbeddedEngine,
        lr: float = 1e-3,
        clip: float = 0.2,
        epochs: int = 1,
        micro_batch: int = 64,
        max_grad_norm: float = 1.0,
        temperature: float = 1.0,
    ) -> None:
        for name, value in {"epochs": epochs, "micro_batch": micro_batch}.items():
            if value < 1:
                raise ValueError(f"EmbeddedTrainer: {name} is {value}, it must be at least 1")
        positive = {"lr": lr, "clip": clip, "max_grad_norm": max_grad_norm, "temperature": temperature}
        for name, number in positive.items():
            if not number > 0:
                raise ValueError(f"EmbeddedTrainer: {name} is {number}, it must be more than 0")
        self.engine = engine
        self.model: Transformer = deepcopy(engine.model).train()
        self.clip = clip
        self.epochs = epochs
        self.micro_batch = micro_batch
        self.max_grad_norm = max_grad_norm
        self.temperature = temperature
        self.steps = 0
        """Batches trained; as a string the version of the weights."""
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)

    async def train(self, batch: Batch) -> TrainResult:
        """Train on `batch` and update the engine's weights.

        Metrics: `loss`, `grad_norm` (before it is clipped), means over the loss tokens: `ratio`, `clip_fraction`, `kl`
        (of the rollout policy from this one, k3 estimator) and `entropy`; over all epochs. `reward`, the mean over the
        samples with a number for a reward, and `tokens`, the loss tokens.

        Cancelled in its first epoch, it leaves the weights as they were.

        :raises ValueError: nothing in the batch counts in the loss; or a sample has no advantage or no log-probs, or
            does not fit the model.
        :raises FloatingPointError: the gradient is not finite; the weights stay as they were before that step.
        """
        samples = sorted((s for s in batch.samples if s.loss_tokens), key=lambda sample: len(sample.tokens))
        tokens = sum(sample.loss_tokens for sample in samples)
        if not tokens:
            raise ValueError(
                f"batch {batch.rollout_id}: no token of its {len(batch.samples)} samples counts in the loss"
            )
        for sample in samples:
            self._check(sample)
        sums = dict.fromkeys((*_Terms._fields, "grad_norm"), 0.0)
        for _ in range(self.epochs):
            await self._epoch(samples, tokens, sums)
        self.steps += 1
        version = str(self.steps)
        await self.engine.update_weights(self.model.state_dict(), version)
        metrics = {name: total / self.epochs for name, total in sums.items()}
        return TrainResult(metrics | {"reward": _mean_reward(batch.samples), "tokens": float(tokens)}, version)

    async def _epoch(self, samples: Sequence[Sample], tokens: int, sums: dict[str, float]) -> None:
        """One step of the optimizer, cut into micro-batches so that the event loop runs between them."""
        self._optimizer.zero_grad()
        for part in _chunks(samples, self.micro_batch):
            await anyio.lowlevel.checkpoint()
            with one_thread():
                terms = self._terms(part)
                terms.loss.div(tokens).backward()  # type: ignore[no-untyped-call]
            for name, value in terms._asdict().items():
                sums[name] += value.item() / tokens
        await anyio.lowlevel.checkpoint()
        with one_thread():
            norm = clip_grad_norm_(self.model.parameters(), self.max_grad_norm).item()
            if not math.isfinite(norm):
                raise FloatingPointError(f"the gradient of weights {self.steps!r} is not finite, so no step was made")
            self._optimizer.step()
        sums["grad_norm"] += norm

    def _terms(self, samples: Sequence[Sample]) -> _Terms:
        inputs = _padded(samples)
        log_probs = (self.model(inputs.tokens[:, :-1]) / self.temperature).log_softmax(-1)
        chosen = log_probs.gather(-1, inputs.tokens[:, 1:, None])[:, :, 0]
        difference = (chosen - inputs.rollout_log_probs)[inputs.mask]
        ratio = difference.exp()
        advantages = inputs.advantages[:, None].expand_as(chosen)[inputs.mask]
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        entropy = -(log_probs.exp() * log_probs).sum(-1)[inputs.mask]
        return _Terms(
            loss=-torch.minimum(ratio * advantages, clipped * advantages).sum(),
            ratio=ratio.sum(),
            clip_fraction=(ratio * advantages > clipped * advantages).sum(),
            kl=(ratio - 1 - difference).sum(),
            entropy=entropy.sum(),
        )

    def _check(self, sample: Sample) -> None:
        name = f"sample {sample.index}"
        if sample.train_metadata is None or "advantage" not in sample.train_metadata:
            raise ValueError(f"{name}: train_metadata has no 'advantage'; add the stage middleware.GroupAdvantage")
        if sample.rollout_log_probs is None:
            raise ValueError(f"{name}: it has no rollout_log_probs; the ratio to the rollout policy needs them")
        for column in ("rollout_log_probs", "loss_mask"):
            values = getattr(sample, column)
            if values is not None and len(values) != sample.response_length:
                raise ValueError(f"{name}: {column} has {len(values)} values for {sample.response_length} tokens")
        if len(sample.tokens) - 1 > self.model.context:
            raise ValueError(f"{name}: {len(sample.tokens)} tokens exceed the context of {self.model.context}")
        if not sample.prompt_length:
            raise ValueError(f"{name}: it has no prompt tokens, so nothing predicts the first token of the response")
        if min(sample.tokens) < 0 or max(sample.tokens) > self.engine.eos:
            raise ValueError(f"{name}: it has a token id that is not in the vocabulary of 0 to {self.engine.eos}")


class _Inputs(NamedTuple):
    """A micro-batch, padded on the right to `length` tokens."""

    tokens: Tensor
    """int64 [rows, length]"""
    mask: Tensor
    """bool [rows, length - 1]: which of the predicted tokens 1 ... length - 1 count in the loss."""
    rollout_log_probs: Tensor
    """float32 [rows, length - 1], of the predicted tokens; 0 outside of the response."""
    advantages: Tensor
    """float32 [rows]"""


class _Terms(NamedTuple):
    """Sums over the loss tokens of a micro-batch."""

    loss: Tensor
    ratio: Tensor
    clip_fraction: Tensor
    kl: Tensor
    entropy: Tensor


def _padded(samples: Sequence[Sample]) -> _Inputs:
    length = max(len(sample.tokens) for sample in samples)

    def rows(columns: Iterable[Sequence[float]], kind: torch.dtype) -> Tensor:
        """Columns of the response, each at its place."""
        return torch.tensor(
            [
                [0] * sample.prompt_length + list(column) + [0] * (length - len(sample.tokens))
                for sample, column in zip(samples, columns, strict=True)
            ],
            dtype=kind,
        )[:, 1:]

    return _Inputs(
        tokens=torch.tensor([sample.tokens.tolist() + [0] * (length - len(sample.tokens)) for sample in samples]),
        mask=rows(([1] * s.response_length if s.loss_mask is None else s.loss_mask for s in samples), torch.bool),
        rollout_log_probs=rows((s.rollout_log_probs or () for s in samples), torch.float32),
        advantages=torch.tensor([float((s.train_metadata or {})["advantage"]) for s in samples]),
    )


def _chunks(samples: Sequence[Sample], size: int) -> Iterator[Sequence[Sample]]:
    for start in range(0, len(samples), size):
        yield samples[start : start + size]


def _mean_reward(samples: Sequence[Sample]) -> float:
    rewards = [float(s.reward) for s in samples if isinstance(s.reward, int | float) and math.isfinite(s.reward)]
    return sum(rewards) / len(rewards) if rewards else math.nan
