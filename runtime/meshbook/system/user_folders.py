"""The folders of this user, also where the usual places are not to be had, and files for this user alone.

    sessions            $XDG_RUNTIME_DIR, if it is there and ours, else the temp folder     /meshbook-<uid>
    all that stays      $XDG_STATE_HOME, else ~/.local/state                                /meshbook
                        where that cannot be written: in the folder of sessions             /.kept

Anybody may make ``meshbook-<uid>`` in the temp folder before us, and nobody but them can remove it: then it is
``meshbook-<uid>.1``, and so on. All processes of a user must find the same one, so a name that is ours already comes
before one that is free.

Private files are written whole or not at all, never through somebody's link.
"""

from __future__ import annotations

import contextlib
import os
import stat
import warnings
from pathlib import Path

from meshbook.errors import SpawnError
from meshbook.system.os_errors import explain

KEPT = ".kept"
"""The place of logs in the folder of sessions; no session is called so."""

_NAMES = 10


def runtime_base() -> Path:
    """Return the folder of this user's sessions. Raises: SpawnError, OSError."""
    parent, name = _runtime_parent(), f"meshbook-{os.getuid()}"
    candidates = [parent / name, *(parent / f"{name}.{number}" for number in range(1, _NAMES))]
    owners = {folder: owner for folder in candidates if (owner := _owner(folder)) is not None}
    for folder in sorted(candidates, key=lambda folder: folder not in owners):
        if owners.get(folder, os.getuid()) == os.getuid():
            try:
                return private_folder(folder)
            except SpawnError:
                if _owner(folder) == os.getuid():  # else somebody was quicker
                    raise
    raise SpawnError(f"other users have taken all names in {parent}. Set XDG_RUNTIME_DIR to a folder of yours.")


def log_base() -> Path:
    """Return the folder of logs. Raises: SpawnError, OSError."""
    return private_folder(state_base() / "logs")


def state_base() -> Path:
    """Return the folder of files that outlive sessions; warns, once, where it will not outlive the machine."""
    try:
        state = _state_home() / "meshbook"
        if _owner(state / "logs") in (None, os.getuid()):
            if os.access(private_folder(state / "logs"), os.W_OK | os.X_OK):
                return state
            why = f"{state} cannot be written"
        else:
            why = f"{state} belongs to another user"
    except OSError as error:
        why = explain(error)
    instead = private_folder(runtime_base() / KEPT)
    warnings.warn(f"logs lie in {instead}, which may not last: {why}. Set XDG_STATE_HOME to keep them.", stacklevel=2)
    return instead


def _runtime_parent() -> Path:
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    if not os.path.isabs(given):
        given = ""
    with contextlib.suppress(OSError):
        status = os.stat(given)  # after su or sudo -E it is another user's, and goes when that one leaves
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and os.access(given, os.W_OK | os.X_OK):
            return Path(given)
    try:
        import tempfile  # only here: agents are started before all else

        return Path(tempfile.gettempdir())
    except OSError as error:
        raise SpawnError(f"there is no folder for sockets: {error}. Set XDG_RUNTIME_DIR to one of yours.") from error


def _state_home() -> Path:
    """Raises: OSError if there is none."""
    if given := os.environ.get("XDG_STATE_HOME"):
        return Path(given)
    try:
        home = Path.home()
    except RuntimeError as error:  # HOME is not set, and this uid has no entry in the passwd file
        raise OSError("HOME is not set") from error
    if not home.is_dir():
        raise NotADirectoryError(f"HOME is {home}, which is no folder")
    return home / ".local" / "state"


def _owner(path: Path) -> int | None:
    """Return the uid of its owner, links not followed; None when it does not exist or cannot be seen."""
    try:
        return path.lstat().st_uid
    except OSError:
        return None


def private_folder(folder: Path) -> Path:
    """Make ``folder`` for us alone, and its missing parents. A folder of ours that others can read is closed to them.

    Raises: SpawnError for one that another user owns, or may have prepared.
    """
    for missing in reversed([each for each in folder.parents if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022 or not stat.S_ISDIR(status.st_mode):
        raise SpawnError(f"{folder} must be a folder of yours with mode 0700. Remove it, or run chmod 700 on it.")
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def write_private(path: Path, data: bytes) -> None:
    """Replace ``path`` by a file of mode 0600 with this content, in one step."""
    new = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(data)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def append_private(path: Path, data: bytes) -> int:
    """Add to a file that `write_private` wrote, or begin one, by one write; returns its size."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "ab", buffering=0) as file:
        file.write(data)
        return file.tell()


def read_private(path: Path) -> bytes | None:
    """The content of a file that `write_private` wrote; None when there is none, or it is not ours alone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            return None
        return file.read()
