"""Process groups that several use, that break, or that a cell destroys: on real processes."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from learners import Learner
from patience import wait_until

from meshbook import ProcMesh, errors, this_host
from meshbook.actor import Actor, ActorError, endpoint

PROVE = "proof = torch.ones(1)\ndist.all_reduce(proof)\nint(proof)"
RESET = """
import os, socket, stat
for fd in map(int, os.listdir("/proc/self/fd")) if rank == 0 else ():
    try:
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            end = socket.socket(fileno=os.dup(fd))
            if end.family == socket.AF_INET and not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
"""


class Trainer(Actor):
    """Adds in a group of its own until it is told to stop."""

    def __init__(self) -> None:
        self.group = dist.new_group()
        stopping.clear()

    @endpoint
    def train(self) -> int:
        stop, steps = torch.zeros(1), 0
        while not stop.item():
            time.sleep(0.002 * (1 + dist.get_rank()))
            ones = torch.ones(8)
            dist.all_reduce(ones, group=self.group)
            assert ones.tolist() == [4.0] * 8
            stop.fill_(float(stopping.is_set()))
            dist.all_reduce(stop, op=dist.ReduceOp.MAX, group=self.group)
            steps += 1
        return steps


stopping = threading.Event()


def stop_training() -> None:
    """On a rank."""
    stopping.set()


@pytest.mark.parametrize(
    "code",
    [
        "dist.all_gather([torch.zeros(3)] * (1 if rank == 2 else 4), torch.ones(3))",
        "dist.scatter(torch.zeros(3), [torch.ones(3 if to else 2) for to in range(4)] if rank == 0 else None, src=0)",
        "dist.all_to_all_single(torch.zeros(4), torch.ones(4), [1] * 4, [1, 1, 1, 2 if rank == 2 else 1])",
        "dist.send(torch.ones(4, 4)[:, 0], 1) if rank == 2 else dist.recv(torch.ones(4), 2) if rank == 1 else None",
    ],
)
def test_a_rank_whose_collective_raises_frees_the_others(mesh4: ProcMesh, code: str) -> None:
    with pytest.raises(errors.CallFailed):
        mesh4.run(code).get(30)
    assert mesh4.run(PROVE).get(30).values() == [4] * 4


def test_a_collective_that_raised_may_be_begun_again_rightly(mesh4: ProcMesh) -> None:
    code = """
parts = [torch.zeros(2) for _ in range(4)]
try:
    dist.all_gather(parts[1:], torch.ones(2))
except RuntimeError:
    dist.all_gather(parts, torch.full((2,), float(rank)))
[int(part[0]) for part in parts]
"""
    assert mesh4.run(code).get(30).values() == [[0, 1, 2, 3]] * 4


@pytest.mark.quick(
    "if rank == 1: raise ValueError\\nwork = dist.all_reduce(torch.ones(3), async_op=True)\\nraise KeyError"
)
@pytest.mark.parametrize(
    "code",
    [
        "undefined_name",
        "if rank == 1: raise ValueError\ndist.all_reduce(torch.ones(3))",
        "if rank == 1: raise ValueError\nwork = dist.all_reduce(torch.ones(3), async_op=True)\nraise KeyError",
    ],
)
def test_a_cell_that_fails_leaves_actors_that_train_alone(mesh4: ProcMesh, code: str) -> None:
    trainers = mesh4.spawn("trainers", Trainer)
    trainers.initialized.get(30)
    training = trainers.train.call()
    time.sleep(0.1)
    for _ in range(3):
        with pytest.raises(errors.CallFailed):
            mesh4.run(code).get(30)
        assert mesh4.run(PROVE).get(30).values() == [4] * 4
    mesh4.execute(stop_training).get(30)
    assert min(training.get(30).values()) > 3
    trainers.stop().get(30)


@pytest.mark.quick("0.02")
@pytest.mark.parametrize("pause_s", [0.0, 0.02, 0.05, 0.1])
def test_a_call_after_an_actor_has_failed_meets_nothing_of_the_failed_one(mesh4: ProcMesh, pause_s: float) -> None:
    learners = mesh4.spawn("learners", Learner)
    for _ in range(3):
        with pytest.raises(ActorError, match="bad shard"):
            learners.step.call(fails=1).get(30)
        time.sleep(pause_s)
        assert learners.step.call().get(30).values() == [4] * 4
        assert mesh4.run(PROVE).get(30).values() == [4] * 4
    learners.stop().get(30)


def test_a_message_behind_a_call_that_queues_comes_behind_it(mesh4: ProcMesh) -> None:
    learners = mesh4.spawn("learners", Learner)
    with pytest.raises(ActorError):
        learners.step.call(fails=1).get(30)
    again = learners.step.call()
    learners.step.broadcast()
    assert again.get(30).values() == learners.step.call().get(30).values() == [4] * 4
    learners.stop().get(30)


def test_groups_that_a_cell_destroys_are_back_before_the_next(mesh2: ProcMesh) -> None:
    script = f"dist.init_process_group('gloo')\n{PROVE}\ndist.destroy_process_group()"
    for _ in range(2):
        mesh2.run(script).get(30)
        assert mesh2.run(PROVE).get(30).values() == [2] * 2
    mesh2.run("if rank: dist.destroy_process_group()").get(30)
    assert mesh2.run(f"{PROVE}, mesh.get_group() is dist.group.WORLD").get(30).values() == [(2, True)] * 2


INTERRUPTED = """
import torch.distributed.distributed_c10d as c10d
dist.destroy_process_group()
finish = c10d._update_default_pg
def interrupt(group):
    raise KeyboardInterrupt
