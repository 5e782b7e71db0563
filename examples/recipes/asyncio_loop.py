"""A pipeline inside an asyncio program: batches go to the trainer, and another task of the program goes on beside it.

Prints:

    loss 0.50, rollout 0: kept 4 of 6 submitted
    loss 0.33, rollout 1: kept 4 of 6 submitted
    loss 0.25, rollout 2: kept 4 of 6 submitted
    the program saw 18 groups go in
"""

from __future__ import annotations

import asyncio
import itertools

from backends.simulated import SimulatedEngine
from eventbus import Batch, BatchSpec, Completion, Pipeline, Prompts, Sample, TrainResult
from middleware import DynamicFilter, Generate, GroupAdvantage, reward_nonzero_std


def answer(sample: Sample) -> Completion:
    """Right every other time. In its place: SGLangEngine("http://127.0.0.1:30000"), with Tokenize in front."""
    text = "4" if sample.index is not None and sample.index % 2 else "5"
    return Completion(text, tokens=[ord(text)], log_probs=[-0.7])


def score(sample: Sample) -> None:
    sample.reward = float(sample.response == sample.label)


class Trainer:
    """Anything with `async def train(batch) -> TrainResult`."""

    async def train(self, batch: Batch) -> TrainResult:
        await asyncio.sleep(0)  # a step of the optimizer
        return TrainResult(metrics={"loss": 1 / (batch.rollout_id + 2)}, weight_version=str(batch.rollout_id + 1))


async def main() -> None:
    trainer = Trainer()
    pipeline = Pipeline(
        prompts=Prompts(({"prompt": "2+2=", "label": "4"} for _ in itertools.count()), group_size=4),
        stages=[Generate(SimulatedEngine(answer)), score, DynamicFilter(reward_nonzero_std), GroupAdvantage()],
        batch=BatchSpec(groups=4, over_sampling=6),
    )  # building it opens nothing
    async with pipeline:
        watching = asyncio.create_task(count_groups(pipeline))
        async for batch in pipeline.rollouts(stop=3):
            result = await trainer.train(batch)
            batch.trained(result)  # or just ask for the next batch
            kept = f"kept {batch.summary.kept} of {batch.summary.submitted} submitted"
            print(f"loss {result.metrics['loss']:.2f}, rollout {batch.rollout_id}: {kept}")
    print(f"the program saw {await watching} groups go in")


async def count_groups(pipeline: Pipeline) -> int:
    """Ends with the pipeline."""
    return len([event async for event in pipeline.events(kinds=("group_submitted",))])


if __name__ == "__main__":
    asyncio.run(main())
