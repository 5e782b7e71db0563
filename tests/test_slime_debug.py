from __future__ import annotations

from pathlib import Path
from pickle import PicklingError
from typing import Any

import pytest

from backends.slime import load_debug_rollout_data, save_debug_rollout_data
from backends.slime.samples import sample_type
from eventbus.log.format import LogError
from eventbus.log.inspect.slime import load_record

torch = pytest.importorskip("torch")


pytestmark = pytest.mark.usefixtures("with_and_without_slime")


def some(count: int) -> list[Any]:
    kind = sample_type()
    samples = []
    for index in range(count):
        sample = kind(index=index, tokens=[1, 2], response_length=1, reward=0.5, status=kind.Status.TRUNCATED)
        sample.rollout_routed_experts = torch.ones(1, 2)
        sample.turns = 3  # not a field
        samples.append(sample)
    return samples


def test_samples_come_back_as_they_were(tmp_path: Path) -> None:
    template = str(tmp_path / "debug" / "{rollout_id}.pt")
    samples = some(3)
    save_debug_rollout_data(template, samples, rollout_id=7, evaluation=False)
    assert [path.name for path in (tmp_path / "debug").iterdir()] == ["7.pt"]
    back = load_debug_rollout_data(template, rollout_id=7)
    assert [type(sample) for sample in back] == [sample_type()] * 3
    for one, other in zip(back, samples, strict=True):
        experts, theirs = vars(one).pop("rollout_routed_experts"), vars(other).pop("rollout_routed_experts")
        assert torch.equal(experts, theirs)
        assert vars(one) == vars(other)


def test_an_evaluation_has_files_of_its_own(tmp_path: Path) -> None:
    data = {"math": {"samples": some(2), "rewards": []}, "code": {"samples": some(1), "rewards": []}}
    save_debug_rollout_data(str(tmp_path / "{rollout_id}.pt"), data, rollout_id=7, evaluation=True)
    assert len(load_debug_rollout_data(str(tmp_path / "{rollout_id}.pt"), rollout_id="eval_7")) == 3
    assert load_record(tmp_path / "eval_7.pt").evaluation


def test_no_path_writes_nothing(tmp_path: Path) -> None:
    save_debug_rollout_data(None, some(1), rollout_id=7, evaluation=False)


def test_a_part_comes_from_both_ends(tmp_path: Path) -> None:
    template = str(tmp_path / "{rollout_id}.pt")
    save_debug_rollout_data(template, some(10), rollout_id=7, evaluation=False)
    part = load_debug_rollout_data(template, rollout_id=7, subsample_ratio=0.5)
    assert [sample.index for sample in part] == [0, 1, 7, 8, 9]
    assert load_debug_rollout_data(template, rollout_id=7, subsample_ratio=0.0) == []


def test_a_file_that_is_there_stays_whole_when_writing_fails(tmp_path: Path) -> None:
    template = str(tmp_path / "{rollout_id}.pt")
    save_debug_rollout_data(template, some(1), rollout_id=7, evaluation=False)
    broken = some(2)
    broken[1].callback = lambda: None  # cannot be pickled
    with pytest.raises((AttributeError, PicklingError)):
        save_debug_rollout_data(template, broken, rollout_id=7, evaluation=False)
    assert len(load_debug_rollout_data(template, rollout_id=7)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["7.pt"]


def test_a_file_that_would_have_to_be_run_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (marker,)

    torch.save({"rollout_id": 7, "samples": [{"reward": Hostile(), "status": "completed"}]}, tmp_path / "7.pt")
    with pytest.raises(LogError, match="would have to be run"):
        load_debug_rollout_data(str(tmp_path / "{rollout_id}.pt"), rollout_id=7)
    assert not marker.exists()


@pytest.mark.parametrize("content", [{"samples": 3}, [1], {"samples": [3]}, {"samples": [{"status": "lost"}]}])
def test_a_file_of_something_else_is_an_error(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "7.pt")
    with pytest.raises(LogError, match=r"7\.pt"):
        load_debug_rollout_data(str(tmp_path / "{rollout_id}.pt"), rollout_id=7)


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "7.pt").write_bytes(b"no archive")
    with pytest.raises(LogError, match=r"7\.pt"):
        load_debug_rollout_data(str(tmp_path / "{rollout_id}.pt"), rollout_id=7)
    with pytest.raises(LogError, match=r"8\.pt: cannot be read: No such file"):
        load_debug_rollout_data(str(tmp_path / "{rollout_id}.pt"), rollout_id=8)
