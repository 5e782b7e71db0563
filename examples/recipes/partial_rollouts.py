"""Partial rollouts: what is under way when the batch is full goes on in the next rollout, with the tokens it has.

More groups are asked for than a batch needs (`over_sampling`), so nobody waits for the slowest. `unfinished="recycle"`
aborts the rest at the engine and keeps its tokens; `mask_offpolicy` takes those of older weights out of the loss. The
clock is virtual. Prints:

    rollout 0 at 8 s: groups [0, 1], 2 recycled
    rollout 1 at 10 s: groups [2, 3], 2 recycled
      sample 2: tokens 0 to 8 by weights 0, tokens 8 to 10 by weights 1; loss on 2 of 10
      sample 3: tokens 0 to 8 by weights 0, tokens 8 to 10 by weights 1; loss on 2 of 10
"""

from __future__ import annotations

import itertools

import anyio

from backends.simulated import SimulatedEngine
from eventbus import Batch, BatchSpec, Completion, Pipeline, Prompts, Sample
from eventbus.testing import virtual_time
from middleware import Generate, mask_offpolicy


def seconds(sample: Sample) -> float:
    """For the tokens that it does not have yet. The prompts 2 and 3 are slow."""
    return (10 - sample.response_length) * (1.0 if sample.group_index in (2, 3) else 0.8)


engine = SimulatedEngine(lambda sample: Completion("x" * 10, tokens=range(10), log_probs=[-0.1] * 10), delay=seconds)


async def train(batch: Batch) -> None:
    await engine.update_weights(str(batch.rollout_id + 1))


def spans(sample: Sample) -> str:
    return ", ".join(f"tokens {span.start} to {span.end} by weights {span.version}" for span in sample.weight_versions)


async def main() -> None:
    await engine.update_weights("0")
    pipeline = Pipeline(
        prompts=Prompts((f"prompt {number}" for number in itertools.count()), group_size=1),
        stages=[Generate(engine, sampling={"max_new_tokens": 10}), mask_offpolicy],
        batch=BatchSpec(groups=2, over_sampling=4, unfinished="recycle"),
    )
    async with pipeline:
        async for batch in pipeline.rollouts(stop=2):
            await train(batch)
            groups = [group.index for group in batch.groups]
            at = f"rollout {batch.rollout_id} at {anyio.current_time():.0f} s"
            print(f"{at}: groups {groups}, {batch.summary.recycled} recycled")
            for sample in batch.samples:
                if len(sample.weight_versions) > 1:
                    tokens = f"loss on {sample.loss_tokens} of {sample.response_length}"
                    print(f"  sample {sample.index}: {spans(sample)}; {tokens}")


if __name__ == "__main__":
    anyio.run(main, **virtual_time("asyncio"))
