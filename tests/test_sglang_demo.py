"""`make demo-sglang`, as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from eventbus import LogReader
from eventbus.events import WeightsUpdated
from eventbus.log.inspect.check import check
from tests import sglang_real

pytestmark = sglang_real.MARKS

ROOT = Path(__file__).parent.parent


def test_the_demo_shows_responses_of_two_versions(tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "examples" / "sglang" / "rollouts.py")]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.sglang_servers", "2", *program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("kept 4/4 of") == 4
    assert re.search(r"sample \d+, tokens 0 to (\d+) by version (\d|default), \1 to 300 by version \d", ended.stdout)
    with LogReader(tmp_path / "sglang.mcap") as log:
        assert check(log.events(), samples=log.samples).violations == []
        updates = [event.version for event in log.events() if isinstance(event, WeightsUpdated)]
    assert updates == ["1", "2", "3", "4"]
    for url in re.findall(r"(http://\S+) is ready", ended.stdout):
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"{url}/model_info", timeout=5)
