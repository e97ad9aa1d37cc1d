"""Hosts that people start with the command that they are shown: who may, how often, how long, what becomes of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pexpect
import psutil
import pytest
from joined import LINE, Machine, People, command, people
from ssh_hosts import ssh_hosts

import meshbook
from meshbook import LocalLauncher, ProcMesh, start_hosts
from meshbook.errors import SpawnError, UsageError, WorkerLost
from meshbook.launchers.invitation import Invitation, read_invitation
from meshbook.launchers.manual import ManualLauncher
from meshbook.mesh.driven import own_sessions
from meshbook.wire.zmq_transport import Gate

pytestmark = pytest.mark.cluster


class Shown:
    """What was printed so far, which `capsys` gives once."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self._lock, self._text = capsys, threading.Lock(), ""

    def __call__(self) -> str:
        with self._lock:
            self._text += self._capsys.readouterr().out
            return self._text


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    return Shown(capsys)


@pytest.fixture
def crowd(shown: Shown) -> Iterator[People]:
    with people(shown) as found:
        yield found
        meshbook.shutdown()


@contextlib.contextmanager
def spawned(count: int, **launcher: object) -> Iterator[ProcMesh]:
    """A rank on each of so many hosts, without torch: it is there soon."""
    hosts = start_hosts({"hosts": count}, ManualLauncher(**launcher))  # type: ignore[arg-type]
    with hosts.spawn_procs({"gpus": 1}, torch=False, owns_hosts=True) as procs:
        yield procs


def machine_of(procs: ProcMesh, host: int, crowd: People) -> Machine:
    hello = procs._mesh.hosts[host].hello
    assert hello is not None
    return crowd.machine_of(hello.pid)


def known_hosts() -> list[str]:
    saved = [host for session in own_sessions() for host in session.state.hosts.values()]
    return [host.name for host in saved if host.launcher.engine == "manual"]


def await_shown(shown: Shown, text: str) -> str:
    deadline = time.monotonic() + 60
    while text not in shown() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert text in shown()
    return shown()


def run(line: str) -> tuple[int, str]:
    machine = Machine(line)
    said = machine.end()
    return machine.returncode, said


# ---- what works -----------------------------------------------------------------------------------------------------


def test_one_command_on_two_machines_and_no_more(crowd: People, shown: Shown) -> None:
    crowd.come(2)
    with spawned(2, python="~/env/bin/python") as procs:
        assert procs.run("rank").get(60).values() == [0, 1]
        assert procs.hosts[1] == f"{procs.hosts[0]}-2", "both are called as their machine is, and are told apart"
        assert ' "$HOME"/env/bin/python -m meshbook.join <<< mb1-' in shown() and "each of 2 machines until" in shown()
        code, said = run(command(shown()))
        assert code == 77 and "this ticket has been used as often as it may be: 2 of 2 came: " in said
    for machine in crowd.machines:
        said = machine.end()
        assert machine.returncode == 0 and "is a host of" in said and said.endswith("meshbook: the mesh has ended\n")
    assert not known_hosts()
    code, said = run(command(shown()))
    assert code == 69 and "nobody listens at" in said and "(Connection refused)" in said


def test_its_ticket_is_on_no_command_line_and_in_no_environment(crowd: People, shown: Shown) -> None:
    crowd.come(1)
    with spawned(1) as procs:
        ticket = LINE.findall(shown())[0][1]
        keys = [ticket, read_invitation(ticket).token, *(session.state.secret_key for session in own_sessions())]
        seen = [psutil.Process(), *crowd.machines[0].processes()]
        words = "".join(f"{process.cmdline()}{process.environ()}" for process in seen)
        assert "'meshbook', 'agent'" in words and not [key for key in keys if key in words]
        assert procs.run("rank").get(60).values() == [0]


