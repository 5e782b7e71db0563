"""The rewards that slime brings; here one of them."""

from typing import Any

from ..utils.types import Sample


async def async_rm(args: Any, sample: Sample) -> float:
    if (sample.metadata.get("rm_type") or args.rm_type) != "label":
        raise NotImplementedError(args.rm_type)
    return float(sample.response == sample.label)


async def batched_async_rm(args: Any, samples: list[Sample]) -> list[float]:
    return [await async_rm(args, sample) for sample in samples]
