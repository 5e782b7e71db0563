"""What `test_megatron_weights.py` runs on two ranks, beside a real SGLang server that has another model's weights:

    python -m torch.distributed.run --nproc-per-node 2 -m tests.megatron_to_sglang URL MODEL FOLDER

Each way to the engine is taken in turn, each time with other weights. Rank 0 writes FOLDER/found.json: for each the
largest distance between log-probs of the server and of megatron-core.
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

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from backends.megatron.weights import Broadcast, Checkpoint, SharedMemory, WeightError, llama_names, send_weights
from backends.sglang import RequestRefused, SGLangEngine
from eventbus import Sample
from eventbus.columns import Tokens
from tests.megatron_shims import take_the_cpu_for_a_gpu
from tests.megatron_weights_worker import Model

VOCABULARY = 512
PROMPT = list(range(5, 25))
SAMPLING = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True}


async def distance(model: Model, engine: SGLangEngine | None, version: str) -> float:
    """Between the log-probs of the server and of megatron-core, for what the server generates."""
    said: list[Any] = [None]
    if engine is not None:
        completion = await engine.generate(Sample(index=0, tokens=Tokens(PROMPT)), SAMPLING)
        assert [span.version for span in completion.weight_versions] == [version]
        assert completion.log_probs is not None
        said = [(list(completion.tokens), list(completion.log_probs))]
    dist.broadcast_object_list(said)
    tokens, log_probs = said[0]
    assert len(log_probs) == 16
    whole = torch.tensor([PROMPT + tokens])
    logits = model.logits(whole)
    if logits is None:
        return 0.0
    own = logits[0, :, :VOCABULARY].log_softmax(-1)[len(PROMPT) - 1 : -1].gather(-1, torch.tensor(tokens)[:, None])
    return float((own[:, 0] - torch.tensor(log_probs)).abs().max())


async def run(url: str, like: Path, folder: Path) -> None:
    model = Model(tp=2, hidden=64, vocabulary=VOCABULARY + 8)
    names = llama_names(model.config, vocab_size=VOCABULARY)
    engine = SGLangEngine(url) if dist.get_rank() == 0 else None
    broadcast = Broadcast(backend="gloo", address="127.0.0.1")

    async def send(version: str, by: Any, mapping: Any = names) -> None:
        with torch.no_grad():
            for parameter in model.chunks[0].parameters():
                parameter.copy_(parameter.roll(1, 0))
        await send_weights(model.chunks, engine, version=version, mapping=mapping, by=by, bucket_bytes=100_000)

    found: dict[str, float] = {}
    ways = {
        "broadcast": broadcast,
        "broadcast again": broadcast,
        "shared memory": SharedMemory(),
        "checkpoint": Checkpoint(folder, like=like),
    }
    for version, by in ways.items():
        await send(version, by)
        found[version] = await distance(model, engine, version)

    def of_the_wrong_shape(name: str, weight: Tensor) -> Any:
        return [(new, tensor[:-1]) for new, tensor in names(name, weight)]

    refused: Any = RequestRefused if engine is not None else WeightError
    with pytest.raises(refused, match="Failed to update parameter online"):
        await send("wrong", broadcast, of_the_wrong_shape)
    await send("after a refusal", broadcast)
    found["after a refusal"] = await distance(model, engine, "after a refusal")
    if engine is not None:  # the workers do not listen any more
        await engine.destroy_weights_update_group(broadcast.group_name)
    with pytest.raises((RequestRefused, WeightError)):  # whichever is heard first
        await send("alone", broadcast)
    await send("after that", broadcast)
    found["after that"] = await distance(model, engine, "after that")
    if engine is not None:
        await broadcast.close(engine)
        (folder / "found.json").write_text(json.dumps(found))


def main(arguments: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    take_the_cpu_for_a_gpu()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    url, model, folder = arguments
    asyncio.run(run(url, Path(model), Path(folder)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
