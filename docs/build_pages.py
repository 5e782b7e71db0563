"""The pages of the documentation that come out of the code: a hook of mkdocs.

reference/events.md    the kinds of events and what is in them, from their types
reference/cli.md       the commands and their options, from their help
performance.md         the last run of the benchmarks, from performance.json
decisions/index.md     the decision records, from their titles
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from eventbus import events, group, sample
from eventbus.cli import app
from eventbus.wire import SCHEMA_VERSION

DOCS = Path(__file__).resolve().parent


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs when it has found the pages that are files."""
    from mkdocs.structure.files import File

    for path, page in (
        ("reference/events.md", event_schema),
        ("reference/cli.md", command_line),
        ("performance.md", performance),
        ("decisions/index.md", decisions),
    ):
        files.append(File.generated(config, path, content=page()))
    return files


def event_schema() -> str:
    classes = _classes(events)
    names = {tag: cls.__name__ for tag, cls in events.EVENT_KINDS.items()}
    parts = [
        "# Event schema",
        f"Generated from the types in `eventbus.events`; schema version {SCHEMA_VERSION}. Subscribe to kinds by name: "
        '`pipeline.events(kinds=("group_judged",))`, or `kinds` of an observer.',
        inspect.cleandoc(events.__doc__ or "").partition("\n\n")[2],
    ]
    for tag, name in names.items():
        parts += [f"## {tag}", f"`{name}`. {_text(classes[name])}", _fields(classes[name])]
    parts += ["## Kinds of a newer writer", f"`UnknownEvent`. {_text(classes['UnknownEvent'])}"]
    parts.append("## What is in them")
    for module, types in (
        (events, ["LightSample"]),
        (group, ["Verdict", "Summary"]),
        (sample, ["WeightSpan", "Sample"]),
    ):
        for name in types:
            node = _classes(module)[name]
            parts += [f"### {name}", _text(node), _fields(node)]
    return _page(parts)


def command_line() -> str:
    with patch.object(sys, "argv", ["rolloutbus"]):  # which cyclopts would put into the usage lines
        before, _, rest = app.generate_docs(output_format="markdown").partition("## Table of Contents")
    _, start, commands = rest.partition("**Commands**")  # the site has a table of contents of its own
    return before.replace("# rolloutbus\n", "# Command line\n", 1) + start + commands


def performance() -> str:
    results = json.loads((DOCS / "performance.json").read_text(encoding="utf-8"))
    about = f"{results['date']}, {results['machine']}, Python {results['python']}, load average {results['load']}"
    parts = [
        "# Performance",
        "Ratios of two cases that take turns in one process, the median over the rounds. `benchmarks/README.md` says "
        "what each part compares, and `python -m benchmarks` fails when a bound is missed; "
        "[What a sample costs](decisions/0007-what-a-sample-costs.md) says why that of the pipeline is.",
        f"Last run: {about}. Where the load is more than the number of cores, other programs took part of them: then "
        "ratios are rougher, and times in milliseconds too large. To make this page anew:",
        "```\npython -m benchmarks --json docs/performance.json\n```",
    ]
    for name, rows in results["parts"].items():
        cells = [(row["what"], row["ratio"], _bound(row), row["measured"]) for row in rows]
        parts += [f"## {name}", _table(("what", "ratio", "bound", "measured"), cells)]
    return _page(parts)


def decisions() -> str:
    records = sorted((DOCS / "decisions").glob("0*.md"))
    titles = [path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for path in records]
    links = [f"- [{title}]({path.name})" for title, path in zip(titles, records, strict=True)]
    return _page(["# Design decisions", "What was asked, what was chosen, and what it costs.", "\n".join(links)])


# Parts of a page


def _classes(module: ModuleType) -> dict[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(module))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _text(node: ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n:")[0].strip()


def _fields(node: ast.ClassDef) -> str:
    """The fields of a struct: the string behind a field is what it means."""
    rows = []
    for statement, behind in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or "ClassVar" in ast.unparse(statement.annotation):
            continue
        kind = f"`{ast.unparse(statement.annotation)}`"
        default = "" if statement.value is None else f"`{_default(statement.value)}`"
        means = ""
        if isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant):
            means = inspect.cleandoc(str(behind.value.value)).replace("\n", " ")
        rows.append((f"`{ast.unparse(statement.target)}`", kind, default, means))
    return _table(("field", "type", "default", ""), rows)


def _default(value: ast.expr) -> str:
    """`msgspec.field(default_factory=list)` is written out where a plain default cannot be."""
    if isinstance(value, ast.Call):
        return f"{ast.unparse(value.keywords[0].value)}()"
    return ast.unparse(value)


def _bound(row: dict[str, Any]) -> str:
    verdict = {None: "", True: ": held", False: ": **missed**"}[row["ok"]]
    return f"{row['bound']}{verdict}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _page(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"
