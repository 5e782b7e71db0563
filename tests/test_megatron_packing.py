from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventbus import Sample, SampleStatus
from eventbus.columns import Column, LogProbs, LossMask, Tokens

pytest.importorskip("torch", reason="needs torch: rolloutbus[megatron] or [embedded]")

import numpy
import torch
from torch import Tensor

from backends.megatron.packing import BatchError, MicroBatch, StepTotals, pack, step_totals, unpack
from backends.megatron.plan import ParallelLayout, plan_microbatches
from tests.megatron_shims import leave_kernels_out

pytestmark = pytest.mark.usefixtures("one_thread")

EXPERTS = 6
NUMBERS = ("rollout_log_probs", "teacher_log_probs")


def made(index: int, prompt: int, response: int, **fields: Any) -> Sample:
    """Every token of the batch and every number of a column differs from all others."""
    base = 100 * (index + 1)
    return Sample(
        index=index,
        tokens=Tokens(range(base, base + prompt + response)),
        response_length=response,
        rollout_log_probs=LogProbs([-(base + position) / 1000 for position in range(response)]),
        train_metadata={"advantage": float(index + 1)},
        status=SampleStatus.COMPLETED,
        **({"rollout_id": index} | fields),
    )


def with_replay(sample: Sample) -> Sample:
    """Teacher, routed experts of 2 layers, 2 for a token, and as many top-p tokens as the position modulo 3."""
    index, response, length = sample.index or 0, sample.response_length, len(sample.tokens)
    sample.teacher_log_probs = LogProbs([-(index + position / 1000) for position in range(response)])
    sample.rollout_routed_experts = numpy.arange((length - 1) * 4, dtype=numpy.int32).reshape(-1, 2, 2) + 1000 * index
    counts = [position % 3 for position in range(response)]
    sample.rollout_top_p_token_offsets = list(accumulate(counts, initial=0))
    sample.rollout_top_p_token_ids = [100 * index + number for number in range(sum(counts))]
    return sample


def packed(samples: Sequence[Sample], layout: ParallelLayout | None = None, **options: Any) -> MicroBatch:
    return pack(samples, layout or ParallelLayout(), step_totals(samples), experts=EXPERTS, **options)


def padded_to(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


# A plain reference: rows as Python tuples, cut the way that the docstrings describe


class Row(NamedTuple):
    sample: int
    position: int


def reference(samples: Sequence[Sample], layout: ParallelLayout, rank: int, padded: bool) -> list[Row | None]:
    """What lies at each local row: a token of a sample, or None for padding."""
    sequences: list[list[Row | None]] = [
        [Row(number, position) for position in range(len(sample.tokens))] for number, sample in enumerate(samples)
    ]
    longest = padded_to(max(map(len, sequences)), layout.total_multiple)
    for sequence in sequences:
        wanted = longest if padded else padded_to(len(sequence), layout.sequence_multiple)
        sequence.extend([None] * (wanted - len(sequence)))
    if not padded:
        sequences.append([None] * (-sum(map(len, sequences)) % layout.total_multiple))
    local: list[Row | None] = []
    for sequence in sequences:
        if layout.cp == 1:
            local += sequence
            continue
        size = len(sequence) // (2 * layout.cp)
        pieces = [sequence[size * piece : size * (piece + 1)] for piece in range(2 * layout.cp)]
        local += pieces[rank] + pieces[2 * layout.cp - 1 - rank]
    return local


layouts = st.builds(
    ParallelLayout,
    cp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2, 4]),
    token_multiple=st.sampled_from([1, 16]),
)


@st.composite
def batches(draw: st.DrawFn) -> list[Sample]:
    samples = []
    for index in range(draw(st.integers(1, 5))):
        response = draw(st.integers(0, 12))
        mask = draw(st.none() | st.lists(st.integers(0, 1), min_size=response, max_size=response))
        fields = {"loss_mask": None if mask is None else LossMask(mask), "remove_sample": draw(st.booleans())}
        samples.append(with_replay(made(index, draw(st.integers(1, 12)), response, **fields)))
    samples.append(with_replay(made(9, 2, 3)))  # so that some token counts
    return samples


