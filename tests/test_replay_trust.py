"""A log of somebody else: what it names is not imported unless it is a stage of rolloutbus, or lies in the project."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

import eventbus.imports
import middleware
from eventbus import BatchSpec, LogReader, Pipeline, Replay, Sample
from eventbus.config import DEEPEST_KEY, LARGEST_FILE
from eventbus.imports import LoadError
from eventbus.replay.commands import replay
from eventbus.replay.stages import Known, named_in
from eventbus.replay.trust import HARMLESS, Unasked
from eventbus.stage import DeclaredStage
from middleware import DynamicFilter, Generate, Recorder, RemoteReward, reward_nonzero_std, sample_stage
from tests.recorded import record
from tests.streams import endless, engine

STAGES = """
import os, subprocess
from functools import partial
from pathlib import Path
from subprocess import Popen
from eventbus import Sample
from middleware import DynamicFilter, in_thread, reward_nonzero_std, sample_stage
import parts.more

def score(sample: Sample, factor: float = 1.0) -> None:
    sample.reward = factor * (sample.index % 4 == 1)

class Scorer:
    LIMIT = 3
    def __init__(self, factor: float = 1.0, table: Path | None = None) -> None:
        self.factor, self.table = factor, table
    def __call__(self, sample: Sample) -> None:
        score(sample, self.factor)
    def method(self, sample: Sample) -> None:
        score(sample)

scorer = Scorer()
bound = partial(score, factor=1.0)
threaded = in_thread(score)
declared = sample_stage(score, name="score")
remote = sample_stage(score, name="score", external=True)
strict = DynamicFilter(reward_nonzero_std)
FACTOR = 1.0

system = os.system
shell = partial(os.system)
hidden = sample_stage(os.system, name="score")
console = subprocess.list2cmdline
opened = Path("x")
"""
EVIL = "from pathlib import Path\nPath({canary!r}).touch()\ndef score(sample):\n    pass\n"


def score(sample: Sample) -> None:
    sample.reward = float((sample.index or 0) % 4 == 1)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which somebody works."""
    before, path = dict(sys.modules), list(sys.path)
    folder = tmp_path / "project"
    (folder / "parts").mkdir(parents=True)
    (folder / "mine.py").write_text(STAGES)
    (folder / "parts" / "more.py").write_text("def score(sample):\n    sample.reward = float(sample.index % 4 == 1)\n")
    monkeypatch.chdir(folder)
    importlib.invalidate_caches()
    yield folder
    sys.path[:] = path
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0] in ("mine", "parts", "evil", "torch_evil", "beside", "own", "shared"):
            del sys.modules[name]
    eventbus.imports._load.cache_clear()


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


def config(stage: str) -> str:
    return f"""
[[stages]]
use = "middleware:Generate"

[[stages]]
name = "score"
{stage}

[[stages]]
use = "middleware:DynamicFilter"
judge = {{ use = "middleware:reward_nonzero_std" }}
"""


def log_of(folder: Path, text: str) -> Path:
    """A log whose configuration is this."""
    folder.mkdir(exist_ok=True)
    stages = [Generate(engine(length=2)), score, DynamicFilter(reward_nonzero_std)]
    path = folder / "run.mcap"
    path.unlink(missing_ok=True)
    record(Pipeline(endless(), stages, BatchSpec(2), observers=[Recorder(path, config=text)]), 1)
    return path


def known(folder: Path, stage: str, **options: Any) -> Known:
    """What becomes of the stage "score" when it is said to be this."""
    return named_in(LogReader(log_of(folder, config(stage))), **options)[1]


