"""Ranks that wait for others in vain come back, and the process groups work again: on real processes.

The mesh of most tests is the same: that it is as good as new after each of them is what they are about.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from collector import Collector
from patience import wait_until

from meshbook import ProcMesh, errors, this_host
from meshbook.calls.output import Notice, RankDone
from meshbook.controller.host_state import HostState
from meshbook.controller.recovery import TELL_S
from meshbook.mesh import states
from meshbook.mesh.rank_calls import abort_groups, set_axes, start_cell
from meshbook.wire import messages as wire

BACK_S = 5.0
"""A generous limit for what takes a tenth of a second on a quiet machine."""

CHECK = "t = torch.ones(1)\ndist.all_reduce(t)\nint(t.item()), kept"


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest) -> Iterator[None]:
    """Around each test with a lasting mesh: names and groups are there after it as before."""
    names = {"mesh4", "square"} & set(request.fixturenames)
    meshes = [request.getfixturevalue(name) for name in names]
    for mesh in meshes:
        mesh.run("kept = rank * 10").get(30)
    yield
    for mesh in meshes:
        assert mesh.run(CHECK).get(30).values() == [(4, rank * 10) for rank in range(4)]


def fail(mesh: ProcMesh, code: str, limit_s: float = BACK_S) -> errors.CallFailed:
    """Run a cell that must fail, and be over in time."""
    run = start_cell(mesh, code, on_output=Collector(), cell_number=7, line_offset=1)
    started = time.monotonic()
    with pytest.raises(errors.CallFailed) as caught:
        run.future.get(30)
    assert time.monotonic() - started < limit_s
    return caught.value


# ---- who waits is freed --------------------------------------------------------------------------------------------


def test_ranks_that_wait_for_a_rank_that_raised_are_freed_at_once(mesh4: ProcMesh) -> None:
    collector = Collector()
    code = "t = torch.ones(3)\nif rank == 1:\n    raise ValueError('bad shard')\ndist.all_reduce(t)"
    started = time.monotonic()
    run = start_cell(mesh4, code, on_output=collector, cell_number=7, line_offset=1)
    with pytest.raises(errors.CallFailed) as caught:
        run.future.get(30)
    assert time.monotonic() - started < BACK_S
    error = caught.value
    assert error.ranks == (1,)
    assert error.freed == dict.fromkeys((0, 2, 3), "all_reduce (cell 7, line 5)")
    assert 0 < error.freed_s < BACK_S
    first, second = str(error).splitlines()
    assert first == "rank 1 raised ValueError: bad shard (cell 7, line 4)"
    assert second.startswith("  ranks 0,2,3 were waiting in all_reduce (cell 7, line 5); freed after 0.")
    assert second.endswith(" s, all variables kept")
    ends = [event for event in collector.events if isinstance(event, RankDone)]
    assert ends[0].rank == 1 and ends[0].failure is not None  # told at once, before the others are free
    assert all(not end.ok and end.failure is None for end in ends[1:])


@pytest.mark.parametrize(
    ("wait", "place"),
    [
        ("dist.barrier()", "barrier"),
        ("torch.ones(1, requires_grad=True)\n    dist.broadcast(torch.ones(1), src=1)", "broadcast"),
        ("dist.recv(torch.ones(1), src=1)", "recv from rank 1"),
        ("dist.all_gather_object([None] * 4, 'a')", "all_gather"),
        ("dist.all_reduce(torch.ones(1), async_op=True).wait()", "all_reduce"),
    ],
)
def test_whatever_they_wait_in(mesh4: ProcMesh, wait: str, place: str) -> None:
    error = fail(mesh4, f"if rank == 1:\n    1 / 0\nelse:\n    {wait}")
    assert error.ranks == (1,)
    assert sorted(error.freed) == [0, 2, 3]
    assert all(text.startswith(f"{place}") and "(cell 7, line" in text for text in error.freed.values())


def test_a_receive_from_anybody_is_freed_when_nobody_can_send(mesh4: ProcMesh) -> None:
    error = fail(mesh4, "if rank == 1:\n    1 / 0\nif rank == 0:\n    dist.recv(torch.ones(1))")
    assert error.freed == {0: "recv from any rank (cell 7, line 5)"}
    assert sorted(error.partial) == [2, 3]


def test_a_large_send_is_freed(mesh4: ProcMesh) -> None:
    error = fail(mesh4, "if rank == 1:\n    1 / 0\nif rank == 0:\n    dist.send(torch.ones(1 << 22), dst=1)")
    assert error.freed == {0: "send to rank 1 (cell 7, line 5)"}


def test_who_waits_for_those_that_wait_is_freed_too(square: ProcMesh) -> None:
    """Rank 1 raises; 0 waits for it along tp; 2 waits for 0 along dp, 3 for 2 along tp."""
    code = (
        "dp, tp = mesh['dp'].get_group(), mesh['tp'].get_group()\nt = torch.ones(1)\n"
        "if rank == 1:\n    raise ValueError('bad shard')\n"
        "if rank == 0:\n    dist.all_reduce(t, group=tp)\n"
        "if rank == 2:\n    dist.barrier(group=dp)\n"
        "dist.all_reduce(t, group=tp)"
    )
    error = fail(square, code)
    assert error.ranks == (1,)
    assert sorted(error.freed) == [0, 2, 3]
    for rank, operation, line in ((0, "all_reduce", 7), (2, "barrier", 9), (3, "all_reduce", 10)):
        place = f"(cell 7, line {line})"  # of one that came when its group had been given up, the place alone is known
        assert error.freed[rank] in (f"{operation} {place}", f"a collective {place}")
    assert "ranks 0 was" not in str(error) and f"rank 2 was waiting in {error.freed[2]}" in str(error)


def test_groups_of_a_part_that_lacks_nobody_go_on_until_they_need_the_others(square: ProcMesh) -> None:
    """Ranks 2 and 3 end the cell; only rank 0 waits."""
    code = (
        "t = torch.ones(1)\nif rank == 1:\n    raise ValueError('bad shard')\n"
        "dist.all_reduce(t, group=mesh['tp'].get_group())\nt.item()"
    )
    error = fail(square, code)
    assert list(error.freed) == [0]
    assert dict(error.partial) == {2: 2.0, 3: 2.0}


def test_a_backward_pass_is_freed_and_the_module_trains_on(mesh4: ProcMesh) -> None:
    mesh4.run(
        "from torch.nn.parallel import DistributedDataParallel\n"
        "model = DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "def step():\n    model.zero_grad(); model(torch.ones(2, 4) * rank).sum().backward()\n"
        "    return model.module.weight.grad[0, 0].item()\n"
        "step()"
    ).get(60)
    error = fail(mesh4, "if rank == 1:\n    raise ValueError('bad shard')\nloss = step()")
    assert error.ranks == (1,) and sorted(error.freed) == [0, 2, 3]
    for _ in range(2):
        assert mesh4.run("step()").get(30).values() == [3.0] * 4  # 2 rows of 0, 1, 2, 3: the mean


def test_all_handles_are_good_after_it(square: ProcMesh) -> None:
    square.run(
        "from torch.distributed.tensor import DTensor, Shard, distribute_tensor\n"
        "big = distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Shard(0)])\n"
        "mine = dist.new_group([0, 3])\n"
        "seen = (id(mesh), id(mine), id(dist.group.WORLD))"
    ).get(60)
    for _ in range(3):
        fail(square, "if rank == 2:\n    1 / 0\ndist.barrier()")
        code = (
            "import torch\nt = torch.ones(1) * (rank + 1)\n"
            "if rank in (0, 3):\n    dist.all_reduce(t, group=mine)\n"
            "same = seen == (id(mesh), id(mine), id(dist.group.WORLD))\n"
            "(same, big.full_tensor().sum().item(), (big * 2).sum().full_tensor().item(), t.item())"
        )
        assert square.run(code).get(30).values() == [(True, 28.0, 56.0, t) for t in (5.0, 2.0, 3.0, 5.0)]


def test_axes_that_were_chosen_later_stay(mesh2: ProcMesh) -> None:
    set_axes(mesh2.rename(gpus="dp")).get(30)
    mesh2.run("mine = mesh").get(30)
    fail(mesh2, "if rank:\n    1 / 0\ndist.barrier()")
    assert mesh2.run("mesh.mesh_dim_names, mine is mesh, dict(point)").get(30).values() == [
        (("dp",), True, {"dp": rank}) for rank in range(2)
    ]


def test_a_rank_that_swallows_the_error_of_its_freeing_ends_as_it_likes(mesh4: ProcMesh) -> None:
    code = (
        "if rank == 1:\n    1 / 0\ntry:\n    dist.barrier()\nexcept Exception as error:\n"
        "    caught = type(error).__name__\ncaught"
    )
    error = fail(mesh4, code)
    assert dict(error.partial) == dict.fromkeys((0, 2, 3), "GroupAborted")
    assert error.freed == {}


def test_a_second_failure_while_others_are_freed_counts_as_one(mesh4: ProcMesh) -> None:
    code = (
        "if rank == 1:\n    1 / 0\n"
        "try:\n    dist.barrier()\nexcept Exception:\n    if rank == 2:\n        raise KeyError('more')\n    raise"
    )
    error = fail(mesh4, code)
    assert error.ranks == (1, 2) and sorted(error.freed) == [0, 3]
    assert "rank 1 raised ZeroDivisionError" in str(error) and "rank 2 raised KeyError" in str(error)


def test_a_late_rank_is_told_at_its_next_collective(mesh4: ProcMesh) -> None:
    code = "import time\nif rank == 1:\n    1 / 0\nif rank == 2:\n    time.sleep(0.6)\ndist.barrier()"
    error = fail(mesh4, code)
    assert error.freed[0] == "barrier (cell 7, line 7)"
    assert error.freed[2] == "a collective (cell 7, line 7)"


def test_equal_failures_of_all_ranks_cost_the_groups_nothing(mesh4: ProcMesh) -> None:
    mesh4.run("inner = id(dist.group.WORLD.inner)").get(30)
    error = fail(mesh4, "dist.barrier()\n1 / 0")
    assert error.ranks == (0, 1, 2, 3)
    assert mesh4.run("inner == id(dist.group.WORLD.inner)").get(30).values() == [True] * 4


def test_groups_that_are_not_equally_far_are_formed_again(mesh4: ProcMesh) -> None:
    """Nobody waits for an asynchronous operation: all ranks end the cell, and the next collective would hang."""
    error = fail(mesh4, "if rank == 1:\n    1 / 0\nwork = dist.all_reduce(torch.ones(1), async_op=True)")
    assert error.ranks == (1,) and error.freed == {}
    assert mesh4.run("t = torch.ones(1)\ndist.all_reduce(t)\nt.item()").get(30).values() == [4.0] * 4


# ---- nobody failed -------------------------------------------------------------------------------------------------


def notices(collector: Collector) -> list[str]:
    return [event.text for event in collector.events if isinstance(event, Notice)]


def test_a_collective_of_a_part_that_needs_all_is_explained(mesh4: ProcMesh) -> None:
    """The group that it names does: the axis of a whole row has one, any other part is given one."""
    part = mesh4.slice(gpus=slice(0, 2))
    assert _explain_barrier(part) == [
        "ranks 0,1 wait in barrier (cell 7, line 2), which ranks 2,3 never entered: they do not run cell 7",
        "  a collective of these ranks alone: group=g, once a cell of all ranks has run g = dist.new_group([0, 1])",
        "  look: mesh.stacks()    stop: interrupt",
    ]
    mesh4.run("g = dist.new_group([0, 1])").get(30)
    part.run("dist.barrier(group=g)").get(30)
    grid = mesh4.split(gpus=("dp", "tp"), tp=2)
    set_axes(grid).get(30)
    row = grid.slice(dp=0)
    assert '  a collective of these ranks alone: group=mesh["tp"].get_group()' in _explain_barrier(row)
    row.run('dist.barrier(group=mesh["tp"].get_group())').get(30)
    set_axes(mesh4).get(30)


def _explain_barrier(part: ProcMesh) -> list[str]:
    """The lines of the notice about a barrier of all ranks that only a part of them enters."""
    collector = Collector()
    run = start_cell(part, "dist.barrier()", on_output=collector, cell_number=7, line_offset=1)
    wait_until(lambda: notices(collector))
    run.interrupt()
    wait_until(lambda: not run.waiting)
    (notice,) = notices(collector)
    return notice.splitlines()


def test_nothing_is_asked_while_nothing_fails(mesh4: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    send = HostState.send_urgent

    def spy(host: HostState, message: wire.ToHost) -> None:
        if isinstance(message, wire.Query):
            asked.append(message)
        send(host, message)

    monkeypatch.setattr(HostState, "send_urgent", spy)
    mesh4.run("import time\ntime.sleep(0.3 * (rank == 0))\ndist.barrier()").get(30)
    mesh4.execute(abs, -1).get(30)
    time.sleep(TELL_S + 0.5)  # calls that form groups are none that are asked about, however long ago
    assert asked == []


# ---- several calls -------------------------------------------------------------------------------------------------


def test_a_failed_execute_tells_at_once_and_the_next_call_finds_the_groups_again(mesh4: ProcMesh) -> None:
    def work(bad: int) -> float:
        import torch
        import torch.distributed as dist

        if dist.get_rank() == bad:
            raise ValueError("bad shard")
        t = torch.ones(1)
        dist.all_reduce(t)
        return t.item()

    for bad in range(3):
        started = time.monotonic()
        with pytest.raises(errors.CallFailed, match=f"rank {bad} raised ValueError: bad shard"):
            mesh4.execute(work, bad).get(30)
        assert mesh4.execute(work, -1).get(30).values() == [4.0] * 4
        assert time.monotonic() - started < BACK_S


def test_a_call_that_queues_behind_a_failed_one_can_be_cancelled(mesh4: ProcMesh) -> None:
    import time as clock

    first = mesh4.run("import time\nif rank == 1:\n    1 / 0\ntime.sleep(1.5)")
    wait_until(lambda: first.call.failed)  # type: ignore[attr-defined]
    second = mesh4.run("ran = True")
    started = clock.monotonic()
    second.cancel()
    with pytest.raises(errors.CallFailed, match="cancelled before it started"):
        second.get(30)
    assert clock.monotonic() - started < 1
    with pytest.raises(errors.CallFailed, match="ZeroDivisionError"):
        first.get(30)
    assert mesh4.run("'ran' in globals()").get(30).values() == [False] * 4


@pytest.mark.slow
def test_a_job_of_other_ranks_goes_on_while_some_are_freed(square: ProcMesh) -> None:
    """Its groups stay as they are until it has ended; then all are formed again."""
    square.run("import time, os, tempfile\nflag = os.path.join(tempfile.gettempdir(), f'go-{os.getppid()}')").get(30)
    job = square.slice(dp=1).run(
        "group = mesh['tp'].get_group()\nrounds, done = 0, torch.zeros(1)\nwhile not done:\n"
        "    done = torch.tensor([float(os.path.exists(flag))])\n    dist.all_reduce(done, group=group)\n"
        "    rounds += 1\n    time.sleep(0.01)\n"
        "rounds"
    )
    flag = square.slice(dp=0).pull("flag").get(30).values()[0]
    error = fail(
        square.slice(dp=0),
        "if rank == 1:\n    raise ValueError('bad shard')\n"
        "dist.all_reduce(torch.ones(1), group=mesh['tp'].get_group())",
    )
    try:
        assert list(error.freed) == [0]
        assert (
            error.groups
            == "the process groups are not back yet: they are formed again when ranks 2,3 have ended the cell"
        )
        assert not job.done()
        with pytest.raises(errors.CallFailed, match="the process groups were aborted: rank 1 raised ValueError"):
            square.slice(dp=0).run("dist.all_reduce(torch.ones(1), group=mesh['tp'].get_group())").get(30)
    finally:
        open(flag, "w").close()
    try:
        rounds = job.get(30).values()
        assert rounds[0] > 10 and rounds[0] == rounds[1]
    finally:
        os.unlink(flag)


def test_a_mesh_without_groups_has_none_after_a_failure() -> None:
    with this_host().spawn_procs({"gpus": 2}, name="bare", group=False) as mesh:
        fail(mesh, "if rank == 1:\n    1 / 0")
        assert mesh.run("dist.is_initialized()").get(30).values() == [False] * 2
        mesh.run("dist.init_process_group('gloo')").get(30)
        error = fail(mesh, "if rank == 1:\n    1 / 0\ndist.barrier()")
        assert list(error.freed) == [0]
        assert mesh.run("t = torch.ones(1)\ndist.all_reduce(t)\nt.item()").get(30).values() == [2.0] * 2


# ---- death and stop ------------------------------------------------------------------------------------------------


def test_a_death_frees_those_that_wait_and_says_what_helps(mesh2: ProcMesh) -> None:
    mesh2.run("kept = rank").get(30)
    run = start_cell(mesh2,
        "import os, signal\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()",
        on_output=Collector(), cell_number=7, line_offset=1,
    )  # fmt: skip
    started = time.monotonic()
    with pytest.raises(errors.WorkerLost, match=r"rank 1 on .* ended: killed by SIGKILL") as caught:
        run.future.get(30)
    assert time.monotonic() - started < BACK_S
    assert list(caught.value.freed) == [0] and "(cell 7, line 5)" in caught.value.freed[0]
    left = mesh2.slice(gpus=0)
    assert left.pull("kept").get(30).values() == [0]
    with pytest.raises(
        errors.CallFailed, match=r"the process groups were aborted: rank 1 ended\n  repair: mesh.heal\(\)"
    ):
        left.run("dist.barrier()").get(30)
    with pytest.raises(errors.WorkerLost):
        mesh2.rebuild_groups().get(30)


def test_a_death_while_groups_are_formed_again_hangs_nobody() -> None:
    with this_host().spawn_procs({"gpus": 3}, name="three") as mesh:
        os.kill(mesh.status()[2].pid, signal.SIGSTOP)  # forming waits for it
        formed = mesh.rebuild_groups()
        time.sleep(0.3)
        started = time.monotonic()
        os.kill(mesh.status()[2].pid, signal.SIGKILL)
        with pytest.raises(errors.WorkerLost, match="rank 2"):
            formed.get(30)
        assert time.monotonic() - started < BACK_S
        assert mesh.slice(gpus=slice(0, 2)).run("rank").get(30).values() == [0, 1]


def test_a_rank_that_does_not_come_holds_a_failed_cell_up_for_two_seconds_only() -> None:
    with this_host().spawn_procs({"gpus": 3}, name="three") as mesh:
        pid = mesh.status()[2].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            error = fail(
                mesh.slice(gpus=slice(0, 2)), "if rank == 0:\n    1 / 0\ndist.send(torch.ones(1 << 22), dst=0)"
            )
            assert error.groups == "the process groups are not back yet: rank 2 did not come within 2 s"
            assert error.groups in str(error)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert mesh.run("t = torch.ones(1)\ndist.all_reduce(t)\nt.item()").get(30).values() == [3.0] * 3


def test_a_stop_during_a_rescue_ends_all(mesh2: ProcMesh) -> None:
    future = mesh2.run("if rank == 1:\n    1 / 0\ndist.barrier()")
    time.sleep(0.03)
    mesh2.stop()
    with pytest.raises((errors.CallFailed, errors.MeshStoppedError)):
        future.get(5)


def test_groups_can_be_aborted_and_formed_by_hand(mesh4: ProcMesh) -> None:
    run = start_cell(mesh4, "if rank:\n    dist.barrier()", on_output=Collector(), cell_number=7, line_offset=1)
    wait_until(lambda: run.waiting == (1, 2, 3) and "barrier" in states.where(mesh4)[3])
    abort_groups(mesh4, "asked for in a test")
    with pytest.raises(errors.CallFailed, match=r"ranks 1-3 raised GroupAborted: .* asked for in a test"):
        run.future.get(30)
    assert mesh4.run("t = torch.ones(1)\ndist.all_reduce(t)\nt.item()").get(30).values() == [4.0] * 4
    mesh4.rebuild_groups().get(30)


@pytest.mark.slow
def test_two_hosts_are_freed_alike(mesh2x2: ProcMesh) -> None:
    error = fail(mesh2x2, "if rank == 3:\n    1 / 0\ndist.barrier()")
    assert error.freed == dict.fromkeys((0, 1, 2), "barrier (cell 7, line 4)")
    assert mesh2x2.run("t = torch.ones(1)\ndist.all_reduce(t)\nt.item()").get(30).values() == [4.0] * 4


ABORTED_AS_IT_BEGINS = """
import gc, time
from meshbook.groups import meeting
from meshbook.groups.rank_groups import RankGroups

(groups,) = [each for each in gc.get_objects() if isinstance(each, RankGroups)]
link_store = meeting.LinkStore

class Planted(link_store):
    def __init__(self, *args):
        meeting.LinkStore = link_store
        if rank == 0:
            groups.abort(groups._guard.epoch, "another rank ended")
        else:
            time.sleep(20)
        super().__init__(*args)

meeting.LinkStore = Planted
"""


@pytest.mark.slow
def test_an_abort_that_comes_as_forming_begins_ends_it_and_the_next_succeeds(mesh2: ProcMesh) -> None:
    mesh2.run(ABORTED_AS_IT_BEGINS).get(30)
    future = mesh2.rebuild_groups()
    began = time.monotonic()
    wait_until(lambda: set(states.busy(mesh2)) == {1}, 60)
    assert time.monotonic() - began < 15, "it waited for the other rank"
    with pytest.raises(errors.CallFailed, match="another rank ended"):
        future.get(60)
    mesh2.rebuild_groups().get(60)
    assert mesh2.run("t = torch.ones(1); dist.all_reduce(t); t.item()").get(30).values() == [2.0, 2.0]
