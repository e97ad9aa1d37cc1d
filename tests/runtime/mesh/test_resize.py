"""Meshes that grow and shrink: processes stay, ranks, axes, groups and variables follow."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import kill, wait_until

from meshbook import LocalLauncher, ProcMesh, errors, start_hosts, this_host
from meshbook.mesh import states
from meshbook.mesh.rank_calls import set_axes
from meshbook.mesh.resize import NewHost, counts_hosts, describe_moves, plan_growth, plan_shrinkage, resize
from meshbook.shape.members import Extent
from meshbook.system.processes import is_same_process, start_time

SUM = "t = torch.ones(2); dist.all_reduce(t); int(t[0])"
WHO = """
import os
(rank, local_rank, world_size, dict(point), mesh.mesh_dim_names, tuple(mesh.shape),
 int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]))
"""


def who(rank: int, world_size: int) -> tuple[object, ...]:
    return (rank, rank, world_size, {"gpus": rank}, ("gpus",), (world_size,), rank, rank, world_size)


def test_growth_and_shrinkage_change_everything_that_names_a_rank() -> None:
    with this_host().spawn_procs({"gpus": 2}, name="grown") as mesh:
        mesh.run("x = rank * 10").get(30)
        pids = [status.pid for status in mesh.status()]
        grown = mesh.grow(gpus=2)
        assert grown.sizes == {"gpus": 4} and grown.ranks == (0, 1, 2, 3)
        assert [status.pid for status in grown.status()][:2] == pids
        assert grown.run(SUM).get(30).values() == [4] * 4
        assert grown.run(WHO).get(30).values() == [who(rank, 4) for rank in range(4)]
        assert grown.evaluate("globals().get('x')").get(30).values() == [0, 10, None, None]
        ending = [(status.pid, start_time(status.pid)) for status in grown.status()][1:]
        shrunk = grown.shrink(gpus=3)
        assert shrunk.sizes == {"gpus": 1}
        assert not any(started is not None and is_same_process(pid, started) for pid, started in ending)
        assert shrunk.run(WHO).get(30).values() == [who(0, 1)]
        assert shrunk.pull("x").get(30).values() == [0]


def test_ranks_that_move_keep_their_state_logs_and_tracebacks() -> None:
    with this_host().spawn_procs({"gpus": 4}, name="moved") as mesh:
        mesh.run("x = rank * 10; print('first', rank)").get(30)
        kill(mesh, 1)
        change = resize(mesh, shrink={"gpus": 1})
        assert (change.moved, change.ended, change.new) == ({0: 0, 2: 1, 3: 2}, (1,), ())
        assert str(change).startswith(
            'mesh "moved": gpus=3; rank 1 ended, ranks 2,3 are ranks 1,2 now, all 3 joined in '
        )
        procs = change.procs
        assert procs.run(SUM).get(30).values() == [3] * 3
        assert procs.pull("x").get(30).values() == [0, 20, 30]
        assert procs.run(WHO).get(30).values() == [who(rank, 3) for rank in range(3)]
        with pytest.raises(errors.CallFailed, match=r"^rank 2 raised ValueError: 2"):
            procs.slice(gpus=2).run("raise ValueError(rank)").get(30)
        assert [os.path.basename(path) for path in procs.log_paths().values()] == [f"rank-{r}.log" for r in range(3)]
        assert all(os.path.exists(path) for path in procs.log_paths().values())
        assert [procs.logs(50)[rank].splitlines()[0] for rank in range(3)] == ["first 0", "first 2", "first 3"]
        assert [(status.rank, status.state) for status in procs.status()] == [(0, "idle"), (1, "idle"), (2, "idle")]
        titles = [" ".join(psutil.Process(status.pid).cmdline()) for status in procs.status()]
        assert titles == [f"meshbook moved rank {rank}" for rank in range(3)]


def test_a_view_from_before_says_what_to_do() -> None:
    with this_host().spawn_procs({"gpus": 2}, name="stale") as mesh:
        part = mesh.slice(gpus=1)
        mesh.grow(gpus=1)
        for use in (
            lambda: part.run("1"),
            lambda: part.slice().status(),
            lambda: mesh.push({"a": 1}),
            lambda: states.where(part),
        ):
            with pytest.raises(errors.LayoutError, match=r'mesh "stale" grew to gpus=3 since this view .* base\(\)'):
                use()
        assert part.base().run("rank").get(30).values() == [0, 1, 2]


def test_several_axes_and_split_ones() -> None:
    with this_host().spawn_procs({"gpus": 2}, name="split") as mesh:
        mesh.run("x = rank").get(30)
        halves = mesh.split(gpus=("dp", "tp"), tp=1)
        set_axes(halves).get(30)
        change = resize(halves, grow={"dp": 1, "tp": 1})
        assert change.procs.sizes == {"dp": 3, "tp": 2}
        assert (change.moved, change.new) == ({0: 0, 1: 2}, (1, 3, 4, 5))
        assert change.procs.run(SUM).get(60).values() == [6] * 6
        assert change.procs.evaluate("globals().get('x')").get(30).values() == [0, None, 1, None, None, None]
        assert change.procs.run("dist.get_world_size(mesh.get_group('tp'))").get(30).values() == [2] * 6


@pytest.mark.slow
def test_hosts_come_and_go_with_a_mesh_that_owns_them() -> None:
    hosts = start_hosts({"hosts": 1}, LocalLauncher(separate_hosts=True))
    with hosts.spawn_procs({"gpus": 2}, name="wide", owns_hosts=True) as mesh:
        mesh.run("x = rank").get(30)
        wide = mesh.grow(hosts=1)
        assert wide.sizes == {"hosts": 2, "gpus": 2} and len(wide.hosts) == 2
        assert wide.run(SUM).get(60).values() == [4] * 4
        env = "import os; (os.environ['GROUP_RANK'], os.environ['GROUP_WORLD_SIZE'], local_rank)"
        assert wide.run(env).get(30).values() == [("0", "2", 0), ("0", "2", 1), ("1", "2", 0), ("1", "2", 1)]
        kill(wide, 0)  # on the host that keeps the store of the process groups
        agents = [(host.hello.pid, start_time(host.hello.pid)) for host in wide._mesh.hosts if host.hello]
        narrow = wide.shrink(hosts=1)
        assert narrow.sizes == {"hosts": 1, "gpus": 2}
        assert narrow.run(SUM).get(60).values() == [2] * 2
        assert narrow.run(env).get(30).values() == [("0", "1", 0), ("0", "1", 1)]
        assert [started is not None and is_same_process(pid, started) for pid, started in agents] == [False, True]


def test_a_shared_host_is_not_multiplied(mesh2: ProcMesh) -> None:
    hosts = start_hosts({"hosts": 1}, LocalLauncher())
    try:
        with (
            hosts.spawn_procs({"gpus": 1}, name="guest") as mesh,
            pytest.raises(errors.UsageError, match='the hosts of mesh "guest" were not started for it alone'),
        ):
            mesh.grow(hosts=1)
    finally:
        hosts.shutdown()


def test_what_makes_no_sense_is_refused_and_changes_nothing(mesh4: ProcMesh) -> None:
    with pytest.raises(errors.UsageError, match="gpus=4 cannot shrink by 4: nothing would be left"):
        mesh4.shrink(gpus=4)
    with pytest.raises(errors.UnknownAxisError, match='unknown axis "gpu"'):
        mesh4.grow(gpu=1)
    with pytest.raises(errors.UsageError, match="by at least 1"):
        mesh4.grow(gpus=0)
    with pytest.raises(errors.UsageError, match="say along which axis"):
        mesh4.shrink()
    with pytest.raises(errors.LayoutError, match="only the whole mesh"):
        mesh4.slice(gpus=slice(0, 2)).grow(gpus=1)
    call = mesh4.slice(gpus=2).run("import time; time.sleep(30)")
    with pytest.raises(errors.UsageError, match='rank 2 of mesh "four" is busy') as caught:
        mesh4.shrink(gpus=1)
    assert "mesh.interrupt()" in str(caught.value)
    call.cancel()
    with pytest.raises(errors.CallFailed):
        call.get(30)
    assert mesh4.run(SUM).get(30).values() == [4] * 4


def test_a_mesh_with_a_dead_rank_does_not_grow_nor_keep_it() -> None:
    with this_host().spawn_procs({"gpus": 3}, name="hurt") as mesh:
        kill(mesh, 0)
        kill(mesh, 1)
        with pytest.raises(errors.UsageError, match="ranks 0,1 ended: repair the mesh first"):
            mesh.grow(gpus=1)
        with pytest.raises(errors.UsageError, match="rank 0 has ended and would be left, with gpus=1 fewer"):
            mesh.shrink(gpus=1)
        assert mesh.shrink(gpus=2).run(WHO).get(30).values() == [who(0, 1)]


def test_a_recruit_that_fails_leaves_the_mesh_as_it_was(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with this_host().spawn_procs({"gpus": 2}, name="same") as mesh:
        mesh._mesh.recipe = mesh._mesh.recipe._replace(device="cuda")
        with pytest.raises(errors.DeviceError, match=r"3 ranks were asked for on .* which has 0 CUDA"):
            mesh.grow(gpus=1)
        assert mesh.run(SUM).get(30).values() == [2, 2]
        mesh._mesh.recipe = mesh._mesh.recipe._replace(device=None, preload=("no_such_module",))
        with pytest.raises(errors.SpawnError, match="No module named 'no_such_module'"):
            mesh.grow(gpus=1)
        assert mesh.run(SUM).get(30).values() == [2, 2]


def test_growth_onto_a_host_that_is_lost_meanwhile_fails_at_once() -> None:
    hosts = start_hosts({"hosts": 1}, LocalLauncher(separate_hosts=True))
    with hosts.spawn_procs({"gpus": 1}, name="wide", owns_hosts=True) as mesh:
        known = mesh._controller.hosts
        lost: list[float] = []

        def lose_the_new_host() -> None:
            wait_until(lambda: mesh._mesh.pending_workers)
            (new,) = (host for host in mesh._controller.hosts if host not in known)
            assert new.hello is not None
            lost.append(time.monotonic())
            os.kill(new.hello.pid, signal.SIGKILL)

        loses = threading.Thread(target=lose_the_new_host)
        loses.start()
        with pytest.raises(errors.SpawnError, match="was lost meanwhile: the host agent ended"):
            mesh.grow(hosts=1)
        loses.join()
        assert time.monotonic() - lost[0] < 10.0
        assert mesh.run(SUM).get(30).values() == [1]


# ---- the plan ------------------------------------------------------------------------------------------------------


@st.composite
def placed(draw: st.DrawFn) -> tuple[Extent, list[str]]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    extent = Extent(tuple("abc"[: len(sizes)]), tuple(sizes))
    host_axis = draw(st.sampled_from([None, *extent.names]))
    return extent, [f"host{point[host_axis] if host_axis else 0}" for point in extent.points()]


@given(placed(), st.data())
def test_whoever_stays_keeps_its_point_and_its_host(where: tuple[Extent, list[str]], data: st.DataObject) -> None:
    extent, placement = where
    more = data.draw(st.dictionaries(st.sampled_from(extent.names), st.integers(1, 2), min_size=1))
    plan = plan_growth(extent, placement, more, ())
    assert dict(plan.extent) == {axis: size + more.get(axis, 0) for axis, size in extent.items()}
    for before, after in plan.moved.items():
        assert dict(extent.point(before)) == dict(plan.extent.point(after))
        assert placement[before] == plan.placement[after]
    assert len(plan.moved) == extent.nelements and len(plan.placement) == plan.extent.nelements
    spans_hosts = any(counts_hosts(extent, placement, axis, ()) for axis in more)
    assert any(isinstance(host, NewHost) for host in plan.placement) == spans_hosts


@given(placed(), st.data())
def test_the_dead_go_first(where: tuple[Extent, list[str]], data: st.DataObject) -> None:
    extent, placement = where
    axis = data.draw(st.sampled_from(extent.names))
    if extent.size(axis) == 1:
        return
    dead = data.draw(st.integers(0, extent.nelements - 1))
    plan = plan_shrinkage(extent, placement, {axis: 1}, {dead})
    assert dead not in plan.moved
    assert sorted(plan.moved.values()) == list(range(plan.extent.nelements))
    assert [placement[before] for before in plan.moved] == list(plan.placement)


def test_moves_in_words() -> None:
    assert describe_moves({0: 0, 1: 1}) == ""
    assert describe_moves({0: 0, 2: 1}) == "rank 2 is rank 1 now"
    assert describe_moves({0: 0, 2: 3, 3: 4}) == "ranks 2,3 are ranks 3,4 now"
