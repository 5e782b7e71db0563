"""The wire format: a sample, group, batch or event as one msgpack message, `[version, value]`.

What it keeps true:

- Columns are raw little-endian bytes: no Python object per token, one memory copy on either side.
- Structs are maps from field name to value, defaults left out. A reader skips what it does not know: a field of a newer
  writer, or the body of an event of a newer kind (`UnknownEvent`). So `SCHEMA_VERSION` goes up with every addition,
  only to tell the reader of a newer message why it did not decode; a name never changes its meaning.
- Nothing is pickled. Bytes that are no message give a `WireError` and nothing else.

What comes back of nested values (`metadata`, `reward`, ...):

    as they were    None, bools, ints from -2**63 to 2**64 - 1, floats (also nan and inf), strings, bytes, lists, dicts
                    with any of these as keys, columns, numpy arrays, dense torch tensors (on the CPU, no gradient)
    numpy numbers   Python numbers
    tuples, sets    lists; as keys of a dict, tuples
    enums           their values
    structs         dicts, as are dataclasses; dates, decimals and UUIDs as msgspec has them
    anything else   needs `register`
"""

from __future__ import annotations

from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, TypeVar, overload

import msgspec
from msgspec.msgpack import Decoder

from eventbus.codecs import Opaque, WireError, decoder, encoder, register, undecodable, unencodable
from eventbus.events import EVENT_KINDS, Event, KnownEvent, UnknownEvent
from eventbus.sample import Sample

__all__ = ["SCHEMA_VERSION", "Opaque", "WireError", "decode", "encode", "register"]

SCHEMA_VERSION = 1

T = TypeVar("T")
Version = Annotated[int, msgspec.Meta(ge=1)]


def encode(value: Any) -> bytes:
    """A `Sample`, `Group`, `Batch`, `Event` (or another msgspec struct) as bytes.

    :raises WireError: a part of it cannot be encoded; names the sample, the path to the part and what to do.
    """
    try:
        try:
            return encoder.encode((SCHEMA_VERSION, value))
        except AttributeError:  # a sample out of a log, whose columns were not read yet
            _load(value)
            return encoder.encode((SCHEMA_VERSION, value))
    except Exception as error:
        raise unencodable(value, error) from error


@overload
def decode(data: bytes | bytearray | memoryview) -> Event: ...
@overload
def decode(data: bytes | bytearray | memoryview, type: UnionType) -> Event: ...
@overload
def decode(data: bytes | bytearray | memoryview, type: type[T]) -> T: ...
def decode(data: bytes | bytearray | memoryview, type: Any = Event) -> Any:
    """What `encode` made `data` from. The result shares no memory with `data`.

    :param type: what to expect: `Sample`, `Group`, `Batch`, `Event`, one kind of event, or `EventHead`.
    :raises WireError: the bytes are truncated or garbled, or are something else; says where.
    """
    read = _readers.get(type)
    if read is None:
        read = _readers[type] = decoder(_message(type)).decode
    try:
        return read(data)[1]
    except Exception as error:
        if type is Event and (unknown := _unknown_kind(data)):
            return unknown
        raise _failure(data, type, error) from error


def _load(value: Any) -> None:
    """Have the samples in `value` read what they have not read yet."""
    if isinstance(value, Sample):
        if (load := getattr(value, "load", None)) is not None:
            load()
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            _load(getattr(value, name))
    elif isinstance(value, list | tuple):
        for item in value:
            _load(item)


_readers: dict[Any, Callable[[Any], Any]] = {}
_any_kind = Decoder(tuple[Version, UnknownEvent])
_any_value = Decoder(tuple[Version, msgspec.Raw])


def _message(type: Any) -> Any:
    return tuple[Version, KnownEvent if type is Event else type]  # type: ignore[misc]


def _unknown_kind(data: Any) -> UnknownEvent | None:
    try:
        event = _any_kind.decode(data)[1]
    except (msgspec.MsgspecError, RecursionError):
        return None
    return None if event.kind in EVENT_KINDS else event


def _failure(data: Any, type: Any, error: Exception) -> WireError:
    failure = undecodable(data, _message(type), error)
    message = f"{getattr(type, '__name__', 'Event')}: {failure}".replace("`$[1]", "`$")
    try:
        version = _any_value.decode(data)[0]
    except (msgspec.MsgspecError, RecursionError):
        return WireError(message)
    if version > SCHEMA_VERSION:
        message += f" (written with schema version {version}, this reads up to {SCHEMA_VERSION}: upgrade rolloutbus)"
    return WireError(message)
