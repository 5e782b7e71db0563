"""In the place of a model and its trainer: it adds, writes the larger sums out, and never learns."""

from __future__ import annotations

import random
import re

from eventbus import Batch, Completion, Sample, TrainResult


def answer(sample: Sample) -> Completion:
    """Right three times out of four. From 50 on it says how it got there."""
    left, right = map(int, re.findall(r"\d+", str(sample.prompt)))
    total = left + right
    said = total if random.Random(str(sample.index)).random() < 0.75 else total - 10
    text = f"{said}" if total < 50 else f"{left} + {right} = {said}"
    return Completion(text, tokens=list(text.encode()), log_probs=[-0.1] * len(text))


def seconds(sample: Sample) -> float:
    """One after the other, so that every run goes alike."""
    return 0.002 * (sample.index or 0)


class Trainer:
    async def train(self, batch: Batch) -> TrainResult:
        rewards = [reward for group in batch.groups for reward in group.rewards()]
        return TrainResult(metrics={"reward": sum(rewards) / len(rewards)})
