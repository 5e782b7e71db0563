"""Whether what a stage leaves now is what the log says it left.

The log holds values as the wire has them: tuples and sets as lists, numbers of numpy as plain ones, structs as dicts.
So values are compared by their wire form, and the order of a dict or set does not count. `non_generation_time` is not
compared: no two runs share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from eventbus.codecs import encoder
from eventbus.events import ColumnMark, LightSample
from eventbus.sample import Sample

__all__ = ["COLUMNS", "LIGHT_FIELDS", "differences", "same_value", "samples_differ"]

COLUMNS: Final = ("tokens", "loss_mask", "rollout_log_probs", "teacher_log_probs")
_HEAVY: Final = (
    *COLUMNS,
    "multimodal_inputs",
    "multimodal_train_inputs",
    "rollout_routed_experts",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
)
IGNORED: Final = ("non_generation_time",)
LIGHT_FIELDS: Final = tuple(name for name in Sample.__struct_fields__ if name not in (*_HEAVY, *IGNORED))

_ABSENT: Final = "(as it was)"


def same_value(new: Any, old: Any) -> bool:
    """Whether `new` is what the record has as `old`."""
    if new is old:
        return True
    if isinstance(new, dict) and isinstance(old, dict):
        if len(new) != len(old):
            return False
        there = {encoder.encode(key): value for key, value in old.items()}
        return all(
            (coded := encoder.encode(key)) in there and same_value(value, there[coded]) for key, value in new.items()
        )
    if isinstance(new, set | frozenset) and isinstance(old, list | set | frozenset | tuple):
        return sorted(map(encoder.encode, new)) == sorted(map(encoder.encode, old))
    if isinstance(new, list | tuple) and isinstance(old, list | tuple):
        return len(new) == len(old) and all(map(same_value, new, old))
    return encoder.encode(new) == encoder.encode(old)


def differences(
    before: LightSample,
    now: tuple[Mapping[str, Any], Mapping[str, ColumnMark | None]],
    recorded: tuple[Mapping[str, Any], Mapping[str, ColumnMark | None]],
) -> dict[str, tuple[Any, Any]]:
    """Field by field what a stage changed in the record and changes now, where that differs: (recorded, new).

    :param before: the sample as the stage got it; a field may count as changed by its type alone.
    """
    found: dict[str, tuple[Any, Any]] = {}
    fields, marks = now
    old_fields, old_marks = recorded
    for name in _names(fields, old_fields):
        if name in IGNORED:
            continue
        was = getattr(before.sample, name, None)
        new, old = fields.get(name, was), old_fields.get(name, was)
        if not same_value(new, old):
            found[name] = (old if name in old_fields else _ABSENT, new if name in fields else _ABSENT)
    for name in _names(marks, old_marks):
        there = before.columns.get(name)
        mark, old_mark = marks.get(name, there), old_marks.get(name, there)
        if (None if mark is None else tuple(mark)) != (None if old_mark is None else tuple(old_mark)):
            found[name] = (_told(old_mark), _told(mark))
    return found


def samples_differ(new: LightSample, old: LightSample) -> dict[str, tuple[Any, Any]]:
    """Field by field where two samples differ: (recorded, new)."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in LIGHT_FIELDS:
        now, was = getattr(new.sample, name), getattr(old.sample, name)
        if not same_value(now, was):
            found[name] = (was, now)
    for name in COLUMNS:
        mark, old_mark = new.columns.get(name), old.columns.get(name)
        if (None if mark is None else tuple(mark)) != (None if old_mark is None else tuple(old_mark)):
            found[name] = (_told(old_mark), _told(mark))
    return found


def _names(new: Iterable[str], old: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*old, *new]))


def _told(mark: ColumnMark | None) -> str:
    return "none" if mark is None else f"{mark[0]} values, CRC-32 {mark[1]:#010x}"
