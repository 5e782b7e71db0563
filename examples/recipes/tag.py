"""The smallest stage: a function that changes the sample, and its test, which needs no engine and no loop.

Prints:

    {'rollout': 7, 'words': 2}
    training: {'rollout': 0, 'words': 3}
    evaluation: {'words': 3}
"""

from __future__ import annotations

import anyio

from backends.simulated import SimulatedEngine
from eventbus import BatchSpec, Completion, Pipeline, Prompts, Sample
from eventbus.testing import run_stage
from middleware import Generate


def count_words(sample: Sample) -> None:
    sample.metadata["words"] = len(sample.response.split())


def tag_source(sample: Sample, *, rollout_id: int, evaluation: bool) -> None:
    """Keyword parameters are filled from what the pipeline offers: these two, `args`, `stage` and `sampling`."""
    if not evaluation:
        sample.metadata["rollout"] = rollout_id


async def test_the_stages() -> None:
    sample = Sample(response="two words")
    count_words(sample)  # call it,
    sample = await run_stage(tag_source, sample, rollout_id=7)  # or run it as a pipeline would
    assert sample.metadata == {"words": 2, "rollout": 7}
    print(dict(sorted(sample.metadata.items())))


async def main() -> None:
    await test_the_stages()
    engine = SimulatedEngine(lambda sample: Completion("it is four", tokens=[1, 2, 3], log_probs=[-0.1] * 3))
    stages = [Generate(engine), tag_source, count_words]
    async with Pipeline(Prompts(["2+2="], group_size=1), stages, BatchSpec(groups=1)) as pipeline:
        async for batch in pipeline.rollouts(stop=1):
            print("training:", batch.samples[0].metadata)
        report = await pipeline.evaluate(Prompts(["3+3="], group_size=1), rollout_id=0)
        print("evaluation:", report.groups[0].samples[0].metadata)


if __name__ == "__main__":
    anyio.run(main)
