"""A real sshd of our own on loopback addresses, and a config by which the plain ssh client sees it as several hosts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HOSTS = {"nodeA": "127.0.1.1", "nodeB": "127.0.1.2", "nodeC": "127.0.1.3", "nodeD": "127.0.1.5"}
STRANGER, SILENT, CLOSED = "127.0.1.4", "127.0.1.8", "127.0.1.9"

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
    HostName {closed}
    Port 1
Host stranger
    HostName {stranger}
Host silent
    HostName {silent}
    Port {silent_port}
Host *
    Port {port}
    User {user}
    IdentityFile {folder}/user
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {folder}/known
    GlobalKnownHostsFile none
    StrictHostKeyChecking yes
"""

_SET_PDEATHSIG = 1  # linux/prctl.h


class NoDaemonError(Exception):
    """There is no sshd here, or it lets nobody in."""


class LoopbackHosts:
    """A daemon that runs, and the config of its clients."""

    def __init__(self, folder: Path, daemon: subprocess.Popen[bytes]) -> None:
        self.folder, self.daemon = folder, daemon
        self.config = folder / "config"

    @property
    def options(self) -> tuple[str, ...]:
        """What ssh needs to find the hosts."""
        return ("-F", str(self.config))


@contextlib.contextmanager
def loopback_hosts() -> Iterator[LoopbackHosts]:
    """Hosts nodeA to nodeC, and three that cannot be used: closed, stranger and silent. Raises: NoDaemonError."""
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if sshd is None or shutil.which("ssh") is None:
        raise NoDaemonError("there is no sshd, or no ssh: apt-get install openssh-server openssh-client")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mb-ssh-") as path, contextlib.ExitStack() as stack:
        folder = Path(path)
        for name in ("host", "user"):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
            subprocess.run(make, check=True, stdin=subprocess.DEVNULL, timeout=60)
        shutil.copy(folder / "user.pub", folder / "authorized")
        silent = stack.enter_context(socket.create_server((SILENT, 0)))  # takes connections, and says nothing
        daemon = _start(sshd, folder, silent.getsockname()[1])
        try:
            yield LoopbackHosts(folder, daemon)
        finally:
            _end(daemon)


def _start(sshd: str, folder: Path, silent_port: int) -> subprocess.Popen[bytes]:
    """Start the daemon at a port that is free on all of its addresses; it says itself when it is not."""
    why = ""
    for _ in range(5):
        _write(sshd, folder, silent_port)
        log = folder / "daemon.log"
        daemon = subprocess.Popen(
            [sshd, "-D", "-f", str(folder / "daemon"), "-E", str(log)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            if not (why := _await(folder, daemon)):
                return daemon
        except BaseException:
            _end(daemon)
            raise
        was_in_the_way = daemon.poll() is not None
        _end(daemon)
        why += "\n" + (log.read_text() if log.exists() else "")
        if not was_in_the_way:
            break
    raise NoDaemonError(f"sshd lets nobody in here: {why}")


def end_with_parent() -> None:
    """Have the kernel end this process with its parent; called in a child before it executes."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGTERM)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(30)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _write(sshd: str, folder: Path, silent_port: int) -> None:
    """Write the configs, with a port that is free now."""
    addresses = [*HOSTS.values(), STRANGER]
    with socket.create_server((addresses[0], 0)) as probe:
        port = probe.getsockname()[1]
    listen = "\n".join(f"ListenAddress {address}" for address in addresses)
    text = _DAEMON.format(folder=folder, port=port, listen=listen)
    for more in ("PerSourcePenalties no\n", ""):  # from 9.8 on it shuts out who has failed; older ones do not know it
        (folder / "daemon").write_text(more + text)
        if subprocess.run([sshd, "-t", "-f", str(folder / "daemon")], capture_output=True, timeout=60).returncode == 0:
            break
    hosts = "\n".join(f"Host {name}\n    HostName {address}" for name, address in HOSTS.items())
    user = pwd.getpwuid(os.getuid()).pw_name
    (folder / "config").write_text(
        _CLIENT.format(
            folder=folder,
            port=port,
            hosts=hosts,
            user=user,
            silent_port=silent_port,
            closed=CLOSED,
            stranger=STRANGER,
            silent=SILENT,
        )
    )
    public = (folder / "host.pub").read_text()
    (folder / "known").write_text("".join(f"[{address}]:{port} {public}" for address in HOSTS.values()))


def _await(folder: Path, daemon: subprocess.Popen[bytes]) -> str:
    """Wait until a client is let in; returns why none is."""
    deadline = time.monotonic() + 20
    why = ""
    while daemon.poll() is None and time.monotonic() < deadline:
        tried = subprocess.run(
            ["ssh", "-F", str(folder / "config"), "-o", "BatchMode=yes", "nodeB", "true"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if tried.returncode == 0:
            return ""
        why = tried.stderr.strip()
        time.sleep(0.1)
    return why or "it ended"
