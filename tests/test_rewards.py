from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import Any

import anyio
import pytest

from eventbus.imports import LoadError
from eventbus.sample import Sample
from eventbus.stage import bind
from middleware import MathAnswer, RemoteReward, exact_match, limit, retry, rewards

pytestmark = pytest.mark.anyio

needs_math_verify = pytest.mark.skipif(
    find_spec("math_verify") is None, reason="math-verify is not installed: pip install 'rolloutbus[math]'"
)


# exact_match


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [("4", "4", 1.0), (" the  answer\n", "the answer", 1.0), ("4", 4, 1.0), ("5", "4", 0.0), ("A", "a", 0.0)],
)
def test_exact_match(response: str, label: Any, reward: float) -> None:
    sample = Sample(response=response, label=label)
    exact_match(sample)
    assert sample.reward == reward


def test_exact_match_without_a_label() -> None:
    with pytest.raises(ValueError, match="sample 7 has no label to compare the response with"):
        exact_match(Sample(index=7))


# MathAnswer


@needs_math_verify
async def test_math_answer() -> None:
    answer = MathAnswer()
    for label, response, reward in (
        (42, "The answer is $42$.", 1.0),
        ("\\frac{1}{2}", "so it is \\boxed{0.5}", 1.0),
        ("$x^2$", "\\(x \\cdot x\\)", 1.0),
        ("42", "it is 41", 0.0),
        ("42", "", 0.0),
    ):
        sample = Sample(label=label, response=response)
        await answer(sample)
        assert (sample.reward, sample.metadata) == (reward, {}), response


@needs_math_verify
async def test_an_answer_that_never_ends_is_wrong_and_marked() -> None:
    sample = Sample(label="7", response="$99999999999!$")
    await MathAnswer(seconds=0.3)(sample)
    assert (sample.reward, sample.metadata) == (0.0, {"math_answer": "timeout"})


@needs_math_verify
async def test_a_label_that_is_no_mathematics_names_the_sample() -> None:
    with pytest.raises(ValueError, match="sample 3: the label '' is not read as mathematics"):
        await MathAnswer()(Sample(index=3, label="", response="4"))


@needs_math_verify
async def test_a_grader_that_dies_is_an_error_and_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dying(*args: Any, **kwargs: Any) -> None:
        raise anyio.BrokenWorkerProcess

    monkeypatch.setattr("anyio.to_process.run_sync", dying)
    sample = Sample(index=3, label="4", response="4")
    with pytest.raises(RuntimeError, match="sample 3: the process that graded the answer died"):
        await MathAnswer()(sample)
    assert sample.reward is None


@needs_math_verify
def test_the_time_of_a_grading_is_checked() -> None:
    with pytest.raises(ValueError, match="seconds is 0, it must be more than 0"):
        MathAnswer(0)


def test_missing_math_verify_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "find_spec", lambda name: None)
    with pytest.raises(LoadError, match=r"pip install 'rolloutbus\[math\]'"):
        MathAnswer()


# RemoteReward

Answer = Callable[[dict[str, Any]], tuple[int, bytes]]


class Server(ThreadingHTTPServer):
    """Answers each POST with `answer(body)`, and remembers the bodies and connections."""

    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.connections: set[Any] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/score"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        self.server.connections.add(self.client_address)
        status, reply = self.server.answer(body)
        self.send_response(status)
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *args: Any) -> None: ...


@contextmanager
def serving(answer: Answer) -> Iterator[Server]:
    with Server(answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_it_binds_as_an_external_stage_that_is_opened_and_closed() -> None:
    stage = bind(limit(RemoteReward("http://x"), 2))
    assert (stage.name, stage.level, stage.external) == ("RemoteReward", "sample", True)


@pytest.mark.parametrize("reward", [0.5, 1, {"accuracy": 1, "style": {"tone": 0.2}}])
async def test_the_server_gets_the_sample_and_gives_the_reward(reward: Any) -> None:
    sample = Sample(prompt="2+2=", response="4", label="4", metadata={"source": "a"})
    with serving(lambda body: (200, json.dumps({"reward": reward, "more": 1}).encode())) as server:
        await RemoteReward(server.url)(sample)
    assert sample.reward == reward
    assert server.bodies == [{"prompt": "2+2=", "response": "4", "label": "4", "metadata": {"source": "a"}}]


async def test_one_client_serves_a_run_and_is_closed_after_it() -> None:
    with serving(lambda body: (200, b'{"reward": 1}')) as server:
        async with RemoteReward(server.url) as reward:
            for _ in range(3):
                await reward(Sample())
            client = reward._client
            assert client is not None
        assert client.is_closed
        assert len(server.connections) == 1
        await reward(Sample())  # outside of a run it opens its own
    assert len(server.connections) == 2


async def test_no_more_connections_than_asked_for() -> None:
    with serving(lambda body: (200, b'{"reward": 1}')) as server:
        async with RemoteReward(server.url, connections=2) as reward, anyio.create_task_group() as tasks:
            for _ in range(12):
                tasks.start_soon(reward, Sample())
    assert len(server.bodies) == 12
    assert len(server.connections) <= 2


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_a_refusal_shows_the_words_of_the_server(status: int) -> None:
    message = rf"sample 5: http://.*/score answered {status} .*: no field 'answer'"
    with serving(lambda body: (status, b"no field 'answer'")) as server, pytest.raises(ValueError, match=message):
        await retry(RemoteReward(server.url), on=OSError)(Sample(index=5))
    assert len(server.bodies) == 1


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_failing_server_is_asked_again_by_retry(status: int) -> None:
    answers = iter([(status, b"busy"), (200, b'{"reward": 1}')])
    with serving(lambda body: next(answers)) as server:
        sample = await retry(RemoteReward(server.url), on=OSError, wait=0)(Sample())
    assert sample.reward == 1.0


async def test_a_failing_server_is_a_connection_error() -> None:
    message = "answered 503 Service Unavailable: busy"
    with serving(lambda body: (503, b"busy")) as server, pytest.raises(ConnectionError, match=message):
        await RemoteReward(server.url)(Sample())


async def test_a_server_that_is_not_there_is_a_connection_error() -> None:
    with serving(lambda body: (200, b"")) as server:
        url = server.url
    with pytest.raises(ConnectionError, match=r"sample 5: http://.*: ConnectError"):
        await RemoteReward(url)(Sample(index=5))


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"<html>", "malformed"),
        (b"\xff\xfe", "malformed|utf-8"),
        (b"[1]", "Expected `object`, got `array`"),
        (b'{"score": 1}', "missing required field `reward`"),
        (b'{"reward": "high"}', r"at `\$.reward`"),
        (b'{"reward": null}', r"at `\$.reward`"),
        (b'{"reward": NaN}', "malformed"),
    ],
)
async def test_a_malformed_reply_names_the_field(reply: bytes, message: str) -> None:
    message = rf"sample 5: .* is not {{'reward': number or object}}: .*({message})"
    with serving(lambda body: (200, reply)) as server, pytest.raises(ValueError, match=message):
        await RemoteReward(server.url)(Sample(index=5))


async def test_a_sample_without_a_json_form_is_named() -> None:
    with pytest.raises(TypeError, match=r"sample 5: prompt, label or metadata has no JSON form: .* object"):
        await RemoteReward("http://x")(Sample(index=5, metadata={"what": object()}))


def test_connections_are_checked() -> None:
    with pytest.raises(ValueError, match="connections is 0, it must be at least 1"):
        RemoteReward("http://x", connections=0)


def test_missing_httpx_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(LoadError, match=r"pip install 'rolloutbus\[http\]'"):
        RemoteReward("http://x")
