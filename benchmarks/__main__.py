"""The benchmarks: `python -m benchmarks`, one table of ratios.

Exits with 1 when a bound is missed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
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
def run(only: list[Name] | None = None, long: Annotated[bool, Parameter(negative=())] = False) -> None:
    """Print one table.

    Parameters
    ----------
    only
        The part to run; may be given several times.
    long
        Also what takes minutes.
    """
    chosen = only or [name for name in PARTS if long or name not in LONG]
    progress = Console(stderr=True)
    table = Table("what", "ratio", "bound", "ok?", "measured")
    missed = 0
    for name in chosen:
        started = perf_counter()
        for row in PARTS[name]():
            verdict = "" if row.ok is None else "[green]yes" if row.ok else "[bold red]NO"
            table.add_row(row.what, row.ratio, row.bound, verdict, row.measured)
            missed += row.ok is False
        table.add_section()
        progress.print(f"{name}: {perf_counter() - started:.0f} s", style="dim")
    Console().print(table)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    app()
