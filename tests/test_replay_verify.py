"""`Replay.verify`: the same stages again on what was recorded, up to the first event that differs."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.simulated import SimulatedEngine
from eventbus import (
    Batch,
    BatchSpec,
    CallNext,
    Completion,
    Drop,
    Group,
    LogReader,
    Pipeline,
    Replay,
    RolloutExhausted,
    Sample,
    current_rollout,
)
from eventbus.replay import ReplayError
from eventbus.replay.report import VerifyReport
from eventbus.replay.run import _Job
from eventbus.testing import virtual_time
from middleware import DynamicFilter, Generate, GroupAdvantage, Recorder, group_stage, reward_nonzero_std, sample_stage
from tests.logs import unclosed
from tests.recorded import MemoryLog, record
from tests.streams import endless, engine, rewarded, some

alternating = rewarded(lambda sample: float((sample.index or 0) % 2))


def tag(sample: Sample, *, rollout_id: int) -> None:
    sample.metadata["rollout"] = rollout_id


def recorded(*stages: Any, stop: int = 1, spec: BatchSpec | None = None, size: int = 2, **options: Any) -> MemoryLog:
    log = MemoryLog()
    record(Pipeline(endless(size), stages, spec or BatchSpec(2), observers=[log]), stop, **options)
    return log


def generate(delay: Any = 0.0, length: int = 3) -> Generate:
    return Generate(engine(delay, length))


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_same_stages_come_to_the_same(backend: str) -> None:
    stages = [tag, generate(lambda s: s.index % 3), alternating, DynamicFilter(reward_nonzero_std), GroupAdvantage()]
    log = recorded(*stages, stop=3, spec=BatchSpec(3, over_sampling=4), backend=backend)
    report = Replay(log, stages).verify()
    assert report.same, str(report)
    assert (report.rounds, report.batches) == (3, 3)
    assert report.executions >= 18
    assert list(report.not_verified) == ["Generate"]
    assert report.notes == []
    assert "the same" in str(report)


def test_a_stage_that_does_something_else_is_named_with_its_event_and_fields() -> None:
    def other(sample: Sample) -> None:
        sample.reward = 0.5 if sample.index == 3 else float((sample.index or 0) % 2)

    log = recorded(generate(), sample_stage(alternating, name="judge"), stop=2)
    found = Replay(log, [generate(), sample_stage(other, name="judge")]).verify().divergence
    assert found is not None
    assert (found.rollout_id, found.stage, found.kind, found.group_index, found.index) == (
        0,
        "judge",
        "stage_applied",
        1,
        3,
    )
    change = found.fields["reward"]
    assert (change.old, change.new) == (1.0, 0.5)
    [event] = [e for e in log.events(("stage_applied",), index=3) if e.stage == "judge"]
    assert found.seq == event.seq
    assert f"seq {event.seq}" in str(found)
    assert "reward: 1.0 -> 0.5" in str(found)


def test_the_first_event_that_differs_comes_first_whatever_the_order_of_completion() -> None:
    """Sample 0 comes out last; its first stage differs before anything of the others does."""

    def late(changed: bool) -> Callable[[Sample], None]:
        def mark(sample: Sample) -> None:
            sample.metadata["mark"] = changed

        return mark

    def stages(changed: bool) -> list[Any]:
        return [sample_stage(late(changed), name="mark"), generate(lambda s: 5.0 - s.index), alternating]

    log = recorded(*stages(False))
    found = Replay(log, stages(True)).verify().divergence
    assert found is not None
    assert found.seq == min(e.seq for e in log.events(("stage_applied",)))


def test_columns_are_compared_by_their_content() -> None:
    def mask(ones: int) -> Callable[[Sample], None]:
        def set_mask(sample: Sample) -> None:
            sample.loss_mask = [1] * ones + [0] * (sample.response_length - ones)  # type: ignore[assignment]

        return set_mask

    log = recorded(generate(), sample_stage(mask(2), name="mask"))
    assert Replay(log, [generate(), sample_stage(mask(2), name="mask")]).verify().same
    found = Replay(log, [generate(), sample_stage(mask(1), name="mask")]).verify().divergence
    assert found is not None
    assert (found.stage, list(found.fields)) == ("mask", ["loss_mask"])
    assert "3 values" in str(found)


def test_what_depends_on_chance_is_named() -> None:
    source = random.Random(0)

    def noisy(sample: Sample) -> None:
        sample.reward = source.random()

    stages = [generate(), noisy]
    log = recorded(*stages)
    for _ in range(2):
        found = Replay(log, stages).verify().divergence
        assert found is not None
        assert (found.stage, list(found.fields)) == ("noisy", ["reward"])


def test_a_group_stage_that_depends_on_chance_is_named() -> None:
    numbers = itertools.count()

    def shuffled(group: Group) -> None:
        for sample in group.samples:
            sample.train_metadata = {"weight": next(numbers)}

    stages = [generate(), GroupAdvantageOfZero(), shuffled]
    log = recorded(*stages)
    found = Replay(log, stages).verify().divergence
    assert found is not None
    assert found.stage == "shuffled"
    assert {"digest", "train_metadata"} <= set(found.fields)


class GroupAdvantageOfZero:
    """A group stage that does the same each time."""

    level = "group"

    def __call__(self, group: Group) -> None:
        for sample in group.samples:
            sample.metadata["advantage"] = 0.0


def test_a_group_stage_that_was_changed_shows_in_the_digest() -> None:
    def weigh(weight: float) -> Any:
        def weighed(group: Group) -> None:
            for sample in group.samples:
                sample.train_metadata = {"weight": weight}

        return weighed

    log = recorded(generate(), weigh(1.0))
    found = Replay(log, [generate(), weigh(2.0)]).verify().divergence
    assert found is not None
    assert (found.kind, list(found.fields)) == ("batch_assembled", ["digest"])
    assert "weighed" in found.what


def test_another_verdict_is_named_with_what_it_was() -> None:
    log = recorded(generate(), alternating, DynamicFilter(reward_nonzero_std))
    found = Replay(log, [generate(), alternating, DynamicFilter(lambda group: group.index > 0)]).verify().divergence
    assert found is not None
    assert (found.stage, found.group_index) == ("DynamicFilter", 0)
    assert found.fields["dropped"].old is None
    assert found.fields["dropped"].new == "rejected"


def test_sets_and_tuples_compare_with_what_the_wire_made_of_them() -> None:
    def nested(sample: Sample) -> None:
        sample.metadata["labels"] = {"a", "b", "c"}
        sample.metadata["pair"] = (1, float("nan"))
        sample.metadata[("a", 1)] = {"x": [1, (2, 3)]}

    stages = [generate(), nested, tag]
    assert Replay(recorded(*stages), stages).verify().same


def test_wrappers_fan_outs_drops_and_contexts_behave_as_in_the_run() -> None:
    async def timed(sample: Sample, call_next: CallNext) -> Sample:
        sample.metadata["before"] = current_rollout().execution
        sample = await call_next(sample)
        sample.metadata["after"] = current_rollout().index
        return sample

    def split(sample: Sample) -> list[Sample]:
        return [sample.copy() for _ in range(1 + (sample.index or 0) % 3)]

    def halve(sample: Sample) -> Sample | list[Sample]:
        return [sample.copy(), sample.copy()] if (sample.index or 0) % 2 else sample

    def place(sample: Sample) -> None:
        at = current_rollout()
        sample.metadata["at"] = [at.rollout_id, at.group_index, at.index, at.execution, at.stage]

    def no_sevens(sample: Sample) -> Drop | None:
        return Drop("seven") if (sample.index or 0) % 7 == 6 else None

    stages = [timed, generate(lambda s: s.index % 3), no_sevens, split, place, sample_stage(halve, fans_out=True)]
    log = recorded(*stages, stop=2, spec=BatchSpec(3, max_rounds=20))
    report = Replay(log, stages).verify()
    assert report.same, str(report)

    def another_split(sample: Sample) -> list[Sample]:
        return [sample.copy()]

    stages[3] = sample_stage(another_split, name="split")
    found = Replay(log, stages).verify().divergence
    assert found is not None
    assert (found.stage, found.fields["children"].old, found.fields["children"].new) == ("split", 2, 1)


def test_a_stage_that_is_not_in_the_record_and_one_that_is_missing() -> None:
    log = recorded(generate(), tag, alternating)
    found = (
        Replay(log, [generate(), tag, sample_stage(lambda sample: None, name="new"), alternating]).verify().divergence
    )
    assert found is not None
    assert found.stage == "reward"
    assert "'new'" in found.what
    found = Replay(log, [generate(), alternating]).verify().divergence
    assert found is not None
    assert found.stage == "tag"
    found = Replay(log, [generate(), tag]).verify().divergence
    assert found is not None
    assert (found.stage, found.what) == (
        "reward",
        "the record goes on with this stage, in the replay the sample was through before it",
    )


@pytest.mark.parametrize("policy", ["fail", "resubmit"])
def test_failures_are_part_of_the_record(policy: Any) -> None:
    def broken(text: str) -> Any:
        def judge(sample: Sample) -> None:
            if (sample.index or 0) % 5 == 2:
                raise ValueError(f"{text} {sample.index}")

        return sample_stage(judge, on_error=policy)

    log = recorded(generate(), broken("no"), stop=2, spec=BatchSpec(2, max_rounds=20))
    assert Replay(log, [generate(), broken("no")]).verify().same
    found = Replay(log, [generate(), broken("not")]).verify().divergence
    assert found is not None
    assert (found.kind, found.stage) == ("stage_failed", "judge")
    assert found.fields["error"].old == "ValueError: no 2"
    found = Replay(log, [generate(), sample_stage(lambda sample: None, name="judge")]).verify().divergence
    assert found is not None
    assert "does not any more" in found.what


def test_external_stages_answer_from_the_record_and_run_on_demand() -> None:
    asked: list[int] = []

    def judge(sample: Sample) -> None:
        asked.append(sample.index or 0)
        sample.reward = float(len(asked))

    def wrap(external: bool = True) -> Any:
        return sample_stage(judge, external=external)

    def after(sample: Sample) -> None:
        sample.metadata["seen"] = sample.reward

    log = recorded(generate(), wrap(), after)
    calls = len(asked)
    report = Replay(log, [generate(), wrap(), after]).verify()
    assert report.same
    assert len(asked) == calls
    assert report.not_verified["judge"] == "external: it answered from the record"
    found = Replay(log, [generate(), wrap(), after], run_external=True).verify().divergence
    assert found is not None
    assert found.stage == "judge"
    assert len(asked) > calls


def test_an_external_group_stage_answers_from_the_record() -> None:
    numbers = itertools.count(10)

    @group_stage(external=True)
    def rank(group: Group) -> None:
        for sample in group.samples:
            sample.metadata["rank"] = next(numbers)

    def after(group: Group) -> None:
        for sample in group.samples:
            sample.metadata["rank"] += 1

    stages = [generate(), rank, after]
    report = Replay(recorded(*stages), stages).verify()
    assert report.same, str(report)
    assert report.batches == 1


def test_a_stage_that_cannot_be_imported_answers_from_the_record_and_is_named() -> None:
    def tokens(sample: Sample) -> None:
        sample.tokens = [7, 8, 9]  # type: ignore[assignment]

    log = recorded(tokens, generate(), alternating, DynamicFilter(reward_nonzero_std))
    assert log.header.stages[0].path is None
    report = Replay(log).verify()
    assert report.same, str(report)
    assert "no import path" in report.not_verified["tokens"]
    assert "no import path" in report.not_verified["DynamicFilter"]


def test_a_column_that_was_never_stored_is_said() -> None:
    """The first stage's tokens are gone before anything is stored."""

    def first(sample: Sample) -> None:
        sample.tokens = [1, 2]  # type: ignore[assignment]

    def second(sample: Sample) -> None:
        sample.tokens = [3, 4]  # type: ignore[assignment]

    log = recorded(first, second, generate())
    report = Replay(log).verify()
    assert any("no tokens of 2 values" in note for note in report.notes)


