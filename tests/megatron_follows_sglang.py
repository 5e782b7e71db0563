"""What `test_sglang_real_experts.py` runs on two ranks, beside a real SGLang server with a Qwen3 of experts:

    python -m torch.distributed.run --nproc-per-node 2 -m tests.megatron_follows_sglang URL MODEL FOLDER

The server gets the weights of a megatron-core model and generates; then it gets those of MODEL back. Rank 0 writes
FOLDER/found.json: by how the records of experts are laid out, the KL of the server's policy from that of a
`MegatronTrainer` which follows them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from backends.megatron import MegatronTrainer
from backends.megatron.weights import SharedMemory, llama_names, send_weights
from backends.sglang import SGLangEngine
from eventbus import Batch, Group, Sample
from eventbus.columns import Tokens
from eventbus.group import Summary
from middleware import Generate
from tests import megatron_model as tiny
from tests.megatron_shims import core, let_experts_run, take_the_cpu_for_a_gpu
from tests.megatron_weights_worker import Model

LAYERS, EXPERTS, CHOSEN, VOCABULARY = 3, 8, 2, 512


def model() -> Model:
    """As `tests/sglang_cpu/tiny_model.py` has it, on two ranks with half of the experts each."""
    mixture = {
        "moe_router_topk": CHOSEN,
        "moe_ffn_hidden_size": 32,
        "moe_router_pre_softmax": True,
        "moe_enable_routing_replay": True,
    }
    options: dict[str, Any] = {"layers": LAYERS, "experts": EXPERTS, "qk_norm": True, "mixture": mixture}
    return Model(ep=2, hidden=64, vocabulary=VOCABULARY, **options)


async def generated(engine: SGLangEngine) -> list[Sample]:
    generate = Generate(engine, {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True})
    samples = [
        Sample(index=index, rollout_id=index, tokens=Tokens(range(5 + index, 15 + 3 * index)), reward=1.0)
        for index in range(4)
    ]
    for sample in samples:
        await generate(sample)
        sample.train_metadata = {"advantage": 1.0}
    return samples


async def run(url: str, whole: str, folder: Path) -> None:
    made = model()
    engine = SGLangEngine(url, routed_experts=(LAYERS, CHOSEN)) if dist.get_rank() == 0 else None
    names = llama_names(made.config, vocab_size=VOCABULARY)
    said: list[Any] = [None]
    try:
        await send_weights(made.chunks, engine, version="megatron", mapping=names, by=SharedMemory())
        if engine is not None:
            said = [await generated(engine)]
    finally:
        if engine is not None:
            await engine.update_weights_from_disk(whole, "default")
    dist.broadcast_object_list(said)
    samples: list[Sample] = said[0]
    wrap = core("distributed", "DistributedDataParallelConfig")(grad_reduce_in_fp32=True)
    chunks = [core("distributed", "DistributedDataParallel")(made.config, wrap, chunk) for chunk in made.chunks]
    trainer = MegatronTrainer(
        chunks, tiny.optimizer(chunks), micro_batch_size=1, padded=True, old_log_probs="recompute"
    )
    found = {}
    for shift in range(LAYERS):
        moved = [sample.copy() for sample in samples]
        for sample in moved:
            records = sample.rollout_routed_experts
            sample.rollout_routed_experts = records[:, [(layer + shift) % LAYERS for layer in range(LAYERS)]]
        batch = Batch(0, [Group(0, "", [[sample] for sample in moved])], Summary(0))
        found[f"layers moved by {shift}"] = (await trainer.train(batch)).metrics["rollout_kl"]
    trainer.close()
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


def main(arguments: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    take_the_cpu_for_a_gpu()
    let_experts_run()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    url, whole, folder = arguments
    asyncio.run(run(url, whole, Path(folder)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
