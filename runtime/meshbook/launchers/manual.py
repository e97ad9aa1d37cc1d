"""Host agents that people start: one command, to be run on as many machines as hosts are waited for.

    notebook ──shows: a command and its ticket──> person ──pastes it──> shell of any machine ──> meshbook.join
    gate     <──── the ticket's secret ────────────────────────────────────────────────────────────'   |
      '────── the ticket of one agent ───────────────────────────────────────────────────────────────> agent
    controller, own address: port <══════════════════ network ══════════════════════════════════════════'

Each launch has a gate, a port of its own, which is open as long as a host that came through it lives: it also hears why
a host leaves, and tells who comes too late that it is so. ``gate.log`` among the session's logs lists the hosts that it
has let in and turned away.
"""

from __future__ import annotations

import getpass
import hmac
import secrets
import shlex
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import msgspec

from meshbook.errors import UsageError
from meshbook.launchers.agent_start import open_log, own_ip, quoted_program
from meshbook.launchers.base import LaunchedHost, Launcher
from meshbook.launchers.local import FoundHost
from meshbook.launchers.registry import Asked
from meshbook.sessions.folder import SavedHost, SavedLauncher
from meshbook.system.interfaces import in_endpoint, own_address
from meshbook.wire.invitation import (
    COMMAND,
    Admitted,
    Arrival,
    GateAnswer,
    Invitation,
    TurnedAway,
    decode_question,
    difference,
    encode,
)
from meshbook.wire.ticket import Ticket, elsewhere
from meshbook.wire.zmq_transport import Gate

WITHIN_S = 1800.0
"""The time within which hosts have to come, by default."""

_UNKNOWN = "no mesh here has this ticket: it is another notebook's, or its mesh has ended. Spawn again for a new one"
_NAME_CHARS, _WHY_CHARS = 64, 500


class ManualLauncher(Launcher):
    """Agents that people start, by a command that `launch` prints."""

    name = "manual"

    def __init__(self, address: str = "", *, python: str | None = None, within_s: float = WITHIN_S) -> None:
        """address: of this machine, as the hosts reach it; by default that of its default route.

        python: the interpreter in the command, ``python3`` by default. within_s: how long hosts may take to come.
        Raises: UsageError.
        """
        if not within_s > 0:
            raise UsageError(f"hosts are waited for during a number of seconds above 0, not {within_s!r}.")
        self.python, self.within_s = python or "", float(within_s)
        self._asked, self._address = address, own_ip(address, "manual:10.0.0.5") if address else ""

    @property
    def transport(self) -> str:
        return f"tcp://{in_endpoint(self._address or own_address())}"

    @property
    def saved(self) -> SavedLauncher:
        return SavedLauncher(self.name, python=self.python, options=(self._asked, str(self.within_s)))

    def launch(self, tickets: list[Ticket]) -> list[LaunchedHost]:
        """Print the command, and let in the machines that run it. Raises: OSError."""
        party = Party(tickets, self.within_s)
        print(_instructions(party, self.python), flush=True)
        return list(party.hosts)


def parse(asked: Asked) -> ManualLauncher:
    return ManualLauncher(asked.named, python=asked.python, within_s=asked.within_s or WITHIN_S)


def find(id: str, saved: SavedHost, logs: Path) -> tuple[LaunchedHost, Launcher]:
    """See `meshbook.launchers.registry`. An address of ours that has gone since is looked for again."""
    asked, within_s = saved.launcher.options
    python = saved.launcher.python
    try:
        launcher = ManualLauncher(asked, python=python, within_s=float(within_s))
    except UsageError:
        launcher = ManualLauncher(python=python, within_s=float(within_s))
    return FoundHost(saved.pid, saved.started), launcher


class ManualHost(LaunchedHost):
    """A place for a host, which is taken once somebody has come."""

    pid = started = 0

    def __init__(self, party: Party, ticket: Ticket) -> None:
        self._party, self.ticket = party, ticket
        self.name = ""
        """The name of the machine; empty until one has come."""
        self.ended = ""
        """The reason for the end of its agent, once the machine has told it."""
        self.has_left = threading.Event()
        self.is_closed = False

    def failure(self) -> str | None:
        if not self.name and self._party.is_over:
            came = self._party.came
            return f"nobody ran its command until {self._party.until}{came and f'; {came}'}"
        return self.ended or None

    def waits_for(self) -> str:
        """Return how many hosts are waited for; empty once this place is taken."""
        return "" if self.name else self._party.describe()

    def close(self, timeout_s: float) -> None:
        """Let no machine in any more; wait until the one that came has left, at most ``timeout_s``."""
        self.is_closed = True
        if self.name and not self.ended:
            self.has_left.wait(timeout_s)
        self._party.leave()

    def release(self) -> None:
        """Let the agent live on; a machine that has not come yet comes too late."""
        self.is_closed = True
        self._party.leave()


