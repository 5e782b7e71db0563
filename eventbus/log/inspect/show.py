"""How events and findings read as lines of text. Lines are short by themselves, so that they survive any terminal or
pipe; values are cut where they are long."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from msgspec import UNSET
from rich.text import Text

from eventbus.events import (
    AttemptEnded,
    BatchAssembled,
    BatchTrained,
    ColumnMark,
    Event,
    GroupCompleted,
    GroupEnded,
    GroupJudged,
    GroupSubmitted,
    RolloutFinished,
    RolloutStarted,
    SampleGenerated,
    StageApplied,
    StageFailed,
    UnknownEvent,
    WeightsUpdated,
)
from eventbus.group import Verdict
from eventbus.log.inspect.diff import DiffReport, Divergence, RolloutDiff
from eventbus.log.inspect.export import json_value
from eventbus.log.inspect.waste import Cost, WasteReport
from eventbus.log.inspect.why import Change, Chapter, ExecutionStory, Lineage, Step
from eventbus.sample import Sample, WeightSpan

__all__ = ["diff_lines", "event_line", "sample_lines", "short", "waste_lines", "why_lines"]

_VALUE: Final = 56
"""Characters of a value in a line."""


def short(value: Any, limit: int = _VALUE) -> str:
    """A value in one line, cut at `limit` characters."""
    if value is UNSET:
        return "-"
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        value = value[: limit + 1]
    text = json.dumps(json_value(value), ensure_ascii=False)
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.2f} s" if value < 1000 else f"{value:,.0f} s"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _spans(spans: Sequence[WeightSpan]) -> str:
    return ", ".join(f"{span.version} for tokens {span.start} to {span.end}" for span in spans)


# cat


def event_line(event: Event, zero_ns: int = 0) -> Text:
    """One event: number, seconds since `zero_ns`, rollout, kind, and what it says."""
    round_ = f"{'eval' if event.evaluation else 'r'}{event.rollout_id}"
    line = Text(f"{event.seq:>7} {(event.time_ns - zero_ns) / 1e9:>10.3f} {round_:>5} ")
    line.append(f"{event.kind:<16} ", style="bold")
    line.append(_says(event), style=_style(event))
    return line


def _style(event: Any) -> str:
    if isinstance(event, StageFailed) or (isinstance(event, RolloutFinished) and event.error):
        return "red"
    if isinstance(event, StageApplied) and event.dropped is not None:
        return "yellow"
    if isinstance(event, AttemptEnded) and event.outcome != "answered":
        return "yellow"
    return ""


def _says(event: Any) -> str:
    match event:
        case RolloutStarted():
            return f"target {event.target}, groups of {event.group_size}"
        case RolloutFinished():
            said = str(event.summary) if event.summary is not None else ""
            return said + (f"; ended by {short(event.error, 200)}" if event.error else "")
        case GroupSubmitted():
            indices = " ".join(map(str, event.indices))
            return f"group {event.group_index} {event.origin}, round {event.round}, samples {indices}"
        case SampleGenerated():
            weights = f", {_spans(event.weight_versions)}" if event.weight_versions else ""
            return (
                f"group {event.group_index} sample {event.index} {event.stage}: {event.status.value}, "
                f"{_count(event.response_length, 'token')}{weights}"
            )
        case StageApplied():
            where = f"group {event.group_index}" + ("" if event.index is None else f" sample {event.index}")
            return f"{where} {event.stage} {_seconds(event.seconds)}{_extras(event)}: {_applied(event)}"
        case GroupCompleted():
            rewards = " ".join(short(execution[-1].sample.reward, 20) for execution in event.samples)
            return f"group {event.group_index}, rewards {rewards}"
        case GroupJudged():
            return f"group {event.group_index} {event.stage}: {_verdict(event.verdict, event.held)}"
        case GroupEnded():
            fallback = " by fallback" if event.by_fallback else ""
            return f"group {event.group_index} {event.outcome}{fallback}" + (
                f", {event.reason}" if event.reason else ""
            )
        case StageFailed():
            where = "" if event.group_index is None else f"group {event.group_index} "
            where += "" if event.index is None else f"sample {event.index} "
            return f"{where}{event.stage} ({event.policy}): {short(event.error, 200)}"
        case BatchAssembled():
            groups = " ".join(map(str, event.groups))
            return f"{_count(event.samples, 'sample')}, {_count(event.loss_tokens, 'loss token')}, groups {groups}"
        case BatchTrained():
            metrics = " ".join(f"{name}={value:.4g}" for name, value in event.metrics.items())
            return metrics + ("" if event.weight_version is None else f" weights {event.weight_version}")
        case WeightsUpdated():
            how = f" ({event.pause})" if event.pause else ""
            took = "" if event.seconds is None else f" in {_seconds(event.seconds)}"
            where = f", {_count(len(event.workers), 'worker')}" if event.workers else ""
            missed = f", not at {', '.join(event.missed_by)}" if event.missed_by else ""
            return f"to {event.version}{how}{took}{where}{missed}"
        case AttemptEnded():
            where = "" if event.group_index is None else f"group {event.group_index} "
            where += "" if event.index is None else f"sample {event.index} "
            said = f": {short(event.error, 200)}" if event.error else f", {_count(event.tokens, 'token')}"
            return f"{where}{event.stage}: attempt {event.attempt} at {event.worker} {event.outcome}{said}"
        case UnknownEvent():
            return "(of a newer version)"
    return ""


def _extras(event: Any) -> str:
    extras = [f"waited {_seconds(event.waited)}"] if event.waited else []
    extras += [f"{event.attempts} attempts"] if event.attempts > 1 else []
    return f" ({', '.join(extras)})" if extras else ""


def _applied(event: StageApplied) -> str:
    parts = [f"{name}={short(value, 40)}" for name, value in event.changed.items()]
    parts += [f"{name}[{mark[0]}]" if mark is not None else f"{name} gone" for name, mark in event.columns.items()]
    if event.execution is not None and event.samples and len(event.samples[0]) > 1:
        parts.append(f"{len(event.samples[0])} samples")
    if event.dropped is not None:
        parts.append(f"dropped, {event.dropped}")
    return " ".join(parts) or "nothing changed"


def _verdict(verdict: Verdict, held: bool) -> str:
    reason = f" ({verdict.reason})" if verdict.reason else ""
    text = f"kept{reason}" if verdict.kept else f"rejected{reason}"
    if verdict.by_fallback:
        text = f"rejected{reason}, kept by the fallback"
    elif held:
        text = f"rejected{reason}, held in reserve"
    if verdict.score is not None:
        text += f", score {verdict.score:.4g}"
    if verdict.remaining is not None:
        text += f", at remaining {verdict.remaining} of target {verdict.target}"
    return text


def sample_lines(
    samples: Iterable[Iterable[Sample]], text_of: Callable[[Sequence[int]], str] | None = None
) -> Iterator[Text]:
    """What an event's samples say, a few lines each.

    :param text_of: makes text of token ids; without it the recorded text is shown.
    """
    for execution in samples:
        for sample in execution:
            head = f"        sample {sample.index}, execution {sample.rollout_id}: {sample.status.value}"
            yield Text(f"{head}, {_count(sample.response_length, 'token')}, reward {short(sample.reward)}")
            prompt, response = short(sample.prompt, 400), short(sample.response, 2000)
            if text_of is not None:
                cut = sample.prompt_length
                prompt = short(text_of(sample.tokens[:cut].tolist()), 400) if cut else prompt
                response = short(text_of(sample.tokens[cut:].tolist()), 2000)
            yield Text(f"          prompt   {prompt}")
            if sample.response or sample.response_length:
                yield Text(f"          response {response}")


# why


def why_lines(lineage: Lineage) -> Iterator[Text]:
    """The whole lineage: one sample in full with its siblings in a line each, or a group with all of them in a line."""
    head = f"{'evaluation group' if lineage.evaluation else 'group'} {lineage.group_index}"
    if lineage.target.kind == "sample":
        head = f"sample {lineage.target.number}: execution {lineage.execution} of {head}"
    yield Text(head, style="bold")
    yield Text(f"  prompt  {short(lineage.prompt, 70)}")
    if lineage.label is not None:
        yield Text(f"  label   {short(lineage.label, 70)}")
    for other in lineage.others:
        yield Text(f"  not to be confused with that of {other}", style="yellow")
    for chapter in lineage.chapters:
        yield Text()
        yield from _chapter(chapter, lineage)


def _chapter(chapter: Chapter, lineage: Lineage) -> Iterator[Text]:
    kind = "evaluation" if chapter.evaluation else "rollout"
    target = "" if chapter.target is None or chapter.evaluation else f", target {chapter.target}"
    yield Text(f"{kind} {chapter.rollout_id}, round {chapter.round}: {chapter.origin}{target}", style="bold")
    yield _row(0.0, chapter.seq, "submitted", f"{_count(len(chapter.executions), 'execution')}")
    siblings = [story for story in chapter.executions if story.execution != lineage.execution]
    for story in chapter.executions:
        if story.execution == lineage.execution:
            yield from _whole(story)
    if siblings and siblings != chapter.executions:
        yield Text("  its siblings")
    for story in siblings:
        yield from _brief(story)
    if chapter.completed is not None:
        rewards = " ".join(short(story.reward, 12) for story in chapter.executions if story.samples)
        yield _row(chapter.completed, None, "completed", f"rewards {rewards}")
    for step in chapter.steps:
        yield from _step(step)
    if chapter.outcome is None:
        yield Text("            still under way where the log ends", style="yellow")
        return
    text = chapter.outcome + (" by the fallback" if chapter.by_fallback else "")
    text += f": {chapter.reason}" if chapter.reason else ""
    style = "green" if chapter.outcome == "kept" else "yellow"
    yield _row(chapter.ended or 0.0, chapter.ended_seq, "ended", text, style)
    if chapter.trained is not None:
        metrics = " ".join(f"{name}={value:.4g}" for name, value in chapter.trained.items())
        version = f", gave weights {chapter.weight_version}" if chapter.weight_version else ""
        yield Text(f"            trained on: {metrics or 'no metrics'}{version}")


def _row(at: float, seq: int | None, what: str, text: str, style: str = "") -> Text:
    where = "" if seq is None else f"  [seq {seq}]"
    line = Text(f"{at:>9.3f} s  {what:<16} ")
    line.append(text, style=style)
    return line.append(where, style="dim")


def _whole(story: ExecutionStory) -> Iterator[Text]:
    if story.had:
        yield Text(f"            begins with {_count(story.had, 'token')} of an earlier rollout")
    if not story.steps:
        yield Text("            no stage has had it yet" if not story.samples else "            went through before")
    for step in story.steps:
        yield from _step(step)


def _step(step: Step) -> Iterator[Text]:
    child = f" (child {step.index})" if step.child else ""
    match step.kind:
        case "generated":
            status = "" if step.status is None else step.status.value
            yield _row(
                step.at, step.seq, "", f"{status}, {_count(step.response_length or 0, 'token')} generated{child}"
            )
            if step.weight_versions:
                yield _detail("weights", _spans(step.weight_versions))
        case "attempted":
            style = "" if step.outcome == "answered" else "yellow"
            brought = f", {_count(step.tokens, 'token')}" if step.tokens else ""
            text = f"attempt {step.attempts} {step.outcome} after {_seconds(step.seconds or 0.0)}{brought}"
            yield _row(step.at, step.seq, step.stage, text, style)
            yield _detail("worker", step.asked or "")
            if step.error:
                yield _detail("error", short(step.error, 70), style)
        case "failed":
            again = {"resubmit": "; once more from the prompt", "raise": "; ends the rollout"}.get(
                step.policy or "", ""
            )
            yield _row(step.at, step.seq, step.stage, f"failed: {short(step.error, 70)}{again}", "red")
        case "judged":
            if step.verdict is not None:
                yield _row(step.at, step.seq, "", _verdict(step.verdict, step.held))
        case "applied":
            took = f"took {_seconds(step.seconds or 0.0)}{_extras(step)}{child}"
            took += "" if step.worker is None else f", worker {step.worker}"
            yield _row(step.at, step.seq, step.stage, took)
            generated = any(change.name == "response_length" for change in step.changes)
            for change in step.changes:
                if change.name == "weight_versions" and generated:
                    continue  # the next step says it
                yield _detail(change.name, _change(change))
            for name, (before, after) in step.columns.items():
                yield _detail(name, f"{_length(before)} -> {_length(after)}")
            if step.children:
                yield _detail("fans out", f"into {step.children} samples")
            if step.dropped is not None:
                yield _detail("dropped", step.dropped, "yellow")


def _change(change: Change) -> str:
    return f"{short(change.old, 30)} -> {short(change.new)}"


def _length(length: int) -> str:
    return "-" if length < 0 else _count(length, "value")


def _detail(name: str, text: str, style: str = "") -> Text:
    return Text(f"              {name}: ").append(text, style=style)


def _brief(story: ExecutionStory) -> Iterator[Text]:
    """One line for a sample, and one for each thing that did not go as usual."""
    generated = [step for step in story.steps if step.kind == "generated"]
    parts = []
    if story.had:
        parts.append(f"{_count(story.had, 'token')} from before")
    if generated:
        last = generated[-1]
        parts.append(f"{last.status.value if last.status else ''}, {_count(last.response_length or 0, 'token')}")
    taken: dict[str, float] = {}
    for step in story.steps:
        if step.kind == "applied":
            taken[step.stage] = taken.get(step.stage, 0.0) + (step.seconds or 0.0)
    if taken:
        slowest = max(taken, key=lambda stage: taken[stage])
        parts.append(f"slowest {slowest} {_seconds(taken[slowest])}")
    if story.samples > 1:
        parts.append(f"{story.samples} samples")
    if story.samples:
        parts.append(f"reward {short(story.reward, 24)}")
    line = Text(f"    sample {story.index}, execution {story.execution}: {'; '.join(parts) or 'nothing yet'}")
    yield line
    for step in story.steps:
        unusual = step.outcome != "answered" if step.kind == "attempted" else step.attempts > 1
        if step.kind == "failed" or step.dropped is not None or unusual:
            yield from _step(step)


# waste


def waste_lines(report: WasteReport) -> Iterator[Text]:
    """Tables: by cause, by stage, by prompt, and attempts by the worker that was asked."""
    total = report.used.tokens + report.tokens_lost + report.open.tokens
    yield Text(f"{'cause':<44}{'tokens':>14}{'share':>8}{'seconds':>12}", style="bold")
    rows: list[tuple[str, Cost]] = [("used in batches", report.used)]
    if report.fallback.groups:
        rows.append(("  of these by fallback", report.fallback))
    rows += [(f"lost, {cause}", cost) for cause, cost in report.lost.items()]
    rows += [("lost in all", Cost(report.tokens_lost, report.seconds_lost))] if len(report.lost) > 1 else []
    rows += [("not decided where the log ends", report.open)] if report.open.groups else []
    rows += [("evaluation, not in the shares", report.evaluation)] if report.evaluation.groups else []
    for name, cost in rows:
        share = "" if name.startswith("evaluation") else f"{cost.tokens / total:.1%}" if total else "-"
        yield Text(f"{_cut(name, 43):<44}{cost.tokens:>14,}{share:>8}{cost.seconds:>12,.2f}")
    if report.stages:
        yield Text()
        yield Text(f"{'stage':<44}{'seconds':>14}{'':>8}{'lost':>12}", style="bold")
        for stage, (seconds, lost) in report.stages.items():
            share = f"{lost / seconds:.1%}" if seconds else "-"
            yield Text(f"{_cut(stage, 43):<44}{seconds:>14,.2f}{share:>8}{lost:>12,.2f}")
    if report.prompts:
        yield Text()
        yield Text(f"{'prompts that lost most':<44}{'tokens':>14}{'':>8}{'seconds':>12}", style="bold")
        for prompt in report.prompts:
            name = f"group {prompt.group_index} {short(prompt.prompt, 28)}"
            yield Text(f"{_cut(name, 43):<44}{prompt.tokens:>14,}{'':>8}{prompt.seconds:>12,.2f}")
    if report.attempts:
        yield Text()
        yield Text(f"{'attempts that brought nothing, at':<44}{'attempts':>14}{'':>8}{'seconds':>12}", style="bold")
        for worker, (count, seconds) in report.attempts.items():
            yield Text(f"{_cut(worker, 43):<44}{count:>14,}{'':>8}{seconds:>12,.2f}")


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


# diff


def diff_lines(report: DiffReport, limit: int = 10) -> Iterator[Text]:
    """The first differences, then what each rollout did otherwise; at most `limit` groups of a kind per rollout."""
    yield Text(f"{_count(report.events[0], 'event')} in a, {report.events[1]:,} in b")
    if report.first is None:
        yield Text("no difference but in time", style="green")
        return
    yield Text("first place at which they differ", style="bold")
    yield from _divergence(report.first)
    if report.content is None:
        yield Text("the same events, in another order", style="green")
    elif _places(report.content) != _places(report.first):
        yield Text("first event that is not the same in both", style="bold")
        yield from _divergence(report.content)
    for rollout in report.rollouts:
        yield from _rollout_diff(rollout, limit)


def _places(divergence: Divergence) -> list[int | None]:
    return [None if event is None else event.seq for event in (divergence.a, divergence.b)]


def _divergence(divergence: Divergence) -> Iterator[Text]:
    for name, event in (("a", divergence.a), ("b", divergence.b)):
        yield Text(
            f"  {name} " + ("has no event there" if event is None else f"seq {event.seq} {event.kind}: {_says(event)}")
        )
    for path, (a, b) in list(divergence.fields.items())[:12]:
        yield Text(f"    {path}: {_side(a)} | {_side(b)}", style="yellow")


def _side(value: Any) -> str:
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, int) for part in value):
        mark: ColumnMark = value
        return f"{_count(mark[0], 'value')}, crc {mark[1]:08x}"
    return short(value, 40)


def _rollout_diff(rollout: RolloutDiff, limit: int) -> Iterator[Text]:
    name = f"{'evaluation' if rollout.evaluation else 'rollout'} {rollout.rollout_id}"
    if rollout.only_in:
        yield Text(f"{name} is only in {rollout.only_in}", style="bold")
        return
    yield Text(f"{name}: kept {rollout.kept[0]} in a, {rollout.kept[1]} in b", style="bold")
    for side, groups in (("a", rollout.only_a), ("b", rollout.only_b)):
        if groups:
            yield Text(f"  kept only in {side}: {_some([str(group) for group in groups], 3 * limit, ' ')}")
    yield from _limited(
        [f"  group {group}: {_end(a)} | {_end(b)}" for group, (a, b) in rollout.ends.items()], limit, "other ends"
    )
    yield from _limited(
        [f"  group {group}: rewards {_numbers(a)} | {_numbers(b)}" for group, (a, b) in rollout.rewards.items()],
        limit,
        "groups with other rewards",
    )


def _end(end: str | None) -> str:
    return "not there" if end is None else _cut(end, 60)


def _numbers(rewards: Sequence[Any]) -> str:
    return _some([short(reward, 16) for reward in rewards], 8, " ")


def _some(parts: Sequence[str], limit: int, separator: str) -> str:
    more = f"{separator}... and {len(parts) - limit} more" if len(parts) > limit else ""
    return separator.join(parts[:limit]) + more


def _limited(lines: Sequence[str], limit: int, what: str) -> Iterator[Text]:
    for line in lines[:limit]:
        yield Text(line)
    if len(lines) > limit:
        yield Text(f"  ... and {len(lines) - limit} {what} more")
