"""Template processes: how one is started, and one from which several host agents of this machine are forked.

    controller ──exec──> agent ──fork, before it imports──> template of workers: IPython and our worker
                                                                '──fork──> template with torch ──fork──> workers

An agent and its template import side by side. The template that has no torch is there first, and ranks that are to have
none are forked from it; all others from a fork of it, which imports torch meanwhile. Where several hosts start at once:

    controller ──exec──> template of hosts ──fork──> agent ──fork──> its own template ──fork──> workers
                                │                      '── ...
                                '── stays the agents' parent, and tells how they ended

Workers must be children of their agent, which reaps and outlives them, so agents cannot share one template to fork
workers from. They share its image instead: torch is imported once, and a host costs two forks. Hosts depend on each
other no more than hosts that were started one by one: each has its own template, which nobody else asks for anything,
and the template of hosts may end without them.

A template of hosts can also serve every process of a user: `meshbook.launchers.agent_start.LASTING` names the socket at
which it listens. A test suite, which starts very many sessions, imports torch once with it.
"""

from __future__ import annotations

import array
import gc
import importlib
import os
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from meshbook.launchers.agent_start import LASTING, open_log
from meshbook.system.processes import begin_as_host, is_same_process, start_time
from meshbook.wire import messages as wire
from meshbook.wire import template_messages as protocol

HOST_TEMPLATE = "meshbook.worker.host_template"

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # read at import: any other value starts threads that do not survive a fork
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # else torch.cuda.is_available() calls cuInit and poisons every fork
    "TORCH_GLOO_LAZY_INIT": "1",
}

WITH_TORCH = (
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.optim",
    "torch._dynamo",
    "torch.profiler",
    "meshbook.groups.rank_groups",
)
"""The modules that ranks share beyond the first template's, so that a first DTensor or a step imports nothing."""

IMPORT_S = 60.0
"""The time that a template of hosts has to import; after it each host makes its own, and reports the error."""

FORK_S, REAP_S = 5.0, 2.0
"""The times that a ready template has to fork an agent, and to say how one ended, for which the I/O thread waits."""

UNSEEN = 256
"""Stands for the exit code of a process whose parent has ended before it could be asked."""

_IMPORT_TIME = ("KMP_", "LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH")
"""Variables that begin so are read as modules are imported, so a template that has imported them cannot change them."""

_INHERITED = (
    "Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "Cap", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed",
)  # fmt: skip
"""Lines of proc(5)'s status."""


class StartedTemplate(NamedTuple):
    """A template that was started: its process, our end of its socket, and a pipe with its output."""

    pid: int
    sock: socket.socket
    output: int
    has_torch: bool = False


def be_host(agent: str) -> None:
    """Be a host agent, in a fresh interpreter. agent: the module whose ``main`` is one."""
    begin_as_host()
    gc.disable()  # importing makes little garbage
    started = fork_template(lambda sock: importlib.import_module("meshbook.worker.template").main(sock), False)
    host_agent = importlib.import_module(agent)
    gc.enable()
    host_agent.main(started)


