"""How the processes of a mesh are, and where: states, hosts, deaths, logs, stacks, prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from meshbook.actor.listing import ActorState
from meshbook.calls.call import OpenCall
from meshbook.calls.rank_state import State, StatusAnswer, Unresponsive
from meshbook.calls.stopped import StoppedRanks
from meshbook.controller.host_state import HostState
from meshbook.controller.inspection import LogFollower, StackQuestion, read_logs
from meshbook.controller.queries import ask_rank, look
from meshbook.errors import (
    RankDeath,
)
from meshbook.mesh.proc_view import ProcView
from meshbook.sessions.folder import SavedLauncher, SavedMesh
from meshbook.shape.members import Point
from meshbook.stacks.mesh_stacks import MeshStacks
from meshbook.system.devices import GpuUse
from meshbook.wire.messages import AtPrompt


class RankStatus(NamedTuple):
    """One rank, as `ProcMesh.status` tells it."""

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
    """What a busy rank is doing; where one in pdb stands; why a dead one ended, or a silent one does not answer."""
    rss_bytes: int
    moved_bytes: int = 0
    """Payload that the rank's process groups have moved since it began (`meshbook.groups.group`)."""
    gpu: GpuUse | None = None
    kept_bytes: int = 0
    """What the frames of its last exception hold, which are kept for a post-mortem; see `ProcMesh.free`."""
    in_collective: bool = False
    """Whether what it does is a collective, or another function of torch.distributed."""


class HostPart(NamedTuple):
    """Members of a mesh on one host."""

    name: str
    is_here: bool
    """Whether it is the machine that we run on."""
    ranks: tuple[int, ...]


