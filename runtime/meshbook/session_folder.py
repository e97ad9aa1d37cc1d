"""Where a controller keeps its sockets and logs: private to the user, gone when the session is.

<runtime dir>/meshbook-<uid>/<session>/    0700: the ipc socket and `owner` (pid and start time)
<state dir>/meshbook/logs/<session>/       0700: logs of agents and ranks, kept for the last sessions
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from pathlib import Path

from meshbook.errors import SpawnError
from meshbook.processes import is_same_process, start_time

KEPT_LOG_SESSIONS = 20


class SessionFolder:
    """The folders of one controller."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(4)
        base = _runtime_base()
        sweep(base)
        self.sockets = base / self.id
        self.sockets.mkdir(mode=0o700)
        (self.sockets / "owner").write_text(f"{os.getpid()} {start_time(os.getpid())}")
        logs = _log_base()
        _trim_logs(logs)
        self.logs = logs / self.id
        self.logs.mkdir(mode=0o700)

    def close(self) -> None:
        """Remove the sockets; logs stay until newer sessions push them out. Idempotent."""
        shutil.rmtree(self.sockets, ignore_errors=True)


def sweep(base: Path) -> None:
    """Remove what dead sessions left, by recorded pid and start time; their agents end by themselves."""
    for folder in base.iterdir():
        try:
            pid, started = map(int, (folder / "owner").read_text().split())
        except (OSError, ValueError):
            continue
        if not is_same_process(pid, started):
            shutil.rmtree(folder, ignore_errors=True)


def _runtime_base() -> Path:
    parent = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    return _private(parent / f"meshbook-{os.getuid()}")


def _log_base() -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return _private(state / "meshbook" / "logs")


def _private(folder: Path) -> Path:
    """Make ``folder`` for us alone; refuse one that another user has prepared."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise SpawnError(f"{folder} must be a folder of yours with mode 0700. Remove it, or run chmod 700 on it.")
    return folder


def _trim_logs(base: Path) -> None:
    sessions = sorted(base.iterdir(), key=lambda folder: folder.lstat().st_mtime)
    for folder in sessions[: max(0, len(sessions) - KEPT_LOG_SESSIONS)]:
        shutil.rmtree(folder, ignore_errors=True)
