from __future__ import annotations

import importlib.util
import math
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eventbus import codecs
from eventbus.columns import Column, LogProbs, LossMask, Tokens
from eventbus.events import (
    AttemptEnded,
    BatchAssembled,
    BatchTrained,
    Event,
    EventHead,
    GroupCompleted,
    GroupEnded,
    GroupJudged,
    GroupSubmitted,
    RolloutFinished,
    RolloutStarted,
    SampleGenerated,
    StageApplied,
    StageFailed,
    UnknownEvent,
    WeightsUpdated,
    light,
)
from eventbus.group import Batch, Group, Summary, Verdict
from eventbus.sample import Sample, SampleStatus, WeightSpan
from eventbus.wire import SCHEMA_VERSION, Opaque, WireError, decode, encode, register

# What can be sent

int32 = st.integers(-(2**31), 2**31 - 1)
floats = st.floats(allow_nan=False)
texts = st.text(max_size=8)  # without surrogates, which are no text
dtypes = st.sampled_from(["<i8", ">f4", "float16", "bool", "complex64", "<U3", "S2", "datetime64[s]"])
arrays = st.builds(np.zeros, st.lists(st.integers(0, 3), max_size=3), dtypes)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | floats | texts | st.binary(max_size=8)
plain = st.recursive(
    scalars | st.lists(int32, max_size=4).map(Tokens),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(texts | st.integers(-5, 5) | st.none(), inner, max_size=3)
    ),
    max_leaves=6,
)
dicts = st.dictionaries(texts | st.integers(-5, 5), plain, max_size=3)
masks = st.none() | st.lists(st.integers(-128, 127), max_size=5).map(LossMask)
log_probs = st.none() | st.lists(st.floats(width=32, allow_nan=False), max_size=5).map(LogProbs)
spans = st.lists(st.builds(WeightSpan, texts, st.integers(0, 9), st.integers(0, 9)), max_size=2)
counts = st.integers(0, 2**40)
ids = st.none() | counts
samples = st.builds(
    Sample,
    group_index=ids,
    index=ids,
    rollout_id=ids,
    prompt=texts | st.lists(st.dictionaries(texts, plain, max_size=2), max_size=2),
    tokens=st.lists(int32, max_size=8).map(Tokens),
    response=texts,
    response_length=counts,
    label=plain,
    reward=scalars | st.dictionaries(texts, floats, max_size=2),
    loss_mask=masks,
    rollout_log_probs=log_probs,
    teacher_log_probs=log_probs,
    weight_versions=spans,
    status=st.sampled_from(SampleStatus),
    metadata=dicts,
    session_id=st.none() | texts,
    remove_sample=st.booleans(),
    train_metadata=st.none() | dicts,
    multimodal_inputs=st.none() | dicts,
    multimodal_train_inputs=st.none() | dicts,
    rollout_routed_experts=plain,
    non_generation_time=floats,
    spec_info=plain,
)
verdicts = st.builds(Verdict, st.booleans(), st.none() | texts, st.booleans(), st.none() | floats, ids, ids)
groups = st.builds(
    Group, counts, texts, st.lists(st.lists(samples, max_size=2), max_size=2), verdict=st.none() | verdicts
)
summaries = st.builds(
    Summary, counts, dropped=st.dictionaries(texts, counts, max_size=2), reward_mean=st.none() | floats
)
batches = st.builds(Batch, counts, st.lists(groups, max_size=2), summaries)
head: dict[str, Any] = {"seq": counts, "time_ns": counts, "rollout_id": counts, "evaluation": st.booleans()}
marks = st.dictionaries(texts, st.none() | st.tuples(counts, counts), max_size=2)
numbers = st.lists(counts, max_size=3)
settings_ = st.dictionaries(texts, plain, max_size=3)
shown = st.lists(st.lists(samples.map(light), max_size=2), max_size=2)
one: dict[str, Any] = {"group_index": counts, "index": counts, "execution": counts, "seconds": floats}
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(RolloutStarted, **head, target=counts, group_size=counts, batch=settings_),
    st.builds(RolloutFinished, **head, summary=st.none() | summaries, error=st.none() | texts),
    st.builds(
        GroupSubmitted,
        **head,
        group_index=counts,
        round=counts,
        origin=st.sampled_from(["new", "carried", "recycled", "restarted"]),
        executions=numbers,
        indices=numbers,
        samples=shown,
    ),
    st.builds(
        SampleGenerated,
        **head,
        **one,
        stage=texts,
        status=st.sampled_from(SampleStatus),
        response_length=counts,
        weight_versions=spans,
        samples=shown,
    ),
    st.builds(
        StageApplied,
        **head,
        **one,
        child=counts,
        stage=texts,
        waited=floats,
        attempts=counts,
        worker=st.none() | counts,
        changed=st.dictionaries(texts, plain),
        columns=marks,
        dropped=st.none() | texts,
        samples=shown,
    ),
    st.builds(
        GroupCompleted,
        **head,
        group_index=counts,
        at=counts,
        samples=shown,
    ),
    st.builds(GroupJudged, **head, group_index=counts, stage=texts, verdict=verdicts, held=st.booleans()),
    st.builds(
        GroupEnded,
        **head,
        group_index=counts,
        outcome=st.sampled_from(["kept", "surplus", "carried", "dropped", "failed", "cancelled", "recycled"]),
        reason=st.none() | texts,
        by_fallback=st.booleans(),
    ),
    st.builds(
        StageFailed,
        **head,
        group_index=ids,
        index=ids,
        execution=ids,
        stage=texts,
        error=texts,
        traceback=texts,
        policy=st.sampled_from(["fail", "resubmit", "raise"]),
    ),
    st.builds(BatchAssembled, **head, groups=numbers, samples=counts, loss_tokens=counts, digest=texts),
    st.builds(BatchTrained, **head, metrics=st.dictionaries(texts, floats), weight_version=st.none() | texts),
    st.builds(
        WeightsUpdated,
        **head,
        version=texts,
        pause=st.none() | texts,
        workers=st.lists(texts),
        missed_by=st.lists(texts),
        seconds=st.none() | floats,
    ),
    st.builds(
        AttemptEnded,
        **head,
        group_index=ids,
        index=ids,
        execution=ids,
        stage=st.none() | texts,
        attempt=counts,
        worker=texts,
        rid=texts,
        outcome=st.sampled_from(["answered", "failed", "aborted"]),
        error=st.none() | texts,
        tokens=counts,
        seconds=floats,
    ),
    st.builds(UnknownEvent, **head, kind=texts),
)  # fmt: skip


