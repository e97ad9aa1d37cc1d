"""Silence is not death while a process or its machine is seen to live: a stopped agent is suspect, and taken back."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import mail_ranks
import msgspec
import psutil
import pytest
import torch
from controllers import Zygote, alone
from far_hosts import FarLauncher
from mail_ranks import open_desks
from patience import stays, wait_until

import meshbook
from benchmarks.faults.namespace import Namespace, make_namespace
from benchmarks.faults.relay import Relay
from meshbook import LocalLauncher, ProcMesh, shutdown, start_hosts
from meshbook.agent.lease import Lease
from meshbook.controller.host_state import MAX_SILENCE_S
from meshbook.controller.io_turns import SocketTurn
from meshbook.errors import CallFailed, CallInterrupted, MeshError, WorkerLost
from meshbook.launchers.base import LaunchedHost
from meshbook.mesh import states
from meshbook.sessions.folder import read_state
from meshbook.system.event_loop import EventLoop
from meshbook.wire.link import PeerSilence
from meshbook.wire.ticket import Ticket

pytestmark = pytest.mark.cluster


@pytest.fixture(params=["local", "elsewhere"])
def beside(clean_end: None, request: pytest.FixtureRequest) -> Iterator[ProcMesh]:
    """Two agents, one rank each: on this machine, where we see them, or known by their connections alone."""
    hosts = start_hosts({"hosts": 2}, LocalLauncher() if request.param == "local" else FarLauncher())
    with hosts.spawn_procs({"gpus": 1}, name="beside", device="cpu", owns_hosts=True) as mesh:
        yield mesh


def agent_of(mesh: ProcMesh, host: int) -> int:
    hello = mesh._mesh.hosts[host].hello
    assert hello is not None
    return hello.pid


@contextlib.contextmanager
def stalled(pid: int) -> Iterator[None]:
    """The process is stopped for a while."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """An interrupt is pressed as soon as this thread serves the sockets, as it does while it waits for a call."""
    here = threading.get_ident()

    def press() -> None:
        wait_until(lambda: _is_in(sys._current_frames()[here], SocketTurn.drive.__code__))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    yield
    thread.join()


def _is_in(frame: FrameType | None, code: CodeType) -> bool:
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


_STILL_SILENT = r"rank 1 is still in .*: its host is silent for \d+ s: its agent"


def test_an_agent_that_stalls_is_suspect_and_taken_back_with_its_ranks(beside: ProcMesh) -> None:
    beside.run("state = 41 + rank").get(30)
    pids = beside.execute(os.getpid).get(30).values()
    there = open_desks(beside)
    beside.slice(hosts=0).execute(mail_ranks.ask, there, "echo", 1).get(30)
    with stalled(agent_of(beside, 1)):
        pending = beside.run("dist.all_reduce(t := torch.ones(1)); state + t.item()")
        asked = beside.slice(hosts=0).execute(mail_ranks.ask, there, "echo", 2, timeout=60)
        wait_until(lambda: states.suspects(beside))
        (status,) = beside.slice(hosts=1).status()
        assert status.state == "silent"
        assert re.match(r"its host is silent for \d+ s: its agent is stopped or its machine is busy", status.where)
        with interrupted(), pytest.raises(CallInterrupted, match=_STILL_SILENT):
            beside.slice(hosts=1).run("1").get(30)
        stays(lambda: not beside.lost, MAX_SILENCE_S + 2)
        assert "nothing to heal; its process groups were not proved, since ranks are busy" in str(beside.heal())
    assert pending.get(60).values() == [43.0, 44.0]
    assert asked.get(60).values() == [{0: 2, 1: 2}]
    wait_until(lambda: not states.suspects(beside))
    assert beside.execute(os.getpid).get(30).values() == pids
    assert beside.run("state").get(30).values() == [41, 42]


@pytest.mark.parametrize("beside", ["local"], indirect=True)
def test_an_agent_that_is_killed_while_it_is_suspect_is_lost_at_once(beside: ProcMesh) -> None:
    pid = agent_of(beside, 1)
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: states.suspects(beside))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: beside.lost == (1,), timeout_s=5)
    assert not states.suspects(beside)


def test_a_mesh_with_a_suspect_host_of_its_own_can_be_stopped(beside: ProcMesh) -> None:
    with contextlib.suppress(ProcessLookupError), stalled(agent_of(beside, 1)):
        wait_until(lambda: states.suspects(beside))
        assert not beside.lost
        beside.stop(timeout_s=2)
    assert not beside.alive


def test_a_mesh_on_a_suspect_host_that_others_use_says_why_it_has_not_ended(clean_end: None) -> None:
    hosts = start_hosts({"hosts": 1}, LocalLauncher())
    mesh = hosts.spawn_procs({"gpus": 1}, name="shared", device="cpu", group=False)
    with stalled(agent_of(mesh, 0)):
        wait_until(lambda: states.suspects(mesh))
        with pytest.raises(MeshError, match=r"is silent for .* s: its agent is stopped .*; they end when it answers"):
            mesh.stop(timeout_s=0.5)
    mesh._mesh.stopped.get(30)
    hosts.shutdown()


# ---- on other machines -----------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(clean_end: None) -> Iterator[ProcMesh]:
    """Two agents that are known by their connections alone, one rank each."""
    hosts = start_hosts({"hosts": 2}, FarLauncher())
    with hosts.spawn_procs({"gpus": 1}, name="elsewhere", device="cpu", group=False, owns_hosts=True) as mesh:
        yield mesh


@pytest.mark.slow
def test_what_waits_for_a_host_elsewhere_fills_its_connection_and_arrives_once(elsewhere: ProcMesh) -> None:
    elsewhere.run("numbers = []").get(30)
    payload = torch.arange(16 << 20, dtype=torch.int32)
    with stalled(agent_of(elsewhere, 1)):
        pushed = elsewhere.push({"payload": payload})
        calls = [elsewhere.execute(_note, number) for number in range(2000)]
        wait_until(lambda: states.suspects(elsewhere))
        stays(lambda: not elsewhere.lost, MAX_SILENCE_S + 4)
    pushed.get(60)
    assert [call.get(60).values() for call in calls] == [[number, number] for number in range(2000)]
    assert all(torch.equal(each, payload) for each in elsewhere.pull("payload").get(60).values())
    assert elsewhere.pull("numbers").get(30).values() == [list(range(2000))] * 2


def _note(number: int) -> int:
    import __main__

    __main__.numbers.append(number)
    return number


def test_the_end_of_an_agent_elsewhere_is_the_end_of_its_connection(elsewhere: ProcMesh) -> None:
    os.kill(agent_of(elsewhere, 1), signal.SIGKILL)
    wait_until(lambda: "its connection has broken" in str(states.suspects(elsewhere)))
    wait_until(lambda: elsewhere.lost == (1,))
    with pytest.raises(WorkerLost, match="no connection by which its machine answers"):
        elsewhere.run("1").get(30)


def test_a_suspect_host_is_given_up_on_request_and_ends_when_it_comes_back(elsewhere: ProcMesh) -> None:
    former = [
        psutil.Process(pid) for pid in (agent_of(elsewhere, 1), *elsewhere.execute(os.getpid).get(30).values()[1:])
    ]
    with stalled(former[0].pid):
        pending = elsewhere.run("rank")
        wait_until(lambda: states.suspects(elsewhere))
        assert "nothing to heal" in str(elsewhere.heal())
        repaired = elsewhere.heal(force=True)
        assert repaired.ranks == (1,)
        with pytest.raises(WorkerLost, match=r"given up: it was silent for \d+ s"):
            pending.get(30)
        assert elsewhere.run("rank").get(30).values() == [0, 1]
    assert not psutil.wait_procs(former, timeout=30)[1]
    assert elsewhere.run("rank").get(30).values() == [0, 1]


class ProxiedLauncher(FarLauncher):
    """The last host of the first launch dials in through a relay."""

    relay: Relay | None = None

    def launch(self, tickets: list[Ticket]) -> list[LaunchedHost]:
        if self.relay is None:
            host, _, port = tickets[-1].endpoint.removeprefix("tcp://").partition(":")
            self.relay = Relay((host, int(port)))
            last = msgspec.structs.replace(tickets[-1], endpoint=f"tcp://127.0.0.1:{self.relay.port}")
            tickets = [*tickets[:-1], last]
        return super().launch(tickets)


@pytest.mark.slow
def test_a_host_behind_a_proxy_that_passes_nothing_on_is_suspect_until_it_is_given_up(clean_end: None) -> None:
    launcher = ProxiedLauncher()
    hosts = start_hosts({"hosts": 2}, launcher)
    with hosts.spawn_procs({"gpus": 1}, name="proxied", device="cpu", group=False, owns_hosts=True) as mesh:
        former = psutil.Process(agent_of(mesh, 1))
        assert launcher.relay is not None
        launcher.relay.silence(600)
        stays(lambda: not mesh.lost, MAX_SILENCE_S + 3)
        with interrupted(), pytest.raises(CallInterrupted, match=r"its host is silent for \d+ s"):
            mesh.slice(hosts=1).run("1").get(30)
        assert mesh.heal(force=True).ranks == (1,)
        assert mesh.run("rank").get(30).values() == [0, 1]
        launcher.relay.silence(0)  # it hears that it was given up
        assert not psutil.wait_procs([former], timeout=30)[1]
        assert not mesh.lost
    launcher.relay.close()


@pytest.fixture
def cable() -> Iterator[Namespace]:
    """A machine of its own, as far as the network goes."""
    namespace = make_namespace()
    if namespace is None:
        pytest.skip("no network namespace can be made here")
    yield namespace
    namespace.plug()
    namespace.close()


@pytest.mark.slow
@pytest.mark.parametrize("stopped_first", [False, True], ids=["at work", "stopped before"])
def test_a_machine_that_is_cut_off_is_lost_in_time(
    clean_end: None, cable: Namespace, monkeypatch: pytest.MonkeyPatch, stopped_first: bool
) -> None:
    shutdown()
    monkeypatch.setattr("meshbook.mesh.host_agents.loopback_address", lambda: cable.address)
    hosts = start_hosts({"hosts": 2}, FarLauncher(cable))
    with hosts.spawn_procs({"gpus": 1}, name="cut", device="cpu", group=False, owns_hosts=True) as mesh:
        there = open_desks(mesh)
        mesh.execute(mail_ranks.ask, there, "echo", 1).get(60)
        agent = agent_of(mesh, 1)
        if stopped_first:
            os.kill(agent, signal.SIGSTOP)
            wait_until(lambda: states.suspects(mesh))
        cable.pull()
        asked = mesh.slice(hosts=0).execute(mail_ranks.ask, there, "echo", 2, timeout=60)
        began = time.monotonic()
        wait_until(lambda: "its connection has broken" in str(states.suspects(mesh)))
        wait_until(lambda: mesh.lost == (1,), timeout_s=40)
        assert time.monotonic() - began > MAX_SILENCE_S - 4
        with pytest.raises(CallFailed, match="its host is lost"):
            asked.get(30)
        os.kill(agent, signal.SIGKILL)
    shutdown()


@pytest.mark.some("lost")
@pytest.mark.parametrize("replaced", [False, True], ids=["lost", "replaced"])
def test_a_host_that_was_cut_off_ends_within_seconds_of_its_return(
    clean_end: None, cable: Namespace, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    shutdown()
    monkeypatch.setattr("meshbook.mesh.host_agents.loopback_address", lambda: cable.address)
    hosts = start_hosts({"hosts": 2}, FarLauncher(cable))
    with hosts.spawn_procs({"gpus": 1}, name="late", device="cpu", group=False, owns_hosts=True) as mesh:
        agent = psutil.Process(agent_of(mesh, 1))
        former = [agent, *agent.children(recursive=True)]
        cable.pull()
        wait_until(lambda: mesh.lost == (1,), timeout_s=40)
        if replaced:
            assert mesh.heal(launcher=FarLauncher()).ranks == (1,)
        assert all(process.is_running() for process in former), "nobody could tell it"
        folder = mesh._controller.folder
        assert len(folder.state.late_hosts) == replaced, "the next controller is to know of a host that was replaced"
        cable.plug()
        assert not psutil.wait_procs(former, timeout=20)[1]
        if replaced:
            assert mesh.run("rank").get(30).values() == [0, 1]
        wait_until(lambda: not folder.state.late_hosts)
        assert (saved := read_state(folder.path)) is not None and not saved.late_hosts
    shutdown()


def test_a_connection_that_is_reset_after_a_silence_costs_nothing(clean_end: None) -> None:
    launcher = ProxiedLauncher()
    hosts = start_hosts({"hosts": 2}, launcher)
    with hosts.spawn_procs({"gpus": 1}, name="reset", device="cpu", group=False, owns_hosts=True) as mesh:
        assert launcher.relay is not None
        launcher.relay.silence(600)
        calls = [mesh.run("rank") for _ in range(20)]
        stays(lambda: not mesh.lost, MAX_SILENCE_S / 2)
        launcher.relay.cut()
        launcher.relay.silence(0)
        assert [call.get(30).values() for call in calls] == [[0, 1]] * 20
        assert not mesh.lost
    launcher.relay.close()


def test_an_agent_that_was_stopped_does_not_take_its_own_silence_for_its_controllers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    silence = PeerSilence()
    lease = Lease(EventLoop(), 60.0, silence)
    for seconds in (1, 1, 8000, *[1] * 60):
        clock[0] += seconds
        silence.look()
        lease.beat(is_connected=True)
    assert lease.runs
    assert not lease.is_over(has_meshes=True)
    lease.beat(is_connected=False)
    assert not lease.runs
    clock[0] += 1
    assert lease.is_over(has_meshes=True)


REPLACED = """
sys.path.insert(0, {root!r})
import meshbook.mesh.host_agents
from benchmarks.faults.namespace import Namespace
from far_hosts import FarLauncher
from meshbook import start_hosts
cable = Namespace.__new__(Namespace)  # which the test has made
cable.__dict__.update({cable!r})
meshbook.mesh.host_agents.loopback_address = lambda: cable.address
hosts = start_hosts({{"hosts": 2}}, FarLauncher(cable))
mesh = hosts.spawn_procs({{"gpus": 1}}, name="kept", device="cpu", group=False, owns_hosts=True)
mesh.run("n = 41").get(60)
say("agent", mesh._mesh.hosts[1].hello.pid)
wait()
while not mesh.lost:
    time.sleep(0.1)
