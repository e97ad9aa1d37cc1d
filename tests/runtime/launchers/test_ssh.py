"""Hosts by the plain ssh client and a real sshd: they work as others do, each failure is told, and nothing is left."""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from controllers import Zygote
from engine_clusters import SshHosts, await_quiet, clients, ssh_hosts
from engine_hosts import (
    agent_of,
    check_detached,
    check_next_controller,
    check_no_secret_is_seen,
    interrupted_once,
    kill_controller,
    known_hosts,
    loss,
    program,
    refusal,
)

import meshbook
from benchmarks.ssh_hosts import HOSTS
from meshbook import LocalLauncher, ProcMesh, start_hosts
from meshbook.errors import SpawnError, UsageError, WorkerLost
from meshbook.launchers.ssh import SSHLauncher
from meshbook.mesh.driven import own_sessions
from meshbook.mesh.host_mesh import HostMesh

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def there(clean_end: None) -> Iterator[SshHosts]:
    with ssh_hosts() as hosts:
        yield hosts


def launch(there: SshHosts, *names: str, python: str | None = None, options: tuple[str, ...] = ()) -> HostMesh:
    launcher = SSHLauncher(names, python=python, options=(*options, *there.options))
    return start_hosts({"hosts": len(names)}, launcher)


@pytest.fixture
def mesh(there: SshHosts) -> Iterator[ProcMesh]:
    """A rank on each of two hosts, without torch: it is there soon."""
    hosts = launch(there, "nodeA", "nodeB")
    with hosts.spawn_procs(
        {"gpus": 1}, torch=False, owns_hosts=True, env={"GREETING": "hello"}, cwd=str(there.folder)
    ) as procs:
        yield procs


def tunnel_of(procs: ProcMesh, host: int) -> Path:
    """The end over there of the way back."""
    words = client_of(procs, host).cmdline()
    return Path(words[words.index("-R") + 1].partition(":")[0])


def client_of(procs: ProcMesh, host: int) -> psutil.Process:
    return psutil.Process(procs._mesh.hosts[host].launched.pid)


# ---- what works -----------------------------------------------------------------------------------------------------


def test_cells_and_collectives_run_across_hosts(there: SshHosts) -> None:
    with launch(there, "nodeA", "nodeB").spawn_procs({"gpus": 2}, owns_hosts=True, device="cpu") as procs:
        assert procs.sizes == {"hosts": 2, "gpus": 2} and procs.hosts == ("nodeA", "nodeB")
        code = "t = torch.ones(1) * rank; dist.all_reduce(t); (t.item(), rank, local_rank, dict(point))"
        values = procs.run(code).get(60).values()
        assert values[3] == (6.0, 3, 1, {"hosts": 1, "gpus": 1}) and [value[0] for value in values] == [6.0] * 4
        procs.push({"big": bytes(3 << 20)}).get(60)
        assert procs.evaluate("len(big)").get(60).values() == [3 << 20] * 4
        procs.run("print('in the log', rank)").get(60)
        logs = procs.log_paths()
        assert len({Path(path).parents[1] for path in logs.values()}) == 2, "each host has a folder of its own"
        assert "in the log 3" in procs.logs()[3]


def test_ranks_get_the_folder_and_the_environment_that_were_asked_for(there: SshHosts, mesh: ProcMesh) -> None:
    (there.folder / "module_of_theirs.py").write_text("ANSWER = 42")
    code = "import os, module_of_theirs as m; (os.getcwd(), os.environ['GREETING'], m.ANSWER)"
    assert mesh.run(code).get(60).values() == [(str(there.folder), "hello", 42)] * 2


