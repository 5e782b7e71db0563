"""Whether memory stays flat: a million events through three stages that do nothing.

Resident memory of a fresh process, whose observer sees one event for each sample, at 100,000 and at 1,000,000 samples.
It takes a minute or two, so it runs with `--long` only.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio

from benchmarks.measure import Row
from benchmarks.streams import GROUP_SIZE, SAMPLES, Engine, also_changes_nothing, changes_nothing, returns_it
from eventbus.batching import BatchSpec
from eventbus.events import Event
from eventbus.pipeline import Pipeline
from eventbus.prompts import Prompts
from middleware.generate import Generate

__all__ = ["rows"]

FEW, MANY = 100_000, 1_000_000
GROWTH = 1.05


def rows() -> list[Row]:
    command = [sys.executable, "-m", "benchmarks.memory"]
    root = Path(__file__).parent.parent
    output = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True).stdout
    few, many = (int(line) for line in output.split())
    return [
        Row(
            f"resident memory at {MANY:,} events / at {FEW:,}",
            f"{many / few:.3f}x",
            f"at most {GROWTH}x",
            many <= GROWTH * few,
            f"{many / 2**20:.1f} MB against {few / 2**20:.1f} MB",
        )
    ]


class _Count:
    """Counts events and keeps none."""

    kinds: Sequence[str] = ("sample_generated",)

    def __init__(self) -> None:
        self.seen = 0

    def observe(self, event: Event) -> None:
        self.seen += 1


async def _main() -> None:
    count = _Count()
    stream = Pipeline(
        Prompts(iter(lambda: "2+2=", ""), GROUP_SIZE),
        [Generate(Engine()), changes_nothing, returns_it, also_changes_nothing],
        BatchSpec(SAMPLES // GROUP_SIZE),
        observers=[count],
    )
    marks = [FEW, MANY]
    async with stream:
        async for _ in stream.rollouts():
            if count.seen >= marks[0]:
                marks.pop(0)
                gc.collect()
                print(_resident())
                if not marks:
                    break


def _resident() -> int:
    """Bytes, as Linux counts them."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


if __name__ == "__main__":
    anyio.run(_main)
