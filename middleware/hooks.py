"""Per-sample hooks in the form that slime's users have them, run over any nesting of samples.

A hook is `hook(args, sample, *, rollout_id, evaluation)` or `hook(sample, ...)`, sync or async; it returns a `Sample`
or None, which keeps the sample it was given. A signature is read once per hook. Sync hooks run in one plain loop; only
where a hook has to be awaited do the samples go on side by side.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from inspect import isawaitable
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import anyio

from eventbus.context import current_rollout
from eventbus.imports import load_object
from eventbus.sample import Sample
from eventbus.stage import ContractError

__all__ = ["Hook", "apply_sample_hooks", "side_by_side"]

T = TypeVar("T")

Hook: TypeAlias = Callable[..., Any] | str
"""A callable, or its import path."""


async def apply_sample_hooks(hooks: Iterable[Hook] | None, value: Any, *, args: Any = None, **context: Any) -> Any:
    """Run `hooks`, in order, on each sample in `value`, which is a sample or a nested list of samples.

    Without hooks `value` itself comes back, else a new list of the same shape. Samples whose hooks are async overlap;
    their order stays.

    :param args: what a hook `(args, sample)` gets first.
    :param context: keywords for the hooks, each of which gets those that its signature names, all with `**kwargs`.
        `rollout_id` and `evaluation` are those of the running stage unless given; None and False outside of one.
    :raises TypeError: a leaf of `value` is no sample, a hook is no callable or needs a keyword that there is not, or it
        returned neither a sample nor None.
    :raises LoadError: an import path leads nowhere.
    :raises Exception: what a hook raises; as an ExceptionGroup when several failed side by side.
    """
    if hooks is None:
        return value
    if isinstance(hooks, str) or callable(hooks):
        raise TypeError(f"hooks is a list of callables or import paths, got one of them: write [{_shown(hooks)}]")
    hooks = list(hooks)
    if not hooks:
        return value
    context = {**_running(), **context}
    run = _Run(hooks, [_bound(hook, args, context) for hook in hooks])
    samples = list(_leaves(value))
    waiting: list[_Waiting] = []
    try:
        for position, sample in enumerate(samples):
            for at, call in enumerate(run.calls):
                result = call(sample)
                if result is None:
                    continue
                if type(result) is Sample:
                    sample = result
                elif isawaitable(result):
                    waiting.append(_Waiting(position, at, sample, result))
                    break
                else:
                    sample = run.checked(at, sample, result)
            else:
                samples[position] = sample
        if waiting:
            await side_by_side(partial(run.finish_into, samples), waiting)
    finally:
        for stopped in waiting:
            # An error elsewhere may have kept a coroutine from being awaited, or a task from its end.
            stop = getattr(stopped.result, "close", None) or getattr(stopped.result, "cancel", None)
            if stop is not None:
                stop()
    return _rebuilt(value, iter(samples))


class _Waiting(NamedTuple):
    """A sample whose hook number `at` has to be awaited."""

    position: int
    at: int
    sample: Sample
    result: Awaitable[Any]


class _Run(NamedTuple):
    """The hooks, and the calls that they were bound to."""

    hooks: Sequence[Hook]
    calls: list[Callable[[Sample], Any]]

    def checked(self, at: int, sample: Sample, result: Any) -> Sample:
        if result is None:
            return sample
        if isinstance(result, Sample):
            return result
        raise ContractError(
            f"hook {_name(self.hooks[at])} returned {type(result).__name__} for sample {sample.index}, "
            "expected Sample or None"
        )

    async def finish(self, waiting: _Waiting) -> Sample:
        """The rest of a sample's way, from the hook that has to be awaited."""
        at, sample = waiting.at, self.checked(waiting.at, waiting.sample, await waiting.result)
        for later in range(at + 1, len(self.calls)):
            result = self.calls[later](sample)
            sample = self.checked(later, sample, await result if isawaitable(result) else result)
        return sample

    async def finish_into(self, samples: list[Sample], waiting: _Waiting) -> None:
        samples[waiting.position] = await self.finish(waiting)


async def side_by_side(function: Callable[[T], Coroutine[Any, Any, None]], values: Sequence[T]) -> None:
    """Run `function` on all values at once.

    :raises Exception: what failed, as itself when it was one.
    """
    if len(values) == 1:
        await function(values[0])
        return
    alone: Exception | None = None
    try:
        async with anyio.create_task_group() as tasks:
            for value in values:
                tasks.start_soon(function, value)
    except ExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        alone = group.exceptions[0]
    if alone is not None:
        raise alone


