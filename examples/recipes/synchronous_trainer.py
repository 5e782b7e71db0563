"""A trainer that knows no event loop: the pipeline runs in a thread of its own, and batches come out of a plain loop.

Prints:

    step 0: 8 samples, mean reward 0.50
    step 1: 8 samples, mean reward 0.50
    step 2: 8 samples, mean reward 0.50
    evaluation after step 2: 0.50
"""

from __future__ import annotations

import itertools

from backends.simulated import SimulatedEngine
from eventbus import Batch, BatchSpec, Completion, Pipeline, Prompts, Sample, TrainResult
from middleware import Generate, GroupAdvantage


def answer(sample: Sample) -> Completion:
    """Right every other time."""
    text = "4" if sample.index is not None and sample.index % 2 else "5"
    return Completion(text, tokens=[ord(text)], log_probs=[-0.7])


def score(sample: Sample) -> None:
    sample.reward = float(sample.response == sample.label)


def train_step(batch: Batch) -> dict[str, float]:
    """Your trainer: what it needs of each sample is `tokens`, `loss_mask`, `rollout_log_probs` and the advantage."""
    rewards = [sample.reward for sample in batch.samples if sample.train_metadata]
    return {"reward": sum(rewards) / len(rewards)}


def main() -> None:
    pipeline = Pipeline(
        prompts=Prompts(({"prompt": "2+2=", "label": "4"} for _ in itertools.count()), group_size=4),
        stages=[Generate(SimulatedEngine(answer)), score, GroupAdvantage()],
        batch=BatchSpec(groups=2),
    )
    with pipeline.sync() as stream:
        for batch in stream.rollouts(stop=3):
            metrics = train_step(batch)
            batch.trained(TrainResult(metrics=metrics))
            print(f"step {batch.rollout_id}: {len(batch.samples)} samples, mean reward {metrics['reward']:.2f}")
        questions = Prompts([{"prompt": "2+2=", "label": "4"}], group_size=2)
        report = stream.evaluate(questions, rollout_id=2, sampling={"temperature": 0.0})
        print(f"evaluation after step 2: {report.mean_reward():.2f}")


if __name__ == "__main__":
    main()
