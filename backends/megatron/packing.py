"""The samples of a micro-batch as tensors: `step_totals` checks and counts a whole step, `pack` makes what a model and
its loss take.

Two layouts, one code: packed (thd), where the sequences lie end to end in one row, and padded (sbhd), one row for each.
Either way all sequences are first laid out as if one rank held them, each padded to a length that context parallelism
can cut, and then a rank takes its pieces.

What a loss needs has one value per *response token that this rank predicts*, in the order of the samples, without any
padding: `MicroBatch.rows` says which row of the logits predicts it. The model's output at a token predicts the next
one, so that is the row before the token's own, and where a sequence is cut over ranks both may lie on different ones;
`targets` holds the token itself.

    logits = model(batch.tokens, batch.position_ids, ...)                  # [rows, local tokens, vocabulary]
    predicted = logits.flatten(0, 1)[batch.rows]                           # [response tokens, vocabulary]
    log_probs = predicted.log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]

The columns of samples are joined as raw memory: no token becomes a Python object.
"""

from __future__ import annotations

import dataclasses
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any, Final, TypeAlias

import msgspec
import torch
from torch import Tensor

from backends.megatron.plan import ParallelLayout
from eventbus.columns import LogProbs
from eventbus.imports import optional_dependency
from eventbus.sample import Sample

__all__ = ["BatchError", "MicroBatch", "StepTotals", "check_experts", "check_sample", "pack", "step_totals", "unpack"]


class BatchError(ValueError):
    """A batch that cannot be trained on; the message names the sample and what is wrong with it."""


