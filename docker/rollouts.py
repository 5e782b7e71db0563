"""Rollouts on engines behind a router that runs already: the service `pipeline` of compose.yml.

    python docker/rollouts.py MODEL ROUTER LOG

There is no trainer: the batches are shown, and the log has them. Put yours where they are shown.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyio

from backends.sglang import SGLangEngine
from eventbus import BatchSpec, JsonlPrompts, Pipeline
from examples.demo.stages import score
from middleware import DynamicFilter, Generate, GroupAdvantage, Recorder, Tokenize, reward_nonzero_std

PROMPTS = Path(__file__).parent.parent / "examples" / "demo" / "prompts.jsonl"


async def main(model: Any, router: str, log: str) -> None:
    pipeline = Pipeline(
        JsonlPrompts(PROMPTS, group_size=8, label_key="answer"),
        [
            Tokenize(model),
            Generate(SGLangEngine(router=router), {"temperature": 1.0, "max_new_tokens": 16}),
            score,
            DynamicFilter(reward_nonzero_std, fallback="last"),
            GroupAdvantage(),
        ],
        BatchSpec(groups=8, over_sampling=12),
        observers=[Recorder(log)],
    )
    async with pipeline:
        async for batch in pipeline.rollouts(stop=4):
            print(batch.summary, flush=True)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2], sys.argv[3])
