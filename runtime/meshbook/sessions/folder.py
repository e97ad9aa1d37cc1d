"""The folders in which a session keeps its sockets, keys and logs: private to the user, and gone with the session.

    <runtime dir>/meshbook-<uid>/<session>/     0700 (`meshbook.system.user_folders` says where that is)
        lock, owner     the process that owns it
        state           keys, endpoints, hosts and meshes (`SessionState`): all that the next controller needs
        memory/<key>    values that the notebook wants remembered
        control         the Unix socket
    <state dir>/meshbook/logs/<session>/        0700: logs of agents and ranks; those of the last sessions stay
        session         where the session is: machine, boot and the folder above

A session begins with its first controller and lasts as long as an agent lives. Each controller of it has an epoch,
one more than the one before. The last to leave removes the folder: the controller that stops it, the last
agent whose lease is over, or the next controller that looks around (`meshbook.sessions.listing.sweep`).

The owner of a session holds a POSIX lock on the file ``lock``, which ends with its process, however that ends. A fork
does not inherit it, and loses nothing of its parent's by closing the file. But a process gives its own lock up by
closing *any* descriptor of the file: it is opened here only, once per process.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import platform
import re
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from meshbook.concurrency.forks import ForkLock, at_fork
from meshbook.errors import UsageError
from meshbook.system.interfaces import in_endpoint, loopback_address, own_address
from meshbook.system.processes import boot_id, is_same_process, start_time
from meshbook.system.user_folders import (
    append_private,
    log_base,
    private_folder,
    read_private,
    runtime_base,
    write_private,
)
from meshbook.wire.messages import StartCommand

KEPT_LOG_SESSIONS = 20
KEPT_LOG_BYTES = 2 << 30
"""The limit for the logs of all ended sessions together; one rank may write half of it (`meshbook.agent.output`)."""

UNKNOWN_S, ELSEWHERE_S = 7 * 86400.0, 30 * 86400.0
"""Logs in which nothing was written for so long are those of a session that has ended: where nothing says which session
that was, as on a host of an agent; and where it was one of another machine, with which we share a home."""

_OF_SESSION = "session"
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


class SavedLauncher(msgspec.Struct, frozen=True):
    """The launcher of a host, with which the next controller can start another one in its place."""

    engine: str = "local"
    separate: bool = False
    """Whether a local host acts as if it were alone on its machine."""
    host: str = ""
    """Its name for the engine; empty where it is a host like any other."""
    python: str = ""
    options: tuple[str, ...] = ()
    """The options of the engine."""
    job: str = ""
    step: str = ""
    task: int = 0
    """The name of the log, or the engine's number, by which the host is found; of Slurm, that of the allocation."""

    @property
    def asked(self) -> SavedLauncher:
        """The request alone, without the place that the host got."""
        return self if not self.job else SavedLauncher(self.engine, python=self.python, options=self.options)


class SavedHost(msgspec.Struct):
    """A host agent that may dial in."""

    key: str
    """Its public CURVE key."""
    pid: int = 0
    started: int = 0
    """Start time of ``pid``, the process here that ends with the agent; both 0 where there is none."""
    shares_environment: bool = True
    serves_all: bool = False
    """Whether it is the one agent of this machine that serves all calls of ``this_host``."""
    launcher: SavedLauncher = SavedLauncher()
    name: str = ""
    """Its name for people, where that is not the name of its machine."""

    @property
    def runs(self) -> bool | None:
        """Whether the agent lives; None where that cannot be seen from here."""
        return is_same_process(self.pid, self.started) if self.pid else None


class SavedMesh(msgspec.Struct):
    """A mesh of the session, for lists; its agents know more."""

    name: str
    sizes: dict[str, int]
    hosts: list[str]
    """Host ids, in rank order."""
    owns_hosts: bool = False
    grouped: bool = True
    host_axes: list[str] = []
    cwd: str = ""
    environment: dict[str, str] = {}
    """The working folder and the environment that were asked for its ranks, on every host."""
    began: float = 0.0
    """The time of its spawn, in seconds since 1970."""
    jobs: list[str] = []
    """The jobs of engines that its hosts run in."""
    commands: list[StartCommand] = []
    bindings: list[dict[str, str]] = []
    """The commands with which its ranks begin, and their places on the machine."""


