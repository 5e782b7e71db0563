"""`stage_notes`: what a log keeps of a pipeline's stages, so that a replay can have them again.

A stage that can be made anew is kept as the table that a configuration would have for it (`eventbus.config`):

    DynamicFilter(reward_nonzero_std, fallback="last")
    {"use": "middleware.filter:DynamicFilter", "judge": {"use": "middleware.filter:reward_nonzero_std"}, ...}

The options of an object are those of its constructor, and are read from its attributes of the same names. What has an
option that is no plain value and is not found by a name, keeps it elsewhere, or looks like a secret, has no table.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import msgspec

from eventbus.log.format import StageNote, printable
from eventbus.stage import DeclaredStage, Stage

__all__ = ["stage_notes"]

LARGEST_TABLE: Final = 1 << 16
"""Bytes of a table."""

_DEEPEST: Final = 16
_TAKEN: Final = frozenset({"name", "external", "on_error", "in_thread", "timeout", "retry", "limit"})
"""Keys of a table that are no options of the stage."""
_SECRET: Final = re.compile(
    r"api_?key|access_?key|secret|passw|credential|auth|cookie|header|(?<!_)token$", re.IGNORECASE
)
_ABSENT: Final = object()


def stage_notes(stages: Iterable[Stage]) -> list[StageNote]:
    """What a log keeps of a pipeline's stages."""
    return [
        StageNote(
            stage.name,
            stage.level,
            stage.external,
            stage.on_error,
            _import_path(stage.function),
            _shown(stage),
            None if stage.external else _table(stage.function),  # which answers from the record
        )
        for stage in stages
    ]


def _import_path(function: Any) -> str | None:
    """Under which path a stage's function, or the class of its object, can be imported."""
    while isinstance(function, DeclaredStage | partial):
        function = function.function if isinstance(function, DeclaredStage) else function.func
    owner = function if hasattr(function, "__qualname__") else type(function)
    path, found = _found(owner)
    return None if found is None else path


def _found(named: Any) -> tuple[str, Any]:
    """The path that something says it has, and what is there."""
    module, name = getattr(named, "__module__", None), named.__qualname__
    found: Any = None if module in (None, "__main__") else sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}", found


def _shown(stage: Stage) -> str:
    try:
        return printable(repr(stage.function)[:500])
    except Exception as error:
        return f"<{type(stage.function).__qualname__}, whose repr raised {type(error).__name__}>"


# Tables


class _NoTableError(Exception):
    pass


def _table(function: Any) -> dict[str, Any] | None:
    try:
        while not _is_found(function) and (inside := _inside(function)) is not None:
            function = inside
        table = _described(function, 0)
        if not isinstance(table, dict) or not _TAKEN.isdisjoint(table):
            return None
        return table if len(msgspec.json.encode(table)) <= LARGEST_TABLE else None
    except Exception:  # also what attributes of others raise when they are read
        return None


def _inside(function: Any) -> Any:
    """What a declaration is of, or the stage that a wrapper, such as `limit`, calls and adds nothing to."""
    return function.function if isinstance(function, DeclaredStage) else getattr(function, "__dict__", {}).get("inside")


def _is_found(named: Any) -> bool:
    if not hasattr(named, "__qualname__"):
        return False
    _, found = _found(named)
    return found is named or (isinstance(found, DeclaredStage) and found.function is named)  # decorated


def _described(value: Any, depth: int) -> Any:
    """What stands for a value in a table.

    :raises _NoTableError: nothing does.
    """
    if depth > _DEEPEST:
        raise _NoTableError
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) in (list, tuple):
        return [_described(item, depth + 1) for item in value]
    if type(value) is dict:
        if "use" in value or not all(type(key) is str for key in value):
            raise _NoTableError
        return _options(value, depth)
    if isinstance(value, partial):
        if value.args or not _is_found(value.func):
            raise _NoTableError
        return {"use": _found(value.func)[0]} | _options(value.keywords, depth)
    if inspect.isclass(value):  # in a table it would be called
        raise _NoTableError
    if inspect.isroutine(value) or isinstance(value, DeclaredStage):
        if not _is_found(value):
            raise _NoTableError
        return {"use": _found(value)[0]}
    return _made_by(type(value), value, depth)


def _made_by(cls: type, made: Any, depth: int) -> dict[str, Any]:
    if cls.__module__ == "builtins" or not _is_found(cls):
        raise _NoTableError
    options = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise _NoTableError
        value = getattr(made, name, _ABSENT)
        if value is _ABSENT:
            raise _NoTableError
        if value is not parameter.default:
            options[name] = value
    return {"use": _found(cls)[0]} | _options(options, depth)


def _options(options: dict[str, Any], depth: int) -> dict[str, Any]:
    if "use" in options or any(map(_SECRET.search, options)):
        raise _NoTableError
    return {name: _described(value, depth + 1) for name, value in options.items()}
