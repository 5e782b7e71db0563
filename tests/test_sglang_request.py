"""What is checked before it is sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.sglang.request import check_ids
from eventbus import Tokens


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(-2, 12)), st.none() | st.integers(1, 10))
def test_the_first_id_outside_of_the_vocabulary_is_named(ids: list[int], vocabulary: int | None) -> None:
    tokens, limit = Tokens(ids), vocabulary or 1 << 31
    wrong = [(at, token) for at, token in enumerate(ids) if not 0 <= token < limit]
    if not wrong:
        check_ids(tokens, vocabulary)
        return
    at, token = wrong[0]
    of = vocabulary or "any model"
    with pytest.raises(ValueError, match=rf"^the token id {token} is not in the vocabulary of {of}: it is x\[{at}\]$"):
        check_ids(tokens, vocabulary, "x")


def test_what_was_refused_can_still_grow() -> None:
    tokens = Tokens([7, 512])
    with pytest.raises(ValueError, match="512 is not") as refused:
        check_ids(tokens, 512)
    tokens += [8]
    assert tokens == [7, 512, 8]
    assert refused.value.__traceback__ is not None  # whose frames would hold a view of it
