"""Rollouts on SGLang servers behind their router, with new weights while the next rollout is under way.

    python rollouts.py MODEL NEW_WEIGHTS URL [URL ...]

`make demo-sglang` starts two servers on the CPU, with a tiny model that babbles, and runs this.
"""

from __future__ import annotations

import os
import sys

import anyio

from backends.sglang import SGLangEngine, SGLangRouter
from eventbus import Batch, BatchSpec, Pipeline, Prompts, Sample, TrainResult
from middleware import DynamicFilter, Generate, GroupAdvantage, Recorder, Tokenize, reward_nonzero_std

QUESTIONS = [f"the quick brown fox jumps over {n} lazy dogs" for n in range(100)]
LOG = "sglang.mcap"


def score(sample: Sample) -> None:
    """1 for a response with a fox in it."""
    sample.reward = float("fox" in sample.response)


async def main(model: str, new_weights: str, workers: list[str]) -> None:
    router = SGLangRouter(workers=workers, python=os.environ.get("ROLLOUTBUS_SGLANG_PYTHON", sys.executable))
    engine = SGLangEngine(router=router)
    pipeline = Pipeline(
        prompts=Prompts(QUESTIONS, group_size=4),
        stages=[
            Tokenize(model),
            Generate(engine, {"temperature": 1.0, "max_new_tokens": 300, "ignore_eos": True}),
            score,
            DynamicFilter(reward_nonzero_std, fallback="last"),
            GroupAdvantage(),
        ],
        batch=BatchSpec(groups=4, over_sampling=6),
        observers=[Recorder(LOG)],
    )
    async with pipeline:
        async for batch in pipeline.rollouts(stop=4, ahead=1):
            await anyio.sleep(0.5)  # a trainer takes its step here; the next rollout goes on meanwhile
            version = str(batch.rollout_id + 1)
            checkpoint = new_weights if batch.rollout_id % 2 == 0 else model
            await engine.update_weights_from_disk(checkpoint, version, pause="in_place")
            batch.trained(TrainResult(metrics={"loss": 0.0}, weight_version=version))
            show(batch)


def show(batch: Batch) -> None:
    print(f"\n{batch.summary}")
    sample = max(batch.samples, key=lambda sample: len(sample.weight_versions))
    spans = ", ".join(f"{span.start} to {span.end} by version {span.version}" for span in sample.weight_versions)
    print(f"  sample {sample.index}, tokens {spans}", flush=True)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2], sys.argv[3:])
    print(f"\nThe rollouts are recorded in {LOG}. Ask it: rolloutbus log info {LOG}; rolloutbus log why {LOG} sample:0")
