"""`guard_deep_ep`: what DeepEP keeps on the device is not taken from torch_memory_saver.

torch_memory_saver, in LD_PRELOAD, answers `cudaMalloc` of a thread whose "interesting region" flag is on with memory
that `pause()` takes away. DeepEP's buffers are mapped by other ranks and outlive that: built with the flag on, they end
in an illegal address after the first pause. With the environment variable TMS_INIT_ENABLE=1 the flag is on in every
thread from the start, before the Python package of torch_memory_saver has done anything. So the guard asks the symbols
of the process itself and never imports that package.

While it is held,

- each public class of deep_ep whose name ends in Buffer is constructed with the calling thread's flag off, its
  subclasses from the first line of their own constructor on. The device is synchronised before the flag is put back to
  what was read, on every path. A flag that is off is left alone;
- `update_template_config`, by which HybridEPBuffer grows during a dispatch, runs with the flag off. It synchronises the
  device by itself when it takes memory, and only then: it runs in every dispatch, also while a CUDA graph is captured;
- classes are found whenever deep_ep is imported. An import that fails does so with its own exception, whatever that is.

Not covered: memory that a constructor takes in a thread of its own, since the flag belongs to a thread; and torch
tensors in it, which torch may place into a block that it already holds. torch_memory_saver's hook mode "torch" does not
hook `cudaMalloc`, so there is nothing to guard; there a flag turned off would end the process at the next tensor.

Sources: torch_memory_saver 0.0.6 to 0.0.10 (entrypoint.cpp and its symbols), sgl-deep-ep 0.1.2.post1
(buffers/legacy.py, buffers/elastic.py), DeepEP's branch hybrid-ep (hybrid_ep_buffer.py, hybrid_ep.cu).
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final, NamedTuple, Self

__all__ = ["DeepEPGuard", "GuardStatus", "guard_deep_ep"]

logger = logging.getLogger("rolloutbus.megatron")

_GROWS: Final = "update_template_config"
_CONSTRUCTS: Final = ("__new__", "__init__")

# The guard changes classes and sys.meta_path, which belong to the process; so does the one patch that did it.
_lock = threading.RLock()
_patch: _Patch | None = None


class GuardStatus(NamedTuple):
    """What a guard found in this process."""

    hook: str
    """Whether torch_memory_saver hooks `cudaMalloc`, in words."""
    region: bool | None
    """The calling thread's flag; None where there is none, or none that can be read."""
    guarded: tuple[str, ...]
    """Classes of deep_ep that are guarded, by name; empty before deep_ep is imported."""


def guard_deep_ep() -> DeepEPGuard:
    """Keep DeepEP's buffers out of torch_memory_saver's regions, from this call on until `unguard`.

        guard_deep_ep()                   # for the rest of the process
        with guard_deep_ep(): ...         # or for a while

    Call it at any time before the first buffer is built, and as often as you like: everything is changed once, and
    undone when the last guard is given back. What it found is logged to `rolloutbus.megatron`.

    It raises nothing. A constructor in which the synchronisation of the device fails raises that error (a
    `RuntimeError` of torch); a constructor that fails itself raises its own.
    """
    global _patch
    with _lock:
        if _patch is None:
            _patch = _Patch()
        patch = _patch
        patch.holders += 1
    patch.guard_what_is_imported()
    return DeepEPGuard(patch)


class DeepEPGuard:
    """A hold on the guard; the last one that is given back undoes it."""

    def __init__(self, patch: _Patch) -> None:
        self._patch = patch
        self._held = True

    def unguard(self) -> None:
        """Give this hold back. A second time does nothing."""
        global _patch
        with _lock:
            if not self._held:
                return
            self._held = False
            self._patch.holders -= 1
            if not self._patch.holders:
                self._patch.undo()
                _patch = None

    @property
    def status(self) -> GuardStatus:
        hook = self._patch.hook
        return GuardStatus(self._patch.found, None if hook is None else hook.read(), tuple(self._patch.guarded))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.unguard()


class _Hook(NamedTuple):
    """The calling thread's flag."""

    read: Callable[[], bool]
    write: Callable[[bool], object]


def _find_hook(process: Any) -> tuple[_Hook | None, str]:
    """The flag by the symbols of `process`, and what was found in words."""
    if not hasattr(process, "tms_pause"):
        named = "torch_memory_saver" in os.environ.get("LD_PRELOAD", "")
        why = (
            "LD_PRELOAD names it, but the file is not there, or it was named after this process began"
            if named
            else "it was not in LD_PRELOAD when this process began"
        )
        return None, f"torch_memory_saver does not hook cudaMalloc: {why}"
    if hasattr(process, "tms_get_interesting_region"):
        read, write = process.tms_get_interesting_region, process.tms_set_interesting_region
        write.argtypes = [ctypes.c_bool]
        versions = "0.0.9 or later"
    elif hasattr(process, "_ZN13RegionManager21is_interesting_regionEv"):  # a C++ name; it has no other getter
        read, enter, leave = (
            process._ZN13RegionManager21is_interesting_regionEv,
            process.tms_region_enter,
            process.tms_region_leave,
        )

        def write(on: bool) -> object:
            return enter() if on else leave()

        versions = "0.0.6 or 0.0.8"
    else:
        return None, "torch_memory_saver hooks cudaMalloc, and no symbol of it tells its state; install 0.0.9 or later"
    read.restype = ctypes.c_bool
    return _Hook(read, write), f"torch_memory_saver {versions} hooks cudaMalloc"


