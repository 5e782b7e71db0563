"""The engine against a scripted worker, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from ssl import Purpose, create_default_context
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import pytest_asyncio
import trustme

from backends.sglang import (
    RequestRefused,
    SGLangEngine,
    SGLangRouter,
    WorkersUnavailable,
    attempts,
    fleet,
    model,
)
from backends.sglang.reply import ReplyError
from backends.sglang.request import sibling_seed
from backends.sglang.response import Response
from backends.sglang.router import RouterError, lost_by_router
from eventbus import (
    Batch,
    BatchSpec,
    Completion,
    JsonlPrompts,
    LogReader,
    Pipeline,
    Prompts,
    Replay,
    Sample,
    SampleStatus,
    TrainResult,
    WeightSpan,
)
from eventbus.config import load_plan
from eventbus.events import AttemptEnded
from eventbus.log import inspect
from eventbus.log.inspect.show import why_lines
from eventbus.testing import run_stage
from middleware import (
    DynamicFilter,
    Generate,
    GroupAdvantage,
    Recorder,
    Tokenize,
    limit,
    reward_nonzero_std,
    timeout,
)
from tests.sglang_fake import (
    CutShort,
    Edit,
    FakeRouter,
    FakeWorker,
    LoseReply,
    Reset,
    Status,
    expected,
    log_prob,
    text_of,
)
from tests.streams import Log

pytestmark = pytest.mark.asyncio

PROMPT = [5, 6, 7]
LENGTH = 8
SAMPLING = {"max_new_tokens": LENGTH, "ignore_eos": True}
ANSWER = expected(PROMPT, LENGTH)
BOTH = pytest.mark.parametrize("stream", [False, True])


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    async with FakeWorker() as fake:
        yield fake


@pytest_asyncio.fixture
async def two() -> AsyncIterator[tuple[FakeWorker, FakeWorker]]:
    async with FakeWorker() as first, FakeWorker() as second:
        yield first, second


def engine_of(*workers: FakeWorker, **options: Any) -> SGLangEngine:
    return SGLangEngine(urls=[worker.url for worker in workers], **{"backoff": 1e-4, "vocabulary": 512, **options})


def sample_of(**fields: Any) -> Sample:
    return Sample(**{"index": 3, "group_index": 0, "rollout_id": 3, "tokens": PROMPT, **fields})


def check(completion: Completion, answer: list[int] = ANSWER) -> None:
    assert completion.tokens == answer
    assert completion.log_probs == [log_prob(token) for token in answer]
    assert completion.text == text_of(answer)
    assert completion.status is SampleStatus.TRUNCATED


async def started(worker: FakeWorker, tokens: int = 0, requests: int = 1) -> None:
    await worker.until(
        lambda: len(worker.running) == requests and all(len(r.tokens) >= tokens for r in worker.running.values())
    )


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.Timeout]:
    """Of the attempts, in order. None runs out by itself: `run_out` is called when the worker is where it should be."""
    made: list[asyncio.Timeout] = []

    def timeout(seconds: float | None) -> asyncio.Timeout:
        made.append(limit := asyncio.timeout(None))
        return limit

    monkeypatch.setattr(attempts, "asyncio", SimpleNamespace(timeout=timeout))
    return made


def run_out(limit: asyncio.Timeout) -> None:
    limit.reschedule(asyncio.get_running_loop().time())


def more_tokens(count: int) -> dict[str, Any]:
    """meta_info of a longer response than was asked for."""
    entries = [[-1.0, 9, None]] * count
    counts = {"completion_tokens": count, "output_token_logprobs_length": count}
    return {"output_token_logprobs": entries, "weight_versions": None, **counts}


# What is asked and answered


@BOTH
async def test_generates(worker: FakeWorker, stream: bool) -> None:
    async with engine_of(worker, stream=stream) as engine:
        completion = await engine.generate(sample_of(), SAMPLING)
    check(completion)
    assert completion.weight_versions == [WeightSpan("default", 0, LENGTH)]
    assert completion.meta["finish_reason"] == {"type": "length", "length": LENGTH}
    assert completion.meta["num_retractions"] == 0
    assert "failed_attempts" not in completion.meta
    [body] = worker.bodies()
    assert body["input_ids"] == PROMPT
    assert body["sampling_params"] == SAMPLING
    assert body["return_logprob"] is True


@BOTH
async def test_a_response_that_ends_by_itself_is_completed(worker: FakeWorker, stream: bool) -> None:
    async with engine_of(worker, stream=stream) as engine:
        completion = await engine.generate(sample_of(), {"max_new_tokens": 50, "stop_token_ids": [ANSWER[4]]})
    assert completion.status is SampleStatus.COMPLETED
    assert completion.tokens == ANSWER[:5]


async def test_a_call_outside_of_async_with_opens_its_own_connections(worker: FakeWorker) -> None:
    engine = engine_of(worker)
    check(await engine.generate(sample_of(), SAMPLING))
    check(await engine.generate(sample_of(), SAMPLING))


async def test_it_may_be_opened_again_while_it_closes(two: tuple[FakeWorker, FakeWorker]) -> None:
    down, up = two
    await down.kill()
    engine = engine_of(down, up)
    async with engine:
        await generated(engine, 2)
        engine._fleet._look(next(iter(engine._fleet.workers)))  # that is to be ended first
        closing = asyncio.create_task(engine.__aexit__(None, None, None))
        await asyncio.sleep(0)
        await generated(engine, 2, 200)
        await closing
        await engine.__aenter__()


async def test_as_a_stage_it_fills_the_sample(worker: FakeWorker) -> None:
    async with engine_of(worker) as engine:
        sample = await run_stage(Generate(engine, SAMPLING), sample_of(), rollout_id=7)
    assert isinstance(sample, Sample)
    assert sample.tokens == PROMPT + ANSWER
    assert sample.rollout_log_probs == [log_prob(token) for token in ANSWER]
    assert sample.response_length == LENGTH
    assert sample.prefix_cache_info == {"cached_tokens": 0, "total_prompt_tokens": 3}


@BOTH
async def test_a_partial_sample_goes_on_with_the_budget_that_is_left(worker: FakeWorker, stream: bool) -> None:
    sample = sample_of(
        tokens=PROMPT + ANSWER[:3],
        response=text_of(ANSWER[:3]),
        response_length=3,
        rollout_log_probs=[log_prob(token) for token in ANSWER[:3]],
        weight_versions=[WeightSpan("old", 0, 3)],
    )
    async with engine_of(worker, stream=stream) as engine:
        await Generate(engine, SAMPLING)(sample)
    assert sample.tokens == PROMPT + ANSWER
    assert sample.response == text_of(ANSWER)
    assert sample.weight_versions == [WeightSpan("old", 0, 3), WeightSpan("default", 3, LENGTH)]
    assert worker.bodies()[0]["sampling_params"]["max_new_tokens"] == LENGTH - 3


async def test_each_sibling_has_a_seed_of_its_own_and_the_same_in_each_run(worker: FakeWorker) -> None:
    async with engine_of(worker) as engine:
        for index in (3, 4, 3):
            await engine.generate(sample_of(index=index), SAMPLING | {"sampling_seed": 11})
    seeds = [body["sampling_params"]["sampling_seed"] for body in worker.bodies()]
    assert seeds[0] == seeds[2] != seeds[1]
    assert all(0 <= seed < 1 << 31 for seed in seeds)


async def test_a_session_stays_at_its_worker_and_names_itself_to_a_router(two: tuple[FakeWorker, FakeWorker]) -> None:
    async with engine_of(*two) as engine:
        for number in range(12):
            await engine.generate(sample_of(session_id=f"s{number % 4}", rollout_id=number), SAMPLING)
    keys = [{received.headers["X-SMG-Routing-Key"] for received in worker.received} for worker in two]
    assert keys[0] | keys[1] == {"s0", "s1", "s2", "s3"}
    assert not keys[0] & keys[1]


async def test_multimodal_inputs_and_further_fields_are_sent(worker: FakeWorker) -> None:
    async with engine_of(worker, fields={"lora_path": "a"}) as engine:
        await engine.generate(sample_of(multimodal_inputs={"image_data": ["aGk="]}), SAMPLING)
        with pytest.raises(ValueError, match=r"sample 3: multimodal_inputs\['image_date'\] .* mean 'image_data'"):
            await engine.generate(sample_of(multimodal_inputs={"image_date": []}), SAMPLING)
    [body] = worker.bodies()
    assert body["image_data"] == ["aGk="]
    assert body["lora_path"] == "a"


@BOTH
async def test_kept_ids_and_routed_experts_are_put_on_the_sample(stream: bool) -> None:
    async with FakeWorker(routed_experts=True) as worker:
        engine = engine_of(worker, fields={"return_sampling_mask": True}, routed_experts=(3, 2), stream=stream)
        sample = sample_of()
        async with engine:
            completion = await engine.generate(sample, SAMPLING)
    assert sample.rollout_routed_experts.shape == (3 + LENGTH - 1, 3, 2)
    offsets, ids = sample.rollout_top_p_token_offsets, sample.rollout_top_p_token_ids
    assert len(offsets) == LENGTH + 1
    assert offsets[-1] == len(ids)
    assert [ids[offset] for offset in offsets[:-1]] == ANSWER
    assert sample.metadata["sampling_log_probs"] == [log_prob(token) / 2 for token in ANSWER]
    assert completion.log_probs == [log_prob(token) for token in ANSWER]


async def test_kept_ids_of_a_partial_sample_are_continued(worker: FakeWorker) -> None:
    async with engine_of(worker, fields={"return_sampling_mask": True}) as engine:
        whole, part = sample_of(), sample_of()
        await Generate(engine, SAMPLING)(whole)
        await Generate(engine, SAMPLING | {"max_new_tokens": 3})(part)
        part.status = SampleStatus.ABORTED
        await Generate(engine, SAMPLING)(part)
    assert part.rollout_top_p_token_ids == whole.rollout_top_p_token_ids
    assert part.rollout_top_p_token_offsets == whole.rollout_top_p_token_offsets
    assert part.metadata["sampling_log_probs"] == whole.metadata["sampling_log_probs"]
    assert part.prefix_cache_info == {"cached_tokens": 0, "total_prompt_tokens": 3 + 6}


async def test_kept_ids_of_a_broken_stream_are_continued(worker: FakeWorker) -> None:
    whole, broken = sample_of(), sample_of()
    async with engine_of(worker, stream=True, fields={"return_sampling_mask": True}) as engine:
        await Generate(engine, SAMPLING)(whole)
        worker.faults.append(Reset(after=4))
        await Generate(engine, SAMPLING)(broken)
    assert engine.wasted == 1
    assert broken.rollout_top_p_token_ids == whole.rollout_top_p_token_ids
    assert broken.rollout_top_p_token_offsets == whole.rollout_top_p_token_offsets
    assert broken.metadata["sampling_log_probs"] == whole.metadata["sampling_log_probs"]


async def test_what_was_asked_for_and_does_not_come_is_an_error(worker: FakeWorker) -> None:
    def without_mask(reply: dict[str, Any]) -> dict[str, Any]:
        del reply["meta_info"]["output_token_sampling_mask"]
        return reply

    worker.faults.append(Edit(without_mask))
    async with engine_of(worker, attempts=1, fields={"return_sampling_mask": True}) as engine:
        with pytest.raises(WorkersUnavailable, match="start the worker with --sampling-mask-max-tokens"):
            await engine.generate(sample_of(), SAMPLING)
    async with engine_of(worker, attempts=1, routed_experts=(3, 2)) as engine:
        with pytest.raises(WorkersUnavailable, match="start the worker with --enable-return-routed-experts"):
            await engine.generate(sample_of(), SAMPLING)


# What is wrong before it is sent


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"max_tokens": 4}, "sample 3: unknown sampling parameter 'max_tokens'"),
        ({"temprature": 1.0}, "did you mean 'temperature'"),
        ({"temperature": "hot"}, r"sample 3: sampling: Expected `float \| null`, got `str` - at `\$.temperature`"),
        ({"n": 2}, "n is 2: a sample has one response; use group_size"),
    ],
)
async def test_wrong_sampling_parameters_are_not_sent(
    worker: FakeWorker, sampling: dict[str, Any], message: str
) -> None:
    async with engine_of(worker) as engine:
        with pytest.raises(ValueError, match=message):
            await engine.generate(sample_of(), sampling)
    assert not worker.received


@pytest.mark.parametrize("token", [-1, 512])
async def test_a_token_id_outside_of_the_vocabulary_is_not_sent(worker: FakeWorker, token: int) -> None:
    async with engine_of(worker) as engine:
        with pytest.raises(ValueError, match=f"sample 3: the token id {token} is not in the vocabulary of 512"):
            await engine.generate(sample_of(tokens=[5, token]), SAMPLING)
        with pytest.raises(ValueError, match=r"it is tokens\[3\]"):
            await engine.generate(sample_of(tokens=[5, 6, 7, token, token]), SAMPLING)
    assert not worker.received


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (512, r"sample 3: the token id 512 is not in the vocabulary of 512: it is stop_token_ids\[1\]"),
        (-1, r"sample 3: sampling: Expected `int` >= 0 - at `\$.stop_token_ids\[1\]`"),
        (1 << 40, r"sample 3: sampling: Expected `int` <= 2147483647 - at `\$.stop_token_ids\[1\]`"),
    ],
)
async def test_a_stop_token_outside_of_the_vocabulary_is_not_sent(worker: FakeWorker, token: int, message: str) -> None:
    async with engine_of(worker) as engine:
        with pytest.raises(ValueError, match=message):
            await engine.generate(sample_of(), SAMPLING | {"min_new_tokens": 1, "stop_token_ids": [5, token]})
    assert not worker.received


def beyond(reply: dict[str, Any]) -> dict[str, Any]:
    """Its token 1 is not in the vocabulary."""
    reply["meta_info"]["output_token_logprobs"][1][1] = 512
    return reply


@BOTH
async def test_a_reply_with_a_token_outside_of_the_vocabulary_is_a_failed_attempt(
    worker: FakeWorker, stream: bool
) -> None:
    worker.faults.append(Edit(beyond))
    async with engine_of(worker, stream=stream) as engine:
        completion = await engine.generate(sample_of(), SAMPLING)
        check(completion)
        assert engine.wasted == 1
    [failed] = completion.meta["failed_attempts"]
    assert failed.endswith("the token id 512 is not in the vocabulary of 512: it is output_token_logprobs[1]")
    assert [body["input_ids"] for body in worker.bodies()] == [PROMPT] * 2
    assert not worker.crashed


async def test_a_broken_stream_with_a_token_outside_of_the_vocabulary_is_not_gone_on_from(worker: FakeWorker) -> None:
    async with engine_of(worker, stream=True) as engine:
        events = engine._fleet.client.events

        async def edited(*request: Any) -> AsyncIterator[bytes]:
            async for event in events(*request):
                reply = json.loads(event)
                yield json.dumps(beyond(reply) if len(reply["output_ids"]) > 1 else reply).encode()

        engine._fleet.client.events = edited  # type: ignore[method-assign, assignment]
        worker.faults.append(Reset(after=4))
        with pytest.raises(WorkersUnavailable, match=r"output_token_logprobs\[1\]"):
            await engine.generate(sample_of(), SAMPLING)
    assert [body["input_ids"] for body in worker.bodies()] == [PROMPT] * 8


async def test_a_vocabulary_that_is_not_known_is_said_and_nothing_is_checked(
    worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine_of(worker, vocabulary=None) as engine:
        for number in range(2):
            check(await engine.generate(sample_of(rollout_id=number), SAMPLING))
        with pytest.raises(ValueError, match="the token id -7 is not in the vocabulary of any model"):
            await engine.generate(sample_of(tokens=[-7]), SAMPLING)
    said = "the vocabulary of the workers' model fake-model is not readable here"
    assert [said in message for message in caplog.messages] == [True]


async def test_a_worker_that_did_not_say_its_model_is_asked_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 300}}')
    monkeypatch.setattr(model, "AGAIN_SECONDS", 1000.0)
    async with FakeWorker(str(tmp_path)) as worker, engine_of(worker, vocabulary=None) as engine:
        worker.refused["/model_info"] = (500, "busy")
        for number in range(2):
            check(await engine.generate(sample_of(rollout_id=number), SAMPLING))
        del worker.refused["/model_info"]
        assert worker.paths("/generate") == ["/model_info"]
        engine._model._ask_at = 0.0
        with pytest.raises(ValueError, match="the token id 300 is not in the vocabulary of 300"):
            await engine.generate(sample_of(tokens=[300]), SAMPLING)


async def test_the_vocabulary_is_read_from_the_workers_model_where_that_is_here(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    async with FakeWorker(str(tmp_path)) as worker, engine_of(worker, vocabulary=None) as engine:
        samples = [sample_of(rollout_id=n, tokens=[300]) for n in range(3)]
        calls = [engine.generate(sample, SAMPLING) for sample in samples]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert "the token id 300 is not in the vocabulary of 300" in str(error)
        assert worker.paths() == ["/model_info"]


async def test_a_sample_without_tokens_says_to_add_tokenize(worker: FakeWorker) -> None:
    async with engine_of(worker) as engine:
        with pytest.raises(ValueError, match=r"sample 3: it has no tokens: put the stage Tokenize\(name\)"):
            await engine.generate(sample_of(tokens=[]), SAMPLING)
        with pytest.raises(ValueError, match=r"tokenizer 'fake-model' is not readable here: .* Tokenize\(name\)"):
            await Generate(engine, SAMPLING)(Sample(prompt="2+2="))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give one of url, urls=.*, router= and in_process="),
        ({"url": "http://a", "urls": ["http://b"]}, "give one of"),
        ({"url": "localhost:30000"}, "'localhost:30000' is no address"),
        ({"url": "http://a", "attempts": 0}, "attempts is 0, it must be at least 1"),
        ({"url": "http://a", "timeout": 0}, "timeout is 0, it must be more than 0"),
        ({"url": "http://a", "backoff": 0}, "backoff is 0, it must be more than 0"),
        ({"url": "http://a", "fields": {"rid": "x"}}, "'rid' is no field to set"),
        ({"url": "http://a", "fields": {"lora_pth": "x"}}, "did you mean 'lora_path'"),
    ],
)
async def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SGLangEngine(**options)


@pytest.mark.filterwarnings("ignore")
def test_it_says_that_it_runs_on_asyncio() -> None:
    async def main() -> None:
        await SGLangEngine("http://127.0.0.1:1").generate(sample_of(), SAMPLING)

    with pytest.raises(RuntimeError, match="SGLangEngine runs on asyncio"):
        anyio.run(main, backend="trio")


async def test_a_configuration_names_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        """
        [prompts]
        path = "train.jsonl"
        group_size = 1
        [engine]
        use = "backends.sglang:SGLangEngine"
        urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
        fields = { lora_path = "a" }
        timeout = 60
        [batch]
        groups = 1
        [[stages]]
        use = "middleware:Tokenize"
        tokenizer = "Qwen/Qwen3-0.6B"
        [[stages]]
        use = "middleware:Generate"
        """
    )
    (tmp_path / "train.jsonl").write_text('{"prompt": "2+2="}\n')
    generate: Any = load_plan(tmp_path / "run.toml").pipeline.stages[1].function
    assert isinstance(generate.engine, SGLangEngine)
    assert generate.engine._attempts.timeout == 60


async def test_a_configuration_names_a_router(tmp_path: Path) -> None:
    text = """
        [prompts]
        path = "train.jsonl"
        group_size = 1
        [engine]
        use = "backends.sglang:SGLangEngine"
        router = { use = "backends.sglang:SGLangRouter", url = "http://127.0.0.1:1" }
        [batch]
        groups = 1
        [[stages]]
        use = "middleware:Generate"
        """
    (tmp_path / "train.jsonl").write_text('{"prompt": "2+2="}\n')
    for router in ('{ use = "backends.sglang:SGLangRouter", url = "http://127.0.0.1:1" }', '"http://127.0.0.1:1"'):
        (tmp_path / "run.toml").write_text(re.sub("router = .*", f"router = {router}", text))
        routed: Any = load_plan(tmp_path / "run.toml").pipeline.stages[0].function
        assert routed.engine._fleet.router.url == "http://127.0.0.1:1"


async def test_400_is_never_retried_and_shows_the_servers_words(worker: FakeWorker) -> None:
    async with engine_of(worker, vocabulary=None) as engine:
        with pytest.raises(RequestRefused, match=r"sample 3: .*/generate answered 400: The input \(4097 tokens\) is"):
            await engine.generate(sample_of(tokens=[5] * 4097), SAMPLING)
    assert len(worker.bodies()) == 1


async def test_answers_that_are_nested_too_deeply_are_like_others(worker: FakeWorker) -> None:
    deep = '{"error": ' + "[" * 100_000
    worker.refused["/model_info"] = (200, deep)
    worker.refused["/generate"] = (400, deep)
    async with engine_of(worker, vocabulary=None) as engine:
        with pytest.raises(RequestRefused, match=r"sample 3: .*/generate answered 400: {\"error\": \[\[\["):
            await engine.generate(sample_of(), SAMPLING)
    worker.refused.clear()
    worker.faults.append(Edit(lambda reply: deep.encode()))
    async with engine_of(worker, vocabulary=None, stream=True) as engine:
        completion = await engine.generate(sample_of(), SAMPLING)
        check(completion)
        assert '/generate: b\'{"error": [[[' in completion.meta["failed_attempts"][0]


async def test_a_stream_may_bring_a_refusal(worker: FakeWorker) -> None:
    refusal = b'{"error": {"message": "no such grammar", "type": "invalid_request_error", "code": 400}}'
    worker.faults.append(Edit(lambda reply: refusal))
    async with engine_of(worker, stream=True) as engine:
        with pytest.raises(RequestRefused, match=r"sample 3: .* answered 400: no such grammar"):
            await engine.generate(sample_of(), SAMPLING)
    assert len(worker.bodies()) == 1


# Failures


@BOTH
@pytest.mark.parametrize(
    "fault",
    [
        Status(500),
        Status(503),
        Status(429),
        Reset(),
        Reset(after=3),
        LoseReply(),
        CutShort(),
        Edit(lambda reply: b"{not json"),
        Edit(lambda reply: b'{"error": {"message": "boom", "code": 500}}'),
        Edit(lambda reply: reply | {"meta_info": reply["meta_info"] | {"completion_tokens": 9}}),
        Edit(lambda reply: reply | {"meta_info": reply["meta_info"] | more_tokens(LENGTH + 1)}),
        Edit(lambda reply: reply | {"meta_info": reply["meta_info"] | {"output_token_logprobs": [[None, 4, None]]}}),
    ],
    ids=lambda fault: f"{type(fault).__name__}{fault[:1]}" if not isinstance(fault, Edit) else "Edit",
)
async def test_what_fails_once_is_asked_again_and_gives_one_reply(
    worker: FakeWorker, fault: Any, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    worker.faults.append(fault)
    async with engine_of(worker, stream=stream) as engine:
        completion = await engine.generate(sample_of(), SAMPLING)
        check(completion)
        assert engine.wasted == len(completion.meta["failed_attempts"]) == 1
        assert engine.in_flight == 0
    assert "sample 3: attempt" in caplog.text
    assert "failed, 1 of 8 in a row" in caplog.text
    rids = [body["rid"] for body in worker.bodies()]
    assert len(set(rids)) == 2  # an attempt never shares its rid with another
    assert not worker.running


async def test_what_a_broken_stream_brought_is_kept(worker: FakeWorker) -> None:
    worker.faults.append(Reset(after=3))
    async with engine_of(worker, stream=True) as engine:
        completion = await engine.generate(sample_of(), SAMPLING)
    check(completion)
    again = worker.bodies()[1]
    got = again["input_ids"][3:]
    assert got == ANSWER[: len(got)]
    assert again["sampling_params"]["max_new_tokens"] == LENGTH - len(got)


async def test_a_request_whose_reply_is_lost_is_aborted_before_it_is_sent_again(worker: FakeWorker) -> None:
    worker.allow(2)
    worker.faults.append(Reset(after=2))
    async with engine_of(worker) as engine:
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(engine.generate(sample_of(), SAMPLING))
            await worker.until(lambda: len(worker.bodies()) == 2)
            worker.allow(None)
    check(answer.result())
    first, second = (body["rid"] for body in worker.bodies())
    assert worker.paths() == ["/generate", "/abort_request", "/model_info", "/generate"]
    assert worker.bodies("/abort_request") == [{"rid": first}]
    assert first != second


@BOTH
async def test_a_slow_attempt_is_given_up_and_aborted(
    worker: FakeWorker, stream: bool, limits: list[asyncio.Timeout]
) -> None:
    worker.allow(2)
    async with engine_of(worker, timeout=7.5, stream=stream) as engine:
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(engine.generate(sample_of(), SAMPLING))
            await started(worker, 2)
            run_out(limits[0])
            await worker.until(lambda: worker.bodies("/abort_request"))
            worker.allow(None)
    check(answer.result())
    assert "no answer within timeout=7.5 s" in answer.result().meta["failed_attempts"][0]
    assert not worker.running


async def test_a_second_reply_after_a_retry_is_not_read(
    two: tuple[FakeWorker, FakeWorker], limits: list[asyncio.Timeout]
) -> None:
    """The worker that was given up answers all the same: one sample, and the other answer is waste."""
    late, prompt = two
    late.refused["/abort_request"] = (200, "")  # it is deaf
    late.allow(LENGTH - 1)
    async with engine_of(late, prompt, timeout=7.5) as engine:
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(engine.generate(sample_of(), SAMPLING))
            await started(late, LENGTH - 1)
            run_out(limits[0])
        check(completion := answer.result())
        late.allow(None)
        await late.until(lambda: late.finished)
        assert late.finished == {"length": 1}
        assert prompt.finished == {"length": 1}
        assert (engine.wasted, len(completion.meta["failed_attempts"])) == (1, 1)
        [first], [second] = late.bodies(), prompt.bodies()
        assert first["rid"] != second["rid"]
        assert late.bodies("/abort_request") == [{"rid": first["rid"]}]


@BOTH
async def test_a_killed_worker_leaves_its_requests_to_the_others(
    two: tuple[FakeWorker, FakeWorker], stream: bool
) -> None:
    first, second = two
    first.allow(4)
    second.allow(4)
    async with engine_of(first, second, stream=stream) as engine:
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(engine.generate(sample_of(rollout_id=n), SAMPLING)) for n in range(6)]
            await started(first, 4, 3)
            await started(second, 4, 3)
            await first.kill()
            second.allow(None)
    for answer in answers:
        check(answer.result())
    assert engine.wasted == 3
    assert second.finished == {"length": 6}


async def test_a_restarted_worker_is_asked_again(worker: FakeWorker) -> None:
    await worker.kill()
    async with engine_of(worker, attempts=10_000) as engine:
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(engine.generate(sample_of(), SAMPLING))
            while engine._fleet.workers.failures < 3:
                await asyncio.sleep(0)
            await worker.start()
    check(answer.result())
    assert engine.wasted == 1  # looking whether it is back costs no attempt


async def test_when_all_workers_are_down_the_error_names_the_last_failure(two: tuple[FakeWorker, FakeWorker]) -> None:
    for worker in two:
        await worker.kill()
    async with engine_of(*two, attempts=3) as engine:
        with pytest.raises(WorkersUnavailable, match=r"sample 3: 3 attempts failed; the last: .*Cannot connect"):
            await engine.generate(sample_of(), SAMPLING)
    assert isinstance(WorkersUnavailable(), OSError)  # retry(..., on=(OSError,)) and on_error see it so


async def test_the_next_attempt_goes_to_another_worker(two: tuple[FakeWorker, FakeWorker]) -> None:
    first, second = two
    first.faults.extend([Status(500)] * 8)
    async with engine_of(*two) as engine:
        for number in range(4):
            check(await engine.generate(sample_of(rollout_id=number), SAMPLING))
    assert len(second.bodies()) == 4


async def test_attempts_that_bring_new_tokens_do_not_count_as_failures_in_a_row(worker: FakeWorker) -> None:
    worker.faults.extend([Reset(after=2)] * 3)
    async with engine_of(worker, stream=True, attempts=1) as engine:
        with pytest.raises(WorkersUnavailable, match="1 attempts failed"):
            worker.faults.appendleft(Status(500))
            await engine.generate(sample_of(), SAMPLING)
        worker.faults.clear()
        worker.faults.extend([Reset(after=2)] * 3)
    async with engine_of(worker, stream=True, attempts=2) as engine:
        check(await engine.generate(sample_of(), SAMPLING))
        assert engine.wasted == 3


async def test_attempts_are_counted_in_the_context(worker: FakeWorker) -> None:
    from eventbus import current_rollout

    seen: list[int] = []

    class Watched(SGLangEngine):
        async def generate(self, sample: Sample, sampling: Any) -> Completion:
            completion = await super().generate(sample, sampling)
            seen.append(current_rollout().attempts)
            return completion

    worker.faults.extend([Status(500), Status(500)])
    async with Watched(worker.url, backoff=1e-4) as engine:
        await run_stage(Generate(engine, SAMPLING), sample_of(), rollout_id=0)
    assert seen == [3]


# Attempts as events


def asking(
    engine: SGLangEngine, log: Log, count: int = 1, *stages: Any, sampling: Any = SAMPLING, **options: Any
) -> Pipeline:
    """A pipeline that asks the engine for `count` samples."""
    return Pipeline(
        Prompts(["x"] * count, group_size=1),
        [Tokenize(lambda prompt: PROMPT), *stages, Generate(engine, sampling)],
        BatchSpec(groups=count, max_failures=0),
        observers=[log],
        **options,
    )


async def attempts_of(engine: SGLangEngine, count: int = 1, *stages: Any, **options: Any) -> list[AttemptEnded]:
    log = Log("attempt_ended")
    async with asking(engine, log, count, *stages, **options) as pipeline:
        await anext(pipeline.rollouts(start=5))
    return log.events


async def test_every_attempt_is_an_event(worker: FakeWorker) -> None:
    worker.faults.extend([Status(500, "injected"), Edit(lambda reply: b"{not json")])
    first, second, third = await attempts_of(engine_of(worker))
    for number, event in enumerate([first, second, third], start=1):
        assert (event.rollout_id, event.group_index, event.index, event.execution) == (5, 0, 0, 0)
        assert (event.stage, event.attempt, event.worker) == ("Generate", number, worker.url)
        assert event.seconds > 0
    assert [event.rid for event in (first, second, third)] == [body["rid"] for body in worker.bodies()]
    assert (first.outcome, first.error) == ("failed", f"{worker.url}/generate answered 500: injected")
    assert second.outcome == "failed"
    assert "it begins with b'{not json'" in (second.error or "")
    assert (third.outcome, third.error) == ("answered", None)
    assert [event.tokens for event in (first, second, third)] == [0, 0, LENGTH]


async def test_an_attempt_that_broke_says_what_it_brought(worker: FakeWorker) -> None:
    worker.faults.append(Reset(after=3))
    broken, answered = await attempts_of(engine_of(worker, stream=True))
    assert broken.outcome == "failed"
    assert broken.tokens + answered.tokens == LENGTH
    assert broken.tokens == LENGTH - worker.bodies()[1]["sampling_params"]["max_new_tokens"]


async def test_an_attempt_that_is_refused_is_an_event(worker: FakeWorker) -> None:
    worker.refused["/generate"] = (400, '{"error": {"message": "no such adapter"}}')
    log = Log("attempt_ended")
    with pytest.raises(ExceptionGroup):
        async with asking(engine_of(worker), log) as pipeline:
            await anext(pipeline.rollouts())
    [event] = log.events
    assert event.outcome == "failed"
    assert "answered 400: no such adapter" in event.error


async def test_an_attempt_that_cannot_be_sent_is_an_event(worker: FakeWorker) -> None:
    class Adds:
        sampling_seed = 7

    log, sampling = Log("attempt_ended"), SAMPLING | {"custom_params": {"a": Adds()}}
    with pytest.raises(ExceptionGroup):
        async with asking(engine_of(worker), log, sampling=sampling) as pipeline:
            await anext(pipeline.rollouts())
    [event] = log.events
    assert event.outcome == "failed"
    assert "the request has no JSON form" in event.error
    assert not worker.bodies()


async def test_attempts_that_are_given_up_are_events(worker: FakeWorker) -> None:
    """By a time-out, and by the rollout that has enough."""
    worker.allow(3)
    log = Log("attempt_ended")
    pipeline = Pipeline(
        Prompts((f"{n}" for n in range(2)), group_size=1),
        [Tokenize(lambda prompt: [5, 6, 10 + int(prompt)]), timeout(Generate(engine_of(worker), SAMPLING), 1000.0)],
        BatchSpec(groups=1, over_sampling=2, unfinished="cancel"),
        observers=[log],
    )
    async with pipeline:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pipeline.rollouts(stop=1).__anext__())
            await started(worker, 3, 2)
            worker.slow.add((5, 6, 11))
            worker.changed()
    answered, aborted = log.events
    assert (answered.index, answered.outcome) == (0, "answered")
    assert (aborted.index, aborted.outcome, aborted.error, aborted.tokens) == (1, "aborted", None, 3)


async def test_an_attempt_that_is_cancelled_is_an_event(worker: FakeWorker) -> None:
    worker.allow(3)
    log = Log("attempt_ended")
    async with asking(engine_of(worker), log) as pipeline:
        task = asyncio.create_task(pipeline.rollouts(stop=1).__anext__())
        await started(worker, 3)
    with pytest.raises(RuntimeError, match="its pipeline was left"):
        await task
    [event] = log.events
    assert (event.outcome, event.error, event.tokens) == ("aborted", "cancelled", 0)


async def test_what_pauses_by_aborting_shows_in_the_attempts(worker: FakeWorker) -> None:
    worker.allow(3)
    engine = engine_of(worker)
    async with engine, asyncio.TaskGroup() as tasks:
        attempts = tasks.create_task(attempts_of(engine))
        await started(worker, 3)
        await engine.pause("abort")
        await engine.resume()
        worker.allow(None)
    aborted, answered = attempts.result()
    assert (aborted.outcome, aborted.tokens) == ("aborted", 3)
    assert aborted.error == f"{worker.url} aborted the request, and nobody here had asked for it"
    assert (answered.outcome, answered.tokens) == ("answered", LENGTH - 3)


async def test_a_recorded_run_tells_its_attempts(two: tuple[FakeWorker, FakeWorker], tmp_path: Path) -> None:
    """kill -9 of a worker in mid-rollout: the log shows the retries, keeps all its rules, and can be replayed."""
    for worker in two:
        worker.allow(4)
    engine = engine_of(*two)
    pipeline = Pipeline(
        Prompts((f"{n}" for n in range(4)), group_size=2),
        [Tokenize(lambda prompt: [5, 6, 10 + int(prompt)]), Generate(engine, SAMPLING)],
        BatchSpec(groups=4),
        observers=[Recorder(tmp_path / "run.mcap")],
    )
    async with pipeline, asyncio.TaskGroup() as tasks:
        batch = tasks.create_task(pipeline.rollouts(stop=1).__anext__())
        for worker in two:
            await started(worker, 4, 4)
        await two[0].kill()
        two[1].allow(None)
    with LogReader(tmp_path / "run.mcap") as log:
        ended = [event for event in log.events("attempt_ended") if isinstance(event, AttemptEnded)]
        failed = [event for event in ended if event.outcome == "failed"]
        assert len(failed) == 4
        assert inspect.check(log.events(), samples=log.samples).ok
        told = "\n".join(line.plain for line in why_lines(inspect.why(log, f"sample:{failed[0].index}")))
        assert "Generate         attempt 1 failed after" in told
        assert f"worker: {two[0].url}" in told
        assert "attempt 2 answered after" in told
        report = inspect.waste(log.events())
        assert (report.attempts[two[0].url][0], report.tokens_lost) == (4, 0)
        assert report.used.tokens == sum(sample.response_length for sample in batch.result().samples)
        assert Replay(log, pipeline.stages).verify().same


# Abort and cancellation


@BOTH
async def test_abort_gives_what_there_is(worker: FakeWorker, stream: bool) -> None:
    worker.allow(3)
    async with engine_of(worker, stream=stream) as engine:
        async with asyncio.TaskGroup() as tasks:
            one, other = sample_of(), sample_of(rollout_id=4)
            aborted = tasks.create_task(engine.generate(one, SAMPLING))
            goes_on = tasks.create_task(engine.generate(other, SAMPLING))
            await started(worker, 3, 2)
            await engine.abort([one])
            assert engine.in_flight == 1
            worker.allow(None)
    assert aborted.result().status is SampleStatus.ABORTED
    assert aborted.result().tokens == ANSWER[:3]
    assert aborted.result().weight_versions == [WeightSpan("default", 0, 3)]
    check(goes_on.result())


async def test_abort_of_what_is_between_two_attempts_ends_it(worker: FakeWorker) -> None:
    await worker.kill()
    async with engine_of(worker, backoff=1000.0) as engine:
        async with asyncio.TaskGroup() as tasks:
            sample = sample_of()
            answer = tasks.create_task(engine.generate(sample, SAMPLING))
            while engine.wasted < 1:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            await engine.abort([sample])
    assert answer.result().status is SampleStatus.ABORTED
    assert answer.result().tokens == []


async def test_abort_when_the_worker_dies_meanwhile_ends_it(worker: FakeWorker) -> None:
    worker.allow(3)
    worker.refused["/abort_request"] = (200, "")  # it is deaf
    async with engine_of(worker, stream=True, backoff=1000.0) as engine:
        async with asyncio.TaskGroup() as tasks:
            sample = sample_of()
            answer = tasks.create_task(engine.generate(sample, SAMPLING))
            await started(worker, 3)
            abort = tasks.create_task(engine.abort([sample]))
            while not worker.bodies("/abort_request"):
                await asyncio.sleep(0)
            await worker.kill()
            await abort
    assert answer.result().status is SampleStatus.ABORTED
    assert answer.result().tokens == ANSWER[: len(answer.result().tokens)]


async def test_an_abort_that_is_answered_404_is_an_error_that_says_why(worker: FakeWorker) -> None:
    worker.allow(3)
    worker.refused["/abort_request"] = (404, "")
    async with engine_of(worker) as engine:
        async with asyncio.TaskGroup() as tasks:
            sample = sample_of()
            answer = tasks.create_task(engine.generate(sample, SAMPLING))
            await started(worker, 3)
            with pytest.raises(RequestRefused, match=r"is this a router. give it as router="):
                await engine.abort([sample])
            worker.allow(None)
    assert answer.result().tokens == ANSWER


async def test_what_the_server_aborts_unasked_goes_on_from_there(worker: FakeWorker) -> None:
    worker.allow(3)
    async with engine_of(worker) as engine:
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(engine.generate(sample_of(), SAMPLING))
            await started(worker, 3)
            await engine.pause("abort")
            await worker.until(lambda: len(worker.bodies()) == 2)
            worker.weight_version = "new"
            worker.allow(None)
            await engine.resume()
    completion = answer.result()
    check(completion)
    assert worker.bodies()[1]["input_ids"] == PROMPT + ANSWER[:3]


async def step_by_step(call: Callable[[], Awaitable[Any]], steps: int) -> bool:
    """Run `call` for so many turns of the loop, then cancel it. True: it was done before."""
    task = asyncio.ensure_future(call())
    for _ in range(steps):
        await asyncio.sleep(0)
        if task.done():
            break
    done = task.done()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return done


@BOTH
async def test_cancelled_at_any_await_it_leaves_no_request_behind(worker: FakeWorker, stream: bool) -> None:
    worker.allow(3)
    async with engine_of(worker, stream=stream) as engine:
        for steps in range(60):
            sample = sample_of()
            await step_by_step(lambda: engine.generate(sample, SAMPLING), steps)  # noqa: B023
            assert engine.in_flight == 0
            assert sample.tokens == PROMPT
            await worker.until(lambda: not worker.running)
        rids = {body["rid"] for body in worker.bodies()}
        assert rids
        assert rids <= {body["rid"] for body in worker.bodies("/abort_request")}


async def test_one_execution_is_generated_once_at_a_time(worker: FakeWorker) -> None:
    worker.allow(0)
    async with engine_of(worker) as engine:
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(engine.generate(sample_of(), SAMPLING))
            await started(worker)
            with pytest.raises(ValueError, match="the execution 3 is being generated already"):
                await engine.generate(sample_of(), SAMPLING)
            worker.allow(None)
    check(answer.result())


# Weights and memory


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
@BOTH
async def test_a_response_that_spans_an_update_names_both_versions(
    two: tuple[FakeWorker, FakeWorker], mode: Any, stream: bool
) -> None:
    for worker in two:
        worker.allow(3)
    async with engine_of(*two, stream=stream) as engine:
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(engine.generate(sample_of(rollout_id=n), SAMPLING)) for n in range(2)]
            for worker in two:
                await started(worker, 3)
            await engine.update_weights_from_disk("/checkpoints/7", "7", mode)
            assert engine.weight_version == "7"
            for worker in two:
                worker.allow(None)
    for answer in answers:
        check(answer.result())
        assert answer.result().weight_versions == [WeightSpan("default", 0, 3), WeightSpan("7", 3, LENGTH)]
    for worker in two:
        assert worker.weights == "/checkpoints/7"
        assert worker.paths("/generate", "/abort_request") == [
            "/pause_generation",
            "/update_weights_from_disk",
            "/update_weight_version",
            "/continue_generation",
        ]
        assert worker.bodies("/pause_generation") == [{"mode": mode}]
        assert worker.bodies("/update_weights_from_disk")[0]["flush_cache"] is (mode != "in_place")


async def test_a_broken_stream_that_spans_an_update_names_both_versions(worker: FakeWorker) -> None:
    worker.allow(3)
    worker.faults.append(Reset(after=5))
    async with engine_of(worker, stream=True) as engine:
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(engine.generate(sample_of(), SAMPLING))
            await started(worker, 3)
            await engine.set_weight_version("7")
            worker.allow(None)
    check(answer.result())
    assert answer.result().weight_versions == [WeightSpan("default", 0, 3), WeightSpan("7", 3, LENGTH)]


async def test_a_refused_update_says_why_and_lets_the_workers_go_on(worker: FakeWorker) -> None:
    async with engine_of(worker) as engine:
        with pytest.raises(RequestRefused, match="answered 400: Failed to get model path: nope"):
            await engine.update_weights_from_disk("nope", "7")
    assert worker.paused is None
    assert engine.weight_version is None


async def test_weights_from_the_trainer_come_between_begin_and_end(two: tuple[FakeWorker, FakeWorker]) -> None:
    async with engine_of(*two) as engine:
        await engine.init_weights_update_group("10.0.0.1", 29500, 5, ranks_per_worker=2, backend="gloo")
        async with engine.updating_weights("7", pause="in_place") as update:
            await update.from_distributed(["a"], ["float32"], [[2, 3]])
            await update.from_tensors(["aGk="])
        await engine.destroy_weights_update_group()
    assert [worker.bodies("/init_weights_update_group")[0]["rank_offset"] for worker in two] == [1, 3]
    for worker in two:
        assert worker.paths() == [
            "/init_weights_update_group",
            "/pause_generation",
            "/begin_weight_update",
            "/update_weights_from_distributed",
            "/update_weights_from_tensor",
            "/end_weight_update",
            "/update_weight_version",
            "/continue_generation",
            "/destroy_weights_update_group",
        ]
        assert worker.weight_version == "7"
        body = worker.bodies("/update_weights_from_distributed")[0]
        assert (body["names"], body["dtypes"], body["shapes"]) == (["a"], ["float32"], [[2, 3]])


async def test_an_update_that_raises_ends_what_it_began(worker: FakeWorker) -> None:
    async with engine_of(worker) as engine:
        with pytest.raises(ZeroDivisionError):
            async with engine.updating_weights("7") as update:
                await update.from_tensors(["aGk="])
                raise ZeroDivisionError
    assert not worker.updating
    assert worker.paused is None
    assert engine.weight_version is None


async def test_cut_off_at_any_await_an_update_ends_what_it_began(two: tuple[FakeWorker, FakeWorker]) -> None:
    async with engine_of(*two) as engine:

        async def update() -> None:
            async with engine.updating_weights("7") as update:
                await update.from_tensors(["aGk="])

        steps = 0
        while not await step_by_step(update, steps):
            for worker in two:
                assert (worker.paused, worker.updating) == (None, False), steps
            await generated(engine, 2, 1000 + 2 * steps)
            steps += 1
    assert {"/begin_weight_update", "/end_weight_update", "/continue_generation"} <= set(two[0].paths())


async def test_an_update_that_cannot_be_ended_fails_of_what_it_failed(
    worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine_of(worker) as engine:
        with pytest.raises(ZeroDivisionError):
            async with engine.updating_weights("7") as update:
                await update.from_tensors(["aGk="])
                await worker.kill()
                raise ZeroDivisionError
        assert not engine._fleet.held
    for path in ("/end_weight_update", "/continue_generation"):
        assert f"after a weight update that failed: {worker.url}{path}" in caplog.text


async def test_an_update_of_somebody_else_is_not_ended(worker: FakeWorker) -> None:
    worker.refused["/begin_weight_update"] = (400, "a weight-update session is already open")
    async with engine_of(worker) as engine:
        with pytest.raises(RequestRefused, match="answered 400: a weight-update session is already open"):
            async with engine.updating_weights("7") as update:
                await update.from_tensors(["aGk="])
    assert worker.paths() == ["/pause_generation", "/begin_weight_update", "/continue_generation"]


async def test_weights_of_somebody_else_count_when_the_engine_is_told(two: tuple[FakeWorker, FakeWorker]) -> None:
    async with engine_of(*two) as engine:
        await engine.update_weights_from_disk("/checkpoints/7", "7")
        await engine.pause()
        for worker in two:
            worker.weights, worker.weight_version = "/checkpoints/8", "8"
        await engine.set_weight_version("8")
        await engine.resume()
        await generated(engine, 4)
    assert [len(worker.bodies()) for worker in two] == [2, 2]
    assert [worker.weights for worker in two] == ["/checkpoints/8"] * 2


async def test_setting_the_version_aborts_nothing(worker: FakeWorker) -> None:
    worker.allow(3)
    async with engine_of(worker) as engine:
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(engine.generate(sample_of(), SAMPLING))
            await started(worker, 3)
            async with engine.updating_weights("7"):
                pass  # weights that came some other way
            worker.allow(None)
    assert answer.result().weight_versions == [WeightSpan("default", 0, 3), WeightSpan("7", 3, LENGTH)]
    assert len(worker.bodies()) == 1


async def test_memory_is_released_and_resumed_by_tag(two: tuple[FakeWorker, FakeWorker]) -> None:
    async with engine_of(*two) as engine:
        await engine.release_memory(["kv_cache"])
        assert [worker.released for worker in two] == [{"kv_cache"}] * 2
        await engine.release_memory()
        await engine.resume_memory(["weights"])
        assert [worker.released for worker in two] == [{"kv_cache"}] * 2


async def test_memory_is_released_when_no_worker_has_a_request_under_way(
    two: tuple[FakeWorker, FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler dies of it otherwise, and a request is under way in it for a moment longer than until its reply."""
    busy, idle = two
    busy.refused["/flush_cache"] = (400, "Flush cache failed.")
    async with engine_of(*two) as engine:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(engine.release_memory(["kv_cache"]))
            await busy.until(lambda: busy.paths().count("/flush_cache") >= 2)
            assert not busy.released
            assert not idle.released
            del busy.refused["/flush_cache"]
        assert [worker.released for worker in two] == [{"kv_cache"}] * 2
        busy.refused["/flush_cache"] = (400, "Flush cache failed.")
        monkeypatch.setattr(fleet, "IDLE_SECONDS", 0.0)
        with pytest.raises(RequestRefused, match=r"requests are under way: end them, or pause .* Flush cache failed"):
            await engine.release_memory()
        busy.refused["/flush_cache"] = (401, "Unauthorized")
        with pytest.raises(RequestRefused, match=r"/flush_cache\S* answered 401: Unauthorized$"):
            await engine.release_memory()
    assert [worker.released for worker in two] == [{"kv_cache"}] * 2


