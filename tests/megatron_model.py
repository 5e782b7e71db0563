"""A tiny GPT twice: of megatron-core, in any layout, on the CPU; and in plain torch, whole. Both get the same weights.

megatron-core's own attention for machines without Transformer Engine takes neither packed sequences nor context
parallelism, and its norm no sequence parallelism; `Attention` and `Norm` stand in for them.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
import zlib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.megatron_shims import core

LAYERS, HIDDEN, HEADS, GROUPS, FFN, VOCABULARY, CONTEXT = 4, 32, 4, 2, 64, 64, 128
EXPERTS, CHOSEN = 4, 2


class Attention(nn.Module):
    """Causal, in the place of megatron-core's `DotProductAttention`: packed or not, with context parallelism or not."""

    def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[t, heads, width] of sequences that lie end to end, or [s, b, heads, width]."""
        packed = kwargs.get("packed_seq_params")
        state = core("parallel_state", "get_context_parallel_group")
        cp = dist.get_world_size(state())
        if packed is None:
            columns = [[x[:, n] for x in (query, key, value)] for n in range(query.shape[1])]
            found = torch.stack([self._attend([0, len(query)], *column) for column in columns], 1)
            return found.flatten(2)
        bounds = [int(bound) // cp for bound in packed.cu_seqlens_q]
        flat = [x if x.dim() == 3 else x.squeeze(1) for x in (query, key, value)]
        return self._attend(bounds, *flat).flatten(1)

    def _attend(self, bounds: list[int], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group = core("parallel_state", "get_context_parallel_group")()
        cp, rank = dist.get_world_size(group), dist.get_rank(group)
        repeats = query.shape[1] // key.shape[1]
        gathered: Any = _Gathered.apply
        every = [gathered(x.repeat_interleave(repeats, 1), group) for x in (key, value)]
        found = []
        for start, end in pairwise(bounds):
            places = _places(end - start, cp)
            keys, values = (x[:, start:end].flatten(0, 1)[places.flatten().argsort()] for x in every)
            mask = places[rank][:, None] >= torch.arange(cp * (end - start))
            q, k, v = (x.transpose(0, 1)[None] for x in (query[start:end], keys, values))
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
            found.append(attended[0].transpose(0, 1))
        return torch.cat(found)


def _places(length: int, cp: int) -> Tensor:
    """[cp, length]: where in the sequence the tokens of each rank are."""
    if cp == 1:
        return torch.arange(length)[None]
    pieces = torch.arange(cp * length).view(2 * cp, -1)
    return torch.stack([torch.cat([pieces[rank], pieces[2 * cp - 1 - rank]]) for rank in range(cp)])


class _Gathered(torch.autograd.Function):
    """[ranks, ...]: that of each rank."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        ctx.group = group
        every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, own.contiguous(), group=group)
        return torch.stack(every)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[dist.get_rank(ctx.group)], None


class Norm(nn.LayerNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


# megatron-core


def initialise(seed: int = 0, **sizes: int | None) -> None:
    """The process groups of a layout, in the place of those before: tensor_model_parallel_size and so on."""
    state = importlib.import_module("megatron.core.parallel_state")
    if state.model_parallel_is_initialized():
        state.destroy_model_parallel()
    state.initialize_model_parallel(create_gloo_process_groups=True, **sizes)
    core("tensor_parallel.random", "model_parallel_cuda_manual_seed")(seed)


def config(**options: Any) -> Any:
    state = importlib.import_module("megatron.core.parallel_state")
    virtual = state.get_virtual_pipeline_model_parallel_world_size()
    moe: dict[str, Any] = {}
    if layers := options.pop("moe", False):
        moe = {
            "moe_layer_freq": 1 if layers is True else list(map(int, layers)),
            "num_moe_experts": EXPERTS,
            "moe_router_topk": CHOSEN,
            "moe_ffn_hidden_size": FFN,
            "moe_router_load_balancing_type": "none",
            "add_bias_linear": False,
        }
    options = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_query_groups": GROUPS,
        "ffn_hidden_size": FFN,
        "use_cpu_initialization": True,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "tensor_model_parallel_size": state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": state.get_context_parallel_world_size(),
        "expert_model_parallel_size": state.get_expert_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": virtual,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "moe_token_dispatcher_type": "alltoall",
        "variable_seq_lengths": state.get_pipeline_model_parallel_world_size() > 1,
        "batch_p2p_comm": virtual is None,
        "overlap_p2p_comm": virtual is not None,
        **moe,
        **options,
    }
    return core("transformer", "TransformerConfig")(**options)


