"""The default group of torch.distributed on one rank: made by the mesh, or by a cell.

On a rank, `dist.init_process_group` is wrapped (`DefaultGroup.wrap_init`): scripts made for torchrun call it, and the
mesh has done that already. A call that asks for what is there changes nothing; after `dist.destroy_process_group()` it
makes the default group again, over the runtime's store instead of a port. If a cell ends without that, as most such
scripts do, the mesh forms its own again.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import device_mesh as torch_device_mesh
from torch.distributed import distributed_c10d as c10d

from meshbook.concurrency.patches import patch
from meshbook.errors import UsageError
from meshbook.groups.disposal import dispose
from meshbook.groups.factory import GroupFactory, forget_unfinished
from meshbook.groups.meeting import meet
from meshbook.groups.store_client import LinkStore

DESTROYED = "this process group was destroyed: make it again on all its ranks."

_torch_init = dist.init_process_group
_torch_destroy: Callable[..., None] = dist.destroy_process_group
_torch_init_signature = inspect.signature(_torch_init)


class MeetingPoint(NamedTuple):
    """Where the ranks meet."""

    link: LinkStore
    scope: str
    """The prefix of this epoch's keys."""


class DefaultGroup:
    """What becomes of ``dist.group.WORLD``."""

    def __init__(self, factory: GroupFactory) -> None:
        self._factory = factory
        self.meeting_point: MeetingPoint | None = None
        """None while there is no link to the others."""
        self.master = ("", "")
        """MASTER_ADDR and MASTER_PORT as the mesh has set them."""
        self.lineage = ""
        """What it goes back to: ranks with the same can form it again in place."""
        self.is_kept = False
        """The mesh has formed it, and forms it again where cells leave none."""

    @property
    def formed(self) -> bool:
        """Whether there is a default group, ours or one that a cell made."""
        return bool(dist.is_initialized())

    @property
    def destroyed(self) -> bool:
        """Whether the mesh's was destroyed, and there is no other."""
        return self.is_kept and not self.formed

    def create(self, backend: str, store: Store, rank: int, world_size: int) -> None:
        """Make the mesh's own."""
        hook = sys.excepthook
        try:
            self._init_over(backend=backend, store=store, rank=rank, world_size=world_size)
        finally:
            sys.excepthook = hook  # torch wraps it once more for every group

    def retire_all(self, reason: str) -> None:
        """Give up the groups that are left; their handles then say ``reason``."""
        groups = list(self._factory.groups.values())
        dispose([inner for group in groups if (inner := group.retire(reason)) is not None])

    def _init_over(self, store: Store, **others: Any) -> None:
        """Have torch make one, with its keys right in ``store``, which is the runtime's."""
        self._factory.base_store = store
        try:
            self._init(store=store, **others)
        finally:
            self._factory.base_store = None  # where it was not made, the next one may be over another store

    def _init(self, **arguments: Any) -> None:
        """Have torch make one. What it leaves of one, interrupted, would give the next another name."""
        try:
            _torch_init(**arguments)
        except BaseException:
            if not self.formed:
                self.retire_all(DESTROYED)
                forget_unfinished()
            raise

    def destroy(self) -> None:
        """Have torch destroy it, without the note that a cell gets."""
        _torch_destroy()

    # ---- init_process_group in cells ----------------------------------------------------------------------------

    def wrap_init(self) -> None:
        """Put ours in the place of torch's two functions."""

        @functools.wraps(_torch_init)
        def init_process_group(*args: object, **kwargs: object) -> None:
            self._init_in_cell(_torch_init_signature.bind(*args, **kwargs).arguments)

        @functools.wraps(_torch_destroy)
        def destroy_process_group(*args: object, **kwargs: object) -> None:
            _torch_destroy(*args, **kwargs)
            if self.destroyed:
                _print_once("destroy_process_group: the process group of this mesh is formed again after this cell")

        for module in (dist, c10d, torch_device_mesh):
            patch(module, "init_process_group", init_process_group)
        for module in (dist, c10d):
            patch(module, "destroy_process_group", destroy_process_group)

    def _init_in_cell(self, wanted: dict[str, Any]) -> None:
        """`init_process_group` as cells see it; ``wanted`` has the arguments that were given."""
        if self.formed:
            _check_compatible(wanted)
            ranks = dist.get_world_size()
            note = f"init_process_group: the process group of this mesh ({ranks} ranks) is used; nothing to do"
            _print_once(note)
            return
        by_variables = wanted.get("store") is None and wanted.get("init_method") in (None, "env://")
        master_is_ours = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")) == self.master
        if not by_variables or not master_is_ours or wanted.get("backend") in ("mpi", "fake"):
            self._init(**wanted)
            return
        if self.meeting_point is None:
            raise UsageError("this rank has no link to the others any more: stop the mesh and spawn it again")
        self._init_at(self.meeting_point, wanted)

    def _init_at(self, point: MeetingPoint, wanted: dict[str, Any]) -> None:
        """Make it with the ranks that have met there."""
        if wanted.get("timeout") is not None:
            point.link.set_timeout(wanted["timeout"])
        given = {"rank": wanted.get("rank", -1), "world_size": wanted.get("world_size", -1)}
        rank, world_size = (number if number >= 0 else int(os.environ[name.upper()]) for name, number in given.items())
        scope = f"{point.scope}/init{world_size}"
        prefix = meet(point.link, scope, rank, world_size, lambda _: f"{scope}/{uuid.uuid4().hex[:12]}")
        store = PrefixStore(prefix, point.link)
        self._init_over(**{**wanted, "init_method": None, "store": store, "rank": rank, "world_size": world_size})
        self.lineage = prefix


def _check_compatible(wanted: dict[str, Any]) -> None:
    """Raise UsageError if an `init_process_group` asks for another group than the default one."""
    have = _backend_names(c10d.get_backend_config(dist.group.WORLD))
    backend = wanted.get("backend")
    missing = _backend_names(str(backend)) - have if backend is not None else set()
    again = "Call dist.destroy_process_group() on all ranks first, in the same cell, to make another."
    if missing:
        raise UsageError(
            f"the default process group is there already and uses {', '.join(sorted(have))}, not "
            f"{', '.join(sorted(missing))}. {again}"
        )
    here = {"world_size": dist.get_world_size(), "rank": dist.get_rank()}
    for name, value in here.items():
        if wanted.get(name, -1) not in (-1, value):
            raise UsageError(f"the default process group is there already with {name}={value}. {again}")


def _backend_names(backend: str) -> set[str]:
    """Return ``{"gloo", "nccl"}`` for ``cpu:gloo,cuda:nccl``."""
    return {part.rpartition(":")[2].lower() for part in backend.split(",")} - {"undefined"}


@functools.cache
def _print_once(text: str) -> None:
    print(text, file=sys.stderr)
