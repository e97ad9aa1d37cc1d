"""Several copies as one: `RDMAAction`."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import torch
from buffer_ranks import Adder, Owner

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


@pytest.fixture
def counters(mesh2x2: ProcMesh) -> Owner:
    owner: Any = mesh2x2.slice(hosts=0, gpus=0).spawn("owner", Owner)
    return cast("Owner", owner)


def test_additions_of_all_ranks_of_two_hosts_come_one_after_the_other(mesh2x2: ProcMesh, counters: Any) -> None:
    buffer = counters.make_counter.call_one(-1).get(20)
    adders = mesh2x2.spawn("adders", Adder)
    found = adders.add.call(buffer, 50).get(60).values()
    assert sorted(value for each in found for value in each) == list(range(-1, 199))
    assert counters.count.call_one().get(20) == 199
    adders.stop().get(20)


def test_one_rank_alone_takes_what_is_free(mesh2x2: ProcMesh, counters: Any) -> None:
    buffer = counters.make_counter.call_one(0).get(20)
    takers = mesh2x2.spawn("takers", Adder)
    calls = [takers.slice(hosts=rank // 2, gpus=rank % 2).take.call_one(buffer, rank + 1) for rank in range(4)]
    found = [call.get(60) for call in calls]
    holder = counters.count.call_one().get(20)
    assert found.count(0) == 1 and found[holder - 1] == 0 and set(found) == {0, holder}
    takers.stop().get(20)


def test_an_action_with_additions_is_submitted_again_while_it_is_under_way(mesh2x2: ProcMesh, counters: Any) -> None:
    buffer = counters.make_counter.call_one(2**63 - 3).get(20)
    was = torch.zeros(2, dtype=torch.int64)
    action = RDMAAction().fetch_add(buffer, was[:1], 2).fetch_add(buffer, was[1:], -1)
    for submitted in [action.submit() for _ in range(10)]:
        submitted.get(20)
    assert counters.count.call_one().get(20) == 2**63 - 3 + 10 - 2**64
    own = torch.tensor([5])
    ours = RDMABuffer(own)
    RDMAAction().compare_and_swap(ours, was[:1], 5, -7).submit().get(20)
    ours.drop().get(20)
    assert (int(own), int(was[0])) == (-7, 5)


def test_numbers_that_cannot_be_changed_are_refused(mesh2x2: ProcMesh, counters: Any) -> None:
    buffer, was = counters.make_counter.call_one(0).get(20), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="add is a whole number of 8 bytes"):
        RDMAAction().fetch_add(buffer, was, 2**64)
    with pytest.raises(ValueError, match="compare is a whole number"):
        RDMAAction().compare_and_swap(buffer, was, 1.5, 0)  # type: ignore[arg-type]
    with pytest.raises(BufferSizeError, match="dst has 4 bytes; a number takes 8"):
        RDMAAction().fetch_add(buffer, bytearray(4), 1)
    for memory, error, why in (
        (bytearray(4), BufferSizeError, "has 4 bytes; a number takes 8"),
        (bytes(8), BufferKindError, "is read-only; give memory that can be written"),
    ):
        other = RDMABuffer(memory)
        with pytest.raises(error, match=why):
            RDMAAction().fetch_add(other, was, 1)
        other.drop().get(20)
    with pytest.raises(BufferKindError, match="two copies of one action"):
        RDMAAction().fetch_add(buffer, was, 1).fetch_add(buffer, was, 1)
    buffer.drop().get(20)
    with pytest.raises(BufferDroppedError):
        RDMAAction().fetch_add(buffer, was, 1).submit().get(20)
    with pytest.raises(BufferDroppedError):
        own = RDMABuffer(bytearray(8))
        own.drop().get(20)
        RDMAAction().fetch_add(own, was, 1).submit().get(20)