def build(config: Any, weights: Mapping[str, Tensor], **wrap: Any) -> list[Any]:
    """The chunks of this rank, with their part of the weights, in `DistributedDataParallel` with the options `wrap`."""
    state = importlib.import_module("megatron.core.parallel_state")
    virtual = config.virtual_pipeline_model_parallel_size
    chunks = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for stage in range(virtual or 1):
            chosen = {} if virtual is None else {"vp_stage": stage}
            first = state.is_pipeline_first_stage(ignore_virtual=virtual is None, **chosen)
            last = state.is_pipeline_last_stage(ignore_virtual=virtual is None, **chosen)
            model = core("models.gpt", "GPTModel")(
                config=config,
                transformer_layer_spec=_spec(config, virtual),
                vocab_size=VOCABULARY,
                max_sequence_length=CONTEXT,
                pre_process=first,
                post_process=last,
                position_embedding_type="rope",
                **chosen,
            )
            for name, parameter in named(model, config):
                parameter.data.copy_(part_of(weights[name], parameter))
            if config.bf16:
                model = core("transformer.module", "Float16Module")(config, model)
            options = core("distributed", "DistributedDataParallelConfig")(**{"grad_reduce_in_fp32": True, **wrap})
            chunks.append(core("distributed", "DistributedDataParallel")(config, options, model))
    return chunks


def _spec(config: Any, virtual: int | None) -> Any:
    here = LAYERS // config.pipeline_model_parallel_size // (virtual or 1)
    pattern = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [1] * LAYERS
    if virtual is None:
        pattern = pattern[here * core("parallel_state", "get_pipeline_model_parallel_rank")() :]
    specs = [_layer(config.num_moe_experts if moe else None) for moe in pattern[:here]]
    submodules = core("transformer.transformer_block", "TransformerBlockSubmodules")
    return submodules(layer_specs=specs, layer_norm=Norm)


def _layer(experts: int | None) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        spec = core("models.gpt.gpt_layer_specs", "get_gpt_layer_local_spec")(num_experts=experts)
    spec.submodules.self_attention.submodules.core_attention = Attention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    return spec


def named(model: Any, config: Any) -> Iterator[tuple[str, Any]]:
    """Parameters of a chunk by their names in the whole model."""
    while hasattr(model, "module"):
        model = model.module
    experts = core("parallel_state", "get_expert_model_parallel_rank")() * (
        EXPERTS // config.expert_model_parallel_size
    )
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
        if "local_experts" in parts:
            place = parts.index("local_experts") + 1
            parts[place] = str(int(parts[place]) + experts)
        yield ".".join(parts), parameter