def test_the_notebooks_own_environment_stays_here(mesh: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_NOTEBOOK", "1")
    assert mesh.run("import os; 'SECRET_OF_THE_NOTEBOOK' in os.environ").get(60).values() == [False, False]


def test_no_key_is_on_a_command_line_or_in_an_environment(there: SshHosts, mesh: ProcMesh) -> None:
    (session,) = own_sessions()
    keys = [host.key for host in session.state.hosts.values()]
    check_no_secret_is_seen([*there.processes(), client_of(mesh, 0), client_of(mesh, 1)], *keys)


# ---- hosts are lost and come back -----------------------------------------------------------------------------------


def test_a_killed_ssh_client_is_a_lost_host_and_heal_starts_it_again_on_its_own_machine(
    there: SshHosts, mesh: ProcMesh, watch: Callable[[list[psutil.Process]], None]
) -> None:
    mesh.run("kept = rank").get(60)
    tunnel = tunnel_of(mesh, 1)
    assert tunnel.is_socket() and tunnel.stat().st_mode & 0o077 == 0
    theirs = [agent_of(mesh, 1), *agent_of(mesh, 1).children(recursive=True)]
    watch(theirs)
    assert "nodeB" in loss(mesh, client_of(mesh, 1).kill)
    assert psutil.wait_procs(theirs, timeout=20)[1] == [], "the agent ends with its connection, and its workers with it"
    assert not tunnel.exists()
    assert str(mesh.heal()).startswith('mesh "procs": host nodeB started again, rank 1 started again')
    assert "nodeB" in client_of(mesh, 1).cmdline() and mesh.hosts == ("nodeA", "nodeB")
    code = "import os; (os.environ['GREETING'], os.getcwd(), globals().get('kept'))"
    here = str(there.folder)
    assert mesh.run(code).get(60).values() == [("hello", here, 0), ("hello", here, None)]


def test_a_killed_agent_is_told_from_a_lost_connection(mesh: ProcMesh) -> None:
    tunnel, shell = tunnel_of(mesh, 1), agent_of(mesh, 1).parent()
    said = loss(mesh, agent_of(mesh, 1).kill)
    assert "nodeB" in said and "its agent ended (killed by SIGKILL" in said
    assert shell is not None and not psutil.wait_procs([shell], timeout=20)[1] and not tunnel.exists()
    mesh.heal()
    assert mesh.run("rank").get(60).values() == [0, 1]


def test_a_network_that_is_gone_is_a_lost_host_in_the_words_of_ssh(there: SshHosts) -> None:
    """The daemon of the connection is stopped: nothing is answered any more."""
    patience = ("-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=2")
    hosts = launch(there, "nodeA", "nodeB", options=patience)
    with hosts.spawn_procs({"gpus": 1}, torch=False, owns_hosts=True) as procs:
        agent = agent_of(procs, 1)
        daemon = agent.parents()[1]
        assert "sshd" in daemon.name(), daemon
        try:
            assert "not responding" in loss(procs, daemon.suspend)
            assert agent.is_running(), "it cannot know"
        finally:
            daemon.resume()
        agent.wait(20)


def test_a_host_that_cannot_be_reached_now_is_healed_later(there: SshHosts) -> None:
    """The daemon is stopped: it takes connections, as a machine that swaps does, and says nothing."""
    hosts = launch(there, "nodeA", "nodeB", options=("-o", "ConnectTimeout=2"))
    with hosts.spawn_procs({"gpus": 1}, torch=False, owns_hosts=True) as procs:
        procs.run("kept = rank + 1").get(60)
        loss(procs, client_of(procs, 1).kill)
        daemon = psutil.Process(there.daemon.pid)
        daemon.suspend()
        try:
            with pytest.raises(SpawnError, match=r"host nodeB did not start: ssh: .*timed out") as told:
                procs.heal()
            assert "another host in its place: mesh.heal(launcher=launcher)" in str(told.value)
        finally:
            daemon.resume()
        assert known_hosts("ssh") == ["nodeA", "nodeB"], "what failed is forgotten"
        assert procs.slice(hosts=0).run("kept").get(60).values() == [1]
        procs.heal()
        assert procs.run("globals().get('kept')").get(60).values() == [1, None]


def test_more_hosts_than_were_named_are_refused(mesh: ProcMesh) -> None:
    with pytest.raises(UsageError, match="cannot have more hosts like its first: its hosts were named when it was"):
        mesh.grow(hosts=1)
    grown = mesh.grow(gpus=1)
    assert grown.run("import os; (rank, os.environ['GREETING'])").get(60).values() == [(n, "hello") for n in range(4)]


def test_a_mesh_of_this_machine_grows_by_a_host_elsewhere_which_another_replaces(there: SshHosts) -> None:
    with start_hosts({"hosts": 1}, LocalLauncher()).spawn_procs({"gpus": 1}, owns_hosts=True, device="cpu") as procs:
        procs.run("kept = rank").get(60)
        with pytest.raises(SpawnError, match="host closed did not start: ssh: connect to host"):
            procs.grow(SSHLauncher(["closed"], options=there.options), hosts=1)
        wide = procs.grow(SSHLauncher(["nodeA"], options=there.options), hosts=1)
        asks = "t = torch.ones(1); dist.all_reduce(t); (t.item(), globals().get('kept'))"
        assert wide.run(asks).get(60).values() == [(2.0, 0), (2.0, None)]
        os.kill(wide._mesh.hosts[1].launched.pid, signal.SIGKILL)
        with pytest.raises(WorkerLost):
            wide.slice(hosts=1).run("import time; time.sleep(60)").get(60)
        wide.heal(launcher=LocalLauncher(separate_hosts=True))
        assert wide.run(asks).get(60).values() == [(2.0, 0), (2.0, None)]


# ---- controllers come and go ----------------------------------------------------------------------------------------


def test_the_next_controller_has_the_hosts_of_one_that_was_killed(there: SshHosts, zygote: Zygote) -> None:
    kill_controller(zygote, program(f"ssh.SSHLauncher(['nodeA', 'nodeB'], options={there.options!r})"))
    check_next_controller(lambda procs: client_of(procs, 1).kill(), "its ssh connection has ended")
    await_quiet(there)


def test_detached_hosts_are_found_again_and_end_with_their_lease(there: SshHosts) -> None:
    check_detached(SSHLauncher(["nodeA"], options=there.options), lambda procs: [client_of(procs, 0)])
    await_quiet(there)


# ---- what can go wrong ----------------------------------------------------------------------------------------------


def refused(there: SshHosts, *names: str, python: str | None = None, options: tuple[str, ...] = ()) -> str:
    launcher = SSHLauncher(names, python=python, options=(*options, *there.options))
    return refusal(launcher, len(names), there)


@pytest.mark.parametrize(
    ("names", "options", "cause", "advice"),
    [
        (
            "nodeA closed nodeB", "",
            "closed did not start: ssh: connect to host 127.0.1.9 port 1: Connection refused", "",
        ),
        ("nowhere.invalid", "", "nowhere.invalid did not start: ssh: Could not resolve hostname", ""),
        (
            "silent", "-o ConnectTimeout=1",
            "silent did not start: ssh: Connection timed out during banner exchange", "ConnectTimeout",
        ),
        ("stranger", "", "stranger did not start", "Host key verification failed|look at its key: ssh stranger"),
        (
            "nodeA", "-l nobody.of.that.name",
            "nodeA did not start: ssh: nobody.of.that.name@127.0.1.1: Permission denied (publickey)",
            "Nobody can type a password here",
        ),
        (
            "nodeA", "-o ClearAllForwardings=yes -o ExitOnForwardFailure=no",
            "nodeA did not start: ", "no tunnel at /tmp/meshbook-|AllowStreamLocalForwarding",
        ),
    ],
    ids=["not there", "unknown", "says nothing", "key not known", "key refused", "no way back"],
)  # fmt: skip
def test_a_host_that_ssh_does_not_reach(there: SshHosts, names: str, options: str, cause: str, advice: str) -> None:
    said = refused(there, *names.split(), options=tuple(options.split()))
    assert said.startswith(f"host {cause}") and all(words in said for words in advice.split("|"))


def test_an_interpreter_that_is_not_there(there: SshHosts) -> None:
    said = refused(there, "nodeA", "nodeB", python="/no/such/python")
    assert "meshbook: no Python at /no/such/python" in said and "--python PATH" in said


def bare_python(folder: Path) -> str:
    """An interpreter that finds no meshbook."""
    path = folder / "bare"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
    path.chmod(0o700)
    return str(path)


def test_an_interpreter_without_meshbook(there: SshHosts, tmp_path: Path) -> None:
    said = refused(there, "nodeA", python=bare_python(tmp_path))
    assert "No module named 'meshbook'" in said and "Install meshbook for it there" in said


def python_with(folder: Path, host: str) -> str:
    """An interpreter that runs the sitecustomize of ``folder`` on one host."""
    python = folder / "python"
    there = f'case "$SSH_CONNECTION" in *{HOSTS[host]}*) export PYTHONPATH={folder};; esac'
    python.write_text(f'#!/bin/sh\n{there}\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_a_clock_that_is_wrong_is_told_and_does_no_harm(there: SshHosts, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\nreal = time.time\ntime.time = lambda: real() - 3600\n")
    hosts = launch(there, "nodeA", "nodeB", python=python_with(tmp_path, "nodeB"))
    with (
        pytest.warns(UserWarning, match=r"the clock of nodeB is 3[56]\d\d s behind ours\. Times in logs"),
        hosts.spawn_procs({"gpus": 1}, torch=False, owns_hosts=True) as procs,
    ):
        assert procs.run("rank").get(60).values() == [0, 1]


def test_hosts_with_different_torch_are_told_of(there: SshHosts, tmp_path: Path) -> None:
    (tmp_path / "old_torch.py").write_text("cuda = hip = xpu = None\ndebug = False\n__version__ = '2.12.9'\n")
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(f"""
            import importlib.util, sys
            class Old:
                def find_spec(self, name, path, target=None):
                    if name == "torch.version":
                        return importlib.util.spec_from_file_location(name, {str(tmp_path / "old_torch.py")!r})
            sys.meta_path.insert(0, Old())
        """)
    )
    hosts = launch(there, "nodeA", "nodeB", python=python_with(tmp_path, "nodeB"))
    said = rf"the hosts differ: torch {re.escape(torch_version())} on nodeA and 2\.12\.9 on nodeB\. Between them"
    with pytest.warns(UserWarning, match=said), hosts.spawn_procs({"gpus": 1}, owns_hosts=True) as procs:
        assert procs.evaluate("torch.__version__").get().values() == [torch_version(), "2.12.9"]


def torch_version() -> str:
    """Of this environment, also where torch is not imported."""
    return importlib.metadata.version("torch")


def python_of_another_time(folder: Path, patch: str) -> str:
    """An interpreter whose meshbook is patched."""
    path = folder / "other"
    code = f"{patch}; from meshbook.launchers.templates import be_host; be_host('meshbook.agent.host_agent')"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}"\n')
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ("import meshbook.wire.messages as m; m.PROTOCOL_VERSION = 1", "it speaks protocol 1, this side"),
        (
            "import meshbook.system.processes as p; p.python_version = lambda: '2.7'",
            "its Python is 2.7, ours {}.{}".format(*sys.version_info),
        ),
    ],
)
def test_versions_that_differ(there: SshHosts, tmp_path: Path, patch: str, said: str) -> None:
    assert said in refused(there, "nodeA", python=python_of_another_time(tmp_path, patch))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("-Z",), "ssh: unknown option -- Z; usage: ssh ["),
        (("-o", "NoSuchOption=1"), "Bad configuration option: nosuchoption"),
        (("-F", "/no/such/config"), "Can't open user config file /no/such/config"),
    ],
)
def test_options_that_ssh_does_not_take(there: SshHosts, options: tuple[str, ...], said: str) -> None:
    with pytest.raises(SpawnError) as told:
        start_hosts({"hosts": 1}, SSHLauncher(["nodeA"], options=options)).spawn_procs(owns_hosts=True)
    assert said in str(told.value)


