"""Fan-out: one execution becomes several training samples, here one per turn of its dialogue.

The `list[...]` in the annotation says that the stage fans out. Its children share `rollout_id`, stages behind it run
for each of them, and the reward of the execution is that of its last child. Prints:

    group 0: 2 executions, 4 samples, rewards [1.0, 1.0]
    sample 2 of execution 0: "is it 2+2?", loss on 10 of 16 tokens
    sample 4 of execution 0: "4", loss on 1 of 16 tokens
"""

from __future__ import annotations

import anyio

from backends.simulated import SimulatedEngine
from eventbus import BatchSpec, Completion, LossMask, Pipeline, Prompts, Sample
from middleware import Generate

DIALOGUE = "is it 2+2?|yes|4"


def split_turns(sample: Sample) -> list[Sample]:
    """A copy for each turn of the model, with the loss on that turn alone."""
    children = []
    begin = 0
    for number, turn in enumerate(sample.response.split("|")):
        if number % 2 == 0:  # the others are the user's
            child = sample.copy()
            mask = [0] * sample.response_length
            mask[begin : begin + len(turn)] = [1] * len(turn)
            child.loss_mask = LossMask(mask)
            child.metadata["turn"] = turn
            children.append(child)
        begin += len(turn) + 1
    return children


def score(sample: Sample) -> None:
    sample.reward = float(sample.response.endswith(sample.label))


def answer(sample: Sample) -> Completion:
    return Completion(DIALOGUE, tokens=list(DIALOGUE.encode()), log_probs=[-0.1] * len(DIALOGUE))


async def main() -> None:
    prompts = Prompts([{"prompt": "a sum", "label": "4"}], group_size=2)
    stages = [Generate(SimulatedEngine(answer)), split_turns, score]
    async with Pipeline(prompts, stages, BatchSpec(groups=1)) as pipeline:
        async for batch in pipeline.rollouts(stop=1):
            group = batch.groups[0]
            print(f"group 0: {len(group)} executions, {len(group.samples)} samples, rewards {group.rewards()}")
            for sample in group.executions[0]:
                where = f"sample {sample.index} of execution {sample.rollout_id}"
                turn, length = sample.metadata["turn"], sample.response_length
                print(f'{where}: "{turn}", loss on {sample.loss_tokens} of {length} tokens')


if __name__ == "__main__":
    anyio.run(main)
