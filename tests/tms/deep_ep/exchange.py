"""Tokens that go to other ranks and come back, over gloo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def experts_of(chosen: Tensor, experts: int) -> Tensor:
    """[tokens, k], -1 for none, to [tokens, experts]: whether it is among them."""
    return F.one_hot(chosen + 1, experts + 1).sum(1)[:, 1:].bool()


class Routes:
    """Which tokens of each rank go to which places of each rank.

    :param wanted: [tokens of this rank, ranks * places].
    """

    def __init__(self, group: Any, wanted: Tensor) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.tokens = len(wanted)
        every = self._gathered(wanted)
        here = wanted.shape[1] // len(every)
        self.rows = [
            [
                (source, theirs[:, place].nonzero()[:, 0])
                for place in range(target * here, (target + 1) * here)
                for source, theirs in enumerate(every)
            ]
            for target in range(len(every))
        ]
        """For each rank what it gets, by place, then by the rank that it is from."""
        own = slice(self.rank * here, (self.rank + 1) * here)
        self.counts: list[int] = torch.cat(every)[:, own].sum(0).tolist()
        """Tokens that this rank gets, by place."""
        self.places = torch.arange(own.start, own.stop).repeat_interleave(torch.tensor(self.counts))
        """Of each of them, in [0, ranks * places)."""

    def send(self, values: Tensor) -> Tensor:
        every = self._gathered(values)
        return torch.cat([every[source][rows] for source, rows in self.rows[self.rank]])

    def back(self, values: Tensor) -> Tensor:
        """To where they are from, summed."""
        found = values.new_zeros(self.tokens, *values.shape[1:])
        for rows, theirs in zip(self.rows, self._gathered(values), strict=True):
            pieces = torch.split(theirs, [len(own) for _, own in rows])
            for (source, own), piece in zip(rows, pieces, strict=True):
                if source == self.rank:
                    found.index_add_(0, own, piece)
        return found

    def _gathered(self, values: Tensor) -> list[Tensor]:
        every: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(every, values.detach(), group=self.group)
        return every
