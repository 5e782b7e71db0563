from __future__ import annotations

import zlib
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus.batching import BatchSpec
from eventbus.columns import LogProbs, LossMask, Tokens
from eventbus.context import current_rollout
from eventbus.events import (
    EVENT_KINDS,
    EventHead,
    GroupJudged,
    RolloutStarted,
    changes,
    digest,
    light,
)
from eventbus.group import Batch, Group, Summary, Verdict
from eventbus.pipeline import Pipeline
from eventbus.sample import Completion, Sample, SampleStatus
from eventbus.testing import run_stage, virtual_time
from eventbus.wire import WireError
from middleware import Generate
from tests.streams import Log, some

HEAD: dict[str, Any] = {"seq": 4, "time_ns": 5, "rollout_id": 6, "evaluation": False}


def _sample(**fields: Any) -> Sample:
    return Sample(index=3, tokens=Tokens([1, 2, 3]), response_length=2, **fields)


def _mark(column: Any) -> tuple[int, int]:
    return len(column), zlib.crc32(column.tobytes())


# The union


def test_the_kinds_in_the_order_of_a_rollout() -> None:
    assert list(EVENT_KINDS) == [
        "rollout_started",
        "rollout_finished",
        "group_submitted",
        "sample_generated",
        "stage_applied",
        "group_completed",
        "group_judged",
        "group_ended",
        "stage_failed",
        "batch_assembled",
        "batch_trained",
        "weights_updated",
        "attempt_ended",
    ]


@pytest.mark.parametrize("kind", EVENT_KINDS)
def test_every_kind_begins_with_the_head(kind: str) -> None:
    assert issubclass(EVENT_KINDS[kind], EventHead)
    assert EVENT_KINDS[kind].__struct_fields__[:4] == ("seq", "time_ns", "rollout_id", "evaluation")


def test_an_event_knows_its_kind() -> None:
    assert GroupJudged(**HEAD, group_index=1, stage="f", verdict=Verdict(True)).kind == "group_judged"


def test_events_are_frozen() -> None:
    event = RolloutStarted(**HEAD, target=1, group_size=1)
    with pytest.raises(AttributeError, match="immutable"):
        event.seq = 5  # type: ignore[misc]


# Attempts of an engine


class Asked:
    """An engine, and a filter that asks it."""

    async def generate(self, sample: Sample, sampling: Any) -> Completion:
        self.attempt()
        return Completion("a", [1], [-0.5])

    async def choose(self, group: Group, *, remaining: int, target: int) -> None:
        self.attempt()

    def attempt(self) -> None:
        current_rollout().attempt_ended(attempt=1, worker="w", rid="r", outcome="answered", seconds=0.5)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_engine_tells_its_attempts_to_the_pipeline_that_asks_it(backend: str) -> None:
    engine = Asked()
    log, other = Log("attempt_ended"), Log("group_ended")

    async def main() -> None:
        stages = [Generate(engine), engine.choose]
        for observer in (log, other):
            pipeline = Pipeline(some(1), stages, BatchSpec(groups=1), observers=[observer], stall_after=None)
            async with pipeline:
                await anext(pipeline.rollouts(start=3))

    anyio.run(main, **virtual_time(backend))
    assert [(event.stage, event.group_index, event.index, event.execution) for event in log.events] == [
        ("Generate", 0, 0, 0),
        ("Generate", 0, 1, 1),
        ("choose", 0, None, None),
    ]
    assert {event.rollout_id for event in log.events} == {3}
    assert [event.seq for event in other.events] == [0]


def test_an_attempt_outside_of_a_pipeline_is_told_to_nobody() -> None:
    async def stage(sample: Sample) -> None:
        Asked().attempt()

    assert anyio.run(run_stage, stage, Sample(index=1)).index == 1


def test_an_observer_that_fails_at_an_attempt_ends_the_rollout() -> None:
    class Full:
        kinds = ("attempt_ended",)

        def observe(self, event: Any) -> None:
            raise OSError("the disk is full")

    async def main() -> None:
        pipeline = Pipeline(some(1), [Generate(Asked())], BatchSpec(1), observers=[Full()], stall_after=None)
        async with pipeline:
            with pytest.raises(OSError, match="the disk is full") as caught:
                await anext(pipeline.rollouts())
            assert caught.value.__notes__ == ["raised by the observer Full at event 0 (attempt_ended)"]

    anyio.run(main, **virtual_time("asyncio"))


# Light samples


def test_light_leaves_out_columns_multimodal_and_replay_fields() -> None:
    shown = light(
        _sample(
            reward=1.0,
            loss_mask=LossMask([1, 1]),
            multimodal_inputs={"images": [1]},
            multimodal_train_inputs={"pixels": [1]},
            rollout_routed_experts=[[1]],
            rollout_top_p_token_ids=[1],
            rollout_top_p_token_offsets=[1],
        )
    )
    assert shown.sample == Sample(index=3, response_length=2, reward=1.0)
    assert shown.columns == {"tokens": _mark(Tokens([1, 2, 3])), "loss_mask": _mark(LossMask([1, 1]))}


def test_light_is_of_its_moment() -> None:
    sample = _sample(metadata={"turns": [1]})
    shown = light(sample)
    sample.metadata["turns"].append(2)
    sample.tokens.append(4)
    assert shown.sample.metadata == {"turns": [1]}
    assert shown.columns["tokens"][0] == 3


