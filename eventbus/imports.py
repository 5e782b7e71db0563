"""Import by name, with errors that say which part was not found and what is near it.

"Not found" is told apart from "failed": a module that is there and raises while it is imported raises its own error,
with a note of what was being loaded. `middleware` and `backends` are common folder names, so a module of that name is
refused when it is not the one that stands beside `eventbus`.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Protocol

__all__ = ["EXTRAS", "Gate", "LoadError", "load_object", "load_through", "optional_dependency"]

EXTRAS: Final[Mapping[str, str]] = {
    "aiohttp": "sglang",
    "httpx": "http",
    "math_verify": "math",
    "matplotlib": "embedded",
    "megatron": "megatron",
    "numpy": "embedded",
    "plotext": "embedded",
    "safetensors": "megatron",
    "torch": "embedded",
    "transformers": "sglang",
    "trio": "trio",
}
"""Modules that are no core dependency, and the extra of rolloutbus that brings each."""

_HOME: Final = Path(__file__).resolve().parent.parent
_SIBLINGS: Final = ("middleware", "backends")


class LoadError(ImportError):
    """A name leads nowhere, or to something that is not rolloutbus's own."""


def load_object(path: str) -> Any:
    """What `path` names, as "package.module:attribute" or "package.module.attribute"; nested attributes are fine.

    Found objects are remembered per path.

    :raises LoadError: `path` has another form, or a part of it does not exist; or a module of this distribution needs
        a package that is not installed, or is shadowed by another of its name; or a module calls `sys.exit`.
    :raises Exception: whatever a module raises while it is imported.
    """
    return _load(_checked(path))


class Gate(Protocol):
    """Says where a name of somebody else's may lead, step by step."""

    def refused_module(self, name: str) -> str | None:
        """Why a module is not to be imported. Asked before it is; what contains it has been."""

    def refused_object(self, found: Any) -> str | None:
        """Why what an attribute gave is not to be had."""


def load_through(gate: Gate, path: str) -> Any:
    """`load_object` for a name that is not trusted: no step is taken that the gate refuses.

    :raises LoadError: as `load_object`; or the gate refuses a step, and says why.
    :raises Exception: whatever a module raises while it is imported.
    """
    return _follow(_checked(path), gate)


@contextmanager
def optional_dependency() -> Iterator[None]:
    """Around imports of what an extra brings: where it is missing, the error says which extra to install.

        with optional_dependency():
            import torch

    :raises LoadError: a module named in `EXTRAS` is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise LoadError(
            f"{package} is not installed: pip install 'rolloutbus[{EXTRAS[package]}]'", name=package
        ) from error


def _checked(path: str) -> str:
    if not _well_formed(path):
        raise LoadError(f"cannot load {path!r}: write 'package.module:attribute', such as 'my_stages:tag_source'")
    return path


def _well_formed(path: object) -> bool:
    if not isinstance(path, str):
        return False
    module, colon, attributes = path.partition(":")
    parts = [*module.split("."), *(attributes.split(".") if colon else ())]
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


@cache
def _load(path: str) -> Any:
    return _follow(path, None)


def _follow(path: str, gate: Gate | None) -> Any:
    module_path, colon, attribute_path = path.partition(":")
    first, *rest = module_path.split(".")
    found: Any = _import(first, path, gate)
    for part in rest:
        # Without a colon an attribute goes before a submodule: `middleware.timeout` is the function.
        if not colon and hasattr(found, part):
            found = _attribute(found, part, path, gate)
        elif isinstance(found, ModuleType) and (colon or _has_module(found, part)):
            found = _import(f"{found.__name__}.{part}", path, gate)
        else:
            raise _no_attribute(path, found, part)
    for part in attribute_path.split(".") if colon else ():
        found = _attribute(found, part, path, gate)
    return found


def _attribute(owner: Any, name: str, path: str, gate: Gate | None) -> Any:
    if not hasattr(owner, name):
        raise _no_attribute(path, owner, name)
    found = getattr(owner, name)
    if gate is not None and (why := gate.refused_object(found)):
        raise LoadError(f"cannot load {path!r}: {why}")
    return found


def _import(name: str, path: str, gate: Gate | None) -> ModuleType:
    parent, _, last = name.rpartition(".")
    if parent and not hasattr(sys.modules[parent], "__path__"):
        raise LoadError(f"cannot load {path!r}: {parent!r} is a module, not a package; did you mean '{parent}:{last}'?")
    if not _exists(name):
        near = _did_you_mean(last, (module.name for module in pkgutil.iter_modules(_search_path(parent))))
        raise LoadError(f"cannot load {path!r}: there is no module {name!r}{near}", name=name)
    if name in _SIBLINGS:
        _refuse_shadow(name)
    if gate is not None and (why := gate.refused_module(name)):
        raise LoadError(f"cannot load {path!r}: {why}", name=name)
    try:
        if name.partition(".")[0] in ("eventbus", *_SIBLINGS):
            with optional_dependency():
                return importlib.import_module(name)
        return importlib.import_module(name)
    except LoadError as error:
        raise LoadError(f"cannot load {path!r}: {error}", name=error.name) from error.__cause__
    except SystemExit as error:  # a script, which would end the program, perhaps with the exit code of success
        raise LoadError(
            f"cannot load {path!r}: {name!r} calls sys.exit({'' if error.code is None else repr(error.code)}) while it "
            "is imported; put what it runs under `if __name__ == '__main__':`",
            name=name,
        ) from error
    except Exception as error:
        error.add_note(f"while importing {name!r} to load {path!r}")
        raise


def _has_module(package: ModuleType, name: str) -> bool:
    return hasattr(package, "__path__") and _exists(f"{package.__name__}.{name}")


def _exists(name: str) -> bool:
    return sys.modules.get(name) is not None or find_spec(name) is not None


def _search_path(package: str) -> list[str] | None:
    return list(sys.modules[package].__path__) if package else None


def _refuse_shadow(name: str) -> None:
    """:raises LoadError: `name` resolves to a package that does not stand beside `eventbus`."""
    module = sys.modules.get(name)
    spec = module.__spec__ if module is not None else find_spec(name)
    places = [Path(place).resolve() for place in (spec.submodule_search_locations or ())] if spec is not None else []
    if _HOME / name not in places:
        place = places[0] if places else spec and spec.origin
        raise LoadError(
            f"{name!r} is {place}, not the package of rolloutbus in {_HOME}: rename that one, or take its folder off "
            "sys.path",
            name=name,
        )


def _no_attribute(path: str, found: Any, name: str) -> LoadError:
    owner = f"module {found.__name__!r}" if isinstance(found, ModuleType) else repr(found)
    return LoadError(f"cannot load {path!r}: {owner} has no {name!r}{_did_you_mean(name, dir(found))}")


def _did_you_mean(name: str, there: Iterable[str]) -> str:
    near = get_close_matches(name, [other for other in there if not other.startswith("_")], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
