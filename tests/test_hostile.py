"""Files and replies that want to do harm: each gives one clear error, runs nothing, opens nothing else, and takes no
more memory than it may.

What is made up to hurt is read in a process of its own, where the memory is limited and everything that is opened,
started or connected to is watched. What chance makes up is read here, and must not raise anything but the error that
the reader announces.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcap.opcode import Opcode
from mcap.records import Metadata
from mcap.writer import Writer

from eventbus.config import DEEPEST_KEY, LARGEST_FILE, ConfigError, load_config, load_plan
from eventbus.events import GroupCompleted, light
from eventbus.imports import load_object
from eventbus.log import LogError, LogReader, LogWriter, recover
from eventbus.log.container import Chunk, Container
from eventbus.log.file import LogFile, StoredChunk
from eventbus.log.format import (
    CHUNK_FIELDS,
    FREE_CONTENT,
    LARGEST_RATIO,
    RECORD,
    LogHeader,
    StageNote,
    channels,
    largest_content,
    metadata_record,
    packed,
)
from eventbus.prompts import LONGEST_LINE, JsonlPrompts
from eventbus.replay import Replay
from eventbus.sample import Sample
from eventbus.wire import WireError, decode, encode
from tests.logs import Entry, witnessed, written

if __name__ != "__main__":
    torch: Any = pytest.importorskip("torch")
    np: Any = pytest.importorskip("numpy")
    zstandard: Any = pytest.importorskip("zstandard")
    lz4: Any = pytest.importorskip("lz4.frame") and sys.modules["lz4"]

ROOT = Path(__file__).parent.parent
ROOM = 512 << 20
"""Bytes that a reader in a process of its own may take."""
DEEP = 100_000


# A process of its own


def read_log(path: Path) -> str:
    """Everything in a log, or in what of it can be read; says what cannot."""
    wrong = []
    with LogReader(path) as log:
        for part in log.rounds:
            rollout = log.rollout(part)
            _ = rollout.summary
            for group in rollout.groups():
                for sample in group.samples:
                    try:
                        sample.copy()
                    except LogError as error:
                        wrong.append(str(error))
        for event in log.events():
            for execution in log.samples(event):
                for sample in execution:
                    try:
                        sample.copy()
                    except LogError as error:
                        wrong.append(str(error))
        wrong += map(str, log.damage)
    return "; ".join(dict.fromkeys(wrong))


def read_prompts(path: Path) -> str:
    async def everything() -> None:
        source = JsonlPrompts(path, 1, epochs=1)
        while await source.take(10):
            pass

    anyio.run(everything)
    return ""


def read_config(path: Path) -> str:
    load_config(path)
    return ""


def read_debug_data(path: Path) -> str:
    load_object("eventbus.log.inspect.slime:load_record")(path)
    load_object("backends.slime.debug:load_debug_rollout_data")(str(path), rollout_id=0)
    return ""


def read_reply(path: Path) -> str:
    load_object("backends.sglang.reply:decode")(path.read_bytes(), 3, (3, 2))
    return ""


def read_replay(path: Path) -> str:
    run = Replay(path)
    list(run.steps())
    return "; ".join(f"{name}: {why}" for name, why in run.verify().not_verified.items())


READERS: dict[str, Callable[[Path], str]] = {
    "log": read_log,
    "replay": read_replay,
    "prompts": read_prompts,
    "config": read_config,
    "debug_data": read_debug_data,
    "reply": read_reply,
}
WATCHED = ("open", "socket.connect", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pickle.find_class")


def main(kind: str, warm: Path, *paths: Path) -> None:
    """Read each with the memory that is there after `warm` was read, and `ROOM`; print what came of it."""
    seen: list[str] = []
    READERS[kind](warm)
    (size,) = [int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line]
    resource.setrlimit(resource.RLIMIT_AS, ((size << 10) + ROOM, (size << 10) + ROOM))
    sys.addaudithook(lambda name, given: seen.append(f"{name} {given[0]}") if name in WATCHED else None)
    for path in paths:
        seen.clear()
        try:
            outcome = f"read: {READERS[kind](path)}"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        opened = [
            each
            for each in seen
            if not each.startswith((f"open {path}", f"open {sys.prefix}", f"open {sys.base_prefix}", "open /proc/"))
        ]
        print(json.dumps([path.name, outcome[:2000], opened]))


def outcomes(kind: str, warm: Path, *paths: Path) -> dict[str, str]:
    """What comes of reading them, by file name; nothing else may have been opened, started or connected to."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.test_hostile", kind, warm, *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for line in done.stdout.splitlines():
        name, found[name], opened = json.loads(line)
        assert opened == [], name
    return found


