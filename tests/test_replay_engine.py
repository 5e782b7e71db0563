"""`ReplayEngine`: a live pipeline on recorded answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from backends.simulated import SimulatedEngine
from eventbus import BatchSpec, Completion, Pipeline, Prompts, ReplayEngine, Sample, SampleStatus, WeightSpan
from eventbus.replay import ReplayError
from eventbus.testing import virtual_time
from middleware import DynamicFilter, Generate, reward_nonzero_std, sample_stage
from tests.recorded import MemoryLog, record
from tests.streams import endless, rewarded

alternating = rewarded(lambda sample: float((sample.index or 0) % 3 > 0))


def answer(sample: Sample) -> Completion:
    length = 1 + (sample.index or 0) % 3
    tokens = [sample.index or 0] * length
    status = SampleStatus.TRUNCATED if length == 3 else SampleStatus.COMPLETED
    spans = [WeightSpan("v1", 0, length)]
    return Completion("x" * length, tokens, [-0.5] * length, status, spans, {"finish": str(status)})


def stages(engine: Any) -> list[Any]:
    return [Generate(engine), alternating, DynamicFilter(reward_nonzero_std)]


def recorded(delay: Any = 0.0, spec: BatchSpec | None = None, stop: int = 1) -> MemoryLog:
    log = MemoryLog()
    engine = SimulatedEngine(answer, delay=delay)
    record(Pipeline(endless(), stages(engine), spec or BatchSpec(2), observers=[log]), stop)
    return log


def digests(log: MemoryLog) -> list[str]:
    return [event.digest for event in log.events(("batch_assembled",))]


def replayed(engine: ReplayEngine, spec: BatchSpec, stop: int = 1, backend: str = "asyncio") -> MemoryLog:
    log = MemoryLog()
    prompts = Prompts(engine.prompts(), engine.group_size)
    record(Pipeline(prompts, stages(engine), spec, observers=[log]), stop, backend=backend)
    return log


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_run_without_its_dataset_and_engine(backend: str) -> None:
    log = recorded(stop=3)
    engine = ReplayEngine(log)
    assert engine.group_size == 2
    assert [prompt.prompt for prompt in engine.prompts(1)] == [
        event.samples[0][0].sample.prompt for event in log.events(("group_submitted",), rollout=1)
    ]
    assert digests(replayed(engine, BatchSpec(2), 3, backend)) == digests(log)
    assert engine.elsewhere == 0


def test_answers_come_in_the_recorded_order() -> None:
    log = recorded(lambda sample: float(7 - sample.index))
    order = [event.index for event in log.events(("sample_generated",))]
    assert order == [3, 2, 1, 0]
    again = replayed(ReplayEngine(log), BatchSpec(2))
    assert [event.index for event in again.events(("sample_generated",))] == order
    assert digests(again) == digests(log)


def test_an_answer_that_nobody_asks_for_holds_up_no_other() -> None:
    log = recorded(lambda sample: float(sample.index))
    engine = ReplayEngine(log)
    out = MemoryLog()
    last = [engine.prompts()[-1]]
    record(Pipeline(Prompts(last, 2), [Generate(engine), alternating], BatchSpec(1), observers=[out]))
    assert [event.index for event in out.events(("sample_generated",))] == [2, 3]


def test_what_was_stopped_waits_to_be_stopped_again() -> None:
    spec = BatchSpec(2, over_sampling=4, unfinished="cancel")
    log = recorded(lambda sample: 100.0 if sample.group_index == 3 else float(sample.index or 0), spec)
    again = replayed(ReplayEngine(log), spec)
    assert digests(again) == digests(log)
    outcomes = {event.group_index: event.outcome for event in again.events(("group_ended",))}
    assert outcomes[3] == "cancelled"


def test_a_request_that_is_never_stopped_again_is_an_error_in_the_end() -> None:
    log = recorded(lambda sample: 100.0 if sample.group_index == 3 else 0.0, BatchSpec(2, over_sampling=4))
    engine = ReplayEngine(log)
    prompts = [prompt for prompt in engine.prompts() if prompt.group_index == 3]
    with pytest.raises(ExceptionGroup) as caught:
        record(Pipeline(Prompts(prompts, 2), [Generate(engine)], BatchSpec(1, max_failures=0)))
    assert "had stopped this before the engine answered" in str(caught.value.exceptions[0])


def test_what_was_never_generated_is_an_error_that_says_so() -> None:
    engine = ReplayEngine(recorded())
    with pytest.raises(ExceptionGroup) as caught:
        record(Pipeline(Prompts(["new"] * 9, 9), [Generate(engine)], BatchSpec(1, max_failures=0)))
    assert isinstance(caught.value.exceptions[0], ReplayError)
    assert "rollout 0, group 0, sample 2: this was never generated" in str(caught.value.exceptions[0])


def test_another_rollout_may_have_the_answer() -> None:
    log = recorded(stop=2)
    engine = ReplayEngine(log)
    record(Pipeline(Prompts(engine.prompts(0), 2), [Generate(engine)], BatchSpec(1)), stop=6, start=5)
    assert engine.elsewhere == 2


def test_several_attempts_answer_in_their_order() -> None:
    calls: list[int] = []

    def moody(sample: Sample) -> Completion:
        calls.append(sample.index or 0)
        return Completion(str(len(calls)), [len(calls)], [-0.5])

    def picky(sample: Sample) -> None:
        if sample.response in ("1", "2"):
            raise ValueError("again")

    again = sample_stage(picky, on_error="resubmit")
    log = MemoryLog()
    record(Pipeline(endless(1), [Generate(SimulatedEngine(moody)), again], BatchSpec(1), observers=[log]))
    engine = ReplayEngine(log)
    out = MemoryLog()
    pipeline = Pipeline(Prompts(engine.prompts(), 1), [Generate(engine), again], BatchSpec(1), observers=[out])
    [batch] = record(pipeline)
    assert batch.samples[0].response == "3"
    with pytest.raises(ExceptionGroup) as caught:
        pipeline = Pipeline(Prompts(engine.prompts(), 1), [Generate(engine)], BatchSpec(1, max_failures=0))
        record(pipeline)
    assert "asked 4 times, and the run was answered 3 times" in str(caught.value.exceptions[0])


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_finite_speed_waits_the_recorded_seconds(backend: str) -> None:
    engine = ReplayEngine(recorded(delay=lambda sample: 3.0 + sample.index), speed=0.5)
    ends: list[float] = []

    def note(sample: Sample) -> None:
        ends.append(anyio.current_time())

    async def main() -> float:
        start = anyio.current_time()
        prompts = Prompts(engine.prompts(), 2)
        async with Pipeline(prompts, [Generate(engine), note], BatchSpec(2)) as pipeline:
            async for _ in pipeline.rollouts(stop=1):
                pass
        return start

    start = anyio.run(main, **virtual_time(backend))
    assert [end - start for end in ends] == pytest.approx([6.0, 8.0, 10.0, 12.0])


@pytest.mark.parametrize("speed", [0, -1.0, float("nan")])
def test_the_speed_is_more_than_nothing(speed: float) -> None:
    with pytest.raises(ValueError, match="how many times as fast"):
        ReplayEngine(MemoryLog(), speed)


def test_a_prompt_with_other_tokens_is_not_answered() -> None:
    def tokenize(tokens: list[int]) -> Any:
        def tokens_of(sample: Sample) -> None:
            sample.tokens = tokens  # type: ignore[assignment]

        return tokens_of

    log = MemoryLog()
    record(Pipeline(endless(), [tokenize([1, 2]), Generate(SimulatedEngine(answer))], BatchSpec(1), observers=[log]))
    engine = ReplayEngine(log)
    [batch] = record(Pipeline(Prompts(engine.prompts(), 2), [Generate(engine)], BatchSpec(1)))
    assert list(batch.samples[0].tokens[:2]) == [1, 2]
    engine = ReplayEngine(log)
    with pytest.raises(ExceptionGroup) as caught:
        record(Pipeline(Prompts(engine.prompts(), 2), [tokenize([9]), Generate(engine)], BatchSpec(1, max_failures=0)))
    assert "other tokens than those that the engine was asked with" in str(caught.value.exceptions[0])


def test_it_is_asked_inside_of_a_pipeline() -> None:
    engine = ReplayEngine(recorded())

    async def main() -> None:
        await engine.generate(Sample(prompt="x"), {})

    with pytest.raises(LookupError, match="inside a stage"):
        anyio.run(main)


def test_replay_imports_neither_engines_nor_tokenizers() -> None:
    heavy = ("torch", "numpy", "sglang", "transformers", "tokenizers", "httpx")
    code = f"import sys, eventbus.replay; print(*(name for name in {heavy} if name in sys.modules))"
    root = Path(__file__).parent.parent
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
