"""Configuration: what a file builds, and that every mistake in it is one clear line."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eventbus.batching import BatchSpec
from eventbus.config import ConfigError, build, load_config, load_plan
from eventbus.group import Batch, Group, TrainResult
from eventbus.imports import load_object
from eventbus.prompts import JsonlPrompts, Prompts
from eventbus.sample import Completion, Sample
from eventbus.stage import Stage


class Engine:
    def __init__(self, url: str = "local", *, slots: int = 1) -> None:
        self.url, self.slots = url, slots

    async def generate(self, sample: Sample, sampling: object) -> Completion:
        return Completion("4", [52], [-0.1])


class Scorer:
    """A sample stage with a parameter of each kind."""

    def __init__(
        self,
        engine: Engine | None = None,
        table: Path = Path("none"),
        place: str | Path = "none",
        text: str = "",
        weights: list[float] = [],  # noqa: B006
        judge: Callable[[Sample], float] | None = None,
        scale: float | Callable[[Sample], float] = 1.0,
        options: dict[str, Any] = {},  # noqa: B006
    ) -> None:
        self.engine, self.table, self.place, self.text = engine, table, place, text
        self.weights, self.judge, self.scale, self.options = weights, judge, scale, options

    def __call__(self, sample: Sample) -> None: ...


class NeedsEngine:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __call__(self, sample: Sample) -> None: ...


class Anything:
    def __init__(self, **options: Any) -> None:
        self.options = options

    def __call__(self, sample: Sample) -> None: ...


class ByPosition:
    def __init__(self, first: int, /) -> None: ...


class Numbers:
    def __init__(self, **options: int) -> None: ...


class OwnLimit:
    def __init__(self, limit: int) -> None: ...


class Speaks:
    def __init__(self) -> None:
        raise ValueError("first line\n  second line")


class Stumbles:
    def __init__(self) -> None:
        raise KeyError("x")


def keyed(group: Group, *, key: str, low: float = 0.0) -> bool:
    return bool(group.rewards(key)[0] > low)


class Refuses:
    def __init__(self, level: int) -> None:
        raise ValueError(f"level {level} is too much")


class Trainer:
    def __init__(self, engine: Engine, lr: float = 0.1) -> None:
        self.engine, self.lr = engine, lr

    async def train(self, batch: Batch) -> TrainResult:
        return TrainResult()


def tag(sample: Sample) -> None: ...


def rank(group: Group) -> None: ...


def score(sample: Sample) -> float:
    return 1.0


ITEMS = ["a", "b"]


@pytest.fixture(autouse=True)
def _parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This module as `config_parts`, so that `use` finds it wherever the tests are run from."""
    parts = types.ModuleType("config_parts")
    vars(parts).update({name: value for name, value in globals().items() if not name.startswith("_")})
    monkeypatch.setitem(sys.modules, "config_parts", parts)
    path = list(sys.path)
    yield
    sys.path[:] = path


BASE = Path("/base")


def config(**sections: Any) -> dict[str, Any]:
    return {
        "prompts": {"path": "train.jsonl", "group_size": 2},
        "batch": {"groups": 4},
        "stages": [{"use": "config_parts:tag"}],
    } | sections


def stages(*tables: dict[str, Any], **sections: Any) -> list[Stage]:
    return build(config(stages=list(tables), **sections), BASE).pipeline.stages


def made(**arguments: Any) -> Any:
    """The Scorer that these keys make."""
    [stage] = stages({"use": "config_parts:Scorer"} | arguments)
    return stage.function


