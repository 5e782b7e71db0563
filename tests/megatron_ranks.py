"""Runs a module on several ranks of one machine, as torchrun does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run_on_ranks(count: int, module: str, *arguments: object) -> None:
    """It has to end before pytest would end the whole process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port), "-m", module, *map(str, arguments)]
    # Into a file: torch's manager of shared memory outlives the ranks, and would hold a pipe open.
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
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
        assert process.returncode == 0, output.read()[-5000:]
