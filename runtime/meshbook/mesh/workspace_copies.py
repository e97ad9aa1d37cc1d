"""`HostMesh.sync_workspace(Workspace(dirs=[...]))`: hosts get copies of folders, of which only what differs travels."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshbook.errors import UsageError
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.workspace.folders import (
    FileMark,
    Workspace,
    checked_name,
    list_folder,
    missing_there,
    tidy_there,
    write_there,
)
from meshbook.workspace.local_modules import find_modules
from meshbook.workspace.synced_modules import Synced, take_modules

if TYPE_CHECKING:
    from meshbook.mesh.host_mesh import HostMesh

AT_ONCE_BYTES = 64 << 20
"""So much goes to a host in one call."""


def copy_folders(hosts: HostMesh, workspace: Workspace, users: Sequence[ProcMesh], auto_reload: bool) -> None:
    """Have the hosts have the folders, and their processes import from them.

    users: processes on these hosts. auto_reload: modules in use that have changed are reloaded there.
    Raises: UsageError before anything is sent; SpawnError; CallFailed with what the system said.
    """
    names = {source: checked_name(name) for source, name in workspace.dirs.items()}
    listed = {source: list_folder(source) for source in names}
    if not names:
        return
    with hosts.spawn_procs(torch=False, group=False, name="workspace") as copiers:
        places = dict(_copy(copiers, source, names[source], marks) for source, marks in listed.items())
    for procs in users:
        procs.execute_as("sync_workspace", use_folders, places, auto_reload).get()


def _copy(copiers: ProcMesh, folder: Path, name: str, marks: list[FileMark]) -> tuple[str, list[str]]:
    """One folder to all hosts; returns where it is there, and which files have changed."""
    missing = copiers.execute_as("sync_workspace", missing_there, name, marks).get()
    wanted = {rank: frozenset(missing.get(rank)) for rank in copiers.ranks}
    for versions in set(wanted.values()):
        alike = copiers.select([rank for rank, its in wanted.items() if its == versions])
        for contents in _contents(folder, marks, versions):
            alike.execute_as("sync_workspace", write_there, name, contents, marks).get()
    places: list[str] = copiers.execute_as("sync_workspace", tidy_there, name, marks).get().values()
    if len(set(places)) > 1:
        raise UsageError(f"WORKSPACE_DIR differs between hosts ({', '.join(sorted(set(places)))}); give all the same.")
    return places[0], [mark.path for mark in marks if mark.version in frozenset().union(*wanted.values())]


def _contents(folder: Path, marks: Sequence[FileMark], versions: frozenset[str]) -> Iterator[Mapping[str, bytes]]:
    """What the files hold, in portions; at least one, which may be empty: there may be links."""
    portion: dict[str, bytes] = {}
    size = 0
    for mark in {mark.version: mark for mark in marks if mark.version in versions and not mark.is_link}.values():
        if size and size + mark.size > AT_ONCE_BYTES:
            yield portion
            portion, size = {}, 0
        portion[mark.version] = (folder / mark.path).read_bytes()
        size += mark.size
    yield portion


def use_folders(places: Mapping[str, Sequence[str]], auto_reload: bool) -> dict[str, Synced]:
    """On a rank: import from these folders, too. places: with the files in each that have changed."""
    sys.path[:0] = [place for place in places if place not in sys.path]
    importlib.invalidate_caches()
    taken: dict[str, Synced] = {}
    for place, files in places.items() if auto_reload else ():
        try:
            found = find_modules(Path(place))
        except UsageError:  # it has no modules
            continue
        changed = {os.path.join(place, file) for file in files}
        taken |= take_modules([each for each in found.modules if each.path in changed and each.name in sys.modules])
    return taken
