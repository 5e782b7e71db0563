"""slime's rollout function, run by a pipeline of ours.

data_source.get_samples -> the stages of `SlimeRollout` -> RolloutFnTrainOutput
                        <- data_source.add_samples: what the next rollout is to go on with
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from backends.slime.evaluation import evaluate
from backends.slime.options import batch_spec, option, recorders
from backends.slime.samples import RolloutFnTrainOutput, of_slime
from backends.slime.stages import SlimePrompts, SlimeRollout
from eventbus.group import Summary
from eventbus.imports import load_object
from eventbus.pipeline import Pipeline

__all__ = ["generate_rollout", "generate_rollout_async"]


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """`--rollout-function-path backends.slime.generate_rollout`, and `--eval-function-path` too.

    Runs on the event loop on which slime runs its own, so that what its users keep there (sessions, semaphores) works.

    :returns: slime's `RolloutFnTrainOutput` or `RolloutFnEvalOutput`.
    :raises RolloutExhausted: `max_rounds` rounds did not fill the batch; says what was rejected and why.
    :raises ExceptionGroup: more samples failed than `max_failures` allows.
    :raises ContractError: a hook returned something that is no sample.
    :raises LoadError: an import path leads nowhere, or something is not installed.
    :raises AttributeError: `args` lacks an option that is needed.
    """
    run = of_slime("utils.async_utils", "run", asyncio.run)
    return run(generate_rollout_async(args, rollout_id, data_source, evaluation))


async def generate_rollout_async(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """`generate_rollout` for code that runs in an event loop."""
    if evaluation:
        return await evaluate(args, rollout_id)
    spec, unfinished = batch_spec(args)
    rollout = SlimeRollout(
        args,
        rollout_id,
        fans_out=bool(option(args, "custom_generate_function_path")),
        unfinished=unfinished,
        carries=spec.surplus == "carry",
    )
    pipeline = Pipeline(
        SlimePrompts(rollout, data_source.get_samples, args.n_samples_per_prompt),
        rollout.sample_stages() + rollout.group_stages(),
        spec,
        observers=[rollout, *recorders(args, rollout_id, evaluation=False)],
        args=args,
    )
    async with AsyncExitStack() as opened:
        if rollout.engine is not None:
            await rollout.engine.open(opened)
        await opened.enter_async_context(pipeline)
        batch = await anext(pipeline.rollouts(rollout_id, rollout_id + 1), None)
    if batch is None:
        raise ValueError(f"rollout {rollout_id}: the data source gave no samples")
    if left_over := rollout.left_over():
        data_source.add_samples(left_over)
    samples = rollout.to_slime(batch.groups)
    if path := option(args, "rollout_sample_filter_path"):
        load_object(path)(args, samples)
    if path := option(args, "rollout_all_samples_process_path"):
        # slime calls it with the function that gives samples, not with the source that has it.
        load_object(path)(args, rollout.to_slime(list(rollout.complete.values())), data_source.get_samples)
    output = of_slime("rollout.base_types", "RolloutFnTrainOutput", RolloutFnTrainOutput)
    return output(samples=samples, metrics=_metrics(batch.summary))


def _metrics(summary: Summary) -> dict[str, Any]:
    """slime's counts of what a filter dropped, by reason, and what slime does not count."""
    dropped = {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in summary.dropped.items()}
    names = ("rounds", "submitted", "kept_by_fallback", "fallback_share", "surplus", "cancelled", "failed_samples")
    return dropped | {f"rollout/rolloutbus/{name}": getattr(summary, name) for name in names}
