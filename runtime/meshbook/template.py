"""The template process: it has imported torch, never runs user code, and is forked into workers.

    host agent ──fork+exec──> template ──fork──> batch ──fork──> worker 0, worker 1, ...
         └────────── becomes their parent when the batch process exits ─────────┘

A worker costs milliseconds and a few private megabytes because everything imported here is shared copy-on-write. That
only works while this process is single-threaded, holds no lock and has never touched CUDA or an OpenMP region.

The short-lived *batch* process forks all the workers of one request and exits, so that the host agent (a subreaper)
becomes their parent: it learns their exit codes itself, and they outlive the template.

The agent speaks to us over a SEQPACKET socket: a request, then one packet per worker that carries its file descriptors.
`python -m meshbook.template FD` is started by `meshbook.host_agent`.
"""

from __future__ import annotations

import array
import faulthandler
import gc
import importlib
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from meshbook.processes import die_with_parent, thread_count

if TYPE_CHECKING:
    from meshbook.shell import RankShell

STANDARD_PRELOAD = (
    "numpy",
    "numpy.random",
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.optim",
    "torch._dynamo",
    "torch.profiler",
    "cloudpickle",
    "meshbook.process_group",
    "meshbook.worker",
)

FDS_PER_WORKER = 4
"""call socket, urgent socket, stdout, stderr"""

_PACKET_BYTES = 1 << 16


class ForkWorkers(msgspec.Struct, tag="fork", frozen=True):
    """Fork ``count`` workers; their descriptors follow in ``count`` packets."""

    agent_pid: int
    count: int


class ForkTemplate(msgspec.Struct, tag="template", frozen=True):
    """Fork another template that has also imported ``preload``; its socket follows in one packet."""

    agent_pid: int
    preload: tuple[str, ...]
    sys_path: tuple[str, ...]


class TemplateReady(msgspec.Struct, tag="ready", frozen=True):
    """``problem`` says why workers may not be forked from here; ``failure`` is the traceback of a failed import."""

    pid: int
    seconds: float
    problem: str = ""
    failure: str = ""


class WorkerForked(msgspec.Struct, tag="forked", frozen=True):
    pid: int


Request = ForkWorkers | ForkTemplate
Answer = TemplateReady | WorkerForked
encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


class _Fork(NamedTuple):
    """What a fork of the template turned into: the code to run instead of the template's loop."""

    kind: str
    descriptors: list[int]


def main(fd: int) -> None:
    """Import, say ready, and serve fork requests until the agent closes the socket."""
    sock = socket.socket(fileno=fd)
    started = time.perf_counter()
    faulthandler.enable(all_threads=False)  # workers inherit it: a crash in native code says where Python was
    gc.disable()  # until a worker runs: importing makes little garbage; collecting took a fifth of the time
    shell = _preload(STANDARD_PRELOAD)
    while True:
        _freeze()
        sock.send(encode(TemplateReady(os.getpid(), time.perf_counter() - started, _why_not_to_fork())))
        child = _serve(sock)
        if child is None:
            os._exit(0)
        if child.kind == "worker":
            sock.close()
            from meshbook.worker import run_worker

            run_worker(shell, *child.descriptors)  # never returns
        sock.close()
        sock = socket.socket(fileno=child.descriptors[0])
        started = time.perf_counter()
        _preload_or_explain(sock, child.kind)


def _preload(modules: Sequence[str]) -> RankShell:
    for module in modules:
        importlib.import_module(module)
    from meshbook.process_group import warm
    from meshbook.shell import RankShell

    warm()
    return RankShell()


def _preload_or_explain(sock: socket.socket, modules: str) -> None:
    """Import the user's modules in a fresh template; a failing import is told to the agent, and ends us."""
    try:
        for module in filter(None, modules.split(",")):
            importlib.import_module(module)
    except BaseException:
        sock.send(encode(TemplateReady(os.getpid(), 0.0, failure=traceback.format_exc(limit=-2)[-2000:])))
        os._exit(1)


def _freeze() -> None:
    """Keep the collector of the children away from our objects, else it would copy their pages."""
    gc.freeze()


def _why_not_to_fork() -> str:
    if (threads := thread_count()) != 1:
        return f"a preloaded module started {threads - 1} thread{'' if threads == 2 else 's'}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "a preloaded module initialised CUDA"
    return ""


def _serve(sock: socket.socket) -> _Fork | None:
    """Serve requests; returns in a forked child with what it became, or None when the agent is gone."""
    while data := sock.recv(_PACKET_BYTES):
        request = decode_request(data)
        if isinstance(request, ForkTemplate):
            _, descriptors = _receive_descriptors(sock)
            if os.fork() == 0:
                die_with_parent(os.getppid())
                sys.path[:0] = [entry for entry in request.sys_path if entry not in sys.path]
                return _Fork(",".join(request.preload), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        elif (batch := os.fork()) == 0:
            return _fork_batch(sock, request)
        else:
            os.waitpid(batch, 0)
    return None


def _fork_batch(sock: socket.socket, request: ForkWorkers) -> _Fork:
    """In the batch process: fork the workers and exit; returns in each worker only."""
    gone_read, gone_write = os.pipe()
    for _ in range(request.count):
        _, descriptors = _receive_descriptors(sock)
        batch_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(gone_write)
            _await_adoption(gone_read, batch_pid, request.agent_pid)
            return _Fork("worker", descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        sock.send(encode(WorkerForked(pid)))
    os._exit(0)


def _await_adoption(gone: int, batch_pid: int, agent_pid: int) -> None:
    """Wait until the batch process has exited and the agent is our parent; then live and die with the agent."""
    os.setsid()
    os.read(gone, 1)  # its end of file: the batch process is exiting
    os.close(gone)
    while os.getppid() == batch_pid:  # an exiting process closes its files just before it hands on its children
        os.sched_yield()
    die_with_parent(agent_pid)


def _receive_descriptors(sock: socket.socket) -> tuple[bytes, list[int]]:
    data, ancillary, _, _ = sock.recvmsg(_PACKET_BYTES, socket.CMSG_SPACE(4 * FDS_PER_WORKER))
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    return data, list(descriptors)


if __name__ == "__main__":
    from meshbook import template  # the importable module, so that forked code does not live in __main__

    template.main(int(sys.argv[1]))
