"""What a process under torch_memory_saver's hook can be asked: its `cudaMalloc`, its flag, what was really tracked."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

MIB = 1 << 20

process: Any = ctypes.CDLL(None)


class Counts(NamedTuple):
    """Allocations so far."""

    tracked: int
    plain: int
    windows: int


def counts() -> Counts:
    def read(name: str) -> int:
        return ctypes.c_int.in_dll(process, name).value

    return Counts(read("fake_tracked"), read("fake_plain"), read("fake_windows"))


def synchronized() -> int:
    return ctypes.c_int.in_dll(process, "fake_synchronized").value


def taken_by(call: Callable[[], object]) -> Counts:
    """What `call` allocated."""
    before = counts()
    call()
    return Counts(*(after - count for after, count in zip(counts(), before, strict=True)))


def malloc(size: int = MIB) -> int:
    """The process's own `cudaMalloc`, as a library calls it."""
    return _allocate(process.cudaMalloc, size)


def window(size: int = MIB) -> int:
    """Memory that is taken from the driver by NCCL: `cudaMalloc` is not called."""
    return _allocate(process.ncclMemAlloc, size)


def free(pointer: int) -> None:
    process.cudaFree(ctypes.c_void_p(pointer))


def flag() -> bool:
    """This thread's, by whatever the version of torch_memory_saver offers."""
    if hasattr(process, "tms_get_interesting_region"):
        return bool(process.tms_get_interesting_region() & 0xFF)
    return bool(process._ZN13RegionManager21is_interesting_regionEv() & 0xFF)


def set_flag(on: bool) -> None:
    if hasattr(process, "tms_set_interesting_region"):
        process.tms_set_interesting_region(ctypes.c_bool(on))
    else:
        (process.tms_region_enter if on else process.tms_region_leave)()


def _allocate(function: Any, size: int) -> int:
    pointer = ctypes.c_void_p()
    assert function(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0
    assert pointer.value
    return pointer.value
