"""Host agents that people start: one command, to be run on as many machines as hosts are waited for.

    notebook ──shows: a command and its ticket──> person ──pastes it──> shell of any machine ──> meshbook.join
    gate     <──── the ticket's secret ────────────────────────────────────────────────────────────'   |
      '────── the ticket of one agent ───────────────────────────────────────────────────────────────> agent
    controller, own address: port <══════════════════ network ══════════════════════════════════════════'

The gate is a port of its own, open as long as a host that came through it lives: it also hears why a host leaves, and
tells who comes too late that it is so. ``gate.log`` among the session's logs lists the hosts that it has let in and
turned away.
"""

from __future__ import annotations

import getpass
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from meshbook.concurrency.forks import at_fork
from meshbook.errors import UsageError
from meshbook.launchers.agent_start import open_log, own_ip, quoted_program
from meshbook.launchers.base import LaunchedHost, Launcher
from meshbook.launchers.invitation import (
    COMMAND,
    Admitted,
    Arrival,
    Departure,
    GateAnswer,
    Invitation,
    TurnedAway,
    decode_question,
    difference,
    encode,
)
from meshbook.launchers.local import FoundHost
from meshbook.launchers.registry import Asked
from meshbook.sessions.folder import SavedHost, SavedLauncher
from meshbook.system.interfaces import in_endpoint, own_address
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
        party = _door.expect(tickets, self.within_s)
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
        _door.leave(self)

    def release(self) -> None:
        """Let the agent live on; a machine that has not come yet comes too late."""
        self.is_closed = True
        _door.leave(self)


class Party:
    """The hosts of one launch, for which there is one ticket. The door's lock guards it."""

    def __init__(self, tickets: Sequence[Ticket], within_s: float, invitation: Invitation) -> None:
        self.invitation, self.within_s = invitation, within_s
        self.hosts = [ManualHost(self, elsewhere(ticket)) for ticket in tickets]
        self.log = Path(tickets[0].log_dir) / "gate.log"
        self.turned_away = ""
        """The last machine that was turned away, and the reason."""
        self._deadline = time.monotonic() + within_s
        ends = time.localtime(time.time() + within_s)
        self.until = time.strftime("%H:%M" if within_s < 43200 else "%b %d, %H:%M", ends)

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
        return "; ".join(filter(None, (waits, self.came, self.turned_away)))

    def admit(self, arrival: Arrival, name: str, taken: Sequence[str]) -> GateAnswer:
        """Let a machine in, if there is a place. taken: the names of other hosts."""
        free = next((host for host in self.hosts if not host.name and not host.is_closed), None)
        if free is None and all(host.name for host in self.hosts):
            return TurnedAway(f"this ticket has been used as often as it may be: {self.came}")
        if free is None:
            return TurnedAway("nobody waits for it any more: its spawn was given up, or its mesh has ended")
        if self.is_over:
            return TurnedAway(f"this ticket was good until {self.until}; the notebook makes another for the next spawn")
        if differs := difference(arrival.protocol, arrival.python, "it", "the notebook"):
            self.turned_away = f"turned away {name}: {differs}"
            return TurnedAway(f"{differs}; install the same there")
        free.name = next(each for each in (name, *(f"{name}-{n}" for n in range(2, 9999))) if each not in taken)
        free.ticket = msgspec.structs.replace(free.ticket, name=free.name, ends_with_launcher=True)
        return Admitted(free.ticket, f"{getpass.getuser()}@{socket.gethostname()}")

    def dismiss(self, departure: Departure) -> None:
        for host in self.hosts:
            if host.ticket.host_id == departure.host_id and host.name:
                host.ended = _printable(departure.why, _WHY_CHARS) or "its agent has ended"
                host.has_left.set()


class Door:
    """The gate of this process, open while a place is free or a host that came by it lives."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gate: Gate | None = None
        self._parties: list[Party] = []

    def expect(self, tickets: list[Ticket], within_s: float) -> Party:
        """Raises: OSError."""
        ip, _, _ = tickets[0].endpoint.removeprefix("tcp://").rpartition(":")
        with self._lock:
            if self._gate is None:
                self._gate = Gate(f"tcp://{ip}:*", self._answer)
            invitation = Invitation(self._gate.endpoint, self._gate.key, secrets.token_urlsafe(16))
            party = Party(tickets, within_s, invitation)
            self._parties.append(party)
            return party

    def leave(self, host: ManualHost) -> None:
        with self._lock:
            over = all(host.is_closed for party in self._parties for host in party.hosts)
            gate = self._gate if over else None
            if over:
                self._gate, self._parties = None, []
        if gate is not None:
            gate.close()

    def _answer(self, question: bytes) -> bytes:
        """Answer a question, on the gate's thread."""
        try:
            asked = decode_question(question)
        except msgspec.MsgspecError:
            return encode(TurnedAway("that was no question of this version of meshbook; install the same on both"))
        with self._lock:
            token = asked.token.encode()
            known = (each for each in self._parties if hmac.compare_digest(each.invitation.token.encode(), token))
            party = next(known, None)
            answer: GateAnswer = TurnedAway(_UNKNOWN)
            if isinstance(asked, Arrival):
                name = _printable(asked.name, _NAME_CHARS) or "a machine without a name"
                if party is not None:
                    hosts = [host for each in self._parties for host in each.hosts if not host.is_closed]
                    answer = party.admit(asked, name, [host.name for host in hosts])
                for each in [party] if party is not None else self._parties[-1:]:
                    self._note(each, name, answer)
            elif party is not None:
                party.dismiss(asked)
                answer = TurnedAway("")
        return encode(answer)

    def _note(self, party: Party, name: str, answer: GateAnswer) -> None:
        became = "is a host" if isinstance(answer, Admitted) else f"was turned away: {answer.reason}"
        if isinstance(answer, TurnedAway) and not party.turned_away:
            party.turned_away = f"turned away {name}: {answer.reason.partition(':')[0]}"
        with open_log(party.log) as log:
            log.write(f"{time.strftime('%H:%M:%S')} {name} {became}\n".encode())

    def forget(self) -> None:
        """Forget the gate in a fork, where it does not listen."""
        self._lock = threading.Lock()
        self._inherited, self._gate, self._parties = self._gate, None, []


_door = Door()
at_fork(in_child=_door.forget)


def _instructions(party: Party, python: str) -> str:
    count, within_s = len(party.hosts), party.within_s
    left = f"{within_s:g} s" if within_s < 90 else f"{round(within_s / 60)} min"
    where = f"each of {count} machines" if count > 1 else "one machine"
    return (
        f"run this on {where} until {party.until}, in {left}; it stays a host until the mesh ends or by Ctrl-C:"
        f"\n\n {quoted_program(python or 'python3')} {COMMAND} <<< {party.invitation}\n\n"
        'by ssh or in a container: "ssh -T HOST" or "docker exec -i NAME" before it. Its last word is the ticket, '
        "which it asks for where it is left out"
    )


def _printable(text: str, chars: int) -> str:
    """Return text from another machine, safe to be shown."""
    return "".join(each if each.isprintable() else " " for each in text[:chars]).strip()
