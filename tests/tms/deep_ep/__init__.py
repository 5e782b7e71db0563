"""Stands for DeepEP: classes that take their memory as the real ones do. What megatron-core sends through two of them
goes over gloo.

Sources: sgl-deep-ep 0.1.2.post1 and DeepEP's branch hybrid-ep.
"""

from __future__ import annotations

import threading
from typing import Any

from tests.tms import cuda

from .utils import EventOverlap as EventOverlap

__version__ = "0+fake"


class Hints:
    """Of DeepEP's `Config`: how many bytes a buffer needs."""

    @staticmethod
    def get_nvl_buffer_size_hint(hidden_bytes: int, ranks: int) -> int:
        return 16 * hidden_bytes * ranks

    @staticmethod
    def get_rdma_buffer_size_hint(hidden_bytes: int, ranks: int) -> int:
        return 0


class Buffer:
    """Two `cudaMalloc`: the buffer and a workspace."""

    def __init__(
        self, group: Any = None, num_nvl_bytes: int = cuda.MIB, num_rdma_bytes: int = 0, fails: bool = False
    ) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self.built_in = threading.current_thread().name
        self.memory = [cuda.malloc(num_nvl_bytes)]
        if fails:
            raise RuntimeError("Failed: CUDA error, DeepEP/csrc/deep_ep.cpp:123")
        self.memory.append(cuda.malloc(2 * cuda.MIB))
        self.flag_inside = cuda.flag()

    @staticmethod
    def set_num_sms(number: int) -> None:
        """There are none."""

    @staticmethod
    def get_dispatch_config(ranks: int) -> Hints:
        return Hints()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Any, num_experts: int, **events: object) -> tuple[Any, ...]:
        """The layout is all that `dispatch` needs to know of it: how many experts there are."""
        return None, None, num_experts, None, EventOverlap()

    def dispatch(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        num_tokens_per_expert: int = 0,
        handle: Any = None,
        **layout: object,
    ) -> tuple[Any, ...]:
        """A token goes to each rank that has experts of it, once."""
        from .exchange import Routes, experts_of

        if handle is not None:
            return handle.send(x), None, None, None, None, EventOverlap()
        wanted = experts_of(topk_idx, num_tokens_per_expert)
        handle = Routes(self.group, wanted.view(len(x), self.group.size(), -1).any(2))
        here = num_tokens_per_expert // self.group.size()
        chosen = handle.send(topk_idx) - handle.rank * here
        others = (chosen < 0) | (chosen >= here)
        chosen = chosen.masked_fill(others, -1)
        counts = experts_of(chosen, here).sum(0).tolist()
        return handle.send(x), chosen, handle.send(topk_weights).masked_fill(others, 0), counts, handle, EventOverlap()

    def combine(self, x: Any, handle: Any, topk_weights: Any = None, **events: object) -> tuple[Any, ...]:
        return handle.back(x), None if topk_weights is None else handle.back(topk_weights), EventOverlap()


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

    def __init__(
        self,
        group: Any = None,
        max_num_of_tokens_per_rank: int = 16,
        hidden_dim: int = 0,
        num_local_experts: int = 0,
        fails: bool = False,
        **sms: object,
    ) -> None:
        self.group, self.hidden_dim, self.num_local_experts = group, hidden_dim, num_local_experts
        self.built_in = threading.current_thread().name
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

    def dispatch_with_permute(
        self, hidden: Any, routing_map: Any = None, probs: Any = None, handle: Any = None, **options: object
    ) -> tuple[Any, ...]:
        """A token goes to each of its experts."""
        import torch

        from .exchange import Routes

        self.update_template_config(num_of_tokens_per_rank=len(hidden))
        handle = handle or Routes(self.group, routing_map)
        counts = torch.tensor(handle.counts)
        if probs is not None:
            probs = handle.send(probs).gather(1, handle.places[:, None])[:, 0]
        return handle.send(hidden), probs, None, counts, handle

    def combine_with_unpermute(self, hidden: Any, handle: Any, probs: Any = None, **options: object) -> tuple[Any, Any]:
        if probs is not None:
            whole = probs.new_zeros(len(probs), self.group.size() * self.num_local_experts)
            probs = handle.back(whole.scatter(1, handle.places[:, None], probs[:, None]))
        return handle.back(hidden), probs


class LowLatencyBuffer:
    """One of a kind that is not known by name."""

    def __init__(self) -> None:
        self.memory = [cuda.malloc()]


class _PrivateBuffer:
    def __init__(self) -> None:
        self.memory = [cuda.malloc()]
