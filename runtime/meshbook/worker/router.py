"""The router of a worker: its mail lane."""

from __future__ import annotations

import itertools
import os
import random
from typing import TYPE_CHECKING

from meshbook.actor.context import context
from meshbook.actor.errors import CallsTooDeepError
from meshbook.actor.ports import Port
from meshbook.actor.proc_ref import ProcRef, ask_controller
from meshbook.actor.router import FIRST_OF_RANKS, Address, Answers, Place, TActor, find_now
from meshbook.actor.supervision import MeshFailure
from meshbook.calls.mailboxes import Mailboxes
from meshbook.calls.request import CallRequest
from meshbook.concurrency.future import Future
from meshbook.shape.members import Members

if TYPE_CHECKING:
    from meshbook.worker.worker import Worker


MAX_CHAIN = 100
"""Calls of actors within calls of actors: more of them are taken for an endless recursion."""


class WorkerRouter:
    """The router of one worker: its actors speak through it."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._ids = itertools.count(FIRST_OF_RANKS + (os.getpid() << 32))  # never those of a process before us

    @property
    def mailboxes(self) -> Mailboxes:
        return self.worker.mail.boxes

    @property
    def session(self) -> str:
        return self.worker.registry.session

    @property
    def place(self) -> Place:
        identity = self.worker.identity
        return Place(identity.mesh, identity.rank, identity.generation)

    @property
    def host(self) -> str:
        return self.worker.identity.host_id

    def await_procs(self, mesh: int) -> None:
        pass  # what a rank knows of is there

    def find(self, mesh: int, members: Members, generation: int, *, partly: bool = False) -> Address:
        return find_now(self.worker.moves.get(mesh, ()), members, generation, partly=partly)

    def new_mailbox(self) -> int:
        return next(self._ids)

    def call(self, request: CallRequest) -> Answers:
        mail, output = self.worker.mail, self.worker.shell.output_here
        if not request.reply:
            return mail.call(request, output=output)
        name, chain = random.getrandbits(62), context().chain
        if len(chain) >= MAX_CHAIN:
            raise CallsTooDeepError(request.what, len(chain))
        future = mail.call(request, output=output, chain=(*chain, name))
        future.name_in_chain = name
        return future

    @property
    def supervisor(self) -> Port[MeshFailure] | None:
        return context().supervisor

    def get_or_spawn(
        self, name: str, cls: type[TActor], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Future[TActor]:
        return ask_controller("get_or_spawn", (name, cls, args, kwargs), {}, name)

    def procs(self, session: str, mesh: int, name: str, members: Members, generation: int) -> ProcRef:
        return ProcRef(session, mesh, name, members, generation)
