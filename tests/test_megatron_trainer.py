from __future__ import annotations

import importlib.util
import json
import math
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: rolloutbus[megatron]")

from torch.autograd import gradcheck  # noqa: E402

from backends.megatron import losses  # noqa: E402
from backends.megatron.config import ConfigError, check_config  # noqa: E402
from backends.megatron.log_probs import kept_tokens, log_probs_and_entropy  # noqa: E402
from backends.megatron.objective import Objective  # noqa: E402
from backends.megatron.plan import ParallelLayout  # noqa: E402
from tests import megatron_worker  # noqa: E402
from tests.megatron_ranks import run_on_ranks  # noqa: E402

# Real megatron-core: the processes of `megatron_worker.py`


@cache
def ran(world: int, file: Path) -> list[dict[str, str | None]]:
    """What went wrong in each case, per rank."""
    run_on_ranks(world, "tests.megatron_worker", file)
    found: list[dict[str, str | None]] = json.loads(file.read_bytes())
    return found


with_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs megatron-core: make test-megatron"
)


@with_megatron
@pytest.mark.parametrize(
    ("world", "case"),
    [pytest.param(world, name, id=name) for world in (1, 2, 4) for name, *_ in megatron_worker.cases(world)],
)
def test_with_megatron_core(world: int, case: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    for rank, found in enumerate(ran(world, tmp_path_factory.getbasetemp() / f"megatron-{world}.json")):
        assert found[case] is None, f"rank {rank}: {found[case]}"


@with_megatron
def test_the_demo() -> None:
    printed = run_on_ranks(2, "examples.megatron.sort_digits", "--rollouts", "2").splitlines()
    assert [line[:24] for line in printed if line.startswith("rollout ")] == [
        "rollout 0: kept 16/16 of",
        "rollout 1: kept 16/16 of",
    ]


# Log-probabilities


def logits(rows: int = 5, width: int = 7, seed: int = 0) -> Any:
    made = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    return made.requires_grad_()


TARGETS = torch.tensor([0, 6, 3, 3, 1])


def test_log_probs_and_entropy_are_those_of_torch() -> None:
    own = logits()
    log_p = (own / 0.7).log_softmax(-1)
    expected = log_p.gather(-1, TARGETS[:, None])[:, 0], losses.entropy(own / 0.7)
    found = log_probs_and_entropy(own, TARGETS, temperature=0.7)
    torch.testing.assert_close(found, expected)
    weights = torch.linspace(-1, 1, 5, dtype=torch.float64)
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            torch.autograd.grad((value * weights).sum(), own, retain_graph=True),
            torch.autograd.grad((other * weights).sum(), own, retain_graph=True),
        )


def test_their_gradients_are_those_of_finite_differences() -> None:
    assert gradcheck(lambda x: log_probs_and_entropy(x, TARGETS, temperature=1.3), logits())
    kept = torch.ones(5, 7, dtype=torch.bool)
    kept[:, 2] = kept[1, 4] = False
    assert gradcheck(lambda x: log_probs_and_entropy(x, TARGETS, kept=kept), logits())


def test_the_logits_stay_as_they_are() -> None:
    own = logits()
    before = own.detach().clone()
    torch.autograd.grad(torch.stack(log_probs_and_entropy(own, TARGETS)).sum(), own)
    assert torch.equal(own, before)


def test_half_precision_is_computed_in_float32() -> None:
    own = logits().detach().bfloat16().requires_grad_()
    found, entropy = log_probs_and_entropy(own, TARGETS)
    assert found.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(found, own.float().log_softmax(-1).gather(-1, TARGETS[:, None])[:, 0])
    (gradient,) = torch.autograd.grad(found.sum(), own)
    assert gradient.dtype == torch.bfloat16


def test_a_token_that_is_ruled_out() -> None:
    own = torch.tensor([[0.0, -math.inf, 0.0, -math.inf]], dtype=torch.float64, requires_grad=True)
    found, entropy = log_probs_and_entropy(own, torch.tensor([2]))
    torch.testing.assert_close(torch.stack([found, entropy])[:, 0], torch.tensor([-math.log(2), math.log(2)]).double())
    (gradient,) = torch.autograd.grad((found + entropy).sum(), own)
    assert gradient.tolist() == [[-0.5, 0, 0.5, 0]]


