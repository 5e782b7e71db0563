"""The programs that users write, as they write them; a simulated engine or judge stands where theirs is real."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import pytest

from backends.simulated import SimulatedEngine
from eventbus import (
    Batch,
    BatchSpec,
    Completion,
    Drop,
    Group,
    JsonlPrompts,
    LogReader,
    Pipeline,
    Prompts,
    Replay,
    Sample,
    SampleStatus,
    TrainResult,
)
from eventbus.cli import app
from eventbus.testing import run_stage, virtual_time
from middleware import (
    DynamicFilter,
    FilterDecision,
    Generate,
    GroupAdvantage,
    Progress,
    Recorder,
    limit,
    retry,
    reward_nonzero_std,
    sample_stage,
    timeout,
)

Capture: TypeAlias = pytest.CaptureFixture[str]
BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


class JudgeClient:
    async def score(self, prompt: Any, response: str) -> float:
        await anyio.sleep(1.0)
        return float(response == "4")


judge_client = JudgeClient()


def repetition(text: str) -> float:
    return 1.0 - len(set(text)) / len(text) if text else 0.0


def tag_source(sample: Sample, *, rollout_id: int) -> None:  # changed in place
    sample.metadata["rollout"] = rollout_id


async def ask_judge(sample: Sample) -> Sample:  # async, returns the sample
    sample.reward = await judge_client.score(sample.prompt, sample.response)
    return sample


def no_loops(sample: Sample) -> Drop | None:  # leaves the stream, counted
    return Drop("repetition") if repetition(sample.response) > 0.5 else None


def turns_of(sample: Sample) -> list[Sample]:
    return [sample, sample.copy()]


def split_turns(sample: Sample) -> list[Sample]:  # fans out: one execution, several training samples
    return [turn for turn in turns_of(sample)]  # noqa: C416


async def timed(sample: Sample, call_next):  # type: ignore[no-untyped-def]  # wraps everything after it
    start = anyio.current_time()
    sample = await call_next(sample)
    sample.metadata["seconds"] = anyio.current_time() - start
    return sample


def mixed(group: Group) -> FilterDecision:
    rate = sum(group.rewards()) / len(group)
    return FilterDecision(keep=0.1 < rate < 0.9, reason=f"rate_{rate:.1f}", score=-abs(rate - 0.5))


class Trainer:
    async def train(self, batch: Batch) -> TrainResult:
        await anyio.sleep(5.0)
        return TrainResult(metrics={"loss": 0.1 * batch.rollout_id}, weight_version=str(batch.rollout_id + 1))


trainer = Trainer()


def answer(sample: Sample) -> Completion:
    right = (sample.index or 0) % 3 != 0
    return Completion(text="4" if right else "5", tokens=[52 if right else 53], log_probs=[-0.1])


def prompt_file(folder: Path, lines: int = 64) -> Path:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}+2=", "answer": str(n + 2)}) + "\n" for n in range(lines)))
    return path


@BACKENDS
def test_a_stage_is_tested_without_an_engine(backend: str) -> None:
    async def main() -> None:
        assert (await run_stage(tag_source, Sample(prompt="2+2="), rollout_id=7)).metadata == {"rollout": 7}

    anyio.run(main, backend=backend)


@BACKENDS
def test_embed_in_an_async_loop(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = SimulatedEngine(answer, delay=lambda sample: 2.0 * (sample.index or 0) % 7)
    pipeline = Pipeline(
        prompts=JsonlPrompts(
            str(prompt_file(tmp_path)), group_size=8, prompt_key="question", label_key="answer", seed=0
        ),
        stages=[
            Generate(engine, sampling={"temperature": 1.0, "max_new_tokens": 1024}),
            timed,
            tag_source,
            limit(timeout(ask_judge, 30), 64),
            no_loops,
            split_turns,
            DynamicFilter(reward_nonzero_std, fallback="last"),
            GroupAdvantage(),
        ],
        batch=BatchSpec(groups=4, over_sampling=6, max_rounds=4),
        observers=[Recorder(tmp_path / "run.mcap"), Progress()],
    )  # building it opens nothing
    assert not (tmp_path / "run.mcap").exists()
    seen: list[Batch] = []

    async def main() -> None:
        async with pipeline:
            async for batch in pipeline.rollouts(start=0, stop=5):
                result = await trainer.train(batch)
                batch.trained(result)  # or just ask for the next batch
                print(batch.rollout_id, result.metrics["loss"], batch.summary)
                seen.append(batch)

    anyio.run(main, **virtual_time(backend))
    assert [batch.rollout_id for batch in seen] == [0, 1, 2, 3, 4]
    for batch in seen:
        assert len(batch) == 4
        for sample in batch.samples:
            assert sample.metadata["rollout"] == batch.rollout_id
            assert sample.metadata["seconds"] >= 1.0
            assert sample.train_metadata is not None
            assert "advantage" in sample.train_metadata
    assert "rollout 4: kept 4/4" in capsys.readouterr().out


@BACKENDS
def test_wrapped_stages(backend: str) -> None:
    tries: list[int | None] = []

    async def shaky(sample: Sample) -> Sample:
        tries.append(sample.index)
        if tries.count(sample.index) < 3:
            raise OSError("reset")
        sample.reward = 1.0
        return sample

    stages = [
        Generate(SimulatedEngine(answer)),
        retry(shaky, attempts=3, on=(OSError,)),
        sample_stage(ask_judge, name="judge", external=True, on_error="resubmit"),
    ]
    pipeline = Pipeline(Prompts(["2+2="], group_size=2), stages, BatchSpec(groups=1))

    async def main() -> None:
        async with pipeline:
            async for batch in pipeline.rollouts():
                assert len(batch.samples) == 2

    anyio.run(main, **virtual_time(backend))
    assert sorted(index or 0 for index in tries) == [0, 0, 0, 1, 1, 1]


@BACKENDS
def test_the_three_filters(backend: str) -> None:
    async def kept(judge: Any) -> list[int]:
        def reward(sample: Sample) -> None:
            sample.reward = float((sample.group_index or 0) % 2 and (sample.index or 0) % 2)

        engine = SimulatedEngine(answer, delay=lambda sample: float(sample.group_index or 0))
        prompts = Prompts((f"prompt {n}" for n in range(100)), group_size=4)
        pipeline = Pipeline(
            prompts, [Generate(engine), reward, judge], BatchSpec(groups=4, over_sampling=6, max_rounds=1)
        )
        async with pipeline:
            return [group.index for group in (await anext(pipeline.rollouts())).groups]

    async def main() -> None:
        assert await kept(DynamicFilter(reward_nonzero_std, fallback="last")) == [1, 3, 4, 5]
        assert await kept(DynamicFilter(mixed, fallback="best")) == [0, 1, 3, 5]

    anyio.run(main, **virtual_time(backend))


@BACKENDS
def test_evaluation_beside_training_and_events(backend: str) -> None:
    judged: list[bool] = []

    async def main() -> None:
        engine = SimulatedEngine(answer, delay=1.0)
        prompts = Prompts((f"prompt {n}" for n in range(1000)), group_size=4)
        pipeline = Pipeline(
            prompts, [Generate(engine), ask_judge, DynamicFilter(reward_nonzero_std)], BatchSpec(groups=2)
        )
        async with pipeline, anyio.create_task_group() as task_group:

            async def watch() -> None:
                async for event in pipeline.events(kinds=("group_judged",)):
                    judged.append(event.verdict.kept)  # type: ignore[union-attr]

            async def train() -> None:
                async for batch in pipeline.rollouts(stop=3):
                    await trainer.train(batch)

            task_group.start_soon(watch)
            task_group.start_soon(train)
            eval_prompts = Prompts(["2+2=", "3+3="], group_size=1)
            report = await pipeline.evaluate(eval_prompts, rollout_id=100, sampling={"temperature": 0.0})
            assert report.rollout_id == 100
            assert len(report.groups) == 2
            assert report.mean_reward() == 0.5
            await anyio.sleep(100)
            task_group.cancel_scope.cancel()

    anyio.run(main, **virtual_time(backend))
    assert judged.count(True) == 6


@BACKENDS
def test_all_of_it_in_virtual_time(backend: str) -> None:
    done: list[float] = []
    engine = SimulatedEngine(
        lambda sample: Completion(text="4", tokens=[52], log_probs=[-0.1], status=SampleStatus.TRUNCATED),
        delay=lambda sample: 2.0 * (sample.index or 0),
    )

    async def main() -> None:
        prompts = Prompts((f"prompt {n}" for n in range(10_000)), group_size=1)
        async with Pipeline(prompts, [Generate(engine)], BatchSpec(groups=60)) as pipeline:
            async for batch in pipeline.rollouts(stop=2):
                assert batch.samples[0].status is SampleStatus.TRUNCATED
                done.append(anyio.current_time())

    anyio.run(main, **virtual_time(backend))
    assert done == [118.0, 118.0 + 238.0]


def test_a_synchronous_script(tmp_path: Path) -> None:
    losses = []
    prompts = JsonlPrompts(prompt_file(tmp_path), group_size=2, prompt_key="question", label_key="answer")
    pipeline = Pipeline(prompts, [Generate(SimulatedEngine(answer))], BatchSpec(groups=2))

    class Quick:
        async def train(self, batch: Batch) -> TrainResult:
            return TrainResult(metrics={"loss": float(batch.rollout_id)})

    with pipeline.sync() as stream:
        for batch in stream.rollouts(stop=3):
            losses.append(stream.call(Quick().train, batch).metrics["loss"])
    assert losses == [0.0, 1.0, 2.0]


@BACKENDS
def test_debug_a_recorded_run(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    pipeline = Pipeline(
        Prompts((f"{n}+2=" for n in itertools.count()), group_size=4),
        [
            Generate(SimulatedEngine(answer)),
            sample_stage(ask_judge, name="judge", external=True, on_error="resubmit"),
            DynamicFilter(reward_nonzero_std, fallback="last"),
        ],
        BatchSpec(groups=2, over_sampling=4),
        observers=[Recorder("run.mcap")],
    )

    async def main() -> None:
        async with pipeline:
            async for batch in pipeline.rollouts(start=136, stop=139):
                await trainer.train(batch)

    anyio.run(main, **virtual_time(backend))

    def stricter(group: Group) -> FilterDecision:
        return FilterDecision(keep=sum(group.rewards()) > 2, reason="too_hard")

    log = LogReader("run.mcap")
    for group in log.rollout(137).groups():
        assert group.verdict is not None
        print(group.index, group.rewards(), group.verdict.kept, group.verdict.reason)
    report = Replay(log).what_if({"DynamicFilter": DynamicFilter(stricter, fallback="last")}, rollouts=[137])
    print(report.added, report.removed, report.reasons)
    assert "too_hard" in str(report.reasons)

    for arguments in (
        ["log", "info", "run.mcap"],
        ["log", "why", "run.mcap", "sample:20"],
        ["log", "check", "run.mcap"],
        ["replay", "run.mcap", "--verify"],
    ):
        with pytest.raises(SystemExit) as ended:
            app(arguments)
        assert ended.value.code in (None, 0), capsys.readouterr()
