"""Several copies as one: `RDMAAction`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from buffer_ranks import Owner

from meshbook import ProcMesh
from meshbook.actor import BufferDroppedError, BufferKindError, BufferSizeError
from meshbook.monarch.rdma import RDMAAction, RDMABuffer, get_rdma_backend

pytestmark = pytest.mark.slow

BIG = 3_000_001


def make(procs: ProcMesh, count: int, *values: float) -> list[RDMABuffer]:
    owners = procs.spawn("owner", Owner)
    return [owners.slice(gpus=rank).make.call_one(count, value).get(20) for rank, value in enumerate(values)]


@pytest.mark.parametrize("count", [4, BIG])
def test_copies_are_made_together_and_again(mesh4: ProcMesh, count: int) -> None:
    first, second = make(mesh4, count, 1.5, 2.5)
    mine, update = torch.zeros(count), torch.full((count,), 7.0)
    action = RDMAAction().read_remote(mine, first).write_remote(second, update)
    assert len(action) == 2
    action.submit().get(20)
    there = torch.zeros(count)
    second.read_into(there).get(20)
    assert (mine == 1.5).all() and (there == 7.0).all()
    update.fill_(9.0)
    asyncio.run(_await(action.submit(timeout=20)))
    second.read_into(there).get(20)
    assert (there == 9.0).all()
    RDMAAction().submit().get(20)
    assert (first.backend, get_rdma_backend()) == ("tcp", "tcp")


async def _await(future: Any) -> None:
    await future


def test_what_does_not_fit_is_refused_where_it_is_added(mesh4: ProcMesh) -> None:
    (buffer,) = make(mesh4, 4, 1.5)
    mine = torch.zeros(4)
    with pytest.raises(BufferSizeError, match="dst has 8 bytes, the buffer 16"):
        RDMAAction().read_remote(mine[:2], buffer)
    with pytest.raises(BufferKindError, match="dst is read-only"):
        RDMAAction().read_remote(b"x" * 16, buffer)
    action = RDMAAction().read_remote(mine, buffer)
    with pytest.raises(BufferKindError, match="two copies of one action use the same memory"):
        action.write_remote(buffer, mine[1:])
    assert len(action) == 1
    RDMAAction().write_remote(buffer, mine).write_remote(buffer, mine)  # nothing is written here


def test_all_copies_end_before_the_failure_of_one_is_told(mesh4: ProcMesh) -> None:
    first, second, third = make(mesh4, 1000, 1.5, 2.5, 3.5)
    mine = [torch.zeros(1000) for _ in range(3)]
    action = RDMAAction()
    for memory, buffer in zip(mine, (first, second, third), strict=True):
        action.read_remote(memory, buffer)
    first.drop().get(20)
    third.drop().get(20)
    with pytest.raises(BufferDroppedError) as raised:
        action.submit().get(20)
    assert (mine[1] == 2.5).all() and not mine[0].any()
    assert len(getattr(raised.value, "__notes__", [])) == 1
