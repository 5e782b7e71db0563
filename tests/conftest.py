"""Shared by all tests: both backends, virtual time, and what is skipped where."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from eventbus.testing import virtual_time
from tests import sglang_servers

# `anyio_backend` is made anew for each test, not for each example: the examples of a test share its backend, which is
# meant. A busy machine makes no test wrong.
_TOLERANT = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
settings.register_profile("default", deadline=None, suppress_health_check=_TOLERANT)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Both backends; a test marked `virtual_time` gets a virtual clock on each."""
    name: str = request.param
    if request.node.get_closest_marker("virtual_time") is None:
        return name, {}
    return name, virtual_time(name)["backend_options"]


@pytest.fixture(params=["slime", "without slime"])
def with_and_without_slime(request: pytest.FixtureRequest) -> Iterator[None]:
    """slime's stand-in can be imported, and cannot."""
    from tests.slime_runs import slime_importable, slime_missing

    with pytest.MonkeyPatch.context() as patch:
        with slime_importable(patch) if request.param == "slime" else slime_missing(patch):
            yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For torch: more of them only disturb each other with tensors and models of a test's size."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def real_models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two tiny models for SGLang that differ in their weights alone."""
    return sglang_servers.make_models(tmp_path_factory.mktemp("sglang") / "tiny")


@pytest.fixture(scope="session")
def real_server(real_models: list[Path]) -> Iterator[sglang_servers.Server]:
    """The one real server of a test run, with the first model. Who changes its weights or version puts them back."""
    with sglang_servers.server(real_models[0], "--sampling-mask-max-tokens", "64") as server:
        yield server


@pytest.fixture(scope="session")
def real_url(real_server: sglang_servers.Server) -> str:
    return real_server.url


def pytest_runtest_setup(item: pytest.Item) -> None:
    """trio draws the order of tasks that are ready; in CI each test has an order of its own that stays the same."""
    if os.environ.get("CI"):
        with suppress(ImportError, AttributeError):  # of trio's, not public
            import_module("trio._core._run")._r.seed(item.nodeid)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("nvidia-smi") is None:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a GPU: nvidia-smi is not here"))