async def test_a_worker_that_is_down_is_left_out(
    two: tuple[FakeWorker, FakeWorker], caplog: pytest.LogCaptureFixture
) -> None:
    down, up = two
    await down.kill()
    async with engine_of(*two, backoff=1000.0) as engine:
        await engine.pause()
        await engine.release_memory(["kv_cache"])
        await engine.resume_memory(["kv_cache"])
        await engine.resume()
        assert await engine.workers() == [up.url]
    assert up.paths() == [
        "/pause_generation",
        "/flush_cache",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/continue_generation",
    ]
    [message] = caplog.messages  # known from then on
    assert message.startswith(f"worker {down.url} is left out: {down.url}/pause_generation: Cannot connect")


async def test_when_no_worker_is_up_that_is_an_error(two: tuple[FakeWorker, FakeWorker]) -> None:
    for worker in two:
        await worker.kill()
    async with engine_of(*two, backoff=1000.0) as engine:
        with pytest.raises(WorkersUnavailable, match=f"{two[0].url}/pause_generation: Cannot connect"):
            await engine.pause()
        with pytest.raises(WorkersUnavailable, match="/pause_generation: Cannot connect"):
            await engine.update_weights_from_disk("/checkpoints/7", "7")
        assert engine.weight_version is None


async def test_a_worker_that_fails_to_pause_is_an_error(two: tuple[FakeWorker, FakeWorker]) -> None:
    two[0].refused["/pause_generation"] = (500, "no")
    async with engine_of(*two) as engine:
        with pytest.raises(WorkersUnavailable, match=f"{two[0].url}/pause_generation answered 500: no"):
            await engine.pause()
    assert two[1].paused == "retract"


