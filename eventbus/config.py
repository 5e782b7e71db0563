"""From a TOML file to a pipeline and its trainer: what `rolloutbus run` runs.

    [prompts]                       [[stages]]
    path = "train.jsonl"            use = "my_stages:ask_judge"
    group_size = 8                  timeout = 30

A table with `use = "package.module:attribute"`, at any depth, stands for an object. A class is called with the other
keys of the table, which are checked against the annotations of its parameters; a parameter `engine` that is not given
gets the one of the section [engine]. To a function the other keys are bound, as `functools.partial` does:

    judge = { use = "middleware:reward_nonzero_std", key = "accuracy" }

Anything else that `use` names is taken as it is, and so is a class for a parameter annotated `type[...]`:

    retry = { attempts = 3, on = [{ use = "builtins:OSError" }, { use = "httpx:HTTPError" }] }

In the table of a stage the keys `name`, `external`, `on_error`, `in_thread`, `timeout`, `retry` and `limit` are no
arguments: they wrap the stage, in this order, innermost first.

What this module keeps true: every mistake in a file is one `ConfigError` of one line, which begins with the file and
the path of the key. Only `use` is ever imported. A string for a parameter that is annotated as a path starts at the
folder of the file, and nothing else does.
"""

from __future__ import annotations

import builtins
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from os import PathLike
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Protocol, Union, get_args, get_origin

import msgspec

from eventbus.batching import BatchSpec
from eventbus.imports import LoadError, load_object, optional_dependency
from eventbus.observers import Observer
from eventbus.pipeline import Pipeline
from eventbus.prompts import JsonlPrompts
from eventbus.stage import DeclaredStage, OnError

__all__ = [
    "STAGE_KEYS",
    "ConfigError",
    "Reach",
    "RunPlan",
    "build",
    "build_stage",
    "load_config",
    "load_plan",
    "override",
    "parse",
    "parse_value",
]

LARGEST_FILE: Final = 1 << 20
"""Bytes of a configuration."""
DEEPEST_KEY: Final = 64
"""Parts of a dotted key: what they cost grows with their square."""

_DEEP_KEY: Final = re.compile(
    r"(?<![\w-])(?>(?>[\w-]+|\"[^\"\n]*\"|'[^'\n]*')[ \t]*\.[ \t]*){%d}" % DEEPEST_KEY  # noqa: UP031
)
_SECTIONS: Final = ("prompts", "engine", "batch", "stages", "trainer", "log", "run", "report")
_WRAPPERS: Final = ("in_thread", "timeout", "retry", "limit")
_CAUSED_BY_VALUES: Final = (TypeError, ValueError, ImportError, OSError)
_NOT_SHARED: Final = object()
_ANY_NAME: Final = inspect.Parameter.VAR_KEYWORD


class ConfigError(ValueError):
    """A mistake in a file or in `--set`; its text is one line for the user."""


class RunPlan(msgspec.Struct, frozen=True):
    """All that a run needs, built and not started."""

    pipeline: Pipeline
    trainer: Any
    """Has `async def train(batch) -> TrainResult`; None without a section [trainer]."""
    rollouts: int | None
    """None for as long as there are prompts."""
    ahead: int
    backend: Literal["asyncio", "trio"]
    plot: Path
    """Where the plot of the rewards goes."""


class _Run(msgspec.Struct, frozen=True):
    """The section [run]."""

    rollouts: Annotated[int, msgspec.Meta(ge=1)] | None = None
    ahead: Annotated[int, msgspec.Meta(ge=0)] = 0
    backend: Literal["asyncio", "trio"] = "asyncio"
    stall_after: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """Seconds of silence after which the watchdog says what is waited for."""


class _Report(msgspec.Struct, frozen=True):
    """The section [report]."""

    plot: Path = Path("reward.png")


class _Policy(msgspec.Struct, frozen=True):
    """The keys of a stage that change nothing of how it is called."""

    name: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    external: bool | None = None
    on_error: OnError | None = None


STAGE_KEYS: Final = (*_Policy.__struct_fields__, *_WRAPPERS)
"""Keys in the table of a stage that are no arguments."""


def load_plan(path: Path, overrides: Iterable[str] = (), observers: Sequence[Observer] = ()) -> RunPlan:
    """Read a file, change it by `--set` arguments and build what it says. The file's folder is put on `sys.path`.

    :raises ConfigError: the file or an override has a mistake.
    :raises Exception: whatever a module raises while it is imported.
    """
    config = load_config(path, overrides)
    base = path.absolute().parent
    if str(base) not in sys.path:
        sys.path.insert(0, str(base))
    try:
        return build(config, base, observers)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error.__cause__


