"""A multi-turn agent with tools: a stage that asks the engine for each turn by itself.

Unlike with a wrapper (tool_loop.py), the stages behind it run once, when the agent is done. What the tools say is kept
out of the loss, and the time that they took is counted apart from generation. Prints:

    [lookup capital of France] Paris. [lookup mayor of Paris] error: nothing is known of that. It has a mayor.
    loss on 64 of 106 tokens, reward 0.0
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio

from backends.simulated import SimulatedEngine
from eventbus import BatchSpec, Completion, Pipeline, Prompts, Sample, SampleStatus
from middleware import Generate


async def lookup(what: str) -> str:
    return {"capital of France": "Paris."}.get(what, "error: nothing is known of that.")  # raising fails the sample


class Agent:
    def __init__(self, engine: Any, tools: Mapping[str, Callable[[str], Awaitable[str]]]) -> None:
        self.engine = engine  # under this name the pipeline opens and closes it
        self.generate = Generate(engine, sampling={"max_new_tokens": 200})  # of the whole response
        self.tools = tools

    async def __call__(self, sample: Sample, *, sampling: Mapping[str, Any]) -> None:
        for _ in range(8):
            await self.generate(sample, sampling=sampling)  # what `Pipeline.evaluate` changes
            call = re.search(r"\[(\w+) ([^]]*)\]$", sample.response)
            if sample.status is not SampleStatus.COMPLETED or call is None:
                return
            began = anyio.current_time()
            result = await self.tools[call[1]](call[2])
            sample.non_generation_time += anyio.current_time() - began
            sample.append_observation(f" {result} ", tokenize(f" {result} "))
        sample.status = SampleStatus.TRUNCATED


def tokenize(text: str) -> list[int]:
    """With a real model: tokenizer.encode(text, add_special_tokens=False)."""
    return list(text.encode())


def score(sample: Sample) -> None:
    sample.reward = float(sample.label in sample.response)


def answer(sample: Sample) -> Completion:
    """From a script. The simulated engine wants the whole response, what is there already included."""
    turns = ["[lookup capital of France]", "[lookup mayor of Paris]", "It has a mayor."]
    text = sample.response + turns[sample.response.count("]")]
    return Completion(text, tokens=tokenize(text), log_probs=[-0.1] * len(text))


async def main() -> None:
    stages = [Agent(SimulatedEngine(answer), {"lookup": lookup}), score]
    prompts = Prompts([{"prompt": "who is the mayor of Paris?", "label": "Hidalgo"}], group_size=1)
    async with Pipeline(prompts, stages, BatchSpec(groups=1)) as pipeline:
        async for batch in pipeline.rollouts(stop=1):
            sample = batch.samples[0]
            print(sample.response)
            print(f"loss on {sample.loss_tokens} of {sample.response_length} tokens, reward {sample.reward}")


if __name__ == "__main__":
    anyio.run(main)
