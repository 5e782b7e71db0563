"""The engine over an `sglang.Engine` of this process: a stand-in for it here, the real one in a process of its own.

The stand-in has the scripted worker behind it, so that what it answers is what the real server was seen to answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import aiohttp
import anyio
import msgspec
import pytest
import pytest_asyncio

from backends.sglang import AttemptFailed, RequestRefused, SGLangEngine, WorkersUnavailable, fleet
from backends.sglang.inprocess import ADDRESS, InProcess
from eventbus import BatchSpec, Pipeline, Prompts, Sample, SampleStatus, WeightSpan
from eventbus.columns import Tokens
from middleware import Generate
from tests import sglang_real, sglang_servers
from tests.sglang_fake import Edit, FakeWorker, Status, expected, log_prob
from tests.test_sglang_real import REQUEST, shape

PROMPT = [5, 6, 7]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
ROOT = Path(__file__).parent.parent
CPU = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "disable_overlap_schedule": True,
    "skip_server_warmup": True,
    "max_total_tokens": 65536,
}
"""What an sglang.Engine needs on a CPU."""


class Manager:
    """What stands in for SGLang's tokenizer manager: it asks a scripted worker."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.event_loop: asyncio.AbstractEventLoop | None = None
        self.open = 0
        """Replies that are being generated."""
        self.busy = 0
        """Times that it will say so."""

    def auto_create_handle_loop(self) -> None:
        self.event_loop = self.event_loop or asyncio.get_running_loop()

    async def generate_request(self, request: Any) -> AsyncIterator[dict[str, Any]]:
        self.open += 1
        try:
            async with self.ask("generate", request.fields) as response:
                if response.status != 200:
                    await refuse(response)
                async for line in response.content:
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        break
                    if data:
                        yield json.loads(data)
        finally:
            self.open -= 1

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self.worker._abort({"rid": rid, "abort_all": abort_all})
        self.worker.changed()

    async def flush_cache(self, timeout_s: float | None = None) -> Any:
        self.busy -= 1
        return SimpleNamespace(success=self.busy < 0, message="")

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        return aiohttp.request("POST", f"{self.worker.url}/{path}", json=body)

    def __getattr__(self, name: str) -> Any:
        async def call(request: Any) -> Any:
            fields = msgspec.structs.asdict(request)
            async with self.ask(name, fields) as response:
                answer = await response.json()
            return None if answer is None or "success" not in answer else (answer["success"], answer["message"], 0)

        return call


class HTTPException(Exception):
    """fastapi's: with a status and a detail."""

    def __init__(self, status_code: int, detail: str) -> None:
        self.status_code, self.detail = status_code, detail


async def refuse(response: aiohttp.ClientResponse) -> None:
    message = (await response.json())["error"]["message"]
    raise ValueError(message) if response.status == 400 else HTTPException(response.status, message)


class GenerateReqInput:
    def __init__(self, **fields: Any) -> None:
        self.fields = fields


