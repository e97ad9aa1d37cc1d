"""Recoveries from a rank that raises while the others wait in collectives, under mixed traffic."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeout

from benchmarks.figures import Figure, Goal, Settings, timed
from benchmarks.stats import summarise
from benchmarks.subject import TIMEOUT_S, mesh
from meshbook import ProcMesh, errors
from meshbook.mesh import states

QUESTION = (
    "A random rank raises under traffic (small and large all_reduce, DTensor, sub-groups, sends): time from the raise "
    "until every rank has ended the cell, and until the next collective over the groups formed again has counted all."
)
RECOVERIES = 300
PREPARE = """
import time, os
from torch.distributed.tensor import Shard, distribute_tensor
axis = mesh[mesh.mesh_dim_names[0]].get_group()
halves = [dist.new_group(list(range(world_size // 2))), dist.new_group(list(range(world_size // 2, world_size)))]
half = halves[rank >= world_size // 2]
sharded = distribute_tensor(torch.arange(64.0).reshape(8, 8), mesh, [Shard(0)])
"""
TRAFFIC = {
    "small": "dist.all_reduce(torch.ones(1000))",
    "big": "dist.all_reduce(torch.ones(1_000_000))",
    "dtensor": "(sharded @ sharded.t()).full_tensor()",
    "groups": "dist.all_reduce(torch.ones(100), group=half); dist.broadcast(torch.ones(100), 0); dist.barrier()",
    "sends": (
        "sending = dist.isend(torch.ones(50_000), (rank + 1) % world_size); "
        "dist.recv(torch.ones(50_000), (rank - 1) % world_size); sending.wait()"
    ),
}
CELL = """
until = time.monotonic() + {busy_s}
while True:
    {traffic}
    if rank == {victim} and time.monotonic() > until:
        raise ValueError(f"raised at {{time.monotonic()}}")
"""
CHECK = """
ones = torch.ones(1)
dist.all_reduce(ones)
half_ones = torch.ones(1)
dist.all_reduce(half_ones, group=half)
assert sharded.full_tensor().sum().item() == 2016 and half_ones.item() == world_size // 2
(ones.item(), time.monotonic())
"""
HELD = "(len(os.listdir('/proc/self/task')), len(os.listdir('/proc/self/fd')))"


def run(settings: Settings) -> Iterator[Figure]:
    """One mesh per size; every recovery goes through the same cells that a person would run."""
    for ranks in (4, 8):
        yield from _recover(ranks, settings.count(RECOVERIES))


def _recover(ranks: int, count: int) -> Iterator[Figure]:
    chance = random.Random(ranks)
    ended, whole = [], []
    with mesh(ranks) as procs:
        procs.run(PREPARE).get(TIMEOUT_S)
        before = _held(procs)
        for _ in range(count):
            traffic, victim = TRAFFIC[chance.choice(list(TRAFFIC))], chance.randrange(ranks)
            raised_at, ended_at = _fail(procs, traffic, victim, chance.uniform(0.02, 0.3))
            counted = procs.run(CHECK).get(TIMEOUT_S).values()
            if {number for number, _ in counted} != {float(ranks)}:
                raise AssertionError(f"the groups that were formed again counted {counted}")
            ended.append(ended_at - raised_at)
            whole.append(max(at for _, at in counted) - raised_at)
        time.sleep(8)  # helper threads end when idle
        after = _held(procs)
    size = f"{ranks} ranks, {count} recoveries"
    yield timed("recoveries", "all ranks ended", size, "ms", ended, goal=Goal("at most", 300))
    yield timed("recoveries", "next collective done", size, "ms", whole, goal=Goal("at most", 500))
    for moment, held in (("before", before), ("after", after)):
        for what, numbers in zip(("threads", "descriptors"), zip(*held, strict=True), strict=True):
            summary = summarise([float(number) for number in numbers])
            yield Figure("recoveries", f"{what} per rank {moment}", size, "meshbook", "count", summary)


def _fail(procs: ProcMesh, traffic: str, victim: int, busy_s: float) -> tuple[float, float]:
    """Run a cell in which ``victim`` raises; returns when it did, and when all ranks had ended."""
    future = procs.run(CELL.format(traffic=traffic, victim=victim, busy_s=busy_s))
    try:
        future.get(TIMEOUT_S)
    except errors.CallFailed as error:
        ended_at = time.monotonic()
        texts = [failure.evalue for failure in error.failures if failure.rank == victim]
        return float(texts[0].removeprefix("raised at ")), ended_at
    except FutureTimeout:
        raise AssertionError(f"ranks were never freed: {states.where(procs)}") from None
    raise AssertionError("nobody raised")


def _held(procs: ProcMesh) -> list[tuple[int, int]]:
    """Threads and descriptors of each rank."""
    return list(procs.run(HELD).get(TIMEOUT_S).values())