def outcomes_of(kind: str, folder: Path, warm: bytes, contents: dict[str, bytes]) -> dict[str, str]:
    """`outcomes` of files with these names and contents; `warm` is that of a good one."""
    (folder / "warm").write_bytes(warm)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return outcomes(kind, folder / "warm", *(folder / name for name in contents))


def check_errors(found: dict[str, str], kind: str, expected: dict[str, str], folder: Path | None = None) -> None:
    """Each file gave an error of this kind, with these words in it.

    :param folder: of the files: the error begins with the path.
    """
    assert found.keys() == expected.keys()
    for name, text in expected.items():
        begins = f"{kind}: " if folder is None else f"{kind}: {folder / name}: "
        assert found[name].startswith(begins), f"{name}: {found[name]}"
        assert text in found[name], f"{name}: {found[name]}"


# Logs


ENTRIES: list[Entry] = anyio.run(witnessed)


def log_of(path: Path, *parts: Callable[[Container], None]) -> Path:
    """A log that its CRCs say is whole, with what `parts` add."""
    with path.open("wb") as file:
        container = Container(file.fileno(), "hostile")
        container.append_metadata("rolloutbus", metadata_record("rolloutbus", LogHeader("hostile", 1)))
        container.describe()
        for part in parts:
            part(container)
        container.finish()
    return path


def holds(part: Callable[[Container], None]) -> Callable[[Path], Path]:
    return lambda path: log_of(path, part)


def chunk(fill: Callable[[Chunk], None]) -> Callable[[Container], None]:
    def add(container: Container) -> None:
        made = Chunk()
        fill(made)
        container.append(made)

    return add


def message(topic: str, data: bytes) -> Callable[[Container], None]:
    return chunk(lambda chunk: chunk.add(channels()[topic], 0, 0, data))


def started(batch: bytes) -> Callable[[Container], None]:
    """A round that says so of its settings."""
    fields = {"kind": "rollout_started", "seq": 0, "time_ns": 0, "rollout_id": 0, "target": 1, "group_size": 1}
    return message("/rollout_started", msgspec.msgpack.encode((1, fields | {"batch": msgspec.Raw(batch)})))


def behind_an_event(records: bytes) -> Callable[[Container], None]:
    def fill(chunk: Chunk) -> None:
        chunk.add(channels()["/group_ended"], 0, 0, b"\x92\x01\x80")
        chunk.add_records(records)

    return chunk(fill)


def columns(**stored: Any) -> Callable[[Container], None]:
    """A completed group of one sample whose heavy fields are these."""
    sample = Sample(index=0, group_index=0, tokens=[1, 2], response_length=1)  # type: ignore[arg-type]
    shown = GroupCompleted(seq=0, time_ns=0, rollout_id=0, group_index=0, samples=[[light(sample)]])

    def add(container: Container) -> None:
        message("/columns", msgspec.msgpack.encode((1, [[stored]])))(container)
        message("/group_completed", encode(shown))(container)

    return add


def experts(head: Any, data: bytes = b"", name: str = "numpy.ndarray") -> Callable[[Container], None]:
    payload = msgspec.msgpack.Ext(16, msgspec.msgpack.encode([name, head, data]))
    return columns(values={"rollout_routed_experts": payload})


def deep_note(container: Container) -> None:
    content = {"rollout_id": "[" * DEEP}
    crc = zlib.crc32("\0".join(("rollout", *content, *content.values())).encode())
    container.append_metadata("rollout", packed(Metadata(name="rollout", metadata=content | {"crc": str(crc)})))


def compressed(path: Path, compression: str, size: int, zeros: int) -> Path:
    """A log, not closed, whose last chunk holds so many zeros, and says that it is `size` bytes."""
    compress = {
        "zstd": lambda data: zstandard.ZstdCompressor().compress(data),
        "lz4": lambda data: lz4.frame.compress(data),
    }
    data = compress[compression](bytes(zeros))
    name = compression.encode()
    head = CHUNK_FIELDS.pack(0, 1, size, 1, len(name)) + name + struct.pack("<Q", len(data))
    whole = unclosed(log_of(path).read_bytes())
    path.write_bytes(whole + RECORD.pack(Opcode.CHUNK, len(head) + len(data)) + head + data)
    return path