class _Patch:
    """Everything that the guard changed. There is one while a guard is held."""

    def __init__(self) -> None:
        self.holders = 0
        self.guarded: list[str] = []
        self._active = True
        self._wrappers: set[object] = set()
        self._undo: list[Callable[[], None]] = []
        try:
            process = ctypes.CDLL(None)
        except (OSError, TypeError):  # not on Windows, where there is no such hook either
            process = None
        self.hook, self.found = _find_hook(process)
        if self.hook is not None:
            finder = _Finder(self.guard_module)
            sys.meta_path.insert(0, finder)
            self._undo.append(lambda: sys.meta_path.remove(finder))
        if self.hook is None and hasattr(process, "tms_pause"):
            logger.warning("DeepEP's buffers are not guarded: %s", self.found)
        elif self.hook is None:
            logger.info("nothing to guard in DeepEP: %s", self.found)
        elif "deep_ep" not in sys.modules:
            logger.info("DeepEP's buffers will be guarded when deep_ep is imported: %s", self.found)

    def guard_what_is_imported(self) -> None:
        # Not under the lock: a thread that imports deep_ep at the moment takes the lock at the end of that.
        if self.hook is None or sys.modules.get("deep_ep") is None:
            return
        try:
            module = importlib.import_module("deep_ep")  # waits where another thread has not finished importing it
        except Exception:  # and failed; this import came through our finder, which logged the error
            return
        self.guard_module(module)

    def guard_module(self, module: ModuleType) -> None:
        """Guard the classes of deep_ep that are not guarded yet."""
        with _lock:
            if not self._active:
                return
            roots = {name: value for name, value in vars(module).items() if _is_buffer(name, value)}
            guarded = [name for name, root in roots.items() if self._guard_root(root)]
            if not guarded:
                logger.warning("nothing is guarded: deep_ep has no public class whose name ends in Buffer")
            elif guarded != self.guarded:
                logger.info("guarded in DeepEP: %s; %s", ", ".join(guarded), self.found)
            self.guarded = guarded

    def undo(self) -> None:
        # What others have put around a wrapper stays, so the wrapper has to step aside by itself.
        self._active = False
        for undo in reversed(self._undo):
            undo()

    def _guard_root(self, root: type) -> bool:
        """Guard a class with its present and future subclasses. Whether it could be done."""
        try:
            for cls in _family(root):
                self._guard_class(cls)
            self._watch_subclasses(root)
        except TypeError as error:  # a class of an extension module may forbid it
            logger.warning("%s of deep_ep is not guarded: %s", root.__name__, error)
            return False
        return True

    def _watch_subclasses(self, root: Any) -> None:
        own = vars(root).get("__init_subclass__")
        if own in self._wrappers:
            return

        def __init_subclass__(cls: Any, /, **arguments: Any) -> None:
            if own is not None:
                own.__get__(None, cls)(**arguments)
            else:
                super(root, cls).__init_subclass__(**arguments)
            with _lock:
                if self._active:
                    self._guard_class(cls)

        self._replace(root, "__init_subclass__", classmethod(__init_subclass__))

    def _guard_class(self, cls: type) -> None:
        for name in (*_CONSTRUCTS, _GROWS):
            function = getattr(cls, name, None)
            if name == "__new__" and name not in vars(cls):
                continue  # that of `object`, or of a base that is guarded
            if function in (None, object.__init__) or function in self._wrappers:
                continue
            wrapper = self._with_flag_off(function, synchronize=name in _CONSTRUCTS)
            self._wrappers.add(wrapper)
            self._replace(cls, name, staticmethod(wrapper) if name == "__new__" else wrapper)

    def _with_flag_off(self, function: Callable[..., Any], synchronize: bool) -> Callable[..., Any]:
        hook = self.hook
        assert hook is not None

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if not self._active:
                return function(*args, **kwargs)
            with _flag_off(hook, synchronize):
                return function(*args, **kwargs)

        return guarded

    def _replace(self, cls: type, name: str, value: object) -> None:
        missing = object()
        before = vars(cls).get(name, missing)
        setattr(cls, name, value)
        self._wrappers.add(value)

        def undo() -> None:
            if vars(cls).get(name) is not value:
                return
            if before is missing:
                delattr(cls, name)
            else:
                setattr(cls, name, before)

        self._undo.append(undo)


@contextmanager
def _flag_off(hook: _Hook, synchronize: bool) -> Iterator[None]:
    if not hook.read():
        yield
        return
    try:
        hook.write(False)
        try:
            yield
        except BaseException as error:
            if synchronize:
                try:
                    _synchronize()
                except Exception as other:
                    error.add_note(f"the device could not be synchronised after that: {other}")
            raise
        if synchronize:
            _synchronize()
    finally:
        hook.write(True)


def _synchronize() -> None:
    torch: Any = sys.modules.get("torch")  # deep_ep imports it
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()


def _is_buffer(name: str, value: object) -> bool:
    """Whether it is DeepEP's own: not, for one, `collections.abc.Buffer`."""
    if name.startswith("_") or not name.endswith("Buffer") or not isinstance(value, type):
        return False
    return value.__module__.partition(".")[0] not in {*sys.stdlib_module_names, "torch"}


def _family(root: type) -> list[type]:
    """`root` and its subclasses, bases first."""
    found = [root]
    subclasses: list[type] = root.__subclasses__()
    for cls in subclasses:
        found += [one for one in _family(cls) if one not in found]
    return found


class _Finder(MetaPathFinder):
    """Finds deep_ep as the other finders do, and calls `then` when it has been imported."""

    def __init__(self, then: Callable[[ModuleType], None]) -> None:
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "deep_ep":
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                break
        else:
            return None
        loader: Any = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:  # a namespace package: a folder without any code
            return spec

        def exec_module(module: ModuleType) -> None:
            try:
                execute(module)
            except Exception as error:
                logger.warning("deep_ep could not be imported, nothing of it is guarded: %s", _one_line(error))
                raise
            self._then(module)

        loader.exec_module = exec_module
        return spec


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
