from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import slime
from backends.sglang.router import lost_by_router
from backends.simulated import SimulatedEngine
from backends.slime import generate_rollout, generate_rollout_async
from backends.slime.samples import of_slime, sample_type
from eventbus import LogReader
from eventbus.batching import RolloutExhausted
from eventbus.sample import Completion, Sample
from eventbus.stage import ContractError
from eventbus.testing import virtual_time
from tests.slime_runs import (
    DataSource,
    arguments,
    engine,
    equal_in,
    slime_importable,
    slime_missing,
    slimes_rule,
)

STRICT = "backends.slime.check_reward_nonzero_std"
FALLBACK = "backends.slime.check_reward_nonzero_std_with_fallback"


@pytest.fixture(autouse=True)
def user() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, slime_importable(patch) as plugins:
        yield plugins


def rollout(args: Any, source: Any = None, rollout_id: int = 0, evaluation: bool = False) -> Any:
    """`generate_rollout` in virtual time."""
    source = DataSource() if source is None else source
    return anyio.run(generate_rollout_async, args, rollout_id, source, evaluation, **virtual_time("asyncio"))


def groups_of(output: Any) -> list[int]:
    return [group[0].group_index for group in output.samples]


# What slime calls


def test_the_entry_point_has_slimes_signature_and_gives_its_type() -> None:
    parameters = signature(generate_rollout).parameters
    assert list(parameters) == ["args", "rollout_id", "data_source", "evaluation"]
    assert parameters["evaluation"].default is False
    output = generate_rollout(arguments(engine()), 3, DataSource())
    assert type(output) is import_module("slime.rollout.base_types").RolloutFnTrainOutput
    assert len(output.samples) == 4
    for group in output.samples:
        assert [sample.index for sample in group] == [group[0].group_index * 2, group[0].group_index * 2 + 1]
        for sample in group:
            assert type(sample) is sample_type()
            assert type(sample.tokens) is list
            assert (sample.response, sample.response_length, sample.status.value) == ("ab", 2, "completed")
            assert (sample.rollout_log_probs, sample.reward) == ([-0.5, -0.5], float(sample.index % 2))
            assert sample.rollout_id is None  # as the data source gave it
            assert sample.session_id is not None
            assert sample.metadata == {}


def test_without_slime_it_gives_objects_of_the_same_shape() -> None:
    with pytest.MonkeyPatch.context() as patch, slime_missing(patch):
        output = generate_rollout(arguments(engine()), 3, DataSource())
        assert type(output) is slime.RolloutFnTrainOutput
        assert [type(sample) for group in output.samples for sample in group] == [slime.SlimeSample] * 8


def test_it_runs_on_slimes_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    theirs = import_module("slime.utils.async_utils")
    run = theirs.run

    def noted(coroutine: Any) -> Any:
        ran.append(coroutine)
        return run(coroutine)

    monkeypatch.setattr(theirs, "run", noted)
    of_slime.cache_clear()
    generate_rollout(arguments(engine()), 0, DataSource())
    assert len(ran) == 1


def test_the_engine_is_opened_for_the_rollout_and_closed_behind_it() -> None:
    class Opened(SimulatedEngine):
        opened = closed = 0

        async def __aenter__(self) -> Opened:
            self.opened += 1
            return self

        async def __aexit__(self, *_: object) -> None:
            self.closed += 1

    simulated = Opened(lambda sample: Completion("a", [1], [-0.5]))
    rollout(arguments(simulated))
    assert (simulated.opened, simulated.closed) == (1, 1)


def test_an_engine_can_be_named_by_its_import_path() -> None:
    args = arguments(rolloutbus_engine="tests.test_slime_rollout.named_engine", letter="q")
    assert rollout(args).samples[0][0].response == "q"


def named_engine(args: Any) -> SimulatedEngine:
    return SimulatedEngine(lambda sample: Completion(args.letter, [1], [-0.5]))