@pytest.mark.parametrize("unfinished", ["restart", "recycle", "cancel"])
@pytest.mark.parametrize("surplus", ["discard", "carry"])
def test_groups_that_come_from_an_earlier_rollout(unfinished: Any, surplus: Any) -> None:
    stages = [tag, generate(lambda s: (s.index * 7) % 5, length=4), alternating, DynamicFilter(reward_nonzero_std)]
    spec = BatchSpec(2, over_sampling=4, unfinished=unfinished, surplus=surplus)
    log = recorded(*stages, stop=4, spec=spec)
    origins = {event.origin for event in log.events(("group_submitted",))}
    assert len(origins) > 1 or unfinished == "cancel"
    report = Replay(log, stages).verify()
    assert report.same, str(report)
    assert report.batches == 4


def test_an_evaluation_is_verified_too() -> None:
    log = MemoryLog()
    stages = [generate(), alternating]
    pipeline = Pipeline(endless(), stages, BatchSpec(1), observers=[log])

    async def main() -> None:
        async with pipeline:
            await pipeline.evaluate(some(3), rollout_id=0)
            async for _ in pipeline.rollouts(stop=1):
                pass

    anyio.run(main, **virtual_time("asyncio"))
    report = Replay(log, stages).verify()
    assert (report.same, report.rounds) == (True, 2)

    def seen(sample: Sample, *, evaluation: bool) -> None:
        sample.reward = 9.0 if evaluation else float((sample.index or 0) % 2)

    found = Replay(log, [generate(), sample_stage(seen, name="reward")]).verify().divergence
    assert found is not None
    assert found.evaluation


