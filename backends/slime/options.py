"""What slime's `args` say. What is read beside slime's own options, all of it optional:

    rolloutbus_engine    import path of `(args) -> engine`, or that function; default: SGLang behind slime's router
    rolloutbus_batch     fields of `BatchSpec` that slime has no option for: max_rounds, max_failures, surplus, ...
    rolloutbus_fallback  as in `DynamicFilter`
    rolloutbus_log       file of a `Recorder`, with `{rollout_id}` in its name

An entry in slime's `--custom-config-path` sets each of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from eventbus.batching import BatchSpec
from middleware.recorder import Recorder

__all__ = ["LeftOver", "batch_spec", "concurrency", "eval_sampling", "first", "option", "recorders", "sampling"]

LeftOver: TypeAlias = Literal["restart", "recycle", "cancel"]


def option(owner: Any, name: str) -> Any:
    """None where this version of slime has no such option."""
    return getattr(owner, name, None)


def first(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)


def batch_spec(args: Any) -> tuple[BatchSpec, LeftOver]:
    """How the batch is filled, and what becomes of unfinished groups: slime forgets them but for partial rollouts.

    :raises ValueError: a number is out of its range.
    :raises TypeError: `rolloutbus_batch` has a field that `BatchSpec` lacks.
    """
    fields: dict[str, Any] = {
        "groups": args.rollout_batch_size,
        "over_sampling": option(args, "over_sampling_batch_size"),
        "unfinished": "recycle" if option(args, "partial_rollout") else "cancel",
    }
    spec = BatchSpec(**fields | (option(args, "rolloutbus_batch") or {}))
    # They wait in slime's data source, where its buffer filter sees them, and not in the pipeline.
    return msgspec.structs.replace(spec, unfinished="cancel"), spec.unfinished


def sampling(args: Any) -> dict[str, Any]:
    """Sampling parameters in training."""
    return {
        "temperature": option(args, "rollout_temperature"),
        "top_p": option(args, "rollout_top_p"),
        "top_k": option(args, "rollout_top_k"),
        "max_new_tokens": option(args, "rollout_max_response_len"),
        "stop": option(args, "rollout_stop"),
        "stop_token_ids": option(args, "rollout_stop_token_ids"),
        "skip_special_tokens": option(args, "rollout_skip_special_tokens"),
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def eval_sampling(args: Any, dataset: Any) -> dict[str, Any]:
    """What a data set changes in the sampling parameters."""
    names = {name: name for name in (*sampling(args), "repetition_penalty", "min_new_tokens")}
    names["max_new_tokens"] = "max_response_len"
    changes = {name: value for name, theirs in names.items() if (value := option(dataset, theirs)) is not None}
    if (least := option(args, "eval_min_new_tokens")) is not None:
        changes.setdefault("min_new_tokens", least)
    return changes


def concurrency(args: Any) -> int:
    """Samples that are generated at the same time, on all engines together; 0: any number."""
    engines = option(args, "rollout_num_engines")
    if engines is None:
        gpus, per_engine = option(args, "rollout_num_gpus") or 0, option(args, "rollout_num_gpus_per_engine") or 1
        engines = max(1, gpus // per_engine)
    return int(engines) * (option(args, "sglang_server_concurrency") or 0)


def recorders(args: Any, rollout_id: int, *, evaluation: bool) -> list[Any]:
    """The log of a rollout, if there is to be one; a file that cannot be written does not end the training."""
    template = option(args, "rolloutbus_log")
    if not template:
        return []
    path = Path(template.format(rollout_id=f"eval_{rollout_id}" if evaluation else rollout_id))
    path.parent.mkdir(parents=True, exist_ok=True)
    return [Recorder(path, overwrite=True, on_error="continue")]