class StepTotals(msgspec.Struct, frozen=True):
    """What the losses of one step are divided by: counts over all ranks and micro-batches."""

    tokens: int
    """That count in the loss."""
    sequences: int
    """Samples, also those of which no token counts."""
    executions: int
    """Likewise."""
    execution_tokens: dict[int, int]
    """By `Sample.rollout_id`: tokens that count, over all samples of the execution."""
    columns: frozenset[str]
    """Of "advantage", "rollout_log_probs", "teacher_log_probs" and the replay columns: those that the samples have."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """What one rank computes at a time. n sequences, T tokens on this rank, R response tokens predicted by it."""

    tokens: Tensor
    """int64 [1, T] packed, [n, T / n] padded; 0 where padding is."""
    position_ids: Tensor
    """int64, as `tokens`: the place in the sequence; 0 where padding is."""
    cu_seqlens: Tensor | None
    """Packed: int32 [n + 1] or [n + 2], where the sequences begin and end, over all context-parallel ranks. Padding at
    the end of the row is a sequence of its own, so that no token attends to it. Padded: None."""
    max_seqlen: int
    """The longest sequence, with its padding, over all context-parallel ranks."""
    rows: Tensor
    """int64 [R]: rows of the logits, flattened to [T, vocabulary]."""
    targets: Tensor
    """int64 [R]: the response tokens that those rows predict."""
    places: Tensor
    """int64 [R]: which of the response tokens of all n sequences, end to end, these are. All of them in order, unless
    context parallelism cuts sequences."""
    segments: Tensor
    """int64 [R]: the sequence that each belongs to, 0 to n - 1."""
    loss_mask: Tensor
    """bool [R]: those that count in the loss."""
    response_lengths: Tensor
    """int64 [n], over all context-parallel ranks."""
    sequence_tokens: Tensor
    """int64 [n]: tokens of the sequence that count in the loss, over all context-parallel ranks."""
    execution_tokens: Tensor
    """int64 [n]: those of the execution that the sequence belongs to, wherever its other samples are."""
    advantages: Tensor | None
    """float32 [R], from `train_metadata["advantage"]`; like all below None where the samples have none."""
    rollout_log_probs: Tensor | None
    """float32 [R]"""
    teacher_log_probs: Tensor | None
    """float32 [R]"""
    top_p_ids: Tensor | None
    """int64: the tokens that top-p left for each of the R, end to end."""
    top_p_offsets: Tensor | None
    """int64 [R + 1]: where in `top_p_ids` those of each begin and end."""
    routed_experts: Tensor | None
    """int32 [T, layers, experts per token]: what the engine's routers chose for the tokens, in the order of `tokens`.
    With sequence parallelism each tensor-parallel rank takes its own part of the rows."""
    multimodal: Mapping[str, Tensor]
    """Each input of `multimodal_train_inputs` by name, those of all samples joined along their first dimension."""

    def to(self, device: torch.device | str) -> MicroBatch:
        """A copy on `device`. To a GPU it goes through pinned memory and does not wait: the work that is queued on the
        current stream sees it finished."""
        pinned = torch.device(device).type == "cuda"

        def moved(value: Any) -> Any:
            if isinstance(value, Tensor):
                return (value.pin_memory() if pinned else value).to(device, non_blocking=pinned)
            return {name: moved(item) for name, item in value.items()} if isinstance(value, Mapping) else value

        return MicroBatch(**{field.name: moved(getattr(self, field.name)) for field in dataclasses.fields(self)})

    def packed_seq_params(self) -> Any:
        """megatron-core's `PackedSeqParams` for `cu_seqlens`; None for the padded layout.

        :raises LoadError: megatron-core is not installed.
        """
        if self.cu_seqlens is None:
            return None
        with optional_dependency():
            params = import_module("megatron.core.packed_seq_params").PackedSeqParams
        return params(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
        )


def step_totals(samples: Sequence[Sample]) -> StepTotals:
    """Check all samples of a step, before any of them is sent to a rank, and count what its losses are divided by.

    A sample of which no token counts in the loss may lack the columns of numbers that others have; they read as 0.

    :raises BatchError: a sample has no tokens, or a response without a prompt; a column has another length than its
        response; a number that the loss would use is not finite; a column that some samples have is missing in others;
        replay columns or inputs do not fit together; or no token of the step counts in the loss.
    """
    if not samples:
        raise BatchError("the step has no samples")
    for sample in samples:
        check_sample(sample)
    columns = frozenset(name for name in (*_NUMBERS, *_REPLAY) if _all_have(name, samples))
    for name in _NUMBERS:
        if name in columns:
            _check_numbers(name, samples)
    for sample in samples:
        _check_top_p(sample)
        if sample.rollout_routed_experts is not None:
            check_experts(sample)
    _check_joined(samples)
    tokens, alone = 0, 0
    execution_tokens: dict[int, int] = {}
    for sample in samples:
        own = sample.loss_tokens
        tokens += own
        if sample.rollout_id is None:
            alone += 1
        else:
            execution_tokens[sample.rollout_id] = execution_tokens.get(sample.rollout_id, 0) + own
    if not tokens:
        raise BatchError(
            f"no token of the {len(samples)} samples of this step counts in the loss: drop such groups before they "
            "reach the trainer, or take more executions into a step"
        )
    return StepTotals(tokens, len(samples), len(execution_tokens) + alone, execution_tokens, columns)


def pack(
    samples: Sequence[Sample],
    layout: ParallelLayout,
    totals: StepTotals,
    *,
    cp_rank: int = 0,
    padded: bool = False,
    experts: int | None = None,
) -> MicroBatch:
    """The tensors of one micro-batch for one rank, on the CPU.

    :param samples: those of the micro-batch, checked by `step_totals` with the rest of their step.
    :param totals: what that returned.
    :param cp_rank: which pieces of every sequence: of 2 * cp pieces the rank takes number `cp_rank` from the beginning
        and number `cp_rank` from the end, so that all ranks have about as much to attend to.
    :param padded: one row per sequence, all of the length that the longest needs.
    :param experts: of a layer, where the samples have `rollout_routed_experts`. Padding is spread over them evenly.
    :raises ValueError: `cp_rank` is none of the layout; `samples` is empty; `experts` is missing or is fewer than those
        chosen for one token.
    :raises KeyError: `totals` does not know the execution of a sample.
    """
    if not 0 <= cp_rank < layout.cp:
        raise ValueError(f"pack: cp_rank is {cp_rank}, it must be from 0 to {layout.cp - 1}")
    if not samples:
        raise ValueError("pack: the micro-batch has no samples")
    lengths = [len(sample.tokens) for sample in samples]
    spans = _spans(lengths, layout, padded)
    starts = list(accumulate(spans, initial=0))
    mine = _pieces(starts, layout.cp, cp_rank)

    counting: Any = torch.arange(starts[-1], dtype=torch.int32).numpy()
    # the row before each response token's own, which predicts it
    first = [start + sample.prompt_length - 1 for start, sample in zip(starts, samples, strict=False)]
    response_lengths = [sample.response_length for sample in samples]
    tokens = _laid_out([sample.tokens for sample in samples], spans)
    positions = _laid_out([counting[:length] for length in lengths], spans)
    targets = _integers(memoryview(sample.tokens)[sample.prompt_length :] for sample in samples)
    rows = _integers(counting[row : row + n] for row, n in zip(first, response_lengths, strict=True))
    segments = _integers(array("i", [number]) * n for number, n in enumerate(response_lengths))
    places = torch.arange(len(rows))
    if mine is not None:
        local = torch.full((starts[-1],), -1)
        local[mine] = torch.arange(len(mine))
        places = (local[rows] >= 0).nonzero()[:, 0]
        rows, targets, segments = local[rows[places]], targets[places], segments[places]
        tokens, positions = tokens[mine], positions[mine]

    def column(buffers: Iterable[Buffer], dtype: torch.dtype) -> Tensor:
        joined = _joined(buffers, dtype)
        return joined if mine is None else joined[places]

    def numbers(name: str) -> Tensor | None:
        if name not in totals.columns:
            return None
        # Tokens out of the loss may carry anything, and nan times 0 is nan.
        return column((_numbers(sample, name) for sample in samples), torch.float32).nan_to_num_(0, 0, 0)

    own = [sample.loss_tokens for sample in samples]
    whole = [
        n if s.rollout_id is None else totals.execution_tokens[s.rollout_id] for s, n in zip(samples, own, strict=True)
    ]
    top_p_ids, top_p_offsets = _top_p(samples, places) if "rollout_top_p_token_ids" in totals.columns else (None, None)
    replays_routing = "rollout_routed_experts" in totals.columns
    shape = (len(samples), -1) if padded else (1, -1)
    return MicroBatch(
        tokens=tokens.view(shape),
        position_ids=positions.view(shape),
        cu_seqlens=None if padded else torch.tensor(starts, dtype=torch.int32),
        max_seqlen=max(spans),
        rows=rows,
        targets=targets,
        places=places,
        segments=segments,
        loss_mask=column(map(_mask, samples), torch.int8).bool(),
        response_lengths=torch.tensor(response_lengths),
        sequence_tokens=torch.tensor(own),
        execution_tokens=torch.tensor(whole),
        advantages=numbers("advantage"),
        rollout_log_probs=numbers("rollout_log_probs"),
        teacher_log_probs=numbers("teacher_log_probs"),
        top_p_ids=top_p_ids,
        top_p_offsets=top_p_offsets,
        routed_experts=_routed_experts(samples, starts, mine, experts) if replays_routing else None,
        multimodal=_multimodal(samples),
    )


def unpack(parts: Sequence[MicroBatch], values: Sequence[Tensor]) -> list[Tensor]:
    """Per sample, in order, what each context-parallel rank has for its response tokens.

    :param parts: the same micro-batch as each rank packed it; one without context parallelism.
    :param values: of each rank: [R, ...].
    """
    whole = values[0].new_empty((int(parts[0].response_lengths.sum()), *values[0].shape[1:]))
    for part, value in zip(parts, values, strict=True):
        whole[part.places] = value
    return list(torch.split(whole, parts[0].response_lengths.tolist()))


# The layout


def _spans(lengths: Sequence[int], layout: ParallelLayout, padded: bool) -> list[int]:
    """The length that each sequence is padded to; packed, perhaps one more for padding at the end."""
    if padded:
        return [_aligned(max(lengths), layout.total_multiple)] * len(lengths)
    spans = [_aligned(length, layout.sequence_multiple) for length in lengths]
    tail = -sum(spans) % layout.total_multiple
    return [*spans, tail] if tail else spans


def _pieces(starts: Sequence[int], cp: int, rank: int) -> Tensor | None:
    """Which of all rows are this rank's; None: all of them."""
    if cp == 1:
        return None
    pieces = []
    for start, end in pairwise(starts):
        size = (end - start) // (2 * cp)
        pieces.append(torch.arange(start + rank * size, start + (rank + 1) * size))
        pieces.append(torch.arange(end - (rank + 1) * size, end - rank * size))
    return torch.cat(pieces)


