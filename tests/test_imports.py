from __future__ import annotations

import importlib.util
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import eventbus.imports
from eventbus.context import RolloutContext
from eventbus.imports import EXTRAS, LoadError, load_object, optional_dependency

Write = Callable[[str, str], None]

ROOT = Path(__file__).parent.parent


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module into a folder on sys.path; what it imported is forgotten afterwards."""
    before = dict(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - set(before):
        if getattr(sys.modules[name], "__file__", None) and tmp_path in Path(str(sys.modules[name].__file__)).parents:
            del sys.modules[name]
    eventbus.imports._load.cache_clear()


@pytest.mark.parametrize(
    "path",
    [
        "eventbus.context:RolloutContext",
        "eventbus.context.RolloutContext",
    ],
)
def test_both_forms_name_the_same(path: str) -> None:
    assert load_object(path) is RolloutContext


def test_nested_attributes() -> None:
    assert load_object("eventbus.context:RolloutContext.__init__") is RolloutContext.__init__
    assert load_object("eventbus.context.RolloutContext.__init__") is RolloutContext.__init__


def test_remembers_what_it_found(write: Write) -> None:
    write("counted.py", "class Stage:\n    @property\n    def x(self): ...\ndef __getattr__(name): return object()")
    assert load_object("counted:anything") is load_object("counted:anything")


def test_an_attribute_goes_before_a_submodule_unless_there_is_a_colon(write: Write) -> None:
    write("kit/__init__.py", "from kit.timeout import timeout")
    write("kit/timeout.py", "def timeout(): ...")
    assert load_object("kit.timeout").__name__ == "timeout"
    assert load_object("kit.timeout:timeout") is load_object("kit:timeout")


@pytest.mark.parametrize(
    "path", ["", "name", ":", "a:", ":b", "a..b", "a:b:c", "a b:c", "a/b.py:c", "a.b:1", None, 3, []]
)
def test_odd_paths_show_the_right_form(path: str) -> None:
    with pytest.raises(LoadError, match=r"write 'package\.module:attribute', such as 'my_stages:tag_source'"):
        load_object(path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_stagse:tag", "there is no module 'my_stagse'; did you mean 'my_stages'?"),
        ("kit.timout:timeout", r"there is no module 'kit\.timout'; did you mean 'timeout'?"),
        ("kit.zzz:timeout", r"there is no module 'kit\.zzz'$"),
        ("my_stages.tag:x", "'my_stages' is a module, not a package; did you mean 'my_stages:tag'?"),
        ("my_stages:tga", "module 'my_stages' has no 'tga'; did you mean 'tag'?"),
        ("my_stages.tga", "module 'my_stages' has no 'tga'; did you mean 'tag'?"),
        ("my_stages:Judge.scor", r"<class 'my_stages\.Judge'> has no 'scor'; did you mean 'score'?"),
        ("my_stages.Judge.scor", r"<class 'my_stages\.Judge'> has no 'scor'; did you mean 'score'?"),
    ],
)
def test_says_which_part_is_missing_and_what_is_near(write: Write, path: str, message: str) -> None:
    write("my_stages.py", "def tag(sample): ...\nclass Judge:\n    def score(self): ...")
    write("kit/__init__.py", "")
    write("kit/timeout.py", "")
    with pytest.raises(LoadError, match=f"cannot load '{path}': " + message.replace("?", r"\?")):
        load_object(path)


def test_a_failing_module_raises_its_own_error(write: Write) -> None:
    write("broken.py", "import no_such_package_anywhere")
    with pytest.raises(ModuleNotFoundError, match="no_such_package_anywhere") as caught:
        load_object("broken:stage")
    assert not isinstance(caught.value, LoadError)
    assert caught.value.__notes__ == ["while importing 'broken' to load 'broken:stage'"]


@pytest.mark.parametrize("code", ["", "0", "'bad'"])
def test_a_script_that_exits_ends_nothing(write: Write, code: str) -> None:
    write("script.py", f"import sys; sys.exit({code})")
    with pytest.raises(LoadError) as caught:
        load_object("script:stage")
    assert f"'script' calls sys.exit({code}) while it is imported; put what it runs under" in str(caught.value)


def test_a_missing_name_inside_a_module_stays_its_own_error(write: Write) -> None:
    write("broken.py", "from eventbus.context import nonsense")
    with pytest.raises(ImportError, match="cannot import name 'nonsense'") as caught:
        load_object("broken.stage")
    assert not isinstance(caught.value, LoadError)


def test_a_module_can_be_mended_and_loaded_again(write: Write) -> None:
    with pytest.raises(LoadError):
        load_object("late:stage")
    write("late.py", "stage = 1")
    assert load_object("late:stage") == 1


def test_loads_from_the_program_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    program = ModuleType("__main__")
    program.__spec__ = None
    program.stage = 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", program)
    assert load_object("__main__:stage") == 1


def test_names_the_extra_that_our_own_module_needs(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("probe.py", "import torch.nn")
    spec = importlib.util.find_spec("probe")
    monkeypatch.setattr(eventbus.imports, "find_spec", lambda name: spec if name == "eventbus.probe" else None)
    monkeypatch.setattr("eventbus.__path__", [str(Path(str(spec and spec.origin)).parent)])
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        LoadError, match=r"cannot load 'eventbus\.probe:Engine': torch is not installed: pip install 'rolloutbus\[emb"
    ) as caught:
        load_object("eventbus.probe:Engine")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_other_missing_packages_stay_as_they_are() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package"), optional_dependency():
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401


def test_the_extras_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for module, extra in EXTRAS.items():
        name = {"megatron": "megatron-core"}.get(module, module.replace("_", "-"))
        assert any(need.startswith(f"{name}>=") for need in extras[extra]), module


@pytest.mark.parametrize("name", ["middleware", "backends"])
def test_refuses_a_package_that_shadows_ours(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write(f"{name}/__init__.py", "raise AssertionError('never run')")
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(LoadError, match=f"'{name}' is {tmp_path / name}, not the package of rolloutbus in {ROOT}"):
        load_object(f"{name}:Generate")


def test_refuses_a_module_that_shadows_ours(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("middleware.py", "")
    foreign = ModuleType("middleware")
    foreign.__spec__ = importlib.util.spec_from_file_location("middleware", tmp_path / "middleware.py")
    monkeypatch.setitem(sys.modules, "middleware", foreign)
    with pytest.raises(LoadError, match=rf"'middleware' is {tmp_path}/middleware\.py, not the package"):
        load_object("middleware:Generate")