def test_only_the_rollouts_that_are_asked_for() -> None:
    stages = [generate(), alternating]
    log = recorded(*stages, stop=3)
    assert Replay(log, stages).verify([1]).rounds == 1
    with pytest.raises(Exception, match="no rollout 9 in this log; the nearest is 2"):
        Replay(log, stages).verify([9])


def test_works_inside_a_running_loop() -> None:
    stages = [generate(), alternating]
    log = recorded(*stages)

    async def main() -> bool:
        return Replay(log, stages).verify().same

    assert anyio.run(main, backend="asyncio")
    assert anyio.run(main, backend="trio")


def test_a_log_without_stages_asks_for_them() -> None:
    with pytest.raises(ReplayError, match="give them"):
        Replay(MemoryLog())


def test_the_steps_lead_through_the_stages() -> None:
    stages = [tag, generate(), alternating, DynamicFilter(reward_nonzero_std), GroupAdvantage()]
    log = recorded(*stages)
    replay = Replay(log, stages)
    [step] = replay.steps(stage="reward", sample=3)
    assert step.sample is not None
    assert (step.sample.reward, step.sample.response_length) == (None, 3)
    assert step.run().reward == 1.0
    assert step.sample.reward is None
    step.sample.index = 2
    assert step.run().reward == 0.0
    assert [step.stage for step in replay.steps(group=1, sample=2)] == ["tag", "Generate", "reward"]
    groups = [step for step in replay.steps(group=1) if step.group is not None]
    assert [step.stage for step in groups] == ["DynamicFilter", "GroupAdvantage"]
    assert groups[1].group is not None
    assert groups[1].group.verdict is not None
    assert [s.train_metadata is not None for s in groups[1].run().samples] == [True, True]
    [asked] = replay.steps(stage="Generate", sample=0)
    with pytest.raises(ReplayError, match="asks an engine"):
        asked.run()
    with pytest.raises(ReplayError, match="did you mean 'reward'"):
        replay.steps(stage="rewards")


