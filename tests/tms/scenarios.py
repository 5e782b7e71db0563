"""What `test_deep_ep.py` runs under torch_memory_saver's real hook and a fake driver, one function in each process:
`LD_PRELOAD=... python -m tests.tms.scenarios NAME`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import io
import json
import logging
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from backends.megatron.deep_ep import guard_deep_ep
from tests.tms import cuda
from tests.tms.cuda import Counts, taken_by

CLASSES = ("Buffer", "ElasticBuffer", "HybridEPBuffer")

NOT_TRACKED = {"Buffer": Counts(0, 2, 0), "ElasticBuffer": Counts(0, 1, 1), "HybridEPBuffer": Counts(0, 3, 0)}
TRACKED = {"Buffer": Counts(2, 0, 0), "ElasticBuffer": Counts(1, 0, 1), "HybridEPBuffer": Counts(3, 0, 0)}

sys.path.insert(0, str(Path(__file__).parent))


def imported() -> Any:
    """The fake deep_ep."""
    return importlib.import_module("deep_ep")


def without_the_guard_the_hook_tracks() -> None:
    deep_ep = imported()
    cuda.set_flag(True)
    for name in CLASSES:
        assert taken_by(getattr(deep_ep, name)) == TRACKED[name], name
    cuda.set_flag(False)
    for name in CLASSES:
        assert taken_by(getattr(deep_ep, name)) == NOT_TRACKED[name], name


def no_constructor_is_tracked() -> None:
    deep_ep = imported()
    cuda.set_flag(True)
    with guard_deep_ep():
        for name in CLASSES:
            assert taken_by(getattr(deep_ep, name)) == NOT_TRACKED[name], name
            assert cuda.flag() is True
        assert taken_by(cuda.malloc) == Counts(1, 0, 0)  # what is not DeepEP's still is
        assert deep_ep.ElasticBuffer().flag_at_window is False


def off_stays_off() -> None:
    deep_ep = imported()
    cuda.set_flag(False)
    with torch_that(synchronizes) as synchronized, guard_deep_ep():
        for name in CLASSES:
            assert taken_by(getattr(deep_ep, name)) == NOT_TRACKED[name], name
            assert cuda.flag() is False
        assert not synchronized


def a_failure_keeps_its_exception_and_the_flag() -> None:
    deep_ep = imported()
    with guard_deep_ep():
        for on in (True, False):
            cuda.set_flag(on)
            for name in CLASSES:
                before = cuda.counts()
                error = raised(lambda name=name: getattr(deep_ep, name)(fails=True))  # type: ignore[misc]
                assert isinstance(error, RuntimeError), error
                assert str(error).startswith("Failed: ")
                assert cuda.counts().tracked == before.tracked
                assert cuda.flag() is on


def each_thread_has_its_own_flag() -> None:
    deep_ep = imported()
    cuda.set_flag(True)
    with guard_deep_ep():
        for on in (True, False):

            def build(on: bool = on) -> None:
                cuda.set_flag(on)
                for name in CLASSES:
                    assert taken_by(getattr(deep_ep, name)) == NOT_TRACKED[name], name
                    assert cuda.flag() is on

            in_thread(build)
            assert cuda.flag() is True


def the_flag_is_read_when_memory_is_taken() -> None:
    deep_ep = imported()
    with guard_deep_ep():
        cuda.set_flag(True)
        assert taken_by(deep_ep.Buffer) == NOT_TRACKED["Buffer"]
        cuda.set_flag(False)
        assert taken_by(deep_ep.Buffer) == NOT_TRACKED["Buffer"]
        assert cuda.flag() is False


def on_from_the_start() -> None:
    """TMS_INIT_ENABLE=1, and nobody has initialised the Python package: its `_impl` is None."""
    deep_ep = imported()
    assert cuda.flag() is True
    with guard_deep_ep() as guard:
        assert guard.status.region is True
        for run in (in_thread, lambda build: build()):

            def build() -> None:
                for name in CLASSES:
                    assert taken_by(getattr(deep_ep, name)) == NOT_TRACKED[name], name
                    assert cuda.flag() is True

            run(build)
    assert "torch_memory_saver" not in sys.modules


def buffers_inside_of_buffers() -> None:
    deep_ep = imported()
    cuda.set_flag(True)
    with guard_deep_ep():

        class Outer(deep_ep.Buffer):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                self.inner = deep_ep.HybridEPBuffer()
                assert cuda.flag() is False
                super().__init__()
                assert cuda.flag() is False

        with torch_that(synchronizes) as synchronized:
            assert taken_by(Outer) == Counts(0, 5, 0)
        assert synchronized == [False]  # once, by the outermost, while still off
        assert cuda.flag() is True


def applied_twice_it_changes_once() -> None:
    deep_ep = imported()
    original = deep_ep.Buffer.__init__
    first, second = guard_deep_ep(), guard_deep_ep()
    assert deep_ep.Buffer.__init__.__wrapped__ is original
    cuda.set_flag(True)
    assert taken_by(deep_ep.Buffer) == NOT_TRACKED["Buffer"]
    first.unguard()
    first.unguard()
    assert taken_by(deep_ep.Buffer) == NOT_TRACKED["Buffer"]
    second.unguard()
    assert deep_ep.Buffer.__init__ is original
    assert cuda.flag() is True


def subclasses() -> None:
    deep_ep = imported()
    cuda.set_flag(True)

    def define() -> list[type]:
        class Early(deep_ep.Buffer):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                self.early = cuda.malloc()
                super().__init__()

        class Alone(deep_ep.Buffer):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                self.early = [cuda.malloc(), cuda.malloc(), cuda.malloc()]

        class Grandchild(Early):
            def __init__(self) -> None:
                super().__init__()

        class Mixin:
            def __init__(self) -> None:
                self.mixed = cuda.malloc()
                super().__init__()

        class Mixed(Mixin, deep_ep.Buffer):  # type: ignore[misc, name-defined]
            pass

        class InNew(deep_ep.HybridEPBuffer):  # type: ignore[misc, name-defined]
            def __new__(cls) -> Any:
                cuda.malloc()
                return super().__new__(cls)

            def __init__(self) -> None:
                self.runtime = None

        class Same(deep_ep.HybridEPBuffer):  # type: ignore[misc, name-defined]
            pass

        return [Early, Alone, Grandchild, Mixed, InNew, Same]

    taken = [3, 3, 3, 3, 1, 3]
    before = define()
    assert [taken_by(cls) for cls in before] == [Counts(count, 0, 0) for count in taken]
    with guard_deep_ep():
        for classes in (before, define()):
            assert [taken_by(cls) for cls in classes] == [Counts(0, count, 0) for count in taken]
            assert cuda.flag() is True
    assert [taken_by(cls) for cls in before] == [Counts(count, 0, 0) for count in taken]


def arguments_of_subclasses() -> None:
    """An `__init_subclass__` of deep_ep's own goes on to work."""
    seen: list[object] = []
    with package(
        "from tests.tms import cuda\n"
        "class Buffer:\n"
        "    def __init_subclass__(cls, *, kind, **more):\n"
        "        super().__init_subclass__(**more)\n"
        "        cls.kind = kind\n"
    ) as find:
        deep_ep = find()
        with guard_deep_ep():

            class Kind(deep_ep.Buffer, kind="mine"):  # type: ignore[call-arg, misc, name-defined]
                def __init__(self) -> None:
                    seen.append(cuda.malloc())

            cuda.set_flag(True)
            assert Kind.kind == "mine"
            assert taken_by(Kind) == Counts(0, 1, 0)