def test_sampling_comes_from_args(user: Any) -> None:
    args = arguments(
        custom_generate_function_path="user_plugins.generate_once", rollout_top_p=0.9, rollout_stop=["</s>"]
    )
    sampling = rollout(args).samples[0][0].metadata["sampling"]
    assert (sampling["temperature"], sampling["top_p"], sampling["max_new_tokens"]) == (1.0, 0.9, 8)
    assert (sampling["stop"], sampling["no_stop_trim"]) == (["</s>"], True)


def test_which_tokens_could_be_drawn_is_asked_for_in_training_where_not_all_could(user: Any) -> None:
    path = "user_plugins.generate_once"
    ask = {"return_top_p_token_ids": True}
    sampling = (
        rollout(arguments(custom_generate_function_path=path, rollout_top_p=0.9)).samples[0][0].metadata["sampling"]
    )
    assert sampling["custom_params"] == ask
    sampling = (
        rollout(arguments(custom_generate_function_path=path, rollout_top_p=1.0)).samples[0][0].metadata["sampling"]
    )
    assert "custom_params" not in sampling


def test_deterministic_inference_gives_siblings_seeds(user: Any) -> None:
    args = arguments(
        custom_generate_function_path="user_plugins.generate_once",
        sglang_enable_deterministic_inference=True,
        rollout_seed=40,
    )
    seeds = [sample.metadata["sampling"]["sampling_seed"] for sample in rollout(args).samples[3]]
    assert seeds == [40, 41]


def test_at_most_so_many_generate_at_once() -> None:
    simulated = engine(1.0)
    args = arguments(simulated, sglang_server_concurrency=2, rollout_num_gpus=8, rollout_num_gpus_per_engine=4)
    rollout(args)
    assert simulated.most_in_flight == 4


def test_a_group_of_another_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="a group of 3 samples, expected 2"):
        rollout(arguments(), DataSource(3))


def test_a_data_source_without_samples_is_an_error() -> None:
    empty = SimpleNamespace(get_samples=lambda count: [])
    with pytest.raises(ValueError, match="rollout 5: the data source gave no samples"):
        rollout(arguments(), empty, 5)


def test_groups_without_numbers_are_told_apart() -> None:
    def forget(sample: Any) -> None:
        sample.group_index = sample.index = None

    output = rollout(arguments(rewards=(), custom_rm_path="tests.test_slime_rollout.one"), DataSource(change=forget))
    assert [[sample.index for sample in group] for group in output.samples] == [[None, None]] * 4
    assert [group[0].prompt for group in output.samples] == [f"prompt {number}" for number in range(4)]


def one(args: Any, sample: Any) -> float:
    return 1.0


# Over-sampling, filters, fallback: slime's rule


def test_strict_asks_for_a_second_round() -> None:
    source = DataSource()
    output = rollout(arguments(rewards=equal_in([1, 3, 5], 6), dynamic_sampling_filter_path=STRICT), source)
    assert groups_of(output) == [0, 2, 4, 6]
    assert source.asked == [6, 6]
    assert output.metrics["rollout/dynamic_filter/drop_zero_std_1.0"] == 3


def test_the_fallback_fills_the_batch_in_one_round() -> None:
    source = DataSource()
    output = rollout(arguments(rewards=equal_in([1, 3, 5], 6), dynamic_sampling_filter_path=FALLBACK), source)
    assert groups_of(output) == [0, 2, 4, 5]
    assert source.asked == [6]
    assert output.metrics["rollout/dynamic_filter/drop_zero_std_1.0"] == 2
    assert output.metrics["rollout/rolloutbus/kept_by_fallback"] == 1
    assert output.metrics["rollout/rolloutbus/fallback_share"] == 0.25


def test_the_fallback_when_all_are_equal() -> None:
    output = rollout(arguments(rewards=equal_in(range(6), 6), dynamic_sampling_filter_path=FALLBACK))
    assert groups_of(output) == [2, 3, 4, 5]


