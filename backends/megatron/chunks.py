"""Model chunks: what megatron-core's `get_model` returns, one per virtual pipeline stage of this rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["device_of", "unwrapped"]


def unwrapped(chunk: torch.nn.Module) -> Any:
    """The model inside of `DistributedDataParallel` and the like."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def device_of(model_chunks: Sequence[torch.nn.Module]) -> torch.device:
    """:raises ValueError: they hold no parameters."""
    device = next((parameter.device for chunk in model_chunks for parameter in chunk.parameters()), None)
    if device is None:
        raise ValueError("the model chunks hold no parameters: give the list of them that MegatronTrainer has")
    return device
