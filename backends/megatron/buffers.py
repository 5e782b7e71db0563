"""`build_buffers`: DeepEP's buffer before the first dispatch, at which megatron-core would build it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch

from backends.megatron.chunks import unwrapped
from backends.megatron.config import ConfigError
from eventbus.imports import optional_dependency

__all__ = ["build_buffers"]


def build_buffers(chunks: Iterable[Any], tokens: int | None) -> bool:
    """What megatron-core builds at the first dispatch, by its own functions: there it is found. A collective.

    :param tokens: of one rank, the most that there are in a micro-batch; None: not known.
    :return: whether a layer of these chunks sends tokens through DeepEP.
    :raises ConfigError: the size of a buffer follows from `tokens`, and they are not known.
    """
    dispatchers = [
        layer.token_dispatcher
        for chunk in chunks
        for layer in unwrapped(chunk).modules()
        if _flex_back_end(layer) in ("deepep", "hybridep")
    ]
    for dispatcher in dispatchers:
        _build_buffer(dispatcher, tokens)
    return bool(dispatchers)


def _flex_back_end(layer: Any) -> str | None:
    """What a layer of experts sends tokens by; None: not by the dispatcher 'flex', or it is another layer."""
    config: Any = getattr(getattr(layer, "token_dispatcher", None), "config", None)
    if config is None or config.moe_token_dispatcher_type != "flex":
        return None
    back_end: str = config.moe_flex_dispatcher_backend
    return back_end


def _build_buffer(dispatcher: Any, tokens: int | None) -> None:
    """The one for what `dispatcher` sends. All dispatchers of a process use the same, so it is built once.

    :param tokens: of one rank, the most that there are in a micro-batch.
    """
    config = dispatcher.config
    width = getattr(config, "moe_latent_size", None) or config.hidden_size
    with optional_dependency():
        fused = import_module("megatron.core.transformer.moe.fused_a2a")
    if config.moe_flex_dispatcher_backend == "deepep":
        dtype = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else config.params_dtype
        fused.get_buffer(dispatcher.tp_ep_group, fused.get_hidden_bytes(torch.empty(0, width, dtype=dtype)))
        return
    if fused._hybrid_ep_buffer is not None:
        return
    if tokens is None:
        raise ConfigError(
            "eager_deep_ep=True, but how many tokens a HybridEP buffer has to hold is known from max_tokens_per_gpu "
            "alone: give that instead of micro_batch_size, or leave eager_deep_ep out"
        )
    if getattr(config, "moe_hybridep_pad_uneven_dispatch_inputs", False):
        tokens += -tokens % fused.HYBRIDEP_TOKEN_ALIGNMENT
    sms = getattr(config, "moe_flex_dispatcher_num_sms", None) or config.moe_hybridep_num_sms
    options = {
        "num_sms_dispatch_api": sms,
        "num_sms_combine_api": sms,
        "fp8_dispatch": False,
        "num_blocks_permute": getattr(config, "moe_hybridep_num_blocks_permute", None),
        "num_blocks_unpermute": getattr(config, "moe_hybridep_num_blocks_unpermute", None),
        "num_sms_preprocessing_api": getattr(config, "moe_hybridep_num_sms_preprocessing", None),
    }
    known = inspect.signature(fused.init_hybrid_ep_buffer).parameters  # more of them in each version
    options = {name: value for name, value in options.items() if name in known}
    fused.init_hybrid_ep_buffer(dispatcher.tp_ep_group, width, tokens, dispatcher.num_local_experts, **options)
