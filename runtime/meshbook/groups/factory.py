"""The making of process groups on a rank, by torch's own functions: all of them are `AbortableGroup`s.

`init_process_group`, `new_group`, DeviceMesh and FSDP come through ``_new_process_group_helper``, which is replaced on
ranks (`GroupFactory`); all of them look up the entries that it makes in torch's registries. Backends other than gloo
and NCCL are left to torch. Axes of equal DeviceMeshes share groups, which are named by their ranks (`DeviceMeshes`).

`dist.init_process_group` is wrapped too (`DefaultGroup.wrap_init`): scripts made for torchrun call it, and the mesh has
done that already. A call that asks for the present group changes nothing; after `dist.destroy_process_group()` it makes
the default group again, over the runtime's store instead of a port. If a cell ends without that, as most such scripts
do, the mesh forms its own again.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh as torch_device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from meshbook.concurrency.patches import patch
from meshbook.errors import LayoutError, UsageError
from meshbook.formatting import format_sizes
from meshbook.groups.backend_group import GroupSpec, NcclOptions, dispose
from meshbook.groups.gloo import connects_at_once
from meshbook.groups.group import AbortableGroup
from meshbook.groups.group_state import GroupState
from meshbook.groups.meeting import RankMeeting, meet
from meshbook.torch_internals import PrefixStore, Store, register_process_group, unregister_all_process_groups

_torch_helper: Any = c10d._new_process_group_helper


class GroupFactory:
    """Makes and knows the guarded groups of this rank."""

    def __init__(self, guard: GroupState) -> None:
        self.guard = guard
        self.groups: dict[str, AbortableGroup] = {}
        """Living groups by name. Keeps them: C++ keeps only its half, which has no Python methods."""
        self.base_store: Store | None = None
        """The store for the keys of the next default group, instead of the one that torch would make."""
        self.on_default_destroyed: Callable[[], object] = lambda: None

    def install(self) -> None:
        """Have torch make guarded groups from now on. Idempotent."""
        patch(c10d, "_new_process_group_helper", self._helper)

    def _helper(
        self,
        group_size: int,
        group_rank: int,
        global_ranks_in_group: list[int],
        backend: str,
        store: Store,
        group_name: str,
        backend_options: NcclOptions | None = None,
        timeout: timedelta = c10d.default_pg_timeout,
        pg_tag: str | None = None,
        device_id: torch.device | None = None,
        group_desc: str | None = None,
        **more: object,
    ) -> Any:
        names = set(c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map().values())
        if any(more.values()) or not names <= {"gloo", "nccl"}:  # newer versions of torch name what they do not use
            return _torch_helper(
                group_size, group_rank, global_ranks_in_group, backend, store, group_name, backend_options, timeout,
                pg_tag, device_id, group_desc, **more,
            )  # fmt: skip
        if group_name in c10d._world.pg_names.values():
            raise ValueError(f'there is a process group with the name "{group_name}" already')
        if pg_tag and (same := c10d._find_pg_by_ranks_and_tag(pg_tag, global_ranks_in_group)):
            return same, c10d._world.pg_map[same][1]
        is_default = not global_ranks_in_group
        if not is_default and dist.get_rank() not in global_ranks_in_group:
            return c10d.GroupMember.NON_GROUP_MEMBER, None
        recipe = GroupSpec(
            name=group_name,
            ranks=tuple(range(group_size)) if is_default else tuple(global_ranks_in_group),
            rank=group_rank,
            backend=str(backend),
            timeout_s=timeout.total_seconds(),
            description=group_desc or "undefined",
            tag=pg_tag or "",
        )
        if is_default and self.base_store is not None:
            store, self.base_store = self.base_store, None
        prefixed = PrefixStore(f"{group_name}/", store)
        group = self.make(recipe, prefixed, backend_options, device_id)
        if is_default:
            group.on_destroyed = self.on_default_destroyed
        if is_default or connects_at_once():
            group.live  # noqa: B018  # what cannot be made is told now
        return group, prefixed

    def make_of_ranks(self, world: AbortableGroup, ranks: tuple[int, ...], description: str) -> AbortableGroup:
        """The group of these ranks, this one among them, which its members find by its name, each when it needs it.

        world: the default group.
        """
        step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        is_even = ranks == tuple(range(ranks[0], ranks[0] + step * len(ranks), step))
        name = f"ranks_{ranks[0]}:{ranks[-1] + step}:{step}" if is_even else f"ranks_{','.join(map(str, ranks))}"
        if (known := self.groups.get(name)) is not None:
            return known
        recipe = world.recipe._replace(name=name, ranks=ranks, rank=ranks.index(dist.get_rank()), tag="")
        state: Any = c10d._world
        group = self.make(recipe._replace(description=description), PrefixStore(f"{name}/", state.pg_map[world][1]))
        state.pg_group_ranks[group] = {member: index for index, member in enumerate(ranks)}
        return group

    def make(
        self, recipe: GroupSpec, store: Store, options: NcclOptions | None = None, device_id: torch.device | None = None
    ) -> AbortableGroup:
        """Make a group and enter it into torch's registries."""
        world: Any = c10d._world
        group = AbortableGroup(recipe, store, self.guard, options, device_id)
        world.pg_map[group] = (c10d.Backend(recipe.backend), store)
        world.pg_names[group] = recipe.name
        world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(recipe.backend)))
        register_process_group(world.pg_names[group], group)
        tag = f"user:{recipe.tag}" if recipe.tag else f"ptd:{recipe.name}"
        if not recipe.tag:
            world.tags_to_pg.setdefault("", []).append(group)
        world.tags_to_pg.setdefault(tag, []).append(group)
        world.pg_to_tag[group] = tag
        self.groups[recipe.name] = group
        group.on_retired = lambda: self.groups.pop(recipe.name, None)
        return group


