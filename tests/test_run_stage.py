"""A stage tested inside a stream, without an engine."""

from __future__ import annotations

import pytest

from eventbus import Batch, CallNext, ContractError, Drop, Group, Sample, Summary, current_rollout
from eventbus.testing import run_stage
from middleware import DynamicFilter, in_thread, reward_nonzero_std

pytestmark = pytest.mark.anyio


async def test_the_stage_sees_its_context_and_keywords() -> None:
    def tag(sample: Sample, *, rollout_id: int, evaluation: bool) -> None:
        context = current_rollout()
        sample.metadata["seen"] = [rollout_id, evaluation, context.rollout_id, context.index, context.stage]

    sample = await run_stage(tag, Sample(index=3), rollout_id=7, evaluation=True)
    assert sample.metadata["seen"] == [7, True, 7, 3, "tag"]


async def test_a_slime_hook_gets_its_args() -> None:
    def hook(args: dict[str, str], sample: Sample, *, rollout_id: int | None = None) -> Sample:
        return Sample(label=args["label"], reward=rollout_id)

    result = await run_stage(hook, Sample(), args={"label": "x"}, rollout_id=2)
    assert (result.label, result.reward) == ("x", 2)


async def test_a_wrapper_gets_what_it_calls() -> None:
    async def twice(sample: Sample, call_next: CallNext) -> Sample:
        return await call_next(await call_next(sample))

    async def add(sample: Sample) -> Sample:
        sample.tokens += [1]
        return sample

    assert (await run_stage(twice, Sample(), call_next=add)).tokens == [1, 1]
    assert (await run_stage(twice, Sample())).tokens == []


async def test_a_wrapped_stage_runs_too() -> None:
    def slow(sample: Sample) -> None:
        sample.reward = 1.0

    assert (await run_stage(in_thread(slow), Sample())).reward == 1.0


async def test_a_filter_gets_its_count() -> None:
    group = Group(0, "p", [[Sample(reward=1.0)], [Sample(reward=1.0)]])
    judge = DynamicFilter(reward_nonzero_std, fallback="last")
    assert isinstance(await run_stage(judge, group, remaining=3, target=2), Drop)
    assert await run_stage(judge, group, remaining=2, target=2) is group


async def test_a_batch_stage_gets_its_batch() -> None:
    def note(batch: Batch, *, rollout_id: int) -> None:
        assert batch.rollout_id == rollout_id

    assert (await run_stage(note, Batch(4, [], Summary(4)), rollout_id=4)).rollout_id == 4


async def test_the_wrong_level_is_named() -> None:
    with pytest.raises(ContractError, match="'reward_nonzero_std' is a group stage, it was given a Sample"):
        await run_stage(reward_nonzero_std, Sample())


async def test_a_broken_contract_is_named() -> None:
    def wrong(sample: Sample) -> dict[str, int]:
        return {}

    def lengths(sample: Sample) -> None:
        sample.response_length = 3

    with pytest.raises(ContractError, match="stage 'wrong' returned dict, expected None, Sample, Drop"):
        await run_stage(wrong, Sample())
    with pytest.raises(ContractError, match=r"stage 'lengths'.*response_length is 3"):
        await run_stage(lengths, Sample())


async def test_errors_of_the_stage_pass() -> None:
    def raises(sample: Sample) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run_stage(raises, Sample())
