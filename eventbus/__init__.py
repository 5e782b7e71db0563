"""What flows and how it flows: samples, events, context, the pipeline and its ledger."""

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from eventbus.log import LogReader, LogWriter
    from eventbus.replay import Replay, ReplayEngine

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
    "LogReader",
    "LogWriter",
    "LossMask",
    "Pipeline",
    "Prompts",
    "Replay",
    "ReplayEngine",
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

_LATE = {
    "LogReader": "eventbus.log",
    "LogWriter": "eventbus.log",
    "Replay": "eventbus.replay",
    "ReplayEngine": "eventbus.replay",
}
"""Imported when first asked for: a run without a log needs none of it."""


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LATE[name]), name)