def test_a_fallback_by_score_is_an_option() -> None:
    args = arguments(
        rewards=equal_in([1, 3, 5], 6), dynamic_sampling_filter_path=STRICT, rolloutbus_fallback="best",
        rolloutbus_batch={"max_rounds": 1},
    )  # fmt: skip
    output = rollout(args)
    assert groups_of(output) == [0, 1, 2, 4]  # of the rejected the one that came first in the data


def test_a_filter_that_rejects_everything_ends_with_what_it_rejected() -> None:
    args = arguments(rewards=equal_in(range(99), 99), dynamic_sampling_filter_path=STRICT)
    with pytest.raises(RolloutExhausted, match=r"dropped \d+ \(zero_std_1.0"):
        rollout(args)


@settings(max_examples=40)
@given(
    target=st.integers(1, 5),
    more=st.integers(0, 5),
    delays=st.permutations(range(1, 41)),
    rejected=st.sets(st.integers(0, 24)),
    spare=st.booleans(),
)
def test_what_is_kept_dropped_and_asked_for_is_what_slime_would(
    target: int, more: int, delays: list[int], rejected: set[int], spare: bool
) -> None:
    source = DataSource()
    durations = [delay + (group + 1) ** 0.5 / 100 for group, delay in enumerate(delays)]  # no two end together
    args = arguments(
        engine(lambda sample: durations[sample.group_index or 0]),
        rollout_batch_size=target,
        over_sampling_batch_size=target + more,
        rewards=equal_in(sorted(rejected), 40),
        dynamic_sampling_filter_path=FALLBACK if spare else STRICT,
        rolloutbus_batch={"max_rounds": 40},
    )
    kept, dropped, submitted = slimes_rule(target, target + more, durations, rejected, spare)
    output = rollout(args, source)
    assert groups_of(output) == kept
    assert output.metrics.get("rollout/dynamic_filter/drop_zero_std_1.0", 0) == dropped
    assert output.metrics["rollout/rolloutbus/kept_by_fallback"] == len(rejected.intersection(kept))
    assert sum(source.asked) == submitted == output.metrics["rollout/rolloutbus/submitted"]


def test_a_users_filter_gets_slimes_samples_and_may_change_them(user: Any) -> None:
    args = arguments(rollout_batch_size=2, dynamic_sampling_filter_path="user_plugins.odd_groups_differ")
    output = rollout(args)
    assert groups_of(output) == [1, 3]
    assert output.metrics["rollout/dynamic_filter/drop_even"] == 2
    args = arguments(
        rollout_batch_size=1, over_sampling_batch_size=1, dynamic_sampling_filter_path="user_plugins.first_group_only"
    )
    assert [sample.remove_sample for sample in rollout(args).samples[0]] == [True, False]


# Hooks and rewards


def test_hooks_of_users_run_before_the_reward(user: Any) -> None:
    hooks = ["tag", "judge", "replace", "by_position", "named_otherwise", "counting"]
    args = arguments(rollout_sample_hook_path=[f"user_plugins.{hook}" for hook in hooks])
    for sample in (sample for group in rollout(args, rollout_id=7).samples for sample in group):
        assert sample.metadata == {"tag": ("seen", 7), "by_position": True, "named": (7, False)}
        assert sample.seen_in_evaluation is False
        assert sample.train_metadata == {"keywords": ["evaluation", "rollout_id"]}
        assert sample.reward == float(sample.index % 2)


def test_a_hook_that_breaks_its_contract_ends_the_rollout(user: Any) -> None:
    with pytest.raises(ContractError, match=r"user_plugins.wrong.*expected Sample or None"):
        rollout(arguments(rollout_sample_hook_path=["user_plugins.wrong"]))


