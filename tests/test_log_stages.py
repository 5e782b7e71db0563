from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eventbus.config import build_stage
from eventbus.group import Group
from eventbus.log import stage_notes
from eventbus.log.stages import LARGEST_TABLE
from eventbus.sample import Sample
from eventbus.stage import bind_all
from middleware import DynamicFilter, FilterDecision, GroupAdvantage, limit, reward_nonzero_std, sample_stage, timeout

HERE = __name__


def table(stage: Any) -> dict[str, Any] | None:
    (note,) = stage_notes(bind_all([stage]))
    return note.table


def tag(sample: Sample) -> None:
    sample.metadata["tag"] = True


@sample_stage(on_error="resubmit")
def declared(sample: Sample) -> None: ...


def scaled(sample: Sample, by: float = 1.0) -> None:
    sample.reward *= by


class Band:
    def __init__(self, low: float = 0.0, *, names: Any = (), more: Any = None) -> None:
        self.low = low
        self.names = names
        self.more = more

    def __call__(self, group: Group) -> FilterDecision:
        return FilterDecision(keep=sum(group.rewards()) > self.low, reason="band")


class Keeps:
    """Its option under another name."""

    def __init__(self, limit_: int) -> None:
        self.n = limit_

    def __call__(self, sample: Sample) -> None: ...


class Takes:
    """An option that is a key of every stage in a configuration."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    def __call__(self, sample: Sample) -> None: ...


class Asks:
    def __init__(self, api_key: str) -> None:
        self.api_key = api_key

    def __call__(self, sample: Sample) -> None: ...


class Raises:
    def __init__(self, url: str) -> None: ...

    @property
    def url(self) -> str:
        raise RuntimeError("not open yet")

    def __call__(self, sample: Sample) -> None: ...


@pytest.mark.parametrize(
    ("stage", "kept"),
    [
        (tag, {"use": f"{HERE}:tag"}),
        (limit(timeout(tag, 30), 64), {"use": f"{HERE}:tag"}),
        (declared, {"use": f"{HERE}:declared"}),
        (partial(scaled, by=2.0), {"use": f"{HERE}:scaled", "by": 2.0}),
        (GroupAdvantage(), {"use": "middleware.advantage:GroupAdvantage"}),
        (
            DynamicFilter(partial(reward_nonzero_std, key="accuracy"), fallback="last"),
            {
                "use": "middleware.filter:DynamicFilter",
                "judge": {"use": "middleware.judges:reward_nonzero_std", "key": "accuracy"},
                "fallback": "last",
            },
        ),
        (
            DynamicFilter(Band(2.0, names=("a", "b"), more={"deep": [1]})),
            {
                "use": "middleware.filter:DynamicFilter",
                "judge": {"use": f"{HERE}:Band", "low": 2.0, "names": ["a", "b"], "more": {"deep": [1]}},
            },
        ),
    ],
)
def test_a_stage_that_can_be_made_anew_is_kept_as_a_table(stage: Any, kept: dict[str, Any]) -> None:
    found = table(stage)
    if found is not None and "judge" in found:  # wherever judges are defined
        kept["judge"]["use"] = kept["judge"]["use"].replace("middleware.judges", reward_nonzero_std.__module__)
    assert found == kept
    assert table(build_stage(found, "stage", Path(), None)) == kept


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "stage",
    [
        lambda sample: None,
        partial(scaled, by=float("nan")),
        Keeps(3),
        Takes(3.0),
        Asks("sk-1"),
        Raises("http://127.0.0.1"),
        DynamicFilter(lambda group: True),
        DynamicFilter(Band(more=object())),
        DynamicFilter(Band(more={"use": "os:system"})),
        DynamicFilter(Band(more={1: 2})),
        DynamicFilter(Band(more=Band)),
        DynamicFilter(Band(more={"password": "x"})),
        DynamicFilter(Band(more=nested(20))),
        DynamicFilter(Band(more=nested(sys.getrecursionlimit()))),
        DynamicFilter(Band(more="x" * LARGEST_TABLE)),
        DynamicFilter(Band(more="\ud800")),
        sample_stage(tag, name="judge", external=True),
    ],
    ids=str,
)
def test_any_other_has_no_table(stage: Any) -> None:
    assert table(stage) is None