def _back(metadata: Any) -> Any:
    """`metadata["x"]` after a trip."""
    return decode(encode(Sample(metadata={"x": metadata})), Sample).metadata["x"]


# Round trips


@given(samples)
def test_samples_come_back(sample: Sample) -> None:
    twin = decode(encode(sample), Sample)
    assert twin == sample
    assert type(twin.tokens) is Tokens


@given(groups)
def test_groups_come_back(group: Group) -> None:
    assert decode(encode(group), Group) == group


@given(batches)
def test_batches_come_back(batch: Batch) -> None:
    batch._acknowledge = print  # type: ignore[attr-defined]
    assert decode(encode(batch), Batch) == batch


@given(events)
def test_events_come_back(event: Event) -> None:
    assert decode(encode(event)) == event
    assert decode(encode(event), type(event)) == event


@given(events)
def test_the_head_is_read_from_any_event(event: Event) -> None:
    head = decode(encode(event), EventHead)
    assert (head.seq, head.time_ns, head.rollout_id) == (event.seq, event.time_ns, event.rollout_id)


@given(arrays)
def test_arrays_come_back(array: np.ndarray[Any, Any]) -> None:
    twin = _back([array])[0]
    assert twin.dtype == array.dtype
    assert twin.shape == array.shape
    assert twin.tobytes() == array.tobytes()
    assert twin.flags.writeable


@pytest.mark.parametrize(
    "array", [np.arange(6).reshape(2, 3).T, np.arange(9)[::2], np.asfortranarray(np.ones((2, 3))), np.array([math.nan])]
)
def test_arrays_of_any_memory_order_come_back(array: np.ndarray[Any, Any]) -> None:
    np.testing.assert_array_equal(_back(array), array)


