"""slime's types and ours: `Sample` both ways, and what its plug-ins return.

`to_slime(from_slime(sample))` has the attributes that `sample` has, with equal values: those that our `Sample` lacks
travel in `metadata["slime"]`, so they are copied, recorded and replayed with it. Two things are said otherwise. Numbers
per token come back as plain lists, and log-probs in float32, which is what an engine computes and a trainer reads.

Where slime is not importable, types of the same shape stand in for its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Any, Final

from eventbus.columns import Column
from eventbus.sample import Sample, SampleStatus, WeightSpan

__all__ = [
    "DynamicFilterOutput",
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "SlimeSample",
    "from_slime",
    "is_sample",
    "of_slime",
    "to_slime",
]

KEPT: Final = "slime"
"""Key in our metadata: slime's values that no field of ours holds, by attribute."""

NUMBERS: Final = ("group_index", "index", "rollout_id")
"""Fields that a pipeline fills with its own numbers."""

_COUNTS: Final = ("spec_info", "prefix_cache_info")
_OURS: Final = Sample.__struct_fields__
_PLAIN: Final = (str, int, float, bool, list, dict, tuple)


@dataclass
class RolloutFnTrainOutput:
    samples: list[Any]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class DynamicFilterOutput:
    keep: Any
    reason: str | None = None
    keep_when_insufficient: bool = False


class _Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class SlimeSample:
    """What stands in for slime's `Sample`: its attributes, and the methods that hooks and rewards call."""

    Status = _Status

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Any = _Status.PENDING
    metadata: dict[Any, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[Any, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: Any = field(default_factory=dict)
    prefix_cache_info: Any = field(default_factory=dict)

    def get_reward_value(self, args: Any) -> Any:
        return self.reward[args.reward_key] if args.reward_key else self.reward

    @property
    def effective_response_length(self) -> int:
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "status": self.status.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SlimeSample:
        sample = cls()
        vars(sample).update(data)
        sample.status = _Status(data.get("status", "completed"))
        return sample


@cache
def of_slime(module: str, name: str, otherwise: Any = None) -> Any:
    """`slime.<module>.<name>`, or `otherwise` where slime is not installed or has no such thing.

    :raises ImportError: slime is there, and a module that it needs is not.
    """
    try:
        return getattr(import_module(f"slime.{module}"), name, otherwise)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "slime":
            raise
        return otherwise


def sample_type() -> Any:
    return of_slime("utils.types", "Sample", SlimeSample)


def is_sample(value: Any) -> bool:
    """Whether it is a sample to slime's users: slime's own, one of ours, or what stands in for slime's."""
    return isinstance(value, (sample_type(), SlimeSample, Sample))


def from_slime(theirs: Any, like: Sample | None = None) -> Sample:
    """Our sample with the attributes of slime's. Nested containers are shared, not copied.

    :param like: the sample of ours that `theirs` was made from: it gives what slime has no place for, which is where in
        the response the weights changed, and the numbers by which the pipeline knows it.
    :raises TypeError: a value per token is no number.
    :raises ValueError: the status is none of slime's, or the metadata has the key "slime" already.
    """
    values = dict(vars(theirs))
    fields = {name: values.pop(name) for name in _OURS if name in values}
    kind: Any = type(theirs)
    fresh = _fresh(kind)
    kept: dict[str, Any] = {
        name: value for name, value in values.items() if not (name in fresh and _same(fresh[name], value))
    }
    fields["status"] = SampleStatus(getattr(fields.get("status"), "value", fields.get("status", "pending")))
    for name in _COUNTS:
        fields[name] = _counts(fields.get(name))
    versions = list(fields.pop("weight_versions", None) or ())
    metadata = fields.pop("metadata", {})
    if not isinstance(metadata, dict):
        kept["metadata"], metadata = metadata, {}
    elif KEPT in metadata:
        raise ValueError(
            f"sample {fields.get('index')}: its metadata has the key {KEPT!r}, under which the attributes of slime's "
            "sample are kept: give it another name"
        )
    try:
        sample = Sample(**fields, metadata=dict(metadata))
    except (TypeError, OverflowError) as error:
        raise TypeError(f"sample {fields.get('index')}: {error}") from error
    if like is not None:
        for name in NUMBERS:
            kept[name] = fields.get(name)
            setattr(sample, name, getattr(like, name))
    _take_versions(sample, versions, like, kept)
    if kept:
        sample.metadata[KEPT] = kept
    return sample


def to_slime(sample: Sample, onto: Any = None) -> Any:
    """slime's sample with the values of ours. Nested containers are shared, but for the metadata itself.

    :param onto: change this sample instead of making a new one.
    """
    theirs = sample_type()() if onto is None else onto
    attributes = vars(theirs)
    kind: Any = type(theirs)
    blank = theirs if onto is None else kind()
    metadata = dict(sample.metadata)
    kept = dict(metadata.pop(KEPT, ()))
    earlier = kept.pop("weight_versions", [])
    if metadata:
        kept.pop("metadata", None)
    fresh = _fresh(kind)
    for name in _OURS:
        value = getattr(sample, name)
        if isinstance(value, Column):
            value = value.tolist()
        elif name in _COUNTS:
            value = _info(getattr(blank, name, None), value)
        elif value is None and name not in fresh and name not in attributes:
            continue  # this version of slime does not know the field
        attributes[name] = value
    attributes["metadata"] = metadata
    attributes["weight_versions"] = [*earlier, *(span.version for span in sample.weight_versions)]
    attributes["status"] = kind.Status(sample.status.value)
    attributes.update(kept)
    return theirs


def _take_versions(sample: Sample, versions: list[Any], like: Sample | None, kept: dict[str, Any]) -> None:
    """slime says which weights wrote the response, in order, but not where they changed."""
    if like is not None:
        earlier = like.metadata.get(KEPT, {}).get("weight_versions", [])
        known = [*earlier, *(span.version for span in like.weight_versions)]
        if versions == known and sample.response_length == like.response_length:
            sample.weight_versions = list(like.weight_versions)
            versions = earlier
    if len(versions) == 1 and isinstance(versions[0], str) and sample.response_length and not sample.weight_versions:
        sample.weight_versions = [WeightSpan(versions[0], 0, sample.response_length)]
    elif versions:
        kept["weight_versions"] = versions


@cache
def _fresh(kind: Any) -> dict[str, Any]:
    """The attributes of a new sample of this type."""
    return dict(vars(kind()))


def _same(fresh: Any, value: Any) -> bool:
    return fresh is value or (type(fresh) is type(value) and isinstance(value, _PLAIN) and fresh == value)


def _counts(info: Any) -> Any:
    """As a dict; None where nothing was counted."""
    counts = info if isinstance(info, dict) else dict(getattr(info, "__dict__", ()))
    return counts if any(counts.values()) else None


def _info(fresh: Any, counts: Any) -> Any:
    if not hasattr(fresh, "__dict__"):
        return counts or {}
    vars(fresh).update(counts or {})
    return fresh
