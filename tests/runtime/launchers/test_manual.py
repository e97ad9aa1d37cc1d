"""Hosts that people start with the command that they are shown: who may, how often, how long, what becomes of it."""

from __future__ import annotations

import contextlib
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import psutil
import pytest
from engine_clusters import ssh_hosts
from engine_hosts import (
    Shown,
    agent_of,
    check_collectives,
    check_no_secret_is_seen,
    interrupted_once,
    known_hosts,
    loss,
    once,
    spawned,
)
from joined import LINE, Machine, People, command, people, whole_line

import meshbook
from meshbook import LocalLauncher, ProcMesh, start_hosts
from meshbook.errors import SpawnError, UsageError
from meshbook.launchers.manual import ManualLauncher
from meshbook.mesh.driven import own_sessions
from meshbook.wire.invitation import Invitation, read_invitation
from meshbook.wire.zmq_transport import Gate

pytestmark = pytest.mark.cluster


@pytest.fixture
def crowd(shown: Shown) -> Iterator[People]:
    with people(shown) as found:
        yield found
        meshbook.shutdown()


def machine_of(procs: ProcMesh, host: int, crowd: People) -> Machine:
    return crowd.machine_of(agent_of(procs, host).pid)


def run(line: str) -> tuple[int, str]:
    machine = Machine(line)
    said = machine.end()
    return machine.returncode, said


# ---- what works -----------------------------------------------------------------------------------------------------


def test_one_command_on_two_machines_and_no_more(crowd: People, shown: Shown) -> None:
    crowd.come(2)
    with spawned(2, ManualLauncher(python="~/env/bin/python")) as procs:
        assert procs.run("rank").get(60).values() == [0, 1]
        assert procs.hosts[1] == f"{procs.hosts[0]}-2", "both are called as their machine is, and are told apart"
        assert ' "$HOME"/env/bin/python -m meshbook.join <<< mb1-' in shown() and "each of 2 machines until" in shown()
        code, said = run(command(shown()))
        assert code == 77 and "this ticket has been used as often as it may be: 2 of 2 came: " in said
    for machine in crowd.machines:
        said = machine.end()
        assert machine.returncode == 0 and "is a host of" in said and said.endswith("meshbook: the mesh has ended\n")
    assert not known_hosts("manual")
    code, said = run(command(shown()))
    assert code == 69 and "nobody listens at" in said and "(Connection refused)" in said


def test_its_ticket_is_on_no_command_line_and_in_no_environment(crowd: People, shown: Shown) -> None:
    crowd.come(1)
    with spawned(1, ManualLauncher()) as procs:
        ticket = LINE.findall(shown())[0][1]
        seen = [psutil.Process(), *crowd.machines[0].processes()]
        check_no_secret_is_seen(seen, ticket, read_invitation(ticket).token)
        assert procs.run("rank").get(60).values() == [0]


def test_who_leaves_is_told_of_and_another_comes_in_his_place(crowd: People, shown: Shown) -> None:
    crowd.come(2)
    with spawned(2, ManualLauncher()) as procs:
        procs.run("kept = rank").get(60)
        said = loss(procs, machine_of(procs, 1, crowd).press_interrupt)
        assert "its host is lost: its meshbook.join was ended there, by SIGINT" in said
        crowd.come(1)
        assert "started again, rank 1 started again" in str(procs.heal())
        assert "run this on one machine until" in shown()
        assert procs.run("globals().get('kept')").get(60).values() == [0, None]
        crowd.come(1)
        assert "hosts=3" in str(procs.grow(hosts=1))
        assert procs.base().run("rank").get(60).values() == [0, 1, 2]
        assert "hosts=1" in str(procs.base().shrink(hosts=2))
        assert procs.base().run("kept").get(60).values() == [0]


def test_an_agent_that_is_killed_and_a_terminal_that_closes(crowd: People, shown: Shown) -> None:
    crowd.come(2)
    with spawned(2, ManualLauncher()) as procs:
        assert "its host is lost: its agent ended (killed by SIGKILL" in loss(procs, agent_of(procs, 1).kill)
        machine = machine_of(procs, 0, crowd)
        assert machine.stdout is not None
        said = loss(procs, machine.stdout.close, 0)
        machine.stdout = None
        assert "its meshbook.join lost its terminal or its ssh connection" in said


def test_hosts_of_another_launcher_stay(crowd: People) -> None:
    """Both listen on a network, at addresses of their own."""
    with spawned(1, LocalLauncher(separate_hosts=True)) as local:
        crowd.come(1)
        with spawned(1, ManualLauncher()) as procs:
            assert local.run("'local'").get(60).values() == ["local"]
            assert procs.run("'here'").get(60).values() == ["here"]


def test_a_terminal_is_asked_for_the_ticket_and_does_not_show_it(shown: Shown) -> None:
    def type_it() -> None:
        child.expect("ticket of the notebook")
        child.sendline(LINE.findall(shown())[0][1])

    child = pexpect.spawn(sys.executable, ["-m", "meshbook.join"], timeout=60, encoding="utf-8")
    thread = once(lambda: "mb1-" in shown(), type_it)
    with spawned(1, ManualLauncher()) as procs:
        assert procs.run("rank").get(60).values() == [0]
    thread.join()
    child.expect("the mesh has ended")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    meshbook.shutdown()


