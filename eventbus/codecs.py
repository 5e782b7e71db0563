"""How Python objects become msgpack and come back: what `eventbus.wire` and `eventbus.events.digest` stand on.

Two kinds of objects that msgpack does not know travel as extension types:

    1, 2, 3   `Tokens`, `LogProbs`, `LossMask`: the raw little-endian bytes, copied once on either side
    16        a payload, msgpack `[name, head, data]`: a numpy array, a torch tensor, a type given to `register`

What this module keeps true: nothing is pickled, and what is read decides on no import but those of numpy and torch, for
their own payloads. A payload whose name nobody registered is kept as it is (`Opaque`), so that a log can be read,
filtered and written where its types do not exist.
"""

from __future__ import annotations

import enum
import math
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from msgspec.msgpack import Decoder, Encoder, Ext

from eventbus.columns import Column, LogProbs, LossMask, Tokens
from eventbus.sample import Sample

__all__ = ["Opaque", "WireError", "decoder", "encoder", "register", "undecodable", "unencodable"]

T = TypeVar("T")
Packed = tuple[Any, bytes | bytearray | memoryview]

_COLUMN_CODES: dict[type[Any], int] = {Tokens: 1, LogProbs: 2, LossMask: 3}
_PAYLOAD = 16
_new: Callable[..., Any] = array.__new__
_LITTLE_ENDIAN = sys.byteorder == "little"


class WireError(ValueError):
    """Something cannot be encoded, or bytes are not what they should be. The message says what and where."""


class _Damaged(WireError):
    """An extension type with bytes that do not decode."""


class Opaque:
    """A payload of a type that is not registered here. It encodes to the bytes that it came from."""

    __slots__ = ("name", "payload")

    def __init__(self, name: str, payload: bytes) -> None:
        self.name = name
        self.payload = payload

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and self.payload == other.payload

    def __hash__(self) -> int:
        return hash(self.payload)

    def __repr__(self) -> str:
        return f"Opaque({self.name!r}, {len(self.payload)} bytes)"


class _Payload(msgspec.Struct, array_like=True):
    name: str
    head: Any
    data: memoryview


def register(cls: type[T], name: str, encode: Callable[[T], Packed], decode: Callable[[Any, memoryview], T]) -> None:
    """Let objects of a type, and of its subclasses, travel inside samples and events.

    >>> register(Image, "my_stages.Image", lambda image: (image.size, image.tobytes()), Image.frombytes)

    :param name: what the payload is called on the wire; keep it for as long as logs are to be read.
    :param encode: gives (head, data): what the wire can hold (its tuples come back as lists), and raw bytes.
    :param decode: makes the object anew from both. `data` is a view into the message: copy what you keep.
    :raises ValueError: another type has this name.
    :raises TypeError: msgspec has a form of its own for the type: it would never ask the codec.
    """
    if issubclass(cls, _NATIVE) or hasattr(cls, "__dataclass_fields__") or hasattr(cls, "__attrs_attrs__"):
        raise TypeError(f"register({cls.__qualname__}): msgspec encodes it already, and never asks for a codec")
    taken = _names.setdefault(name, cls)
    if taken is not cls:
        raise ValueError(f"register({cls.__qualname__}): the name {name!r} belongs to {taken.__qualname__} already")
    _packers[cls] = partial(_pack, name, encode)
    _unpackers[name] = decode


_NATIVE = (msgspec.Struct, dict, list, tuple, set, frozenset, enum.Enum)
_names: dict[str, type[Any]] = {}
_packers: dict[type[Any], Callable[[Any], Any]] = {}
_unpackers: dict[str, Callable[[Any, memoryview], Any]] = {}


def _to_wire(value: Any) -> Any:
    """What msgspec calls for an object that it does not know."""
    code = _COLUMN_CODES.get(type(value))
    if code is not None:
        return Ext(code, value if _LITTLE_ENDIAN else value.to_bytes())
    if type(value) is Opaque:
        return Ext(_PAYLOAD, value.payload)
    for base in type(value).__mro__:
        _load(base.__module__)
        packer = _packers.get(base)
        if packer is not None:
            return packer(value)
    raise _NoCodec(type(value))


def _from_wire(code: int, data: memoryview) -> Any:
    """What msgspec calls for an extension type."""
    column: Column[Any]
    if code == 1:  # `Column.from_bytes`, unrolled: run for every column of every sample that is read
        column = _new(Tokens, "i")
    elif code == 2:
        column = _new(LogProbs, "f")
    elif code == 3:
        column = _new(LossMask, "b")
    else:
        return _payload(data) if code == _PAYLOAD else Ext(code, bytes(data))
    try:
        column.frombytes(data)
    except ValueError as error:
        raise _Damaged(f"column: {error}") from error
    if not _LITTLE_ENDIAN:
        column.byteswap()
    return column


def _payload(data: memoryview) -> Any:
    name = "payload"
    try:
        payload = _payload_decoder.decode(data)
        name = payload.name
        _load(name)
        unpack = _unpackers.get(name)
        return Opaque(name, bytes(data)) if unpack is None else unpack(payload.head, payload.data)
    except Exception as error:
        raise _Damaged(f"{name}: {error}") from error


def _pack(name: str, encode: Callable[[Any], Packed], value: Any) -> Ext:
    head, data = encode(value)
    return Ext(_PAYLOAD, encoder.encode(_Payload(name, head, memoryview(data))))


encoder = Encoder(enc_hook=_to_wire)


def decoder(of: Any) -> Decoder[Any]:
    """A decoder that knows columns and payloads."""
    return Decoder(of, ext_hook=_from_wire)