def _aligned(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# The columns

Buffer: TypeAlias = "bytes | memoryview | array[Any]"

_NUMBERS: Final = ("advantage", "rollout_log_probs", "teacher_log_probs")
_REPLAY: Final = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts")


def _value(sample: Sample, name: str) -> Any:
    return (sample.train_metadata or {}).get(name) if name == "advantage" else getattr(sample, name)


def _numbers(sample: Sample, name: str) -> Buffer:
    """float32 [response]; a lone number counts for all of it, and a missing one is 0.

    :raises TypeError: it is an advantage and no number or numbers.
    """
    value = _value(sample, name)
    if value is None:
        return bytes(4 * sample.response_length)
    if name != "advantage":
        return value  # type: ignore[no-any-return]
    if _is_lone(value):
        return array("f", [value]) * sample.response_length
    return LogProbs(value)


def _is_lone(value: Any) -> bool:
    return isinstance(value, int | float) or getattr(value, "shape", None) == ()


def _mask(sample: Sample) -> Buffer:
    """int8 [response]"""
    if sample.remove_sample:
        return bytes(sample.response_length)
    return b"\1" * sample.response_length if sample.loss_mask is None else sample.loss_mask


def _joined(buffers: Iterable[Buffer], dtype: torch.dtype) -> Tensor:
    """End to end: one copy of the memory."""
    data = bytearray().join(buffers)
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _integers(buffers: Iterable[Buffer]) -> Tensor:
    """int64, from int32: what indexes a tensor, and what an embedding takes."""
    return _joined(buffers, torch.int32).long()


def _laid_out(columns: Sequence[Buffer], spans: Sequence[int]) -> Tensor:
    """int64: each column in its span, zeros in the rest."""
    buffers: list[Buffer] = []
    for column, span in zip([*columns, b""], spans, strict=False):  # the last span may have no column
        buffers += (column, bytes(4 * span - memoryview(column).nbytes))
    return _integers(buffers)


def _tensor(value: Any, dtype: torch.dtype | None = None) -> Tensor:
    flags = getattr(value, "flags", None)
    if flags is not None and not flags.writeable:  # a decoded array; torch would warn, so it gets a copy
        return torch.tensor(value, dtype=dtype)
    return torch.as_tensor(value, dtype=dtype)


def _top_p(samples: Sequence[Sample], places: Tensor) -> tuple[Tensor, Tensor]:
    ids = torch.cat([_tensor(sample.rollout_top_p_token_ids, torch.int64) for sample in samples])
    counts = torch.cat([_tensor(sample.rollout_top_p_token_offsets, torch.int64).diff() for sample in samples])
    begins = (counts.cumsum(0) - counts)[places]
    counts = counts[places]
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    within = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(counts)
    return ids[begins.repeat_interleave(counts) + within], offsets


def _routed_experts(
    samples: Sequence[Sample], starts: Sequence[int], mine: Tensor | None, experts: int | None
) -> Tensor:
    records = [_tensor(sample.rollout_routed_experts, torch.int32) for sample in samples]
    _, layers, chosen = records[0].shape
    if experts is None or experts < chosen:
        raise ValueError(
            f"pack: experts is {experts}; the samples' rollout_routed_experts name {chosen} of a layer's experts for "
            "each token: give the number of experts in a layer"
        )
    # Padding and the last token of each sequence, which the engine never read, have no record.
    rows = torch.arange(starts[-1] * chosen, dtype=torch.int32).view(-1, 1, chosen) % experts
    rows = rows.repeat(1, layers, 1)
    for record, start in zip(records, starts, strict=False):
        rows[start : start + len(record)] = record
    return rows if mine is None else rows[mine]


def _multimodal(samples: Sequence[Sample]) -> dict[str, Tensor]:
    joined: dict[str, list[Tensor]] = {}
    for sample in samples:
        for name, value in (sample.multimodal_train_inputs or {}).items():
            joined.setdefault(name, []).append(_tensor(value))
    return {name: torch.cat(values) for name, values in joined.items()}


# The checks


def check_sample(sample: Sample) -> None:
    """Tokens, response and mask go together. Columns that hold plain sequences are packed, as at the end of a stage.

    :raises BatchError: they do not, or a column does not pack.
    """
    try:
        sample.__post_init__()
    except (TypeError, ValueError, OverflowError) as error:
        raise BatchError(f"sample {sample.index}: a column does not pack: {error}") from error
    for name in ("train_metadata", "multimodal_train_inputs"):
        if not isinstance(value := getattr(sample, name), dict | None):
            raise BatchError(f"sample {sample.index}: {name} is a {type(value).__name__}, it must be a dict")
    length, response = len(sample.tokens), sample.response_length
    if not length:
        raise BatchError(f"sample {sample.index}: it has no tokens")
    if type(response) is not int or not 0 <= response <= length:
        raise BatchError(f"sample {sample.index}: response_length is {response}, of {length} tokens")
    if response == length:
        raise BatchError(
            f"sample {sample.index}: it has no prompt tokens, so nothing predicts the first token of the response"
        )
    if sample.loss_mask is not None and len(sample.loss_mask) != response:
        raise BatchError(
            f"sample {sample.index}: loss_mask has {len(sample.loss_mask)} values for {response} response tokens"
        )


def _all_have(name: str, samples: Sequence[Sample]) -> bool:
    """Whether the step has this column."""
    with_it = next((sample for sample in samples if _value(sample, name) is not None), None)
    if with_it is None:
        return False
    for sample in samples:
        if _value(sample, name) is None and (sample.loss_tokens or name in _REPLAY):
            where = f"train_metadata[{name!r}]" if name == "advantage" else name
            raise BatchError(
                f"sample {sample.index}: it has no {where}, as sample {with_it.index} and perhaps others do"
            )
    return True


def _check_numbers(name: str, samples: Sequence[Sample]) -> None:
    columns: list[Buffer] = []
    for sample in samples:
        try:
            column = _numbers(sample, name)
        except (TypeError, ValueError, OverflowError) as error:
            raise BatchError(f"sample {sample.index}: {name} is {_value(sample, name)!r}, not numbers") from error
        found = memoryview(column).nbytes // 4
        if found != sample.response_length:
            raise BatchError(
                f"sample {sample.index}: {name} has {found} values for {sample.response_length} response tokens"
            )
        columns.append(column)
    numbers = _joined(columns, torch.float32)
    if not numbers.sum().isfinite():  # which a sum of finite numbers may also be
        wrong = (_joined(map(_mask, samples), torch.int8).bool() & ~numbers.isfinite()).nonzero()
        if len(wrong):
            first = int(wrong[0])
            ends = list(accumulate(sample.response_length for sample in samples))
            sample = samples[number := bisect_right(ends, first)]
            raise BatchError(
                f"sample {sample.index}: {name} is {numbers[first].item()} for response token "
                f"{first - ends[number] + sample.response_length}, which counts in the loss"
            )


def _check_top_p(sample: Sample) -> None:
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    if ids is None and offsets is None:
        return
    if ids is None or offsets is None:
        raise BatchError(
            f"sample {sample.index}: of rollout_top_p_token_ids and rollout_top_p_token_offsets it has only one"
        )
    count = _as_tensor(sample, "rollout_top_p_token_ids", ids).numel()
    bounds = _as_tensor(sample, "rollout_top_p_token_offsets", offsets)
    if bounds.shape != (sample.response_length + 1,) or bounds[0] or bounds[-1] != count or (bounds.diff() < 0).any():
        raise BatchError(
            f"sample {sample.index}: rollout_top_p_token_offsets must rise from 0 to {count}, the number of "
            f"rollout_top_p_token_ids, in {sample.response_length} steps, one per response token"
        )


def check_experts(sample: Sample) -> Tensor:
    """The record of a sample that has one, [tokens - 1, layers, experts per token], in some type of whole numbers.

    :raises BatchError: it has another shape, or holds something else.
    """
    name = f"sample {sample.index}: rollout_routed_experts"
    record = _as_tensor(sample, "rollout_routed_experts", sample.rollout_routed_experts)
    shape = tuple(record.shape)
    if len(shape) != 3 or shape[0] != len(sample.tokens) - 1:
        raise BatchError(
            f"{name} has the shape {shape}, it must be ({len(sample.tokens) - 1}, layers, experts per token): all "
            "tokens but the last"
        )
    whole = not (record.is_floating_point() or record.is_complex() or record.dtype == torch.bool)
    if not whole or record.layout != torch.strided or record.is_meta:
        raise BatchError(f"{name} is {record.dtype}, it must be a plain array of the numbers of experts")
    if record.dtype in _UNSIGNED:  # with which torch computes little
        record = record.to(torch.int64)
    return record


_UNSIGNED: Final = (torch.uint16, torch.uint32, torch.uint64)


def _check_joined(samples: Sequence[Sample]) -> None:
    """What `pack` joins along the first dimension agrees in all else."""
    known: dict[str, tuple[Any, int | None]] = {}
    for sample in samples:
        values = dict(sample.multimodal_train_inputs or {})
        if sample.rollout_routed_experts is not None:
            values["rollout_routed_experts"] = sample.rollout_routed_experts
        for name, value in values.items():
            tensor = _as_tensor(sample, name, value)
            if not tensor.dim():
                raise BatchError(f"sample {sample.index}: {name} is a lone number; it needs a first dimension")
            kind = f"{tensor.dtype} [:, {', '.join(map(str, tensor.shape[1:]))}]"
            first, index = known.setdefault(name, (kind, sample.index))
            if kind != first:
                raise BatchError(f"sample {sample.index}: {name} is {kind}, but that of sample {index} is {first}")


def _as_tensor(sample: Sample, name: str, value: Any) -> Tensor:
    try:
        return _tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BatchError(f"sample {sample.index}: {name} is {type(value).__name__}, not numbers: {error}") from error
