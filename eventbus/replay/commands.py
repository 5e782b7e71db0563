"""The command `rolloutbus replay`.

Its exit code is 0 when the replay came to the same, 1 when something differs, and 2 when the command line, the log or a
module that is named has a mistake: that is told in one line.
"""

from __future__ import annotations

import copy
import inspect
import sys
from code import InteractiveConsole
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import anyio
import msgspec
from cyclopts import Parameter
from rich.console import Console

from eventbus.batching import BatchSpec, RolloutExhausted
from eventbus.config import ConfigError, parse_value
from eventbus.context import _current
from eventbus.events import BatchAssembled
from eventbus.group import Summary
from eventbus.imports import LoadError, load_object
from eventbus.log import LogError, LogReader
from eventbus.pipeline import Pipeline
from eventbus.prompts import Prompts
from eventbus.replay.engine import ReplayEngine
from eventbus.replay.record import ReplayError, RoundRecord, limited
from eventbus.replay.replay import Replay, Step
from eventbus.replay.report import for_terminal
from eventbus.replay.stages import Known, changed_option, declared, look_beside, named_in, option_value, replacement
from eventbus.stage import ContractError, Stage

__all__ = ["replay"]

_MISTAKES: Final = (ReplayError, LogError, ConfigError, LoadError, ContractError)
_WHERE: Final = ("stage", "group", "sample")