def fork_template(be: Callable[[socket.socket], NoReturn], has_torch: bool) -> StartedTemplate:
    """Fork a template off this process, which ends if that fails. be: the function that runs in it. Raises: OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    output, written = os.pipe2(os.O_CLOEXEC)
    if (pid := os.fork()) == 0:
        try:
            ours.close()
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (written, 1), (written, 2)):
                os.dup2(source, target)
            for each in (null, written, output):
                os.close(each)
            os.environ.update(_ENVIRONMENT)
            be(theirs)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    theirs.close()
    os.close(written)
    return StartedTemplate(pid, ours, output, has_torch)


def exec_template(python: str = "") -> StartedTemplate:
    """Start a template of workers in an interpreter of its own. It is the caller's to reap. Raises: OSError.

    python: another interpreter than ours.
    """
    output, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        process, sock = _exec(["meshbook.worker.template"], theirs, python=python)
    except OSError:
        os.close(output)
        raise
    finally:
        os.close(theirs)
    process.returncode = 0  # else its destructor would reap it
    return StartedTemplate(process.pid, sock, output)


def _exec(module: Sequence[str], output: int, python: str = "") -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run a module whose last argument is its socket. Raises: OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            return exec_with(theirs, module, output, python), ours
        except OSError:
            ours.close()
            raise


def exec_with(sock: socket.socket, module: Sequence[str], output: int, python: str = "") -> subprocess.Popen[bytes]:
    """Run a module whose last argument is the socket. Raises: OSError."""
    return subprocess.Popen(
        [python or sys.executable, "-m", *module, str(sock.fileno())],
        pass_fds=[sock.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=module[0] == HOST_TEMPLATE,
        env={**os.environ, **_ENVIRONMENT},
    )


def inherited() -> list[object]:
    """List the properties that a process of this thread inherits and cannot be given later. Raises: OSError.

    The limit on open files is not among it: controllers and agents raise their own.
    """
    here = Path("/proc/thread-self")
    own = [line for line in (here / "status").read_text().splitlines() if line.startswith(_INHERITED)]
    limits = (here / "limits").read_text().splitlines()
    files = [[line for line in limits if not line.startswith("Max open files")], (here / "cgroup").read_text()]
    namespaces = [os.readlink(here / "ns" / name) for name in ("net", "mnt", "pid", "ipc", "uts", "user")]
    read_early = sorted(
        item for item in os.environ.items() if item[0].startswith(_IMPORT_TIME) and item[0] not in _ENVIRONMENT
    )
    return [sys.executable, os.getpriority(os.PRIO_PROCESS, 0), own, files, namespaces, read_early]


class HostTemplate:
    """A template of hosts, used by any thread. A template of this process alone ends with the last of its hosts."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes] | None = None, path: str = "") -> None:
        """process: the template; None for a template that listens at ``path`` and serves every process."""
        self._sock = sock
        self._process = process
        self._path = path
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._hosts: set[int] = set()
        self._inherited = ""
        """The inheritance of its forks, as `inherited` lists it."""
        self._ready = False
        self.has_ended = False
        """Whether this process has done with the template."""

    @classmethod
    def start(cls, agent: str, log: Path) -> HostTemplate:
        """Start a template, which imports meanwhile. agent: the module whose ``main`` is an agent. Raises: OSError."""
        with open_log(log) as output:
            process, sock = _exec([HOST_TEMPLATE, agent], output.fileno())
        template = cls(sock, process)
        template._inherited = repr(inherited())
        return template

    @classmethod
    def connect(cls, path: str) -> HostTemplate:
        """Connect to the template that listens at ``path``, and wait for its imports.

        Raises: OSError, also where another user has it, or its agents would differ from those that are started here.
        """
        if os.stat(path).st_uid != os.getuid():
            raise OSError(f"{path} belongs to another user")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(path)
            template = cls(sock, path=path)
            template._await_ready()
            if not template.fits:
                raise OSError(f"the template at {path} inherited something else")
        except BaseException:
            sock.close()
            raise
        return template

    @property
    def fits(self) -> bool:
        """Whether the template runs, and an agent that is forked from it now equals one that is started here.

        Raises: OSError.
        """
        if self.has_ended or self._owner != os.getpid() or self._inherited != repr(inherited()):
            return False
        return os.environ.get(LASTING) == self._path if self._process is None else self._process.poll() is None

    def fork(self, stdin: int, log: int, environment: dict[str, str]) -> HostFork:
        """Fork an agent with our folder and environment; the descriptors stay the caller's.

        environment: variables beyond ours. Raises: OSError; then the template has ended.
        """
        with self._lock:
            try:
                self._await_ready()
                added = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
                self._sock.send(wire.encode(protocol.ForkHost({**os.environb, **added}, os.getcwdb())))
                self._sock.sendmsg([b"fds"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [stdin, log]))])
                forked = self._receive(FORK_S)
                if not isinstance(forked, protocol.Forked):
                    raise OSError(f"it did not fork: {forked}")
            except BaseException:
                self._end()
                raise
            self._hosts.add(forked.pid)
            return HostFork(self, forked.pid)

    def _await_ready(self) -> None:
        """Wait until it has imported. Raises: OSError."""
        if not self._ready:
            said = self._receive(IMPORT_S)
            if not isinstance(said, protocol.TemplateReady) or said.problem:
                raise OSError(f"it must not be forked: {said}")
            self._inherited, self._ready = said.inherited, True

    def reap(self, pid: int) -> int:
        """Return how an agent that has ended did so, `UNSEEN` if that is not known."""
        with self._lock:
            try:
                self._sock.send(wire.encode(protocol.ReapHost(pid)))
                said = self._receive(REAP_S)
            except OSError:
                self._end()
                said = None
            self._forget(pid)
            return said.status if isinstance(said, protocol.HostReaped) else UNSEEN

    def disown(self, pid: int) -> None:
        """Care no more for an agent, which goes on."""
        with self._lock:
            self._forget(pid)

    def _receive(self, timeout_s: float) -> protocol.HostAnswer:
        """Raises: OSError."""
        self._sock.settimeout(timeout_s)
        data = self._sock.recv(1 << 16)
        if not data:
            raise OSError("the template of hosts has ended")
        answer: protocol.HostAnswer = protocol.decode_host_answer(data)
        return answer

    def _forget(self, pid: int) -> None:
        self._hosts.discard(pid)
        if not self._hosts:
            self._end()

    def _end(self) -> None:
        """End it, or leave it to others. It holds nothing that could be lost."""
        self.has_ended = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._sock.close()


class HostFork:
    """A host agent that was forked from a template."""

    def __init__(self, template: HostTemplate, pid: int) -> None:
        self.pid = pid
        self._template, self._started = template, start_time(pid) or 0
        self._status: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return its exit code, a signal as a negative number, or `UNSEEN`; None while it runs."""
        with self._lock:
            if self._status is None and not is_same_process(self.pid, self._started):
                self._status = self._template.reap(self.pid)
            return self._status

    def disown(self) -> None:
        """Let it go on without us."""
        self._template.disown(self.pid)


if __name__ == "__main__":
    from meshbook.launchers import templates  # the importable module: forked code does not live in __main__

    templates.be_host(sys.argv[1])
