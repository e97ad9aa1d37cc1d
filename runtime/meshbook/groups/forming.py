"""Process groups that are formed again where there were some: they go on under the same names, with fresh ranks too.

    ranks that have the same groups      they *rebuild*: their groups go on over the new epoch's keys
    the others, fresh processes          they *join*: they make those groups that they belong to, by the same names

Members need nothing of each other to rebuild a group but its name, which is part of its keys, so each group is rebuilt
at its own first operation. Only the default group is made and proved at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from meshbook.groups.backend_group import GroupSpec
from meshbook.groups.disposal import dispose
from meshbook.groups.factory import GroupFactory
from meshbook.groups.group import AbortableGroup
from meshbook.groups.meeting import Agreement
from meshbook.groups.store_client import LinkStore


class KnownGroups(msgspec.Struct, frozen=True):
    """What a rank with groups tells the fresh ones."""

    recipes: list[GroupSpec]
    """Groups that a fresh rank belongs to, in the order in which they were made."""
    made: int
    """How many groups torch has counted; the next one is named by this number."""


def rebuild(
    factory: GroupFactory, link: LinkStore, agreement: Agreement, rank: int, names: Collection[str] = ()
) -> list[AbortableGroup]:
    """Keep all groups, over new connections; tell fresh ranks of them. The default group is connected to.

    names: only those groups get new ones, unless ranks are fresh. Returns: the groups that have.
    """
    base = PrefixStore(agreement.prefix, link)
    world = _world_group()
    groups = [world] + [group for group in factory.groups.values() if group is not world]
    if names and not agreement.fresh:
        groups = [group for group in groups if group.recipe.name in names]
    torch_world = c10d._world
    former = []
    for group in groups:
        store = _store_of(group.recipe, world.recipe, base)
        former.append(group.renew(store))
        torch_world.pg_map[group] = (torch_world.pg_map[group][0], store)
    torch_world.pg_coalesce_state.clear()
    dispose([inner for inner in former if inner is not None])
    if agreement.fresh:
        fresh = set(agreement.fresh)
        recipes = [group.recipe for group in groups if fresh & set(group.recipe.ranks)]
        known = KnownGroups(recipes, torch_world.group_count)
        link.set(f"{agreement.prefix}/known/{rank}", msgspec.json.encode(known))
    if world in groups:
        world.live  # noqa: B018  # ranks connect
    return groups


def join(
    factory: GroupFactory,
    link: LinkStore,
    agreement: Agreement,
    rank: int,
    world_size: int,
    make_default: Callable[[str, Store], None],
) -> None:
    """On a fresh rank: make the groups that the others have, and that it belongs to.

    make_default: makes the default group with a backend, over a store.
    """
    survivors = [other for other in range(world_size) if other not in agreement.fresh]
    told = link.multi_get([f"{agreement.prefix}/known/{other}" for other in survivors])
    known = [msgspec.json.decode(text, type=KnownGroups) for text in told]
    recipes = {recipe.name: recipe for one in known for recipe in one.recipes if rank in recipe.ranks}
    default = known[0].recipes[0]
    base = PrefixStore(agreement.prefix, link)
    make_default(default.backend, base)
    torch_world = c10d._world
    for recipe in recipes.values():
        if recipe.name == default.name:
            continue
        mine = recipe._replace(rank=recipe.ranks.index(rank))
        group = factory.make(mine, _store_of(mine, default, base))
        torch_world.pg_group_ranks[group] = {member: index for index, member in enumerate(recipe.ranks)}
    torch_world.group_count = max(one.made for one in known)


def _world_group() -> AbortableGroup:
    world = dist.group.WORLD
    assert isinstance(world, AbortableGroup)
    return world


def _store_of(recipe: GroupSpec, default: GroupSpec, base: Store) -> Store:
    """The store of a group's keys, the same on all its members."""
    store = PrefixStore(f"{default.name}/", base)
    return store if recipe.name == default.name else PrefixStore(f"{recipe.name}/", store)
