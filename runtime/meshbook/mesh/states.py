"""The state of a mesh's processes: hosts, deaths, calls under way, prompts; known here, or asked of busy ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from meshbook.actor.identity import ActorState
from meshbook.calls.call import OpenCall
from meshbook.calls.rank_state import State, StatusAnswer, StoppedRanks, Unresponsive
from meshbook.checkpoint.folder import Saved, SavingState
from meshbook.controller.host_state import HostState
from meshbook.controller.queries import LogFollower, ask_rank, look
from meshbook.curves.series import Metrics
from meshbook.errors import RankDeath
from meshbook.formatting import group_ranks
from meshbook.mesh.proc_view import ProcView, ask
from meshbook.sessions.folder import SavedLauncher, SavedMesh
from meshbook.shape.members import Point
from meshbook.system.devices import GpuUse
from meshbook.wire.messages import AtPrompt

T = TypeVar("T")

HOST_ANSWER_S = 2.0
"""The longest wait for a rank to answer for its host; the rank may have just started."""


class RankStatus(NamedTuple):
    """The state of one rank, as `ProcMesh.status` reports it."""

    rank: int
    point: Point
    host: str
    pid: int
    device: str
    state: State
    """``idle``, ``busy``, ``pdb`` (at a prompt), ``stopped`` (by SIGSTOP, say), ``silent`` (its control thread did not
    answer) or ``dead``."""
    busy_s: float
    where: str
    """The place of a busy rank or of one in pdb; the reason why a dead one ended, or a silent one does not answer."""
    rss_bytes: int
    moved_bytes: int = 0
    """Payload that the rank's process groups have moved since it began (`meshbook.groups.group`)."""
    gpu: GpuUse | None = None
    kept_bytes: int = 0
    """Memory held by the frames of its last exception, which are kept for a post-mortem; see `ProcMesh.free`."""
    in_collective: bool = False
    """Whether the rank is in a collective, or another function of torch.distributed."""


class HostPart(NamedTuple):
    """The members of a mesh on one host."""

    name: str
    is_here: bool
    """Whether the host is the machine that we run on."""
    ranks: tuple[int, ...]


# ---- known here ---------------------------------------------------------------------------------------------------


def deaths(procs: ProcView) -> tuple[RankDeath, ...]:
    """Return how members have ended without being told to, in rank order."""
    lost = procs._mesh.lost
    return tuple(death for rank in procs.ranks if rank in lost for death in lost[rank].deaths)


def busy(procs: ProcView) -> tuple[int, ...]:
    """Return the members that have a call to answer, in order."""
    return _waiting_in(procs, lambda call: True)


def interrupted(procs: ProcView) -> tuple[int, ...]:
    """Return the members whose main thread runs, or has yet to run, a call that was interrupted, in order."""
    return _waiting_in(procs, lambda call: call.interrupts > 0 and not call.mailbox)


def _waiting_in(procs: ProcView, is_meant: Callable[[OpenCall], bool]) -> tuple[int, ...]:
    calls = [call for call in procs._controller.open_calls(procs._mesh.id) if is_meant(call)]
    return tuple(rank for rank in procs.ranks if any(rank in call.waiting for call in calls))


def ahead(procs: ProcView, *, is_sent: bool = True) -> dict[str, list[int]]:
    """Return the calls that another waits behind, by their names, each with the members on which it runs.

    is_sent: whether that other call was made already.
    """
    calls = [call for call in procs._controller.open_calls(procs._mesh.id) if not call.mailbox]
    lines = {rank: [call.what for call in calls if rank in call.waiting] for rank in procs.ranks}
    return group_ranks((rank, line[0]) for rank, line in lines.items() if len(line) > is_sent)


def called_at(procs: ProcView) -> float:
    """Return when a call to any rank of the mesh was last made, by the monotonic clock; now, while one runs."""
    return time.monotonic() if procs._controller.open_calls(procs._mesh.id) else procs._mesh.called_at


def is_grouped(procs: ProcView) -> bool:
    """Whether the ranks form process groups by themselves."""
    return procs._mesh.grouped


def device_of(procs: ProcView) -> str:
    """Return the kind of the members' devices: ``cpu`` or ``cuda``; waits until the processes are there."""
    if procs.alive:
        procs._mesh.await_arrival()
    return known_device(procs)


def known_device(procs: ProcView) -> str:
    """Return the kind of the members' devices as far as it is known: ``cpu`` before the processes are there."""
    return next((worker.device.partition(":")[0] for worker in procs._mesh.workers.values()), "cpu")


def host_of(procs: ProcView, rank: int) -> str:
    """Return the name of the host of a base rank."""
    return procs._mesh.host_of(rank).name


def by_host(procs: ProcView) -> list[HostPart]:
    """Return the members on each host, in rank order."""
    parts: dict[HostState, list[int]] = {}
    for rank in procs.ranks:
        parts.setdefault(procs._mesh.host_of(rank), []).append(rank)
    return [HostPart(host.name, host.shares_memory, tuple(ranks)) for host, ranks in parts.items()]


def suspects(procs: ProcView) -> dict[str, str]:
    """Return the hosts of the mesh that are silent though they are not known to have ended, and since when.

    Their ranks answer again as soon as the hosts do.
    """
    return {host.name: host.suspicion for host in procs._mesh.hosts if host.suspicion}


def launchers_of(procs: ProcView) -> tuple[SavedLauncher, ...]:
    """Return the launcher of each host of the mesh."""
    return tuple(host.launcher for host in procs._mesh.hosts)


