"""How long `import eventbus, middleware` takes in a fresh process, beside the two libraries that it cannot do without.

The bound is absolute, because it is what a user feels at each start of the command: 150 ms. Modules are compiled first,
as those of an installed package are, also where Python was told not to write its bytecode.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

OURS = "eventbus, middleware"
BARE = "anyio, msgspec"
LIMIT_MS = 150.0
PROCESSES = 10


def rows() -> list[tuple[str, float, str]]:
    """(what, ratio to the bare import, bound in words)."""
    times: dict[str, list[float]] = {OURS: [], BARE: []}
    with tempfile.TemporaryDirectory() as bytecode:
        for modules in times:
            _milliseconds(modules, bytecode)
        for _ in range(PROCESSES):
            for modules, measured in times.items():
                measured.append(_milliseconds(modules, bytecode))
    ours, bare = median(times[OURS]), median(times[BARE])
    verdict = "under" if ours < LIMIT_MS else "OVER"
    return [
        (
            f"import {OURS} / import {BARE}",
            ours / bare,
            f"{ours:.0f} ms against {bare:.0f} ms, {verdict} {LIMIT_MS:.0f} ms",
        )
    ]


def _milliseconds(modules: str, bytecode: str) -> float:
    code = f"from time import perf_counter as now; start = now(); import {modules}; print((now() - start) * 1000)"
    root = Path(__file__).parent.parent
    env = os.environ | {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    process = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, check=True)
    return float(process.stdout)


if __name__ == "__main__":
    for what, ratio, bound in rows():
        print(f"{what}: {ratio:.2f}x ({bound})")
