"""Host agents and the controller, and agents among each other: how they meet, live and part; and the store on them.

The store is that by which process groups form (`meshbook.wire.kv_store`); `AbortGroups` ends the waits of groups.
"""

from __future__ import annotations

from typing import NamedTuple

from meshbook.wire.kv_store import StoreOp, StoreResult
from meshbook.wire.messages.calls import Header, Target


class Hello(Header, frozen=True, tag="hello"):
    version: int
    host_id: str
    name: str
    machine: str  # boot id and pid namespace: equal where shared memory can be shared
    pid: int
    cuda_devices: int
    cores: int
    python: str = ""  # as in ``3.11``: bytecode, in which the code of cells travels, differs between these


class Welcome(Header, frozen=True, tag="welcome"):
    """Answer to `Hello`; ``shares_memory`` says that the controller runs on the same host."""

    version: int
    shares_memory: bool
    machine: str  # see `Hello`; on the same one the agent watches the controller's process
    pid: int
    started: int


class Refused(Header, frozen=True, tag="refused"):
    reason: str


class Unread(Header, frozen=True, tag="unread"):
    """The host could not read a message of the controller's, or not act on it."""

    kind: str  # the tag of the message, as far as that could be read
    id: int  # id of the call, the question or the request for workers; else 0
    reason: str


class ExpectTorch(Header, frozen=True, tag="torch"):
    """The controller is likely to ask for ranks with torch: the agent has it imported before, after a moment."""


class Leave(Header, frozen=True, tag="leave"):
    """The controller goes, the meshes stay: wait so long for the next one. It is the controller's last message."""

    lease_s: float


class Goodbye(Header, frozen=True, tag="bye"):
    """End: stop every worker, then exit."""


class Meeting(NamedTuple):
    """The way in which one agent calls another."""

    endpoint: str
    epoch: int  # epoch of their links; 0: they know each other already
    problem: str = ""  # why it cannot


class Peer(NamedTuple):
    """Another host, for the agent of one whose workers call it."""

    host: str
    name: str
    key: str  # CURVE, public
    target: Target  # the ranks that live there
    meeting: Meeting
    pid: int = 0  # pid of its agent, where that is on the same machine as the receiver's


class OpenPeerPort(Header, frozen=True, tag="openpeer"):
    """Let the agent of ``host``, with this key, in at a port for other agents. Answered by `PeerAddress`."""

    host: str
    key: str
    epoch: int
    ip: str  # the address to listen at, for an agent that has not dialled in over TCP


class AskPeers(Header, frozen=True, tag="peers?"):
    """A worker here calls ``mesh``, not all of which is here. Answered by `Peers`, and whenever ranks have moved."""

    mesh: int
    known: tuple[str, ...]  # hosts to which there is a connection already
    broken: tuple[str, ...] = ()  # hosts to which there was one


class Peers(Header, frozen=True, tag="peers"):
    """The hosts of the ranks of ``mesh`` that are not on this host; without any: the mesh is not known."""

    mesh: int
    peers: tuple[Peer, ...]


class PeerAddress(Header, frozen=True, tag="peerport"):
    """The endpoint at which ``host`` can dial in here, or why it cannot."""

    host: str
    endpoint: str
    problem: str = ""


class PeerLost(Header, frozen=True, tag="peerlost"):
    """A host is lost: answer for its ranks, and let it in no more."""

    host: str
    reason: str


class AbortGroups(Header, frozen=True, tag="abort"):
    """End every wait of process groups of up to ``epoch``, and refuse their later operations, until they are formed
    under a higher one. Ranks raise `meshbook.errors.GroupAborted` with ``reason``."""

    mesh: int
    target: Target
    epoch: int
    reason: str
    groups: tuple[str, ...] = ()  # only these; all where there are none


class StoreRequest(Header, frozen=True, tag="store"):
    """A rank asks the store of its mesh, on the agent of host 0. Its own agent fills in the mesh and the rank."""

    mesh: int
    rank: int
    request: int
    op: StoreOp


class StoreAnswer(Header, frozen=True, tag="stored"):
    """The answer of the store, on its way back to that rank."""

    mesh: int
    rank: int
    request: int
    result: StoreResult


class DropClient(Header, frozen=True, tag="dropclient"):
    """A rank on another host has ended and waits for no key any more; sent to the host of the store."""

    mesh: int
    rank: int


class DropKeys(Header, frozen=True, tag="dropkeys"):
    """Delete the keys under ``prefix``; ranks that wait for one of them get an error. Sent to the host of the store."""

    mesh: int
    prefix: str


class StoreLost(Header, frozen=True, tag="storelost"):
    """The host of the store is lost; ranks that wait for an answer get an error. Sent to the other hosts."""

    mesh: int
    reason: str


class AskAgain(Header, frozen=True, tag="askagain"):
    """A new controller passes questions on from now on, so ask the open ones again. Sent to hosts without the store."""

    mesh: int
