"""`Tokenize`: text and chat prompts become token ids on our side: what is trained on is what was generated from.

Tokenize("Qwen/Qwen3-0.6B", max_length=2048)
Tokenize("Qwen/Qwen3-0.6B", template={"enable_thinking": False}, tools=[...])
Tokenize(lambda prompt: [ord(character) for character in prompt])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import isawaitable
from types import MappingProxyType, TracebackType
from typing import Any, Self

from eventbus.imports import optional_dependency
from eventbus.sample import Sample
from eventbus.stage import Drop

__all__ = ["Tokenize"]


class Tokenize:
    """Fills `sample.tokens` from `sample.prompt`, a string or a list of chat messages. A sample that has tokens passes.

    :param tokenizer: the name or folder of a model, read by transformers (`rolloutbus[sglang]`) when the stream opens;
        a tokenizer of transformers or of tokenizers; or a function that takes the prompt and gives its ids, sync or
        async.
    :param template: arguments of the chat template.
    :param tools: tool descriptions for the chat template.
    :param special_tokens: a string gets the special tokens of the model in front; say False where it has them already.
    :param max_length: of the prompt, in tokens: a longer one leaves the stream as `prompt_too_long`.
    :raises ValueError: `max_length` is less than 1; when called: the prompt is empty or gives no tokens.
    :raises LoadError: when the stream opens: transformers is not installed.
    :raises TypeError: when called: the prompt is a list of messages, and the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: Mapping[str, Any] = MappingProxyType({}),
        tools: Sequence[Mapping[str, Any]] | None = None,
        special_tokens: bool = True,
        max_length: int | None = None,
    ) -> None:
        if max_length is not None and max_length < 1:
            raise ValueError(f"Tokenize: max_length is {max_length}, it must be at least 1")
        self.tokenizer = tokenizer
        self.template = dict(template)
        self.tools = None if tools is None else [dict(tool) for tool in tools]
        self.special_tokens = special_tokens
        self.max_length = max_length
        self._last: tuple[Any, Sequence[int]] | None = None

    def __enter__(self) -> Self:
        if isinstance(self.tokenizer, str):
            with optional_dependency():
                from transformers import AutoTokenizer
            self.tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def __call__(self, sample: Sample) -> Drop | None:
        if sample.tokens:
            return None
        try:
            ids = await self.ids(sample.prompt)
        except (ValueError, TypeError) as error:
            raise type(error)(f"sample {sample.index}: {error}") from error
        if self.max_length is not None and len(ids) > self.max_length:
            return Drop("prompt_too_long")
        sample.tokens += ids
        return None

    async def ids(self, prompt: str | list[dict[str, Any]]) -> Sequence[int]:
        """The token ids of a prompt, whatever its length."""
        if self._last is not None and self._last[0] == prompt:  # siblings come one after the other
            return self._last[1]
        self.__enter__()
        if hasattr(self.tokenizer, "encode"):
            ids = self._encode(prompt)
        else:
            ids = self.tokenizer(prompt)
            if isawaitable(ids):
                ids = await ids
        if not len(ids):
            raise ValueError(f"the prompt {prompt!r} has no tokens")
        self._last = (prompt, ids)
        return ids  # type: ignore[no-any-return]

    def _encode(self, prompt: str | list[dict[str, Any]]) -> Any:
        special = self.special_tokens
        if not isinstance(prompt, str):
            prompt, special = self._chat(prompt), False  # the template writes them
        encoded = self.tokenizer.encode(prompt, add_special_tokens=special)
        return getattr(encoded, "ids", encoded)  # that of tokenizers gives an object

    def _chat(self, messages: list[dict[str, Any]]) -> str:
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise TypeError(
                f"the prompt is a list of messages, and {type(self.tokenizer).__name__} has no chat template: use the "
                "tokenizer of a chat model, or make the prompt a string"
            )
        text = self.tokenizer.apply_chat_template(
            messages, tools=self.tools, tokenize=False, add_generation_prompt=True, **self.template
        )
        assert isinstance(text, str)
        return text
