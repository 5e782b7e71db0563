"""What `test_megatron_weights.py` runs on four ranks, over gloo:

    python -m torch.distributed.run --nproc-per-node 4 -m tests.megatron_weights_worker FOLDER

Rank 0 writes FOLDER/found.json: for each case what went wrong, or null.
"""

from __future__ import annotations

import asyncio
import json
import sys
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from backends.megatron.weights import Broadcast, Checkpoint, WeightError, llama_names, named_weights, send_weights
from tests.megatron_ranks import run_cases
from tests.megatron_shims import core, let_experts_run, take_the_cpu_for_a_gpu

VOCABULARY, PADDED_VOCABULARY, HEADS, GROUPS, SIZE = 90, 96, 4, 2, 8
TOKENS = torch.arange(24).view(2, 12) * 7 % VOCABULARY


class Model:
    """A small Llama of megatron-core on a layout, every rank with its own part, all weights random and different."""

    def __init__(
        self,
        *,
        tp: int = 1,
        pp: int = 1,
        vpp: int | None = None,
        ep: int = 1,
        etp: int = 1,
        layers: int = 2,
        experts: int | None = None,
        tied: bool = False,
        qk_norm: bool = False,
        bias: bool = False,
        vocabulary: int = PADDED_VOCABULARY,
        hidden: int = HEADS * SIZE,
        mixture: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        mpu = core("parallel_state", "__dict__")
        mpu["destroy_model_parallel"]()
        mpu["initialize_model_parallel"](
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
        )
        core("tensor_parallel.random", "model_parallel_cuda_manual_seed")(1)
        mixture = {
            "num_moe_experts": experts,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 24,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            **mixture,
        }
        self.config = core("transformer", "TransformerConfig")(
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=HEADS,
            num_query_groups=GROUPS,
            ffn_hidden_size=2 * hidden,
            kv_channels=hidden // HEADS,
            normalization="RMSNorm",
            layernorm_epsilon=1e-6,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            add_qkv_bias=bias,
            qk_layernorm=qk_norm,
            use_cpu_initialization=True,
            params_dtype=torch.float32,
            pipeline_dtype=torch.float32,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            apply_rope_fusion=False,
            deallocate_pipeline_outputs=False,
            batch_p2p_comm=vpp is None,
            overlap_p2p_comm=vpp is not None,
            **(mixture if experts else {}),
        )
        spec = core("models.gpt.gpt_layer_specs", "get_gpt_layer_local_spec")(
            num_experts=experts, moe_grouped_gemm=False, qk_layernorm=qk_norm, normalization="RMSNorm"
        )
        self.chunks = []
        for stage in range(vpp or 1):
            where = {} if vpp is None else {"vp_stage": stage}
            first = mpu["is_pipeline_first_stage"](ignore_virtual=vpp is None, **where)
            last = mpu["is_pipeline_last_stage"](ignore_virtual=vpp is None, **where)
            chunk = core("models.gpt", "GPTModel")(
                config=self.config,
                transformer_layer_spec=spec,
                vocab_size=vocabulary,
                max_sequence_length=1024,
                pre_process=first,
                post_process=last,
                parallel_output=True,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=tied,
                **where,
            )
            self._fill(chunk, stage)
            self.chunks.append(chunk)
        self.tp = tp
        if tied and pp > 1:
            self._tie()

    def _fill(self, chunk: Any, stage: int) -> None:
        mpu = core("parallel_state", "__dict__")
        for name, parameter in chunk.named_parameters():
            seed = f"{mpu['get_pipeline_model_parallel_rank']()} {stage} {name}"
            if ".experts." in name:
                seed += f" {mpu['get_expert_model_parallel_rank']()} {mpu['get_expert_tensor_parallel_rank']()}"
            elif getattr(parameter, "tensor_model_parallel", False):
                seed += f" {mpu['get_tensor_model_parallel_rank']()}"
            generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(1 + 0.2 * noise if "norm" in name else 0.1 * noise)

    def _tie(self) -> None:
        for chunk in self.chunks:
            if chunk.pre_process or chunk.post_process:
                weight = chunk.shared_embedding_or_output_weight()
                if not chunk.pre_process:
                    weight.data.zero_()
                dist.all_reduce(weight.data, group=core("parallel_state", "get_embedding_group")())

    def logits(self, tokens: Tensor = TOKENS) -> Tensor | None:
        """[rows, tokens, padded vocabulary], on rank 0."""
        rows, length = tokens.shape
        positions = torch.arange(length).expand(rows, length)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]

        def step(data: Any, chunk: Any) -> Any:
            next(data)
            return chunk(tokens, positions, hidden), lambda output: (output.sum(), {"logits": output})

        iterators = [iter([None]) for _ in self.chunks]
        count = 1 if self.config.virtual_pipeline_model_parallel_size is None else 2
        if count > 1:
            iterators = [iter([None] * count) for _ in self.chunks]
        with torch.no_grad():
            found = core("pipeline_parallel", "get_forward_backward_func")()(
                forward_step_func=step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=count,
                seq_length=length,
                micro_batch_size=rows,
                forward_only=True,
            )
        first = core("parallel_state", "get_pipeline_model_parallel_first_rank")()
        source = core("parallel_state", "get_pipeline_model_parallel_last_rank")()
        shape = torch.zeros(3, dtype=torch.int64)
        whole = torch.empty(0)
        if found:
            whole = core("tensor_parallel", "gather_from_tensor_model_parallel_region")(found[0]["logits"])
            shape = torch.tensor(whole.shape)
        if first == 0 != source:  # the last stage tells the first one
            if dist.get_rank() == source:
                dist.send(shape, 0)
                dist.send(whole.contiguous(), 0)
            elif dist.get_rank() == 0:
                dist.recv(shape, source)
                whole = torch.empty(shape.tolist())
                dist.recv(whole, source)
        return whole if dist.get_rank() == 0 else None


