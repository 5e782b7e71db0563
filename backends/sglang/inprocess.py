"""An `sglang.Engine` of this process behind the face of `Client`: each path does what SGLang's server does for it.

What goes in and comes out is the JSON of the server, so that all that reads and checks it is the same for both. The
paths lead to the engine's tokenizer manager, as they do in the server; the engine's own methods would run a loop of
their own inside of ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from importlib import import_module
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from backends.sglang.client import AttemptFailed, RequestRefused, answer_error

__all__ = ["ADDRESS", "InProcess"]

ADDRESS: Final = "sglang.Engine"
"""What stands for the address of a worker."""

_REQUESTS: Final[Mapping[str, str]] = {
    "abort_request": "AbortReq",
    "pause_generation": "PauseGenerationReqInput",
    "continue_generation": "ContinueGenerationReqInput",
    "update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "update_weight_version": "UpdateWeightVersionReqInput",
    "release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}
"""Path, which is the name of the tokenizer manager's method too -> the type of its request."""


class InProcess:
    """:param engine: an `sglang.Engine` (0.5.23). Who made it shuts it down.
    :raises TypeError: it is none, or one of a node that takes no requests.
    """

    def __init__(self, engine: Any) -> None:
        if getattr(engine, "tokenizer_manager", None) is None:
            raise TypeError(
                f"SGLangEngine(in_process=...): {type(engine).__name__} is no sglang.Engine that takes requests"
                + ("; of several nodes that is the first one's" if hasattr(engine, "tokenizer_manager") else "")
            )
        self._engine = engine

    async def __aenter__(self) -> Self:
        """:raises RuntimeError: the engine has worked on another event loop: it stays with its first one."""
        manager = self._engine.tokenizer_manager
        if manager.event_loop not in (None, asyncio.get_running_loop()):
            raise RuntimeError(
                "this sglang.Engine belongs to another event loop, that of its first request: use it in one anyio.run "
                "or asyncio.run only, and ask nothing of it before"
            )
        manager.auto_create_handle_loop()  # here rather than in the first request, whose context it would keep
        self._types = import_module("sglang.srt.managers.io_struct")
        self._contract_error = import_module("sglang.srt.entrypoints.api_contract").generate_contract_error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def post(self, url: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
        """:raises RequestRefused: the engine refused, or has no such path.
        :raises AttemptFailed: it failed.
        """
        path, _, query = url.removeprefix(f"{ADDRESS}/").partition("?")
        if path == "flush_cache":
            return await self._flush_cache(url, float(query.removeprefix("timeout=") or 0))
        if path != "generate":
            return await self._control(url, path, body)
        answer = b""
        async with aclosing(self.events(url, body)) as events:
            async for event in events:  # one
                answer = event
        return answer

    async def get(self, url: str) -> bytes:
        """As `post`."""
        if url != f"{ADDRESS}/model_info":
            raise _unknown(url)
        info = self._engine.get_model_info()
        info["tokenizer_path"] = self._engine.server_args.tokenizer_path or self._engine.server_args.model_path
        return msgspec.json.encode(info)

    async def events(
        self, url: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The parts of a reply, each with all that came before it; without `stream` the whole. Raises as `post`."""
        try:
            fields = msgspec.json.decode(body)
            if (wrong := self._contract_error(fields)) is not None:
                raise ValueError(wrong)
            request = self._types.GenerateReqInput(**fields)
            async with aclosing(self._engine.tokenizer_manager.generate_request(request)) as replies:
                async for reply in replies:
                    # At once: the lists in it grow with the response.
                    yield msgspec.json.encode(reply, enc_hook=_plain)
        except Exception as error:
            raise _raised(url, error, refuses=ValueError) from error

    async def _flush_cache(self, url: str, timeout: float) -> bytes:
        flushed = await self._engine.tokenizer_manager.flush_cache(timeout_s=timeout)
        if not flushed.success:
            raise answer_error(url, 400, (flushed.message or "Flush cache failed.").encode())
        return b""

    async def _control(self, url: str, path: str, body: bytes) -> bytes:
        if path not in _REQUESTS:
            raise _unknown(url)
        manager = self._engine.tokenizer_manager
        try:
            request = self._request(_REQUESTS[path], msgspec.json.decode(body))
        except (TypeError, msgspec.ValidationError) as error:
            raise _raised(url, error, refuses=Exception) from error
        try:
            if path == "abort_request":
                manager.abort_request(rid=request.rid, abort_all=request.abort_all)
                return b""
            if path == "update_weight_version" and request.abort_all_requests:
                manager.abort_request(abort_all=True)
            result = await getattr(manager, path)(request)
        except Exception as error:
            raise _raised(url, error, refuses=ValueError) from error
        success, message, *_ = result if isinstance(result, tuple) else (True, "")
        if not success:
            raise answer_error(url, 400, msgspec.json.encode({"message": message}))
        return msgspec.json.encode({"success": True, "message": message})

    def _request(self, name: str, fields: Mapping[str, Any]) -> Any:
        """Checked, which a constructor does not do: of a wrong type the scheduler dies, and this process with it."""
        kind = getattr(self._types, name)
        return msgspec.convert(msgspec.to_builtins(kind(**fields)), kind)


def _plain(value: Any) -> Any:
    """numpy's and torch's numbers."""
    try:
        return value.tolist()
    except AttributeError:
        raise NotImplementedError(f"{type(value).__name__} has no JSON form") from None


def _unknown(url: str) -> RequestRefused:
    return RequestRefused(f"{url}: an engine in this process has no such path", 501)


def _raised(url: str, error: Exception, refuses: type[Exception]) -> Exception:
    """What the server would answer."""
    if isinstance(error, AttemptFailed | RequestRefused):
        return error
    status = getattr(error, "status_code", 400 if isinstance(error, refuses) else 500)
    message = str(getattr(error, "detail", None) or error) or type(error).__name__
    return answer_error(url, int(status), msgspec.json.encode({"message": message}))
