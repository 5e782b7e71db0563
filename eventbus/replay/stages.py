"""Which stages a replay runs: those that it is given, else those that the log's configuration names.

A stage that cannot be had here stays in its place and answers from the record (`Known.missing` says why).
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from eventbus.config import STAGE_KEYS, ConfigError, Reach, build_stage, override, parse, parse_value
from eventbus.events import GroupJudged, StageApplied
from eventbus.imports import LoadError, load_object
from eventbus.log.format import StageNote
from eventbus.log.stages import table_of
from eventbus.pipeline import Pipeline
from eventbus.replay.record import RecordedLog, ReplayError, RoundRecord
from eventbus.replay.trust import Unasked
from eventbus.stage import ContractError, DeclaredStage, Stage, bind, bind_all

__all__ = [
    "Known",
    "altered",
    "changed_option",
    "declared",
    "given",
    "look_beside",
    "named_in",
    "option_value",
    "regrouped",
    "replacement",
    "stages_of",
]


_PATH: Final = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")


class Known(msgspec.Struct, frozen=True):
    """A stage of the run: as it is here, or why it is not."""

    name: str
    level: str
    stage: Stage | None
    external: bool = False
    on_error: Any = "fail"
    missing: str | None = None
    note: StageNote | None = None
    """Of one that is not here: how it behaved, where the log says so."""

    @classmethod
    def gone(cls, note: StageNote, why: str) -> Known:
        return cls(note.name, note.level, None, note.external, note.on_error, why, note)

    def runs(self, run_external: bool) -> bool:
        """It is here, and nothing says that it answers from the record."""
        return self.stage is not None and (run_external or not self.external)


def given(stages: Sequence[Any] | Pipeline) -> list[Known]:
    """:raises ContractError: a stage does not bind."""
    listed = stages.stages if isinstance(stages, Pipeline) else list(stages)
    bound = listed if all(isinstance(stage, Stage) for stage in listed) else bind_all(listed)
    return [Known(stage.name, stage.level, stage, stage.external, stage.on_error) for stage in bound]


def named_in(log: RecordedLog, overrides: Iterable[str] = (), *, trust: bool = False) -> list[Known]:
    """The stages that the log names, as far as `Unasked` has them imported; see `look_beside` for where they are found.

    :param overrides: `--set` arguments, such as "stages.judge.timeout=3", for a log with a configuration.
    :param trust: import all that the log names.
    :raises ReplayError: the log names no stages.
    :raises ConfigError: an override is wrong.
    """
    header = log.header
    base = look_beside(log, trust=trust)
    reach = None if trust else Unasked(base, {name for each in overrides for name in _named(each)})
    notes = list(header.stages)
    tables = _tables(header.config)
    if not notes and not tables:
        raise ReplayError("the log does not say which stages it had: give them, Replay(log, stages=[...])")
    if tables and (not notes or len(notes) == len(tables)):
        config: dict[str, Any] = {"stages": tables}
        for each in overrides:
            override(config, each)
        return [
            _from_table(table, position, base, reach, notes[position] if notes else None)
            for position, table in enumerate(config["stages"])
        ]
    return [_from_note(note, base, reach) for note in notes]


def look_beside(log: RecordedLog, *, trust: bool = False) -> Path:
    """Have modules found in the current folder, and in that of the log, where run.toml usually lies too, if it belongs
    to the project at hand or is trusted.

    :return: the folder of the log, at which relative paths start.
    """
    path = getattr(log, "path", None)
    base = Path.cwd() if path is None else Path(path).absolute().parent
    here = Path.cwd()
    for folder in [base, here] if trust or Unasked(base).holds(base) else [here]:
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    return base


class Regrouped(NamedTuple):
    """How the stages that are given differ from those of the run in what there is, and in its order."""

    first: int
    """The first place at which they do."""
    samples: bool
    """That place is among the sample stages."""
    gone: list[str]
    told: list[str]


def regrouped(known: Sequence[Known], log: RecordedLog) -> Regrouped:
    names, were = [each.name for each in known], [note.name for note in log.header.stages]
    if not were or names == were:
        return Regrouped(len(names), False, [], [])
    pairs = zip(names, were, strict=False)
    first = next((place for place, (name, other) in enumerate(pairs) if name != other), min(len(names), len(were)))
    levels = [each.level for each in (*known[first : first + 1], *log.header.stages[first : first + 1])]
    gone, new = [name for name in were if name not in names], [name for name in names if name not in were]
    told = [f"without {name}" for name in gone] + [f"with {name}" for name in new]
    return Regrouped(first, "sample" in levels, gone, told or ["another order"])


def stages_of(known: Sequence[Known], round: RoundRecord) -> list[Stage]:
    """The stages as a chain takes them; of those that are missing the record says how they behaved."""
    shape: _Shape | None = None
    stages: list[Stage] = []
    for each in known:
        if each.stage is not None:
            stages.append(each.stage)
            continue
        note = each.note
        assert note is not None, "a stage that is not here is one of the log"
        shape = shape or _Shape(round, known)
        counts = note.counts or each.name in shape.judges
        stages.append(
            Stage(
                each.name,
                each.level,  # type: ignore[arg-type]
                partial(_unavailable, each),
                wraps=note.wraps,
                takes_args=False,
                wants=frozenset({"remaining", "target"} if counts else ()),
                external=each.external,
                on_error=each.on_error,
                fans_out=note.fans_out or each.name in shape.fans_out,
            )
        )
    return stages


def replacement(name: str, known: Known, stage: Any) -> Known:
    """A stage in the place, and under the name, of one of the run.

    :raises ReplayError: it does not bind, or works on another level.
    """
    if isinstance(stage, Stage):
        bound = stage
    else:
        try:
            bound = bind(stage, f"the replacement for {name!r}")
        except ContractError as error:
            raise ReplayError(str(error)) from error
    if bound.level != known.level:
        raise ReplayError(f"{name!r} is a {known.level} stage, the replacement {bound.name!r} a {bound.level} stage")
    renamed = altered(bound, name=name)
    return Known(name, known.level, renamed, renamed.external, renamed.on_error)


def changed_option(known: Known, option: str, value: Any) -> Any:
    """The stage with one option changed and the others kept: made anew from its own attributes.

    :raises ReplayError: it is not here, has no such option, or does not keep its options as attributes.
    """
    if known.stage is None:
        raise ReplayError(f"{known.name}.{option}: the stage cannot be had here: {known.missing}")
    function: Any = known.stage.function
    advice = f"give the whole stage, --with {known.name}=my_module:stage"
    if isinstance(function, partial):
        changed: Any = partial(function.func, *function.args, **{**function.keywords, option: value})
    elif inspect.isroutine(function) or inspect.isfunction(function):
        raise ReplayError(f"{known.name}.{option}: the stage is a function without options; {advice}")
    else:
        parameters = [
            name
            for name, parameter in inspect.signature(type(function)).parameters.items()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        if option not in parameters:
            near = get_close_matches(option, parameters, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(parameters) or 'none'}"
            raise ReplayError(f"{known.name}.{option}: {type(function).__name__} has no such option; {hint}")
        lost = [name for name in parameters if name != option and not hasattr(function, name)]
        if lost:
            raise ReplayError(
                f"{known.name}.{option}: {type(function).__name__} does not keep its option {lost[0]!r} as an "
                f"attribute, so it cannot be made anew; {advice}"
            )
        kept = {name: getattr(function, name) for name in parameters if name != option}
        try:
            changed = type(function)(**kept, **{option: value})
        except (TypeError, ValueError) as error:
            raise ReplayError(f"{known.name}.{option}: {error}") from error
    return declared(known.stage, changed)


def altered(stage: Stage, **changes: Any) -> Stage:
    """A bound stage that is another in these attributes."""
    other = copy(stage)
    for name, value in changes.items():
        setattr(other, name, value)
    return other


def declared(stage: Stage, function: Any) -> DeclaredStage:
    """Another function in the place of a stage's, to be bound anew."""
    return DeclaredStage(
        function,
        stage.level,
        name=stage.name,
        external=stage.external,
        on_error=stage.on_error,
        fans_out=stage.fans_out or None,
    )