def test_a_light_sample_still_has_its_reward() -> None:
    group = Group(0, "p", [[light(_sample(reward={"score": 0.5})).sample]])
    assert group.rewards("score") == [0.5]


# Changes


def test_no_changes() -> None:
    sample = _sample(reward=float("nan"), metadata={"a": [float("nan")]}, label=np.arange(3))
    assert changes(light(sample), light(sample.copy())) == ({}, {})


def test_changes_in_place_and_by_assignment() -> None:
    sample = _sample(metadata={"turns": [1]})
    before = light(sample)
    sample.metadata["turns"].append(2)
    sample.reward, sample.status = 1.0, SampleStatus.COMPLETED
    assert changes(before, light(sample)) == (
        {"reward": 1.0, "status": SampleStatus.COMPLETED, "metadata": {"turns": [1, 2]}},
        {},
    )


def test_a_field_set_back_to_its_default_is_a_change() -> None:
    sample = _sample(reward=1.0)
    before = light(sample)
    sample.reward = None
    assert changes(before, light(sample)) == ({"reward": None}, {})


def test_changed_new_and_gone_columns() -> None:
    sample = _sample(rollout_log_probs=LogProbs([-1.0, -2.0]), teacher_log_probs=LogProbs([0.0, 0.0]))
    before = light(sample)
    sample.tokens[0] = 9  # same length
    sample.loss_mask, sample.rollout_log_probs = LossMask([0, 1]), None
    marks = {"tokens": _mark(sample.tokens), "loss_mask": _mark(sample.loss_mask), "rollout_log_probs": None}
    assert changes(before, light(sample)) == ({}, marks)


def test_changed_values_are_of_their_moment() -> None:
    sample = _sample()
    before = light(sample)
    sample.metadata["turns"] = [1]
    fields, _ = changes(before, light(sample))
    sample.metadata["turns"].append(2)
    assert fields == {"metadata": {"turns": [1]}}


def test_another_array_is_a_change() -> None:
    sample = _sample(metadata={"a": np.arange(3)})
    before = light(sample)
    sample.metadata["a"] = np.arange(3)
    assert list(changes(before, light(sample))[0]) == ["metadata"]


@pytest.mark.parametrize(("old", "new"), [(1, True), (1.0, 1), ([1], [1, 2]), ({"a": 1}, {"b": 1}), (None, 0)])
def test_near_values_are_changes(old: Any, new: Any) -> None:
    before = light(_sample(reward=old))
    assert changes(before, light(_sample(reward=new)))[0] == {"reward": new}


# Digest

BASE = {"reward": 1.0, "metadata": {"a": 1, 2: {"x", "y", "z"}}, "rollout_log_probs": LogProbs([-1.0, -2.0])}


def _groups(**fields: Any) -> list[Group]:
    return [Group(0, "p", [[_sample(**(BASE | fields))]])]


def test_digest_is_stable() -> None:
    assert digest(_groups()) == "e1062659beafbef6ec084ccf35a9733e"


def test_digest_of_a_batch_is_that_of_its_groups() -> None:
    assert digest(Batch(1, _groups(), Summary(1))) == digest(_groups())


@pytest.mark.parametrize(
    "fields",
    [
        {"reward": 2.0},
        {"reward": None},
        {"metadata": {"a": 1}},
        {"metadata": {"a": 1, 2: ["x", "y", "z"]}},
        {"rollout_log_probs": LogProbs([-1.0, -2.5])},
        {"rollout_log_probs": None},
        {"loss_mask": LossMask([1, 1])},
        {"multimodal_train_inputs": {"pixels": np.zeros(2)}},
    ],
)
def test_digest_sees_every_field(fields: dict[str, Any]) -> None:
    assert digest(_groups(**fields)) != digest(_groups())


def test_digest_sees_the_grouping() -> None:
    one, other = _sample(), _sample()
    shapes = [
        [Group(0, "p", [[one, other]])],
        [Group(0, "p", [[one], [other]])],
        [Group(0, "p", [[one]]), Group(1, "p", [[other]])],
        [Group(1, "p", [[one, other]])],
    ]
    assert len(set(map(digest, shapes))) == len(shapes)


def test_digest_sees_no_key_order_and_no_clock() -> None:
    same = _groups(metadata={2: {"z", "y", "x"}, "a": 1}, non_generation_time=3.0)
    assert digest(same) == digest(_groups())


@given(st.dictionaries(st.integers() | st.text(), st.integers(), max_size=5), st.randoms())
def test_digest_is_that_of_the_content(metadata: dict[Any, int], random: Any) -> None:
    items = list(metadata.items())
    random.shuffle(items)
    small = {key: value % 2**60 for key, value in items if isinstance(key, str) or abs(key) < 2**60}
    again = dict(reversed(small.items()))
    assert digest(_groups(metadata=small)) == digest(_groups(metadata=again))


def test_digest_names_what_cannot_be_encoded() -> None:
    with pytest.raises(WireError, match=r"sample 3: metadata\.x cannot be encoded: no codec for builtins\.object"):
        digest(_groups(metadata={"x": object()}))
