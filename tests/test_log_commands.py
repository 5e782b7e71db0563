"""`rolloutbus log`: what each command shows, its exit code, and that no bad input gives a traceback."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
from rich.console import Console

from eventbus.batching import BatchSpec
from eventbus.events import GroupEnded, StageApplied
from eventbus.log import LogReader, LogWriter
from eventbus.log.inspect import commands, why
from eventbus.pipeline import Pipeline
from eventbus.sample import Sample
from eventbus.testing import virtual_time
from middleware import Generate, Recorder
from tests.streams import endless, engine, rewarded, some, strict
from tests.test_log_check import record

ROOT = Path(__file__).parent.parent


def write(path: Path, bad: tuple[int, ...] = (1,), **options: Any) -> None:
    async def main() -> None:
        stages = [Generate(engine(lambda s: float(s.group_index or 0), length=3)), rewarded([1.0, 0.5]), strict(bad)]
        recorder = Recorder(path, **options)
        spec = BatchSpec(2, over_sampling=3)
        async with Pipeline(endless(), stages, spec, observers=[recorder], stall_after=None) as pipeline:
            async for _ in pipeline.rollouts(stop=2):
                pass
            await pipeline.evaluate(some(1), rollout_id=1)

    anyio.run(main, **virtual_time("asyncio"))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "run.mcap"
    write(path)
    return path


class Result:
    def __init__(self, code: object, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: object) -> Result:
        with pytest.raises(SystemExit) as ended:
            commands.app([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Result(ended.value.code or 0, out, err)

    return call


def test_info(run: Any, log: Path) -> None:
    result = run("info", log)
    assert result.code == 0
    for part in ("payload full, finished", "written by rolloutbus", "sample Generate", "group  chosen",
                 "3 rollouts and evaluations", "rollout 0        seq 0 to", "evaluation 1"):  # fmt: skip
        assert part in result.out
    content = json.loads(run("info", log, "--json").out)
    assert [(part["rollout_id"], part["evaluation"]) for part in content["rounds"]] == [
        (0, False),
        (1, False),
        (1, True),
    ]
    assert (content["finished"], content["damage"]) == (True, [])


def test_cat_shows_a_line_per_event_and_filters(run: Any, log: Path) -> None:
    with LogReader(log) as reader:
        events: list[Any] = list(reader.events())
    lines = run("cat", log).out.splitlines()
    assert [int(line.split()[0]) for line in lines] == [event.seq for event in events]

    def kept(*arguments: object) -> list[int]:
        return [int(line.split()[0]) for line in run("cat", log, *arguments).out.splitlines()]

    def expected(wanted: Any) -> list[int]:
        return [event.seq for event in events if wanted(event)]

    assert kept("--kind", "group_judged") == expected(lambda e: e.kind == "group_judged")
    two = ("group_judged", "group_ended")
    assert kept("--kind", two[0], "--kind", two[1]) == expected(lambda e: e.kind in two)
    assert kept("--rollout", 1, "--no-evaluation") == expected(lambda e: e.rollout_id == 1 and not e.evaluation)
    assert kept("--evaluation") == expected(lambda e: e.evaluation)
    assert kept("--group", 1, "--rollout", 0) == expected(
        lambda e: getattr(e, "group_index", None) == 1 and e.rollout_id == 0
    )
    assert kept("--limit", 3) == [0, 1, 2]
    assert kept("--until", -1) == []
    assert kept("--since", 0) == expected(lambda e: True)
    assert kept("--sample", 0, "--kind", "sample_generated", "--no-evaluation") == expected(
        lambda e: e.kind == "sample_generated" and e.index == 0 and not e.evaluation
    )


def test_cat_as_json(run: Any, log: Path) -> None:
    lines = [json.loads(line) for line in run("cat", log, "--json", "--kind", "group_completed").out.splitlines()]
    assert {line["kind"] for line in lines} == {"group_completed"}
    assert "tokens" not in lines[0]["samples"][0][0]
    whole = json.loads(run("cat", log, "--json", "--kind", "group_completed", "--limit", 1, "--samples").out)
    assert whole["samples"][0][0]["tokens"] == [0, 0, 0]


class Words:
    """A tokenizer."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(f"<{number}>" for number in ids)


