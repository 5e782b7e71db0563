"""verl takes the training steps: `VerlTrainer(worker.train_mini_batch)` trains the batches of a pipeline.

`to_verl` turns a batch into verl's `DataProto`, for its loss and for what else of verl works on one. Needs `verl>=0.9`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import anyio.to_thread
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from verl import DataProto
from verl.utils import tensordict_utils
from verl.workers.utils.padding import left_right_2_no_padding

from eventbus import Batch, TrainResult

__all__ = ["VerlTrainer", "to_verl"]


class VerlTrainer:
    """A trainer for the batches of a pipeline. verl's steps are taken in a thread, and the event loop goes on.

    :param update: takes verl's batch and gives its metrics: `train_mini_batch` of a `TrainingWorker`, `update_actor`
        of a `RayWorkerGroup`.
    :param publish: hands the new weights to the engine, under the version that it is given.
    :param mini_batch: samples in one step of the optimizer; None: all of a batch.
    :param settings: what else travels with verl's batch: `temperature` of the rollouts, `epochs`, `seed`, ...
    """

    def __init__(
        self,
        update: Callable[[Any], Any],
        publish: Callable[[str], Awaitable[None]] | None = None,
        mini_batch: int | None = None,
        **settings: Any,
    ) -> None:
        self.update = update
        self.publish = publish
        self.mini_batch = mini_batch
        self.settings = {"temperature": 1.0} | settings

    async def train(self, batch: Batch) -> TrainResult:
        """:raises ValueError: as `to_verl`."""
        data = left_right_2_no_padding(to_verl(batch).to_tensordict())
        size = self.mini_batch or len(data)
        tensordict_utils.assign_non_tensor(data, mini_batch_size=size, global_batch_size=size, **self.settings)
        output = await anyio.to_thread.run_sync(self.update, data)
        metrics = {name: float(np.mean(value)) for name, value in tensordict_utils.get(output, "metrics").items()}
        if self.publish is None:
            return TrainResult(metrics)
        version = str(batch.rollout_id + 1)
        await self.publish(version)
        return TrainResult(metrics, version)


def to_verl(batch: Batch) -> DataProto:
    """A row per sample: prompts padded on the left to the longest, responses on the right.

    The advantages are those that `middleware.GroupAdvantage` has written; samples of one group share a `uid`.

    :raises ValueError: a sample lacks what the loss reads, or no token of the batch counts in it.
    """
    samples = batch.samples
    for sample in samples:
        if sample.train_metadata is None or "advantage" not in sample.train_metadata:
            raise ValueError(f"sample {sample.index}: it has no advantage; add the stage middleware.GroupAdvantage")
        if sample.rollout_log_probs is None:
            raise ValueError(f"sample {sample.index}: it has no rollout_log_probs; the engine has to give them")
        if not sample.prompt_length:
            raise ValueError(f"sample {sample.index}: it has no prompt tokens; add the stage middleware.Tokenize")
    if not any(sample.loss_tokens for sample in samples):
        raise ValueError(f"batch {batch.rollout_id}: no token of its {len(samples)} samples counts in the loss")
    prompts = _padded((s.tokens[: s.prompt_length] for s in samples), "left")
    responses = _padded((s.tokens[s.prompt_length :] for s in samples), "right")
    masks = [[1] * s.response_length if s.loss_mask is None else s.loss_mask for s in samples]
    mask = _padded(masks, "right") * torch.tensor([[not s.remove_sample] for s in samples])
    advantages = torch.tensor([[float((s.train_metadata or {})["advantage"])] for s in samples])
    attention = torch.cat(
        (
            _padded(([1] * s.prompt_length for s in samples), "left"),
            _padded(([1] * s.response_length for s in samples), "right"),
        ),
        dim=1,
    )
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat((prompts, responses), dim=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": mask,
        "old_log_probs": _padded((s.rollout_log_probs or () for s in samples), "right", torch.float32),
        "advantages": advantages * mask,
    }
    return DataProto.from_dict(tensors, {"uid": [str(group.index) for group in batch.groups for _ in group.samples]})


def _padded(rows: Iterable[Sequence[float]], side: str, kind: torch.dtype = torch.int64) -> Tensor:
    return pad_sequence([torch.tensor(list(row), dtype=kind) for row in rows], batch_first=True, padding_side=side)
