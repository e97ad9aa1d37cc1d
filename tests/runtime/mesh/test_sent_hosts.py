"""Hosts that are sent to others, and hosts that were shut down."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Iterator

import pytest

import meshbook
from meshbook import HostMesh, LocalLauncher, start_hosts
from meshbook.actor import Actor, current_rank, current_size, endpoint
from meshbook.errors import HostsEndedError, MeshStoppedError, NotOwnerError


class Starter(Actor):
    @endpoint
    def is_on(self, hosts: HostMesh) -> bool:
        return meshbook.this_host() == hosts

    @endpoint
    def own_host(self) -> HostMesh:
        return meshbook.this_host()

    @endpoint
    def start(self, hosts: HostMesh) -> tuple[dict[str, int], list[str]]:
        with hosts.slice(hosts=1).spawn_procs({"gpus": 2}) as procs:
            return procs.sizes, procs.spawn("pids", Starter).where.call().get().values()

    @endpoint
    def start_on_all(self, hosts: HostMesh) -> list[tuple[int, dict[str, int]]]:
        with hosts.spawn_procs({"gpus": 2}) as procs:
            return procs.spawn("places", Starter).place.call().get().values()

    @endpoint
    def place(self) -> tuple[int, dict[str, int]]:
        return current_rank().rank, current_size()

    @endpoint
    def where(self) -> str:
        return f"{os.environ['GREETING']} {os.getppid()}"

    @endpoint
    def send_on(self, hosts: HostMesh) -> HostMesh:
        return hosts.slice(hosts=0)


@pytest.fixture
def hosts(clean_end: None) -> Iterator[HostMesh]:
    yield start_hosts({"hosts": 2}, LocalLauncher(separate_hosts=True)).with_environment({"GREETING": "hello"})
    meshbook.shutdown()


@pytest.mark.slow
def test_an_actor_starts_processes_on_hosts_that_it_was_sent(hosts: HostMesh) -> None:
    with hosts.slice(hosts=0).spawn_procs(torch=False) as procs:
        starter = procs.spawn("starter", Starter)
        sizes, said = starter.start.call_one(hosts).get(120)
        agent = hosts._present()[1].hello
        assert agent is not None
        assert sizes == {"gpus": 2} and said == [f"hello {agent.pid}"] * 2
        everywhere = {"hosts": 2, "gpus": 2}
        assert starter.start_on_all.call_one(hosts).get(120) == [(rank, everywhere) for rank in range(4)]
        part = starter.send_on.call_one(hosts).get(60)
        assert isinstance(part, HostMesh) and part == hosts.slice(hosts=0) and hash(part) == hash(hosts.slice(hosts=0))
        with pytest.raises(NotOwnerError, match="these hosts are another's"):
            part.shutdown()


@pytest.mark.slow
def test_the_own_host_of_a_rank_is_the_same_wherever_it_is_sent(hosts: HostMesh) -> None:
    with hosts.spawn_procs(torch=False) as procs:
        starters = procs.spawn("starters", Starter)
        found = starters.own_host.call().get(60).values()
        assert found == [hosts.slice(hosts=0), hosts.slice(hosts=1)]
        for own, expected in zip(found, ([True, False], [False, True]), strict=True):
            assert starters.is_on.call(own).get(60).values() == expected
        with found[1].spawn_procs(torch=False) as more:
            assert more.host_mesh == hosts.slice(hosts=1)


@pytest.mark.slow
def test_some_of_the_hosts_are_not_shut_down_by_themselves(hosts: HostMesh) -> None:
    part = hosts.slice(hosts=1)
    for refused in (part, part.rename(), hosts.split(hosts=("a", "b"), a=1).slice(b=0)):
        with pytest.raises(NotOwnerError, match="a slice of more"):
            refused.shutdown()
    assert hosts.spawn_procs(torch=False).sizes == {"hosts": 2}
    part.as_owned().shutdown().get()
    with pytest.raises(HostsEndedError, match="has already been shut down"):
        hosts.spawn_procs(torch=False)
    hosts.rename(hosts="nodes").shutdown().get()


@pytest.mark.slow
def test_a_rank_knows_its_own_host_from_others(hosts: HostMesh) -> None:
    with hosts.spawn_procs(torch=False) as procs:
        starters = procs.spawn("starters", Starter)
        assert starters.is_on.call(hosts.slice(hosts=0)).get(60).values() == [True, False]
        assert starters.is_on.call(hosts).get(60).values() == [False, False]


def test_nothing_is_started_on_hosts_that_were_shut_down(hosts: HostMesh) -> None:
    sent = pickle.dumps(hosts)
    assert pickle.loads(sent) == hosts and not pickle.loads(sent).is_fake_in_process

    async def use() -> None:
        async with hosts:
            assert await hosts.initialized

    asyncio.run(use())
    for what in (hosts, hosts.slice(hosts=1)):
        with pytest.raises(HostsEndedError, match="has already been shut down"):
            what.spawn_procs(torch=False)
        with pytest.raises(HostsEndedError), what:
            pass
    with pytest.raises(HostsEndedError, match="were shut down"):
        pickle.loads(sent)


@pytest.mark.slow
def test_a_mesh_that_was_stopped_is_not_entered_again(clean_end: None) -> None:
    procs = meshbook.this_host().spawn_procs(torch=False)
    with procs:
        pass
    with pytest.raises(MeshStoppedError), procs:
        pass
    meshbook.shutdown()
