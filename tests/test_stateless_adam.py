from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from backends.megatron import StatelessAdam  # noqa: E402
from backends.megatron.stateless_adam import use_stateless_adam  # noqa: E402

ROOT = Path(__file__).parent.parent
STEPS = 4


def parameters(dtype: Any = None) -> list[Any]:
    """Of several shapes; with gradients that are zero, tiny and large in places."""
    random = torch.Generator().manual_seed(7)
    shapes = [(3, 4), (5,), (2, 1, 3), ()]
    return [torch.nn.Parameter(torch.randn(shape, generator=random).to(dtype or torch.float64)) for shape in shapes]


def gradients(params: list[Any], step: int) -> None:
    random = torch.Generator().manual_seed(100 + step)
    for parameter in params:
        values = torch.randn(parameter.shape, generator=random) * 10.0 ** (3 * step - 6)
        parameter.grad = torch.where(values.abs() < 0.3 * values.abs().max(), 0.0, values).to(parameter.dtype)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"betas": (0.5, 0.9)},
        {"betas": (0.0, 0.0)},
        {"eps": 1e-3, "weight_decay": 0.01},
        {"lr": 0.0, "weight_decay": 0.1},
    ],
)
def test_is_adam_created_anew_for_each_step(decoupled: bool, maximize: bool, options: dict[str, Any]) -> None:
    own, peer = parameters(), parameters()
    options = {"lr": 0.03, "weight_decay": 0.0, "maximize": maximize, **options}
    stateless = StatelessAdam(own, adam_w_mode=decoupled, **options)
    for step in range(STEPS):
        gradients(own, step)
        gradients(peer, step)
        stateless.step()
        (torch.optim.AdamW if decoupled else torch.optim.Adam)(peer, **options).step()
        torch.testing.assert_close(own, peer, rtol=1e-12, atol=1e-14)
        assert not stateless.state


def test_holds_nothing_between_steps_where_adamw_holds_the_weights_twice() -> None:
    def held_after_a_step(make: Callable[[list[Any]], Any]) -> int:
        params = parameters()
        gradients(params, 0)
        optimizer = make(params)
        optimizer.step()
        every = [value for state in optimizer.state.values() for value in state.values()]
        return sum(int(value.nbytes) for value in every if value.shape)  # without the counts of steps

    matrices = sum(int(parameter.nbytes) for parameter in parameters() if parameter.shape)
    assert held_after_a_step(torch.optim.AdamW) >= 2 * matrices
    assert held_after_a_step(StatelessAdam) == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_in_other_precisions(dtype: str, tolerance: float) -> None:
    own, peer = parameters(getattr(torch, dtype)), parameters(getattr(torch, dtype))
    for step in range(STEPS):
        gradients(own, step)
        gradients(peer, step)
        StatelessAdam(own, lr=0.03, weight_decay=0.1).step()
        torch.optim.AdamW(peer, lr=0.03, weight_decay=0.1).step()
        torch.testing.assert_close(own, peer, rtol=tolerance, atol=tolerance)


def test_groups_have_options_of_their_own() -> None:
    own, peer = parameters(), parameters()

    def groups(params: list[Any]) -> list[dict[str, Any]]:
        return [
            {"params": params[:2], "lr": 0.1, "weight_decay": 0.1},
            {"params": params[2:], "eps": 1e-2, "name": "x"},
        ]

    stateless = StatelessAdam(groups(own), lr=0.02)
    for step in range(STEPS):
        gradients(own, step)
        gradients(peer, step)
        stateless.step()
        torch.optim.AdamW(groups(peer), lr=0.02, weight_decay=0.0).step()
    torch.testing.assert_close(own, peer, rtol=1e-12, atol=1e-14)


def test_follows_a_learning_rate_schedule() -> None:
    own = [torch.nn.Parameter(torch.zeros(1))]
    stateless = StatelessAdam(own, lr=1.0, eps=0.0)
    schedule = torch.optim.lr_scheduler.StepLR(stateless, step_size=1, gamma=0.5)
    for expected in (-1.0, -1.5, -1.75):
        own[0].grad = torch.ones(1)
        stateless.step()
        schedule.step()
        assert own[0].item() == expected


def test_parameters_without_a_gradient_stay() -> None:
    own = parameters()
    before = deepcopy(own)
    StatelessAdam(own, weight_decay=0.5).step()
    torch.testing.assert_close(own, before)


def test_returns_what_the_closure_returns() -> None:
    own = torch.nn.Parameter(torch.tensor([2.0]))
    stateless = StatelessAdam([own], lr=0.5, eps=0.0)

    def closure() -> Any:
        loss = own.square().sum()
        loss.backward()
        return loss

    assert stateless.step(closure).item() == 4.0
    assert own.item() == 1.5


@pytest.mark.parametrize("option", ["amsgrad", "capturable", "differentiable", "foreach", "fused"])
def test_refuses_what_it_cannot_do(option: str) -> None:
    on: dict[str, Any] = {option: True}
    for off in (False, None):
        StatelessAdam([{"params": parameters(), option: off}])
    with pytest.raises(ValueError, match=f"StatelessAdam does not support {option}: "):
        StatelessAdam(parameters(), **on)
    with pytest.raises(ValueError, match=f"StatelessAdam does not support {option}: "):
        StatelessAdam([{"params": parameters(), option: True}])


def test_refuses_to_leave_the_bias_correction_out() -> None:
    StatelessAdam(parameters(), bias_correction=True)
    with pytest.raises(ValueError, match="does not support bias_correction=False"):
        StatelessAdam(parameters(), bias_correction=False)