def saved_mesh(procs: ProcView) -> SavedMesh:
    """Return the record by which lists of sessions show the mesh; see `meshbook.sessions`."""
    return procs._mesh.saved


def asked_for(procs: ProcView) -> tuple[dict[str, str], str]:
    """Return the environment and the folder that were asked for; no folder for that of the program or the host."""
    recipe = procs._mesh.recipe
    return dict(recipe.asked_environment), recipe.asked_cwd


def metrics(procs: ProcView) -> Metrics:
    """Return the scalars that ranks of the whole mesh have logged."""
    return procs._mesh.metrics


def stopped_ranks(procs: ProcView) -> StoppedRanks:
    """Return the record of the mesh's ranks that wait at a prompt of pdb, as far as they have reported it."""
    return procs._mesh.stopped_ranks


# ---- asked of ranks -----------------------------------------------------------------------------------------------


def status(procs: ProcView) -> list[RankStatus]:
    """Ask each member for its state now."""
    procs._mesh.check_usable()
    ranks = procs._present().ranks
    answers = look(procs._controller.questions, procs._mesh, ranks, "status", StatusAnswer, 0.5)
    return [_status_of(procs, rank, answers[rank]) for rank in ranks]


def _status_of(procs: ProcView, rank: int, answer: StatusAnswer | Unresponsive) -> RankStatus:
    worker, lost = procs._mesh.workers.get(rank), procs._mesh.lost.get(rank)
    host, pid, device = (worker.host.name, worker.pid, worker.device) if worker else ("?", 0, "?")
    point = procs._members.point(rank)
    if lost is not None:
        return RankStatus(rank, point, host, pid, device, "dead", 0.0, lost.cause, 0)
    if isinstance(answer, Unresponsive):
        return RankStatus(rank, point, host, pid, device, answer.state, 0.0, str(answer), 0)
    known = (answer.busy_s, answer.where, answer.rss_bytes, answer.moved_bytes, answer.gpu, answer.kept_bytes)
    return RankStatus(rank, point, host, pid, device, answer.state, *known, answer.in_collective)


def actors(procs: ProcView) -> list[ActorState]:
    """Return the present activity of the members' actors, ordered by name, then by rank."""
    found = [state for each in ask(procs, list[ActorState], "actors").values() for state in each]
    return sorted(found, key=lambda state: (state.name, state.mailbox, state.rank))


def where(procs: ProcView) -> dict[int, str]:
    """Return the place of each member's main thread, busy or not."""
    procs._present()
    return procs._controller.where(procs._mesh.id, procs._members.ranks())


def addresses(procs: ProcView) -> list[tuple[str, str]]:
    """Ask each host for the address at which others reach it for collectives: ``("nodeA", "10.0.0.5 (eth0)")``."""
    found = ask_hosts(procs, "way", str) if len(procs._mesh.hosts) > 1 else []
    return [(host, address) for host, address in found if address]


def ask_hosts(procs: ProcView, question: str, kind: type[T]) -> list[tuple[str, T]]:
    """Ask the first rank of each host; returns (host name, answer) of the hosts that answer in time.

    Several hosts may have the same name.
    """
    mesh = procs._mesh
    firsts = {host: mesh.placement.index(host) for host in mesh.hosts}
    asked = ask_rank(question)
    answers = procs._controller.questions.gather(mesh, list(firsts.values()), asked, kind, HOST_ANSWER_S)
    return [(host.name, answers[rank]) for host, rank in firsts.items() if rank in answers]


def follow_logs(procs: ProcView, lines: int = 20) -> LogFollower:
    """Follow the logs of the members from now on, after the last ``lines`` lines of each."""
    return LogFollower(procs._controller.questions, procs._mesh, procs._present()._members, lines)


def await_printed(procs: ProcView, on_come: Callable[[], object], timeout_s: float) -> None:
    """Call ``on_come`` when all output that members have printed by now has come, or after ``timeout_s``.

    It is called on the thread that brings the output, so it must not wait.
    """
    procs._controller.questions.await_printed(procs._mesh, procs._members.ranks(), on_come, timeout_s)


# ---- prompts of pdb -----------------------------------------------------------------------------------------------


def stopped(procs: ProcView) -> tuple[int, ...]:
    """Ask which members wait at a prompt of pdb, also members that stopped under an earlier controller."""
    prompts = ask(procs, AtPrompt, "pdb_prompt")
    procs._controller.merge_prompts(procs._mesh, prompts)
    return tuple(procs._mesh.stopped_ranks.of(procs.ranks))


def type_line(procs: ProcView, line: str, prompts: Mapping[int, int]) -> None:
    """Type a line at prompts. prompts: rank to the number of its prompt; a rank that has gone on ignores the line."""
    for number in set(prompts.values()):
        ranks = [rank for rank, its in prompts.items() if its == number]
        procs._controller.questions.tell(procs._mesh, ranks, ask_rank("pdb_command", number, line))


def last_save(procs: ProcView) -> Saved | None:
    """Return the last save that a living rank of the mesh has taken part in; None where there is none."""
    question, ranks = ask_rank("saving", ""), range(procs._mesh.extent.nelements)
    told = procs._controller.questions.gather(procs._mesh, ranks, question, SavingState, HOST_ANSWER_S)
    found = [Saved(Path(state.path), state.manifest) for state in told.values() if state.manifest is not None]
    return max(found, key=lambda saved: saved.manifest.saved_at, default=None)
