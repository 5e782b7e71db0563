"""`why`: the lineage of a sample and of a group, in all rollouts that the group went through."""

from __future__ import annotations

from collections import Counter
from typing import Any

import anyio
import msgspec
import pytest
from msgspec import UNSET

from backends.simulated import SimulatedEngine
from eventbus.batching import BatchSpec
from eventbus.context import current_rollout
from eventbus.events import GroupEnded, UnknownEvent
from eventbus.group import Group
from eventbus.log.inspect import Lineage, Target, why
from eventbus.log.inspect.show import why_lines
from eventbus.pipeline import Pipeline
from eventbus.sample import Completion, Sample, SampleStatus, WeightSpan
from eventbus.stage import DeclaredStage, Drop
from eventbus.testing import virtual_time
from middleware import DynamicFilter, FilterDecision, Generate
from tests.streams import Log, endless, engine, rewarded, some, strict
from tests.test_log_check import record, retried


def text(lineage: Lineage) -> str:
    return "\n".join(line.plain for line in why_lines(lineage))


@pytest.mark.parametrize(
    ("given", "target"),
    [
        ("sample:1234", Target("sample", 1234)),
        ("group:0", Target("group", 0)),
        (" group = 17 ", Target("group", 17)),
    ],
)
def test_a_target_is_parsed(given: str, target: Target) -> None:
    assert Target.parse(given) == target


@pytest.mark.parametrize("given", ["", "1234", "sample:", "sample:x", "rollout:3", "sample:-1", "sample:1 2"])
def test_a_target_of_another_form_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=r"write sample:1234 \(Sample.index\) or group:17 \(Group.index\)"):
        Target.parse(given)


def test_a_sample_is_told_from_its_prompt_to_its_batch() -> None:
    def tag(sample: Sample, *, rollout_id: int) -> None:
        sample.metadata["source"] = {"rollout": rollout_id}

    def cut(sample: Sample) -> None:
        sample.response, sample.response_length = sample.response[:2], 2
        sample.tokens, sample.loss_mask = sample.tokens[:2], [1, 0]  # type: ignore[assignment]
        sample.rollout_log_probs = sample.rollout_log_probs[:2] if sample.rollout_log_probs else None

    stages = [Generate(engine(length=3)), tag, cut, rewarded([1.0, 0.0, 2.0]), strict([1])]
    log = record(stages, BatchSpec(1, over_sampling=2), version=lambda rollout: "v1")
    lineage = why(log.events, "sample:1")
    assert (lineage.group_index, lineage.execution, lineage.prompt) == (0, 1, "prompt 0")
    (chapter,) = lineage.chapters
    assert (chapter.rollout_id, chapter.origin, chapter.round, chapter.target) == (0, "new", 1, 1)
    assert (chapter.outcome, chapter.reason, chapter.weight_version) == ("kept", None, "v1")
    assert chapter.trained == {"loss": 1.0}
    story = chapter.executions[1]
    assert [(step.kind, step.stage) for step in story.steps] == [
        ("applied", "Generate"),
        ("generated", "Generate"),
        ("applied", "tag"),
        ("applied", "cut"),
        ("applied", "reward"),
    ]
    generated, _, tagged, shortened, scored = story.steps
    changes = {change.name: (change.old, change.new) for change in generated.changes}
    assert changes["status"] == (SampleStatus.PENDING, SampleStatus.COMPLETED)
    assert changes["response_length"] == (0, 3)
    assert generated.columns["tokens"] == (0, 3)
    assert [(c.name, c.old, c.new) for c in tagged.changes] == [("metadata.source", UNSET, {"rollout": 0})]
    assert [(c.name, c.old, c.new) for c in shortened.changes] == [
        ("response", "xxx", "xx"),
        ("response_length", 3, 2),
    ]
    assert shortened.columns == {"tokens": (3, 2), "loss_mask": (-1, 2), "rollout_log_probs": (3, 2)}
    assert [(c.name, c.old, c.new) for c in scored.changes] == [("reward", None, 0.0)]
    assert (story.reward, story.samples) == (0.0, 1)
    (_, judged) = chapter.steps
    assert judged.verdict is not None
    assert (judged.verdict.kept, judged.verdict.remaining, judged.verdict.target) == (True, 2, 1)
    shown = text(lineage)
    for part in (
        "sample 1: execution 1 of group 0",
        "response_length: 3 -> 2",
        'metadata.source: - -> {"rollout": 0}',
        "sample 0, execution 0: completed, 3 tokens",
        "kept, at remaining 2 of target 1",
        "gave weights v1",
    ):
        assert part in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_a_group_is_told_with_all_its_samples_in_a_line_each() -> None:
    log = record([Generate(engine()), rewarded([1.0, 0.5]), strict([0])], BatchSpec(1, over_sampling=2))
    lineage = why(log.events, "group:0")
    assert lineage.chapters[0].outcome == "dropped"
    shown = text(lineage)
    assert "sample 0, execution 0: completed, 1 token" in shown
    assert "rejected (bad), at remaining 2 of target 1" in shown
    assert "dropped: bad" in shown


