"""Packed per-token columns: one machine number per token, yet they read and write like lists.

A column keeps two promises. Its memory is one contiguous, little-endian-encodable buffer, so that encoding,
hashing and handing it to numpy or torch costs no Python object per token. And code that was written for a list
keeps its meaning: `+`, `+=`, slices and `==` take any sequence of numbers and concatenate or compare, never
broadcast (with numpy, `tokens += [eos]` would add `eos` to every token).

    Tokens    int32    `Sample.tokens`
    LogProbs  float32  `Sample.rollout_log_probs`, `Sample.teacher_log_probs`
    LossMask  int8     `Sample.loss_mask`
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from types import GenericAlias
from typing import TYPE_CHECKING, Any, ClassVar, Self, SupportsIndex, TypeVar, overload

__all__ = ["Column", "LogProbs", "LossMask", "Tokens"]

_BIG_ENDIAN = sys.byteorder == "big"

Number = TypeVar("Number", int, float)

if TYPE_CHECKING:

    class _Array(array[Number]): ...

else:

    class _Array(array):  # `array` itself takes no type parameter before Python 3.12
        __slots__ = ()
        __class_getitem__ = classmethod(GenericAlias)


class Column(_Array[Number]):
    """An `array.array` of one fixed number type that takes any sequence of numbers where a list would.

    `numpy.asarray(column)` and `torch.frombuffer(column, dtype=...)` are zero-copy views.

    :raises TypeError: a value is not a number of the column's kind (a float token, a None log-prob).
    :raises OverflowError: a number does not fit the column's type.
    """

    __slots__ = ()
    _code: ClassVar[str]

    def __new__(cls, values: Iterable[Number] = ()) -> Self:
        return array.__new__(cls, cls._code, values if type(values) in _PLAIN else _numbers(values))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """The column that `to_bytes` wrote: one copy of the memory.

        :raises ValueError: the length of `data` is no multiple of the column's item size.
        """
        column = array.__new__(cls, cls._code)
        column.frombytes(data)
        if _BIG_ENDIAN:
            column.byteswap()
        return column

    def to_bytes(self) -> memoryview:
        """The raw little-endian bytes; on a little-endian machine a view, not a copy."""
        if _BIG_ENDIAN:
            swapped = self.copy()
            swapped.byteswap()
            return memoryview(swapped).cast("B")
        return memoryview(self).cast("B")

    def extend(self, values: Iterable[Number], /) -> None:
        if type(values) is list:
            self.fromlist(values)  # the quickest; like the others, all of it or, when a value is refused, nothing
        elif isinstance(values, array) and values.typecode == self.typecode:
            super().extend(values)
        else:
            super().extend(array(self._code, _numbers(values)))

    def copy(self) -> Self:
        return array.__new__(type(self), self._code, self)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return type(self).from_bytes, (bytes(self.to_bytes()),)

    def __add__(self, other: Iterable[Number]) -> Self:
        joined = self.copy()
        joined.extend(other)
        return joined

    def __radd__(self, other: Iterable[Number]) -> Self:
        joined = type(self)(other)
        joined.extend(self)
        return joined

    def __iadd__(self, other: Iterable[Number]) -> Self:
        self.extend(other)
        return self

    def __mul__(self, count: int) -> Self:
        product: Any = super().__mul__(count)
        return type(self)(product)

    __rmul__ = __mul__

    @overload
    def __getitem__(self, key: SupportsIndex, /) -> Number: ...
    @overload
    def __getitem__(self, key: slice, /) -> Self: ...
    def __getitem__(self, key: SupportsIndex | slice, /) -> Number | Self:
        value: Any = super().__getitem__(key)
        return type(self)(value) if isinstance(key, slice) else value

    def __setitem__(self, key: Any, value: Any, /) -> None:
        if isinstance(key, slice):
            value = array(self._code, _numbers(value))
            if not value and key.step not in (None, 1) and (missing := len(range(*key.indices(len(self))))):
                # where a list raises, `array` would delete
                raise ValueError(f"attempt to assign sequence of size 0 to extended slice of size {missing}")
        super().__setitem__(key, value)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list | tuple | range):
            # As numbers of this column: a float32 0.1 equals the list's 0.1 that it was packed from.
            if len(other) != len(self):
                return False
            try:
                other = array(self._code, other)
            except (TypeError, OverflowError):
                return False
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:  # `array` has its own, which knows no lists
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tolist()})"


class Tokens(Column[int]):
    """Token ids, int32."""

    __slots__ = ()
    _code = "i"


class LogProbs(Column[float]):
    """Log-probabilities, float32."""

    __slots__ = ()
    _code = "f"


class LossMask(Column[int]):
    """1 for a token that counts in the loss, 0 for one that does not; int8."""

    __slots__ = ()
    _code = "b"


_PLAIN = frozenset({list, tuple, array, Tokens, LogProbs, LossMask})
"""What `array` takes as it is."""


def _numbers(values: Iterable[Any]) -> Iterable[Any]:
    """What `array` takes for numbers: numpy arrays and torch tensors as lists, and the integers of a bytes object,
    which `array` would read as raw memory."""
    tolist = getattr(values, "tolist", None)
    if tolist is not None:
        return tolist()  # type: ignore[no-any-return]
    return iter(values) if isinstance(values, bytes | bytearray) else values
