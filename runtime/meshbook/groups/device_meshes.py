"""The torch DeviceMeshes of one rank: equal axes share groups, which are named by their ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from meshbook.errors import LayoutError
from meshbook.formatting import format_sizes
from meshbook.groups.factory import GroupFactory
from meshbook.groups.group import AbortableGroup

_AXIS_GROUP = "mesh_"


class DeviceMeshes:
    """Those over the default group that there is."""

    def __init__(self, factory: GroupFactory) -> None:
        self._factory = factory
        self._world: object = None
        """The default group that they belong to."""
        self._meshes: dict[tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]], DeviceMesh] = {}

    def get(
        self, device_type: str, axes: Sequence[str], sizes: Sequence[int], ranks: Sequence[int] | None
    ) -> DeviceMesh:
        """What `meshbook.groups.rank_groups.RankGroups.device_mesh` returns; there is a default group."""
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
