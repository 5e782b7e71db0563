"""`Model`: what the workers' model takes, where its files are readable here: its vocabulary and its tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
from anyio import current_time

from backends.sglang.fleet import Fleet
from middleware.tokenize import Tokenize

__all__ = ["Model"]

logger = logging.getLogger("rolloutbus.sglang")

MODEL_SECONDS: Final = 5.0
"""For a worker to say what its model is."""
AGAIN_SECONDS: Final = 30.0
"""Until one that did not say is asked again."""


class Model:
    """:param vocabulary: number of token ids, where it is known already."""

    def __init__(self, fleet: Fleet, vocabulary: int | None) -> None:
        self._fleet = fleet
        self._vocabulary = vocabulary
        self._ask_at = -inf if vocabulary is None else inf
        self._asking = anyio.Lock(fast_acquire=True)
        self._tokenizer: Tokenize | None = None

    async def vocabulary(self) -> int | None:
        """Number of token ids; None: not known."""
        if self._ask_at <= current_time():
            async with self._asking:  # nobody passes unchecked meanwhile
                if self._ask_at <= current_time():
                    again = current_time() + AGAIN_SECONDS
                    with suppress(*_NO_ANSWER), anyio.move_on_after(MODEL_SECONDS):
                        path = (await self._info()).get("model_path")
                        self._vocabulary, again = _vocabulary_of(path), inf
                    self._ask_at = again
        return self._vocabulary

    async def tokenize(self, prompt: str | list[dict[str, Any]]) -> Sequence[int]:
        """:raises ValueError: the tokenizer is not readable here."""
        if self._tokenizer is None:
            async with self._fleet:
                path = (await self._info()).get("tokenizer_path")
            if not isinstance(path, str) or not Path(path).is_dir():
                raise ValueError(
                    f"the worker's tokenizer {path!r} is not readable here: put the stage Tokenize(name) in front of "
                    "Generate"
                )
            logger.warning("the prompts come without tokens: they are read with the worker's own tokenizer, %s", path)
            self._tokenizer = Tokenize(path)
        return await self._tokenizer.ids(prompt)

    async def _info(self) -> dict[str, Any]:
        urls = await self._fleet.urls()
        url = next((worker.url for worker in self._fleet.workers if not worker.away), urls[0])
        info: dict[str, Any] = msgspec.json.decode(await self._fleet.client.get(f"{url}/model_info"))
        return info


_NO_ANSWER: Final = (OSError, ValueError, AttributeError, RecursionError)
"""What is raised where no worker is up, or it says something else."""


def _vocabulary_of(path: Any) -> int | None:
    """Of the model at this path, where that is readable here."""
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        config = msgspec.json.decode((Path(path) / "config.json").read_bytes())
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
        if isinstance(size, int):
            return size
    logger.warning(
        "the vocabulary of the workers' model %s is not readable here, so token ids beyond it, of which a server dies, "
        "are not found: give SGLangEngine(vocabulary=...)", path
    )  # fmt: skip
    return None
