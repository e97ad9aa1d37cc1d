"""Allocations of Slurm, and the clients that ask for them and start agents there (`meshbook.launchers.slurm`)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from meshbook.errors import SpawnError
from meshbook.launchers.engines.client import END_S, Client
from meshbook.launchers.engines.commands import answer_of, describe_failure, program_of
from meshbook.launchers.engines.slurm_log import StepLog
from meshbook.launchers.starting.head_start import open_log
from meshbook.system.interfaces import address_towards, own_address
from meshbook.system.processes import start_time
from meshbook.wire.ticket import Ticket, elsewhere, encode_tickets

JOB_NAME = "meshbook"
ANSWER_S = 10.0
"""How long commands of Slurm may take to answer."""
PIPE_BYTES = 1 << 20
"""What a pipe may hold: the tickets of some 2,000 hosts."""
LOOK_S = 2.0
"""How often the queue is looked at."""

_GUARD = """
(cat "$1" >/dev/null 2>&1; read -r _ _ _ parent _ </proc/self/stat; [ "$parent" = $$ ] && kill $$) &
export MESHBOOK_GUARD=$!
shift
exec "$@"
"""
"""What becomes salloc: while that is in the queue it ends with us, who hold the other end of the pipe $1."""


class SlurmClient(Client[StepLog]):
    """A salloc or srun, and what it and its tasks say. held: our end of a pipe by which it knows of us."""

    def __init__(
        self, log: Path, pid: int, started: int, process: subprocess.Popen[bytes] | None = None, held: int = -1
    ) -> None:
        super().__init__(log, pid, started, process)
        self._held = held

    def _read(self, text: str) -> StepLog:
        return StepLog.read(text)

    @property
    def name(self) -> str:
        return "salloc" if self.said.owned else "srun"

    def give(self, tickets: Sequence[Ticket]) -> None:
        """Give the agents their tickets, which lie with it until there are agents."""
        assert self._process is not None and self._process.stdin is not None
        fcntl.fcntl(self._process.stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)  # nobody reads while it is in the queue
        self.write(encode_tickets(tickets) + b"\n")

    def close_stdin(self) -> None:
        super().close_stdin()
        if self._held >= 0:
            os.close(self._held)
            self._held = -1


class Allocation:
    """Nodes of Slurm, ours or not, and the clients that start agents there. log: of the first of these."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.hosts: set[str] = set()
        """The ids of those that are there; with the last one it ends."""
        self._clients: dict[Path, SlurmClient] = {}
        self._looked, self._queue = 0.0, ""
        self.sizes = "see sinfo"
        """How many nodes were asked for, and how many there are, in words."""
        self.address = ""
        """What its nodes reach, as in `Launcher.transport`, once that was found out."""

    @property
    def job(self) -> str:
        """Its number; empty until Slurm has said it."""
        return self._first.said.job

    @property
    def is_ours(self) -> bool:
        """Whether it was asked for here, or is asked for."""
        return self._first.said.owned or not self.job

    def nodes(self) -> set[str]:
        """Those that it has, and that answer; none once it has ended."""
        if not self.job:
            return set()
        try:
            state, _, names = ask("squeue", "-h", "-j", self.job, "-o", "%T|%N").strip().partition("|")
            listed = ask("sinfo", "-h", "-N", "-n", names, "-o", "%N %T") if state == "RUNNING" else ""
        except SpawnError:  # it has ended, or whoever starts a host says what is wrong
            return set()
        told = (line.split() for line in listed.splitlines())
        return {name for name, state in told if not (state.startswith(("down", "fail")) or state.endswith("*"))}

    @property
    def _first(self) -> SlurmClient:
        return self._clients.get(self.log) or SlurmClient(self.log, 0, 0)

    def start(self, command: list[str], tickets: Sequence[Ticket], log: Path, job: str) -> SlurmClient:
        """Start a client. job: where the allocation is there already. Raises: OSError, SpawnError."""
        program, (watched, held) = program_of("Slurm", command[0]), os.pipe2(os.O_CLOEXEC)
        guard = [] if job else ["sh", "-c", _GUARD, "meshbook", f"/proc/self/fd/{watched}"]
        try:
            with open_log(log) as output:
                if job:
                    output.write(f"meshbook: job {job}\n".encode())
                    output.flush()
                process = subprocess.Popen(
                    [*guard, program, *command[1:]],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=[watched] if guard else [],
                )
        except BaseException:
            os.close(held)
            raise
        finally:
            os.close(watched)
        client = self._clients[log] = SlurmClient(log, process.pid, start_time(process.pid) or 0, process, held)
        client.give([elsewhere(ticket) for ticket in tickets])
        return client

    def find(self, log: Path, pid: int, started: int) -> SlurmClient:
        """The client that has this log, of another controller."""
        return self._clients.setdefault(log, SlurmClient(log, pid, started))

    def look_at_queue(self) -> str:
        """Where its job is in the queue, and why; empty once it runs."""
        said = self._first.said
        if said.is_granted:
            return ""
        if time.monotonic() - self._looked > LOOK_S:
            with contextlib.suppress(SpawnError):
                state, _, why = ask("squeue", "-h", "-j", said.job, "-o", "%T|%r").strip().partition("|")
                self._queue = f"job {said.job} is {state.lower()} in the queue of Slurm ({why})" if said.job else ""
            self._looked = time.monotonic()
        return self._queue or "salloc asks Slurm for nodes"

    def leave(self, host_id: str, client: SlurmClient, timeout_s: float) -> None:
        """A host has ended, or is to; without hosts everything ends that was started here, within the time."""
        self.hosts.discard(host_id)
        if not self.hosts:
            self._end(timeout_s)
        elif client is not self._first:
            client.end(timeout_s)

    def _end(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        first = self._first.said
        if first.owned and first.job and timeout_s < END_S:
            self._cancel()
        for client in reversed(self._clients.values()):
            client.end(max(0.0, deadline - time.monotonic()))
        if self._first.said.owned and self.job and "Relinquishing" not in self.log.read_text(errors="replace"):
            self._cancel()

    def _cancel(self) -> None:
        """Cancel the job, which is ours."""
        with contextlib.suppress(SpawnError):  # it has ended
            ask("scancel", "--quiet", self.job)


_allocations: weakref.WeakValueDictionary[Path, Allocation] = weakref.WeakValueDictionary()


def allocation_of(log: Path) -> Allocation:
    """That whose first client has this log."""
    found = _allocations.get(log)
    if found is None:
        found = _allocations[log] = Allocation(log)
    return found


class NoClusterError(SpawnError):
    """The commands of Slurm are here, and belong to no cluster."""


def ask(*command: str, timeout_s: float = ANSWER_S) -> str:
    """What a command of Slurm says. Raises: SpawnError; NoClusterError where it has nobody to ask."""
    answer = answer_of("Slurm", *command, timeout_s=timeout_s)
    if "Could not establish a configuration source" in answer.stderr:
        raise NoClusterError(
            f"{command[0]} is here, but finds no Slurm cluster: there is no slurm.conf (SLURM_CONF can name one), and "
            "DNS names no server of one"
        )
    if answer.returncode:
        raise SpawnError(describe_failure(answer))
    return answer.stdout


def describe_nodes(asked: int) -> str:
    """Say how many nodes are asked for, and how many each partition has. Raises: SpawnError."""
    there = ", ".join(ask("sinfo", "-h", "-o", "%R has %D").splitlines())
    return f"hosts={asked}, and of the partitions {there}; see sinfo"


def address_for_nodes() -> str:
    """The address of this machine that leads to the nodes. Raises: SpawnError if Slurm does not answer."""
    found = []
    for node in list(dict.fromkeys(ask("sinfo", "-h", "-N", "-o", "%o").split()))[:8]:
        with contextlib.suppress(OSError):
            found.append(address_towards(node))
    far = [address for address in found if not address.startswith("127.") and address != "::1"]
    return next(iter(far or found), own_address())
