from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "eventbus": {"eventbus"},
    "middleware": {"eventbus", "middleware"},
    "backends": {"eventbus", "middleware", "backends"},
}
HEAVY = (
    "torch", "numpy", "httpx", "aiohttp", "transformers", "sglang", "megatron", "matplotlib", "plotext", "mcap", "rich",
    "cyclopts", "trio", "pytest",
)  # fmt: skip


def _modules() -> list[Path]:
    return sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and top-level package of each import, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            own = path.relative_to(ROOT).parts[0]
            yield node.lineno, own if node.level else (node.module or "").partition(".")[0]


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for line, name in _imports(path)
        if name in {*MAY_IMPORT, "tests", "benchmarks", "examples"} - MAY_IMPORT[package]
    ]
    assert not wrong, "imports point backends -> middleware -> eventbus"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_is_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()


def test_importing_the_core_loads_nothing_heavy() -> None:
    code = f"import sys, eventbus, middleware; print(*(name for name in {HEAVY} if name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