def test_who_leaves_is_told_of_and_another_comes_in_his_place(crowd: People, shown: Shown) -> None:
    crowd.come(2)
    with spawned(2) as procs:
        procs.run("kept = rank").get(60)
        future = procs.slice(hosts=1).run("import time; time.sleep(120)")
        machine_of(procs, 1, crowd).press_interrupt()
        with pytest.raises(WorkerLost, match=r"its host is lost: its meshbook\.join was ended there, by SIGINT"):
            future.get(60)
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
    with spawned(2) as procs:
        agent = procs._mesh.hosts[1].hello
        future = procs.slice(hosts=1).run("import time; time.sleep(120)")
        assert agent is not None
        psutil.Process(agent.pid).kill()
        with pytest.raises(WorkerLost, match=r"its host is lost: its agent ended \(killed by SIGKILL"):
            future.get(60)
        machine = machine_of(procs, 0, crowd)
        future = procs.slice(hosts=0).run("import time; time.sleep(120)")
        assert machine.stdout is not None
        machine.stdout.close()
        machine.stdout = None
        with pytest.raises(WorkerLost, match=r"its meshbook\.join lost its terminal or its ssh connection"):
            future.get(60)


def test_hosts_of_another_launcher_stay(crowd: People) -> None:
    """Both listen on a network, at addresses of their own."""
    with start_hosts({"hosts": 1}, LocalLauncher(separate_hosts=True)).spawn_procs(
        {"gpus": 1}, torch=False, owns_hosts=True
    ) as local:
        crowd.come(1)
        with spawned(1) as procs:
            assert local.run("'local'").get(60).values() == ["local"]
            assert procs.run("'here'").get(60).values() == ["here"]


def test_a_terminal_is_asked_for_the_ticket_and_does_not_show_it(shown: Shown) -> None:
    def type_it() -> None:
        await_shown(shown, "mb1-")
        child.expect("ticket of the notebook")
        child.sendline(LINE.findall(shown())[0][1])

    child = pexpect.spawn(sys.executable, ["-m", "meshbook.join"], timeout=60, encoding="utf-8")
    thread = threading.Thread(target=type_it)
    thread.start()
    with spawned(1) as procs:
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
    hosts = start_hosts({"hosts": 2}, ManualLauncher())
    with hosts.spawn_procs({"gpus": 2}, owns_hosts=True, device="cpu") as procs:
        code = "t = torch.ones(1) * rank; dist.all_reduce(t); (t.item(), dict(point))"
        assert procs.run(code).get(60).values()[3] == (6.0, {"hosts": 1, "gpus": 1})


def test_the_command_goes_through_ssh_and_its_host_ends_with_that(crowd: People, shown: Shown) -> None:
    with ssh_hosts() as there:
        hosts = start_hosts({"hosts": 1}, ManualLauncher())
        line = command(shown())
        assert there.config is not None
        crowd.machines.append(Machine(f"exec ssh -T -F {there.config} nodeA {line}"))
        with hosts.spawn_procs({"gpus": 1}, torch=False, owns_hosts=True) as procs:
            agent = procs._mesh.hosts[0].hello
            future = procs.run("import time; time.sleep(120)")
            assert agent is not None
            crowd.machines[0].kill()
            with pytest.raises(WorkerLost, match="its host is lost: its meshbook"):
                future.get(60)
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(agent.pid).wait(30)


# ---- what can go wrong ----------------------------------------------------------------------------------------------


def test_nobody_comes_in_time(shown: Shown) -> None:
    with (
        pytest.raises(SpawnError, match=r"did not start: nobody ran its command until \d\d:\d\d"),
        spawned(2, within_s=0.2),
    ):
        pass
    assert not known_hosts()
    meshbook.shutdown()


def test_who_comes_when_another_is_too_late_is_sent_home(crowd: People, shown: Shown) -> None:
    hosts = start_hosts({"hosts": 1}, ManualLauncher(within_s=0.1))
    with pytest.raises(SpawnError):
        hosts.await_ready()
    code, said = run(command(shown()))
    assert code == 77 and "this ticket was good until" in said
    hosts.shutdown()


def test_an_interrupt_ends_the_wait_and_who_has_come_goes(crowd: People, shown: Shown) -> None:
    def press() -> None:
        await_shown(shown, "waiting for 1 host, until ")
        os.kill(os.getpid(), signal.SIGINT)

    crowd.come(1)
    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt), spawned(2):
        pass
    thread.join()
    assert crowd.machines[0].end().endswith("the mesh has ended\n") and not known_hosts()
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
