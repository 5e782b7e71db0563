"""What is released: sdist and wheel hold the same packages and work where nothing else is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("eventbus", "middleware", "backends")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, the wheel from it, and in `tree` the wheel from the checkout."""
    folder = tmp_path_factory.mktemp("built")
    python = environment(Path(sys.executable), folder / "venv", "build", "hatchling>=1.26")
    build = (python, "-m", "build", "--no-isolation", "--outdir")
    run(*build, folder, ROOT)
    run(*build, folder / "tree", "--wheel", ROOT)
    return folder


@pytest.fixture(scope="module", params=("3.11", "3.12", "3.13"))
def python(built: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of this version with the wheel and what it depends on."""
    (wheel,) = built.glob("*.whl")
    return environment(interpreter(request.param), tmp_path_factory.mktemp("clean") / "venv", str(wheel))


def test_the_wheel_holds_the_packages_and_nothing_else(built: Path) -> None:
    names = wheel_content(built).keys()
    top = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert top == set(PACKAGES)
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
    modules = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules


def test_the_sdist_builds_the_same_wheel(built: Path) -> None:
    assert wheel_content(built) == wheel_content(built / "tree")


def test_the_sdist_holds_what_its_tests_and_documentation_need(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in (
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "Makefile",
        "mkdocs.yml",
        "tests/conftest.py",
        "docs/index.md",
    ):
        assert name in names
    assert not [name for name in names if name.startswith((".venv", "site/", "dist/")) or name.endswith(".mcap")]


def test_it_works_where_only_the_core_dependencies_are(python: Path, tmp_path: Path) -> None:
    run(python, "-c", "import eventbus, middleware, backends, backends.simulated", cwd=tmp_path)
    assert "Usage: rolloutbus" in run(python.with_name("rolloutbus"), "--help", cwd=tmp_path)
    shutil.copy(ROOT / "examples" / "recipes" / "tag.py", tmp_path)
    assert "training: {'rollout': 0" in run(python, "tag.py", cwd=tmp_path)
    missing = subprocess.run([python, "-c", "import backends.embedded"], cwd=tmp_path, capture_output=True, text=True)
    assert "rolloutbus[embedded]" in missing.stderr


def test_the_light_extras_work_beside_it(built: Path, python: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    install(python, f"{wheel}[http,math,trio]")
    run(python, "-c", "from middleware import MathAnswer; MathAnswer()", cwd=tmp_path)
    for recipe in ("judge", "trio_loop"):
        shutil.copy(ROOT / "examples" / "recipes" / f"{recipe}.py", tmp_path)
        run(python, f"{recipe}.py", cwd=tmp_path)


def environment(python: Path, folder: Path, *packages: str) -> Path:
    """The interpreter of a clean virtual environment with these packages."""
    run(python, "-m", "venv", "--without-pip", folder)
    install(folder / "bin" / "python", *packages)
    return folder / "bin" / "python"


def install(python: Path, *packages: str) -> None:
    run(sys.executable, "-m", "pip", "--python", python, "--quiet", "install", "--no-compile", *packages)


def interpreter(version: str) -> Path:
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return Path(sys.executable)
    candidates = [Path(f"python{version}"), *sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    for candidate in candidates:
        if (found := shutil.which(candidate)) and subprocess.run(
            [found, "--version"], capture_output=True
        ).returncode == 0:
            return Path(found)
    pytest.skip(f"no Python {version} here")


def run(*command: Path | str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def wheel_content(folder: Path) -> dict[str, int]:
    """The CRC of each file, without the list that repeats them."""
    (wheel,) = folder.glob("*.whl")
    assert re.fullmatch(r"rolloutbus-[\w.]+-py3-none-any\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        return {each.filename: each.CRC for each in archive.infolist() if not each.filename.endswith("/RECORD")}