class Party:
    """The hosts of one launch, for which there is one ticket, and the gate that lets them in.

    The gate is open while a place is free or a host that came by it lives. Machines are admitted by its thread alone.
    """

    def __init__(self, tickets: Sequence[Ticket], within_s: float) -> None:
        """Raises: OSError."""
        self.within_s = within_s
        self.hosts = [ManualHost(self, ticket) for ticket in tickets]
        self._log = Path(tickets[0].log_dir) / "gate.log"
        self._turned_away = ""
        """The last machine that was turned away, and the reason."""
        self._deadline = time.monotonic() + within_s
        ends = time.localtime(time.time() + within_s)
        self.until = time.strftime("%H:%M" if within_s < 43200 else "%b %d, %H:%M", ends)
        ip, _, _ = tickets[0].endpoint.removeprefix("tcp://").rpartition(":")
        self._gate = Gate(f"tcp://{ip}:*", self._answer)
        self.invitation = Invitation(self._gate.endpoint, self._gate.key, secrets.token_urlsafe(16))
        _parties.add(self)

    def leave(self) -> None:
        """Close the gate if no host is left."""
        if all(host.is_closed for host in self.hosts):
            self._gate.close()

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._deadline

    @property
    def came(self) -> str:
        names = [host.name for host in self.hosts if host.name]
        return f"{len(names)} of {len(self.hosts)} came: {', '.join(names)}" if names else ""

    def describe(self) -> str:
        count = sum(not host.name for host in self.hosts)
        waits = f"waiting for {count} host{'s' * (count > 1)}, until {self.until}"
        return "; ".join(filter(None, (waits, self.came, self._turned_away)))

    def _answer(self, question: bytes) -> bytes:
        """Answer a question, on the gate's thread."""
        try:
            asked = decode_question(question)
        except msgspec.MsgspecError:
            return encode(TurnedAway("that was no question of this version of meshbook; install the same on both"))
        is_known = hmac.compare_digest(self.invitation.token.encode(), asked.token.encode())
        if isinstance(asked, Arrival):
            name = _printable(asked.name, _NAME_CHARS) or "a machine without a name"
            answer = self._admit(asked, name) if is_known else TurnedAway(_UNKNOWN)
            self._note(name, answer)
            return encode(answer)
        for host in self.hosts:
            if is_known and host.ticket.host_id == asked.host_id and host.name:
                host.ended = _printable(asked.why, _WHY_CHARS) or "its agent has ended"
                host.has_left.set()
        return encode(TurnedAway("" if is_known else _UNKNOWN))

    def _admit(self, arrival: Arrival, name: str) -> GateAnswer:
        """Let a machine in, if there is a place."""
        free = next((host for host in self.hosts if not host.name and not host.is_closed), None)
        if free is None and all(host.name for host in self.hosts):
            return TurnedAway(f"this ticket has been used as often as it may be: {self.came}")
        if free is None:
            return TurnedAway("nobody waits for it any more: its spawn was given up, or its mesh has ended")
        if self.is_over:
            return TurnedAway(f"this ticket was good until {self.until}; the notebook makes another for the next spawn")
        if differs := difference(arrival.protocol, arrival.python, "it", "the notebook"):
            self._turned_away = f"turned away {name}: {differs}"
            return TurnedAway(f"{differs}; install the same there")
        taken = {host.name for party in tuple(_parties) for host in party.hosts if not host.is_closed}
        free.name = next(each for each in (name, *(f"{name}-{n}" for n in range(2, 9999))) if each not in taken)
        free.ticket = elsewhere(free.ticket, name=free.name, ends_with_launcher=True)
        return Admitted(free.ticket, f"{getpass.getuser()}@{socket.gethostname()}")

    def _note(self, name: str, answer: GateAnswer) -> None:
        became = "is a host" if isinstance(answer, Admitted) else f"was turned away: {answer.reason}"
        if isinstance(answer, TurnedAway) and not self._turned_away:
            self._turned_away = f"turned away {name}: {answer.reason.partition(':')[0]}"
        with open_log(self._log) as log:
            log.write(f"{time.strftime('%H:%M:%S')} {name} {became}\n".encode())


_parties: weakref.WeakSet[Party] = weakref.WeakSet()
"""The launches of this process: no two of their hosts have one name."""


def _command(python: str, invitation: Invitation) -> str:
    """Return the line that a shell runs, here or behind a command that passes stdin on.

    ssh hands its words to another shell, which splits a quoted path again, and the shell here expands ``$HOME``. So the
    command of such an interpreter goes by stdin to a shell over there.
    """
    program = quoted_program(python or "python3")
    line = f"{program} {COMMAND} <<< {invitation}"
    return line if program == (python or "python3") else f"bash <<< {shlex.quote(f'exec {line}')}"


def _instructions(party: Party, python: str) -> str:
    count, within_s = len(party.hosts), party.within_s
    left = f"{within_s:g} s" if within_s < 90 else f"{round(within_s / 60)} min"
    where = f"each of {count} machines" if count > 1 else "one machine"
    return (
        f"run this on {where} until {party.until}, in {left}; it stays a host until the mesh ends or by Ctrl-C:"
        f"\n\n {_command(python, party.invitation)}\n\n"
        'by ssh or in a container: "ssh -T HOST" or "docker exec -i NAME" before it. The ticket is the word '
        f"that begins with mb1-; {COMMAND.removeprefix('-m ')} asks for it where it is left out"
    )


def _printable(text: str, chars: int) -> str:
    """Return text from another machine, safe to be shown."""
    return "".join(each if each.isprintable() else " " for each in text[:chars]).strip()
