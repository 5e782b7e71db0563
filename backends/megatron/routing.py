"""Routing replay: a token goes to the experts that the engine's routers chose for it (R3, arXiv 2510.11370).

The routers of the engine and of the trainer have the same weights and choose differently for some tokens, since their
arithmetic differs, and a token that goes to other experts gets other log-probs. With the engine's choices,
`Sample.rollout_routed_experts`, only the scores of the experts are the trainer's own, with their gradient.

megatron-core has the means: the routers of a model that was built with `moe_enable_routing_replay=True` hold a
`RouterReplay`. What it takes is one record per layer, set before each forward pass, and taken up again where a layer is
computed once more in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from backends.megatron.chunks import unwrapped
from backends.megatron.packing import BatchError, MicroBatch, as_tensor
from eventbus.imports import optional_dependency
from eventbus.sample import Sample

__all__ = ["RoutingReplay"]


class RoutingReplay:
    """The routers of these chunks; none where the model is built without `moe_enable_routing_replay`.

    :param tp: tensor-parallel ranks that share a sequence (sequence parallelism); this is number `tp_rank` of them.
    """

    def __init__(self, chunks: Sequence[Any], config: Any, *, tp: int, tp_rank: int) -> None:
        self.on: bool = bool(config.num_moe_experts) and getattr(config, "moe_enable_routing_replay", False)
        self._config = config
        self._tp, self._tp_rank = tp, tp_rank
        self._moe = _moe_layers(config) if self.on else []
        self._again = config.recompute_granularity == "full" or "moe" in (config.recompute_modules or ())
        """Layers with experts are computed once more in the backward pass."""
        self._routers: dict[Any, list[tuple[int, Any]]] = {}
        """By chunk: the number of the layer in the whole model, from 0, and its `RouterReplay`."""
        if self.on:
            for chunk in chunks:
                modules = unwrapped(chunk).modules()
                self._routers[chunk] = [
                    (module.layer_number - 1, module.router_replay)
                    for module in modules
                    if getattr(module, "router_replay", None) is not None
                ]
            with optional_dependency():
                self._action = import_module("megatron.core.transformer.moe.router_replay").RouterReplayAction

    def check(self, sample: Sample) -> None:
        """What `check_sample` does not know: the model.

        :raises BatchError: the record does not fit it, or names what is no expert of it.
        """
        name = f"sample {sample.index}: rollout_routed_experts"
        records = as_tensor(sample, "rollout_routed_experts", sample.rollout_routed_experts)
        if records.is_floating_point():
            raise BatchError(f"{name} is {records.dtype}, it must be the numbers of experts")
        _, layers, chosen = records.shape
        config = self._config
        if layers not in (config.num_layers, len(self._moe)) or chosen != config.moe_router_topk:
            raise BatchError(
                f"{name} has {chosen} experts in {layers} layers for each token; the model has "
                f"{config.moe_router_topk} in {config.num_layers} layers, of which {len(self._moe)} have experts. Is "
                "this the model that the engine runs?"
            )
        records = records[:, self._moe] if layers == config.num_layers else records
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
                f"{name} names an expert twice for token {token} in layer {self._moe[layer]}: "
                f"{records[token, layer].tolist()}. The engine did not record that token"
            )

    @contextmanager
    def replayed(self, chunk: Any, batch: MicroBatch) -> Iterator[None]:
        """While `chunk` runs forward over `batch`. What is computed again in the backward pass has the same record: the
        micro-batches of a chunk come in the same order there.
        """
        routers = self._routers.get(chunk, [])
        if batch.routed_experts is None or not routers:
            yield
            return
        rows = self._rows(batch, batch.routed_experts)
        whole = rows.shape[1] == self._config.num_layers
        try:
            for layer, router in routers:
                router.set_target_indices(rows[:, layer if whole else self._moe.index(layer)])
                router.set_router_replay_action(self._action.REPLAY_FORWARD)
            yield
        finally:
            for _, router in routers:
                if not (self._again and torch.is_grad_enabled()):
                    router.clear_indices()
                # Where nothing is to be computed again this fails if it is, rather than choose other experts.
                router.set_router_replay_action(self._action.REPLAY_BACKWARD if torch.is_grad_enabled() else None)

    def clear(self) -> None:
        """After a step: let the records go."""
        for _, router in chain.from_iterable(self._routers.values()):
            router.clear_indices()
            router.clear_router_replay_action()

    def _rows(self, batch: MicroBatch, experts: Tensor) -> Tensor:
        """int64 [tokens of this rank, layers, experts per token], in the order in which routers see tokens: position by
        position, of which sequence parallelism gives each rank a part."""
        sequences, length = batch.tokens.shape
        rows = experts.view(sequences, length, *experts.shape[1:]).transpose(0, 1).flatten(0, 1)
        return rows.chunk(self._tp)[self._tp_rank].long()


def _moe_layers(config: Any) -> list[int]:
    """The numbers of the layers that have experts, from 0."""
    every = config.moe_layer_freq
    pattern = every if isinstance(every, list) else [number % every == 0 for number in range(config.num_layers)]
    return [number for number, moe in enumerate(pattern) if moe]
