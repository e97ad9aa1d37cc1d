"""Monarch's ways to hosts that were started elsewhere, and to say how processes reach each other."""

from __future__ import annotations

from collections.abc import Sequence

from meshbook.concurrency.future import Future
from meshbook.errors import UsageError
from meshbook.launchers.invitations.server_way import attach_through
from meshbook.launchers.invitations.worker_loop import (
    run_worker_loop_forever,
    run_worker_loop_until_shutdown,
    start_worker_loop_forever,
)
from meshbook.launchers.invitations.worker_ticket import refuse_tls
from meshbook.launchers.workers import WorkersLauncher
from meshbook.mesh.driven import start_hosts
from meshbook.mesh.host_mesh import HostMesh
from meshbook.mesh.jobs import HOSTS

__all__ = [
    "attach",
    "attach_to_workers",
    "run_worker_loop_forever",
    "run_worker_loop_until_shutdown",
    "start_worker_loop_forever",
]


def attach(address: str) -> None:
    """Reach workers through the one that listens at ``address``, for a program that they cannot reach.

    From now on what `attach_to_workers` names is found by that worker, as it knows machines, and all that agents and
    this program say to each other goes through it; it must have this program's ticket. Waits for up to a minute until
    it listens. Once more with one address does nothing. Meshes that another program has left: `meshbook.attach`.
    Raises: UsageError, also for another address than before; SpawnError.
    """
    if not isinstance(address, str) or "://" not in address:
        raise UsageError(
            f'attach takes the address of a worker, as in "tcp://gateway:4444", not {address!r}. '
            "Meshes that another program has left: meshbook.attach(session)."
        )
    attach_through(address)


def attach_to_workers(
    *, private_key: object = None, ca: object, workers: Sequence[str | Future[str]], name: str | None = None
) -> HostMesh:
    """The machines where `run_worker_loop_forever` listens at these addresses, along the axis ``hosts``; at once.

    `HostMesh.initialized` is done when all have answered: a worker may be started within the next minute. They must
    have the ticket of this program (`meshbook.launchers.invitations.worker_ticket`). name: accepted, since Monarch has
    it. Raises: UsageError.
    """
    refuse_tls(ca, private_key)
    if isinstance(workers, str | Future) or not workers:
        raise UsageError(f'workers is a list of addresses, as in ["tcp://nodeA:4444"]; got {workers!r}.')
    return start_hosts({HOSTS: len(workers)}, WorkersLauncher(workers)).without_waiting()
