import json
from pathlib import Path
from typing import Any

from .types import Sample


class Dataset:
    """Reads JSON lines."""

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        processor: Any,
        max_length: int | None,
        *,
        prompt_key: str = "text",
        multimodal_keys: Any = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: Any = None,
    ) -> None:
        rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
        self.samples = [
            Sample(prompt=row[prompt_key], label=row[label_key or "label"], metadata=row.get(metadata_key) or {})
            for row in rows
        ]