def load_config(path: Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Read a TOML file and change it by `--set` arguments: "batch.groups=16", "stages.judge.timeout=3".

    :raises ConfigError: the file cannot be read, is no TOML, or an override leads nowhere.
    """
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise ConfigError(f"{path}: is larger than {LARGEST_FILE >> 10} KiB, too much for a configuration")
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: is not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        config = parse(text)
    except ValueError as error:
        raise ConfigError(f"{path}:{_located(str(error), text)}") from None
    for each in overrides:
        override(config, each)
    return config


def build(config: Mapping[str, Any], base: Path, observers: Sequence[Observer] = ()) -> RunPlan:
    """Build the pipeline and the trainer of a configuration.

    :param base: the folder at which relative paths start.
    :raises ConfigError: the configuration has a mistake; begins with the path of the key.
    :raises Exception: whatever a module raises while it is imported.
    """
    _check_keys("", config, _SECTIONS)
    builder = _Builder(base)
    if "engine" in config:
        builder.engine = builder.used(_table(config, "engine"), "engine")
    prompts = builder.prompts(_table(config, "prompts"))
    batch = builder.called(BatchSpec, _table(config, "batch"), "batch")
    stages = builder.stages(config.get("stages", []))
    trainer = builder.trainer(_table(config, "trainer")) if "trainer" in config else None
    recorders = [builder.recorder(_table(config, "log"), config)] if "log" in config else []
    run = builder.called(_Run, _table(config, "run"), "run")
    report = builder.called(_Report, _table(config, "report"), "report")
    if run.backend == "trio":
        with _at("run.backend", LoadError), optional_dependency():
            import trio  # noqa: F401
    try:
        pipeline = Pipeline(prompts, stages, batch, observers=[*recorders, *observers], stall_after=run.stall_after)
    except (TypeError, ValueError) as error:
        raise ConfigError(_one_line(error)) from error
    return RunPlan(pipeline, trainer, run.rollouts, run.ahead, run.backend, base / report.plot)


class Reach(Protocol):
    """How far a table reaches that somebody else has written."""

    def load(self, path: str) -> Any:
        """As `load_object`. :raises LoadError: also where the name may not lead."""

    def refused_path(self, path: Path) -> str | None:
        """Why a path is not to be given to anything."""


def build_stage(table: Mapping[str, Any], path: str, base: Path, engine: Any, reach: Reach | None = None) -> Any:
    """Build what one table [[stages]] says.

    :param path: that of the table, for the errors: "stages[2]".
    :param base: the folder at which relative paths start.
    :param engine: what parameters named `engine` get.
    :param reach: what the table may name; without it anything.
    :raises ConfigError: the table has a mistake.
    :raises Exception: whatever a module raises while it is imported.
    """
    builder = _Builder(base, reach)
    builder.engine = engine
    return builder.stage(table, path)


class _Builder:
    """Turns tables into objects; `path` is always that of the table, for the errors."""

    def __init__(self, base: Path, reach: Reach | None = None) -> None:
        self.base = base
        self.reach = reach
        self.engine: Any = _NOT_SHARED

    def prompts(self, table: Mapping[str, Any]) -> Any:
        if "use" in table:
            return self.used(table, "prompts")
        if "path" not in table:
            raise ConfigError("prompts.path: missing; name a JSONL file, or a source of your own by use")
        return self.called(JsonlPrompts, table, "prompts")

    def trainer(self, table: Mapping[str, Any]) -> Any:
        trainer = self.used(table, "trainer")
        if not callable(getattr(trainer, "train", None)):
            raise ConfigError(f"trainer: {getattr(trainer, '__name__', type(trainer).__name__)} has no train(batch)")
        return trainer

    def recorder(self, table: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
        """The log keeps the configuration as it is run, `--set` included."""
        import tomli_w

        if "config" in table:
            raise ConfigError("log.config: unknown key; the configuration is kept in the log by itself")
        return self.called(load_object("middleware:Recorder"), {**table, "config": tomli_w.dumps(config)}, "log")

    def stages(self, tables: Any) -> list[Any]:
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise ConfigError("stages: expected tables [[stages]]")
        if not tables:
            raise ConfigError("stages: missing; add at least one [[stages]]")
        return [self.stage(table, f"stages[{position}]") for position, table in enumerate(tables)]

    def stage(self, table: Mapping[str, Any], path: str) -> Any:
        options = {key: value for key, value in table.items() if key not in STAGE_KEYS}
        stage = self.used(options, path, STAGE_KEYS)
        if declared := {key: table[key] for key in _Policy.__struct_fields__ if key in table}:
            policy = self.called(_Policy, declared, path)
            with _at(path):
                stage = DeclaredStage(stage, **msgspec.structs.asdict(policy))
        for key in _WRAPPERS:
            if key in table:
                stage = self.wrapped(key, stage, table[key], f"{path}.{key}")
        return stage

    def wrapped(self, key: str, stage: Any, value: Any, path: str) -> Any:
        wrapper = load_object(f"middleware:{key}")
        options = _parameters(wrapper)
        options.pop(next(iter(options)))  # the stage
        if key == "in_thread":
            if not self.checked(value, bool, path):
                return stage
            arguments = {}
        elif isinstance(value, dict):
            arguments = self.arguments(wrapper, options, value, path)
        else:
            name, (_, annotation) = next(iter(options.items()))
            arguments = {name: self.checked(value, annotation, path)}
        with _at(path):
            return wrapper(stage, **arguments)

    # Tables with `use`

    def used(self, table: Mapping[str, Any], path: str, also: Iterable[str] = (), annotation: Any = Any) -> Any:
        """What `use` names: called with the other keys if it is a class, with them bound if it is a function.

        :param also: keys that are fine, for the errors.
        :param annotation: of the parameter that it is for.
        """
        if "use" not in table:
            raise ConfigError(f"{path}.use: missing; name a class or function, as in use = 'package.module:name'")
        name = self.checked(table["use"], str, f"{path}.use")
        with _at(f"{path}.use", LoadError):
            target = load_object(name) if self.reach is None else self.reach.load(name)
        arguments = {key: value for key, value in table.items() if key != "use"}
        if inspect.isclass(target) and not (_takes_class(annotation) and not arguments):
            return self.called(target, arguments, path, also)
        if inspect.isroutine(target) and arguments:
            return self.bound(target, arguments, path, also)
        for key in arguments:
            raise ConfigError(
                f"{path}.{key}: unknown key{_did_you_mean(key, also)}; {name} is no class and no function, so it takes "
                "no arguments"
            )
        return target

    def bound(self, function: Callable[..., Any], given: Mapping[str, Any], path: str, also: Iterable[str]) -> Any:
        """The function with these keys filled in. What it is called with is not among them: the first parameter."""
        with _at(path):
            parameters = _parameters(function)
            first = next(iter(inspect.signature(function).parameters), None)
        free = {
            name: parameter
            for name, parameter in parameters.items()
            if name != first or parameter[0].kind in (parameter[0].KEYWORD_ONLY, parameter[0].VAR_KEYWORD)
        }
        return partial(function, **self.converted(free, given, path, also))

    def called(self, target: Callable[..., Any], given: Mapping[str, Any], path: str, also: Iterable[str] = ()) -> Any:
        with _at(path):
            parameters = _parameters(target)
            for name, parameter in inspect.signature(target).parameters.items():
                if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
                    raise ConfigError(
                        f"{path}.{name}: {target.__name__} takes {name} by position only, which a file cannot give"
                    )
        arguments = self.arguments(target, parameters, given, path, also)
        with _at(path):
            return target(**arguments)

    def arguments(
        self,
        target: Callable[..., Any],
        parameters: Mapping[str, tuple[inspect.Parameter, Any]],
        given: Mapping[str, Any],
        path: str,
        also: Iterable[str] = (),
    ) -> dict[str, Any]:
        """The keyword arguments, checked and built, with the shared engine; none may be missing."""
        arguments = self.converted(parameters, given, path, also)
        for name, (parameter, _) in parameters.items():
            if name in arguments or parameter.kind is parameter.VAR_KEYWORD:
                continue
            if name == "engine" and self.engine is not _NOT_SHARED:
                arguments[name] = self.engine
            elif parameter.default is parameter.empty:
                advice = "; add a section [engine]" if name == "engine" else ""
                if name in also:
                    advice = f"; on a stage the key {name} wraps it, so rename the parameter"
                raise ConfigError(f"{path}.{name}: missing; {target.__name__} needs it{advice}")
        return arguments

    def converted(
        self,
        parameters: Mapping[str, tuple[inspect.Parameter, Any]],
        given: Mapping[str, Any],
        path: str,
        also: Iterable[str],
    ) -> dict[str, Any]:
        """What is given, checked against the parameters and built."""
        named = {name: kind for name, (parameter, kind) in parameters.items() if parameter.kind is not _ANY_NAME}
        others = [kind for parameter, kind in parameters.values() if parameter.kind is _ANY_NAME]
        if not others:
            _check_keys(path, given, list(named), also)
        arguments = {}
        for key, value in given.items():
            annotation = named[key] if key in named else others[0]
            built = self.built(value, f"{path}.{key}", annotation)
            if not _is_used(value) or _is_plain(annotation):
                built = self.checked(built, annotation, f"{path}.{key}")
            arguments[key] = built
        return arguments

    def built(self, value: Any, path: str, annotation: Any = Any) -> Any:
        """A value with everything in it that `use` names."""
        if _is_used(value):
            return self.used(value, path, annotation=annotation)
        if isinstance(value, dict):
            return {key: self.built(item, f"{path}.{key}") for key, item in value.items()}
        if isinstance(value, list):
            return [self.built(item, f"{path}[{position}]", annotation) for position, item in enumerate(value)]
        return value

    def checked(self, value: Any, annotation: Any, path: str) -> Any:
        if isinstance(value, str) and _is_path(annotation):
            if "\0" in value:
                raise ConfigError(f"{path}: a path cannot hold a null character")
            place = self.base / Path(value).expanduser()
            if self.reach is not None and (why := self.reach.refused_path(place)):
                raise ConfigError(f"{path}: {why}")
            return place
        try:
            return msgspec.convert(value, annotation)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{_retold(error, path)}{_choices(annotation)}") from None
        except TypeError:  # an annotation beyond msgspec: who takes the value has to check it
            if (
                not isinstance(value, str)
                and _is_path(annotation)
                and isinstance(value, bool | int | float | list | dict)
            ):
                raise ConfigError(f"{path}: expected a path as a string, got {type(value).__name__}") from None
            if isinstance(value, list) and any(get_origin(member) is tuple for member in _members(annotation)):
                return tuple(value)
            return value


# What the code says of itself


def _parameters(target: Callable[..., Any]) -> dict[str, tuple[inspect.Parameter, Any]]:
    """The parameters that can be given by name, each with its annotation; Any where that cannot be told.

    :raises ValueError: it has no readable signature.
    """
    own = target.__init__ if inspect.isclass(target) else target
    names = getattr(own, "__globals__", None) or vars(sys.modules.get(target.__module__, builtins))
    return {
        name: (parameter, _annotation(parameter, names))
        for name, parameter in inspect.signature(target).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY)
    }


def _annotation(parameter: inspect.Parameter, names: dict[str, Any]) -> Any:
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, names)
    except Exception:  # a name that is imported for type checkers only
        return Any


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_path(annotation: Any) -> bool:
    kinds = [get_origin(member) or member for member in _members(annotation)]
    return any(kind is PathLike or (inspect.isclass(kind) and issubclass(kind, PurePath)) for kind in kinds)


def _is_plain(annotation: Any) -> bool:
    """Whether only values that TOML can write fit."""
    kinds = [member.__origin__ if get_origin(member) is Annotated else member for member in _members(annotation)]
    return all(kind in (bool, int, float, str, NoneType) or get_origin(kind) is Literal for kind in kinds)


def _takes_class(annotation: Any) -> bool:
    """Whether it holds `type[...]`, also in a tuple or list: then a class is a value."""
    return annotation is type or get_origin(annotation) is type or any(map(_takes_class, get_args(annotation)))


def _is_used(value: Any) -> bool:
    return isinstance(value, dict) and "use" in value


# Errors


@contextmanager
def _at(path: str, *kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds, told with the path of the key; without kinds, those that a wrong value causes."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ConfigError):
            raise
        if not isinstance(error, kinds or _CAUSED_BY_VALUES):
            error.add_note(f"while building {path}")
            raise
        raise ConfigError(f"{path}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _check_keys(path: str, given: Iterable[str], known: Sequence[str], also: Iterable[str] = ()) -> None:
    for key in given:
        if key not in known:
            near = _did_you_mean(key, [*known, *also]) or f"; the keys are {', '.join(known) or 'none'}"
            raise ConfigError(f"{_joined(path, key)}: unknown key{near}")


def _table(config: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    table = config.get(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{section}: expected a table [{section}], got {_kind(table)}")
    return table


def _retold(error: msgspec.ValidationError, path: str) -> str:
    """msgspec's "Expected `int`, got `str` - at `$[1]`" with our path in front."""
    what, _, where = str(error).partition(" - at `$")
    what = what.replace("`", "").replace(" | null", "")  # TOML has no null
    return f"{path}{where.rstrip('`')}: {what[0].lower()}{what[1:]}"


def _choices(annotation: Any) -> str:
    """For a Literal, what msgspec leaves out."""
    choices = [value for member in _members(annotation) if get_origin(member) is Literal for value in get_args(member)]
    return f"; choose {' or '.join(map(repr, choices))}" if choices else ""


def _located(error: str, text: str) -> str:
    """tomllib's "Invalid value (at line 3, column 5)" as "3:5: invalid value"."""
    what, _, where = error.partition(" (at ")
    what = re.sub(r"\('(.+)',?\)", lambda found: f"[{found[1].replace(chr(39) + ', ' + chr(39), '.')}]", what)
    if found := re.search(r"line (\d+), column (\d+)", where):
        line, column = found.groups()
    else:
        last = text.splitlines() or [""]
        line, column = str(len(last)), str(len(last[-1]) + 1)
    return f"{line}:{column}: {what[:1].lower()}{what[1:]}"


def _kind(value: Any) -> str:
    return "tables" if isinstance(value, list) else type(value).__name__


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _did_you_mean(name: str, there: Iterable[str]) -> str:
    near = get_close_matches(name, list(there), n=1)
    return f"; did you mean {near[0]}?" if near else ""


# --set


def parse(text: str) -> dict[str, Any]:
    """The tables of a TOML text.

    :raises ValueError: it is no TOML, larger than `LARGEST_FILE`, or nested too deeply.
    """
    if len(text) > LARGEST_FILE:
        raise ValueError(f"Larger than {LARGEST_FILE >> 10} KiB")
    if deep := _DEEP_KEY.search(text):
        line = text.count("\n", 0, deep.start()) + 1
        raise ValueError(f"A key of more than {DEEPEST_KEY} parts (at line {line}, column 1)")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("Nested too deeply") from None


def override(config: dict[str, Any], setting: str) -> None:
    """Change a configuration by one `--set` argument: "batch.groups=16", "stages.judge.timeout=3".

    :raises ConfigError: it is none, or leads nowhere.
    """
    path, equals, text = setting.partition("=")
    steps = _steps(path.strip())
    if not (equals and steps):
        raise ConfigError(f"--set {setting}: write section.key=value, such as batch.groups=16")
    *outer, last = steps
    place: Any = config
    walked = ""
    try:
        for step in outer:
            key = _key(place, step, walked)
            if isinstance(place, dict):
                place.setdefault(key, {})
            place = place[key]
            walked = f"{walked}[{key}]" if isinstance(key, int) else _joined(walked, key)
        place[_key(place, last, walked)] = parse_value(text.strip())
    except ConfigError as error:
        raise ConfigError(f"--set {setting}: {error}") from None


def _steps(path: str) -> list[str | int]:
    """`stages[2].timeout` as ["stages", 2, "timeout"]; empty when it is no path."""
    if not re.fullmatch(r"[\w-]+(\[\d+\])*(\.[\w-]+(\[\d+\])*)*", path):
        return []
    return [int(number) if number else name for number, name in re.findall(r"\[(\d+)\]|([\w-]+)", path)]


def _key(place: Any, step: str | int, walked: str) -> str | int:
    """`step` as a key of `place`: the position of the stage that it names."""
    if isinstance(place, list):
        return _position(place, step, walked)
    if isinstance(place, dict) and isinstance(step, str):
        return step
    raise ConfigError(f"{walked} is {_kind(place)}, there is no {step!r} in it")


def _position(entries: list[Any], step: str | int, walked: str) -> int:
    """An entry of a list by number, or by its name: `name`, else the last part of `use`."""
    if isinstance(step, int):
        if step >= len(entries):
            raise ConfigError(f"{walked} has no [{step}], only {len(entries)} counted from 0")
        return step
    names = [_name(entry) for entry in entries]
    if step not in names:
        if step.isdigit() and int(step) < len(entries):
            raise ConfigError(f"{walked}: none is called {step}; did you mean {walked}[{step}]?")
        near = _did_you_mean(step, names) or f"; there are {', '.join(names)}"
        raise ConfigError(f"{walked}: none is called {step}{near}")
    if names.count(step) > 1:
        raise ConfigError(
            f"{walked}: several are called {step}; say which by its number, {walked}[{names.index(step)}]"
        )
    return names.index(step)


def _name(entry: Any) -> str:
    if not isinstance(entry, dict):
        return ""
    return str(entry.get("name") or re.split(r"[.:]", str(entry.get("use", "")))[-1])


def parse_value(text: str) -> Any:
    """A TOML value, else the text itself."""
    try:
        parsed = parse(f"value = {text}")
    except ValueError:
        return text
    return parsed["value"] if len(parsed) == 1 else text
