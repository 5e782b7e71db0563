"""What `test_deep_ep.py` runs on two and on four ranks: `MegatronTrainer` over real megatron-core, whose tokens go
through the fake DeepEP, under torch_memory_saver's real hook, in a region that is on from the start.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import torch.distributed as dist

from backends.megatron import deep_ep as guard
from backends.megatron.config import ConfigError
from backends.megatron.stream import RankFailed
from tests import megatron_model as tiny
from tests.megatron_ranks import run_cases
from tests.megatron_shims import core, let_experts_run, take_the_cpu_for_a_gpu
from tests.megatron_worker import CAP, LAYOUTS, Layout, Run, batch_of, one_pass, running, samples, sizes
from tests.megatron_worker import CASES as LOSSES
from tests.tms import cuda
from tests.tms.cuda import Counts, taken_by


def flex(back_end: str, tp: int = 1, cp: int = 1) -> Layout:
    options = {"moe": True, "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": back_end}
    options |= {"expert_tensor_parallel_size": 1, "sequence_parallel": tp > 1}
    return Layout(2, sizes(tp=tp, cp=cp, ep=2) | {"expert_tensor_parallel_size": 1}, options)


DEEPEP = flex("deepep")
# Ranks of one sequence have as many tokens of it.
HYBRIDEP, HYBRIDEP_SP = flex("hybridep", cp=2), flex("hybridep", tp=2)


@contextmanager
def fresh(layout: Layout) -> Iterator[Any]:
    """megatron-core's module that keeps the buffer, before there is one."""
    tiny.initialise(**layout.sizes)
    fused: Any = importlib.import_module("megatron.core.transformer.moe.fused_a2a")
    try:
        yield fused
    finally:
        fused._buffer = None
        fused.reset_hybrid_ep_buffer()