def part_of(whole: Tensor, parameter: Any) -> Tensor:
    """What a tensor-parallel rank has of it."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    expert = not getattr(parameter, "allreduce", True)
    group = core("parallel_state", f"get_{'expert_tensor' if expert else 'tensor_model'}_parallel_group")()
    return whole.chunk(dist.get_world_size(group), parameter.partition_dim)[dist.get_rank(group)]


def optimizer(chunks: list[Any], **options: Any) -> Any:
    options = {"optimizer": "adam", "lr": 0.0, "weight_decay": 0.0, "clip_grad": 1e9, **options}
    options = {"params_dtype": torch.float32, **options}
    return core("optimizer", "get_megatron_optimizer")(core("optimizer", "OptimizerConfig")(**options), chunks)


# Plain torch


class Plain(nn.Module):
    """The same model by its formulas, one sequence at a time."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.weights = {name: value.clone().requires_grad_() for name, value in weights.items()}

    def forward(self, tokens: Tensor, recorded: Tensor | None = None) -> Tensor:
        """[n] to [n, vocabulary]

        :param recorded: [n - 1, layers, chosen]: the experts of all tokens but the last.
        """
        w = self.weights
        hidden = w["embedding.word_embeddings.weight"][tokens]
        for number in range(LAYERS):
            name = f"decoder.layers.{number}."
            hidden = hidden + self._attention(name, self._norm(name + "input_layernorm", hidden))
            normed = self._norm(name + "pre_mlp_layernorm", hidden)
            moe = name + "mlp.router.weight" in w
            experts = None if recorded is None else recorded[:, number]
            hidden = hidden + (
                self._experts(name + "mlp.", normed, experts) if moe else self._mlp(name + "mlp.", normed)
            )
        return self._norm("decoder.final_layernorm", hidden) @ w["output_layer.weight"].T

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[name + ".weight"], self.weights.get(name + ".bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (HIDDEN,), self.weights[name + ".weight"], self.weights[name + ".bias"])

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        return self._linear(name + "linear_fc2", F.gelu(self._linear(name + "linear_fc1", x)))

    def _experts(self, name: str, x: Tensor, recorded: Tensor | None) -> Tensor:
        logits = x @ self.weights[name + "router.weight"].T
        chosen = logits.topk(CHOSEN).indices
        if recorded is not None:  # what the last token does matters to nobody
            chosen = torch.cat([recorded, chosen[-1:]])
        shares = logits.gather(-1, chosen).softmax(-1)
        every = torch.stack([self._mlp(f"{name}experts.local_experts.{n}.", x) for n in range(EXPERTS)], 1)
        return (every.gather(1, chosen[..., None].expand(-1, -1, HIDDEN)) * shares[..., None]).sum(1)

    def _attention(self, name: str, x: Tensor) -> Tensor:
        width = HIDDEN // HEADS
        # megatron-core lays out the queries of a group, its key and its value, then the next group
        mixed = self._linear(name + "self_attention.linear_qkv", x).view(len(x), GROUPS, HEADS // GROUPS + 2, width)
        query = _rotated(mixed[:, :, :-2].flatten(1, 2))
        key, value = _rotated(mixed[:, :, -2]), mixed[:, :, -1]
        key, value = (y.repeat_interleave(HEADS // GROUPS, 1) for y in (key, value))
        scores = torch.einsum("qhw,khw->hqk", query, key) / width**0.5
        causal = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        attended = torch.einsum("hqk,khw->qhw", scores.masked_fill(causal, -torch.inf).softmax(-1), value)
        return self._linear(name + "self_attention.linear_proj", attended.flatten(1))


def _rotated(x: Tensor) -> Tensor:
    """Rotary embedding (arXiv 2104.09864) of [n, heads, width]."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] / 10000 ** (torch.arange(half) / half)
    angles = torch.cat([angles, angles], -1)[:, None]
    return x * angles.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angles.sin()


def weights(moe: bool | tuple[bool, ...] = False, seed: int = 0, scale: float = 0.15) -> dict[str, Tensor]:
    """By name, of the whole model.

    :param moe: whether there are experts; in which layers, where it is not all or none.
    """
    pattern = moe if isinstance(moe, tuple) else (moe,) * LAYERS
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (VOCABULARY, HIDDEN),
        "output_layer.weight": (VOCABULARY, HIDDEN),
        **_pair("decoder.final_layernorm", HIDDEN),
    }
    mixed = (HEADS + 2 * GROUPS) * HIDDEN // HEADS
    for number in range(LAYERS):
        name = f"decoder.layers.{number}."
        shapes |= _pair(name + "input_layernorm", HIDDEN) | _pair(name + "pre_mlp_layernorm", HIDDEN)
        shapes |= _pair(name + "self_attention.linear_qkv", mixed, HIDDEN, bias=not moe)
        shapes |= _pair(name + "self_attention.linear_proj", HIDDEN, HIDDEN, bias=not moe)
        if pattern[number]:
            shapes[name + "mlp.router.weight"] = (EXPERTS, HIDDEN)
        mlps = (
            [name + "mlp."]
            if not pattern[number]
            else [f"{name}mlp.experts.local_experts.{n}." for n in range(EXPERTS)]
        )
        for mlp in mlps:
            shapes |= _pair(mlp + "linear_fc1", FFN, HIDDEN, bias=not moe)
            shapes |= _pair(mlp + "linear_fc2", HIDDEN, FFN, bias=not moe)
    return {name: _drawn(name, shape, seed, scale) for name, shape in shapes.items()}


def _pair(name: str, *shape: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
    return {name + ".weight": shape} | ({name + ".bias": shape[:1]} if bias else {})


def _drawn(name: str, shape: tuple[int, ...], seed: int, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    drawn = torch.randn(shape, generator=generator) * scale
    return 1 + drawn if name.endswith("layernorm.weight") else drawn
