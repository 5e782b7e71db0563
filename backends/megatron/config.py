"""`check_config`: what megatron-core takes and computes wrongly, or what a `MegatronTrainer` cannot run, is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from backends.megatron.plan import ParallelLayout

__all__ = ["ConfigError", "check_config"]


class ConfigError(ValueError):
    """A configuration that megatron-core accepts and computes wrongly, or that this trainer cannot run."""


def check_config(config: Any, layout: ParallelLayout, *, pp: int, chunks: int, gloo: bool, padded: bool) -> None:
    """Refuse what megatron-core takes and computes wrongly, each with the reason. `MegatronTrainer` does it.

    :param config: a `TransformerConfig`.
    :param pp: pipeline stages.
    :param chunks: virtual stages on each.
    :param gloo: what stages send each other goes over gloo.
    :raises ConfigError: there is such a thing.
    """
    for found in _reasons(config, layout, pp, chunks, gloo, padded):
        raise ConfigError(found)


def _reasons(config: Any, layout: ParallelLayout, pp: int, chunks: int, gloo: bool, padded: bool) -> Iterator[str]:
    if pp > 1 and not config.variable_seq_lengths:
        yield (
            "the lengths of micro-batches differ, and pipeline stages expect tensors of one shape: set "
            "variable_seq_lengths=True"
        )
    if config.num_moe_experts and config.variable_seq_lengths and config.moe_token_dispatcher_type == "allgather":
        yield "the dispatcher 'allgather' needs one sequence length: set moe_token_dispatcher_type='alltoall'"
    if pp == 2 and chunks > 1 and config.batch_p2p_comm:
        yield (
            "with two stages the previous one is also the next, and batched messages of virtual stages get mixed up: "
            "activations are taken for gradients. Set overlap_p2p_comm=True and batch_p2p_comm=False"
        )
    if pp > 1 and gloo and config.deallocate_pipeline_outputs:
        yield (
            "gloo still reads a tensor that was sent when deallocate_pipeline_outputs frees it: set "
            "deallocate_pipeline_outputs=False"
        )
    if config.num_moe_experts and (padded or layout.total_multiple > 1):
        uses = {
            "moe_aux_loss_coeff": "moe_router_load_balancing_type is not 'none' and moe_aux_loss_coeff not 0",
            "moe_z_loss_coeff": "moe_z_loss_coeff is set",
            "moe_expert_capacity_factor": "moe_expert_capacity_factor is set",
            "moe_expert_rank_capacity_factor": "moe_expert_rank_capacity_factor is set",
            "moe_router_enable_expert_bias": "moe_router_enable_expert_bias is True",
        }
        for name, what in uses.items():
            if name == "moe_aux_loss_coeff" and config.moe_router_load_balancing_type == "none":
                continue
            value = getattr(config, name, None)
            if any(value) if isinstance(value, list | tuple) else value:
                yield (
                    f"routers take padding for tokens, which counts because {what}: turn that off, or train packed "
                    "without alignment (padded=False, cp 1, no sequence parallelism, token_multiple 1)"
                )
    if (
        config.num_moe_experts
        and config.moe_token_dispatcher_type == "flex"
        and config.moe_flex_dispatcher_backend == "hybridep"
        and config.expert_model_parallel_size > 1
        and layout.dp > 1
        and not getattr(config, "moe_hybridep_pad_uneven_dispatch_inputs", False)
    ):
        yield (
            "HybridEP takes as many tokens from each rank, and micro-batches differ: set "
            "moe_flex_dispatcher_backend='deepep', or with megatron-core 0.19 moe_hybridep_pad_uneven_dispatch_inputs="
            "True"
        )
    if config.num_moe_experts and config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        yield "megatron-core trains experts under tensor parallelism with sequence_parallel=True only: set it"
    if config.num_moe_experts and getattr(config, "moe_enable_routing_replay", False):
        yield from _no_replay(config)
    if getattr(config, "mtp_num_layers", None):
        yield "multi-token prediction needs labels, and a policy loss has none: set mtp_num_layers=None"
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        yield "overlap_moe_expert_parallel_comm needs a schedule plan, not a forward pass: set it to False"
    if getattr(config, "hybrid_context_parallel", False):
        yield "hybrid_context_parallel plans micro-batches by itself: set it to False"


def _no_replay(config: Any) -> Iterator[str]:
    """Why routers would not follow a record, as `moe_enable_routing_replay` asks for."""
    why = "and moe_enable_routing_replay has no effect there"
    if config.moe_router_fusion:
        yield f"the fused router chooses experts by itself, {why}: set moe_router_fusion=False"
    balancing = config.moe_router_load_balancing_type
    for name in ("sinkhorn", "quantile_balancing"):
        if name in (balancing if isinstance(balancing, list) else [balancing]):
            yield f"{name} chooses experts by itself, {why}: set moe_router_load_balancing_type to another"
    for name in ("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor"):
        if getattr(config, name, None) is not None:
            yield f"experts at their capacity turn tokens away that the record sends them: set {name}=None"
    graphs = getattr(config, "cuda_graph_impl", "none")
    scope = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", None) or ["full"]
    parts = {str(getattr(part, "name", part)) for part in (scope if isinstance(scope, list) else [scope])}
    if graphs != "none" and (graphs != "transformer_engine" or parts & {"full", "full_iteration", "moe", "moe_router"}):
        yield (
            "a CUDA graph routes tokens as they were when it was captured: set cuda_graph_impl='none', or "
            "'transformer_engine' with cuda_graph_scope=['attn'] (cuda_graph_modules with megatron-core 0.19)"
        )
