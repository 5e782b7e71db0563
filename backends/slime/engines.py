"""The engine that slime's `args` name, and slime's generate function over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import cache
from typing import Any

from backends.slime.options import option
from backends.slime.samples import from_slime, of_slime, to_slime
from eventbus.imports import load_object
from eventbus.sample import Sample
from middleware.generate import Engine, Generate

__all__ = ["SlimeEngine", "generate"]


class SlimeEngine:
    """Gives our samples their tokens and their response.

    :raises LoadError: `args.rolloutbus_engine` leads nowhere, or SGLang's client is not installed.
    :raises AttributeError: `args` lacks the address of slime's router.
    """

    def __init__(self, args: Any) -> None:
        self._tokenize: Callable[[Sample], Any] | None = None
        if path := option(args, "rolloutbus_engine"):
            self.engine: Engine = (load_object(path) if isinstance(path, str) else path)(args)
            return
        experts = (args.num_layers, args.moe_router_topk) if option(args, "use_rollout_routing_replay") else None
        self.engine = load_object("backends.sglang:SGLangEngine")(
            router=f"http://{args.sglang_router_ip}:{args.sglang_router_port}",
            routed_experts=experts,
        )
        self._tokenize = _tokenizer(args.hf_checkpoint)

    async def __call__(self, sample: Sample, sampling: Mapping[str, Any]) -> None:
        """:raises Exception: what the engine raises."""
        if self._tokenize is not None:
            await self._tokenize(sample)
            # The router drops this one without a word, as it does for slime; to be heard, every request would have to
            # go around the router. It only changes the text of slow tokenizers.
            sampling = {name: value for name, value in sampling.items() if name != "spaces_between_special_tokens"}
        await Generate(self.engine, sampling)(sample)

    async def open(self, until: AsyncExitStack) -> None:
        if hasattr(type(self.engine), "__aenter__"):
            await until.enter_async_context(self.engine)  # type: ignore[arg-type]
        elif hasattr(type(self.engine), "__enter__"):
            until.enter_context(self.engine)  # type: ignore[arg-type]


async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False) -> Any:
    """`--custom-generate-function-path backends.slime.generate`: our engine inside slime's own rollout function.

    :returns: the same sample, with its response.
    :raises Exception: as `SlimeEngine`.
    """
    if id(args) not in _engines:
        _engines[id(args)] = args, SlimeEngine(args)
    ours = from_slime(sample)
    await _engines[id(args)][1](ours, sampling_params)
    return to_slime(ours, onto=sample)


# slime generates sample by sample, and an engine learns of its servers once. With `args`, so that its id stays taken.
_engines: dict[int, tuple[Any, SlimeEngine]] = {}


@cache
def _tokenizer(checkpoint: str) -> Callable[[Sample], Any]:
    load = of_slime("utils.processing_utils", "load_tokenizer")
    tokenizer = checkpoint if load is None else load(checkpoint, trust_remote_code=True)
    # slime's data sets have applied the chat template, which writes the special tokens.
    stage: Callable[[Sample], Any] = load_object("middleware.tokenize:Tokenize")(tokenizer, special_tokens=False)
    return stage
