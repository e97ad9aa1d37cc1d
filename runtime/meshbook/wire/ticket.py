"""The ticket of a host agent, its only way in. It travels on stdin: others can read command lines."""

from __future__ import annotations

import msgspec


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


encode_ticket = msgspec.json.Encoder().encode


decode_ticket = msgspec.json.Decoder(Ticket).decode
