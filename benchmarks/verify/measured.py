"""Figures of a mesh on a device: calls, collectives, payloads, and a step of mesh tensors beside DDP.

Two ranks share the card and talk over sockets of this machine, so their collectives say nothing of NVLink or of several
cards; their place is beside the figures of another run on such a card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.figures import Figure, side_by_side, timed
from benchmarks.stats import interleave, summarise
from benchmarks.subject import no_op
from benchmarks.tensors import WIDTH, transformer_steps
from benchmarks.verify.checks import TIMEOUT_S, spawn_one, spawn_pair, values
from meshbook.distributed import Mesh

SAMPLES = 5
MEGABYTES = 64
PAYLOAD_MB = 100

ON_RANKS = """
def seconds(operation, size_bytes, count):
    x = torch.ones(size_bytes // 4 // dist.get_world_size(), device=DEVICE)
    y = torch.ones(size_bytes // 4, device=DEVICE)
    run = {
        "all_reduce": lambda: dist.all_reduce(y),
        "all_gather": lambda: dist.all_gather_into_tensor(y, x),
        "broadcast": lambda: dist.broadcast(y, 0),
    }[operation]
    run(); wait_for_device(); dist.barrier()
    started = time.perf_counter()
    for _ in range(count): run()
    wait_for_device()
    return (time.perf_counter() - started) / count
def copy_seconds(run):
    run(); wait_for_device()
    started = time.perf_counter()
    run(); wait_for_device()
    return time.perf_counter() - started
"""


def calls(device: str) -> Iterator[Figure]:
    """Time calls that do nothing, to one rank and to both."""
    with spawn_pair(device) as procs:
        first = procs.slice(hosts=0)
        subjects = {"one": lambda: no_op(first).get(TIMEOUT_S), "all": lambda: no_op(procs).get(TIMEOUT_S)}
        samples = interleave(subjects, rounds=10, per_round=40, warmup=50)
    for name, seconds in samples.items():
        yield timed("verify", f"call {name}", "2 hosts x 1 rank", "us", seconds)


def collectives(device: str) -> Iterator[Figure]:
    """Time collectives of 8 bytes on one rank and on two, and of many bytes on two: those of the result per second."""
    for spawn in (spawn_one, spawn_pair):
        with spawn(device) as procs:
            values(procs, ON_RANKS)
            ranks = len(procs.ranks)
            seconds = [values(procs, "seconds('all_reduce', 8, 200)")[0] for _ in range(SAMPLES)]
            yield timed("verify", "all_reduce", f"8 bytes, {ranks} {'rank' if ranks == 1 else 'ranks'}", "us", seconds)
            if ranks == 1:
                continue
            for operation in ("all_reduce", "all_gather", "broadcast"):
                code = f"seconds({operation!r}, {MEGABYTES * 1_000_000}, 5)"
                rates = [MEGABYTES / 1e3 / values(procs, code)[0] for _ in range(SAMPLES)]
                yield _rate(operation, f"{MEGABYTES} MB, 2 ranks", rates)


def payloads(device: str) -> Iterator[Figure]:
    """Time a tensor's way from this process to a rank, onto its device from pinned memory and not, and back."""
    payload = torch.ones(PAYLOAD_MB * 250_000)
    size, gigabytes = f"{PAYLOAD_MB} MB", PAYLOAD_MB / 1e3
    with spawn_one(device) as procs:
        values(procs, ON_RANKS)

        def push() -> None:
            payload[0] += 1
            procs.push({"payload": payload}).get(TIMEOUT_S)

        subjects: dict[str, Callable[[], Any]] = {"push": push, "pull": lambda: procs.pull("payload").get(TIMEOUT_S)}
        for name, seconds in interleave(subjects, rounds=SAMPLES, per_round=1, warmup=1).items():
            yield _rate(name, size, [gigabytes / each for each in seconds])
        if device == "cuda":
            values(procs, "host, pinned, there = payload.clone(), payload.pin_memory(), payload.cuda()")
            for what, code in (
                ("host to device", "host.cuda()"),
                ("host to device, pinned", "pinned.cuda(non_blocking=True)"),
                ("device to host", "host.copy_(there)"),
                ("device to host, pinned", "pinned.copy_(there, non_blocking=True)"),
            ):
                taken = [values(procs, f"copy_seconds(lambda: {code})")[0] for _ in range(SAMPLES)]
                yield _rate(what, size, [gigabytes / each for each in taken])


def steps_beside_ddp(device: str) -> Iterator[Figure]:
    """Time a transformer's step by mesh tensors, as it is and recorded, in turns with DDP on the same two ranks."""
    with spawn_pair(device) as procs:
        subjects = transformer_steps(Mesh(procs), procs, "hosts", device)
        seconds = interleave(subjects, rounds=10, per_round=1, warmup=2)
    yield from side_by_side("verify", "transformer step", f"4 layers, d {WIDTH}", "ms", seconds)


def _rate(what: str, size: str, rates: list[float]) -> Figure:
    return Figure("verify", what, size, "meshbook", "GB/s", summarise(rates))
