"""Exports and imports: JSON lines, the trace, and slime's debug files."""

from __future__ import annotations

import io
import json
import pickle
import re
import zipfile
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus.batching import BatchSpec
from eventbus.codecs import Opaque
from eventbus.columns import LossMask
from eventbus.events import StageApplied
from eventbus.group import Group
from eventbus.log import LogError
from eventbus.log.inspect import check, slime
from eventbus.log.inspect.export import json_value, write_jsonl, write_trace
from eventbus.sample import Sample, SampleStatus, WeightSpan
from middleware import Generate
from tests.streams import engine, rewarded, strict
from tests.test_log_check import Whole, record, retried


@pytest.fixture(scope="module")
def simple() -> Whole:
    stages = [Generate(engine(lambda s: float(s.index or 0), length=3)), rewarded([1.0, 0.0]), strict([1])]
    return record(stages, BatchSpec(2, over_sampling=3), stop=2)


# JSON lines


def test_each_event_is_a_line(simple: Whole) -> None:
    out = io.StringIO()
    assert write_jsonl(simple.events, out) == len(simple.events)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["kind"] for line in lines] == [event.kind for event in simple.events]
    assert [line["seq"] for line in lines] == list(range(len(lines)))
    completed = next(line for line in lines if line["kind"] == "group_completed")
    assert completed["samples"][0][0]["response"] == "xxx"
    assert completed["samples"][0][0]["columns"] == {"tokens": 3, "rollout_log_probs": 3}
    assert "tokens" not in completed["samples"][0][0]


def test_token_columns_are_written_on_demand(simple: Whole) -> None:
    out = io.StringIO()
    write_jsonl(simple.of("group_completed")[:1], out, samples=simple.samples)
    (sample,) = json.loads(out.getvalue())["samples"][0]
    assert (sample["tokens"], sample["rollout_log_probs"]) == ([0, 0, 0], [-0.5, -0.5, -0.5])


def test_values_that_json_does_not_know() -> None:
    odd = {
        7: float("nan"),
        (1, 2): float("-inf"),
        "raw": b"\x00",
        "status": SampleStatus.FAILED,
        "set": {1},
        "opaque": Opaque("my.Image", b"12345"),
        "mask": LossMask([1, 0]),
    }
    assert json_value(odd) == {
        "7": None,
        "[1, 2]": None,
        "raw": "AA==",
        "status": "failed",
        "set": [1],
        "opaque": {"type": "my.Image", "bytes": 5},
        "mask": [1, 0],
    }
    assert type(json_value(SampleStatus.FAILED)) is str


def test_arrays_become_lists() -> None:
    np = pytest.importorskip("numpy")
    assert json_value({"a": np.arange(3), "b": np.float32(0.5)}) == {"a": [0, 1, 2], "b": 0.5}


# The trace


def trace(events: Any) -> list[dict[str, Any]]:
    out = io.StringIO()
    count = write_trace(events, out)
    entries: list[dict[str, Any]] = json.loads(out.getvalue())["traceEvents"]
    assert len(entries) == count
    return entries


def assert_lanes_are_nested(entries: list[dict[str, Any]]) -> None:
    lanes = defaultdict(list)
    for entry in entries:
        if entry["ph"] == "X" and entry["pid"] == 1:
            lanes[entry["tid"]].append((entry["ts"], entry["ts"] + entry["dur"]))
    for spans in lanes.values():
        spans.sort(key=lambda span: (span[0], -span[1]))
        open_: list[float] = []
        for begin, end in spans:
            while open_ and open_[-1] <= begin + 0.002:
                open_.pop()
            assert not open_ or end <= open_[-1] + 0.002
            open_.append(end)


def test_a_lane_per_worker_and_an_arrow_per_sample(simple: Whole) -> None:
    entries = trace(simple.events)
    applied = [event for event in simple.of("stage_applied") if event.worker is not None]
    slices = Counter((entry["tid"], entry["name"]) for entry in entries if entry["ph"] == "X" and entry["pid"] == 1)
    assert slices == Counter((event.worker, event.stage) for event in applied)
    named = {entry["tid"] for entry in entries if entry["name"] == "thread_name" and entry["pid"] == 1}
    assert named == {event.worker for event in applied}
    assert_lanes_are_nested(entries)
    arrows = defaultdict(list)
    for entry in entries:
        if entry["ph"] in "stf":
            arrows[entry["id"]].append(entry["ph"])
    assert len(arrows) == sum(len(event.executions) for event in simple.of("group_submitted"))
    for phases in arrows.values():
        assert (phases[0], phases[-1], set(phases[1:-1]) <= {"t"}) == ("s", "f", True)
    assert [entry["name"] for entry in entries if entry.get("cat") == "rollout"] == ["rollout 0", "rollout 1"]
    assert all(entry["ts"] >= 0 or entry["ph"] == "X" for entry in entries if "ts" in entry)


