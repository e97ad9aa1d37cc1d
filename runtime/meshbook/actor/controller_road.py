"""The road of the process that drives meshes."""

from __future__ import annotations

from typing import Any

from meshbook.actor.roads import OnReply, Place
from meshbook.calls import CallFuture
from meshbook.controller import Controller
from meshbook.errors import MeshStoppedError
from meshbook.known_mesh import KnownMesh
from meshbook.mailboxes import Mailboxes
from meshbook.pickling import Pickled
from meshbook.proc_mesh import ProcMesh
from meshbook.shape import Members, Region


class ControllerRoad:
    """One per session that this process drives."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.mailboxes = Mailboxes()

    @property
    def session(self) -> str:
        return self._controller.folder.id

    @property
    def place(self) -> Place:
        return Place(0, 0)

    def new_mailbox(self) -> int:
        return self._controller.next_id()

    def call(
        self,
        mesh: int,
        members: Members,
        mailbox: int,
        endpoint: str,
        pickled: Pickled,
        *,
        what: str,
        on_reply: OnReply | None = None,
        fail_fast: bool = True,
    ) -> CallFuture[Any]:
        known = self._find(mesh)
        source = self._controller.output_source
        return self._controller.call(
            known,
            endpoint,
            members,
            pickled,
            what=what,
            output=source(ProcMesh(self._controller, known, Region.of(known.extent.sizes))) if source else None,
            on_reply=on_reply,
            fail_fast=fail_fast,
            mailbox=mailbox,
        )

    def post(self, mesh: int, members: Members, mailbox: int, endpoint: str, pickled: Pickled) -> None:
        self._controller.post(self._find(mesh), endpoint, members, pickled, mailbox)

    def procs(self, session: str, mesh: int, name: str, members: Members) -> ProcMesh:
        return ProcMesh(self._controller, self._find(mesh), members)

    def _find(self, mesh: int) -> KnownMesh:
        if (known := self._controller.find_mesh(mesh)) is None:
            raise MeshStoppedError(f"number {mesh}")
        return known
