"""Hosts behind a Jupyter server: the real ssh, through a real server's WebSocket, to a real sshd that it starts."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_clusters import SshHosts, ssh_hosts
from jupyter_servers import TOKEN, Server

import meshbook
from meshbook import start_hosts
from meshbook.errors import SpawnError, WorkerLost
from meshbook.launchers.ssh import SSHLauncher
from meshbook.mesh.host_mesh import HostMesh

pytestmark = pytest.mark.cluster

pytest.importorskip("jupyter_server_proxy", reason="no jupyter-server-proxy: pip install jupyter-server-proxy")

PROXY = [sys.executable, "-m", "meshbook_extension.ssh_proxy"]
PATIENCE_S = 60

_SERVER = """
c.ServerProxy.servers = {{
    "sshd": {{
        "command": [
            {sshd!r}, "-D", "-e", "-f", "none", "-h", "{folder}/host", "-o", "ListenAddress=127.0.0.1:{{port}}",
            "-o", "AuthorizedKeysFile={folder}/authorized", "-o", "StrictModes=no", "-o", "PidFile=none",
        ],
        "raw_socket_proxy": True,
        "timeout": 60,
    }}
}}
"""

_CLIENT = """
Host studio
    IdentityFile {folder}/user
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {folder}/known-studio
    GlobalKnownHostsFile none
    StrictHostKeyChecking yes
    ProxyCommand {proxy} {url} --token-file {folder}/token
"""


class HostedServer:
    """A Jupyter server that passes bytes to an sshd of its own, as jupyter-sshd-proxy sets it up."""

    def __init__(self, root: Path, hosts: SshHosts) -> None:
        self.folder = hosts.folder
        sshd = shutil.which("sshd", path="/usr/sbin:/sbin:/usr/bin:/usr/local/sbin")
        config = root / "jupyter_server_config.py"
        config.write_text(_SERVER.format(sshd=sshd, folder=self.folder))
        self.server = Server(root, f"--config={config}")
        self.url = f"ws{self.server.info['url'].removeprefix('http')}sshd/"
        (self.folder / "token").write_text(f"{TOKEN}\n")
        (self.folder / "known-studio").write_text(f"studio {(self.folder / 'host.pub').read_text()}")
        self.config = self.folder / "config-studio"
        self.config.write_text(_CLIENT.format(folder=self.folder, proxy=shlex.join(PROXY), url=self.url))

    def launch(self) -> HostMesh:
        """The host behind it."""
        launcher = SSHLauncher(["studio"], python=sys.executable, options=["-F", str(self.config)])
        return start_hosts({"hosts": 1}, launcher)

    def end(self) -> None:
        """End it, and the sshd with it."""
        if self.server.process.poll() is None:
            self.server.end(signal.SIGTERM)


@pytest.fixture(scope="module", autouse=True)
def clean_end() -> Iterator[None]:
    """After these tests nothing of us is left in this process."""
    yield
    meshbook.shutdown()


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostedServer]:
    root = Path(tempfile.mkdtemp(prefix="mb"))
    for name in ("JUPYTER_TOKEN", "JUPYTERHUB_API_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(root / "runtime"))
    with ssh_hosts() as hosts:
        hosted = HostedServer(root, hosts)
        try:
            yield hosted
        finally:
            hosted.end()
            shutil.rmtree(root, ignore_errors=True)


def told(*arguments: str) -> str:
    """What the command says when it cannot connect."""
    ran = subprocess.run([*PROXY, *arguments], input="", capture_output=True, text=True, timeout=PATIENCE_S)
    assert ran.returncode == 1
    assert ran.stdout == ""
    return ran.stderr.strip()


def test_ranks_behind_a_server_work_as_others_until_it_ends(hosted: HostedServer) -> None:
    with hosted.launch().spawn_procs({"gpus": 2}, torch=False, owns_hosts=True) as procs:
        assert procs.hosts == ("studio",)
        sent = np.arange(3_000_000)
        procs.push({"sent": sent}).get(PATIENCE_S)
        assert all(np.array_equal(back, sent[::-1]) for back in procs.evaluate("sent[::-1]").get(PATIENCE_S).values())

        waiting = procs.run("import time; time.sleep(120)")
        hosted.end()
        with pytest.raises(WorkerLost, match="ranks 0,1 on studio ended: its host is lost"):
            waiting.get(PATIENCE_S)


def test_what_the_server_refuses_is_told_by_a_spawn(hosted: HostedServer) -> None:
    (hosted.folder / "token").write_text("another")
    with pytest.raises(SpawnError, match="answers, but it refuses the token, or wants one"):
        hosted.launch().spawn_procs({"gpus": 1}, torch=False, owns_hosts=True)


def test_each_reason_has_its_words(hosted: HostedServer, tmp_path: Path) -> None:
    token = ("--token-file", str(hosted.folder / "token"))
    assert "it refuses the token, or wants one (--token-file FILE, or JUPYTER_TOKEN or" in told(hosted.url)
    assert "no such page: install jupyter-sshd-proxy there" in told(hosted.url.replace("sshd", "other"), *token)
    assert "answers, but with a page" in told(hosted.url.replace("sshd/", "api"), *token)
    assert "is no address of a WebSocket: one begins with wss://" in told("https://somewhere/sshd/")
    assert "cannot be read: No such file or directory" in told(hosted.url, "--token-file", str(tmp_path / "none"))
    hosted.end()
    assert told(hosted.url, *token) == f"{hosted.url} is not reached: Connection refused"