WORDS = Words()


def no_words(ids: list[int]) -> str:
    raise KeyError(7)


def test_cat_shows_samples_and_their_tokens_as_text(run: Any, log: Path) -> None:
    arguments = ("cat", log, "--kind", "group_completed", "--limit", 1)
    plain = run(*arguments, "--samples").out
    assert 'prompt   "prompt 0"' in plain
    assert 'response "xxx"' in plain
    decoded = run(*arguments, "--tokenizer", "tests.test_log_commands:WORDS").out
    assert 'prompt   "prompt 0"' in decoded  # the engine gave it no tokens
    assert 'response "<0> <0> <0>"' in decoded
    assert '"(not decoded: KeyError(7))"' in run(*arguments, "--tokenizer", "tests.test_log_commands:no_words").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kind", "group_juged"], "--kind group_juged: no such kind of event; did you mean group_judged?"),
        (["--tokenizer", "nix"], "--tokenizer nix: no such file; give a tokenizer.json"),
        (["--tokenizer", "os:sep"], "--tokenizer os:sep: a str, which has no decode(ids)"),
        (["--tokenizer", "nix.nix:nix"], "nix"),
        (["--follow", "--rollout", "1"], "--follow goes with --kind, --limit and --json only"),
    ],
)
def test_cat_says_what_is_wrong_in_one_line(run: Any, log: Path, arguments: list[str], message: str) -> None:
    result = run("cat", log, *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert len(result.err.splitlines()) == 1


def test_cat_follows_a_log_that_is_being_written(run: Any, tmp_path: Path) -> None:
    events = record([Generate(engine()), rewarded([1.0])], BatchSpec(1)).events
    path = tmp_path / "run.mcap"
    with LogWriter(path) as writer:
        writer.write(events[0])
        writer.flush()

        def finish() -> None:
            for event in events[1:]:
                writer.write(event)
            writer.close()

        thread = threading.Thread(target=finish)
        thread.start()
        lines = run("cat", path, "--follow").out.splitlines()
        thread.join()
    assert len(lines) == len(events)


def test_check_passes_on_a_real_log(run: Any, log: Path) -> None:
    result = run("check", log)
    assert result.code == 0
    assert result.out.startswith("no violations in ")
    assert "digests: 2 verified, 0 not" in result.out
    assert "digests: 0 verified, 2 not" in run("check", log, "--light").out
    assert json.loads(run("check", log, "--json").out)["ok"] is True


def test_check_passes_on_what_is_stored_of_kept_groups_or_of_none(run: Any, tmp_path: Path) -> None:
    for payload, verified in (("kept", 2), ("none", 0)):
        path = tmp_path / f"{payload}.mcap"
        write(path, payload=payload)
        assert f"digests: {verified} verified" in run("check", path).out


def test_check_finds_violations(run: Any, tmp_path: Path) -> None:
    events = record([Generate(engine()), rewarded([1.0])], BatchSpec(1)).events
    path = tmp_path / "run.mcap"
    with LogWriter(path) as writer:
        for event in events:
            if event.kind != "group_ended":
                writer.write(event)
    result = run("check", path)
    assert result.code == 1
    assert f"seq: rollout 0: missing before it: {[e.kind for e in events].index('group_ended')}" in result.out
    assert "group 0: the batch was assembled, and it has not ended" in result.out
    assert "no more than a consequence" in result.out
    content = json.loads(run("check", path, "--json").out)
    assert content["ok"] is False
    assert {violation["rule"] for violation in content["violations"]} >= {"seq", "ledger", "batch"}


def test_check_and_recover_on_a_log_that_was_cut_off(run: Any, log: Path, tmp_path: Path) -> None:
    whole = log.read_bytes()
    cut, target = tmp_path / "cut.mcap", tmp_path / "whole.mcap"
    cut.write_bytes(whole[: len(whole) * 2 // 3])
    checked = run("check", cut)
    assert "no violations" in checked.out
    result = run("recover", cut, target)
    assert result.code == 0
    assert str(target) in result.out
    assert run("check", target).code == 0
    again = run("recover", cut, target)
    assert (again.code, "exists" in again.err) == (2, True)


def test_why(run: Any, log: Path) -> None:
    result = run("why", log, "group:1")
    assert result.code == 0
    assert "rejected (bad), at remaining 3 of target 2" in result.out
    assert run("why", log, "sample:0", "--evaluation").out.startswith("sample 0: execution")
    assert json.loads(run("why", log, "sample:3", "--json").out)["group_index"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sample:99"], "sample:99: not in this log; the nearest is "),
        (["17"], "'17': write sample:1234 (Sample.index) or group:17 (Group.index)"),
        (["group:1", "--rollout", "1"], "group:1: not in this log in rollout 1; the nearest is "),
    ],
)
def test_why_says_what_is_wrong(run: Any, log: Path, arguments: list[str], message: str) -> None:
    result = run("why", log, *arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(message)


def test_why_reads_the_same_of_a_log_as_of_its_events(log: Path) -> None:
    with LogReader(log) as reader:
        events = list(reader.events())
        for target in ("group:1", "group:2", "sample:0", "sample:5"):
            for options in ({}, {"rollout": 1}, {"evaluation": True}):
                try:
                    expected: Any = why(events, target, **options)
                except LookupError as error:
                    with pytest.raises(LookupError, match=re.escape(str(error))):
                        why(reader, target, **options)
                else:
                    assert why(reader, target, **options) == expected


def test_waste(run: Any, log: Path) -> None:
    result = run("waste", log, "--top", 1)
    assert result.code == 0
    assert "lost, dropped: bad" in result.out
    assert result.out.count("\ngroup ") == 1
    assert json.loads(run("waste", log, "--json").out)["lost"]["dropped: bad"]["tokens"] == 6


def test_diff(run: Any, log: Path, tmp_path: Path) -> None:
    same, other = tmp_path / "same.mcap", tmp_path / "other.mcap"
    shutil.copy(log, same)
    write(other, bad=(0,))
    assert run("diff", log, same).code == 0
    result = run("diff", log, other)
    assert result.code == 1
    assert "kept only in a: 0" in result.out
    assert json.loads(run("diff", log, other, "--json").out)["rollouts"][0]["only_b"] == [1]


def test_export(run: Any, log: Path, tmp_path: Path) -> None:
    lines, trace = tmp_path / "run.jsonl", tmp_path / "trace.json"
    assert run("export", log, lines, "--columns").code == 0
    with LogReader(log) as reader:
        assert len(lines.read_text().splitlines()) == len(list(reader.events()))
    assert run("export", log, trace, "--rollout", 1).code == 0
    assert {entry["name"] for entry in json.loads(trace.read_text())["traceEvents"]} >= {"rollout 1", "evaluation 1"}
    assert json.loads(run("export", log, "-", "--rollout", 0).out.splitlines()[0])["kind"] == "rollout_started"
    for arguments, message in (
        ((log, lines), "exists already"),
        ((log, tmp_path / "run.txt"), "its name does not tell a format"),
        ((log, tmp_path / "b.json", "--rollout", 9), "no rollout 9 in this log; the nearest is 1"),
        ((log, tmp_path / "no" / "b.json"), "No such file or directory"),
    ):
        result = run("export", *arguments)
        assert (result.code, message in result.err) == (2, True)
    assert run("export", log, trace.with_name("x"), "--format", "xml").code != 0


def test_slime_files_go_out_and_in(run: Any, log: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder, back = tmp_path / "debug", tmp_path / "back.mcap"
    assert run("export", log, folder, "--format", "slime").code == 0
    assert sorted(path.name for path in folder.iterdir()) == ["0.pt", "1.pt", "eval_1.pt"]
    assert "exists already" in run("export", log, folder, "--format", "slime").err
    assert run("import", folder / "0.pt", folder / "1.pt", folder / "eval_1.pt", back).code == 0
    assert "digests: 2 verified" in run("check", back).out
    with LogReader(log) as one, LogReader(back) as other:
        for number in (0, 1):
            kept = [group for group in one.rollout(number).groups() if group.outcome == "kept"]
            imported = list(other.rollout(number).groups())
            assert [group.index for group in imported] == sorted(group.index for group in kept)
            first: Sample = imported[0].samples[0]
            assert (list(first.tokens), first.reward) == ([kept[0].index] * 3, kept[0].samples[0].reward)

    (tmp_path / "bad.pt").write_bytes(b"nothing")
    half = tmp_path / "half.mcap"
    result = run("import", folder / "0.pt", tmp_path / "bad.pt", half)
    assert (result.code, "bad.pt: not a file that torch.save wrote" in result.err) == (2, True)
    assert not half.exists()
    assert run("import", half).code == 2
    assert "exists" in run("import", folder / "0.pt", back).err
    assert back.exists()


def test_slime_needs_torch_and_tokens(run: Any, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "none.mcap"
    write(bare, payload="none")
    assert "payload 'none'" in run("export", bare, tmp_path / "a", "--format", "slime").err
    monkeypatch.setitem(sys.modules, "torch", None)
    for arguments in (
        ("export", log, tmp_path / "b", "--format", "slime"),
        ("import", tmp_path / "0.pt", tmp_path / "c"),
    ):
        result = run(*arguments)
        assert (result.code, result.err) == (2, "torch is not installed: pip install 'rolloutbus[embedded]'\n")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("command", ["info", "cat", "check", "waste", "why", "diff", "export", "recover"])
def test_a_file_that_is_no_log(run: Any, tmp_path: Path, command: str) -> None:
    bad = tmp_path / "bad.mcap"
    second: dict[str, list[object]] = {
        "why": ["group:0"],
        "diff": [bad],
        "export": [tmp_path / "x.json"],
        "recover": [tmp_path / "x.mcap"],
    }
    for content in (None, b"", b"not a log at all"):
        if content is not None:
            bad.write_bytes(content)
        result = run(command, bad, *second.get(command, []))
        assert result.code == 2
        assert str(bad) in result.err
        assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize("command", list(commands.app))
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    if command.startswith("-"):
        return
    output = io.StringIO()
    with pytest.raises(SystemExit):
        commands.app([command, "--help"], console=Console(file=output, width=80))
    shown = output.getvalue() + capsys.readouterr().out
    assert f"rolloutbus log {command} " in shown


def test_nothing_breaks_where_the_output_ends_or_knows_no_unicode(log: Path, tmp_path: Path) -> None:
    path = tmp_path / "odd.mcap"

    async def main() -> None:
        async with Pipeline(
            some(200), [Generate(engine()), odd], BatchSpec(200), observers=[Recorder(path)], stall_after=None
        ) as pipeline:
            await anext(pipeline.rollouts())

    def odd(sample: Sample) -> None:
        sample.reward, sample.metadata["text"] = 1.0, "\u4f60\u597d"

    anyio.run(main, **virtual_time("asyncio"))
    program = "from eventbus.log.inspect.commands import app; app()"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", program, "cat", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=tmp_path,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0
    whole = subprocess.run(
        [sys.executable, "-c", program, "cat", str(path), "--kind", "stage_applied", "--limit", "400"],
        capture_output=True, env=environment, cwd=tmp_path, check=True,
    )  # fmt: skip
    assert b"\\u4f60\\u597d" in whole.stdout


def test_damage_is_told_on_standard_error(run: Any, log: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged.mcap"
    shutil.copy(log, path)
    content = bytearray(path.read_bytes())
    with LogReader(path) as reader:
        chunk = max(reader._light, key=lambda chunk: chunk.size)
        place = chunk.position + chunk.length - chunk.size // 2
    content[place] ^= 0xFF
    path.write_bytes(bytes(content))
    result, checked = run("waste", path), run("check", path)
    assert (result.code, checked.code) == (0, 1)
    assert result.err.startswith(f"{path}: damaged: byte {chunk.position} to ")
    assert f"byte {chunk.position} to " in checked.out
    assert "1 damaged place" in checked.out
    assert run("info", path).code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("cat", "--limit", "-1"),
        ("cat", "--limit", "2.5"),
        ("cat", "--since", "inf"),
        ("cat", "--until", "nan"),
        ("waste", "--top", "-1"),
        ("diff", "--limit", "-1"),
    ],
)
def test_numbers_out_of_range(run: Any, log: Path, arguments: tuple[str, ...]) -> None:
    name, *options = arguments
    paths = [log, log] if name == "diff" else [log]
    result = run(name, *paths, *options)
    assert (result.code, result.out) == (2, "")
    assert "is no " in result.err


@pytest.mark.parametrize("arguments", [("cat",), ("why", "group:0"), ("export", "-")])
def test_a_rollout_that_is_not_there(run: Any, log: Path, arguments: tuple[str, ...]) -> None:
    name, *rest = arguments
    result = run(name, log, *rest, "--rollout", 9)
    assert (result.code, result.out) == (2, "")
    assert "no rollout 9 in this log; the nearest is 1" in result.err


def test_a_reason_with_control_characters_stays_in_its_line(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.mcap"
    with LogWriter(path) as writer:
        writer.write(
            GroupEnded(seq=0, time_ns=0, rollout_id=0, group_index=0, outcome="dropped", reason="a\n\x1b[31mb")
        )
    result = run("cat", path)
    assert result.out.count("\n") == 1
    assert "dropped, a??[31mb" in result.out


def test_arrays_that_differ_are_no_error(run: Any, tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    paths = [tmp_path / "a.mcap", tmp_path / "b.mcap"]
    for path, count in zip(paths, (3, 4), strict=True):
        with LogWriter(path) as writer:
            for seq in range(2):
                changed = {"metadata": {"array": numpy.arange(count + seq)}}
                writer.write(
                    StageApplied(
                        seq=seq, time_ns=0, rollout_id=0, group_index=seq, stage="s", seconds=0.0, changed=changed
                    )
                )
    result = run("diff", *paths)
    assert result.code == 1
    assert "changed.metadata.array" in result.out


@pytest.mark.parametrize("name", ["out.jsonl", "out.json"])
def test_an_export_that_fails_leaves_nothing(
    run: Any, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def events(self: LogReader, *arguments: Any, **options: Any) -> Any:
        yield from [next(found(self))]
        raise KeyboardInterrupt

    found = LogReader.events
    monkeypatch.setattr(LogReader, "events", events)
    assert run("export", log, tmp_path / name).code == 130
    assert not (tmp_path / name).exists()


def test_an_import_that_is_interrupted_leaves_nothing(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("eventbus.log.inspect.slime.load_record", interrupted)
    (tmp_path / "0.pt").touch()
    assert run("import", tmp_path / "0.pt", tmp_path / "run.mcap").code == 130
    assert not (tmp_path / "run.mcap").exists()


def test_a_metadata_record_that_is_missing_is_not_made_up(run: Any, log: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.mcap"
    whole = log.read_bytes()
    path.write_bytes(
        whole.replace(b"\x0arolloutbus\x00\x00", b"\x0arolloutbux\x00\x00", 1).replace(b"started_ns", b"startex_ns", 1)
    )
    result = run("info", path)
    assert "1970" not in result.out
    assert "damaged" in result.err


def test_a_standard_output_that_is_closed(log: Path) -> None:
    for arguments in ("info", "cat --json", "check --json"):
        name, *options = arguments.split()
        program = "from eventbus.log.inspect.commands import app; app()"
        command = f'{sys.executable} -c "{program}" {name} {log} {" ".join(options)} >&-'
        done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT, check=False)
        assert (done.returncode, done.stderr) == (0, "")
