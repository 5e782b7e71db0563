"""Which rollout, group, sample and stage the running code works for.

The context is one value in one context variable, made anew for each sample. It is set when the sample enters its
stages, inside a copy of the surrounding context that belongs to that sample alone; so every stage, task, thread and
remote call that works for the sample sees the same rollout, also while other rollouts or an evaluation run beside it,
and what a stage sets in context variables of its own never reaches another sample.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgspec

from eventbus.sample import Sample

if TYPE_CHECKING:
    from eventbus.events import AttemptOutcome
    from eventbus.observers import EventHub

__all__ = ["RolloutContext", "current_rollout"]


class RolloutContext(msgspec.Struct, eq=False):
    """What the running code works for. Do not keep it beyond the stage: read it where you need it."""

    # A struct, since one is made for every sample: its constructor runs in C.
    rollout_id: int
    """Number of the round (not `Sample.rollout_id`, which names the execution)."""
    evaluation: bool = False
    group_index: int | None = None
    """None in a batch stage."""
    index: int | None = None
    """`Sample.index`; None in a group or batch stage."""
    execution: int | None = None
    """`Sample.rollout_id`; None in a group or batch stage."""

    # Where the sample stands: the part that moves, and it belongs to this sample alone.
    stage: str | None = None
    """Name of the stage that works on it now."""
    since: float = 0.0
    """`time.perf_counter()` when that stage began."""
    began: float = 0.0
    """The same by the loop's clock, where an observer asks for times."""
    holder: str | None = None
    """What the stage waits for, where it says so: a limit, a thread."""
    engine: Any = None
    """The engine that works for the sample now."""
    sample: Sample | None = None
    """The sample as that engine knows it."""
    generated: bool = False
    """An engine has answered since the stage began."""
    attempts: int = 1
    """Times that the stage was tried so far."""
    waited: float = 0.0
    """Seconds that the stage waited before it could begin."""
    closing: bool = False
    """The rollout has all it needs: begin nothing long, return the sample with status ABORTED."""

    def generating(self, engine: Any, sample: Sample) -> Generating:
        """While this is open (`with`), `engine` works for `sample`.

        When the rollout ends first, an engine with `abort(samples)` is asked to abort (it answers with what it has,
        status ABORTED) instead of the stage being cancelled. Use it in a stage of your own that calls an engine.
        """
        return Generating(self, engine, sample)

    def attempt_ended(
        self,
        *,
        attempt: int,
        worker: str,
        rid: str,
        outcome: AttemptOutcome,
        seconds: float,
        error: str | None = None,
        tokens: int = 0,
    ) -> None:
        """For an engine: one of its requests for this sample has ended, which observers see as `AttemptEnded`. Costs
        next to nothing where none asks for that, and never raises."""
        hub = _hub.get()
        if hub is not None and hub.wants("attempt_ended"):
            hub.report(
                "attempt_ended",
                self.rollout_id,
                self.evaluation,
                group_index=self.group_index,
                index=self.index,
                execution=self.execution,
                stage=self.stage,
                attempt=attempt,
                worker=worker,
                rid=rid,
                outcome=outcome,
                error=error,
                tokens=tokens,
                seconds=seconds,
            )

    def __repr__(self) -> str:
        fields = ("rollout_id", "evaluation", "group_index", "index", "execution", "stage")
        return "RolloutContext(" + ", ".join(f"{name}={getattr(self, name)!r}" for name in fields) + ")"


class Generating(msgspec.Struct, eq=False):
    """An open request to an engine; see `RolloutContext.generating`."""

    place: RolloutContext
    engine: Any
    sample: Sample

    def __enter__(self) -> None:
        self.place.engine, self.place.sample = self.engine, self.sample

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        place = self.place
        place.engine = place.sample = None
        if kind is None:
            place.generated = True


_current: ContextVar[RolloutContext] = ContextVar("rolloutbus_rollout")
_hub: ContextVar[EventHub | None] = ContextVar("rolloutbus_hub", default=None)
"""Of the pipeline that the running code works for. It is not in `RolloutContext`, so that this stays small: a
connection that a stage opens, and that stays, holds the context in which it was opened."""


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