class ProcStates(ProcView):
    """Base of ProcMesh: what is known of its members, and what they answer while they are busy."""

    @property
    def lost(self) -> tuple[int, ...]:
        """The members that have ended without being told to, in order."""
        return tuple(rank for rank in self.ranks if rank in self._mesh.lost)

    @property
    def deaths(self) -> tuple[RankDeath, ...]:
        """How these have ended, in order."""
        return tuple(death for rank in self.lost for death in self._mesh.lost[rank].deaths)

    @property
    def busy(self) -> tuple[int, ...]:
        """The members that have a call to answer, in order."""
        return self._waiting_in(lambda call: True)

    @property
    def interrupted(self) -> tuple[int, ...]:
        """The members whose main thread runs, or has yet to run, a call that was interrupted, in order."""
        return self._waiting_in(lambda call: call.interrupts > 0 and not call.mailbox)

    def _waiting_in(self, is_meant: Callable[[OpenCall], bool]) -> tuple[int, ...]:
        calls = [call for call in self._controller.open_calls(self._mesh.id) if is_meant(call)]
        return tuple(rank for rank in self.ranks if any(rank in call.waiting for call in calls))

    @property
    def called_at(self) -> float:
        """When a call to any rank of the mesh was last made, by the monotonic clock; now, while one runs."""
        return time.monotonic() if self._controller.open_calls(self._mesh.id) else self._mesh.called_at

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names, in rank order."""
        return tuple(host.name for host in self._mesh.hosts)

    def host_of(self, rank: int) -> str:
        """The name of the host where a base rank is."""
        return self._mesh.host_of(rank).name

    @property
    def launchers(self) -> tuple[SavedLauncher, ...]:
        """Who has started these hosts."""
        return tuple(host.launcher for host in self._mesh.hosts)

    @property
    def saved(self) -> SavedMesh:
        """What lists of meshes say of it; see `meshbook.sessions`."""
        return self._mesh.saved

    @property
    def env(self) -> dict[str, str]:
        """What was asked for in the environment of the members."""
        return dict(self._mesh.recipe.asked_environment)

    @property
    def cwd(self) -> str:
        """The folder that was asked for; empty for the one of the program, or of its host."""
        return self._mesh.recipe.asked_cwd

    @property
    def suspects(self) -> dict[str, str]:
        """The hosts of the mesh that are silent though they are not known to have ended, and since when.

        Their ranks answer again as soon as they do.
        """
        return {host.name: host.suspicion for host in self._mesh.hosts if host.suspicion}

    def by_host(self) -> list[HostPart]:
        """The members on each host, in rank order."""
        parts: dict[HostState, list[int]] = {}
        for rank in self.ranks:
            parts.setdefault(self._mesh.host_of(rank), []).append(rank)
        return [HostPart(host.name, host.shares_memory, tuple(ranks)) for host, ranks in parts.items()]

    @property
    def device(self) -> str:
        """The kind of device that the members have: ``cpu`` or ``cuda``; waits until they are there."""
        if self.alive:
            self._mesh.await_arrival()
        return self._device

    @property
    def _device(self) -> str:
        return next((worker.device.partition(":")[0] for worker in self._mesh.workers.values()), "cpu")

    def log_paths(self) -> dict[int, str]:
        """Where each member's log lies on its host."""
        return {rank: self._mesh.workers[rank].log_path for rank in self.ranks if rank in self._mesh.workers}

    def logs(self, lines: int = 20, *, containing: str = "") -> dict[int, str]:
        """The last lines that each member wrote, also of members that have ended; of silent hosts none.

        containing: only lines with this text, among the last 256 kB of each.
        """
        self._present()
        return read_logs(self._controller.questions, self._mesh, self._members, lines, containing)

    def follow_logs(self, lines: int = 20) -> LogFollower:
        """What members write from now on, and the last ``lines`` lines before it."""
        return LogFollower(self._controller.questions, self._mesh, self._present()._members, lines)

    def await_printed(self, on_come: Callable[[], object], timeout_s: float) -> None:
        """Call ``on_come`` when all has come that members have printed by now, or ``timeout_s`` is over.

        It is called on the thread that brings the output, so it must not wait.
        """
        self._controller.questions.await_printed(self._mesh, self._members.ranks(), on_come, timeout_s)

    def where(self) -> dict[int, str]:
        """What each member's main thread is doing, busy or not."""
        self._present()
        return self._controller.where(self._mesh.id, self._members.ranks())

    def stacks(self, *, all_threads: bool = False, native: bool = False, timeout_s: float = 3.0) -> MeshStacks:
        """The Python stacks of the members, busy, blocked or stopped; and in words who holds the others up.

        all_threads: not only the main thread. native: with the frames of native code, which py-spy reads.
        timeout_s: what ranks that cannot answer may take to be read from outside.
        """
        self._mesh.check_usable()
        question = StackQuestion(all_threads, native, timeout_s)
        return self._controller.stacks(self._mesh, self._present().members, question)

    def status(self) -> list[RankStatus]:
        """Ask each member for its state now."""
        self._mesh.check_usable()
        self._present()
        answers = look(self._controller.questions, self._mesh, self._members.ranks(), "status", StatusAnswer, 0.5)
        return [self._status_of(rank, answers[rank]) for rank in self._members.ranks()]

    def _status_of(self, rank: int, answer: StatusAnswer | Unresponsive) -> RankStatus:
        worker, lost = self._mesh.workers.get(rank), self._mesh.lost.get(rank)
        host, pid, device = (worker.host.name, worker.pid, worker.device) if worker else ("?", 0, "?")
        point = self._members.point(rank)
        if lost is not None:
            return RankStatus(rank, point, host, pid, device, "dead", 0.0, lost.cause, 0)
        if isinstance(answer, Unresponsive):
            return RankStatus(rank, point, host, pid, device, answer.state, 0.0, str(answer), 0)
        known = (answer.busy_s, answer.where, answer.rss_bytes, answer.moved_bytes, answer.gpu, answer.kept_bytes)
        return RankStatus(rank, point, host, pid, device, answer.state, *known, answer.in_collective)

    def actors(self) -> list[ActorState]:
        """What the members' actors are doing, now; ordered by name, then by rank."""
        states = [state for told in self.ask_for(list[ActorState], "actors").values() for state in told]
        return sorted(states, key=lambda state: (state.name, state.mailbox, state.rank))

    @property
    def stopped_ranks(self) -> StoppedRanks:
        """The ranks of the mesh that wait at a prompt of pdb, as far as they have told of it."""
        return self._mesh.stopped_ranks

    def stopped(self) -> tuple[int, ...]:
        """The members that wait at a prompt of pdb, also those that stopped under an earlier controller."""
        prompts = self.ask_for(AtPrompt, "pdb_prompt")
        self._controller.merge_prompts(self._mesh, prompts)
        return tuple(self.stopped_ranks.of(self.ranks))

    def type_line(self, line: str, prompts: Mapping[int, int]) -> None:
        """Type a line at prompts. prompts: rank to the number of its prompt; where it has gone on, nothing happens."""
        for number in set(prompts.values()):
            ranks = [rank for rank, its in prompts.items() if its == number]
            self._controller.questions.tell(self._mesh, ranks, ask_rank("pdb_command", number, line))
