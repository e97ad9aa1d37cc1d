"""Every message between controller, host agents and workers, with its codec.

    controller  --ToHost-->    host agent  --ToWorker-->    worker
    controller  <--FromHost--  host agent  <--FromWorker--  worker

A message is one header (a msgspec struct, msgpack, array-like) and any number of opaque payload frames. Agents decode
headers and pass payloads on; only the user's thread of the receiving process unpickles them. On ZeroMQ each message
wears the numbered header of `meshbook.wire.link`; on the socketpairs of one host it is framed by
`meshbook.wire.frames`.

Ranks are always base ranks of their mesh. A target is a tuple of affine slices over them: O(axes) bytes for any size.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import msgspec

from meshbook.errors.advice import Advice
from meshbook.formatting import utf8_text
from meshbook.shape.members import Piece
from meshbook.source.frames import ThreadStack
from meshbook.wire.kv_store import StoreOp, StoreResult

PLACE, SHOWN_HERE = b"=", b"*"
"""What stands in a mark before the number of a place, and of one where rich output belongs."""


PROTOCOL_VERSION = 4
"""Peers compare it in their first message and refuse each other, naming both numbers."""

CHUNK_BYTES = 1 << 20
"""Payloads that cross hosts travel in pieces of this size on the bulk lane."""

Target: TypeAlias = tuple[Piece, ...]


def target_has(target: Target, rank: int) -> bool:
    """Whether base rank ``rank`` is a member of ``target``; O(axes)."""
    return any(part.has(rank) for part in target)


class SegmentRef(NamedTuple):
    """Where a payload lies in shared memory: a memfd of a living process on this host."""

    pid: int
    fd: int
    segment: int
    """Never reused by its owner."""
    size_bytes: int
    spans: tuple[tuple[int, int], ...]
    """(offset, length) of each buffer, in order."""


class AtPrompt(NamedTuple):
    """A rank waits for a line at its prompt ``number``; without a place it has gone on, and waits at none."""

    number: int
    """Counts the prompts of the process."""
    place: str
    """``cell 7, line 5``"""
    why: str
    """For a post-mortem: the exception. Else empty."""
    prompt: str
    """``(Pdb) ``, or what else pdb asks with."""
    text: str
    """What pdb has written since the prompt before."""


class _Message(msgspec.Struct, array_like=True, frozen=True, gc=False, tag_field="t"):
    pass


# ---- both directions of the controller's links -----------------------------------------------------------------


class Heartbeat(_Message, frozen=True, tag="hb"):
    """Once a second on the urgent lane, so that each side knows the other lives."""


class Bulk(_Message, frozen=True, tag="bulk"):
    """A piece of a payload that crosses hosts; the message that names ``payload`` waits until it is whole."""

    payload: int
    size_bytes: int
    offset: int
    last: bool


class SegmentFree(_Message, frozen=True, tag="free"):
    """Nobody on the sender's side still looks at the segment ``segment`` of process ``pid``."""

    pid: int
    segment: int


class StoreRequest(_Message, frozen=True, tag="store"):
    """A rank asks the store of its mesh, which the agent of host 0 keeps; the controller passes it on there."""

    mesh: int
    rank: int
    request: int
    op: StoreOp


class AbortGroups(_Message, frozen=True, tag="abort"):
    """End every wait of process groups of up to ``epoch``, and refuse their later operations, until they are formed
    under a higher one. Ranks raise `meshbook.errors.GroupAborted` with ``reason``."""

    mesh: int
    target: Target
    epoch: int
    reason: str
    groups: tuple[str, ...] = ()
    """Only these; all where there are none."""


class StoreAnswer(_Message, frozen=True, tag="stored"):
    """What the store answers, on its way back to the agent of that rank."""

    mesh: int
    rank: int
    request: int
    result: StoreResult


# ---- controller to host agent ----------------------------------------------------------------------------------


class Welcome(_Message, frozen=True, tag="welcome"):
    """Answer to `Hello`; ``shares_memory`` says that the controller runs on the same host."""

    version: int
    shares_memory: bool
    machine: str
    """As in `Hello`. On the same one the agent watches the controller's process."""
    pid: int
    started: int


class Refused(_Message, frozen=True, tag="refused"):
    reason: str


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