def request_type(name: str, **fields: Any) -> Any:
    known = [(field, kind, *default) for field, (kind, *default) in fields.items()]
    return msgspec.defstruct(name, known, array_like=True, tag=True, kw_only=True)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of sglang that are needed for requests."""
    version = {"weight_version": (str | None, None), "flush_cache": (bool, True)}
    group = {"group_name": (str, "weight_update_group")}
    types: Any = ModuleType("sglang.srt.managers.io_struct")
    types.GenerateReqInput = GenerateReqInput
    requests: dict[str, dict[str, Any]] = {
        "AbortReq": {"rid": (str, ""), "abort_all": (bool, False)},
        "PauseGenerationReqInput": {"mode": (str, "abort")},
        "ContinueGenerationReqInput": {},
        "UpdateWeightFromDiskReqInput": {"model_path": (str,), "load_format": (str | None, None), **version},
        "UpdateWeightsFromTensorReqInput": {
            "serialized_named_tensors": (list[str],), "load_format": (str | None, None), **version
        },
        "UpdateWeightsFromDistributedReqInput": {
            "names": (list[str],), "dtypes": (list[str],), "shapes": (list[list[int]],), **group, **version
        },
        "InitWeightsUpdateGroupReqInput": {
            "master_address": (str,), "master_port": (int,), "rank_offset": (int,), "world_size": (int,),
            "backend": (str, "nccl"), **group,
        },
        "DestroyWeightsUpdateGroupReqInput": group,
        "BeginWeightUpdateReqInput": {},
        "EndWeightUpdateReqInput": {},
        "UpdateWeightVersionReqInput": {"new_version": (str,), "abort_all_requests": (bool, True)},
        "ReleaseMemoryOccupationReqInput": {"tags": (list[str] | None, None)},
        "ResumeMemoryOccupationReqInput": {"tags": (list[str] | None, None)},
    }  # fmt: skip
    for name, fields in requests.items():
        setattr(types, name, request_type(name, **fields))
    contract: Any = ModuleType("sglang.srt.entrypoints.api_contract")
    contract.generate_contract_error = lambda body: None if body.get("priority", 0) != "high" else "invalid type"
    monkeypatch.setitem(sys.modules, types.__name__, types)
    monkeypatch.setitem(sys.modules, contract.__name__, contract)


@pytest_asyncio.fixture
async def worker(modules: None) -> AsyncIterator[FakeWorker]:
    async with FakeWorker(routed_experts=True) as worker:
        yield worker


def stand_in(worker: FakeWorker) -> Any:
    return SimpleNamespace(
        tokenizer_manager=Manager(worker),
        server_args=SimpleNamespace(model_path="fake-model", tokenizer_path=None),
        get_model_info=lambda: {"model_path": "fake-model", "weight_version": worker.weight_version},
    )


def sample_of(**fields: Any) -> Sample:
    return Sample(**{"index": 3, "group_index": 0, "rollout_id": 3, "tokens": PROMPT, **fields})


# Generation


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_it_generates_as_over_http(worker: FakeWorker, stream: bool) -> None:
    options: dict[str, Any] = {
        "stream": stream, "routed_experts": (3, 2), "fields": {"return_sampling_mask": True}
    }  # fmt: skip
    samples = []
    for engine in (SGLangEngine(worker.url, **options), SGLangEngine(in_process=stand_in(worker), **options)):
        async with engine:
            samples.append(sample_of())
            await Generate(engine, GREEDY)(samples[-1])
    over_http, here = samples
    assert here.tokens == over_http.tokens == PROMPT + expected(PROMPT, 12)
    assert here.rollout_log_probs == [log_prob(token) for token in expected(PROMPT, 12)]
    assert here.rollout_routed_experts.tolist() == over_http.rollout_routed_experts.tolist()
    for name in ("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "weight_versions", "prefix_cache_info"):
        assert getattr(here, name) == getattr(over_http, name)
    for sample in samples:
        del sample.metadata["generation"]["id"]
    assert here.metadata == over_http.metadata


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_abort_gives_what_there_is(worker: FakeWorker, stream: bool) -> None:
    worker.allow(5)
    async with SGLangEngine(in_process=stand_in(worker), stream=stream) as engine, asyncio.TaskGroup() as tasks:
        sample = sample_of()
        answer = tasks.create_task(engine.generate(sample, GREEDY))
        await worker.until(lambda: any(len(request.tokens) == 5 for request in worker.running.values()))
        await engine.abort([sample])
    assert answer.result().status is SampleStatus.ABORTED
    assert answer.result().tokens == expected(PROMPT, 5)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_cancelling_leaves_nothing_behind(worker: FakeWorker, stream: bool) -> None:
    worker.allow(5)
    here = stand_in(worker)
    async with SGLangEngine(in_process=here, stream=stream) as engine:
        answer = asyncio.create_task(engine.generate(sample_of(), GREEDY))
        await worker.until(lambda: worker.running)
        answer.cancel()
        await asyncio.wait([answer])
        assert here.tokenizer_manager.open == 0
        await worker.until(lambda: not worker.running)
        assert worker.finished == {"abort": 1}


@pytest.mark.asyncio
async def test_what_the_engine_refuses_is_said_in_its_words(worker: FakeWorker) -> None:
    async with SGLangEngine(in_process=stand_in(worker)) as engine:
        with pytest.raises(RequestRefused, match=r"sample 3: sglang.Engine/generate answered 400: .*longer than"):
            await engine.generate(sample_of(tokens=[5] * 4097), GREEDY)
        assert len((await engine.generate(sample_of(), GREEDY)).tokens) == 12
    async with SGLangEngine(in_process=stand_in(worker), fields={"priority": "high"}) as engine:
        with pytest.raises(RequestRefused, match="answered 400: invalid type"):
            await engine.generate(sample_of(), GREEDY)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_what_fails_is_asked_again(worker: FakeWorker, stream: bool) -> None:
    worker.faults.extend([Status(503, "busy"), Status(500, "broken")])
    engine = SGLangEngine(in_process=stand_in(worker), stream=stream, backoff=0.001)
    completion = await engine.generate(sample_of(), GREEDY)
    assert completion.meta["failed_attempts"] == [
        "sglang.Engine/generate answered 503: busy",
        "sglang.Engine/generate answered 500: broken",
    ]
    worker.faults.append(Edit(lambda reply: reply["meta_info"].update(completion_tokens=99) or reply))
    engine = SGLangEngine(in_process=stand_in(worker), stream=stream, attempts=1)
    with pytest.raises(WorkersUnavailable, match="completion_tokens announces 99"):
        await engine.generate(sample_of(), GREEDY)


@pytest.mark.asyncio
async def test_numbers_of_numpy_have_a_json_form_and_other_objects_are_named(modules: None) -> None:
    import numpy as np

    replies: list[Any] = [{"a": np.float32(0.5), "b": np.arange(3), 7: (1, None)}, {"a": object()}]

    async def generate_request(request: Any) -> AsyncIterator[Any]:
        yield replies.pop(0)

    manager = SimpleNamespace(event_loop=None, auto_create_handle_loop=lambda: None, generate_request=generate_request)
    async with InProcess(SimpleNamespace(tokenizer_manager=manager)) as client:
        reply = await client.post(f"{ADDRESS}/generate", b"{}")
        assert json.loads(reply) == {"a": 0.5, "b": [0, 1, 2], "7": [1, None]}
        with pytest.raises(AttemptFailed, match="answered 500: object has no JSON form"):
            await client.post(f"{ADDRESS}/generate", b"{}")


# Weights


@pytest.mark.asyncio
async def test_a_response_that_spans_an_update_names_both_versions(worker: FakeWorker) -> None:
    worker.allow(5)
    async with SGLangEngine(in_process=stand_in(worker)) as engine, asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(engine.generate(sample_of(), GREEDY))
        await worker.until(lambda: any(len(request.tokens) == 5 for request in worker.running.values()))
        await engine.update_weights_from_disk("/checkpoints/7", "7", "in_place")
        worker.allow(None)
    assert answer.result().weight_versions == [WeightSpan("default", 0, 5), WeightSpan("7", 5, 12)]
    assert worker.weights == "/checkpoints/7"


@pytest.mark.asyncio
async def test_every_call_reaches_the_engine(worker: FakeWorker) -> None:
    async with SGLangEngine(in_process=stand_in(worker)) as engine:
        await engine.init_weights_update_group("127.0.0.1", 29500, 2, backend="gloo")
        async with engine.updating_weights("7") as update:
            await update.from_distributed(["a"], ["float32"], [[2, 3]])
            await update.from_tensors(["QUJD"])
        await engine.destroy_weights_update_group()
        await engine.set_weight_version("8")
        await engine.release_memory(["kv_cache"])
        assert worker.released == {"kv_cache"}
        await engine.resume_memory(["kv_cache"])
    assert [(received.path, received.body.get("weight_version")) for received in worker.received] == [
        ("/init_weights_update_group", None),
        ("/pause_generation", None),
        ("/begin_weight_update", None),
        ("/update_weights_from_distributed", "7 (in part)"),
        ("/update_weights_from_tensor", "7 (in part)"),
        ("/end_weight_update", None),
        ("/update_weight_version", None),
        ("/continue_generation", None),
        ("/destroy_weights_update_group", None),
        ("/update_weight_version", None),
        ("/release_memory_occupation", None),
        ("/resume_memory_occupation", None),
    ]
    assert engine.weight_version == worker.weight_version == "8"
    assert worker.paused is None


@pytest.mark.asyncio
async def test_what_is_wrong_never_reaches_the_scheduler(worker: FakeWorker) -> None:
    async with SGLangEngine(in_process=stand_in(worker)) as engine:
        with pytest.raises(RequestRefused, match="update_weights_from_disk answered 400: Failed to get model path"):
            await engine.update_weights_from_disk("nope", "7")
        received = len(worker.received)
        with pytest.raises(RequestRefused, match=r"update_weight_version answered 400: Expected `str`, got `int`"):
            await engine.set_weight_version(7)  # type: ignore[arg-type]
        assert len(worker.received) == received


@pytest.mark.asyncio
async def test_memory_is_given_back_when_the_engine_is_idle(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = stand_in(worker)
    async with SGLangEngine(in_process=here) as engine:
        here.tokenizer_manager.busy = 1
        await engine.release_memory(["kv_cache"])
        assert worker.released == {"kv_cache"}
        here.tokenizer_manager.busy = 1000
        monkeypatch.setattr(fleet, "IDLE_SECONDS", 0.0)
        with pytest.raises(RequestRefused, match="requests are under way: end them, or pause generation"):
            await engine.release_memory(["weights"])
        assert worker.released == {"kv_cache"}


@pytest.mark.asyncio
async def test_setting_a_version_can_abort_what_runs(worker: FakeWorker) -> None:
    worker.allow(2)
    async with InProcess(stand_in(worker)) as client, asyncio.TaskGroup() as tasks:
        body = {"rid": "1", "input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True}
        answer = tasks.create_task(client.post(f"{ADDRESS}/generate", json.dumps(body).encode()))
        await worker.until(lambda: worker.running)
        await client.post(f"{ADDRESS}/update_weight_version", b'{"new_version": "9"}')
        assert json.loads(await answer)["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.asyncio
async def test_a_path_that_has_no_counterpart_says_so(worker: FakeWorker) -> None:
    async with InProcess(stand_in(worker)) as client:
        for ask in (client.post(f"{ADDRESS}/start_profile", b"{}"), client.get(f"{ADDRESS}/health")):
            with pytest.raises(RequestRefused, match="an engine in this process has no such path"):
                await ask


# Its place


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (object(), "object is no sglang.Engine that takes requests$"),
        (SimpleNamespace(tokenizer_manager=None), "no sglang.Engine that takes requests; of several nodes"),
    ],
)
def test_what_is_no_engine_is_refused(engine: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        SGLangEngine(in_process=engine)


def test_it_is_one_of_four_addresses(modules: None) -> None:
    with pytest.raises(ValueError, match=r"give one of url, urls=.*, router= and in_process="):
        SGLangEngine("http://a", in_process=stand_in(FakeWorker()))


def test_it_stays_with_its_first_event_loop(modules: None) -> None:
    engine = SGLangEngine(in_process=stand_in(FakeWorker()))

    async def use() -> None:
        async with engine:
            pass

    anyio.run(use)
    with pytest.raises(RuntimeError, match=r"belongs to another event loop.*use it in one anyio.run"):
        anyio.run(use)


@pytest.mark.asyncio
async def test_it_takes_part_in_a_stream(worker: FakeWorker) -> None:
    prompts = Prompts([Sample(prompt="p", tokens=Tokens(PROMPT))] * 2, group_size=2)
    engine = SGLangEngine(in_process=stand_in(worker))
    async with Pipeline(prompts, [Generate(engine, GREEDY)], BatchSpec(2)) as pipeline:
        [batch] = [batch async for batch in pipeline.rollouts(0, 1)]
    assert [sample.tokens for sample in batch.samples] == [PROMPT + expected(PROMPT, 12)] * 4


# The real one


@sglang_real.MARKS[0]
@sglang_real.MARKS[1]
def test_the_real_engine(real_models: list[Path], tmp_path: Path) -> None:
    """One start for all, in a process of its own: the engine takes over signals, and ends the process when it fails."""
    lines = output_of(tmp_path, sglang_servers.STUBS / "in_process.py", *real_models)
    real = shape(json.loads(lines[-1]))
    fake = shape(anyio.run(reply_of_the_scripted_worker))
    assert fake == {path: kind for path, kind in real.items() if path in fake}
    assert not set(real) - set(fake), "over HTTP there are none of these"


@sglang_real.MARKS[0]
@sglang_real.MARKS[1]
def test_the_example_runs_on_the_real_engine(real_models: list[Path], tmp_path: Path) -> None:
    lines = output_of(tmp_path, ROOT / "examples" / "sglang" / "in_process.py", real_models[0], json.dumps(CPU))
    shown = [line for line in lines if "kept 4/4 of" in line]
    assert [line.rpartition("; weights ")[2] for line in shown] == ["default", "1", "2"]


def output_of(folder: Path, *program: Path | str) -> list[str]:
    """The lines that a program prints which runs in `folder`, where SGLang is."""
    assert sglang_servers.PYTHON is not None
    environment = sglang_servers.environment()
    environment["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    command = [sglang_servers.PYTHON, *map(str, program)]
    # Into files: torch's manager of shared memory outlives the program, and would hold a pipe open.
    with (folder / "output").open("w") as output, (folder / "errors").open("w") as errors:
        ended = subprocess.run(command, env=environment, cwd=folder, stdout=output, stderr=errors, timeout=600)
    assert ended.returncode == 0, (folder / "errors").read_text()[-4000:]
    return (folder / "output").read_text().splitlines()


async def reply_of_the_scripted_worker() -> Any:
    async with FakeWorker() as worker:
        return json.loads((await sglang_real.asked(worker.url, "/generate", REQUEST))[1])
