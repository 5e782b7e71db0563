"""`guard_deep_ep`, by what torch_memory_saver's real hook tracked under a fake CUDA driver; each case in a process."""

from __future__ import annotations

import glob
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from backends.megatron.deep_ep import _find_hook, guard_deep_ep
from tests.megatron_ranks import run_on_ranks

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "tests" / "tms" / "fakecuda.c"

MORE_HOOKS = "ROLLOUTBUS_TMS_HOOKS"
"""Environment variable: hooks of other versions, a list of paths, to run everything under those too."""

SCENARIOS = [
    "without_the_guard_the_hook_tracks",
    "no_constructor_is_tracked",
    "off_stays_off",
    "a_failure_keeps_its_exception_and_the_flag",
    "each_thread_has_its_own_flag",
    "the_flag_is_read_when_memory_is_taken",
    "buffers_inside_of_buffers",
    "applied_twice_it_changes_once",
    "subclasses",
    "arguments_of_subclasses",
    "growth_in_a_dispatch",
    "other_classes",
    "only_what_is_deep_eps_own",
    "imported_later",
    "imported_before",
    "imported_by_another_thread_meanwhile",
    "imports_that_fail",
    "nothing_to_import",
    "the_device_is_synchronised_while_off",
    "an_error_of_the_device_is_raised",
    "undone_without_a_trace",
    "beside_another_patch",
    "what_is_guarded_outlives_a_pause",
    "the_doctor_tells_what_is_guarded",
]


