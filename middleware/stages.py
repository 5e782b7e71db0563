"""Say of a function what its signature cannot: its level, a name, a policy.

    @group_stage
    def shuffle(g): ...

    @sample_stage(external=True, on_error="resubmit")
    async def judge(sample): ...

    sample_stage(judge, name="second_judge")

What comes back is called like the function itself. What is not given stays as an inner declaration has it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, overload

from eventbus.stage import DeclaredStage, Level, OnError

__all__ = ["batch_stage", "group_stage", "sample_stage"]

Decorator: TypeAlias = Callable[[Callable[..., Any]], DeclaredStage]


@overload
def sample_stage(
    function: Callable[..., Any],
    /,
    *,
    name: str | None = None,
    external: bool | None = None,
    on_error: OnError | None = None,
    fans_out: bool | None = None,
) -> DeclaredStage: ...
@overload
def sample_stage(
    *,
    name: str | None = None,
    external: bool | None = None,
    on_error: OnError | None = None,
    fans_out: bool | None = None,
) -> Decorator: ...
def sample_stage(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    external: bool | None = None,
    on_error: OnError | None = None,
    fans_out: bool | None = None,
) -> DeclaredStage | Decorator:
    """Declare a stage that works on one sample.

    :param name: how events, errors and the command line call it; unique in a pipeline.
    :param external: what it does cannot be done again (a judge model, a tool): a replay answers from the record.
    :param on_error: "fail" (default): the sample fails; "resubmit": it is generated anew, at most twice; "raise": the
        rollout ends.
    :param fans_out: it may return a list of samples. A return annotation `list[...]` says the same.
    :raises TypeError: `function` is not callable, or a class.
    :raises ValueError: `on_error` is none of the three.
    """
    return _declare(function, "sample", name=name, external=external, on_error=on_error, fans_out=fans_out)


@overload
def group_stage(
    function: Callable[..., Any],
    /,
    *,
    name: str | None = None,
    external: bool | None = None,
    on_error: OnError | None = None,
) -> DeclaredStage: ...
@overload
def group_stage(
    *, name: str | None = None, external: bool | None = None, on_error: OnError | None = None
) -> Decorator: ...
def group_stage(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    external: bool | None = None,
    on_error: OnError | None = None,
) -> DeclaredStage | Decorator:
    """Declare a stage that works on a whole group. Parameters and errors as in `sample_stage`."""
    return _declare(function, "group", name=name, external=external, on_error=on_error)


@overload
def batch_stage(
    function: Callable[..., Any],
    /,
    *,
    name: str | None = None,
    external: bool | None = None,
    on_error: OnError | None = None,
) -> DeclaredStage: ...
@overload
def batch_stage(
    *, name: str | None = None, external: bool | None = None, on_error: OnError | None = None
) -> Decorator: ...
def batch_stage(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    external: bool | None = None,
    on_error: OnError | None = None,
) -> DeclaredStage | Decorator:
    """Declare a stage that works on a whole batch. Parameters and errors as in `sample_stage`."""
    return _declare(function, "batch", name=name, external=external, on_error=on_error)


def _declare(function: Callable[..., Any] | None, level: Level, **policy: Any) -> DeclaredStage | Decorator:
    if function is None:
        return partial(_declared, level=level, **policy)
    return _declared(function, level, **policy)


def _declared(function: Callable[..., Any], level: Level, **policy: Any) -> DeclaredStage:
    if inspect.isclass(function):
        raise TypeError(f"a stage is made of an instance, not of the class: {function.__name__}(...)")
    return DeclaredStage(function, level, **policy)
