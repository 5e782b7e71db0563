"""The file: what was written comes back, whatever was cut off or flipped."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcap.reader import make_reader
from mcap.writer import CompressionType, IndexType, Writer

from eventbus.events import Event, GroupEnded, RolloutFinished, RolloutStarted, SampleGenerated, UnknownEvent, light
from eventbus.log import LogError, LogReader, LogWriter, recover
from eventbus.log import container as container_module
from eventbus.log.container import Chunk, Container
from eventbus.log.file import LogFile, messages
from eventbus.log.format import StageNote, channels, described
from eventbus.sample import Sample, SampleStatus
from eventbus.wire import SCHEMA_VERSION, WireError, decode, encode
from tests.logs import Entry, content, unclosed, witnessed, written
from tests.test_wire import events as any_event
from tests.test_wire import samples as any_sample

ENTRIES: list[Entry] = anyio.run(witnessed)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.mcap"


def numbered(found: list[Event], first: int = 0) -> list[Event]:
    return [msgspec.structs.replace(event, seq=first + place) for place, event in enumerate(found)]


def comes_back(event: Event) -> bool:
    """Not of an unknown kind, nor with what its type does not allow."""
    try:
        return not isinstance(decode(encode(event)), UnknownEvent)
    except WireError:
        return False


def generated(seq: int, sample: Sample, group: int = 0) -> SampleGenerated:
    return SampleGenerated(
        seq=seq,
        time_ns=seq,
        rollout_id=0,
        group_index=group,
        index=sample.index or 0,
        execution=sample.rollout_id or 0,
        stage="Generate",
        status=SampleStatus.COMPLETED,
        response_length=sample.response_length,
        seconds=1.0,
        samples=[[light(sample)]],
    )


# Round trips


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_what_was_written_comes_back(path: Path, compression: Any) -> None:
    written(path, ENTRIES, compression=compression)
    with LogReader(path) as log:
        assert content(log) == ENTRIES
        assert log.finished
        assert log.damage == []


@settings(max_examples=30)
@given(found=st.lists(any_event.filter(comes_back), max_size=12), data=st.data())
def test_any_stream_of_events_comes_back(
    tmp_path_factory: pytest.TempPathFactory, found: list[Event], data: Any
) -> None:
    path = tmp_path_factory.mktemp("log") / "run.mcap"
    first = data.draw(st.integers(0, 2**33))
    stream = numbered(found, first)
    written(path, [(event, []) for event in stream], compression=data.draw(st.sampled_from([None, "zstd"])))
    with LogReader(path) as log:
        assert [encode(event) for event in log.events()] == [encode(event) for event in stream]
        assert log.damage == []
        keys = {(event.rollout_id, event.evaluation) for event in stream}
        assert {(part.rollout_id, part.evaluation) for part in log.rounds} == keys  # a number may come again
        found_again = [event.seq for part in log.rounds for event in log.rollout(part).events()]
        assert sorted(found_again) == [event.seq for event in stream]


@settings(max_examples=30)
@given(found=st.lists(any_sample, max_size=6), same=st.booleans())
def test_any_samples_come_back(tmp_path_factory: pytest.TempPathFactory, found: list[Sample], same: bool) -> None:
    path = tmp_path_factory.mktemp("log") / "run.mcap"
    if same:  # the columns of one sample, which an earlier event holds already
        found = [sample for sample in found for _ in range(2)]
    entries: list[Entry] = [(generated(seq, sample), [[sample]]) for seq, sample in enumerate(found)]
    written(path, entries)
    with LogReader(path) as log:
        read = [log.samples(event)[0][0] for event in log.events()]
        # as bytes: nan is no nan, and a tuple is a list
        assert [encode(sample) for sample in read] == [encode(decode(encode(sample), Sample)) for sample in found]


def test_a_column_that_did_not_change_is_stored_once(path: Path) -> None:
    sample = Sample(index=1, rollout_id=1, tokens=range(100_000), response_length=5)  # type: ignore[arg-type]
    written(path, [(generated(seq, sample), [[sample]]) for seq in range(5)])
    assert path.stat().st_size < 500_000 + 50_000
    sample.tokens[7] += 1
    written(path, [(generated(0, sample), [[sample]])], flush=lambda place: True)
    with LogReader(path) as log:
        assert log.samples(next(log.events()))[0][0].tokens == sample.tokens


def test_pictures_that_executions_share_are_stored_once(path: Path) -> None:
    picture = {"image": b"x" * 100_000}
    samples = [Sample(index=index, rollout_id=index, multimodal_inputs=picture) for index in range(8)]
    written(path, [(generated(seq, sample), [[sample]]) for seq, sample in enumerate(samples)])
    assert path.stat().st_size < 160_000
    with LogReader(path) as log:
        read = [log.samples(event)[0][0] for event in log.events()]
    with LogReader(path) as log:
        read = [log.samples(event)[0][0] for event in log.events()]
        assert all(sample.multimodal_inputs == picture for sample in read)
        assert read[0].multimodal_inputs is not read[1].multimodal_inputs


def test_a_sample_larger_than_a_chunk(path: Path) -> None:
    sample = Sample(index=1, tokens=range(2_000_000), response_length=9)  # type: ignore[arg-type]
    small = Sample(index=2, tokens=range(3), response_length=1)  # type: ignore[arg-type]
    written(
        path, [(generated(0, small), [[small]]), (generated(1, sample), [[sample]]), (generated(2, small), [[small]])]
    )
    with LogReader(path) as log:
        read = [log.samples(event)[0][0].tokens for event in log.events()]
        assert read == [small.tokens, sample.tokens, small.tokens]


def test_columns_are_those_of_the_moment(path: Path) -> None:
    sample = Sample(index=1, tokens=[1, 2], response_length=1)  # type: ignore[arg-type]
    with LogWriter(path) as log:
        log.write(generated(0, sample), [[sample]])
        sample.tokens += [3]
        log.write(generated(1, sample), [[sample]])
        sample.tokens[0] = 9
    with LogReader(path) as read:
        assert [read.samples(event)[0][0].tokens for event in read.events()] == [[1, 2], [1, 2, 3]]


def test_a_sequence_number_beyond_32_bits(path: Path) -> None:
    entries: list[Entry] = [
        (RolloutStarted(seq=2**32 - 2 + place, time_ns=place, rollout_id=0, target=1, group_size=1), [])
        for place in range(5)
    ]
    written(path, entries)
    with LogReader(path) as log:
        assert [event.seq for event in log.events()] == [event.seq for event, _ in entries]
        assert log.damage == []


def test_a_clock_that_is_set_back(path: Path) -> None:
    times = [1000, 2000, 500, 600, 3000]
    entries: list[Entry] = [
        (RolloutStarted(seq=seq, time_ns=time_ns, rollout_id=7, target=1, group_size=1), [])
        for seq, time_ns in enumerate(times)
    ]
    written(path, entries, flush=lambda place: True)
    with LogReader(path) as log:
        assert [event.time_ns for event in log.rollout(7).events()] == times
        assert (log.rounds[0].first_ns, log.rounds[0].last_ns) == (500, 3000)


# Other tools


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_mcaps_own_reader_reads_it(path: Path, compression: Any) -> None:
    written(path, ENTRIES, flush=lambda place: place % 20 == 0, compression=compression)
    with path.open("rb") as file:
        reader = make_reader(file, validate_crcs=True)
        read = [(channel.topic, message) for _, channel, message in reader.iter_messages(log_time_order=False)]
        header, summary = reader.get_header(), reader.get_summary()
        names = [record.name for record in reader.iter_metadata()]
    kinds = [(topic, decode(message.data)) for topic, message in read if topic != "/columns"]
    assert [event for _, event in kinds] == [event for event, _ in ENTRIES]
    assert all(topic == f"/{event.kind}" for topic, event in kinds)
    assert header.profile == "rolloutbus"
    assert summary is not None
    assert summary.statistics is not None
    assert summary.statistics.message_count == len(read)
    assert names == ["rolloutbus", "rollout", "rollout", "rollout", "rollout", "rollout", "rollout", "rounds"]
    by_topic = {channel.topic: channel for channel in summary.channels.values()}
    schema = json.loads(summary.schemas[by_topic["/group_judged"].schema_id].data)
    assert "verdict" in schema["$defs"]["GroupJudged"]["properties"]


def test_mcaps_own_reader_reads_what_was_recovered(path: Path) -> None:
    written(path, ENTRIES, flush=lambda place: place % 20 == 0)
    cut = path.with_name("cut.mcap")
    cut.write_bytes(path.read_bytes()[: light_ends(path)[3][0]])
    recover(cut, path, overwrite=True)
    with path.open("rb") as file:
        found = [
            message for *_, message in make_reader(file, validate_crcs=True).iter_messages(topics="/group_completed")
        ]
    assert [decode(message.data) for message in found] == [
        event for event, _ in ENTRIES[:41] if event.kind == "group_completed"
    ]


def test_columns_lie_in_chunks_of_their_own_before_their_events(path: Path) -> None:
    written(path, ENTRIES, flush=lambda place: place % 7 == 0)
    file = LogFile(path)
    there: set[int] = set()
    for chunk in file.chunks[1:]:
        assert chunk.channels == {1} or 1 not in chunk.channels
        for channel, sequence, *_ in messages(file.content(chunk)):
            if channel == 1:
                there.add(sequence)
            elif ENTRIES[sequence][1]:
                assert sequence in there
    file.close()


# Cut off


def light_ends(path: Path) -> list[tuple[int, int]]:
    """Where each chunk of events ends, and how many events the file has up to there."""
    file = LogFile(path)
    ends, count = [(0, 0)], 0
    for chunk in file.chunks:
        if chunk.channels and 1 not in chunk.channels:
            count += sum(1 for _ in messages(file.content(chunk)))
            ends.append((chunk.position + chunk.length, count))
    file.close()
    return ends


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, list[tuple[int, int]]]:
    """A log that was flushed now and then: where to write a cut one, its bytes, its chunks of events."""
    path = tmp_path_factory.mktemp("pieces") / "run.mcap"
    written(path, ENTRIES, flush=lambda place: place % 11 == 0)
    return path.with_name("cut.mcap"), path.read_bytes(), light_ends(path)


@settings(max_examples=150)
@given(data=st.data())
def test_a_file_cut_off_anywhere_has_what_was_flushed(
    pieces: tuple[Path, bytes, list[tuple[int, int]]], data: Any
) -> None:
    path, whole, ends = pieces
    length = data.draw(st.integers(9, len(whole) - 1))
    path.write_bytes(whole[:length])
    count = max(events for end, events in ends if end <= length)
    with LogReader(path) as log:
        assert content(log) == ENTRIES[:count]
        assert not log.finished or log.damage
        assert sum(sum(part.counts.values()) for part in log.rounds) == count
        for part in log.rounds:
            assert len(list(log.rollout(part.rollout_id).events())) == sum(part.counts.values())
    target = path.with_name("recovered.mcap")
    report = recover(path, target, overwrite=True)
    assert report.events == count
    with LogReader(target) as log:
        assert log.finished
        assert content(log) == ENTRIES[:count]
        assert log.damage == []


@pytest.mark.parametrize("length", range(9))
def test_a_file_that_hardly_began(path: Path, length: int) -> None:
    written(path, [])
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(LogError, match="is empty"):
        LogReader(path)


def test_every_flush_is_in_the_file_when_it_returns(path: Path) -> None:
    with LogWriter(path) as log:
        for place, (event, samples) in enumerate(ENTRIES[:40]):
            log.write(event, samples or None)
            log.flush()
            with LogReader(path) as read:
                assert len(list(read.events())) == place + 1


# Flipped


@settings(max_examples=250)
@given(data=st.data())
def test_a_flipped_byte_is_harmless_or_reported(pieces: tuple[Path, bytes, list[tuple[int, int]]], data: Any) -> None:
    path, whole, _ = pieces
    raw = whole if data.draw(st.booleans()) else unclosed(path.with_name("run.mcap"))
    place = data.draw(st.integers(0, len(raw) - 1))
    flipped = raw[place] ^ data.draw(st.integers(1, 255))
    path.write_bytes(raw[:place] + bytes([flipped]) + raw[place + 1 :])
    with LogReader(path) as log:
        read = list(log.events())
        try:
            whole_content = content(log)
        except LogError:
            assert log.damage
            whole_content = []
        if whole_content != ENTRIES:
            assert log.damage
        missing = len(ENTRIES) - len(read)
        named = {
            seq
            for damage in log.damage
            if damage.first_seq is not None and damage.last_seq is not None
            for seq in range(damage.first_seq, damage.last_seq + 1)
        }
        seen = {event.seq for event in read}
        assert all(str(damage) for damage in log.damage)
        assert missing == 0 or log.damage
        assert not named & seen
        assert read == [event for event, _ in ENTRIES if event.seq in seen]
        for part in log.rounds:
            list(log.rollout(part.rollout_id, evaluation=part.evaluation).groups())


def test_the_missing_events_of_a_damaged_chunk_are_named(path: Path) -> None:
    written(path, ENTRIES, flush=lambda place: place % 20 == 19)
    file = LogFile(path)
    chunk = [chunk for chunk in file.chunks if chunk.channels and 1 not in chunk.channels][1]
    file.close()
    raw = bytearray(path.read_bytes())
    raw[chunk.position + chunk.length // 2] ^= 1
    path.write_bytes(raw)
    with LogReader(path) as log:
        assert [event.seq for event in log.events()] == [*range(20), *range(40, len(ENTRIES))]
        (damage,) = log.damage
        assert (damage.first_seq, damage.last_seq) == (20, 39)
        assert (damage.position, damage.length) == (chunk.position, chunk.length)
        assert f"byte {chunk.position} to" in str(damage)
        assert "events 20 to 39" in str(damage)


def test_events_that_were_never_written_are_a_gap(path: Path) -> None:
    written(path, [entry for entry in ENTRIES if entry[0].seq not in (5, 6)])
    with LogReader(path) as log:
        list(log.events())
        assert [(damage.first_seq, damage.last_seq) for damage in log.damage] == [(5, 6)]


def test_a_damaged_column_chunk_is_an_error_where_it_is_touched(path: Path) -> None:
    written(path, ENTRIES)
    file = LogFile(path)
    chunk = next(chunk for chunk in file.chunks if chunk.channels == {1})
    file.close()
    raw = bytearray(path.read_bytes())
    raw[chunk.position + chunk.length - 1] ^= 1
    path.write_bytes(raw)
    with LogReader(path) as log:
        group = next(log.rollout(0).groups())
        assert group.rewards() == [0.0, 1.0]
        assert log.damage == []
        with pytest.raises(LogError, match=rf"the columns of event \d+ are damaged: byte {chunk.position}"):
            _ = group.samples[0].tokens
        assert len(log.damage) == 1


# Other versions


def raw_log(path: Path, found: list[tuple[int, bytes]], described_as: Any = None) -> None:
    """A log with these messages: channel and data."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    file = Container(descriptor, "rolloutbus 9.9", described_as)
    file.describe()
    chunk = Chunk()
    for seq, (channel, data) in enumerate(found):
        chunk.add(channel, seq, seq, data)
    file.append(chunk)
    file.finish()
    os.close(descriptor)


