"""Two agents on loopback that act as two hosts: everything crosses TCP, nothing shares memory."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from meshbook import LocalLauncher, ProcMesh, start_hosts
from meshbook.actor import Actor, SupervisionError
from meshbook.errors import MeshError
from meshbook.monarch.job import ProcessJob
from meshbook.system.processes import start_time


def test_large_payloads_cross_hosts_in_both_directions(mesh2x2: ProcMesh) -> None:
    big = torch.arange(3_000_000, dtype=torch.float32)
    mesh2x2.push({"big": big}).get(60)
    assert mesh2x2.evaluate("big.sum().item()").get(60).values() == [big.sum().item()] * 4
    mesh2x2.run("mine = big + rank").get(60)
    pulled = mesh2x2.pull("mine").get(60)
    assert all(torch.equal(pulled.get(rank), big + rank) for rank in range(4))


def test_a_small_call_after_a_large_one_keeps_its_place(mesh2x2: ProcMesh) -> None:
    mesh2x2.push({"x": torch.zeros(4_000_000)})
    mesh2x2.push({"x": 1})
    assert mesh2x2.pull("x").get(60).values() == [1] * 4


def test_hosts_started_for_a_mesh_end_with_it() -> None:
    hosts = start_hosts({"hosts": 2}, LocalLauncher())
    mesh = hosts.spawn_procs({"gpus": 1}, owns_hosts=True)
    agents = [(host.hello.pid, start_time(host.hello.pid)) for host in mesh._mesh.hosts if host.hello]
    assert len(agents) == 2
    mesh.stop()
    mesh.stop()
    assert [start_time(pid) == started for pid, started in agents] == [False, False]


def test_hosts_can_be_sliced_and_a_part_of_them_spawns_procs() -> None:
    hosts = start_hosts({"hosts": 4}, LocalLauncher())
    try:
        racks = hosts.split(hosts=("racks", "hosts"), racks=2)
        assert racks.sizes == {"racks": 2, "hosts": 2} and len(racks) == 4 and racks.size("racks") == 2
        assert racks.rename(racks="rows").extent.names == ("rows", "hosts")
        assert racks.flatten("all").sizes == {"all": 4}
        assert repr(racks) == "HostMesh(racks=2, hosts=2)"
        last = racks.slice(racks=1)
        assert last.ranks == (2, 3)
        with last.spawn_procs({"gpus": 1}, group=False, device="cpu") as procs:
            assert procs.sizes == {"hosts": 2, "gpus": 1}
            assert [known.id for known in procs._mesh.hosts] == [known.id for known in hosts._hosts[2:]]
            assert procs.run("rank").get(60).values() == [0, 1]
        with hosts.slice(hosts=0).spawn_procs({"gpus": 1}, group=False, device="cpu") as procs:
            assert procs.sizes == {"gpus": 1}
    finally:
        hosts.shutdown()


def test_hosts_are_shut_down_once() -> None:
    hosts = start_hosts({"hosts": 2}, LocalLauncher())
    with hosts:
        hosts.shutdown().get()
    for again in (hosts.shutdown, lambda: hosts.spawn_procs(torch=False)):
        with pytest.raises(RuntimeError, match="HostMesh has already been shut down"):
            again()
    job = ProcessJob({"hosts": 1})
    job.state().hosts.shutdown().get()
    job.kill()


@pytest.mark.slow
def test_a_handle_of_hosts_stops_what_it_has_spawned_itself() -> None:
    job = ProcessJob({"hosts": 2})
    first, second = job.state().hosts, job.state().hosts
    assert first == second
    mine = [first.spawn_procs(torch=False), first.slice(hosts=1).spawn_procs(torch=False)]
    other = second.spawn_procs(torch=False)
    assert all(procs.initialized.get(60) for procs in (*mine, other))
    first.slice(hosts=0).stop().get()
    assert [procs.alive for procs in mine] == [False, True], "it has no member on that host"
    mine[1].host_mesh.stop().get()
    assert [procs.alive for procs in (*mine, other)] == [False, False, True]
    assert other.run("rank").get(60).values() == [0, 1]
    job.kill()


class Slow(Actor):
    def __init__(self, takes_s: float, path: str) -> None:
        time.sleep(takes_s)
        Path(path).touch()


@pytest.mark.slow
def test_actors_on_their_way_are_made_before_their_hosts_end(tmp_path: Path) -> None:
    hosts = ProcessJob({"hosts": 1}).state().hosts
    procs = hosts.spawn_procs(torch=False)
    assert procs.initialized.get(60)
    actors = procs.spawn("slow", Slow, 0.5, str(tmp_path / "made"))
    hosts.shutdown(timeout_s=60).get()
    assert actors.initialized.get(60) is None and (tmp_path / "made").exists()
    with pytest.raises(MeshError):
        procs.run("rank").get(60)


@pytest.mark.slow
def test_actors_that_are_never_made_do_not_hold_up_the_end_of_their_hosts(tmp_path: Path) -> None:
    hosts = ProcessJob({"hosts": 1}).state().hosts
    procs = hosts.spawn_procs(torch=False)
    assert procs.initialized.get(60)
    actors = procs.spawn("slow", Slow, 600, str(tmp_path / "made"))
    hosts.shutdown(timeout_s=1).get()
    with pytest.raises(SupervisionError):
        actors.initialized.get(60)