def train(run: Run) -> None:
    """A step. Its gradients are those of plain torch, so whatever went through DeepEP came to where it should."""
    metrics, gradients = one_pass("ppo", run.layout.moe)
    result = run.train(batch_of(samples()))
    assert result.metrics["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-5)
    run.check_gradients(gradients)


def started(layout: Layout, stack: ExitStack) -> tuple[Run, Counts]:
    """A run whose trainer builds the buffer, and what was taken for that."""
    built: list[Run] = []
    taken = taken_by(lambda: built.append(stack.enter_context(running(layout, eager_deep_ep=True))))
    return built[0], taken


# The cases


def it_is_built_with_the_trainer(folder: Path) -> None:
    """Once, in its thread, with the region off; then none is built, forwards or backwards."""
    with fresh(DEEPEP) as fused, ExitStack() as stack:
        run, taken = started(DEEPEP, stack)
        assert taken == Counts(tracked=0, plain=2, windows=0)
        buffer = fused._buffer
        assert buffer.built_in.startswith("megatron")
        assert buffer.group is core("parallel_state", "get_expert_tensor_and_model_parallel_group")()
        assert cuda.flag()
        assert anyio.run(run.trainer.call, cuda.flag)
        for _ in range(2):
            assert taken_by(lambda: train(run)).plain == 0
        assert fused._buffer is buffer
        with running(DEEPEP, LOSSES["everything"], eager_deep_ep=True):  # another trainer finds it, and a reference
            assert fused._buffer is buffer


def it_is_the_one_of_the_first_dispatch(folder: Path) -> None:
    half = {"bf16": True, "params_dtype": torch.bfloat16}
    for options in ({}, half):
        layout = replace(DEEPEP, config={**DEEPEP.config, **options})
        built = []
        for eager in (True, False):
            with fresh(layout) as fused, running(layout, optimizer=options, eager_deep_ep=eager) as run:
                assert (fused._buffer is not None) is eager
                taken = taken_by(lambda run=run: run.train(batch_of(samples())))  # type: ignore[misc]
                assert taken.plain == (0 if eager else 2)
                built.append(fused._buffer)
        own, lazy = built
        assert own.num_nvl_bytes == lazy.num_nvl_bytes
        assert own.num_nvl_bytes == 16 * 2 * tiny.HIDDEN * (2 if options else 4)
        assert own.num_rdma_bytes == lazy.num_rdma_bytes
        assert own.group.size() == lazy.group.size() == 2


def a_hybrid_one_never_grows(folder: Path) -> None:
    never_grows(HYBRIDEP, CAP)
    never_grows(HYBRIDEP_SP, CAP // 2)


def never_grows(layout: Layout, tokens: int) -> None:
    """:param tokens: of one rank, the most that there can be."""
    with fresh(layout) as fused, ExitStack() as stack:
        run, taken = started(layout, stack)
        assert taken == Counts(tracked=0, plain=3, windows=0)
        buffer = fused._hybrid_ep_buffer
        assert buffer.built_in.startswith("megatron")
        assert buffer.group is core("parallel_state", "get_expert_tensor_and_model_parallel_group")()
        assert (buffer.hidden_dim, buffer.num_local_experts) == (tiny.HIDDEN, tiny.EXPERTS // 2)
        assert buffer.runtime.tokens == tokens
        assert taken_by(lambda: train(run)).plain == 0
        with running(layout, eager_deep_ep=True):
            assert fused._hybrid_ep_buffer is buffer
    with fresh(layout) as fused, running(layout) as run:
        assert taken_by(lambda: train(run)).plain >= 3
        lazy = fused._hybrid_ep_buffer
        assert (lazy.group.size(), lazy.hidden_dim, lazy.num_local_experts) == (2, tiny.HIDDEN, tiny.EXPERTS // 2)
        assert lazy.runtime.tokens <= tokens


def ranks_with_different_tokens(folder: Path) -> None:
    """For HybridEP they are padded, by a version of megatron-core that can, or refused."""
    uneven = flex("hybridep")
    with fresh(uneven), pytest.raises(ConfigError, match="takes as many tokens from each rank"), running(uneven):
        pass
    name = "moe_hybridep_pad_uneven_dispatch_inputs"
    if not hasattr(core("transformer", "TransformerConfig"), name):
        return
    padded = replace(uneven, config={**uneven.config, name: True})
    with fresh(padded) as fused, running(padded, eager_deep_ep=True) as run:
        assert fused._hybrid_ep_buffer.runtime.tokens == 128  # a multiple of 64
        assert taken_by(lambda: train(run)).plain == 0


def where_there_is_none_to_build(folder: Path) -> None:
    by_count = {"micro_batch_size": 2}
    for layout, options, match in (
        (LAYOUTS["dp2"], {}, "no layer of the model sends tokens through DeepEP"),
        (LAYOUTS["ep2"], {}, "build the model with moe_token_dispatcher_type='flex'"),
        (HYBRIDEP, by_count, "give that instead of micro_batch_size"),
    ):
        with fresh(layout), pytest.raises(ConfigError, match=match), running(layout, eager_deep_ep=True, **options):
            pass
        assert guard._patch is None
    with fresh(DEEPEP) as fused, running(DEEPEP, eager_deep_ep=True, **by_count):  # whose size hangs on no tokens
        assert fused._buffer is not None


def one_rank_cannot(folder: Path) -> None:
    def no_memory(*size: object) -> None:
        raise RuntimeError("no memory left")

    first = dist.get_rank() == 0
    with fresh(DEEPEP) as fused, pytest.MonkeyPatch.context() as patch:
        if first:
            patch.setattr(fused, "get_buffer", no_memory)
        with (
            pytest.raises(RuntimeError if first else RankFailed, match="no memory left"),
            running(DEEPEP, eager_deep_ep=True),
        ):
            pass
        assert guard._patch is None


def a_stage_without_experts(folder: Path) -> None:
    """Of a pipeline: its ranks build none, and wait for nobody."""
    sparse = {**DEEPEP.config, "moe": (False, False, True, True)}
    layout = Layout(4, DEEPEP.sizes | {"pipeline_model_parallel_size": 2}, sparse)
    with fresh(layout) as fused, ExitStack() as stack:
        run, taken = started(layout, stack)
        last = core("parallel_state", "is_pipeline_last_stage")()
        assert taken == Counts(tracked=0, plain=2 if last else 0, windows=0)
        assert (fused._buffer is not None) is last
        assert taken_by(lambda: train(run)).plain == 0


CASES = {
    2: (
        it_is_built_with_the_trainer,
        it_is_the_one_of_the_first_dispatch,
        a_hybrid_one_never_grows,
        ranks_with_different_tokens,
        where_there_is_none_to_build,
        one_rank_cannot,
    ),
    4: (a_stage_without_experts,),
}
"""By the number of ranks."""


def main() -> None:
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(Path(__file__).parent / "tms"))
    take_the_cpu_for_a_gpu()
    let_experts_run()
    dist.init_process_group("gloo")
    run_cases({case.__name__: case for case in CASES[dist.get_world_size()]}, sys.argv[1:])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