def open_ended(path: Path, head: bytes, zeros: int) -> Path:
    """A log, not closed, that goes on with these bytes, and zeros that take no room on the disk."""
    path.write_bytes(unclosed(log_of(path).read_bytes()) + head)
    os.truncate(path, path.stat().st_size + zeros)
    return path


def unclosed(whole: bytes) -> bytes:
    """A log without its index and its end."""
    return whole[: struct.unpack_from("<Q", whole, len(whole) - 28)[0] - 13]


def indexed(path: Path, change: Callable[[int, bytearray], None]) -> Path:
    """A log whose chunk indices are changed; the CRC of the index fits."""
    whole = log_of(path, started(b"\x80")).read_bytes()
    (start,) = struct.unpack_from("<Q", whole, len(whole) - 28)
    summary, place = bytearray(whole[start:-12]), 0
    while place < len(summary) - 25:
        opcode, length = RECORD.unpack_from(summary, place)
        if opcode == Opcode.CHUNK_INDEX:
            change(place + RECORD.size, summary)
        place += RECORD.size + length
    path.write_bytes(whole[:start] + summary + zlib.crc32(summary).to_bytes(4, "little") + whole[-8:])
    return path


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


def test_logs_that_are_made_to_hurt(tmp_path: Path) -> None:
    more = ROOM + (64 << 20)
    unfolds = f"the chunk would unfold to {more} bytes, and may to "
    cases: dict[str, tuple[Callable[[Path], Path], str]] = {
        "zstd": (lambda path: compressed(path, "zstd", more, more), unfolds),
        "lz4": (lambda path: compressed(path, "lz4", more, more), unfolds),
        "zstd that says less": (lambda path: compressed(path, "zstd", 100, more), "it has another size"),
        "lz4 that says less": (lambda path: compressed(path, "lz4", 100, more), "the chunk's CRC does not fit"),
        "zstd that says more": (
            lambda path: compressed(path, "zstd", 1 << 60, 100),
            f"would unfold to {1 << 60} bytes",
        ),
        "short record": (holds(behind_an_event(b"\x05\x01")), "a record of the chunk is too short"),
        "long record": (
            holds(behind_an_event(RECORD.pack(Opcode.MESSAGE, (1 << 64) - 1) + bytes(22))),
            "a record of the chunk ends behind it",
        ),
        "no channel": (holds(chunk(lambda chunk: chunk.add_records(RECORD.pack(Opcode.CHANNEL, 2) + bytes(2)))), ""),
        "chunk of 16 EiB": (
            lambda path: indexed(path, lambda at, index: struct.pack_into("<Q", index, at + 24, (1 << 64) - 1)),
            "the file ends before the chunk does",
        ),
        "chunk at 16 EiB": (
            lambda path: indexed(path, lambda at, index: struct.pack_into("<Q", index, at + 16, (1 << 64) - 1)),
            "the file ends before the chunk does",
        ),
        "index that is none": (
            lambda path: indexed(path, lambda at, index: struct.pack_into("<I", index, at + 32, (1 << 32) - 1)),
            "the index at the file's end is damaged",
        ),
        "metadata of 65 MiB": (
            lambda path: open_ended(path, RECORD.pack(Opcode.METADATA, 65 << 20), 65 << 20),
            "the file ends in the middle of a record",
        ),
        "deep metadata": (holds(deep_note), "the note of a round is damaged: it is nested too deeply"),
        "deep event": (holds(started(b"\x81\xa1x" + nested(DEEP))), "cannot be decoded: Event: nested too deeply"),
        "deep field of a newer writer": (
            holds(message("/rollout_started", b"\x92\x01\x81\xa1x" + nested(DEEP))),
            "cannot be decoded: Event: nested too deeply",
        ),
        "list of 4 billion": (
            holds(started(b"\x81\xa1x\xdd\xff\xff\xff\xff")),
            "cannot be decoded: Event: Input data was",
        ),
        "deep columns": (
            holds(columns(values={"tokens": msgspec.Raw(nested(DEEP))})),
            "columns of event 0 are damaged: ",
        ),
        "tokens of another type": (
            holds(columns(values={"tokens": "text"})),
            "columns of event 0 are damaged: tokens: Exp",
        ),
        "column nowhere": (holds(columns(same={"tokens": [0, 0, 0, 0]})), "damaged: tokens is not where it should be"),
        "array of 8 GiB": (holds(experts(["S0", [1 << 33]])), "is too large for 0 bytes"),
        "array of nothing": (holds(experts(["<i4", [1 << 60, 0]])), "is too large for 0 bytes"),
        "array of objects": (holds(experts(["O", [1]], b"12345678")), "objects do not travel"),
        "tensor of nothing": (holds(experts(["int32", [1 << 60, 0]], name="torch.Tensor")), "is too large for 0 bytes"),
    }
    for name, (make, _) in cases.items():
        make(tmp_path / name)
    log_of(
        tmp_path / "warm",
        started(b"\x80"),
        experts(["<i4", [1]], bytes(4)),
        experts(["int32", [1]], bytes(4), "torch.Tensor"),
    )
    found = outcomes("log", tmp_path / "warm", *(tmp_path / name for name in cases))
    assert found.keys() == cases.keys()
    for name, (_, text) in cases.items():
        assert found[name].startswith("read: "), f"{name}: {found[name]}"
        assert text in found[name], f"{name}: {found[name]}"


