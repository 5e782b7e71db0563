"""The engine against a real server, and the scripted worker beside it: what one does, the other does."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from safetensors import safe_open

from backends.sglang import RequestRefused, SGLangEngine
from backends.sglang.router import free_port
from eventbus import Sample, SampleStatus
from middleware import Generate, Tokenize
from tests import sglang_real, sglang_servers
from tests.sglang_fake import FakeWorker
from tests.sglang_real import asked, until_decoding, until_running
from tests.sglang_servers import Server

pytestmark = [pytest.mark.asyncio, *sglang_real.MARKS]

PROMPT = [5, 6, 7]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
SPANS = {"temperature": 1.0, "max_new_tokens": 960, "ignore_eos": True}
LONG = SPANS | {"max_new_tokens": 4000}
"""Takes 10 s and more: it is never waited for."""


@pytest_asyncio.fixture
async def engine(real_url: str, real_models: list[Path]) -> AsyncIterator[SGLangEngine]:
    """The first model's weights, nothing running."""
    async with SGLangEngine(real_url) as engine:
        yield engine
        if engine.weight_version is not None:
            await engine.update_weights_from_disk(str(real_models[0]), "default")


def sample_of(**fields: Any) -> Sample:
    return Sample(**{"index": 3, "group_index": 0, "rollout_id": 3, "tokens": PROMPT, **fields})


# What lands on the sample


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_log_probs_are_those_of_the_model(
    real_url: str, real_models: list[Path], stream: bool, temperature: float
) -> None:
    samples = [sample_of(index=n, rollout_id=n, tokens=list(range(5 + n, 25 + 2 * n))) for n in range(8)]
    async with SGLangEngine(real_url, stream=stream) as engine:
        generate = Generate(engine, GREEDY | {"temperature": temperature})
        await asyncio.gather(*(generate(sample) for sample in samples))
    assert [sample.response_length for sample in samples] == [12] * 8
    assert sglang_real.worst_difference(real_models[0], samples) < 1e-4
    if temperature == 0:
        for sample, predicted in zip(samples, sglang_real.predicted(real_models[0], samples), strict=True):
            assert predicted.argmax(-1).tolist() == sample.tokens[sample.prompt_length :]


async def test_streaming_equals_non_streaming_and_parts_equal_the_whole(real_url: str) -> None:
    completions = []
    for stream in (False, True):
        async with SGLangEngine(real_url, stream=stream) as engine:
            completions.append(await engine.generate(sample_of(), GREEDY))
    whole, streamed = completions
    assert streamed.tokens == whole.tokens
    assert streamed.text == whole.text
    assert streamed.weight_versions == whole.weight_versions
    async with SGLangEngine(real_url) as engine:
        sample = sample_of()
        await Generate(engine, GREEDY | {"max_new_tokens": 5})(sample)
        sample.status = SampleStatus.ABORTED
        await Generate(engine, GREEDY)(sample)
    assert sample.tokens == PROMPT + list(whole.tokens)
    assert sample.response == whole.text
    assert sample.rollout_log_probs is not None
    assert all(
        math.isclose(a, b, abs_tol=1e-4) for a, b in zip(sample.rollout_log_probs, whole.log_probs or (), strict=True)
    )


async def test_kept_ids_come_back(real_url: str) -> None:
    async with SGLangEngine(real_url, fields={"return_sampling_mask": True}) as engine:
        sample = sample_of()
        await Generate(engine, {"max_new_tokens": 6, "top_k": 20, "top_p": 0.1, "ignore_eos": True})(sample)
    offsets, ids = sample.rollout_top_p_token_offsets, sample.rollout_top_p_token_ids
    assert len(offsets) == 7
    for i, token in enumerate(sample.tokens[3:]):
        kept = ids[offsets[i] : offsets[i + 1]]
        assert token in kept
        assert 1 <= len(kept) <= 20
    behaviour = sample.metadata["sampling_log_probs"]
    assert sample.rollout_log_probs is not None
    assert all(a >= b for a, b in zip(behaviour, sample.rollout_log_probs, strict=True))


