"""What goes wrong between the engine and real servers, behind the real router and without it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from backends.sglang import RequestRefused, SGLangEngine, SGLangRouter
from eventbus import BatchSpec, LogProbs, LogReader, Pipeline, Prompts, Sample, SampleStatus, Tokens
from eventbus.events import AttemptEnded
from eventbus.log.inspect.check import check
from middleware import Generate, Recorder, mask_offpolicy
from tests import sglang_real, sglang_servers
from tests.sglang_fake import Front
from tests.sglang_real import asked, until_decoding, until_running, worst_difference
from tests.sglang_servers import Server

pytestmark = [pytest.mark.asyncio, *sglang_real.MARKS]

PROMPT = [5, 6, 7]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
LENGTH = 900
LONG = {"temperature": 1.0, "max_new_tokens": LENGTH, "ignore_eos": True}
BOTH = pytest.mark.parametrize("routed", [False, True], ids=["direct", "router"])
STREAM = pytest.mark.parametrize("stream", [False, True])


def sample_of(**fields: Any) -> Sample:
    return Sample(**{"index": 3, "group_index": 0, "rollout_id": 3, "tokens": PROMPT, **fields})


def engine_of(*urls: str, routed: bool, **options: Any) -> SGLangEngine:
    """On these workers, or on a router of its own in front of them."""
    options = {"backoff": 0.1, **options}
    if not routed:
        return SGLangEngine(urls=urls, **options)
    assert sglang_servers.PYTHON is not None
    router = SGLangRouter(workers=urls, policy="round_robin", health_interval=1, python=sglang_servers.PYTHON)
    return SGLangEngine(router=router, **options)


def prompts(count: int, group_size: int = 1) -> Prompts:
    return Prompts((Sample(tokens=Tokens([5, 6, 7 + n])) for n in range(count)), group_size)


class Between(Front):
    """Passes requests on to a worker. The first `lose` replies do not come back, or of a stream only `chunks`, and the
    worker does not hear of it."""

    def __init__(self, worker: str, lose: int = 0, chunks: int = 0) -> None:
        self.worker = worker
        self.lose = lose
        self.chunks = chunks
        self.bodies: list[dict[str, Any]] = []
        """Generate requests that came."""
        self.passed: Counter[str] = Counter()
        """Events of streams, by the rid of the request."""
        self.aborted: list[str] = []

    def routes(self) -> list[web.RouteDef]:
        return [web.route("*", "/{path:.*}", self._pass)]

    async def _pass(self, http: web.Request) -> web.StreamResponse:
        data = await http.read()
        lost, rid = False, ""
        if http.path == "/generate":
            self.bodies.append(json.loads(data))
            rid = self.bodies[-1]["rid"]
            lost, self.lose = self.lose > 0, max(0, self.lose - 1)
        elif http.path == "/abort_request":
            self.aborted.append(json.loads(data)["rid"])
        headers = {"content-type": "application/json"}
        async with self.session.request(
            http.method, self.worker + http.path_qs, data=data, headers=headers
        ) as response:
            if lost and not self.chunks:
                await response.read()
                return self._broken(http)
            reply = web.StreamResponse(
                status=response.status, headers={"content-type": response.headers.get("content-type", "text/plain")}
            )
            await reply.prepare(http)
            passed = 0
            async for chunk in response.content.iter_any():
                if lost and passed == self.chunks:
                    return self._broken(http)
                await reply.write(chunk)
                passed += 1
                self.passed[rid] += chunk.count(b"data:")
            return reply

    def _broken(self, http: web.Request) -> web.Response:
        if http.transport is not None:
            http.transport.abort()
        return web.Response(status=500)  # nobody reads it


class Second:
    """A server beside the one of the test run, started again when a test has killed it."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._server: Server | None = None

    async def get(self) -> Server:
        if self._server is None:
            self._server = Server(self._model)
            await asyncio.to_thread(self._server.until_ready)
        return self._server

    def kill(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server = None


@pytest.fixture(scope="module")
def second(real_models: list[Path]) -> Iterator[Second]:
    other = Second(real_models[0])
    yield other
    other.kill()


def recorded(path: Path) -> list[AttemptEnded]:
    """The attempts in a log in which nothing is amiss."""
    with LogReader(path) as log:
        assert check(log.events(), samples=log.samples).violations == []
        return [event for event in log.events() if isinstance(event, AttemptEnded)]


def answered(attempts: list[AttemptEnded], count: int) -> list[int]:
    """How many attempts of each sample were answered."""
    ends = Counter(event.index for event in attempts if event.outcome == "answered")
    return [ends[index] for index in range(count)]


# A reply is lost


@BOTH
async def test_a_reply_that_is_lost_gives_one_sample(real_url: str, routed: bool, tmp_path: Path) -> None:
    async with Between(real_url, lose=1) as between:
        engine = engine_of(between.url, routed=routed)
        pipeline = Pipeline(
            prompts(4), [Generate(engine, GREEDY)], BatchSpec(groups=4), observers=[Recorder(tmp_path / "run.mcap")]
        )
        async with pipeline:
            batch = await anext(pipeline.rollouts(stop=1))
    assert [sample.index for sample in batch.samples] == [0, 1, 2, 3]
    assert len({body["rid"] for body in between.bodies}) == len(between.bodies) == 5
    attempts = recorded(tmp_path / "run.mcap")
    assert answered(attempts, 4) == [1, 1, 1, 1]
    assert [event.rid in between.aborted for event in attempts if event.outcome == "failed"] == [True]
    async with SGLangEngine(real_url) as plain:
        for sample in batch.samples:
            alone = await plain.generate(sample_of(tokens=sample.tokens[:3]), GREEDY)
            assert sample.tokens[3:] == alone.tokens


@BOTH
async def test_a_stream_that_breaks_keeps_what_arrived(
    real_url: str, real_models: list[Path], routed: bool, tmp_path: Path
) -> None:
    async with Between(real_url, lose=2, chunks=2) as between:
        engine = engine_of(between.url, routed=routed, stream=True)
        pipeline = Pipeline(
            prompts(1), [Generate(engine, LONG)], BatchSpec(groups=1), observers=[Recorder(tmp_path / "run.mcap")]
        )
        async with pipeline:
            [sample] = (await anext(pipeline.rollouts(stop=1))).samples
    first, second, third = recorded(tmp_path / "run.mcap")
    assert (first.outcome, second.outcome, third.outcome) == ("failed", "failed", "answered")
    assert min(first.tokens, second.tokens, third.tokens) > 0
    assert first.tokens + second.tokens + third.tokens == sample.response_length == LENGTH
    assert worst_difference(real_models[0], [sample]) < 1e-4
    assert [(span.start, span.end) for span in sample.weight_versions] == [(0, LENGTH)]


# An abort that the router does not know


async def test_an_abort_that_is_answered_404_says_so(real_url: str) -> None:
    assert sglang_servers.PYTHON is not None
    sample = sample_of()
    async with (
        SGLangRouter(workers=[real_url], python=sglang_servers.PYTHON) as router,
        SGLangEngine(router.url) as engine,
    ):
        assert (await asked(router.url, "/abort_request", {"rid": "r"}))[0] == 404
        answer = asyncio.create_task(engine.generate(sample, LONG))
        await until_running(real_url, 1, answer)
        with pytest.raises(RequestRefused, match=r"answered 404: .*is this a router\? give it as router="):
            await engine.abort([sample])
        assert len((await answer).tokens) == LENGTH


@STREAM
async def test_behind_the_router_an_abort_goes_to_the_workers(real_url: str, stream: bool) -> None:
    sample = sample_of()
    async with engine_of(real_url, routed=True, stream=stream) as engine:
        answer = asyncio.create_task(engine.generate(sample, LONG))
        await until_running(real_url, 1, answer)
        await engine.abort([sample])
        completion = await answer
    assert completion.status is SampleStatus.ABORTED
    assert len(completion.tokens) == len(completion.log_probs or ()) < LENGTH
    await until_running(real_url, 0)


# Partial rollouts


@pytest.mark.parametrize("unfinished", ["restart", "recycle"])
async def test_what_is_unfinished_starts_again_or_goes_on(real_url: str, unfinished: Any) -> None:
    """The first sample has nearly all of its budget when it comes, so it is done when the second has some tokens."""

    def nearly_done(sample: Sample) -> None:
        if sample.index == 0:
            sample.tokens += [5] * (LENGTH - 5)
            sample.response_length = LENGTH - 5
            sample.rollout_log_probs = LogProbs([-1.0] * (LENGTH - 5))

    async def wait_for_the_other(sample: Sample) -> None:
        while sample.index == 0 and max(between.passed.values()) < 20:  # of its own there are 5 and an end
            await asyncio.sleep(0.01)

    async with Between(real_url) as between, engine_of(between.url, routed=True, stream=True) as engine:
        pipeline = Pipeline(
            prompts(2),
            [nearly_done, Generate(engine, LONG), wait_for_the_other, mask_offpolicy],
            BatchSpec(groups=1, over_sampling=2, unfinished=unfinished),
        )
        async with pipeline:
            rollouts = pipeline.rollouts(stop=2)
            batch = await anext(rollouts)
            assert [sample.index for sample in batch.samples] == [0]
            await engine.set_weight_version("2")
            batch = await anext(rollouts)
        await engine.set_weight_version("default")
    [sample], asked_for = batch.samples, between.bodies[-1]
    kept = len(asked_for["input_ids"]) - 3
    assert (0 < kept < LENGTH) if unfinished == "recycle" else kept == 0
    assert sample.tokens[: 3 + kept] == asked_for["input_ids"]
    assert asked_for["sampling_params"]["max_new_tokens"] == LENGTH - kept
    assert sample.status is SampleStatus.TRUNCATED
    assert sample.response_length == len(sample.rollout_log_probs or ()) == len(sample.tokens) - 3 == LENGTH
    spans = [(span.version, span.start, span.end) for span in sample.weight_versions]
    assert spans == [("default", 0, kept), ("2", kept, LENGTH)][kept == 0 :]
    assert sample.loss_mask == ([0] * kept + [1] * (LENGTH - kept) if kept else None)


# A worker does not answer, or dies


async def test_a_worker_that_is_stuck_is_given_up(real_url: str, second: Second) -> None:
    stuck = await second.get()
    async with engine_of(stuck.url, real_url, routed=False, timeout=5.0) as engine:
        stuck.freeze()
        try:
            completion = await engine.generate(sample_of(), GREEDY)
        finally:
            stuck.thaw()
    assert len(completion.tokens) == 12
    await until_running(stuck.url, 0)


@pytest.mark.parametrize(("routed", "stream"), [(True, False), (False, True)], ids=["router", "direct-streaming"])
async def test_a_worker_that_is_killed_costs_no_sample(
    real_url: str, real_models: list[Path], second: Second, routed: bool, stream: bool, tmp_path: Path
) -> None:
    victim = await second.get()
    decoded, log = victim.decoded, tmp_path / "run.mcap"
    engine = engine_of(real_url, victim.url, routed=routed, stream=stream)
    pipeline = Pipeline(
        prompts(4, group_size=2), [Generate(engine, LONG)], BatchSpec(groups=4), observers=[Recorder(log)]
    )
    async with pipeline, asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(pipeline.rollouts(stop=1).__anext__())
        await until_decoding(victim, decoded, answer)
        second.kill()
    samples = answer.result().samples
    assert [sample.index for sample in samples] == list(range(8))
    assert len({sample.rollout_id for sample in samples}) == 8
    for sample in samples:
        assert sample.response_length == len(sample.rollout_log_probs or ()) == len(sample.tokens) - 3 == LENGTH
    assert worst_difference(real_models[0], samples) < 1e-4
    attempts = recorded(log)
    assert answered(attempts, 8) == [1] * 8
    failed = [event for event in attempts if event.outcome == "failed"]
    assert len(failed) == engine.wasted >= 2
    if stream:
        assert all(event.tokens > 0 for event in failed)
