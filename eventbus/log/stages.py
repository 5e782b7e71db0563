"""`stage_notes`: what a log keeps of a pipeline's stages, so that a replay can have them again.

A stage that can be made anew is kept as the table that a configuration would have for it (`eventbus.config`):

    DynamicFilter(reward_nonzero_std, fallback="last")
    {"use": "middleware.filter:DynamicFilter", "judge": {"use": "middleware.filter:reward_nonzero_std"}, ...}

A function has one where it is found by its name. An object has one where its attributes are the options of its
constructor, all of them and no others: what it has made of them, or keeps beside them, no table can tell. Options are
plain values, or what has a table itself. An engine is left out, since a replay asks none. Where something looks like a
secret, the stage is not kept. Attributes are read where they lie: no code of a stage runs here.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from eventbus.config import STAGE_KEYS
from eventbus.log.format import StageNote
from eventbus.log.secrets import is_secret_name, is_secret_value
from eventbus.stage import DeclaredStage, Stage

__all__ = ["stage_notes", "table_of"]

LARGEST_TABLE: Final = 1 << 16
"""Characters and values of a table."""

_DEEPEST: Final = 16


def stage_notes(stages: Sequence[Stage]) -> list[StageNote]:
    """What a log keeps of a pipeline's stages."""
    writers = [_Writer() for _ in stages]
    tables = [writer.table(stage) for writer, stage in zip(writers, stages, strict=True)]
    times = Counter(made for writer in writers for made in writer.made)
    return [
        StageNote(
            name=stage.name,
            level=stage.level,
            external=stage.external,
            on_error=stage.on_error,
            path=_path(stage.function),
            wraps=stage.wraps,
            fans_out=stage.fans_out,
            counts=stage.counts,
            # An object that stages share would be one for each.
            table=None if any(times[made] > 1 for made in writer.made) else table,
        )
        for stage, table, writer in zip(stages, tables, writers, strict=True)
    ]


def table_of(stage: Stage) -> dict[str, Any] | None:
    """The table that makes the stage's function anew; None where none does."""
    return _Writer().table(stage)


def _path(function: Any) -> str | None:
    """Under which path a stage's function, or the class of its object, can be imported; for those who read."""
    while isinstance(function, DeclaredStage | partial):
        function = function.function if isinstance(function, DeclaredStage) else function.func
    path, found = _found(function if hasattr(function, "__qualname__") else type(function))
    return None if found is None else path


def _found(named: Any) -> tuple[str, Any]:
    """The path that something says it has, and what is there."""
    module, name = getattr(named, "__module__", None), named.__qualname__
    found: Any = None if module in (None, "__main__") else sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}", found


def _is_found(named: Any) -> bool:
    if not hasattr(named, "__qualname__"):
        return False
    _, found = _found(named)
    return found is named or (isinstance(found, DeclaredStage) and found.function is named)  # decorated


def _inside(function: Any) -> Any:
    """What a declaration is of, or the stage that a wrapper calls and adds nothing to."""
    if isinstance(function, DeclaredStage):
        return function.function
    wrapper, inside = getattr(function, "__dict__", {}).get("inside", (None, None))
    return inside if wrapper is function else None


class _NoTableError(Exception):
    pass


class _Writer:
    """Of one table."""

    def __init__(self) -> None:
        self.made: list[int] = []
        """Objects in it, by `id`."""
        self._left = LARGEST_TABLE

    def table(self, stage: Stage) -> dict[str, Any] | None:
        function: Any = stage.function
        try:
            while not _is_found(function) and (inside := _inside(function)) is not None:
                function = inside
            if stage.external and not inspect.isroutine(function):
                return None  # it answers from the record, and its options are more likely than others to be secret
            table = self._described(function, 0)
        except Exception:  # whatever is odd about it
            return None
        return table if isinstance(table, dict) and table.keys().isdisjoint(STAGE_KEYS) else None

    def _described(self, value: Any, depth: int) -> Any:
        """What stands for a value in a table.

        :raises _NoTableError: nothing does.
        """
        kind = type(value)
        self._left -= len(value) if kind is str else 1
        if self._left < 0 or depth > _DEEPEST:
            raise _NoTableError
        if kind is str:
            value.encode()  # a lone surrogate cannot be written
            if is_secret_value(value):
                raise _NoTableError
            return value
        if value is None or kind in (bool, int) or (kind is float and math.isfinite(value)):
            return value
        if kind is list:
            return [self._described(item, depth + 1) for item in value]
        if kind is dict:
            return self._options(value, depth)
        if isinstance(value, partial):
            if value.args or not _is_found(value.func) or not inspect.isroutine(value.func):
                raise _NoTableError
            return {"use": _found(value.func)[0]} | self._options(value.keywords, depth)
        if inspect.isroutine(value) or isinstance(value, DeclaredStage):
            if not _is_found(value):
                raise _NoTableError
            return {"use": _found(value)[0]}
        return self._made_by(kind, value, depth)

    def _made_by(self, cls: type, made: Any, depth: int) -> dict[str, Any]:
        if inspect.isclass(made) or cls.__module__ == "builtins" or not _is_found(cls):
            raise _NoTableError
        if any(getattr(base, "__slots__", ()) for base in cls.__mro__):
            raise _NoTableError
        parameters = inspect.signature(cls).parameters
        kinds = {parameter.kind for parameter in parameters.values()}
        options = dict(vars(made))
        if parameters.keys() != options.keys() or not kinds <= {
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.KEYWORD_ONLY,
        }:
            raise _NoTableError
        if options.pop("engine", made) is None:  # it would be given one
            raise _NoTableError
        self.made.append(id(made))
        return {"use": _found(cls)[0]} | self._options(options, depth)

    def _options(self, options: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        for name in options:
            if type(name) is not str or name == "use" or is_secret_name(name):
                raise _NoTableError
        return {name: self._described(value, depth + 1) for name, value in options.items()}
