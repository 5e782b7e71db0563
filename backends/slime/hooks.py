"""slime's per-sample hooks: its contract to the letter for its samples, and the round that a sample belongs to."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from backends.slime.samples import is_sample
from eventbus.context import current_rollout
from eventbus.imports import load_object
from eventbus.stage import ContractError
from middleware.hooks import side_by_side

__all__ = ["apply_rollout_sample_hooks", "rollout_context", "set_current_rollout_id"]

# slime's contract: code that no pipeline runs sees the id that was set last, in whatever task or thread it runs.
_rollout_id: int | None = None
_rollout_id_here: ContextVar[int | None] = ContextVar("rolloutbus_slime_rollout_id", default=None)


def set_current_rollout_id(rollout_id: int | None) -> None:
    """Say which rollout is under way: the `rollout_id` of hooks that no pipeline runs and whose caller names none."""
    global _rollout_id
    _rollout_id = rollout_id


@contextmanager
def rollout_context(rollout_id: int | None) -> Iterator[None]:
    """Within it, and in tasks begun within it, hooks see this rollout whatever `set_current_rollout_id` says."""
    token = _rollout_id_here.set(rollout_id)
    try:
        yield
    finally:
        _rollout_id_here.reset(token)


async def apply_rollout_sample_hooks(args: Any, value: Any, **kwargs: Any) -> Any:
    """Run the hooks named in `args.rollout_sample_hook_path`, in order, on each sample of `value`.

    `value` is a sample or a nested list of samples; a new list of the same shape comes back, and without hooks `value`
    itself. A hook is `hook(args, sample, **keywords)`, sync or async, and gets those of `kwargs` and of `rollout_id`
    that its signature names, all with `**kwargs`. `rollout_id` is that for which the sample was submitted, where one of
    our pipelines runs this. Samples go on side by side; their order stays.

    :raises TypeError: a leaf of `value` is no sample, or (`ContractError`) a hook returned neither a sample nor None.
    :raises LoadError: a path leads nowhere.
    :raises Exception: what a hook raises; as an ExceptionGroup when several failed side by side.
    """
    paths = getattr(args, "rollout_sample_hook_path", None) or []
    if not paths:
        return value
    kwargs.setdefault("rollout_id", _current())
    hooks = [(path, *_loaded(path)) for path in paths]
    samples = list(_leaves(value))

    async def run(position: int) -> None:
        sample = samples[position]
        for path, hook, names in hooks:
            given = kwargs if names is None else {name: kwargs[name] for name in kwargs if name in names}
            result = hook(args, sample, **given)
            if inspect.isawaitable(result):
                result = await result
            if result is None:
                continue
            if not is_sample(result):
                raise ContractError(
                    f"rollout sample hook {path!r} returned {type(result).__name__}, expected Sample or None"
                )
            sample = result
        samples[position] = sample

    await side_by_side(run, range(len(samples)))
    return _rebuilt(value, iter(samples))


def _current() -> int | None:
    try:
        return current_rollout().rollout_id
    except LookupError:
        here = _rollout_id_here.get()
        return _rollout_id if here is None else here


@cache
def _loaded(path: str) -> tuple[Callable[..., Any], frozenset[str] | None]:
    """The hook, and the names by which it can be given keywords; None: any."""
    hook = load_object(path)
    parameters = list(inspect.signature(hook).parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return hook, None
    by_place = [p.name for p in parameters[2:] if p.kind is p.POSITIONAL_OR_KEYWORD]
    return hook, frozenset([*by_place, *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)])


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif is_sample(value):
        yield value
    else:
        raise TypeError(f"rollout sample hooks expected Sample or list, got {type(value).__name__}")


def _rebuilt(value: Any, samples: Iterator[Any]) -> Any:
    return [_rebuilt(item, samples) for item in value] if isinstance(value, list) else next(samples)
