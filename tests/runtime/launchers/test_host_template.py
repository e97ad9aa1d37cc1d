"""Several hosts on one machine: imported once, and as independent of each other as if each had been started alone."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from meshbook import HostMesh, LocalLauncher, ProcMesh, attach, errors, shutdown, start_hosts
from meshbook.launchers import local
from meshbook.launchers.templates import HostTemplate
from meshbook.system.processes import process_state
from meshbook.wire.ticket import Ticket
from tests.support.controllers import Zygote, alone

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("no_lasting_template")]


@pytest.fixture
def hosts(clean_end: None) -> Iterator[HostMesh]:
    with _hosts(2) as hosts:
        yield hosts


@contextlib.contextmanager
def _hosts(count: int) -> Iterator[HostMesh]:
    hosts = start_hosts({"hosts": count}, LocalLauncher())
    yield hosts
    hosts.end()


@pytest.fixture
def zygote() -> Iterator[Zygote]:
    with alone() as zygote:
        yield zygote


def _spawn(hosts: HostMesh) -> ProcMesh:
    return hosts.spawn_procs({"gpus": 2}, group=False, device="cpu")


def _agents(hosts: HostMesh) -> list[psutil.Process]:
    hellos = [host.present().hello for host in hosts._hosts]
    return [psutil.Process(hello.pid) for hello in hellos if hello is not None]


def _workers(mesh: ProcMesh) -> list[int]:
    return [status.pid for status in mesh.status()]


def _dead(mesh: ProcMesh) -> list[int]:
    return [status.rank for status in mesh.status() if status.state == "dead"]


def _own_template(agent: psutil.Process, mesh: ProcMesh) -> psutil.Process:
    """The agent's one child that is no rank."""
    (template,) = [child for child in agent.children() if child.pid not in _workers(mesh)]
    return template


def _shared() -> psutil.Process:
    """The template of the hosts that were launched last."""
    assert isinstance(local._templates.last, HostTemplate)
    return psutil.Process(local._templates.last._process.pid)


