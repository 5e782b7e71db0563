"""`EmbeddedEngine`: continuous batching around a small transformer.

The life of a request: `generate` puts it into the waiting line; the next step takes it into the running batch, reads
its tokens into the cache and draws one token for it and for every other in the batch; when it is done it leaves the
batch, and its `generate` returns. Requests come and go between any two steps.

There is no task in the background. One of the requests that are waited for is the driver: its `generate` runs the steps
for all of them. When it is done or cancelled, it hands that role to another one.

What this module keeps true:

- a step is one call without an await, so abort, pause, a weight update and cancellation always fall between two steps;
- an open request is in the waiting line or in the running batch, and if there is one, one of them is the driver;
- row r of the cache belongs to `running[r]` and holds all of its tokens but the last, computed by the present weights.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from random import Random
from typing import Annotated, Any, Final

import anyio
import anyio.lowlevel
import msgspec
import torch
from torch import Tensor

from backends.embedded.model import Cache, Transformer, one_thread
from eventbus.sample import Completion, Sample, SampleStatus, WeightSpan

__all__ = ["EmbeddedEngine"]

ALPHABET: Final = "0123456789abcdefghijklmnopqrstuvwxyz +-*/=<>()[].,:;?!'\"\n"


class EmbeddedEngine:
    """Generates with a transformer of its own, untrained at first, in the calling process.

    :param vocabulary: its characters are the tokens 0, 1, ...; one more token, `eos`, ends a response.
    :param context: prompt and response together, in tokens.
    :param max_batch: requests in the running batch; further ones wait.
    :param seed: of the initial weights and of what is drawn. A response depends on it, the weights, the sample's
        `rollout_id` and tokens, not on what else is in the batch (but for rounding).
    :raises ValueError: a size is less than 1, `width` is no multiple of `heads`, or a character comes twice.

    A step takes 1 to 3 ms for up to 256 requests with the default sizes, somewhat longer when it takes in new prompts;
    the event loop runs in between.
    """

    def __init__(
        self,
        vocabulary: str = ALPHABET,
        context: int = 64,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        max_batch: int = 256,
        seed: int = 0,
    ) -> None:
        sizes = {"context": context, "width": width, "layers": layers, "heads": heads, "max_batch": max_batch}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"EmbeddedEngine: {name} is {size}, it must be at least 1")
        self._ids = {character: id for id, character in enumerate(vocabulary)}
        if not vocabulary or len(self._ids) < len(vocabulary):
            raise ValueError(f"EmbeddedEngine: vocabulary {vocabulary!r} must have characters, each of them once")
        self.vocabulary = vocabulary
        self.eos = len(vocabulary)
        self.context = context
        self.max_batch = max_batch
        self.seed = seed
        self.weight_version = "0"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = Transformer(len(vocabulary) + 1, context, width, layers, heads).eval()
        self._cache = Cache.empty(max_batch, context, width, layers, heads)
        self._cache_is_stale = False
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._driver: _Request | None = None
        self._paused = False
        self._count = itertools.count()

    @property
    def in_flight(self) -> int:
        """Requests that it works on now, those that wait for a place in the batch included."""
        return len(self._waiting) + len(self._running)

    def tokenize(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        """:raises TypeError: the prompt is a list of messages: this model has no chat template.
        :raises ValueError: a character is not in the vocabulary.
        """
        if not isinstance(prompt, str):
            raise TypeError(f"the prompt {prompt!r} is not a string; this model has no chat template")
        try:
            return [self._ids[character] for character in prompt]
        except KeyError as error:
            raise ValueError(
                f"the character {error.args[0]!r} of the prompt {prompt!r} is not in the vocabulary {self.vocabulary!r}"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; `eos` has none.

        :raises ValueError: an id is not in the vocabulary.
        """
        self._check_ids(ids)
        return "".join(self.vocabulary[id] for id in ids if id != self.eos)

    async def generate(self, sample: Sample, sampling: Mapping[str, Any]) -> Completion:
        """Continue `sample.tokens`, or its prompt where it has none: new tokens, their text and their log-probs.

        `sampling`:
            temperature     default 1; 0 takes the most likely token
            max_new_tokens  default: what the context has room for
            stop            characters that end the response, beside `eos`; a string or a list of them
            seed            draws that depend on the tokens alone: the same prompt gets the same response

        Log-probs are those of the distribution that was drawn from, softmax(logits / temperature) over the whole
        vocabulary, so a trainer must divide by the same temperature (`EmbeddedTrainer(temperature=...)`); at
        temperature 0 they are those of temperature 1. The token that ends the response is part of `tokens` and not of
        `text`. Without one `status` is TRUNCATED.

        :raises ValueError: a sampling key or value, a character or a token id is not known, or the context has no room;
            names the sample.
        :raises TypeError: the prompt is a list of messages.
        :raises FloatingPointError: the weights give no finite logits.
        """
        request = self._request(sample, sampling)
        self._waiting.append(request)
        if self._driver is None:
            self._driver = request
        try:
            while request.status is None:
                if self._paused or self._driver is not request:
                    await request.wait()
                else:
                    await self._gather()
                    if not self._paused:
                        self._step()
        finally:
            self._leave(request)
        return self._completion(request)

    async def abort(self, samples: Sequence[Sample]) -> None:
        """Their `generate` returns what there is, with status ABORTED. When this returns, they are out of the batch.

        A sample is known by its `rollout_id`, or else by being the same object. Others are ignored.
        """
        keys = {_key(sample) for sample in samples}
        for request in [*self._running, *self._waiting]:
            if request.key in keys:
                request.end(SampleStatus.ABORTED)
        self._retire()
        await anyio.lowlevel.checkpoint()

    async def pause(self) -> None:
        """From now on no step runs until `resume`. Requests are taken and kept."""
        self._paused = True
        await anyio.lowlevel.checkpoint()

    async def resume(self) -> None:
        self._paused = False
        if self._driver is not None:
            self._driver.wake()
        await anyio.lowlevel.checkpoint()

    async def update_weights(self, state_dict: Mapping[str, Tensor], version: str) -> None:
        """The next step runs with these weights, also for requests that are half done: what the cache holds for them
        is computed again, so that each token's log-prob is that of the weights which `weight_versions` names for it.

        :raises RuntimeError: names or shapes are not those of the model (torch says which).
        """
        self.model.load_state_dict(state_dict)
        self.weight_version = version
        self._cache_is_stale = True
        for request in self._running:
            request.versions.append((version, len(request.log_probs)))
        await anyio.lowlevel.checkpoint()

    # Requests

    def _request(self, sample: Sample, sampling: Mapping[str, Any]) -> _Request:
        name = f"sample {sample.index}"
        try:
            options = _options(sampling)
            tokens = sample.tokens.tolist() or self.tokenize(sample.prompt)
            self._check_ids(tokens)
            stop = {self.eos, *self.tokenize("".join(options.stop))}
        except (ValueError, TypeError) as error:
            raise type(error)(f"{name}: {error}") from error
        if not tokens:
            raise ValueError(f"{name}: the prompt is empty; the model needs a token to begin with")
        room = self.context - len(tokens)
        budget = max(room, 1) if options.max_new_tokens is None else options.max_new_tokens
        if budget > room:
            raise ValueError(
                f"{name}: {len(tokens)} tokens and max_new_tokens={budget} exceed the context of {self.context}; "
                "shorten the prompt, lower max_new_tokens, or give EmbeddedEngine a larger context"
            )
        if options.seed is not None:
            source = f"{options.seed}"
        else:
            source = f"{self.seed}/{next(self._count) if sample.rollout_id is None else sample.rollout_id}"
        # A sample that comes back with a part of its response draws on, not again.
        random = Random(f"{source}/{len(tokens)}")
        return _Request(sample, tokens, options.temperature, budget, stop, random)

    def _check_ids(self, ids: Sequence[int]) -> None:
        if len(ids) and not (min(ids) >= 0 and max(ids) <= self.eos):
            wrong = next(id for id in ids if not 0 <= id <= self.eos)
            raise ValueError(f"the token id {wrong} is not in the vocabulary of 0 to {self.eos}")

    def _completion(self, request: _Request) -> Completion:
        assert request.status is not None
        tokens = request.tokens[request.prompt_length :]
        ended = request.status is SampleStatus.COMPLETED
        bounds = itertools.pairwise([*request.versions, ("", len(tokens))])
        spans = [WeightSpan(version, start, end) for (version, start), (_, end) in bounds if start < end]
        text = self.decode(tokens[:-1] if ended else tokens)
        return Completion(text, tokens, request.log_probs, request.status, spans)

    def _leave(self, request: _Request) -> None:
        """Its `generate` ends, for whatever reason."""
        if request.status is None:  # cancelled, or a step failed
            request.end(SampleStatus.ABORTED)
            self._retire()
        if self._driver is request:
            self._driver = next(itertools.chain(self._running, self._waiting), None)
            if self._driver is not None:
                self._driver.wake()

    # Steps

    async def _gather(self) -> None:
        """Let those ask who are about to: a step for many takes hardly longer than a step for one.

        Two turns of the loop without a new request end this, as does a full batch. One would not do: whoever asks may
        have woken the next one, who gets the loop in the turn after.
        """
        quiet = 0
        while quiet < 2:
            waiting = len(self._waiting)
            await anyio.lowlevel.checkpoint()
            if self.in_flight >= self.max_batch:
                return
            quiet = quiet + 1 if len(self._waiting) == waiting else 0

    def _step(self) -> None:
        """One more token for every request in the batch, which first takes in those that wait."""
        with torch.inference_mode(), one_thread():
            self._admit()
            if not self._running:
                return
            logits = self._next_logits()
            tokens, log_probs = _draw(logits, self._running)
        for request, token, log_prob in zip(self._running, tokens, log_probs, strict=True):
            request.tokens.append(token)
            request.log_probs.append(log_prob)
            if token in request.stop:
                request.end(SampleStatus.COMPLETED)
            elif len(request.log_probs) == request.budget:
                request.end(SampleStatus.TRUNCATED)
        self._retire()

    def _admit(self) -> None:
        """Fill free rows of the cache, and all of them again after a weight update."""
        first = len(self._running)
        new = [self._waiting[i] for i in range(min(len(self._waiting), self.max_batch - first))]
        if self._cache_is_stale:
            self._read([*self._running, *new], 0)
            self._cache_is_stale = False
        elif new:
            self._read(new, first)
        for request in new:
            request.versions.append((self.weight_version, 0))
            self._waiting.popleft()
        self._running += new

    def _read(self, requests: Sequence[_Request], first: int) -> None:
        """Read all tokens but the last, which the step itself reads, into the cache rows from `first`."""
        length = max((len(request.tokens) for request in requests), default=1) - 1
        if length == 0:
            return
        padded = [request.tokens[:-1] + [0] * (length + 1 - len(request.tokens)) for request in requests]
        positions = torch.arange(length).expand(len(requests), length)
        self.model(torch.tensor(padded), positions, self._cache.rows(first, first + len(requests)))

    def _next_logits(self) -> Tensor:
        """[rows, vocabulary]"""
        last = torch.tensor([[request.tokens[-1]] for request in self._running])
        positions = torch.tensor([[len(request.tokens) - 1] for request in self._running])
        logits: Tensor = self.model(last, positions, self._cache.rows(0, len(self._running)))[:, 0]
        if not logits.isfinite().all():
            row = int(logits.isfinite().all(-1).long().argmin())
            raise FloatingPointError(
                f"sample {self._running[row].index}: weights {self.weight_version!r} give logits that are not finite"
            )
        return logits

    def _retire(self) -> None:
        """Requests that have ended leave; the last rows of the batch move into their places."""
        if any(request.status for request in self._waiting):
            self._waiting = deque(request for request in self._waiting if not request.status)
        running = self._running
        size = sum(request.status is None for request in running)
        if size == len(running):
            return
        gaps = [row for row in range(size) if running[row].status]
        movers = [row for row in range(size, len(running)) if not running[row].status]
        if gaps:
            self._cache.move(movers, gaps)
        for gap, mover in zip(gaps, movers, strict=True):
            running[gap] = running[mover]
        del running[size:]


