"""`Model`: what the workers' model takes, where its files are readable here: its vocabulary and its tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec

from backends.sglang.fleet import Fleet
from backends.sglang.router import RouterError
from middleware.tokenize import Tokenize

__all__ = ["Model"]

logger = logging.getLogger("rolloutbus.sglang")

MODEL_SECONDS: Final = 5.0
"""For a worker to say what its model is, once."""


class Model:
    """:param vocabulary: number of token ids, where it is known already."""

    def __init__(self, fleet: Fleet, vocabulary: int | None) -> None:
        self._fleet = fleet
        self._vocabulary = vocabulary
        self._asked = vocabulary is not None
        self._asking = anyio.Lock(fast_acquire=True)
        self._tokenizer: Tokenize | None = None

    async def vocabulary(self) -> int | None:
        """Number of token ids; None: not known."""
        if not self._asked:
            async with self._asking:  # nobody passes unchecked meanwhile
                if not self._asked:
                    self._vocabulary = await self._read_vocabulary()
                    self._asked = True
        return self._vocabulary

    async def _read_vocabulary(self) -> int | None:
        """From the worker's model, where that is readable here."""
        with (
            suppress(OSError, ValueError, AttributeError, RecursionError, RouterError),
            anyio.move_on_after(MODEL_SECONDS),
        ):
            path = Path((await self._info()).get("model_path", "")) / "config.json"
            config = msgspec.json.decode(path.read_bytes())
            size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
            return size if isinstance(size, int) else None
        return None

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