# Values


def _leaves(value: Any) -> Iterator[Sample]:
    if isinstance(value, Sample):
        yield value
    elif isinstance(value, list):
        for item in value:
            if type(item) is Sample:
                yield item
            else:
                yield from _leaves(item)
    else:
        raise TypeError(f"hooks run on a Sample or nested lists of them, got {type(value).__name__}")


def _rebuilt(value: Any, samples: Iterator[Sample]) -> Any:
    if isinstance(value, list):
        return [_rebuilt(item, samples) if isinstance(item, list) else next(samples) for item in value]
    return next(samples)


# Hooks


class _Signature(NamedTuple):
    takes_args: bool
    taken: frozenset[str]
    """Parameters that are filled by position."""
    names: frozenset[str] | None
    """Keywords that it can be given; None: any but those taken."""
    needs: frozenset[str]
    """Keywords that it cannot do without."""


_signatures: WeakKeyDictionary[Any, _Signature] = WeakKeyDictionary()


def _bound(hook: Hook, args: Any, context: dict[str, Any]) -> Callable[[Sample], Any]:
    """The hook with all but its sample filled in."""
    function = load_object(hook) if isinstance(hook, str) else hook
    if not callable(function):
        raise TypeError(f"hook {_name(hook)} is not callable: {function!r}")
    takes_args, taken, names, needs = _signature(function)
    offered = context if takes_args else {**context, "args": args}
    if needs and (missing := sorted(needs - offered.keys())):
        raise TypeError(
            f"hook {_name(hook)} needs the keyword {missing[0]!r}, there are {', '.join(sorted(offered))}: pass it to "
            "apply_sample_hooks, or give it a default"
        )
    given = offered.keys() - taken if names is None else names
    keywords = {name: offered[name] for name in offered if name in given}
    if takes_args:
        return partial(function, args, **keywords)
    return partial(function, **keywords) if keywords else function


def _signature(function: Callable[..., Any]) -> _Signature:
    try:
        known = _signatures.get(function)
    except TypeError:  # it is not hashable, or takes no weak reference
        return _read_signature(function)
    if known is None:
        known = _signatures[function] = _read_signature(function)
    return known


def _read_signature(function: Callable[..., Any]) -> _Signature:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise TypeError(f"hook {_name(function)} has no readable signature: wrap it in a def") from None
    kinds = {parameter.kind for parameter in parameters}
    by_position = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in ("rollout_id", "evaluation")
    ]
    takes_args = _takes_args(by_position, inspect.Parameter.VAR_POSITIONAL in kinds)
    if not by_position and not takes_args:
        raise TypeError(f"hook {_name(function)} takes no positional parameter for the sample")
    taken = frozenset(p.name for p in by_position[: 1 + takes_args])
    for p in parameters:
        if p.kind is p.POSITIONAL_ONLY and p.default is p.empty and p.name not in taken:
            raise TypeError(f"hook {_name(function)}: {p.name!r} is passed by keyword, move it behind the '/'")
    by_keyword = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in taken]
    names = None if inspect.Parameter.VAR_KEYWORD in kinds else frozenset(p.name for p in by_keyword)
    return _Signature(takes_args, taken, names, frozenset(p.name for p in by_keyword if p.default is p.empty))


def _takes_args(by_position: Sequence[inspect.Parameter], takes_any: bool) -> bool:
    """Whether it is `(args, sample)` and not `(sample)`: by what the parameters are called or annotated as, else by how
    many there must be."""
    if len(by_position) < 2:
        return takes_any and (not by_position or by_position[0].name == "args")
    first, second = by_position[:2]
    if _is_for_sample(first):
        return False
    return first.name == "args" or _is_for_sample(second) or second.default is second.empty


def _is_for_sample(parameter: inspect.Parameter) -> bool:
    return parameter.name == "sample" or re.search(r"\bSample\b", str(parameter.annotation)) is not None


def _shown(hook: Any) -> str:
    return repr(hook) if isinstance(hook, str) else _name(hook)


def _name(hook: Any) -> str:
    if isinstance(hook, str):
        return hook
    while isinstance(hook, partial):
        hook = hook.func
    if (name := getattr(hook, "__qualname__", None)) is not None:
        return f"{hook.__module__}.{name}"
    return type(hook).__name__


def _running() -> dict[str, Any]:
    try:
        running = current_rollout()
    except LookupError:
        return {"rollout_id": None, "evaluation": False}
    return {"rollout_id": running.rollout_id, "evaluation": running.evaluation}