def refused(**sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(config(**sections), BASE)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refused_stage(**table: Any) -> str:
    return refused(stages=[{"use": "config_parts:tag"}, table])


# Sections


def test_smallest_configuration() -> None:
    plan = build(config(), BASE)
    assert isinstance(plan.pipeline.prompts, JsonlPrompts)
    assert plan.pipeline.batch == BatchSpec(groups=4)
    assert [stage.name for stage in plan.pipeline.stages] == ["tag"]
    assert (plan.trainer, plan.rollouts, plan.ahead, plan.backend) == (None, None, 0, "asyncio")
    assert plan.plot == BASE / "reward.png"


def test_prompts_start_at_the_folder_of_the_file() -> None:
    assert build(config(), BASE).pipeline.prompts.position["path"] == "/base/train.jsonl"


def test_prompts_of_ones_own() -> None:
    prompts = {"use": "eventbus:Prompts", "prompts": {"use": "config_parts:ITEMS"}, "group_size": 2}
    assert isinstance(build(config(prompts=prompts), BASE).pipeline.prompts, Prompts)


def test_run_and_report() -> None:
    plan = build(
        config(run={"rollouts": 7, "ahead": 1, "backend": "trio"}, report={"plot": "plots/r.png"}),
        BASE,
    )
    assert (plan.rollouts, plan.ahead, plan.backend, plan.plot) == (7, 1, "trio", BASE / "plots/r.png")


def test_engine_is_shared() -> None:
    needs = {"use": "config_parts:NeedsEngine"}
    plan = build(
        config(
            engine={"use": "config_parts:Engine", "slots": 3},
            stages=[needs, needs | {"name": "second"}],
            trainer={"use": "config_parts:Trainer"},
        ),
        BASE,
    )
    engines = [stage.function.engine for stage in plan.pipeline.stages]  # type: ignore[attr-defined]
    assert engines == [plan.trainer.engine] * 2
    assert plan.trainer.engine.slots == 3


def test_engine_given_in_place_goes_first() -> None:
    [stage] = stages(
        {"use": "config_parts:NeedsEngine", "engine": {"use": "config_parts:Engine", "url": "own"}},
        engine={"use": "config_parts:Engine", "url": "shared"},
    )
    assert stage.function.engine.url == "own"  # type: ignore[attr-defined]


def test_engine_with_a_default_needs_no_section() -> None:
    assert made().engine is None


# use, and what is checked


def test_class_is_called_and_function_taken() -> None:
    scorer = made(text="x", judge={"use": "config_parts:score"})
    assert (scorer.text, scorer.judge) == ("x", score)


def test_use_at_any_depth() -> None:
    scorer = made(
        options={"list": [1, {"use": "config_parts:score"}], "table": {"inner": {"use": "config_parts:Engine"}}}
    )
    assert scorer.options["list"] == [1, score]
    assert isinstance(scorer.options["table"]["inner"], Engine)


def test_only_annotated_paths_are_paths() -> None:
    scorer = made(table="a.csv", place="b.csv", text="c.csv", options={"path": "d.csv"})
    assert (scorer.table, scorer.place) == (BASE / "a.csv", BASE / "b.csv")
    assert (scorer.text, scorer.options) == ("c.csv", {"path": "d.csv"})


def test_absolute_path_stays() -> None:
    assert made(table="/data/a.csv").table == Path("/data/a.csv")


def test_plain_string_is_never_imported() -> None:
    assert made(text="config_parts:score").text == "config_parts:score"


def test_int_is_a_float_and_an_annotation_beyond_msgspec_is_passed_on() -> None:
    assert made(weights=[1, 2.5]).weights == [1.0, 2.5]
    assert made(scale={"use": "config_parts:score"}).scale is score


def test_class_with_kwargs_takes_any_key() -> None:
    [stage] = stages({"use": "config_parts:Anything", "a": 1, "b": {"c": 2}})
    assert stage.function.options == {"a": 1, "b": {"c": 2}}  # type: ignore[attr-defined]


def test_keys_are_bound_to_a_function() -> None:
    judge = {"use": "config_parts:keyed", "key": "accuracy", "low": 1}
    stage, second = stages({"use": "middleware:DynamicFilter", "judge": judge}, judge)
    assert stage.function.judge.func is second.function.func is keyed  # type: ignore[attr-defined]
    assert stage.function.judge.keywords == {"key": "accuracy", "low": 1.0}  # type: ignore[attr-defined]
    assert (second.name, second.level) == ("keyed", "group")


@pytest.mark.parametrize(
    ("on", "raised"),
    [
        ({"use": "builtins:OSError"}, OSError),
        ([{"use": "builtins:OSError"}, {"use": "builtins:KeyError"}], (OSError, KeyError)),
    ],
)
def test_class_for_a_type_parameter_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch, on: Any, raised: Any) -> None:
    import middleware.wrappers

    seen: list[Any] = []

    def retry(stage: Any, attempts: int = 3, on: type[Exception] | tuple[type[Exception], ...] = ()) -> Any:
        seen.append(on)
        return middleware.wrappers.retry(stage, attempts, on)

    fakes = {"middleware:retry": retry}
    monkeypatch.setattr("eventbus.config.load_object", lambda path: fakes.get(path) or load_object(path))
    stages({"use": "config_parts:tag", "retry": {"on": on}})
    assert seen == [raised]