async def generated(engine: SGLangEngine, count: int, first: int = 100) -> None:
    for number in range(first, first + count):
        check(await engine.generate(sample_of(rollout_id=number), SAMPLING))


async def test_a_worker_that_is_down_for_good_costs_no_further_attempts(two: tuple[FakeWorker, FakeWorker]) -> None:
    down, up = two
    await down.kill()
    async with engine_of(down, up) as engine:
        await generated(engine, 20)
        while engine._fleet.workers.failures < 3:  # it was looked at again and again
            await asyncio.sleep(0)
            engine._fleet.workers.look()
        await generated(engine, 20, 200)
    assert engine.wasted == 1
    assert len(up.bodies()) == 40


async def test_a_worker_that_missed_an_update_loads_it_when_it_is_back(
    two: tuple[FakeWorker, FakeWorker], caplog: pytest.LogCaptureFixture
) -> None:
    down, up = two
    await down.kill()
    async with engine_of(down, up) as engine:
        await engine.update_weights_from_disk("/checkpoints/7", "7", "in_place")
        assert engine.weight_version == "7"
        assert (up.weights, up.paused) == ("/checkpoints/7", None)
        assert f"worker {down.url} has missed the weights '7': it gets no samples until it has them" in caplog.text
        await down.start()
        while down.weights != "/checkpoints/7":
            await generated(engine, 1)
        await generated(engine, 20, 200)
    assert down.paths("/generate")[-5:] == [
        "/model_info",
        "/update_weights_from_disk",
        "/model_info",
        "/continue_generation",  # it was not reached when the others were told
        "/model_info",
    ]
    [loaded] = down.bodies("/update_weights_from_disk")
    assert loaded == {
        "weight_version": "7", "flush_cache": True, "model_path": "/checkpoints/7", "load_format": None
    }  # fmt: skip
    assert down.bodies()  # in use again
    assert f"worker {down.url} has the weights 'default', not '7': it loads /checkpoints/7" in caplog.text


