"""Files that belong to this user alone: written whole or not at all, never through somebody's link."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from meshbook.errors import SpawnError


def private_folder(folder: Path) -> Path:
    """Make ``folder`` for us alone. Raises: SpawnError for one that another user can enter or has prepared."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or not stat.S_ISDIR(status.st_mode):
        raise SpawnError(f"{folder} must be a folder of yours with mode 0700. Remove it, or run chmod 700 on it.")
    return folder


def write_private(path: Path, data: bytes) -> None:
    """Replace ``path`` by a file of mode 0600 with this content, in one step."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(data)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


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
