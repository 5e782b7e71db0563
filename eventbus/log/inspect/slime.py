"""The files that slime writes for debugging (`--save-debug-rollout-data`): out of a log, and into one.

Such a file has the kept samples of one rollout, flat, as `torch.save({"rollout_id": ..., "samples": [dict, ...]})`;
those of evaluations are called `eval_<id>.pt`. It is read with `weights_only=True` and an allow-list of plain arrays:
nothing in it is run. And it is refused where it would unfold to much more than it is: compressed, with tensors that
repeat their memory, or with lists that hold each other many times.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgspec

from eventbus.chain import settle
from eventbus.codecs import Opaque
from eventbus.columns import Column
from eventbus.events import (
    BatchAssembled,
    Event,
    GroupCompleted,
    GroupEnded,
    GroupSubmitted,
    RolloutFinished,
    RolloutStarted,
    SampleGenerated,
    StageApplied,
    changes,
    digest,
    light,
)
from eventbus.group import Group, Summary
from eventbus.imports import optional_dependency
from eventbus.log.format import LogError, StageNote
from eventbus.sample import Sample, SampleStatus, WeightSpan

__all__ = ["STAGES", "DebugRecord", "events_of", "file_name", "load_record", "save_record"]

STAGES = (
    StageNote("Generate", "sample", external=True),
    StageNote("recorded", "sample", external=True),
)
"""What an imported log says its pipeline was: the engine's answer, and all that came after it."""


class DebugRecord(msgspec.Struct):
    """One file."""

    rollout_id: int
    evaluation: bool
    samples: list[Sample]


VALUES_PER_BYTE: Final = 8
"""Values that a file may unfold to, for each of its bytes: what samples share is in it once."""
FREE_VALUES: Final = 1 << 20
"""Those that any file may unfold to."""
DEEPEST: Final = 100
"""How deep lists and dicts may lie in each other."""


def file_name(rollout_id: int, evaluation: bool) -> str:
    """What slime calls the file of a rollout."""
    return f"eval_{rollout_id}.pt" if evaluation else f"{rollout_id}.pt"


# Out


def save_record(path: str | Path, rollout_id: int, groups: Iterable[Group]) -> int:
    """Write the samples of these groups; how many.

    :raises LoadError: torch is not installed.
    :raises LogError: a sample holds something that has no form there, or the file cannot be written.
    """
    with optional_dependency():
        import torch
    samples = [_to_slime(sample) for group in groups for sample in group.samples]
    try:
        torch.save({"rollout_id": rollout_id, "samples": samples}, path)
    except (OSError, RuntimeError) as error:
        raise LogError(f"{path}: cannot be written: {error}") from error
    return len(samples)


def _to_slime(sample: Sample) -> dict[str, Any]:
    fields = {name: _plain(getattr(sample, name), sample, name) for name in Sample.__struct_fields__}
    fields["status"] = sample.status.value
    fields["weight_versions"] = [span.version for span in sample.weight_versions]
    fields["spec_info"] = fields["spec_info"] or {}
    fields["prefix_cache_info"] = fields["prefix_cache_info"] or {}
    return fields


def _plain(value: Any, sample: Sample, path: str) -> Any:
    if isinstance(value, Column):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item, sample, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item, sample, f"{path}[{place}]") for place, item in enumerate(value))
    if isinstance(value, Opaque):
        raise LogError(
            f"sample {sample.index}: {path} is a {value.name}, which is not known here: import the module that "
            "registers it, or export where it is"
        )
    return value


# In


def load_record(path: str | Path) -> DebugRecord:
    """Read a file, without running anything that is in it.

    :raises LoadError: torch is not installed.
    :raises LogError: it is no such file, or holds objects that are not allowed; says which.
    """
    content = load_plain(path)
    stem = Path(path).stem
    number = content.get("rollout_id")
    if not isinstance(number, int) or isinstance(number, bool):
        digits = re.search(r"\d+$", stem)
        if digits is None:
            raise LogError(f"{path}: its rollout_id is {number!r}, expected an integer")
        number = int(digits[0])
    samples = [_from_slime(fields, f"{path}: samples[{place}]") for place, fields in enumerate(content["samples"])]
    return DebugRecord(number, stem.startswith("eval_"), samples)


def load_plain(path: str | Path) -> dict[str, Any]:
    """What slime wrote, as it is: `rollout_id`, and `samples`, a list. Nothing in the file is run.

    :raises LoadError: torch is not installed.
    :raises LogError: it is no such file, or holds objects that are not allowed; says which.
    """
    with optional_dependency():
        import torch
    allow = getattr(torch.serialization, "safe_globals", None)
    try:
        _check_archive(path)
        with nullcontext() if allow is None else allow(_allowed(torch.__version__)):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # damaged archives raise all kinds
        refused = re.search(r"GLOBAL ([\w.]+)", str(error))
        if refused is not None:
            raise LogError(
                f"{path}: holds a {refused[1]}, which would have to be run to be read; only numbers, strings, lists, "
                "dicts, numpy arrays and tensors are"
            ) from error
        told = re.search(r"WeightsUnpickler error: (.+)", str(error)) or re.match(r"(.+?)(?:\.\s|\n|$)", str(error))
        reason = told[1] if told is not None else type(error).__name__
        raise LogError(f"{path}: not a file that torch.save wrote, or a damaged one: {reason}") from error
    if not isinstance(content, dict) or not isinstance(content.get("samples"), list):
        raise LogError(f"{path}: not a debug record of slime: it needs 'rollout_id' and a list of 'samples'")
    try:
        _check_size(content, max(FREE_VALUES, VALUES_PER_BYTE * os.path.getsize(path)))
    except ValueError as error:
        raise LogError(f"{path}: {error}") from error
    return content