class _NoEngine:
    """In the place of the engine: a replay asks none."""

    async def generate(self, sample: Any, sampling: Any) -> Any:
        raise ReplayError("a replay has no engine: what was generated is in the log")


def _tables(config: str | None) -> list[dict[str, Any]]:
    if config is None:
        return []
    try:
        tables = parse(config).get("stages", [])
    except ValueError:
        return []
    return tables if isinstance(tables, list) and all(isinstance(table, dict) for table in tables) else []


def _named(setting: str) -> Iterator[str]:
    """The names in a `--set` argument."""
    values = [parse_value(setting.partition("=")[2].strip())]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
        elif isinstance(value, str):
            yield value


def _from_table(table: Mapping[str, Any], position: int, base: Path, reach: Reach | None, note: Any) -> Known:
    try:
        table = {key: deepcopy(value) for key, value in table.items() if key != "engine"}
        if table.get("external") is False:  # what says of itself that it cannot be done again stays so
            del table["external"]
        stage = bind(build_stage(table, f"stages[{position}]", base, _NoEngine(), reach))
        return Known(stage.name, stage.level, stage, stage.external, stage.on_error)
    except Exception as error:  # also what its module raises: whatever it is, the stage is not here
        why = f"{type(error).__name__}: {error}" if not isinstance(error, ConfigError) else str(error)
        if note is None:
            raise ReplayError(f"{why}; and the log does not say what kind of stage it is") from error
        return Known.gone(note, why)


