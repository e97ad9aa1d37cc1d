"""The sessions of this user on this machine, and the remains of dead ones."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from meshbook.sessions.folder import (
    SavedHost,
    SavedMesh,
    SessionState,
    boot_clock,
    encode_state,
    give_up_lock,
    holds_lock,
    living_owner,
    read_state,
    recall,
    take_lock,
)
from meshbook.system.exits import end_process
from meshbook.system.processes import process_state
from meshbook.system.user_folders import KEPT, runtime_base, write_private

GRACE_S = 60.0
"""The time after the end of its lease when an agent that is stopped, or is elsewhere, counts as dead."""

UNFINISHED_S = 3600.0


@dataclass(frozen=True)
class SavedSession:
    """A session with meshes: one that a process drives, or one that waits for the next."""

    id: str
    path: Path
    meshes: tuple[SavedMesh, ...]
    owner_pid: int | None
    """The living process that drives it; None when it waits to be attached."""
    created: float
    """Seconds since 1970."""
    lease_s: float
    """The time for which it waits for a controller."""
    waits_s: float | None
    """The time that it has waited so far, where that is known."""

    @property
    def is_ours(self) -> bool:
        """Whether this process drives it."""
        return self.owner_pid == os.getpid()

    def recall(self, key: str) -> bytes | None:
        """Return the value that its controller has stored under ``key``."""
        return recall(self.path, key)


def sessions() -> list[SavedSession]:
    """Return the sessions of this user on this machine that have meshes, the latest first, without dead ones."""
    found = []
    for path, state in _all():
        owner = living_owner(path)
        if not state.meshes or (owner is None and not may_live(state.hosts.values())):
            continue
        meshes = tuple(state.meshes.values())
        waits_s = state.waits_s if owner is None else None
        found.append(SavedSession(path.name, path, meshes, owner, state.created, state.lease_s, waits_s))
    return sorted(found, key=lambda session: -session.created)


def sweep() -> None:
    """Remove the folders of dead sessions: their owner is dead, and so is every agent.

    An agent that runs here ends its session itself. It may be late: a machine that sleeps stops its clock.
    """
    for path in runtime_base().iterdir():
        if path.name != KEPT and (not (path / "state").exists() or path.name.startswith(".")):
            with contextlib.suppress(FileNotFoundError):  # its process died while making or removing it
                if living_owner(path) is None and time.time() - path.lstat().st_mtime > UNFINISHED_S:
                    shutil.rmtree(path, ignore_errors=True)
    for path, _ in _all():
        if not holds_lock(path) and living_owner(path) is None and take_lock(path):
            try:
                _sweep_one(path)
            finally:
                give_up_lock(path)


def remove_if_last(path: Path, pid: int) -> None:
    """Remove a session's folder as its agent ``pid`` ends, if no other process needs it."""
    if living_owner(path) is not None or not take_lock(path):
        return
    try:
        state = read_state(path)
        if state is None or not may_live(host for host in state.hosts.values() if host.pid != pid):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        give_up_lock(path)


def may_live(hosts: Iterable[SavedHost]) -> bool:
    """Whether any agent lives, or is somewhere else, where only its lease tells."""
    return any(host.runs is not False for host in hosts)


def _all() -> Iterator[tuple[Path, SessionState]]:
    for path in runtime_base().iterdir():
        if not path.name.startswith(".") and (state := read_state(path)) is not None:
            yield path, state


def _sweep_one(path: Path) -> None:
    """Remove a session whose controller is dead, or let its lease begin; we own it for a moment."""
    state = read_state(path)
    if state is None:
        return
    is_over = (state.waits_s or 0.0) > state.lease_s + GRACE_S
    runs = any(host.runs and process_state(host.pid) not in ("T", "t") for host in state.hosts.values())
    if runs or (may_live(state.hosts.values()) and not is_over):
        if not state.left_at:  # the lease runs from now on, as far as we can tell
            state.left_at = boot_clock()
            write_private(path / "state", encode_state(state))
        return
    for host in state.hosts.values():
        if host.runs:
            end_process(host.pid, host.started, 0.0)
    shutil.rmtree(path, ignore_errors=True)
