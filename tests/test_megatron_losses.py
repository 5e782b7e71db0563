from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventbus import Sample
from eventbus.columns import LogProbs, LossMask, Tokens

pytest.importorskip("torch", reason="needs torch: rolloutbus[megatron] or [embedded]")

import torch
from torch import Tensor
from torch.autograd import gradcheck

from backends.megatron import losses
from backends.megatron.losses import Aggregation, Reduce, aggregate, denominator
from backends.megatron.packing import MicroBatch, StepTotals, pack, step_totals
from backends.megatron.plan import ParallelLayout, plan_microbatches

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 7
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


def numbers(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def logs(*ratios: float, grad: bool = False) -> Tensor:
    """Log-probabilities whose ratio to an old one of 1 is this."""
    return numbers(*map(math.log, ratios), grad=grad)


def gradient(value: Tensor, of: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(value.sum(), of, retain_graph=True, materialize_grads=True)
    return [round(number, 12) for number in found.tolist()]


def made(index: int, prompt: int, mask: Sequence[int], **fields: Any) -> Sample:
    random = Random(index)
    return Sample(
        index=index,
        tokens=Tokens(random.randrange(VOCABULARY) for _ in range(prompt + len(mask))),
        response_length=len(mask),
        loss_mask=LossMask(mask),
        rollout_log_probs=LogProbs(-3 * random.random() for _ in mask),
        train_metadata={"advantage": random.choice([-1.5, -0.5, 0.0, 0.5, 2.0])},
        **({"rollout_id": index} | fields),
    )


def one_batch(*samples: Sample) -> MicroBatch:
    return pack(samples, ParallelLayout(), step_totals(samples))


# PPO


def test_ppo_by_hand() -> None:
    new = logs(1.1, 1.5, 0.5, 1.5, 0.5, 0.9, grad=True)
    advantages = numbers(2, 2, 2, -2, -2, -2)
    loss, ratio, clipped = losses.ppo(new, torch.zeros_like(new), advantages)
    torch.testing.assert_close(loss, numbers(-2.2, -2.4, -1.0, 3.0, 1.6, 1.8))
    torch.testing.assert_close(ratio, numbers(1.1, 1.5, 0.5, 1.5, 0.5, 0.9))
    assert clipped.tolist() == [False, True, False, False, True, False]
    # -A r where it is not clipped
    assert gradient(loss, new) == [-2.2, 0, -1.0, 3.0, 0, 1.8]
    assert not ratio.requires_grad


def test_clip_higher() -> None:
    loss, _, clipped = losses.ppo(logs(1.25, 1.5, 0.7), logs(1, 1, 1), numbers(1, 1, -1), clip=0.2, clip_high=0.28)
    torch.testing.assert_close(loss, numbers(-1.25, -1.28, 0.8))
    assert clipped.tolist() == [False, True, True]


def test_dual_clip() -> None:
    new = logs(2, 5, 5, 0.5, grad=True)
    advantages = numbers(-1, -1, 1, -1)
    loss, _, clipped = losses.ppo(new, torch.zeros_like(new), advantages, dual_clip=3)
    torch.testing.assert_close(loss, numbers(2, 3, -1.2, 0.8))
    assert clipped.tolist() == [False, True, True, True]
    assert gradient(loss, new) == [2, 0, 0, 0]


def test_on_policy_ppo_has_the_gradient_of_reinforce() -> None:
    new, advantages = numbers(-0.5, -2, -1, grad=True), numbers(1, -2, 0.5)
    ppo = losses.ppo(new, new.detach(), advantages).loss
    assert gradient(ppo, new) == gradient(losses.reinforce(new, advantages), new) == [-1, 2, -0.5]


@pytest.mark.parametrize("difference", [800.0, -800.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_log_probs_far_apart_give_finite_gradients(difference: float, advantage: float) -> None:
    new, old, advantages = numbers(0, grad=True), numbers(-difference), numbers(advantage)
    for loss in (
        losses.ppo(new, old, advantages, dual_clip=3).loss,
        losses.cispo(new, old, advantages, clip_high=0.2).loss,
        losses.kl(new, old, "k3"),
        losses.importance_weights(new, old) * new,
    ):
        assert loss.isfinite().all()
        assert all(map(math.isfinite, gradient(loss, new)))


# The other objectives


def test_gspo_by_hand() -> None:
    # log-ratios of 0.2 and 0.4 in the first sequence, the masked 9 not counted; -0.1 in the second
    batch = one_batch(made(0, 1, [1, 0, 1]), made(1, 1, [1]))
    new, old = numbers(0.2, 9, 0.4, -0.1, grad=True), torch.zeros(4, dtype=torch.float64)
    advantages = numbers(1, 1, 1, 2)
    loss, ratio, clipped = losses.gspo(new, old, advantages, batch, clip=0.5, clip_high=0.5)
    first, second = math.exp(0.3), math.exp(-0.1)
    torch.testing.assert_close(loss, numbers(-first, -first, -first, -2 * second))
    torch.testing.assert_close(ratio, numbers(first, first, first, second))
    assert not clipped.any()
    step = aggregate(loss, batch, "sequence")
    torch.testing.assert_close(step, numbers(-first - 2 * second)[0])
    torch.testing.assert_close(torch.autograd.grad(step, new)[0], numbers(-first / 2, 0, -first / 2, -2 * second))


def test_gspo_clips_whole_sequences() -> None:
    batch = one_batch(made(0, 1, [1, 1]), made(1, 1, [1, 1]))
    new, old = logs(1, 1.002, 1, 1, grad=True), torch.zeros(4, dtype=torch.float64)
    loss, _, clipped = losses.gspo(new, old, numbers(1, 1, 1, 1), batch)
    assert clipped.tolist() == [True, True, False, False]
    torch.testing.assert_close(loss, numbers(-1.0004, -1.0004, -1, -1))
    assert gradient(aggregate(loss, batch, "sequence"), new) == [0, 0, -0.5, -0.5]


def test_a_sequence_out_of_the_loss_has_no_gspo_gradient() -> None:
    batch = one_batch(made(0, 1, [0, 0]), made(1, 1, [1]))
    new = numbers(1, 2, 0, grad=True)
    loss = losses.gspo(new, torch.zeros(3, dtype=torch.float64), numbers(1, 1, 1), batch).loss
    assert gradient(aggregate(loss, batch, "sequence"), new) == [0, 0, -1]


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    new, old = logs(1.1, 3, 0.1, 3, grad=True), logs(1, 1, 1, 1)
    advantages = numbers(1, 1, 1, -1)
    loss, ratio, clipped = losses.cispo(new, old, advantages, clip_high=1)
    assert gradient(loss, new) == [-1.1, -2, -0.1, 2]
    torch.testing.assert_close(loss, numbers(-1.1, -2, -0.1, 2) * new)
    torch.testing.assert_close(ratio, numbers(1.1, 3, 0.1, 3))
    assert clipped.tolist() == [False, True, False, True]


def test_cispo_with_a_lower_bound() -> None:
    new = logs(0.1, grad=True)
    assert gradient(losses.cispo(new, logs(1), numbers(1), clip_low=0.2, clip_high=1).loss, new) == [-0.8]


@pytest.mark.parametrize(
    ("objective", "options", "match"),
    [
        (losses.ppo, {"clip": 0}, "clip is 0"),
        (losses.ppo, {"clip_high": -1}, "clip_high is -1"),
        (losses.ppo, {"dual_clip": 1}, "dual_clip is 1, it must be more than 1"),
        (losses.cispo, {"clip_high": 0}, "clip_high is 0"),
        (losses.cispo, {"clip_high": 1, "clip_low": math.nan}, "clip_low is nan"),
    ],
)
def test_bounds_out_of_range(objective: Callable[..., Any], options: dict[str, float], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        objective(numbers(0), numbers(0), numbers(1), **options)


# KL, importance weights, entropy


def test_kl_by_hand() -> None:
    new, reference = logs(0.5, 0.25, grad=True), logs(0.25, 0.5)
    half = math.log(2)
    torch.testing.assert_close(losses.kl(new, reference, "k1"), numbers(half, -half))
    torch.testing.assert_close(losses.kl(new, reference, "k2"), numbers(half**2 / 2, half**2 / 2))
    torch.testing.assert_close(losses.kl(new, reference), numbers(0.5 - 1 + half, 2 - 1 - half))
    assert gradient(losses.kl(new, reference, "k3"), new) == [0.5, -1]


def test_what_kl_is_on_average() -> None:
    """Over all tokens of a small vocabulary, weighted by the policy: what the docstring says of each."""
    logits, other = numbers(0.3, -1, 0.8, grad=True), numbers(-0.5, 0.2, 0.4)
    policy, reference = logits.log_softmax(-1), other.log_softmax(-1)
    weight = policy.exp().detach()
    exact = (policy.exp() * (policy - reference)).sum()
    backward = (reference.exp() * (reference - policy)).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((weight * losses.kl(policy, reference, kind)).sum(), exact)
    k1, k2, k3 = (gradient(weight * losses.kl(policy, reference, kind), logits) for kind in ("k1", "k2", "k3"))
    assert k1 == pytest.approx([0, 0, 0])
    assert k2 == pytest.approx(gradient(exact, logits))
    assert k3 == pytest.approx(gradient(backward, logits))


def test_kl_in_the_reward_is_that_of_the_sequence() -> None:
    batch = one_batch(made(0, 1, [1, 0, 1]), made(1, 1, [1]))
    advantages = losses.kl_in_reward(numbers(1, 1, 1, -1), numbers(0.5, 7, 0.25, 2, grad=True), 0.1, batch)
    torch.testing.assert_close(advantages, numbers(0.925, 0.925, 0.925, -1.2))
    assert not advantages.requires_grad


def test_kl_in_the_reward_with_k1_has_the_gradient_of_the_kl() -> None:
    """REINFORCE with a reward of 0, averaged over all tokens that may come: the gradient of coefficient * KL."""
    logits, other = numbers(0.3, -1, 0.8, grad=True), numbers(-0.5, 0.2, 0.4)
    policy, reference = logits.log_softmax(-1), other.log_softmax(-1)
    batch = one_batch(*(made(index, 1, [1]) for index in range(3)))
    advantages = losses.kl_in_reward(torch.zeros(3), losses.kl(policy, reference, "k1"), 0.1, batch)
    loss = policy.exp().detach() * losses.reinforce(policy, advantages)
    exact = 0.1 * (policy.exp() * (policy - reference)).sum()
    assert gradient(loss, logits) == pytest.approx(gradient(exact, logits))


def test_an_unknown_kl() -> None:
    with pytest.raises(ValueError, match="kind is 'k4'"):
        losses.kl(numbers(0), numbers(0), "k4")  # type: ignore[arg-type]


def test_importance_weights_are_truncated() -> None:
    new = logs(0.5, 1, 3, grad=True)
    weights = losses.importance_weights(new, logs(1, 1, 1))
    torch.testing.assert_close(weights, numbers(0.5, 1, 2))
    assert not weights.requires_grad
    torch.testing.assert_close(losses.importance_weights(new, logs(1, 1, 1), cap=5), numbers(0.5, 1, 3))
    with pytest.raises(ValueError, match="cap is 0"):
        losses.importance_weights(new, new, cap=0)


def test_entropy_by_hand() -> None:
    rows = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, -math.inf, -math.inf]], dtype=torch.float64)
    rows.requires_grad_()
    found = losses.entropy(rows)
    torch.testing.assert_close(found, numbers(math.log(4), math.log(2)))
    (grad,) = torch.autograd.grad(found.sum(), rows)
    assert grad.tolist() == [[0] * 4] * 2  # both are at their maximum


def test_gradients_are_those_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    batch = one_batch(made(0, 2, [1, 0, 1]), made(1, 1, [1, 1]))
    old = -torch.rand(5, generator=generator, dtype=torch.float64)
    new = (old + 0.8 * (torch.rand(5, generator=generator, dtype=torch.float64) - 0.5)).requires_grad_()
    advantages = torch.randn(5, generator=generator, dtype=torch.float64)
    logits = torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: losses.ppo(x, old, advantages, dual_clip=1.3).loss, new)
    assert gradcheck(lambda x: losses.gspo(x, old, advantages, batch, clip=0.1, clip_high=0.2).loss, new)
    assert gradcheck(lambda x: losses.reinforce(x, advantages), new)
    assert gradcheck(lambda x: losses.kl(x, old, "k2") + losses.kl(x, old, "k3"), new)
    assert gradcheck(losses.entropy, logits)


# Aggregation


def test_aggregation_by_hand() -> None:
    samples = [made(0, 1, [1, 1, 0], rollout_id=4), made(1, 1, [1], rollout_id=4), made(2, 1, [1, 1], rollout_id=5)]
    batch, totals = one_batch(*samples), step_totals(samples)
    values = numbers(1, 2, 99, 4, 8, 16)
    assert aggregate(values, batch, "token").item() == 31
    assert aggregate(values, batch, "sequence").item() == 3 / 2 + 4 + 24 / 2
    assert aggregate(values, batch, "execution").item() == pytest.approx(7 / 3 + 24 / 2)
    assert [denominator(totals, by) for by in AGGREGATIONS] == [5, 3, 2]


def test_masked_values_do_not_matter() -> None:
    batch = one_batch(made(0, 1, [1, 0]))
    for by in AGGREGATIONS:
        assert aggregate(numbers(3, math.inf), batch, by).item() == 3


def test_a_rank_without_response_tokens_has_a_gradient_of_zero() -> None:
    samples = [made(0, 8, [1])]
    layout = ParallelLayout(cp=4)
    parts = [pack(samples, layout, step_totals(samples), cp_rank=rank) for rank in range(4)]
    empty = next(part for part in parts if not len(part.rows))
    table = torch.zeros(VOCABULARY, VOCABULARY, requires_grad=True)
    for by in AGGREGATIONS:
        loss = aggregate(log_probs_of(table, empty), empty, by)
        assert torch.autograd.grad(loss, table)[0].count_nonzero() == 0


def test_an_unknown_aggregation() -> None:
    batch = one_batch(made(0, 1, [1]))
    by: Any = "batch"
    with pytest.raises(ValueError, match="by is 'batch'"):
        aggregate(numbers(1), batch, by)
    with pytest.raises(ValueError, match="by is 'batch'"):
        denominator(step_totals([made(0, 1, [1])]), by)


# However a batch is cut, the step is the same

GENERATOR = torch.Generator().manual_seed(3)
POLICY, OLD, REFERENCE = (
    torch.randn(VOCABULARY, VOCABULARY, generator=GENERATOR, dtype=torch.float64) for _ in range(3)
)
OLD = POLICY + OLD / 4


def logits_of(table: Tensor, batch: MicroBatch) -> Tensor:
    """A model that knows which token follows which: it needs no other token of the sequence, so any cut suits it."""
    return table[batch.tokens].flatten(0, 1)[batch.rows]


def log_probs_of(table: Tensor, batch: MicroBatch) -> Tensor:
    return logits_of(table, batch).log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]


