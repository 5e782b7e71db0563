"""What the tests of `backends.slime` share: slime's stand-in, its args, a data source, and slime's own rule."""

from __future__ import annotations

import heapq
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backends.simulated import SimulatedEngine
from backends.slime.samples import of_slime, sample_type
from eventbus.sample import Completion, Sample

STANDIN = Path(__file__).parent / "slime_standin"


@contextmanager
def slime_importable(patch: pytest.MonkeyPatch) -> Iterator[Any]:
    """slime's stand-in can be imported, and the file of plug-ins beside it, which this gives."""
    patch.syspath_prepend(STANDIN)
    of_slime.cache_clear()
    yield importlib.import_module("user_plugins")
    of_slime.cache_clear()


@contextmanager
def slime_missing(patch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"] + ["slime"]:
        patch.setitem(sys.modules, name, None)
    of_slime.cache_clear()
    yield
    of_slime.cache_clear()


class DataSource:
    """slime's data source: groups without end, and a buffer that comes first."""

    def __init__(self, group_size: int = 2, change: Callable[[Any], None] | None = None) -> None:
        self.group_size = group_size
        self.buffer: list[list[Any]] = []
        self.asked: list[int] = []
        self._change = change
        self._groups = 0

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        self.asked.append(num_samples)
        groups = self.buffer[:num_samples]
        del self.buffer[:num_samples]
        while len(groups) < num_samples:
            groups.append([self._new(i) for i in range(self.group_size)])
            self._groups += 1
        return groups

    def _new(self, position: int) -> Any:
        sample = sample_type()()
        sample.group_index = self._groups
        sample.index = self._groups * self.group_size + position
        sample.prompt, sample.label = f"prompt {self._groups}", "ab"
        if self._change is not None:
            self._change(sample)
        return sample

    def add_samples(self, samples: list[list[Any]]) -> None:
        self.buffer += samples


def engine(
    delay: float | Callable[[Sample], float] = 0.0, length: int = 2, version: str | None = None
) -> SimulatedEngine:
    simulated = SimulatedEngine(
        lambda sample: Completion(
            text="abcdefgh"[:length], tokens=list(range(1, length + 1)), log_probs=[-0.5] * length
        ),
        delay=delay,
    )
    simulated.weight_version = version
    return simulated


def by_group(sample: Sample) -> float:
    """Groups finish one after the other."""
    return 1.0 + (sample.group_index or 0)


def arguments(simulated: Any = None, **options: Any) -> SimpleNamespace:
    """slime's args: target 4, oversample 6, group size 2, unless said otherwise."""
    simulated = engine(by_group) if simulated is None else simulated
    defaults: dict[str, Any] = {
        "rollout_batch_size": 4,
        "over_sampling_batch_size": 6,
        "n_samples_per_prompt": 2,
        "rollout_temperature": 1.0,
        "rollout_max_response_len": 8,
        "reward_key": None,
        "group_rm": False,
        "partial_rollout": False,
        "custom_generate_function_path": None,
        "custom_rm_path": "tests.slime_runs.reward",
        "dynamic_sampling_filter_path": None,
        "rollout_sample_hook_path": [],
        "rewards": (),
        "marker": "seen",
        "rolloutbus_engine": lambda args: simulated,
    }
    return SimpleNamespace(**defaults | options)


async def reward(args: Any, sample: Any) -> float:
    """From `args.rewards` by index; behind its end siblings differ."""
    rewards: Sequence[float] = args.rewards
    index: int = sample.index
    return rewards[index] if index < len(rewards) else float(index % 2)


def equal_in(groups: Sequence[int], of: int) -> list[float]:
    """Rewards of groups of two: equal in the groups named, different in the others."""
    return [1.0 if group in groups else float(i) for group in range(of) for i in range(2)]


def slimes_rule(
    target: int, over_sampling: int, delays: Sequence[float], rejected: set[int], spare: bool
) -> tuple[list[int], int, int]:
    """What slime keeps, how many it drops until then, and how many it submits: its loop as the facts tell it."""
    now, submitted, remaining, dropped = 0.0, 0, 0, 0
    kept: list[int] = []
    under_way: list[tuple[float, int]] = []
    while len(kept) < target:
        while remaining < target:
            for _ in range(over_sampling):
                heapq.heappush(under_way, (now + delays[submitted], submitted))
                submitted += 1
            remaining += over_sampling
        now, group = heapq.heappop(under_way)
        if group in rejected and not (spare and remaining <= target):
            remaining -= 1
            dropped += 1
        else:
            kept.append(group)
    return sorted(kept), dropped, submitted
