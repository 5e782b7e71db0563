"""Runs a module on several ranks of one machine, as torchrun does, and cases in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from backends.sglang.router import free_port

ROOT = Path(__file__).parent.parent


def run_on_ranks(count: int, module: str, *arguments: object, **environment: str) -> str:
    """What they printed. They have to end before pytest would end the whole process."""
    host = "127.0.0.1"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    command += ["--master-addr", host, "--master-port", str(free_port(host)), "-m", module, *map(str, arguments)]
    # Into a file: torch's manager of shared memory outlives the ranks, and would hold a pipe open.
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout=280)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        printed = output.read()
    assert process.returncode == 0, printed[-5000:]
    return printed


def run_cases(cases: Mapping[str, Callable[[Path], None]], arguments: Sequence[str]) -> None:
    """On every rank: the cases, each in a folder of its own in the first of the arguments, or those that the others
    name. Into `found.json` there goes what was wrong on any rank."""
    import torch.distributed as dist

    folder, rank = Path(arguments[0]), dist.get_rank()
    found: dict[str, str | None] = {}
    for name, case in cases.items():
        if len(arguments) > 1 and name not in arguments[1:]:
            continue
        own = folder / name
        own.mkdir(exist_ok=True)
        try:
            case(own)
        except BaseException:
            (own / f"error-{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
        try:
            dist.barrier()
        except RuntimeError as error:
            (own / f"error-{rank}").write_text(f"rank {rank}: {error}")
        found[name] = "\n".join(path.read_text() for path in sorted(own.glob("error-*"))) or None
        if found[name]:  # the ranks may no longer go side by side
            break
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


def error_of(case: Callable[[], None]) -> str | None:
    """Of a case that runs alone."""
    try:
        case()
    except Exception:
        return traceback.format_exc()
    return None
