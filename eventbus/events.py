"""What happened, in order: one frozen, tagged struct per kind of event, all with the same head.

    seq          goes up by exactly one from event to event of a pipeline
    time_ns      nanoseconds since the epoch, by the loop's clock: it never goes back, and is virtual under virtual time
    rollout_id   number of the round
    evaluation   it happened in an evaluation

An event holds values of the moment it was built: what the stream changes later does not change it. Tensors and arrays
are the exception, they are shared. It is light: the per-token columns of a sample appear as length and CRC-32, its
multimodal and replay fields not at all. An event with `samples` shows samples; an observer with `observe_samples` gets
them whole. In the fields of an event, `index` and `execution` are `Sample.index` and `Sample.rollout_id`. Times that
took are in seconds.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable, Mapping
from copy import copy
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from eventbus.codecs import encoder, unencodable
from eventbus.columns import Column, Tokens
from eventbus.group import Batch, Group, Summary, Verdict
from eventbus.ledger import Outcome
from eventbus.sample import Sample, SampleStatus, WeightSpan, copied

__all__ = [
    "EVENT_KINDS",
    "AttemptEnded",
    "AttemptOutcome",
    "BatchAssembled",
    "BatchTrained",
    "ColumnMark",
    "Event",
    "EventHead",
    "GroupCompleted",
    "GroupEnded",
    "GroupJudged",
    "GroupSubmitted",
    "KnownEvent",
    "LightSample",
    "RolloutFinished",
    "RolloutStarted",
    "SampleGenerated",
    "StageApplied",
    "StageFailed",
    "UnknownEvent",
    "WeightsUpdated",
    "changes",
    "digest",
    "light",
]

AttemptOutcome: TypeAlias = Literal["answered", "failed", "aborted"]

ColumnMark: TypeAlias = tuple[int, int]
"""Length and CRC-32 of a column's little-endian bytes."""


class LightSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sample as events show it."""

    sample: Sample
    """All but the per-token columns, the multimodal and the replay fields. To read, not to run stages on: `tokens` is
    empty whatever `response_length` says."""
    columns: dict[str, ColumnMark] = {}
    """The columns that the sample has, by field name."""


class EventHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What every event begins with. `decode(data, EventHead)` reads it from an event of any kind and any version."""

    seq: int
    time_ns: int
    rollout_id: int
    evaluation: bool = False


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


class _Known(EventHead, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag=_snake_case):
    @property
    def kind(self) -> str:
        """The name of this kind of event, `group_judged` for `GroupJudged`."""
        return str(type(self).__struct_config__.tag)


class RolloutStarted(_Known, frozen=True, kw_only=True, omit_defaults=True):
    target: int
    """Groups that the batch will have."""
    group_size: int
    batch: dict[str, Any] = {}
    """The fields of the `BatchSpec`."""


class RolloutFinished(_Known, frozen=True, kw_only=True, omit_defaults=True):
    summary: Summary | None = None
    error: str | None = None
    """What ended it, when it was not a full batch."""


class GroupSubmitted(_Known, frozen=True, kw_only=True, omit_defaults=True):
    group_index: int
    round: int
    origin: Literal["new", "carried", "recycled", "restarted"]
    executions: list[int]
    indices: list[int]
    """`Sample.index` of each execution."""
    samples: list[list[LightSample]] = []
    """First the prompt's sample, alone in its list. Behind it, for a recycled group, what each execution has already:
    the samples of a finished one, a partial one, or nothing."""


class SampleGenerated(_Known, frozen=True, kw_only=True, omit_defaults=True):
    """An engine has answered, and the stage that asked it is done."""

    group_index: int
    index: int
    execution: int
    stage: str
    status: SampleStatus
    response_length: int
    weight_versions: list[WeightSpan] = []
    seconds: float
    samples: list[list[LightSample]] = []
    """The one sample."""


