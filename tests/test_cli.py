"""The command `rolloutbus run`: what it shows, how it ends, and its exit codes."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from eventbus.cli import app
from eventbus.group import Summary
from eventbus.report import Report

ROOT = Path(__file__).parent.parent

STAGES = """
import sys
import anyio
from eventbus import Completion, Sample, TrainResult

def answer(sample: Sample) -> Completion:
    return Completion(text=str(sample.index % 2), tokens=[1], log_probs=[-0.1])

def score(sample: Sample, *, rollout_id: int) -> None:
    sample.reward = float(sample.response) + rollout_id

def same(sample: Sample) -> None:
    sample.reward = 1.0

def broken(sample: Sample) -> None:
    raise OSError("the judge is gone")

class Engine:
    async def __aenter__(self): return self
    async def __aexit__(self, *error): print("engine closed", flush=True)
    async def generate(self, sample, sampling): return answer(sample)

class PlainTrainer:
    def train(self, batch): return TrainResult()

class Trainer:
    def __init__(self, wait_at: int = -1, fails: bool = False) -> None:
        self.wait_at, self.fails = wait_at, fails

    async def train(self, batch) -> TrainResult:
        if self.fails:
            raise RuntimeError("out of memory")
        if batch.rollout_id == self.wait_at:
            print("waiting", flush=True)
            await anyio.sleep_forever()
        return TrainResult({"loss": 0.5})
"""

RUN = """
[prompts]
path = "train.jsonl"
group_size = 2

[engine]
use = "cli_stages:Engine"

[batch]
groups = 3
over_sampling = 4
max_rounds = 2
max_failures = 5

[[stages]]
use = "middleware:Generate"

[[stages]]
use = "cli_stages:score"

[[stages]]
use = "middleware:DynamicFilter"
judge = { use = "middleware:reward_nonzero_std" }

[trainer]
use = "cli_stages:Trainer"