def test_a_step_stands_where_the_record_ends() -> None:
    def broken(sample: Sample) -> None:
        if sample.index == 1:
            raise ValueError("gone")

    stages = [generate(), broken]
    log = recorded(*stages)
    [step] = Replay(log, stages).steps(stage="broken", sample=1)
    assert step.event is not None
    assert step.event.kind == "stage_failed"
    with pytest.raises(ValueError, match="gone"):
        step.run()


def test_stages_that_the_run_did_not_have_and_those_that_it_had() -> None:
    def weigh(group: Group) -> None:
        group.samples[0].train_metadata = {"weight": 1}

    def last(batch: Batch) -> None:
        batch.groups[0].samples[0].train_metadata = {"last": True}

    base: list[Any] = [generate(), alternating]
    log = recorded(*base, last)
    for stages, told in (
        ([*base, weigh, last], "with weigh"),
        (base, "without last"),
        ([*base, sample_stage(tag, name="tag"), last], "tag"),
    ):
        found = Replay(log, stages).verify().divergence
        assert found is not None
        assert told in str(found)


def test_what_could_not_be_read_is_told_once_per_kind(tmp_path: Path) -> None:
    stages = [generate(), alternating]
    path = tmp_path / "run.mcap"
    record(Pipeline(endless(), stages, BatchSpec(3), observers=[Recorder(path, payload="none")]))
    report = Replay(LogReader(path), stages).verify()
    assert report.same
    assert sum("payload='none'" in note for note in report.notes) == 1


