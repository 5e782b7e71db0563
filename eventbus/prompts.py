"""Where prompts come from: `Prompts` over any iterable, `JsonlPrompts` over a file.

A source keeps three promises. It hands out each prompt once, in order: `take` gives fewer than it was asked for only at
the end, and what a cancelled `take` had pulled is given by the next one. It gives `group_index`, which counts prompts
over the whole run, also when the source begins again. And its position can be saved and restored.

What it hands out are prototypes: the pipeline copies each `group_size` times and fills in `index` and `rollout_id`.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from difflib import get_close_matches
from os import PathLike, fstat
from pathlib import Path
from types import AsyncGeneratorType, GeneratorType
from typing import Annotated, Any, BinaryIO, Final, Protocol, TypeAlias, TypeGuard

import anyio.lowlevel
import msgspec
from anyio.to_thread import run_sync

from eventbus.sample import Sample

__all__ = ["JsonlPrompts", "PromptSource", "Prompts"]

Item: TypeAlias = str | Mapping[str, Any] | Sample

_SKIP_SLICE: Final = 1024  # items skipped between two checkpoints when a position is restored
_BOM: Final = b"\xef\xbb\xbf"
_NOT_TEXT: Final = (
    (b"\x1f\x8b", "compressed by gzip"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
"""How files begin that are often taken for JSONL."""
LONGEST_LINE: Final = 64 << 20
"""Bytes of a line in a file of prompts: what has no line ends would be held in memory whole."""
_END: Final = object()


class PromptSource(Protocol):
    """What a pipeline needs of its prompts."""

    @property
    def group_size(self) -> int:
        """Executions per prompt."""

    @property
    def position(self) -> dict[str, Any]:
        """Where the source stands, after the last prompt that `take` returned; for JSON and `restore`."""

    async def take(self, count: int, /) -> list[Sample]:
        """Up to `count` prototypes, with `group_index` and without `index`; fewer only at the end, [] after it."""

    def rewind(self) -> None:
        """Begin again from the start; `group_index` goes on."""

    def restore(self, position: dict[str, Any], /) -> None:
        """Go to a position that a source built in the same way has saved."""


class Prompts:
    """Prompts from an iterable or async iterable: strings, dicts with the fields of `Sample`, or samples.

        Prompts(["2+2=", {"prompt": "3+3=", "label": "6"}], group_size=8)

    A chat prompt is a list of dicts in the field `prompt`. Samples are copied. `group_index` counts the prompts unless
    the items bring it, all of them or none.

    An iterable that can be iterated again (a list, an object with `__iter__`) can be rewound and restored; a restored
    one is skipped to its position, so it has to give the same items again. If iterating it fails or is cancelled, the
    next `take` iterates it again, from where it was. A generator can do none of that.

    :param group_size: executions per prompt.
    :raises ValueError: `group_size` is below 1.
    :raises TypeError: `prompts` cannot be iterated, or it is itself a single prompt or file name.
    """

    def __init__(self, prompts: Iterable[Item] | AsyncIterable[Item], group_size: int) -> None:
        self.group_size = _at_least_one("group_size", group_size)
        if isinstance(prompts, str | bytes | Mapping):
            raise TypeError(
                f"prompts is one {type(prompts).__name__}, not many: Prompts([...], group_size={group_size}), "
                "or JsonlPrompts(path, ...) for a file"
            )
        if not isinstance(prompts, Iterable | AsyncIterable):
            raise TypeError(f"prompts cannot be iterated: {prompts!r}")
        self._prompts = prompts
        self._once = isinstance(prompts, Iterator | AsyncIterator)
        self._iterator: Iterator[Item] | AsyncIterator[Item] | None = None
        self._left: Any = None  # the iterator of a pass that was left by `rewind` or `restore`
        self._broken: str | None = None
        self._given: set[int] | None = None
        self._reset(_Position())

    @property
    def position(self) -> dict[str, Any]:
        """Where the source stands, after the last prompt that `take` returned; for JSON and `restore`."""
        at = self._ready[0][0] if self._ready else self._next
        return {"epoch": at.epoch, "item": at.item, "group_index": self._group_index}

    async def take(self, count: int, /) -> list[Sample]:
        """Up to `count` prototypes, with `group_index` and without `index`; fewer only at the end, [] after it.

        :raises TypeError: an item is no prompt; says which.
        :raises ValueError: an item has a field that `Sample` lacks, or a value that does not fit; says which.
        :raises RuntimeError: the generator behind it had failed or was cancelled before.
        :raises Exception: whatever the iterable raises.
        """
        await anyio.lowlevel.checkpoint()
        if (missing := count - len(self._ready)) > 0:
            await self._pull(missing)
        taken = [self._ready.popleft()[1] for _ in range(min(count, len(self._ready)))]
        for sample in taken:
            if sample.group_index is None:
                sample.group_index = self._group_index
            self._group_index += 1
        return taken

    def rewind(self) -> None:
        """Begin again from the start; `group_index` goes on.

        :raises RuntimeError: the prompts are a generator or another iterator, which can be iterated only once.
        """
        self._refuse_once("rewound")
        self._reset(_Position(self._next.epoch + 1, 0, self._group_index))

    def restore(self, position: dict[str, Any], /) -> None:
        """Go to a position that a source built in the same way has saved.

        :raises ValueError: it is no such position.
        :raises RuntimeError: the prompts are a generator or another iterator, which can be iterated only once.
        """
        self._refuse_once("restored")
        self._reset(_position(_Position, position, self))

    def _reset(self, position: _Position) -> None:
        self._ready: deque[tuple[_Position, Sample]] = deque()
        self._next = position
        self._group_index = position.group_index
        self._left, self._iterator = self._iterator or self._left, None
        self._given = None

    def _refuse_once(self, what: str) -> None:
        if self._once:
            raise RuntimeError(
                f"prompts cannot be {what}: they come from a {type(self._prompts).__name__}, which can be iterated "
                "only once; give a list or an object whose __iter__ begins anew"
            )

    # Pulling

    async def _pull(self, count: int) -> None:
        """Make up to `count` more prompts ready; fewer at the end."""
        if self._broken is not None:
            kind = type(self._prompts).__name__.removeprefix("async_")
            raise RuntimeError(
                f"the prompts did not end, but their {kind} cannot go on: it was stopped by {self._broken}"
            )
        for _ in range(count):
            item = await self._item()
            if item is _END:
                return
            at = self._next
            try:
                sample = self._prototype(item, f"prompts[{at.item}]")
            except Exception as error:  # the item is not passed over: the next `take` meets it again
                if self._once:
                    self._broken = f"{type(error).__name__}: {error}"
                else:
                    self._left, self._iterator = self._iterator, None
                raise
            self._next = _Position(at.epoch, at.item + 1)
            self._ready.append((at, sample))

    async def _item(self) -> Any:
        try:
            iterator = self._iterator or await self._open()
            return next(iterator) if isinstance(iterator, Iterator) else await anext(iterator)
        except (StopIteration, StopAsyncIteration):
            return _END
        except BaseException as error:
            # What is raised inside a generator ends it; that must not pass for the end of the prompts.
            if not self._once:
                self._iterator = None
            elif _is_over(self._prompts):
                self._broken = f"{type(error).__name__}: {error}"
            raise

    async def _open(self) -> Iterator[Item] | AsyncIterator[Item]:
        """The iterator, at the position."""
        left, self._left = self._left, None
        if isinstance(left, AsyncGeneratorType):
            await left.aclose()
        prompts = self._prompts
        iterator = iter(prompts) if isinstance(prompts, Iterable) else aiter(prompts)
        for number in range(self._next.item):
            try:
                _ = next(iterator) if isinstance(iterator, Iterator) else await anext(iterator)
            except (StopIteration, StopAsyncIteration):
                raise ValueError(
                    f"the position is behind {self._next.item} prompts, but there are only {number}: "
                    "are these the prompts that it was saved for?"
                ) from None
            if number % _SKIP_SLICE == _SKIP_SLICE - 1:
                await anyio.lowlevel.checkpoint()
        self._iterator = iterator
        return iterator

    def _prototype(self, item: Item, where: str) -> Sample:
        if isinstance(item, str):
            sample = Sample(prompt=item)
        elif isinstance(item, Sample):
            sample = item.copy()
        elif isinstance(item, Mapping):
            sample = _from_fields(item, where)
        else:
            raise TypeError(
                f"{where} is a {type(item).__name__}: a prompt is a str, a Sample, or a dict with fields of Sample "
                "(a chat is {'prompt': [...]})"
            )
        sample.index = sample.rollout_id = None
        self._check_group_index(sample.group_index, where)
        return sample

    def _check_group_index(self, index: int | None, where: str) -> None:
        """Given by all items or by none, so that what is counted never meets what is given."""
        if index is not None and not (_is_int(index) and index >= 0):
            raise ValueError(f"{where} has group_index {index!r}: it must be an int of at least 0")
        if self._given is None:
            self._given = set()
        elif (index is None) == bool(self._given):
            raise ValueError(f"{where} {'lacks' if index is None else 'has'} a group_index, unlike those before it")
        if index is not None:
            if index in self._given:
                raise ValueError(f"{where} has group_index {index}, as has one before it: it names one prompt")
            self._given.add(index)


class JsonlPrompts(Prompts):
    """Prompts from a file with one JSON object a line; blank lines are skipped.

        JsonlPrompts("train.jsonl", group_size=8, prompt_key="question", label_key="answer", seed=0)

    Keys other than those of the prompt and the label go into `Sample.metadata`; an object under the key "metadata" is
    merged into it. Building it opens nothing: the file is read through at the first `take`, in a thread, and only where
    its lines begin is kept in memory.

    :param prompt_key: holds a str, or a chat: a list of objects.
    :param label_key: holds the label; may be missing.
    :param seed: None for the order of the file; else each epoch is shuffled by (seed, epoch).
    :param epochs: times that the file is gone through; None for without end.
    :param limit: only the first so many lines, blank ones not counted; cut before shuffling.
    :raises ValueError: `group_size`, `epochs` or `limit` is below 1, or `seed` is no int.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        group_size: int,
        prompt_key: str = "prompt",
        label_key: str = "label",
        seed: int | None = None,
        epochs: int | None = None,
        limit: int | None = None,
    ) -> None:
        self._epochs = None if epochs is None else _at_least_one("epochs", epochs)
        self._limit = None if limit is None else _at_least_one("limit", limit)
        if not (seed is None or _is_int(seed)):
            raise ValueError(f"seed={seed!r}: must be an int, or None for the order of the file")
        self._path = Path(path)
        self._prompt_key = prompt_key
        self._label_key = label_key
        self._seed = seed
        self._file: _Lines | None = None
        self._first_epoch = 0
        super().__init__((), group_size)

    @property
    def position(self) -> dict[str, Any]:
        """Where the source stands, after the last prompt that `take` returned; for JSON and `restore`."""
        made = {"path": str(self._path), "seed": self._seed, "limit": self._limit}
        return super().position | {"first_epoch": self._first_epoch} | made

    async def take(self, count: int, /) -> list[Sample]:
        """As `Prompts.take`.

        :raises OSError: the file is missing, a directory, or cannot be read.
        :raises ValueError: the file is empty, was changed since it was first read, or a line does not hold a prompt;
            names file and line.
        """
        return await super().take(count)

    def rewind(self) -> None:
        """Begin again from the start of the file, shuffled anew if there is a seed; `group_index` goes on."""
        super().rewind()
        self._first_epoch = self._next.epoch

    def restore(self, position: dict[str, Any], /) -> None:
        """Go to a position that was saved with the same path, seed and limit.

        :raises ValueError: it is no position, or was saved with others; says which.
        """
        saved = _position(_FilePosition, position, self)
        for name, mine in (("path", str(self._path)), ("seed", self._seed), ("limit", self._limit)):
            if (theirs := getattr(saved, name)) != mine:
                raise ValueError(f"the position was saved with {name}={theirs!r}, but this source has {name}={mine!r}")
        if saved.epoch < saved.first_epoch:
            raise ValueError(f"this is no position of JsonlPrompts: epoch is before first_epoch: {position!r}")
        self._reset(_Position(saved.epoch, saved.item, saved.group_index))
        self._first_epoch = saved.first_epoch

    async def _pull(self, count: int) -> None:
        if self._file is None:
            self._file = await run_sync(_Lines, self._path, self._limit)
        file = self._file
        if self._next.item > len(file):
            raise ValueError(f"the position is behind {self._next.item} lines, but {file} has only {len(file)}")
        while count > 0:
            if self._next.item == len(file):
                self._next = _Position(self._next.epoch + 1)
            at = self._next
            if self._epochs is not None and at.epoch - self._first_epoch >= self._epochs:
                return
            items = range(at.item, min(at.item + count, len(file)))
            samples = await run_sync(self._read, file, at.epoch, items)
            for item, sample in zip(items, samples, strict=True):
                self._ready.append((_Position(at.epoch, item), sample))
            self._next = _Position(at.epoch, items.stop)
            count -= len(samples)

    def _read(self, file: _Lines, epoch: int, items: range) -> list[Sample]:
        order = range(len(file)) if self._seed is None else file.shuffled(self._seed, epoch)
        with file.open() as opened:
            return [self._from_line(file, order[item], file.line(opened, order[item])) for item in items]

    def _from_line(self, file: _Lines, number: int, line: bytes) -> Sample:
        try:
            return self._from_json(line)
        except ValueError as error:
            raise ValueError(f"{file.where(number)}: {error}") from None

    def _from_json(self, line: bytes) -> Sample:
        try:
            fields = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}: {_shortened(line)}") from None
        if not isinstance(fields, dict):
            raise ValueError(f"expected an object, got {_kind(fields)}: {_shortened(line)}")
        if self._prompt_key not in fields:
            there = ", ".join(list(fields)[:20]) or "none"
            near = _did_you_mean(self._prompt_key, fields) if len(fields) < 100 else ""
            raise ValueError(f"no key {self._prompt_key!r}; the keys are: {there}{near} (prompt_key=...)")
        prompt, label = fields[self._prompt_key], fields.get(self._label_key)  # they may be one key
        for key in (self._prompt_key, self._label_key):
            fields.pop(key, None)
        is_chat = isinstance(prompt, list) and all(isinstance(turn, dict) for turn in prompt)
        if not (isinstance(prompt, str) or is_chat):
            raise ValueError(f"{self._prompt_key!r} is {_kind(prompt)}: a prompt is a string or a list of objects")
        merged = fields.pop("metadata", {})
        if not isinstance(merged, dict):
            raise ValueError(f"'metadata' is {_kind(merged)}: it must be an object")
        return Sample(prompt=prompt, label=label, metadata=fields | merged)


