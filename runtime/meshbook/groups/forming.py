"""Process groups that are formed again where there were some: they go on under the same names, with fresh ranks too.

    ranks that have the same groups      they *rebuild*: their groups go on over the new epoch's keys
    the others, fresh processes          they *join*: they make those groups that they belong to, by the same names

Members need nothing of each other to rebuild a group but its name, which is part of its keys, so each group is rebuilt
at its own first operation. Only the default group is made and proved at once.

Then `repair_modules`: an iteration that was cut off must not spoil the next, and both DDP and FSDP keep track of where
an iteration is. A DDP module gets a new reducer on all ranks, since one that had got further than the others would have
other buckets. FSDP2 forgets the iteration by torch's own means and shards its parameters again. Parameters and
optimizer states are not touched; gradients of the lost iteration are for `zero_grad`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from meshbook.groups.backend_group import GroupSpec, dispose
from meshbook.groups.factory import GroupFactory
from meshbook.groups.group import AbortableGroup
from meshbook.groups.meeting import Agreement
from meshbook.groups.store_client import LinkStore
from meshbook.torch_internals import PrefixStore, Store, fsdp_roots, register_comm_hook

if TYPE_CHECKING:
    from meshbook.torch_internals import FSDPParamGroup, FSDPState


class KnownGroups(msgspec.Struct, frozen=True):
    """The groups of a rank, as it tells them to the fresh ones."""

    recipes: list[GroupSpec]
    """Groups that a fresh rank belongs to, in the order in which they were made."""
    made: int
    """The number of groups that torch has counted; the next one is named by it."""


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
    """Make, on a fresh rank, the groups that the others have and that it belongs to.

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


_ddp_modules: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


@functools.cache
def watch_modules() -> None:
    """Remember DDP modules from now on, by torch's hook for modules that become a part of others. Idempotent."""
    register_module_module_registration_hook(_remember_ddp)


def _remember_ddp(module: torch.nn.Module, _name: str, _part: object) -> None:
    if isinstance(module, DistributedDataParallel):
        _ddp_modules.add(module)


def repair_modules(groups: Collection[object] | None = None) -> None:
    """Make DDP and FSDP2 modules ready for another iteration; names on stderr the modules that must be made again.

    groups: only modules that use one of these.
    """
    broken = []
    for ddp in list(_ddp_modules):
        if not hasattr(ddp, "reducer") or (groups is not None and ddp.process_group not in groups):
            continue  # one without a reducer was interrupted as it was made
        try:
            _renew_reducer(ddp)
        except Exception as error:
            broken.append(f"DistributedDataParallel({type(ddp.module).__name__}): {error}")
    for state in fsdp_roots():
        if groups is not None and _groups_of(state).isdisjoint(groups):
            continue
        try:
            _forget_iteration(state)
        except Exception as error:
            names = ", ".join(type(module).__name__ for module in getattr(state, "_modules", ()))
            broken.append(f"fully_shard({names}): {error}")
    for text in broken:
        print(f"the process groups were formed again; make this module again on all ranks: {text}", file=sys.stderr)


def _renew_reducer(ddp: Any) -> None:
    """Give a DDP module a new reducer, as unpickling it does; no collective."""
    parameters, sparse = ddp._build_params_for_reducer()
    ddp._has_rebuilt_buckets = False
    ddp._ddp_init_helper(parameters, sparse, ddp._build_debug_param_to_name_mapping(parameters), ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    for hook, state in getattr(ddp, "_comm_hooks", ()):
        register_comm_hook(ddp.reducer, state, hook)


def _groups_of(root: FSDPState) -> set[object]:
    """The process groups over which a root module of FSDP2, and those below it, are sharded and replicated."""
    infos = [group.mesh_info for state in root._state_ctx.all_states for group in _parameter_groups(state)]
    names = ("shard_process_group", "replicate_process_group")
    return {getattr(info, name) for info in infos for name in names if hasattr(info, name)}


def _forget_iteration(root: FSDPState) -> None:
    for state in root._state_ctx.all_states:
        for group in _parameter_groups(state):
            group._all_gather_result = None  # an operation of the former groups, which nobody can wait for
    if not hasattr(root, "_reset_iter_state"):
        raise RuntimeError(f"torch {torch.__version__} cannot forget an iteration that was cut off")
    root._reset_iter_state()


def _parameter_groups(state: FSDPState) -> list[FSDPParamGroup]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)
