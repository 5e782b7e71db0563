"""The stages: hooks, rewards, filters, wrappers, advantage, observers. Each file is a model for a stage of your own."""

from middleware.advantage import GroupAdvantage
from middleware.filter import DynamicFilter, FilterDecision, should_drop
from middleware.generate import Generate
from middleware.hooks import apply_sample_hooks
from middleware.judges import (
    accuracy_band,
    repetition,
    response_length,
    reward_nonzero_std,
    reward_nonzero_std_with_fallback,
    truncation,
)
from middleware.offpolicy import mask_offpolicy
from middleware.progress import Progress
from middleware.recorder import Recorder
from middleware.rewards import MathAnswer, RemoteReward, exact_match
from middleware.stages import batch_stage, group_stage, sample_stage
from middleware.tokenize import Tokenize
from middleware.wrappers import in_thread, limit, retry, timeout

__all__ = [
    "DynamicFilter",
    "FilterDecision",
    "Generate",
    "GroupAdvantage",
    "MathAnswer",
    "Progress",
    "Recorder",
    "RemoteReward",
    "Tokenize",
    "accuracy_band",
    "apply_sample_hooks",
    "batch_stage",
    "exact_match",
    "group_stage",
    "in_thread",
    "limit",
    "mask_offpolicy",
    "repetition",
    "response_length",
    "retry",
    "reward_nonzero_std",
    "reward_nonzero_std_with_fallback",
    "sample_stage",
    "should_drop",
    "timeout",
    "truncation",
]