def _check_archive(path: str | Path) -> None:
    """:raises ValueError: it is no archive as `torch.save` writes it, which compresses nothing."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except zipfile.BadZipFile as error:
        raise ValueError(f"{error}") from error
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError("it is compressed")
    if sum(record.file_size for record in records) > os.path.getsize(path):
        raise ValueError("its records are larger than the file")


def _check_size(content: Any, most: int) -> None:
    """Go over all values as those who read them will: once for each place where they are.

    :raises ValueError: there are more than `most`, or one is a tensor that says more than its memory.
    """
    values = 0
    arrays: set[int] = set()
    level: list[Any] = [content]
    for _ in range(DEEPEST):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                values += len(value)
                below += value.values()
                # Who reads these makes numbers of them each time; of other arrays there is one, wherever they are.
                values += sum(_places(value[name]) for name in _COLUMNS if name in value)
            elif isinstance(value, list | tuple | set):
                values += len(value)
                if not _ATOMS.issuperset(map(type, value)):
                    below += value
            elif id(value) not in arrays and (places := _places(value)):
                arrays.add(id(value))
                values += places
            if values > most:
                raise ValueError(f"unfolds to more than {most} values, too many for its size")
        if not below:
            return
        level = below
    raise ValueError(f"is nested more than {DEEPEST} deep")


def _places(value: Any) -> int:
    """Numbers in an array or tensor, else 0.

    :raises ValueError: it says more than its memory.
    """
    if hasattr(value, "untyped_storage"):
        if not str(value.layout).endswith("strided"):
            raise ValueError(f"holds a tensor of layout {value.layout}: only dense ones are read")
        places: int = value.numel()
        if places * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError(f"holds a tensor of shape {tuple(value.shape)} that repeats its memory")
        return places
    return value.size if hasattr(value, "dtype") else 0


_COLUMNS: Final = ("tokens", "loss_mask", "rollout_log_probs", "teacher_log_probs")
_ATOMS: Final = frozenset({str, int, float, bool, bytes, type(None)})


def _allowed(torch_version: str) -> list[Any]:
    """What numpy's arrays and numbers are made of: plain data, as torch's own tensors are."""
    try:
        import numpy as np
    except ImportError:
        return []
    core, other = ("numpy._core", "numpy.core") if hasattr(np, "_core") else ("numpy.core", "numpy._core")
    functions = (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"))
    allowed: list[Any] = [np.ndarray, np.dtype, *(type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDSUV")]
    for module, name in functions:
        function = getattr(import_module(f"{core}.{module}"), name, None)
        if function is None:
            continue
        allowed.append(function)
        if tuple(map(int, torch_version.split(".")[:2])) >= (2, 6):
            # A file that the other major version of numpy wrote calls the same function by another name.
            allowed.append((function, f"{other}.{module}.{name}"))
    return allowed


_KNOWN = frozenset(Sample.__struct_fields__)


def _from_slime(fields: Any, where: str) -> Sample:
    if not isinstance(fields, dict):
        raise LogError(f"{where}: a {type(fields).__name__}, expected the dict of a sample")
    known = {name: value for name, value in fields.items() if name in _KNOWN}
    versions = [str(version) for version in known.pop("weight_versions", None) or ()]
    try:
        known["status"] = SampleStatus(known.get("status", "completed"))
        known.update((name, known.get(name) or None) for name in ("spec_info", "prefix_cache_info"))
        sample = Sample(**known)
        metadata = dict(sample.metadata or {})
        metadata.update((key, value) for key, value in fields.items() if key not in _KNOWN and value is not None)
        sample.metadata = metadata
        settle(sample, "import")
    except (TypeError, ValueError, OverflowError) as error:
        raise LogError(f"{where}: {error}") from error
    if len(set(versions)) == 1:
        sample.weight_versions = [WeightSpan(versions[0], 0, sample.response_length)]
    elif versions:  # which tokens came from which is not said
        sample.metadata["weight_versions"] = versions
    return sample


class Shown(msgspec.Struct):
    """An event and, where it shows samples, those samples."""

    event: Event
    samples: list[list[Sample]] | None = None


def events_of(records: Iterable[tuple[DebugRecord, int]]) -> Iterator[Shown]:
    """The events of a run that gave these records: for `LogWriter.write`.

    Only what was kept is in them. The engine's answer of a sample is taken to be the sample without its reward; a stage
    called "recorded" brings the rest.

    :param records: with the time of each, in nanoseconds since the epoch.
    """
    teller = _Teller()
    for record, time_ns in records:
        yield from teller.tell(record, time_ns)


class _Teller:
    def __init__(self) -> None:
        self._seq = count()
        self._executions: set[int] = set()
        self._head: dict[str, Any] = {}

    def _event(self, kind: type[Any], shown: Sequence[Sequence[Sample]] = (), **fields: Any) -> Shown:
        if shown:
            fields["samples"] = [[light(sample) for sample in execution] for execution in shown]
        event = kind(seq=next(self._seq), **self._head, **fields)
        return Shown(event, [list(execution) for execution in shown] if shown else None)

    def tell(self, record: DebugRecord, time_ns: int) -> Iterator[Shown]:
        self._head = {"time_ns": time_ns, "rollout_id": record.rollout_id, "evaluation": record.evaluation}
        groups = self._groups(record.samples)
        size = max((len(group) for group in groups), default=1)
        target = len(groups)
        yield self._event(RolloutStarted, target=target, group_size=size, batch={"groups": target, "max_rounds": 1})
        for group in groups:
            yield from self._group(group)
        samples = [sample for group in groups for sample in group.samples]
        rewards = [reward for group in groups for reward in _rewards(group)]
        mean = sum(rewards) / len(rewards) if rewards else None
        summary = Summary(
            rollout_id=record.rollout_id,
            evaluation=record.evaluation,
            target=target,
            rounds=1,
            submitted=target,
            kept=target,
            executions=sum(map(len, groups)),
            samples=len(samples),
            loss_tokens=sum(sample.loss_tokens for sample in samples),
            reward_mean=mean,
            kept_reward_mean=mean,
        )
        if groups and not record.evaluation:
            yield self._event(
                BatchAssembled,
                groups=[group.index for group in groups],
                samples=len(samples),
                loss_tokens=summary.loss_tokens,
                digest=digest(groups),
            )
        yield self._event(RolloutFinished, summary=summary)

    def _groups(self, samples: Sequence[Sample]) -> list[Group]:
        """The samples by group and execution; where slime says nothing, each is one of its own."""
        groups: dict[int, dict[Any, list[Sample]]] = {}
        free = 1 + max((sample.group_index for sample in samples if sample.group_index is not None), default=-1)
        for place, sample in enumerate(samples):
            if sample.group_index is None:
                sample.group_index, free = free, free + 1
            if sample.index is None:
                sample.index = place
            key = (None, sample.index) if sample.rollout_id is None else sample.rollout_id
            groups.setdefault(sample.group_index, {}).setdefault(key, []).append(sample)
        found = []
        for index, executions in sorted(groups.items()):
            for key, siblings in executions.items():
                identity: int = key if isinstance(key, int) else siblings[0].index or 0
                if identity in self._executions:
                    identity = max(self._executions) + 1
                self._executions.add(identity)
                for sample in siblings:
                    sample.rollout_id = identity
            ordered = sorted(executions.values(), key=lambda siblings: siblings[0].index or 0)
            found.append(Group(index, ordered[0][0].prompt, ordered))
        return found

    def _group(self, group: Group) -> Iterator[Shown]:
        first = group.executions[0][0]
        prompt = Sample(
            group_index=group.index,
            prompt=first.prompt,
            label=first.label,
            tokens=first.tokens[: first.prompt_length],
            multimodal_inputs=first.multimodal_inputs,
        )
        yield self._event(
            GroupSubmitted,
            [[prompt]],
            group_index=group.index,
            round=1,
            origin="new",
            executions=[execution[0].rollout_id for execution in group.executions],
            indices=[execution[0].index for execution in group.executions],
        )
        for execution in group.executions:
            if len(execution) == 1:
                yield from self._sample(group.index, prompt, execution[0])
        yield self._event(GroupCompleted, group.executions, group_index=group.index)
        yield self._event(GroupEnded, group_index=group.index, outcome="kept")

    def _sample(self, group_index: int, prompt: Sample, sample: Sample) -> Iterator[Shown]:
        answer = sample.copy()
        answer.reward = None
        about = {"group_index": group_index, "index": sample.index, "execution": sample.rollout_id}
        before = prompt.copy()
        before.index, before.rollout_id = sample.index, sample.rollout_id
        for stage, old, new in (("Generate", before, answer), ("recorded", answer, sample)):
            fields, columns = changes(light(old), light(new))
            yield self._event(StageApplied, [[new]], stage=stage, seconds=0.0, changed=fields, columns=columns, **about)
            if stage == "Generate":
                yield self._event(
                    SampleGenerated,
                    [[answer]],
                    stage=stage,
                    status=answer.status,
                    response_length=answer.response_length,
                    weight_versions=answer.weight_versions,
                    seconds=0.0,
                    **about,
                )


def _rewards(group: Group) -> list[float]:
    try:
        return [reward for reward in group.rewards() if reward == reward]
    except (TypeError, KeyError):  # dicts of rewards have no one mean
        return []
