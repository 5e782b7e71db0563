"""A what-if over recorded groups: a new filter on rewards, lengths or metadata, beside reading those events alone.

The log is as a run leaves it: 20 rollouts of 500 groups of 8 samples with 4,096 tokens and log-probs each (2.6 GB),
with the events of two sample stages and a filter. No token column is read. Writing it takes most of the time, so it
runs with `--long` only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measure import Row, cpu_seconds
from eventbus.batching import BatchSpec
from eventbus.columns import LogProbs, Tokens
from eventbus.events import (
    GroupCompleted,
    GroupEnded,
    GroupJudged,
    GroupSubmitted,
    RolloutFinished,
    RolloutStarted,
    SampleGenerated,
    StageApplied,
    light,
)
from eventbus.group import Group, Summary, Verdict
from eventbus.log import LogReader, LogWriter
from eventbus.replay import Replay
from eventbus.sample import Completion, Sample, SampleStatus
from middleware.filter import DynamicFilter, FilterDecision
from middleware.generate import Generate

__all__ = ["rows"]

ROLLOUTS, GROUPS, SIZE, LENGTH, PROMPT = 20, 500, 8, 4096, 256
LIMIT = 3.0
_KINDS = ("group_submitted", "group_completed", "group_judged", "group_ended")


def rows() -> list[Row]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.mcap"
        _write(path)
        size = path.stat().st_size
        reading = cpu_seconds(lambda: sum(1 for _ in LogReader(path).events(_KINDS)))
        asking = cpu_seconds(lambda: _what_if(path))
        verifying = cpu_seconds(lambda: Replay(LogReader(path), _stages()).verify([0]))
    groups = ROLLOUTS * GROUPS
    return [
        Row(
            f"what-if over {groups:,} groups of {SIZE} / reading their light events",
            f"{asking / reading:.3g}x",
            f"{LIMIT:g} s (absolute)",
            asking <= LIMIT,
            f"{asking:.2f} CPU s against {reading:.2f} s; {size / 2**30:.2f} GiB",
        ),
        Row(
            "verify, per sample",
            f"{verifying / (GROUPS * SIZE) * 1e6:.0f} us",
            measured=f"{verifying:.2f} s for {GROUPS * SIZE:,} samples of {LENGTH} tokens",
        ),
    ]


def _what_if(path: Path) -> None:
    report = Replay(LogReader(path), _stages()).what_if({"DynamicFilter": DynamicFilter(_stricter)})
    assert len(report.missing) == ROLLOUTS, str(report)


def _stricter(group: Group) -> FilterDecision:
    mean = sum(group.rewards()) / len(group)
    longest = max(sample.response_length for sample in group.samples)
    return FilterDecision(mean > 0.2 and longest > 8 and "source" in group.samples[0].metadata, f"mean_{mean:.1f}")


class _Engine:
    async def generate(self, sample: Sample, sampling: Any) -> Completion:
        raise NotImplementedError


def _score(sample: Sample) -> None:
    sample.reward = _reward(sample.index or 0)


def _stages() -> list[Any]:
    return [Generate(_Engine()), _score, DynamicFilter(lambda group: True)]


def _reward(index: int) -> float:
    return float(index * 7919 % 100 < index // SIZE % 10 * 5)


class _Log:
    """Writes events, numbered."""

    def __init__(self, path: Path) -> None:
        self._writer = LogWriter(path)
        self._seq = itertools.count()

    def add(self, kind: type[Any], rollout: int, shown: Sequence[Sequence[Sample]] = (), **fields: Any) -> None:
        seq = next(self._seq)
        if shown:
            fields["samples"] = [[light(sample) for sample in row] for row in shown]
        event = kind(seq=seq, time_ns=1_700_000_000_000_000_000 + seq * 1000, rollout_id=rollout, **fields)
        self._writer.write(event, shown or None)

    def close(self) -> None:
        self._writer.close()


def _write(path: Path) -> None:
    """The log of a run."""
    log = _Log(path)
    tokens, log_probs = Tokens(range(LENGTH)), LogProbs([-0.5] * (LENGTH - PROMPT))
    spec = {name: getattr(BatchSpec(GROUPS), name) for name in BatchSpec.__struct_fields__}
    for rollout in range(ROLLOUTS):
        log.add(RolloutStarted, rollout, target=GROUPS, group_size=SIZE, batch=spec)
        for index in range(rollout * GROUPS, (rollout + 1) * GROUPS):
            prompt = Sample(prompt=f"prompt {index}", group_index=index, metadata={"source": "benchmark"})
            numbers = list(range(index * SIZE, (index + 1) * SIZE))
            submitted: dict[str, Any] = {"round": 1, "origin": "new", "executions": numbers, "indices": numbers}
            log.add(GroupSubmitted, rollout, [[prompt]], group_index=index, **submitted)
            group: list[list[Sample]] = []
            for number in numbers:
                sample = prompt.copy()
                sample.index = sample.rollout_id = number
                sample.tokens, sample.rollout_log_probs = tokens, log_probs
                sample.response, sample.response_length = "an answer", LENGTH - PROMPT
                sample.status = SampleStatus.COMPLETED
                at: dict[str, Any] = {"group_index": index, "index": number, "execution": number, "stage": "Generate"}
                changed = {"response": "an answer", "response_length": LENGTH - PROMPT, "status": "completed"}
                answer = {"status": sample.status, "response_length": LENGTH - PROMPT, "seconds": 1.0}
                log.add(StageApplied, rollout, **at, seconds=1.0, changed=changed, columns=light(sample).columns)
                log.add(SampleGenerated, rollout, [[sample]], **at, **answer)
                sample.reward = _reward(number)
                log.add(
                    StageApplied, rollout, **{**at, "stage": "_score"}, seconds=0.0, changed={"reward": sample.reward}
                )
                group.append([sample])
            log.add(GroupCompleted, rollout, group, group_index=index)
            log.add(StageApplied, rollout, group_index=index, stage="DynamicFilter", seconds=0.0)
            verdict = Verdict(True, remaining=GROUPS, target=GROUPS)
            log.add(GroupJudged, rollout, group_index=index, stage="DynamicFilter", verdict=verdict)
            log.add(GroupEnded, rollout, group_index=index, outcome="kept")
        log.add(RolloutFinished, rollout, summary=Summary(rollout, rounds=1))
    log.close()


if __name__ == "__main__":
    for row in rows():
        print(*row, sep=" | ")
