"""What it costs to read and write the memory of another process: `RDMABuffer`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import torch

from benchmarks.figures import Figure, Goal, Settings
from benchmarks.stats import interleave, summarise
from benchmarks.subject import TIMEOUT_S, mesh
from meshbook import LocalLauncher, ProcMesh, start_hosts
from meshbook.mesh.proc_view import arrange_ranks
from meshbook.monarch import RDMABuffer

QUESTION = (
    "A rank reads a buffer of another, whose main thread is in a cell that waits, into memory that it has used before, "
    "and writes to it: both on one host, and on two agents over TCP on loopback. Floor: one copy of the same bytes "
    "within the reading rank, in turns with it."
)
MEGABYTES = (1, 100)


def run(settings: Settings) -> Iterator[Figure]:
    """Both sizes, both roads."""
    with ExitStack() as stack:
        here = stack.enter_context(mesh(2, group=False))
        hosts = start_hosts({"hosts": 2}, LocalLauncher(separate_hosts=True))
        apart = stack.enter_context(hosts.spawn_procs({"gpus": 1}, name="apart", group=False))
        for where, procs in (("one host", here), ("two agents", apart)):
            for megabytes in MEGABYTES:
                yield from _between(where, procs, megabytes, settings.count(200 if megabytes == 1 else 15))


def _between(where: str, procs: ProcMesh, megabytes: int, rounds: int) -> Iterator[Figure]:
    size = megabytes * 1_000_000
    owner, reader = (arrange_ranks(procs, {"rank": 1}, [rank]) for rank in (0, 1))
    buffer = owner.execute(make, size).get(TIMEOUT_S).values()[0]
    busy = owner.execute(time.sleep, 3.0)
    samples = reader.execute(copies, buffer, rounds).get(TIMEOUT_S).values()[0]
    busy.get(TIMEOUT_S)
    rates = {name: summarise([size / 1e9 / s for s in seconds]) for name, seconds in samples.items()}
    floor = rates.pop("memcpy")
    yield Figure("buffers", "memcpy", f"{megabytes} MB, {where}", "memcpy", "GB/s", floor)
    for what, rate in rates.items():
        ratio = floor.median / rate.median
        goal = Goal("x floor", 1.1) if megabytes >= 100 and where == "one host" else None
        yield Figure("buffers", what, f"{megabytes} MB, {where}", "meshbook", "GB/s", rate, "memcpy", ratio, goal)


# ---- on the ranks --------------------------------------------------------------------------------------------------


def make(size_bytes: int) -> RDMABuffer:
    """Memory whose pages all exist."""
    return RDMABuffer(torch.ones(size_bytes, dtype=torch.uint8))


def copies(buffer: RDMABuffer, rounds: int) -> dict[str, list[float]]:
    """Seconds of each."""
    mine, other = torch.zeros(buffer.size(), dtype=torch.uint8), torch.ones(buffer.size(), dtype=torch.uint8)
    subjects = {
        "memcpy": lambda: mine.copy_(other),
        "read_into": lambda: buffer.read_into(mine).get(TIMEOUT_S),
        "write_from": lambda: buffer.write_from(other).get(TIMEOUT_S),
    }
    seconds = interleave(subjects, rounds=rounds, per_round=1, warmup=2)
    mine.zero_()
    buffer.read_into(mine).get(TIMEOUT_S)
    assert bool((mine == 1).all())
    buffer.drop().get(TIMEOUT_S)
    return seconds