def growth_in_a_dispatch() -> None:
    deep_ep = imported()
    cuda.set_flag(True)
    with torch_that(synchronizes) as synchronized, guard_deep_ep():
        buffer = deep_ep.HybridEPBuffer(max_num_of_tokens_per_rank=16)
        assert synchronized == [False]
        assert taken_by(lambda: buffer.dispatch(16)) == Counts(1, 0, 0)  # its result is the region's
        assert taken_by(lambda: buffer.dispatch(32)) == Counts(1, 3, 0)
        assert taken_by(lambda: buffer.dispatch(32)) == Counts(1, 0, 0)
        assert cuda.flag() is True
        assert synchronized == [False]  # none in a dispatch, but for DeepEP's own as it grew
        assert cuda.synchronized() == 1

        class Sub(deep_ep.HybridEPBuffer):  # type: ignore[misc, name-defined]
            def update_template_config(self, num_of_tokens_per_rank: int) -> Any:
                cuda.malloc()
                return super().update_template_config(num_of_tokens_per_rank)

        sub = Sub()
        assert taken_by(lambda: sub.dispatch(64)) == Counts(1, 4, 0)
        in_thread(lambda: sub.dispatch(128))
        cuda.set_flag(False)
        assert taken_by(lambda: sub.dispatch(256)) == Counts(0, 5, 0)
        assert cuda.flag() is False
        cuda.set_flag(True)
        del sub.runtime
        assert isinstance(raised(lambda: sub.dispatch(512)), AttributeError)
        assert cuda.flag() is True