def test_a_hook_that_raises_costs_its_group_not_the_rollout(user: Any) -> None:
    output = rollout(arguments(rollout_sample_hook_path=["user_plugins.failing"], fails_at=2))
    assert groups_of(output) == [0, 2, 3, 4]
    assert output.metrics["rollout/rolloutbus/failed_samples"] == 1


def test_a_hook_that_always_raises_ends_the_rollout_with_its_errors(user: Any) -> None:
    args = arguments(
        rollout_sample_hook_path=["user_plugins.failing"], fails_at=2, rolloutbus_batch={"max_failures": 0}
    )
    with pytest.raises(ExceptionGroup) as raised:
        rollout(args)
    assert [str(error) for error in raised.value.exceptions] == ["the judge is gone"]


def test_a_path_that_leads_nowhere_is_found_before_anything_runs() -> None:
    for name in ("custom_generate_function_path", "custom_rm_path"):
        with pytest.raises(ImportError, match="nowhere"):
            rollout(arguments(**{name: "nowhere.reward"}))


def test_rewards_that_slime_brings() -> None:
    assert rollout(arguments(custom_rm_path=None, rm_type="label")).samples[0][0].reward == 1.0
    with pytest.MonkeyPatch.context() as patch, slime_missing(patch):
        with pytest.raises(ValueError, match="give custom_rm_path"):
            rollout(arguments(custom_rm_path=None, rm_type="label"))


def test_a_sample_that_comes_with_its_reward_keeps_it(user: Any) -> None:
    def rewarded(sample: Any) -> None:
        sample.reward = 9.0

    assert rollout(arguments(), DataSource(change=rewarded)).samples[0][0].reward == 9.0


def test_a_group_reward_gets_the_whole_group(user: Any) -> None:
    output = rollout(arguments(group_rm=True, custom_rm_path="user_plugins.reward"))
    assert {sample.reward for group in output.samples for sample in group} == {2.0}


# Generate functions


def test_an_execution_that_fans_out_stays_together(user: Any) -> None:
    args = arguments(
        custom_generate_function_path="user_plugins.generate_turns",
        custom_rm_path="user_plugins.reward",
        rollout_sample_hook_path=["user_plugins.tag"],
        dynamic_sampling_filter_path=FALLBACK,
    )
    output = rollout(args)
    assert len(output.samples) == 4
    for group in output.samples:
        first = group[0][0].group_index * 2
        assert [[sample.index for sample in execution] for execution in group] == [[first] * 2, [first + 1] * 2]
        for execution in group:
            assert [sample.tokens for sample in execution] == [[7, 0], [7, 1]]
            assert [sample.reward for sample in execution] == [1.0, 2.0]  # of one call, as slime makes it
            assert {sample.rollout_id for sample in execution} == {execution[0].index}
            assert execution[0].metadata == {"tag": ("seen", 0)}


def test_executions_that_do_not_fan_out_become_lists_beside_those_that_do(user: Any) -> None:
    args = arguments(
        custom_generate_function_path="user_plugins.generate_sometimes",
        custom_rm_path="user_plugins.reward",
        over_sampling_batch_size=4,
    )
    output = rollout(args)
    lengths = [[len(execution) for execution in group] for group in output.samples]
    assert lengths == [[2, 1], [1, 2], [1, 1], [2, 1]]
    flat = [sample for group in output.samples for execution in group for sample in execution]
    assert [sample.index for sample in flat] == [0, 0, 1, 2, 3, 3, 4, 5, 6, 6, 7]


def test_our_engine_as_slimes_generate_function() -> None:
    sample = sample_type()(index=0, prompt="p", tokens=[9])
    sample.mine = 1
    args = arguments(engine(version="7"))
    result = anyio.run(slime.generate, args, sample, {"max_new_tokens": 1})
    assert result is sample
    assert (sample.tokens, sample.response, sample.status.value) == ([9, 1], "a", "truncated")
    assert (sample.weight_versions, sample.mine) == (["7"], 1)
    parameters = list(signature(slime.generate).parameters)
    assert parameters[:3] == ["args", "sample", "sampling_params"]
    through = rollout(arguments(engine(), custom_generate_function_path="backends.slime.generate"))
    assert through.samples[0][0].response == "ab"