class Spawn(_Message, frozen=True, tag="spawn"):
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
    """Where on the machine workers run, by local rank (`meshbook.system.binding`)."""


class Origin(NamedTuple):
    """A worker that has made a call. Its agent says so, not the worker itself."""

    mesh: int
    rank: int
    """As it was then."""
    pid: int


class Call(_Message, frozen=True, tag="call"):
    """Run ``endpoint`` once on every member of ``target``; arguments are the payload."""

    id: int
    mesh: int
    endpoint: str
    target: Target
    output: int = 0
    """What the call prints belongs to this output id; 0: to nobody in particular."""
    segment: SegmentRef | None = None
    """Large buffers of the payload, in shared memory of this host."""
    bulk: tuple[int, tuple[tuple[int, int], ...]] | None = None
    """(payload, spans) of large buffers that arrive as `Bulk`."""
    inline: bytes = b""
    """The pickle head, where it is small: one frame costs half as much as two."""
    label: str = ""
    """What a person calls it, for the next controller."""
    mailbox: int = 0
    """0: an endpoint of the process, on its main thread. Else an actor or a port there, which waits for nobody."""
    reply: bool = True
    """Whether the sender expects answers. Calls to the main thread are always answered."""
    no_prompt: str = ""
    """Why a breakpoint in it cannot open a prompt; empty: it can."""
    origin: Origin | None = None
    """Who made it, where that is not the controller. Ids are each origin's own."""
    chain: tuple[int, ...] = ()
    """Names, oldest first, of the calls between actors that have led to this one, its own last."""
    generation: int = -1
    """Which numbers of ranks the target is meant in (`meshbook.shape.generations`); -1: those of the moment."""
    shortcut: int = 0
    """A call of the controller to ranks that have no other to answer, so that it may come past the agent, and by the
    agent as well (`meshbook.wire.shortcuts`). The numbers of such calls go up; others have 0."""


class AskRank(_Message, frozen=True, tag="rank?"):
    """What the control thread of a rank is asked, which answers also while the rank is busy.

    endpoint: one of `meshbook.worker.endpoints.QUERIES`.
    """

    endpoint: str
    args: bytes = b"\x90"
    """A list in msgpack: plain data, since no pickle is loaded on a control thread."""


class ProcessState(NamedTuple):
    """Of a rank's process. state: as in /proc/<pid>/stat (proc(5)): ``R``, ``S``, ``D``, ``T``, ``t``.

    ``R`` also where another thread than the main one runs, or waits for a processor.
    """

    state: str
    ran_s: float
    """Processor time of all its threads so far."""


class AskProcesses(_Message, frozen=True, tag="ps?"):
    """The `ProcessState` of each rank; known also when no thread of a rank can answer."""

    in_order: bool = False
    """Answered among the replies, behind those of ranks that had sent theirs when their states were read."""


class AskStacks(_Message, frozen=True, tag="stacks?"):
    """The stacks of workers, read from outside within ``wait_s``, as `RankDump`.

    native: with the frames of native code, which halts the processes for a moment and needs py-spy.
    """

    native: bool
    wait_s: float


class ReadLogs(_Message, frozen=True, tag="logs?"):
    """The last ``lines`` lines of each log, as text."""

    lines: int
    containing: str = ""
    """Only lines with this text."""


FROM_THE_END = -1
"""An offset: where a log ends when it is read."""


class ReadOn(_Message, frozen=True, tag="readon?"):
    """What ranks wrote to their logs beyond (rank, offset in bytes), as `LogPiece`; nothing of logs without news."""

    offsets: tuple[tuple[int, int], ...]
    lines: int
    """Of a log that is read `FROM_THE_END`, so many lines before its end too."""
    limit_bytes: int
    """The most of one log; where more was written the newest is sent."""


class Retire(_Message, frozen=True, tag="retire?"):
    """End some workers, idle ones by themselves, busy ones by force after ``grace_s``; answered when they are gone.

    From now on nothing reaches them, and their ranks may be given to others. So it travels among the calls.
    """

    ranks: tuple[int, ...]
    """As messages call them."""
    grace_s: float


AskAgent: TypeAlias = AskProcesses | AskStacks | ReadLogs | ReadOn | Retire