class SessionState(msgspec.Struct):
    """The state that the next controller of a session needs."""

    public_key: str
    secret_key: str
    created: float
    """Seconds since 1970."""
    lease_s: float
    epoch: int = 1
    endpoints: dict[str, str] = {}
    """The endpoints: the requested ones (``tcp://127.0.0.1:*``), and the actual ones."""
    hosts: dict[str, SavedHost] = {}
    late_hosts: dict[str, str] = {}
    """The public keys of hosts that were given up, by id: their agents do not know it, if they live."""
    meshes: dict[int, SavedMesh] = {}
    left_at: float = 0.0
    """The time when its controller left or was found dead, on the boot clock; 0 while it is there."""

    @property
    def waits_s(self) -> float | None:
        """The time that it has waited for a controller, where that is known."""
        waits_s = boot_clock() - self.left_at
        return None if not self.left_at else math.inf if waits_s < 0 else waits_s  # the machine has booted since


encode_state = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(SessionState).decode


class SessionFolder:
    """The folders of a session that this process owns. Methods may be called by any thread."""

    def __init__(self, path: Path, state: SessionState) -> None:
        self.path, self.id, self.state = path, path.name, state
        self.logs = private_folder(log_base() / self.id)
        write_private(self.logs / _OF_SESSION, msgspec.json.encode((platform.node(), boot_id(), str(path))))
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def create(cls, public_key: str, secret_key: str, lease_s: float) -> SessionFolder:
        """Begin a session. Raises: SpawnError if the folders are not ours alone."""
        id = os.urandom(4).hex()
        base = runtime_base()
        path, new = base / id, base / f".{id}"
        new.mkdir(mode=0o700)
        take_lock(new, new=True)
        sign_as_owner(new)
        (new / "memory").mkdir(mode=0o700)
        state = SessionState(public_key, secret_key, time.time(), lease_s)
        write_private(new / "state", encode_state(state))
        rename_locked(new, path)
        trim_logs(log_base())
        return cls(path, state)

    @classmethod
    def take_over(cls, path: Path) -> SessionFolder | None:
        """Own the next epoch of a session; None if it has an owner or is gone."""
        if not take_lock(path):
            return None
        state = read_state(path)
        if state is None:
            give_up_lock(path)
            return None
        sign_as_owner(path)
        try:
            folder = cls(path, state)
        except BaseException:
            unsign(path)
            give_up_lock(path)
            raise
        folder.state.epoch += 1
        folder.state.left_at = 0.0
        folder.save()
        return folder

    def save(self) -> None:
        """Write ``state``, which only its owner changes."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        if not self._closed:
            write_private(self.path / "state", encode_state(self.state))

    def save_hosts(self, hosts: Mapping[str, SavedHost]) -> None:
        """Note hosts that were started."""
        with self._lock:
            self.state.hosts.update(hosts)
            self._write()

    def save_mesh(self, id: int, mesh: SavedMesh) -> None:
        """Note a mesh that has come up, or has changed: without this the next controller does not want it."""
        with self._lock:
            self.state.meshes[id] = mesh
            self._write()

    def forget(
        self, meshes: Iterable[int] = (), hosts: Iterable[str] = (), late_hosts: Mapping[str, str] | None = None
    ) -> None:
        """Note that meshes and hosts have ended. late_hosts: the keys of hosts that are to be told so, if they live."""
        with self._lock:
            self.state.late_hosts.update(late_hosts or {})
            for mesh in meshes:
                self.state.meshes.pop(mesh, None)
            for host in hosts:
                self.state.hosts.pop(host, None)
            self._write()

    def settle_late(self, host: str) -> None:
        """Forget a host that was given up, and now knows so or cannot be there any more."""
        with self._lock:
            if self.state.late_hosts.pop(host, None) is not None:
                self._write()

    def peer_ip(self) -> str:
        """Return where agents of this machine listen for others: as we do for agents elsewhere, if there are any."""
        if any(host.launcher.engine != "local" for host in self.state.hosts.values()):
            return in_endpoint(own_address())  # others are on other machines
        tcp = [end for end in self.state.endpoints.values() if end.startswith("tcp://")]
        return tcp[0].removeprefix("tcp://").rpartition(":")[0] if tcp else in_endpoint(loopback_address())

    def remember(self, key: str, value: bytes) -> None:
        """Keep ``value`` as long as the session. Raises: UsageError for a key that cannot be a file name."""
        if not _KEY.fullmatch(key):
            raise UsageError(f'"{key}" cannot name what is remembered: letters, digits, ".", "_" and "-" only.')
        with self._lock:
            if not self._closed:
                write_private(self.path / "memory" / key, value)

    def append(self, key: str, lines: bytes) -> int:
        """Add whole lines to the value of ``key``; returns its size. At worst the last line is cut."""
        with self._lock:
            return 0 if self._closed else append_private(self.path / "memory" / key, lines)

    def recall(self, key: str) -> bytes | None:
        """Return the value that this controller, or one before, has stored under ``key``."""
        return recall(self.path, key)

    def leave(self) -> None:
        """Give the session up, so that another controller may own it. Idempotent."""
        self.state.left_at = boot_clock()
        self.save()
        with self._lock:
            if not self._closed:
                self._closed = True
                unsign(self.path)
                give_up_lock(self.path)

    def close(self) -> None:
        """End the session; logs stay until newer sessions push them out. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                shutil.rmtree(self.path, ignore_errors=True)
                give_up_lock(self.path)