@pytest.mark.parametrize(
    ("number", "plain"),
    [(np.float32(0.5), 0.5), (np.float64(0.1), 0.1), (np.int64(-3), -3), (np.bool_(True), True), (np.str_("a"), "a")],
)
def test_numpy_numbers_come_back_as_python_numbers(number: Any, plain: Any) -> None:
    assert _back(number) == plain
    assert type(_back(number)) is type(plain)


def test_numpy_numbers_are_taken_where_python_numbers_are_due() -> None:
    sample = Sample(response_length=np.int64(3), reward=np.float32(0.5), non_generation_time=np.float64(2))  # type: ignore[arg-type]
    assert decode(encode(sample), Sample) == Sample(response_length=3, reward=0.5, non_generation_time=2.0)


@pytest.mark.parametrize("number", [np.longdouble(1.5), np.complex64(1j), np.datetime64("2026-01-01")])
def test_numpy_numbers_that_python_lacks_come_back_as_arrays(number: Any) -> None:
    assert _back(number).shape == ()
    assert _back(number)[()] == number


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_non_finite_rewards_come_back(reward: float) -> None:
    twin = decode(encode(Sample(reward={"a": reward})), Sample)
    assert struct.pack("d", twin.reward["a"]) == struct.pack("d", reward)


def test_non_finite_log_probs_come_back() -> None:
    column = LogProbs([math.nan, -math.inf])
    twin = decode(encode(Sample(rollout_log_probs=column)), Sample).rollout_log_probs
    assert twin is not None
    assert twin.tobytes() == column.tobytes()


@pytest.mark.parametrize(
    ("value", "back"),
    [
        ((1, (2,)), [1, [2]]),
        ({3}, [3]),
        ({(1, 2): "a"}, {(1, 2): "a"}),
        ({1: {2: {None: 3}}}, {1: {2: {None: 3}}}),
        (SampleStatus.FAILED, "failed"),
        (WeightSpan("1", 0, 2), ["1", 0, 2]),
        (Verdict(True), {"kept": True}),
        (b"\0", b"\0"),
    ],
)
def test_what_comes_back_of_other_values(value: Any, back: Any) -> None:
    assert _back(value) == back


def test_int_keys_of_metadata_come_back() -> None:
    assert decode(encode(Sample(metadata={1: "a"})), Sample).metadata == {1: "a"}


# Layout


def test_defaults_are_left_out() -> None:
    assert msgspec.msgpack.decode(encode(Sample(index=1)))[1].keys() <= {"index", "tokens"}


def test_a_message_begins_with_the_version() -> None:
    assert msgspec.msgpack.decode(encode(Sample()))[0] == SCHEMA_VERSION


@pytest.mark.parametrize(
    ("code", "column", "layout"),
    [(1, Tokens([1, -1]), "<2i"), (2, LogProbs([0.5, -1]), "<2f"), (3, LossMask([1, 0]), "<2b")],
)
def test_columns_are_raw_little_endian_bytes(code: int, column: Column[Any], layout: str) -> None:
    data = struct.pack(layout, *column)
    assert msgspec.msgpack.decode(encode(column))[1] == msgspec.msgpack.Ext(code, data)


def test_a_decoded_column_is_a_copy() -> None:
    data = bytearray(encode(Sample(tokens=Tokens([1, 2]))))
    sample = decode(data, Sample)
    data[:] = bytes(len(data))
    sample.tokens.append(3)
    assert sample.tokens == [1, 2, 3]


def test_importing_it_imports_neither_numpy_nor_torch() -> None:
    code = "import sys, eventbus.wire; print([name for name in ('numpy', 'torch') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# Newer writers


class _Newer(msgspec.Struct, tag_field="kind", tag="rollout_started"):
    seq: int = 1
    time_ns: int = 2
    rollout_id: int = 3
    target: int = 4
    group_size: int = 5
    priority: dict[str, Any] = msgspec.field(default_factory=lambda: {"deep": [msgspec.msgpack.Ext(99, b"?")]})


class _NewerKind(_Newer, tag_field="kind", tag="group_split"): ...


