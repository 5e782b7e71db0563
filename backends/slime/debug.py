"""slime's debug data, `--save-debug-rollout-data`: written whole or not at all, read without running what is in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from backends.slime.samples import sample_type
from eventbus.imports import optional_dependency
from eventbus.log.format import LogError
from eventbus.log.inspect.slime import load_plain

__all__ = ["load_debug_rollout_data", "save_debug_rollout_data"]


def save_debug_rollout_data(path_template: str | None, data: Any, *, rollout_id: int, evaluation: bool) -> None:
    """Write the samples of a rollout where slime writes them; nothing where `path_template` is None.

    :param data: slime's samples, flat; of an evaluation its `RolloutFnEvalOutput.data`.
    :raises LoadError: torch is not installed.
    :raises OSError: the file cannot be written.
    :raises Exception: as `torch.save`, for an attribute that has no form in a file.
    """
    if path_template is None:
        return
    with optional_dependency():
        import torch
    path = Path(path_template.format(rollout_id=f"eval_{rollout_id}" if evaluation else rollout_id))
    samples = [sample for each in data.values() for sample in each["samples"]] if evaluation else data
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        torch.save({"rollout_id": rollout_id, "samples": [sample.to_dict() for sample in samples]}, unfinished)
        unfinished.replace(path)  # who reads it sees the old file or the new one
    finally:
        unfinished.unlink(missing_ok=True)


def load_debug_rollout_data(
    path_template: str, *, rollout_id: int | str, subsample_ratio: float | None = None
) -> list[Any]:
    """slime's samples from such a file: tensors, numpy arrays and plain values; other objects are refused.

    :param rollout_id: `"eval_7"` for an evaluation.
    :param subsample_ratio: only so much of them, from both ends alike.
    :raises LoadError: torch is not installed.
    :raises LogError: it cannot be read, is no such file, or holds objects that would have to be run.
    """
    path = path_template.format(rollout_id=rollout_id)
    content = load_plain(path)
    kind = sample_type()
    try:
        samples = [kind.from_dict(fields) for fields in content["samples"]]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise LogError(f"{path}: holds something that is no sample: {type(error).__name__}: {error}") from error
    if subsample_ratio is not None:
        number = int(len(samples) * subsample_ratio)
        head, tail = number // 2, number - number // 2
        samples = samples[:head] + samples[len(samples) - tail :]
    return samples