def test_failures_resubmissions_and_retries_are_told() -> None:
    turns: Counter[int] = Counter()

    def judge(sample: Sample) -> None:
        index = sample.index or 0
        turns[index] += 1
        if index == 1:
            raise OSError(f"try {turns[index]}")
        sample.reward = float(index)

    stages = [Generate(engine()), DeclaredStage(judge, on_error="resubmit")]
    failed = why(record(stages, BatchSpec(1, over_sampling=2)).events, "sample:1")
    (chapter,) = failed.chapters
    assert (chapter.outcome, chapter.reason) == ("failed", "judge: OSError")
    steps = chapter.executions[1].steps
    assert [step.policy for step in steps if step.kind == "failed"] == ["resubmit", "resubmit", "fail"]
    # After a resubmission it begins as its prompt: nothing of the first attempt is an old value.
    starts = [step.changes for step in steps if step.kind == "applied" and step.stage == "Generate"]
    assert [next(c.old for c in changes if c.name == "response") for changes in starts] == ["", "", ""]
    assert 'failed: "OSError: try 1"; once more from the prompt' in text(failed)

    def patient(sample: Sample) -> None:  # what `retry` and `limit` tell of a stage that they wrap
        place = current_rollout()
        place.attempts, place.waited = (4, 2.5) if sample.index == 1 else (1, 0.0)

    tried = why(record([Generate(engine()), patient], BatchSpec(1)).events, "group:0")
    assert [step.attempts for step in tried.chapters[0].executions[1].steps] == [1, 1, 4]
    assert "(waited 2.50 s, 4 attempts)" in text(tried)  # an odd sample is shown also among its siblings


def test_a_dropped_sample_says_why() -> None:
    def no_loops(sample: Sample) -> Drop | None:
        return Drop("repetition") if sample.index == 1 else None

    log = record([Generate(engine()), no_loops, rewarded([1.0])], BatchSpec(1, over_sampling=2))
    lineage = why(log.events, "sample:1")
    assert lineage.chapters[0].executions[1].steps[-1].dropped == "repetition"
    assert lineage.chapters[0].reason == "repetition"
    assert "dropped: repetition" in text(lineage)


def test_fanned_out_children_are_found_by_their_own_number() -> None:
    def split(sample: Sample) -> list[Sample] | Sample:
        return [sample, sample.copy(), sample.copy()] if sample.index == 1 else sample

    log = record([Generate(engine()), split, rewarded(lambda s: float(s.index or 0))], BatchSpec(1), prompts=some(1))
    lineage = why(log.events, "sample:5")  # the second child of sample 1
    assert (lineage.group_index, lineage.execution) == (0, 1)
    story = lineage.chapters[0].executions[1]
    assert story.samples == 3
    rewards = {step.index: step.changes[0].new for step in story.steps if step.child}
    assert rewards == {3: 3.0, 5: 5.0, 7: 7.0}
    assert "into 3 samples" in text(lineage)


def test_a_number_that_two_groups_have_is_told_for_both() -> None:
    def split(sample: Sample) -> list[Sample] | Sample:
        return [sample, sample.copy()] if sample.index == 0 else sample

    log = record([Generate(engine()), split, rewarded([1.0])], BatchSpec(2), prompts=some(2))
    lineage = why(log.events, "sample:2")  # the first of group 1, and a child of group 0
    assert (lineage.group_index, lineage.others) == (1, ["group 0 (fanned out)"])
    assert "not to be confused with that of group 0 (fanned out)" in text(lineage)


def test_a_recycled_group_is_told_over_its_rollouts() -> None:
    def answer(sample: Sample) -> Completion:
        return Completion("abcd", [1, 2, 3, 4], [-0.5] * 4)

    def delay(sample: Sample) -> float:
        if sample.index == 3:
            return 0.5 if sample.response_length else 2.0
        return 1.0

    answers = SimulatedEngine(answer, delay=delay)
    log = Log()

    async def main() -> None:
        stages = [Generate(answers), rewarded([1.0])]
        spec = BatchSpec(1, over_sampling=2, unfinished="recycle")
        await answers.update_weights("v0")
        async with Pipeline(endless(), stages, spec, observers=[log], stall_after=None) as pipeline:
            async for batch in pipeline.rollouts(stop=2):
                await answers.update_weights(f"v{batch.rollout_id + 1}")

    anyio.run(main, **virtual_time("asyncio"))
    lineage = why(log.events, "sample:3")
    first, second = lineage.chapters
    assert (first.outcome, second.origin, second.outcome) == ("recycled", "recycled", "kept")
    assert (first.executions[1].had, second.executions[1].had) == (0, 2)
    generated = second.executions[1].steps[1]
    assert generated.weight_versions == [WeightSpan("v0", 0, 2), WeightSpan("v1", 2, 4)]
    assert next(c.old for c in second.executions[1].steps[0].changes if c.name == "response") == "ab"
    shown = text(lineage)
    assert "begins with 2 tokens of an earlier rollout" in shown
    assert "weights: v0 for tokens 0 to 2, v1 for tokens 2 to 4" in shown
    assert len(why(log.events, "sample:3", rollout=1).chapters) == 1
    with pytest.raises(LookupError, match=r"group:1: not in this log in rollout 7; there is no group at all"):
        why(log.events, "group:1", rollout=7)


