"""What recording costs, beside encoding the same samples and writing them; and the log beside what slime keeps: one
`torch.save` of the samples' dicts per rollout.

Recording is measured from the observer's call to the closed file: groups of 8, an event per answer and two per group,
the samples with their columns. Its peer encodes the same events and samples, and writes them with nothing around: no
chunks, no index, no CRC, nothing for a crash. CPU seconds of the whole process, so the writer's thread counts.

How long the loop is kept waiting is measured in real time, with a ticker of 1 ms, while answers of 50 KB are recorded
in bursts. The lag of the same loop without the recorder stands beside it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any, TypeAlias

import anyio

from benchmarks.measure import Row, cpu_seconds, interleaved, ratio_row
from eventbus.columns import LogProbs, Tokens
from eventbus.events import (
    Event,
    GroupCompleted,
    GroupEnded,
    LightSample,
    RolloutFinished,
    RolloutStarted,
    SampleGenerated,
    light,
)
from eventbus.log import LogReader, LogWriter
from eventbus.sample import Sample, SampleStatus
from eventbus.wire import encode
from middleware.recorder import Recorder

__all__ = ["rows"]

Entry: TypeAlias = tuple[Event, list[list[Sample]] | None]

GROUP = 8
LIMIT = 0.010
ROLLOUTS = 200


def rows() -> list[Row]:
    folder = Path(tempfile.mkdtemp(prefix="rolloutbus-benchmark-"))
    try:
        return [*_recording(folder), _lag_row(folder), *_beside_torch(folder)]
    finally:
        shutil.rmtree(folder)


# A stream


def _sample(index: int, tokens: int) -> Sample:
    random = Random(index)
    return Sample(
        group_index=index // GROUP,
        index=index,
        rollout_id=index,
        prompt="2+2=",
        tokens=Tokens(random.randrange(150_000) for _ in range(tokens)),
        response="4" * 20,
        response_length=tokens,
        reward=float(index % 2),
        rollout_log_probs=LogProbs(-random.random() for _ in range(tokens)),
        status=SampleStatus.COMPLETED,
    )


def _stream(groups: int, tokens: int, rollout_id: int = 0, seq: int = 0) -> list[Entry]:
    """One rollout: the events that a recorder gets, with the samples."""
    head = {"rollout_id": rollout_id}
    entries: list[tuple[type[Any], dict[str, Any], list[list[Sample]] | None]] = [
        (RolloutStarted, {"target": groups, "group_size": GROUP}, None)
    ]
    light_forms: dict[int, LightSample] = {}
    kept = [_sample(index, tokens) for index in range(GROUP)]
    for group in range(groups):
        samples = []
        for number, sample in enumerate(kept):
            twin = sample.copy()
            twin.group_index, twin.index, twin.rollout_id = group, group * GROUP + number, group * GROUP + number
            shown = light_forms[number] = light(twin)
            fields: dict[str, Any] = {
                "group_index": group,
                "index": twin.index,
                "execution": twin.rollout_id,
                "stage": "Generate",
                "status": twin.status,
                "response_length": tokens,
                "seconds": 1.0,
                "samples": [[shown]],
            }
            entries.append((SampleGenerated, fields, [[twin]]))
            samples.append([twin])
        completed = {"group_index": group, "samples": [[light_forms[number]] for number in range(GROUP)]}
        entries.append((GroupCompleted, completed, samples))
        entries.append((GroupEnded, {"group_index": group, "outcome": "kept"}, None))
    entries.append((RolloutFinished, {}, None))
    return [
        (cls(seq=seq + place, time_ns=1_700_000_000_000_000_000 + 1000 * (seq + place), **head, **fields), samples)
        for place, (cls, fields, samples) in enumerate(entries)
    ]


# Recording


def _recording(folder: Path) -> Iterator[Row]:
    for size, groups in ((8, 200), (50, 60)):
        entries = _stream(groups, size * 1024 // 8)
        cases = {
            "own": partial(_per_sample, groups, partial(_record, folder / "own.mcap", entries, None)),
            "zstd": partial(_per_sample, groups, partial(_record, folder / "own.mcap", entries, "zstd")),
            "bare": partial(_per_sample, groups, partial(_write_bare, folder / "bare", entries)),
        }
        measured = interleaved(cases)
        yield ratio_row(f"recording, {size} KB / encode and write", measured["own"], measured["bare"], at_most=2)
        yield ratio_row(f"the same with zstd, {size} KB", measured["zstd"], measured["bare"])


def _per_sample(groups: int, call: Any) -> float:
    return cpu_seconds(call) / (groups * GROUP)


def _record(path: Path, entries: list[Entry], compression: Any = None) -> None:
    with LogWriter(path, overwrite=True, compression=compression) as log:
        for event, samples in entries:
            log.write(event, samples)


def _write_bare(path: Path, entries: list[Entry]) -> None:
    with path.open("wb") as file:
        for event, samples in entries:
            file.write(encode(event))
            if samples is not None and len(samples) == 1:  # a completed group has the columns that were written
                file.write(encode(samples[0][0]))


# The loop


def _lag_row(folder: Path) -> Row:
    entries = _stream(60, 50 * 1024 // 8)
    cases = {
        "recording": lambda: anyio.run(_lag, entries, Recorder(folder / "lag.mcap", overwrite=True)),
        "without": lambda: anyio.run(_lag, entries, None),
    }
    measured = interleaved(cases)
    worst = median(measured["recording"])
    idle = median(measured["without"])
    return Row(
        "loop kept waiting while recording, longest (absolute)",
        f"{worst * 1e3:.1f} ms",
        f"under {LIMIT * 1e3:.0f} ms",
        worst < LIMIT,
        f"worst run {max(measured['recording']) * 1e3:.1f} ms; without recorder {idle * 1e3:.1f} ms",
    )


async def _lag(entries: list[Entry], recorder: Recorder | None) -> float:
    """The longest lag of a ticker, in seconds."""
    lags: list[float] = []

    async def tick() -> None:
        while True:
            due = perf_counter() + 0.001
            await anyio.sleep(0.001)
            lags.append(perf_counter() - due)

    async def run() -> None:
        for place, (event, samples) in enumerate(entries):
            if recorder is None:
                pass
            elif samples is None:
                recorder.observe(event)
            else:
                recorder.observe_samples(event, samples)
            if place % 16 == 0:
                await anyio.sleep(0.001)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tick)
        if recorder is None:
            await run()
        else:
            async with recorder:
                await run()
        tasks.cancel_scope.cancel()
    return max(lags)


# Beside torch.save


def _beside_torch(folder: Path) -> Iterator[Row]:
    try:
        import torch
    except ImportError:
        yield Row("the log beside torch.save", "", measured="torch is not installed")
        return
    per_rollout, tokens = 32, 4096
    samples = per_rollout * GROUP
    entries = _stream(per_rollout, tokens)
    dicts = _dicts(entries)

    def save() -> None:
        torch.save({"rollout_id": 0, "samples": dicts}, folder / "rollout.pt")

    with LogWriter(folder / "own.mcap", overwrite=True) as log:

        def write() -> None:
            for event, shown in entries:
                log.write(event, shown)
            log.flush()

        cases = {
            "own": lambda: cpu_seconds(write) / samples,
            "torch": lambda: cpu_seconds(save) / samples,
        }
        measured = interleaved(cases)
    yield _faster("torch.save of slime's dicts / writing the log", measured["torch"], measured["own"], 40)

    path, wanted = folder / "many.mcap", 137
    with LogWriter(path) as log:
        seq = 0
        for rollout_id in range(ROLLOUTS):
            entries = _stream(2, tokens, rollout_id, seq)
            seq += len(entries)
            for event, shown in entries:
                log.write(event, shown)
    torch.save({"rollout_id": wanted, "samples": _dicts(entries)}, folder / "one.pt")

    def read() -> None:
        with LogReader(path) as reader:
            groups = list(reader.rollout(wanted).groups())
            assert sum(len(sample.tokens) for group in groups for sample in group.samples) == 2 * GROUP * tokens

    def load() -> None:
        assert len(torch.load(folder / "one.pt", weights_only=False)["samples"]) == 2 * GROUP

    read_cases = {
        "own": lambda: cpu_seconds(read) / (2 * GROUP),
        "torch": lambda: cpu_seconds(load) / (2 * GROUP),
    }
    measured = interleaved(read_cases)
    what = f"torch.load of one rollout's file / reading one rollout of {ROLLOUTS}"
    yield _faster(what, measured["torch"], measured["own"], 3)


def _dicts(entries: list[Entry]) -> list[dict[str, Any]]:
    """The samples as slime's `Sample.to_dict` gives them: plain lists of numbers."""
    found = []
    for event, samples in entries:
        if isinstance(event, SampleGenerated) and samples is not None:
            sample = samples[0][0]
            fields = {name: getattr(sample, name) for name in sample.__struct_fields__}
            fields |= {"tokens": sample.tokens.tolist(), "status": sample.status.value}
            fields["rollout_log_probs"] = (sample.rollout_log_probs or LogProbs()).tolist()
            found.append(fields)
    return found


def _faster(what: str, peer: list[float], own: list[float], at_least: float) -> Row:
    ratio = median(theirs / mine for theirs, mine in zip(peer, own, strict=True))
    measured = f"{median(peer) * 1e6:.0f} us against {median(own) * 1e6:.1f} us"
    return Row(what, f"{ratio:.3g}x", f"at least {at_least:g}x", ratio >= at_least, measured)
