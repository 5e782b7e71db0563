"""What is sent to a worker, checked on our side: the real server ignores what it does not know, or dies of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from hashlib import blake2b
from typing import Annotated, Any, Final

import msgspec

from eventbus.columns import Tokens
from eventbus.imports import optional_dependency
from eventbus.sample import Sample

__all__ = ["FIELDS", "SamplingParams", "check_fields", "check_ids", "check_sampling", "multimodal", "sibling_seed"]


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sampling parameters of SGLang 0.5.23. None leaves one to the server."""

    max_new_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]] | None = None
    stop_regex: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_new_tokens: int | None = None
    n: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    custom_params: dict[str, Any] | None = None
    watermark: Any = None


FIELDS: Final = frozenset(
    {
        "cache_salt",
        "custom_logit_processor",
        "extra_key",
        "log_metrics",
        "logprob_start_len",
        "lora_path",
        "max_thinking_tokens",
        "priority",
        "require_reasoning",
        "return_hidden_states",
        "return_indexer_topk",
        "return_sampling_mask",
        "return_text_in_logprobs",
        "routed_dp_rank",
        "sampling_logprobs_mode",
        "session_params",
        "token_ids_logprob",
        "top_logprobs_num",
    }
)
"""Fields of `/generate` that a user may add to every request. The others are the engine's own."""

_MEDIA: Final = frozenset(
    {"audio_data", "image_data", "modalities", "use_audio_in_video", "video_config", "video_data"}
)


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """:raises ValueError: a name is not known, or a value has another type."""
    for name in sampling:
        if name not in SamplingParams.__struct_fields__:
            raise ValueError(f"unknown sampling parameter {name!r}{_near(name, SamplingParams.__struct_fields__)}")
    try:
        parameters = msgspec.convert(dict(sampling), SamplingParams)
    except msgspec.ValidationError as error:
        raise ValueError(f"sampling: {error}") from None
    for name, value in sampling.items():
        numbers = value.values() if name == "logit_bias" and value else (value,)
        if not all(math.isfinite(number) for number in numbers if isinstance(number, float)):  # JSON has no such number
            raise ValueError(f"sampling parameter {name} is {value}: it must be finite")
    if parameters.n not in (None, 1):
        raise ValueError(f"sampling parameter n is {parameters.n}: a sample has one response; use group_size")


def check_fields(fields: Mapping[str, Any]) -> None:
    """:raises ValueError: a field is not known, or is the engine's own."""
    for name in fields:
        if name not in FIELDS:
            raise ValueError(f"SGLangEngine(fields=...): {name!r} is no field to set{_near(name, FIELDS)}")


def check_ids(tokens: Tokens, vocabulary: int | None, name: str = "tokens") -> None:
    """:param name: of the column, for the error.
    :raises ValueError: a token id is negative, or not less than `vocabulary`; says which, and where.
    """
    if tokens and (at := _outside(tokens, vocabulary or 1 << 31)) is not None:
        of = vocabulary or "any model"
        raise ValueError(f"the token id {tokens[at]} is not in the vocabulary of {of}: it is {name}[{at}]")


def _outside(tokens: Tokens, limit: int) -> int | None:
    """Position of the first id that is not below the limit. The view of them must be gone before anything is raised: a
    column that somebody looks at cannot grow.
    """
    with optional_dependency():
        import numpy as np
    ids = np.frombuffer(tokens, np.uint32)  # a negative one is larger than all others: one pass
    return int((ids >= limit).argmax()) if ids.max() >= limit else None


def multimodal(sample: Sample) -> dict[str, Any]:
    """The fields that carry the sample's images, audio and video.

    :raises ValueError: `multimodal_inputs` has a key that is no such field.
    """
    inputs = sample.multimodal_inputs or {}
    for name in inputs:
        if name not in _MEDIA:
            raise ValueError(f"multimodal_inputs[{name!r}] is no field of SGLang{_near(name, _MEDIA)}")
    return inputs


def sibling_seed(seed: int, sample: Sample) -> int:
    """A seed of its own for each sample of a run, the same in each run: siblings with one seed would be equal."""
    place = f"{seed}/{sample.group_index}/{sample.index}".encode()
    return int.from_bytes(blake2b(place, digest_size=4).digest(), "little") >> 1


def _near(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(names)}"
