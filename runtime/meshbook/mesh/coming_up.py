"""The processes of a new mesh come up: workers, process groups, bootstrap; while the caller waits, or aside.

Monarch's programs have it aside: they hold the mesh already (`meshbook.controller.startup`). Hosts that differ in
their versions or clocks are warned of.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import TypeVar

from meshbook.actor.errors import ActorError, ProcsNotStartedError
from meshbook.actor.router import router_for
from meshbook.concurrency.background import run_in_background
from meshbook.controller.controller import Controller
from meshbook.controller.startup import MeshArrival
from meshbook.errors import CallFailed, FailureKind, SpawnError, WorkerLost
from meshbook.mesh.actor_router import ControllerRouter
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.rank_calls import join_ranks
from meshbook.mesh.start_progress import StartProgress
from meshbook.mesh.states import ask_hosts


def bring_up(
    controller: Controller, procs: ProcMesh, bootstrap: Callable[[], object] | None, progress: StartProgress
) -> None:
    """Start the workers of a new mesh and form their group. Raises: SpawnError; then none of them is left."""
    try:
        _start(controller, procs, bootstrap, progress)
    except BaseException:
        with contextlib.suppress(OSError):  # what is wrong is told already
            controller.stop_mesh(procs._mesh, 0.0)
        raise


def bring_up_aside(
    controller: Controller,
    procs: ProcMesh,
    bootstrap: Callable[[], object] | None,
    progress: StartProgress,
    await_hosts: Callable[[], object],
) -> None:
    """Start them on a thread aside; an error that keeps them is told where people ask, and to watchers."""
    mesh = procs._mesh
    arrival = mesh.arrival = MeshArrival()
    controller.expect_mesh(mesh)

    def work() -> None:
        arrival.thread = threading.current_thread()
        try:
            await_hosts()
            _start(controller, procs, bootstrap, progress)
        except BaseException as error:
            if not arrival.is_over:  # else people have stopped it
                told = ProcsNotStartedError(procs.name, str(error))
                told.__cause__ = error
                router = router_for(controller.folder.id)  # first: who is told may shut down at once
                assert isinstance(router, ControllerRouter)
                controller.end_arrival(arrival, told)
                router.on_not_started(procs, told, error.__cause__)
            controller.stop_mesh(mesh, 0.0)
            if mesh.owns_hosts:
                controller.stop_hosts(mesh.hosts, 5.0)
        else:
            controller.end_arrival(arrival)
        arrival.thread = None

    run_in_background(work)


def _start(
    controller: Controller, procs: ProcMesh, bootstrap: Callable[[], object] | None, progress: StartProgress
) -> None:
    """Wait for the workers, form their groups and run ``bootstrap``. Raises: SpawnError."""
    mesh = procs._mesh
    try:
        progress.await_workers(controller.recruit(mesh))
        warn_of_differences(procs)
        progress.await_call(join_ranks(procs), "forming process groups")
        if bootstrap is not None:
            try:
                progress.await_call(procs.execute(bootstrap), "running the bootstrap")
            except (CallFailed, WorkerLost) as error:
                why = ActorError(error.failures, f"{procs.name}.bootstrap") if isinstance(error, CallFailed) else error
                why.__cause__ = error.__cause__
                raise SpawnError(f"the workers started, but their bootstrap failed: {error}") from why
    except (SpawnError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise SpawnError(f"the workers started, but their process group did not form: {_said_by(error)}") from error
    mesh.joined = not mesh.lost
    controller.folder.save_mesh(mesh.id, mesh.saved)
    controller.submit(mesh.tell_up)


def _said_by(error: BaseException) -> str:
    """Return why the ranks did not start; the bare text of a SpawnError where all ranks give the same."""
    if isinstance(error, CallFailed):
        said = {failure.evalue for failure in error.failures}
        if len(said) == 1 and error.failures[0].kind is FailureKind.NOT_FORMED:
            return said.pop()
    return str(error)


CLOCK_S = 5.0
"""Clocks that differ by less are not reported."""

T = TypeVar("T")


def warn_of_differences(procs: ProcMesh) -> None:
    """Warn if hosts differ in versions that matter between ranks. Hosts with the notebook's own environment do not."""
    if all(host.shares_environment for host in procs._mesh.hosts):
        return
    began = time.time()
    clocks = dict(ask_hosts(procs, "clock", float))
    if wrong := describe_clocks(clocks, began, time.time()):
        warnings.warn(f"{wrong}. Times in logs and of files differ by that; certificates may fail", stacklevel=4)
    told = dict(ask_hosts(procs, "versions", dict[str, str]))
    if difference := describe_difference(told):
        warnings.warn(f"the hosts differ: {difference}. Between them tensors and collectives may fail", stacklevel=4)


def describe_clocks(clocks: Mapping[str, float], began: float, ended: float) -> str:
    """Return which clocks are wrong and by how much, as in ``the clock of b is 62 s behind ours``; empty if none is.

    clocks: the time that each host reported between ``began`` and ``ended``.
    """
    off = {host: min(0.0, told - began) + max(0.0, told - ended) for host, told in clocks.items()}
    parts = [
        f"the clock of {host} is {abs(by):.0f} s {'behind' if by < 0 else 'ahead of'} ours"
        for host, by in off.items()
        if abs(by) > CLOCK_S
    ]
    return "; ".join(parts)


def describe_difference(versions: Mapping[str, Mapping[str, str]]) -> str:
    """Return the versions that differ between hosts, as in ``torch 2.13.0 on a, b and 2.12.0 on c``; empty if none do.

    versions: for each host, versions by the name of the package.
    """
    parts = []
    for thing in dict.fromkeys(name for told in versions.values() for name in told):
        hosts: dict[str, list[str]] = {}
        for host, told in versions.items():
            hosts.setdefault(told.get(thing, "none"), []).append(host)
        if len(hosts) > 1:
            parts.append(f"{thing} " + " and ".join(f"{version} on {', '.join(on)}" for version, on in hosts.items()))
    return "; ".join(parts)
