from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from eventbus import BatchSpec, Drop, Pipeline, Prompts, Sample
from eventbus.testing import run_stage
from middleware import Generate, Tokenize
from tests.streams import batches, engine

pytestmark = pytest.mark.anyio

CHAT = [{"role": "user", "content": "2+2="}]
TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool['name'] }}>{% endfor %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ opening or 'assistant:' }}{% endif %}"
)


def byte_level() -> Tokenizer:
    """Knows every byte, and puts `<s>` (1) in front of a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model's tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    byte_level().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return str(folder)


def text(ids: Any) -> str:
    return byte_level().decode(list(ids), skip_special_tokens=False)


async def tokens_of(stage: Tokenize, prompt: Any) -> list[int]:
    sample = await run_stage(stage, Sample(index=0, prompt=prompt))
    assert isinstance(sample, Sample)
    return sample.tokens.tolist()


async def test_a_string_gets_the_special_tokens_of_the_model(folder: str) -> None:
    assert text(await tokens_of(Tokenize(folder), "2+2=")) == "<s>2+2="
    assert text(await tokens_of(Tokenize(folder, special_tokens=False), "2+2=")) == "2+2="


async def test_messages_go_through_the_chat_template(folder: str) -> None:
    assert text(await tokens_of(Tokenize(folder), CHAT)) == "user: 2+2=\nassistant:"
    stage = Tokenize(folder, template={"opening": "a>"}, tools=[{"name": "search"}])
    assert text(await tokens_of(stage, CHAT)) == "<search>user: 2+2=\na>"


async def test_a_tokenizer_of_the_tokenizers_package() -> None:
    assert text(await tokens_of(Tokenize(byte_level()), "the fox")) == "<s>the fox"
    with pytest.raises(TypeError, match="sample 0: the prompt is a list of messages, and Tokenizer has no chat templ"):
        await Tokenize(byte_level())(Sample(index=0, prompt=CHAT))


async def test_a_function() -> None:
    async def later(prompt: Any) -> list[int]:
        return [len(prompt)]

    assert await tokens_of(Tokenize(lambda prompt: [ord(character) for character in prompt]), "ab") == [97, 98]
    assert await tokens_of(Tokenize(later), "abc") == [3]


async def test_a_sample_with_tokens_passes() -> None:
    sample = Sample(prompt="ab", tokens=[7])  # type: ignore[arg-type]
    assert await Tokenize(lambda prompt: [0])(sample) is None
    assert sample.tokens == [7]


async def test_siblings_are_read_once_and_share_nothing() -> None:
    calls: list[Any] = []

    def counting(prompt: Any) -> list[int]:
        calls.append(prompt)
        return [1, 2]

    stage = Tokenize(counting)
    samples = [Sample(prompt="ab"), Sample(prompt="ab"), Sample(prompt="cd"), Sample(prompt="ab")]
    for sample in samples:
        await stage(sample)
    samples[0].tokens += [3]
    assert calls == ["ab", "cd", "ab"]
    assert samples[1].tokens == [1, 2]


async def test_a_prompt_that_is_too_long_leaves_the_stream_and_the_others_keep_their_order() -> None:
    stage = Tokenize(lambda prompt: [0] * len(prompt), max_length=3)
    assert await stage(Sample(prompt="abc")) is None
    assert await stage(Sample(prompt="abcd")) == Drop("prompt_too_long")
    prompts = Prompts(["a", "abcd", "abc", "abcde", "ab"], group_size=2)
    pipeline = Pipeline(prompts, [stage, Generate(engine())], BatchSpec(groups=3, over_sampling=5))
    [batch] = await batches(pipeline)
    assert [group.prompt for group in batch.groups] == ["a", "abc", "ab"]
    assert batch.summary.dropped == {"prompt_too_long": 2}


async def test_what_gives_no_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="sample 4: the prompt '' has no tokens"):
        await Tokenize(list)(Sample(index=4, prompt=""))
    with pytest.raises(ValueError, match="max_length is 0, it must be at least 1"):
        Tokenize(list, max_length=0)


async def test_building_it_opens_nothing(tmp_path: Path) -> None:
    stage = Tokenize(str(tmp_path / "missing"))
    with pytest.raises((OSError, ValueError)), stage:
        pass


def test_the_name_is_read_when_the_stream_opens(folder: str) -> None:
    with Tokenize(folder) as stage:
        assert not isinstance(stage.tokenizer, str)
