"""What `test_megatron_trainer.py` runs: `MegatronTrainer` over real megatron-core on a CPU, in one process per rank.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.megatron_worker FILE

It writes a JSON object: for each case what went wrong on each rank, or null. The process groups of one layout follow
those of another in the same processes, since starting them takes longest.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from random import Random
from typing import Any

import anyio
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from backends.megatron import deep_ep
from backends.megatron.config import ConfigError
from backends.megatron.losses import Aggregation
from backends.megatron.objective import Objective, Terms
from backends.megatron.packing import BatchError, MicroBatch, pack
from backends.megatron.plan import SampleTooLong, TooFewSamples, transformer_flops
from backends.megatron.stateless_adam import use_stateless_adam
from backends.megatron.stream import RankFailed
from backends.megatron.trainer import MegatronTrainer, forward
from eventbus import Batch, Group, Sample, TrainResult
from eventbus.columns import LogProbs, LossMask, Tokens
from eventbus.group import Summary
from tests import megatron_model as tiny
from tests.megatron_ranks import error_of
from tests.megatron_shims import core, let_experts_run, take_the_cpu_for_a_gpu

TEMPERATURE = 0.8
CAP = 96


@dataclass(frozen=True)
class Layout:
    world: int
    sizes: dict[str, int] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    distributed: bool = False
    """With the distributed optimizer, which overlaps its collectives."""

    @property
    def moe(self) -> bool | tuple[bool, ...]:
        found: bool | tuple[bool, ...] = self.config.get("moe", False)
        return found


def sizes(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1) -> dict[str, int]:
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "expert_model_parallel_size": ep,
    }


VIRTUAL = {"virtual_pipeline_model_parallel_size": 2}

LAYOUTS = {
    "one": Layout(1),
    "one-per-token": Layout(1, config={"calculate_per_token_loss": True}),
    "dp2": Layout(2),
    "dp2-distributed": Layout(2, distributed=True),
    "tp2": Layout(2, sizes(tp=2)),
    "tp2-sp": Layout(2, sizes(tp=2), {"sequence_parallel": True}),
    "pp2": Layout(2, sizes(pp=2)),
    "pp2-vpp2": Layout(2, sizes(pp=2) | VIRTUAL),
    "cp2": Layout(2, sizes(cp=2)),
    "cp2-per-token": Layout(2, sizes(cp=2), {"calculate_per_token_loss": True}),
    "ep2": Layout(2, sizes(ep=2), {"moe": True}),
    "pp4": Layout(4, sizes(pp=4)),
    "tp2-cp2": Layout(4, sizes(tp=2, cp=2)),
    "tp2-sp-pp2": Layout(4, sizes(tp=2, pp=2), {"sequence_parallel": True}),
    "dp2-pp2-distributed": Layout(4, sizes(pp=2), distributed=True),
}

FOLLOWS: dict[str, Any] = {"moe": True, "moe_enable_routing_replay": True}
AGAIN = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

REPLAYING = {
    "one": Layout(1, config=FOLLOWS),
    "one-recomputing": Layout(1, config={**FOLLOWS, **AGAIN}),
    "one-partly-dense": Layout(1, config={**FOLLOWS, "moe": (False, True, False, True)}),
    "ep2": Layout(2, sizes(ep=2), FOLLOWS),
    "tp2-sp": Layout(2, sizes(tp=2), {**FOLLOWS, "sequence_parallel": True}),
    "cp2": Layout(2, sizes(cp=2), FOLLOWS),
    "pp2": Layout(2, sizes(pp=2), FOLLOWS),
    "pp2-recomputing": Layout(2, sizes(pp=2), {**FOLLOWS, **AGAIN}),
    "pp2-partly-dense": Layout(2, sizes(pp=2), {**FOLLOWS, "moe": (False, True, True, True)}),
    "pp2-vpp2": Layout(2, sizes(pp=2) | VIRTUAL, {**FOLLOWS, **AGAIN}),
    "pp2-ep2": Layout(
        4, sizes(pp=2, ep=2), {**FOLLOWS, "recompute_granularity": "selective", "recompute_modules": ["moe"]}
    ),
}
"""Layouts in which routers follow the record."""

MIXED = ("one-per-token", "cp2-per-token", "tp2-sp-pp2", "dp2-pp2-distributed")
"""Each a mixture of others, of which less is asked."""


# The batch


@cache
def samples(top_p: bool = False, routed: bool = False) -> list[Sample]:
    """Executions with several samples, masked tokens, one sample out of the loss; log-probs of another policy."""
    random, generator = Random(5), torch.Generator().manual_seed(5)
    policy = tiny.Plain(mixed(tiny.weights(), 1))
    made = []
    for index in range(12):
        response = random.randint(2, 24)
        sample = Sample(
            index=index,
            rollout_id=index - index % 3 // 2,
            tokens=Tokens(random.randrange(tiny.VOCABULARY) for _ in range(random.randint(1, 16) + response)),
            response_length=response,
            loss_mask=LossMask(random.choice([0, 1, 1, 1]) for _ in range(response)),
            train_metadata={"advantage": random.choice([-1.5, -0.5, 0.5, 2.0])},
            reward=float(index % 2),
            remove_sample=index == 4,
        )
        if top_p:
            kept = [[token, *random.sample(range(tiny.VOCABULARY), 5)] for token in sample.tokens[-response:]]
            sample.rollout_top_p_token_ids = [token for tokens in kept for token in tokens]
            sample.rollout_top_p_token_offsets = [6 * place for place in range(response + 1)]
        with torch.no_grad():
            sample.rollout_log_probs = LogProbs(predicted(policy, sample, TEMPERATURE)[0].tolist())
        if routed:  # not as the model would
            draws = torch.rand(len(sample.tokens) - 1, tiny.LAYERS, tiny.EXPERTS, generator=generator)
            sample.rollout_routed_experts = draws.topk(tiny.CHOSEN).indices.int().numpy()
        made.append(sample)
    return made


def mixed(weights: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Those of a policy nearby."""
    pattern = tuple(f"decoder.layers.{number}.mlp.router.weight" in weights for number in range(tiny.LAYERS))
    other = tiny.weights(any(pattern) and pattern, seed)
    return {name: value + 0.1 * (other[name] - value) for name, value in weights.items()}