@pytest.mark.slow
def test_collectives_run_across_them(crowd: People) -> None:
    crowd.come(2)
    check_collectives(ManualLauncher())


@pytest.mark.parametrize("place", ["plain", "with a space", "at home"])
def test_the_command_goes_through_ssh_and_its_host_ends_with_that(
    place: str, tmp_path: Path, crowd: People, shown: Shown
) -> None:
    folder = tmp_path / place
    folder.mkdir()
    python = folder / "python"
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' \"$@\"\n")
    python.chmod(0o755)
    with ssh_hosts() as there:
        at_home = f"~/{os.path.relpath(python, pwd.getpwuid(os.getuid()).pw_dir)}"
        hosts = start_hosts({"hosts": 1}, ManualLauncher(python=at_home if place == "at home" else str(python)))
        assert there.config is not None
        by_ssh = f"exec ssh -T -F {there.config} nodeA {whole_line(shown())}"
        crowd.machines.append(Machine(f"HOME=/nowhere; {by_ssh}"))  # the home folder is that of the other machine
        with hosts.spawn_procs({"gpus": 1}, torch=False, owns_hosts=True) as procs:
            agent = agent_of(procs, 0)
            assert "its host is lost: its meshbook" in loss(procs, crowd.machines[0].kill, 0)
            with contextlib.suppress(psutil.NoSuchProcess):
                agent.wait(30)


# ---- what can go wrong ----------------------------------------------------------------------------------------------


def test_nobody_comes_in_time(shown: Shown) -> None:
    said = r"did not start: nobody ran its command until \d\d:\d\d"
    with pytest.raises(SpawnError, match=said), spawned(2, ManualLauncher(within_s=0.2)):
        pass
    assert not known_hosts("manual")
    meshbook.shutdown()


def test_who_comes_when_another_is_too_late_is_sent_home(crowd: People, shown: Shown) -> None:
    hosts = start_hosts({"hosts": 1}, ManualLauncher(within_s=0.1))
    with pytest.raises(SpawnError):
        hosts.await_ready()
    code, said = run(command(shown()))
    assert code == 77 and "this ticket was good until" in said
    hosts.shutdown()


def test_an_interrupt_ends_the_wait_and_who_has_come_goes(crowd: People, shown: Shown) -> None:
    crowd.come(1)
    with interrupted_once(lambda: "waiting for 1 host, until " in shown()), spawned(2, ManualLauncher()):
        pass
    assert crowd.machines[0].end().endswith("the mesh has ended\n") and not known_hosts("manual")
    assert "1 of 2 came: " in shown()


def test_tickets_that_are_none(crowd: People, shown: Shown) -> None:
    hosts = start_hosts({"hosts": 1}, ManualLauncher())
    line = command(shown())
    code, said = run(line[:-4])
    assert code == 2 and "a ticket is the whole line beginning with mb1-" in said and "copy it once more" in said
    real = read_invitation(line.rpartition(" ")[2])
    forged = Invitation(real.endpoint, real.key, "guessed")
    code, said = run(f"'{sys.executable}' -m meshbook.join <<< {forged}")
    assert code == 77 and "no mesh here has this ticket" in said
    assert "turned away" in hosts._hosts[0].launched.waits_for(), "the notebook says so too"
    gate = Gate("tcp://127.0.0.1:*", lambda question: question)
    code, said = run(f"'{sys.executable}' -m meshbook.join <<< {Invitation(gate.endpoint, real.key, real.token)}")
    gate.close()
    assert code == 69 and "this ticket is an old one" in said
    code, said = run(f"'{sys.executable}' -m meshbook.join {real}")
    assert code == 2 and "does not go on the command line" in " ".join(said.split())
    (session,) = own_sessions()
    assert "was turned away: no mesh here has this ticket" in (session.logs / "gate.log").read_text()
    hosts.shutdown()


def test_another_version_takes_no_place(crowd: People, shown: Shown) -> None:
    hosts = start_hosts({"hosts": 1}, ManualLauncher())
    ticket = LINE.findall(shown())[0][1]
    patch = "import meshbook.wire.messages as m; m.PROTOCOL_VERSION = 1; import sys, meshbook.join as j"
    done = subprocess.run(
        [sys.executable, "-c", f"{patch}; sys.exit(j.main())"], input=ticket, text=True, capture_output=True, timeout=60
    )
    assert done.returncode == 77 and "it speaks protocol 1 of meshbook, the notebook" in done.stderr
    assert "turned away" in hosts._hosts[0].launched.waits_for()
    crowd.machines.append(Machine(command(shown())))
    hosts.await_ready()
    hosts.shutdown()


def test_addresses_and_times_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match=r'"192.0.2.77" means 192.0.2.77, which are others'):
        ManualLauncher("192.0.2.77")
    with pytest.raises(UsageError, match=r'"no\.such\.host\.invalid" is unknown here'):
        ManualLauncher("no.such.host.invalid")
    with pytest.raises(UsageError, match="a number of seconds above 0"):
        ManualLauncher(within_s=0)
    assert ManualLauncher("127.0.0.1").transport == "tcp://127.0.0.1"
