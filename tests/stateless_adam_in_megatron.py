"""What `test_stateless_adam.py` runs: optimizers of the real megatron-core on a CPU, in a process of their own
(`python -m tests.stateless_adam_in_megatron`). It prints a JSON object: for each case what went wrong, or null.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from typing import Any

import pytest
import torch

from backends.megatron import StatelessAdam
from backends.megatron.stateless_adam import use_stateless_adam
from tests.megatron_ranks import error_of
from tests.megatron_shims import core, take_the_cpu_for_a_gpu

LR, WEIGHT_DECAY, STEPS = 0.05, 0.1, 4

CASES: dict[str, dict[str, bool]] = {
    "fp32": {},
    "distributed": {"use_distributed_optimizer": True},
    "bf16": {"bf16": True},
    "distributed-bf16": {"bf16": True, "use_distributed_optimizer": True},
    "not-decoupled": {"decoupled_weight_decay": False},
}


class Trained:
    """A small network in megatron-core's wrappers, with its optimizer."""

    def __init__(self, **options: bool) -> None:
        torch.manual_seed(3)
        network = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        self.reference: Any = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        self.reference.load_state_dict(network.state_dict())
        self.dtype = torch.bfloat16 if options.get("bf16") else torch.float32
        network.to(self.dtype)
        for parameter in network.parameters():
            parameter.allreduce = True  # type: ignore[attr-defined]
        config = core("transformer", "TransformerConfig")(num_layers=1, hidden_size=8, num_attention_heads=1)
        module = core("transformer", "MegatronModule")(config)
        module.network = network
        module.forward = network.forward
        distributed = options.get("use_distributed_optimizer", False)
        wrap = core("distributed", "DistributedDataParallelConfig")(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
        )
        self.model = core("distributed", "DistributedDataParallel")(config, wrap, module)
        self.optimizer = core("optimizer", "get_megatron_optimizer")(
            core("optimizer", "OptimizerConfig")(
                optimizer="adam",
                lr=LR,
                weight_decay=WEIGHT_DECAY,
                clip_grad=0.0,
                params_dtype=self.dtype,
                **options,
            ),
            [self.model],
        )
        self.decoupled = options.get("decoupled_weight_decay", True)

    def parts(self) -> list[Any]:
        return list(getattr(self.optimizer, "chained_optimizers", [self.optimizer]))

    def step(self, seed: int) -> None:
        for group in self.optimizer.param_groups:  # as megatron-core's scheduler does
            group["weight_decay"] = WEIGHT_DECAY * group.get("wd_mult", 1.0)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
        self.model(inputs.to(self.dtype)).square().sum().backward()
        self.model.finish_grad_sync()
        done, _, _ = self.optimizer.step()
        assert done

    def weights(self) -> list[Any]:
        return [parameter.detach().float() for parameter in self.model.parameters()]

    def reference_step(self) -> None:
        """The same gradients, through an Adam of torch that lives for this step."""
        for own, parameter in zip(self.reference.parameters(), self.model.parameters(), strict=True):
            own.grad = parameter.main_grad.clone()
        weights = [parameter for parameter in self.reference.parameters() if parameter.ndim > 1]
        biases = [parameter for parameter in self.reference.parameters() if parameter.ndim == 1]  # never decayed
        adam = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        groups = [{"params": weights, "weight_decay": WEIGHT_DECAY}, {"params": biases, "weight_decay": 0.0}]
        adam(groups, lr=LR).step()


def is_adam_created_anew(**options: bool) -> None:
    plain = Trained(**options)
    trained = Trained(**options)
    assert [type(part.optimizer) for part in plain.parts()] != [StatelessAdam] * len(plain.parts())
    use_stateless_adam(trained.optimizer)
    assert [type(part.optimizer) for part in trained.parts()] == [StatelessAdam] * len(trained.parts())
    tolerance = 1e-6 if trained.dtype == torch.float32 else 2e-2
    if trained.dtype != torch.float32:  # compare from the rounded weights on
        for own, weight in zip(trained.reference.parameters(), trained.weights(), strict=True):
            own.data.copy_(weight)
    for seed in range(STEPS):
        trained.step(seed)
        trained.reference_step()
        expected = [parameter.detach() for parameter in trained.reference.parameters()]
        torch.testing.assert_close(trained.weights(), expected, rtol=tolerance, atol=tolerance)
        plain.step(seed)
    assert all(part.optimizer.state for part in plain.parts())
    assert not any(part.optimizer.state for part in trained.parts())
    pairs = zip(trained.weights(), plain.weights(), strict=True)
    distance = max(float((own - other).abs().max()) for own, other in pairs)
    assert distance > 5 * tolerance  # plain Adam goes elsewhere from its second step on


def refused() -> None:
    trained = Trained()
    trained.step(0)
    with pytest.raises(ValueError, match="call use_stateless_adam before the first step"):
        use_stateless_adam(trained.optimizer)


def main() -> None:
    warnings.simplefilter("ignore")
    take_the_cpu_for_a_gpu()
    found: dict[str, str | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        core("parallel_state", "initialize_model_parallel")()
        for name, options in CASES.items():
            found[name] = error_of(lambda options=options: is_adam_created_anew(**options))  # type: ignore[misc]
        found["after-a-step"] = error_of(refused)
        torch.distributed.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