def test_error_of_a_constructor_says_where() -> None:
    with pytest.raises(KeyError) as caught:
        stages({"use": "config_parts:Stumbles"})
    assert caught.value.__notes__ == ["while building stages[0]"]


# Wrapping


def test_name_and_policy() -> None:
    [stage] = stages({"use": "config_parts:tag", "name": "t", "external": True, "on_error": "resubmit"})
    assert (stage.name, stage.external, stage.on_error) == ("t", True, "resubmit")


def test_group_stage_keeps_its_level() -> None:
    [stage] = stages({"use": "config_parts:rank", "name": "r"})
    assert (stage.name, stage.level) == ("r", "group")


def test_wrappers_go_innermost_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def in_thread(stage: Any) -> Any:
        calls.append(("in_thread",))
        return stage

    def timeout(stage: Any, seconds: float) -> Any:
        calls.append(("timeout", seconds))
        return stage

    def retry(stage: Any, attempts: int = 1, wait: float = 0.1) -> Any:
        calls.append(("retry", attempts, wait))
        return stage

    def limit(stage: Any, n: int) -> Any:
        calls.append(("limit", n))
        return stage

    fakes = {f"middleware:{wrapper.__name__}": wrapper for wrapper in (in_thread, timeout, retry, limit)}
    monkeypatch.setattr("eventbus.config.load_object", lambda path: fakes.get(path, tag))
    stages({"use": "config_parts:tag", "limit": 64, "retry": {"wait": 1}, "timeout": 30, "in_thread": True})
    assert calls == [("in_thread",), ("timeout", 30.0), ("retry", 1, 1.0), ("limit", 64)]


def test_real_wrappers_keep_name_and_policy() -> None:
    [stage] = stages(
        {
            "use": "config_parts:tag",
            "name": "t",
            "on_error": "raise",
            "in_thread": True,
            "timeout": 3,
            "retry": 2,
            "limit": 4,
        }
    )
    assert (stage.name, stage.on_error, stage.level) == ("t", "raise", "sample")
    assert stage.function is not tag


def test_in_thread_false_does_nothing() -> None:
    assert stages({"use": "config_parts:tag", "in_thread": False})[0].function is tag


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"limit": 0}, "stages[1].limit: limit: n is 0, it must be at least 1"),
        ({"timeout": "3"}, "stages[1].timeout: expected float, got str"),
        ({"retry": {"attempt": 3}}, "stages[1].retry.attempt: unknown key; did you mean attempts?"),
        ({"in_thread": "yes"}, "stages[1].in_thread: expected bool, got str"),
        ({"on_error": "retry"}, "stages[1].on_error: invalid enum value 'retry'; choose 'fail' or"),
        ({"external": 1}, "stages[1].external: expected bool, got int"),
        ({"timout": 3}, "stages[1].timout: unknown key; did you mean timeout?"),
        ({"name": ""}, "stages[1].name: expected str of length >= 1"),
        ({"name": {"use": "config_parts:Engine"}}, "stages[1].name: expected str, got Engine"),
        ({"retry": {"on": {"use": "config_parts:score"}}}, "stages[1].retry: retry: on takes subclasses of Exception"),
    ],
)  # fmt: skip
def test_wrong_wrapper(table: dict[str, Any], message: str) -> None:
    assert refused_stage(use="config_parts:tag", **table).startswith(message)


