"""One rank owns the stream, the others follow: `megatron_stream_worker.py` on two and on four ranks."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.megatron_ranks import run_on_ranks

CASES = [
    "every_sample_reaches_its_ranks_once",
    "another_rank_may_own_it",
    "loops_are_free",
    "a_bad_batch_is_the_same_error_everywhere",
    "a_bad_batch_ends_all_ranks_alike",
    "what_cannot_be_sent_is_named",
    "the_pipelines_error_ends_all_ranks",
    "prompts_end_for_all",
    "a_failing_rank_releases_the_others",
    "a_failing_owner_releases_the_others",
    "an_error_of_all_ranks_stays_what_it_is",
    "all_may_break_together",
    "a_collective_that_breaks_names_the_rank",
    "a_rank_that_breaks_alone_ends_the_others",
    "a_rank_that_never_asks_is_named",
    "a_shard_is_acknowledged_once",
    "the_owner_may_break",
    "a_cancelled_owner_releases_the_others",
    "a_resumed_stream_asks_for_the_right_prompts",
    "a_real_trainer_trains_on_it",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Where the cases on so many ranks ran. Half of the ranks share each data-parallel rank."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("needs megatron-core: pip install 'rolloutbus[megatron]'")

    @cache
    def ran(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp("stream")
        run_on_ranks(ranks, "tests.megatron_stream_worker", folder)
        return folder

    return ran


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_on_ranks(folders: Callable[[int], Path], ranks: int, case: str) -> None:
    error = json.loads((folders(ranks) / "found.json").read_text()).get(case, "it did not run")
    assert error is None, error


def test_a_real_trainer_does_the_same_on_any_layout(folders: Callable[[int], Path]) -> None:
    """Two data-parallel ranks, with and without tensor parallelism."""
    from safetensors.torch import load_file

    name = "a_real_trainer_trains_on_it"
    two, four = (folders(ranks) / name for ranks in (2, 4))
    own, other = (json.loads((folder / "metrics.json").read_text()) for folder in (two, four))
    assert len(own) == 3
    assert [list(metrics) for metrics in own] == [list(metrics) for metrics in other]
    for metrics, others in zip(own, other, strict=True):
        assert list(metrics.values()) == pytest.approx(list(others.values()), rel=1e-4, abs=1e-5)
        assert metrics["grad_norm"] > 0
    for version in ("1", "3"):
        weights, others = (load_file(folder / version / "model-00001.safetensors") for folder in (two, four))
        assert set(weights) == set(others)
        for key, weight in weights.items():
            assert (weight - others[key]).abs().max() < 1e-4, key
