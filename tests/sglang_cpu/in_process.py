"""Uses an `sglang.Engine` in this process as the tests of real servers use those.

`python in_process.py MODEL OTHER`, two models that differ in their weights alone. It ends with an error where something
is not as over HTTP; else the last line that it prints is one reply, as JSON.
"""

import asyncio
import sys
from typing import Any

import anyio
import msgspec
import sglang
import torch
from safetensors.torch import load_file
from sglang.srt.utils import MultiprocessingSerializer
from transformers import AutoModelForCausalLM

from backends.sglang import SGLangEngine
from backends.sglang.inprocess import ADDRESS, InProcess
from eventbus import BatchSpec, Pipeline, Prompts, Sample, SampleStatus
from eventbus.columns import Tokens
from middleware import Generate

PROMPT = [5, 6, 7]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
SPANS = {"temperature": 1.0, "max_new_tokens": 640, "ignore_eos": True}
LONG = SPANS | {"max_new_tokens": 4000}
"""Takes 10 s and more: it is never waited for."""


def sample_of(tokens: list[int] = PROMPT, number: int = 0) -> Sample:
    return Sample(index=number, group_index=0, rollout_id=number, tokens=Tokens(tokens))


async def check(raw: Any, models: list[str]) -> bytes:
    async with SGLangEngine(in_process=raw) as engine, SGLangEngine(in_process=raw, stream=True) as streaming:
        await log_probs_are_those_of_the_model(engine, models[0])
        await streaming_equals_non_streaming(engine, streaming)
        for one in (engine, streaming):
            await abort_gives_what_there_is(one, raw)
            await cancelling_leaves_nothing_behind(one, raw)
            await a_response_spans_an_update(one, raw, models, "in_place")
        await a_response_spans_an_update(engine, raw, models, "retract")
        await a_response_spans_an_update(streaming, raw, models, "abort")
        await weights_come_as_tensors(engine, models)
        await what_is_wrong_is_refused(engine, raw)
        await engine.release_memory(["kv_cache"])
        await engine.resume_memory(["kv_cache"])
        await engine.set_weight_version("9")
        assert versions(await engine.generate(sample_of(), GREEDY)) == ["9"]
    await it_takes_part_in_a_stream(raw)
    return await one_reply(raw)


