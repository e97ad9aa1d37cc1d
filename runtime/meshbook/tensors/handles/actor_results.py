"""What endpoints of actors return, left on the ranks as tensors: ``actors.step.rref(x)``. Monarch's name.

A module of its own because endpoints, which stand below, find it by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshbook.actor.actor_mesh import ActorMesh, procs_of
from meshbook.actor.router import current_router
from meshbook.errors import UsageError
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.tensors.handles.local_view import local_mesh_of


def rref(actors: ActorMesh[Any], endpoint: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an endpoint on every actor; the tensors that it returns are each rank's own, in the local view.

    Tensors of that view among the arguments are, for each actor, those of its rank. Raises: UsageError where the mesh
    is not driven here.
    """
    procs = procs_of(actors)
    if not isinstance(procs, ProcMesh):
        raise UsageError("rref is called where the mesh is driven, in the notebook or the script; on ranks use call.")
    return local_mesh_of(procs).execute(_call_here, actors, endpoint, *args, **kwargs)


def _call_here(actors: ActorMesh[Any], endpoint: str, *args: Any, **kwargs: Any) -> Any:
    """On a rank: call the actor that lives here."""
    here = actors.select([current_router().place.rank])
    return getattr(here, endpoint).call_one(*args, **kwargs).get()
