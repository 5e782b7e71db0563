"""The watchdog names what a silent pipeline waits for, and the stage that holds the loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.from_thread
import pytest

from eventbus.batching import BatchSpec
from eventbus.pipeline import Pipeline
from eventbus.prompts import Prompts
from eventbus.sample import Sample
from eventbus.watchdog import stall_report
from middleware import Generate, limit
from tests.streams import endless, engine

pytestmark = pytest.mark.anyio


class Heard(logging.Handler):
    """Calls `react` at the first warning, in the thread that logs it."""

    def __init__(self, react: Callable[[], Any]) -> None:
        super().__init__()
        self.react = react
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.react()


def listen(react: Callable[[], Any]) -> Heard:
    heard = Heard(react)
    logging.getLogger("rolloutbus").addHandler(heard)
    return heard


@pytest.fixture(autouse=True)
def _silence() -> Any:
    logger = logging.getLogger("rolloutbus")
    yield
    logger.handlers.clear()


async def test_a_stall_names_sample_stage_age_and_holder() -> None:
    stuck = anyio.Event()
    heard = listen(stuck.set)

    async def judge(sample: Sample) -> None:
        if sample.index == 1:
            await stuck.wait()

    stages = [Generate(engine()), limit(judge, 64)]
    async with Pipeline(endless(1), stages, BatchSpec(2), stall_after=0.05) as pipeline:
        await anext(pipeline.rollouts())
    assert "nothing has happened for 0.05 s" in heard.messages[0]
    assert "sample 1 (group 1, rollout 0): in stage 'judge' for 0." in heard.messages[0]


async def test_a_stalled_engine_is_named_as_the_holder() -> None:
    report = ""
    async with Pipeline(endless(1), [Generate(engine(delay=1e9))], BatchSpec(1), stall_after=None) as pipeline:
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(anext, pipeline.rollouts())
            await anyio.wait_all_tasks_blocked()
            report = stall_report(pipeline._rollouts)
            task_group.cancel_scope.cancel()
    assert "held by engine SimulatedEngine" in report


async def test_a_silent_prompt_source_is_named() -> None:
    class Silent:
        def __aiter__(self) -> Silent:
            return self

        async def __anext__(self) -> str:
            await anyio.sleep_forever()
            raise AssertionError

    async with Pipeline(Prompts(Silent(), 1), [Generate(engine())], BatchSpec(1), stall_after=None) as pipeline:
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(anext, pipeline.rollouts())
            await anyio.wait_all_tasks_blocked()
            assert stall_report(pipeline._rollouts) == "  rollout 0: the prompt source Prompts"
            task_group.cancel_scope.cancel()


async def test_a_stage_that_holds_the_loop_is_named_while_it_does() -> None:
    seen = threading.Event()
    heard = listen(seen.set)

    def blocks(sample: Sample) -> None:
        assert seen.wait(60)

    async with Pipeline(endless(1), [blocks], BatchSpec(1)) as pipeline:
        await anext(pipeline.rollouts())
    assert "stage 'blocks' holds the event loop for 0." in heard.messages[0]
    assert "sample 0 (group 0, rollout 0): wrap it, in_thread(blocks)" in heard.messages[0]
    assert "assert seen.wait(60)" in heard.messages[0]


async def test_a_loop_held_by_other_code_is_seen_after_the_stall_time() -> None:
    seen = threading.Event()
    heard = listen(seen.set)
    async with Pipeline(endless(1), [], BatchSpec(1), stall_after=0.1):
        assert seen.wait(60)
    assert "by no stage of the pipeline" in heard.messages[0]


async def test_its_thread_ends_with_the_pipeline() -> None:
    def watching() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "rolloutbus watchdog"]

    async with Pipeline(endless(1), [], BatchSpec(1)):
        assert watching() == ["rolloutbus watchdog"]
    assert watching() == []


async def test_a_pipeline_that_waits_for_its_trainer_is_no_stall() -> None:
    async with Pipeline(endless(1), [Generate(engine())], BatchSpec(1), stall_after=None) as pipeline:
        await anext(pipeline.rollouts())
        assert stall_report(pipeline._rollouts) == ""
