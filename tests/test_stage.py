"""How a stage is bound: level, parameters, order, names; and what each mistake is told."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from eventbus.group import Batch, Group
from eventbus.sample import Sample
from eventbus.stage import CallNext, ContractError, DeclaredStage, bind, bind_all


def by_annotation(value: Group) -> None: ...


def by_name(batch):  # type: ignore[no-untyped-def]
    ...


def by_union(s: Sample | None) -> None: ...


def hook(args: Any, sample: Sample, *, rollout_id: int | None = None, evaluation: bool = False) -> Sample:
    return sample


async def around(sample: Sample, call_next: CallNext) -> Sample:
    return await call_next(sample)


class Judge:
    async def __call__(self, sample: Sample, *, stage: str) -> None: ...


def test_level_comes_from_the_annotation_then_from_the_name() -> None:
    assert [bind(stage).level for stage in (by_annotation, by_name, by_union)] == ["group", "batch", "sample"]


def test_declared_level_wins() -> None:
    assert bind(DeclaredStage(lambda x: None, "group", name="g")).level == "group"


def test_a_level_that_cannot_be_told_shows_the_decorator() -> None:
    with pytest.raises(ContractError, match=r"stages\[3\].*'x'.*@sample_stage"):
        bind(lambda x: None, "stages[3]")


def test_slime_hook_takes_args_and_sample() -> None:
    stage = bind(hook)
    assert (stage.takes_args, stage.level) == (True, "sample")
    assert stage.wants == frozenset({"rollout_id", "evaluation"})
    sample = Sample()
    assert stage.call({"args": "A", "rollout_id": 7, "evaluation": True})(sample) is sample


def test_keywords_are_filled_once() -> None:
    def keyed(sample: Sample, *, rollout_id: int, **rest: Any) -> None:
        sample.metadata.update(rest, rollout_id=rollout_id)

    sample = Sample()
    bind(keyed).call({"rollout_id": 7, "evaluation": False, "args": None, "sampling": {}})(sample)
    expected: dict[str, Any] = {"rollout_id": 7, "evaluation": False, "args": None, "sampling": {}, "stage": "keyed"}
    assert sample.metadata == expected


def test_callable_object_binds_its_call() -> None:
    stage = bind(Judge())
    assert (stage.name, stage.level) == ("Judge", "sample")
    assert stage.wants == frozenset({"stage"})


def test_partial_provides_a_parameter() -> None:
    def scaled(sample: Sample, factor: float) -> None: ...

    with pytest.raises(ContractError, match=r"nothing provides the parameter 'factor'.*rollout_id.*partial"):
        bind(scaled)
    assert bind(partial(scaled, factor=2.0)).name == "scaled"


def test_a_class_is_not_a_stage() -> None:
    with pytest.raises(ContractError, match=r"the class Judge: pass an instance, Judge\(\.\.\.\)"):
        bind(Judge)


def test_what_is_not_callable_is_refused() -> None:
    with pytest.raises(ContractError, match=r"stages\[0\] is not callable: 'tag'"):
        bind_all(["tag"])


def test_wrapper_must_be_async_and_of_sample_level() -> None:
    def sync_wrapper(sample: Sample, call_next: CallNext) -> None: ...

    async def group_wrapper(group: Group, call_next: Any) -> None: ...

    assert bind(around).wraps
    for wrong in (sync_wrapper, group_wrapper):
        with pytest.raises(ContractError, match="must be `async def` and take a Sample"):
            bind(wrong)


def test_fan_out_is_read_off_the_return_annotation() -> None:
    def split(sample: Sample) -> list[Sample]:
        return [sample]

    def perhaps(sample: Sample) -> Sample | list[Sample]:
        return sample

    assert [bind(stage).fans_out for stage in (split, perhaps, hook)] == [True, True, False]
    assert bind(DeclaredStage(hook, fans_out=True)).fans_out


def test_a_name_used_twice_asks_for_another() -> None:
    with pytest.raises(ContractError, match=r"stages\[0\] and stages\[1\] are both called 'hook'.*name='\.\.\.'"):
        bind_all([hook, hook])
    assert [stage.name for stage in bind_all([hook, DeclaredStage(hook, name="again")])] == ["hook", "again"]


def test_stages_follow_the_flow() -> None:
    with pytest.raises(ContractError, match=r"stages\[1\] \(hook\) is a sample stage behind the group stage"):
        bind_all([by_annotation, hook])


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="choose 'fail', 'resubmit' or 'raise'"):
        DeclaredStage(hook, on_error="ignore")  # type: ignore[arg-type]


def test_only_a_stage_that_asks_for_the_count_counts() -> None:
    def counting(group: Group, *, remaining: int) -> None: ...

    def catching(batch: Batch, **rest: Any) -> None: ...

    assert bind(counting).counts
    assert not bind(by_annotation).counts
    assert not bind(catching).counts
