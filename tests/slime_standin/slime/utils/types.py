from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass
class _Counts:
    def to_dict(self) -> dict[str, int]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, counts: dict[str, int]) -> Any:
        return cls(**counts)


@dataclass
class _SpecInfo(_Counts):
    spec_accept_token_num: int = 0
    completion_token_num: int = 0


@dataclass
class _PrefixCacheInfo(_Counts):
    cached_tokens: int = 0
    total_prompt_tokens: int = 0


class _Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    Status = _Status
    SpecInfo = _SpecInfo
    PrefixCacheInfo = _PrefixCacheInfo

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: _Status = _Status.PENDING
    metadata: dict[Any, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[Any, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: _SpecInfo = field(default_factory=_SpecInfo)
    prefix_cache_info: _PrefixCacheInfo = field(default_factory=_PrefixCacheInfo)

    def to_dict(self) -> dict[str, Any]:
        counts = {name: getattr(self, name).to_dict() for name in ("spec_info", "prefix_cache_info")}
        return {**vars(self), "status": self.status.value, **counts}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Sample:
        sample = Sample()
        for name, value in data.items():
            setattr(sample, name, value)
        sample.status = _Status(data["status"])
        sample.spec_info = _SpecInfo.from_dict(data.get("spec_info", {}))
        sample.prefix_cache_info = _PrefixCacheInfo.from_dict(data.get("prefix_cache_info", {}))
        return sample

    def get_reward_value(self, args: Any) -> Any:
        return self.reward[args.reward_key] if args.reward_key else self.reward
