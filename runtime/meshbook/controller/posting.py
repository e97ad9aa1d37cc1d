"""Messages to mailboxes that nobody answers: sent on the road of calls, in order with them, and then forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshbook.controller.dispatcher import Dispatcher
from meshbook.controller.mesh_state import MeshState
from meshbook.errors import WorkerLost
from meshbook.lifecycle import MeshPhase
from meshbook.shape.members import Members
from meshbook.values.pickling import Pickled
from meshbook.wire import messages as wire

if TYPE_CHECKING:
    from meshbook.controller.controller import Controller


def post(controller: Controller, mesh: MeshState, members: Members, mailbox: int, endpoint: str, body: Pickled) -> None:
    """Send a message to a mailbox of ``members``; whoever ends before it has come there does not get it.

    Raises: MeshStoppedError, WorkerLost if a member is known to have ended.
    """
    mesh.check_usable()
    generation = mesh.generation
    if lost := [mesh.lost[rank] for rank in members.ranks() if rank in mesh.lost]:
        raise WorkerLost.of(lost)
    head, buffers = body
    small = len(head) <= wire.INLINE_MAX_BYTES
    inline, payload = (head, []) if small else (b"", [head])
    message = wire.Call(
        controller.next_id(), mesh.id, endpoint, members.encode(), inline=inline, mailbox=mailbox, reply=False,
        no_prompt=controller.front_end.refusal(),
    )  # fmt: skip

    def send(dispatcher: Dispatcher) -> None:
        dispatcher.mail_rescue_of(mesh).send(mailbox, members, lambda: transmit(dispatcher))

    def transmit(dispatcher: Dispatcher) -> None:
        hosts = [host for host in mesh.by_host(members.ranks()) if not host.lost]
        if mesh.generation != generation or mesh.phase in (MeshPhase.STOPPING, MeshPhase.STOPPED):
            hosts = []
        dispatcher.send_payload(hosts, message, payload, segment)

    controller.wait_for_room()
    segment = controller.write_payload(buffers)
    controller.tell_board(send)