class Query(_Message, frozen=True, tag="query"):
    """A question to the ranks of ``target``, or to their agents, on the urgent lane. `Replies` answer with plain data.

    A rank answers for itself, an agent in one message for all ranks that it has something to say of.
    """

    id: int
    mesh: int
    target: Target
    asked: AskRank | AskAgent


class Cancel(_Message, frozen=True, tag="cancel"):
    """Drop call ``call`` where it has not started; raise KeyboardInterrupt in it where it runs.

    insist: continue stopped processes, and raise again for a while where it was caught.
    """

    mesh: int
    call: int
    target: Target
    insist: bool = False
    origin: Origin | None = None


class DropClient(_Message, frozen=True, tag="dropclient"):
    """To the host of the store: a rank on another host has ended and waits for nothing any more."""

    mesh: int
    rank: int


class DropKeys(_Message, frozen=True, tag="dropkeys"):
    """To the host of the store: delete the keys under ``prefix``; ranks that wait for one of them get an error."""

    mesh: int
    prefix: str


class StoreLost(_Message, frozen=True, tag="storelost"):
    """To the other hosts: the host of the store is lost; who waits for an answer gets an error."""

    mesh: int
    reason: str


class StopMesh(_Message, frozen=True, tag="stop"):
    mesh: int
    grace_s: float


class Renumber(_Message, frozen=True, tag="renumber"):
    """From now on the workers here have these ranks, in a mesh of other axes; all of them are named.

    With the ranks and the arrangement that they have it says that the first host is another one: calls go on.
    """

    mesh: int
    seats: tuple[Seat, ...]
    arrangement: Arrangement
    moves: tuple[tuple[int, ...], ...] = ()
    """How ranks got other numbers, this time too (`meshbook.shape.generations`)."""


class Moved(_Message, frozen=True, tag="moved"):
    """How the ranks of a mesh got other numbers, for hosts and workers that may have references to them."""

    mesh: int
    moves: tuple[tuple[int, ...], ...]


class AskAgain(_Message, frozen=True, tag="askagain"):
    """To hosts that do not keep the store: a new controller passes questions on from now on, so ask what is open."""

    mesh: int


class Meeting(NamedTuple):
    """How one agent calls another."""

    endpoint: str
    epoch: int
    """Of their links; 0: they know each other already."""
    problem: str = ""
    """Why it cannot."""


class Peer(NamedTuple):
    """Another host, for the agent of one whose workers call it."""

    host: str
    name: str
    key: str
    """CURVE, public."""
    target: Target
    """The ranks that live there."""
    meeting: Meeting
    pid: int = 0
    """Of its agent, where that is on the same machine as the one that is told."""


class OpenPeerPort(_Message, frozen=True, tag="openpeer"):
    """Let the agent of ``host``, with this key, in at a port for other agents. Answered by `PeerAddress`."""

    host: str
    key: str
    epoch: int
    ip: str
    """Where to listen, for an agent that has not dialled in over TCP."""


class Peers(_Message, frozen=True, tag="peers"):
    """Where the ranks of ``mesh`` live that are not on this host; without any: it knows no such mesh."""

    mesh: int
    peers: tuple[Peer, ...]


class PeerLost(_Message, frozen=True, tag="peerlost"):
    """A host is lost: answer for its ranks, and let it in no more."""

    host: str
    reason: str


class Leave(_Message, frozen=True, tag="leave"):
    """The controller goes, the meshes stay: wait so long for the next one. After everything else that it sends."""

    lease_s: float


class Goodbye(_Message, frozen=True, tag="bye"):
    """End: stop every worker, then exit."""


# ---- host agent to controller ----------------------------------------------------------------------------------


class Hello(_Message, frozen=True, tag="hello"):
    version: int
    host_id: str
    name: str
    machine: str
    """Boot id and pid namespace: equal where shared memory can be shared."""
    pid: int
    cuda_devices: int
    cores: int
    python: str = ""
    """As in ``3.11``: bytecode, in which the code of cells travels, differs between these."""


class Unread(_Message, frozen=True, tag="unread"):
    """The host could not read a message of the controller's, or not act on it: nothing has come of that."""

    kind: str
    """The tag of the message, as far as that could be read."""
    id: int
    """Of the call, the question or the request for workers; else 0."""
    reason: str


