"""The reward as it should be: what the model ends with is its answer."""

from __future__ import annotations

import re

from eventbus import Sample


def score(sample: Sample) -> None:
    numbers = re.findall(r"\d+", sample.response)
    sample.metadata["read"] = numbers[-1] if numbers else None
    sample.reward = float(sample.metadata["read"] == sample.label)
