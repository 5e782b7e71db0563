"""Evaluation beside training: it begins with the weights of a step, and the next rollout goes on meanwhile.

It has its own prompts, sampling and counts; stages see `evaluation=True`. The clock is virtual. Prints:

    4 s: trained on rollout 0
    7 s: evaluation after rollout 0: reward 0.75, temperature 0.0
    8 s: trained on rollout 1
    12 s: trained on rollout 2
    15 s: evaluation after rollout 2: reward 0.75, temperature 0.0
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import anyio

from backends.simulated import SimulatedEngine
from eventbus import BatchSpec, Completion, Pipeline, Prompts, Sample, current_rollout
from eventbus.testing import virtual_time
from middleware import Generate


def answer(sample: Sample) -> Completion:
    return Completion("4" if (sample.index or 0) % 4 else "5", tokens=[52], log_probs=[-0.1])


def seconds(sample: Sample) -> float:
    return 3.0 if current_rollout().evaluation else 2.0


def note_sampling(sample: Sample, *, evaluation: bool, sampling: Mapping[str, Any]) -> None:
    """`sampling` is what the evaluation changes; in training it is empty."""
    if evaluation:
        sample.metadata["temperature"] = sampling["temperature"]


def score(sample: Sample) -> None:
    sample.reward = float(sample.response == "4")


async def evaluate(pipeline: Pipeline, rollout_id: int) -> None:
    questions = Prompts(["2+2=", "1+3="], group_size=4)  # anew each time: one pass over them
    report = await pipeline.evaluate(questions, rollout_id=rollout_id, sampling={"temperature": 0.0})
    temperature = report.groups[0].samples[0].metadata["temperature"]
    said = f"reward {report.mean_reward():.2f}, temperature {temperature}"
    print(f"{anyio.current_time():.0f} s: evaluation after rollout {rollout_id}: {said}")


async def main() -> None:
    engine = SimulatedEngine(answer, delay=seconds)
    pipeline = Pipeline(
        prompts=Prompts((f"{number}+2=" for number in itertools.count()), group_size=4),
        stages=[Generate(engine, sampling={"temperature": 1.0}), note_sampling, score],
        batch=BatchSpec(groups=2),
    )
    async with pipeline, anyio.create_task_group() as beside:
        async for batch in pipeline.rollouts(stop=3):
            await anyio.sleep(2.0)  # trainer.train(batch)
            print(f"{anyio.current_time():.0f} s: trained on rollout {batch.rollout_id}")
            if batch.rollout_id % 2 == 0:
                beside.start_soon(evaluate, pipeline, batch.rollout_id)


if __name__ == "__main__":
    anyio.run(main, **virtual_time("asyncio"))