class AskPeers(_Message, frozen=True, tag="peers?"):
    """A worker here calls ``mesh``, which is not, or not all, on this host. Answered by `Peers`, now and whenever ranks
    have moved."""

    mesh: int
    known: tuple[str, ...]
    """Hosts to which there is a connection already."""
    broken: tuple[str, ...] = ()
    """Hosts to which there was one."""


class PeerAddress(_Message, frozen=True, tag="peerport"):
    """``host`` can dial in here, or why it cannot."""

    host: str
    endpoint: str
    problem: str = ""


class WorkerStarted(NamedTuple):
    rank: int
    pid: int
    device: str
    log_path: str


class MeshReady(_Message, frozen=True, tag="ready"):
    """Every worker of one `Spawn` has answered; ``rank`` is what messages call it."""

    mesh: int
    workers: tuple[WorkerStarted, ...]
    request: int = 0


class SpawnFailed(_Message, frozen=True, tag="nospawn"):
    mesh: int
    reason: str
    wanted_devices: int = -1
    found_devices: int = -1
    """For too few devices: how many were wanted, and how many there are."""
    request: int = 0


class WorkerExited(_Message, frozen=True, tag="exited"):
    """A worker ended without being told to. Its pid tells it from others that had or will have its rank."""

    mesh: int
    rank: int
    pid: int
    cause: str
    log_tail: str
    request: int = 0
    alone: bool = False
    """It was killed, and no other of the mesh on this host is ending: nobody need wait for more deaths like it."""


class MeshStopped(_Message, frozen=True, tag="stopped"):
    """The mesh has no process left on this host."""

    mesh: int


class RankReply(NamedTuple):
    """One rank's answer inside `Replies`; its frames follow those of the ranks before it."""

    rank: int
    status: int
    frames: int
    duration_s: float
    segment: SegmentRef | None
    bulk: tuple[int, tuple[tuple[int, int], ...]] | None = None
    inline: bytes = b""
    waited_s: float = 0.0
    groups: bytes = b""
    """Both as in `Reply`."""


INLINE_MAX_BYTES = 1 << 14
"""Pickle heads up to this size travel inside their header."""

OK, RAISED, INTERRUPTED, DROPPED, GONE, LOST = range(6)
"""Status of a reply: a value, an exception, stopped by `Cancel` while running, dropped by it before, a value that was
not kept while there was no controller (``inline`` says why), a rank that has ended (``inline`` is its `DeathCause`;
workers are told so, the controller knows)."""


class DeathCause(NamedTuple):
    """Why a rank does not answer."""

    host: str
    cause: str
    log_tail: str
    alone: bool = False
    """As in `WorkerExited`."""


class Replies(_Message, frozen=True, tag="replies"):
    """Answers to one call from ranks of one host, combined. Failures are never held back."""

    id: int
    replies: tuple[RankReply, ...]
    origin: Origin | None = None


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


class Hosted(_Message, frozen=True, tag="hosted"):
    """To a new controller, after `Hello` and before all that the former one has not acknowledged."""

    meshes: tuple[HostedState, ...]


OWN_RANK = -1
"""In what a worker tells of its output: its agent fills in the rank, and the mesh."""


class StreamText(_Message, frozen=True, tag="text"):
    """Text of stdout or stderr; may end in the middle of a line.

    From a worker: of an output that is not the running one, which cannot go through the pipes.
    """

    rank: int
    stream: str
    text: str
    output: int
    place: int = 0
    """Text of stdout and of stderr with one number was written in an order that nobody knows."""


class SharedText(_Message, frozen=True):
    """A text as in `StreamText` that each of these ranks has printed: it travels once."""

    ranks: tuple[int, ...]
    stream: str
    text: str
    output: int
    place: int


class StreamTexts(_Message, frozen=True, tag="texts"):
    """What ranks of one host have printed since the message before, in the order of each rank."""

    texts: tuple[SharedText, ...]


class OutputDropped(_Message, frozen=True, tag="cut"):
    """So many characters of the rank's output, up to now, are in its log only: it wrote faster than can be shown."""

    rank: int
    size_bytes: int
    log_path: str
    output: int


class Bundle(msgspec.Struct):
    """What is shown, by kinds of content; a frame of its own, made by a rank."""

    data: dict[str, object]
    metadata: dict[str, object]
    transient: dict[str, object]