class StageApplied(_Known, frozen=True, kw_only=True, omit_defaults=True):
    """A sample or a group went through a stage."""

    group_index: int
    index: int | None = None
    """None for a group stage, as is `execution`."""
    execution: int | None = None
    child: int = 0
    """0 for the execution's own sample, 1 and up for those that a stage fanned out."""
    stage: str
    seconds: float
    waited: float = 0.0
    """Of `seconds`: for a limit to let it begin, and between attempts."""
    attempts: int = 1
    worker: int | None = None
    """Number of the worker that ran it; None where the rollout's own task did."""
    changed: dict[str, Any] = {}
    """New values of the sample's changed light fields by name. Read back, they are plain lists, dicts and numbers."""
    columns: dict[str, ColumnMark | None] = {}
    """New marks of the changed columns by name; None for one that is gone."""
    dropped: str | None = None
    """The reason, where the stage dropped what it got."""
    samples: list[list[LightSample]] = []
    """What the stage left, where it could not be told from running it again: it is marked `external`, or it fanned out
    (the children in one list). For a group, the samples of each execution."""


class GroupCompleted(_Known, frozen=True, kw_only=True, omit_defaults=True):
    """All executions of a group are through the sample stages."""

    group_index: int
    at: int = 0
    """Group stages that a carried group has been through in an earlier rollout."""
    samples: list[list[LightSample]]
    """Per execution."""


class GroupJudged(_Known, frozen=True, kw_only=True, omit_defaults=True):
    group_index: int
    stage: str
    verdict: Verdict
    held: bool = False
    """Rejected, but kept in reserve for a batch that does not fill up."""


class GroupEnded(_Known, frozen=True, kw_only=True, omit_defaults=True):
    """The one end of a group. It is kept when it enters the batch."""

    group_index: int
    outcome: Outcome
    reason: str | None = None
    by_fallback: bool = False


class StageFailed(_Known, frozen=True, kw_only=True, omit_defaults=True):
    """A stage raised. What it worked on is None where the stage's level has no such thing."""

    group_index: int | None = None
    index: int | None = None
    execution: int | None = None
    stage: str
    error: str
    traceback: str
    policy: Literal["fail", "resubmit", "raise"]


class BatchAssembled(_Known, frozen=True, kw_only=True, omit_defaults=True):
    groups: list[int]
    """`Group.index` of each, ascending."""
    samples: int
    loss_tokens: int
    digest: str
    """`eventbus.events.digest` of the batch."""


class BatchTrained(_Known, frozen=True, kw_only=True, omit_defaults=True):
    metrics: dict[str, float] = {}
    weight_version: str | None = None


class WeightsUpdated(_Known, frozen=True, kw_only=True, omit_defaults=True):
    """What generates has other weights. The engine says so, or where none does, the version that training gave.

    `rollout_id` is that of the batch that was handed out last.
    """

    version: str
    pause: str | None = None
    """What became of requests that ran, in the engine's words. None, as in all that follows: no engine has said it."""
    workers: list[str] = []
    """Addresses of those that have the weights."""
    missed_by: list[str] = []
    """Addresses of those that do not; they generate nothing until they have."""
    seconds: float | None = None
    """From the pause until they went on."""


class AttemptEnded(_Known, frozen=True, kw_only=True, omit_defaults=True):
    """An engine is through with one of its requests to a worker; it may make several for one sample.

    The request of a sample that nobody wants any more may end after its group, and after its rollout. A replay asks no
    engine, and has none.
    """

    group_index: int | None = None
    index: int | None = None
    execution: int | None = None
    stage: str | None = None
    attempt: int
    """1 and up, for each call of the engine."""
    worker: str
    """Its address."""
    rid: str
    """The request's name there."""
    outcome: AttemptOutcome
    """answered: by a whole reply. failed: no usable one came. aborted: given up before that, here or by the worker."""
    error: str | None = None
    """What was wrong, where it was not answered."""
    tokens: int = 0
    """That it brought, and that were kept: what comes in pieces counts although the attempt was not answered."""
    seconds: float


class UnknownEvent(EventHead, frozen=True, kw_only=True, omit_defaults=True):
    """An event of a kind that a newer writer knows. Its other fields were skipped."""

    kind: str


