from __future__ import annotations

import copy
import pickle
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus.columns import Column, LogProbs, LossMask, Tokens

int32 = st.integers(-(2**31), 2**31 - 1)
ids = st.lists(int32, max_size=8)


def test_empty_by_default() -> None:
    assert Tokens() == []
    assert len(Tokens()) == 0


@pytest.mark.parametrize(
    "values",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        (number for number in (1, 2, 3)),
        b"\x01\x02\x03",
        bytearray(b"\x01\x02\x03"),
        array("q", [1, 2, 3]),
        LossMask([1, 2, 3]),
        Tokens([1, 2, 3]),
        np.array([1, 2, 3]),
        np.array([1, 2, 3], dtype=np.uint8),
        np.arange(6)[1:4],
    ],
    ids=lambda values: type(values).__name__,
)
def test_packs_any_sequence_of_numbers(values: Iterable[int]) -> None:
    column = Tokens(values)
    assert type(column) is Tokens
    assert column.tolist() == [1, 2, 3]


@pytest.mark.parametrize("add", [[9], (9,), range(9, 10), b"\x09", np.array([9]), Tokens([9]), LossMask([9])])
def test_plus_concatenates_and_never_broadcasts(add: Any) -> None:
    column = Tokens([1, 2])
    assert (column + add).tolist() == [1, 2, 9]
    column += add
    assert column.tolist() == [1, 2, 9]
    assert type(column) is Tokens


def test_a_list_plus_a_column_is_a_column() -> None:
    joined = [9] + Tokens([1])  # noqa: RUF005 - `+` is what is tested
    assert joined == [9, 1]
    assert type(joined) is Tokens


def test_plus_itself() -> None:
    column = Tokens([1, 2])
    column += column
    assert column == [1, 2, 1, 2]


def test_repeats() -> None:
    assert type(Tokens([1]) * 2) is Tokens
    assert 2 * Tokens([1]) == [1, 1]


@given(ids, ids, st.slices(8))
def test_slices_read_and_write_as_those_of_a_list(values: list[int], new: list[int], key: slice) -> None:
    expected, column = list(values), Tokens(values)
    assert column[key] == expected[key]
    assert type(column[key]) is Tokens
    try:
        expected[key] = new
    except ValueError:
        with pytest.raises(ValueError, match="extended slice"):
            column[key] = new
    else:
        column[key] = new
    assert column.tolist() == expected


@given(ids, st.slices(8))
def test_deletes_slices_as_a_list(values: list[int], key: slice) -> None:
    expected, column = list(values), Tokens(values)
    del expected[key]
    del column[key]
    assert column.tolist() == expected


def test_slice_assignment_changes_the_length() -> None:
    column = Tokens(range(6))
    column[2:4] = [7, 8, 9]
    assert column == [0, 1, 7, 8, 9, 4, 5]
    column[-2:] = np.array([1])
    assert column == [0, 1, 7, 8, 9, 1]
    column[1:] = b"\x05"
    assert column == [0, 5]


def test_list_methods() -> None:
    column = Tokens([3, 1])
    column.insert(0, 7)
    column.append(np.int32(2))  # type: ignore[arg-type]
    column.extend([5, 5])
    assert (column.pop(), column.pop(0), column.index(1), column.count(5)) == (5, 7, 1, 1)
    column.remove(1)
    column.reverse()
    assert column == [5, 2, 3]
    assert sorted(column) == [2, 3, 5]
    assert 5 in column


def test_equality_is_by_value_with_any_sequence() -> None:
    column = Tokens([0, 1])
    assert column == [0, 1]
    assert [0, 1] == column  # noqa: SIM300 - the list's side is what is tested
    assert column == (0, 1)
    assert column == range(2)
    assert column == LossMask([0, 1])
    assert not column != [0, 1]  # noqa: SIM202 - `!=` is what is tested
    assert column != [0]
    assert column != [0, "1"]
    assert column != [0, 2**40]
    assert column != "01"
    assert column != None  # noqa: E711


def test_log_probs_equal_the_numbers_they_were_packed_from() -> None:
    assert LogProbs([0.1, -0.3]) == [0.1, -0.3]
    assert LogProbs([0.1]) != [0.1001]


def test_is_not_hashable_like_a_list() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(Tokens([1]))


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (Tokens, [1.0]),
        (Tokens, [None]),
        (Tokens, "12"),
        (Tokens, None),
        (Tokens, 5),
        (Tokens, np.array(5)),
        (Tokens, np.zeros((2, 2), dtype=np.int32)),
        (Tokens, np.array([1.0])),
        (LogProbs, [None]),
        (LossMask, [0.5]),
    ],
)
def test_refuses_what_is_no_sequence_of_its_numbers(column: type[Column[Any]], values: Any) -> None:
    with pytest.raises(TypeError):
        column(values)


@pytest.mark.parametrize(("column", "value"), [(Tokens, 2**31), (Tokens, -(2**31) - 1), (LossMask, 128)])
def test_refuses_numbers_beyond_its_type(column: type[Column[int]], value: int) -> None:
    with pytest.raises(OverflowError):
        column([value])


def test_a_refused_extension_leaves_the_column_as_it_was() -> None:
    column = Tokens([1])
    with pytest.raises(OverflowError):
        column += [2, 2**40]
    with pytest.raises(TypeError):
        column[0:1] = [5, None]
    assert column == [1]


@pytest.mark.parametrize("clone", [Tokens.copy, copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_copy_is_a_column_of_its_own(clone: Any) -> None:
    column = Tokens([1, 2])
    twin = clone(column)
    twin[0] = 9
    assert type(twin) is Tokens
    assert column == [1, 2]
    assert twin == [9, 2]


@given(ids)
def test_bytes_are_little_endian_and_come_back(values: list[int]) -> None:
    column = Tokens(values)
    data = bytes(column.to_bytes())
    assert data == np.array(values, dtype="<i4").tobytes()
    assert Tokens.from_bytes(data) == column


def test_from_bytes_refuses_a_part_of_a_number() -> None:
    with pytest.raises(ValueError, match="not a multiple of item size"):
        Tokens.from_bytes(b"\0\0\0")


def test_numpy_sees_the_same_memory() -> None:
    column = LogProbs([0.0, 0.0])
    view = np.asarray(column)
    view[1] = 0.5
    assert view.dtype == np.float32
    assert column == [0.0, 0.5]


def test_repr_names_the_kind() -> None:
    assert repr(LossMask([1, 0])) == "LossMask([1, 0])"