# What a rollout leaves behind


def test_unfinished_groups_are_forgotten_as_in_slime() -> None:
    source = DataSource()
    rollout(arguments(), source)
    assert source.buffer == []


def test_partial_rollouts_go_on_with_the_tokens_that_are_there() -> None:
    source, simulated = DataSource(), engine(lambda sample: delays[sample.index or 0], length=8)
    args = arguments(simulated, partial_rollout=True, over_sampling_batch_size=5)
    # When the batch is full, the first sample of group 4 has half of its tokens, and the second is done.
    delays = [float(index) for index in range(8)] + [14.0, 1.0]
    output = rollout(args, source, 3)
    assert groups_of(output) == [0, 1, 2, 3]
    [[first, second]] = source.buffer
    assert (first.tokens, first.status.value) == ([1, 2, 3, 4], "aborted")
    assert (second.tokens, second.status.value, second.reward) == ([1, 2, 3, 4, 5, 6, 7, 8], "completed", 1.0)
    assert first.metadata == second.metadata == {"start_rollout_id": 3}

    delays, calls = [float(index) for index in range(99)], simulated.calls
    args.rollout_sample_hook_path = ["user_plugins.tag"]
    args.mask_offpolicy_in_partial_rollout = True
    output = rollout(args, source, 4)
    assert groups_of(output) == [4, 5, 6, 7]
    resumed, finished = output.samples[0]
    assert resumed.tokens == finished.tokens == [1, 2, 3, 4, 5, 6, 7, 8]
    assert resumed.loss_mask == [0, 0, 0, 0, 1, 1, 1, 1]
    assert finished.loss_mask == [0] * 8
    assert resumed.metadata == {"start_rollout_id": 3, "tag": ("seen", 4)}
    assert finished.metadata == {"start_rollout_id": 3}  # it was done: neither its hooks nor its reward run again
    assert simulated.calls == calls + 9


def test_unfinished_groups_can_be_asked_again_from_the_start() -> None:
    source = DataSource()
    args = arguments(rolloutbus_batch={"unfinished": "restart"})
    rollout(args, source)
    assert [[sample.response for sample in group] for group in source.buffer] == [["", ""], ["", ""]]
    assert groups_of(rollout(args, source, 1)) == [4, 5, 6, 7]


def test_good_groups_beyond_the_batch_can_be_carried() -> None:
    source, simulated = DataSource(), engine(1.0)  # all six are done in one moment
    args = arguments(simulated, rolloutbus_batch={"surplus": "carry"}, dynamic_sampling_filter_path=STRICT)
    output = rollout(args, source)
    assert len(source.buffer) == 2
    assert [[sample.reward for sample in group] for group in source.buffer] == [[0.0, 1.0]] * 2
    carried = {group[0].group_index for group in source.buffer}
    assert carried | set(groups_of(output)) == set(range(6))
    again = rollout(args, source, 1)
    assert carried < set(groups_of(again))  # at once, without being generated again
    assert simulated.calls == 2 * 6 + 2 * 4


def test_a_fanned_out_execution_that_is_done_goes_on_as_it_is(user: Any) -> None:
    args = arguments(
        custom_generate_function_path="user_plugins.generate_turns",
        custom_rm_path="user_plugins.reward",
        over_sampling_batch_size=4,
    )
    source = DataSource()
    first = rollout(args, source).samples[0]
    source.buffer.append(first)
    again = rollout(args, source, 1).samples[0]
    assert again == first

    args.partial_rollout = args.mask_offpolicy_in_partial_rollout = True
    source.buffer.append(first)
    masked, fresh = rollout(args, source, 2).samples[:2]
    assert all(not any(one.loss_mask) for execution in masked for one in execution)
    assert all(one.loss_mask is None for execution in fresh for one in execution)


