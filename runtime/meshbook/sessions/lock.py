"""Who owns a session: the process that holds a POSIX lock on the file ``lock`` of its folder.

The lock ends with its process, however that ends. A fork does not inherit it, and loses nothing of its parent's by
closing the file. But a process gives its own lock up by closing *any* descriptor of the file: it is opened here only,
once per process.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from meshbook.concurrency.forks import at_fork
from meshbook.system.processes import is_same_process, start_time
from meshbook.system.user_folders import read_private, write_private

_guard = threading.RLock()
_held: dict[Path, int] = {}


def take(folder: Path, *, new: bool = False) -> bool:
    """Become the owner of ``folder``, unless it has one (this process included) or is gone."""
    with _guard:
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


def give_up(folder: Path) -> None:
    """Be the owner no more. Idempotent."""
    with _guard:
        fd = _held.pop(folder, None)
        if fd is not None:
            os.close(fd)


def rename(folder: Path, new: Path) -> None:
    """Rename a folder that we own."""
    with _guard:
        folder.rename(new)
        _held[new] = _held.pop(folder)


def is_ours(folder: Path) -> bool:
    """Whether this process is the owner."""
    return folder in _held


def sign(folder: Path) -> None:
    """Write down who we are, for others to read."""
    write_private(folder / "owner", f"{os.getpid()} {start_time(os.getpid())}".encode())


def living_owner(folder: Path) -> int | None:
    """The pid of the process that signed last, if it lives and did not give the session up."""
    try:
        pid, started = map(int, (read_private(folder / "owner") or b"").split())
    except ValueError:
        return None
    return pid if is_same_process(pid, started) else None


def unsign(folder: Path) -> None:
    """Let others see that nobody owns the session."""
    (folder / "owner").unlink(missing_ok=True)


def _forget_in_child() -> None:
    """The locks are our parent's."""
    global _guard
    _guard = threading.RLock()
    for fd in _held.values():
        os.close(fd)
    _held.clear()


at_fork(in_child=_forget_in_child)