mesh.heal(launcher=FarLauncher())
say("healed", mesh.run("1").get(60).values())
wait()
"""


@pytest.mark.slow
def test_the_next_controller_ends_a_host_that_the_former_had_given_up(cable: Namespace) -> None:
    with alone() as zygote:
        driver = zygote.start(REPLACED.format(cable=vars(cable), root=str(Path(__file__).parents[3])))
        agent = psutil.Process(int(driver.expect("agent")))
        former = [agent, *agent.children(recursive=True)]
        cable.pull()
        driver.tell()
        assert driver.expect("healed") == "[1, 1]"
        driver.kill()
        (session,) = meshbook.sessions()
        (mesh,) = meshbook.attach(session)
        assert mesh.run("globals().get('n')").get(30).values() == [41, None]
        cable.plug()
        assert not psutil.wait_procs(former, timeout=20)[1], "its lease is three times as long"
        wait_until(lambda: not mesh._controller.folder.state.late_hosts)
        assert mesh.run("rank").get(30).values() == [0, 1]
        mesh.stop()


STOPPED = """
from far_hosts import FarLauncher
from meshbook import start_hosts
hosts = start_hosts({"hosts": 1}, FarLauncher())
mesh = hosts.spawn_procs({"gpus": 1}, name="kept", device="cpu", owns_hosts=True)
mesh.run("import os; n = 41").get(60)
say("pid", mesh.evaluate("os.getpid()").get(30).values()[0])
wait()
say("value", mesh.evaluate("n + 1").get(30).values()[0])
mesh.stop()
"""


@pytest.mark.slow
def test_a_stopped_controller_elsewhere_keeps_its_mesh_beyond_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    lease_s = 3
    monkeypatch.setenv("MESHBOOK_LEASE_S", str(lease_s))
    zygote = Zygote()
    try:
        driver = zygote.start(STOPPED)
        worker = psutil.Process(int(driver.expect("pid")))
        with stalled(driver.pid):
            stays(lambda: worker.is_running(), MAX_SILENCE_S + lease_s)
        driver.tell()
        assert driver.expect("value") == "42"
        driver.wait()
        driver = zygote.start(STOPPED)
        worker = psutil.Process(int(driver.expect("pid")))
        driver.kill()
        assert not psutil.wait_procs([worker], timeout=30)[1]
    finally:
        zygote.close()
