"""Stands for DeepEP: classes that take their memory as the real ones do, with nothing behind them.

Sources: sgl-deep-ep 0.1.2.post1 and DeepEP's branch hybrid-ep.
"""

from __future__ import annotations

from tests.tms import cuda

__version__ = "0+fake"


class Buffer:
    """Two `cudaMalloc`: the buffer and a workspace."""

    def __init__(self, group: object = None, num_nvl_bytes: int = cuda.MIB, fails: bool = False) -> None:
        self.group = group
        self.memory = [cuda.malloc(num_nvl_bytes)]
        if fails:
            raise RuntimeError("Failed: CUDA error, DeepEP/csrc/deep_ep.cpp:123")
        self.memory.append(cuda.malloc(2 * cuda.MIB))
        self.flag_inside = cuda.flag()


class ElasticBuffer:
    """A symmetric window that NCCL takes from the driver, and a tensor of torch in the barrier after it."""

    def __init__(self, group: object = None, fails: bool = False) -> None:
        self.memory = [cuda.window()]
        self.flag_at_window = cuda.flag()
        if fails:
            raise RuntimeError("Failed: NCCL error, DeepEP/csrc/elastic/buffer.hpp:45")
        self.memory.append(cuda.malloc())


class Runtime:
    """HybridEPBuffer's C++ part: three `cudaMalloc`, anew when it has to grow, with a synchronised device."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.memory = [cuda.malloc() for _ in range(3)]

    def update_buffer(self, tokens: int) -> bool:
        if tokens <= self.tokens:
            return False
        for pointer in self.memory:
            cuda.free(pointer)
        self.__init__(tokens)  # type: ignore[misc]
        cuda.process.cudaDeviceSynchronize()
        return True


class HybridEPBuffer:
    """Grows in a dispatch that brings more tokens than any before."""

    def __init__(self, group: object = None, max_num_of_tokens_per_rank: int = 16, fails: bool = False) -> None:
        self.runtime = Runtime(max_num_of_tokens_per_rank)
        if fails:
            raise RuntimeError("Failed: CUDA error, DeepEP/csrc/hybrid_ep/hybrid_ep.cu:67")

    def update_template_config(self, num_of_tokens_per_rank: int) -> int:
        self.runtime.update_buffer(num_of_tokens_per_rank)
        return num_of_tokens_per_rank

    def dispatch(self, num_of_tokens: int) -> int:
        """:returns: a handle, and takes memory for its result, which belongs to the region."""
        self.update_template_config(num_of_tokens_per_rank=num_of_tokens)
        return cuda.malloc()


class LowLatencyBuffer:
    """One of a kind that is not known by name."""

    def __init__(self) -> None:
        self.memory = [cuda.malloc()]


class EventOverlap:
    """No buffer: its memory belongs where torch_memory_saver wants it."""

    def __init__(self) -> None:
        self.memory = [cuda.malloc()]


class _PrivateBuffer:
    def __init__(self) -> None:
        self.memory = [cuda.malloc()]
