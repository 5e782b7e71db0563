from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest

from eventbus.columns import LogProbs, LossMask, Tokens
from eventbus.group import Group
from eventbus.sample import Sample, SampleStatus, WeightSpan


def test_packs_its_columns() -> None:
    sample = Sample(tokens=[1, 2], loss_mask=[1], rollout_log_probs=[-0.5], teacher_log_probs=np.array([-1.0]))  # type: ignore[arg-type]
    assert [type(column) for column in (sample.tokens, sample.loss_mask)] == [Tokens, LossMask]
    assert type(sample.rollout_log_probs) is type(sample.teacher_log_probs) is LogProbs


def test_refuses_a_column_of_no_numbers() -> None:
    with pytest.raises(TypeError):
        Sample(tokens=["1"])  # type: ignore[arg-type]


def test_prompt_length_is_what_the_response_leaves() -> None:
    assert Sample(tokens=Tokens(range(5)), response_length=2).prompt_length == 3


def test_loss_tokens_count_the_mask() -> None:
    sample = Sample(response_length=3)
    assert sample.loss_tokens == 3
    sample.loss_mask = LossMask([1, 0, 1])
    assert sample.loss_tokens == 2
    sample.remove_sample = True
    assert sample.loss_tokens == 0


def test_an_observation_is_read_and_not_learned() -> None:
    sample = Sample(
        tokens=Tokens([1, 2, 3]),
        response="x",
        response_length=2,
        rollout_log_probs=LogProbs([-0.5, -0.25]),
        teacher_log_probs=LogProbs([-1.0, -1.0]),
        weight_versions=[WeightSpan("1", 0, 2)],
        status=SampleStatus.COMPLETED,
        rollout_top_p_token_ids=Tokens([7, 8, 9]),
        rollout_top_p_token_offsets=Tokens([0, 1, 3]),
    )
    sample.append_observation(" 42", [5, 6])
    assert sample == Sample(
        tokens=Tokens([1, 2, 3, 5, 6]),
        response="x 42",
        response_length=4,
        loss_mask=LossMask([1, 1, 0, 0]),
        rollout_log_probs=LogProbs([-0.5, -0.25, 0.0, 0.0]),
        teacher_log_probs=LogProbs([-1.0, -1.0, 0.0, 0.0]),
        weight_versions=[WeightSpan("1", 0, 2)],
        rollout_top_p_token_ids=Tokens([7, 8, 9]),
        rollout_top_p_token_offsets=Tokens([0, 1, 3, 3, 3]),
    )
    assert type(sample.loss_mask) is LossMask


def test_an_observation_keeps_the_mask_that_is_there() -> None:
    sample = Sample(tokens=Tokens([1, 2]), response_length=1, loss_mask=LossMask([0]))
    sample.append_observation("", Tokens([3]))
    assert sample.loss_mask == [0, 0]
    assert sample.rollout_log_probs is None


def test_an_observation_comes_behind_what_a_stage_has_set() -> None:
    sample = Sample(response_length=2)
    sample.tokens, sample.loss_mask = np.array([1, 2]), [1, 0]  # type: ignore[assignment]
    sample.append_observation("", np.array([3, 4]))  # type: ignore[arg-type]
    assert sample.tokens == [1, 2, 3, 4]
    assert sample.loss_mask == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("fields", "tokens", "error", "message"),
    [
        ({}, "42", TypeError, None),
        ({}, [2**40], OverflowError, None),
        ({"response_length": 0}, [1], ValueError, "sample 7: there is no response yet"),
        ({"loss_mask": LossMask([1, 1])}, [1], ValueError, "sample 7: loss_mask has 2 values for 1 tokens"),
        ({"rollout_log_probs": LogProbs([])}, [1], ValueError, "rollout_log_probs has 0 values for 1 tokens"),
    ],
)
def test_an_observation_that_is_none_changes_nothing(
    fields: dict[str, Any], tokens: Any, error: type[Exception], message: str | None
) -> None:
    sample = Sample(**{"index": 7, "tokens": Tokens([1, 2]), "response_length": 1, **fields})
    before = sample.copy()
    with pytest.raises(error, match=message):
        sample.append_observation("42", tokens)
    assert sample == before


