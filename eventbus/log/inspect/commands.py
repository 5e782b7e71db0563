"""The command `rolloutbus log`.

Exit codes: 0; 1 when `check` found violations or damage, or `diff` a difference; 2 when the command line has a mistake,
or a file cannot be read or written (one line says why).
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter, Token
from rich.console import Console
from rich.text import Text

from eventbus.events import EVENT_KINDS, Event
from eventbus.imports import LoadError, load_object
from eventbus.log import LogError, LogReader, LogWriter, recover
from eventbus.log.inspect import check, diff, slime, waste, why
from eventbus.log.inspect.export import json_value, write_jsonl, write_trace
from eventbus.log.inspect.show import diff_lines, event_line, sample_lines, waste_lines, why_lines
from eventbus.wire import SCHEMA_VERSION, WireError

__all__ = ["app"]

app = App(
    name="log",
    help="""What happened in a recorded run.

    Start with

        rolloutbus log info run.mcap

        rolloutbus log why run.mcap sample:1234""",
)

Flag = Parameter(negative=())


def _count(_: Any, tokens: Sequence[Token]) -> int:
    """A number of things; cyclopts itself cuts 2.5 to 2."""
    text = tokens[0].value
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{text!r} is no whole number")
    return min(int(text), sys.maxsize)


def _seconds(_: Any, tokens: Sequence[Token]) -> float:
    text = tokens[0].value
    if not math.isfinite(seconds := float(text)):
        raise ValueError(f"{text!r} is no number of seconds")
    return seconds


Seconds = Annotated[float | None, Parameter(converter=_seconds)]


@app.command
def info(path: Path, /, *, as_json: Annotated[bool, Parameter(name="--json", negative=())] = False) -> None:
    """What a log holds: who wrote it, its stages, its rollouts, and what is damaged.

    Example:

        rolloutbus log info run.mcap

    :param path: the log.
    :param as_json: for machines.
    """
    with _mistakes(), _open(path) as log:
        rounds = log.rounds
        if as_json:
            _print_json(
                {
                    "path": str(path),
                    "bytes": log.size,
                    "finished": log.finished,
                    "header": json_value(log.header),
                    "rounds": json_value(rounds),
                    "damage": json_value(log.damage),
                }
            )
            return
        header = log.header
        lines = [
            f"{path}: {log.size / 1e6:,.1f} MB, payload {header.payload}, "
            + ("finished" if log.finished else "not finished")
        ]
        if header.started_ns:
            began = datetime.fromtimestamp(header.started_ns / 1e9).astimezone().isoformat(" ", "seconds")
            lines.append(f"written by {header.library} (schema {header.schema_version}), begun {began}")
            lines.append("with " + ", ".join(f"{name} {version}" for name, version in header.versions.items()))
        if header.schema_version > SCHEMA_VERSION:
            lines.append(f"  a newer rolloutbus wrote it: what schema {SCHEMA_VERSION} does not know is passed over")
        if header.command:
            lines.append("by " + " ".join(header.command))
        if header.stages:
            lines.append("stages")
        for stage in header.stages:
            external = ", external" if stage.external else ""
            lines.append(f"  {stage.level:<6} {stage.name}{external}" + (f"  ({stage.path})" if stage.path else ""))
        lines.append(f"{len(rounds)} rollouts and evaluations" if len(rounds) != 1 else "1 rollout")
        for part in rounds[:50]:
            seconds = (part.last_ns - part.first_ns) / 1e9
            state = "" if part.finished else ", not finished"
            lines.append(f"  {part!s:<16} seq {part.first_seq} to {part.last_seq}, {seconds:.2f} s{state}")
        if len(rounds) > 50:
            lines.append(f"  ... and {len(rounds) - 50} more (--json has all)")
        _print(map(Text, lines))


@app.command
def cat(
    path: Path,
    /,
    *,
    kind: Annotated[list[str] | None, Parameter(negative=())] = None,
    rollout: int | None = None,
    evaluation: bool | None = None,
    group: int | None = None,
    sample: int | None = None,
    execution: int | None = None,
    since: Seconds = None,
    until: Seconds = None,
    limit: Annotated[int | None, Parameter(converter=_count)] = None,
    follow: Annotated[bool, Flag] = False,
    samples: Annotated[bool, Flag] = False,
    tokenizer: str | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """The events, a line each.

    Examples:

        rolloutbus log cat run.mcap --rollout 137 --kind group_judged

        rolloutbus log cat run.mcap --sample 1234 --tokenizer Qwen3-0.6B/tokenizer.json

        rolloutbus log cat run.mcap --follow --json | jq .kind

    :param path: the log.
    :param kind: only events of this kind, such as stage_failed. Can be given several times.
    :param rollout: only events of this rollout, and of the evaluation of this number.
    :param evaluation: only evaluations; --no-evaluation: only training.
    :param group: only events of this group, by its index.
    :param sample: only events of this sample, by its index.
    :param execution: only events of this execution, Sample.rollout_id.
    :param since: seconds from the beginning of the log.
    :param until: seconds from the beginning of the log.
    :param limit: events at most.
    :param follow: go on while the log is being written.
    :param samples: also show the prompt and response of samples that an event shows.
    :param tokenizer: show samples from their recorded tokens: a tokenizer.json, the folder of one, or module:object
        with a method decode(ids).
    :param as_json: one JSON object per line; with --samples the token columns are in it.
    """
    with _mistakes(), _open(path) as log:
        _known(log, rollout)
        kinds = None if kind is None else _kinds(kind)
        text_of = None if tokenizer is None else _tokenizer(tokenizer)
        zero = min((part.first_ns for part in log.rounds), default=log.header.started_ns)
        if follow:
            if any(option is not None for option in (rollout, evaluation, group, sample, execution, since, until)):
                raise ValueError("--follow goes with --kind, --limit and --json only: filter its output")
            events: Iterator[Event] = log.follow(kinds)
        else:
            events = log.events(
                kinds,
                rollout=rollout,
                evaluation=evaluation,
                group=group,
                execution=execution,
                index=sample,
                since_ns=None if since is None else zero + int(since * 1e9),
                until_ns=None if until is None else zero + int(until * 1e9),
            )
        shown = samples or tokenizer is not None
        events = islice(events, limit)
        if as_json:
            for event in events:
                write_jsonl([event], sys.stdout, samples=log.samples if shown else None)
                if follow:
                    sys.stdout.flush()
            return

        def lines() -> Iterator[Text]:
            for event in events:
                yield event_line(event, zero)
                if shown and getattr(event, "samples", None):
                    yield from sample_lines(log.samples(event), text_of)
                if follow:
                    sys.stdout.flush()

        _print(lines())


@app.command(name="check")
def check_(
    path: Path,
    /,
    *,
    light: Annotated[bool, Flag] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Whether the log keeps every rule of a stream: numbers, ledger, order, batches, summaries.

    Lists each violation. A log that is not finished is not blamed for what had not happened yet. Exit code 1 where
    there is a violation or damage.

    Example:

        rolloutbus log check run.mcap

    :param path: the log.
    :param light: do not read token columns: digests of batches are not computed again.
    :param as_json: for machines.
    """
    with _mistakes(), _open(path, tell_damage=False) as log:
        batch_stages = any(stage.level == "batch" for stage in log.header.stages)
        columns = None if light or log.header.payload == "none" else log.samples
        report = check(log.events(), samples=columns, batch_stages=batch_stages)
        damage = log.damage
        if as_json:
            _print_json({**json_value(report), "ok": report.ok and not damage, "damage": json_value(damage)})
        else:
            lines = [Text(str(violation), style="red") for violation in report.violations]
            lines += [Text(str(part), style="red") for part in damage]
            if any(violation.after_gap for violation in report.violations):
                lines.append(Text("what comes after missing events may be no more than a consequence of that"))
            lines += [Text(f"not finished: {line}") for line in report.unfinished]
            lines += [
                Text(f"passed over: {count} events of the newer kind {kind}") for kind, count in report.unknown.items()
            ]
            found = len(report.violations)
            verdict = f"{found} violation{'' if found == 1 else 's'}" if found else "no violations"
            verdict += f", {len(damage)} damaged place{'' if len(damage) == 1 else 's'}" if damage else ""
            lines.append(
                Text(
                    f"{verdict} in {report.events:,} events of {report.groups:,} groups, {report.rollouts} rollouts "
                    f"finished; digests: {report.digests} verified, {report.unverified} not",
                    style="bold",
                )
            )
            _print(lines)
        if damage or not report.ok:
            sys.exit(1)


