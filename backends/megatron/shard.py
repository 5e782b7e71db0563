"""`Shard`: what one data-parallel rank trains of a batch.

All that a rank needs for its part of every step, and nothing of the others' but counts. Ranks of one data-parallel rank
(tensor, pipeline and context parallelism) have equal shards.
"""

from __future__ import annotations

import msgspec

from backends.megatron.packing import StepTotals
from eventbus.group import Summary, TrainResult, acknowledge
from eventbus.sample import Sample

__all__ = ["Shard", "ShardStep"]


class ShardStep(msgspec.Struct):
    """One rank's part of one step of the optimizer."""

    micro_batches: list[list[Sample]]
    """As many as every other rank has, in the order in which they run."""
    totals: StepTotals
    """Of the whole step, over all ranks."""


class Shard(msgspec.Struct, dict=True):
    """One rank's part of a batch."""

    rollout_id: int
    steps: list[ShardStep]
    summary: Summary | None = None
    """Of the whole batch."""

    @property
    def samples(self) -> list[Sample]:
        """All samples of this rank, in the order in which they are trained."""
        return [sample for step in self.steps for part in step.micro_batches for sample in part]

    def trained(self, result: TrainResult | None = None) -> None:
        """As `Batch.trained`, on all ranks alike; what it tells the pipeline it tells it on the rank that owns the
        stream. Asking for the next shard does the same without metrics.

        :raises RuntimeError: it was acknowledged before, or it did not come out of a `ShardedStream`.
        :raises TypeError: the result is no `TrainResult`.
        """
        acknowledge(self, result, f"shard {self.rollout_id}", "a ShardedStream")