def test_a_wrapper_holds_what_it_ran() -> None:
    def applied(seq: int, stage: str, end: float, seconds: float) -> StageApplied:
        return StageApplied(
            seq=seq, time_ns=int(end * 1e9), rollout_id=0, group_index=0, index=0, execution=0, stage=stage,
            seconds=seconds, worker=1,
        )  # fmt: skip

    # The wrapper's own begin is known a little late.
    entries = trace([applied(0, "before", 1.0, 1.0), applied(1, "inner", 3.0, 1.5), applied(2, "wrapper", 4.0, 2.4)])
    spans = {entry["name"]: (entry["ts"], entry["ts"] + entry["dur"]) for entry in entries if entry["ph"] == "X"}
    assert spans["wrapper"][0] == spans["inner"][0]
    assert spans["before"][1] <= spans["wrapper"][0]
    assert_lanes_are_nested(entries)


def test_a_stream_that_ends_early_has_a_slice_for_its_rollout(simple: Whole) -> None:
    entries = trace(simple.events[:10])
    assert [entry["args"] for entry in entries if entry.get("cat") == "rollout"] == [{"unfinished": True}]
    assert [entry["name"] for entry in trace([])] == ["process_name", "process_name"]


# slime's files


torch = pytest.importorskip("torch")


def sample(index: int, **fields: Any) -> Sample:
    defaults: dict[str, Any] = {
        "group_index": index // 2,
        "index": index,
        "rollout_id": index,
        "prompt": f"prompt {index // 2}",
        "label": "4",
        "tokens": [9, 1, 2],
        "response": "ab",
        "response_length": 2,
        "rollout_log_probs": [-0.5, -0.25],
        "loss_mask": [1, 0],
        "reward": float(index),
        "status": SampleStatus.COMPLETED,
        "weight_versions": [WeightSpan("v1", 0, 2)],
        "metadata": {"source": "test"},
    }
    return Sample(**(defaults | fields))


def groups(*samples: Sample) -> list[Group]:
    found: dict[int, Group] = {}
    for each in samples:
        index = each.group_index or 0
        found.setdefault(index, Group(index, each.prompt, [])).executions.append([each])
    return list(found.values())


def test_the_file_is_as_slime_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "3.pt"
    assert slime.save_record(path, 3, groups(sample(0), sample(1))) == 2
    content = torch.load(path, weights_only=True)
    assert content["rollout_id"] == 3
    first = content["samples"][0]
    assert first["tokens"] == [9, 1, 2]
    assert first["loss_mask"] == [1, 0]
    assert (first["status"], first["weight_versions"]) == ("completed", ["v1"])
    assert (first["spec_info"], first["prefix_cache_info"]) == ({}, {})  # its reader calls .get on them
    assert type(first["status"]) is str


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    experts = np.arange(4, dtype=np.int32).reshape(2, 2)
    written = [sample(0, rollout_routed_experts=experts), sample(1, multimodal_train_inputs={"pixels": torch.ones(2)})]
    path = tmp_path / "eval_3.pt"
    slime.save_record(path, 3, groups(*written))
    record = slime.load_record(path)
    assert (record.rollout_id, record.evaluation) == (3, True)
    first, second = record.samples
    assert first.rollout_routed_experts.tolist() == [[0, 1], [2, 3]]
    assert second.multimodal_train_inputs is not None
    assert second.multimodal_train_inputs["pixels"].tolist() == [1.0, 1.0]
    first.rollout_routed_experts = written[0].rollout_routed_experts = None
    assert first == written[0]


def test_arrays_of_another_numpy_are_read(tmp_path: Path) -> None:
    """The major versions of numpy call the functions that make an array by different names."""
    np = pytest.importorskip("numpy")
    slime.save_record(tmp_path / "0.pt", 0, groups(sample(0, rollout_routed_experts=np.arange(3))))
    with zipfile.ZipFile(tmp_path / "0.pt") as archive, zipfile.ZipFile(tmp_path / "1.pt", "w") as renamed:
        for name in archive.namelist():
            content = archive.read(name)
            if name.endswith("data.pkl"):
                old, new = b"numpy._core.", b"numpy.core."
                assert old in content or new in content
                content = content.replace(old, new) if old in content else content.replace(new, old)
            renamed.writestr(name, content)
    (read,) = slime.load_record(tmp_path / "1.pt").samples
    assert read.rollout_routed_experts.tolist() == [0, 1, 2]


def save(path: Path, **fields: Any) -> Path:
    whole = {"prompt": "p", "tokens": [1], "response": "x", "response_length": 1, "status": "completed"}
    torch.save({"rollout_id": 0, "samples": [whole | fields]}, path)
    return path