c10d._update_default_pg = interrupt if rank else finish
try:
    dist.init_process_group("gloo")
except KeyboardInterrupt:
    pass
c10d._update_default_pg = finish
if rank == 0:
    dist.destroy_process_group()
dist.init_process_group("gloo")
dist.group.WORLD.group_name
"""


def test_an_init_that_was_interrupted_on_one_rank_leaves_nothing(mesh2: ProcMesh) -> None:
    assert set(mesh2.run(INTERRUPTED).get(60).values()) == {"0"}
    mesh2.run(PROVE).get(30)


@pytest.mark.slow
def test_a_connection_that_was_reset_is_mended_by_heal_or_after_the_failure(mesh2: ProcMesh) -> None:
    for heals in (True, False):
        mesh2.run(PROVE).get(30)
        mesh2.run(RESET).get(30)
        if heals:
            assert "process groups were broken and are formed again" in str(mesh2.heal())
            assert str(mesh2.heal()) == 'mesh "two" is whole: nothing to heal'
        else:
            with pytest.raises(errors.CallFailed):
                mesh2.run(PROVE).get(30)
        assert mesh2.run(PROVE).get(30).values() == [2] * 2


def test_groups_of_a_cells_own_that_broke_and_are_gone_cost_nothing() -> None:
    code = """
from datetime import timedelta
import time
dist.init_process_group("gloo")
if rank == 0:
    try:
        dist.all_reduce(torch.ones(1), async_op=True).wait(timedelta(seconds=0.1))
    except RuntimeError:
        pass
else:
    time.sleep(0.3)
dist.destroy_process_group()
raise ValueError
"""
    with this_host().spawn_procs({"gpus": 2}, device="cpu", group=False) as mesh:
        for _ in range(3):
            with pytest.raises(errors.CallFailed, match="ranks 0,1 raised ValueError"):
                mesh.run(code).get(30)
        assert mesh.run("rank").get(30).values() == [0, 1] and not mesh.lost


@pytest.mark.slow
def test_groups_that_were_formed_again_leave_no_threads_of_gloo(mesh2: ProcMesh) -> None:
    def threads() -> list[int]:
        return mesh2.execute(_threads_of_gloo).get(30).values()

    mesh2.run(PROVE).get(30)
    before = threads()
    for _ in range(4):
        with pytest.raises(errors.CallFailed, match="missing"):
            mesh2.run("if rank: raise ValueError('missing')\ndist.all_reduce(torch.ones(1))").get(30)
        assert mesh2.run(PROVE).get(30).values() == [2, 2]
    wait_until(lambda: max(threads()) <= before[0] + 1)  # the last error's frames are kept, and a group with them


def _threads_of_gloo() -> int:
    gc.collect()  # the frames of errors hold groups, in circles
    found = 0
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has just ended
            found += Path(f"/proc/self/task/{thread}/comm").read_text().startswith("gloo_tcp_loop")
    return found


@pytest.mark.quick("2")
@pytest.mark.parametrize("missing", [1, 2, 3])
def test_the_first_monitored_barrier_names_who_did_not_come_in_its_time(missing: int) -> None:
    """On a fresh mesh no two ranks have a connection yet, for which C++ would wait without an end."""
    with this_host().spawn_procs({"gpus": 4}, device="cpu") as mesh:
        barrier = "dist.monitored_barrier(timeout=timedelta(seconds=1))"
        future = mesh.run(f"from datetime import timedelta\nif rank != {missing}: {barrier}")
        with pytest.raises(errors.CallFailed, match=f"Rank {missing} failed to pass monitoredBarrier in 1000 ms"):
            future.get(30)
        assert mesh.run("t = torch.ones(1); dist.all_reduce(t); t.item()").get(30).values() == [4.0] * 4