def replay(
    log: Path,
    /,
    *,
    verify: Annotated[bool, Parameter(negative=())] = False,
    rollout: Annotated[list[int] | None, Parameter(negative=(), consume_multiple=True)] = None,
    overrides: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    replaced: Annotated[list[str] | None, Parameter(name="--with", negative=())] = None,
    pipeline: str | None = None,
    stop_at: Annotated[list[str] | None, Parameter(name="--break", negative=(), consume_multiple=True)] = None,
    speed: float | None = None,
    run_external: Annotated[bool, Parameter(negative=())] = False,
    trust: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Run the stages of a recorded run again, without its engine.

    Examples:

        rolloutbus replay run.mcap --verify

        rolloutbus replay run.mcap --rollout 137 --set DynamicFilter.judge=my_filters:stricter

        rolloutbus replay run.mcap --rollout 137 --with judge=my_stages:better_judge --pipeline my_module:pipeline

        rolloutbus replay run.mcap --rollout 137 --break stage=judge sample=1234

    The stages are those that the log names, as far as they are stages of rolloutbus or lie in the current folder or
    below it; others answer from the record, and are named. The exit code is 1 when something differs, 2 when it cannot
    be done.

    :param log: the log.
    :param verify: run the same stages and stop at the first event that differs; what is done without other options.
    :param rollout: only these.
    :param overrides: what if one option of a stage were another: STAGE.option=value; an import path stands for what it
        names. Can be given several times.
    :param replaced: what if a stage were another: NAME=package.module:stage. Can be given several times.
    :param pipeline: package.module:object with the stages of the run: a Pipeline, a list, or a function that gives one.
    :param stop_at: stop in front of a stage with a Python prompt: stage=NAME, group=N, sample=N.
    :param speed: run a live pipeline on the recorded answers, so many times as fast as they came; inf for at once.
    :param run_external: run stages marked external again instead of answering from the record.
    :param trust: import and run whatever the log names, also beside it, with the options that it gives: for a log that
        was written by somebody whose programs you would run.
    """
    with _one_line():
        changes = [_pair(text, "--with", "NAME=package.module:stage") for text in replaced or ()]
        options = [_option(text) for text in overrides or ()]
        modes = [verify, bool(changes or options), stop_at is not None, speed is not None]
        if sum(modes) > 1:
            raise ReplayError("choose one of --verify, --set or --with, --break, and --speed")
        if speed is not None and not speed > 0:
            raise ReplayError(f"--speed {speed:g}: how many times as fast as recorded, more than 0")
        where = _places(stop_at or ())
        reader = LogReader(log)
        look_beside(reader, trust=trust)
        stages = None if pipeline is None else _stages(pipeline)
        run = Replay(reader, stages, run_external=run_external, trust=trust)
        console = Console(soft_wrap=True)
        if changes or options:
            code = _what_if(run, changes, options, rollout, console, from_config=pipeline is None)
        elif stop_at is not None:
            code = _break(run, rollout, where)
        elif speed is not None:
            code = _live(run, speed, rollout, console)
        else:
            report = run.verify(rollout)
            console.print(for_terminal(str(report)), markup=False, highlight=False)
            code = 0 if report.same else 1
        for damage in reader.damage:
            print(for_terminal(f"{log}: {damage}"), file=sys.stderr)
    sys.exit(code)


# What if


def _what_if(
    run: Replay,
    changes: list[tuple[str, str]],
    options: list[tuple[str, str, str]],
    rollouts: list[int] | None,
    console: Console,
    *,
    from_config: bool,
) -> int:
    stages: dict[str, Any] = {}
    for name, path in changes:
        if name in stages:
            raise ReplayError(f"--with {name}=...: given twice")
        run.stage(name)
        with _importing(path):
            found = load_object(path)
            stages[name] = found() if inspect.isclass(found) else found
    names = list(dict.fromkeys(name for name, _, _ in options))
    for name in names:
        if name in stages:
            raise ReplayError(f"--set {name}...: --with replaces this stage already")
        run.stage(name)
    for name, option, value in options:
        if option == "use":
            raise ReplayError(f"--set {name}.use=...: to replace the stage write --with {name}={value}")
        if option == "name":
            raise ReplayError(f"--set {name}.name=...: a replay finds the stage in the log by its name")
    if from_config and options and run.log.header.config is not None:
        lines = [f"stages.{name}.{option}={_as_toml(value)}" for name, option, value in options]
        known = {each.name: each for each in named_in(run.log, lines, trust=run.trust)}
        for name in names:
            if known[name].stage is None:
                raise ReplayError(f"--set {name}...: {known[name].missing}")
            stages[name] = known[name].stage
    else:
        for name, option, value in options:
            known_stage = run.stage(name)
            if name in stages:
                known_stage = replacement(name, known_stage, stages[name])
            with _importing(value):
                stages[name] = changed_option(known_stage, option, option_value(parse_value(value)))
    report = run.what_if(stages, rollouts)
    console.print(report)
    return 0 if report.same else 1


def _as_toml(value: str) -> str:
    parsed = parse_value(value)
    if isinstance(parsed, str):
        with _importing(parsed):
            if option_value(parsed) is not parsed:
                return f'{{ use = "{parsed}" }}'
    return value


# Break


def _break(run: Replay, rollouts: list[int] | None, where: Mapping[str, Any]) -> int:
    found = False
    for number in rollouts or [None]:  # type: ignore[list-item]
        for step in run.steps(rollout=number, **where):
            found = True
            _prompt(step)
    if not found:
        told = " ".join(f"{name}={value}" for name, value in where.items())
        raise ReplayError(f"--break {told}: nothing in this log came there")
    return 0


def _prompt(step: Step) -> None:
    token = _current.set(step.context)
    names = {
        "step": step,
        "sample": step.sample,
        "group": step.group,
        "stage": step.function,
        "context": step.context,
        "run": step.run,
    }
    banner = (
        f"{step!r}\n"
        f"{', '.join(name for name, value in names.items() if value is not None)} are at hand; run() runs the stage on "
        "a copy. Ctrl-D goes on to the next, exit() ends."
    )
    try:
        InteractiveConsole(names).interact(banner, exitmsg="")
    finally:
        _current.reset(token)


# Live


def _live(run: Replay, speed: float, rollouts: list[int] | None, console: Console) -> int:
    same, size = True, 0
    numbers = [part.rollout_id for part in run.log.rounds if not part.evaluation]
    for number in rollouts or numbers:
        if number not in numbers:
            raise LogError(f"no rollout {number} in this log")
        events = run.log.events(("rollout_started", "batch_assembled", "rollout_finished"), rollout=number)
        round = RoundRecord((event for event in events if not event.evaluation), number, False)
        if round.started is None:
            continue
        engine = ReplayEngine(run.log, speed)
        stages = [_on_engine(known, engine) for known in run.stages]
        with limited(run.log):
            try:
                spec = msgspec.convert(round.spec, BatchSpec)
                if spec.on_exhausted == "wrap":  # nothing was generated twice
                    spec = msgspec.structs.replace(spec, on_exhausted="error")
                size = size or engine.group_size  # reads the whole log
                prompts = Prompts(engine.prompts(number), size)
                live = Pipeline(prompts, stages, spec, args=run._args)
            except (ValueError, TypeError) as error:
                raise ReplayError(f"rollout {number}: {error}") from error
            kept, summary = anyio.run(partial(_one, live, number))
        before = round.finished.summary if round.finished is not None else None
        was = list(round.assembled.groups) if isinstance(round.assembled, BatchAssembled) else []
        same = same and kept == was
        told = [f"recorded  {before if before is not None else 'unfinished'}", f"now       {summary}"]
        if kept != was:
            told.append(f"          the batch had groups {was}, and has {kept}")
        console.print(for_terminal("\n".join(told)), highlight=False, markup=False)
    return 0 if same else 1


async def _one(pipeline: Pipeline, number: int) -> tuple[list[int], Summary | str]:
    try:
        async with pipeline:
            async for batch in pipeline.rollouts(number, number + 1):
                return [group.index for group in batch.groups], batch.summary
    except RolloutExhausted as error:
        return [], str(error)
    except Exception as error:
        root: BaseException = error
        while isinstance(root, BaseExceptionGroup):
            root = root.exceptions[0]
        raise ReplayError(f"rollout {number}: {type(root).__name__}: {root}") from error
    return [], "no batch: there were no prompts"


def _on_engine(known: Known, engine: ReplayEngine) -> Any:
    """A stage of the run with the recorded engine in the place of its own."""
    if known.stage is None:
        raise ReplayError(
            f"stage {known.name!r} cannot be had here: {known.missing}; a live pipeline needs every stage, "
            "give them with --pipeline"
        )
    stage: Stage = known.stage
    if not callable(getattr(getattr(stage.function, "engine", None), "generate", None)):
        return declared(stage, stage.function)
    function = copy.copy(stage.function)
    function.engine = engine  # type: ignore[attr-defined]
    return declared(stage, function)


# The command line


def _pair(text: str, flag: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ReplayError(f"{flag} {text}: write {form}")
    return name.strip(), value.strip()


def _option(text: str) -> tuple[str, str, str]:
    path, value = _pair(text, "--set", "STAGE.option=value, such as DynamicFilter.fallback=last")
    name, dot, option = path.partition(".")
    if not (name and dot and option):
        raise ReplayError(f"--set {text}: write STAGE.option=value, such as DynamicFilter.fallback=last")
    return name, option, value


def _places(texts: Any) -> dict[str, Any]:
    places: dict[str, Any] = {}
    for text in texts:
        name, value = _pair(text, "--break", "stage=NAME, group=N or sample=N")
        if name not in _WHERE:
            raise ReplayError(f"--break {text}: choose {', '.join(_WHERE)}")
        if name != "stage" and not value.isdecimal():
            raise ReplayError(f"--break {text}: {name} takes a number")
        places[name] = value if name == "stage" else int(value)
    return places


def _stages(path: str) -> Any:
    with _importing(path):
        found = load_object(path)
        if not isinstance(found, Pipeline | list | tuple) and callable(found):
            found = found()
    if not isinstance(found, Pipeline | list | tuple):
        raise ReplayError(
            f"--pipeline {path}: is a {type(found).__name__}; give a Pipeline, a list of stages, or a function that "
            "gives one"
        )
    return found


@contextmanager
def _importing(path: str) -> Iterator[None]:
    """Whatever a module or object of the user's raises while it is brought in is one line."""
    try:
        yield
    except _MISTAKES:
        raise
    except Exception as error:
        raise ReplayError(f"{path}: {type(error).__name__}: {error}") from error


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except _MISTAKES as error:
        print(for_terminal(str(error)), file=sys.stderr)
        sys.exit(2)
