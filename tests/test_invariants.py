"""What must always hold, on random streams: conservation at every prefix, whole batches, own contexts, nothing left."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from typing import Any, Literal

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.simulated import SimulatedEngine
from eventbus.batching import BatchSpec, RolloutExhausted
from eventbus.context import current_rollout
from eventbus.group import Group
from eventbus.pipeline import Pipeline
from eventbus.sample import Completion, Sample, SampleStatus
from eventbus.stage import DeclaredStage, Drop
from eventbus.testing import virtual_time
from middleware import DynamicFilter, FilterDecision, Generate
from tests.streams import Log, endless, kind_of, some

BACKENDS = st.sampled_from(["asyncio", "trio"])
FATES = ["ok"] * 6 + ["drop", "fail", "abort", "resubmit"]


class Conservation(Log):
    """Checks every ledger at every event, and that the events tell the same."""

    def __init__(self) -> None:
        super().__init__()
        self.pipeline: Pipeline | None = None
        self.told: dict[tuple[int, bool], Counter[str]] = {}
        self.open: Counter[tuple[int, bool, int]] = Counter()

    def observe(self, event: Any) -> None:
        super().observe(event)
        assert event.seq == len(self.events) - 1
        run = (event.rollout_id, event.evaluation)
        told = self.told.setdefault(run, Counter())
        if kind_of(event) == "group_submitted":
            told["submitted"] += 1
            self.open[(*run, event.group_index)] += 1
        elif kind_of(event) == "group_ended":
            told[event.outcome] += 1
            self.open[(*run, event.group_index)] -= 1
            assert self.open[(*run, event.group_index)] >= 0
        assert self.pipeline is not None
        for rollout in self.pipeline._rollouts:
            ledger, told = rollout.ledger, self.told.get((rollout.id, rollout.evaluation), Counter())
            assert ledger.balanced
            assert ledger.submitted == told["submitted"]
            assert sum(ledger.dropped.values()) == told["dropped"]
            for outcome in ("kept", "surplus", "carried", "failed", "cancelled", "recycled"):
                assert getattr(ledger, outcome) == told[outcome]


def stream(draw: Any) -> tuple[Pipeline, SimulatedEngine, Conservation, BatchSpec]:
    """A pipeline with random sizes, policies, delays and fates of samples."""
    size = draw(st.integers(1, 3))
    spec = BatchSpec(
        draw(st.integers(1, 4)),
        over_sampling=draw(st.none() | st.integers(1, 6)),
        max_rounds=draw(st.integers(1, 5)),
        min_group_size=draw(st.none() | st.integers(1, size)),
        surplus=draw(st.sampled_from(["discard", "carry"])),
        unfinished=draw(st.sampled_from(["restart", "recycle", "cancel"])),
        on_exhausted=draw(st.sampled_from(["error", "partial", "wrap"])),
    )
    delays = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0]), min_size=1, max_size=8))
    fates = draw(st.lists(st.sampled_from(FATES), min_size=1, max_size=12))
    verdicts = draw(st.lists(st.sampled_from(["keep", "keep", "no", "fallback"]), min_size=1, max_size=7))
    fallback: Literal["none", "last", "best"] = draw(st.sampled_from(["none", "last", "best"]))
    turns: Counter[int] = Counter()

    def of(table: list[Any], number: int | None) -> Any:
        return table[(number or 0) % len(table)]

    def answer(sample: Sample) -> Completion:
        status = SampleStatus.COMPLETED
        if of(fates, sample.index) == "abort" and turns[sample.index or 0] == 0:
            status = SampleStatus.ABORTED
        turns[sample.index or 0] += 1
        return Completion("xyz", [1, 2, 3], [-0.1, -0.2, -0.3], status)

    async def fate(sample: Sample, *, rollout_id: int) -> Drop | None:
        assert current_rollout().rollout_id == rollout_id
        await anyio.sleep(of(delays, (sample.index or 0) + 1) / 3)
        context = current_rollout()
        assert (context.rollout_id, context.index, context.stage) == (rollout_id, sample.index, "fate")
        sample.reward = float((sample.index or 0) % 2)
        kind = of(fates, sample.index)
        if kind == "fail" or (kind == "resubmit" and turns[-(sample.index or 0) - 1] == 0):
            turns[-(sample.index or 0) - 1] += 1
            raise OSError(kind)
        return Drop("unlucky") if kind == "drop" else None

    def split(sample: Sample) -> list[Sample] | Sample:
        return [sample, sample.copy()] if sample.index == 2 else sample

    def judge(group: Group) -> FilterDecision:
        verdict = of(verdicts, group.index)
        return FilterDecision(verdict == "keep", verdict, verdict == "fallback", score=float(group.index % 3))

    engine = SimulatedEngine(answer, delay=lambda sample: of(delays, sample.index))
    log = Conservation()
    on_error = draw(st.sampled_from(["fail", "resubmit"]))
    stages = [
        Generate(engine, {"max_new_tokens": 3}),
        DeclaredStage(fate, on_error=on_error),
        DeclaredStage(split, fans_out=True),
        DynamicFilter(judge, fallback=fallback),
    ]
    prompts = endless(size) if draw(st.booleans()) else some(draw(st.integers(0, 12)), size)
    log.pipeline = pipeline = Pipeline(prompts, stages, spec, observers=[log], stall_after=None)
    return pipeline, engine, log, spec


def check_end(engine: SimulatedEngine, log: Conservation) -> None:
    assert engine.in_flight == 0
    assert set(log.open.values()) <= {0}


@given(st.data(), BACKENDS)
def test_streams_keep_their_promises(data: st.DataObject, backend: str) -> None:
    pipeline, engine, log, spec = stream(data.draw)
    stop, ahead = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 2))
    exhausted: list[int] = []

    async def main() -> None:
        async with pipeline:
            try:
                async for batch in pipeline.rollouts(stop=stop, ahead=ahead):
                    indices = [group.index for group in batch.groups]
                    assert len(indices) == spec.groups or (
                        spec.on_exhausted == "partial" and len(indices) < spec.groups
                    )
                    assert indices == sorted(indices)
                    for sample in batch.samples:
                        assert sample.response_length == 3
                        assert len(sample.tokens) == len(sample.rollout_log_probs or ()) == 3
                        assert sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
                    assert batch.summary.kept == len(indices)
                    assert batch.summary.rounds <= spec.max_rounds
                    for group in batch.groups:
                        assert len(group) >= (spec.min_group_size or pipeline.prompts.group_size)
            except RolloutExhausted as error:
                exhausted.append(error.summary.kept)

    anyio.run(main, **virtual_time(backend))
    assert all(kept < spec.groups for kept in exhausted)
    assert spec.on_exhausted != "partial" or not any(exhausted)
    check_end(engine, log)


@given(st.data(), BACKENDS, st.floats(0.0, 12.0))
def test_leaving_at_any_moment_leaves_nothing_behind(data: st.DataObject, backend: str, moment: float) -> None:
    pipeline, engine, log, _ = stream(data.draw)

    async def main() -> None:
        with anyio.move_on_after(moment):
            async with pipeline:
                try:
                    async for _ in pipeline.rollouts(stop=3, ahead=1):
                        await anyio.sleep(1.0)
                except RolloutExhausted:
                    pass

    anyio.run(main, **virtual_time(backend))
    check_end(engine, log)


@given(st.data(), BACKENDS, st.integers(0, 60))
def test_cancelling_at_any_await_leaves_nothing_behind(data: st.DataObject, backend: str, awaits: int) -> None:
    pipeline, engine, log, _ = stream(data.draw)

    async def main() -> None:
        async with anyio.create_task_group() as task_group:

            async def consume() -> None:
                async with pipeline:
                    try:
                        async for _ in pipeline.rollouts(stop=3, ahead=1):
                            pass
                    except RolloutExhausted:
                        pass

            task_group.start_soon(consume)
            for _ in range(awaits):
                await anyio.lowlevel.checkpoint()
            task_group.cancel_scope.cancel()

    anyio.run(main, **virtual_time(backend))
    check_end(engine, log)


def slime(target: int, over: int, verdicts: tuple[str, ...], delays: list[float]) -> tuple[list[int], list[int]]:
    """The seed's loop, line by line: what it keeps and what it drops."""
    now, remaining, submitted = 0.0, 0, 0
    kept: list[int] = []
    dropped: list[int] = []
    running: list[tuple[float, int]] = []
    while len(kept) < target:
        while remaining < target:
            for index in range(submitted, submitted + over):
                heapq.heappush(running, (now + delays[index], index))
            submitted += over
            remaining += over
        now, index = heapq.heappop(running)
        verdict = verdicts[index] if index < len(verdicts) else "keep"
        if verdict == "keep" or (verdict == "fallback" and remaining <= target):
            kept.append(index)
        else:
            dropped.append(index)
            remaining -= 1
    return sorted(kept), sorted(dropped)


