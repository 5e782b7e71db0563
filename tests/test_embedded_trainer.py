from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from eventbus import Batch, Group, Sample, SampleStatus
from eventbus.columns import LogProbs, LossMask, Tokens
from eventbus.group import Summary
from middleware.generate import append

pytest.importorskip("torch", reason="needs rolloutbus[embedded]")

import torch

from backends.embedded import EmbeddedEngine, EmbeddedTrainer

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_thread")]


def small(seed: int = 0) -> EmbeddedEngine:
    return EmbeddedEngine(vocabulary="0123456789+=", context=16, width=16, heads=2, seed=seed)


def response(
    length: int, index: int = 0, advantage: float | None = 1.0, prompt: int = 3, log_prob: float = -2.5, **fields: Any
) -> Sample:
    """Made by hand: tokens that differ from sample to sample."""
    tokens = [(index + 3 * position) % 13 for position in range(prompt + length)]
    return Sample(
        index=index,
        tokens=Tokens(tokens),
        response_length=length,
        rollout_log_probs=LogProbs([log_prob + 0.1 * position for position in range(length)]),
        train_metadata={} if advantage is None else {"advantage": advantage},
        status=SampleStatus.COMPLETED,
        **fields,
    )


def batch(*samples: Sample) -> Batch:
    groups = [Group(index, "", [[sample]]) for index, sample in enumerate(samples)]
    return Batch(7, groups, Summary(rollout_id=7))


def brute_force(engine: EmbeddedEngine, samples: Sequence[Sample], clip: float, temperature: float) -> torch.Tensor:
    """The loss as the module's docstring writes it, token by token."""
    total, count = torch.zeros(()), 0
    for sample in samples:
        tokens = torch.tensor(sample.tokens.tolist())
        for position in range(sample.response_length):
            if sample.remove_sample or (sample.loss_mask is not None and not sample.loss_mask[position]):
                continue
            assert sample.rollout_log_probs is not None
            assert sample.train_metadata is not None
            at = sample.prompt_length + position
            logits = engine.model(tokens[None, :at])[0, -1] / temperature
            ratio = (logits.log_softmax(-1)[tokens[at]] - sample.rollout_log_probs[position]).exp()
            advantage = sample.train_metadata["advantage"]
            total = total + torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
            count += 1
    return -total / count


MIXED = [
    response(4, 0, advantage=1.5),
    response(2, 1, advantage=-0.7, prompt=5),
    response(6, 2, advantage=0.3, loss_mask=LossMask([0, 1, 1, 0, 1, 1])),
    response(3, 3, advantage=0.0),
    response(5, 4, advantage=9.0, remove_sample=True),
    response(1, 5, advantage=-2.0, log_prob=-9.0),
]


@pytest.mark.parametrize("micro_batch", [1, 2, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_gradient_is_that_of_the_loss_written_out(micro_batch: int, temperature: float) -> None:
    engine = small()
    loss = brute_force(engine, MIXED, 0.2, temperature)
    expected = torch.autograd.grad(loss, list(engine.model.parameters()))
    trainer = EmbeddedTrainer(engine, micro_batch=micro_batch, temperature=temperature, max_grad_norm=1e9)
    result = await trainer.train(batch(*MIXED))
    assert result.metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    for parameter, gradient in zip(trainer.model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-4, rtol=1e-3)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in expected))
    assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)


async def test_log_probs_of_the_engine_are_those_of_the_trainer() -> None:
    engine = small()
    samples = [Sample(prompt="12+34=", index=index, rollout_id=index) for index in range(4)]
    for sample in samples:
        sample.tokens += engine.tokenize("12+34=")
        append(sample, await engine.generate(sample, {"temperature": 0.8, "max_new_tokens": 8}))
        sample.train_metadata = {"advantage": 1.0}
    metrics = (await EmbeddedTrainer(engine, temperature=0.8).train(batch(*samples))).metrics
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_fraction"] == 0


async def test_masked_tokens_change_nothing() -> None:
    first, second = response(4, loss_mask=LossMask([1, 0, 1, 0])), response(4, loss_mask=LossMask([1, 0, 1, 0]))
    second.rollout_log_probs = LogProbs([-2.5, -99.0, -2.3, 99.0])
    results = [await EmbeddedTrainer(small()).train(batch(sample)) for sample in (first, second)]
    assert results[0].metrics["loss"] == results[1].metrics["loss"]
    assert results[0].metrics["grad_norm"] == results[1].metrics["grad_norm"]
    assert results[0].metrics["tokens"] == 2


async def test_removed_samples_are_not_looked_at() -> None:
    broken = Sample(index=9, tokens=Tokens([1, 2]), response_length=1, remove_sample=True)
    with_it = await EmbeddedTrainer(small()).train(batch(response(3), broken))
    without = await EmbeddedTrainer(small()).train(batch(response(3)))
    assert with_it.metrics["loss"] == without.metrics["loss"]