def terms(table: Tensor, batch: MicroBatch, name: str, reduce: Reduce | None) -> Tensor:
    """The loss of each token."""
    new, old = log_probs_of(table, batch), log_probs_of(OLD, batch)
    reference = log_probs_of(REFERENCE, batch)
    advantages, rollout = batch.advantages, batch.rollout_log_probs
    assert advantages is not None
    assert rollout is not None
    match name:
        case "ppo":
            return losses.ppo(new, old, advantages, clip=0.1, clip_high=0.2, dual_clip=1.2).loss
        case "gspo":
            return losses.gspo(new, old, advantages, batch, clip=0.1, clip_high=0.1, reduce=reduce).loss
        case "cispo":
            return losses.cispo(new, old, advantages, clip_high=0.1).loss
        case "reinforce, kl in the reward":
            penalty = losses.kl(old, reference, "k1")
            return losses.reinforce(new, losses.kl_in_reward(advantages, penalty, 0.1, batch, reduce=reduce))
        case _:
            weighted = losses.ppo(new, old, advantages).loss * losses.importance_weights(old, rollout)
            return weighted + 0.1 * losses.kl(new, reference) - 0.01 * losses.entropy(logits_of(table, batch))


OBJECTIVES = ("ppo", "gspo", "cispo", "reinforce, kl in the reward", "ppo with all that is added to it")


