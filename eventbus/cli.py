"""The command `rolloutbus`.

    rolloutbus run run.toml --rollouts 100 --set batch.groups=16

Its exit code is

- 0 after the run;
- 1 when the run failed: with the traceback at the root of it, from where it leaves rolloutbus, or with one line when
  the prompts, the rounds or the log are at fault;
- 2 when the command line or the file has a mistake, which is told in one line;
- 130 after Ctrl-C, which shuts the run down cleanly; a second Ctrl-C does not wait for that. SIGTERM and SIGHUP do the
  same, with 143 and 129. When nobody reads the output any more (`| head`), the run ends as cleanly, with 141.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from inspect import isawaitable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Annotated, Any, Final, NoReturn

import anyio
from cyclopts import App, Parameter, Token
from rich.console import Console

from eventbus.batching import RolloutExhausted
from eventbus.config import ConfigError, RunPlan, load_plan
from eventbus.doctor import doctor
from eventbus.imports import LoadError, load_object
from eventbus.log import LogError
from eventbus.log.inspect.commands import app as log
from eventbus.replay.commands import replay
from eventbus.report import Report

__all__ = ["app", "main"]

_WIDTH: Final = 100  # columns of the plot, at most
_HERE: Final = Path(__file__).parent
_OUTPUT_CLOSED: Final = 128 + 13  # as a program that SIGPIPE ended


class _OutputClosed(Exception):
    """Nobody reads the standard output any more."""


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        # rich would raise SystemExit, which asyncio lets out of the middle of the run: nothing would be shut down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise _OutputClosed


def _whole(_: Any, tokens: Sequence[Token]) -> int:
    """An integer of at least 1; cyclopts itself cuts 2.5 to 2."""
    text = tokens[0].value
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is no whole number of at least 1")
    return int(text)


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


app.command(doctor)
app.command(log)
app.command(replay)


def main() -> None:
    """The entry point of the command."""
    app()


@app.command
def run(
    config: Path,
    /,
    *,
    rollouts: Annotated[int | None, Parameter(converter=_whole)] = None,
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

        [[stages]]
        use = "middleware:DynamicFilter"
        judge = { use = "middleware:reward_nonzero_std", key = "accuracy" }   # a function, with its key bound

        [trainer]
        use = "backends.embedded:EmbeddedTrainer"

        [log]
        path = "run.mcap"                 # then: rolloutbus log info run.mcap

    :param config: the TOML file; relative paths in it start at its folder.
    :param rollouts: how many to run; the same as --set run.rollouts=N.
    :param overrides: change one key: batch.groups=16, stages.score.timeout=3, stages[1].timeout=3. Can be given several
        times.
    :param quiet: show nothing but errors.
    """
    with _stopped_by_signals() as stopped:
        code = _load_and_run(config, rollouts, overrides or (), quiet, stopped)
    sys.exit(code)


def _load_and_run(
    config: Path, rollouts: int | None, overrides: Sequence[str], quiet: bool, stopped: list[signal.Signals]
) -> int:
    console = _Console(quiet=quiet)
    changes = [*overrides, *([f"run.rollouts={rollouts}"] if rollouts is not None else [])]
    try:
        plan = load_plan(config, changes, [] if quiet else [load_object("middleware:Progress")(console)])
        if plan.trainer is None:
            raise ConfigError(f"{config}: trainer: missing; add a section [trainer] with use = ...")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except Exception as error:  # raised by a module that the file names
        _print_error(error)
        return 1
    except KeyboardInterrupt:
        return _interrupted("before the run began", stopped)
    report = Report()
    code = _run(plan, report, stopped)
    if len(report) and code != _OUTPUT_CLOSED:
        try:
            _show(report, console, plan.plot)
        except _OutputClosed:
            return _OUTPUT_CLOSED
    return code


