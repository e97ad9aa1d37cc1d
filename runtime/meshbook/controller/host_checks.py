"""What a host may say: checked before it is acted upon, so that a host that lies costs itself and nobody else.

A host has proved who it is, and it runs the user's code; it must still not speak for ranks of other hosts, break our
bookkeeping, or make us map memory that it does not share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshbook.controller.host_state import HostState
from meshbook.controller.mesh_state import MeshState
from meshbook.errors import PeerProtocolError
from meshbook.wire import messages as wire


def check_ranks(host: HostState, mesh: MeshState, ranks: Sequence[int]) -> None:
    """Raises: PeerProtocolError unless all ``ranks`` of ``mesh`` live on ``host``."""
    for rank in ranks:
        if not mesh.ever_gave(host, rank):
            raise PeerProtocolError(f'it spoke for rank {rank} of mesh "{mesh.name}", which is not its own')


def check_replies(host: HostState, message: wire.Replies, frames: Sequence[bytes]) -> None:
    """Raises: PeerProtocolError unless the replies share out ``frames``, in a way that the host can send."""
    total = 0
    for reply in message.replies:
        if reply.frames < 0 or (reply.segment is not None and not host.shares_memory):
            raise PeerProtocolError("a reply whose payload cannot be")
        total += reply.frames
    if total != len(frames):
        raise PeerProtocolError(f"replies with {total} payload frames came with {len(frames)}")


def check(host: HostState, message: wire.FromHost, meshes: Mapping[int, MeshState]) -> None:
    """Raises: PeerProtocolError if ``host`` speaks for ranks that are not its own."""
    match message:
        case wire.MeshReady(mesh_id, workers):
            if (mesh := meshes.get(mesh_id)) is not None:
                check_ranks(host, mesh, [worker.rank for worker in workers])
        case wire.WorkerExited(mesh_id, rank) | wire.StoreRequest(mesh_id, rank) | wire.Prompted(mesh_id, rank):
            if (mesh := meshes.get(mesh_id)) is not None:
                check_ranks(host, mesh, [rank])
        case wire.StoreAnswer(mesh_id, rank):
            if (mesh := meshes.get(mesh_id)) is not None and host not in mesh.store_hosts:
                raise PeerProtocolError(f'it answered for the store of mesh "{mesh.name}", which it does not keep')
        case wire.Call(origin=origin, mesh=to) | wire.Cancel(origin=origin, mesh=to):
            if origin is None or to != 0:
                raise PeerProtocolError("it sent a call that is not for this process, or nobody's")
            if (mesh := meshes.get(origin.mesh)) is not None:
                check_ranks(host, mesh, [origin.rank])
        case _:
            pass
