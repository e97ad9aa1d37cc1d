"""Processes that go on after ranks have ended, healed or without these ranks, and functions that are called again."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from os import PathLike
from typing import Any, TypeVar

from meshbook.errors import HostLost, MeshError, MeshStoppedError, SpawnError, UsageError, WorkerLost
from meshbook.formatting import format_sizes, group_ranks, name_ranks
from meshbook.mesh.driven import current_procs
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.proc_view import is_renumbered
from meshbook.mesh.resize import without
from meshbook.shape.value_mesh import ValueMesh
from meshbook.tensors.handles.checkpoints import describe

T = TypeVar("T")


def check_min_ranks(min_ranks: int | None, procs: ProcMesh) -> None:
    """Raises: UsageError for a number of ranks that the mesh does not have."""
    if min_ranks is not None and not 1 <= min_ranks <= len(procs):
        raise UsageError(f"min_ranks={min_ranks}: the mesh has {len(procs)} ranks")


def can_recover(error: BaseException, procs: ProcMesh) -> bool:
    """Whether an error follows from the end of ranks; errors of the program itself, and interrupts, do not."""
    if isinstance(error, (KeyboardInterrupt, SpawnError, UsageError)) or not procs.alive:
        return False
    causes = list(_causes(error))
    if any(isinstance(each, (WorkerLost, HostLost)) for each in causes):
        return True
    return bool(procs.base().lost) and any(isinstance(each, MeshError) for each in causes)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def describe_loss(error: BaseException, procs: ProcMesh) -> str:
    """Return which ranks ended, and why, in a clause: ``rank 2 ended (killed by SIGKILL)``."""
    known = [*procs._mesh.lost.values(), *(each for each in _causes(error) if isinstance(each, WorkerLost))]
    told = {death.rank: death.cause.partition(",")[0] for each in reversed(known) for death in each.deaths}
    if not told:
        return str(error).partition("\n")[0]
    groups = group_ranks(sorted(told.items()))
    return "; ".join(f"{name_ranks(ranks)} ended ({cause})" for cause, ranks in groups.items())


def recover(procs: ProcMesh, min_ranks: int | None, within_s: float | None) -> tuple[ProcMesh, str]:
    """Heal the mesh; where that cannot be, go on without the ranks that ended.

    min_ranks: the fewest ranks to go on with; None: all.
    Returns: the whole mesh as it is now, and a clause for people, as in ``healed in 0.6 s``.
    Raises: SpawnError, CrashLoopError and others that `ProcMesh.heal` raises, where fewer ranks would be left.
    """
    procs = procs.base()
    began = time.monotonic()
    try:
        procs.heal(within_s=within_s)
    except SpawnError as error:
        fewer: dict[str, int] = {}
        with contextlib.suppress(UsageError):  # where no part of the mesh is whole
            fewer = without(procs.extent, procs.lost)
        left = math.prod(size - fewer.get(axis, 0) for axis, size in procs.sizes.items())
        if isinstance(error, MeshStoppedError) or min_ranks is None or not fewer or left < min_ranks:
            raise
        smaller = procs.shrink(**fewer)
        why = str(error).partition("\n")[0].removesuffix(".")
        return smaller, f"not healed ({why}): goes on with {format_sizes(smaller.sizes)}"
    return procs, f"healed in {time.monotonic() - began:.1f} s"


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