@app.command(name="why")
def why_(
    path: Path,
    target: str,
    /,
    *,
    rollout: int | None = None,
    evaluation: Annotated[bool, Flag] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Why a sample or a group ended where it did: its whole lineage.

    Examples:

        rolloutbus log why run.mcap sample:1234

        rolloutbus log why run.mcap group:17 --rollout 137

    :param path: the log.
    :param target: sample:INDEX or group:INDEX.
    :param rollout: only what happened in this rollout; by default all that the group went through.
    :param evaluation: a group of an evaluation, where training has one of the same number.
    :param as_json: for machines.
    """
    with _mistakes(), _open(path) as log:
        _known(log, rollout)
        lineage = why(log, target, rollout=rollout, evaluation=evaluation)
        if as_json:
            _print_json(json_value(lineage))
        else:
            _print(why_lines(lineage))


@app.command(name="waste")
def waste_(
    path: Path,
    /,
    *,
    top: Annotated[int, Parameter(converter=_count)] = 10,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Tokens and seconds that no batch has: per cause, stage and prompt.

    Example:

        rolloutbus log waste run.mcap --top 20

    :param path: the log.
    :param top: prompts to show.
    :param as_json: for machines.
    """
    with _mistakes(), _open(path) as log:
        report = waste(log.events(), top=top)
        if as_json:
            _print_json(json_value(report))
        else:
            _print(waste_lines(report))


@app.command(name="diff")
def diff_(
    a: Path,
    b: Path,
    /,
    *,
    limit: Annotated[int, Parameter(converter=_count)] = 10,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Where two logs part, and what each rollout kept, why, and for what rewards. Times do not count.

    Exit code 1 where they differ.

    Example:

        rolloutbus log diff monday.mcap tuesday.mcap

    :param a: one log.
    :param b: the other.
    :param limit: groups to show per rollout and kind of difference.
    :param as_json: for machines.
    """
    with _mistakes(), _open(a) as first, _open(b) as second:
        report = diff(_Events(first), _Events(second))
        if as_json:
            _print_json(json_value(report))
        else:
            _print(diff_lines(report, limit))
        if not report.same:
            sys.exit(1)


@app.command
def export(
    path: Path,
    target: Annotated[Path, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    format: Literal["jsonl", "trace", "slime"] | None = None,
    rollout: int | None = None,
    columns: Annotated[bool, Flag] = False,
) -> None:
    """The log in another format.

    jsonl: one JSON object per event. trace: for https://ui.perfetto.dev or chrome://tracing, a lane per worker and
    arrows along each sample. slime: a folder of the files that slime's --load-debug-rollout-data reads, kept samples
    only (needs torch).

    Examples:

        rolloutbus log export run.mcap run.jsonl --columns

        rolloutbus log export run.mcap trace.json --rollout 137

        rolloutbus log export run.mcap debug --format slime

    :param path: the log.
    :param target: the file to write; - for standard output; a folder for slime.
    :param format: by default told by the name of the target: .jsonl, .json (trace), or slime.
    :param rollout: only this rollout, and the evaluation of this number.
    :param columns: jsonl: with the token columns.
    """
    with _mistakes(), _open(path) as log:
        chosen = format or {".jsonl": "jsonl", ".json": "trace"}.get(
            target.suffix, "jsonl" if str(target) == "-" else ""
        )
        if not chosen:
            raise ValueError(f"{target}: its name does not tell a format; say --format jsonl, trace or slime")
        _known(log, rollout)
        if chosen == "slime":
            _export_slime(log, target, rollout)
            return
        if os.path.exists(target):
            raise LogError(f"{target}: exists already; take another name, or remove it")
        events = log.events(rollout=rollout)
        with _target(target) as out:
            if chosen == "jsonl":
                write_jsonl(events, out, samples=log.samples if columns else None)
            else:
                write_trace(events, out)


def _export_slime(log: LogReader, folder: Path, rollout: int | None) -> None:
    if log.header.payload == "none":
        raise LogError(f"{log.path}: was recorded with payload 'none': it has no tokens to export")
    folder.mkdir(parents=True, exist_ok=True)
    # As with slime, the last of several rounds with one number is the one that stays.
    parts = {
        folder / slime.file_name(part.rollout_id, part.evaluation): part
        for part in log.rounds
        if rollout in (None, part.rollout_id)
    }
    for path in parts:
        if path.exists():
            raise LogError(f"{path}: exists already; take another folder, or remove it")
    for path, part in parts.items():
        groups = log.rollout(part).groups()
        kept = sorted((group for group in groups if group.outcome == "kept"), key=lambda group: group.index)
        with _removed_on_error(path):
            count = slime.save_record(path, part.rollout_id, kept)
        _print([Text(f"{path}: {count} samples")])


@app.command(name="import")
def import_(*paths: Path) -> None:
    """A log out of the files that slime writes with --save-debug-rollout-data. Needs torch; nothing in them is run.

    Example:

        rolloutbus log import debug/0.pt debug/1.pt debug/eval_1.pt run.mcap

    :param paths: the files, in the order in which they happened, and last the log to write.
    """
    with _mistakes():
        if len(paths) < 2:
            raise ValueError("give the files to import, and last the log to write: import debug/0.pt run.mcap")
        *sources, target = paths
        records = ((slime.load_record(source), source.stat().st_mtime_ns) for source in sources)
        count = 0
        writer = LogWriter(target, stages=slime.STAGES)
        with _removed_on_error(target), writer as log:
            for shown in slime.events_of(records):
                log.write(shown.event, shown.samples)
                count += 1
        _print([Text(f"{target}: {count} events of {len(sources)} rollouts")])


@app.command(name="recover")
def recover_(source: Path, target: Path, /, *, overwrite: Annotated[bool, Flag] = False) -> None:
    """A finished log out of one that was cut off or damaged: everything that can be read of it.

    Example:

        rolloutbus log recover run.mcap recovered.mcap

    :param source: the log; it stays as it is.
    :param target: the log to write.
    :param overwrite: replace a target that is there.
    """
    with _mistakes():
        report = recover(source, target, overwrite=overwrite)
        _print([*(Text(str(part), style="yellow") for part in report.damage), Text(f"{target}: {report}")])


# Shared


class _Events:
    """The events of a log, from the first one on each time."""

    def __init__(self, log: LogReader) -> None:
        self._log = log

    def __iter__(self) -> Iterator[Event]:
        return self._log.events()


@contextmanager
def _open(path: Path, *, tell_damage: bool = True) -> Iterator[LogReader]:
    """The log, and afterwards on standard error what of it could not be read."""
    with LogReader(path) as log:
        yield log
        if tell_damage:
            for part in log.damage:
                print(f"{path}: damaged: {part}", file=sys.stderr)


@contextmanager
def _mistakes() -> Iterator[None]:
    """What the user did wrong, or a file has wrong, is one line and exit code 2."""
    if sys.stdout is None:  # closed by the shell, `>&-`
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except LookupError as error:
        _fail(str(error.args[0] if error.args else error))
    except (LogError, LoadError, WireError, ValueError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(text: str) -> None:
    print(text, file=sys.stderr)
    sys.exit(2)


def _print(lines: Iterable[Text]) -> None:
    """Colors for a terminal, which wraps long lines itself; whole plain lines for anything else."""
    console = Console(markup=False, highlight=False, emoji=False)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    for line in lines:
        if not line.plain.isprintable():  # a reason or a name may hold anything
            line.plain = "".join(character if character.isprintable() else "?" for character in line.plain)
        if console.is_terminal:
            console.print(line, soft_wrap=True)
        else:
            print(line.plain.rstrip().encode(encoding, "backslashreplace").decode(encoding))


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


@contextmanager
def _target(path: Path) -> Iterator[Any]:
    if str(path) == "-":
        yield sys.stdout
        return
    with open(path, "x", encoding="utf-8") as out, _removed_on_error(path):
        yield out


@contextmanager
def _removed_on_error(path: Path) -> Iterator[None]:
    """Half of a file would pass for a whole one."""
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _known(log: LogReader, rollout: int | None) -> None:
    """:raises LogError: the log has neither a rollout nor an evaluation of this number; names the nearest."""
    if rollout is not None and not any(part.rollout_id == rollout for part in log.rounds):
        log.rollout(rollout)


def _kinds(names: Sequence[str]) -> list[str]:
    from difflib import get_close_matches

    for name in names:
        if name not in EVENT_KINDS:
            near = get_close_matches(name, EVENT_KINDS, 1)
            advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(EVENT_KINDS)}"
            raise ValueError(f"--kind {name}: no such kind of event; {advice}")
    return list(names)


def _tokenizer(name: str) -> Callable[[Sequence[int]], str]:
    """What makes text of token ids."""
    path = Path(name)
    if path.is_dir():
        path /= "tokenizer.json"
    if path.is_file():
        try:
            from tokenizers import Tokenizer  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            raise LoadError(f"{path}: reading it needs a package: pip install tokenizers") from None
        try:
            decode = partial(Tokenizer.from_file(str(path)).decode, skip_special_tokens=False)
        except Exception as error:  # it has no other type
            raise ValueError(f"{path}: no tokenizer: {error}") from error
        return _decoded_by(decode)
    if ":" not in name:
        raise ValueError(
            f"--tokenizer {name}: no such file; give a tokenizer.json, the folder of one, or module:object"
        )
    found = load_object(name)
    function = getattr(found, "decode", found)
    if not callable(function):
        raise ValueError(f"--tokenizer {name}: a {type(found).__name__}, which has no decode(ids)")
    return _decoded_by(function)


def _decoded_by(decode: Callable[[list[int]], Any]) -> Callable[[Sequence[int]], str]:
    def text_of(ids: Sequence[int]) -> str:
        try:
            return str(decode(list(ids)))
        except Exception as error:  # tokens of another vocabulary
            return f"(not decoded: {error!r})"

    return text_of