KnownEvent: TypeAlias = (
    RolloutStarted
    | RolloutFinished
    | GroupSubmitted
    | SampleGenerated
    | StageApplied
    | GroupCompleted
    | GroupJudged
    | GroupEnded
    | StageFailed
    | BatchAssembled
    | BatchTrained
    | WeightsUpdated
    | AttemptEnded
)
Event: TypeAlias = KnownEvent | UnknownEvent

EVENT_KINDS: Mapping[str, type[Any]] = MappingProxyType(
    {cls.__struct_config__.tag: cls for cls in get_args(KnownEvent)}
)
"""The known kinds by name. A log numbers its channels by their places here, so a new kind comes last."""


# What events say about samples

_COLUMNS = ("tokens", "loss_mask", "rollout_log_probs", "teacher_log_probs")
_HEAVY = (
    "multimodal_inputs",
    "multimodal_train_inputs",
    "rollout_routed_experts",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
)
_LIGHT = tuple(name for name in Sample.__struct_fields__ if name not in (*_COLUMNS, *_HEAVY))
_NESTED = (
    "prompt",
    "label",
    "reward",
    "weight_versions",
    "metadata",
    "train_metadata",
    "spec_info",
    "prefix_cache_info",
)


def light(sample: Sample) -> LightSample:
    """The sample as it is now, without its per-token columns, multimodal and replay fields."""
    twin = copy(sample)
    for name in _NESTED:
        setattr(twin, name, copied(getattr(sample, name)))
    for name in (*_COLUMNS, *_HEAVY):
        setattr(twin, name, None)
    twin.tokens = Tokens()
    return LightSample(twin, _marks(sample))


def changes(before: LightSample, after: LightSample) -> tuple[dict[str, Any], dict[str, ColumnMark | None]]:
    """The light fields that differ with their new values, and the columns that differ with their new marks.

    Compares values, not objects, so that edits in place show up. An array or tensor in a nested field counts as
    unchanged only when it is the same object.
    """
    old, new = before.sample, after.sample
    fields = {name: value for name in _LIGHT if not _same(getattr(old, name), value := getattr(new, name))}
    marks: dict[str, ColumnMark | None] = {
        name: mark for name, mark in after.columns.items() if before.columns.get(name) != mark
    }
    marks.update((name, None) for name in before.columns if name not in after.columns)
    return fields, marks


def digest(batch: Batch | Iterable[Group]) -> str:
    """Content hash of a batch: every field of every sample in order, and which execution and group it belongs to.

    The order of a dict's keys does not count, and neither does `non_generation_time`, which no two runs share.

    :raises WireError: a sample holds something that cannot be encoded.
    """
    content = hashlib.blake2b(digest_size=16)
    for group in batch.groups if isinstance(batch, Batch) else batch:
        content.update(encoder.encode([group.index, [len(execution) for execution in group.executions]]))
        for sample in group.samples:
            present = ((name, value) for name in _DIGESTED if (value := getattr(sample, name)) is not None)
            try:
                content.update(encoder.encode([[name, _ordered(value)] for name, value in present]))
            except Exception as error:
                raise unencodable(sample, error) from error
    return content.hexdigest()


_DIGESTED = tuple(name for name in Sample.__struct_fields__ if name != "non_generation_time")


def _marks(sample: Sample) -> dict[str, ColumnMark]:
    columns: Iterable[tuple[str, Column[Any] | None]] = ((name, getattr(sample, name)) for name in _COLUMNS)
    return {name: (len(column), zlib.crc32(column.to_bytes())) for name, column in columns if column is not None}


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(item, b[key]) for key, item in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    try:
        return bool(a == b or (a != a and b != b))  # nan is nan
    except (ValueError, RuntimeError):  # arrays and tensors do not say
        return False


def _ordered(value: Any) -> Any:
    """Dicts and sets as lists in an order that depends on their content alone."""
    if isinstance(value, dict):
        return {"": sorted((encoder.encode(key), encoder.encode(_ordered(item))) for key, item in value.items())}
    if isinstance(value, set | frozenset):
        return sorted(encoder.encode(item) for item in value)
    if isinstance(value, list | tuple):
        return [_ordered(item) for item in value]
    return value