async def test_samples_without_advantage_add_to_the_denominator_only() -> None:
    fillers = [response(3, index, advantage=0.0) for index in (1, 2)]
    alone = EmbeddedTrainer(small(), max_grad_norm=1e9)
    filled = EmbeddedTrainer(small(), max_grad_norm=1e9)
    loss = (await alone.train(batch(response(3)))).metrics["loss"]
    assert (await filled.train(batch(response(3), *fillers))).metrics["loss"] == pytest.approx(loss / 3)
    for one, other in zip(alone.model.parameters(), filled.model.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(other.grad, one.grad / 3)


async def test_ratio_is_clipped() -> None:
    metrics = (await EmbeddedTrainer(small()).train(batch(response(3, log_prob=-9.0)))).metrics
    assert metrics["clip_fraction"] == 1
    assert metrics["grad_norm"] == 0
    assert metrics["loss"] == pytest.approx(-1.2)


async def test_metrics_are_means() -> None:
    samples = [response(2, 0, reward=1.0), response(2, 1, reward=0), response(2, 2, reward=None)]
    metrics = (await EmbeddedTrainer(small()).train(batch(*samples))).metrics
    assert (metrics["reward"], metrics["tokens"]) == (0.5, 6)
    assert metrics["entropy"] == pytest.approx(math.log(13), abs=0.05)


async def test_a_step_makes_good_responses_more_likely() -> None:
    good, bad = response(3, 0, advantage=1.0), response(3, 1, advantage=-1.0)
    engine = small()
    before = await EmbeddedTrainer(engine).train(batch(good, bad))
    trainer = EmbeddedTrainer(engine)
    for _ in range(5):
        after = await trainer.train(batch(good, bad))
    assert after.metrics["loss"] < before.metrics["loss"]


async def test_epochs_are_steps_of_the_optimizer() -> None:
    twice, once = EmbeddedTrainer(small(), epochs=2), EmbeddedTrainer(small())
    await twice.train(batch(*MIXED))
    for _ in range(2):
        await once.train(batch(*MIXED))
    for one, other in zip(twice.model.parameters(), once.model.parameters(), strict=True):
        assert torch.equal(one, other)


async def test_the_engine_has_the_new_weights() -> None:
    engine = small()
    trainer = EmbeddedTrainer(engine)
    for version in ("1", "2"):
        result = await trainer.train(batch(response(3)))
        assert result.weight_version == engine.weight_version == version
    for ours, theirs in zip(trainer.model.parameters(), engine.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


async def test_weights_change_for_a_request_under_way() -> None:
    engine = small()
    engine.model.head.weight.data[engine.eos] = 0
    completions = []

    async def generate() -> None:
        completions.append(await engine.generate(Sample(prompt="1", rollout_id=3), {}))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate)
        await EmbeddedTrainer(engine, micro_batch=1).train(batch(*MIXED))
    assert [span.version for span in completions[0].weight_versions] == ["0", "1"]


async def test_training_is_deterministic() -> None:
    results = [await EmbeddedTrainer(small(), micro_batch=2).train(batch(*MIXED)) for _ in range(2)]
    assert {**results[0].metrics, "reward": 0} == {**results[1].metrics, "reward": 0}


async def test_the_loop_runs_between_micro_batches() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tick)
        await EmbeddedTrainer(small(), micro_batch=1).train(batch(*(response(2, index) for index in range(20))))
        tasks.cancel_scope.cancel()
    assert ticks >= 20


async def test_cancelled_training_leaves_the_weights() -> None:
    engine = small()
    trainer = EmbeddedTrainer(engine)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await trainer.train(batch(*MIXED))
    assert (trainer.steps, engine.weight_version) == (0, "0")
    assert all(map(torch.equal, trainer.model.parameters(), engine.model.parameters()))


# Mistakes


@pytest.mark.parametrize(
    "samples",
    [[], [response(0)], [response(3, loss_mask=LossMask([0, 0, 0]))], [response(3, remove_sample=True)]],
    ids=["empty", "no response", "masked", "removed"],
)
async def test_a_batch_without_loss_tokens_is_refused(samples: list[Sample]) -> None:
    engine = small()
    with pytest.raises(ValueError, match=f"batch 7: no token of its {len(samples)} samples counts in the loss"):
        await EmbeddedTrainer(engine).train(batch(*samples))
    assert engine.weight_version == "0"


def without_log_probs() -> Sample:
    sample = response(3, 4)
    sample.rollout_log_probs = None
    return sample


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            response(3, 4, advantage=None),
            "sample 4: train_metadata has no 'advantage'; add the stage middleware.GroupAd",
        ),
        (Sample(index=4, tokens=Tokens([1, 2]), response_length=1), "sample 4: train_metadata has no 'advantage'"),
        (without_log_probs(), "sample 4: it has no rollout_log_probs"),
        (response(3, 4, loss_mask=LossMask([1, 1])), "sample 4: loss_mask has 2 values for 3 tokens"),
        (response(15, 4), "sample 4: 18 tokens exceed the context of 16"),
        (response(3, 4, prompt=0), "sample 4: it has no prompt tokens"),
    ],
)
async def test_a_sample_that_cannot_be_trained_on_is_named(sample: Sample, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        await EmbeddedTrainer(small()).train(batch(response(3), sample))


async def test_a_token_that_the_model_does_not_have_is_named() -> None:
    sample = response(3, 4)
    sample.tokens[0] = 13
    with pytest.raises(ValueError, match="sample 4: it has a token id that is not in the vocabulary of 0 to 12"):
        await EmbeddedTrainer(small()).train(batch(sample))


async def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    engine = small()
    trainer = EmbeddedTrainer(engine)
    with pytest.raises(FloatingPointError, match=r"the gradient .* is not finite, so no step was made"):
        await trainer.train(batch(response(3, advantage=math.nan)))
    assert all(map(torch.equal, trainer.model.parameters(), engine.model.parameters()))


@pytest.mark.parametrize("name", ["epochs", "micro_batch"])
def test_counts_start_at_1(name: str) -> None:
    options: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=f"EmbeddedTrainer: {name} is 0, it must be at least 1"):
        EmbeddedTrainer(small(), **options)


@pytest.mark.parametrize("name", ["lr", "clip", "max_grad_norm", "temperature"])
def test_numbers_are_more_than_0(name: str) -> None:
    options: dict[str, Any] = {name: 0.0}
    with pytest.raises(ValueError, match=f"EmbeddedTrainer: {name} is 0.0, it must be more than 0"):
        EmbeddedTrainer(small(), **options)