class DisplayData(_Message, frozen=True, tag="display"):
    """Rich output; ``is_result`` for the value of a cell's last expression."""

    rank: int
    output: int
    update: bool
    is_result: bool
    place: int = 0
    """Of the mark that the worker writes into its pipes behind this; 0 for none, where its text is late."""
    data: dict[str, object] = {}
    """This and what follows travels as a `Bundle`, which agents do not read."""
    metadata: dict[str, object] = {}
    transient: dict[str, object] = {}


class Prompted(_Message, frozen=True, tag="prompted"):
    """A rank has stopped at a prompt of pdb, or gone on from one; in the order of what it prints."""

    mesh: int
    rank: int
    output: int
    at: AtPrompt


class RankDump(NamedTuple):
    """One rank's stacks, read by its agent."""

    rank: int
    threads: tuple[ThreadStack, ...]
    read_by: str
    """``signal``, ``py-spy``; empty where they could not be read."""
    problem: str = ""
    """Why not, and what helps."""


class LogPiece(NamedTuple):
    """What one rank's log has beyond an offset."""

    rank: int
    data: bytes
    end: int
    """The offset to read on from."""
    skipped_bytes: int
    """What lies between the offset that was asked for and ``data``."""


# ---- host agent to worker and back -----------------------------------------------------------------------------


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


class Begin(_Message, frozen=True, tag="begin"):
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


class Renumbered(_Message, frozen=True, tag="renumbered"):
    """Who the worker is from now on; travels among the calls, in their order."""

    identity: Identity


class Begun(_Message, frozen=True, tag="begun"):
    pid: int
    control_thread: int = 0
    """The kernel's number of the thread that takes the signal for a dump (`meshbook.stacks.dump`)."""
    dump_fd: int = -1
    """Where the dump goes, a descriptor of the worker's; -1 where it makes none."""


class OpenMail(_Message, frozen=True, tag="mail"):
    """The first message on the mail lane follows: somebody must read there from now on."""


class MailHold(_Message, frozen=True, tag="hold"):
    """Too much waits for these ranks: send them no calls until they are named again with ``held`` false."""

    mesh: int
    ranks: tuple[int, ...]
    held: bool


class AskLane(_Message, frozen=True, tag="lane?"):
    """A worker often calls this rank: a socket between the two would help. Answered by `LaneOffer`, or not at all."""

    mesh: int
    rank: int
    generation: int


class LaneOffer(_Message, frozen=True, tag="laneoffer"):
    """A socket to that rank, whose descriptor comes with this."""

    number: int
    mesh: int
    rank: int
    generation: int


class TakeLane(_Message, frozen=True, tag="lane!"):
    """The worker uses that socket from now on, behind what it has sent to its agent before."""

    number: int


class LaneOpened(_Message, frozen=True, tag="laneopen"):
    """Another worker's `Call` and `Cancel` come by the socket whose descriptor comes with this."""


class CutLane(_Message, frozen=True, tag="lanecut"):
    """The socket was closed, at either end."""

    number: int


class LaneLost(_Message, frozen=True, tag="lanelost"):
    """Nothing that was sent over that socket will be answered any more."""

    number: int
    death: DeathCause


class ShortcutOpened(_Message, frozen=True, tag="shortcut"):
    """A rank tells the controller where calls to its main thread, or to its mailboxes, may come past the agent."""

    mesh: int
    rank: int
    is_mail: bool


class Heard(_Message, frozen=True, tag="heard"):
    """The controller has the answer to this call, which came past the agent."""

    call: int


class CameEarly(_Message, frozen=True, tag="early"):
    """A call has come past the agent, which is to know it, and passes it on to its other ranks; our answer follows."""

    call: Call


class ControllerGone(_Message, frozen=True, tag="gone"):
    """The controller has ended, or has left: what came past the agent and was not answered or heard is the agent's."""


class ToldAll(_Message, frozen=True, tag="told"):
    """The answer to `ControllerGone`, on both lanes for calls: all that came past the agent was told before."""


