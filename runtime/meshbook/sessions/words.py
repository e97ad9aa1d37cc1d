"""Sessions as people name and read them: who has a mesh, how long it waits, which one a name means.

A notebook and the command ``meshbook list`` share these words.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from pathlib import Path

import msgspec

from meshbook.errors import AttachError
from meshbook.errors.advice import advice
from meshbook.formatting import did_you_mean, format_duration, format_sizes
from meshbook.sessions.folder import SavedMesh
from meshbook.sessions.listing import SavedSession, sessions

KEY = "notebook"
"""The key under which a session remembers its notebook's state."""


class _Notebook(msgspec.Struct):
    notebook: str


def notebook_key_of(saved: SavedSession) -> str:
    """Return the key of the notebook that has the session, or has left it; empty where it is not known."""
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(saved.recall(KEY) or b"", type=_Notebook).notebook
    return ""


def notebook_of(saved: SavedSession) -> str:
    """Return ``train.ipynb``; empty where it is not known: the name of a connection file says nothing to a person."""
    name = Path(notebook_key_of(saved)).name
    return "" if name.endswith(".json") else name


def names_of(saved: SavedSession) -> list[str]:
    """Return the names of a session's meshes."""
    return [mesh.name for mesh in saved.meshes]


def owner_of(saved: SavedSession) -> str:
    """Return the owner of a session: ``train.ipynb (process 4711)``."""
    notebook = notebook_of(saved)
    return f"{notebook} (process {saved.owner_pid})" if notebook else f"process {saved.owner_pid}"


def describe_age(mesh: SavedMesh) -> str:
    """Write ``up 3 h (6 h of hosts), job 12``: the age, the sum over several hosts, and an engine's job."""
    age_s, hosts = max(0.0, time.time() - mesh.began), len(set(mesh.hosts))
    in_all = f" ({format_duration(age_s * hosts)} of hosts)" if hosts > 1 else ""
    jobs = f", job {', '.join(mesh.jobs)}" if mesh.jobs else ""
    return f"up {format_duration(age_s)}{in_all}{jobs}"


def describe_holder(saved: SavedSession) -> str:
    """Say who has a session: ``belongs to train.ipynb (process 4711)``, or who has left it and how long it waits."""
    if saved.owner_pid is not None:
        return f"belongs to {owner_of(saved)}"
    left = f"left by {notebook_of(saved) or 'its notebook'}"
    if saved.waits_s is None:
        return f"{left}, waits for at most {format_duration(saved.lease_s)}"
    return f"{left}, waits for {format_duration(max(0.0, saved.lease_s - saved.waits_s))} more"


def describe(saved: SavedSession) -> str:
    """Describe a session in a list: its meshes, its owner, and how long it waits."""
    meshes = ", ".join(f"{mesh.name}: {format_sizes(mesh.sizes)}, {describe_age(mesh)}" for mesh in saved.meshes)
    return f"{meshes}; {describe_holder(saved)}"


def find_session(session: str | SavedSession) -> SavedSession:
    """The session with this id, or with a mesh of this name. Raises: AttachError if there is none, or more than one."""
    if isinstance(session, SavedSession):
        return session
    if "://" in session:
        raise AttachError(f"{session} is an address, no session; what makes a machine a host: {advice().invite}")
    known = sessions()
    found = [each for each in known if each.id == session]
    found = found or [each for each in known if session in names_of(each)]
    if len(found) == 1:
        return found[0]
    if found:
        raise AttachError(f'several sessions have a mesh "{session}"; name one of them by its id:{_lines(found)}')
    names = [name for each in known for name in (each.id, *names_of(each))]
    others = f", but {', '.join(names)}" if names else ""
    raise AttachError(f'there is no session or mesh "{session}" here{others}.{did_you_mean(session, names)}')


def _lines(found: Collection[SavedSession]) -> str:
    return "".join(f"\n  {each.id}    {describe(each)}" for each in found)
