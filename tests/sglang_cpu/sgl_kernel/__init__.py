"""Stands for sgl_kernel where there is no build of it: everything can be imported, nothing can be called."""

from typing import Any

__version__ = "0.4.10"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not available on this machine")

    return missing