def test_filters_of_the_whole_rollout_run(user: Any) -> None:
    user.PROCESSED.clear()
    user.GIVE.clear()
    args = arguments(
        rewards=equal_in([1], 6),
        dynamic_sampling_filter_path=STRICT,
        rollout_sample_filter_path="user_plugins.drop_first",
        rollout_all_samples_process_path="user_plugins.process_all",
    )
    output = rollout(args)
    assert output.samples[0][0].remove_sample
    assert user.PROCESSED == [[0, 2, 4, 6, 8]]
    assert len(user.GIVE[0](3)) == 3  # what slime calls a data source there is the function of it that gives samples


def test_a_rollout_can_be_recorded(tmp_path: Path) -> None:
    args = arguments(rolloutbus_log=str(tmp_path / "logs" / "{rollout_id}.mcap"), dynamic_sampling_filter_path=STRICT)
    rollout(args, rollout_id=7)
    log = LogReader(tmp_path / "logs" / "7.mcap")
    groups = list(log.rollout(7).groups())
    assert [group.index for group in groups if group.verdict is not None and group.verdict.kept] == [0, 1, 2, 3]
    rollout(args, rollout_id=7)  # a run that is resumed writes it anew


# Side by side


async def slow_note(args: Any, sample: Any, *, rollout_id: int | None = None, evaluation: bool = False) -> None:
    await anyio.sleep(args.seconds)
    sample.metadata["noted"] = rollout_id, evaluation


def test_hooks_see_the_rollout_for_which_their_sample_was_submitted(tmp_path: Path) -> None:
    outputs: dict[int, Any] = {}

    async def run(rollout_id: int, seconds: float, evaluation: bool) -> None:
        args = arguments(
            engine(),
            rollout_sample_hook_path=["tests.test_slime_rollout.slow_note"],
            eval_datasets=[dataset(tmp_path)],
            hf_checkpoint="model",
            seconds=seconds,
        )
        outputs[rollout_id] = await generate_rollout_async(args, rollout_id, DataSource(), evaluation)

    async def all_at_once() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, 7, 30.0, False)
            tasks.start_soon(run, 8, 20.0, True)
            tasks.start_soon(run, 9, 10.0, False)

    anyio.run(all_at_once, **virtual_time("asyncio"))
    assert {sample.metadata["noted"] for group in outputs[7].samples for sample in group} == {(7, False)}
    assert {sample.metadata["noted"] for sample in outputs[8].data["math"]["samples"]} == {(8, True)}
    assert {sample.metadata["noted"] for group in outputs[9].samples for sample in group} == {(9, False)}


# Evaluation


def dataset(tmp_path: Path, name: str = "math", rows: int = 3, **options: Any) -> SimpleNamespace:
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{name} {row}", "label": "ab"}) + "\n" for row in range(rows)))
    defaults = {"name": name, "path": str(path), "n_samples_per_eval_prompt": 2, "input_key": "prompt"}
    return SimpleNamespace(**defaults | options)


@pytest.mark.parametrize("where", ["slime", "without slime"])
def test_evaluation_gives_every_sample_of_every_data_set(where: str, tmp_path: Path) -> None:
    sets = [dataset(tmp_path, max_response_len=1), dataset(tmp_path, "code", rows=1, n_samples_per_eval_prompt=1)]
    args = arguments(
        eval_datasets=sets, hf_checkpoint="model", rollout_sample_hook_path=["tests.test_slime_rollout.note"]
    )
    with pytest.MonkeyPatch.context() as patch:
        if where == "slime":
            output = rollout(args, rollout_id=9, evaluation=True)
            assert type(output) is import_module("slime.rollout.base_types").RolloutFnEvalOutput
        else:
            with slime_missing(patch):
                output = rollout(args, rollout_id=9, evaluation=True)
                assert type(output) is slime.RolloutFnEvalOutput
    assert list(output.data) == ["math", "code"]
    math, code = output.data["math"], output.data["code"]
    assert [sample.index for sample in math["samples"]] == [0, 1, 2, 3, 4, 5]
    assert [sample.prompt for sample in math["samples"]] == [f"math {i // 2}" for i in range(6)]
    assert math["rewards"] == [0.0, 1.0] * 3
    assert math["truncated"] == [True] * 6
    assert (code["rewards"], code["truncated"]) == ([0.0], [False])
    assert {sample.metadata["noted"] for sample in math["samples"]} == {(9, True)}