def side_by_side(table: Tensor, parts: Sequence[MicroBatch], name: str) -> list[Tensor]:
    """`terms` of a micro-batch on all context-parallel ranks at once, whose sums are added as a collective would."""
    local: list[Tensor] = []

    def remember(sums: Tensor) -> Tensor:
        local.append(sums)
        return sums

    for part in parts:
        terms(table, part, name, remember)
    total = torch.stack(local).sum(0) if local else None
    return [terms(table, part, name, lambda sums: sums if total is None else total) for part in parts]


def trained(
    samples: Sequence[Sample], layout: ParallelLayout, name: str, by: Aggregation, padded: bool, **plan: Any
) -> tuple[float, Tensor]:
    """Loss and gradient of one step, added up and averaged over ranks and micro-batches the way megatron-core does."""
    totals: StepTotals = step_totals(samples)
    lengths, executions = [len(s.tokens) for s in samples], [s.rollout_id for s in samples]
    (step,) = plan_microbatches(lengths, layout, executions=executions, **plan)
    table = POLICY.clone().requires_grad_()
    loss, summed = 0.0, torch.zeros_like(POLICY)
    for micro_batches in step.micro_batches:
        scale = len(micro_batches) * layout.dp * layout.cp
        for members in micro_batches:
            chosen = [samples[number] for number in members]
            parts = [pack(chosen, layout, totals, cp_rank=rank, padded=padded) for rank in range(layout.cp)]
            for part, values in zip(parts, side_by_side(table, parts, name), strict=True):
                own = aggregate(values, part, by) / denominator(totals, by) * scale
                loss += own.item() / scale
                # megatron-core: over micro-batches on a rank, then over the ranks
                (grad,) = torch.autograd.grad(own / len(micro_batches), table, retain_graph=True)
                summed += grad / (layout.dp * layout.cp)
    return loss, summed


