"""Saves of what ranks hold, beside plain torch.distributed.checkpoint on the same ranks."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator

import meshbook
from benchmarks.figures import Figure, Goal, Settings, side_by_side, timed
from benchmarks.subject import TIMEOUT_S, mesh
from meshbook import ProcMesh

QUESTION = (
    "Save and restore what 2 ranks hold: replicas, as of DDP, and parts of DTensors, as of FSDP2. Floor: dcp.save and "
    "dcp.load of the same tensors on the same ranks, in turns; both write to one disk and wait for it. An asynchronous "
    "save: the time that it holds the ranks. Floor: clone() of the tensors that a rank has."
)
RANKS = 2
TENSORS = 16
SETUP = """
import meshbook, shutil, time, torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor

count, rows = {tensors}, {size} // {tensors} // 4096
torch.manual_seed(0)
replicas = {{f"w{{at}}": torch.randn(rows, 1024) for at in range(count)}}
parts = {{name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in replicas.items()}}

def timed(action):
    dist.barrier()
    began = time.perf_counter()
    done = action()
    return time.perf_counter() - began, done

def remove():
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    dist.barrier()

def measure(state, turn):
    times = {{}}
    ways = {{
        "dcp": (lambda: dcp.save(state, checkpoint_id=folder), lambda: dcp.load(state, checkpoint_id=folder)),
        "meshbook": (lambda: meshbook.save(folder, state), lambda: meshbook.restore(folder, state)),
    }}
    for name in list(ways)[:: -1 if turn % 2 else 1]:
        times["save", name], _ = timed(ways[name][0])
        times["restore", name], _ = timed(ways[name][1])
        remove()  # so that each one finds as much free memory for its files
    own = [getattr(each, "_local_tensor", each) for each in state.values()]
    times["held", "clone"], copies = timed(lambda: [each.clone() for each in own])
    del copies
    times["held", "meshbook"], future = timed(lambda: meshbook.save(folder, state, wait=False))
    future.get({timeout})
    remove()
    return times
"""


def run(settings: Settings) -> Iterator[Figure]:
    """Measure replicas and parts in turns, and then small variables by a call from the notebook."""
    size = 64 << 20 if settings.quick else 256 << 20
    with mesh(RANKS) as procs, tempfile.TemporaryDirectory() as folder:
        begin = SETUP.format(tensors=TENSORS, size=size, timeout=TIMEOUT_S)
        procs.run(f"folder = {folder + '/large'!r}\n{begin}").get(TIMEOUT_S)
        for name in ("replicas", "parts"):
            yield from _beside(procs, name, f"{size >> 20} MB in {name}", settings.count(15))
    with mesh(RANKS) as procs, tempfile.TemporaryDirectory() as folder:
        procs.run("losses, step, x = [0.5] * 100, 7, torch.ones(1000)").get(TIMEOUT_S)
        seconds = [_save_small(procs, folder) for _ in range(settings.count(20) + 1)][1:]
    yield timed("saves", "%mesh save", "4 kB", "ms", seconds)


def _beside(procs: ProcMesh, name: str, size: str, turns: int) -> Iterator[Figure]:
    found: dict[str, dict[str, list[float]]] = {"save": {}, "restore": {}, "held": {}}
    for turn in range(turns + 1):
        told = procs.run(f"measure({name}, {turn})").get(TIMEOUT_S).values()
        for what, subject in told[0]:
            if turn:  # the first one touches new memory
                found[what].setdefault(subject, []).append(max(each[what, subject] for each in told))
    yield from side_by_side("saves", "save", size, "ms", found["save"], goals={"dcp": Goal("x floor", 1.1)})
    yield from side_by_side("saves", "restore", size, "ms", found["restore"], goals={"dcp": Goal("x floor", 1.1)})
    yield from side_by_side("saves", "held", size, "ms", found["held"], goals={"clone": Goal("x floor", 1.2)})


def _save_small(procs: ProcMesh, folder: str) -> float:
    began = time.perf_counter()
    meshbook.save(folder, procs=procs, keep=2)
    return time.perf_counter() - began