def test_status_is_its_value() -> None:
    assert Sample.Status is SampleStatus
    assert str(SampleStatus.ABORTED) == "aborted"


def _full() -> Sample:
    return Sample(
        group_index=1,
        index=8,
        prompt=[{"role": "user", "content": "2+2="}],
        tokens=Tokens([1, 2, 3]),
        response_length=2,
        label={"answers": [4]},
        reward={"score": [1.0]},
        loss_mask=LossMask([1, 1]),
        rollout_log_probs=LogProbs([-0.5, -0.25]),
        teacher_log_probs=LogProbs([-1.0, -1.0]),
        weight_versions=[WeightSpan("1", 0, 2)],
        metadata={"turns": [{"tool": "sql"}], "seen": {1}, "pair": ([1], 2)},
        train_metadata={"a": [1]},
        multimodal_inputs={"images": [1]},
        multimodal_train_inputs={"pixels": [1]},
        spec_info={"steps": [1]},
        prefix_cache_info=[1],
    )


def test_a_copy_is_equal() -> None:
    assert _full().copy() == _full()


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.tokens.append(9),
        lambda s: s.loss_mask.append(0),
        lambda s: s.rollout_log_probs.append(0.0),
        lambda s: s.teacher_log_probs.append(0.0),
        lambda s: s.prompt[0].update(role="system"),
        lambda s: s.label["answers"].append(5),
        lambda s: s.reward["score"].append(0.0),
        lambda s: s.weight_versions.clear(),
        lambda s: s.metadata["turns"][0].update(tool="python"),
        lambda s: s.metadata["seen"].add(2),
        lambda s: s.metadata["pair"][0].append(2),
        lambda s: s.train_metadata["a"].append(2),
        lambda s: s.multimodal_inputs["images"].append(2),
        lambda s: s.multimodal_train_inputs["pixels"].append(2),
        lambda s: s.spec_info["steps"].append(2),
        lambda s: s.prefix_cache_info.append(2),
    ],
)
def test_a_change_to_a_copy_stays_there(change: Any) -> None:
    sample = _full()
    change(sample.copy())
    assert sample == _full()


def test_a_copy_keeps_kinds_of_containers() -> None:
    counts: defaultdict[str, list[int]] = defaultdict(list, a=[1])
    sample = Sample(metadata={"counts": counts, "words": Counter("aab"), "mask": LossMask([1])})
    twin = sample.copy()
    twin.metadata["counts"]["a"].append(2)
    twin.metadata["words"]["a"] += 1
    twin.metadata["mask"].append(0)
    assert sample.metadata == {"counts": {"a": [1]}, "words": {"a": 2, "b": 1}, "mask": [1]}
    assert twin.metadata["counts"]["new"] == []


def test_a_copy_shares_arrays() -> None:
    pixels = np.zeros(3)
    sample = Sample(multimodal_train_inputs={"pixels": pixels})
    twin = sample.copy().multimodal_train_inputs
    assert twin is not None
    assert twin["pixels"] is pixels


@pytest.mark.parametrize("reward", ["0.5", b"1", 10**400, object()], ids=["text", "bytes", "huge", "object"])
def test_a_reward_that_is_no_number_is_named(reward: Any) -> None:
    with pytest.raises(TypeError, match=r"sample 4: the reward .* is not a number"):
        Group(1, "p", [[Sample(index=4, reward=reward)]]).rewards()


def test_a_copy_packs_what_was_assigned_as_it_came() -> None:
    sample = Sample(response_length=2)
    sample.tokens, sample.loss_mask = (1, 2), [1, 0]  # type: ignore[assignment]
    twin = sample.copy()
    assert (type(twin.tokens), type(twin.loss_mask)) == (Tokens, LossMask)
    assert twin.tokens.tolist() + list(twin.loss_mask or ()) == [1, 2, 1, 0]
