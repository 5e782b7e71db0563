"""`StatelessAdam`: the step of an Adam that is created anew for every step, with nothing kept in between.

In the first step of Adam (arXiv 1412.6980, algorithm 1 at t = 1) the bias corrections undo the averages: the first
moment (1 - beta1) g, divided by 1 - beta1, is the gradient g, and the second one is g^2. So the step is

    p <- p - lr * g / (|g| + eps)

whatever the betas are. AdamW (arXiv 1711.05101) first scales p by 1 - lr * weight_decay; Adam adds weight_decay * p to
g. It is close to the sign of the gradient, and there are no moments to hold, to move between devices or to save.

`use_stateless_adam` puts it into megatron-core's optimizers. Those choose their Adam by what is installed: with neither
Transformer Engine nor Apex they take torch's by its own name, so that replacing `megatron.core.optimizer.Adam` changes
nothing, without a word. So the optimizer is replaced where it was built, and looked at afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["StatelessAdam", "use_stateless_adam"]

_REFUSED: Final = {
    "amsgrad": "it remembers the largest second moment",
    "capturable": "the learning rate is read on the host",
    "differentiable": "the step is made in place",
    "foreach": "tensors are updated one by one, so that one temporary is alive at a time",
    "fused": "tensors are updated one by one, so that one temporary is alive at a time",
}
"""Options of torch's Adam that must be off here, each with the reason."""


class StatelessAdam(Optimizer):
    """Adam or AdamW whose state is thrown away after each step; it has none, `state` stays empty.

    Beside gradients a step needs memory for one temporary of the size of the largest parameter (two with `maximize`, or
    with `weight_decay` and without `adam_w_mode`).

    :param betas: have no effect, and are there for what passes them.
    :param adam_w_mode: decay of the weights as in AdamW; else as in Adam. The name is that of the Adam of Transformer
        Engine and Apex.
    :param maximize: go up the gradient.
    :param options: options of torch's Adam, accepted where they are off: amsgrad, capturable, differentiable, foreach,
        fused; and `bias_correction`, where it is on.
    :raises ValueError: a number is out of range, or an option is not supported; also in a group of parameters.
    :raises TypeError: `lr` is a tensor, a parameter is complex, or there is no such option.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        for name in options:
            if name not in _REFUSED and name != "bias_correction":
                raise TypeError(f"StatelessAdam has no option {name!r}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode,
            "maximize": maximize,
        }
        _check({**defaults, **options})
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step along the gradients. Parameters without one stay as they are.

        :param closure: computes the loss and the gradients; what it returns is returned.
        :raises ValueError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        _update(parameter, parameter.grad, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the options of the groups over, and no moments: a checkpoint of Adam or AdamW can be loaded."""
        super().load_state_dict({**state_dict, "state": {}})


def _update(parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
    if gradient.is_sparse:
        raise ValueError("StatelessAdam: a gradient is sparse; use a dense embedding (sparse=False)")
    lr, weight_decay = group["lr"], group["weight_decay"]
    if group["maximize"]:
        gradient = gradient.neg()
    if weight_decay and group["adam_w_mode"]:
        parameter.mul_(1 - lr * weight_decay)
    elif weight_decay:
        gradient = gradient.add(parameter, alpha=weight_decay)
    parameter.addcdiv_(gradient, gradient.abs().add_(group["eps"]), value=-lr)


def _check(group: dict[str, Any]) -> None:
    if isinstance(group["lr"], Tensor):
        raise TypeError("StatelessAdam: lr is a tensor, it must be a number")
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0:
            raise ValueError(f"StatelessAdam: {name} is {group[name]}, it must not be negative")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"StatelessAdam: betas are {group['betas']}, each must be at least 0 and less than 1")
    for name, reason in _REFUSED.items():
        if group.get(name):
            raise ValueError(f"StatelessAdam does not support {name}: {reason}")
    if not group.get("bias_correction", True):
        raise ValueError("StatelessAdam does not support bias_correction=False: the correction is what it rests on")
    if any(parameter.is_complex() for parameter in group.get("params", ())):
        raise TypeError("StatelessAdam: a parameter is complex")


