"""The stages of a rollout for slime, and slime's data source as a source of prompts.

    generate -> hooks -> reward -> group_reward -> filter

What slime's users wrote (generate functions, hooks, rewards, filters) gets slime's samples; between two of them the
sample is ours, so that a log of the rollout tells what each has done. The samples that the data source gave are never
changed: a group that is asked again begins as it came.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial, update_wrapper
from inspect import isawaitable, signature
from typing import Any, Final
from uuid import uuid4

from backends.slime.engines import SlimeEngine
from backends.slime.filters import decision
from backends.slime.hooks import apply_rollout_sample_hooks
from backends.slime.options import LeftOver, concurrency, first, option, sampling
from backends.slime.samples import from_slime, of_slime, to_slime
from eventbus.columns import LossMask
from eventbus.context import current_rollout
from eventbus.events import GroupEnded
from eventbus.group import Group
from eventbus.imports import load_object
from eventbus.sample import Sample, SampleStatus
from middleware.filter import DynamicFilter, Fallback
from middleware.stages import group_stage, sample_stage
from middleware.wrappers import limit

__all__ = ["SlimePrompts", "SlimeRollout", "by_index"]

_ENDED: Final = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)


class SlimeRollout:
    """One call of slime's rollout function: the stages, and what they have to remember of slime's samples.

    :param fans_out: a generate function of the user's may return several samples.
    :param unfinished: what becomes of groups that are not done when the batch is full.
    :param carries: groups that are good, but too many, go on in the next rollout.
    :raises LoadError: an import path in `args` leads nowhere.
    :raises ValueError: `rm_type` names a reward of slime, and slime is not importable.
    """

    kinds = ("group_ended",)

    def __init__(
        self, args: Any, rollout_id: int, *, fans_out: bool, unfinished: LeftOver = "cancel", carries: bool = False
    ) -> None:
        self.args = args
        self.rollout_id = rollout_id
        custom = option(args, "custom_generate_function_path")
        self.engine = None if custom else SlimeEngine(args)
        self.given: dict[int, list[Any]] = {}
        """The groups as they came, by the number under which the pipeline knows them."""
        self.complete: dict[int, Group] = {}
        """Groups with all their rewards, as far as somebody will ask for them."""
        self._sampling = sampling(args)
        self._fans_out = fans_out
        self._unfinished = unfinished
        self._masks_earlier = option(args, "partial_rollout") and option(args, "mask_offpolicy_in_partial_rollout")
        self._wants_all = bool(option(args, "rollout_all_samples_process_path"))
        self._wants_groups = carries or self._wants_all
        self._began: dict[tuple[int, int], Sample] = {}
        """Samples whose response was stopped, by group and position."""
        self._done: dict[tuple[int, int], list[Sample]] = {}
        """Executions with their rewards, in the same way."""
        self._rewarded: set[int] = set()
        """Executions that come with their rewards, or got them where they fanned out."""
        self._fanned_out: dict[int, int] = {}
        """Executions that became lists, and the length of those."""
        self._outcomes: dict[int, str] = {}
        for path in (custom, option(args, "custom_rm_path"), *(option(args, "rollout_sample_hook_path") or ())):
            if path:
                load_object(path)
        if option(args, "rm_type") and not option(args, "custom_rm_path"):
            _rm_hub("async_rm")

    def sample_stages(self) -> list[Any]:
        generate: Any = sample_stage(self._generate, name="generate", external=True, fans_out=self._fans_out)
        if most := concurrency(self.args):
            generate = limit(generate, most)
        stages = [generate]
        if option(self.args, "rollout_sample_hook_path"):
            stages.append(sample_stage(self._hooks, name="hooks"))
        if not option(self.args, "group_rm"):
            stages.append(sample_stage(self._reward, name="reward", external=True))
        if self._unfinished == "recycle":
            stages.append(sample_stage(self._remember, name="remember"))
        return stages

    def group_stages(self) -> list[Any]:
        stages: list[Any] = []
        if option(self.args, "group_rm"):
            stages.append(group_stage(self._group_reward, name="group_reward", external=True))
        if self._wants_groups:
            stages.append(group_stage(self._remember_group, name="remember_group"))
        if path := option(self.args, "dynamic_sampling_filter_path"):
            function = load_object(path)
            judge = update_wrapper(partial(self._judge, function), function)
            fallback: Fallback = option(self.args, "rolloutbus_fallback") or "none"
            stages.append(group_stage(DynamicFilter(judge, fallback=fallback), name="filter"))
        return stages

    # Samples

    async def _generate(
        self, sample: Sample, *, sampling: Mapping[str, Any], evaluation: bool
    ) -> Sample | list[Sample]:
        """The sample that the data source gave for this one, with its response; or those that it fans out into."""
        args, execution = self.args, sample.rollout_id or 0
        number, position = self._place(sample)
        theirs = self.given[number][position]
        if isinstance(theirs, list):  # it was done, and had fanned out, when an earlier rollout ended
            self._rewarded.add(execution)
            self._fanned_out[execution] = len(theirs)
            return [self._begun(one, sample) for one in theirs]
        ours = self._begun(theirs, sample)
        if ours.status in _ENDED:
            if ours.reward is not None or option(args, "group_rm"):
                self._rewarded.add(execution)
            return ours
        if ours.session_id is None:
            ours.session_id = str(uuid4())
        parameters = {**self._sampling, **sampling}
        if not evaluation and first(option(args, "rollout_top_p"), 1.0) != 1.0:
            # The trainer needs to know which tokens could be drawn; slime's build of SGLang tells it.
            parameters["custom_params"] = {"return_top_p_token_ids": True}
        if option(args, "sglang_enable_deterministic_inference"):
            parameters["sampling_seed"] = args.rollout_seed + position
        path = option(theirs, "generate_function_path") or option(args, "custom_generate_function_path")
        if path:
            result = await self._generate_custom(path, ours, parameters, evaluation)
            if isinstance(result, list):
                return result
            ours = result
        else:
            assert self.engine is not None
            ours.status = SampleStatus.PENDING
            await self.engine(ours, parameters)
        stopped = ours.status is SampleStatus.ABORTED or current_rollout().closing
        if stopped and self._unfinished == "recycle" and not option(args, "group_rm"):
            self._began[number, position] = ours
        return ours

    def _begun(self, theirs: Any, like: Sample) -> Sample:
        """Our sample for slime's. By slime's flag, what it has of a response does not count in the loss: slime goes by
        the rollout, and does not say which weights wrote which token, as `middleware.mask_offpolicy` needs it."""
        ours = from_slime(theirs, like=like).copy()
        if ours.response_length and self._masks_earlier:
            ours.loss_mask = LossMask(bytes(ours.response_length))
        return ours

    async def _generate_custom(
        self, path: str, ours: Sample, parameters: dict[str, Any], evaluation: bool
    ) -> Sample | list[Sample]:
        keywords = {"evaluation": evaluation} if _takes_evaluation(path) else {}
        theirs = await load_object(path)(self.args, to_slime(ours), parameters, **keywords)
        if not isinstance(theirs, list):
            return from_slime(theirs, like=ours)
        execution = ours.rollout_id or 0
        self._fanned_out[execution] = len(theirs)
        if not any(one.status.value == "aborted" for one in theirs):
            # A reward function gets all samples of an execution at once, as in slime.
            theirs = await apply_rollout_sample_hooks(self.args, theirs, evaluation=evaluation)
            missing = [one for one in theirs if one.reward is None]
            if missing and not option(self.args, "group_rm"):
                await self._reward_many(missing)
            self._rewarded.add(execution)
        return [from_slime(one, like=ours) for one in theirs]

    async def _hooks(self, sample: Sample, *, evaluation: bool) -> Sample:
        if sample.rollout_id in self._rewarded:
            return sample
        theirs = await apply_rollout_sample_hooks(self.args, to_slime(sample), evaluation=evaluation)
        return from_slime(theirs, like=sample)

    async def _reward(self, sample: Sample) -> Sample:
        if sample.reward is not None or sample.rollout_id in self._rewarded:
            return sample
        theirs = to_slime(sample)
        path = option(theirs, "custom_rm_path") or option(self.args, "custom_rm_path")
        function = load_object(path) if path else _rm_hub("async_rm")
        theirs.reward = await awaited(function(self.args, theirs))
        return from_slime(theirs, like=sample)

    def _remember(self, sample: Sample) -> None:
        self._done.setdefault(self._place(sample), []).append(sample)

    # Groups

    async def _group_reward(self, group: Group) -> None:
        theirs = self._shaped(group)
        await self._reward_many(theirs)
        _write_back(group, theirs)

    async def _reward_many(self, theirs: list[Any]) -> None:
        path = option(self.args, "custom_rm_path")
        function = load_object(path) if path else _rm_hub("batched_async_rm")
        rewards = await awaited(function(self.args, list(theirs)))
        for execution, reward in zip(theirs, rewards, strict=True):
            for one in execution if isinstance(execution, list) else [execution]:
                one.reward = reward

    def _remember_group(self, group: Group) -> None:
        self.complete[group.index] = group

    async def _judge(self, function: Callable[..., Any], group: Group) -> Any:
        theirs = self._shaped(group)
        output = await awaited(function(self.args, list(theirs)))
        _write_back(group, theirs)
        return decision(output)

    # What comes out

    def observe(self, event: GroupEnded) -> None:
        """How each group ended; what nobody will ask for is forgotten."""
        number = event.group_index
        self._outcomes[number] = event.outcome
        if event.outcome not in ("cancelled", "carried"):
            for position in range(len(self.given[number])):
                self._done.pop((number, position), None)
            if not self._wants_all:
                self.complete.pop(number, None)

    def to_slime(self, groups: Sequence[Group]) -> list[list[Any]]:
        """Groups in slime's shape and order: of lists where any execution of them has fanned out."""
        nested = any(self._is_nested(execution) for group in groups for execution in group.executions)
        shaped = [[self._execution(execution, nested) for execution in group.executions] for group in groups]
        return sorted(shaped, key=lambda group: by_index(_first_of(group)))

    def left_over(self) -> list[list[Any]]:
        """The groups that the next rollout is to go on with, as a data source takes them."""
        groups = []
        for number, outcome in sorted(self._outcomes.items()):
            if outcome == "carried":
                groups.append(self._shaped(self.complete[number]))
            elif outcome == "cancelled" and self._unfinished == "restart":
                groups.append(self.given[number])
            elif outcome == "cancelled" and self._unfinished == "recycle":
                groups.append([self._as_it_is((number, at)) for at in range(len(self.given[number]))])
        return groups

    def _as_it_is(self, place: tuple[int, int]) -> Any:
        """An execution of an unfinished group: done, begun, or as it came."""
        done = self._done.get(place, [])
        if done and len(done) == self._fanned_out.get(done[0].rollout_id or 0, 1):
            theirs = self._execution(sorted(done, key=by_index))
        elif place in self._began:
            theirs = to_slime(self._began[place])
        else:
            return self.given[place[0]][place[1]]
        for one in theirs if isinstance(theirs, list) else [theirs]:
            if one.response:
                one.metadata.setdefault("start_rollout_id", self.rollout_id)
        return theirs

    def _shaped(self, group: Group) -> list[Any]:
        nested = any(map(self._is_nested, group.executions))
        return [self._execution(execution, nested) for execution in group.executions]

    def _execution(self, samples: list[Sample], nested: bool = False) -> Any:
        if not nested and not self._is_nested(samples):
            return to_slime(samples[0])
        theirs = [to_slime(sample) for sample in samples]
        if any(one.rollout_id is None for one in theirs):
            # slime has to know that they are one execution; like slime, by the sample that it began with.
            number, position = self._place(samples[0])
            index = _first_of(self.given[number][position]).index
            for one in theirs:
                one.rollout_id = samples[0].rollout_id if index is None else index
        return theirs

    def _is_nested(self, samples: list[Sample]) -> bool:
        return samples[0].rollout_id in self._fanned_out

    def _place(self, sample: Sample) -> tuple[int, int]:
        """Group and position of the execution; the children of a fan-out count on in steps of the group's size."""
        number = sample.group_index or 0
        return number, (sample.index or 0) % len(self.given[number])


