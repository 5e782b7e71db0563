"""Run a recorded stream again: verify it, ask what other stages would have made of it, or feed a pipeline from it.

`Replay` runs the stages of a log over the samples in it; `ReplayEngine` is an engine that answers what a log recorded.
Neither needs the engine, the model or the tokenizer of the run.
"""

from eventbus.replay.engine import ReplayEngine
from eventbus.replay.record import Change, ReplayError
from eventbus.replay.replay import Replay, Step
from eventbus.replay.report import RoundDifference, VerifyReport, WhatIfReport
from eventbus.replay.run import Divergence

__all__ = [
    "Change",
    "Divergence",
    "Replay",
    "ReplayEngine",
    "ReplayError",
    "RoundDifference",
    "Step",
    "VerifyReport",
    "WhatIfReport",
]