def test_notes_that_say_the_same_of_several_rounds_are_told_as_one() -> None:
    report = VerifyReport(
        notes=["rollout 0: cut: off", "alone", "rollout 1: cut: off", "evaluation 1: cut: off", "x: y"]
    )
    assert str(report).splitlines()[1:] == [
        "note: rollouts 0, 1: cut: off",
        "note: alone",
        "note: evaluation 1: cut: off",
        "note: x: y",
    ]


def test_a_log_without_a_rollout_is_not_called_the_same(tmp_path: Path) -> None:
    stages = [generate(), alternating]
    path = tmp_path / "run.mcap"
    record(Pipeline(endless(), stages, BatchSpec(3), observers=[Recorder(path)]))
    data = bytearray(unclosed(path))
    data[-2000] ^= 1  # in the only chunk of events
    path.write_bytes(data)
    report = Replay(LogReader(path), stages).verify()
    assert report.rounds == 0
    assert str(report).startswith("nothing was verified")
    assert "CRC" in str(report.notes)


def test_what_was_replayed_is_freed_without_the_garbage_collector() -> None:
    stages = [generate(), alternating]
    log = recorded(*stages, stop=3)
    gc.collect()
    gc.disable()
    try:
        assert Replay(log, stages).verify().same
        assert Replay(log, stages).what_if({"reward": alternating}).same
        assert not [each for each in gc.get_objects() if type(each) is _Job]
    finally:
        gc.enable()


