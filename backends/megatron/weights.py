"""`send_weights`: the weights of a megatron-core model reach an inference engine, under the names of Hugging Face.

Every rank of the trainer calls it. What it keeps true:

- each weight is put together from its parts (tensor, expert and pipeline parallelism) on one rank, a bucket of bounded
  size at a time: no rank ever holds the whole model;
- parts go from the ranks that have them to that rank and nowhere else;
- what fails on that rank, the engine included, raises on all ranks: none is left waiting.

Three ways lead to the engine: `Broadcast`, `SharedMemory` and `Checkpoint`. What a weight is called there is for a
mapping to say, `llama_names` or your own.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

import anyio
import msgspec
import torch
import torch.distributed as dist
from anyio.to_thread import run_sync
from torch import Tensor

from backends.megatron.chunks import device_of, unwrapped
from backends.megatron.threads import to_the_end
from eventbus.imports import optional_dependency

if TYPE_CHECKING:
    from backends.sglang.engine import PauseMode, SGLangEngine, WeightUpdate

__all__ = [
    "Broadcast",
    "Checkpoint",
    "NamedTensors",
    "SharedMemory",
    "Transport",
    "WeightError",
    "WeightMapping",
    "llama_names",
    "named_weights",
    "send_weights",
]

T = TypeVar("T")

ANSWER_SECONDS: Final = 10.0
"""For workers to say why a broadcast failed."""

NamedTensors: TypeAlias = list[tuple[str, Tensor]]
WeightMapping: TypeAlias = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]
"""From megatron-core's name of a weight and the whole weight to what the engine is to get for it; [] for nothing.