def _from_version(version: int, value: Any) -> bytes:
    return msgspec.msgpack.encode((version, value))


def test_unknown_fields_are_skipped() -> None:
    event = decode(_from_version(2, _Newer()))
    assert event == RolloutStarted(seq=1, time_ns=2, rollout_id=3, target=4, group_size=5)


def test_an_unknown_kind_decodes_to_its_head() -> None:
    event = UnknownEvent(seq=1, time_ns=2, rollout_id=3, kind="group_split")
    assert decode(_from_version(2, _NewerKind())) == event


def test_a_known_kind_with_a_bad_field_is_no_unknown_event() -> None:
    with pytest.raises(WireError, match=r"Event: Expected `int`, got `str` - at `\$.target`"):
        decode(_from_version(1, _Newer(target="all")))  # type: ignore[arg-type]


def test_a_newer_message_that_does_not_decode_says_so() -> None:
    with pytest.raises(WireError, match="schema version 7, this reads up to 1: upgrade rolloutbus"):
        decode(_from_version(7, {"index": "one"}), Sample)


@pytest.mark.parametrize("version", [0, -1, "1", None])
def test_there_is_no_such_version(version: Any) -> None:
    with pytest.raises(WireError, match=r"Sample: Expected `int`"):
        decode(_from_version(version, {}), Sample)


# Garbled bytes


@given(st.binary(max_size=64) | st.binary(max_size=64).map(lambda data: b"\x92\x01" + data))
@example(b"\x92\x01" + b"\x91" * 100_000)
@example(b"\x92\x01\xdd\xff\xff\xff\xff")
@example(b"\x92\x01\x81\xd4\x01\x01\x01")
def test_any_bytes_decode_or_raise_wire_error(data: bytes) -> None:
    for kind in (Event, Sample, Group, Batch, object):
        try:
            decode(data, kind)
        except WireError as error:
            assert str(error)  # noqa: PT017


@given(samples | groups | events, st.data())
def test_any_truncation_raises_wire_error(value: Any, data: st.DataObject) -> None:
    message = encode(value)
    with pytest.raises(WireError):
        decode(message[: data.draw(st.integers(0, len(message) - 1))], type(value))


