"""What encoding and decoding one sample costs: 4,096 tokens and their log-probabilities, beside bare msgspec.

Bare msgspec is a struct with the same fields whose columns are bytes, without version, checks or columns that can be
used afterwards: the least that any wire format on msgspec costs. Lists and pickle are there for comparison.

    python -m benchmarks.wire
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import msgspec

from eventbus.columns import LogProbs, LossMask, Tokens
from eventbus.sample import Sample, SampleStatus
from eventbus.wire import decode, encode

__all__ = ["rows"]

_TOKENS = 4096
_COLUMNS = ("tokens", "rollout_log_probs")


def rows(rounds: int = 101, calls: int = 100) -> list[tuple[str, float, str]]:
    """(what, time beside bare msgspec's, bound). Cases take turns; the ratio is the median over the rounds."""
    cases = _cases()
    names = [(what, name) for name in cases for what in ("encode", "decode")]
    times: dict[tuple[str, str], list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, (encoder, decoder, value, *kind) in cases.items():
            times["encode", name].append(_seconds(calls, encoder, value))
            times["decode", name].append(_seconds(calls, decoder, encoder(value), *kind))
    return [
        (
            f"wire {what}, {name}",
            median(own / bare for own, bare in zip(times[what, name], times[what, "bare msgspec"], strict=True)),
            "at most 2" if name == "rolloutbus" else "",
        )
        for what, name in names
    ]


def _cases() -> dict[str, tuple[Any, ...]]:
    """Encoder, decoder, the value, and the type where the decoder wants it."""
    sample = Sample(
        group_index=1,
        index=8,
        rollout_id=8,
        prompt="2+2=",
        tokens=Tokens(range(_TOKENS)),
        response="4" * 20,
        response_length=_TOKENS,
        reward=1.0,
        rollout_log_probs=LogProbs([-0.001 * position for position in range(_TOKENS)]),
        status=SampleStatus.COMPLETED,
        metadata={"source": "train"},
    )
    as_bytes, as_lists = _twin("AsBytes", bytes), _twin("AsLists", list[int], list[float])
    fields = {name: getattr(sample, name) for name in Sample.__struct_fields__}
    packed = fields | {name: fields[name].tobytes() for name in _COLUMNS}
    listed = fields | {name: fields[name].tolist() for name in _COLUMNS}
    bare = msgspec.msgpack.Encoder()
    return {
        "bare msgspec": (bare.encode, msgspec.msgpack.Decoder(as_bytes).decode, as_bytes(**packed)),
        "rolloutbus": (encode, decode, sample, Sample),
        "msgspec, lists": (bare.encode, msgspec.msgpack.Decoder(as_lists).decode, as_lists(**listed)),
        "pickle": (partial(pickle.dumps, protocol=5), pickle.loads, listed),
    }


def _twin(name: str, ints: Any, floats: Any = bytes) -> type[Any]:
    """A struct with the fields of `Sample`, its columns of the given types."""
    kinds: dict[Any, Any] = {Tokens: ints, LossMask | None: ints | None, LogProbs | None: floats | None}
    twins: list[tuple[str, Any, Any]] = []
    for field in msgspec.structs.fields(Sample):
        if field.default_factory in (list, dict):
            default = msgspec.field(default_factory=field.default_factory)
        else:
            default = field.default if field.name != "tokens" else None
        twins.append((field.name, kinds.get(field.type, field.type), default))
    return msgspec.defstruct(name, twins, kw_only=True, omit_defaults=True)


def _seconds(calls: int, call: Callable[..., Any], *args: Any) -> float:
    started = perf_counter()
    for _ in range(calls):
        call(*args)
    return (perf_counter() - started) / calls


if __name__ == "__main__":
    for what, ratio, bound in rows():
        print(f"{what:32} {ratio:7.2f}  {bound}")
