"""Weights on their way from megatron-core to an engine.

What needs several ranks runs in `megatron_weights_worker.py`, all of it in one start of four processes; what needs an
SGLang server in `megatron_to_sglang.py`.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends.megatron.weights import Broadcast, Checkpoint, SharedMemory, llama_names, named_weights
from tests import sglang_servers
from tests.megatron_ranks import run_on_ranks

HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
LAYOUTS = [
    "one rank",
    "tp2",
    "tp4, fewer query groups",
    "pp2",
    "tp2 pp2",
    "tp2 pp2 tied",
    "tied",
    "pp2 vpp2",
    "tp2 biases",
    "tp2 norms of queries and keys",
    "ep2 experts",
    "ep2 pp2 experts",
    "etp2 experts",
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not HAS_MEGATRON:
        pytest.skip("needs megatron-core: pip install 'rolloutbus[megatron]'")
    folder = tmp_path_factory.mktemp("weights")
    run_on_ranks(4, "tests.megatron_weights_worker", folder)
    return folder


@pytest.mark.parametrize("case", ["buckets", "checkpoint", "failures", "cancelled", "empty buckets", "parts"])
def test_on_four_ranks(ran: Path, case: str) -> None:
    error = json.loads((ran / "found.json").read_text()).get(case, "it did not run")
    assert error is None, error


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transformers_says_the_same(ran: Path, layout: str) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    error = json.loads((ran / "found.json").read_text()).get(layout, "it did not run")
    assert error is None, error
    said = load_file(ran / layout / "said.safetensors")
    model = AutoModelForCausalLM.from_pretrained(ran / layout / "hf", dtype=torch.float32)
    with torch.no_grad():
        logits = model(said["tokens"]).logits
    assert logits.std() > 0.1
    torch.testing.assert_close(said["logits"], logits, atol=1e-5, rtol=1e-5)


@pytest.mark.sglang
@pytest.mark.skipif(
    sglang_servers.PYTHON is None,
    reason="needs a real SGLang: set ROLLOUTBUS_SGLANG_PYTHON to the interpreter of an environment that has it",
)
@pytest.mark.skipif(not HAS_MEGATRON, reason="needs megatron-core: pip install 'rolloutbus[megatron]'")
def test_a_real_server_generates_with_the_weights_of_a_megatron_model(tmp_path: Path) -> None:
    models = sglang_servers.make_models(tmp_path / "models")
    with sglang_servers.server(models[0]) as server:
        run_on_ranks(2, "tests.megatron_to_sglang", server.url, models[0], tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found) == [
        "broadcast", "broadcast again", "shared memory", "checkpoint", "after a refusal", "after that"
    ]  # fmt: skip
    assert max(found.values()) < 1e-4


# Names


def config(**options: Any) -> Any:
    return SimpleNamespace(
        **{
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "kv_channels": 3,
            "gated_linear_unit": True,
            "layernorm_zero_centered_gamma": False,
            **options,
        }
    )


def named(name: str, weight: torch.Tensor, **options: Any) -> dict[str, Any]:
    return {new: tensor.tolist() for new, tensor in llama_names(config(**options), vocab_size=5)(name, weight)}


def counted(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def test_queries_keys_and_values_lie_in_their_groups() -> None:
    """Heads 0 and 1 share the first key and value, heads 2 and 3 the second."""
    rows = counted(24, 1)
    found = named("decoder.layers.3.self_attention.linear_qkv.weight", rows)
    prefix = "model.layers.3.self_attn"
    flat = {name: [int(row[0]) for row in tensor] for name, tensor in found.items()}
    assert flat == {
        f"{prefix}.q_proj.weight": [*range(0, 6), *range(12, 18)],
        f"{prefix}.k_proj.weight": [6, 7, 8, 18, 19, 20],
        f"{prefix}.v_proj.weight": [9, 10, 11, 21, 22, 23],
    }
    biases = named("decoder.layers.3.self_attention.linear_qkv.bias", counted(24))
    assert biases[f"{prefix}.k_proj.bias"] == [6, 7, 8, 18, 19, 20]


@pytest.mark.parametrize(
    ("name", "renamed"),
    [
        ("mlp.linear_fc1.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
        ("mlp.linear_fc2.weight", ["mlp.down_proj.weight"]),
        ("mlp.experts.linear_fc1.weight17", ["mlp.experts.17.gate_proj.weight", "mlp.experts.17.up_proj.weight"]),
        ("mlp.experts.local_experts.5.linear_fc2.weight", ["mlp.experts.5.down_proj.weight"]),
        (
            "mlp.shared_experts.linear_fc1.weight",
            ["mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"],
        ),
        ("mlp.shared_experts.gate_weight", ["mlp.shared_expert_gate.weight"]),
        ("mlp.router.weight", ["mlp.gate.weight"]),
        ("mlp.linear_fc1.layer_norm_weight", ["post_attention_layernorm.weight"]),
        ("pre_mlp_layernorm.weight", ["post_attention_layernorm.weight"]),
        ("self_attention.linear_qkv.layer_norm_weight", ["input_layernorm.weight"]),
        ("self_attention.linear_proj.weight", ["self_attn.o_proj.weight"]),
        ("self_attention.q_layernorm.weight", ["self_attn.q_norm.weight"]),
    ],
)
def test_names_within_a_layer(name: str, renamed: list[str]) -> None:
    assert list(named(f"decoder.layers.12.{name}", counted(4, 2))) == [f"model.layers.12.{new}" for new in renamed]


def test_the_gate_comes_first() -> None:
    found = named("decoder.layers.0.mlp.linear_fc1.weight", counted(4, 1))
    assert found["model.layers.0.mlp.gate_proj.weight"] == [[0], [1]]


def test_the_vocabulary_loses_its_padding() -> None:
    assert named("embedding.word_embeddings.weight", counted(8, 1)) == {
        "model.embed_tokens.weight": [[0], [1], [2], [3], [4]]
    }
    with pytest.raises(ValueError, match=r"output_layer.weight has 4 rows, fewer than vocab_size=5"):
        named("output_layer.weight", counted(4, 1))


def test_norms_centered_at_zero_are_shifted() -> None:
    norms = ["decoder.final_layernorm.weight", "decoder.layers.0.input_layernorm.weight"]
    found = [named(name, counted(2), layernorm_zero_centered_gamma=True) for name in norms]
    assert found == [{"model.norm.weight": [1, 2]}, {"model.layers.0.input_layernorm.weight": [1, 2]}]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("decoder.layers.0.self_attention.linear_q_down_proj.weight", {}),
        ("decoder.layers.0.mlp.linear_fc1.weight", {"gated_linear_unit": False}),
        ("mtp.layers.0.enorm.weight", {}),
    ],
)
def test_a_weight_without_a_name_is_an_error(name: str, options: Any) -> None:
    with pytest.raises(ValueError, match=f"llama_names has no name for {name} .4, 2.: give a mapping of your own"):
        named(name, counted(4, 2), **options)


# What is refused


def test_a_bucket_holds_something() -> None:
    with pytest.raises(ValueError, match="bucket_bytes is 0, it must be at least 1"):
        next(named_weights([], lambda name, weight: [], bucket_bytes=0))


@pytest.mark.parametrize("option", ["workers", "ranks_per_worker", "timeout"])
def test_a_broadcast_needs_somebody(option: str) -> None:
    with pytest.raises(ValueError, match=f"Broadcast: {option} is 0, it must be more than 0"):
        Broadcast(**{option: 0})  # type: ignore[arg-type]


@pytest.mark.asyncio
@pytest.mark.parametrize("way", [Broadcast(), SharedMemory()])
async def test_an_engine_is_needed(way: Any) -> None:
    with pytest.raises(ValueError, match=f"{type(way).__name__} needs the engine on rank 0"):
        async with way.sending(None, "7", "retract"):
            pass


@pytest.mark.asyncio
@pytest.mark.parametrize("version", ["", "a/b", ".."])
async def test_a_version_names_a_folder(tmp_path: Path, version: str) -> None:
    with pytest.raises(ValueError, match="is no name of a folder"):
        async with Checkpoint(tmp_path, like=None).sending(None, version, "retract"):
            pass


@pytest.mark.asyncio
async def test_an_unfinished_checkpoint_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError):
        async with Checkpoint(tmp_path).sending(None, "7", "retract") as send:
            await send([("weight", counted(2))])
            raise ConnectionError
    assert [path.name for path in tmp_path.iterdir()] == ["7.part"]