def test_logs_whose_stages_are_made_to_hurt(tmp_path: Path) -> None:
    """What a replay must not import, `test_replay_trust` has in full; here what is opened and started is watched."""
    passwords = tmp_path / "passwords"
    passwords.write_text("secret")
    stages = {
        "warm": 'use = "middleware:exact_match"\nretry = { attempts = 2, on = [{ use = "builtins:OSError" }] }',
        "program": f'use = "subprocess:Popen"\nargs = ["cat", "{passwords}"]',
        "file": f'use = "builtins:open"\nfile = "{passwords}"',
        "class": f'use = "io:FileIO"\nfile = "{passwords}"',
        "write": f'use = "eventbus.log:LogWriter"\npath = "{passwords}"\noverwrite = true',
        "module": 'use = "antigravity:fly"',
        "inside": 'use = "middleware.rewards:os.system"',
        "server": 'use = "backends.sglang:SGLangRouter"\nworkers = []\npython = "/bin/true"',
        "tokenizer": f'use = "middleware:Tokenize"\ntokenizer = "{tmp_path}"',
    }
    for name, stage in stages.items():
        config = f"[[stages]]\nname = 'score'\n{stage}\n"
        with LogWriter(tmp_path / name, config=config, stages=[StageNote("score", "sample")]) as writer:
            for event, samples in ENTRIES:
                writer.write_nowait(event, samples or None)
    names = [name for name in stages if name != "warm"]
    found = outcomes("replay", tmp_path / "warm", *(tmp_path / name for name in names))
    assert found.keys() == set(names)
    for name in names:
        assert "score: stages[0].use: cannot load " in found[name], f"{name}: {found[name]}"
        assert "if you trust the log: --trust" in found[name], f"{name}: {found[name]}"
    assert passwords.read_text() == "secret"