def test_what_slime_has_and_we_have_not_becomes_metadata(tmp_path: Path) -> None:
    path = save(tmp_path / "0.pt", mopd_teacher_log_probs={"math": [-1.0]}, weight_versions=["v1", "v2"])
    (read,) = slime.load_record(path).samples
    assert read.metadata == {"mopd_teacher_log_probs": {"math": [-1.0]}, "weight_versions": ["v1", "v2"]}
    assert read.weight_versions == []  # which tokens came from which is not said


class Evil:
    ran = False

    def __reduce__(self) -> Any:
        return setattr, (Evil, "ran", True)


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    path = save(tmp_path / "0.pt", metadata={"x": Evil()})
    with pytest.raises(LogError, match=r"0\.pt: holds a (builtins\.)?setattr, which would have to be run to be read"):
        slime.load_record(path)
    plain = tmp_path / "plain.pt"
    plain.write_bytes(pickle.dumps({"rollout_id": 0, "samples": [Evil()]}))
    with pytest.raises(LogError, match=r"plain\.pt"):
        slime.load_record(plain)
    assert not Evil.ran


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "not a debug record of slime"),
        ({"rollout_id": 0}, "not a debug record of slime"),
        ({"rollout_id": 0, "samples": [1]}, r"samples\[0\]: a int, expected the dict of a sample"),
        ({"rollout_id": 0, "samples": [{"status": "odd"}]}, r"samples\[0\]: 'odd' is not a valid SampleStatus"),
        (
            {"rollout_id": 0, "samples": [{"tokens": [1], "response_length": 5}]},
            r"samples\[0\]: .*response_length is 5",
        ),
        ({"rollout_id": 0, "samples": [{"tokens": ["a"]}]}, r"samples\[0\]: "),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "0.pt")
    with pytest.raises(LogError, match=message):
        slime.load_record(tmp_path / "0.pt")


@given(st.data())
def test_a_damaged_file_is_an_error_of_one_kind(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    whole = save(folder / "0.pt").read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    cut = data.draw(st.booleans())
    flipped = whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :]
    path = folder / "1.pt"
    path.write_bytes(whole[:place] if cut else flipped)
    with pytest.raises(LogError, match=re.escape(str(path))) if cut else suppress(LogError):
        slime.load_record(path)


def test_a_missing_file_and_an_opaque_value_are_named(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"9\.pt: cannot be read: No such file"):
        slime.load_record(tmp_path / "9.pt")
    odd = sample(0, metadata={"deep": [Opaque("my.Image", b"1")]})
    with pytest.raises(LogError, match=r"sample 0: metadata\.deep\[0\] is a my\.Image, which is not known here"):
        slime.save_record(tmp_path / "0.pt", 0, groups(odd))
    with pytest.raises(LogError, match="cannot be written"):
        slime.save_record(tmp_path / "none" / "0.pt", 0, groups(sample(0)))


def test_imported_rollouts_are_a_stream_that_passes_check() -> None:
    records = [
        (slime.DebugRecord(0, False, [sample(0), sample(1), sample(2), sample(3)]), 10),
        (slime.DebugRecord(1, False, [sample(4), sample(0, rollout_id=0)]), 20),  # ids of a run that began anew
        (slime.DebugRecord(1, True, [sample(0, rollout_id=None), sample(1, rollout_id=None)]), 30),
    ]
    shown = list(slime.events_of(records))
    events = [each.event for each in shown]
    samples = {each.event.seq: each.samples for each in shown if each.samples is not None}
    report = check(events, samples=lambda event: samples[event.seq])
    assert report.violations == []
    assert (report.rollouts, report.digests) == (3, 2)
    generated: Any = next(event for event in events if event.kind == "sample_generated")
    assert generated.samples[0][0].sample.reward is None
    last: Any = events[-1]
    summary = last.summary
    assert (summary.evaluation, summary.kept, summary.samples, summary.reward_mean) == (True, 1, 2, 0.5)


def test_fanned_out_and_numberless_samples_can_be_imported() -> None:
    fanned = [sample(0), sample(2, group_index=0, rollout_id=0), sample(1)]
    bare = [Sample(response="x", reward={"math": 1.0}) for _ in range(3)]
    shown = list(slime.events_of([(slime.DebugRecord(0, False, fanned), 0), (slime.DebugRecord(1, False, bare), 0)]))
    completed = [each for each in shown if each.event.kind == "group_completed"]
    assert [list(map(len, each.samples or [])) for each in completed] == [[2, 1], [1], [1], [1]]
    assert check([each.event for each in shown]).violations == []


def test_a_trace_marks_the_attempts_that_failed() -> None:
    out = io.StringIO()
    write_trace(retried(), out)
    trace = json.loads(out.getvalue())
    entries = trace["traceEvents"] if isinstance(trace, dict) else trace
    [mark] = [entry for entry in entries if entry["name"].startswith("attempt")]
    assert mark["name"] == "attempt failed at http://a"
    assert mark["args"]["error"] == "http://a answered 500"