def test_what_the_reserve_did_is_told() -> None:
    def judge(group: Group) -> FilterDecision:
        return FilterDecision(False, "weak", score=float(group.index))

    stages = [Generate(engine()), rewarded([1.0]), DynamicFilter(judge, fallback="best")]
    log = record(stages, BatchSpec(1, over_sampling=2, max_rounds=1))
    kept, left = text(why(log.events, "group:1")), text(why(log.events, "group:0"))
    assert "rejected (weak), held in reserve, score 1, at remaining 1 of target 1" in kept
    assert "rejected (weak), kept by the fallback, score 1" in kept
    assert "kept by the fallback" in kept.splitlines()[-2]
    assert "held in reserve" in left
    assert "dropped: weak" in left


def test_evaluations_are_told_apart() -> None:
    log = Log()

    async def main() -> None:
        stages = [Generate(engine()), rewarded([1.0])]
        async with Pipeline(endless(), stages, BatchSpec(1), observers=[log], stall_after=None) as pipeline:
            async for _ in pipeline.rollouts(stop=1):
                pass
            await pipeline.evaluate(some(3), rollout_id=1)

    anyio.run(main, **virtual_time("asyncio"))
    assert not why(log.events, "group:0").evaluation
    assert why(log.events, "group:0").others == ["evaluation 1, group 0"]
    assert why(log.events, "group:0", evaluation=True).evaluation
    lineage = why(log.events, "group:2")  # training has none
    assert lineage.evaluation
    assert text(lineage).splitlines()[0] == "evaluation group 2"


def test_an_unfinished_lineage_and_one_that_is_not_there() -> None:
    log = record([Generate(engine()), rewarded([1.0])], BatchSpec(1))
    cut = log.events[: next(i for i, event in enumerate(log.events) if isinstance(event, GroupEnded))]
    lineage = why(iter(cut), "sample:1")
    assert lineage.chapters[0].outcome is None
    assert "still under way where the log ends" in text(lineage)
    with pytest.raises(LookupError, match=r"sample:99: not in this log; the nearest is 1, there are 0 to 1"):
        why(log.events, "sample:99")


def test_odd_values_do_not_break_it() -> None:
    def odd(sample: Sample) -> None:
        sample.metadata = {"[red]": "\x1b[31m\n", "deep": {"n": float("nan")}, 7: b"raw"}
        sample.reward = {"math": float("nan"), "form": 1.0}

    log = record([Generate(engine()), odd], BatchSpec(1))
    newer: list[Any] = [*log.events, UnknownEvent(seq=99, time_ns=0, rollout_id=0, kind="new")]
    shown = text(why(newer, "sample:0"))
    assert "\x1b" not in shown
    assert "metadata.[red]" in shown
    assert "reward.form: - -> 1" in shown or "reward: None" in shown
    assert msgspec.json.encode(why(newer, "group:0").chapters[0].outcome) == b'"kept"'


def test_the_attempts_of_an_engine_are_told() -> None:
    events = retried()
    lineage = why(events, "sample:1")
    steps = lineage.chapters[0].executions[1].steps
    assert [step.kind for step in steps] == ["attempted", "attempted", "applied", "generated", "applied"]
    failed, answered = steps[:2]
    assert (failed.outcome, failed.asked, failed.error) == ("failed", "http://a", "http://a answered 500")
    assert (answered.outcome, answered.attempts, answered.tokens) == ("answered", 2, 3)
    shown = text(lineage)
    for part in (
        "Generate         attempt 1 failed after 2.00 s",
        "worker: http://a\n",
        'error: "http://a answered 500"',
        "Generate         attempt 2 answered after 1.00 s, 3 tokens",
    ):
        assert part in shown
    sibling = text(why(events, "sample:0"))
    assert "attempt 1 failed" in sibling  # out of the ordinary
    assert sibling.count("answered after") == 1  # but not this one of the sibling


def test_an_attempt_that_ends_after_its_group_is_told() -> None:
    events = retried()
    last = next(event for event in reversed(events) if event.kind == "attempt_ended")
    late = msgspec.structs.replace(last, seq=events[-1].seq + 1, outcome="aborted", error="cancelled")
    steps = why([*events, late], "sample:1").chapters[0].executions[1].steps
    assert (steps[-1].kind, steps[-1].error) == ("attempted", "cancelled")
