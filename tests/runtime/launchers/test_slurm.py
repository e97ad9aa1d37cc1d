"""Hosts on the nodes of a real Slurm: they work as others do, each failure is told, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from controllers import Zygote, alone
from slurm_cluster import await_quiet, slurm_cluster, slurm_processes, tasks

import meshbook
from benchmarks.slurm_nodes import SlurmNodes, start_node
from meshbook import ProcMesh, start_hosts
from meshbook.errors import SpawnError, UsageError, WorkerLost
from meshbook.launchers.slurm import SlurmLauncher
from meshbook.mesh.driven import own_sessions
from meshbook.monarch.job import SlurmJob

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def nodes(clean_end: None) -> Iterator[SlurmNodes]:
    with pytest.MonkeyPatch.context() as patch, slurm_cluster(patch) as found:
        yield found
        meshbook.shutdown()


@contextlib.contextmanager
def spawned(count: int, **launcher: object) -> Iterator[ProcMesh]:
    """A rank on each of so many nodes, without torch: it is there soon."""
    hosts = start_hosts({"hosts": count}, SlurmLauncher(**launcher))  # type: ignore[arg-type]
    with hosts.spawn_procs({"gpus": 1}, torch=False, owns_hosts=True, env={"GREETING": "hello"}) as procs:
        yield procs


def agent_of(procs: ProcMesh, host: int) -> psutil.Process:
    hello = procs._mesh.hosts[host].hello
    assert hello is not None
    return psutil.Process(hello.pid)


def loss(procs: ProcMesh, how: object, rank: int = 1) -> str:
    """What a call says of a rank that is lost by ``how`` while it runs."""
    future = procs.slice(hosts=rank).run("import time; time.sleep(120)")
    how()  # type: ignore[operator]
    with pytest.raises(WorkerLost) as told:
        future.get(60)
    return str(told.value)


def known_hosts() -> list[str]:
    saved = [host for session in own_sessions() for host in session.state.hosts.values()]
    return [host.name for host in saved if host.launcher.engine == "slurm"]


# ---- what works -----------------------------------------------------------------------------------------------------


def test_collectives_run_across_nodes_and_the_job_ends_with_the_mesh(nodes: SlurmNodes) -> None:
    hosts = start_hosts({"hosts": 2}, SlurmLauncher())
    with hosts.spawn_procs({"gpus": 2}, owns_hosts=True, device="cpu") as procs:
        assert procs.hosts == ("n1", "n2") and len(nodes.queue()) == 1
        code = "t = torch.ones(1) * rank; dist.all_reduce(t); (t.item(), dict(point))"
        assert procs.run(code).get(60).values()[3] == (6.0, {"hosts": 1, "gpus": 1})
    await_quiet(nodes)


def test_a_lost_host_comes_back_on_its_node_in_the_same_job(nodes: SlurmNodes) -> None:
    with spawned(2) as procs:
        procs.run("kept = rank + 1").get(60)
        queue = nodes.queue()
        assert "its agent on n2 ended (exited with exit code 137)" in loss(procs, agent_of(procs, 1).kill)
        assert str(procs.heal()).startswith('mesh "procs": host n2 started again, rank 1 started again')
        code = "import os; (os.environ['GREETING'], os.environ['SLURMD_NODENAME'], globals().get('kept'))"
        assert procs.run(code).get(60).values() == [("hello", "n1", 1), ("hello", "n2", None)]
        assert "its agent on n2 ended" in loss(procs, agent_of(procs, 1).kill), "as often as it is lost"
        procs.heal()
        assert procs.hosts == ("n1", "n2") and nodes.queue() == queue
        keys = [key for session in own_sessions() for key in (session.state.secret_key, session.state.public_key)]
        seen = [*tasks(nodes), *slurm_processes()]
        words = "".join(f"{process.cmdline()}{process.environ()}" for process in seen if process.is_running())
        assert len(tasks(nodes)) >= 4 and "'meshbook', 'agent'" in words and not [key for key in keys if key in words]
    await_quiet(nodes)


@pytest.mark.slow
def test_srun_and_then_the_job_are_killed(nodes: SlurmNodes) -> None:
    with spawned(2) as procs:
        queue = nodes.queue()
        for client in slurm_processes():
            if client.name() == "srun":
                client.kill()
        procs_lost = loss(procs, lambda: None)
        assert "srun ended (killed by SIGKILL" in procs_lost
        procs.heal()
        assert procs.run("rank").get(60).values() == [0, 1] and nodes.queue() == queue
        number = queue[0].split()[0]
        assert f"Slurm has cancelled job {number}" in loss(procs, lambda: nodes.ask("scancel", number))
        deadline = time.monotonic() + 60
        while len(procs.lost) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "ranks 0,1 started again" in str(procs.heal())
        assert len(set(procs.hosts)) == 2 and procs.run("rank").get(60).values() == [0, 1]
        (another,) = nodes.queue()
        assert another.split()[0] != number, "one allocation for both"
    await_quiet(nodes)
    assert not known_hosts()


def test_more_hosts_come_by_another_allocation_which_ends_when_they_leave(nodes: SlurmNodes) -> None:
    with spawned(2) as procs:
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
        deadline = time.monotonic() + 30
        while nodes.queue() != queue and time.monotonic() < deadline:
            time.sleep(0.1)
        assert nodes.queue() == queue
        with pytest.raises(SpawnError, match="invalid partition specified: nowhere"):
            narrow.grow(SlurmLauncher(options=["-p", "nowhere"]), hosts=1)
        assert narrow.run("kept").get(60).values() == [1, 2] and nodes.queue() == queue
    await_quiet(nodes)
    assert not known_hosts()


@pytest.mark.slow
def test_a_node_whose_slurmd_is_killed_is_lost_and_another_takes_its_place(nodes: SlurmNodes) -> None:
    with spawned(2) as procs:
        procs.run("kept = rank + 1").get(60)
        assert "node n2 has failed, as Slurm says" in loss(procs, nodes.daemons["n2"].kill)
        assert "host n3 started again, rank 1 started again" in str(procs.heal())
        assert procs.hosts == ("n1", "n3") and len(nodes.queue()) == 2
        assert procs.run("globals().get('kept')").get(60).values() == [1, None]
    nodes.daemons["n2"].wait(60)
    start_node(nodes, "n2")
    deadline = time.monotonic() + 60
    while nodes.ask("sinfo", "-h", "-N", "-o", "%T").split() != ["idle"] * 3 and time.monotonic() < deadline:
        time.sleep(0.2)
    await_quiet(nodes)
    assert not known_hosts()


@pytest.mark.slow
def test_an_allocation_that_is_there_is_used_and_stays(nodes: SlurmNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.ask("salloc", "--no-shell", "-N3")
    number = nodes.queue()[0].split()[0]
    monkeypatch.setenv("SLURM_JOB_ID", number)
    try:
        with spawned(2) as procs:
            code = "import os; os.environ['SLURM_JOB_ID']"
            assert procs.run(code).get(60).values() == [number] * 2 and len(nodes.queue()) == 1
            assert "srun ended (killed by SIGKILL" in loss(procs, slurm_processes()[0].kill)
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


@pytest.fixture(scope="module")
def zygote(clean_end: None) -> Iterator[Zygote]:
    meshbook.shutdown()
    with alone() as started:
        yield started


_PROGRAM = """
    import os
    os.environ.update({environment!r})
    from meshbook import start_hosts
    from meshbook.launchers.slurm import SlurmLauncher
    hosts = start_hosts({{"hosts": 2}}, SlurmLauncher())
    procs = hosts.spawn_procs({{"gpus": 1}}, torch=False, owns_hosts=True, name="kept")
    procs.run("kept = rank + 1").get(60)
    say("ready")
    wait()