def batch_of(samples: Sequence[Sample]) -> Batch:
    return Batch(3, [Group(0, "", [[sample] for sample in samples])], Summary(3))


# The same step in plain torch


@dataclass(frozen=True)
class Seen:
    """Of one sample, one value for each response token."""

    new: Tensor
    old: Tensor
    reference: Tensor
    rollout: Tensor
    entropy: Tensor
    advantage: float
    counted: Tensor


def predicted(policy: tiny.Plain, sample: Sample, temperature: float, follows: bool = True) -> tuple[Tensor, Tensor]:
    tokens = torch.tensor(sample.tokens.tolist())
    recorded = sample.rollout_routed_experts if follows else None
    experts = None if recorded is None else torch.as_tensor(recorded).long()
    logits = policy(tokens, experts)[sample.prompt_length - 1 : -1] / temperature
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    if sample.rollout_top_p_token_ids is not None:
        kept = torch.zeros_like(logits, dtype=torch.bool)
        kept.scatter_(-1, torch.tensor(sample.rollout_top_p_token_ids).view(len(logits), -1), True)
        log_p = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
    return log_p.gather(-1, tokens[sample.prompt_length :, None])[:, 0], entropy


def clipped(ratio: Tensor, advantage: float, low: float, high: float, most: float = math.inf) -> Tensor:
    loss = torch.maximum(-ratio * advantage, -ratio.clamp(1 - low, 1 + high) * advantage)
    return loss.clamp(max=-most * advantage) if advantage < 0 else loss


def k3(new: Tensor, other: Tensor) -> Tensor:
    return (other - new).exp() - 1 + new - other


def ppo(s: Seen) -> Tensor:
    return clipped((s.new - s.old).exp(), s.advantage, 0.1, 0.2, 1.2)


def gspo(s: Seen) -> Tensor:
    mean = (s.new - s.old)[s.counted].sum() / max(int(s.counted.sum()), 1)
    return clipped(mean.exp(), s.advantage, 0.02, 0.03).expand(len(s.new))


def cispo(s: Seen) -> Tensor:
    return -(s.new.detach() - s.old).exp().clamp(0.9, 1.1) * s.advantage * s.new


def kl_in_reward(s: Seen) -> Tensor:
    return -(s.advantage - 0.3 * (s.old - s.reference)[s.counted].sum()) * s.new


def everything(s: Seen) -> Tensor:
    weight = (s.old - s.rollout).exp().clamp(max=1.1)
    return ppo(s) * weight + 0.2 * k3(s.new, s.reference) - 0.05 * s.entropy


def own_loss(terms: Terms) -> Tensor:
    """No `Objective`: a function of one's own."""
    assert terms.batch.advantages is not None
    return -terms.batch.advantages * terms.log_probs.exp() - 0.1 * (terms.log_probs - terms.old_log_probs).square()


def own_loss_plain(s: Seen) -> Tensor:
    return -s.advantage * s.new.exp() - 0.1 * (s.new - s.old).square()


@dataclass(frozen=True)
class Case:
    loss: Any
    plain: Callable[[Seen], Tensor]
    aggregation: Aggregation
    recompute: bool = False
    reference: bool = False
    top_p: bool = False
    routed: bool = False

    def samples(self) -> list[Sample]:
        return samples(self.top_p, self.routed)


BOUNDS: dict[str, Any] = {"clip": 0.1, "clip_high": 0.2, "dual_clip": 1.2}

CASES = {
    "ppo": Case(Objective(**BOUNDS), ppo, "token"),
    "gspo": Case(Objective(policy="gspo", clip=0.02, clip_high=0.03), gspo, "sequence"),
    "cispo": Case(Objective(policy="cispo", clip_low=0.1, clip_high=0.1), cispo, "execution"),
    "reinforce-kl-in-reward": Case(
        Objective(policy="reinforce", kl="k1", kl_coefficient=0.3, kl_in="reward"),
        kl_in_reward,
        "token",
        reference=True,
    ),
    "everything": Case(
        Objective(**BOUNDS, importance_cap=1.1, kl_coefficient=0.2, entropy_coefficient=0.05),
        everything,
        "sequence",
        recompute=True,
        reference=True,
    ),
    "own": Case(own_loss, own_loss_plain, "execution"),
    "top-p": Case(Objective(**BOUNDS), ppo, "token", top_p=True),
}
CASES |= {f"routed {kind}": replace(case, routed=True) for kind, case in CASES.items() if kind in ("ppo", "everything")}
KINDS = [kind for kind, case in CASES.items() if not case.routed]


class Reference:
    """Steps of plain torch: a pass over all samples, one by one, with nothing of packing or plans."""

    def __init__(self, weights: Mapping[str, Tensor], case: Case) -> None:
        self.policy = tiny.Plain(weights)
        self.other = tiny.Plain(mixed(weights, 2))
        self.case = case

    def old(self, samples: Sequence[Sample]) -> dict[int | None, Tensor]:
        with torch.no_grad():
            return {sample.index: predicted(self.policy, sample, TEMPERATURE)[0] for sample in samples}

    def backward(self, samples: Sequence[Sample], old: Mapping[int | None, Tensor]) -> dict[str, float]:
        """Sets gradients; what the metrics are to be."""
        for weight in self.policy.weights.values():
            weight.grad = None
        counted = sum(sample.loss_tokens for sample in samples)
        total = torch.zeros(())
        means = dict.fromkeys(("ratio", "kl", "entropy"), 0.0)
        for sample in samples:
            seen = self._seen(sample, old)
            values = self.case.plain(seen)[seen.counted].sum()
            siblings = [other for other in samples if other.rollout_id == sample.rollout_id]
            total = (
                total
                + values
                / {
                    "token": counted,
                    "sequence": max(sample.loss_tokens, 1) * len(samples),
                    "execution": max(sum(other.loss_tokens for other in siblings), 1)
                    * len({other.rollout_id for other in samples}),
                }[self.case.aggregation]
            )
            with torch.no_grad():
                means["kl"] += float(k3(seen.old, seen.new)[seen.counted].sum()) / counted
                means["entropy"] += float(seen.entropy[seen.counted].sum()) / counted
        total.backward()  # type: ignore[no-untyped-call]
        gradients = [weight.grad for weight in self.policy.weights.values() if weight.grad is not None]
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        return {"loss": total.item(), "grad_norm": norm, **{name: means[name] for name in ("kl", "entropy")}}

    def _seen(self, sample: Sample, old: Mapping[int | None, Tensor]) -> Seen:
        new, entropy = predicted(self.policy, sample, TEMPERATURE)
        with torch.no_grad():
            reference, _ = predicted(self.other, sample, TEMPERATURE, follows=False)
        rollout = torch.tensor(list(sample.rollout_log_probs or ()))
        mask = torch.tensor(list(sample.loss_mask or ()), dtype=torch.bool) & (not sample.remove_sample)
        before = old[sample.index] if self.case.recompute else rollout
        assert sample.train_metadata is not None
        return Seen(new, before, reference, rollout, entropy, sample.train_metadata["advantage"], mask)


