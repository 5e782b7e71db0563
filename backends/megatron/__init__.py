"""Training with megatron-core, and what it needs around it.

    deep_ep          DeepEP's buffers stay out of torch_memory_saver
    plan             from sample lengths to steps, ranks and micro-batches
    packing          samples of a micro-batch as tensors
    losses           policy losses, KL, aggregation
    objective        a policy loss by its options
    log_probs        out of logits that lie on several ranks
    trainer          from a batch to steps of the optimizer
    config           configurations that compute something else are refused
    buffers          DeepEP's buffer before the first dispatch
    chunks           a model's chunks, without their wrappers
    stream           one rank owns the stream, every rank trains its part
    weights          from the model to the engine, by the names of Hugging Face
    stateless_adam   Adam that keeps nothing between steps

Needs `rolloutbus[megatron]`; the guard and the plan need nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from backends.megatron.deep_ep import guard_deep_ep
from backends.megatron.plan import ParallelLayout, PlanError, plan_microbatches
from eventbus.imports import optional_dependency

if TYPE_CHECKING:
    from backends.megatron.config import ConfigError
    from backends.megatron.objective import Objective, Terms
    from backends.megatron.packing import MicroBatch, StepTotals, pack, step_totals
    from backends.megatron.shard import Shard
    from backends.megatron.stateless_adam import StatelessAdam
    from backends.megatron.stream import RankFailed, ShardedStream
    from backends.megatron.trainer import MegatronTrainer
    from backends.megatron.weights import (
        Broadcast,
        Checkpoint,
        SharedMemory,
        llama_names,
        named_weights,
        send_weights,
    )

__all__ = [
    "Broadcast",
    "Checkpoint",
    "ConfigError",
    "MegatronTrainer",
    "MicroBatch",
    "Objective",
    "ParallelLayout",
    "PlanError",
    "RankFailed",
    "Shard",
    "ShardedStream",
    "SharedMemory",
    "StatelessAdam",
    "StepTotals",
    "Terms",
    "guard_deep_ep",
    "llama_names",
    "named_weights",
    "pack",
    "plan_microbatches",
    "send_weights",
    "step_totals",
]

_WITH_TORCH = {
    "Broadcast": "weights",
    "Checkpoint": "weights",
    "ConfigError": "config",
    "MegatronTrainer": "trainer",
    "MicroBatch": "packing",
    "Objective": "objective",
    "RankFailed": "stream",
    "Shard": "shard",
    "ShardedStream": "stream",
    "SharedMemory": "weights",
    "StatelessAdam": "stateless_adam",
    "StepTotals": "packing",
    "Terms": "objective",
    "llama_names": "weights",
    "named_weights": "weights",
    "pack": "packing",
    "send_weights": "weights",
    "step_totals": "packing",
}


def __getattr__(name: str) -> Any:
    # The guard belongs before the first import of torch's users, and `rolloutbus doctor` runs it without torch.
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with optional_dependency():
        return getattr(import_module(f"backends.megatron.{_WITH_TORCH[name]}"), name)
