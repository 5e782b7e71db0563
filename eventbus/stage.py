"""The contract of a stage, and how a stage is bound: once, when the pipeline is built.

A stage is any callable. What it is follows from its signature alone:

    (x)             a stage: gets the value
    (x, call_next)  a wrapper (async, sample level): `await call_next(x)` runs what comes after it
    (args, x)       a hook of slime: also gets `Pipeline(args=...)`

`x` is a `Sample`, `Group` or `Batch`: a decorator or a `level` attribute says which, else the annotation of `x`, else
its name. Further parameters are filled by keyword from what the pipeline offers at that level (`OFFERS`); a stage with
`**kwargs` gets all of it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial, update_wrapper
from typing import Any, Final, Literal, TypeAlias

import msgspec

from eventbus.group import Batch, Group
from eventbus.sample import Sample

__all__ = [
    "OFFERS",
    "CallNext",
    "ContractError",
    "DeclaredStage",
    "Drop",
    "Dropped",
    "Hold",
    "Level",
    "OnError",
    "Stage",
    "bind",
    "bind_all",
]

Level: TypeAlias = Literal["sample", "group", "batch"]
OnError: TypeAlias = Literal["fail", "resubmit", "raise"]
CallNext: TypeAlias = Callable[[Sample], Awaitable[Sample]]

OFFERS: Final[Mapping[Level, frozenset[str]]] = {
    "sample": frozenset({"rollout_id", "evaluation", "args", "stage", "sampling"}),
    "group": frozenset({"rollout_id", "evaluation", "args", "stage", "remaining", "target"}),
    "batch": frozenset({"rollout_id", "evaluation", "args", "stage"}),
}
"""Keywords per level. `sampling` is what `Pipeline.evaluate(sampling=...)` changes, empty in training. `remaining` and
`target` are the running count of a filter; a group stage that asks for them is run one group at a time, in completion
order."""

_LEVELS: Final[tuple[Level, ...]] = ("sample", "group", "batch")
_TYPES: Final[Mapping[str, Level]] = {"Sample": "sample", "Group": "group", "Batch": "batch"}


class Drop(msgspec.Struct, frozen=True):
    """Returned by a sample or group stage: this leaves the stream, counted under `reason`."""

    reason: str


class Hold(msgspec.Struct, frozen=True):
    """Returned by a group stage that asks for the count: rejected, yet held in reserve.

    When the rounds are spent and nothing is in flight, the batch is filled from the held groups by
    (`score` descending, `group_index`); those left over are dropped under `reason`.
    """

    reason: str
    score: float


class Dropped(Exception):
    """A stage further in dropped the sample; `call_next` raises it so that it unwinds through the wrappers."""

    def __init__(self, drop: Drop) -> None:
        super().__init__(drop.reason)
        self.drop = drop

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.drop,)

    @property
    def reason(self) -> str:
        return self.drop.reason


class ContractError(TypeError):
    """A stage broke its contract, by its signature or by what it returned. Stops the rollout at once."""


class DeclaredStage:
    """A callable with what its signature cannot say. It is called like the callable itself."""

    def __init__(
        self,
        function: Callable[..., Any],
        level: Level | None = None,
        *,
        name: str | None = None,
        external: bool | None = None,
        on_error: OnError | None = None,
        fans_out: bool | None = None,
    ) -> None:
        if not callable(function):
            raise TypeError(f"a stage is a callable, got {function!r}")
        if on_error not in (None, "fail", "resubmit", "raise"):
            raise ValueError(f"on_error={on_error!r}: choose 'fail', 'resubmit' or 'raise'")
        update_wrapper(self, function)
        self.function = function
        self.level: Level | None = level or getattr(function, "level", None)
        self.stage_name: str | None = name or getattr(function, "stage_name", None)
        self.external: bool = getattr(function, "external", False) if external is None else external
        inherited: OnError = getattr(function, "on_error", "fail")
        self.on_error: OnError = on_error or inherited
        self.fans_out: bool | None = getattr(function, "fans_out", None) if fans_out is None else fans_out

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<stage {_name(self)}>"


class Stage:
    """A bound stage: what the pipeline needs to know of it, worked out once."""

    __slots__ = (
        "counts", "external", "fans_out", "function", "level", "name", "on_error", "takes_args", "wants", "wraps",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        level: Level,
        function: Callable[..., Any],
        *,
        wraps: bool,
        takes_args: bool,
        wants: frozenset[str],
        external: bool,
        on_error: OnError,
        fans_out: bool,
    ) -> None:
        self.name = name
        self.level = level
        self.function = function
        self.wraps = wraps
        self.takes_args = takes_args
        self.wants = wants
        self.external = external
        self.on_error = on_error
        self.fans_out = fans_out
        self.counts = level == "group" and not wants.isdisjoint(("remaining", "target"))
        """It asks for the running count, so groups pass it one at a time."""

    def call(self, offers: Mapping[str, Any]) -> Callable[..., Any]:
        """The function with its keywords filled in, taking the value alone (and `call_next` for a wrapper)."""
        keywords = {name: self.name if name == "stage" else offers[name] for name in self.wants if name in offers}
        if "stage" in self.wants:
            keywords["stage"] = self.name
        positional = (offers.get("args"),) if self.takes_args else ()
        return partial(self.function, *positional, **keywords) if positional or keywords else self.function

    def __repr__(self) -> str:
        return f"<{self.level} stage {self.name!r}>"


def bind(stage: Any, where: str = "stage") -> Stage:
    """Work out a stage's level, parameters and policy from its declaration and signature.

    :param where: how errors name it, such as `stages[2]`.
    :raises ContractError: it is not callable, its level cannot be told, a parameter can be filled by nothing, or a
        wrapper is not an async sample stage.
    """
    if inspect.isclass(stage):
        raise ContractError(f"{where} is the class {stage.__name__}: pass an instance, {stage.__name__}(...)")
    if not callable(stage):
        raise ContractError(f"{where} is not callable: {stage!r}")
    name = _name(stage)
    label = f"{where} ({name})"
    try:
        parameters = list(inspect.signature(stage).parameters.values())
    except (TypeError, ValueError):
        raise ContractError(f"{label} has no readable signature: wrap it in a def") from None

    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    declared: Level | None = getattr(stage, "level", None)
    if declared is not None and declared not in _LEVELS:
        raise ContractError(f"{label} has level={declared!r}: choose one of {', '.join(_LEVELS)}")
    types = _annotations(stage, parameters)
    takes_args = (
        len(positional) > 1
        and _level_of(positional[0], types) is None
        and (positional[0].name == "args" or _level_of(positional[1], types) is not None)
        and positional[1].name != "call_next"
    )
    value = positional[1] if takes_args else positional[0] if positional else None
    if value is None:
        raise ContractError(f"{label} takes no positional parameter for the sample, group or batch")
    level = declared or _level_of(value, types)
    if level is None:
        raise ContractError(
            f"{label}: cannot tell whether {value.name!r} is a sample, a group or a batch; annotate it "
            f"({value.name}: Sample) or decorate the function with @sample_stage, @group_stage or @batch_stage"
        )
    wraps = any(p.name == "call_next" for p in positional)
    if wraps and (level != "sample" or not _is_async(stage)):
        raise ContractError(f"{label}: a stage with call_next must be `async def` and take a Sample")

    offered = OFFERS[level] - ({"args"} if takes_args else set())
    used = {value.name, "call_next", positional[0].name if takes_args else value.name}
    wants: set[str] = set()
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            wants |= offered
        elif parameter.kind is parameter.VAR_POSITIONAL or parameter.name in used:
            continue
        elif parameter.name in offered and parameter.kind is not parameter.POSITIONAL_ONLY:
            wants.add(parameter.name)
        elif parameter.default is parameter.empty:
            raise ContractError(
                f"{label}: nothing provides the parameter {parameter.name!r}; a {level} stage can ask for "
                f"{', '.join(sorted(OFFERS[level]))}. Give it a default, or bind it with functools.partial"
            )
    fans_out = getattr(stage, "fans_out", None)
    if fans_out is None:
        fans_out = level == "sample" and re.search(r"\b[Ll]ist\b", str(types.get("return", ""))) is not None
    if fans_out and (level != "sample" or wraps):
        raise ContractError(f"{label}: only a sample stage without call_next can fan out")
    return Stage(
        name,
        level,
        _innermost(stage),
        wraps=wraps,
        takes_args=takes_args,
        wants=frozenset(wants),
        external=getattr(stage, "external", False),
        on_error=getattr(stage, "on_error", "fail"),
        fans_out=fans_out,
    )


def bind_all(stages: Sequence[Any]) -> list[Stage]:
    """Bind a pipeline's stages and check that they fit together.

    :raises ContractError: as `bind`; or a name is used twice, or sample stages, group stages and batch stages do not
        follow each other in this order.
    """
    bound = [bind(stage, f"stages[{position}]") for position, stage in enumerate(stages)]
    seen: dict[str, int] = {}
    for position, stage in enumerate(bound):
        if stage.name in seen:
            raise ContractError(
                f"stages[{seen[stage.name]}] and stages[{position}] are both called {stage.name!r}: give one another "
                f"name, {stage.level}_stage(..., name='...')"
            )
        seen[stage.name] = position
        if position and _LEVELS.index(stage.level) < _LEVELS.index(bound[position - 1].level):
            before = bound[position - 1]
            raise ContractError(
                f"stages[{position}] ({stage.name}) is a {stage.level} stage behind the {before.level} stage "
                f"{before.name!r}: sample stages come first, then group stages, then batch stages"
            )
    return bound


def _name(stage: Any) -> str:
    if name := getattr(stage, "stage_name", None):
        return str(name)
    if isinstance(stage, DeclaredStage):
        return _name(stage.function)
    if isinstance(stage, partial):
        return _name(stage.func)
    return str(getattr(stage, "__name__", None) or type(stage).__name__)


def _innermost(stage: Any) -> Callable[..., Any]:
    """The callable behind the declarations, so that a call costs no detour."""
    while isinstance(stage, DeclaredStage):
        stage = stage.function
    return stage  # type: ignore[no-any-return]


def _is_async(stage: Any) -> bool:
    function = inspect.unwrap(stage)
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _annotations(stage: Any, parameters: list[inspect.Parameter]) -> dict[str, Any]:
    """Annotations as they stand: with postponed evaluation they are strings, which is enough to read a level off."""
    types: dict[str, Any] = {p.name: p.annotation for p in parameters if p.annotation is not p.empty}
    returned = inspect.signature(stage).return_annotation
    if returned is not inspect.Signature.empty:
        types["return"] = returned
    return types


def _level_of(parameter: inspect.Parameter, types: Mapping[str, Any]) -> Level | None:
    annotation = types.get(parameter.name)
    if isinstance(annotation, type):
        for kind, level in ((Sample, "sample"), (Group, "group"), (Batch, "batch")):
            if issubclass(annotation, kind):
                return level  # type: ignore[return-value]
    elif annotation is not None:
        words = re.findall(r"\w+", str(annotation))
        for word in reversed(words):
            if word in _TYPES:
                return _TYPES[word]
    return parameter.name if parameter.name in _LEVELS else None
