from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import pytest

from eventbus.imports import LoadError
from eventbus.sample import Sample
from eventbus.stage import bind
from middleware import MathAnswer, RemoteReward, exact_match, limit, retry, rewards, timeout

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
    cases: tuple[tuple[Any, str, float], ...] = (
        (42, "The answer is $42$.", 1.0),
        ("\\frac{1}{2}", "so it is \\boxed{0.5}", 1.0),
        ("$x^2$", "\\(x \\cdot x\\)", 1.0),
        ("42", "it is 41", 0.0),
        ("42", "", 0.0),
        ("\\$42", "\\boxed{42}", 1.0),
        ("\\[x^2\\]", "$x^2$", 1.0),
        ("4", "\ud800 $4$\r\n\u2028", 1.0),
    )
    async with MathAnswer() as answer:
        for label, response, reward in cases:
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
async def test_a_grader_that_is_killed_is_an_error_and_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = rewards._Grader.ask

    def killed(grader: rewards._Grader, question: list[Any]) -> dict[str, Any]:
        ask(grader, question)
        assert grader._process is not None
        grader._process.kill()
        return ask(grader, question)

    monkeypatch.setattr(rewards._Grader, "ask", killed)
    sample = Sample(index=3, label="4", response="4")
    with pytest.raises(RuntimeError, match="sample 3: the process that graded the answer was killed by SIGKILL"):
        await MathAnswer()(sample)
    assert (sample.reward, sample.metadata) == (None, {})


@needs_math_verify
async def test_a_grader_that_is_killed_while_nobody_uses_it_costs_no_sample() -> None:
    async with MathAnswer() as answer:
        for _ in range(2):
            sample = Sample(label="4", response="$4$")
            await answer(sample)
            assert sample.reward == 1.0
            (grader,) = answer._idle
            assert grader._process is not None
            grader._process.kill()


@needs_math_verify
async def test_many_at_once_share_the_processes_which_end_with_the_run() -> None:
    samples = [Sample(label=number, response=f"${number}$") for number in range(50)]
    async with MathAnswer() as answer:
        async with answer, anyio.create_task_group() as tasks:  # a second pipeline has it too
            for sample in samples:
                tasks.start_soon(answer, sample)
        graders = answer._idle.copy()
        assert 1 <= len(graders) <= (os.cpu_count() or 1)
    assert [sample.reward for sample in samples] == [1.0] * 50
    assert answer._idle == []
    assert [grader._process and grader._process.returncode for grader in graders] == [-9] * len(graders)


@needs_math_verify
async def test_a_cancelled_grading_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, graders = threading.Event(), list[rewards._Grader]()
    ask = rewards._Grader.ask

    def noted(grader: rewards._Grader, question: list[Any]) -> dict[str, Any]:
        ask(grader, ["4", "$4$", 60.0])  # it has started
        graders.append(grader)
        asked.set()
        return ask(grader, question)

    monkeypatch.setattr(rewards._Grader, "ask", noted)
    async with MathAnswer(seconds=60) as answer, anyio.create_task_group() as tasks:
        tasks.start_soon(answer, Sample(label="7", response="$99999999999!$"))
        while not asked.is_set():
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    (grader,) = graders
    assert grader._process is not None
    assert grader._process.returncode == -9


@needs_math_verify
@pytest.mark.virtual_time
async def test_grading_takes_no_virtual_time() -> None:
    sample = await timeout(MathAnswer(), 1)(Sample(label="4", response="$4$"))
    assert sample.reward == 1.0
    await anyio.sleep(10)
    assert anyio.current_time() == pytest.approx(10)


PROGRAM = """
import anyio
from eventbus import Sample
from middleware import MathAnswer

print("begins")

async def main():
    sample = Sample(label="4", response="$4$")
    await MathAnswer()(sample)
    print(sample.reward)

anyio.run(main)
"""


@needs_math_verify
def test_the_program_is_not_run_again_to_grade(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    root = str(Path(rewards.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.returncode) == ("begins\n1.0\n", 0), done.stderr


@needs_math_verify
def test_the_time_of_a_grading_is_checked() -> None:
    with pytest.raises(ValueError, match="seconds is 0, it must be more than 0"):
        MathAnswer(0)


def test_missing_math_verify_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "find_spec", lambda name: None)
    with pytest.raises(LoadError, match=r"pip install 'rolloutbus\[math\]'"):
        MathAnswer()


# RemoteReward

CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)

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


# httpx leaves the byte streams of cancelled requests to the garbage collector, which trio remarks on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
async def test_calls_that_are_cancelled_while_they_queue_leave_all_connections_free() -> None:
    release = threading.Event()

    def answer(body: dict[str, Any]) -> tuple[int, bytes]:
        release.wait()
        return 200, b'{"reward": 1}'

    with serving(answer) as server:
        async with RemoteReward(server.url, connections=2) as reward:
            scopes = [anyio.CancelScope() for _ in range(50)]

            async def call(scope: anyio.CancelScope) -> None:
                with scope:
                    await reward(Sample())

            async with anyio.create_task_group() as tasks:
                for scope in scopes:
                    tasks.start_soon(call, scope)
                while len(server.bodies) < 2:
                    await anyio.lowlevel.checkpoint()
                for scope in scopes:  # as time-outs shortly after each other do
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()
            release.set()
            async with anyio.create_task_group() as tasks:
                for sample in (samples := [Sample(), Sample()]):
                    tasks.start_soon(reward, sample)
    assert [sample.reward for sample in samples] == [1.0, 1.0]


async def test_two_pipelines_can_share_it() -> None:
    with serving(lambda body: (200, b'{"reward": 1}')) as server:
        async with RemoteReward(server.url) as reward:
            async with reward:
                await reward(Sample())
            client = reward._client
            assert client is not None
            await reward(Sample())
        assert client.is_closed
    assert len(server.connections) == 1


async def test_a_redirect_says_where_to() -> None:
    class Moved(Handler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(307)
            self.send_header("location", "http://elsewhere/score")
            self.send_header("content-length", "0")
            self.end_headers()

    with serving(lambda body: (200, b"")) as server:
        server.RequestHandlerClass = Moved
        with pytest.raises(
            ValueError, match=r"sample 5: .* redirects to 'http://elsewhere/score' \(307\): give the url"
        ):
            await RemoteReward(server.url)(Sample(index=5))


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


@pytest.mark.parametrize(
    "fields", [{"metadata": {"what": object()}}, {"metadata": {(1, 2): 3}}, {"response": "\ud800"}, {"label": CIRCLE}]
)
async def test_a_sample_without_a_json_form_is_named(fields: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"sample 5: prompt, response, label or metadata has no JSON form: "):
        await RemoteReward("http://x")(Sample(index=5, **fields))


def test_connections_are_checked() -> None:
    with pytest.raises(ValueError, match="connections is 0, it must be at least 1"):
        RemoteReward("http://x", connections=0)
    with pytest.raises(TypeError, match=r"connections is 2\.5, it must be a whole number"):
        RemoteReward("http://x", connections=2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://x", "http://", "http://[::1", "http://x:99999", None])
def test_the_url_is_checked(url: Any) -> None:
    with pytest.raises(ValueError, match=r"RemoteReward: url is .*, it must be like 'http://127\.0\.0\.1:8000/score'"):
        RemoteReward(url)


def test_missing_httpx_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(LoadError, match=r"pip install 'rolloutbus\[http\]'"):
        RemoteReward("http://x")
