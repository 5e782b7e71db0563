"""The documentation says what is so: its pages build, its links lead somewhere, its commands run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from docs import build_pages
from eventbus.events import EVENT_KINDS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md"))


def test_every_recipe_has_a_page_and_every_page_its_recipe() -> None:
    shown = {
        name for page in PAGES for name in re.findall(r'^--8<-- "examples/recipes/(\w+)\.py"$', page.read_text(), re.M)
    }
    assert shown == {path.stem for path in (ROOT / "examples" / "recipes").glob("*.py")}


def test_the_schema_shows_every_kind_with_its_fields() -> None:
    page = build_pages.event_schema()
    for tag, cls in EVENT_KINDS.items():
        section = page.partition(f"\n## {tag}\n")[2].partition("\n## ")[0]
        own = [name for name in cls.__struct_fields__ if name not in ("seq", "time_ns", "rollout_id", "evaluation")]
        assert re.findall(r"^\| `(\w+)` \|", section, re.M) == own


def test_the_command_line_page_shows_the_commands() -> None:
    page = build_pages.command_line()
    assert page.startswith("# Command line\n")
    assert "\nrolloutbus run [OPTIONS] CONFIG\n" in page  # and not how this process was called
    for command in ("run", "replay", "log why", "doctor"):
        assert f" rolloutbus {command}\n" in page


def test_performance_is_that_of_a_run_of_all_parts() -> None:
    from benchmarks.__main__ import LONG, PARTS

    sections = re.findall(r"^## (.+)$", build_pages.performance(), re.M)
    assert set(sections) >= set(PARTS) - set(LONG)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "benchmarks/README.md"])
def test_links_of_files_outside_the_site_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert urlsplit(target).scheme or (page.parent / target).exists(), target


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs rolloutbus[docs]")
def test_the_site_builds_without_a_warning_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path: Page(path) for path in tmp_path.rglob("*.html")}
    assert len(pages) > len(PAGES)
    for path, page in pages.items():
        if path.name == "404.html":  # its links start at the address that the site will have
            continue
        for link in page.loads:
            assert not urlsplit(link).netloc, f"{path} fetches {link} from elsewhere"
        for link in page.links:
            parts = urlsplit(link)
            assert parts.scheme in ("", "https"), f"{path}: {link}"
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.exists(), f"{path}: {link}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, f"{path}: {link}"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="needs rolloutbus[embedded]")
def test_the_commands_of_the_start_page_run(tmp_path: Path) -> None:
    page = (DOCS / "start.md").read_text()
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("*.mcap", "*.png"))
    folder = tmp_path
    for command in re.findall(r"^\$ (.+)$", page, re.M):
        program, *arguments = command.split()
        if program == "cd":
            folder /= arguments[0]
        else:
            assert rolloutbus(folder, *arguments).returncode == 0, command

    before, after = (re.search(rf"^{sign}( .+)$", page, re.M) for sign in ("-", r"\+"))
    assert before is not None
    assert after is not None
    stages = folder / "stages.py"
    changed = stages.read_text().replace(before[1], after[1])
    assert changed != stages.read_text()
    stages.write_text(changed)
    done = rolloutbus(folder, "replay", "run.mcap", "--verify")
    assert done.returncode == 1
    assert "stage score" in done.stdout


def rolloutbus(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from eventbus.cli import main; main()", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


class Page(HTMLParser):
    """Where a page links to, and what can be linked to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
                if tag != "a":
                    self.loads.append(value)
            elif name == "id" and value:
                self.anchors.add(value)
