"""`waste`: every token is used, lost to one cause, or not decided yet."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.simulated import SimulatedEngine
from eventbus.batching import BatchSpec, RolloutExhausted
from eventbus.events import StageApplied
from eventbus.log.inspect import WasteReport, waste
from eventbus.log.inspect.show import waste_lines
from eventbus.pipeline import Pipeline
from eventbus.sample import Completion, Sample
from eventbus.stage import DeclaredStage, Drop
from eventbus.testing import virtual_time
from middleware import DynamicFilter, FilterDecision, Generate
from tests.streams import Log, endless, engine, rewarded, some, strict
from tests.test_invariants import BACKENDS, stream
from tests.test_log_check import record, retried


def lost(report: WasteReport) -> dict[str, tuple[int, int]]:
    """Tokens and groups per cause."""
    return {cause: (cost.tokens, cost.groups) for cause, cost in report.lost.items()}


def by_group(sample: Sample) -> float:
    return float(sample.group_index or 0)


def test_each_end_is_a_cause() -> None:
    stages = [Generate(engine(by_group, length=5)), rewarded([1.0]), strict([0, 1])]
    report = waste(record(stages, BatchSpec(2, over_sampling=5, unfinished="cancel")).events)
    assert (report.used.tokens, report.used.groups) == (20, 2)
    assert lost(report) == {"dropped: bad": (20, 2), "cancelled": (6, 1)}  # 3 of 5 tokens had arrived
    assert (report.open.tokens, report.tokens_lost) == (0, 26)


def test_what_is_beyond_the_target() -> None:
    stages = [Generate(engine(1.0, length=5)), rewarded([1.0])]
    assert lost(waste(record(stages, BatchSpec(2, over_sampling=3)).events)) == {"surplus": (10, 1)}
    carried = waste(record(stages, BatchSpec(2, over_sampling=3, surplus="carry")).events)
    assert (lost(carried), carried.open.tokens, carried.open.groups) == ({}, 10, 1)
    taken_up = waste(record(stages, BatchSpec(2, over_sampling=3, surplus="carry"), stop=2).events)
    assert taken_up.used.tokens == 40


def test_a_failed_sample_takes_its_group_along_or_not() -> None:
    def judge(sample: Sample) -> None:
        if sample.index == 1:
            raise OSError("gone")
        sample.reward = 1.0

    stages = [Generate(engine(length=5)), judge]
    whole = waste(record(stages, BatchSpec(1)).events)
    assert lost(whole) == {"failed: judge: OSError": (10, 1)}
    shrunk = waste(record(stages, BatchSpec(1, min_group_size=1)).events)
    assert lost(shrunk) == {"sample failed: judge: OSError": (5, 0)}
    assert shrunk.used.tokens == 5


def test_a_dropped_sample_of_a_group_that_goes_on() -> None:
    def unlucky(sample: Sample) -> Drop | None:
        return Drop("loop") if sample.index == 0 else None

    report = waste(record([Generate(engine(length=5)), unlucky], BatchSpec(1, min_group_size=1)).events)
    assert lost(report) == {"sample dropped: loop": (5, 0)}


def test_a_resubmitted_sample_lost_its_first_answer() -> None:
    turns: Counter[int] = Counter()

    def judge(sample: Sample) -> None:
        turns[sample.index or 0] += 1
        if sample.index == 1 and turns[1] == 1:
            raise OSError("once")

    stages = [Generate(engine(length=5)), DeclaredStage(judge, on_error="resubmit")]
    report = waste(record(stages, BatchSpec(1)).events)
    assert (lost(report), report.used.tokens) == ({"resubmitted": (5, 0)}, 10)
    (prompt,) = report.prompts
    assert (prompt.group_index, prompt.prompt, prompt.causes) == (0, "prompt 0", {"resubmitted": 5})


def partial(unfinished: Any, stop: int) -> WasteReport:
    """Sample 3 is stopped after half of its four tokens."""

    def delay(sample: Sample) -> float:
        return (0.5 if sample.response_length else 2.0) if sample.index == 3 else 1.0

    answers = SimulatedEngine(lambda sample: Completion("abcd", [1, 2, 3, 4], None), delay=delay)
    stages = [Generate(answers), rewarded([1.0])]
    return waste(record(stages, BatchSpec(1, over_sampling=2, unfinished=unfinished), stop=stop).events)


def test_partial_samples_that_are_thrown_away_or_go_on() -> None:
    assert lost(partial("restart", 1)) == {"restarted": (6, 1)}
    assert lost(partial("cancel", 1)) == {"cancelled": (6, 1)}
    waiting = partial("recycle", 1)
    assert (lost(waiting), waiting.open.tokens) == ({}, 6)
    taken_up = partial("recycle", 2)
    assert taken_up.used.tokens == 16  # no token of group 1 counts twice


def test_what_a_fallback_kept_is_used_and_told() -> None:
    def judge(group: Any) -> FilterDecision:
        return FilterDecision(group.index == 0, "weak")

    stages = [Generate(engine(length=5)), rewarded([1.0]), DynamicFilter(judge, fallback="last")]
    report = waste(record(stages, BatchSpec(2)).events)
    assert (report.used.tokens, report.fallback.tokens, report.fallback.groups) == (20, 10, 1)


def test_a_batch_that_was_handed_back_is_not_used_twice() -> None:
    log = Log()

    async def main() -> None:
        stages = [Generate(engine(length=5)), rewarded([1.0])]
        pipeline = Pipeline(endless(), stages, BatchSpec(1), observers=[log], stall_after=None)
        async with pipeline:
            ahead = pipeline.rollouts(ahead=1)
            await anext(ahead)
            await anyio.sleep(1)  # rollout 1 is done, and nobody asks for it
        async with pipeline:
            await anext(pipeline.rollouts(start=1))

    anyio.run(main, **virtual_time("asyncio"))
    report = waste(log.events)
    assert len(log.of("group_submitted")) == 3
    assert (report.used.tokens, report.used.groups, lost(report)) == (20, 2, {})


def test_evaluations_are_no_waste() -> None:
    log = Log()

    async def main() -> None:
        stages = [Generate(engine(length=5)), rewarded([1.0])]
        async with Pipeline(endless(), stages, BatchSpec(1), observers=[log], stall_after=None) as pipeline:
            await pipeline.evaluate(some(2), rollout_id=0)

    anyio.run(main, **virtual_time("asyncio"))
    report = waste(log.events)
    assert (report.evaluation.tokens, report.evaluation.groups) == (20, 2)
    assert (report.used.tokens, report.tokens_lost, report.open.tokens) == (0, 0, 0)


def applied(seq: int, stage: str, end: float, seconds: float, waited: float = 0.0) -> StageApplied:
    return StageApplied(
        seq=seq, time_ns=int(end * 1e9), rollout_id=0, group_index=0, index=0, execution=0, stage=stage,
        seconds=seconds, waited=waited,
    )  # fmt: skip


def test_seconds_of_a_wrapper_are_its_own_and_waiting_does_not_count() -> None:
    events = record([Generate(engine()), rewarded([1.0])], BatchSpec(1)).events
    submitted = next(event for event in events if event.kind == "group_submitted")
    spans = [
        applied(2, "first", 1.0, 1.0),
        applied(3, "inner", 3.0, 1.0),
        applied(4, "innermost", 4.0, 0.5, waited=0.25),
        applied(5, "wrapper", 4.5, 3.0),  # from 1.5 on: it holds the two before it
    ]
    ended = next(event for event in events if event.kind == "group_ended")
    report = waste([submitted, *spans, ended])
    seconds = {stage: total for stage, (total, _) in report.stages.items()}
    assert seconds == pytest.approx({"first": 1.0, "inner": 1.0, "innermost": 0.25, "wrapper": 1.5})


def test_the_prompts_that_lost_most_come_first_and_no_more_than_asked() -> None:
    def answer(sample: Sample) -> Completion:
        count = 1 + (sample.group_index or 0)
        return Completion("", [1] * count, None)

    stages = [Generate(SimulatedEngine(answer)), rewarded([1.0]), strict(range(6))]
    report = waste(record(stages, BatchSpec(1, over_sampling=7)).events, top=3)
    assert [(prompt.group_index, prompt.tokens) for prompt in report.prompts] == [(5, 12), (4, 10), (3, 8)]
    lines = [line.plain for line in waste_lines(report)]
    assert max(map(len, lines)) <= 80
    assert any(line.startswith('group 5 "prompt 5"') for line in lines)
    assert any("lost, dropped: bad" in line and "75.0%" in line for line in lines)


def test_attempts_that_brought_nothing_are_counted_by_worker() -> None:
    events = retried()
    report = waste(events)
    assert report.attempts == {"http://a": (1, 2.0)}
    assert (report.used.tokens, report.tokens_lost) == (6, 0)
    lines = [line.plain for line in waste_lines(report)]
    assert lines[-2].startswith("attempts that brought nothing, at")
    assert lines[-1].split() == ["http://a", "1", "2.00"]
    attempt = next(event for event in events if event.kind == "attempt_ended" and event.outcome == "failed")
    for fields in ({"tokens": 2}, {"evaluation": True}):  # it brought something; nothing of an evaluation is lost
        assert not waste([msgspec.structs.replace(attempt, **fields)]).attempts


def test_nothing_recorded_is_nothing_lost() -> None:
    report = waste([])
    assert (report.used.tokens, report.lost, report.prompts) == (0, {}, [])
    assert [line.plain.split() for line in waste_lines(report)][1] == ["used", "in", "batches", "0", "-", "0.00"]


def generated(events: Iterable[Any]) -> int:
    """Response tokens that the engine gave, counted from the samples as they went in and came out."""
    total = 0
    had: defaultdict[int, int] = defaultdict(int)
    for event in events:
        if event.kind == "group_submitted":
            had.update(dict.fromkeys(event.executions, 0))
            for execution, samples in zip(event.executions, event.samples[1:], strict=False):
                had[execution] = sum(light.sample.response_length for light in samples)
        elif event.kind == "sample_generated":
            total += event.response_length - had[event.execution]
            had[event.execution] = event.response_length
        elif event.kind == "stage_failed":
            had[event.execution] = 0
    return total


@given(st.data(), BACKENDS)
def test_every_token_is_in_exactly_one_place(data: st.DataObject, backend: str) -> None:
    pipeline, _, log, _ = stream(data.draw)
    moment = data.draw(st.floats(0.0, 30.0))

    async def main() -> None:
        with anyio.move_on_after(moment):
            async with pipeline:
                try:
                    async for _ in pipeline.rollouts(stop=3, ahead=1):
                        pass
                except (RolloutExhausted, ExceptionGroup):  # more samples failed than it tolerates
                    pass

    anyio.run(main, **virtual_time(backend))
    for end in {len(log.events), data.draw(st.integers(0, len(log.events)))}:
        report = waste(log.events[:end])
        assert report.used.tokens + report.tokens_lost + report.open.tokens == generated(log.events[:end])
        assert min([report.used.tokens, report.open.tokens, *(cost.tokens for cost in report.lost.values())]) >= 0
        assert all(-1e-6 <= part <= whole + 1e-6 for whole, part in report.stages.values())
