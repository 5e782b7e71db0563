# mypy: ignore-errors
"""A file as slime's users have it: hooks, a reward, filters and generate functions, written against slime alone."""

import asyncio
import copy

from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample

SEEN = []
"""What the hooks were called with, in order."""


def tag(args, sample, *, rollout_id=None):
    sample.metadata["tag"] = (args.marker, rollout_id)


async def judge(args, sample, *, evaluation=False):
    await asyncio.sleep(0)
    sample.seen_in_evaluation = evaluation  # not a field of Sample
    return sample


def replace(args, sample, **kwargs):
    SEEN.append(kwargs)
    other = copy.copy(sample)
    other.train_metadata = {"keywords": sorted(kwargs)}
    return other


def by_position(args, sample, /):
    sample.metadata["by_position"] = True


def optional_by_position(args, sample, rollout_id=None, /):
    sample.metadata["optional"] = rollout_id


def named_otherwise(a, s, rollout_id, evaluation=None):
    s.metadata["named"] = (rollout_id, evaluation)


class Counting:
    calls = 0

    def __call__(self, args, sample, **kwargs):
        self.calls += 1
        assert isinstance(sample, Sample)
        assert sample.status is not Sample.Status.ABORTED


counting = Counting()


def wrong(args, sample):
    return {"sample": sample}


def failing(args, sample):
    if sample.index == args.fails_at:
        raise OSError("the judge is gone")


async def reward(args, sample):
    if isinstance(sample, list):
        return [float(len(one.response)) for one in sample]
    return args.rewards[sample.index] if sample.index < len(args.rewards) else float(sample.index % 2)


def odd_groups_differ(args, samples, **kwargs):
    return DynamicFilterOutput(keep=samples[0].group_index % 2 == 1, reason="even")


def first_group_only(args, samples, **kwargs):
    samples[0].remove_sample = True
    return samples[0].group_index == 0


async def generate_turns(args, sample, sampling_params):
    """One execution that becomes two training samples, as an agent's does."""
    turns = []
    for turn in range(2):
        one = copy.deepcopy(sample)
        one.tokens, one.response, one.response_length = [7, turn], "x" * (turn + 1), 1
        one.status = Sample.Status.COMPLETED
        turns.append(one)
    return turns


async def generate_sometimes(args, sample, sampling_params):
    """Only some executions become several."""
    turns = await generate_turns(args, sample, sampling_params)
    return turns if sample.index % 3 == 0 else turns[0]


async def generate_once(args, sample, sampling_params, evaluation=False):
    sample.tokens, sample.response, sample.response_length = [1, 2], "eval" if evaluation else "train", 1
    sample.status = Sample.Status.COMPLETED
    sample.metadata["sampling"] = sampling_params
    return sample


PROCESSED = []
GIVE = []


def process_all(args, samples, data_source):
    PROCESSED.append([group[0].index for group in samples])
    GIVE.append(data_source)


def drop_first(args, samples):
    samples[0][0].remove_sample = True