def _await(happens: object, *, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not happens():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def _has_ended(pid: int) -> bool:
    return process_state(pid) in ("", "Z")


@pytest.mark.some("")
@pytest.mark.parametrize("change", ["", "environment", "folder", "imports"])
def test_hosts_of_one_machine_come_from_one_template_unless_it_has_imported_otherwise(
    clean_end: None, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _hosts(2) as hosts, _spawn(hosts) as mesh:
        agents, shared = _agents(hosts), _shared()
        assert [agent.ppid() for agent in agents] == [shared.pid] * 2
        assert mesh.run("import os; os.getppid()").get(30).values() == [agents[0].pid] * 2 + [agents[1].pid] * 2
        assert len({_own_template(agent, mesh).pid for agent in agents}) == 2
        if change == "environment":
            monkeypatch.setenv("MESHBOOK_TEST_OF_HOSTS", "other")
        elif change == "folder":
            monkeypatch.chdir(tmp_path)
        elif change == "imports":
            monkeypatch.setenv("TORCH_LOGS", "+dynamo")
        with _hosts(1) as more, _spawn(more) as other:
            (agent,) = _agents(more)
            assert agent.ppid() == (os.getpid() if change == "imports" else shared.pid)
            there = other.run("import os; os.environ.get('MESHBOOK_TEST_OF_HOSTS')").get(30)
            assert there.values() == [os.environ.get("MESHBOOK_TEST_OF_HOSTS")] * 2
            assert agent.cwd() == os.getcwd()
            assert other.run("rank").get(30).values() == [0, 1]
        assert mesh.run("rank").get(30).values() == [0, 1, 2, 3]


@pytest.mark.slow
def test_hosts_for_ranks_without_torch_do_not_wait_for_it(clean_end: None) -> None:
    hosts = start_hosts({"hosts": 2}, LocalLauncher(torch=False))
    with hosts.spawn_procs({"gpus": 1}, torch=False, owns_hosts=True) as mesh:
        assert [agent.ppid() for agent in _agents(hosts)] == [os.getpid()] * 2
        assert mesh.run("rank").get(30).values() == [0, 1]
        with hosts.spawn_procs({"gpus": 1}, device="cpu") as late:  # their agents import it, as any that is alone
            assert late.run("dist.all_reduce(torch.ones(1)); rank").get(60).values() == [0, 1]


def test_the_template_of_hosts_ends_with_the_last_of_them(hosts: HostMesh) -> None:
    with _spawn(hosts):
        agents, shared = _agents(hosts), _shared()
    family = [*agents, *(child for agent in agents for child in agent.children(recursive=True)), shared]
    hosts.slice(hosts=0).stop()
    assert shared.is_running() and agents[1].is_running()
    hosts.shutdown()
    assert [process for process in family if process.is_running()] == []


@pytest.mark.some("9")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_first_host_takes_only_its_own_ranks_with_it(clean_end: None, how: signal.Signals) -> None:
    with _hosts(2) as hosts:
        mesh = _spawn(hosts)
        first, second = _agents(hosts)
        own, workers = _own_template(first, mesh), _workers(mesh)
        first.send_signal(how)
        if how == signal.SIGKILL:
            _await(lambda: _dead(mesh) == [0, 1])
            with pytest.raises(errors.WorkerLost, match=r"the host agent ended \(killed by SIGKILL"):
                mesh.slice(hosts=0).run("rank").get(10)
            for pid in (*workers[:2], own.pid):
                _await(lambda pid=pid: _has_ended(pid))
            assert not psutil.pid_exists(first.pid), "it was reaped"
        assert mesh.slice(hosts=1).run("rank").get(30).values() == [2, 3]
        with _spawn(hosts.slice(hosts=1)) as another:
            assert another.run("import os; os.getppid()").get(30).values() == [second.pid] * 2
        first.send_signal(signal.SIGCONT) if how == signal.SIGSTOP else hosts.replace_lost()
        mesh.stop()
        with _spawn(hosts) as whole:
            assert whole.run("rank").get(30).values() == [0, 1, 2, 3]
            assert [agent.ppid() for agent in _agents(hosts)] == [_shared().pid] * 2


def test_hosts_outlive_the_template_that_they_came_from(hosts: HostMesh) -> None:
    with _spawn(hosts) as mesh:
        before = _shared()
        before.kill()
        assert mesh.run("rank").get(30).values() == [0, 1, 2, 3]
        with _spawn(hosts) as another:
            assert another.run("rank").get(30).values() == [0, 1, 2, 3]
        with _hosts(2) as more, _spawn(more) as other:
            assert other.run("rank").get(30).values() == [0, 1, 2, 3]
            assert _shared() != before
        _agents(hosts)[0].kill()
        _await(lambda: _dead(mesh) == [0, 1])
        with pytest.raises(errors.WorkerLost, match="the host agent ended"):
            mesh.run("rank").get(10)


def test_a_template_of_workers_that_dies_is_replaced_on_its_host(hosts: HostMesh) -> None:
    with _spawn(hosts) as mesh:
        own = [_own_template(agent, mesh) for agent in _agents(hosts)]
        own[0].kill()
        _await(lambda: _has_ended(own[0].pid))
        with _spawn(hosts) as another:
            assert another.run("rank").get(30).values() == [0, 1, 2, 3]
        assert mesh.run("rank").get(30).values() == [0, 1, 2, 3]
        assert own[1].is_running()


def test_hosts_that_act_alone_are_told_apart_by_their_environment(clean_end: None) -> None:
    hosts = start_hosts({"hosts": 2}, LocalLauncher(separate_hosts=True))
    with _spawn(hosts) as mesh:
        names = mesh.run("import os; os.environ['MESHBOOK_MEMORY']").get(30).values()
        assert names == [name for host in hosts._hosts for name in [host.id] * 2]
    hosts.shutdown()


def test_without_a_template_that_imports_each_host_says_what_is_wrong(
    clean_end: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutdown()
    (tmp_path / "numpy.py").write_text("raise ImportError('numpy is broken here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    hosts = start_hosts({"hosts": 2}, LocalLauncher())
    with pytest.raises(errors.SpawnError, match="numpy is broken here"):
        _spawn(hosts)
    hosts.shutdown()
    assert local._templates.last is not None and local._templates.last.has_ended


def test_a_template_of_hosts_that_does_not_answer_is_ended_and_the_host_started_without_it(clean_end: None) -> None:
    with _hosts(2) as hosts, _spawn(hosts) as mesh:
        shared = _shared()
        shared.suspend()
        with _hosts(1) as more, _spawn(more) as other:
            assert _agents(more)[0].ppid() == os.getpid()
            assert other.run("rank").get(30).values() == [0, 1]
        assert not shared.is_running()
        assert mesh.run("rank").get(30).values() == [0, 1, 2, 3]


def test_an_interrupt_while_hosts_wait_for_imports_leaves_nothing(
    clean_end: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutdown()
    template_of = local._templates.find

    def interrupted(tickets: list[Ticket], torch: bool) -> HostTemplate | None:
        template = template_of(tickets, torch)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        return template

    monkeypatch.setattr(local._templates, "find", interrupted)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            start_hosts({"hosts": 2}, LocalLauncher())
    finally:
        signal.signal(signal.SIGALRM, before)
    monkeypatch.undo()
    assert local._templates.last is not None and local._templates.last.has_ended
    with _hosts(2) as hosts, _spawn(hosts) as mesh:
        assert mesh.run("rank").get(30).values() == [0, 1, 2, 3]


def test_no_secret_is_seen_in_what_was_forked(hosts: HostMesh) -> None:
    with _spawn(hosts) as mesh:
        state = mesh._controller.folder.state
        for agent in _agents(hosts):
            for process in (_shared(), agent, *agent.children(recursive=True)):
                seen = " ".join(process.cmdline()) + str(process.environ())
                assert seen.startswith("meshbook ") and state.secret_key not in seen and state.public_key not in seen


KILLED = """
from meshbook import LocalLauncher, start_hosts
hosts = start_hosts({"hosts": 2}, LocalLauncher())
mesh = hosts.spawn_procs({"gpus": 1}, name="kept", device="cpu")
mesh.run("state = rank").get(30)
say("up", [host.hello.pid for host in hosts._hosts])
wait()
"""


def test_the_next_controller_finds_the_hosts_of_one_that_was_killed(zygote: Zygote) -> None:
    driver = zygote.start(KILLED)
    agents = driver.expect_json("up")
    (shared,) = [process for process in driver.family() if process.pid == psutil.Process(agents[0]).ppid()]
    family = driver.family()
    driver.kill()
    _await(lambda: not shared.is_running() or shared.status() == psutil.STATUS_ZOMBIE)
    kept = attach("kept")
    mesh = kept.mesh("kept")
    assert mesh.run("state").get(30).values() == [0, 1]
    os.kill(agents[0], signal.SIGKILL)
    _await(lambda: _dead(mesh) == [0])
    assert mesh.slice(hosts=1).run("state").get(30).values() == [1]
    shutdown()
    _await(lambda: all(_has_ended(process.pid) for process in family))
