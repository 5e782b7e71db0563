"""verl trains a tiny model to say again what it is told: `python -m examples.verl.say_again`, half a minute on a CPU.

verl's worker takes the training steps. A copy of its model stands for the inference engine, and gets the new weights
after each batch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio.to_thread
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from backends.simulated import SimulatedEngine
from eventbus import BatchSpec, Completion, Pipeline, Prompts, Sample
from examples.verl.adapter import VerlTrainer
from examples.verl.cpu import use_cpu
from middleware import DynamicFilter, Generate, GroupAdvantage, reward_nonzero_std

WORDS = 8
LENGTH = 3


def make_model() -> Any:
    """20,000 weights."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=16,
        )
    )


def worker_config(folder: str) -> Any:
    """For the model that is saved there: FSDP in float32, and AdamW."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers import config

    return config.TrainingWorkerConfig(
        model_type="language_model",
        model_config=config.HFModelConfig(
            path=folder,
            load_tokenizer=False,
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "eager"},
        ),
        engine_config=config.FSDPEngineConfig(
            strategy="fsdp2",
            max_token_len_per_gpu=1024,
            use_torch_compile=False,
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        ),
        optimizer_config=config.FSDPOptimizerConfig(lr=1e-2, weight_decay=0.0, total_training_steps=100),
        checkpoint_config=CheckpointConfig(),
    )


def policy_loss() -> Any:
    """verl's PPO loss, averaged over tokens."""
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    return partial(ppo_loss, config=FSDPActorConfig(strategy="fsdp2", rollout_n=8, use_dynamic_bsz=True))


def make_worker(model: Any) -> Any:
    """verl's worker, with a copy of the model."""
    torch.set_num_threads(1)  # for a model of this size more are slower
    use_cpu()
    from verl.workers.engine_workers import TrainingWorker

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        worker = TrainingWorker(worker_config(folder))
        worker.reset()
    worker.set_loss_fn(policy_loss())
    return worker


def sampled_from(model: Any, seed: int) -> Callable[[Sample], Awaitable[Completion]]:
    """Answers with `LENGTH` tokens of the model as it is then; one sample at a time, beside the event loop."""
    generator = torch.Generator().manual_seed(seed)
    one_at_a_time = anyio.CapacityLimiter(1)

    @torch.no_grad()
    def answer(prompt: list[int]) -> Completion:
        tokens: list[int] = []
        log_probs: list[float] = []
        for _ in range(LENGTH):
            scores = model(input_ids=torch.tensor([prompt + tokens])).logits[0, -1].log_softmax(-1)
            tokens.append(int(torch.multinomial(scores.exp(), 1, generator=generator)))
            log_probs.append(float(scores[tokens[-1]]))
        return Completion(" ".join(map(str, tokens)), tokens, log_probs)

    async def outcome(sample: Sample) -> Completion:
        return await anyio.to_thread.run_sync(answer, list(sample.tokens), limiter=one_at_a_time)

    return outcome


def said_again(sample: Sample) -> None:
    """The share of the response that is the word of the prompt."""
    sample.reward = sample.tokens[-LENGTH:].count(sample.tokens[0]) / LENGTH


async def main(rollouts: int = 20) -> list[float]:
    model = make_model()
    worker = make_worker(model)
    engine = SimulatedEngine(sampled_from(model, seed=0))

    async def publish(version: str) -> None:
        parameters, _ = worker.engine.get_per_tensor_param()
        model.load_state_dict(dict(parameters))
        await engine.update_weights(version)

    trainer = VerlTrainer(worker.train_mini_batch, publish, mini_batch=16)
    pipeline = Pipeline(
        prompts=Prompts(({"prompt": str(word), "tokens": [word]} for word in list(range(WORDS)) * 100), group_size=8),
        stages=[Generate(engine), said_again, DynamicFilter(reward_nonzero_std, fallback="last"), GroupAdvantage()],
        batch=BatchSpec(groups=8),
    )
    rewards = []
    async with pipeline:
        async for batch in pipeline.rollouts(stop=rollouts):
            result = await trainer.train(batch)
            batch.trained(result)
            rewards.append(batch.summary.reward_mean or 0.0)
            print(f"{batch.summary}, loss {result.metrics['loss']:.3f}, weights {result.weight_version}")
    return rewards


if __name__ == "__main__":
    anyio.run(main)