def test_a_kind_that_a_newer_writer_knows(path: Path) -> None:
    from mcap.records import Channel

    from eventbus.log.format import packed

    newer = {opcode: list(records) for opcode, records in described().items()}
    number = max(channels().values()) + 1
    channel = Channel(id=number, schema_id=1, topic="/gpu_caught_fire", message_encoding="msgpack", metadata={})
    newer[4].append(packed(channel))
    event = {"kind": "gpu_caught_fire", "seq": 0, "time_ns": 5, "rollout_id": 1, "degrees": 900}
    raw_log(path, [(number, encode_as(SCHEMA_VERSION + 1, event))], newer)
    with LogReader(path) as log:
        assert list(log.events()) == [UnknownEvent(seq=0, time_ns=5, rollout_id=1, kind="gpu_caught_fire")]
        assert list(log.events("gpu_caught_fire")) == list(log.events())
        assert list(log.events("group_judged")) == []
        with pytest.raises(ValueError, match="no event kind 'gpu_melted'"):
            log.events("gpu_melted")


def encode_as(version: int, value: Any) -> bytes:
    return msgspec.msgpack.encode((version, value))


def test_a_field_that_a_newer_writer_knows(path: Path) -> None:
    event = {"kind": "weights_updated", "seq": 0, "time_ns": 0, "rollout_id": 1, "version": "7", "color": "red"}
    raw_log(path, [(channels()["/weights_updated"], encode_as(SCHEMA_VERSION + 1, event))])
    with LogReader(path) as log:
        (read,) = log.events()
        assert read.version == "7"  # type: ignore[union-attr]