def config_of(model: Model, tied: bool) -> dict[str, Any]:
    """What the same model's config.json says."""
    config = model.config
    family: str = "Llama"
    more: dict[str, Any] = {}
    if config.num_moe_experts:
        family = "Qwen3Moe"
        more = {
            "num_experts": config.num_moe_experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        }
    elif config.qk_layernorm:
        family = "Qwen3"
    elif config.add_qkv_bias:
        family = "Qwen2"
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower().replace("moe", "_moe"),
        "vocab_size": VOCABULARY,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": config.kv_channels,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "dtype": "float32",
        **more,
    }


def beside_transformers(folder: Path, **layout: Any) -> None:
    """FOLDER/hf is a checkpoint of the model, FOLDER/said.safetensors what megatron-core says. They are compared where
    torch is as it should be."""
    from safetensors.torch import save_file

    like = folder / "like"
    model = Model(**layout)
    logits = model.logits()
    if dist.get_rank() == 0:
        like.mkdir()
        (like / "config.json").write_text(json.dumps(config_of(model, layout.get("tied", False))))
    send(model, None, "hf", folder, by=Checkpoint(folder, like=like))
    if dist.get_rank() == 0:
        assert logits is not None
        save_file({"tokens": TOKENS, "logits": logits[..., :VOCABULARY].contiguous()}, folder / "said.safetensors")


def send(model: Model, engine: Any, version: str, folder: Path, **options: Any) -> None:
    names = llama_names(model.config, vocab_size=VOCABULARY)
    options = {"mapping": names, "by": Checkpoint(folder), "bucket_bytes": 20_000, **options}
    asyncio.run(send_weights(model.chunks, engine, version=version, **options))


def buckets_are_bounded(folder: Path) -> None:
    model = Model(tp=2, pp=2)
    found = list(named_weights(model.chunks, lambda name, weight: [(name, weight)], bucket_bytes=15_000))
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(4)]
    dist.all_gather(counts, torch.tensor([len(found)]))
    assert len({int(count) for count in counts}) == 1  # all ranks go on side by side
    if dist.get_rank() != 0:
        assert not any(found)
        return
    sizes = [[weight.nbytes for _, weight in bucket] for bucket in found]
    assert len(sizes) > 3
    assert all(sum(bucket) <= 15_000 or len(bucket) == 1 for bucket in sizes)
    assert max(map(sum, sizes)) < sum(map(sum, sizes)) / 3
    names = [name for bucket in found for name, _ in bucket]
    assert len(names) == len(set(names)) == 2 + 1 + 2 * 6