_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class _Position(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The next item: `item` of pass `epoch`."""

    epoch: _Count = 0
    item: _Count = 0
    group_index: _Count = 0


class _FilePosition(_Position, frozen=True, forbid_unknown_fields=True, kw_only=True):
    first_epoch: _Count
    """The epoch that began when the source was rewound last."""
    path: str
    seed: int | None
    limit: int | None


class _Lines:
    """Where the lines of a file begin. All of it blocks: for a worker thread."""

    def __init__(self, path: Path, limit: int | None) -> None:
        self._path = path.absolute()
        self._offsets = array("q")
        self._order: tuple[int, array[int]] | None = None
        with self._opened() as file:
            self._state = _state(file)
            offset = number = 0
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    raise ValueError(f"{self}:{number}: is longer than {LONGEST_LINE >> 20} MiB: is this JSONL?")
                if offset == 0 and (form := next((form for start, form in _NOT_TEXT if line.startswith(start)), None)):
                    raise ValueError(f"{self} is {form}: prompts are read from UTF-8 text, convert it first")
                if (line.removeprefix(_BOM) if offset == 0 else line).strip():
                    self._offsets.append(offset)
                    if len(self._offsets) == limit:
                        break
                offset += len(line)
        if not self._offsets:
            raise ValueError(f"{self} holds no prompts: it is empty")

    def __len__(self) -> int:
        return len(self._offsets)

    def __str__(self) -> str:
        return str(self._path)

    def open(self) -> BinaryIO:
        """:raises ValueError: the file is no longer what it was."""
        file = self._opened()
        if _state(file) != self._state:
            file.close()
            raise ValueError(f"{self} was changed while it was in use")
        return file

    def line(self, file: BinaryIO, number: int) -> bytes:
        file.seek(self._offsets[number])
        line = file.readline()
        return line.removeprefix(_BOM) if self._offsets[number] == 0 else line

    def where(self, number: int) -> str:
        """`file:line`, counting blank lines too, from 1."""
        line = 1
        with self._opened() as file:
            while file.tell() < self._offsets[number]:
                file.readline()
                line += 1
        return f"{self}:{line}"

    def shuffled(self, seed: int, epoch: int) -> array[int]:
        if self._order is None or self._order[0] != epoch:
            order = array("q", range(len(self)))
            random.Random(f"{seed}/{epoch}").shuffle(order)  # a str is hashed by SHA-512, the same in every process
            self._order = (epoch, order)
        return self._order[1]

    def _opened(self) -> BinaryIO:
        if self._path.is_dir():
            raise IsADirectoryError(f"{self} is a directory: prompts are read from one JSONL file")
        try:
            return self._path.open("rb")
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no file {self} to read prompts from") from None


def _state(file: BinaryIO) -> tuple[int, int]:
    status = fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _from_fields(fields: Mapping[str, Any], where: str) -> Sample:
    for name in fields:
        if name not in Sample.__struct_fields__:
            near = _did_you_mean(name, Sample.__struct_fields__)
            raise ValueError(f"{where}: Sample has no field {name!r}{near} (what is yours goes into 'metadata')")
    if "prompt" not in fields and "tokens" not in fields:
        raise ValueError(f"{where} has neither 'prompt' nor 'tokens', only: {', '.join(fields) or 'nothing'}")
    try:
        return msgspec.convert(dict(fields), Sample, dec_hook=lambda kind, value: kind(value)).copy()
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from error


def _position(kind: type[Any], position: dict[str, Any], source: Prompts) -> Any:
    try:
        return msgspec.convert(position, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"this is no position of {type(source).__name__}: {error}: {position!r}") from None


def _is_over(prompts: Any) -> bool:
    """Whether it is a generator that has ended."""
    if isinstance(prompts, GeneratorType):
        return prompts.gi_frame is None
    return isinstance(prompts, AsyncGeneratorType) and prompts.ag_frame is None


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _at_least_one(name: str, value: Any) -> int:
    if not _is_int(value) or value < 1:
        raise ValueError(f"{name}={value!r}: must be an int of at least 1")
    return value


def _did_you_mean(name: Any, there: Iterable[str]) -> str:
    near = get_close_matches(str(name), there, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _kind(value: Any) -> str:
    """What JSON calls it."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _shortened(line: bytes) -> str:
    text = line.strip()[:200].decode("utf-8", "backslashreplace")
    # A carriage return or an escape sequence would hide the rest of the message from a terminal.
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return text if len(text) <= 60 else f"{text[:57]}..."