REFUSED = {
    "a class of Python": ('use = "subprocess:Popen"\nargs = ["touch", "CANARY"]', "'subprocess' is no module in"),
    "a class that is given a file": ('use = "zipfile:ZipFile"\nfile = "CANARY"\nmode = "w"', "'zipfile' is no module"),
    "a module that does something": ('use = "antigravity:fly"', "'antigravity' is no module in the current folder"),
    "a module of another package": ('use = "rich.console:Console"', "'rich' is no module in the current folder"),
    "a builtin": ('use = "builtins:exec"', "exec comes from 'builtins'"),
    "a builtin class": ('use = "builtins:bytearray"\nsource = 4000000000', "bytearray comes from 'builtins'"),
    "no ordinary exception": ('use = "builtins:SystemExit"', "SystemExit comes from 'builtins'"),
    "a module beside the log": ('use = "beside:score"', "there is no module 'beside'"),
    "what a stage's module imports": ('use = "mine:os.system"', "'os' is no module in the current folder"),
    "the same with dots": ('use = "mine.os.system"', "'os' is no module in the current folder"),
    "a submodule of that": ('use = "mine:os.path.join"', "'os' is no module in the current folder"),
    "what it takes from elsewhere": ('use = "mine:Popen"\nargs = ["touch", "CANARY"]', "Popen comes from 'subprocess'"),
    "under another name": ('use = "mine:system"', "system comes from 'posix'"),
    "in a partial": ('use = "mine:shell"', "system comes from 'posix'"),
    "in a declaration": ('use = "mine:hidden"', "system comes from 'posix'"),
    "a function of Python": ('use = "mine:console"', "list2cmdline comes from 'subprocess'"),
    "an object of Python": ('use = "mine:opened.touch"', "PosixPath comes from 'pathlib"),
    "globals": ('use = "mine:score.__globals__"', "it leads into Python's own parts"),
    "a base class": ('use = "mine:Scorer.mro"', "comes from 'None'"),
    "subclasses": ('use = "mine:Scorer.__subclasses__"', "it leads into Python's own parts"),
    "the program": ('use = "__main__:score"', "it leads into Python's own parts"),
    "a file to be overwritten": (
        'use = "eventbus.log:LogWriter"\npath = "CANARY"\noverwrite = true',
        "LogWriter is none of rolloutbus's stages",
    ),
    "the recorder": ('use = "middleware:Recorder"\npath = "CANARY"', "Recorder is none of rolloutbus's stages"),
    "what imports": ('use = "eventbus.imports:load_object"', "load_object is none of rolloutbus's stages"),
    "what imports hooks": ('use = "middleware:apply_sample_hooks"', "apply_sample_hooks is none of rolloutbus's"),
    "what imports inside": ('use = "eventbus.imports:importlib.import_module"', "'importlib' is no module in"),
    "a tokenizer": ('use = "middleware:Tokenize"\ntokenizer = "gpt2"', "Tokenize is none of rolloutbus's stages"),
    "a server": ('use = "middleware:RemoteReward"\nurl = "http://[::1]:1"', "RemoteReward is none of rolloutbus's"),
    "a program that is started": (
        'use = "backends.simulated:SimulatedEngine"\noutcome = { use = "mine:score" }',
        "SimulatedEngine is none of rolloutbus's stages",
    ),
    "an option of a stage": (
        'use = "mine:Scorer"\nfactor = { use = "subprocess:Popen", args = ["touch", "CANARY"] }',
        "stages[1].factor.use: cannot load 'subprocess:Popen'",
    ),
    "deep in an option": (
        'use = "mine:Scorer"\nfactor = [{ a = [{ use = "zipfile:ZipFile", file = "CANARY", mode = "w" }] }]',
        "cannot load 'zipfile:ZipFile'",
    ),
    "an option of a wrapper": (
        'use = "mine:score"\nretry = { attempts = 2, on = [{ use = "zipfile:ZipFile", file = "CANARY", mode = "w" }] }',
        "stages[1].retry.on[0].use: cannot load 'zipfile:ZipFile'",
    ),
    "a path out of the folder": (
        'use = "mine:Scorer"\ntable = "../../secret"',
        "stages[1].table: ",
    ),
    "an absolute path": ('use = "mine:Scorer"\ntable = "/etc/passwd"', "/etc/passwd lies neither beside the log nor"),
    "a path of somebody": ('use = "mine:Scorer"\ntable = "~/.ssh/id_rsa"', "lies neither beside the log nor in"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_nothing_is_run_unasked(case: str, project: Path, tmp_path: Path, canary: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    stage, why = REFUSED[case]
    log = log_of(elsewhere, config(stage.replace("CANARY", str(canary))))
    for name in ("beside", "torch_evil"):
        (elsewhere / f"{name}.py").write_text(EVIL.format(canary=str(canary)))
    importlib.invalidate_caches()
    run = Replay(log)
    report = run.verify()
    assert report.same
    assert why in report.not_verified["score"]
    assert "Generate" in report.not_verified
    assert "DynamicFilter" not in report.not_verified
    assert not canary.exists()
    assert str(elsewhere) not in sys.path
    assert "antigravity" not in sys.modules
    assert "if you trust the log: --trust, Replay(log, trust=True)" in report.not_verified["score"]


def test_a_function_that_the_log_notes_is_judged_in_the_same_way(project: Path, tmp_path: Path, canary: Path) -> None:
    stages = [Generate(engine(length=2)), sample_stage(score, name="score")]
    log = tmp_path / "run.mcap"
    record(Pipeline(endless(), stages, BatchSpec(2), observers=[Recorder(log)]), 1)
    assert LogReader(log).header.stages[1].path == f"{__name__}:score"
    assert "is no module in the current folder" in Replay(log).verify().not_verified["score"]
    assert "score" not in Replay(log, trust=True).verify().not_verified


def test_the_options_that_the_log_notes_are_judged_in_the_same_way(project: Path, canary: Path) -> None:
    log = project / "own.mcap"
    stages = [Generate(engine(length=2)), sample_stage(score, name="score")]
    record(Pipeline(endless(), stages, BatchSpec(2), observers=[Recorder(log)]), 1)
    reader = LogReader(log)
    touch = {"use": "subprocess:Popen", "args": ["touch", str(canary)]}
    for table in (
        touch,
        {"use": "middleware:DynamicFilter", "judge": touch},
        {"use": "mine:Scorer", "factor": touch},
    ):
        note = msgspec.structs.replace(reader.header.stages[1], table=table)
        reader.header = msgspec.structs.replace(reader.header, stages=[reader.header.stages[0], note])
        assert "'subprocess' is no module in the current folder" in Replay(reader).verify().not_verified["score"]
        assert not canary.exists()


def test_with_trust_a_log_runs_what_it_names(project: Path, tmp_path: Path, canary: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    log = log_of(elsewhere, config('use = "beside:score"'))
    (elsewhere / "beside.py").write_text(EVIL.format(canary=str(canary)))
    importlib.invalidate_caches()
    Replay(log)
    assert not canary.exists()
    run = Replay(log, trust=True)
    assert run.stage("score").missing is None
    assert canary.exists()
    assert str(elsewhere) in sys.path


def test_the_command_says_what_to_do_and_does_it(
    project: Path, tmp_path: Path, canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    log = log_of(elsewhere, config('use = "beside:score"'))
    (elsewhere / "beside.py").write_text(EVIL.format(canary=str(canary)))
    importlib.invalidate_caches()
    with pytest.raises(SystemExit) as ended:
        replay(log, verify=True)
    assert ended.value.code == 0
    assert "not verified: score: stages[1].use: cannot load 'beside:score'" in capsys.readouterr().out
    assert not canary.exists()
    with pytest.raises(SystemExit) as ended:
        replay(log, verify=True, trust=True)
    assert ended.value.code == 1  # it gives no reward
    assert "differs at rollout 0, stage score" in capsys.readouterr().out
    assert canary.exists()


def test_stages_that_are_given_are_all_that_is_imported(project: Path, tmp_path: Path, canary: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    log = log_of(elsewhere, config('use = "beside:score"'))
    (elsewhere / "beside.py").write_text(EVIL.format(canary=str(canary)))
    importlib.invalidate_caches()
    stages = [Generate(engine()), score, DynamicFilter(reward_nonzero_std)]
    assert "score" not in Replay(log, stages, trust=True).verify().not_verified
    assert not canary.exists()


def test_a_log_does_not_run_what_says_that_it_is_external(project: Path) -> None:
    for told in ("", "external = false"):
        report = Replay(log_of(project, config(f'use = "mine:remote"\n{told}'))).verify()
        assert report.not_verified["score"] == "external: it answered from the record"
    stage = sample_stage(score, name="score")
    log = project / "own.mcap"
    record(Pipeline(endless(), [Generate(engine(length=2)), stage], BatchSpec(2), observers=[Recorder(log)]), 1)
    reader = LogReader(log)
    for table in ({"use": "mine:remote"}, {"use": "mine:remote", "external": False}):
        note = msgspec.structs.replace(reader.header.stages[1], path="mine:remote", external=False, table=table)
        reader.header = msgspec.structs.replace(reader.header, stages=[reader.header.stages[0], note])
        assert Replay(reader).verify().not_verified["score"] == "external: it answered from the record"


# What works as it did


OWN = {
    "a function": 'use = "mine:score"',
    "a function with an option": 'use = "mine:score"\nfactor = 1.0',
    "a class": 'use = "mine:Scorer"\nfactor = 1.0',
    "an object": 'use = "mine:scorer"',
    "a method of an object": 'use = "mine:scorer.method"',
    "a partial": 'use = "mine:bound"',
    "a wrapped function": 'use = "mine:threaded"',
    "a decorated function": 'use = "mine:declared"',
    "a value": 'use = "mine:Scorer"\nfactor = { use = "mine:FACTOR" }',
    "a module without a package": 'use = "parts.more:score"',
    "that module by its import": 'use = "mine:parts.more.score"',
    "a module beside the log": 'use = "own:score"',
    "a path beside the log": 'use = "mine:Scorer"\ntable = "table.json"',
    "a path in the project": 'use = "mine:Scorer"\ntable = "../parts/table.json"',
    "an exception": 'use = "mine:score"\nretry = { attempts = 2, on = [{ use = "builtins:OSError" }] }',
    "wrappers": 'use = "mine:score"\nin_thread = true\ntimeout = 5\nlimit = 2',
}


@pytest.mark.parametrize("case", OWN)
def test_what_lies_in_the_project_runs(case: str, project: Path) -> None:
    log = log_of(project / "logs", config(OWN[case]))
    shutil.copy("parts/more.py", "logs/own.py")
    importlib.invalidate_caches()
    report = Replay(log).verify()
    assert report.same, str(report)
    assert report.not_verified.keys() == {"Generate"}


def test_a_judge_of_the_project_that_is_made_there(project: Path) -> None:
    text = config('use = "mine:score"').replace('"middleware:DynamicFilter"\njudge', '"mine:strict"\n#')
    assert Replay(log_of(project, text)).verify().not_verified.keys() == {"Generate"}


def test_the_log_of_a_program_beside_which_the_stages_lie(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program is run from another folder, and Python has put its own on sys.path."""
    monkeypatch.chdir(tmp_path / "project" / "parts")
    monkeypatch.syspath_prepend(project)
    assert "is no module" in (known(tmp_path / "logs", 'use = "mine:score"').missing or "")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(project / "train.py"), raising=False)
    assert known(tmp_path / "logs", 'use = "mine:score"').missing is None
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(project / "rolloutbus"))  # among other commands
    assert "is no module" in (known(tmp_path / "logs", 'use = "mine:score"').missing or "")


def test_a_package_that_is_installed_from_below_the_current_folder(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = project / "src" / "own"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from own.deeper import score\n")
    (package / "deeper.py").write_text(STAGES.split("class", 1)[0])
    monkeypatch.syspath_prepend(project / "src")
    for name in ("own:score", "own.deeper:score", "own.deeper.score"):
        assert known(tmp_path / "logs", f'use = "{name}"').missing is None


def test_what_the_user_types_is_imported(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "lib"
    installed.mkdir()
    (installed / "shared.py").write_text("FACTOR = 2.0\n")
    monkeypatch.syspath_prepend(installed)
    stage = 'use = "mine:Scorer"\nfactor = { use = "shared:FACTOR" }'
    assert "'shared' is no module in the current folder" in (known(project, stage).missing or "")
    typed = ['stages.score.factor={ use = "shared:FACTOR" }']
    found = known(project, stage, overrides=typed)
    assert found.stage is not None
    assert found.stage.function.factor == 2.0  # type: ignore[attr-defined]


# Where a module lies


def judged(place: Path, monkeypatch: pytest.MonkeyPatch, name: str = "own") -> str | None:
    monkeypatch.syspath_prepend(place)
    return Unasked(Path.cwd()).refused_module(name)


def test_what_is_installed_below_the_current_folder_is_not_of_the_project(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, folder in enumerate(("lib/site-packages", "usr/dist-packages", "env/lib")):
        (project / folder).mkdir(parents=True)
        (project / folder / f"own{number}.py").touch()
        assert (judged(project / folder, monkeypatch, f"own{number}") is None) == (number == 2)
    (project / "env" / "pyvenv.cfg").touch()
    assert judged(project / "env/lib", monkeypatch, "own2") is not None
    (project / "pyvenv.cfg").touch()  # who works in the folder of an environment
    assert judged(project, monkeypatch, "mine") is None
    kept = project / "kept"  # as some installers do, links to one copy of it for all environments
    kept.mkdir()
    (kept / "own3.py").touch()
    (project / "env/lib/own3.py").symlink_to(kept / "own3.py")
    assert judged(project / "env/lib", monkeypatch, "own3") is not None


def test_a_program_that_is_installed_is_not_beside_a_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python -m notebook` is, which has all packages beside it."""
    place = project / "user" / "site-packages"
    place.mkdir(parents=True)
    (place / "own4.py").touch()
    monkeypatch.chdir(project / "parts")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(place / "notebook.py"), raising=False)
    assert judged(place, monkeypatch, "own4") is not None
    monkeypatch.chdir(place)
    assert judged(place, monkeypatch, "own4") is not None


def test_python_below_the_current_folder_is_not_of_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (Path(importlib.__file__ or "").parent.parent, Path(sys.prefix), Path("/usr"), Path("/")):
        if folder.is_dir():
            monkeypatch.chdir(folder)
            gate = Unasked(Path.cwd())
            for name in ("subprocess", "antigravity", "rich", "msgspec", "sys", "os", "zipimport", "this"):
                assert gate.refused_module(name) is not None, f"{name} in {folder}"


def test_a_namespace_is_judged_part_by_part(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """parts/ lies in the project and elsewhere."""
    other = tmp_path / "lib" / "parts"
    other.mkdir(parents=True)
    (other / "foreign.py").write_text("def score(sample): ...\n")
    monkeypatch.syspath_prepend(tmp_path / "lib")
    monkeypatch.syspath_prepend(project)
    assert Unasked(project).load("parts.more:score").__name__ == "score"
    with pytest.raises(LoadError, match=r"'parts\.foreign' is no module in the current folder"):
        Unasked(project).load("parts.foreign:score")
    assert "parts.foreign" not in sys.modules
    assert Unasked(project).refused_module("nowhere.at_all") is not None
    assert "nowhere" not in sys.modules


def test_links_lead_to_both_sides(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may be known by a link to it; what lies elsewhere does so when the project has a link to it."""
    (tmp_path / "link").symlink_to(project)
    assert judged(tmp_path / "link", monkeypatch, "mine") is None
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "beside.py").touch()
    (project / "logs").symlink_to(tmp_path / "store")
    assert judged(project / "logs", monkeypatch, "beside") is not None
    assert not Unasked(project).holds(project / "logs")
    (project / "linked").symlink_to(Path(importlib.__file__ or "").parent.parent)
    monkeypatch.setattr(sys, "modules", {k: v for k, v in sys.modules.items() if k != "antigravity"})
    assert judged(project / "linked", monkeypatch, "antigravity") is not None


def test_no_module_that_is_imported_now_is_allowed_outside_of_the_project(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Unasked(project)
    allowed = {name.partition(".")[0] for name in list(sys.modules) if gate.refused_module(name) is None}
    assert allowed <= {"eventbus", "middleware", "backends", "builtins"}
    odd = ModuleType("own")
    monkeypatch.setitem(sys.modules, "own", odd)
    assert gate.refused_module("own") is not None
    del odd.__spec__
    assert gate.refused_module("own") is not None


def test_an_object_counts_by_what_it_is(project: Path) -> None:
    gate = Unasked(project)
    refused: list[Any] = [sys, sys.exit, open, type, object, print, Path, Path("x"), "".join, partial(open)]
    refused += [Path.touch, DeclaredStage(Path("x").touch, "sample"), SystemExit, BaseException, RemoteReward, Recorder]
    for found in refused:
        assert gate.refused_object(found) is not None, found
    allowed: list[Any] = [1, 2.5, "text", None, [1], {"a": 1}, (), OSError, LoadError, DynamicFilter, Generate]
    allowed += [reward_nonzero_std, partial(reward_nonzero_std, key="a"), DynamicFilter(reward_nonzero_std)]
    for found in allowed:
        assert gate.refused_object(found) is None, found


def test_every_part_of_middleware_is_harmless_or_known_not_to_be() -> None:
    """Whoever adds one decides: does it open files or connect, or call or import what an option names?"""
    reaching = {"Recorder", "RemoteReward", "Tokenize", "apply_sample_hooks"}
    no_stages = {"FilterDecision", "Progress", "batch_stage", "group_stage", "sample_stage", "should_drop"}
    wrappers = {"in_thread", "limit", "retry", "timeout"}
    assert HARMLESS | reaching | no_stages | wrappers == set(middleware.__all__)
    assert HARMLESS.isdisjoint(reaching)


# The configuration in a log


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(config('use = "mine:score"') + "#" * LARGEST_FILE, id="large"),
        pytest.param(config('use = "mine:score"') + "a." * DEEPEST_KEY + "a = 1\n", id="a deep key"),
        pytest.param(config('use = "mine:score"') + "x = " + "[" * 5000, id="deep"),
        pytest.param("stages = 1", id="no stages"),
        pytest.param("stages = [1]", id="no tables"),
        pytest.param("[", id="no TOML"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_as_if_there_were_none(text: str, project: Path) -> None:
    report = Replay(log_of(project, text)).verify()
    assert report.same
    assert f"cannot load '{__name__}:score'" in report.not_verified["score"]  # what the log notes beside it


def test_options_that_are_nested_deeply_are_an_error_of_their_stage(project: Path) -> None:
    for depth in (50, 100, 150, 200, 250, 300, 400, 600):
        found = known(project, 'use = "mine:Scorer"\nfactor = ' + "[" * depth + "]" * depth)
        assert found.missing is not None
