"""Hosts by a real mpirun, of Open MPI and of MPICH: they work as others do, failures are told, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import textwrap
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from controllers import Zygote, alone
from mpi_hosts import FLAVOURS, MPIHosts, await_end, mpi_hosts, mpi_processes

import meshbook
from meshbook import ProcMesh, start_hosts
from meshbook.errors import SpawnError, UsageError, WorkerLost
from meshbook.launchers.mpi import MPILauncher
from meshbook.mesh.driven import own_sessions

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", params=FLAVOURS)
def there(
    request: pytest.FixtureRequest, clean_end: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MPIHosts]:
    with mpi_hosts(request.param, tmp_path_factory.mktemp("mpi")) as found:
        yield found
        meshbook.shutdown()


@contextlib.contextmanager
def spawned(there: MPIHosts, names: tuple[str, ...] = ("nodeA", "nodeB"), **more: object) -> Iterator[ProcMesh]:
    """A rank on each host, without torch: it is there soon."""
    launcher = MPILauncher(**{"program": there.program, "options": there.options(*names), **more})  # type: ignore[arg-type]
    hosts = start_hosts({"hosts": 2}, launcher)
    with hosts.spawn_procs({"gpus": 1}, torch=False, owns_hosts=True, env={"GREETING": "hello"}) as procs:
        yield procs


def agent_of(procs: ProcMesh, host: int) -> psutil.Process:
    hello = procs._mesh.hosts[host].hello
    assert hello is not None
    return psutil.Process(hello.pid)


def loss(procs: ProcMesh, process: psutil.Process, host: int = 1) -> str:
    """What a call says of a rank that is lost while it runs, since a process is killed."""
    future = procs.slice(hosts=host).run("import time; time.sleep(120)")
    process.kill()
    with pytest.raises(WorkerLost) as told:
        future.get(60)
    return str(told.value)


def known_hosts() -> list[str]:
    saved = [host for session in own_sessions() for host in session.state.hosts.values()]
    return [host.name for host in saved if host.launcher.engine == "mpi"]


def test_a_lost_host_comes_back_where_it_was_and_nothing_is_left(there: MPIHosts) -> None:
    with spawned(there) as procs:
        assert procs.hosts == ("nodeA", "nodeB")
        procs.run("kept = rank + 1").get(60)
        tree = [process for each in mpi_processes() for process in [each, *each.children(recursive=True)]]
        keys = [key for session in own_sessions() for key in (session.state.secret_key, session.state.public_key)]
        words = "".join(f"{process.cmdline()}{process.environ()}" for process in tree if process.is_running())
        assert "'meshbook', 'agent'" in words and not [key for key in keys if key in words]
        deadline = time.monotonic() + 30
        while left := [file for session in own_sessions() for file in session.logs.glob("*.tickets")]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        assert "its agent on nodeB ended (killed by SIGKILL" in loss(procs, agent_of(procs, 1))
        assert str(procs.heal()).startswith('mesh "procs": host nodeB started again, rank 1 started again')
        code = "import os, platform; (os.environ['GREETING'], platform.node(), globals().get('kept'))"
        assert procs.run(code).get(60).values() == [("hello", "nodeA", 1), ("hello", "nodeB", None)]
        with pytest.raises(UsageError, match="its hosts are those that mpirun was given"):
            procs.grow(hosts=1)
        assert procs.shrink(hosts=1).run("kept").get(60).values() == [1]
        tree += [process for each in mpi_processes() for process in [each, *each.children(recursive=True)]]
    await_end(tree)
    assert not known_hosts()


@pytest.mark.some("openmpi")
@pytest.mark.slow
def test_collectives_run_across_hosts(there: MPIHosts) -> None:
    hosts = start_hosts({"hosts": 2}, MPILauncher(program=there.program, options=there.options("nodeA", "nodeB")))
    with hosts.spawn_procs({"gpus": 2}, owns_hosts=True, device="cpu") as procs:
        code = "t = torch.ones(1) * rank; dist.all_reduce(t); (t.item(), dict(point))"
        assert procs.run(code).get(60).values()[3] == (6.0, {"hosts": 1, "gpus": 1})


@pytest.mark.some("openmpi")
def test_a_host_on_the_machine_of_mpirun_gets_its_ticket(there: MPIHosts) -> None:
    """Open MPI gives its stdin to none of the processes beside it."""
    launcher = MPILauncher(program=there.program, options=there.options("localhost", "nodeB"))
    with start_hosts({"hosts": 2}, launcher).spawn_procs({"gpus": 1}, torch=False, owns_hosts=True) as procs:
        assert procs.run("import platform; platform.node()").get(60).values() == [platform.node(), "nodeB"]


def test_an_mpirun_that_is_killed_takes_its_hosts_with_it_and_heals(there: MPIHosts) -> None:
    with spawned(there) as procs:
        (client,) = mpi_processes()
        before = client.children(recursive=True)
        assert "mpirun ended (killed by SIGKILL" in loss(procs, client)
        procs.heal()
        assert procs.hosts == ("nodeA", "nodeB") and procs.run("rank").get(60).values() == [0, 1]
    await_end(before)


@pytest.mark.parametrize(
    ("names", "more", "said"),
    [
        (("nodeA", "elsewhere"), {}, "does not reach its hosts: ssh: Could not resolve hostname elsewhere"),
        (("nodeA",), {}, "two agents on nodeA|options name fewer nodes than hosts=N asks for"),
        (("nodeA", "nodeB"), {"python": "/no/python"}, "no Python at /no/python.*--python PATH"),
        (("nodeA", "nodeB"), {"program": "echo"}, "is neither of Open MPI nor of MPICH, as far as it says: "),
        (("nodeA", "nodeB"), {"program": "no-mpirun"}, "there is no no-mpirun on this machine"),
    ],
)
def test_what_fails_is_told(there: MPIHosts, names: tuple[str, ...], more: dict[str, str], said: str) -> None:
    with pytest.raises(SpawnError, match=f"(?s){said}"), spawned(there, names, **more):
        pass
    await_end(())
    assert not known_hosts()


def test_an_interrupt_while_it_connects_leaves_nothing(there: MPIHosts) -> None:
    def press() -> None:
        deadline = time.monotonic() + 60
        while not (there.folder / "waits").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    (there.folder / "wait").touch()
    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt), spawned(there):
            pass
    finally:
        thread.join()
        (there.folder / "wait").unlink()
    await_end(())
    assert not known_hosts()


@pytest.mark.parametrize("option", ["-n", "-np", "--np=3", "-ppn", "--map-by", "--stdin"])
def test_how_many_there_are_is_no_option(option: str) -> None:
    with pytest.raises(UsageError, match=f"mpirun cannot be given {option} here: hosts=N says"):
        MPILauncher(options=[option, "3"])


@pytest.fixture(scope="module")
def zygote(there: MPIHosts) -> Iterator[Zygote]:
    meshbook.shutdown()
    with alone() as started:
        yield started


_PROGRAM = """
    import os
    os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    from meshbook import start_hosts
    from meshbook.launchers.mpi import MPILauncher
    hosts = start_hosts({{"hosts": 2}}, MPILauncher(program={program!r}, options={options!r}))
    procs = hosts.spawn_procs({{"gpus": 1}}, torch=False, owns_hosts=True, name="kept")
    procs.run("kept = rank + 1").get(60)
    say("ready")
    wait()