@pytest.mark.parametrize(("target", "over"), [(1, 3), (2, 2), (2, 3), (3, 4)])
def test_the_rule_of_slime_to_the_letter(target: int, over: int) -> None:
    """Every verdict of the first four groups in every order in which they complete."""

    async def run(verdicts: tuple[str, ...], delays: list[float]) -> tuple[list[int], list[int]]:
        def judge(group: Group) -> FilterDecision:
            verdict = verdicts[group.index] if group.index < len(verdicts) else "keep"
            return FilterDecision(verdict == "keep", "no", verdict == "fallback")

        log = Log("group_ended")
        engine = SimulatedEngine(lambda s: Completion("", [], None), delay=lambda s: delays[s.group_index or 0])
        stages = [Generate(engine), lambda_reward, DynamicFilter(judge)]
        spec = BatchSpec(target, over_sampling=over, max_rounds=50)
        async with Pipeline(endless(1), stages, spec, observers=[log], stall_after=None) as pipeline:
            batch = await anext(pipeline.rollouts())
        dropped = sorted(event.group_index for event in log.events if event.outcome == "dropped")
        return [group.index for group in batch.groups], dropped

    async def main() -> None:
        for order in itertools.permutations(range(4)):
            # Distinct sums, so that no two groups complete at the same time.
            delays = [1.0 + order[index] + 2.0 ** -(index + 5) for index in range(4)]
            delays += [10.0 + index + 2.0 ** -(index % 20 + 9) for index in range(200)]
            for verdicts in itertools.product(("keep", "no", "fallback"), repeat=4):
                assert await run(verdicts, delays) == slime(target, over, verdicts, delays)

    anyio.run(main, **virtual_time("asyncio"))