def note(args: Any, sample: Any, *, rollout_id: int | None = None, evaluation: bool = False) -> None:
    sample.metadata["noted"] = rollout_id, evaluation


def test_a_data_set_may_have_its_own_functions_and_reward_key(tmp_path: Path, user: Any) -> None:
    mine = dataset(
        tmp_path,
        custom_generate_function_path="user_plugins.generate_once",
        custom_rm_path="tests.test_slime_rollout.scored",
        temperature=0.0,
        inject_metadata=lambda metadata: {**(metadata or {}), "rm_type": "mine"},
    )
    args = arguments(eval_datasets=[mine], hf_checkpoint="model", eval_reward_key="score")
    data = rollout(args, evaluation=True).data["math"]
    assert data["rewards"] == [0.5] * 6
    sample = data["samples"][0]
    assert sample.response == "eval"
    assert sample.metadata["rm_type"] == "mine"
    assert sample.metadata["sampling"]["temperature"] == 0.0


def scored(args: Any, sample: Any) -> dict[str, float]:
    return {"score": 0.5}


def test_a_sample_that_fails_is_missing_and_counted(tmp_path: Path, user: Any) -> None:
    args = arguments(
        eval_datasets=[dataset(tmp_path)], hf_checkpoint="model", fails_at=2,
        rollout_sample_hook_path=["user_plugins.failing"],
    )  # fmt: skip
    output = rollout(args, evaluation=True)
    assert [sample.index for sample in output.data["math"]["samples"]] == [0, 1, 4, 5]
    assert output.metrics["eval/math/rolloutbus/failed_samples"] == 1


def test_evaluation_without_data_sets_is_empty_and_without_group_rewards() -> None:
    assert rollout(arguments(), evaluation=True).data == {}
    with pytest.raises(ValueError, match="group_rm"):
        rollout(arguments(group_rm=True), evaluation=True)


# The default engine


def test_by_default_it_is_sglang_behind_slimes_router(monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.slime import engines

    made: list[dict[str, Any]] = []
    asked: list[dict[str, Any]] = []

    class Asked(SimulatedEngine):
        async def generate(self, sample: Sample, sampling: Mapping[str, Any]) -> Completion:
            asked.append({"sampling_params": dict(sampling)})
            return await super().generate(sample, sampling)

    def make(**options: Any) -> SimulatedEngine:
        made.append(options)
        return Asked(lambda sample: Completion("ab", [1, 2], [-0.5, -0.5]))

    paths = {"backends.sglang:SGLangEngine": make}
    monkeypatch.setattr(
        engines, "load_object", lambda path: paths.get(path) or import_module("middleware.tokenize").Tokenize
    )
    args = arguments(
        rolloutbus_engine=None, sglang_router_ip="10.0.0.1", sglang_router_port=3000, hf_checkpoint="model",
        use_rollout_routing_replay=True, num_layers=2, moe_router_topk=4, rollout_top_p=0.9,
    )  # fmt: skip
    sample = rollout(args).samples[0][0]
    assert made == [{"router": "http://10.0.0.1:3000", "routed_experts": (2, 4)}]
    assert lost_by_router(asked[0]) == ["sampling_params.custom_params"]  # all else goes through slime's router
    assert sample.tokens[:-2] == [ord(character) for character in "prompt 0"]  # by slime's tokenizer, nothing in front