"""


@pytest.mark.slow
def test_the_next_controller_has_the_hosts_of_one_that_was_killed(there: MPIHosts, zygote: Zygote) -> None:
    meshbook.shutdown()
    options = there.options("nodeA", "nodeB")
    driver = zygote.start(textwrap.dedent(_PROGRAM.format(program=there.program, options=options)))
    driver.expect("ready")
    tree = driver.family()
    driver.kill()
    attached = meshbook.attach("kept", timeout_s=60)
    procs = attached.mesh("kept")
    assert attached.lost_hosts == [] and procs.hosts == ("nodeA", "nodeB")
    assert procs.run("kept").get(60).values() == [1, 2]
    assert "its agent on nodeB ended" in loss(procs, agent_of(procs, 1))
    procs.heal()
    assert procs.run("globals().get('kept')").get(60).values() == [1, None]
    procs.stop()
    meshbook.shutdown()
    await_end(tree)


@pytest.mark.slow
def test_detached_hosts_end_with_their_lease(there: MPIHosts) -> None:
    hosts = start_hosts({"hosts": 2}, MPILauncher(program=there.program, options=there.options("nodeA", "nodeB")))
    hosts.spawn_procs({"gpus": 1}, torch=False, owns_hosts=True, name="left").run("kept = 1").get(60)
    meshbook.detach()
    attached = meshbook.attach("left", timeout_s=60)
    assert attached.lost_hosts == [] and attached.mesh("left").run("kept").get(60).values() == [1, 1]
    clients = mpi_processes()
    meshbook.detach(lease_s=0.5)
    assert clients and psutil.wait_procs(clients, timeout=60)[1] == []
    start_hosts({"hosts": 1}, MPILauncher(program=there.program, options=there.options("nodeA"))).shutdown()
    await_end(clients)  # whoever starts the next one reaps them