async def log_probs_are_those_of_the_model(engine: SGLangEngine, path: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    samples = [sample_of(list(range(5 + n, 25 + 2 * n)), n) for n in range(4)]
    await asyncio.gather(*(Generate(engine, GREEDY)(sample) for sample in samples))
    for sample in samples:
        assert sample.response_length == len(sample.rollout_log_probs or ()) == 12
        with torch.no_grad():
            log_probs = model(torch.tensor([sample.tokens.tolist()])).logits[0].log_softmax(-1)
        for i, got in enumerate(sample.rollout_log_probs or ()):
            at = sample.prompt_length + i
            assert abs(float(log_probs[at - 1, sample.tokens[at]]) - got) < 1e-4
            assert int(log_probs[at - 1].argmax()) == sample.tokens[at]


async def streaming_equals_non_streaming(engine: SGLangEngine, streaming: SGLangEngine) -> None:
    whole, streamed = await engine.generate(sample_of(), GREEDY), await streaming.generate(sample_of(), GREEDY)
    assert (streamed.tokens, streamed.text, streamed.status) == (whole.tokens, whole.text, whole.status)
    assert versions(streamed) == versions(whole) == ["default"]


async def until_it_has_tokens(raw: Any, answer: asyncio.Task[Any]) -> None:
    """What does not stream has them in pieces of 50."""
    while not any(state.output_ids for state in raw.tokenizer_manager.rid_to_state.values()):
        assert not answer.done(), "it has ended before it was seen to run"
        await asyncio.sleep(0.01)


async def until_nothing_runs(raw: Any) -> None:
    while raw.tokenizer_manager.rid_to_state:
        await asyncio.sleep(0.01)


async def abort_gives_what_there_is(engine: SGLangEngine, raw: Any) -> None:
    sample = sample_of()
    answer = asyncio.create_task(engine.generate(sample, LONG))
    await until_it_has_tokens(raw, answer)
    await engine.abort([sample])
    completion = await answer
    assert completion.status is SampleStatus.ABORTED
    assert 0 < len(completion.tokens) == len(completion.log_probs or ()) < 4000
    await until_nothing_runs(raw)


async def cancelling_leaves_nothing_behind(engine: SGLangEngine, raw: Any) -> None:
    answer = asyncio.create_task(engine.generate(sample_of(), LONG))
    await until_it_has_tokens(raw, answer)
    answer.cancel()
    await asyncio.wait([answer])
    await until_nothing_runs(raw)


async def a_response_spans_an_update(engine: SGLangEngine, raw: Any, models: list[str], pause: Any) -> None:
    answer = asyncio.create_task(engine.generate(sample_of(), SPANS))
    await until_it_has_tokens(raw, answer)
    await engine.update_weights_from_disk(models[1], "7", pause)
    completion = await answer
    await engine.update_weights_from_disk(models[0], "default")
    assert len(completion.tokens) == 640
    before, after = completion.weight_versions
    assert (before.version, after.version) == ("default", "7")
    assert 0 == before.start < before.end == after.start < after.end == 640


async def weights_come_as_tensors(engine: SGLangEngine, models: list[str]) -> None:
    await engine.update_weights_from_disk(models[1], "disk")
    wanted = await engine.generate(sample_of(), GREEDY)
    await engine.update_weights_from_disk(models[0], "default")
    tensors = list(load_file(f"{models[1]}/model.safetensors").items())
    async with engine.updating_weights("tensors") as update:
        await update.from_tensors([MultiprocessingSerializer.serialize(tensors, output_str=True)])
    completion = await engine.generate(sample_of(), GREEDY)
    assert completion.tokens == wanted.tokens
    assert versions(completion) == ["tensors"]
    await engine.update_weights_from_disk(models[0], "default")


async def what_is_wrong_is_refused(engine: SGLangEngine, raw: Any) -> None:
    await refused(engine.generate(sample_of([5, 512]), GREEDY), "the token id 512 is not in the vocabulary of 512")
    await refused(
        engine.generate(sample_of([5] * 4097), GREEDY), "answered 400: The input (4097 tokens) is longer than"
    )
    await refused(engine.update_weights_from_disk("/nope", "7"), "sglang.Engine/update_weights_from_disk answered 400")
    await refused(engine.set_weight_version(7), "answered 400: Expected `str`, got `int`")  # type: ignore[arg-type]
    typed = SGLangEngine(in_process=raw, fields={"top_logprobs_num": "3"})
    await refused(typed.generate(sample_of(), GREEDY), "answered 400: invalid type")
    assert len((await engine.generate(sample_of(), GREEDY)).tokens) == 12


async def refused(answer: Any, words: str) -> None:
    said = "nothing"
    try:
        await answer
    except ValueError as error:  # RequestRefused is one
        said = str(error)
    assert words in said, said


async def it_takes_part_in_a_stream(raw: Any) -> None:
    prompts = Prompts([Sample(prompt="p", tokens=Tokens([5, 6, 7 + n])) for n in range(12)], group_size=4)
    stages = [Generate(SGLangEngine(in_process=raw), GREEDY)]
    async with Pipeline(prompts, stages, BatchSpec(4, over_sampling=6)) as pipeline:
        first, second = [batch async for batch in pipeline.rollouts(0, 2)]
    for batch in (first, second):
        assert [sample.response_length for sample in batch.samples] == [12] * 16


async def one_reply(raw: Any) -> bytes:
    async with InProcess(raw) as client:
        body = {"rid": "contract", "input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True}
        return await client.post(f"{ADDRESS}/generate", msgspec.json.encode(body))


def versions(completion: Any) -> list[str]:
    return [span.version for span in completion.weight_versions]


def main() -> None:
    raw = sglang.Engine(
        model_path=sys.argv[1],
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        disable_overlap_schedule=True,
        skip_server_warmup=True,
        context_length=4096,
        max_total_tokens=65536,
    )
    try:
        print(anyio.run(check, raw, sys.argv[1:]).decode())
        said = "nothing"
        try:
            anyio.run(one_reply, raw)
        except RuntimeError as error:
            said = str(error)
        assert "belongs to another event loop" in said, said
    finally:
        raw.shutdown()


if __name__ == "__main__":
    main()