def test_refuses_options_that_it_does_not_know() -> None:
    with pytest.raises(TypeError, match="StatelessAdam has no option 'exp_avg_dtype'"):
        StatelessAdam(parameters(), exp_avg_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0, it must not be negative"),
        ({"lr": float("nan")}, "lr is nan, it must not be negative"),
        ({"eps": -1.0}, "eps is -1.0, it must not be negative"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0, it must not be negative"),
        ({"betas": (0.9, 1.0)}, r"betas are \(0.9, 1.0\), each must be at least 0 and less than 1"),
    ],
)
def test_refuses_numbers_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"StatelessAdam: {message}"):
        StatelessAdam(parameters(), **options)


def test_refuses_a_learning_rate_on_the_device() -> None:
    with pytest.raises(TypeError, match="lr is a tensor, it must be a number"):
        StatelessAdam(parameters(), lr=torch.tensor(0.1))


def test_refuses_complex_parameters() -> None:
    with pytest.raises(TypeError, match="a parameter is complex"):
        StatelessAdam([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))])


def test_refuses_sparse_gradients() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="a gradient is sparse; use a dense embedding"):
        StatelessAdam(embedding.parameters()).step()


def test_a_refused_group_is_not_added() -> None:
    stateless = StatelessAdam(parameters())
    with pytest.raises(ValueError, match="amsgrad"):
        stateless.add_param_group({"params": parameters(), "amsgrad": True})
    assert len(stateless.param_groups) == 1


def test_loads_a_checkpoint_of_adam_without_its_moments() -> None:
    own, peer = parameters(), parameters()
    adam = torch.optim.AdamW(peer, lr=0.25, weight_decay=0.5)
    gradients(peer, 0)
    adam.step()
    stateless = StatelessAdam(own)
    stateless.load_state_dict(adam.state_dict())
    assert not stateless.state
    assert stateless.param_groups[0]["lr"] == 0.25
    again = StatelessAdam(parameters())
    again.load_state_dict(stateless.state_dict())
    assert again.param_groups[0]["weight_decay"] == 0.5


def part(inner: Any, **config: Any) -> Any:
    """As megatron-core's optimizers look from here."""
    options = {"use_precision_aware_optimizer": False, "decoupled_weight_decay": True, **config}
    return SimpleNamespace(optimizer=inner, config=SimpleNamespace(**options), init_state_fn=None)


def chained(*parts: Any) -> Any:
    return SimpleNamespace(chained_optimizers=list(parts))


class FusedAdam(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
    """As Transformer Engine and Apex call theirs."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1})


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam, FusedAdam])
def test_replaces_every_adam_and_keeps_its_groups(make: Callable[[Any], Any]) -> None:
    parts = [part(make(parameters())), part(make(parameters())), part(None)]
    groups = [one.optimizer.param_groups[0] for one in parts[:2]]
    use_stateless_adam(chained(parts[0], chained(*parts[1:])))
    assert [type(one.optimizer) for one in parts] == [StatelessAdam, StatelessAdam, type(None)]
    for one, group in zip(parts, groups, strict=False):
        assert one.optimizer.param_groups[0] is group
        one.init_state_fn(one.optimizer, one.config)
        assert not one.optimizer.state


def used_adam() -> Any:
    params = parameters()
    gradients(params, 0)
    adam = torch.optim.AdamW(params)
    adam.step()
    return adam


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (lambda: part(torch.optim.SGD(parameters())), TypeError, "holds a SGD, and StatelessAdam replaces Adam only"),
        (lambda: part(used_adam()), ValueError, "holds state of 4 parameters: call use_stateless_adam before the"),
        (
            lambda: part(torch.optim.AdamW(parameters()), use_precision_aware_optimizer=True),
            ValueError,
            "set use_precision_aware_optimizer=False",
        ),
        (lambda: part(torch.optim.AdamW(parameters(), amsgrad=True)), ValueError, "does not support amsgrad"),
    ],
)
def test_replaces_all_or_none(bad: Callable[[], Any], error: type[Exception], message: str) -> None:
    good = part(torch.optim.AdamW(parameters()))
    with pytest.raises(error, match=message):
        use_stateless_adam(chained(good, bad()))
    assert type(good.optimizer) is torch.optim.AdamW


def test_an_optimizer_that_keeps_its_own_is_told() -> None:
    class Stubborn:
        optimizer = property(lambda self: adam, lambda self, value: None)
        config = part(None).config

    adam = torch.optim.AdamW(parameters())
    with pytest.raises(TypeError, match="Stubborn went on with AdamW, not StatelessAdam"):
        use_stateless_adam(Stubborn())


def test_an_optimizer_that_is_none_of_megatron_core() -> None:
    with pytest.raises(TypeError, match="takes what get_megatron_optimizer returned, not a AdamW"):
        use_stateless_adam(torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]))


@pytest.fixture(scope="module")
def in_megatron() -> dict[str, str | None]:
    """What went wrong in each case, in one process for all: importing megatron-core takes longer than they do."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("needs megatron-core: pip install 'rolloutbus[megatron]'")
    command = [sys.executable, "-m", "tests.stateless_adam_in_megatron"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", ["fp32", "distributed", "bf16", "distributed-bf16", "not-decoupled", "after-a-step"])
def test_in_the_real_megatron_core(case: str, in_megatron: dict[str, str | None]) -> None:
    assert in_megatron[case] is None, in_megatron[case]