# What is built


class Run:
    """A trainer in one layout, with the weights of the plain model."""

    def __init__(self, layout: Layout, case: Case = CASES["ppo"], optimizer: Any = None, **options: Any) -> None:
        self.layout, self.case = layout, case
        config = tiny.config(**layout.config)
        wrap: dict[str, Any] = {}
        if layout.distributed:
            wrap = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
        self.weights = tiny.weights(layout.moe)
        self.chunks = tiny.build(config, self.weights, **wrap)
        self.optimizer = tiny.optimizer(
            self.chunks,
            use_distributed_optimizer=layout.distributed,
            overlap_param_gather=layout.distributed,
            **optimizer or {},
        )
        if case.reference:
            options["reference"] = tiny.build(tiny.config(**layout.config), mixed(self.weights, 2))
        if "micro_batch_size" not in options:
            options = ({"micro_batch_size": 2} if options.get("padded") else {"max_tokens_per_gpu": CAP}) | options
        self.trainer = MegatronTrainer(
            self.chunks,
            self.optimizer,
            loss=case.loss,
            aggregation=case.aggregation,
            temperature=TEMPERATURE,
            old_log_probs="recompute" if case.recompute else "rollout",
            **options,
        )

    def train(self, batch: Batch) -> TrainResult:
        return anyio.run(self.trainer.train, batch)

    def check_gradients(self, expected: Mapping[str, Tensor]) -> None:
        """What the optimizer was given is the part of `expected` that is this rank's."""
        largest = max(float(value.abs().max()) for value in expected.values())
        for chunk in self.chunks:
            names = {parameter: name for name, parameter in tiny.named(chunk, self.trainer.config)}
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                whole = torch.zeros_like(buffer.grad_data)
                for parameter, (start, end, _) in buffer.param_index_map.items():
                    whole[start:end] = tiny.part_of(expected[names[parameter]], parameter).flatten()
                for bucket in buffer.buckets:
                    found = bucket.grad_data
                    wanted = whole[bucket.offset : bucket.offset + len(found)]
                    if self.layout.distributed:  # of which each data-parallel rank has only its shard
                        size, rank = dist.get_world_size(chunk.dp_cp_group), dist.get_rank(chunk.dp_cp_group)
                        found, wanted = found.chunk(size)[rank], wanted.chunk(size)[rank]
                    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * largest)

    def check_weights(self, expected: Mapping[str, Tensor]) -> None:
        for chunk in self.chunks:
            for name, parameter in tiny.named(chunk, self.trainer.config):
                torch.testing.assert_close(
                    parameter.detach(), tiny.part_of(expected[name].detach(), parameter), rtol=1e-5, atol=1e-5
                )


@contextmanager
def running(*args: Any, **options: Any) -> Iterator[Run]:
    run = Run(*args, **options)
    try:
        yield run
    finally:
        run.trainer.close()


# The cases


