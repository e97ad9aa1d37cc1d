"""Programs that were written for torchrun, on the processes of a mesh: Monarch's names for it.

    setup_torch_elastic_env(procs)                     # RANK, WORLD_SIZE, MASTER_ADDR and the others, on every process

    trainers = procs.spawn("trainers", SPMDActor)      # or: a script, or module, as the main program of every process
    first = trainers.slice(**dict.fromkeys(procs.sizes, 0))
    address, port = first.get_host_port.call_one(None).get()
    trainers.main.call(address, port, ["train.py", "--lr", "0.001"]).get()

The prints of a script appear under the cell, by rank. It runs on the thread of its actor, so it cannot set handlers of
signals; an interrupt of the call ends it. Where the mesh has its process group, ``init_process_group`` gives it that
one; elsewhere each run needs a port of its own.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from meshbook.actor import Actor, context, endpoint
from meshbook.errors import UsageError
from meshbook.shell.scripts import read_script, run_script
from meshbook.system.interfaces import loopback_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshbook.mesh.proc_mesh import ProcMesh

__all__ = ["SPMDActor", "setup_torch_elastic_env", "setup_torch_elastic_env_async"]


HOSTS = "hosts"
"""The axis whose places are machines to torchrun's variables, also where several of them are this one."""


class SPMDActor(Actor):
    """A process of a program, as torchrun starts it; its rank is its place among the actors spawned together."""

    @endpoint
    def get_host_port(self, use_ipaddr: object = None) -> tuple[str, int]:
        """Return an address of this machine and a free port there, for MASTER_ADDR and MASTER_PORT.

        use_ipaddr: None for the name of the host, else ``"IPv4"`` or ``"IPv6"``, or an object with that in its name.
        """
        with socket.socket() as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
        return _address(use_ipaddr), port

    @endpoint
    def setup_env(self, master_addr: str, master_port: int) -> None:
        """Set torchrun's variables in this process."""
        _set_variables(master_addr, master_port)

    @endpoint
    def main(self, master_addr: str, master_port: int, script_args: Sequence[str]) -> bool:
        """Run ``["script.py", ...]`` or ``["-m", "module", ...]`` as ``__main__``; True when it has ended well.

        Raises: the errors of the script; UsageError where nothing is named; ScriptExit for an exit code other than 0.
        """
        _set_variables(master_addr, master_port)
        run_script(read_script([str(each) for each in script_args]), {}, lambda names: None)
        return True


def _set_variables(master_addr: str, master_port: int) -> None:
    here = context().actor_instance.rank
    rank, world = here.rank, here.extent.nelements
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_world = min(int(os.environ.get("LOCAL_WORLD_SIZE", world)), world)
    group_rank = os.environ.get("GROUP_RANK", rank // local_world)
    groups = os.environ.get("GROUP_WORLD_SIZE", -(-world // local_world))
    if HOSTS in here and local_world > world // here.extent[HOSTS]:  # several of them are this machine
        groups, group_rank = here.extent[HOSTS], here[HOSTS]
        local_rank, local_world = 0, world // here.extent[HOSTS]
        for axis, size in here.extent.items():  # its place among those of its host
            if axis != HOSTS:
                local_rank = local_rank * size + here[axis]
    variables = {
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": master_port,
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world,
        "GROUP_RANK": group_rank,
        "GROUP_WORLD_SIZE": groups,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": "rank",
    }
    os.environ.update({name: str(value) for name, value in variables.items()})


def _address(use_ipaddr: object) -> str:
    """Raises: UsageError for a name of no family of addresses."""
    host = socket.gethostname()
    if use_ipaddr is None:
        try:
            socket.getaddrinfo(host, None)
        except OSError:  # a name that nobody knows
            return loopback_address()
        return host
    wanted = str(getattr(use_ipaddr, "name", use_ipaddr)).lower()
    families = {"ipv4": socket.AF_INET, "ipv6": socket.AF_INET6}
    if wanted not in families:
        raise UsageError(f'use_ipaddr is None, "IPv4" or "IPv6", not {use_ipaddr!r}.')
    return str(socket.getaddrinfo(host, None, families[wanted])[0][4][0])


def _spawn(procs: ProcMesh) -> tuple[Any, Any]:
    """Return the actors, and the first of them."""
    actors: Any = procs.spawn("torch_elastic_env", SPMDActor)
    return actors, actors.slice(**dict.fromkeys(procs.sizes, 0))


def setup_torch_elastic_env(
    proc_mesh: ProcMesh, master_addr: str | None = None, master_port: int | None = None, use_ipaddr: object = None
) -> None:
    """Set torchrun's variables on all processes of a mesh; the first one is the master.

    master_addr, master_port: both, or neither: then one that is free. use_ipaddr: as `SPMDActor.get_host_port`.
    """
    _check_master(master_addr, master_port)
    actors, first = _spawn(proc_mesh)
    if master_addr is None:
        master_addr, master_port = first.get_host_port.call_one(use_ipaddr).get()
    actors.setup_env.call(master_addr, master_port).get()
    actors.stop().get()


async def setup_torch_elastic_env_async(
    proc_mesh: ProcMesh, master_addr: str | None = None, master_port: int | None = None, use_ipaddr: object = None
) -> None:
    """Set torchrun's variables, for coroutines; see `setup_torch_elastic_env`."""
    _check_master(master_addr, master_port)
    actors, first = _spawn(proc_mesh)
    if master_addr is None:
        master_addr, master_port = await first.get_host_port.call_one(use_ipaddr)
    await actors.setup_env.call(master_addr, master_port)
    await actors.stop()


def _check_master(master_addr: str | None, master_port: int | None) -> None:
    """Raises: UsageError."""
    if (master_addr is None) != (master_port is None):
        raise UsageError("give master_addr and master_port both, or neither.")
