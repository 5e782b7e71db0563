"""Against slime itself, where it is importable, as in its image: its types, and how it loads and calls functions.

The other tests of `backends.slime` have a stand-in with the shapes that slime has; these say whether it still has them.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backends import slime
from backends.slime.samples import of_slime
from eventbus.sample import Sample
from eventbus.wire import decode, encode
from tests.slime_runs import DataSource, arguments, engine, equal_in

pytestmark = [
    pytest.mark.skipif(find_spec("slime") is None, reason="slime is not importable"),
    pytest.mark.filterwarnings("ignore"),  # of slime and what it imports
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    of_slime.cache_clear()
    yield
    of_slime.cache_clear()


def part_of_slime(name: str) -> Any:
    """Of the parts that need more than slime alone (Ray, SGLang, torch), those that are here."""
    return pytest.importorskip(
        f"slime.{name}", reason=f"slime.{name} needs something that is missing", exc_type=ImportError
    )


@pytest.fixture
def sample() -> Any:
    """Every field has a value of its own."""
    kind = part_of_slime("utils.types").Sample
    sample = kind()
    for each in fields(kind):
        value = getattr(sample, each.name)
        if value is None or isinstance(value, dict):
            setattr(sample, each.name, {"of": each.name})
        elif isinstance(value, str):
            setattr(sample, each.name, f"some {each.name}")
        elif isinstance(value, bool):
            setattr(sample, each.name, True)
        elif isinstance(value, float):
            setattr(sample, each.name, 1.5)
        for count in vars(value) if each.name in ("spec_info", "prefix_cache_info") else ():
            setattr(value, count, 3)
    sample.tokens, sample.response_length = [1, 2, 3, 4], 2
    sample.loss_mask, sample.rollout_log_probs, sample.teacher_log_probs = [1, 0], [-0.5, -1.0], [-0.25, -2.0]
    sample.group_index, sample.index, sample.rollout_id, sample.weight_versions = 5, 11, 12, ["3", "4"]
    sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets = [3, 9, 4], [0, 2, 3]
    sample.reward, sample.label, sample.session_id, sample.status = 0.5, "4", "s", kind.Status.TRUNCATED
    sample.of_the_user = [1]
    return sample


# Types


def test_a_sample_with_every_field_set_comes_back_as_it_was(sample: Any) -> None:
    before = copy.deepcopy(vars(sample))
    back = slime.to_slime(decode(encode(slime.from_slime(sample)), Sample))
    assert type(back) is type(sample)
    assert vars(back) == before == vars(sample)
    assert back.to_dict() == sample.to_dict()


def test_what_stands_in_for_its_sample_has_nothing_that_slime_lacks() -> None:
    theirs = part_of_slime("utils.types").Sample
    fresh = vars(theirs())
    # Older versions lack these.
    newer = {"rollout_id", "custom_rm_path", "rollout_top_p_token_ids", "rollout_top_p_token_offsets"}
    assert {each.name for each in fields(slime.SlimeSample)} - newer <= fresh.keys()
    assert {status.name: status.value for status in slime.SlimeSample.Status} == {
        status.name: status.value for status in theirs.Status
    }


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("rollout.base_types", "RolloutFnTrainOutput"),
        ("rollout.base_types", "RolloutFnEvalOutput"),
        ("rollout.filter_hub.base_types", "DynamicFilterOutput"),
    ],
)
def test_what_stands_in_for_its_outputs_has_their_fields_in_their_order(module: str, name: str) -> None:
    theirs, ours = getattr(part_of_slime(module), name), getattr(slime, name)
    assert [each.name for each in fields(ours)] == [each.name for each in fields(theirs)]


# Signatures


@pytest.mark.parametrize(
    ("module", "name", "ours"),
    [
        ("rollout.sglang_rollout", "generate_rollout", "generate_rollout"),
        ("rollout.sample_hooks", "apply_rollout_sample_hooks", "apply_rollout_sample_hooks"),
        ("rollout.sample_hooks", "set_current_rollout_id", "set_current_rollout_id"),
        ("rollout.filter_hub.dynamic_sampling_filters", "check_reward_nonzero_std", "check_reward_nonzero_std"),
        (
            "rollout.filter_hub.dynamic_sampling_filters",
            "check_reward_nonzero_std_with_fallback",
            "check_reward_nonzero_std_with_fallback",
        ),
        ("rollout.data_source", "pop_first", "oldest_first"),
    ],
)
def test_an_entry_point_has_the_parameters_of_slimes_own(module: str, name: str, ours: str) -> None:
    function = getattr(part_of_slime(module), name, None)
    if function is None:
        pytest.skip(f"this version of slime has no {name}")
    theirs = list(inspect.signature(function).parameters.values())
    mine = list(inspect.signature(getattr(slime, ours)).parameters.values())
    assert [(one.name, one.kind, one.default) for one in mine] == [(one.name, one.kind, one.default) for one in theirs]


def test_generate_can_be_called_as_slime_calls_a_generate_function() -> None:
    theirs = list(inspect.signature(part_of_slime("rollout.sglang_rollout").generate).parameters)
    assert list(inspect.signature(slime.generate).parameters) == [*theirs, "evaluation"]


def test_its_data_set_takes_what_an_evaluation_gives_it() -> None:
    parameters = inspect.signature(part_of_slime("utils.data").Dataset).parameters
    given = ("path", "tokenizer", "processor", "max_length", "prompt_key", "label_key", "metadata_key", "tool_key")
    assert {*given, "multimodal_keys", "apply_chat_template", "apply_chat_template_kwargs"} <= parameters.keys()


# Loaded and called by slime


def loaded(name: str) -> Any:
    """By slime's own function, from the value that an option of slime has."""
    return part_of_slime("utils.misc").load_function(f"backends.slime.{name}")


