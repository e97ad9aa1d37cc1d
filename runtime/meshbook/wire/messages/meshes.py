"""Meshes on a host: how workers are started, begun, numbered, lost and ended, and the report to a new controller."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from meshbook.errors.advice import Advice
from meshbook.wire.messages.calls import Header, Target


class Seat(NamedTuple):
    """The place of one worker among the others of its mesh."""

    # its number in messages so far: its rank until now; for a new worker whose rank is still another's, any number
    known_as: int
    rank: int
    local_rank: int


class Arrangement(NamedTuple):
    """The ranks of a mesh, as one host needs to know them."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    world_size: int
    host_rank: int
    hosts: int  # number of hosts of the mesh
    local_world_size: int


class StartCommand(NamedTuple):
    """The way in which workers begin, where that was asked for."""

    python: str = ""  # the interpreter, as the host finds it; empty: that of the host's agent
    environment: dict[str, str | None] = {}  # changes of the environment; None removes a variable
    inherits: bool = True  # whether the environment starts as that of the host and of the controller, rather than empty
    # whether ``python`` is run for this mesh alone, rather than once for all on the host that name it
    anew: bool = False


class Spawn(Header, frozen=True, tag="spawn"):
    """Start workers of a mesh; they join its workers on the host. Answered by `MeshReady` or `SpawnFailed`."""

    request: int  # named in the answer, and wherever one of the workers ends
    mesh: int
    name: str
    seats: tuple[Seat, ...]
    arrangement: Arrangement
    device: str | None
    preload: tuple[str, ...]
    cwd: bytes | None
    sys_path: tuple[bytes, ...]
    environment: dict[bytes, bytes]
    torch: bool = True  # whether the workers have it from their first moment
    # whether a person has named ``cwd``, so that it has to be there; else it is the controller's own
    must_enter: bool = False
    generation: int = 0  # generation of the numbers of the mesh's ranks
    advice: Advice = Advice()  # words of the controller's front end for ways out
    shares_files: bool = True  # whether the host has the files of the controller
    command: StartCommand = StartCommand()  # its changes are in ``environment`` already
    # places on the machine where workers run, by local rank (`meshbook.system.devices`)
    bindings: tuple[dict[str, str], ...] = ()


class WorkerStarted(NamedTuple):
    rank: int
    pid: int
    device: str
    log_path: str


class MeshReady(Header, frozen=True, tag="ready"):
    """Every worker of one `Spawn` has answered; messages call it by ``rank``."""

    mesh: int
    workers: tuple[WorkerStarted, ...]
    request: int = 0


class SpawnProgress(Header, frozen=True, tag="coming"):
    """Workers of a `Spawn` come up: sent once a second, whenever that has moved."""

    mesh: int
    request: int
    step: str  # their present step, as in ``importing torch``
    last_line: str  # the last line in the log of the host's agent meanwhile


class SpawnFailed(Header, frozen=True, tag="nospawn"):
    mesh: int
    reason: str
    wanted_devices: int = -1
    found_devices: int = -1  # for too few devices: this and the number wanted
    request: int = 0


class WorkerExited(Header, frozen=True, tag="exited"):
    """A worker ended without being told to. Its pid tells it from others that had or will have its rank."""

    mesh: int
    rank: int
    pid: int
    cause: str
    log_tail: str
    request: int = 0
    # whether it was killed, and no other of the mesh on this host is ending: no more deaths like it need be awaited
    alone: bool = False


class MeshUp(Header, frozen=True, tag="up"):
    """Every rank has met the others, and the mesh can be attached: from now on it waits for another controller."""

    mesh: int


class StopMesh(Header, frozen=True, tag="stop"):
    mesh: int
    grace_s: float


class MeshStopped(Header, frozen=True, tag="stopped"):
    """The mesh has no process left on this host."""

    mesh: int


class Renumber(Header, frozen=True, tag="renumber"):
    """The workers here have these ranks from now on, in a mesh of other axes; all of them are named. With the present
    ranks and arrangement it says that the first host is another one: calls go on."""

    mesh: int
    seats: tuple[Seat, ...]
    arrangement: Arrangement
    # moves of ranks to other numbers, this one too (`meshbook.shape.members`)
    moves: tuple[tuple[int, ...], ...] = ()


class Moved(Header, frozen=True, tag="moved"):
    """The moves of a mesh's ranks to other numbers, for hosts and workers that may have references to them."""

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
    waiting: tuple[int, ...]  # ranks that are at it
    answered: tuple[int, ...]  # ranks whose answers follow
    is_due: bool  # whether the former controller has not had everything from here
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
    ranks: tuple[int, ...]  # ranks that have their place here
    workers: tuple[WorkerStarted, ...]  # workers that have come up, the dead included
    lost: tuple[LostRank, ...]  # dead ranks whose end the former controller knew; the ends of others follow
    calls: tuple[CallState, ...]
    moves: tuple[tuple[int, ...], ...] = ()
    torch: bool = True


class Hosted(Header, frozen=True, tag="hosted"):
    """The report to a new controller, after `Hello` and before messages that the former one has not acknowledged."""

    meshes: tuple[HostedState, ...]


class Identity(msgspec.Struct, array_like=True, frozen=True):
    """The identity of a worker: the values that torchrun would give it, and the axes of its mesh."""

    mesh: int
    name: str  # of the mesh
    host: str
    device: str  # ``cpu``, or ``cuda`` with any index
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host_rank: int
    hosts: int  # number of hosts of the mesh; ranks may be more on one host than on another
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    threads: int
    generation: int = 0  # generation of the numbers of its mesh's ranks
    host_id: str = ""  # id of its host, among those of the session; `host` is its name for people


class Begin(Header, frozen=True, tag="begin"):
    """The first message to a worker."""

    identity: Identity
    marker: bytes  # written to stdout and stderr, followed by an output id, where another output begins
    spawn: Spawn  # the request that it comes from, without seats
    environment: dict[bytes, bytes]  # the rank's own variables, beside those of the request
    imports: bool  # whether it is to import the modules of ``spawn.preload``: its template has not
    binding: dict[str, str] = {}
    # the folder of the sockets of direct links (`meshbook.wire.direct`), and whether the controller listens there
    direct: str = ""
    controller_is_here: bool = False


class Renumbered(Header, frozen=True, tag="renumbered"):
    """The worker's identity from now on; travels among the calls, in their order."""

    identity: Identity


class Begun(Header, frozen=True, tag="begun"):
    pid: int
    # the kernel's number of the thread that takes the signal for a dump (`meshbook.stacks.dump`)
    control_thread: int = 0
    dump_fd: int = -1  # descriptor of the worker's for the dump; -1 where it makes none


class OpenMail(Header, frozen=True, tag="mail"):
    """The first message on the mail lane follows: a thread must read there from now on."""
