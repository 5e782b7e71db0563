"""A worker that speaks SGLang's protocol as the real 0.5.23 was seen to speak it, without a model.

    async with FakeWorker() as worker:
        engine = SGLangEngine(worker.url)

A token depends on the tokens before it (and on `sampling_seed`), so that a response that goes on from a part of itself
is the one that it would have been. Nothing waits for a clock: `worker.allow(3)` lets each request have 3 tokens,
`await worker.until(lambda: worker.running)` waits for something to become true, `worker.faults.append(...)` says what
happens to the next requests.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import uuid
from abc import ABC, abstractmethod
from array import array
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from inspect import isawaitable
from ssl import SSLContext
from types import TracebackType
from typing import Any, NamedTuple, Self

from aiohttp import ClientError, ClientSession, web

VOCABULARY = 512
EOS = 2
CONTEXT = 4096
LAYERS, TOP_K = 3, 2

SAMPLING = """
    max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty presence_penalty
    repetition_penalty min_new_tokens n beam_width json_schema regex ebnf structural_tag ignore_eos skip_special_tokens
    spaces_between_special_tokens no_stop_trim stream_interval logit_bias sampling_seed custom_params watermark
"""


def next_token(tokens: list[int], seed: int = 0) -> int:
    """1 in 29 of those that end a response."""
    value = (31 * sum(tokens) + 7 * len(tokens) + 17 * seed + 3) % 493
    return EOS if value % 29 == 0 else value + 3


def log_prob(token: int) -> float:
    return -0.25 - token % 7


def text_of(tokens: list[int]) -> str:
    return "".join(f" t{token}" for token in tokens if token != EOS)


def expected(prompt: list[int], length: int, seed: int = 0) -> list[int]:
    """The first `length` response tokens where nothing ends it before."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


class Received(NamedTuple):
    path: str
    body: dict[str, Any]
    headers: dict[str, str]


# What happens to a generate request instead of, or behind, its answer


class Status(NamedTuple):
    """Answer with an error."""

    status: int = 500
    message: str = "injected"


class Reset(NamedTuple):
    """The connection breaks when so many tokens were generated (and, streaming, sent); the request goes on."""

    after: int = 0


class LoseReply(NamedTuple):
    """All is generated, and the connection breaks before the reply."""


class Edit(NamedTuple):
    """Change the reply: what the function returns is sent, a dict as JSON, bytes as they are."""

    change: Callable[[dict[str, Any]], dict[str, Any] | bytes]


class CutShort(NamedTuple):
    """The reply ends before the length that its head announced."""


Fault = Status | Reset | LoseReply | Edit | CutShort


class _Request:
    def __init__(self, body: dict[str, Any], version: str) -> None:
        self.rid = str(body.get("rid") or uuid.uuid4().hex)
        self.body = body
        self.prompt: list[int] = body["input_ids"]
        self.sampling: dict[str, Any] = body.get("sampling_params") or {}
        self.tokens: list[int] = []
        self.spans: list[list[Any]] = [[version, 0, 0]]
        self.finish: dict[str, Any] | None = None
        self.retractions = 0

    @property
    def ended(self) -> bool:
        return self.finish is not None

    @property
    def budget(self) -> int:
        return int(self.sampling.get("max_new_tokens", 128))

    def step(self, version: str) -> None:
        seed = self.sampling.get("sampling_seed") or 0
        token = next_token(self.prompt + self.tokens, seed)
        self.tokens.append(token)
        if self.spans[-1][0] != version:
            self.spans.append([version, len(self.tokens) - 1, 0])
        self.spans[-1][2] = len(self.tokens)
        ends = not self.sampling.get("ignore_eos") and token in {EOS, *(self.sampling.get("stop_token_ids") or ())}
        if ends:
            self.finish = {"type": "stop", "matched": token}
        elif len(self.tokens) == self.budget:
            self.finish = {"type": "length", "length": self.budget}


