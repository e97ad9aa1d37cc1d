"""How ranks meet to form process groups, also where there were some, and the variables that torchrun would have set.

Ranks meet in the runtime's store, where waiting can be interrupted and a round that failed is no burden to the next.
No port is involved; MASTER_ADDR and MASTER_PORT are for code that uses them itself (torch.distributed.rpc, say).

Every rank that comes says which groups it has (`Greeting`); rank 0 decides for all (`Agreement`):

    nobody has groups, or they differ        all make new ones, and old handles are of no use
    some have the same ones                  they *rebuild*: their groups go on over the new epoch's keys
        the others are fresh processes       they *join*: they make those groups that they belong to, by the same names

Members need nothing of each other to rebuild a group but its name, which is part of its keys, so each group is rebuilt
at its own first operation. Only the default group is made and proved at once.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Collection, Sequence

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistStoreError
from torch.distributed import distributed_c10d as c10d

from meshbook.formatting import name_ranks
from meshbook.groups.backend_group import GroupSpec
from meshbook.groups.disposal import dispose
from meshbook.groups.factory import GroupFactory
from meshbook.groups.group import AbortableGroup
from meshbook.groups.reach import LOOPBACK, Doorway
from meshbook.groups.store_client import LinkStore
from meshbook.system.descriptors import open_above
from meshbook.system.processes import loopback_address, own_address
from meshbook.wire.messages import Identity


def meet(
    store: LinkStore, scope: str, rank: int, world_size: int, decide: Callable[[list[str]], str], greeting: str = ""
) -> str:
    """Wait until all ranks are here; return what rank 0 decides, given the greetings of all ranks in order.

    Rank 0 answers each rank by the number it came with, so a round that was interrupted leaves nothing that the next
    one could take for its own: a rank that comes again has a new number, and one that gives up withdraws.
    Raises: DistStoreError that names who did not come.
    """
    if world_size == 1:
        return decide([greeting])
    if rank == 0:
        wanted = {other: f"{scope}/want/{other}" for other in range(1, world_size)}
        try:
            came = [text.decode().partition(" ") for text in store.multi_get(list(wanted.values()))]
        except DistStoreError as error:
            late = [other for other, key in wanted.items() if not store.check([key])]
            raise DistStoreError(f"{name_ranks(late)} did not come ({error})") from None
        decision = decide([greeting, *(text for _, _, text in came)])
        store.delete_keys(list(wanted.values()))
        store.multi_set([f"{scope}/go/{number}" for number, _, _ in came], [decision] * len(came))
        return decision
    number = uuid.uuid4().hex
    try:
        store.set(f"{scope}/want/{rank}", f"{number} {greeting}")
        return store.get(f"{scope}/go/{number}").decode()
    except BaseException:
        store.withdraw(f"{scope}/want/{rank}")
        raise


def set_environment(place: Identity, master: tuple[str, str]) -> None:
    """Set torchrun's variables, and what gloo and NCCL read when the first group is made; the user's own choices stay.

    master: MASTER_ADDR and MASTER_PORT.
    """
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_world_size),
        GROUP_RANK=str(place.host_rank),
        GROUP_WORLD_SIZE=str(place.hosts),
        ROLE_NAME="default",
        ROLE_RANK=str(place.rank),
        ROLE_WORLD_SIZE=str(place.world_size),
        MASTER_ADDR=master[0],
        MASTER_PORT=master[1],
    )
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if place.hosts == 1:  # gloo then uses the loopback interface, which needs no name lookup
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    elif os.environ.get("GLOO_SOCKET_IFNAME") == LOOPBACK:  # set above, before the mesh grew to more hosts
        del os.environ["GLOO_SOCKET_IFNAME"]
    if place.device.startswith("cuda"):  # else a collective that times out ends the process, state and all
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")


def choose_master(on_one_host: bool) -> tuple[str, str]:
    """Return an address of this host that the others can reach, and a port that is free now.

    The port cannot be held: torch's TCPStore must bind it itself, if anybody ever starts one.
    """
    with open_above(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    return loopback_address() if on_one_host else own_address(), port


class Greeting(msgspec.Struct, frozen=True):
    """What a rank says when it comes to form groups."""

    lineage: str
    """Names the forming that its groups go back to; empty without groups of this many ranks."""
    door: Doorway | None = None
    """Where hosts are to find out how they reach each other: that of its host, from the first rank there."""


class Agreement(msgspec.Struct, frozen=True):
    """What rank 0 answers to the ranks that form groups again."""

    prefix: str
    """Of the keys of this epoch's groups."""
    address: str
    port: str
    lineage: str
    fresh: tuple[int, ...]
    """Ranks without groups, where others have them; all ranks make new groups if all are fresh."""
    doors: tuple[Doorway, ...] = ()


class KnownGroups(msgspec.Struct, frozen=True):
    """What a rank with groups tells the fresh ones."""

    recipes: list[GroupSpec]
    """Groups that a fresh rank belongs to, in the order in which they were made."""
    made: int
    """How many groups torch has counted; the next one is named by this number."""


def agree(greetings: Sequence[Greeting], prefix: str, master: tuple[str, str]) -> Agreement:
    """On rank 0: decide. greetings: by rank."""
    lineages = {greeting.lineage for greeting in greetings} - {""}
    doors = tuple(greeting.door for greeting in greetings if greeting.door is not None)
    if len(lineages) == 1:
        fresh = tuple(rank for rank, greeting in enumerate(greetings) if not greeting.lineage)
        return Agreement(prefix, *master, lineages.pop(), fresh, doors)
    return Agreement(prefix, *master, prefix, tuple(range(len(greetings))), doors)


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
