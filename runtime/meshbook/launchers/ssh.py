"""Host agents on other machines, by the plain ssh client with the user's own config: one connection for each host.

    controller ──stdin: the ticket──> ssh ════ network ════ sshd ──> sh ──> agent
        '── 127.0.0.1:port <── ssh <════ the way back (-R) ════ a Unix socket <──'

The controller listens on loopback only, so each agent dials the end of its own tunnel. That is a socket in a place that
we choose, for the user alone, rather than a port: sshd gives one that is free on some of its loopback addresses.

Both ends watch the connection: ssh is our child, or the child of the controller before us, whose end is the end of the
host; the agent notices when nobody reads its stdout any more (`meshbook.agent.tunnel`). ssh outlives its controller, as
agents do, and the next controller listens where that one did. The output of ssh goes to a file, so that it never waits
for us, and can be read when it has ended.
"""

from __future__ import annotations

import getopt
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from meshbook.errors import SpawnError, UsageError
from meshbook.launchers.agent_start import PYTHON_HINTS, agent_script, with_words
from meshbook.launchers.base import LaunchedHost, Launcher
from meshbook.launchers.engines.clients import Client, ClientHost, ClientLog
from meshbook.launchers.registry import Asked
from meshbook.sessions.folder import SavedHost, SavedLauncher
from meshbook.system.processes import describe_exit, describe_shell_exit
from meshbook.wire.ticket import TUNNEL_ENDS, Ticket, elsewhere, encode_ticket

CONNECT_S = 10
"""The time that ssh has to reach a host, by default."""

_OURS = ("-T", "-o", "BatchMode=yes", "-o", "LogLevel=INFO")
"""Options before the user's: of two, ssh takes the first."""

_DEFAULTS = (
    "-o", f"ConnectTimeout={CONNECT_S}", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",
    "-o", "ExitOnForwardFailure=yes", "-o", "ControlMaster=no", "-o", "ControlPath=none",
)  # fmt: skip
"""Options after the user's, who may say otherwise. A connection of our own ends with the host."""

_LETTERS = "1246AaB:b:Cc:D:E:e:F:fGgI:i:J:KkL:l:Mm:NnO:o:P:p:Q:qR:S:sTtVvW:w:XxYy"
_NOT_FOR_US = {
    "-f": "ssh would go to the background", "-N": "ssh would start nothing", "-n": "the agent reads its ticket there",
    "-s": "ssh would start something else", "-t": "a terminal would show the ticket", "-W": "ssh would start nothing",
    "-q": "what ssh says is needed", "-E": "what ssh says is needed", "-y": "what ssh says is needed",
    "-G": "ssh would start nothing", "-V": "ssh would start nothing", "-Q": "ssh would start nothing",
    "-O": "ssh would start nothing",
}  # fmt: skip

_NOISE = re.compile(
    r"debug\d|connect_to |Warning: Permanently added|channel \d+: open failed|\*\* |Transferred: "
    r"|Bytes per|.*\bKilled\b"  # of an agent: the exit status says so too
)

_HINTS = (
    ("Could not resolve hostname", "Hosts are named as for ssh: by your ssh config, or by DNS."),
    ("Host key verification failed", "Connect once by hand and look at its key: ssh {host}"),
    ("Permission denied", "Nobody can type a password here: ssh {host} true must work without one, by a key."),
    ("Too many authentication failures", "Name the key: -- -i PATH, or IdentityFile in your ssh config."),
    ("remote port forwarding failed", "Its sshd must allow the way back: AllowStreamLocalForwarding yes."),
    ("Could not request local forwarding", "Leave out the forwards of your ssh config: -- -o ExitOnForwardFailure=no"),
    *PYTHON_HINTS,
    ("timed out", "It did not answer within the time that ssh gives it: {timeout} s, or -- -o ConnectTimeout=SECONDS"),
)


class SSHLog(ClientLog):
    """The log of an ssh client, and of the program that it has started."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, line: str) -> None:
        if not _NOISE.match(line):
            self._lines.append(line)

    def explain(self, host: str) -> str:
        """Return the last lines, with advice."""
        lines = self._lines
        usage = next((at for at, line in enumerate(lines) if line.startswith("usage: ssh")), None)
        told = [line.removeprefix("ssh: ") for line in (lines if usage is None else lines[: usage + 1])]
        hints = ((words, hint.format(host=host, timeout=CONNECT_S)) for words, hint in _HINTS)
        return with_words("", told, hints)


class SSHClient(Client[SSHLog]):
    """An ssh, which ends with the agent at its other end, as the agent does with it."""

    log_type = SSHLog


class SSHHost(ClientHost[SSHClient]):
    """A host at the other end of an ssh client. name: the host's, for ssh."""

    def __init__(self, client: SSHClient, id: str, name: str) -> None:
        super().__init__(client, id)
        self._name = name

    def failure(self) -> str | None:
        """Return how ssh has ended, in its own words; None while it runs."""
        status = self.client.poll()
        if status is None:
            return None
        said = self.client.said.explain(self._name)
        then = f": {said}" if said else ""
        if not self.client.is_child:
            return f"its ssh connection has ended{then}"
        if status == 255 or status < 0:  # of ssh itself; also when a signal has ended the shell over there
            how = "" if status == 255 and said else f" ({describe_exit(status)})"
            return f"ssh{how}{then}" if said else f"its ssh connection has ended{how}"
        return f"its agent ended ({describe_shell_exit(status)}){then}"


