"""The reward of the run: 1 for the right sum. It has a bug."""

from __future__ import annotations

import re

from eventbus import Sample


def score(sample: Sample) -> None:
    numbers = re.findall(r"\d+", sample.response)
    sample.metadata["read"] = numbers[0] if numbers else None
    sample.reward = float(sample.metadata["read"] == sample.label)
