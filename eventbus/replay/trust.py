"""What a log may have imported that nobody has called trusted: its stages are named by whoever wrote it.

A replay runs where somebody works on the stages. So what it needs lies in the project at hand, and a name in a log
leads there, to the stages of rolloutbus, or nowhere:

    my_stages:score         my_stages.py lies below the current folder, or beside the program that runs
    middleware:Generate     one of `HARMLESS`
    builtins:OSError        an exception of Python or rolloutbus, for `retry`

Where a module would be found is asked of Python's finders, which run nothing of it; one that is imported already is
judged in the same way. What its attributes lead to must have been defined in such a module, too, so that
"my_stages:os.system" leads nowhere.
"""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
from collections.abc import Collection, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from eventbus.imports import LoadError, load_object, load_through
from eventbus.stage import DeclaredStage

__all__ = ["HARMLESS", "TRUST_IT", "Unasked"]

HARMLESS: Final = frozenset(
    {
        "DynamicFilter",
        "Generate",
        "GroupAdvantage",
        "MathAnswer",
        "accuracy_band",
        "exact_match",
        "mask_offpolicy",
        "repetition",
        "response_length",
        "reward_nonzero_std",
        "reward_nonzero_std_with_fallback",
        "truncation",
    }
)
"""What of `middleware` opens no file and connects to nothing, whatever its options say."""
TRUST_IT: Final = "if you trust the log: --trust, Replay(log, trust=True)"

_OURS: Final = ("eventbus", "middleware", "backends")
_DATA: Final = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, type(None))
_INSTALLED: Final = ("site-packages", "dist-packages")
_OF_PYTHON: Final = tuple(
    {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")}
)


class Unasked:
    """The gate for the names and paths in a log.

    :param base: the folder of the log, at which its relative paths start.
    :param asked: names that somebody has typed: they lead where they lead.
    """

    def __init__(self, base: Path, asked: Collection[str] = ()) -> None:
        self.base = base
        self.asked = asked
        self.project = _project()

    def load(self, path: str) -> Any:
        """:raises LoadError: the name leads nowhere, or where a log's may not.
        :raises Exception: whatever a module raises while it is imported.
        """
        if path in self.asked:
            return load_object(path)
        if any(part.startswith("__") for part in re.split("[.:]", path)):
            raise LoadError(f"cannot load {path!r}: it leads into Python's own parts; {TRUST_IT}")
        try:
            return load_through(self, path)
        except LoadError as error:
            if error.name is None or TRUST_IT in str(error) or self.holds(self.base):
                raise
            raise LoadError(f"{error}; modules beside the log are left alone; {TRUST_IT}", name=error.name) from error

    def refused_path(self, path: Path) -> str | None:
        """Why a file is not to be opened that an option names."""
        place = path.resolve()
        if any(place.is_relative_to(folder.resolve()) for folder in (self.base, *self.project)):
            return None
        return f"{place} lies neither beside the log nor in the current folder; {TRUST_IT}"

    # A `Gate`

    def refused_module(self, name: str) -> str | None:
        if name.partition(".")[0] in _OURS or name == "builtins":
            return None  # what is taken out of it is looked at
        if any(self.holds(place) for place in _places(name)):
            return None
        return f"{name!r} is no module in the current folder, where the stages of a log are looked for; {TRUST_IT}"

    def refused_object(self, found: Any) -> str | None:
        if isinstance(found, ModuleType):
            return self.refused_module(found.__name__)
        while isinstance(found, partial | DeclaredStage):
            found = found.func if isinstance(found, partial) else found.function
        if type(found) in _DATA:
            return None
        is_object = not (inspect.isclass(found) or inspect.isroutine(found))
        owner = type(found) if is_object else found
        module, name = str(getattr(owner, "__module__", None)), str(getattr(owner, "__qualname__", owner))
        top = module.partition(".")[0]
        if top in (*_OURS, "builtins") and inspect.isclass(found) and issubclass(found, Exception):
            return None
        if top in _OURS:
            if is_object or (module.startswith("middleware.") and name in HARMLESS):
                return None
            return f"{name} is none of rolloutbus's stages that leave files and networks alone; {TRUST_IT}"
        if module != "builtins" and self.refused_module(module) is None:
            return None
        return f"{name} comes from {module!r}, which is no module in the current folder; {TRUST_IT}"

    # The project

    def holds(self, place: Path) -> bool:
        """Whether something lies in the project, and not in what was installed below it."""
        return any(_lies_in(place, folder) for folder in self.project)


def _project() -> list[Path]:
    """The current folder, and that of the program; neither the root, nor where things are installed."""
    folders = [Path.cwd()]
    program = getattr(sys.modules["__main__"], "__file__", None)
    if program is not None and program.endswith(".py"):  # not a command, which lies among all commands
        folders.append(Path(program).absolute().parent)
    return [each for each in folders if each != each.parent and set(_INSTALLED).isdisjoint(each.parts)]


def _places(name: str) -> Iterable[Path]:
    """Where a module is, or would be found: its file, or the folders of a namespace. Imports nothing."""
    parent, module = name.rpartition(".")[0], sys.modules.get(name)
    if module is None and parent and parent not in sys.modules:
        return ()  # to look there would import the parent
    spec = find_spec(name) if module is None else getattr(module, "__spec__", None)
    if spec is None:
        return ()
    if spec.has_location and spec.origin is not None:
        return (Path(spec.origin).absolute(),)
    return [Path(place).absolute() for place in spec.submodule_search_locations or ()]


def _lies_in(place: Path, folder: Path) -> bool:
    root, target = folder.resolve(), place.resolve()
    return target.is_relative_to(root) and not (_is_installed(target, root) or _is_installed(place, folder))


def _is_installed(place: Path, root: Path) -> bool:
    """Below `root`, or where Python and its packages are. Installed files may be links to where they are kept."""
    if any(place.is_relative_to(folder) for folder in _OF_PYTHON):
        return True
    between = [folder for folder in (place, *place.parents) if folder != root and folder.is_relative_to(root)]
    return any(folder.name in _INSTALLED or (folder / "pyvenv.cfg").exists() for folder in between)