def other_classes() -> None:
    deep_ep = imported()
    cuda.set_flag(True)
    with guard_deep_ep() as guard, log() as lines:
        assert taken_by(deep_ep.LowLatencyBuffer) == Counts(0, 1, 0)
        assert taken_by(deep_ep.EventOverlap) == Counts(1, 0, 0)
        assert taken_by(deep_ep._PrivateBuffer) == Counts(1, 0, 0)
        assert guard.status.guarded == ("Buffer", "ElasticBuffer", "HybridEPBuffer", "LowLatencyBuffer")
    assert not lines


def only_what_is_deep_eps_own() -> None:
    with (
        package(
            "from tests.tms import cuda\n"
            "from logging import Handler as StdBuffer\n"
            "Buffer = make_buffer = 3\n"
            "class Fixed(type):\n"
            "    def __setattr__(cls, name, value): raise TypeError('cannot set ' + name)\n"
            "class FixedBuffer(metaclass=Fixed):\n"
            "    def __init__(self): cuda.malloc()\n"
            "class _Base:\n"
            "    def __init__(self): cuda.malloc()\n"
            "class DerivedBuffer(_Base): pass\n"
            "class EmptyBuffer: pass\n"
        ) as find,
        log() as lines,
        guard_deep_ep() as guard,
    ):
        deep_ep = find()
        cuda.set_flag(True)
        assert guard.status.guarded == ("DerivedBuffer", "EmptyBuffer")
        assert taken_by(deep_ep.DerivedBuffer) == Counts(0, 1, 0)
        assert taken_by(deep_ep._Base) == Counts(1, 0, 0)
        assert taken_by(deep_ep.FixedBuffer) == Counts(1, 0, 0)
        assert "FixedBuffer of deep_ep is not guarded: cannot set __init__" in lines
        deep_ep.EmptyBuffer()
    deep_ep.EmptyBuffer()
    assert "__init__" not in vars(deep_ep.DerivedBuffer)
    assert "__init_subclass__" not in vars(deep_ep.DerivedBuffer)


def imported_later() -> None:
    with log() as lines, guard_deep_ep():
        assert len(lines) == 1
        assert lines[0].startswith("DeepEP's buffers will be guarded when deep_ep is imported: torch_memory_saver 0.0.")
        deep_ep = imported()
        assert len(lines) == 2
        assert lines[1].startswith("guarded in DeepEP: Buffer, ElasticBuffer, HybridEPBuffer, LowLatencyBuffer; ")
        cuda.set_flag(True)
        for name in CLASSES:
            assert taken_by(getattr(deep_ep, name)) == NOT_TRACKED[name], name
        old = deep_ep.Buffer
        importlib.reload(deep_ep)
        assert deep_ep.Buffer is not old
        assert taken_by(deep_ep.Buffer) == taken_by(old) == NOT_TRACKED["Buffer"]


def imported_before() -> None:
    imported()
    with log() as lines, guard_deep_ep():
        assert len(lines) == 1
        assert lines[0].startswith("guarded in DeepEP: Buffer, ElasticBuffer, HybridEPBuffer, LowLatencyBuffer; ")
        guard_deep_ep().unguard()
        assert len(lines) == 1


def imported_by_another_thread_meanwhile() -> None:
    import tests.tms.cuda as shared

    started, go_on = threading.Event(), threading.Event()

    def gate() -> None:
        started.set()
        go_on.wait()

    shared.gate = gate  # type: ignore[attr-defined]
    with package(
        "from tests.tms import cuda\ncuda.gate()\nclass Buffer:\n    def __init__(self): cuda.malloc()\n"
    ) as find:
        importer = threading.Thread(target=find)
        importer.start()
        started.wait()
        guards: list[Any] = []
        guarding = threading.Thread(target=lambda: guards.append(guard_deep_ep()))
        guarding.start()
        go_on.set()
        importer.join()
        guarding.join()
        cuda.set_flag(True)
        assert guards[0].status.guarded == ("Buffer",)
        assert taken_by(find().Buffer) == Counts(0, 1, 0)