Names are those of a model on a single rank, "decoder.layers.17.mlp.linear_fc1.weight": layers and experts are counted
over the whole model. A gated `linear_fc1` has all of the gate first, then all of the other half; the vocabulary is
still padded. It runs on one rank, and may return views.
"""
Send: TypeAlias = Callable[[NamedTensors], Awaitable[None]]


class WeightError(RuntimeError):
    """Weights cannot be put together, or were not sent; the message says on which rank and why."""


class Transport(Protocol):
    """A way to the engine."""

    def sending(self, engine: SGLangEngine | None, version: str, pause: PauseMode) -> AbstractAsyncContextManager[Send]:
        """On one rank: gives what takes one bucket after the other. The engine has them all when this ends well."""


async def send_weights(
    model_chunks: Sequence[torch.nn.Module],
    engine: SGLangEngine | None,
    *,
    version: str,
    mapping: WeightMapping,
    by: Transport,
    pause: PauseMode = "retract",
    bucket_bytes: int = 1 << 30,
) -> None:
    """Give the engine the weights of now, as `version`. Every rank calls it, with the same arguments.

        names = llama_names(config, vocab_size=32000)
        broadcast = Broadcast(backend="nccl")
        ...
        await send_weights(model, engine, version=str(step), mapping=names, by=broadcast)

    When it returns, all workers generate with them. The event loop is free meanwhile. Cancelled on rank 0, it ends as
    by any error there; a rank that is cancelled elsewhere does its part to the end first.

    :param model_chunks: those of this rank, as `MegatronTrainer` takes them.
    :param engine: used on rank 0 only, where it is asked to pause, to take the weights and to go on.
    :param by: the same object each time: it keeps what it has opened.
    :param bucket_bytes: that rank 0 holds at a time, and workers with it; a weight that is larger counts as a bucket.
    :raises WeightError: a part is missing or parts do not fit together; on ranks other than 0 also for whatever was
        raised on rank 0.
    :raises ValueError: `bucket_bytes` is less than 1, or there are no model chunks.
    :raises TypeError: `version` is no string.
    :raises Exception: on rank 0: what the engine, the transport or the mapping raised.
    """
    if not isinstance(version, str):
        raise TypeError(f"send_weights: version is {version!r}, it must be a str")
    device = device_of(model_chunks)
    buckets = named_weights(model_chunks, mapping, bucket_bytes=bucket_bytes)
    if dist.get_rank() != 0:
        await to_the_end(_follow, buckets, device)
        return
    try:
        async with by.sending(engine, version, pause) as send:
            # That it goes on and the bucket are one step: the others are told of nothing in between.
            while (bucket := await to_the_end(_tell_and_next, buckets, device)) is not None:
                if bucket:
                    await send(bucket)
    except BaseException as error:
        with anyio.CancelScope(shield=True), suppress(RuntimeError):
            await to_the_end(_tell, device, f"version {version} was not sent: rank 0: {_words(error)}")
        raise
    with anyio.CancelScope(shield=True):  # the engine has them, whatever happens here
        await to_the_end(_tell, device)


def named_weights(
    model_chunks: Sequence[torch.nn.Module], mapping: WeightMapping, *, bucket_bytes: int = 1 << 30, to: int = 0
) -> Iterator[NamedTensors]:
    """The weights of a model in buckets, whole and renamed on rank `to`; the other ranks get as many empty buckets.

    Every rank iterates it, side by side and to its end.

    A weight may be a view of the model's own memory: use it before the next step.

    :raises WeightError: on all ranks: a part is missing, or parts do not fit together.
    :raises ValueError: `bucket_bytes` is less than 1.
    """
    if bucket_bytes < 1:
        raise ValueError(f"named_weights: bucket_bytes is {bucket_bytes}, it must be at least 1")
    return _named(model_chunks, mapping, bucket_bytes, to)


def _named(
    model_chunks: Sequence[torch.nn.Module], mapping: WeightMapping, bucket_bytes: int, to: int
) -> Iterator[NamedTensors]:
    device, rank = device_of(model_chunks), dist.get_rank()
    try:
        own = dict(_own_parts(model_chunks))
        listed = _Listed([part for part, _ in own.values()])
    except WeightError as error:
        own, listed = {}, _Listed([], str(error))
    weights = _planned(_all_gathered(listed, device))
    for bucket in _buckets(weights, bucket_bytes):
        found = _moved(bucket, own, rank, to, device)
        named: NamedTensors = []
        if rank == to:
            for weight in bucket:
                whole = _joined(weight, [found.pop((weight.name, number)) for number in range(len(weight.parts))])
                named += mapping(weight.name, whole)
        yield named


# Names


def llama_names(config: Any, *, vocab_size: int) -> WeightMapping:
    """The names of Hugging Face's Llama family: Llama, Mistral, Qwen2, Qwen3, and with experts Qwen2-MoE and Qwen3-MoE.

    Any number of query groups; biases and norms of queries and keys where there are; shared and routed experts; layer
    norms that Transformer Engine fuses into the next layer. Tied output weights get no name of their own.

    :param config: the model's `TransformerConfig`.
    :param vocab_size: of the tokenizer, without what megatron-core pads it by.
    :raises ValueError: on use: there is no name for a weight in this family.
    """
    heads, groups, size = config.num_attention_heads, config.num_query_groups, config.kv_channels
    shift = 1 if config.layernorm_zero_centered_gamma else 0

    def split_qkv(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Per query group: its queries, its key, its value."""
        grouped = weight.view(groups, heads // groups + 2, size, *weight.shape[1:])
        parts = torch.split(grouped, [heads // groups, 1, 1], dim=1)
        query, key, value = (part.reshape(-1, *weight.shape[1:]) for part in parts)
        return query, key, value

    def in_layer(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        if renamed := _NORMS.get(name):
            yield renamed, weight + shift if shift else weight
        elif renamed := _PLAIN.get(name):
            yield renamed, weight
        elif match := _QKV.fullmatch(name):
            for part, tensor in zip("qkv", split_qkv(weight), strict=True):
                yield f"self_attn.{part}_proj.{match[1]}", tensor
        elif match := _MLP.fullmatch(name):
            inside, number, layer, kind, grouped = match.groups()
            where = "mlp" + _INSIDE[inside or ""].format(number or grouped)
            if layer == "2":
                yield f"{where}.down_proj.{kind}", weight
            elif config.gated_linear_unit:
                for part, tensor in zip(("gate", "up"), weight.chunk(2), strict=True):
                    yield f"{where}.{part}_proj.{kind}", tensor
            else:
                raise KeyError
        else:
            raise KeyError

    def names(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        try:
            if renamed := _VOCABULARY.get(name):
                if len(weight) < vocab_size:
                    raise ValueError(f"llama_names: {name} has {len(weight)} rows, fewer than vocab_size={vocab_size}")
                yield renamed, weight[:vocab_size]
            elif name in ("decoder.final_layernorm.weight", "decoder.final_norm.weight"):
                yield "model.norm.weight", weight + shift if shift else weight
            elif match := _LAYER.fullmatch(name):
                for inner, tensor in in_layer(match[2], weight):
                    yield f"model.layers.{match[1]}.{inner}", tensor
            else:
                raise KeyError
        except KeyError:
            raise ValueError(
                f"llama_names has no name for {name} {list(weight.shape)}: give a mapping of your own, which may call "
                "this one for the rest"
            ) from None

    return names


_VOCABULARY: Final = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
}
_LAYER: Final = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_NORMS: Final = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
_PLAIN: Final = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
}
_QKV: Final = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")
_MLP: Final = re.compile(
    r"mlp\.(?:(shared_experts|experts)\.)?(?:local_experts\.(\d+)\.)?linear_fc([12])\.(weight|bias)(\d+)?"
)
_INSIDE: Final = {"": "", "shared_experts": ".shared_expert", "experts": ".experts.{}"}


# Ways to the engine


class Broadcast:
    """Through a process group of rank 0 and all workers; over NCCL from GPU to GPU.

    The group is made at the first use and kept. After a failure it is given up, and made anew at the next.

    :param backend: of the group: "nccl", or "gloo" for weights and workers on CPUs.
    :param workers: that the engine has.
    :param ranks_per_worker: GPUs of one worker (its tp x pp).
    :param address: of this machine, as the workers reach it; by default the address that its host name stands for.
    :param timeout: seconds for workers to join, and for one bucket.
    """

    def __init__(
        self,
        *,
        backend: str = "nccl",
        workers: int = 1,
        ranks_per_worker: int = 1,
        address: str | None = None,
        group_name: str = "rolloutbus",
        timeout: float = 600.0,
    ) -> None:
        for name, value in {"workers": workers, "ranks_per_worker": ranks_per_worker, "timeout": timeout}.items():
            if not value > 0:
                raise ValueError(f"Broadcast: {name} is {value}, it must be more than 0")
        self.backend = backend
        self.workers = workers
        self.ranks_per_worker = ranks_per_worker
        self.address = address
        self.group_name = group_name
        self._limit = timedelta(seconds=timeout)
        self._group: Any = None

    @asynccontextmanager
    async def sending(self, engine: SGLangEngine | None, version: str, pause: PauseMode) -> AsyncIterator[Send]:
        engine = _needed(engine, self)
        if self._group is None:
            await self._open(engine)
        try:
            async with engine.updating_weights(version, pause) as update:
                yield partial(self._send, update)
        except BaseException:
            with anyio.CancelScope(shield=True), suppress(Exception):
                await self.close(engine)
            raise

    async def close(self, engine: SGLangEngine) -> None:
        """Give the group up, here and at the workers."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
            await engine.destroy_weights_update_group(self.group_name)

    async def _open(self, engine: SGLangEngine) -> None:
        address = self.address or socket.gethostbyname(socket.gethostname())
        size = 1 + self.workers * self.ranks_per_worker
        # Port 0: the store takes a free one, and the workers are told which.
        distributed: Any = dist  # mypy knows no stores there
        store = distributed.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=self._limit)
        join = partial(
            engine.init_weights_update_group,
            address,
            store.port,
            size,
            ranks_per_worker=self.ranks_per_worker,
            group_name=self.group_name,
            backend=self.backend,
        )
        self._group = await _beside(join, partial(self._joined, store, size))

    def _joined(self, store: Any, size: int) -> Any:
        """The group, as SGLang's workers make it: torch has no public way to a group across two sets of processes."""
        c10d = import_module("torch.distributed.distributed_c10d")
        group, _ = c10d._new_process_group_helper(
            size,
            0,
            [],
            c10d.Backend(self.backend),
            c10d.PrefixStore(self.group_name, store),
            group_name=self.group_name,
            timeout=self._limit,
        )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
        return group

    async def _send(self, update: WeightUpdate, tensors: NamedTensors) -> None:
        names = [name for name, _ in tensors]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors]
        shapes = [list(tensor.shape) for _, tensor in tensors]
        receive = partial(update.from_distributed, names, dtypes, shapes, self.group_name)
        await _beside(receive, partial(self._broadcast, [tensor for _, tensor in tensors]))

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        with _on(tensors[0].device):
            try:
                work = [
                    dist.broadcast(tensor.contiguous(), src=0, group=self._group, async_op=True) for tensor in tensors
                ]
                for each in work:
                    each.wait()
            except RuntimeError as error:
                raise WeightError(f"a worker does not take part in the broadcast: {error}") from error
            if tensors[0].is_cuda:
                torch.cuda.synchronize()


class SharedMemory:
    """To workers on the same machine: they open the memory of rank 0, on the GPU or the CPU, and copy from it.

    On GPUs they must see rank 0's device under the same index.

    :param ranks_per_worker: tensor-parallel ranks of a worker.
    """

    def __init__(self, *, ranks_per_worker: int = 1) -> None:
        self.ranks_per_worker = ranks_per_worker

    @asynccontextmanager
    async def sending(self, engine: SGLangEngine | None, version: str, pause: PauseMode) -> AsyncIterator[Send]:
        async with _needed(engine, self).updating_weights(version, pause) as update:
            yield partial(self._send, update)

    async def _send(self, update: WeightUpdate, tensors: NamedTensors) -> None:
        # What is shared moves to where it is shared: with a copy the model stays where it is.
        copies = [(name, tensor.detach().clone()) for name, tensor in tensors]
        handles = await run_sync(_handles, copies)
        await update.from_tensors([handles] * self.ranks_per_worker)


class Checkpoint:
    """Through a file system: `folder`/`version` becomes a checkpoint in Hugging Face's format, of one file per bucket.

    It is complete when it is there: it is written under another name first, and generation goes on meanwhile. Without
    an engine that is all that happens. A checkpoint of this version that is there already is replaced.

    :param folder: that rank 0 and all workers reach by this path.
    :param like: a folder whose other files (configuration, tokenizer) are copied along.
    """

    def __init__(self, folder: str | Path, *, like: str | Path | None = None) -> None:
        self.folder = Path(folder)
        self.like = None if like is None else Path(like)

    @asynccontextmanager
    async def sending(self, engine: SGLangEngine | None, version: str, pause: PauseMode) -> AsyncIterator[Send]:
        with optional_dependency():
            save = import_module("safetensors.torch").save_file
        whole, part = self.folder / version, self.folder / f"{version}.part"
        if Path(version).name != version or version in ("", ".."):
            raise ValueError(f"Checkpoint: version {version!r} is no name of a folder")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        files: dict[str, str] = {}
        size = 0

        def write(tensors: NamedTensors, path: Path) -> None:
            content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
            save(content, path, metadata={"format": "pt"})

        async def send(tensors: NamedTensors) -> None:
            nonlocal size
            file = f"model-{len(set(files.values())) + 1:05}.safetensors"
            await run_sync(write, tensors, part / file)
            files.update((name, file) for name, _ in tensors)
            size += sum(tensor.nbytes for _, tensor in tensors)

        yield send
        index = {"metadata": {"total_size": size}, "weight_map": files}
        (part / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        for file in [] if self.like is None else self.like.iterdir():
            if file.is_file() and not file.match("*.safetensors*") and file.suffix not in (".bin", ".pt", ".pth"):
                shutil.copy(file, part)
        shutil.rmtree(whole, ignore_errors=True)
        part.rename(whole)
        if engine is not None:
            await engine.update_weights_from_disk(str(whole), version, pause)


def _needed(engine: SGLangEngine | None, transport: Transport) -> SGLangEngine:
    if engine is None:
        raise ValueError(f"send_weights: {type(transport).__name__} needs the engine on rank 0")
    return engine


async def _beside(ask: Callable[[], Awaitable[None]], work: Callable[[], T]) -> T:
    """Ask the workers for their part and do ours meanwhile, in a thread. When theirs fails, ours is left alone; when
    ours fails, they have some seconds to say why."""
    theirs: list[Exception] = []
    ours: list[Exception] = []
    results: list[T] = []
    async with anyio.create_task_group() as tasks:

        async def asked() -> None:
            try:
                await ask()
            except Exception as error:
                theirs.append(error)
                tasks.cancel_scope.cancel()

        tasks.start_soon(asked)
        try:
            results.append(await run_sync(work, abandon_on_cancel=True))
        except Exception as error:
            ours.append(error)
            tasks.cancel_scope.deadline = anyio.current_time() + ANSWER_SECONDS
    if theirs:
        raise theirs[0] from (ours[0] if ours else theirs[0].__cause__)
    if ours:
        raise ours[0]
    return results[0]


def _handles(tensors: NamedTensors) -> str:
    """What SGLang's `MultiprocessingSerializer` makes: it pickles how to open the memory, and no weight."""
    sharing: Any = import_module("torch.multiprocessing")
    pickler: Any = import_module("multiprocessing.reduction").ForkingPickler
    before = sharing.get_sharing_strategy()
    sharing.set_sharing_strategy("file_system")  # the other strategy asks this process for a file, by a secret
    try:
        return base64.b64encode(bytes(pickler.dumps(tensors))).decode()
    finally:
        sharing.set_sharing_strategy(before)


# Parts of weights


class _Part(msgspec.Struct, array_like=True, frozen=True):
    """What a rank has of a weight."""

    name: str
    """In the whole model."""
    shape: list[int]
    dtype: str
    dim: int
    """That the weight is cut along; -1: it is whole."""
    number: int
    count: int
    gated: bool
    """Both halves of the weight are cut for themselves."""

    @property
    def nbytes(self) -> int:
        size: int = getattr(torch, self.dtype).itemsize
        for length in self.shape:
            size *= length
        return size


class _Listed(msgspec.Struct, array_like=True):
    parts: list[_Part]
    error: str | None = None


class _Weight(msgspec.Struct):
    name: str
    parts: list[tuple[int, _Part]]
    """With the rank that has each."""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for _, part in self.parts)


Key: TypeAlias = tuple[str, int]


def _own_parts(model_chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[Key, tuple[_Part, Tensor]]]:
    """What this rank contributes: of equal copies, those of the first data-parallel rank."""
    mpu = import_module("megatron.core.parallel_state")
    dense = _Place(
        mpu.get_data_parallel_rank(with_context_parallel=True) == 0,
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_tensor_model_parallel_world_size(),
    )
    expert = _Place(
        mpu.get_expert_data_parallel_rank() == 0,
        mpu.get_expert_tensor_parallel_rank(),
        mpu.get_expert_tensor_parallel_world_size(),
    )
    for chunk in map(unwrapped, model_chunks):
        rename = _global_names(chunk)
        for local, tensor in chunk.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor) or local.endswith("_extra_state"):
                continue
            if getattr(tensor, "shared", False):  # a copy of the embedding for the output, on the last stage
                continue
            place = expert if ".experts." in local else dense
            name = rename(local)
            dim = _dim(name, tensor, place)
            if not place.first or (dim < 0 and place.number):
                continue
            cut = dim >= 0
            part = _Part(
                name,
                list(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                dim,
                place.number if cut else 0,
                place.count if cut else 1,
                cut and "linear_fc1." in name and bool(chunk.config.gated_linear_unit),
            )
            yield (name, part.number), (part, tensor.detach())


class _Place(msgspec.Struct):
    first: bool
    number: int
    count: int


def _dim(name: str, tensor: Tensor, place: _Place) -> int:
    if place.count == 1:
        return -1
    if ".experts." in name:  # Transformer Engine does not mark those, or marks them wrongly
        if "linear_fc1." in name:
            return 0
        return 1 if tensor.dim() > 1 else -1
    return int(getattr(tensor, "partition_dim", -1)) if getattr(tensor, "tensor_model_parallel", False) else -1


def _global_names(chunk: torch.nn.Module) -> Callable[[str], str]:
    """Layers and experts are numbered from 0 on each rank; modules know their number in the whole model."""
    layers: dict[str, str] = {}
    experts: dict[str, Sequence[int]] = {}
    for path, module in chunk.named_modules():
        if (match := re.fullmatch(r"(.*\.layers)\.\d+", path)) and hasattr(module, "layer_number"):
            layers[path] = f"{match[1]}.{module.layer_number - 1}"
        if hasattr(module, "local_expert_indices") and hasattr(module, "experts"):
            experts[f"{path}.experts"] = module.local_expert_indices

    def rename(name: str) -> str:
        for path, indices in experts.items():
            if name.startswith(f"{path}."):
                rest = name.removeprefix(f"{path}.")
                if match := re.fullmatch(r"local_experts\.(\d+)\.(.+)", rest):
                    name = f"{path}.local_experts.{indices[int(match[1])]}.{match[2]}"
                elif match := re.fullmatch(r"(linear_fc[12]\.(?:weight|bias))(\d+)", rest):
                    name = f"{path}.{match[1]}{indices[int(match[2])]}"
                else:
                    raise WeightError(
                        f"rank {dist.get_rank()}: {name} holds several experts in one tensor, which is not supported: "
                        "build the model with experts of Transformer Engine, or one by one"
                    )
        if match := re.match(r".*?\.layers\.\d+", name):
            name = layers.get(match[0], match[0]) + name[match.end() :]
        return name

    return rename


def _planned(listed: Sequence[_Listed]) -> list[_Weight]:
    """Whole weights, in the order in which ranks list them.

    :raises WeightError: they do not come out whole.
    """
    if errors := [each.error for each in listed if each.error]:
        raise WeightError("; ".join(errors))
    found: dict[str, dict[int, tuple[int, _Part]]] = {}
    for rank, each in enumerate(listed):
        for part in each.parts:
            found.setdefault(part.name, {}).setdefault(part.number, (rank, part))
    weights = []
    for name, parts in found.items():
        first = next(iter(parts.values()))[1]
        if missing := set(range(first.count)) - set(parts):
            raise WeightError(f"{name}: no rank has its tensor-parallel parts {sorted(missing)} of {first.count}")
        kinds = {(tuple(part.shape), part.dtype, part.dim, part.count) for _, part in parts.values()}
        if len(kinds) > 1:
            raise WeightError(f"{name}: its parts do not fit together: {sorted(kinds)}")
        weights.append(_Weight(name, [parts[number] for number in range(first.count)]))
    return weights


def _buckets(weights: Sequence[_Weight], bucket_bytes: int) -> Iterator[list[_Weight]]:
    bucket: list[_Weight] = []
    size = 0
    for weight in weights:
        if bucket and size + weight.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(weight)
        size += weight.nbytes
    if bucket:
        yield bucket


def _moved(
    bucket: Sequence[_Weight], own: dict[Key, tuple[_Part, Tensor]], rank: int, to: int, device: torch.device
) -> dict[Key, Tensor]:
    """On rank `to` all parts of the bucket. What another rank has of it comes as one message."""
    by_rank: dict[int, list[_Part]] = defaultdict(list)
    for weight in bucket:
        for holder, part in weight.parts:
            by_rank[holder].append(part)
    found: dict[Key, Tensor] = {}
    transfers = []
    for holder, parts in by_rank.items():
        if holder == to == rank:
            found |= {(part.name, part.number): own[part.name, part.number][1] for part in parts}
        elif rank in (holder, to):
            places = _laid_out(parts, device)
            if rank == holder:
                for part, place in places:
                    place.copy_(own[part.name, part.number][1])
                transfers.append(dist.P2POp(dist.isend, _message(places), to))
            else:
                found |= {(part.name, part.number): place for part, place in places}
                transfers.append(dist.P2POp(dist.irecv, _message(places), holder))
    for request in dist.batch_isend_irecv(transfers) if transfers else []:
        request.wait()
    return found


def _laid_out(parts: Sequence[_Part], device: torch.device) -> list[tuple[_Part, Tensor]]:
    """Room for these parts, all in one piece of memory."""
    starts = [0]
    for part in parts:
        starts.append(-(-(starts[-1] + part.nbytes) // 16) * 16)  # so that each may be of any dtype
    memory = torch.empty(starts[-1], dtype=torch.uint8, device=device)
    return [
        (part, memory[start : start + part.nbytes].view(getattr(torch, part.dtype)).view(part.shape))
        for part, start in zip(parts, starts, strict=False)
    ]


def _message(places: Sequence[tuple[_Part, Tensor]]) -> Tensor:
    storage = places[0][1].untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _joined(weight: _Weight, tensors: Sequence[Tensor]) -> Tensor:
    part = weight.parts[0][1]
    if len(tensors) == 1:
        return tensors[0]
    if part.gated:
        halves = [tensor.chunk(2, part.dim) for tensor in tensors]
        tensors = [half[0] for half in halves] + [half[1] for half in halves]
    return torch.cat(list(tensors), part.dim)


# Between the ranks


def _on(device: torch.device) -> Any:
    """A thread begins with device 0, whatever the others use."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _next(buckets: Iterator[NamedTensors], device: torch.device) -> NamedTensors | None:
    with _on(device):
        return next(buckets, None)


def _follow(buckets: Iterator[NamedTensors], device: torch.device) -> None:
    """On the other ranks: one bucket after the other, as rank 0 says."""
    bucket: NamedTensors | None = []
    while bucket is not None:
        _told(device)
        try:
            bucket = _next(buckets, device)
        except WeightError:  # which rank 0 meets too, and tells
            break
    _told(device)


def _tell_and_next(buckets: Iterator[NamedTensors], device: torch.device) -> NamedTensors | None:
    _tell(device)
    return _next(buckets, device)


def _tell(device: torch.device, error: str = "") -> None:
    """To all other ranks: go on, or what went wrong."""
    with _on(device):
        data = error.encode()[:10_000]
        dist.broadcast(torch.tensor([len(data)], device=device), src=0)
        if data:
            dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device), src=0)


def _told(device: torch.device) -> None:
    """Wait until rank 0 says that it goes on.

    :raises WeightError: something went wrong.
    """
    with _on(device):
        length = torch.zeros(1, dtype=torch.int64, device=device)
        dist.broadcast(length, src=0)
        if size := int(length.item()):
            data = torch.empty(size, dtype=torch.uint8, device=device)
            dist.broadcast(data, src=0)
            raise WeightError(data.cpu().numpy().tobytes().decode(errors="replace"))


def _all_gathered(listed: _Listed, device: torch.device) -> list[_Listed]:
    data = msgspec.msgpack.encode(listed)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(data)], device=device))
    longest = int(torch.cat(lengths).max())
    padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8).to(device)
    found = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(found, padded)
    return [
        msgspec.msgpack.decode(each.cpu().numpy()[: int(length)].tobytes(), type=_Listed)
        for each, length in zip(found, lengths, strict=True)
    ]


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
