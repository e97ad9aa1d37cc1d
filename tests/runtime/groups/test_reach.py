"""Hosts with several addresses are known to each other by one that leads there; where none does that is said."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import cast

import mail_ranks
import msgspec
import pytest
from far_hosts import FarLauncher, IslandsLauncher
from mail_ranks import open_desks
from patience import wait_until

from benchmarks.faults.namespace import Namespace, make_namespace
from meshbook import ProcMesh, shutdown, start_hosts
from meshbook.errors import CallFailed, MeshError, SpawnError
from meshbook.groups.reach import Doorway, find_ways, knock, open_door
from meshbook.groups.store_client import LinkStore
from meshbook.mesh import states
from meshbook.system.interfaces import (
    Interface,
    loopback_address,
    own_address,
    own_interfaces,
    use_address,
    wanted_interfaces,
)

pytestmark = pytest.mark.cluster

NOWHERE = "10.99.0.15"
"""Every machine has it, as virtual machines behind NAT do, and its default route leads there."""


@pytest.fixture
def far(clean_end: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    """A machine whose default route is a network of its own; it reaches ours by another."""
    namespace = make_namespace()
    if namespace is None:
        pytest.skip("no network namespace can be made here")
    with contextlib.closing(namespace):
        for words in ("add nat type veth peer name tan", "set nat up", "set tan up"):
            namespace.ip("link", *words.split())
        namespace.ip("addr", "add", f"{NOWHERE}/24", "dev", "nat")
        namespace.ip("route", "add", "default", "dev", "nat")
        monkeypatch.setattr("meshbook.mesh.host_agents.loopback_address", lambda: namespace.address)
        shutdown()
        yield namespace
        shutdown()


@contextlib.contextmanager
def spawned(namespace: Namespace, **environment: str) -> Iterator[ProcMesh]:
    hosts = start_hosts({"hosts": 2}, FarLauncher(namespace))
    with hosts.spawn_procs({"gpus": 2}, device="cpu", owns_hosts=True, env=environment) as mesh:
        yield mesh


SUM = "t = torch.ones(1); dist.all_reduce(t); t.item()"


def test_the_address_is_that_by_which_the_other_host_comes_in(far: Namespace) -> None:
    with spawned(far) as mesh:
        assert mesh.run(SUM).get(60).values() == [4.0] * 4
        (_, here), (_, there) = states.addresses(mesh)
        assert there.startswith(f"{far.their_address} (") and here.startswith(f"{far.address} (")
        where = "import os; (os.environ['MASTER_ADDR'], os.environ['NCCL_SOCKET_IFNAME'])"
        assert mesh.run(where).get(60).values()[3] == (far.address, f"={there.split('(')[1][:-1]}")
        os.kill(mesh.execute(os.getpid).get(30).values()[3], 9)
        wait_until(lambda: mesh.lost)
        mesh.heal()
        assert mesh.run(SUM).get(60).values() == [4.0] * 4 and [way for _, way in states.addresses(mesh)] == [
            here,
            there,
        ]


def test_a_network_that_is_asked_for_is_taken_and_one_that_is_not_there_is_told(far: Namespace) -> None:
    with spawned(far, MESHBOOK_INTERFACE="10.213.0.0/16") as mesh:
        assert mesh.run(SUM).get(60).values() == [4.0] * 4
        assert [way.split()[0] for _, way in states.addresses(mesh)] == [far.address, far.their_address]
    with (
        pytest.raises(SpawnError, match=r"has no interface eth77, which was asked for; it has [\d.]+ \(\w+\)"),
        spawned(far, MESHBOOK_INTERFACE="eth77"),
    ):
        pass


@pytest.mark.some("10.99.0.15/32-10.99.0.15")
@pytest.mark.parametrize(("interface", "address"), [("", "10.213."), (f"{NOWHERE}/32", NOWHERE)])
def test_messages_of_other_hosts_come_in_where_was_asked_for(far: Namespace, interface: str, address: str) -> None:
    hosts = start_hosts({"hosts": 2}, FarLauncher(far))
    environment = {"MESHBOOK_INTERFACE": interface} if interface else {}
    with hosts.spawn_procs({"gpus": 1}, device="cpu", group=False, owns_hosts=True, env=environment) as mesh:
        there = open_desks(mesh)
        asked = mesh.slice(hosts=0).execute(mail_ranks.ask, there, "echo", 1, timeout=60)
        met = mesh._controller._dispatcher.peer_directory.met
        wait_until(lambda: met and all(meeting.endpoint for meeting in met.values()))
        assert all(meeting.endpoint.startswith(f"tcp://{address}") for meeting in met.values()), met
        if not interface:
            assert asked.get(60).values()[0] == {0: 1, 1: 1}
            return
        way = rf"host \S+ cannot reach its host at tcp://{NOWHERE}:\d+, by which messages between hosts go: spawn with"
        with pytest.raises(CallFailed, match=way):
            asked.get(60)


def test_hosts_that_do_not_reach_each_other_say_so(far: Namespace) -> None:
    with (
        pytest.raises(SpawnError, match=rf"cannot reach host .* at {NOWHERE} \(nat\), .*MESHBOOK_INTERFACE"),
        spawned(far, MESHBOOK_INTERFACE=f"{far.address}/32,{NOWHERE}/32,192.0.0.0/8"),
    ):
        pass


@pytest.fixture
def islands(clean_end: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Namespace, Namespace]]:
    """Two machines of one address each, that both reach ours, and not each other."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(2):
            if (namespace := make_namespace()) is None:
                pytest.skip("no network namespace can be made here")
            found.append(stack.enter_context(contextlib.closing(namespace)))
        first, second = found
        second.ip("route", "add", f"{first.address}/32", "via", second.address)
        monkeypatch.setattr("meshbook.mesh.host_agents.loopback_address", lambda: first.address)
        shutdown()
        yield first, second
        shutdown()


