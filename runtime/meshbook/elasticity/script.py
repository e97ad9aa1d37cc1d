"""`elastic_script`: a function of all ranks, called again on the ranks that are left when one ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from os import PathLike
from typing import Any, TypeVar

from meshbook.elasticity.recovery import can_recover, check_min_ranks, describe_loss, recover
from meshbook.errors import UsageError
from meshbook.mesh.driven import current_procs
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.proc_view import is_renumbered
from meshbook.shape.value_mesh import ValueMesh
from meshbook.tensors.handles.checkpoints import describe

T = TypeVar("T")


def elastic_script(
    train: Callable[..., T],
    *args: Any,
    save: str | PathLike[str],
    procs: ProcMesh | None = None,
    min_ranks: int | None = None,
    max_restarts: int = 3,
    within_s: float | None = None,
) -> ValueMesh[T]:
    """Call ``train(*args)`` on all ranks; when one ends, heal the mesh and call it again on all.

    ``train`` itself begins with `meshbook.restore` where the folder has a save, and calls `meshbook.save` in its loop:
    the ranks that stay keep their processes, and the frames of the call that failed are dropped.
    save: the folder, for the report of a restart. procs: the notebook's current mesh by default. min_ranks: go on with
    so few ranks where the mesh cannot be healed; by default with all only. within_s: as of `ProcMesh.heal`.
    Returns: the results by rank. Raises: errors of ``train`` itself; WorkerLost after ``max_restarts``.
    """
    procs = current_procs() if procs is None else procs
    whole = procs.base()
    if procs.ranks != whole.ranks and not is_renumbered(procs):
        raise UsageError("elastic_script runs on a whole mesh, not on a part of it: give procs.base()")
    check_min_ranks(min_ranks, whole)
    restarts, loss = 0, ""
    while True:
        try:
            if loss:
                whole, how = recover(whole, min_ranks, within_s)
                whole.free().get()
                print(f"elastic: {loss}; {how}, restart {restarts} of {max_restarts}{_from_save(save, whole)}")
            results = whole.execute(train, *args).get()
            break
        except Exception as error:
            restarts += 1
            if not can_recover(error, whole) or restarts > max_restarts:
                raise
            loss = describe_loss(error, whole)
    if restarts:
        print(f"elastic: done after {restarts} restart{'s' if restarts > 1 else ''}")
    return results


def _from_save(folder: str | PathLike[str], procs: ProcMesh) -> str:
    try:
        return f" from {describe(os.path.abspath(folder), procs).saved.title}"
    except UsageError:
        return ", without a save"
