"""A filter of your own: groups that are neither too easy nor too hard, and the best of the others when too few are.

A judge gives a score with its verdict; `fallback="best"` holds rejected groups back and fills the batch from them, best
score first, when `max_rounds` rounds did not bring enough. Prints:

    group 1: rate 0.50
    group 2: rate 0.00 by fallback
    group 3: rate 0.75
    dropped {'rate_0.00': 1, 'rate_1.00': 1}
    1 of 3 by fallback, 33% of the loss tokens
"""

from __future__ import annotations

import anyio

from backends.simulated import SimulatedEngine
from eventbus import BatchSpec, Completion, Group, Pipeline, Prompts, Sample
from middleware import DynamicFilter, FilterDecision, Generate

RATES = [1.0, 0.5, 0.0, 0.75, 0.0]
"""How often the model is right, by prompt."""


def learnable(group: Group) -> FilterDecision:
    rate = sum(group.rewards()) / len(group)
    # Too hard before too easy: -0.4 beats -0.5.
    return FilterDecision(keep=0.1 < rate < 0.9, reason=f"rate_{rate:.2f}", score=-abs(rate - 0.4))


def score(sample: Sample) -> None:
    assert sample.index is not None
    assert sample.group_index is not None
    sample.reward = float(sample.index % 4 < 4 * RATES[sample.group_index])


async def main() -> None:
    engine = SimulatedEngine(lambda sample: Completion("4", tokens=[52], log_probs=[-0.1]))
    pipeline = Pipeline(
        prompts=Prompts((f"question {number}" for number in range(5)), group_size=4),
        stages=[Generate(engine), score, DynamicFilter(learnable, fallback="best")],
        batch=BatchSpec(groups=3, over_sampling=5, max_rounds=1),
    )
    async with pipeline:
        async for batch in pipeline.rollouts(stop=1):
            for group in batch.groups:
                rate = sum(group.rewards()) / len(group)
                fallback = " by fallback" if group.verdict and group.verdict.by_fallback else ""
                print(f"group {group.index}: rate {rate:.2f}{fallback}")
            summary = batch.summary
            print("dropped", summary.dropped)
            share = f"{summary.fallback_share:.0%} of the loss tokens"
            print(f"{summary.kept_by_fallback} of {summary.kept} by fallback, {share}")


if __name__ == "__main__":
    anyio.run(main)