# Mistakes


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"btach": {}}, "btach: unknown key; did you mean batch?"),
        ({"xyz": {}}, "xyz: unknown key; the keys are prompts, engine, batch, stages, trainer, log, run, report"),
        ({"prompts": {}}, "prompts.path: missing; name a JSONL file, or a source of your own by use"),
        ({"prompts": 3}, "prompts: expected a table [prompts], got int"),
        ({"prompts": {"path": "p", "group_sise": 2}}, "prompts.group_sise: unknown key; did you mean group_size?"),
        ({"prompts": {"path": "p"}}, "prompts.group_size: missing; JsonlPrompts needs it"),
        ({"prompts": {"path": "p", "group_size": 0}}, "prompts: group_size=0: must be an int of at least 1"),
        ({"prompts": {"path": "p", "group_size": 1.5}}, "prompts.group_size: expected int, got float"),
        ({"prompts": {"use": "config_parts:ITEMS"}}, "prompts is a list: wrap it, Prompts(..., group_size=8)"),
        ({"batch": {}}, "batch.groups: missing; BatchSpec needs it"),
        ({"batch": {"groups": "16"}}, "batch.groups: expected int, got str"),
        ({"batch": {"groups": 0}}, "batch: BatchSpec(groups=0): must be at least 1"),
        ({"batch": {"groups": 4, "over_sampling": 0}}, "batch: BatchSpec(over_sampling=0): must be at least 1"),
        ({"batch": {"groups": 4, "surplus": "x"}}, "batch.surplus: invalid enum value 'x'; choose 'discard' or"),
        ({"batch": {"groups": 4, "min_group_size": 9}}, "BatchSpec(min_group_size=9) is more than the group_size=2"),
        ({"stages": []}, "stages: missing; add at least one [[stages]]"),
        ({"stages": {"use": "x"}}, "stages: expected tables [[stages]]"),
        ({"engine": {"url": "x"}}, "engine.use: missing; name a class or function"),
        ({"trainer": {"use": "config_parts:Trainer"}}, "trainer.engine: missing; Trainer needs it; add a section"),
        ({"trainer": {"use": "config_parts:tag"}}, "trainer: tag has no train(batch)"),
        ({"run": {"rollouts": 0}}, "run.rollouts: expected int >= 1"),
        ({"run": {"backend": "curio"}}, "run.backend: invalid enum value 'curio'; choose 'asyncio' or 'trio'"),
        ({"run": {"stall_after": 0}}, "run.stall_after: expected float > 0"),
        ({"run": {"stall_after": float("nan")}}, "run.stall_after: expected float > 0"),
        ({"prompts": {"path": 2024, "group_size": 2}}, "prompts.path: expected a path as a string, got int"),
        ({"report": {"plot": 3}}, "report.plot: expected Path, got int"),
    ],
)  # fmt: skip
def test_wrong_section(sections: dict[str, Any], message: str) -> None:
    assert refused(**sections).startswith(message)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "stages[1].use: missing; name a class or function"),
        ({"use": 3}, "stages[1].use: expected str, got int"),
        ({"use": "tag"}, "stages[1].use: cannot load 'tag': write 'package.module:attribute'"),
        ({"use": "config_parts:tga"}, "stages[1].use: cannot load 'config_parts:tga': module 'config_parts' has no"),
        ({"use": "no_such_module:tag"}, "stages[1].use: cannot load 'no_such_module:tag': there is no module"),
        ({"use": "config_parts:Scorer", "txt": ""}, "stages[1].txt: unknown key; did you mean text?"),
        ({"use": "config_parts:Scorer", "weights": [1, "x"]}, "stages[1].weights[1]: expected float, got str"),
        ({"use": "config_parts:Scorer", "judge": "x:y"}, "stages[1].judge: expected Callable, got str"),
        (
            {"use": "config_parts:Scorer", "options": {"a": [{"use": "config_parts:Engine", "slot": 1}]}},
            "stages[1].options.a[0].slot: unknown key; did you mean slots?",
        ),
        ({"use": "config_parts:NeedsEngine"}, "stages[1].engine: missing; NeedsEngine needs it; add a"),
        ({"use": "config_parts:Refuses", "level": 3}, "stages[1]: level 3 is too much"),
        ({"use": "config_parts:Engine"}, "stages[1] is not callable"),
        ({"use": "config_parts:tag"}, "stages[0] and stages[1] are both called 'tag'"),
        ({"use": "config_parts:ByPosition"}, "stages[1].first: ByPosition takes first by position only"),
        ({"use": "config_parts:Numbers", "a": "x"}, "stages[1].a: expected int, got str"),
        ({"use": "config_parts:OwnLimit", "limit": 3}, "stages[1].limit: missing; OwnLimit needs it; on a stage"),
        ({"use": "config_parts:Speaks"}, "stages[1]: first line second line"),
        ({"use": "config_parts:keyed", "kee": "x"}, "stages[1].kee: unknown key; did you mean key?"),
        ({"use": "config_parts:keyed", "key": 3}, "stages[1].key: expected str, got int"),
        ({"use": "config_parts:keyed", "group": 3}, "stages[1].group: unknown key; the keys are key, low"),
        ({"use": "config_parts:ITEMS", "a": 3}, "stages[1].a: unknown key; config_parts:ITEMS is no class and no"),
        ({"use": "builtins:dict", "a": 1}, "stages[1]: no signature found for builtin type"),
    ],
)  # fmt: skip
def test_wrong_stage(table: dict[str, Any], message: str) -> None:
    assert refused_stage(**table).startswith(message)