def _from_note(note: StageNote, base: Path, reach: Reach | None) -> Known:
    if note.table is None:
        of = "no import path for it" if note.path is None else f"not all that makes it of {note.path}"
        return Known.gone(note, f"the log has {of}; give the stages of the run")
    try:
        options = {key: value for key, value in note.table.items() if key not in STAGE_KEYS}  # which no log writes
        made = build_stage(options, note.name, base, _NoEngine(), reach)
        # What says of itself that it cannot be done again stays so, whatever the log says.
        stage = bind(
            DeclaredStage(
                made,
                note.level,  # type: ignore[arg-type]
                name=note.name,
                external=note.external or None,
                on_error=note.on_error,  # type: ignore[arg-type]
                fans_out=note.fans_out or None,
            )
        )
        if table_of(altered(stage, external=False)) != options and not stage.external:
            return Known.gone(note, f"made anew from {options['use']}, it has not the options that it had")
        return Known(stage.name, stage.level, stage, stage.external, stage.on_error)
    except (LoadError, ConfigError) as error:
        return Known.gone(note, str(error))
    except Exception as error:  # also what its module raises
        return Known.gone(note, f"{type(error).__name__}: {error}")


def _unavailable(known: Known, value: Any) -> Any:
    raise ReplayError(f"stage {known.name!r} cannot be had here: {known.missing}")


class _Shape:
    """What the events tell of stages that are not here, for notes that do not say it, as those of an imported log."""

    def __init__(self, round: RoundRecord, known: Sequence[Known]) -> None:
        self.judges: set[str] = set()
        self.fans_out: set[str] = set()
        external = {each.name for each in known if each.external}
        for group in round.groups:
            self.judges.update(event.stage for event in group.stages if isinstance(event, GroupJudged))
            for trace in group.traces():
                for applied in trace.stages:
                    event = applied.event
                    samples = event.samples[0] if isinstance(event, StageApplied) and event.samples else []
                    if len(samples) > 1 or (samples and event.stage not in external):
                        self.fans_out.add(event.stage)


def option_value(value: Any) -> Any:
    """An import path as what it names; any other value as it is.

    :raises LoadError: it names nothing.
    """
    return load_object(value) if isinstance(value, str) and _PATH.fullmatch(value) else value
