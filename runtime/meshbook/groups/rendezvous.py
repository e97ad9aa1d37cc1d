"""How ranks meet before they form a group, and the variables that torchrun would have set for them.

Ranks meet in the runtime's store, where waiting can be interrupted and a round that failed is no burden to the next.
No port is involved; MASTER_ADDR and MASTER_PORT are for code that uses them itself (torch.distributed.rpc, say).
"""

from __future__ import annotations

import os
import socket
import sys
import uuid
from collections.abc import Callable

from torch.distributed import DistStoreError

from meshbook.formatting import name_ranks
from meshbook.groups.store_client import LinkStore
from meshbook.system.descriptors import open_above
from meshbook.system.processes import loopback_address, own_address
from meshbook.wire.messages import Identity

_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


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
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    elif os.environ.get("GLOO_SOCKET_IFNAME") == _LOOPBACK:  # set above, before the mesh grew to more hosts
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
