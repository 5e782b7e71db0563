"""Starts real SGLang servers on this machine's CPU, with tiny random models.

The environment variable ROLLOUTBUS_SGLANG_PYTHON names the interpreter of an environment that has sglang 0.5.23.

    python -m tests.sglang_servers COUNT COMMAND...

starts COUNT servers, runs `COMMAND... MODEL OTHER URL URL ...` and ends the servers. MODEL is the folder of their
model, OTHER one with other weights. It needs nothing that is only there for tests.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from backends.sglang.router import free_port

PYTHON = os.environ.get("ROLLOUTBUS_SGLANG_PYTHON")
STUBS = Path(__file__).parent / "sglang_cpu"
START_SECONDS = 280


def make_models(folder: Path) -> list[Path]:
    """Two models that differ in their weights alone."""
    _make(folder)
    return [folder / "0", folder / "1"]


def make_experts(folder: Path) -> Path:
    """A model of 3 layers of 8 experts, 2 of which see each token."""
    _make(folder, "experts")
    return folder / "experts"


def _make(*arguments: object) -> None:
    assert PYTHON is not None
    command = [PYTHON, str(STUBS / "tiny_model.py"), *map(str, arguments)]
    made = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if made.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {made.returncode}:\n{made.stderr[-3000:]}")


class Server:
    """A server that starts, or is ready, or has ended. Its log lies beside the model."""

    def __init__(self, model: Path, *arguments: str) -> None:
        assert PYTHON is not None
        port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        self._log = model.parent / f"server-{port}.log"
        command = [
            PYTHON, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu", "--host", "127.0.0.1",
            "--port", str(port), "--dtype", "float32", "--attention-backend", "torch_native",
            "--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle", "--context-length", "4096",
            "--max-total-tokens", "65536", *arguments,
        ]  # fmt: skip
        with self._log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}:\n{self._last_lines()}")
            try:
                with urllib.request.urlopen(f"{self.url}/model_info", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)  # it tells nobody when it is ready
        raise RuntimeError(f"the server is not ready after {START_SECONDS} s:\n{self._last_lines()}")

    @property
    def decoded(self) -> int:
        """Goes up with every 40 steps of decoding, at once: what it answers to /v1/loads may come late."""
        return self._log.read_text().count("Decode batch")

    def kill(self) -> None:
        """By SIGKILL, with all its processes."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def freeze(self) -> None:
        """It answers nothing, and its connections stay open."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            os.killpg(self._process.pid, number)

    def _last_lines(self) -> str:
        return self._log.read_text()[-3000:]


@contextmanager
def server(model: Path, *arguments: str) -> Iterator[Server]:
    """A server that is ready."""
    running = Server(model, *arguments)
    try:
        running.until_ready()
        yield running
    finally:
        running.kill()  # TERM would take seconds


def environment() -> dict[str, str]:
    # One thread for torch: with more, those of two servers spin for each other's cores, and both crawl.
    own = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(STUBS), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return os.environ | own


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; its own processes do the same


def main(count: int, command: list[str]) -> int:
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:3.0f} s] {text}", flush=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="rolloutbus-") as folder, ExitStack() as stack:
        say("making two tiny models")
        model, other = make_models(Path(folder))
        say(f"starting {count} SGLang servers on the CPU; they import for half a minute")
        servers = []
        for _ in range(count):
            servers.append(Server(model))
            stack.callback(servers[-1].kill)
        for running in servers:
            running.until_ready()
            say(f"{running.url} is ready")
        code = subprocess.run([*command, str(model), str(other), *(running.url for running in servers)]).returncode
        say("ending the servers")
    return code


if __name__ == "__main__":
    if PYTHON is None:
        sys.exit("ROLLOUTBUS_SGLANG_PYTHON names no interpreter that has SGLang: `make demo-sglang` makes one")
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