def test_no_rows() -> None:
    own = torch.zeros(0, 7, requires_grad=True)
    found, entropy = log_probs_and_entropy(own, torch.zeros(0, dtype=torch.int64))
    (gradient,) = torch.autograd.grad(found.sum() + entropy.sum(), own)
    assert gradient.shape == (0, 7)


def test_kept_tokens() -> None:
    kept = kept_tokens(torch.tensor([1, 2, 0]), torch.tensor([0, 2, 2, 3]), torch.tensor([2, 3, 1]), 4)
    assert kept.int().tolist() == [[0, 1, 1, 0], [0, 0, 0, 1], [1, 1, 0, 0]]


# Options of the loss


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"clip": 0.0}, "clip is 0"),
        ({"dual_clip": 1.0}, "dual_clip is 1"),
        ({"policy": "gspo", "dual_clip": 3.0}, "policy 'gspo' has no dual_clip"),
        ({"policy": "gspo", "clip_high": -1.0}, "clip_high is -1"),
        ({"policy": "cispo"}, "policy 'cispo' needs clip_high"),
        ({"policy": "cispo", "clip_high": 0.2, "clip_low": 0.0}, "clip_low is 0"),
        ({"policy": "reinforce", "clip": 0.2}, "policy 'reinforce' has no clip"),
        ({"importance_cap": 0.0}, "cap is 0"),
        ({"kl_coefficient": -0.1}, "kl_coefficient is -0.1"),
        ({"entropy_coefficient": math.nan}, "entropy_coefficient is nan"),
        ({"kl_coefficient": math.inf}, "kl_coefficient is inf, it must be a number of at least 0"),
        ({"kl_coefficient": "0.1"}, "kl_coefficient is a str, it must be a number"),
        ({"clip": torch.tensor(0.2)}, "clip is a Tensor, it must be a number"),
        ({"policy": "grpo"}, "policy is 'grpo', it must be one of 'ppo', 'gspo', 'cispo', 'reinforce'"),
        ({"policy": ["ppo"]}, "policy is .*'ppo'.*, it must be one of"),
        ({"kl": "k4"}, "kl is 'k4', it must be one of 'k1', 'k2', 'k3'"),
        ({"kl_in": "advantage"}, "kl_in is 'advantage', it must be one of"),
    ],
)
def test_an_objective_out_of_range(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Objective(**options)


def test_what_an_objective_needs() -> None:
    assert Objective().needs == {"advantage", "old_log_probs"}
    assert Objective(policy="reinforce").needs == {"advantage"}
    assert Objective(policy="reinforce", kl_coefficient=0.1).needs == {"advantage", "reference_log_probs"}
    assert "old_log_probs" in Objective(policy="reinforce", kl_coefficient=0.1, kl_in="reward").needs
    assert "rollout_log_probs" in Objective(importance_cap=2.0).needs


# Configurations

PLAIN = SimpleNamespace(
    variable_seq_lengths=True,
    num_moe_experts=None,
    tensor_model_parallel_size=1,
    sequence_parallel=False,
    moe_token_dispatcher_type="alltoall",
    batch_p2p_comm=True,
    deallocate_pipeline_outputs=False,
    moe_router_load_balancing_type="aux_loss",
    moe_aux_loss_coeff=0.0,
    moe_z_loss_coeff=None,
    moe_expert_capacity_factor=None,
    moe_router_enable_expert_bias=False,
    moe_flex_dispatcher_backend="deepep",
    expert_model_parallel_size=1,
    mtp_num_layers=None,
    overlap_moe_expert_parallel_comm=False,
    hybrid_context_parallel=False,
)


def check(
    layout: ParallelLayout | None = None, pp: int = 1, chunks: int = 1, padded: bool = False, **fields: Any
) -> None:
    config = SimpleNamespace(**{**vars(PLAIN), **fields})
    check_config(config, layout or ParallelLayout(), pp=pp, chunks=chunks, gloo=True, padded=padded)


ALIGNED = ParallelLayout(tp=2)
HYBRIDEP = {
    "num_moe_experts": 4,
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "hybridep",
    "expert_model_parallel_size": 2,
}


FOLLOWS = {
    "num_moe_experts": 4,
    "moe_enable_routing_replay": True,
    "moe_router_fusion": False,
    "cuda_graph_impl": "none",
}

GRAPHS = {"cuda_graph_impl": "transformer_engine"}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"pp": 2, "variable_seq_lengths": False}, "set variable_seq_lengths=True"),
        ({"num_moe_experts": 4, "moe_token_dispatcher_type": "allgather"}, "moe_token_dispatcher_type='alltoall'"),
        ({"pp": 2, "chunks": 2}, "activations are taken for gradients"),
        ({"pp": 2, "deallocate_pipeline_outputs": True}, "gloo still reads a tensor that was sent"),
        ({"num_moe_experts": 4, "layout": ALIGNED, "moe_aux_loss_coeff": 0.01}, "moe_aux_loss_coeff not 0"),
        ({"num_moe_experts": 4, "layout": ALIGNED, "moe_aux_loss_coeff": [0.0, 0.1]}, "moe_aux_loss_coeff not 0"),
        ({"num_moe_experts": 4, "padded": True, "moe_z_loss_coeff": 1e-3}, "moe_z_loss_coeff is set"),
        ({"num_moe_experts": 4, "padded": True, "moe_expert_capacity_factor": 1.0}, "capacity_factor is set"),
        ({"num_moe_experts": 4, "padded": True, "moe_expert_rank_capacity_factor": 2.0}, "rank_capacity_factor is set"),
        ({"num_moe_experts": 4, "padded": True, "moe_router_enable_expert_bias": True}, "expert_bias is True"),
        ({**HYBRIDEP, "layout": ParallelLayout(dp=2)}, "set moe_flex_dispatcher_backend='deepep'"),
        ({**FOLLOWS, "moe_router_fusion": True}, "set moe_router_fusion=False"),
        ({**FOLLOWS, "moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn chooses experts by itself"),
        (
            {**FOLLOWS, "moe_router_load_balancing_type": ["aux_loss", "quantile_balancing"]},
            "quantile_balancing chooses",
        ),
        ({**FOLLOWS, "moe_expert_capacity_factor": 1.0}, "set moe_expert_capacity_factor=None"),
        ({**FOLLOWS, "moe_expert_rank_capacity_factor": 2.0}, "set moe_expert_rank_capacity_factor=None"),
        ({**FOLLOWS, "cuda_graph_impl": "local", "cuda_graph_scope": ["attn"]}, "as they were when it was captured"),
        ({**FOLLOWS, **GRAPHS, "cuda_graph_scope": []}, "set cuda_graph_impl='none'"),
        ({**FOLLOWS, **GRAPHS, "cuda_graph_scope": ["attn", "moe_router"]}, "set cuda_graph_impl='none'"),
        ({**FOLLOWS, **GRAPHS, "cuda_graph_modules": ["moe"]}, "or 'transformer_engine' with"),
        ({**FOLLOWS, "cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}, "set cuda_graph_impl='none'"),
        ({"num_moe_experts": 4, "tensor_model_parallel_size": 2}, "with sequence_parallel=True only"),
        ({"mtp_num_layers": 1}, "multi-token prediction needs labels"),
        ({"overlap_moe_expert_parallel_comm": True}, "schedule plan"),
        ({"hybrid_context_parallel": True}, "hybrid_context_parallel"),
    ],
)
def test_configurations_that_compute_something_else_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        check(**options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"variable_seq_lengths": False},
        {"pp": 2, "chunks": 2, "batch_p2p_comm": False},
        {"pp": 4, "chunks": 2},
        {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.01},
        {"num_moe_experts": 4, "padded": True},
        {**HYBRIDEP, "layout": ParallelLayout(dp=2), "moe_hybridep_pad_uneven_dispatch_inputs": True},
        {**HYBRIDEP, "layout": ParallelLayout(cp=2)},
        FOLLOWS,
        {**FOLLOWS, **GRAPHS, "cuda_graph_scope": [SimpleNamespace(name="attn")]},
        {**FOLLOWS, **GRAPHS, "cuda_graph_modules": ["attn"], "cuda_graph_scope": None},
        {"num_moe_experts": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True},
        {**FOLLOWS, "moe_enable_routing_replay": False, "moe_router_fusion": True, "cuda_graph_impl": "local"},
        {**HYBRIDEP, "layout": ParallelLayout(dp=2), "expert_model_parallel_size": 1},
        {**HYBRIDEP, "layout": ParallelLayout(dp=2), "moe_flex_dispatcher_backend": "deepep"},
        {"num_moe_experts": 4, "padded": True, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.01},
    ],
)
def test_configurations_that_are_fine(options: dict[str, Any]) -> None:
    check(**options)
