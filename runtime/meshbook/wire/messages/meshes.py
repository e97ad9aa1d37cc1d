"""Meshes on a host: how workers are started, begun, numbered, lost and ended, and the report to a new controller."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from meshbook.errors.advice import Advice
from meshbook.wire.messages.calls import Header, Target


class Seat(NamedTuple):
    """Who one worker is among the others of its mesh."""

    known_as: int
    """What messages call it so far: its rank until now; for a new worker whose rank is still another's, any number."""
    rank: int
    local_rank: int


class Arrangement(NamedTuple):
    """The ranks of a mesh, as one host needs to know them."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    world_size: int
    host_rank: int
    hosts: int
    """How many hosts the mesh lies on."""
    local_world_size: int


class StartCommand(NamedTuple):
    """How workers begin, where that was asked for."""

    python: str = ""
    """The interpreter, as the host finds it; empty: that of the host's agent."""
    environment: dict[str, str | None] = {}
    """More of an environment; None removes a variable."""
    inherits: bool = True
    """Whether the environment starts as that of the host and of the controller, rather than empty."""
    anew: bool = False
    """Whether ``python`` is run for this mesh alone, rather than once for all on the host that name it."""


class Spawn(Header, frozen=True, tag="spawn"):
    """Start workers of a mesh; they join those that the host has of it. Answered by `MeshReady` or `SpawnFailed`."""

    request: int
    """Named in the answer, and wherever one of the workers ends."""
    mesh: int
    name: str
    seats: tuple[Seat, ...]
    arrangement: Arrangement
    device: str | None
    preload: tuple[str, ...]
    cwd: bytes | None
    sys_path: tuple[bytes, ...]
    environment: dict[bytes, bytes]
    torch: bool = True
    """Whether the workers have it from their first moment."""
    must_enter: bool = False
    """Whether a person has named ``cwd``, rather than that it is the controller's own: then it has to be there."""
    generation: int = 0
    """Of the numbers of the mesh's ranks."""
    advice: Advice = Advice()
    """How the controller's front end calls what helps."""
    shares_files: bool = True
    """Whether the host has the files of the controller."""
    command: StartCommand = StartCommand()
    """What differs in ``environment`` is in there already."""
    bindings: tuple[dict[str, str], ...] = ()
    """Where on the machine workers run, by local rank (`meshbook.system.devices`)."""


class WorkerStarted(NamedTuple):
    rank: int
    pid: int
    device: str
    log_path: str


class MeshReady(Header, frozen=True, tag="ready"):
    """Every worker of one `Spawn` has answered; ``rank`` is what messages call it."""

    mesh: int
    workers: tuple[WorkerStarted, ...]
    request: int = 0


class SpawnProgress(Header, frozen=True, tag="coming"):
    """Workers of a `Spawn` come up: sent once a second, whenever that has moved."""

    mesh: int
    request: int
    step: str
    """What they wait for, as in ``importing torch``."""
    last_line: str
    """The last that was written to the log of the host's agent meanwhile."""


class SpawnFailed(Header, frozen=True, tag="nospawn"):
    mesh: int
    reason: str
    wanted_devices: int = -1
    found_devices: int = -1
    """For too few devices: how many were wanted, and how many there are."""
    request: int = 0


class WorkerExited(Header, frozen=True, tag="exited"):
    """A worker ended without being told to. Its pid tells it from others that had or will have its rank."""

    mesh: int
    rank: int
    pid: int
    cause: str
    log_tail: str
    request: int = 0
    alone: bool = False
    """It was killed, and no other of the mesh on this host is ending: nobody need wait for more deaths like it."""


class MeshUp(Header, frozen=True, tag="up"):
    """All ranks have met, and the mesh can be attached: only from now on does it wait for another controller."""

    mesh: int


class StopMesh(Header, frozen=True, tag="stop"):
    mesh: int
    grace_s: float


class MeshStopped(Header, frozen=True, tag="stopped"):
    """The mesh has no process left on this host."""

    mesh: int


class Renumber(Header, frozen=True, tag="renumber"):
    """From now on the workers here have these ranks, in a mesh of other axes; all of them are named.

    With the ranks and the arrangement that they have it says that the first host is another one: calls go on.
    """

    mesh: int
    seats: tuple[Seat, ...]
    arrangement: Arrangement
    moves: tuple[tuple[int, ...], ...] = ()
    """How ranks got other numbers, this time too (`meshbook.shape.generations`)."""


class Moved(Header, frozen=True, tag="moved"):
    """How the ranks of a mesh got other numbers, for hosts and workers that may have references to them."""

    mesh: int
    moves: tuple[tuple[int, ...], ...]


class LostRank(NamedTuple):
    rank: int
    cause: str
    log_tail: str


class CallState(NamedTuple):
    """A call of a former controller, on one host."""

    id: int
    label: str
    target: Target
    output: int
    waiting: tuple[int, ...]
    """Ranks that are at it."""
    answered: tuple[int, ...]
    """Ranks whose answers follow."""
    is_due: bool
    """Whether the former controller has not had everything from here."""
    mailbox: int = 0


class HostedState(NamedTuple):
    """A mesh on one host."""

    mesh: int
    name: str
    arrangement: Arrangement
    device: str | None
    preload: tuple[str, ...]
    cwd: bytes | None
    sys_path: tuple[bytes, ...]
    ranks: tuple[int, ...]
    """All that have their place here."""
    workers: tuple[WorkerStarted, ...]
    """Those that have come up, the dead included."""
    lost: tuple[LostRank, ...]
    """The dead whose end the former controller knew; of the others it is told next."""
    calls: tuple[CallState, ...]
    moves: tuple[tuple[int, ...], ...] = ()
    torch: bool = True


class Hosted(Header, frozen=True, tag="hosted"):
    """To a new controller, after `Hello` and before all that the former one has not acknowledged."""

    meshes: tuple[HostedState, ...]


class Identity(msgspec.Struct, array_like=True, frozen=True):
    """Who a worker is: what torchrun would tell it, and the axes of its mesh."""

    mesh: int
    name: str
    """Of the mesh."""
    host: str
    device: str
    """``cpu``, or ``cuda`` with any index."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host_rank: int
    hosts: int
    """How many hosts the mesh lies on; ranks may be more on one host than on another."""
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    threads: int
    generation: int = 0
    """Of the numbers of its mesh's ranks."""
    host_id: str = ""
    """Of its host, among those of the session; `host` is what people call it."""


class Begin(Header, frozen=True, tag="begin"):
    """The first message to a worker."""

    identity: Identity
    marker: bytes
    """Written to stdout and stderr, followed by an output id, where another output begins."""
    preload: tuple[str, ...]
    cwd: bytes | None
    sys_path: tuple[bytes, ...]
    environment: dict[bytes, bytes]
    advice: Advice = Advice()
    shares_files: bool = True
    command: StartCommand = StartCommand()
    binding: dict[str, str] = {}
    shortcut: str = ""
    """The path of the controller's end of shortcuts (`meshbook.wire.shortcuts`); empty: there is none here."""


class Renumbered(Header, frozen=True, tag="renumbered"):
    """Who the worker is from now on; travels among the calls, in their order."""

    identity: Identity


class Begun(Header, frozen=True, tag="begun"):
    pid: int
    control_thread: int = 0
    """The kernel's number of the thread that takes the signal for a dump (`meshbook.stacks.dump`)."""
    dump_fd: int = -1
    """Where the dump goes, a descriptor of the worker's; -1 where it makes none."""


class OpenMail(Header, frozen=True, tag="mail"):
    """The first message on the mail lane follows: somebody must read there from now on."""
