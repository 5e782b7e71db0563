from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventbus import Completion, Sample, SampleStatus
from eventbus.columns import Tokens
from eventbus.sample import WeightSpan
from middleware.generate import append

pytest.importorskip("torch", reason="needs rolloutbus[embedded]")

import torch

from backends.embedded import EmbeddedEngine
from backends.embedded.model import Cache, Transformer

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_thread")]


GREEDY = {"temperature": 0.0, "max_new_tokens": 12}


def small(**options: Any) -> EmbeddedEngine:
    """Of random weights that are far from uniform, so that greedy texts differ and no two logits are close."""
    engine = EmbeddedEngine(**{"vocabulary": "0123456789+=", "context": 32, "width": 16, "heads": 2, **options})
    with torch.random.fork_rng():
        torch.manual_seed(7)
        for parameter in engine.model.parameters():
            torch.nn.init.normal_(parameter, std=0.7)
        engine.model.norm.bias.data.fill_(2.0)
        engine.model.head.weight.data -= engine.model.head.weight.data.mean(1, keepdim=True)
        engine.model.head.weight.data[engine.eos] = -3.0  # never drawn
    return engine


def likelihood(engine: EmbeddedEngine, tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-prob of each token but the first, by one pass without a cache."""
    with torch.no_grad():
        logits = engine.model(torch.tensor([list(tokens)]))[0, :-1] / temperature
        log_probs: torch.Tensor = logits.log_softmax(-1).gather(-1, torch.tensor(list(tokens))[1:, None])[:, 0]
        return log_probs


async def generate_all(engine: EmbeddedEngine, samples: Sequence[Sample], sampling: dict[str, Any]) -> list[Completion]:
    completions: dict[int, Completion] = {}

    async def generate(position: int) -> None:
        completions[position] = await engine.generate(samples[position], sampling)

    async with anyio.create_task_group() as tasks:
        for position in range(len(samples)):
            tasks.start_soon(generate, position)
    return [completions[position] for position in range(len(samples))]


class Paced:
    """Requests in the background, and an engine that stands still but for the steps that the test asks for.

    When the body of `run` ends, it goes on to the end.
    """

    def __init__(self, engine: EmbeddedEngine, samples: Sequence[Sample], sampling: dict[str, Any]) -> None:
        self.engine = engine
        self.samples = samples
        self.sampling = sampling
        self.completions: dict[int, Completion] = {}
        self.scopes = [anyio.CancelScope() for _ in samples]
        self.stepped = 0
        self.after: dict[int, Callable[[], None]] = {}
        """What to do right after a step, by its number."""

    async def steps(self, count: int) -> None:
        """Exactly so many steps of a batch."""
        stopped = anyio.Event()

        def stop() -> None:
            self.engine._paused = True
            stopped.set()

        self.after[self.stepped + count] = stop
        await self.engine.resume()
        await stopped.wait()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        step = self.engine._step

        def counted() -> None:
            step()
            self.stepped += 1
            self.after.pop(self.stepped, int)()

        self.engine._step = counted  # type: ignore[method-assign]
        await self.engine.pause()
        async with anyio.create_task_group() as tasks:
            for position in range(len(self.samples)):
                tasks.start_soon(self.generate, position)
            yield
            await self.engine.resume()

    async def generate(self, position: int) -> None:
        with self.scopes[position]:
            self.completions[position] = await self.engine.generate(self.samples[position], self.sampling)


def prompts(*texts: str) -> list[Sample]:
    return [Sample(prompt=text, index=index, rollout_id=index) for index, text in enumerate(texts)]


# The model


@given(st.lists(st.integers(0, 4), min_size=1, max_size=10), st.data())
def test_cache_gives_the_logits_of_a_full_pass(tokens: list[int], data: st.DataObject) -> None:
    torch.manual_seed(0)
    model = Transformer(vocabulary=5, context=10, width=8, layers=2, heads=2)
    cut = data.draw(st.integers(0, len(tokens)))
    cache = Cache.empty(rows=1, context=10, width=8, layers=2, heads=2)
    parts = [range(cut), *([position] for position in range(cut, len(tokens)))]
    logits = [
        model(torch.tensor([tokens])[:, list(part)], torch.tensor([list(part)]), cache) for part in parts if len(part)
    ]
    torch.testing.assert_close(torch.cat(logits, 1), model(torch.tensor([tokens])), atol=1e-5, rtol=0)


def test_padding_changes_nothing() -> None:
    model = Transformer(vocabulary=5, context=10, width=8, layers=2, heads=2)
    torch.testing.assert_close(model(torch.tensor([[1, 2, 0, 0]]))[:, :2], model(torch.tensor([[1, 2]])))


def test_width_must_be_a_multiple_of_heads() -> None:
    with pytest.raises(ValueError, match="width is 10, it must be a multiple of heads=4"):
        Transformer(vocabulary=5, context=10, width=10, layers=2, heads=4)


# What a completion holds


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
async def test_log_probs_are_those_of_the_tempered_distribution(temperature: float) -> None:
    engine = small()
    sample = Sample(prompt="12+34=", rollout_id=0)
    completion = await engine.generate(sample, {"temperature": temperature, "max_new_tokens": 12})
    tokens = engine.tokenize("12+34=") + list(completion.tokens)
    expected = likelihood(engine, tokens, temperature)[5:]
    assert completion.log_probs == pytest.approx(expected.tolist(), abs=1e-4)


async def test_temperature_0_takes_the_most_likely_token() -> None:
    engine = small()
    completion = await engine.generate(Sample(prompt="12="), GREEDY)
    tokens = engine.tokenize("12=")
    for token in completion.tokens:
        assert token == int(engine.model(torch.tensor([tokens]))[0, -1].argmax())
        tokens.append(token)
    assert completion.log_probs == pytest.approx(likelihood(engine, tokens)[2:].tolist(), abs=1e-4)


async def test_tokens_are_drawn_by_their_probabilities() -> None:
    engine = EmbeddedEngine(vocabulary="ab", context=4, width=4, heads=1)
    engine.model.head.weight.data *= 200
    samples = [Sample(prompt="a", rollout_id=id) for id in range(2000)]
    completions = await generate_all(engine, samples, {"max_new_tokens": 1})
    probabilities = engine.model(torch.tensor([[0]]))[0, 0].softmax(-1)
    drawn = torch.bincount(torch.tensor([c.tokens[0] for c in completions]), minlength=3) / len(samples)
    torch.testing.assert_close(drawn, probabilities.detach(), atol=0.04, rtol=0)


async def test_eos_completes_and_is_no_text() -> None:
    engine = small()
    engine.model.head.weight.data[engine.eos] = 3.0
    completion = await engine.generate(Sample(prompt="12="), GREEDY)
    assert completion.tokens == [engine.eos]
    assert (completion.text, completion.status) == ("", SampleStatus.COMPLETED)


async def test_budget_truncates() -> None:
    completion = await small().generate(Sample(prompt="12="), {"max_new_tokens": 3, "temperature": 0})
    assert (len(completion.tokens), len(completion.text)) == (3, 3)
    assert completion.status is SampleStatus.TRUNCATED


async def test_without_a_budget_the_context_is_the_limit() -> None:
    completion = await small(context=10).generate(Sample(prompt="12="), {"temperature": 0})
    assert (len(completion.tokens), completion.status) == (7, SampleStatus.TRUNCATED)


@pytest.mark.parametrize("several", [False, True])
async def test_stop_character_completes_and_is_no_text(several: bool) -> None:
    engine = small()
    whole = await engine.generate(Sample(prompt="12="), GREEDY)
    stop = whole.text[-1]
    completion = await engine.generate(Sample(prompt="12="), {**GREEDY, "stop": [stop] if several else stop})
    assert completion.text == whole.text[: whole.text.index(stop)]
    assert list(completion.tokens) == list(whole.tokens[: len(completion.text) + 1])
    assert completion.status is SampleStatus.COMPLETED


async def test_tokens_go_before_the_prompt() -> None:
    engine = small()
    sample = Sample(prompt="not in the vocabulary", tokens=Tokens(engine.tokenize("12=")))
    assert await engine.generate(sample, GREEDY) == await engine.generate(Sample(prompt="12="), GREEDY)


@pytest.mark.parametrize("cut", [1, 5, 11])
async def test_a_part_of_a_response_goes_on_as_if_unbroken(cut: int) -> None:
    engine = small()
    whole = await engine.generate(Sample(prompt="12="), GREEDY)
    sample = Sample(prompt="12=", tokens=Tokens(engine.tokenize("12=")))
    append(sample, await engine.generate(sample, {**GREEDY, "max_new_tokens": cut}))
    append(sample, await engine.generate(sample, {**GREEDY, "max_new_tokens": 12 - cut}))
    assert sample.response == whole.text
    assert sample.rollout_log_probs == pytest.approx(whole.log_probs, abs=1e-4)


# The batch


async def test_a_batch_gives_what_single_requests_give() -> None:
    engine = small()
    samples = prompts("1=", "22+3=", "123456789=", "+", "1=")
    together = await generate_all(engine, samples, GREEDY)
    for sample, completion in zip(samples, together, strict=True):
        alone = await engine.generate(sample, GREEDY)
        assert completion.tokens == alone.tokens
        assert completion.log_probs == pytest.approx(alone.log_probs, abs=1e-4)


@pytest.mark.parametrize("max_batch", [1, 2, 5])
async def test_requests_beyond_the_batch_wait(max_batch: int) -> None:
    samples = prompts("1=", "22+3=", "123456789=", "+", "12=")
    budgets = [3, 9, 1, 12, 5]
    engine, rows = small(max_batch=max_batch), []
    for budget, sample in zip(budgets, samples, strict=True):
        sample.metadata["alone"] = await small().generate(sample, {"temperature": 0.0, "max_new_tokens": budget})
    step = engine._step

    def watched() -> None:
        rows.append(engine.in_flight)
        step()
        assert len(engine._running) <= max_batch

    engine._step = watched  # type: ignore[method-assign]

    async def check(sample: Sample, budget: int) -> None:
        completion = await engine.generate(sample, {"temperature": 0.0, "max_new_tokens": budget})
        assert completion.tokens == sample.metadata["alone"].tokens

    async with anyio.create_task_group() as tasks:
        for sample, budget in zip(samples, budgets, strict=True):
            tasks.start_soon(check, sample, budget)
    assert max(rows) == 5
    assert engine.in_flight == 0


async def test_requests_that_come_together_share_their_steps() -> None:
    engine = small()
    paced = Paced(engine, prompts(*["12="] * 50), GREEDY)
    async with paced.run():
        pass
    assert paced.stepped == 12


async def test_a_request_joins_a_running_batch() -> None:
    engine = small()
    alone = await engine.generate(Sample(prompt="7+7="), GREEDY)
    paced = Paced(engine, prompts("12="), GREEDY)
    async with paced.run():
        await paced.steps(4)
        await engine.resume()
        late = await engine.generate(Sample(prompt="7+7=", rollout_id=9), GREEDY)
    assert late.tokens == alone.tokens
    assert paced.stepped == 16


# Determinism


async def test_a_response_does_not_depend_on_its_company() -> None:
    samples = prompts("1=", "22+3=", "+")
    first = await generate_all(small(), samples, {"max_new_tokens": 12})
    second = await generate_all(small(), samples[::-1], {"max_new_tokens": 12})
    assert [c.tokens for c in first] == [c.tokens for c in second[::-1]]


async def test_another_engine_seed_draws_another_response() -> None:
    first, second = [await small(seed=seed).generate(prompts("1=")[0], {}) for seed in (0, 1)]
    assert first.tokens != second.tokens


async def test_executions_of_one_prompt_differ() -> None:
    numbered = await generate_all(small(), prompts("1=", "1="), {})
    unnumbered = await generate_all(small(), [Sample(prompt="1="), Sample(prompt="1=")], {})
    assert numbered[0].tokens != numbered[1].tokens
    assert unnumbered[0].tokens != unnumbered[1].tokens


async def test_a_request_seed_decides_alone() -> None:
    first, second = await generate_all(small(), prompts("1=", "1="), {"seed": 3})
    assert first.tokens == second.tokens


def test_building_an_engine_leaves_the_global_random_state() -> None:
    before = torch.random.get_rng_state()
    EmbeddedEngine(seed=5)
    assert torch.equal(before, torch.random.get_rng_state())


async def test_steps_leave_the_number_of_threads() -> None:
    torch.set_num_threads(2)
    await small().generate(Sample(prompt="1="), {})
    assert torch.get_num_threads() == 2


# Abort, pause, weights, cancellation


async def test_abort_returns_what_there_is() -> None:
    engine = small()
    samples = prompts("12=", "7+7=")
    whole = await generate_all(engine, samples, GREEDY)
    paced = Paced(engine, samples, GREEDY)
    async with paced.run():
        await paced.steps(5)
        await engine.abort([samples[0]])
        assert engine.in_flight == 1
    aborted, other = paced.completions[0], paced.completions[1]
    assert aborted.status is SampleStatus.ABORTED
    assert (aborted.text, aborted.tokens) == (whole[0].text[:5], whole[0].tokens[:5])
    assert aborted.weight_versions == [WeightSpan("0", 0, 5)]
    assert other.tokens == whole[1].tokens


async def test_abort_knows_a_sample_by_its_execution() -> None:
    paced = Paced(small(), prompts("12="), GREEDY)
    async with paced.run():
        await paced.steps(2)
        await paced.engine.abort([paced.samples[0].copy()])
    assert paced.completions[0].status is SampleStatus.ABORTED


async def test_abort_takes_a_request_out_of_the_line() -> None:
    paced = Paced(small(max_batch=1), prompts("12=", "7+7="), GREEDY)
    async with paced.run():
        await paced.steps(2)
        waits, runs = sorted(paced.samples, key=lambda sample: sample.rollout_id == paced.engine._running[0].key)
        await paced.engine.abort([waits])
    assert paced.completions[waits.index or 0] == Completion("", [], [], SampleStatus.ABORTED, [])
    assert paced.completions[runs.index or 0].status is SampleStatus.TRUNCATED


async def test_abort_of_a_stranger_does_nothing() -> None:
    engine = small()
    await engine.abort([Sample(prompt="12=", rollout_id=5), Sample(prompt="12=")])
    assert engine.in_flight == 0


async def test_no_step_while_paused() -> None:
    engine = small()
    whole = await engine.generate(Sample(prompt="12="), GREEDY)
    paced = Paced(engine, prompts("12=", "7+7="), GREEDY)
    async with paced.run():
        await paced.steps(3)
        await anyio.wait_all_tasks_blocked()
        assert (paced.stepped, engine.in_flight) == (3, 2)
    assert paced.completions[0].tokens == whole.tokens


async def test_abort_works_while_paused() -> None:
    engine = small()
    await engine.pause()
    paced = Paced(engine, prompts("12=", "7+7="), GREEDY)
    async with paced.run():
        await anyio.wait_all_tasks_blocked()
        await engine.abort(paced.samples)
    assert [c.status for c in paced.completions.values()] == [SampleStatus.ABORTED] * 2
    assert paced.stepped == 0


async def test_new_weights_in_the_middle_of_a_request() -> None:
    engine, other = small(), small(seed=1)
    other.model.head.weight.data[: other.eos].mul_(-0.5)
    paced = Paced(engine, prompts("12=", "123456="), {"max_new_tokens": 12})
    async with paced.run():
        await paced.steps(5)
        await engine.update_weights(other.model.state_dict(), "1")
    assert engine.weight_version == "1"
    for sample in paced.samples:
        completion, prompt = paced.completions[sample.index or 0], engine.tokenize(str(sample.prompt))
        assert completion.weight_versions == [WeightSpan("0", 0, 5), WeightSpan("1", 5, 12)]
        before, after = (likelihood(of, [*prompt, *completion.tokens])[len(prompt) - 1 :] for of in (small(), other))
        assert completion.log_probs == pytest.approx([*before[:5].tolist(), *after[5:].tolist()], abs=1e-4)


async def test_weights_that_made_no_token_have_no_span() -> None:
    engine = small()
    paced = Paced(engine, prompts("12="), GREEDY)
    async with paced.run():
        await paced.steps(4)
        await engine.update_weights(engine.model.state_dict(), "1")
        await engine.update_weights(engine.model.state_dict(), "2")
    assert paced.completions[0].weight_versions == [WeightSpan("0", 0, 4), WeightSpan("2", 4, 12)]


async def test_weights_of_another_model_are_refused() -> None:
    with pytest.raises(RuntimeError, match="size mismatch"):
        await small().update_weights(small(width=8).model.state_dict(), "1")


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("after", range(13))
async def test_cancellation_takes_a_request_out_and_leaves_the_others(position: int, after: int) -> None:
    engine = small(max_batch=2)
    samples = prompts("12=", "7+7=", "3=")
    whole = await generate_all(small(), samples, GREEDY)
    paced = Paced(engine, samples, GREEDY)
    async with paced.run():
        cancel = paced.scopes[position].cancel
        if after:
            paced.after[after] = cancel
        else:
            cancel()
    assert engine.in_flight == 0
    assert engine._driver is None
    for index in {0, 1, 2} - {position}:
        assert paced.completions[index].tokens == whole[index].tokens


async def test_cancelling_all_leaves_the_engine_idle() -> None:
    engine = small()
    paced = Paced(engine, prompts("12=", "7+7=", "3="), GREEDY)
    with anyio.CancelScope() as scope:
        async with paced.run():
            await paced.steps(3)
            scope.cancel()
    assert (engine.in_flight, engine._driver) == (0, None)
    assert (await engine.generate(Sample(prompt="12="), GREEDY)).status is SampleStatus.TRUNCATED


TEXTS = ("1=", "22+3=", "123456=", "+", "12=", "9", "8+8", "=3=")


@cache
def unbroken() -> list[list[int]]:
    """What each of `TEXTS` gets when nothing disturbs it."""
    return [list(anyio.run(small().generate, Sample(prompt=text), GREEDY).tokens) for text in TEXTS]


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from("asctp"), st.integers(0, 7)), max_size=25), st.sampled_from(["asyncio", "trio"])
)
def test_any_history_leaves_the_engine_idle_and_every_response_right(
    history: list[tuple[str, int]], backend: str
) -> None:
    """Start, abort, cancel, pause, let some steps pass, in any order: the rows of the cache never get mixed up."""
    engine = small(max_batch=3)
    whole = unbroken()

    async def scenario() -> None:
        paced = Paced(engine, [Sample(prompt=TEXTS[n % 8], rollout_id=n) for n in range(len(history))], GREEDY)
        started = 0
        async with anyio.create_task_group() as tasks:
            for action, n in history:
                if action == "s":
                    tasks.start_soon(paced.generate, started)
                    started += 1
                elif action == "a":
                    await engine.abort(paced.samples[n : n + 1])
                elif action == "c" and n < started:
                    paced.scopes[n].cancel()
                elif action == "p":
                    await engine.pause()
                for _ in range(n if action == "t" else 0):
                    await anyio.lowlevel.checkpoint()
            await engine.resume()
        for n, completion in paced.completions.items():
            assert completion.tokens == whole[n % 8][: len(completion.tokens)]
            assert completion.status is SampleStatus.ABORTED or len(completion.tokens) == len(whole[n % 8])

    anyio.run(scenario, backend=backend)
    assert (engine.in_flight, engine._driver) == (0, None)


# Mistakes


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (
            {"top_p": 0.9},
            "sample 3: unknown sampling key 'top_p'; the keys are temperature, max_new_tokens, stop, seed",
        ),
        ({"temperature": -1}, r"sample 3: sampling: Expected `float` >= 0.0 - at `\$.temperature`"),
        ({"temperature": float("nan")}, r"sample 3: sampling: .*temperature"),
        ({"max_new_tokens": 0}, r"sample 3: sampling: Expected `int` >= 1 - at `\$.max_new_tokens`"),
        ({"stop": ["ab"]}, r"sample 3: sampling: Expected `str` of length <= 1 - at `\$.stop\[0\]`"),
        ({"stop": "x"}, "sample 3: the character 'x' of .* is not in the vocabulary"),
        (
            {"max_new_tokens": 30},
            "sample 3: 3 tokens and max_new_tokens=30 exceed the context of 32; shorten the prompt",
        ),
    ],
)
async def test_wrong_sampling_names_the_sample(sampling: dict[str, Any], message: str) -> None:
    engine = small()
    with pytest.raises(ValueError, match=message):
        await engine.generate(Sample(prompt="12=", index=3), sampling)
    assert engine.in_flight == 0


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            Sample(prompt="1 2", index=3),
            "sample 3: the character ' ' of the prompt '1 2' is not in the vocabulary '0123",
        ),
        (Sample(prompt="", index=3), "sample 3: the prompt is empty"),
        (Sample(prompt="1" * 32, index=3), "sample 3: 32 tokens and max_new_tokens=1 exceed the context of 32"),
        (Sample(tokens=Tokens([1, 13]), index=3), "sample 3: the token id 13 is not in the vocabulary of 0 to 12"),
        (Sample(tokens=Tokens([-1]), index=3), "sample 3: the token id -1 is not in the vocabulary"),
    ],
)
async def test_wrong_prompt_names_the_sample(sample: Sample, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        await small().generate(sample, {})


async def test_messages_are_refused() -> None:
    with pytest.raises(TypeError, match=r"sample 3: the prompt .* is not a string; this model has no chat template"):
        await small().generate(Sample(prompt=[{"role": "user", "content": "1"}], index=3), {})


def test_decode_is_the_inverse_of_tokenize() -> None:
    engine = small()
    assert engine.decode([*engine.tokenize("12+3="), engine.eos]) == "12+3="


def test_decode_refuses_what_is_no_token() -> None:
    with pytest.raises(ValueError, match="the token id 99 is not in the vocabulary of 0 to 12"):
        small().decode([1, 99])


@pytest.mark.parametrize("name", ["context", "width", "layers", "heads", "max_batch"])
def test_sizes_start_at_1(name: str) -> None:
    with pytest.raises(ValueError, match=f"EmbeddedEngine: {name} is 0, it must be at least 1"):
        small(**{name: 0})


@pytest.mark.parametrize("vocabulary", ["", "010"])
def test_a_vocabulary_has_each_character_once(vocabulary: str) -> None:
    with pytest.raises(ValueError, match="must have characters, each of them once"):
        small(vocabulary=vocabulary)


async def test_weights_without_finite_logits_fail_the_request() -> None:
    engine = small()
    engine.model.head.weight.data[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="sample 3: weights '0' give logits that are not finite"):
        await engine.generate(Sample(prompt="12=", index=3), {})
    assert (engine.in_flight, engine._driver) == (0, None)
