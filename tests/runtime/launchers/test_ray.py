"""Hosts on the nodes of a real Ray cluster: they work as others do, each failure is told, and nothing is left."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from controllers import Zygote
from engine_clusters import await_quiet, drivers, ray_cluster, tasks
from engine_hosts import (
    Shown,
    agent_of,
    check_next_controller,
    check_no_secret_is_seen,
    interrupted_once,
    kill_controller,
    known_hosts,
    loss,
    program,
    refusal,
    spawned,
)
from patience import wait_until

import meshbook
from benchmarks.ray_nodes import RayNodes
from meshbook.launchers.ray import RayLauncher
from meshbook.monarch.job import RayJob

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]  # a busy machine takes a minute to start a cluster


@pytest.fixture(scope="module")
def nodes(clean_end: None) -> Iterator[RayNodes]:
    with ray_cluster() as found:
        yield found
        meshbook.shutdown()


# ---- what works -----------------------------------------------------------------------------------------------------


def test_collectives_run_across_nodes_and_a_job_of_several_names_is_one_placement_group(nodes: RayNodes) -> None:
    job = RayJob({"trainers": 2, "judges": 1}, nodes.address, num_cpus=1)
    state = job.state()
    with state.trainers.spawn_procs({"gpus": 2}, device="cpu") as procs:
        code = "t = torch.ones(1) * rank; dist.all_reduce(t); (t.item(), dict(point))"
        assert procs.run(code).get(60).values()[3] == (6.0, {"hosts": 1, "gpus": 1})
        with state.judges.spawn_procs(torch=False) as judges:
            assert sorted([*procs.hosts, *judges.hosts]) == ["r1", "r2", "r3"] and len(nodes.left()) == 1
    job.kill()
    await_quiet(nodes)


def test_gpus_are_asked_for_where_enough_nodes_have_them(nodes: RayNodes) -> None:
    for count, seen in ((2, "0,1"), (3, None)):
        with spawned(count, RayLauncher(nodes.address, gpus=2)) as procs:
            code = "import os; os.environ.get('CUDA_VISIBLE_DEVICES') or None"
            assert procs.run(code).get(60).values() == [seen] * count
    await_quiet(nodes)


def test_by_the_client_server_of_ray(nodes: RayNodes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = ["-m", "ray.util.client.server", "--address", nodes.address, "--host", "127.0.0.1", "--port", port]
    server = subprocess.Popen([sys.executable, *command, "--mode", "proxy"], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", int(port)), 5).close()
                break
            time.sleep(0.1)
        with spawned(2, RayLauncher(f"ray://127.0.0.1:{port}")) as procs:
            assert len(set(procs.hosts)) == 2 and procs.run("rank").get(60).values() == [0, 1]
        await_quiet(nodes)
    finally:
        server.terminate()
        server.wait(60)


def test_a_lost_agent_a_lost_actor_and_a_lost_node_are_told_and_come_back(nodes: RayNodes) -> None:
    with spawned(2, RayLauncher(nodes.address)) as procs:
        procs.run("kept = rank + 1").get(60)
        here = procs.hosts
        said = loss(procs, agent_of(procs, 1).kill)
        assert f"its agent on {here[1]} ended (killed by SIGKILL" in said
        assert f"host {here[1]} started again, rank 1 started again" in str(procs.heal())
        assert procs.hosts == here
        code = "import os; (os.environ['GREETING'], globals().get('kept'))"
        assert procs.run(code).get(60).values() == [("hello", 1), ("hello", None)]
        actor = agent_of(procs, 1).parents()[1]
        assert actor.name().startswith("ray::")
        assert "The actor is dead because its worker process has died" in loss(procs, actor.kill)
        procs.heal()
        assert "ray_driver" in check_no_secret_is_seen([*tasks(nodes), *drivers("ray")])
        rank = next(rank for rank, name in enumerate(procs.hosts) if name != "r1")  # r1 is the head
        lost = procs.hosts[rank]
        assert "node was terminated unexpectedly" in loss(procs, lambda: nodes.ask("kill", lost), rank)
        procs.heal()
        assert lost not in procs.hosts and procs.run("rank").get(60).values() == [0, 1]
        nodes.ask("add", lost)
    await_quiet(nodes)


def test_the_end_of_the_driver_is_the_end_of_all_until_they_are_healed(nodes: RayNodes) -> None:
    with spawned(2, RayLauncher(nodes.address)) as procs:
        assert "the driver of Ray has ended (killed by SIGKILL" in loss(procs, drivers("ray")[0].kill)
        await_quiet(nodes)
        procs.heal()
        assert len(set(procs.hosts)) == 2 and procs.run("rank").get(60).values() == [0, 1] and len(drivers("ray")) == 1
    await_quiet(nodes)
    assert not known_hosts("ray")


def test_more_hosts_come_by_another_placement_group_which_ends_when_they_leave(nodes: RayNodes) -> None:
    with spawned(1, RayLauncher(nodes.address)) as procs:
        procs.run("kept = rank + 1").get(60)
        wide = procs.grow(hosts=2)
        assert len(set(wide.hosts[1:])) == 2 and len(drivers("ray")) == 2
        assert wide.run("globals().get('kept')").get(60).values() == [1, None, None]
        narrow = wide.shrink(hosts=2)
        assert narrow.run("kept").get(60).values() == [1]
        wait_until(lambda: len(drivers("ray")) == 1, 30)
    await_quiet(nodes)
    assert not known_hosts("ray")


# ---- controllers come and go ----------------------------------------------------------------------------------------


def test_the_next_controller_has_the_hosts_of_one_that_was_killed(nodes: RayNodes, zygote: Zygote) -> None:
    kill_controller(zygote, program(f"ray.RayLauncher({nodes.address!r})"))
    assert len(nodes.left()) == 1
    check_next_controller(lambda procs: agent_of(procs, 1).kill(), "its agent on")
    await_quiet(nodes)


def test_without_a_controller_all_ends_with_the_lease(nodes: RayNodes, zygote: Zygote) -> None:
    kill_controller(zygote, program(f"ray.RayLauncher({nodes.address!r})", MESHBOOK_LEASE_S="1"))
    await_quiet(nodes, 60)


# ---- what can go wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "launcher", "said"),
    [
        (4, {}, "Ray has too few nodes for 4 hosts, each on a node of its own: 3 of its 3 nodes have 1 CPU"),
        (3, {"options": ["--num-gpus=2"]}, "2 of its 3 nodes have 1 CPU, 2 GPU"),
        (2, {"python": "/no/such/python"}, "meshbook: no Python at /no/such/python"),
    ],
)
def test_what_ray_cannot_give(nodes: RayNodes, count: int, launcher: dict[str, object], said: str) -> None:
    assert said in refusal(RayLauncher(nodes.address, **launcher), count, nodes)  # type: ignore[arg-type]


@pytest.fixture
def busy(nodes: RayNodes) -> Iterator[None]:
    """Others have all CPUs."""
    nodes.ask("hold", 1, 3)
    yield
    nodes.ask("give_back")
    await_quiet(nodes)


def test_an_interrupt_while_ray_is_busy_leaves_nothing(nodes: RayNodes, busy: None, shown: Shown) -> None:
    with interrupted_once(lambda: "waited" in shown()), spawned(2, RayLauncher(nodes.address)):
        pass
    assert "Ray's queue: 2 hosts need a node each with 1 CPU; 0 of 3 nodes have that free; waited" in shown()
    assert len(nodes.left()) == 1 and not drivers("ray") and not known_hosts("ray"), "what others hold is theirs"


def test_a_controller_that_is_killed_leaves_nothing_waiting(nodes: RayNodes, busy: None, zygote: Zygote) -> None:
    driver = zygote.start(program(f"ray.RayLauncher({nodes.address!r})"))
    wait_until(lambda: len(nodes.left()) == 2, 60)
    driver.kill()
    wait_until(lambda: len(nodes.left()) == 1, 60)
