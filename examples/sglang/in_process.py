"""Rollouts on an SGLang engine of this process: no server, no port, no HTTP.

    python in_process.py MODEL
    python in_process.py MODEL '{"tp_size": 2, "mem_fraction_static": 0.6}'      further arguments of sglang.Engine

It runs in the environment that has SGLang, with `rolloutbus[sglang]` installed there.
"""

from __future__ import annotations

import json
import sys

import anyio
import sglang

from backends.sglang import SGLangEngine
from eventbus import BatchSpec, Pipeline, Prompts, Sample, TrainResult
from middleware import DynamicFilter, Generate, GroupAdvantage, Tokenize, reward_nonzero_std

QUESTIONS = [f"the quick brown fox jumps over {n} lazy dogs" for n in range(100)]


def score(sample: Sample) -> None:
    """1 for a response with a fox in it."""
    sample.reward = float("fox" in sample.response)


async def main(raw: sglang.Engine, model: str) -> None:
    engine = SGLangEngine(in_process=raw)
    pipeline = Pipeline(
        prompts=Prompts(QUESTIONS, group_size=4),
        stages=[
            Tokenize(model),
            Generate(engine, {"temperature": 1.0, "max_new_tokens": 100}),
            score,
            DynamicFilter(reward_nonzero_std, fallback="last"),
            GroupAdvantage(),
        ],
        batch=BatchSpec(groups=4, over_sampling=6),
    )
    async with pipeline:
        async for batch in pipeline.rollouts(stop=3):
            version = str(batch.rollout_id + 1)
            await engine.update_weights_from_disk(model, version)  # where a trainer has saved its checkpoint
            batch.trained(TrainResult(metrics={"loss": 0.0}, weight_version=version))
            versions = {span.version for sample in batch.samples for span in sample.weight_versions}
            print(f"{batch.summary}; weights {', '.join(sorted(versions))}", flush=True)


# The engine's workers are processes that import this file again: without the condition each would start an engine.
if __name__ == "__main__":
    options = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    raw = sglang.Engine(model_path=sys.argv[1], **options)  # before the loop runs: it takes a while
    try:
        anyio.run(main, raw, sys.argv[1])
    finally:
        raw.shutdown()  # kills every child process of this one
