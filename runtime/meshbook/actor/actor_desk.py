"""Where actors of a worker are spawned and looked up: the mailbox `DESK`.

A spawn is a call to the desk whose endpoint is ``<mailbox>:<session>:<name>``, since the thread of the mail unpickles
nothing. It opens the actor's mailbox at once, so that messages which come behind it find it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

from meshbook import wire
from meshbook.actor.actor_host import ActorHost
from meshbook.actor.roads import DESK
from meshbook.endpoints import Answer
from meshbook.errors import Failure, MeshError
from meshbook.mailboxes import LoadArgs, Mailboxes, Reply

if TYPE_CHECKING:
    from meshbook.worker import Worker

STOP = "__stop__"
"""The endpoint of every actor that ends it."""


class ActorDesk:
    """The actors of a worker. What `ActorHost` needs of its process."""

    def __init__(self, worker: Worker, mailboxes: Mailboxes) -> None:
        self._worker, self._mailboxes = worker, mailboxes
        self.session = ""
        """The id of the session, once an actor was spawned."""
        self._hosts: dict[int, ActorHost] = {}
        self._stopping: dict[int, list[Reply]] = {}
        self._describing = threading.Lock()
        mailboxes.open(DESK, self._spawn, self._cancel_spawn)

    def states(self) -> list[dict[str, object]]:
        """What each actor is doing; plain data."""
        return [host.state() for host in list(self._hosts.values())]

    # ---- the thread of the mail ---------------------------------------------------------------------------------

    def _spawn(self, call: wire.Call, load_args: LoadArgs, reply: Reply) -> None:
        mailbox, self.session, name = call.endpoint.split(":", 2)
        host = ActorHost(self, int(mailbox), name)
        self._hosts[host.mailbox] = host
        self._mailboxes.open(host.mailbox, functools.partial(self._deliver, host), host.cancel)
        host.deliver(call, load_args, reply)
        host.thread.start()

    def _cancel_spawn(self, call: wire.Call, insist: bool) -> None:
        for host in list(self._hosts.values()):
            host.cancel(call, insist)

    def _deliver(self, host: ActorHost, call: wire.Call, load_args: LoadArgs, reply: Reply) -> None:
        if call.endpoint != STOP:
            host.deliver(call, load_args, reply)
            return
        self._mailboxes.close(host.mailbox, f'the actors "{host.name}" were stopped')
        self._stopping.setdefault(host.mailbox, []).append(reply)
        host.end()

    # ---- threads of actors --------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._worker.identity.rank

    @property
    def mesh_name(self) -> str:
        return self._worker.identity.name

    def describe(self, error: BaseException) -> Failure:
        with self._describing:  # IPython draws one traceback at a time
            return self._worker.shell.describe(error)

    def output_of(self, output: int) -> contextlib.AbstractContextManager[object]:
        return self._worker.shell.output_beside(output)

    def tell_owner(self, host: ActorHost, failure: Failure, endpoint: str) -> None:
        """Where the owner cannot be told, it is printed."""
        if host.owner is not None:
            with contextlib.suppress(MeshError):
                host.owner.send((host.name, endpoint, failure._replace(exception=None)))
                return
        print("".join(f"{line}\n" for line in failure.traceback), flush=True)

    def actor_ended(self, host: ActorHost) -> None:
        self._hosts.pop(host.mailbox, None)
        for reply in self._stopping.pop(host.mailbox, []):
            reply(Answer(wire.OK, None, has_value=True))


def actors(worker: Any) -> list[dict[str, object]]:
    """Query: what the actors of the process are doing."""
    desk: ActorDesk = worker.desk
    return desk.states()
