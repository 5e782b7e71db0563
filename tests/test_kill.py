"""A run that is killed at any moment: what is left of its log opens, adds up, and replays."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eventbus.log import LogReader
from eventbus.log.inspect import check
from eventbus.replay import Replay
from middleware import DynamicFilter, Generate, reward_nonzero_std
from tests.logs import content
from tests.streams import engine, rewarded
from tests.test_log_file import light_ends

ROOT = Path(__file__).resolve().parent.parent

SERVER = """
    import os, signal, sys, anyio
    from eventbus import BatchSpec, Pipeline
    from middleware import DynamicFilter, Generate, Recorder, reward_nonzero_std
    from eventbus.log.format import described
    from tests.streams import endless, engine, rewarded

    described()  # takes a moment, once
    writev = os.writev

    def record_until(size, path):
        def up_to_there(file, parts):
            left = size - os.lseek(file, 0, os.SEEK_CUR)
            data = b"".join(parts)
            if len(data) < left:
                return writev(file, parts)
            os.write(file, data[:left])
            os.kill(os.getpid(), signal.SIGKILL)

        os.writev = up_to_there
        anyio.run(record, path)

    async def record(path):
        pipeline = Pipeline(
            endless(4),
            [Generate(engine(length=200)), rewarded(lambda one: one.index % 3 == 0), DynamicFilter(reward_nonzero_std)],
            BatchSpec(groups=4),
            observers=[Recorder(path)],
        )
        async with pipeline:
            async for batch in pipeline.rollouts():
                await anyio.sleep(0)

    for line in sys.stdin:
        child = os.fork()
        if not child:
            size, path = line.split(maxsplit=1)
            record_until(int(size), path.strip())
        print(os.WTERMSIG(os.waitpid(child, 0)[1]), flush=True)
"""


def adds_up_and_verifies(path: Path, stages: Sequence[Any] | None = None) -> int:
    """How many rollouts had finished."""
    with LogReader(path) as log:
        report = check(log.events(), samples=log.samples)
        assert report.violations == []
        finished = [part.rollout_id for part in log.rounds if part.finished]
        found = Replay(log, stages).verify(finished)
        assert found.same, str(found)
        assert found.batches == len(finished)
        assert found.notes == []
        return len(finished)


def test_a_recording_pipeline(tmp_path: Path) -> None:
    """Fifty processes, each killed at a byte of its file: in the first rollout, after many, and in between."""
    rng = random.Random(0)
    sizes = [24_000, 4_000_000, *(rng.randrange(24_000, 600_000) for _ in range(48))]
    stages = [
        Generate(engine()),
        rewarded(lambda sample: (sample.index or 0) % 3 == 0),
        DynamicFilter(reward_nonzero_std),
    ]
    finished = []
    command = [sys.executable, "-c", textwrap.dedent(SERVER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for number, size in enumerate(sizes):
            path = tmp_path / f"{number}.mcap"
            print(size, path, file=server.stdin, flush=True)
            assert server.stdout.readline() == f"{signal.SIGKILL:d}\n"
            assert path.stat().st_size == size
            check_what_was_left(path)
            finished.append(adds_up_and_verifies(path, stages))
            path.unlink()
        server.stdin.close()
    assert min(finished) == 0
    assert max(finished) > 1


@pytest.mark.slow
def test_the_demo(tmp_path: Path) -> None:
    """Five runs of the demo, each killed when its file has a random number of bytes."""
    pytest.importorskip("torch")
    rng = random.Random(0)
    demo = shutil.copytree(ROOT / "examples" / "demo", tmp_path / "demo")
    for _ in range(5):
        path = demo / "run.mcap"
        moment = rng.randrange(30_000, 6_000_000)
        with subprocess.Popen(
            rolloutbus("run", "run.toml", "--quiet", "--set", "log.path=run.mcap"), cwd=demo, stdout=subprocess.DEVNULL
        ) as running:
            while not path.exists() or path.stat().st_size < moment:
                assert running.poll() is None
            running.kill()
        with LogReader(path) as log:
            finished = sum(part.finished for part in log.rounds)
        checked = subprocess.run(rolloutbus("log", "check", "run.mcap"), cwd=demo, capture_output=True, text=True)
        assert "no violations" in checked.stdout, checked.stdout + checked.stderr
        verified = subprocess.run(rolloutbus("replay", "run.mcap"), cwd=demo, capture_output=True, text=True)
        assert verified.returncode == 0, verified.stdout + verified.stderr
        assert f"{finished} batches" in verified.stdout
        path.unlink()


def rolloutbus(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from eventbus.cli import main; main()", *arguments]


def check_what_was_left(path: Path) -> None:
    """A log whose process was killed: all that is in the file is there."""
    flushed = max(events for _, events in light_ends(path))
    with LogReader(path) as log:
        read = content(log)
        assert [event.seq for event, _ in read] == list(range(len(read)))
        assert len(read) >= flushed
        assert not log.finished
        assert all("middle of a record" in damage.reason for damage in log.damage)
        for part in log.rounds:
            rollout = log.rollout(part.rollout_id)
            if rollout.finished:
                kept = [group for group in rollout.groups() if group.outcome == "kept"]
                assert len(kept) == 4
                assert all(len(sample.tokens) >= 200 for group in kept for sample in group.samples)
