"""The two stages of the demo: a reward, and a custom stage that measures.

The task: write the digits of the prompt in ascending order, `"472="` -> `"247"`.
"""

from __future__ import annotations

from eventbus import Sample, SampleStatus


def score(sample: Sample) -> None:
    """The share of digits in the right place, 0 to 1; half of it for a response that did not end by itself."""
    right = sum(given == wanted for given, wanted in zip(sample.response, sample.label, strict=False))
    share = right / max(len(sample.response), len(sample.label))
    sample.reward = share if sample.status is SampleStatus.COMPLETED else share / 2


def note_difficulty(sample: Sample, *, rollout_id: int) -> None:
    """A stage of one's own: it leaves in the metadata what one wants to find there later."""
    digits = str(sample.prompt).rstrip("=")
    sample.metadata["rollout"] = rollout_id
    sample.metadata["inversions"] = sum(a > b for i, a in enumerate(digits) for b in digits[i + 1 :])