@given(samples, st.data())
def test_any_flipped_byte_decodes_or_raises_wire_error(sample: Sample, data: st.DataObject) -> None:
    message = bytearray(encode(sample))
    message[data.draw(st.integers(0, len(message) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decode(message, Sample)
    except WireError as error:
        assert str(error)  # noqa: PT017


def test_an_error_says_at_which_byte() -> None:
    with pytest.raises(WireError, match=r"Sample: MessagePack data is malformed: trailing characters \(byte \d+\)"):
        decode(encode(Sample()) + b"\0", Sample)


def test_an_error_says_at_which_field() -> None:
    with pytest.raises(WireError, match=r"Group: Expected `str`, got `int` - at `\$.executions\[0\]\[0\].response`"):
        decode(encode(Group(1, "p", [[Sample(response=3)]])), Group)  # type: ignore[arg-type]


def test_a_column_with_a_part_of_a_number_names_its_field() -> None:
    message = _from_version(1, {"index": 1, "tokens": msgspec.msgpack.Ext(1, b"\0" * 7)})
    with pytest.raises(WireError, match=r"Sample: column: .*not a multiple of item size - at `\$.tokens`"):
        decode(message, Sample)


def test_a_column_of_another_type_names_its_field() -> None:
    with pytest.raises(WireError, match=r"Expected `LossMask`, got `LogProbs` - at `\$.loss_mask`"):
        decode(_from_version(1, {"loss_mask": msgspec.msgpack.Ext(2, b"\0" * 4)}), Sample)


def test_damage_in_a_nested_value_is_an_error() -> None:
    message = encode(Sample(metadata={"x": Tokens([1])})).replace(b"\xd6\x01\x01\0\0\0", b"\xc7\x03\x01\0\0\0")
    with pytest.raises(WireError, match=r"Sample: column: .*not a multiple of item size"):
        decode(message, Sample)


@pytest.mark.parametrize(
    ("head", "size", "message"),
    [
        (["<i8", [2]], 8, "buffer is too small"),
        (["<i8", [1]], 16, "16 bytes for shape"),
        (["O", [1]], 8, "objects do not travel"),
        (["<i8", [2**62]], 8, "too (small|big|large)"),
        ("<i8", 8, "numpy.ndarray"),
        (["nonsense", [1]], 8, "nonsense"),
    ],
)
def test_an_array_that_lies_about_itself(head: Any, size: int, message: str) -> None:
    payload = msgspec.msgpack.encode(["numpy.ndarray", head, bytes(size)])
    with pytest.raises(WireError, match=message):
        decode(_from_version(1, {"metadata": {"x": msgspec.msgpack.Ext(16, payload)}}), Sample)


# Codecs


class Point:
    def __init__(self, x: int, y: int) -> None:
        self.x, self.y = x, y


class Nested(Point): ...


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    for name in ("_names", "_packers", "_unpackers"):
        monkeypatch.setattr(codecs, name, dict(getattr(codecs, name)))


def _register_point() -> None:
    register(Point, "tests.Point", lambda p: ([p.x], bytes([p.y])), lambda head, data: Point(head[0], data[0]))


@pytest.mark.usefixtures("registry")
def test_a_registered_type_comes_back() -> None:
    _register_point()
    twin = _back({"deep": [Point(1, 2)]})["deep"][0]
    assert type(twin) is Point
    assert (twin.x, twin.y) == (1, 2)


@pytest.mark.usefixtures("registry")
def test_a_codec_serves_subclasses() -> None:
    _register_point()
    assert type(_back(Nested(1, 2))) is Point


@pytest.mark.usefixtures("registry")
def test_a_head_may_hold_payloads() -> None:
    _register_point()
    register(
        Nested, "tests.Nested", lambda p: ({"array": np.arange(p.x)}, b""), lambda head, data: Nested(*head["array"])
    )
    twin = _back(Nested(2, 0))
    assert (type(twin), twin.x, twin.y) == (Nested, 0, 1)


@pytest.mark.usefixtures("registry")
def test_the_users_codec_goes_before_the_built_in_one() -> None:
    register(np.ndarray, "tests.array", lambda array: (len(array), b""), lambda head, data: np.zeros(head))
    assert _back(np.ones(2)).tolist() == [0, 0]


@pytest.mark.usefixtures("registry")
def test_a_name_belongs_to_one_type() -> None:
    _register_point()
    _register_point()  # the same again is fine
    with pytest.raises(ValueError, match=r"register\(Nested\): the name 'tests.Point' belongs to Point already"):
        register(Nested, "tests.Point", lambda p: (None, b""), lambda head, data: Nested(0, 0))


@pytest.mark.parametrize("cls", [Verdict, dict, SampleStatus])
def test_a_type_that_msgspec_encodes_takes_no_codec(cls: type[Any]) -> None:
    with pytest.raises(TypeError, match=rf"register\({cls.__name__}\): msgspec encodes it already"):
        register(cls, "x", lambda value: (None, b""), lambda head, data: None)


@pytest.mark.usefixtures("registry")
def test_an_unknown_payload_is_kept_and_encodes_to_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    _register_point()
    message = encode(Sample(metadata={"x": [Point(1, 2)]}))
    monkeypatch.setattr(codecs, "_unpackers", {})
    sample = decode(message, Sample)
    assert isinstance(sample.metadata["x"][0], Opaque)
    assert sample.metadata["x"][0].name == "tests.Point"
    assert encode(sample) == message


def test_an_array_stays_opaque_where_numpy_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    message = encode(Sample(metadata={"x": np.arange(2)}))
    monkeypatch.setitem(sys.modules, "numpy", None)
    monkeypatch.setattr(codecs, "_packages", {"numpy": codecs._add_numpy})
    monkeypatch.setattr(codecs, "_unpackers", {})
    sample = decode(message, Sample)
    assert isinstance(sample.metadata["x"], Opaque)
    assert encode(sample) == message


def test_an_unknown_extension_type_is_kept() -> None:
    assert _back(msgspec.msgpack.Ext(99, b"?")) == msgspec.msgpack.Ext(99, b"?")


@pytest.mark.usefixtures("registry")
def test_a_codec_that_raises_while_decoding_is_named() -> None:
    register(Point, "tests.Point", lambda p: (None, b""), lambda head, data: 1 / 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(WireError, match=r"Sample: tests.Point: division by zero"):
        _back(Point(1, 2))


# What cannot be sent


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"foo": [0, 1, 2, Point(1, 2)]}, r"metadata.foo\[3\] cannot be encoded: no codec for .*\.Point; give"),
        ({"a b": {3: [Point(1, 2)]}}, r"metadata\['a b'\]\[3\]\[0\] cannot .*wire.register\(Point, name, encode"),
        ({"foo": 2**64}, r"metadata.foo cannot be encoded: OverflowError"),
        ({"foo": "\ud800"}, r"metadata.foo cannot be encoded: UnicodeEncodeError: .*surrogates"),
        ({Point: 1}, r"metadata\[key <class .*Point'>\] cannot be encoded: no codec for builtins.type"),
        ({"foo": np.array([None])}, r"metadata.foo cannot be encoded: TypeError: ndarray of dtype object"),
        ({"foo": np.zeros(1, "i4,i4")}, r"metadata.foo cannot be encoded: TypeError: ndarray of dtype \[\("),
        ({"foo": np.ma.zeros(2)}, r"metadata.foo cannot be encoded: TypeError: MaskedArray"),
    ],
)
@pytest.mark.parametrize("wrap", [Sample.copy, lambda s: Group(1, "p", [[s]]), light], ids=["", "group", "light"])
def test_what_cannot_be_encoded_is_named(metadata: Any, message: str, wrap: Callable[[Sample], Any]) -> None:
    with pytest.raises(WireError, match=f"^sample 7: {message}"):
        encode(wrap(Sample(index=7, metadata=metadata)))


