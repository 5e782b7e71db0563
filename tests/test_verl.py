"""The adapter against the real verl, on a CPU: `make test-verl`."""

from __future__ import annotations

import copy
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from eventbus.group import Batch, Group, Summary, TrainResult
from eventbus.sample import Sample
from middleware import GroupAdvantage

pytestmark = [
    pytest.mark.verl,
    pytest.mark.skipif(find_spec("verl") is None, reason="needs verl: make test-verl"),
    pytest.mark.filterwarnings("ignore"),  # of verl and what it imports
]

ROOT = Path(__file__).parent.parent


def sample(index: int, prompt: list[int], response: list[int], **fields: Any) -> Sample:
    given: dict[str, Any] = {
        "tokens": prompt + response,
        "response_length": len(response),
        "rollout_log_probs": [-1.0 - 0.5 * i for i in range(len(response))],
        "reward": float(index % 3),
    }
    return Sample(index=index, group_index=index // 2, **given | fields)


def batch_of(*samples: Sample) -> Batch:
    """Groups of two, with their advantages."""
    groups = [Group(i // 2, "", [[one] for one in samples[i : i + 2]]) for i in range(0, len(samples), 2)]
    for group in groups:
        GroupAdvantage()(group)
    return Batch(rollout_id=6, groups=groups, summary=Summary(rollout_id=6))


def four_samples() -> Batch:
    """Prompts and responses of several lengths, a tool's tokens, and a sample that is out of the loss."""
    return batch_of(
        sample(0, [1], [2, 3, 4], loss_mask=[1, 0, 1]),
        sample(1, [1, 2], [5]),
        sample(2, [3, 4, 5], [6, 7]),
        sample(3, [3], [1, 1], remove_sample=True),
    )


def test_a_batch_becomes_verls() -> None:
    from examples.verl.adapter import to_verl

    batch = four_samples()
    data = to_verl(batch)
    assert {name: tensor.tolist() for name, tensor in data.batch.items() if name not in ("advantages", "prompts")} == {
        "input_ids": [[0, 0, 1, 2, 3, 4], [0, 1, 2, 5, 0, 0], [3, 4, 5, 6, 7, 0], [0, 0, 3, 1, 1, 0]],
        "attention_mask": [[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 0]],
        "position_ids": [[0, 0, 0, 1, 2, 3], [0, 0, 1, 2, 2, 2], [0, 1, 2, 3, 4, 4], [0, 0, 0, 1, 2, 2]],
        "responses": [[2, 3, 4], [5, 0, 0], [6, 7, 0], [1, 1, 0]],
        "response_mask": [[1, 0, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]],
        "old_log_probs": [[-1.0, -1.5, -2.0], [-1.0, 0.0, 0.0], [-1.0, -1.5, 0.0], [-1.0, -1.5, 0.0]],
    }
    assert list(data.non_tensor_batch["uid"]) == ["0", "0", "1", "1"]
    advantage = (batch.samples[0].train_metadata or {})["advantage"]
    assert data.batch["advantages"][0].tolist() == pytest.approx([advantage, 0.0, advantage])


def test_the_advantages_are_those_that_verl_computes() -> None:
    import torch
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    from examples.verl.adapter import to_verl

    batch = batch_of(*(sample(i, [1], [2, 3][: 1 + i % 2], reward=r) for i, r in enumerate([0.0, 1.0, 0.3, 0.1])))
    data = to_verl(batch)
    rewards = torch.zeros(data.batch["responses"].shape)
    for row, one in enumerate(batch.samples):
        rewards[row, one.response_length - 1] = one.reward
    theirs, _ = compute_grpo_outcome_advantage(rewards, data.batch["response_mask"], data.non_tensor_batch["uid"])
    torch.testing.assert_close(data.batch["advantages"], theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_metadata": None}, "sample 2: it has no advantage; add the stage middleware.GroupAdvantage"),
        ({"rollout_log_probs": None}, "sample 2: it has no rollout_log_probs"),
        ({"response_length": 5}, "sample 2: it has no prompt tokens; add the stage middleware.Tokenize"),
    ],
)
def test_a_sample_without_what_the_loss_reads_is_named(change: dict[str, Any], message: str) -> None:
    from examples.verl.adapter import to_verl

    batch = four_samples()
    for name, value in change.items():
        setattr(batch.samples[2], name, value)
    with pytest.raises(ValueError, match=message):
        to_verl(batch)


def test_a_batch_in_which_no_token_counts_is_refused() -> None:
    from examples.verl.adapter import to_verl

    batch = four_samples()
    for one in batch.samples:
        one.remove_sample = True
    with pytest.raises(ValueError, match="batch 6: no token of its 4 samples counts in the loss"):
        to_verl(batch)


def test_the_event_loop_goes_on_while_verl_works() -> None:
    from verl.utils.tensordict_utils import get_tensordict

    from examples.verl.adapter import VerlTrainer

    went_on = threading.Event()

    def update(data: Any) -> Any:
        assert went_on.wait(60)
        return get_tensordict({}, {"metrics": {"loss": [0.25, 0.75]}})

    async def main() -> TrainResult:
        results = []

        async def train() -> None:
            results.append(await VerlTrainer(update).train(four_samples()))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(train)
            await anyio.lowlevel.checkpoint()
            went_on.set()
        return results[0]

    assert anyio.run(main) == TrainResult({"loss": 0.5}, None)


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, {"temperature": 1.0, "mini_batch_size": 4, "global_batch_size": 4}),
        (
            {"mini_batch": 2, "temperature": 0.7, "epochs": 3},
            {"temperature": 0.7, "mini_batch_size": 2, "global_batch_size": 2, "epochs": 3},
        ),
    ],
)
def test_settings_travel_with_the_batch(options: dict[str, Any], settings: dict[str, Any]) -> None:
    from verl.utils.tensordict_utils import get, get_tensordict

    from examples.verl.adapter import VerlTrainer

    seen = []

    def update(data: Any) -> Any:
        seen.append({name: get(data, name) for name in settings})
        return get_tensordict({}, {"metrics": {}})

    anyio.run(VerlTrainer(update, **options).train, four_samples())
    assert seen == [settings]


