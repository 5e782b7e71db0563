"""Prompt sources: what they take, in which order they give, where they stand."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from eventbus.prompts import JsonlPrompts, Prompts, PromptSource
from eventbus.sample import Sample

pytestmark = pytest.mark.anyio


def texts(samples: list[Sample]) -> list[Any]:
    return [sample.prompt for sample in samples]


async def everything(source: PromptSource) -> list[Sample]:
    samples = []
    while more := await source.take(3):
        samples += more
    return samples


class Again:
    """An async iterable that can be iterated again."""

    def __init__(self, *prompts: str) -> None:
        self.prompts = prompts

    async def __aiter__(self) -> AsyncIterator[str]:
        for prompt in self.prompts:
            await checkpoint()
            yield prompt


# Prompts: what it takes


async def test_strings_dicts_and_samples() -> None:
    source = Prompts(["a", {"prompt": "b", "label": "B"}, Sample(prompt="c", metadata={"k": 1})], group_size=2)
    assert await source.take(3) == [
        Sample(group_index=0, prompt="a"),
        Sample(group_index=1, prompt="b", label="B"),
        Sample(group_index=2, prompt="c", metadata={"k": 1}),
    ]


async def test_chat_prompt() -> None:
    chat = [{"role": "user", "content": "2+2="}]
    assert texts(await Prompts([{"prompt": chat}], 1).take(1)) == [chat]


async def test_items_are_not_changed() -> None:
    items: list[Any] = [Sample(prompt="a", index=7), {"prompt": "b", "metadata": {"k": []}}]
    for sample in await Prompts(items, 1).take(2):
        sample.metadata.setdefault("k", []).append(1)
        assert sample.index is None
    assert items == [Sample(prompt="a", index=7), {"prompt": "b", "metadata": {"k": []}}]


async def test_tokens_in_a_dict_are_packed() -> None:
    [sample] = await Prompts([{"tokens": [1, 2]}], 1).take(1)
    assert sample.tokens == [1, 2]


@pytest.mark.parametrize("group_size", [0, -1, "8", True])
async def test_group_size_below_1(group_size: Any) -> None:
    with pytest.raises(ValueError, match=rf"group_size={group_size!r}: must be an int of at least 1"):
        Prompts(["a"], group_size)


@pytest.mark.parametrize("one", ["train.jsonl", b"abc", {"prompt": "a"}])
async def test_one_prompt_is_not_many(one: Any) -> None:
    with pytest.raises(TypeError, match=rf"prompts is one {type(one).__name__}, not many: .*JsonlPrompts\(path"):
        Prompts(one, 1)


async def test_not_iterable() -> None:
    with pytest.raises(TypeError, match="prompts cannot be iterated: 3"):
        Prompts(3, 1)  # type: ignore[arg-type]


async def test_unknown_field_names_item_and_nearest() -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\]: Sample has no field 'labl'; did you mean 'label'\?"):
        await Prompts(["a", {"prompt": "b", "labl": 1}], 1).take(2)


async def test_value_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"prompts\[0\]: Expected `str \| array`, got `int` - at `\$\.prompt`"):
        await Prompts([{"prompt": 3}], 1).take(1)


async def test_dict_without_a_prompt() -> None:
    with pytest.raises(ValueError, match=r"prompts\[0\] has neither 'prompt' nor 'tokens', only: label"):
        await Prompts([{"label": "4"}], 1).take(1)


@pytest.mark.parametrize("item", [3, None, ["a"]])
async def test_item_of_another_type(item: Any) -> None:
    with pytest.raises(TypeError, match=rf"prompts\[2\] is a {type(item).__name__}: a prompt is"):
        await Prompts(["a", "b", item], 1).take(5)


# Prompts: taking


async def test_fewer_only_at_the_end_and_then_none() -> None:
    source = Prompts("abcde"[:5].split() + list("xy"), 1)
    assert [texts(await source.take(2)) for _ in range(3)] == [["abcde", "x"], ["y"], []]


@given(st.lists(st.integers(1, 5), max_size=8), st.integers(0, 20))
async def test_any_sizes_give_every_prompt_once_in_order(sizes: list[int], count: int) -> None:
    source = Prompts([str(i) for i in range(count)], 1)
    taken = [await source.take(size) for size in sizes] + [await everything(source)]
    flat = [sample for samples in taken for sample in samples]
    assert [(sample.prompt, sample.group_index) for sample in flat] == [(str(i), i) for i in range(count)]


async def test_async_iterable_and_async_generator() -> None:
    async def generate() -> AsyncIterator[str]:
        yield "a"
        await checkpoint()
        yield "b"

    assert texts(await everything(Prompts(generate(), 1))) == ["a", "b"]
    assert texts(await everything(Prompts(Again("a", "b"), 1))) == ["a", "b"]


class Queue:
    """An async iterator that waits for its items."""

    def __init__(self) -> None:
        self.send, self.receive = anyio.create_memory_object_stream[str](10)

    def __aiter__(self) -> Queue:
        return self

    async def __anext__(self) -> str:
        return await self.receive.__anext__()

    def close(self) -> None:
        self.send.close()
        self.receive.close()


async def test_no_more_is_awaited_than_needed() -> None:
    queue = Queue()
    queue.send.send_nowait("a")
    queue.send.send_nowait("b")
    assert texts(await Prompts(queue, 1).take(2)) == ["a", "b"]
    queue.close()


async def test_cancelled_take_loses_nothing() -> None:
    queue = Queue()
    source = Prompts(queue, 1)
    queue.send.send_nowait("a")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(source.take, 2)
        await anyio.wait_all_tasks_blocked()
        assert source.position == {"epoch": 0, "item": 0, "group_index": 0}
        tasks.cancel_scope.cancel()
    queue.send.send_nowait("b")
    assert [(sample.prompt, sample.group_index) for sample in await source.take(2)] == [("a", 0), ("b", 1)]
    queue.close()


class Gate:
    """Gives "a", then waits for `opened` before "b"."""

    def __init__(self) -> None:
        self.opened = anyio.Event()

    async def __aiter__(self) -> AsyncIterator[str]:
        yield "a"
        await self.opened.wait()
        yield "b"


async def cancelled_take(source: Prompts, count: int) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(source.take, count)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()


async def test_cancelled_iterable_goes_on_where_it_was() -> None:
    gate = Gate()
    source = Prompts(gate, 1)
    await cancelled_take(source, 2)
    gate.opened.set()
    assert texts(await source.take(3)) == ["a", "b"]


async def test_cancelled_generator_is_not_taken_for_the_end() -> None:
    source = Prompts(aiter(Gate()), 1)
    await cancelled_take(source, 2)
    assert texts(await source.take(1)) == ["a"]
    with pytest.raises(RuntimeError, match="the prompts did not end, but their generator cannot go on: it was stopped"):
        await source.take(1)


async def test_error_of_the_iterator_surfaces_as_itself() -> None:
    def failing() -> Iterator[str]:
        yield "a"
        raise OSError("disk on fire")

    source = Prompts(failing(), 1)
    with pytest.raises(OSError, match="disk on fire"):
        await source.take(2)
    assert texts(await source.take(1)) == ["a"]
    with pytest.raises(RuntimeError, match="stopped by OSError: disk on fire"):
        await source.take(1)


# Prompts: group_index


async def test_given_group_index_is_used() -> None:
    source = Prompts([{"prompt": "a", "group_index": 70}, Sample(prompt="b", group_index=3)], 1)
    assert [sample.group_index for sample in await source.take(2)] == [70, 3]


async def test_group_index_given_twice() -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\] has group_index 5, as has one before it"):
        await Prompts([{"prompt": "a", "group_index": 5}, {"prompt": "b", "group_index": 5}], 1).take(2)


@pytest.mark.parametrize(("items", "what"), [((5, None), "lacks"), ((None, 5), "has")])
async def test_group_index_given_by_some_only(items: tuple[Any, Any], what: str) -> None:
    source = Prompts([Sample(prompt="a", group_index=index) for index in items], 1)
    with pytest.raises(ValueError, match=rf"prompts\[1\] {what} a group_index, unlike those before it"):
        await source.take(2)


@pytest.mark.parametrize("index", ["x", 1.5, True, -1])
async def test_group_index_that_counts_nothing(index: Any) -> None:
    with pytest.raises(ValueError, match=rf"prompts\[0\] has group_index {index!r}: it must be an int of at least 0"):
        await Prompts([Sample(prompt="a", group_index=index)], 1).take(1)


async def test_a_bad_item_is_not_passed_over() -> None:
    source = Prompts(["a", {"prompt": 3}, "c"], 1)
    assert texts(await source.take(1)) == ["a"]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"prompts\[1\]: "):
            await source.take(1)
    assert source.position == {"epoch": 0, "item": 1, "group_index": 1}


async def test_a_bad_item_of_a_generator_is_not_passed_over() -> None:
    source = Prompts((item for item in ("a", {"prompt": 3}, "c")), 1)
    await source.take(1)
    with pytest.raises(ValueError, match=r"prompts\[1\]: "):
        await source.take(1)
    with pytest.raises(RuntimeError, match=r"their generator cannot go on: it was stopped by ValueError: prompts\[1\]"):
        await source.take(1)


# Prompts: rewind and position


async def test_rewind_begins_again_and_group_index_goes_on() -> None:
    source = Prompts(["a", "b"], 1)
    await source.take(5)
    source.rewind()
    assert [(sample.prompt, sample.group_index) for sample in await source.take(5)] == [("a", 2), ("b", 3)]


async def test_given_group_index_may_come_again_after_rewind() -> None:
    source = Prompts([{"prompt": "a", "group_index": 5}], 1)
    await source.take(1)
    source.rewind()
    assert [sample.group_index for sample in await source.take(1)] == [5]


async def test_generator_cannot_be_rewound_or_restored() -> None:
    source = Prompts((text for text in "ab"), 1)
    with pytest.raises(RuntimeError, match="cannot be rewound: they come from a generator, which can be iterated only"):
        source.rewind()
    with pytest.raises(RuntimeError, match="cannot be restored: they come from a generator"):
        source.restore(source.position)


@given(st.integers(0, 12), st.integers(0, 2), st.booleans())
async def test_restored_source_goes_on_as_the_saved_one(taken: int, rewinds: int, is_async: bool) -> None:
    def build() -> Prompts:
        return Prompts(Again(*"abcdefgh") if is_async else list("abcdefgh"), 1)

    saved, restored = build(), build()
    for _ in range(rewinds):
        await saved.take(3)
        saved.rewind()
    await saved.take(taken)
    restored.restore(json.loads(json.dumps(saved.position)))
    assert restored.position == saved.position
    assert await everything(restored) == await everything(saved)


async def test_long_skip() -> None:
    source = Prompts([str(i) for i in range(5000)], 1)
    source.restore({"epoch": 0, "item": 4000, "group_index": 4000})
    assert texts(await source.take(1)) == ["4000"]


async def test_position_beyond_the_end() -> None:
    source = Prompts(["a"], 1)
    source.restore({"epoch": 0, "item": 5, "group_index": 5})
    with pytest.raises(ValueError, match="the position is behind 5 prompts, but there are only 1"):
        await source.take(1)


@pytest.mark.parametrize("position", [{"item": "x"}, {"item": -1}, {"line": 3}, 7])
async def test_not_a_position(position: Any) -> None:
    with pytest.raises(ValueError, match="this is no position of Prompts: "):
        Prompts(["a"], 1).restore(position)


# JsonlPrompts


def write(path: Path, *lines: str | bytes, end: bytes = b"\n") -> Path:
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + end for line in lines))
    return path


def numbered(path: Path, count: int) -> Path:
    return write(path, *(json.dumps({"prompt": str(i)}) for i in range(count)))


async def test_lines_become_samples(tmp_path: Path) -> None:
    line = {"question": "2+2=", "answer": "4", "level": 1, "metadata": {"source": "x"}}
    path = write(tmp_path / "p.jsonl", json.dumps(line))
    [sample] = await JsonlPrompts(path, 8, prompt_key="question", label_key="answer").take(1)
    assert sample == Sample(group_index=0, prompt="2+2=", label="4", metadata={"level": 1, "source": "x"})


async def test_file_order_without_a_seed_again_and_again(tmp_path: Path) -> None:
    source = JsonlPrompts(numbered(tmp_path / "p.jsonl", 3), 1)
    samples = await source.take(8)
    assert [(sample.prompt, sample.group_index) for sample in samples] == [(str(i % 3), i) for i in range(8)]


async def test_epochs_end(tmp_path: Path) -> None:
    source = JsonlPrompts(numbered(tmp_path / "p.jsonl", 3), 1, epochs=2)
    assert texts(await source.take(10)) == ["0", "1", "2", "0", "1", "2"]
    assert await source.take(1) == []


async def test_each_epoch_is_shuffled_anew(tmp_path: Path) -> None:
    source = JsonlPrompts(numbered(tmp_path / "p.jsonl", 30), 1, seed=0)
    first, second = texts(await source.take(30)), texts(await source.take(30))
    assert first != second
    assert sorted(first, key=int) == sorted(second, key=int) == [str(i) for i in range(30)]


async def test_seed_changes_the_order(tmp_path: Path) -> None:
    path = numbered(tmp_path / "p.jsonl", 30)
    assert await JsonlPrompts(path, 1, seed=0).take(30) == await JsonlPrompts(path, 1, seed=0).take(30)
    assert await JsonlPrompts(path, 1, seed=0).take(30) != await JsonlPrompts(path, 1, seed=1).take(30)


def test_order_does_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    path = numbered(tmp_path / "p.jsonl", 30)
    program = (
        "import anyio; from eventbus.prompts import JsonlPrompts\n"
        f"print([sample.prompt for sample in anyio.run(JsonlPrompts({str(path)!r}, 1, seed=0).take, 30)])"
    )
    orders = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(orders) == 1


async def test_limit_cuts_before_shuffling(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", "", *(json.dumps({"prompt": str(i)}) for i in range(30)))
    source = JsonlPrompts(path, 1, seed=0, epochs=1, limit=3)
    assert sorted(texts(await everything(source))) == ["0", "1", "2"]


async def test_rewound_file_goes_through_its_epochs_again(tmp_path: Path) -> None:
    source = JsonlPrompts(numbered(tmp_path / "p.jsonl", 20), 1, seed=0, epochs=1)
    first = texts(await everything(source))
    source.rewind()
    second = await everything(source)
    assert sorted(texts(second)) == sorted(first) != first
    assert texts(second) != first
    assert second[0].group_index == 20


@given(st.integers(0, 30), st.sampled_from([None, 0]), st.booleans())
async def test_restored_file_goes_on_as_the_saved_one(taken: int, seed: int | None, rewound: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = numbered(Path(folder) / "p.jsonl", 7)
        saved, restored = (JsonlPrompts(path, 1, seed=seed, epochs=3) for _ in range(2))
        if rewound:
            await saved.take(9)
            saved.rewind()
        await saved.take(taken)
        restored.restore(json.loads(json.dumps(saved.position)))
        assert restored.position == saved.position
        assert await everything(restored) == await everything(saved)


@pytest.mark.parametrize(("name", "value"), [("seed", 1), ("limit", 2), ("path", "other.jsonl")])
async def test_position_of_another_source(name: str, value: Any) -> None:
    mine: dict[str, Any] = {"path": "p.jsonl", "seed": 0, "limit": None}
    position = JsonlPrompts(group_size=1, **mine | {name: value}).position
    with pytest.raises(
        ValueError, match=rf"the position was saved with {name}={value!r}, but this source has {name}={mine[name]!r}"
    ):
        JsonlPrompts(group_size=1, **mine).restore(position)


async def test_position_beyond_the_file(tmp_path: Path) -> None:
    source = JsonlPrompts(numbered(tmp_path / "p.jsonl", 2), 1)
    source.restore(source.position | {"item": 9})
    with pytest.raises(ValueError, match=r"the position is behind 9 lines, but /.*/p\.jsonl has only 2"):
        await source.take(1)


async def test_blank_lines_bom_and_crlf(tmp_path: Path) -> None:
    lines = (b'\xef\xbb\xbf{"prompt": "a"}', "", "  ", '{"prompt": "\u00e9"}', "")
    source = JsonlPrompts(write(tmp_path / "p.jsonl", *lines, end=b"\r\n"), 1, epochs=1)
    assert texts(await source.take(5)) == ["a", "\u00e9"]


async def test_last_line_without_an_end(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}')
    assert texts(await JsonlPrompts(path, 1, epochs=1).take(5)) == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{prompt: a}", r"not JSON: JSON is malformed: .*: \{prompt: a\}"),
        ('{"prompt": "' + "a" * 99, r"not JSON: .*: .*aaa\.\.\."),
        (b'{"prompt": "\xff"}', r'not JSON: Invalid UTF-8 .*: \{"prompt": "\\xff"\}'),
        ('["a"]', r'expected an object, got an array: \["a"\]'),
        (b'{"a": 1}\r\x1b[2J{"b": 2}', r'not JSON: .*: \{"a": 1\}\\r\\x1b\[2J\{"b": 2\}'),
        ("[" * 9999, r"not JSON: .*: \[\[\["),
        ("3", r"expected an object, got a number: 3"),
        ('{"promt": "a", "label": 1}', r"no key 'prompt'; the keys are: promt, label; did you mean 'promt'\?"),
        ("{}", r"no key 'prompt'; the keys are: none"),
        ('{"prompt": 3}', r"'prompt' is a number: a prompt is a string or a list of objects"),
        ('{"prompt": ["a"]}', r"'prompt' is an array: a prompt is a string or a list of objects"),
        ('{"prompt": null}', r"'prompt' is null: "),
        ('{"prompt": "a", "metadata": true}', r"'metadata' is a boolean: it must be an object"),
    ],
)  # fmt: skip
async def test_bad_line_names_file_and_line(tmp_path: Path, line: str | bytes, message: str) -> None:
    path = write(tmp_path / "p.jsonl", '{"prompt": "a"}', "", line)
    with pytest.raises(ValueError, match=rf"^/.*/p\.jsonl:3: {message}"):
        await JsonlPrompts(path, 1).take(2)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (gzip.compress(b'{"prompt": "a"}'), "compressed by gzip"),
        (b"\x28\xb5\x2f\xfd...", "compressed by zstd"),
        ('{"prompt": "a"}'.encode("utf-16"), "UTF-16"),
    ],
)
async def test_file_that_is_no_text(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=rf"/p\.jsonl is {what}: prompts are read from UTF-8 text, convert it first"):
        await JsonlPrompts(tmp_path / "p.jsonl", 1).take(1)


async def test_prompt_and_label_may_be_one_key(tmp_path: Path) -> None:
    source = JsonlPrompts(write(tmp_path / "p.jsonl", '{"text": "a"}'), 1, prompt_key="text", label_key="text")
    assert await source.take(1) == [Sample(group_index=0, prompt="a", label="a")]


async def test_missing_file_is_named_at_the_first_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = JsonlPrompts("none.jsonl", 1)
    with pytest.raises(FileNotFoundError, match=rf"there is no file {tmp_path}/none\.jsonl"):
        await source.take(1)


async def test_directory(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=rf"{tmp_path} is a directory"):
        await JsonlPrompts(tmp_path, 1).take(1)


@pytest.mark.parametrize("content", [b"", b"\n\r\n", b"\xef\xbb\xbf\n"])
async def test_empty_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"/p\.jsonl holds no prompts: it is empty"):
        await JsonlPrompts(tmp_path / "p.jsonl", 1).take(1)


async def test_file_that_changes_under_way(tmp_path: Path) -> None:
    path = numbered(tmp_path / "p.jsonl", 3)
    source = JsonlPrompts(path, 1)
    await source.take(1)
    numbered(path, 12)
    with pytest.raises(ValueError, match=r"/p\.jsonl was changed while it was in use"):
        await source.take(1)


@pytest.mark.parametrize("seed", [1.5, "1", True])
async def test_seed_that_is_no_int(seed: Any) -> None:
    with pytest.raises(ValueError, match=rf"seed={seed!r}: must be an int"):
        JsonlPrompts("p.jsonl", 1, seed=seed)


async def test_position_before_its_own_beginning() -> None:
    source = JsonlPrompts("p.jsonl", 1)
    with pytest.raises(ValueError, match="no position of JsonlPrompts: epoch is before first_epoch"):
        source.restore(source.position | {"first_epoch": 3})


@pytest.mark.parametrize("name", ["group_size", "epochs", "limit"])
async def test_numbers_below_1(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}=0: must be an int of at least 1"):
        JsonlPrompts(**{"path": "p.jsonl", "group_size": 1} | {name: 0})  # type: ignore[arg-type]


async def test_only_offsets_are_kept_in_memory(tmp_path: Path) -> None:
    import tracemalloc

    path = write(tmp_path / "p.jsonl", *(json.dumps({"prompt": "x" * 1000}) for _ in range(2000)))
    source = JsonlPrompts(path, 1, seed=0)
    tracemalloc.start()
    for _ in range(20):
        await source.take(100)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 500_000  # the file has 2 MB; a worker thread remembers the last 100 lines
