from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.slime import SlimeSample, from_slime, to_slime
from backends.slime.samples import KEPT, sample_type
from eventbus.columns import LogProbs, Tokens
from eventbus.sample import Sample, SampleStatus, WeightSpan
from eventbus.wire import decode, encode

pytestmark = pytest.mark.usefixtures("with_and_without_slime")


LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3)
VALUES = LEAVES | st.lists(LEAVES, max_size=2) | st.dictionaries(st.text(max_size=3), LEAVES, max_size=2)
NAMES = st.sampled_from(["turns", "embedding", "episode_id"])


@st.composite
def samples(draw: st.DrawFn) -> Any:
    """slime's samples as they may come out of anything its users wrote."""
    kind = sample_type()
    sample = kind()
    prompt, length = draw(st.integers(0, 3)), draw(st.integers(0, 4))

    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=length, max_size=length))

    ids = st.integers(0, 2**31 - 1)
    sample.tokens = draw(st.lists(ids, min_size=prompt, max_size=prompt)) + column(ids)
    sample.response_length = length
    log_probs = st.floats(-50, 0, width=32)
    for name, values in (
        ("loss_mask", st.integers(0, 1)),
        ("rollout_log_probs", log_probs),
        ("teacher_log_probs", log_probs),
    ):
        setattr(sample, name, draw(st.just(None) | st.just(values).map(column)))
    for name in ("group_index", "index", "rollout_id"):
        setattr(sample, name, draw(st.none() | st.integers(0, 99)))
    sample.prompt = draw(st.text(max_size=3) | st.just([{"role": "user", "content": "2+2="}]))
    sample.response, sample.label = draw(st.text(max_size=3)), draw(st.none() | st.text(max_size=3))
    sample.reward = draw(
        st.none() | st.floats(allow_nan=False) | st.dictionaries(st.text(max_size=3), st.integers(-9, 9), max_size=2)
    )
    sample.weight_versions = draw(st.lists(st.sampled_from(["1", "2"]), max_size=3))
    sample.status = draw(st.sampled_from(list(kind.Status)))
    sample.metadata = draw(st.none() | st.dictionaries(st.text(max_size=3), VALUES, max_size=3))
    for name in ("train_metadata", "multimodal_inputs", "rollout_routed_experts", "custom_rm_path"):
        setattr(sample, name, draw(st.none() | st.just({name: 1})))
    sample.remove_sample, sample.non_generation_time = draw(st.booleans()), draw(st.floats(0, 9))
    for name in ("spec_info", "prefix_cache_info"):
        info = getattr(sample, name)
        for count in getattr(info, "__dict__", ()):
            setattr(info, count, draw(st.integers(0, 9)))
    for name, value in draw(st.dictionaries(NAMES, VALUES, max_size=2)).items():
        setattr(sample, name, value)
    return sample


@settings(max_examples=40)
@given(st.data())
def test_slimes_samples_come_back_as_they_were(data: st.DataObject) -> None:
    theirs = data.draw(samples())
    before = repr(vars(theirs))
    back = to_slime(from_slime(theirs))
    assert type(back) is type(theirs)
    assert vars(back) == vars(theirs)
    assert repr(vars(theirs)) == before


@settings(max_examples=40)
@given(st.data())
def test_they_come_back_from_a_copy_and_from_the_wire(data: st.DataObject) -> None:
    theirs = data.draw(samples())
    ours = from_slime(theirs)
    assert vars(to_slime(ours.copy())) == vars(theirs)
    assert vars(to_slime(decode(encode(ours), Sample))) == vars(theirs)


@settings(max_examples=40)
@given(st.data())
def test_ours_comes_back_as_it_was(data: st.DataObject) -> None:
    ours = from_slime(data.draw(samples()))
    ours.group_index, ours.index, ours.rollout_id = 100, 200, 300
    again = from_slime(to_slime(ours), like=ours)
    twice = from_slime(to_slime(again), like=again)
    assert (again.group_index, again.index, again.rollout_id) == (100, 200, 300)
    assert twice == again
    assert vars(to_slime(again)) == vars(to_slime(ours))