def test_what_the_writer_writes_its_reader_reads(tmp_path: Path) -> None:
    """A chunk that compresses beyond what a reader accepts is stored as it is."""
    sample = Sample(index=0, group_index=0, tokens=bytes(FREE_CONTENT // 4 + 1), response_length=1)  # type: ignore[arg-type]
    shown = GroupCompleted(seq=0, time_ns=0, rollout_id=0, group_index=0, samples=[[light(sample)]])
    written(tmp_path / "log", [(shown, [[sample]])], compression="zstd")
    assert (tmp_path / "log").stat().st_size > FREE_CONTENT
    with LogReader(tmp_path / "log") as log:
        assert log.samples(next(log.events()))[0][0].tokens == sample.tokens


@given(size=st.integers(0, 1 << 40))
def test_what_a_chunk_may_hold_goes_with_its_size(size: int) -> None:
    assert largest_content(size) == max(FREE_CONTENT, LARGEST_RATIO * size)
    assert largest_content(size) >= size


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[StoredChunk]]:
    """A log, and where its chunks are."""
    path = tmp_path_factory.mktemp("sound") / "log"
    written(path, ENTRIES, flush=lambda place: place % 5 == 0)
    file = LogFile(path)
    file.close()
    return path.read_bytes(), file.chunks


@settings(max_examples=60)
@given(data=st.data())
def test_chance_in_a_log_whose_crcs_fit_gives_damage_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, sound: tuple[bytes, list[StoredChunk]], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("log")
    path = folder / "log"
    whole, chunks = bytearray(sound[0]), sound[1]
    for _ in range(data.draw(st.integers(1, 4))):
        stored = data.draw(st.sampled_from(chunks))
        content = stored.position + stored.length - stored.size
        place = data.draw(st.integers(content, content + stored.size - 8))
        how = data.draw(st.sampled_from(["flip", "length", "bytes"]))
        if how == "flip":
            whole[place] ^= data.draw(st.integers(1, 255))
        elif how == "length":
            struct.pack_into("<Q", whole, place, data.draw(st.sampled_from([0, 1 << 31, 1 << 63, (1 << 64) - 1])))
        else:
            whole[place : place + 8] = data.draw(st.binary(min_size=8, max_size=8))
        struct.pack_into(
            "<I", whole, stored.position + RECORD.size + 24, zlib.crc32(whole[content : content + stored.size])
        )
    path.write_bytes(whole if data.draw(st.booleans()) else unclosed(bytes(whole)))
    read_log(path)
    recover(path, folder / "recovered")
    with LogReader(folder / "recovered") as log:
        assert log.finished


def test_a_log_from_elsewhere_is_no_log(tmp_path: Path) -> None:
    with (tmp_path / "other").open("wb") as file:
        writer = Writer(file)
        writer.start(profile="ros2", library="other")
        schema = writer.register_schema("rollout_started", "protobuf", b"\0" * 100)
        channel = writer.register_channel("/rollout_started", "protobuf", schema)
        writer.add_message(channel, 0, b"\xff" * 100, 0)
        writer.finish()  # type: ignore[no-untyped-call]
    with pytest.raises(LogError, match="this is an MCAP file, but no log of rolloutbus"):
        LogReader(tmp_path / "other")


def test_reading_a_log_runs_nothing_that_it_names(tmp_path: Path) -> None:
    """Replaying it does, unless the stages are given: that is what a replay is."""
    ran = tmp_path / "ran"
    config = f'[[stages]]\nuse = "subprocess:Popen"\nargs = ["touch", "{ran}"]\n'
    with LogWriter(tmp_path / "log", config=config) as log:
        for shown, samples in ENTRIES:
            log.write(shown, samples or None)
    read_log(tmp_path / "log")
    with LogReader(tmp_path / "log") as reader, suppress(Exception):
        Replay(reader, stages=[lambda sample: None])
    program = [sys.executable, "-c", "from eventbus.cli import main; main()", "log"]
    for command in (["info"], ["check"], ["why", "sample:0"]):
        subprocess.run(
            [*program, command[0], tmp_path / "log", *command[1:]], cwd=ROOT, check=True, capture_output=True
        )
    assert not ran.exists()


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_wire_error(data: bytes) -> None:
    for value in (data, b"\x92\x01" + data):
        for kind in (None, Sample):
            with suppress(WireError):
                decode(value) if kind is None else decode(value, kind)


# Prompts


def test_prompts_that_are_made_to_hurt(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not yours")
    good = b'{"prompt": "p"}\n'
    contents = {
        "long line": good + b'{"prompt": "' + b"x" * LONGEST_LINE + b'"}\n',
        "no line ends": b"x" * (LONGEST_LINE + 10),
        "deep": good + b'{"prompt": "p", "a": ' + b"[" * DEEP + b"]" * DEEP + b"}\n",
        "null": b'{"prompt": "\0"}\n',
        "no utf-8": b'{"prompt": "\xff\xfe"}\n',
        "giant number": b'{"prompt": "p", "n": ' + b"9" * 100_000 + b"}\n",
        "giant exponent": b'{"prompt": "p", "n": 1e999999999}\n',
        "many keys": b"{" + b",".join(b'"k%d": 0' % n for n in range(100_000)) + b"}\n",
        "names of files": json.dumps(
            {"prompt": f"file://{secret}", "metadata": {"path": str(secret), "use": "os:abort"}}
        ).encode(),
    }
    found = outcomes_of("prompts", tmp_path, good, contents)
    expected = {
        "long line": "long line:2: is longer than 64 MiB: is this JSONL?",
        "no line ends": "no line ends:1: is longer than 64 MiB: is this JSONL?",
        "deep": "deep:2: not JSON: maximum recursion depth exceeded",
        "null": "null:1: not JSON",
        "no utf-8": "no utf-8:1: not JSON: Invalid UTF-8",
        "giant number": "giant number:1: not JSON: Integer value out of range",
        "giant exponent": "giant exponent:1: not JSON: Number out of range",
        "many keys": "many keys:1: no key 'prompt'; the keys are: k0, k1, ",
    }
    assert found.pop("names of files") == "read: "
    check_errors(found, "ValueError", expected)
    assert max(map(len, found.values())) < 1000 + len(str(tmp_path))


@settings(max_examples=50)
@given(
    st.lists(
        st.binary(max_size=40) | st.sampled_from([b'{"prompt": "p"}', b'{"prompt": ', b"\xef\xbb\xbf", b"\0", b"\r"])
    )
)
def test_any_lines_are_prompts_or_a_value_error(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_bytes(b"\n".join(lines))
    with suppress(ValueError):
        read_prompts(path)


# Configurations


def test_configurations_that_are_made_to_hurt(tmp_path: Path) -> None:
    contents = {
        "large": b"#" * LARGEST_FILE + b"\n",
        "deep": b"a = " + b"[" * DEEP,
        "deep tables": b"a = " + b"{a=" * DEEP,
        "dots": b".".join([b"a"] * DEEP) + b" = 1",
        "quoted dots": b"\n[" + b" . ".join([b'"a b"'] * (DEEPEST_KEY + 1)) + b"]",
        "giant number": b"a = " + b"9" * 100_000,
        "no utf-8": b"a = 'b'\nc = '\xff'",
        "null": b"a = '\0'",
    }
    found = outcomes_of("config", tmp_path, b"a = 1", contents)
    expected = {
        "large": "large: is larger than 1024 KiB, too much for a configuration",
        "deep": "nested too deeply",
        "deep tables": "nested too deeply",
        "dots": "dots:1:1: a key of more than 64 parts",
        "quoted dots": "quoted dots:2:1: a key of more than 64 parts",
        "giant number": "exceeds the limit (4300 digits)",
        "no utf-8": "no utf-8:2: is not UTF-8",
        "null": "null:1:6: found invalid character '\\x00'",
    }
    check_errors(found, "ConfigError", expected)


def test_a_key_may_have_as_many_parts_as_is_said(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(".".join("a" * DEEPEST_KEY) + " = 1")
    assert list(load_config(tmp_path / "run.toml")) == ["a"]


def test_only_use_is_imported_and_a_path_is_what_it_says(tmp_path: Path) -> None:
    """A configuration is code: what `use` names is imported and called. Nothing else in it is."""
    (tmp_path / "run.toml").write_text(
        '[prompts]\npath = "p\\u0000q"\ngroup_size = 1\n[[stages]]\nuse = "builtins:id"\n'
    )
    with pytest.raises(ConfigError, match=r"prompts\.path: a path cannot hold a null character"):
        load_plan(tmp_path / "run.toml")
    (tmp_path / "trap.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "run.toml").write_text(
        '[prompts]\npath = "../trap.py"\nprompt_key = "trap:x"\ngroup_size = 1\n[[stages]]\nuse = "builtins:id"\n'
    )
    with suppress(ConfigError):
        load_plan(tmp_path / "run.toml")
    assert "trap" not in sys.modules


@given(st.text(st.sampled_from("ab.=[]{}\"'#\n 1,-\\u\0"), max_size=60))
def test_any_text_is_a_configuration_or_a_config_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("config") / "run.toml"
    path.write_text(text, newline="")
    with suppress(ConfigError):
        load_plan(path)


# slime's debug data

SAMPLE = {"prompt": "p", "tokens": [1], "response": "x", "response_length": 1, "status": "completed"}


class Call:
    """Pickled, it is a call: of whatever it is given."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def saved(path: Path, *samples: Any, **fields: Any) -> Path:
    torch.save({"rollout_id": 0, "samples": list(samples) or [SAMPLE | fields]}, path)
    return path


def repacked(
    path: Path, change: Callable[[str, bytes], tuple[str, bytes]], compression: int = zipfile.ZIP_STORED
) -> Path:
    """The archive with other records."""
    with zipfile.ZipFile(path) as archive:
        records = [change(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records:
            archive.writestr(name, content)
    return path


def test_debug_data_that_is_made_to_hurt(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    laughs: list[Any] = [0] * 10
    for _ in range(20):
        laughs = [laughs] * 10
    circle: list[Any] = []
    circle.append(circle)
    deep: list[Any] = []
    for _ in range(150):
        deep = [deep]
    one = torch.zeros(1, dtype=torch.int32)
    many = torch.zeros(1_000_000, dtype=torch.int8)
    reconstruct = np.zeros(1).__reduce__()[0]
    with (tmp_path / "plain pickle").open("wb") as file:
        pickle.dump({"rollout_id": 0, "samples": [Call(os.system, f"touch {ran}")]}, file)
    torch.save({"rollout_id": 0, "samples": []}, tmp_path / "old form", _use_new_zipfile_serialization=False)
    cases = [
        tmp_path / "plain pickle",
        tmp_path / "old form",
        saved(tmp_path / "code", metadata={"x": Call(os.system, f"touch {ran}")}),
        saved(tmp_path / "import", metadata={"x": Call(__import__, "antigravity")}),
        saved(tmp_path / "laughs", metadata={"x": laughs}),
        saved(tmp_path / "circle", metadata={"x": circle}),
        saved(tmp_path / "deep", metadata={"x": deep}),
        saved(tmp_path / "repeats", tokens=one.expand(1 << 40)),
        saved(tmp_path / "repeats inside", metadata={"x": one.expand(1 << 40)}),
        saved(tmp_path / "shared", *[SAMPLE | {"tokens": many}] * 1000),
        saved(
            tmp_path / "sparse",
            metadata={
                "x": torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (1 << 40,), check_invariants=True)
            },
        ),
        saved(tmp_path / "no memory", metadata={"x": torch.empty(1 << 40, device="meta")}),
        saved(tmp_path / "giant", metadata={"x": Call(reconstruct, np.ndarray, (1 << 40,), np.dtype("b"))}),
        repacked(saved(tmp_path / "compressed"), lambda name, content: (name, content), zipfile.ZIP_DEFLATED),
        repacked(
            saved(tmp_path / "traversal", metadata={"x": torch.ones(3)}),
            lambda name, content: ("../../ran" if name.endswith("data/0") else name, content),
        ),
        _overlapping(saved(tmp_path / "overlapping")),
    ]
    found = outcomes("debug_data", saved(tmp_path / "warm", metadata={"x": one, "y": np.ones(1)}), *cases)
    expected = {
        "plain pickle": "not a file that torch.save wrote, or a damaged one: File is not a zip file",
        "old form": "not a file that torch.save wrote, or a damaged one: File is not a zip file",
        "code": "holds a posix.system, which would have to be run to be read",
        "import": "import__, which would have to be run to be read",
        "laughs": "unfolds to more than 1048576 values, too many for its size",
        "circle": "is nested more than 100 deep",
        "deep": "is nested more than 100 deep",
        "repeats": "holds a tensor of shape (1099511627776,) that repeats its memory",
        "repeats inside": "holds a tensor of shape (1099511627776,) that repeats its memory",
        "shared": "values, too many for its size",
        "sparse": "holds a tensor of layout torch.sparse_coo",
        "no memory": "values, too many for its size",
        "giant": "Unable to allocate 1.00 TiB",
        "compressed": "it is compressed",
        "traversal": "not a file that torch.save wrote, or a damaged one",
        "overlapping": "its records are larger than the file",
    }
    check_errors(found, "LogError", expected, tmp_path)
    assert not ran.exists()
    assert not (tmp_path.parent.parent / "ran").exists()


def _overlapping(path: Path) -> Path:
    """An archive whose directory names its largest record a thousand times."""
    with zipfile.ZipFile(path, "a") as archive:
        largest = max(archive.infolist(), key=lambda record: record.file_size)
        for number in range(1000):
            twin = zipfile.ZipInfo(f"archive/data/{number + 100}")
            for name in ("header_offset", "file_size", "compress_size", "CRC", "compress_type"):
                setattr(twin, name, getattr(largest, name))
            archive.filelist.append(twin)
        archive._didModify = True  # type: ignore[attr-defined]
    return path


def test_what_samples_share_is_read(tmp_path: Path) -> None:
    picture = torch.zeros(100_000)
    path = saved(tmp_path / "0.pt", *[SAMPLE | {"multimodal_train_inputs": {"pixels": picture}} for _ in range(64)])
    assert len(load_object("eventbus.log.inspect.slime:load_record")(path).samples) == 64


@settings(max_examples=60)
@given(data=st.data())
def test_chance_in_a_pickle_is_a_record_or_a_log_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = saved(tmp_path_factory.mktemp("pickle") / "0.pt", metadata={"x": torch.ones(2), "y": ["z"] * 3})

    def change(name: str, content: bytes) -> tuple[str, bytes]:
        if name.endswith("data.pkl"):
            place = data.draw(st.integers(2, len(content) - 1))
            content = (
                content[:place] + data.draw(st.binary(max_size=6)) + content[place + data.draw(st.integers(0, 6)) :]
            )
        return name, content

    with suppress(LogError):
        read_debug_data(repacked(path, change))


# Replies


def reply(**meta: Any) -> dict[str, Any]:
    entries = [[-0.5, 7, None], [-0.25, 8, None]]
    experts = base64.b64encode(bytes(4 * 4 * 3 * 2)).decode()
    given = {"finish_reason": {"type": "stop"}, "output_token_logprobs": entries, "routed_experts": experts}
    return {"text": "ab", "meta_info": given | meta}


def test_replies_that_are_made_to_hurt(tmp_path: Path) -> None:
    large = base64.b64encode(bytes(64 << 20)).decode()
    contents = {
        "deep": b'{"text": "", "x": ' + b"[" * DEEP,
        "deep inside": b'{"text": "", "meta_info": {"finish_reason": null, "hidden_states": ' + b"[" * DEEP,
        "giant id": json.dumps(reply(output_token_logprobs=[[-0.5, 1 << 40, None]])).encode(),
        "giant integer": json.dumps(reply(output_token_logprobs=[[-0.5, 7, None]])).replace("7", "9" * 4000).encode(),
        "giant number": json.dumps(reply(output_token_logprobs=[[-0.5, 7, None]]))
        .replace("-0.5", "-1e999999")
        .encode(),
        "experts that are none": json.dumps(reply(routed_experts="\u0000" * 100)).encode(),
        "experts of another shape": json.dumps(reply(routed_experts=large)).encode(),
        "kept of two kinds": json.dumps(
            reply(output_token_sampling_mask=[[1], [2]], output_token_sampling_logprobs=[[0.5], 0.5])
        ).encode(),
        "kept that is giant": json.dumps(
            reply(output_token_sampling_mask=[[1], [2]], output_token_sampling_logprobs=[0.5, 7])
        )
        .replace("0.5, 7]", "0.5, 1" + "0" * 400 + "]")
        .encode(),
        "spans behind the end": json.dumps(
            reply(weight_versions=[{"version": "1", "start": 0, "end": 1 << 62}])
        ).encode(),
        "no utf-8": b'{"text": "\xff\xfe"}',
    }
    found = outcomes_of("reply", tmp_path, json.dumps(reply()).encode(), contents)
    assert found.keys() == contents.keys()
    expected = {
        "giant id": "a token id does not fit into 32 bits",
        "giant integer": "a token id does not fit into 32 bits",
        "giant number": "Number out of range",
        "experts of another shape": f"routed_experts has {16 << 20} numbers, not 4 tokens x 3 layers x 2 experts",
        "kept of two kinds": "output_token_sampling_logprobs: ",
        "spans behind the end": "do not fit 2 tokens",
        "no utf-8": "Invalid UTF-8",
    }
    for name in contents:
        assert found[name].startswith("ReplyError: "), f"{name}: {found[name]}"
        assert expected.get(name, "") in found[name], f"{name}: {found[name]}"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 65), 1 << 65) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=6,
)


@given(field=st.sampled_from(sorted(load_object("backends.sglang.reply:_Meta").__struct_fields__)), value=VALUES)
def test_any_value_in_a_reply_is_taken_or_a_reply_error(field: str, value: Any) -> None:
    module: Any = pytest.importorskip("backends.sglang.reply")
    data = json.dumps(reply(**{field: value})).encode()
    with suppress(module.ReplyError):
        assert module.decode(data, 3, (3, 2)).text == "ab"
    with suppress(module.ReplyError):
        module.progress(data)


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