def use_stateless_adam(optimizer: Any) -> None:
    """Put a `StatelessAdam` in the place of each Adam inside of an optimizer of megatron-core.

        optimizer = get_megatron_optimizer(config, model)
        use_stateless_adam(optimizer)

    Groups of parameters stay the same objects, so schedulers and the distributed optimizer go on with them. Call it
    before the first step and before a checkpoint is loaded. `state_dict` of the optimizer then holds the options of
    the groups and no moments, also that of the distributed optimizer, which without Transformer Engine and Apex would
    look for Adam's step and fail. What a sharded checkpoint takes from the optimizer beside it are moments: leave it
    out (Megatron-LM: `--no-save-optim`, `--no-load-optim`).

    :param optimizer: what `megatron.core.optimizer.get_megatron_optimizer` returned.
    :raises TypeError: it is no optimizer of megatron-core, or what is inside is no Adam (that of torch, or the
        FusedAdam of Transformer Engine or Apex), such as with `optimizer_cpu_offload`.
    :raises ValueError: it holds state already; it uses `use_precision_aware_optimizer`; or a group has an option that
        `StatelessAdam` does not support. Nothing has been replaced then.
    """
    parts = [part for part in _parts(optimizer) if part.optimizer is not None]  # None: nothing to train on this rank
    for part in parts:
        _check_part(part)
    for part in parts:
        _replace(part)


def _parts(optimizer: Any) -> Iterator[Any]:
    if not hasattr(optimizer, "chained_optimizers"):
        if not hasattr(optimizer, "optimizer"):
            raise TypeError(
                f"use_stateless_adam takes what get_megatron_optimizer returned, not a {type(optimizer).__name__}; an "
                "optimizer of your own is StatelessAdam itself"
            )
        yield optimizer
        return
    for part in optimizer.chained_optimizers:
        yield from _parts(part)


def _check_part(part: Any) -> None:
    inner = part.optimizer
    if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW) and type(inner).__name__ != "FusedAdam":
        raise TypeError(
            f"{type(part).__name__} holds a {type(inner).__name__}, and StatelessAdam replaces Adam only: set "
            "optimizer='adam' and optimizer_cpu_offload=False"
        )
    if inner.state:
        raise ValueError(
            f"{type(part).__name__} holds state of {len(inner.state)} parameters: call use_stateless_adam before the "
            "first step and before a checkpoint is loaded"
        )
    if part.config.use_precision_aware_optimizer:
        raise ValueError("set use_precision_aware_optimizer=False: it is about the moments, and StatelessAdam has none")
    for group in inner.param_groups:
        _check(group)


def _replace(part: Any) -> None:
    stateless = StatelessAdam([{"params": []}])
    # Not through add_param_group: the distributed optimizer's shards are views, which torch would refuse.
    stateless.param_groups = part.optimizer.param_groups
    for group in stateless.param_groups:
        group.setdefault("maximize", False)
        group["adam_w_mode"] = part.config.decoupled_weight_decay
    part.optimizer = stateless
    part.init_state_fn = _no_state  # by which a checkpoint would bring the moments back
    if hasattr(part, "gbuf_ranges"):  # the distributed optimizer
        part.state_dict = partial(_state_dict, part)
    if type(part.optimizer) is not StatelessAdam:
        raise TypeError(f"{type(part).__name__} went on with {type(part.optimizer).__name__}, not StatelessAdam")


def _no_state(*arguments: Any, **options: Any) -> None:
    """In the place of megatron-core's `init_state_fn`."""


def _state_dict(part: Any) -> dict[str, Any]:
    """In the place of `DistributedOptimizer.state_dict`, in its form; it is loaded with a step in every group."""
    groups = [
        {**{name: value for name, value in group.items() if name != "params"}, "step": 0}
        for group in part.optimizer.param_groups
    ]
    found: dict[str, Any] = {"optimizer": {"param_groups": groups}}
    if part.grad_scaler:
        found["grad_scaler"] = part.grad_scaler.state_dict()
    return found