def test_columns_are_packed_here_and_lists_there() -> None:
    theirs = sample_type()(tokens=[5, 6, 7], response_length=2, rollout_log_probs=[-0.5, -0.25])
    ours = from_slime(theirs)
    assert type(ours.tokens) is Tokens
    assert type(ours.rollout_log_probs) is LogProbs
    back = to_slime(ours)
    assert type(back.tokens) is list
    assert back.rollout_log_probs == [-0.5, -0.25]


def test_attributes_that_slime_does_not_know_are_kept() -> None:
    theirs = sample_type()(index=3)
    theirs.turns, theirs.logits = 4, np.arange(3)
    ours = from_slime(theirs)
    ours.metadata["mine"] = 1
    back = to_slime(ours.copy())
    assert back.turns == 4
    assert back.logits.tolist() == [0, 1, 2]
    assert back.metadata == {"mine": 1}
    assert not hasattr(to_slime(Sample()), "turns")


def test_an_attribute_set_to_its_default_is_no_burden() -> None:
    assert from_slime(sample_type()(index=3)).metadata == {}


def test_weight_spans_survive_a_hook_of_slime() -> None:
    ours = Sample(
        tokens=Tokens([1, 2, 3]), response_length=3, weight_versions=[WeightSpan("1", 0, 2), WeightSpan("2", 2, 3)]
    )
    theirs = to_slime(ours)
    assert theirs.weight_versions == ["1", "2"]
    assert from_slime(theirs, like=ours).weight_versions == ours.weight_versions
    theirs.weight_versions.append("3")
    changed = from_slime(theirs, like=ours)
    assert changed.weight_versions == []  # where they changed is not known any more
    assert to_slime(changed).weight_versions == ["1", "2", "3"]


def test_one_weight_version_is_that_of_the_whole_response() -> None:
    theirs = sample_type()(tokens=[1, 2], response_length=2, weight_versions=["7"])
    assert from_slime(theirs).weight_versions == [WeightSpan("7", 0, 2)]


def test_changes_can_be_written_onto_a_sample_that_is_there() -> None:
    theirs = sample_type()(index=3, prompt="a")
    theirs.mine = object()
    ours = from_slime(theirs)
    ours.response, ours.status = "b", SampleStatus.TRUNCATED
    assert to_slime(ours, onto=theirs) is theirs
    assert theirs.response == "b"
    assert theirs.status is type(theirs).Status.TRUNCATED
    assert vars(theirs) == vars(to_slime(ours))


def test_what_does_not_fit_names_the_sample() -> None:
    with pytest.raises(TypeError, match=r"sample 3: .*"):
        from_slime(sample_type()(index=3, tokens=["a"]))
    with pytest.raises(ValueError, match="sample 3: its metadata has the key 'slime'"):
        from_slime(sample_type()(index=3, metadata={KEPT: 1}))
    with pytest.raises(ValueError, match="lost"):
        from_slime(sample_type()(status="lost"))


def test_values_that_are_no_plain_data_pass() -> None:
    theirs = sample_type()(reward=math.nan, rollout_routed_experts=np.zeros((2, 1, 1)))
    theirs.embedding = math.nan
    back = to_slime(from_slime(theirs))
    assert math.isnan(back.reward)
    assert math.isnan(back.embedding)
    assert back.rollout_routed_experts is theirs.rollout_routed_experts


def test_the_stand_in_has_the_methods_that_hooks_call() -> None:
    sample = SlimeSample(reward={"score": 1.0}, response_length=3, loss_mask=[1, 0, 1])
    assert sample.get_reward_value(type("Args", (), {"reward_key": "score"})) == 1.0
    assert sample.effective_response_length == 2
    assert SlimeSample.from_dict(sample.to_dict()) == sample
