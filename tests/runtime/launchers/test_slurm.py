"""Hosts on the nodes of a real Slurm: they work as others do, each failure is told, and nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from controllers import Zygote
from engine_clusters import await_quiet, clients, tasks
from engine_hosts import (
    Shown,
    agent_of,
    check_collectives,
    check_detached,
    check_next_controller,
    check_no_secret_is_seen,
    interrupted_once,
    kill_controller,
    known_hosts,
    loss,
    once,
    program,
    refusal,
    spawned,
)
from patience import wait_until

from benchmarks.slurm_nodes import SlurmNodes, start_node
from meshbook import start_hosts
from meshbook.errors import SpawnError, UsageError
from meshbook.launchers.slurm import SlurmLauncher
from meshbook.monarch.job import SlurmJob

pytestmark = pytest.mark.cluster


# ---- what works -----------------------------------------------------------------------------------------------------


def test_collectives_run_across_nodes_and_the_job_ends_with_the_mesh(nodes: SlurmNodes) -> None:
    check_collectives(SlurmLauncher())
    await_quiet(nodes)


def test_a_lost_host_comes_back_on_its_node_in_the_same_job(nodes: SlurmNodes) -> None:
    with spawned(2, SlurmLauncher()) as procs:
        procs.run("kept = rank + 1").get(60)
        queue = nodes.queue()
        assert procs.hosts == ("n1", "n2") and len(queue) == 1
        assert "its agent on n2 ended (exited with exit code 137)" in loss(procs, agent_of(procs, 1).kill)
        assert str(procs.heal()).startswith('mesh "procs": host n2 started again, rank 1 started again')
        code = "import os; (os.environ['GREETING'], os.environ['SLURMD_NODENAME'], globals().get('kept'))"
        assert procs.run(code).get(60).values() == [("hello", "n1", 1), ("hello", "n2", None)]
        assert "its agent on n2 ended" in loss(procs, agent_of(procs, 1).kill), "as often as it is lost"
        procs.heal()
        assert procs.hosts == ("n1", "n2") and nodes.queue() == queue
        check_no_secret_is_seen([*tasks(nodes), *clients("salloc", "srun")])
        assert len(tasks(nodes)) >= 4
    await_quiet(nodes)


@pytest.mark.slow
def test_srun_and_then_the_job_are_killed(nodes: SlurmNodes) -> None:
    with spawned(2, SlurmLauncher()) as procs:
        queue = nodes.queue()
        for client in clients("salloc", "srun"):
            if client.name() == "srun":
                client.kill()
        procs_lost = loss(procs, lambda: None)
        assert "srun ended (killed by SIGKILL" in procs_lost
        procs.heal()
        assert procs.run("rank").get(60).values() == [0, 1] and nodes.queue() == queue
        number = queue[0].split()[0]
        assert f"Slurm has cancelled job {number}" in loss(procs, lambda: nodes.ask("scancel", number))
        wait_until(lambda: len(procs.lost) == 2, 60)
        assert "ranks 0,1 started again" in str(procs.heal())
        assert len(set(procs.hosts)) == 2 and procs.run("rank").get(60).values() == [0, 1]
        (another,) = nodes.queue()
        assert another.split()[0] != number, "one allocation for both"
    await_quiet(nodes)
    assert not known_hosts("slurm")


def test_more_hosts_come_by_another_allocation_which_ends_when_they_leave(nodes: SlurmNodes) -> None:
    with spawned(2, SlurmLauncher()) as procs:
        procs.run("kept = rank + 1").get(60)
        queue = nodes.queue()
        wide = procs.grow(hosts=1)
        assert wide.hosts == ("n1", "n2", "n3") and len(nodes.queue()) == 2
        assert wide.run("globals().get('kept')").get(60).values() == [1, 2, None]
        assert "its agent on n3 ended" in loss(wide, agent_of(wide, 2).kill, 2)
        wide.heal()
        assert wide.hosts == ("n1", "n2", "n3") and len(nodes.queue()) == 2
        narrow = wide.shrink(hosts=1)
        assert narrow.run("kept").get(60).values() == [1, 2]
        wait_until(lambda: nodes.queue() == queue, 30)
        with pytest.raises(SpawnError, match="invalid partition specified: nowhere"):
            narrow.grow(SlurmLauncher(options=["-p", "nowhere"]), hosts=1)
        assert narrow.run("kept").get(60).values() == [1, 2] and nodes.queue() == queue
    await_quiet(nodes)
    assert not known_hosts("slurm")


@pytest.mark.slow
def test_a_node_whose_slurmd_is_killed_is_lost_and_another_takes_its_place(nodes: SlurmNodes) -> None:
    with spawned(2, SlurmLauncher()) as procs:
        procs.run("kept = rank + 1").get(60)
        assert "node n2 has failed, as Slurm says" in loss(procs, nodes.daemons["n2"].kill)
        assert "host n3 started again, rank 1 started again" in str(procs.heal())
        assert procs.hosts == ("n1", "n3") and len(nodes.queue()) == 2
        assert procs.run("globals().get('kept')").get(60).values() == [1, None]
    nodes.daemons["n2"].wait(60)
    start_node(nodes, "n2")
    wait_until(lambda: nodes.ask("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * 3, 60)
    await_quiet(nodes)
    assert not known_hosts("slurm")


@pytest.mark.slow
def test_an_allocation_that_is_there_is_used_and_stays(nodes: SlurmNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.ask("salloc", "--no-shell", "-N3")
    number = nodes.queue()[0].split()[0]
    monkeypatch.setenv("SLURM_JOB_ID", number)
    try:
        with spawned(2, SlurmLauncher()) as procs:
            code = "import os; os.environ['SLURM_JOB_ID']"
            assert procs.run(code).get(60).values() == [number] * 2 and len(nodes.queue()) == 1
            assert "srun ended (killed by SIGKILL" in loss(procs, clients("salloc", "srun")[0].kill)
            procs.heal()
            assert procs.run("rank").get(60).values() == [0, 1]
            assert procs.grow(hosts=1).hosts == ("n1", "n2", "n3") and len(nodes.queue()) == 1
            with pytest.raises(SpawnError, match="Its allocation has no node for it"):
                procs.base().grow(hosts=1)
        assert [line.split()[0] for line in nodes.queue()] == [number]
    finally:
        nodes.ask("scancel", number)
    await_quiet(nodes)


@pytest.mark.slow
def test_a_job_of_several_names_is_one_allocation(nodes: SlurmNodes) -> None:
    job = SlurmJob({"trainers": 2}, time_limit="00:10:00", partition="main")
    job.add_mesh("judges", 1)
    state = job.state()
    with pytest.raises(UsageError, match="has its hosts already"):
        job.add_mesh("more", 1)
    with state.trainers.spawn_procs({"gpus": 1}, torch=False) as procs:
        assert procs.sizes == {"hosts": 2, "gpus": 1} and procs.run("rank").get(60).values() == [0, 1]
    with state.judges.spawn_procs(torch=False) as procs:
        assert procs.hosts == ("n3",) and len(nodes.queue()) == 1
    job.kill()
    await_quiet(nodes)


# ---- controllers come and go ----------------------------------------------------------------------------------------


def test_the_next_controller_has_the_hosts_of_one_that_was_killed(nodes: SlurmNodes, zygote: Zygote) -> None:
    kill_controller(zygote, program("slurm.SlurmLauncher()", **nodes.environment))
    check_next_controller(lambda procs: agent_of(procs, 1).kill(), "its agent on n2 ended")
    await_quiet(nodes)


def test_detached_hosts_are_found_again_and_end_with_their_lease(nodes: SlurmNodes) -> None:
    check_detached(SlurmLauncher(), lambda procs: clients("salloc", "srun"))
    await_quiet(nodes)


@pytest.mark.slow
def test_without_a_controller_the_allocation_ends_with_the_lease(nodes: SlurmNodes, zygote: Zygote) -> None:
    kill_controller(zygote, program("slurm.SlurmLauncher()", **nodes.environment, MESHBOOK_LEASE_S="1"))
    await_quiet(nodes, 60)


# ---- what can go wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "options", "said"),
    [
        (1, ("-p", "nowhere"), "salloc: invalid partition specified: nowhere"),
        (9, (), "configuration not available now; hosts=9, and of the partitions main has 3; see sinfo"),
        (1, ("--nothing-of-the-kind",), "unrecognized option '--nothing-of-the-kind'"),
    ],
)
def test_what_slurm_refuses(nodes: SlurmNodes, count: int, options: tuple[str, ...], said: str) -> None:
    assert said in refusal(SlurmLauncher(options=options), count, nodes)


def test_an_interpreter_that_is_not_there(nodes: SlurmNodes) -> None:
    said = refusal(SlurmLauncher(python="/no/such/python"), 2, nodes)
    assert "meshbook: no Python at /no/such/python" in said and "--python PATH" in said


def test_without_slurm(nodes: SlurmNodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SpawnError, match="there is no sinfo on this machine"):
        start_hosts({"hosts": 1}, SlurmLauncher())


def test_a_number_of_nodes_is_no_option() -> None:
    with pytest.raises(UsageError, match="Slurm cannot be given --nodes=3 here: hosts=N says"):
        SlurmLauncher(options=["--nodes=3"])


@pytest.fixture
def queued(nodes: SlurmNodes) -> Iterator[None]:
    """Others have all nodes."""
    nodes.ask("salloc", "--no-shell", "-N3", "--exclusive")
    number = nodes.queue()[0].split()[0]
    yield
    nodes.ask("scancel", number)
    await_quiet(nodes)


def pending(nodes: SlurmNodes) -> list[str]:
    return [line.split()[0] for line in nodes.queue() if line.endswith("PENDING")]


def test_an_interrupt_in_the_queue_leaves_nothing(nodes: SlurmNodes, queued: None, shown: Shown) -> None:
    with interrupted_once(lambda: "is pending in the queue of Slurm (" in shown()), spawned(2, SlurmLauncher()):
        pass
    assert "is pending in the queue of Slurm (" in shown()
    assert not pending(nodes) and not clients("salloc", "srun") and not known_hosts("slurm")


def test_a_job_that_is_cancelled_in_the_queue(nodes: SlurmNodes, queued: None) -> None:
    thread = once(lambda: pending(nodes), lambda: nodes.ask("scancel", *pending(nodes)))
    with pytest.raises(SpawnError, match="Job has been cancelled"), spawned(2, SlurmLauncher()):
        pass
    thread.join()
    assert not pending(nodes) and not clients("salloc", "srun") and not known_hosts("slurm")


def test_a_controller_that_is_killed_leaves_nothing_in_the_queue(
    nodes: SlurmNodes, queued: None, zygote: Zygote
) -> None:
    driver = zygote.start(program("slurm.SlurmLauncher()", **nodes.environment))
    wait_until(lambda: pending(nodes), 60)
    driver.kill()
    wait_until(lambda: not pending(nodes), 30)
