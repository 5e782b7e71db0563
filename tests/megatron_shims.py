"""Makes megatron-core run over gloo on a machine without a GPU. It changes torch for the whole process."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from types import ModuleType
from typing import Any

import torch

FACTORIES = ("zeros", "ones", "empty", "tensor", "full", "arange", "randn", "rand", "empty_like", "zeros_like")


def core(module: str, name: str) -> Any:
    """A name out of megatron.core."""
    return getattr(importlib.import_module(f"megatron.core.{module}"), name)


def take_the_cpu_for_a_gpu() -> None:
    """Device, streams, factories, random state and names of tensor types: what training with megatron-core touches."""
    torch.set_num_threads(1)
    # The decorator of small functions, whose compiler takes longest of all to import, and then compiles for a CPU.
    torch.compile = lambda function=None, **options: function or (lambda other: other)  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.Stream = _Stream  # type: ignore[misc, assignment]
    torch.cuda.current_stream = _Stream  # type: ignore[assignment]
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)  # type: ignore[assignment]
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign]
    type_of = torch.Tensor.type

    def cuda_type(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:  # the optimizers sort parameters by it
            return type_of(self).replace("torch.", "torch.cuda.")
        return type_of(self, dtype, *args, **kwargs)

    torch.Tensor.type = cuda_type  # type: ignore[method-assign]
    leave_kernels_out()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is not installed beside it
        random = importlib.import_module("megatron.core.tensor_parallel.random")
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)  # type: ignore[attr-defined]


def leave_kernels_out() -> None:
    """The one module of megatron-core 0.17 and later that takes triton for granted. None of its kernels is called."""
    if importlib.util.find_spec("triton") is None:
        kernels: Any = ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        kernels.__getattr__ = lambda name: None
        sys.modules[kernels.__name__] = kernels


def let_experts_run() -> None:
    """What the experts of megatron-core take for granted: Transformer Engine, and sizes on a GPU."""
    utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    if not hasattr(utils, "te_general_gemm"):
        utils.te_general_gemm = None  # type: ignore[attr-defined]

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    utils.maybe_move_tensor_to_cpu = dispatcher.maybe_move_tensor_to_cpu = to_cpu  # type: ignore[attr-defined]


class _Stream:
    """There is only one, in which all is done already."""

    _one: _Stream | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> _Stream:
        if cls._one is None:
            cls._one = super().__new__(cls)
        return cls._one

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        """Nothing is waited for."""


def _on_cpu(make: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Any:
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made
