"""Routing replay: a token goes to the experts that the engine's routers chose for it (R3, arXiv 2510.11370).

The routers of the engine and of the trainer have the same weights and choose differently for some tokens, since their
arithmetic differs, and a token that goes to other experts gets other log-probs. With the engine's choices,
`Sample.rollout_routed_experts`, only the scores of the experts are the trainer's own, with their gradient.

megatron-core asks for the choice at one place: the routers of a model that was built with
`moe_enable_routing_replay=True` have a `RouterReplay`, whose `get_replay_topk` stands for the top-k. `_Follower` takes
its place, since megatron-core's own keeps every record to the end of the step, whether its layer is computed again or
not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from backends.megatron.chunks import unwrapped
from backends.megatron.config import ConfigError
from backends.megatron.packing import BatchError, MicroBatch, check_experts
from eventbus.sample import Sample

__all__ = ["Records", "RoutingReplay"]

Records: TypeAlias = Mapping[int, Tensor]
"""Of a micro-batch, by layer: [tokens of this rank, experts per token], int32, in the order of the routers."""


class RoutingReplay:
    """The routers of these chunks. A collective over the pipeline, where the model's config asks for replay.

    :param tp: tensor-parallel ranks that share a sequence (sequence parallelism); this is number `tp_rank` of them.
    :raises ConfigError: the model was built without it.
    """

    def __init__(self, chunks: Sequence[Any], config: Any, *, tp: int, tp_rank: int, pp_group: Any) -> None:
        self.on: bool = bool(config.num_moe_experts) and getattr(config, "moe_enable_routing_replay", False)
        self._config = config
        self._tp, self._tp_rank = tp, tp_rank
        self._followers: dict[Any, list[_Follower]] = {}
        self._layers: list[int] = []
        """With experts, in the whole model."""
        if self.on:
            self._followers = {chunk: _followers(chunk) for chunk in chunks}
            every: list[Any] = [None] * dist.get_world_size(pp_group)
            dist.all_gather_object(every, [follower.layer for follower in self._here()], group=pp_group)
            self._layers = sorted({layer for layers in every for layer in layers})

    def check(self, sample: Sample) -> None:
        """Whether a sample's record fits the model.

        :raises BatchError: it does not, or it names what is no expert of it.
        """
        name = f"sample {sample.index}: rollout_routed_experts"
        records = check_experts(sample)
        _, layers, chosen = records.shape
        config = self._config
        if layers not in (config.num_layers, len(self._layers)) or chosen != config.moe_router_topk:
            raise BatchError(
                f"{name} has {chosen} experts in {layers} layers for each token; the model has "
                f"{config.moe_router_topk} in {config.num_layers} layers, of which {len(self._layers)} have experts. "
                "Is this the model that the engine runs?"
            )
        records = records if layers == len(self._layers) else records[:, self._layers]
        low, high = records.aminmax() if records.numel() else (0, 0)
        if low < 0 or high >= config.num_moe_experts:
            raise BatchError(
                f"{name} names expert {int(low if low < 0 else high)}; a layer of the model has 0 to "
                f"{config.num_moe_experts - 1}"
            )
        ordered = records.sort(-1).values
        same = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        if same.any():
            token, layer = same.nonzero()[0].tolist()
            raise BatchError(
                f"{name} names an expert twice for token {token} in layer {self._layers[layer]}: "
                f"{records[token, layer].tolist()}. The engine did not record that token"
            )

    def records(self, batch: MicroBatch) -> Records | None:
        """What the routers of this rank are to follow: of its own layers, and with sequence parallelism of its own part
        of the tokens. On the CPU, in pinned memory where there is a GPU, which holds each as long as it is used.
        """
        experts = batch.routed_experts
        if not self.on or experts is None:
            return None
        sequences, length = batch.tokens.shape
        rows = experts.view(sequences, length, *experts.shape[1:]).transpose(0, 1).flatten(0, 1)
        rows = rows.chunk(self._tp)[self._tp_rank]
        places = range(rows.shape[1]) if rows.shape[1] == self._config.num_layers else self._layers
        found = {follower.layer: rows[:, places.index(follower.layer)].contiguous() for follower in self._here()}
        pinned = torch.cuda.is_available()
        return {layer: record.pin_memory() if pinned else record for layer, record in found.items()}

    @contextmanager
    def replayed(self, chunk: Any, records: Records | None) -> Iterator[None]:
        """While `chunk` runs forward over their micro-batch. What is computed again in the backward pass follows the
        same records: the micro-batches of a chunk come in the same order there.
        """
        if records is None:
            yield
            return
        followers = self._followers.get(chunk, [])
        for follower in followers:
            follower.begin(records[follower.layer])
        try:
            yield
        finally:
            for follower in followers:
                follower.end()

    def clear(self) -> None:
        """After a step: let the records go."""
        for follower in self._here():
            follower.clear()

    def _here(self) -> list[_Follower]:
        return [follower for followers in self._followers.values() for follower in followers]


class _Follower:
    """In the place of a router's `RouterReplay`, which it asks where there is no record to follow."""

    def __init__(self, replay: Any, layer: int) -> None:
        self.layer = layer
        """Its number in the whole model, from 0."""
        self.again: deque[Tensor] = deque()
        """Records of the micro-batches for which it is computed again in the backward pass."""
        self._replay = replay
        self._record: Tensor | None = None
        """Of the micro-batch that runs forward."""
        self._graded = self._backward = False
        """Whether it runs, or ran, in a step; whether what is asked now belongs to the backward pass."""

    def begin(self, record: Tensor) -> None:
        self._record, self._graded, self._backward = record, torch.is_grad_enabled(), False

    def end(self) -> None:
        self._record, self._backward = None, self._graded

    def clear(self) -> None:
        self.again.clear()
        self._backward = False

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The scores of the experts that each token goes to, and their numbers.

        :raises RuntimeError: the model is shown other tokens than the micro-batch has, or computes a layer again in
            another way than megatron-core does.
        """
        record = self._record
        if record is not None:
            if self._graded and not torch.is_grad_enabled():  # so it will be computed again
                self.again.append(record)
        elif self._backward:
            if not self.again:
                raise RuntimeError(
                    f"layer {self.layer} is computed again in the backward pass, but was not computed without gradient "
                    "before: routing replay goes together with megatron-core's own recomputation "
                    "(recompute_granularity), or another that computes without gradient first"
                )
            record = self.again.popleft()
        else:
            found: tuple[Tensor, Tensor] = self._replay.get_replay_topk(
                scores, topk, num_groups, group_topk, default_compute_topk
            )
            return found
        if len(record) != len(scores):
            raise RuntimeError(
                f"the router of layer {self.layer} is given {len(scores)} tokens, and the record has {len(record)}: "
                "with routing replay `forward` has to show the model the tokens of the micro-batch, and no others"
            )
        chosen = record.to(scores.device, non_blocking=True).long()
        return scores.gather(1, chosen), chosen


def _followers(chunk: Any) -> list[_Follower]:
    """Those of a chunk, put into its routers if they are not there."""
    found = []
    for module in unwrapped(chunk).modules():
        if not hasattr(module, "router_replay"):
            continue
        if module.router_replay is None:
            raise ConfigError(
                "moe_enable_routing_replay is set, but was not when the model was built, so its routers do not ask: "
                "set it in the TransformerConfig that the model is built from"
            )
        if not isinstance(module.router_replay, _Follower):
            module.router_replay = _Follower(module.router_replay, module.layer_number - 1)
        found.append(module.router_replay)
    return found