def test_a_circle_is_named() -> None:
    circle: dict[str, Any] = {}
    circle["a"] = circle
    with pytest.raises(WireError, match=r"sample 7: metadata.a.a.* cannot be encoded: it contains itself"):
        encode(Sample(index=7, metadata=circle))


def test_an_event_that_cannot_be_encoded_is_named() -> None:
    event = WeightsUpdated(seq=1, time_ns=2, rollout_id=3, version=Point(1, 2))  # type: ignore[arg-type]
    with pytest.raises(WireError, match=r"WeightsUpdated: version cannot be encoded: no codec"):
        encode(event)


# torch


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


@needs_torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "bool", "complex64", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3)])
def test_tensors_come_back(dtype: str, shape: tuple[int, ...]) -> None:
    import torch  # type: ignore[import-not-found, unused-ignore]

    tensor = torch.zeros(shape).to(getattr(torch, dtype))
    twin = _back(tensor)
    assert twin.dtype == tensor.dtype
    assert twin.shape == tensor.shape
    assert torch.equal(twin.view(torch.uint8), tensor.view(torch.uint8)) if shape else twin.item() == tensor.item()


@needs_torch
def test_tensors_come_back_without_stride_and_gradient() -> None:
    import torch  # type: ignore[import-not-found, unused-ignore]

    tensor = torch.arange(6.0, requires_grad=True).reshape(2, 3).T
    twin = _back(tensor)
    assert twin.tolist() == tensor.tolist()
    assert not twin.requires_grad


@needs_torch
def test_tensors_of_other_kinds_are_refused() -> None:
    import torch  # type: ignore[import-not-found, unused-ignore]

    for tensor in (torch.zeros(2).to_sparse(), torch.nn.Parameter(torch.zeros(2))):
        with pytest.raises(WireError, match="only plain dense tensors travel"):
            encode(Sample(index=1, rollout_routed_experts=tensor))


@needs_torch
@pytest.mark.parametrize("head", [["float33", [1]], ["nn", [1]], ["float32", [3]]])
def test_a_tensor_that_lies_about_itself(head: Any) -> None:
    payload = msgspec.msgpack.encode(["torch.Tensor", head, bytes(8)])
    with pytest.raises(WireError, match=r"torch\.Tensor: "):
        decode(_from_version(1, msgspec.msgpack.Ext(16, payload)), object)
