"""A tool loop as a wrapper: `call_next` runs what comes after it, here `Generate`, once more for every tool call.

What the tool says is appended to the response and masked out of the loss. `max_new_tokens` is the budget of the whole
response, tool results included. Everything between this stage and the next fan-out runs for each turn, so a reward that
costs belongs in a loop of your own, as in agent.py. Prints:

    (7*8) -> 56, so the answer is 56
    trained on: (7*8), so the answer is 56
"""

from __future__ import annotations

import re

import anyio

from backends.simulated import SimulatedEngine
from eventbus import BatchSpec, CallNext, Completion, Pipeline, Prompts, Sample, SampleStatus
from middleware import Generate


async def use_calculator(sample: Sample, call_next: CallNext) -> Sample:
    for _ in range(4):
        sample = await call_next(sample)
        call = re.search(r"\((\d+)\*(\d+)\)$", sample.response)
        if call is None or sample.status is not SampleStatus.COMPLETED:
            break
        result = f" -> {int(call[1]) * int(call[2])}"
        sample.append_observation(result, tokenize(result))  # Generate goes on from here
    return sample


def tokenize(text: str) -> list[int]:
    """With a real model: tokenizer.encode(text, add_special_tokens=False)."""
    return list(text.encode())


def answer(sample: Sample) -> Completion:
    """Calls the tool, then reads its result. The simulated engine wants the whole, what is there already included."""
    result = re.search(r"-> (\d+)$", sample.response)
    text = f"{sample.response}, so the answer is {result[1]}" if result else "(7*8)"
    return Completion(text, tokens=tokenize(text), log_probs=[-0.1] * len(text))


async def main() -> None:
    stages = [use_calculator, Generate(SimulatedEngine(answer), sampling={"max_new_tokens": 64})]
    async with Pipeline(Prompts(["7*8="], group_size=1), stages, BatchSpec(groups=1)) as pipeline:
        async for batch in pipeline.rollouts(stop=1):
            sample = batch.samples[0]
            print(sample.response)
            mask = sample.loss_mask or ()
            learned = bytes(token for token, counts in zip(sample.tokens, mask, strict=True) if counts)
            print("trained on:", learned.decode())


if __name__ == "__main__":
    anyio.run(main)