_payload_decoder = decoder(_Payload)


# Errors


class _NoCodec(TypeError):
    def __init__(self, cls: type[Any]) -> None:
        super().__init__(
            f"no codec for {cls.__module__}.{cls.__qualname__}; give it one with "
            f"eventbus.wire.register({cls.__name__}, name, encode, decode)"
        )


def unencodable(value: Any, error: Exception) -> WireError:
    """Why `value` does not encode: its innermost part that does not encode by itself, where it is, what to do."""
    owner, path = type(value).__name__, ""
    for _ in range(100):  # deeper is a circle
        if isinstance(value, Sample):
            owner, path = f"sample {value.index}", ""
        for step, part in _parts(value):
            try:
                encoder.encode(part)
            except Exception as cause:
                value, error, path = part, cause, path + step
                break
        else:
            break
    if isinstance(error, RecursionError):
        reason, path = "it contains itself, or is nested too deeply", path[:80]
    else:
        reason = str(error) if isinstance(error, _NoCodec) else f"{type(error).__name__}: {error}"
    return WireError(f"{owner}{path and ': '}{path.lstrip('.')} cannot be encoded: {reason}")


def undecodable(data: Any, of: Any, error: Exception) -> WireError:
    """Why `data` does not decode as `of`, and where."""
    if not isinstance(error, _Damaged):
        return WireError("nested too deeply" if isinstance(error, RecursionError) else str(error))

    def keep_damage(code: int, content: memoryview) -> Any:
        try:
            return _from_wire(code, content)
        except _Damaged as damage:
            return damage

    try:
        Decoder(of, ext_hook=keep_damage).decode(data)
    except msgspec.ValidationError as mismatch:  # msgspec says where it met the damage, as it has the wrong type
        return WireError(f"{error} - at {str(mismatch).rpartition(' - at ')[2]}")
    return WireError(str(error))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, msgspec.Struct):
        yield from ((f".{name}", getattr(value, name)) for name in value.__struct_fields__)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"[key {key!r}]", key
            yield f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]", item
    elif isinstance(value, list | tuple):
        yield from ((f"[{position}]", item) for position, item in enumerate(value))


# numpy and torch


def _load(name: str) -> None:
    """Add the codecs of the package that a module or payload name begins with, where it is numpy or torch."""
    package = name.partition(".")[0]
    add = _packages.get(package)
    if add is None:
        return
    with suppress(ImportError):  # then its payloads stay opaque
        add()
    _packages.pop(package, None)  # last, so that no other thread passes by before the codecs are there


def _add_numpy() -> None:
    import numpy as np

    def pack(array: np.ndarray[Any, Any]) -> Packed:
        code = array.dtype.str
        if type(array) is not np.ndarray or array.dtype.hasobject or array.dtype != np.dtype(code):
            raise TypeError(f"{type(array).__name__} of dtype {array.dtype}: only plain arrays of plain numbers travel")
        return (code, array.shape), np.ascontiguousarray(array).reshape(-1).view(np.uint8).data

    def unpack(head: Any, data: memoryview) -> Any:
        code, shape = head
        dtype = np.dtype(str(code))
        if dtype.hasobject:
            raise ValueError(f"numpy payload of dtype {code}: objects do not travel")
        _check_shape(shape, data)
        array = np.ndarray(tuple(shape), dtype, buffer=data)
        if array.nbytes != data.nbytes:
            raise ValueError(f"numpy payload: {data.nbytes} bytes for shape {shape} of {code}")
        return array.copy()

    def scalar(value: np.generic) -> Any:
        number = value.item()
        plain = value.dtype.kind in "biufUS" and not isinstance(number, np.generic)
        return number if plain else _packers[np.ndarray](np.asarray(value))

    _add_builtin(np.ndarray, "numpy.ndarray", pack, unpack)
    _packers.setdefault(np.generic, scalar)


def _add_torch() -> None:
    import torch  # type: ignore[import-not-found, unused-ignore]

    def pack(tensor: torch.Tensor) -> Packed:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
            raise TypeError(f"{type(tensor).__name__} of layout {tensor.layout}: only plain dense tensors travel")
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)), flat.view(torch.uint8).numpy().data

    def unpack(head: Any, data: memoryview) -> Any:
        name, shape = head
        dtype = getattr(torch, str(name), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"torch payload of dtype {name!r}, which this torch does not have")
        _check_shape(shape, data)
        if not data.nbytes:
            return torch.empty(0, dtype=dtype).reshape(tuple(shape))
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(tuple(shape))

    _add_builtin(torch.Tensor, "torch.Tensor", pack, unpack)


EMPTY_PLACES: Final = 1 << 20
"""What the sizes of an array without bytes may multiply to, zeros left out."""


def _check_shape(shape: Sequence[int], data: memoryview) -> None:
    """Refuse a shape that says more than the data: (2**60, 0) needs no memory until somebody makes a list of it.

    :raises ValueError: it does.
    """
    places = math.prod(max(size, 1) for size in shape)
    if places > max(data.nbytes, EMPTY_PLACES):
        raise ValueError(f"shape {shape} is too large for {data.nbytes} bytes")


def _add_builtin(
    cls: type[Any], name: str, encode: Callable[[Any], Packed], decode: Callable[[Any, memoryview], Any]
) -> None:
    """As `register`, but behind what the user registered."""
    _names.setdefault(name, cls)
    _packers.setdefault(cls, partial(_pack, name, encode))
    _unpackers.setdefault(name, decode)


_packages: dict[str, Callable[[], None]] = {"numpy": _add_numpy, "torch": _add_torch}