@given(batches(), layouts, st.booleans())
def test_every_row_is_what_the_reference_says(samples: list[Sample], layout: ParallelLayout, padded: bool) -> None:
    for rank in range(layout.cp):
        batch = packed(samples, layout, cp_rank=rank, padded=padded)
        rows = reference(samples, layout, rank, padded)
        assert batch.tokens.shape == ((len(samples), len(rows) // len(samples)) if padded else (1, len(rows)))
        assert batch.tokens.flatten().tolist() == [samples[r.sample].tokens[r.position] if r else 0 for r in rows]
        assert batch.position_ids.flatten().tolist() == [r.position if r else 0 for r in rows]

        predicting = [
            (number, row.sample, samples[row.sample], response)
            for number, row in enumerate(rows)
            if row and (response := row.position + 1 - samples[row.sample].prompt_length) >= 0
            if row.position + 1 < len(samples[row.sample].tokens)
        ]
        assert batch.rows.tolist() == [row for row, *_ in predicting]
        assert batch.segments.tolist() == [sequence for _, sequence, *_ in predicting]
        assert batch.targets.tolist() == [s.tokens[s.prompt_length + at] for *_, s, at in predicting]
        assert batch.loss_mask.tolist() == [
            not s.remove_sample and (s.loss_mask is None or bool(s.loss_mask[at])) for *_, s, at in predicting
        ]
        assert batch.advantages is not None
        assert batch.advantages.tolist() == [s.train_metadata["advantage"] for *_, s, _ in predicting]  # type: ignore[index]
        for name in NUMBERS:
            assert getattr(batch, name).tolist() == [getattr(s, name)[at] for *_, s, at in predicting]

        assert batch.top_p_ids is not None
        assert batch.top_p_offsets is not None
        bounds = batch.top_p_offsets.tolist()
        assert len(bounds) == len(predicting) + 1
        for number, (*_, s, at) in enumerate(predicting):
            start, end = s.rollout_top_p_token_offsets[at : at + 2]
            assert batch.top_p_ids[bounds[number] : bounds[number + 1]].tolist() == s.rollout_top_p_token_ids[start:end]

        assert batch.routed_experts is not None
        assert batch.routed_experts.shape == (len(rows), 2, 2)
        for row, chosen in zip(rows, batch.routed_experts, strict=True):
            if row and row.position + 1 < len(samples[row.sample].tokens):
                assert chosen.tolist() == samples[row.sample].rollout_routed_experts[row.position].tolist()
            else:  # valid, and no expert twice for a token
                assert all(0 <= a < EXPERTS and 0 <= b < EXPERTS and a != b for a, b in chosen.tolist())


@settings(max_examples=50)
@given(batches(), layouts, st.booleans())
def test_unpacking_gives_back_every_column(samples: list[Sample], layout: ParallelLayout, padded: bool) -> None:
    parts = [packed(samples, layout, cp_rank=rank, padded=padded) for rank in range(layout.cp)]
    columns: dict[str, Callable[[Sample], Any]] = {
        "targets": lambda sample: sample.tokens[sample.prompt_length :],
        "rollout_log_probs": lambda sample: sample.rollout_log_probs,
        "teacher_log_probs": lambda sample: sample.teacher_log_probs,
    }
    for name, column in columns.items():
        unpacked = unpack(parts, [getattr(part, name) for part in parts])
        assert [value.tolist() for value in unpacked] == [column(sample).tolist() for sample in samples]


@settings(max_examples=50)
@given(batches(), layouts, st.booleans())
def test_context_parallel_ranks_together_hold_every_token_once(
    samples: list[Sample], layout: ParallelLayout, padded: bool
) -> None:
    parts = [packed(samples, layout, cp_rank=rank, padded=padded) for rank in range(layout.cp)]
    held = sorted(token for part in parts for token in part.tokens.flatten().tolist() if token)
    assert held == sorted(token for sample in samples for token in sample.tokens)
    assert len({part.tokens.shape for part in parts}) == 1


@settings(max_examples=50)
@given(batches(), layouts)
def test_alignments_of_the_packed_layout(samples: list[Sample], layout: ParallelLayout) -> None:
    batch = packed(samples, layout)
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.dtype == torch.int32
    spans = batch.cu_seqlens.diff().tolist()
    assert batch.cu_seqlens[0] == 0
    assert sum(spans) == batch.tokens.numel() * layout.cp
    assert max(spans) == batch.max_seqlen
    assert all(span % layout.sequence_multiple == 0 for span in spans)
    assert batch.tokens.numel() % (layout.tp * layout.token_multiple) == 0
    lengths = [padded_to(len(sample.tokens), layout.sequence_multiple) for sample in samples]
    assert spans[: len(samples)] == lengths
    # no more than it takes: a tail, if any, is shorter than the multiple
    assert sum(spans[len(samples) :]) < layout.total_multiple


@settings(max_examples=50)
@given(batches(), layouts)
def test_alignments_of_the_padded_layout(samples: list[Sample], layout: ParallelLayout) -> None:
    batch = packed(samples, layout, padded=True)
    assert batch.cu_seqlens is None
    assert batch.tokens.shape[1] % (layout.tp * layout.token_multiple) == 0
    assert batch.max_seqlen == batch.tokens.shape[1] * layout.cp
    assert batch.max_seqlen - max(len(sample.tokens) for sample in samples) < layout.total_multiple


@settings(max_examples=50)
@given(batches(), layouts, st.integers(0, 500))
def test_micro_batches_of_a_plan_keep_its_cap(samples: list[Sample], layout: ParallelLayout, more: int) -> None:
    longest = padded_to(max(padded_to(len(s.tokens), layout.sequence_multiple) for s in samples), layout.total_multiple)
    cap = longest // layout.cp + more
    (step,) = plan_microbatches([len(sample.tokens) for sample in samples], layout, max_tokens_per_gpu=cap)
    for part in step.micro_batches[0]:
        chosen = [samples[number] for number in part]
        assert pack(chosen, layout, step_totals(samples), experts=EXPERTS).tokens.numel() <= cap


# By hand


def test_two_packed_sequences() -> None:
    batch = packed([made(0, 2, 2), made(1, 1, 2)])
    assert batch.tokens.tolist() == [[100, 101, 102, 103, 200, 201, 202]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [0, 4, 7]
    assert batch.max_seqlen == 4
    assert batch.rows.tolist() == [1, 2, 4, 5]
    assert batch.targets.tolist() == [102, 103, 201, 202]
    assert batch.segments.tolist() == [0, 0, 1, 1]


def test_two_padded_sequences_under_context_parallelism() -> None:
    # 4 pieces of 2 tokens: the first rank has pieces 0 and 3, the second 1 and 2
    samples = [made(0, 3, 4), made(1, 1, 2)]
    first, second = (packed(samples, ParallelLayout(cp=2), cp_rank=rank, padded=True) for rank in range(2))
    assert first.tokens.tolist() == [[100, 101, 106, 0], [200, 201, 0, 0]]
    assert second.tokens.tolist() == [[102, 103, 104, 105], [202, 0, 0, 0]]
    assert second.position_ids.tolist() == [[2, 3, 4, 5], [2, 0, 0, 0]]
    # all of the first response is predicted by rows 2 to 5, on the second rank; the second by rows 0 and 1
    assert first.rows.tolist() == [4, 5]
    assert second.rows.tolist() == [0, 1, 2, 3]
    assert second.targets.tolist() == [103, 104, 105, 106]
    assert first.places.tolist() == [4, 5]


def test_log_probs_by_rows_and_targets_are_those_of_the_response() -> None:
    """As the module's docstring does it, with a model that is a table of which token follows which."""
    samples = [made(0, 2, 3), made(1, 4, 1)]
    for sample in samples:
        sample.tokens = Tokens(token % 7 for token in sample.tokens)
    table = torch.randn(7, 7, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    expected = [
        table[sample.tokens[at - 1], sample.tokens[at]]
        for sample in samples
        for at in range(sample.prompt_length, len(sample.tokens))
    ]
    for padded in (False, True):
        batch = packed(samples, padded=padded)
        logits = table[batch.tokens]
        log_probs = logits.flatten(0, 1)[batch.rows].gather(-1, batch.targets[:, None])[:, 0]
        torch.testing.assert_close(log_probs, torch.stack(expected))


def test_counts_that_losses_are_divided_by() -> None:
    samples = [
        made(0, 1, 4, rollout_id=5, loss_mask=LossMask([1, 0, 1, 1])),
        made(1, 1, 2, rollout_id=5),
        made(2, 1, 3, rollout_id=6, remove_sample=True),
        made(3, 1, 2, rollout_id=None),
    ]
    totals = step_totals(samples)
    columns = frozenset({"advantage", "rollout_log_probs"})
    assert totals == StepTotals(tokens=7, sequences=4, executions=3, execution_tokens={5: 5, 6: 0}, columns=columns)
    # an execution counts as a whole, wherever its samples went
    batch = pack([samples[1], samples[3]], ParallelLayout(), totals)
    assert batch.sequence_tokens.tolist() == [2, 2]
    assert batch.execution_tokens.tolist() == [5, 2]


def test_a_sample_of_another_step() -> None:
    with pytest.raises(KeyError):
        pack([made(1, 1, 2)], ParallelLayout(), step_totals([made(0, 1, 2)]))


def test_advantages_per_token() -> None:
    samples = [made(0, 1, 3), made(1, 1, 2)]
    samples[0].train_metadata = {"advantage": [0.5, -1.0, 2.0]}
    assert packed(samples).advantages.tolist() == [0.5, -1.0, 2.0, 2.0, 2.0]  # type: ignore[union-attr]


def test_columns_that_no_sample_has_are_none() -> None:
    sample = made(0, 1, 2)
    sample.train_metadata, sample.rollout_log_probs = None, None
    batch = packed([sample])
    names = ("advantages", *NUMBERS, "top_p_ids", "top_p_offsets", "routed_experts")
    assert [getattr(batch, name) for name in names] == [None] * len(names)
    assert dict(batch.multimodal) == {}


def test_a_sample_out_of_the_loss_needs_no_numbers() -> None:
    samples = [made(0, 1, 2), made(1, 1, 2, remove_sample=True)]
    samples[1].rollout_log_probs, samples[1].train_metadata = None, None
    batch = pack(samples[1:], ParallelLayout(), step_totals(samples))
    assert batch.rollout_log_probs.tolist() == [0, 0]  # type: ignore[union-attr]
    assert batch.advantages.tolist() == [0, 0]  # type: ignore[union-attr]


def test_what_masked_tokens_carry_does_no_harm() -> None:
    sample = made(0, 1, 3, loss_mask=LossMask([1, 0, 1]))
    sample.rollout_log_probs = LogProbs([-1.0, math.nan, -2.0])
    assert packed([sample]).rollout_log_probs.tolist() == [-1, 0, -2]  # type: ignore[union-attr]


def test_multimodal_inputs_by_name() -> None:
    images = [torch.full((2, 3), 1.0), torch.full((1, 3), 2.0)]
    samples = [
        made(0, 1, 1, multimodal_train_inputs={"pixel_values": images[0], "grid": numpy.array([[1, 1, 2]])}),
        made(1, 1, 1),
        made(2, 1, 1, multimodal_train_inputs={"pixel_values": images[1]}),
    ]
    batch = packed(samples)
    assert set(batch.multimodal) == {"pixel_values", "grid"}
    assert batch.multimodal["pixel_values"].tolist() == torch.cat(images).tolist()
    assert batch.multimodal["grid"].tolist() == [[1, 1, 2]]


def test_arrays_that_may_not_be_written_to() -> None:
    """As they come out of a decoder; torch would warn, and a warning is an error here."""
    sample = with_replay(made(0, 1, 3))
    sample.rollout_routed_experts.flags.writeable = False
    offsets = numpy.array(sample.rollout_top_p_token_offsets, dtype=numpy.int32)
    offsets.flags.writeable = False
    sample.rollout_top_p_token_offsets = offsets
    batch = packed([sample])
    assert batch.routed_experts is not None
    assert batch.routed_experts[:3].tolist() == sample.rollout_routed_experts.tolist()


def test_no_token_becomes_a_python_object(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [made(0, 3, 4, loss_mask=LossMask([1, 1, 0, 1])), made(1, 2, 2)]
    totals = step_totals(samples)

    def refuse(*_: object) -> Any:
        raise AssertionError("a column was read number by number")

    for name in ("tolist", "__iter__", "__getitem__"):
        monkeypatch.setattr(Column, name, refuse, raising=False)
    parts = [pack(samples, ParallelLayout(cp=2), totals, cp_rank=rank) for rank in range(2)]
    monkeypatch.undo()
    assert [value.tolist() for value in unpack(parts, [part.targets for part in parts])] == [
        [103, 104, 105, 106],
        [202, 203],
    ]


def test_the_samples_are_free_afterwards() -> None:
    sample = made(0, 1, 2, loss_mask=LossMask([1, 1]))
    batch = packed([sample])
    for column in (sample.tokens, sample.rollout_log_probs, sample.loss_mask):
        column.append(1)  # type: ignore[union-attr]  # a view of its memory would not let it grow
    assert batch.tokens.tolist() == [[100, 101, 102]]


def test_a_copy_on_a_device() -> None:
    batch = packed([with_replay(made(0, 1, 3))])
    twin = batch.to("meta")
    assert twin.tokens.device.type == "meta"
    assert twin.top_p_ids is not None
    assert twin.top_p_ids.device.type == "meta"
    assert twin.max_seqlen == batch.max_seqlen


@pytest.mark.gpu
def test_a_copy_on_a_gpu() -> None:
    batch = packed([with_replay(made(0, 1, 3, multimodal_train_inputs={"x": torch.ones(1, 2)}))])
    twin = batch.to("cuda")
    for name in ("tokens", "rows", "targets", "rollout_log_probs", "routed_experts"):
        torch.testing.assert_close(getattr(twin, name).cpu(), getattr(batch, name))
    torch.testing.assert_close(twin.multimodal["x"].cpu(), batch.multimodal["x"])


def test_packed_seq_params(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("megatron", "megatron.core", "megatron.core.packed_seq_params")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[names[-1]], "PackedSeqParams", SimpleNamespace, raising=False)
    batch = packed([made(0, 1, 2), made(1, 1, 4)])
    params = batch.packed_seq_params()
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q is params.cu_seqlens_kv is batch.cu_seqlens
    assert params.max_seqlen_q == params.max_seqlen_kv == 5
    assert packed([made(0, 1, 2)], padded=True).packed_seq_params() is None


def test_packed_seq_params_of_megatron_core() -> None:
    leave_kernels_out()
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    batch = packed([made(0, 1, 2)])
    assert batch.packed_seq_params().qkv_format == "thd"


def test_packed_seq_params_without_megatron_core(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("megatron", "megatron.core", "megatron.core.packed_seq_params"):
        monkeypatch.setitem(sys.modules, name, None)
    batch = packed([made(0, 1, 2)])
    with pytest.raises(ImportError):
        batch.packed_seq_params()


# Batches that cannot be trained on


def refused(match: str, *samples: Sample) -> None:
    with pytest.raises(BatchError, match=match):
        step_totals(samples)


def changed(sample: Sample, **fields: Any) -> Sample:
    for name, value in fields.items():
        setattr(sample, name, value)
    return sample


def test_a_step_without_samples() -> None:
    refused("no samples")


def test_a_step_without_loss() -> None:
    refused("no token of the 2 samples", made(0, 1, 2, remove_sample=True), made(1, 1, 1, loss_mask=LossMask([0])))


def test_plain_sequences_are_packed_as_at_the_end_of_a_stage() -> None:
    sample = made(0, 1, 2)
    sample.tokens, sample.loss_mask = [5, 6, 7], [1, 0]  # type: ignore[assignment]
    assert step_totals([sample]).tokens == 1
    assert packed([sample]).targets.tolist() == [6, 7]


def test_columns_of_something_else() -> None:
    refused("sample 0: a column does not pack: ", changed(made(0, 1, 1), tokens=["a", "b"]))
    refused("sample 0: a column does not pack: ", changed(made(0, 1, 1), loss_mask=[1000]))
    refused("sample 0: train_metadata is a list, it must be a dict", changed(made(0, 1, 1), train_metadata=[1.0]))
    refused("sample 0: response_length is 1.0, of 2 tokens", changed(made(0, 1, 1), response_length=1.0))


def test_a_sample_without_tokens() -> None:
    refused("sample 1: it has no tokens", made(0, 1, 1), made(1, 0, 0))


def test_a_sample_without_a_prompt() -> None:
    refused("sample 0: it has no prompt tokens", made(0, 0, 2))


def test_a_response_longer_than_its_tokens() -> None:
    refused("sample 0: response_length is 9, of 3 tokens", changed(made(0, 1, 2), response_length=9))


@pytest.mark.parametrize("name", ["rollout_log_probs", "teacher_log_probs"])
def test_log_probs_of_another_length(name: str) -> None:
    sample = changed(made(0, 1, 2), **{name: LogProbs([-1.0])})
    refused(f"sample 0: {name} has 1 values for 2 response tokens", sample)


def test_a_mask_of_another_length() -> None:
    refused("sample 0: loss_mask has 3 values for 2", changed(made(0, 1, 2), loss_mask=LossMask([1, 1, 1])))


@pytest.mark.parametrize("value", [[1.0], {}])
def test_advantages_of_another_length(value: Any) -> None:
    refused("sample 0: advantage has . values for 3", changed(made(0, 1, 3), train_metadata={"advantage": value}))


@pytest.mark.parametrize("value", ["good", [[1.0, 2.0, 3.0]], object()])
def test_an_advantage_that_is_no_number(value: Any) -> None:
    refused("sample 0: advantage is .*not numbers", changed(made(0, 1, 3), train_metadata={"advantage": value}))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite(value: float) -> None:
    refused(
        "sample 0: advantage is (nan|inf) for response token 0, which counts",
        changed(made(0, 1, 2), train_metadata={"advantage": value}),
    )
    refused(
        "sample 0: rollout_log_probs is (nan|inf) for response token 1, which counts",
        changed(made(0, 1, 2), rollout_log_probs=LogProbs([0, value])),
    )


@pytest.mark.parametrize("name", ["rollout_log_probs", "train_metadata"])
def test_a_column_that_only_some_have(name: str) -> None:
    refused("sample 1: it has no .*, as sample 0", made(0, 1, 2), changed(made(1, 1, 2), **{name: None}))


def test_top_p_columns_that_do_not_fit() -> None:
    good = with_replay(made(0, 1, 3))
    for offsets in ([0, 1], [1, 1, 2, 3], [0, 2, 1, 3], [0, 1, 2, 9]):
        refused(
            "sample 0: rollout_top_p_token_offsets must rise from 0 to 3",
            changed(good.copy(), rollout_top_p_token_offsets=offsets),
        )
    refused("only one", changed(good.copy(), rollout_top_p_token_ids=None))


def test_routed_experts_that_do_not_fit() -> None:
    good = with_replay(made(0, 2, 2))
    refused(
        r"sample 0: .* shape \(2, 2, 2\), it must be \(3, ",
        changed(good.copy(), rollout_routed_experts=good.rollout_routed_experts[1:]),
    )
    refused("shape", changed(good.copy(), rollout_routed_experts=[1, 2, 3]))
    other = with_replay(made(1, 2, 2))
    other.rollout_routed_experts = other.rollout_routed_experts[:, :1]
    refused(r"sample 1: rollout_routed_experts is torch.int32 \[:, 1, 2\], but that of sample 0 is", good, other)


def test_routed_experts_need_the_number_of_experts() -> None:
    sample = with_replay(made(0, 2, 2))
    for experts in (None, 1):
        with pytest.raises(ValueError, match=f"experts is {experts}"):
            pack([sample], ParallelLayout(), step_totals([sample]), experts=experts)


@pytest.mark.parametrize("value", [torch.ones(1, 3), torch.ones(1, 2, dtype=torch.int64)])
def test_multimodal_inputs_that_do_not_fit_together(value: Tensor) -> None:
    first = made(0, 1, 1, multimodal_train_inputs={"x": torch.ones(2, 2)})
    refused("sample 1: x is torch", first, made(1, 1, 1, multimodal_train_inputs={"x": value}))


def test_multimodal_inputs_that_are_no_tensors() -> None:
    refused("sample 0: x is str, not numbers", made(0, 1, 1, multimodal_train_inputs={"x": "image.png"}))
    refused("sample 0: x is a lone number", made(0, 1, 1, multimodal_train_inputs={"x": 3.0}))


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_the_layout_has_not(rank: int) -> None:
    with pytest.raises(ValueError, match=f"cp_rank is {rank}"):
        packed([made(0, 1, 2)], ParallelLayout(cp=2), cp_rank=rank)


def test_a_micro_batch_without_samples() -> None:
    with pytest.raises(ValueError, match="no samples"):
        pack([], ParallelLayout(), step_totals([made(0, 1, 2)]))
