"""Has torch make `AbortableGroup`s: the one function that makes all its groups is replaced on ranks.

`init_process_group`, `new_group`, DeviceMesh and FSDP come through ``_new_process_group_helper``; what it enters into
torch's registries is what all of them look up. Backends other than gloo and NCCL are left to torch.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    PrefixStore,
    Store,
    _register_process_group,
    _unregister_all_process_groups,
)
from torch.distributed import distributed_c10d as c10d

from meshbook.concurrency.patches import patch
from meshbook.groups.backend_group import GroupSpec, NcclOptions
from meshbook.groups.gloo import connects_at_once
from meshbook.groups.group import AbortableGroup
from meshbook.groups.group_state import GroupState

_torch_helper: Any = c10d._new_process_group_helper


class GroupFactory:
    """Makes and knows the guarded groups of this rank."""

    def __init__(self, guard: GroupState) -> None:
        self.guard = guard
        self.groups: dict[str, AbortableGroup] = {}
        """Living groups by name. Keeps them: C++ keeps only its half, which has no Python methods."""
        self.base_store: Store | None = None
        """Where the keys of the next default group go, instead of where torch would put them."""

    def install(self) -> None:
        """From now on torch makes guarded groups. Idempotent."""
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
        _register_process_group(world.pg_names[group], group)
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
    _unregister_all_process_groups()
    world.group_count = 0