@st.composite
def batches(draw: st.DrawFn) -> list[Sample]:
    """At least 6 samples; executions with several of them; masked tokens, and whole samples without loss."""
    samples = []
    for index in range(draw(st.integers(6, 10))):
        mask = draw(st.lists(st.integers(0, 1), min_size=0, max_size=8))
        fields = {"rollout_id": draw(st.integers(0, 8)), "remove_sample": draw(st.sampled_from([False] * 4 + [True]))}
        samples.append(made(index, draw(st.integers(1, 6)), mask, **fields))
    samples[0] = made(0, 3, [1, 0, 1, 1], rollout_id=0)
    return samples


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=20)
@given(batches(), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.sampled_from(AGGREGATIONS), st.booleans())
def test_any_split_gives_the_same_step(
    name: str, samples: list[Sample], dp: int, cp: int, by: Aggregation, padded: bool
) -> None:
    whole, gradient_of_whole = trained(samples, ParallelLayout(), name, by, False, max_tokens_per_gpu=1000)
    split, gradient_of_split = trained(samples, ParallelLayout(dp=dp, cp=cp), name, by, padded, max_tokens_per_gpu=48)
    assert split == pytest.approx(whole, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(gradient_of_split, gradient_of_whole, rtol=1e-12, atol=1e-12)


@settings(max_examples=20)
@given(batches(), st.sampled_from(AGGREGATIONS))
def test_the_step_is_what_the_formula_says(samples: list[Sample], by: Aggregation) -> None:
    """PPO sample by sample and token by token, with nothing of packing or of the losses in it."""
    policy, old = POLICY.log_softmax(-1), OLD.log_softmax(-1)
    counted: list[tuple[Sample, int]] = [
        (sample, sample.prompt_length + at)
        for sample in samples
        for at, counts in enumerate(sample.loss_mask or ())
        if counts and not sample.remove_sample
    ]
    total = 0.0
    for sample, at in counted:
        before, token = sample.tokens[at - 1], sample.tokens[at]
        ratio = math.exp(policy[before, token] - old[before, token])
        advantage = sample.train_metadata["advantage"]  # type: ignore[index]
        loss = -min(ratio * advantage, min(max(ratio, 0.9), 1.2) * advantage)
        if advantage < 0:
            loss = min(loss, -1.2 * advantage)
        if by == "token":
            total += loss / len(counted)
        elif by == "sequence":
            total += loss / sum(other is sample for other, _ in counted) / len(samples)
        else:
            siblings = sum(other.rollout_id == sample.rollout_id for other, _ in counted)
            total += loss / siblings / len({s.rollout_id for s in samples})
    loss, *_ = trained(samples, ParallelLayout(), "ppo", by, False, max_tokens_per_gpu=1000)
    assert loss == pytest.approx(total, rel=1e-5, abs=1e-6)  # columns are float32
