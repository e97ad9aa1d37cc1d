"""The road of a worker: its mail lane."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

from meshbook.actor.context import context
from meshbook.actor.ports import Port
from meshbook.actor.proc_ref import ProcRef
from meshbook.actor.roads import OnReply, Place
from meshbook.calls import CallFuture
from meshbook.mailboxes import Mailboxes
from meshbook.pickling import Pickled
from meshbook.shape import Members

if TYPE_CHECKING:
    from meshbook.worker import Worker

FIRST_OWN_MAILBOX = 1 << 62
"""Mailboxes from here on were numbered by a worker, for itself."""


class WorkerRoad:
    """One per worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._ids = itertools.count(FIRST_OWN_MAILBOX + (os.getpid() << 32))  # never those of a process before us

    @property
    def mailboxes(self) -> Mailboxes:
        return self._worker.mail.boxes

    @property
    def session(self) -> str:
        return self._worker.desk.session

    @property
    def place(self) -> Place:
        identity = self._worker.identity
        return Place(identity.mesh, identity.rank)

    def new_mailbox(self) -> int:
        return next(self._ids)

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
        return self._worker.mail.call(
            mesh,
            members,
            mailbox,
            endpoint,
            pickled,
            what=what,
            output=self._worker.shell.output_here,
            on_reply=on_reply,
            fail_fast=fail_fast,
        )

    def post(self, mesh: int, members: Members, mailbox: int, endpoint: str, pickled: Pickled) -> None:
        self._worker.mail.post(mesh, members, mailbox, endpoint, pickled, output=self._worker.shell.output_here)

    @property
    def supervisor(self) -> Port[Any] | None:
        return context().supervisor

    def procs(self, session: str, mesh: int, name: str, members: Members) -> ProcRef:
        return ProcRef(session, mesh, name, members)
