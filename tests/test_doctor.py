"""The command `rolloutbus doctor`; with guarded buffers it is in `test_deep_ep.py`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

import eventbus.doctor
from eventbus.doctor import PARTS, Part, doctor

ROOT = Path(__file__).parent.parent


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that works, one that cannot be imported, one that nobody has, one that must not be imported."""
    (tmp_path / "doctors_good.py").write_text("print('hello')\n__version__ = '1.2'")
    (tmp_path / "doctors_bad.py").write_text("assert False, 'No libnccl.so\\nfound'")
    (tmp_path / "doctors_heavy.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    found = [
        Part("good", "doctors_good", [], "good"),
        Part("bad", "doctors_bad", ["pytest"], "bad"),
        Part("none", "doctors_none.core", ["doctors-none"], "rolloutbus[none]"),
        Part("heavy", "doctors_heavy", [], "heavy", imports=False),
    ]
    monkeypatch.setattr(eventbus.doctor, "PARTS", tuple(found))
    monkeypatch.delitem(sys.modules, "doctors_good", raising=False)


def report(capsys: pytest.CaptureFixture[str]) -> Any:
    with pytest.raises(SystemExit) as caught:
        doctor(as_json=True)
    assert caught.value.code == 1
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("parts")
def test_tells_what_is_there_what_is_broken_and_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, none, heavy = report(capsys)["parts"]
    assert good == {"name": "good", "version": "1.2", "error": None, "install": None}
    assert bad == {
        "name": "bad",
        "version": pytest.__version__,
        "error": "AssertionError: No libnccl.so found",
        "install": None,
    }
    assert none == {"name": "none", "version": None, "error": None, "install": "rolloutbus[none]"}
    assert heavy == {"name": "heavy", "version": "unknown", "error": None, "install": None}


@pytest.mark.usefixtures("parts")
def test_shows_it_to_people(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit, match="1"):
        doctor()
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"rolloutbus +\S+ +Python 3\..*", lines[1].rstrip())
    assert lines[2].split() == ["good", "1.2"]
    assert lines[3].split(maxsplit=2)[2].rstrip() == "cannot be imported: AssertionError: No libnccl.so found"
    assert lines[4].rstrip().split(maxsplit=2) == ["none", "missing", "pip install 'rolloutbus[none]'"]
    assert lines[7].startswith("guard_deep_ep: torch_memory_saver does not hook cudaMalloc: it was not in LD_PRELOAD")


def test_the_extras_that_it_names_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for part in PARTS:
        if match := re.fullmatch(r"rolloutbus\[(.+)\]", part.install):
            assert any(need.startswith(f"{part.distributions[0]}>=") for need in extras[match[1]]), part


def test_runs_as_a_command_on_what_is_here() -> None:
    code = "from cyclopts import App; from eventbus.doctor import doctor; app = App(); app.command(doctor); app()"
    done = subprocess.run([sys.executable, "-c", code, "doctor", "--json"], cwd=ROOT, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert [part["name"] for part in found["parts"]] == [part.name for part in PARTS]
    assert found["guard_deep_ep"]["guarded"] == []
    assert done.returncode == any(part["error"] for part in found["parts"])


def test_its_only_option_is_json() -> None:
    app = App()
    app.command(doctor)
    _, bound, _ = app.parse_args(["doctor", "--json"], exit_on_error=False)
    assert bound.arguments == {"as_json": True}
