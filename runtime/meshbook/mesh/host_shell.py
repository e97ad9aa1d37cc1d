"""`shell`: an interactive shell on a host, in the terminal in which the program runs.

    raise SystemExit(shell(state.trainers.slice(hosts=0)))

         keys ──> TerminalKeys ── messages of the session ──> HostTerminal ──> pty ──> the shell
         terminal <── what comes to a port <───────────────── its reader

A host that is lost, and a shell that ends, end it; so does whoever leaves the shell by ``exit`` or Ctrl-D.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import tty
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from meshbook.actor import Actor, Channel, Port, endpoint
from meshbook.errors import UsageError
from meshbook.mesh.host_mesh import HostMesh

PIECE_BYTES = 64 << 10
LOOK_S = 0.2
"""How often each end looks whether the other is there still."""
TerminalSize: TypeAlias = "tuple[int, int]"


_BEGIN = 'exec "$1" -i <>"$2" >&0 2>&1'
"""As the first of a new session it opens the terminal, which is then the one that its signals come from."""


class HostTerminal(Actor):
    """A shell at a terminal of its own, whose other end this is."""

    def __init__(self) -> None:
        self._shell: subprocess.Popen[bytes] | None = None
        self._end, self._other = pty.openpty()

    @endpoint
    def run(
        self, said: Port[bytes | int], size: TerminalSize, env: Mapping[str, str], folder: str | None, here: str
    ) -> None:
        """Start it; what it says goes to ``said``, its exit code at last. folder: or ``here``, where that is there."""
        _set_size(self._end, size)
        own = {**os.environ, **env}
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _BEGIN, "sh", own.get("SHELL") or "/bin/sh", os.ttyname(self._other)],
            env=own,
            cwd=folder or (here if os.path.isdir(here) else None),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(said, self._shell), daemon=True).start()

    def _read(self, said: Port[bytes | int], shell: subprocess.Popen[bytes]) -> None:
        """Send what it says until it has ended; our own other end keeps the terminal open until then."""
        while True:
            ended = shell.poll() is not None  # looked at first: what it said before is there to read
            while select.select([self._end], [], [], 0 if ended else LOOK_S)[0]:
                said.send(os.read(self._end, PIECE_BYTES))
            if ended:
                break
        code = shell.wait()
        said.send(128 - code if code < 0 else code)

    @endpoint
    def type(self, keys: bytes) -> None:
        """What the person has typed."""
        with contextlib.suppress(OSError):  # it has ended, which the reader tells
            os.write(self._end, keys)

    @endpoint
    def resize(self, size: TerminalSize) -> None:
        """The person's terminal has another size now."""
        _set_size(self._end, size)

    def __cleanup__(self, error: Exception | None) -> None:
        if self._shell is not None and self._shell.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._shell.pid, signal.SIGHUP)
        os.close(self._other)


def shell(host_mesh_singleton: HostMesh, *, env: Mapping[str, str] | None = None, workdir: str | None = None) -> int:
    """Run an interactive shell on the one host of a mesh until it ends; returns its exit code.

    env: more of an environment. workdir: by default the folder here, where the host has one of its name.
    Raises: UsageError for several hosts, and without a terminal; SupervisionError when the host is lost.
    """
    if len(host_mesh_singleton) != 1:
        raise UsageError(f"a shell runs on one host, not on {len(host_mesh_singleton)}: take a slice of them.")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("a shell needs a terminal. In a notebook cells of ranks run commands: !nvidia-smi")
    with host_mesh_singleton.spawn_procs(torch=False, group=False, name="shell") as procs:
        terminal = procs.spawn("terminal", HostTerminal)
        said, receiver = Channel[Any].open()
        terminal.run.call_one(said, _size_here(), dict(env or {}), workdir, os.getcwd()).get()
        with _raw_terminal(), _keys_sent(terminal):
            coming = receiver.recv()
            while True:
                try:
                    heard = coming.get(LOOK_S)
                except TimeoutError:
                    terminal.resize.call_one(_size_here()).get()  # also finds out whether the host is there
                    continue
                if isinstance(heard, int):
                    return heard
                os.write(sys.stdout.fileno(), heard)
                coming = receiver.recv()


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    """Keys come as they are typed: Ctrl-C is the shell's."""
    before = termios.tcgetattr(sys.stdin)
    tty.setraw(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _keys_sent(terminal: HostTerminal) -> Iterator[None]:
    """A thread sends what is typed."""
    wake, stop = os.pipe()

    def send() -> None:
        while True:
            ready, _, _ = select.select([sys.stdin, wake], [], [])
            if wake in ready or not (keys := os.read(sys.stdin.fileno(), PIECE_BYTES)):
                return
            terminal.type.broadcast(keys)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(stop, b".")
        thread.join()
        os.close(wake)
        os.close(stop)


def _size_here() -> TerminalSize:
    size = os.get_terminal_size(sys.stdout.fileno())
    return size.lines, size.columns


def _set_size(terminal: int, size: TerminalSize) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
