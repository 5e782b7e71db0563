"""Reading: by rollout, group, sample, kind and time; lazily; while the file is being written."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import partial
from operator import methodcaller, ne
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from eventbus import LogReader, LogWriter, Tokens, decode, encode
from eventbus.events import (
    BatchTrained,
    Event,
    GroupCompleted,
    GroupEnded,
    GroupJudged,
    GroupSubmitted,
    RolloutStarted,
    SampleGenerated,
    digest,
    light,
)
from eventbus.group import Group, Verdict
from eventbus.log import LogError, RecordedSample, recover
from eventbus.log import container as container_module
from eventbus.log import writer as writer_module
from eventbus.log.file import LogFile
from eventbus.pipeline import Pipeline
from eventbus.sample import Sample
from eventbus.testing import virtual_time
from eventbus.wire import WireError
from middleware import Recorder
from tests.logs import Entry, small_pipeline, unclosed, witnessed, written
from tests.streams import some
from tests.test_log_file import FullDisk

ENTRIES: list[Entry] = anyio.run(witnessed, 4)
EVENTS = [event for event, _ in ENTRIES]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.mcap"
    written(path, ENTRIES, flush=lambda place: place % 10 == 0)
    return path


@pytest.fixture
def log(path: Path) -> Iterator[LogReader]:
    with LogReader(path) as log:
        yield log


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What is read of files: position and length, in order."""
    made: list[tuple[int, int]] = []
    read = LogFile.read

    def noted(self: LogFile, position: int, length: int) -> bytes:
        made.append((position, length))
        return read(self, position, length)

    monkeypatch.setattr(LogFile, "read", noted)
    return made


# Events


def test_by_kind(log: LogReader) -> None:
    assert list(log.events("group_judged")) == [event for event in EVENTS if isinstance(event, GroupJudged)]
    both = list(log.events(("batch_trained", "group_judged")))
    assert both == [event for event in EVENTS if isinstance(event, GroupJudged | BatchTrained)]


def test_a_kind_that_does_not_exist(log: LogReader) -> None:
    with pytest.raises(ValueError, match="no event kind 'group_juged'; there are attempt_ended, batch_assembled"):
        log.events("group_juged")


def test_by_rollout_and_kind(log: LogReader) -> None:
    wanted = [event for event in EVENTS if event.rollout_id == 2]
    assert list(log.events(rollout=2)) == wanted
    assert list(log.rollout(2).events()) == wanted
    assert list(log.events(rollout=2, kinds="batch_trained")) == [wanted[-1]]
    assert list(log.events(rollout=77)) == []


def test_by_group_execution_and_sample(log: LogReader) -> None:
    found = list(log.events(group=3))
    assert found == [event for event in EVENTS if getattr(event, "group_index", None) == 3]
    found = list(log.events(execution=6))
    assert {event.kind for event in found} == {"group_submitted", "stage_applied", "sample_generated"}
    assert found == list(log.events(index=6))
    assert next(event for event in found if isinstance(event, SampleGenerated)).index == 6


def test_by_time(log: LogReader) -> None:
    first, last = EVENTS[30].time_ns, EVENTS[60].time_ns
    wanted = [event for event in EVENTS if first <= event.time_ns <= last]
    assert list(log.events(since_ns=first, until_ns=last)) == wanted
    assert list(log.events(since_ns=last)) == [event for event in EVENTS if event.time_ns >= last]


def test_the_rounds(log: LogReader) -> None:
    assert [str(part) for part in log.rounds] == [f"rollout {number}" for number in range(4)]
    for part in log.rounds:
        own = [event for event in EVENTS if event.rollout_id == part.rollout_id]
        assert (part.first_seq, part.last_seq) == (own[0].seq, own[-1].seq)
        assert (part.first_ns, part.last_ns) == (own[0].time_ns, own[-1].time_ns)
        assert part.finished
        assert part.counts["sample_generated"] == 4
        assert sum(part.counts.values()) == len(own)


