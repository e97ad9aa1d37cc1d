"""The process of a rank, from its fork to its end: its streams, its router, and the files that user code has left open.

Workers end by `os._exit`, since destructors of native libraries must not hold up an end; so Python closes no file, and
`write_buffers` writes the buffers of files that are still open.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import itertools
import os
import random
import stat
import sys
import weakref

from meshbook.actor.actor_mesh import ProcRef, ask_controller
from meshbook.actor.context import context
from meshbook.actor.errors import CallsTooDeepError
from meshbook.actor.ports import Port
from meshbook.actor.router import FIRST_OF_RANKS, Address, Answers, Place, TActor, find_now, routers
from meshbook.actor.supervision import MeshFailure
from meshbook.calls.call import CallRequest
from meshbook.calls.mailboxes import Mailboxes
from meshbook.concurrency.future import Future
from meshbook.shape.members import Members
from meshbook.shell.shell import RankShell
from meshbook.worker.worker import Worker


def run_worker(shell: RankShell, call_fd: int, urgent_fd: int, mail_fd: int, stdout_fd: int, stderr_fd: int) -> None:
    """Run a worker until the agent ends it; never return. Called in a fresh fork of the template."""
    code = 1
    gc.enable()
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (stdout_fd, 1), (stderr_fd, 2)):
            os.dup2(source, target)
            os.close(source)
        worker = Worker(shell, call_fd, urgent_fd, mail_fd)
        router = WorkerRouter(worker)
        routers.set_own(lambda: router, is_rank=True)
        worker.begin()
        worker.serve_calls()
        worker.mail.direct.close()
        worker.registry.end_all()
        _keep_operators()
        atexit._run_exitfuncs()
        write_buffers()
        worker.shell.flush()
        code = 0
    except BrokenPipeError:
        pass  # the agent is gone, and we go with it
    except BaseException:
        sys.__excepthook__(*sys.exc_info())
    finally:
        os._exit(code)


def _keep_operators() -> None:
    """Keep PyTorch from unregistering its operators at exit: that would take 30 ms of each rank's end."""
    registry: dict[weakref.finalize[..., object], object] = getattr(weakref.finalize, "_registry", {})
    for finalizer in list(registry):
        if (alive := finalizer.peek()) is not None and getattr(alive[1], "__module__", "") == "torch.library":
            finalizer.atexit = False


# the base without the hooks of abstract classes, which would ask classes of the user
_FILE = io.IOBase.__base__ or io.IOBase


def write_buffers() -> None:
    """Write the buffers of open files; raise nothing. It may wait for the reader of a pipe."""
    files: list[io.IOBase] = [each for each in gc.get_objects() if issubclass(type(each), _FILE)]
    for file in sorted(files, key=_turn):
        with contextlib.suppress(Exception):
            if file.closed or file.fileno() <= 2:
                continue
            if _layer(file) == 1:
                file.close()  # a compressed one has an end of its own
            else:
                file.flush()
    del files
    gc.collect()  # what only cycles hold has its last word: now, since the collector may close what a file wraps first


def _turn(file: io.IOBase) -> tuple[bool, int]:
    """Sort regular files first, since pipes may block, and a file that wraps another one before that."""
    try:
        is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except Exception:  # closed, or no file of the system's
        is_regular = False
    return not is_regular, _layer(file)


def _layer(file: io.IOBase) -> int:
    if issubclass(type(file), io.TextIOWrapper):
        return 0
    if issubclass(type(file), io.BufferedWriter | io.BufferedRandom | io.FileIO):
        return 2
    return 1


MAX_CHAIN = 100  # calls of actors within calls of actors: more of them are taken for an endless recursion


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
