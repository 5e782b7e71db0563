"""Each recipe runs as a user would run it, and prints what it says that it prints."""

from __future__ import annotations

import ast
import runpy
import textwrap
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "recipes"
RECIPES = sorted(FOLDER.glob("*.py"))


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 11


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_prints_what_it_says(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out == promised(path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 80


def promised(path: Path) -> str:
    """The indented block at the end of the docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    _, found, output = docstring.partition("Prints:\n\n")
    assert found, f"{path.name}: the docstring ends with what it prints"
    return textwrap.dedent(output).rstrip() + "\n"
