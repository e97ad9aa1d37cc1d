"""The router of a worker: its mail lane."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshbook.actor.context import context
from meshbook.actor.errors import CallsTooDeepError
from meshbook.actor.futures import ActorFuture, only_value
from meshbook.actor.ports import Port, one_member
from meshbook.actor.proc_ref import ProcRef
from meshbook.actor.router import FIRST_OF_RANKS, ROOT, Address, Place, find_now
from meshbook.calls.call import RequestFuture
from meshbook.calls.mailboxes import Mailboxes
from meshbook.calls.request import CallRequest
from meshbook.concurrency.future import Future
from meshbook.shape.members import Members
from meshbook.values.pickling import dumps

if TYPE_CHECKING:
    from meshbook.worker.worker import Worker


MAX_CHAIN = 100
"""Calls of actors within calls of actors: more of them are taken for an endless recursion."""


class WorkerRouter:
    """The router of one worker: its actors speak through it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._ids = itertools.count(FIRST_OF_RANKS + (os.getpid() << 32))  # never those of a process before us

    @property
    def mailboxes(self) -> Mailboxes:
        return self._worker.mail.boxes

    @property
    def session(self) -> str:
        return self._worker.registry.session

    @property
    def place(self) -> Place:
        identity = self._worker.identity
        return Place(identity.mesh, identity.rank, identity.generation)

    def find(self, mesh: int, members: Members, generation: int, *, partly: bool = False) -> Address:
        return find_now(self._worker.moves.get(mesh, ()), members, generation, partly=partly)

    def new_mailbox(self) -> int:
        return next(self._ids)

    def call(self, request: CallRequest) -> RequestFuture[Any]:
        mail, output = self._worker.mail, self._worker.shell.output_here
        if not request.reply:
            return mail.call(request, output=output)
        name, chain = random.getrandbits(62), context().chain
        if len(chain) >= MAX_CHAIN:
            raise CallsTooDeepError(request.what, len(chain))
        future = mail.call(request, output=output, chain=(*chain, name))
        future.name_in_chain = name
        return future

    @property
    def supervisor(self) -> Port[Any] | None:
        return context().supervisor

    def get_or_spawn(self, name: str, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        return self._ask("get_or_spawn", (name, cls, args, kwargs), {}, name)

    def spawn_procs(self, per_host: Mapping[str, int], options: Mapping[str, Any]) -> Future[Any]:
        owned = context().belongings is not None
        return self._ask("spawn_procs", (per_host, owned), options, "this_host")

    def stop_procs(self, procs: Any) -> Future[None]:
        return self._ask("stop_procs", (procs,), {}, "procs")

    def _ask(self, endpoint: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Future[Any]:
        """Ask the process that drives the meshes."""
        what = f"{name}.{endpoint}"
        pickled = dumps((args, dict(kwargs)), what=what)
        source = self.call(CallRequest(endpoint, one_member(0), pickled, what, mailbox=ROOT))
        return ActorFuture(source, only_value, name, endpoint)

    def procs(self, session: str, mesh: int, name: str, members: Members, generation: int) -> ProcRef:
        return ProcRef(session, mesh, name, members, generation)