[run]
rollouts = 3
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with run.toml, its stages and its prompts, which is the current one."""
    (tmp_path / "cli_stages.py").write_text(STAGES)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "train.jsonl").write_text('{"prompt": "2+2="}\n{"prompt": "3+3="}\n')
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    gc.unfreeze()


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app(["run", "run.toml", *arguments])
    code = ended.value.code
    assert isinstance(code, int)
    return code


# Runs


def test_run_shows_progress_and_summary(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    shown = capsys.readouterr().out
    assert "rollout 2: kept 3/3" in shown
    assert "rollouts                           3 " in shown
    assert "mean reward of what was generated  0.500 first, 2.500 last" in shown
    assert "groups kept                        9 of" in shown


def test_rollouts_and_set(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--rollouts", "2", "--set", "batch.groups=1", "--set", "stages.score.name=judge") == 0
    shown = capsys.readouterr().out
    assert "rollout 1: kept 1/1" in shown
    assert "rollout 2" not in shown


def test_trio(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trio", reason="needs rolloutbus[trio]")
    assert run("--set", "run.backend=trio") == 0
    assert "rollout 2: kept 3/3" in capsys.readouterr().out


def test_quiet_shows_nothing(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("--quiet") == 0
    assert capfd.readouterr() == ("engine closed\n", "")  # printed by the engine itself


def test_without_rollouts_it_runs_to_the_end_of_the_prompts(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "run.toml").write_text(RUN.replace("rollouts = 3", "") + "[report]\nplot = 'r.png'\n")
    assert run("--set", "prompts.epochs=3", "--set", "batch.over_sampling=1", "--set", "batch.max_rounds=9") == 0
    assert "rollouts                           2 " in capsys.readouterr().out


# Ends


def test_mistake_in_the_file_is_one_line(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--set", "stages[2].fallbak=last") == 2
    assert capsys.readouterr() == ("", "run.toml: stages[2].fallbak: unknown key; did you mean fallback?\n")


def test_missing_trainer(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "run.toml").write_text(RUN.replace('[trainer]\nuse = "cli_stages:Trainer"\n', ""))
    assert run() == 2
    assert capsys.readouterr().err == "run.toml: trainer: missing; add a section [trainer] with use = ...\n"


def test_missing_file(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "run.toml").unlink()
    assert run() == 2
    assert capsys.readouterr().err == "run.toml: there is no such file\n"


def test_module_that_cannot_be_imported_shows_its_traceback(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "cli_broken.py").write_text("def stage(sample):\n    return 1 +\n")
    assert run("--set", "stages[1].use=cli_broken:stage") == 1
    shown = capsys.readouterr().err
    assert 'cli_broken.py", line 2' in shown
    assert "while importing 'cli_broken'" in shown
    assert "eventbus" not in shown
    assert "importlib" not in shown


def test_failed_samples_show_the_root_traceback(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--set", "stages[1].use=cli_stages:broken") == 1
    shown = capsys.readouterr().err
    assert "in broken\n" in shown
    assert shown.count("OSError: the judge is gone\n") == 1
    assert "ExceptionGroup: rollout 0: 6 samples failed, more than max_failures=5" in shown


def test_exhausted_rounds_say_why(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--set", "stages[1].use=cli_stages:same") == 1
    shown = capsys.readouterr().err
    assert shown.startswith("2 rounds of 4 groups are spent (max_rounds=2) before the batch was full")
    assert len(shown.splitlines()) == 1
    assert "zero_std_1.0 x8" in shown


def test_prompts_that_are_missing_fail_the_run(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--set", "prompts.path=none.jsonl") == 1
    assert capsys.readouterr().err == f"there is no file {project}/none.jsonl to read prompts from\n"


def test_error_of_the_trainer_begins_in_its_own_code(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--set", "trainer.fails=true") == 1
    shown = capsys.readouterr().err
    assert "RuntimeError: out of memory" in shown
    assert "eventbus" not in shown


def test_trainer_may_be_a_plain_function(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--set", "trainer.use=cli_stages:PlainTrainer") == 0
    assert "rollout 2: kept 3/3" in capsys.readouterr().out


def test_ctrl_c_while_modules_are_imported(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "cli_interrupted.py").write_text("raise KeyboardInterrupt\n")
    assert run("--set", "stages[1].use=cli_interrupted:stage") == 130
    assert capsys.readouterr().err == "interrupted; before the run began\n"


@pytest.mark.parametrize("number", ["0", "-1", "2.5", "x"])
def test_rollouts_that_are_no_number(number: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"--rollouts={number}") == 2
    shown = capsys.readouterr()
    assert f"'{number}' is no whole number of at least 1" in " ".join((shown.out + shown.err).split())


def command(*arguments: str) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    # A suite that runs in the background of a shell has SIGINT ignored, and would hand that on.
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program += "from eventbus.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", program, "run", "run.toml", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize(
    ("number", "what"),
    [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM"), (signal.SIGHUP, "ended by SIGHUP")],
)
def test_signal_shuts_down_cleanly(project: Path, backend: str, number: signal.Signals, what: str) -> None:
    with command("--quiet", "--set", "trainer.wait_at=1", "--set", f"run.backend={backend}") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(number)
        assert process.communicate(timeout=60) == ("engine closed\n", f"{what}; rollouts trained: 1\n")
        assert process.returncode == 128 + number


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_output_that_nobody_reads_ends_the_run(project: Path, backend: str) -> None:
    with command("--set", "run.rollouts=100000", "--set", f"run.backend={backend}") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("rollout 0: kept 3/3")
        process.stdout.close()
        assert process.stderr.read().startswith("nobody reads the output any more; rollouts trained: ")
        assert process.wait(timeout=60) == 141


def test_output_that_cannot_show_the_plot_fails_nothing(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotext", reason="needs rolloutbus[embedded]")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    with command() as process:
        assert process.communicate(timeout=60)[1] == ""
        assert process.returncode == 0


# Plots


def summaries() -> Report:
    report = Report()
    for rollout in range(4):
        dropped = {"zero_std_1.0": rollout} | {f"rare_{number}": 1 for number in range(20)}
        report.summaries.append(
            Summary(rollout, kept=4, submitted=8, dropped=dropped, kept_by_fallback=1, reward_mean=rollout / 10)
        )
    return report


def test_plots(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotext", reason="needs rolloutbus[embedded]")
    pytest.importorskip("matplotlib", reason="needs rolloutbus[embedded]")
    assert run("--set", "report.plot=plots/curve.png") == 0
    assert f"plot: {project}/plots/curve.png" in capsys.readouterr().out
    assert (project / "plots/curve.png").read_bytes().startswith(b"\x89PNG")


def test_missing_plot_package_names_the_extra(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotext", None)
    assert run() == 0
    assert "no plot: plotext is not installed: pip install 'rolloutbus[embedded]'\n" in capsys.readouterr().out


def test_plot_that_cannot_be_written_fails_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotext", reason="needs rolloutbus[embedded]")
    pytest.importorskip("matplotlib", reason="needs rolloutbus[embedded]")
    assert run("--set", "report.plot=train.jsonl/x.png") == 0
    assert f"no plot at {project}/train.jsonl/x.png: " in capsys.readouterr().out


def test_rare_reasons_are_counted_together() -> None:
    cells = [list(column.cells) for column in summaries().table().columns]
    rows = dict(zip(*cells, strict=True))
    assert rows["dropped, others"] == "52"  # 13 of the 20 rare ones, in 4 rollouts
    assert rows["dropped, zero_std_1.0"] == "6"


def test_report_without_rewards() -> None:
    pytest.importorskip("plotext", reason="needs rolloutbus[embedded]")
    report = Report()
    report.summaries.append(Summary(0))
    assert report.terminal_plot(80) == ""


def test_terminal_plot_has_no_control_codes() -> None:
    pytest.importorskip("plotext", reason="needs rolloutbus[embedded]")
    plot = summaries().terminal_plot(80)
    assert "mean reward of what was generated" in plot
    assert "\x1b" not in plot
    assert max(map(len, plot.splitlines())) <= 80


# The rest of the command line


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--help"], "Train as a TOML file says."), (["run", "--help"], "rolloutbus run run.toml --rollouts 100 --set")],
)
def test_help_teaches(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app(arguments)
    assert ended.value.code == 0
    assert text in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", {"rolloutbus": "1.2.3"}.__getitem__)
    with pytest.raises(SystemExit):
        app(["--version"])
    assert capsys.readouterr().out == "1.2.3\n"


def test_command_is_the_one_that_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"rolloutbus": "eventbus.cli:main"}


def test_unknown_option_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["run", "run.toml", "--rolouts", "3"])
    assert ended.value.code != 0
    printed = capsys.readouterr()
    assert "--rollouts" in printed.out + printed.err


def test_a_log_that_is_there_is_not_replaced_unasked(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--set", "log.path=run.mcap") == 0
    capsys.readouterr()
    assert run("--set", "log.path=run.mcap") == 1
    told = capsys.readouterr().err
    assert told == f"{project}/run.mcap: the file exists; choose another path, or say overwrite to replace it\n"
    assert run("--set", "log.path=run.mcap", "--set", "log.overwrite=true") == 0