class SlimePrompts:
    """A source of prompts over a function that gives slime's groups, such as `DataSource.get_samples`.

    :param get: gives up to so many groups, sync or async; fewer mean that there are no more.
    """

    def __init__(self, rollout: SlimeRollout, get: Callable[[int], Any], group_size: int) -> None:
        self.group_size = group_size
        self._given = rollout.given
        self._get = get

    @property
    def position(self) -> dict[str, Any]:
        return {}  # slime saves its data source itself

    async def take(self, count: int, /) -> list[Sample]:
        """:raises ValueError: a group has another size than `group_size`."""
        prototypes = []
        for group in await awaited(self._get(count)):
            if len(group) != self.group_size:
                raise ValueError(f"the data source gave a group of {len(group)} samples, expected {self.group_size}")
            one = _first_of(group)
            number = one.group_index
            if not isinstance(number, int) or number < 0 or number in self._given:
                number = len(self._given)
                while number in self._given:
                    number += 1
            self._given[number] = group
            prototypes.append(Sample(group_index=number, prompt=one.prompt, label=one.label))
        return prototypes

    def rewind(self) -> None:
        """:raises RuntimeError: always."""
        raise RuntimeError("slime's data source begins again by itself: on_exhausted='wrap' is not for it")

    def restore(self, position: dict[str, Any], /) -> None:
        """:raises RuntimeError: always."""
        raise RuntimeError("slime restores its data source itself")


def by_index(sample: Any) -> float:
    """What samples are sorted by; one without an index comes last."""
    return math.inf if sample.index is None else sample.index


async def awaited(value: Any) -> Any:
    return await value if isawaitable(value) else value


@cache
def _takes_evaluation(path: str) -> bool:
    return "evaluation" in signature(load_object(path)).parameters


def _rm_hub(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] | None = of_slime("rollout.rm_hub", name)
    if function is None:
        raise ValueError("rm_type names a reward of slime, and slime is not importable here: give custom_rm_path")
    return function


def _write_back(group: Group, theirs: list[Any]) -> None:
    """What a function did to slime's samples of a group, in ours."""
    for execution, changed in zip(group.executions, theirs, strict=True):
        samples = changed if isinstance(changed, list) else [changed]
        execution[:] = [from_slime(one, like=ours) for one, ours in zip(samples, execution, strict=True)]


def _first_of(group: Any) -> Any:
    return _first_of(group[0]) if isinstance(group, list) else group
