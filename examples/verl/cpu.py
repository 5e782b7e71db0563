"""`use_cpu()` lets verl's FSDP engine run without a GPU, which verl has for CUDA and NPUs only.

What it sets is in verl's own registries; the engine, the optimizer and the losses stay as they are.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA

__all__ = ["use_cpu"]


class _PlatformCPU(PlatformCUDA):  # type: ignore[misc]
    device_name = "cpu"
    device_module = SimpleNamespace(
        **vars(torch.cpu),
        memory_allocated=lambda: 0,
        memory_reserved=lambda: 0,
        max_memory_allocated=lambda: 0,
        max_memory_reserved=lambda: 0,
        mem_get_info=lambda: (0, 0),
        get_device_name=lambda: "CPU",
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def empty_cache(self) -> None:
        pass

    def communication_backend_name(self) -> str:
        return "gloo"


def use_cpu() -> None:
    """Before anything of `verl.workers` is imported. Alone, or as the rank that the environment names."""
    if torch.distributed.is_initialized():
        return
    set_platform(_PlatformCPU())
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    torch.distributed.init_process_group("gloo")
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    EngineRegistry.register("language_model", ["fsdp", "fsdp2"], "cpu")(FSDPEngineWithLMHead)