def one_checkpoint(folder: Path) -> None:
    """Written in pieces; a second one of the same version takes its place."""
    from safetensors.torch import load_file

    like = folder / "like"
    model = Model(tp=2, pp=2)
    names = llama_names(model.config, vocab_size=VOCABULARY)
    buckets = named_weights(model.chunks, names)
    weights = {name: weight.clone() for bucket in buckets for name, weight in bucket}
    if dist.get_rank() == 0:
        like.mkdir()
        (like / "tokenizer.json").write_text("{}")
        (like / "old.safetensors").write_text("not this")
    for _ in range(2):
        send(model, None, "7", folder, by=Checkpoint(folder, like=like))
    if dist.get_rank() == 0:
        assert not (folder / "7.part").exists()
        files = {path.name for path in (folder / "7").iterdir()}
        index = json.loads((folder / "7" / "model.safetensors.index.json").read_text())
        assert files == {"tokenizer.json", "model.safetensors.index.json", *index["weight_map"].values()}
        assert len(files) > 5
        assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in weights.values())
        for name, file in index["weight_map"].items():
            assert torch.equal(load_file(folder / "7" / file)[name], weights.pop(name))
        assert not weights


def failures_reach_all_ranks(folder: Path) -> None:
    model = Model(tp=2, pp=2)

    class Refuses:
        """A way on which the second bucket is lost."""

        @asynccontextmanager
        async def sending(self, engine: Any, version: str, pause: Any) -> Any:
            count = 0

            async def take(tensors: Any) -> None:
                nonlocal count
                count += 1
                if count == 2:
                    raise ConnectionError("the worker is gone")

            yield take

    class Closed:
        @asynccontextmanager
        async def sending(self, engine: Any, version: str, pause: Any) -> Any:
            raise ConnectionError("nobody is there")
            yield

    def no_name(name: str, weight: Tensor) -> Any:
        raise ValueError(f"no name for {name}")

    cases: list[tuple[str, type[Exception], dict[str, Any]]] = [
        ("the worker is gone", ConnectionError, {"by": Refuses()}),
        ("nobody is there", ConnectionError, {"by": Closed()}),
        ("no name for embedding.word_embeddings.weight", ValueError, {"mapping": no_name}),
        ("Broadcast needs the engine on rank 0", ValueError, {"by": Broadcast()}),
    ]
    for words, kind, options in cases:
        expected: Any = kind if dist.get_rank() == 0 else WeightError
        with pytest.raises(expected, match=words) as caught:
            send(model, None, "8", folder, **options)
        if dist.get_rank() != 0:
            assert str(caught.value).startswith(f"version 8 was not sent: rank 0: {kind.__name__}: ")
    # before any rank waits for another
    with pytest.raises(ValueError, match="bucket_bytes is 0"):
        send(model, None, "8", folder, bucket_bytes=0)
    with pytest.raises(TypeError, match="version is 8, it must be a str"):
        send(model, None, 8, folder)  # type: ignore[arg-type]
    assert not (folder / "8").exists()
    send(model, None, "8", folder)  # and the ranks still go side by side
    if dist.get_rank() == 0:
        assert (folder / "8").exists()