def test_its_step_is_that_of_plain_torch_with_our_loss() -> None:
    import torch

    from backends.megatron.losses import ppo
    from examples.verl.adapter import VerlTrainer, to_verl
    from examples.verl.say_again import make_model, make_worker

    model = make_model()
    worker = make_worker(model)
    plain = copy.deepcopy(model).train()
    batch = four_samples()
    versions = []

    async def publish(version: str) -> None:
        versions.append(version)

    result = anyio.run(VerlTrainer(worker.train_mini_batch, publish).train, batch)
    assert (result.weight_version, versions) == ("7", ["7"])

    tensors = to_verl(batch).batch
    ids, width = tensors["input_ids"], tensors["responses"].shape[1]
    output = plain(input_ids=ids, attention_mask=tensors["attention_mask"], position_ids=tensors["position_ids"])
    scores = output.logits[:, -width - 1 : -1].log_softmax(-1)
    log_probs = scores.gather(-1, tensors["responses"][..., None])[..., 0]
    mask = tensors["response_mask"].bool()
    advantages = tensors["advantages"].float()
    ours = ppo(log_probs[mask], tensors["old_log_probs"][mask], advantages[mask], dual_clip=3.0)
    loss = ours.loss.mean()
    assert 0 < ours.clipped.sum() < len(ours.clipped)
    assert result.metrics["actor/pg_loss"] == pytest.approx(loss.item(), abs=1e-5)

    optimizer = torch.optim.AdamW(plain.parameters(), lr=result.metrics["lr"], weight_decay=0.0)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()
    assert result.metrics["grad_norm"] == pytest.approx(norm.item(), abs=1e-5)
    stepped = dict(worker.engine.get_per_tensor_param()[0])
    moved = 0.0
    for name, parameter in plain.named_parameters():
        # Adam's first step is lr * sign(gradient): where that is as good as zero, either sign is right.
        certain = parameter.grad.abs() > 1e-6
        torch.testing.assert_close(stepped[name][certain], parameter.detach()[certain], atol=1e-5, rtol=0)
        moved += (stepped[name] - model.get_parameter(name)).abs().sum().item()
    assert moved > 0


def test_verl_trains_what_the_pipeline_samples() -> None:
    from examples.verl.say_again import main

    rewards = anyio.run(main)
    assert sum(rewards[:3]) / 3 < 0.25
    assert sum(rewards[-3:]) / 3 > 0.5


def test_two_ranks_that_ray_runs_take_the_step_of_one(tmp_path: Path) -> None:
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.workers.engine_workers import TrainingWorker

    from examples.verl.adapter import VerlTrainer
    from examples.verl.say_again import make_model, make_worker, policy_loss, worker_config

    class Worker(TrainingWorker):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            from examples.verl.cpu import use_cpu

            use_cpu()
            super().__init__(config)

    model = make_model()
    one = anyio.run(VerlTrainer(make_worker(model).train_mini_batch).train, four_samples()).metrics
    model.save_pretrained(tmp_path)
    environment = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    try:
        workers = RayWorkerGroup(
            resource_pool=RayResourcePool([2], use_gpu=False, max_colocate_count=1),
            ray_cls_with_init=RayClassWithInitArgs(ray.remote(Worker), config=worker_config(str(tmp_path))),
            device_name="cpu",
        )
        workers.reset()
        workers.set_loss_fn(policy_loss())
        two = anyio.run(VerlTrainer(lambda data: workers.train_mini_batch(data).get()).train, four_samples()).metrics
    finally:
        ray.shutdown()
    assert [two[name] for name in ("loss", "grad_norm")] == pytest.approx(
        [one[name] for name in ("loss", "grad_norm")], abs=1e-5
    )
