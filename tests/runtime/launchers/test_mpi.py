"""Hosts by a real mpirun, of Open MPI and of MPICH: they work as others do, failures are told, and nothing is left."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator

import pytest
from controllers import Zygote
from engine_hosts import (
    agent_of,
    check_collectives,
    check_detached,
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
from mpi_hosts import FLAVOURS, MPIHosts, await_end, mpi_hosts, mpi_processes
from patience import wait_until

import meshbook
from meshbook import start_hosts
from meshbook.errors import UsageError
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


def launcher(there: MPIHosts, *names: str, **more: object) -> MPILauncher:
    options = there.options(*(names or ("nodeA", "nodeB")))
    return MPILauncher(**{"program": there.program, "options": options, **more})  # type: ignore[arg-type]


def test_a_lost_host_comes_back_where_it_was_and_nothing_is_left(there: MPIHosts) -> None:
    with spawned(2, launcher(there)) as procs:
        assert procs.hosts == ("nodeA", "nodeB")
        procs.run("kept = rank + 1").get(60)
        tree = [process for each in mpi_processes() for process in [each, *each.children(recursive=True)]]
        check_no_secret_is_seen(tree)
        wait_until(lambda: not [file for session in own_sessions() for file in session.logs.glob("*.tickets")], 30)
        assert "its agent on nodeB ended (killed by SIGKILL" in loss(procs, agent_of(procs, 1).kill)
        assert str(procs.heal()).startswith('mesh "procs": host nodeB started again, rank 1 started again')
        code = "import os, platform; (os.environ['GREETING'], platform.node(), globals().get('kept'))"
        assert procs.run(code).get(60).values() == [("hello", "nodeA", 1), ("hello", "nodeB", None)]
        with pytest.raises(UsageError, match="its hosts are those that mpirun was given"):
            procs.grow(hosts=1)
        assert procs.shrink(hosts=1).run("kept").get(60).values() == [1]
        tree += [process for each in mpi_processes() for process in [each, *each.children(recursive=True)]]
    await_end(tree)
    assert not known_hosts("mpi")


@pytest.mark.some("openmpi")
@pytest.mark.slow
def test_collectives_run_across_hosts(there: MPIHosts) -> None:
    check_collectives(launcher(there))


@pytest.mark.some("openmpi")
def test_a_host_on_the_machine_of_mpirun_gets_its_ticket(there: MPIHosts) -> None:
    """Open MPI gives its stdin to none of the processes beside it."""
    with spawned(2, launcher(there, "localhost", "nodeB")) as procs:
        assert procs.run("import platform; platform.node()").get(60).values() == [platform.node(), "nodeB"]


def test_an_mpirun_that_is_killed_takes_its_hosts_with_it_and_heals(there: MPIHosts) -> None:
    with spawned(2, launcher(there)) as procs:
        (client,) = mpi_processes()
        before = client.children(recursive=True)
        assert "mpirun ended (killed by SIGKILL" in loss(procs, client.kill)
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
    assert re.search(said, refusal(launcher(there, *names, **more), 2), re.S)
    await_end(())


def test_an_interrupt_while_it_connects_leaves_nothing(there: MPIHosts) -> None:
    (there.folder / "wait").touch()
    try:
        with interrupted_once((there.folder / "waits").exists), spawned(2, launcher(there)):
            pass
    finally:
        (there.folder / "wait").unlink()
    await_end(())
    assert not known_hosts("mpi")


@pytest.mark.parametrize("option", ["-n", "-np", "--np=3", "-ppn", "--map-by", "--stdin"])
def test_how_many_there_are_is_no_option(option: str) -> None:
    with pytest.raises(UsageError, match=f"mpirun cannot be given {option} here: hosts=N says"):
        MPILauncher(options=[option, "3"])


@pytest.mark.slow
def test_the_next_controller_has_the_hosts_of_one_that_was_killed(there: MPIHosts, zygote: Zygote) -> None:
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    made = f"mpi.MPILauncher(program={there.program!r}, options={there.options('nodeA', 'nodeB')!r})"
    tree = kill_controller(zygote, program(made, **allowed))
    check_next_controller(lambda procs: agent_of(procs, 1).kill(), "its agent on nodeB ended")
    await_end(tree)


@pytest.mark.slow
def test_detached_hosts_end_with_their_lease(there: MPIHosts) -> None:
    clients = check_detached(launcher(there, "nodeA"), lambda procs: mpi_processes())
    start_hosts({"hosts": 1}, launcher(there, "nodeA")).shutdown()
    await_end(clients)  # whoever starts the next one reaps them