def test_an_event_that_this_version_cannot_decode_is_reported(path: Path) -> None:
    good = encode_as(1, {"kind": "weights_updated", "seq": 0, "time_ns": 0, "rollout_id": 1, "version": "7"})
    bad = encode_as(9, {"kind": "weights_updated", "seq": 1, "time_ns": 0, "rollout_id": 1, "version": {"major": 8}})
    number = channels()["/weights_updated"]
    raw_log(path, [(number, good), (number, bad)])
    with LogReader(path) as log:
        assert len(list(log.events())) == 1
        damage = next(damage for damage in log.damage if "cannot be decoded" in damage.reason)
        assert (damage.first_seq, damage.last_seq) == (1, 1)
        assert "upgrade rolloutbus" in str(damage)


def test_events_that_cannot_be_decoded_are_told_from_those_between_them(path: Path) -> None:
    number = channels()["/weights_updated"]
    event = {"kind": "weights_updated", "time_ns": 0, "rollout_id": 1}
    versions = [{"major": 8} if seq in (1, 3, 4) else "7" for seq in range(6)]
    messages = [
        (number, encode_as(1, {**event, "seq": seq, "version": version})) for seq, version in enumerate(versions)
    ]
    raw_log(path, messages)
    with LogReader(path) as log:
        for _ in range(2):  # read again, it is the same damage
            assert [event.seq for event in log.events()] == [0, 2, 5]
            assert [(damage.first_seq, damage.last_seq) for damage in log.damage if damage.first_seq] == [
                (1, 1),
                (3, 4),
            ]


