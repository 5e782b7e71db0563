"""The command `rolloutbus doctor`: what a training process would find on this machine.

    rolloutbus doctor --json

Exit codes: 0; 1 when something that is installed cannot be imported. What is not installed is not an error.
"""

from __future__ import annotations

import importlib
import json
import platform
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import metadata
from importlib.util import find_spec
from typing import Annotated, Any, Final, NamedTuple

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eventbus.imports import load_object

__all__ = ["PARTS", "Part", "doctor"]


class Part(NamedTuple):
    """A package that rolloutbus can work with."""

    name: str
    module: str
    distributions: Sequence[str]
    install: str
    """What brings it: an extra of rolloutbus, or else arguments for pip."""
    imports: bool = True
    """False: nothing of rolloutbus imports it, so neither does the doctor."""


PARTS: Final = (
    Part("torch", "torch", ["torch"], "rolloutbus[embedded]"),
    Part("megatron-core", "megatron.core", ["megatron-core"], "rolloutbus[megatron]"),
    Part("deep_ep", "deep_ep", ["deep_ep", "sgl-deep-ep"], "sgl-deep-ep"),
    Part("torch_memory_saver", "torch_memory_saver", ["torch_memory_saver"], "torch_memory_saver"),
    Part("sglang", "sglang", ["sglang"], "sglang", imports=False),
)


class _Finding(NamedTuple):
    """What is known of a part; the fields of `--json`."""

    name: str
    version: str | None
    """None: not installed."""
    error: str | None
    """Why the import failed."""
    install: str | None
    """What brings it, where it is missing."""


def doctor(*, as_json: Annotated[bool, Parameter(name="--json", negative=())] = False) -> None:
    """What is installed, what is missing and what brings it, and what guard_deep_ep finds.

    Run it as the training process is run, with the same LD_PRELOAD and TMS_INIT_ENABLE.

    Example:

        rolloutbus doctor

    :param as_json: for machines.
    """
    # Held before deep_ep is imported, as in a training process.
    with load_object("backends.megatron.deep_ep:guard_deep_ep")() as guard:
        findings = [_look_at(part) for part in PARTS]
        status = guard.status
    if as_json:
        report = {
            "rolloutbus": _version(["rolloutbus"]),
            "python": platform.python_version(),
            "parts": [finding._asdict() for finding in findings],
            "guard_deep_ep": status._asdict(),
        }
        print(json.dumps(report, indent=2))
    else:
        _show(findings, status)
    if any(finding.error for finding in findings):
        sys.exit(1)


def _look_at(part: Part) -> _Finding:
    version = _version(part.distributions)
    if version is None and not _exists(part.module):
        return _Finding(part.name, None, None, part.install)
    if not part.imports:
        return _Finding(part.name, version or "unknown", None, None)
    try:
        with redirect_stdout(sys.stderr), warnings.catch_warnings():  # what it prints is no part of our output
            warnings.simplefilter("ignore")
            module = importlib.import_module(part.module)
    except (Exception, SystemExit) as error:
        return _Finding(part.name, version or "unknown", " ".join(f"{type(error).__name__}: {error}".split()), None)
    return _Finding(part.name, version or str(getattr(module, "__version__", "unknown")), None, None)


def _version(distributions: Sequence[str]) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing
        return False


def _show(findings: Sequence[_Finding], status: Any) -> None:
    table = Table("part", "version", "", box=None, pad_edge=False)
    table.add_row("rolloutbus", _version(["rolloutbus"]) or "not installed", f"Python {platform.python_version()}")
    for finding in findings:
        if finding.version is None:
            note = Text(f"pip install '{finding.install}'", style="dim")
        else:
            note = Text(f"cannot be imported: {finding.error}" if finding.error else "", style="red")
        table.add_row(finding.name, finding.version or "missing", note)
    console = Console()
    console.print(table)
    console.print()
    flag = "" if status.region is None else f"; the region is {'on' if status.region else 'off'} in the main thread"
    console.out(f"guard_deep_ep: {status.hook}{flag}", highlight=False)
    if status.region is not None:
        guards = ", ".join(status.guarded) or "nothing: deep_ep was not imported"
        console.out(f"it guards {guards}", highlight=False)
