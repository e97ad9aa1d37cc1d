"""Actors that use collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshbook.actor import Actor, context, endpoint


class Learner(Actor):
    @endpoint
    def step(self, fails: int = -1, times: int = 1) -> int:
        """Add ones of all ranks, except that rank ``fails`` raises."""
        if context().actor_instance.rank.rank == fails:
            raise ValueError("bad shard")
        total = torch.ones(1)
        for _ in range(times):
            dist.all_reduce(total)
        return int(total)


class AsyncLearner(Learner):
    @endpoint
    async def step(self, fails: int = -1, times: int = 1) -> int:
        if context().actor_instance.rank.rank == fails:
            raise ValueError("bad shard")
        total = torch.ones(1)
        for _ in range(times):
            dist.all_reduce(total)
        return int(total)