def _hooks() -> list[str]:
    found = importlib.util.find_spec("torch_memory_saver")
    home = Path(str(found.origin)).parent.parent if found is not None and found.origin else None
    installed = sorted(home.glob("torch_memory_saver_hook_mode_preload_cu13*.so")) if home is not None else []
    return [*map(str, installed), *filter(None, os.environ.get(MORE_HOOKS, "").split(os.pathsep))]


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the fake driver and runtime."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc, for a fake CUDA driver")
    folder = tmp_path_factory.mktemp("fakecuda")
    build = ["gcc", "-shared", "-fPIC", "-O1", str(SOURCE)]
    subprocess.run([*build, "-DDRIVER", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1"], check=True)
    for version in ("12", "13"):
        name = f"libcudart.so.{version}"
        names = folder / f"{name}.map"
        names.write_text(f"{name} {{ global: *; }};")  # the hook asks for the runtime's functions by its version
        flags = ["-DRUNTIME", f"-Wl,-soname,{name}", f"-Wl,--version-script={names}"]
        subprocess.run([*build, *flags, "-o", folder / name], check=True)
    return folder


@pytest.fixture(params=_hooks() or [""], ids=lambda hook: "/".join(Path(hook).parts[-2:]) or "none")
def hook(request: pytest.FixtureRequest) -> str:
    if not request.param:
        pytest.skip("needs the wheel of torch_memory_saver: pip install 'rolloutbus[test-megatron]'")
    return str(request.param)


def preloaded(hook: str, driver: Path) -> dict[str, str]:
    """The environment of a process under the hook."""
    runtime = driver / ("libcudart.so.13" if "_cu13" in hook else "libcudart.so.12")
    return {"LD_PRELOAD": f"{hook}:{runtime}", "LD_LIBRARY_PATH": str(driver)}


def run(scenario: str, hook: str, driver: Path, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.tms.scenarios", scenario],
        cwd=ROOT,
        env=os.environ | preloaded(hook, driver) | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_under_the_real_hook(scenario: str, hook: str, driver: Path) -> None:
    run(scenario, hook, driver)


def test_a_region_that_is_on_from_the_start(hook: str, driver: Path) -> None:
    if "hook_mode" not in hook:
        pytest.skip("this version knows no TMS_INIT_ENABLE")
    run("on_from_the_start", hook, driver, TMS_INIT_ENABLE="1")


def test_in_a_region_of_the_real_package(hook: str, driver: Path) -> None:
    pytest.importorskip("torch")
    if hook != _hooks()[0] or importlib.util.find_spec("torch_memory_saver") is None:
        pytest.skip("its Python package is not the one that is installed")
    run("in_a_region_of_the_package", hook, driver)


def test_every_scenario_is_run() -> None:
    source = (ROOT / "tests" / "tms" / "scenarios.py").read_text(encoding="utf-8")
    before_helpers = source[source.index("def without_the_guard") : source.index("def in_thread")]
    written = [line.split("(")[0][4:] for line in before_helpers.splitlines() if line.startswith("def ")]
    assert sorted(written) == sorted([*SCENARIOS, "on_from_the_start", "in_a_region_of_the_package"])


EAGER = [
    (2, "it_is_built_with_the_trainer"),
    (2, "it_is_the_one_of_the_first_dispatch"),
    (2, "a_hybrid_one_never_grows"),
    (2, "ranks_with_different_tokens"),
    (2, "where_there_is_none_to_build"),
    (2, "one_rank_cannot"),
    (4, "a_stage_without_experts"),
]


@cache
def ran_on_ranks(ranks: int, hook: str, driver: Path, folder: Path) -> dict[str, str | None]:
    """What went wrong in each case."""
    run_on_ranks(ranks, "tests.megatron_deep_ep_worker", folder, TMS_INIT_ENABLE="1", **preloaded(hook, driver))
    found: dict[str, str | None] = json.loads((folder / "found.json").read_bytes())
    return found


@pytest.mark.parametrize(("ranks", "case"), EAGER)
def test_the_buffer_of_a_trainer(
    ranks: int, case: str, hook: str, driver: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With real megatron-core, whose tokens go through the fake DeepEP."""
    if "hook_mode" not in hook:
        pytest.skip("this version knows no TMS_INIT_ENABLE")
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("needs megatron-core: make test-megatron")
    folder = tmp_path_factory.getbasetemp() / f"eager-{ranks}-{_hooks().index(hook)}"
    folder.mkdir(exist_ok=True)
    error = ran_on_ranks(ranks, hook, driver, folder).get(case, "it did not run")
    assert error is None, error


@pytest.fixture
def deep_ep(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("deep_ep")
    module.Buffer = type("Buffer", (), {"__init__": lambda self: None, "__module__": "deep_ep"})
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    return module


@pytest.fixture
def no_hook() -> None:
    if "torch_memory_saver" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("torch_memory_saver is in LD_PRELOAD")


@pytest.mark.usefixtures("no_hook")
def test_without_a_hook_nothing_is_changed(deep_ep: Any, caplog: pytest.LogCaptureFixture) -> None:
    before, finders = dict(vars(deep_ep.Buffer)), list(sys.meta_path)
    with caplog.at_level(logging.INFO, "rolloutbus.megatron"), guard_deep_ep() as guard:
        assert dict(vars(deep_ep.Buffer)) == before
        assert sys.meta_path == finders
        assert guard.status.region is None
        assert guard.status.guarded == ()
    assert caplog.messages == [
        "nothing to guard in DeepEP: torch_memory_saver does not hook cudaMalloc: it was not in LD_PRELOAD when this "
        "process began"
    ]


@pytest.mark.usefixtures("no_hook")
def test_tells_a_preload_that_came_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/site-packages/torch_memory_saver_hook_mode_preload_cu13.abi3.so")
    with guard_deep_ep() as guard:
        assert "LD_PRELOAD names it, but the file is not there, or it was named after" in guard.status.hook


class _Function:
    """As ctypes makes them."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


def test_reads_the_flag_of_old_versions_by_their_symbols() -> None:
    state = [False]
    process = SimpleNamespace(
        tms_pause=None,
        tms_region_enter=lambda: state.__setitem__(0, True),
        tms_region_leave=lambda: state.__setitem__(0, False),
        _ZN13RegionManager21is_interesting_regionEv=_Function(lambda: state[0]),
    )
    hook, found = _find_hook(process)
    assert found == "torch_memory_saver 0.0.6 or 0.0.8 hooks cudaMalloc"
    assert hook is not None
    for on in (True, False):
        hook.write(on)
        assert hook.read() is on


def test_a_hook_whose_flag_cannot_be_read_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, deep_ep: Any
) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace(tms_pause=None, tms_region_enter=None))
    before = dict(vars(deep_ep.Buffer))
    with guard_deep_ep() as guard:
        assert dict(vars(deep_ep.Buffer)) == before
        assert guard.status.region is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no symbol of it tells its state; install 0.0.9 or later" in caplog.text


def test_where_a_process_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: object) -> None:
        raise TypeError("bad argument type")

    monkeypatch.setattr("ctypes.CDLL", refuse)
    with guard_deep_ep() as guard:
        assert guard.status.region is None


def _real_hook() -> str:
    found = importlib.util.find_spec("torch_memory_saver")
    if found is None:
        pytest.skip("needs torch_memory_saver")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    major = str(torch.version.cuda).partition(".")[0]
    hooks = glob.glob(f"{Path(str(found.origin)).parent.parent}/torch_memory_saver_hook_mode_preload_cu{major}*.so")
    if not hooks:
        pytest.skip(f"torch_memory_saver has no hook for CUDA {major}")
    return hooks[0]


def _run_on_gpu(scenario: str, hook: str) -> None:
    # The hook needs the runtime before torch has told the loader where its own is.
    runtimes = {
        str(Path(path).parent) for place in sys.path for path in glob.glob(f"{place}/nvidia/*/lib/libcudart.so.*")
    }
    places = [*sorted(runtimes), os.environ.get("LD_LIBRARY_PATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.tms.on_gpu", scenario],
        cwd=ROOT,
        env=os.environ | {"LD_PRELOAD": hook, "TMS_INIT_ENABLE": "1", "LD_LIBRARY_PATH": ":".join(places)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_on_a_gpu_a_pause_frees_what_is_tracked_and_leaves_what_is_guarded() -> None:
    _run_on_gpu("pause_frees_what_is_tracked", _real_hook())


@pytest.mark.gpu
def test_on_a_gpu_the_real_buffer_outlives_a_pause() -> None:
    if importlib.util.find_spec("deep_ep") is None:
        pytest.skip("needs deep_ep")
    _run_on_gpu("real_buffer", _real_hook())
