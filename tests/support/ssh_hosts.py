"""A real sshd of our own on loopback addresses, and a config by which the plain ssh client sees it as several hosts."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

HOSTS = {"nodeA": "127.0.1.1", "nodeB": "127.0.1.2", "nodeC": "127.0.1.3"}
STRANGER, SILENT = "127.0.1.4", "127.0.1.8"

_DAEMON = """
Port {port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/authorized
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 200
{listen}
"""

_CLIENT = """
{hosts}
Host closed
    HostName 127.0.1.9
    Port 1
Host stranger
    HostName 127.0.1.4
Host *
    Port {port}
    IdentityFile {folder}/user
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {folder}/known
    GlobalKnownHostsFile none
    StrictHostKeyChecking yes
"""


class SshHosts:
    """A daemon that runs, and the config of its clients."""

    def __init__(self, folder: Path, daemon: subprocess.Popen[bytes]) -> None:
        self.folder, self.daemon = folder, daemon
        self.config = folder / "config"
        self.silent = socket.create_server((SILENT, 0))
        """Takes connections, and says nothing."""

    def processes(self) -> list[psutil.Process]:
        """What runs for connections: daemons of their own, shells, agents, workers."""
        return psutil.Process(self.daemon.pid).children(recursive=True)

    def await_quiet(self, timeout_s: float = 20.0) -> None:
        """Wait until no connection is left, nor anything that ran for one."""
        _, left = psutil.wait_procs(self.processes(), timeout=timeout_s)
        assert not left, [process.cmdline() for process in left if process.is_running()]

    @property
    def options(self) -> tuple[str, ...]:
        """What ssh needs to find the hosts."""
        return ("-F", str(self.config))


@contextlib.contextmanager
def ssh_hosts() -> Iterator[SshHosts]:
    """Hosts nodeA to nodeC, and three that cannot be used: closed, stranger and silent.

    Skips where there is no sshd, or where it lets nobody in.
    """
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if sshd is None or shutil.which("ssh") is None:
        pytest.skip("there is no sshd, or no ssh: apt-get install openssh-server openssh-client")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mb-ssh-") as path:
        folder = Path(path)
        for name in ("host", "user"):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
            subprocess.run(make, check=True, stdin=subprocess.DEVNULL, timeout=60)
        shutil.copy(folder / "user.pub", folder / "authorized")
        daemon = _start(sshd, folder)
        try:
            hosts = SshHosts(folder, daemon)
            silent = f"Host silent\n    HostName {SILENT}\n    Port {hosts.silent.getsockname()[1]}\n"
            hosts.config.write_text(silent + hosts.config.read_text())
            with hosts.silent:
                yield hosts
                hosts.await_quiet()
        finally:
            daemon.terminate()
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _start(sshd: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start the daemon at a port that is free on all of its addresses; it says itself when it is not."""
    addresses = [*HOSTS.values(), STRANGER]
    why = ""
    for _ in range(5):
        with socket.create_server((addresses[0], 0)) as probe:
            port = probe.getsockname()[1]
        listen = "\n".join(f"ListenAddress {address}" for address in addresses)
        (folder / "daemon").write_text(_DAEMON.format(folder=folder, port=port, listen=listen))
        hosts = "\n".join(f"Host {name}\n    HostName {address}" for name, address in HOSTS.items())
        user = pwd.getpwuid(os.getuid()).pw_name
        (folder / "config").write_text(_CLIENT.format(folder=folder, port=port, hosts=hosts) + f"    User {user}\n")
        public = (folder / "host.pub").read_text()
        known = [f"[{address}]:{port} {public}" for address in HOSTS.values()]
        (folder / "known").write_text("".join(known))
        log = folder / "daemon.log"
        daemon = subprocess.Popen(
            [sshd, "-D", "-f", str(folder / "daemon"), "-E", str(log)], stdin=subprocess.DEVNULL, start_new_session=True
        )
        why = _await(folder, daemon)
        if not why:
            return daemon
        daemon.kill()
        daemon.wait()
        why += "\n" + (log.read_text() if log.exists() else "")
    pytest.skip(f"sshd lets nobody in here: {why}")


def _await(folder: Path, daemon: subprocess.Popen[bytes]) -> str:
    """Wait until a client is let in; returns why none is."""
    deadline = time.monotonic() + 20
    why = ""
    while daemon.poll() is None and time.monotonic() < deadline:
        tried = subprocess.run(
            ["ssh", "-F", str(folder / "config"), "-o", "BatchMode=yes", "nodeB", "true"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        if tried.returncode == 0:
            return ""
        why = tried.stderr.strip()
        time.sleep(0.1)
    return why or "it ended"
