"""`check`: real streams pass at every prefix, and what breaks a rule is found and named."""

from __future__ import annotations

import io
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from eventbus.batching import BatchSpec, RolloutExhausted
from eventbus.context import current_rollout
from eventbus.events import EVENT_KINDS, GroupEnded, UnknownEvent, WeightsUpdated
from eventbus.group import Group, TrainResult, Verdict
from eventbus.log.inspect import Checker, check, diff, waste, why
from eventbus.log.inspect.export import write_trace
from eventbus.log.inspect.show import why_lines
from eventbus.pipeline import Pipeline
from eventbus.sample import Completion, Sample
from eventbus.stage import DeclaredStage, Drop, Dropped
from eventbus.testing import virtual_time
from middleware import DynamicFilter, FilterDecision, Generate
from tests.streams import Log, endless, engine, kind_of, rewarded, some, strict
from tests.test_invariants import BACKENDS, stream

Events = list[Any]


class Whole(Log):
    """Keeps every event, and copies of the samples that it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: dict[int, list[list[Sample]]] = {}

    def observe_samples(self, event: Any, samples: Sequence[Sequence[Sample]]) -> None:
        self.observe(event)
        self.shown[event.seq] = [[sample.copy() for sample in execution] for execution in samples]

    def samples(self, event: Any) -> list[list[Sample]]:
        return self.shown[event.seq]


def record(
    stages: Sequence[Any],
    spec: BatchSpec,
    *,
    prompts: Any = None,
    stop: int = 1,
    ahead: int = 0,
    backend: str = "asyncio",
    version: Callable[[int], str | None] = lambda rollout: None,
) -> Whole:
    log = Whole()

    async def main() -> None:
        pipeline = Pipeline(prompts or endless(), stages, spec, observers=[log], stall_after=None)
        async with pipeline:
            try:
                async for batch in pipeline.rollouts(stop=stop, ahead=ahead):
                    batch.trained(TrainResult({"loss": 1.0}, version(batch.rollout_id)))
            except (RolloutExhausted, ExceptionGroup):
                pass

    anyio.run(main, **virtual_time(backend))
    return log


class Retrying:
    """An engine that answers sample 1 at its second attempt, and the others at once."""

    async def generate(self, sample: Sample, sampling: Mapping[str, Any]) -> Completion:
        place = current_rollout()
        attempts = 1 + (sample.index == 1)
        if attempts > 1:
            await anyio.sleep(2)
            place.attempt_ended(
                attempt=1, worker="http://a", rid="r-1", outcome="failed", error="http://a answered 500", seconds=2.0
            )
        await anyio.sleep(1)
        place.attempt_ended(attempt=attempts, worker="http://b", rid="r-2", outcome="answered", tokens=3, seconds=1.0)
        return Completion("abc", [1, 2, 3], [-0.5] * 3)


def retried() -> Events:
    return record([Generate(Retrying()), rewarded([1.0])], BatchSpec(1)).events


@pytest.fixture(scope="module")
def simple() -> Whole:
    """Two rollouts of two groups; of the first group 1 is rejected, and 3 and 4 are too many."""
    stages = [Generate(engine(lambda sample: float(sample.group_index or 0))), rewarded([1.0, 0.0]), strict([1])]
    return record(stages, BatchSpec(2, over_sampling=3), stop=2, version=lambda rollout: f"v{rollout}")


def texts(events: Sequence[Any], **options: Any) -> list[str]:
    return [f"{violation.rule}: {violation.text}" for violation in check(events, **options).violations]


def numbered(events: Sequence[Any]) -> Events:
    """As if nothing were missing: numbers without gaps."""
    return [msgspec.structs.replace(event, seq=seq) for seq, event in enumerate(events)]


def at(events: Sequence[Any], kind: str, **fields: Any) -> int:
    """The place of the first event of this kind with these fields."""
    return next(
        place
        for place, event in enumerate(events)
        if kind_of(event) == kind and all(getattr(event, name) == value for name, value in fields.items())
    )


def without(events: Sequence[Any], place: int) -> Events:
    return numbered([*events[:place], *events[place + 1 :]])


def twice(events: Sequence[Any], place: int) -> Events:
    return numbered([*events[: place + 1], *events[place:]])


def swapped(events: Sequence[Any], place: int) -> Events:
    return numbered([*events[:place], events[place + 1], events[place], *events[place + 2 :]])


# Real streams


@given(st.data(), BACKENDS)
def test_a_stream_passes_at_every_prefix(data: st.DataObject, backend: str) -> None:
    pipeline, _, log, _ = stream(data.draw)
    whole = Whole()
    pipeline._hub.add(whole)
    stop, ahead, moment = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 2)), data.draw(st.floats(0.0, 40.0))

    async def main() -> None:
        with anyio.move_on_after(moment):
            async with pipeline:
                try:
                    async for _ in pipeline.rollouts(stop=stop, ahead=ahead):
                        pass
                    await pipeline.evaluate(some(2), rollout_id=stop)
                except (RolloutExhausted, ExceptionGroup):  # more samples failed than it tolerates
                    pass

    anyio.run(main, **virtual_time(backend))
    checker = Checker(samples=whole.samples)
    for event in log.events:
        checker.feed(event)
        assert checker.violations == []
    report = checker.report()
    assert report.events == len(log.events)
    assert report.rollouts == len(log.of("rollout_finished"))
    assert report.digests == len(log.of("batch_assembled"))
    assert report.unfinished == []


def wild(draw: Any, log: Whole) -> Pipeline:
    """As `stream`, but with what users' stages may do besides: wrappers that try again or catch a drop, group stages
    that fail, drop, or make a new group, judges that take their time, two filters, external stages."""
    size = draw(st.integers(1, 3))
    delays = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=5))
    fates = draw(st.lists(st.sampled_from(["ok"] * 5 + ["drop", "raise", "fail", "again"]), min_size=1, max_size=9))
    ends = draw(st.lists(st.sampled_from(["ok"] * 4 + ["drop", "fail", "new", "raise"]), min_size=1, max_size=7))
    verdicts = draw(st.lists(st.sampled_from(["keep", "keep", "no", "spare"]), min_size=1, max_size=5))
    turns: Counter[Any] = Counter()

    def of(table: list[Any], number: int | None) -> Any:
        return table[(number or 0) % len(table)]

    async def catch(sample: Sample, call_next: Any) -> Sample | Drop:
        turns[sample.index] += 1
        if of(fates, sample.index) == "again" and turns[sample.index] == 1:
            await call_next(sample.copy())
        try:
            result: Sample = await call_next(sample)
        except Dropped as dropped:
            if draw_catches:
                return sample
            raise dropped
        return result

    def fate(sample: Sample) -> Drop | None:
        sample.reward = float((sample.index or 0) % 2)
        kind = of(fates, sample.index)
        if kind == "raise":
            raise Dropped(Drop("raised"))  # nothing says so before the group ends
        if kind == "fail":
            raise OSError(kind)
        return Drop("unlucky") if kind == "drop" else None

    async def polish(group: Group) -> Group | Drop | None:
        await anyio.sleep(of(delays, group.index) / 7)
        end = of(ends, group.index)
        if end == "fail" or (end == "raise" and turns["polish", group.index] == 0):
            turns["polish", group.index] += 1
            raise ValueError(end)
        if end == "new":
            return Group(group.index, group.prompt, group.executions[:1])
        return Drop("dull") if end == "drop" else None

    async def judge(group: Group) -> FilterDecision:
        await anyio.sleep(of(delays, group.index + 1) / 5)
        verdict = of(verdicts, group.index)
        return FilterDecision(verdict == "keep", verdict, verdict == "spare", score=float(group.index % 3))

    def count(group: Group, *, remaining: int) -> Drop | None:
        return Drop("odd") if group.index % 5 == 4 else None

    draw_catches = draw(st.booleans())
    on_error = draw(st.sampled_from(["fail", "resubmit"]))
    spec = BatchSpec(
        draw(st.integers(1, 3)),
        over_sampling=draw(st.none() | st.integers(1, 5)),
        max_rounds=draw(st.integers(1, 4)),
        min_group_size=draw(st.none() | st.integers(1, size)),
        surplus=draw(st.sampled_from(["discard", "carry"])),
        unfinished=draw(st.sampled_from(["restart", "recycle", "cancel"])),
        on_exhausted=draw(st.sampled_from(["error", "partial", "wrap"])),
        max_failures=draw(st.sampled_from([0, 3, 64])),
    )
    stages: list[Any] = [
        catch,
        Generate(engine(lambda sample: of(delays, sample.index), length=4), {"max_new_tokens": 3}),
        DeclaredStage(fate, on_error=on_error, external=draw(st.booleans())),
        DeclaredStage(polish, on_error=on_error, external=draw(st.booleans())),
        DynamicFilter(judge, fallback=draw(st.sampled_from(["none", "last", "best"]))),
        count,
    ]
    if draw(st.booleans()):
        stages.append(DeclaredStage(polish, name="again", on_error="fail"))
    prompts = endless(size) if draw(st.booleans()) else some(draw(st.integers(1, 12)), size)
    return Pipeline(prompts, stages, spec, observers=[log], stall_after=None)


@given(st.data(), BACKENDS)
def test_what_users_may_do_is_no_violation(data: st.DataObject, backend: str) -> None:
    log = Whole()
    pipeline = wild(data.draw, log)
    stop, ahead = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2))
    moments = data.draw(st.lists(st.floats(0.0, 20.0), min_size=1, max_size=2))

    async def main() -> None:
        for moment in moments:  # left and entered again
            with anyio.move_on_after(moment):
                async with pipeline:
                    try:
                        async for _ in pipeline.rollouts(stop=stop, ahead=ahead):
                            pass
                        await pipeline.evaluate(some(2, pipeline.prompts.group_size), rollout_id=stop)
                    except (RolloutExhausted, ExceptionGroup):
                        pass

    anyio.run(main, **virtual_time(backend))
    checker = Checker(samples=log.samples)
    for event in log.events:
        checker.feed(event)
        assert [str(violation) for violation in checker.violations] == []
    # And everything else can be told of such a stream.
    report = waste(log.events)
    assert min([report.used.tokens, report.open.tokens, *(cost.tokens for cost in report.lost.values())]) >= 0
    assert write_trace(log.events, io.StringIO()) > 0
    assert diff(log.events, log.events).same
    for index in {event.group_index for event in log.of("group_submitted") if not event.evaluation}:
        lineage = why(log.events, f"group:{index}")
        assert all(chapter.outcome is not None for chapter in lineage.chapters)
        assert list(why_lines(lineage))


@settings(max_examples=30)
@given(st.data())
def test_what_is_lost_doubled_or_moved_is_found_by_its_number(data: st.DataObject) -> None:
    pipeline, _, log, _ = stream(data.draw)

    async def main() -> None:
        async with pipeline:
            try:
                async for _ in pipeline.rollouts(stop=2):
                    pass
            except (RolloutExhausted, ExceptionGroup):  # more samples failed than it tolerates
                pass

    anyio.run(main, **virtual_time("asyncio"))
    events = log.events
    assume(len(events) > 2)
    place = data.draw(st.integers(1, len(events) - 2))
    event = events[place]
    for changed in (
        [*events[:place], *events[place + 1 :]],
        [*events[: place + 1], *events[place:]],
        [*events[:place], events[place + 1], event, *events[place + 2 :]],
    ):
        assert "seq" in {violation.rule for violation in check(changed).violations}


LEDGER = ("rollout_started", "group_submitted", "group_completed", "group_ended", "rollout_finished")


@settings(max_examples=30)
@given(st.data())
def test_what_the_ledger_needs_is_missed_also_where_the_numbers_fit(data: st.DataObject) -> None:
    pipeline, _, log, _ = stream(data.draw)

    async def main() -> None:
        async with pipeline:
            try:
                async for _ in pipeline.rollouts(stop=2):
                    pass
            except (RolloutExhausted, ExceptionGroup):  # more samples failed than it tolerates
                pass

    anyio.run(main, **virtual_time("asyncio"))
    events = log.events

    def matters(place: int) -> bool:
        """An event that others rest upon."""
        event, later = events[place], events[place + 1 :]
        if kind_of(event) == "rollout_finished":
            return any(other.rollout_id == event.rollout_id for other in later)
        if kind_of(event) == "group_completed":
            about = {"rollout_id": event.rollout_id, "group_index": event.group_index}
            return bool(later[at(later, "group_ended", **about)].outcome == "kept")
        return kind_of(event) in LEDGER

    places = [place for place in range(len(events)) if matters(place)]
    assume(places)
    place = data.draw(st.sampled_from(places))
    assert texts(without(events, place))
    place = data.draw(st.sampled_from([place for place in range(len(events)) if kind_of(events[place]) in LEDGER]))
    assert texts(twice(events, place))


# One rule each


def test_a_finished_stream_has_nothing_to_say(simple: Whole) -> None:
    report = check(simple.events, samples=simple.samples)
    assert report.ok
    assert (report.rollouts, report.digests, report.unverified) == (2, 2, 0)
    assert report.groups == len(simple.of("group_submitted"))


def test_a_gap_says_what_is_missing_and_marks_what_may_follow_from_it(simple: Whole) -> None:
    place = at(simple.events, "group_submitted", group_index=0)
    report = check(simple.events[:place] + simple.events[place + 2 :])
    first, *others = report.violations
    assert (first.rule, first.seq, first.text) == ("seq", place + 2, f"missing before it: {place} to {place + 1}")
    assert others
    assert all(other.after_gap for other in others)
    assert str(first) == f"seq {place + 2}: seq: rollout 0: missing before it: {place} to {place + 1}"


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [
        ("rollout_started", {}, "order: group_submitted without rollout_started before it"),
        ("group_submitted", {"group_index": 0}, "order: stage_applied before it was submitted"),
        ("group_completed", {"group_index": 0}, "order: group stage 'chosen' before group_completed"),
        ("group_ended", {"group_index": 0}, "ledger: the batch was assembled, and it has not ended"),
        ("group_ended", {"group_index": 1}, "ledger: the batch was assembled, and it has not ended"),
        ("batch_assembled", {}, "batch: finished with 2 groups kept, but without batch_assembled"),
        ("rollout_finished", {}, "order: batch_trained before there was a batch"),
        ("batch_trained", {}, "order: weights_updated to 'v0', which no batch_trained before it says"),
        ("stage_applied", {"stage": "Generate"}, "order: sample_generated by stage 'Generate' comes after nothing"),
    ],
)
def test_an_event_is_missing(simple: Whole, kind: str, fields: dict[str, Any], text: str) -> None:
    assert text in texts(without(simple.events, at(simple.events, kind, **fields)))


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [
        ("rollout_started", {}, "order: started again while it was under way"),
        ("group_submitted", {"group_index": 0}, "ledger: the executions [0, 1] were submitted before"),
        ("group_completed", {"group_index": 0}, "order: group_completed twice"),
        ("group_judged", {"group_index": 0}, "order: judged twice by 'chosen'"),
        ("group_judged", {"group_index": 1}, "order: judged twice by 'chosen'"),
        ("group_ended", {"group_index": 0}, "ledger: group_ended after it ended"),
        ("batch_assembled", {}, "order: batch_assembled twice"),
        ("rollout_finished", {}, "order: rollout_finished after rollout_finished"),
        ("batch_trained", {}, "order: batch_trained twice"),
    ],
)
def test_an_event_comes_twice(simple: Whole, kind: str, fields: dict[str, Any], text: str) -> None:
    assert text in texts(twice(simple.events, at(simple.events, kind, **fields)))


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [
        ("stage_applied", {"stage": "Generate"}, "order: sample_generated by stage 'Generate' comes after nothing"),
        ("stage_applied", {"stage": "chosen"}, "order: judged by 'chosen', after group stage None"),
        ("group_completed", {"group_index": 0}, "order: group stage 'chosen' before group_completed"),
        ("group_judged", {"group_index": 1}, "order: group_judged after it ended"),
        ("batch_assembled", {}, "order: batch_assembled after rollout_finished"),
        ("rollout_finished", {}, "order: batch_trained before there was a batch"),
        ("batch_trained", {}, "order: weights_updated to 'v0', which no batch_trained before it says"),
    ],
)
def test_two_events_change_places(simple: Whole, kind: str, fields: dict[str, Any], text: str) -> None:
    assert text in texts(swapped(simple.events, at(simple.events, kind, **fields)))


def changed(events: Sequence[Any], kind: str, where: dict[str, Any], **fields: Any) -> Events:
    place = at(events, kind, **where)
    return [*events[:place], msgspec.structs.replace(events[place], **fields), *events[place + 1 :]]


@pytest.mark.parametrize(
    ("kind", "where", "fields", "text"),
    [
        ("group_ended", {"group_index": 1}, {"outcome": "kept"}, "order: ended kept, but its verdict was to reject it"),
        ("group_ended", {"group_index": 0}, {"outcome": "dropped"}, "order: ended dropped, but no stage dropped it"),
        ("group_ended", {"group_index": 0}, {"outcome": "failed"}, "order: ended failed, but no stage of it failed"),
        ("group_ended", {"group_index": 0}, {"by_fallback": True},
         "ledger: ended kept by_fallback, but its verdict was another"),
        ("group_submitted", {"group_index": 2}, {"origin": "recycled"},
         "ledger: submitted as recycled, but it never ended as recycled before"),
        ("group_submitted", {"group_index": 2}, {"origin": "restarted"},
         "ledger: submitted as restarted, but it never ended as cancelled before"),
        ("group_submitted", {"group_index": 0}, {"round": 11}, "ledger: submitted in round 11 of at most 10"),
        ("group_submitted", {"group_index": 0}, {"executions": [7, 8, 9]}, "ledger: 3 executions in a group of 2"),
        ("stage_applied", {"group_index": 0}, {"execution": 5},
         "ledger: stage_applied of an execution that the group does not have"),
        ("group_completed", {"group_index": 0}, {"samples": []}, "ledger: completed with 0 executions of 2"),
        ("group_judged", {"group_index": 0}, {"verdict": Verdict(True, remaining=1, target=2)},
         "ledger: judged at remaining=1, when 3 could still fill the batch"),
        ("group_judged", {"group_index": 0}, {"verdict": Verdict(True, remaining=3, target=7)},
         "ledger: judged for target=7, which is 2"),
        ("batch_assembled", {}, {"groups": [0, 1]}, "batch: the batch has [1], which were not kept and lacks [2], "
         "which were"),
        ("batch_assembled", {}, {"groups": [2, 0]}, "batch: the batch is not in the order of its groups"),
        ("batch_trained", {}, {"weight_version": "v7"},
         "order: weights_updated to 'v0', which no batch_trained before it says"),
    ],
)  # fmt: skip
def test_an_event_says_something_else(
    simple: Whole, kind: str, where: dict[str, Any], fields: dict[str, Any], text: str
) -> None:
    assert text in texts(changed(simple.events, kind, where, **fields))


@pytest.mark.parametrize("name", ["submitted", "kept", "kept_by_fallback", "cancelled", "failed_samples", "samples"])
def test_the_counts_of_the_summary_are_those_of_the_events(simple: Whole, name: str) -> None:
    place = at(simple.events, "rollout_finished")
    summary = simple.events[place].summary
    wrong = msgspec.structs.replace(summary, **{name: getattr(summary, name) + 1})
    found = texts(changed(simple.events, "rollout_finished", {}, summary=wrong))
    count = getattr(summary, name)
    assert found == [f"summary: says {name}={count + 1}, the events say {count}"]


def test_the_digest_is_that_of_the_recorded_samples(simple: Whole) -> None:
    found = texts(changed(simple.events, "batch_assembled", {}, digest="0" * 32), samples=simple.samples)
    assert len(found) == 1
    assert found[0].startswith("batch: its digest is 00000000000000000000000000000000, that of the recorded samples ")


def test_samples_that_cannot_be_read_are_told(simple: Whole) -> None:
    def samples(event: Any) -> list[list[Sample]]:
        raise OSError("chunk 7 is damaged")

    assert texts(simple.events, samples=samples) == ["batch: its samples cannot be read: chunk 7 is damaged"] * 2


def test_a_group_stage_that_may_have_changed_samples_leaves_the_digest_unverified() -> None:
    def mark(group: Group) -> None:
        for sample in group.samples:
            sample.metadata["seen"] = True

    log = record([Generate(engine()), rewarded([1.0]), mark], BatchSpec(2))
    report = check(log.events, samples=log.samples)
    assert report.ok
    assert (report.digests, report.unverified) == (0, 1)


def test_a_batch_stage_may_change_the_batch() -> None:
    def halve(batch: Any) -> None:
        del batch.groups[1:]

    log = record([Generate(engine()), rewarded([1.0]), halve], BatchSpec(2))
    assert check(log.events, batch_stages=True).ok
    assert texts(log.events) == ["batch: the batch lacks [1], which were", "batch: the batch has 1 groups of 2"]


def test_an_unfinished_stream_is_not_blamed_for_what_has_not_happened(simple: Whole) -> None:
    report = check(simple.events[: at(simple.events, "group_ended")])
    assert report.ok
    assert report.unfinished == ["rollout 0: 3 groups under way, 0 kept"]


def test_a_stream_that_begins_in_the_middle_of_a_run(simple: Whole) -> None:
    second = at(simple.events, "rollout_started", rollout_id=1)
    assert check(simple.events[second - 2 :]).ok  # the batch before is acknowledged first


def test_kinds_of_a_newer_version_are_counted(simple: Whole) -> None:
    last = simple.events[-1]
    newer = UnknownEvent(seq=last.seq + 1, time_ns=0, rollout_id=1, kind="cache_flushed")
    report = check([*simple.events, newer])
    assert report.ok
    assert report.unknown == {"cache_flushed": 1}


def test_evaluations_that_share_a_number_are_no_violation() -> None:
    log = Whole()

    async def main() -> None:
        stages = [Generate(engine(1.0)), rewarded([1.0])]
        async with Pipeline(some(4), stages, BatchSpec(2), observers=[log], stall_after=None) as pipeline:
            async with anyio.create_task_group() as task_group:
                for count in (2, 3):
                    task_group.start_soon(partial(pipeline.evaluate, some(count), rollout_id=5))
            await pipeline.evaluate(some(2), rollout_id=5)

    anyio.run(main, **virtual_time("asyncio"))
    report = check(log.events)
    assert report.ok
    assert report.rollouts == 2  # the two that overlap count once


def test_recycled_carried_restarted_and_failed_groups_pass() -> None:
    turns: Counter[int] = Counter()

    def moody(sample: Sample) -> None:
        turns[sample.index or 0] += 1
        sample.reward = 1.0
        if (sample.index or 0) % 5 == 0 and turns[sample.index or 0] == 1:
            raise OSError("once")

    for unfinished, surplus in itertools.product(("restart", "recycle", "cancel"), ("discard", "carry")):
        turns.clear()
        answers = engine(lambda sample: 1.0 + random.Random(sample.index).random() * 3, length=4)
        spec = BatchSpec(2, over_sampling=5, unfinished=unfinished, surplus=surplus)  # type: ignore[arg-type]
        log = record([Generate(answers), DeclaredStage(moody, on_error="resubmit")], spec, stop=4)
        assert texts(log.events, samples=log.samples) == []
        origins = {event.origin for event in log.of("group_submitted")}
        assert ("recycled" in origins) == (unfinished == "recycle")


def test_a_reserve_is_counted() -> None:
    def judge(group: Group) -> FilterDecision:
        return FilterDecision(group.index % 4 == 0, "weak", score=float(group.index))

    spec = BatchSpec(3, over_sampling=2, max_rounds=3)
    log = record([Generate(engine()), rewarded([1.0]), DynamicFilter(judge, fallback="best")], spec, stop=2)
    assert any(event.held for event in log.of("group_judged"))
    assert texts(log.events, samples=log.samples) == []
    released = at(log.events, "group_judged", held=False, verdict=log.of("group_ended")[-1] and next(
        event.verdict for event in log.of("group_judged") if event.verdict.by_fallback))  # fmt: skip
    found = texts(without(log.events, released))
    assert "order: ended kept, but its verdict was to reject it" in found


def test_a_group_that_failed_can_only_end() -> None:
    def broken(sample: Sample) -> Drop | None:
        if sample.group_index == 1:
            raise OSError("no")
        sample.reward = 1.0
        return None

    log = record([Generate(engine()), broken], BatchSpec(2, over_sampling=3))
    assert texts(log.events) == []
    ended = at(log.events, "group_ended", group_index=1)
    assert log.events[ended].outcome == "failed"
    found = texts(changed(log.events, "group_ended", {"group_index": 1}, outcome="kept"))
    assert "order: ended kept before group_completed" in found
    assert "batch: the batch lacks [1], which were" in found


def test_an_end_without_a_beginning() -> None:
    end = GroupEnded(seq=0, time_ns=0, rollout_id=3, group_index=7, outcome="kept")
    assert texts([end]) == [
        "order: group_ended without rollout_started before it",
        "ledger: group_ended before it was submitted",
    ]
    version = WeightsUpdated(seq=0, time_ns=0, rollout_id=3, version="v")
    assert texts([version]) == ["order: weights_updated of a rollout that never started"]


def test_every_kind_is_known_to_the_checker(simple: Whole) -> None:
    """A new kind of event needs a rule, or to be passed over on purpose."""
    assert set(map(kind_of, simple.events)) | {"stage_failed", "attempt_ended"} == set(EVENT_KINDS)


def test_a_carried_group_may_have_been_made_smaller() -> None:
    def halve(group: Group) -> Group:
        return Group(group.index, group.prompt, group.executions[:1])

    events = record([Generate(engine()), halve], BatchSpec(1, over_sampling=2, surplus="carry"), stop=2).events
    carried = next(event for event in events if kind_of(event) == "group_completed" and event.at)
    assert len(carried.samples) == 1
    assert not texts(events)


def test_attempts_break_no_rule_wherever_they_end() -> None:
    events = retried()
    assert [event.outcome for event in events if kind_of(event) == "attempt_ended"] == [
        "answered",
        "failed",
        "answered",
    ]
    assert not texts(events)
    late = next(event for event in events if kind_of(event) == "attempt_ended")
    assert not texts([*events, msgspec.structs.replace(late, seq=events[-1].seq + 1, outcome="aborted")])


def test_an_engine_may_have_new_weights_at_any_time(simple: Whole) -> None:
    version = WeightsUpdated(seq=0, time_ns=0, rollout_id=3, version="v", workers=["http://a"])
    assert not texts([version])
    assert not texts([version, *(msgspec.structs.replace(event, seq=event.seq + 1) for event in simple.events)])