def test_a_rollout_that_is_not_there(log: LogReader) -> None:
    with pytest.raises(LogError, match="no rollout 9 in this log; the nearest is 3, there are 0 to 3"):
        log.rollout(9)
    with pytest.raises(LogError, match="no evaluation 2 in this log; it has none"):
        log.rollout(2, evaluation=True)


def test_training_and_evaluation_of_the_same_number(tmp_path: Path) -> None:
    mixed = [
        (msgspec.structs.replace(event, rollout_id=5, evaluation=event.rollout_id % 2 == 1), samples)
        for event, samples in ENTRIES[: len(ENTRIES) // 2]
    ]
    written(tmp_path / "run.mcap", mixed)
    with LogReader(tmp_path / "run.mcap") as log:
        for evaluation in (False, True):
            rollout = log.rollout(5, evaluation=evaluation)
            assert list(rollout.events()) == [event for event, _ in mixed if event.evaluation == evaluation]
            assert len(list(rollout.groups())) == 2
        assert list(log.events(rollout=5)) == [event for event, _ in mixed]
        assert list(log.events(evaluation=True)) == [event for event, _ in mixed if event.evaluation]
        assert str(log.rounds[1]) == "evaluation 5"


def test_one_rollout_is_found_without_reading_the_others(path: Path, reads: list[tuple[int, int]]) -> None:
    file = LogFile(path)
    own = [event.time_ns for event in EVENTS if event.rollout_id == 2]
    others = [chunk for chunk in file.chunks[1:] if chunk.end < own[0] or chunk.start > own[-1]]
    file.close()
    assert len(others) > 5
    with LogReader(path) as log:
        groups = list(log.rollout(2).groups())
        assert all(len(sample.tokens) == 5 for group in groups for sample in group.samples)
    assert not {chunk.position for chunk in others} & {position for position, _ in reads}


def test_groups_are_read_without_their_columns(path: Path, reads: list[tuple[int, int]]) -> None:
    file = LogFile(path)
    columns = {chunk.position for chunk in file.chunks if chunk.channels == {1}}
    file.close()
    with LogReader(path) as log:
        for group in log.rollout(1).groups():
            assert group.rewards() == [0.0, 1.0]
            assert [sample.response_length for sample in group.samples] == [5, 5]
            assert all(sample.metadata == {} for sample in group.samples)
        assert not columns & {position for position, _ in reads}
        assert len(group.samples[0].tokens) == 5
        assert columns & {position for position, _ in reads}


def test_an_unfinished_file_is_walked_over_without_its_chunks(path: Path, reads: list[tuple[int, int]]) -> None:
    file = LogFile(path)
    chunks = file.chunks[1:]
    file.close()
    path.write_bytes(unclosed(path))
    reads.clear()
    with LogReader(path) as log:
        assert len(list(log.rollout(1).groups())) == 2
    whole = {(chunk.position, chunk.length) for chunk in chunks}
    early = {chunk.position for chunk in chunks if chunk.end < log.rounds[1].first_ns}
    assert whole & set(reads)
    assert not {place for place in early if (place, dict(whole)[place]) in reads}


# Groups and samples


def test_the_groups_of_a_rollout(log: LogReader) -> None:
    for rollout_id in range(4):
        rollout = log.rollout(rollout_id)
        own = [(event, samples) for event, samples in ENTRIES if event.rollout_id == rollout_id]
        completed = [(event, samples) for event, samples in own if isinstance(event, GroupCompleted)]
        groups = list(rollout.groups())
        assert [group.index for group in groups] == [event.group_index for event, _ in completed]
        assert [group.executions for group in groups] == [samples for _, samples in completed]
        assert [group.prompt for group in groups] == [f"prompt {group.index}" for group in groups]
        verdicts = {event.group_index: event.verdict for event, _ in own if isinstance(event, GroupJudged)}
        assert [group.verdict for group in groups] == [verdicts[group.index] for group in groups]
        assert {group.outcome for group in groups} == {"kept"}
        assert rollout.summary is not None
        assert rollout.summary.kept == 2
        assert rollout.finished


def entries_of(*found: Any) -> list[Entry]:
    return [
        (cls(seq=seq, time_ns=seq, rollout_id=0, **fields), samples) for seq, (cls, fields, samples) in enumerate(found)
    ]


def completed(group: int, *samples: Sample, at: int = 0) -> tuple[Any, dict[str, Any], list[list[Sample]]]:
    return (
        GroupCompleted,
        {"group_index": group, "at": at, "samples": [[light(one)] for one in samples]},
        [[one] for one in samples],
    )


def test_without_a_filter_the_verdict_is_the_outcome(tmp_path: Path) -> None:
    sample = Sample(index=1, tokens=[1], response_length=1)  # type: ignore[arg-type]
    entries = entries_of(
        completed(0, sample),
        completed(1, sample),
        completed(2, sample),
        (GroupEnded, {"group_index": 1, "outcome": "dropped", "reason": "too long"}, []),
        (GroupEnded, {"group_index": 0, "outcome": "kept"}, []),
    )
    written(tmp_path / "run.mcap", entries)
    with LogReader(tmp_path / "run.mcap") as log:
        first, second, third = log.rollout(0).groups()
        assert (first.verdict, first.outcome) == (Verdict(True), "kept")
        assert (second.verdict, second.outcome, second.reason) == (Verdict(False, "too long"), "dropped", "too long")
        assert (third.verdict, third.outcome) == (Verdict(False), None)
        assert not log.rollout(0).finished
        assert log.rollout(0).summary is None


def test_the_last_verdict_and_the_last_completion_count(tmp_path: Path) -> None:
    old, new = (Sample(index=1, tokens=[number], response_length=1, reward=number) for number in (1, 2))  # type: ignore[arg-type]
    entries = entries_of(
        completed(0, old),
        (GroupJudged, {"group_index": 0, "stage": "f", "verdict": Verdict(True)}, []),
        completed(1, old),
        completed(0, new),
        (GroupJudged, {"group_index": 0, "stage": "f", "verdict": Verdict(False, "bad"), "held": True}, []),
        (GroupJudged, {"group_index": 0, "stage": "f", "verdict": Verdict(True, "bad", by_fallback=True)}, []),
    )
    written(tmp_path / "run.mcap", entries)
    with LogReader(tmp_path / "run.mcap") as log:
        other, group = log.rollout(0).groups()
        assert (other.index, group.index) == (1, 0)
        assert group.samples == [new]
        assert group.verdict == Verdict(True, "bad", by_fallback=True)


def test_the_prompt_is_that_of_the_source(tmp_path: Path) -> None:
    prototype, sample = Sample(prompt="asked"), Sample(prompt="changed by a stage", index=0)
    fields = {"group_index": 0, "round": 1, "origin": "new", "executions": [0], "indices": [0]}
    submitted = (GroupSubmitted, {**fields, "samples": [[light(prototype)]]}, [[prototype]])
    written(tmp_path / "run.mcap", entries_of(submitted, completed(0, sample), completed(1, sample)))
    with LogReader(tmp_path / "run.mcap") as log:
        assert [group.prompt for group in log.rollout(0).groups()] == ["asked", "changed by a stage"]


def recorded_pair(log: LogReader) -> tuple[Sample, Sample]:
    """A sample that was not loaded, and what was recorded."""
    event, samples = next((event, samples) for event, samples in ENTRIES if isinstance(event, SampleGenerated))
    (read,) = (one for one in log.events("sample_generated") if one.seq == event.seq)
    return log.samples(read)[0][0], samples[0][0]


@pytest.mark.parametrize(
    "use",
    [
        encode,
        copy.copy,
        repr,
        methodcaller("copy"),
        light,
        lambda sample: decode(encode(Group(0, "", [[sample]])), Group),
        lambda sample: digest([Group(0, "", [[sample]])]),
        lambda sample: sample.prompt_length,
        lambda sample: pickle.loads(pickle.dumps(sample)),
        lambda sample: [*sample.tokens, 1],
        lambda sample: sample.rollout_log_probs,
        lambda sample: sample.multimodal_inputs,
        lambda sample: sample.loss_tokens,
    ],
)
def test_a_lazy_sample_is_used_like_any_other(log: LogReader, use: Any) -> None:
    lazy, plain = recorded_pair(log)
    assert use(lazy) == use(plain)


def test_a_lazy_sample_equals_what_was_recorded(log: LogReader) -> None:
    for compare in (lambda a, b: a == b, lambda a, b: b == a, lambda a, b: not ne(a, b)):
        lazy, plain = recorded_pair(log)
        assert compare(lazy, plain)
    lazy, plain = recorded_pair(log)
    plain.tokens[0] += 1
    assert lazy != plain
    assert ne(lazy, "a sample")
    first, second = recorded_pair(log)[0], recorded_pair(log)[0]
    assert first == second


def test_what_a_stage_sets_is_not_overwritten_by_loading(log: LogReader) -> None:
    lazy, plain = recorded_pair(log)
    lazy.tokens = plain.tokens + Tokens([7])
    lazy.response_length += 1
    assert lazy.rollout_log_probs == plain.rollout_log_probs
    assert lazy.tokens == [*plain.tokens, 7]


def test_samples_that_share_a_stored_column_do_not_share_memory(log: LogReader) -> None:
    group = next(log.rollout(0).groups())
    generated = next(log.samples(event)[0][0] for event in log.events("sample_generated", index=group.samples[0].index))
    assert generated.tokens == group.samples[0].tokens
    group.samples[0].tokens[0] += 1
    assert generated.tokens != group.samples[0].tokens


def test_an_attribute_that_does_not_exist(log: LogReader) -> None:
    lazy, _ = recorded_pair(log)
    assert type(lazy) is RecordedSample
    with pytest.raises(AttributeError, match="no attribute 'tokenz'"):
        _ = lazy.tokenz


def test_an_event_without_samples(log: LogReader) -> None:
    assert [log.samples(event) for event in log.events(("batch_assembled", "group_ended"), rollout=0)] == [[]] * 3


# Following


def test_following_a_file_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "run.mcap"
    writer = LogWriter(path)
    read: list[Any] = []
    with LogReader(path) as log:
        followed = log.follow()
        for event, samples in ENTRIES[:50]:
            writer.write(event, samples or None)
            if event.seq % 5 == 4:
                writer.flush()
                read += [next(followed) for _ in range(5)]
        assert read == EVENTS[:50]
        sample = log.samples(next(event for event in read if isinstance(event, SampleGenerated)))[0][0]
        assert len(sample.tokens) == 5
        for event, samples in ENTRIES[50:]:
            writer.write(event, samples or None)
        thread = threading.Thread(target=writer.close)
        thread.start()
        read += list(followed)
        thread.join()
        assert read == EVENTS
        assert log.finished
        assert log.damage == []
        assert [part.rollout_id for part in log.rounds] == [0, 1, 2, 3]
        assert list(log.events()) == EVENTS


def test_following_a_finished_file(log: LogReader) -> None:
    assert list(log.follow("batch_trained")) == [event for event in EVENTS if isinstance(event, BatchTrained)]


def test_half_a_record_is_waited_for(path: Path) -> None:
    whole = path.read_bytes()
    growing = path.with_name("growing.mcap")
    middle = len(whole) // 2
    growing.write_bytes(whole[:middle])
    with LogReader(growing) as log:
        followed = log.follow()
        before = sum(sum(part.counts.values()) for part in log.rounds)
        read = [next(followed) for _ in range(before)]
        with growing.open("ab") as file:
            file.write(whole[middle:])
        assert read + list(followed) == EVENTS


def test_an_event_is_missing_between_two_looks(tmp_path: Path) -> None:
    path = tmp_path / "run.mcap"
    with LogWriter(path) as writer, LogReader(path) as log:
        followed = log.follow()
        for event, samples in ENTRIES[:20]:
            writer.write(event, samples or None)
        writer.flush()
        read = [next(followed) for _ in range(20)]
        for event, samples in ENTRIES[21:]:
            writer.write(event, samples or None)
        writer.close()
        assert read + list(followed) == EVENTS[:20] + EVENTS[21:]
        assert [(damage.first_seq, damage.last_seq) for damage in log.damage] == [(20, 20)]


# Events that could not be encoded

LAST = len(EVENTS) - 1
END_OF_ROUND = max(event.seq for event in EVENTS if event.rollout_id == 1)


@pytest.mark.parametrize("lost", [[0], [7, 8], [END_OF_ROUND], [LAST], [LAST - 1, LAST], [5, 7, LAST - 2, LAST]])
@pytest.mark.parametrize("recovered", [False, True])
def test_what_could_not_be_encoded_is_missing(
    tmp_path: Path, lost: list[int], recovered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(event: Event) -> bytes:
        if event.seq in lost:
            raise WireError(f"event {event.seq} cannot be encoded")
        return encode(event)

    path = tmp_path / "run.mcap"
    monkeypatch.setattr(writer_module, "encode", fails)
    with LogWriter(path) as writer:
        for event, samples in ENTRIES:
            with pytest.raises(WireError) if event.seq in lost else nullcontext():
                writer.write(event, samples or None)
    if recovered:
        recover(path, path := tmp_path / "recovered.mcap")
    seqs = [event.seq for event in EVENTS if event.seq not in lost]
    for read in (LogReader.events, LogReader.follow):
        with LogReader(path) as log:
            assert [event.seq for event in read(log)] == seqs
            assert missing(log) == lost
    for part in range(4):
        with LogReader(path) as log:
            list(log.rollout(part).events())
            found = missing(log)  # of others as well, where they lie in one chunk
            assert {seq for seq in lost if EVENTS[seq].rollout_id == part} <= set(found) <= set(lost)
            counted = sum(log.rounds[part].counts.values())
            assert counted == len([seq for seq in seqs if EVENTS[seq].rollout_id == part])


def missing(log: LogReader) -> list[int]:
    return [seq for damage in log.damage for seq in range(damage.first_seq or 0, (damage.last_seq or 0) + 1)]


# Recovering


def test_what_is_recovered_says_what_is_missing(path: Path, tmp_path: Path) -> None:
    file = LogFile(path)
    chunk = [chunk for chunk in file.chunks if chunk.channels and 1 not in chunk.channels][3]
    file.close()
    raw = bytearray(path.read_bytes())
    raw[chunk.position + chunk.length - 3] ^= 255
    path.write_bytes(raw)
    report = recover(path, tmp_path / "new.mcap")
    assert (report.events, report.rounds, report.unfinished) == (len(EVENTS) - 10, 4, 0)
    assert str(report) == f"{len(EVENTS) - 10} events of 4 rounds saved; 1 places could not be read"
    assert [(damage.first_seq, damage.last_seq) for damage in report.damage] == [(21, 30)]
    with LogReader(tmp_path / "new.mcap") as log:
        assert [event.seq for event in log.events()] == [*range(21), *range(31, len(EVENTS))]
        assert [(damage.first_seq, damage.last_seq) for damage in log.damage] == [(21, 30)]


def test_a_finished_log_is_recovered_as_it_is(path: Path, tmp_path: Path) -> None:
    assert str(recover(path, tmp_path / "new.mcap")) == f"{len(EVENTS)} events of 4 rounds saved"
    with LogReader(path) as old, LogReader(tmp_path / "new.mcap") as new:
        assert list(new.events()) == list(old.events())
        assert new.header == old.header
        assert new.rounds == old.rounds


def test_a_log_is_not_recovered_into_itself(path: Path, tmp_path: Path) -> None:
    before = path.read_bytes()
    os.link(path, tmp_path / "same.mcap")
    with pytest.raises(LogError, match="cannot be recovered into itself"):
        recover(path, tmp_path / "same.mcap", overwrite=True)
    (tmp_path / "other.mcap").write_text("precious")
    with pytest.raises(LogError, match="the file exists"):
        recover(path, tmp_path / "other.mcap")
    assert path.read_bytes() == before


def test_a_round_without_its_beginning(tmp_path: Path) -> None:
    """A log that was not made by a pipeline needs no rollout_started."""
    path = tmp_path / "run.mcap"
    written(path, [entry for entry in ENTRIES if not isinstance(entry[0], RolloutStarted)])
    path.write_bytes(path.read_bytes()[:-10])
    with LogReader(path) as log:
        assert [part.rollout_id for part in log.rounds] == [0, 1, 2, 3]
        assert len(list(log.rollout(3).groups())) == 2


# Numbers that come again


async def repeated(path: Path, overlapping: bool) -> None:
    pipeline = small_pipeline(Recorder(path, payload="kept"))
    async with pipeline:
        await batches_of(pipeline)
        await batches_of(pipeline)
        if overlapping:
            async with anyio.create_task_group() as tasks:
                for length in (1, 2):
                    tasks.start_soon(partial(pipeline.evaluate, some(length), rollout_id=0))
        else:
            for length in (1, 2):
                await pipeline.evaluate(some(length), rollout_id=0)


async def batches_of(pipeline: Pipeline) -> None:
    async for _ in pipeline.rollouts(stop=1):
        pass


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("closed", [True, False])
def test_rounds_of_one_number_are_told_apart(tmp_path: Path, closed: bool, backend: str) -> None:
    path = tmp_path / "run.mcap"
    clock: Any = virtual_time(backend)  # both evaluations happen at one moment
    anyio.run(repeated, path, False, **clock)
    if not closed:
        path.write_bytes(unclosed(path))
    with LogReader(path) as log:
        assert [str(part) for part in log.rounds] == ["rollout 0"] * 2 + ["evaluation 0"] * 2
        found = [log.rollout(part) for part in log.rounds]
        assert [sum(event.kind == "rollout_started" for event in each.events()) for each in found] == [1] * 4
        assert [len(list(each.groups())) for each in found[2:]] == [1, 2]
        assert all(each.finished for each in found)
        assert sum(len(list(each.events())) for each in found) == len(list(log.events()))
        assert len(list(log.rollout(0, evaluation=True).groups())) == 2  # the last of them
        assert len(list(log.events("rollout_started", rollout=0))) == 4
        assert log.damage == []


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_evaluations_of_one_number_that_overlap_are_one(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "run.mcap"
    anyio.run(repeated, path, True, backend=backend)
    with LogReader(path) as log:
        last = log.rounds[-1]
        assert (last.evaluation, last.finished, last.counts["rollout_finished"]) == (True, True, 2)
        assert len(log.rounds) == 3
        kept = [group for group in log.rollout(last).groups() if group.outcome == "kept"]
        assert all(len(sample.tokens) >= 5 for group in kept for sample in group.samples)
        assert log.damage == []


def test_the_notes_behind_a_chunk_may_be_cut_off(path: Path) -> None:
    """One chunk may end a round and begin the next; of the notes behind it any number may be there."""
    entries = anyio.run(witnessed)
    written(path, entries, flush=lambda place: place == 5)
    whole = unclosed(path)
    file = LogFile(path)
    notes = [position for position, name, _ in file.metadata if name == "rollout"]
    file.close()
    for position in notes:
        path.write_bytes(whole[: position + 4])
        with LogReader(path) as log:
            count = len(list(log.events()))
            assert sum(sum(part.counts.values()) for part in log.rounds) == count


# Files that go away


@pytest.mark.parametrize("how", ["removed", "cut off"])
def test_following_a_file_that_goes_away(tmp_path: Path, how: str) -> None:
    path = tmp_path / "run.mcap"
    entries = anyio.run(witnessed)
    with suppress(LogError), LogWriter(path) as writer:
        for event, samples in entries[:10]:
            writer.write(event, samples or None)
        writer.flush()
        with LogReader(path) as log:
            events = log.follow()
            for event, _ in entries[:10]:
                assert next(events) == event
            if how == "removed":
                path.unlink()
            else:
                os.truncate(path, 100)
            with pytest.raises(LogError, match=f"the file was {how}"):
                next(events)


def test_a_recovery_that_fails_leaves_nothing(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target.mcap"
    monkeypatch.setattr(container_module, "os", FullDisk(30_000))
    with pytest.raises(LogError, match="No space left"):
        recover(path, target)
    assert not target.exists()