async def test_text_and_chat_are_read_by_the_workers_tokenizer(
    engine: SGLangEngine, real_models: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    chat = [{"role": "user", "content": "the fox"}]
    sample = Sample(prompt=chat)
    await Generate(engine, GREEDY)(sample)
    assert "read with the worker's own tokenizer" in caplog.text
    other = Sample(prompt=chat)
    await Tokenize(str(real_models[0]))(other)
    assert sample.tokens[: sample.prompt_length] == other.tokens
    assert sample.response_length == 12


# Aborts and weights


@pytest.mark.parametrize("stream", [False, True])
async def test_abort_gives_what_there_is(real_url: str, stream: bool) -> None:
    async with SGLangEngine(real_url, stream=stream) as engine:
        async with asyncio.TaskGroup() as tasks:
            sample = sample_of()
            answer = tasks.create_task(engine.generate(sample, LONG))
            await until_running(real_url, 1, answer)
            await engine.abort([sample])
    completion = answer.result()
    assert completion.status is SampleStatus.ABORTED
    assert len(completion.tokens) == len(completion.log_probs or ()) < 4000
    await until_running(real_url, 0)


async def test_abort_of_all_is_acknowledged(real_url: str) -> None:
    samples = [sample_of(index=n, rollout_id=n) for n in range(8)]
    async with SGLangEngine(real_url) as engine:
        answers = [asyncio.create_task(engine.generate(sample, LONG)) for sample in samples]
        await until_running(real_url, 8, *answers)
        await engine.abort(samples)
        assert engine.in_flight == 0
        completions = await asyncio.gather(*answers)
    assert {completion.status for completion in completions} == {SampleStatus.ABORTED}
    await until_running(real_url, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelling_leaves_nothing_behind(real_url: str, stream: bool) -> None:
    async with SGLangEngine(real_url, stream=stream) as engine:
        answer = asyncio.create_task(engine.generate(sample_of(), LONG))
        await until_running(real_url, 1, answer)
        answer.cancel()
        await asyncio.wait([answer])
        await until_running(real_url, 0)
        assert answer.cancelled()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
async def test_a_response_that_spans_an_update_names_both_versions(
    real_server: Server, engine: SGLangEngine, real_models: list[Path], mode: Any, stream: bool
) -> None:
    decoded = real_server.decoded
    async with SGLangEngine(real_server.url, stream=stream) as generating, asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(generating.generate(sample_of(), SPANS))
        await until_decoding(real_server, decoded, answer)
        await engine.update_weights_from_disk(str(real_models[1]), "7", mode)
    completion = answer.result()
    assert len(completion.tokens) == 960
    before, after = completion.weight_versions
    assert (before.version, after.version) == ("default", "7")
    assert 0 == before.start < before.end == after.start < after.end == 960


async def test_weights_come_from_a_trainer_by_broadcast(engine: SGLangEngine, real_models: list[Path]) -> None:
    assert sglang_servers.PYTHON is not None
    await engine.update_weights_from_disk(str(real_models[1]), "disk")
    wanted = await engine.generate(sample_of(), GREEDY)
    await engine.update_weights_from_disk(str(real_models[0]), "default")
    port = free_port("127.0.0.1")
    with safe_open(real_models[1] / "model.safetensors", "pt") as tensors:
        names = sorted(tensors.keys())
        shapes = [tensors.get_slice(name).get_shape() for name in names]
    trainer = await asyncio.create_subprocess_exec(
        sglang_servers.PYTHON,
        str(sglang_servers.STUBS / "broadcast.py"),
        *(str(port), str(real_models[1]), "trainer"),
        env=sglang_servers.environment(),
    )
    await engine.init_weights_update_group("127.0.0.1", port, 2, group_name="trainer", backend="gloo")
    async with engine.updating_weights("trained") as update:
        await update.from_distributed(names, ["float32"] * len(names), shapes, "trainer")
    await engine.destroy_weights_update_group("trainer")
    assert await trainer.wait() == 0
    completion = await engine.generate(sample_of(), GREEDY)
    assert completion.tokens == wanted.tokens
    assert [span.version for span in completion.weight_versions] == ["trained"]


async def test_weights_come_from_a_trainer_on_the_same_machine(engine: SGLangEngine, real_models: list[Path]) -> None:
    await engine.update_weights_from_disk(str(real_models[1]), "disk")
    wanted = await engine.generate(sample_of(), GREEDY)
    await engine.update_weights_from_disk(str(real_models[0]), "default")
    with serialized(real_models[1]) as tensors:
        async with engine.updating_weights("trained") as update:
            await update.from_tensors([tensors])
    completion = await engine.generate(sample_of(), GREEDY)
    assert completion.tokens == wanted.tokens
    assert [span.version for span in completion.weight_versions] == ["trained"]


@contextmanager
def serialized(model: Path) -> Iterator[str]:
    """The weights as SGLang's own serializer writes them; they lie in memory that its process shares meanwhile."""
    assert sglang_servers.PYTHON is not None
    command = [sglang_servers.PYTHON, str(sglang_servers.STUBS / "serialize.py"), str(model)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=sglang_servers.environment(),
    ) as trainer:
        assert trainer.stdout is not None
        yield trainer.stdout.readline().strip()


async def test_a_refused_update_leaves_the_server_working(engine: SGLangEngine) -> None:
    with pytest.raises(RequestRefused, match=r"answered 400: .*nope"):
        await engine.update_weights_from_disk("/nope", "7")
    assert len((await engine.generate(sample_of(), GREEDY)).tokens) == 12


async def test_memory_and_version_endpoints_answer(engine: SGLangEngine) -> None:
    await engine.release_memory(["kv_cache"])
    await engine.resume_memory(["kv_cache"])
    await engine.set_weight_version("9")
    completion = await engine.generate(sample_of(), GREEDY)
    assert [span.version for span in completion.weight_versions] == ["9"]


# What is refused


async def test_a_token_outside_of_the_vocabulary_never_reaches_the_server(engine: SGLangEngine) -> None:
    with pytest.raises(ValueError, match="the token id 512 is not in the vocabulary of 512"):
        await engine.generate(sample_of(tokens=[5, 512]), GREEDY)
    assert len((await engine.generate(sample_of(), GREEDY)).tokens) == 12


async def test_a_prompt_that_is_too_long_is_refused_with_the_servers_words(engine: SGLangEngine) -> None:
    with pytest.raises(RequestRefused, match=r"answered 400: .*longer than"):
        await engine.generate(sample_of(tokens=[5] * 4097), GREEDY)


# The scripted worker answers as the real one does


def shape(value: Any, path: str = "") -> dict[str, str]:
    """Path -> type of everything in a reply; of a list the first element alone, and of cached tokens no details, which
    depend on what the cache holds."""
    if path.endswith("cached_tokens_details"):
        return {}
    if isinstance(value, dict):
        inner = [shape(item, f"{path}.{name}") for name, item in value.items()]
        return {key: kind for part in inner for key, kind in part.items()}
    if isinstance(value, list) and value:
        return shape(value[0], f"{path}[]")
    return {path: type(value).__name__}


REQUEST = {"rid": "contract", "input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True}


@pytest.mark.parametrize(
    "extra",
    [{}, {"return_sampling_mask": True, "sampling_params": GREEDY | {"temperature": 1.0, "top_k": 20}}],
    ids=["plain", "sampling_mask"],
)
async def test_replies_have_the_same_shape(real_url: str, extra: dict[str, Any]) -> None:
    async with FakeWorker() as worker:
        replies = [
            json.loads((await asked(address, "/generate", REQUEST | extra))[1]) for address in (worker.url, real_url)
        ]
    fake, real = map(shape, replies)
    assert fake == {path: kind for path, kind in real.items() if path in fake}, real
    assert not set(real) - set(fake), "the fake lacks these"


async def test_streams_have_the_same_shape(real_url: str) -> None:
    shapes = []
    async with FakeWorker() as worker:
        for address in (worker.url, real_url):
            status, data = await asked(address, "/generate", REQUEST | {"stream": True})
            events = data.decode().strip().split("\n\n")
            assert status == 200
            assert events[-1] == "data: [DONE]"
            decoded = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
            assert [len(event["output_ids"]) for event in decoded] == sorted(
                event["meta_info"]["completion_tokens"] for event in decoded
            )
            shapes.append((shape(decoded[0]), shape(decoded[-1])))
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_stop_token_ids_end_a_response_unless_ends_are_ignored(real_url: str, ignore_eos: bool) -> None:
    async with FakeWorker() as worker:
        for address in (worker.url, real_url):
            sampling = {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True}
            whole = json.loads((await asked(address, "/generate", REQUEST | {"sampling_params": sampling}))[1])
            sampling |= {"ignore_eos": ignore_eos, "stop_token_ids": whole["output_ids"][:1]}
            reply = json.loads((await asked(address, "/generate", REQUEST | {"sampling_params": sampling}))[1])
            assert len(reply["output_ids"]) == (3 if ignore_eos else 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_replies_to_what_is_aborted_have_the_same_shape(real_url: str, stream: bool) -> None:
    shapes = []
    async with FakeWorker() as worker:
        worker.allow(3)
        for address in (worker.url, real_url):
            async with asyncio.TaskGroup() as tasks:
                body = REQUEST | {"sampling_params": LONG, "stream": stream}
                answer = tasks.create_task(asked(address, "/generate", body))
                await until_running(address, 1, answer)
                while not answer.done():
                    await asked(address, "/abort_request", {"rid": "contract"})
            last = answer.result()[1].decode().strip().removesuffix("data: [DONE]").strip().split("\n\n")[-1]
            reply = json.loads(last.removeprefix("data: "))
            assert reply["meta_info"]["finish_reason"]["type"] == "abort"
            shapes.append(shape(reply))
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/generate", REQUEST | {"sampling_params": {"bogus": 1}}, 400),
        ("/generate", REQUEST | {"input_ids": [5] * 4097}, 400),
        ("/generate", {"sampling_params": {}}, 400),
        ("/abort_request", {"rid": "nobody"}, 200),
        ("/pause_generation", {"mode": "abort"}, 200),
        ("/pause_generation", {"mode": "retract"}, 200),
        ("/pause_generation", {"mode": "in_place"}, 200),
        ("/continue_generation", {}, 200),
        ("/update_weights_from_disk", {"model_path": "nope"}, 400),
        ("/update_weights_from_disk", {"model_path": "MODEL", "weight_version": "default"}, 200),
        ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}, 400),
        ("/update_weights_from_tensor", {"serialized_named_tensors": []}, 400),
        ("/destroy_weights_update_group", {"group_name": "nobody"}, 400),
        ("/flush_cache", {}, 200),
        ("/flush_cache?timeout=9.5", {}, 200),
        ("/begin_weight_update", {}, 200),
        ("/end_weight_update", {}, 200),
        ("/update_weight_version", {"new_version": "default", "abort_all_requests": False}, 200),
        ("/release_memory_occupation", {"tags": ["kv_cache"]}, 200),
        ("/resume_memory_occupation", {"tags": ["kv_cache"]}, 200),
        ("/ready", None, 200),
        ("/nowhere", {}, 404),
    ],
)
async def test_answers_are_the_same(
    real_url: str, real_models: list[Path], path: str, body: dict[str, Any] | None, status: int
) -> None:
    """The status, and which fields there are."""
    if body is not None and body.get("model_path") == "MODEL":
        body = body | {"model_path": str(real_models[0])}
    async with FakeWorker() as worker:
        real, fake = [form(*await asked(url, path, body)) for url in (real_url, worker.url)]
    assert real[0] == status
    assert fake == real


def form(status: int, data: bytes) -> tuple[int, Any]:
    try:
        return status, shape(json.loads(data))
    except ValueError:
        return status, data


async def test_what_they_say_of_themselves_has_the_same_shape(real_url: str) -> None:
    """Of what is asked for: the real one says much more."""
    async with FakeWorker() as worker:
        for path, names in (
            ("/model_info", {".model_path", ".tokenizer_path", ".weight_version", ".is_generation"}),
            ("/v1/loads", {".loads[].num_running_reqs", ".loads[].dp_rank"}),
        ):
            real, fake = [shape(json.loads((await asked(url, path))[1])) for url in (real_url, worker.url)]
            assert {name: real[name] for name in names} == {name: fake[name] for name in names}
