from __future__ import annotations

import functools
import sys
from dataclasses import InitVar, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from backends.simulated import SimulatedEngine
from eventbus import BatchSpec, Pipeline, Replay
from eventbus.group import Group
from eventbus.log import stage_notes
from eventbus.log.secrets import masked
from eventbus.log.stages import LARGEST_TABLE
from eventbus.sample import Sample
from eventbus.stage import bind_all
from middleware import (
    DynamicFilter,
    FilterDecision,
    Generate,
    GroupAdvantage,
    Recorder,
    in_thread,
    limit,
    retry,
    reward_nonzero_std,
    sample_stage,
    timeout,
)
from tests.streams import batches, endless, engine

HERE = __name__


def table(stage: Any) -> dict[str, Any] | None:
    (note,) = stage_notes(bind_all([stage]))
    return note.table


def tag(sample: Sample) -> None:
    sample.metadata["tag"] = True


@sample_stage(on_error="resubmit")
def declared(sample: Sample) -> None: ...


def scaled(sample: Sample, by: Any = 1.0) -> None:
    sample.reward = float(sample.index or 0) * by


def doubled(function: Any) -> Any:
    @functools.wraps(function)
    def stage(sample: Sample) -> None:
        function(sample)
        sample.reward *= 2

    return stage


class Band:
    def __init__(self, low: float = 0.0, *, names: Any = (), more: Any = None) -> None:
        self.low = low
        self.names = list(names)
        self.more = more

    def __call__(self, group: Group) -> FilterDecision:
        return FilterDecision(keep=sum(group.rewards()) > self.low, reason="band")


class Stage:
    def __call__(self, sample: Sample) -> None: ...


class Renamed(Stage):
    def __init__(self, option: int) -> None:
        self.n = option


class Derived(Stage):
    def __init__(self, share: float) -> None:
        self.share = share / 100


class More(Stage):
    def __init__(self, share: float) -> None:
        self.share = share
        self.cache: dict[str, int] = {}


class OfTheClass(Stage):
    threshold = 0.5

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold


class Taken(Stage):
    def __init__(self, timeout: float) -> None:
        self.timeout = timeout


class Lazy(Stage):
    def __init__(self, url: str) -> None: ...

    @property
    def url(self) -> str:
        raise SystemExit("must not run")

    def __repr__(self) -> str:
        raise SystemExit("must not run")


class Itself(Stage):
    def __init__(self) -> None:
        self.inside = self


