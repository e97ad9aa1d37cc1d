"""Forming a group in the template, before ranks are forked from it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import gc, json, os, sys, threading
from meshbook.launchers.templates import WITH_TORCH, _ENVIRONMENT
from meshbook.worker import template
os.environ.update(_ENVIRONMENT)
shell = template.preload(template.STANDARD_PRELOAD)
template._import(WITH_TORCH)
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from meshbook.concurrency import patches
from meshbook.groups import rank_groups
from meshbook.wire import messages as wire
from meshbook.wire.kv_store import KeyValueStore

ALONE = wire.Identity(
    mesh=0, name="", host="", device="cpu", rank=0, world_size=1, local_rank=0, local_world_size=1, host_rank=0,
    hosts=1, axes=("gpus",), sizes=(1,), threads=1,
)

def private_kb():
    with open("/proc/self/smaps_rollup") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private"))

def formed_by_a_fork():
    '''How much private memory it takes a fork to form a group, in kB; -1 if it cannot.'''
    read, write = os.pipe()
    if os.fork() == 0:
        grown = -1
        try:
            before = private_kb()
            groups = rank_groups.RankGroups()
            store = KeyValueStore()
            groups.form(lambda op, timeout_s, answer: store.request(0, 0, op)[0][2], ALONE, epoch=0)
            groups.prove()
            grown = private_kb() - before
        finally:
            os.write(write, b"%d" % grown)
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        grown = int(told.read())
    os.wait()
    return grown

def state():
    return {
        "threads": len(os.listdir("/proc/self/task")), "files": sorted(os.listdir("/proc/self/fd")),
        "environment": dict(os.environ), "patches": sorted(name for _, name in patches._originals),
        "hook": repr(sys.excepthook), "helper": c10d._new_process_group_helper.__qualname__,
        "group": dist.is_initialized(), "names": len(c10d._world.pg_names), "count": c10d._world.group_count,
        "own": rank_groups._own is None,
    }

gc.freeze()
before, first = state(), formed_by_a_fork()
for _ in range(2):
    template.rehearse_groups()
    gc.collect()
gc.freeze()
print(json.dumps([before, state(), first, formed_by_a_fork()]))
"""


@pytest.mark.slow
def test_a_rehearsal_leaves_nothing_but_memory_that_forks_need_no_more() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, check=True, timeout=300)
    before, after, first, second = json.loads(done.stdout)
    assert after == before and before["threads"] == 1 and before["own"] and not before["group"]
    assert 0 < second < first - 500, (first, second)