def any_stream(seed: int) -> tuple[list[Any], BatchSpec, int, int]:
    """Stages and a spec that all follow from a number."""
    dice = random.Random(seed)

    def chance(sample: Sample, what: str) -> float:
        return random.Random(f"{seed}/{what}/{sample.index}").random()

    def answer(sample: Sample) -> Completion:
        if fails and chance(sample, "fail") < 0.08:
            raise OSError("engine")
        length = 1 + int(chance(sample, "length") * 5)
        return Completion("x" * length, [sample.index or 0] * length, [-0.5] * length)

    def tokens(sample: Sample) -> None:
        if not sample.tokens:
            sample.tokens = [1, 2, 3]  # type: ignore[assignment]

    async def timed(sample: Sample, call_next: CallNext) -> Sample:
        sample.metadata["before"] = 1
        sample = await call_next(sample)
        sample.metadata["after"] = (2, 3)
        return sample

    def score(sample: Sample) -> None:
        sample.reward = float(int(chance(sample, "reward") * 3))
        sample.loss_mask = [1] * sample.response_length  # type: ignore[assignment]

    def drops(sample: Sample) -> Drop | None:
        return Drop("bad") if chance(sample, "drop") < 0.1 else None

    def flaky(sample: Sample) -> None:
        if chance(sample, "flaky") < 0.1:
            raise ValueError(f"no {sample.index}")

    def fan(sample: Sample) -> Sample | list[Sample]:
        if chance(sample, "fan") < 0.3:
            return sample
        return [sample.copy() for _ in range(1 + int(chance(sample, "children") * 3))]

    def tool(sample: Sample) -> None:
        sample.metadata["tool"] = {"value": chance(sample, "tool")}

    def early(group: Group, *, remaining: int, target: int) -> Drop | None:
        return Drop("early") if group.index % 7 == 3 and remaining > target else None

    async def asks(group: Group) -> None:
        await anyio.sleep(chance(group.samples[0], "asks") / 500)  # a replay takes that time, too

    async def weighs(group: Group) -> Drop | None:
        await anyio.sleep(chance(group.samples[0], "weighs") / 500)
        return Drop("light") if chance(group.samples[0], "light") < 0.1 else None

    fails = dice.random() < 0.4
    fallback: Any = dice.choice(["none", "last", "best"])
    optional: list[tuple[float, Any]] = [
        (0.5, tag),
        (0.4, tokens),
        (0.3, timed),
        (1.0, Generate(SimulatedEngine(answer, delay=lambda sample: chance(sample, "delay") / 100))),
        (0.5, sample_stage(tool, external=True)),
        (0.3, drops),
        (0.3, sample_stage(flaky, on_error=dice.choice(["fail", "resubmit"]))),
        (0.3, fan),
        (1.0, score),
        (0.3, sample_stage(fan, name="fan again")),
        (0.3, asks),
        (0.3, early),
        (1.0, DynamicFilter(reward_nonzero_std, fallback=fallback)),
        (0.3, weighs),
        (0.7, GroupAdvantage()),
        (0.2, group_stage(early, name="early again")),
    ]
    stages = [stage for share, stage in optional if dice.random() < share]
    size = dice.choice([2, 4])
    groups = dice.choice([1, 2, 3, 5])
    spec = BatchSpec(
        groups,
        over_sampling=dice.choice([None, groups + 2, groups * 2]),
        max_rounds=dice.choice([3, 12]),
        min_group_size=dice.choice([None, 1]),
        surplus=dice.choice(["discard", "carry"]),
        unfinished=dice.choice(["restart", "recycle", "cancel"]),
        on_exhausted=dice.choice(["error", "partial"]),
        max_failures=1000,
    )
    return stages, spec, size, dice.choice([0, 0, 1])


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), backend=st.sampled_from(["asyncio", "trio"]), cut=st.floats(0.1, 1.0))
def test_any_run_verifies_at_any_prefix_and_unchanged_stages_change_nothing(
    seed: int, backend: str, cut: float
) -> None:
    stages, spec, size, ahead = any_stream(seed)
    log = MemoryLog()
    pipeline = Pipeline(endless(size), stages, spec, observers=[log])
    with suppress(RolloutExhausted):
        record(pipeline, 2, ahead=ahead, backend=backend)
    replay = Replay(log, stages)
    report = replay.verify()
    assert report.same, str(report)
    assert report.notes == []
    assert replay.what_if({}).same
    score = next(stage for stage in stages if getattr(stage, "__name__", "") == "score")
    again = replay.what_if({"score": score})
    assert again.same, str(again)
    prefix = Replay(log.cut(int(len(log.stored) * cut)), stages).verify()
    assert prefix.same, str(prefix)


def test_stages_that_wait_do_so_together() -> None:
    waiting = most = 0

    async def judge(sample: Sample) -> None:
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        await anyio.wait_all_tasks_blocked()
        waiting -= 1
        sample.reward = float(sample.index or 0)

    stages = [generate(), judge]
    log = recorded(*stages, stop=2)
    most = 0
    assert Replay(log, stages).verify().same
    assert most == 4  # all of a rollout
