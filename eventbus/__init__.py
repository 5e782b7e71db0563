"""What flows and how it flows: samples, events, context, the pipeline and its ledger."""

from eventbus.batching import BatchSpec, RolloutExhausted
from eventbus.columns import LogProbs, LossMask, Tokens
from eventbus.context import RolloutContext, current_rollout
from eventbus.events import Event
from eventbus.group import Batch, EvalReport, Group, Summary, TrainResult, Verdict
from eventbus.imports import load_object
from eventbus.pipeline import Pipeline
from eventbus.prompts import JsonlPrompts, Prompts
from eventbus.sample import Completion, Sample, SampleStatus, WeightSpan
from eventbus.stage import CallNext, ContractError, Drop, Dropped, Hold
from eventbus.wire import decode, encode
from eventbus.workers import WorkerDied

__all__ = [
    "Batch",
    "BatchSpec",
    "CallNext",
    "Completion",
    "ContractError",
    "Drop",
    "Dropped",
    "EvalReport",
    "Event",
    "Group",
    "Hold",
    "JsonlPrompts",
    "LogProbs",
    "LossMask",
    "Pipeline",
    "Prompts",
    "RolloutContext",
    "RolloutExhausted",
    "Sample",
    "SampleStatus",
    "Summary",
    "Tokens",
    "TrainResult",
    "Verdict",
    "WeightSpan",
    "WorkerDied",
    "current_rollout",
    "decode",
    "encode",
    "load_object",
]
