"""The ticket of a host agent, its only way in. It travels on stdin: others can read command lines."""

from __future__ import annotations

from pathlib import Path

import msgspec

TUNNEL_ENDS = "/tmp/meshbook-"
"""Where launchers have sshd put the ends of tunnels; 24 hexadecimal digits follow."""

ARRIVE_S = 20.0
"""The controller listens before agents are started: where no connection comes about in so long there is no way."""


class Ticket(msgspec.Struct, frozen=True):
    """What an agent needs to find the controller and to prove who it is."""

    host_id: str
    """Chosen by the controller; the CURVE key pair is accepted for this host only."""
    endpoint: str
    controller_key: str
    public_key: str
    secret_key: str
    log_dir: str
    """Where it writes its logs; a relative path lies in its own user's folder of logs."""
    epoch: int
    """Which controller of the session this is; frames of an older one are ignored."""
    lease_s: float
    """How long the agent and its meshes wait for the next controller once theirs has ended (`meshbook.agent.lease`)."""
    shares_memory: bool = True
    """False makes an agent behave as on another machine, whatever machine it is on."""
    session: str = ""
    """The session's folder, which the last agent removes when there is no controller; empty on other machines."""
    name: str = ""
    """What people call the host; empty: its machine's own name."""
    by_tunnel: bool = False
    """Whether the endpoint is an end of the launcher's connection, with which it ends (`meshbook.agent.tunnel`)."""
    arrive_s: float = ARRIVE_S
    """It ends where nobody was there to connect to for so long from its beginning, whoever holds its stdin."""
    ends_with_launcher: bool = False
    """Whether it ends when nobody reads its stdout any more, though it has dialled by itself."""


def elsewhere(ticket: Ticket) -> Ticket:
    """The ticket of an agent that shares neither memory nor folders with the controller."""
    log_dir = f"{Path(ticket.session).name}/{ticket.host_id}"
    return msgspec.structs.replace(ticket, shares_memory=False, log_dir=log_dir, session="")


encode_ticket = encode_tickets = msgspec.json.Encoder().encode
"""Several for who passes one stdin on to several agents, as srun does."""

_decode = msgspec.json.Decoder(Ticket | list[Ticket]).decode


def decode_ticket(line: bytes, number: int = 0) -> Ticket:
    """The ticket in ``line``, or the one of this number."""
    found = _decode(line)
    return found if isinstance(found, Ticket) else found[number]
