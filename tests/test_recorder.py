"""`Recorder`: whatever the pipeline did is in the log, however it ended."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import subprocess
import sys
import textwrap
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from backends.simulated import SimulatedEngine
from eventbus.batching import BatchSpec
from eventbus.events import GroupCompleted, GroupEnded, GroupSubmitted, StageApplied, WeightsUpdated
from eventbus.group import TrainResult
from eventbus.log import LogError, LogReader
from eventbus.log import container as container_module
from eventbus.pipeline import Pipeline
from eventbus.sample import Completion, Sample, SampleStatus
from eventbus.wire import WireError
from middleware import DynamicFilter, Generate, Recorder, reward_nonzero_std, sample_stage
from tests.logs import Witness, content, small_pipeline
from tests.streams import batches, endless, engine, rewarded, some
from tests.test_log_file import FullDisk

pytestmark = pytest.mark.anyio


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.mcap"


def check(path: Path, witness: Witness) -> list[Any]:
    """The log has what the witness saw."""
    with LogReader(path) as log:
        assert content(log) == witness.entries
        assert log.finished
        assert log.damage == []
        return list(log.events())


async def test_a_run_is_recorded(path: Path) -> None:
    witness, recorder = Witness(), Recorder(path, config="[batch]\n")
    pipeline = small_pipeline(witness, recorder)
    async with pipeline:
        async for batch in pipeline.rollouts(stop=3):
            batch.trained(TrainResult({"loss": 0.5}, weight_version=str(batch.rollout_id)))
            delivered = batch
    found = check(path, witness)
    assert [event.version for event in found if isinstance(event, WeightsUpdated)] == ["0", "1", "2"]
    with LogReader(path) as log:
        kept = sorted(
            (group for group in log.rollout(2).groups() if group.outcome == "kept"), key=lambda one: one.index
        )
        assert [group.samples for group in kept] == [group.samples for group in delivered.groups]
        assert log.header.config == "[batch]\n"
        assert [stage.name for stage in log.header.stages] == ["Generate", "reward", "DynamicFilter"]
        assert log.header.stages[0].path == "middleware.generate:Generate"
        assert log.header.stages[1].path is None
        assert [part.finished for part in log.rounds] == [True] * 3
    assert recorder.lost == 0


async def test_changes_after_the_batch_was_taken_do_not_reach_the_log(path: Path) -> None:
    witness = Witness()
    pipeline = small_pipeline(witness, Recorder(path))
    async with pipeline:
        async for batch in pipeline.rollouts(stop=2):
            for sample in batch.samples:
                sample.tokens[0] = -1
                sample.metadata["trained"] = True
    check(path, witness)


def turns(sample: Sample) -> list[Sample]:
    first, second = sample, sample.copy()
    first.tokens, first.response_length = sample.tokens[:3], 3
    first.rollout_log_probs = None
    return [first, second]


async def test_fan_out(path: Path) -> None:
    witness = Witness()
    pipeline = Pipeline(
        some(2),
        [Generate(engine(length=5)), turns, rewarded([0, 1] * 4)],
        BatchSpec(groups=2),
        observers=[witness, Recorder(path)],
    )
    await batches(pipeline)
    check(path, witness)
    with LogReader(path) as log:
        for group in log.rollout(0).groups():
            assert [len(execution) for execution in group.executions] == [2, 2]
            assert [len(sample.tokens) for sample in group.samples] == [3, 5, 3, 5]
            assert len({sample.rollout_id for sample in group.executions[0]}) == 1


@sample_stage(external=True)
async def judged(sample: Sample) -> None:
    await anyio.sleep(0.01)
    sample.reward = sample.index
    sample.tokens = sample.tokens + type(sample.tokens)([99])
    sample.response_length += 1
    if sample.rollout_log_probs is not None:
        sample.rollout_log_probs += type(sample.rollout_log_probs)([0.0])


@pytest.mark.virtual_time
async def test_an_external_stage_and_changed_columns(path: Path) -> None:
    witness = Witness()
    pipeline = Pipeline(
        endless(2), [Generate(engine(length=5)), judged], BatchSpec(groups=2), observers=[witness, Recorder(path)]
    )
    await batches(pipeline, stop=2)
    found = check(path, witness)
    shown = [event for event in found if isinstance(event, StageApplied) and event.samples]
    assert {event.stage for event in shown} == {"judged"}
    with LogReader(path) as log:
        assert [log.samples(event)[0][0].tokens[-1] for event in shown] == [99] * 8
        assert [log.samples(event)[0][0].tokens[-1] for event in log.events("sample_generated")] != [99] * 8


@pytest.mark.virtual_time
@pytest.mark.parametrize("unfinished", ["recycle", "restart", "cancel"])
async def test_groups_that_go_on_in_the_next_rollout(path: Path, unfinished: Any) -> None:
    witness = Witness()
    slow = engine(delay=lambda sample: 1.0 + (sample.index or 0) % 5, length=3)
    pipeline = Pipeline(
        endless(2),
        [Generate(slow)],
        BatchSpec(groups=2, over_sampling=4, surplus="carry", unfinished=unfinished, abort_timeout=0.5),
        observers=[witness, Recorder(path)],
    )
    await batches(pipeline, stop=3)
    found = check(path, witness)
    origins = {event.origin for event in found if isinstance(event, GroupSubmitted)}
    assert origins >= {"new", {"recycle": "recycled", "restart": "restarted", "cancel": "new"}[unfinished]}
    with LogReader(path) as log:  # one rollout alone has all that it needs
        for number in range(3):
            kept = [group for group in log.rollout(number).groups() if group.outcome == "kept"]
            assert len(kept) == 2
            assert all(len(sample.tokens) == 3 for group in kept for sample in group.samples)


@pytest.mark.virtual_time
async def test_an_evaluation_beside_training(path: Path) -> None:
    witness = Witness()
    pipeline = Pipeline(
        endless(2),
        [Generate(engine(delay=1.0, length=3)), rewarded([0, 1] * 9)],
        BatchSpec(groups=2),
        observers=[witness, Recorder(path)],
    )
    async with pipeline, anyio.create_task_group() as tasks:

        async def evaluate() -> None:
            report = await pipeline.evaluate(some(3), rollout_id=1)
            assert len(report.groups) == 3

        tasks.start_soon(evaluate)
        async for _ in pipeline.rollouts(stop=3):
            pass
    check(path, witness)
    with LogReader(path) as log:
        assert len(list(log.rollout(1, evaluation=True).groups())) == 3
        assert len(list(log.rollout(1).groups())) == 2
        assert [(part.rollout_id, part.evaluation) for part in log.rounds].count((1, True)) == 1


async def test_thousands_of_samples_in_flight(path: Path) -> None:
    witness = Witness()
    arrived = 0
    everybody = anyio.Event()

    async def wait(sample: Sample) -> Completion:
        nonlocal arrived
        arrived += 1
        if arrived == 3000:
            everybody.set()
        await everybody.wait()
        return Completion("x", [1, 2, 3], [-0.5] * 3)

    class Engine:
        async def generate(self, sample: Sample, sampling: Any) -> Completion:
            return await wait(sample)

    pipeline = Pipeline(
        endless(2), [Generate(Engine())], BatchSpec(groups=1500), observers=[witness, Recorder(path)], stall_after=None
    )
    await batches(pipeline)
    found = check(path, witness)
    assert sum(isinstance(event, GroupCompleted) for event in found) == 1500


async def test_leaving_by_an_exception(path: Path) -> None:
    witness = Witness()
    pipeline = small_pipeline(witness, Recorder(path))
    with pytest.raises(RuntimeError, match="the trainer failed"):
        async with pipeline:
            async for _ in pipeline.rollouts():
                raise RuntimeError("the trainer failed")
    found = check(path, witness)
    assert found[-1].rollout_id == 0


@pytest.mark.virtual_time
async def test_leaving_by_a_cancellation(path: Path) -> None:
    witness = Witness()
    pipeline = Pipeline(
        endless(2), [Generate(engine(delay=10.0))], BatchSpec(groups=2), observers=[witness, Recorder(path)]
    )
    with anyio.move_on_after(15) as scope:
        await batches(pipeline, stop=100)
    assert scope.cancelled_caught
    found = check(path, witness)
    ends = [event.outcome for event in found if isinstance(event, GroupEnded) and event.rollout_id == 1]
    assert ends == ["cancelled", "cancelled"]


async def test_a_second_pipeline_gets_a_file_of_its_own(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run.mcap")
    for name in ("run.mcap", "run.2.mcap", "run.3.mcap"):
        witness = Witness()
        await batches(small_pipeline(witness, recorder))
        assert recorder.path == tmp_path / name
        check(tmp_path / name, witness)


async def test_one_recorder_does_not_record_two_pipelines_at_once(path: Path) -> None:
    recorder = Recorder(path)
    async with small_pipeline(recorder):
        with pytest.raises(RuntimeError, match="records a pipeline already"):
            async with small_pipeline(recorder):
                pass


@pytest.mark.parametrize("on_error", ["stop", "continue"])
async def test_an_existing_file_is_an_error(path: Path, on_error: Any) -> None:
    path.write_text("precious")
    with pytest.raises(LogError, match="the file exists"):
        await batches(small_pipeline(Recorder(path, on_error=on_error)))
    assert path.read_text() == "precious"
    await batches(small_pipeline(Recorder(path, on_error=on_error, overwrite=True)))
    with LogReader(path) as log:
        assert log.finished


async def test_a_path_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nowhere = tmp_path / "missing" / "run.mcap"
    with pytest.raises(LogError, match=r"missing/run\.mcap: the log cannot be created"):
        await batches(small_pipeline(Recorder(nowhere)))
    recorder = Recorder(nowhere, on_error="continue")
    with caplog.at_level(logging.WARNING):
        (batch,) = await batches(small_pipeline(recorder))
    assert len(batch) == 2
    assert recorder.lost > 20
    assert [record.message for record in caplog.records if "the run goes on without the log" in record.message]


async def test_a_full_disk_ends_the_rollout(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container_module, "os", FullDisk(200_000))
    witness, recorder = Witness(), Recorder(path)
    pipeline = small_pipeline(witness, recorder)
    with pytest.raises(LogError, match="cannot be written: No space left on device"):
        async with pipeline:
            async for _ in pipeline.rollouts(stop=10_000):
                assert recorder._writer is not None
                recorder._writer.flush()
    monkeypatch.undo()
    with LogReader(path) as log:
        read = content(log)
        assert 0 < len(read) <= len(witness.entries)  # all of it, when no more than an index did not fit
        assert read == witness.entries[: len(read)]


async def test_a_full_disk_does_not_end_the_run_that_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(container_module, "os", FullDisk(50_000))
    witness, recorder = Witness(), Recorder(path, on_error="continue")
    pipeline = small_pipeline(witness, recorder)
    taken = 0
    async with pipeline:
        async for _ in pipeline.rollouts(stop=20):
            taken += 1
            assert recorder._writer is not None
            with suppress(LogError):
                recorder._writer.flush()
    monkeypatch.undo()
    assert taken == 20
    assert recorder.lost > 0
    assert sum("goes on without the log" in record.message for record in caplog.records) == 1
    with LogReader(path) as log:
        read = content(log)
        assert read == witness.entries[: len(read)]
        assert len(read) > 0


async def test_an_error_of_the_body_leaves_as_itself_when_the_disk_is_full(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = small_pipeline(Recorder(path))
    with pytest.raises(RuntimeError, match="the trainer failed"):
        async with pipeline:
            async for _ in pipeline.rollouts():
                monkeypatch.setattr(container_module, "os", FullDisk(0))
                raise RuntimeError("the trainer failed")


def leave_an_object(sample: Sample) -> None:
    if sample.index == 3:
        sample.metadata["client"] = object()


async def test_what_cannot_be_encoded(path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(WireError, match=r"metadata\.client cannot be encoded: no codec for builtins\.object"):
        await batches(small_pipeline(Recorder(path), stages=[leave_an_object]))
    recorder, witness = Recorder(tmp_path / "other.mcap", on_error="continue"), Witness()
    with caplog.at_level(logging.WARNING):
        with pytest.raises(WireError):  # the digest of the batch; no matter of the recorder
            await batches(small_pipeline(witness, recorder, stages=[leave_an_object]))
    assert recorder.lost > 0
    assert sum("is not in the log" in record.message for record in caplog.records) == 1
    with LogReader(tmp_path / "other.mcap") as log:
        read = list(log.events())
        assert len(read) == len(witness.entries) - recorder.lost
        missing = [damage for damage in log.damage if damage.first_seq is not None]
        assert sum((damage.last_seq or 0) - (damage.first_seq or 0) + 1 for damage in missing) == recorder.lost


@pytest.mark.parametrize("payload", ["full", "kept", "none"])
async def test_payload_levels(path: Path, payload: Any) -> None:
    stages = [
        Generate(engine(length=500)),
        rewarded([0, 0, 0, 1, 0, 0, 1, 0, 0]),
        DynamicFilter(reward_nonzero_std),
    ]
    pipeline = Pipeline(
        endless(2), stages, BatchSpec(groups=2, over_sampling=4), observers=[Recorder(path, payload=payload)]
    )
    await batches(pipeline)
    with LogReader(path) as log:
        groups = list(log.rollout(0).groups())
        outcomes = {group.outcome for group in groups}
        assert outcomes >= {"kept", "dropped"}
        for group in groups:
            assert group.rewards()
            if payload == "full" or (payload == "kept" and group.outcome == "kept"):
                assert all(len(sample.tokens) == 500 for sample in group.samples)
            else:
                with pytest.raises(LogError, match=f"payload='{payload}'"):
                    _ = group.samples[0].tokens


async def test_zstd(path: Path, tmp_path: Path) -> None:
    witness = Witness()
    await batches(small_pipeline(witness, Recorder(path, compression="zstd"), length=2000))
    check(path, witness)
    await batches(small_pipeline(Recorder(tmp_path / "plain.mcap"), length=2000))
    assert path.stat().st_size < (tmp_path / "plain.mcap").stat().st_size


async def test_it_says_when_it_is_full_and_when_there_is_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("middleware.recorder._LIMIT", 1000)
    recorder = Recorder(path)
    assert not recorder.full
    event = WeightsUpdated(seq=0, time_ns=0, rollout_id=0, version="x" * 2000)
    async with recorder:
        recorder.observe(event)
        assert recorder.full
        await recorder.drained()
        assert not recorder.full
        await recorder.drained()
    with LogReader(path) as log:
        assert list(log.events()) == [event]


async def test_waiting_for_room_ends_when_the_disk_is_full(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("middleware.recorder._LIMIT", 1000)
    recorder = Recorder(path)
    await recorder.__aenter__()
    monkeypatch.setattr(container_module, "os", FullDisk(0))
    recorder.observe(WeightsUpdated(seq=0, time_ns=0, rollout_id=0, version="x" * 2000))
    await recorder.drained()
    with pytest.raises(LogError, match=os.strerror(errno.ENOSPC)):
        recorder.observe(WeightsUpdated(seq=1, time_ns=0, rollout_id=0, version="x"))
    with pytest.raises(LogError, match=os.strerror(errno.ENOSPC)):
        await recorder.__aexit__(None, None, None)


async def test_it_is_entered_before_it_observes(path: Path) -> None:
    with pytest.raises(RuntimeError, match="Recorder was not entered"):
        Recorder(path).observe(WeightsUpdated(seq=0, time_ns=0, rollout_id=0, version="1"))


@pytest.mark.parametrize("options", [{"on_error": "shrug"}, {"payload": "some"}, {"compression": "lz5"}])
async def test_an_option_that_does_not_exist(path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="choose"):
        Recorder(path, **options)


async def test_building_a_recorder_opens_nothing(path: Path) -> None:
    Recorder(path)
    assert not path.exists()


async def test_importing_the_stages_does_not_import_the_log() -> None:
    program = "import sys, eventbus, middleware; assert not [name for name in sys.modules if name.startswith('mcap')]"
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


async def test_a_partial_sample_of_an_aborted_request(path: Path) -> None:
    """An engine that answers with what it had when it was aborted."""
    witness = Witness()
    under_way, aborted = anyio.Event(), anyio.Event()

    class Engine(SimulatedEngine):
        async def generate(self, sample: Sample, sampling: Any) -> Completion:
            if sample.index is not None and sample.index >= 4 and not aborted.is_set():
                under_way.set()
                await aborted.wait()
                return Completion("x", [7, 8], [-0.1, -0.2], SampleStatus.ABORTED)
            await under_way.wait()  # else the batch may be full before
            return Completion("xyz", [1, 2, 3], [-0.5] * 3)

        async def abort(self, samples: Any) -> None:
            aborted.set()

    pipeline = Pipeline(
        endless(2),
        [Generate(Engine(lambda sample: Completion("", [], [])))],
        BatchSpec(groups=2, over_sampling=3, unfinished="recycle"),
        observers=[witness, Recorder(path)],
    )
    await batches(pipeline, stop=2)
    found = check(path, witness)
    recycled = next(event for event in found if isinstance(event, GroupSubmitted) and event.origin == "recycled")
    with LogReader(path) as log:
        partial = [sample for execution in log.samples(recycled)[1:] for sample in execution]
        assert {tuple(sample.tokens) for sample in partial} == {(7, 8)}


async def test_a_disk_that_fills_up_while_the_pipeline_waits_for_room(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("middleware.recorder._LIMIT", 1000)
    monkeypatch.setattr(container_module, "os", FullDisk(45_000))
    recorder = Recorder(path, on_error="continue")
    with anyio.fail_after(30):
        assert len(await batches(small_pipeline(recorder, length=200), 10)) == 10
    assert recorder.lost > 0
    assert sum("No space left" in message for message in caplog.messages) == 1


async def test_an_entry_that_failed_does_not_count(path: Path) -> None:
    path.touch()
    recorder = Recorder(path)
    with pytest.raises(LogError, match="the file exists"):
        await batches(small_pipeline(recorder))
    path.unlink()
    await batches(small_pipeline(recorder))
    assert recorder.path == path
    with LogReader(path) as log:
        assert log.finished


async def test_a_native_cancellation_leaves_no_file_open(tmp_path: Path, anyio_backend_name: str) -> None:
    """At each of the first points where a task can be cancelled; asyncio's own goes through shields."""
    if anyio_backend_name != "asyncio":
        pytest.skip("trio has no other than anyio's")
    for moment in range(0, 60, 3):
        recorder = Recorder(tmp_path / f"{moment}.mcap")
        task = asyncio.ensure_future(batches(small_pipeline(recorder, length=50), 3))
        for _ in range(moment):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        if recorder.path.exists():
            with LogReader(recorder.path) as log:
                assert log.finished
                assert log.damage == []
        assert not any(thread.name == f"rolloutbus log {moment}.mcap" for thread in threading.enumerate())


async def test_a_cancellation_at_any_point_leaves_a_finished_log(tmp_path: Path) -> None:
    for moment in range(0, 60, 3):
        recorder = Recorder(tmp_path / f"{moment}.mcap")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(batches, small_pipeline(recorder, length=50), 3)
            for _ in range(moment):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        if recorder.path.exists():
            with LogReader(recorder.path) as log:
                assert log.finished
                assert log.damage == []