def imports_that_fail() -> None:
    with guard_deep_ep() as guard:
        for error in ("AssertionError('No libnccl.so found')", "OSError('libcudart')", "TypeError()", "ImportError()"):
            with package(f"raise {error}") as find, log() as lines:
                kind = error.partition("(")[0]
                assert type(raised(find)).__name__ == kind
                assert len(lines) == 1
                assert lines[0].startswith(f"deep_ep could not be imported, nothing of it is guarded: {kind}:")
                with guard_deep_ep():  # asks for nothing to be imported
                    assert len(lines) == 1
                assert guard.status.guarded == ()
        with package("class Nothing: pass") as find, log() as lines:
            find()
            assert lines == ["nothing is guarded: deep_ep has no public class whose name ends in Buffer"]
        cuda.set_flag(True)
        assert taken_by(imported().Buffer) == NOT_TRACKED["Buffer"]


def nothing_to_import() -> None:
    sys.path.remove(str(Path(__file__).parent))
    with guard_deep_ep():
        assert type(raised(imported)) is ModuleNotFoundError
        with package("Buffer = None") as find:
            sys.modules["deep_ep"] = None  # type: ignore[assignment]
            guard_deep_ep().unguard()
            assert type(raised(find)) is ModuleNotFoundError


def the_device_is_synchronised_while_off() -> None:
    deep_ep = imported()
    cuda.set_flag(True)
    with guard_deep_ep():
        for name in CLASSES:
            with torch_that(synchronizes) as synchronized:
                getattr(deep_ep, name)()
            assert synchronized == [False]
        with torch_that(synchronizes) as synchronized:
            raised(lambda: deep_ep.Buffer(fails=True))
        assert synchronized == [False]
        with torch_that(synchronizes, available=False) as synchronized:
            deep_ep.Buffer()
        assert not synchronized


def an_error_of_the_device_is_raised() -> None:
    deep_ep = imported()
    cuda.set_flag(True)
    with guard_deep_ep(), torch_that(fails):
        for name in CLASSES:
            error = raised(getattr(deep_ep, name))
            assert str(error) == "CUDA error: an illegal memory access was encountered"
            assert cuda.flag() is True
        error = raised(lambda: deep_ep.Buffer(fails=True))
        assert str(error).startswith("Failed: CUDA error, DeepEP")
        assert error.__notes__ == [
            "the device could not be synchronised after that: CUDA error: an illegal memory access was encountered"
        ]
        assert cuda.flag() is True


def undone_without_a_trace() -> None:
    deep_ep = imported()
    before = {name: dict(vars(getattr(deep_ep, name))) for name in CLASSES}
    finders = list(sys.meta_path)
    with guard_deep_ep():
        assert sys.meta_path != finders
        assert deep_ep.Buffer.__init__ is not before["Buffer"]["__init__"]
    assert sys.meta_path == finders
    assert {name: dict(vars(getattr(deep_ep, name))) for name in CLASSES} == before
    cuda.set_flag(True)
    for name in CLASSES:
        assert taken_by(getattr(deep_ep, name)) == TRACKED[name], name
    with guard_deep_ep():
        assert taken_by(deep_ep.Buffer) == NOT_TRACKED["Buffer"]


def beside_another_patch() -> None:
    """One that wraps `Buffer.__init__` as ours does, put around the guard, under it, and left there."""
    deep_ep = imported()
    cuda.set_flag(True)

    def patch() -> None:
        init = deep_ep.Buffer.__init__

        @functools.wraps(init)
        def patched(self: Any, *args: Any, **kwargs: Any) -> None:
            was = cuda.flag()
            cuda.set_flag(False)
            try:
                init(self, *args, **kwargs)
            finally:
                cuda.set_flag(was)

        deep_ep.Buffer.__init__ = patched

    def transparent() -> None:
        init = deep_ep.Buffer.__init__
        deep_ep.Buffer.__init__ = functools.wraps(init)(lambda *args, **kwargs: init(*args, **kwargs))

    patch()
    with guard_deep_ep():
        patch()
        assert taken_by(deep_ep.Buffer) == NOT_TRACKED["Buffer"]
        assert cuda.flag() is True
    importlib.reload(deep_ep)
    with guard_deep_ep():
        transparent()
    assert taken_by(deep_ep.Buffer) == TRACKED["Buffer"]  # our wrapper, inside of theirs, does nothing any more
    with guard_deep_ep():
        assert taken_by(deep_ep.Buffer) == NOT_TRACKED["Buffer"]
        assert cuda.flag() is True


