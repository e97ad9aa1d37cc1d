"""The ticket of a host agent, its only way in. It travels on stdin: others can read command lines."""

from __future__ import annotations

from pathlib import Path

import msgspec

# path at which launchers have sshd put the ends of tunnels; 24 hexadecimal digits follow
TUNNEL_ENDS = "/tmp/meshbook-"
# the controller listens before agents are started: without a connection after so long it cannot be reached
ARRIVE_S = 20.0


class Ticket(msgspec.Struct, frozen=True):
    """The ticket with which an agent finds the controller and proves who it is."""

    host_id: str  # chosen by the controller; the CURVE key pair is accepted for this host only
    endpoint: str
    controller_key: str
    public_key: str
    secret_key: str
    log_dir: str  # folder for its logs; a relative path lies in its own user's folder of logs
    epoch: int  # number of the session's controller; frames of an older one are ignored
    # the agent and its meshes wait so long for the next controller once theirs has ended (`meshbook.agent.lease`)
    lease_s: float
    shares_memory: bool = True  # false makes an agent behave as on another machine, whatever machine it is on
    # the session's folder, which the last agent removes when there is no controller; empty on other machines
    session: str = ""
    name: str = ""  # the name of the host for people; empty: its machine's own name
    # whether the endpoint is an end of the launcher's connection, with which it ends (`meshbook.agent.tunnel`)
    by_tunnel: bool = False
    # it ends if it has had no connection for so long from its beginning, even while its stdin is open
    arrive_s: float = ARRIVE_S
    # whether it ends when its stdout has no reader any more, though it has dialled by itself
    ends_with_launcher: bool = False


def elsewhere(ticket: Ticket, **changes: object) -> Ticket:
    """Return the ticket of an agent that shares neither memory nor folders with the controller.

    changes: to other fields.
    """
    log_dir = f"{Path(ticket.session).name}/{ticket.host_id}"
    return msgspec.structs.replace(ticket, shares_memory=False, log_dir=log_dir, session="", **changes)


# several tickets for a program that passes one stdin on to several agents, as srun does
encode_ticket = encode_tickets = msgspec.json.Encoder().encode

_decode = msgspec.json.Decoder(Ticket | list[Ticket]).decode


def decode_ticket(line: bytes, number: int = 0) -> Ticket:
    """Return the ticket in ``line``, or the one of this number."""
    found = _decode(line)
    return found if isinstance(found, Ticket) else found[number]