def forget_unfinished() -> None:
    """Empty torch's registries where there is no default group; it counts the names of groups from 0 again."""
    world: Any = c10d._world
    for registry in (
        world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag, world.tags_to_pg,
        world.pg_coalesce_state,
    ):  # fmt: skip
        registry.clear()
    unregister_all_process_groups()
    world.group_count = 0


_AXIS_GROUP = "mesh_"


class DeviceMeshes:
    """The DeviceMeshes over the present default group."""

    def __init__(self, factory: GroupFactory) -> None:
        self._factory = factory
        self._world: object = None
        """The default group that they belong to."""
        self._meshes: dict[tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]], DeviceMesh] = {}

    def get(
        self, device_type: str, axes: Sequence[str], sizes: Sequence[int], ranks: Sequence[int] | None
    ) -> DeviceMesh:
        """Return the mesh of `meshbook.groups.rank_groups.RankGroups.device_mesh`; there is a default group."""
        axes, sizes = (tuple(axes), tuple(sizes)) if axes else (("rank",), (1,))
        ranks = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        if math.prod(sizes) != len(ranks):
            raise LayoutError(f"{format_sizes(dict(zip(axes, sizes, strict=True)))} is no layout of {len(ranks)} ranks")
        if self._world is not dist.group.WORLD:
            self.forget()
            self._world = dist.group.WORLD
        if (axes, sizes, ranks) not in self._meshes:
            self._meshes[axes, sizes, ranks] = self._build(device_type, axes, sizes, ranks)
        return self._meshes[axes, sizes, ranks]

    def _build(
        self, device_type: str, axes: tuple[str, ...], sizes: tuple[int, ...], ranks: tuple[int, ...]
    ) -> DeviceMesh:
        laid = torch.tensor(ranks, dtype=torch.int, device="cpu").view(sizes)
        groups = [self._axis_group(laid, dim, axes[dim]) for dim in range(len(axes))]
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=axes)
        return DeviceMesh.from_group(groups, device_type, laid, mesh_dim_names=axes)

    def _axis_group(self, ranks: torch.Tensor, dim: int, axis: str) -> dist.ProcessGroup:
        """This rank's group along ``dim``."""
        rows, me = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist(), dist.get_rank()
        mine = tuple(next(row for row in rows if me in row))
        world: dist.ProcessGroup = c10d._get_default_group()
        if mine == tuple(range(dist.get_world_size())):
            return world
        if not isinstance(world, AbortableGroup):  # of a backend that is left to torch
            made: dist.ProcessGroup = dist.new_group(list(mine), use_local_synchronization=True)
            return made
        return self._factory.make_of_ranks(world, mine, f"{_AXIS_GROUP}{axis}")

    def forget(self) -> None:
        """Their default group has gone."""
        self._world = None
        self._meshes.clear()


DESTROYED = "this process group was destroyed: make it again on all its ranks."

_torch_init = dist.init_process_group
_torch_init_signature = inspect.signature(_torch_init)


class DefaultGroup:
    """The owner of ``dist.group.WORLD`` on a rank."""

    def __init__(self, factory: GroupFactory, meeting: RankMeeting) -> None:
        self._factory, self._meeting = factory, meeting
        factory.on_default_destroyed = self._tell_destroyed
        self.master = ("", "")
        """MASTER_ADDR and MASTER_PORT as the mesh has set them."""
        self.lineage = ""
        """The forming that the group goes back to: ranks with the same lineage can form it again in place."""
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
        """Have torch make a group, and remove its traces if interrupted: they would change the next group's name."""
        try:
            _torch_init(**arguments)
        except BaseException:
            if not self.formed:
                self.retire_all(DESTROYED)
                forget_unfinished()
            raise

    # ---- init_process_group in cells ----------------------------------------------------------------------------

    def wrap_init(self) -> None:
        """Put ours in the place of torch's function."""

        @functools.wraps(_torch_init)
        def init_process_group(*args: object, **kwargs: object) -> None:
            self._init_in_cell(_torch_init_signature.bind(*args, **kwargs).arguments)

        for module in (dist, c10d, torch_device_mesh):
            patch(module, "init_process_group", init_process_group)

    def _tell_destroyed(self) -> None:
        """Say that `destroy_process_group` has destroyed the mesh's group for the rest of a cell only."""
        if self.is_kept:
            _print_once("destroy_process_group: the process group of this mesh is formed again after this cell")

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
        link = self._meeting.link
        if link is None:
            raise UsageError("this rank has no link to the others any more: stop the mesh and spawn it again")
        if wanted.get("timeout") is not None:
            link.set_timeout(wanted["timeout"])
        given = {"rank": wanted.get("rank", -1), "world_size": wanted.get("world_size", -1)}
        rank, world_size = (number if number >= 0 else int(os.environ[name.upper()]) for name, number in given.items())
        scope = f"{self._meeting.scope}/init{world_size}"
        prefix = meet(link, scope, rank, world_size, lambda _: f"{scope}/{uuid.uuid4().hex[:12]}")
        store = PrefixStore(prefix, link)
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