# What cannot be opened or written


def test_a_file_that_is_not_there(path: Path) -> None:
    with pytest.raises(LogError, match=r"run\.mcap: the log cannot be opened: No such file"):
        LogReader(path)


def test_a_file_that_is_something_else(path: Path) -> None:
    path.write_text("a letter home\n" * 100)
    with pytest.raises(LogError, match="this is no log"):
        LogReader(path)


def test_an_mcap_file_of_somebody_else(path: Path) -> None:
    from mcap.writer import Writer

    with path.open("wb") as file:
        writer = Writer(file)
        writer.start("ros2", "robots")
        writer.finish()  # type: ignore[no-untyped-call]
    with pytest.raises(LogError, match="no log of rolloutbus"):
        LogReader(path)


def test_a_closed_reader(path: Path) -> None:
    written(path, ENTRIES)
    with LogReader(path) as log:
        sample = next(log.rollout(0).groups()).samples[0]
    with pytest.raises(LogError, match="the log is closed"):
        list(log.events())
    with pytest.raises(LogError, match="the log is closed"):
        _ = sample.tokens


def test_an_existing_file_is_not_overwritten(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(LogError, match=r"run\.mcap: the file exists; choose another path, or say overwrite"):
        LogWriter(path)
    assert path.read_text() == "precious"
    written(path, ENTRIES)  # with overwrite=True
    with LogReader(path) as log:
        assert log.finished


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="the log cannot be created: No such file or directory"):
        LogWriter(tmp_path / "no" / "run.mcap")


