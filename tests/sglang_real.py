"""Starts a real SGLang server on this machine's CPU, with a tiny random model.

The environment variable ROLLOUTBUS_SGLANG_PYTHON names the interpreter of an environment that has sglang 0.5.23.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PYTHON = os.environ.get("ROLLOUTBUS_SGLANG_PYTHON")
STUBS = Path(__file__).parent / "sglang_cpu"
START_SECONDS = 240


def make_models(folder: Path) -> list[Path]:
    """Two models that differ in their weights alone."""
    assert PYTHON is not None
    subprocess.run([PYTHON, str(STUBS / "tiny_model.py"), str(folder)], check=True, env=environment())
    return [folder / "0", folder / "1"]


@contextmanager
def server(model: Path, *arguments: str) -> Iterator[str]:
    """The address of a server that is ready; its log is `server.log` beside the model."""
    assert PYTHON is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        PYTHON, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu", "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--attention-backend", "torch_native", "--disable-overlap-schedule",
        "--skip-server-warmup", "--context-length", "512", "--max-total-tokens", "4096", *arguments,
    ]  # fmt: skip
    log = model.parent / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _until_ready(process, url, log)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # TERM would take seconds
        process.wait()


def _until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(f"{url}/model_info", timeout=5):
                return
        except OSError:
            time.sleep(0.2)  # it tells nobody when it is ready
    raise RuntimeError(f"the server is not ready after {START_SECONDS} s:\n{log.read_text()[-3000:]}")


def environment() -> dict[str, str]:
    return os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(STUBS), "HF_HUB_OFFLINE": "1"}