class SSHLauncher(Launcher):
    """An agent on each of some hosts, which are named as for ssh."""

    name = "ssh"
    transport = "tcp"
    fixed = "its hosts were named when it was spawned"

    def __init__(self, hosts: Sequence[str], *, python: str | None = None, options: Sequence[str] = ()) -> None:
        """hosts: by the names of the user's ssh config, or ``user@host``. options: of ssh, as on its command line.

        python: the interpreter there; by default the path of our own where there is one, else ``python3``.
        Raises: UsageError.
        """
        self.hosts, self.python, self.options = _checked_hosts(hosts), python or "", _checked_options(options)

    def for_host(self, index: int) -> SSHLauncher:
        return SSHLauncher(self.hosts[index : index + 1], python=self.python, options=self.options)

    @property
    def named_hosts(self) -> tuple[str, ...]:
        return self.hosts

    @property
    def saved(self) -> SavedLauncher:
        return SavedLauncher(self.name, host=self.hosts[0], python=self.python, options=self.options)

    def launch(self, tickets: list[Ticket]) -> list[LaunchedHost]:
        """Begin to connect to all hosts at once. Raises: OSError, SpawnError; then none is left."""
        if len(tickets) != len(self.hosts):
            raise UsageError(f"{len(self.hosts)} hosts were named, but {len(tickets)} are asked for.")
        started: list[SSHHost] = []
        try:
            for host, ticket in zip(self.hosts, tickets, strict=True):
                started.append(self._connect(host, ticket))
        except BaseException:
            for each in started:
                each.close(0.0)
            raise
        return list(started)

    def _connect(self, host: str, ticket: Ticket) -> SSHHost:
        if (ssh := shutil.which("ssh")) is None:
            raise SpawnError("there is no ssh on this machine; install it, as by: apt-get install openssh-client")
        tunnel = f"{TUNNEL_ENDS}{os.urandom(12).hex()}"
        way_back = f"{tunnel}:{ticket.endpoint.removeprefix('tcp://')}"
        log = Path(ticket.log_dir) / f"agent-{ticket.host_id}.log"
        command = [ssh, *_OURS, *self.options, *_DEFAULTS, "-R", way_back, host, _command(self.python, tunnel)]
        client = SSHClient.start(log, command)
        ticket = elsewhere(ticket, name=host, endpoint=f"ipc://{tunnel}", by_tunnel=True)
        client.write(encode_ticket(ticket) + b"\n")  # which lies with ssh until there is an agent
        return SSHHost(client, ticket.host_id, host)


def _command(python: str, tunnel: str) -> str:
    """Return the command for the user's shell over there, of any kind; it removes the tunnel's socket in any case."""
    script = f"trap 'rm -f {tunnel}' EXIT; {agent_script(python)}"
    return f"exec sh -c {shlex.quote(script)}"


def parse(asked: Asked) -> SSHLauncher:
    if not asked.named:
        raise UsageError("ssh needs the names of hosts, as your ssh config has them.")
    return SSHLauncher(asked.named.split(","), python=asked.python, options=asked.options)


def find(id: str, saved: SavedHost, logs: Path) -> tuple[LaunchedHost, Launcher]:
    launcher = saved.launcher
    host = SSHHost(SSHClient.find(logs / f"agent-{id}.log", saved.pid, saved.started), id, launcher.host)
    return host, SSHLauncher((launcher.host,), python=launcher.python, options=launcher.options)


def _checked_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    """Raises: UsageError."""
    names = (hosts,) if isinstance(hosts, str) else tuple(hosts)
    if not names:
        raise UsageError("name the hosts, as in ssh:nodeA,nodeB.")
    for name in names:
        if not isinstance(name, str) or not name or name.startswith("-") or not name.isprintable() or " " in name:
            raise UsageError(f"a host is named as for ssh, by its name in your ssh config or user@host, not {name!r}.")
        if names.count(name) > 1:
            raise UsageError(
                f"host {name} is named more than once; give each once, with as many ranks as it is to have."
            )
    return names


def _checked_options(options: Sequence[str]) -> tuple[str, ...]:
    """Refuse options that ssh cannot serve for us, and leave wrong ones for ssh to report. Raises: UsageError."""
    given = tuple(map(str, options))
    try:
        known, rest = getopt.getopt(list(given), _LETTERS)
    except getopt.GetoptError:
        return given
    for option, _ in known:
        if option in _NOT_FOR_US:
            raise UsageError(f"ssh cannot be given {option} here: {_NOT_FOR_US[option]}.")
    if rest:
        raise UsageError(
            f"only options of ssh stand here, but {rest[0]!r} is none; hosts are named as in ssh:nodeA,nodeB."
        )
    return given
