"""A run that is killed at any moment: what is left of its log opens, adds up, and replays."""

from __future__ import annotations

import os
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
    import os, sys, anyio
    from eventbus import BatchSpec, Pipeline
    from middleware import DynamicFilter, Generate, Recorder, reward_nonzero_std
    from eventbus.log.format import described
    from tests.streams import endless, engine, rewarded

    described()  # takes a moment, once

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
            anyio.run(record, line.strip())
        print(child, flush=True)
        os.waitpid(child, 0)
        print("killed", flush=True)
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
    """Fifty processes, each killed when its file has a random number of bytes."""
    rng = random.Random(0)
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
        for number in range(50):
            path = tmp_path / f"{number}.mcap"
            moment = rng.randrange(24_000, 400_000)
            print(path, file=server.stdin, flush=True)
            recording = int(server.stdout.readline())
            while not path.exists() or path.stat().st_size < moment:
                assert server.poll() is None
            seen = path.stat().st_size
            os.kill(recording, signal.SIGKILL)
            assert server.stdout.readline() == "killed\n"
            check_what_was_left(path, seen)
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


def check_what_was_left(path: Path, seen: int) -> None:
    """A log whose process was killed when `seen` bytes were in the file."""
    flushed = max(events for end, events in light_ends(path) if end <= seen)
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
