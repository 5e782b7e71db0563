"""What it costs to call three trivial per-sample hooks, beside the way that slime calls them.

slime reads a hook's signature and filters its keywords for each sample; here that is done once. Both are given the same
import paths and the same nested lists of samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from statistics import median
from typing import Any

import anyio

from benchmarks.measure import Row, cpu_seconds, interleaved, micro, ratio_row
from benchmarks.pipeline import rollout_seconds
from benchmarks.streams import GROUP_SIZE, SAMPLES, generated, pipeline, reward
from eventbus.sample import Sample
from middleware.hooks import apply_sample_hooks

__all__ = ["rows"]


def in_place(args: Any, sample: Sample, *, rollout_id: int | None = None, evaluation: bool = False) -> None:
    return None


def returned(args: Any, sample: Sample, *, rollout_id: int | None = None) -> Sample:
    return sample


def anything(args: Any, sample: Sample, **context: Any) -> Sample:
    return sample


HOOKS = (in_place, returned, anything)
PATHS = [f"{__name__}:{hook.__name__}" for hook in HOOKS]


def rows() -> list[Row]:
    times = interleaved(
        {
            "per call": lambda: anyio.run(_nested, _signature_per_call),
            "apply_sample_hooks": lambda: anyio.run(_nested, _ours),
            "with hooks": lambda: anyio.run(rollout_seconds, pipeline([reward, *HOOKS])),
            "without": lambda: anyio.run(rollout_seconds, pipeline([reward])),
        }
    )
    peer, whole = times["per call"], times["with hooks"]
    added = median(mine - bare for mine, bare in zip(whole, times["without"], strict=True))
    return [
        ratio_row(
            "3 hooks, apply_sample_hooks / signature read per call", times["apply_sample_hooks"], peer, at_most=1 / 20
        ),
        Row(
            "3 hooks, what they add to a pipeline / signature read per call",
            f"{added / median(peer):.3g}x",
            measured=f"{micro([added])} against {micro(peer)}",
        ),
        ratio_row("a whole pipeline of 3 hooks / signature read per call", whole, peer),
    ]


async def _nested(apply: Any) -> float:
    """CPU seconds per sample."""
    flat = generated()
    samples = [flat[start : start + GROUP_SIZE] for start in range(0, SAMPLES, GROUP_SIZE)]
    coroutine = apply(samples)

    def run() -> None:
        try:
            coroutine.send(None)
        except StopIteration:
            return
        raise AssertionError("these hooks wait for nothing")

    return cpu_seconds(run) / SAMPLES


async def _ours(value: Any) -> Any:
    return await apply_sample_hooks(PATHS, value, rollout_id=7)


async def _signature_per_call(value: Any) -> Any:
    return await _hooked(PATHS, value, None, {"rollout_id": 7, "evaluation": False})


async def _hooked(paths: Sequence[str], value: Any, args: Any, context: dict[str, Any]) -> Any:
    """The algorithm of slime's hooks, written anew."""
    if isinstance(value, list):
        return [await _hooked(paths, item, args, context) for item in value]
    if not isinstance(value, Sample):
        raise TypeError(f"expected Sample, got {type(value).__name__}")
    for path in paths:
        hook = _loaded(path)
        parameters = inspect.signature(hook).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        keywords = context if takes_all else {name: item for name, item in context.items() if name in parameters}
        result = hook(args, value, **keywords)
        if inspect.isawaitable(result):
            result = await result
        if result is None:
            continue
        if not isinstance(result, Sample):
            raise TypeError(f"hook {path}: expected Sample or None, got {type(result).__name__}")
        value = result
    return value


@cache
def _loaded(path: str) -> Any:
    module, name = path.split(":")
    return getattr(import_module(module), name)
