"""Lets the real SGLang 0.5.23 start on a machine without a GPU: put this folder on PYTHONPATH, so that every process of
the server has it.

Of what it imports and does not need there, torchvision and sgl_kernel have no build without CUDA. torchvision is a
module in which every name exists; sgl_kernel lies beside this file, and its operators raise when they are called.
SGLang's own code for the CPU, in torch, does the rest. The buffers for routed experts are pinned by CUDA; here they are
plain. `--enable-deterministic-inference` wants kernels that compute the same in every batch, and one that hashes seeds;
here it is taken with a hash in torch, and repeats what comes one request at a time.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any


class _AnyName(types.ModuleType):
    """A module in which every name exists: classes for capitalised ones, else modules that can be called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            found: Any = _AnyMember(name, (), {})
        else:
            found = _AnyName(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self  # a decorator gives back what it decorates


class _AnyMember(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Torchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname.partition(".")[0] != "torchvision":
            return None
        frame = sys._getframe(1)
        while frame is not None:  # transformers must go on thinking that it is not installed
            if frame.f_code.co_name == "_is_package_available":
                return None
            frame = frame.f_back  # type: ignore[assignment]
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _AnyName(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


class _Changed(importlib.abc.MetaPathFinder):
    """Modules of SGLang that are changed when they have been imported."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname not in _CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: types.ModuleType) -> None:
            execute(module)
            _CHANGES[fullname](module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def _plain_buffers(module: Any) -> None:
    module.ALLOC_MEMORY_FUNCS = _Plain()


class _Plain(dict[Any, Any]):
    def __missing__(self, key: Any) -> Any:
        import torch

        return lambda dims, dtype=None, device="cpu", **options: torch.zeros(dims, dtype=dtype, device=device)


def _torch_attention_too(module: Any) -> None:
    module.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")


def _no_kernels(module: Any) -> None:
    module.enable_batch_invariant_mode = lambda *arguments, **options: None


def _hash_in_torch(module: Any) -> None:
    def mix(x: Any, shift: int, factor: int) -> Any:
        return ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF

    def murmur_hash32(seed: Any, positions: Any, columns: Any) -> Any:
        """[n], [n], [m] -> [n, m], 32 bits each."""
        row = mix(seed.long() * 0x9E3779B1 + positions.long(), 16, 0x85EBCA6B)
        hashed = mix(mix(row[:, None] + columns.long() * 0xC2B2AE35, 16, 0x85EBCA6B), 13, 0xC2B2AE35)
        return hashed ^ (hashed >> 16)

    module.murmur_hash32 = murmur_hash32


_CHANGES = {
    "sglang.srt.state_capturer.base": _plain_buffers,
    "sglang.srt.arg_groups.choices": _torch_attention_too,
    "sglang.srt.batch_invariant_ops.batch_invariant_ops": _no_kernels,
    "sglang.kernels.ops.sampling.murmur_hash": _hash_in_torch,
}

sys.meta_path.insert(0, _Changed())
sys.meta_path.append(_Torchvision())
