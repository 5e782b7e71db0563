"""What a log gives back: samples whose columns are read when they are first touched, and groups of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from eventbus.columns import Tokens
from eventbus.events import ColumnMark
from eventbus.group import Group
from eventbus.ledger import Outcome
from eventbus.log.format import HEAVY_FIELDS
from eventbus.sample import Sample

__all__ = ["RecordedGroup", "RecordedSample", "Source", "recorded"]

Source = Callable[[int, int], dict[str, Any]]
"""Reads the heavy fields of the sample at these places in its event."""


class RecordedSample(Sample, dict=True):
    """A sample out of a log. Its tokens and other heavy fields are read when one of them is first asked for; from then
    on it is like any other, and stages may change it. Copies of it are plain samples.
    """

    def load(self) -> None:
        """Read the heavy fields now, if that has not happened yet.

        :raises LogError: the log does not have them, or they are damaged.
        """
        binding = self.__dict__.get("_source")
        if binding is None:
            return
        source, execution, child = binding
        values = source(execution, child)
        for name in HEAVY_FIELDS:
            if _unset(self, name):
                setattr(self, name, values[name] if name in values else Tokens() if name == "tokens" else None)
        del self.__dict__["_source"]

    def __getattr__(self, name: str) -> Any:
        """Called for what is not set."""
        if name in _HEAVY and "_source" in self.__dict__:
            self.load()
            return getattr(self, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def copy(self) -> Sample:
        return self._plain().copy()

    def _plain(self) -> Sample:
        self.load()
        return Sample(**{name: getattr(self, name) for name in Sample.__struct_fields__})

    __copy__ = _plain

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sample):
            return NotImplemented
        return self._plain() == (other._plain() if isinstance(other, RecordedSample) else other)

    def __ne__(self, other: object) -> bool:
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._plain())

    def __reduce__(self) -> Any:
        return self._plain().__reduce__()


class RecordedGroup(Group, omit_defaults=True):
    """A completed group out of a log. Its `verdict` is the last one; without a filter, whether it entered the batch."""

    outcome: Outcome | None = None
    """What became of it; None where the log ends before."""
    reason: str | None = None
    seq: int = 0
    """Of the event that shows it."""


class RecordedLight(msgspec.Struct, frozen=True):
    """`LightSample`, read as a sample that can load the rest."""

    sample: RecordedSample
    columns: dict[str, ColumnMark] = {}


def recorded(sample: RecordedSample, marks: dict[str, ColumnMark], source: Source, i: int, j: int, all: bool) -> None:
    """Have a light sample read its heavy fields from `source`.

    :param all: also those that the light form says nothing of.
    """
    sample.__dict__["_source"] = (source, i, j)
    for name in HEAVY_FIELDS:
        if all or name in marks:
            delattr(sample, name)


_HEAVY: Final = frozenset(HEAVY_FIELDS)


def _unset(sample: Sample, name: str) -> bool:
    try:
        object.__getattribute__(sample, name)
    except AttributeError:
        return True
    return False
