"""A pipeline inside a trio program: the next rollout is generated while the trainer works on the batch before it.

A rollout takes 2 s and a training step too, and `ahead=1` lets them overlap: 8 s for three steps, not 12. The clock is
trio's own mock clock, so it takes no time at all. Needs `rolloutbus[trio]`. Prints:

    at 2 s: rollout 0, by weights {'0'}
    at 4 s: rollout 1, by weights {'0'}
    at 6 s: rollout 2, by weights {'1'}
    done at 8 s
"""

from __future__ import annotations

import itertools

import trio
import trio.testing

from backends.simulated import SimulatedEngine
from eventbus import Batch, BatchSpec, Completion, Pipeline, Prompts, TrainResult
from middleware import Generate

engine = SimulatedEngine(lambda sample: Completion("4", tokens=[52], log_probs=[-0.1]), delay=2.0)


async def train(batch: Batch) -> TrainResult:
    await trio.sleep(2.0)
    version = str(batch.rollout_id + 1)
    await engine.update_weights(version)
    return TrainResult(metrics={"loss": 0.1}, weight_version=version)


async def main() -> None:
    await engine.update_weights("0")
    pipeline = Pipeline(
        prompts=Prompts((f"{number}+2=" for number in itertools.count()), group_size=4),
        stages=[Generate(engine)],
        batch=BatchSpec(groups=2),
    )
    async with pipeline:
        async for batch in pipeline.rollouts(stop=3, ahead=1):
            versions = {span.version for sample in batch.samples for span in sample.weight_versions}
            print(f"at {trio.current_time():.0f} s: rollout {batch.rollout_id}, by weights {versions}")
            batch.trained(await train(batch))
    print(f"done at {trio.current_time():.0f} s")


if __name__ == "__main__":
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
