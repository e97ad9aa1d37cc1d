"""Make this machine a host of a notebook's mesh: ``meshbook join``, which reads the ticket from stdin.

The notebook shows the command (``--on manual``). It stays in the foreground: the agent and its
ranks end with it, by Ctrl-C, with its terminal or its ssh, and when the notebook stops the mesh.

A module of its own because the notebook's command runs it by this name: ``python3 -m meshbook.join``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from getpass import getpass
from pathlib import Path

from meshbook.errors import MeshError, ProtocolError, UsageError
from meshbook.launchers.agent_start import AGENT, TEMPLATES
from meshbook.system.exits import log_tail
from meshbook.system.processes import describe_exit, python_version
from meshbook.system.user_folders import log_base
from meshbook.wire.invitation import (
    Admitted,
    Arrival,
    Departure,
    Invitation,
    decode_answer,
    encode,
    read_invitation,
)
from meshbook.wire.messages import PROTOCOL_VERSION
from meshbook.wire.ticket import Ticket, encode_ticket
from meshbook.wire.zmq_transport import ask_gate

ANSWER_S = 10.0
"""The time within which the gate has to answer."""
END_S = 10.0
"""The time that the agent has to end its ranks and itself."""

EXIT_USAGE, EXIT_REFUSED, EXIT_UNREACHABLE = 2, 77, 69

_ABOUT = """Makes this machine a host of the mesh that a notebook waits with (--on manual). The ticket, a line
beginning with mb1-, is read from stdin: where that is a terminal, paste it when asked. It does not go on the command
line, where other users of this machine could read it. Ctrl-C ends the host."""
_HELP = f"""usage: python3 -m meshbook.join    (the same: meshbook join)

{_ABOUT}"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of ``meshbook join``."""
    subparsers.add_parser("join", description=_ABOUT, allow_abbrev=False)


def main(args: argparse.Namespace | None = None) -> int:
    """Be a host until the mesh ends; returns the exit code. args: of ``meshbook join``, else those of the process."""
    if args is None and len(sys.argv) > 1:
        is_help = sys.argv[1] in ("-h", "--help")
        print(_HELP, file=sys.stdout if is_help else sys.stderr)
        return 0 if is_help else EXIT_USAGE
    try:
        invitation = read_invitation(_read_ticket())
        admitted = _arrive(invitation)
    except UsageError as error:
        return _complain(str(error), EXIT_USAGE)
    except (OSError, ProtocolError) as error:
        return _complain(str(error), EXIT_UNREACHABLE)
    except MeshError as error:
        return _complain(str(error), EXIT_REFUSED)
    except KeyboardInterrupt:
        return 130
    return _serve(invitation, admitted)


def _read_ticket() -> str:
    if sys.stdin.isatty():
        try:
            return getpass("ticket of the notebook (it is not shown): ")
        except EOFError:
            return ""
    return sys.stdin.readline(1 << 12)


def _arrive(invitation: Invitation) -> Admitted:
    """Raises: OSError, ProtocolError; MeshError where we are turned away."""
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    arrival = Arrival(invitation.token, name, PROTOCOL_VERSION, python_version())
    where = invitation.endpoint.removeprefix("tcp://")
    try:
        answer = decode_answer(ask_gate(invitation.endpoint, invitation.key, encode(arrival), ANSWER_S))
    except OSError as error:
        raise OSError(
            f"nobody listens at {where} ({error.strerror or error}): the notebook waits for no hosts any more, or this "
            "machine cannot reach it; --on manual:ADDRESS names another address of its machine"
        ) from None
    except ProtocolError as error:
        raise ProtocolError(
            f"this ticket is an old one: who listens at {where} now has not made it ({error})"
        ) from None
    if isinstance(answer, Admitted):
        return answer
    raise MeshError(f"the notebook at {where} refuses: {answer.reason}")


def _serve(invitation: Invitation, admitted: Admitted) -> int:
    """Run the agent, and tell the gate why it has ended."""
    signals = _hear_signals()
    agent = _start_agent(admitted.ticket)
    _say(f"{admitted.ticket.name} is a host of {admitted.home} until its mesh ends, or by Ctrl-C")
    if why := _wait(agent, signals):
        _depart(invitation, admitted.ticket, why)
    code = _end_agent(agent)
    said = _last_words(admitted.ticket)
    if not why:
        _depart(invitation, admitted.ticket, f"its agent ended ({describe_exit(code)}){said and f': {said}'}")
    _say("the mesh has ended" if code == 0 else why or f"the agent ended ({describe_exit(code)}): {said}")
    return code


def _start_agent(ticket: Ticket) -> subprocess.Popen[bytes]:
    """The agent ends when nobody reads its stdout any more, which is when we have ended. Raises: OSError."""
    agent = subprocess.Popen(
        [sys.executable, "-m", TEMPLATES, AGENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert agent.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        agent.stdin.write(encode_ticket(ticket) + b"\n")
        agent.stdin.close()
    return agent


def _end_agent(agent: subprocess.Popen[bytes]) -> int:
    """Wait for its end, and end it where it does not; how it has ended, as in `subprocess`."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        if agent.poll() is None:
            agent.terminate()
        return agent.wait(END_S)
    agent.kill()  # its ranks go with it
    return agent.wait()


def _last_words(ticket: Ticket) -> str:
    """Return the last lines of an agent's log, as one."""
    with contextlib.suppress(OSError, MeshError):
        return " ".join(log_tail(Path(log_base()) / ticket.log_dir / "agent.log", 3).split())
    return ""


def _hear_signals() -> int:
    """A pipe that tells of signals to end: none of them comes between us and the agent."""
    told, tell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(tell)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, lambda *_: None)
    return told


def _wait(agent: subprocess.Popen[bytes], signals: int) -> str:
    """Wait until the agent has ended, or we are to end: then say why. Until it has a log, show its output."""
    assert agent.stdout is not None
    poll = select.poll()
    poll.register(agent.stdout, select.POLLIN)
    poll.register(signals, select.POLLIN)
    with contextlib.suppress(OSError):  # there was none from the start
        os.fstat(1)
        poll.register(1, 0)  # tells when nobody reads it any more
    while True:
        for fd, events in poll.poll():
            if fd == signals:
                return f"its meshbook.join was ended there, by {signal.Signals(os.read(fd, 1)[0]).name}"
            if fd == 1 and events & (select.POLLERR | select.POLLHUP):
                return "its meshbook.join lost its terminal or its ssh connection"
            if fd == agent.stdout.fileno():
                if not (said := os.read(fd, 1 << 12)):
                    return ""
                os.write(2, said)


def _depart(invitation: Invitation, ticket: Ticket, why: str) -> None:
    departure = encode(Departure(invitation.token, ticket.host_id, why))
    with contextlib.suppress(OSError, ProtocolError):  # nobody waits to hear it
        ask_gate(invitation.endpoint, invitation.key, departure, 2.0)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"meshbook: {text}", flush=True)


def _complain(text: str, code: int) -> int:
    print(f"meshbook: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
