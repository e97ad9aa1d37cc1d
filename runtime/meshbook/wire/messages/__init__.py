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

from meshbook.wire.messages.base import (
    PROTOCOL_VERSION,
    Header,
    Target,
    target_has,
)
from meshbook.wire.messages.calls import (
    DROPPED,
    GONE,
    INTERRUPTED,
    LOST,
    OK,
    RAISED,
    Call,
    Cancel,
    DeathCause,
    MailHold,
    Origin,
    RankReply,
    Replies,
    Reply,
)
from meshbook.wire.messages.codec import (
    MALFORMED,
    BetweenWorkers,
    FromHost,
    FromWorker,
    PastAgent,
    ToHost,
    ToWorker,
    decode_between_workers,
    decode_bundle,
    decode_death,
    decode_from_host,
    decode_from_worker,
    decode_past_agent,
    decode_to_host,
    decode_to_worker,
    encode,
    name_of,
    utf8_data,
)
from meshbook.wire.messages.groups import (
    AbortGroups,
    AskAgain,
    DropClient,
    DropKeys,
    RankStore,
    RankStored,
    StoreAnswer,
    StoreLost,
    StoreRequest,
)
from meshbook.wire.messages.hosts import (
    AskPeers,
    ExpectTorch,
    Goodbye,
    Heartbeat,
    Hello,
    Leave,
    Meeting,
    OpenPeerPort,
    Peer,
    PeerAddress,
    PeerLost,
    Peers,
    Refused,
    Unread,
    Welcome,
)
from meshbook.wire.messages.meshes import (
    Arrangement,
    CallState,
    Hosted,
    HostedState,
    LostRank,
    MeshReady,
    MeshStopped,
    MeshUp,
    Moved,
    Renumber,
    Seat,
    Spawn,
    SpawnFailed,
    SpawnProgress,
    StartCommand,
    StopMesh,
    WorkerExited,
    WorkerStarted,
)
from meshbook.wire.messages.output import (
    OWN_RANK,
    PLACE,
    SHOWN_HERE,
    AtPrompt,
    Bundle,
    DisplayData,
    OutputDropped,
    Prompted,
    SharedText,
    StreamText,
    StreamTexts,
)
from meshbook.wire.messages.past_agent import (
    AskLane,
    CameEarly,
    ControllerGone,
    CutLane,
    Heard,
    LaneLost,
    LaneOffer,
    LaneOpened,
    ShortcutOpened,
    TakeLane,
    ToldAll,
)
from meshbook.wire.messages.payloads import (
    CHUNK_BYTES,
    INLINE_MAX_BYTES,
    Bulk,
    SegmentFree,
    SegmentRef,
)
from meshbook.wire.messages.queries import (
    FROM_THE_END,
    AskAgent,
    AskPrinted,
    AskProcesses,
    AskRank,
    AskStacks,
    LogPiece,
    ProcessState,
    Query,
    RankDump,
    ReadLogs,
    ReadOn,
    Retire,
)
from meshbook.wire.messages.workers import (
    Begin,
    Begun,
    Identity,
    OpenMail,
    Renumbered,
)
