"""slime: its plug-in options, served by a pipeline.

    rollout      generate_rollout: --rollout-function-path, --eval-function-path
    engines      generate: --custom-generate-function-path
    hooks        apply_rollout_sample_hooks, for the hooks of --rollout-sample-hook-path
    filters      --dynamic-sampling-filter-path, --buffer-filter-path
    debug        the files of --save-debug-rollout-data and --load-debug-rollout-data
    samples      slime's Sample and ours, both ways
    options      what is read of slime's args
    stages, evaluation

`docs/slime.md` says what to change, and what changes with it. slime itself is not needed: where it is not importable,
types of the same shape stand in for its own.
"""

from backends.slime.debug import load_debug_rollout_data, save_debug_rollout_data
from backends.slime.engines import generate
from backends.slime.filters import check_reward_nonzero_std, check_reward_nonzero_std_with_fallback, oldest_first
from backends.slime.hooks import apply_rollout_sample_hooks, rollout_context, set_current_rollout_id
from backends.slime.rollout import generate_rollout, generate_rollout_async
from backends.slime.samples import (
    DynamicFilterOutput,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    SlimeSample,
    from_slime,
    to_slime,
)

__all__ = [
    "DynamicFilterOutput",
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "SlimeSample",
    "apply_rollout_sample_hooks",
    "check_reward_nonzero_std",
    "check_reward_nonzero_std_with_fallback",
    "from_slime",
    "generate",
    "generate_rollout",
    "generate_rollout_async",
    "load_debug_rollout_data",
    "oldest_first",
    "rollout_context",
    "save_debug_rollout_data",
    "set_current_rollout_id",
    "to_slime",
]