def lambda_reward(sample: Sample) -> None:
    sample.reward = 1.0


@settings(max_examples=60)
@given(st.data())
def test_the_reserve_does_not_depend_on_arrival(data: st.DataObject) -> None:
    """A batch that a fallback fills is the same in whatever order the groups complete."""
    target, over, rounds = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    total = over * rounds
    scores = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=total, max_size=total))
    good = data.draw(st.sets(st.integers(0, total - 1), max_size=min(target - 1, total)))

    def judge(group: Group) -> FilterDecision:
        return FilterDecision(group.index in good, "weak", score=scores[group.index])

    def run(backend: str, delays: list[int]) -> list[int]:
        engine = SimulatedEngine(lambda s: Completion("", [], None), delay=lambda s: delays[(s.group_index or 0)])
        spec = BatchSpec(target, over_sampling=over, max_rounds=rounds, on_exhausted="partial")
        stages = [Generate(engine), lambda_reward, DynamicFilter(judge, fallback="best")]
        pipeline = Pipeline(endless(1), stages, spec, stall_after=None)

        async def main() -> list[int]:
            async with pipeline:
                batch = await anext(pipeline.rollouts())
                return [group.index for group in batch.groups]

        return anyio.run(main, **virtual_time(backend))

    orders = [data.draw(st.permutations(range(total))) for _ in range(2)]
    first = run("asyncio", orders[0])
    assert run("asyncio", orders[1]) == first
    assert run("trio", orders[1]) == first
