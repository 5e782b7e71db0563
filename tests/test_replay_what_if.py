"""`Replay.what_if`: the batches that other stages would have made of recorded rollouts."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from eventbus import Batch, BatchSpec, Drop, Group, Pipeline, Replay, RolloutExhausted, Sample
from eventbus.replay import Change, ReplayError
from middleware import (
    DynamicFilter,
    FilterDecision,
    Generate,
    GroupAdvantage,
    group_stage,
    reward_nonzero_std,
    sample_stage,
)
from tests.recorded import MemoryLog, record
from tests.streams import endless, engine, rewarded

SPEC = BatchSpec(3, over_sampling=5)


def reward(group: int) -> float:
    return [0.0, 1.0, 0.5, 0.2, 0.9][group % 5]


by_group = rewarded(lambda sample: reward(sample.group_index or 0))


def at_least(bound: float, fallback: Any = "none") -> DynamicFilter:
    def judge(group: Group) -> FilterDecision:
        mean = sum(group.rewards()) / len(group)
        return FilterDecision(mean >= bound, f"below_{bound}", score=mean)

    return DynamicFilter(judge, fallback=fallback)


def recorded(*stages: Any, stop: int = 1, spec: BatchSpec = SPEC, delay: Any = 0.0) -> MemoryLog:
    log = MemoryLog()
    record(Pipeline(endless(), [Generate(engine(delay)), *stages], spec, observers=[log]), stop)
    return log


def test_unchanged_stages_change_nothing() -> None:
    stages = [by_group, at_least(0.3)]
    replay = Replay(recorded(*stages, stop=2), [Generate(engine()), *stages])
    for changes in ({}, {"DynamicFilter": at_least(0.3)}, {"reward": by_group}):
        report = replay.what_if(changes)
        assert report.same
        assert (report.added, report.removed, report.missing) == ({}, {}, {})
    assert str(report) == "changed: reward; 2 rollouts\ndifference: none"


def test_a_changed_threshold_gives_the_exact_difference() -> None:
    """Groups 0 to 4 with means 0, 1, 0.5, 0.2, 0.9, in this order; the batch takes three."""
    log = recorded(by_group, at_least(0.3))
    [event] = log.events(("batch_assembled",))
    assert event.groups == [1, 2, 4]
    report = Replay(log, [Generate(engine()), by_group, at_least(0.3)]).what_if({"DynamicFilter": at_least(0.1)})
    assert report.added == {0: [3]}
    assert report.removed == {0: [4]}
    assert report.missing == {}
    assert report.reasons == {"below_0.3": Change(2, 0), "below_0.1": Change(0, 1)}
    assert report.outcomes["kept"] == Change(3, 3)
    assert report.outcomes["surplus"] == Change(0, 1)
    kept = report.rewards[0]["kept"]
    assert (kept.old, kept.new) == (pytest.approx(2.4 / 3), pytest.approx(1.7 / 3))
    text = str(report)
    assert "added: 1 group: 3" in text
    assert "reason below_0.3: 2 -> 0" in text


def test_groups_that_were_never_generated_are_counted_and_not_invented() -> None:
    log = recorded(by_group, at_least(0.3))
    report = Replay(log, [Generate(engine()), by_group, at_least(0.3)]).what_if({"DynamicFilter": at_least(0.8)})
    assert report.removed == {0: [2]}
    assert report.missing == {0: 1}
    assert not report.same
    assert "1 group never generated" in str(report)


def test_groups_that_were_stopped_are_missing_too() -> None:
    """Groups 3 and 4 are slow: the batch was full before they had their answers."""
    spec = BatchSpec(2, over_sampling=5, max_rounds=1)
    log = recorded(by_group, at_least(0.3), spec=spec, delay=lambda s: 9.0 if s.group_index == 4 else s.group_index)
    report = Replay(log, [Generate(engine()), by_group, at_least(0.3)]).what_if({"DynamicFilter": at_least(0.8)})
    assert report.missing == {0: 1}
    assert report.rollouts[0].unfinished == {"stopped when the batch was full": 2}


@pytest.mark.parametrize("fallback", ["last", "best"])
def test_a_fallback_fills_the_batch_as_it_would_have(fallback: Any) -> None:
    """Four groups, three wanted, means 0, 1, 0.5, 0.2: the strict filter kept two."""
    log = MemoryLog()
    spec = BatchSpec(3, over_sampling=4, max_rounds=1, on_exhausted="partial")
    stages = [Generate(engine()), by_group, at_least(0.4)]
    record(Pipeline(endless(), stages, spec, observers=[log]))
    [event] = log.events(("batch_assembled",))
    assert event.groups == [1, 2]
    report = Replay(log, stages).what_if({"DynamicFilter": at_least(0.9, fallback)})
    assert report.missing == {}
    assert report.outcomes["kept by fallback"] == Change(0, 2)
    assert report.added == {0: [3]}
    assert report.removed == {}


def test_a_log_of_a_rollout_that_ran_out() -> None:
    log = MemoryLog()
    stages = [Generate(engine()), by_group, at_least(2.0)]
    with pytest.raises(RolloutExhausted):
        record(Pipeline(endless(), stages, BatchSpec(2, max_rounds=2), observers=[log]))
    report = Replay(log, stages).what_if({"DynamicFilter": at_least(0.4)})
    assert report.added == {0: [1, 2]}
    same = Replay(log, stages).what_if({})
    assert same.same
    assert any("on_exhausted" in note for note in same.notes)


def test_a_changed_sample_stage_runs_with_what_comes_after_it() -> None:
    def clean(sample: Sample) -> None:
        sample.metadata["length"] = sample.response_length

    def score(sample: Sample) -> None:
        sample.reward = float(sample.metadata["length"] > 2)

    def fixed(sample: Sample) -> None:
        sample.metadata["length"] = sample.response_length if sample.group_index else 5

    log = MemoryLog()
    stages = [Generate(engine(length=2)), clean, score, DynamicFilter(lambda group: group.rewards()[0] > 0)]
    with pytest.raises(RolloutExhausted):
        record(Pipeline(endless(), stages, BatchSpec(1, over_sampling=2, max_rounds=1), observers=[log]))
    report = Replay(log, stages).what_if({"clean": fixed})
    assert report.added == {0: [0]}
    assert report.rollouts[0].changed_rewards == 2
    assert report.rewards[0]["generated"] == Change(0.0, 0.5)


def test_stages_before_the_changed_one_do_not_run() -> None:
    calls: list[str] = []

    def before(sample: Sample) -> None:
        calls.append("before")
        sample.metadata["seen"] = 1

    def score(sample: Sample) -> None:
        calls.append("score")
        sample.reward = float(sample.metadata["seen"])

    stages = [Generate(engine()), before, score]
    log = recorded(before, score)
    calls.clear()
    Replay(log, stages).what_if({"score": score})
    assert set(calls) == {"score"}


def test_an_external_stage_keeps_its_answer_and_the_report_says_when_it_was_asked_something_else() -> None:
    def clean(sample: Sample) -> None:
        sample.metadata["text"] = "a"

    def cleaner(sample: Sample) -> None:
        sample.metadata["text"] = "b"

    def judge(sample: Sample) -> None:
        sample.reward = 1.0
        sample.metadata["judged"] = sample.metadata["text"]

    external = sample_stage(judge, external=True)
    log = recorded(clean, external)
    seen: list[dict[str, Any]] = []

    def look(group: Group) -> None:
        seen.extend(dict(sample.metadata) for sample in group.samples)

    stages = [Generate(engine()), clean, external]
    report = Replay(log, [*stages, look]).what_if({"clean": cleaner})
    assert any("'judge' is external and answered from the record" in note for note in report.notes)
    assert seen[0] == {"text": "b", "judged": "a"}
    seen.clear()
    again = Replay(log, [*stages, look], run_external=True).what_if({"clean": cleaner})
    assert again.notes == []
    assert seen[0] == {"text": "b", "judged": "b"}


def test_what_the_engine_would_have_been_asked_is_not_invented() -> None:
    def template(text: str) -> Callable[[Sample], None]:
        def fill(sample: Sample) -> None:
            sample.prompt = text

        return fill

    def stages(text: str) -> list[Any]:
        return [sample_stage(template(text), name="template"), Generate(engine()), by_group]

    log = MemoryLog()
    record(Pipeline(endless(), stages("a"), BatchSpec(2), observers=[log]))
    report = Replay(log, stages("a")).what_if({"template": template("b")})
    assert report.missing == {0: 2}
    [cause] = report.rollouts[0].unfinished
    assert "would be asked something else (prompt)" in cause
    assert Replay(log, stages("a")).what_if({"template": template("a")}).same


def test_the_engine_itself_cannot_be_replaced() -> None:
    log = recorded(by_group)
    with pytest.raises(ReplayError, match="asked an engine"):
        Replay(log, [Generate(engine()), by_group]).what_if({"Generate": Generate(engine())})


@pytest.mark.parametrize(
    ("name", "stage", "message"),
    [
        ("DynamicFilters", at_least(0), "did you mean 'DynamicFilter'"),
        ("DynamicFilter", by_group, "is a group stage, the replacement 'reward' a sample stage"),
        ("DynamicFilter", DynamicFilter, "is the class DynamicFilter"),
        ("DynamicFilter", 7, "is not callable"),
    ],
)
def test_what_cannot_take_the_place_of_a_stage(name: str, stage: Any, message: str) -> None:
    log = recorded(by_group, at_least(0.3))
    with pytest.raises(ReplayError, match=message):
        Replay(log, [Generate(engine()), by_group, at_least(0.3)]).what_if({name: stage})


def test_an_error_of_a_changed_stage_fails_its_group_or_says_that_it_would_end_the_rollout() -> None:
    def broken(sample: Sample) -> None:
        if sample.group_index == 1:
            raise ValueError("no")
        sample.reward = reward(sample.group_index or 0)

    log = recorded(by_group, at_least(0.3))
    replay = Replay(log, [Generate(engine()), by_group, at_least(0.3)])
    report = replay.what_if({"reward": broken})
    assert report.removed == {0: [1]}
    assert report.reasons["reward: ValueError"] == Change(0, 1)
    with pytest.raises(ReplayError, match=r"rollout 0, group 1, sample 2: stage 'reward' raised ValueError: no"):
        replay.what_if({"reward": sample_stage(broken, on_error="raise")})


def test_only_group_stages_and_light_fields_read_no_columns() -> None:
    log = recorded(by_group, at_least(0.3), GroupAdvantage(), stop=3)
    read = log.reads
    Replay(log, [Generate(engine()), by_group, at_least(0.3), GroupAdvantage()]).what_if(
        {"DynamicFilter": DynamicFilter(reward_nonzero_std, fallback="last")}
    )
    groups = len(list(log.events(("group_completed",))))
    assert log.reads - read <= 2 * groups


def test_the_report_is_a_table_for_rich() -> None:
    log = recorded(by_group, at_least(0.3))
    report = Replay(log, [Generate(engine()), by_group, at_least(0.3)]).what_if({"DynamicFilter": at_least(0.1)})
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(report)
    text = console.export_text()
    assert "rollout 0" in text
    assert "below_0.3" in text


def test_what_a_stage_wrote_on_a_sample_that_was_dropped_is_written_again() -> None:
    """Nothing stored the loss mask of a sample that the next stage dropped."""

    def mask(sample: Sample) -> None:
        sample.loss_mask = [1] * (sample.response_length - 1) + [0]  # type: ignore[assignment]

    def picky(sample: Sample) -> Drop | None:
        return Drop("long") if sample.group_index == 0 and sample.loss_tokens > 1 else None

    stages = [Generate(engine(length=3)), mask, sample_stage(picky, name="judge")]
    log = MemoryLog()
    record(Pipeline(endless(1), stages, BatchSpec(1, over_sampling=2), observers=[log]))
    seen: list[int] = []

    def generous(sample: Sample) -> None:
        seen.append(sample.loss_tokens)

    replay = Replay(log, stages)
    report = replay.what_if({"judge": generous})
    assert report.added == {0: [0]}
    assert report.reasons == {"long": Change(1, 0)}
    assert set(seen) == {2}
    [step] = replay.steps(stage="judge", sample=0)
    assert step.sample is not None
    assert step.sample.loss_tokens == 2
    assert step.run() == Drop("long")


def test_stages_that_were_taken_away_or_added_or_moved_count_as_changed() -> None:
    def more(sample: Sample) -> None:
        sample.reward = 1.0

    base = [Generate(engine()), by_group, at_least(0.3)]
    log = recorded(by_group, at_least(0.3))
    report = Replay(log, [base[0], base[2]]).what_if({})
    assert report.changed == ["without reward"]
    assert report.rollouts[0].changed_rewards == 10
    assert report.missing == {0: 3}
    report = Replay(log, [*base[:2], more, base[2]]).what_if({})
    assert report.changed == ["with more"]
    assert report.added == {0: [0]}
    assert report.removed == {0: [4]}
    report = Replay(log, [base[0], more, *base[1:]]).what_if({"reward": by_group})
    assert report.changed == ["reward", "with more"]
    assert report.rollouts[0].same
    report = Replay(log, base[:2]).what_if({})
    assert report.changed == ["without DynamicFilter"]
    assert report.added == {0: [0]}
    assert Replay(log, [base[0], more, by_group, base[2]]).what_if({}).changed == ["with more"]
    with pytest.raises(ReplayError, match="asked an engine"):
        Replay(log, base[1:]).what_if({})


def test_what_a_stage_wrote_that_is_gone_is_not_what_the_engine_is_asked_with() -> None:
    def fill(sample: Sample) -> None:
        sample.prompt = f"please, {sample.prompt}"

    log = MemoryLog()
    stages = [fill, Generate(engine()), by_group]
    record(Pipeline(endless(), stages, BatchSpec(2), observers=[log]))
    report = Replay(log, stages[1:]).what_if({})
    assert report.missing == {0: 2}
    assert "would be asked something else (prompt)" in str(report)


def test_a_rollout_that_did_not_come_to_its_end_is_named() -> None:
    def broken(group: Group) -> None:
        raise ValueError("no")

    def fixed(group: Group) -> None:
        pass

    stages = [Generate(engine()), by_group, group_stage(broken, name="weigh", on_error="raise")]
    log = MemoryLog()
    with pytest.raises(ValueError, match="no"):
        record(Pipeline(endless(), stages, BatchSpec(2), observers=[log]))
    replay = Replay(log, stages)
    report = replay.what_if({"weigh": fixed})
    assert report.rollouts == []
    assert "no rollout to look at" in str(report)
    assert "rollout 0: left out" in str(report)
    assert replay.what_if({"weigh": fixed}, [0]).added == {0: [0, 1]}


def test_a_batch_stage_is_not_part_of_it() -> None:
    def cut(batch: Batch) -> None:
        batch.groups = batch.groups[:1]

    log = recorded(by_group, cut)
    with pytest.raises(ReplayError, match="'cut' is a batch stage"):
        Replay(log, [Generate(engine()), by_group, cut]).what_if({"cut": cut})


def test_a_group_without_executions_ends_the_rollout() -> None:
    log = recorded(by_group, at_least(0.3))
    replay = Replay(log, [Generate(engine()), by_group, at_least(0.3)])
    with pytest.raises(ReplayError, match="without executions"):
        replay.what_if({"DynamicFilter": lambda group: Group(group.index, group.prompt, [])})


def test_groups_enter_the_batch_as_they_come_out_of_the_stages_behind_the_filter() -> None:
    """Group 1 is judged first, and stays with the stage behind the filter until all others are in."""

    async def weigh(group: Group) -> None:
        await anyio.sleep(0.02 if group.index == 1 else 0.001)

    spec = BatchSpec(2, over_sampling=4)
    generate = Generate(engine(lambda sample: 0.005 * (sample.index or 0)))
    stages: list[Any] = [generate, DynamicFilter(lambda group: group.index > 0), weigh]
    log = MemoryLog()
    record(Pipeline(endless(1), stages, spec, observers=[log]))
    [event] = log.events(("batch_assembled",))
    assert event.groups == [2, 3]
    replay = Replay(log, stages)
    assert replay.what_if({}).same
    assert replay.what_if({"DynamicFilter": stages[1], "weigh": weigh}).same
    report = replay.what_if({"DynamicFilter": DynamicFilter(lambda group: True)})
    assert report.added == {0: [0]}
    assert report.removed == {0: [3]}


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), backend=st.sampled_from(["asyncio", "trio"]))
def test_it_says_what_a_run_with_the_other_stages_comes_to(seed: int, backend: str) -> None:
    dice = random.Random(seed)
    groups = dice.choice([1, 2, 3, 5])
    spec = BatchSpec(groups, over_sampling=groups + dice.choice([0, 2, 5]), max_rounds=1, on_exhausted="partial")
    delays = [dice.random() for _ in range(40)]
    advantage = [GroupAdvantage()] * dice.choice([0, 1])

    def run(stages: list[Any]) -> tuple[MemoryLog, list[int], Any]:
        log = MemoryLog()
        delay = lambda sample: delays[sample.index]  # noqa: E731
        found: list[Any] = []
        with suppress(RolloutExhausted):
            pipeline = Pipeline(endless(), [Generate(engine(delay)), *stages], spec, observers=[log])
            found = record(pipeline, backend=backend)
        [finished] = log.events(("rollout_finished",))
        kept = [group.index for batch in found for group in batch.groups]
        return log, kept, finished.summary

    def stages() -> list[Any]:
        chance = random.Random(dice.random())
        rewards = [chance.choice([0.0, 0.3, 0.6, 1.0]) for _ in range(40)]
        bound, fallback = chance.choice([0.1, 0.3, 0.5]), chance.choice(["none", "last", "best"])
        scored = sample_stage(rewarded(lambda sample: rewards[sample.index or 0]), name="reward")
        return [scored, at_least(bound, fallback), *advantage]

    old, new = stages(), stages()
    log, before, _ = run(old)
    report = Replay(log, [Generate(engine()), *old]).what_if({"reward": new[0], "DynamicFilter": new[1]})
    _, after, summary = run(new)
    [found] = report.rollouts
    if found.missing:
        assert len(after) > groups - found.missing or len(after) < groups
        return
    assert sorted({*before, *found.added} - {*found.removed}) == after
    assert {name: change.new for name, change in found.reasons.items() if change.new} == summary.dropped
    assert found.outcomes.get("surplus", Change(0, 0)).new == summary.surplus