@contextmanager
def _stopped_by_signals() -> Iterator[list[signal.Signals]]:
    """SIGTERM and SIGHUP do what Ctrl-C does. What came is in the list."""
    stopped: list[signal.Signals] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(signal.Signals(number))
        signal.raise_signal(signal.SIGINT)

    taken: list[signal.Signals] = []
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, as in the background of a shell
        yield stopped
        return
    try:
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # which there are depends on the platform
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP: so be it
                signal.signal(number, stop)
                taken.append(number)
    except ValueError:  # not in the main thread
        pass
    try:
        yield stopped
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _interrupted(when: str, stopped: Sequence[signal.Signals]) -> int:
    what = f"ended by {stopped[0].name}" if stopped else "interrupted"
    print(f"{what}; {when}", file=sys.stderr)
    return 128 + (stopped[0] if stopped else signal.SIGINT)


def _run(plan: RunPlan, report: Report, stopped: Sequence[signal.Signals]) -> int:
    """Run to the end, or to an error or Ctrl-C. The exit code."""
    # Models and modules stay until the end: without this each full collection walks through them (78 ms with torch).
    gc.collect()
    gc.freeze()
    try:
        anyio.run(partial(_train, plan, report), backend=plan.backend)
    except BaseException as error:
        if _holds(error, KeyboardInterrupt):
            return _interrupted(f"rollouts trained: {len(report)}", stopped)
        if _holds(error, _OutputClosed):
            print(f"nobody reads the output any more; rollouts trained: {len(report)}", file=sys.stderr)
            return _OUTPUT_CLOSED
        if not isinstance(error, Exception):
            raise
        _print_error(error)
        return 1
    return 0


async def _train(plan: RunPlan, report: Report) -> None:
    async with plan.pipeline as pipeline:
        async for batch in pipeline.rollouts(stop=plan.rollouts, ahead=plan.ahead):
            result = plan.trainer.train(batch)
            batch.trained(await result if isawaitable(result) else result)
            report.summaries.append(batch.summary)


def _show(report: Report, console: Console, plot: Path) -> None:
    console.print(report.table())
    try:
        if (drawn := report.terminal_plot(min(console.width, _WIDTH))) and _can_encode(drawn, console):
            console.out(drawn, highlight=False)
        report.save(plot)
        console.out(f"plot: {plot}", highlight=False)
    except LoadError as error:
        console.out(f"no plot: {error}", highlight=False)
    except OSError as error:
        console.out(f"no plot at {plot}: {error.strerror}", highlight=False)


def _can_encode(text: str, console: Console) -> bool:
    try:
        text.encode(console.encoding)
    except UnicodeEncodeError:
        return False
    return True


def _holds(error: BaseException, kind: type[BaseException]) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(kind) is not None
    return isinstance(error, kind)


def _print_error(error: BaseException) -> None:
    """The traceback at the root. Of many failures in one group the first, then what the group says of them all."""
    group = error if isinstance(error, BaseExceptionGroup) else error.__cause__
    if not isinstance(group, BaseExceptionGroup):
        of_prompts = isinstance(error, OSError | ValueError) and _is_of_prompts(error)
        if of_prompts or isinstance(error, RolloutExhausted | LogError):
            print(error, file=sys.stderr)  # it says what to do, and no line of a program is at fault
        else:
            _print_traceback(error)
        return
    root: BaseException = group
    while isinstance(root, BaseExceptionGroup):
        root = root.exceptions[0]
    _print_traceback(root)
    print("\nThat was the first failure. What ended the run:\n", file=sys.stderr)
    print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)


def _print_traceback(error: BaseException) -> None:
    """From the first frame outside of rolloutbus and of what called it; all of it when there is none."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace):
        trace = trace.tb_next
    if trace is None and not isinstance(error, SyntaxError):  # which names its line by itself
        trace = error.__traceback__
    traceback.print_exception(type(error), error, trace)


def _is_ours(trace: TracebackType) -> bool:
    place = Path(trace.tb_frame.f_code.co_filename)
    module = str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0]
    return _HERE in place.parents or module in ("importlib", "anyio", "asyncio", "trio")


def _is_of_prompts(error: BaseException) -> bool:
    """Whether `eventbus.prompts` itself raised it."""
    frames = [frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1:] == ["eventbus.prompts"]
