"""The public names with their signatures, as `tests/public_api.txt` has them: a change of the face is seen in review.

    python -m tests.test_api        writes the file anew

Read from the source, so that it neither needs nor imports what an extra brings.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE = Path(__file__).with_name("public_api.txt")
MODULES = (
    "eventbus",
    "eventbus.events",
    "eventbus.log",
    "eventbus.replay",
    "eventbus.testing",
    "middleware",
    "backends.simulated",
    "backends.embedded",
    "backends.sglang",
    "backends.slime",
    "backends.megatron",
)
Function = ast.FunctionDef | ast.AsyncFunctionDef
PUBLIC_METHODS = ("__init__", "__call__", "__len__")
"""Of those with underscores: what a user calls knowingly."""


def test_the_public_api_is_as_it_was() -> None:
    assert public_api() == FILE.read_text(encoding="utf-8"), "if the change is meant: python -m tests.test_api"


def test_every_public_name_is_found() -> None:
    text = public_api()
    for module in MODULES:
        section = text.partition(f"# {module}\n")[2].partition("\n# ")[0]
        for name in exported(tree(module)):
            assert re.search(rf"^(class |def |async def |){name}\b", section, re.M), name


def public_api() -> str:
    parts = []
    for module in MODULES:
        lines = [f"# {module}"]
        for name in exported(tree(module)):
            lines += ["", *described(module, name)]
        parts.append("\n".join(lines))
    return "\n\n\n".join(parts) + "\n"


def described(module: str, name: str) -> Iterator[str]:
    """A public name: the line that defines it, for a class also those of its public members."""
    for node in definitions(module, name):
        if isinstance(node, Function):
            yield from signature(node)
        elif isinstance(node, ast.ClassDef):
            bases = ", ".join(map(ast.unparse, [*node.bases, *node.keywords]))
            yield f"class {name}({bases}):" if bases else f"class {name}:"
            for member in node.body:
                if isinstance(member, Function) and (member.name in PUBLIC_METHODS or not member.name.startswith("_")):
                    yield from (f"    {line}" for line in signature(member))
                elif isinstance(member, ast.AnnAssign | ast.Assign) and not ast.unparse(member).startswith("_"):
                    yield f"    {ast.unparse(member)}"
        else:
            yield ast.unparse(node)


def signature(node: Function) -> Iterator[str]:
    for decorator in node.decorator_list:
        yield f"@{ast.unparse(decorator)}"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    yield f"{word} {node.name}({ast.unparse(node.args)}){returns}"


def definitions(module: str, name: str) -> list[ast.stmt]:
    """What defines `name`, several of them where it has overloads; imports are followed."""
    found: list[ast.stmt] = []
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    assert node.module is not None
                    return definitions(node.module, alias.name)
    for node in tree(module).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if node.name == name:
                found.append(node)
            case ast.AnnAssign(target=ast.Name(id=target)) if target == name:
                found.append(node)
            case ast.Assign(targets=[ast.Name(id=target)]) if target == name:
                found.append(node)
    assert found, f"{module}.{name} is defined nowhere"
    return found


def exported(module: ast.Module) -> list[str]:
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise AssertionError("no __all__")


@cache
def tree(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    FILE.write_text(public_api(), encoding="utf-8")