def read_state(path: Path) -> SessionState | None:
    """Return the state of any session of ours; None when there is none or it cannot be read."""
    try:
        return _decode(read_private(path / "state") or b"")
    except msgspec.DecodeError:
        return None


def recall(path: Path, key: str) -> bytes | None:
    """Return the value that a session remembers under ``key``."""
    return read_private(path / "memory" / key) if _KEY.fullmatch(key) else None


def boot_clock() -> float:
    """Return the seconds since boot, time asleep included: no change of the wall clock moves it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def trim_logs(base: Path) -> None:
    """Remove old logs of sessions that surely have ended: the newest stay within the bounds, the very last always."""
    ended = [folder for folder in base.iterdir() if _has_ended(folder)]
    left_bytes = KEPT_LOG_BYTES
    for number, folder in enumerate(sorted(ended, key=_modified, reverse=True)):
        left_bytes -= sum(map(_size_bytes, _files_in(folder)))
        if number and (number >= KEPT_LOG_SESSIONS or left_bytes < 0):
            if folder.is_file():  # of an agent whose program was killed before there was a session
                folder.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


def _has_ended(logs: Path) -> bool:
    """Tell whether the session of these logs has ended, for certain or as far as their age tells."""
    try:
        machine, boot, path = msgspec.json.decode(read_private(logs / _OF_SESSION) or b"", type=tuple[str, str, str])
    except msgspec.DecodeError:
        machine = boot = path = ""
    if machine == platform.node():
        return boot != boot_id() or not Path(path).exists()
    if (runtime_base() / logs.name).exists():
        return False
    last_written = max(map(_modified, [logs, *_files_in(logs)]))
    return time.time() - last_written > (ELSEWHERE_S if machine else UNKNOWN_S)


def _files_in(folder: Path) -> list[Path]:
    """Return the files below a folder; others may remove some meanwhile."""
    return [Path(at, name) for at, _, names in os.walk(folder) for name in names]


def _modified(path: Path) -> float:
    with contextlib.suppress(OSError):  # another session trims at the same time
        return path.lstat().st_mtime
    return 0.0


def _size_bytes(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.lstat().st_blocks * 512  # what it takes, as a quota counts
    return 0


# ---- ownership ------------------------------------------------------------------------------------------------------

_guard = ForkLock()
_held: dict[Path, int] = {}


def take_lock(folder: Path, *, new: bool = False) -> bool:
    """Become the owner of a session's folder, unless it has one (this process included) or is gone."""
    with _guard.lock:
        if folder in _held:
            return False
        try:
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if new else 0)
            fd = os.open(folder / "lock", flags, 0o600)
        except FileNotFoundError:
            return False
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(fd)
            return False
        if not (folder / "lock").exists():  # removed between our two steps
            os.close(fd)
            return False
        _held[folder] = fd
        return True


def give_up_lock(folder: Path) -> None:
    """Give up the ownership of a folder. Idempotent."""
    with _guard.lock:
        fd = _held.pop(folder, None)
        if fd is not None:
            os.close(fd)


def rename_locked(folder: Path, new: Path) -> None:
    """Rename a folder that we own."""
    with _guard.lock:
        folder.rename(new)
        _held[new] = _held.pop(folder)


def holds_lock(folder: Path) -> bool:
    """Whether this process is the owner."""
    return folder in _held


def sign_as_owner(folder: Path) -> None:
    """Write down this process as the owner, for others to read."""
    write_private(folder / "owner", f"{os.getpid()} {start_time(os.getpid())}".encode())


def living_owner(folder: Path) -> int | None:
    """Return the pid of the process that signed last, if it lives and did not give the session up."""
    try:
        pid, started = map(int, (read_private(folder / "owner") or b"").split())
    except ValueError:
        return None
    return pid if is_same_process(pid, started) else None


def unsign(folder: Path) -> None:
    """Let others see that no process owns the session."""
    (folder / "owner").unlink(missing_ok=True)


def _forget_in_child() -> None:
    for fd in _held.values():
        os.close(fd)
    _held.clear()


at_fork(in_child=_forget_in_child)