NO_WAY = r"cannot reach host \S+ at 10\.213\.\d+\.2 \(mb\S+\), which collectives need: spawn with .*MESHBOOK_INTERFACE"


@pytest.mark.some("no route")
@pytest.mark.parametrize("swallowed", [False, True], ids=["no route", "swallowed"])
def test_hosts_of_one_address_each_that_reach_only_the_controller_say_so_within_seconds(
    islands: tuple[Namespace, Namespace], swallowed: bool
) -> None:
    for island, other in (islands, islands[::-1]):
        if swallowed:  # nobody answers there
            island.ip("route", "add", f"{other.their_address}/32", "dev", other_end(island))
    hosts = start_hosts({"hosts": 2}, IslandsLauncher(*islands))
    began = time.monotonic()
    with pytest.raises(SpawnError, match=NO_WAY):
        hosts.spawn_procs({"gpus": 1}, device="cpu", owns_hosts=True)
    assert time.monotonic() - began < 40, "ranks begin, and then some seconds"


def other_end(namespace: Namespace) -> str:
    return namespace._ours[:-1] + "b"


@pytest.mark.nightly
def test_islands_work_without_collectives_and_with_them_once_there_is_a_road(
    islands: tuple[Namespace, Namespace],
) -> None:
    first, second = islands
    hosts = start_hosts({"hosts": 2}, IslandsLauncher(*islands))
    with hosts.spawn_procs({"gpus": 1}, device="cpu", group=False, owns_hosts=True) as mesh:
        assert mesh.run("rank + 1").get(60).values() == [1, 2]
    first.join(second, network := f"10.214.{first.address.split('.')[2]}")
    hosts = start_hosts({"hosts": 2}, IslandsLauncher(*islands))
    with hosts.spawn_procs({"gpus": 1}, device="cpu", owns_hosts=True) as mesh:
        assert mesh.run(SUM).get(60).values() == [2.0] * 2
        assert [way.split()[0] for _, way in states.addresses(mesh)] == [f"{network}.1", f"{network}.2"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_road_that_goes_under_a_collective_ends_it_and_another_one_is_taken(
    islands: tuple[Namespace, Namespace],
) -> None:
    first, second = islands
    networks = [f"10.{octet}.{first.address.split('.')[2]}" for octet in (214, 215)]
    ends = [first.join(second, network) for network in networks]
    hosts = start_hosts({"hosts": 2}, IslandsLauncher(*islands))
    with hosts.spawn_procs({"gpus": 1}, device="cpu", owns_hosts=True) as mesh:
        (_, way), _ = states.addresses(mesh)
        used = next(at for at, network in enumerate(networks) if way.startswith(network))
        mesh.run("kept = rank; " + SUM).get(60)
        pids = mesh.execute(os.getpid).get(60).values()
        first.ip("link", "set", ends[used], "down")
        began = time.monotonic()
        with pytest.raises(
            CallFailed, match=rf"cannot be reached at {networks[used]}\.\d: .* was acknowledged for 1\d s"
        ):
            mesh.run("dist.all_reduce(torch.ones(1000))").get(120)
        assert time.monotonic() - began < 60 and not mesh.lost
        assert mesh.run(SUM).get(60).values() == [2.0] * 2, "by the other one"
        assert [way.split()[0] for _, way in states.addresses(mesh)] == [
            f"{networks[1 - used]}.1",
            f"{networks[1 - used]}.2",
        ]
        assert mesh.run("kept").get(60).values() == [0, 1] and mesh.execute(os.getpid).get(60).values() == pids
        first.ip("link", "set", ends[1 - used], "down")
        with pytest.raises(CallFailed, match="was acknowledged for"):
            mesh.run("dist.all_reduce(torch.ones(1000))").get(120)
        with pytest.raises(
            MeshError, match=r"cannot reach host \S+ at 10\.\d+\.\d+\.\d \(mb.*, which collectives need"
        ):
            mesh.run(SUM).get(60)
        assert mesh.run("kept").get(60).values() == [0, 1]


def test_a_door_opens_at_each_of_the_hosts_addresses_and_to_none_after_it_was_closed() -> None:
    with open_door(0, "here") as door:
        assert knock([door]) == {0: [address for _, address in door.interfaces]}
        stranger = type(door)(1, "other", door.interfaces, door.port, "another word....")
        assert knock([stranger]) == {1: []}
    assert knock([door]) == {0: []}


def test_interfaces_are_meant_by_name_or_network() -> None:
    found = own_interfaces()
    if not found:
        pytest.skip("this machine has no network")
    first = found[0]
    assert first in wanted_interfaces(first.name) and first in wanted_interfaces(f"none0, {first.address}")
    assert wanted_interfaces("none0") == [] and wanted_interfaces("203.0.113.0/24") == []
    assert str(Interface("eth1", "10.0.0.5")) == "10.0.0.5 (eth1)"
    use_address("203.0.113.7")
    try:
        assert own_address() == "203.0.113.7"
    finally:
        use_address("")
    assert own_address() != "203.0.113.7"


def told_by(reached: dict[str, bytes]) -> LinkStore:
    """A store in which the hosts have said whom they reach."""

    class Told:
        def multi_get(self, keys: Sequence[str]) -> list[bytes]:
            return [reached[key] for key in keys]

    return cast("LinkStore", Told())


def test_all_hosts_take_addresses_of_one_family() -> None:
    """As gloo wants it; at which of them most came in counts, and then which comes first."""
    both = (("eth0", "10.0.0.{}"), ("eth1", "10.1.0.{}"), ("eth0", "fd00::{}"))
    doors = [Doorway(host, f"h{host}", tuple((name, each.format(host)) for name, each in both)) for host in range(3)]
    told = [{1: ["fd00::1", "10.1.0.1"], 2: ["fd00::2"]}, {0: ["10.0.0.0"], 2: ["fd00::2"]}, {0: [], 1: ["10.1.0.1"]}]
    store = {f"s/reached/{host}": msgspec.json.encode(each) for host, each in enumerate(told)}

    with pytest.raises(
        SpawnError, match=r"h2 cannot reach host h0 at 10\.0\.0\.0 \(eth0\), 10\.1\.0\.0 \(eth1\), fd00::0"
    ):
        find_ways(told_by(store), "s", doors, None)
    store["s/reached/2"] = msgspec.json.encode({0: ["fd00::0", "10.0.0.0"], 1: ["10.1.0.1", "10.0.0.1"]})
    with pytest.raises(SpawnError, match="neither all by IPv4 nor all by IPv6"):
        find_ways(told_by(store), "s", doors, None)
    store["s/reached/1"] = msgspec.json.encode({0: ["10.0.0.0"], 2: ["fd00::2", "10.1.0.2"]})
    store["s/reached/0"] = msgspec.json.encode({1: ["10.1.0.1"], 2: ["10.1.0.2", "10.0.0.2"]})
    ways = find_ways(told_by(store), "s", doors, None)
    assert [ways[host].address for host in range(3)] == ["10.0.0.0", "10.1.0.1", "10.1.0.2"]


def test_hosts_of_one_machine_meet_on_loopback_unless_an_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def ways() -> dict[int, Interface]:
        with open_door(0, "a") as first, open_door(1, "b") as second:
            doors = [first, second]
            told = {f"epoch1/reached/{door.host}": msgspec.json.encode(knock(doors)) for door in doors}
            return find_ways(told_by(told), "epoch1", doors, None)

    assert [way.address for way in ways().values()] == [loopback_address()] * 2
    own = next(iter(own_interfaces()), None)
    if own is not None:
        monkeypatch.setenv("MESHBOOK_INTERFACE", f"{own.address}/32" if ":" not in own.address else own.name)
        assert ways() == {0: own, 1: own}
