"""The template process: it has imported torch, never runs user code, and is forked into workers.

    host agent ──fork+exec──> template ──fork──> batch ──fork──> worker 0, worker 1, ...
         └────────── becomes their parent when the batch process exits ─────────┘

A worker costs milliseconds and a few private megabytes because everything imported here is shared copy-on-write. That
only works while this process is single-threaded, holds no lock and has never touched CUDA or an OpenMP region.

The short-lived *batch* process forks all the workers of one request and exits, so that the host agent (a subreaper)
becomes their parent: it learns their exit codes itself, and they outlive the template.

The agent speaks to us over a SEQPACKET socket: a request, then one packet per worker that carries its file descriptors.
`python -m meshbook.worker.template FD` is started by `meshbook.agent.host_agent`.
"""

from __future__ import annotations

import array
import contextlib
import errno
import faulthandler
import gc
import importlib
import os
import select
import socket
import struct
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from meshbook.system.os_errors import explain
from meshbook.system.processes import (
    die_with_parent,
    is_group,
    kill_session,
    outlive_parent,
    set_title,
    start_time,
    thread_count,
    versions,
)
from meshbook.wire import messages as wire
from meshbook.wire import template_messages as protocol

if TYPE_CHECKING:
    from meshbook.shell.shell import RankShell

# modules of the first template, from which that with torch is forked
STANDARD_PRELOAD = ("meshbook.worker.process",)
# more modules of the first template, for which ranks without torch do not wait
LATER = ("numpy", "numpy.random", "meshbook.actor.buffers.rdma")
IDLE_S = 1.0  # ranks have come up when a template was asked for nothing for so long
_PACKET_BYTES = 1 << 16
_PID = struct.Struct("<i")


class _Fork(NamedTuple):
    """A fork of the template: the code to run instead of the template's loop."""

    kind: str
    descriptors: list[int]


def main(sock: socket.socket) -> NoReturn:
    """Import, say ready, and serve fork requests until the agent closes the socket; then end the remaining workers."""
    started = time.perf_counter()
    serve(sock, preload(STANDARD_PRELOAD), started, [*LATER])


def preload(modules: Sequence[str]) -> RankShell:
    """Import modules that forks of this process share, and build their shell."""
    faulthandler.enable(all_threads=False)  # workers inherit it: a crash in native code says where Python was
    gc.disable()  # until a worker runs: importing makes little garbage; collecting took a fifth of the time
    _import(modules)
    from meshbook.shell.shell import RankShell

    return RankShell()


def _import(modules: Iterable[str]) -> None:
    for module in modules:
        importlib.import_module(module)


def serve(sock: socket.socket, shell: RankShell, started: float, later: list[str] | None = None) -> NoReturn:
    """Serve as the template of the agent at the other end of ``sock``. later: modules to import when there is time."""
    set_title("template of ranks")
    while True:
        if (groups := sys.modules.get("meshbook.groups.rank_groups")) is not None:
            groups.warm()
        gc.freeze()  # keeps the collector of the children away from our objects, else it would copy their pages
        took_s = time.perf_counter() - started
        sock.send(wire.encode(protocol.TemplateReady(os.getpid(), took_s, why_not_to_fork(), version=versions())))
        flock = SpawnedWorkers()
        child = _serve(sock, flock, SpareWork(later or []))
        if child is None:
            flock.end()
            os._exit(0)
        if child.kind == "worker":
            sock.close()
            from meshbook.worker.process import run_worker

            run_worker(shell, *child.descriptors)  # never returns
        sock.close()
        sock = socket.socket(fileno=child.descriptors[0])
        started = time.perf_counter()
        sock.send(wire.encode(protocol.Forked(os.getpid())))
        try:
            _import(filter(None, child.kind.split(",")))  # the user's modules
        except BaseException:
            failure = traceback.format_exc(limit=-2)[-2000:]
            sock.send(wire.encode(protocol.TemplateReady(os.getpid(), 0.0, failure=failure)))
            os._exit(1)
        outlive_parent()  # what our workers have left is ended when the agent closes the socket


def why_not_to_fork() -> str:
    """Return why forks of this process are not sound; empty if they are."""
    if (threads := thread_count()) != 1:
        return f"a preloaded module started {threads - 1} thread{'' if threads == 2 else 's'}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "a preloaded module initialised CUDA"
    return ""


class SpawnedWorkers:
    """The workers that were forked from here, so that an agent that dies leaves none of their children behind."""

    def __init__(self) -> None:
        self._started: dict[int, int | None] = {}

    def add(self, pid: int) -> None:
        """Note a worker; forget workers that have ended with all their children."""
        self._started = {
            each: at for each, at in self._started.items() if is_group(each) or start_time(each) == at is not None
        }
        self._started[pid] = start_time(pid)

    def end(self) -> None:
        """Kill the process groups of the workers, since the agent is gone, and its workers with it."""
        for pid, started in self._started.items():
            if start_time(pid) in (None, started):  # else the number is somebody else's by now
                kill_session(pid)


