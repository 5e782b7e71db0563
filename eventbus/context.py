"""Which rollout, group, sample and stage the running code works for.

The context is one value in one context variable, made anew for each sample. It is set when the sample enters its
stages, inside a copy of the surrounding context that belongs to that sample alone; so every stage, task, thread and
remote call that works for the sample sees the same rollout, also while other rollouts or an evaluation run beside it,
and what a stage sets in context variables of its own never reaches another sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from eventbus.sample import Sample

__all__ = ["RolloutContext", "current_rollout"]


class RolloutContext:
    """What the running code works for. Do not keep it beyond the stage: read it where you need it."""

    # Where the sample stands: the part that moves, and it belongs to this sample alone. Defaults live in the class, so
    # that making one of these, which happens for every sample, sets no more than it must.
    stage: str | None = None
    """Name of the stage that works on it now."""
    since: float = 0.0
    """`time.perf_counter()` when that stage began."""
    holder: str | None = None
    """What the stage waits for, where it says so: an engine, a limit, a thread."""
    engine: Any = None
    """The engine that works for the sample now."""
    sample: Sample | None = None
    """The sample as that engine knows it."""
    generated = False
    """An engine has answered since the stage began."""
    attempts = 1
    """Times that the stage was tried so far."""
    waited = 0.0
    """Seconds that the stage waited before it could begin."""
    closing = False
    """The rollout has all it needs: begin nothing long, return the sample with status ABORTED."""

    def __init__(
        self,
        rollout_id: int,
        evaluation: bool = False,
        group_index: int | None = None,
        index: int | None = None,
        execution: int | None = None,
    ) -> None:
        self.rollout_id = rollout_id
        """Number of the round (not `Sample.rollout_id`, which names the execution)."""
        self.evaluation = evaluation
        self.group_index = group_index
        """None in a batch stage."""
        self.index = index
        """`Sample.index`; None in a group or batch stage."""
        self.execution = execution
        """`Sample.rollout_id`; None in a group or batch stage."""

    @contextmanager
    def generating(self, engine: Any, sample: Sample) -> Iterator[None]:
        """While this is open, `engine` works for `sample`.

        When the rollout ends first, an engine with `abort(samples)` is asked to abort (it answers with what it has,
        status ABORTED) instead of the stage being cancelled. Use it in a stage of your own that calls an engine.
        """
        self.engine, self.sample, self.holder = engine, sample, f"engine {type(engine).__name__}"
        try:
            yield
            self.generated = True
        finally:
            self.engine = self.sample = self.holder = None

    def __repr__(self) -> str:
        fields = ("rollout_id", "evaluation", "group_index", "index", "execution", "stage")
        return "RolloutContext(" + ", ".join(f"{name}={getattr(self, name)!r}" for name in fields) + ")"


_current: ContextVar[RolloutContext] = ContextVar("rolloutbus_rollout")


def current_rollout() -> RolloutContext:
    """The context of the running stage.

    :raises LookupError: no stage of a pipeline is running here.
    """
    try:
        return _current.get()
    except LookupError:
        raise LookupError(
            "no rollout: current_rollout() works inside a stage of a running pipeline "
            "(in a test: eventbus.testing.run_stage(stage, sample, rollout_id=...))"
        ) from None