"""


def test_the_next_controller_has_the_hosts_of_one_that_was_killed(nodes: SlurmNodes, zygote: Zygote) -> None:
    meshbook.shutdown()
    driver = zygote.start(textwrap.dedent(_PROGRAM.format(environment=nodes.environment)))
    driver.expect("ready")
    driver.kill()
    attached = meshbook.attach("kept", timeout_s=60)
    procs = attached.mesh("kept")
    assert attached.lost_hosts == [] and procs.hosts == ("n1", "n2")
    assert procs.run("kept").get(60).values() == [1, 2]
    assert "its agent on n2 ended" in loss(procs, agent_of(procs, 1).kill)
    procs.heal()
    assert procs.run("globals().get('kept')").get(60).values() == [1, None] and len(nodes.queue()) == 1
    procs.stop()
    meshbook.shutdown()
    await_quiet(nodes)


def test_detached_hosts_are_found_again_and_end_with_their_lease(nodes: SlurmNodes) -> None:
    hosts = start_hosts({"hosts": 1}, SlurmLauncher())
    hosts.spawn_procs({"gpus": 1}, torch=False, owns_hosts=True, name="left").run("kept = 1").get(60)
    meshbook.detach()
    attached = meshbook.attach("left", timeout_s=60)
    assert attached.lost_hosts == [] and attached.mesh("left").run("kept").get(60).values() == [1]
    clients = slurm_processes()
    meshbook.detach(lease_s=0.5)
    assert clients and psutil.wait_procs(clients, timeout=60)[1] == []
    await_quiet(nodes)


@pytest.mark.slow
def test_without_a_controller_the_allocation_ends_with_the_lease(nodes: SlurmNodes, zygote: Zygote) -> None:
    meshbook.shutdown()
    environment = {**nodes.environment, "MESHBOOK_LEASE_S": "1"}
    driver = zygote.start(textwrap.dedent(_PROGRAM.format(environment=environment)))
    driver.expect("ready")
    driver.kill()
    await_quiet(nodes, 60)


# ---- what can go wrong ----------------------------------------------------------------------------------------------


def refusal(nodes: SlurmNodes, count: int = 1, **launcher: object) -> str:
    """What spawning says, within seconds; nothing is left of it."""
    began = time.monotonic()
    with pytest.raises(SpawnError) as told, spawned(count, **launcher):
        pass
    assert time.monotonic() - began < 60
    await_quiet(nodes)
    assert not known_hosts()
    return str(told.value)


@pytest.mark.parametrize(
    ("count", "options", "said"),
    [
        (1, ("-p", "nowhere"), "salloc: invalid partition specified: nowhere"),
        (9, (), "configuration not available now; hosts=9, and of the partitions main has 3; see sinfo"),
        (1, ("--nothing-of-the-kind",), "unrecognized option '--nothing-of-the-kind'"),
    ],
)
def test_what_slurm_refuses(nodes: SlurmNodes, count: int, options: tuple[str, ...], said: str) -> None:
    assert said in refusal(nodes, count, options=options)


def test_an_interpreter_that_is_not_there(nodes: SlurmNodes) -> None:
    said = refusal(nodes, 2, python="/no/such/python")
    assert "meshbook: no Python at /no/such/python" in said and "--python PATH" in said


@pytest.mark.slow
def test_versions_that_differ(nodes: SlurmNodes, tmp_path: Path) -> None:
    path = tmp_path / "other"
    patch = "import meshbook.wire.messages as m; m.PROTOCOL_VERSION = 1"
    code = f"{patch}; from meshbook.launchers.templates import be_host; be_host('meshbook.agent.host_agent')"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}"\n')
    path.chmod(0o700)
    assert "it speaks protocol 1, this side" in refusal(nodes, 1, python=str(path))


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


def while_queued(nodes: SlurmNodes, act: object) -> threading.Thread:
    def look() -> None:
        deadline = time.monotonic() + 60
        while not (waiting := pending(nodes)) and time.monotonic() < deadline:
            time.sleep(0.05)
        act(waiting[0])  # type: ignore[operator]

    thread = threading.Thread(target=look)
    thread.start()
    return thread


def test_an_interrupt_in_the_queue_leaves_nothing(
    nodes: SlurmNodes, queued: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(number: str) -> None:
        deadline = time.monotonic() + 60
        while "is pending in the queue" not in (said := capsys.readouterr().out) and time.monotonic() < deadline:
            time.sleep(0.05)
        told.append(said)
        os.kill(os.getpid(), signal.SIGINT)

    told: list[str] = []
    thread = while_queued(nodes, press)
    with pytest.raises(KeyboardInterrupt), spawned(2):
        pass
    thread.join()
    assert "in the queue of Slurm (" in told[0]
    assert not pending(nodes) and not slurm_processes() and not known_hosts()


def test_a_job_that_is_cancelled_in_the_queue(nodes: SlurmNodes, queued: None) -> None:
    thread = while_queued(nodes, lambda number: nodes.ask("scancel", number))
    with pytest.raises(SpawnError, match="Job has been cancelled"), spawned(2):
        pass
    thread.join()
    assert not pending(nodes) and not slurm_processes() and not known_hosts()


def test_a_controller_that_is_killed_leaves_nothing_in_the_queue(
    nodes: SlurmNodes, queued: None, zygote: Zygote
) -> None:
    driver = zygote.start(textwrap.dedent(_PROGRAM.format(environment=nodes.environment)))
    thread = while_queued(nodes, lambda number: driver.kill())
    thread.join()
    deadline = time.monotonic() + 30
    while pending(nodes) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not pending(nodes)


def test_who_has_no_such_hosts_does_not_load_it() -> None:
    code = "import sys, meshbook.mesh.driven; print('meshbook.launchers.slurm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
