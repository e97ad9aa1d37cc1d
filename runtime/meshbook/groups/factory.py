"""The making of process groups on a rank, by torch's own functions: all of them are `AbortableGroup`s.

`init_process_group`, `new_group`, DeviceMesh and FSDP come through ``_new_process_group_helper``, which is replaced on
ranks (`GroupFactory`); all of them look up the entries that it makes in torch's registries. Backends other than gloo
and NCCL are left to torch. Axes of equal DeviceMeshes share groups, which are named by their ranks (`DeviceMeshes`).

`dist.init_process_group` is wrapped too (`DefaultGroup.wrap_init`): scripts made for torchrun call it, and the mesh has
done that already. A call that asks for the present group changes nothing; after `dist.destroy_process_group()` it makes
the default group again, over the runtime's store instead of a port. If a cell ends without that, as most such scripts
do, the mesh forms its own again.

Groups that are formed again go on under the same names, with fresh ranks too:

    ranks that have the same groups      they `rebuild`: their groups go on over the new epoch's keys
    the others, fresh processes          they `join`: they make those groups that they belong to, by the same names

Members need nothing of each other to rebuild a group but its name, which is part of its keys, so each group is rebuilt
at its own first operation. Only the default group is made and proved at once.

Then `repair_modules`: an iteration that was cut off must not spoil the next, and both DDP and FSDP keep track of where
an iteration is. A DDP module gets a new reducer on all ranks, since one that had got further than the others would have
other buckets. FSDP2 forgets the iteration by torch's own means and shards its parameters again. Parameters and
optimizer states are not touched; gradients of the lost iteration are for `zero_grad`.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
import uuid
import weakref
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import device_mesh as torch_device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from meshbook.concurrency.patches import patch
from meshbook.errors import LayoutError, UsageError
from meshbook.formatting import format_sizes
from meshbook.groups.backend_group import GroupSpec, NcclOptions, dispose
from meshbook.groups.gloo import connects_at_once
from meshbook.groups.group import AbortableGroup
from meshbook.groups.group_state import GroupState
from meshbook.groups.meeting import Agreement, RankMeeting, meet
from meshbook.groups.progress import Made
from meshbook.groups.store_client import LinkStore
from meshbook.source.location import Program
from meshbook.torch_internals import (
    PrefixStore,
    Store,
    fsdp_roots,
    register_comm_hook,
    register_process_group,
    unregister_all_process_groups,
)

if TYPE_CHECKING:
    from meshbook.torch_internals import FSDPParamGroup, FSDPState

_torch_helper: Any = c10d._new_process_group_helper
_torch_batch = dist.batch_isend_irecv


@functools.wraps(_torch_batch)
def _batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
    """Begin messages of NCCL together; torch's own function does so for groups of its own type alone."""
    is_on_cuda = all(isinstance(each, dist.P2POp) and each.tensor.is_cuda for each in p2p_op_list)
    groups = {each.group for each in p2p_op_list} if is_on_cuda else set()
    if len(groups) == 1 and isinstance(group := groups.pop(), AbortableGroup):
        return group.begin_together(p2p_op_list)
    return _torch_batch(p2p_op_list)


