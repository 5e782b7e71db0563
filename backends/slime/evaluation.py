"""slime's evaluation: every sample of its data sets once, through the same stages as in training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import cache
from itertools import islice
from typing import Any

import msgspec

from backends.slime.options import eval_sampling, first, option, recorders
from backends.slime.samples import RolloutFnEvalOutput, of_slime, to_slime
from backends.slime.stages import SlimePrompts, SlimeRollout, by_index
from eventbus.batching import BatchSpec
from eventbus.pipeline import Pipeline
from eventbus.prompts import JsonlPrompts, Prompts
from middleware.hooks import side_by_side

__all__ = ["evaluate"]


async def evaluate(args: Any, rollout_id: int) -> Any:
    """slime's `RolloutFnEvalOutput` for `args.eval_datasets`, which go on side by side.

    :raises ValueError: `args.group_rm` is set.
    """
    if option(args, "group_rm"):
        raise ValueError("group_rm rewards whole groups, and an evaluation has none")
    datasets = list(option(args, "eval_datasets") or ())
    custom = [option(each, "custom_generate_function_path") for each in (args, *datasets)]
    rollout = SlimeRollout(args, rollout_id, fans_out=any(custom))
    pipeline = Pipeline(
        Prompts([], 1),  # it trains nothing
        rollout.sample_stages(),
        BatchSpec(groups=1),
        observers=recorders(args, rollout_id, evaluation=True),
        args=args,
    )
    data: dict[str, dict[str, Any]] = {each.name: {} for each in datasets}
    metrics: dict[str, Any] = {}

    async def run(dataset: Any) -> None:
        size = first(option(dataset, "n_samples_per_eval_prompt"), option(args, "n_samples_per_eval_prompt"), 1)
        prompts = SlimePrompts(rollout, _numbered(dataset, await _samples(args, dataset), size), size)
        report = await pipeline.evaluate(prompts, rollout_id=rollout_id, sampling=eval_sampling(args, dataset))
        samples = sorted((to_slime(sample) for group in report.groups for sample in group.samples), key=by_index)
        key = option(args, "eval_reward_key") or option(args, "reward_key")
        data[dataset.name] |= {
            "rewards": [sample.reward[key] if key else sample.reward for sample in samples],
            "truncated": [sample.status.value == "truncated" for sample in samples],
            "samples": samples,
        }
        metrics[f"eval/{dataset.name}/rolloutbus/failed_samples"] = report.summary.failed_samples

    async with AsyncExitStack() as opened:
        if rollout.engine is not None:
            await rollout.engine.open(opened)
        await opened.enter_async_context(pipeline)
        await side_by_side(run, datasets)
    return of_slime("rollout.base_types", "RolloutFnEvalOutput", RolloutFnEvalOutput)(data=data, metrics=metrics)


def _numbered(dataset: Any, samples: list[Any], size: int) -> Callable[[int], list[list[Any]]]:
    """Gives each sample `size` times; they are numbered over the data set."""
    rest = iter(enumerate(samples))

    def one(sample: Any, index: int) -> Any:
        twin = copy.copy(sample)
        twin.index, twin.group_index = index, None
        inject = option(dataset, "inject_metadata")
        twin.metadata = dict(twin.metadata or {}) if inject is None else inject(twin.metadata)
        twin.custom_rm_path = option(dataset, "custom_rm_path")
        twin.generate_function_path = option(dataset, "custom_generate_function_path")
        return twin

    def get(count: int) -> list[list[Any]]:
        return [[one(sample, at * size + i) for i in range(size)] for at, sample in islice(rest, count)]

    return get


async def _samples(args: Any, dataset: Any) -> list[Any]:
    """The samples of a data set, read by slime where it is importable, else as JSON lines."""
    kind = of_slime("utils.data", "Dataset")
    key = first(option(dataset, "input_key"), option(args, "input_key"), "prompt")
    label = first(option(dataset, "label_key"), option(args, "label_key"), "label")
    if kind is None:
        lines = JsonlPrompts(dataset.path, 1, prompt_key=key, label_key=label, epochs=1)
        samples: list[Any] = []
        while some := await lines.take(1024):
            samples += map(to_slime, some)
        return samples
    options = {"max_length": option(args, "eval_max_prompt_len"), "prompt_key": key, "label_key": label}
    for name in ("metadata_key", "tool_key", "multimodal_keys", "apply_chat_template", "apply_chat_template_kwargs"):
        options[name] = first(option(dataset, name), option(args, name))
    return _read(kind, args.hf_checkpoint, str(dataset.path), msgspec.json.encode(options))


@cache
def _read(kind: Callable[..., Any], checkpoint: str, path: str, options: bytes) -> list[Any]:
    """Once per data set: rendering and measuring the prompts takes long."""
    tokenizer = of_slime("utils.processing_utils", "load_tokenizer")(checkpoint, trust_remote_code=True)
    processor = of_slime("utils.processing_utils", "load_processor")(checkpoint, trust_remote_code=True)
    return list(kind(path, tokenizer=tokenizer, processor=processor, **msgspec.json.decode(options)).samples)
