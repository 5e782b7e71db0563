"""What `StatelessAdam` saves: memory held between steps and at the peak of a step, beside torch's AdamW.

Each peak is that of a fresh process, in whole pages of Linux: 32 parameters of 4 MB with their gradients are there
before it counts. Times are CPU seconds of a step on one thread, of the two in turns.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from benchmarks.measure import Row, cpu_seconds, interleaved, ratio_row

__all__ = ["rows"]

TENSORS, WIDTH = 32, 1024
TIMED = 8
WEIGHTS: Final = TENSORS * WIDTH * WIDTH * 4
STEPS = 3
AT_MOST = 0.1
OPTIMIZERS: Final = ("StatelessAdam", "AdamW")


def rows() -> list[Row]:
    if find_spec("torch") is None:
        return [Row("StatelessAdam / AdamW", "", measured="torch is not installed")]
    held, peak = {}, {}
    for name in OPTIMIZERS:
        command = [sys.executable, "-m", "benchmarks.stateless_adam", name]
        root = Path(__file__).parent.parent
        output = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True).stdout
        held[name], peak[name] = (int(number) for number in output.split())
    from backends.embedded.model import one_thread

    steps = {}
    for name in OPTIMIZERS:
        optimizer = _optimizer(name, _parameters(TIMED))
        optimizer.step()
        steps[name] = lambda optimizer=optimizer: cpu_seconds(optimizer.step)
    with one_thread():
        seconds = interleaved(steps)
    return [
        Row(
            "StatelessAdam / AdamW: memory held between steps",
            f"{held['StatelessAdam'] / held['AdamW']:.3g}x",
            "0x",
            held["StatelessAdam"] == 0,
            f"{_mb(held['StatelessAdam'])} against {_mb(held['AdamW'])}, for {_mb(WEIGHTS)} of weights",
        ),
        Row(
            "StatelessAdam / AdamW: peak of a step above weights and gradients",
            f"{peak['StatelessAdam'] / peak['AdamW']:.3g}x",
            f"at most {AT_MOST}x",
            peak["StatelessAdam"] <= AT_MOST * peak["AdamW"],
            f"{_mb(peak['StatelessAdam'])} against {_mb(peak['AdamW'])}",
        ),
        ratio_row("StatelessAdam / AdamW: time of a step", seconds["StatelessAdam"], seconds["AdamW"]),
    ]


def _optimizer(name: str, params: list[Any]) -> Any:
    from torch.optim import AdamW

    from backends.megatron import StatelessAdam

    return {"StatelessAdam": StatelessAdam, "AdamW": AdamW}[name](params, weight_decay=0.1)


def _parameters(count: int = TENSORS) -> list[Any]:
    import torch

    params = [torch.nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(count)]
    for parameter in params:
        parameter.grad = torch.randn(WIDTH, WIDTH)
    return params


def _main(name: str) -> None:
    import torch

    torch.set_num_threads(1)
    _optimizer(name, _parameters(1)).step()  # what torch keeps after the first step of any optimizer does not count
    params = _parameters()
    optimizer = _optimizer(name, params)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status("VmRSS")
    for _ in range(STEPS):
        optimizer.step()
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    print(sum(tensor.numel() * tensor.element_size() for tensor in tensors), _status("VmHWM") - before)


def _status(key: str) -> int:
    """Bytes of this process, as Linux counts them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {key}")


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


if __name__ == "__main__":
    _main(sys.argv[1])