@pytest.mark.parametrize("options", [{"payload": "some"}, {"compression": "lz5"}])
def test_an_option_that_does_not_exist(path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="choose"):
        LogWriter(path, **options)
    assert not path.exists()


class FullDisk:
    """`os`, where the file takes so many bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def writev(self, descriptor: int, parts: list[memoryview]) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = os.write(descriptor, b"".join(parts)[: self.room])
        self.room -= count
        return count


@pytest.mark.parametrize("room", [30_000, 33_000, 40_001])
def test_a_full_disk_loses_nothing_that_was_written(path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    monkeypatch.setattr(container_module, "os", FullDisk(room))
    log = LogWriter(path)
    done = 0
    with pytest.raises(LogError, match=r"run\.mcap: the log cannot be written: No space left on device"):
        for event, samples in ENTRIES:
            log.write(event, samples or None)
            log.flush()
            done += 1
    with pytest.raises(LogError, match="No space left"):
        log.write(ENTRIES[0][0])
    with pytest.raises(LogError, match="No space left"):
        log.close()
    log.close()
    monkeypatch.undo()
    assert 0 < done < len(ENTRIES)
    with LogReader(path) as read:
        assert content(read) == ENTRIES[:done]
        assert read.damage == []  # the piece that did not fit is cut off again
        assert not read.finished


def test_a_full_disk_at_the_first_byte(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container_module, "os", FullDisk(0))
    with pytest.raises(LogError, match="No space left"):
        LogWriter(path)


def test_a_limit_on_the_file_size(path: Path) -> None:
    program = f"""
        import resource, anyio
        from tests.logs import witnessed, written
        resource.setrlimit(resource.RLIMIT_FSIZE, (32_000, 32_000))
        from eventbus.log import LogError
        try:
            written({str(path)!r}, anyio.run(witnessed), flush=lambda place: True)
        except LogError as error:
            print(error)
    """
    done = python(program, check=True)
    assert "cannot be written: File too large" in done.stdout
    with LogReader(path) as log:
        read = content(log)
        assert 0 < len(read) < len(ENTRIES)
        assert [event.seq for event, _ in read] == list(range(len(read)))


def test_what_cannot_be_encoded_leaves_no_trace(path: Path) -> None:
    good = Sample(index=1, tokens=[1], response_length=1)  # type: ignore[arg-type]
    bad = Sample(index=2, tokens=[1], response_length=1, multimodal_inputs={"image": object()})  # type: ignore[arg-type]
    with LogWriter(path) as log:
        log.write(generated(0, good), [[good]])
        with pytest.raises(WireError, match=r"sample 2: multimodal_inputs\.image cannot be encoded: no codec for"):
            log.write(generated(1, bad), [[bad]])
        log.write(generated(1, good), [[good]])
    with LogReader(path) as read:
        assert [read.samples(event)[0][0].index for event in read.events()] == [1, 1]
        assert read.samples(list(read.events())[-1])[0][0].tokens == [1]
        assert read.damage == []


def test_an_unknown_event_cannot_be_written(path: Path) -> None:
    with LogWriter(path) as log, pytest.raises(TypeError, match="unknown kind 'x'"):
        log.write(UnknownEvent(seq=0, time_ns=0, rollout_id=0, kind="x"))


def test_closing_twice_and_writing_after(path: Path) -> None:
    log = LogWriter(path)
    log.close()
    log.close()
    with pytest.raises(LogError, match="the log is closed"):
        log.write(ENTRIES[0][0])
    with pytest.raises(LogError, match="the log is closed"):
        log.flush()


def test_the_buffer_is_bounded(path: Path) -> None:
    sample = Sample(index=1, tokens=range(100_000), response_length=1)  # type: ignore[arg-type]
    highest = 0
    with LogWriter(path, limit=1_000_000) as log:
        for seq in range(100):
            sample.tokens[0] = seq
            log.write(generated(seq, sample, group=seq), [[sample]])
            highest = max(highest, log._waiting)
    assert highest < 1_000_000 + 500_000
    with LogReader(path) as read:
        assert len(list(read.events())) == 100


def test_durable_waits_for_the_disk_when_a_round_ends(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []

    class Disk(FullDisk):
        def fsync(self, descriptor: int) -> None:
            synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(container_module, "os", Disk(1 << 40))
    with LogWriter(path, durable=True) as log:
        log.write(RolloutStarted(seq=0, time_ns=0, rollout_id=0, target=1, group_size=1))
        log.flush()
        assert synced == []
        log.write(RolloutFinished(seq=1, time_ns=1, rollout_id=0))
        log.flush()
        with LogReader(path) as read:
            assert len(list(read.events())) == 2
        assert len(synced) == 1
    assert synced[-1] == path.stat().st_size


# What is kept


def test_the_header_says_how_it_was_written(path: Path) -> None:
    stages = [StageNote("judge", "sample", external=True, path="my_stages:judge", table={"use": "my_stages:judge"})]
    with LogWriter(path, payload="kept", config='[prompts]\npath = "\u00e4"\n', stages=stages):
        pass
    with LogReader(path) as log:
        header = log.header
    assert header.stages == stages
    assert header.config == '[prompts]\npath = "\u00e4"\n'
    assert header.payload == "kept"
    assert header.schema_version == SCHEMA_VERSION
    assert header.library.startswith("rolloutbus")
    assert header.versions["msgspec"] == msgspec.__version__
    assert header.command == sys.argv


def test_payload_none_has_no_columns(path: Path) -> None:
    written(path, ENTRIES, payload="none")
    with LogReader(path) as log:
        assert list(log.events()) == [event for event, _ in ENTRIES]
        group = next(log.rollout(0).groups())
        assert group.rewards() == [0.0, 1.0]
        assert group.samples[0].multimodal_inputs is None
        with pytest.raises(
            LogError, match=r"no columns for the samples of event \d+: it was recorded with payload='none'"
        ):
            _ = group.samples[0].tokens
        assert log.damage == []
    assert b"/columns" in path.read_bytes()
    assert not [chunk for chunk in LogFile(path).chunks if chunk.channels == {1}]


def test_payload_kept_has_the_columns_of_the_batch(path: Path) -> None:
    sample = Sample(index=1, rollout_id=1, tokens=[1, 2, 3], response_length=2)  # type: ignore[arg-type]
    entries: list[Entry] = [
        (generated(0, sample, group=0), [[sample]]),
        (generated(1, sample, group=1), [[sample]]),
        (generated(2, sample, group=2), [[sample]]),
        (GroupEnded(seq=3, time_ns=3, rollout_id=0, group_index=0, outcome="dropped", reason="bad"), []),
        (GroupEnded(seq=4, time_ns=4, rollout_id=0, group_index=1, outcome="kept"), []),
    ]
    written(path, entries, payload="kept")
    with LogReader(path) as log:
        first, second, third = (log.samples(event)[0][0] for event in log.events("sample_generated"))
        assert second.tokens == [1, 2, 3]
        for other in (first, third):
            with pytest.raises(LogError, match="payload='kept', and the group entered no batch"):
                _ = other.tokens


def python(program: str, *arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=check)


# Files that the writer did not leave so


@pytest.mark.parametrize("finished", [True, False])
def test_a_part_of_zeros_is_reported(path: Path, finished: bool) -> None:
    """As a file system leaves blocks that it never wrote."""
    written(path, ENTRIES, flush=lambda place: place % 7 == 0)
    whole = path.read_bytes() if finished else unclosed(path)
    described_at = LogFile(path).chunks[0].position
    rng = random.Random(0)
    for _ in range(60):
        start, length = rng.randrange(described_at, len(whole)), rng.choice([8, 64, 512, 4096])
        path.write_bytes(whole[:start] + bytes(len(whole[start : start + length])) + whole[start + length :])
        with LogReader(path) as log:
            read = list(log.events())
            for part in log.rounds:
                list(log.rollout(part.rollout_id).groups())
            assert [event for event, _ in ENTRIES] == read or log.damage
        report = recover(path, path.with_name("saved.mcap"), overwrite=True)
        assert report.events == len(read)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": CompressionType.NONE},
        {"enable_crcs": False},
        {"index_types": IndexType.NONE},
        {"index_types": IndexType.CHUNK},
        {"use_statistics": False, "use_summary_offsets": False},
        {"chunk_size": 300},
    ],
)
def test_a_copy_that_mcaps_own_writer_made(path: Path, options: dict[str, Any]) -> None:
    """It mixes events and columns in a chunk, and may leave out indexes and CRCs."""
    copied(path, path.with_name("copy.mcap"), **options)
    with LogReader(path.with_name("copy.mcap")) as log:
        assert content(log) == ENTRIES
        assert [part.counts["rollout_finished"] for part in log.rounds] == [1, 1]
        assert log.damage == []


def test_messages_outside_of_chunks_are_refused(path: Path) -> None:
    copied(path, path.with_name("copy.mcap"), use_chunking=False)
    with pytest.raises(LogError, match="its messages lie in no chunks"):
        LogReader(path.with_name("copy.mcap"))


def test_a_channel_of_somebody_else_is_not_taken_for_columns(path: Path) -> None:
    with path.open("wb") as file:
        writer = Writer(file)
        writer.start(profile="rolloutbus")
        channel = writer.register_channel("/other", "json", writer.register_schema("other", "jsonschema", b"{}"))
        writer.add_message(channel, 1, b"{}", 1)
        writer.finish()  # type: ignore[no-untyped-call]
    with LogReader(path) as log:
        assert list(log.events()) == []
        assert any("an event cannot be decoded" in damage.reason for damage in log.damage)


@pytest.mark.parametrize("cut", [True, False])
def test_a_second_file_behind_the_first_is_reported(path: Path, cut: bool) -> None:
    written(path, ENTRIES)
    whole = path.read_bytes()
    path.write_bytes(whole + (unclosed(path) if cut else whole))
    with LogReader(path) as log:
        assert content(log) == ENTRIES
        assert [(damage.position, "another file that was appended" in damage.reason) for damage in log.damage] == [
            (len(whole), True)
        ]


def copied(path: Path, target: Path, **options: Any) -> None:
    written(path, ENTRIES, flush=lambda place: place % 7 == 0)
    with path.open("rb") as file, target.open("wb") as out:
        reader, writer = make_reader(file), Writer(out, **options)
        writer.start(profile="rolloutbus", library="another")
        for metadata in reader.iter_metadata():
            writer.add_metadata(metadata.name, metadata.metadata)
        numbers: dict[int, int] = {}
        for schema, channel, message in reader.iter_messages(log_time_order=False):
            assert schema is not None
            if channel.id not in numbers:
                known = writer.register_schema(schema.name, schema.encoding, schema.data)
                numbers[channel.id] = writer.register_channel(channel.topic, channel.message_encoding, known)
            writer.add_message(
                numbers[channel.id], message.log_time, message.data, message.publish_time, message.sequence
            )
        writer.finish()  # type: ignore[no-untyped-call]


# Names, disks, ends


def test_a_folder_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="a folder; give the path of a file in it"):
        LogWriter(tmp_path)
    with pytest.raises(LogError, match="Is a directory"):
        LogReader(tmp_path)


def test_a_command_line_that_is_no_utf_8(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["caf\udce9.py"])
    LogWriter(path, config="# caf\udce9\n").close()
    with LogReader(path) as log:
        assert log.header.command == ["caf\\udce9.py"]
        assert log.header.config == "# caf\\udce9\n"


def test_a_full_buffer_is_not_full_when_nothing_can_be_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run"])  # which is in the file
    monkeypatch.setattr(container_module, "os", FullDisk(26_000))
    log = LogWriter(path, limit=1)
    with pytest.raises(LogError, match="No space left"):
        for event, samples in ENTRIES:
            log.write(event, samples or None)
    assert not log.full
    with pytest.raises(LogError, match="No space left"):
        log.close()


def test_a_disk_that_is_full_only_when_the_file_is_closed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def close(descriptor: int) -> None:
        closed(descriptor)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    log, closed = LogWriter(path), os.close
    monkeypatch.setattr(os, "close", close)
    with pytest.raises(LogError, match="cannot be written: Disk quota exceeded"):
        log.close()
    log.close()


def test_a_disk_that_fails_to_sync(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(LogError, match="cannot be written: Input/output error"):
        written(path, ENTRIES, durable=True)
    with LogReader(path) as log:
        assert list(log.events())


def test_a_file_that_was_removed_while_it_was_written(path: Path) -> None:
    log = LogWriter(path)
    path.unlink()
    with pytest.raises(LogError, match=r"the file was removed while it was written$"):
        log.close()


@pytest.mark.parametrize("fork", [True, False])
def test_an_interpreter_that_exits_before_the_log_is_closed(path: Path, fork: bool) -> None:
    program = """
        import os, sys
        from tests.test_log_file import ENTRIES
        from eventbus.log import LogWriter
        log = LogWriter(sys.argv[1])
        for place, (event, samples) in enumerate(ENTRIES):
            log.write(event, samples or None)
            if sys.argv[2] == "True" and place == 20:
                if not os.fork():
                    sys.exit()
                os.wait()
        print(len(ENTRIES))
    """
    done = python(program, str(path), str(fork), check=True)
    with LogReader(path) as log:
        assert len(list(log.events())) == int(done.stdout)
        assert log.finished
        assert log.damage == []


def test_the_index_is_kept_packed(path: Path) -> None:
    """A run of days has millions of chunks."""
    with LogWriter(path) as log:
        for event, samples in ENTRIES:
            log.write(event, samples or None)
            log.flush()
        held = [value for value in vars(log._container).values() if isinstance(value, list)]
        assert held == []
