"""Filters in the form of slime's options, to be used by its own rollout function or by ours.

--dynamic-sampling-filter-path backends.slime.check_reward_nonzero_std_with_fallback
--buffer-filter-path backends.slime.oldest_first
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from backends.slime.samples import DynamicFilterOutput, of_slime
from eventbus.group import Group
from eventbus.sample import Sample
from middleware.filter import FilterDecision
from middleware.judges import reward_nonzero_std

__all__ = ["check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback", "decision", "oldest_first"]


def check_reward_nonzero_std(args: Any, samples: list[Any], **kwargs: Any) -> Any:
    """Keep a group whose rewards differ: `middleware.reward_nonzero_std`, as slime's `DynamicFilterOutput`.

    :param samples: one per execution of the prompt, or the list that it fanned out into.
    :raises TypeError: a reward is a dict and `args.reward_key` names none of its fields, or it is no number.
    :raises ValueError: there are no samples.
    """
    # The reward is all that is judged.
    executions = [[Sample(index=place, reward=_last(each).reward)] for place, each in enumerate(samples)]
    judged = reward_nonzero_std(Group(0, "", executions), key=getattr(args, "reward_key", None) or None)
    output = of_slime("rollout.filter_hub.base_types", "DynamicFilterOutput", DynamicFilterOutput)(
        keep=judged.keep, reason=judged.reason
    )
    output.score = judged.score  # by which fallback="best" ranks
    return output


def check_reward_nonzero_std_with_fallback(args: Any, samples: list[Any], **kwargs: Any) -> Any:
    """`check_reward_nonzero_std` whose rejected groups fill the batch when it would not fill up otherwise."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    output.keep_when_insufficient = True
    return output


def decision(output: Any) -> FilterDecision | Any:
    """What a filter written for slime returned, for `DynamicFilter`: a bare value is whether to keep the group."""
    if not hasattr(output, "keep"):
        return output
    return FilterDecision(
        output.keep,
        output.reason,
        bool(getattr(output, "keep_when_insufficient", False)),
        getattr(output, "score", None),
    )


def oldest_first(args: Any, rollout_id: int | None, buffer: list[list[Any]], num_samples: int) -> list[list[Any]]:
    """A buffer filter: the groups that began in the earliest rollout come first, so that none waits for ever.

    Groups without a beginning, which are asked from the start, come behind them, in their order. What is taken leaves
    `buffer`.
    """
    buffer.sort(key=_began)
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def _began(group: list[Any]) -> float:
    return min((sample.metadata.get("start_rollout_id", math.inf) for sample in _flat(group)), default=math.inf)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _last(execution: Any) -> Any:
    return execution[-1] if isinstance(execution, list) else execution