@cache
def one_pass(kind: str, moe: bool | tuple[bool, ...]) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and gradients of plain torch."""
    case = CASES[kind]
    reference = Reference(tiny.weights(moe), case)
    metrics = reference.backward(case.samples(), reference.old(case.samples()))
    return metrics, {name: w.grad for name, w in reference.policy.weights.items() if w.grad is not None}


def same_gradients(layout: Layout, kind: str, **options: Any) -> None:
    metrics, gradients = one_pass(kind, layout.moe)
    batch = options.pop("batch", CASES[kind].samples())
    with running(layout, CASES[kind], **options) as run:
        result = run.train(batch_of(batch))
        for name, value in metrics.items():
            assert result.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-7), (name, result.metrics)
        run.check_gradients(gradients)


def however_it_is_cut(layout: Layout) -> None:
    shuffled = Random(1).sample(samples(), len(samples()))
    flops = transformer_flops(parameters=1e4, layers=tiny.LAYERS, hidden_size=tiny.HIDDEN)
    ways: list[dict[str, Any]] = [
        {"max_tokens_per_gpu": 40, "cost": flops, "batch": shuffled},
        {"micro_batch_size": 3},
        {"max_tokens_per_gpu": 1000},
        {"max_tokens_per_gpu": 70, "token_multiple": 16},
        {"micro_batch_size": 1},
    ]
    for options in ways if layout in (LAYOUTS["one"], LAYOUTS["dp2"], LAYOUTS["cp2"]) else ways[:2]:
        same_gradients(layout, "gspo", **options)


def several_steps(layout: Layout) -> None:
    """Each step of the plan moves the weights, and what a batch recomputes is of those before the first."""
    case = CASES["everything"]
    adam = {"lr": 0.02, "betas": (0.9, 0.999), "eps": 1e-3, "weight_decay": 0.0}
    reference = Reference(tiny.weights(layout.moe), case)
    plain = torch.optim.AdamW(list(reference.policy.weights.values()), **adam)  # type: ignore[arg-type]
    with running(layout, case, {"lr": 0.02, "adam_eps": 1e-3}, global_batch_size=3) as run:
        for version in (1, 2):
            old = reference.old(samples())
            expected = []
            shards = run.trainer.shards(batch_of(samples()))
            for steps in zip(*(shard.steps for shard in shards), strict=True):
                together = [sample for step in steps for part in step.micro_batches for sample in part]
                expected.append(reference.backward(together, old))
                plain.step()
            result = run.train(batch_of(samples()))
            assert result.metrics["steps"] == len(expected) == 3
            for name in expected[0]:
                mean = sum(step[name] for step in expected) / len(expected)
                assert result.metrics[name] == pytest.approx(mean, rel=1e-4, abs=1e-6), (name, result.metrics)
            run.check_weights(reference.policy.weights)
            assert result.weight_version == str(version)


def ranks_agree(layout: Layout) -> None:
    with running(layout, CASES["everything"]) as run:
        result = run.train(batch_of(samples()))
        own = {name: f"{value:.12g}" for name, value in result.metrics.items()}
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        assert all(other == own for other in every), every
        names = "loss ratio clip_fraction kl entropy reference_kl rollout_kl grad_norm reward tokens steps"
        assert set(result.metrics) == set(names.split())
        assert result.metrics["reward"] == 0.5
        assert result.metrics["tokens"] == sum(sample.loss_tokens for sample in samples())
        # a shard of one's own is as good as the whole batch
        shard = run.trainer.shards(batch_of(samples()))[run.trainer.dp_rank]
        again = anyio.run(run.trainer.train, shard)
        assert again.metrics == pytest.approx(result.metrics, rel=1e-6)
        assert again.weight_version == "2"


def changed(index: int, **fields: Any) -> Batch:
    """The batch, of which one sample has something wrong."""
    made = [sample.copy() for sample in samples()]
    for name, value in fields.items():
        setattr(made[index], name, value)
    return batch_of(made)


def bad_batches(layout: Layout) -> None:
    """Each is refused by every rank alike."""
    nan = math.nan
    response = samples()[5].response_length
    wrong: list[tuple[type[Exception], str, Batch]] = [
        (BatchError, "batch 3 has no samples", batch_of([])),
        (BatchError, "sample 5: it has no tokens", changed(5, tokens=Tokens())),
        (BatchError, "sample 5: it has no prompt tokens", changed(5, response_length=len(samples()[5].tokens))),
        (BatchError, "sample 5: loss_mask has 1 values", changed(5, loss_mask=LossMask([1]))),
        (BatchError, "sample 5: rollout_log_probs has 2 values", changed(5, rollout_log_probs=LogProbs([-1, -1]))),
        (BatchError, "sample 5: rollout_log_probs is nan", changed(5, rollout_log_probs=LogProbs([nan] * response))),
        (BatchError, "sample 5: it has no rollout_log_probs", changed(5, rollout_log_probs=None)),
        (BatchError, "sample 5: advantage is nan", changed(5, train_metadata={"advantage": nan})),
        (BatchError, "sample 5: its reward is nan", changed(5, reward=nan)),
        (BatchError, "sample 5: its reward is nan", changed(5, reward=torch.tensor(nan))),
        (BatchError, "sample 5: its reward is {'math': inf}", changed(5, reward={"math": math.inf})),
        (BatchError, "sample 5: its reward is 1000", changed(5, reward=10**400)),
        (BatchError, "sample 5: train_metadata is a list", changed(5, train_metadata=[1.0])),
        (BatchError, "sample 5: a column does not pack", changed(5, tokens=["a"] * 9)),
        (BatchError, "no token of the 12 samples .* drop such groups", batch_of([_removed(s) for s in samples()])),
        (
            BatchError,
            "sample 5: token id 64 is not in the model's vocabulary of 64",
            changed(5, tokens=Tokens([64] * 40)),
        ),
        (BatchError, "sample 5: token id -1 is not", changed(5, tokens=Tokens([-1] * 40))),
        (BatchError, "sample 5: 129 tokens exceed the model's context of 128", changed(5, tokens=Tokens([1] * 129))),
        (BatchError, "which GPTModel does not take", changed(5, multimodal_train_inputs={"pixels": torch.ones(1, 2)})),
        (BatchError, "has input_ids, which GPT", changed(5, multimodal_train_inputs={"input_ids": torch.ones(1, 2)})),
        (BatchError, "sample 5: it has rollout_routed_experts", changed(5, rollout_routed_experts=[[[0]]])),
        (BatchError, "no sample has advantage, .*GroupAdvantage", batch_of([_bare(s) for s in samples()])),
        (SampleTooLong, "sample 5 takes 120 tokens", changed(5, tokens=Tokens([1] * 120))),
        (TooFewSamples, "1 samples", batch_of(samples()[:1])),
    ]
    with running(layout, max_tokens_per_gpu=48) as run:
        parts = run.trainer.layout.dp * run.trainer.layout.vpp_group
        for error, match, batch in wrong:
            if error is TooFewSamples and parts == 1:
                continue
            with pytest.raises(error, match=match) as found:
                run.train(batch)
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, str(found.value))
            assert len(set(every)) == 1
        assert run.train(batch_of(samples())).weight_version == "1"


def what_one_rank_cannot_do(layout: Layout) -> None:
    """The others hear of it, and all go on together: a bad batch, another batch, a loss or a reference that fails."""
    last = dist.get_rank() == dist.get_world_size() - 1
    wrong = [sample.copy() for sample in samples()]
    wrong[5].reward = math.nan
    cases: list[tuple[str, type[Exception], Batch]] = [
        ("BatchError: sample 5: its reward is nan", BatchError, batch_of(wrong)),
        ("the ranks were given different batches", RankFailed, batch_of(samples()[:-2])),
        ("TypeError: MegatronTrainer.train takes a Batch or a Shard, not a str", TypeError, "batch"),  # type: ignore[list-item]
    ]
    raising: list[str] = []

    def fails(terms: Terms) -> Tensor:
        if "loss" in raising:
            raise KeyError("a loss of one's own")
        return -terms.log_probs

    def fails_too(batch: MicroBatch) -> Tensor:
        if "reference" in raising:
            raise OSError("no such teacher")
        return torch.full((len(batch.rows),), -4.0)

    with running(layout, Case(fails, ppo, "token"), max_tokens_per_gpu=48, reference=fails_too) as run:
        for words, kind, other in cases:
            with pytest.raises(kind if last else RankFailed) as caught:
                run.train(other if last else batch_of(samples()))
            assert words.removeprefix("" if kind is RankFailed or not last else f"{kind.__name__}: ") in str(
                caught.value
            )
        # the loss runs on the last stage, of which the last rank is one
        for what, words in {
            "loss": 'KeyError: "a loss of one\'s own"',
            "reference": "OSError: no such teacher",
        }.items():
            raising[:] = [what] if last else []
            with pytest.raises((RankFailed, KeyError, OSError)) as caught:
                run.train(batch_of(samples()))
            found = f"{type(caught.value).__name__}: {caught.value}"
            assert found == (words if last else f"RankFailed: rank {dist.get_world_size() - 1} failed: {words}")
        raising.clear()
        run.check_weights(run.weights)
        assert run.train(batch_of(samples())).weight_version == "1"


def _removed(sample: Sample) -> Sample:
    removed = sample.copy()
    removed.remove_sample = True
    return removed


def _bare(sample: Sample) -> Sample:
    bare = sample.copy()
    bare.train_metadata = None
    return bare


def gradients_that_are_not_finite(layout: Layout) -> None:
    """One token of one sample is enough, on whichever rank it is."""

    def broken(terms: Terms) -> Tensor:
        return terms.log_probs * (terms.batch.targets == samples()[0].tokens[-1]) * 1e38 * 1e38

    case = Case(broken, ppo, "token")
    with running(layout, case, {"lr": 0.1}) as run:
        with pytest.raises(FloatingPointError, match="a gradient of weights '0' is not finite"):
            run.train(batch_of(samples()))
        run.check_weights(run.weights)
        run.trainer.loss = Objective()
        assert run.train(batch_of(samples())).weight_version == "1"


# In one process


def the_event_loop_is_free() -> None:
    """The loss waits for the event loop, and would do so for ever if training kept it."""
    alive = threading.Event()
    seen: list[tuple[threading.Thread, bool]] = []

    def waits(terms: Terms) -> Tensor:
        assert alive.wait(60)
        seen.append((threading.current_thread(), torch.is_grad_enabled()))
        return -terms.log_probs

    async def main(trainer: MegatronTrainer) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(trainer.train, batch_of(samples()))
            await anyio.wait_all_tasks_blocked()
            alive.set()
        with torch.no_grad():  # which belongs to this thread
            await trainer.train(batch_of(samples()))
        assert await trainer.call(threading.current_thread) is seen[0][0]

    with running(LAYOUTS["one"], Case(waits, ppo, "token")) as run:
        for backend in ("asyncio", "trio"):
            alive.clear()
            anyio.run(main, run.trainer, backend=backend)
    assert {thread.name for thread, _ in seen} == {"megatron_0"}
    assert all(enabled for _, enabled in seen)


def cancelled_it_ends_the_batch() -> None:
    alive = threading.Event()
    versions = []

    def waits(terms: Terms) -> Tensor:
        assert alive.wait(60)
        return -terms.log_probs

    async def main(trainer: MegatronTrainer) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(trainer.train, batch_of(samples()))
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
            alive.set()
        versions.append(trainer.version)

    with running(LAYOUTS["one"], Case(waits, ppo, "token")) as run:
        for backend in ("asyncio", "trio"):
            alive.clear()
            anyio.run(main, run.trainer, backend=backend)
    assert versions == [1, 2]


def asyncios_own_cancellation_ends_the_batch_too() -> None:
    alive = threading.Event()

    def waits(terms: Terms) -> Tensor:
        assert alive.wait(60)
        return -terms.log_probs

    async def main(trainer: MegatronTrainer) -> None:
        task = asyncio.create_task(trainer.train(batch_of(samples())))
        await anyio.wait_all_tasks_blocked()
        for _ in range(2):  # whoever is in a hurry
            task.cancel()
            await anyio.wait_all_tasks_blocked()
        assert not task.done()
        alive.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    with running(LAYOUTS["one"], Case(waits, ppo, "token")) as run:
        asyncio.run(main(run.trainer))
        assert run.trainer.version == 1


def calls_run_in_the_order_in_which_they_were_made() -> None:
    found: list[int] = []

    async def main(trainer: MegatronTrainer) -> None:
        async with anyio.create_task_group() as group:
            for number in range(50):
                group.start_soon(trainer.call, found.append, number)

    with running(LAYOUTS["one"]) as run:
        anyio.run(main, run.trainer)
        assert found == list(range(50))
    for again in range(2):  # closing it twice is no harm
        if again:
            run.trainer.close()
        with pytest.raises(RuntimeError, match="this MegatronTrainer is closed"):
            run.train(batch_of(samples()))


def plain_sequences_and_other_numbers() -> None:
    """What a training loop may have put into samples after the stages."""
    expected, _ = one_pass("ppo", False)
    plain = [sample.copy() for sample in samples()]
    for sample in plain:
        sample.tokens = torch.tensor(sample.tokens.tolist())  # type: ignore[assignment]
        sample.loss_mask = list(sample.loss_mask or ())  # type: ignore[assignment]
        sample.rollout_log_probs = list(sample.rollout_log_probs or ())  # type: ignore[assignment]
        sample.train_metadata = {"advantage": torch.tensor((sample.train_metadata or {})["advantage"])}
        sample.reward = torch.tensor(sample.reward)
    with running(LAYOUTS["one"]) as run:
        metrics = run.train(batch_of(plain)).metrics
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        assert metrics["reward"] == 0.5
        for sample in plain:
            sample.reward = {"math": 1.0}
        assert "reward" not in run.train(batch_of(plain)).metrics


def in_float16() -> None:
    """A step that overflows is left out, and the loss scale falls until one fits."""
    half = {"fp16": True, "params_dtype": torch.float16}
    layout = Layout(1, config={**half, "pipeline_dtype": torch.float16}, distributed=True)
    scale = {"initial_loss_scale": 2.0**20, "min_loss_scale": 1.0, "hysteresis": 1, "loss_scale_window": 100}
    expected, _ = one_pass("everything", False)
    with running(layout, CASES["everything"], {**half, **scale, "lr": 0.0}) as run:
        results = [run.train(batch_of(samples())).metrics for _ in range(8)]
    assert "grad_norm" not in results[0]
    for name, value in expected.items():
        assert results[-1][name] == pytest.approx(value, rel=0.05, abs=1e-3), (name, results[-1])


def the_scheduler_counts_executions() -> None:
    with running(LAYOUTS["one"], optimizer={"lr": 0.1, "min_lr": 0.0}, global_batch_size=3, version=41) as run:
        run.trainer.scheduler = core("optimizer_param_scheduler", "OptimizerParamScheduler")(
            run.optimizer,
            init_lr=0.0,
            max_lr=0.1,
            min_lr=0.0,
            lr_warmup_steps=0,
            lr_decay_steps=20,
            lr_decay_style="linear",
            start_wd=0.0,
            end_wd=0.0,
            wd_incr_steps=20,
            wd_incr_style="constant",
        )
        result = run.train(batch_of(samples()))
        executions = len({sample.rollout_id for sample in samples()})
        assert result.metrics["steps"] == 3
        assert result.metrics["lr"] == pytest.approx(0.1 * (1 - executions / 20))
        assert result.weight_version == "42"


def the_next_step_is_packed_meanwhile() -> None:
    """In its loss each step waits until the micro-batch of the one after it is there."""
    condition, packed, steps = threading.Condition(), [0], [0]

    def noted(*args: Any, **options: Any) -> MicroBatch:
        found = pack(*args, **options)
        with condition:
            packed[0] += 1
            condition.notify_all()
        return found

    def waits(terms: Terms) -> Tensor:
        steps[0] += 1
        with condition:
            assert condition.wait_for(lambda: packed[0] >= min(steps[0] + 1, 3), 120)
        return -terms.log_probs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("backends.megatron.trainer.pack", noted)
        with running(LAYOUTS["one"], Case(waits, ppo, "token"), global_batch_size=3, max_tokens_per_gpu=1000) as run:
            assert run.train(batch_of(samples())).metrics["steps"] == 3
    assert (packed, steps) == ([3], [3])


def a_forward_and_a_reference_of_ones_own() -> None:
    """The model is given more than `forward` gives it, and the reference is no model."""
    shapes = []

    def replaying(model: Any, batch: MicroBatch) -> Tensor:
        assert batch.routed_experts is not None
        shapes.append(batch.routed_experts.shape[1:])
        return forward(model, batch)

    recorded = [sample.copy() for sample in samples()]
    for sample in recorded:
        sample.rollout_routed_experts = torch.zeros(len(sample.tokens) - 1, 4, 2, dtype=torch.int32)
    case = Case(Objective(kl_coefficient=0.1), ppo, "token")
    layout = Layout(1, config={"moe": True})
    options = {"forward": replaying, "reference": lambda batch: torch.full((len(batch.rows),), -4.0)}
    with running(layout, case, **options) as run:
        result = run.train(batch_of(recorded))
        assert result.metrics["reference_kl"] > 0
    assert shapes
    assert set(shapes) == {(4, 2)}


def records_that_do_not_fit(layout: Layout) -> None:
    """Each is refused by every rank alike, before a router sees it; and nothing of a record stays behind a batch."""
    good = samples(routed=True)
    record = good[5].rollout_routed_experts
    moe = [number for number in range(tiny.LAYERS) if layout.moe is True or layout.moe[number]]  # type: ignore[index]
    twice, beyond, below = record.copy(), record.copy(), record.copy()
    twice[3, moe[-1]] = 2
    beyond[0, moe[0], 1] = tiny.EXPERTS
    below[0, moe[0], 1] = -1
    wrong: list[tuple[str, Any]] = [
        (f"names an expert twice for token 3 in layer {moe[-1]}: \\[2, 2\\]", twice),
        ("names expert 4; a layer of the model has 0 to 3", beyond),
        ("names expert -1; a layer", below),
        (f"has 1 experts in {len(moe)} layers for each token; the model has 2", record[:, moe, :1]),
        ("has 2 experts in 1 layers for each token; the model has 2 in 4 layers", record[:, :1]),
        ("is torch.float32, it must be a plain array", record.astype("float32")),
        ("is torch.complex64, it must be a plain array", record.astype("complex64")),
        ("is torch.bool, it must be a plain array", record.astype("bool")),
        ("is torch.int32, it must be a plain array", torch.as_tensor(record).to_sparse()),
        ("is torch.int32, it must be a plain array", torch.as_tensor(record).to("meta")),
        (r"has the shape \(\d+, 4\), it must be", record[..., 0]),
        (r"has the shape \(\), it must be", 3),
        (r"has the shape \(1, \d+, 4, 2\), it must be", record[None]),
        (r"has the shape \(\d+, 4, 2\), it must be", record[1:]),
        ("names expert 8388608", torch.zeros(len(record), 4, 2, dtype=torch.int32) + 2**23),
    ]

    def batch(value: Any) -> Batch:
        made = [sample.copy() for sample in good]
        made[5].rollout_routed_experts = value
        return batch_of(made)

    with running(layout, max_tokens_per_gpu=96) as run:
        for match, value in wrong:
            with pytest.raises(BatchError, match=f"sample 5: rollout_routed_experts {match}"):
                run.train(batch(value))
        with pytest.raises(BatchError, match="no sample has rollout_routed_experts, which routing replay needs: have"):
            run.train(batch_of(samples()))
        for version, kind in enumerate(("uint8", "uint16", "int64"), 1):
            made = [sample.copy() for sample in good]
            for sample in made:
                sample.rollout_routed_experts = sample.rollout_routed_experts.astype(kind)
            assert run.train(batch_of(made)).weight_version == str(version)
        for follower in run.trainer._routing._here():
            assert (follower._record, list(follower.again), follower._backward) == (None, [], False)
    if layout.moe is not True:  # a record of the layers that have experts is as good as one of all
        one_of_them = [sample.copy() for sample in good]
        for sample in one_of_them:
            sample.rollout_routed_experts = sample.rollout_routed_experts[:, moe]
        same_gradients(layout, "routed ppo", batch=one_of_them)


def records_are_kept_for_layers_that_are_computed_again() -> None:
    block = {**AGAIN, "recompute_method": "block"}
    for again, kept in (({}, [0, 0, 0, 0]), (AGAIN, [1, 1, 1, 1]), (block, [1, 0, 0, 0])):
        seen: list[list[int]] = []
        followers: list[Any] = []

        def loss(terms: Terms, followers: list[Any] = followers, seen: list[list[int]] = seen) -> Tensor:
            seen.append([len(follower.again) for follower in followers])
            return -terms.log_probs

        with running(Layout(1, config={**FOLLOWS, **again}), Case(loss, ppo, "token", routed=True)) as run:
            followers += run.trainer._routing._here()
            run.train(batch_of(samples(routed=True)))
        assert len(seen) > 1
        assert all(lengths == kept for lengths in seen), (again, seen)


def what_the_model_does_to_records() -> None:
    """Other tokens, layers computed again in another way, a failure: none of them lets routers choose by themselves."""
    layout = REPLAYING["one-recomputing"]

    def with_more(model: Any, batch: MicroBatch) -> Tensor:
        more = [torch.cat([values, values[:, :1]], 1) for values in (batch.tokens, batch.position_ids)]
        assert batch.cu_seqlens is not None
        seqlens = torch.cat([batch.cu_seqlens, batch.cu_seqlens[-1:] + 1])
        return forward(model, replace(batch, tokens=more[0], position_ids=more[1], cu_seqlens=seqlens))

    with running(layout, CASES["routed ppo"], forward=with_more) as run:
        with pytest.raises(RuntimeError, match=r"layer 0 is given \d+ tokens, and the record has \d+: with routing"):
            run.train(batch_of(samples(routed=True)))

    def again_with_gradient(model: Any, batch: MicroBatch) -> Tensor:
        found: Tensor = checkpoint(forward, model, batch, use_reentrant=False)
        return found

    with running(REPLAYING["one"], CASES["routed ppo"], forward=again_with_gradient) as run:
        with pytest.raises(RuntimeError, match="layer 0 is computed again in the backward pass, but was not computed"):
            run.train(batch_of(samples(routed=True)))

    fails = [3]

    def out_of_memory(model: Any, batch: MicroBatch) -> Tensor:
        fails[0] -= 1
        if not fails[0]:
            raise MemoryError
        return forward(model, batch)

    metrics, gradients = one_pass("routed ppo", True)
    with running(layout, CASES["routed ppo"], forward=out_of_memory) as run:
        with pytest.raises(MemoryError):
            run.train(batch_of(samples(routed=True)))
        assert run.train(batch_of(samples(routed=True))).metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
        run.check_gradients(gradients)


def models_that_cannot_follow() -> None:
    with running(Layout(1, config={"moe": True})) as run:
        run.trainer.config.moe_enable_routing_replay = True
        with pytest.raises(ConfigError, match="was not when the model was built"):
            MegatronTrainer(run.chunks, run.optimizer, max_tokens_per_gpu=CAP)
    with running(LAYOUTS["one"], forward=lambda *args: pytest.fail("the model runs")) as run:
        with pytest.raises(BatchError, match="sample 0: it has rollout_routed_experts, and the model has no experts"):
            run.train(batch_of(samples(routed=True)))


def routers_left_to_themselves_choose_otherwise() -> None:
    """So the cases above show that they follow."""
    (followed, gradients), (alone, others) = (one_pass(kind, True) for kind in ("routed ppo", "ppo"))
    for name in ("loss", "kl", "entropy", "grad_norm"):
        assert followed[name] != pytest.approx(alone[name], rel=1e-4), name
    for name, gradient in gradients.items():
        assert not torch.allclose(gradient, others[name], rtol=0.01, atol=0), name


def deep_ep_is_guarded() -> None:
    with running(LAYOUTS["one"]):
        assert deep_ep._patch is not None
    assert deep_ep._patch is None


def in_bfloat16() -> None:
    half = {"bf16": True, "params_dtype": torch.bfloat16}
    layout = Layout(1, config={**half, "pipeline_dtype": torch.bfloat16}, distributed=True)
    metrics, _ = one_pass("everything", False)
    with running(layout, CASES["everything"], {**half, "lr": 0.1}) as run:
        result = run.train(batch_of(samples()))
        for name, value in metrics.items():
            assert result.metrics[name] == pytest.approx(value, rel=0.05, abs=1e-3), (name, result.metrics)


def a_loss_that_is_not_one_per_token() -> None:
    for wrong, match in (
        (lambda terms: terms.log_probs.sum(), r"a tensor of the shape \[\], it must be one value for each token"),
        (lambda terms: (terms.log_probs, {}), "the loss returned a tuple"),
    ):
        with running(LAYOUTS["one"], Case(wrong, ppo, "token")) as run, pytest.raises(TypeError, match=match):
            run.train(batch_of(samples()))


class NeedsMore:
    needs = frozenset({"advantage", "value"})

    def __call__(self, terms: Terms) -> Tensor:
        raise NotImplementedError


def options_that_are_refused() -> None:
    case = CASES["ppo"]
    for options, match in (
        ({"micro_batch_size": 2}, "either micro_batch_size or max_tokens_per_gpu"),
        ({"temperature": 0.0}, "temperature is 0"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"max_tokens_per_gpu": 0}, "MegatronTrainer: max_tokens_per_gpu is 0"),
        ({"max_tokens_per_gpu": 96.5}, "max_tokens_per_gpu is 96.5, it must be an int"),
        ({"global_batch_size": 0}, "MegatronTrainer: global_batch_size is 0"),
        ({"padded": True}, "max_tokens_per_gpu would not hold: give micro_batch_size"),
        ({"version": "step-3"}, "version is 'step-3', it must be the number of batches"),
        ({"version": -1}, "version is -1"),
        ({"loss": Objective(kl_coefficient=0.1)}, "give reference="),
        ({"loss": Objective(importance_cap=2.0)}, "set old_log_probs='recompute'"),
        ({"old_log_probs": "new"}, "old_log_probs is 'new'"),
        ({"aggregation": "batch"}, "aggregation is 'batch'"),
        ({"loss": NeedsMore()}, "the loss needs value, of advantage, old_log_probs, "),
    ):
        with running(LAYOUTS["one"], case) as run, pytest.raises(ValueError, match=match):
            chosen: dict[str, Any] = {"max_tokens_per_gpu": CAP, **options}
            MegatronTrainer(run.chunks, run.optimizer, **chosen)
    with running(LAYOUTS["one"], case) as run:
        for wrong, match in (
            ({"loss": "ppo"}, "loss is a str, it must be a function"),
            ({"forward": 3}, "forward is a int"),
            ({"cost": 3}, "cost is a int"),
            ({"reference": run.chunks[0]}, "reference is a DistributedDataParallel, it must be a list"),
            ({"reference": []}, "reference is a list, it must be a list of model chunks"),
        ):
            with pytest.raises(TypeError, match=match):
                MegatronTrainer(run.chunks, run.optimizer, max_tokens_per_gpu=CAP, **wrong)
        for model, optimizer, match in (
            (run.chunks[0], run.optimizer, "model is a DistributedDataParallel, it must be a list"),
            ([], run.optimizer, "it must be a list of model chunks"),
            (run.chunks, None, "the optimizer is a NoneType, it must be what megatron"),
        ):
            with pytest.raises(TypeError, match=match):
                MegatronTrainer(model, optimizer, max_tokens_per_gpu=CAP)
        with pytest.raises(TypeError, match=r"must be in a megatron\.core\.distributed"):
            MegatronTrainer([run.chunks[0].module], run.optimizer, max_tokens_per_gpu=CAP)
        with pytest.raises(ConfigError, match=r"2 model chunks, .*=None"):
            MegatronTrainer(run.chunks * 2, run.optimizer, max_tokens_per_gpu=CAP)
        run.chunks[0].ddp_config.reuse_grad_buf_for_mxfp8_param_ag = True
        with pytest.raises(ConfigError, match="gradients' buffer, and this one does not: set it to False"):
            MegatronTrainer(run.chunks, run.optimizer, max_tokens_per_gpu=CAP)


# In two processes


def a_stateless_adam() -> None:
    """In the distributed optimizer: each step is that of a new Adam, and what is saved can be loaded."""
    layout = LAYOUTS["dp2-distributed"]
    reference = Reference(tiny.weights(), CASES["ppo"])
    with running(layout, optimizer={"lr": 0.01, "adam_eps": 1e-3}) as run:
        use_stateless_adam(run.optimizer)
        for version in (1, 2):
            reference.backward(samples(), {})
            torch.optim.AdamW(reference.policy.weights.values(), lr=0.01, eps=1e-3, weight_decay=0.0).step()
            assert run.train(batch_of(samples())).weight_version == str(version)
            run.check_weights(reference.policy.weights)
            saved = run.optimizer.state_dict()
            assert saved["optimizer"]["param_groups"][0]["lr"] == 0.01
            assert "params" not in saved["optimizer"]["param_groups"][0]
            run.optimizer.load_state_dict(saved)
            assert not any(part.optimizer.state for part in run.optimizer.chained_optimizers)


REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lengths are refused": ("pp2", "set variable_seq_lengths=True", {"variable_seq_lengths": False}),
    "freed outputs are refused": ("pp2", "gloo still reads", {"deallocate_pipeline_outputs": True}),
    "batched messages are refused": (
        "pp2-vpp2",
        "activations are taken for gradients",
        {"batch_p2p_comm": True, "overlap_p2p_comm": False},
    ),
}


def refused(layout: Layout, match: str, **config: Any) -> None:
    with pytest.raises(ConfigError, match=match), running(replace(layout, config={**layout.config, **config})):
        pass


def main() -> None:
    warnings.simplefilter("ignore")
    take_the_cpu_for_a_gpu()
    let_experts_run()
    dist.init_process_group("gloo")
    found: dict[str, str | None] = {}
    only = os.environ.get("ONLY", "")  # for whoever looks into one of them
    standing: Layout | None = None
    for name, layout, run in cases(dist.get_world_size()):
        if only not in name:
            continue
        if layout is not standing:
            tiny.initialise(**layout.sizes)
            standing = layout
        started = time.perf_counter()
        found[name] = error_of(run)
        print(name, found[name], f"{time.perf_counter() - started:.2f} s", flush=True)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w") as file:
            json.dump(every, file)
    dist.barrier()
    dist.destroy_process_group()


def cases(world: int) -> Iterator[tuple[str, Layout, Callable[[], None]]]:
    """What so many processes run, by name. Nothing runs here."""
    for name, layout in LAYOUTS.items():
        if layout.world != world:
            continue
        for kind in ("ppo", "gspo") if name in MIXED else KINDS:
            yield f"{name} {kind} packed", layout, partial(same_gradients, layout, kind)
        for kind in KINDS if name in ("one", "dp2", "cp2") else ("gspo", "everything"):
            yield f"{name} {kind} padded", layout, partial(same_gradients, layout, kind, padded=True)
        yield f"{name} {_title(several_steps)}", layout, partial(several_steps, layout)
        if name in MIXED:
            continue
        for case in (however_it_is_cut, ranks_agree, bad_batches, gradients_that_are_not_finite):
            yield f"{name} {_title(case)}", layout, partial(case, layout)
    for name, layout in REPLAYING.items():
        if layout.world != world:
            continue
        yield f"{name} routed ppo padded", layout, partial(same_gradients, layout, "routed ppo", padded=True)
        yield f"{name} routed everything packed", layout, partial(same_gradients, layout, "routed everything")
        yield f"{name} {_title(records_that_do_not_fit)}", layout, partial(records_that_do_not_fit, layout)
    alone = (
        the_event_loop_is_free,
        cancelled_it_ends_the_batch,
        asyncios_own_cancellation_ends_the_batch_too,
        calls_run_in_the_order_in_which_they_were_made,
        plain_sequences_and_other_numbers,
        the_scheduler_counts_executions,
        the_next_step_is_packed_meanwhile,
        a_forward_and_a_reference_of_ones_own,
        records_are_kept_for_layers_that_are_computed_again,
        what_the_model_does_to_records,
        models_that_cannot_follow,
        routers_left_to_themselves_choose_otherwise,
        deep_ep_is_guarded,
        in_bfloat16,
        in_float16,
        a_loss_that_is_not_one_per_token,
        options_that_are_refused,
    )
    for lone in alone if world == 1 else ():
        yield _title(lone), LAYOUTS["one"], lone
    for name in ("dp2-distributed", "tp2-sp", "pp2-vpp2", "cp2", "tp2-cp2"):
        if LAYOUTS[name].world == world:
            yield (
                f"{name} {_title(what_one_rank_cannot_do)}",
                LAYOUTS[name],
                partial(what_one_rank_cannot_do, LAYOUTS[name]),
            )
    if world == 2:
        yield _title(a_stateless_adam), LAYOUTS["dp2-distributed"], a_stateless_adam
    for what, (name, match, config) in REFUSED.items() if world == 2 else ():
        yield what, LAYOUTS[name], partial(refused, LAYOUTS[name], match, **config)


def _title(case: Callable[..., None]) -> str:
    return case.__name__.replace("_", " ")


if __name__ == "__main__":
    main()
