"""The sessions of this user on this machine: which there are, which are dead, and what the dead have left."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from meshbook.sessions import lock
from meshbook.sessions.folder import SavedHost, SavedMesh, SessionState, boot_clock, encode_state, read_state, recall
from meshbook.system.exits import end_process
from meshbook.system.user_folders import KEPT, runtime_base, write_private

GRACE_S = 60.0
"""Agents that live so much longer than their lease are stuck."""

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
    """How long it waits for a controller."""
    waits_s: float | None
    """How long it has waited so far, where that is known."""

    @property
    def is_ours(self) -> bool:
        """Whether this process drives it."""
        return self.owner_pid == os.getpid()

    def recall(self, key: str) -> bytes | None:
        """What its controller has remembered under ``key``."""
        return recall(self.path, key)


def sessions() -> list[SavedSession]:
    """The sessions of this user on this machine that have meshes, the latest first; dead ones are left out."""
    found = []
    for path, state in _all():
        owner = lock.living_owner(path)
        if not state.meshes or (owner is None and not may_live(state.hosts.values())):
            continue
        meshes = tuple(state.meshes.values())
        waits_s = state.waits_s if owner is None else None
        found.append(SavedSession(path.name, path, meshes, owner, state.created, state.lease_s, waits_s))
    return sorted(found, key=lambda session: -session.created)


def sweep() -> None:
    """Remove what dead sessions have left: their owner is dead, and so is every agent, or its lease is long over."""
    for path in runtime_base().iterdir():
        if path.name != KEPT and (not (path / "state").exists() or path.name.startswith(".")):
            _remove_unfinished(path)
    for path, _ in _all():
        if not lock.is_ours(path) and lock.living_owner(path) is None and lock.take(path):
            try:
                _sweep_one(path)
            finally:
                lock.give_up(path)


def remove_if_last(path: Path, pid: int) -> None:
    """The agent ``pid`` of a session ends: remove the session's folder if nobody else needs it."""
    if lock.living_owner(path) is not None or not lock.take(path):
        return
    try:
        state = read_state(path)
        if state is None or not may_live(host for host in state.hosts.values() if host.pid != pid):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        lock.give_up(path)


def may_live(hosts: Iterable[SavedHost]) -> bool:
    """Whether any agent lives, or is somewhere else, where only its lease tells."""
    return any(host.runs is not False for host in hosts)


def _all() -> Iterator[tuple[Path, SessionState]]:
    for path in runtime_base().iterdir():
        if not path.name.startswith(".") and (state := read_state(path)) is not None:
            yield path, state


def _remove_unfinished(path: Path) -> None:
    """Somebody died while making or removing this folder."""
    with contextlib.suppress(FileNotFoundError):
        if lock.living_owner(path) is None and time.time() - path.lstat().st_mtime > UNFINISHED_S:
            shutil.rmtree(path, ignore_errors=True)


def _sweep_one(path: Path) -> None:
    """We own it for a moment; its controller is dead."""
    state = read_state(path)
    if state is None:
        return
    if may_live(state.hosts.values()) and (state.waits_s or 0.0) < state.lease_s + GRACE_S:
        if not state.left_at:  # the lease runs from now on, as far as we can tell
            state.left_at = boot_clock()
            write_private(path / "state", encode_state(state))
        return
    for host in state.hosts.values():
        if host.runs:
            end_process(host.pid, host.started, 0.0)
    shutil.rmtree(path, ignore_errors=True)
