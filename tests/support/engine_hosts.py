"""Meshes on hosts of an engine, for the tests of all: spawned, lost, interrupted, found by the next controller."""

from __future__ import annotations

import contextlib
import os
import signal
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import psutil
import pytest
from controllers import Zygote
from engine_clusters import await_quiet

import meshbook
from meshbook import ProcMesh, start_hosts
from meshbook.errors import SpawnError, WorkerLost
from meshbook.launchers.base import Launcher
from meshbook.mesh.driven import own_sessions


@contextlib.contextmanager
def spawned(count: int, launcher: Launcher) -> Iterator[ProcMesh]:
    """A rank on each of so many hosts, without torch: it is there soon."""
    hosts = start_hosts({"hosts": count}, launcher)
    with hosts.spawn_procs({"gpus": 1}, torch=False, owns_hosts=True, env={"GREETING": "hello"}) as procs:
        yield procs


def agent_of(procs: ProcMesh, host: int) -> psutil.Process:
    hello = procs._mesh.hosts[host].hello
    assert hello is not None
    return psutil.Process(hello.pid)


def job_of(procs: ProcMesh, host: int) -> str:
    return procs._mesh.hosts[host].launched.job


def loss(procs: ProcMesh, how: Callable[[], object], host: int = 1) -> str:
    """Return the words of a call for a rank that is lost by ``how`` while it runs."""
    future = procs.slice(hosts=host).run("import time; time.sleep(120)")
    how()
    with pytest.raises(WorkerLost) as told:
        future.get(60)
    return str(told.value)


def refusal(launcher: Launcher, count: int = 1, cluster: object = None) -> str:
    """Return the words with which an engine refuses hosts; nothing is left of them, in its cluster either."""
    with pytest.raises(SpawnError) as told, spawned(count, launcher):
        pass
    if cluster is not None:
        await_quiet(cluster)
    assert not known_hosts(launcher.name)
    return str(told.value)


def known_hosts(engine: str) -> list[str]:
    """Return the names of the engine's hosts in the sessions of this process."""
    saved = [host for session in own_sessions() for host in session.state.hosts.values()]
    return [host.name for host in saved if host.launcher.engine == engine]


def check_no_secret_is_seen(processes: Iterable[psutil.Process], *more: str) -> str:
    """Look at command lines and environments, those of an agent among them; return their text. more: other secrets."""
    keys = [key for session in own_sessions() for key in (session.state.secret_key, session.state.public_key)]
    words = ""
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has ended, or is a daemon that has changed its user
            words += str(process.cmdline())
            words += str(process.environ())
    assert "'meshbook', 'agent'" in words and not [key for key in (*keys, *more) if key in words]
    return words


def check_collectives(launcher: Launcher) -> None:
    hosts = start_hosts({"hosts": 2}, launcher)
    with hosts.spawn_procs({"gpus": 2}, owns_hosts=True, device="cpu") as procs:
        code = "t = torch.ones(1) * rank; dist.all_reduce(t); (t.item(), dict(point))"
        assert procs.run(code).get(60).values()[3] == (6.0, {"hosts": 1, "gpus": 1})


# ---- interrupts ------------------------------------------------------------------------------------------------------


class Shown:
    """The text that was printed so far, which `capsys` gives once."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self._lock, self._text = capsys, threading.Lock(), ""

    def __call__(self) -> str:
        with self._lock:
            self._text += self._capsys.readouterr().out
            return self._text


def once(happens: Callable[[], object], act: Callable[[], object]) -> threading.Thread:
    """Act aside, as soon as something happens, or after a minute."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while not happens() and time.monotonic() < deadline:
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@contextlib.contextmanager
def interrupted_once(happens: Callable[[], object]) -> Iterator[None]:
    """Press Ctrl-C as soon as something happens; it ends the block."""
    thread = once(happens, lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        thread.join()


# ---- controllers come and go -----------------------------------------------------------------------------------------

_PROGRAM = """
    import os
    os.environ.update({environment!r})
    from meshbook import start_hosts
    from meshbook.launchers import {engine}
    hosts = start_hosts({{"hosts": 2}}, {launcher})
    env = {{"GREETING": "hello"}}
    procs = hosts.spawn_procs({{"gpus": 1}}, torch=False, owns_hosts=True, name="kept", env=env)
    procs.run("kept = rank + 1").get(60)
    say("ready")
    wait()
"""


def program(launcher: str, **environment: str) -> str:
    """A program with a mesh on two hosts. launcher: how it is made, as in ``slurm.SlurmLauncher()``."""
    engine = launcher.partition(".")[0]
    return textwrap.dedent(_PROGRAM.format(environment=environment, engine=engine, launcher=launcher))


def kill_controller(zygote: Zygote, program: str) -> list[psutil.Process]:
    """Run a program until its mesh is there, and kill it; return its other processes."""
    meshbook.shutdown()
    driver = zygote.start(program)
    driver.expect("ready")
    family = driver.family()
    driver.kill()
    return family


def check_next_controller(lose: Callable[[ProcMesh], object], said: str) -> None:
    """Attach to the mesh of a program that was killed, lose its second host, and heal it."""
    attached = meshbook.attach("kept", timeout_s=60)
    procs = attached.mesh("kept")
    assert attached.lost_hosts == [] and procs.run("kept").get(60).values() == [1, 2]
    before = procs.hosts
    assert said in loss(procs, lambda: lose(procs))
    procs.heal()
    assert len(set(procs.hosts)) == len(before)
    code = "import os; (globals().get('kept'), os.environ['GREETING'])"
    assert procs.run(code).get(60).values() == [(1, "hello"), (None, "hello")]
    procs.stop()
    meshbook.shutdown()


def check_detached(launcher: Launcher, clients_of: Callable[[ProcMesh], list[psutil.Process]]) -> list[psutil.Process]:
    """Find a host again after it was detached; then it ends with its lease, and the clients of the engine with it."""
    hosts = start_hosts({"hosts": 1}, launcher)
    hosts.spawn_procs({"gpus": 1}, torch=False, owns_hosts=True, name="left").run("kept = 1").get(60)
    meshbook.detach()
    attached = meshbook.attach("left", timeout_s=60)
    assert attached.lost_hosts == [] and attached.mesh("left").run("kept").get(60).values() == [1]
    clients = clients_of(attached.mesh("left"))
    meshbook.detach(lease_s=0.5)
    assert clients and psutil.wait_procs(clients, timeout=60)[1] == []
    return clients