# Files


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "run.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_mistake_names_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "[prompts]\npath = 'p'\ngroup_size = 8\n[batch]\ngroups = 1\n[[stages]]\nues = 'x'\n")
    with pytest.raises(ConfigError, match=rf"^{path}: stages\[0\]\.use: missing"):
        load_plan(path)


def test_modules_beside_the_file_are_found(tmp_path: Path) -> None:
    (tmp_path / "stages_beside.py").write_text("from eventbus import Sample\ndef near(sample: Sample) -> None: ...\n")
    path = written(
        tmp_path, "[prompts]\npath = 'p'\ngroup_size = 8\n[batch]\ngroups = 1\n[[stages]]\nuse = 'stages_beside:near'\n"
    )
    assert [stage.name for stage in load_plan(path).pipeline.stages] == ["near"]


def test_error_of_an_imported_module_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "stages_broken.py").write_text("1 / 0\n")
    path = written(
        tmp_path, "[prompts]\npath = 'p'\ngroup_size = 8\n[batch]\ngroups = 1\n[[stages]]\nuse = 'stages_broken:near'\n"
    )
    with pytest.raises(ZeroDivisionError):
        load_plan(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[batch]\ngroups = = 3\n", r":2:10: invalid value"),
        ("[batch]\ngroups = [1,\n", r":2:13: "),
        ("[batch]\n[batch]\n", r":2:7: cannot declare"),
        (b"a = '\xff'", r":1: is not UTF-8: invalid start byte at byte 5"),
        (b"[engine]\n[engine]\n", r":2:8: cannot declare \[engine\] twice"),
    ],
)
def test_no_toml(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=rf"^{path}{message}"):
        load_config(path)


def test_file_not_found_or_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: there is no such file"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)


def test_byte_order_mark(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, b"\xef\xbb\xbf[batch]\ngroups = 1\n")) == {"batch": {"groups": 1}}


# --set

FILE = """
[batch]
groups = 1
[[stages]]
use = "config_parts:tag"
[[stages]]
use = "config_parts:Scorer"
name = "judge"
[[stages]]
use = "config_parts:tag"
"""


def overridden(tmp_path: Path, *overrides: str) -> Any:
    return load_config(written(tmp_path, FILE), overrides)


@pytest.mark.parametrize(
    ("text", "value"),
    [("16", 16), ("0.5", 0.5), ("true", True), ("[1, 2]", [1, 2]), ("{ a = 1 }", {"a": 1}), ('"16"', "16"),
     ("a/b.jsonl", "a/b.jsonl"), ("x=y", "x=y"), ("", ""), ("1\nb = 2", "1\nb = 2")],
)  # fmt: skip
def test_value_is_toml_or_else_text(tmp_path: Path, text: str, value: Any) -> None:
    assert overridden(tmp_path, f"batch.groups={text}")["batch"] == {"groups": value}


def test_set_by_name_by_number_and_anew(tmp_path: Path) -> None:
    changed = overridden(
        tmp_path, "stages.judge.options.a=1", "stages[0].name=first", "run.rollouts=3", "stages.first.limit=2"
    )
    assert changed["stages"][1]["options"] == {"a": 1}
    assert changed["stages"][0] == {"use": "config_parts:tag", "name": "first", "limit": 2}
    assert changed["run"] == {"rollouts": 3}


def test_set_by_the_name_in_use(tmp_path: Path) -> None:
    path = written(tmp_path, '[[stages]]\nuse = "a.b:Filter"\n')
    assert load_config(path, ["stages.Filter.fallback=last"])["stages"][0]["fallback"] == "last"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch.groups", "write section.key=value, such as batch.groups=16"),
        ("=3", "write section.key=value"),
        ("batch..groups=3", "write section.key=value"),
        ("stages.juge.limit=3", "stages: none is called juge; did you mean judge?"),
        ("stages.x.limit=3", "stages: none is called x; there are tag, judge, tag"),
        ("stages.tag.limit=3", "stages: several are called tag; say which by its number, stages[0]"),
        ("stages.1.limit=3", "stages: none is called 1; did you mean stages[1]?"),
        ("stages[3].limit=3", "stages has no [3], only 3 counted from 0"),
        ("batch.groups.x=3", "batch.groups is int, there is no 'x' in it"),
        ("batch[0]=3", "batch is dict, there is no 0 in it"),
    ],
)  # fmt: skip
def test_set_that_leads_nowhere(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        overridden(tmp_path, override)
    assert str(caught.value).startswith(f"--set {override}: {message}")
