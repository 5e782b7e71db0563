"""Training with megatron-core, and what it needs around it.

    deep_ep          DeepEP's buffers stay out of torch_memory_saver
    plan             from sample lengths to steps, ranks and micro-batches
    packing          samples of a micro-batch as tensors
    losses           policy losses, KL, aggregation
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
    from backends.megatron.packing import MicroBatch, StepTotals, pack, step_totals
    from backends.megatron.stateless_adam import StatelessAdam

__all__ = [
    "MicroBatch",
    "ParallelLayout",
    "PlanError",
    "StatelessAdam",
    "StepTotals",
    "guard_deep_ep",
    "pack",
    "plan_microbatches",
    "step_totals",
]

_WITH_TORCH = {
    "MicroBatch": "packing",
    "StatelessAdam": "stateless_adam",
    "StepTotals": "packing",
    "pack": "packing",
    "step_totals": "packing",
}


def __getattr__(name: str) -> Any:
    # The guard belongs before the first import of torch's users, and `rolloutbus doctor` runs it without torch.
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with optional_dependency():
        return getattr(import_module(f"backends.megatron.{_WITH_TORCH[name]}"), name)