@pytest.mark.parametrize(
    ("hosts", "options", "said"),
    [
        ((), (), "name the hosts"),
        (("a", "-oProxyCommand=evil"), (), "a host is named as for ssh"),
        (("a", ""), (), "a host is named as for ssh"),
        (("a", "b", "a"), (), "host a is named more than once"),
        (("a",), ("-f",), "ssh cannot be given -f here: ssh would go to the background"),
        (("a",), ("-vt",), "ssh cannot be given -t here: a terminal would show the ticket"),
        (("a",), ("-p", "22", "b"), "only options of ssh stand here, but 'b' is none"),
    ],
)
def test_what_cannot_be_asked_of_ssh(hosts: tuple[str, ...], options: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        SSHLauncher(hosts, options=options)


def test_a_folder_that_is_not_there(there: SshHosts) -> None:
    with pytest.raises(SpawnError, match="no workers on nodeA: there is no folder /no/such/folder"):
        launch(there, "nodeA").spawn_procs({"gpus": 1}, torch=False, owns_hosts=True, cwd="/no/such/folder")
    await_quiet(there)


@pytest.mark.parametrize("wrong", [{"cwd": "here"}, {"env": {"": "x"}}, {"env": {"A": 1}}, {"env": {"A=B": "x"}}])
def test_folders_and_variables_that_make_no_sense(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(wrong))} "):
        meshbook.this_host().spawn_procs({"gpus": 1}, torch=False, **wrong)  # type: ignore[arg-type]


def test_a_spawn_that_makes_no_sense_ends_the_hosts_that_were_started_for_it(there: SshHosts) -> None:
    with pytest.raises(UsageError, match="cwd is a folder"):
        launch(there, "nodeA").spawn_procs(torch=False, owns_hosts=True, cwd="here")
    await_quiet(there)
    assert not known_hosts("ssh")


def test_without_ssh(there: SshHosts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SpawnError, match="there is no ssh on this machine"):
        launch(there, "nodeA")


def test_an_interrupt_while_hosts_are_waited_for_leaves_none(there: SshHosts) -> None:
    with interrupted_once(lambda: len(clients("ssh")) == 2):
        launch(there, "nodeA", "silent").spawn_procs(torch=False, owns_hosts=True)
    assert not clients("ssh") and not known_hosts("ssh")
    await_quiet(there)
