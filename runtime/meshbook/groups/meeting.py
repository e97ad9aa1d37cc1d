"""The meeting of a mesh's ranks to form process groups, and the variables that torchrun would have set.

Ranks meet in the runtime's store, where waiting can be interrupted and a round that failed is no burden to the next.
No port is involved; MASTER_ADDR and MASTER_PORT are for code that uses them itself (torch.distributed.rpc, say).

    store    epoch<E>/want/<rank>, epoch<E>/go/<nonce>     the ranks meet (`meet`)
             epoch<E>/<id>/...                             one default group and all groups made from it

Every rank that comes says which groups it has (`Greeting`); rank 0 decides for all (`Agreement`):

    nobody has groups, or they differ        all make new ones, and old handles are of no use
    some have the same ones                  they *rebuild*, and fresh processes *join* (`meshbook.groups.factory`)
"""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta

import msgspec
from torch.distributed import DistStoreError

from meshbook.errors import SpawnError
from meshbook.formatting import name_ranks
from meshbook.groups.progress import Made
from meshbook.groups.reach import LOOPBACK, Doorway, Roads, find_ways, open_door, other_hosts, use_way
from meshbook.groups.store_client import DEFAULT_TIMEOUT_S, LinkStore, Rpc
from meshbook.system.descriptors import open_above
from meshbook.system.interfaces import Interface, loopback_address, own_address
from meshbook.wire.messages import Identity


class Greeting(msgspec.Struct, frozen=True):
    """The first word of a rank that comes to form groups."""

    lineage: str
    """Names the forming that its groups go back to; empty without groups of this many ranks."""
    made: tuple[Made, ...] = ()
    door: Doorway | None = None
    """The place to find out how hosts reach each other: that of its host, from the first rank there."""


class Agreement(msgspec.Struct, frozen=True):
    """The answer of rank 0 to the ranks that form groups again."""

    prefix: str
    """The prefix of the keys of this epoch's groups."""
    address: str
    port: str
    lineage: str
    fresh: tuple[int, ...]
    """Ranks without groups, where others have them; all ranks make new groups if all are fresh."""
    made: tuple[Made, ...] = ()
    """The counts from which all ranks go on: a call may have failed on some before they made a group."""
    doors: tuple[Doorway, ...] = ()


def agree(greetings: Sequence[Greeting], prefix: str, master: tuple[str, str]) -> Agreement:
    """Decide, on rank 0. greetings: by rank."""
    lineages = {greeting.lineage for greeting in greetings} - {""}
    doors = tuple(greeting.door for greeting in greetings if greeting.door is not None)
    if len(lineages) == 1:
        fresh = tuple(rank for rank, greeting in enumerate(greetings) if not greeting.lineage)
        counts = sorted(each for greeting in greetings for each in greeting.made)  # the highest of equal members last
        made = tuple(Made(*each) for each in dict(counts).items())
        return Agreement(prefix, *master, lineages.pop(), fresh, made, doors)
    return Agreement(prefix, *master, prefix, tuple(range(len(greetings))), doors=doors)


class RankMeeting:
    """The link over which a rank meets the others, and their findings about the roads between hosts."""

    def __init__(self, roads: Roads) -> None:
        """roads: learns to which hosts there are some."""
        self._roads = roads
        self.link: LinkStore | None = None
        self.scope = ""
        """The prefix of this epoch's keys."""
        self._ways: dict[int, Interface] = {}
        """The address by which each host is known to the others, with its interface; by the host's number."""

    def meet(
        self,
        rpc: Rpc,
        place: Identity,
        epoch: int,
        timeout_s: float,
        lineage: str,
        made: tuple[Made, ...],
        *,
        keep_link: bool,
        reaches: bool,
        check_begun: Callable[[], object],
    ) -> Agreement:
        """Wait for the other ranks. keep_link: there are groups that go on over it. reaches: the hosts are to reach
        each other. check_begun: raises if the groups were aborted since this began; an abort that comes later finds
        the link, and ends its waits.

        Raises: SpawnError if not all ranks came within ``timeout_s``.
        """
        self.scope = f"epoch{epoch}"
        former = self.link if not keep_link else None
        link = self.link if keep_link and self.link is not None else LinkStore(rpc, timeout_s)
        link.set_timeout(timedelta(seconds=timeout_s))
        self.link = link
        check_begun()

        def decide(greetings: list[str]) -> str:
            told = [msgspec.json.decode(text, type=Greeting) for text in greetings]
            prefix = f"{self.scope}/{uuid.uuid4().hex[:12]}"
            return msgspec.json.encode(agree(told, prefix, choose_master(place.hosts == 1))).decode()

        is_first = reaches and place.hosts > 1 and place.local_rank == 0
        with open_door(place.host_rank, place.host) if is_first else contextlib.nullcontext() as door:
            greeting = msgspec.json.encode(Greeting(lineage, made, door)).decode()
            try:
                agreed = meet(link, self.scope, place.rank, place.world_size, decide, greeting)
                agreement = msgspec.json.decode(agreed, type=Agreement)
                if place.hosts == 1 or reaches:  # each time: a road may have gone since
                    self._ways = find_ways(link, self.scope, agreement.doors, door)
                    use_way(self._ways.get(place.host_rank))
                    self._roads.hosts = other_hosts(agreement.doors, self._ways, place.host_rank)
            except DistStoreError as error:
                raise SpawnError(f"the process group did not form: {error}") from error
        if former is not None:
            former.abort("the process groups were formed again")
        link.set_timeout(timedelta(seconds=DEFAULT_TIMEOUT_S))
        return agreement

    def master(self, agreement: Agreement) -> tuple[str, str]:
        """MASTER_ADDR and MASTER_PORT."""
        return self._ways[0].address if self._ways else agreement.address, agreement.port

    def close(self) -> None:
        """Let go of the link."""
        if self.link is not None:
            self.link.close()
            self.link = None


def meet(
    store: LinkStore, scope: str, rank: int, world_size: int, decide: Callable[[list[str]], str], greeting: str = ""
) -> str:
    """Wait until all ranks are here; return the decision of rank 0, given the greetings of all ranks in order.

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


def choose_master(on_one_host: bool) -> tuple[str, str]:
    """Return an address of this host that the others can reach, and a port that is free now.

    The port cannot be held: torch's TCPStore must bind it itself, if anybody ever starts one.
    """
    with open_above(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    return loopback_address() if on_one_host else own_address(), port


def set_environment(place: Identity, master: tuple[str, str]) -> dict[str, str]:
    """Set torchrun's variables, and those that gloo and NCCL read when the first group is made; the user's own choices
    stay.

    master: MASTER_ADDR and MASTER_PORT. Returns: torchrun's variables.
    """
    torchrun = {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.host_rank),
        "GROUP_WORLD_SIZE": str(place.hosts),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": master[1],
    }
    os.environ.update(torchrun)
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if place.hosts == 1:  # gloo then uses the loopback interface, which needs no name lookup
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    elif os.environ.get("GLOO_SOCKET_IFNAME") == LOOPBACK:  # set above, before the mesh grew to more hosts
        del os.environ["GLOO_SOCKET_IFNAME"]
    if place.device.startswith("cuda"):  # else a collective that times out ends the process, state and all
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    return torchrun