class SpareWork:
    """The work of an idle template: imports that can wait, and a rehearsal of each rank's first steps."""

    def __init__(self, later: list[str]) -> None:
        self._later = later
        self._has_rehearsed = False

    def import_now(self) -> None:
        """Import the modules now, since another template is forked from here, and is to have them too."""
        if self._later:
            _import(self._later)
            self._later.clear()
            gc.freeze()

    def do_until_asked(self, sock: socket.socket) -> None:
        """Work in two pieces, so that a request on the socket does not wait for long."""
        if select.select([sock], [], [], IDLE_S)[0]:
            return
        self.import_now()
        if self._has_rehearsed or select.select([sock], [], [], 0.0)[0]:
            return
        self._has_rehearsed = True
        if "meshbook.groups.rank_groups" not in sys.modules:
            return
        try:
            rehearse_groups()
        except Exception:  # of this machine, so ranks will say so as well
            traceback.print_exc()
        gc.collect()  # of what is not frozen, so little
        gc.freeze()
        if why_not_to_fork():
            os._exit(1)  # the agent starts another


def rehearse_groups() -> None:
    """Form a default group of this process alone, and leave nothing of it. Raises: the errors of forming it.

    A rank that forms its first group writes all over the memory that it shares with the template: code is specialised,
    names enter the interpreter's caches, dictionaries grow. Forks of a process in which that has happened share it, 1.6
    MB of a rank's 11. A group of one needs no peer, and gloo's thread ends with it, so the process may be forked.
    """
    from meshbook.concurrency.patches import patches_undone
    from meshbook.groups.rank_groups import RankGroups
    from meshbook.wire.kv_store import KeyValueStore

    store: KeyValueStore[int] = KeyValueStore()
    alone = wire.Identity(
        mesh=0, name="", host="", device="cpu", rank=0, world_size=1, local_rank=0, local_world_size=1, host_rank=0,
        hosts=1, axes=("gpus",), sizes=(1,), threads=1,
    )  # fmt: skip
    environment = dict(os.environ)
    try:
        with patches_undone():
            groups = RankGroups()
            try:  # a store of one has each answer at once
                groups.form(lambda op, timeout_s, answer: store.request(0, 0, op)[0][2], alone, epoch=0)
            finally:
                groups.forget()
    finally:
        os.environ.clear()
        os.environ.update(environment)


def _serve(sock: socket.socket, flock: SpawnedWorkers, spare: SpareWork) -> _Fork | None:
    """Serve requests; return in a forked child its kind and descriptors, or None when the agent is gone."""
    while True:
        spare.do_until_asked(sock)
        if not (data := sock.recv(_PACKET_BYTES)):
            return None
        request = protocol.decode_request(data)
        if isinstance(request, protocol.ForkTemplate):
            spare.import_now()
        try:
            read, write = os.pipe()
            batch = os.fork()
        except OSError as error:
            _give_up(sock, request, error)
            continue
        if batch == 0:
            os.close(read)
            return _fork_batch(sock, request, write)
        os.close(write)
        while pid := os.read(read, _PID.size):
            flock.add(_PID.unpack(pid)[0])
        os.close(read)
        if os.waitpid(batch, 0)[1]:
            os._exit(1)  # it was killed: nobody knows how far it came, so the agent gives up what it asked of us


def _fork_batch(sock: socket.socket, request: protocol.Request, report: int) -> _Fork:
    """Fork processes in the batch process, and exit; return in each child only. report: gets their pids."""
    count = request.count if isinstance(request, protocol.ForkWorkers) else 1
    gone_read, gone_write = os.pipe()
    batch_pid = os.getpid()
    for done in range(count):
        try:
            descriptors = receive_descriptors(sock)
            pid = os.fork()
        except OSError as error:
            _give_up(sock, request, error, taken=done + 1)
            break
        if pid == 0:
            os.close(gone_write)
            os.close(report)
            _await_adoption(gone_read, batch_pid, request.agent_pid)
            if isinstance(request, protocol.ForkWorkers):
                return _Fork("worker", descriptors)
            sys.path[:0] = [path for entry in request.sys_path if (path := os.fsdecode(entry)) not in sys.path]
            return _Fork(",".join(request.preload), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(request, protocol.ForkWorkers):
            os.write(report, _PID.pack(pid))
            sock.send(wire.encode(protocol.Forked(pid)))
    os._exit(0)


def _give_up(sock: socket.socket, request: protocol.Request, error: OSError, taken: int = 0) -> None:
    """Say why a request cannot be served, and take its remaining packets off the socket."""
    count = request.count if isinstance(request, protocol.ForkWorkers) else 1
    for _ in range(count - taken):
        with contextlib.suppress(OSError):
            for descriptor in receive_descriptors(sock):
                os.close(descriptor)
    if isinstance(request, protocol.ForkWorkers):  # a template that is not forked says so by the end of its socket
        sock.send(wire.encode(protocol.ForkFailed(f"a process could not be forked: {explain(error)}")))


def _await_adoption(gone: int, batch_pid: int, agent_pid: int) -> None:
    """Wait until the batch process has exited and the agent is our parent; then live and die with the agent."""
    os.setsid()
    os.read(gone, 1)  # its end of file: the batch process is exiting
    os.close(gone)
    while os.getppid() == batch_pid:  # an exiting process closes its files just before it hands on its children
        os.sched_yield()
    die_with_parent(agent_pid)


def receive_descriptors(sock: socket.socket) -> list[int]:
    """Return the descriptors of the next packet. Raises: OSError when this process may not open so many files."""
    _, ancillary, flags, _ = sock.recvmsg(_PACKET_BYTES, socket.CMSG_SPACE(4 * protocol.FDS_PER_WORKER))
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    if flags & socket.MSG_CTRUNC:
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return list(descriptors)


if __name__ == "__main__":
    from meshbook.worker import template  # the importable module, so that forked code does not live in __main__

    template.main(socket.socket(fileno=int(sys.argv[1])))
