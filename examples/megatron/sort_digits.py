"""The demo's task, to sort three digits, learned by a GPT of megatron-core on several ranks.

    torchrun --nproc-per-node 2 -m examples.megatron.sort_digits

Rank 0 owns the stream: the prompts, the stages and an engine that lives in its process. Each rank trains its part of
every batch; then the engine gets the new weights. `make demo-megatron` runs it on the CPU, where megatron-core has to
be helped a little (`tests/megatron_shims.py`); on GPUs it runs as it is.
"""

from __future__ import annotations

import argparse
import importlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import torch
import torch.distributed as dist
from torch import Tensor

from backends.embedded import EmbeddedEngine
from backends.megatron import MegatronTrainer, Objective, ShardedStream
from eventbus import BatchSpec, JsonlPrompts, Pipeline
from examples.demo.stages import score
from middleware import DynamicFilter, Generate, GroupAdvantage, reward_nonzero_std

LAYERS, WIDTH, HEADS, CONTEXT = 2, 64, 4, 10
PROMPTS = Path(__file__).parent.parent / "demo" / "prompts.jsonl"


def core(module: str, name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what may be installed beside it
        return getattr(importlib.import_module(f"megatron.core.{module}"), name)


def build(vocabulary: int) -> tuple[Any, Any, Any]:
    """As for megatron-core's own training loop: the model, and its optimizer. The sizes are those of the engine."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = core("transformer", "TransformerConfig")(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        init_method_std=WIDTH**-0.5,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )
    torch.manual_seed(0)
    model = core("models.gpt", "GPTModel")(
        config=config,
        transformer_layer_spec=core("models.gpt.gpt_layer_specs", "get_gpt_layer_local_spec")(),
        vocab_size=vocabulary,
        max_sequence_length=CONTEXT,
        position_embedding_type="learned_absolute",
    ).to(device)
    torch.nn.init.normal_(model.output_layer.weight, std=0.02)  # near-uniform to begin with: exploration is free
    for name, parameter in model.named_parameters():
        if name.endswith(("linear_qkv.bias", "linear_proj.bias")):  # which the engine's attention does not have
            parameter.requires_grad_(False)
    options = core("distributed", "DistributedDataParallelConfig")(use_distributed_optimizer=True)
    wrapped = core("distributed", "DistributedDataParallel")(config, options, model)
    optimizer = core("optimizer", "get_megatron_optimizer")(
        core("optimizer", "OptimizerConfig")(
            optimizer="adam", lr=1.2e-3, weight_decay=0.0, clip_grad=1.0, use_distributed_optimizer=True
        ),
        [wrapped],
    )
    return model, wrapped, optimizer


def named(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The weights by the engine's names."""
    weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    yield "tokens.weight", weights["embedding.word_embeddings.weight"]
    yield "positions.weight", weights["embedding.position_embeddings.weight"]
    yield "head.weight", weights["output_layer.weight"]
    for kind in ("weight", "bias"):
        yield f"norm.{kind}", weights[f"decoder.final_layernorm.{kind}"]
    for layer in range(LAYERS):
        ours, theirs = f"blocks.{layer}", f"decoder.layers.{layer}"
        # query, key and value of one head after the other, and in the engine those of all heads
        mixed = weights[f"{theirs}.self_attention.linear_qkv.weight"].view(HEADS, 3, -1, WIDTH)
        yield f"{ours}.queries_keys_values.weight", mixed.transpose(0, 1).reshape(3 * WIDTH, WIDTH)
        yield f"{ours}.attended.weight", weights[f"{theirs}.self_attention.linear_proj.weight"]
        for kind in ("weight", "bias"):
            yield f"{ours}.attention_norm.{kind}", weights[f"{theirs}.input_layernorm.{kind}"]
            yield f"{ours}.mlp_norm.{kind}", weights[f"{theirs}.pre_mlp_layernorm.{kind}"]
            yield f"{ours}.up.{kind}", weights[f"{theirs}.mlp.linear_fc1.{kind}"]
            yield f"{ours}.down.{kind}", weights[f"{theirs}.mlp.linear_fc2.{kind}"]


async def main(rollouts: int) -> None:
    engine = EmbeddedEngine("0123456789=", CONTEXT, WIDTH, LAYERS, HEADS)
    model, wrapped, optimizer = build(vocabulary=engine.eos + 1)
    await engine.update_weights(dict(named(model)), "0")
    trainer = MegatronTrainer([wrapped], optimizer, micro_batch_size=64, padded=True, loss=Objective(clip=0.2))
    pipeline = Pipeline(
        prompts=JsonlPrompts(PROMPTS, group_size=8, label_key="answer", seed=0),
        stages=[
            Generate(engine, {"temperature": 1.0, "max_new_tokens": 5}),
            score,
            DynamicFilter(reward_nonzero_std, fallback="last"),
            GroupAdvantage(),
        ],
        batch=BatchSpec(groups=16, over_sampling=24),
    )
    async with ShardedStream(pipeline, trainer) as stream:
        async for shard in stream.rollouts(stop=rollouts):
            result = await trainer.train(shard)
            if dist.get_rank() == 0:
                await engine.update_weights(dict(named(model)), str(result.weight_version))
            shard.trained(result)
            if dist.get_rank() == 0 and (shard.rollout_id % 10 == 0 or shard.rollout_id == rollouts - 1):
                loss, norm = result.metrics["loss"], result.metrics["grad_norm"]
                print(f"{shard.summary}; loss {loss:+.4f}, gradient {norm:.3f}", flush=True)
    trainer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=250)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        from tests.megatron_shims import take_the_cpu_for_a_gpu

        take_the_cpu_for_a_gpu()
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    core("parallel_state", "initialize_model_parallel")()
    core("tensor_parallel.random", "model_parallel_cuda_manual_seed")(0)
    anyio.run(main, arguments.rollouts)
    dist.destroy_process_group()