def what_is_guarded_outlives_a_pause() -> None:
    deep_ep = imported()
    cuda.set_flag(True)
    with guard_deep_ep():
        buffer = deep_ep.Buffer()
        tracked = cuda.malloc()
        cuda.process.tms_pause(None)
        assert ctypes.c_int.in_dll(cuda.process, "fake_unmapped").value == 1
        for pointer in buffer.memory:
            ctypes.memset(pointer, 7, cuda.MIB)
            assert ctypes.string_at(pointer, 2) == b"\7\7"
        cuda.process.tms_resume(None)
        ctypes.memset(tracked, 7, cuda.MIB)


def the_doctor_tells_what_is_guarded() -> None:
    import eventbus.doctor as command

    deep_ep = next(part for part in command.PARTS if part.name == "deep_ep")
    command.PARTS = (deep_ep._replace(distributions=[]),)  # type: ignore[assignment, misc]
    cuda.set_flag(True)
    for as_json in (True, False):
        with redirect_stdout(io.StringIO()) as output:
            command.doctor(as_json=as_json)
        text = output.getvalue()
        assert "torch_memory_saver 0.0." in text
        if as_json:
            report = json.loads(text)
            assert report["parts"][0]["version"] == "0+fake"
            assert report["guard_deep_ep"]["region"] is True
            assert report["guard_deep_ep"]["guarded"] == [*CLASSES, "LowLatencyBuffer"]
        else:
            assert text.splitlines()[-2].endswith("; the region is on in the main thread")
            assert text.splitlines()[-1] == "it guards Buffer, ElasticBuffer, HybridEPBuffer, LowLatencyBuffer"
    assert taken_by(imported().Buffer) == TRACKED["Buffer"]  # it has undone what it did


def in_a_region_of_the_package() -> None:
    """The real Python package, with nothing of torch replaced but the pool, which needs a device."""
    import torch

    class Pool:
        def __init__(self, allocator: object = None) -> None:
            pass

    torch.cuda.MemPool = Pool  # type: ignore[assignment,misc]
    setattr(torch.cuda, "use_mem_pool", lambda pool: nullcontext())  # noqa: B010
    saver = importlib.import_module("torch_memory_saver").torch_memory_saver
    saver._ensure_initialized()
    device: Any = saver._impl._device_module
    device.MemPool, device.use_mem_pool, device.current_device = Pool, lambda pool: nullcontext(), lambda: 0
    with guard_deep_ep(), saver.region(tag="weights"):  # which asserts at its end that the flag is on
        deep_ep = imported()
        for name in CLASSES:
            assert taken_by(getattr(deep_ep, name)) == NOT_TRACKED[name], name
            assert cuda.flag() is True
        with saver.disable():
            assert taken_by(deep_ep.Buffer) == NOT_TRACKED["Buffer"]
            assert cuda.flag() is False
    assert cuda.flag() is False


def in_thread(call: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def raised(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def synchronizes(synchronized: list[bool]) -> None:
    synchronized.append(cuda.flag())


def fails(synchronized: list[bool]) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@contextmanager
def torch_that(does: Callable[[list[bool]], None], available: bool = True) -> Iterator[list[bool]]:
    """Stands for torch on a device. What it yields is the flag at each synchronisation."""
    synchronized: list[bool] = []
    device = SimpleNamespace(is_available=lambda: available, synchronize=lambda: does(synchronized))
    module = ModuleType("torch")
    module.cuda = device  # type: ignore[attr-defined]
    sys.modules["torch"] = module
    try:
        yield synchronized
    finally:
        del sys.modules["torch"]


@contextmanager
def package(source: str) -> Iterator[Callable[[], Any]]:
    """A deep_ep of this source; what it yields imports it."""
    sys.modules.pop("deep_ep", None)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "deep_ep.py").write_text(source, encoding="utf-8")
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            yield imported
        finally:
            sys.path.remove(folder)
            sys.modules.pop("deep_ep", None)
            importlib.invalidate_caches()


@contextmanager
def log() -> Iterator[list[str]]:
    """The lines that are logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("rolloutbus.megatron")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    globals()[sys.argv[1]]()
