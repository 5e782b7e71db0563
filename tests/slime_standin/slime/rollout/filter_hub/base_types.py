from dataclasses import dataclass
from typing import Any


@dataclass
class DynamicFilterOutput:
    keep: Any
    reason: str | None = None
    keep_when_insufficient: bool = False