class Reply(_Message, frozen=True, tag="reply"):
    """A value (pickle head, then in-band buffers) or a failure (msgpack fields, then the pickled exception)."""

    id: int
    status: int
    duration_s: float
    segment: SegmentRef | None = None
    inline: bytes = b""
    waited_s: float = 0.0
    """What of ``duration_s`` the main thread spent waiting in collectives, as far as the process sees it."""
    origin: Origin | None = None
    groups: bytes = b""
    """What is news of the rank's process groups (`meshbook.groups.agreements.Told`), for the controller."""
    freed: tuple[tuple[int, int], ...] = ()
    """Payloads that it has let go of before, as in `SegmentFree`."""
    is_direct: bool = False
    """The call has not come by the agent, but over a socket between the two workers."""


class RankStore(_Message, frozen=True, tag="rstore"):
    request: int
    op: StoreOp


class RankStored(_Message, frozen=True, tag="rstored"):
    request: int
    result: StoreResult


ToHost: TypeAlias = (
    Replies | Heartbeat | Bulk | SegmentFree | Welcome | Refused | Spawn | Call | Query | Cancel | AbortGroups
    | StoreRequest | StoreAnswer | DropClient | DropKeys | StoreLost | AskAgain | Renumber | StopMesh
    | Leave | Goodbye
    | OpenPeerPort | Peers | PeerLost | Moved
)  # fmt: skip
FromHost: TypeAlias = (
    Call | Cancel | Heartbeat | Bulk | SegmentFree | Hello | Hosted | MeshReady | SpawnFailed | WorkerExited
    | MeshStopped | Replies | StreamTexts | OutputDropped | DisplayData | Prompted | StoreRequest | StoreAnswer
    | AskPeers | PeerAddress | Unread
)  # fmt: skip
ToWorker: TypeAlias = (
    Begin
    | Renumbered
    | Call
    | Query
    | Cancel
    | AbortGroups
    | SegmentFree
    | RankStored
    | OpenMail
    | Replies
    | MailHold
    | Moved
    | LaneOffer
    | LaneOpened
    | LaneLost
    | ControllerGone
)
FromWorker: TypeAlias = (
    Begun
    | Reply
    | DisplayData
    | StreamText
    | Prompted
    | RankStore
    | SegmentFree
    | Call
    | Cancel
    | AskLane
    | TakeLane
    | CutLane
    | CameEarly
    | ToldAll
)
BetweenWorkers: TypeAlias = Call | Cancel | Reply
PastAgent: TypeAlias = Call | Heard | Replies | ShortcutOpened

MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What the decoders raise for bytes that no peer of ours sends."""


def _plain(value: object) -> object:
    """For the encoder: a subclass of str, as `str` of a user's exception may be, as what it says."""
    if isinstance(value, str):
        return "".join(value)
    raise TypeError(f"a value of type {type(value).__name__} is no plain data: text, bytes, numbers, lists, dicts")


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


def encode(message: object) -> bytes:
    """The bytes of a message, or of other plain data. Text that is not UTF-8 arrives as `utf8_text` makes it."""
    try:
        return _encode(message)
    except UnicodeEncodeError:
        return _encode(utf8_data(message))


def utf8_data(value: object) -> Any:
    """Structs and plain data as plain data, all text of which is UTF-8."""
    return _utf8(msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=_plain))


def _utf8(value: Any) -> Any:
    match value:
        case str():
            return utf8_text(value)
        case dict():
            return {_utf8(key): _utf8(item) for key, item in value.items()}
        case list() | tuple():
            return [_utf8(item) for item in value]
    return value


def name_of(header: bytes) -> tuple[str, int]:
    """The tag and the first number of a message that does not decode; ``""`` and 0 where it has none."""
    try:
        tag, first, *_ = msgspec.msgpack.decode(header, type=list)
    except (*MALFORMED, ValueError):
        return "", 0
    return (tag if isinstance(tag, str) else ""), (first if isinstance(first, int) else 0)


decode_bundle = msgspec.msgpack.Decoder(Bundle).decode
decode_death = msgspec.msgpack.Decoder(DeathCause).decode
decode_to_host = msgspec.msgpack.Decoder(ToHost).decode
decode_from_host = msgspec.msgpack.Decoder(FromHost).decode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
decode_between_workers = msgspec.msgpack.Decoder(BetweenWorkers).decode
decode_past_agent = msgspec.msgpack.Decoder(PastAgent).decode
