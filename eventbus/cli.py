"""The command `rolloutbus`.

    rolloutbus run run.toml --rollouts 100 --set batch.groups=16

Its exit code is 0 after the run, 1 when the run failed (with the traceback at the root of it), 2 when the command line
or the file has a mistake (one line), and 130 after Ctrl-C, which shuts the run down cleanly; a second Ctrl-C does not
wait for that.
"""

from __future__ import annotations

import gc
import sys
import traceback
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated

import anyio
from cyclopts import App, Parameter
from rich.console import Console

from eventbus.config import ConfigError, RunPlan, load_plan
from eventbus.imports import LoadError, load_object
from eventbus.report import Report

__all__ = ["app", "main"]

_WIDTH = 100  # columns of the plot, at most


def _version() -> str:
    try:
        return metadata.version("rolloutbus")
    except metadata.PackageNotFoundError:
        return "not installed"


app = App(
    name="rolloutbus",
    version=_version,
    help="""Rollouts for reinforcement learning: prompts through an engine and your stages to a trainer.

    Start with: rolloutbus run --help""",
)


def main() -> None:
    """The entry point of the command."""
    app()


@app.command
def run(
    config: Path,
    /,
    *,
    rollouts: int | None = None,
    overrides: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    quiet: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Train as a TOML file says.

    Example:

        rolloutbus run run.toml --rollouts 100 --set batch.groups=16

    with run.toml:

        [prompts]
        path = "train.jsonl"              # {"prompt": ..., "label": ...}
        group_size = 8

        [engine]
        use = "backends.embedded:EmbeddedEngine"

        [batch]
        groups = 32

        [[stages]]
        use = "middleware:Generate"       # a class, called with the other keys
        sampling = { temperature = 1.0, max_new_tokens = 16 }

        [[stages]]
        use = "my_stages:score"           # a function, beside run.toml
        timeout = 30

        [trainer]
        use = "backends.embedded:EmbeddedTrainer"

    :param config: the TOML file; relative paths in it start at its folder.
    :param rollouts: how many to run; the same as --set run.rollouts=N.
    :param overrides: change one key: batch.groups=16, stages.score.timeout=3, stages[1].timeout=3. Can be given several
        times.
    :param quiet: show nothing but errors.
    """
    console = Console(quiet=quiet)
    changes = [*(overrides or ()), *([f"run.rollouts={rollouts}"] if rollouts is not None else [])]
    try:
        plan = load_plan(config, changes, [] if quiet else [load_object("middleware:Progress")(console)])
        if plan.trainer is None:
            raise ConfigError(f"{config}: trainer: missing; add a section [trainer] with use = ...")
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except Exception as error:  # raised by a module that the file names
        _print_error(error)
        sys.exit(1)
    report = Report()
    code = _run(plan, report)
    if len(report):
        _show(report, console, plan.plot)
    sys.exit(code)


def _run(plan: RunPlan, report: Report) -> int:
    """Run to the end, or to an error or Ctrl-C. The exit code."""
    # Models and modules stay until the end: without this each full collection walks through them (78 ms with torch).
    gc.collect()
    gc.freeze()
    try:
        anyio.run(partial(_train, plan, report), backend=plan.backend)
    except BaseException as error:
        if _is_interrupt(error):
            print(f"interrupted; rollouts trained: {len(report)}", file=sys.stderr)
            return 130
        if not isinstance(error, Exception):
            raise
        _print_error(error)
        return 1
    return 0


async def _train(plan: RunPlan, report: Report) -> None:
    async with plan.pipeline as pipeline:
        async for batch in pipeline.rollouts(stop=plan.rollouts, ahead=plan.ahead):
            batch.trained(await plan.trainer.train(batch))
            report.summaries.append(batch.summary)


def _show(report: Report, console: Console, plot: Path) -> None:
    console.print(report.table())
    try:
        console.out(report.terminal_plot(min(console.width, _WIDTH)), highlight=False)
        report.save(plot)
        console.out(f"plot: {plot}", highlight=False)
    except LoadError as error:
        console.out(f"no plot: {error}", highlight=False)
    except OSError as error:
        console.out(f"no plot at {plot}: {error.strerror}", highlight=False)


def _is_interrupt(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(KeyboardInterrupt) is not None
    return isinstance(error, KeyboardInterrupt)


def _print_error(error: BaseException) -> None:
    """The traceback at the root. Of many failures in one group the first, then what the group says of them all."""
    group = error if isinstance(error, BaseExceptionGroup) else error.__cause__
    if not isinstance(group, BaseExceptionGroup):
        traceback.print_exception(error)
        return
    root: BaseException = group
    while isinstance(root, BaseExceptionGroup):
        root = root.exceptions[0]
    traceback.print_exception(root)
    print("\nThat was the first failure. What ended the run:\n", file=sys.stderr)
    print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)