@pytest.mark.parametrize("how", ["tensors", "name", "two files"])
async def test_weights_that_are_no_checkpoint_cannot_be_loaded_later(
    two: tuple[FakeWorker, FakeWorker], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    down, up = two
    await down.kill()
    async with engine_of(down, up) as engine:
        async with engine.updating_weights("7") as update:
            if how == "tensors":
                await update.from_tensors(["aGk="])
            elif how == "two files":
                await update.from_disk("/a")
                await update.from_disk("/b")
            assert update.workers == [up.url]
        await down.start()
        while engine._fleet.workers.failures < 3:
            await generated(engine, 1)
        assert not down.bodies()
        assert "/update_weights_from_disk" not in down.paths()
        assert caplog.text.count("'default', not '7': it gets no samples until an update that it takes part in") == 1
        await engine.set_weight_version("8")  # it is up: it takes part
        await generated(engine, 20, 200)
    assert down.bodies()
    assert [worker.weight_version for worker in two] == ["8", "8"]


async def test_a_worker_that_refuses_an_update_is_left_out_of_it(two: tuple[FakeWorker, FakeWorker]) -> None:
    first, second = two
    first.refused["/update_weights_from_tensor"] = (400, "no such tensor")
    updates: list[dict[str, Any]] = []
    async with engine_of(*two) as engine:
        engine.on_weights_updated.append(lambda **update: updates.append(update))
        async with engine.updating_weights("7") as update:
            await update.from_tensors(["aGk="])
        await generated(engine, 10)
    assert first.paths() [:4] == [
        "/pause_generation", "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"
    ]  # fmt: skip
    assert (first.paused, first.updating) == (None, False)
    assert not first.bodies()
    assert len(second.bodies()) == 10
    [told] = updates
    assert told.pop("seconds") >= 0
    assert told == {"version": "7", "pause": "retract", "workers": [second.url], "missed_by": [first.url]}


async def test_all_workers_that_refuse_an_update_stay_in_use(two: tuple[FakeWorker, FakeWorker]) -> None:
    updates: list[dict[str, Any]] = []
    async with engine_of(*two) as engine:
        engine.on_weights_updated.append(lambda **update: updates.append(update))
        with pytest.raises(RequestRefused, match=r"Failed to get model path: nope; .*: Failed to get model path: nope"):
            await engine.update_weights_from_disk("nope", "7")
        await generated(engine, 2)
    assert [len(worker.bodies()) for worker in two] == [1, 1]
    assert not updates


async def test_a_worker_that_dies_in_an_update_is_left_out_of_it(two: tuple[FakeWorker, FakeWorker]) -> None:
    first, second = two
    async with engine_of(*two) as engine:
        async with engine.updating_weights("7") as update:
            await first.kill()
            await update.from_disk("/checkpoints/7")
            assert update.workers == [second.url]
        await generated(engine, 4)
    assert len(second.bodies()) == 4
    assert second.paused is None


async def test_nothing_comes_back_while_the_others_pause(two: tuple[FakeWorker, FakeWorker]) -> None:
    down, up = two
    await down.kill()
    async with engine_of(down, up) as engine:
        await generated(engine, 2)
        await down.start()
        async with asyncio.TaskGroup() as tasks:
            async with engine.updating_weights("7") as update:
                assert update.workers == [down.url, up.url]  # away, but up
                answers = [tasks.create_task(engine.generate(sample_of(rollout_id=n), SAMPLING)) for n in range(8)]
                await started(up, requests=8)
                await update.from_disk("/checkpoints/7")
        for answer in answers:
            check(answer.result())
        await generated(engine, 8)
    assert down.bodies()
    assert [worker.weights for worker in two] == ["/checkpoints/7"] * 2


async def test_a_worker_that_was_restarted_unnoticed_gives_itself_away(
    two: tuple[FakeWorker, FakeWorker], caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = two
    async with engine_of(*two) as engine:
        await engine.update_weights_from_disk("/checkpoints/7", "7")
        first.weights, first.weight_version = "initial", "default"
        while first.weights == "initial":
            await generated(engine, 1)
        await generated(engine, 10, 200)
        seen = {s.version for n in range(4) for s in (await engine.generate(sample_of(), SAMPLING)).weight_versions}
    assert seen == {"7"}
    assert f"worker {first.url} has the weights 'default', not '7': it loads /checkpoints/7" in caplog.text


class Trainer:
    def __init__(self, engine: SGLangEngine) -> None:
        self.engine = engine

    async def train(self, batch: Batch) -> TrainResult:
        version = str(batch.rollout_id + 1)
        await self.engine.update_weights_from_disk(f"/checkpoints/{version}", version)
        return TrainResult(weight_version=version)


@pytest.mark.parametrize("before", [True, False])
async def test_an_update_is_one_event(two: tuple[FakeWorker, FakeWorker], before: bool) -> None:
    """Whether the batch is acknowledged after the update, as is usual, or before."""
    engine = engine_of(*two)
    trainer = Trainer(engine)
    log = Log()
    stages = [Tokenize(lambda prompt: PROMPT), Generate(engine, SAMPLING)]
    pipeline = Pipeline(Prompts(["x"] * 3, group_size=1), stages, BatchSpec(groups=1), observers=[log])
    async with pipeline:
        async for batch in pipeline.rollouts(stop=3):
            if before:
                batch.trained(await trainer.train(batch))
            else:
                batch.trained(TrainResult(weight_version=str(batch.rollout_id + 1)))
                await trainer.train(batch)
    assert not engine.on_weights_updated
    kinds = ["weights_updated", "batch_trained"] if before else ["batch_trained", "weights_updated"]
    assert [event.kind for event in log.events if event.kind in kinds] == kinds * 3
    updates = log.of("weights_updated")
    assert [(event.rollout_id, event.version) for event in updates] == [(0, "1"), (1, "2"), (2, "3")]
    for event in updates if before else updates[1:]:
        assert (event.pause, event.workers, event.missed_by) == ("retract", [worker.url for worker in two], [])
        assert event.seconds > 0
    assert inspect.check(log.events).ok


async def test_weights_of_before_the_first_rollout_are_an_event(worker: FakeWorker) -> None:
    engine = engine_of(worker)
    log = Log()
    stages = [Tokenize(lambda prompt: PROMPT), Generate(engine, SAMPLING)]
    pipeline = Pipeline(Prompts(["x"], group_size=1), stages, BatchSpec(groups=1), observers=[log])
    async with pipeline:
        await engine.set_weight_version("0")
        await anext(pipeline.rollouts())
    first = log.events[0]
    assert (first.kind, first.version, first.pause, first.workers) == ("weights_updated", "0", None, [worker.url])
    assert inspect.check(log.events).ok


# Behind a router


@pytest_asyncio.fixture
async def router(two: tuple[FakeWorker, FakeWorker]) -> AsyncIterator[FakeRouter]:
    async with FakeRouter(*two, drops=lost_by_router) as fake:
        yield fake


async def test_generation_goes_through_the_router(router: FakeRouter, caplog: pytest.LogCaptureFixture) -> None:
    async with SGLangEngine(router=router.url, vocabulary=512) as engine:
        for number in range(4):
            check(await engine.generate(sample_of(rollout_id=number), SAMPLING))
    assert len(router.received) == 4
    assert [len(worker.bodies()) for worker in router.workers] == [2, 2]
    assert not caplog.messages


async def test_an_abort_goes_around_the_router(router: FakeRouter) -> None:
    for worker in router.workers:
        worker.allow(3)
    async with SGLangEngine(router=SGLangRouter(router.url)) as engine:
        async with asyncio.TaskGroup() as tasks:
            sample = sample_of()
            answer = tasks.create_task(engine.generate(sample, SAMPLING))
            await started(router.workers[1], 3)
            await engine.abort([sample])
    assert answer.result().status is SampleStatus.ABORTED
    assert answer.result().tokens == ANSWER[:3]
    assert len(router.received) == 1
    assert all(len(worker.bodies("/abort_request")) == 1 for worker in router.workers)


async def test_pause_weights_and_memory_go_around_the_router(router: FakeRouter) -> None:
    async with SGLangEngine(router=router.url) as engine:
        await engine.update_weights_from_disk("/checkpoints/7", "7")
        await engine.release_memory(["kv_cache"])
    for worker in router.workers:
        assert worker.weight_version == "7"
        assert worker.paused is None
        assert worker.released == {"kv_cache"}


@pytest.mark.parametrize(
    ("options", "sampling", "lost"),
    [
        ({"routed_experts": (3, 2)}, {}, "return_routed_experts"),
        ({"fields": {"return_sampling_mask": True}}, {}, "return_sampling_mask"),
        ({}, {"stop_regex": "x+"}, "sampling_params.stop_regex"),
    ],
)
async def test_what_the_router_drops_goes_around_it_and_is_said_once(
    router: FakeRouter,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    sampling: dict[str, Any],
    lost: str,
) -> None:
    for worker in router.workers:
        worker.routed_experts = True
    async with SGLangEngine(router=router.url, vocabulary=512, **options) as engine:
        for number in range(4):
            check(await engine.generate(sample_of(rollout_id=number), SAMPLING | sampling))
    assert not router.received
    assert [len(worker.bodies()) for worker in router.workers] == [2, 2]
    [message] = caplog.messages
    assert message.startswith(f"the router {router.url} drops {lost}: requests with it go to its 2 workers directly")


async def test_around_the_router_failures_are_retried_from_here(router: FakeRouter) -> None:
    await router.workers[0].kill()
    async with SGLangEngine(router=router.url, fields={"return_sampling_mask": True}, backoff=1e-4) as engine:
        for number in range(2):
            check(await engine.generate(sample_of(rollout_id=number), SAMPLING))
    assert len(router.workers[1].bodies()) == 2


async def test_an_execution_whose_reply_the_router_lost_gives_one_sample(router: FakeRouter) -> None:
    router.workers[1].faults.append(LoseReply())
    async with SGLangEngine(router=router.url, backoff=1e-4) as engine:
        completion = await engine.generate(sample_of(), SAMPLING)
    check(completion)
    assert "answered 502" in completion.meta["failed_attempts"][0]
    first = router.received[0].body["rid"]
    assert all(worker.bodies("/abort_request") == [{"rid": first}] for worker in router.workers)


async def test_a_worker_that_fails_behind_the_router_holds_up_its_own_requests_alone(router: FakeRouter) -> None:
    router.workers[1].faults.append(Status(500))
    async with SGLangEngine(router=router.url, backoff=1000.0) as engine:
        async with asyncio.TaskGroup() as tasks:
            sample = sample_of()
            answer = tasks.create_task(engine.generate(sample, SAMPLING))
            while not engine.wasted:
                await asyncio.sleep(0)
            check(await engine.generate(sample_of(rollout_id=4), SAMPLING))
            await engine.abort([sample])
    assert answer.result().status is SampleStatus.ABORTED


async def test_behind_the_router_a_worker_that_missed_an_update_is_taken_out_until_it_has_it(
    router: FakeRouter, caplog: pytest.LogCaptureFixture
) -> None:
    down, up = router.workers
    await down.kill()
    async with SGLangEngine(router=router.url, backoff=1e-4, vocabulary=512) as engine:
        await engine.update_weights_from_disk("/checkpoints/7", "7")
        assert [*router.registered.values()] == [up]
        await down.start()
        while len(router.registered) == 1:
            await generated(engine, 1)
        await generated(engine, 4, 200)
    assert down.weights == "/checkpoints/7"
    assert down.bodies()
    assert f"worker {down.url} has missed the weights '7'" in caplog.text


async def test_behind_the_router_a_worker_with_other_weights_is_taken_out(router: FakeRouter) -> None:
    """It was restarted before the router noticed, and no checkpoint brings it up."""
    restarted, _ = router.workers
    async with SGLangEngine(router=router.url, backoff=1e-4, vocabulary=512) as engine:
        await engine.set_weight_version("7")
        restarted.weight_version = "default"
        engine._fleet._listed_at = float("-inf")  # as if it was some time ago
        while len(router.registered) == 2:
            await generated(engine, 1)
        before = len(restarted.bodies())
        await generated(engine, 4, 200)
        assert len(restarted.bodies()) == before
        await engine.set_weight_version("8")
        while len(router.registered) == 1:
            await generated(engine, 1)
    assert restarted.weight_version == "8"


async def test_when_all_circuits_are_open_the_request_waits_its_turn(router: FakeRouter) -> None:
    router.circuits_open = 3
    async with SGLangEngine(router=router.url, backoff=1e-4, vocabulary=512) as engine:
        check(await engine.generate(sample_of(), SAMPLING))
        assert engine.wasted == 3


async def test_when_all_circuits_stay_open_the_error_has_the_routers_words(router: FakeRouter) -> None:
    router.circuits_open = 100
    async with SGLangEngine(router=router.url, backoff=1e-4, vocabulary=512, attempts=3) as engine:
        with pytest.raises(
            WorkersUnavailable, match=r"sample 3: 3 attempts failed; .* 503: No available workers \(all"
        ):
            await engine.generate(sample_of(), SAMPLING)
    assert len(router.received) == 3
    assert not any(worker.bodies() for worker in router.workers)


# Keys and TLS


@BOTH
async def test_the_key_is_sent_with_everything_and_shown_nowhere(
    stream: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("DEBUG")
    monkeypatch.setenv("SGLANG_KEY", "sesame")
    async with FakeWorker(api_key="sesame") as worker:
        for key in ("sesame", "env:SGLANG_KEY"):
            async with engine_of(worker, api_key=key, stream=stream, vocabulary=None) as engine:
                worker.faults.append(Status(500))
                check(await engine.generate(sample_of(), SAMPLING))
                await engine.update_weights_from_disk("/checkpoints/7", "7")
            assert "sesame" not in repr(engine)
        assert {received.headers["Authorization"] for received in worker.received} == {"Bearer sesame"}
        async with engine_of(worker, api_key="open") as engine:
            with pytest.raises(RequestRefused, match="answered 401: Unauthorized") as caught:
                await engine.generate(sample_of(), SAMPLING)
        assert "open" not in str(caught.value)
    assert "sesame" not in caplog.text


async def test_the_key_goes_through_the_router(router: FakeRouter) -> None:
    for worker in router.workers:
        worker.api_key = "sesame"
    async with SGLangEngine(router=router.url, api_key="sesame", vocabulary=512) as engine:
        check(await engine.generate(sample_of(), SAMPLING))
        await engine.update_weights_from_disk("/checkpoints/7", "7")


@pytest.mark.parametrize("key", ["", "se\nsame", "s\u00e9same"])
async def test_a_key_that_cannot_be_sent(key: str) -> None:
    with pytest.raises(ValueError, match="api_key is empty, or has characters that no header can have"):
        SGLangEngine("http://127.0.0.1:1", api_key=key)


async def test_a_key_that_the_environment_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_KEY", raising=False)
    with pytest.raises(ValueError, match="api_key: the environment variable SGLANG_KEY is not set"):
        async with SGLangEngine("http://127.0.0.1:1", api_key="env:SGLANG_KEY"):
            pass


@pytest.mark.parametrize("trusts", ["path", "context"])
async def test_https(trusts: str, tmp_path: Path) -> None:
    authority, server = trustme.CA(), create_default_context(Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    authority.cert_pem.write_to_path(path := str(tmp_path / "authority.pem"))
    ssl = path if trusts == "path" else create_default_context(cafile=path)
    async with FakeWorker(tls=server) as worker:
        async with engine_of(worker, ssl=ssl) as engine:
            check(await engine.generate(sample_of(), SAMPLING))
        async with engine_of(worker, attempts=1) as engine:
            with pytest.raises(WorkersUnavailable, match="certificate verify failed"):
                await engine.generate(sample_of(), SAMPLING)


async def test_certificates_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ssl: '.*nothing.pem' has no certificates that can be read"):
        async with SGLangEngine("https://127.0.0.1:1", ssl=str(tmp_path / "nothing.pem")):
            pass


# Programs


async def test_the_program_of_the_usage_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(64)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    monkeypatch.chdir(tmp_path)

    def tag_source(sample: Sample, *, rollout_id: int) -> None:
        sample.metadata["rollout"] = rollout_id

    async def ask_judge(sample: Sample) -> Sample:
        sample.reward = float(sum(sample.tokens) % 3 == 0)
        return sample

    class Trainer:
        async def train(self, batch: Batch) -> TrainResult:
            await engine.update_weights_from_disk(f"/checkpoints/{batch.rollout_id + 1}", str(batch.rollout_id + 1))
            return TrainResult(metrics={"loss": 0.5}, weight_version=engine.weight_version)

    async with FakeWorker() as first, FakeWorker() as second:
        engine = engine_of(first, second)
        sampling = {"temperature": 1.0, "max_new_tokens": 16, "sampling_seed": 0}
        pipeline = Pipeline(
            prompts=JsonlPrompts("train.jsonl", group_size=8, prompt_key="question", label_key="answer", seed=0),
            stages=[
                Tokenize(lambda prompt: [ord(character) for character in prompt]),
                Generate(engine, sampling=sampling),
                tag_source,
                limit(timeout(ask_judge, 30), 64),
                DynamicFilter(reward_nonzero_std, fallback="last"),
                GroupAdvantage(),
            ],
            batch=BatchSpec(groups=4, over_sampling=6, max_rounds=4),
            observers=[Recorder("run.mcap")],
        )
        first.faults.extend([Status(500), None, Reset(after=2), LoseReply()])
        trainer = Trainer()
        samples: list[Sample] = []
        async with pipeline:
            async for batch in pipeline.rollouts(start=0, stop=3):
                batch.trained(await trainer.train(batch))
                samples += batch.samples
    assert len(samples) == 3 * 4 * 8
    assert len({sample.rollout_id for sample in samples}) == len(samples)
    assert len({tuple(sample.tokens) for sample in samples}) > len(samples) // 2  # siblings differ
    for sample in samples:
        assert isinstance(sample.prompt, str)
        seed = sibling_seed(0, sample)
        prompt = [ord(character) for character in sample.prompt]
        assert sample.tokens == prompt + expected(prompt, sample.response_length, seed)
        assert sample.weight_versions == [
            WeightSpan(str(sample.metadata["rollout"] or "default"), 0, sample.response_length)
        ]
    assert engine.wasted == 3
    assert len(list(LogReader("run.mcap").rollout(2).groups())) >= 4
    assert not first.running
    assert not second.running


@BOTH
async def test_partial_rollouts_keep_their_tokens_and_their_versions(stream: bool) -> None:
    """What is unfinished when the batch is full is aborted, and goes on in the next rollout with newer weights."""
    async with FakeWorker() as worker:
        engine = engine_of(worker, stream=stream)
        pipeline = Pipeline(
            Prompts((f"{n}" for n in range(4)), group_size=1),
            [Tokenize(lambda prompt: [5, 6, 10 + int(prompt)]), Generate(engine, SAMPLING)],
            BatchSpec(groups=1, over_sampling=2, unfinished="recycle"),
        )
        slow = expected([5, 6, 11], LENGTH)
        async with pipeline:
            rollouts = pipeline.rollouts(stop=2)
            worker.allow(3)
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(rollouts.__anext__())
                await started(worker, 3, 2)
                worker.slow.add((5, 6, 11))
                worker.changed()
            first = task.result()
            assert [group.index for group in first.groups] == [0]
            assert worker.finished["abort"] == 1
            await engine.set_weight_version("2")
            worker.allow(None)
            second = await anext(rollouts)
    [sample] = second.samples
    assert sample.tokens == [5, 6, 11, *slow]
    assert sample.rollout_log_probs == [log_prob(token) for token in slow]
    assert sample.weight_versions == [WeightSpan("default", 0, 3), WeightSpan("2", 3, LENGTH)]
    [again] = [body for body in worker.bodies() if body["input_ids"] == [5, 6, 11, *slow[:3]]]
    assert again["sampling_params"]["max_new_tokens"] == LENGTH - 3


async def test_a_worker_killed_in_mid_rollout_costs_no_sample(
    two: tuple[FakeWorker, FakeWorker], caplog: pytest.LogCaptureFixture
) -> None:
    for worker in two:
        worker.allow(4)
    async with engine_of(*two) as engine:
        stages = [Tokenize(lambda prompt: [5, 6, 10 + int(prompt)]), Generate(engine, SAMPLING)]
        pipeline = Pipeline(Prompts((f"{n}" for n in range(8)), group_size=2), stages, BatchSpec(groups=8))
        async with pipeline, asyncio.TaskGroup() as tasks:
            batch = tasks.create_task(pipeline.rollouts(stop=1).__anext__())
            for worker in two:
                await started(worker, 4, 8)
            await two[0].kill()
            two[1].allow(None)
    samples = batch.result().samples
    assert [sample.index for sample in samples] == list(range(16))
    for sample in samples:
        assert sample.tokens[3:] == expected(sample.tokens[:3].tolist(), LENGTH)
    assert engine.wasted == 8
    assert sum("attempt" in message for message in caplog.messages) == 8


# Where things go wrong at the edges


@asynccontextmanager
async def mute() -> AsyncIterator[str]:
    """A worker that accepts connections and never answers."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()


async def test_a_worker_that_never_shows_the_weights_it_loads_is_asked_ever_more_rarely(
    two: tuple[FakeWorker, FakeWorker], caplog: pytest.LogCaptureFixture
) -> None:
    down, up = two
    caplog.set_level("INFO")
    await down.kill()
    async with engine_of(down, up) as engine:
        await engine.update_weights_from_disk("/checkpoints/7", "7")
        await down.start()
        down.refused["/update_weights_from_disk"] = (200, "{}")  # and nothing changes
        await generated(engine, 1)
        [worker] = [worker for worker in engine._fleet.workers if worker.url == down.url]
        while len(down.bodies("/update_weights_from_disk")) < 3:
            await asyncio.sleep(0)
            engine._fleet.workers.look()
        assert worker.failures >= 3
        assert worker.away
    assert f"worker {down.url} is not back: {down.url} has loaded '7', and says that it has 'default'" in caplog.text
    assert not down.bodies()


async def test_a_worker_that_does_not_go_on_after_a_pause_is_told_before_it_is_used(
    two: tuple[FakeWorker, FakeWorker],
) -> None:
    stuck, _ = two
    stuck.refused["/continue_generation"] = (500, "no")
    async with engine_of(*two) as engine:
        await engine.update_weights_from_disk("/checkpoints/7", "7")
        assert stuck.paused == "retract"
        await generated(engine, 4)
        assert not stuck.bodies()
        with pytest.raises(WorkersUnavailable, match="/continue_generation answered 500: no"):
            await engine.resume()
        await generated(engine, 4, 200)
        del stuck.refused["/continue_generation"]
        while not stuck.bodies():
            await generated(engine, 1, 300)
    assert stuck.paused is None


async def test_abort_of_what_still_asks_for_the_vocabulary_ends_it(worker: FakeWorker) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()
    async with engine_of(worker) as engine:

        async def vocabulary() -> int:
            asked.set()
            await answer.wait()
            return 512

        engine._model.vocabulary = vocabulary  # type: ignore[method-assign]
        sample = sample_of()
        async with asyncio.TaskGroup() as tasks:
            generation = tasks.create_task(engine.generate(sample, SAMPLING))
            await asked.wait()
            abort = tasks.create_task(engine.abort([sample]))
            await asyncio.sleep(0)
            answer.set()
            await abort
            assert engine.in_flight == 0
        assert generation.result().status is SampleStatus.ABORTED
    assert not worker.bodies()


async def test_many_that_are_cancelled_at_once_are_all_aborted(worker: FakeWorker) -> None:
    worker.allow(0)
    most = 0

    async with engine_of(worker) as engine:
        post = engine._fleet.client.post
        under_way = 0

        async def counted(url: str, *rest: Any) -> bytes:
            nonlocal most, under_way
            aborts = url.endswith("/abort_request")
            under_way += aborts
            most = max(most, under_way)
            try:
                return await post(url, *rest)
            finally:
                under_way -= aborts

        engine._fleet.client.post = counted  # type: ignore[method-assign, assignment]
        calls = [asyncio.create_task(engine.generate(sample_of(rollout_id=n), SAMPLING)) for n in range(100)]
        await started(worker, requests=100)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await worker.until(lambda: not worker.running)
    assert worker.finished["abort"] == 100
    assert most == attempts.ABORTS


async def test_a_worker_that_answers_no_abort_holds_up_no_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(attempts, "ABORTS", 1)
    monkeypatch.setattr(attempts, "ABORT_SECONDS", 0.2)
    async with mute() as silent, SGLangEngine(silent, vocabulary=512) as engine:
        calls = [asyncio.create_task(engine.generate(sample_of(rollout_id=n), SAMPLING)) for n in range(10)]
        while engine.in_flight < 10 or any(not response.rid for response in engine._open.values()):
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    assert caplog.text.count("no answer in 0.2 s") == 1


async def test_a_stream_that_takes_tokens_back_is_no_stream() -> None:
    response = Response(sample_of(), SAMPLING, {"stream": True}, None, "r")
    for count in (5, 3):
        event = json.dumps({"meta_info": {"completion_tokens": count, "weight_version": "1"}}).encode()
        with pytest.raises(ReplyError, match=r"3 tokens came .* after one with 5") if count == 3 else nullcontext():
            response.see(event)


async def test_many_that_go_around_the_router_ask_it_once_for_its_workers(router: FakeRouter) -> None:
    async with SGLangEngine(router=router.url, vocabulary=512, fields={"return_sampling_mask": True}) as engine:
        assert engine._fleet.router is not None
        workers, asked = engine._fleet.router.workers, 0

        async def counted() -> list[str]:
            nonlocal asked
            asked += 1
            return await workers()

        engine._fleet.router.workers = counted  # type: ignore[method-assign, assignment]
        sampling = SAMPLING | {"top_k": 5}
        await asyncio.gather(*(engine.generate(sample_of(rollout_id=n), sampling) for n in range(20)))
        assert asked == 1

        async def fails() -> list[str]:
            nonlocal asked
            asked += 1
            await asyncio.sleep(0)
            raise RouterError("gone")

        engine._fleet.router.workers = fails  # type: ignore[method-assign, assignment]
        errors = await asyncio.gather(*(engine._fleet.urls(age=0) for _ in range(20)), return_exceptions=True)
    assert [str(error) for error in errors] == ["gone"] * 20
    assert asked == 2


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": float("nan")}, {"top_p": float("inf")}, {"logit_bias": {"5": float("-inf")}}],
)
async def test_numbers_that_json_does_not_have_are_not_sent_as_null(
    worker: FakeWorker, sampling: dict[str, Any]
) -> None:
    async with engine_of(worker) as engine:
        with pytest.raises(ValueError, match=f"sample 3: sampling parameter {next(iter(sampling))} is .* finite"):
            await engine.generate(sample_of(), SAMPLING | sampling)
    assert not worker.bodies()


@pytest.mark.parametrize("rest", [":80", "h:99999", "h:x", "h?x=1", "h#a", "user:secret@h"])
async def test_wrong_addresses(rest: str) -> None:
    for ask in (SGLangEngine, SGLangRouter):
        with pytest.raises(ValueError, match="is no address of a server") as raised:
            ask(f"http://{rest}")
        assert "secret" not in str(raised.value)


async def test_a_key_of_the_environment_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret\n")
    with pytest.raises(ValueError, match=r"environment variable SOME_KEY .* no header can have") as caught:
        await SGLangEngine("http://127.0.0.1:1", api_key="env:SOME_KEY").generate(sample_of(), SAMPLING)
    assert "secret" not in str(caught.value)


async def test_a_reply_with_a_negative_token_is_asked_again(worker: FakeWorker) -> None:
    def negative(reply: dict[str, Any]) -> dict[str, Any]:
        reply["meta_info"]["output_token_logprobs"][0][1] = -5
        return reply

    worker.faults.append(Edit(negative))
    async with engine_of(worker) as engine:
        check(await engine.generate(sample_of(), SAMPLING))


async def test_memory_is_not_released_while_requests_run_unpaused(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "IDLE_SECONDS", 0.0)
    worker.allow(0)
    async with engine_of(worker) as engine, asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.generate(sample_of(), SAMPLING))
        await started(worker)
        with pytest.raises(RequestRefused, match="requests are under way: end them"):
            await engine.release_memory()
        worker.allow(None)
    assert not worker.released


async def test_memory_is_released_when_all_data_parallel_ranks_are_idle(worker: FakeWorker) -> None:
    worker.allow(2)
    async with engine_of(worker, fields={"routed_dp_rank": 1}) as engine, asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.generate(sample_of(), SAMPLING))
        await started(worker, 2)
        tasks.create_task(engine.release_memory(["kv_cache"]))
        await worker.until(lambda: "/flush_cache" in worker.paths())
        assert not worker.released
        worker.allow(None)
    assert worker.released == {"kv_cache"}
    assert worker.paths().count("/flush_cache") == 1


@pytest.mark.parametrize("pause", [None, "in_place"])
async def test_memory_is_not_released_while_another_data_parallel_rank_is_busy(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, pause: Any
) -> None:
    monkeypatch.setattr(fleet, "IDLE_SECONDS", 0.05)
    worker.allow(2)
    async with engine_of(worker, fields={"routed_dp_rank": 1}) as engine, asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.generate(sample_of(), SAMPLING))
        await started(worker, 2)
        if pause is not None:
            await engine.pause(pause)
        with pytest.raises(RequestRefused, match=r"end them, or pause .* \(one of the data-parallel ranks"):
            await engine.release_memory()
        await engine.resume()
        worker.allow(None)
    assert not worker.released


@pytest.mark.parametrize("pause", ["retract", "abort"])
async def test_after_a_pause_memory_is_released_whatever_waits(worker: FakeWorker, pause: Any) -> None:
    worker.allow(2)
    async with engine_of(worker) as engine, asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(engine.generate(sample_of(), SAMPLING))
        await started(worker, 2)
        await engine.pause(pause)
        await started(worker)
        await engine.release_memory()
        assert worker.released == {"weights", "kv_cache"}
        await engine.resume_memory()
        await engine.resume()
        worker.allow(None)
    check(answer.result())


@BOTH
async def test_abort_at_a_worker_that_hangs_ends_it(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "ABORT_SECONDS", 0.05)
    async with mute() as silent, SGLangEngine(silent, vocabulary=512, stream=stream) as engine:
        sample = sample_of()
        async with asyncio.TaskGroup() as tasks:
            generation = tasks.create_task(engine.generate(sample, SAMPLING))
            while not any(response.rid for response in engine._open.values()):
                await asyncio.sleep(0)
            await engine.abort([sample])
        assert generation.result().status is SampleStatus.ABORTED
        assert "no answer, and none to its aborts" in generation.result().meta["failed_attempts"][0]


async def test_cut_off_at_any_await_resume_leaves_nobody_paused(two: tuple[FakeWorker, FakeWorker]) -> None:
    async with engine_of(*two) as engine:
        steps, done = 0, False
        while not done:
            await engine.pause()
            done = await step_by_step(engine.resume, steps)
            steps += 1
            if steps > 1:  # else it has not begun
                assert [worker.paused for worker in two] == [None, None], steps
                assert not engine._fleet.held
