"""The benchmarks: `python -m benchmarks`, one table of ratios.

Exits with 1 when a bound is missed. `--json docs/performance.json` also writes what the documentation shows.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Annotated, Literal, TypeAlias, get_args

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from benchmarks import (
    hooks,
    import_time,
    in_flight,
    lag,
    log,
    long_tail,
    megatron,
    memory,
    pipeline,
    replay,
    sglang,
    stateless_adam,
    wire,
)
from benchmarks.measure import Row

Name: TypeAlias = Literal[
    "hooks",
    "pipeline",
    "in-flight",
    "wire",
    "log",
    "lag",
    "import",
    "long-tail",
    "megatron",
    "memory",
    "replay",
    "sglang",
    "stateless-adam",
]

app = App(name="python -m benchmarks", help="Measure, and compare with the bounds.", version_flags=[])


def _wire() -> list[Row]:
    return [
        Row(f"{what} / bare msgspec", f"{ratio:.3g}x", f"{bound}x" if bound else "", ratio <= 2 if bound else None)
        for what, ratio, bound in wire.rows()
    ]


def _import_time() -> list[Row]:
    return [
        Row(what, f"{ratio:.3g}x", f"{import_time.LIMIT_MS:.0f} ms (absolute)", "under" in measured, measured)
        for what, ratio, measured in import_time.rows()
    ]


PARTS: dict[Name, Callable[[], list[Row]]] = {
    "hooks": hooks.rows,
    "pipeline": pipeline.rows,
    "in-flight": in_flight.rows,
    "wire": _wire,
    "log": log.rows,
    "lag": lag.rows,
    "import": _import_time,
    "long-tail": long_tail.rows,
    "megatron": megatron.rows,
    "memory": memory.rows,
    "replay": replay.rows,
    "sglang": sglang.rows,
    "stateless-adam": stateless_adam.rows,
}
assert set(PARTS) == set(get_args(Name))
LONG = ("memory", "replay", "sglang")


@app.default
def run(
    only: list[Name] | None = None,
    long: Annotated[bool, Parameter(negative=())] = False,
    file: Annotated[Path | None, Parameter(name="--json")] = None,
) -> None:
    """Print one table.

    Parameters
    ----------
    only
        The part to run; may be given several times.
    long
        Also what takes minutes.
    file
        Also write the table to this file, with the date and the machine.
    """
    chosen = only or [name for name in PARTS if long or name not in LONG]
    progress = Console(stderr=True)
    table = Table("what", "ratio", "bound", "ok?", "measured")
    missed = 0
    results: dict[str, list[Row]] = {}
    for name in chosen:
        started = perf_counter()
        results[name] = PARTS[name]()
        for row in results[name]:
            verdict = "" if row.ok is None else "[green]yes" if row.ok else "[bold red]NO"
            table.add_row(row.what, row.ratio, row.bound, verdict, row.measured)
            missed += row.ok is False
        table.add_section()
        progress.print(f"{name}: {perf_counter() - started:.0f} s", style="dim")
    Console().print(table)
    if file is not None:
        write(file, results)
    sys.exit(1 if missed else 0)


def write(path: Path, results: Mapping[str, list[Row]]) -> None:
    """The results with what they depend on, in a form that shows changes line by line."""
    content = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load": round(os.getloadavg()[1], 1),
        "parts": {name: [row._asdict() for row in rows] for name, rows in results.items()},
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
