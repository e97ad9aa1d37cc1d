"""Every message between controller, host agents and workers, its direction, and its codec.

    controller  --ToHost-->    host agent  --ToWorker-->    worker
    controller  <--FromHost--  host agent  <--FromWorker--  worker

A message is one header (a msgspec struct, msgpack, array-like) and any number of opaque payload frames. Agents decode
headers and pass payloads on; only the user's thread of the receiving process unpickles them. Between hosts and the
controller `meshbook.wire.connection` numbers each message; on socketpairs `meshbook.wire.frames` frames it.

Ranks are always base ranks of their mesh. A target is a tuple of affine slices over them: O(axes) bytes for any size.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from meshbook.formatting import utf8_text
from meshbook.wire.messages.calls import *
from meshbook.wire.messages.hosts import *
from meshbook.wire.messages.meshes import *
from meshbook.wire.messages.ranks import *

ToHost: TypeAlias = (
    Replies | SegmentFree | Welcome | Refused | Spawn | Call | Query | Cancel | AbortGroups
    | StoreRequest | StoreAnswer | DropClient | DropKeys | StoreLost | AskAgain | Renumber | StopMesh
    | ExpectTorch | Leave | Goodbye
    | OpenPeerPort | Peers | PeerLost | Moved | MeshUp
)  # fmt: skip
FromHost: TypeAlias = (
    Call | Cancel | SegmentFree | Hello | Hosted | MeshReady | SpawnProgress | SpawnFailed
    | WorkerExited | MeshStopped | Replies | StreamTexts | OutputDropped | DisplayData | Prompted | Logged
    | StoreRequest | StoreAnswer | AskPeers | PeerAddress | Unread
)  # fmt: skip
ToWorker: TypeAlias = (
    Begin | Renumbered | Call | Query | Cancel | AbortGroups | SegmentFree | StoreAnswer | OpenMail | Replies | MailHold
    | Moved | ControllerGone
)  # fmt: skip
FromWorker: TypeAlias = (
    Begun | Reply | DisplayData | StreamText | Prompted | Logged | StoreRequest | SegmentFree | Call | Cancel
    | CameEarly | ToldAll
)  # fmt: skip
PastAgent: TypeAlias = Call | Cancel | Replies | DirectHello

# errors of the decoders for bytes that no peer of ours sends
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def _plain(value: object) -> object:
    """Encode a subclass of str, as `str` of a user's exception may be, as its text."""
    if isinstance(value, str):
        return "".join(value)
    raise TypeError(f"a value of type {type(value).__name__} is no plain data: text, bytes, numbers, lists, dicts")


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


def encode(message: object) -> bytes:
    """Return the bytes of a message, or of other plain data. Text that is not UTF-8 arrives as `utf8_text` makes it."""
    try:
        return _encode(message)
    except UnicodeEncodeError:
        return _encode(utf8_data(message))


def utf8_data(value: object) -> Any:
    """Return structs and plain data as plain data, all text of which is UTF-8."""
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
    """Return the tag and the first number of a message that does not decode; ``""`` and 0 where it has none."""
    try:
        tag, first, *_ = msgspec.msgpack.decode(header, type=list)
    except (*MALFORMED, ValueError):
        return "", 0
    return (tag if isinstance(tag, str) else ""), (first if isinstance(first, int) else 0)


decode_bundle = msgspec.msgpack.Decoder(Bundle).decode
decode_scalars = msgspec.msgpack.Decoder(list[Scalars]).decode
decode_death = msgspec.msgpack.Decoder(DeathCause).decode
decode_to_host = msgspec.msgpack.Decoder(ToHost).decode
decode_from_host = msgspec.msgpack.Decoder(FromHost).decode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
decode_past_agent = msgspec.msgpack.Decoder(PastAgent).decode
