"""What `test_deep_ep.py` runs on a GPU, under torch_memory_saver's hook:
`LD_PRELOAD=... TMS_INIT_ENABLE=1 python -m tests.tms.on_gpu NAME`.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from types import ModuleType
from typing import Any

import torch

from backends.megatron.deep_ep import guard_deep_ep

SIZE = 256 << 20

process: Any = ctypes.CDLL(None)


def pause_frees_what_is_tracked() -> None:
    deep_ep: Any = ModuleType("deep_ep")

    class Buffer:
        def __init__(self) -> None:
            self.memory = _malloc()

    Buffer.__module__ = "deep_ep"
    deep_ep.Buffer = Buffer
    sys.modules["deep_ep"] = deep_ep
    torch.cuda.synchronize()
    with guard_deep_ep() as guard:
        assert guard.status.guarded == ("Buffer",)
        buffer = Buffer()
        assert guard.status.region is True
        _malloc()
        before = _free()
        process.tms_pause(None)
        assert SIZE <= _free() - before < 2 * SIZE
        _fill(buffer.memory)


def real_buffer() -> None:
    """At world size 1: the buffer, and nothing that `pause` could take from it."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29555")
    guard_deep_ep()
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    group = torch.distributed.group.WORLD
    deep_ep: Any = importlib.import_module("deep_ep")
    torch.cuda.synchronize()
    buffer = deep_ep.Buffer(group, SIZE, 0)
    before = _free()
    process.tms_pause(None)
    assert _free() - before < SIZE
    memory = buffer.get_local_buffer_tensor(torch.uint8)
    memory.fill_(7)
    torch.cuda.synchronize()
    assert bool((memory[:1024] == 7).all())
    process.tms_resume(None)
    torch.distributed.destroy_process_group()


def _malloc() -> int:
    pointer = ctypes.c_void_p()
    assert process.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(SIZE)) == 0
    assert pointer.value
    return pointer.value


def _free() -> int:
    return torch.cuda.mem_get_info()[0]


def _fill(pointer: int) -> None:
    assert process.cudaMemset(ctypes.c_void_p(pointer), 7, ctypes.c_size_t(SIZE)) == 0
    torch.cuda.synchronize()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