def cancelled_anywhere_no_rank_waits(folder: Path) -> None:
    """By asyncio itself, which anyio's scopes do not shield from."""
    model, rank = Model(tp=2, pp=2), dist.get_rank()

    class Waits:
        """For the cancellation, at the second bucket."""

        def __init__(self, flag: Path) -> None:
            self.flag = flag

        @asynccontextmanager
        async def sending(self, engine: Any, version: str, pause: Any) -> Any:
            count = 0

            async def take(tensors: Any) -> None:
                nonlocal count
                count += 1
                while count == 2 and not self.flag.exists():  # another process writes it
                    await asyncio.sleep(0.01)

            yield take

    async def main(number: int, inside: bool, flag: Path) -> None:
        loop = asyncio.get_running_loop()

        def mapping(name: str, weight: Tensor) -> Any:
            if inside and name.endswith("linear_fc2.weight"):  # in the middle of a bucket
                loop.call_soon_threadsafe(task.cancel)
            return [(name, weight)]

        task = asyncio.create_task(
            send_weights(model.chunks, None, version="10", mapping=mapping, by=Waits(flag), bucket_bytes=20_000)
        )
        if rank == number and not inside:
            await anyio.wait_all_tasks_blocked()
            task.cancel()
        if rank == number:
            flag.touch()
        await task

    for number, inside in ((3, False), (0, False), (0, True)):
        flag = folder / f"cancelled {number} {inside}"
        kind: Any = asyncio.CancelledError if rank == number else WeightError
        if number and rank != number:  # that rank has done its part
            asyncio.run(main(number, inside, flag))
            continue
        with pytest.raises(kind, match="" if rank == number else "rank 0: CancelledError"):
            asyncio.run(main(number, inside, flag))
    send(model, None, "10", folder)  # and the ranks still go side by side


def nothing_in_a_bucket(folder: Path) -> None:
    """What a mapping leaves out never reaches the way to the engine, which may not know what to do with nothing."""
    model = Model()
    seen: list[int] = []

    class Counts:
        @asynccontextmanager
        async def sending(self, engine: Any, version: str, pause: Any) -> Any:
            async def take(tensors: Any) -> None:
                seen.append(len(tensors))

            yield take

    def norms(name: str, weight: Tensor) -> Any:
        return [(name, weight)] if name == "decoder.final_layernorm.weight" else []

    send(model, None, "11", folder, mapping=norms, by=Counts(), bucket_bytes=1)
    assert seen == ([1] if dist.get_rank() == 0 else [])
    with pytest.raises(ValueError, match="the model chunks hold no parameters"):
        asyncio.run(send_weights([], None, version="11", mapping=norms, by=Counts()))


def parts_that_do_not_fit(folder: Path) -> None:
    model = Model(tp=2)
    if dist.get_rank() == 1:
        weight = model.chunks[0].decoder.layers[1].mlp.linear_fc2.weight
        weight.data = weight.data[:, :-1]
    with pytest.raises(WeightError, match=r"decoder.layers.1.mlp.linear_fc2.weight: its parts do not fit together"):
        next(named_weights(model.chunks, lambda name, weight: []))
    with pytest.raises(WeightError, match=r"its parts do not fit together"):
        send(model, None, "9", folder)
    send(Model(tp=2), None, "9", folder)  # and the ranks still go side by side


CASES: dict[str, Callable[[Path], None]] = {
    "one rank": lambda folder: beside_transformers(folder),
    "tp2": lambda folder: beside_transformers(folder, tp=2),
    "tp4, fewer query groups": lambda folder: beside_transformers(folder, tp=4),
    "pp2": lambda folder: beside_transformers(folder, pp=2, layers=4),
    "tp2 pp2": lambda folder: beside_transformers(folder, tp=2, pp=2),
    "tp2 pp2 tied": lambda folder: beside_transformers(folder, tp=2, pp=2, tied=True),
    "tied": lambda folder: beside_transformers(folder, tied=True),
    "pp2 vpp2": lambda folder: beside_transformers(folder, pp=2, vpp=2, layers=4),
    "tp2 biases": lambda folder: beside_transformers(folder, tp=2, bias=True),
    "tp2 norms of queries and keys": lambda folder: beside_transformers(folder, tp=2, qk_norm=True),
    "ep2 experts": lambda folder: beside_transformers(folder, ep=2, experts=4, qk_norm=True),
    "ep2 pp2 experts": lambda folder: beside_transformers(folder, ep=2, pp=2, experts=4, qk_norm=True),
    "etp2 experts": lambda folder: beside_transformers(folder, etp=2, experts=4, qk_norm=True),
    "buckets": buckets_are_bounded,
    "checkpoint": one_checkpoint,
    "failures": failures_reach_all_ranks,
    "cancelled": cancelled_anywhere_no_rank_waits,
    "empty buckets": nothing_in_a_bucket,
    "parts": parts_that_do_not_fit,
}


def main(arguments: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    take_the_cpu_for_a_gpu()
    let_experts_run()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    run_cases(CASES, arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