class FakeWorker:
    """:param routed_experts: it was started with `--enable-return-routed-experts`.
    :param api_key: it was started with `--api-key`.
    :param tls: it speaks TLS, as by `--ssl-certfile`.
    """

    def __init__(
        self,
        model: str = "fake-model",
        *,
        routed_experts: bool = False,
        model_info: dict[str, Any] | None = None,
        api_key: str | None = None,
        tls: SSLContext | None = None,
    ) -> None:
        self.api_key = api_key
        self.tls = tls
        self.model = model
        self.model_info = {"model_path": model, "tokenizer_path": model, "is_generation": True} | (model_info or {})
        self.routed_experts = routed_experts
        self.received: list[Received] = []
        """Every request, in the order in which they came."""
        self.running: dict[str, _Request] = {}
        self.finished: Counter[str] = Counter()
        """Generate requests that ended, by finish reason."""
        self.faults: deque[Fault | None] = deque()
        """One for each of the next generate requests; None is none."""
        self.refused: dict[str, tuple[int, str]] = {}
        """Path -> status and body of the answer."""
        self.weight_version = "default"
        self.weights = "initial"
        self.paused: str | None = None
        self.updating = False
        self.groups: set[str] = set()
        """Process groups for weights that it has joined."""
        self.released: set[str] = set()
        self.healthy = True
        self.crashed = False
        """It was sent a token id outside of the vocabulary: the real server exits."""
        self.hears_disconnects = False
        """Whether a request whose client has gone is aborted; behind the router it is not at once."""
        self.slow: set[tuple[int, ...]] = set()
        """Prompts that `allow` holds back; empty: all."""
        self._allowance: int | None = None
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.port = 0

    # Its life

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls is not None else ''}://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, again on the same port after `kill`."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", self._generate)
        for path, handler in self._endpoints().items():
            app.router.add_route("*", path, self._plain(handler))
        app.router.add_route("*", "/{path:.*}", self._plain(lambda body: _not_found()))
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=False, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True, ssl_context=self.tls).start()
        self.port = self._runner.addresses[0][1]

    async def kill(self) -> None:
        """As by kill -9: all connections are reset, nobody listens any more, nothing runs."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        for site in list(runner.sites):
            await site.stop()
        assert runner.server is not None
        for connection in runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        for request in self.running.values():
            request.finish = {"type": "killed"}
        self.running.clear()
        self.changed()
        await runner.cleanup()

    # What tests say and ask

    def allow(self, tokens: int | None) -> None:
        """Each request may have so many tokens in all; None, as at first: as many as it wants."""
        self._allowance = tokens
        self.changed()

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await self._changed.wait()

    def changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def paths(self, *but: str) -> list[str]:
        return [received.path for received in self.received if received.path not in but]

    def bodies(self, path: str = "/generate") -> list[dict[str, Any]]:
        return [received.body for received in self.received if received.path == path]

    # Generation

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = json.loads(await http.read())
        self.received.append(Received("/generate", body, dict(http.headers)))
        self.changed()
        if (answer := self._refusal(http)) is not None:
            return answer
        fault = self.faults.popleft() if self.faults else None
        if isinstance(fault, Status):
            return web.json_response({"error": {"message": fault.message}}, status=fault.status)
        if (wrong := self._wrong(body)) is not None:
            return web.json_response({"error": wrong}, status=400)
        if any(not 0 <= token < VOCABULARY for token in body["input_ids"]):
            self.crashed = True
            return _reset(http)
        request = _Request(body, self.weight_version)
        self.running[request.rid] = request
        self.changed()
        try:
            if body.get("stream"):
                return await self._stream(http, request, fault)
            await self._run(http, request, fault)
        finally:
            self.running.pop(request.rid, None)
            self.finished[(request.finish or {"type": "lost"})["type"]] += 1
            self.changed()
        if isinstance(fault, Reset | LoseReply) or (request.finish or {}).get("type") == "killed":
            return _reset(http)
        reply = self._reply(request)
        data = json.dumps(reply).encode()
        if isinstance(fault, Edit):
            edited = fault.change(reply)
            data = edited if isinstance(edited, bytes) else json.dumps(edited).encode()
        if isinstance(fault, CutShort):
            response = web.StreamResponse(
                headers={"content-length": str(len(data)), "content-type": "application/json"}
            )
            await response.prepare(http)
            await response.write(data[: len(data) // 2])
            return _reset(http)
        return web.Response(body=data, content_type="application/json")

    async def _stream(self, http: web.Request, request: _Request, fault: Fault | None) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)

        async def send() -> None:
            reply: dict[str, Any] | bytes = self._reply(request)
            if request.finish is not None and isinstance(fault, Edit):
                assert isinstance(reply, dict)
                reply = fault.change(reply)
            data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            await response.write(b"data: " + data + b"\n\n")

        if await self._run(http, request, fault, send) or request.finish == {"type": "killed"}:
            return _reset(http)
        if isinstance(fault, LoseReply | CutShort):
            return _reset(http)
        await send()
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _run(
        self,
        http: web.Request,
        request: _Request,
        fault: Fault | None,
        send: Callable[[], Awaitable[None]] | None = None,
    ) -> bool:
        """Generate until it has ended. True: the connection was broken on the way."""
        while request.finish is None:
            if isinstance(fault, Reset) and len(request.tokens) >= fault.after:
                if http.transport is not None:
                    http.transport.abort()
                if send is not None:
                    return True
            if self.hears_disconnects and _gone(http):
                request.finish = _aborted()
                break
            if self.paused is None and len(request.tokens) < self._allowed(request):
                request.step(self.weight_version)
                if send is not None and not request.ended:
                    await send()
                self.changed()
            else:
                await self._changed.wait()
        return False

    def _allowed(self, request: _Request) -> float:
        held = not self.slow or tuple(request.prompt) in self.slow
        return math.inf if self._allowance is None or not held else self._allowance

    def _wrong(self, body: dict[str, Any]) -> str | dict[str, str] | None:
        for name in body.get("sampling_params") or {}:
            if name not in SAMPLING.split():
                return f"unknown field {name!r}, expected one of {', '.join(SAMPLING.split())}"
        if not isinstance(body.get("input_ids"), list) or not body["input_ids"]:
            return {"message": "Either text, input_ids or input_embeds should be provided."}
        if len(body["input_ids"]) > CONTEXT:
            length = len(body["input_ids"])
            return {"message": f"The input ({length} tokens) is longer than the model's context length ({CONTEXT})."}
        return None

    def _reply(self, request: _Request) -> dict[str, Any]:
        tokens, body = request.tokens, request.body
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.finish,
            "prompt_tokens": len(request.prompt),
            "weight_version": self.weight_version,
            "num_retractions": request.retractions,
        }
        if body.get("return_logprob"):
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [[log_prob(token), token, None] for token in tokens]
            meta["output_token_logprobs_length"] = len(tokens)
        meta |= {"reasoning_tokens": 0, "completion_tokens": len(tokens), "cached_tokens": 0}
        if request.finish is not None:
            meta["weight_versions"] = [
                {"version": version, "start": start, "end": end} for version, start, end in request.spans if end > start
            ]
        if body.get("return_sampling_mask"):
            meta["output_token_sampling_mask"] = [[token, *range(token % 3)] for token in tokens]
            meta["output_token_sampling_logprobs"] = [log_prob(token) / 2 for token in tokens]
            meta["output_token_sampling_mask_length"] = len(tokens)
        if body.get("return_routed_experts") and self.routed_experts:
            rows = len(request.prompt) + len(tokens) - 1
            experts = array("i", (value % 8 for value in range(rows * LAYERS * TOP_K)))
            meta["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
        meta |= {"cached_tokens_details": None, "dp_rank": None}
        if request.finish is not None:
            meta["e2e_latency"] = 0.01
        if len(tokens) == 1 or not body.get("stream"):  # the first event of a stream
            meta["response_sent_to_client_ts"] = 0.0
        return {"text": text_of(tokens), "output_ids": list(tokens), "meta_info": meta}

    # Everything else

    def _endpoints(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        info = self.model_info
        return {
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/update_weights_from_disk": self._from_disk,
            "/update_weights_from_distributed": self._in_update,
            "/update_weights_from_tensor": self._in_update,
            "/init_weights_update_group": self._join,
            "/destroy_weights_update_group": self._leave,
            "/begin_weight_update": lambda body: self._set_updating(True),
            "/end_weight_update": lambda body: self._set_updating(False),
            "/update_weight_version": self._version,
            "/release_memory_occupation": lambda body: self.released.update(
                body.get("tags") or ("weights", "kv_cache")
            ),
            "/resume_memory_occupation": lambda body: self.released.difference_update(
                body.get("tags") or ("weights", "kv_cache")
            ),
            "/health": lambda body: web.Response(status=200 if self.healthy else 503),
            "/health_generate": lambda body: web.Response(status=200 if self.healthy else 503),
            "/ready": lambda body: web.Response(status=200 if self.healthy else 503),
            "/model_info": lambda body: info | {"weight_version": self.weight_version},
            "/get_model_info": lambda body: info | {"weight_version": self.weight_version},
            "/server_info": lambda body: info | {"model_id": self.model, "version": "fake", "status": "ready"},
            "/get_server_info": lambda body: info | {"model_id": self.model, "version": "fake", "status": "ready"},
            "/v1/models": lambda body: {"object": "list", "data": [{"id": self.model, "object": "model"}]},
            "/v1/loads": lambda body: {"loads": [{"dp_rank": 0, "num_running_reqs": len(self.running)}]},
        }

    def _plain(
        self, handler: Callable[[dict[str, Any]], Any]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(http: web.Request) -> web.StreamResponse:
            data = await http.read()
            body = json.loads(data) if data else {}
            self.received.append(Received(http.path, body, dict(http.headers)))
            self.changed()
            if (refusal := self._refusal(http)) is not None:
                return refusal
            result = handler({**http.query, **body})
            if isawaitable(result):
                result = await result
            self.changed()
            return result if isinstance(result, web.StreamResponse) else web.json_response(result)

        return answer

    def _refusal(self, http: web.Request) -> web.Response | None:
        if (
            self.api_key is not None
            and http.headers.get("authorization") != f"Bearer {self.api_key}"
            and not http.path.startswith("/health")
        ):
            return web.json_response({"error": "Unauthorized"}, status=401)
        if http.path not in self.refused:
            return None
        status, text = self.refused[http.path]
        return web.Response(status=status, text=text, content_type="application/json")

    def _abort(self, body: dict[str, Any]) -> web.Response:
        for rid, request in self.running.items():
            if body.get("abort_all") or rid == body.get("rid"):  # exactly; another rid is ignored
                request.finish = request.finish or _aborted()
        return web.Response()

    def _pause(self, body: dict[str, Any]) -> dict[str, Any]:
        self.paused = str(body.get("mode", "abort"))
        for request in self.running.values():
            if self.paused == "abort":
                request.finish = request.finish or _aborted()
            request.retractions += self.paused == "retract"
        return {"message": "Generation paused successfully.", "status": "ok"}

    def _continue(self, body: dict[str, Any]) -> dict[str, Any]:
        self.paused = None
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def _flush(self, body: dict[str, Any]) -> web.Response:
        """Given a time, it answers when all ranks are idle, or then. What it answers is how it is with one of them."""
        waits = "timeout" in body
        with suppress(TimeoutError):
            async with asyncio.timeout(float(body["timeout"]) if waits else 0.0):
                while self.running:
                    await self._changed.wait()
        first = [request for request in self.running.values() if not request.body.get("routed_dp_rank")]
        if first and waits:
            return web.Response(status=400, text="Timed out waiting for idle state.")
        if first and self.paused in (None, "in_place"):  # "retract" and "abort" have taken them off
            return web.Response(status=400, text="Flush cache failed.\n")
        return web.Response(
            text="Cache flushed.\nPlease check backend logs for more details. "
            "(When there are running or waiting requests, the operation will not be performed.)\n"
        )

    def _join(self, body: dict[str, Any]) -> dict[str, Any]:
        self.groups.add(body.get("group_name", "weight_update_group"))
        return {"success": True, "message": "Succeeded to initialize."}

    def _leave(self, body: dict[str, Any]) -> web.Response:
        name = body.get("group_name", "weight_update_group")
        if name not in self.groups:
            refusal = {"success": False, "message": "The group to be destroyed does not exist."}
            return web.json_response(refusal, status=400)
        self.groups.remove(name)
        return web.json_response({"success": True, "message": "Succeeded to destroy."})

    def _from_disk(self, body: dict[str, Any]) -> web.Response:
        if body["model_path"] == "nope":
            refusal = {"success": False, "message": "Failed to get model path: nope", "num_paused_requests": 0}
            return web.json_response(refusal, status=400)
        self.weights = body["model_path"]
        return self._updated(body)

    def _in_update(self, body: dict[str, Any]) -> web.Response:
        if not self.updating:
            message = "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            return web.json_response({"success": False, "message": message}, status=400)
        return self._updated(body)

    def _updated(self, body: dict[str, Any]) -> web.Response:
        if body.get("abort_all_requests"):
            self._abort({"abort_all": True})
        self.weight_version = body.get("weight_version") or self.weight_version
        message = f"Succeeded to update model weights. Weight version updated to {self.weight_version}."
        return web.json_response({"success": True, "message": message, "num_paused_requests": 0})

    def _set_updating(self, updating: bool) -> dict[str, Any]:
        self.updating = updating
        return {"success": True, "message": "ok"}

    def _version(self, body: dict[str, Any]) -> dict[str, Any]:
        self.weight_version = body["new_version"]
        if body.get("abort_all_requests", True):
            self._abort({"abort_all": True})
        return {"success": True, "message": "ok", "new_version": self.weight_version}


def _not_found() -> web.Response:
    return web.json_response({"detail": "Not Found"}, status=404)


def _aborted() -> dict[str, Any]:
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def _gone(http: web.Request) -> bool:
    return http.transport is None or http.transport.is_closing()


def _reset(http: web.Request) -> web.Response:
    if http.transport is not None:
        http.transport.abort()
    return web.Response(status=500)  # nobody reads it


class Front(ABC):
    """Listens at `url` while it is open, and asks those behind it by `session`."""

    url: str
    session: ClientSession

    @abstractmethod
    def routes(self) -> list[web.RouteDef]: ...

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.add_routes(self.routes())
        self.session = ClientSession()
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        await self.session.close()


class FakeRouter(Front):
    """Sends requests on to its workers in turn, without the fields that `drops` names; answers 404 to the rest.

    It sees at once which of them are up, but sends to all that are registered.
    """

    def __init__(self, *workers: FakeWorker, drops: Callable[[dict[str, Any]], list[str]]) -> None:
        self.workers = list(workers)
        self.registered = {str(number): worker for number, worker in enumerate(workers)}
        self.circuits_open = 0
        """So many requests find the circuits of all workers open."""
        self.received: list[Received] = []
        self._drops = drops
        self._turn = 0

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self._generate),
            web.get("/workers", self._list),
            web.post("/workers", self._add),
            web.get("/workers/{id}", self._one),
            web.delete("/workers/{id}", self._remove),
        ]

    async def _generate(self, http: web.Request) -> web.Response:
        body = json.loads(await http.read())
        self.received.append(Received("/generate", body, dict(http.headers)))
        for name in self._drops(body):
            owner, _, field = name.rpartition(".")
            del (body[owner] if owner else body)[field]
        if self.circuits_open:
            self.circuits_open -= 1
            message = "No available workers (all circuits open or unhealthy)"
            error = {"type": "Service Unavailable", "code": "no_available_workers", "message": message}
            return web.json_response({"error": error}, status=503)
        self._turn += 1
        registered = list(self.registered.values())
        worker = registered[self._turn % len(registered)]
        try:
            headers = {name: http.headers[name] for name in ("authorization",) if name in http.headers}
            async with self.session.post(f"{worker.url}/generate", json=body, headers=headers) as response:
                return web.Response(body=await response.read(), status=response.status, content_type="application/json")
        except ClientError as error:
            return web.json_response({"error": {"message": str(error)}}, status=502)

    async def _list(self, http: web.Request) -> web.Response:
        return web.json_response({"workers": list(map(self._shown, self.registered)), "total": len(self.registered)})

    async def _one(self, http: web.Request) -> web.Response:
        id = http.match_info["id"]
        return web.json_response(self._shown(id)) if id in self.registered else web.Response(status=404)

    async def _add(self, http: web.Request) -> web.Response:
        url = (await http.json())["url"]
        id = str(len(self.received) + 100)
        self.registered[id] = next(worker for worker in self.workers if worker.url == url)
        return web.json_response({"worker_id": id}, status=202)

    async def _remove(self, http: web.Request) -> web.Response:
        self.registered.pop(http.match_info["id"])
        return web.Response(status=202)

    def _shown(self, id: str) -> dict[str, Any]:
        worker = self.registered[id]
        return {"id": id, "url": worker.url, "is_healthy": worker._runner is not None}