class Inside(Stage):
    """An attribute of the name by which wrappers say what they wrap."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside


class Slots(Stage):
    __slots__ = ("low",)

    def __init__(self, low: float) -> None:
        self.low = low


class Agent(Stage):
    def __init__(self, engine: Any = None, turns: int = 1) -> None:
        self.engine = engine
        self.turns = turns


class Methods:
    def __init__(self, by: float) -> None:
        self.by = by

    def score(self, sample: Sample) -> None: ...

    @classmethod
    def made(cls, sample: Sample) -> None: ...


@dataclass
class Data:
    low: float = 0.0
    key: str = "reward"

    def __call__(self, sample: Sample) -> None: ...


@dataclass
class Init:
    low: InitVar[float] = 0.0

    def __call__(self, sample: Sample) -> None: ...


class Struct(msgspec.Struct):
    low: float

    def __call__(self, sample: Sample) -> None: ...


def asks(sample: Sample, **options: Any) -> None: ...


BAND = {"use": f"{HERE}:Band", "low": 2.0, "names": ["a", "b"], "more": {"deep": [1]}}


@pytest.mark.parametrize(
    ("stage", "kept"),
    [
        (tag, {"use": f"{HERE}:tag"}),
        (limit(retry(in_thread(tag)), 64), {"use": f"{HERE}:tag"}),
        (sample_stage(tag, name="judge", external=True), {"use": f"{HERE}:tag"}),
        (declared, {"use": f"{HERE}:declared"}),
        (partial(scaled, by=2.0), {"use": f"{HERE}:scaled", "by": 2.0}),
        (sample_stage(limit(partial(scaled, by=2.0), 3), name="s"), {"use": f"{HERE}:scaled", "by": 2.0}),
        (Data(low=2.0), {"use": f"{HERE}:Data", "low": 2.0, "key": "reward"}),
        (
            GroupAdvantage(),
            {"use": "middleware.advantage:GroupAdvantage", **vars(GroupAdvantage())},
        ),
        (
            DynamicFilter(partial(reward_nonzero_std, key="accuracy"), fallback="last"),
            {
                "use": "middleware.filter:DynamicFilter",
                "judge": {"use": f"{reward_nonzero_std.__module__}:reward_nonzero_std", "key": "accuracy"},
                "fallback": "last",
            },
        ),
        (
            DynamicFilter(Band(2.0, names=("a", "b"), more={"deep": [1]})),
            {"use": "middleware.filter:DynamicFilter", "judge": BAND, "fallback": "none"},
        ),
        (
            Generate(SimulatedEngine(lambda sample: None), {"top_p": 0.9}),  # type: ignore[arg-type, return-value]
            {"use": "middleware.generate:Generate", "sampling": {"top_p": 0.9}},
        ),
        (Agent(engine(), 3), {"use": f"{HERE}:Agent", "turns": 3}),
    ],
    ids=str,
)
def test_a_stage_that_can_be_made_anew_is_kept_as_a_table(stage: Any, kept: dict[str, Any]) -> None:
    assert table(stage) == kept


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def wide(levels: int) -> Any:
    """Small, and without end when it is written down."""
    value: Any = 1
    for _ in range(levels):
        value = [value] * 6
    return value


OPTIONS: list[Any] = [
    object(),
    ("a", "b"),
    np.float64(1.0),
    float("inf"),
    Path("words.txt"),
    Band,
    {"use": "os:system"},
    {1: 2},
    nested(20),
    nested(sys.getrecursionlimit()),
    wide(14),
    "x" * LARGEST_TABLE,
    ["x"] * LARGEST_TABLE,
    "\ud800",
]


@pytest.mark.parametrize(
    "stage",
    [
        lambda sample: None,
        limit(timeout(tag, 30), 64),  # which raises what `tag` does not
        doubled(tag),
        doubled(limit(scaled, 4)),
        Renamed(3),
        More(3.0),
        OfTheClass(0.9),
        Taken(3.0),
        Lazy("http://127.0.0.1"),
        Itself(),
        Slots(1.0),
        Init(6.0),
        Struct(1.0),
        Agent(),
        Methods(2.0).score,
        Methods.made,
        partial(asks, by=object()),
        sample_stage(partial(scaled, by=2.0), external=True),
        DynamicFilter(lambda group: True),
        *(DynamicFilter(Band(more=option)) for option in OPTIONS),
    ],
    ids=lambda stage: "lazy" if isinstance(stage, Lazy) else str(stage)[:60],
)
def test_any_other_has_no_table(stage: Any) -> None:
    assert table(stage) is None


@pytest.mark.parametrize(
    "options",
    [
        *(
            {name: "WORD"}
            for name in ("api_key", "hf_token", "access_token", "private-key", "Secret", "pwd", "X-Api-Key")
        ),
        {"more": {"Authorization": "WORD"}},
        {"more": [["Authorization", "WORD"]]},
        {"more": ["Bearer WORD"]},
        {"url": "https://me:WORD@host"},
        {"url": "https://host?api_key=WORD"},
        {"more": "sk-WORD"},
    ],
    ids=str,
)
def test_what_looks_like_a_secret_gets_into_no_log(tmp_path: Path, options: dict[str, Any]) -> None:
    stages = [Generate(engine()), partial(asks, **options), sample_stage(partial(asks, **options), name="external")]
    notes = stage_notes(bind_all(stages))
    assert "WORD" not in str(notes)


def test_a_command_line_is_kept_without_its_secrets() -> None:
    line = (
        "run.py --api-key WORD --hf-token=WORD --key reward https://me:WORD@host --set judge.api_key=WORD --secret -v x"
    )
    shown = " ".join(masked(line.split()))
    assert shown == "run.py --api-key *** --hf-token=*** --key reward *** --set judge.api_key=*** --secret -v x"


def test_an_object_that_stages_share_has_no_table() -> None:
    band = Band(1.0)
    first, second, third = stage_notes(
        bind_all(
            [
                sample_stage(partial(asks, band=each), name=name)
                for name, each in zip("abc", [band, band, Band()], strict=True)
            ]
        )
    )
    assert first.table is None
    assert second.table is None
    assert third.table is not None


async def recorded(path: Path, *stages: Any) -> Replay:
    pipeline = Pipeline(endless(2), [Generate(engine()), *stages], BatchSpec(2), observers=[Recorder(path)])
    await batches(pipeline, 1)
    return Replay(path, trust=True)


@pytest.mark.anyio
async def test_a_replay_has_the_stages_of_a_program(tmp_path: Path) -> None:
    again = await recorded(
        tmp_path / "run.mcap", limit(partial(scaled, by=2.0), 3), DynamicFilter(Band(-1.0)), GroupAdvantage()
    )
    report = again.verify()
    assert report.same
    assert list(report.not_verified) == ["Generate"]
    assert report.batches == 1


@pytest.mark.anyio
async def test_what_is_not_what_it_was_is_not_verified(tmp_path: Path) -> None:
    again = await recorded(tmp_path / "run.mcap", Derived(50.0), partial(scaled, by=np.float64(2)))
    report = again.verify()
    assert report.same
    assert "it has not the options that it had" in report.not_verified["Derived"]
    assert f"not all that makes it of {HERE}:scaled" in report.not_verified["scaled"]


@pytest.mark.anyio
async def test_a_stage_that_fans_out_by_declaration_does_so_again(tmp_path: Path) -> None:
    again = await recorded(tmp_path / "run.mcap", sample_stage(split, fans_out=True), partial(scaled, by=1.0))
    assert again.verify().same


@pytest.mark.anyio
async def test_turns_are_replayed_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "run.mcap"
    stages = [turns, Generate(engine(length=3)), partial(scaled, by=1.0)]
    await batches(Pipeline(endless(2), stages, BatchSpec(2), observers=[Recorder(path)]), 1)
    report = Replay(path, trust=True).verify()
    assert report.same, report
    assert list(report.not_verified) == ["Generate"]


def split(sample):  # type: ignore[no-untyped-def]
    return [sample, sample.copy()]


async def turns(sample: Sample, call_next: Any) -> Sample:
    for _ in range(2):
        sample = await call_next(sample)
        sample.append_observation(" and", [1, 2])
    return await call_next(sample)  # type: ignore[no-any-return]