class GroupFactory:
    """Makes and knows the guarded groups of this rank."""

    def __init__(self, guard: GroupState, on_default_destroyed: Callable[[], object]) -> None:
        self.guard, self._on_default_destroyed = guard, on_default_destroyed
        self.groups: dict[str, AbortableGroup] = {}
        """Living groups by name. Keeps them: C++ keeps only its half, which has no Python methods."""
        self.base_store: Store | None = None
        """The store for the keys of the next default group, instead of the one that torch would make."""
        self._made_locally: dict[tuple[int, ...], int] = {}
        """The number of groups that members have made among themselves, those destroyed since included."""

    @property
    def made(self) -> tuple[Made, ...]:
        """Return how many groups this rank has made; from any thread."""
        return Made((), c10d._world.group_count), *(Made(*each) for each in list(self._made_locally.items()))

    def count_from(self, made: Collection[Made]) -> None:
        """Name the groups that are made from now on as the other ranks do."""
        world: Any = c10d._world
        self._made_locally = dict(made)
        world.group_count = self._made_locally.pop(())

    def install(self) -> None:
        """Have torch make guarded groups from now on. Idempotent."""
        patch(c10d, "_new_process_group_helper", self._helper)
        for module in (dist, c10d):
            patch(module, "batch_isend_irecv", _batch_isend_irecv)

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
        ranks = tuple(range(group_size)) if is_default else tuple(global_ranks_in_group)
        if is_default:
            self._made_locally = {}
        elif group_name == c10d._hash_ranks_to_str(global_ranks_in_group):
            # torch's name has a part that differs on ranks which have made other numbers of groups
            count = self._made_locally[ranks] = self._made_locally.get(ranks, 0) + 1
            group_name = f"local_{_label(ranks)}_{count}"
        recipe = GroupSpec(
            name=group_name,
            ranks=ranks,
            rank=group_rank,
            backend=str(backend),
            timeout_s=timeout.total_seconds(),
            description=group_desc or "undefined",
            tag=pg_tag or "",
        )
        if is_default and self.base_store is not None:
            store, self.base_store = self.base_store, None
        prefixed = PrefixStore(f"{group_name}/", store)
        group = self.make(recipe, prefixed, backend_options, device_id, is_default=is_default)
        if is_default or connects_at_once():
            group.live  # noqa: B018  # what cannot be made is told now
        return group, prefixed

    def make_of_ranks(self, world: AbortableGroup, ranks: tuple[int, ...], description: str) -> AbortableGroup:
        """The group of these ranks, this one among them, which its members find by its name, each when it needs it.

        world: the default group.
        """
        name = f"ranks_{_label(ranks)}"
        if (known := self.groups.get(name)) is not None:
            return known
        recipe = world.recipe._replace(name=name, ranks=ranks, rank=ranks.index(dist.get_rank()), tag="")
        state: Any = c10d._world
        group = self.make(recipe._replace(description=description), PrefixStore(f"{name}/", state.pg_map[world][1]))
        state.pg_group_ranks[group] = {member: index for index, member in enumerate(ranks)}
        return group

    def make(
        self,
        recipe: GroupSpec,
        store: Store,
        options: NcclOptions | None = None,
        device_id: torch.device | None = None,
        *,
        is_default: bool = False,
    ) -> AbortableGroup:
        """Make a group and enter it into torch's registries."""
        world: Any = c10d._world
        on_retired = functools.partial(self.groups.pop, recipe.name, None)
        on_destroyed = self._on_default_destroyed if is_default else lambda: None
        group = AbortableGroup(recipe, store, self.guard, options, device_id, on_retired, on_destroyed)
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
        return group


def _label(ranks: tuple[int, ...]) -> str:
    """Return ``0:8:2``, or ``0,1,5`` where the ranks lie in no row."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    is_even = ranks == tuple(range(ranks[0], ranks[0] + step * len(ranks), step))
    return f"{ranks[0]}:{ranks[-1] + step}:{step}" if is_even else ",".join(map(str, ranks))


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

    def tell_destroyed(self) -> None:
        """Say that `destroy_process_group` has destroyed the mesh's group for the rest of a cell only."""
        if self.is_kept:
            _note("destroy_process_group: the process group of this mesh is formed again after this cell")

    def _init_in_cell(self, wanted: dict[str, Any]) -> None:
        """`init_process_group` as cells see it; ``wanted`` has the arguments that were given."""
        if self.formed:
            _check_compatible(wanted)
            ranks = dist.get_world_size()
            note = f"init_process_group: the process group of this mesh ({ranks} ranks) is used; nothing to do"
            _note(note)
            return
        by_variables = wanted.get("store") is None and wanted.get("init_method") in (None, "env://")
        master_is_ours = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")) == self.master
        if not by_variables or not master_is_ours or wanted.get("backend") in (dist.Backend.MPI, "fake"):
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


def _note(text: str) -> None:
    """Print a note to a person's cell, once; a program prints what it prints under torchrun."""
    if not isinstance(sys.modules["__main__"], Program):
        _print_once(text)


_print_once = functools.cache(print)


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
    factory.count_from(agreement.made)
    dispose([inner for inner in former if inner is not None])
    if agreement.fresh:
        fresh = set(agreement.fresh)
        recipes = [group.recipe for group in groups if fresh & set(group.recipe.ranks)]
        link.set(f"{agreement.prefix}/known/{rank}", msgspec.json.encode(recipes))
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
    known = [msgspec.json.decode(text, type=list[GroupSpec]) for text in told]
    recipes = {recipe.name: recipe for each in known for recipe in each if rank in recipe.ranks}
    default = known[0][0]
    base = PrefixStore(agreement.prefix, link)
    make_default(default.backend, base)
    torch_world = c10d._world
    for recipe in recipes.values():
        if recipe.name == default.name:
            continue
        mine = recipe._replace(rank=recipe.ranks.index(rank))
        group = factory.make(mine, _store_of(mine, default, base))
        torch_world.pg_group_ranks[group] = {member: index for index, member in enumerate(recipe.ranks)}
    factory.count_from(agreement.made)


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