def test_slime_finds_every_entry_point_by_its_path() -> None:
    for name in slime.__all__:
        assert loaded(name) is getattr(slime, name)


def rolled_out(**options: Any) -> Any:
    """As slime's `RolloutManager` calls a rollout function."""
    base_types = part_of_slime("rollout.base_types")
    args = arguments(engine(), over_sampling_batch_size=4, **options)
    output = base_types.call_rollout_fn(loaded("generate_rollout"), args, 3, DataSource(), evaluation=False)
    assert type(output) is base_types.RolloutFnTrainOutput
    return output


def test_slime_takes_our_rollout_as_its_own() -> None:
    kind = part_of_slime("utils.types").Sample
    output = rolled_out()
    assert [[type(one) for one in group] for group in output.samples] == [[kind] * 2] * 4
    assert [[one.index for one in group] for group in output.samples] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert all(
        one.status is kind.Status.COMPLETED and one.reward is not None for group in output.samples for one in group
    )


def test_slime_takes_fanned_out_executions() -> None:
    module = part_of_slime("ray.rollout")
    output = rolled_out(custom_generate_function_path=f"{__name__}.two_turns")
    module._validate_rollout_id_annotated(output.samples)
    assert [len(execution) for group in output.samples for execution in group] == [2] * 8


async def two_turns(args: Any, sample: Any, sampling_params: Any) -> list[Any]:
    turns = [copy.deepcopy(sample) for _ in range(2)]
    for turn in turns:
        turn.tokens, turn.response, turn.response_length = [7, 8], "a", 1
        turn.reward = float(sample.index % 2)
        turn.status = type(sample).Status.COMPLETED
    return turns


def test_slime_takes_our_evaluation_as_its_own() -> None:
    base_types = part_of_slime("rollout.base_types")
    output = base_types.call_rollout_fn(
        loaded("generate_rollout"), arguments(engine()), 3, DataSource(), evaluation=True
    )
    assert type(output) is base_types.RolloutFnEvalOutput
    assert output.data == {}


@pytest.mark.parametrize(("remaining", "dropped"), [(5, True), (4, False)])
def test_slimes_own_loop_decides_by_our_filters(remaining: int, dropped: bool) -> None:
    module = part_of_slime("rollout.filter_hub.base_types")
    kind = part_of_slime("utils.types").Sample
    args = SimpleNamespace(reward_key=None)
    equal = [kind(reward=reward) for reward in equal_in([0], 1)]
    for name, drops in (("check_reward_nonzero_std", True), ("check_reward_nonzero_std_with_fallback", dropped)):
        output = module.call_dynamic_filter(loaded(name), args, equal)
        counts = {"remaining_batch_size": remaining, "target_data_size": 4}
        assert module.should_drop_dynamic_filter_output(output, **counts) is drops
        assert output.reason == "zero_std_1.0"


def test_our_hooks_do_what_slimes_do() -> None:
    module = part_of_slime("rollout.sample_hooks")
    kind = part_of_slime("utils.types").Sample
    args = SimpleNamespace(rollout_sample_hook_path=[f"{__name__}.note", f"{__name__}.note_later"], marker="m")
    noted = []
    for apply, set_id in (
        (module.apply_rollout_sample_hooks, module.set_current_rollout_id),
        (slime.apply_rollout_sample_hooks, slime.set_current_rollout_id),
    ):
        set_id(7)
        value = [kind(index=0), [kind(index=1), [kind(index=2)]], []]
        noted.append(asyncio.run(apply(args, value, evaluation=True)))
        set_id(None)
    assert noted[0] == noted[1]
    assert noted[1][1][1][0].metadata == {"noted": ("m", 7), "later": True}


def note(args: Any, sample: Any, *, rollout_id: int | None = None) -> None:
    sample.metadata["noted"] = args.marker, rollout_id


async def note_later(args: Any, sample: Any, **keywords: Any) -> Any:
    await asyncio.sleep(0)
    sample.metadata["later"] = keywords["evaluation"]
    return sample


def test_slime_reads_the_debug_data_that_we_write(sample: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = str(tmp_path / "{rollout_id}.pt")
    slime.save_debug_rollout_data(path, [sample], rollout_id=4, evaluation=False)
    content = torch.load(tmp_path / "4.pt", weights_only=False)
    assert content["rollout_id"] == 4
    assert vars(type(sample).from_dict(content["samples"][0])) == vars(sample)
    assert [vars(one) for one in slime.load_debug_rollout_data(path, rollout_id=4)] == [vars(sample)]


def test_its_event_loop_is_where_we_run() -> None:
    assert import_module("slime.utils.async_utils").run(answer()) == 42


async def answer() -> int:
    return 42