class _Options(msgspec.Struct, frozen=True):
    """The sampling parameters of one request."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stop: str | list[Annotated[str, msgspec.Meta(min_length=1, max_length=1)]] = ""
    seed: int | None = None


class _Request:
    """One call of `generate`."""

    def __init__(
        self, sample: Sample, tokens: list[int], temperature: float, budget: int, stop: set[int], random: Random
    ) -> None:
        self.key = _key(sample)
        self.index = sample.index
        self.tokens = tokens
        """Prompt and what there is of the response."""
        self.prompt_length = len(tokens)
        self.temperature = temperature
        self.budget = budget
        self.stop = stop
        self.random = random
        self.log_probs: list[float] = []
        """One per new token."""
        self.versions: list[tuple[str, int]] = []
        """Weight version, and the number of new tokens when it came."""
        self.status: SampleStatus | None = None
        """None while it is open."""
        self._woken: anyio.Event | None = None

    def end(self, status: SampleStatus) -> None:
        self.status = status
        self.wake()

    async def wait(self) -> None:
        """Until `wake`."""
        self._woken = anyio.Event()
        await self._woken.wait()

    def wake(self) -> None:
        if self._woken is not None:
            self._woken.set()


def _options(sampling: Mapping[str, Any]) -> _Options:
    known = _Options.__struct_fields__
    for key in sampling:
        if key not in known:
            raise ValueError(f"unknown sampling key {key!r}; the keys are {', '.join(known)}")
    try:
        return msgspec.convert(dict(sampling), _Options)
    except msgspec.ValidationError as error:
        raise ValueError(f"sampling: {error}") from None


def _draw(logits: Tensor, requests: Sequence[_Request]) -> tuple[list[int], list[float]]:
    """One token per row by the inverse of the cumulative distribution, so that each request has a source of its own."""
    temperature = torch.tensor([request.temperature for request in requests])[:, None]
    greedy = temperature == 0
    log_probs = (logits / temperature.masked_fill(greedy, 1.0)).log_softmax(-1)
    cumulative = log_probs.double().exp().cumsum(-1)
    uniform = torch.tensor([request.random.random() for request in requests], dtype=torch.float64)[:, None]
    drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).clamp(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, log_probs.argmax(-1, keepdim=True), drawn)
    return tokens[:, 0].tolist(), log_probs.gather(-1, tokens)[:, 0].tolist()


def _key(sample: Sample) -> object:
    return id(sample) if sample.rollout_id is None else sample.rollout_id
